package wire

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/limitlog"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// Errors of commands that name a peer.
var (
	// ErrUnknownPeer: no peer of that id is configured or connected.
	ErrUnknownPeer = errors.New("unknown peer")
	// ErrClosed: the node is closing, or the peer was removed.
	ErrClosed = errors.New("closed")
	// ErrBusy: the peer's mailbox is full.
	ErrBusy = errors.New("too many commands wait")
)

// Bounds of the edge.
const (
	// SessionsMaxDefault bounds the peers of a node.
	SessionsMaxDefault = 1024
	// mailboxMax bounds the new jobs that wait for an actor. Words on jobs in work
	// are always taken: the jobs and their keys bound them.
	mailboxMax = 16384
	// queuedBytesMax bounds the encoded messages that wait for a slow connection: every
	// answer to the most jobs and keys that a peer may have in work is below 30 MiB.
	queuedBytesMax = 64 << 20
	// unreadMax bounds the received messages of a connection that wait for the actor.
	unreadMax = 64
)

// PeerAddr names a peer. A peer without control address is only waited for.
type PeerAddr struct {
	ID      string
	Control string // host:port
}

// Config is what Peers is made of.
type Config struct {
	// Hello is what this node says; see session.Config.
	Hello *sessionpb.Hello
	// DataToken, when set, returns the token that a peer must present on data
	// connections; it replaces the Hello's. It is called once a peer.
	DataToken func(peerID string) []byte
	Limits    session.Limits
	// Start is where the clock of all durations begins, such as session.Job.Deadline;
	// zero is the time of New.
	Start time.Time
	Peers []PeerAddr
	// ServerTLS and ClientTLS are mutual TLS; both nil is insecure.
	ServerTLS, ClientTLS *tls.Config
	// Dial opens a connection to a control address; nil is TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Verify ties a node id to the peer's certificate, on connections of both sides;
	// nil accepts any that TLS did.
	Verify func(nodeID string, state tls.ConnectionState) error
	// Admit says why a node that dials from an address is refused; nil takes any. It is
	// asked before anything is kept of the node, and again by Review.
	Admit func(nodeID string, from net.Addr) error
	// CheckHello says why a peer is refused for what its Hello says, such as the address
	// of its data port; nil takes any. from is the other end of the connection.
	CheckHello func(h *sessionpb.Hello, from net.Addr) error
	// Explain adds what is known here to the error of a connection; nil adds nothing.
	Explain func(error) error
	// SessionsMax bounds the peers, configured or not; 0 is SessionsMaxDefault.
	SessionsMax int
	// Jitter returns numbers in [0, 1) that spread the attempts to connect, to any
	// goroutine; nil is math/rand.
	Jitter func() float64
	// Logger is where state changes go; nil is slog.Default.
	Logger *slog.Logger
}

// Host is the node behind the sessions. Its methods run on the peer's actor: they
// must not block, and may call any method of Peers except Close, Drain and Lookup.
type Host interface {
	// PeerUp: a session began. The hello has the peer's data address and token, for
	// the node to dial. restarted: the peer is another process than before, and what
	// was known of its memory is void. allLegs: no pair check is needed; else call
	// Peers.AllowLegs with what it comes to.
	PeerUp(peer string, hello *sessionpb.Hello, restarted, allLegs bool)
	// PeerState: what the node thinks of the peer changed. On leaving Ready, data
	// connections are of no use.
	PeerState(peer string, c session.Changed)

	// OnLookup asks for the states of keys. The second result says whether the
	// answer is complete; else Peers.AnswerLookup brings it later.
	OnLookup(peer string, q session.Query) (abi.States, bool)
	// OnRelease: the peer needs nothing more of what a lookup holds.
	OnRelease(peer string, job session.JobID)
	// OnDemand begins a job; answer with Peers.Answer, from inside or later.
	OnDemand(peer string, job session.Job)
	// OnPush asks to send keys of a job; report each with Peers.Pushed.
	OnPush(peer string, job session.JobID, indices []uint32)
	// OnCancel asks to stop what is being pushed for a job.
	OnCancel(peer string, job session.JobID, reason string)
	// OnJobEnd ends a job: each OnDemand gets exactly one.
	OnJobEnd(peer string, job session.JobID, results []session.Result, reason string)
	// OnAsk returns the bytes of a digest that this node gives out, all of them, or why it
	// does not. They are not changed after.
	OnAsk(peer string, digest [sha256.Size]byte) (data []byte, refused string)
}

