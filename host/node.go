package host

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/mem"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/host/transfer"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/plan"
)

// Kinds of owners of pins; see the package comment.
const (
	ownerRequest = "request"
	ownerProduce = "produce"
	ownerPeer    = "peer"
)

// Legs, as metrics and peers name them.
const (
	legPD    = session.LegPD
	legProbe = session.LegProbe
)

func legName(l enginepb.Leg) string {
	if l == enginepb.Leg_PD {
		return legPD
	}
	return legProbe
}

// waits are the deadlines of the flows.
type waits struct {
	request, lookup, connect, pending, drain time.Duration
	bytesPerSecond                           uint64
}

// Addresses are where a node can be reached, with the ports that it really has.
type Addresses struct {
	NodeID       string `json:"node_id"`
	PID          int    `json:"pid"`
	EngineSocket string `json:"engine_socket"`
	Peer         string `json:"peer_listen"`
	Data         string `json:"data_listen"`
	HTTP         string `json:"http_listen"`
	Slab         string `json:"slab"`
}

// A Node is one running daemon.
type Node struct {
	cfg     *config.Config
	log     *slog.Logger
	judge   registrar
	entry   *registry.Entry
	model   plan.Model
	groups  []geometry
	waits   waits
	keysMax int

	life     context.Context // ends when the node is closed
	end      context.CancelFunc
	wg       sync.WaitGroup // goroutines of the node itself
	planners sync.Pool
	closers  []func() // in reverse order of opening

	deployment  []byte // the file
	tier        *tier.Primary
	device      gpu.Device
	metrics     *metrics.Metrics
	meeting     *meeting
	data        *transfer.Server
	dataOptions transfer.Options // of clients
	peers       *wire.Peers
	engines     *engine.Server
	http        *http.Server
	addresses   Addresses
	ready       atomic.Bool

	mu         sync.Mutex
	closing    bool
	configured map[string]bool
	links      map[string]*link
	servings   map[peerJob]*serving // peers' jobs here
	fetches    map[peerJob]*fetch   // our jobs at peers

	tokenMu sync.Mutex
	tokens  map[string]transfer.Token // by peer
}

// Start brings a node up. When it returns without error the node is ready: its rules
// are accepted and its ports are open. A refused deployment is a *registry.Refusal. ctx
// bounds the start only.
func Start(ctx context.Context, cfg *config.Config, log *slog.Logger) (*Node, error) {
	return start(ctx, cfg, log, func(ctx context.Context, d *deploy.Deployment) (*registry.Entry, func() error, error) {
		r, err := rules.Register(ctx, d, rules.Options{StateDir: cfg.StateDir})
		if err != nil {
			return nil, nil, err
		}
		return r.Entry, func() error { return r.Close(context.Background()) }, nil
	})
}

// A registrar opens and judges the rules of a deployment, and says how to close them.
type registrar func(context.Context, *deploy.Deployment) (*registry.Entry, func() error, error)

func start(ctx context.Context, cfg *config.Config, log *slog.Logger, judge registrar) (*Node, error) {
	n := &Node{
		cfg: cfg, log: log, judge: judge, configured: map[string]bool{}, links: map[string]*link{},
		servings: map[peerJob]*serving{}, fetches: map[peerJob]*fetch{}, tokens: map[string]transfer.Token{},
	}
	n.life, n.end = context.WithCancel(context.Background())
	steps := []func(context.Context) error{n.openState, n.register, n.openMemory, n.openPeers, n.openHTTP, n.openEngines}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			n.unwind()
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			n.unwind()
			return nil, fmt.Errorf("start: %w", context.Cause(ctx))
		}
	}
	n.ready.Store(true)
	log.Info("node started", "node_id", cfg.NodeID, "engine_socket", n.addresses.EngineSocket, "peer_listen", n.addresses.Peer,
		"data_listen", n.addresses.Data, "http_listen", n.addresses.HTTP, "deployment", n.entry.Deployment.Model, "slots", n.tier.Slots())
	return n, nil
}

// onClose adds what undoes a step.
func (n *Node) onClose(f func()) { n.closers = append(n.closers, f) }

// unwind undoes every step, last first.
func (n *Node) unwind() {
	n.mu.Lock()
	n.closing = true
	n.mu.Unlock()
	n.end()
	for i := len(n.closers) - 1; i >= 0; i-- {
		n.closers[i]()
	}
	n.closers = nil
}

