package registry_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

const file = `
model: small
max_tokens: 200
align_tokens: 64
groups:
  - {name: sliding, rule: window, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
policies: [{rule: request-level}]
`

func parse(t *testing.T, yaml string) *deploy.Deployment {
	t.Helper()
	d, err := deploy.Parse("d.yaml", []byte(yaml))
	require.NoError(t, err)
	return d
}

// native opens the shipped rules, and the adversaries, without any transport.
func native(_ context.Context, _, ref string) (registry.Opened, error) {
	all := append(append(specs.All(), policy.All()...), abitest.Newcomer())
	for _, a := range abitest.Adversaries() {
		all = append(all, a.Wrap(specs.Window()))
	}
	for _, s := range all {
		if s.Manifest().Name == ref {
			return registry.Opened{Spec: s, Digest: "sha256:" + ref, Source: "native"}, nil
		}
	}
	return registry.Opened{}, fmt.Errorf("rule %s: unknown", ref)
}

// store keeps verdicts in memory.
type store struct {
	kept map[string][]byte
	fail error
}

func (s *store) Load(key string) []byte { return s.kept[key] }

func (s *store) Save(key string, b []byte) error {
	if s.fail != nil {
		return s.fail
	}
	s.kept[key] = b
	return nil
}

func TestAccepted(t *testing.T) {
	at := time.Unix(0, 0)
	now := func() time.Time { at = at.Add(3 * time.Second); return at }
	e, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Now: now, Checker: "c"})
	require.NoError(t, err)
	require.Equal(t, registry.Accepted, e.Verdict.Verdict)
	require.EqualValues(t, 3, e.Verdict.Seconds)
	sum := uint64(0)
	for _, n := range e.Verdict.Relations {
		sum += n
	}
	require.Equal(t, sum, e.Verdict.Cases)
	m := e.Model()
	require.Len(t, m.Groups, 2)
	require.EqualValues(t, 8, m.Groups[0].ChunkTokens)
	require.Len(t, m.Policies, 1)
}

// TestRefusalAsJSON: the fields that a CI reads, in chunk ranges.
func TestRefusalAsJSON(t *testing.T) {
	d := parse(t, strings.Replace(file, "rule: window", "rule: forgetful-window", 1))
	_, err := registry.Register(context.Background(), d, native, registry.Options{})
	var refusal *registry.Refusal
	require.ErrorAs(t, err, &refusal)
	b, err := json.Marshal(refusal.Verdict)
	require.NoError(t, err)
	var v struct {
		Verdict        string
		Cases          uint64
		Domain         map[string]any
		Counterexample struct {
			Relation, Group         string
			Prompt                  uint64 `json:"prompt_tokens"`
			Local                   uint64 `json:"local_tokens"`
			Supply, Demand, Missing [][2]uint32
		}
	}
	require.NoError(t, json.Unmarshal(b, &v))
	require.Equal(t, "refused", v.Verdict)
	require.Positive(t, v.Cases)
	require.NotEmpty(t, v.Domain)
	ce := v.Counterexample
	require.Equal(t, "covers", ce.Relation)
	require.Equal(t, "sliding", ce.Group)
	// The smallest: two groups agree on 16 tokens first, and a consumer may resume one
	// token before the prompt's end.
	require.EqualValues(t, 16, ce.Prompt)
	require.EqualValues(t, 0, ce.Local)
	require.Equal(t, [][2]uint32{{1, 1}}, ce.Supply)
	require.Equal(t, [][2]uint32{{0, 1}}, ce.Demand)
	require.Equal(t, [][2]uint32{{0, 0}}, ce.Missing)
}

// TestRulesDigest: whatever can change an answer changes the digest.
func TestRulesDigest(t *testing.T) {
	digest := func(yaml string) string {
		e, err := registry.Open(context.Background(), parse(t, yaml), native)
		require.NoError(t, err)
		return e.RulesDigest()
	}
	base := digest(file)
	require.Equal(t, base, digest(file+"roles: [consumer]\n"), "roles are not rules")
	for _, change := range [][2]string{
		{"window: 20", "window: 21"}, {"window: 20", "window: 20, extra: 1"}, {"rule: window", "rule: greedy-window"},
		{"request-level", "chunk-level"}, {"[{rule: request-level}]", "[]"}, {"name: full", "name: other"},
	} {
		require.NotEqual(t, base, digest(strings.Replace(file, change[0], change[1], 1)), change)
	}
}

