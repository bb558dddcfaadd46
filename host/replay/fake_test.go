package replay

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry/deploy"
)

// A fakeNode is a daemon reduced to what replay can see of one: blocks that were
// stored come back under the same prefix hash. Two fakes that share a store are a pair
// of nodes.
type fakeNode struct {
	enginepb.UnimplementedEngineServer
	node       string
	deployment *deploy.Deployment
	store      *fakeStore
	server     *grpc.Server
	dir        string
	// socket and stop are for the test.
	socket string
	stop   func()
	// deliver may change the bytes of a block on their way out, or refuse them.
	deliver func(group string, block uint32, b []byte) (cause string)
	// note, when set, is why a consumer's plan fetches nothing.
	note string
	// refuse, when set, is the answer to every Begin.
	refuse error
	// serves is the deployment that Attach tells of; empty means the tiny one.
	serves string
	// held chunks of each demand are in the own tier.
	held uint64
	// reuse is what Begin allows a producer.
	reuse uint64

	events  chan *enginepb.Event
	jobs    atomic.Uint64
	mu      sync.Mutex
	regions map[string][]byte
	strides map[string]uint64
	live    map[string]*fakeRequest
	begins  []*enginepb.BeginRequest
	loads   int
}

type fakeRequest struct {
	begin  *enginepb.BeginRequest
	where  map[string]map[uint32]uint32 // group, logical block: block
	stored map[string]map[uint32]bool
	plan   *enginepb.BeginReply
}

// fakeStore holds blocks by group and prefix hash.
type fakeStore struct {
	mu     sync.Mutex
	blocks map[string][]byte
	ended  map[string]bool // transfers whose producer has finished
	lost   bool            // a node is gone: nothing that is missing will come
	cond   *sync.Cond
}

func newFakeStore() *fakeStore {
	s := &fakeStore{blocks: map[string][]byte{}, ended: map[string]bool{}}
	s.cond = sync.NewCond(&s.mu)
	return s
}

func (s *fakeStore) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = true
	s.cond.Broadcast()
}

func startFake(t *testing.T, d *deploy.Deployment, store *fakeStore, name string) *fakeNode {
	dir := t.TempDir()
	f := &fakeNode{
		node: name, deployment: d, store: store, dir: dir, socket: filepath.Join(dir, "s"), reuse: 1 << 40,
		server: grpc.NewServer(), events: make(chan *enginepb.Event, 1000),
		regions: map[string][]byte{}, strides: map[string]uint64{}, live: map[string]*fakeRequest{},
	}
	enginepb.RegisterEngineServer(f.server, f)
	l, err := net.Listen("unix", f.socket)
	require.NoError(t, err)
	served := make(chan struct{})
	go func() { defer close(served); f.server.Serve(l) }()
	f.stop = func() {
		f.server.Stop()
		<-served
	}
	t.Cleanup(f.stop)
	t.Cleanup(store.lose)
	return f
}

func (f *fakeNode) Attach(_ context.Context, r *enginepb.AttachRequest) (*enginepb.AttachReply, error) {
	text := tinyDeployment
	if f.serves != "" {
		text = f.serves
	}
	served, err := deploy.Parse("served.yaml", []byte(text))
	if err != nil {
		return nil, err
	}
	out := &enginepb.AttachReply{
		EngineId: "e", HashTokens: f.deployment.HashTokens, Verdict: "accepted", NodeId: f.node,
		Deployment: []byte(text), DeploymentDigest: served.Digest(),
	}
	for _, reg := range r.Regions {
		g := &f.deployment.Groups[f.deployment.Group(reg.Group)]
		path := filepath.Join(f.dir, "region-"+reg.Group)
		size := int64(reg.Blocks) * int64(g.BlockBytes())
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return nil, err
		}
		if err := os.Truncate(path, size); err != nil {
			return nil, err
		}
		m, err := shm.Map(path, 0, size)
		if err != nil {
			return nil, err
		}
		f.regions[reg.Group], f.strides[reg.Group] = m.Bytes(), g.BlockBytes()
		out.Regions = append(out.Regions, &enginepb.RegionReply{Group: reg.Group, Path: path, StrideBytes: g.BlockBytes(), Blocks: reg.Blocks})
	}
	return out, nil
}

