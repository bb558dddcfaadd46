package host

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/tier"
)

// TestPendingAtThePeer: leg probe while the producer is in the middle of a chunk, at
// token 124 of 200. The plan counts on it, up to 128. When it does not come, the consumer
// plans once more without it and fetches what the aligned point at 64 needs instead.
func TestPendingAtThePeer(t *testing.T) {
	for how, want := range map[string]struct {
		resume uint64
		cause  string
	}{
		"it comes":            {128, ""},
		"shared":              {128, ""},
		"producer aborts":     {64, "unmatched"},
		"late":                {64, "unmatched"},
		"engine crashes":      {64, "unmatched"},
		"consumer aborts":     {}, // nobody asks
		"consumer leaves":     {},
		"no time is left":     {0, "deadline"},
		"without destination": {0, "unmatched"},
	} {
		t.Run(how, func(t *testing.T) {
			producer, consumer := pair(t, func(c *config.Config) { c.Deadlines.PendingMS = 60000 })
			if producer.waits.pending = time.Minute; how == "late" {
				producer.waits.pending = 100 * time.Millisecond
			}
			p, c := attach(t, producer), attach(t, consumer)
			x := text{how, 200}
			q, _ := p.beginProducer("a", x, enginepb.Leg_PROBE)
			q.settle(q.step(124, 0))
			r := c.beginConsumer("c", x, enginepb.Leg_PROBE, func(b *enginepb.BeginRequest) {
				if how == "no time is left" {
					b.DeadlineMs = 300
				}
			})
			require.Equal(t, uint64(128), r.reply.ResumeTokens, r.reply.Note)
			require.Equal(t, "sliding", r.reply.Fallback[0].Group)
			require.Equal(t, []*enginepb.ChunkRange{{First: 5, Last: 7}}, r.reply.Fallback[0].Chunks, "what going on from 64 reads beside the demand")
			if how == "without destination" {
				r.reply.Fallback = nil
			}
			job := r.startLoad()
			require.Eventually(t, func() bool { return waitsFor(producer, x.key("full", 7)) }, 30*time.Second, time.Millisecond, "the producer waits for its own chunk")
			var two *consuming
			if how == "shared" { // a second consumer of the same chunks
				two = c.beginConsumer("d", x, enginepb.Leg_PROBE)
			}
			switch how {
			case "it comes", "shared":
				q.settle(q.step(200, 0))
			case "producer aborts", "without destination":
				q.finish(true)
			case "engine crashes":
				require.NoError(t, p.c.Close())
			case "consumer aborts":
				_, err := c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "c", Abort: true})
				require.NoError(t, err)
			case "consumer leaves":
				require.NoError(t, c.c.Close())
			}
			if how != "consumer aborts" && how != "consumer leaves" {
				ev := r.wait(job)
				require.Equal(t, want.resume, ev.ResumeTokens, ev.Error)
				if want.cause == "" {
					hit(t, r, ev)
				} else {
					lower(t, r, ev)
					require.Equal(t, map[string]int{want.cause: len(ev.Failures)}, causes(ev))
					require.Equal(t, "full", ev.Failures[len(ev.Failures)-1].Group)
					require.Equal(t, uint32(7), ev.Failures[len(ev.Failures)-1].Chunk)
				}
				reply := r.finish()
				require.Equal(t, reply.Groups[0].Demanded, reply.Groups[0].Transferred+reply.Groups[0].Unmatched)
				if two != nil {
					hit(t, two, two.load())
					two.finish()
				}
			}
			if how != "engine crashes" && how != "producer aborts" && how != "without destination" {
				q.finish(how == "late" || how == "no time is left")
			}
			clean(t, producer, consumer)
			serves(t, producer, consumer)
		})
	}
}

// key is a chunk's name in the tier.
func (x text) key(group string, chunk int) tier.Key {
	g := map[string]uint32{"sliding": 0, "full": 1}[group]
	return tier.MakeKey(tier.Tenant([]byte("tenant")), x.hash((chunk+1)*chunkBlocks[group]-1), g)
}

// waitsFor reports whether a peer's job waits for a key that this node is writing.
func waitsFor(n *Node, key tier.Key) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, v := range n.servings {
		v.mu.Lock()
		held := map[tier.Key]bool{}
		for i := range v.holds {
			held[tier.Key(v.job.Keys[i])] = true
		}
		v.mu.Unlock()
		for _, k := range v.job.Keys {
			if tier.Key(k) == key && len(held) > 0 && !held[key] {
				return true
			}
		}
	}
	return false
}

// TestPendingInTheOwnTier: without a peer, a chunk that this node's own producer is
// writing and gives up is planned around in the same way.
func TestPendingInTheOwnTier(t *testing.T) {
	n := startNode(t, "producer", func(c *config.Config) { c.Deadlines.PendingMS = 5000 })
	e := attach(t, n)
	x := text{"own", 200}
	q, _ := e.beginProducer("a", x, enginepb.Leg_PROBE)
	q.settle(q.step(124, 0))
	alone := func(b *enginepb.BeginRequest) { b.PeerId = "" }
	r := e.beginConsumer("c", x, enginepb.Leg_PROBE, alone)
	require.Equal(t, uint64(128), r.reply.ResumeTokens)
	job := r.startLoad()
	q.finish(true)
	ev := r.wait(job)
	lower(t, r, ev)
	require.Equal(t, uint64(64), ev.ResumeTokens)
	r.finish()
	clean(t, n)
}

