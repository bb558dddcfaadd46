package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// A producer is a request whose engine computes KV that others will fetch. Store and
// Finish are called one at a time, and so are the jobs; the fields say which of the
// two owns them.
type producer struct {
	node   *Node
	engine *attachment
	name   string // of the request, for logs
	leg    string
	// transfer is the name that the consumer gives too; empty in leg probe, where the
	// supply is simply in the tier.
	transfer string
	foreseen join.Promise // leg demand
	owner    tier.Owner
	ctx      context.Context
	cancel   context.CancelCauseFunc

	// Of Store, and of Finish, which comes after the last Store.
	planner *plan.Planner
	pooled  bool
	machine *plan.Machine
	seq     sequence
	prompt  uint64              // tokens
	tables  []map[uint32]uint32 // per group: logical block -> block of the region

	// Of Store and the jobs: how many of them are accepted and have not ended, and why the
	// machine is of no use any more, when a rule has failed.
	mu     sync.Mutex
	inWork int
	broken error

	// Of the jobs, and of Finish, which runs after the last job.
	chunks   map[plan.Ref]*kept
	wanted   []plan.Ref // chunks of the prompt that may be demanded
	offered  map[plan.Ref]struct{}
	supplied []uint64 // chunks, per group
	stored   []uint64 // bytes, per group
	offers   []offer  // of the job at work
	// own is the supply of leg probe while the prompt is computed: a request must not take its
	// own head's slots for its tail as long as there are others.
	own []offer
}

// kept is a chunk that the producer keeps or is copying.
type kept struct {
	key   tier.Key
	slot  tier.Slot
	named bool
	whole bool // all bytes are in the slot, sum is theirs
	sum   uint32
	hold  hold // set once it is readable or private
	// fail is set once the chunk is given up; reason is what a demand for it hears.
	fail   *failure
	reason sessionpb.Reason
}

type offer struct {
	key  tier.Key
	hold hold
}

var requestNumber atomic.Uint64

func (a *attachment) beginProducer(ctx context.Context, r *enginepb.BeginRequest) (engine.Request, *enginepb.BeginReply, error) {
	n := a.node
	p := &producer{
		node: n, engine: a, name: r.RequestId, leg: legName(r.Leg),
		owner: tier.Owner{Kind: ownerProduce, ID: fmt.Sprintf("%s#%d", r.RequestId, requestNumber.Add(1))},
		seq:   n.sequence(r), prompt: r.PromptTokens,
		tables: make([]map[uint32]uint32, len(n.groups)),
		chunks: map[plan.Ref]*kept{}, offered: map[plan.Ref]struct{}{},
		supplied: make([]uint64, len(n.groups)), stored: make([]uint64, len(n.groups)),
	}
	if p.leg != legProbe {
		p.transfer = r.TransferId
	}
	reuse, err := p.plan(r)
	if err != nil {
		p.release()
		return nil, nil, status.Errorf(codes.Internal, "plan of producer request %q: %v; compute without the tier", r.RequestId, err)
	}
	if p.transfer != "" {
		if err := n.meeting.begin(p, p.foreseen); err != nil {
			p.release()
			return nil, nil, refusedTransfer(err)
		}
	}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	return p, &enginepb.BeginReply{ReuseTokens: reuse, StopTokens: p.machine.StopTokens()}, nil
}

func refusedTransfer(err error) error {
	switch {
	case errors.Is(err, join.ErrFull):
		return status.Error(codes.ResourceExhausted, err.Error())
	case errors.Is(err, join.ErrEnded):
		return status.Errorf(codes.AlreadyExists, "%v; a transfer_id is used once: choose a new one", err)
	}
	return status.Errorf(codes.AlreadyExists, "%v; choose another transfer_id, or finish the request that has it", err)
}

