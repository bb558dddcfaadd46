package host

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/host/tier"
)

// TestPendingEndsExactly: a chunk that is being written is waited for deadlines.pending_ms
// and the time of its bytes, on the producer's side and for a private copy, no shorter and
// no longer; when its write ends first, so does the wait.
func TestPendingEndsExactly(t *testing.T) {
	const chunk = 1 << 20
	limit := 300*time.Millisecond + time.Second*chunk/200e6
	for _, c := range []struct {
		name string
		do   func(n *Node, keys []tier.Key)
	}{
		{"a peer's demand", func(n *Node, keys []tier.Key) {
			v := &serving{node: n, peer: "p", owner: tier.Owner{Kind: ownerPeer}, ctx: n.life, holds: map[uint32]hold{},
				job: session.Job{Leg: legProbe, Keys: []session.Key{session.Key(keys[0])}}}
			v.await(keys, []uint32{0})
		}},
		{"a private copy", func(n *Node, keys []tier.Key) {
			slots, err := n.tier.Stage(tier.Owner{Kind: ownerProduce}, 1)
			require.NoError(t, err)
			b, err := n.tier.Bytes(slots[0])
			require.NoError(t, err)
			n.adopt([]offer{{keys[0], hold{bytes: b[:chunk], private: slots[0]}}})
		}},
	} {
		for _, ends := range []time.Duration{0, limit / 3} {
			synctest.Test(t, func(t *testing.T) {
				n := waitingNode(t, chunk)
				keys := []tier.Key{tier.MakeKey(tier.Tenant(nil), make([]byte, 32), 0)}
				adm, err := n.tier.Admit(tier.Owner{Kind: ownerRequest, ID: "writer"}, keys)
				require.NoError(t, err)
				want := limit
				if ends > 0 {
					want = ends
					time.AfterFunc(ends, func() { _ = n.tier.Drop(adm[0].Slot) })
				}
				began := time.Now()
				c.do(n, keys)
				require.Equal(t, want, time.Since(began), c.name)
				n.end()
			})
		}
	}
}

// waitingNode is as much of a node as waits for chunks.
func waitingNode(t *testing.T, chunk int64) *Node {
	tr, err := tier.New(tier.Options{Path: filepath.Join(t.TempDir(), "slab"), SlotBytes: chunk, Slots: 4})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tr.Close() })
	n := &Node{tier: tr, groups: []geometry{{name: "g", chunkTokens: 16, chunkBytes: chunk}},
		waits: waits{pending: 300 * time.Millisecond, bytesPerSecond: 200e6}}
	n.life, n.end = context.WithCancel(context.Background())
	n.peers, err = wire.New(wire.Config{Hello: &sessionpb.Hello{NodeId: "n", BootId: 1}, Limits: session.DefaultLimits(),
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}, sessions{n})
	require.NoError(t, err)
	t.Cleanup(n.peers.Close)
	return n
}
