package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// A consumer is a request whose engine goes on from KV that others computed.
type consumer struct {
	node     *Node
	engine   *attachment
	name     string // of the request
	leg      string
	peer     string // "" = own tier only
	transfer string
	owner    tier.Owner
	ask      plan.Ask
	seq      sequence
	ctx      context.Context // ends with the request
	cancel   context.CancelCauseFunc
	deadline time.Time // for what peers and other requests must do
	backstop *time.Timer

	resume  uint64  // planned
	from    string  // peer of the plan; "" = own tier only
	wants   []*want // demanded chunks, by group and chunk
	spare   []*want // chunks that a lower resume point needs too; see fallBack
	note    string
	settled chan struct{} // closed when every want has ended
	news    chan struct{} // has room for one; a token says that fresh is not empty
	wg      sync.WaitGroup

	mu      sync.Mutex
	open    int     // wants that have not ended
	fresh   []*want // have come, and no load has seen them yet
	sealed  bool
	fell    bool   // the spare chunks were decided on
	doubt   bool   // leg demand: something was lost that no plan has taken into account
	rethink bool   // reconsider runs
	ceiling uint64 // leg demand: spare chunks are asked for only up to this resume point; 0 = none
	stride  uint64 // by which the ceiling fell last
	quit    bool   // what was refused is no reason to warn; see noteQuit
	loaded  bool
	final   uint64   // where the engine goes on
	bytes   []uint64 // transferred, per group
	arrived []uint64 // chunks transferred, per group
	missed  []uint64 // chunks unmatched, per group
}

// A want is one demanded chunk. Its slot and name are set before it is demanded.
type want struct {
	ref   plan.Ref
	key   tier.Key
	slot  tier.Slot
	named bool
	// pending: it was being written when it was planned.
	pending bool

	// Guarded by consumer.mu.
	fetch *fetch // the demand that asks the peer for it
	index int    // its place there
	asked bool   // a spare want that is demanded
	ended bool
	hold  hold // set when it is here
	fail  failure
}

func (a *attachment) beginConsumer(ctx context.Context, r *enginepb.BeginRequest) (engine.Request, *enginepb.BeginReply, error) {
	n := a.node
	wait := n.waits.request
	if r.DeadlineMs > 0 {
		wait = time.Duration(r.DeadlineMs) * time.Millisecond
	}
	c := &consumer{
		node: n, engine: a, name: r.RequestId, leg: legName(r.Leg), peer: r.PeerId, transfer: r.TransferId,
		owner: tier.Owner{Kind: ownerRequest, ID: fmt.Sprintf("%s#%d", r.RequestId, requestNumber.Add(1))},
		ask:   plan.Ask{PromptTokens: r.PromptTokens, LocalTokens: r.LocalTokens, LoadCapTokens: r.MaxLoadTokens},
		seq:   n.sequence(r), settled: make(chan struct{}), news: make(chan struct{}, 1), deadline: time.Now().Add(wait),
		bytes: make([]uint64, len(n.groups)), arrived: make([]uint64, len(n.groups)), missed: make([]uint64, len(n.groups)),
	}
	c.ctx, c.cancel = context.WithCancelCause(n.life)
	c.backstop = time.AfterFunc(wait+backstopGrace, c.giveUp)
	c.begin(ctx)
	if err := ctx.Err(); err != nil { // nobody will finish it
		c.Finish(engine.Finish{Abort: true, Cause: err.Error()})
		return nil, nil, status.FromContextError(err).Err()
	}
	reply := &enginepb.BeginReply{ResumeTokens: c.resume, Note: c.note}
	for _, w := range c.wants {
		reply.Demand = n.addChunk(reply.Demand, w.ref)
	}
	for _, w := range c.spare {
		reply.Fallback = n.addChunk(reply.Fallback, w.ref)
	}
	return c, reply, nil
}

// addChunk adds a chunk to a list that is built by group and rising chunk.
func (n *Node) addChunk(to []*enginepb.GroupChunks, ref plan.Ref) []*enginepb.GroupChunks {
	name := n.groups[ref.Group].name
	if len(to) == 0 || to[len(to)-1].Group != name {
		to = append(to, &enginepb.GroupChunks{Group: name})
	}
	g := to[len(to)-1]
	if k := len(g.Chunks); k > 0 && g.Chunks[k-1].Last+1 == ref.Chunk {
		g.Chunks[k-1].Last = ref.Chunk
	} else {
		g.Chunks = append(g.Chunks, &enginepb.ChunkRange{First: ref.Chunk, Last: ref.Chunk})
	}
	return to
}

