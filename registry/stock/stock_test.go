package stock_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/stock"
	"github.com/tierd/tierd/specs/vllm"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// file writes a deployment file; groups are "rule:block" with parameters behind it, such as
// "window:4 {window: 8}".
func file(engine, params string, maxTokens int, groups ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "model: m\nmax_tokens: %d\nengine: %s\nengine_params: {%s}\ngroups:\n", maxTokens, engine, params)
	for i, g := range groups {
		head, params, _ := strings.Cut(g, " ")
		rule, block, _ := strings.Cut(head, ":")
		draft := strings.HasSuffix(block, "+")
		if params == "" {
			params = "{}"
		}
		fmt.Fprintf(&b, "  - {name: g%d, rule: %s, params: %s, block_tokens: %s, draft: %v, layers: 1, kv_heads: 1, head_dim: 8, dtype: bf16}\n", i, rule, params, strings.TrimSuffix(block, "+"), draft)
	}
	return b.String()
}

func parse(t testing.TB, text string) *deploy.Deployment {
	t.Helper()
	d, err := deploy.Parse("d.yaml", []byte(text))
	require.NoError(t, err)
	return d
}

func judge(t testing.TB, text string) *registry.Verdict {
	t.Helper()
	v, err := stock.Judge(t.Context(), parse(t, text), stock.Options{Now: time.Now, Checker: "sha256:c"})
	require.NoError(t, err)
	return v
}

// A row of the known disagreements of stock vLLM, as a deployment that shows it.
type row struct {
	name           string
	engine, params string
	groups         []string
	relation       string // "" = accepted
	prompt         uint64 // of the smallest counterexample
}

const (
	asLeg = "promotion: pending, policy: request-level"
	retry = "promotion: retry, policy: request-level"
	dense = asLeg + ", retention_interval: none"
)

var rows = []row{
	{"row 1, pending", "vllm-0.27", asLeg, []string{"window:128 {window: 128}", "full:128"}, "", 0},
	{"row 1, pending, small blocks", "vllm-0.27", asLeg, []string{"full:16", "window:4 {window: 8}"}, "", 0},
	{"row 1, pending, 0.30", "vllm-0.30", dense, []string{"full:16", "window:4 {window: 8}"}, "", 0},
	{"row 1, pending, states", "vllm-0.27", asLeg, []string{"full:64", "state:64"}, "", 0},
	{"row 1, pending, w = 1 mod block", "vllm-0.27", asLeg, []string{"full:64", "window:16 {window: 17}"}, "warm", 65},
	{"row 1, pending, chunked", "vllm-0.27", asLeg, []string{"full:64", "chunked:16 {attention_chunk: 32}"}, "warm", 65},
	{"row 1, retry", "vllm-0.27", retry, []string{"window:128 {window: 128}", "full:128"}, "warm", 256},
	{"row 7, retry", "vllm-0.27", retry, []string{"full:16", "window:4 {window: 8}"}, "covers", 17},
	{"row 7, retry, 0.30", "vllm-0.30", retry, []string{"full:16", "chunked:4 {attention_chunk: 8}"}, "warm", 17},
	{"row 7, pending", "vllm-0.27", asLeg, []string{"full:64", "window:16 {window: 48}"}, "", 0},
	{"row 2", "vllm-0.27", asLeg, []string{"full:16", "full:32", "window:4 {window: 8}"}, "", 0},
	{"row 2, segments that drift", "vllm-0.27", asLeg, []string{"full:40", "window:16 {window: 16}"}, "needs", 48},
	{"row 3, 0.27", "vllm-0.27", asLeg + ", prompt_only: false", []string{"full:16+"}, "", 0},
	{"row 3, 0.30", "vllm-0.30", asLeg + ", prompt_only: false", []string{"full:16+"}, "", 0},
	{"row 5", "vllm-0.27", asLeg + ", shared_writes: true", []string{"full:16"}, "cascade", 16},
	{"row 5, 0.30", "vllm-0.30", asLeg + ", shared_writes: true", []string{"full:16"}, "", 0},
	{"row 6", "vllm-0.27", asLeg + ", max_offload_tokens: 48", []string{"full:16", "window:4 {window: 8}"}, "caps", 64},
	{"row 6, the next turn", "vllm-0.30", asLeg + ", turn_tokens: 40", []string{"full:16"}, "caps", 1},
	{"row 9", "vllm-0.30", asLeg, []string{"full:16", "window:4 {window: 8}"}, "covers", 32},
	{"row 10", "vllm-0.30", dense, []string{"full:64", "window:16 {window: 17}"}, "covers", 65},
	{"row 11", "vllm-0.27", asLeg, []string{"full:16+", "window:4+ {window: 8}"}, "warm", 17},
	{"row 12", "vllm-0.27", asLeg, []string{"full:64", "state:16"}, "covers", 128},
	{"row 12, align", "vllm-0.27", asLeg, []string{"full:16", "state:16 {mode: align}"}, "covers", 32},
	{"row 13", "vllm-0.30", asLeg + ", retention_interval: 32", []string{"full:16", "window:4 {window: 8}"}, "covers", 48},
	{"row 16", "vllm-0.30", asLeg + ", max_load_tokens: 24", []string{"full:16", "window:4 {window: 8}"}, "covers", 32},
	{"row 16, a cap that is never reached", "vllm-0.30", dense + ", max_load_tokens: 1048576", []string{"full:16", "window:4 {window: 8}"}, "caps", 32},
	{"policy gate", "vllm-0.27", "promotion: pending", []string{"full:128"}, "warm", 128},
	{"policy gate, 0.30", "vllm-0.30", "promotion: pending", []string{"full:16"}, "warm", 16},
	{"load not looked up", "vllm-0.27", asLeg, []string{"full:12", "window:8 {window: 8}"}, "needs", 16},
}

