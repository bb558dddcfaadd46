package host

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// TestPullInBothOrders: the consumer gets the producer's bytes, whoever begins first.
func TestPullInBothOrders(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	for _, tokens := range []uint64{16, 17, 40, 129, 300} {
		for _, first := range []string{"producer", "consumer"} {
			id := fmt.Sprintf("pd-%d-%s", tokens, first)
			x := text{id, tokens}
			t.Run(id, func(t *testing.T) {
				p, c := &testEngine{t, p.c, map[string]uint32{}}, &testEngine{t, c.c, map[string]uint32{}}
				var r *consuming
				var produced *enginepb.FinishReply
				if first == "producer" {
					produced = p.produce(id, x, enginepb.Leg_PD)
					r = c.beginConsumer(id, x, enginepb.Leg_PD)
				} else {
					r = c.beginConsumer(id, x, enginepb.Leg_PD)
					produced = p.produce(id, x, enginepb.Leg_PD)
				}
				ev := r.load()
				require.True(t, ev.Ok, ev.Error)
				require.Equal(t, r.reply.ResumeTokens, ev.ResumeTokens)
				if tokens > 16 {
					hit(t, r, ev)
				}
				reply := r.finish()
				for g := range reply.Groups {
					require.Zero(t, reply.Groups[g].Unmatched)
					require.Equal(t, reply.Groups[g].Demanded, reply.Groups[g].Transferred)
					require.LessOrEqual(t, reply.Groups[g].Demanded, produced.Groups[g].Supplied)
				}
				clean(t, producer, consumer)
			})
		}
	}
	require.Equal(t, counter(consumer, "demanded", "full", "pd"), counter(consumer, "transferred", "full", "pd"))
	require.Positive(t, counter(consumer, "transferred", "sliding", "pd"))
	require.Positive(t, counter(producer, "supplied", "sliding", "pd"))
}

func TestProbe(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)

	r := c.beginConsumer("nothing", text{"a", 300}, enginepb.Leg_PROBE)
	require.Zero(t, r.reply.ResumeTokens)
	require.Empty(t, r.reply.Demand)
	require.True(t, r.load().Ok)
	r.finish()

	p.produce("a", text{"a", 200}, enginepb.Leg_PROBE)
	// Another prompt that shares 200 tokens resumes at least at the last aligned point.
	r = c.beginConsumer("longer", text{"a", 300}, enginepb.Leg_PROBE)
	hit(t, r, r.load())
	require.GreaterOrEqual(t, r.reply.ResumeTokens, uint64(192))
	r.finish()

	// Now its own tier has it, without any peer.
	r = c.beginConsumer("own", text{"a", 300}, enginepb.Leg_PROBE, func(b *enginepb.BeginRequest) { b.PeerId = "" })
	hit(t, r, r.load())
	reply := r.finish()
	require.Zero(t, reply.Groups[1].Transferred)
	require.Positive(t, reply.Groups[1].Demanded)
	clean(t, producer, consumer)
}

// TestTenantsDoNotMeet: the same prompt under another salt finds nothing.
func TestTenantsDoNotMeet(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	p.produce("a", text{"a", 200}, enginepb.Leg_PROBE)
	r := c.beginConsumer("b", text{"a", 200}, enginepb.Leg_PROBE, func(b *enginepb.BeginRequest) { b.TenantSalt = []byte("other") })
	require.Zero(t, r.reply.ResumeTokens)
	r.finish()
	clean(t, producer, consumer)
}