// plan pins what the tier holds of the chunks that will be wanted, makes the machine,
// and returns the longest native prefix that may be reused.
func (p *producer) plan(r *enginepb.BeginRequest) (reuse uint64, err error) {
	n := p.node
	if p.planner, p.pooled = n.planner(), true; r.MaxStoreTokens > 0 {
		m := n.model
		if m.MaxStoreTokens == 0 || r.MaxStoreTokens < m.MaxStoreTokens {
			m.MaxStoreTokens = r.MaxStoreTokens
		}
		n.planners.Put(p.planner)
		p.pooled = false
		if p.planner, err = plan.New(m); err != nil {
			return 0, err
		}
	}
	start := plan.Start{PromptTokens: r.PromptTokens, JunctionTokens: r.JunctionTokens}
	wanted, err := p.planner.Wanted(start)
	if err != nil {
		return 0, err
	}
	p.wanted = refs(wanted)
	start.Held, start.ResidentTokens = p.pinHeld(wanted, r.PromptTokens)
	if p.machine, err = p.planner.Produce(start); err != nil {
		return 0, err
	}
	if p.leg == legDemand {
		f, err := p.promise(r.PromptTokens)
		if err != nil {
			return 0, err
		}
		p.foreseen = f.fate
	}
	return p.machine.ReuseTokens()
}

// pinHeld pins the wanted chunks that are readable. The resident prefix is the one up
// to the first wanted chunk that is not.
func (p *producer) pinHeld(wanted []abi.Bitmap, prompt uint64) (held []abi.Bitmap, resident uint64) {
	keys := make([]tier.Key, len(p.wanted))
	for i, ref := range p.wanted {
		keys[i] = p.key(ref)
	}
	pins, found := p.node.tier.Pin(p.owner, keys)
	held = make([]abi.Bitmap, len(wanted))
	for g := range held {
		held[g] = make(abi.Bitmap, len(wanted[g]))
	}
	resident = prompt
	for i, ref := range p.wanted {
		if found[i] != tier.Readable {
			resident = min(resident, uint64(ref.Chunk)*p.node.groups[ref.Group].chunkTokens)
			continue
		}
		held[ref.Group].Set(int(ref.Chunk))
		p.chunks[ref] = &kept{key: keys[i], hold: pinned(pins[i])}
	}
	return held, resident
}

func (p *producer) key(ref plan.Ref) tier.Key {
	return p.seq.key(ref.Group, p.node.groups[ref.Group].chunkTokens, ref.Chunk)
}

// work is what a job does for one call of the machine, with everything looked up that
// Store owns.
type work struct {
	copies []copyWork
	offers []plan.Ref
	drops  []plan.Ref
	// unready says why the engine's blocks cannot be read: then no copy is made.
	unready error
}

type copyWork struct {
	plan.Copy
	key tier.Key // of a chunk that is promised or whole
	// ids are the region's blocks; a block that the engine never named is missing.
	ids     []uint32
	missing int64 // logical block, or -1
}

// Store implements engine.Request.
func (p *producer) Store(s engine.Step) (engine.Job, error) {
	todo, err := p.take(s)
	if err != nil {
		return nil, err
	}
	prompt := s.Computed >= p.prompt
	p.mu.Lock()
	p.inWork++
	p.mu.Unlock()
	return func() *enginepb.Event {
		defer p.jobEnded()
		if err := p.engine.wait(p.ctx, s.Event, time.Now().Add(p.node.waits.request)); err != nil {
			for i := range todo {
				todo[i].unready = err
			}
		}
		return p.run(todo, prompt)
	}, nil
}

// take brings a step to the machine and resolves what it asks for.
func (p *producer) take(s engine.Step) ([]work, error) {
	if p.broken != nil {
		return nil, status.Errorf(codes.Internal, "request %q: %v; finish it with abort", p.name, p.broken)
	}
	p.seq.more(s.MoreHashes)
	for _, run := range s.Blocks {
		g := p.node.group(run.Group)
		if p.tables[g] == nil {
			p.tables[g] = map[uint32]uint32{}
		}
		for i, id := range run.Ids {
			p.tables[g][run.FirstBlock+uint32(i)] = id
		}
	}
	var todo []work
	if s.First {
		fx, err := p.machine.Native(s.Native)
		if err != nil {
			return nil, p.breakDown(err)
		}
		todo = append(todo, p.resolve(&fx))
	}
	fx, err := p.machine.Step(s.Computed)
	if err != nil {
		return nil, p.breakDown(err)
	}
	return append(todo, p.resolve(&fx)), nil
}

// breakDown notes that the machine's state cannot be trusted after a rule's error.
func (p *producer) breakDown(err error) error {
	p.mu.Lock()
	p.broken = err
	last := p.inWork == 0
	p.mu.Unlock()
	p.node.faults.Log(slog.LevelError, "plan", err.Error(), "a rule failed in a producer's step; the request supplies nothing more", "request", p.name, "error", err)
	if last {
		p.sayBroken(err)
	}
	return status.Errorf(codes.Internal, "request %q: %v; finish it with abort", p.name, err)
}

