package abitest

import "github.com/tierd/tierd/abi"

// An Adversary makes a good spec wrong in one way.
type Adversary struct {
	// Name is lower case; the wrapped rule is called Name-original.
	Name string
	Wrap func(abi.Spec) abi.Spec
	// Relation names the relation of the registration check that refuses it.
	Relation string
	// Law names the law of this package that it breaks too, or is empty: then it keeps
	// every law, and only the registration check finds it.
	Law string
	// Params says that it needs a rule that takes parameters: with one set of values it is
	// right.
	Params bool
}

// Adversaries returns the wrong specs that wrap a spec, in a stable order. The
// registration check must refuse each when it wraps a rule with a window.
func Adversaries() []Adversary {
	return []Adversary{
		{"forgetful", Forgetful, "covers", "", false},
		{"greedy", Greedy, "covers", "", false},
		{"blind", Blind, "needs", "", false},
		{"liar", Liar, "needs", "", false},
		{"hasty", Hasty, "states", LawAnswered, false},
		{"lagging", Lagging, "states", LawPending, false},
		{"frontier", Frontier, "schedule", "", false},
		{"miser", Miser, "useful", "", false},
		{"moody", Moody, "pure", LawPure, false},
		{"weary", Weary, "pure", LawPure, false},
		{"nostalgic", Nostalgic, "pure", LawPure, false},
		{"follower", Follower, "pure", LawPure, false},
		{"echo", Echo, "pure", LawPure, false},
		{"shy", Shy, "pure", LawPure, false},
		{"choppy", Choppy, "pure", LawPure, false},
		{"hoarder", Hoarder, "pure", LawPure, true},
		{"gossip", Gossip, "pure", LawPure, true},
	}
}

// A wrapped is a spec whose rule is changed after it has been opened.
type wrapped struct {
	spec     abi.Spec
	manifest abi.Manifest
	change   func(abi.SpecRule) abi.SpecRule
}

func wrap(name string, s abi.Spec, change func(abi.SpecRule) abi.SpecRule) *wrapped {
	w := &wrapped{spec: s, manifest: *s.Manifest(), change: change}
	w.manifest.Name = name + "-" + w.manifest.Name
	return w
}

func (w *wrapped) Manifest() *abi.Manifest { return &w.manifest }

func (w *wrapped) Open(params []uint64) (abi.Rule, error) {
	if err := w.manifest.CheckParams(params); err != nil {
		return nil, err
	}
	r, err := w.spec.Open(params)
	if err != nil {
		return nil, err
	}
	return w.change(r.(abi.SpecRule)), nil
}

// Forgetful returns a spec rule whose Reach leaves out the first chunk of its set when
// a resume point is given. It keeps every law; relation covers refuses it, because the
// consumer waits for that chunk.
func Forgetful(s abi.Spec) abi.Spec {
	return wrap("forgetful", s, func(r abi.SpecRule) abi.SpecRule { return forgetful{r} })
}

type forgetful struct{ abi.SpecRule }

func (f forgetful) Reach(r abi.Round, out abi.Bitmap) error {
	if err := f.SpecRule.Reach(r, out); err != nil || r.ResumeTokens == 0 {
		return err
	}
	before := r // the chunks below Lo: the first of the set may be there
	before.Lo, before.Hi = 0, r.Lo
	set := abi.NewBitmap(before.Chunks())
	if err := f.SpecRule.Reach(before, set); err != nil {
		return err
	}
	if first := out.Next(0); set.Empty() && first >= 0 {
		out.Unset(first)
	}
	return nil
}

// Greedy returns a spec rule whose Scan demands every chunk of the range that is Hit or
// Pending, needed or not. It keeps every law; relation covers refuses it, because a
// producer stores less than that.
func Greedy(s abi.Spec) abi.Spec {
	return wrap("greedy", s, func(r abi.SpecRule) abi.SpecRule { return greedy{r} })
}

type greedy struct{ abi.SpecRule }

func (g greedy) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := g.SpecRule.Scan(r, states, demand)
	if err == nil && !span.Deferred {
		states.Mark(abi.Here, 0, r.Chunks(), demand)
	}
	return span, err
}

// Blind returns a spec rule whose Scan leaves out the lowest chunk that it should
// demand. It keeps every law; relation needs refuses it, because attention would read
// KV that was not fetched.
func Blind(s abi.Spec) abi.Spec {
	return wrap("blind", s, func(r abi.SpecRule) abi.SpecRule { return blind{r} })
}

type blind struct{ abi.SpecRule }

