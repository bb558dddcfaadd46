package deploy_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/deploy"
)

const good = `
model: m
max_tokens: 1024
align_tokens: 128
groups:
  - {name: sliding, rule: window, params: {window: 64}, block_tokens: 16, chunk_blocks: 2, layers: 2, kv_heads: 4, head_dim: 8, dtype: bf16}
  - {name: full, rule: full, block_tokens: 32, chunk_blocks: 2, layers: 3, kv_heads: 4, head_dim: 8, dtype: fp32}
`

func TestDefaultsAndSizes(t *testing.T) {
	d, err := deploy.Parse("dir/d.yaml", []byte(good))
	require.NoError(t, err)
	require.Equal(t, "dir", d.Dir())
	require.EqualValues(t, 16, d.HashTokens, "the greatest common divisor of the blocks")
	require.Equal(t, []string{"producer", "consumer"}, d.Roles)
	require.Equal(t, []string{"pd", "probe"}, d.Legs)
	require.EqualValues(t, 32, d.Groups[0].ChunkTokens())
	require.EqualValues(t, 2*2*16*4*8*2, d.Groups[0].BlockBytes())
	require.EqualValues(t, 3*2*32*4*8*4*2, d.Groups[1].ChunkBytes())
	require.Equal(t, 1, d.Group("full"))
	require.Equal(t, -1, d.Group("none"))
}

// TestDigestIsOfTheContents: spelling does not count, every value does.
func TestDigestIsOfTheContents(t *testing.T) {
	base, err := deploy.Parse("a.yaml", []byte(good))
	require.NoError(t, err)
	same, err := deploy.Parse("b/c.yaml", []byte("# a comment\n"+strings.Replace(good, "max_tokens: 1024", "hash_tokens: 16\nlegs: [pd, probe]\nmax_tokens: 0x400", 1)))
	require.NoError(t, err)
	require.Equal(t, base.Digest(), same.Digest())
	for _, change := range [][2]string{{"model: m", "model: n"}, {"1024", "1025"}, {"window: 64", "window: 65"}, {"layers: 3", "layers: 4"}, {"align_tokens: 128", "align_tokens: 0"}} {
		other, err := deploy.Parse("a.yaml", []byte(strings.Replace(good, change[0], change[1], 1)))
		require.NoError(t, err)
		require.NotEqual(t, base.Digest(), other.Digest(), change)
	}
}

func TestLayout(t *testing.T) {
	a, err := deploy.Parse("a.yaml", []byte(good))
	require.NoError(t, err)
	// Rules, parameters, alignment and caps may differ between two sides.
	b, err := deploy.Parse("a.yaml", []byte(strings.NewReplacer("window: 64", "window: 32", "align_tokens: 128", "align_tokens: 0\nmax_store_tokens: 9").Replace(good)))
	require.NoError(t, err)
	require.Equal(t, a.Layout().Digest(), b.Layout().Digest())
	require.Empty(t, a.Layout().Diff(b.Layout()))
	c, err := deploy.Parse("a.yaml", []byte(strings.NewReplacer("layers: 3", "layers: 4", "model: m", "model: n").Replace(good)))
	require.NoError(t, err)
	require.NotEqual(t, a.Layout().Digest(), c.Layout().Digest())
	require.Equal(t, []string{"model: here m, there n", "groups[1].layers: here 3, there 4"}, a.Layout().Diff(c.Layout()))
	d := a.Layout()
	d.Groups = d.Groups[:1]
	require.Contains(t, a.Layout().Diff(d), "groups[1].name: here full, there nothing")
	require.Contains(t, d.Diff(a.Layout()), "groups[1].name: here nothing, there full")
}

