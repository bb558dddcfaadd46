package rules_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/module"
)

// file is a small deployment with the window rule, the policies and the longest prompt
// left open.
const file = `
model: small
max_tokens: %d
align_tokens: 64
groups:
  - {name: sliding, rule: %q, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
policies: [{rule: %q}]
`

func deployment(t *testing.T, dir string, maxTokens int, window, policy string) *deploy.Deployment {
	t.Helper()
	d, err := deploy.Parse(filepath.Join(dir, "d.yaml"), fmt.Appendf(nil, file, maxTokens, window, policy))
	require.NoError(t, err)
	return d
}

func TestShippedRulesServeAsWasm(t *testing.T) {
	r, err := rules.Register(context.Background(), deployment(t, ".", 300, "window", "request-level"), rules.Options{})
	require.NoError(t, err)
	defer r.Close(context.Background())
	require.Equal(t, registry.Accepted, r.Verdict.Verdict)
	digest := module.Digest()
	require.Len(t, r.Verdict.Rules, 3)
	for _, ru := range r.Verdict.Rules {
		require.Equal(t, digest, ru.Digest, "the verdict names the bytes that serve")
	}
	require.Equal(t, map[string]uint64{"window": 20, "extra": 0}, r.Verdict.Rules[0].Params)
	for _, name := range check.Relations {
		require.Positive(t, r.Verdict.Relations[name])
	}
}

// TestAdversariesAsWasm: the same wrong rules, compiled to WebAssembly and loaded from a
// file, are refused by the same relations.
func TestAdversariesAsWasm(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a WebAssembly module")
	}
	dir := t.TempDir()
	cmd := exec.Command("go", "build", "-buildmode=c-shared", "-o", filepath.Join(dir, "wrong.wasm"), "../../registry/check/testdata/adversaries")
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	for _, a := range abitest.Adversaries() {
		t.Run(a.Name, func(t *testing.T) {
			d := deployment(t, dir, 200, "./wrong.wasm#"+a.Name+"-window", "request-level")
			_, err := rules.Register(context.Background(), d, rules.Options{StateDir: filepath.Join(dir, "state")})
			var refusal *registry.Refusal
			require.ErrorAs(t, err, &refusal)
			require.Equal(t, a.Relation, refusal.Verdict.Counterexample.Relation, refusal.Error())
			require.Equal(t, "sliding", refusal.Verdict.Counterexample.Group)
		})
	}
}

// TestVerdictsAreKept: an accepted verdict is reused for the same deployment and rules,
// and for nothing else; a refusal is not kept.
func TestVerdictsAreKept(t *testing.T) {
	ctx, state := context.Background(), t.TempDir()
	register := func(maxTokens int, policy string) (*rules.Registered, error) {
		r, err := rules.Register(ctx, deployment(t, ".", maxTokens, "window", policy), rules.Options{StateDir: state})
		if err == nil {
			require.NoError(t, r.Close(ctx))
		}
		return r, err
	}
	first, err := register(200, "request-level")
	require.NoError(t, err)
	require.False(t, first.Verdict.Reused)
	again, err := register(200, "request-level")
	require.NoError(t, err)
	require.True(t, again.Verdict.Reused)
	require.Equal(t, first.Verdict.Relations, again.Verdict.Relations)
	other, err := register(201, "request-level")
	require.NoError(t, err)
	require.False(t, other.Verdict.Reused)
	for range 2 {
		_, err = register(200, "chunk-level")
		require.ErrorContains(t, err, "refused by relation warm")
	}
	// A kept file that was cut short, or says something else, is not believed.
	kept, err := filepath.Glob(filepath.Join(state, "verdicts", "*.json"))
	require.NoError(t, err)
	require.Len(t, kept, 2)
	for _, path := range kept {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		var v registry.Verdict
		require.NoError(t, json.Unmarshal(b, &v))
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(b), v.RulesDigest, "sha256:0", 1)), 0o600))
	}
	again, err = register(200, "request-level")
	require.NoError(t, err)
	require.False(t, again.Verdict.Reused)
}

func TestWhatCannotBeOpened(t *testing.T) {
	state := t.TempDir()
	for _, c := range []struct{ window, policy, want string }{
		{"windov", "request-level", "group sliding: rule windov: no shipped rule has this name; did you mean window?"},
		{"cross", "request-level", "d.yaml: group sliding: rule cross: not prefix-cacheable: what such a layer keeps belongs to the whole input of an encoder, not to a prefix of the text; leave the group out, or compute it again"},
		{"encoder", "request-level", "d.yaml: group sliding: rule encoder: not prefix-cacheable: "},
		{"request-level", "request-level", "group sliding: rule request-level is a policy; a spec is needed here"},
		{"window", "full", "policies[0]: rule full is a spec; a policy is needed here"},
		{"full", "request-level", `group sliding: rule full takes no parameters, but "window" is given`},
		{"./no.wasm#x", "request-level", "d.yaml: group sliding: rule ./no.wasm#x: there is no file no.wasm; build the module first, or correct the path, which is relative to the deployment file"},
	} {
		_, err := rules.Register(context.Background(), deployment(t, ".", 200, c.window, c.policy), rules.Options{StateDir: state})
		require.ErrorContains(t, err, c.want)
	}
}
