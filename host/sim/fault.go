package sim

import (
	"fmt"
	"strings"
	"time"
)

// A Kind of fault.
type Kind uint8

const (
	// KindCut: the control connection is reset, and what is under way on it is lost.
	KindCut Kind = iota
	// KindCutData: the data connections are reset.
	KindCutData
	// KindPartition: nothing passes between two nodes.
	KindPartition
	// KindOneWay: nothing passes from one node to the other.
	KindOneWay
	// KindHalfOpen: one node loses its connection, and the other does not hear of it.
	KindHalfOpen
	// KindStall: a node stops, and goes on later.
	KindStall
	// KindCrash: a process is killed, and another one starts in its place.
	KindCrash
	// KindEngine: the engine of a node dies with all its requests.
	KindEngine
	// KindSlow: everything between two nodes takes longer.
	KindSlow
	// KindSkew: data or control alone takes longer, so that they overtake each other.
	KindSkew
	// KindDrift: a node's clock runs up to 15 % slower or faster.
	KindDrift
	// KindCorrupt: some frames arrive with other bytes.
	KindCorrupt
	// KindDrain: a node is told to end, drains, and starts again.
	KindDrain
	// KindForget: a consumer lives and has forgotten what it has demanded of a producer: it
	// reads no data, renews nothing and gives nothing back.
	KindForget
	kinds
)

var kindNames = [kinds]string{"cut control", "cut data", "partition", "one way", "half-open", "stall", "crash", "engine dies",
	"slow", "control/data skew", "clock drift", "corrupt", "drain", "forgets"}

// String returns the kind's name.
func (k Kind) String() string { return kindNames[k] }

// A Phase is where in the life of a job a fault strikes.
type Phase uint8

const (
	// PhaseHello: a Hello. PhaseLookup: a Lookup or its States. PhaseDemand: a Demand.
	PhaseHello Phase = iota
	PhaseLookup
	PhaseDemand
	// PhaseSupply: the producer has the Demand and has not answered.
	PhaseSupply
	// PhaseTransfer: a frame has begun to arrive.
	PhaseTransfer
	// PhaseLastWord: the producer's last Supply. PhaseDone: a Done. PhaseAbort: an Abort
	// or its acknowledgement. PhaseDrain: a Goaway.
	PhaseLastWord
	PhaseDone
	PhaseAbort
	PhaseDrain
	phases
	// NoPhase is a moment at no such boundary.
	NoPhase = phases
)

var phaseNames = [phases + 1]string{"hello", "lookup", "demand", "before supply", "mid-transfer", "last word", "done", "abort", "drain", "any time"}

// String returns the phase's name.
func (p Phase) String() string { return phaseNames[p] }

// Coverage counts faults by kind and phase; the last column is of those that met no
// boundary of their phase in time.
type Coverage [kinds][phases + 1]int

// Add adds another count.
func (c *Coverage) Add(o *Coverage) {
	for k := range c {
		for p := range c[k] {
			c[k][p] += o[k][p]
		}
	}
}

// Empty names the cells of real phases that no fault fell into.
func (c *Coverage) Empty() (cells []string) {
	for k := range c {
		for p := range int(phases) {
			if c[k][p] == 0 {
				cells = append(cells, fmt.Sprintf("%v at %v", Kind(k), Phase(p)))
			}
		}
	}
	return cells
}

// String draws the table.
func (c *Coverage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-18s", "fault")
	for p := range phases + 1 {
		fmt.Fprintf(&b, "%14v", p)
	}
	for k := range kinds {
		fmt.Fprintf(&b, "\n%-18v", k)
		for p := range phases + 1 {
			fmt.Fprintf(&b, "%14d", c[k][p])
		}
	}
	return b.String()
}

// armed is a fault that waits for its boundary.
type armed struct {
	*Fault
	skip   int
	struck bool
	tries  int
}

// arm makes the schedule's faults ready.
func (w *world) arm() {
	for i := range w.sched.Faults {
		f := &armed{Fault: &w.sched.Faults[i], skip: w.sched.Faults[i].Skip}
		w.faults = append(w.faults, f)
		w.armed++
		if f.Phase == PhaseHello && f.Skip > 0 { // somebody must say Hello again
			w.after(f.By*3/4, nil, func() { w.cutControl(f) })
		}
		if f.Phase == PhaseDrain { // somebody must say Goaway
			w.after(f.By*3/4, nil, func() { w.drainNode(f.A, 200*ms) })
		}
		w.after(f.By, nil, func() { w.strike(f, NoPhase) })
	}
}

