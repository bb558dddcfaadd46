package host

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/tierd/tierd/host/build"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/pairs"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/host/status"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry"
)

// allLegs are the legs of metrics and status, whether or not a deployment has them all: a
// counter that cannot rise costs less than one that is not there.
var allLegs = []string{session.LegPD, session.LegDemand, session.LegProbe}

// Status is the node at this moment. It may be called from the first answer of the HTTP
// port to the last, at any stage.
func (n *Node) Status() *status.Status {
	s := &status.Status{
		Form: status.Form, NodeID: n.cfg.NodeID, PID: os.Getpid(), BootID: hexID(n.boot), Ready: n.Ready(),
		UpSeconds: seconds(time.Since(n.began)), Build: build.This(), Addresses: n.listening(), Verdict: n.verdict(),
		Deployment: status.Deployment{Model: n.deployed.Model, File: n.cfg.Deployment, Digest: n.deployed.Digest(), Legs: list(n.deployed.Legs), Roles: list(n.deployed.Roles)},
	}
	s.State, s.CheckPercent = n.state()
	if !s.Ready {
		s.NotReady = n.notReady()
	}
	s.Engines, s.Requests = n.counts()
	t := n.tierSnapshot()
	s.Slots = status.Slots{Total: t.Slots, Free: t.Free, Writing: t.Writing, Readable: t.Readable, Detached: t.Detached, Fenced: t.Fenced,
		Evictable: t.Evictable, ResidentBytes: t.ResidentBytes, Evicted: t.Evictions, Refused: t.Refused}
	if n.hasTier.Load() {
		s.Slots.SlotBytes = n.tier.SlotBytes()
	}
	s.Pins = pinsOf(&t)
	report := n.deviceReport()
	s.Device = deviceOf(&report)
	m := n.meetingStatus()
	s.Parked = status.Parked{Transfers: m.Transfers, Chunks: m.ParkedKeys, Bytes: m.ParkedBytes, BytesMax: uint64(n.cfg.Bounds.ParkedBytes)}
	s.Waits, s.Groups, s.Peers = n.waitsOf(), n.groupsOf(), n.peersOf()
	s.Attention = append(n.attention(s), deviceAttention(&report)...)
	return s
}

// list is a copy that is never null in JSON.
func list(of []string) []string { return append([]string{}, of...) }

// seconds to the millisecond: finer digits are noise to read.
func seconds(d time.Duration) float64 { return d.Round(time.Millisecond).Seconds() }

// fine is seconds to the microsecond, for round trips.
func fine(d time.Duration) float64 { return d.Round(time.Microsecond).Seconds() }

// hexID is a boot id; none is empty.
func hexID(id uint64) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf("%#x", id)
}

// state is the node's, and how far its check is, in percent.
func (n *Node) state() (string, int) {
	switch stage := n.stage.Load(); {
	case n.Ready():
		return status.Serving, 100
	case stage == stageChecking:
		return status.Checking, int(n.percent.Load())
	case stage == stageDraining:
		return status.Draining, 100
	case stage == stageStopping:
		return status.Stopping, n.checked()
	}
	return status.Starting, n.checked()
}

func (n *Node) checked() int {
	if n.judged.Load() {
		return 100
	}
	return 0
}

// listening are the addresses that the node has, or is about to take.
func (n *Node) listening() status.Addresses {
	if n.opened.Load() {
		a := n.Addresses()
		return status.Addresses{EngineSocket: a.EngineSocket, Peer: a.Peer, Data: a.Data, HTTP: a.HTTP}
	}
	return status.Addresses{EngineSocket: n.cfg.EngineSocket, Peer: n.cfg.PeerListen, Data: n.cfg.DataListen, HTTP: n.addresses.HTTP}
}

// verdict is nil before the rules are accepted.
func (n *Node) verdict() *status.Verdict {
	if !n.judged.Load() {
		return nil
	}
	v := n.entry.Verdict
	out := &status.Verdict{Verdict: v.Verdict, From: fromOf(v), DeploymentDigest: n.deployed.Digest(), RulesDigest: n.entry.RulesDigest(),
		Checker: v.Checker, CertificateKey: v.Certificate, Cases: v.Cases, Seconds: seconds(time.Duration(v.Seconds * float64(time.Second))), Rules: []status.Rule{}}
	for _, r := range v.Rules {
		out.Rules = append(out.Rules, status.Rule{For: r.For, Name: r.Name, Version: r.Version, Source: r.Source, Digest: r.Digest})
	}
	return out
}

