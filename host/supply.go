package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/host/transfer"
)

// sessions is the node as its peers' sessions see it (wire.Host). What a peer demands
// is served here; what this node demands is in fetch.go.
type sessions struct{ node *Node }

// peerJob names a job of a peer.
type peerJob struct {
	peer string
	id   session.JobID
}

// A serving is a peer's job in work on this node.
type serving struct {
	node   *Node
	peer   string
	job    session.Job
	serial session.JobID // in the meeting: a peer's next process may use an id again
	owner  tier.Owner    // of what is pinned for the job beside its transfer
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup // pushes, and the wait for chunks being written

	mu    sync.Mutex
	holds map[uint32]hold // what the tier holds, by index; each is in the peer's budget
}

// OnLookup implements wire.Host. Looking is not fetching: nothing is pinned or used.
func (s sessions) OnLookup(_ string, q session.Query) (abi.States, bool) {
	states := abi.NewStates(len(q.Keys))
	s.node.tier.Lookup(tierKeys(q.Keys), states)
	return states, true
}

// OnRelease implements wire.Host; lookups hold nothing.
func (s sessions) OnRelease(string, session.JobID) {}

// OnDemand implements wire.Host.
func (s sessions) OnDemand(peer string, j session.Job) {
	n := s.node
	number := requestNumber.Add(1)
	v := &serving{
		node: n, peer: peer, job: j, serial: session.JobID(number), holds: map[uint32]hold{},
		owner: tier.Owner{Kind: ownerPeer, ID: fmt.Sprintf("%s#%d.%d", peer, j.ID, number)},
	}
	v.ctx, v.stop = context.WithCancel(n.life)
	n.mu.Lock()
	n.servings[peerJob{peer, j.ID}] = v
	n.mu.Unlock()
	n.peerDemanded(&j)
	if j.Leg != session.LegProbe {
		n.meeting.demand(v)
		return
	}
	v.find()
}

// find answers a job of leg probe from the tier: what is readable is pinned and
// pushed, what is being written is waited for, and the rest is refused.
func (v *serving) find() {
	keys := tierKeys(v.job.Keys)
	pins, found := v.node.tier.Pin(v.owner, keys)
	var answer session.Answer
	var readable, miss, writing []uint32
	for i := range keys {
		switch found[i] {
		case tier.Readable:
			readable = append(readable, uint32(i))
		case tier.Writing:
			writing = append(writing, uint32(i))
		default:
			miss = append(miss, uint32(i))
		}
	}
	if len(miss) > 0 {
		answer.Refused = []session.Refusal{{Indices: miss, Reason: sessionpb.Reason_REASON_MISS}}
	}
	refs := make([]tier.Ref, len(readable))
	for n, i := range readable {
		refs[n] = pins[i]
	}
	v.take(readable, refs, &answer)
	answer.Last = len(writing) == 0
	v.node.peers.Answer(v.peer, v.job.ID, answer)
	if len(writing) > 0 {
		v.wg.Go(func() { v.await(keys, writing) })
	}
}

// take keeps pinned chunks for the job as far as the peer's budget goes, and adds to an answer
// what becomes of each.
func (v *serving) take(indices []uint32, refs []tier.Ref, answer *session.Answer) {
	keys := make([]session.Key, len(indices))
	for n, i := range indices {
		keys[n] = v.job.Keys[i]
	}
	fits, over := v.node.meeting.reserve(v.peer, keys)
	for n, i := range indices {
		if fits[n] {
			v.keep(i, pinned(refs[n]))
			answer.Available = append(answer.Available, i)
			continue
		}
		_ = v.node.tier.Unpin(refs[n]) // only ErrNotPinned, when the owner was released
		over.Indices = append(over.Indices, i)
	}
	if len(over.Indices) > 0 {
		answer.Refused = append(answer.Refused, over)
		v.node.tellOverBudget(v.peer, answer.Refused)
	}
}

func (v *serving) keep(i uint32, h hold) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.holds[i] = h
}

// release gives back what the tier holds for the job. Nothing reads it any more.
func (v *serving) release() {
	v.mu.Lock()
	keys := make([]session.Key, 0, len(v.holds))
	for i := range v.holds {
		keys = append(keys, v.job.Keys[i])
	}
	v.mu.Unlock()
	v.node.tier.Release(v.owner)
	v.node.meeting.giveBack(v.peer, keys)
}

// await waits for chunks that are being written, within the deadline for PENDING.
func (v *serving) await(keys []tier.Key, writing []uint32) {
	var bytes int64
	for _, i := range writing {
		bytes += v.node.chunkBytes(keys[i])
	}
	ctx, cancel := context.WithTimeout(v.ctx, v.node.pendingLimit(bytes))
	defer cancel()
	for _, i := range writing {
		ref, err := v.node.awaitReadable(ctx, v.owner, keys[i])
		if err != nil {
			v.node.peers.Answer(v.peer, v.job.ID, session.Answer{Refused: []session.Refusal{
				{Indices: []uint32{i}, Reason: sessionpb.Reason_REASON_MISS, Text: err.Error()}}})
			continue
		}
		var answer session.Answer
		v.take([]uint32{i}, []tier.Ref{ref}, &answer)
		v.node.peers.Answer(v.peer, v.job.ID, answer)
	}
	v.node.peers.Answer(v.peer, v.job.ID, session.Answer{Last: true})
}

