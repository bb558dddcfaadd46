package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/daemontest"
	"github.com/tierd/tierd/host/replay"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/plugins/zoo"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/module"
)

// serving is a small deployment whose sliding group has its rule from a file.
const serving = `model: serving
max_tokens: 4096
align_tokens: 1024
groups:
  - {name: sliding, rule: "./rule.wasm#window", params: {window: 128}, block_tokens: 16, chunk_blocks: 8, layers: 1, kv_heads: 8, head_dim: 64, dtype: bf16}
  - {name: full, rule: full, block_tokens: 16, chunk_blocks: 8, layers: 1, kv_heads: 8, head_dim: 64, dtype: bf16}
policies: [{rule: request-level}]
`

// caged is the deployment that an animal of the zoo is put into.
const caged = `model: caged
max_tokens: 48
align_tokens: 16
groups:
  - {name: cage, rule: ./%s.wasm, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
`

// grownBytesMax is how much resident memory a daemon may have more after the zoo than
// before. The garbage collector gives memory back late; one instance of a module may take
// 16 MiB, and a check has two for each worker.
const grownBytesMax = 128 << 20

// served writes the deployment and its good rule, and returns the deployment's path.
func served(t *testing.T) (deployment, rule string, good []byte) {
	dir := t.TempDir()
	good, err := module.Wasm()
	require.NoError(t, err)
	deployment, rule = filepath.Join(dir, "d.yaml"), filepath.Join(dir, "rule.wasm")
	require.NoError(t, os.WriteFile(rule, good, 0o600))
	require.NoError(t, os.WriteFile(deployment, []byte(serving), 0o600))
	return deployment, rule, good
}

// short are the requests of the trace that the deployment allows.
func short(_ int, r *replay.Request) bool { return r.PromptTokens < 4096 }

// TestZooOnDisk: while two daemons serve, each animal in turn takes the place of their
// rule's file, and they are told to read their configuration again. Some of them are also
// given to a daemon that starts, which must say what is wrong and end. The daemons go on
// with the rules that they have checked, and a good file serves again.
func TestZooOnDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("starts real processes")
	}
	require.NoError(t, program())
	deployment, rule, good := served(t)
	requests := writeTrace(t, short)
	producer, consumer := newNode(t, "producer"), newNode(t, "consumer")
	producer.peers, consumer.peers = []*node{consumer}, []*node{producer}
	producer.deployment, consumer.deployment = deployment, deployment
	producer.start()
	consumer.start()
	joined(producer, consumer)

	rounds := 0
	traffic := func() *playing {
		rounds++
		return play(producer, consumer, "--trace", requests, "--requests", "60", "--rate", "25", "--salt", fmt.Sprint(rounds), "--leg", [...]string{"pd", "probe"}[rounds%2])
	}
	finish := func(p *playing) {
		r, status := p.report()
		require.Zero(t, status)
		require.Equal(t, r.Requests, r.Hits)
	}
	finish(traffic()) // what is allocated once is allocated
	nodes := []*node{producer, consumer}
	memory, routines := map[*node]int64{}, map[*node]float64{}
	for _, n := range nodes {
		memory[n], routines[n] = anonymousBytes(t, n.Cmd.Process.Pid), n.metric("go_goroutines")
	}

	playing := traffic()
	for i, c := range zoo.Modules() {
		require.NoError(t, os.WriteFile(rule, c.Wasm, 0o600))
		for _, n := range nodes {
			require.NoError(t, n.Cmd.Process.Signal(syscall.SIGHUP))
		}
		for _, n := range nodes {
			n.await("told to read again", func() bool { return strings.Count(n.log(), "peers and log level read again") > i })
		}
		if i%12 == 0 {
			startCaged(t, c)
		}
		select {
		case err := <-playing.done:
			playing.done <- err
			finish(playing)
			playing = traffic()
		default:
		}
	}
	finish(playing)
	require.Greater(t, rounds, 1)
	for _, n := range nodes {
		require.Less(t, anonymousBytes(t, n.Cmd.Process.Pid), memory[n]+grownBytesMax, n.id)
		n.await("back to as few goroutines as before", func() bool { return n.metric("go_goroutines") <= routines[n]+2 })
	}

	// With an animal in place of the rule a daemon does not come back; with the rule it does.
	consumer.stop()
	require.NoError(t, os.WriteFile(rule, []byte("not a module"), 0o600))
	said, status := startOnce(t, filepath.Join(consumer.dir, "node.yaml"))
	require.Equal(t, 2, status, said)
	require.Contains(t, said, "not WebAssembly")
	require.NoError(t, os.WriteFile(rule, good, 0o600))
	consumer.start()
	joined(producer, consumer)
	finish(traffic())
	consumer.stop()
	producer.stop()
}

