// Package e2e runs the real program as real processes: two daemons and a replay.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/daemontest"
	"github.com/tierd/tierd/host/replay"
)

// The longest that a test waits for something that a healthy machine does in far less.
const patience = 2 * time.Minute

// tierd is the program under test, seed the state directory of one `tierd check`: with
// its verdict a daemon starts without checking again.
var tierd, seed string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "tierd-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	tierd, seed = filepath.Join(dir, "tierd"), filepath.Join(dir, "seed")
	return m.Run()
}

// program builds the program once, and checks the demo's deployment.
var program = sync.OnceValue(func() error { return daemontest.Build(tierd, seed, demo("deployment.yaml")) })

var repo = daemontest.Repo

func demo(file string) string { return filepath.Join(repo(), "examples", "demo", file) }

func trace() string {
	return filepath.Join(repo(), "examples", "traces", "conversation_trace_1000.jsonl")
}

// A node is one daemon, or the place of one that is not running.
type node struct {
	t          *testing.T
	id         string
	dir        string
	slabs      string
	deployment string
	control    string // its own control address
	peers      []*node
	*daemontest.Daemon
}

type addresses struct {
	PID          int    `json:"pid"`
	EngineSocket string `json:"engine_socket"`
	Peer         string `json:"peer_listen"`
	Data         string `json:"data_listen"`
	HTTP         string `json:"http_listen"`
	Slab         string `json:"slab"`
}

func newNode(t *testing.T, id string) *node {
	n := &node{t: t, id: id, deployment: demo("deployment.yaml"), control: daemontest.FreeAddress(t)}
	n.dir, n.slabs = daemontest.TempDir(t, "", "tierd-e2e-"+id), daemontest.TempDir(t, sharedMemory(), "tierd-e2e-")
	require.NoError(t, os.CopyFS(filepath.Join(n.dir, "state"), os.DirFS(seed)))
	return n
}

// sharedMemory has room for two nodes and their engines.
func sharedMemory() string { return daemontest.SharedMemory(3 << 30) }

func (n *node) socket() string { return filepath.Join(n.dir, "s") }

func (n *node) start() {
	var config strings.Builder
	fmt.Fprintf(&config, "node_id: %s\nstate_dir: %s\nengine_socket: %s\npeer_listen: %s\ndata_listen: 127.0.0.1:0\nhttp_listen: 127.0.0.1:0\nslab_bytes: 805306368\nslab_dir: %s\ndeployment: %s\n",
		n.id, filepath.Join(n.dir, "state"), n.socket(), n.control, n.slabs, n.deployment)
	if len(n.peers) > 0 {
		config.WriteString("peers:\n")
	}
	for _, p := range n.peers {
		fmt.Fprintf(&config, "  - {id: %s, control: %q}\n", p.id, p.control)
	}
	path := filepath.Join(n.dir, "node.yaml")
	require.NoError(n.t, os.WriteFile(path, []byte(config.String()), 0o600))
	n.Daemon = daemontest.Start(n.t, patience, n.id, n.dir, filepath.Join(n.dir, "state"), tierd, "serve", "-c", path)
}

// log is what the daemon has logged since it was started last.
func (n *node) log() string {
	b, err := os.ReadFile(n.LogFile)
	require.NoError(n.t, err)
	return string(b)
}

// await polls until ok, and fails the test when that takes longer than patience.
func (n *node) await(what string, ok func() bool) {
	n.t.Helper()
	daemontest.Await(n.t, patience, n.id+" "+what, ok)
}

func (n *node) addresses() (a addresses) {
	b, err := os.ReadFile(filepath.Join(n.dir, "state", "addresses.json"))
	require.NoError(n.t, err)
	require.NoError(n.t, json.Unmarshal(b, &a))
	return a
}

// kill signals the daemon if it runs, waits for its end and returns how it ended.
func (n *node) kill(sig syscall.Signal) error {
	select {
	case <-n.Exited:
		return n.Exit
	default:
	}
	if err := n.Cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		n.t.Fatal(err)
	}
	select {
	case <-n.Exited:
	case <-time.After(patience):
		n.Cmd.Process.Kill()
		n.t.Errorf("%s did not end within %v of signal %v", n.id, patience, sig)
		<-n.Exited
	}
	return n.Exit
}

