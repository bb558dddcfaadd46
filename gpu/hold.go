package gpu

import (
	"cmp"
	"slices"
)

// A Holdable is a device's own region, which stays open while a call holds it.
type Holdable interface {
	Region
	// Serial is the place of the region's lock among those of its device: no two are equal.
	Serial() uint64
	// Hold locks the region against Close, and says whether it is open.
	Hold() (open bool)
	// Release undoes one Hold, also of a region that was not open.
	Release()
}

// Hold keeps the parts of a region open until release is called. own says which are the
// device's; others are ErrForeign. A closed part is ErrClosed.
func Hold[R Holdable](reg Region, own func(R) bool) (parts []R, release func(), err error) {
	for _, p := range Parts(reg) {
		r, ok := p.(R)
		if !ok || !own(r) {
			return nil, nil, ErrForeign
		}
		parts = append(parts, r)
	}
	// All calls take locks in one order: two that wait for each other's behind a Close
	// would never end.
	order := parts
	if len(parts) > 1 {
		order = slices.SortedFunc(slices.Values(parts), func(a, b R) int { return cmp.Compare(a.Serial(), b.Serial()) })
	}
	release = func() {
		for _, r := range order {
			r.Release()
		}
	}
	open := len(parts) > 0
	for _, r := range order {
		open = r.Hold() && open
	}
	if !open {
		release()
		return nil, nil, ErrClosed
	}
	return parts, release, nil
}