// startCaged starts a daemon with an animal for a rule.
func startCaged(t *testing.T, c zoo.Crime) {
	if c.Harmless {
		return // it would serve
	}
	dir, err := os.MkdirTemp("", "tierd-e2e-") // short: a socket's path is limited
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	require.NoError(t, os.WriteFile(filepath.Join(dir, c.Name+".wasm"), c.Wasm, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "d.yaml"), fmt.Appendf(nil, caged, c.Name), 0o600))
	path := filepath.Join(dir, "node.yaml")
	require.NoError(t, os.WriteFile(path, nodeFile("caged", dir, filepath.Join(dir, "d.yaml"), "127.0.0.1:0", 1<<20, nil), 0o600))
	said, status := startOnce(t, path)
	require.Equal(t, 2, status, said)
	require.Contains(t, said, goldenLine(t, c.Name), "what TestMessages of plugins/zoo holds")
	left, err := filepath.Glob(filepath.Join(dir, "tierd-caged", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// startOnce runs tierd serve, which must end by itself, and returns what it said.
func startOnce(t *testing.T, path string) (said string, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, tierd, "serve", "-c", path).CombinedOutput()
	require.NoError(t, ctx.Err(), "it hangs: %s", out)
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, string(out))
	return string(out), exit.ExitCode()
}

// goldenLine is the first line of what is said of an animal, behind the file's name.
func goldenLine(t *testing.T, name string) string {
	text, err := os.ReadFile(filepath.Join(repo(), "plugins", "zoo", "testdata", "messages.txt"))
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "## "+name+": ")
	require.True(t, found, name)
	line := strings.Split(section, "\n")[2]
	if _, after, found := strings.Cut(line, "DIR/"+name+".wasm: "); found {
		return after
	}
	_, after, _ := strings.Cut(line, "cage")
	return after
}

// nodeFile is a node's configuration.
func nodeFile(id, dir, deployment, control string, slabBytes int, peers map[string]string) []byte {
	b := fmt.Appendf(nil, "node_id: %s\nstate_dir: %s\nengine_socket: %s\npeer_listen: %s\ndata_listen: 127.0.0.1:0\nhttp_listen: 127.0.0.1:0\nslab_bytes: %d\nslab_dir: %s\ndeployment: %s\n",
		id, filepath.Join(dir, "state"), filepath.Join(dir, "s"), control, slabBytes, dir, deployment)
	for peer, address := range peers {
		b = fmt.Appendf(b, "peers:\n  - {id: %s, control: %q}\n", peer, address)
	}
	return b
}

// patient are deadlines that a busy machine keeps: what is judged is not how fast a request
// is beside modules that take all the processor time that they get, but that none fails.
const patient = `deadlines: {request_ms: 120000, lookup_ms: 60000, connect_ms: 60000, ping_ms: 1000, suspect_ms: 60000, dead_ms: 90000, transfer_ms: 60000, pending_ms: 60000}
`

// traffic plays requests between two nodes of this process.
type traffic struct {
	replay.Options
	rounds  atomic.Int64
	slowest float64 // pull, in milliseconds
}

// run plays all requests once, in the other leg than the time before.
func (f *traffic) run(ctx context.Context) error {
	n := f.rounds.Add(1)
	o := f.Options
	o.Salt, o.Leg = fmt.Sprint(n), [...]string{"pd", "probe"}[n%2]
	r, err := replay.Run(ctx, o)
	if err != nil {
		return err
	}
	f.slowest = max(f.slowest, r.PullMS.Max)
	if r.Hits != r.Requests || r.WrongBytes != 0 {
		return fmt.Errorf("%d of %d requests were hits, %d wrong bytes; recomputed: %v", r.Hits, r.Requests, r.WrongBytes, r.RecomputedCauses)
	}
	return nil
}