// Each row comes out as the facts say; what is refused is drawn, and no shorter prompt
// fails, by trying all of them.
func TestRows(t *testing.T) {
	for _, c := range rows {
		t.Run(c.name, func(t *testing.T) {
			maxTokens := 131072
			if c.relation == "" && c.name != "row 1, pending" {
				maxTokens = 8192 // takes a second less each
			}
			text := file(c.engine, c.params, maxTokens, c.groups...)
			v := judge(t, text)
			t.Logf("%.2f s, %d cases", v.Seconds, v.Cases)
			if c.relation == "" {
				require.Equal(t, registry.Accepted, v.Verdict, "%s", v.Counterexample)
				require.Zero(t, brute(t, parse(t, text), 100))
				return
			}
			require.Equal(t, registry.Refused, v.Verdict)
			ce := v.Counterexample
			prompt := ce.PromptTokens
			if ce.ProducerTokens > 0 {
				prompt = ce.ProducerTokens
			}
			require.Equal(t, [2]any{c.relation, c.prompt}, [2]any{ce.Relation, prompt}, ce.String())
			require.Equal(t, c.prompt, brute(t, parse(t, text), c.prompt))
			golden(t, fileName(c.name), ce.String())
		})
	}
}

// The cases of the table in package specs/vllm, and the trace from the field: each alone,
// with the sets that it is told with.
func TestAt(t *testing.T) {
	sliding := []string{"window:128 {window: 128}", "full:128"}
	small := []string{"full:16", "window:4 {window: 8}"}
	for _, c := range []struct {
		name, engine, params string
		groups               []string
		at                   stock.At
		relation, group      string
		missing, supply      string // of the group
	}{
		{"trace of 57 chunks", "vllm-0.27", retry, sliding, stock.At{Prompt: 7296, GPU: 7168}, "warm", "g0", "[0-54]", "[55-56]"},
		{"trace of 57 chunks of 16", "vllm-0.27", retry, []string{"window:16 {window: 128}", "full:16"}, stock.At{Prompt: 913, GPU: 912}, "warm", "g0", "[0-48]", "[49-56]"},
		{"trace of 57 chunks, pending", "vllm-0.27", asLeg, sliding, stock.At{Prompt: 7296, GPU: 7168}, "", "", "", ""},
		{"row 1", "vllm-0.27", retry, sliding, stock.At{Prompt: 7200, GPU: 7168}, "warm", "g0", "[0-54]", "[55]"},
		{"row 6", "vllm-0.27", asLeg + ", max_offload_tokens: 48", small, stock.At{Prompt: 64}, "caps", "g0", "[3]", "[0-2]"},
		{"row 6, the next turn", "vllm-0.30", asLeg, []string{"full:16"}, stock.At{Prompt: 64, Generated: 33, Text: 97}, "caps", "g0", "[4-5]", "[0-3]"},
		{"row 7", "vllm-0.27", retry, sliding, stock.At{Prompt: 256}, "states", "g0", "[]", "[]"},
		{"row 7, pending", "vllm-0.27", asLeg, sliding, stock.At{Prompt: 256}, "", "", "", ""},
		{"row 9", "vllm-0.30", asLeg, small, stock.At{Prompt: 64}, "covers", "g1", "[14-15]", "[10-11]"},
		{"row 9, long", "vllm-0.30", asLeg, sliding, stock.At{Prompt: 7168}, "covers", "g0", "[55]", "[54]"},
		{"row 9, one token more", "vllm-0.30", asLeg, small, stock.At{Prompt: 65}, "", "", "", ""},
		{"row 10", "vllm-0.30", asLeg, []string{"full:64", "window:16 {window: 17}"}, stock.At{Prompt: 130}, "covers", "g1", "[6]", "[7]"},
		{"row 11", "vllm-0.27", asLeg, []string{"full:16+", "window:4+ {window: 8}"}, stock.At{Prompt: 64}, "covers", "g1", "[12]", "[1-3 5-7 9-11 13-15]"},
		{"row 12", "vllm-0.27", asLeg, []string{"full:64", "state:16"}, stock.At{Prompt: 128}, "covers", "g1", "[6]", "[3 7]"},
		{"row 13", "vllm-0.30", asLeg + ", retention_interval: 32", small, stock.At{Prompt: 80}, "covers", "g1", "[18-19]", "[6-7 14-15]"},
		{"row 16", "vllm-0.30", asLeg + ", max_load_tokens: 24", small, stock.At{Prompt: 70}, "caps", "g1", "[2-3]", "[14-15]"},
		{"policy gate", "vllm-0.30", "promotion: pending", []string{"full:128"}, stock.At{Prompt: 7200, GPU: 7168, Primary: 7168}, "warm", "g0", "[0-55]", "[]"},
		{"policy gate, loaded", "vllm-0.30", "promotion: pending", []string{"full:128"}, stock.At{Prompt: 7200, Loaded: 7168}, "warm", "g0", "[0-55]", "[]"},
		{"policy gate, request level", "vllm-0.30", asLeg, []string{"full:128"}, stock.At{Prompt: 7200, Loaded: 7168}, "", "", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			v, err := stock.Judge(t.Context(), parse(t, file(c.engine, c.params, 131072, c.groups...)), stock.Options{At: &c.at})
			require.NoError(t, err)
			require.Contains(t, v.DomainText[1], "one case alone, given by hand")
			if c.relation == "" {
				require.Equal(t, registry.Accepted, v.Verdict, "%s", v.Counterexample)
				return
			}
			require.Equal(t, registry.Refused, v.Verdict)
			ce := v.Counterexample
			require.Equal(t, []string{c.relation, c.group, c.missing, c.supply}, []string{ce.Relation, ce.Group, fmt.Sprint(ce.Missing), fmt.Sprint(ce.Supply)}, ce.String())
			golden(t, "at-"+fileName(c.name), ce.String())
		})
	}
	_, err := stock.Judge(t.Context(), parse(t, file("vllm-0.27", retry, 131072, sliding...)), stock.Options{At: &stock.At{Prompt: 7296, GPU: 7100}})
	require.ErrorContains(t, err, "prefix on the GPU of 7100 tokens ends inside a block of 128 tokens")
}

