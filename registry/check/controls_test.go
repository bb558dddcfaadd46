package check_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
	"pgregory.net/rapid"
)

// A control is a deployment that is wrong in one way, and must be refused.
type control struct {
	name, relation, group string
	s                     check.Subject
}

// also lists, per control, the other relations that the same mistake breaks when the check
// goes on after the first failure: a hole in the supply is there for a warm producer, too.
var also = map[string][]string{
	"stores too short a tail":     {"caps", "useful", "warm"},
	"fetches too short a tail":    {"width"},
	"resumes earlier than it can": {"width"},
	"stores the tail of the last whole chunk, where a policy lets in less":  {"useful", "warm"},
	"stores the tail of the prompt's end, where a store cap ends before it": {"useful", "warm", "width"},
	"fetches all when its own tier holds the end, which a policy keeps out": {"width"},
}

// controls returns the negative controls of Run's relations. Those of relation pair are in
// pair_test.go; relation cascade judges the host, and its controls are in package host.
func controls() []control {
	sliding := func(spec abi.Spec) check.Subject {
		return subject(700, 64, nil, part{"sliding", spec, []uint64{20, 0}, 4, 2}, full(4, 4))
	}
	capped := func(s check.Subject, tokens uint64) check.Subject {
		open := s.Open
		s.Open = func() (plan.Model, func(), error) {
			m, release, err := open()
			m.MaxStoreTokens = tokens
			return m, release, err
		}
		return s
	}
	adversary := func(name string) abi.Spec {
		for _, a := range abitest.Adversaries() {
			if a.Name == name {
				return renamed{a.Wrap(specs.Window())}
			}
		}
		panic("no adversary " + name)
	}
	pd := func(s check.Subject) check.Subject { s.Probe = false; return s }
	all := must(specs.Full())
	endTail := &twisted{Spec: specs.Window(), reach: atTheEnd}
	everything := &twisted{Spec: specs.Window(), reach: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error { return all.Reach(r, out) }}
	glutton := &twisted{Spec: specs.Window(), reach: everything.reach,
		scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			span, err := in.Scan(r, s, d)
			if !span.Deferred {
				s.Mark(abi.Here, 0, int(span.Usable), d)
			}
			return span, err
		}}
	return []control{
		{"answers by what it was asked before", "pure", "sliding", sliding(adversary("moody"))},
		{"uses what is not known yet", "states", "sliding", sliding(adversary("hasty"))},
		{"stores too short a tail", "covers", "sliding", sliding(adversary("forgetful"))},
		{"fetches too short a tail", "needs", "sliding", sliding(adversary("blind"))},
		{"a policy fetches a few tokens at a time", "caps", "sliding",
			subject(700, 64, []abi.Spec{sip(24)}, window(20, 0, 4, 2), full(4, 4))},
		{"stores the tail of the prompt's end, where a store cap ends before it", "caps", "sliding",
			capped(subject(700, 64, nil, part{"sliding", endTail, []uint64{20, 0}, 4, 2}, full(4, 4)), 300)},
		{"stores the tail of the prompt's end, where the engine caps a request", "caps", "sliding", sliding(endTail)},
		{"stores the tail of the last whole chunk, where a policy lets in less", "caps", "sliding",
			subject(700, 64, []abi.Spec{firstTokens(300)}, part{"sliding", &twisted{Spec: specs.Window(), reach: lastChunk}, []uint64{20, 0}, 4, 2}, full(4, 2))},
		{"keeps no aligned tails, for a consumer with a load cap", "caps", "sliding", pd(sliding(&twisted{Spec: specs.Window(),
			reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error { r.AlignTokens = 0; return in.Reach(r, out) }}))},
		{"stores what its key does not name", "content", "decoded",
			subject(300, 48, nil, part{"decoded", &twisted{Spec: specs.RSWA(), reach: everything.reach}, []uint64{20}, 8, 2}, full(4, 4))},
		{"resumes earlier than it can", "useful", "sliding", sliding(adversary("miser"))},
		{"keeps another tail when a request is aborted", "schedule", "sliding", sliding(&twisted{Spec: specs.Window(),
			reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
				if r.AlignTokens > 0 && r.ResumeTokens == 0 && r.StoredTokens >= r.AlignTokens {
					r.ResumeTokens = r.StoredTokens / r.ChunkTokens * r.ChunkTokens
				}
				return in.Reach(r, out)
			}})},
		{"a policy stores only what is new", "warm", "sliding",
			subject(400, 64, []abi.Spec{policy.ChunkLevel()}, window(20, 0, 4, 2), full(4, 4))},
		{"a policy keeps no aligned tails of what it was offered before", "warm", "sliding",
			subject(700, 64, []abi.Spec{lastOfAgain(5)}, window(20, 0, 4, 2))},
		{"keeps no aligned tails where it is told a junction", "covers", "sliding", sliding(&twisted{Spec: specs.Window(),
			reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
				if r.JunctionTokens > 0 {
					r.AlignTokens = 0
				}
				return in.Reach(r, out)
			}})},
		{"takes the chunk of which half is local for local", "needs", "sliding", sliding(&twisted{Spec: specs.Window(),
			scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
				span, err := in.Scan(r, s, d)
				if !span.Deferred && r.LocalTokens%r.ChunkTokens != 0 {
					d.Unset(0)
				}
				return span, err
			}})},
		{"fetches all when its own tier holds the end, which a policy keeps out", "covers", "sliding",
			subject(700, 0, []abi.Spec{butLast(4)}, part{"sliding", &twisted{Spec: specs.Window(),
				scan: func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
					span, err := in.Scan(r, s, d)
					if n := r.Chunks(); !span.Deferred && int(span.Usable) == n && r.BoundTokens+1 == r.PromptTokens {
						s.Mark(abi.Here, 0, n, d)
					}
					return span, err
				}}, []uint64{20, 0}, 4, 2})},
		{"fetches everything that is stored", "width", "sliding", subject(700, 64, nil, part{"sliding", glutton, []uint64{20, 0}, 4, 2})},
		{"stores everything, and fetches a tail", "width", "sliding", sliding(everything)},
		{"fetches more than it claims", "width", "sliding",
			subject(700, 64, nil, part{"sliding", glutton, []uint64{20, 9}, 4, 2})},
		{"fetches two states, where all are saved", "width", "state",
			subject(300, 48, nil, part{"state", &twisted{Spec: specs.State(), scan: glutton.scan}, []uint64{0}, 8, 1}, full(4, 4))},
		{"stores everything of a generated text", "width", "sliding", sliding(&twisted{Spec: specs.Window(), reach: allDecoded})},
	}
}

