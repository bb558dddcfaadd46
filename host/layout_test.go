package host

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/mem"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/metrics"
)

// A spread engine keeps its blocks in any layout, in memory of a fake GPU or of the host,
// its own or the daemon's.
type spread struct {
	t        *testing.T
	c        *engine.Client
	d        *fakeDriver
	layouts  map[string][]*enginepb.Stride
	memories map[string][][]byte
	guards   map[string][][]byte // what was in the memories at first
	next     map[string]uint32
	event    *fakeEvent
}

const spreadBlocks = 160

// drawLayout cuts a block into fragments and gives each a place in one of the memories.
// Within a memory the fragments share a stride in an order of their own, or have areas of
// their own with strides of their own.
func drawLayout(r *rand.Rand, memories int) (layout []*enginepb.Stride, sizes []uint64) {
	for left := uint64(blockBytes); left > 0; {
		n := 1 + r.Uint64N(left)
		if r.IntN(3) > 0 {
			n = min(n, 64)
		}
		layout = append(layout, &enginepb.Stride{LengthBytes: n, Memory: uint32(r.IntN(memories))})
		left -= n
	}
	sizes = make([]uint64, memories)
	for m := range memories {
		var here []*enginepb.Stride
		for _, i := range r.Perm(len(layout)) {
			if layout[i].Memory == uint32(m) {
				here = append(here, layout[i])
			}
		}
		at := r.Uint64N(100)
		if r.IntN(2) == 0 { // interleaved: [block, fragment]
			from := at
			for _, s := range here {
				at += r.Uint64N(20)
				s.OffsetBytes = at
				at += s.LengthBytes
			}
			stride := at - from + r.Uint64N(50)
			for _, s := range here {
				s.StrideBytes = stride
			}
			at = from + spreadBlocks*stride
		} else { // in planes: [fragment, block]
			for _, s := range here {
				s.OffsetBytes, s.StrideBytes = at, s.LengthBytes+r.Uint64N(30)
				at += spreadBlocks*s.StrideBytes + r.Uint64N(50)
			}
		}
		sizes[m] = at + 1 + r.Uint64N(100)
	}
	return layout, sizes
}

// attachSpread attaches an engine with drawn layouts.
func attachSpread(t *testing.T, n *Node, d *fakeDriver, r *rand.Rand, host bool) *spread {
	t.Helper()
	e := &spread{t: t, d: d, layouts: map[string][]*enginepb.Stride{}, memories: map[string][][]byte{}, guards: map[string][][]byte{}, next: map[string]uint32{}}
	owned := r.IntN(2) == 0
	req := &enginepb.AttachRequest{EngineName: "spread", Accepts: []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_CUDA_IPC, enginepb.MemoryKind_MEMORY_FILE}, DeviceUuid: fakeUUID + "0"}
	if host {
		req.Accepts = req.Accepts[1:]
	} else {
		e.event = d.event(fmt.Sprint(t.Name(), r.Uint64()))
		req.Events = [][]byte{e.event.handle}
	}
	for _, g := range []string{"sliding", "full"} {
		memories := 1
		if owned {
			memories = 1 + r.IntN(3)
		}
		layout, sizes := drawLayout(r, memories)
		e.layouts[g] = layout
		region := &enginepb.Region{Group: g, Blocks: spreadBlocks, Layout: layout}
		for m := 0; owned && m < memories; m++ {
			own, bytes := e.own(sizes[m], host)
			region.Memory = append(region.Memory, own)
			e.memories[g] = append(e.memories[g], bytes)
		}
		req.Regions = append(req.Regions, region)
	}
	var err error
	e.c, err = engine.Dial(ctxFor(t), n.Addresses().EngineSocket)
	require.NoError(t, err)
	reply, err := e.c.AttachWith(ctxFor(t), req)
	require.NoError(t, err)
	require.Equal(t, []string{"cuda:0", "mem"}[map[bool]int{false: 0, true: 1}[host]], reply.Device.Name)
	for _, reg := range reply.Regions {
		require.Len(t, reg.Layout, len(e.layouts[reg.Group]))
		if !owned && host {
			e.memories[reg.Group] = [][]byte{e.c.Region(reg.Group).Bytes()}
		} else if !owned {
			require.Equal(t, enginepb.MemoryKind_MEMORY_CUDA_IPC, reg.Memory.Kind)
			e.memories[reg.Group] = [][]byte{d.open(t, reg.Memory)}
		}
		for _, m := range e.memories[reg.Group] {
			for i := range m {
				m[i] = byte(r.Uint32())
			}
			e.guards[reg.Group] = append(e.guards[reg.Group], append([]byte(nil), m...))
		}
	}
	return e
}

