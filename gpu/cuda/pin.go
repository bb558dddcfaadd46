package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"
)

// pinPieceBytes is how much Pin registers at a time. Registering takes the driver's locks
// and some 0.1 s for each GiB, so that copies of others, and Close, wait 30 ms at most.
const pinPieceBytes = 256 << 20

// Pinned is host memory of the caller's that is being registered with the driver, so that
// a DMA reaches it. The part that is not registered yet can be used all the time; copies
// to it are right, and slow.
type Pinned struct {
	dev  *Device
	mem  []byte
	stop context.CancelFunc
	done chan struct{} // closed when the registering goroutine has ended
	err  error         // why it ended early; read after done

	bytes atomic.Int64 // registered so far, from the start

	use    sync.RWMutex // held for reading by copies to mem, for writing by Close
	closed bool
}

// Pin registers mem, which must begin at a page, piece by piece in the background. The
// memory serves every device of the process. It must stay mapped until Close.
func (d *Device) Pin(mem []byte) (*Pinned, error) {
	if page := uintptr(os.Getpagesize()); len(mem) == 0 || address(mem)%page != 0 {
		return nil, fmt.Errorf("%s: pin: %d bytes at address %#x; they must be some, and begin at a page of %d bytes", d.Name(), len(mem), address(mem), page)
	}
	done, err := d.use(context.Background())
	if err != nil {
		return nil, fmt.Errorf("%s: pin: %w", d.Name(), err)
	}
	defer done()
	ctx, stop := context.WithCancel(context.Background())
	p := &Pinned{dev: d, mem: mem, stop: stop, done: make(chan struct{})}
	if err := d.drv.add(p); err != nil {
		stop()
		return nil, fmt.Errorf("%s: pin: %w", d.Name(), err)
	}
	go p.register(ctx)
	return p, nil
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func (p *Pinned) register(ctx context.Context) {
	defer close(p.done)
	for at := 0; at < len(p.mem); at += pinPieceBytes {
		piece := p.mem[at:min(at+pinPieceBytes, len(p.mem))]
		if p.err = p.registerPiece(ctx, piece); p.err != nil {
			return
		}
		p.bytes.Add(int64(len(piece)))
	}
}

func (p *Pinned) registerPiece(ctx context.Context, piece []byte) error {
	done, err := p.dev.use(ctx)
	if err != nil {
		return err
	}
	defer done()
	leave, err := p.dev.enter()
	if err != nil {
		return err
	}
	defer leave()
	err = p.dev.drv.call(cuMemHostRegister, address(piece), uintptr(len(piece)), hostAllocPortable)
	if err != nil {
		return fmt.Errorf("pin %d bytes of host memory, %d of %d done: %w; is the limit on locked memory (ulimit -l) lower?",
			len(piece), p.bytes.Load(), len(p.mem), p.dev.check(err))
	}
	return nil
}

// Bytes is how much of the memory is registered so far.
func (p *Pinned) Bytes() int64 { return p.bytes.Load() }

// Wait returns when all is registered, or says why it will not be.
func (p *Pinned) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the registering and undoes it, once no copy uses the memory. It must come
// before the Close of the device that made it. Closing twice is harmless.
func (p *Pinned) Close() error {
	p.stop()
	<-p.done
	// The device first: copies take the two in this order too.
	done, err := p.dev.use(context.Background())
	if err != nil && p.dev.Lost() == nil {
		return fmt.Errorf("unpin: %w", err)
	}
	if err == nil {
		defer done()
	}
	p.use.Lock()
	defer p.use.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	p.dev.drv.remove(p)
	if p.dev.Lost() != nil {
		return nil // the driver took its registrations along
	}
	leave, err := p.dev.enter()
	if err != nil {
		return fmt.Errorf("unpin: %w", err)
	}
	defer leave()
	var errs []error
	for at := int64(0); at < p.bytes.Load(); at += pinPieceBytes {
		errs = append(errs, p.dev.drv.call(cuMemHostUnregister, address(p.mem[at:])))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("unpin: %w", err)
	}
	return nil
}

// add lists p, unless another one has a part of its memory.
func (d *driver) add(p *Pinned) error {
	d.pinMu.Lock()
	defer d.pinMu.Unlock()
	var list []*Pinned
	for _, o := range d.pinned() {
		if overlap(o.mem, p.mem) {
			return errors.New("another Pin has a part of this memory; close it first")
		}
		list = append(list, o)
	}
	list = append(list, p)
	d.pins.Store(&list)
	return nil
}

func (d *driver) remove(p *Pinned) {
	d.pinMu.Lock()
	defer d.pinMu.Unlock()
	var list []*Pinned
	for _, o := range d.pinned() {
		if o != p {
			list = append(list, o)
		}
	}
	d.pins.Store(&list)
}

func (d *driver) pinned() []*Pinned {
	if l := d.pins.Load(); l != nil {
		return *l
	}
	return nil
}

func overlap(a, b []byte) bool {
	return address(a) < address(b)+uintptr(len(b)) && address(b) < address(a)+uintptr(len(a))
}

// hold keeps Close of a Pinned from what a copy to host uses, until release is called.
func (d *driver) hold(host []byte) (release func()) {
	var held []*Pinned
	for _, p := range d.pinned() {
		if overlap(p.mem, host) {
			p.use.RLock()
			held = append(held, p)
		}
	}
	return func() {
		for _, p := range held {
			p.use.RUnlock()
		}
	}
}

// unbroken returns how many bytes of host one DMA may move: up to the next border of a
// piece of pinned memory, or of what is pinned at all.
func (d *driver) unbroken(host []byte) int {
	n := uintptr(len(host))
	for _, p := range d.pinned() {
		if !overlap(p.mem, host) {
			continue
		}
		if a, b := address(host), address(p.mem); a < b {
			n = min(n, b-a)
		} else {
			n = min(n, uintptr(len(p.mem))-(a-b), pinPieceBytes-(a-b)%pinPieceBytes)
		}
	}
	return int(n)
}

// isPinned says whether a DMA reaches all of host.
func (d *driver) isPinned(host []byte) bool {
	at, n := address(host), uintptr(len(host))
	for _, p := range d.pinned() {
		if from := address(p.mem); at >= from && at+n <= from+uintptr(p.bytes.Load()) {
			return true
		}
	}
	found := false
	d.hosts.Range(func(from, size any) bool {
		found = at >= from.(uintptr) && at+n <= from.(uintptr)+size.(uintptr)
		return !found
	})
	return found
}

// Host is pinned memory that the driver allocated.
type Host struct {
	dev *Device

	mu  sync.Mutex
	mem []byte
}

// AllocHost makes size bytes of pinned memory, all zero. It must be closed before the
// device that made it, and its bytes must not be used after Close.
func (d *Device) AllocHost(size int64) (*Host, error) {
	done, err := d.use(context.Background())
	if err != nil {
		return nil, fmt.Errorf("%s: host memory: %w", d.Name(), err)
	}
	defer done()
	if size <= 0 {
		return nil, fmt.Errorf("%s: host memory: size is %d bytes; it must be positive", d.Name(), size)
	}
	leave, err := d.enter()
	if err != nil {
		return nil, fmt.Errorf("%s: host memory: %w", d.Name(), err)
	}
	defer leave()
	var p unsafe.Pointer
	if err := d.drv.call(cuMemHostAlloc, uintptr(unsafe.Pointer(&p)), uintptr(size), hostAllocPortable); err != nil {
		return nil, fmt.Errorf("%s: host memory: %d bytes: %w", d.Name(), size, d.check(err))
	}
	h := &Host{dev: d, mem: unsafe.Slice((*byte)(p), size)}
	clear(h.mem) // the driver promises nothing about it
	d.drv.hosts.Store(uintptr(p), uintptr(size))
	return h, nil
}

// Bytes is the memory.
func (h *Host) Bytes() []byte { return h.mem }

// Close gives the memory back. Closing twice is harmless.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mem == nil {
		return nil
	}
	done, err := h.dev.use(context.Background())
	if h.dev.Lost() != nil {
		if err == nil {
			done()
		}
		return nil // it stays until the process ends; somebody may still read it
	}
	if err != nil {
		return fmt.Errorf("free host memory: %w", err)
	}
	defer done()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := address(h.mem)
	h.mem = nil
	h.dev.drv.hosts.Delete(p)
	err = firstError(
		func() error { return h.dev.drv.call(cuCtxSetCurrent, h.dev.ctx) },
		func() error { return h.dev.drv.call(cuMemFreeHost, p) },
	)
	if err != nil {
		return fmt.Errorf("free host memory: %w", h.dev.check(err))
	}
	return nil
}
