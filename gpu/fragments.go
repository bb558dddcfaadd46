package gpu

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"runtime"
	"slices"
	"sync"
)

// FragmentsMax bounds one call: 2^20 fragments are 128 layers of 4096 blocks with K
// and V apart, far above one chunk, and their list is 16 MiB.
const FragmentsMax = 1 << 20

const (
	// shareFragments is the least number of fragments for which another processor is worth
	// waking: looking at them takes some 30 us.
	shareFragments = 16384
	// sharesMax is how many processors look at one list. Four make the longest lists a
	// fiftieth of their copy; the others have work of their own.
	sharesMax = 4
	// gridCellsMax bounds the set of a grid: 2 MiB, which stays in a processor's cache.
	gridCellsMax = 16 << 20
)

// A Fragment is a run of bytes inside a region. Length 0 is allowed.
type Fragment struct {
	// Offset and Length in bytes.
	Offset, Length int64
}

// CheckFragments refuses a list that leaves a region of size bytes, does not add up
// to the total bytes of the other side, or, when disjoint is set, overlaps itself.
// Devices call it before they touch anything. Long lists are shared between processors.
//
// apart says that there is nothing to join: no fragment is empty, or begins where the one
// in front of it ends.
func CheckFragments(size int64, frags []Fragment, total int, disjoint bool) (apart bool, err error) {
	if len(frags) > FragmentsMax {
		return false, fmt.Errorf("%w: %d in one call; at most %d are allowed", ErrFragments, len(frags), FragmentsMax)
	}
	v := survey(size, frags, int64(total), disjoint)
	if !v.fits || v.sum != int64(total) {
		return false, refuse(size, frags, total)
	}
	if !disjoint || v.ascending || v.length > 0 && v.onGrid(frags) {
		return v.apart, nil
	}
	return v.apart, checkDisjoint(frags, v.length > 0)
}

// refuse says what is wrong with a list that does not fit.
func refuse(size int64, frags []Fragment, total int) error {
	var sum uint64
	for i, f := range frags {
		if f.Offset < 0 || f.Length < 0 || f.Offset > size || f.Length > size-f.Offset {
			return fmt.Errorf("%w: fragment %d is %d bytes at offset %d, but the region has %d bytes", ErrFragments, i, f.Length, f.Offset, size)
		}
		if sum += uint64(f.Length); sum > uint64(total) {
			return fmt.Errorf("%w: the first %d hold %d bytes, but the host side has %d", ErrFragments, i+1, sum, total)
		}
	}
	return fmt.Errorf("%w: they hold %d bytes, but the host side has %d", ErrFragments, sum, total)
}

// share cuts n fragments into equal runs and calls f for each, side by side where there
// are enough of them. It returns how many runs there were.
func share(n int, f func(run, from, to int)) (runs int) {
	runs = max(1, min(n/shareFragments, sharesMax, runtime.GOMAXPROCS(0)))
	var others sync.WaitGroup
	for k := 1; k < runs; k++ {
		others.Go(func() { f(k, n*k/runs, n*(k+1)/runs) })
	}
	f(0, 0, n/runs)
	others.Wait()
	return runs
}

// A view is what one pass over a list tells about it.
type view struct {
	fits  bool // all lie in the region, and have at most the total together
	sum   int64
	apart bool // see CheckFragments
	// first is the offset of the first and end the end of the last, and some says that
	// there is one.
	first, end int64
	some       bool
	// What follows is for lists that must be disjoint. Empty fragments do not count there,
	// nor in first, end and some of such a list; another that has one is not apart anyhow.
	ascending bool  // each begins at or behind the end of the one in front
	length    int64 // of all; -1 when they differ
	low, high int64 // the least and the largest offset
}

// survey looks at every fragment once.
func survey(size int64, frags []Fragment, total int64, disjoint bool) view {
	var parts [sharesMax]view
	runs := share(len(frags), func(k, from, to int) {
		if disjoint {
			parts[k] = look(size, frags[from:to], total)
		} else {
			parts[k] = sums(size, frags[from:to], total)
		}
	})
	v := parts[0]
	for _, w := range parts[1:runs] {
		w.fits = w.fits && w.sum <= total-v.sum // four of them may be above what an int64 holds
		v = v.and(w)
	}
	return v
}

// sums is the view of a list that may overlap: look without what only others need.
func sums(size int64, frags []Fragment, total int64) view {
	sum, end, apart := int64(0), int64(-1), true
	for _, f := range frags {
		if !f.within(size, total-sum) {
			return view{}
		}
		apart = apart && f.Length != 0 && f.Offset != end
		sum, end = sum+f.Length, f.Offset+f.Length
	}
	v := view{fits: true, sum: sum, apart: apart, end: end}
	if len(frags) > 0 {
		v.some, v.first = true, frags[0].Offset
	}
	return v
}

// within says that a fragment lies in a region of size bytes and has at most room bytes.
func (f Fragment) within(size, room int64) bool {
	return f.Offset >= 0 && f.Length >= 0 && f.Offset <= size && f.Length <= size-f.Offset && f.Length <= room
}