// own is memory of the engine's.
func (e *spread) own(size uint64, host bool) (*enginepb.Memory, []byte) {
	dev, err := mem.New(e.t.TempDir())
	require.NoError(e.t, err)
	e.t.Cleanup(func() { dev.Close() })
	reg, err := dev.Alloc(ctxFor(e.t), int64(size)+4096)
	require.NoError(e.t, err)
	h, err := reg.Export()
	require.NoError(e.t, err)
	m := &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_FILE, Path: h.Path, OffsetBytes: 4096, LengthBytes: size}
	if !host {
		m = &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_CUDA_IPC, Handle: e.d.handle(h).Opaque, OffsetBytes: 4096, LengthBytes: size}
	}
	return m, e.d.openOr(e.t, m)
}

// openOr is open, also of a file.
func (d *fakeDriver) openOr(t *testing.T, m *enginepb.Memory) []byte {
	if m.Kind == enginepb.MemoryKind_MEMORY_FILE {
		d.handle(gpu.Handle{Path: m.Path})
		m = &enginepb.Memory{Handle: d.handle(gpu.Handle{Path: m.Path}).Opaque, OffsetBytes: m.OffsetBytes, LengthBytes: m.LengthBytes}
	}
	return d.open(t, m)
}

// at calls f with each fragment of a block and where it begins in the block's bytes. It is
// written for itself, and not in the words of the code under test.
func (e *spread) at(group string, block uint32, f func(from int, b []byte)) {
	from := 0
	for _, s := range e.layouts[group] {
		begin := s.OffsetBytes + uint64(block)*s.StrideBytes
		f(from, e.memories[group][s.Memory][begin:begin+s.LengthBytes])
		from += int(s.LengthBytes)
	}
}

func (e *spread) put(group string, block uint32, content []byte) {
	e.at(group, block, func(from int, b []byte) { copy(b, content[from:]) })
}

func (e *spread) get(group string, block uint32) []byte {
	out := make([]byte, blockBytes)
	e.at(group, block, func(from int, b []byte) { copy(out[from:], b) })
	return out
}

func (e *spread) take(group string, n int) (ids []uint32) {
	for range n {
		ids = append(ids, e.next[group]*7%spreadBlocks) // 7 and 160 share no factor
		e.next[group]++
	}
	return ids
}

// produce runs a prompt in steps of 48 tokens.
func (e *spread) produce(r *enginepb.BeginRequest, x text) {
	e.t.Helper()
	_, err := e.c.Begin(ctxFor(e.t), r)
	require.NoError(e.t, err)
	tables := map[string][]uint32{}
	for n := uint64(0); n < x.tokens; {
		n = min(n+48, x.tokens)
		m := &enginepb.StoreRequest{RequestId: r.RequestId, ComputedTokens: n}
		if e.event != nil {
			m.Event = 1
		}
		for _, g := range []string{"sliding", "full"} {
			from, to := len(tables[g]), int((n+blockTokens-1)/blockTokens)
			ids := e.take(g, to-from)
			tables[g] = append(tables[g], ids...)
			for i := max(0, from-1); i < to; i++ { // the last one was not full yet
				e.put(g, tables[g][i], x.block(g, i))
			}
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g, FirstBlock: uint32(from), Ids: ids})
		}
		job, err := e.c.Store(ctxFor(e.t), m)
		require.NoError(e.t, err)
		ev, err := e.c.Wait(ctxFor(e.t), job)
		require.NoError(e.t, err)
		require.True(e.t, ev.Ok, ev.Error)
	}
	_, err = e.c.Finish(ctxFor(e.t), &enginepb.FinishRequest{RequestId: r.RequestId})
	require.NoError(e.t, err)
}

