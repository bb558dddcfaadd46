package wire

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session"
)

// TestPair: lookups and demands in both directions on one session.
func TestPair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		a, b := c.start("a"), c.start("b", "a")
		time.Sleep(100 * ms)
		ctx := t.Context()
		for from, to := range map[*testHost]string{a: "b", b: "a"} {
			require.Equal(t, session.Ready, state(from, to))
			for _, request := range []string{"now", "later"} {
				states, err := from.peers.Lookup(ctx, to, request, keys(5))
				require.NoError(t, err)
				require.Equal(t, 5, states.First(abi.NotHere, 0, 5))
			}
			var started session.JobID
			req := demandOf(4)
			req.Started = func(job session.JobID) { started = job }
			h, err := from.peers.Demand(ctx, to, req)
			require.NoError(t, err)
			job, results := h.Results()
			require.Equal(t, started, job)
			require.Equal(t, session.Unmatched, results[0].Cause)
			for _, r := range results[1:] {
				require.Equal(t, session.Transferred, r.Cause)
			}
		}
		_, err := a.peers.Lookup(ctx, "nobody", "r", keys(1))
		require.ErrorIs(t, err, ErrUnknownPeer)
		_, err = a.peers.Demand(ctx, "nobody", demandOf(1))
		require.ErrorIs(t, err, ErrUnknownPeer)
		synctest.Wait()
		require.Zero(t, b.open())
		require.Positive(t, a.peers.Status()[0].RTT)
	})
}

// TestCallerGivesUp: a cancelled context ends a lookup and a demand at once.
func TestCallerGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		a, b := c.start("a"), c.start("b", "a")
		b.setMute(true)
		time.Sleep(100 * ms)
		ctx, cancel := context.WithTimeout(t.Context(), 30*ms)
		defer cancel()
		h, err := a.peers.Demand(context.WithoutCancel(ctx), "b", demandOf(3))
		require.NoError(t, err)
		start := time.Now()
		_, err = a.peers.Lookup(ctx, "b", "r", keys(2))
		require.Error(t, err)
		require.Equal(t, 30*ms, time.Since(start))
		d, err := a.peers.Demand(ctx, "b", demandOf(3))
		require.NoError(t, err)
		_, results := d.Results()
		require.Equal(t, session.Aborted, results[0].Cause)
		h.Abort("enough")
		_, results = h.Results()
		require.Equal(t, "enough", results[0].Text)
		synctest.Wait()
		require.Zero(t, b.open(), "the producer was told")
	})
}

// TestFrozenPeer: jobs in flight end within the suspect limit, requests that name the
// peer then do not wait, other peers notice nothing, and the thawed peer is back.
func TestFrozenPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		c.start("b")
		c.start("c")
		a := c.start("a", "b", "c")
		time.Sleep(time.Second)
		c.nodes["b"].setMute(true)
		ctx := t.Context()
		h, err := a.peers.Demand(ctx, "b", demandOf(3))
		require.NoError(t, err)
		c.net.freeze("b")
		start := time.Now()
		_, results := h.Results()
		require.Equal(t, session.PeerSuspect, results[1].Cause)
		require.LessOrEqual(t, time.Since(start), 750*ms)
		for range 200 { // ten seconds: suspect, dead, dialing in vain
			start := time.Now()
			_, err := a.peers.Lookup(ctx, "b", "r", keys(2))
			var le *LookupError
			require.ErrorAs(t, err, &le)
			require.Equal(t, session.PeerSuspect, le.Cause)
			require.Zero(t, time.Since(start), "at once")
			states, err := a.peers.Lookup(ctx, "c", "r", keys(2))
			require.NoError(t, err)
			require.Equal(t, 2, states.First(abi.NotHere, 0, 2))
			time.Sleep(50 * ms)
		}
		require.Equal(t, session.Dead, state(a, "b"))
		c.nodes["b"].setMute(false)
		c.net.thaw("b")
		time.Sleep(2 * time.Second)
		require.Equal(t, session.Ready, state(a, "b"))
		_, err = a.peers.Lookup(ctx, "b", "r", keys(2))
		require.NoError(t, err)
	})
}

// TestRestart: a peer that comes back on its address is found, as another process.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		a := c.start("a", "b")
		c.start("b")
		rnd := rand.New(rand.NewPCG(1, 2))
		for i := range 30 {
			time.Sleep(600 * ms)
			require.Equal(t, session.Ready, state(a, "b"), "restart %d", i)
			_, again := a.upped("b")
			require.Equal(t, i > 0, again)
			c.stop("b")
			time.Sleep(time.Duration(rnd.IntN(20)) * ms)
			c.start("b")
		}
		time.Sleep(600 * ms)
		ups, _ := a.upped("b")
		require.Equal(t, 31, ups)
	})
}

