package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// runReplayCommand returns what tierd replay says on standard error, and its status.
func runReplayCommand(t *testing.T, args ...string) (said string, status int) {
	root := rootCommand()
	var errOut bytes.Buffer
	root.SetErr(&errOut)
	root.SetArgs(append([]string{"replay"}, args...))
	err := root.ExecuteContext(t.Context())
	var exit *exitError
	require.True(t, errors.As(err, &exit), "%v", err)
	return errOut.String(), exit.status
}

// What cannot run says so once, in one line, with status 2.
func TestReplayCannotRun(t *testing.T) {
	dir := t.TempDir()
	trace, bad := filepath.Join(dir, "trace.jsonl"), filepath.Join(dir, "bad.jsonl")
	require.NoError(t, os.WriteFile(trace, []byte(`{"input_length": 5, "hash_ids": [1]}`+"\n"), 0o600))
	require.NoError(t, os.WriteFile(bad, []byte(`{"hash_ids": [1]}`+"\n"), 0o600))
	p, c := filepath.Join(dir, "p"), filepath.Join(dir, "c")
	for want, args := range map[string][]string{
		"rate is NaN":                         {"--rate", "NaN"},
		"rate is +Inf":                        {"--rate", "Inf"},
		"rate is -1":                          {"--rate", "-1"},
		"concurrency is 0; it must be 1 to":   {"--concurrency", "0"},
		`leg is "x"`:                          {"--leg", "x"},
		"--requests is -1":                    {"--requests", "-1"},
		"are the same socket, " + p:           {"--consumer", p},
		bad + ":1: input_length is missing":   {"--trace", bad},
		"trace " + dir + "/none cannot be":    {"--trace", filepath.Join(dir, "none")},
		"producer: no daemon answers at " + p: {},
		dir + "/none.yaml":                    {"--deployment", filepath.Join(dir, "none.yaml")},
	} {
		said, status := runReplayCommand(t, append([]string{"--trace", trace, "--producer", p, "--consumer", c}, args...)...)
		require.Equal(t, exitReplayFailed, status, said)
		require.Contains(t, said, want)
		require.True(t, strings.HasPrefix(said, "tierd replay: "), said)
		require.Equal(t, 1, strings.Count(said, "replay: "), said)
		require.Equal(t, 1, strings.Count(said, "\n"), said)
	}
}

// With --json standard output is one object, also when nothing was played.
func TestReplayFailsInJSON(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	require.NoError(t, os.WriteFile(trace, []byte(`{"input_length": 5, "hash_ids": [1]}`+"\n"), 0o600))
	root := rootCommand()
	var out, errOut bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&errOut)
	root.SetArgs([]string{"replay", "--json", "--trace", trace, "--producer", filepath.Join(dir, "p"), "--consumer", filepath.Join(dir, "c")})
	var exit *exitError
	require.ErrorAs(t, root.ExecuteContext(t.Context()), &exit)
	require.Equal(t, exitReplayFailed, exit.status)
	var object map[string]string
	require.NoError(t, json.Unmarshal(out.Bytes(), &object), out.String())
	require.Contains(t, object["error"], "no daemon answers at")
	require.Equal(t, "tierd replay: "+object["error"]+"\n", errOut.String())
}

func TestReplaySaysThatTheTraceIsShorter(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	require.NoError(t, os.WriteFile(trace, []byte(`{"input_length": 5, "hash_ids": [1]}`+"\n"), 0o600))
	said, _ := runReplayCommand(t, "--trace", trace, "--producer", dir+"/p", "--consumer", dir+"/c", "--requests", "7")
	require.Contains(t, said, "--requests is 7, but "+trace+" has only 1; playing those\n")
}
