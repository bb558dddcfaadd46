package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/host/transfer"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) {
	flag.Parse()
	dir, err := os.MkdirTemp("", "tierd-host-test-")
	if err != nil {
		panic(err)
	}
	compiledDir = dir
	code := m.Run()
	os.RemoveAll(dir)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Println(err)
			code = 1
		}
	}
	os.Exit(code)
}

// deployment has small blocks: 4 tokens and 256 bytes in both groups, chunks of 8 tokens
// in the window and of 16 in full.
const deployment = `
model: tiny
max_tokens: 512
align_tokens: 64
groups:
  - {name: sliding, rule: window, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 2, kv_heads: 1, head_dim: 8, dtype: bf16}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 4, layers: 2, kv_heads: 1, head_dim: 8, dtype: bf16}
policies: [{rule: request-level}]
legs: [pd, demand, probe]
`

const (
	blockTokens = 4
	blockBytes  = 256
	window      = 20
	regionSize  = 256 // blocks of each region
)

var chunkBlocks = map[string]int{"sliding": 2, "full": 4}

// nodeOption changes a configuration before the node starts.
type nodeOption func(*config.Config)

func withPeer(id, control string) nodeOption {
	return func(c *config.Config) { c.Peers = append(c.Peers, config.Peer{ID: id, Control: control}) }
}

func withDeployment(yaml string) nodeOption {
	return func(c *config.Config) {
		c.Deployment = filepath.Join(filepath.Dir(c.EngineSocket), "other.yaml")
		if err := os.WriteFile(c.Deployment, []byte(yaml), 0o600); err != nil {
			panic(err)
		}
	}
}

// testConfig is a node's configuration.
func testConfig(t *testing.T, id string, options ...nodeOption) *config.Config {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "deployment.yaml"), []byte(deployment), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "shm"), 0o700))
	c, err := config.Parse(filepath.Join(dir, "node.yaml"), fmt.Appendf(nil, `
node_id: %s
state_dir: state
engine_socket: e.sock
peer_listen: 127.0.0.1:0
data_listen: 127.0.0.1:0
http_listen: 127.0.0.1:0
slab_bytes: 4194304
slab_dir: shm
device: mem
deployment: deployment.yaml
deadlines:
  # Long where a slow machine must not look like a fault, short where a test waits for the end.
  {request_ms: 60000, lookup_ms: 20000, connect_ms: 10000, suspect_ms: 20000, dead_ms: 40000, transfer_ms: 20000,
   drain_ms: 2000, pending_ms: 300}
`, id))
	require.NoError(t, err)
	for _, o := range options {
		o(c)
	}
	require.NoError(t, c.Validate())
	return c
}

// logTo keeps the log of a node for the end of a failed test.
type logTo struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logTo) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// unjudged opens the shipped rules natively and takes them on trust: that registration
// judges them, as WebAssembly, is tested where it happens, and takes seconds.
func unjudged(ctx context.Context, d *deploy.Deployment, _ func(done, total int)) (*registry.Entry, func() error, error) {
	e, err := registry.Open(ctx, d, func(_ context.Context, _, ref string) (registry.Opened, error) {
		for _, s := range append(specs.All(), policy.All()...) {
			if s.Manifest().Name == ref {
				return registry.Opened{Spec: s, Digest: "sha256:native", Source: "native"}, nil
			}
		}
		return registry.Opened{}, fmt.Errorf("no native rule %s", ref)
	})
	if err != nil {
		return nil, nil, err
	}
	e.Verdict = &registry.Verdict{Verdict: registry.Accepted, Model: d.Model}
	return e, func() error { return nil }, nil
}

func (l *logTo) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func startNode(t *testing.T, id string, options ...nodeOption) *Node {
	t.Helper()
	return startJudged(t, id, unjudged, options...)
}

func startJudged(t *testing.T, id string, judge registrar, options ...nodeOption) *Node {
	t.Helper()
	return startLogged(t, id, judge, &logTo{}, options...)
}

