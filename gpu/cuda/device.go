package cuda

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/tierd/tierd/gpu"
)

const (
	// DefaultStagingBytes is 16 MiB: 300 us of PCIe 5, so that the 2 us between two DMAs
	// are below a hundredth.
	DefaultStagingBytes = 16 << 20
	// DefaultBuffers is how many are in flight in a direction. Two keep the link full on
	// an idle GPU. Beside a model a kernel waits for a wave of the model's blocks to end,
	// a millisecond or more, and what is gathered by then has to last until the next.
	DefaultBuffers = 8
	// buffersMax and stagingBytesMax bound what a lane takes from the model: 4 GiB.
	buffersMax      = 16
	stagingBytesMax = 256 << 20
	stagingBytesMin = 64 << 10
	// shareBytes is the unit in which CUDA IPC shares memory.
	shareBytes = 2 << 20
	// pciBusIDBytes holds "00000000:00:00.0".
	pciBusIDBytes = 20
)

//go:embed kernel/copy.ptx
var copyPTX string

// Info says which GPU a device is.
type Info struct {
	// Ordinal is the driver's number, which depends on CUDA_VISIBLE_DEVICES.
	Ordinal int
	// Name of the model; UUID as "GPU-" and five groups of hexadecimal digits, as NVML
	// and nvidia-smi have it; PCIBusID as "0000:00:00.0".
	Name, UUID, PCIBusID string
	// TotalBytes of memory.
	TotalBytes int64
	// DriverVersion is 1000 x major + 10 x minor of the CUDA version that the driver
	// supports.
	DriverVersion int
	// MPS says that this process reaches the GPU through CUDA's Multi-Process Service.
	MPS bool
}

// Options of a device. The zero value is a good choice.
type Options struct {
	// StagingBytes is the size of a staging buffer, and Buffers how many there are in
	// each direction; together they take 2 x StagingBytes x Buffers of device memory.
	// Zero means DefaultStagingBytes and DefaultBuffers.
	StagingBytes int64
	Buffers      int
	// Separate says that the engine is another process. The GPU does not run kernels of
	// two processes at the same time but in turns, which costs the engine a tenth of its
	// speed while kernels of ours are about (BENCHMARKS.md), however small they are. A
	// measured tuning then prefers DMAs without a kernel as long as one call alone has a
	// third of the speed, instead of nine tenths of it or more. It is not the default, because an
	// engine in this process pays for no turns; and under MPS, which runs kernels of all its
	// processes at the same time, it does nothing.
	Separate bool
	// Tuning is used as it is when it is set. Otherwise the device is measured at Open,
	// which takes about half a second of it.
	Tuning *Tuning
	// TuningFile keeps what was measured, for each GPU by UUID, driver and kernel, so
	// that the next Open need not measure. "" keeps nothing.
	TuningFile string
}

// A LostError says that a device can no longer be used, and why.
type LostError struct {
	// Device is its name, such as "cuda:0".
	Device string
	// Cause is what the driver said first.
	Cause *Error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%s: %v: %v; restart the daemon to use it again, and look for Xid messages in the kernel's log", e.Device, gpu.ErrLost, e.Cause)
}

// Unwrap lets errors.Is find gpu.ErrLost, and errors.As the Error.
func (e *LostError) Unwrap() []error { return []error{gpu.ErrLost, e.Cause} }

// A Device is one GPU. It implements gpu.Device and gpu.Ordered. Several devices of one
// GPU share its primary context, which is also that of the CUDA runtime in this process.
type Device struct {
	drv    *driver
	info   Info
	handle int32
	ctx    uintptr
	opts   Options
	// lowPriority is the number of the lowest stream priority: the largest.
	lowPriority int32
	module      uintptr
	lanes       [2]*lane // gather, scatter
	tuning      Tuning
	lost        atomic.Pointer[LostError]
	watch       watch
	serials     atomic.Uint64 // regions so far

	life    sync.RWMutex // held for reading by every call, for writing by Close
	closed  bool
	mu      sync.Mutex // guards the maps
	regions map[*region]struct{}
	events  map[*Event]struct{}
	// exported are the IPC handles of own memory and events, which CUDA does not open
	// in the process that made them.
	exported map[[ipcHandleBytes]byte]struct{}
}