// Whatever the number of workers, the verdict is the same; in JSON it reads back.
func TestVerdict(t *testing.T) {
	text := file("vllm-0.27", asLeg, 4096, "full:64", "window:16 {window: 17}")
	var first *registry.Verdict
	for _, workers := range []int{1, 2, 7} {
		var last atomic.Int64
		v, err := stock.Judge(t.Context(), parse(t, text), stock.Options{Checker: "sha256:c", Check: check.Options{Workers: workers, Progress: func(done, total int) {
			last.Store(int64(done))
			require.LessOrEqual(t, done, total)
		}}})
		require.NoError(t, err)
		require.NotZero(t, last.Load())
		v.Relations, v.Cases = nil, 0 // of lengths beyond the failing one more or less have run
		if first == nil {
			first = v
		}
		require.Equal(t, first, v)
	}
	require.Equal(t, "vllm-0.27", first.Engine)
	require.Equal(t, "stock", first.Rules[1].Source)
	require.Equal(t, "swa", first.Rules[1].Name)
	b, err := json.Marshal(first)
	require.NoError(t, err)
	var back registry.Verdict
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, first.Counterexample.String(), back.Counterexample.String())

	other, err := stock.Judge(t.Context(), parse(t, text), stock.Options{Checker: "sha256:d"})
	require.NoError(t, err)
	require.NotEqual(t, first.RulesDigest, other.RulesDigest, "another checker judges by other rules")
	other, err = stock.Judge(t.Context(), parse(t, strings.Replace(text, "request-level", "chunk-level", 1)), stock.Options{Checker: "sha256:c"})
	require.NoError(t, err)
	require.NotEqual(t, first.RulesDigest, other.RulesDigest)
}

