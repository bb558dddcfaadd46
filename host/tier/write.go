package tier

import "fmt"

// Presence says how Admit found a key.
type Presence uint8

const (
	// Admitted: the key was absent; it has a slot now, being written by the owner.
	Admitted Presence = iota
	// Readable: the key is readable already.
	Readable
	// Writing: somebody is writing the key already.
	Writing
	// Absent: the key has no slot. Pin reports it, Admit never does.
	Absent
)

// String returns the name of the presence.
func (p Presence) String() string {
	return [...]string{"admitted", "readable", "writing", "absent"}[p&3]
}

// An Admission is the answer for one key of Admit.
type Admission struct {
	Key  Key
	Slot Slot
	// Presence says whether Slot is the owner's to write (Admitted) or only how the
	// key was found. A found key is not pinned.
	Presence Presence
}

// Admit gives every absent key a slot in state writing, all or none. Keys that are
// present are reported and marked as used. When there is no room the error is an
// *ErrNoRoom and nothing was changed, neither content nor recency. Eviction never
// takes a key of the batch itself. A key that is listed twice is admitted once; its
// second answer is Writing.
func (p *Primary) Admit(owner Owner, keys []Key) ([]Admission, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	need, protected := p.weigh(keys)
	if err := p.checkRoom(need, protected); err != nil {
		return nil, err
	}
	p.touch(keys) // present keys are newest now, so eviction does not reach them
	for need > len(p.free) {
		p.evict()
	}
	out := make([]Admission, len(keys))
	var h *holdings
	for i := range keys {
		if s, ok := p.index[keys[i]]; ok {
			out[i] = Admission{Key: keys[i], Slot: Slot{Index: s, Epoch: p.slots[s].epoch}, Presence: Writing}
			if p.slots[s].state == slotReadable {
				out[i].Presence = Readable
			}
			continue
		}
		if h == nil {
			h = p.holdingsOf(owner)
		}
		slot := p.take(owner, h)
		s := &p.slots[slot.Index]
		s.key, s.named = keys[i], true
		p.index[keys[i]] = slot.Index
		out[i] = Admission{Key: keys[i], Slot: slot, Presence: Admitted}
	}
	p.touch(keys)
	return out, nil
}

// weigh counts the absent keys, and the idle slots that hold the others. A key that is
// listed twice counts once.
func (p *Primary) weigh(keys []Key) (need, protected int) {
	var absent map[Key]struct{} // made when needed: batches are often wholly present
	p.batch++
	for i := range keys {
		at, ok := p.index[keys[i]]
		if !ok {
			if absent == nil {
				absent = make(map[Key]struct{}, len(keys)-i)
			}
			absent[keys[i]] = struct{}{}
			continue
		}
		s := &p.slots[at]
		if s.batch != p.batch && s.state == slotReadable && s.pins == 0 {
			protected++
		}
		s.batch = p.batch
	}
	return len(absent), protected
}

func (p *Primary) checkRoom(need, protected int) error {
	if need <= len(p.free)+p.idle-protected {
		return nil
	}
	p.stats.Refused++
	return &ErrNoRoom{
		Need: need, Free: len(p.free), Evictable: p.idle - protected, Slots: len(p.slots),
		Pinned: p.counts[slotReadable] - p.idle + p.counts[slotDetached], Writing: p.counts[slotWriting] + p.counts[slotFenced],
	}
}

// Stage gives n slots in state writing that have no key yet, all or none: for chunks
// whose fate is not known when their bytes must be saved. Name gives one its key.
func (p *Primary) Stage(owner Owner, n int) ([]Slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	if n < 0 {
		return nil, fmt.Errorf("stage: %d slots wanted", n)
	}
	if err := p.checkRoom(n, 0); err != nil || n == 0 {
		return nil, err
	}
	for n > len(p.free) {
		p.evict()
	}
	h := p.holdingsOf(owner)
	out := make([]Slot, n)
	for i := range out {
		out[i] = p.take(owner, h)
	}
	return out, nil
}

// Name gives a staged slot its key: from now on lookups answer Pending. A key that is
// present is refused with ErrExists, and the slot stays as it was.
func (p *Primary) Name(slot Slot, key Key) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	s, err := p.at(slot, slotWriting)
	if err != nil {
		return err
	}
	if s.named {
		return fmt.Errorf("slot %d epoch %d: cannot be %v, because it is %v: %w", slot.Index, slot.Epoch, key, s.key, ErrExists)
	}
	if i, ok := p.index[key]; ok {
		return fmt.Errorf("slot %d epoch %d: key %v is in slot %d, %v: %w", slot.Index, slot.Epoch, key, i, p.slots[i].state, ErrExists)
	}
	s.key, s.named = key, true
	p.index[key] = slot.Index
	p.use(slot.Index)
	return nil
}

