package host

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/tier"
)

// slabOf is a node with so many slots, all of which supply may wait in.
func slabOf(slots int64) nodeOption {
	return func(c *config.Config) {
		c.SlabBytes, c.Bounds.ParkedBytes, c.Bounds.PeerPinnedBytes = slots*4096, slots*4096, slots*4096
	}
}

// demandOf300 is the chunks that a consumer of 300 tokens demands: 18 of full, 3 of the
// window.
const demandOf300 = 21

// TestSlabOfExactlyTheDemand: a consumer's slab of one slot less than the demand, the
// demand, and one more. What does not fit is planned around; what fits always works,
// with the slots of the request before.
func TestSlabOfExactlyTheDemand(t *testing.T) {
	for _, slots := range []int64{demandOf300 - 1, demandOf300, demandOf300 + 1} {
		t.Run(fmt.Sprint(slots), func(t *testing.T) {
			producer, consumer := pair(t, slabOf(slots))
			p, c := attach(t, producer), attach(t, consumer)
			for k := range 3 {
				p.fresh()
				c.fresh()
				x, id := text{fmt.Sprint("x", k), 300}, fmt.Sprint("r", k)
				p.produce(id, x, enginepb.Leg_PD)
				r := c.beginConsumer(id, x, enginepb.Leg_PD)
				ev := r.load()
				if slots >= demandOf300 {
					hit(t, r, ev)
				} else {
					require.Contains(t, r.reply.Note, "no room")
					require.True(t, ev.Ok, ev.Error)
					require.Zero(t, ev.ResumeTokens)
				}
				r.finish()
				clean(t, consumer)
			}
		})
	}
}

// TestSlabOfExactlyTheSupply: the same for a producer, whose earlier requests are parked
// in the slots that the next one needs. Whatever does not fit is named on both sides,
// and a slab that holds the supply of one request serves each in turn.
func TestSlabOfExactlyTheSupply(t *testing.T) {
	for _, slots := range []int64{18, 29, 30, 31, 32, 33, 34, 60} {
		t.Run(fmt.Sprint(slots), func(t *testing.T) {
			producer := startNode(t, "producer", slabOf(slots))
			consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
			ready(t, consumer, "producer")
			p, c := attach(t, producer), attach(t, consumer)
			for k := range 3 {
				p.fresh()
				c.fresh()
				x, id := text{fmt.Sprint("x", k), 300}, fmt.Sprint("r", k)
				q, _ := p.beginProducer(id, x, enginepb.Leg_PD)
				failed := 0
				for n := uint64(0); n < 300; {
					n = min(n+48, 300)
					ev := q.settle(q.step(n, 0))
					require.Equal(t, len(ev.Failures), causes(ev)["no-room"])
					failed += len(ev.Failures)
				}
				supplied := q.finish(false).Groups
				if k == 1 && failed == 0 {
					continue // nobody fetches it: it is parked, and in the way of the next
				}
				r := c.beginConsumer(id, x, enginepb.Leg_PD)
				ev := r.load()
				if failed == 0 {
					hit(t, r, ev)
				} else {
					require.Less(t, slots, int64(supplied[0].Supplied+supplied[1].Supplied)+int64(failed)+1)
					require.Equal(t, len(ev.Failures), causes(ev)["no-room"])
				}
				r.finish()
				clean(t, consumer, producer)
			}
		})
	}
}

