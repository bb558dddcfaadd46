package host

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/gpu/cuda/standin"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// gpuDeployment has pages of 32 KiB: blocks of 16 of them, K and V of 8 layers.
const gpuDeployment = `
model: gpu
max_tokens: 16384
align_tokens: 256
groups:
  - {name: sliding, rule: window, params: {window: 200}, block_tokens: 16, chunk_blocks: 4, layers: 8, kv_heads: 8, head_dim: 128, dtype: bf16}
  - {name: full, rule: full, block_tokens: 16, chunk_blocks: 8, layers: 8, kv_heads: 8, head_dim: 128, dtype: bf16}
legs: [pd, probe]
`

const (
	gpuPage       = 32 << 10
	gpuPages      = 16 // of a block
	gpuBlockBytes = gpuPage * gpuPages
	gpuTokens     = 16 // of a block
)

var gpuChunkBlocks = map[string]uint32{"sliding": 4, "full": 8}

// An order is what the test tells an engine's process to do, one JSON line each.
type order struct {
	// Do is attach, produce, consume or end.
	Do string
	// Attach: where, and how blocks lie; see gpuLayouts.
	Socket, Layout, UUID string
	Blocks               uint32
	Groups               []string // default sliding and full
	Ordinal              int      // of the GPU
	// Produce and consume: a text of so many tokens, by its seed.
	ID, Peer     string
	Seed, Tokens uint64
	Leg          enginepb.Leg
	// Step tokens; Delay before the blocks are filled in the stream.
	Step  uint64
	Delay time.Duration
	// Quick leaves out the fills and comparisons, for a measurement.
	Quick bool
}

// An outcome is what the engine answers.
type outcome struct {
	Err            string
	Resume, Loaded uint64 // token, and bytes
	Wrong          uint64 // bytes that are not those of the text
	Failures       int
	Note           string
	Seconds        float64
	JobSeconds     []float64 // of each job, from the call to its event
	Handle         string
}

// gpuLayouts are the ways in which an engine may keep its blocks.
var gpuLayouts = []string{"runs", "layers", "own"}

// gpuRegion is the region of a group: "runs" has a block in one run, "layers" a page of
// each layer's K and V in one memory of the daemon's, "own" an allocation of the engine's for
// each layer, [2, blocks, page] as PyTorch has it.
func (e *gpuEngine) region(group string, o *order) (*enginepb.Region, error) {
	r := &enginepb.Region{Group: group, Blocks: o.Blocks}
	plane := uint64(o.Blocks) * gpuPage
	switch o.Layout {
	case "layers":
		for i := range uint64(gpuPages) {
			r.Layout = append(r.Layout, &enginepb.Stride{OffsetBytes: i * plane, StrideBytes: gpuPage, LengthBytes: gpuPage})
		}
	case "own":
		for l := range uint32(gpuPages / 2) {
			at, handle, err := e.cuda.Alloc(int64(2 * plane))
			if err != nil {
				return nil, err
			}
			e.memory[group] = append(e.memory[group], at)
			r.Memory = append(r.Memory, &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_CUDA_IPC, Handle: handle, LengthBytes: 2 * plane})
			for kv := range uint64(2) {
				r.Layout = append(r.Layout, &enginepb.Stride{Memory: l, OffsetBytes: kv * plane, StrideBytes: gpuPage, LengthBytes: gpuPage})
			}
		}
	}
	return r, nil
}

// gpuEngine is an engine's process.
type gpuEngine struct {
	cuda    *standin.Engine
	event   *standin.Event
	client  *engine.Client
	blocks  uint32
	groups  []string
	memory  map[string][]uint64 // per group: addresses
	layouts map[string][]*enginepb.Stride
}

// TestGPUEngineProcess is no test: it is the engine's process of the tests below.
func TestGPUEngineProcess(t *testing.T) {
	if os.Getenv("TIERD_TEST_GPU_ENGINE") == "" {
		t.Skip("the engine's process of other tests")
	}
	e := &gpuEngine{memory: map[string][]uint64{}, layouts: map[string][]*enginepb.Stride{}}
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		var o order
		require.NoError(t, json.Unmarshal(in.Bytes(), &o))
		if o.Do == "end" {
			break
		}
		began := time.Now()
		res, err := e.obey(&o)
		res.Seconds = time.Since(began).Seconds()
		if err != nil {
			res.Err = err.Error()
		}
		require.NoError(t, out.Encode(res))
	}
	if e.client != nil {
		_ = e.client.Close()
	}
	os.Exit(0) // the driver's own goodbye to the memory
}

func (e *gpuEngine) obey(o *order) (res outcome, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	switch o.Do {
	case "attach":
		return res, e.attach(ctx, o)
	case "produce":
		return e.produce(ctx, o)
	case "consume":
		return e.consume(ctx, o)
	}
	return res, fmt.Errorf("unknown order %q", o.Do)
}