// consume loads a prompt, and holds every byte of the memory against what must be there:
// the text in the blocks that were loaded, and what was there before everywhere else.
func (e *spread) consume(r *enginepb.BeginRequest, x text) *enginepb.Event {
	e.t.Helper()
	reply, err := e.c.Begin(ctxFor(e.t), r)
	require.NoError(e.t, err)
	require.Empty(e.t, reply.Note)
	m := &enginepb.LoadRequest{RequestId: r.RequestId}
	tables := map[string]map[uint32]uint32{"sliding": {}, "full": {}}
	for _, g := range reply.Demand {
		for _, c := range g.Chunks {
			first, n := c.First*uint32(chunkBlocks[g.Group]), int(c.Last-c.First+1)*chunkBlocks[g.Group]
			ids := e.take(g.Group, n)
			for i, id := range ids {
				tables[g.Group][first+uint32(i)] = id
			}
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.Group, FirstBlock: first, Ids: ids})
		}
	}
	job, err := e.c.Load(ctxFor(e.t), m)
	require.NoError(e.t, err)
	ev, err := e.c.Wait(ctxFor(e.t), job)
	require.NoError(e.t, err)
	require.True(e.t, ev.Ok, ev.Error)
	require.Equal(e.t, reply.ResumeTokens, ev.ResumeTokens)
	for _, g := range ev.Loaded {
		for _, c := range g.Chunks {
			for b := c.First * uint32(chunkBlocks[g.Group]); b < (c.Last+1)*uint32(chunkBlocks[g.Group]); b++ {
				id := tables[g.Group][b]
				require.Equal(e.t, x.block(g.Group, int(b)), e.get(g.Group, id), "group %s block %d", g.Group, b)
				e.at(g.Group, id, func(_ int, b []byte) { clear(b) })
			}
		}
	}
	_, err = e.c.Finish(ctxFor(e.t), &enginepb.FinishRequest{RequestId: r.RequestId})
	require.NoError(e.t, err)
	// What is left besides the loaded blocks, now zero, is as it was.
	for group, all := range e.memories {
		for i, m := range all {
			for k := range m {
				if m[k] != 0 && m[k] != e.guards[group][i][k] {
					require.Fail(e.t, "a byte beside the blocks was written", "group %s memory %d byte %d", group, i, k)
				}
			}
		}
	}
	return ev
}

// TestLayoutsDrawn: whatever layouts two engines have, on a GPU and in host memory, in their
// own memory and in the daemon's, what one stores on its node the other loads on its own.
func TestLayoutsDrawn(t *testing.T) {
	d := newFakeDriver(t)
	producer, pg := startFake(t, d, "producer")
	consumer, cg := startFake(t, d, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	number := 0
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		r := rand.New(rand.NewPCG(seed, 0))
		p := attachSpread(t, producer, d, r, rapid.IntRange(0, 3).Draw(rt, "producer on the host") == 0)
		c := attachSpread(t, consumer, d, r, rapid.IntRange(0, 3).Draw(rt, "consumer on the host") == 0)
		for range 2 {
			number++
			x := text{fmt.Sprint(seed, number), rapid.Uint64Range(20, 300).Draw(rt, "tokens")}
			leg := rapid.SampledFrom([]enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE, enginepb.Leg_DEMAND}).Draw(rt, "leg")
			e := &testEngine{t: t}
			p.produce(e.request(fmt.Sprint(number), x, enginepb.Role_PRODUCER, leg), x)
			p.next, c.next = map[string]uint32{}, map[string]uint32{}
			c.consume(e.request(fmt.Sprint(number), x, enginepb.Role_CONSUMER, leg), x)
		}
		require.NoError(t, p.c.Close())
		require.NoError(t, c.c.Close())
		require.Eventually(t, func() bool { return pg.idle() && cg.idle() }, soon, time.Millisecond, "regions and events are given back")
	})
	clean(t, producer, consumer)
	for _, n := range []*Node{producer, consumer} {
		r := n.devices.Report()
		require.Positive(t, r.Stores[devices.KindCUDA].Bytes+r.Loads[devices.KindCUDA].Bytes)
		require.Positive(t, r.Stores[devices.KindMem].Bytes+r.Loads[devices.KindMem].Bytes)
	}
}