// inside starts two nodes in this process.
func inside(t *testing.T, deployment string) *traffic {
	all, err := replay.LoadTrace(trace(), 0)
	require.NoError(t, err)
	// Not as fast as it can: it is to go on for as long as the zoo takes.
	f := &traffic{Options: replay.Options{Concurrency: 2, PeerID: "a", RequestsPerSecond: 25}}
	for i := range all {
		if short(i, &all[i]) && len(f.Requests) < 60 {
			f.Requests = append(f.Requests, all[i])
		}
	}
	controls := map[string]string{"a": daemontest.FreeAddress(t), "b": daemontest.FreeAddress(t)}
	sockets := map[string]string{}
	for id, other := range map[string]string{"a": "b", "b": "a"} {
		dir, err := os.MkdirTemp(sharedMemory(), "tierd-e2e-")
		require.NoError(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		path := filepath.Join(dir, "node.yaml")
		file := nodeFile(id, dir, deployment, controls[id], 512<<20, map[string]string{other: controls[other]})
		require.NoError(t, os.WriteFile(path, append(file, patient...), 0o600))
		cfg, err := config.Load(path)
		require.NoError(t, err)
		n, err := host.Start(t.Context(), cfg, slog.New(slog.NewTextHandler(io.Discard, nil)))
		require.NoError(t, err)
		t.Cleanup(func() { n.Close(context.Background()) })
		sockets[id] = n.Addresses().EngineSocket
	}
	f.Producer, f.Consumer = sockets["a"], sockets["b"]
	require.Eventually(t, func() bool { return f.run(t.Context()) == nil }, patience, 50*time.Millisecond, "the nodes never serve")
	return f
}

// TestZooInside: two nodes in this process serve, while every animal is opened and checked
// in the same process, by what a daemon opens its rules with. No request fails, memory and
// goroutines are what they were.
func TestZooInside(t *testing.T) {
	if testing.Short() {
		t.Skip("moves gigabytes")
	}
	deployment := filepath.Join(t.TempDir(), "d.yaml")
	require.NoError(t, os.WriteFile(deployment, []byte(strings.Replace(serving, "./rule.wasm#window", "window", 1)), 0o600))
	f := inside(t, deployment)
	cages(t, deployment) // once before, so that what is allocated once is
	before, routines := anonymousBytes(t, os.Getpid()), runtime.NumGoroutine()

	stop, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			if err := f.run(context.Background()); err != nil {
				failed <- err
				return
			}
			select {
			case <-stop:
				failed <- nil
				return
			default:
			}
		}
	}()
	served, largest := f.rounds.Load(), int64(0)
	dir := t.TempDir()
	for pass := 0; pass == 0 || f.rounds.Load() < served+roundsMin; pass++ { // both legs meet the zoo
		for _, c := range zoo.Modules() {
			err := cage(t, dir, c)
			require.Equal(t, c.Harmless, err == nil, "%s: %v", c.Name, err)
			largest = max(largest, anonymousBytes(t, os.Getpid()))
		}
		if len(failed) > 0 {
			break
		}
	}
	close(stop)
	require.NoError(t, <-failed, "a request failed beside the zoo")
	t.Logf("%d rounds of %d requests, the slowest pull %.0f ms; %d MiB before, at most %d MiB", f.rounds.Load()-served, len(f.Requests), f.slowest, before>>20, largest>>20)
	require.Less(t, largest-before, int64(insideBytesMax))
	debug.FreeOSMemory()
	require.Less(t, anonymousBytes(t, os.Getpid())-before, int64(grownBytesMax))
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= routines+2 }, patience, 20*time.Millisecond, "goroutines are left")
	require.NoError(t, f.run(t.Context()))
}

// roundsMin is how many rounds of requests are begun while the zoo is opened.
const roundsMin = 4

// insideBytesMax is how much more memory the process may take while the zoo is opened: a
// module of 8 MiB takes the compiler some ten times that, and the garbage between two
// collections as much again.
const insideBytesMax = 512 << 20

// cage opens and checks an animal as a daemon does.
func cage(t *testing.T, dir string, c zoo.Crime) error {
	path := filepath.Join(dir, c.Name+".wasm")
	require.NoError(t, os.WriteFile(path, c.Wasm, 0o600))
	defer os.Remove(path)
	d, err := deploy.Parse(filepath.Join(dir, "d.yaml"), fmt.Appendf(nil, caged, c.Name))
	require.NoError(t, err)
	r, err := rules.Register(context.Background(), d, rules.Options{Check: check.Options{Workers: 1}})
	if err != nil {
		return err
	}
	return r.Close(context.Background())
}

// cages opens a good module, one that traps and the deployment's own rules.
func cages(t *testing.T, deployment string) {
	dir := t.TempDir()
	require.NoError(t, cage(t, dir, zoo.Crime{Name: "good", Wasm: zoo.Good()}))
	require.Error(t, cage(t, dir, zoo.Crime{Name: "bad", Wasm: zoo.Good()[:100]}))
	d, err := deploy.Load(deployment)
	require.NoError(t, err)
	d.MaxTokens = 256
	r, err := rules.Register(context.Background(), d, rules.Options{})
	require.NoError(t, errors.Join(err))
	require.NoError(t, r.Close(context.Background()))
}

// anonymousBytes is the resident memory of a process that is no shared memory: the slabs
// and the engines' blocks are filled by the traffic, whatever is opened.
func anonymousBytes(t *testing.T, pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	_, anonymous, _ := strings.Cut(string(b), "RssAnon:")
	kib, err := strconv.ParseInt(strings.Fields(anonymous)[0], 10, 64)
	require.NoError(t, err)
	return kib << 10
}