// TestParkedSupplyMakesRoom: supply that nobody has asked for goes, oldest first, before a
// request is refused for want of a slot; it goes only when that is enough.
func TestParkedSupplyMakesRoom(t *testing.T) {
	n := startNode(t, "producer", slabOf(50))
	peer := startNode(t, "consumer", withPeer("producer", n.Addresses().Peer))
	ready(t, peer, "producer")
	p, c := attach(t, n), attach(t, peer)
	old, young := text{"old", 300}, text{"young", 100}
	p.produce("old", old, enginepb.Leg_PD)
	p.produce("young", young, enginepb.Leg_PD)
	parked := n.meeting.status().ParkedKeys
	free := n.tier.Slots() - parked
	require.Less(t, free, demandOf300)

	// Both as a producer and as a consumer of a peer.
	p.fresh()
	p.produce("next", text{"next", 300}, enginepb.Leg_PD)
	freed := counter(n, "parked_freed", "no_room")
	require.Positive(t, freed)
	require.Zero(t, counter(n, "no_room", "producer"))
	r := c.beginConsumer("young", young, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	r = c.beginConsumer("old", old, enginepb.Leg_PD) // the oldest are gone, and are named
	ev := r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"evicted": len(ev.Failures)}, causes(ev))
	r.finish()
	clean(t, n, peer)

	require.NoError(t, n.SetPeers([]config.Peer{{ID: "consumer", Control: peer.Addresses().Peer}}))
	ready(t, n, "consumer")
	c.fresh()
	p.fresh()
	c.produce("back", text{"back", 300}, enginepb.Leg_PD)
	free = n.tier.Slots() - n.meeting.status().ParkedKeys
	require.Less(t, free, demandOf300)
	s := p.beginConsumer("back", text{"back", 300}, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.PeerId = "consumer" })
	hit(t, s, s.load())
	require.Greater(t, counter(n, "parked_freed", "no_room"), freed)
	freed = counter(n, "parked_freed", "no_room")

	// While it holds its slots there are too few for another, whoever is shed: nobody is.
	left := n.meeting.status().ParkedKeys
	c.fresh()
	c.produce("large", text{"large", 512}, enginepb.Leg_PD)
	u := p.beginConsumer("large", text{"large", 512}, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.PeerId = "consumer" })
	require.Contains(t, u.reply.Note, "no room")
	require.Equal(t, left, n.meeting.status().ParkedKeys)
	require.Equal(t, freed, counter(n, "parked_freed", "no_room"))
	u.finish()
	s.finish()
	clean(t, n, peer)
}

// TestTheHeadOfAPromptStaysLongest: a request that has ended leaves its chunks so that the
// tail of the prompt, which is worth the least, is evicted first.
func TestTheHeadOfAPromptStaysLongest(t *testing.T) {
	const tokens = 160 // 10 chunks of full
	here := func(n *Node, x text, chunk int) bool {
		s := abi.NewStates(1)
		n.tier.Lookup([]tier.Key{x.key("full", chunk)}, s)
		return s.At(0) == abi.Hit
	}
	measure := startNode(t, "measure")
	attach(t, measure).produce("x", text{"x", tokens}, enginepb.Leg_PROBE)
	supply := int64(measure.tier.Snapshot().Readable)
	n := startNode(t, "producer", slabOf(supply))
	p := attach(t, n)
	x := text{"x", tokens}
	p.produce("x", x, enginepb.Leg_PROBE)
	require.True(t, here(n, x, 0) && here(n, x, 9), "the slab holds all of it")
	p.produce("y", text{"y", 48}, enginepb.Leg_PROBE)
	require.True(t, here(n, x, 0), "the head")
	require.False(t, here(n, x, 9), "the tail")
	clean(t, n)
}

// TestSupplyThatIsPartlyDemanded: requests of leg pd whose consumer wants only a part leave the
// rest parked, which takes no more slots than its bound has; a request of leg probe after them
// is supplied whole, because the parked slots go before the head of its own prompt.
func TestSupplyThatIsPartlyDemanded(t *testing.T) {
	for _, share := range []int64{1, 2} {
		t.Run(fmt.Sprint("parked 1/", share), func(t *testing.T) {
			const slots = 64
			producer := startNode(t, "producer", slabOf(slots), func(c *config.Config) { c.Bounds.ParkedBytes = slots * 4096 / share })
			consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
			ready(t, consumer, "producer")
			p, c := attach(t, producer), attach(t, consumer)
			for k := range 12 {
				p.fresh()
				c.fresh()
				x, id := text{fmt.Sprint("x", k), 300}, fmt.Sprint("r", k)
				p.produce(id, x, enginepb.Leg_PD)
				r := c.beginConsumer(id, x, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.MaxLoadTokens = 128 })
				hit(t, r, r.load())
				r.finish()
				require.LessOrEqual(t, producer.meeting.status().ParkedKeys, int(slots/share))
			}
			clean(t, producer, consumer)
			for k := range 3 {
				p.fresh()
				c.fresh()
				x, id := text{fmt.Sprint("y", k), 300}, fmt.Sprint("p", k)
				p.produce(id, x, enginepb.Leg_PROBE)
				r := c.beginConsumer(id, x, enginepb.Leg_PROBE)
				require.EqualValues(t, 288, r.reply.ResumeTokens, "all whole chunks of full")
				hit(t, r, r.load())
				r.finish()
			}
			clean(t, producer, consumer)
		})
	}
}