// Peers holds the sessions of a node.
type Peers struct {
	cfg   Config
	host  Host
	log   *slog.Logger
	start time.Time
	shy   shyLog
	ports ports

	mu    sync.RWMutex
	peers map[string]*actor
	// leaving are actors that are no longer in peers and have not ended, by peer: the one
	// that takes such a place begins after it, so that the host hears of a peer in order.
	leaving map[string]<-chan struct{}
	closed  bool
	wg      sync.WaitGroup // actors, connections
	stops   []func()       // servers
}

// New starts an actor for each configured peer; each begins to dial.
func New(cfg Config, host Host) (*Peers, error) {
	if cfg.SessionsMax == 0 {
		cfg.SessionsMax = SessionsMaxDefault
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Jitter == nil {
		cfg.Jitter = rand.Float64
	}
	if cfg.Explain == nil {
		cfg.Explain = func(err error) error { return err }
	}
	if (cfg.ServerTLS == nil) != (cfg.ClientTLS == nil) {
		return nil, errors.New("peers: TLS is given for one direction only; give ServerTLS and ClientTLS, or neither")
	}
	if cfg.Start.IsZero() {
		cfg.Start = time.Now()
	}
	p := &Peers{cfg: cfg, host: host, log: cfg.Logger, start: cfg.Start, peers: map[string]*actor{}, leaving: map[string]<-chan struct{}{}}
	p.shy = shyLog{limitlog.New(cfg.Logger)}
	p.ports = newPorts(&p.cfg)
	if err := p.SetPeers(cfg.Peers); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *Peers) now() time.Duration { return time.Since(p.start) }

// SetPeers makes the configured peers those of the list: new ones are dialed, those
// that are gone or have another address are closed.
func (p *Peers) SetPeers(list []PeerAddr) error {
	seen := map[string]string{}
	for _, a := range list {
		if _, twice := seen[a.ID]; twice {
			return fmt.Errorf("peers: %q is listed twice", a.ID)
		}
		seen[a.ID] = a.Control
	}
	if len(list) > p.cfg.SessionsMax {
		return fmt.Errorf("peers: %d are listed; at most %d are allowed", len(list), p.cfg.SessionsMax)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	var fresh []*actor // made before anything is ended: a list that is refused changes nothing
	for _, want := range list {
		if a := p.peers[want.ID]; a != nil && a.configured && a.addr == want.Control {
			continue
		}
		a, err := p.prepare(want, true)
		if err != nil {
			return err
		}
		fresh = append(fresh, a)
	}
	for id, a := range p.peers {
		if control, ok := seen[id]; a.configured && (!ok || control != a.addr) {
			a.shut("removed from this node's peers")
			p.leave(a)
		}
	}
	for _, a := range fresh {
		if old := p.peers[a.id]; old != nil { // it came by itself; from now on it is dialed too
			old.shut("configured anew")
			p.leave(old)
		}
		p.launch(a)
	}
	return nil
}

// add makes an actor and starts it; p.mu is held.
func (p *Peers) add(addr PeerAddr, configured bool) (*actor, error) {
	a, err := p.prepare(addr, configured)
	if err == nil {
		p.launch(a)
	}
	return a, err
}

// leave takes an actor that was shut from the peers; p.mu is held.
func (p *Peers) leave(a *actor) {
	for id, done := range p.leaving {
		select {
		case <-done:
			delete(p.leaving, id)
		default:
		}
	}
	p.leaving[a.id] = a.done
	delete(p.peers, a.id)
}

func (p *Peers) launch(a *actor) {
	a.after = p.leaving[a.id]
	p.peers[a.id] = a
	p.wg.Go(a.run)
}

func (p *Peers) prepare(addr PeerAddr, configured bool) (*actor, error) {
	hello := p.cfg.Hello
	if p.cfg.DataToken != nil {
		hello = proto.CloneOf(hello)
		hello.DataToken = p.cfg.DataToken(addr.ID)
	}
	core, err := session.New(p.now(), session.Config{Hello: hello, PeerID: addr.ID, Limits: p.cfg.Limits,
		Dial: addr.Control != "", Jitter: p.cfg.Jitter,
		// Nanoseconds outrun the jobs of any actor that this one replaces.
		FirstJob: session.JobID(p.now())})
	if err != nil {
		return nil, fmt.Errorf("peer %q: %w", addr.ID, err)
	}
	return newActor(p, addr, configured, core), nil
}

// forget ends the actor of a peer that came by itself and is dead.
func (p *Peers) forget(a *actor) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peers[a.id] == a {
		a.shut("gone")
		p.leave(a)
	}
}

// find returns the actor of a peer.
func (p *Peers) find(peer string) (*actor, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if a := p.peers[peer]; a != nil {
		return a, nil
	}
	if p.closed {
		return nil, ErrClosed
	}
	return nil, fmt.Errorf("%w %q", ErrUnknownPeer, peer)
}

// command posts a word on a job in work; the peer or the job may be gone, which is
// no error: the job's end has been told.
func (p *Peers) command(peer string, f func(now time.Duration, c *session.Core)) {
	if a, err := p.find(peer); err == nil {
		_ = a.post(func(now time.Duration) { f(now, a.core) }, false)
	}
}

// A LookupError says why a lookup has no answer. The states are all Miss.
type LookupError struct {
	Peer  string
	Cause session.Cause
	Text  string
}

func (e *LookupError) Error() string {
	return fmt.Sprintf("lookup at peer %q: %v: %s", e.Peer, e.Cause, e.Text)
}

// Lookup asks a peer for states and waits for them, at most Limits.Lookup. The
// states are valid, all Miss, with an error too.
func (p *Peers) Lookup(ctx context.Context, peer, requestID string, keys []session.Key) (abi.States, error) {
	_, states, err := p.LookupJob(ctx, peer, requestID, keys)
	return states, err
}

// LookupJob is Lookup that also returns the job, for Release.
func (p *Peers) LookupJob(ctx context.Context, peer, requestID string, keys []session.Key) (session.JobID, abi.States, error) {
	miss := abi.NewStates(len(keys))
	a, err := p.find(peer)
	if err != nil {
		return 0, miss, err
	}
	var timeout time.Duration
	if at, ok := ctx.Deadline(); ok {
		timeout = max(1, time.Until(at))
	}
	done := make(chan session.LookupDone, 1)
	job := make(chan session.JobID, 1)
	err = a.post(func(now time.Duration) {
		id := a.core.Lookup(now, requestID, keys, timeout)
		a.lookups[id] = func(d session.LookupDone) { done <- d }
		job <- id
	}, true)
	if err != nil {
		return 0, miss, err
	}
	select {
	case d := <-done:
		if d.Cause != session.Answered {
			return d.Job, d.States, &LookupError{Peer: peer, Cause: d.Cause, Text: d.Text}
		}
		return d.Job, d.States, nil
	case <-ctx.Done():
		_ = a.post(func(now time.Duration) { a.core.Abort(now, <-job, "the caller gave up") }, false)
		return 0, miss, ctx.Err()
	}
}

// Release tells a peer that what it holds for a lookup may be let go.
func (p *Peers) Release(peer string, job session.JobID) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.Release(now, job) })
}

