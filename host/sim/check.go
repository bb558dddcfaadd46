package sim

import (
	"fmt"
	"time"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/tier"
)

// clockGrain is how much later than a limit its end may be: a drifting clock goes in steps
// of up to 2 ns.
const clockGrain = 2 * time.Nanosecond

// late says whether a wait that ends, or goes on, at a local time has passed its limit. A
// node that was frozen does everything that is due at the moment at which it goes on.
func (n *node) late(limit time.Duration) bool {
	return n.local() > max(limit+clockGrain, n.thawed)
}

// check holds after every step, for every node that the step has touched.
func (n *node) check() {
	w := n.w
	for _, p := range n.peers {
		if p != nil {
			p.check()
		}
	}
	for _, c := range n.consumers {
		// A plan in leg probe takes two lookups at most, whatever the request's deadline.
		if limit := max(c.deadline, c.began+2*w.limits.Lookup) + 2; !c.settled && n.late(limit) {
			w.fail("wait", "node %d: request %d waits at %v, its limit was %v", n.i, c.req.ID, n.local(), limit)
		}
		if len(c.writing) > 0 && n.late(c.writeLimit) {
			w.fail("wait", "node %d: request %d waits for a chunk that is being written at %v, the limit was %v", n.i, c.req.ID, n.local(), c.writeLimit)
		}
	}
	if n.moved {
		n.checkPins()
	}
}

func (p *peer) check() {
	n, w := p.n, p.n.w
	silence := n.local() - p.heard
	idle := p.core.Idle()
	switch p.core.State() {
	case session.Ready:
		if n.late(p.heard + w.limits.Suspect) {
			w.fail("wait", "node %d: node %d is silent for %v and ready", n.i, p.i, silence)
		}
	case session.Connecting:
		if n.late(p.heard + w.limits.ConnectHello) {
			w.fail("wait", "node %d: node %d is connecting for %v", n.i, p.i, silence)
		}
	default:
		if !idle {
			w.fail("wait", "node %d: node %d is %v and has jobs", n.i, p.i, p.core.State())
		}
	}
	if !idle != (len(p.lookups)+len(p.demands)+len(p.servings) > 0) {
		w.fail("results", "node %d: the session with node %d has %+v, the node knows %d lookups, %d demands, %d jobs", n.i, p.i, p.core.Status(n.local()),
			len(p.lookups), len(p.demands), len(p.servings))
	}
	if idle {
		return
	}
	for id, l := range p.lookups {
		if n.late(l.limit) {
			w.fail("wait", "node %d: lookup %d outlives its limit, %v, at %v", n.i, id, l.limit, n.local())
		}
	}
	for id, f := range p.demands {
		if limit := f.limit(); limit == 0 || n.late(limit) {
			w.fail("wait", "node %d: demand %d outlives its limit, %v, at %v; its deadline is %v; 0s is when the last word leaves nothing to come",
				n.i, id, limit, n.local(), f.deadline)
		}
	}
	for id, v := range p.servings {
		if v.pushing > 0 && !v.stopped && n.late(v.lease) {
			w.fail("wait", "node %d: what is bound to job %d of node %d outlives its lease, %v, at %v", n.i, id, p.i, v.lease, n.local())
		}
		if n.late(v.job.Deadline) {
			w.fail("wait", "node %d: job %d of node %d outlives its deadline, %v, at %v", n.i, id, p.i, v.job.Deadline, n.local())
		}
	}
}

// held counts what an owner holds.
type held struct{ pins, writes int }

// checkPins compares what the tier says is held with what the node knows of: no pin or
// slot is without an owner, and no owner without its pins.
func (n *node) checkPins() {
	want := map[tier.Owner]held{}
	add := func(o tier.Owner, pins, writes int) {
		x := want[o]
		want[o] = held{x.pins + pins, x.writes + writes}
	}
	hold := func(h *hold) {
		switch {
		case h.zero():
		case h.isPrivate():
			add(h.owner, 0, 1)
		default:
			add(h.owner, 1, 0)
		}
	}
	for _, c := range n.consumers {
		for _, x := range c.demanded() {
			if hold(&x.hold); !x.ended && x.slot != (tier.Slot{}) {
				add(c.owner, 0, 1)
			}
		}
	}
	for _, p := range n.producers {
		for i := range p.own {
			hold(&p.own[i])
		}
		for _, k := range p.chunks {
			if hold(&k.hold); k.hold.zero() && k.slot != (tier.Slot{}) {
				add(p.owner, 0, 1)
			}
		}
	}
	joined := 0
	for _, keys := range n.holds {
		for _, stack := range keys {
			joined += len(stack)
			for i := range stack {
				hold(&stack[i])
			}
		}
	}
	for _, v := range n.servings {
		for _, h := range v.holds {
			hold(&h)
		}
	}
	for _, x := range n.private {
		hold(&x.hold)
	}
	n.comparePins(want)
	n.checkBudgets()
	n.checkJoined(joined)
}

