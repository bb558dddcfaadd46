package sim

import (
	"slices"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
)

// What a job of a peer has heard of a key.
const (
	noWord byte = iota
	wordAvailable
	wordRefused
)

// A serving mirrors host's serving: a peer's job in work on this node.
type serving struct {
	p          *peer
	job        session.Job
	leg        leg
	owner      tier.Owner
	holds      map[uint32]hold // what the tier holds beside a transfer, by index; in the peer's budget
	words      []byte
	awaits     []uint32
	awaitLimit time.Duration
	asked      bool          // the join has it
	pushing    int           // chunks whose push has not ended
	lease      time.Duration // local: when what is being pushed lapses without a Renew
	stopped    bool
}

func (n *node) answerLookup(p *peer, q session.Query) {
	states := abi.NewStates(len(q.Keys))
	keys := make([]tier.Key, len(q.Keys))
	for i := range keys {
		keys[i] = tier.Key(q.Keys[i])
	}
	n.tier.Lookup(keys, states)
	p.core.AnswerLookup(n.local(), q.ID, states)
}

// demanded begins a job of a peer. The host's answer comes a moment later: it is another
// goroutine's.
func (p *peer) demanded(j session.Job) {
	n := p.n
	if p.servings[j.ID] != nil {
		n.w.fail("job twice", "node %d: job %d of node %d begins twice", n.i, j.ID, p.i)
	}
	v := &serving{p: p, job: j, leg: legs[j.Leg], owner: n.newOwner("peer"), holds: map[uint32]hold{}, words: make([]byte, len(j.Keys))}
	p.servings[j.ID] = v
	n.servings = append(n.servings, v)
	n.w.note("demanded", n.i, p.i, uint64(j.ID))
	if !p.allowed && v.leg.transfer {
		n.w.fail("leg", "node %d: node %d demands in leg %s, and the pair is not accepted here", n.i, p.i, j.Leg)
	}
	if len(j.Keys) > n.w.sched.keysMax(n.i) {
		n.w.fail("keys", "node %d: node %d demands %d keys; at most %d are allowed", n.i, p.i, len(j.Keys), n.w.sched.keysMax(n.i))
	}
	n.w.boundary(PhaseSupply, p.i, n.i, true)
	n.w.after(time.Duration(n.w.rnd.between(1, 50))*time.Microsecond, n, func() {
		switch {
		case p.servings[j.ID] != v:
		case v.leg.transfer:
			v.asked = true
			n.join.Demand(n.local(), name(p.i), j)
			n.carryJoin()
			if at, ok := n.said[j.TransferID]; ok && n.local()-at < n.w.joins.FinishedAge {
				n.afterLastWord(j.TransferID) // a late demand is answered at once
			}
		default:
			v.find()
		}
	})
}

// answer gives the core words on a job.
func (v *serving) answer(a session.Answer) {
	for _, i := range a.Available {
		v.words[i] = wordAvailable
	}
	for _, r := range a.Refused {
		for _, i := range r.Indices {
			v.words[i] = wordRefused
		}
	}
	if a.Last {
		for i := range v.words {
			if v.words[i] == noWord {
				v.words[i] = wordRefused
			}
		}
	}
	v.p.core.Answer(v.p.n.local(), v.job.ID, a)
	v.p.carry()
}

func (n *node) answerJob(e join.Answer) {
	for _, p := range n.peers {
		if p != nil && name(p.i) == e.Peer {
			if v := p.servings[e.Job]; v != nil {
				v.answer(e.Answer)
			}
		}
	}
}

// find answers a job of leg probe from the tier.
func (v *serving) find() {
	n := v.p.n
	keys := make([]tier.Key, len(v.job.Keys))
	for i := range keys {
		keys[i] = tier.Key(v.job.Keys[i])
	}
	pins, found := n.tier.Pin(v.owner, keys)
	var a session.Answer
	var miss []uint32
	bytes := 0
	for i := range keys {
		switch found[i] {
		case tier.Readable:
			v.take(uint32(i), n.pinned(v.owner, pins[i]), &a)
		case tier.Writing:
			v.awaits = append(v.awaits, uint32(i))
			bytes += n.w.model.chunkBytes(int(keys[i].Group()))
		default:
			miss = append(miss, uint32(i))
		}
	}
	if len(miss) > 0 {
		a.Refused = append(a.Refused, session.Refusal{Indices: miss, Reason: sessionpb.Reason_REASON_MISS})
	}
	a.Last = len(v.awaits) == 0
	v.awaitLimit = n.pendingLimit(bytes)
	v.answer(a)
}

// take mirrors serving.take: a pinned chunk is kept as far as the peer's budget goes.
func (v *serving) take(i uint32, h hold, a *session.Answer) {
	n := v.p.n
	if n.join.Reserve(name(v.p.i), &v.job.Keys[i]) {
		v.holds[i] = h
		a.Available = append(a.Available, i)
		return
	}
	n.letGo(h)
	n.w.result.OverBudget++
	a.Refused = append(a.Refused, session.Refusal{Indices: []uint32{i}, Reason: sessionpb.Reason_REASON_BUSY, Text: n.join.OverBudget()})
}

