// Package gpu moves bytes between the memory in which an engine keeps its KV cache
// and host memory, behind one small interface.
//
// # The story
//
// An engine keeps the KV cache of a group in a region: device memory, or host memory
// where there is no GPU. A chunk is spread over the region in fragments, one for each
// layer and each of K and V. Storing a chunk gathers its fragments into one run of
// bytes in a slot of the host's slab; loading it scatters them back. A Device does
// both. It also says how another process of the same user can map a region, because
// engine and daemon are two processes.
//
// Package gpu/mem is the device for host memory and runs everywhere. Package gpu/cuda
// is the one for NVIDIA GPUs, and gpu/nvml reads their health. Package gpu/gputest holds
// the conformance suite that every device passes.
//
// Many engines keep an allocation for each layer, so that a chunk is spread over several
// regions. Join makes one of them, whose fragments any device takes.
//
// An engine on a GPU works ahead of its host: when it says that blocks are full, the
// kernels that fill them may still run. A device whose engines do so is Ordered: the
// engine records an Event in its stream behind those kernels, and the daemon waits for
// it before it moves the blocks. It waits on the host and not in a stream of the device,
// because copies of other requests must not queue behind one engine's step, and because
// a wait on the host ends when its context does.
//
// # Laws
//
//   - Gather reads and Scatter writes exactly the bytes that the fragments name, in
//     the order in which they are listed.
//   - A call that returns an error that wraps ErrFragments has touched nothing.
//   - When a call returns, for whatever reason, the device no longer reads or writes
//     the slice or the region on its behalf. A call that was cancelled may have moved
//     some of the bytes.
//   - Close of a region waits for the calls that use it; later ones get ErrClosed.
//   - Calls may run at the same time. Two that touch the same bytes, one of them a
//     Scatter, are the caller's to keep apart.
//   - A device that is lost fails every call from then on with ErrLost and the driver's
//     own error. Closing it and its regions still works, and the process goes on.
package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

var (
	// ErrClosed is returned for a region or a device that was closed.
	ErrClosed = errors.New("region is closed")
	// ErrFragments is wrapped by every refusal of a fragment list.
	ErrFragments = errors.New("fragments refused")
	// ErrForeign is returned when a region belongs to another device.
	ErrForeign = errors.New("region belongs to another device")
	// ErrLost is wrapped by every error of a device that can no longer be used.
	ErrLost = errors.New("device is lost")
)

// FragmentsMax bounds one call: 2^20 fragments are 128 layers of 4096 blocks with K
// and V apart, far above one chunk, and their list is 16 MiB.
const FragmentsMax = 1 << 20

// A Device owns regions and moves bytes in and out of them.
type Device interface {
	// Name says which device this is, for messages: "mem", "cuda:0".
	Name() string
	// Alloc makes a region of size bytes, all zero. No room is an error that gives
	// the bytes wanted and the bytes free, never a fault later.
	Alloc(ctx context.Context, size int64) (Region, error)
	// Import maps a region that another process allocated. Closing it leaves the
	// other process's region alone.
	Import(ctx context.Context, h Handle) (Region, error)
	// Gather copies the fragments of src one after the other into dst, whose
	// length must be the sum of their lengths. Fragments may overlap.
	Gather(ctx context.Context, dst []byte, src Region, frags []Fragment) error
	// Scatter copies src, piece by piece, into the fragments of dst. The length of
	// src must be the sum of their lengths, and no two fragments may overlap.
	Scatter(ctx context.Context, dst Region, frags []Fragment, src []byte) error
	// Close closes the device and every region that is still open.
	Close() error
}

// An Ordered device can wait for a point in the stream of an engine's process.
type Ordered interface {
	Device
	// ImportEvent opens an event that another process made and exported. Closing it
	// leaves the other process's event alone.
	ImportEvent(ctx context.Context, h Handle) (Event, error)
}

// An Event marks a point in a stream of work, and may be recorded again and again.
type Event interface {
	// Wait returns once the work in front of the event's latest record is done. An
	// event that was never recorded is done.
	Wait(ctx context.Context) error
	// Export says how another process of the same user can open the event.
	Export() (Handle, error)
	// Close gives the event back. Closing twice is harmless.
	Close() error
}

// A Region is a run of bytes that a device can reach.
type Region interface {
	// Size in bytes.
	Size() int64
	// Export says how another process of the same user can map the region. The
	// handle is good until Close.
	Export() (Handle, error)
	// Close gives the region back. Closing twice is harmless.
	Close() error
}

// A HandleKind says how a Handle is to be read.
type HandleKind string

