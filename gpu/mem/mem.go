// Package mem is the device for host memory: the default where there is no GPU, and
// the one that tests and the demo use. A region is a shared-memory file that an
// engine of the same user maps; Gather and Scatter are plain copies.
package mem

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/shm"
)

// pieceBytes is how much is copied between two looks at the context: 1 MiB takes
// about 0.1 ms, so a cancelled call ends well below any deadline of the host.
const pieceBytes = 1 << 20

// A Device keeps its regions as files in one directory. It implements gpu.Device.
type Device struct {
	dir string

	mu      sync.Mutex
	closed  bool
	regions map[*region]struct{}
	made    uint64 // regions so far
}

var _ gpu.Device = (*Device)(nil)

// New returns a device whose regions are files in dir, such as a directory under
// /dev/shm. The directory must exist.
func New(dir string) (*Device, error) {
	st, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("host-memory device: %w", err)
	}
	if !st.IsDir() {
		return nil, fmt.Errorf("host-memory device: %s is no directory; give one on a memory file system, such as /dev/shm", dir)
	}
	return &Device{dir: dir, regions: map[*region]struct{}{}}, nil
}

// Name implements gpu.Device.
func (d *Device) Name() string { return "mem" }

// region is host memory with a lock that keeps Close away from running copies.
type region struct {
	dev    *Device
	handle gpu.Handle
	serial uint64 // in the order in which they were made: that of locks

	mu    sync.RWMutex // held for reading by copies, for writing by Close
	mem   []byte       // nil after Close
	close func() error
}

// Alloc implements gpu.Device.
func (d *Device) Alloc(ctx context.Context, size int64) (gpu.Region, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var id [8]byte
	rand.Read(id[:])
	f, err := shm.Create(filepath.Join(d.dir, "tierd-region-"+hex.EncodeToString(id[:])), size, false)
	if err != nil {
		return nil, fmt.Errorf("host-memory device: %w", err)
	}
	return d.add(&region{
		handle: gpu.Handle{Kind: gpu.HandleFile, Path: f.Path(), Length: size},
		mem:    f.Bytes(),
		close:  f.Close,
	})
}

// Import implements gpu.Device for handles of kind gpu.HandleFile.
func (d *Device) Import(ctx context.Context, h gpu.Handle) (gpu.Region, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if h.Kind != gpu.HandleFile {
		return nil, fmt.Errorf("host-memory device: handle is of kind %q; only %q can be imported", h.Kind, gpu.HandleFile)
	}
	m, err := shm.Map(h.Path, h.Offset, h.Length)
	if err != nil {
		return nil, fmt.Errorf("host-memory device: %w", err)
	}
	return d.add(&region{handle: h, mem: m.Bytes(), close: m.Close})
}

func (d *Device) add(r *region) (gpu.Region, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		r.close()
		return nil, fmt.Errorf("host-memory device: %w", gpu.ErrClosed)
	}
	d.made++
	r.dev, r.serial = d, d.made
	d.regions[r] = struct{}{}
	return r, nil
}

// Size implements gpu.Region.
func (r *region) Size() int64 { return r.handle.Length }

// Serial implements gpu.Holdable.
func (r *region) Serial() uint64 { return r.serial }

// Hold implements gpu.Holdable.
func (r *region) Hold() bool {
	r.mu.RLock()
	return r.mem != nil
}

// Release implements gpu.Holdable.
func (r *region) Release() { r.mu.RUnlock() }

// Export implements gpu.Region.
func (r *region) Export() (gpu.Handle, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.mem == nil {
		return gpu.Handle{}, fmt.Errorf("export: %w", gpu.ErrClosed)
	}
	return r.handle, nil
}

// Close implements gpu.Region.
func (r *region) Close() error {
	r.dev.mu.Lock()
	delete(r.dev.regions, r)
	r.dev.mu.Unlock()

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mem == nil {
		return nil
	}
	r.mem = nil
	return r.close()
}

// Close implements gpu.Device.
func (d *Device) Close() error {
	d.mu.Lock()
	d.closed = true
	open := make([]*region, 0, len(d.regions))
	for r := range d.regions {
		open = append(open, r)
	}
	d.mu.Unlock()
	var first error
	for _, r := range open {
		if err := r.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// Gather implements gpu.Device.
func (d *Device) Gather(ctx context.Context, dst []byte, src gpu.Region, frags []gpu.Fragment) error {
	return d.move(ctx, "gather", src, frags, dst, false)
}

// Scatter implements gpu.Device.
func (d *Device) Scatter(ctx context.Context, dst gpu.Region, frags []gpu.Fragment, src []byte) error {
	return d.move(ctx, "scatter", dst, frags, src, true)
}

func (d *Device) move(ctx context.Context, what string, reg gpu.Region, frags []gpu.Fragment, host []byte, scatter bool) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	parts, release, err := gpu.Hold(reg, func(r *region) bool { return r.dev == d })
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer release()
	if _, err := gpu.CheckFragments(reg.Size(), frags, len(host), scatter); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	places, err := gpu.Places(reg, frags)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	// The owner of a file may make it shorter while it is mapped here. A fault is an error
	// of this call then, and not the end of the process.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = fmt.Errorf("%s: memory at %#x is gone: its owner has made the file shorter", what, p.Addr())
		default:
			panic(p)
		}
	}()
	budget := pieceBytes
	for _, p := range places {
		part := parts[p.Part].mem[p.Offset : p.Offset+p.Length]
		for len(part) > 0 {
			n := min(len(part), budget)
			if scatter {
				copy(part[:n], host)
			} else {
				copy(host, part[:n])
			}
			part, host, budget = part[n:], host[n:], budget-n
			if budget == 0 {
				if err := ctx.Err(); err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
				budget = pieceBytes
			}
		}
	}
	return nil
}
