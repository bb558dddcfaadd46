package session

import (
	"errors"
	"fmt"
	"time"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// Protocol versions that this package speaks.
const (
	ProtocolMin = 1
	ProtocolMax = 1
)

// A PeerState is what a node thinks of a peer.
type PeerState uint8

const (
	// Connecting: no session yet, and the time to get one is not over. Jobs wait.
	Connecting PeerState = iota
	// Ready: a session, and bytes come.
	Ready
	// Suspect: silence for Limits.Suspect, or no session within
	// Limits.ConnectHello. Jobs are answered at once.
	Suspect
	// Dead: silence for Limits.Dead. The connection is closed.
	Dead
)

// String returns the name that logs and metrics use.
func (s PeerState) String() string {
	return [...]string{"connecting", "ready", "suspect", "dead"}[s]
}

// link is how far the current connection is.
type link uint8

const (
	linkNone    link = iota // none; a dialer waits for retryAt
	linkDialing             // the edge tries
	linkOpen                // connected, the peer's Hello is awaited
	linkUp                  // Hellos are exchanged
)

// Config is what a Core is made of.
type Config struct {
	// Hello is what this node says. The core sets the protocol versions, the layout
	// digest and the bounds in it; the rest is the caller's. It is not changed after.
	Hello *sessionpb.Hello
	// PeerID is the node expected at the other end.
	PeerID string
	Limits Limits
	// FirstJob is below every id that this core gives. A core that takes the place of
	// another one of the same process must start above the ids of that one.
	FirstJob JobID
	// Dial says that this side makes connection attempts.
	Dial bool
	// Jitter returns a number in [0, 1) that shortens the pause before an attempt by
	// up to half; nil is no jitter.
	Jitter func() float64
}

// Core is the state machine of the session with one peer. It does no I/O and has
// no clock, goroutine or random: the edge brings connections, messages, local
// commands and the time in, and carries the effects out (Take). Time is what has
// passed since a start that the edge chooses; it never goes back.
//
// # The connection
//
//	       Dial effect          Connected            Hello accepted
//	none ------------> dialing -----------> open ------------------> up
//	  ^                   |                   |                       |
//	  +-------------------+-------------------+-----------------------+
//	    Disconnected, ConnectHello over, Hello refused, protocol error, Dead
//
// An attempt that does not reach up within Limits.ConnectHello is closed; the next
// one starts after a pause that doubles from RetryMin to RetryMax. A side that does
// not dial waits in none for Connected. Connected in any state replaces the
// connection before it; the edge has closed that one.
//
// # The peer
//
//	connecting --Hello--> ready --silence Suspect--> suspect --silence Dead--> dead
//	    |  ^                |  ^                        |                        |
//	    |  +--Disconnected--+  +------any byte----------+                        |
//	    +--ConnectHello over--> suspect                 +---------Hello----------+--> ready
//	    +--attempt fails------>
//
// A byte is a message (Receive) or data (DataActivity). In connecting, jobs wait for
// the session, at most to the moment when the peer becomes suspect: an attempt that the
// edge says has failed is enough, because a process that is gone refuses at once, and a
// job that names it has nothing to wait for. In suspect and
// dead they are answered at once. Becoming suspect ends every job in both
// directions. A lost connection ends every job that was sent on it.
//
// # A job of the consumer
//
// Every key ends exactly once, by the first of these, and the job ends with its
// last key:
//
//	bytes arrived, or are wrong (Arrived)      Transferred, Checksum, NoData
//	the data connection was lost (DataLost)    NoData, for keys supplied
//	refused, or not named by the last word     Unmatched, Busy, Refused
//	the producer's Done says that it failed    PushFailed, Checksum, NoData
//	Supply + base + owed bytes/rate            TransferLate
//	the request's deadline                     Deadline
//	Abort                                      Aborted
//	silence, connection lost                   PeerSuspect, Disconnected
//
// What the producer refuses, and what it says will come, is told at once as a Word:
// the host can go on without it while other keys are still awaited.
//
// The end is told to the producer: Done (release) when it knows the fate of all
// keys by itself, else Abort.
//
// # A job of the producer
//
// A key is pending until the host's Answer names it: refused, or pushing until
// Pushed. Last word refuses what is pending. When nothing is pending or pushing the
// producer sends Done. An Abort, a release, the deadline, silence or a lost
// connection ends the job from every state; when something was being pushed,
// CancelPush comes first. JobEnded is the one end.
//
// While something is bound to the job, that is named as available and not sent, the job
// lives on a lease: the consumer sends Renew three times in Limits.Lease of the
// producer, as its Hello says, and without one for that long the job ends as Lapsed.
// Pings do not renew: they say that the process lives, not that it wants the bytes.
//
// # Ids
//
// The ids that a core gives rise for as long as it lives and a session sees only
// rising ids, so a message for an id below the highest that is not in work is late
// and ignored; one above it breaks the protocol. No memory of finished ids is
// needed and none is kept. A peer with another boot id is another process: what
// was known of the old one is dropped.
type Core struct {
	cfg   Config
	now   time.Duration
	link  link
	state PeerState
	hello *sessionpb.Hello // the peer's, of the last session
	out   []Effect
	legs  legs

	peerDraining  bool
	left          bool // see Status.Left
	localDraining bool

	unfitFor  string        // why one side refused the other's hello last; "" once one was accepted
	undialed  string        // why the last dial failed; "" once there was a connection
	aliveAt   time.Duration // last byte; the start or the loss of the connection while there is none
	attemptBy time.Duration // linkDialing, linkOpen: when the attempt is given up
	retryAt   time.Duration // linkNone: when to dial
	attempt   int           // attempts since the last session
	soonest   time.Duration // no wait ends before; 0 = look
	pingAt    time.Duration // linkUp
	pingSeq   uint64
	pingSent  time.Duration // when pingSeq was sent
	rtt       time.Duration // of the last Pong; 0 before
	peerLoad  uint32
	sessions  uint64

	nextJob    JobID
	lookups    table[lookup]
	demands    table[demand]
	demandKeys int
	owed       uint64 // bytes of keys that the peer has supplied and that are not there
	renewAt    time.Duration

	peerJob  JobID // highest id seen from the peer in this session's process
	queries  table[query]
	jobs     table[producerJob]
	jobsKeys int // keys of queries and jobs
}

// New returns the core of a peer that is to be connected from now on.
func New(now time.Duration, cfg Config) (*Core, error) {
	if err := cfg.Limits.Validate(); err != nil {
		return nil, err
	}
	h := cfg.Hello
	switch {
	case h.GetNodeId() == "" || len(h.NodeId) > cfg.Limits.IDBytesMax:
		return nil, fmt.Errorf("session: node id %.40q: 1 to %d bytes are allowed", h.GetNodeId(), cfg.Limits.IDBytesMax)
	case h.BootId == 0:
		return nil, errors.New("session: boot id is 0; it must be a number that is new at every start")
	case cfg.PeerID == "" || cfg.PeerID == h.NodeId:
		return nil, fmt.Errorf("session: peer id %q and node id %q: the peer must be named and be another node", cfg.PeerID, h.NodeId)
	}
	cfg.Hello = fillHello(h, &cfg.Limits)
	if err := checkHello(cfg.Hello, &cfg.Limits); err != nil {
		return nil, fmt.Errorf("session: own hello: %w", err)
	}
	c := &Core{cfg: cfg, now: now, aliveAt: now, retryAt: now, nextJob: cfg.FirstJob}
	c.advance(now)
	return c, nil
}

// Take returns the effects since the last call, in order.
func (c *Core) Take() []Effect {
	out := c.out
	c.out = nil
	return out
}

func (c *Core) emit(e Effect) { c.out = append(c.out, e) }

// send sends on the session, if there is one.
func (c *Core) send(e *sessionpb.Envelope) {
	if c.link == linkUp {
		c.emit(Send{e})
	}
}

// State returns what the node thinks of the peer.
func (c *Core) State() PeerState { return c.state }

// Left is Status.Left.
func (c *Core) Left() bool { return c.left }

// Status is a snapshot for people and metrics.
type Status struct {
	State    PeerState
	Draining bool
	// Left: the last session ended after the peer had said that it closes, and it has said
	// nothing since. That it cannot be reached is no fault then.
	Left bool
	// BootID of the peer in its last session; 0 before.
	BootID uint64
	// RTT of the last ping; 0 before.
	RTT time.Duration
	// Silence is the time since the last byte.
	Silence time.Duration
	// Sessions counts those that came up.
	Sessions uint64
	// Lookups and Demands of this node, and Jobs of the peer, in work.
	Lookups, Demands, Jobs int
	// PeerLoad is what the peer's last Ping said: its jobs in work.
	PeerLoad uint32
	// AllLegs says that this node may demand in every leg, not only in probe.
	AllLegs bool
	// KeysMax is how many keys a message to the peer may name: the smaller bound of the two
	// sides, or at most KeysMin while there is no session.
	KeysMax int
	// Supplies is the peer's last word on that, when rules, parameters or caps differ, and
	// SuppliesNot its reason when it is false.
	Supplies    bool
	SuppliesNot string
}

// Status returns a snapshot at now.
func (c *Core) Status(now time.Duration) Status {
	return Status{State: c.state, Draining: c.peerDraining, Left: c.left, BootID: c.hello.GetBootId(), RTT: c.rtt, Silence: max(0, now-c.aliveAt),
		Sessions: c.sessions, Lookups: c.lookups.len(), Demands: c.demands.len(), Jobs: c.jobs.len(),
		PeerLoad: c.peerLoad, AllLegs: c.mayDemand(LegPD), Supplies: c.legs.supplies, SuppliesNot: c.legs.peerWhy, KeysMax: c.keysMax()}
}

// keysMax is how many keys a message to the peer may name.
func (c *Core) keysMax() int {
	most := c.cfg.Limits.KeysMax
	if c.link != linkUp {
		return min(most, KeysMin)
	}
	if n := c.hello.GetCaps().GetMaxKeys(); n > 0 {
		most = int(min(int64(most), int64(n)))
	}
	return most
}

// Idle says that no job is in work in either direction.
func (c *Core) Idle() bool {
	return c.lookups.len()+c.demands.len()+c.jobs.len()+c.queries.len() == 0
}

// Never is later than every deadline.
const never = time.Duration(1<<63 - 1)

// Wake returns when Tick must be called next. It may be too early, never too late.
func (c *Core) Wake() (time.Duration, bool) {
	if c.soonest <= c.now {
		c.soonest, _ = c.nextWait()
	}
	return c.soonest, c.soonest != never
}

// waits notes that a wait was added.
func (c *Core) waits(at time.Duration) { c.soonest = min(c.soonest, at) }

// Tick brings the time.
func (c *Core) Tick(now time.Duration) { c.advance(now) }

// nextWait returns the earliest wait and what ends it.
func (c *Core) nextWait() (time.Duration, func()) {
	at, f := never, func() {}
	// Ties go to the first: a job's own limit names its cause better than the peer's.
	for _, l := range c.lookups.all() {
		if l.deadline < at {
			at, f = l.deadline, func() { c.endLookup(l, Deadline, "no answer in time") }
		}
	}
	for _, d := range c.demands.all() {
		if d.next < at {
			at, f = d.next, func() { c.expireDemand(d) }
		}
	}
	for _, q := range c.queries.all() {
		if q.Deadline < at {
			at, f = q.Deadline, func() { c.dropQuery(q) }
		}
	}
	for _, j := range c.jobs.all() {
		if j.Deadline < at {
			at, f = j.Deadline, func() { c.expireJob(j) }
		}
		if c.leased(j) && j.lease < at {
			at, f = j.lease, func() { c.lapse(j) }
		}
	}
	take := func(t time.Duration, g func()) {
		if t < at {
			at, f = t, g
		}
	}
	switch c.link {
	case linkNone:
		if c.cfg.Dial {
			take(c.retryAt, c.dial)
		}
	case linkDialing, linkOpen:
		take(c.attemptBy, func() {
			c.hangUp(fmt.Sprintf("no session with %s within deadlines.connect_ms, %v", c.cfg.PeerID, c.cfg.Limits.ConnectHello), false)
		})
	case linkUp:
		take(c.pingAt, c.ping)
		if c.owed > 0 && c.renewal() > 0 {
			take(c.renewAt, c.renew)
		}
	}
	if s, ok := c.suspectAt(); ok {
		take(s, c.suspect)
	}
	if c.state == Suspect {
		take(c.aliveAt+c.cfg.Limits.Dead, c.dead)
	}
	return at, f
}

// advance moves the time and ends every wait that is over, earliest first.
func (c *Core) advance(now time.Duration) {
	c.now = max(c.now, now)
	for c.soonest <= c.now {
		at, f := c.nextWait()
		if at > c.now {
			c.soonest = at
			return
		}
		f()
	}
}

func (c *Core) suspectAt() (time.Duration, bool) {
	switch c.state {
	case Connecting:
		return c.aliveAt + c.cfg.Limits.ConnectHello, true
	case Ready:
		return c.aliveAt + c.cfg.Limits.Suspect, true
	}
	return 0, false
}

func (c *Core) change(to PeerState, reason string) {
	c.soonest = 0
	if c.state != to {
		c.emit(Changed{From: c.state, To: to, Reason: reason, Left: c.left})
		c.state = to
	}
}

func (c *Core) suspect() {
	reason := fmt.Sprintf("no byte from %s on control or data for deadlines.suspect_ms, %v", c.cfg.PeerID, c.cfg.Limits.Suspect)
	if c.state == Connecting {
		reason = fmt.Sprintf("no session with %s within deadlines.connect_ms, %v", c.cfg.PeerID, c.cfg.Limits.ConnectHello)
	}
	c.suspectFor(reason)
}

// suspectFor ends every job: the peer is suspect.
func (c *Core) suspectFor(reason string) {
	c.change(Suspect, reason)
	c.endAll(PeerSuspect, reason)
}

func (c *Core) dead() {
	reason := fmt.Sprintf("no byte from %s on control or data for deadlines.dead_ms, %v", c.cfg.PeerID, c.cfg.Limits.Dead)
	if c.undialed != "" { // says what to mend, where the silence says only that something is wrong
		reason += "; no connection: " + c.undialed
	}
	if c.unfitFor != "" { // it is heard, and says the same each time
		reason = c.unfitFor
	}
	c.change(Dead, reason)
	if c.link != linkNone {
		c.hangUp(reason, false)
	}
}

// alive notes a byte from the peer at a time that may lie a little back.
func (c *Core) alive(at time.Duration) {
	if c.link != linkUp {
		return
	}
	c.aliveAt = max(c.aliveAt, at)
	if c.state == Suspect && c.now-c.aliveAt < c.cfg.Limits.Suspect {
		c.change(Ready, "bytes come again")
	}
}

// DataActivity notes that data came from the peer at a time up to now.
func (c *Core) DataActivity(now, at time.Duration) {
	// The byte came before waits that end after it.
	if at <= now {
		c.alive(at)
	}
	c.advance(now)
}

func (c *Core) dial() {
	c.attempt++
	c.link = linkDialing
	c.attemptBy = c.now + c.cfg.Limits.ConnectHello
	c.soonest = 0
	c.emit(Dial{Attempt: c.attempt})
}

// backoff returns the pause before the next attempt.
func (c *Core) backoff() time.Duration {
	l := &c.cfg.Limits
	d := l.RetryMax
	if n := c.attempt - 1; n < 30 {
		d = min(l.RetryMax, l.RetryMin<<max(0, n))
	}
	if c.cfg.Jitter != nil {
		d -= time.Duration(float64(d) / 2 * min(1, max(0, c.cfg.Jitter())))
	}
	return d
}

// Connected tells that a connection to the peer is open; it replaces the one before
// it. The Hello goes out, before anything else: what is due by now belongs to the connection
// that is gone, and must not be sent on, nor close, the new one.
func (c *Core) Connected(now time.Duration) {
	c.now = max(c.now, now)
	if c.link == linkUp {
		c.lost("replaced by a new connection")
	}
	if c.link != linkDialing { // a dial's limit runs from its start
		c.attemptBy = c.now + c.cfg.Limits.ConnectHello
	}
	c.link = linkOpen
	c.undialed = ""
	c.soonest = 0
	defer c.advance(c.now)
	c.emit(Send{&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: c.cfg.Hello}}})
}

