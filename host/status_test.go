package host

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/limitlog"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/status"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// statusz asks a node as tierd status does.
func statusz(t *testing.T, n *Node) *status.Status {
	t.Helper()
	a, err := status.Locate(n.cfg.StateDir)
	require.NoError(t, err)
	s, _, err := status.Get(ctxFor(t), a)
	require.NoError(t, err)
	return s
}

// groupOf returns a group's counts on a leg.
func groupOf(t *testing.T, s *status.Status, group, leg string) status.Group {
	t.Helper()
	for _, g := range s.Groups {
		if g.Group == group && g.Leg == leg {
			return g
		}
	}
	require.Fail(t, "no such counts", "%s %s", group, leg)
	return status.Group{}
}

func waitOf(s *status.Status, wait string) status.Wait {
	return s.Waits[slices.IndexFunc(s.Waits, func(w status.Wait) bool { return w.Wait == wait })]
}

// TestStatusOfAPair: what two nodes say after one request is what happened, on both sides.
func TestStatusOfAPair(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	parked := statusz(t, producer)
	require.Positive(t, parked.Parked.Chunks)
	require.Equal(t, uint64(2<<20), parked.Parked.BytesMax)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	// The wait ends with the demand, a moment after its last chunk has landed.
	require.Eventually(t, func() bool { return waitOf(consumer.Status(), "transfer").Ended["ok"] == 1 }, 30*time.Second, time.Millisecond)
	s := statusz(t, consumer)
	require.Equal(t, status.Form, s.Form)
	require.Equal(t, []any{"consumer", os.Getpid(), status.Serving, true, "", 100}, []any{s.NodeID, s.PID, s.State, s.Ready, s.NotReady, s.CheckPercent})
	require.Equal(t, []int{1, 1}, []int{s.Engines, s.Requests})
	require.Empty(t, s.Attention)
	require.Equal(t, status.FromCheck, s.Verdict.From)
	full := groupOf(t, s, "full", "pd")
	require.Equal(t, uint64(18), full.Demanded)
	require.Equal(t, uint64(18), full.Transferred)
	require.Zero(t, groupOf(t, s, "full", "demand").Demanded, "a leg that was not used is there")
	require.Len(t, full.Unmatched, len(metrics.Causes()))
	require.Equal(t, uint64(1), waitOf(s, "transfer").Ended["ok"])
	require.Zero(t, waitOf(s, "transfer").InWork)
	require.Equal(t, 1024, s.Slots.Total)
	require.Equal(t, s.Slots.Total, s.Slots.Free+s.Slots.Writing+s.Slots.Readable+s.Slots.Detached+s.Slots.Fenced)
	held := s.Pins[slices.IndexFunc(s.Pins, func(p status.Pins) bool { return p.Owner == ownerRequest && p.Kind == "read" })]
	require.Equal(t, 21, held.Count)
	require.Equal(t, int64(18*4*2*blockBytes/2+3*2*blockBytes), held.Bytes)
	require.Contains(t, held.OldestOwner, "a#")
	require.Len(t, s.Peers, 1)
	peer := s.Peers[0]
	require.Equal(t, []any{"producer", "ready", true}, []any{peer.ID, peer.State, peer.Configured})
	require.Equal(t, statusz(t, producer).BootID, peer.BootID)
	require.Positive(t, peer.DataLanes)
	for _, l := range peer.Legs {
		require.Equal(t, l.Why == "", l.Allowed)
		require.Equal(t, slices.Contains(consumer.deployed.Legs, l.Leg), l.Allowed, l.Leg)
	}
	r.finish()
	require.Eventually(t, func() bool {
		g := groupOf(t, statusz(t, producer), "full", "pd")
		return g.Supplied == 18 && g.PeerDemanded == 18 && g.PeerEnded[metrics.EndTransferred] == 18
	}, 30*time.Second, time.Millisecond)
	clean(t, producer, consumer)
}

