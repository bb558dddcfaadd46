package wire

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/test/bufconn"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

// memNet is a network in memory whose nodes can be frozen: their connections stay open
// and carry nothing.
type memNet struct {
	mu    sync.Mutex
	lis   map[string]*bufconn.Listener
	gates map[string]*gate
	delay func() time.Duration     // before a dial is through; nil = none
	hold  map[string]chan struct{} // by dialer: its connections carry no message of it until this is closed
}

func newMemNet() *memNet {
	return &memNet{lis: map[string]*bufconn.Listener{}, gates: map[string]*gate{}}
}

type gate struct {
	mu   sync.Mutex
	open chan struct{}
}

func (g *gate) wait(closed <-chan struct{}) error {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return nil
	case <-closed:
		return net.ErrClosed
	}
}

func (n *memNet) gate(name string) *gate {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gates[name] == nil {
		n.gates[name] = &gate{open: make(chan struct{})}
		close(n.gates[name].open)
	}
	return n.gates[name]
}

func (n *memNet) freeze(name string) {
	g := n.gate(name)
	g.mu.Lock()
	g.open = make(chan struct{})
	g.mu.Unlock()
}

func (n *memNet) thaw(name string) {
	g := n.gate(name)
	g.mu.Lock()
	close(g.open)
	g.mu.Unlock()
}

func (n *memNet) listen(name string) net.Listener {
	l := bufconn.Listen(64 << 10)
	n.mu.Lock()
	n.lis[name] = l
	n.mu.Unlock()
	return l
}

