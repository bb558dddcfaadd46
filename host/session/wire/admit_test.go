package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// TestAdmit: a node that is refused leaves nothing behind, hears why, and so does the log;
// one that is refused later loses its session.
func TestAdmit(t *testing.T) {
	var closed atomic.Bool
	n := startTCP(t, Config{Hello: hello("a", 1), Admit: func(id string, from net.Addr) error {
		if id == "x" || closed.Load() {
			return fmt.Errorf("node %s at %v is nobody's peer", id, from.(*net.TCPAddr).IP)
		}
		return nil
	}})
	b := startTCP(t, Config{Hello: hello("b", 1), Peers: []PeerAddr{{ID: "a", Control: n.addr}}})
	x := startTCP(t, Config{Hello: hello("x", 1), Peers: []PeerAddr{{ID: "a", Control: n.addr}}})
	eventually(t, func() bool { return state(b.testHost, "a") == session.Ready }, "b is let in")
	for _, l := range []*logBuffer{n.log, x.log} {
		eventually(t, func() bool { return contains(l, "node x at 127.0.0.1 is nobody's peer") }, "both sides say why")
	}
	require.Len(t, n.peers.Status(), 1)
	require.Zero(t, func() int { ups, _ := x.upped("a"); return ups }())
	remote, ok := n.peers.Remote("b").(*net.TCPAddr)
	require.True(t, ok)
	require.True(t, remote.IP.IsLoopback())
	require.Nil(t, n.peers.Remote("x"))

	closed.Store(true)
	require.Equal(t, session.Ready, state(b.testHost, "a"), "nobody has asked")
	n.peers.Review()
	eventually(t, func() bool { return state(b.testHost, "a") != session.Ready && state(n.testHost, "b") != session.Ready }, "b is out")
	eventually(t, func() bool { return contains(b.log, "no longer allowed: ") && contains(b.log, "node b at 127.0.0.1") }, "b hears why")
	closed.Store(false)
	eventually(t, func() bool { return state(b.testHost, "a") == session.Ready }, "b comes back")
}

// TestCheckHello: what a Hello says is judged whoever dialed, before the session is up.
func TestCheckHello(t *testing.T) {
	check := func(h *sessionpb.Hello, from net.Addr) error {
		if h.DataAddress == "inside:22" {
			return fmt.Errorf("data_address %s of %s at %v is not its own", h.DataAddress, h.NodeId, from.(*net.TCPAddr).IP)
		}
		return nil
	}
	lying := hello("b", 1)
	lying.DataAddress = "inside:22"
	for _, dials := range []string{"the node", "the liar"} {
		t.Run(dials+" dials", func(t *testing.T) {
			ca, cb := Config{Hello: hello("a", 1), CheckHello: check}, Config{Hello: lying}
			var a, b *tcpNode
			if dials == "the node" {
				b = startTCP(t, cb)
				ca.Peers = []PeerAddr{{ID: "b", Control: b.addr}}
				a = startTCP(t, ca)
			} else {
				a = startTCP(t, ca)
				cb.Peers = []PeerAddr{{ID: "a", Control: a.addr}}
				b = startTCP(t, cb)
			}
			for _, l := range []*logBuffer{a.log, b.log} {
				eventually(t, func() bool { return contains(l, "data_address inside:22 of b at 127.0.0.1 is not its own") }, "both sides say why")
			}
			ups, _ := a.upped("b")
			require.Zero(t, ups)
			if dials == "the node" {
				require.ErrorContains(t, func() error { _, err := a.peers.Lookup(t.Context(), "b", "r", keys(1)); return err }(), "peer_suspect")
			}
		})
	}
}

// quiet is a peer that says its Hello and then asks without reading an answer.
func quiet(t *testing.T, addr, id string) (ask func(int) error) {
	t.Helper()
	cc, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(1<<16))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); cc.Close() })
	s, err := sessionpb.NewPeerClient(cc).Session(ctx)
	require.NoError(t, err)
	h := hello(id, 1)
	h.ProtocolMin, h.ProtocolMax = 1, 1
	h.Layout.Digest = session.LayoutDigest(h.Layout)
	require.NoError(t, s.Send(helloMessage(h)))
	job := uint64(0)
	ks := make([]byte, 200*session.KeyBytes)
	return func(n int) error {
		for range n {
			job++
			if err := s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Lookup{Lookup: &sessionpb.Lookup{Job: job, Keys: ks, DeadlineMs: 1000}}}); err != nil {
				return err
			}
		}
		return nil
	}
}