// A DemandRequest is a demand and what to call back.
type DemandRequest struct {
	session.DemandRequest
	// Started, when set, is called on the actor with the job's id before the demand
	// is sent, so that the receiver knows the job before its first byte.
	Started func(job session.JobID)
	// Word, when set, is called on the actor with what the producer says of keys before
	// the job's end. It must not block.
	Word func(w session.Word)
	// Done, when set, is called on the actor with the one result of the job. It must
	// not block.
	Done func(job session.JobID, results []session.Result)
}

// A Handle is a demand in work.
type Handle struct {
	peer    *actor
	job     session.JobID // actor only, until done is closed
	done    chan struct{}
	results []session.Result
}

// Done is closed when the job has ended.
func (h *Handle) Done() <-chan struct{} { return h.done }

// Results returns the job's id and one result a key, once Done is closed.
func (h *Handle) Results() (session.JobID, []session.Result) {
	<-h.done
	return h.job, h.results
}

// Abort ends the job.
func (h *Handle) Abort(reason string) {
	_ = h.peer.post(func(now time.Duration) { h.peer.core.Abort(now, h.job, reason) }, false)
}

// Demand asks a peer for the bytes of keys. A cancelled context aborts it, and its
// deadline is the request's when the request names none. An error means that no job
// began.
func (p *Peers) Demand(ctx context.Context, peer string, req DemandRequest) (*Handle, error) {
	a, err := p.find(peer)
	if err != nil {
		return nil, err
	}
	if at, ok := ctx.Deadline(); ok && req.Timeout == 0 {
		req.Timeout = max(1, time.Until(at))
	}
	h := &Handle{peer: a, done: make(chan struct{})}
	stop := func() bool { return true }
	if ctx.Done() != nil {
		stop = context.AfterFunc(ctx, func() { h.Abort("the caller gave up: " + context.Cause(ctx).Error()) })
	}
	err = a.post(func(now time.Duration) {
		h.job = a.core.Demand(now, req.DemandRequest)
		a.demands[h.job] = func(d session.DemandDone) {
			stop()
			h.results = d.Results
			if req.Done != nil {
				req.Done(d.Job, d.Results)
			}
			close(h.done)
		}
		if req.Word != nil {
			a.words[h.job] = req.Word
		}
		if req.Started != nil {
			req.Started(h.job)
		}
		if ctx.Err() != nil { // the abort may have come before the job
			a.core.Abort(now, h.job, "the caller gave up")
		}
	}, true)
	if err != nil {
		stop()
		return nil, err
	}
	return h, nil
}