// A check whose time is spent says how far it got, and never says accepted.
func TestBudget(t *testing.T) {
	d := parse(t, file("vllm-0.27", asLeg, 4096, "full:64", "window:16 {window: 48}"))
	outcomes := map[string]int{}
	for n := int64(0); ; n += 41 {
		ctx, cancel := context.WithCancelCause(t.Context())
		if n == 0 {
			cancel(check.ErrBudget)
		}
		var calls atomic.Int64
		v, err := stock.Judge(ctx, d, stock.Options{Check: check.Options{Workers: 1, Progress: func(int, int) {
			if calls.Add(1) == n {
				cancel(check.ErrBudget)
			}
		}}})
		require.NoError(t, err)
		spent := ctx.Err() != nil
		cancel(nil)
		outcomes[v.Verdict]++
		if !spent {
			require.Equal(t, registry.Accepted, v.Verdict)
			require.Empty(t, v.Reached)
			break
		}
		if v.Verdict == registry.Accepted { // it had run all when the time was spent
			continue
		}
		require.Equal(t, registry.Undecided, v.Verdict)
		require.Len(t, v.Reached, 2)
	}
	require.Greater(t, outcomes[registry.Undecided], 3)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := stock.Judge(ctx, d, stock.Options{})
	require.ErrorIs(t, err, context.Canceled)
}

// A fleet is upgraded node by node: each release is accepted against itself, and the new
// producer fails the old consumer. The failing way is named.
func TestAgainst(t *testing.T) {
	groups := []string{"full:64", "window:16 {window: 17}"}
	a := parse(t, file("vllm-0.27", asLeg, 4096, "full:64", "window:16 {window: 48}"))
	b := parse(t, file("vllm-0.30", dense, 4096, "full:64", "window:16 {window: 48}"))
	for _, d := range []*deploy.Deployment{a, b} {
		v, err := stock.Judge(t.Context(), d, stock.Options{})
		require.NoError(t, err)
		require.Equal(t, registry.Accepted, v.Verdict, "%s", v.Counterexample)
	}
	v, err := stock.Against(t.Context(), a, b, stock.Options{})
	require.NoError(t, err)
	require.Equal(t, registry.Accepted, v.Verdict, "%s", v.Counterexample)
	require.Equal(t, [2]string{"vllm-0.27", "vllm-0.30"}, [2]string{v.Engine, v.Against.Engine})
	require.Contains(t, v.DomainText[0], "leg pd, a producer of vllm-0.27,")
	require.Equal(t, "the same, the other way round", v.DomainText[len(v.DomainText)-1])

	b = parse(t, file("vllm-0.30", asLeg, 4096, "full:64", "window:16 {window: 48}"))
	v, err = stock.Against(t.Context(), a, b, stock.Options{})
	require.NoError(t, err)
	require.Equal(t, registry.Refused, v.Verdict)
	require.Equal(t, check.Fact{Name: "direction", Value: "producer d.yaml (vllm-0.30), consumer d.yaml (vllm-0.27)"}, v.Counterexample.Facts[0])
	golden(t, "against", v.Counterexample.String())

	_, err = stock.Against(t.Context(), a, parse(t, file("vllm-0.30", dense, 4096, groups[0], "window:32 {window: 48}")), stock.Options{})
	require.EqualError(t, err, "d.yaml and d.yaml have no key in common, because their layouts differ; here is the first, there the second: hash_tokens: here 16, there 32; groups[1].block_tokens: here 16, there 32")
	own := parse(t, strings.NewReplacer("engine_params: {"+asLeg+"}\n", "", "vllm-0.27", "tierd").Replace(file("vllm-0.27", asLeg, 4096, groups...)))
	_, err = stock.Against(t.Context(), own, a, stock.Options{})
	require.EqualError(t, err, "d.yaml is of engine tierd and d.yaml of engine vllm-0.27; their keys are made differently, so they have none in common and exchange nothing")
}

