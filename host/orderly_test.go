package host

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// freePort is an address that a node can have again after a restart.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// TestOrderlyEndsAreQuiet: two nodes that are configured with each other are stopped and
// started again in turn, with the same ports, while an engine goes on to name the one that is
// gone. Neither has a reason to warn: the one that goes says so. Nobody restarts a node in a
// moment, so the other one finds nobody for a while.
func TestOrderlyEndsAreQuiet(t *testing.T) {
	const seen = 500 * time.Millisecond // several attempts to connect, and a state or two
	ids := []string{"producer", "consumer"}
	logs := map[string]*logTo{"producer": {}, "consumer": {}}
	cfgs, nodes := map[string]*config.Config{}, map[string]*Node{}
	ports := map[string]string{"producer": freePort(t), "consumer": freePort(t)}
	for i, id := range ids {
		other := ids[1-i]
		cfgs[id] = testConfig(t, id, withPeer(other, ports[other]), func(c *config.Config) {
			c.PeerListen, c.DataListen = ports[id], freePort(t)
		})
	}
	up := func(id string) {
		n, err := start(ctxFor(t), cfgs[id], logInto(logs[id]), unjudged)
		require.NoError(t, err)
		nodes[id] = n
	}
	t.Cleanup(func() {
		for _, n := range nodes {
			n.Close(context.Background())
		}
		if t.Failed() {
			t.Logf("producer:\n%s\nconsumer:\n%s", logs["producer"], logs["consumer"])
		}
	})
	meet := func() {
		ready(t, nodes["consumer"], "producer")
		ready(t, nodes["producer"], "consumer")
	}
	up("producer")
	up("consumer")
	meet()
	p, c := attach(t, nodes["producer"]), attach(t, nodes["consumer"])
	x := text{"a", 200}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	require.NoError(t, p.c.Close())
	// The first start of a node that nobody knows yet is not what this is about.
	before := map[string]int{}
	for _, id := range ids {
		before[id] = len(warnings(logs[id].String()))
	}
	for round := range 4 {
		id := ids[round%2]
		nodes[id].Close(context.Background())
		if id == "producer" && round == 0 {
			r := c.beginConsumer("gone", text{"b", 200}, enginepb.Leg_PD)
			require.Zero(t, r.load().ResumeTokens)
			r.finish()
			require.NoError(t, c.c.Close())
		}
		time.Sleep(seen)
		up(id)
		meet()
	}
	nodes["consumer"].Close(context.Background())
	time.Sleep(seen)
	nodes["producer"].Close(context.Background())
	for _, id := range ids {
		require.Empty(t, warnings(logs[id].String())[before[id]:], id)
	}
	require.Contains(t, logs["producer"].String(), `level=INFO msg="the peer has closed, and is not there yet" cause="goodbye of consumer"`)
	require.Contains(t, logs["consumer"].String(), `level=INFO msg="the peer has closed, and is not there yet" cause="goodbye of producer"`)
}

// TestLostPeersAreNot: a peer that is gone without a goodbye is a reason to warn, and so is one
// that comes back after its goodbye and does not fit any more.
func TestLostPeersAreNot(t *testing.T) {
	control := startProxy(t)
	first := startNode(t, "producer")
	control.target.Store(first.Addresses().Peer)
	log := &logTo{}
	consumer := startLogged(t, "consumer", unjudged, log, withPeer("producer", control.addr()), func(c *config.Config) { c.Deadlines.ConnectMS = 500 })
	ready(t, consumer, "producer")
	require.Empty(t, warnings(log.String()))
	control.cut()
	require.Eventually(t, func() bool { return len(warnings(log.String())) > 0 }, 30*time.Second, time.Millisecond)
	control.mend()
	ready(t, consumer, "producer")

	before := len(warnings(log.String()))
	warned := func(of string) func() bool {
		return func() bool { return strings.Contains(strings.Join(warnings(log.String())[before:], ""), of) }
	}
	first.Close(context.Background())
	// The proxy takes connections and closes them: something is there that is not the peer.
	require.Eventually(t, warned("no session with peer"), 30*time.Second, time.Millisecond)
	other := startNode(t, "producer", withDeployment(strings.Replace(deployment, "model: tiny", "model: other", 1)))
	control.target.Store(other.Addresses().Peer)
	require.Eventually(t, warned("layouts differ"), 30*time.Second, time.Millisecond, "another reason than before")
}

// TestSilentAfterItsGoodbye: a peer that has said goodbye, and whose port takes connections again
// that nobody answers, is a reason to warn.
func TestSilentAfterItsGoodbye(t *testing.T) {
	port := freePort(t)
	first := startNode(t, "producer", func(c *config.Config) { c.PeerListen = port })
	log := &logTo{}
	consumer := startLogged(t, "consumer", unjudged, log, withPeer("producer", port), func(c *config.Config) { c.Deadlines.ConnectMS = 300 })
	ready(t, consumer, "producer")
	first.Close(context.Background())
	require.Empty(t, warnings(log.String()))
	l, err := net.Listen("tcp", port) // nothing is taken from its queue
	require.NoError(t, err)
	defer l.Close()
	require.Eventually(t, func() bool {
		return strings.Contains(strings.Join(warnings(log.String()), ""), "no session with peer, retrying")
	}, 30*time.Second, time.Millisecond)
}

// TestGivenUpBeforeItsHello: a stream that its dialer gives up before its hello is no reason to
// warn, and one that says no hello in time is.
func TestGivenUpBeforeItsHello(t *testing.T) {
	log := &logTo{}
	n := startLogged(t, "producer", unjudged, log, func(c *config.Config) { c.Deadlines.ConnectMS = 300 })
	b := dialByHand(t, n, "consumer", closedPort(t))
	open := func() context.CancelFunc {
		ctx, cancel := context.WithCancel(context.Background())
		t.Cleanup(cancel)
		_, err := sessionpb.NewPeerClient(b.cc).Session(ctx)
		require.NoError(t, err)
		return cancel
	}
	given := func(level, msg string) func() bool {
		return func() bool { return strings.Contains(log.String(), "level="+level+" msg=\""+msg) }
	}
	open()
	require.Eventually(t, given("WARN", "peer stream refused"), 30*time.Second, time.Millisecond)
	require.Len(t, warnings(log.String()), 1)
	limit := ctxFor(t)
	for !given("INFO", "peer stream ended before its session")() { // the node may not have seen it yet when it is given up
		cancel := open()
		time.Sleep(10 * time.Millisecond)
		cancel()
		require.NoError(t, limit.Err())
	}
	require.Len(t, warnings(log.String()), 1)
}
