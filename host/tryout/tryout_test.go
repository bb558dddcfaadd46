package tryout

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// native opens the shipped rules and a tried one, under its reference, without any
// transport. Rules as modules are tried in host/e2e.
func native(tried abi.Spec) registry.Opener {
	return func(_ context.Context, _, ref string) (registry.Opened, error) {
		if ref == "./mine.wasm#mine" {
			return registry.Opened{Spec: tried, Digest: "sha256:mine"}, nil
		}
		for _, s := range append(specs.All(), policy.All()...) {
			if s.Manifest().Name == ref {
				return registry.Opened{Spec: s, Digest: "sha256:shipped"}, nil
			}
		}
		return registry.Opened{}, fmt.Errorf("no rule %s", ref)
	}
}

var bothLegs = []string{"pd", "probe"}

func try(t *testing.T, s abi.Spec, o Options) *Result {
	t.Helper()
	if o.Legs == nil {
		o.Legs = bothLegs
	}
	if o.Seed == 0 {
		o.Seed = 1
	}
	r, err := Try(context.Background(), Subject{Ref: "./mine.wasm#mine", Spec: s, Digest: "sha256:mine"}, native(s), o)
	require.NoError(t, err)
	return r
}

func shown(t *testing.T, r *Result) string {
	var b bytes.Buffer
	require.NoError(t, r.WriteText(&b))
	return b.String()
}