// begin plans and starts to fetch. A fault on the way leaves a smaller plan and a note.
func (c *consumer) begin(ctx context.Context) {
	peer := c.peer
	if err := c.engine.device.Lost(); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.resume, c.note, c.sealed = c.ask.LocalTokens, err.Error(), true
		c.settleLocked()
		c.node.metrics.Queries.Add(float64(c.ask.PromptTokens - c.ask.LocalTokens))
		return
	}
	if peer != "" {
		if why := c.node.unusable(peer, c.leg); why != "" {
			peer, c.note = "", why
		}
	}
	if !c.tryPlan(ctx, peer) && peer != "" {
		peer = ""
		c.tryPlan(ctx, "") // no room for what the peer has: what is here takes none
	}
	c.mu.Lock()
	c.sealed = true
	c.reconsiderLocked()
	c.settleLocked()
	c.mu.Unlock()
	for _, w := range c.wants {
		c.node.metrics.Demanded.WithLabelValues(c.node.groups[w.ref.Group].name, c.leg).Inc()
	}
	c.node.metrics.Queries.Add(float64(c.ask.PromptTokens - c.ask.LocalTokens))
}

// tryPlan plans with the help of a peer, or of the own tier alone, and takes what the
// plan needs. It reports false, with everything given back, when there is no room.
func (c *consumer) tryPlan(ctx context.Context, peer string) bool {
	c.resume = c.ask.LocalTokens
	p, err := c.plan(ctx, peer)
	if err != nil {
		c.note = fmt.Sprintf("no plan: %v", err)
		c.node.faults.Log(slog.LevelError, "plan", err.Error(), "a consumer's request could not be planned; it computes everything itself", "request", c.name, "error", err)
		return true
	}
	wants := c.wantsOf(p.demand)
	for i, w := range wants {
		w.pending = p.pending[i]
	}
	missing, writing, err := c.take(wants, peer)
	if err != nil {
		c.node.tier.Release(c.owner)
		c.node.metrics.NoRoom.WithLabelValues("consumer").Inc()
		c.note = err.Error()
		return false
	}
	c.resume, c.from, c.wants, c.spare = p.resume, peer, wants, c.wantsOf(p.spare)
	c.mu.Lock()
	c.open = len(missing) + len(writing)
	c.mu.Unlock()
	c.fetch(peer, missing)
	if len(writing) > 0 {
		c.wg.Go(func() { c.awaitOthers(peer, writing) })
	}
	return true
}

func (c *consumer) wantsOf(refs []plan.Ref) []*want {
	wants := make([]*want, len(refs))
	for i, ref := range refs {
		wants[i] = &want{ref: ref, key: c.key(ref)}
	}
	return wants
}

func (c *consumer) key(ref plan.Ref) tier.Key {
	return c.seq.key(ref.Group, c.node.groups[ref.Group].chunkTokens, ref.Chunk)
}

// A consumerPlan is a resume point and the chunks to have there.
type consumerPlan struct {
	resume  uint64
	demand  []plan.Ref
	pending []bool     // of each: it is being written
	spare   []plan.Ref // what else a plan without those would have
}

func (c *consumer) plan(ctx context.Context, peer string) (out consumerPlan, err error) {
	p := c.node.planner()
	defer c.node.planners.Put(p)
	known := c.lookupOwn()
	var pl plan.Plan
	switch {
	case peer == "":
		pl, err = p.Settled(c.ask, known)
	case c.leg != legProbe:
		pl, err = p.Eager(c.ask, known)
	default:
		pl, known, err = c.probe(ctx, p, peer, known)
	}
	if err != nil || pl.Deferred {
		return out, errors.Join(err, deferredError(pl))
	}
	out.resume, out.demand = pl.ResumeTokens, refs(pl.Demand)
	out.pending = make([]bool, len(out.demand))
	if c.leg == legPD && peer != "" { // all of it is still to come, and is promised
		return out, nil
	}
	if c.leg == legDemand && peer != "" {
		out.spare, err = c.tailsBelow(p, out.resume, out.demand)
		return out, err
	}
	some := false
	for i, ref := range out.demand {
		out.pending[i] = known[ref.Group].At(int(ref.Chunk)) == abi.Pending
		some = some || out.pending[i]
	}
	if some {
		out.spare, err = c.spareOf(p, known, out.demand)
	}
	return out, err
}

