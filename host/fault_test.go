package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/transfer"
)

// lower asserts that a load ended below its plan and said why.
func lower(t *testing.T, r *consuming, ev *enginepb.Event) {
	t.Helper()
	require.False(t, ev.Ok)
	require.NotEmpty(t, ev.Error)
	require.Less(t, ev.ResumeTokens, r.reply.ResumeTokens)
	require.NotEmpty(t, ev.Failures)
	for _, f := range ev.Failures {
		require.NotEmpty(t, f.Group)
		require.NotEmpty(t, f.Detail)
	}
}

// TestProducerAborted: what the producer will not supply is refused at its last word,
// and what it has is of use when it reaches an aligned point.
func TestProducerAborted(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	job := r.startLoad()
	q, _ := p.beginProducer("a", x, enginepb.Leg_PD)
	q.settle(q.step(48, 0))
	q.settle(q.step(100, 0))
	q.finish(true)
	ev := r.wait(job)
	lower(t, r, ev)
	for _, f := range ev.Failures {
		require.Equal(t, "unmatched", f.Cause)
		require.Equal(t, "the producer's engine aborted the request", f.Detail)
	}
	reply := r.finish()
	require.Equal(t, uint64(6), reply.Groups[1].Transferred, "the six whole chunks of 100 tokens arrived")
	require.Positive(t, counter(consumer, "unmatched", "full", "pd", "unmatched"))

	// The aligned tail at 64 was kept: leg probe finds it.
	s := c.beginConsumer("b", x, enginepb.Leg_PROBE)
	require.Equal(t, uint64(64), s.reply.ResumeTokens)
	hit(t, s, s.load())
	s.finish()
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}

// TestEngineLeavesInMidStore: the closed stream is the last word for its transfer.
func TestEngineLeavesInMidStore(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	job := r.startLoad()
	q, _ := p.beginProducer("a", x, enginepb.Leg_PD)
	q.step(100, 0)
	require.NoError(t, p.c.Close())
	ev := r.wait(job)
	lower(t, r, ev)
	require.Equal(t, map[string]int{"unmatched": len(ev.Failures)}, causes(ev))
	r.finish()
	require.Eventually(t, func() bool { n, _ := producer.engines.Counts(); return n == 0 }, 30*time.Second, time.Millisecond)
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}

// TestConsumerEngineLeaves: what was on its way is aborted and nothing stays pinned.
func TestConsumerEngineLeaves(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	r.startLoad()
	require.NoError(t, c.c.Close())
	p.produce("a", x, enginepb.Leg_PD)
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}

// TestPeerDiesInMidTransfer: with more than half of the bytes there, and for less.
func TestPeerDiesInMidTransfer(t *testing.T) {
	for _, tenths := range []int64{1, 6, 9} {
		t.Run(fmt.Sprintf("%d tenths", tenths), func(t *testing.T) {
			producer, consumer, control, data := proxied(t, func(c *config.Config) { c.Deadlines.ConnectMS = 500 })
			p, c := attach(t, producer), attach(t, consumer)
			x := text{"a", 300}
			p.produce("a", x, enginepb.Leg_PD)
			data.onCut = control.cut
			total := int64(18*1024 + 3*512)
			data.cutBytes.Store(total * tenths / 10)
			r := c.beginConsumer("a", x, enginepb.Leg_PD)
			ev := r.load()
			lower(t, r, ev)
			require.Equal(t, map[string]int{"peer": len(ev.Failures)}, causes(ev))
			r.finish()
			clean(t, producer, consumer)

			// While the peer is away its requests plan nothing, at once.
			require.Eventually(t, func() bool { return consumer.unusable("producer", "pd") != "" }, 30*time.Second, time.Millisecond)
			began := time.Now()
			r = c.beginConsumer("b", text{"b", 300}, enginepb.Leg_PD)
			require.Contains(t, r.reply.Note, "peer producer is")
			require.Zero(t, r.reply.ResumeTokens)
			t.Logf("a request that names a silent peer was planned in %v", time.Since(began))
			r.finish()

			control.mend()
			data.mend()
			serves(t, producer, consumer)
		})
	}
}

