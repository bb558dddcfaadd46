package cuda

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"github.com/tierd/tierd/gpu"
)

// made notes a handle of this process.
func (d *Device) made(raw [ipcHandleBytes]byte, list *[][ipcHandleBytes]byte) {
	if slices.Contains(*list, raw) {
		return
	}
	*list = append(*list, raw)
	d.mu.Lock()
	d.exported[raw] = struct{}{}
	d.mu.Unlock()
}

// unmade forgets handles whose memory or event is gone.
func (d *Device) unmade(list [][ipcHandleBytes]byte) {
	d.mu.Lock()
	for _, raw := range list {
		delete(d.exported, raw)
	}
	d.mu.Unlock()
}

func (d *Device) openMem(p *uint64, raw [ipcHandleBytes]byte) error {
	return d.byValue(cuIpcOpenMemHandle, raw, uintptr(unsafe.Pointer(p)), ipcLazyPeerAccess)
}

func (d *Device) openEvent(e *uintptr, raw [ipcHandleBytes]byte) error {
	return d.byValue(cuIpcOpenEventHandle, raw, uintptr(unsafe.Pointer(e)))
}

// byValue calls a function whose second parameter is a handle by value; first and rest
// are the others. On x86-64 a structure of 64 bytes goes on the stack and takes no
// register, so the six registers are filled up in front of it; on arm64 the caller passes
// the address of a copy.
//
//go:uintptrescapes
func (d *Device) byValue(s symbol, raw [ipcHandleBytes]byte, first uintptr, rest ...uintptr) error {
	if runtime.GOARCH != "amd64" {
		args := append([]uintptr{first, uintptr(unsafe.Pointer(&raw))}, rest...)
		err := d.drv.call(s, args...)
		runtime.KeepAlive(&raw)
		return err
	}
	var args [6 + ipcHandleBytes/8]uintptr
	args[0] = first
	copy(args[1:6], rest)
	words := *(*[ipcHandleBytes / 8]uintptr)(unsafe.Pointer(&raw))
	copy(args[6:], words[:])
	return d.drv.call(s, args[:]...)
}

// An Event implements gpu.Event.
type Event struct {
	dev *Device

	mu     sync.RWMutex
	event  uintptr // 0 after Close
	handle gpu.Handle
	// exports are the handles made of an event of our own; nil for an opened one.
	exports [][ipcHandleBytes]byte
}

var _ gpu.Event = (*Event)(nil)

// NewEvent makes an event that other processes can open.
func (d *Device) NewEvent() (*Event, error) {
	e := &Event{dev: d}
	err := e.make(context.Background(), func() error {
		return d.drv.call(cuEventCreate, uintptr(unsafe.Pointer(&e.event)), eventDisableTiming|eventInterprocess)
	})
	if err != nil {
		return nil, fmt.Errorf("%s: event: %w", d.Name(), err)
	}
	return e, nil
}

// ImportEvent implements gpu.Ordered for handles of kind gpu.HandleCUDAEvent, such as the
// bytes that torch.cuda.Event.ipc_handle returns.
func (d *Device) ImportEvent(ctx context.Context, h gpu.Handle) (gpu.Event, error) {
	e := &Event{dev: d, handle: h}
	err := e.make(ctx, func() error {
		raw, err := d.foreign(h, gpu.HandleCUDAEvent)
		if err != nil {
			return err
		}
		return d.openEvent(&e.event, raw)
	})
	if err != nil {
		return nil, fmt.Errorf("%s: import event: %w", d.Name(), err)
	}
	return e, nil
}

func (e *Event) make(ctx context.Context, get func() error) error {
	done, err := e.dev.use(ctx)
	if err != nil {
		return err
	}
	defer done()
	leave, err := e.dev.enter()
	if err != nil {
		return err
	}
	defer leave()
	if err := get(); err != nil {
		return e.dev.check(err)
	}
	e.dev.mu.Lock()
	e.dev.events[e] = struct{}{}
	e.dev.mu.Unlock()
	return nil
}

// with runs f with the device's context, while the event is open.
func (e *Event) with(what string, f func() error) error {
	done, err := e.dev.use(context.Background())
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer done()
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.event == 0 {
		return fmt.Errorf("%s: %w", what, gpu.ErrClosed)
	}
	leave, err := e.dev.enter()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer leave()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", what, e.dev.check(err))
	}
	return nil
}

// Record marks the end of what stream, a CUstream of this process and this GPU, has been
// given so far.
func (e *Event) Record(stream uintptr) error {
	return e.with("record event", func() error { return e.dev.drv.call(cuEventRecord, e.event, stream) })
}

// Export implements gpu.Event. An event of another process answers with the handle that
// it was made from.
func (e *Event) Export() (h gpu.Handle, err error) {
	err = e.with("export event", func() error {
		if h = e.handle; h.Kind != "" {
			return nil
		}
		var raw [ipcHandleBytes]byte
		if err := e.dev.drv.call(cuIpcGetEventHandle, uintptr(unsafe.Pointer(&raw)), e.event); err != nil {
			return err
		}
		h = gpu.Handle{Kind: gpu.HandleCUDAEvent, Opaque: raw[:]}
		return nil
	})
	if err != nil {
		return gpu.Handle{}, err
	}
	if e.handle.Kind == "" {
		e.mu.Lock()
		e.dev.made([ipcHandleBytes]byte(h.Opaque), &e.exports)
		e.mu.Unlock()
	}
	return h, nil
}

// Close implements gpu.Event.
func (e *Event) Close() error {
	return e.dev.giveBack("event", func() { delete(e.dev.events, e) }, e.free)
}

// free needs a current context.
func (e *Event) free() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.event == 0 {
		return nil
	}
	event := e.event
	e.event = 0
	e.dev.unmade(e.exports)
	if e.dev.Lost() != nil {
		return nil
	}
	return e.dev.drv.call(cuEventDestroy, event)
}