// spareOf returns the chunks beside the demand that are wanted if nothing that is being
// written comes. What was not looked up is hoped to be there: it costs no bytes before
// that.
func (c *consumer) spareOf(p *plan.Planner, known []abi.States, demand []plan.Ref) ([]plan.Ref, error) {
	for g := range known {
		n := int(c.ask.PromptTokens / c.node.groups[g].chunkTokens)
		known[g] = slices.Clone(known[g])
		for i := range n {
			switch known[g].At(i) {
			case abi.Pending:
				known[g].Put(i, abi.Miss)
			case abi.Retry:
				known[g].Put(i, abi.Hit)
			}
		}
	}
	pl, err := p.Settled(c.ask, known)
	if err != nil {
		return nil, err
	}
	planned := make(map[plan.Ref]bool, len(demand))
	for _, ref := range demand {
		planned[ref] = true
	}
	return slices.DeleteFunc(refs(pl.Demand), func(ref plan.Ref) bool { return planned[ref] }), nil
}

func deferredError(pl plan.Plan) error {
	if pl.Deferred {
		return errors.New("a rule still waits for lookups after the last round")
	}
	return nil
}

// lookupOwn returns what the own tier says of the prompt's chunks above the local
// prefix, per group.
func (c *consumer) lookupOwn() []abi.States {
	out := make([]abi.States, len(c.node.groups))
	for g := range out {
		ct := c.node.groups[g].chunkTokens
		lo, hi := uint32(c.ask.LocalTokens/ct), uint32(c.ask.PromptTokens/ct)
		out[g] = abi.NewStates(int(hi))
		if lo >= hi {
			continue
		}
		keys := make([]tier.Key, 0, hi-lo)
		for i := lo; i < hi; i++ {
			keys = append(keys, c.key(plan.Ref{Group: g, Chunk: i}))
		}
		found := abi.NewStates(len(keys))
		c.node.tier.Lookup(keys, found)
		for i := range keys {
			out[g].Put(int(lo)+i, found.At(i))
		}
	}
	return out
}

// probe plans with at most plan.ProbeRounds batched lookups at the peer, and returns what
// is known after them. A lookup that fails leaves Misses.
func (c *consumer) probe(ctx context.Context, p *plan.Planner, peer string, own []abi.States) (plan.Plan, []abi.States, error) {
	known := make([]abi.States, len(own))
	for g := range own {
		known[g] = slices.Clone(own[g])
		n := int(c.ask.PromptTokens / c.node.groups[g].chunkTokens)
		for i := known[g].First(abi.Absent, 0, n); i < n; i = known[g].First(abi.Absent, i+1, n) {
			known[g].Put(i, abi.Retry)
		}
	}
	for round := 0; ; round++ {
		step, err := p.Probe(c.ask, known, round)
		if err != nil || step.Done {
			return step.Plan, known, err
		}
		if err := c.lookupPeer(ctx, peer, refs(step.Lookup), known); err != nil {
			c.note = err.Error()
			pl, err := p.Settled(c.ask, own)
			return pl, own, err
		}
	}
}

// lookupPeer asks for one batch; the session ends it at the lookup deadline. More keys
// than one message takes go in several, at the same time.
func (c *consumer) lookupPeer(ctx context.Context, peer string, ask []plan.Ref, known []abi.States) error {
	n := c.node
	began := time.Now()
	defer n.open.begin(metrics.WaitLookup)()
	pieces := slices.Collect(slices.Chunk(ask, n.peers.KeysMax(peer)))
	answers, errs := make([]abi.States, len(pieces)), make([]error, len(pieces))
	var wg sync.WaitGroup
	for i, piece := range pieces {
		keys := make([]session.Key, len(piece))
		for k, ref := range piece {
			keys[k] = session.Key(c.key(ref))
		}
		wg.Go(func() { answers[i], errs[i] = n.peers.Lookup(ctx, peer, c.name, keys) })
	}
	wg.Wait()
	n.metrics.LookupSeconds.Observe(time.Since(began).Seconds())
	err := errors.Join(errs...)
	n.metrics.Waits.WithLabelValues("lookup", lookupOutcome(err)).Inc()
	if err != nil {
		if ctx.Err() == nil { // else the engine gave up
			n.faults.Log(slog.LevelWarn, "lookup", peer, "a lookup has no answer; the request is planned without the peer", "peer", peer, "error", err, "request", c.name, "chunks", n.chunksText(ask))
		}
		return fmt.Errorf("lookup at peer %s: %w", peer, err)
	}
	for i, piece := range pieces {
		for k, ref := range piece {
			s := answers[i].At(k)
			if s == abi.Retry {
				s = abi.Miss
			}
			known[ref.Group].Put(int(ref.Chunk), s)
		}
	}
	return nil
}

