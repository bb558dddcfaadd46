package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// buffer may be written and read at the same time.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

const nodeFile = `node_id: a
state_dir: state
engine_socket: e.sock
peer_listen: 127.0.0.1:0
data_listen: 127.0.0.1:0
http_listen: 127.0.0.1:0
slab_bytes: 1048576
slab_dir: shm
deployment: deployment.yaml
deadlines: {drain_ms: 500}
`

const smallDeployment = `model: small
max_tokens: 32
groups:
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
`

func writeNode(t *testing.T, node string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "deployment.yaml"), []byte(smallDeployment), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "shm"), 0o700))
	path := filepath.Join(dir, "node.yaml")
	require.NoError(t, os.WriteFile(path, []byte(node), 0o600))
	return path
}

// TestServe: ready line, addresses, SIGHUP and SIGTERM, over a deployment that is judged
// for real.
func TestServe(t *testing.T) {
	path := writeNode(t, nodeFile)
	dir := filepath.Dir(path)
	var out, log buffer
	done := make(chan error, 1)
	go func() { done <- serve(context.Background(), path, &out, &log) }()
	require.Eventually(t, func() bool {
		select {
		case err := <-done:
			require.NoError(t, err, log.String())
		default:
		}
		return strings.HasPrefix(out.String(), "ready node_id=a ")
	}, 2*time.Minute, 5*time.Millisecond)

	var a host.Addresses
	data, err := os.ReadFile(filepath.Join(dir, "state", "addresses.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &a))
	require.Contains(t, out.String(), "peer_listen="+a.Peer)
	require.NotContains(t, a.Peer+a.Data+a.HTTP, ":0\"")
	resp, err := http.Get("http://" + a.HTTP + "/readyz")
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	require.Equal(t, 200, resp.StatusCode)

	statusOfReady(t, path)
	require.NoError(t, os.WriteFile(path, []byte(nodeFile+"log_level: debug\npeers: [{id: b, control: '127.0.0.1:1'}]\npeer_cidrs: [10.0.0.0/8, 10.1.0.7/32, 'fd00::/8']\n"), 0o600))
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "peers=1 log_level=debug peer_cidrs=3") }, time.Minute, 5*time.Millisecond)
	require.NotContains(t, log.String(), "after a restart")
	require.NoError(t, os.WriteFile(path, []byte(strings.Replace(nodeFile, "1048576", "2097152", 1)+"bounds: {engines: 2}\n"), 0o600))
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.Eventually(t, func() bool {
		return strings.Contains(log.String(), `level=WARN msg="keys that changed are used only after a restart" file=`+path+" keys=slab_bytes,bounds.engines")
	}, time.Minute, 5*time.Millisecond)
	deployment := filepath.Join(dir, "deployment.yaml")
	require.NoError(t, os.WriteFile(path, []byte(nodeFile+"peer_rules: shm\n"), 0o600))
	require.NoError(t, os.WriteFile(deployment, []byte(strings.Replace(smallDeployment, "max_tokens: 32", "max_tokens: 64", 1)), 0o600))
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.Eventually(t, func() bool {
		return strings.Contains(log.String(), `level=WARN msg="keys that changed are used only after a restart" file=`+path+" keys=peer_rules") &&
			strings.Contains(log.String(), `level=WARN msg="keys of the deployment that changed are used only after a restart" file=`+deployment+" keys=max_tokens")
	}, time.Minute, 5*time.Millisecond)
	require.NoError(t, os.WriteFile(deployment, []byte(smallDeployment), 0o600))
	require.NoError(t, os.WriteFile(path, []byte(nodeFile+"log_lvl: debug\n"), 0o600))
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.Eventually(t, func() bool {
		return strings.Contains(log.String(), "the old one stays") && strings.Contains(log.String(), "did you mean")
	}, time.Minute, 5*time.Millisecond)

	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	require.NoError(t, <-done)
	_, stop, _ := strings.Cut(log.String(), "msg=stopping")
	require.NotContains(t, stop, "level=WARN")
	for _, gone := range []string{"e.sock", "state/addresses.json", "shm/tierd-a"} {
		_, err := os.Stat(filepath.Join(dir, gone))
		require.ErrorIs(t, err, os.ErrNotExist, gone)
	}
	stopWhileChecking(t, path)
}

// stopWhileChecking: a daemon that still checks its rules stops at once, and well. It has
// the rules of the daemon before it, compiled, which takes long under the race detector.
func stopWhileChecking(t *testing.T, path string) {
	require.NoError(t, os.WriteFile(path, []byte(nodeFile), 0o600))
	long := strings.Replace(smallDeployment, "max_tokens: 32", "max_tokens: 131072", 1) // a check of many seconds
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "deployment.yaml"), []byte(long), 0o600))
	var out, log buffer
	done := make(chan error, 1)
	go func() { done <- serve(context.Background(), path, &out, &log) }()
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "checking deployment") }, time.Minute, time.Millisecond)
	said, errOut, code := command(t, "", "status", "-c", path)
	require.Equal(t, exitNotReady, code, errOut)
	require.Regexp(t, `^node a  checking for \d+s\n  not ready   checking deployment small: \d+ %\n`, said)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	require.NoError(t, <-done)
	require.Contains(t, log.String(), "stopped while checking")
	_, errOut, code = command(t, "", "status", "-c", path)
	require.Equal(t, exitUsage, code)
	require.Contains(t, errOut, "tierd status: no daemon runs with state directory "+filepath.Join(filepath.Dir(path), "state"))
	require.Empty(t, out.String())
	for _, gone := range []string{"e.sock.lock", "state/lock", "shm/tierd-a"} {
		require.NoFileExists(t, filepath.Join(filepath.Dir(path), gone))
	}
}