// on is an engine on a fake GPU in the layout of one fragment, with an event.
func on(t *testing.T, n *Node, d *fakeDriver) *spread {
	t.Helper()
	e := &spread{t: t, d: d, layouts: map[string][]*enginepb.Stride{}, memories: map[string][][]byte{}, next: map[string]uint32{}, event: d.event(fmt.Sprint(t.Name(), n.cfg.NodeID))}
	var err error
	e.c, err = engine.Dial(ctxFor(t), n.Addresses().EngineSocket)
	require.NoError(t, err)
	t.Cleanup(func() { e.c.Close() })
	_, err = e.c.AttachWith(ctxFor(t), &enginepb.AttachRequest{
		Accepts: []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_CUDA_IPC}, Events: [][]byte{e.event.handle},
		Regions: []*enginepb.Region{{Group: "sliding", Blocks: spreadBlocks}, {Group: "full", Blocks: spreadBlocks}},
	})
	require.NoError(t, err)
	for _, g := range []string{"sliding", "full"} {
		r := e.c.Region(g)
		e.layouts[g], e.memories[g] = r.Layout, [][]byte{d.open(t, r.Memory)}
	}
	return e
}

// storing begins a prompt of 64 tokens and stores it behind the event.
func (e *spread) storing(id string) (x text, job uint64) {
	e.t.Helper()
	x = text{id, 64}
	_, err := e.c.Begin(ctxFor(e.t), (&testEngine{t: e.t}).request(id, x, enginepb.Role_PRODUCER, enginepb.Leg_PD))
	require.NoError(e.t, err)
	m := &enginepb.StoreRequest{RequestId: id, ComputedTokens: 64, Event: 1}
	for _, g := range []string{"sliding", "full"} {
		m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g, Ids: e.take(g, 16)})
	}
	job, err = e.c.Store(ctxFor(e.t), m)
	require.NoError(e.t, err)
	return x, job
}

// TestStoreWaitsForTheEnginesStream: nothing is read before the event is reached, and a
// stream that never gets there costs its own request alone, which ends by its deadline.
func TestStoreWaitsForTheEnginesStream(t *testing.T) {
	d := newFakeDriver(t)
	n, _ := startFake(t, d, "producer")
	n.waits.request = 300 * time.Millisecond
	e, other := on(t, n, d), on(t, n, d)
	other.event = d.event("other")

	e.event.record()
	x, job := e.storing("waits")
	require.Eventually(t, func() bool { return e.event.waited() > 0 }, soon, time.Millisecond)
	require.Zero(t, n.devices.Report().Stores[devices.KindCUDA].Bytes)
	count, _ := n.open.of(metrics.WaitEvent)
	require.Equal(t, 1, count)
	for g := range e.layouts { // only now the kernels write
		for b := range 16 {
			e.put(g, uint32(b)*7%spreadBlocks, x.block(g, b))
		}
	}
	e.event.reach()
	ev, err := e.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.True(t, ev.Ok, ev.Error)
	require.Positive(t, n.devices.Report().Stores[devices.KindCUDA].Bytes)

	e.event.record()
	_, job = e.storing("never")
	ev, err = e.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.False(t, ev.Ok)
	require.Contains(t, ev.Error, "store: the engine's stream has not reached event 1 by the request's deadline")
	require.Equal(t, 1.0, counter(n, "waits", metrics.WaitEvent, "deadline"))

	_, job = e.storing("aborted")
	_, err = e.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "aborted", Abort: true})
	require.NoError(t, err)
	ev, err = e.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.Equal(t, map[string]int{metrics.CauseAborted: len(ev.Failures)}, causes(ev))
	e.event.reach()

	_, err = e.c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "waits", ComputedTokens: 64, Event: 2})
	require.ErrorContains(t, err, "event is 2, but the engine attached with 1 events")
}

