package tier

import "fmt"

// check returns the first broken invariant. Tests call it after every step.
func (p *Primary) check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range []func() error{p.checkSlots, p.checkOwners, p.checkRecency} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

func (p *Primary) checkSlots() error {
	var counts [len(slotStateNames)]int
	var resident int64
	idle, grabs, named := 0, 0, 0
	pins := map[uint32]int{}
	for _, pn := range p.pins {
		pins[pn.slot]++
	}
	for i := range p.slots {
		s := &p.slots[i]
		bad := func(what string) error {
			return fmt.Errorf("slot %d epoch %d is %v and %s: %+v", i, s.epoch, s.state, what, *s)
		}
		counts[s.state]++
		if s.named {
			named++
			if at, ok := p.index[s.key]; !ok || at != uint32(i) {
				return bad("its key is not in the index")
			}
		}
		if s.grabbed {
			grabs++
		}
		if s.pins != pins[uint32(i)] {
			return bad(fmt.Sprintf("has %d pins on record", pins[uint32(i)]))
		}
		hasOwner := s.owner != Owner{}
		switch s.state {
		case slotFree:
			if s.named || s.grabbed || s.pins != 0 || hasOwner || s.listed || s.watch != nil {
				return bad("somebody holds it")
			}
		case slotWriting:
			if !hasOwner || s.pins != 0 {
				return bad("it must have a writer and no readers")
			}
			if _, ok := p.owners[s.owner].writing[uint32(i)]; !ok {
				return bad("its owner does not know of it")
			}
		case slotReadable:
			if !s.named || s.grabbed || hasOwner || s.watch != nil {
				return bad("it must have a key and no writer")
			}
			resident += s.bytes
			if s.pins == 0 {
				idle++
				if !s.listed {
					return bad("it could never be evicted")
				}
			}
		case slotDetached:
			if s.named || s.pins == 0 || s.listed {
				return bad("it must have readers and no key")
			}
		case slotFenced:
			if s.named || !s.grabbed || !hasOwner || s.listed {
				return bad("it must be grabbed, with an owner and without a key")
			}
		}
	}
	switch {
	case counts != p.counts || idle != p.idle || grabs != p.grabs || resident != p.residentBytes:
		return fmt.Errorf("counts %v idle %d grabs %d resident %d, but the slots say %v, %d, %d, %d",
			p.counts, p.idle, p.grabs, p.residentBytes, counts, idle, grabs, resident)
	case named != len(p.index):
		return fmt.Errorf("%d keys in the index, %d slots with a key", len(p.index), named)
	case len(p.free) != counts[slotFree]:
		return fmt.Errorf("%d slots in the free list, %d free", len(p.free), counts[slotFree])
	}
	return p.checkFree()
}

func (p *Primary) checkFree() error {
	seen := map[uint32]bool{}
	for _, i := range p.free {
		if seen[i] || p.slots[i].state != slotFree {
			return fmt.Errorf("slot %d is in the free list twice, or not free", i)
		}
		seen[i] = true
	}
	return nil
}

func (p *Primary) checkOwners() error {
	pins, writing := 0, 0
	for o, h := range p.owners {
		if len(h.pins)+len(h.writing) == 0 {
			return fmt.Errorf("owner %v holds nothing and is on record", o)
		}
		pins += len(h.pins)
		writing += len(h.writing)
		for id := range h.pins {
			if p.pins[id].owner != o {
				return fmt.Errorf("pin %d of owner %v is on record for %v", id, o, p.pins[id].owner)
			}
		}
		for i := range h.writing {
			if p.slots[i].owner != o || p.slots[i].state != slotWriting {
				return fmt.Errorf("owner %v claims to write slot %d, which is %v of %v", o, i, p.slots[i].state, p.slots[i].owner)
			}
		}
	}
	if pins != len(p.pins) || writing != p.counts[slotWriting] {
		return fmt.Errorf("owners hold %d pins and %d writes, on record are %d and %d", pins, writing, len(p.pins), p.counts[slotWriting])
	}
	return nil
}

func (p *Primary) checkRecency() error {
	newer, steps := int32(none), 0
	for i := p.newest; i != none; i = p.slots[i].older {
		s := &p.slots[i]
		if !s.listed || s.newer != newer || !s.named {
			return fmt.Errorf("recency list is broken at slot %d: %+v", i, *s)
		}
		if newer != none && p.slots[newer].stamp <= s.stamp && len(p.slots) <= relistStepsMax {
			return fmt.Errorf("slot %d comes after slot %d in the recency list, but is not older", i, newer)
		}
		if newer = i; steps > len(p.slots) {
			return fmt.Errorf("recency list has a loop")
		}
		steps++
	}
	if p.oldest != newer {
		return fmt.Errorf("recency list ends at slot %d, oldest is %d", newer, p.oldest)
	}
	for i := range p.slots {
		if p.slots[i].listed {
			steps--
		}
	}
	if steps != 0 {
		return fmt.Errorf("recency list has %d slots more than are marked as listed", steps)
	}
	return nil
}