func startLogged(t *testing.T, id string, judge registrar, log *logTo, options ...nodeOption) *Node {
	t.Helper()
	return startWith(t, testConfig(t, id, options...), judge, log)
}

func startWith(t *testing.T, cfg *config.Config, judge registrar, log *logTo) *Node {
	t.Helper()
	return startConfig(t, cfg.NodeID, cfg, judge, log, devices.Driver{})
}

func startConfig(t *testing.T, id string, cfg *config.Config, judge registrar, log *logTo, gpus devices.Driver) *Node {
	t.Helper()
	n, err := startOn(ctxFor(t), cfg, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), judge, gpus)
	require.NoError(t, err)
	t.Cleanup(func() {
		n.Close(context.Background())
		left := n.tier.Snapshot()
		require.Empty(t, left.Pins, "a closed node holds nothing")
		require.Zero(t, left.Writing)
		require.NotContains(t, log.String(), "left slots behind")
		if t.Failed() {
			t.Logf("log of %s:\n%s", id, log.String())
		}
	})
	return n
}

func ctxFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// ready waits until a node has a session and data connections with a peer.
func ready(t *testing.T, n *Node, peer string) {
	t.Helper()
	require.Eventually(t, func() bool {
		if !isReady(n, peer) {
			return false
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		l := n.links[peer]
		return l != nil && l.client != nil && l.client.Lanes() > 0
	}, 30*time.Second, time.Millisecond)
}

func isReady(n *Node, peer string) bool {
	for _, s := range n.peers.Status() {
		if s.ID == peer {
			return s.State == session.Ready
		}
	}
	return false
}

// clean asserts that nothing is held any more but parked supply.
func clean(t *testing.T, nodes ...*Node) {
	t.Helper()
	for _, n := range nodes {
		var why string
		for deadline := time.Now().Add(30 * time.Second); !n.idle(&why); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				require.Fail(t, "something is still held", why)
			}
		}
	}
}

func (n *Node) idle(why *string) bool {
	n.meeting.mu.Lock()
	defer n.meeting.mu.Unlock()
	n.mu.Lock() // after the meeting's, as in meeting.elsewhere
	defer n.mu.Unlock()
	s := n.tier.Snapshot()
	held, private := 0, 0
	for _, keys := range n.meeting.holds {
		for _, stack := range keys {
			for i := range stack {
				held++
				if stack[i].ref.Zero() {
					private++
				}
			}
		}
	}
	pins := 0
	for _, p := range s.Pins {
		pins += p.Count
	}
	parked := n.meeting.join.Status().ParkedKeys
	*why = fmt.Sprintf("node %s: pins %v, writing %d, detached %d, fenced %d, servings %d, fetches %d, parked %d of %d held, %d private",
		n.cfg.NodeID, s.Pins, s.Writing, s.Detached, s.Fenced, len(n.servings), len(n.fetches), parked, held, private)
	return pins == held && held == parked && s.Writing == private && s.Detached <= parked && s.Fenced == 0 &&
		len(n.servings) == 0 && len(n.fetches) == 0
}

// pair starts a producer and a consumer that dials it.
func pair(t *testing.T, options ...nodeOption) (producer, consumer *Node) {
	t.Helper()
	producer = startNode(t, "producer")
	consumer = startNode(t, "consumer", append(options, withPeer("producer", producer.Addresses().Peer))...)
	ready(t, consumer, "producer")
	return producer, consumer
}

// A text is a prompt by its seed: two texts of one seed share every prefix.
type text struct {
	seed   string
	tokens uint64
}

func (x text) hash(granule int) []byte {
	h := sha256.Sum256([]byte(x.seed))
	for i := range granule + 1 {
		h = sha256.Sum256(binary.BigEndian.AppendUint32(h[:], uint32(i)))
	}
	return h[:]
}

func (x text) hashes() []byte {
	var out []byte
	for i := range int(x.tokens / blockTokens) {
		out = append(out, x.hash(i)...)
	}
	return out
}

