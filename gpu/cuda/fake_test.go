package cuda

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"
)

// A fakeDriver is a driver of Go functions, whose device memory is Go memory and whose
// streams are goroutines: the lanes run where there is no GPU, and the race detector sees
// who touches bytes that are in flight. It refuses what the real one refuses: a copy that
// leaves an allocation or a registered piece of host memory.
type fakeDriver struct {
	t *testing.T
	*driver
	// fail, when it is set, is asked at each call; a code that is not 0 is the answer.
	fail atomic.Pointer[func(s symbol) int]
	// delay is how long a command of a stream takes; nil is no time.
	delay atomic.Pointer[func() time.Duration]
	calls [symbols]atomic.Int64
	// busy is how many commands that move bytes are queued or run.
	busy atomic.Int64

	// running is held for reading by commands, for writing by what ends them all: after a
	// fatal code nothing moves any more, and every call gets it.
	running sync.RWMutex
	dead    atomic.Int64

	mu      sync.Mutex
	memory  map[uint64][]byte // allocations of the device and of the host, by address
	arena   []byte            // for the next allocations
	pieces  map[uint64]int    // registered host memory
	streams map[uintptr]*fakeStream
	events  map[uintptr]*fakeEvent
	last    uintptr // handle
	wrong   []string
}

// A fakeStream runs its commands one behind the other.
type fakeStream struct {
	queue   chan func()
	pending sync.WaitGroup
}

type fakeEvent struct{ records, done atomic.Int64 }

// fakeTable is the functions, made once: a process has room for few callbacks. They act on
// the fake that was made last.
var (
	fakeNow   atomic.Pointer[fakeDriver]
	fakeTable = sync.OnceValue(makeFakeTable)
)

func newFake(t *testing.T) *fakeDriver {
	switch runtime.GOARCH {
	case "amd64", "arm64":
	default:
		t.Skip("skipped: no callbacks of 11 parameters here")
	}
	f := &fakeDriver{
		t: t, driver: &driver{version: 12080, fn: fakeTable()}, memory: map[uint64][]byte{}, pieces: map[uint64]int{},
		streams: map[uintptr]*fakeStream{}, events: map[uintptr]*fakeEvent{},
	}
	fakeNow.Store(f)
	t.Cleanup(func() {
		f.delay.Store(nil)
		for _, s := range f.streams { // those of a device that was lost
			s.pending.Wait()
			close(s.queue)
		}
		require.Empty(t, f.wrong, "what the driver was asked that it must not be")
	})
	return f
}

// open is Open for this driver.
func (f *fakeDriver) open(t *testing.T, o Options) *Device {
	t.Helper()
	if o.StagingBytes == 0 {
		o.StagingBytes = DefaultStagingBytes
	}
	if o.Buffers == 0 {
		o.Buffers = DefaultBuffers
	}
	d := newDevice(f.driver, o)
	require.NoError(t, d.start(t.Context()))
	t.Cleanup(func() {
		f.atRest(t, d)
		require.NoError(t, d.Close())
	})
	return d
}

// atRest says that no call has left anything in the lanes.
func (f *fakeDriver) atRest(t *testing.T, d *Device) {
	t.Helper()
	d.life.Lock() // behind the calls
	defer d.life.Unlock()
	for _, l := range d.lanes {
		require.Zero(t, l.inFlight.Load(), "bytes in flight")
		require.Len(t, l.lead, 1, "the leader's token")
		require.Len(t, l.free, len(l.buffers), "free buffers")
		seen := map[*buffer]bool{}
		for range l.buffers {
			b := <-l.free
			require.False(t, seen[b], "a buffer is free twice")
			seen[b] = true
			require.False(t, b.flying.Load())
			require.Empty(t, b.done)
			l.free <- b
		}
	}
}

func (f *fakeDriver) wrongf(format string, args ...any) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wrong = append(f.wrong, fmt.Sprintf(format, args...))
	return 1
}

// pointer is the address as a pointer, in a way that the compiler's checks of pointers take
// for one that came from elsewhere.
func pointer(at uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&at)) }

func store[T any](at uintptr, v T) uintptr {
	*(*T)(pointer(at)) = v
	return 0
}

func (f *fakeDriver) handle() uintptr {
	f.last += 16
	return f.last
}

