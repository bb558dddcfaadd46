package e2e

import (
	"encoding/json"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/replay"
)

// A part of the real trace in each leg, then a clean end.
func TestReplayEachLeg(t *testing.T) {
	producer, consumer := pair(t)
	for _, leg := range []string{"pd", "demand", "probe"} {
		r, code := play(producer, consumer, "--trace", trace(), "--requests", "40", "--leg", leg).report()
		require.Zero(t, code)
		require.Equal(t, 40, r.Hits)
		require.Len(t, r.Groups, 2)
		sliding, full := r.Groups[0], r.Groups[1]
		for _, g := range r.Groups {
			require.Zero(t, g.Unmatched, g.Name)
			require.Positive(t, g.Transferred, g.Name)
			require.LessOrEqual(t, g.Transferred, g.Demanded, g.Name)
			require.LessOrEqual(t, g.Demanded, g.Supplied, g.Name)
			require.Equal(t, g.Demanded, g.OwnTier+g.Transferred+g.Unmatched, g.Name)
		}
		require.Less(t, sliding.Supplied*10, full.Supplied, "a window keeps only its tails")
		require.Positive(t, full.OwnTier, "shared prefixes are found in the consumer's own tier")
		require.Positive(t, r.OwnTierBytes)
		require.Equal(t, replay.Node{ID: "producer", Socket: producer.socket()}, r.Producer)
		require.Equal(t, replay.Node{ID: "consumer", Socket: consumer.socket()}, r.Consumer)
		require.Positive(t, r.NativeTokens.Producer, "and in the producer's own blocks")
		require.Positive(t, r.Bytes)
	}
	consumer.stop()
	producer.stop()
}

// One long request, and either daemon killed when more than half of its bytes have
// arrived. The replay ends by itself, and the request is recomputed.
func TestDaemonKilledInMidTransfer(t *testing.T) {
	for _, victim := range []string{"producer", "consumer"} {
		for _, leg := range []string{"pd", "demand", "probe"} {
			t.Run(victim+" "+leg, func(t *testing.T) {
				producer, consumer := pair(t)
				tokens := uint64(0)
				long := writeTrace(t, func(i int, r *replay.Request) bool {
					if tokens == 0 && r.PromptTokens > 80_000 {
						tokens = r.PromptTokens
						return true
					}
					return tokens > 0 && r.PromptTokens < 8_000 && i < 60
				})
				run := play(producer, consumer, "--trace", long, "--leg", leg, "--concurrency", "1")
				const tokenBytes = 2 * 8 * 64 * 2 // K and V, heads, head size, bf16: the full group
				half := float64(tokens*tokenBytes) / 2
				consumer.await("half way through the long request", func() bool { return consumer.pulledBytes() > half })
				map[string]*node{"producer": producer, "consumer": consumer}[victim].kill(syscall.SIGKILL)
				r, _ := run.report()
				require.Positive(t, r.Recomputed, "what was in flight is recomputed")
				if victim == "consumer" {
					require.Equal(t, r.Requests, r.Recomputed, "without a consumer nothing is a hit")
				}
			})
		}
	}
}

// A daemon that was killed comes back, and the next replay hits.
func TestRestartAfterKill(t *testing.T) {
	producer, consumer := pair(t)
	producer.kill(syscall.SIGKILL)
	os.Remove(filepath.Join(producer.dir, "state", "addresses.json"))
	producer.start()
	joined(producer, consumer)
	r, code := play(producer, consumer, "--trace", trace(), "--requests", "5").report()
	require.Zero(t, code)
	require.Equal(t, 5, r.Hits)
}

// Memory that rots: one bit of every stored chunk changes. On the producer it is
// noticed before the chunk is sent, on the consumer before it reaches the engine; both
// end as a recompute by the name checksum, and no wrong byte is read.
func TestFlippedBits(t *testing.T) {
	producer, consumer := pair(t)
	one := writeTrace(t, func(i int, _ *replay.Request) bool { return i == 3 })
	args := []string{"--trace", one, "--leg", "probe", "--salt", "flip"}
	r, _ := play(producer, consumer, args...).report()
	require.Equal(t, 1, r.Hits)

	flipSlots(t, consumer.addresses().Slab)
	r, _ = play(producer, consumer, args...).report()
	require.Equal(t, map[string]int{"checksum": 1}, r.RecomputedCauses, "from the consumer's own tier")

	consumer.stop()
	consumer.start()
	joined(producer, consumer)
	flipSlots(t, producer.addresses().Slab)
	r, _ = play(producer, consumer, args...).report()
	require.Equal(t, map[string]int{"checksum": 1}, r.RecomputedCauses, "from the producer's tier")
}

// flipSlots changes one bit in each slot of a slab.
func flipSlots(t *testing.T, path string) {
	const slotBytes = 256 << 10
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	st, err := f.Stat()
	require.NoError(t, err)
	b := make([]byte, 1)
	for at := int64(slotBytes / 3); at < st.Size(); at += slotBytes {
		_, err = f.ReadAt(b, at)
		require.NoError(t, err)
		b[0] ^= 0x10
		_, err = f.WriteAt(b, at)
		require.NoError(t, err)
	}
}