// jobEnded notes the end of a job; the last one after a rule has failed says so.
func (p *producer) jobEnded() {
	p.mu.Lock()
	p.inWork--
	last, err := p.inWork == 0, p.broken
	p.mu.Unlock()
	if last && err != nil {
		p.sayBroken(err)
	}
}

// sayBroken is the last word of a request whose rule has failed. No job is in work, and none
// comes: the engine may take its time to finish, and consumers need not wait for that.
func (p *producer) sayBroken(err error) {
	if p.transfer == "" {
		return
	}
	p.refuseRest(sessionpb.Reason_REASON_STORE_FAILED, "a rule of the producer failed: "+err.Error())
	p.node.meeting.lastWord(p.transfer)
}

func (p *producer) resolve(fx *plan.Effects) work {
	w := work{offers: fx.Offers, drops: fx.Drops}
	for _, c := range fx.Copies {
		cw := copyWork{Copy: c, ids: make([]uint32, 0, c.Blocks), missing: -1}
		if c.Promised || c.Last { // the text may not have reached the end of another
			cw.key = p.key(c.Ref)
		}
		for b := c.Block; b < c.Block+c.Blocks; b++ {
			id, ok := p.tables[c.Group][b]
			if !ok {
				cw.missing = int64(b)
				break
			}
			cw.ids = append(cw.ids, id)
		}
		w.copies = append(w.copies, cw)
	}
	return w
}

// run is a job: copies, then offers and drops. What a copy completes is offered at once, so
// that its transfer goes on beside the next copies. prompt says that the whole prompt is
// computed.
func (p *producer) run(todo []work, prompt bool) *enginepb.Event {
	var failures []*enginepb.Failure
	for i := range todo {
		failures = append(failures, p.copyAll(&todo[i])...)
		p.finishWork(&todo[i])
	}
	p.flush()
	if prompt {
		p.letGoOwn()
	}
	ev := &enginepb.Event{Ok: len(failures) == 0, Failures: failures}
	if !ev.Ok {
		ev.Error = fmt.Sprintf("%d chunks could not be stored, the first: group %s chunk %d: %s: %s",
			len(failures), failures[0].Group, failures[0].Chunk, failures[0].Cause, failures[0].Detail)
	}
	return ev
}

// copiesMax is how many chunks of one job are copied at a time. A checksum runs at 10 to
// 20 GB/s a core and PCIe 5 at 55, so that these keep the link busy; twice as many were no
// faster and took more of the processors.
const copiesMax = 8

// copied is the end of one copy of a work.
type copied struct {
	index int
	k     *kept
	sum   uint32 // of a chunk that is whole now
	err   error
}

// copyAll makes the copies of a work, several at a time, and returns the failures in the
// order of the copies.
func (p *producer) copyAll(w *work) []*enginepb.Failure {
	failures, ended := make([]*failure, len(w.copies)), make([]bool, len(w.copies))
	offers := make(map[plan.Ref]bool, len(w.offers))
	for _, ref := range w.offers {
		offers[ref] = true
	}
	ends := make(chan copied, copiesMax)
	flying := map[plan.Ref]bool{}
	for next, behind := 0, 0; behind < len(w.copies); {
		// Two copies into one chunk go one after the other.
		for next < len(w.copies) && len(flying) < copiesMax && !flying[w.copies[next].Ref] {
			c, i := &w.copies[next], next
			next++
			var k *kept
			if k, failures[i] = p.prepare(c, w.unready); k == nil {
				ended[i] = true
				continue
			}
			flying[c.Ref] = true
			go func() { ends <- p.move(i, c, k) }()
		}
		if len(flying) > 0 {
			end := <-ends
			c := &w.copies[end.index]
			delete(flying, c.Ref)
			failures[end.index], ended[end.index] = p.moved(c, end), true
		}
		// In the order of the copies: what is offered first is let go first when parked
		// supply passes its bound, and that must not depend on who was faster.
		for ; behind < next && ended[behind]; behind++ {
			if c := &w.copies[behind]; offers[c.Ref] && c.Last {
				p.offer(c.Ref)
			}
		}
		if len(p.offers) > 0 && len(ends) == 0 {
			p.flush()
		}
	}
	var out []*enginepb.Failure
	for i, f := range failures {
		if f != nil {
			out = append(out, p.node.failure(w.copies[i].Ref, *f))
		}
	}
	return out
}

