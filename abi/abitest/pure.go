package abitest

import (
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
)

// A fresher is a rule that can be had in an instance of its own, newly made, that has
// served no call. Where a rule is not one, opening it again must do.
type fresher interface {
	Fresh() (r abi.Rule, release func(), err error)
}

// second returns the current rule once more, in a fresh instance when asked for, and a
// function that gives it back.
func (c *checker) second(used abi.Rule, fresh bool) (abi.Rule, func(), bool) {
	f, is := used.(fresher)
	if !is || !fresh {
		r, ok := c.open()
		return r, func() {}, ok
	}
	r, release, err := f.Fresh()
	if err != nil {
		c.breaks(LawTotal, "a fresh instance could not be made: %v", err)
		return nil, nil, false
	}
	return r, release, true
}

// A question is one call to a rule, and what it answered.
type question struct {
	fn     string
	round  abi.Round
	states abi.States
	answer *answer
	none   bool // ErrNoResume
}

func (q *question) String() string {
	s := q.fn + " of " + describe(&q.round)
	if q.fn == "Scan" {
		s += " states [" + q.states.Format(q.round.Chunks()) + "]"
	}
	return s
}

func (q *question) draw(a *answer, none bool) string {
	switch {
	case none:
		return "that no KV can be resumed there"
	case q.fn == "Scan":
		return a.draw(q.round.Chunks())
	}
	return drawRow(a.demand, q.bits())
}

// bits is how many chunks an answer is about.
func (q *question) bits() int {
	if q.fn == "Need" {
		return int(q.round.Hi)
	}
	return q.round.Chunks()
}

// drawQuestions draws calls of every function.
func (c *checker) drawQuestions() []question {
	qs := make([]question, 0, trialCalls)
	for len(qs) < trialCalls {
		r := c.drawRound()
		switch kind := c.rand.IntN(4); {
		case kind == 0:
			qs = append(qs, question{fn: "Reach", round: c.producer(r)})
		case kind == 1 && c.isSpec():
			r.ResidentTokens, r.Offers, r.LocalTokens, r.BoundTokens = 0, 0, 0, 0
			qs = append(qs, question{fn: "Need", round: r})
		default:
			r.LocalTokens /= 4 // a wide table has more that can go wrong
			r.BoundTokens = max(r.LocalTokens, min(r.StoredTokens, r.LocalTokens+(wideChunksMax-1)*r.ChunkTokens))
			r = c.consumer(r)
			qs = append(qs, question{fn: "Scan", round: r, states: c.drawMixed(r.Chunks())})
		}
	}
	return qs
}

// drawMixed draws n states one by one, half of them Retry: what defers a scan.
func (c *checker) drawMixed(n int) abi.States {
	t := abi.NewStates(n)
	for i := range n {
		if t.Put(i, abi.State(c.rand.IntN(4))); c.rand.IntN(3) == 0 {
			t.Put(i, abi.Retry)
		}
	}
	return t
}

// ask puts the question to a rule; ok is false when it has no answer, which is recorded.
func (c *checker) ask(rule abi.Rule, q *question) (a *answer, none, ok bool) {
	switch q.fn {
	case "Reach":
		set, ok := c.reach(rule, q.round)
		return &answer{demand: set}, false, ok
	case "Need":
		set, none, ok := c.need(rule.(abi.SpecRule), q.round)
		return &answer{demand: set}, none, ok
	}
	a, ok = c.scan(rule, q.round, q.states)
	return a, false, ok
}

// checkPurity asks one rule the same drawn questions in several orders: in order, after
// the rule with other parameter values was asked the same, in reverse, on a fresh
// instance in reverse, on others as the very first call and, when long is set, in one
// long run.
func (c *checker) checkPurity(used abi.Rule, nearParams []uint64, long bool) {
	qs := c.drawQuestions()
	for i := range qs {
		var ok bool
		if qs[i].answer, qs[i].none, ok = c.ask(used, &qs[i]); !ok {
			return
		}
	}
	order := make([]int, len(qs))
	for i := range order {
		order[i] = len(qs) - 1 - i
	}
	if !c.askAgain(used, nil, qs, order, "asked again in reverse order") {
		return
	}
	if near := c.near(nearParams); near != nil {
		how := fmt.Sprintf("after the rule with the values %d was asked the same,", nearParams)
		if !c.askAgain(used, near, qs, order, how) {
			return
		}
	}
	fresh, release, ok := c.second(used, true)
	if !ok {
		return
	}
	ok = c.askAgain(fresh, nil, qs, order, "on a fresh instance, in reverse order,")
	release()
	for k := 0; ok && k < freshPerSet; k++ {
		if fresh, release, ok = c.second(used, true); !ok {
			return
		}
		i := c.rand.IntN(len(qs))
		ok = c.askAgain(fresh, nil, qs, []int{i, i}, "on a fresh instance, as its first call,")
		release()
	}
	if !ok || !long {
		return
	}
	order = make([]int, longRunCalls)
	for i := range order {
		order[i] = c.rand.IntN(len(qs))
	}
	c.askAgain(used, nil, qs, order, "in a long run")
}

// near opens the rule with other parameter values. That it opens is judged where these are
// the current ones.
func (c *checker) near(params []uint64) (r abi.Rule) {
	if slices.Equal(params, c.params) {
		return nil
	}
	defer func() {
		if recover() != nil {
			r = nil
		}
	}()
	r, err := c.spec.Open(params)
	if _, is := r.(abi.SpecRule); err != nil || c.isSpec() && !is {
		return nil
	}
	return r
}

// askAgain asks questions again, each after near was asked it when near is given.
func (c *checker) askAgain(rule, near abi.Rule, qs []question, order []int, how string) bool {
	for k, i := range order {
		q := &qs[i]
		if near != nil {
			c.quietly(func() { c.ask(near, q) })
		}
		a, none, ok := c.ask(rule, q)
		if !ok {
			return false
		}
		if none == q.none && (none || a.equal(q.answer)) {
			continue
		}
		after := ""
		if k > 0 {
			after = fmt.Sprintf(" (call %d of that order, after %s)", k+1, &qs[order[k-1]])
		}
		c.breaks(LawPure, "%s answered %s, and %s %s%s", q, q.draw(q.answer, q.none), how, q.draw(a, none), after)
		return false
	}
	return true
}

// quietly runs f and forgets what it records.
func (c *checker) quietly(f func()) {
	kept := c.broken
	c.broken = map[string]*Violation{}
	f()
	c.broken = kept
}
