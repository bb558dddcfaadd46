package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// A consumer mirrors host's consumer: a request whose engine goes on from KV that others
// computed. What waits there in a goroutine is a state here, which settle looks at.
type consumer struct {
	n        *node
	req      *Request
	owner    tier.Owner
	peer     *peer // nil = own tier only
	leg      leg
	ask      plan.Ask
	began    time.Duration
	deadline time.Duration

	own, known []abi.States
	round      int
	looking    *asking // lookups that are awaited; nil = none

	resume     uint64
	wants      []*want
	spare      []*want
	writing    []*want
	writeLimit time.Duration
	open       int
	sealed     bool
	fell       bool
	doubt      bool // leg demand: something was lost that no plan has taken into account
	rethink    bool // a second plan of leg demand is on its way
	ceiling    uint64
	stride     uint64
	settled    bool
	finished   bool
	fetches    []*fetch
}

// A want is one demanded chunk.
type want struct {
	ref     plan.Ref
	key     tier.Key
	slot    tier.Slot
	named   bool
	pending bool
	asked   bool
	ended   bool
	hold    hold
	fetch   *fetch // the demand that asks the peer for it
	index   int    // its place there
}

// An asking is the lookups of one round: more keys than a message takes go in several.
type asking struct {
	c      *consumer
	ids    []session.JobID
	states []abi.States
	keys   []int
	open   int
	failed bool
}

// A fetch is one demand, with what the check knows of it.
type fetch struct {
	c        *consumer
	id       session.JobID
	wants    []*want
	deadline time.Duration
	supplied []time.Duration // per key: when its bytes are late; 0 = not supplied
	over     []bool          // per key: the session has ended it without bytes
	allowed  uint64          // the peer's process with which both sides had allowed all legs; 0 = they had not
}

func (n *node) beginConsumer(r *Request) {
	n.moved = true
	c := &consumer{n: n, req: r, owner: n.newOwner("request"), leg: legs[r.Leg], ask: plan.Ask{PromptTokens: r.Tokens},
		began: n.local(), deadline: n.local() + r.Timeout}
	n.w.note("consumer begins", n.i, r.Producer, uint64(r.ID))
	if n.draining {
		c.result("refused: draining")
		return
	}
	n.consumers = append(n.consumers, c)
	p := n.peers[r.Producer]
	if c.usable(p) {
		c.peer = p
	}
	c.tryPlan()
}

func (c *consumer) key(ref plan.Ref) tier.Key {
	return c.req.Text.key(ref.Group, c.n.w.model.Groups[ref.Group].ChunkTokens, ref.Chunk)
}

// must is for what no fault may cause.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (c *consumer) tryPlan() {
	p := c.n.w.plan
	c.own = c.lookupOwn()
	switch {
	case c.peer == nil:
		c.planned(must(p.Settled(c.ask, c.own)), c.own, false)
	case c.leg.eager:
		c.planned(must(p.Eager(c.ask, c.own)), c.own, false)
	default:
		c.known = make([]abi.States, len(c.own))
		for g := range c.own {
			c.known[g] = slices.Clone(c.own[g])
			n := int(c.ask.PromptTokens / c.n.w.model.Groups[g].ChunkTokens)
			for i := c.known[g].First(abi.Absent, 0, n); i < n; i = c.known[g].First(abi.Absent, i+1, n) {
				c.known[g].Put(i, abi.Retry)
			}
		}
		c.probe()
	}
}

func (c *consumer) lookupOwn() []abi.States {
	m := &c.n.w.model
	out := make([]abi.States, len(m.Groups))
	for g := range out {
		hi := uint32(c.ask.PromptTokens / m.Groups[g].ChunkTokens)
		out[g] = abi.NewStates(int(hi))
		keys := make([]tier.Key, hi)
		for i := range keys {
			keys[i] = c.key(plan.Ref{Group: g, Chunk: uint32(i)})
		}
		c.n.tier.Lookup(keys, out[g])
	}
	return out
}

