package tier

import (
	"cmp"
	"slices"
	"time"
)

// Stats counts what has happened since New.
type Stats struct {
	// Evictions of readable slots; Refused admissions and stagings for want of room;
	// Dropped writes.
	Evictions, Refused, Dropped uint64
	// InvalidChecksum and InvalidLost count calls of Invalidate by reason.
	InvalidChecksum, InvalidLost uint64
	// CloseErrors counts failures to unmap the slab after the last hold on a closed
	// tier ended.
	CloseErrors uint64
}

// PinKind says what keeps a slot from being reused.
type PinKind string

const (
	PinRead  PinKind = "read"
	PinWrite PinKind = "write"
	// PinGrab: the data plane is putting bytes into the slot.
	PinGrab PinKind = "grab"
)

// A PinCount is what one owner holds of one kind.
type PinCount struct {
	Owner Owner
	Kind  PinKind
	Count int
	// Bytes of the slots: their content of a read pin, their whole room of the others.
	// A slot that two pins keep is counted twice.
	Bytes int64
	// OldestAge is how long the oldest of them has been held.
	OldestAge time.Duration
}

// A Snapshot is the tier at one moment.
type Snapshot struct {
	Stats
	Slots int
	// Slots by state; together they are Slots.
	Free, Writing, Readable, Detached, Fenced int
	// Evictable slots are readable without pins.
	Evictable int
	// ResidentBytes is the content of the readable slots.
	ResidentBytes int64
	// Pins by owner and kind, oldest first.
	Pins []PinCount
}

// Snapshot returns counts, and who holds what for how long. It costs O(slots), so it
// is for metrics and for people, not for every request.
func (p *Primary) Snapshot() Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Snapshot{
		Stats: p.stats, Slots: len(p.slots),
		Free: p.counts[slotFree], Writing: p.counts[slotWriting], Readable: p.counts[slotReadable],
		Detached: p.counts[slotDetached], Fenced: p.counts[slotFenced],
		Evictable: p.idle, ResidentBytes: p.residentBytes,
	}
	type group struct {
		owner Owner
		kind  PinKind
	}
	now := p.now()
	at := map[group]int{}
	add := func(o Owner, k PinKind, bytes int64, since time.Time) {
		i, ok := at[group{o, k}]
		if !ok {
			i = len(s.Pins)
			at[group{o, k}] = i
			s.Pins = append(s.Pins, PinCount{Owner: o, Kind: k})
		}
		s.Pins[i].Count++
		s.Pins[i].Bytes += bytes
		s.Pins[i].OldestAge = max(s.Pins[i].OldestAge, now.Sub(since))
	}
	for _, pn := range p.pins {
		add(pn.owner, PinRead, p.slots[pn.slot].bytes, pn.since)
	}
	for i := range p.slots {
		sl := &p.slots[i]
		if sl.state == slotWriting {
			add(sl.owner, PinWrite, p.slotBytes, sl.since)
		}
		if sl.grabbed {
			add(sl.owner, PinGrab, p.slotBytes, sl.grabbedT)
		}
	}
	slices.SortFunc(s.Pins, func(a, b PinCount) int {
		return cmp.Or(cmp.Compare(b.OldestAge, a.OldestAge), cmp.Compare(a.Owner.Kind, b.Owner.Kind),
			cmp.Compare(a.Owner.ID, b.Owner.ID), cmp.Compare(a.Kind, b.Kind))
	})
	return s
}