// Disconnected tells that the connection, or the attempt to get one, failed.
func (c *Core) Disconnected(now time.Duration, reason string) {
	c.advance(now)
	switch c.link {
	case linkNone:
		return
	case linkDialing:
		c.undialed = reason
		if c.state == Connecting {
			c.suspectFor(fmt.Sprintf("no connection to %s: %s", c.cfg.PeerID, reason))
		}
	case linkUp:
		c.lost(reason)
	}
	c.link = linkNone
	c.retryAt = c.now + c.backoff()
	c.soonest = 0
}

// lost ends what was on a session that is gone.
func (c *Core) lost(reason string) {
	c.link = linkNone
	c.attempt = 0
	c.left, c.peerDraining = c.peerDraining, false
	reason = fmt.Sprintf("session with %s closed: %s", c.cfg.PeerID, reason)
	if c.state == Ready {
		c.aliveAt = c.now
		c.change(Connecting, reason)
	}
	c.endAll(Disconnected, reason)
}

// hangUp closes the connection or the attempt.
func (c *Core) hangUp(reason string, protocol bool) {
	c.emit(Close{Reason: reason, Protocol: protocol})
	if c.link == linkUp {
		c.lost(reason)
	}
	c.link = linkNone
	c.retryAt = c.now + c.backoff()
	c.soonest = 0
}

