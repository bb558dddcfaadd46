// Package standin is the engine's side of a GPU, for tests: a process with a stream of its
// own that allocates and maps memory by CUDA IPC, fills it with words that nobody else
// knows, behind a kernel that takes its time, and records events.
//
// It shares nothing with package gpu/cuda but the driver, so that a fault there does not
// hide itself here.
package standin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
)

// ErrNoGPU says that there is no driver or no GPU.
var ErrNoGPU = errors.New("no GPU")

// HandleBytes of a CUDA IPC handle.
const HandleBytes = 64

// kernels are written for sm_70. fill sets words to those of Word; delay ends after so many
// nanoseconds.
const kernels = `
.version 6.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 at, .param .u64 n, .param .u64 seed) {
	.reg .u64 %t<8>;
	.reg .u32 %r<4>;
	.reg .pred %p<2>;
	ld.param.u64 %t0, [at];
	ld.param.u64 %t1, [n];
	ld.param.u64 %t2, [seed];
	mov.u32 %r0, %ctaid.x;
	mov.u32 %r1, %ntid.x;
	mov.u32 %r2, %tid.x;
	mul.wide.u32 %t3, %r0, %r1;
	cvt.u64.u32 %t4, %r2;
	add.u64 %t3, %t3, %t4;
	setp.ge.u64 %p0, %t3, %t1;
	@%p0 bra done;
	mad.lo.u64 %t5, %t3, 0x9E3779B97F4A7C15U, %t2;
	shr.u64 %t6, %t5, 33;
	xor.b64 %t5, %t5, %t6;
	mul.lo.u64 %t5, %t5, 0xFF51AFD7ED558CCDU;
	shr.u64 %t6, %t5, 33;
	xor.b64 %t5, %t5, %t6;
	shl.b64 %t7, %t3, 3;
	add.u64 %t7, %t0, %t7;
	st.global.u64 [%t7], %t5;
done:
	ret;
}
.visible .entry trap_now() { trap; }
.visible .entry delay(.param .u64 ns) {
	.reg .u64 %t<5>;
	.reg .pred %p<2>;
	ld.param.u64 %t1, [ns];
	mov.u64 %t2, %globaltimer;
again:
	mov.u64 %t3, %globaltimer;
	sub.u64 %t4, %t3, %t2;
	setp.lt.u64 %p1, %t4, %t1;
	@%p1 bra again;
	ret;
}
`

// Word is the i-th word of what Fill writes.
func Word(seed, i uint64) uint64 {
	x := i*0x9E3779B97F4A7C15 + seed
	x ^= x >> 33
	x *= 0xFF51AFD7ED558CCD
	return x ^ x>>33
}

// Filled is what Fill writes, n bytes of it.
func Filled(seed uint64, n int) []byte {
	b := make([]byte, 0, n)
	for i := range n / 8 {
		b = binary.LittleEndian.AppendUint64(b, Word(seed, uint64(i)))
	}
	return b
}

// functions of the driver, by name in the library.
type functions struct {
	init, get, retain, setCurrent, load, function, launch      uintptr
	alloc, free, getHandle, openHandle, closeHandle, toHost    uintptr
	streamMake, streamSync, eventMake, eventRecord, eventShare uintptr
	memInfo                                                    uintptr
}

func (f *functions) resolve(lib uintptr) error {
	for name, p := range map[string]*uintptr{
		"cuInit": &f.init, "cuDeviceGet": &f.get, "cuDevicePrimaryCtxRetain": &f.retain, "cuCtxSetCurrent": &f.setCurrent,
		"cuModuleLoadData": &f.load, "cuModuleGetFunction": &f.function, "cuLaunchKernel": &f.launch,
		"cuMemAlloc_v2": &f.alloc, "cuMemFree_v2": &f.free, "cuIpcGetMemHandle": &f.getHandle, "cuIpcOpenMemHandle_v2": &f.openHandle,
		"cuIpcCloseMemHandle": &f.closeHandle, "cuMemcpyDtoHAsync_v2": &f.toHost, "cuStreamCreate": &f.streamMake, "cuStreamSynchronize": &f.streamSync,
		"cuEventCreate": &f.eventMake, "cuEventRecord": &f.eventRecord, "cuIpcGetEventHandle": &f.eventShare, "cuMemGetInfo_v2": &f.memInfo,
	} {
		var err error
		if *p, err = purego.Dlsym(lib, name); err != nil {
			return fmt.Errorf("%w: %v", ErrNoGPU, err)
		}
	}
	return nil
}

