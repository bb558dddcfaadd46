package gpu

import (
	"errors"
	"fmt"
	"slices"
	"sort"
)

// A Joined is a region that is several, one behind the other.
type Joined struct {
	parts  []Region
	starts []int64 // of each part, and the size
}

// Join makes one region of parts of one device: offset x of a part is at x plus the sizes
// of the parts in front of it. A fragment lies in one part. Closing a joined region leaves
// its parts open, and it is closed when one of them is.
func Join(parts ...Region) (*Joined, error) {
	if len(parts) == 0 {
		return nil, errors.New("join: no parts; a region has one at least")
	}
	j := &Joined{parts: slices.Clone(parts), starts: make([]int64, 1, len(parts)+1)}
	for i, p := range parts {
		if _, ok := p.(*Joined); ok {
			return nil, fmt.Errorf("join: part %d is joined itself; give its parts", i)
		}
		if slices.Contains(parts[:i], p) {
			return nil, fmt.Errorf("join: part %d is there twice", i)
		}
		end := j.starts[i] + p.Size()
		if end < j.starts[i] {
			return nil, errors.New("join: the parts do not fit an address space")
		}
		j.starts = append(j.starts, end)
	}
	return j, nil
}

// Size implements Region.
func (j *Joined) Size() int64 { return j.starts[len(j.parts)] }

// Start is the offset at which a part begins.
func (j *Joined) Start(part int) int64 { return j.starts[part] }

// Export implements Region: there is no handle for several regions.
func (j *Joined) Export() (Handle, error) {
	return Handle{}, fmt.Errorf("export: a joined region has no handle; export its parts: %w", errors.ErrUnsupported)
}

// Close implements Region.
func (j *Joined) Close() error { return nil }

// Parts returns the parts of a joined region, and any other region as its own only part.
func Parts(r Region) []Region {
	if j, ok := r.(*Joined); ok {
		return j.parts
	}
	return []Region{r}
}

// A Place is a fragment inside a part of a region.
type Place struct {
	Part int
	// Offset and Length in bytes, of the part.
	Offset, Length int64
}

// Places says where the fragments of a region lie in its parts. It refuses a fragment that
// leaves one. Devices call it after CheckFragments.
func Places(r Region, frags []Fragment) ([]Place, error) {
	out := make([]Place, len(frags))
	j, ok := r.(*Joined)
	part := 0
	for i, f := range frags {
		if f.Length == 0 {
			continue
		}
		if !ok {
			out[i] = Place{Offset: f.Offset, Length: f.Length}
			continue
		}
		if f.Offset < j.starts[part] || f.Offset >= j.starts[part+1] { // neighbours share a part
			part = sort.Search(len(j.parts), func(k int) bool { return j.starts[k+1] > f.Offset })
		}
		if end := j.starts[part+1]; f.Length > end-f.Offset {
			return nil, fmt.Errorf("%w: fragment %d [%d, %d) leaves part %d of the region, which ends at %d", ErrFragments, i, f.Offset, f.Offset+f.Length, part, end)
		}
		out[i] = Place{Part: part, Offset: f.Offset - j.starts[part], Length: f.Length}
	}
	return out, nil
}