// Bytes returns a slot's memory: all of it while it is being written, its content while
// it is read. It is valid for as long as the caller holds its pin.
func (p *Primary) Bytes(slot Slot) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := p.at(slot, slotWriting, slotReadable, slotDetached)
	if err != nil {
		return nil, err
	}
	if s.state == slotWriting {
		return p.memory(slot.Index, p.slotBytes), nil
	}
	if s.pins == 0 {
		return nil, fmt.Errorf("slot %d epoch %d: nobody pins it for reading: %w", slot.Index, slot.Epoch, ErrNotPinned)
	}
	return p.memory(slot.Index, s.bytes), nil
}

// Commit ends a write: the slot's first n bytes are the chunk, and sum is their
// CRC-32C. With keep the write pin becomes a read pin of the same owner, which is
// returned; without it the Ref is zero. Watchers wake.
func (p *Primary) Commit(slot Slot, sum uint32, n int64, keep bool) (Ref, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return Ref{}, ErrClosed
	}
	s, err := p.at(slot, slotWriting)
	switch {
	case err != nil:
		return Ref{}, err
	case !s.named:
		return Ref{}, fmt.Errorf("commit slot %d epoch %d: %w: name it first", slot.Index, slot.Epoch, ErrUnnamed)
	case s.grabbed:
		return Ref{}, fmt.Errorf("commit slot %d epoch %d: %w", slot.Index, slot.Epoch, ErrBusy)
	case n < 0 || n > p.slotBytes:
		return Ref{}, fmt.Errorf("commit slot %d epoch %d: content is %d bytes, but a slot holds %d", slot.Index, slot.Epoch, n, p.slotBytes)
	}
	owner := p.endWrite(slot.Index)
	p.setState(s, slotReadable)
	s.owner, s.sum, s.bytes = Owner{}, sum, n
	p.residentBytes += n
	p.idle++
	var ref Ref
	if keep {
		ref = p.pin(owner, slot.Index)
	} else {
		p.relist(slot.Index)
	}
	p.tidy(owner)
	p.wake(slot.Index)
	return ref, nil
}

// endWrite takes the write pin from its owner.
func (p *Primary) endWrite(i uint32) Owner {
	owner := p.slots[i].owner
	if h := p.owners[owner]; h != nil {
		delete(h.writing, i)
	}
	return owner
}

// Drop ends a write that failed: the key is gone, watchers wake, and the slot is free.
// While the data plane has the slot grabbed it is fenced instead: its memory is reused
// only when the grab ends.
func (p *Primary) Drop(slot Slot) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.at(slot, slotWriting); err != nil {
		return err
	}
	owner := p.endWrite(slot.Index)
	p.drop(slot.Index)
	p.tidy(owner)
	p.settle()
	return nil
}

func (p *Primary) drop(i uint32) {
	s := &p.slots[i]
	p.forget(i)
	p.stats.Dropped++
	if s.grabbed {
		p.setState(s, slotFenced)
	} else {
		p.reclaim(i)
	}
	p.wake(i)
}

// Grab lets the data plane put bytes into a slot that is being written. dst is the
// whole slot. end must be called once no more bytes are written, whatever happened; it
// reports ErrStale when the write was dropped in the meantime, and calling it again
// changes nothing. While a slot is grabbed it cannot be committed or reused. A slot has
// at most one grab, because two writers could tear each other's bytes.
func (p *Primary) Grab(slot Slot) (dst []byte, end func() error, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, nil, ErrClosed
	}
	s, err := p.at(slot, slotWriting)
	if err != nil {
		return nil, nil, err
	}
	if s.grabbed {
		return nil, nil, fmt.Errorf("grab slot %d epoch %d: %w", slot.Index, slot.Epoch, ErrBusy)
	}
	s.grabbed, s.grabbedT = true, p.now()
	p.grabs++
	ended := false
	var result error
	return p.memory(slot.Index, p.slotBytes), func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !ended {
			ended = true
			result = p.ungrab(slot)
		}
		return result
	}, nil
}

func (p *Primary) ungrab(slot Slot) error {
	s := &p.slots[slot.Index]
	s.grabbed = false
	p.grabs--
	var err error
	if s.state == slotFenced {
		err = stale(slot, "its write was dropped while bytes arrived")
		p.reclaim(slot.Index)
	}
	p.settle()
	return err
}