// TestStatusOfAFrozenPeer: a node whose peer is silent answers at once, says how long the
// peer has been silent and what may not be asked of it, and shows the wait for it.
func TestStatusOfAFrozenPeer(t *testing.T) {
	producer, consumer, control, data := proxied(t, func(c *config.Config) {
		c.Deadlines.PingMS, c.Deadlines.SuspectMS, c.Deadlines.DeadMS = 100, 600, 60000
	})
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	control.frozen.Store(true)
	data.frozen.Store(true)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	job := r.startLoad()
	require.Eventually(t, func() bool {
		s := statusz(t, consumer)
		return s.Peers[0].State != "ready" || // a slow machine may be too late for it
			s.Peers[0].Demands == 1 && waitOf(s, "transfer").InWork == 1
	}, 30*time.Second, time.Millisecond)
	lower(t, r, r.wait(job))
	began := time.Now()
	s := statusz(t, consumer)
	t.Logf("with a frozen peer the status took %v", time.Since(began))
	peer := s.Peers[0]
	require.Equal(t, "suspect", peer.State)
	require.GreaterOrEqual(t, peer.SilenceSeconds, 0.5)
	for _, l := range peer.Legs {
		require.False(t, l.Allowed)
		if l.Leg != "demand" || slices.Contains(consumer.deployed.Legs, "demand") {
			require.Contains(t, l.Why, "it is suspect: ")
		}
	}
	require.True(t, s.Ready, "a peer never makes a node unready")
	require.Len(t, s.Attention, 1)
	require.Regexp(t, `^peer producer is suspect: .*; requests that name it are computed here$`, s.Attention[0])
	require.Positive(t, waitOf(s, "transfer").Ended["peer"])
	require.Positive(t, groupOf(t, s, "full", "pd").Unmatched["peer"])
	drawn := status.Text(s, false)
	require.Contains(t, drawn, "suspect")
	require.Contains(t, drawn, "with producer: it is suspect")
	r.finish()
	control.frozen.Store(false)
	data.frozen.Store(false)
	serves(t, producer, consumer)
}

// TestStatusBeforeAndAfter: the status is there while the rules are checked, says how far
// that is, lists the peers that are configured, and its address goes with the node.
func TestStatusBeforeAndAfter(t *testing.T) {
	h, log := newHeld(), &logTo{}
	cfg := testConfig(t, "a", withPeer("b", closedPort(t)))
	require.NoError(t, os.MkdirAll(cfg.StateDir, 0o700))
	stale := filepath.Join(cfg.StateDir, status.AddressFile)
	require.NoError(t, os.WriteFile(stale, []byte(`{"node_id":"a","pid":1,"http_listen":"127.0.0.1:1"}`), 0o600))
	started := make(chan *Node)
	go func() {
		n, err := start(ctxFor(t), cfg, logInto(log), h.judge)
		if err != nil {
			t.Errorf("%v", err)
		}
		started <- n
	}()
	<-h.begun
	h.progress(43, 100)
	a, err := status.Locate(cfg.StateDir)
	require.NoError(t, err)
	s, body, err := status.Get(ctxFor(t), a)
	require.NoError(t, err)
	require.Equal(t, []any{status.Checking, false, 43, "checking deployment tiny: 43 %"}, []any{s.State, s.Ready, s.CheckPercent, s.NotReady})
	require.Nil(t, s.Verdict)
	require.Equal(t, "connecting", s.Peers[0].State)
	require.Equal(t, "b", s.Peers[0].ID)
	require.Equal(t, 1024, s.Slots.Free)
	require.NotContains(t, strings.NewReplacer(`"verdict": null`, "", `"gpu": null`, "").Replace(string(body)), "null", "lists are never null")
	_, metricsText := get(t, "http://"+a.HTTPListen+"/metrics")
	for _, line := range []string{
		`tierd_peer_state{peer="b",state="connecting"} 1`, `tierd_ready 0`, `tierd_check_done_ratio 0.43`,
		`tierd_demanded_chunks_total{group="full",leg="demand"} 0`, `tierd_peer_leg_allowed{leg="pd",peer="b"} 0`, `from="none"`,
	} {
		require.Contains(t, metricsText, line)
	}
	close(h.goOn)
	n := <-started
	require.Equal(t, status.Serving, statusz(t, n).State)
	n.Close(context.Background())
	require.NoFileExists(t, stale)
	_, err = status.Locate(cfg.StateDir)
	require.ErrorContains(t, err, "no daemon runs with state directory")
}