func (f *fakeNode) Events(_ *enginepb.EventsRequest, stream grpc.ServerStreamingServer[enginepb.Event]) error {
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	for {
		select {
		case ev := <-f.events:
			if err := stream.Send(ev); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (f *fakeNode) Begin(_ context.Context, r *enginepb.BeginRequest) (*enginepb.BeginReply, error) {
	q := &fakeRequest{begin: r, where: map[string]map[uint32]uint32{}, stored: map[string]map[uint32]bool{}, plan: &enginepb.BeginReply{}}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return nil, f.refuse
	}
	if r.PromptTokens > 1 { // no request of the trace, but the question at the start
		f.begins = append(f.begins, r)
	}
	f.live[r.RequestId] = q
	if r.Role == enginepb.Role_PRODUCER {
		q.plan.ReuseTokens = min(f.reuse, r.PromptTokens-1)
		return q.plan, nil
	}
	if f.note != "" {
		q.plan.ResumeTokens, q.plan.Note = r.LocalTokens, f.note
		return q.plan, nil
	}
	chunk := f.deployment.Groups[0].ChunkTokens()
	resume := min(r.PromptTokens-1, r.PromptTokens/chunk*chunk)
	q.plan.ResumeTokens = max(resume, r.LocalTokens)
	for i := range f.deployment.Groups {
		g := &f.deployment.Groups[i]
		first := r.LocalTokens / chunk
		if w, ok := g.Params["window"].(int); ok && resume+1 > uint64(w) {
			first = max(first, (resume+1-uint64(w))/chunk)
		}
		gc := &enginepb.GroupChunks{Group: g.Name}
		if end := (resume + chunk - 1) / chunk; resume > r.LocalTokens && first < end {
			gc.Chunks = append(gc.Chunks, &enginepb.ChunkRange{First: uint32(first), Last: uint32(end - 1)})
		}
		q.plan.Demand = append(q.plan.Demand, gc)
	}
	return q.plan, nil
}

func (q *fakeRequest) key(d *deploy.Deployment, group string, block uint32) string {
	g := &d.Groups[d.Group(group)]
	n := (uint64(block) + 1) * g.BlockTokens / d.HashTokens * 32
	return group + string(q.begin.Hashes[n-32:n])
}

func (f *fakeNode) block(group string, id uint32) []byte {
	s := f.strides[group]
	return f.regions[group][uint64(id)*s : (uint64(id)+1)*s]
}

func (f *fakeNode) Store(_ context.Context, r *enginepb.StoreRequest) (*enginepb.JobReply, error) {
	f.mu.Lock()
	q := f.live[r.RequestId]
	f.mu.Unlock()
	f.store.mu.Lock()
	for _, run := range r.Blocks {
		if q.where[run.Group] == nil {
			q.where[run.Group], q.stored[run.Group] = map[uint32]uint32{}, map[uint32]bool{}
		}
		for i, id := range run.Ids {
			q.where[run.Group][run.FirstBlock+uint32(i)] = id
		}
	}
	f.store.mu.Unlock()
	job := f.jobs.Add(1)
	go func() {
		time.Sleep(200 * time.Microsecond) // an engine that frees a block too early loses
		f.copyOut(q, r.ComputedTokens)
		f.events <- &enginepb.Event{JobId: job, RequestId: r.RequestId, Ok: true}
	}()
	return &enginepb.JobReply{JobId: job}, nil
}

func (f *fakeNode) copyOut(q *fakeRequest, computed uint64) {
	f.store.mu.Lock()
	defer f.store.mu.Unlock()
	for group, blocks := range q.where {
		g := &f.deployment.Groups[f.deployment.Group(group)]
		for b, id := range blocks {
			if !q.stored[group][b] && (uint64(b)+1)*g.BlockTokens <= computed {
				f.store.blocks[q.key(f.deployment, group, b)] = append([]byte(nil), f.block(group, id)...)
				q.stored[group][b] = true
			}
		}
	}
	f.store.cond.Broadcast()
}

func (f *fakeNode) Load(_ context.Context, r *enginepb.LoadRequest) (*enginepb.JobReply, error) {
	f.mu.Lock()
	q := f.live[r.RequestId]
	f.loads++
	f.mu.Unlock()
	job := f.jobs.Add(1)
	go func() {
		ev := &enginepb.Event{JobId: job, RequestId: r.RequestId, Ok: true, ResumeTokens: q.plan.ResumeTokens}
		for _, run := range r.Blocks {
			for i, id := range run.Ids {
				b := run.FirstBlock + uint32(i)
				if cause := f.fetch(q, run.Group, b, f.block(run.Group, id)); cause != "" {
					ev.ResumeTokens = q.begin.LocalTokens
					ev.Failures = append(ev.Failures, &enginepb.Failure{Group: run.Group, Chunk: b, Cause: cause})
				}
			}
		}
		f.events <- ev
	}()
	return &enginepb.JobReply{JobId: job}, nil
}

func (f *fakeNode) fetch(q *fakeRequest, group string, b uint32, dst []byte) (cause string) {
	s := f.store
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if src, ok := s.blocks[q.key(f.deployment, group, b)]; ok {
			copy(dst, src)
			if f.deliver != nil {
				return f.deliver(group, b, dst)
			}
			return ""
		}
		if s.lost {
			return "peer"
		}
		if s.ended[q.begin.TransferId] {
			return "unmatched"
		}
		s.cond.Wait()
	}
}

func (f *fakeNode) Finish(_ context.Context, r *enginepb.FinishRequest) (*enginepb.FinishReply, error) {
	f.mu.Lock()
	q := f.live[r.RequestId]
	delete(f.live, r.RequestId)
	f.mu.Unlock()
	if q == nil {
		return nil, fmt.Errorf("no live request %s", r.RequestId)
	}
	f.store.mu.Lock()
	defer f.store.mu.Unlock()
	out := &enginepb.FinishReply{}
	for i := range f.deployment.Groups {
		g := &f.deployment.Groups[i]
		n := &enginepb.GroupCount{Group: g.Name}
		if q.begin.Role == enginepb.Role_PRODUCER {
			f.store.ended[q.begin.TransferId] = true
			f.store.cond.Broadcast()
			n.Supplied = q.begin.PromptTokens / g.ChunkTokens()
		} else if i < len(q.plan.Demand) && len(q.plan.Demand[i].Chunks) > 0 {
			c := q.plan.Demand[i].Chunks[0]
			n.Demanded = uint64(c.Last - c.First + 1)
			n.Transferred = n.Demanded - min(n.Demanded, f.held)
			n.Bytes = n.Transferred * g.ChunkBytes()
		}
		out.Groups = append(out.Groups, n)
	}
	return out, nil
}

// tinyTrace is conversations of a few turns that share a first prompt of 512 tokens.
func tinyTrace(requests int) (out []Request) {
	next := uint64(1)
	var last []uint64
	for i := range requests {
		ids := []uint64{0}
		if i%3 == 2 { // the next turn of the request before
			ids = append([]uint64(nil), last...)
		}
		for range 1 + i%3 {
			ids = append(ids, next)
			next++
		}
		last = ids
		out = append(out, Request{PromptTokens: uint64(len(ids)*tokensPerID - 37*i%256), IDs: ids})
	}
	return out
}

const tinyDeployment = `
model: tiny
max_tokens: 16384
align_tokens: 1024
groups:
  - {name: sliding, rule: window, params: {window: 128}, block_tokens: 16, chunk_blocks: 8, layers: 1, kv_heads: 1, head_dim: 32, dtype: bf16}
  - {name: full, rule: full, block_tokens: 16, chunk_blocks: 8, layers: 2, kv_heads: 1, head_dim: 32, dtype: bf16}
policies: [{rule: request-level}]
`