func (n *Node) openState(context.Context) error {
	if err := os.MkdirAll(n.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(n.cfg.EngineSocket), 0o700); err != nil {
		return fmt.Errorf("engine_socket: %w", err)
	}
	d := &n.cfg.Deadlines
	n.waits = waits{
		request: config.Millis(d.RequestMS), lookup: config.Millis(d.LookupMS), connect: config.Millis(d.ConnectMS),
		pending: config.Millis(d.PendingMS), drain: config.Millis(d.DrainMS), bytesPerSecond: session.DefaultLimits().TransferBytesPerSecond,
	}
	return nil
}

// WriteFile replaces a file whole: a reader sees the old content or the new.
func WriteFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// register opens the rules and has them judged: nothing is served before that.
func (n *Node) register(ctx context.Context) error {
	data, err := os.ReadFile(n.cfg.Deployment)
	if err != nil {
		return fmt.Errorf("deployment: %w", err)
	}
	d, err := deploy.Parse(n.cfg.Deployment, data)
	if err != nil {
		return err
	}
	n.deployment = data
	entry, closeRules, err := n.judge(ctx, d)
	if err != nil {
		return err
	}
	n.entry = entry
	n.onClose(func() {
		if err := closeRules(); err != nil {
			n.log.Error("the rules could not be closed", "error", err)
		}
	})
	v := n.entry.Verdict
	n.log.Info("rules accepted", "deployment", d.Model, "verdict_reused", v.Reused, "cases", v.Cases, "seconds", v.Seconds)
	n.model, n.groups = n.entry.Model(), geometryOf(d)
	if _, err := plan.New(n.model); err != nil {
		return fmt.Errorf("deployment %s: %w", d.Model, err)
	}
	n.planners.New = func() any {
		p, err := plan.New(n.model)
		if err != nil {
			panic("host: a model that was valid at start is not: " + err.Error())
		}
		return p
	}
	return nil
}

func (n *Node) planner() *plan.Planner { return n.planners.Get().(*plan.Planner) }

// group returns the index of a group that is known to exist.
func (n *Node) group(name string) int {
	for i := range n.groups {
		if n.groups[i].name == name {
			return i
		}
	}
	panic("host: group " + name + " passed the engine API's check and is not in the deployment")
}

// openMemory makes the slab and the device. Files that a killed daemon of the same node
// left behind are removed once the slab's lock says that it is gone.
func (n *Node) openMemory(context.Context) error {
	dir := filepath.Join(n.cfg.SlabDir, "tierd-"+n.cfg.NodeID)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("slab_dir: %w", err)
	}
	n.onClose(func() { os.Remove(dir) }) // stays when it is not empty
	var slotBytes int64
	for i := range n.groups {
		slotBytes = max(slotBytes, n.groups[i].chunkBytes)
	}
	const page = 4096 // slots lie on page boundaries
	stride := (slotBytes + page - 1) / page * page
	slots := n.cfg.SlabBytes / stride
	if slots < 1 {
		return fmt.Errorf("slab_bytes is %d, but one chunk of deployment %s takes %d bytes; give the slab room for at least one, better for thousands", n.cfg.SlabBytes, n.entry.Deployment.Model, stride)
	}
	t, err := tier.New(tier.Options{Path: filepath.Join(dir, "slab"), SlotBytes: slotBytes, Slots: int(min(slots, tier.SlotsMax))})
	if err != nil {
		return fmt.Errorf("%w (slab_bytes is %d, slab_dir %s)", err, n.cfg.SlabBytes, n.cfg.SlabDir)
	}
	n.tier = t
	n.onClose(func() {
		if err := t.Close(); err != nil {
			n.log.Error("the slab could not be closed", "error", err)
		}
	})
	n.addresses.Slab = t.Export().Path
	stale, _ := filepath.Glob(filepath.Join(dir, "tierd-region-*"))
	for _, path := range stale {
		os.Remove(path)
	}
	dev, err := mem.New(dir)
	if err != nil {
		return err
	}
	n.device = dev
	n.onClose(func() {
		if err := dev.Close(); err != nil {
			n.log.Error("the device could not be closed", "error", err)
		}
	})
	n.openMetrics()
	return nil
}

