package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
)

// A node is one life of one node: the real cores, and the glue between them.
type node struct {
	w    *world
	i    int
	boot uint64
	dead bool

	// The node's own clock, which drifts: local time passes at rate/1000 of the world's.
	since     time.Duration
	base      time.Duration
	rate      int64
	freeze    int           // faults that hold it
	held      []func()      // events of a frozen node
	thawed    time.Duration // local time of the last thaw: no wait could end before
	wakeAt    time.Duration
	notBefore time.Duration // world: after a thaw, what has come may be read before the timers are
	dirty     bool
	moved     bool // something that may be held has changed since the last look at the pins

	tier   *tier.Primary
	grabs  int
	filled []bool // by slot: bytes come into it from the wire
	join   *join.Join
	holds  map[string]map[tier.Key][]hold // by transfer: what the join has

	said      map[string]time.Duration // local: when this node has said a transfer's last word
	peers     []*peer                  // by node; nil for the node itself
	conns     []*conn
	consumers []*consumer
	producers []*producer
	servings  []*serving
	private   []*private
	owners    int
	draining  bool
	drainBy   time.Duration
	leaving   bool
}

// A peer is a node's view of another one.
type peer struct {
	n       *node
	i       int
	core    *session.Core
	conn    *conn
	attempt int

	link        *link // this node consumes over it
	out         outbox
	dataSession int

	heard    time.Duration // local: when a byte came last on a session, or the session was lost
	heldUp   bool          // a session is up
	allowed  bool          // every leg is
	down     bool          // no connection and no attempt
	downAt   time.Duration // local: since when
	pingAt   time.Duration // local: when the next Ping is due
	refused  bool          // an attempt is just being refused
	lookups  map[session.JobID]*lookup
	demands  map[session.JobID]*fetch
	servings map[session.JobID]*serving
}

// A lookup is one that this node waits for.
type lookup struct {
	b     *asking
	at    int // its place there
	limit time.Duration
}

func name(i int) string { return fmt.Sprintf("n%02d", i) }

// boot starts a node, or starts it again as another process.
func (w *world) boot(i int, boot uint64) {
	n := &node{w: w, i: i, boot: boot, since: w.now, base: w.now, rate: 1000, holds: map[string]map[tier.Key][]hold{}, said: map[string]time.Duration{},
		filled: make([]bool, w.sched.Slots)}
	if w.memory[i] == nil {
		w.memory[i] = *slabs.Get().(*[]byte)
	}
	clear(w.memory[i][:w.sched.Slots*int(tier.StrideBytes(chunkBytesMax))])
	var err error
	n.tier, err = tier.New(tier.Options{Memory: w.memory[i], SlotBytes: chunkBytesMax, Slots: w.sched.Slots, Now: func() time.Time { return time.Time{} }})
	if err != nil {
		panic(err)
	}
	sizes := make([]uint64, len(w.model.Groups))
	for g := range sizes {
		sizes[g] = chunkBytesMax // a slot, whatever is in it
	}
	n.join = join.New(join.Config{Limits: w.joins, ChunkBytes: sizes, Elsewhere: n.elsewhere})
	limits := w.limits
	limits.KeysMax = w.sched.keysMax(i)
	n.peers = make([]*peer, w.sched.Nodes)
	w.nodes[i] = n
	w.touched(n)
	for k := range n.peers {
		if k == i || !w.sched.linked(i, k) {
			continue
		}
		jitter := stream(w.sched.Seed, 3, uint64(i), uint64(k), boot)
		core, err := session.New(n.local(), session.Config{
			Hello: &sessionpb.Hello{NodeId: name(i), BootId: boot, SlotBytes: chunkBytesMax, DataAddress: name(i), DataToken: []byte{byte(i), byte(boot)},
				RulesDigest: []byte{w.sched.rules(i)}, DeploymentDigest: []byte("deployment"), Layout: w.model.layout()},
			PeerID: name(k), Limits: limits, Dial: i < k || w.sched.DialBoth,
			Jitter: func() float64 { return float64(jitter.n(1000)) / 1000 },
		})
		if err != nil {
			panic(err)
		}
		p := &peer{n: n, i: k, core: core, heard: n.local(), lookups: map[session.JobID]*lookup{},
			demands: map[session.JobID]*fetch{}, servings: map[session.JobID]*serving{}}
		n.peers[k] = p
		w.after(0, n, func() { p.carry() }) // once every node is there
	}
}

