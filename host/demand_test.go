package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

func storeCap(tokens uint64) beginOption {
	return func(b *enginepb.BeginRequest) { b.MaxStoreTokens = tokens }
}

// jobsOf waits until so many demands are open at the producer's join.
func jobsOf(t *testing.T, producer *Node, jobs int) {
	t.Helper()
	require.Eventually(t, func() bool { return producer.meeting.status().Jobs == jobs }, 30*time.Second, time.Millisecond)
}

// TestLegDemand: the same prompt on both sides, whoever begins first, is a hit, and the
// counters of both sides agree.
func TestLegDemand(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	for _, n := range []uint64{17, 64, 65, 300, 512} {
		for _, first := range []string{"producer", "consumer"} {
			p.fresh()
			c.fresh()
			x, id := text{fmt.Sprint(first, n), n}, fmt.Sprint(first, n)
			before := counter(producer, "supplied", "full", "demand")
			var r *consuming
			if first == "producer" {
				p.produce(id, x, enginepb.Leg_DEMAND)
				r = c.beginConsumer(id, x, enginepb.Leg_DEMAND)
			} else {
				r = c.beginConsumer(id, x, enginepb.Leg_DEMAND)
				jobsOf(t, producer, 1)
				p.produce(id, x, enginepb.Leg_DEMAND)
			}
			ev := r.load()
			hit(t, r, ev)
			groups := r.finish().Groups
			require.Equal(t, groups[1].Demanded, groups[1].Transferred)
			require.Equal(t, float64(n/16), counter(producer, "supplied", "full", "demand")-before)
			clean(t, producer, consumer)
		}
	}
	serves(t, producer, consumer)
}

// TestDemandRefusedByThePlan: what the producer's plan will never supply is refused when it
// begins, by name and with the reason, whether the demand came before or after; the consumer
// goes on from the last aligned point below it, or at once when there is none. The producer
// finishes only afterwards.
func TestDemandRefusedByThePlan(t *testing.T) {
	x := text{"a", 300}
	for _, c := range []struct {
		name    string
		of      text // the producer's prompt
		edit    beginOption
		resume  uint64
		details []string // of failures, one each at least
	}{
		{"store cap", x, storeCap(100), 64, []string{"beyond the 100 tokens that the producer stores of a request"}},
		{"store cap below every aligned point", x, storeCap(40), 0, []string{"beyond the 40 tokens", "not wanted any more"}},
		{"another prompt with a shared prefix", text{"a", 200}, storeCap(0), 192, []string{"no chunk of the producer's prompt, which has 200 tokens"}},
		{"another prompt, shorter than an aligned point", text{"a", 50}, storeCap(0), 0, []string{"no chunk of the producer's prompt, which has 50 tokens", "not wanted any more"}},
		{"another prompt altogether", text{"b", 300}, storeCap(0), 0, []string{"no chunk of the producer's prompt"}},
	} {
		for _, first := range []string{"producer", "consumer"} {
			t.Run(c.name+"/"+first, func(t *testing.T) {
				log := &logTo{}
				producer := startNode(t, "producer")
				consumer := startLogged(t, "consumer", unjudged, log, withPeer("producer", producer.Addresses().Peer))
				ready(t, consumer, "producer")
				pe, ce := attach(t, producer), attach(t, consumer)
				var r *consuming
				if first == "consumer" {
					r = ce.beginConsumer("r", x, enginepb.Leg_DEMAND)
					jobsOf(t, producer, 1)
				}
				q, _ := pe.beginProducer("r", c.of, enginepb.Leg_DEMAND, c.edit)
				if first == "producer" {
					r = ce.beginConsumer("r", x, enginepb.Leg_DEMAND)
				}
				var ev *enginepb.Event
				if c.resume == 0 { // it ends before a token is computed
					ev = r.load()
					jobsOf(t, producer, 0) // nothing of it is wanted any more
					q.finish(true)
				} else {
					job := r.startLoad()
					require.True(t, q.settle(q.step(min(c.of.tokens, 240), 0)).Ok)
					ev = r.wait(job) // and this before the prompt's end
					q.finish(true)
				}
				require.Equal(t, c.resume, ev.ResumeTokens, ev.Error)
				require.False(t, ev.Ok)
				seen := map[string]bool{}
				for _, f := range ev.Failures {
					require.Contains(t, []string{"sliding", "full"}, f.Group)
					for _, d := range c.details {
						seen[d] = seen[d] || strings.Contains(f.Detail, d)
					}
				}
				for _, d := range c.details {
					require.True(t, seen[d], "no failure says %q: %v", d, ev.Failures)
				}
				r.finish()
				clean(t, producer, consumer)
				require.NotContains(t, log.String(), "level=WARN msg=\"a request goes on", "that is what the leg is for")
			})
		}
	}
}