// An Engine has a stream on one GPU. Its methods are for one goroutine.
type Engine struct {
	fn          functions
	ctx, stream uintptr
	fill, delay uintptr
	trap        uintptr
}

// Open takes the GPU with this number. What it takes goes with the process.
func Open(ordinal int) (*Engine, error) {
	lib, err := purego.Dlopen("libcuda.so.1", purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrNoGPU, err)
	}
	e := &Engine{}
	if err := e.fn.resolve(lib); err != nil {
		return nil, err
	}
	if err := e.call("init", e.fn.init, 0); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoGPU, err)
	}
	var dev int32
	var module uintptr
	text := []byte(kernels + "\x00")
	name := func(s string) uintptr { return uintptr(unsafe.Pointer(unsafe.StringData(s))) }
	if err := e.call("device", e.fn.get, uintptr(unsafe.Pointer(&dev)), uintptr(ordinal)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoGPU, err)
	}
	if err := e.call("context", e.fn.retain, uintptr(unsafe.Pointer(&e.ctx)), uintptr(dev)); err != nil {
		return nil, err
	}
	return e, e.in(func() error {
		return errors.Join(
			e.call("module", e.fn.load, uintptr(unsafe.Pointer(&module)), uintptr(unsafe.Pointer(&text[0]))),
			e.call("fill", e.fn.function, uintptr(unsafe.Pointer(&e.fill)), module, name("fill\x00")),
			e.call("delay", e.fn.function, uintptr(unsafe.Pointer(&e.delay)), module, name("delay\x00")),
			e.call("trap", e.fn.function, uintptr(unsafe.Pointer(&e.trap)), module, name("trap_now\x00")),
			e.call("stream", e.fn.streamMake, uintptr(unsafe.Pointer(&e.stream)), 1), // non-blocking
		)
	})
}

// in runs f with the context current.
func (e *Engine) in(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := e.call("set context", e.fn.setCurrent, e.ctx); err != nil {
		return err
	}
	return f()
}

//go:uintptrescapes
func (e *Engine) call(what string, fn uintptr, args ...uintptr) error {
	if r, _, _ := purego.SyscallN(fn, args...); uint32(r) != 0 {
		return fmt.Errorf("stand-in: %s: CUDA error %d", what, uint32(r))
	}
	return nil
}

// Free is the free memory of the GPU, in bytes.
func (e *Engine) Free() (free int64, err error) {
	var f, t uintptr
	err = e.in(func() error {
		return e.call("memory", e.fn.memInfo, uintptr(unsafe.Pointer(&f)), uintptr(unsafe.Pointer(&t)))
	})
	return int64(f), err
}

// Alloc makes memory and exports it.
func (e *Engine) Alloc(bytes int64) (at uint64, handle []byte, err error) {
	var raw [HandleBytes]byte
	err = e.in(func() error {
		if err := e.call("alloc", e.fn.alloc, uintptr(unsafe.Pointer(&at)), uintptr(bytes)); err != nil {
			return err
		}
		return e.call("export", e.fn.getHandle, uintptr(unsafe.Pointer(&raw)), uintptr(at))
	})
	return at, raw[:], err
}

// Release frees what Alloc made.
func (e *Engine) Release(at uint64) error {
	return e.in(func() error { return e.call("free", e.fn.free, uintptr(at)) })
}

