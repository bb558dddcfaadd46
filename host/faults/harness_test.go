// Package faults holds the real faults: three daemons of the real program, two sources and
// one consumer, are asked for the requests of a real trace at a fixed rate, and then one
// source is frozen, killed, cut off, made to lie, or its engine dies.
//
// # What is played
//
// The engines are those of package replay: what a block must hold follows from its key, so
// that every byte that reaches the consumer's engine is compared with what was stored.
// Requests begin at fixed times, whether or not the ones before have ended, and name the
// two sources in turn. Each has a tenant salt of its own: nothing but a pull makes it a
// hit. While a source does not take more than a few requests at a time, further ones are
// not computed there; the consumer asks all the same.
//
// # What is measured
//
// A request takes from its Begin to the moment at which the consumer's engine knows where
// to go on; what was already under way when the fault came counts from then. The fault is
// detected when the consumer's status no longer calls the peer ready. After the heal those
// pulls count whose source has computed the request. Every case ends when nothing is pinned
// or being written any more and when the daemons hold no more goroutines and descriptors
// than before.
//
// # How it is run
//
// go test -count=1 plays a slice of under a minute (without it, Go may show the result of an
// older program, which it does not know to be built here); make test-faults plays everything
// and writes ../session/FAULTS.md. Times are asserted at twice the bound, since tests share machines;
// the table marks what missed the bound itself.
package faults

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/daemontest"
	"github.com/tierd/tierd/host/replay"
	"github.com/tierd/tierd/host/status"
	"github.com/tierd/tierd/host/transfer"
)

var (
	full  = flag.Bool("full", false, "play every case in every leg (make test-faults), not the slice of make test")
	table = flag.String("table", "", "write the table to this file")
	only  = flag.String("only", "", "play only the cases whose name matches this expression, with -full")
)

// builtEnv names the directory in which another process has built the program already.
const builtEnv = "TIERD_FAULTS_BUILT"

// The longest that a test waits for something that a healthy machine does in far less.
const patience = time.Minute

var (
	// tierd is the program under test, seed the state directory of one `tierd check`: with
	// its verdict a daemon starts without checking again. deployment is that of all nodes.
	tierd, seed, deployment string
	results                 report
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	if job := os.Getenv(engineEnv); job != "" {
		return engineProcess(job)
	}
	flag.Parse()
	results.began = time.Now()
	dir := os.Getenv(builtEnv)
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "tierd-faults-"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
	}
	tierd, seed, deployment = filepath.Join(dir, "tierd"), filepath.Join(dir, "seed"), filepath.Join(dir, "deployment.yaml")
	code := m.Run()
	if err := results.write(*table); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// program builds the program and checks the deployment: that
// of the demo with a quarter of its heads, so that a request is some megabytes, and with
// half of its tokens, so that the check is short.
var program = sync.OnceValue(func() error {
	if os.Getenv(builtEnv) != "" {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(repo(), "examples", "demo", "deployment.yaml"))
	if err != nil {
		return err
	}
	few := string(text)
	for was, is := range map[string]string{"kv_heads: 8": "kv_heads: 2", "max_tokens: 131072": "max_tokens: 65536"} {
		if !strings.Contains(few, was) {
			return fmt.Errorf("the demo's deployment has no %s", was)
		}
		few = strings.ReplaceAll(few, was, is)
	}
	if err := os.WriteFile(deployment, []byte(few), 0o600); err != nil {
		return err
	}
	return daemontest.Build(tierd, seed, deployment)
})

var repo = daemontest.Repo

// A node is one daemon, or the place of one that is not running.
type node struct {
	t     *testing.T
	id    string
	dir   string
	slabs string
	// control is where peers reach it.
	control string
	// host is its address for data and HTTP.
	host string
	slab int64
	// parked is how long supply waits for a consumer. It is short, so that what a fault has
	// left is gone within the case: that it goes by itself is part of what is tested.
	parked time.Duration
	peers  []peer
	// prefix runs before the program, as "ip netns exec NAME".
	prefix []string
	// insecure: it listens on more than loopback.
	insecure bool
	// client reaches its HTTP port, which is on loopback of the network that it is in.
	client *http.Client

	*daemontest.Daemon
}

type peer struct{ id, control string }

func newNode(t *testing.T, id string) *node {
	const slabBytes = 384 << 20
	n := &node{t: t, id: id, host: "127.0.0.1", control: daemontest.FreeAddress(t), slab: slabBytes, parked: 3 * time.Second, client: http.DefaultClient}
	const room = 5 << 30 // for three nodes and their engines
	n.dir, n.slabs = daemontest.TempDir(t, "", "tierd-f-"+id), daemontest.TempDir(t, daemontest.SharedMemory(room), "tierd-f-")
	require.NoError(t, os.CopyFS(filepath.Join(n.dir, "state"), os.DirFS(seed)))
	return n
}

