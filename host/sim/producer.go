package sim

import (
	"errors"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// A producer mirrors host's producer: a request whose engine computes KV that others will
// fetch, driven by the real plan.Machine.
type producer struct {
	n        *node
	req      *Request
	tokens   uint64 // of its prompt
	transfer string // empty in a leg that has none
	owner    tier.Owner
	machine  *plan.Machine
	chunks   map[plan.Ref]*kept
	wanted   []plan.Ref
	offered  map[plan.Ref]bool
	offers   []offer
	own      []hold // the supply of leg probe while the prompt is computed
	done     uint64 // tokens computed
	finished bool
}

type kept struct {
	key    tier.Key
	slot   tier.Slot
	named  bool
	whole  bool
	sum    uint32
	hold   hold
	failed bool
	reason sessionpb.Reason
}

type offer struct {
	key  tier.Key
	hold hold
}

func (n *node) beginProducer(r *Request) {
	n.moved = true
	n.w.note("producer begins", n.i, r.Consumer, uint64(r.ID))
	if n.draining {
		n.w.result.Results["producer refused: draining"]++
		return
	}
	p := &producer{n: n, req: r, tokens: r.Tokens - r.Short, owner: n.newOwner("produce"), chunks: map[plan.Ref]*kept{}, offered: map[plan.Ref]bool{}}
	if legs[r.Leg].transfer {
		p.transfer = r.transfer()
		err := n.join.Begin(n.local(), p.transfer, r.Leg)
		n.carryJoin()
		if err != nil {
			n.w.result.Results["producer refused"]++
			return
		}
	}
	start := plan.Start{PromptTokens: p.tokens}
	wanted := must(n.w.plan.Wanted(start))
	p.wanted = refs(wanted)
	start.Held, start.ResidentTokens = p.pinHeld(wanted)
	p.machine = must(n.w.plan.Produce(start))
	if legs[r.Leg].foretold {
		if err := n.join.Promised(n.local(), p.transfer, p.promise()); err != nil {
			n.w.fail("promise", "node %d: the promise of transfer %s, just begun: %v", n.i, p.transfer, err)
		}
		n.carryJoin()
	}
	n.producers = append(n.producers, p)
	native := must(p.machine.ReuseTokens())
	if !r.Native {
		native = 0
	}
	fx, err := p.machine.Native(native)
	if err != nil { // from there a group cannot go on
		fx = must(p.machine.Native(0))
		native = 0
	}
	p.done = native
	p.run(&fx)
	n.w.after(r.Queue, n, p.step)
}

func (p *producer) key(ref plan.Ref) tier.Key {
	return p.req.Text.key(ref.Group, p.n.w.model.Groups[ref.Group].ChunkTokens, ref.Chunk)
}

// promise says what is known of the prompt's chunks before they are computed; it mirrors
// host's promise.
func (p *producer) promise() join.Promise {
	promised, open, _, err := p.machine.Foreseen()
	if err != nil {
		panic(err)
	}
	fates := map[join.Key]join.Fate{}
	for g := range p.n.w.model.Groups {
		for c := range uint32(p.tokens / p.n.w.model.Groups[g].ChunkTokens) {
			fate := join.Never
			switch has := func(b abi.Bitmap) bool { return int(c) < len(b)*64 && b.Get(int(c)) }; {
			case has(promised[g]):
				fate = join.WillCome
			case has(open[g]):
				fate = join.Open
			}
			fates[join.Key(p.key(plan.Ref{Group: g, Chunk: c}))] = fate
		}
	}
	return func(k *join.Key) (join.Fate, string) {
		if fate, ok := fates[*k]; ok {
			return fate, ""
		}
		return join.Never, ""
	}
}

func (p *producer) pinHeld(wanted []abi.Bitmap) (held []abi.Bitmap, resident uint64) {
	keys := make([]tier.Key, len(p.wanted))
	for i, ref := range p.wanted {
		keys[i] = p.key(ref)
	}
	pins, found := p.n.tier.Pin(p.owner, keys)
	held = make([]abi.Bitmap, len(wanted))
	for g := range held {
		held[g] = make(abi.Bitmap, len(wanted[g]))
	}
	resident = p.tokens
	for i, ref := range p.wanted {
		if found[i] != tier.Readable {
			resident = min(resident, uint64(ref.Chunk)*p.n.w.model.Groups[ref.Group].ChunkTokens)
			continue
		}
		held[ref.Group].Set(int(ref.Chunk))
		p.chunks[ref] = &kept{key: keys[i], hold: p.n.pinned(p.owner, pins[i])}
	}
	return held, resident
}

// step is one step of the engine.
func (p *producer) step() {
	p.n.moved = true
	if p.finished {
		return
	}
	n, r := p.n, p.req
	end := p.tokens + r.Generate
	if p.done >= end {
		p.finish(false, "")
		return
	}
	to := min(end, p.done+r.StepTokens)
	if p.done >= p.tokens {
		to = p.done + 1
	}
	for _, s := range p.machine.StopTokens() {
		if s > p.done {
			to = min(to, s)
			break
		}
	}
	fx := must(p.machine.Step(to))
	pause := r.StepTime
	if r.PreemptAt > p.done && r.PreemptAt <= to { // the engine takes it off the GPU, and comes back to it
		pause += r.Preempt
	}
	p.done = to
	p.run(&fx)
	n.w.after(pause, n, p.step)
}

// run carries out what the machine asks for: copies, then offers and drops.
func (p *producer) run(fx *plan.Effects) {
	for i := range fx.Copies {
		p.copy(&fx.Copies[i])
	}
	p.finishWork(fx)
	p.flush()
	if p.done >= p.tokens {
		p.letGoOwn()
	}
}

// letGoOwn leaves the supply of leg probe to the tier.
func (p *producer) letGoOwn() {
	for _, h := range p.own {
		p.n.letGo(h)
	}
	if len(p.own) > 0 {
		p.touch()
	}
	p.own = nil
}

func (p *producer) copy(c *plan.Copy) {
	n := p.n
	k := p.chunks[c.Ref]
	if c.Last && k != nil {
		k.key = p.key(c.Ref)
	}
	if k == nil {
		k = &kept{}
		if c.Promised || c.Last {
			k.key = p.key(c.Ref)
		}
		p.chunks[c.Ref] = k
		if err := p.room(k, c.Promised); err != nil {
			p.failed(k, c.Promised, err)
			return
		}
	}
	if k.failed || !k.hold.zero() {
		return
	}
	b, err := n.tier.Bytes(k.slot)
	if err != nil {
		p.failed(k, c.Promised, err)
		return
	}
	size := n.w.model.chunkBytes(c.Group)
	if n.w.model.Groups[c.Group].State {
		size = blockBytes
	}
	perChunk := int(n.w.model.Groups[c.Group].ChunkTokens / n.w.model.Groups[c.Group].BlockTokens)
	from := (int(c.Block) - int(c.Chunk)*perChunk) * blockBytes
	copy(b[from:from+int(c.Blocks)*blockBytes], content(p.key(c.Ref), size)[from:])
	if !c.Last {
		return
	}
	k.sum, k.whole = tier.Checksum(b[:size]), true
	if c.Promised {
		if err := p.publish(c.Group, k); err != nil {
			p.failed(k, c.Promised, err)
		}
	}
}

func (p *producer) room(k *kept, promised bool) error {
	n := p.n
	if promised {
		var adm []tier.Admission
		err := n.withRoom(p.transfer, func() (err error) {
			adm, err = n.tier.Admit(p.owner, []tier.Key{k.key})
			return err
		})
		if err != nil {
			return err
		}
		switch adm[0].Presence {
		case tier.Admitted:
			k.slot, k.named = n.handed(adm[0].Slot), true
			return nil
		case tier.Readable:
			if refs, found := n.tier.Pin(p.owner, []tier.Key{k.key}); found[0] == tier.Readable {
				k.hold = n.pinned(p.owner, refs[0])
				return nil
			}
		}
	}
	return n.withRoom(p.transfer, func() error {
		slots, err := n.tier.Stage(p.owner, 1)
		if err == nil {
			k.slot = n.handed(slots[0])
		}
		return err
	})
}

func (p *producer) publish(group int, k *kept) error {
	h, err := p.n.publish(p.owner, k.slot, k.named, k.key, k.sum, p.n.w.model.chunkBytes(group))
	if err != nil {
		return err
	}
	k.hold, k.whole = h, false
	return nil
}

func (p *producer) failed(k *kept, promised bool, err error) {
	k.reason = sessionpb.Reason_REASON_STORE_FAILED
	var full *tier.ErrNoRoom
	if errors.As(err, &full) {
		k.reason = sessionpb.Reason_REASON_NO_ROOM
		p.n.w.result.NoRoom++
		p.req.crowded = true
	}
	p.free(k)
	k.failed = true
	if promised {
		p.refuse(k)
	}
}

func (p *producer) refuse(k *kept) {
	if p.transfer != "" {
		_ = p.n.join.Refuse(p.n.local(), p.transfer, []join.Refusal{{Key: join.Key(k.key), Reason: k.reason}})
		p.n.carryJoin()
	}
}

func (p *producer) free(k *kept) {
	if !k.hold.zero() {
		p.n.letGo(k.hold)
	} else if k.slot != (tier.Slot{}) {
		if err := p.n.tier.Drop(k.slot); err != nil {
			p.n.w.fail("pin", "node %d: a producer's slot: %v", p.n.i, err)
		}
	}
	k.hold, k.slot, k.whole = hold{}, tier.Slot{}, false
}

func (p *producer) finishWork(fx *plan.Effects) {
	for _, ref := range fx.Offers {
		k := p.chunks[ref]
		if k == nil {
			continue
		}
		if !k.failed && k.hold.zero() && k.whole {
			if err := p.publish(ref.Group, k); err != nil {
				p.failed(k, false, err)
			}
		}
		if k.failed {
			p.refuse(k)
			continue
		}
		if k.hold.zero() {
			continue
		}
		p.offers = append(p.offers, offer{k.key, k.hold})
		delete(p.chunks, ref)
		p.offered[ref] = true
	}
	for _, ref := range fx.Drops {
		if k := p.chunks[ref]; k != nil {
			p.free(k)
			delete(p.chunks, ref)
		}
	}
}

// flush hands the offers to the transfer; without one they stay in the tier, pinned until the
// prompt's end.
func (p *producer) flush() {
	n := p.n
	offers := p.offers
	p.offers = nil
	if len(offers) == 0 {
		return
	}
	if p.transfer == "" {
		for _, o := range offers {
			if o.hold.isPrivate() {
				n.private = append(n.private, &private{o, n.pendingLimit(len(o.hold.bytes))})
				continue
			}
			p.own = append(p.own, o.hold)
		}
		return
	}
	keys := make([]join.Key, len(offers))
	if n.holds[p.transfer] == nil {
		n.holds[p.transfer] = map[tier.Key][]hold{}
	}
	for i, o := range offers {
		keys[i] = join.Key(o.key)
		n.holds[p.transfer][o.key] = append(n.holds[p.transfer][o.key], o.hold)
	}
	_ = n.join.Supply(n.local(), p.transfer, keys) // ended: each is given back
	n.carryJoin()
}

// finish is the last word.
func (p *producer) finish(abort bool, cause string) {
	p.n.moved = true
	if p.finished {
		return
	}
	n := p.n
	p.finished = true
	result := "producer ok"
	var fx plan.Effects
	if abort || p.done == 0 {
		result = "producer aborted"
		fx = must(p.machine.Abort())
	} else {
		fx = must(p.machine.Finish(p.done))
	}
	for i := range fx.Copies {
		p.copy(&fx.Copies[i])
	}
	p.finishWork(&fx)
	p.flush()
	if p.transfer != "" {
		if abort {
			var rest []join.Refusal
			for _, ref := range p.wanted {
				if !p.offered[ref] {
					rest = append(rest, join.Refusal{Key: join.Key(p.key(ref)), Reason: sessionpb.Reason_REASON_REQUEST_ABORTED, Text: cause})
				}
			}
			_ = n.join.Refuse(n.local(), p.transfer, rest)
			n.carryJoin()
		}
		_ = n.join.LastWord(n.local(), p.transfer)
		n.carryJoin()
		n.said[p.transfer] = n.local()
		n.afterLastWord(p.transfer)
	}
	p.letGoOwn()
	p.touch()
	p.release()
	n.producers = slices.DeleteFunc(n.producers, func(o *producer) bool { return o == p })
	n.w.result.Results[result]++
	n.w.note(result, n.i, p.req.Consumer, uint64(p.req.ID))
	n.w.touched(n)
}

// afterLastWord checks that no demand of the transfer waits on.
func (n *node) afterLastWord(transfer string) {
	for _, v := range n.servings {
		if v.asked && v.job.TransferID == transfer && slices.Contains(v.words, noWord) {
			n.w.fail("last word", "node %d: job %d waits on after the transfer's last word", n.i, v.job.ID)
		}
	}
}

// touch marks the supply as used, so that the head of the prompt ends up newest.
func (p *producer) touch() {
	var keys []tier.Key
	for _, ref := range p.wanted {
		if p.offered[ref] {
			keys = append(keys, p.key(ref))
		}
	}
	p.n.tier.Touch(keys)
}

func (p *producer) release() {
	for _, ref := range sortedRefs(p.chunks) {
		p.free(p.chunks[ref])
	}
	p.chunks = nil
}

// sortedRefs gives a map's chunks an order.
func sortedRefs(m map[plan.Ref]*kept) []plan.Ref {
	out := make([]plan.Ref, 0, len(m))
	for ref := range m {
		out = append(out, ref)
	}
	slices.SortFunc(out, func(a, b plan.Ref) int {
		if a.Group != b.Group {
			return a.Group - b.Group
		}
		return int(a.Chunk) - int(b.Chunk)
	})
	return out
}