// broken closes a connection whose peer breaks the protocol.
func (c *Core) broken(format string, args ...any) {
	c.left, c.peerDraining = false, false
	c.hangUp(fmt.Sprintf("peer %s breaks the protocol: ", c.cfg.PeerID)+fmt.Sprintf(format, args...), true)
}

// endAll ends the jobs of both directions.
func (c *Core) endAll(cause Cause, text string) {
	c.loseAsk(text)
	for _, l := range c.lookups.all() {
		c.endLookup(l, cause, text)
	}
	for _, d := range c.demands.all() {
		c.endDemand(d, cause, text)
	}
	for _, q := range c.queries.all() {
		c.dropQuery(q)
	}
	for _, j := range c.jobs.all() {
		c.stopJob(j, cause, text)
		c.endJob(j, text, true)
	}
}

func (c *Core) ping() {
	c.pingSeq++
	c.pingSent = c.now
	c.pingAt = c.now + c.cfg.Limits.Ping
	c.soonest = 0
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Ping{Ping: &sessionpb.Ping{
		BootId: c.cfg.Hello.BootId, Seq: c.pingSeq, Load: uint32(c.jobs.len())}}})
}

// Drain says that this node takes no new job and will close.
func (c *Core) Drain(now time.Duration, reason string) {
	c.advance(now)
	if !c.localDraining {
		c.localDraining = true
		c.send(goaway(cut(reason, c.cfg.Limits.TextBytesMax)))
	}
}

