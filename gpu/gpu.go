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
//     some of the bytes. The last DMAs of a device that is lost may still run, which
//     nobody can wait for; the checksums of what a slot holds next find what they change.
//   - Close of a region waits for the calls that use it; later ones get ErrClosed.
//   - Calls may run at the same time. Two that touch the same bytes, one of them a
//     Scatter, are the caller's to keep apart.
//   - A device that is lost fails every call from then on with ErrLost and the driver's
//     own error. Closing it and its regions still works, and the process goes on.
package gpu

import (
	"context"
	"errors"
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