var _ gpu.Ordered = (*Device)(nil)

// Devices lists the GPUs that this process can see.
func Devices() ([]Info, error) {
	drv, err := load()
	if err != nil {
		return nil, fmt.Errorf("CUDA: %w", err)
	}
	var n int32
	if err := drv.call(cuDeviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, fmt.Errorf("CUDA: %w", err)
	}
	infos := make([]Info, n)
	for i := range infos {
		if infos[i], _, err = drv.info(i); err != nil {
			return nil, fmt.Errorf("CUDA: %w", err)
		}
	}
	return infos, nil
}

func (d *driver) info(ordinal int) (in Info, handle int32, err error) {
	var name [256]byte
	var bus [pciBusIDBytes]byte
	var uuid [16]byte
	var total uintptr
	var major int32
	err = firstError(
		func() error { return d.call(cuDeviceGet, uintptr(unsafe.Pointer(&handle)), uintptr(ordinal)) },
		func() error {
			return d.call(cuDeviceGetName, uintptr(unsafe.Pointer(&name)), uintptr(len(name)), uintptr(handle))
		},
		func() error { return d.call(cuDeviceGetUUID, uintptr(unsafe.Pointer(&uuid)), uintptr(handle)) },
		func() error {
			return d.call(cuDeviceGetPCIBusID, uintptr(unsafe.Pointer(&bus)), uintptr(len(bus)), uintptr(handle))
		},
		func() error { return d.call(cuDeviceTotalMem, uintptr(unsafe.Pointer(&total)), uintptr(handle)) },
		func() error {
			return d.call(cuDeviceGetAttribute, uintptr(unsafe.Pointer(&major)), attrComputeMajor, uintptr(handle))
		},
	)
	if err != nil {
		return Info{}, 0, err
	}
	in = Info{
		Ordinal: ordinal, Name: cString(unsafe.Pointer(&name)), PCIBusID: cString(unsafe.Pointer(&bus)),
		UUID:       fmt.Sprintf("GPU-%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:]),
		TotalBytes: int64(total), DriverVersion: d.version,
	}
	var mps int32 // an older driver does not know the attribute
	_ = d.code(cuDeviceGetAttribute, uintptr(unsafe.Pointer(&mps)), attrMPS, uintptr(handle))
	in.MPS = mps != 0
	if major < computeMajorMin {
		return in, handle, fmt.Errorf("%w: %s has compute capability %d.x; the kernels need %d.0 or later", ErrNoDevice, in.Name, major, computeMajorMin)
	}
	return in, handle, nil
}

// Open opens the GPU with this number, measures it if need be, and takes its staging
// buffers.
func Open(ctx context.Context, ordinal int, o Options) (*Device, error) {
	fail := func(err error) (*Device, error) { return nil, fmt.Errorf("cuda:%d: %w", ordinal, err) }
	if o.StagingBytes == 0 {
		o.StagingBytes = DefaultStagingBytes
	}
	if o.Buffers == 0 {
		o.Buffers = DefaultBuffers
	}
	switch {
	case o.Buffers < 2 || o.Buffers > buffersMax:
		return fail(fmt.Errorf("%d buffers; there must be 2 to %d", o.Buffers, buffersMax))
	case o.StagingBytes < stagingBytesMin || o.StagingBytes > stagingBytesMax || o.StagingBytes%pieceBytesMax != 0:
		return fail(fmt.Errorf("staging buffers of %d bytes; they must have %d to %d, in units of %d", o.StagingBytes, stagingBytesMin, stagingBytesMax, pieceBytesMax))
	}
	drv, err := load()
	if err != nil {
		return fail(err)
	}
	var n int32
	if err := drv.call(cuDeviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return fail(err)
	}
	if ordinal < 0 || ordinal >= int(n) {
		return fail(fmt.Errorf("%w: number %d was asked for, but there are %d GPUs", ErrNoDevice, ordinal, n))
	}
	d := newDevice(drv, o)
	if d.info, d.handle, err = drv.info(ordinal); err != nil {
		return fail(err)
	}
	d.opts.Separate = o.Separate && !d.info.MPS
	if err := d.start(ctx); err != nil {
		d.Close()
		return fail(err)
	}
	return d, nil
}

func newDevice(drv *driver, o Options) *Device {
	d := &Device{
		drv: drv, opts: o, regions: map[*region]struct{}{}, events: map[*Event]struct{}{},
		exported: map[[ipcHandleBytes]byte]struct{}{},
	}
	d.watch.dev = d
	return d
}

// start takes what a device needs. Close gives back a part of it too.
func (d *Device) start(ctx context.Context) error {
	if err := d.drv.call(cuDevicePrimaryCtxRetain, uintptr(unsafe.Pointer(&d.ctx)), uintptr(d.handle)); err != nil {
		return err
	}
	if err := d.startLanes(); err != nil {
		return err
	}
	var err error
	d.tuning, err = d.tune(ctx)
	return err
}

func (d *Device) startLanes() error {
	leave, err := d.enter()
	if err != nil {
		return err
	}
	defer leave()
	text := []byte(copyPTX + "\x00")
	var kernels [2]uintptr
	var greatest int32
	err = firstError(
		func() error {
			return d.drv.call(cuCtxGetStreamPriorityRange, uintptr(unsafe.Pointer(&d.lowPriority)), uintptr(unsafe.Pointer(&greatest)))
		},
		func() error {
			return d.drv.call(cuModuleLoadData, uintptr(unsafe.Pointer(&d.module)), uintptr(unsafe.Pointer(&text[0])))
		},
		func() error { return d.function(&kernels[0], d.module, "tierd_gather\x00") },
		func() error { return d.function(&kernels[1], d.module, "tierd_scatter\x00") },
	)
	for i := range d.lanes {
		if err == nil {
			d.lanes[i], err = newLane(d, i == 1, kernels[i])
		}
	}
	return err
}

func (d *Device) function(f *uintptr, module uintptr, name string) error {
	return d.drv.call(cuModuleGetFunction, uintptr(unsafe.Pointer(f)), module, uintptr(unsafe.Pointer(unsafe.StringData(name))))
}

// enter makes this device's context that of the thread, and keeps the goroutine on it
// until leave is called. It fails on a lost device.
func (d *Device) enter() (leave func(), err error) {
	if e := d.lost.Load(); e != nil {
		return nil, e
	}
	runtime.LockOSThread()
	if err := d.drv.call(cuCtxSetCurrent, d.ctx); err != nil {
		runtime.UnlockOSThread()
		return nil, d.check(err)
	}
	return runtime.UnlockOSThread, nil
}

// check turns an error after which the context is unusable into a LostError.
func (d *Device) check(err error) error {
	var e *Error
	if errors.As(err, &e) && fatal[e.Code] {
		return d.lose(e)
	}
	return err
}

// lose marks the device as lost; the first cause stays.
func (d *Device) lose(cause error) error {
	var e *Error
	if !errors.As(cause, &e) {
		return cause // lost already
	}
	d.lost.CompareAndSwap(nil, &LostError{Device: d.Name(), Cause: e})
	return d.lost.Load()
}

// Lost returns why the device is lost, or nil.
func (d *Device) Lost() error {
	if e := d.lost.Load(); e != nil {
		return e
	}
	return nil
}

// Name implements gpu.Device.
func (d *Device) Name() string { return fmt.Sprintf("cuda:%d", d.info.Ordinal) }

// Info says which GPU it is.
func (d *Device) Info() Info { return d.info }

// Tuning is what the device was given, or measured at Open.
func (d *Device) Tuning() Tuning { return d.tuning }

// use begins a call: ready to go when err is nil, and then done must be called.
func (d *Device) use(ctx context.Context) (done func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d.life.RLock()
	if d.closed {
		d.life.RUnlock()
		return nil, gpu.ErrClosed
	}
	if e := d.lost.Load(); e != nil {
		d.life.RUnlock()
		return nil, e
	}
	return d.life.RUnlock, nil
}

// MemoryBytes is how much memory the GPU has, and how much of it is free.
func (d *Device) MemoryBytes() (free, total int64, err error) {
	done, err := d.use(context.Background())
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w", d.Name(), err)
	}
	defer done()
	leave, err := d.enter()
	if err != nil {
		return 0, 0, err
	}
	defer leave()
	if free, total, err = d.memory(); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", d.Name(), d.check(err))
	}
	return free, total, nil
}