// prepare gives a copy its chunk, which is nil when there is nothing to copy. The failure
// of a chunk is returned once, by the copy that it happened to.
func (p *producer) prepare(c *copyWork, unready error) (*kept, *failure) {
	k := p.chunks[c.Ref]
	if c.Last && k != nil {
		k.key = c.key
	}
	if k == nil {
		k = &kept{key: c.key}
		p.chunks[c.Ref] = k
		if err := p.room(k, c.Promised); err != nil {
			return nil, p.failed(k, c.Promised, err)
		}
	}
	if k.fail != nil || !k.hold.zero() { // another request stored the same content
		return nil, nil
	}
	switch {
	case unready != nil:
		return nil, p.failed(k, c.Promised, unready)
	case c.missing >= 0:
		return nil, p.failed(k, c.Promised, fmt.Errorf("the engine never named logical block %d", c.missing))
	}
	return k, nil
}

// move brings a run of blocks into the chunk's slot, and computes the checksum of a chunk
// that is whole then. It runs beside the job's other copies.
func (p *producer) move(index int, c *copyWork, k *kept) copied {
	g := &p.node.groups[c.Group]
	b, err := p.node.tier.Bytes(k.slot)
	if err != nil {
		return copied{index: index, k: k, err: err}
	}
	if err := p.gather(c, b); err != nil || !c.Last {
		return copied{index: index, k: k, err: err}
	}
	return copied{index: index, k: k, sum: tier.Checksum(b[:g.chunkBytes])}
}

// moved takes up the end of a copy.
func (p *producer) moved(c *copyWork, end copied) *failure {
	k, g := end.k, &p.node.groups[c.Group]
	if end.err != nil {
		return p.failed(k, c.Promised, end.err)
	}
	if !c.Last {
		return nil
	}
	k.sum, k.whole = end.sum, true
	p.stored[c.Group] += uint64(g.chunkBytes)
	p.node.metrics.StoreBytes.WithLabelValues(g.name).Add(float64(g.chunkBytes))
	if c.Promised {
		if err := p.publish(c.Group, k); err != nil {
			return p.failed(k, c.Promised, err)
		}
	}
	return nil
}

// room gives a chunk its slot, or takes up the content that is already there.
func (p *producer) room(k *kept, promised bool) error {
	t := p.node.tier
	if promised {
		var adm []tier.Admission
		err := p.node.meeting.withRoom(p.transfer, func() (err error) {
			adm, err = t.Admit(p.owner, []tier.Key{k.key})
			return err
		})
		if err != nil {
			return err
		}
		switch adm[0].Presence {
		case tier.Admitted:
			k.slot, k.named = adm[0].Slot, true
			return nil
		case tier.Readable:
			if refs, found := t.Pin(p.owner, []tier.Key{k.key}); found[0] == tier.Readable {
				k.hold = pinned(refs[0])
				return nil
			}
		}
	}
	return p.node.meeting.withRoom(p.transfer, func() error {
		slots, err := t.Stage(p.owner, 1)
		if err == nil {
			k.slot = slots[0]
		}
		return err
	})
}

// gather copies blocks to their place in the chunk, whose slot is b.
func (p *producer) gather(c *copyWork, b []byte) error {
	g, space := &p.node.groups[c.Group], &p.engine.spaces[c.Group]
	frags := make([]gpu.Fragment, 0, len(c.ids)*len(space.strides))
	for _, id := range c.ids {
		frags = space.fragments(frags, id)
	}
	from := (int64(c.Block) - int64(c.Chunk)*int64(g.chunkBlocks)) * g.blockBytes
	to := from + int64(len(c.ids))*g.blockBytes
	return p.engine.device.Gather(p.ctx, b[from:to], space.region, frags)
}

func (p *producer) publish(group int, k *kept) error {
	h, err := p.node.publish(p.owner, k.slot, k.named, k.key, k.sum, p.node.groups[group].chunkBytes)
	if err != nil {
		return err
	}
	k.hold, k.whole = h, false
	return nil
}