// TestFrozenPeer: a peer that is silent without closing anything ends what names it when
// it is suspect, and never delays what names another peer. After a thaw it serves again.
func TestFrozenPeer(t *testing.T) {
	const suspectMS = 600
	producer, consumer, control, data := proxied(t, func(c *config.Config) {
		c.Deadlines.PingMS, c.Deadlines.SuspectMS, c.Deadlines.DeadMS = 100, suspectMS, 3000
	})
	other := startNode(t, "other")
	require.NoError(t, consumer.SetPeers([]config.Peer{{ID: "producer", Control: control.addr()}, {ID: "other", Control: other.Addresses().Peer}}))
	ready(t, consumer, "other")
	p, o, c := attach(t, producer), attach(t, other), attach(t, consumer)
	x, y := text{"a", 300}, text{"b", 300}
	p.produce("a", x, enginepb.Leg_PD)
	o.produce("b", y, enginepb.Leg_PD)
	control.frozen.Store(true)
	data.frozen.Store(true)
	began := time.Now()
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	job := r.startLoad()

	fast := c.beginConsumer("b", y, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.PeerId = "other" })
	hit(t, fast, fast.load())
	t.Logf("a request that names another peer took %v", time.Since(began))
	fast.finish()

	ev := r.wait(job)
	t.Logf("a request in flight at the freeze ended after %v; suspect is %d ms", time.Since(began), suspectMS)
	lower(t, r, ev)
	require.Equal(t, map[string]int{"peer": len(ev.Failures)}, causes(ev))
	r.finish()
	r = c.beginConsumer("c", x, enginepb.Leg_PROBE)
	require.Contains(t, r.reply.Note, "peer producer is")
	r.finish()

	control.frozen.Store(false)
	data.frozen.Store(false)
	clean(t, consumer, producer, other)
	serves(t, producer, consumer)
}