const (
	// HandleFile is a shared-memory file: Path, Offset and Length say what to map.
	HandleFile HandleKind = "file"
	// HandleCUDA is an allocation exported by CUDA IPC: Opaque is the driver's
	// handle, Offset and Length lie inside that allocation.
	HandleCUDA HandleKind = "cuda-ipc"
	// HandleCUDAEvent is an event exported by CUDA IPC, in Opaque.
	HandleCUDAEvent HandleKind = "cuda-ipc-event"
)

// A Handle names a region or an event across processes.
type Handle struct {
	Kind HandleKind
	// Path of the file to map, for HandleFile.
	Path string
	// Opaque is the driver's own handle, for HandleCUDA and HandleCUDAEvent.
	Opaque []byte
	// Offset and Length in bytes.
	Offset, Length int64
}

// A Fragment is a run of bytes inside a region. Length 0 is allowed.
type Fragment struct {
	// Offset and Length in bytes.
	Offset, Length int64
}

// CheckFragments refuses a list that leaves a region of size bytes, does not add up
// to the total bytes of the other side, or, when disjoint is set, overlaps itself.
// Devices call it before they touch anything.
func CheckFragments(size int64, frags []Fragment, total int, disjoint bool) error {
	if len(frags) > FragmentsMax {
		return fmt.Errorf("%w: %d in one call; at most %d are allowed", ErrFragments, len(frags), FragmentsMax)
	}
	var sum, end int64
	ascending := true
	for i, f := range frags {
		if f.Offset < 0 || f.Length < 0 || f.Offset > size || f.Length > size-f.Offset {
			return fmt.Errorf("%w: fragment %d is %d bytes at offset %d, but the region has %d bytes", ErrFragments, i, f.Length, f.Offset, size)
		}
		if sum += f.Length; sum > int64(total) {
			return fmt.Errorf("%w: the first %d hold %d bytes, but the host side has %d", ErrFragments, i+1, sum, total)
		}
		if f.Length > 0 {
			ascending = ascending && f.Offset >= end
			end = f.Offset + f.Length
		}
	}
	if sum != int64(total) {
		return fmt.Errorf("%w: they hold %d bytes, but the host side has %d", ErrFragments, sum, total)
	}
	if !disjoint || ascending {
		return nil
	}
	return checkDisjoint(frags)
}

// checkDisjoint is for lists that are not in ascending order. Fragments of one length,
// as a KV cache has, are looked up in a table; others are sorted, which takes ten times
// as long: for 8192 fragments of 4 KiB longer than their copy.
func checkDisjoint(frags []Fragment) error {
	order := make([]int, 0, len(frags))
	length, equal := int64(0), true
	for i, f := range frags {
		if f.Length > 0 {
			equal = equal && (length == 0 || f.Length == length)
			length = f.Length
			order = append(order, i)
		}
	}
	if equal {
		if known, err := checkGrid(frags, order, length); known {
			return err
		}
		return checkCells(frags, order, length)
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(frags[a].Offset, frags[b].Offset) })
	for k := 1; k < len(order); k++ {
		if a, b := order[k-1], order[k]; frags[b].Offset < frags[a].Offset+frags[a].Length {
			return overlap(frags, a, b)
		}
	}
	return nil
}

// gridCellsMax bounds the set of checkGrid: 2 MiB, which stays in a processor's cache.
const gridCellsMax = 16 << 20

// checkGrid is for fragments of one length that begin at multiples of it, as pages do: a set
// with one bit for each place finds those that are the same. It is ten times as fast as a
// table, and does not know about others.
func checkGrid(frags []Fragment, order []int, length int64) (known bool, err error) {
	first, last := frags[order[0]].Offset, frags[order[0]].Offset
	for _, i := range order {
		first, last = min(first, frags[i].Offset), max(last, frags[i].Offset)
	}
	cells := (last-first)/length + 1
	if cells > gridCellsMax || cells > 64*int64(len(order)) {
		return false, nil // too far apart for a set to be worth it
	}
	power, shift := length&(length-1) == 0, bits.TrailingZeros64(uint64(length))
	set := make([]uint64, (cells+63)/64)
	for _, i := range order {
		at := frags[i].Offset - first
		cell := at >> shift
		if !power {
			cell = at / length
		}
		if cell*length != at {
			return false, nil
		}
		if set[cell/64]>>(cell%64)&1 != 0 {
			for _, j := range order {
				if frags[j].Offset == frags[i].Offset {
					return true, overlap(frags, j, i)
				}
			}
		}
		set[cell/64] |= 1 << (cell % 64)
	}
	return true, nil
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
