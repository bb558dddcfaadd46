package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/status"
)

// statusOfReady asks a daemon that serves, by each flag that leads to it.
func statusOfReady(t *testing.T, path string) {
	t.Helper()
	state := filepath.Join(filepath.Dir(path), "state")
	at, err := status.Locate(state)
	require.NoError(t, err)
	for _, where := range [][]string{{"-c", path}, {"--state", state}, {"--address", at.HTTPListen}} {
		out, errOut, code := command(t, "", append([]string{"status"}, where...)...)
		require.Zero(t, code, errOut)
		require.Regexp(t, `^node a  serving for `, out)
		require.Contains(t, out, "  verdict     accepted, checked at this start: ")
		require.NotContains(t, out, "\x1b")
		out, errOut, code = command(t, "", append([]string{"status", "--json"}, where...)...)
		require.Zero(t, code, errOut)
		var s status.Status
		require.NoError(t, json.Unmarshal([]byte(out), &s))
		require.Equal(t, []any{"a", os.Getpid(), true, status.FromCheck}, []any{s.NodeID, s.PID, s.Ready, s.Verdict.From})
		require.Equal(t, "full", s.Verdict.Rules[0].Name)
		require.NotZero(t, s.Verdict.Cases)
	}
	other := filepath.Join(filepath.Dir(path), "other.yaml")
	require.NoError(t, os.WriteFile(other, []byte(strings.Replace(nodeFile, "node_id: a", "node_id: b", 1)), 0o600))
	_, errOut, code := command(t, "", "status", "-c", other)
	require.Equal(t, exitUsage, code)
	require.Contains(t, errOut, "is that of node a, and "+other+" is the configuration of b")
}

func TestStatusUsage(t *testing.T) {
	for args, text := range map[string]string{
		"status -c a --state b":   "more than one of -c, --state and --address is given",
		"status --watch 0":        "--watch is 0; it must be at least 0.2 seconds",
		"status --watch NaN":      "--watch is NaN; it must be at least 0.2 seconds",
		"status --color blue":     `--color is "blue"; known: auto, always, never`,
		"status node.yaml":        `"node.yaml" is not expected; a configuration is given by a flag, as in: tierd status -c node.yaml`,
		"status -c /none/n.yaml":  "no such file",
		"status --state /none":    "no daemon runs with state directory /none",
		"status --address :1":     "GET http://127.0.0.1:1/statusz: nobody listens there",
		"status --address [::]:x": `--address is "[::]:x"; it must be host:port, such as 127.0.0.1:9470`,
		"status --address node":   "it must be host:port",
	} {
		_, errOut, code := command(t, "", strings.Fields(args)...)
		require.Equal(t, exitUsage, code, args)
		require.Contains(t, errOut, text, args)
	}
}

// TestStatusWatch: a watch goes on over a daemon that is away, prints a line each with
// --json, and ends as the last answer says.
func TestStatusWatch(t *testing.T) {
	var asked atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch asked.Add(1) {
		case 2:
			http.Error(w, "away", http.StatusBadGateway)
		case 4:
			time.AfterFunc(50*time.Millisecond, cancel)
			fallthrough
		default:
			_, _ = w.Write([]byte("{\n  \"form\": 1,\n  \"node_id\": \"a\",\n \"state\": \"draining\"}\n"))
		}
	}))
	defer server.Close()
	a := statusArgs{address: server.Listener.Addr().String(), asJSON: true, watchSeconds: 0.2, color: "auto"}
	var out, errOut bytes.Buffer
	err := a.run(ctx, &out, &errOut)
	var exit *exitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitNotReady, exit.status)
	const line = `{"form":1,"node_id":"a","state":"draining"}` + "\n"
	require.Equal(t, strings.Repeat(line, 3), out.String())
	require.Contains(t, errOut.String(), "502 Bad Gateway: away")
}

func TestStatusColour(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"form": 1, "node_id": "a", "state": "serving", "ready": true}`))
	}))
	defer server.Close()
	for flag, want := range map[string]bool{"always": true, "never": false, "auto": false} { // standard output is no terminal here
		out, _, code := command(t, "", "status", "--address", server.Listener.Addr().String(), "--color", flag)
		require.Zero(t, code)
		require.Equal(t, want, strings.Contains(out, "\x1b["), flag)
	}
	out, _, _ := command(t, "", "status", "--address", server.Listener.Addr().String(), "--color", "always", "--json")
	require.NotContains(t, out, "\x1b")
}