// TestCutPayloadIsNoSignOfLife: a payload that ends with its connection, as when a frozen
// peer's lane is given up, does not make the peer ready again; one that came, right or
// wrong, does.
func TestCutPayloadIsNoSignOfLife(t *testing.T) {
	still := func(c *config.Config) { // no ping meanwhile
		c.Deadlines.PingMS, c.Deadlines.SuspectMS, c.Deadlines.DeadMS, c.Deadlines.LeaseMS = 60_000, 120_000, 240_000, 240_000
	}
	producer := startNode(t, "producer", still)
	consumer := startNode(t, "consumer", still, withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	c := attach(t, consumer)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	var f *fetch
	var id session.JobID
	require.Eventually(t, func() bool {
		consumer.mu.Lock()
		defer consumer.mu.Unlock()
		for k, v := range consumer.fetches {
			f, id = v, k.id
		}
		return f != nil
	}, 30*time.Second, time.Millisecond)
	silence := func() time.Duration {
		s := consumer.peers.Status()
		require.Len(t, s, 1)
		return s[0].Silence
	}
	const pause = 50 * time.Millisecond
	end := func(i int, err error) {
		w := f.wants[i]
		_, done, refused := (&sink{consumer, "producer"}).Begin(transfer.Header{Job: uint64(id), Seq: uint32(i), Slot: w.slot.Index, Epoch: w.slot.Epoch,
			Length: uint32(consumer.groups[w.ref.Group].chunkBytes)})
		require.NoError(t, refused)
		time.Sleep(pause)
		done(err)
		for range 2 { // the first answer comes after what was told before, the second after its status
			_, err := consumer.peers.Lookup(t.Context(), "producer", "barrier", nil)
			require.ErrorContains(t, err, "no keys")
		}
	}
	end(0, errors.New("the lane is gone"))
	require.GreaterOrEqual(t, silence(), pause)
	end(1, &transfer.ErrChecksum{Want: 1, Got: 2})
	require.Less(t, silence(), pause)
	r.finish()
}

// TestBitFlipInProducersSlab: the producer notices before it sends, names the chunk, and
// drops it, so that the next request stores it anew.
func TestBitFlipInProducersSlab(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	flipInSlab(t, producer, x.chunk("full", 7))
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	ev := r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"checksum": 1}, causes(ev))
	require.Equal(t, uint32(7), ev.Failures[0].Chunk)
	require.Equal(t, "full", ev.Failures[0].Group)
	r.finish()
	require.Equal(t, 1.0, counter(producer, "checksum", "slab"))
	require.Equal(t, 1.0, counter(consumer, "unmatched", "full", "pd", "checksum"))
	clean(t, producer, consumer)

	p.produce("b", x, enginepb.Leg_PD)
	r = c.beginConsumer("b", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestBitFlipInConsumersSlab: the chunk arrived well and is wrong when it is to leave
// for the engine.
func TestBitFlipInConsumersSlab(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	require.Eventually(t, func() bool {
		return counter(consumer, "transferred", "full", "pd") == 18 && counter(consumer, "transferred", "sliding", "pd") > 0
	}, 30*time.Second, time.Millisecond)
	flipInSlab(t, consumer, x.chunk("full", 17))
	ev := r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"checksum": 1}, causes(ev))
	require.Equal(t, uint32(17), ev.Failures[0].Chunk)
	r.finish()
	require.Equal(t, 1.0, counter(consumer, "checksum", "slab"))
	clean(t, producer, consumer)

	p.produce("b", x, enginepb.Leg_PD) // the wrong chunk is fetched again, the others are here
	r = c.beginConsumer("b", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	require.Equal(t, uint64(1), r.finish().Groups[1].Transferred)
	clean(t, producer, consumer)
}

func TestBitFlipOnTheWire(t *testing.T) {
	producer, consumer, _, data := proxied(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	data.flip.Store(true)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	ev := r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"checksum": 1}, causes(ev))
	r.finish()
	require.Equal(t, 1.0, counter(consumer, "checksum", "wire"))
	require.Zero(t, counter(producer, "checksum", "slab"))
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}

// TestNoRoom: all slots or none; a request that finds none computes everything itself.
func TestNoRoom(t *testing.T) {
	producer, consumer := pair(t, func(c *config.Config) { c.SlabBytes, c.Bounds.ParkedBytes = 10*4096, 4096 })
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	require.Contains(t, r.reply.Note, "no room: 21 slots needed")
	require.Zero(t, r.reply.ResumeTokens)
	ev := r.load()
	require.True(t, ev.Ok)
	require.Zero(t, ev.ResumeTokens)
	r.finish()
	require.Equal(t, 1.0, counter(consumer, "no_room", "consumer"))

	small := text{"b", 60}
	p.produce("b", small, enginepb.Leg_PD)
	r = c.beginConsumer("b", small, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestProducerWithoutRoom: the chunks that found no slot are named on both sides.
func TestProducerWithoutRoom(t *testing.T) {
	producer := startNode(t, "producer", func(c *config.Config) { c.SlabBytes, c.Bounds.ParkedBytes = 10*4096, 10*4096 })
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	q, _ := p.beginProducer("a", x, enginepb.Leg_PD)
	ev := q.settle(q.step(300, 0))
	require.False(t, ev.Ok)
	require.Positive(t, causes(ev)["no-room"])
	q.finish(false)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	ev = r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"no-room": len(ev.Failures)}, causes(ev))
	r.finish()
	clean(t, producer, consumer)
}