func (n *Node) openMetrics() {
	names := make([]string, len(n.groups))
	for i := range n.groups {
		names[i] = n.groups[i].name
	}
	n.metrics = metrics.New(names, []string{legPD, legProbe})
	n.metrics.Register(metrics.Tier{Snapshot: n.tier.Snapshot, Owners: []string{ownerRequest, ownerProduce, ownerPeer}})
	n.metrics.Register(metrics.Gauges{
		"engines_attached":   func() float64 { e, _ := n.counts(); return float64(e) },
		"requests_live":      func() float64 { _, r := n.counts(); return float64(r) },
		"parked_bytes":       func() float64 { return float64(n.meetingStatus().ParkedBytes) },
		"parked_chunks":      func() float64 { return float64(n.meetingStatus().ParkedKeys) },
		"transfers_live":     func() float64 { return float64(n.meetingStatus().Transfers) },
		"peer_jobs_in_work":  func() float64 { n.mu.Lock(); defer n.mu.Unlock(); return float64(len(n.servings)) },
		"fetch_jobs_in_work": func() float64 { n.mu.Lock(); defer n.mu.Unlock(); return float64(len(n.fetches)) },
	})
}

func (n *Node) counts() (engines, requests int) {
	if n.ready.Load() {
		return n.engines.Counts()
	}
	return 0, 0
}

func (n *Node) meetingStatus() (s join.Status) {
	if n.ready.Load() {
		return n.meeting.status()
	}
	return s
}

// limits are the session's, from the configuration.
func (n *Node) limits() session.Limits {
	d, b := &n.cfg.Deadlines, &n.cfg.Bounds
	l := session.DefaultLimits()
	l.ConnectHello = n.waits.connect
	l.Ping, l.Suspect, l.Dead = config.Millis(d.PingMS), config.Millis(d.SuspectMS), config.Millis(d.DeadMS)
	l.Lookup, l.RequestDeadline = n.waits.lookup, n.waits.request
	l.RequestDeadlineMax = max(l.RequestDeadlineMax, l.RequestDeadline)
	l.TransferBase, l.Drain = config.Millis(d.TransferMS), n.waits.drain
	l.MessageBytesMax = int(b.MessageBytes)
	// 67 bytes is what a key takes at most in a demand, with its slot and epoch.
	l.KeysMax = min(l.KeysMax, (l.MessageBytesMax-8192)/67)
	return l
}

// openPeers opens the data and the control port and begins to dial the peers.
func (n *Node) openPeers(ctx context.Context) error {
	server, client, err := loadTLS(n.cfg.TLS)
	if err != nil {
		return err
	}
	l := n.limits()
	n.keysMax = l.KeysMax
	jl := join.DefaultLimits()
	jl.ParkedAge, jl.ParkedBytesMax = config.Millis(n.cfg.Deadlines.ParkedMS), uint64(n.cfg.Bounds.ParkedBytes)
	n.meeting = newMeeting(n, time.Now(), jl)
	n.onClose(n.meeting.close)

	base := transfer.Options{Log: n.log, FrameBytesMax: n.tier.SlotBytes(), HelloTimeout: n.waits.connect, PingInterval: l.Ping, IdleTimeout: l.Dead, WriteTimeout: l.Dead}
	dataOptions := base
	dataOptions.TLS = server
	if n.data, err = transfer.Listen(ctx, n.cfg.DataListen, dataOptions); err != nil {
		return fmt.Errorf("data_listen: %w", err)
	}
	n.onClose(func() { _ = n.data.Close() })
	n.onClose(func() { n.wg.Wait() })
	n.dataOptions = base
	n.dataOptions.TLS = client
	n.addresses.Data = n.data.Addr().String()

	control, err := net.Listen("tcp", n.cfg.PeerListen)
	if err != nil {
		return fmt.Errorf("peer_listen: %w", err)
	}
	n.addresses.Peer = control.Addr().String()
	hello, err := n.hello()
	if err != nil {
		control.Close()
		return err
	}
	cfg := wire.Config{
		Hello: hello, DataToken: func(peer string) []byte { t := n.dataToken(peer); return t[:] }, Limits: l,
		ServerTLS: server, ClientTLS: client, SessionsMax: int(n.cfg.Bounds.Sessions), Logger: n.log,
		Start: n.meeting.start, // one clock: the session gives the join its deadlines
	}
	if server != nil {
		cfg.Verify = verifyNode
	}
	// Without peers at first: their callbacks use n.peers.
	if n.peers, err = wire.New(cfg, sessions{n}); err != nil {
		control.Close()
		return err
	}
	n.onClose(n.closePeers)
	n.metrics.Register(metrics.Peers{Status: n.peers.Status})
	n.wg.Go(func() {
		if err := n.peers.Serve(control); err != nil && !errors.Is(err, wire.ErrClosed) {
			n.log.Error("the peer port stopped", "error", err)
		}
		control.Close()
	})
	return n.SetPeers(n.cfg.Peers)
}

