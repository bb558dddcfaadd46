package sim

import (
	"time"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"google.golang.org/protobuf/proto"
)

// A path is one direction between two nodes: what delays, and holds, everything that goes
// that way.
type path struct {
	rnd     rng
	blocked int // faults that hold it
	slow    time.Duration
	skew    time.Duration // of data alone
	control time.Duration // of control alone
	stuck   []func()      // what has come to a blocked path, in order
	clogged time.Duration // world: until when nobody reads the data that comes this way
	forgets int           // faults by which the consumer on this end says nothing of its demands
	corrupt int           // frames to spoil
}

func (w *world) path(from, to int) *path {
	p := w.paths[from][to]
	if p == nil {
		p = &path{rnd: stream(w.sched.Seed, 2, uint64(from), uint64(to))}
		w.paths[from][to] = p
	}
	return p
}

func (p *path) delay() time.Duration {
	return time.Duration(p.rnd.between(20, 800))*time.Microsecond + p.slow
}

// cross brings f to node n over a path, or holds it while the path is blocked.
func (w *world) cross(p *path, n *node, d time.Duration, f func()) {
	w.after(d, n, func() { w.through(p, n, f) })
}

func (w *world) through(p *path, n *node, f func()) {
	if p.blocked > 0 {
		p.stuck = append(p.stuck, func() { w.cross(p, n, p.delay(), f) })
		return
	}
	f()
}

// free ends one block of a path.
func (w *world) free(p *path) {
	if p.blocked--; p.blocked > 0 {
		return
	}
	stuck := p.stuck
	p.stuck = nil
	for _, f := range stuck {
		f()
	}
}

// A pipe is one direction of one connection: it keeps the order.
type pipe struct {
	w    *world
	p    *path
	to   *node
	q    []func()
	last time.Duration
}

func (w *world) pipe(from, to *node) pipe { return pipe{w: w, p: w.path(from.i, to.i), to: to} }

// put sends f along the pipe.
func (x *pipe) put(extra time.Duration, f func()) {
	x.q = append(x.q, f)
	x.last = max(x.last, x.w.now+x.p.delay()+extra)
	x.w.cross(x.p, x.to, x.last-x.w.now, x.pop)
}

func (x *pipe) pop() {
	if len(x.q) == 0 {
		return // cut
	}
	f := x.q[0]
	x.q = x.q[1:]
	f()
}

// cut loses what is under way, all but a part of its beginning.
func (x *pipe) cut() {
	x.q = x.q[:x.p.rnd.n(len(x.q)+1)]
}

// A conn is a control connection; ends[0] dialed it.
type conn struct {
	pipes [2]pipe // by the end that sends
	ends  [2]*peer
	open  [2]bool
	up    [2]bool // the session began on it, as this end knows
}

func (c *conn) side(p *peer) int {
	if c.ends[0] == p {
		return 0
	}
	return 1
}

// dial is one attempt of a peer's core.
func (p *peer) dial() {
	w, n := p.n.w, p.n
	p.attempt++
	attempt := p.attempt
	there, back := w.path(n.i, p.i), w.path(p.i, n.i)
	target := w.nodes[p.i]
	w.note("dial", n.i, p.i, uint64(attempt))
	if target.dead { // the machine is there and says so
		w.after(there.delay(), n, func() { p.undialed(attempt) })
		return
	}
	// The port of a frozen node takes nothing in until it goes on.
	w.cross(there, target, there.delay(), func() {
		c := &conn{ends: [2]*peer{p, target.peers[n.i]}, open: [2]bool{false, true},
			pipes: [2]pipe{w.pipe(n, target), w.pipe(target, n)}}
		target.conns = append(target.conns, c)
		w.cross(back, n, back.delay(), func() {
			if p.attempt != attempt || !c.open[1] { // given up, or the other side has died
				c.pipes[0].put(0, func() { c.eof(1, "given up") })
				return
			}
			c.open[0] = true
			n.conns = append(n.conns, c)
			p.adopt(c)
		})
	})
}

func (p *peer) undialed(attempt int) {
	if p.attempt == attempt && p.conn == nil {
		p.lostConn()
		p.refused = true
		p.core.Disconnected(p.n.local(), "refused")
		p.carry()
		p.refused = false
		if p.core.State() == session.Connecting {
			p.n.w.fail("wait", "node %d: node %d refuses connections and jobs wait for one", p.n.i, p.i)
		}
	}
}