// checkBudgets compares what each peer takes of its budget with what its jobs have: every
// chunk that is available and has not ended, once for each job.
func (n *node) checkBudgets() {
	for _, p := range n.peers {
		if p == nil {
			continue
		}
		kept := uint64(0)
		for _, v := range p.servings {
			for _, x := range v.words {
				if x == wordAvailable {
					kept += chunkBytesMax
				}
			}
		}
		if is := n.join.PeerBytes(name(p.i)); is != kept || is > n.w.joins.PeerBytesMax {
			n.w.fail("budget", "node %d: %d bytes are kept for node %d, its jobs have %d; the most is %d", n.i, is, p.i, kept, n.w.joins.PeerBytesMax)
		}
	}
}

func (n *node) comparePins(want map[tier.Owner]held) {
	s := n.tier.Snapshot()
	grabs := 0
	for i := range s.Pins {
		p := &s.Pins[i]
		x := want[p.Owner]
		switch p.Kind {
		case tier.PinRead:
			x.pins -= p.Count
		case tier.PinWrite:
			x.writes -= p.Count
		case tier.PinGrab:
			grabs += p.Count
			continue
		}
		if want[p.Owner] = x; x.pins < 0 || x.writes < 0 {
			n.w.fail("pin", "node %d: the tier has %d %s pins of %v that nobody holds", n.i, max(-x.pins, -x.writes), p.Kind, p.Owner)
		}
	}
	for o, x := range want {
		if x != (held{}) {
			n.w.fail("pin", "node %d: %v holds %d pins and %d slots that the tier does not know", n.i, o, x.pins, x.writes)
		}
	}
	if grabs != n.grabs {
		n.w.fail("pin", "node %d: %d slots are being filled from the wire, the tier says %d", n.i, n.grabs, grabs)
	}
}

// checkJoined compares the holds that the join was given with those that it still has: the
// parked ones, and those that some job has bound.
func (n *node) checkJoined(joined int) {
	type bound struct {
		transfer string
		key      session.Key
	}
	var keys map[bound]struct{}
	for _, v := range n.servings {
		if !v.leg.transfer {
			continue
		}
		for i, x := range v.words {
			if h := v.holds[uint32(i)]; x == wordAvailable && h.zero() {
				if keys == nil {
					keys = map[bound]struct{}{}
				}
				keys[bound{v.job.TransferID, v.job.Keys[i]}] = struct{}{}
			}
		}
	}
	if parked := n.join.Status().ParkedKeys; joined != parked+len(keys) {
		n.w.fail("pin", "node %d: %d holds were given to the join, which has %d parked and %d bound", n.i, joined, parked, len(keys))
	}
}

// finalCheck holds at the end of a run, when every fault has healed and every age is over.
func (n *node) finalCheck() {
	var left string
	s, j := n.tier.Snapshot(), n.join.Status()
	switch {
	case n.dead || n.frozen():
		left = "it is down"
	case len(s.Pins) > 0 || s.Writing+s.Detached+s.Fenced > 0:
		left = fmt.Sprintf("pins %v, %d slots in state writing, %d detached, %d fenced", s.Pins, s.Writing, s.Detached, s.Fenced)
	case j.Transfers+j.Jobs+j.Keys+j.ParkedKeys+j.Finished > 0 || j.ParkedBytes > 0:
		left = fmt.Sprintf("join %+v", j)
	case len(n.holds)+len(n.private)+len(n.servings)+len(n.consumers)+len(n.producers) > 0:
		left = "requests or jobs"
	}
	for _, p := range n.peers {
		if p != nil && n.join.PeerBytes(name(p.i)) > 0 {
			left = fmt.Sprintf("%d bytes of the budget of node %d", n.join.PeerBytes(name(p.i)), p.i)
		}
		if p != nil && left == "" && (!p.core.Idle() || p.core.State() != session.Ready) {
			left = fmt.Sprintf("the session with node %d is %+v", p.i, p.core.Status(n.local()))
		}
	}
	if left != "" {
		n.w.fail("left behind", "node %d, long after the last fault: %s", n.i, left)
	}
}