// TestLoadWaitsForTheEnginesStream: nothing is written before the event is reached.
func TestLoadWaitsForTheEnginesStream(t *testing.T) {
	d := newFakeDriver(t)
	producer, _ := startFake(t, d, "producer")
	consumer, _ := startFake(t, d, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := on(t, producer, d), on(t, consumer, d)
	x := text{"load", 200}
	te := &testEngine{t: t}
	p.produce(te.request("load", x, enginepb.Role_PRODUCER, enginepb.Leg_PD), x)
	reply, err := c.c.Begin(ctxFor(t), te.request("load", x, enginepb.Role_CONSUMER, enginepb.Leg_PD))
	require.NoError(t, err)
	m := &enginepb.LoadRequest{RequestId: "load", Event: 1}
	for _, g := range reply.Demand {
		for _, r := range g.Chunks {
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.Group, FirstBlock: r.First * uint32(chunkBlocks[g.Group]), Ids: c.take(g.Group, int(r.Last-r.First+1)*chunkBlocks[g.Group])})
		}
	}
	c.event.record()
	job, err := c.c.Load(ctxFor(t), m)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return c.event.waited() > 0 && consumer.tier.Snapshot().Writing == 0 }, soon, time.Millisecond)
	for g, all := range c.memories {
		require.Equal(t, make([]byte, len(all[0])), all[0], "group %s", g)
	}
	c.event.reach()
	ev, err := c.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.True(t, ev.Ok, ev.Error)
	require.Equal(t, x.block("full", 0), c.get("full", 0))
}

// TestLoadsAsChunksArrive: what has come is in the engine's blocks while the rest is not
// even computed.
func TestLoadsAsChunksArrive(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"early", 200}
	r := c.beginConsumer("early", x, enginepb.Leg_PD)
	job := r.startLoad()
	w, _ := p.beginProducer("early", x, enginepb.Leg_PD)
	require.True(t, w.settle(w.step(96, 0)).Ok)
	loaded := func() uint64 { return consumer.devices.Report().Loads[devices.KindMem].Bytes }
	require.Eventually(t, func() bool { return loaded() == 6*4*blockBytes }, soon, time.Millisecond, "the first 96 tokens are 6 chunks of full")
	require.Equal(t, x.block("full", 0), c.c.Region("full").Block(r.tables["full"][0]))
	first := loaded()
	require.True(t, w.settle(w.step(200, 0)).Ok)
	w.finish(false)
	hit(t, r, r.wait(job))
	require.Greater(t, loaded(), first)
	require.Equal(t, loaded(), uint64(12*4*blockBytes+3*2*blockBytes), "each chunk once")
	r.finish()
	clean(t, producer, consumer)
}