// atTheEnd stores the tail of the stored prompt's end and of aligned points, wherever a
// consumer resumes.
func atTheEnd(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens > 0 && r.StoredTokens < r.PromptTokens {
		r.ResumeTokens = r.StoredTokens/r.ChunkTokens*r.ChunkTokens + 2*r.ChunkTokens
	}
	return in.Reach(r, out)
}

// allDecoded stores every chunk behind the prompt, beside the tails.
func allDecoded(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
	if from := max(r.PromptTokens/r.ChunkTokens, uint64(r.Lo)); from < uint64(r.Hi) {
		out.SetRange(int(from)-int(r.Lo), r.Chunks())
	}
	return in.Reach(r, out)
}

// lastChunk stores the tail of the last whole chunk of what is stored, where a consumer
// resumes unless something limits it.
func lastChunk(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens > 0 {
		r.ResumeTokens = r.StoredTokens / r.ChunkTokens * r.ChunkTokens
	}
	return in.Reach(r, out)
}

// sip is a policy that fetches at most some tokens beyond the local prefix.
type sip uint64

func (sip) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "sip", Version: "1.0.0", Kind: abi.KindPolicy}
}

func (s sip) Open([]uint64) (abi.Rule, error) { return s, nil }

func (sip) Reach(r abi.Round, out abi.Bitmap) error {
	out.SetRange(0, r.Chunks())
	return nil
}

func (s sip) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	end := min(r.BoundTokens, r.LocalTokens+uint64(s)+r.ChunkTokens-1) / r.ChunkTokens
	return abi.Span{Usable: min(uint32(r.Chunks()), uint32(max(end, uint64(r.Lo))-uint64(r.Lo)))}, nil
}

// lastOfAgain is a policy that lets in everything at the first offer, and then the last chunks
// alone. A cold consumer that resumes at the prompt's end asks for no more.
type lastOfAgain uint64

func (lastOfAgain) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "last-of-again", Version: "1.0.0", Kind: abi.KindPolicy}
}

func (l lastOfAgain) Open([]uint64) (abi.Rule, error) { return l, nil }

func (l lastOfAgain) Reach(r abi.Round, out abi.Bitmap) error {
	first := uint64(0)
	if n := r.StoredTokens / r.ChunkTokens; r.Offers > 0 && n > uint64(l) {
		first = n - uint64(l)
	}
	for c := max(first, uint64(r.Lo)); c < uint64(r.Hi); c++ {
		out.Set(int(c - uint64(r.Lo)))
	}
	return nil
}

func (lastOfAgain) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	return abi.Span{Usable: uint32(r.Chunks())}, nil
}

// butLast is a policy that does not let in the last chunks, and lets all be fetched.
type butLast uint64

func (butLast) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "but-last", Version: "1.0.0", Kind: abi.KindPolicy}
}

func (l butLast) Open([]uint64) (abi.Rule, error) { return l, nil }

func (l butLast) Reach(r abi.Round, out abi.Bitmap) error {
	n := r.StoredTokens / r.ChunkTokens
	for c := uint64(r.Lo); c < min(uint64(r.Hi), n-min(n, uint64(l))); c++ {
		out.Set(int(c - uint64(r.Lo)))
	}
	return nil
}

func (butLast) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	return abi.Span{Usable: uint32(r.Chunks())}, nil
}

