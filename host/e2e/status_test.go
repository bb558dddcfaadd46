package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/status"
)

// ask runs tierd status on a node.
func (n *node) ask(args ...string) (out, errOut string, code int) {
	n.t.Helper()
	cmd := exec.Command(tierd, append([]string{"status", "-c", filepath.Join(n.dir, "node.yaml")}, args...)...)
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return o.String(), e.String(), exit.ExitCode()
	}
	require.NoError(n.t, err)
	return o.String(), e.String(), 0
}

// TestStatusOfFrozenAndKilled: of two daemons one is stopped, goes on, and is killed. The
// other one says so and stays ready; of itself tierd status says which of the two it is.
func TestStatusOfFrozenAndKilled(t *testing.T) {
	producer, consumer := pair(t)
	out, errOut, code := consumer.ask()
	require.Zero(t, code, errOut)
	require.Contains(t, out, "node consumer  serving for ")
	require.Contains(t, out, "  verdict     accepted, kept from an earlier check: ")
	require.NotContains(t, out, "\x1b")
	require.NotContains(t, out, "attention")

	require.NoError(t, producer.Cmd.Process.Signal(syscall.SIGSTOP))
	began := time.Now()
	_, errOut, code = producer.ask()
	require.Equal(t, 2, code)
	require.Contains(t, errOut, fmt.Sprintf("no answer within 5s: process %d lives, and is stopped (kill -CONT %d lets it go on) or overloaded", producer.Cmd.Process.Pid, producer.Cmd.Process.Pid))
	t.Logf("a frozen daemon was given up after %v", time.Since(began))
	began = time.Now()
	out, errOut, code = consumer.ask("--json")
	t.Logf("the other one answered in %v", time.Since(began))
	require.Zero(t, code, errOut)
	var s status.Status
	require.NoError(t, json.Unmarshal([]byte(out), &s))
	require.Contains(t, []string{"suspect", "dead"}, s.Peers[0].State)
	require.Greater(t, s.Peers[0].SilenceSeconds, 0.7)
	require.Len(t, s.Attention, 1)
	require.Contains(t, s.Attention[0], "peer producer is ")

	require.NoError(t, producer.Cmd.Process.Signal(syscall.SIGCONT))
	consumer.await("in session again", func() bool {
		out, _, _ := consumer.ask("--json")
		var s status.Status
		return json.Unmarshal([]byte(out), &s) == nil && s.Peers[0].State == "ready" && len(s.Attention) == 0
	})
	pid := producer.Cmd.Process.Pid
	producer.kill(syscall.SIGKILL)
	_, errOut, code = producer.ask()
	require.Equal(t, 2, code)
	require.Contains(t, errOut, fmt.Sprintf("process %d, which was node producer, is gone: it was killed; start it again with tierd serve", pid))
	consumer.stop()
	_, errOut, code = consumer.ask()
	require.Equal(t, 2, code)
	require.Contains(t, errOut, "no daemon runs with state directory ")
}