func golden(t *testing.T, name string, r *Result) {
	t.Helper()
	// How many cases a relation has is its own affair.
	got := regexp.MustCompile(`(?m)^  cases .*$`).ReplaceAllStringFunc(shown(t, r), func(line string) string {
		return regexp.MustCompile(`[\d.]+`).ReplaceAllString(line, "N")
	})
	path := filepath.Join("testdata", name+".txt")
	if *rewrite {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func TestShippedRules(t *testing.T) {
	for _, s := range append(specs.All(), policy.All()...) {
		name := s.Manifest().Name
		t.Run(name, func(t *testing.T) {
			r := try(t, s, Options{Twin: s, TwinRef: name})
			golden(t, name, r)
			if name == "chunk-level" { // right for a node that caches for itself
				require.Equal(t, "warm", r.Relation())
				r = try(t, s, Options{Legs: []string{"probe"}})
			}
			require.Equal(t, registry.Accepted, r.Verdict, shown(t, r))
			require.GreaterOrEqual(t, r.Deployments, len(geometries))
			for _, relation := range check.Relations {
				none := name == "chunk-level" && (relation == "warm" || relation == "covers") || // in leg probe
					relation == "content" && name == "min-reuse" // the first offer stores nothing
				if !none {
					require.Positive(t, r.Relations[relation], relation)
				}
			}
		})
	}
}

// again judges the deployment of a refusal, as its reader would.
func again(t *testing.T, s abi.Spec, r *Result) *check.Counterexample {
	d, err := deploy.Parse("saved.yaml", []byte(r.Deployment))
	require.NoError(t, err)
	_, err = registry.Register(context.Background(), d, native(s), registry.Options{Check: check.Options{Seed: r.Seed}})
	var refusal *registry.Refusal
	require.ErrorAs(t, err, &refusal)
	return refusal.Verdict.Counterexample
}

// TestAdversariesAreRefused: each by the law or the relation that it breaks, in a
// deployment that shows the same to whoever saves it, and with the same words each time.
func TestAdversariesAreRefused(t *testing.T) {
	for _, a := range abitest.Adversaries() {
		t.Run(a.Name, func(t *testing.T) {
			s := a.Wrap(specs.Window())
			r := try(t, s, Options{})
			golden(t, a.Name, r)
			require.Equal(t, registry.Refused, r.Verdict)
			if a.Law != "" {
				require.Contains(t, r.Laws, a.Law)
				return
			}
			require.Equal(t, a.Relation, r.Relation())
			require.Equal(t, "tried", r.Counterexample.Group)
			require.Equal(t, r.Counterexample, again(t, s, r))
			require.LessOrEqual(t, r.Counterexample.PromptTokens, uint64(100), "small")
		})
	}
	r := try(t, abitest.Newcomer(), Options{})
	golden(t, "newcomer", r)
	require.Equal(t, "warm", r.Relation())
	require.Equal(t, r.Counterexample, again(t, abitest.Newcomer(), r))
}

// A changed rule is the shipped window rule with one mistake.
type changed struct {
	abi.Spec
	reach func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error
	scan  func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error)
	need  func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error
}

type changedRule struct {
	abi.SpecRule
	c      *changed
	params []uint64
}

func (c *changed) Open(p []uint64) (abi.Rule, error) {
	r, err := c.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return &changedRule{r.(abi.SpecRule), c, p}, nil
}

func (r *changedRule) Reach(x abi.Round, out abi.Bitmap) error {
	if r.c.reach != nil {
		return r.c.reach(r.SpecRule, x, out)
	}
	return r.SpecRule.Reach(x, out)
}

func (r *changedRule) Scan(x abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	if r.c.scan != nil {
		return r.c.scan(r.SpecRule, x, s, d)
	}
	return r.SpecRule.Scan(x, s, d)
}

func (r *changedRule) Need(x abi.Round, out abi.Bitmap) error {
	if r.c.need != nil {
		return r.c.need(r.SpecRule, x, out)
	}
	return r.SpecRule.Need(x, out)
}

// TestOneWrongLine: mistakes that an author makes, which keep every law.
func TestOneWrongLine(t *testing.T) {
	other := func(window, extra uint64) abi.SpecRule {
		r, err := specs.Window().Open([]uint64{window, extra})
		require.NoError(t, err)
		return r.(abi.SpecRule)
	}
	fixed := other(9, 0)
	for name, c := range map[string]struct {
		relation string
		changed
	}{
		"the aligned tails are forgotten": {"caps useful", changed{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.AlignTokens = 0
			return in.Reach(r, out)
		}}},
		"the junction is forgotten": {"useful", changed{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.JunctionTokens = 0
			return in.Reach(r, out)
		}}},
		"the resume point is forgotten": {"covers", changed{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.ResumeTokens = 0
			return in.Reach(r, out)
		}}},
		"the window is a constant": {"needs covers useful", changed{
			reach: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error { return fixed.Reach(r, out) },
			scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
				return fixed.Scan(r, s, d)
			},
			need: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error { return fixed.Need(r, out) },
		}},
		"the chunk's size is a constant": {"covers needs caps useful", changed{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.ChunkTokens != 8 {
				r.AlignTokens = 0
			}
			return in.Reach(r, out)
		}}},
		"the truth is one token short": {"needs", changed{need: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.ResumeTokens -= min(r.ResumeTokens, 1)
			return in.Need(r, out)
		}}},
		"the bound is not looked at": {"covers needs", changed{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			r.BoundTokens = uint64(r.Hi) * r.ChunkTokens
			return in.Scan(r, s, d)
		}}},
		"wrong behind 80 tokens": {"covers", changed{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.StoredTokens > 80 {
				return nil
			}
			return in.Reach(r, out)
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			c.changed.Spec = specs.Window()
			r := try(t, &c.changed, Options{})
			require.NotEmpty(t, r.Relation(), shown(t, r))
			require.Contains(t, strings.Fields(c.relation), r.Relation(), shown(t, r))
			require.Equal(t, r.Counterexample, again(t, &c.changed, r))
		})
	}
}

// What no deployment shows, because the prompt's end keeps the last aligned tail too, the law
// does: an abort and a junction have no such end.
func TestKeptWithoutAPicture(t *testing.T) {
	c := changed{Spec: specs.Window(), reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
		if r.AlignTokens > 0 && r.StoredTokens%r.AlignTokens == 0 && r.ResumeTokens == 0 && r.JunctionTokens == 0 {
			r.AlignTokens = 0
		}
		return in.Reach(r, out)
	}}
	r := try(t, &c, Options{})
	require.Equal(t, registry.Refused, r.Verdict)
	require.Equal(t, []string{abitest.LawKept}, r.Laws)
	require.Contains(t, r.Why, "which align asks for, needs chunk")
	require.Nil(t, r.Counterexample)
}

// The same seed gives the same verdict, another one other parameters.
func TestSeed(t *testing.T) {
	same := func(seed uint64) *Result {
		r := try(t, specs.Window(), Options{Seed: seed})
		r.Seconds = 0
		return r
	}
	require.Equal(t, same(1), same(1))
	require.NotEqual(t, same(1).Values, same(2).Values)
}

// posing is a spec with another manifest.
type posing struct {
	abi.Spec
	manifest abi.Manifest
	open     func(p []uint64) (abi.Rule, error)
}

func (p *posing) Manifest() *abi.Manifest { return &p.manifest }