// A prompt is one that both sides take: the shorter of the two longest.
func TestAgainstShorter(t *testing.T) {
	a := parse(t, file("vllm-0.30", dense, 4096, "full:16"))
	b := parse(t, file("vllm-0.30", dense, 300, "full:16"))
	v, err := stock.Against(t.Context(), a, b, stock.Options{})
	require.NoError(t, err)
	require.Equal(t, registry.Accepted, v.Verdict)
	require.EqualValues(t, 300, v.Domain.PromptTokens)
	own := parse(t, strings.NewReplacer("engine_params: {"+asLeg+"}\n", "", "vllm-0.27", "tierd").Replace(file("vllm-0.27", asLeg, 4096, "full:16")))
	_, err = stock.Against(t.Context(), own, own, stock.Options{})
	require.EqualError(t, err, "d.yaml: engine is tierd, whose rules package registry judges")
}

// Each rule that a file may name is one kind of vLLM's, with the parameters that it has.
func TestConfig(t *testing.T) {
	d := parse(t, file("vllm-0.30", "promotion: retry, policy: request-level, retention_interval: 64, prompt_only: false, speculative: true", 4096,
		"full:16", "hidden:16", "latent:16 {compress_ratio: 4}", "window:16+ {window: 30, extra: 3}", "chunked:16 {attention_chunk: 64}", "state:16 {mode: none}", "state:16 {mode: align}", "sink:16 {sink: 4, window: 9}", "rswa:16 {window: 20}"))
	c, err := stock.Config(d)
	require.NoError(t, err)
	require.Equal(t, "vllm-0.30, retention interval 64, generated tokens too, speculative, request-level, promotion retry; group 0: full, block 16; group 1: hidden, block 16; group 2: mla, block 16; group 3: swa 30 + 3, block 16, eagle; group 4: chunked 64, block 16; group 5: mamba none, block 16; group 6: mamba align, block 16; group 7: sink, block 16; group 8: rswa, block 16", c.String())
	for _, c := range []struct{ params, group, want string }{
		{"", "full:16", "d.yaml: engine_params.promotion is missing: say what a lookup answers"},
		{asLeg, "window:16", "d.yaml: group g0: rule window needs parameter window"},
		{asLeg, "window:16 {windw: 3}", `d.yaml: group g0: rule window has no parameter "windw"; did you mean "window"?`},
		{asLeg, "state:16 {mode: some}", `d.yaml: group g0: parameter mode is "some"`},
		{asLeg + ", retention_interval: 5", "window:16 {window: 3}", "d.yaml: vllm: group 0 (swa): retention_interval is 5, the chunk has 16 tokens"},
	} {
		_, err := stock.Config(parse(t, file("vllm-0.30", c.params, 64, c.group)))
		require.ErrorContains(t, err, strings.Replace(c.want, "group g0: parameter", "group g0: rule state: parameter", 1))
	}
	require.Len(t, deploy.StockRules, 8)
}