var (
	errPendingLate = errors.New("it was being written, and was not readable in time")
	errPendingGone = errors.New("it was being written, and the write failed")
)

// awaitReadable waits until a key that is being written is readable, and pins it.
func (n *Node) awaitReadable(ctx context.Context, owner tier.Owner, key tier.Key) (tier.Ref, error) {
	for {
		changed := n.tier.Watch(key)
		refs, found := n.tier.Pin(owner, []tier.Key{key})
		switch found[0] {
		case tier.Readable:
			return refs[0], nil
		case tier.Absent:
			return tier.Ref{}, errPendingGone
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return tier.Ref{}, errPendingLate
		}
	}
}

// pendingLimit is how long a chunk that is being written is waited for.
func (n *Node) pendingLimit(bytes int64) time.Duration {
	return n.waits.pending + time.Duration(float64(bytes)/float64(n.waits.bytesPerSecond)*float64(time.Second))
}

func (n *Node) chunkBytes(k tier.Key) int64 {
	if g := k.Group(); g < uint32(len(n.groups)) {
		return n.groups[g].chunkBytes
	}
	return n.tier.SlotBytes()
}

func (n *Node) serving(peer string, id session.JobID) *serving {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.servings[peerJob{peer, id}]
}

// verifyBytesMax is how much of a push is verified ahead of sending it: enough that
// the data connections do not run dry, little enough to be out soon.
const verifyBytesMax = 16 << 20

// OnPush implements wire.Host.
func (s sessions) OnPush(peer string, id session.JobID, indices []uint32) {
	v := s.node.serving(peer, id)
	if v == nil {
		return
	}
	holds := make([]hold, len(indices))
	for k, i := range indices {
		holds[k] = v.hold(i)
	}
	v.wg.Go(func() { v.push(indices, holds) })
}

func (v *serving) hold(i uint32) hold {
	v.mu.Lock()
	h, ok := v.holds[i]
	v.mu.Unlock()
	if ok || v.job.Leg == session.LegProbe {
		return h
	}
	h, _ = v.node.meeting.hold(v.job.TransferID, tier.Key(v.job.Keys[i]))
	return h
}

// push verifies and sends chunks, a batch at a time. A chunk whose bytes are no longer
// those that were stored is not sent, and leaves the tier.
func (v *serving) push(indices []uint32, holds []hold) {
	n := v.node
	token := n.dataToken(v.peer)
	for start := 0; start < len(indices); {
		var items []transfer.Item
		var which []uint32
		var size int64
		for ; start < len(indices) && (size == 0 || size < verifyBytesMax); start++ {
			i, h := indices[start], holds[start]
			if h.zero() {
				n.peers.Pushed(v.peer, v.job.ID, int(i), session.PushFailed, "what was supplied is no longer held")
				continue
			}
			if err := h.verify(); err != nil {
				n.tellWrong("slab", v.peer, tier.Key(v.job.Keys[i]), err, "group", n.peerGroup(&v.job.Keys[i]), "transfer", v.job.TransferID)
				n.distrust(h)
				n.peers.Pushed(v.peer, v.job.ID, int(i), session.Checksum, err.Error())
				continue
			}
			size += int64(len(h.bytes))
			items = append(items, transfer.Item{Slot: v.job.Slots[i], Epoch: v.job.Epochs[i], Bytes: h.bytes, Sum: h.sum, Seq: i})
			which = append(which, i)
		}
		// The results say what the first error says, per item.
		_ = n.data.Push(v.ctx, token, uint64(v.job.ID), items, func(k int, err error) {
			cause, text := session.Transferred, ""
			switch {
			case err == nil:
				n.metrics.PeerWriteBytes.Add(float64(len(items[k].Bytes)))
			case errors.Is(err, transfer.ErrNoLane), errors.Is(err, transfer.ErrNoSession):
				cause, text = session.NoData, err.Error()
			default:
				cause, text = session.PushFailed, err.Error()
			}
			n.peers.Pushed(v.peer, v.job.ID, int(which[k]), cause, text)
		})
	}
}

// OnCancel implements wire.Host.
func (s sessions) OnCancel(peer string, id session.JobID, _ string) {
	if v := s.node.serving(peer, id); v != nil {
		v.stop()
	}
}

// OnJobEnd implements wire.Host. What the job holds is given back once nothing reads
// it any more.
func (s sessions) OnJobEnd(peer string, id session.JobID, results []session.Result, _ string) {
	n := s.node
	n.mu.Lock()
	v := n.servings[peerJob{peer, id}]
	delete(n.servings, peerJob{peer, id})
	n.mu.Unlock()
	if v == nil {
		return
	}
	v.stop()
	n.peerEnded(&v.job, results)
	n.wg.Go(func() {
		v.wg.Wait()
		if v.job.Leg != session.LegProbe {
			n.meeting.jobEnded(v, results) // it asks for nothing more
		}
		v.release()
	})
}