func lookupOutcome(err error) string {
	var le *wire.LookupError
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &le):
		return outcomeOf([]session.Result{{Cause: le.Cause}})
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline"
	case errors.Is(err, context.Canceled):
		return "aborted"
	}
	return "peer"
}

// take pins the demanded chunks that are here, and takes slots for the others when
// there is a peer to fetch them from: all of them or none. Chunks that somebody else is
// writing are returned apart.
func (c *consumer) take(wants []*want, peer string) (missing, writing []*want, err error) {
	t := c.node.tier
	keys := make([]tier.Key, len(wants))
	for i, w := range wants {
		keys[i] = w.key
	}
	pins, found := t.Pin(c.owner, keys)
	for i, w := range wants {
		switch found[i] {
		case tier.Readable:
			w.hold, w.ended = pinned(pins[i]), true
		case tier.Writing:
			writing = append(writing, w)
		default:
			missing = append(missing, w)
		}
	}
	if len(missing) == 0 || peer == "" {
		return missing, writing, nil
	}
	keys = keys[:0]
	for _, w := range missing {
		keys = append(keys, w.key)
	}
	var adm []tier.Admission
	err = c.node.meeting.withRoom("", func() (err error) {
		adm, err = t.Admit(c.owner, keys)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	absent := missing
	missing = nil
	for i, w := range absent {
		if adm[i].Presence == tier.Admitted {
			w.slot, w.named = adm[i].Slot, true
			missing = append(missing, w)
		} else { // somebody was faster; the wait finds it, readable or not
			writing = append(writing, w)
		}
	}
	return missing, writing, nil
}

// fetch demands chunks that have slots from the peer.
func (c *consumer) fetch(peer string, missing []*want) {
	if peer == "" {
		for _, w := range missing {
			c.lost(w, failure{metrics.CauseEvicted, "it was in the tier when the request was planned, and is gone"})
		}
		return
	}
	for piece := range slices.Chunk(missing, c.node.peers.KeysMax(peer)) {
		c.demand(peer, piece)
	}
}

func (c *consumer) demand(peer string, piece []*want) {
	f := &fetch{c: c, peer: peer, wants: piece, began: time.Now(), endWait: c.node.open.begin(metrics.WaitTransfer)}
	c.mu.Lock()
	for i, w := range piece {
		w.fetch, w.index = f, i
	}
	c.mu.Unlock()
	req := wire.DemandRequest{
		DemandRequest: session.DemandRequest{
			TransferID: c.transfer, RequestID: c.name, Leg: c.leg, Timeout: max(1, time.Until(c.deadline)),
			Keys: make([]session.Key, len(piece)), Slots: make([]uint32, len(piece)), Epochs: make([]uint64, len(piece)),
		},
		Started: func(id session.JobID) { f.start(peer, id) },
		Done:    func(id session.JobID, results []session.Result) { f.done(peer, id, results) },
	}
	if c.foretold() {
		req.Word = f.word
	}
	for i, w := range piece {
		req.Keys[i], req.Slots[i], req.Epochs[i] = session.Key(w.key), w.slot.Index, w.slot.Epoch
	}
	if _, err := c.node.peers.Demand(c.ctx, peer, req); err != nil {
		f.endWait()
		for _, w := range piece {
			c.lost(w, failure{metrics.CausePeer, err.Error()})
		}
	}
}

// awaitOthers waits for chunks that other requests are writing. What does not become
// readable in time is fetched for this request alone, when there is a peer.
func (c *consumer) awaitOthers(peer string, writing []*want) {
	n := c.node
	var bytes int64
	for _, w := range writing {
		bytes += n.groups[w.ref.Group].chunkBytes
	}
	limit := time.Now().Add(n.pendingLimit(bytes))
	if c.deadline.Before(limit) {
		limit = c.deadline
	}
	ctx, cancel := context.WithDeadline(c.ctx, limit)
	defer cancel()
	var late []*want
	outcome, endWait := "ok", n.open.begin(metrics.WaitPending)
	for _, w := range writing {
		ref, err := n.awaitReadable(ctx, c.owner, w.key)
		switch {
		case err == nil:
			c.got(w, pinned(ref))
		case c.ctx.Err() != nil:
			outcome = "aborted"
			c.lost(w, c.interrupted())
		case peer == "" || !time.Now().Before(c.deadline):
			outcome = "deadline"
			c.lost(w, failure{metrics.CauseDeadline, err.Error()})
		default:
			outcome = "deadline"
			late = append(late, w)
		}
	}
	endWait()
	n.metrics.Waits.WithLabelValues(metrics.WaitPending, outcome).Inc()
	if len(late) == 0 {
		return
	}
	var slots []tier.Slot
	err := n.meeting.withRoom("", func() (err error) {
		slots, err = n.tier.Stage(c.owner, len(late))
		return err
	})
	if err != nil {
		n.metrics.NoRoom.WithLabelValues("consumer").Inc()
		for _, w := range late {
			c.lost(w, failure{metrics.CauseNoRoom, err.Error()})
		}
		return
	}
	c.fetch(peer, c.place(late, slots))
}

// place gives wants slots of their own, and returns those that have not ended meanwhile.
func (c *consumer) place(wants []*want, slots []tier.Slot) (open []*want) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, w := range wants {
		if w.ended {
			_ = c.node.tier.Drop(slots[i]) // stale only when the tier is closed
			continue
		}
		w.slot = slots[i]
		open = append(open, w)
	}
	return open
}

// interrupted says why the request's own context ended.
func (c *consumer) interrupted() failure {
	return failure{metrics.CauseAborted, context.Cause(c.ctx).Error()}
}

// errEnded: the want has ended before its bytes were whole.
var errEnded = errors.New("the request has given it up")

// landed ends a want whose bytes have come whole into its slot. Publishing and ending
// are one step: a want that has ended never has a pin that its request's end would miss.
func (c *consumer) landed(w *want, sum uint32, size int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.ended {
		return errEnded
	}
	h, err := c.node.publish(c.owner, w.slot, w.named, w.key, sum, size)
	if err != nil {
		return err
	}
	group := c.node.groups[w.ref.Group].name
	c.node.metrics.PeerReadBytes.Add(float64(size))
	c.node.metrics.Transferred.WithLabelValues(group, c.leg).Inc()
	c.arrived[w.ref.Group]++
	c.bytes[w.ref.Group] += uint64(size)
	c.endLocked(w, h)
	return nil
}

// got ends a want whose content another request has brought here.
func (c *consumer) got(w *want, h hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.ended {
		c.node.letGo(h)
		return
	}
	c.endLocked(w, h)
}

func (c *consumer) endLocked(w *want, h hold) {
	w.ended, w.hold = true, h
	c.open--
	c.fresh = append(c.fresh, w)
	select {
	case c.news <- struct{}{}:
	default:
	}
	c.settleLocked()
}

// lost ends a want that could not be had; its slot is free for others.
func (c *consumer) lost(w *want, f failure) { c.lose([]*want{w}, []failure{f}) }

// lose ends wants that could not be had, all of one word.
func (c *consumer) lose(wants []*want, failures []failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, w := range wants {
		if !w.ended {
			c.loseLocked(w, failures[i])
			c.doubt = true
		}
	}
	c.reconsiderLocked()
	c.settleLocked()
}

func (c *consumer) loseLocked(w *want, f failure) {
	w.ended, w.fail = true, f
	if w.slot != (tier.Slot{}) {
		_ = c.node.tier.Drop(w.slot) // stale only when the tier is closed
	}
	c.missed[w.ref.Group]++
	c.node.metrics.Unmatched.WithLabelValues(c.node.groups[w.ref.Group].name, c.leg, f.cause).Inc()
	c.open--
}

// backstopGrace is how long after its deadline a request is ended here when the session
// has not done so. It never comes to that unless this node is at fault or overloaded.
const backstopGrace = 5 * time.Second

// giveUp ends every wait that should have ended long ago.
func (c *consumer) giveUp() {
	var stuck []*want
	c.mu.Lock()
	if c.sealed {
		stuck = slices.DeleteFunc(c.demanded(), func(w *want) bool { return w.ended })
	}
	c.mu.Unlock()
	if len(stuck) == 0 {
		return
	}
	c.node.faults.Log(slog.LevelError, "no-end", c.peer, "waits had no end at the request's deadline; they are ended now", "request", c.name, "peer", c.peer, "chunks", len(stuck))
	for _, w := range stuck {
		c.lost(w, failure{metrics.CauseDeadline, "no word from the session, long after the request's deadline"})
	}
}

func (c *consumer) settleLocked() {
	if !c.sealed || c.open > 0 {
		return
	}
	if !c.fell && c.mayFallBack() {
		c.fell = true
		c.open++ // until it has asked for what it wants
		c.wg.Go(c.fallBack)
		return
	}
	select {
	case <-c.settled:
	default:
		if slices.ContainsFunc(c.demanded(), func(w *want) bool { return w.fail.cause != "" }) {
			c.wg.Go(c.tellFaults)
		}
		close(c.settled)
	}
}

// mayFallBack says whether something that was being written has not come, and another
// plan is possible without it. c.mu is held.
func (c *consumer) mayFallBack() bool {
	if c.foretold() || len(c.spare) == 0 || c.ctx.Err() != nil || !time.Now().Before(c.deadline) {
		return false
	}
	return slices.ContainsFunc(c.wants, func(w *want) bool { return w.pending && w.hold.zero() })
}

// fallBack plans once more, with what has not come as Miss, and demands what is new.
// The engine was told of the spare chunks, and no others, so the plan is among them.
func (c *consumer) fallBack() {
	again, err := c.planAgain()
	peer := c.from
	if peer != "" && c.node.unusable(peer, c.leg) != "" {
		again = nil
	}
	c.demandMore(peer, again, err)
}

// demandMore takes and demands what a second plan adds. It ends what the caller has added
// to open to keep the request from settling.
func (c *consumer) demandMore(peer string, again []*want, err error) {
	var missing, writing []*want
	if err == nil && len(again) > 0 {
		missing, writing, err = c.take(again, peer)
	}
	c.mu.Lock()
	c.open--
	c.rethink = false
	if err != nil {
		c.node.faults.Log(slog.LevelInfo, "second-plan", c.from, "no second plan after a chunk did not come", "request", c.name, "error", err)
		for _, w := range again { // take pins before it finds no room
			c.node.letGo(w.hold)
			w.hold, w.ended = hold{}, false
			c.doubt = true // what was kept for them may be of no use
		}
		again = nil
	}
	for _, w := range again {
		w.asked = true
		c.node.metrics.Demanded.WithLabelValues(c.node.groups[w.ref.Group].name, c.leg).Inc()
	}
	c.open += len(missing) + len(writing)
	c.reconsiderLocked()
	c.settleLocked()
	c.mu.Unlock()
	c.fetch(peer, missing)
	if len(writing) > 0 {
		c.awaitOthers(peer, writing)
	}
}

// planAgain returns the spare wants of the plan over what is here and them.
func (c *consumer) planAgain() ([]*want, error) {
	known, _ := c.here()
	for _, w := range c.spare {
		known[w.ref.Group].Put(int(w.ref.Chunk), abi.Hit)
	}
	_, demand, err := c.settle(known)
	if err != nil {
		return nil, err
	}
	wanted := make(map[plan.Ref]bool, len(demand))
	for _, ref := range demand {
		wanted[ref] = true
	}
	var again []*want
	for _, w := range c.spare {
		if wanted[w.ref] {
			again = append(again, w)
		}
	}
	return again, nil
}

// demanded returns the wants and the spare ones that were asked for. c.mu is held.
func (c *consumer) demanded() []*want {
	out := slices.Clone(c.wants)
	for _, w := range c.spare {
		if w.asked {
			out = append(out, w)
		}
	}
	return out
}

// here returns what has come, as a table and by chunk.
func (c *consumer) here() ([]abi.States, map[plan.Ref]*want) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hereLocked()
}

