package check_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// part is one group of a test deployment.
type part struct {
	name   string
	spec   abi.Spec
	params []uint64
	block  uint64
	blocks uint64
}

// subject returns a deployment of the given parts.
func subject(maxTokens, align uint64, policies []abi.Spec, parts ...part) check.Subject {
	s := check.Subject{MaxTokens: maxTokens, PD: true, Probe: true}
	for _, p := range parts {
		s.Groups = append(s.Groups, check.Claim{Manifest: p.spec.Manifest(), Params: p.params})
	}
	s.Open = func() (plan.Model, func(), error) {
		m := plan.Model{AlignTokens: align}
		for _, p := range parts {
			r, err := p.spec.Open(p.params)
			if err != nil {
				return m, nil, err
			}
			m.Groups = append(m.Groups, plan.Group{Name: p.name, Rule: r.(abi.SpecRule), BlockTokens: p.block, ChunkTokens: p.block * p.blocks,
				State: p.spec.Manifest().Mask == abi.MaskState})
		}
		for _, p := range policies {
			r, err := p.Open(nil)
			if err != nil {
				return m, nil, err
			}
			m.Policies = append(m.Policies, plan.Policy{Name: p.Manifest().Name, Rule: r})
		}
		return m, func() {}, nil
	}
	s.Near = func(index int) (abi.Rule, []check.Neighbour, error) {
		if index >= len(parts) {
			r, err := policies[index-len(parts)].Open(nil)
			return r, nil, err
		}
		p := &parts[index]
		own, err := p.spec.Open(p.params)
		if err != nil {
			return nil, nil, err
		}
		var near []check.Neighbour
		for _, values := range check.NearValues(p.spec.Manifest(), p.params) {
			r, err := p.spec.Open(values)
			if err != nil {
				return nil, nil, err
			}
			near = append(near, check.Neighbour{Name: fmt.Sprint(p.name, values), Rule: r})
		}
		return own, near, nil
	}
	return s
}

func full(block, blocks uint64) part { return part{"full", specs.Full(), nil, block, blocks} }

func window(w, extra, block, blocks uint64) part {
	return part{"sliding", specs.Window(), []uint64{w, extra}, block, blocks}
}

func judge(t *testing.T, s check.Subject) *check.Report {
	t.Helper()
	rep, err := check.Run(context.Background(), s, check.Options{Seed: 1})
	require.NoError(t, err)
	return rep
}

func TestSoundDeploymentsAreAccepted(t *testing.T) {
	reqLevel := []abi.Spec{policy.RequestLevel()}
	for name, s := range map[string]check.Subject{
		"demo, shorter":       subject(9000, 4096, reqLevel, window(128, 0, 16, 8), full(16, 8)),
		"three chunk sizes":   subject(300, 48, nil, window(5, 0, 4, 2), full(4, 4), window(17, 3, 4, 3)),
		"window of one token": subject(300, 0, nil, window(1, 0, 4, 2), full(4, 1)),
		"window of all":       subject(300, 16, nil, window(300, 0, 4, 2), full(4, 4)),
		"full alone":          subject(300, 0, nil, full(4, 4)),
		"windows alone":       subject(300, 24, nil, window(9, 0, 8, 1), window(3, 9, 3, 1)),
		"one-token chunks":    subject(70, 3, reqLevel, window(4, 1, 1, 1), full(3, 1)),
	} {
		t.Run(name, func(t *testing.T) {
			rep := judge(t, s)
			if rep.Counterexample != nil {
				t.Fatal(rep.Counterexample)
			}
			for _, r := range check.Relations {
				require.Positive(t, rep.Cases[r], "relation %s ran no case", r)
			}
		})
	}
}

// TestCapsAreKnownToBothSides: with a store cap the consumer's plan ends at it.
func TestCapsAreKnownToBothSides(t *testing.T) {
	for _, limit := range []uint64{1, 7, 16, 50, 64, 299} {
		s := subject(300, 16, nil, window(9, 0, 4, 2), full(4, 4))
		open := s.Open
		s.Open = func() (plan.Model, func(), error) {
			m, f, err := open()
			m.MaxStoreTokens = limit
			return m, f, err
		}
		if ce := judge(t, s).Counterexample; ce != nil {
			t.Fatalf("cap %d: %v", limit, ce)
		}
	}
}

