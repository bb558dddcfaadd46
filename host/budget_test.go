package host

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/session"
)

func peerBytes(n int64) nodeOption {
	return func(c *config.Config) { c.Bounds.PeerPinnedBytes = n }
}

// slotBytes is what chunks take of the slab: each a slot of a page.
func slotBytes(chunks int64) int64 { return chunks * 4096 }

// TestPeerBudgetInProbe: the tier's chunks that one peer's demands pin are bounded. What is
// over it is refused by name, at once, and the request goes on with the rest; the peer's next
// request has the whole budget again, and status and metrics say what is taken.
func TestPeerBudgetInProbe(t *testing.T) {
	log := &logTo{}
	producer := startLogged(t, "producer", unjudged, log, peerBytes(slotBytes(6)))
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"x", 300}
	p.produce("x", x, enginepb.Leg_PROBE)
	for k := range 2 {
		c.fresh()
		r := c.beginConsumer(fmt.Sprint("r", k), x, enginepb.Leg_PROBE)
		ev := r.load()
		require.False(t, ev.Ok)
		require.NotEmpty(t, ev.Failures)
		for _, f := range ev.Failures {
			require.Equal(t, "refused", f.Cause)
			require.Equal(t, fmt.Sprintf("the producer keeps at most %d bytes at a time for the demands of one peer, its bounds.peer_pinned_bytes", slotBytes(6)), f.Detail)
		}
		require.Positive(t, counter(consumer, "transferred", "full", "probe")+counter(consumer, "transferred", "sliding", "probe"))
		r.finish()
		clean(t, producer, consumer)
		require.Zero(t, producer.peerPinnedBytes("consumer"))
	}
	require.Positive(t, counter(producer, "peer_ended", "full", "probe", "refused"))
	require.Contains(t, log.String(), "cause=peer-budget peer=consumer")

	// What is within the budget of another request is served.
	short := text{"short", 48} // 3 chunks of full, which are within it with the window's
	p.fresh()
	p.produce("short", short, enginepb.Leg_PROBE)
	r := c.beginConsumer("short", short, enginepb.Leg_PROBE)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestPeerBudgetIsSeen: while a peer's demand is in work, status and metrics say what it
// keeps, and a second demand of that peer is refused over the bound.
func TestPeerBudgetIsSeen(t *testing.T) {
	producer := startNode(t, "producer", peerBytes(slotBytes(2)))
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	x := text{"x", 64}
	attach(t, producer).produce("x", x, enginepb.Leg_PROBE)
	// A job that this node's session does not know of: it stays until it is ended here.
	demand := func(id session.JobID, chunks ...int) *serving {
		j := session.Job{ID: id, Leg: session.LegProbe, Deadline: time.Hour}
		for _, i := range chunks {
			j.Keys = append(j.Keys, session.Key(x.key("full", i)))
			j.Slots, j.Epochs = append(j.Slots, 0), append(j.Epochs, 1)
		}
		sessions{producer}.OnDemand("consumer", j)
		return producer.serving("consumer", id)
	}
	first := demand(1_000_001, 0, 1)
	require.Len(t, first.holds, 2)
	require.EqualValues(t, slotBytes(2), producer.peerPinnedBytes("consumer"))
	require.EqualValues(t, slotBytes(2), pinnedGauge(t, producer, "consumer"))
	for _, s := range producer.Status().Peers {
		if s.ID == "consumer" {
			require.EqualValues(t, slotBytes(2), s.PinnedBytes)
			require.EqualValues(t, slotBytes(2), s.PinnedBytesMax)
		}
	}
	second := demand(1_000_002, 2)
	require.Empty(t, second.holds)
	other := producer.tier.Snapshot()
	require.Len(t, other.Pins, 1, "what is over the budget is not pinned: %v", other.Pins)
	for id := session.JobID(1_000_001); id <= 1_000_002; id++ {
		sessions{producer}.OnJobEnd("consumer", id, []session.Result{{Cause: session.Aborted}}, "")
	}
	clean(t, producer)
	require.Zero(t, producer.peerPinnedBytes("consumer"))
}