// probe goes one round further, or ends with a plan.
func (c *consumer) probe() {
	step := must(c.n.w.plan.Probe(c.ask, c.known, c.round))
	if step.Done {
		c.planned(step.Plan, c.known, true)
		return
	}
	p := c.peer
	b := &asking{c: c}
	c.looking = b
	for piece := range slices.Chunk(refs(step.Lookup), p.keysMax()) {
		keys := make([]session.Key, len(piece))
		for i, ref := range piece {
			keys[i] = session.Key(c.key(ref))
		}
		id := p.core.Lookup(c.n.local(), fmt.Sprint(c.req.ID), keys, 0)
		p.lookups[id] = &lookup{b: b, at: len(b.ids), limit: c.n.local() + c.n.w.limits.Lookup}
		b.ids, b.states, b.keys, b.open = append(b.ids, id), append(b.states, nil), append(b.keys, len(keys)), b.open+1
	}
	p.carry()
}

// keysMax is how many keys a message to the peer may name.
func (p *peer) keysMax() int { return p.core.Status(p.n.local()).KeysMax }

// lookupDone is the one end of a lookup.
func (p *peer) lookupDone(e session.LookupDone) {
	n := p.n
	l := p.lookups[e.Job]
	if l == nil {
		n.w.after(0, n, func() { n.w.fail("result twice", "node %d: lookup %d at node %d has a second result", n.i, e.Job, p.i) })
		return
	}
	delete(p.lookups, e.Job)
	n.w.note("lookup "+e.Cause.String(), n.i, p.i, uint64(e.Job))
	now := n.local()
	if e.Cause == session.Deadline && now < l.limit || n.late(l.limit) {
		n.w.fail("wait", "node %d: lookup %d ends by %v at %v, its limit is %v", n.i, e.Job, e.Cause, now, l.limit)
	}
	b, c := l.b, l.b.c
	c.req.crowded = c.req.crowded || e.Cause == session.Busy || e.Cause == session.Answered && e.Text != ""
	b.states[l.at], b.failed = e.States, b.failed || e.Cause != session.Answered
	if b.open--; b.open > 0 {
		return
	}
	// What waits for the answer is another goroutine: it runs after the core's step.
	n.w.after(0, n, func() {
		if c.finished || c.looking != b {
			return
		}
		n.moved = true
		c.looking = nil
		if b.failed {
			c.planned(must(n.w.plan.Settled(c.ask, c.own)), c.own, true)
			return
		}
		c.learn(b)
		c.round++
		c.probe()
	})
}

func (c *consumer) learn(b *asking) {
	step := must(c.n.w.plan.Probe(c.ask, c.known, c.round))
	piece, at := 0, 0
	for _, ref := range refs(step.Lookup) {
		if at == b.keys[piece] {
			piece, at = piece+1, 0
		}
		s := b.states[piece].At(at)
		at++
		if s == abi.Retry {
			s = abi.Miss
		}
		c.known[ref.Group].Put(int(ref.Chunk), s)
	}
}

// planned takes what the plan needs, and starts to fetch.
func (c *consumer) planned(pl plan.Plan, known []abi.States, pendings bool) {
	if pl.Deferred {
		panic("a rule still waits for lookups after the last round")
	}
	c.resume = pl.ResumeTokens
	demand := refs(pl.Demand)
	wants := c.wantsOf(demand)
	switch {
	case c.foretold():
		c.spare = c.tailsBelow(c.resume, demand)
	case pendings || c.peer == nil || !c.leg.eager:
		some := false
		for _, x := range wants {
			x.pending = known[x.ref.Group].At(int(x.ref.Chunk)) == abi.Pending
			some = some || x.pending
		}
		if some {
			c.spare = c.spareOf(known, demand)
		}
	}
	missing, writing, err := c.take(wants)
	if err != nil {
		c.req.crowded = true
		c.n.tier.Release(c.owner)
		c.spare, c.resume = nil, 0
		if c.peer != nil {
			c.peer = nil
			c.tryPlan() // no room for what the peer has: what is here takes none
			return
		}
	} else {
		c.wants, c.open = wants, len(missing)+len(writing)
		c.awaitOthers(writing)
		c.fetch(missing)
	}
	c.sealed = true
	c.reconsider()
	c.settle()
}

func (c *consumer) wantsOf(refs []plan.Ref) []*want {
	wants := make([]*want, len(refs))
	for i, ref := range refs {
		wants[i] = &want{ref: ref, key: c.key(ref)}
	}
	return wants
}