// look is the view of a list that must be disjoint; its zero value does not fit.
func look(size int64, frags []Fragment, total int64) view {
	var sum, length, high int64
	low, first, end, ascending, apart := int64(math.MaxInt64), int64(0), int64(-1), true, true
	for _, f := range frags {
		if !f.within(size, total-sum) {
			return view{}
		}
		sum += f.Length
		if f.Length == 0 {
			apart = false
			continue
		}
		if f.Length != length {
			if length == 0 {
				length, first = f.Length, f.Offset
			} else {
				length = -1
			}
		}
		ascending, apart = ascending && f.Offset >= end, apart && f.Offset != end
		end = f.Offset + f.Length
		low, high = min(low, f.Offset), max(high, f.Offset)
	}
	return view{fits: true, sum: sum, apart: apart, first: first, end: end, some: length != 0, ascending: ascending, length: length, low: low, high: high}
}

// and is the view of v's list with w's behind it.
func (v view) and(w view) view {
	v.fits, v.sum, v.apart = v.fits && w.fits, v.sum+w.sum, v.apart && w.apart
	if !w.some {
		return v
	}
	if !v.some {
		w.fits, w.sum, w.apart = v.fits, v.sum, v.apart
		return w
	}
	v.apart = v.apart && w.first != v.end
	if v.length != w.length {
		v.length = -1
	}
	v.ascending = v.ascending && w.ascending && w.first >= v.end
	v.end = w.end
	v.low, v.high = min(v.low, w.low), max(v.high, w.high)
	return v
}

// onGrid says that fragments of one length begin at multiples of it, as pages do, and at
// no place twice. A set with one bit for each place is ten times as fast as a table; where
// it does not say yes, the others have to look. Each processor has a set of its own: one
// for all would take an atomic operation for each fragment, which are three times as slow.
func (v view) onGrid(frags []Fragment) bool {
	cells := (v.high-v.low)/v.length + 1
	if cells > gridCellsMax || cells > 64*int64(len(frags)) {
		return false // too far apart for a set to be worth it
	}
	var sets [sharesMax][]uint64
	runs := share(len(frags), func(k, from, to int) { sets[k] = v.places(cells, frags[from:to]) })
	for k, set := range sets[:runs] {
		if set == nil {
			return false
		}
		for i := range set {
			if k > 0 && sets[0][i]&set[i] != 0 {
				return false
			}
			sets[0][i] |= set[i]
		}
	}
	return true
}

// places is the set of the places of fragments; nil when one of them is on none, or on
// another's.
func (v view) places(cells int64, frags []Fragment) []uint64 {
	set := make([]uint64, (cells+63)/64)
	low, length := v.low, v.length
	power, shift := length&(length-1) == 0, bits.TrailingZeros64(uint64(length))
	for _, f := range frags {
		if f.Length == 0 {
			continue
		}
		at := f.Offset - low
		cell := at >> shift
		if !power {
			cell = at / length
		}
		word, bit := &set[cell>>6], uint64(1)<<(cell&63)
		if *word&bit != 0 || cell*length != at {
			return nil
		}
		*word |= bit
	}
	return set
}

// checkDisjoint is for lists that are on no grid, or overlap. Fragments of one length are
// looked up in a table; others are sorted, which takes ten times as long: for 8192
// fragments of 4 KiB longer than their copy.
func checkDisjoint(frags []Fragment, equal bool) error {
	order := make([]int, 0, len(frags))
	for i, f := range frags {
		if f.Length > 0 {
			order = append(order, i)
		}
	}
	if equal {
		return checkCells(frags, order, frags[order[0]].Length)
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(frags[a].Offset, frags[b].Offset) })
	for k := 1; k < len(order); k++ {
		if a, b := order[k-1], order[k]; frags[b].Offset < frags[a].Offset+frags[a].Length {
			return overlap(frags, a, b)
		}
	}
	return nil
}

// checkCells puts fragments of one length into cells of that length, by where they begin.
// Two that overlap begin in one cell or in neighbours.
func checkCells(frags []Fragment, order []int, length int64) error {
	// An open hash table, at most half full; entries are 1 + the index of a fragment.
	shift := 64 - bits.Len(uint(2*len(order)))
	table := make([]uint32, 1<<(64-shift))
	cells := make([]int64, len(frags))
	find := func(cell int64) (at uint64, i int) {
		for at = uint64(cell) * 0x9e3779b97f4a7c15 >> shift; ; at = (at + 1) & uint64(len(table)-1) {
			if table[at] == 0 {
				return at, -1
			}
			if i = int(table[at]) - 1; cells[i] == cell {
				return at, i
			}
		}
	}
	onGrid := true
	for _, i := range order {
		cells[i] = frags[i].Offset / length
		at, other := find(cells[i])
		if other >= 0 {
			return overlap(frags, other, i)
		}
		table[at] = uint32(i) + 1
		onGrid = onGrid && cells[i]*length == frags[i].Offset
	}
	if onGrid {
		return nil
	}
	for _, i := range order {
		if _, next := find(cells[i] + 1); next >= 0 && frags[next].Offset < frags[i].Offset+length {
			return overlap(frags, i, next)
		}
	}
	return nil
}

// overlap names the two, the one that begins first in front.
func overlap(frags []Fragment, i, j int) error {
	if frags[j].Offset < frags[i].Offset {
		i, j = j, i
	}
	a, b := frags[i], frags[j]
	return fmt.Errorf("%w: fragments %d [%d, %d) and %d [%d, %d) overlap in the destination", ErrFragments,
		i, a.Offset, a.Offset+a.Length, j, b.Offset, b.Offset+b.Length)
}
