package check_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// twisted is the shipped window rule with some of its functions replaced.
type twisted struct {
	abi.Spec
	reach func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error
	scan  func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error)
	need  func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error
}

type twistedRule struct {
	abi.SpecRule
	t *twisted
}

func (t *twisted) Open(p []uint64) (abi.Rule, error) {
	r, err := t.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return &twistedRule{r.(abi.SpecRule), t}, nil
}

func (r *twistedRule) Reach(x abi.Round, out abi.Bitmap) error {
	if r.t.reach != nil {
		return r.t.reach(r.SpecRule, x, out)
	}
	return r.SpecRule.Reach(x, out)
}

func (r *twistedRule) Scan(x abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	if r.t.scan != nil {
		return r.t.scan(r.SpecRule, x, s, d)
	}
	return r.SpecRule.Scan(x, s, d)
}

func (r *twistedRule) Need(x abi.Round, out abi.Bitmap) error {
	if r.t.need != nil {
		return r.t.need(r.SpecRule, x, out)
	}
	return r.SpecRule.Need(x, out)
}

// choosy is a policy that fetches all, and admits what a function says.
type choosy struct {
	abi.Spec
	admits func(r *abi.Round) bool
}

func (c *choosy) Open([]uint64) (abi.Rule, error) { return c, nil }

func (c *choosy) Reach(r abi.Round, out abi.Bitmap) error {
	if c.admits(&r) {
		out.SetRange(0, r.Chunks())
	}
	return nil
}

func (c *choosy) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	return abi.Span{Usable: r.Hi - r.Lo}, nil
}

// become returns a table with every entry of one state replaced.
func become(s abi.States, n int, from, to abi.State) abi.States {
	t := append(abi.States(nil), s...)
	for i := range n {
		if t.At(i) == from {
			t.Put(i, to)
		}
	}
	return t
}

// TestRulesThatAreWrongInACorner: each rule is right in most cases and wrong in some that
// a daemon meets.
func TestRulesThatAreWrongInACorner(t *testing.T) {
	rule := func(tw twisted) check.Subject {
		tw.Spec = specs.Window()
		return subject(1500, 64, nil, part{"sliding", &tw, []uint64{20, 0}, 4, 2}, full(4, 4))
	}
	polite := func(admits func(r *abi.Round) bool) check.Subject {
		return subject(1500, 64, []abi.Spec{&choosy{policy.RequestLevel(), admits}}, window(20, 0, 4, 2), full(4, 4))
	}
	narrow, err := specs.Window().Open([]uint64{10, 0})
	require.NoError(t, err)
	half := narrow.(abi.SpecRule)
	noAlign := rule(twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
		r.AlignTokens = 0
		return in.Reach(r, out)
	}})
	noAlign.Probe = false
	noTail := twisted{Spec: specs.Window(), reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
		if r.StoredTokens > r.PromptTokens {
			return nil
		}
		return in.Reach(r, out)
	}}
	for name, c := range map[string]struct {
		relation string
		s        check.Subject
	}{
		"need in blocks names all": {"needs", rule(twisted{need: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.ChunkTokens == r.BlockTokens {
				out.SetRange(0, int(r.Hi))
				return nil
			}
			return in.Need(r, out)
		}})},
		"half the window at one point far from every edge": {"needs", rule(twisted{
			need: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
				if r.ResumeTokens == 800 {
					in = half
				}
				return in.Need(r, out)
			},
			scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
				if r.BoundTokens == 800 {
					in = half
				}
				return in.Scan(r, s, d)
			},
		})},
		"a junction empties the supply": {"covers", rule(twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.JunctionTokens > 0 {
				return nil
			}
			return in.Reach(r, out)
		}})},
		"the junction is ignored": {"useful", rule(twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.JunctionTokens = 0
			return in.Reach(r, out)
		}})},
		"nothing of a generated text is kept": {"useful", subject(600, 0, nil, part{"sliding", &noTail, []uint64{20, 0}, 4, 2}, full(4, 4))},
		"no aligned tails, leg pd alone":      {"caps", noAlign},
		"greedy at odd local prefixes": {"covers", rule(twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if l := r.LocalTokens; r.Chunks() > 8 && l%8 == 3 && l < r.BoundTokens/3 {
				s.Mark(abi.Here, 0, r.Chunks(), d)
			}
			return sp, err
		}})},
		"leaves out pending chunks of 10 to 29": {"needs", rule(twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			for i := 0; i < r.Chunks() && r.Chunks() > 9 && r.Chunks() < 30 && !sp.Deferred; i++ {
				if s.At(i) == abi.Pending {
					d.Unset(i)
				}
			}
			return sp, err
		}})},
		"takes retry for miss": {"states", rule(twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			return in.Scan(r, become(s, r.Chunks(), abi.Retry, abi.Miss), d)
		}})},
		"takes retry for hit among 10 to 29 chunks": {"states", rule(twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			if n := r.Chunks(); n > 9 && n < 30 {
				s = become(s, n, abi.Retry, abi.Hit)
			}
			return in.Scan(r, s, d)
		}})},
		"takes retry for hit at odd local prefixes": {"states", rule(twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			if r.LocalTokens%r.ChunkTokens != 0 {
				s = become(s, r.Chunks(), abi.Retry, abi.Hit)
			}
			return in.Scan(r, s, d)
		}})},
		"admits nothing to a tier that holds most": {"warm", polite(func(r *abi.Round) bool {
			return r.ResidentTokens*10 <= r.PromptTokens*6 || r.ResidentTokens >= r.PromptTokens
		})},
		"admits nothing after two offers": {"warm", polite(func(r *abi.Round) bool { return r.Offers < 2 })},
		"reach fails at one length": {"pure", rule(twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.PromptTokens == 37 {
				return errors.New("boom")
			}
			return in.Reach(r, out)
		}})},
	} {
		t.Run(name, func(t *testing.T) {
			ce := judge(t, c.s).Counterexample
			require.NotNil(t, ce, "accepted, but it is wrong")
			require.Equal(t, c.relation, ce.Relation, ce.String())
		})
	}
}