func (c *consumer) hereLocked() ([]abi.States, map[plan.Ref]*want) {
	known := make([]abi.States, len(c.node.groups))
	for g := range known {
		known[g] = abi.NewStates(int(c.ask.PromptTokens / c.node.groups[g].chunkTokens))
	}
	by := map[plan.Ref]*want{}
	for _, w := range c.demanded() {
		if !w.hold.zero() {
			by[w.ref] = w
			known[w.ref.Group].Put(int(w.ref.Chunk), abi.Hit)
		}
	}
	return known, by
}

// Store implements engine.Request; the server never calls it for a consumer.
func (c *consumer) Store(engine.Step) (engine.Job, error) {
	return nil, status.Error(codes.FailedPrecondition, "only a producer stores")
}

// Load implements engine.Request. It refuses destinations that leave out a block of a
// demanded chunk. A spare chunk without destination stays out.
func (c *consumer) Load(runs []*enginepb.BlockRun, event uint32) (engine.Job, error) {
	tables := make([]map[uint32]uint32, len(c.node.groups))
	for _, run := range runs {
		g := c.node.group(run.Group)
		if tables[g] == nil {
			tables[g] = map[uint32]uint32{}
		}
		for i, id := range run.Ids {
			tables[g][run.FirstBlock+uint32(i)] = id
		}
	}
	to := make(map[plan.Ref][]uint32, len(c.wants))
	for _, w := range c.wants {
		ids, missing := c.node.destination(w.ref, tables[w.ref.Group])
		if ids == nil {
			g := &c.node.groups[w.ref.Group]
			first := w.ref.Chunk * uint32(g.chunkBlocks)
			return nil, status.Errorf(codes.InvalidArgument, "group %q: chunk %d is demanded, but its logical block %d has no destination; name all of its blocks, %d to %d",
				g.name, w.ref.Chunk, missing, first, first+uint32(g.chunkBlocks)-1)
		}
		to[w.ref] = ids
	}
	for _, w := range c.spare {
		if ids, _ := c.node.destination(w.ref, tables[w.ref.Group]); ids != nil {
			to[w.ref] = ids
		}
	}
	return func() *enginepb.Event { return c.load(to, event) }, nil
}