// TestFate: each answer of a promise, and its reason.
func TestFate(t *testing.T) {
	set := func(bits ...int) abi.Bitmap {
		b := abi.NewBitmap(6)
		for _, i := range bits {
			b.Set(i)
		}
		return b
	}
	f := &promise{chunks: map[tier.Key]plan.Ref{}, groups: []geometry{{chunkTokens: 16}}, prompt: 100, cap: 80,
		promised: []abi.Bitmap{set(0)}, open: []abi.Bitmap{set(1)}, admitted: []abi.Bitmap{set(0, 1, 2)}}
	for c, want := range []struct {
		fate join.Fate
		why  string
	}{
		{join.WillCome, ""},
		{join.Open, ""},
		{join.Never, "the group's rule does not keep it at the point where a consumer of this prompt goes on"},
		{join.Never, "a policy of the producer does not let it into the tier"},
		{join.Never, "a policy of the producer does not let it into the tier"},
		{join.Never, "beyond the 80 tokens that the producer stores of a request (max_store_tokens)"},
		{join.Never, "no chunk of the producer's prompt, which has 100 tokens"},
	} {
		k := tier.Key{byte(c)}
		if c < 6 {
			f.chunks[k] = plan.Ref{Chunk: uint32(c)}
		}
		fate, why := f.fate((*join.Key)(&k))
		require.Equal(t, want.fate, fate, "chunk %d", c)
		require.Equal(t, want.why, why, "chunk %d", c)
	}
}

// TestDemandNotBegun: a producer that never begins ends the wait at the request's own
// deadline, and the reason is that it did not begin.
func TestDemandNotBegun(t *testing.T) {
	producer, consumer := pair(t)
	c := attach(t, consumer)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_DEMAND, func(b *enginepb.BeginRequest) { b.DeadlineMs = 200 })
	ev := r.load()
	require.Zero(t, ev.ResumeTokens)
	require.Equal(t, map[string]int{"unmatched": len(ev.Failures)}, causes(ev))
	require.Contains(t, ev.Failures[0].Detail, "not begun the request by ")
	r.finish()
	clean(t, producer, consumer)
}

// rows plays one of vllm-semantics' rows in legs pd and demand: the consumer's demand waits,
// then the producer does its part. The load must end although the request's deadline is a
// minute away.
func rows(t *testing.T, options []nodeOption, part func(t *testing.T, p *testEngine, leg enginepb.Leg) (ends func()), check func(t *testing.T, leg enginepb.Leg, ev *enginepb.Event)) {
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		t.Run(leg.String(), func(t *testing.T) {
			producer := startNode(t, "producer", options...)
			consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
			ready(t, consumer, "producer")
			p, c := attach(t, producer), attach(t, consumer)
			r := c.beginConsumer("a", text{"a", 300}, leg)
			jobsOf(t, producer, 1)
			job := r.startLoad()
			ends := part(t, p, leg)
			var ev *enginepb.Event
			if leg == enginepb.Leg_PD { // terminal after the last word
				ends()
				ev = r.wait(job)
			} else { // terminal before it
				ev = r.wait(job)
				ends()
			}
			require.False(t, ev.Ok)
			require.NotEmpty(t, ev.Failures)
			for _, f := range ev.Failures {
				require.NotEmpty(t, f.Group)
				require.NotEmpty(t, f.Detail)
			}
			check(t, leg, ev)
			r.finish()
			clean(t, producer, consumer)
		})
	}
}

// TestRowPrimaryFull: a producer that has no room for part of its supply (row 4).
func TestRowPrimaryFull(t *testing.T) {
	rows(t, []nodeOption{slabOf(10)}, func(t *testing.T, p *testEngine, leg enginepb.Leg) func() {
		q, _ := p.beginProducer("a", text{"a", 300}, leg)
		require.Positive(t, causes(q.settle(q.step(296, 0)))["no-room"])
		return func() { q.finish(false) }
	}, func(t *testing.T, leg enginepb.Leg, ev *enginepb.Event) {
		require.Positive(t, causes(ev)["no-room"])
		if leg == enginepb.Leg_PD {
			require.Equal(t, map[string]int{"no-room": len(ev.Failures)}, causes(ev))
		}
	})
}