// TestAnotherRequestWritesIt: a chunk that another request is bringing is waited for, and
// each end of that wait is counted and named.
func TestAnotherRequestWritesIt(t *testing.T) {
	alone := func(b *enginepb.BeginRequest) { b.PeerId = "" }
	within := func(ms uint64) beginOption { return func(b *enginepb.BeginRequest) { b.DeadlineMs = ms } }
	producer, consumer := pair(t, func(c *config.Config) { c.SlabBytes, c.Bounds.ParkedBytes = 21*4096, 4096 })
	consumer.waits.pending = 150 * time.Millisecond
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"w", 300}
	one := c.beginConsumer("one", x, enginepb.Leg_PD) // never produced; it has every slot

	// It never comes, and there is no peer: late at the limit for PENDING.
	r := c.beginConsumer("alone", x, enginepb.Leg_PROBE, alone)
	require.Positive(t, r.reply.ResumeTokens)
	ev := r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"deadline": len(ev.Failures)}, causes(ev))
	require.Equal(t, errPendingLate.Error(), ev.Failures[0].Detail)
	r.finish()
	require.Equal(t, 1.0, counter(consumer, "waits", "pending", "deadline"))

	// The request's own deadline is before the limit.
	consumer.waits.pending = time.Minute
	began := time.Now()
	c.fresh()
	r = c.beginConsumer("short", x, enginepb.Leg_PD, within(100))
	ev = r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"deadline": len(ev.Failures)}, causes(ev))
	r.finish()
	require.Less(t, time.Since(began), 30*time.Second)

	// The consumer gives up: its own words are the cause.
	c.fresh()
	r = c.beginConsumer("gives up", x, enginepb.Leg_PD)
	job := r.startLoad()
	_, err := c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "gives up", Abort: true})
	require.NoError(t, err)
	ev, err = c.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.Equal(t, map[string]int{"aborted": len(ev.Failures)}, causes(ev))
	require.Equal(t, "the engine aborted the request", ev.Failures[0].Detail)
	require.Equal(t, 1.0, counter(consumer, "waits", "pending", "aborted"))

	// It is late, there is a peer, and no room for a copy of its own.
	consumer.waits.pending = 50 * time.Millisecond
	p.produce("two", x, enginepb.Leg_PD)
	c.fresh()
	r = c.beginConsumer("two", x, enginepb.Leg_PD)
	ev = r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"no-room": len(ev.Failures)}, causes(ev))
	require.Equal(t, 1.0, counter(consumer, "no_room", "consumer"))
	r.finish()

	one.finish()
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}

// TestLookupFails: a lookup that is late, lost with its session, or given up leaves a plan
// over the own tier and a note, and is counted by its end.
func TestLookupFails(t *testing.T) {
	producer, consumer, control, _ := proxied(t, func(c *config.Config) { c.Deadlines.LookupMS = 700 })
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"l", 300}
	p.produce("l", x, enginepb.Leg_PROBE)
	half := c.beginConsumer("half", text{"l", 150}, enginepb.Leg_PROBE)
	hit(t, half, half.load())
	half.finish()
	for name, want := range map[string]struct{ outcome, note string }{
		"late": {"deadline", "lookup at peer producer"},
		"cut":  {"peer", "session with producer closed"},
	} {
		ready(t, consumer, "producer")
		before := counter(consumer, "waits", "lookup", want.outcome)
		var cut sync.WaitGroup
		control.frozen.Store(true)
		if name == "cut" {
			cut.Go(func() {
				for consumer.peers.Status()[0].Lookups == 0 {
					time.Sleep(time.Millisecond)
				}
				control.cut()
				control.mend()
			})
		}
		r := c.beginConsumer(name, x, enginepb.Leg_PROBE)
		cut.Wait()
		control.frozen.Store(false)
		require.Contains(t, r.reply.Note, want.note)
		require.Equal(t, uint64(128), r.reply.ResumeTokens, "the own tier has an aligned point")
		require.Equal(t, before+1, counter(consumer, "waits", "lookup", want.outcome), name)
		ev := r.load()
		require.True(t, ev.Ok, ev.Error)
		r.finish()
	}
	clean(t, consumer)
	ready(t, consumer, "producer")

	control.frozen.Store(true)
	ctx, cancel := context.WithCancel(ctxFor(t))
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err := c.c.Begin(ctx, c.request("given up", x, enginepb.Role_CONSUMER, enginepb.Leg_PROBE))
	require.Equal(t, codes.Canceled, status.Code(err))
	_, live := consumer.engines.Counts()
	require.Zero(t, live)
	require.Equal(t, 1.0, counter(consumer, "waits", "lookup", "aborted"))
	control.frozen.Store(false)
	clean(t, consumer)
	serves(t, producer, consumer)
}
