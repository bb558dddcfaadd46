package sim

import (
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

const ms = time.Millisecond

// waits are the limits of the table of waits that are not the session's.
type waits struct {
	pending     time.Duration // PENDING in a tier, before the bytes' own time
	bytesPerSec uint64
	laneWait    time.Duration // a push without a data connection
	drain       time.Duration
}

// A Failure is a broken invariant.
type Failure struct {
	// Kind names the invariant; shrinking keeps to it.
	Kind string
	Text string
	At   time.Duration
}

func (f *Failure) Error() string { return fmt.Sprintf("at %v: %s: %s", f.At, f.Kind, f.Text) }

// A Result is what a run came to.
type Result struct {
	Failure *Failure
	// Digest is of the whole trace: two runs of one schedule have the same.
	Digest uint64
	Steps  int
	// End is the simulated time at the end.
	End time.Duration
	// Fired counts the faults by kind and by the phase at whose boundary they struck.
	Fired Coverage
	// Struck is the sum of Fired.
	Struck int
	// Results counts the requests by outcome, Causes the ends of demanded keys.
	Results map[string]int
	Causes  map[session.Cause]int
	// Lapsed counts the keys of producers' jobs whose consumers did not renew, OverBudget those
	// that a peer's budget refused, Elsewhere those that leg demand sent from the tier beside a
	// transfer, Rethought the second plans of leg demand, and Duplicates the connections that
	// were refused because both sides had dialed.
	Lapsed, OverBudget, Elsewhere, Rethought, Duplicates int
	// NoRoom counts the chunks for which a producer's tier had no room.
	NoRoom int
	// Pulls and Hits are of the requests after the last fault has healed.
	Pulls, Hits int
}

type event struct {
	at   time.Duration
	seq  uint64
	node *node // whose state it touches: waits while that one is frozen, goes with it; nil = the world's
	f    func()
}

// events is a heap: by time, then in the order in which they were made.
type events []event

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

func (q *events) push(e event) {
	*q = append(*q, e)
	h := *q
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
			return
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

func (q *events) pop() event {
	h := *q
	first, n := h[0], len(h)-1
	h[0], h[n] = h[n], event{}
	h = h[:n]
	*q = h
	for i := 0; ; {
		least := i
		for _, k := range [2]int{2*i + 1, 2*i + 2} {
			if k < n && h[k].before(&h[least]) {
				least = k
			}
		}
		if least == i {
			return first
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}

// A world is one run.
type world struct {
	sched  *Schedule
	broken Break
	trace  func(string)
	rnd    rng
	model  model
	plan   *plan.Planner
	limits session.Limits
	joins  join.Limits
	waits  waits

	now    time.Duration
	seq    uint64
	events events
	nodes  []*node
	paths  [][]*path
	memory [][]byte // of the tiers, kept over restarts
	faults []*armed
	healed time.Duration // when the last fault healed
	active int           // faults that strike now
	armed  int           // faults that have not struck
	digest uint64
	result Result
	touch  []*node // nodes that the step has touched
}

func (w *world) fail(kind, format string, args ...any) {
	panic(&Failure{Kind: kind, Text: fmt.Sprintf(format, args...), At: w.now})
}

// note adds to the trace.
func (w *world) note(what string, a, b int, c uint64) {
	h := w.digest
	h = mix(h ^ uint64(w.now))
	for i := 0; i < len(what); i++ {
		h = (h ^ uint64(what[i])) * 0x100000001b3
	}
	w.digest = mix(h ^ uint64(a)<<40 ^ uint64(b)<<20 ^ c)
	if w.trace != nil {
		w.trace(fmt.Sprintf("%12v  %-22s %d %d %d", w.now, what, a, b, c))
	}
}

// after runs f on a node, in d of the world's time.
func (w *world) after(d time.Duration, n *node, f func()) {
	w.seq++
	w.events.push(event{w.now + d, w.seq, n, f})
}

// step carries out the earliest event or wake up to a time.
func (w *world) step(until time.Duration) bool {
	at, who := until+1, (*node)(nil)
	for _, n := range w.nodes {
		if !n.dead && !n.frozen() && n.wakeAt < at {
			at, who = n.wakeAt, n
		}
	}
	var f func()
	if len(w.events) > 0 && w.events[0].at <= at && w.events[0].at <= until {
		e := w.events.pop()
		switch {
		case e.node != nil && e.node.dead:
			return true
		case e.node != nil && e.node.frozen():
			e.node.held = append(e.node.held, e.f)
			return true
		}
		at, who, f = e.at, e.node, e.f
	} else if who == nil {
		return false
	}
	w.now = max(w.now, at)
	w.result.Steps++
	if who != nil {
		w.touched(who)
	}
	if f != nil {
		f()
	} else {
		who.tick()
	}
	// What the step touched is checked, and says when it must run next.
	for i := 0; i < len(w.touch); i++ {
		n := w.touch[i]
		n.dirty = false
		if n.dead {
			continue
		}
		if !n.frozen() {
			n.moved = n.settle() || n.moved
			n.check()
			n.moved = false
		}
		n.wakeAt = max(n.wake(), n.notBefore)
	}
	w.touch = w.touch[:0]
	return true
}

func (w *world) touched(n *node) {
	if !n.dirty {
		n.dirty = true
		w.touch = append(w.touch, n)
	}
}

// run moves the time.
func (w *world) run(until time.Duration) {
	for w.step(until) {
	}
	w.now = until
}

// Options of Run.
type Options struct {
	// Trace, when set, hears of every step that counts.
	Trace func(string)
	// Break makes a part of the node or of its cores wrong on purpose.
	Break Break
}

// Run plays a schedule, which it leaves as it is. Whatever goes wrong, a panic of a core included, is the result's
// Failure.
func Run(s *Schedule, o Options) (result Result) {
	s = s.clone()
	w := &world{sched: s, broken: o.Break, trace: o.Trace, rnd: stream(s.Seed, 1)}
	w.result.Results, w.result.Causes = map[string]int{}, map[session.Cause]int{}
	defer func() {
		if r := recover(); r != nil {
			f, ok := r.(*Failure)
			if !ok {
				f = &Failure{Kind: "panic", Text: fmt.Sprintf("%v\n%s", r, debug.Stack()), At: w.now}
			}
			w.result.Failure = f
		}
		for _, m := range w.memory {
			if m != nil {
				slabs.Put(&m)
			}
		}
		w.result.Digest, w.result.End = w.digest, w.now
		result = w.result
	}()
	w.build()
	w.play()
	return w.result
}

// slabs keeps the memory of tiers from one run to the next: it is most of what a run needs.
var slabs = sync.Pool{New: func() any {
	b := make([]byte, slotsMax*int(tier.StrideBytes(chunkBytesMax)))
	return &b
}}

// build boots the nodes and brings the schedule in.
func (w *world) build() {
	s := w.sched
	w.model = models[s.Model%len(models)]()
	var err error
	if w.plan, err = plan.New(w.model.Model); err != nil {
		panic(err)
	}
	w.limits = session.DefaultLimits()
	w.limits.TransferBytesPerSecond = 64e3 // chunks are small here: a chunk takes a millisecond or two
	w.limits.JobsMax = s.JobsMax
	w.limits.Lease = time.Second // so that one can lapse in a run
	w.joins = join.DefaultLimits()
	w.joins.ParkedAge = time.Second
	w.joins.ParkedBytesMax = uint64(s.Slots) * chunkBytesMax / 2
	w.joins.PeerBytesMax = uint64(s.Slots) * chunkBytesMax / 2
	if s.TightBudget {
		w.joins.PeerBytesMax = budgetSlots * chunkBytesMax
	}
	w.joins.FinishedAge = 1500 * ms
	w.waits = waits{pending: 2 * time.Second, bytesPerSec: w.limits.TransferBytesPerSecond, laneWait: 750 * ms, drain: w.limits.Drain}
	w.nodes, w.memory = make([]*node, s.Nodes), make([][]byte, s.Nodes)
	w.paths = make([][]*path, s.Nodes)
	for i := range w.paths {
		w.paths[i] = make([]*path, s.Nodes)
	}
	for i := range w.nodes {
		w.boot(i, 1)
	}
	for i := range s.Requests {
		w.arrange(&s.Requests[i])
	}
	w.arm()
}

// recovery is how long after the last fault pulls must hit again.
const recovery = 2 * time.Second

// play runs the schedule, then the time in which everything must heal, and judges.
func (w *world) play() {
	w.run(w.sched.lastFault())
	for w.active > 0 || w.armed > 0 { // every fault has an end
		w.run(w.now + 50*ms)
	}
	w.healed = max(w.healed, w.now)
	w.run(w.healed + recovery)
	w.pullAgain()
	w.run(max(w.now, w.sched.lastRequest()) + 2*time.Second)
	for i := 0; w.busy(); i++ {
		if i > 200 {
			w.fail("request without an end", "requests are still in work long after the last limit")
		}
		w.run(w.now + 100*ms)
	}
	if w.result.Hits*100 < w.result.Pulls*95 {
		w.fail("recovery", "%d of %d pulls hit, %v after the last fault had healed; 95 %% must", w.result.Hits, w.result.Pulls, recovery)
	}
	// Parked supply has its age, finished ids theirs; after them nothing may be left.
	w.run(w.now + w.joins.ParkedAge + w.joins.FinishedAge + time.Second)
	for _, n := range w.nodes {
		n.finalCheck()
	}
}

func (w *world) busy() bool {
	for _, n := range w.nodes {
		if len(n.consumers)+len(n.producers) > 0 {
			return true
		}
	}
	return false
}
