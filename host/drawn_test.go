package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
)

var (
	firstSeed = flag.Uint64("seed", 1, "TestDrawnDeployments: the first seed")
	seedCount = flag.Uint64("seeds", 4, "TestDrawnDeployments: how many seeds")
)

// The kinds of run, by seed: what else happens beside the requests.
const (
	runClean  = iota // nothing: everything demanded in leg pd arrives
	runFaults        // connections are cut, frozen and spoiled; engines abort and crash
	runRoom          // slabs of a few chunks
	runBoth
	runKinds
)

const (
	drawnMaxTokens   = 400
	drawnWorkers     = 4
	drawnRequests    = 10  // of each worker
	drawnBlocks      = 600 // of each region
	drawnTokenBytes  = 16
	drawnRequestMS   = 4000 // of a run with faults
	drawnWait        = time.Minute
	drawnNeverBegins = 400 // ms
)

// TestDrawnDeployments plays random requests on a pair of nodes with a random deployment
// against an oracle that knows what every token's bytes must be. Blocks are spoiled as soon
// as the daemon may no longer read them, and before it writes them.
//
//	go test -race ./host -run DrawnDeployments -seed 100 -seeds 50
func TestDrawnDeployments(t *testing.T) {
	for seed := *firstSeed; seed < *firstSeed+*seedCount; seed++ {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			w := drawWorld(t, seed)
			t.Logf("to repeat: go test -race ./host -run DrawnDeployments -seed %d -seeds 1\nfaults %v, little room %v\n%s", seed, w.faults, w.tight, w.d.yaml)
			w.run()
		})
	}
}

// drawnGroup is a group of a drawn deployment.
type drawnGroup struct {
	name        string
	kind        string // the rule's name
	size        uint64 // window or attention_chunk, in tokens
	sink        uint64
	blockTokens uint64
	chunkBlocks uint64
}