// TestStatusWhileDraining: a node that drains still says what it waits for.
func TestStatusWhileDraining(t *testing.T) {
	n := startNode(t, "a", func(c *config.Config) { c.Deadlines.DrainMS = 60000 })
	e := attach(t, n)
	e.beginProducer("a", text{"a", 64}, enginepb.Leg_PD)
	done := make(chan struct{})
	go func() { n.Close(context.Background()); close(done) }()
	require.Eventually(t, func() bool { return statusz(t, n).State == status.Draining }, 30*time.Second, time.Millisecond)
	s := statusz(t, n)
	require.Equal(t, "draining", s.NotReady)
	require.Equal(t, 1, s.Requests)
	require.NoError(t, e.c.Close())
	<-done
}

// TestStatusIsForThisMachine: others are told where to look instead.
func TestStatusIsForThisMachine(t *testing.T) {
	for remote, local := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "10.0.0.9:1": false, "nonsense": false} {
		r, err := http.NewRequest(http.MethodGet, "/", nil)
		require.NoError(t, err)
		r.RemoteAddr = remote
		require.Equal(t, local, status.Local(r), remote)
	}
}

// TestMetricsReference writes metrics/METRICS.md from what a node exports, and holds it
// against that: name, type, labels, unit and meaning of every metric.
func TestMetricsReference(t *testing.T) {
	producer, consumer := pair(t)
	families, err := consumer.metrics.Registry().Gather()
	require.NoError(t, err)
	var b strings.Builder
	b.WriteString(`# Metrics of a node

Everything that a daemon exports at /metrics, besides the Go runtime's and the process's own.
Every series is there from the first scrape, with 0; those of peers that are not configured
when they come. A test writes this file from a running node, which has no TLS: with it there
is tierd_tls_expiry_days{of} too, the days that are left of the certificate and the authority.

| name | type | labels | unit | meaning |
| --- | --- | --- | --- | --- |
`)
	values := map[string]map[string]bool{}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "tierd_") {
			continue
		}
		var names []string
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if !slices.Contains(names, l.GetName()) {
					names = append(names, l.GetName())
				}
				key := f.GetName() + " " + l.GetName()
				if values[key] == nil {
					values[key] = map[string]bool{}
				}
				values[key][l.GetValue()] = true
			}
		}
		unit := unitOf(f.GetName())
		require.NotEmpty(t, unit, "%s: its name does not say its unit", f.GetName())
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(names, ", "), unit, f.GetHelp())
	}
	b.WriteString("\n| label | values |\n| --- | --- |\n")
	b.WriteString(labelTable(values))
	golden(t, "metrics/METRICS.md", b.String())
	clean(t, producer, consumer)
}

// open are the labels whose values a deployment or configuration gives.
var openLabels = []string{"group", "peer", "boot_id", "version", "go", "model", "deployment_digest", "rules_digest", "from", "name", "uuid", "pci_bus_id"}

func labelTable(values map[string]map[string]bool) string {
	lines := map[string]bool{}
	for key, set := range values {
		_, label, _ := strings.Cut(key, " ")
		if slices.Contains(openLabels, label) {
			continue
		}
		var all []string
		for v := range set {
			all = append(all, v)
		}
		slices.Sort(all)
		metric, _, _ := strings.Cut(key, " ")
		lines[fmt.Sprintf("| %s of %s | %s |\n", label, metric, strings.Join(all, ", "))] = true
	}
	var sorted []string
	for l := range lines {
		sorted = append(sorted, l)
	}
	slices.Sort(sorted)
	return strings.Join(sorted, "")
}

// unitOf reads the unit off a metric's name.
func unitOf(name string) string {
	name = strings.TrimSuffix(name, "_total")
	for _, u := range []string{"seconds", "bytes", "chunks", "tokens", "slots", "ratio", "requests", "sessions", "waits", "admissions", "pins", "jobs", "connections", "checks", "copies", "errors", "warnings", "lanes", "handles"} {
		if strings.HasSuffix(name, "_"+u) {
			return u
		}
	}
	switch name {
	case "tierd_build_info", "tierd_verdict_info", "tierd_peer_info":
		return "1"
	case "tierd_gpu_pcie_generation":
		return "generation"
	case "tierd_device_copies_in_work":
		return "copies"
	case "tierd_peer_state", "tierd_peer_pair", "tierd_peer_leg_allowed", "tierd_ready", "tierd_gpu_info", "tierd_gpu_lost":
		return "0 or 1"
	case "tierd_engines_attached":
		return "engines"
	case "tierd_requests_live":
		return "requests"
	case "tierd_transfers_live":
		return "transfers"
	case "tierd_peer_jobs_in_work", "tierd_fetch_jobs_in_work":
		return "jobs"
	case "tierd_waits_in_work":
		return "waits"
	case "tierd_prompt_tokens_by_source":
		return "tokens"
	case "tierd_kv_offload_allocation_failure":
		return "failures"
	}
	return ""
}