func fromOf(v *registry.Verdict) string {
	switch {
	case v.Certificate != "":
		return status.FromCertificate
	case v.Reused:
		return status.FromKept
	}
	return status.FromCheck
}

func (n *Node) tierSnapshot() (s tier.Snapshot) {
	if n.hasTier.Load() {
		return n.tier.Snapshot()
	}
	return s
}

// owners are the kinds of owners of pins; see the package comment.
var owners = []string{ownerRequest, ownerProduce, ownerPeer}

// pinsOf adds up pins by kind of owner. The snapshot has the oldest first.
func pinsOf(t *tier.Snapshot) []status.Pins {
	out := []status.Pins{}
	for _, o := range owners {
		for _, k := range []tier.PinKind{tier.PinRead, tier.PinWrite, tier.PinGrab} {
			p := status.Pins{Owner: o, Kind: string(k)}
			for i := range t.Pins {
				if c := &t.Pins[i]; c.Owner.Kind == o && c.Kind == k {
					p.Count += c.Count
					p.Bytes += c.Bytes
					if p.OldestOwner == "" {
						p.OldestSeconds, p.OldestOwner = seconds(c.OldestAge), c.Owner.ID
					}
				}
			}
			out = append(out, p)
		}
	}
	return out
}

// deviceReport is that of host memory before there are devices.
func (n *Node) deviceReport() devices.Report {
	if n.hasTier.Load() {
		return n.devices.Report()
	}
	return devices.Report{Device: devices.Mem, Why: "the node starts"}
}

func deviceOf(r *devices.Report) status.Device {
	d := status.Device{Name: r.Device, Why: r.Why, PinnedBytes: r.Pinned, PinnedOf: r.PinnedOf, PinError: r.PinError, Copies: []status.Copies{}}
	for _, kind := range []string{devices.KindMem, devices.KindCUDA} {
		for _, c := range []struct {
			direction string
			of        devices.Copies
		}{{"store", r.Stores[kind]}, {"load", r.Loads[kind]}} {
			d.Copies = append(d.Copies, status.Copies{Device: kind, Direction: c.direction, InWork: c.of.InWork, Bytes: c.of.Bytes,
				Seconds: seconds(time.Duration(c.of.Seconds * float64(time.Second))), Failed: c.of.Failures})
		}
	}
	if !r.Present {
		return d
	}
	h := &r.Health
	d.GPU = &status.GPU{Name: r.Name, UUID: r.UUID, PCIBusID: r.BusID, Lost: r.Lost, MemoryUsedBytes: r.TotalBytes - r.Free, MemoryTotalBytes: r.TotalBytes,
		PCIeGeneration: h.Link.Generation, PCIeGenerationMax: h.Link.GenerationMax, PCIeLanes: h.Link.Lanes, PCIeLanesMax: h.Link.LanesMax, Idle: h.Link.Idle,
		NUMANode: h.NUMANode, ECC: h.ECC, UncorrectedErrors: h.UncorrectedErrors, XIDErrors: r.XIDErrors, NoHealth: r.NoHealth,
		CheckedSeconds: seconds(time.Duration(r.SecondsSinceChecked * float64(time.Second)))}
	return d
}

// deviceAttention says in words what is wrong with the GPU.
func deviceAttention(r *devices.Report) (out []string) {
	if r.Lost != "" {
		out = append(out, fmt.Sprintf("the GPU is lost, and its engines compute everything themselves: %s", r.Lost))
	}
	if r.PinError != "" {
		out = append(out, "the slab is not pinned, so copies to the GPU are slow: "+r.PinError)
	}
	return append(out, r.Warnings...)
}

func (n *Node) waitsOf() []status.Wait {
	out := []status.Wait{}
	for _, w := range metrics.Waits() {
		count, oldest := n.open.of(w)
		s := status.Wait{Wait: w, InWork: count, OldestSeconds: seconds(oldest), Ended: map[string]uint64{}}
		for _, o := range metrics.Outcomes() {
			s.Ended[o] = metrics.Count(n.metrics.Waits, w, o)
		}
		out = append(out, s)
	}
	return out
}