type drawnDeployment struct {
	groups []drawnGroup
	hash   uint64 // tokens of a granule
	align  uint64
	yaml   string
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func drawDeployment(r *rand.Rand) *drawnDeployment {
	d := &drawnDeployment{}
	period := uint64(1)
	n := 2 + r.IntN(2)
	for i := range n {
		g := drawnGroup{name: fmt.Sprintf("g%d", i), blockTokens: pick[uint64](r, 2, 4, 8, 3, 6), chunkBlocks: 1 + r.Uint64N(5)}
		g.kind = pick(r, "window", "window", "window", "full", "sink", "chunked", "state all", "state align")
		if i == n-1 && r.IntN(3) > 0 {
			g.kind = "full"
		}
		if strings.HasPrefix(g.kind, "state") {
			g.chunkBlocks = 1
		}
		chunk := g.blockTokens * g.chunkBlocks
		g.size, g.sink = pick[uint64](r, 1, 2, 3, 5, 8, 16, 17, 20, 33, 64), 1+r.Uint64N(20)
		if g.kind == "chunked" {
			g.size = chunk * (1 + r.Uint64N(4))
		}
		period, d.hash = period/gcd(period, chunk)*chunk, gcd(g.blockTokens, d.hash)
		d.groups = append(d.groups, g)
	}
	align := pick(r, 0, period, period*(1+r.Uint64N(3)))
	var y strings.Builder
	fmt.Fprintf(&y, "model: drawn\nmax_tokens: %d\nalign_tokens: %d\ngroups:\n", drawnMaxTokens, align)
	for _, g := range d.groups {
		rule := map[string]string{
			"full":        "full",
			"window":      fmt.Sprintf("window, params: {window: %d}", g.size),
			"sink":        fmt.Sprintf("sink, params: {sink: %d, window: %d}", g.sink, g.size),
			"chunked":     fmt.Sprintf("chunked, params: {attention_chunk: %d}", g.size),
			"state all":   "state, params: {mode: all}",
			"state align": "state, params: {mode: align}",
		}[g.kind]
		fmt.Fprintf(&y, "  - {name: %s, rule: %s, block_tokens: %d, chunk_blocks: %d, layers: 1, kv_heads: 1, head_dim: 4, dtype: bf16}\n", g.name, rule, g.blockTokens, g.chunkBlocks)
	}
	y.WriteString("policies: [{rule: request-level}]\nlegs: [pd, demand, probe]\n")
	d.align = align
	d.yaml = y.String()
	return d
}

func (d *drawnDeployment) group(name string) *drawnGroup {
	return &d.groups[slices.IndexFunc(d.groups, func(g drawnGroup) bool { return g.name == name })]
}

// reads reports whether attention reads token k to go on from n.
func (g *drawnGroup) reads(n, k uint64) bool {
	switch g.kind {
	case "window":
		return n-k < g.size
	case "sink":
		return k < g.sink || n-k < g.size
	case "chunked":
		return n/g.size == k/g.size
	case "state all", "state align":
		return k == n-1
	}
	return true
}

// states reports whether a group keeps recurrent states.
func (d *drawnDeployment) states() bool {
	return slices.ContainsFunc(d.groups, func(g drawnGroup) bool { return strings.HasPrefix(g.kind, "state") })
}

// readsBlock reports whether attention reads any token of block b below n to go on from n.
func (g *drawnGroup) readsBlock(n, b uint64) bool {
	for k := b * g.blockTokens; k < min(n, (b+1)*g.blockTokens); k++ {
		if g.reads(n, k) {
			return true
		}
	}
	return false
}

// hashes returns the chained hash of each whole granule.
func (d *drawnDeployment) hashes(tokens []uint32) [][]byte {
	out := make([][]byte, uint64(len(tokens))/d.hash)
	var prev [32]byte
	for i := range out {
		b := slices.Clone(prev[:])
		for _, t := range tokens[uint64(i)*d.hash : uint64(i+1)*d.hash] {
			b = binary.BigEndian.AppendUint32(b, t)
		}
		prev = sha256.Sum256(b)
		out[i] = slices.Clone(prev[:])
	}
	return out
}

// tokenBytes is the oracle: what a token's bytes in a group must be.
func tokenBytes(group string, hash []byte, at uint64) []byte {
	s := sha256.Sum256(binary.BigEndian.AppendUint64(append([]byte(group), hash...), at))
	return s[:drawnTokenBytes]
}

// drawnWorld is a pair of nodes and what is played on them.
type drawnWorld struct {
	t                  *testing.T
	seed               uint64
	rnd                *rand.Rand
	d                  *drawnDeployment
	producer, consumer *Node
	control, data      *proxy
	faults, tight      bool
	texts              [][]uint32
	number             atomic.Uint64 // of the last request

	hits, partial, misses, aborted, crashed, checked, native, decoded, local, parted atomic.Uint64
}

func drawWorld(t *testing.T, seed uint64) *drawnWorld {
	r := rand.New(rand.NewPCG(seed, 77))
	kind := (seed - 1) % runKinds
	w := &drawnWorld{t: t, seed: seed, rnd: r, d: drawDeployment(r), faults: kind == runFaults || kind == runBoth, tight: kind == runRoom || kind == runBoth}
	slots, share := int64(20+r.IntN(200)), int64(1+r.IntN(3))
	peerShare := 1 + int64(seed%4) // a peer's budget; from the seed, so that the rest stays as it was
	options := func(c *config.Config) {
		c.Deployment = filepath.Join(filepath.Dir(c.EngineSocket), "drawn.yaml")
		require.NoError(t, os.WriteFile(c.Deployment, []byte(w.d.yaml), 0o600))
		if c.SlabBytes = 64 << 20; w.tight {
			c.SlabBytes, c.Bounds.ParkedBytes, c.Bounds.PeerPinnedBytes = 4096*slots, 4096*slots/share, 4096*slots/peerShare
		}
		if w.faults {
			c.Deadlines.RequestMS = drawnRequestMS
		}
	}
	for range 4 {
		x := make([]uint32, drawnMaxTokens)
		for i := range x {
			x[i] = r.Uint32()
		}
		w.texts = append(w.texts, x)
	}
	w.control, w.data = startProxy(t), startProxy(t)
	w.data.frames = true
	w.producer = startNode(t, "producer", options, func(c *config.Config) { c.Advertise = w.data.addr() })
	w.control.target.Store(w.producer.Addresses().Peer)
	w.data.target.Store(w.producer.Addresses().Data)
	w.consumer = startNode(t, "consumer", options, withPeer("producer", w.control.addr()))
	ready(t, w.consumer, "producer")
	return w
}

func (w *drawnWorld) run() {
	var wg sync.WaitGroup
	errs := make([]error, drawnWorkers)
	for i := range errs {
		wg.Go(func() { errs[i] = w.work(uint64(i)) })
	}
	over := make(chan struct{})
	go func() {
		wg.Wait()
		close(over)
	}()
	for w.fault(over) {
	}
	for _, err := range errs {
		if err != nil {
			w.t.Error(err)
		}
	}
	clean(w.t, w.producer, w.consumer)
	w.t.Logf("%d requests: %d hits, %d partial, %d misses, %d aborted, %d crashed; %d with a native prefix, %d with a local one, %d decoded, %d of two prompts; %d tokens compared",
		w.number.Load(), w.hits.Load(), w.partial.Load(), w.misses.Load(), w.aborted.Load(), w.crashed.Load(), w.native.Load(), w.local.Load(), w.decoded.Load(), w.parted.Load(), w.checked.Load())
}

// fault waits a little and then does one harm; it reports false once the work is over.
func (w *drawnWorld) fault(over <-chan struct{}) bool {
	if !w.faults {
		<-over
		return false
	}
	select {
	case <-over:
		return false
	case <-time.After(time.Duration(50+w.rnd.IntN(200)) * time.Millisecond):
	}
	switch w.rnd.IntN(4) {
	case 0:
		w.data.flip.Store(true)
	case 1:
		w.control.cut()
		w.control.mend()
	case 2:
		w.data.cut()
		w.data.mend()
	case 3:
		w.data.frozen.Store(true)
		time.Sleep(time.Duration(w.rnd.IntN(100)) * time.Millisecond)
		w.data.frozen.Store(false)
	}
	return true
}

// text is a prefix of a shared text and a tail of its own.
func (w *drawnWorld) text(r *rand.Rand) []uint32 {
	n := 1 + r.IntN(drawnMaxTokens)
	if r.IntN(3) == 0 { // at the end of a chunk, and around it
		g := w.d.groups[r.IntN(len(w.d.groups))]
		n = int(g.blockTokens*g.chunkBlocks)*(1+r.IntN(8)) + r.IntN(3) - 1
	}
	n = max(1, min(n, drawnMaxTokens))
	keep := n
	if r.IntN(2) == 0 {
		keep = r.IntN(n + 1)
	}
	x := slices.Clone(pick(r, w.texts...)[:keep])
	return lengthen(r, x, n)
}

func lengthen(r *rand.Rand, x []uint32, n int) []uint32 {
	for len(x) < n {
		x = append(x, r.Uint32())
	}
	return x
}

// drawnEngine is an engine whose blocks are taken at random, and hold garbage whenever
// they are not somebody's KV.
type drawnEngine struct {
	d    *drawnDeployment
	c    *engine.Client
	free map[string][]uint32
	r    *rand.Rand
}

func (d *drawnDeployment) attach(n *Node, r *rand.Rand) (*drawnEngine, error) {
	ctx, cancel := context.WithTimeout(context.Background(), drawnWait)
	defer cancel()
	c, err := engine.Dial(ctx, n.Addresses().EngineSocket)
	if err != nil {
		return nil, err
	}
	e := &drawnEngine{d: d, c: c, free: map[string][]uint32{}, r: r}
	var regions []*enginepb.Region
	for _, g := range d.groups {
		regions = append(regions, &enginepb.Region{Group: g.name, Blocks: drawnBlocks})
		for i := range drawnBlocks {
			e.free[g.name] = append(e.free[g.name], uint32(i))
		}
	}
	if _, err := c.Attach(ctx, "drawn", nil, regions); err != nil {
		c.Close()
		return nil, err
	}
	return e, nil
}

func (e *drawnEngine) take(group string) uint32 {
	f := e.free[group]
	i := e.r.IntN(len(f)) // a panic here means that drawnBlocks is too small
	id := f[i]
	f[i] = f[len(f)-1]
	e.free[group] = f[:len(f)-1]
	e.spoil(group, id)
	return id
}

func (e *drawnEngine) spoil(group string, id uint32) {
	b := e.c.Region(group).Block(id)
	for i := range b {
		b[i] = byte(e.r.Uint32())
	}
}

func (e *drawnEngine) give(group string, id uint32) {
	e.spoil(group, id)
	e.free[group] = append(e.free[group], id)
}

// at is the memory of a token.
func (e *drawnEngine) at(g *drawnGroup, id uint32, token uint64) []byte {
	o := token % g.blockTokens * drawnTokenBytes
	return e.c.Region(g.name).Block(id)[o : o+drawnTokenBytes]
}

// drawnProducer is a producer's request in work.
type drawnProducer struct {
	e      *drawnEngine
	id     string
	prompt uint64
	hashes [][]byte // of the text, decoded tokens included
	tables map[string]map[uint64]uint32
	stops  []uint64 // where a step must end
	done   uint64
}

// fill computes the tokens [from, to) of a group. The tokens of a granule that never gets
// whole have no hash, and stay garbage.
func (p *drawnProducer) fill(g *drawnGroup, from, to uint64) {
	for at := from; at < to; at++ {
		id, ok := p.tables[g.name][at/g.blockTokens]
		if granule := at / p.e.d.hash; ok && granule < uint64(len(p.hashes)) {
			copy(p.e.at(g, id, at), tokenBytes(g.name, p.hashes[granule], at))
		}
	}
}

// step computes up to n tokens and returns what to tell the daemon. The first one begins
// with a native prefix, of which only the blocks that attention still reads are there.
func (p *drawnProducer) step(n, native uint64, first bool) *enginepb.StoreRequest {
	m := &enginepb.StoreRequest{RequestId: p.id, ComputedTokens: n}
	name := func(g *drawnGroup, b uint64) {
		if _, ok := p.tables[g.name][b]; !ok {
			id := p.e.take(g.name)
			p.tables[g.name][b] = id
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.name, FirstBlock: uint32(b), Ids: []uint32{id}})
		}
	}
	if first {
		m.NativeTokens = native
	}
	for i := range p.e.d.groups {
		g := &p.e.d.groups[i]
		if first && native > 0 {
			for b := uint64(0); b*g.blockTokens < native; b++ {
				if g.readsBlock(native, b) {
					name(g, b)
				}
			}
			p.fill(g, 0, native)
		}
		for b := p.done / g.blockTokens; b*g.blockTokens < n; b++ {
			name(g, b)
		}
		p.fill(g, p.done, n)
		for b := p.done / g.blockTokens; g.kind == "state align" && (b+1)*g.blockTokens < n; b++ {
			p.e.spoil(g.name, p.tables[g.name][b]) // a state is saved where a step ends
		}
	}
	for i := max(p.prompt, p.done) / p.e.d.hash; i < max(p.prompt, n)/p.e.d.hash; i++ {
		m.MoreHashes = append(m.MoreHashes, p.hashes[i]...)
	}
	p.done = n
	return m
}