func TestRefusedFiles(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"model: m", "model: ''", "d.yaml: model is missing; give the model a name"},
		{"max_tokens: 1024", "max_tokens: 0", "d.yaml: max_tokens is 0; it must be 1 to 1073741824"},
		{"max_tokens: 1024", "max_token: 1024", `d.yaml:3: unknown key "max_token"; did you mean "max_tokens"? known here: model, max_tokens, hash_tokens, align_tokens, groups, policies, roles, legs, max_store_tokens, engine, engine_params`},
		{"align_tokens: 128", "align_tokens: 100", "d.yaml: group sliding: align_tokens is 100, but its chunks have 32 tokens (2 blocks of 16); align_tokens must be a multiple of every chunk, such as 64"},
		{"align_tokens: 128", "hash_tokens: 5", "d.yaml: group sliding: block_tokens is 16, hash_tokens is 5; every block must be a whole number of hash granules"},
		{"align_tokens: 128", "legs: [pf]", `d.yaml: legs has "pf"; did you mean "pd"? known: pd, demand, probe`},
		{"align_tokens: 128", "node_id: x", `d.yaml:4: unknown key "node_id"; known here: model, max_tokens, hash_tokens, align_tokens, groups, policies, roles, legs, max_store_tokens, engine, engine_params`},
		{"align_tokens: 128", "legs: [pd, pd]", `d.yaml: legs has "pd" twice`},
		{"align_tokens: 128", "align_tokens: 128\nengine: vllm-0.27", "d.yaml: align_tokens is 128, but vllm-0.27 knows no such distance: it keeps the tails that its retention_interval and its full chunks name; set align_tokens to 0"},
		{"align_tokens: 128", "engine: vllm-0.29", `d.yaml: engine is "vllm-0.29"; did you mean "vllm-0.27"? known: tierd, vllm-0.27, vllm-0.30`},
		{"align_tokens: 128", "engine_params: {promotion: retry}", "d.yaml: engine_params are given, but engine tierd takes none; remove them"},
		{"align_tokens: 128", "align_tokens: -1", `d.yaml:4: align_tokens is "-1"; it must be an integer of at least 0`},
		{"name: full", "name: sliding", "d.yaml: group sliding: groups[0] and groups[1] have the same name"},
		{"dtype: fp32", "dtype: bf17", `d.yaml: group full: dtype is "bf17"; it must be one of bf16, fp16, fp32, fp8, int8`},
		{"layers: 3", "layers: 0", "d.yaml: group full: layers is 0; it must be 1 to 65536"},
		{"layers: 3, kv_heads: 4, head_dim: 8", "layers: 65536, kv_heads: 65536, head_dim: 65536", "d.yaml: group full: a chunk would have more than 1073741824 bytes; lower chunk_blocks"},
		{"max_tokens: 1024", "max_tokens: 536870912", "d.yaml: group sliding: max_tokens 536870912 in chunks of 32 tokens is more than 1048576 chunks; raise chunk_blocks"},
		{"rule: full", "rule: ''", "d.yaml: group full: rule is missing; a shipped name such as full or window, or ./file.wasm#name"},
		{"align_tokens: 128", "policies: [{}]", "d.yaml: policies[0]: rule is missing"},
		{good, "{", "d.yaml: not valid YAML: line 1: did not find expected node content"},
		{good, "", "d.yaml: the file is empty"},
		{good, "[1]", "d.yaml:1: the file is a list; it must be a map of keys to values"},
		{good, "model: m\nmax_tokens: 5\n", "d.yaml: groups is empty; a model has at least one"},
	} {
		_, err := deploy.Parse("d.yaml", []byte(strings.Replace(good, c.old, c.new, 1)))
		require.EqualError(t, err, c.want, c.new)
	}
	_, err := deploy.Load("does-not-exist.yaml")
	require.EqualError(t, err, "deployment file: open does-not-exist.yaml: no such file or directory")
	_, err = deploy.Load("/dev/zero")
	require.EqualError(t, err, "deployment file: /dev/zero has more than 1048576 bytes")
}

func TestValues(t *testing.T) {
	m := &abi.Manifest{Name: "r", Params: []abi.Param{
		{Name: "window", Min: 1, Max: 9, Required: true, Unit: "tokens"}, {Name: "extra", Max: 5, Default: 2}, {Name: "mode", Max: 1, Enum: []string{"all", "align"}}}}
	v, err := deploy.Values("group g", m, map[string]any{"window": 3, "mode": "align"})
	require.NoError(t, err)
	require.Equal(t, []uint64{3, 2, 1}, v)
	for _, c := range []struct {
		given map[string]any
		want  string
	}{
		{nil, "group g: rule r needs parameter window (1 to 9 tokens)"},
		{map[string]any{"window": 10}, "group g: rule r: parameter window is 10; it must be 1 to 9 tokens"},
		{map[string]any{"window": -1}, "group g: rule r: parameter window is -1; it must be an integer from 1 to 9"},
		{map[string]any{"window": "x"}, "group g: rule r: parameter window is the text \"x\"; it must be an integer from 1 to 9"},
		{map[string]any{"window": 3, "mode": "alig"}, `group g: rule r: parameter mode is "alig"; did you mean "align"? known: all, align`},
		{map[string]any{"wndow": 3}, `group g: rule r has no parameter "wndow"; did you mean "window"? known: window, extra, mode`},
		{map[string]any{"window": 3, "wndow": 3}, `group g: rule r has no parameter "wndow"; did you mean "window"? known: window, extra, mode`},
	} {
		_, err := deploy.Values("group g", m, c.given)
		require.EqualError(t, err, c.want)
	}
	_, err = deploy.Values("group g", &abi.Manifest{Name: "full"}, map[string]any{"x": 1})
	require.EqualError(t, err, `group g: rule full takes no parameters, but "x" is given`)
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("model: [\n"))
	f.Add([]byte("a: &x [*x]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := deploy.Parse("f.yaml", b)
		if err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		require.NotZero(t, d.HashTokens)
		for i := range d.Groups {
			require.NotZero(t, d.Groups[i].ChunkBytes())
		}
		_ = d.Digest()
		_ = d.Layout().Digest()
	})
}