// TestEverySeriesAtTheFirstScrape: nothing that two nodes do makes a new series.
func TestEverySeriesAtTheFirstScrape(t *testing.T) {
	series := func(n *Node) (out []string) {
		families, err := n.metrics.Registry().Gather()
		require.NoError(t, err)
		for _, f := range families {
			if !strings.HasPrefix(f.GetName(), "tierd_") || f.GetName() == "tierd_peer_info" { // has a boot id, by its meaning
				continue
			}
			for _, m := range f.Metric {
				out = append(out, f.GetName()+labelsOf(m))
			}
		}
		return out
	}
	producer, consumer := pair(t)
	before := series(consumer)
	p, c := attach(t, producer), attach(t, consumer)
	for i, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
		x := text{fmt.Sprint(i), 300}
		if i == 0 {
			q, _ := p.beginProducer("0", x, leg)
			q.settle(q.step(100, 0))
			q.finish(true)
		} else {
			p.produce("1", x, leg)
		}
		r := c.beginConsumer(fmt.Sprint(i), x, leg)
		r.load()
		r.finish()
	}
	require.Positive(t, counter(consumer, "unmatched", "full", "pd", "unmatched"))
	odd := session.Job{Leg: "none of ours", Keys: []session.Key{session.Key(tier.MakeKey(tier.Tenant(nil), make([]byte, 32), 77))}}
	consumer.peerDemanded(&odd)
	consumer.peerEnded(&odd, []session.Result{{Cause: session.Aborted}})
	require.Equal(t, before, series(consumer), "a peer's words make no series either")
	clean(t, producer, consumer)
}

func labelsOf(m *dto.Metric) (s string) {
	for _, l := range m.Label {
		s += " " + l.GetName() + "=" + l.GetValue()
	}
	return s
}

// infoLog is a log at the level of a daemon's default.
func infoLog(l *logTo) *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// loggedPair is pair, with logs at the default level.
func loggedPair(t *testing.T) (producer, consumer *Node, pLog, cLog *logTo) {
	t.Helper()
	pLog, cLog = &logTo{}, &logTo{}
	begin := func(id string, log *logTo, options ...nodeOption) *Node {
		n, err := start(ctxFor(t), testConfig(t, id, options...), infoLog(log), unjudged)
		require.NoError(t, err)
		t.Cleanup(func() { n.Close(context.Background()) })
		return n
	}
	producer = begin("producer", pLog)
	consumer = begin("consumer", cLog, withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	return producer, consumer, pLog, cLog
}

// TestAbortStormIsQuiet: a thousand requests that their engine gives up warn nobody, and
// write a bounded number of lines on both sides.
func TestAbortStormIsQuiet(t *testing.T) {
	producer, consumer, pLog, cLog := loggedPair(t)
	c := attach(t, consumer)
	const storm = 1000
	lines := func() int { return strings.Count(pLog.String()+cLog.String(), "\n") }
	before := lines()
	for i := range storm {
		r := c.beginConsumer(fmt.Sprint("a", i), text{fmt.Sprint(i), 64}, enginepb.Leg_PD) // nobody produces it
		require.NotEmpty(t, r.reply.Demand)
		_, err := c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: r.id, Abort: true})
		require.NoError(t, err)
	}
	require.EqualValues(t, storm, counter(consumer, "requests", "consumer", "pd", "aborted"))
	p := attach(t, producer)
	for i := range storm / 10 { // and a hundred whose producer is given up
		id := fmt.Sprint("p", i)
		x := text{id, 100}
		q, _ := p.beginProducer(id, x, enginepb.Leg_PD)
		q.settle(q.step(30, 0))
		r := c.beginConsumer(id, x, enginepb.Leg_PD)
		job := r.startLoad()
		q.finish(true)
		lower(t, r, r.wait(job))
		r.finish()
		p.fresh()
		c.fresh()
	}
	require.Positive(t, counter(consumer, "unmatched", "full", "pd", "unmatched"))
	require.Positive(t, counter(consumer, "unmatched", "full", "pd", "aborted"))
	clean(t, producer, consumer)
	require.Empty(t, warnings(pLog.String()+cLog.String()))
	require.LessOrEqual(t, lines()-before, 1+2*(limitlog.LinesMax+1), "an engine that attaches, and two causes")
}