// destination returns the blocks that a chunk goes to, or nil and the first logical block
// that has no place.
func (n *Node) destination(ref plan.Ref, table map[uint32]uint32) (ids []uint32, missing uint32) {
	g := &n.groups[ref.Group]
	for b := ref.Chunk * uint32(g.chunkBlocks); b < (ref.Chunk+1)*uint32(g.chunkBlocks); b++ {
		id, ok := table[b]
		if !ok {
			return nil, b
		}
		ids = append(ids, id)
	}
	return ids, 0
}

// load brings the chunks into the engine's blocks as they come, waits until every demanded
// one has ended, and plans over what is there. What it copied and the plan does not use lies
// in blocks that the engine has given for it, and is not named as loaded.
func (c *consumer) load(to map[plan.Ref][]uint32, event uint32) *enginepb.Event {
	l := &loading{c: c, to: to, copied: map[plan.Ref]bool{}}
	err := c.engine.wait(c.ctx, event, c.deadline)
	if err == nil {
		l.arriving()
	}
	<-c.settled // every wait of this request has a deadline, and ends with its context
	resume, loaded := c.ask.LocalTokens, []plan.Ref(nil)
	if err == nil {
		resume, loaded, err = l.rest()
	}
	ev := &enginepb.Event{Ok: err == nil && resume == c.resume, ResumeTokens: resume}
	for _, ref := range loaded {
		ev.Loaded = c.node.addChunk(ev.Loaded, ref)
	}
	c.mu.Lock()
	demanded := c.demanded()
	for _, w := range demanded {
		if w.hold.zero() {
			ev.Failures = append(ev.Failures, c.node.failure(w.ref, w.fail))
		}
	}
	c.mu.Unlock()
	if !ev.Ok {
		ev.Error = c.explain(resume, len(demanded), ev.Failures, err)
	}
	c.mu.Lock()
	c.loaded, c.final = true, resume
	c.mu.Unlock()
	return ev
}