func (n *node) socket() string     { return filepath.Join(n.dir, "s") }
func (n *node) configFile() string { return filepath.Join(n.dir, "node.yaml") }
func (n *node) stateDir() string   { return filepath.Join(n.dir, "state") }
func (n *node) pid() int           { return n.Cmd.Process.Pid }

func (n *node) configure() {
	var b strings.Builder
	fmt.Fprintf(&b, "node_id: %s\nstate_dir: %s\nengine_socket: %s\npeer_listen: %s\ndata_listen: %s:0\nhttp_listen: 127.0.0.1:0\nslab_bytes: %d\nslab_dir: %s\ndeployment: %s\ndeadlines: {parked_ms: %d}\n",
		n.id, n.stateDir(), n.socket(), n.control, n.host, n.slab, n.slabs, deployment, n.parked.Milliseconds())
	if n.insecure {
		b.WriteString("insecure: true\npeer_cidrs: [10.77.0.0/24, 127.0.0.0/8]\n")
	}
	if len(n.peers) > 0 {
		b.WriteString("peers:\n")
	}
	for _, p := range n.peers {
		fmt.Fprintf(&b, "  - {id: %s, control: %q}\n", p.id, p.control)
	}
	require.NoError(n.t, os.WriteFile(n.configFile(), []byte(b.String()), 0o600))
}

func (n *node) start() {
	n.t.Helper()
	n.configure()
	args := append(append([]string{}, n.prefix...), tierd, "serve", "-c", n.configFile())
	n.Daemon = daemontest.Start(n.t, patience, n.id, n.dir, n.stateDir(), args...)
}

// await polls until ok, and fails the test when that takes longer than patience.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	daemontest.Await(t, patience, what, ok)
}

func (n *node) signal(sig syscall.Signal) {
	n.t.Helper()
	require.NoError(n.t, n.Cmd.Process.Signal(sig))
}

func (n *node) kill() {
	_ = n.Cmd.Process.Signal(syscall.SIGKILL)
	<-n.Exited
}

// reload takes up other peers.
func (n *node) reload(peers ...peer) {
	n.t.Helper()
	n.peers = peers
	n.configure()
	n.signal(syscall.SIGHUP)
}

// get reads a page of the daemon's HTTP port.
func (n *node) get(page string) ([]byte, error) {
	a, err := status.Locate(n.stateDir())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+a.HTTPListen+page, nil)
	if err != nil {
		return nil, err
	}
	resp, err := n.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// status is what the daemon says of itself, or nil while it says nothing.
func (n *node) status() *status.Status {
	body, err := n.get(status.Path)
	if err != nil {
		return nil
	}
	s := &status.Status{}
	if json.Unmarshal(body, s) != nil {
		return nil
	}
	return s
}

// peer is what the daemon says of a peer; the zero value when it knows none of that id.
func (n *node) peer(id string) status.Peer {
	if s := n.status(); s != nil {
		for _, p := range s.Peers {
			if p.ID == id {
				return p
			}
		}
	}
	return status.Peer{}
}

// metric adds up the series of a metric whose labels contain all of parts.
func (n *node) metric(name string, parts ...string) (sum float64) {
	n.t.Helper()
	body, err := n.get("/metrics")
	require.NoError(n.t, err)
	return daemontest.Metric(n.t, body, name, parts...)
}

// A hold is what a daemon holds beside its work. Of a session, gRPC runs two or three
// goroutines more at the side that dialed, so what goroutines there may be depends on which
// sessions this one has dialed.
type hold struct {
	goroutines, descriptors int
	dialed                  int
}

func (n *node) holds() hold {
	return hold{int(n.metric("go_goroutines")), int(n.metric("process_open_fds")), n.dialed()}
}

// dialed is with how many of its peers the node has a session that it dialed itself.
func (n *node) dialed() (count int) {
	b, err := os.ReadFile(n.LogFile)
	require.NoError(n.t, err)
	last := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		if _, rest, ok := strings.Cut(line, `msg="peer session up" peer=`); ok {
			id, _, _ := strings.Cut(rest, " ")
			last[id] = strings.Contains(rest, "dialed=true")
		}
	}
	for _, d := range last {
		if d {
			count++
		}
	}
	return count
}

// dialedMore is by how many goroutines a session may cost more at the side that dialed.
const dialedMore = 3