func TestVerdictStoreThatFails(t *testing.T) {
	s := &store{kept: map[string][]byte{}, fail: errors.New("disk full")}
	e, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Verdicts: s})
	require.NoError(t, err, "a verdict that cannot be kept is a verdict")
	require.Equal(t, registry.Accepted, e.Verdict.Verdict)
	require.Equal(t, "disk full", e.Verdict.NotKept)
	s.fail = nil
	first, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Verdicts: s, Checker: "1"})
	require.NoError(t, err)
	require.False(t, first.Verdict.Reused)
	other, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Verdicts: s, Checker: "2"})
	require.NoError(t, err)
	require.False(t, other.Verdict.Reused, "another checker judges anew")
	for k := range s.kept {
		s.kept[k] = []byte("{")
	}
	again, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Verdicts: s, Checker: "1"})
	require.NoError(t, err)
	require.False(t, again.Verdict.Reused, "a damaged file is no verdict")
}

// notSpec claims to be a spec rule, but opens a rule without Need.
type notSpec struct{ abi.Spec }

func (n notSpec) Open([]uint64) (abi.Rule, error) { return policy.RequestLevel().Open(nil) }

func TestRuleWithoutNeed(t *testing.T) {
	open := func(ctx context.Context, dir, ref string) (registry.Opened, error) {
		o, err := native(ctx, dir, ref)
		if ref == "full" {
			o.Spec = notSpec{o.Spec}
		}
		return o, err
	}
	_, err := registry.Open(context.Background(), parse(t, file), open)
	require.EqualError(t, err, "group full: rule full has no Need")
}

// TestCertified: a verdict from elsewhere is used only when it is one on what was opened,
// whoever says so.
// A chunk that cuts a latent is refused before anything is judged.
func TestLatentsAreWhole(t *testing.T) {
	text := strings.Replace(file, "rule: full,", "rule: latent, params: {compress_ratio: 5},", 1)
	_, err := registry.Register(context.Background(), parse(t, text), native, registry.Options{})
	require.EqualError(t, err, "group full: rule latent makes one latent of 5 tokens (compress_ratio), and a chunk has 16 (4 blocks of 4); a chunk must hold whole latents: make it a multiple of 5")
	text = strings.Replace(text, "compress_ratio: 5", "compress_ratio: 8", 1)
	_, err = registry.Register(context.Background(), parse(t, text), native, registry.Options{})
	require.NoError(t, err)
}

func TestCertified(t *testing.T) {
	own, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Checker: "c", Check: check.Options{Seed: 3}})
	require.NoError(t, err)
	var want *registry.Verdict
	register := func(change func(*registry.Verdict)) *registry.Verdict {
		v := *own.Verdict
		v.Certificate = "key"
		change(&v)
		s := &store{kept: map[string][]byte{}}
		e, err := registry.Register(context.Background(), parse(t, file), native, registry.Options{Checker: "c", Check: check.Options{Seed: 3}, Verdicts: s,
			Certified: func(w *registry.Verdict) *registry.Verdict { want = w; return &v }})
		require.NoError(t, err)
		require.Equal(t, e.Verdict.Certificate == "", len(s.kept) == 1, "only what was found here is kept")
		return e.Verdict
	}
	require.Equal(t, "key", register(func(*registry.Verdict) {}).Certificate)
	require.Equal(t, own.Verdict.DeploymentDigest, want.DeploymentDigest)
	require.Equal(t, own.Verdict.RulesDigest, want.RulesDigest)
	require.Equal(t, own.Verdict.Rules, want.Rules)
	require.Equal(t, []any{"small", "tierd", "c", uint64(3), uint64(200)}, []any{want.Model, want.Engine, want.Checker, want.Domain.Seed, want.Domain.PromptTokens})
	for name, change := range map[string]func(*registry.Verdict){
		"refused":        func(v *registry.Verdict) { v.Verdict = registry.Refused },
		"undecided":      func(v *registry.Verdict) { v.Verdict = registry.Undecided },
		"counterexample": func(v *registry.Verdict) { v.Counterexample = &check.Counterexample{} },
		"pair":           func(v *registry.Verdict) { v.Against = &registry.Side{} },
		"model":          func(v *registry.Verdict) { v.Model = "other" },
		"engine":         func(v *registry.Verdict) { v.Engine = "vllm-0.30" },
		"deployment":     func(v *registry.Verdict) { v.DeploymentDigest = "sha256:0" },
		"rules":          func(v *registry.Verdict) { v.RulesDigest = "sha256:0" },
		"a rule": func(v *registry.Verdict) {
			v.Rules = append([]registry.RuleID{{For: "sliding", Digest: "sha256:0"}}, v.Rules[1:]...)
		},
		"fewer rules":    func(v *registry.Verdict) { v.Rules = v.Rules[:2] },
		"checker":        func(v *registry.Verdict) { v.Checker = "d" },
		"seed":           func(v *registry.Verdict) { v.Domain.Seed = 4 },
		"longest prompt": func(v *registry.Verdict) { v.Domain.PromptTokens = 199 },
	} {
		require.Empty(t, register(change).Certificate, name)
	}
}