func (c *consumer) explain(resume uint64, demanded int, failures []*enginepb.Failure, err error) string {
	text := fmt.Sprintf("goes on from token %d instead of %d", resume, c.resume)
	if err != nil {
		text += ": " + err.Error()
	}
	if len(failures) > 0 {
		f := failures[0]
		text += fmt.Sprintf(": %d of %d chunks missing, the first: group %s chunk %d: %s: %s", len(failures), demanded, f.Group, f.Chunk, f.Cause, f.Detail)
	}
	return text
}

// settle plans over a finished table, never above what was planned first: the engine
// has made room for that much.
func (c *consumer) settle(known []abi.States) (uint64, []plan.Ref, error) {
	return c.settleAsk(c.ask, known)
}

func (c *consumer) settleAsk(ask plan.Ask, known []abi.States) (uint64, []plan.Ref, error) {
	p := c.node.planner()
	defer c.node.planners.Put(p)
	pl, err := p.Settled(ask, known)
	if err != nil {
		return 0, nil, err
	}
	if pl.ResumeTokens > c.resume {
		return 0, nil, fmt.Errorf("the plan over what arrived resumes at %d, above the planned %d", pl.ResumeTokens, c.resume)
	}
	return pl.ResumeTokens, refs(pl.Demand), nil
}