// retire gives back the blocks that nothing reads any more at done tokens.
func (p *drawnProducer) retire(done uint64) {
	for i := range p.e.d.groups {
		g := &p.e.d.groups[i]
		for b, id := range p.tables[g.name] {
			if (b+1)*g.blockTokens <= done && !g.readsBlock(done, b) {
				delete(p.tables[g.name], b)
				p.e.give(g.name, id)
			}
		}
	}
}

func (p *drawnProducer) close() {
	for g, t := range p.tables {
		for _, id := range t {
			p.e.give(g, id)
		}
	}
}

var errCrash = errors.New("the engine crashed, as the test wants")

// begin opens a request over the first tokens of a text.
func (e *drawnEngine) begin(ctx context.Context, id, transfer string, leg enginepb.Leg, prompt uint64, hashes [][]byte, edit beginOption) (*enginepb.BeginReply, error) {
	m := &enginepb.BeginRequest{
		RequestId: id, TenantSalt: []byte("s"), PromptTokens: prompt, HashBytes: sha256.Size,
		Hashes: slices.Concat(hashes[:prompt/e.d.hash]...), Leg: leg, TransferId: transfer,
	}
	edit(m)
	return e.c.Begin(ctx, m)
}

func (w *drawnWorld) produce(e *drawnEngine, id, transfer string, leg enginepb.Leg, text []uint32, prompt, storeCap uint64) (err error) {
	r := e.r
	p := &drawnProducer{e: e, id: id, prompt: prompt, hashes: w.d.hashes(text), tables: map[string]map[uint64]uint32{}}
	for _, g := range w.d.groups {
		p.tables[g.name] = map[uint64]uint32{}
	}
	ctx, cancel := context.WithTimeout(context.Background(), drawnWait)
	defer cancel()
	reply, err := e.begin(ctx, id, transfer, leg, prompt, p.hashes, func(m *enginepb.BeginRequest) {
		m.MaxStoreTokens = storeCap
		if m.Role = enginepb.Role_PRODUCER; r.IntN(4) == 0 {
			m.JunctionTokens = r.Uint64N(prompt + 1)
		}
	})
	if err != nil {
		return fmt.Errorf("producer's begin: %w", err)
	}
	if above := reply.ReuseTokens + 1; r.IntN(5) == 0 && above < prompt {
		_, err := e.c.Store(ctx, &enginepb.StoreRequest{RequestId: id, ComputedTokens: above, NativeTokens: above})
		if status.Code(err) != codes.InvalidArgument {
			return fmt.Errorf("native prefix of %d, above reuse_tokens, was taken: %w", above, err)
		}
	}
	native := pick(r, 0, 0, reply.ReuseTokens, r.Uint64N(reply.ReuseTokens+1))
	if w.d.states() { // a GPU has no prefix that cannot be gone on from
		native = pick(r, 0, reply.ReuseTokens)
	}
	p.stops = reply.StopTokens
	if native > 0 {
		w.native.Add(1)
	}
	aborted, err := w.steps(ctx, p, uint64(len(text)), native)
	if err != nil {
		return err
	}
	defer p.close()
	if _, err := e.c.Finish(ctx, &enginepb.FinishRequest{RequestId: id, Abort: aborted && r.IntN(4) > 0}); err != nil {
		return fmt.Errorf("producer's finish: %w", err)
	}
	return nil
}