// block is what a block of a group must hold.
func (x text) block(group string, b int) []byte {
	seed := sha256.Sum256(append(x.hash(b), group...))
	out := make([]byte, 0, blockBytes)
	for i := 0; len(out) < blockBytes; i++ {
		s := sha256.Sum256(append(seed[:], byte(i)))
		out = append(out, s[:]...)
	}
	return out[:blockBytes]
}

// chunk is what a chunk of a group must hold.
func (x text) chunk(group string, c int) []byte {
	var out []byte
	for b := c * chunkBlocks[group]; b < (c+1)*chunkBlocks[group]; b++ {
		out = append(out, x.block(group, b)...)
	}
	return out
}

// testEngine is one engine, with a table of block numbers per request and group.
type testEngine struct {
	t    *testing.T
	c    *engine.Client
	next map[string]uint32 // next free block, per group
}

func attach(t *testing.T, n *Node) *testEngine {
	t.Helper()
	c, err := engine.Dial(ctxFor(t), n.Addresses().EngineSocket)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	reply, err := c.Attach(ctxFor(t), "test", nil, []*enginepb.Region{{Group: "sliding", Blocks: regionSize}, {Group: "full", Blocks: regionSize}})
	require.NoError(t, err)
	require.Equal(t, "accepted", reply.Verdict)
	require.Equal(t, n.cfg.NodeID, reply.NodeId)
	d, err := deploy.Parse("reply", reply.Deployment)
	require.NoError(t, err)
	require.Equal(t, reply.DeploymentDigest, d.Digest())
	return &testEngine{t: t, c: c, next: map[string]uint32{}}
}

// take returns fresh blocks. Tests are small enough never to need one twice.
func (e *testEngine) take(group string, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = e.next[group]
		e.next[group]++
	}
	require.LessOrEqual(e.t, e.next[group], uint32(regionSize))
	return ids
}

type beginOption func(*enginepb.BeginRequest)

func (e *testEngine) request(id string, x text, role enginepb.Role, leg enginepb.Leg, options ...beginOption) *enginepb.BeginRequest {
	r := &enginepb.BeginRequest{
		RequestId: id, TenantSalt: []byte("tenant"), PromptTokens: x.tokens, Hashes: x.hashes(), HashBytes: sha256.Size,
		Role: role, Leg: leg, TransferId: "t-" + id,
	}
	if role == enginepb.Role_CONSUMER {
		r.PeerId = "producer"
	}
	for _, o := range options {
		o(r)
	}
	return r
}

// producing is a producer's request in work.
type producing struct {
	e        *testEngine
	id       string
	x        text
	tables   map[string][]uint32
	computed uint64
}

func (e *testEngine) beginProducer(id string, x text, leg enginepb.Leg, options ...beginOption) (*producing, *enginepb.BeginReply) {
	e.t.Helper()
	reply, err := e.c.Begin(ctxFor(e.t), e.request(id, x, enginepb.Role_PRODUCER, leg, options...))
	require.NoError(e.t, err)
	return &producing{e: e, id: id, x: x, tables: map[string][]uint32{}}, reply
}

// step computes up to token n and stores it; the first may start at a native prefix.
func (p *producing) step(n uint64, native uint64) uint64 {
	p.e.t.Helper()
	m := &enginepb.StoreRequest{RequestId: p.id, ComputedTokens: n, NativeTokens: native}
	for _, group := range []string{"sliding", "full"} {
		from := len(p.tables[group])
		to := int((n + blockTokens - 1) / blockTokens)
		ids := p.e.take(group, to-from)
		p.tables[group] = append(p.tables[group], ids...)
		dead := 0 // blocks that attention does not read at native are not there
		if group == "sliding" && native >= window {
			dead = int(native-window+1) / blockTokens
		}
		for b := int(p.computed / blockTokens); b < to; b++ {
			if p.write(group, b, n); b < dead {
				clear(p.e.c.Region(group).Block(p.tables[group][b]))
			}
		}
		if from < dead {
			from, ids = dead, ids[dead-from:]
		}
		m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: group, FirstBlock: uint32(from), Ids: ids})
	}
	job, err := p.e.c.Store(ctxFor(p.e.t), m)
	require.NoError(p.e.t, err)
	p.computed = n
	return job
}

