package wire

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// An actor runs the core of one peer. Fields without lock belong to its goroutine.
type actor struct {
	p          *Peers
	id, addr   string
	configured bool
	core       *session.Core
	heardAt    atomic.Int64 // when a byte came last, on the clock of p.now
	status     atomic.Pointer[session.Status]
	remote     atomic.Pointer[net.Addr] // of the last session's connection

	after <-chan struct{} // closed when the actor whose place this one takes has ended; nil = none
	done  chan struct{}   // closed at the end

	mu   sync.Mutex
	box  []func(now time.Duration)
	jobs int  // new jobs in box
	over bool // nothing is taken any more
	ring chan struct{}

	conn      *conn                     // the current connection
	undial    context.CancelFunc        // the attempt in work
	attempt   int                       // tells attempts apart
	reached   *atomic.Pointer[net.Addr] // what the attempt before or in work has met
	heardSeen int64
	lookups   map[session.JobID]func(session.LookupDone)
	demands   map[session.JobID]func(session.DemandDone)
	words     map[session.JobID]func(session.Word)
	part      func(session.PartCame) // of the Ask in work
	onIdle    []func()
	ended     bool
	failures  map[string]bool // why attempts failed since the last session, as far as the log has it
	awaited   bool            // the log has that nobody was there after the peer's goodbye
}

func newActor(p *Peers, addr PeerAddr, configured bool, core *session.Core) *actor {
	a := &actor{p: p, id: addr.ID, addr: addr.Control, configured: configured, core: core, ring: make(chan struct{}, 1), done: make(chan struct{}),
		lookups: map[session.JobID]func(session.LookupDone){}, demands: map[session.JobID]func(session.DemandDone){},
		words: map[session.JobID]func(session.Word){}, failures: map[string]bool{}}
	s := core.Status(p.now())
	a.status.Store(&s)
	a.wake()
	return a
}

func (a *actor) wake() {
	select {
	case a.ring <- struct{}{}:
	default:
	}
}

// post gives the actor a command. A new job is refused when too many wait.
func (a *actor) post(f func(now time.Duration), job bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.over:
		return ErrClosed
	case job && a.jobs >= mailboxMax:
		return fmt.Errorf("peer %q: %d new jobs: %w", a.id, a.jobs, ErrBusy)
	case job:
		a.jobs++
	}
	a.box = append(a.box, f)
	a.wake()
	return nil
}

// shut ends the actor after what was posted before.
func (a *actor) shut(reason string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return
	}
	a.over = true
	a.box = append(a.box, func(now time.Duration) {
		a.core.Shut(now, reason)
		a.ended = true
	})
	a.wake()
}

func (a *actor) take() []func(now time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	box := a.box
	a.box, a.jobs = nil, 0
	return box
}