// steps computes the text in steps of any size, with up to one store in work beside the
// next step. With faults it may stop early, or crash.
func (w *drawnWorld) steps(ctx context.Context, p *drawnProducer, total, native uint64) (aborted bool, err error) {
	r := p.e.r
	stop, crash := uint64(1<<40), w.faults && r.IntN(12) == 0
	if w.faults && r.IntN(5) == 0 {
		stop = r.Uint64N(total + 1)
	}
	type store struct{ job, done uint64 }
	var open []store
	settle := func(most int) error {
		for ; len(open) > most; open = open[1:] {
			ev, err := p.e.c.Wait(ctx, open[0].job)
			if err != nil {
				return fmt.Errorf("wait for a store: %w", err)
			}
			if !ev.Ok && !w.tight {
				return fmt.Errorf("store: %s", ev.Error)
			}
			p.retire(open[0].done)
		}
		return nil
	}
	p.done = native
	stepMax := 1 + r.Uint64N(100)
	for n, first := native, true; n < total || first; first = false {
		if n < p.prompt {
			from := n
			n = min(n+1+r.Uint64N(stepMax), p.prompt)
			for _, s := range p.stops {
				if from < s {
					n = min(n, s)
					break
				}
			}
		} else {
			n = min(n+1+r.Uint64N(4), total)
			if w.d.states() {
				n = min(p.done+1, total)
			}
		}
		if n > stop {
			break
		}
		job, err := p.e.c.Store(ctx, p.step(n, native, first))
		if err != nil {
			return false, fmt.Errorf("store: %w", err)
		}
		open = append(open, store{job, n})
		if crash && n > total/2 {
			w.crashed.Add(1)
			return false, errors.Join(errCrash, p.e.c.Close())
		}
		if err := settle(r.IntN(2)); err != nil {
			return false, err
		}
	}
	if aborted = stop < total; aborted {
		w.aborted.Add(1)
	}
	if !aborted || r.IntN(2) == 0 {
		err = settle(0)
	}
	return aborted, err
}