func fileName(s string) string {
	return strings.NewReplacer(", ", "-", " ", "-", "=", "is", ".", "").Replace(s)
}

func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *rewrite {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), text)
}

// brute tries every prompt up to limit with everything that either side may hold, and
// returns the first that has a hole; 0 = none has. It shares no code with the judge: all
// steps, prefixes and loads, one by one.
func brute(t *testing.T, d *deploy.Deployment, limit uint64) uint64 {
	c, err := stock.Config(d)
	require.NoError(t, err)
	e, err := d.Stock()
	require.NoError(t, err)
	r, err := vllm.New(c)
	require.NoError(t, err)
	block := uint64(1)
	for _, g := range c.Groups {
		block = deploy.LCM(block, g.BlockTokens)
	}
	for p := uint64(1); p <= limit; p++ {
		demands := bruteDemands(t, r, &e, p, block)
		for _, k := range bruteCases(r, &c, &e, p, block) {
			supply, err := r.Supply(k)
			require.NoError(t, err)
			for _, d := range demands {
				for g := range d.Groups {
					missing := slices.Clone(d.Groups[g])
					missing.AndNot(supply[g])
					if !missing.Empty() || !d.Unready[g].Empty() {
						return p
					}
				}
			}
		}
	}
	return 0
}

func first(r *vllm.Rules, n uint64, answer abi.State) vllm.Look {
	return func(k vllm.Key) abi.State {
		if uint64(k.Chunk+1)*r.ChunkTokens(k.Group) <= n {
			return answer
		}
		return abi.Miss
	}
}

func bruteCases(r *vllm.Rules, c *vllm.Config, e *deploy.StockEngine, p, block uint64) (out []vllm.Case) {
	for n := range p { // 0 = one step
		for generated := range uint64(3) {
			out = append(out, vllm.Case{PromptTokens: p, StepTokens: n, GeneratedTokens: generated * 9})
		}
	}
	for gpu := uint64(0); gpu < p; gpu += block {
		warms := []vllm.Warm{{GPUTokens: gpu}}
		for q := uint64(1); q <= p; q++ {
			warms = append(warms, vllm.Warm{GPUTokens: gpu, Primary: first(r, q, abi.Hit)})
			if m := r.Match(vllm.Ask{TextTokens: p, LocalTokens: gpu}, first(r, q, abi.Hit)); m.Tokens > 0 && gpu+m.Tokens < p {
				w := vllm.Warm{GPUTokens: gpu, LoadedTokens: gpu + m.Tokens}
				warms = append(warms, w)
				w.Primary = first(r, q, abi.Hit)
				warms = append(warms, w)
			}
			if e.SharedWrites {
				warms = append(warms, vllm.Warm{GPUTokens: gpu, Primary: first(r, q, abi.Pending)})
			}
		}
		for _, w := range warms {
			k := vllm.Case{PromptTokens: p, Warm: w}
			out = append(out, k)
			if e.MaxOffload != nil {
				k.MaxOffloadTokens = vllm.Some(*e.MaxOffload)
				out = append(out, k)
			}
		}
	}
	return out
}

func bruteDemands(t *testing.T, r *vllm.Rules, e *deploy.StockEngine, p, block uint64) (out []vllm.Demand) {
	seen := map[string]bool{}
	add := func(a vllm.Ask, tiers vllm.Tiers) {
		d, err := r.Demand(a, tiers)
		require.NoError(t, err)
		if key := fmt.Sprint(d.Groups, d.Unready); !seen[key] {
			seen[key] = true
			out = append(out, d)
		}
	}
	for text := p; text <= p+e.TurnTokens; text++ {
		for local := uint64(0); local < p; local += block {
			a := vllm.Ask{TextTokens: text, LocalTokens: local}
			add(a, vllm.Tiers{})
			for q := uint64(1); q <= p; q++ {
				add(a, vllm.Tiers{Primary: first(r, q, abi.Hit)})
			}
			if e.MaxLoad != nil {
				a.MaxLoadTokens = vllm.Some(*e.MaxLoad)
				add(a, vllm.Tiers{})
			}
		}
	}
	return out
}