// closePeers ends the sessions, and the data connections of consumers.
func (n *Node) closePeers() {
	n.peers.Close()
	n.mu.Lock()
	var clients []*transfer.Client
	for _, l := range n.links {
		if l.client != nil {
			clients = append(clients, l.client)
		}
		l.client = nil
	}
	n.mu.Unlock()
	for _, c := range clients {
		_ = c.Close()
	}
}

// SetPeers makes the configured peers those of the list, as SIGHUP does.
func (n *Node) SetPeers(peers []config.Peer) error {
	list := make([]wire.PeerAddr, len(peers))
	n.mu.Lock()
	old := n.configured
	n.configured = map[string]bool{}
	for i, p := range peers {
		list[i] = wire.PeerAddr{ID: p.ID, Control: p.Control}
		n.configured[p.ID] = true
		delete(old, p.ID)
	}
	n.mu.Unlock()
	err := n.peers.SetPeers(list)
	for id := range old {
		n.dropLink(id)
	}
	return err
}

// dropLink forgets a peer that is no longer configured.
func (n *Node) dropLink(peer string) {
	n.mu.Lock()
	l := n.links[peer]
	var client *transfer.Client
	if l != nil {
		client = l.client
		l.client = nil
		l.session++
		delete(n.links, peer)
	}
	n.mu.Unlock()
	n.forgetToken(peer)
	if client != nil {
		n.wg.Go(func() { _ = client.Close() })
	}
}

// hello is what this node says to its peers.
func (n *Node) hello() (*sessionpb.Hello, error) {
	d := n.entry.Deployment
	layout := &sessionpb.Layout{Model: d.Model, HashScheme: fmt.Sprintf("%s/%d", deploy.HashScheme, d.HashTokens), HashVector: hashVector()}
	for i := range d.Groups {
		g := &d.Groups[i]
		layout.Groups = append(layout.Groups, &sessionpb.Group{
			Name: g.Name, BlockTokens: g.BlockTokens, ChunkBlocks: g.ChunkBlocks, Layers: g.Layers,
			KvHeads: g.KVHeads, HeadDim: g.HeadDim, Dtype: g.DType, Draft: g.Draft, ChunkBytes: g.ChunkBytes(),
		})
	}
	rules, err := digestBytes(n.entry.RulesDigest())
	if err != nil {
		return nil, err
	}
	deployment, err := digestBytes(d.Digest())
	if err != nil {
		return nil, err
	}
	return &sessionpb.Hello{
		NodeId: n.cfg.NodeID, BootId: bootID(), Layout: layout, RulesDigest: rules, DeploymentDigest: deployment,
		Caps:      &sessionpb.Caps{MaxTokens: d.MaxTokens, MaxStoreTokens: d.MaxStoreTokens, Roles: d.Roles, Legs: d.Legs},
		SlotBytes: uint64(n.tier.SlotBytes()), DataAddress: n.dataAddress(),
	}, nil
}

// hashVector is a key that both sides must make alike from the same hash.
func hashVector() []byte {
	var hash [tier.HashBytesMax]byte
	for i := range hash {
		hash[i] = byte(i)
	}
	k := tier.MakeKey(tier.Tenant([]byte("tierd")), hash[:], 7)
	sum := sha256.Sum256(k[:])
	return sum[:]
}

// digestBytes returns the digest in "sha256:hex".
func digestBytes(s string) ([]byte, error) {
	b, err := hex.DecodeString(strings.TrimPrefix(s, "sha256:"))
	if err != nil || len(b) != sha256.Size {
		return nil, fmt.Errorf("digest %q is not of the form sha256:hex", s)
	}
	return b, nil
}

// bootID is new at every start, and never 0.
func bootID() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// dataAddress is where peers reach the data port.
func (n *Node) dataAddress() string {
	host, port, err := net.SplitHostPort(n.addresses.Data)
	if err != nil {
		return n.addresses.Data
	}
	if listen, _, err := net.SplitHostPort(n.cfg.DataListen); err == nil && listen != "" {
		host = listen // the name that was configured, such as the one in the certificate
	}
	if n.cfg.Advertise == "" {
		return net.JoinHostPort(host, port)
	}
	if _, _, err := net.SplitHostPort(n.cfg.Advertise); err == nil {
		return n.cfg.Advertise
	}
	return net.JoinHostPort(n.cfg.Advertise, port)
}

// dataToken is what a peer must present on the data port.
func (n *Node) dataToken(peer string) transfer.Token {
	n.tokenMu.Lock()
	defer n.tokenMu.Unlock()
	t, ok := n.tokens[peer]
	if !ok {
		rand.Read(t[:])
		n.tokens[peer] = t
		n.data.Register(t)
	}
	return t
}