// TestAdversariesAreRefused: each wrong rule is refused by the relation that it breaks
// and by no earlier one, in several deployments, and under another name too.
func TestAdversariesAreRefused(t *testing.T) {
	for _, a := range abitest.Adversaries() {
		for name, parts := range map[string][]part{
			"beside full":      {window(20, 0, 4, 2), full(4, 4)},
			"after full":       {full(4, 2), window(33, 0, 4, 2)},
			"alone":            {window(20, 0, 4, 2)},
			"with extra":       {window(20, 7, 4, 2), full(4, 4)},
			"wide":             {window(50, 0, 4, 2), full(4, 4)},
			"one-token blocks": {full(2, 2), window(9, 0, 1, 4)},
		} {
			t.Run(a.Name+" "+name, func(t *testing.T) {
				for i := range parts {
					if parts[i].name == "sliding" {
						parts[i].spec = a.Wrap(parts[i].spec)
						parts[i].spec = renamed{parts[i].spec}
					}
				}
				rep := judge(t, subject(400, 64, nil, parts...))
				require.NotNil(t, rep.Counterexample, "accepted, but %s must refuse it", a.Relation)
				require.Equal(t, a.Relation, rep.Counterexample.Relation, rep.Counterexample.String())
				require.Equal(t, "sliding", rep.Counterexample.Group, rep.Counterexample.String())
			})
		}
	}
}

// renamed calls a spec by an innocent name: no relation looks at it.
type renamed struct{ abi.Spec }

func (r renamed) Manifest() *abi.Manifest {
	m := *r.Spec.Manifest()
	m.Name, m.Version = "window", "1.0.0"
	return &m
}

func TestPolicyThatOffersOnlyNewChunksIsRefused(t *testing.T) {
	for _, p := range []abi.Spec{policy.ChunkLevel(), abitest.Newcomer()} {
		rep := judge(t, subject(400, 64, []abi.Spec{p}, window(20, 0, 4, 2), full(4, 4)))
		require.NotNil(t, rep.Counterexample)
		require.Equal(t, "warm", rep.Counterexample.Relation)
		require.Equal(t, "sliding", rep.Counterexample.Group)
		require.Equal(t, []check.Range{{}}, rep.Counterexample.Missing)
	}
	// Without a leg that counts on the peer's supply it may serve.
	s := subject(400, 64, []abi.Spec{policy.ChunkLevel()}, window(20, 0, 4, 2), full(4, 4))
	s.PD = false
	if ce := judge(t, s).Counterexample; ce != nil {
		t.Fatal(ce)
	}
}

// TestCounterexampleIsTheSmallest: the same failure is found first for any number of
// workers and for longer prompts.
func TestCounterexampleIsTheSmallest(t *testing.T) {
	var first string
	for _, workers := range []int{1, 2, 7} {
		for _, longest := range []uint64{300, 3000} {
			s := subject(longest, 64, nil, part{"sliding", abitest.Forgetful(specs.Window()), []uint64{40, 0}, 4, 2}, full(4, 4))
			rep, err := check.Run(context.Background(), s, check.Options{Seed: 1, Workers: workers})
			require.NoError(t, err)
			if first == "" {
				first = rep.Counterexample.String()
			}
			require.Equal(t, first, rep.Counterexample.String())
		}
	}
}

// failing answers until the prompt is long, then fails.
type failing struct {
	abi.Spec
	err error
}

func (f failing) Open(p []uint64) (abi.Rule, error) {
	r, err := f.Spec.Open(p)
	return failingRule{r.(abi.SpecRule), f.err}, err
}

type failingRule struct {
	abi.SpecRule
	err error
}

func (f failingRule) Scan(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	if r.BoundTokens > 70 {
		return abi.Span{}, f.err
	}
	return f.SpecRule.Scan(r, s, d)
}

type tooLate struct{}

func (tooLate) Error() string { return "still running" }
func (tooLate) Timeout() bool { return true }

