package sim

import (
	"errors"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/tier"
)

// A hold is the content of one chunk that stays until it is let go; it mirrors host's hold.
type hold struct {
	bytes   []byte
	sum     uint32
	ref     tier.Ref
	private tier.Slot
	owner   tier.Owner
}

func (h *hold) zero() bool      { return h.bytes == nil }
func (h *hold) isPrivate() bool { return !h.zero() && h.ref.Zero() }

func (h *hold) verify() error {
	if got := tier.Checksum(h.bytes); got != h.sum {
		return &tier.ErrChecksum{Want: h.sum, Got: got}
	}
	return nil
}

// pinned makes a hold of a pin, whose bytes must be what its key names.
func (n *node) pinned(owner tier.Owner, ref tier.Ref) hold {
	if !isContent(ref.Key, ref.Bytes) {
		n.w.fail("bytes", "node %d: slot %d epoch %d is readable as %v and holds something else", n.i, ref.Slot.Index, ref.Slot.Epoch, ref.Key)
	}
	return hold{bytes: ref.Bytes, sum: ref.Sum, ref: ref, owner: owner}
}

func (n *node) letGo(h hold) {
	var err error
	switch {
	case h.zero():
	case !h.ref.Zero():
		err = n.tier.Unpin(h.ref)
	default:
		err = n.tier.Drop(h.private)
	}
	if err != nil {
		n.w.fail("pin", "node %d: a hold of %v is let go and was not held: %v", n.i, h.owner, err)
	}
}

// publish mirrors Node.publish.
func (n *node) publish(owner tier.Owner, slot tier.Slot, named bool, key tier.Key, sum uint32, size int) (hold, error) {
	if !named {
		err := n.tier.Name(slot, key)
		if errors.Is(err, tier.ErrExists) {
			return n.share(owner, slot, key, sum, size)
		}
		if err != nil {
			return hold{}, err
		}
	}
	ref, err := n.tier.Commit(slot, sum, int64(size), true)
	if err != nil {
		return hold{}, err
	}
	return n.pinned(owner, ref), nil
}

func (n *node) share(owner tier.Owner, slot tier.Slot, key tier.Key, sum uint32, size int) (hold, error) {
	if refs, found := n.tier.Pin(owner, []tier.Key{key}); found[0] == tier.Readable {
		return n.pinned(owner, refs[0]), n.tier.Drop(slot)
	}
	b, err := n.tier.Bytes(slot)
	if err != nil {
		return hold{}, err
	}
	return hold{bytes: b[:size:size], sum: sum, private: slot, owner: owner}, nil
}

// name gives a private copy to the tier under its key, unpinned.
func (n *node) name(h hold, key tier.Key) error {
	if err := n.tier.Name(h.private, key); err != nil {
		return err
	}
	if _, err := n.tier.Commit(h.private, h.sum, int64(len(h.bytes)), false); err != nil {
		_ = n.tier.Drop(h.private)
	}
	return nil
}

// A private copy waits until its key is free; it mirrors Node.adopt.
type private struct {
	offer
	limit time.Duration
}

func (n *node) adopt() (changed bool) {
	left := n.private[:0]
	for _, x := range n.private {
		err := n.name(x.hold, x.key)
		if err == nil {
			changed = true
			continue
		}
		state := abi.NewStates(1)
		n.tier.Lookup([]tier.Key{x.key}, state)
		if errors.Is(err, tier.ErrExists) && state.At(0) != abi.Hit && n.local() < x.limit {
			left = append(left, x)
			continue
		}
		n.letGo(x.hold)
		changed = true
	}
	n.private = left
	return changed
}

// carryJoin carries out the effects of the join; it mirrors meeting.do.
func (n *node) carryJoin() {
	n.w.touched(n)
	for effects := n.join.Take(); len(effects) > 0; effects = n.join.Take() {
		n.moved = true
		for _, e := range effects {
			switch e := e.(type) {
			case join.Answer:
				n.answerJob(e)
			case join.Free:
				n.freeHold(e.Transfer, tier.Key(e.Key))
			}
		}
	}
}

func (n *node) freeHold(transfer string, key tier.Key) {
	stack := n.holds[transfer][key]
	if len(stack) == 0 {
		n.w.fail("pin", "node %d: the join gives back %v of %s, which nobody holds", n.i, key, transfer)
	}
	if n.w.broken.Pin {
		return
	}
	if h := stack[len(stack)-1]; !h.isPrivate() || n.name(h, key) != nil {
		n.letGo(h)
	}
	if len(stack) > 1 {
		n.holds[transfer][key] = stack[:len(stack)-1]
		return
	}
	delete(n.holds[transfer], key)
	if len(n.holds[transfer]) == 0 {
		delete(n.holds, transfer)
	}
}

// withRoom mirrors meeting.withRoom: the oldest supply that nobody has asked for goes first.
func (n *node) withRoom(transfer string, admit func() error) error {
	for {
		err := admit()
		var full *tier.ErrNoRoom
		if !errors.As(err, &full) {
			return err
		}
		shed := n.join.Shed(n.local(), full.Need-full.Free-full.Evictable, transfer)
		n.carryJoin()
		if !shed {
			return err
		}
	}
}

func (n *node) pendingLimit(bytes int) time.Duration {
	return n.local() + n.w.waits.pending + time.Duration(float64(bytes)/float64(n.w.waits.bytesPerSec)*float64(time.Second))
}