func (c *consumer) spareOf(known []abi.States, demand []plan.Ref) []*want {
	hoped := make([]abi.States, len(known))
	for g := range known {
		hoped[g] = slices.Clone(known[g])
		for i := range int(c.ask.PromptTokens / c.n.w.model.Groups[g].ChunkTokens) {
			switch known[g].At(i) {
			case abi.Pending:
				hoped[g].Put(i, abi.Miss)
			case abi.Retry:
				hoped[g].Put(i, abi.Hit)
			}
		}
	}
	pl := must(c.n.w.plan.Settled(c.ask, hoped))
	return c.wantsOf(slices.DeleteFunc(refs(pl.Demand), func(ref plan.Ref) bool { return slices.Contains(demand, ref) }))
}

func (c *consumer) take(wants []*want) (missing, writing []*want, err error) {
	t := c.n.tier
	keys := make([]tier.Key, len(wants))
	for i, x := range wants {
		keys[i] = x.key
	}
	pins, found := t.Pin(c.owner, keys)
	for i, x := range wants {
		switch found[i] {
		case tier.Readable:
			x.hold, x.ended = c.n.pinned(c.owner, pins[i]), true
		case tier.Writing:
			writing = append(writing, x)
		default:
			missing = append(missing, x)
		}
	}
	if len(missing) == 0 || c.peer == nil {
		return missing, writing, nil
	}
	keys = keys[:0]
	for _, x := range missing {
		keys = append(keys, x.key)
	}
	var adm []tier.Admission
	err = c.n.withRoom("", func() (err error) {
		adm, err = t.Admit(c.owner, keys)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	absent := missing
	missing = nil
	for i, x := range absent {
		if adm[i].Presence == tier.Admitted {
			x.slot, x.named = c.n.handed(adm[i].Slot), true
			missing = append(missing, x)
		} else {
			writing = append(writing, x)
		}
	}
	return missing, writing, nil
}

func (c *consumer) fetch(missing []*want) {
	if c.peer == nil {
		for _, x := range missing {
			c.lost(x)
		}
		return
	}
	if len(missing) > 0 {
		for piece := range slices.Chunk(missing, c.peer.keysMax()) {
			c.demand(piece)
		}
	}
}

func (c *consumer) demand(piece []*want) {
	n := c.n
	f := &fetch{c: c, wants: piece, supplied: make([]time.Duration, len(piece)), over: make([]bool, len(piece))}
	req := session.DemandRequest{TransferID: c.req.transfer(), RequestID: fmt.Sprint(c.req.ID), Leg: c.req.Leg,
		Timeout: max(1, c.deadline-n.local())}
	f.deadline = n.local() + req.Timeout
	for i, x := range piece {
		x.fetch, x.index = f, i
		req.Keys = append(req.Keys, session.Key(x.key))
		req.Slots = append(req.Slots, x.slot.Index)
		req.Epochs = append(req.Epochs, x.slot.Epoch)
	}
	if s := c.peer.core.Status(n.local()); c.peer.allowed && s.Supplies {
		f.allowed = s.BootID
	}
	f.id = c.peer.core.Demand(n.local(), req)
	c.peer.demands[f.id] = f
	c.fetches = append(c.fetches, f)
	c.peer.carry()
}

// owes notes when the bytes of a Supply are late: all that the peer owes shares the data
// connections, so all of it counts.
func (p *peer) owes(s *sessionpb.Supply) {
	f := p.demands[session.JobID(s.Job)]
	if f == nil || !p.heldUp {
		return
	}
	now, l := p.n.local(), &p.n.w.limits
	if now >= f.deadline {
		return
	}
	for _, r := range s.Refused {
		for _, i := range r.Indices {
			f.over[i] = f.over[i] || f.supplied[i] == 0
		}
	}
	var fresh []uint32
	for _, i := range s.Available {
		if f.supplied[i] == 0 && !f.wants[i].ended && !f.over[i] {
			f.supplied[i] = never
			fresh = append(fresh, i)
		}
	}
	bytes := 0
	for _, o := range p.demands {
		for i, at := range o.supplied {
			if at > now && !o.wants[i].ended && !o.over[i] {
				bytes += p.n.w.model.chunkBytes(o.wants[i].ref.Group)
			}
		}
	}
	at := min(f.deadline, now+l.TransferBase+time.Duration(bytes)*time.Second/time.Duration(l.TransferBytesPerSecond))
	for _, i := range fresh {
		f.supplied[i] = at
	}
	for i := range f.wants {
		f.over[i] = f.over[i] || s.Last && f.supplied[i] == 0
	}
}

// word takes what the producer says of keys before the demand ends: those that it refuses
// have ended, and their slots are free for others.
func (p *peer) word(e session.Word) {
	f := p.demands[e.Job]
	if f == nil {
		p.n.w.fail("result twice", "node %d: a word on demand %d at node %d, which has ended", p.n.i, e.Job, p.i)
	}
	for _, i := range e.Refused {
		f.over[i] = true
		f.c.lost(f.wants[i])
	}
	for _, i := range e.WillCome {
		if f.over[i] {
			p.n.w.fail("last word", "node %d: job %d key %d was refused and will come", p.n.i, e.Job, i)
		}
	}
}

// told notes what a producer's Done says will not come.
func (p *peer) told(d *sessionpb.Done) {
	if f := p.demands[session.JobID(d.Job)]; f != nil && p.heldUp && !d.Release && p.n.local() < f.deadline {
		for i, code := range d.Codes {
			f.over[i] = f.over[i] || code != sessionpb.Code_CODE_SENT
		}
	}
}

// dataLost tells the session that the data connections are gone.
func (p *peer) dataLost() {
	for _, f := range p.demands {
		for i, at := range f.supplied {
			f.over[i] = f.over[i] || at > 0
		}
	}
	p.core.DataLost(p.n.local(), "data connections ended")
	p.carry()
}

// limit is when a demand must have ended: at its deadline while a key has no word, else
// when the last of the bytes that were supplied are late; 0 when nothing is to come.
func (f *fetch) limit() (at time.Duration) {
	for i, x := range f.wants {
		switch {
		case x.ended || f.over[i]:
		case f.supplied[i] == 0:
			return f.deadline
		default:
			at = max(at, f.supplied[i])
		}
	}
	return at
}

// demandDone is the one end of a demand.
func (p *peer) demandDone(e session.DemandDone) {
	n := p.n
	f := p.demands[e.Job]
	if f == nil {
		n.w.fail("result twice", "node %d: demand %d at node %d has a second result", n.i, e.Job, p.i)
	}
	delete(p.demands, e.Job)
	now := n.local()
	if n.late(f.deadline) {
		n.w.fail("wait", "node %d: demand %d ends at %v, its deadline was %v", n.i, e.Job, now, f.deadline)
	}
	if len(e.Results) != len(f.wants) {
		n.w.fail("results", "node %d: demand %d has %d results for %d keys", n.i, e.Job, len(e.Results), len(f.wants))
	}
	for i, r := range e.Results {
		n.w.result.Causes[r.Cause]++
		f.c.req.crowded = f.c.req.crowded || r.Cause == session.Busy || r.Cause == session.Invalid // a bound of one of the two
		n.w.note(r.Cause.String(), n.i, p.i, uint64(e.Job)<<8|uint64(i))
		switch {
		case r.Cause == session.Open:
			n.w.fail("results", "node %d: demand %d ends and key %d is open", n.i, e.Job, i)
		case r.Cause == session.Refused && f.allowed != 0 && f.allowed == p.core.Status(now).BootID && strings.Contains(r.Text, "rules, deployment or caps of"):
			n.w.fail("leg", "node %d: demand %d key %d is refused here, although the pair with node %d is accepted: %s", n.i, e.Job, i, p.i, r.Text)
		case r.Cause == session.Deadline && now < f.deadline:
			n.w.fail("wait", "node %d: demand %d key %d ends by deadline at %v, before it, %v", n.i, e.Job, i, now, f.deadline)
		case r.Cause == session.TransferLate && (f.supplied[i] == 0 || now < f.supplied[i]):
			n.w.fail("wait", "node %d: demand %d key %d ends by %v at %v, its limit was %v", n.i, e.Job, i, r.Cause, now, f.supplied[i])
		case r.Cause == session.Transferred && f.wants[i].hold.zero():
			n.w.fail("results", "node %d: demand %d key %d is told to be transferred and is not here", n.i, e.Job, i)
		}
		f.c.lost(f.wants[i])
	}
	f.c.fetches = slices.DeleteFunc(f.c.fetches, func(o *fetch) bool { return o == f })
}

// awaitOthers waits, in poll, for chunks that other requests are writing.
func (c *consumer) awaitOthers(writing []*want) {
	bytes := 0
	for _, x := range writing {
		bytes += c.n.w.model.chunkBytes(x.ref.Group)
	}
	c.writing = append(c.writing, writing...)
	c.writeLimit = max(c.n.local(), min(c.deadline, c.n.pendingLimit(bytes))) // a slow lookup may have taken all of it
}

// poll looks at what c waits for in the tier.
func (c *consumer) poll() (changed bool) {
	if len(c.writing) == 0 || c.finished {
		return false
	}
	n := c.n
	now := n.local()
	if n.late(c.writeLimit) {
		n.w.fail("wait", "node %d: a chunk that is being written is waited for until %v, the limit was %v", n.i, now, c.writeLimit)
	}
	var left, late []*want
	for _, x := range c.writing {
		if x.ended { // a second plan has given it up
			continue
		}
		refs, found := n.tier.Pin(c.owner, []tier.Key{x.key})
		switch {
		case found[0] == tier.Readable:
			c.ended(x, n.pinned(c.owner, refs[0]))
			changed = true
		case found[0] == tier.Writing && now < c.writeLimit:
			left = append(left, x)
		case c.peer == nil || now >= c.deadline:
			c.lostLater(x)
			changed = true
		default:
			late = append(late, x)
		}
	}
	c.writing = left
	if len(late) > 0 {
		changed = true
		var slots []tier.Slot
		err := n.withRoom("", func() (err error) {
			slots, err = n.tier.Stage(c.owner, len(late))
			return err
		})
		for i, x := range late {
			if err != nil {
				c.lostLater(x)
				continue
			}
			x.slot = n.handed(slots[i])
		}
		if err == nil {
			c.fetch(late)
		}
	}
	c.reconsider()
	c.settle()
	return changed
}

// landed takes up a chunk whose bytes have come whole.
func (c *consumer) landed(x *want, sum uint32) bool {
	if x.ended {
		return false
	}
	h, err := c.n.publish(c.owner, x.slot, x.named, x.key, sum, c.n.w.model.chunkBytes(x.ref.Group))
	if err != nil {
		return false
	}
	c.ended(x, h)
	c.settle()
	return true
}

func (c *consumer) ended(x *want, h hold) {
	x.ended, x.hold = true, h
	c.open--
}

// lost ends a want that could not be had; its slot is free at once.
func (c *consumer) lost(x *want) {
	if x.ended {
		return
	}
	c.lostLater(x)
	c.reconsider()
	c.settle()
}

func (c *consumer) lostLater(x *want) {
	x.ended, c.doubt = true, true
	if x.slot != (tier.Slot{}) && !c.n.w.broken.Slot {
		if err := c.n.tier.Drop(x.slot); err != nil {
			c.n.w.fail("pin", "node %d: the slot of a chunk that did not come: %v", c.n.i, err)
		}
	}
	c.open--
}

func (c *consumer) demanded() []*want {
	out := slices.Clone(c.wants)
	for _, x := range c.spare {
		if x.asked {
			out = append(out, x)
		}
	}
	return out
}

// settle goes on once nothing is open: with a second plan, or to the load.
func (c *consumer) settle() {
	if !c.sealed || c.open > 0 || c.settled || c.finished {
		return
	}
	if !c.fell && !c.foretold() && len(c.spare) > 0 && c.n.local() < c.deadline &&
		slices.ContainsFunc(c.wants, func(x *want) bool { return x.pending && x.hold.zero() }) {
		c.fell = true
		c.fallBack()
		return
	}
	c.settled = true
	n := c.n
	n.w.after(time.Duration(c.req.LoadAfter), n, func() {
		if !c.finished {
			c.load()
		}
	})
}

func (c *consumer) here() []abi.States {
	m := &c.n.w.model
	known := make([]abi.States, len(m.Groups))
	for g := range known {
		known[g] = abi.NewStates(int(c.ask.PromptTokens / m.Groups[g].ChunkTokens))
	}
	for _, x := range c.demanded() {
		if !x.hold.zero() {
			known[x.ref.Group].Put(int(x.ref.Chunk), abi.Hit)
		}
	}
	return known
}

// fallBack mirrors consumer.fallBack: what has not come is a Miss, what is new is demanded.
func (c *consumer) fallBack() {
	known := c.here()
	for _, x := range c.spare {
		known[x.ref.Group].Put(int(x.ref.Chunk), abi.Hit)
	}
	demand := refs(must(c.n.w.plan.Settled(c.ask, known)).Demand)
	if c.peer != nil && !c.usable(c.peer) {
		demand = nil
	}
	var again []*want
	for _, x := range c.spare {
		if slices.Contains(demand, x.ref) {
			again = append(again, x)
		}
	}
	c.open++ // demandMore takes it back
	c.demandMore(again)
}

// demandMore mirrors consumer.demandMore: what a second plan adds is taken and demanded.
func (c *consumer) demandMore(again []*want) {
	missing, writing, err := c.take(again)
	c.open--
	c.rethink = false
	if err != nil {
		for _, x := range again {
			c.n.letGo(x.hold)
			x.hold, x.ended = hold{}, false
			c.doubt = true
		}
		again = nil
	}
	for _, x := range again {
		x.asked = true
	}
	c.open += len(missing) + len(writing)
	if len(writing) > 0 {
		c.awaitOthers(writing)
	}
	c.fetch(missing)
	c.reconsider()
	c.settle()
}

// load plans over what is here and reads it: the bytes must be those that were stored.
func (c *consumer) load() {
	c.n.moved = true
	n := c.n
	pl := must(n.w.plan.Settled(c.ask, c.here()))
	if pl.ResumeTokens > c.resume {
		n.w.fail("plan", "node %d: the plan over what arrived resumes at %d, above the planned %d", n.i, pl.ResumeTokens, c.resume)
	}
	by := map[plan.Ref]*want{}
	for _, x := range c.demanded() {
		by[x.ref] = x
	}
	for _, ref := range refs(pl.Demand) {
		x := by[ref]
		if x == nil || x.hold.zero() {
			n.w.fail("plan", "node %d: group %d chunk %d is planned and is not here", n.i, ref.Group, ref.Chunk)
		}
		if x.hold.verify() != nil || !isContent(x.key, x.hold.bytes) {
			n.w.fail("bytes", "node %d: request %d reads group %d chunk %d, and its bytes are not those that were stored", n.i, c.req.ID, ref.Group, ref.Chunk)
		}
	}
	result := "partial"
	switch {
	case pl.ResumeTokens == 0:
		result = "miss"
	case pl.ResumeTokens == c.resume:
		result = "hit"
	}
	c.req.resumed = pl.ResumeTokens
	c.req.outcome = result
	c.finish(false, "")
}

// finish ends the request: what is on its way is aborted, everything is let go.
func (c *consumer) finish(abort bool, cause string) {
	c.n.moved = true
	if c.finished {
		return
	}
	n := c.n
	c.finished = true
	for _, x := range c.writing {
		if !x.ended {
			c.lostLater(x)
		}
	}
	c.writing = nil
	if b := c.looking; b != nil {
		c.looking = nil
		for _, id := range b.ids {
			c.peer.core.Abort(n.local(), id, cause) // one that is answered has ended
			c.peer.carry()
		}
	}
	for _, f := range slices.Clone(c.fetches) {
		c.peer.core.Abort(n.local(), f.id, cause)
		c.peer.carry()
	}
	for _, x := range c.demanded() {
		n.letGo(x.hold)
		x.hold = hold{}
	}
	if pins, writes := n.tier.Release(c.owner); pins+writes > 0 {
		n.w.fail("pin", "node %d: request %d ends and leaves %d pins and %d writes", n.i, c.req.ID, pins, writes)
	}
	n.consumers = slices.DeleteFunc(n.consumers, func(o *consumer) bool { return o == c })
	if abort {
		c.result("aborted")
	} else {
		c.result(c.req.outcome)
	}
	n.w.touched(n)
}

// result is the one result of a request.
func (c *consumer) result(what string) {
	if c.req.done {
		c.n.w.fail("result twice", "request %d has a second result, %s", c.req.ID, what)
	}
	c.req.done = true
	c.req.crowded = c.req.crowded || c.n.crowded() || c.n.w.nodes[c.req.Producer].crowded()
	c.n.w.result.Results[what]++
	c.n.w.note("request "+what, c.n.i, c.req.Producer, uint64(c.req.ID))
}