func (p *posing) Open(v []uint64) (abi.Rule, error) {
	if p.open != nil {
		return p.open(v)
	}
	return p.Spec.Open(nil)
}

func mine(mask abi.MaskKind, args []string, params ...abi.Param) abi.Manifest {
	return abi.Manifest{Name: "mine", Version: "1.0.0", Kind: abi.KindSpec, Mask: mask, MaskArgs: args, Params: params}
}

func TestUndecided(t *testing.T) {
	window := func(p []uint64) (abi.Rule, error) { return specs.Window().Open([]uint64{p[0], 0}) }
	for name, s := range map[string]*posing{
		"too-long": {manifest: mine(abi.MaskWindow, []string{"w"}, abi.Param{Name: "w", Min: 5000, Max: 9000, Required: true, Unit: "tokens"}),
			open: window},
	} {
		r := try(t, s, Options{})
		require.Equal(t, Undecided, r.Verdict, shown(t, r))
		golden(t, "undecided-"+name, r)
	}
	r := try(t, specs.Full(), Options{Twin: specs.Window(), TwinRef: "window"})
	require.Equal(t, Undecided, r.Verdict)
	golden(t, "undecided-twin", r)
}

// Other masks and parameters than the shipped rules have.
func TestOtherManifests(t *testing.T) {
	window := func(p []uint64) (abi.Rule, error) { return specs.Window().Open([]uint64{p[0], 0}) }
	long := &posing{manifest: mine(abi.MaskWindow, []string{"w"}, abi.Param{Name: "w", Min: 300, Max: 100_000, Required: true}), open: window}
	r := try(t, long, Options{})
	require.Equal(t, registry.Accepted, r.Verdict, shown(t, r))
	require.Greater(t, r.PromptTokens, uint64(600), "a prompt is twice as long as the window")

	unverified := &posing{Spec: specs.Full(), manifest: mine(abi.MaskUnverified, nil, abi.Param{Name: "mode", Max: 2, Enum: []string{"a", "b", "c"}})}
	r = try(t, unverified, Options{})
	require.Equal(t, registry.Accepted, r.Verdict, shown(t, r))
	require.Equal(t, []uint64{0, 1, 2}, r.Values["mode"])
	require.True(t, r.UnverifiedNeed)

	choosy := &posing{Spec: specs.Full(), manifest: mine(abi.MaskCausal, nil, abi.Param{Name: "a", Max: 5}, abi.Param{Name: "b", Max: 50})}
	choosy.open = func(p []uint64) (abi.Rule, error) {
		if p[1] > 10*p[0]+40 {
			return nil, errors.New("b is too large for a")
		}
		return specs.Full().Open(nil)
	}
	r = try(t, choosy, Options{})
	require.Equal(t, registry.Refused, r.Verdict)
	require.Contains(t, r.Laws, abitest.LawTotal)

	differs := &changed{Spec: specs.Window(), need: func(abi.SpecRule, abi.Round, abi.Bitmap) error { return nil }}
	r = try(t, differs, Options{Twin: specs.Window(), TwinRef: "window"})
	require.Equal(t, registry.Refused, r.Verdict)
	golden(t, "twin", r)
}

// far is a rule in another process, as far as it can be seen.
type far struct{ abi.Spec }

type farRule struct{ abi.SpecRule }

func (farRule) Concurrency() int { return 8 }

func (f far) Open(p []uint64) (abi.Rule, error) {
	r, err := f.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return farRule{r.(abi.SpecRule)}, nil
}

// A slow rule is judged in fewer deployments, the smallest and the largest among them.
func TestSlowRules(t *testing.T) {
	near, r := try(t, specs.Window(), Options{}), try(t, far{specs.Window()}, Options{})
	require.Equal(t, registry.Accepted, r.Verdict)
	require.Less(t, r.Deployments, near.Deployments/2)
	require.GreaterOrEqual(t, r.Deployments, len(geometries))
	for name, v := range near.Values {
		require.Equal(t, v[0], r.Values[name][0], name)
		require.Equal(t, v[len(v)-1], r.Values[name][len(r.Values[name])-1], name)
		require.Subset(t, v, r.Values[name], name)
	}
}

