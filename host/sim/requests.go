package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/registry/plan"
)

// arrange brings a request's begins and aborts into the world's events.
func (w *world) arrange(r *Request) {
	if !r.NoProducer {
		w.after(max(0, r.At-r.Ahead-w.now), nil, func() { w.startProducer(r) })
	}
	w.after(max(0, r.At-w.now), nil, func() { w.startConsumer(r) })
}

// on runs f as the node that is there now, when it is.
func (w *world) on(i int, f func(n *node)) bool {
	n := w.nodes[i]
	if n.dead {
		return false
	}
	w.after(0, n, func() { f(n) })
	return true
}

func (w *world) startProducer(r *Request) {
	up := w.on(r.Producer, func(n *node) {
		n.beginProducer(r)
		if r.ProducerAbort > 0 {
			w.after(r.ProducerAbort, n, func() {
				for _, p := range n.producers {
					if p.req == r {
						p.finish(true, "the engine gives it up")
						return
					}
				}
			})
		}
	})
	if !up {
		w.result.Results["producer down"]++
	}
}

func (w *world) startConsumer(r *Request) {
	up := w.on(r.Consumer, func(n *node) {
		n.beginConsumer(r)
		if r.ConsumerAbort > 0 {
			w.after(r.ConsumerAbort, n, func() {
				for _, c := range n.consumers {
					if c.req == r {
						c.finish(true, "the engine gives it up")
						return
					}
				}
			})
		}
	})
	if !up {
		r.done = true
		w.result.Results["down"]++
	}
}

// pullsMin is how many pulls judge the recovery: 95 % of fewer is all of them.
const pullsMin = 20

// pullID is the first id of a pull; requests of the schedule have lower ones.
const pullID = 1000

// crowded says whether a request of the schedule is in work on a node.
func (n *node) crowded() bool {
	return slices.ContainsFunc(n.consumers, func(c *consumer) bool { return c.req.ID < pullID }) ||
		slices.ContainsFunc(n.producers, func(p *producer) bool { return p.req.ID < pullID })
}

// pullRoundsMax bounds how often a pull is made again that missed beside requests of the
// schedule, which may have taken the room in a tier or the jobs of a session: they all end
// within their deadlines, below 5 s.
const pullRoundsMax = 6

// pullAgain pulls over every pair that requests have used, in every leg.
func (w *world) pullAgain() {
	type pair struct{ c, p int }
	var pairs []pair
	seen := map[pair]bool{}
	for i := range w.sched.Requests {
		x := pair{w.sched.Requests[i].Consumer, w.sched.Requests[i].Producer}
		if !seen[x] {
			seen[x] = true
			pairs = append(pairs, x)
		}
	}
	if len(pairs) == 0 {
		return
	}
	var pulls []*Request
	for k := 0; k < pullsMin || k < len(pairs); k++ {
		x := pairs[k%len(pairs)]
		r := &Request{Ahead: 40 * ms, Consumer: x.c, Producer: x.p, Leg: legNames[(k/len(pairs)+k)%len(legNames)],
			Tokens: 49, StepTime: ms, StepTokens: 16, Timeout: 3 * time.Second}
		if !w.sched.accepted(x.c, x.p) {
			r.Leg = session.LegProbe
		}
		if legs[r.Leg].eager && k%3 == 0 {
			r.Ahead = -20 * ms // the demand comes first
		}
		pulls = append(pulls, r)
	}
	for round := 0; len(pulls) > 0; round++ {
		pulls = w.pull(pulls, round)
	}
}

// pull makes pulls, one after the other, counts those that hit, and returns those that are
// to be made again.
func (w *world) pull(pulls []*Request, round int) (again []*Request) {
	expect := must(w.plan.Eager(plan.Ask{PromptTokens: pulls[0].Tokens}, nil)).ResumeTokens
	if expect == 0 {
		panic("a pull that cannot hit")
	}
	at := w.now + 60*ms
	for k, r := range pulls {
		r.ID = pullID*(round+1) + k
		r.At, r.Text = at, text{uint64(r.ID), 0}
		w.after(r.At-r.Ahead-w.now, nil, func() { w.startProducer(r) })
		w.after(r.At-w.now, nil, func() { w.startConsumer(r) })
		at += 45 * ms
	}
	w.run(at + time.Second)
	for _, r := range pulls {
		for i := 0; !r.done; i++ {
			if i > 100 {
				w.fail("request without an end", "pull %d is in work long after its limit", r.ID)
			}
			w.run(w.now + 100*ms)
		}
		if r.crowded && r.resumed < expect && round < pullRoundsMax {
			next := *r
			next.done, next.crowded, next.resumed, next.outcome = false, false, 0, ""
			again = append(again, &next)
			continue
		}
		w.result.Pulls++
		if r.resumed >= expect {
			w.result.Hits++
		} else if w.trace != nil {
			w.trace(fmt.Sprintf("%12v  pull %d of node %d from node %d: resumes at %d, not at %d", w.now, r.ID, r.Consumer, r.Producer, r.resumed, expect))
		}
	}
	return again
}