// stop asks the daemon to end; it must end well and leave no shared memory.
func (n *node) stop() {
	n.t.Helper()
	require.NoError(n.t, n.kill(syscall.SIGTERM))
	left, err := os.ReadDir(n.slabs)
	require.NoError(n.t, err)
	require.Empty(n.t, left, "shared memory left behind")
	require.NoFileExists(n.t, n.socket())
}

// metric adds up the series of a metric whose labels contain all of parts.
func (n *node) metric(name string, parts ...string) (sum float64) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.addresses().HTTP+"/metrics", nil)
	require.NoError(n.t, err)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0 // the daemon is gone
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0
	}
	return daemontest.Metric(n.t, body, name, parts...)
}

func (n *node) pulledBytes() float64 { return n.metric("tierd_kv_offload_tiering_read_bytes_total") }

// pair starts a producer and a consumer that have a session with each other.
func pair(t *testing.T) (producer, consumer *node) {
	if testing.Short() {
		t.Skip("starts real processes")
	}
	require.NoError(t, program())
	producer, consumer = newNode(t, "producer"), newNode(t, "consumer")
	producer.peers, consumer.peers = []*node{consumer}, []*node{producer}
	producer.start()
	consumer.start()
	joined(producer, consumer)
	return producer, consumer
}

// joined waits until both nodes have a session with the other.
func joined(a, b *node) {
	for _, n := range []*node{a, b} {
		n.await("in session with its peer", func() bool { return n.metric("tierd_peer_state", `state="ready"`) == 1 })
	}
}

// A playing is a `tierd replay` that runs.
type playing struct {
	t      *testing.T
	cmd    *exec.Cmd
	out    bytes.Buffer
	errOut bytes.Buffer
	done   chan error
}

func play(producer, consumer *node, args ...string) *playing {
	p := &playing{t: producer.t, done: make(chan error, 1)}
	args = append([]string{"replay", "--json", "--producer", producer.socket(), "--consumer", consumer.socket()}, args...)
	p.cmd = exec.Command(tierd, args...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.errOut
	require.NoError(p.t, p.cmd.Start())
	go func() { p.done <- p.cmd.Wait() }()
	return p
}

// end waits for the replay's end and returns what it wrote.
func (p *playing) end() (out, errOut string, status int) {
	p.t.Helper()
	select {
	case err := <-p.done:
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			status = exit.ExitCode()
		} else {
			require.NoError(p.t, err)
		}
	case <-time.After(2 * patience):
		p.cmd.Process.Kill()
		<-p.done
		p.t.Fatalf("the replay did not end by itself")
	}
	return p.out.String(), p.errOut.String(), status
}

// report is end for a replay that played something. Whatever happened, the requests add
// up, every recompute has a cause, and no byte is wrong.
func (p *playing) report() (r replay.Report, status int) {
	p.t.Helper()
	_, _, status = p.end()
	require.NoError(p.t, json.Unmarshal(p.out.Bytes(), &r), "status %d: %s%s", status, &p.out, &p.errOut)
	p.t.Logf("%s%s", &p.out, &p.errOut)
	require.Equal(p.t, r.Requests, r.Hits+r.Recomputed)
	causes := 0
	for cause, n := range r.RecomputedCauses {
		require.NotEmpty(p.t, cause)
		causes += n
	}
	require.Equal(p.t, r.Recomputed, causes)
	require.Zero(p.t, r.WrongBytes)
	return r, status
}

// writeTrace writes the shipped trace's requests that pick chooses.
func writeTrace(t *testing.T, pick func(i int, r *replay.Request) bool) string {
	all, err := replay.LoadTrace(trace(), 0)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	enc := json.NewEncoder(f)
	for i := range all {
		if pick(i, &all[i]) {
			require.NoError(t, enc.Encode(&all[i]))
		}
	}
	return path
}