// TestLostGPU: its jobs fail with a reason, requests compute for themselves, and engines in
// host memory go on.
func TestLostGPU(t *testing.T) {
	d := newFakeDriver(t)
	producer, pg := startFake(t, d, "producer")
	consumer, cg := startFake(t, d, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := on(t, producer, d), on(t, consumer, d)
	te := &testEngine{t: t}
	x := text{"lost", 200}
	p.produce(te.request("lost", x, enginepb.Role_PRODUCER, enginepb.Leg_PD), x)
	reply, err := c.c.Begin(ctxFor(t), te.request("lost", x, enginepb.Role_CONSUMER, enginepb.Leg_PD))
	require.NoError(t, err)
	require.Positive(t, reply.ResumeTokens)
	cg.lose()
	m := &enginepb.LoadRequest{RequestId: "lost"}
	for _, g := range reply.Demand {
		for _, r := range g.Chunks {
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.Group, FirstBlock: r.First * uint32(chunkBlocks[g.Group]), Ids: c.take(g.Group, int(r.Last-r.First+1)*chunkBlocks[g.Group])})
		}
	}
	job, err := c.c.Load(ctxFor(t), m)
	require.NoError(t, err)
	ev, err := c.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.Zero(t, ev.ResumeTokens)
	require.False(t, ev.Ok)
	require.Contains(t, ev.Error, "cuda:0: device is lost: as if it had fallen off the bus")
	_, err = c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "lost"})
	require.NoError(t, err)

	reply, err = c.c.Begin(ctxFor(t), te.request("next", x, enginepb.Role_CONSUMER, enginepb.Leg_PD))
	require.NoError(t, err)
	require.Equal(t, "cuda:0: device is lost: as if it had fallen off the bus", reply.Note)
	require.Empty(t, reply.Demand)
	_, err = c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "next"})
	require.NoError(t, err)

	again, err := engine.Dial(ctxFor(t), consumer.Addresses().EngineSocket)
	require.NoError(t, err)
	defer again.Close()
	_, err = again.AttachWith(ctxFor(t), &enginepb.AttachRequest{Accepts: []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_CUDA_IPC}})
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.ErrorContains(t, err, "device is lost")

	pg.lose()
	_, job = p.storing("fails")
	ev, err = p.c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.Equal(t, map[string]int{metrics.CauseStore: len(ev.Failures)}, causes(ev))
	require.Contains(t, ev.Error, "device is lost")

	s := consumer.Status()
	require.True(t, s.Ready)
	require.Equal(t, "cuda:0: device is lost: as if it had fallen off the bus", s.Device.GPU.Lost)
	require.Contains(t, s.Attention, "the GPU is lost, and its engines compute everything themselves: cuda:0: device is lost: as if it had fallen off the bus")
	_, text := get(t, "http://"+consumer.Addresses().HTTP+"/metrics")
	require.Contains(t, text, "tierd_gpu_lost 1")
	require.NoError(t, p.c.Close())
	require.NoError(t, c.c.Close())
	serves(t, producer, consumer)
}

// TestStatusOfAGPU: a degraded link and memory errors are said in words, with both values.
func TestStatusOfAGPU(t *testing.T) {
	d := newFakeDriver(t)
	m := &d.monitor.is
	m.NUMANode, m.Link.Generation, m.Link.GenerationMax, m.Link.Lanes, m.Link.LanesMax, m.UncorrectedErrors = -1, 3, 5, 8, 16, 7
	n, _ := startFake(t, d, "a")
	s := n.Status()
	require.Equal(t, "cuda:0", s.Device.Name)
	require.Equal(t, "device is auto, and this is the first of 2 GPUs", s.Device.Why)
	uuid := fakeUUID + "0"
	require.Equal(t, []string{
		uuid + ": the PCIe link has 8 lanes, but GPU and slot can do 16; reseat the card or look at the riser",
		uuid + ": the PCIe link runs at generation 3, but GPU and slot can do 5",
		uuid + ": 7 memory errors could not be corrected since the driver was loaded",
	}, s.Attention)
	require.Equal(t, s.Device.PinnedOf, s.Device.PinnedBytes)
	require.Equal(t, int64(1<<28), s.Device.GPU.MemoryUsedBytes)
	_, text := get(t, "http://"+n.Addresses().HTTP+"/metrics")
	for _, line := range []string{
		`tierd_gpu_info{device="cuda:0",name="Fake 1",pci_bus_id="0000:01:00.0",uuid="` + uuid + `"} 1`,
		`tierd_gpu_memory_bytes{state="used"} 2.68435456e+08`, `tierd_gpu_pcie_lanes{of="now"} 8`, `tierd_gpu_pcie_lanes{of="max"} 16`,
		`tierd_gpu_pcie_generation{of="now"} 3`, `tierd_gpu_uncorrected_memory_errors_total 7`, `tierd_gpu_warnings 3`, `tierd_gpu_xid_errors_total 0`,
	} {
		require.Contains(t, text, line)
	}
}