// write fills a block as far as its tokens are computed. The rest holds what must never
// be copied.
func (p *producing) write(group string, b int, computed uint64) {
	mem, want := p.e.c.Region(group).Block(p.tables[group][b]), p.x.block(group, b)
	whole := min(blockBytes, (computed-uint64(b)*blockTokens)*(blockBytes/blockTokens))
	copy(mem, want[:whole])
	for i := whole; i < blockBytes; i++ {
		mem[i] = ^want[i]
	}
}

// settle waits for a store and then spoils the blocks that have left the window.
func (p *producing) settle(job uint64) *enginepb.Event {
	p.e.t.Helper()
	ev, err := p.e.c.Wait(ctxFor(p.e.t), job)
	require.NoError(p.e.t, err)
	for b, id := range p.tables["sliding"] {
		if uint64(b+1)*blockTokens+window <= p.computed {
			clear(p.e.c.Region("sliding").Block(id))
		}
	}
	return ev
}

func (p *producing) finish(abort bool) *enginepb.FinishReply {
	p.e.t.Helper()
	reply, err := p.e.c.Finish(ctxFor(p.e.t), &enginepb.FinishRequest{RequestId: p.id, Abort: abort})
	require.NoError(p.e.t, err)
	return reply
}

// produce runs a whole prompt in steps of 48 tokens.
func (e *testEngine) produce(id string, x text, leg enginepb.Leg, options ...beginOption) *enginepb.FinishReply {
	e.t.Helper()
	p, _ := e.beginProducer(id, x, leg, options...)
	for n := uint64(0); n < x.tokens; {
		n = min(n+48, x.tokens)
		ev := p.settle(p.step(n, 0))
		require.True(e.t, ev.Ok, ev.Error)
	}
	return p.finish(false)
}

// consuming is a consumer's request in work.
type consuming struct {
	e      *testEngine
	id     string
	x      text
	reply  *enginepb.BeginReply
	tables map[string]map[int]uint32
}

func (e *testEngine) beginConsumer(id string, x text, leg enginepb.Leg, options ...beginOption) *consuming {
	e.t.Helper()
	reply, err := e.c.Begin(ctxFor(e.t), e.request(id, x, enginepb.Role_CONSUMER, leg, options...))
	require.NoError(e.t, err)
	return &consuming{e: e, id: id, x: x, reply: reply, tables: map[string]map[int]uint32{}}
}

// load names fresh blocks for what is demanded and waits for the event.
func (c *consuming) load() *enginepb.Event {
	c.e.t.Helper()
	return c.wait(c.startLoad())
}

func (c *consuming) startLoad() uint64 {
	c.e.t.Helper()
	m := &enginepb.LoadRequest{RequestId: c.id}
	for _, g := range slices.Concat(c.reply.Demand, c.reply.Fallback) {
		if c.tables[g.Group] == nil {
			c.tables[g.Group] = map[int]uint32{}
		}
		for _, r := range g.Chunks {
			first := int(r.First) * chunkBlocks[g.Group]
			ids := c.e.take(g.Group, int(r.Last-r.First+1)*chunkBlocks[g.Group])
			for i, id := range ids {
				c.tables[g.Group][first+i] = id
			}
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.Group, FirstBlock: uint32(first), Ids: ids})
		}
	}
	job, err := c.e.c.Load(ctxFor(c.e.t), m)
	require.NoError(c.e.t, err)
	return job
}

func (c *consuming) wait(job uint64) *enginepb.Event {
	c.e.t.Helper()
	ev, err := c.e.c.Wait(ctxFor(c.e.t), job)
	require.NoError(c.e.t, err)
	c.compare(ev.ResumeTokens)
	return ev
}