// TestProducerNeverBegins: the request's own deadline ends the wait, and the cause says
// what did not happen.
func TestProducerNeverBegins(t *testing.T) {
	producer, consumer := pair(t)
	c := attach(t, consumer)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.DeadlineMs = 200 })
	began := time.Now()
	ev := r.load()
	t.Logf("ended after %v", time.Since(began))
	lower(t, r, ev)
	require.Zero(t, ev.ResumeTokens)
	require.Equal(t, map[string]int{"unmatched": len(ev.Failures)}, causes(ev))
	require.Contains(t, ev.Failures[0].Detail, "the producer ha") // had not, or has not: whoever's clock came first
	r.finish()
	clean(t, producer, consumer)
}

// TestDrainAnswersWhatWaits: a producer's node that stops while a consumer waits for a
// transfer that was never begun says so, and stops; neither waits for the drain's or the
// request's end, which are a minute away.
func TestDrainAnswersWhatWaits(t *testing.T) {
	producer := startNode(t, "producer", func(c *config.Config) { c.Deadlines.DrainMS = 60_000 })
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	c := attach(t, consumer)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.DeadlineMs = 60_000 })
	job := r.startLoad()
	require.Eventually(t, func() bool { return producer.meeting.status().Jobs == 1 }, 30*time.Second, time.Millisecond)
	stopped := make(chan struct{})
	go func() {
		producer.Close(context.Background())
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		require.Fail(t, "the drain waits for what nobody can supply")
	}
	ev := r.wait(job)
	lower(t, r, ev)
	require.Equal(t, map[string]int{"refused": len(ev.Failures)}, causes(ev))
	require.Contains(t, ev.Failures[0].Detail, "drain")
	r.finish()
	clean(t, consumer)
}

// TestParkedSupplyAges: supply that nobody fetches is let go after a while, and stays in
// the tier for leg probe.
func TestParkedSupplyAges(t *testing.T) {
	n := startNode(t, "producer", func(c *config.Config) { c.Deadlines.ParkedMS = 50 })
	p := attach(t, n)
	p.produce("a", text{"a", 300}, enginepb.Leg_PD)
	require.Eventually(t, func() bool { return len(n.tier.Snapshot().Pins) == 0 }, 30*time.Second, time.Millisecond)
	require.Zero(t, n.meeting.status().Transfers)
	r := p.beginConsumer("b", text{"a", 300}, enginepb.Leg_PROBE, func(b *enginepb.BeginRequest) { b.PeerId = "" })
	hit(t, r, r.load())
	r.finish()
	clean(t, n)
}

// TestBackstop: should a wait have no end, the request has one.
func TestBackstop(t *testing.T) {
	_, consumer := pair(t)
	e := attach(t, consumer)
	r := e.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	job := r.startLoad()
	var giveUp func()
	require.Eventually(t, func() bool {
		consumer.mu.Lock()
		defer consumer.mu.Unlock()
		for _, f := range consumer.fetches {
			giveUp = f.c.giveUp
		}
		return giveUp != nil
	}, 30*time.Second, time.Millisecond)
	giveUp()
	ev := r.wait(job)
	lower(t, r, ev)
	require.Equal(t, map[string]int{"deadline": len(ev.Failures)}, causes(ev))
	r.finish()
	clean(t, consumer)
}

func TestUnknownPeer(t *testing.T) {
	_, consumer := pair(t)
	c := attach(t, consumer)
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
		r := c.beginConsumer("a", text{"a", 300}, leg, func(b *enginepb.BeginRequest) { b.PeerId = "nobody" })
		require.Equal(t, `peer "nobody" is not known to this node (it knows producer); add it to peers in its configuration`, r.reply.Note)
		require.Zero(t, r.reply.ResumeTokens)
		require.True(t, r.load().Ok)
		r.finish()
	}
	clean(t, consumer)
}