// busy says what a daemon still has in work; "" when nothing.
func (n *node) busy() string {
	s := n.status()
	if s == nil {
		return "no status"
	}
	pins := 0
	for _, p := range s.Pins {
		pins += p.Count
	}
	waits := 0
	for _, w := range s.Waits {
		waits += w.InWork
	}
	if pins+waits+s.Slots.Writing+s.Slots.Detached+s.Slots.Fenced+s.Requests+s.Parked.Chunks+s.Parked.Transfers == 0 {
		return ""
	}
	return fmt.Sprintf("%d pins, %d slots in state writing, %d detached, %d fenced, %d requests, %d waits, %d chunks and %d transfers parked",
		pins, s.Slots.Writing, s.Slots.Detached, s.Slots.Fenced, s.Requests, waits, s.Parked.Chunks, s.Parked.Transfers)
}

// linked says whether the node has every session and data connection that it will have.
func (n *node) linked() bool {
	s := n.status()
	if s == nil || len(s.Peers) < len(n.peers) {
		return false
	}
	for _, p := range s.Peers {
		if p.State != "ready" || p.DataLanes != transfer.DefaultLanes {
			return false
		}
	}
	return true
}

// A cluster is two sources and a consumer.
type cluster struct {
	t       *testing.T
	a, b, c *node
	// sources are the engines at a and b.
	sources map[string]*source
	engine  *replay.Engine // at c
	next    int            // number of the next play
	before  map[*node]hold
	pids    map[*node]int
}

// newCluster starts the daemons. shape, when set, changes them before.
func newCluster(t *testing.T, shape func(c *cluster)) *cluster {
	t.Helper()
	require.NoError(t, program())
	c := &cluster{t: t, a: newNode(t, "a"), b: newNode(t, "b"), c: newNode(t, "c"), sources: map[string]*source{}}
	for _, s := range []*node{c.a, c.b} {
		s.peers = []peer{{"c", c.c.control}}
	}
	c.c.peers = []peer{{"a", c.a.control}, {"b", c.b.control}}
	if shape != nil {
		shape(c)
	}
	for _, n := range []*node{c.a, c.b, c.c} {
		n.start()
	}
	for _, n := range []*node{c.a, c.b} {
		c.sources[n.id] = newSource(n)
		require.NoError(t, c.sources[n.id].attach())
	}
	c.attach()
	t.Cleanup(func() {
		c.engine.Close()
		for _, s := range c.sources {
			s.detach()
		}
	})
	c.joined()
	return c
}

// attach attaches the engine at c.
func (c *cluster) attach() {
	c.t.Helper()
	e, err := replay.AttachEngine(c.t.Context(), "the engine at c", c.c.socket(), trace(), liveConsumer, callLimit)
	require.NoError(c.t, err)
	if c.engine != nil {
		c.engine.Close()
	}
	c.engine = e
}

// joined waits until the consumer has sessions and data connections with both sources.
func (c *cluster) joined() {
	c.t.Helper()
	for _, id := range []string{"a", "b"} {
		await(c.t, "c in session with "+id, func() bool {
			p := c.c.peer(id)
			return p.State == "ready" && p.DataLanes > 0
		})
	}
}

// nodes that live.
func (c *cluster) nodes() []*node { return []*node{c.a, c.b, c.c} }

// idle waits until nothing is in work anywhere, and notes what the daemons hold then.
func (c *cluster) idle() {
	c.t.Helper()
	c.before, c.pids = map[*node]hold{}, map[*node]int{}
	for _, n := range c.nodes() {
		await(c.t, n.id+" idle", func() bool { return n.busy() == "" && n.linked() })
	}
	// Behind all of them: each has connections that others dial.
	for _, n := range c.nodes() {
		c.before[n], c.pids[n] = n.holds(), n.pid()
	}
}

// leaked waits until no node has anything in work and none holds more than before, and
// says what is left after as long as that may take. Of a process that is new there is no
// before.
func (c *cluster) leaked() (left []string) {
	const limit = 20 * time.Second // parked supply, and the lease of 10 s
	deadline := time.Now().Add(limit)
	for {
		left = left[:0]
		for _, n := range c.nodes() {
			if b := n.busy(); b != "" {
				left = append(left, n.id+": "+b)
				continue
			}
			was, now := c.before[n], n.holds()
			was.goroutines += dialedMore * max(0, now.dialed-was.dialed)
			if n.pid() == c.pids[n] && (now.goroutines > was.goroutines || now.descriptors > was.descriptors) {
				left = append(left, fmt.Sprintf("%s: %d goroutines and %d descriptors, %d and %d before", n.id, now.goroutines, now.descriptors, was.goroutines, was.descriptors))
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(20 * time.Millisecond)
	}
}
