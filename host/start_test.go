package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/lockfile"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

func logInto(l *logTo) *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// warnings are the lines of a log that ask for attention. Tests keep their slabs on disk.
func warnings(log string) (out []string) {
	for line := range strings.Lines(log) {
		if (strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR")) && !strings.Contains(line, "the slab is on disk") {
			out = append(out, line)
		}
	}
	return out
}

func taken(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return l.Addr().String()
}

// TestStartRefusalTexts holds the text of what a node cannot start with against a golden
// file: each names the file, the key, both values and what to change, and comes before
// the check.
func TestStartRefusalTexts(t *testing.T) {
	var got strings.Builder
	port := regexp.MustCompile(`127\.0\.0\.1:\d+`)
	for _, c := range []struct {
		name   string
		change nodeOption
	}{
		{"no directory above state_dir", func(c *config.Config) { c.StateDir += "/none/state" }},
		{"state_dir is a file", func(c *config.Config) { c.StateDir = c.Deployment }},
		{"state_dir in use", func(c *config.Config) {
			require.NoError(t, os.Mkdir(c.StateDir, 0o700))
			l, err := lockfile.Take(filepath.Join(c.StateDir, "lock"), "the daemon of node b (process 12)")
			require.NoError(t, err)
			t.Cleanup(func() { l.Release() })
		}},
		{"no directory for the socket", func(c *config.Config) { c.EngineSocket = filepath.Dir(c.EngineSocket) + "/rum/e.sock" }},
		{"no slab_dir", func(c *config.Config) { c.SlabDir += "m" }},
		{"slab_dir is a file", func(c *config.Config) { c.SlabDir = c.Deployment }},
		{"no deployment", func(c *config.Config) { c.Deployment += "l" }},
		{"http_listen in use", func(c *config.Config) { c.HTTPListen = taken(t) }},
		{"slab below one chunk", func(c *config.Config) { c.SlabBytes = 4095 }},
		{"slab above the most slots", func(c *config.Config) { c.SlabBytes = 1 << 40 }},
		{"no tls files", func(c *config.Config) {
			c.TLS = &config.TLS{Cert: c.File + ".cert", Key: c.File + ".key", CA: c.File + ".ca"}
		}},
		{"data_listen in use", func(c *config.Config) { c.DataListen = taken(t) }},
		{"peer_listen in use", func(c *config.Config) { c.PeerListen = taken(t) }},
		{"engine_socket in use", func(c *config.Config) {
			l, err := engine.Listen(c.EngineSocket)
			require.NoError(t, err)
			t.Cleanup(func() { l.Close() })
		}},
		{"engine_socket is a file", func(c *config.Config) { require.NoError(t, os.WriteFile(c.EngineSocket, nil, 0o600)) }},
	} {
		cfg := testConfig(t, "a")
		c.change(cfg)
		_, err := start(ctxFor(t), cfg, logInto(&logTo{}), func(context.Context, *deploy.Deployment, func(done, total int)) (*registry.Entry, func() error, error) {
			return nil, nil, errors.New("the check has begun")
		})
		require.Error(t, err, c.name)
		text := strings.ReplaceAll(err.Error(), filepath.Dir(cfg.File), "DIR")
		text = strings.ReplaceAll(port.ReplaceAllString(text, "127.0.0.1:PORT"), fmt.Sprintf("process %d ", os.Getpid()), "process PID ")
		fmt.Fprintf(&got, "%s\n    %s\n", c.name, text)
		left, err := os.ReadDir(cfg.SlabDir)
		require.True(t, err != nil || len(left) == 0, "%s: a failed start leaves no memory behind", c.name)
	}
	golden(t, "testdata/start_refusals.txt", got.String())
}

func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(b)
}

// held is a check that goes on until it is let go.
type held struct {
	begun, goOn chan struct{}
	progress    func(done, total int)
}

func newHeld() *held { return &held{begun: make(chan struct{}), goOn: make(chan struct{})} }

func (h *held) judge(ctx context.Context, d *deploy.Deployment, progress func(done, total int)) (*registry.Entry, func() error, error) {
	h.progress = progress
	close(h.begun)
	select {
	case <-h.goOn:
		return unjudged(ctx, d, progress)
	case <-ctx.Done():
		return nil, nil, fmt.Errorf("check: %w", ctx.Err())
	}
}

// TestNothingIsServedBeforeTheVerdict: a daemon that checks answers probes, has its
// ports, and lets in neither peers nor engines.
func TestNothingIsServedBeforeTheVerdict(t *testing.T) {
	h, log := newHeld(), &logTo{}
	cfg := testConfig(t, "producer")
	started := make(chan *Node)
	go func() {
		n, err := start(ctxFor(t), cfg, logInto(log), h.judge)
		if err != nil {
			t.Errorf("%v", err)
		}
		started <- n
	}()
	<-h.begun
	require.Contains(t, log.String(), "level=INFO msg=\"checking deployment\" deployment=tiny file="+cfg.Deployment)
	address := regexp.MustCompile(`http_listen=(\S+)`).FindStringSubmatch(log.String())[1]
	status, _ := get(t, "http://"+address+"/healthz")
	require.Equal(t, 200, status)
	status, body := get(t, "http://"+address+"/readyz")
	require.Equal(t, 503, status)
	require.Equal(t, "not ready: checking deployment tiny: 0 %\n", body)
	h.progress(43, 100)
	h.progress(42, 100) // late
	_, body = get(t, "http://"+address+"/readyz")
	require.Equal(t, "not ready: checking deployment tiny: 43 %\n", body)
	status, body = get(t, "http://"+address+"/metrics")
	require.Equal(t, 200, status)
	require.Contains(t, body, `tierd_tier_slots{state="free"} 1024`)
	require.NoFileExists(t, cfg.EngineSocket)
	require.NoFileExists(t, filepath.Join(cfg.StateDir, addressesFile))

	close(h.goOn)
	n := <-started
	status, _ = get(t, "http://"+address+"/readyz")
	require.Equal(t, 200, status)
	require.FileExists(t, cfg.EngineSocket)
	require.FileExists(t, filepath.Join(cfg.StateDir, addressesFile))
	n.Close(context.Background())
	for _, gone := range []string{cfg.EngineSocket, cfg.EngineSocket + ".lock", filepath.Join(cfg.StateDir, addressesFile), filepath.Join(cfg.StateDir, "lock")} {
		require.NoFileExists(t, gone)
	}
	require.Empty(t, warnings(log.String()))
}

