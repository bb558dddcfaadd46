package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/replay"
	"github.com/tierd/tierd/specs/module"
)

// versions writes three versions of one deployment, small enough to be checked in a second:
// v1, v2 with a new build of the window's rule, and v3 with a wider window.
func versions(t *testing.T) (v1, v2, v3 string) {
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		return path
	}
	demo, err := os.ReadFile(demo("deployment.yaml"))
	require.NoError(t, err)
	with := func(old, new string) []byte {
		require.Contains(t, string(demo), old)
		return bytes.Replace(demo, []byte(old), []byte(new), 1)
	}
	demo = with("max_tokens: 131072", "max_tokens: 2048")
	demo = with("align_tokens: 4096", "align_tokens: 1024")
	code, err := module.Wasm()
	require.NoError(t, err)
	write("window.wasm", append(bytes.Clone(code), 0, 2, 1, 'v')) // other bytes, the same rules
	return write("v1.yaml", demo), write("v2.yaml", with("rule: window", "rule: ./window.wasm#window")), write("v3.yaml", with("window: 128", "window: 600"))
}

// TestRollingUpgrade: two daemons get another version one after the other. While the versions
// differ the pair of them is judged in the background, with the module that comes from the
// other daemon; where it is accepted leg pd goes on in both directions, and where it is
// refused leg pd is computed with a reason that status names, until both are equal again.
func TestRollingUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("starts real processes")
	}
	require.NoError(t, program())
	v1, v2, v3 := versions(t)
	producer, consumer := newNode(t, "producer"), newNode(t, "consumer")
	producer.peers, consumer.peers = []*node{consumer}, []*node{producer}
	producer.deployment, consumer.deployment = v1, v1
	producer.start()
	consumer.start()
	joined(producer, consumer)
	path := writeTrace(t, func(i int, r *replay.Request) bool { return r.PromptTokens < 2000 })
	plays := func(from, to *node, leg string) (replay.Report, int) {
		return play(from, to, "--trace", path, "--leg", leg, "--requests", "10", "--salt", t.Name()+from.deployment+to.deployment+from.id+leg).report()
	}
	hits := func(from, to *node) {
		t.Helper()
		r, status := plays(from, to, "pd")
		require.Zero(t, status)
		require.Equal(t, 10, r.Hits)
	}
	upgrade := func(n *node, to string) {
		n.stop()
		n.deployment = to
		n.start()
		joined(producer, consumer)
	}
	// is waits until both nodes know that state, of both directions or of one at least.
	is := func(state string, directions float64) {
		t.Helper()
		for _, n := range []*node{producer, consumer} {
			n.await("a pair that is "+state, func() bool { return n.metric("tierd_peer_pair", `state="`+state+`"`) >= directions })
		}
	}
	is("equal", 2)
	hits(producer, consumer)

	upgrade(consumer, v2)
	is("accepted", 2)
	for _, n := range []*node{producer, consumer} {
		n.await("allowed leg pd", func() bool { return n.metric("tierd_peer_leg_allowed", `leg="pd"`) == 1 })
	}
	hits(producer, consumer)
	hits(consumer, producer)
	fetched, err := os.ReadDir(filepath.Join(producer.dir, "state", "fetched"))
	require.NoError(t, err)
	require.Len(t, fetched, 1, "the module came from the other daemon")
	upgrade(producer, v2)
	is("equal", 2)
	hits(producer, consumer)

	upgrade(consumer, v3)
	is("refused", 1)
	r, _ := plays(producer, consumer, "pd")
	require.Zero(t, r.Hits)
	out, errOut, code := consumer.ask()
	require.Zero(t, code, errOut)
	t.Log(out)
	out = strings.Join(strings.Fields(out), " ") // its lines are folded
	require.Contains(t, out, "peer producer runs another version: the pair of the two versions is refused with this node as the consumer: prompts of ")
	require.Contains(t, out, "not pd, demand with producer: it runs other rules, parameters or limits: the pair of the two versions is refused: prompts of ")
	_, file, found := strings.Cut(out, "the whole counterexample is in ")
	require.True(t, found)
	drawing, err := os.ReadFile(strings.Fields(file)[0])
	require.NoError(t, err)
	require.Contains(t, string(drawing), "REFUSED from prompts of")
	upgrade(producer, v3)
	is("equal", 2)
	hits(producer, consumer)
	producer.stop()
	consumer.stop()
}