// TestNativePrefixAndHeldChunks: a second producer of the same prompt copies nothing
// that the tier holds, may start from its GPU's prefix, and still supplies everything.
func TestNativePrefixAndHeldChunks(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 200}
	first := p.produce("a", x, enginepb.Leg_PD)
	stored := producer.tier.Snapshot().ResidentBytes

	second, reply := p.beginProducer("b", x, enginepb.Leg_PD)
	require.Equal(t, uint64(199), reply.ReuseTokens, "everything that is wanted is held in the tier")
	second.settle(second.step(200, 196))
	done := second.finish(false)
	for g := range done.Groups {
		require.Equal(t, first.Groups[g].Supplied, done.Groups[g].Supplied)
	}
	require.Zero(t, done.Groups[1].Bytes, "group full is held whole")
	require.Equal(t, stored, producer.tier.Snapshot().ResidentBytes)
	r := c.beginConsumer("b", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestReuseWithAWindow: of a native prefix the GPU holds only what attention still reads.
// The longest one that may be used is the one at which the first chunk that an aligned
// point wants is still whole; there everything is supplied, and above it is refused.
func TestReuseWithAWindow(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	// Going on from 64 reads from token 45 on, so the window keeps its chunk of the tokens
	// 40 to 47, whose first block ends at 44 and is read as long as the prefix is below
	// 44 + window - 1.
	const reuse = 44 + window - 2
	q, reply := p.beginProducer("a", x, enginepb.Leg_PD)
	require.Equal(t, uint64(reuse), reply.ReuseTokens)
	for _, native := range []uint64{reuse + 1, reuse + blockTokens} {
		_, err := p.c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "a", ComputedTokens: 100, NativeTokens: native})
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		require.ErrorContains(t, err, fmt.Sprintf("above the %d that Begin answered", reuse))
	}
	require.True(t, q.settle(q.step(100, reuse)).Ok)
	for n := uint64(148); n < 300; n += 48 {
		q.settle(q.step(n, 0))
	}
	q.settle(q.step(300, 0))
	q.finish(false)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	r = c.beginConsumer("shares 100", text{"a", 100}, enginepb.Leg_PROBE)
	require.Equal(t, uint64(64), r.reply.ResumeTokens)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)

	// Once the tier has what was wanted, any prefix will do.
	p.fresh()
	_, reply = p.beginProducer("b", x, enginepb.Leg_PD)
	require.Equal(t, uint64(299), reply.ReuseTokens)
}

// TestLocalPrefixAndLoadCap: what the GPU holds is not demanded, and nobody resumes
// above a cap.
func TestLocalPrefixAndLoadCap(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.MaxLoadTokens = 130 })
	require.Equal(t, uint64(128), r.reply.ResumeTokens)
	hit(t, r, r.load())
	r.finish()

	p.produce("b", x, enginepb.Leg_PD)
	r = c.beginConsumer("b", x, enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.LocalTokens = 160 })
	require.Equal(t, uint32(10), r.reply.Demand[1].Chunks[0].First)
	r.finish()
	clean(t, producer, consumer)
}

// TestGeneratedTextIsFoundByTheNextTurn: chunks of the text beyond the prompt are stored
// at the text's end.
func TestGeneratedTextIsFoundByTheNextTurn(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 100}
	q, _ := p.beginProducer("a", x, enginepb.Leg_PROBE)
	q.settle(q.step(100, 0))
	for n := uint64(104); n <= 160; n += 4 {
		m := &enginepb.StoreRequest{RequestId: "a", ComputedTokens: n, MoreHashes: x.hash(int(n/blockTokens) - 1)}
		for _, group := range []string{"sliding", "full"} {
			ids := p.take(group, 1)
			copy(p.c.Region(group).Block(ids[0]), x.block(group, int(n/blockTokens)-1))
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: group, FirstBlock: uint32(n/blockTokens) - 1, Ids: ids})
		}
		job, err := p.c.Store(ctxFor(t), m)
		require.NoError(t, err)
		_, err = p.c.Wait(ctxFor(t), job)
		require.NoError(t, err)
	}
	q.finish(false)
	r := c.beginConsumer("next", text{"a", 200}, enginepb.Leg_PROBE)
	require.Equal(t, uint64(160), r.reply.ResumeTokens)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestTwoConsumersShareAPrefix: the second finds the first one's chunks being written
// and gets them, whether or not the first one's transfer succeeds.
func TestTwoConsumersShareAPrefix(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 200}

	one := c.beginConsumer("one", x, enginepb.Leg_PD) // its producer has not begun
	two := c.beginConsumer("two", x, enginepb.Leg_PD)
	require.Equal(t, one.reply.Demand, two.reply.Demand)
	p.produce("one", x, enginepb.Leg_PD)
	p.produce("two", x, enginepb.Leg_PD)
	hit(t, one, one.load())
	hit(t, two, two.load())
	require.Zero(t, two.finish().Groups[1].Transferred)
	one.finish()
	clean(t, producer, consumer)

	// The first one's producer never begins: the second waits for a while, and then
	// fetches from its own.
	y := text{"b", 200}
	one = c.beginConsumer("stuck", y, enginepb.Leg_PD)
	two = c.beginConsumer("lucky", y, enginepb.Leg_PD)
	p.produce("lucky", y, enginepb.Leg_PD)
	hit(t, two, two.load())
	require.Positive(t, two.finish().Groups[1].Transferred)
	one.finish()
	clean(t, producer, consumer)
}