// TestPeerWithAnotherLayout: the session is refused with the fields and both values, and
// requests that name the peer say so.
func TestPeerWithAnotherLayout(t *testing.T) {
	producer := startNode(t, "producer", withDeployment(replace(deployment, "head_dim: 8", "head_dim: 16")))
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	c := attach(t, consumer)
	require.Eventually(t, func() bool { return strings.Contains(consumer.unusable("producer", "pd"), "head_dim") }, 30*time.Second, time.Millisecond)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	require.Contains(t, r.reply.Note, `groups[0].head_dim`)
	require.Contains(t, r.reply.Note, `"8"`)
	require.Contains(t, r.reply.Note, `"16"`)
	require.True(t, consumer.Ready())
	r.finish()
	clean(t, producer, consumer)
}

// TestPeerWithOtherRules: with rules that cannot be judged, leg pd is not allowed, and leg
// probe is.
func TestPeerWithOtherRules(t *testing.T) {
	producer := startNode(t, "producer", withDeployment(replace(deployment, "window: 20", "window: 24")))
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PROBE)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	require.Contains(t, r.reply.Note, "leg pd is not allowed with it")
	r.finish()
	r = c.beginConsumer("b", x, enginepb.Leg_PROBE)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestProducerRestarts: the same address, another process, an empty tier.
func TestProducerRestarts(t *testing.T) {
	producer, consumer, control, data := proxied(t)
	p, c := attach(t, producer), attach(t, consumer)
	p.produce("a", text{"a", 300}, enginepb.Leg_PROBE)
	r := c.beginConsumer("a", text{"a", 100}, enginepb.Leg_PROBE)
	hit(t, r, r.load())
	r.finish()
	producer.Close(context.Background())
	again := startNode(t, "producer", func(c *config.Config) { c.Advertise = data.addr() })
	control.target.Store(again.Addresses().Peer)
	data.target.Store(again.Addresses().Data)
	require.Eventually(t, func() bool { return isReady(consumer, "producer") }, 30*time.Second, time.Millisecond)
	serves(t, again, consumer)
}

// TestSetPeers: a peer that is removed ends what names it, and can come back.
func TestSetPeers(t *testing.T) {
	producer, consumer := pair(t)
	c := attach(t, consumer)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	job := r.startLoad()
	require.NoError(t, consumer.SetPeers(nil))
	ev := r.wait(job)
	lower(t, r, ev)
	r.finish()
	require.NotEmpty(t, consumer.unusable("producer", "pd"))
	require.NoError(t, consumer.SetPeers([]config.Peer{{ID: "producer", Control: producer.Addresses().Peer}}))
	serves(t, producer, consumer)
}

// TestGarbageOnThePorts: strangers cost nothing but a closed connection.
func TestGarbageOnThePorts(t *testing.T) {
	producer, consumer := pair(t)
	a := producer.Addresses()
	garbage := []string{"", "\x00", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", strings.Repeat("\xff\x00\x13", 20000), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 1000), "TDH1" + strings.Repeat("x", 28), "TDF1"}
	for _, port := range []struct{ network, addr string }{{"tcp", a.Peer}, {"tcp", a.Data}, {"tcp", a.HTTP}, {"unix", a.EngineSocket}} {
		for _, g := range garbage {
			conn, err := net.Dial(port.network, port.addr)
			require.NoError(t, err)
			_ = conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
			_, _ = conn.Write([]byte(g))
			_, _ = io.Copy(io.Discard, conn)
			conn.Close()
		}
	}
	serves(t, producer, consumer)
}

func TestOversizedMessage(t *testing.T) {
	producer, consumer := pair(t, func(c *config.Config) { c.Bounds.MessageBytes = config.MessageBytesMin })
	c := attach(t, consumer)
	_, err := c.c.Begin(ctxFor(t), c.request("a", text{"a", 300}, enginepb.Role_CONSUMER, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.TenantSalt = make([]byte, 70<<10) }))
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.ErrorContains(t, err, "larger than max")
	require.ErrorContains(t, err, "vs. 65536")
	serves(t, producer, consumer)
}