// A peer that dials a node in its check gets no session, and one after it.
func TestPeersWaitForTheVerdict(t *testing.T) {
	h := newHeld()
	cfg := testConfig(t, "producer")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	peer := l.Addr().String() // free again in a moment
	l.Close()
	cfg.PeerListen = peer
	started := make(chan *Node)
	go func() {
		n, err := start(ctxFor(t), cfg, logInto(&logTo{}), h.judge)
		if err != nil {
			t.Errorf("%v", err)
		}
		started <- n
	}()
	<-h.begun
	consumer := startNode(t, "consumer", withPeer("producer", peer), func(c *config.Config) { c.Deadlines.ConnectMS = 100 })
	require.Eventually(t, func() bool { return strings.Contains(consumer.unusable("producer", legPD), "deadlines.connect_ms") }, 30*time.Second, time.Millisecond)
	require.False(t, isReady(consumer, "producer"))
	close(h.goOn)
	n := <-started
	defer n.Close(context.Background())
	ready(t, consumer, "producer")
}

func TestStopWhileChecking(t *testing.T) {
	h, log := newHeld(), &logTo{}
	cfg := testConfig(t, "a", withPeer("b", taken(t)))
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("signal")
	go func() {
		<-h.begun
		cancel(why)
	}()
	_, err := start(ctx, cfg, logInto(log), h.judge)
	var stopped *Stopped
	require.ErrorAs(t, err, &stopped)
	require.Equal(t, "checking", stopped.While)
	require.ErrorIs(t, err, why)
	require.Empty(t, warnings(log.String()))
	for _, gone := range []string{cfg.EngineSocket + ".lock", filepath.Join(cfg.StateDir, "lock")} {
		require.NoFileExists(t, gone)
	}
}

// A start that fails after the first dial of a peer does not blame the peer.
func TestFailedStartBlamesNoPeer(t *testing.T) {
	log := &logTo{}
	cfg := testConfig(t, "a", withPeer("b", taken(t)))
	_, err := start(ctxFor(t), cfg, logInto(log), func(ctx context.Context, d *deploy.Deployment, progress func(done, total int)) (*registry.Entry, func() error, error) {
		require.NoError(t, os.RemoveAll(cfg.StateDir)) // addresses.json has no place
		return unjudged(ctx, d, progress)
	})
	require.ErrorContains(t, err, "choose another directory")
	require.Contains(t, log.String(), "this node closes")
	require.Empty(t, warnings(log.String()))
}

// TestCleanStopIsQuiet: what a stop ends is no reason to warn.
func TestCleanStopIsQuiet(t *testing.T) {
	producer := startNode(t, "producer")
	log := &logTo{}
	consumer, err := start(ctxFor(t), testConfig(t, "consumer", withPeer("producer", producer.Addresses().Peer)), logInto(log), unjudged)
	require.NoError(t, err)
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 200}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	require.NoError(t, c.c.Close())
	require.Eventually(t, func() bool { return strings.Contains(log.String(), `reason="the engine left"`) }, 30*time.Second, time.Millisecond)
	before := len(warnings(log.String()))
	consumer.Close(context.Background())
	require.Empty(t, warnings(log.String())[before:])
	require.Contains(t, log.String(), "to=dead reason=\"this node closes\"")
}

// A slab that is too small for the longest prompt is said so, once, with both numbers.
func TestSmallSlab(t *testing.T) {
	const said = "the slab cannot hold the demand of one longest prompt"
	for _, c := range []struct {
		slots int64
		warns int
	}{{34, 1}, {35, 0}} { // 512 tokens: 32 chunks of full, and 3 of a window of 20
		log := &logTo{}
		cfg := testConfig(t, "a", func(c2 *config.Config) { c2.SlabBytes, c2.Bounds.ParkedBytes = c.slots*4096, 4096 })
		n, err := start(ctxFor(t), cfg, logInto(log), unjudged)
		require.NoError(t, err)
		n.Close(context.Background())
		require.Equal(t, c.warns, strings.Count(log.String(), said))
		if c.warns > 0 {
			require.Contains(t, log.String(), "slots=34 slots_needed=35 slab_bytes=139264 slab_bytes_needed=143360 max_tokens=512")
		}
		memory, err := shm.InMemory(cfg.SlabDir)
		require.NoError(t, err)
		require.Equal(t, !memory, strings.Contains(log.String(), "level=WARN msg=\"the slab is on disk"))
	}
}