// Nonsense on every port, and frames that break off. The daemons live on and serve.
func TestGarbageOnEveryPort(t *testing.T) {
	producer, consumer := pair(t)
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 64<<10)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	http2 := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	for _, n := range []*node{producer, consumer} {
		a := n.addresses()
		for _, port := range []struct{ network, address string }{
			{"unix", a.EngineSocket}, {"tcp", a.Peer}, {"tcp", a.Data}, {"tcp", a.HTTP},
		} {
			for _, message := range [][]byte{noise, noise[:1], {}, http2, append(http2, noise...), []byte("GET / HTTP/1.1\r\n\r\n")} {
				c, err := net.Dial(port.network, port.address)
				require.NoError(t, err)
				c.SetDeadline(time.Now().Add(patience))
				c.Write(message) // the daemon may hang up in the middle
				c.Close()
			}
		}
	}
	r, code := play(producer, consumer, "--trace", trace(), "--requests", "4").report()
	require.Zero(t, code)
	require.Equal(t, 4, r.Hits)
	consumer.stop()
	producer.stop()
}

// An engine with another deployment is refused, with both values; so is a peer.
func TestOtherDeploymentIsRefused(t *testing.T) {
	producer, consumer := pair(t)
	text, err := os.ReadFile(demo("deployment.yaml"))
	require.NoError(t, err)
	other := strings.Replace(string(text), "head_dim: 64", "head_dim: 128", 1)
	require.NotEqual(t, string(text), other)

	c, err := engine.Dial(t.Context(), producer.socket())
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Attach(t.Context(), "other", []byte(other), nil)
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.ErrorContains(t, err, "head_dim")
	require.ErrorContains(t, err, "64")
	require.ErrorContains(t, err, "128")

	stranger := newNode(t, "stranger")
	stranger.deployment = filepath.Join(stranger.dir, "other.yaml")
	small := strings.Replace(other, "max_tokens: 131072", "max_tokens: 8192", 1) // a short check
	require.NoError(t, os.WriteFile(stranger.deployment, []byte(small), 0o600))
	stranger.peers = []*node{producer}
	stranger.start()
	logs, err := filepath.Glob(filepath.Join(stranger.dir, "log*"))
	require.NoError(t, err)
	require.Len(t, logs, 1)
	stranger.await("told why no session comes up", func() bool {
		b, err := os.ReadFile(logs[0])
		return err == nil && strings.Contains(string(b), "head_dim")
	})

	r, code := play(producer, consumer, "--trace", trace(), "--requests", "3").report()
	require.Zero(t, code)
	require.Equal(t, 3, r.Hits)
}

// The two deployments that the demo shows being refused, by relation, group and the
// first missing chunk.
func TestRefusedDeployments(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	for file, want := range map[string]struct {
		relation, group string
		prompt          float64
		missing         float64
	}{
		"refused/chunk-level-producer.yaml": {"warm", "sliding", 128, 0},
		"refused/short-tail.yaml":           {"covers", "sliding", 256, 0},
	} {
		if strings.Contains(file, "short-tail") {
			buildShortTail(t)
		}
		out, err := exec.Command(tierd, "check", "--json", demo(file)).Output()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, file)
		require.Equal(t, 1, exit.ExitCode(), file)
		var v struct {
			Verdict        string
			Counterexample map[string]any
		}
		require.NoError(t, json.Unmarshal(out, &v))
		require.Equal(t, "refused", v.Verdict)
		require.Equal(t, want.relation, v.Counterexample["relation"], file)
		require.Equal(t, want.group, v.Counterexample["group"], file)
		require.Equal(t, want.prompt, v.Counterexample["prompt_tokens"], file)
		t.Logf("%s: missing %v", file, v.Counterexample["missing"])
		require.Equal(t, want.missing, firstNumber(v.Counterexample["missing"]), file)
	}
}

// The counterexample in the README is what the command prints.
func TestReadmeShowsTheCounterexample(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	buildShortTail(t)
	out, _ := exec.Command(tierd, "check", demo("refused/short-tail.yaml")).Output() // status 1
	head, drawn, found := strings.Cut(string(out), "refused by")
	require.True(t, found, string(out))
	drawn, _, found = strings.Cut(drawn, "\n\n  rules ")
	require.True(t, found, string(out))
	readme, err := os.ReadFile(filepath.Join(repo(), "README.md"))
	require.NoError(t, err)
	shown := ""
	for line := range strings.Lines(head + "refused by" + drawn) {
		if line != "\n" {
			line = "    " + line
		}
		shown += line
	}
	require.Contains(t, string(readme), shown)
}