// drawnConsumer is a consumer's request in work.
type drawnConsumer struct {
	w      *drawnWorld
	e      *drawnEngine
	asked  *enginepb.BeginRequest
	reply  *enginepb.BeginReply
	hashes [][]byte
	blocks map[string]map[uint64]uint32
	shares uint64 // prefix of the prompt that the producer of the same transfer stores
}

// consume runs one request: begun is called once it is known to the daemon.
func (w *drawnWorld) consume(e *drawnEngine, id, transfer string, leg enginepb.Leg, text []uint32, shares uint64, begun func(), edit beginOption) error {
	r, prompt := e.r, uint64(len(text))
	c := &drawnConsumer{w: w, e: e, shares: shares, hashes: w.d.hashes(text), blocks: map[string]map[uint64]uint32{}}
	ctx, cancel := context.WithTimeout(context.Background(), drawnWait)
	defer cancel()
	var err error
	c.reply, err = e.begin(ctx, id, transfer, leg, prompt, c.hashes, func(m *enginepb.BeginRequest) {
		m.Role, m.PeerId = enginepb.Role_CONSUMER, "producer"
		switch r.IntN(6) {
		case 0:
			m.LocalTokens = r.Uint64N(prompt + 1)
			w.local.Add(1)
		case 1:
			m.MaxLoadTokens = 1 + r.Uint64N(prompt)
		}
		if w.faults && r.IntN(8) == 0 {
			m.DeadlineMs = 1 + r.Uint64N(300)
		}
		edit(m)
		c.asked = m
	})
	begun()
	if err != nil {
		return fmt.Errorf("consumer's begin: %w", err)
	}
	defer c.close()
	load := c.place()
	finish := func(abort bool) error {
		_, err := e.c.Finish(ctx, &enginepb.FinishRequest{RequestId: id, Abort: abort})
		return err
	}
	if w.faults && r.IntN(10) == 0 { // it never loads
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
		w.aborted.Add(1)
		return finish(r.IntN(2) == 0)
	}
	job, err := e.c.Load(ctx, load)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	if w.faults && r.IntN(10) == 0 { // it aborts while bytes arrive; the slots are used again at once
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
		w.aborted.Add(1)
		return finish(true)
	}
	ev, err := e.c.Wait(ctx, job)
	if err != nil {
		return fmt.Errorf("wait for a load: %w", err)
	}
	return errors.Join(c.judge(ev), finish(false))
}