// TestFaultStormIsBounded: requests that all meet faults of one cause write a few lines,
// with groups and chunks, and at the end how many more there were.
func TestFaultStormIsBounded(t *testing.T) {
	producer, consumer, pLog, cLog := loggedPair(t)
	p, c := attach(t, producer), attach(t, consumer)
	const storm = 40
	for i := range storm {
		id := fmt.Sprint("s", i)
		x := text{id, 100}
		q, _ := p.beginProducer(id, x, enginepb.Leg_PD)
		q.settle(q.step(30, 0))
		q.finish(false) // its last word, after less than the rules promise
		r := c.beginConsumer(id, x, enginepb.Leg_PD)
		lower(t, r, r.load())
		r.finish()
		p.fresh()
		c.fresh()
	}
	clean(t, producer, consumer)
	const line = `level=WARN msg="a request goes on without chunks that it had planned to have" cause=unmatched`
	require.Equal(t, limitlog.LinesMax, strings.Count(cLog.String(), line))
	require.Regexp(t, regexp.MustCompile(`cause=unmatched detail="[^"]+" peer=producer leg=pd request=s0 transfer=t-s0 chunks="sliding \{\d+(-\d+)?\}; full \{1-5\}"`), cLog.String())
	require.LessOrEqual(t, strings.Count(pLog.String(), `msg="transfer finished"`), limitlog.LinesMax)
	require.Regexp(t, regexp.MustCompile(`msg="transfer finished" cause=transfer transfer=t-s0 leg=pd demanded=\d+ supplied=\d+ transferred=\d+ unmatched=\d+ not_transferred="sliding \{\d+(-\d+)?\}; full \{1-5\}"`), pLog.String())
	consumer.Close(context.Background())
	require.Contains(t, cLog.String(), fmt.Sprintf("cause=unmatched left_out=%d ", storm-limitlog.LinesMax))
}

// TestOneLineAFrozenPeer: many requests in flight at a peer that falls silent are one fault.
func TestOneLineAFrozenPeer(t *testing.T) {
	n := startNode(t, "a")
	log := &logTo{}
	n.faults.Close()
	n.faults = limitlog.New(infoLog(log))
	for i := range 100 {
		c := &consumer{node: n, name: fmt.Sprint(i), from: "b", leg: legPD, wants: []*want{
			{ref: plan.Ref{Group: 1, Chunk: 3}, ended: true, fail: failure{metrics.CausePeer, "silent"}},
			{ref: plan.Ref{Group: 0, Chunk: 9}, ended: true, fail: failure{metrics.CauseAborted, "given up"}},
		}}
		c.tellFaults()
	}
	n.faults.Close()
	require.Equal(t, 2, strings.Count(log.String(), "\n"), log.String())
	require.Contains(t, log.String(), `cause=peer detail=silent peer=b leg=pd request=0 transfer="" chunks="full {3}"`)
	require.Contains(t, log.String(), "cause=peer left_out=99 ")
}

func TestChunksText(t *testing.T) {
	n := &Node{groups: []geometry{{name: "sliding"}, {name: "full"}}}
	refs := func(group int, chunks ...uint32) (out []plan.Ref) {
		for _, c := range chunks {
			out = append(out, plan.Ref{Group: group, Chunk: c})
		}
		return out
	}
	require.Equal(t, "", n.chunksText(nil))
	require.Equal(t, "full {0-3, 7}", n.chunksText(refs(1, 3, 1, 0, 2, 7)))
	require.Equal(t, "sliding {2}; full {0, 5-6}", n.chunksText(append(refs(1, 6, 0, 5), refs(0, 2)...)))
	var even []uint32
	for i := range uint32(50) {
		even = append(even, 2*i)
	}
	require.True(t, strings.HasSuffix(n.chunksText(refs(1, even...)), "28, 30, and 34 more}"))
}