// TestCrossedDials: both sides have dialed, and neither has heard of the other. Whoever is
// heard first, both keep the connection of the smaller id.
func TestCrossedDials(t *testing.T) {
	for _, order := range [][]string{{"a", "b"}, {"b", "a"}} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(t)
			defer c.close()
			c.net.delay = func() time.Duration { return 10 * ms } // both listen by then
			c.net.hold = map[string]chan struct{}{"a": make(chan struct{}), "b": make(chan struct{})}
			a, b := c.start("a", "b"), c.start("b", "a")
			time.Sleep(20 * ms)
			synctest.Wait()
			require.Equal(t, 1, c.open(a, "b"))
			require.Equal(t, 1, c.open(b, "a"), "the dials have crossed")
			for _, first := range order {
				close(c.net.hold[first])
				synctest.Wait()
			}
			if order[0] == "b" {
				require.Contains(t, c.log.String(), "duplicate peer connection refused")
			}
			time.Sleep(10 * time.Second)
			require.Equal(t, session.Ready, state(a, "b"))
			require.Equal(t, session.Ready, state(b, "a"))
			require.Equal(t, 1, c.open(a, "b"), "that of the smaller id stays")
			require.Zero(t, c.open(b, "a"))
			for from, to := range map[*testHost]string{a: "b", b: "a"} {
				ups, _ := from.upped(to)
				require.Equal(t, 1, ups)
				_, err := from.peers.Lookup(t.Context(), to, "r", keys(1))
				require.NoError(t, err)
			}
		})
	}
}

// TestOneSession: both sides dial; exactly one session is left, for any delay of the
// dials.
func TestOneSession(t *testing.T) {
	for seed := range uint64(25) {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(t)
			defer c.close()
			rnd := rand.New(rand.NewPCG(seed, 3))
			delay := make(chan time.Duration, 1000)
			for range cap(delay) {
				delay <- time.Duration(rnd.IntN(4)) * 10 * ms
			}
			c.net.delay = func() time.Duration { return <-delay }
			a := c.start("a", "b")
			time.Sleep(time.Duration(rnd.IntN(3)) * 10 * ms)
			b := c.start("b", "a")
			time.Sleep(3 * time.Second)
			require.Equal(t, session.Ready, state(a, "b"))
			require.Equal(t, session.Ready, state(b, "a"))
			ups := func() int {
				x, _ := a.upped("b")
				y, _ := b.upped("a")
				return x + y
			}
			before := ups()
			require.LessOrEqual(t, before, 6, "sessions do not replace each other for long")
			time.Sleep(10 * time.Second)
			require.Equal(t, before, ups(), "the session stays")
			require.EqualValues(t, 1, c.open(a, "b")+c.open(b, "a"), "one connection")
			_, err := a.peers.Lookup(t.Context(), "b", "r", keys(1))
			require.NoError(t, err)
		})
	}
}

// open counts the connections that a node dialed to a peer and uses.
func (c *cluster) open(h *testHost, peer string) int {
	a, err := h.peers.find(peer)
	require.NoError(c.t, err)
	n := make(chan int)
	require.NoError(c.t, a.post(func(time.Duration) {
		if a.conn != nil && a.conn.dialed {
			n <- 1
		}
		n <- 0
	}, false))
	v := <-n
	if v == 1 {
		<-n
	}
	return v
}

// TestKeepNew: the tie-break, case by case, and from both sides the same.
func TestKeepNew(t *testing.T) {
	up := session.Current{Exists: true, Dialed: true, HasSession: true, Ready: true, BootID: 7}
	for name, c := range map[string]struct {
		local, remote string
		cur           session.Current
		boot          uint64
		want          bool
	}{
		"no connection":                      {"a", "b", session.Current{}, 7, true},
		"newer of the same peer":             {"a", "b", session.Current{Exists: true, HasSession: true, Ready: true, BootID: 7}, 7, true},
		"smaller dialed, is up":              {"a", "b", up, 7, false},
		"smaller dialed, about to say hello": {"a", "b", session.Current{Exists: true, Dialed: true}, 7, false},
		"smaller dialed, silent":             {"a", "b", session.Current{Exists: true, Dialed: true, HasSession: true, BootID: 7}, 7, true},
		"smaller dialed, peer restarted":     {"a", "b", up, 8, true},
		"larger dialed, smaller comes":       {"b", "a", up, 7, true},
		"larger about to say hello":          {"b", "a", session.Current{Exists: true, Dialed: true}, 7, true},
	} {
		require.Equal(t, c.want, session.KeepNew(c.local, c.remote, c.cur, c.boot), name)
	}
}