// alloc puts allocations one behind the other, where nothing but the seams keeps copies of
// one from going on into the next.
func (f *fakeDriver) alloc(at, bytes uintptr) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	if uintptr(len(f.arena)) < bytes {
		f.arena = make([]byte, max(bytes, 48<<20))
	}
	b := f.arena[:bytes:bytes]
	f.arena = f.arena[bytes:]
	f.memory[uint64(address(b))] = b
	return store(at, uint64(address(b)))
}

func (f *fakeDriver) release(at uintptr) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.memory[uint64(at)] == nil {
		f.wrong = append(f.wrong, "memory freed that is not there")
		return 1
	}
	delete(f.memory, uint64(at))
	return 0
}

// device returns device memory, which lies in one allocation.
func (f *fakeDriver) device(at uint64, n int) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	for from, b := range f.memory {
		if at >= from && at < from+uint64(len(b)) {
			if uint64(n) <= from+uint64(len(b))-at {
				return b[at-from:][:n:n]
			}
			f.wrong = append(f.wrong, fmt.Sprintf("%d bytes leave their allocation", n))
			return nil
		}
	}
	f.wrong = append(f.wrong, fmt.Sprintf("%d bytes are in no allocation", n))
	return nil
}

// host returns host memory, which lies in one registered piece, or in none.
func (f *fakeDriver) host(at uintptr, n int) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	for from, size := range f.pieces {
		from, end := uintptr(from), uintptr(from)+uintptr(size)
		if at < end && at+uintptr(n) > from && (at < from || at+uintptr(n) > end) {
			f.wrong = append(f.wrong, fmt.Sprintf("%d bytes leave their piece of registered memory", n))
			return nil
		}
	}
	return unsafe.Slice((*byte)(pointer(at)), n)
}

// do queues a command that moves bytes.
func (f *fakeDriver) do(stream uintptr, run func()) uintptr {
	f.busy.Add(1)
	return f.queue(stream, func() {
		defer f.busy.Add(-1)
		run()
	})
}

func (f *fakeDriver) queue(stream uintptr, run func()) uintptr {
	f.mu.Lock()
	s := f.streams[stream]
	f.mu.Unlock()
	if s == nil {
		return f.wrongf("no such stream")
	}
	s.pending.Add(1)
	s.queue <- func() {
		defer s.pending.Done()
		if d := f.delay.Load(); d != nil {
			time.Sleep((*d)())
		}
		f.running.RLock()
		defer f.running.RUnlock()
		if f.dead.Load() == 0 {
			run()
		}
	}
	return 0
}

func (f *fakeDriver) set(at, value, bytes, stream uintptr) uintptr {
	mem := f.device(uint64(at), int(bytes))
	return f.do(stream, func() {
		for i := range mem {
			mem[i] = byte(value)
		}
	})
}

func (f *fakeDriver) register(at, bytes uintptr) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pieces[uint64(at)] = int(bytes)
	return 0
}

func (f *fakeDriver) unregister(at uintptr) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.busy.Load() != 0 {
		f.wrong = append(f.wrong, "host memory is unregistered while bytes move")
	}
	delete(f.pieces, uint64(at))
	return 0
}

func (f *fakeDriver) move(to, from []byte, stream uintptr) uintptr {
	if to == nil || from == nil {
		return 1
	}
	return f.do(stream, func() { copy(to, from) })
}

// launch runs one of the two kernels, whose handles are 1 and 2. Its parameters are read
// now, and what they point to when it runs.
func (f *fakeDriver) launch(kernel, stream, args uintptr) uintptr {
	p := *(*[3]uintptr)(pointer(args))
	at, n, staging := *(*uint64)(pointer(p[0])), *(*uint32)(pointer(p[1])), *(*uint64)(pointer(p[2]))
	return f.do(stream, func() {
		for _, c := range unsafe.Slice((*piece)(pointer(uintptr(at))), n) {
			d, s := f.device(c.device, int(c.bytes)), f.device(staging+uint64(c.staged), int(c.bytes))
			if kernel == 2 {
				d, s = s, d
			}
			copy(s, d)
		}
	})
}

