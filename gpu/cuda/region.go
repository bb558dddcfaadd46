package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/tierd/tierd/gpu"
)

// region is device memory with a lock that keeps Close away from running copies.
type region struct {
	dev    *Device
	size   int64
	serial uint64 // in the order in which they were made: that of locks

	mu   sync.RWMutex // held for reading by copies, for writing by Close
	base uint64       // address of its first byte; 0 after Close
	// opened is the address that cuIpcOpenMemHandle gave, for a region of another
	// process; 0 for one of our own.
	opened uint64
	handle gpu.Handle // set for a region of another process
	// exports are the handles made of a region of our own.
	exports [][ipcHandleBytes]byte
}

// Alloc implements gpu.Device.
func (d *Device) Alloc(ctx context.Context, size int64) (gpu.Region, error) {
	done, err := d.use(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: alloc: %w", d.Name(), err)
	}
	defer done()
	if size <= 0 || size > 1<<62 {
		return nil, fmt.Errorf("%s: alloc: size is %d bytes; it must be positive and fit an address space", d.Name(), size)
	}
	r := &region{dev: d, size: size, serial: d.serials.Add(1)}
	if err := d.alloc(r); err != nil {
		return nil, fmt.Errorf("%s: alloc: %w", d.Name(), err)
	}
	d.mu.Lock()
	d.regions[r] = struct{}{}
	d.mu.Unlock()
	return r, nil
}

func (d *Device) alloc(r *region) error {
	leave, err := d.enter()
	if err != nil {
		return err
	}
	defer leave()
	bytes := (r.size + shareBytes - 1) &^ (shareBytes - 1)
	err = d.drv.call(cuMemAlloc, uintptr(unsafe.Pointer(&r.base)), uintptr(bytes))
	if e := (*Error)(nil); errors.As(err, &e) && e.Code == codeOutOfMemory {
		free, _, ferr := d.memory()
		if ferr != nil {
			return d.check(errors.Join(err, ferr))
		}
		return fmt.Errorf("%d bytes wanted, but the GPU has %d bytes free; make the region smaller: %w", r.size, free, err)
	}
	if err != nil {
		return d.check(err)
	}
	// A buffer of the lanes lends its stream, because the call must not wait for the
	// engine's work in the default stream.
	b := <-d.lanes[0].free
	err = firstError(
		func() error { return d.drv.call(cuMemsetD8Async, uintptr(r.base), 0, uintptr(bytes), b.stream) },
		func() error { return d.drv.call(cuStreamSynchronize, b.stream) },
	)
	d.lanes[0].free <- b
	if err != nil {
		return errors.Join(d.check(err), d.drv.call(cuMemFree, uintptr(r.base)))
	}
	return nil
}

// Import implements gpu.Device for handles of kind gpu.HandleCUDA. CUDA does not open a
// handle in the process that made it: that is errors.ErrUnsupported.
func (d *Device) Import(ctx context.Context, h gpu.Handle) (gpu.Region, error) {
	done, err := d.use(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: import: %w", d.Name(), err)
	}
	defer done()
	raw, err := d.foreign(h, gpu.HandleCUDA)
	if err != nil {
		return nil, fmt.Errorf("%s: import: %w", d.Name(), err)
	}
	if h.Offset < 0 || h.Length <= 0 {
		return nil, fmt.Errorf("%s: import: %d bytes at offset %d; both must be positive", d.Name(), h.Length, h.Offset)
	}
	r := &region{dev: d, size: h.Length, serial: d.serials.Add(1), handle: h}
	if err := d.open(r, raw); err != nil {
		return nil, fmt.Errorf("%s: import: %w", d.Name(), err)
	}
	d.mu.Lock()
	d.regions[r] = struct{}{}
	d.mu.Unlock()
	return r, nil
}

