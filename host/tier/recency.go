package tier

// The recency list holds the slots in the index, newest first, pinned and writing ones
// too. Eviction takes from the old end; a slot that it meets there and cannot take is
// unlisted, so it is met once and not again at each eviction. When its pins end, it
// goes back to its place: everything older was evicted or unlisted in the meantime, so
// that place is at or near the old end.

// relistStepsMax bounds the walk to the exact place of a slot that comes back. Only
// slots that came back before it can be in the way; beyond this many the order among
// them is not worth the walk.
const relistStepsMax = 64

// use makes a slot the newest.
func (p *Primary) use(i uint32) {
	p.unlist(i)
	s := &p.slots[i]
	p.stamp++
	s.stamp = p.stamp
	s.listed, s.newer, s.older = true, none, p.newest
	if p.newest != none {
		p.slots[p.newest].newer = int32(i)
	} else {
		p.oldest = int32(i)
	}
	p.newest = int32(i)
}

func (p *Primary) unlist(i uint32) {
	s := &p.slots[i]
	if !s.listed {
		return
	}
	if s.newer != none {
		p.slots[s.newer].older = s.older
	} else {
		p.newest = s.older
	}
	if s.older != none {
		p.slots[s.older].newer = s.newer
	} else {
		p.oldest = s.newer
	}
	s.listed = false
}

// relist puts an idle slot back into the list by its stamp.
func (p *Primary) relist(i uint32) {
	s := &p.slots[i]
	if s.listed {
		return
	}
	newer := p.oldest
	for steps := 0; newer != none && p.slots[newer].stamp < s.stamp && steps < relistStepsMax; steps++ {
		newer = p.slots[newer].newer
	}
	s.listed, s.newer = true, newer
	if newer == none {
		s.older = p.newest
		p.newest = int32(i)
	} else {
		s.older = p.slots[newer].older
		p.slots[newer].older = int32(i)
	}
	if s.older == none {
		p.oldest = int32(i)
	} else {
		p.slots[s.older].newer = int32(i)
	}
}

// evict frees the least recently used idle slot. The caller knows that there is one.
func (p *Primary) evict() {
	for {
		i := uint32(p.oldest)
		s := &p.slots[i]
		p.unlist(i)
		if s.state == slotReadable && s.pins == 0 {
			p.stats.Evictions++
			p.forget(i)
			p.reclaim(i)
			return
		}
	}
}

// forget takes a slot's key out of the index.
func (p *Primary) forget(i uint32) {
	s := &p.slots[i]
	if s.named && (s.state == slotWriting || s.state == slotReadable) {
		delete(p.index, s.key)
		p.unlist(i)
	}
	if s.state == slotReadable {
		p.residentBytes -= s.bytes
		if s.pins == 0 {
			p.idle--
		}
	}
	s.named = false
}

// reclaim makes a slot free. Nobody may hold it.
func (p *Primary) reclaim(i uint32) {
	s := &p.slots[i]
	p.setState(s, slotFree)
	s.owner, s.key, s.bytes, s.sum = Owner{}, Key{}, 0, 0
	p.free = append(p.free, i)
}

// take hands out a free slot to a writer; the caller made sure that there is one.
func (p *Primary) take(owner Owner, h *holdings) Slot {
	i := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	s := &p.slots[i]
	p.setState(s, slotWriting)
	s.epoch++
	s.owner, s.since = owner, p.now()
	h.writing[i] = struct{}{}
	return Slot{Index: i, Epoch: s.epoch}
}

func (p *Primary) holdingsOf(o Owner) *holdings {
	h := p.owners[o]
	if h == nil {
		h = &holdings{pins: map[uint64]struct{}{}, writing: map[uint32]struct{}{}}
		p.owners[o] = h
	}
	return h
}

// tidy removes an owner that holds nothing.
func (p *Primary) tidy(o Owner) {
	if h := p.owners[o]; h != nil && len(h.pins) == 0 && len(h.writing) == 0 {
		delete(p.owners, o)
	}
}