// compare holds every byte that attention reads at a resume point above the local
// prefix, which the tests leave at 0, against the text.
func (c *consuming) compare(resume uint64) {
	c.e.t.Helper()
	for _, group := range []string{"sliding", "full"} {
		first := uint64(0)
		if group == "sliding" && resume >= window {
			first = (resume - window + 1) / blockTokens
		}
		for b := int(first); uint64(b)*blockTokens < resume; b++ {
			id, ok := c.tables[group][b]
			require.True(c.e.t, ok, "group %s block %d is read at %d and was not loaded", group, b, resume)
			require.Equal(c.e.t, c.x.block(group, b), c.e.c.Region(group).Block(id), "group %s block %d", group, b)
		}
	}
}

func (c *consuming) finish() *enginepb.FinishReply {
	c.e.t.Helper()
	reply, err := c.e.c.Finish(ctxFor(c.e.t), &enginepb.FinishRequest{RequestId: c.id})
	require.NoError(c.e.t, err)
	return reply
}

// hit asserts that the plan was above 0 and that it was reached.
func hit(t *testing.T, c *consuming, ev *enginepb.Event) {
	t.Helper()
	require.Empty(t, c.reply.Note)
	require.Positive(t, c.reply.ResumeTokens)
	require.True(t, ev.Ok, ev.Error)
	require.Equal(t, c.reply.ResumeTokens, ev.ResumeTokens)
	require.Empty(t, ev.Failures)
}

// causes counts the failures of an event by cause.
func causes(ev *enginepb.Event) map[string]int {
	out := map[string]int{}
	for _, f := range ev.Failures {
		out[f.Cause]++
	}
	return out
}

// serves asserts that both nodes still do their work.
func serves(t *testing.T, producer, consumer *Node) {
	t.Helper()
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND, enginepb.Leg_PROBE} {
		id := fmt.Sprintf("after-%v-%d", leg, requestNumber.Add(1))
		x := text{id, 200}
		p.produce(id, x, leg)
		r := c.beginConsumer(id, x, leg)
		hit(t, r, r.load())
		r.finish()
	}
	require.NoError(t, p.c.Close())
	require.NoError(t, c.c.Close())
	clean(t, producer, consumer)
}

func counter(n *Node, name string, labels ...string) float64 {
	vec := map[string]*prometheus.CounterVec{
		"transferred": n.metrics.Transferred, "demanded": n.metrics.Demanded, "supplied": n.metrics.Supplied,
		"unmatched": n.metrics.Unmatched, "checksum": n.metrics.Checksum, "no_room": n.metrics.NoRoom, "requests": n.metrics.Requests,
		"waits": n.metrics.Waits, "parked_freed": n.metrics.ParkedFreed, "peer_ended": n.metrics.PeerEnded,
	}[name]
	var m dto.Metric
	if err := vec.WithLabelValues(labels...).Write(&m); err != nil {
		panic(err)
	}
	return m.Counter.GetValue()
}

// flipInSlab inverts one bit of the copy of content that a node's slab holds.
func flipInSlab(t *testing.T, n *Node, content []byte) {
	t.Helper()
	st, err := os.Stat(n.Addresses().Slab)
	require.NoError(t, err)
	m, err := shm.Map(n.Addresses().Slab, 0, st.Size())
	require.NoError(t, err)
	defer m.Close()
	i := bytes.Index(m.Bytes(), content)
	require.GreaterOrEqual(t, i, 0, "the slab does not hold the content")
	m.Bytes()[i+len(content)/2] ^= 0x10
}

// A proxy stands in front of a port. What comes back from the port passes through edit,
// when it is set, and after cutBytes of it every connection is closed for good.
type proxy struct {
	l        net.Listener
	target   atomic.Value // string
	cutBytes atomic.Int64 // left until the cut; below 0 = cut
	onCut    func()
	frames   bool // parse data frames, to flip a payload byte
	flip     atomic.Bool
	frozen   atomic.Bool // keep everything back, in both directions

	mu    sync.Mutex
	conns []net.Conn
	dead  bool
	wg    sync.WaitGroup
}

