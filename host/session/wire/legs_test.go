package wire

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// gives makes a node give bytes out under their digest, or under another one.
func (h *testHost) gives(b []byte, as ...[sha256.Size]byte) [sha256.Size]byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := sha256.Sum256(b)
	if len(as) > 0 {
		id = as[0]
	}
	if h.shelf == nil {
		h.shelf = map[[sha256.Size]byte][]byte{}
	}
	h.shelf[id] = b
	return id
}

// TestFetch: bytes come by their digest over the session, in either direction whoever
// dialed, in parts, and the session goes on beside them.
func TestFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		a, b := c.start("a"), c.start("b", "a")
		time.Sleep(100 * ms)
		part := session.DefaultLimits().PartBytesMax
		for from, to := range map[*testHost]*testHost{a: b, b: a} {
			for _, n := range []int{0, 1, part - 1, part, part + 1, 8 << 20} {
				want := bytes.Repeat([]byte(from.id), n/len(from.id)+1)[:n]
				got, err := from.peers.Fetch(t.Context(), to.id, to.gives(want), 8<<20)
				require.NoError(t, err)
				require.True(t, bytes.Equal(want, got))
			}
			_, err := from.peers.Fetch(t.Context(), to.id, [sha256.Size]byte{1}, 9)
			require.ErrorIs(t, err, ErrNotGiven)
			require.EqualError(t, err, "not given out: not here")
			_, err = from.peers.Fetch(t.Context(), to.id, to.gives(make([]byte, 10)), 9)
			require.EqualError(t, err, "too long: 10 bytes; at most 9 are taken")
			_, err = from.peers.Fetch(t.Context(), to.id, to.gives([]byte("other"), sha256.Sum256([]byte("this"))), 9)
			require.ErrorIs(t, err, ErrWrongBytes)
			require.Equal(t, session.Ready, state(from, to.id))
		}
		_, err := a.peers.Fetch(t.Context(), "nobody", [sha256.Size]byte{1}, 9)
		require.ErrorIs(t, err, ErrUnknownPeer)
	})
}

// TestFetchFromAFrozenPeer: it ends with the caller's patience, or with the session.
func TestFetchFromAFrozenPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		c.start("b")
		a := c.start("a", "b")
		time.Sleep(100 * ms)
		c.net.freeze("b")
		tired := errors.New("tired")
		ctx, cancel := context.WithTimeoutCause(t.Context(), 50*ms, tired)
		defer cancel()
		began := time.Now()
		_, err := a.peers.Fetch(ctx, "b", [sha256.Size]byte{1}, 9)
		require.ErrorIs(t, err, tired)
		require.Equal(t, 50*ms, time.Since(began))
		_, err = a.peers.Fetch(t.Context(), "b", [sha256.Size]byte{1}, 9)
		require.ErrorContains(t, err, "has not answered the last question")
		time.Sleep(3 * time.Second)
		_, err = a.peers.Fetch(t.Context(), "b", [sha256.Size]byte{1}, 9)
		require.ErrorContains(t, err, "there is no session with b")
		c.net.thaw("b")
		time.Sleep(3 * time.Second)
		got, err := a.peers.Fetch(t.Context(), "b", c.nodes["b"].gives([]byte("x")), 9)
		require.NoError(t, err)
		require.Equal(t, "x", string(got))
		id := c.nodes["b"].gives(make([]byte, 1<<20))
		c.net.freeze("b")
		_, err = a.peers.Fetch(t.Context(), "b", id, 1<<20)
		require.ErrorContains(t, err, "no byte from b on control or data for deadlines.suspect_ms")
		c.net.thaw("b")
	})
}

// TestActorsOfOnePeerInOrder: the end of a peer that is configured anew is told before the
// beginning of its next session, however late its actor gets to it.
func TestActorsOfOnePeerInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		c.start("b")
		a := c.start("a", "b")
		time.Sleep(100 * ms)
		hold := make(chan struct{})
		require.NoError(t, a.peers.peers["b"].post(func(time.Duration) { <-hold }, false)) // a slow host
		require.NoError(t, a.peers.SetPeers(nil))
		require.NoError(t, a.peers.SetPeers([]PeerAddr{{ID: "b", Control: "b"}}))
		time.Sleep(400 * ms)
		a.mu.Lock()
		require.Equal(t, []session.PeerState{session.Ready}, a.states["b"])
		a.mu.Unlock()
		close(hold)
		time.Sleep(time.Second)
		a.mu.Lock()
		require.Equal(t, []session.PeerState{session.Ready, session.Connecting, session.Dead, session.Ready}, a.states["b"])
		a.mu.Unlock()
		require.NoError(t, a.peers.SetPeers(nil))
		synctest.Wait()
		require.NoError(t, a.peers.SetPeers([]PeerAddr{{ID: "c", Control: "c"}}))
		require.NoError(t, a.peers.SetPeers(nil))
		require.NotContains(t, a.peers.leaving, "b", "what has ended is forgotten")
	})
}

// TestAllowLegsOfOtherRules: a word on rules that the peer does not have any more changes
// nothing, however late it comes.
func TestAllowLegsOfOtherRules(t *testing.T) {
	other := hello("b", 1)
	other.RulesDigest = []byte("other")
	b := startTCP(t, Config{Hello: other})
	a := startTCP(t, Config{Hello: hello("a", 1), Peers: []PeerAddr{{ID: "b", Control: b.addr}}})
	ready := func() bool { return state(a.testHost, "b") == session.Ready && state(b.testHost, "a") == session.Ready }
	require.Eventually(t, ready, 10*time.Second, ms)
	of := func(rules string) func(*sessionpb.Hello) bool {
		return func(h *sessionpb.Hello) bool { return string(h.GetRulesDigest()) == rules }
	}
	b.peers.AllowLegs("a", func(*sessionpb.Hello) bool { return true }, true, true, "")
	require.Eventually(t, func() bool { return a.peers.Status()[0].Supplies }, 10*time.Second, ms)
	said := make(chan struct{})
	a.peers.AllowLegs("b", of("before"), true, true, "")
	a.peers.AllowLegs("b", func(*sessionpb.Hello) bool { close(said); return false }, true, true, "")
	<-said
	_, err := a.peers.Lookup(t.Context(), "b", "r", []session.Key{{}}) // after which the status is of now
	require.NoError(t, err)
	require.False(t, a.peers.Status()[0].AllLegs)
	a.peers.AllowLegs("b", of("other"), true, true, "")
	require.Eventually(t, func() bool { return a.peers.Status()[0].AllLegs }, 10*time.Second, ms)
}