func (n *Node) groupsOf() []status.Group {
	out := []status.Group{}
	m := n.metrics
	for i := range n.groups {
		for _, leg := range allLegs {
			name := n.groups[i].name
			g := status.Group{Group: name, Leg: leg, Demanded: metrics.Count(m.Demanded, name, leg), Supplied: metrics.Count(m.Supplied, name, leg),
				Transferred: metrics.Count(m.Transferred, name, leg), PeerDemanded: metrics.Count(m.PeerDemanded, name, leg),
				Unmatched: map[string]uint64{}, PeerEnded: map[string]uint64{metrics.EndTransferred: metrics.Count(m.PeerEnded, name, leg, metrics.EndTransferred)}}
			for _, c := range metrics.Causes() {
				g.Unmatched[c] = metrics.Count(m.Unmatched, name, leg, c)
				g.PeerEnded[c] = metrics.Count(m.PeerEnded, name, leg, c)
			}
			out = append(out, g)
		}
	}
	return out
}

// peersStatus is that of the configured peers before there are sessions.
func (n *Node) peersStatus() []wire.PeerStatus {
	if n.opened.Load() {
		return n.peers.Status()
	}
	out := []wire.PeerStatus{}
	for _, p := range n.cfg.Peers {
		out = append(out, wire.PeerStatus{ID: p.ID, Control: p.Control, Configured: true, Status: session.Status{State: session.Connecting}})
	}
	slices.SortFunc(out, func(a, b wire.PeerStatus) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

func (n *Node) peersOf() []status.Peer {
	out := []status.Peer{}
	for _, p := range n.peersStatus() {
		reason, lanes := n.linkOf(p.ID)
		s := status.Peer{ID: p.ID, Control: p.Control, Configured: p.Configured, State: p.State.String(), Reason: reason, Draining: p.Draining,
			BootID: hexID(p.BootID), RTTSeconds: fine(p.RTT), Sessions: p.Sessions,
			Lookups: p.Lookups, Demands: p.Demands, Serves: p.Jobs, DataLanes: lanes,
			PinnedBytes: n.peerPinnedBytes(p.ID), PinnedBytesMax: uint64(n.peerPinnedMax.Load())}
		if p.BootID != 0 { // else it was never heard, and does not fall silent
			s.SilenceSeconds = seconds(p.Silence)
		}
		for _, leg := range allLegs {
			why := n.legRefused(&p, leg)
			s.Legs = append(s.Legs, status.Leg{Leg: leg, Allowed: why == "", Why: why})
		}
		s.Pair = n.pairOf(&p)
		out = append(out, s)
	}
	return out
}

func (n *Node) linkOf(peer string) (reason string, lanes int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.links[peer]
	if l == nil {
		return "", 0
	}
	if l.client != nil {
		lanes = l.client.Lanes()
	}
	return l.reason, lanes
}

// legRefused says why a request that names the peer may not use a leg now; "" when it may.
func (n *Node) legRefused(p *wire.PeerStatus, leg string) string {
	legs := n.deployed.Legs
	switch {
	case len(legs) > 0 && !slices.Contains(legs, leg):
		return fmt.Sprintf("deployment %s has legs %v", n.deployed.Model, legs)
	case p.State != session.Ready && p.State != session.Connecting:
		return fmt.Sprintf("it is %v: %s", p.State, n.reason(p.ID))
	case p.State == session.Connecting:
		return "there is no session with it yet"
	case leg != session.LegProbe && !p.AllLegs:
		return "it runs other rules, parameters or limits: " + n.pairRefuses(p)
	}
	return ""
}

// attention says in words what is not as it should be.
func (n *Node) attention(s *status.Status) []string {
	out := []string{}
	for i := range s.Peers {
		p := &s.Peers[i]
		switch {
		case p.Configured && (p.State == session.Suspect.String() || p.State == session.Dead.String()):
			out = append(out, fmt.Sprintf("peer %s is %s: %s; requests that name it are computed here", p.ID, p.State, cmp.Or(p.Reason, "no reason is known")))
		case p.State == session.Ready.String() && p.DataLanes == 0:
			out = append(out, fmt.Sprintf("peer %s is ready, but this node has no data connection to it", p.ID))
		}
		if p.Pair.State == pairs.Refused || p.Pair.State == pairs.Undecided {
			out = append(out, fmt.Sprintf("peer %s runs another version: %s%s", p.ID, p.Pair.Reason, seeFile(p.Pair.CounterexampleFile, p.Pair.CounterexampleNotKept)))
		}
	}
	limit := n.waits.request + backstopGrace
	for _, w := range s.Waits {
		if w.OldestSeconds > limit.Seconds() {
			out = append(out, fmt.Sprintf("a wait of kind %s is %.0f s old, and deadlines.request_ms is %d: unless its request asked for longer, this is a fault of this node", w.Wait, w.OldestSeconds, n.waits.request.Milliseconds()))
		}
	}
	if n.judged.Load() && n.entry.Verdict.NotKept != "" {
		out = append(out, "the verdict could not be kept, so the next start checks again: "+n.entry.Verdict.NotKept)
	}
	return out
}

// serveStatus answers this machine only: unlike metrics, a status names requests.
func (n *Node) serveStatus(w http.ResponseWriter, r *http.Request) {
	if !status.Local(r) {
		http.Error(w, "the status names requests, so it is for this machine only; run tierd status on it, or read /metrics", http.StatusForbidden)
		return
	}
	data, err := json.MarshalIndent(n.Status(), "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(data, '\n'))
}

// tellAddress writes where the node answers, for tierd status, as soon as it does.
func (n *Node) tellAddress() error {
	data, err := json.MarshalIndent(status.Address{NodeID: n.cfg.NodeID, PID: os.Getpid(), HTTPListen: n.addresses.HTTP}, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(n.cfg.StateDir, status.AddressFile)
	if err := WriteFile(path, append(data, '\n')); err != nil {
		return n.cfg.Errorf("state_dir is %s: %w; make room in it, or choose another directory", n.cfg.StateDir, err)
	}
	n.onClose(func() { os.Remove(path) }) // while state_dir's lock is held: it is not another daemon's
	return nil
}

// openWaits are the waits in work, by kind.
type openWaits struct {
	mu    sync.Mutex
	last  uint64
	since map[string]map[uint64]time.Time
}

// begin notes a wait; the result ends it.
func (o *openWaits) begin(wait string) (end func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.since == nil {
		o.since = map[string]map[uint64]time.Time{}
	}
	kind := o.since[wait]
	if kind == nil {
		kind = map[uint64]time.Time{}
		o.since[wait] = kind
	}
	o.last++
	id := o.last
	kind[id] = time.Now()
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(kind, id)
	}
}

// of returns how many waits of a kind there are, and how old the oldest is.
func (o *openWaits) of(wait string) (n int, oldest time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, since := range o.since[wait] {
		oldest = max(oldest, time.Since(since))
	}
	return len(o.since[wait]), oldest
}

// verdictInfo is the verdict for the labels of a metric.
func (n *Node) verdictInfo() metrics.Verdict {
	v := metrics.Verdict{Model: n.deployed.Model, DeploymentDigest: n.deployed.Digest(), From: "none"}
	if n.judged.Load() {
		v.RulesDigest, v.From = n.entry.RulesDigest(), fromOf(n.entry.Verdict)
	}
	return v
}

// peerGroup names the group of a key that a peer demands.
func (n *Node) peerGroup(k *session.Key) string {
	if g := tier.Key(*k).Group(); g < uint32(len(n.groups)) {
		return n.groups[g].name
	}
	return metrics.Unknown
}

// peerLeg names the leg of a peer's demand.
func peerLeg(leg string) string {
	if slices.Contains(allLegs, leg) {
		return leg
	}
	return metrics.Unknown
}

// peerDemanded counts a peer's demand.
func (n *Node) peerDemanded(j *session.Job) {
	for i := range j.Keys {
		n.metrics.PeerDemanded.WithLabelValues(n.peerGroup(&j.Keys[i]), peerLeg(j.Leg)).Inc()
	}
}

// peerEnded counts how a peer's demand ended, key by key.
func (n *Node) peerEnded(j *session.Job, results []session.Result) {
	for i, r := range results {
		end := metrics.EndTransferred
		if r.Cause != session.Transferred {
			end = failureOf(r).cause
		}
		n.metrics.PeerEnded.WithLabelValues(n.peerGroup(&j.Keys[i]), peerLeg(j.Leg), end).Inc()
	}
}