// die ends a process at once: its connections are reset, its memory is gone.
func (n *node) die() {
	n.w.note("die", n.i, int(n.boot), 0)
	n.dead = true
	for _, c := range n.conns {
		for k := range c.ends {
			if c.ends[k].n == n && c.open[k] {
				c.open[k] = false
				c.pipes[k].cut()
				c.pipes[k].put(0, func() { c.eof(1-k, "reset") })
			}
		}
	}
	for _, p := range n.peers {
		if p == nil {
			continue
		}
		if p.link != nil {
			p.link.drop(false)
		}
		if p.out.link != nil {
			p.out.link.drop(true)
		}
	}
	for _, c := range n.consumers {
		c.result("killed")
	}
	for range n.producers {
		n.w.result.Results["producer killed"]++
	}
	n.consumers, n.producers = nil, nil
}

func (n *node) frozen() bool { return n.freeze > 0 }

// local is the node's own clock.
func (n *node) local() time.Duration {
	return n.base + (n.w.now-n.since)*time.Duration(n.rate)/1000
}

// world turns a time of the node's clock into the world's: the first at which it has come.
func (n *node) world(local time.Duration) time.Duration {
	d := max(0, local-n.base)
	return n.since + (d*1000+time.Duration(n.rate)-1)/time.Duration(n.rate)
}

// drift changes how fast the node's clock runs.
func (n *node) drift(rate int64) {
	n.base, n.since = n.local(), n.w.now
	n.rate = rate
	n.w.touched(n)
}

const never = time.Duration(1<<62 - 1)

// wake is when the node must run next, in the world's time.
func (n *node) wake() time.Duration {
	at := never
	for _, p := range n.peers {
		if p != nil {
			if t, ok := p.core.Wake(); ok {
				if n.w.broken.Deadline && p.forgets(n.local()) {
					t = n.local() + ms
				}
				at = min(at, t)
			}
		}
	}
	if t, ok := n.join.Wake(); ok {
		at = min(at, t)
	}
	for _, c := range n.consumers {
		if len(c.writing) > 0 {
			at = min(at, c.writeLimit)
		}
	}
	for _, v := range n.servings {
		if len(v.awaits) > 0 {
			at = min(at, v.awaitLimit)
		}
	}
	for _, x := range n.private {
		at = min(at, x.limit)
	}
	if n.draining && !n.leaving {
		at = min(at, n.drainBy)
	}
	if at == never {
		return never
	}
	return n.world(at)
}

// tick brings the time to every core.
func (n *node) tick() {
	now := n.local()
	for _, p := range n.peers {
		if p != nil && !(n.w.broken.Deadline && p.forgets(now)) {
			p.core.Tick(now)
			p.carry()
		}
	}
	n.join.Tick(now)
	n.carryJoin()
}

// settle is what waits for a change of the tier, and what is due by the node's clock.
func (n *node) settle() (changed bool) {
	for again := true; again; {
		again = false
		for _, c := range slices.Clone(n.consumers) {
			again = c.poll() || again
		}
		for _, v := range slices.Clone(n.servings) {
			again = v.poll() || again
		}
		again = n.adopt() || again
		changed = changed || again
	}
	if n.draining && !n.leaving && (n.local() >= n.drainBy || n.idle()) {
		n.leave()
		changed = true
	}
	return changed
}

func (n *node) idle() bool {
	for _, p := range n.peers {
		if p != nil && !p.core.Idle() {
			return false
		}
	}
	return true
}

// drain mirrors Node.Close: engines first, then what peers wait for, then the sessions.
func (n *node) drain() {
	n.draining, n.drainBy = true, n.local()+n.w.waits.drain
	n.crashEngine("draining")
	n.join.Drain(n.local())
	n.carryJoin()
	for _, p := range n.peers {
		if p != nil {
			p.core.Drain(n.local(), "draining")
			p.carry()
		}
	}
}