// place gives every chunk that may come its blocks.
func (c *drawnConsumer) place() *enginepb.LoadRequest {
	m := &enginepb.LoadRequest{RequestId: c.asked.RequestId}
	for _, gc := range slices.Concat(c.reply.Demand, c.reply.Fallback) {
		g := c.w.d.group(gc.Group)
		if c.blocks[g.name] == nil {
			c.blocks[g.name] = map[uint64]uint32{}
		}
		g.each(gc.Chunks, func(b uint64) {
			id := c.e.take(g.name)
			c.blocks[g.name][b] = id
			m.Blocks = append(m.Blocks, &enginepb.BlockRun{Group: g.name, FirstBlock: uint32(b), Ids: []uint32{id}})
		})
	}
	return m
}

func (g *drawnGroup) each(chunks []*enginepb.ChunkRange, f func(block uint64)) {
	for _, r := range chunks {
		for b := uint64(r.First) * g.chunkBlocks; b < (uint64(r.Last)+1)*g.chunkBlocks; b++ {
			f(b)
		}
	}
}

func (c *drawnConsumer) close() {
	for g, t := range c.blocks {
		for _, id := range t {
			c.e.give(g, id)
		}
	}
}

// judge holds an event against what was planned and against the oracle.
func (c *drawnConsumer) judge(ev *enginepb.Event) error {
	w, local, planned, got := c.w, c.asked.LocalTokens, c.reply.ResumeTokens, ev.ResumeTokens
	about := fmt.Sprintf("prompt %d, local %d, load cap %d, planned %d, got %d, note %q, error %q",
		c.asked.PromptTokens, local, c.asked.MaxLoadTokens, planned, got, c.reply.Note, ev.Error)
	switch {
	case planned >= c.asked.PromptTokens && local < c.asked.PromptTokens, got > planned, got < local, ev.Ok != (got == planned):
		return errors.New("resume point: " + about)
	case !ev.Ok && !w.faults && !w.tight && c.asked.Leg != enginepb.Leg_PROBE && c.shares >= c.asked.PromptTokens:
		return errors.New("unmatched although nothing was at fault: " + about)
	case c.asked.Leg == enginepb.Leg_DEMAND && !w.faults && !w.tight && got < min(planned, c.foreseen()):
		return fmt.Errorf("below %d, although of the prompt %d tokens are shared: %s", c.foreseen(), c.shares, about)
	}
	for _, f := range ev.Failures {
		if f.Cause == "" || f.Group == "" || f.Detail == "" {
			return fmt.Errorf("a failure without a name: %v: %s", f, about)
		}
	}
	switch {
	case got == local:
		w.misses.Add(1)
		return nil
	case ev.Ok:
		w.hits.Add(1)
	default:
		w.partial.Add(1)
	}
	if err := c.compare(ev); err != nil {
		return fmt.Errorf("%w: %s", err, about)
	}
	return nil
}