func startProxy(t *testing.T) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{l: l}
	p.cutBytes.Store(1 << 60)
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.pass(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) cut() {
	p.frozen.Store(false)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}

func (p *proxy) mend() {
	p.mu.Lock()
	p.dead = false
	p.mu.Unlock()
	p.cutBytes.Store(1 << 60)
}

func (p *proxy) pass(c net.Conn) {
	defer c.Close()
	target, _ := p.target.Load().(string)
	if target == "" {
		return
	}
	s, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer s.Close()
	p.mu.Lock()
	if p.dead {
		p.mu.Unlock()
		return
	}
	p.conns = append(p.conns, c, s)
	p.mu.Unlock()
	p.wg.Go(func() {
		_, _ = io.Copy(s, thawed{c, p})
		s.Close()
	})
	if p.frames {
		p.passFrames(c, thawed{s, p})
		return
	}
	_, _ = io.Copy(c, thawed{s, p})
}

// thawed gives nothing while its proxy is frozen.
type thawed struct {
	io.Reader
	p *proxy
}

func (r thawed) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	for r.p.frozen.Load() && err == nil {
		time.Sleep(time.Millisecond)
	}
	return n, err
}

// passFrames forwards the data plane's bytes batch by batch: headers of 48 bytes, each
// of which says how many more follow it, then their payloads.
func (p *proxy) passFrames(c io.Writer, s io.Reader) {
	if _, err := io.CopyN(c, s, 16); err != nil { // the answer to hello
		return
	}
	const headerBytes = 48
	for {
		var heads []byte
		size := 0
		for more := 1; more > 0; {
			head := make([]byte, headerBytes)
			if _, err := io.ReadFull(s, head); err != nil {
				return
			}
			heads = append(heads, head...)
			more = int(binary.LittleEndian.Uint16(head[6:]))
			size += int(binary.LittleEndian.Uint32(head[32:]))
		}
		if size > 1<<20 {
			panic(fmt.Sprintf("the proxy does not understand the data plane: %d bytes of payload, headers %x", size, heads[:headerBytes]))
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(s, body); err != nil {
			return
		}
		if size > 0 && p.flip.CompareAndSwap(true, false) {
			body[min(100, len(body)-1)] ^= 1 // in the first chunk of the batch
		}
		before := p.cutBytes.Add(-int64(size)) + int64(size)
		if int64(size) > before { // in the middle of a chunk
			_, _ = c.Write(append(heads, body[:max(0, before)]...))
			if p.onCut != nil {
				p.onCut()
			}
			p.cut()
			return
		}
		if _, err := c.Write(append(heads, body...)); err != nil {
			return
		}
	}
}

// proxied starts a pair whose control and data go through proxies.
func proxied(t *testing.T, options ...nodeOption) (producer, consumer *Node, control, data *proxy) {
	t.Helper()
	control, data = startProxy(t), startProxy(t)
	data.frames = true
	producer = startNode(t, "producer", func(c *config.Config) { c.Advertise = data.addr() })
	control.target.Store(producer.Addresses().Peer)
	data.target.Store(producer.Addresses().Data)
	consumer = startNode(t, "consumer", append(options, withPeer("producer", control.addr()))...)
	ready(t, consumer, "producer")
	return producer, consumer, control, data
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func replace(s, old, new string) string {
	if !strings.Contains(s, old) {
		panic("nothing to replace: " + old)
	}
	return strings.Replace(s, old, new, 1)
}

func transferItem(slot uint32, epoch uint64, seq uint32, b []byte) []transfer.Item {
	return []transfer.Item{{Slot: slot, Epoch: epoch, Seq: seq, Bytes: b, Sum: tier.Checksum(b)}}
}

func metricsCauses() []string { return metrics.Causes() }

// goroutines counts those that run a function, by its name in a stack.
func goroutines(function string) int {
	b := make([]byte, 16<<20)
	return strings.Count(string(b[:runtime.Stack(b, true)]), function)
}

// fresh forgets which blocks are taken. Nothing may be in work.
func (e *testEngine) fresh() { e.next = map[string]uint32{} }