// TestSetPeers: a removed peer's jobs end, its commands are refused, and it may come
// back.
func TestSetPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		b := c.start("b")
		b.setMute(true)
		a := c.start("a", "b")
		time.Sleep(100 * ms)
		h, err := a.peers.Demand(t.Context(), "b", demandOf(2))
		require.NoError(t, err)
		require.NoError(t, a.peers.SetPeers(nil))
		_, results := h.Results()
		require.Equal(t, session.Refused, results[0].Cause)
		_, err = a.peers.Demand(t.Context(), "b", demandOf(2))
		require.ErrorIs(t, err, ErrUnknownPeer)
		require.NoError(t, a.peers.SetPeers([]PeerAddr{{ID: "b", Control: "b"}}))
		time.Sleep(time.Second)
		require.Equal(t, session.Ready, state(a, "b"))
		b.setMute(false)
		h, err = a.peers.Demand(t.Context(), "b", demandOf(2))
		require.NoError(t, err)
		_, results = h.Results()
		require.Equal(t, session.Transferred, results[1].Cause, "ids of the new core are above the old one's")
		require.Error(t, a.peers.SetPeers([]PeerAddr{{ID: "b", Control: "b"}, {ID: "b", Control: "c"}}))
		require.Error(t, a.peers.SetPeers([]PeerAddr{{ID: "a", Control: "a"}}), "itself")
	})
}

// TestDrain: the peer is told, jobs in work end, and the wait is bounded.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		b := c.start("b")
		a := c.start("a", "b")
		time.Sleep(100 * ms)
		b.setMute(true)
		h, err := a.peers.Demand(t.Context(), "b", demandOf(2))
		require.NoError(t, err)
		synctest.Wait()
		start := time.Now()
		require.False(t, b.peers.Drain(t.Context(), "rollout"))
		require.Equal(t, session.DefaultLimits().Drain, time.Since(start))
		_, err = a.peers.Lookup(t.Context(), "b", "r", keys(1))
		require.ErrorContains(t, err, "draining")
		h.Abort("enough")
		require.True(t, b.peers.Drain(t.Context(), "rollout"))
	})
}

// TestSlowReader: a peer that does not read costs its own connection when the queue
// is full, and nothing grows.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		c.start("b")
		a := c.start("a", "b")
		time.Sleep(100 * ms)
		c.net.freeze("b")
		defer c.net.thaw("b")
		x, err := a.peers.find("b")
		require.NoError(t, err)
		for range 20 {
			require.NoError(t, x.post(func(now time.Duration) {
				for range 1000 {
					x.core.Release(now, x.core.Lookup(now, "r", keys(1), 1))
				}
			}, false))
		}
		synctest.Wait()
		require.Contains(t, c.log.String(), "reads too slowly")
	})
}

// TestSessionsMax: peers that come by themselves are bounded, and forgotten when dead.
func TestSessionsMax(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		c.most = 3
		a := c.start("a")
		for i := range 5 {
			c.start(fmt.Sprintf("n%d", i), "a")
			time.Sleep(100 * ms)
		}
		require.Len(t, a.peers.Status(), 3)
		require.Contains(t, c.log.String(), "3 peers, the most allowed")
		for i := range 3 {
			c.stop(fmt.Sprintf("n%d", i))
		}
		time.Sleep(5 * time.Second)
		require.Len(t, a.peers.Status(), 2, "the others took the room")
	})
}

// TestBoundsOfAnActor: while an actor is held up, new jobs for it are refused beyond a bound, words
// on jobs in work are not, and of what the peer sends only a few messages are read: the rest
// stays in its own connection.
func TestBoundsOfAnActor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		defer c.close()
		b := c.start("b")
		a := c.start("a", "b")
		time.Sleep(100 * ms)
		x, err := a.peers.find("b")
		require.NoError(t, err)
		y, err := b.peers.find("a")
		require.NoError(t, err)
		hold := make(chan struct{})
		require.NoError(t, x.post(func(time.Duration) { <-hold }, false))
		synctest.Wait()
		ran := 0
		for range mailboxMax {
			require.NoError(t, x.post(func(time.Duration) { ran++ }, true))
		}
		_, err = a.peers.Lookup(t.Context(), "b", "r", keys(1))
		require.ErrorIs(t, err, ErrBusy)
		_, err = a.peers.Demand(t.Context(), "b", demandOf(1))
		require.ErrorIs(t, err, ErrBusy)
		require.NoError(t, x.post(func(time.Duration) { ran++ }, false), "a word")

		require.NoError(t, y.post(func(now time.Duration) {
			for range 1000 {
				y.core.Release(now, y.core.Lookup(now, "r", keys(1), 1))
			}
		}, false))
		synctest.Wait()
		require.Len(t, x.conn.unread, unreadMax)
		close(hold)
		synctest.Wait()
		require.Equal(t, mailboxMax+1, ran)
		time.Sleep(time.Second)
		require.Equal(t, session.Ready, state(a, "b"))
		_, err = a.peers.Lookup(t.Context(), "b", "r", keys(1))
		require.NoError(t, err)
	})
}