func (e *gpuEngine) attach(ctx context.Context, o *order) (err error) {
	if e.cuda, err = standin.Open(o.Ordinal); err != nil {
		return err
	}
	if e.event, err = e.cuda.NewEvent(); err != nil {
		return err
	}
	if e.blocks, e.groups = o.Blocks, o.Groups; e.groups == nil {
		e.groups = []string{"sliding", "full"}
	}
	r := &enginepb.AttachRequest{EngineName: "stand-in, " + o.Layout, Accepts: []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_CUDA_IPC}, DeviceUuid: o.UUID, Events: [][]byte{e.event.Handle}}
	for _, g := range e.groups {
		region, err := e.region(g, o)
		if err != nil {
			return err
		}
		r.Regions = append(r.Regions, region)
	}
	if e.client, err = engine.Dial(ctx, o.Socket); err != nil {
		return err
	}
	if _, err = e.client.AttachWith(ctx, r); err != nil {
		return err
	}
	for _, g := range e.groups {
		region := e.client.Region(g)
		e.layouts[g] = region.Layout
		if region.Memory == nil {
			continue
		}
		at, err := e.cuda.Map(region.Memory.Handle)
		if err != nil {
			return err
		}
		e.memory[g] = []uint64{at + region.Memory.OffsetBytes}
	}
	return nil
}

// pages calls f for each page of a block: its number in the block's bytes, and its address.
func (e *gpuEngine) pages(group string, block uint32, f func(page int, at uint64) error) error {
	page := 0
	for _, s := range e.layouts[group] {
		at := e.memory[group][s.Memory] + s.OffsetBytes + uint64(block)*s.StrideBytes
		for off := uint64(0); off < s.LengthBytes; off += gpuPage {
			if err := f(page, at+off); err != nil {
				return err
			}
			page++
		}
	}
	return nil
}

// pageSeed is the seed of what a page of a text holds.
func pageSeed(seed uint64, group string, block uint32, page int) uint64 {
	h := sha256.Sum256(fmt.Appendf(nil, "%d/%s/%d/%d", seed, group, block, page))
	var out uint64
	for _, b := range h[:8] {
		out = out<<8 | uint64(b)
	}
	return out
}

func (o *order) hashes() []byte {
	var out []byte
	for i := range int(o.Tokens / gpuTokens) {
		h := sha256.Sum256(fmt.Appendf(nil, "%d/%d", o.Seed, i))
		out = append(out, h[:]...)
	}
	return out
}

func (o *order) begin(role enginepb.Role) *enginepb.BeginRequest {
	return &enginepb.BeginRequest{
		RequestId: o.ID, PromptTokens: o.Tokens, Hashes: o.hashes(), HashBytes: sha256.Size,
		Role: role, Leg: o.Leg, TransferId: "t-" + o.ID, PeerId: o.Peer, DeadlineMs: 20_000,
	}
}

// fill writes a text's blocks in the stream, behind a kernel that takes its time, and
// records the event. It does not wait.
func (e *gpuEngine) fill(o *order, tables map[string][]uint32, from, to int, seed uint64) error {
	if err := e.cuda.Delay(o.Delay); err != nil {
		return err
	}
	for g, ids := range tables {
		for b := from; b < to; b++ {
			err := e.pages(g, ids[b], func(page int, at uint64) error {
				return e.cuda.Fill(at, gpuPage, pageSeed(seed, g, uint32(b), page))
			})
			if err != nil {
				return err
			}
		}
	}
	return e.cuda.Record(e.event)
}

// places gives each logical block of a request a block of the regions, in random order.
func (e *gpuEngine) places(o *order) map[string][]uint32 {
	r := rand.New(rand.NewPCG(o.Seed, 1))
	out := map[string][]uint32{}
	for _, g := range e.groups {
		for _, i := range r.Perm(int(e.blocks))[:(o.Tokens+gpuTokens-1)/gpuTokens] {
			out[g] = append(out[g], uint32(i))
		}
	}
	return out
}

func (e *gpuEngine) produce(ctx context.Context, o *order) (res outcome, err error) {
	if _, err = e.client.Begin(ctx, o.begin(enginepb.Role_PRODUCER)); err != nil {
		return res, err
	}
	tables := e.places(o)
	var jobs []uint64
	var sent []time.Time
	for n := uint64(0); n < o.Tokens; {
		from := int((n + gpuTokens - 1) / gpuTokens)
		n = min(n+o.Step, o.Tokens)
		to := int((n + gpuTokens - 1) / gpuTokens)
		m := &enginepb.StoreRequest{RequestId: o.ID, ComputedTokens: n}
		if !o.Quick {
			m.Event = 1
			if err := e.fill(o, tables, from, to, o.Seed); err != nil {
				return res, err
			}
		}
		for _, g := range e.groups {
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g, FirstBlock: uint32(from), Ids: tables[g][from:to]})
		}
		sent = append(sent, time.Now())
		job, err := e.client.Store(ctx, m)
		if err != nil {
			return res, err
		}
		jobs = append(jobs, job)
		if o.Quick {
			if err := e.await(ctx, job, sent[len(sent)-1], &res); err != nil {
				return res, err
			}
		}
	}
	if !o.Quick {
		for i, job := range jobs {
			if err := e.await(ctx, job, sent[i], &res); err != nil {
				return res, err
			}
		}
		// The blocks are the engine's again: what was stored must not change with them.
		if err := e.fill(&order{}, tables, 0, len(tables["full"]), ^o.Seed); err != nil {
			return res, err
		}
	}
	_, err = e.client.Finish(ctx, &enginepb.FinishRequest{RequestId: o.ID})
	return res, err
}

