package abitest

import (
	"slices"
	"sync"

	"github.com/tierd/tierd/abi"
)

// The adversaries of this file break LawPure only: whatever they answer is a right answer
// to some question, or does no harm by itself. Each keeps its state in another place, and
// so shows it to another test.
//
// Several of them blurt when they are wrong: a deferred scan then marks every unknown
// chunk of its range and not only those that matter. Nothing else in a deployment depends
// on that, so only relation pure can refuse them.
func blurt(r *abi.Round, states abi.States, span abi.Span, demand abi.Bitmap) {
	if span.Deferred {
		states.Mark(abi.Unknown, 0, r.Chunks(), demand)
	}
}

// WearyCalls is how many calls Weary answers well.
const WearyCalls = 5000

// Weary returns a spec rule that is right until an opened rule has answered WearyCalls
// calls, and blurts from then on.
func Weary(s abi.Spec) abi.Spec {
	return wrap("weary", s, func(r abi.SpecRule) abi.SpecRule { return &weary{SpecRule: r} })
}

type weary struct {
	abi.SpecRule
	calls int
}

func (w *weary) Reach(r abi.Round, out abi.Bitmap) error {
	w.calls++
	return w.SpecRule.Reach(r, out)
}

func (w *weary) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	w.calls++
	span, err := w.SpecRule.Scan(r, states, demand)
	if w.calls > WearyCalls {
		blurt(&r, states, span, demand)
	}
	return span, err
}

func (w *weary) Need(r abi.Round, out abi.Bitmap) error {
	w.calls++
	return w.SpecRule.Need(r, out)
}

// Nostalgic returns a spec rule that remembers the prompt of the call before: it blurts
// after a longer one.
func Nostalgic(s abi.Spec) abi.Spec {
	return wrap("nostalgic", s, func(r abi.SpecRule) abi.SpecRule { return &nostalgic{SpecRule: r} })
}

type nostalgic struct {
	abi.SpecRule
	prompt uint64
}

func (n *nostalgic) Reach(r abi.Round, out abi.Bitmap) error {
	n.prompt = r.PromptTokens
	return n.SpecRule.Reach(r, out)
}

func (n *nostalgic) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := n.SpecRule.Scan(r, states, demand)
	if n.prompt > r.PromptTokens {
		blurt(&r, states, span, demand)
	}
	n.prompt = r.PromptTokens
	return span, err
}

// Follower returns a spec rule whose Scan depends on the last Reach: it blurts when that
// named an odd number of chunks.
func Follower(s abi.Spec) abi.Spec {
	return wrap("follower", s, func(r abi.SpecRule) abi.SpecRule { return &follower{SpecRule: r} })
}

type follower struct {
	abi.SpecRule
	odd bool
}

func (f *follower) Reach(r abi.Round, out abi.Bitmap) error {
	err := f.SpecRule.Reach(r, out)
	f.odd = out.Count()%2 == 1
	return err
}

func (f *follower) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := f.SpecRule.Scan(r, states, demand)
	if f.odd {
		blurt(&r, states, span, demand)
	}
	return span, err
}

// Echo returns a spec rule whose Need depends on the last Scan: after one that was
// deferred it leaves out its lowest chunk.
func Echo(s abi.Spec) abi.Spec {
	return wrap("echo", s, func(r abi.SpecRule) abi.SpecRule { return &echo{SpecRule: r} })
}

type echo struct {
	abi.SpecRule
	deferred bool
}

func (e *echo) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := e.SpecRule.Scan(r, states, demand)
	e.deferred = span.Deferred
	return span, err
}

func (e *echo) Need(r abi.Round, out abi.Bitmap) error {
	err := e.SpecRule.Need(r, out)
	if first := out.Next(0); e.deferred && err == nil && first >= 0 {
		out.Unset(first)
	}
	return err
}

// Shy returns a spec rule whose first call, of any function, is answered with nothing.
func Shy(s abi.Spec) abi.Spec {
	return wrap("shy", s, func(r abi.SpecRule) abi.SpecRule { return &shy{SpecRule: r} })
}

type shy struct {
	abi.SpecRule
	met bool
}

func (s *shy) first() bool {
	first := !s.met
	s.met = true
	return first
}

func (s *shy) Reach(r abi.Round, out abi.Bitmap) error {
	if s.first() {
		return nil
	}
	return s.SpecRule.Reach(r, out)
}

func (s *shy) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	if s.first() {
		return abi.Span{}, nil
	}
	return s.SpecRule.Scan(r, states, demand)
}

func (s *shy) Need(r abi.Round, out abi.Bitmap) error {
	if s.first() {
		return nil
	}
	return s.SpecRule.Need(r, out)
}

// Choppy returns a spec rule that keeps no state, but whose Reach depends on how the range
// is split: asked for one chunk alone, from the fourth on, it names none.
func Choppy(s abi.Spec) abi.Spec {
	return wrap("choppy", s, func(r abi.SpecRule) abi.SpecRule { return choppy{r} })
}

type choppy struct{ abi.SpecRule }

func (c choppy) Reach(r abi.Round, out abi.Bitmap) error {
	if r.Lo >= 3 && r.Chunks() == 1 {
		return nil
	}
	return c.SpecRule.Reach(r, out)
}

// Hoarder returns a spec whose rules count what was opened beside them: they blurt when
// the spec was opened with more than one set of parameter values.
func Hoarder(s abi.Spec) abi.Spec {
	h := &hoard{wrapped: wrap("hoarder", s, nil)}
	h.change = func(r abi.SpecRule) abi.SpecRule { return &hoarder{r, h} }
	return h
}

type hoard struct {
	*wrapped
	mu   sync.Mutex // handles of one spec are used by many goroutines
	sets [][]uint64
}

func (h *hoard) Open(params []uint64) (abi.Rule, error) {
	h.mu.Lock()
	if !slices.ContainsFunc(h.sets, func(s []uint64) bool { return slices.Equal(s, params) }) {
		h.sets = append(h.sets, slices.Clone(params))
	}
	h.mu.Unlock()
	return h.wrapped.Open(params)
}

func (h *hoard) several() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.sets) > 1
}

type hoarder struct {
	abi.SpecRule
	hoard *hoard
}

func (h *hoarder) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := h.SpecRule.Scan(r, states, demand)
	if h.hoard.several() {
		blurt(&r, states, span, demand)
	}
	return span, err
}

// Gossip returns a spec whose rules keep the last answer of Reach in one place for all of
// them, and look it up by the Round alone: a rule gets the answer of another one that was
// opened with other parameter values.
func Gossip(s abi.Spec) abi.Spec {
	m := new(memo)
	return wrap("gossip", s, func(r abi.SpecRule) abi.SpecRule { return &gossip{r, m} })
}

type memo struct {
	mu    sync.Mutex
	full  bool
	round abi.Round
	set   abi.Bitmap
}

type gossip struct {
	abi.SpecRule
	memo *memo
}

func (g *gossip) Reach(r abi.Round, out abi.Bitmap) error {
	g.memo.mu.Lock()
	defer g.memo.mu.Unlock()
	if m := g.memo; m.full && m.round == r {
		copy(out, m.set)
		return nil
	}
	err := g.SpecRule.Reach(r, out)
	g.memo.full, g.memo.round, g.memo.set = err == nil, r, slices.Clone(out)
	return err
}