// Abort ends a demand or lookup of this node.
func (p *Peers) Abort(peer string, job session.JobID, reason string) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.Abort(now, job, reason) })
}

// Arrived tells how the bytes of one key of a demand ended here.
func (p *Peers) Arrived(peer string, job session.JobID, index int, cause session.Cause, text string) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.Arrived(now, job, index, cause, text) })
}

// DataLost tells that no data connection from a peer is left.
func (p *Peers) DataLost(peer, text string) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.DataLost(now, text) })
}

// DataActivity notes that bytes came from a peer on a data connection just now. It
// does not reach the actor and is cheap enough for every read.
func (p *Peers) DataActivity(peer string) {
	p.mu.RLock()
	a := p.peers[peer]
	p.mu.RUnlock()
	if a != nil {
		a.heardAt.Store(int64(p.now()))
	}
}

// AnswerLookup answers a query that OnLookup left open.
func (p *Peers) AnswerLookup(peer string, job session.JobID, states abi.States) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.AnswerLookup(now, job, states) })
}

// Answer is the producer's word on keys of a peer's job.
func (p *Peers) Answer(peer string, job session.JobID, a session.Answer) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.Answer(now, job, a) })
}

// Pushed tells how the push of one key of a peer's job ended.
func (p *Peers) Pushed(peer string, job session.JobID, index int, cause session.Cause, text string) {
	p.command(peer, func(now time.Duration, c *session.Core) { c.Pushed(now, job, index, cause, text) })
}

// PeerStatus is a snapshot of one peer.
type PeerStatus struct {
	ID         string
	Control    string
	Configured bool
	session.Status
}

// Status returns a snapshot of every peer, by id.
func (p *Peers) Status() []PeerStatus {
	p.mu.RLock()
	out := make([]PeerStatus, 0, len(p.peers))
	for id, a := range p.peers {
		out = append(out, PeerStatus{ID: id, Control: a.addr, Configured: a.configured, Status: *a.status.Load()})
	}
	p.mu.RUnlock()
	slices.SortFunc(out, func(a, b PeerStatus) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// KeysMax is how many keys a lookup or a demand at a peer may have: see session.Status. One
// that has more is split by its caller.
func (p *Peers) KeysMax(peer string) int {
	a, err := p.find(peer)
	if err != nil {
		return session.KeysMin // of any peer that comes
	}
	return a.status.Load().KeysMax
}

// all returns the actors.
func (p *Peers) all() []*actor {
	p.mu.RLock()
	defer p.mu.RUnlock()
	out := make([]*actor, 0, len(p.peers))
	for _, a := range p.peers {
		out = append(out, a)
	}
	return out
}

// Remote returns the other end of the connection of a peer's session, or nil when it has
// none.
func (p *Peers) Remote(peer string) net.Addr {
	p.mu.RLock()
	a := p.peers[peer]
	p.mu.RUnlock()
	if a == nil {
		return nil
	}
	if r := a.remote.Load(); r != nil {
		return *r
	}
	return nil
}

// HalfOpen returns how many connections have come in and have no session, and how many
// were closed to make room for newer ones.
func (p *Peers) HalfOpen() (conns int, closed uint64) { return p.ports.conns.Counts() }

// Review asks Admit and Verify again about every connection, after what they go by has
// changed. One that would be refused now ends; a configured peer is dialed again, and then
// judged as any other.
func (p *Peers) Review() {
	for _, a := range p.all() {
		_ = a.post(a.review, false)
	}
}

// Drain refuses new jobs, tells the peers, and waits for the jobs in work, at most
// Limits.Drain. It reports whether all ended by themselves. Close must follow.
func (p *Peers) Drain(ctx context.Context, reason string) bool {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Limits.Drain)
	defer cancel()
	for _, a := range p.all() {
		idle := make(chan struct{})
		err := a.post(func(now time.Duration) {
			a.core.Drain(now, reason)
			a.onIdle = append(a.onIdle, func() { close(idle) })
		}, false)
		if err != nil {
			continue
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// Close ends every session, job and goroutine.
func (p *Peers) Close() {
	p.mu.Lock()
	stops := p.stops
	for _, a := range p.peers {
		a.shut(closing)
	}
	p.closed, p.stops = true, nil
	p.mu.Unlock()
	for _, stop := range stops {
		stop()
	}
	p.wg.Wait()
	p.shy.Close()
}