// TestRuleThatFails: a rule must answer; where it does not, it is refused with the round
// that it was asked. A call that the clock ended decides nothing.
func TestRuleThatFails(t *testing.T) {
	wide := []uint64{20, 0}
	ce := judge(t, subject(400, 64, nil, part{"sliding", failing{specs.Window(), errors.New("out of cheese")}, wide, 4, 2}, full(4, 4))).Counterexample
	require.NotNil(t, ce)
	require.Equal(t, "pure", ce.Relation)
	require.Equal(t, "sliding", ce.Group)
	require.Equal(t, "the rule fails where it must answer: scan of sliding, chunks 0 to 9 (prompt_tokens 72, stored_tokens 72, align_tokens 64, bound_tokens 71): out of cheese", ce.Why)

	_, err := check.Run(context.Background(), subject(400, 64, nil, part{"sliding", failing{specs.Window(), tooLate{}}, wide, 4, 2}, full(4, 4)), check.Options{Seed: 1})
	require.ErrorContains(t, err, "bound_tokens 71): still running")
}

func TestCancelledCheckDecidesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := check.Run(ctx, subject(300, 16, nil, full(4, 4)), check.Options{})
	require.ErrorIs(t, err, context.Canceled)
}

var rewrite = flag.Bool("rewrite", false, "rewrite the golden drawings")

// TestDrawings compares the drawn counterexamples with testdata/*.txt: they are what an
// author reads first.
func TestDrawings(t *testing.T) {
	for name, s := range map[string]check.Subject{
		"forgetful":   subject(4096, 4096, nil, part{"sliding", abitest.Forgetful(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"greedy":      subject(4096, 4096, nil, part{"sliding", abitest.Greedy(specs.Window()), []uint64{128, 0}, 16, 8}, full(16, 8)),
		"blind":       subject(4096, 4096, nil, part{"sliding", abitest.Blind(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"liar":        subject(4096, 4096, nil, part{"sliding", abitest.Liar(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"hasty":       subject(4096, 4096, nil, part{"sliding", abitest.Hasty(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"frontier":    subject(4096, 4096, nil, part{"sliding", abitest.Frontier(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"miser":       subject(4096, 4096, nil, part{"sliding", abitest.Miser(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"moody":       subject(4096, 4096, nil, part{"sliding", abitest.Moody(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"weary":       subject(4096, 4096, nil, part{"sliding", abitest.Weary(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"nostalgic":   subject(4096, 4096, nil, part{"sliding", abitest.Nostalgic(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"follower":    subject(4096, 4096, nil, part{"sliding", abitest.Follower(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"echo":        subject(4096, 4096, nil, part{"sliding", abitest.Echo(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"shy":         subject(4096, 4096, nil, part{"sliding", abitest.Shy(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"choppy":      subject(4096, 4096, nil, part{"sliding", abitest.Choppy(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"hoarder":     subject(4096, 4096, nil, part{"sliding", abitest.Hoarder(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"gossip":      subject(4096, 4096, nil, part{"sliding", abitest.Gossip(specs.Window()), []uint64{256, 0}, 16, 8}, full(16, 8)),
		"chunk-level": subject(4096, 4096, []abi.Spec{policy.ChunkLevel()}, window(128, 0, 16, 8), full(16, 8)),
	} {
		t.Run(name, func(t *testing.T) {
			// One worker: what a rule that keeps state has served depends on their number.
			rep, err := check.Run(context.Background(), s, check.Options{Seed: 1, Workers: 1})
			require.NoError(t, err)
			require.NotNil(t, rep.Counterexample)
			golden(t, name, rep.Counterexample.String())
		})
	}
}

// golden compares a drawing with the one that is kept.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", strings.ReplaceAll(name, " ", "-")+".txt")
	if *rewrite {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

// BenchmarkDemo is the demo's deployment with native rules: the floor for wasm ones.
func BenchmarkDemo(b *testing.B) {
	s := subject(131072, 4096, []abi.Spec{policy.RequestLevel()}, window(128, 0, 16, 8), full(16, 8))
	for b.Loop() {
		rep, err := check.Run(context.Background(), s, check.Options{Seed: 1})
		if err != nil || rep.Counterexample != nil {
			b.Fatal(rep, err)
		}
	}
}