func (e *gpuEngine) await(ctx context.Context, job uint64, since time.Time, res *outcome) error {
	ev, err := e.client.Wait(ctx, job)
	if err != nil {
		return err
	}
	res.JobSeconds = append(res.JobSeconds, time.Since(since).Seconds())
	res.Failures += len(ev.Failures)
	if len(ev.Failures) > 0 && res.Note == "" {
		res.Note = ev.Error
	}
	return nil
}

func (e *gpuEngine) consume(ctx context.Context, o *order) (res outcome, err error) {
	reply, err := e.client.Begin(ctx, o.begin(enginepb.Role_CONSUMER))
	if err != nil {
		return res, err
	}
	res.Note = reply.Note
	tables := e.places(o)
	m := &enginepb.LoadRequest{RequestId: o.ID}
	for _, g := range append(reply.Demand, reply.Fallback...) {
		for _, r := range g.Chunks {
			first, last := r.First*gpuChunkBlocks[g.Group], (r.Last+1)*gpuChunkBlocks[g.Group]
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.Group, FirstBlock: first, Ids: tables[g.Group][first:last]})
		}
	}
	if !o.Quick { // kernels that still write the blocks when the load is asked for
		m.Event = 1
		if err := e.fill(o, tables, 0, len(tables["full"]), o.Seed+12345); err != nil {
			return res, err
		}
	}
	began := time.Now()
	job, err := e.client.Load(ctx, m)
	if err != nil {
		return res, err
	}
	ev, err := e.client.Wait(ctx, job)
	if err != nil {
		return res, err
	}
	res.JobSeconds = []float64{time.Since(began).Seconds()}
	res.Resume, res.Failures = ev.ResumeTokens, len(ev.Failures)
	if ev.Error != "" {
		res.Note += ev.Error
	}
	if err := e.compare(o, ev, tables, &res); err != nil {
		return res, err
	}
	_, err = e.client.Finish(ctx, &enginepb.FinishRequest{RequestId: o.ID})
	return res, err
}

// compare holds every byte of what was loaded against the text.
func (e *gpuEngine) compare(o *order, ev *enginepb.Event, tables map[string][]uint32, res *outcome) error {
	got := make([]byte, gpuPage)
	for _, g := range ev.Loaded {
		for _, r := range g.Chunks {
			for b := r.First * gpuChunkBlocks[g.Group]; b < (r.Last+1)*gpuChunkBlocks[g.Group]; b++ {
				res.Loaded += gpuBlockBytes
				if o.Quick {
					continue
				}
				err := e.pages(g.Group, tables[g.Group][b], func(page int, at uint64) error {
					if err := e.cuda.Read(at, got); err != nil {
						return err
					}
					if want := standin.Filled(pageSeed(o.Seed, g.Group, b, page), gpuPage); !bytes.Equal(want, got) {
						res.Wrong += gpuPage
					}
					return nil
				})
				if err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// A stand is an engine's process as the test sees it.
type stand struct {
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
	end func() error
	log bytes.Buffer
}

func startStand(n *Node, layout string, blocks uint32, groups ...string) (*stand, error) {
	s := &stand{}
	s.cmd = exec.Command(os.Args[0], "-test.run=^TestGPUEngineProcess$")
	s.cmd.Env = append(os.Environ(), "TIERD_TEST_GPU_ENGINE=1")
	s.cmd.Stderr = &s.log
	in, err := s.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	s.in, s.out = json.NewEncoder(in), json.NewDecoder(out)
	s.end = func() error {
		in.Close()
		return s.cmd.Wait()
	}
	_, err = s.tell(order{Do: "attach", Socket: n.Addresses().EngineSocket, Layout: layout, Blocks: blocks, Groups: groups, Ordinal: n.devices.GPU.Device.(devices.GPU).Info().Ordinal, UUID: n.devices.GPU.UUID()})
	if err != nil {
		s.kill()
		return nil, err
	}
	return s, nil
}

func (s *stand) tell(o order) (res outcome, err error) {
	if err := s.in.Encode(o); err != nil {
		return res, err
	}
	if err := s.out.Decode(&res); err != nil {
		return res, fmt.Errorf("the engine's process ended: %w: %s", err, s.log.String())
	}
	if res.Err != "" {
		err = errors.New(res.Err)
	}
	return res, err
}

func (s *stand) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.end()
}