// firstTokens is the shipped policy cap, opened without its parameter.
type firstTokens uint64

func (firstTokens) Manifest() *abi.Manifest { return policy.Cap().Manifest() }

func (f firstTokens) Open([]uint64) (abi.Rule, error) { return policy.Cap().Open([]uint64{uint64(f)}) }

// TestControls: each control is refused by its relation, and by no other one, when every
// part of the check runs to its end. A rule that keeps state breaks whatever it likes, so
// of that only the name of the refusal counts.
func TestControls(t *testing.T) {
	have := map[string]bool{}
	for _, c := range controls() {
		have[c.relation] = true
		t.Run(c.relation+", "+c.name, func(t *testing.T) {
			ce := judge(t, c.s).Counterexample
			require.NotNil(t, ce, "accepted, but %s must refuse it", c.relation)
			require.Equal(t, c.relation, ce.Relation, ce.String())
			require.Equal(t, c.group, ce.Group, ce.String())
			if c.relation == "caps" || c.relation == "width" {
				golden(t, "control-"+strings.NewReplacer(",", "", "'", "").Replace(c.name), ce.String())
			}
			if raceEnabled { // the goroutines are the same
				return
			}
			names, err := check.Refusing(context.Background(), c.s, check.Options{Seed: 1})
			require.NoError(t, err)
			if c.relation != "pure" {
				require.ElementsMatch(t, append([]string{c.relation}, also[c.name]...), names)
			}
		})
	}
	for _, name := range check.Relations {
		require.True(t, have[name], "relation %s has no control", name)
	}
}

// minPull is the shipped policy, opened without its parameter.
type minPull uint64

func (minPull) Manifest() *abi.Manifest { return policy.MinPull().Manifest() }

func (m minPull) Open([]uint64) (abi.Rule, error) { return policy.MinPull().Open([]uint64{uint64(m)}) }

// TestShippedRulesRaiseNoAlarm: drawn deployments of shipped rules and policies are accepted
// by every relation, alone and as a pair with themselves.
func TestShippedRulesRaiseNoAlarm(t *testing.T) {
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		if n++; raceEnabled && n > 15 { // the goroutines are the same
			return
		}
		s := drawnSubject(t)
		rep, err := check.Run(context.Background(), s, check.Options{Seed: 1})
		require.NoError(t, err)
		require.Nil(t, rep.Counterexample, "%v", rep.Counterexample)
		rep, err = check.Pair(context.Background(), named("a", s), named("b", s), check.Options{Seed: 1})
		require.NoError(t, err)
		require.Nil(t, rep.Counterexample, "%v", rep.Counterexample)
	})
}

func drawnSubject(t *rapid.T) check.Subject {
	n := func(name string, lo, hi uint64) uint64 { return rapid.Uint64Range(lo, hi).Draw(t, name) }
	parts := []part{full(4, n("full blocks", 1, 4))}
	groups, reads := n("groups", 1, 2), ""
	for i := range groups {
		p := part{name: []string{"a", "b"}[i], block: rapid.SampledFrom([]uint64{1, 4, 8}).Draw(t, "block"), blocks: n("blocks", 1, 3)}
		switch rapid.IntRange(0, 6).Draw(t, "rule") {
		case 0, 1:
			p.spec, p.params = specs.Window(), []uint64{n("window", 1, 60), n("extra", 0, 20)}
		case 2:
			p.spec, p.params = specs.Sink(), []uint64{n("sink", 1, 20), n("window", 1, 60)}
		case 3:
			p.spec, p.params = specs.Chunked(), []uint64{n("attention chunk", 1, 60)}
		case 4:
			p.spec, p.params, p.blocks = specs.State(), []uint64{n("mode", 0, 1)}, 1
		case 5:
			p.spec, p.params, reads = specs.RSWA(), []uint64{n("window", 1, 60)}, "less of a generated text"
		case 6:
			p.spec, p.params = specs.Latent(), []uint64{1}
		}
		parts = append(parts, p)
	}
	lcm := uint64(1)
	for _, p := range parts {
		lcm = plan.LCM(lcm, p.block*p.blocks)
	}
	var policies []abi.Spec
	switch rapid.IntRange(0, 4).Draw(t, "policy") {
	case 0:
		policies = []abi.Spec{policy.RequestLevel()}
	case 1:
		policies = []abi.Spec{firstTokens(n("cap", 1, 150))}
	case 2:
		policies = []abi.Spec{minPull(n("min pull", 1, 60))}
	case 3:
		policies = []abi.Spec{policy.PromptOnly(), firstTokens(n("cap", 1, 150))}
	}
	if reads != "" { // so what other groups decode is computed from less, too
		policies = append(policies, policy.PromptOnly())
	}
	return storing(rapid.SampledFrom([]uint64{0, 0, 33, 90}).Draw(t, "store cap"), subject(40+n("longest", 0, 50), lcm*n("align", 0, 2), policies, parts...))
}