func (d *Device) memory() (free, total int64, err error) {
	var f, t uintptr
	err = d.drv.call(cuMemGetInfo, uintptr(unsafe.Pointer(&f)), uintptr(unsafe.Pointer(&t)))
	return int64(f), int64(t), err
}

// Open counts the regions and events that are not closed, of this process and of others: each
// keeps a handle of CUDA IPC, or the memory of an engine that has ended.
func (d *Device) Open() (regions, events int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.regions), len(d.events)
}

// Gather implements gpu.Device.
func (d *Device) Gather(ctx context.Context, dst []byte, src gpu.Region, frags []gpu.Fragment) error {
	return d.move(ctx, "gather", d.lanes[0], src, frags, dst)
}

// Scatter implements gpu.Device.
func (d *Device) Scatter(ctx context.Context, dst gpu.Region, frags []gpu.Fragment, src []byte) error {
	return d.move(ctx, "scatter", d.lanes[1], dst, frags, src)
}

func (d *Device) move(ctx context.Context, what string, l *lane, reg gpu.Region, frags []gpu.Fragment, host []byte) error {
	done, err := d.use(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer done()
	parts, release, err := gpu.Hold(reg, func(r *region) bool { return r.dev == d })
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer release()
	apart, err := gpu.CheckFragments(reg.Size(), frags, len(host), l.scatter)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	all := list{base: parts[0].base, frags: frags, apart: apart}
	if len(parts) > 1 {
		if all, err = absolute(reg, parts, all); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if err := l.move(ctx, d.tuning, all, host); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// absolute gives the fragments of a joined region their places in the address space of the
// GPU, in front of which lie 0 bytes. Its seams are where parts begin, in rising order: the
// driver refuses a copy that goes from one allocation into another.
func absolute(reg gpu.Region, parts []*region, l list) (list, error) {
	places, err := gpu.Places(reg, l.frags)
	if err != nil {
		return list{}, err
	}
	l.base, l.frags = 0, make([]gpu.Fragment, len(places))
	for _, p := range parts {
		l.seams = append(l.seams, int64(p.base))
	}
	slices.Sort(l.seams)
	for i, p := range places {
		l.frags[i] = gpu.Fragment{Offset: int64(parts[p.Part].base) + p.Offset, Length: p.Length}
	}
	return l, nil
}

// giveBack closes something of this device's: forget takes it off the books, and free gives
// it back to the driver, with the context current while there is one.
func (d *Device) giveBack(what string, forget func(), free func() error) error {
	d.life.RLock()
	defer d.life.RUnlock()
	if d.closed {
		return nil // Close of the device took it along
	}
	d.mu.Lock()
	forget()
	d.mu.Unlock()
	if d.Lost() != nil {
		return free()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := firstError(func() error { return d.drv.call(cuCtxSetCurrent, d.ctx) }, free)
	if err != nil && d.Lost() == nil {
		return fmt.Errorf("%s: close %s: %w", d.Name(), what, d.check(err))
	}
	return nil
}

// Close implements gpu.Device. It waits for running calls.
func (d *Device) Close() error {
	d.life.Lock()
	defer d.life.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	if d.ctx == 0 {
		return nil
	}
	if d.Lost() != nil {
		// The context is past saving, and the driver may block in it: what it holds goes
		// with the process. Regions and events only get to know that they are closed.
		for r := range d.regions {
			_ = r.free()
		}
		for e := range d.events {
			_ = e.free()
		}
		return nil
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	errs := []error{d.drv.call(cuCtxSetCurrent, d.ctx)}
	for r := range d.regions {
		errs = append(errs, r.free())
	}
	for e := range d.events {
		errs = append(errs, e.free())
	}
	for _, l := range d.lanes {
		if l != nil {
			errs = append(errs, l.close())
		}
	}
	if d.module != 0 {
		errs = append(errs, d.drv.call(cuModuleUnload, d.module))
	}
	errs = append(errs, d.drv.call(cuDevicePrimaryCtxRelease, uintptr(d.handle)))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: close: %w", d.Name(), err)
	}
	return nil
}