// elsewhere mirrors meeting.elsewhere: leg demand sends what the tier holds, whatever the
// transfer's plan says.
func (n *node) elsewhere(peer string, job session.JobID, i int, k *session.Key) bool {
	for _, p := range n.peers {
		if p == nil || name(p.i) != peer || p.servings[job] == nil {
			continue
		}
		v := p.servings[job]
		refs, found := n.tier.Pin(v.owner, []tier.Key{tier.Key(*k)})
		if found[0] != tier.Readable {
			return false
		}
		h := n.pinned(v.owner, refs[0])
		if !n.join.Reserve(peer, k) {
			n.letGo(h)
			return false
		}
		v.holds[uint32(i)] = h
		n.w.result.Elsewhere++
		return true
	}
	return false
}

// poll looks at the chunks that are being written.
func (v *serving) poll() (changed bool) {
	n := v.p.n
	if len(v.awaits) == 0 || v.stopped || v.p.servings[v.job.ID] != v {
		return false
	}
	now := n.local()
	if n.late(v.awaitLimit) {
		n.w.fail("wait", "node %d: job %d of node %d waits for a chunk that is being written until %v, the limit was %v", n.i, v.job.ID, v.p.i, now, v.awaitLimit)
	}
	var left, miss []uint32
	var a session.Answer
	for _, i := range v.awaits {
		refs, found := n.tier.Pin(v.owner, []tier.Key{tier.Key(v.job.Keys[i])})
		switch {
		case found[0] == tier.Readable:
			v.take(i, n.pinned(v.owner, refs[0]), &a)
		case found[0] == tier.Writing && now < v.awaitLimit:
			left = append(left, i)
		default:
			miss = append(miss, i)
		}
	}
	v.awaits = left
	if len(a.Available)+len(a.Refused)+len(miss) == 0 {
		return false
	}
	a.Last = len(left) == 0
	if len(miss) > 0 {
		a.Refused = append(a.Refused, session.Refusal{Indices: miss, Reason: sessionpb.Reason_REASON_MISS})
	}
	v.answer(a)
	return true
}

// pushJob mirrors sessions.OnPush.
func (p *peer) pushJob(e session.Push) {
	v := p.servings[e.Job]
	if v == nil {
		p.n.w.fail("push", "node %d: keys of job %d of node %d are to be pushed, and the job is not in work", p.n.i, e.Job, p.i)
	}
	var items []*item
	for _, i := range e.Indices {
		h := v.hold(i)
		if h.zero() {
			p.n.w.fail("push", "node %d: what was supplied for job %d of node %d is not held", p.n.i, e.Job, p.i)
		}
		items = append(items, &item{v, i, h})
	}
	if v.pushing == 0 {
		v.lease = p.n.local() + p.n.w.limits.Lease
	}
	v.pushing += len(items)
	p.push(items)
}

func (v *serving) hold(i uint32) hold {
	if h := v.holds[i]; !h.zero() || !v.leg.transfer {
		return h
	}
	if stack := v.p.n.holds[v.job.TransferID][tier.Key(v.job.Keys[i])]; len(stack) > 0 {
		return stack[0]
	}
	return hold{}
}

// stop ends the pushes of a job: what no lane has taken is not sent.
func (v *serving) stop() {
	v.stopped = true
	v.p.out.items = slices.DeleteFunc(v.p.out.items, func(it *item) bool { return it.v == v })
}

// jobEnded is the one end of a peer's job.
func (p *peer) jobEnded(e session.JobEnded) {
	n := p.n
	v := p.servings[e.Job]
	if v == nil {
		n.w.fail("result twice", "node %d: job %d of node %d ends twice", n.i, e.Job, p.i)
	}
	now := n.local()
	if n.late(v.job.Deadline) {
		n.w.fail("wait", "node %d: job %d of node %d ends at %v, its deadline was %v", n.i, e.Job, p.i, now, v.job.Deadline)
	}
	if v.pushing > 0 && !v.stopped {
		n.w.fail("push", "node %d: job %d of node %d ends while %d chunks are being pushed, and nobody has cancelled them", n.i, e.Job, p.i, v.pushing)
	}
	for _, r := range e.Results {
		if r.Cause == session.Lapsed && now < v.lease {
			n.w.fail("wait", "node %d: job %d of node %d lapses at %v, its lease is to %v", n.i, e.Job, p.i, now, v.lease)
		}
		if r.Cause == session.Lapsed {
			n.w.result.Lapsed++
		}
	}
	n.w.note("job ended", n.i, p.i, uint64(e.Job))
	delete(p.servings, e.Job)
	n.servings = slices.DeleteFunc(n.servings, func(o *serving) bool { return o == v })
	v.stop()
	if v.leg.transfer {
		n.join.JobEnded(now, name(p.i), e.Job, e.Results)
		n.carryJoin()
	}
	for i := range v.holds {
		if n.w.broken.Budget {
			break
		}
		n.join.Return(name(p.i), &v.job.Keys[i])
	}
	held := len(v.holds)
	if pins, _ := n.tier.Release(v.owner); pins != held {
		n.w.fail("pin", "node %d: job %d of node %d held %d chunks, the tier knows %d", n.i, e.Job, p.i, held, pins)
	}
}