// TestAttachWithAnotherDeployment holds the refusal's text.
func TestAttachWithAnotherDeployment(t *testing.T) {
	n := startNode(t, "producer")
	attach(t, n) // with the node's own
	var got strings.Builder
	for _, d := range []struct{ name, yaml string }{
		{"another layout", replace(deployment, "layers: 2", "layers: 3")},
		{"another parameter", replace(deployment, "window: 20", "window: 21")},
		{"no deployment", "model: [1"},
		{"misspelt", replace(deployment, "align_tokens", "aling_tokens")},
	} {
		c, err := engine.Dial(ctxFor(t), n.Addresses().EngineSocket)
		require.NoError(t, err)
		_, err = c.Attach(ctxFor(t), "second", []byte(d.yaml), nil)
		require.Error(t, err)
		fmt.Fprintf(&got, "%s\n    %v: %s\n", d.name, status.Code(err), status.Convert(err).Message())
		require.NoError(t, c.Close())
	}
	digest := regexp.MustCompile("sha256:[0-9a-f]{64}")
	golden(t, "testdata/attach.txt", digest.ReplaceAllString(got.String(), "sha256:..."))
	c, err := engine.Dial(ctxFor(t), n.Addresses().EngineSocket)
	require.NoError(t, err)
	_, err = c.Attach(ctxFor(t), "same", []byte("# the same, with a comment\n"+deployment), nil)
	require.NoError(t, err)
	require.NoError(t, c.Close())
}

// TestDuplicateTransfer: a transfer_id names one producer's request, once.
func TestDuplicateTransfer(t *testing.T) {
	n := startNode(t, "producer")
	p := attach(t, n)
	q, _ := p.beginProducer("a", text{"a", 100}, enginepb.Leg_PD)
	same := func(b *enginepb.BeginRequest) { b.TransferId = "t-a" }
	_, err := p.c.Begin(ctxFor(t), p.request("b", text{"a", 100}, enginepb.Role_PRODUCER, enginepb.Leg_PD, same))
	require.Equal(t, codes.AlreadyExists, status.Code(err))
	require.ErrorContains(t, err, `"t-a"`)
	q.settle(q.step(100, 0))
	q.finish(false)
	clean(t, n)
}

// TestLoadWithoutDestination: every block of a demanded chunk needs a place.
func TestLoadWithoutDestination(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	p.produce("a", text{"a", 300}, enginepb.Leg_PD)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	_, err := c.c.Load(ctxFor(t), &enginepb.LoadRequest{RequestId: "a", Blocks: []*enginepb.BlockRun{{Group: "full", FirstBlock: 0, Ids: []uint32{1, 2, 3}}}})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.ErrorContains(t, err, "has no destination; name all of its blocks")
	hit(t, r, r.load()) // a refused load changes nothing
	r.finish()
	clean(t, producer, consumer)
}

// TestBlockNeverNamed: a chunk of which the engine hides a block is named, and not
// supplied.
func TestBlockNeverNamed(t *testing.T) {
	n := startNode(t, "producer")
	p := attach(t, n)
	_, err := p.c.Begin(ctxFor(t), p.request("a", text{"a", 100}, enginepb.Role_PRODUCER, enginepb.Leg_PD))
	require.NoError(t, err)
	job, err := p.c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "a", ComputedTokens: 48, Blocks: []*enginepb.BlockRun{{Group: "full", FirstBlock: 0, Ids: p.take("full", 11)}}})
	require.NoError(t, err)
	ev, err := p.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.False(t, ev.Ok)
	for _, f := range ev.Failures {
		require.Equal(t, "store", f.Cause)
		require.Contains(t, f.Detail, "never named logical block")
	}
	_, err = p.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "a", Abort: true})
	require.NoError(t, err)
	clean(t, n)
}