// spoiled gives up a chunk that was here.
func (c *consumer) spoiled(w *want, err error) {
	if w == nil {
		return
	}
	f := failure{metrics.CauseStore, err.Error()}
	var mismatch *tier.ErrChecksum
	switch {
	case errors.As(err, &mismatch):
		f.cause = metrics.CauseChecksum
		c.node.tellWrong("slab", "", w.key, err, "group", c.node.groups[w.ref.Group].name, "chunk", w.ref.Chunk, "request", c.name)
		c.node.distrust(w.hold)
	case c.ctx.Err() != nil:
		f = c.interrupted()
	default:
		c.node.faults.Log(slog.LevelWarn, f.cause, c.owner.ID, "a chunk could not be copied to the engine", "error", err, "chunks", c.node.chunksText([]plan.Ref{w.ref}), "request", c.name)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node.letGo(w.hold)
	w.hold, w.fail = hold{}, f
	c.missed[w.ref.Group]++
	c.node.metrics.Unmatched.WithLabelValues(c.node.groups[w.ref.Group].name, c.leg, f.cause).Inc()
}

// account counts where the prompt's tokens came from, and says what the request came to.
// c.mu is held.
func (c *consumer) account() (result string) {
	resume := c.ask.LocalTokens // an engine that never loads computes the rest
	if c.loaded {
		resume = c.final
	}
	source := "host"
	for _, n := range c.arrived {
		if n > 0 {
			source = "p2p"
		}
	}
	m := c.node.metrics
	m.Hits.Add(float64(resume - c.ask.LocalTokens))
	m.TokensBySource.WithLabelValues("device").Add(float64(c.ask.LocalTokens))
	m.TokensBySource.WithLabelValues(source).Add(float64(resume - c.ask.LocalTokens))
	m.TokensBySource.WithLabelValues("compute").Add(float64(c.ask.PromptTokens - resume))
	switch {
	case resume == c.ask.LocalTokens:
		return "miss"
	case resume < c.resume:
		return "partial"
	}
	return "hit"
}

// Interrupt implements engine.Request.
func (c *consumer) Interrupt(cause string) { c.cancel(errors.New(cause)) }

// Finish implements engine.Request: what is still on its way is aborted, and everything
// is let go.
func (c *consumer) Finish(f engine.Finish) *enginepb.FinishReply {
	cause := f.Cause
	if cause == "" {
		cause = "the consumer's engine finished the request"
	}
	c.cancel(errors.New(cause))
	<-c.settled // every wait of this request ends with its context
	c.backstop.Stop()
	c.wg.Wait()
	reply := &enginepb.FinishReply{}
	c.mu.Lock()
	result := c.account()
	for g := range c.node.groups {
		reply.Groups = append(reply.Groups, &enginepb.GroupCount{
			Group: c.node.groups[g].name, Transferred: c.arrived[g], Unmatched: c.missed[g], Bytes: c.bytes[g],
		})
	}
	for _, w := range c.demanded() {
		reply.Groups[w.ref.Group].Demanded++
		c.node.letGo(w.hold)
		w.hold = hold{}
	}
	c.mu.Unlock()
	if pins, writes := c.node.tier.Release(c.owner); pins+writes > 0 {
		c.node.faults.Log(slog.LevelError, "left-behind", c.owner.ID, "a consumer's end left slots behind; they are released", "request", c.name, "pins", pins, "writes", writes)
	}
	if f.Abort {
		result = "aborted"
	}
	c.node.metrics.Requests.WithLabelValues("consumer", c.leg, result).Inc()
	return reply
}