// The deployment beside the example of a rule is whole: with the rule built, it is accepted.
func TestExampleRuleIsAccepted(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	dir := t.TempDir()
	buildRule(t, "window-go", filepath.Join(dir, "rule.wasm"))
	text, err := os.ReadFile(filepath.Join(repo(), "examples", "window-go", "deployment.yaml"))
	require.NoError(t, err)
	path := filepath.Join(dir, "deployment.yaml")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	out, err := exec.Command(tierd, "check", path).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "my-window 1.0.0 {window: 130} from "+filepath.Join(dir, "rule.wasm"))
}

// Where a replay could only recompute everything, it says why at its start.
func TestReplayRefusesAtStart(t *testing.T) {
	if testing.Short() {
		t.Skip("starts real processes")
	}
	require.NoError(t, program())
	text, err := os.ReadFile(demo("deployment.yaml"))
	require.NoError(t, err)
	small := strings.Replace(string(text), "max_tokens: 131072", "max_tokens: 1024", 1) // a short check
	small = strings.Replace(small, "align_tokens: 4096", "align_tokens: 1024", 1)
	small = strings.Replace(small, "legs: [pd, demand, probe]", "legs: [probe]", 1)
	path := filepath.Join(t.TempDir(), "small.yaml")
	require.NoError(t, os.WriteFile(path, []byte(small), 0o600))
	one := writeTrace(t, func(_ int, r *replay.Request) bool { return r.PromptTokens < 1000 })
	a, b := newNode(t, "a"), newNode(t, "b") // they do not know each other
	a.deployment, b.deployment = path, path
	a.start()
	b.start()
	for want, args := range map[string][]string{
		"are the same socket":                {"--trace", one, "--leg", "probe", "--consumer", a.socket()},
		`node "a", but peer-id is "nobody"`:  {"--trace", one, "--leg", "probe", "--peer-id", "nobody"},
		`peer "a" is not known to this node`: {"--trace", one, "--leg", "probe"},
		"legs probe":                         {"--trace", one, "--leg", "pd"},
		"conversation_trace_1000.jsonl:1: input_length is 6758 tokens, above max_tokens, 1024": {"--trace", trace(), "--leg", "probe"},
		"the deployment given to replay is sha256:":                                            {"--trace", one, "--leg", "probe", "--deployment", demo("deployment.yaml")},
	} {
		out, said, status := play(a, b, args...).end()
		require.Equal(t, 2, status, "%s%s", out, said)
		var answer struct{ Error string }
		require.NoError(t, json.Unmarshal([]byte(out), &answer), "play asks for JSON")
		require.Contains(t, answer.Error, want)
		require.Equal(t, "tierd replay: "+answer.Error+"\n", said)
	}
}

// A replay that is interrupted reports what it has played.
func TestReplayInterrupted(t *testing.T) {
	producer, consumer := pair(t)
	for _, s := range []struct {
		signal syscall.Signal
		status int
	}{{syscall.SIGINT, 130}, {syscall.SIGTERM, 143}} {
		before := consumer.pulledBytes()
		p := play(producer, consumer, "--trace", trace(), "--requests", "400", "--salt", s.signal.String())
		consumer.await("pulling", func() bool { return consumer.pulledBytes() > before+100e6 })
		require.NoError(t, p.cmd.Process.Signal(s.signal))
		r, status := p.report()
		require.Equal(t, s.status, status)
		require.Positive(t, r.Requests)
		require.Positive(t, r.RequestsLeft)
		require.Equal(t, 400, r.Requests+r.RequestsLeft)
	}
	consumer.stop()
	producer.stop()
}

func firstNumber(v any) float64 {
	switch v := v.(type) {
	case float64:
		return v
	case []any:
		if len(v) > 0 {
			return firstNumber(v[0])
		}
	case map[string]any:
		return firstNumber(v["first"])
	}
	return -1
}

// buildShortTail builds the demo's rule file, once: tests that read it run side by side.
func buildShortTail(t *testing.T) {
	shortTail.Do(func() { buildRule(t, "short-tail", demo("refused/short-tail.wasm")) })
	require.FileExists(t, demo("refused/short-tail.wasm"))
}

var shortTail sync.Once

// buildRule builds one of the examples as WebAssembly.
func buildRule(t *testing.T, example, to string) {
	cmd := exec.Command("go", "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", to, ".")
	cmd.Dir = filepath.Join(repo(), "examples", example)
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0", "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}

// What cannot be decided is no verdict: status 2 and one message.
func TestUndecided(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	text, err := os.ReadFile(demo("deployment.yaml"))
	require.NoError(t, err)
	for want, change := range map[string][2]string{
		"no-such-rule": {"rule: window", "rule: no-such-rule"},
		"window":       {"window: 128", "window: 0"},
		"max_token":    {"max_tokens", "max_token"},
	} {
		path := filepath.Join(t.TempDir(), "d.yaml")
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(text), change[0], change[1], 1)), 0o600))
		out, err := exec.Command(tierd, "check", path).CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, 2, exit.ExitCode())
		require.Contains(t, string(out), want)
		require.Equal(t, 1, strings.Count(string(out), "\n"), "one clear message: %s", out)
	}
}