// TestCloseDrains: a node that stops lets a live request end, and says the last word for
// one that does not.
func TestCloseDrains(t *testing.T) {
	producer, consumer := pair(t, func(c *config.Config) { c.Deadlines.DrainMS = 400 })
	c := attach(t, consumer)
	r := c.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	job := r.startLoad()
	began := time.Now()
	consumer.Close(context.Background())
	t.Logf("closed after %v, drain is 400ms", time.Since(began))
	ev, err := c.c.Wait(ctxFor(t), job)
	require.NoError(t, err, "the event of an accepted job comes before the stream ends")
	require.False(t, ev.Ok)
	require.Equal(t, len(ev.Failures), causes(ev)["aborted"])
	<-c.c.Gone()
	left, err := os.ReadDir(consumer.cfg.SlabDir)
	require.NoError(t, err)
	require.Empty(t, left, "nothing stays in shared memory")
	clean(t, producer)
}

func TestHTTP(t *testing.T) {
	producer, consumer := pair(t)
	get := func(path string) (int, string) {
		resp, err := http.Get("http://" + consumer.Addresses().HTTP + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(b)
	}
	defer http.DefaultClient.CloseIdleConnections()
	code, body := get("/healthz")
	require.Equal(t, 200, code, body)
	code, body = get("/readyz")
	require.Equal(t, 200, code, body)
	code, body = get("/metrics")
	require.Equal(t, 200, code)
	for _, line := range []string{ // zeros, before anything has happened
		`tierd_unmatched_chunks_total{cause="deadline",group="sliding",leg="probe"} 0`,
		`tierd_demanded_chunks_total{group="full",leg="pd"} 0`,
		`tierd_kv_offload_load_bytes_total{group="full"} 0`,
		`tierd_kv_offload_tiering_read_bytes_total{tier="1:peer"} 0`,
		`tierd_kv_offload_tiering_checksum_failures_chunks_total{place="wire"} 0`,
		`tierd_requests_total{leg="pd",result="hit",role="consumer"} 0`,
		`tierd_tier_slots{state="free"} 1024`,
		`tierd_tier_pins{kind="read",owner="request"} 0`,
		`tierd_peer_state{peer="producer",state="ready"} 1`,
		`tierd_waits_total{outcome="peer",wait="lookup"} 0`,
		`tierd_requests_live 0`,
	} {
		require.Contains(t, body, line+"\n")
	}
	code, _ = get("/nothing")
	require.Equal(t, 404, code)
	producer.Close(context.Background()) // a peer's state never makes a node unready
	code, _ = get("/readyz")
	require.Equal(t, 200, code)
}

// TestStartRefusals: what keeps a node from starting says what to change, and leaves
// nothing behind.
func TestStartRefusals(t *testing.T) {
	running := startNode(t, "producer")
	cases := []struct {
		name, text string
		edit       nodeOption
	}{
		{"no deployment", "no such file", func(c *config.Config) { c.Deployment += ".none" }},
		{"a deployment without an end", "deployment is /dev/zero: it has more than 1048576 bytes; correct the path", func(c *config.Config) { c.Deployment = "/dev/zero" }},
		{"slab too small", "one chunk of deployment tiny takes 4096 bytes", func(c *config.Config) { c.SlabBytes, c.Bounds.ParkedBytes = 100, 100 }},
		{"port taken", "peer_listen", func(c *config.Config) { c.PeerListen = running.Addresses().Peer }},
		{"data port taken", "data_listen", func(c *config.Config) { c.DataListen = running.Addresses().Data }},
		{"http port taken", "http_listen", func(c *config.Config) { c.HTTPListen = running.Addresses().HTTP }},
		{"live engine socket", "another live process serves this socket", func(c *config.Config) { c.EngineSocket = running.Addresses().EngineSocket }},
		{"slab of a live node", "in use by a live process", func(c *config.Config) {
			c.NodeID, c.SlabDir = "producer", running.cfg.SlabDir
		}},
		{"no certificate", "tls.cert is /none", func(c *config.Config) { c.TLS = &config.TLS{Cert: "/none", Key: "/none", CA: "/none"} }},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig(t, "other", tc.edit)
			_, err := start(ctxFor(t), cfg, slog.New(slog.DiscardHandler), unjudged)
			require.ErrorContains(t, err, tc.text)
			if cfg.SlabDir != running.cfg.SlabDir {
				left, _ := filepath.Glob(filepath.Join(cfg.SlabDir, "*", "*"))
				require.Empty(t, left)
			}
		})
	}
	require.True(t, running.Ready())
}