// boundary is a message between two nodes.
func (w *world) boundary(ph Phase, from, to int, delivered bool) {
	for _, f := range w.faults {
		if f.struck || f.Phase != ph || f.Delivered != delivered && ph != PhaseSupply ||
			!(f.A == from && f.B == to || f.A == to && f.B == from) {
			continue
		}
		if f.skip--; f.skip >= 0 {
			continue
		}
		// At this very moment, but not inside of what a node is doing.
		w.after(0, nil, func() { w.strike(f, ph) })
	}
}

func (w *world) strike(f *armed, ph Phase) {
	if f.struck {
		return
	}
	f.struck = true
	w.note("fault "+f.Kind.String(), f.A, f.B, uint64(ph))
	switch f.tries++; {
	case strikes[f.Kind](w, f):
		w.result.Fired[f.Kind][ph]++
		w.result.Struck++
	case f.tries < triesMax: // the node is down, or nothing is there to be cut
		w.after(50*ms, nil, func() {
			f.struck = false
			w.strike(f, NoPhase)
		})
		return
	}
	w.armed--
	w.healed = w.now
}

// triesMax is how often a fault that finds nothing to strike tries again: for longer than any
// fault lasts.
const triesMax = 100

// last notes a fault that lasts, and ends it.
func (w *world) last(d time.Duration, heal func()) {
	w.active++
	w.after(d, nil, func() {
		heal()
		w.active--
		w.healed = w.now
		w.note("healed", 0, 0, 0)
	})
}

// victim is the node that a fault on one node is about; nil when it is down.
func (w *world) victim(f *armed) *node {
	i := f.A
	if f.OnB {
		i = f.B
	}
	if n := w.nodes[i]; !n.dead {
		return n
	}
	return nil
}

// strikes say what each kind does; false when there was nothing to strike.
var strikes [kinds]func(*world, *armed) bool

func init() {
	strikes = [kinds]func(*world, *armed) bool{
		(*world).cutControl, (*world).cutData, (*world).partition, (*world).oneWay, (*world).halfOpen, (*world).stall, (*world).crash,
		(*world).killEngine, (*world).slowDown, (*world).skewPaths, (*world).drift, (*world).corruptFrames, (*world).drainVictim,
		(*world).forget,
	}
}

// between returns the control connection of two nodes, as either of them has it.
func (w *world) between(f *armed) *conn {
	if w.nodes[f.A].dead || w.nodes[f.B].dead {
		return nil
	}
	if c := w.nodes[f.A].peers[f.B].conn; c != nil {
		return c
	}
	return w.nodes[f.B].peers[f.A].conn
}

func (w *world) cutControl(f *armed) bool {
	c := w.between(f)
	if c == nil {
		return false
	}
	for k := range c.ends {
		if x := &c.pipes[1-k]; c.open[k] {
			x.cut()
			x.put(0, func() { c.eof(k, "reset") })
		}
	}
	return true
}

func (w *world) cutData(f *armed) (some bool) {
	for _, d := range [][2]int{{f.A, f.B}, {f.B, f.A}} {
		n := w.nodes[d[0]]
		if n.dead {
			continue
		}
		p := n.peers[d[1]]
		if p.link == nil || !p.link.up {
			continue
		}
		some = true
		p.link.drop(true)
		if w.rnd.one(2) {
			w.after(ms, n, p.dataLost)
		}
	}
	return some
}

func (w *world) block(d time.Duration, paths ...*path) bool {
	for _, p := range paths {
		p.blocked++
	}
	w.last(d, func() {
		for _, p := range paths {
			w.free(p)
		}
	})
	return true
}

func (w *world) partition(f *armed) bool {
	return w.block(f.Lasts, w.path(f.A, f.B), w.path(f.B, f.A))
}

func (w *world) oneWay(f *armed) bool {
	if f.OnB {
		return w.block(f.Lasts, w.path(f.B, f.A))
	}
	return w.block(f.Lasts, w.path(f.A, f.B))
}