// failed gives up a chunk, and says so to whoever waits for it when it was promised.
func (p *producer) failed(k *kept, promised bool, err error) *failure {
	f := failure{metrics.CauseStore, err.Error()}
	reason := sessionpb.Reason_REASON_STORE_FAILED
	var full *tier.ErrNoRoom
	switch {
	case errors.As(err, &full):
		f.cause, reason = metrics.CauseNoRoom, sessionpb.Reason_REASON_NO_ROOM
		p.node.metrics.NoRoom.WithLabelValues("producer").Inc()
	case p.ctx.Err() != nil:
		f = failure{metrics.CauseAborted, context.Cause(p.ctx).Error()}
		reason = sessionpb.Reason_REASON_REQUEST_ABORTED
	}
	p.free(k)
	k.fail, k.reason = &f, reason
	if promised {
		p.refuse(k)
	}
	return &f
}

// refuse says that a chunk of the supply will not come.
func (p *producer) refuse(k *kept) {
	if p.transfer != "" {
		p.node.meeting.refuse(p.transfer, []join.Refusal{{Key: join.Key(k.key), Reason: k.reason, Text: k.fail.detail}})
	}
}

// free gives back what a chunk takes.
func (p *producer) free(k *kept) {
	if !k.hold.zero() {
		p.node.letGo(k.hold)
	} else if k.slot != (tier.Slot{}) {
		_ = p.node.tier.Drop(k.slot) // stale only when the tier is closed
	}
	k.hold, k.slot, k.whole = hold{}, tier.Slot{}, false
}

// finishWork takes up the offers that are left, and drops.
func (p *producer) finishWork(w *work) {
	for _, ref := range w.offers {
		p.offer(ref)
	}
	for _, ref := range w.drops {
		if k := p.chunks[ref]; k != nil {
			p.free(k)
			delete(p.chunks, ref)
		}
	}
}

// offer takes up one offer, unless that is done.
func (p *producer) offer(ref plan.Ref) {
	k := p.chunks[ref]
	if k == nil {
		return
	}
	if k.fail == nil && k.hold.zero() && k.whole {
		if err := p.publish(ref.Group, k); err != nil {
			p.failed(k, false, err)
		}
	}
	if k.fail != nil {
		p.refuse(k) // once more is harmless
		return
	}
	if k.hold.zero() {
		return
	}
	p.offers = append(p.offers, offer{k.key, k.hold})
	k.hold, k.slot = hold{}, tier.Slot{}
	delete(p.chunks, ref)
	p.offered[ref] = struct{}{}
	p.supplied[ref.Group]++
	p.node.metrics.Supplied.WithLabelValues(p.node.groups[ref.Group].name, p.leg).Inc()
}

// flush hands the offers to the transfer. Without one they stay in the tier, pinned until the
// prompt's end: a private copy as soon as its key is free, if the request that is writing the
// key gives up.
func (p *producer) flush() {
	offers := p.offers
	p.offers = nil
	if p.transfer != "" {
		p.node.meeting.supply(p.transfer, offers)
		return
	}
	var private []offer
	for _, o := range offers {
		if o.hold.isPrivate() {
			private = append(private, o)
			continue
		}
		p.own = append(p.own, o)
	}
	if len(private) > 0 {
		p.node.wg.Go(func() { p.node.adopt(private) })
	}
}

// letGoOwn leaves the supply of leg probe to the tier, the head of the prompt as the newest.
func (p *producer) letGoOwn() {
	for _, o := range p.own {
		p.node.letGo(o.hold)
	}
	if len(p.own) > 0 {
		p.touch()
	}
	p.own = nil
}

// Load implements engine.Request; the server never calls it for a producer.
func (p *producer) Load([]*enginepb.BlockRun, uint32) (engine.Job, error) {
	return nil, status.Error(codes.FailedPrecondition, "only a consumer loads")
}

// Interrupt implements engine.Request.
func (p *producer) Interrupt(cause string) { p.cancel(errors.New(cause)) }