// dialer returns the Dial of a node. A frozen node's port takes connections, as a
// kernel does for a stopped process.
func (n *memNet) dialer(from string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, to string) (net.Conn, error) {
		if n.delay != nil {
			select {
			case <-time.After(n.delay()):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		n.mu.Lock()
		l := n.lis[to]
		n.mu.Unlock()
		if l == nil {
			return nil, fmt.Errorf("dial %s: refused", to)
		}
		c, err := l.DialContext(ctx)
		if err != nil {
			return nil, errors.New("refused")
		}
		return &gatedConn{Conn: c, a: n.gate(from), b: n.gate(to), hold: n.hold[from], skip: prefaceBytes, closed: make(chan struct{})}, nil
	}
}

type gatedConn struct {
	net.Conn
	a, b   *gate
	hold   <-chan struct{}
	skip   int // bytes of what is being written until the next HTTP/2 frame
	once   sync.Once
	closed chan struct{}
}

// Of HTTP/2.
const (
	prefaceBytes     = 24
	frameHeaderBytes = 9
	frameData        = 0
)

// message reports whether b begins a DATA frame. Writes hold whole frames, but for the
// payloads, which may be written apart.
func (c *gatedConn) message(b []byte) bool {
	found := false
	for c.skip < len(b) {
		b, c.skip = b[c.skip:], 0
		size := int(b[0])<<16 | int(b[1])<<8 | int(b[2])
		found = found || b[3] == frameData
		c.skip = frameHeaderBytes + size
	}
	c.skip -= len(b)
	return found
}

func (c *gatedConn) pass() error {
	if err := c.a.wait(c.closed); err != nil {
		return err
	}
	return c.b.wait(c.closed)
}

func (c *gatedConn) Read(b []byte) (int, error) {
	// The gate is asked again after bytes came: they may come while it is shut.
	n, err := c.Conn.Read(b)
	if e := c.pass(); e != nil {
		return 0, e
	}
	return n, err
}

func (c *gatedConn) Write(b []byte) (int, error) {
	if err := c.pass(); err != nil {
		return 0, err
	}
	if c.hold != nil && c.message(b) {
		select {
		case <-c.hold:
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	return c.Conn.Write(b)
}

func (c *gatedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// testHost is a node that holds every key of its hits and sends what is demanded.
type testHost struct {
	peers *Peers
	peer  map[string]*testHost // who gets the bytes

	mu     sync.Mutex
	id     string
	mute   bool // answers no demand and no lookup
	ups    map[string]int
	again  map[string]bool
	states map[string][]session.PeerState
	ended  int
	began  int
	shelf  map[[sha256.Size]byte][]byte // what it gives out
}

func (h *testHost) PeerUp(peer string, hello *sessionpb.Hello, restarted, allLegs bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ups[peer]++
	h.again[peer] = restarted
}

func (h *testHost) PeerState(peer string, c session.Changed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.states[peer] = append(h.states[peer], c.To)
}

func (h *testHost) silent() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mute
}

func (h *testHost) OnLookup(peer string, q session.Query) (abi.States, bool) {
	if h.silent() {
		return nil, false
	}
	states := abi.NewStates(len(q.Keys))
	states.Fill(0, len(q.Keys), abi.Hit)
	if q.RequestID == "later" {
		go func() { time.Sleep(10 * ms); h.peers.AnswerLookup(peer, q.ID, states) }()
		return nil, false
	}
	return states, true
}

func (h *testHost) setMute(mute bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mute = mute
}

// upped returns how often a session came up, and whether the last was with a
// restarted peer.
func (h *testHost) upped(peer string) (int, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ups[peer], h.again[peer]
}

// open returns the jobs of peers in work.
func (h *testHost) open() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.began - h.ended
}

func (h *testHost) OnRelease(string, session.JobID) {}

func (h *testHost) OnDemand(peer string, j session.Job) {
	h.mu.Lock()
	h.began++
	h.mu.Unlock()
	if h.silent() {
		return
	}
	var all []uint32
	for i := range j.Keys {
		all = append(all, uint32(i))
	}
	h.peers.Answer(peer, j.ID, session.Answer{Available: all[1:], Last: true}) // key 0 is not held
}

func (h *testHost) OnPush(peer string, job session.JobID, indices []uint32) {
	for _, i := range indices {
		h.peer[peer].peers.DataActivity(h.id)
		h.peer[peer].peers.Arrived(h.id, job, int(i), session.Transferred, "")
		h.peers.Pushed(peer, job, int(i), session.Transferred, "")
	}
}

func (h *testHost) OnCancel(string, session.JobID, string) {}

func (h *testHost) OnAsk(_ string, digest [sha256.Size]byte) ([]byte, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b, ok := h.shelf[digest]; ok {
		return b, ""
	}
	return nil, "not here"
}

func (h *testHost) OnJobEnd(string, session.JobID, []session.Result, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ended++
}

// cluster is nodes on one memNet.
type cluster struct {
	t     *testing.T
	net   *memNet
	nodes map[string]*testHost
	boots map[string]uint64
	log   *logBuffer
	serve sync.WaitGroup
	most  int // SessionsMax
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newCluster(t *testing.T) *cluster {
	return &cluster{t: t, net: newMemNet(), nodes: map[string]*testHost{}, boots: map[string]uint64{}, log: &logBuffer{}}
}

func hello(id string, boot uint64) *sessionpb.Hello {
	return &sessionpb.Hello{NodeId: id, BootId: boot, SlotBytes: 1 << 20, DataAddress: id, DataToken: []byte(id),
		Layout: &sessionpb.Layout{Model: "m", HashScheme: "s", HashVector: []byte{1}}}
}

// start starts a node that dials others.
func (c *cluster) start(id string, dials ...string) *testHost {
	h := &testHost{id: id, peer: c.nodes, ups: map[string]int{}, again: map[string]bool{}, states: map[string][]session.PeerState{}}
	c.boots[id]++
	cfg := Config{Hello: hello(id, c.boots[id]), Limits: session.DefaultLimits(), Dial: c.net.dialer(id),
		Logger: slog.New(slog.NewTextHandler(c.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	for _, d := range dials {
		cfg.Peers = append(cfg.Peers, PeerAddr{ID: d, Control: d})
	}
	seed := [2]uint64{c.boots[id], 0}
	for _, b := range []byte(id) {
		seed[1] = seed[1]<<8 | uint64(b)
	}
	jitter := rand.New(rand.NewPCG(seed[0], seed[1]))
	var mu sync.Mutex // each peer's actor asks
	cfg.Jitter = func() float64 {
		mu.Lock()
		defer mu.Unlock()
		return jitter.Float64()
	}
	p, err := New(Config{SessionsMax: c.most, Jitter: cfg.Jitter, Hello: cfg.Hello, Limits: cfg.Limits, Logger: cfg.Logger, Dial: cfg.Dial}, h)
	require.NoError(c.t, err)
	h.peers = p
	c.nodes[id] = h
	lis := c.net.listen(id)
	c.serve.Go(func() { _ = p.Serve(lis) })
	require.NoError(c.t, p.SetPeers(cfg.Peers))
	return h
}

// stop ends a node; its port then refuses.
func (c *cluster) stop(id string) {
	c.net.mu.Lock()
	delete(c.net.lis, id)
	c.net.mu.Unlock()
	c.nodes[id].peers.Close()
}

func (c *cluster) close() {
	for id := range c.nodes {
		c.stop(id)
	}
	c.serve.Wait()
}

func keys(n int) []session.Key {
	out := make([]session.Key, n)
	for i := range out {
		out[i][0] = byte(i)
	}
	return out
}

func demandOf(n int) DemandRequest {
	d := DemandRequest{DemandRequest: session.DemandRequest{TransferID: "t", RequestID: "r", Leg: session.LegPD, Keys: keys(n)}}
	d.Slots, d.Epochs = make([]uint32, n), make([]uint64, n)
	return d
}

func state(h *testHost, peer string) session.PeerState {
	for _, s := range h.peers.Status() {
		if s.ID == peer {
			return s.State
		}
	}
	return session.Dead
}