func (a *actor) run() {
	defer close(a.done)
	if a.after != nil {
		<-a.after
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for !a.ended {
		select {
		case <-a.ring:
		case <-timer.C:
		}
		if at := a.heardAt.Load(); at > a.heardSeen {
			a.heardSeen = at
			a.core.DataActivity(a.p.now(), time.Duration(at))
		}
		for _, f := range a.take() {
			f(a.p.now())
			a.carry()
		}
		a.core.Tick(a.p.now())
		a.carry()
		a.note(timer)
		if !a.configured && !a.ended && a.conn == nil && a.core.State() == session.Dead {
			a.p.forget(a)
		}
	}
	if a.undial != nil {
		a.undial()
	}
}

// note publishes what the actor knows and sets the timer.
func (a *actor) note(timer *time.Timer) {
	now := a.p.now()
	s := a.core.Status(now)
	a.status.Store(&s)
	if at, ok := a.core.Wake(); ok {
		timer.Reset(max(0, at-now))
	} else {
		timer.Stop()
	}
	if len(a.onIdle) > 0 && a.core.Idle() || a.ended {
		for _, f := range a.onIdle {
			f()
		}
		a.onIdle = nil
	}
}

// carry carries out the core's effects, those that they cause included.
func (a *actor) carry() {
	for effects := a.core.Take(); len(effects) > 0; effects = a.core.Take() {
		for _, e := range effects {
			a.effect(e)
		}
	}
}

func (a *actor) effect(e session.Effect) {
	host := a.p.host
	switch e := e.(type) {
	case session.Send:
		a.send(e.Envelope)
	case session.Dial:
		a.dial()
	case session.Close:
		a.closed(e)
	case session.Changed:
		a.logChange(e)
		host.PeerState(a.id, e)
	case session.Up:
		clear(a.failures)
		a.awaited = false
		if a.conn != nil {
			a.conn.up = true
			r := a.conn.remote()
			a.remote.Store(&r)
		}
		a.p.log.Info("peer session up", "peer", a.id, "boot_id", fmt.Sprintf("%#x", e.Hello.BootId), "restarted", e.Restarted,
			"protocol", e.Protocol, "same_rules", e.SameRules, "dialed", a.conn != nil && a.conn.dialed)
		host.PeerUp(a.id, e.Hello, e.Restarted, e.SameRules)
	case session.LookupDone:
		if f := a.lookups[e.Job]; f != nil {
			delete(a.lookups, e.Job)
			f(e)
		}
	case session.Word:
		if f := a.words[e.Job]; f != nil {
			f(e)
		}
	case session.DemandDone:
		delete(a.words, e.Job)
		if f := a.demands[e.Job]; f != nil {
			delete(a.demands, e.Job)
			f(e)
		}
	case session.LookedUp:
		if states, ok := host.OnLookup(a.id, e.Query); ok {
			a.core.AnswerLookup(a.p.now(), e.Query.ID, states)
		}
	case session.Released:
		host.OnRelease(a.id, e.Job)
	case session.Demanded:
		host.OnDemand(a.id, e.Job)
	case session.Push:
		host.OnPush(a.id, e.Job, e.Indices)
	case session.CancelPush:
		host.OnCancel(a.id, e.Job, e.Reason)
	case session.JobEnded:
		host.OnJobEnd(a.id, e.Job, e.Results, e.Reason)
	case session.Asked:
		a.answerAsk(e)
	case session.PartCame:
		if f := a.part; f != nil {
			a.part = nil
			f(e)
		}
	}
}

func (a *actor) logChange(e session.Changed) {
	args := []any{"peer", a.id, "from", e.From.String(), "to", e.To.String(), "reason", e.Reason}
	// That this node ends a session itself is no news to worry about.
	if a.ended || e.To != session.Suspect && e.To != session.Dead {
		a.p.log.Info("peer state changed", args...)
		return
	}
	if e.Left {
		a.shyInfo(fmt.Sprint(e.To, e.Reason), "peer state changed", args...)
		return
	}
	a.p.shy.Log.Log(slog.LevelWarn, a.cause("state"), fmt.Sprint(a.id, e.To, e.Reason), "peer state changed", args...)
}

// cause is one of the log's: of each configured peer its own, of all others together one, for
// they come, and are forgotten, and come again.
func (a *actor) cause(what string) string {
	if a.configured {
		return what + " of " + a.id
	}
	return what
}

// send queues a message; a queue that is full ends the connection.
func (a *actor) send(e *sessionpb.Envelope) {
	if a.conn == nil || a.conn.queue(e) {
		return
	}
	c := a.conn
	reason := fmt.Sprintf("the peer reads too slowly: %d messages of %d bytes wait; at most %d of %d are allowed",
		len(c.out), c.queued.Load(), a.p.cfg.Limits.QueueMessages, queuedBytesMax)
	a.conn = nil
	c.cut(reason)
	a.core.Disconnected(a.p.now(), reason)
}

// closed carries out a Close: messages sent before go out first.
func (a *actor) closed(e session.Close) {
	switch {
	case a.ended: // this node closes, or the peer was removed: nothing failed
	case strings.Contains(e.Reason, duplicate):
		// Both sides dialed at once, and the other one's session stays.
	case e.Protocol:
		a.p.shy.warn("protocol "+a.id, "peer session closed", "peer", a.id, "reason", e.Reason)
	default:
		a.logFailure(e.Reason)
	}
	a.stopDial()
	if c := a.conn; c != nil {
		a.conn = nil
		c.finish(e.Reason)
	}
}

// shyInfo writes what follows from a peer's goodbye. It has a cause of its own, so that it
// hides no fault.
func (a *actor) shyInfo(fault, msg string, args ...any) {
	a.p.shy.Log.Log(slog.LevelInfo, a.cause("goodbye"), a.id+fault, msg, args...)
}

// reasonsMax bounds the reasons for which attempts to have one session fail, and that have a
// line each: a port that is closed, then one that is not served yet, then a refusal.
const reasonsMax = 8

// localPort is this end of a connection, which has another port at each attempt.
var localPort = regexp.MustCompile(`:\d+->`)

// absent says that the attempt has found nobody, at the level of TCP.
func (a *actor) absent() bool {
	return a.conn == nil && (a.reached == nil || a.reached.Load() == nil)
}

// logFailure logs why an attempt failed, once for each reason until there is a session. That
// nobody was there is no fault after a goodbye.
func (a *actor) logFailure(reason string) {
	if a.absent() && a.core.Left() {
		if !a.awaited {
			a.awaited = true
			a.shyInfo(reason, "the peer has closed, and is not there yet", "peer", a.id, "reason", reason)
		}
		return
	}
	fault := localPort.ReplaceAllString(reason, ":port->")
	if a.failures[fault] || len(a.failures) == reasonsMax {
		return
	}
	a.failures[fault] = true
	if a.addr == "" { // it dials, and may dial again
		a.p.shy.Log.Log(slog.LevelWarn, a.cause("no session"), a.id+fault, "no session with peer", "peer", a.id, "reason", reason)
		return
	}
	l := &a.p.cfg.Limits
	a.p.shy.Log.Log(slog.LevelWarn, a.cause("no session"), a.id+fault, "no session with peer, retrying", "peer", a.id, "address", a.addr,
		"reason", reason, "pause_from", l.RetryMin, "pause_to", l.RetryMax)
}

func (a *actor) stopDial() {
	a.attempt++
	if a.undial != nil {
		a.undial()
		a.undial = nil
	}
}

// dial starts an attempt.
func (a *actor) dial() {
	a.stopDial()
	n := a.attempt
	ctx, cancel := context.WithCancel(context.Background())
	reached := new(atomic.Pointer[net.Addr])
	a.undial, a.reached = cancel, reached
	a.p.wg.Go(func() {
		c, err := a.p.connect(ctx, a.id, a.addr, reached)
		if err != nil {
			cancel()
			_ = a.post(func(now time.Duration) {
				if n == a.attempt {
					a.undial = nil
					a.logFailure(err.Error())
					a.core.Disconnected(now, err.Error())
				}
			}, false)
			return
		}
		err = a.post(func(now time.Duration) {
			if n != a.attempt { // given up
				c.cut("given up")
				return
			}
			a.undial = nil
			a.adopt(now, c)
		}, false)
		if err != nil {
			c.cut("closed")
		}
		c.serve(func() {
			cancel()
			c.close()
		})
	})
}

// adopt makes a connection the current one.
func (a *actor) adopt(now time.Duration, c *conn) {
	a.stopDial()
	if old := a.conn; old != nil {
		old.cut("replaced by a new connection")
	}
	a.conn = c
	a.core.Connected(now)
	a.carry() // the Hello goes before what else the connection brings
	c.deliver = func(e *sessionpb.Envelope, err error) error {
		if err == nil {
			// The byte came now, however late the actor gets to it.
			a.heardAt.Store(int64(a.p.now()))
		}
		return a.post(func(now time.Duration) {
			c.read()
			if a.conn != c {
				return
			}
			if err != nil {
				a.conn = nil
				switch {
				case a.core.State() == session.Ready: // the change of state says it
				case a.core.Left() && status.Convert(err).Message() == closing:
					a.shyInfo(err.Error(), "peer connection ended", "peer", a.id, "reason", err.Error())
				default:
					a.p.shy.warn("lost "+a.id, "peer connection ended", "peer", a.id, "reason", err.Error())
				}
				a.core.Disconnected(now, err.Error())
				return
			}
			if h := e.GetHello(); h != nil && !c.up && a.p.cfg.CheckHello != nil {
				if err := a.p.cfg.CheckHello(h, c.remote()); err != nil {
					a.core.RefuseHello(now, err.Error())
					return
				}
			}
			a.core.Receive(now, e)
		}, false)
	}
	close(c.adopted)
}

// review ends the connection when its node would be refused now.
func (a *actor) review(now time.Duration) {
	c := a.conn
	if c == nil {
		return
	}
	err := c.judge()
	if err == nil {
		return
	}
	reason := "no longer allowed: " + err.Error()
	a.p.log.Warn("peer session ended", "peer", a.id, "reason", reason)
	a.conn = nil
	c.queue(goawayMessage(reason))
	c.finish(reason)
	a.core.Disconnected(now, reason)
}

// duplicate begins what the side that dialed in vain is told.
const duplicate = "duplicate: the session that "

// incoming takes or refuses a connection that the peer dialed.
func (a *actor) incoming(now time.Duration, c *conn, hello *sessionpb.Hello) {
	a.core.Tick(now) // it may be dead by now, although its timer has not come
	a.carry()
	if !a.configured && a.core.State() == session.Dead {
		// The host has forgotten it, data token included; run is about to. The peer's
		// next attempt meets a new actor, with a new token.
		a.p.log.Debug("peer connection refused: the peer is being forgotten", "peer", a.id)
		c.queue(goawayMessage("this node is just forgetting " + a.id + "; dial again"))
		c.finish("dead peer")
		return
	}
	cur := session.Current{Exists: a.conn != nil}
	if cur.Exists {
		s := a.core.Status(now)
		cur.Dialed, cur.Ready, cur.BootID = a.conn.dialed, s.State == session.Ready, s.BootID
		cur.HasSession = a.conn.up
	}
	if !session.KeepNew(a.p.cfg.Hello.NodeId, a.id, cur, hello.BootId) {
		a.p.log.Debug("duplicate peer connection refused", "peer", a.id)
		c.queue(goawayMessage(duplicate + a.p.cfg.Hello.NodeId + " dialed stays"))
		c.finish("duplicate session")
		return
	}
	a.adopt(now, c)
}