func (n *Node) forgetToken(peer string) {
	n.tokenMu.Lock()
	t, ok := n.tokens[peer]
	delete(n.tokens, peer)
	n.tokenMu.Unlock()
	if ok {
		n.data.Unregister(t)
	}
}

// unusable says why a peer cannot be asked now; "" when it can.
func (n *Node) unusable(peer, leg string) string {
	all := n.peers.Status()
	known := make([]string, 0, len(all))
	for i := range all {
		s := &all[i]
		known = append(known, s.ID)
		if s.ID != peer {
			continue
		}
		switch {
		case s.State == session.Suspect || s.State == session.Dead:
			return fmt.Sprintf("peer %s is %v: %s", peer, s.State, n.reason(peer))
		case s.State == session.Ready && leg == legPD && !s.AllLegs:
			return fmt.Sprintf("peer %s runs other rules, parameters or limits; leg pd needs equal ones: use leg probe, or give both nodes the same deployment", peer)
		}
		return ""
	}
	return fmt.Sprintf("peer %q is not known to this node (%s); add it to peers in its configuration", peer, listOf(known))
}

func (n *Node) reason(peer string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.links[peer]; l != nil && l.reason != "" {
		return l.reason
	}
	return "no reason is known"
}

func listOf(names []string) string {
	if len(names) == 0 {
		return "it has none"
	}
	const most = 8 // a message, not a list
	more := ""
	if len(names) > most {
		names, more = names[:most], ", ..."
	}
	return "it knows " + strings.Join(names, ", ") + more
}

// sequence turns a request's hashes into keys.
func (n *Node) sequence(r *enginepb.BeginRequest) sequence {
	return sequence{
		tenant: tier.Tenant(r.TenantSalt), hashes: r.Hashes, hashBytes: int(r.HashBytes), hashTokens: n.entry.Deployment.HashTokens,
	}
}

func (n *Node) openHTTP(context.Context) error {
	l, err := net.Listen("tcp", n.cfg.HTTPListen)
	if err != nil {
		return fmt.Errorf("http_listen: %w", err)
	}
	n.addresses.HTTP = l.Addr().String()
	n.http = n.newHTTP()
	n.wg.Go(func() { n.serveHTTP(l) })
	n.onClose(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		n.stopHTTP(ctx)
	})
	return nil
}

// openEngines opens the socket for engines, last of all.
func (n *Node) openEngines(context.Context) error {
	l, err := engine.Listen(n.cfg.EngineSocket)
	if err != nil {
		return err
	}
	d, b := n.entry.Deployment, &n.cfg.Bounds
	limits := &engine.Limits{MaxTokens: d.MaxTokens, HashTokens: d.HashTokens, Roles: d.Roles, Legs: d.Legs}
	for i := range d.Groups {
		limits.Groups = append(limits.Groups, engine.GroupLimits{Name: d.Groups[i].Name, BlockTokens: d.Groups[i].BlockTokens})
	}
	n.engines = engine.NewServer(n, limits, engine.Bounds{
		EnginesMax: int(b.Engines), RequestsMax: int(b.Requests), JobsMax: int(b.Requests) * engine.JobsPerRequest,
		MessageBytesMax: int(b.MessageBytes), EventsWithin: eventsWithin,
	}, n.log)
	n.addresses.EngineSocket = n.cfg.EngineSocket
	n.wg.Go(func() {
		if err := n.engines.Serve(l); err != nil {
			n.log.Error("the engine socket stopped", "error", err)
		}
		l.Close()
	})
	n.onClose(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // Close has drained already
		n.engines.Close(ctx)
	})
	return nil
}

// eventsWithin is how long an engine may take from Attach to opening Events, which its
// client does in one go.
const eventsWithin = 10 * time.Second

// Ready reports whether engines can work with this node.
func (n *Node) Ready() bool { return n.ready.Load() }

// Addresses returns where the node can be reached.
func (n *Node) Addresses() Addresses {
	a := n.addresses
	a.NodeID, a.PID = n.cfg.NodeID, os.Getpid()
	return a
}

// Close stops the node: no new work; what is in work may end within the drain
// deadline, or until ctx ends; then everything is given back.
func (n *Node) Close(ctx context.Context) {
	if !n.ready.Swap(false) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, n.waits.drain)
	defer cancel()
	n.log.Info("draining")
	// Engines first: their consumers still need the sessions.
	n.engines.Close(ctx)
	n.peers.Drain(ctx, "draining")
	n.unwind()
	n.log.Info("node stopped")
}