func (f *fakeDriver) strided(m *memcpy2D, stream uintptr) uintptr {
	for row := range m.height {
		s, d := m.src, m.dst
		var code uintptr
		if s.kind == memoryDevice {
			code = f.move(f.host(d.host+uintptr(row*d.pitch), int(m.width)), f.device(s.device+row*s.pitch, int(m.width)), stream)
		} else {
			code = f.move(f.device(d.device+row*d.pitch, int(m.width)), f.host(s.host+uintptr(row*s.pitch), int(m.width)), stream)
		}
		if code != 0 {
			return code
		}
	}
	// The rows in the region are one copy: they lie in one allocation.
	side, bytes := m.src, (m.height-1)*max(m.src.pitch, m.dst.pitch)+m.width
	if side.kind != memoryDevice {
		side = m.dst
	}
	if side.pitch > pitchBytesMax || f.device(side.device, int((m.height-1)*side.pitch+m.width)) == nil {
		return f.wrongf("%d rows over %d bytes leave their allocation", m.height, bytes)
	}
	return 0
}

func (f *fakeDriver) batch(dst, src, bytes, n, stream uintptr) uintptr {
	words := func(at uintptr) []uint64 { return unsafe.Slice((*uint64)(pointer(at)), n) }
	to, from, sizes := words(dst), words(src), words(bytes)
	for i := range to {
		// The side that is in no allocation of the device is the host's.
		side := func(at uint64) []byte {
			f.mu.Lock()
			for base, b := range f.memory {
				if at >= base && at < base+uint64(len(b)) {
					f.mu.Unlock()
					return f.device(at, int(sizes[i]))
				}
			}
			for from, size := range f.pieces {
				if at >= from && at < from+uint64(size) {
					f.mu.Unlock()
					return f.host(uintptr(at), int(sizes[i]))
				}
			}
			f.mu.Unlock()
			f.wrongf("many fragments to a command in memory that is not pinned")
			return nil
		}
		if code := f.move(side(to[i]), side(from[i]), stream); code != 0 {
			return code
		}
	}
	return 0
}

func (f *fakeDriver) newStream(at uintptr) uintptr {
	s := &fakeStream{queue: make(chan func(), 1<<16)}
	go func() {
		for run := range s.queue {
			run()
		}
	}()
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.handle()
	f.streams[h] = s
	return store(at, h)
}

func (f *fakeDriver) endStream(h uintptr, destroy bool) uintptr {
	f.mu.Lock()
	s := f.streams[h]
	if destroy {
		delete(f.streams, h)
	}
	f.mu.Unlock()
	if s == nil {
		return f.wrongf("no such stream")
	}
	s.pending.Wait()
	if destroy {
		close(s.queue)
	}
	return 0
}

func (f *fakeDriver) event(h uintptr) *fakeEvent {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[h]
}

func (f *fakeDriver) newEvent(at uintptr) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.handle()
	f.events[h] = &fakeEvent{}
	return store(at, h)
}

func (f *fakeDriver) record(h, stream uintptr) uintptr {
	e := f.event(h)
	if e == nil {
		return f.wrongf("no such event")
	}
	n := e.records.Add(1)
	return f.queue(stream, func() { e.done.Store(n) })
}

func (f *fakeDriver) query(h uintptr) uintptr {
	e := f.event(h)
	if e == nil {
		return f.wrongf("no such event")
	}
	if e.done.Load() < e.records.Load() {
		return codeNotReady
	}
	return 0
}