// foreseen is how far leg demand must get when nothing is at fault: about as far below the
// last shared aligned point as the first plan was above it.
func (c *drawnConsumer) foreseen() uint64 {
	if c.w.d.align == 0 || c.asked.MaxLoadTokens > 0 {
		return 0
	}
	a := min(c.shares, c.asked.PromptTokens-1) / c.w.d.align * c.w.d.align
	return a - min(a, c.reply.ResumeTokens-min(a, c.reply.ResumeTokens)+c.w.d.align)
}

// compare reads what attention reads at the event's resume point.
func (c *drawnConsumer) compare(ev *enginepb.Event) error {
	for i := range c.w.d.groups {
		g := &c.w.d.groups[i]
		loaded := map[uint64]bool{}
		for _, gc := range ev.Loaded {
			if gc.Group == g.name {
				g.each(gc.Chunks, func(b uint64) { loaded[b] = true })
			}
		}
		for at := range ev.ResumeTokens {
			if !g.reads(ev.ResumeTokens, at) {
				continue
			}
			b := at / g.blockTokens
			switch {
			case !loaded[b] && at < c.asked.LocalTokens: // on the GPU already
				continue
			case !loaded[b]:
				return fmt.Errorf("group %s: token %d is read and was not loaded", g.name, at)
			case !bytes.Equal(c.e.at(g, c.blocks[g.name][b], at), tokenBytes(g.name, c.hashes[at/c.w.d.hash], at)):
				return fmt.Errorf("group %s: token %d has wrong bytes", g.name, at)
			}
			c.w.checked.Add(1)
		}
	}
	return nil
}