// TestWhatAKilledDaemonLeaves is replaced or removed at the next start.
func TestWhatAKilledDaemonLeaves(t *testing.T) {
	var region string
	n := startNode(t, "producer", func(c *config.Config) {
		dir := filepath.Join(c.SlabDir, "tierd-producer")
		require.NoError(t, os.MkdirAll(dir, 0o700))
		region = filepath.Join(dir, "tierd-region-0123")
		for _, f := range []string{region, filepath.Join(dir, "slab")} {
			require.NoError(t, os.WriteFile(f, []byte("old"), 0o600))
		}
	})
	_, err := os.Stat(region)
	require.ErrorIs(t, err, os.ErrNotExist)
	attach(t, n)
}

// TestFramesThatNobodyWants are dropped without touching a slot.
func TestFramesThatNobodyWants(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	var job session.JobID
	var f *fetch
	require.Eventually(t, func() bool { // the demand is posted, and starts in a moment
		consumer.mu.Lock()
		defer consumer.mu.Unlock()
		for k, v := range consumer.fetches {
			job, f = k.id, v
		}
		return f != nil
	}, 30*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return producer.serving("consumer", job) != nil }, 30*time.Second, time.Millisecond)
	w := f.wants[0]
	junk := bytes.Repeat([]byte{0xee}, int(consumer.groups[w.ref.Group].chunkBytes))
	push := func(job uint64, slot uint32, epoch uint64, seq uint32, b []byte) {
		require.NoError(t, producer.data.Push(ctxFor(t), producer.dataToken("consumer"), job, transferItem(slot, epoch, seq, b), nil))
	}
	push(uint64(job)+1000, w.slot.Index, w.slot.Epoch, 0, junk)
	push(uint64(job), w.slot.Index, w.slot.Epoch-1, 0, junk)
	push(uint64(job), w.slot.Index+1, w.slot.Epoch, 0, junk)
	push(uint64(job), w.slot.Index, w.slot.Epoch, 1<<20, junk)
	push(uint64(job), w.slot.Index, w.slot.Epoch, 0, junk[:100])
	p.produce("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestFailuresHaveKnownCauses: whatever a session says has a cause that the metrics have
// a zero for.
func TestFailuresHaveKnownCauses(t *testing.T) {
	known := map[string]bool{}
	for _, c := range metricsCauses() {
		known[c] = true
	}
	for _, c := range session.Causes() {
		for r := range sessionpb.Reason_name {
			f := failureOf(session.Result{Cause: c, Reason: sessionpb.Reason(r)})
			require.True(t, known[f.cause], "%v %v: %q", c, r, f.cause)
			require.NotEmpty(t, f.detail)
			require.Contains(t, []string{"ok", "deadline", "peer", "aborted", "refused"}, outcomeOf([]session.Result{{Cause: c}}))
		}
	}
}

// A key's file may have no end, when a device is given by mistake.
func TestKeyWithoutEnd(t *testing.T) {
	_, err := certificateKeys(&config.Config{File: "node.yaml", CertificateKeys: []string{"/dev/zero"}})
	require.EqualError(t, err, "node.yaml: certificate_keys[0] is /dev/zero: it has more than 65536 bytes; correct the path")
}