// TestLatentIsJudged: a right rule that cannot resume everywhere is neither refused nor
// left undecided.
func TestLatentIsJudged(t *testing.T) {
	s := subject(300, 16, nil, part{"latent", latent{specs.Full()}, []uint64{4}, 8, 1}, full(4, 4))
	if ce := judge(t, s).Counterexample; ce != nil {
		t.Fatal(ce)
	}
}

// latent is full attention that resumes at multiples of 4 tokens only.
type latent struct{ abi.Spec }

func (latent) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "latent", Version: "1", Kind: abi.KindSpec, Mask: abi.MaskLatent, MaskArgs: []string{"ratio"},
		Params: []abi.Param{{Name: "ratio", Min: 1, Max: 64, Required: true}}}
}

func (l latent) Open([]uint64) (abi.Rule, error) {
	r, err := l.Spec.Open(nil)
	if err != nil {
		return nil, err
	}
	return latentRule{r.(abi.SpecRule)}, nil
}

type latentRule struct{ abi.SpecRule }

func (l latentRule) Need(r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens%4 != 0 {
		return abi.ErrNoResume
	}
	return l.SpecRule.Need(r, out)
}

func (l latentRule) Scan(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	span, err := l.SpecRule.Scan(r, s, d)
	if end := uint64(r.Lo) + uint64(span.Usable); err == nil && !span.Deferred && span.Usable > 0 && min(r.BoundTokens, end*r.ChunkTokens)%4 != 0 {
		span.Usable--
		d.Unset(int(span.Usable))
	}
	return span, err
}