func (b blind) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := b.SpecRule.Scan(r, states, demand)
	if first := demand.Next(0); err == nil && !span.Deferred && first >= 0 {
		demand.Unset(first)
	}
	return span, err
}

// Liar returns a spec rule whose Need leaves out its lowest chunk. It keeps every law;
// relation needs refuses it, because the mask of its manifest says otherwise.
func Liar(s abi.Spec) abi.Spec {
	return wrap("liar", s, func(r abi.SpecRule) abi.SpecRule { return liar{r} })
}

type liar struct{ abi.SpecRule }

func (l liar) Need(r abi.Round, out abi.Bitmap) error {
	err := l.SpecRule.Need(r, out)
	if first := out.Next(0); err == nil && first >= 0 {
		out.Unset(first)
	}
	return err
}

// Hasty returns a spec rule whose Scan takes Retry for Hit. It breaks the laws
// LawAnswered and LawUnknown; relation states refuses it.
func Hasty(s abi.Spec) abi.Spec {
	return wrap("hasty", s, func(r abi.SpecRule) abi.SpecRule { return confused{r, abi.Retry, abi.Hit} })
}

// Lagging returns a spec rule whose Scan takes Pending for Miss, and so is right only
// once everything has been written. It breaks LawPending; relation states refuses it.
func Lagging(s abi.Spec) abi.Spec {
	return wrap("lagging", s, func(r abi.SpecRule) abi.SpecRule { return confused{r, abi.Pending, abi.Miss} })
}

// confused is a rule whose scans take the state from for the state to.
type confused struct {
	abi.SpecRule
	from, to abi.State
}

func (c confused) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	return c.SpecRule.Scan(r, swap(states, r.Chunks(), c.from, c.to), demand)
}

// Frontier returns a spec rule whose Reach, when asked for the aligned tails only, also
// keeps what resuming at the stored length needs. Its supply then depends on where the
// producer's steps end. It keeps every law; relation schedule refuses it.
func Frontier(s abi.Spec) abi.Spec {
	return wrap("frontier", s, func(r abi.SpecRule) abi.SpecRule { return frontier{r} })
}

type frontier struct{ abi.SpecRule }

func (f frontier) Reach(r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens == 0 {
		r.ResumeTokens = r.StoredTokens
	}
	return f.SpecRule.Reach(r, out)
}

// Miser returns a spec rule whose Scan never finds anything usable. It keeps every law,
// and nothing unsafe can come of it; relation useful refuses it.
func Miser(s abi.Spec) abi.Spec {
	return wrap("miser", s, func(r abi.SpecRule) abi.SpecRule { return miser{r} })
}

type miser struct{ abi.SpecRule }

func (miser) Scan(abi.Round, abi.States, abi.Bitmap) (abi.Span, error) { return abi.Span{}, nil }

// Moody returns a spec rule that keeps state between calls: every third Reach of an
// opened rule answers the empty set. It breaks LawPure; relation pure refuses it.
func Moody(s abi.Spec) abi.Spec {
	return wrap("moody", s, func(r abi.SpecRule) abi.SpecRule { return &moody{SpecRule: r} })
}

type moody struct {
	abi.SpecRule
	calls int
}

func (m *moody) Reach(r abi.Round, out abi.Bitmap) error {
	if m.calls++; m.calls%3 == 0 {
		return nil
	}
	return m.SpecRule.Reach(r, out)
}

// Newcomer returns a policy that admits only chunks at or above resident_tokens: what
// its tier does not hold yet. It has no good rule to wrap. It keeps every law; for a
// producer leg relation warm refuses it, because the warmer its cache, the less it
// supplies.
func Newcomer() abi.Spec {
	return &newcomer{abi.Manifest{Name: "newcomer", Version: "1.0.0", Kind: abi.KindPolicy}}
}

type newcomer struct{ manifest abi.Manifest }

func (n *newcomer) Manifest() *abi.Manifest { return &n.manifest }

func (n *newcomer) Open(params []uint64) (abi.Rule, error) {
	if err := n.manifest.CheckParams(params); err != nil {
		return nil, err
	}
	return newcomerRule{}, nil
}

type newcomerRule struct{}

func (newcomerRule) Reach(r abi.Round, out abi.Bitmap) error {
	for c := r.Lo; c < r.Hi; c++ {
		if uint64(c)*r.ChunkTokens >= r.ResidentTokens {
			out.Set(int(c - r.Lo))
		}
	}
	return nil
}

func (newcomerRule) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	return abi.Span{Usable: r.Hi - r.Lo}, nil
}