// Finish implements engine.Request: what the end adds is offered, and then the last
// word is said.
func (p *producer) Finish(f engine.Finish) *enginepb.FinishReply {
	defer p.cancel(context.Canceled)
	result := "ok"
	if fx, err := p.end(f); err != nil {
		result = "failed"
		p.node.faults.Log(slog.LevelError, "plan", err.Error(), "the end of a producer could not be planned; it supplies nothing more", "request", p.name, "error", err)
	} else {
		w := p.resolve(&fx)
		p.finishWork(&w)
		p.flush()
	}
	if f.Abort {
		result = "aborted"
		p.refuseRest(sessionpb.Reason_REASON_REQUEST_ABORTED, cmp.Or(f.Cause, "the producer's engine aborted the request"))
	}
	reply := p.counts()
	if p.transfer != "" {
		p.node.meeting.lastWord(p.transfer)
	}
	p.letGoOwn()
	p.touch()
	p.release()
	p.node.metrics.Requests.WithLabelValues("producer", p.leg, result).Inc()
	return reply
}

func (p *producer) end(f engine.Finish) (plan.Effects, error) {
	if p.broken != nil {
		return plan.Effects{}, p.broken
	}
	if f.Abort || f.Computed == 0 {
		return p.machine.Abort()
	}
	return p.machine.Finish(f.Computed)
}

// refuseRest names, before the last word, the chunks that an abort or a failure leaves out.
func (p *producer) refuseRest(reason sessionpb.Reason, why string) {
	if p.transfer == "" {
		return
	}
	var rest []join.Refusal
	for _, ref := range p.wanted {
		if _, ok := p.offered[ref]; !ok {
			rest = append(rest, join.Refusal{Key: join.Key(p.key(ref)), Reason: reason, Text: why})
		}
	}
	p.node.meeting.refuse(p.transfer, rest)
}

// touch marks the supply as used, so that the head of the prompt ends up newest.
func (p *producer) touch() {
	keys := make([]tier.Key, 0, len(p.offered))
	for _, ref := range p.wanted {
		if _, ok := p.offered[ref]; ok {
			keys = append(keys, p.key(ref))
		}
	}
	p.node.tier.Touch(keys)
}

// counts is the join as it stands at the producer's last word.
func (p *producer) counts() *enginepb.FinishReply {
	reply := &enginepb.FinishReply{}
	for g := range p.node.groups {
		reply.Groups = append(reply.Groups, &enginepb.GroupCount{
			Group: p.node.groups[g].name, Supplied: p.supplied[g], Bytes: p.stored[g],
		})
	}
	if p.transfer == "" {
		return reply
	}
	for _, g := range p.node.meeting.report(p.transfer) {
		if g.Group >= uint32(len(reply.Groups)) {
			continue
		}
		c := reply.Groups[g.Group]
		c.Demanded, c.Transferred, c.Unmatched = uint64(len(g.Demanded)), uint64(len(g.Transferred)), uint64(len(g.Unmatched))
	}
	return reply
}

// chunksText names the chunks of keys, as those of the request's text as far as they are. It is
// called after the last word, when the text does not grow any more.
func (p *producer) chunksText(keys map[tier.Key]bool) string {
	var found []plan.Ref
	for g := range p.node.groups {
		chunks := p.seq.tokens() / p.node.groups[g].chunkTokens
		for c := range uint32(chunks) {
			if ref := (plan.Ref{Group: g, Chunk: c}); keys[p.key(ref)] {
				found = append(found, ref)
			}
		}
	}
	text := p.node.chunksText(found)
	if n := len(keys) - len(found); n > 0 {
		text = strings.TrimPrefix(fmt.Sprintf("%s; %d of another text", text, n), "; ")
	}
	return text
}

// release gives back everything that was not handed to the transfer.
func (p *producer) release() {
	for _, k := range p.chunks {
		p.free(k)
	}
	p.chunks = nil
	if p.planner != nil && p.pooled && p.broken == nil {
		p.node.planners.Put(p.planner)
	}
	p.planner, p.machine = nil, nil
	p.tables, p.wanted, p.offered = nil, nil, nil // the meeting may keep p for the names of its chunks
}

// failure is a chunk's failure as an event names it.
func (n *Node) failure(ref plan.Ref, f failure) *enginepb.Failure {
	detail := f.detail[:min(len(f.detail), detailBytesMax)]
	return &enginepb.Failure{
		Group: n.groups[ref.Group].name, Chunk: ref.Chunk, Cause: f.cause,
		Detail: strings.ToValidUTF8(detail, ""), // a cut may split a character
	}
}

// detailBytesMax bounds the text of one failure: an event may carry thousands.
const detailBytesMax = 256