// TestPeerBudgetHoldsTheLongestPrompt: by default a peer has half of the slab, or what one
// longest prompt takes when that is more, but never more than the slab.
func TestPeerBudgetHoldsTheLongestPrompt(t *testing.T) {
	const longest = 32 + 3 // chunks of full and of the window that a prompt of 512 tokens demands
	for slots, want := range map[int64]int64{1024: 512, 60: longest, 20: 20} {
		n := startNode(t, "a", func(c *config.Config) { c.SlabBytes, c.Bounds.ParkedBytes = slots*4096, slots*4096 })
		require.Equal(t, slotBytes(want), n.peerPinnedMax.Load(), "%d slots", slots)
		require.EqualValues(t, slotBytes(want), n.joinLimits().PeerBytesMax)
	}
	n := startNode(t, "a", peerBytes(slotBytes(7)))
	require.EqualValues(t, slotBytes(7), n.joinLimits().PeerBytesMax)
}

// pinnedGauge reads tierd_peer_pinned_bytes of a peer.
func pinnedGauge(t *testing.T, n *Node, peer string) float64 {
	t.Helper()
	families, err := n.metrics.Registry().Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "tierd_peer_pinned_bytes" && m.Label[0].GetValue() == peer {
				return m.Gauge.GetValue()
			}
		}
	}
	require.Fail(t, "no such gauge")
	return 0
}

// TestPeerBudgetInSupply: what is bound to a peer's demands in legs pd and demand is in the
// same budget; the refusal names it.
func TestPeerBudgetInSupply(t *testing.T) {
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		t.Run(legName(leg), func(t *testing.T) {
			producer := startNode(t, "producer", peerBytes(slotBytes(6)))
			consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
			ready(t, consumer, "producer")
			p, c := attach(t, producer), attach(t, consumer)
			x := text{"x", 300}
			p.produce("r", x, leg) // all of it is there when the demand comes
			r := c.beginConsumer("r", x, leg)
			ev := r.load()
			require.Equal(t, causes(ev)["refused"]+causes(ev)["aborted"], len(ev.Failures), "%v", ev.Failures)
			require.Positive(t, causes(ev)["refused"])
			r.finish()
			clean(t, producer, consumer)
			require.Zero(t, producer.peerPinnedBytes("consumer"))
			p.fresh()
			c.fresh()
			short := text{"short", 48}
			p.produce("s", short, leg)
			s := c.beginConsumer("s", short, leg)
			hit(t, s, s.load())
			s.finish()
		})
	}
}

// TestDemandOfWhatTheTierHolds: in leg demand a chunk that the producer's plan leaves out, and
// that its tier holds from another request, is supplied: before the producer begins, while it
// works, and after its last word.
func TestDemandOfWhatTheTierHolds(t *testing.T) {
	whole, part := text{"a", 300}, text{"a", 100}
	for _, when := range []string{"before", "during", "after"} {
		t.Run(when, func(t *testing.T) {
			producer, consumer := pair(t)
			p, c := attach(t, producer), attach(t, consumer)
			p.produce("first", whole, enginepb.Leg_PROBE) // it stays in the tier
			p.fresh()
			var r *consuming
			if when == "before" {
				r = c.beginConsumer("r", whole, enginepb.Leg_DEMAND)
				jobsOf(t, producer, 1)
			}
			q, _ := p.beginProducer("r", part, enginepb.Leg_DEMAND)
			if when == "during" {
				r = c.beginConsumer("r", whole, enginepb.Leg_DEMAND)
			}
			require.True(t, q.settle(q.step(100, 0)).Ok)
			q.finish(false)
			if when == "after" {
				r = c.beginConsumer("r", whole, enginepb.Leg_DEMAND)
			}
			hit(t, r, r.load())
			r.finish()
			clean(t, producer, consumer)
			require.Zero(t, producer.peerPinnedBytes("consumer"))
		})
	}
}