// work plays requests one after another.
func (w *drawnWorld) work(worker uint64) error {
	rnd := func(k uint64) *rand.Rand { return rand.New(rand.NewPCG(w.seed, 3*worker+k)) }
	r := rnd(0)
	p, err := w.d.attach(w.producer, rnd(1))
	if err != nil {
		return err
	}
	c, err := w.d.attach(w.consumer, rnd(2))
	if err != nil {
		return errors.Join(err, p.c.Close())
	}
	defer func() { p.c.Close(); c.c.Close() }()
	for range drawnRequests {
		id := fmt.Sprint(w.number.Add(1))
		err := w.request(r, p, c, id)
		if errors.Is(err, errCrash) {
			if p, err = w.d.attach(w.producer, p.r); err != nil {
				return err
			}
		}
		if err != nil {
			return fmt.Errorf("request %s of worker %d: %w", id, worker, err)
		}
	}
	return nil
}

// request is one prompt on both sides, whoever begins first, and maybe the turn after it.
func (w *drawnWorld) request(r *rand.Rand, p, c *drawnEngine, id string) error {
	prompt := w.text(r)
	text := prompt
	if r.IntN(3) == 0 {
		text = lengthen(r, slices.Clone(prompt), len(prompt)+1+r.IntN(40))
		w.decoded.Add(1)
	}
	leg, order := pick(r, enginepb.Leg_PD, enginepb.Leg_DEMAND), pick(r, "producer first", "consumer first", "together")
	if r.IntN(3) == 0 {
		leg, order = enginepb.Leg_PROBE, pick(r, "producer first", "producer first", "together")
	}
	asked, shares, storeCap := prompt, uint64(len(prompt)), uint64(0)
	if leg == enginepb.Leg_DEMAND { // the two prompts may part, and the producer may have a cap
		if r.IntN(2) == 0 {
			shares = r.Uint64N(shares + 1)
			asked = lengthen(r, slices.Clone(prompt[:shares]), max(1, int(shares)+r.IntN(drawnMaxTokens-int(shares)+1)))
		}
		if r.IntN(4) == 0 {
			storeCap = 1 + r.Uint64N(uint64(len(prompt)))
			shares = min(shares, storeCap)
		}
		if shares < uint64(len(asked)) {
			w.parted.Add(1)
		}
	}
	nobody := w.faults && r.IntN(15) == 0 // the producer never begins
	edit := func(m *enginepb.BeginRequest) {
		if nobody {
			m.DeadlineMs = drawnNeverBegins
		}
	}
	produce := func() error {
		if nobody {
			return nil
		}
		return w.produce(p, "p"+id, "t"+id, leg, text, uint64(len(prompt)), storeCap)
	}
	begun := make(chan struct{})
	consume := func() error {
		return w.consume(c, "c"+id, "t"+id, leg, asked, shares, func() { close(begun) }, edit)
	}
	var produced, consumed error
	if order == "producer first" {
		if produced = produce(); produced == nil || errors.Is(produced, errCrash) {
			consumed = consume()
		}
	} else {
		var wg sync.WaitGroup
		wg.Go(func() { consumed = consume() })
		if order == "consumer first" {
			<-begun
		}
		produced = produce()
		wg.Wait()
	}
	switch {
	case consumed != nil:
		return fmt.Errorf("%v, %s, text %d, producer's error %v: %w", leg, order, len(text), produced, consumed)
	case produced != nil:
		return produced // errCrash, maybe
	}
	if len(text) > len(prompt) && leg == enginepb.Leg_PROBE && r.IntN(2) == 0 {
		n := min(len(text), drawnMaxTokens-2)
		if err := w.consume(c, "n"+id, "", leg, lengthen(r, slices.Clone(text[:n]), n+2), 0, func() {}, func(*enginepb.BeginRequest) {}); err != nil {
			return fmt.Errorf("next turn: %w", err)
		}
	}
	return nil
}