// Map opens memory of another process.
func (e *Engine) Map(handle []byte) (at uint64, err error) {
	if len(handle) != HandleBytes {
		return 0, fmt.Errorf("stand-in: a handle of %d bytes", len(handle))
	}
	raw := [HandleBytes]byte(handle)
	err = e.in(func() error {
		p := uintptr(unsafe.Pointer(&at))
		if runtime.GOARCH != "amd64" { // a large structure goes by reference
			return e.call("map", e.fn.openHandle, p, uintptr(unsafe.Pointer(&raw)), 1)
		}
		// The structure goes on the stack, behind six registers of which it needs none.
		args := []uintptr{p, 1, 0, 0, 0, 0}
		for _, w := range *(*[HandleBytes / 8]uintptr)(unsafe.Pointer(&raw)) {
			args = append(args, w)
		}
		return e.call("map", e.fn.openHandle, args...)
	})
	return at, err
}

// Unmap closes what Map opened.
func (e *Engine) Unmap(at uint64) error {
	return e.in(func() error { return e.call("unmap", e.fn.closeHandle, uintptr(at)) })
}

// Fill writes bytes, a multiple of 8, at an address, in the stream.
func (e *Engine) Fill(at uint64, bytes int, seed uint64) error {
	n := uint64(bytes / 8)
	const threads = 256
	return e.launch("fill", e.fill, (n+threads-1)/threads, threads, at, n, seed)
}

// Delay keeps the stream busy.
func (e *Engine) Delay(d time.Duration) error {
	return e.launch("delay", e.delay, 1, 1, uint64(d))
}

// Trap runs a kernel that faults, and returns when it has. That is the end of this GPU for
// the whole process, with all who share its primary context.
func (e *Engine) Trap() error {
	if err := e.launch("trap", e.trap, 1, 1); err != nil {
		return err
	}
	if e.in(func() error { return e.call("sync", e.fn.streamSync, e.stream) }) == nil {
		return errors.New("trap: the kernel has ended without a fault")
	}
	return nil
}

func (e *Engine) launch(what string, kernel uintptr, blocks, threads uint64, params ...uint64) error {
	at := make([]unsafe.Pointer, len(params)+1) // one more: a kernel may have none
	for i := range params {
		at[i] = unsafe.Pointer(&params[i])
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	for i := range params {
		pin.Pin(&params[i])
	}
	return e.in(func() error {
		return e.call(what, e.fn.launch, kernel, uintptr(blocks), 1, 1, uintptr(threads), 1, 1, 0, e.stream, uintptr(unsafe.Pointer(&at[0])), 0)
	})
}

// Read copies bytes out, behind all that the stream has been given.
func (e *Engine) Read(at uint64, to []byte) error {
	return e.in(func() error {
		if err := e.call("read", e.fn.toHost, uintptr(unsafe.Pointer(&to[0])), uintptr(at), uintptr(len(to)), e.stream); err != nil {
			return err
		}
		return e.call("sync", e.fn.streamSync, e.stream)
	})
}

// An Event can be recorded again and again.
type Event struct {
	event uintptr
	// Handle is for other processes.
	Handle []byte
}

// NewEvent makes an event for other processes.
func (e *Engine) NewEvent() (*Event, error) {
	ev := &Event{}
	var raw [HandleBytes]byte
	err := e.in(func() error {
		if err := e.call("event", e.fn.eventMake, uintptr(unsafe.Pointer(&ev.event)), 2|4); err != nil { // no timing, interprocess
			return err
		}
		return e.call("export event", e.fn.eventShare, uintptr(unsafe.Pointer(&raw)), ev.event)
	})
	ev.Handle = raw[:]
	return ev, err
}

// Record marks all that the stream has been given.
func (e *Engine) Record(ev *Event) error {
	return e.in(func() error { return e.call("record", e.fn.eventRecord, ev.event, e.stream) })
}