// A check that is given up says so, and that is no verdict.
func TestContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	done := 0
	_, err := Try(ctx, Subject{Ref: "./mine.wasm#mine", Spec: specs.Window()}, native(specs.Window()), Options{Seed: 1, Legs: bothLegs, Progress: func(d, total int) {
		done = d
		require.Greater(t, total, d)
		if d == 2 {
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 2, done)
}

// A ratio that divides no chunk makes the chunks grow, beside a parameter that has made them
// grow already.
func TestTrialsOfARatio(t *testing.T) {
	made := 0
	for _, ratio := range []uint64{3, 5, 7, 11} {
		m := mine(abi.MaskLatent, nil)
		m.Params = []abi.Param{{Name: "ratio", Min: ratio, Max: ratio, Required: true}, {Name: "other", Min: 100, Max: 400, Required: true}}
		m.MaskArgs = []string{"ratio"}
		all, err := trials(&m, "./mine.wasm#mine", bothLegs, 7)
		if err != nil {
			require.ErrorContains(t, err, "parameter ratio is at least")
			continue
		}
		for _, tr := range all {
			d, err := deploy.Parse("d.yaml", []byte(tr.text))
			require.NoError(t, err)
			require.Zero(t, d.Groups[0].ChunkTokens()%ratio, tr.text)
			made++
		}
	}
	require.NotZero(t, made)
}

// TestTrials: whatever a manifest says, the deployments are valid, few and small, and
// their parameters are in range.
func TestTrials(t *testing.T) {
	masks := map[abi.MaskKind]int{abi.MaskCausal: 0, abi.MaskWindow: 1, abi.MaskChunk: 1, abi.MaskSinkWindow: 2, abi.MaskLatent: 1, abi.MaskUnverified: 0}
	kinds := make([]abi.MaskKind, 0, len(masks))
	for k := range masks {
		kinds = append(kinds, k)
	}
	slices.Sort(kinds)
	rapid.Check(t, func(t *rapid.T) {
		m := mine(rapid.SampledFrom(kinds).Draw(t, "mask"), nil)
		if rapid.Bool().Draw(t, "policy") {
			m.Kind, m.Mask = abi.KindPolicy, ""
		}
		for i := range masks[m.Mask] + rapid.IntRange(0, 3).Draw(t, "more") {
			p := abi.Param{Name: fmt.Sprintf("p%d", i), Min: rapid.Uint64Range(1, 700).Draw(t, "min")}
			p.Max = p.Min + rapid.SampledFrom([]uint64{0, 1, 5, 100, 1 << 24}).Draw(t, "range")
			p.Default, p.Required = p.Min, rapid.Bool().Draw(t, "required")
			if i < masks[m.Mask] {
				m.MaskArgs = append(m.MaskArgs, p.Name)
			} else if rapid.IntRange(0, 2).Draw(t, "enum") == 0 {
				p = abi.Param{Name: p.Name, Max: 2, Enum: []string{"no", "0x7", "a b: {"}}
			}
			m.Params = append(m.Params, p)
		}
		require.NoError(t, m.Validate())
		all, err := trials(&m, "./mine.wasm#mine", bothLegs, 7)
		if err != nil {
			require.ErrorContains(t, err, "is at least")
			return
		}
		require.NotEmpty(t, all)
		require.LessOrEqual(t, len(all), valuesMax+2+extremesMax+2*(len(geometries)-1))
		for i, tr := range all {
			require.NoError(t, m.CheckParams(tr.values))
			d, err := deploy.Parse("d.yaml", []byte(tr.text))
			require.NoError(t, err, tr.text)
			require.LessOrEqual(t, d.MaxTokens, uint64(promptTokensMax))
			if i > 0 {
				require.LessOrEqual(t, compareSums(all[i-1].values, tr.values), 0, "smallest first")
			}
			params := d.Policies[0].Params
			if m.Kind == abi.KindSpec {
				params = d.Groups[d.Group("tried")].Params
			}
			values, err := deploy.Values("", &m, params)
			require.NoError(t, err)
			require.True(t, slices.Equal(tr.values, values), "%v, but the file says %v", tr.values, values)
		}
	})
}

func TestOverall(t *testing.T) {
	of := func(verdicts ...string) string {
		var rs []*Result
		for _, v := range verdicts {
			rs = append(rs, &Result{Verdict: v})
		}
		return Overall(rs)
	}
	require.Equal(t, registry.Accepted, of(registry.Accepted, registry.Accepted))
	require.Equal(t, Undecided, of(registry.Accepted, Undecided))
	require.Equal(t, registry.Refused, of(registry.Refused, Undecided))
}