func goaway(reason string) *sessionpb.Envelope {
	return &sessionpb.Envelope{Message: &sessionpb.Envelope_Goaway{Goaway: &sessionpb.Goaway{Reason: reason}}}
}

// Receive brings a message of the current connection. A nil or empty envelope breaks
// the protocol, as does everything else that a right peer never sends.
func (c *Core) Receive(now time.Duration, e *sessionpb.Envelope) {
	c.advance(now)
	if h := e.GetHello(); c.link == linkOpen && h != nil {
		c.receiveHello(h)
		return
	}
	if r := e.GetHelloRefused(); r != nil && c.link != linkNone {
		c.refused(r)
		return
	}
	switch c.link {
	case linkOpen:
		if g := e.GetGoaway(); g != nil {
			c.hangUp(fmt.Sprintf("%s closes before its hello: %s", c.cfg.PeerID, cut(g.Reason, c.cfg.Limits.TextBytesMax)), false)
			return
		}
		c.broken("the first message is %s; it must be Hello", kind(e))
		return
	case linkUp:
	default:
		return // of a connection that is gone
	}
	c.alive(c.now)
	if err := c.dispatch(e); err != nil {
		c.broken("%v", err)
	}
}

// dispatch takes one message of a session that is up.
func (c *Core) dispatch(e *sessionpb.Envelope) error {
	switch m := e.GetMessage().(type) {
	case *sessionpb.Envelope_Lookup:
		return c.receiveLookup(m.Lookup)
	case *sessionpb.Envelope_States:
		return c.receiveStates(m.States)
	case *sessionpb.Envelope_Demand:
		return c.receiveDemand(m.Demand)
	case *sessionpb.Envelope_Supply:
		return c.receiveSupply(m.Supply)
	case *sessionpb.Envelope_Done:
		if m.Done.GetRelease() {
			return c.receiveRelease(m.Done)
		}
		return c.receiveDone(m.Done)
	case *sessionpb.Envelope_Abort:
		return c.receiveAbort(m.Abort)
	case *sessionpb.Envelope_AbortAck:
		return c.issued("AbortAck", JobID(m.AbortAck.GetJob()))
	case *sessionpb.Envelope_Renew:
		return c.receiveRenew(m.Renew)
	case *sessionpb.Envelope_Ping:
		return c.receivePing(m.Ping)
	case *sessionpb.Envelope_Pong:
		return c.receivePong(m.Pong)
	case *sessionpb.Envelope_Goaway:
		c.receiveGoaway(m.Goaway)
		return nil
	case *sessionpb.Envelope_Ask:
		return c.receiveAsk(m.Ask)
	case *sessionpb.Envelope_Part:
		return c.receivePart(m.Part)
	case *sessionpb.Envelope_Legs:
		return c.receiveLegs(m.Legs)
	}
	return fmt.Errorf("%s is not allowed here", kind(e))
}