// TestAttachRefusals: an engine that is at the wrong daemon hears both sides.
func TestAttachRefusals(t *testing.T) {
	d := newFakeDriver(t)
	onGPU, _ := startFake(t, d, "a")
	onMem := startNode(t, "b")
	ipc, file := enginepb.MemoryKind_MEMORY_CUDA_IPC, enginepb.MemoryKind_MEMORY_FILE
	raw := make([]byte, engine.HandleBytes)
	region := func(m *enginepb.Memory) []*enginepb.Region {
		return []*enginepb.Region{{Group: "full", Blocks: 2, Memory: []*enginepb.Memory{m}}}
	}
	for _, c := range []struct {
		name string
		n    *Node
		r    *enginepb.AttachRequest
		want string
	}{
		{"no GPU here", onMem, &enginepb.AttachRequest{Accepts: []enginepb.MemoryKind{ipc}},
			"the engine has or maps memory of kind [MEMORY_CUDA_IPC], and this node's device is mem (device is mem), which has [MEMORY_FILE]; give the node a GPU (device in its node.yaml), or let the engine map files"},
		{"memory of a GPU, and no GPU here", onMem, &enginepb.AttachRequest{Regions: region(&enginepb.Memory{Kind: ipc, Handle: raw, LengthBytes: 512})}, "this node's device is mem"},
		{"events without a stream", onGPU, &enginepb.AttachRequest{Accepts: []enginepb.MemoryKind{file}, Events: [][]byte{raw}}, "the engine gives 1 events, but its memory is host memory"},
		{"another GPU", onGPU, &enginepb.AttachRequest{Accepts: []enginepb.MemoryKind{ipc}, DeviceUuid: fakeUUID + "1"}, "the engine is on GPU " + fakeUUID + "1, and this node is on " + fakeUUID + "0 (cuda:0)"},
		{"a handle of nothing", onGPU, &enginepb.AttachRequest{Regions: region(&enginepb.Memory{Kind: ipc, Handle: raw, LengthBytes: 512})}, "memory of the engine, MEMORY_CUDA_IPC of 512 bytes at offset 0: no such handle"},
		{"a file of nothing", onMem, &enginepb.AttachRequest{Regions: region(&enginepb.Memory{Kind: file, Path: "/nowhere", LengthBytes: 512})}, "no such file"},
		{"an event of nothing", onGPU, &enginepb.AttachRequest{Accepts: []enginepb.MemoryKind{ipc}, Events: [][]byte{raw}}, "events[0]: no such event"},
		{"a layout of another model", onMem, &enginepb.AttachRequest{Regions: []*enginepb.Region{{Group: "full", Blocks: 2, Layout: []*enginepb.Stride{{StrideBytes: 128, LengthBytes: 128}}}}},
			`group "full": the fragments of the layout have 128 bytes together, but a block has 256`},
	} {
		e, err := engine.Dial(ctxFor(t), c.n.Addresses().EngineSocket)
		require.NoError(t, err)
		_, err = e.AttachWith(ctxFor(t), c.r)
		require.ErrorContains(t, err, c.want, c.name)
		require.NoError(t, e.Close())
	}
	// An engine of before that says nothing of kinds gets host memory, also where a GPU is.
	e := attach(t, onGPU)
	require.NotNil(t, e.c.Region("full").Bytes())
}