// leave is the end of a drain: every session is shut, and the process exits.
func (n *node) leave() {
	if now := n.local(); n.late(n.drainBy) {
		n.w.fail("wait", "node %d drains until %v, its limit was %v", n.i, now, n.drainBy)
	}
	n.leaving = true
	for _, p := range n.peers {
		if p != nil {
			p.core.Shut(n.local(), "this node closes")
			p.carry()
		}
	}
	n.w.after(5*ms, n, n.die) // what is said goes out first
}

// crashEngine ends every request of the node's engine: a closed engine stream is their
// last word.
func (n *node) crashEngine(cause string) {
	n.w.note("engine gone", n.i, 0, 0)
	for _, c := range slices.Clone(n.consumers) {
		c.finish(true, cause)
	}
	for _, p := range slices.Clone(n.producers) {
		p.finish(true, cause)
	}
}

func (p *peer) receive(e *sessionpb.Envelope) {
	n := p.n
	now, c := n.local(), p.conn
	p.core.Tick(now) // what is due before the message is seen apart from what it causes
	p.carry()
	if p.conn != c {
		return
	}
	p.heardByte(now)
	n.w.note(phaseName(e), p.i, n.i, 0)
	a := e.GetAbort()
	was := p.heldUp
	if s := e.GetSupply(); s != nil {
		p.owes(s)
	}
	if r := e.GetRenew(); r != nil {
		for _, id := range r.Jobs {
			if v := p.servings[session.JobID(id)]; v != nil {
				v.lease = now + n.w.limits.Lease
			}
		}
	}
	if d := e.GetDone(); d != nil {
		p.told(d)
	}
	if a == nil || !n.w.broken.AbortLost {
		p.core.Receive(now, e)
	}
	acked := p.carry()
	if a != nil && was && p.heldUp && acked != session.JobID(a.Job) {
		n.w.fail("abort without ack", "node %d: an Abort of job %d by node %d has no AbortAck", n.i, a.Job, p.i)
	}
	if a != nil && p.servings[session.JobID(a.Job)] != nil {
		n.w.fail("aborted job lives", "node %d: job %d of node %d goes on after its Abort", n.i, a.Job, p.i)
	}
}

func phaseName(e *sessionpb.Envelope) string {
	if ph := phaseOf(e); ph != NoPhase {
		return ph.String()
	}
	return "other"
}

// lostConn forgets the current connection.
func (p *peer) lostConn() {
	p.conn, p.heldUp = nil, false
	p.down, p.downAt = true, p.n.local()
}

// redials checks the pause before an attempt.
func (p *peer) redials() {
	n, l := p.n, &p.n.w.limits
	if pause := n.local() - p.downAt; p.down && (pause < l.RetryMin/2 || n.late(p.downAt+l.RetryMax)) {
		n.w.fail("wait", "node %d: node %d is dialed again after %v, not between %v and %v", n.i, p.i, pause, l.RetryMin/2, l.RetryMax)
	}
	p.down = false
}

// pings checks that a Ping goes out exactly when it is due.
func (p *peer) pings() {
	n := p.n
	if now := n.local(); now < p.pingAt || n.late(p.pingAt) {
		n.w.fail("wait", "node %d: a Ping to node %d goes out at %v, not at %v", n.i, p.i, now, p.pingAt)
	}
	p.pingAt = n.local() + n.w.limits.Ping
}

// heardByte notes, for the check, that a byte came on a session.
func (p *peer) heardByte(now time.Duration) {
	if p.heldUp {
		p.heard = now
	}
}

// carry carries out the effects of a peer's core; it returns the last job whose Abort was
// acknowledged.
func (p *peer) carry() (acked session.JobID) {
	p.n.w.touched(p.n)
	for effects := p.core.Take(); len(effects) > 0; effects = p.core.Take() {
		for _, e := range effects {
			if s, ok := e.(session.Send); ok && s.Envelope.GetAbortAck() != nil {
				if p.n.w.broken.AckLost {
					continue
				}
				acked = session.JobID(s.Envelope.GetAbortAck().Job)
			}
			p.effect(e)
		}
	}
	return acked
}