func (c *Core) receivePing(p *sessionpb.Ping) error {
	if p.GetBootId() != c.hello.BootId {
		return fmt.Errorf("message Ping with boot id %#x in a session of boot id %#x", p.GetBootId(), c.hello.BootId)
	}
	c.peerLoad = p.Load
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Pong{Pong: &sessionpb.Pong{Seq: p.Seq}}})
	return nil
}

func (c *Core) receivePong(p *sessionpb.Pong) error {
	if p.GetSeq() > c.pingSeq {
		return fmt.Errorf("message Pong %d, but the last Ping was %d", p.GetSeq(), c.pingSeq)
	}
	if p.GetSeq() == c.pingSeq {
		c.rtt = max(1, c.now-c.pingSent)
	}
	return nil
}

func (c *Core) receiveGoaway(g *sessionpb.Goaway) {
	c.peerDraining = true
}

// issued reports an id that this core never gave.
func (c *Core) issued(what string, id JobID) error {
	if id == 0 || id > c.nextJob {
		return fmt.Errorf("%s for job %d, but the last one asked for is %d", what, id, c.nextJob)
	}
	return nil
}

// fresh notes the id of a new job of the peer.
func (c *Core) fresh(what string, id JobID) error {
	if id <= c.peerJob {
		return fmt.Errorf("%s with job %d, but job %d came before; ids must rise", what, id, c.peerJob)
	}
	c.peerJob = id
	return nil
}

// seen reports an id that the peer never gave.
func (c *Core) seen(what string, id JobID) error {
	if id == 0 || id > c.peerJob {
		return fmt.Errorf("%s for job %d, but the last one that came is %d", what, id, c.peerJob)
	}
	return nil
}

// Shut ends everything, for a peer that is removed or a node that exits. The core
// only answers from then on.
func (c *Core) Shut(now time.Duration, reason string) {
	c.advance(now)
	c.localDraining = true
	c.send(goaway(cut(reason, c.cfg.Limits.TextBytesMax)))
	c.endAll(Refused, reason)
	if c.link != linkNone {
		c.hangUp(reason, false)
	}
	c.cfg.Dial = false
	c.soonest = 0
	c.change(Dead, reason)
}