// TestLongestDeploymentIsInTheContract: the check's own Rounds keep the contract's bounds
// for a deployment of as many chunks as it allows.
func TestLongestDeploymentIsInTheContract(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	strict := twisted{Spec: specs.Window(), scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		if err := r.Validate(); err != nil {
			return abi.Span{}, err
		}
		return in.Scan(r, s, d)
	}}
	s := subject(abi.MaxChunks, 0, nil, part{"sliding", &strict, []uint64{20, 0}, 1, 1})
	rep, err := check.Run(ctx, s, check.Options{Seed: 1, Progress: func(done, _ int) {
		if done > 2000 { // pure and states are done
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled, "%v", rep)
}

// TestEveryPartOfTheCheckCanFail: each rule breaks one thing that one part of a relation
// looks at, and nothing that the others do.
func TestEveryPartOfTheCheckCanFail(t *testing.T) {
	calls := 0
	every := func(n int) bool { calls++; return calls%n == 0 }
	for name, c := range map[string]struct {
		relation string
		base     abi.Spec
		tw       twisted
		legs     string // "" = both
	}{
		"scan keeps state": {"pure", specs.Window(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if every(5) && !sp.Deferred {
				sp.Usable = 0
				d.Zero()
			}
			return sp, err
		}}, ""},
		"need keeps state": {"pure", specs.Window(), twisted{need: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if every(5) {
				return nil
			}
			return in.Need(r, out)
		}}, ""},
		"reach depends on the range": {"pure", specs.Full(), twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.Lo > 0 {
				return nil
			}
			return in.Reach(r, out)
		}}, ""},
		"fewer usable with every chunk here": {"states", specs.Full(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if n := r.Chunks(); n > 1 && !sp.Deferred && int(sp.Usable) == n {
				sp.Usable = 0
				d.Zero()
			}
			return sp, err
		}}, ""},
		"deferred for nothing": {"states", specs.Window(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if sp.Deferred {
				d.Zero()
			}
			return sp, err
		}}, ""},
		"deferred and marks what it knows": {"states", specs.Full(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if sp.Deferred {
				d.SetRange(0, r.Chunks())
			}
			return sp, err
		}}, ""},
		"a retry that does not matter matters": {"states", specs.Window(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if n := r.Chunks(); !sp.Deferred && s.First(abi.Unknown, 0, n) < n && sp.Usable > 0 {
				sp.Usable--
			}
			return sp, err
		}}, ""},
		"long tables with a hole": {"states", specs.Full(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			if r.Chunks() > 40 {
				d.SetRange(0, r.Chunks())
				return abi.Span{Usable: r.Hi - r.Lo}, nil
			}
			return in.Scan(r, s, d)
		}}, ""},
		"a hole is jumped over": {"needs", specs.Full(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			const hole = 10
			if r.Chunks() <= hole || s.At(hole) != abi.Miss {
				return in.Scan(r, s, d)
			}
			t := append(abi.States(nil), s...)
			t.Put(hole, abi.Hit)
			sp, err := in.Scan(r, t, d)
			d.Unset(hole)
			return sp, err
		}}, ""},
		"greedy with a local prefix": {"covers", specs.Window(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if r.LocalTokens > 0 && !sp.Deferred && sp.Usable > 0 {
				s.Mark(abi.Here, 0, int(sp.Usable), d)
			}
			return sp, err
		}}, ""},
		"never far enough": {"useful", specs.Full(), twisted{scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			sp, err := in.Scan(r, s, d)
			if most := uint32(9) - min(r.Lo, 9); !sp.Deferred && sp.Usable > most {
				sp.Usable = most
				d.UnsetRange(int(most), r.Chunks())
			}
			return sp, err
		}}, "pd"},
		"no aligned tails": {"useful", specs.Window(), twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.AlignTokens = 0
			return in.Reach(r, out)
		}}, "probe"},
		"only the last aligned tail": {"schedule", specs.Window(), twisted{reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.AlignTokens > 0 && r.ResumeTokens == 0 && r.StoredTokens >= r.AlignTokens {
				r.ResumeTokens = r.StoredTokens / r.ChunkTokens * r.ChunkTokens
			}
			return in.Reach(r, out)
		}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			params := []uint64{20, 0}
			if c.base.Manifest().Name == "full" {
				params = nil
			}
			c.tw.Spec = c.base
			s := subject(900, 64, nil, part{"twisted", &c.tw, params, 4, 2}, full(4, 4))
			s.PD, s.Probe = c.legs != "probe", c.legs != "pd"
			rep, err := check.Run(context.Background(), s, check.Options{Seed: 1, Workers: 1})
			require.NoError(t, err)
			require.NotNil(t, rep.Counterexample, "accepted, but %s must refuse it", c.relation)
			require.Equal(t, c.relation, rep.Counterexample.Relation, rep.Counterexample.String())
			require.Equal(t, "twisted", rep.Counterexample.Group, rep.Counterexample.String())
		})
	}
}