// TestRowNothingHeld: a producer that stores nothing of what is demanded (row 8). In leg pd
// it computes nothing; in leg demand its cap lets nothing through.
func TestRowNothingHeld(t *testing.T) {
	rows(t, nil, func(t *testing.T, p *testEngine, leg enginepb.Leg) func() {
		if leg == enginepb.Leg_PD {
			q, _ := p.beginProducer("a", text{"a", 300}, leg)
			return func() { q.finish(false) }
		}
		q, _ := p.beginProducer("a", text{"a", 300}, leg, storeCap(1))
		return func() { q.finish(false) }
	}, func(t *testing.T, leg enginepb.Leg, ev *enginepb.Event) {
		require.Zero(t, ev.ResumeTokens)
		require.Equal(t, map[string]int{"unmatched": demandOf300}, causes(ev))
	})
}

// TestRowProducerAborts: what is left out by an abort is named, in both legs one round trip
// after it. In leg demand the request lives on until then: it is the abort that ends it.
func TestRowProducerAborts(t *testing.T) {
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		producer, consumer := pair(t)
		p, c := attach(t, producer), attach(t, consumer)
		x := text{"a", 300}
		r := c.beginConsumer("a", x, leg)
		jobsOf(t, producer, 1)
		job := r.startLoad()
		q, _ := p.beginProducer("a", x, leg)
		require.True(t, q.settle(q.step(100, 0)).Ok)
		q.finish(true)
		ev := r.wait(job)
		require.False(t, ev.Ok)
		require.Contains(t, ev.Failures[0].Detail, "aborted")
		if leg == enginepb.Leg_DEMAND { // the aligned tail at 64 was stored, and is asked for
			require.EqualValues(t, 64, ev.ResumeTokens, ev.Error)
		}
		r.finish()
		clean(t, producer, consumer)
	}
}

// TestConsumerAbortsLegDemand: an abort of the consumer, before and after the producer
// begins, leaves no pin and no slot behind, and the producer goes on.
func TestConsumerAbortsLegDemand(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	for _, computed := range []uint64{0, 100, 300} {
		p.fresh()
		c.fresh()
		id := fmt.Sprint("r", computed)
		r := c.beginConsumer(id, x, enginepb.Leg_DEMAND)
		jobsOf(t, producer, 1)
		q, _ := p.beginProducer(id, x, enginepb.Leg_DEMAND)
		if computed > 0 {
			require.True(t, q.settle(q.step(computed, 0)).Ok)
		}
		r.finish()
		jobsOf(t, producer, 0)
		clean(t, consumer)
		q.finish(computed < 300)
		clean(t, producer)
	}
}

// TestRoundsOfOneTransfer: several consumers' requests of one transfer, each with its own
// keys, some of which never come. Each has one result, for its own keys; the end of one is
// not the end of another.
func TestRoundsOfOneTransfer(t *testing.T) {
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		producer, consumer := pair(t)
		p, c := attach(t, producer), attach(t, consumer)
		same := func(b *enginepb.BeginRequest) { b.TransferId = "one" }
		own := func(salt string) beginOption {
			return func(b *enginepb.BeginRequest) { same(b); b.TenantSalt = []byte(salt) }
		}
		x := text{"a", 100}
		var rounds []*consuming
		var jobs []uint64
		for k, edit := range []beginOption{same, own("another tenant"), same, own("a third")} {
			r := c.beginConsumer(fmt.Sprint("round", k), x, leg, edit)
			rounds, jobs = append(rounds, r), append(jobs, r.startLoad())
		}
		_, err := c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: rounds[2].id, Abort: true}) // the others go on
		require.NoError(t, err)
		p.produce("a", x, leg, same)
		for k, r := range rounds {
			if k == 2 {
				continue
			}
			ev := r.wait(jobs[k])
			if k == 0 {
				hit(t, r, ev)
			} else {
				require.Zero(t, ev.ResumeTokens)
				require.Equal(t, map[string]int{"unmatched": len(ev.Failures)}, causes(ev))
			}
			r.finish()
		}
		clean(t, producer, consumer)
	}
}

// TestLapsedSupplyIsFreed: what a job had bound when its lease lapsed is let go and counted,
// and not parked for another minute.
func TestLapsedSupplyIsFreed(t *testing.T) {
	n := startNode(t, "producer")
	p := attach(t, n)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_DEMAND)
	n.meeting.mu.Lock()
	var keys []session.Key
	for k := range n.meeting.holds["t-a"] {
		keys = append(keys, session.Key(k))
	}
	n.meeting.mu.Unlock()
	require.NotEmpty(t, keys)
	s := sessions{n}
	s.OnDemand("peer", session.Job{ID: 1, TransferID: "t-a", Leg: legDemand, Keys: keys, Deadline: time.Hour})
	require.Zero(t, n.meeting.status().ParkedKeys, "all of it is bound")
	lapsed := make([]session.Result, len(keys))
	for i := range lapsed {
		lapsed[i] = session.Result{Cause: session.Lapsed}
	}
	s.OnJobEnd("peer", 1, lapsed, "")
	require.Eventually(t, func() bool { return n.meeting.status().Finished == 1 }, 30*time.Second, time.Millisecond)
	require.EqualValues(t, len(keys), counter(n, "parked_freed", "lapsed"))
	require.Empty(t, n.tier.Snapshot().Pins)
}