func (w *world) halfOpen(f *armed) bool {
	c := w.between(f)
	n := w.victim(f)
	if c == nil || n == nil {
		return false
	}
	k := 0
	if c.ends[1].n == n {
		k = 1
	}
	p := c.ends[k]
	if p.n != n || !c.open[k] || p.conn != c { // the other one still has what a life before this one had
		return false
	}
	w.after(0, n, func() {
		if p.conn == c && c.open[k] {
			c.open[k] = false
			p.lostConn()
			p.core.Disconnected(n.local(), "lost")
			p.carry()
		}
	})
	w.last(f.Lasts, func() {
		if !c.open[k] && c.open[1-k] { // a reset answers what still comes on it
			c.pipes[k].put(0, func() { c.eof(1-k, "reset") })
		}
	})
	return true
}

func (w *world) stall(f *armed) bool {
	n := w.victim(f)
	if n == nil {
		return false
	}
	n.freeze++
	w.last(f.Lasts, func() {
		if n.freeze--; n.freeze > 0 || n.dead {
			return
		}
		n.thawed = n.local()
		n.notBefore = 0
		if w.rnd.one(2) {
			n.notBefore = w.now // what has come is read before the timers are
		}
		held := n.held
		n.held = nil
		for _, g := range held {
			w.after(0, n, g)
		}
		w.touched(n)
	})
	return true
}

func (w *world) crash(f *armed) bool {
	n := w.victim(f)
	if n == nil {
		return false
	}
	n.die()
	w.last(f.Lasts, func() {
		if w.nodes[n.i] == n { // else a drain has started it again
			w.boot(n.i, n.boot+1)
		}
	})
	return true
}

func (w *world) killEngine(f *armed) bool {
	n := w.victim(f)
	if n == nil {
		return false
	}
	w.after(0, n, func() { n.crashEngine("the engine's stream is closed") })
	return true
}

func (w *world) slowDown(f *armed) bool {
	d := time.Duration(f.Strength) * ms
	a, b := w.path(f.A, f.B), w.path(f.B, f.A)
	a.slow, b.slow = a.slow+d, b.slow+d
	w.last(f.Lasts, func() { a.slow, b.slow = a.slow-d, b.slow-d })
	return true
}

func (w *world) skewPaths(f *armed) bool {
	d := time.Duration(f.Strength) * ms
	for _, p := range []*path{w.path(f.A, f.B), w.path(f.B, f.A)} {
		x := &p.skew
		if f.OnB {
			x = &p.control
		}
		*x += d
		w.last(f.Lasts, func() { *x -= d })
	}
	return true
}

func (w *world) drift(f *armed) bool {
	n := w.victim(f)
	if n == nil {
		return false
	}
	n.drift(f.Strength)
	w.last(f.Lasts, func() {
		if !n.dead {
			n.drift(1000)
		}
	})
	return true
}

func (w *world) corruptFrames(f *armed) bool {
	a, b := w.path(f.A, f.B), w.path(f.B, f.A)
	a.corrupt, b.corrupt = int(f.Strength), int(f.Strength)
	w.last(f.Lasts, func() { a.corrupt, b.corrupt = 0, 0 })
	return true
}

func (w *world) forget(f *armed) bool {
	says, reads := w.path(f.A, f.B), w.path(f.B, f.A)
	reads.clogged = max(reads.clogged, w.now+f.Lasts)
	says.forgets++
	w.last(f.Lasts, func() { says.forgets-- })
	return true
}

func (w *world) drainVictim(f *armed) bool {
	n := w.victim(f)
	return n != nil && w.drainNode(n.i, f.Lasts)
}

// drainNode tells a node to end, and starts it again after it has.
func (w *world) drainNode(i int, down time.Duration) bool {
	n := w.nodes[i]
	if n.dead || n.draining {
		return false
	}
	w.note("drain", i, 0, 0)
	w.after(0, n, n.drain)
	w.active++
	var gone func()
	gone = func() {
		if !n.dead {
			w.after(10*ms, nil, gone)
			return
		}
		if w.nodes[i] != n { // a crash came first, and its restart
			w.active--
			w.healed = w.now
			return
		}
		w.last(down, func() {
			if w.nodes[i] == n {
				w.boot(i, n.boot+1)
			}
		})
		w.active--
	}
	gone()
	return true
}