// adopt makes a connection the current one.
func (p *peer) adopt(c *conn) {
	p.attempt++
	if old := p.conn; old != nil {
		p.hangUp(old, "replaced by a new connection")
	}
	p.conn, p.heldUp, p.down = c, false, false
	p.core.Connected(p.n.local())
	p.carry()
}

// incoming takes or refuses a connection that the peer dialed; it mirrors wire's actor.
func (p *peer) incoming(c *conn, boot uint64) bool {
	p.core.Tick(p.n.local()) // what is due is said on the connection before this one
	p.carry()
	cur := session.Current{Exists: p.conn != nil}
	if cur.Exists {
		s := p.core.Status(p.n.local())
		cur.Dialed, cur.Ready, cur.BootID = p.conn.ends[0] == p, s.State == session.Ready, s.BootID
		cur.HasSession = p.conn.up[p.conn.side(p)]
	}
	if session.KeepNew(name(p.n.i), name(p.i), cur, boot) {
		p.adopt(c)
		return true
	}
	p.n.w.result.Duplicates++
	p.n.w.note("duplicate", p.n.i, p.i, 0)
	e := &sessionpb.Envelope{Message: &sessionpb.Envelope_Goaway{Goaway: &sessionpb.Goaway{Reason: "duplicate"}}}
	c.pipes[1].put(c.pipes[1].p.control, func() {
		if d := c.ends[0]; c.open[0] && d.conn == c {
			d.receive(e)
		}
	})
	p.hangUp(c, "duplicate")
	return false
}

// hangUp closes this side's end; the other one learns it after what is under way.
func (p *peer) hangUp(c *conn, reason string) {
	k := c.side(p)
	if !c.open[k] {
		return
	}
	c.open[k] = false
	c.pipes[k].put(0, func() { c.eof(1-k, reason) })
}

// eof is the end of a connection as its other end sees it.
func (c *conn) eof(k int, reason string) {
	if !c.open[k] {
		return
	}
	c.open[k] = false
	p := c.ends[k]
	if p.conn == c {
		p.lostConn()
		p.core.Disconnected(p.n.local(), reason)
		p.carry()
	}
}

// send carries one message.
func (p *peer) send(e *sessionpb.Envelope) {
	w, c := p.n.w, p.conn
	if c == nil {
		return
	}
	k := c.side(p)
	if c.pipes[k].p.forgets > 0 && ofConsumer(e) {
		return
	}
	if w.sched.Encode {
		b, err := proto.Marshal(e)
		if err != nil {
			panic(err)
		}
		e = &sessionpb.Envelope{}
		if err := proto.Unmarshal(b, e); err != nil {
			panic(err)
		}
	}
	phase := phaseOf(e)
	if phase != NoPhase {
		w.boundary(phase, p.n.i, p.i, false)
	}
	c.pipes[k].put(c.pipes[k].p.control, func() {
		o := c.ends[1-k]
		if !c.open[1-k] {
			return
		}
		if phase != NoPhase {
			w.boundary(phase, p.n.i, p.i, true)
		}
		if o.conn != c {
			if e.GetHello() == nil || k != 0 { // a dialed connection is the acceptor's once its Hello is there
				return
			}
			if !o.incoming(c, e.GetHello().BootId) {
				return
			}
		}
		o.receive(e)
	})
}

// ofConsumer says whether a message is about a demand that its sender has made before.
func ofConsumer(e *sessionpb.Envelope) bool {
	return e.GetRenew() != nil || e.GetAbort() != nil || e.GetDone().GetRelease()
}

// phaseOf names the boundary that a message is.
func phaseOf(e *sessionpb.Envelope) Phase {
	switch m := e.Message.(type) {
	case *sessionpb.Envelope_Hello:
		return PhaseHello
	case *sessionpb.Envelope_Lookup, *sessionpb.Envelope_States:
		return PhaseLookup
	case *sessionpb.Envelope_Demand:
		return PhaseDemand
	case *sessionpb.Envelope_Supply:
		if m.Supply.Last {
			return PhaseLastWord
		}
	case *sessionpb.Envelope_Done:
		return PhaseDone
	case *sessionpb.Envelope_Abort, *sessionpb.Envelope_AbortAck:
		return PhaseAbort
	case *sessionpb.Envelope_Goaway:
		return PhaseDrain
	}
	return NoPhase
}
