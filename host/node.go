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
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierd/tierd/host/admit"
	"github.com/tierd/tierd/host/build"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/limitlog"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/pairs"
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
	legPD     = session.LegPD
	legDemand = session.LegDemand
	legProbe  = session.LegProbe
)

func legName(l enginepb.Leg) string {
	switch l {
	case enginepb.Leg_PD:
		return legPD
	case enginepb.Leg_DEMAND:
		return legDemand
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
	cfg    *config.Config
	log    *slog.Logger
	judge  registrar
	entry  *registry.Entry
	model  plan.Model
	groups []geometry
	waits  waits

	life     context.Context // ends when the node is closed
	end      context.CancelFunc
	wg       sync.WaitGroup // goroutines of the node itself
	planners sync.Pool
	closers  []func() // in reverse order of opening

	deployment  []byte // the file
	deployed    *deploy.Deployment
	stage       atomic.Int32
	began       time.Time
	boot        uint64
	faults      *limitlog.Log // lines that a fault may cause in each request
	open        openWaits
	hasTier     atomic.Bool  // tier is set, for status and metrics, which are read before
	judged      atomic.Bool  // entry is set
	opened      atomic.Bool  // so are peers, meeting and engines
	percent     atomic.Int64 // of the check
	tier        *tier.Primary
	devices     *devices.Set // set with hasTier
	openGPU     devices.Driver
	metrics     *metrics.Metrics
	meeting     *meeting
	pairs       *pairs.Judge // of peers with other rules
	shelf       *pairs.Shelf // what peers may ask for
	data        *transfer.Server
	dataOptions transfer.Options // of clients
	peers       *wire.Peers
	engines     *engine.Server
	http        *http.Server
	httpEnded   chan struct{}
	control     net.Listener // bound, and served once the rules are accepted
	certs       *certFiles   // nil without TLS
	allowed     atomic.Pointer[admit.List]
	socket      *engine.SocketLock
	addresses   Addresses
	ready       atomic.Bool

	mu         sync.Mutex
	closing    bool
	configured map[string]bool
	cidrs      []netip.Prefix
	links      map[string]*link
	servings   map[peerJob]*serving // peers' jobs here
	fetches    map[peerJob]*fetch   // our jobs at peers

	// peerPinnedMax is bounds.peer_pinned_bytes, or its default once the rules say what a
	// longest prompt demands.
	peerPinnedMax atomic.Int64

	tokenMu sync.Mutex
	tokens  map[string]transfer.Token // by peer
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

func (n *Node) openMetrics() {
	names := make([]string, len(n.groups))
	for i := range n.groups {
		names[i] = n.groups[i].name
	}
	n.metrics = metrics.New(names, allLegs)
	n.metrics.Register(metrics.Tier{Snapshot: n.tierSnapshot, Owners: owners})
	n.metrics.Register(metrics.Peers{Status: n.peersStatus, Legs: allLegs, Allowed: func(s *wire.PeerStatus, leg string) bool { return n.legRefused(s, leg) == "" }, PinnedBytes: n.peerPinnedBytes})
	n.metrics.Register(metrics.Pairs{Peers: n.pairStates, States: pairs.States(), Ended: n.pairsEnded, Ends: []string{pairs.Accepted, pairs.Refused, pairs.Undecided}})
	n.metrics.Register(metrics.OpenWaits(n.open.of))
	n.metrics.Register(metrics.Devices(n.deviceReport))
	b := build.This()
	n.metrics.Register(metrics.Info{Version: b.String(), Go: b.Go, Verdict: n.verdictInfo})
	n.metrics.Register(metrics.Gauges{
		"ready": func() float64 {
			if n.Ready() {
				return 1
			}
			return 0
		},
		"check_done_ratio":   func() float64 { _, percent := n.state(); return float64(percent) / 100 },
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
	if n.opened.Load() {
		return n.engines.Counts()
	}
	return 0, 0
}

// peerPinnedBytes is what a peer's demands keep here from being reused.
func (n *Node) peerPinnedBytes(peer string) uint64 {
	if n.opened.Load() {
		return n.meeting.peerBytes(peer)
	}
	return 0
}

func (n *Node) meetingStatus() (s join.Status) {
	if n.opened.Load() {
		return n.meeting.status()
	}
	return s
}

// limits are the session's, from the configuration.
func (n *Node) limits() session.Limits {
	d, b := &n.cfg.Deadlines, &n.cfg.Bounds
	l := session.DefaultLimits()
	l.ConnectHello = n.waits.connect
	l.RetryMin, l.RetryMax = config.Millis(d.RetryMS), config.Millis(d.RetryMaxMS)
	l.Ping, l.Suspect, l.Dead = config.Millis(d.PingMS), config.Millis(d.SuspectMS), config.Millis(d.DeadMS)
	l.Lookup, l.RequestDeadline = n.waits.lookup, n.waits.request
	l.RequestDeadlineMax = max(l.RequestDeadlineMax, l.RequestDeadline)
	l.TransferBase, l.TransferBytesPerSecond, l.Drain = config.Millis(d.TransferMS), n.waits.bytesPerSecond, n.waits.drain
	l.Lease = config.Millis(d.LeaseMS)
	l.MessageBytesMax = int(b.MessageBytes)
	// 67 bytes is what a key takes at most in a demand, with its slot and epoch.
	l.KeysMax = min(l.KeysMax, (l.MessageBytesMax-8192)/67)
	l.PartBytesMax = min(l.PartBytesMax, l.MessageBytesMax-4096)
	return l
}

// joinLimits are the join's, from the configuration.
func (n *Node) joinLimits() join.Limits {
	d, l := &n.cfg.Deadlines, join.DefaultLimits()
	l.ParkedAge, l.FinishedAge = config.Millis(d.ParkedMS), config.Millis(d.FinishedMS)
	l.ParkedBytesMax, l.PeerBytesMax = uint64(n.cfg.Bounds.ParkedBytes), uint64(n.peerPinnedMax.Load())
	return l
}

// openPeers serves the data and the control port, which are bound already, and begins to
// dial the peers.
func (n *Node) openPeers(context.Context) error {
	l := n.limits()
	n.meeting = newMeeting(n, time.Now(), n.joinLimits())
	n.onClose(n.meeting.close)
	n.onClose(func() { _ = n.data.Close() }) // before the meeting lets go what is being pushed
	n.onClose(func() { n.wg.Wait() })
	hello, err := n.hello()
	if err != nil {
		return err
	}
	cidrs, err := n.cfg.CIDRs()
	if err != nil {
		return n.cfg.Errorf("%w", err)
	}
	n.allowed.Store(n.allow(n.cfg.Peers, cidrs)) // before the first connection
	if err := n.openPairs(); err != nil {
		return err
	}
	cfg := wire.Config{
		Hello: hello, DataToken: func(peer string) []byte { t := n.dataToken(peer); return t[:] }, Limits: l,
		SessionsMax: int(n.cfg.Bounds.Sessions), Logger: n.log, Admit: n.admit, CheckHello: n.checkHello,
		Start: n.meeting.start, // one clock: the session gives the join its deadlines
	}
	if n.certs != nil {
		cfg.ServerTLS, cfg.ClientTLS = n.certs.server(), n.certs.client(nil)
		cfg.Verify, cfg.Explain = n.verifyNode, n.certs.explain
	}
	// Without peers at first: their callbacks use n.peers.
	if n.peers, err = wire.New(cfg, sessions{n}); err != nil {
		return err
	}
	n.onClose(n.closePeers)
	n.onClose(n.pairs.Close)
	n.metrics.Register(metrics.Ports{Control: n.peers.HalfOpen, Data: n.data.HalfOpen})
	n.wg.Go(func() {
		if err := n.peers.Serve(n.control); err != nil && !errors.Is(err, wire.ErrClosed) {
			n.log.Error("the peer port stopped", "error", err)
		}
		n.control.Close()
	})
	return n.Allow(n.cfg.Peers, cidrs)
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

// SetPeers makes the configured peers those of the list, and leaves the ranges as they
// are. A list that is refused changes nothing.
func (n *Node) SetPeers(peers []config.Peer) error {
	n.mu.Lock()
	cidrs := n.cidrs
	n.mu.Unlock()
	return n.Allow(peers, cidrs)
}

// Allow makes peers and ranges those of a configuration, as SIGHUP does, and ends the
// sessions that they no longer allow. What is refused changes nothing.
func (n *Node) Allow(peers []config.Peer, cidrs []netip.Prefix) error {
	list, configured := make([]wire.PeerAddr, len(peers)), map[string]bool{}
	for i, p := range peers {
		list[i] = wire.PeerAddr{ID: p.ID, Control: p.Control}
		configured[p.ID] = true
	}
	n.mu.Lock()
	old := n.configured
	n.configured = configured
	n.mu.Unlock()
	// First of all: a peer that is taken out must not come back in by itself.
	before := n.allowed.Swap(n.allow(peers, cidrs))
	if err := n.peers.SetPeers(list); err != nil {
		n.allowed.Store(before)
		n.mu.Lock()
		n.configured = old
		n.mu.Unlock()
		return err
	}
	n.mu.Lock()
	n.cidrs = cidrs
	n.mu.Unlock()
	n.peers.Review()
	for id := range old {
		if !configured[id] {
			n.dropLink(id)
		}
	}
	return nil
}

// dropLink forgets a peer that is no longer configured.
func (n *Node) dropLink(peer string) {
	n.mu.Lock()
	l := n.links[peer]
	var client *transfer.Client
	if l != nil {
		client = l.client
		l.client = nil
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
		NodeId: n.cfg.NodeID, BootId: n.boot, Layout: layout, RulesDigest: rules, DeploymentDigest: deployment,
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
		n.data.RegisterFor(t, peer)
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
		case s.State == session.Ready && leg != legProbe && !s.AllLegs:
			return fmt.Sprintf("peer %s runs other rules, parameters or limits, and leg %s is not allowed with it: %s; use leg probe", peer, leg, n.pairRefuses(s))
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

// openEngines opens the socket for engines, last of all.
func (n *Node) openEngines(context.Context) error {
	l, err := n.socket.Listen()
	if err != nil {
		return n.cfg.Errorf("%w", err)
	}
	d, b := n.entry.Deployment, &n.cfg.Bounds
	limits := &engine.Limits{MaxTokens: d.MaxTokens, HashTokens: d.HashTokens, Roles: d.Roles, Legs: d.Legs}
	for i := range d.Groups {
		limits.Groups = append(limits.Groups, engine.GroupLimits{Name: d.Groups[i].Name, BlockTokens: d.Groups[i].BlockTokens,
			BlockBytes: d.Groups[i].BlockBytes(), ChunkBlocks: d.Groups[i].ChunkBlocks})
	}
	n.engines = engine.NewServer(n, limits, engine.Bounds{
		EnginesMax: int(b.Engines), RequestsMax: int(b.Requests), JobsMax: int(b.Requests) * engine.JobsPerRequest,
		MessageBytesMax: int(b.MessageBytes), EventsWithin: eventsWithin,
	}, n.log)
	n.addresses.EngineSocket = n.cfg.EngineSocket
	if abs, err := filepath.Abs(n.cfg.EngineSocket); err == nil { // for tools that run elsewhere
		n.addresses.EngineSocket = abs
	}
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
	n.stage.Store(stageDraining)
	ctx, cancel := context.WithTimeout(ctx, n.waits.drain)
	defer cancel()
	n.log.Info("draining")
	// Engines first: their consumers still need the sessions.
	n.engines.Close(ctx)
	n.meeting.drain() // else the peers' demands for what was never begun keep the drain waiting
	n.peers.Drain(ctx, "draining")
	n.unwind()
	n.log.Info("node stopped")
}