func TestRefusedDeploymentSaysWhatWasJudged(t *testing.T) {
	refusal := &registry.Refusal{Verdict: &registry.Verdict{
		Verdict: registry.Refused, Model: "small", DeploymentDigest: "sha256:d", Counterexample: &check.Counterexample{},
		Rules: []registry.RuleID{
			{For: "full", Name: "full", Version: "1.0.0", Source: "shipped", Digest: "sha256:e"},
			{For: "policy", Name: "mine", Version: "2.0.0", Source: "/rules/mine.wasm", Digest: "sha256:f"},
		},
	}}
	err := notStarted(refusal, &config.Config{Deployment: "/etc/tierd/deployment.yaml"}, slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, refusal)
	require.Equal(t, refusal.Error()+`

  deployment  /etc/tierd/deployment.yaml, sha256:d
  rule        full: full 1.0.0 from shipped, sha256:e
  rule        policy: mine 2.0.0 from /rules/mine.wasm, sha256:f`, err.Error())
}

func TestServeRefusals(t *testing.T) {
	for _, c := range []struct{ file, text string }{
		{"node_idd: a\n", `did you mean "node_id"?`},
		{strings.Replace(nodeFile, "deployment.yaml", "none.yaml", 1), "node.yaml: deployment is /DIR/none.yaml: no such file or directory; correct the path"},
		{strings.Replace(nodeFile, "127.0.0.1:0", "0.0.0.0:7000", 1), "set tls: {cert, key, ca}"},
	} {
		path := writeNode(t, c.file)
		err := serve(context.Background(), path, io.Discard, io.Discard)
		require.ErrorContains(t, err, strings.Replace(c.text, "/DIR", filepath.Dir(path), 1))
	}
	require.ErrorContains(t, serve(context.Background(), "/none/node.yaml", io.Discard, io.Discard), "no such file")
}

func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		args   []string
		status int
	}{
		{[]string{"version"}, 0},
		{[]string{"version", "--json"}, 0},
		{[]string{"--version"}, 0},
		{[]string{"serve"}, exitUsage},
		{[]string{"serve", "-c", "/none/node.yaml"}, exitUsage},
		{[]string{"nonsense"}, exitUsage},
		{[]string{"serve", "--nonsense"}, exitUsage},
		{[]string{"check", "/none.yaml"}, exitUndecided},
	} {
		require.Equal(t, c.status, run(c.args), fmt.Sprint(c.args))
	}
}

// TestServeWithCertificate: with a certificate of its deployment a node is ready without a
// check; with one that was changed it checks, and is ready too.
func TestServeWithCertificate(t *testing.T) {
	path := writeNode(t, nodeFile+"certificate: c.json\ncertificate_keys: [ci.pem.pub]\n")
	t.Chdir(filepath.Dir(path))
	_, errOut, status := command(t, "", "key", "ci.pem")
	require.Zero(t, status, errOut)
	freshState(t, "state")
	_, errOut, status = command(t, "", "check", "deployment.yaml", "--state", "state", "--certificate", "c.json", "--key", "ci.pem")
	require.Zero(t, status, errOut)
	serveOnce := func() string {
		freshState(t, "state")
		var out, log buffer
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		done := make(chan error, 1)
		go func() { done <- serve(ctx, path, &out, &log) }()
		require.Eventually(t, func() bool { return strings.HasPrefix(out.String(), "ready node_id=a ") || len(done) > 0 }, 2*time.Minute, 5*time.Millisecond, log.String())
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
		require.NoError(t, <-done, log.String())
		return log.String()
	}
	log := serveOnce()
	require.Regexp(t, `msg="rules accepted" .* certified_by=sha256:[0-9a-f]{64} cases=[1-9]`, log)
	require.NotContains(t, log, "checks for itself")
	data, err := os.ReadFile("c.json")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile("c.json", bytes.Replace(data, []byte(`"sig":"`), []byte(`"sig":"A`), 1), 0o600))
	log = serveOnce()
	require.Contains(t, log, `level=ERROR msg="the certificate is not accepted; this node checks for itself"`)
	require.Contains(t, log, `certified_by="" cases=`)

	require.NoError(t, os.WriteFile("ci.pem.pub", []byte("no key"), 0o600))
	var out, errLog buffer
	require.ErrorContains(t, serve(context.Background(), path, &out, &errLog),
		path+": certificate_keys[0] is "+filepath.Join(filepath.Dir(path), "ci.pem.pub")+`: it is no PEM file; it must hold one block "PUBLIC KEY"; tierd key writes one`)
}