// foreign returns the driver's handle in h, after a look at its kind and origin.
func (d *Device) foreign(h gpu.Handle, kind gpu.HandleKind) (raw [ipcHandleBytes]byte, err error) {
	if h.Kind != kind {
		return raw, fmt.Errorf("handle is of kind %q; only %q can be imported here", h.Kind, kind)
	}
	if len(h.Opaque) != len(raw) {
		return raw, fmt.Errorf("handle has %d bytes; CUDA's have %d", len(h.Opaque), len(raw))
	}
	copy(raw[:], h.Opaque)
	d.mu.Lock()
	_, own := d.exported[raw]
	d.mu.Unlock()
	if own {
		return raw, fmt.Errorf("this process made the handle, and CUDA IPC opens it only in others: %w", errors.ErrUnsupported)
	}
	return raw, nil
}

func (d *Device) open(r *region, raw [ipcHandleBytes]byte) error {
	leave, err := d.enter()
	if err != nil {
		return err
	}
	defer leave()
	if err := d.openMem(&r.opened, raw); err != nil {
		return d.check(err)
	}
	// The handle says nothing about its length, so the driver is asked.
	var base uint64
	var size uintptr
	err = d.drv.call(cuMemGetAddressRange, uintptr(unsafe.Pointer(&base)), uintptr(unsafe.Pointer(&size)), uintptr(r.opened))
	if err == nil {
		room := int64(base) + int64(size) - int64(r.opened)
		if r.handle.Offset <= room && r.size <= room-r.handle.Offset {
			r.base = r.opened + uint64(r.handle.Offset)
			return nil
		}
		err = fmt.Errorf("%d bytes at offset %d wanted, but the allocation has %d bytes", r.size, r.handle.Offset, room)
	}
	return errors.Join(d.check(err), d.drv.call(cuIpcCloseMemHandle, uintptr(r.opened)))
}

// Serial implements gpu.Holdable.
func (r *region) Serial() uint64 { return r.serial }

// Hold implements gpu.Holdable.
func (r *region) Hold() bool {
	r.mu.RLock()
	return r.base != 0
}

// Release implements gpu.Holdable.
func (r *region) Release() { r.mu.RUnlock() }

// Size implements gpu.Region.
func (r *region) Size() int64 { return r.size }

// Export implements gpu.Region. A region of another process answers with the handle that
// it was made from.
func (r *region) Export() (gpu.Handle, error) {
	d := r.dev
	done, err := d.use(context.Background())
	if err != nil {
		return gpu.Handle{}, fmt.Errorf("export: %w", err)
	}
	defer done()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.base == 0 {
		return gpu.Handle{}, fmt.Errorf("export: %w", gpu.ErrClosed)
	}
	if r.opened != 0 {
		return r.handle, nil
	}
	leave, err := d.enter()
	if err != nil {
		return gpu.Handle{}, fmt.Errorf("export: %w", err)
	}
	defer leave()
	var raw [ipcHandleBytes]byte
	if err := d.drv.call(cuIpcGetMemHandle, uintptr(unsafe.Pointer(&raw)), uintptr(r.base)); err != nil {
		return gpu.Handle{}, fmt.Errorf("export: %w", d.check(err))
	}
	d.made(raw, &r.exports)
	return gpu.Handle{Kind: gpu.HandleCUDA, Opaque: raw[:], Length: r.size}, nil
}

// Close implements gpu.Region.
func (r *region) Close() error {
	return r.dev.giveBack("region", func() { delete(r.dev.regions, r) }, r.free)
}

// free needs a current context. It waits for the copies that use the region.
func (r *region) free() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.base == 0 {
		return nil
	}
	base := r.base
	r.base = 0
	r.dev.unmade(r.exports)
	if r.dev.Lost() != nil {
		return nil // the driver may block in a context that is past saving
	}
	if r.opened != 0 {
		return r.dev.drv.call(cuIpcCloseMemHandle, uintptr(r.opened))
	}
	return r.dev.drv.call(cuMemFree, uintptr(base))
}
