package host

import (
	"context"
	"errors"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/tier"
)

// A hold is the content of one chunk that stays where it is until it is let go:
// a read pin of a readable slot, or a private slot that has no key because another
// request was writing the key at the time.
type hold struct {
	bytes   []byte
	sum     uint32
	ref     tier.Ref
	private tier.Slot
}

func pinned(ref tier.Ref) hold { return hold{bytes: ref.Bytes, sum: ref.Sum, ref: ref} }

func (h *hold) zero() bool { return h.bytes == nil }

// isPrivate reports whether the hold is a copy without a key.
func (h *hold) isPrivate() bool { return !h.zero() && h.ref.Zero() }

// verify compares the bytes with the checksum made when they were stored.
func (h *hold) verify() error {
	if got := tier.Checksum(h.bytes); got != h.sum {
		return &tier.ErrChecksum{Want: h.sum, Got: got}
	}
	return nil
}

// letGo ends a hold.
func (n *Node) letGo(h hold) {
	switch {
	case h.zero():
	case !h.ref.Zero():
		_ = n.tier.Unpin(h.ref) // only ErrNotPinned, when the owner was released
	default:
		_ = n.tier.Drop(h.private)
	}
}

// name ends a private hold by giving the content to the tier under its key, unpinned. With
// an error, such as tier.ErrExists while another slot has the key, the hold goes on.
func (n *Node) name(h hold, key tier.Key) error {
	if err := n.tier.Name(h.private, key); err != nil {
		return err
	}
	if _, err := n.tier.Commit(h.private, h.sum, int64(len(h.bytes)), false); err != nil {
		_ = n.tier.Drop(h.private) // stale only when the tier is closed
	}
	return nil
}

// adopt gives private copies to the tier once their keys are free. While another request is
// still writing a key it waits, within the deadline for PENDING: when that request gives up,
// the copy is all there is. A copy that nobody needs is dropped.
func (n *Node) adopt(offers []offer) {
	var bytes int64
	for _, o := range offers {
		bytes += int64(len(o.hold.bytes))
	}
	ctx, cancel := context.WithTimeout(n.life, n.pendingLimit(bytes))
	defer cancel()
	for _, o := range offers {
		for !n.adopted(ctx, o) {
		}
	}
}

// adopted ends one private copy, or waits for a change and reports false.
func (n *Node) adopted(ctx context.Context, o offer) bool {
	changed := n.tier.Watch(o.key)
	err := n.name(o.hold, o.key)
	if err == nil {
		return true
	}
	state := abi.NewStates(1)
	n.tier.Lookup([]tier.Key{o.key}, state)
	if errors.Is(err, tier.ErrExists) && state.At(0) != abi.Hit && ctx.Err() == nil {
		select {
		case <-changed:
			return false
		case <-ctx.Done():
		}
	}
	n.letGo(o.hold)
	return true
}

// distrust takes a chunk whose bytes are wrong out of the tier, so that the next
// request stores or fetches it anew.
func (n *Node) distrust(h hold) {
	n.metrics.Checksum.WithLabelValues("slab").Inc()
	if !h.ref.Zero() {
		_ = n.tier.Invalidate(h.ref.Slot, tier.ReasonChecksum) // stale: gone already
	}
}

// publish ends the write of a slot whose first size bytes are the chunk: it becomes
// readable under its key, pinned for the slot's owner. When somebody else has the key,
// theirs is pinned if it is readable, and else the slot is kept as a private copy.
func (n *Node) publish(owner tier.Owner, slot tier.Slot, named bool, key tier.Key, sum uint32, size int64) (hold, error) {
	if !named {
		err := n.tier.Name(slot, key)
		if errors.Is(err, tier.ErrExists) {
			return n.share(owner, slot, key, sum, size)
		}
		if err != nil {
			return hold{}, err
		}
	}
	ref, err := n.tier.Commit(slot, sum, size, true)
	if err != nil {
		return hold{}, err
	}
	return pinned(ref), nil
}

func (n *Node) share(owner tier.Owner, slot tier.Slot, key tier.Key, sum uint32, size int64) (hold, error) {
	if refs, found := n.tier.Pin(owner, []tier.Key{key}); found[0] == tier.Readable {
		return pinned(refs[0]), n.tier.Drop(slot)
	}
	b, err := n.tier.Bytes(slot)
	if err != nil {
		return hold{}, err
	}
	return hold{bytes: b[:size:size], sum: sum, private: slot}, nil
}