// TestMoreKeysThanAMessageTakes: demands and lookups go in several messages, as large as the
// side with the smaller message_bytes takes them, whichever that is.
func TestMoreKeysThanAMessageTakes(t *testing.T) {
	few := func(c *config.Config) { c.Bounds.MessageBytes = 8192 + 4*67 } // room for 4 keys; see limits
	none := func(*config.Config) {}
	for name, o := range map[string][2]nodeOption{"producer": {few, none}, "consumer": {none, few}, "both": {few, few}} {
		t.Run(name, func(t *testing.T) {
			producer := startChanged(t, "producer", o[0])
			consumer := startChanged(t, "consumer", o[1], withPeer("producer", producer.Addresses().Peer))
			ready(t, consumer, "producer")
			require.Equal(t, 4, consumer.peers.KeysMax("producer"))
			p, c := attach(t, producer), attach(t, consumer)
			for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND, enginepb.Leg_PROBE} {
				c.fresh()
				p.fresh()
				x := text{leg.String(), 300}
				p.produce(leg.String(), x, leg)
				r := c.beginConsumer(leg.String(), x, leg)
				hit(t, r, r.load())
				require.Equal(t, uint64(18), r.finish().Groups[1].Transferred)
			}
			clean(t, producer, consumer)
		})
	}
}

// startChanged starts a node whose configuration is changed after it was validated: with
// bounds below those that are allowed.
func startChanged(t *testing.T, id string, change nodeOption, options ...nodeOption) *Node {
	t.Helper()
	cfg := testConfig(t, id, options...)
	change(cfg)
	return startWith(t, cfg, unjudged, &logTo{})
}

// TestTwoProducersOfOnePrompt: both write the same keys at the same time, and both
// transfers deliver.
func TestTwoProducersOfOnePrompt(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 200}
	one, _ := p.beginProducer("one", x, enginepb.Leg_PD)
	two, _ := p.beginProducer("two", x, enginepb.Leg_PD)
	for _, n := range []uint64{36, 84, 132, 200} { // in the middle of chunks
		one.settle(one.step(n, 0))
		two.settle(two.step(n-min(n%16, 4), 0))
	}
	two.settle(two.step(200, 0))
	one.finish(false)
	two.finish(false)
	for _, id := range []string{"one", "two"} {
		r := c.beginConsumer(id, x, enginepb.Leg_PD)
		hit(t, r, r.load())
		r.finish()
	}
	clean(t, producer, consumer)
}

// TestManyRequestsAtOnce mixes both legs and both orders over shared prefixes.
func TestManyRequestsAtOnce(t *testing.T) {
	producer, consumer := pair(t)
	type pairOf struct{ p, c *testEngine }
	var engines []pairOf
	for range 4 {
		engines = append(engines, pairOf{attach(t, producer), attach(t, consumer)})
	}
	t.Run("group", func(t *testing.T) {
		for i, e := range engines {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				p, c := &testEngine{t, e.p.c, map[string]uint32{}}, &testEngine{t, e.c.c, map[string]uint32{}}
				for k := range 6 {
					id := fmt.Sprintf("%d-%d", i, k)
					x := text{fmt.Sprint("shared", k%2), uint64(90 + 10*k)}
					p.next, c.next = map[string]uint32{}, map[string]uint32{} // nothing is in work
					var r *consuming
					leg := enginepb.Leg_PD
					switch k % 3 {
					case 0:
						p.produce(id, x, leg)
						r = c.beginConsumer(id, x, leg)
					case 1:
						r = c.beginConsumer(id, x, leg)
						p.produce(id, x, leg)
					default:
						leg = enginepb.Leg_PROBE
						p.produce(id, x, leg)
						r = c.beginConsumer(id, x, leg)
					}
					hit(t, r, r.load())
					r.finish()
				}
			})
		}
	})
	clean(t, producer, consumer)
}