func makeFakeTable() (fn [symbols]uintptr) {
	type word = uintptr
	on := func(s symbol, f func(f *fakeDriver, a, b, c, d word) word) {
		fn[s] = purego.NewCallback(func(a, b, c, d word) word { return answer(s, func(k *fakeDriver) word { return f(k, a, b, c, d) }) })
	}
	for s := range symbols {
		switch s {
		case cuLaunchKernel, cuMemcpyBatchAsync:
		default:
			on(s, func(*fakeDriver, word, word, word, word) word { return 801 }) // not supported
		}
	}
	ok := func(*fakeDriver, word, word, word, word) word { return 0 }
	for _, s := range []symbol{cuCtxSetCurrent, cuDevicePrimaryCtxRelease, cuModuleLoadData, cuModuleUnload} {
		on(s, ok)
	}
	on(cuDevicePrimaryCtxRetain, func(_ *fakeDriver, at, _, _, _ word) word { return store(at, word(1)) })
	on(cuCtxGetStreamPriorityRange, ok)
	on(cuModuleGetFunction, func(_ *fakeDriver, at, _, name, _ word) word {
		if *(*byte)(pointer(name + word(len("tierd_")))) == 's' {
			return store(at, word(2))
		}
		return store(at, word(1))
	})
	on(cuMemAlloc, func(f *fakeDriver, at, bytes, _, _ word) word { return f.alloc(at, bytes) })
	on(cuMemHostAlloc, func(f *fakeDriver, at, bytes, _, _ word) word { return f.alloc(at, bytes) })
	on(cuMemFree, func(f *fakeDriver, at, _, _, _ word) word { return f.release(at) })
	on(cuMemFreeHost, func(f *fakeDriver, at, _, _, _ word) word { return f.release(at) })
	on(cuMemHostGetDevicePointer, func(_ *fakeDriver, at, host, _, _ word) word { return store(at, uint64(host)) })
	on(cuMemGetInfo, func(_ *fakeDriver, free, total, _, _ word) word {
		return store(free, word(1)<<30) + store(total, word(1)<<31)
	})
	on(cuMemsetD8Async, func(f *fakeDriver, at, value, bytes, stream word) word { return f.set(at, value, bytes, stream) })
	on(cuMemHostRegister, func(f *fakeDriver, at, bytes, _, _ word) word { return f.register(at, bytes) })
	on(cuMemHostUnregister, func(f *fakeDriver, at, _, _, _ word) word { return f.unregister(at) })
	on(cuMemcpyDtoHAsync, func(f *fakeDriver, to, from, bytes, stream word) word {
		return f.move(f.host(to, int(bytes)), f.device(uint64(from), int(bytes)), stream)
	})
	on(cuMemcpyHtoDAsync, func(f *fakeDriver, to, from, bytes, stream word) word {
		return f.move(f.device(uint64(to), int(bytes)), f.host(from, int(bytes)), stream)
	})
	on(cuMemcpy2DAsync, func(f *fakeDriver, m, stream, _, _ word) word { return f.strided((*memcpy2D)(pointer(m)), stream) })
	on(cuStreamCreateWithPriority, func(f *fakeDriver, at, _, _, _ word) word { return f.newStream(at) })
	on(cuStreamDestroy, func(f *fakeDriver, h, _, _, _ word) word { return f.endStream(h, true) })
	on(cuStreamSynchronize, func(f *fakeDriver, h, _, _, _ word) word { return f.endStream(h, false) })
	on(cuEventCreate, func(f *fakeDriver, at, _, _, _ word) word { return f.newEvent(at) })
	on(cuEventDestroy, func(f *fakeDriver, h, _, _, _ word) word {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.events, h)
		return 0
	})
	on(cuEventRecord, func(f *fakeDriver, h, stream, _, _ word) word { return f.record(h, stream) })
	on(cuEventQuery, func(f *fakeDriver, h, _, _, _ word) word { return f.query(h) })
	on(cuIpcGetMemHandle, func(_ *fakeDriver, at, mem, _, _ word) word { return store(at, [ipcHandleBytes / 8]word{mem}) })
	fn[cuLaunchKernel] = purego.NewCallback(func(kernel, _, _, _, _, _, _, _, stream, args, _ word) word {
		return answer(cuLaunchKernel, func(f *fakeDriver) word { return f.launch(kernel, stream, args) })
	})
	fn[cuMemcpyBatchAsync] = purego.NewCallback(func(dst, src, bytes, n, _, _, _, _, stream word) word {
		return answer(cuMemcpyBatchAsync, func(f *fakeDriver) word { return f.batch(dst, src, bytes, n, stream) })
	})
	return fn
}

func answer(s symbol, do func(f *fakeDriver) uintptr) uintptr {
	f := fakeNow.Load()
	f.calls[s].Add(1)
	if code := f.dead.Load(); code != 0 {
		return uintptr(code)
	}
	if fail := f.fail.Load(); fail != nil {
		if code := (*fail)(s); code != 0 {
			if fatal[code] {
				f.running.Lock()
				defer f.running.Unlock()
				f.dead.Store(int64(code))
			}
			return uintptr(code)
		}
	}
	return do(f)
}