// TestJobIDUsedAgain: a peer's next process may name a job as the one before did, whose push
// has not ended here. What becomes of the old one is not taken for the new one's.
func TestJobIDUsedAgain(t *testing.T) {
	n := startNode(t, "producer")
	p := attach(t, n)
	x, y := text{"x", 64}, text{"y", 64}
	p.produce("x", x, enginepb.Leg_PROBE) // the tier has it
	s := sessions{n}
	job := func(transfer string, keys ...session.Key) *serving {
		s.OnDemand("peer", session.Job{ID: 1, TransferID: transfer, Leg: legDemand, Keys: keys, Deadline: time.Hour})
		return n.serving("peer", 1)
	}
	ended := func(keys int) {
		s.OnJobEnd("peer", 1, slices.Repeat([]session.Result{{Cause: session.Aborted}}, keys), "")
	}
	key := func(x text, chunk int) session.Key { return session.Key(x.key("full", chunk)) }
	old := job("t-y", key(y, 0), key(x, 0), key(x, 1))
	pushing, pushed := context.WithCancel(t.Context())
	defer pushed()
	old.wg.Go(func() { <-pushing.Done() })
	ended(3)
	fresh := job("t-other", key(y, 1))
	q, _ := p.beginProducer("y", y, enginepb.Leg_DEMAND) // its plan has nothing of x
	require.Empty(t, fresh.holds)
	require.Equal(t, 2, n.meeting.status().Jobs)
	ended(1)
	require.Eventually(t, func() bool { return n.meeting.status().Jobs == 1 }, soon, time.Millisecond)
	pushed()
	require.Eventually(t, func() bool { return n.meeting.status().Jobs == 0 }, soon, time.Millisecond)
	q.finish(false)
	clean(t, n)
	require.Zero(t, n.peerPinnedBytes("peer"))
}

// TestDefaultsAreTheTableOfWaits: what a node is configured with when its file says nothing
// is what the cores ship, so that the tests of their limits speak of the daemon's.
func TestDefaultsAreTheTableOfWaits(t *testing.T) {
	d := config.Defaults().Deadlines
	n := &Node{cfg: &config.Config{Deadlines: d, Bounds: config.Defaults().Bounds}, waits: waitsOf(&d)}
	require.Equal(t, session.DefaultLimits(), n.limits())
	j, shipped := n.joinLimits(), join.DefaultLimits()
	shipped.ParkedBytesMax, shipped.PeerBytesMax = j.ParkedBytesMax, j.PeerBytesMax // they follow slab_bytes
	require.Equal(t, shipped, j)
	require.Equal(t, 2*time.Second+time.Second, n.pendingLimit(200e6))
	n.cfg.Bounds.MessageBytes = config.MessageBytesMin
	require.GreaterOrEqual(t, n.limits().KeysMax, session.KeysMin, "what every node takes in one message")
}

// TestLateDemandOfAFinishedTransfer: the id of a transfer of which everything is gone is
// remembered, and a demand for it is answered at once; in leg demand, with what is in the tier.
func TestLateDemandOfAFinishedTransfer(t *testing.T) {
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		producer := startNode(t, "producer", func(c *config.Config) { c.Deadlines.ParkedMS = 20 })
		consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
		ready(t, consumer, "producer")
		p, c := attach(t, producer), attach(t, consumer)
		x := text{"a", 300}
		p.produce("a", x, leg)
		require.Eventually(t, func() bool { return producer.meeting.status().Finished == 1 }, 30*time.Second, time.Millisecond)
		r := c.beginConsumer("a", x, leg)
		ev := r.load()
		if leg == enginepb.Leg_DEMAND {
			hit(t, r, ev)
		} else {
			require.Zero(t, ev.ResumeTokens)
			require.Equal(t, map[string]int{"unmatched": len(ev.Failures)}, causes(ev))
			require.Contains(t, ev.Failures[0].Detail, session.ReasonText(sessionpb.Reason_REASON_FINISHED))
		}
		r.finish()
		clean(t, producer, consumer)
	}
}