func (p *peer) effect(e session.Effect) {
	n, w := p.n, p.n.w
	switch e := e.(type) {
	case session.Send:
		if e.Envelope.GetPing() != nil {
			p.pings()
		}
		p.send(e.Envelope)
		return
	case session.Dial:
		p.redials()
		if w.broken.Recover && p.core.Status(n.local()).Sessions > 0 {
			return
		}
		p.dial()
	case session.Close:
		if e.Protocol {
			w.fail("protocol", "node %d finds that node %d breaks the protocol: %s", n.i, p.i, e.Reason)
		}
		p.attempt++
		c := p.conn
		p.lostConn()
		if c != nil {
			p.hangUp(c, e.Reason)
		}
	case session.Changed:
		p.changed(e)
	case session.Up:
		p.heard, p.heldUp, p.pingAt = n.local(), true, n.local()
		w.note("up", n.i, p.i, e.Hello.BootId)
		if c := p.conn; c != nil {
			c.up[c.side(p)] = true
		}
		p.judge(e)
		if p.link == nil || !p.link.up || e.Restarted {
			if p.link != nil {
				p.link.drop(false)
				p.link = nil
			}
			p.dataSession++
			p.dialData(p.dataSession, 50*ms)
		}
	case session.LookupDone:
		p.lookupDone(e)
	case session.DemandDone:
		p.demandDone(e)
		if w.broken.DoneTwice {
			p.demandDone(e)
		}
	case session.Word:
		p.word(e)
	case session.LookedUp:
		n.answerLookup(p, e.Query)
	case session.Demanded:
		p.demanded(e.Job)
	case session.Push:
		p.pushJob(e)
	case session.CancelPush:
		if v := p.servings[e.Job]; v != nil {
			v.stop()
		}
	case session.JobEnded:
		p.jobEnded(e)
	case session.Released: // lookups hold nothing
	}
	n.moved = true
}

// judge mirrors what a node does with a peer of other rules: in the background it checks the
// pair, and then says whether every leg is allowed.
func (p *peer) judge(e session.Up) {
	n, w := p.n, p.n.w
	if e.SameRules != (w.sched.rules(n.i) == w.sched.rules(p.i)) {
		w.fail("leg", "node %d: node %d has the same rules: %v", n.i, p.i, e.SameRules)
	}
	if e.Restarted || p.core.Status(n.local()).Sessions == 1 {
		p.allowed = e.SameRules
	}
	if n.w.broken.Legs {
		p.core.AllowLegs(n.local(), true, true, "")
	}
	if p.allowed {
		return
	}
	w.after(time.Duration(w.rnd.between(1, 600))*ms, n, func() {
		if p.core.Status(n.local()).BootID != e.Hello.BootId {
			return // another process: it is judged anew
		}
		p.allowed = w.sched.accepted(n.i, p.i)
		p.core.AllowLegs(n.local(), p.allowed, p.allowed, "a chunk is demanded that is never supplied")
		p.carry()
	})
}

// changed checks that the peer's state changes exactly when it must.
func (p *peer) changed(e session.Changed) {
	n := p.n
	n.w.note("state "+e.To.String(), n.i, p.i, 0)
	now := n.local()
	silence := now - p.heard
	late := now > n.thawed // else it could not run before
	var limit time.Duration
	switch {
	case e.To == session.Suspect && e.From == session.Ready:
		limit = n.w.limits.Suspect
	case e.To == session.Suspect && e.From == session.Connecting && !p.refused:
		limit = n.w.limits.ConnectHello
	case e.To == session.Dead && e.From == session.Suspect:
		limit = n.w.limits.Dead
	}
	if limit > 0 && !n.leaving && (silence < limit || late && silence-limit > clockGrain) {
		n.w.fail("wait", "node %d: node %d becomes %v after %v of silence, not after %v", n.i, p.i, e.To, silence, limit)
	}
	if e.To == session.Connecting {
		p.heard, p.heldUp = now, false
	}
	if e.To == session.Dead {
		p.heldUp = false
	}
}

// handed checks a slot that the tier has just handed out: nothing may still be put into it.
func (n *node) handed(s tier.Slot) tier.Slot {
	if n.filled[s.Index] {
		n.w.fail("fence", "node %d: slot %d is handed out, epoch %d, while bytes for an earlier epoch still come into it", n.i, s.Index, s.Epoch)
	}
	return s
}

func (n *node) newOwner(kind string) tier.Owner {
	n.owners++
	return tier.Owner{Kind: kind, ID: fmt.Sprint(n.owners)}
}