// TestNobodyWaitsForAnother: a peer that never reads its stream, and a thousand
// connections that say nothing, cost another peer's lookups nothing to speak of, and a
// peer that comes anew gets in.
func TestNobodyWaitsForAnother(t *testing.T) {
	n := startTCP(t, Config{Hello: hello("a", 1)})
	b := startTCP(t, Config{Hello: hello("b", 1), Peers: []PeerAddr{{ID: "a", Control: n.addr}}})
	eventually(t, func() bool { return state(b.testHost, "a") == session.Ready }, "session")
	worst := func() (slowest time.Duration) {
		for range 200 {
			began := time.Now()
			_, err := b.peers.Lookup(t.Context(), "a", "r", keys(16))
			require.NoError(t, err)
			slowest = max(slowest, time.Since(began))
		}
		return slowest
	}
	before := worst()

	ask := quiet(t, n.addr, "q")
	eventually(t, func() bool { return state(n.testHost, "q") == session.Ready }, "the quiet peer's session")
	asking := make(chan error, 1)
	go func() {
		for {
			if err := ask(100); err != nil {
				asking <- err
				return
			}
		}
	}()
	unread := worst()
	for range 1000 {
		c, err := net.Dial("tcp", n.addr)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
	}
	flooded := worst()
	entries, pushed := n.peers.HalfOpen()
	require.LessOrEqual(t, entries, connsPerAddressMax)
	require.GreaterOrEqual(t, pushed, uint64(1000-connsPerAddressMax))
	began := time.Now()
	c := startTCP(t, Config{Hello: hello("c", 1), Peers: []PeerAddr{{ID: "a", Control: n.addr}}})
	eventually(t, func() bool { return state(c.testHost, "a") == session.Ready }, "a new peer")
	t.Logf("slowest of 200 lookups: %v alone, %v beside a peer that does not read, %v with 1000 silent connections too; a new peer's session after %v", before, unread, flooded, time.Since(began))
	const limit = 500 * ms // a lookup's own limit: beyond it one would have failed
	require.Less(t, max(unread, flooded), limit)
	select {
	case err := <-asking: // over the bound is an answer: the stream ends
		require.True(t, strings.Contains(err.Error(), "EOF"), err)
	case <-time.After(20 * time.Second):
		require.Fail(t, "a peer that does not read may ask for ever", "%+v\n%s", n.peers.Status(), n.log.String())
	}
	eventually(t, func() bool { return contains(n.log, "session with q closed: the peer reads too slowly") }, "the log names it")
}

// TestSlowloris: a connection that becomes no session within preambleLimit is closed,
// whether it says nothing, opens HTTP/2 and no stream, or drips.
func TestSlowloris(t *testing.T) {
	if testing.Short() {
		t.Skip("takes preambleLimit")
	}
	n := startTCP(t, Config{Hello: hello("a", 1)})
	const settings = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	var open []net.Conn
	for _, first := range []string{"", "PRI", settings} {
		c, err := net.Dial("tcp", n.addr)
		require.NoError(t, err)
		defer c.Close()
		_, err = c.Write([]byte(first))
		require.NoError(t, err)
		open = append(open, c)
	}
	for _, c := range open {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(preambleLimit+3*time.Second)))
		var err error
		for b := make([]byte, 1024); err == nil; {
			_, err = c.Read(b)
		}
		var timeout net.Error
		require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "still open")
	}
	entries, _ := n.peers.HalfOpen()
	require.Zero(t, entries)
}

// TestQueuedBytes: what waits for a slow connection is bounded in bytes, and one message
// always has room.
func TestQueuedBytes(t *testing.T) {
	c := newConn(nil, false, 1000, time.Second)
	big := &sessionpb.Envelope{Message: &sessionpb.Envelope_States{States: &sessionpb.States{States: make([]byte, queuedBytesMax+1)}}}
	require.True(t, c.queue(big))
	small := goawayMessage("x")
	require.False(t, c.queue(small))
	require.False(t, c.queue(big))
	<-c.out
	c.queued.Store(0)
	for range 1000 {
		require.True(t, c.queue(small))
	}
	require.False(t, c.queue(small), "and in number")
	held := c.queued.Load()
	require.False(t, c.queue(small))
	require.Equal(t, held, c.queued.Load(), "what was refused does not count")
}
