package tier

import (
	"cmp"
	"fmt"
	"slices"
)

// A Ref is one read pin. Its bytes stay as they are until Unpin or Release.
type Ref struct {
	Key  Key
	Slot Slot
	// Bytes is the content, in the slab. It must not be written.
	Bytes []byte
	// Sum is the CRC-32C that was carried with the content.
	Sum uint32

	id uint64
}

// Zero reports whether r is no pin.
func (r Ref) Zero() bool { return r.id == 0 }

// Verify compares the bytes with their checksum; the error is an *ErrChecksum. It is
// called when bytes leave a slot for engine memory.
func (r Ref) Verify() error {
	if got := Checksum(r.Bytes); got != r.Sum {
		return &ErrChecksum{Want: r.Sum, Got: got}
	}
	return nil
}

// Pin pins every key that is readable and marks the keys as used. refs[i] belongs to
// keys[i] and is zero unless found[i] is Readable.
func (p *Primary) Pin(owner Owner, keys []Key) (refs []Ref, found []Presence) {
	p.mu.Lock()
	defer p.mu.Unlock()
	refs, found = make([]Ref, len(keys)), make([]Presence, len(keys))
	for i := range keys {
		s, ok := p.index[keys[i]]
		switch {
		case !ok || p.closed:
			found[i] = Absent
		case p.slots[s].state == slotReadable:
			found[i] = Readable
			refs[i] = p.pin(owner, s)
		default:
			found[i] = Writing
		}
	}
	p.touch(keys)
	return refs, found
}

// pin adds a read pin to a readable slot.
func (p *Primary) pin(owner Owner, i uint32) Ref {
	s := &p.slots[i]
	if s.pins == 0 {
		p.idle--
	}
	s.pins++
	p.pinID++
	p.pins[p.pinID] = pin{slot: i, owner: owner, since: p.now()}
	p.holdingsOf(owner).pins[p.pinID] = struct{}{}
	return Ref{Key: s.key, Slot: Slot{Index: i, Epoch: s.epoch}, Bytes: p.memory(i, s.bytes), Sum: s.sum, id: p.pinID}
}

// Unpin ends a pin. A pin that is gone, because it was ended before or its owner was
// released, is refused with ErrNotPinned.
func (p *Primary) Unpin(ref Ref) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	pn, ok := p.pins[ref.id]
	if !ok {
		return fmt.Errorf("unpin slot %d epoch %d: %w", ref.Slot.Index, ref.Slot.Epoch, ErrNotPinned)
	}
	p.unpin(ref.id, pn)
	p.tidy(pn.owner)
	p.settle()
	return nil
}

func (p *Primary) unpin(id uint64, pn pin) {
	delete(p.pins, id)
	delete(p.owners[pn.owner].pins, id)
	s := &p.slots[pn.slot]
	if s.pins--; s.pins > 0 {
		return
	}
	if s.state == slotDetached {
		p.reclaim(pn.slot)
		return
	}
	p.idle++
	p.relist(pn.slot)
}

// Release ends everything that an owner holds: read pins, and writes, which are
// dropped. It returns how many of each there were.
func (p *Primary) Release(owner Owner) (pins, writes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.owners[owner]
	if h == nil {
		return 0, 0
	}
	pins, writes = len(h.pins), len(h.writing)
	slots := make([]uint32, 0, writes)
	for i := range h.writing {
		slots = append(slots, i)
	}
	slices.Sort(slots) // so that the free slots do not depend on the order of a map
	for _, i := range slots {
		p.drop(i)
	}
	clear(h.writing)
	ids := make([]uint64, 0, pins)
	for id := range h.pins {
		ids = append(ids, id)
	}
	// Newest first, so that each goes back to the old end of the recency list.
	slices.SortFunc(ids, func(a, b uint64) int {
		return cmp.Compare(p.slots[p.pins[b].slot].stamp, p.slots[p.pins[a].slot].stamp)
	})
	for _, id := range ids {
		p.unpin(id, p.pins[id])
	}
	delete(p.owners, owner)
	p.settle()
	return pins, writes
}

// A Reason says why content was found to be wrong.
type Reason string

const (
	// ReasonChecksum: the bytes do not match the checksum carried with them.
	ReasonChecksum Reason = "checksum"
	// ReasonLost: what the slot stands for is no longer there.
	ReasonLost Reason = "lost"
)

// Invalidate takes a readable slot's key out of the index at once: the next lookup is a
// miss. Readers that hold pins keep the memory until they unpin.
func (p *Primary) Invalidate(slot Slot, why Reason) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	s, err := p.at(slot, slotReadable)
	if err != nil {
		return err
	}
	if why == ReasonChecksum {
		p.stats.InvalidChecksum++
	} else {
		p.stats.InvalidLost++
	}
	p.forget(slot.Index)
	if s.pins > 0 {
		p.setState(s, slotDetached)
	} else {
		p.reclaim(slot.Index)
	}
	return nil
}