// TestEdges: every length around a chunk and the longest, with local prefixes and caps at
// their ends. Nobody resumes at or above the prompt's end, and everything ends.
func TestEdges(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	for _, n := range []uint64{1, 2, 7, 8, 9, 15, 16, 17, 511, 512} {
		edits := map[string]beginOption{
			"plain":                  func(b *enginepb.BeginRequest) {},
			"all local":              func(b *enginepb.BeginRequest) { b.LocalTokens = n },
			"all but one local":      func(b *enginepb.BeginRequest) { b.LocalTokens = n - 1 },
			"local above the cap":    func(b *enginepb.BeginRequest) { b.LocalTokens, b.MaxLoadTokens = n, 1 },
			"cap of one":             func(b *enginepb.BeginRequest) { b.MaxLoadTokens = 1 },
			"deadline of one ms":     func(b *enginepb.BeginRequest) { b.DeadlineMs = 1 },
			"from the own tier only": func(b *enginepb.BeginRequest) { b.PeerId = "" },
		}
		for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
			x := text{fmt.Sprint("e", n, leg), n}
			transfer := fmt.Sprintf("%d %v", n, leg)
			p.fresh()
			p.produce(transfer, x, leg)
			for name, edit := range edits {
				c.fresh()
				id := transfer + " " + name
				req := c.request(id, x, enginepb.Role_CONSUMER, leg, edit, func(b *enginepb.BeginRequest) { b.TransferId = "t-" + transfer })
				reply, err := c.c.Begin(ctxFor(t), req)
				require.NoError(t, err)
				r := &consuming{e: c, id: id, x: x, reply: reply, tables: map[string]map[int]uint32{}}
				ev, err := c.c.Wait(ctxFor(t), r.startLoad())
				require.NoError(t, err)
				require.GreaterOrEqual(t, ev.ResumeTokens, req.LocalTokens)
				require.Less(t, ev.ResumeTokens, max(n, req.LocalTokens+1), id)
				r.finish()
			}
		}
	}
	clean(t, producer, consumer)
}

// TestDecodeBeyondTheLongestPrompt: a text may go on above max_tokens.
func TestDecodeBeyondTheLongestPrompt(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"m", 512}
	q, _ := p.beginProducer("m", x, enginepb.Leg_PROBE)
	q.settle(q.step(512, 0))
	for n := uint64(516); n <= 560; n += 4 {
		b := uint32(n/blockTokens) - 1
		m := &enginepb.StoreRequest{RequestId: "m", ComputedTokens: n, MoreHashes: x.hash(int(b))}
		for _, group := range []string{"sliding", "full"} {
			ids := p.take(group, 1)
			copy(p.c.Region(group).Block(ids[0]), x.block(group, int(b)))
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: group, FirstBlock: b, Ids: ids})
		}
		job, err := p.c.Store(ctxFor(t), m)
		require.NoError(t, err)
		ev, err := p.c.Wait(ctxFor(t), job)
		require.NoError(t, err)
		require.True(t, ev.Ok, ev.Error)
	}
	q.finish(false)
	r := c.beginConsumer("m", x, enginepb.Leg_PROBE)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestShortHashes: hashes of 16 bytes work, and are other names than those of 32.
func TestShortHashes(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"h", 200}
	short := func(b *enginepb.BeginRequest) {
		b.Hashes, b.HashBytes = nil, 16
		for i := range int(x.tokens / blockTokens) {
			b.Hashes = append(b.Hashes, x.hash(i)[:16]...)
		}
	}
	p.produce("a", x, enginepb.Leg_PD, short)
	r := c.beginConsumer("a", x, enginepb.Leg_PD, short)
	hit(t, r, r.load())
	r.finish()
	p.produce("b", x, enginepb.Leg_PD, short)
	r = c.beginConsumer("b", x, enginepb.Leg_PD)
	ev := r.load()
	lower(t, r, ev)
	require.Equal(t, map[string]int{"unmatched": len(ev.Failures)}, causes(ev))
	r.finish()
	producer.meeting.do(func(now time.Duration) { producer.meeting.join.Tick(now + time.Hour) })
	clean(t, producer, consumer)
}

// TestTwoConsumersOfOneTransfer: both get all of it.
func TestTwoConsumersOfOneTransfer(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"s", 300}
	same := func(b *enginepb.BeginRequest) { b.TransferId = "T" }
	one := c.beginConsumer("one", x, enginepb.Leg_PD, same)
	two := c.beginConsumer("two", x, enginepb.Leg_PD, same)
	j1, j2 := one.startLoad(), two.startLoad()
	p.produce("p", x, enginepb.Leg_PD, same)
	hit(t, one, one.wait(j1))
	hit(t, two, two.wait(j2))
	one.finish()
	two.finish()
	clean(t, producer, consumer)
}
