package cuda

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// spinTime is how long a leader looks without a pause after the last buffer that
	// was done: above what any batch takes on a link that is busy with copies alone, so
	// that no pause leaves the link idle.
	spinTime = time.Millisecond
	// lookPause is between two looks after that, and while there is much in flight. Linux
	// makes 0.1 ms of it.
	lookPause = 50 * time.Microsecond
	// pauseBytesMin is the least that has to be in flight for a pause: 0.15 ms of PCIe 5.
	// Where that does not last until the callers bring more, the lane learns it:
	// pauseBytesMax is above what any link moves in a pause.
	pauseBytesMin = 8 << 20
	pauseBytesMax = 1 << 30
	// blockThreads is the size of a kernel's blocks: 16 warps.
	blockThreads = 512
	blockWarps   = blockThreads / 32
)

// A lane moves bytes in one direction.
type lane struct {
	dev     *Device
	scatter bool
	kernel  uintptr
	buffers []*buffer
	// free holds the buffers that carry nothing. Waiting receivers are served in
	// their order, which is what shares a lane between calls.
	free chan *buffer
	// lead holds one token; who has it is the leader.
	lead chan struct{}
	// inFlight is in bytes, and pauseBytes, which the leader owns, is how many must be for
	// it to pause.
	inFlight   atomic.Int64
	pauseBytes int64
}

// A buffer is a staging buffer with its stream. It belongs to the call that took it out
// of lane.free.
type buffer struct {
	stream, event uintptr
	staging       uint64 // device address
	// pinned is the host memory that the kernel reads: its parameters and the list.
	pinned unsafe.Pointer
	list   uint64 // device address of the list in it
	batch  batch  // what it carries
	copies copyList

	flying atomic.Bool // submitted, and not known to be done
	done   chan error  // cap 1: gets a value when another call's leader sees it done
}

// params is the start of a buffer's pinned memory: the arguments of the kernel and the
// array of pointers to them that cuLaunchKernel wants.
type params struct {
	list    uint64
	n       uint32
	_       uint32
	staging uint64
	args    [3]uintptr
}

// listOffset is where the list begins in a buffer's pinned memory.
const listOffset = 4096

func newLane(d *Device, scatter bool, kernel uintptr) (*lane, error) {
	l := &lane{dev: d, scatter: scatter, kernel: kernel, free: make(chan *buffer, d.opts.Buffers), lead: make(chan struct{}, 1), pauseBytes: pauseBytesMin}
	l.lead <- struct{}{}
	for range d.opts.Buffers {
		b, err := d.newBuffer()
		if err != nil {
			l.close()
			return nil, err
		}
		l.buffers = append(l.buffers, b)
		l.free <- b
	}
	return l, nil
}

// newBuffer makes a buffer. Its stream has the lowest priority, so that a kernel of the
// same process that is ready goes first.
func (d *Device) newBuffer() (*buffer, error) {
	b := &buffer{done: make(chan error, 1)}
	b.batch.pieces = make([]piece, 0, 2048)
	err := firstError(
		func() error {
			return d.drv.call(cuStreamCreateWithPriority, uintptr(unsafe.Pointer(&b.stream)), streamNonBlocking, uintptr(d.lowPriority))
		},
		func() error { return d.drv.call(cuEventCreate, uintptr(unsafe.Pointer(&b.event)), eventDisableTiming) },
		func() error {
			return d.drv.call(cuMemAlloc, uintptr(unsafe.Pointer(&b.staging)), uintptr(d.opts.StagingBytes))
		},
		func() error {
			return d.drv.call(cuMemHostAlloc, uintptr(unsafe.Pointer(&b.pinned)), listOffset+batchPiecesMax*unsafe.Sizeof(piece{}), hostAllocPortable|hostAllocDeviceMap)
		},
		func() error {
			return d.drv.call(cuMemHostGetDevicePointer, uintptr(unsafe.Pointer(&b.list)), uintptr(b.pinned), 0)
		},
	)
	if err != nil {
		d.freeBuffer(b)
		return nil, err
	}
	b.list += listOffset
	p := (*params)(b.pinned)
	p.list, p.staging = b.list, b.staging
	p.args = [3]uintptr{uintptr(unsafe.Pointer(&p.list)), uintptr(unsafe.Pointer(&p.n)), uintptr(unsafe.Pointer(&p.staging))}
	return b, nil
}

func firstError(steps ...func() error) error {
	for _, s := range steps {
		if err := s(); err != nil {
			return err
		}
	}
	return nil
}

// freeBuffer gives back what newBuffer took, also when it took only a part.
func (d *Device) freeBuffer(b *buffer) error {
	var errs []error
	if b.pinned != nil {
		errs = append(errs, d.drv.call(cuMemFreeHost, uintptr(b.pinned)))
	}
	if b.staging != 0 {
		errs = append(errs, d.drv.call(cuMemFree, uintptr(b.staging)))
	}
	if b.event != 0 {
		errs = append(errs, d.drv.call(cuEventDestroy, b.event))
	}
	if b.stream != 0 {
		errs = append(errs, d.drv.call(cuStreamDestroy, b.stream))
	}
	return errors.Join(errs...)
}

// close needs a current context, and no running calls.
func (l *lane) close() error {
	var errs []error
	for _, b := range l.buffers {
		errs = append(errs, l.dev.freeBuffer(b))
	}
	return errors.Join(errs...)
}

// move moves what a list says. When it returns, nothing is in flight.
func (l *lane) move(ctx context.Context, t Tuning, what list, host []byte) error {
	if len(host) == 0 {
		return nil
	}
	var pin runtime.Pinner // the driver's copy of the address keeps nothing alive
	pin.Pin(&host[0])
	defer pin.Unpin()
	release := l.dev.drv.hold(host)
	defer release()

	dir := t.direction(l.scatter)
	limit := full(int(l.dev.opts.StagingBytes))
	if len(l.free) == len(l.buffers) {
		limit = ramp(len(host), int(l.dev.opts.StagingBytes), l.scatter)
	}
	p := newPlanner(what, dir, limit, l.orders(dir))
	var flying []*buffer
	var first error
	for !p.done() && first == nil {
		if first = ctx.Err(); first != nil {
			break
		}
		var b *buffer
		if b, flying, first = l.acquire(ctx, flying); first != nil {
			break
		}
		p.next(&b.batch)
		if first = l.submit(b, dir.Blocks, host); first != nil {
			l.free <- b
			break
		}
		flying = append(flying, b)
	}
	for _, b := range flying {
		if err := l.finish(b); first == nil {
			first = err
		}
	}
	return first
}

// acquire returns a buffer that carries nothing. A call that has buffers in flight waits
// for its own oldest and hands it back before it asks again, so that calls take turns.
func (l *lane) acquire(ctx context.Context, flying []*buffer) (*buffer, []*buffer, error) {
	for {
		select {
		case b := <-l.free:
			return b, flying, nil
		default:
		}
		if len(flying) == 0 {
			break
		}
		oldest := flying[0]
		flying = flying[1:]
		if err := l.finish(oldest); err != nil {
			return nil, flying, err
		}
	}
	select {
	case b := <-l.free:
		return b, flying, nil
	case <-ctx.Done():
		return nil, flying, ctx.Err()
	}
}

// finish waits for a buffer in flight and puts it back.
func (l *lane) finish(b *buffer) error {
	err := l.wait(b)
	l.free <- b
	return err
}

// submit starts what b.batch says. On an error nothing of it is in flight.
func (l *lane) submit(b *buffer, blocks int, host []byte) error {
	leave, err := l.dev.enter()
	if err != nil {
		return err
	}
	defer leave()
	if len(b.batch.runs) > 0 {
		err = l.submitDirect(b, host)
	} else {
		err = l.submitStaged(b, blocks, host[b.batch.host:b.batch.host+b.batch.bytes])
	}
	if err == nil {
		err = l.dev.drv.call(cuEventRecord, b.event, b.stream)
	}
	if err != nil {
		// A part may be on its way; the slice is the caller's again when we return.
		if e := l.dev.drv.call(cuStreamSynchronize, b.stream); e != nil {
			return l.dev.lose(e)
		}
		return l.dev.check(err)
	}
	l.inFlight.Add(int64(b.batch.bytes))
	b.flying.Store(true)
	return nil
}

// orders are the bounds of what goes without staging in this lane.
func (l *lane) orders(dir Direction) orders {
	switch {
	case !l.batches(dir.DirectBytes):
		return orders{runsMax: directRunsMax, stridedMin: stridedBytesMin}
	case l.scatter:
		return orders{runsMax: batchedRunsMax, stridedMin: stridedLoadMin}
	}
	return orders{runsMax: batchedRunsMax, stridedMin: stridedBytesMin}
}

// batches says that fragments of this length may go many to a command.
func (l *lane) batches(bytes int64) bool {
	return l.dev.drv.has(cuMemcpyBatchAsync) && !(l.scatter && bytes < batchedLoadMin)
}

func (l *lane) submitDirect(b *buffer, host []byte) error {
	runs := b.batch.runs
	pinned := l.dev.drv.isPinned(host[b.batch.host : b.batch.host+b.batch.bytes])
	for len(runs) > 0 {
		n := 0
		for pinned && n < len(runs) && runs[n].rows == 1 && l.batches(int64(runs[n].bytes)) {
			n++
		}
		var err error
		if n > 1 {
			err = l.batched(b, runs[:n], host)
		} else {
			n = 1
			err = l.run(runs[0], host[runs[0].host:runs[0].host+runs[0].rows*runs[0].bytes], b.stream)
		}
		if err != nil {
			return err
		}
		runs = runs[n:]
	}
	return nil
}

// copyList is the arguments of cuMemcpyBatchAsync, which reads them before it returns.
type copyList struct {
	dst, src, bytes []uint64
	attributes      copyAttributes
	attributesFrom  uint64 // they are those of copy 0 and all behind it
	failed          uint64
}

// copyAttributes is the driver's CUmemcpyAttributes: the locations are hints, for managed
// memory.
type copyAttributes struct {
	order    int32
	from, to struct{ kind, id int32 }
	flags    uint32
}

// batched moves runs of one row each by one command, for which the driver takes a fifth of
// the time that a DMA for each would need.
func (l *lane) batched(b *buffer, runs []run, host []byte) error {
	c := &b.copies
	c.dst, c.src, c.bytes = c.dst[:0], c.src[:0], c.bytes[:0]
	c.attributes = copyAttributes{order: orderStream, flags: preferOverlap}
	for _, r := range runs {
		part := host[r.host : r.host+r.bytes]
		for device := r.device; len(part) > 0; {
			n := l.dev.drv.unbroken(part)
			from, to := device, uint64(address(part))
			if l.scatter {
				from, to = to, from
			}
			c.src, c.dst, c.bytes = append(c.src, from), append(c.dst, to), append(c.bytes, uint64(n))
			device, part = device+uint64(n), part[n:]
		}
	}
	return l.dev.drv.call(cuMemcpyBatchAsync, uintptr(unsafe.Pointer(&c.dst[0])), uintptr(unsafe.Pointer(&c.src[0])), uintptr(unsafe.Pointer(&c.bytes[0])), uintptr(len(c.dst)),
		uintptr(unsafe.Pointer(&c.attributes)), uintptr(unsafe.Pointer(&c.attributesFrom)), 1, uintptr(unsafe.Pointer(&c.failed)), b.stream)
}

// run moves rows, as many with one command as no border of pinned memory is between.
func (l *lane) run(r run, host []byte, stream uintptr) error {
	for r.rows > 0 {
		n := min(r.rows, l.dev.drv.unbroken(host)/r.bytes)
		var err error
		if n > 1 {
			err = l.dma2D(r, n, host, stream)
		} else {
			n = 1
			err = l.dma(r.device, host[:r.bytes], stream)
		}
		if err != nil {
			return err
		}
		r.device, r.rows, host = r.device+uint64(n)*r.pitch, r.rows-n, host[n*r.bytes:]
	}
	return nil
}

// memcpy2D is the driver's CUDA_MEMCPY2D: its sides are (x, y, kind, host, device, array,
// pitch).
type memcpy2D struct {
	src, dst      side2D
	width, height uint64
}

type side2D struct {
	x, y   uint64
	kind   uint64 // the type is 32 bits and 4 of padding
	host   uintptr
	device uint64
	array  uintptr
	pitch  uint64
}

// dma2D moves rows by one command of the copy engine.
func (l *lane) dma2D(r run, rows int, host []byte, stream uintptr) error {
	m := &memcpy2D{
		src:   side2D{kind: memoryDevice, device: r.device, pitch: r.pitch},
		dst:   side2D{kind: memoryHost, host: address(host), pitch: uint64(r.bytes)},
		width: uint64(r.bytes), height: uint64(rows),
	}
	if l.scatter {
		m.src, m.dst = m.dst, m.src
	}
	return l.dev.drv.call(cuMemcpy2DAsync, uintptr(unsafe.Pointer(m)), stream)
}

func (l *lane) submitStaged(b *buffer, blocks int, host []byte) error {
	n := len(b.batch.pieces)
	copy(unsafe.Slice((*piece)(unsafe.Add(b.pinned, listOffset)), batchPiecesMax), b.batch.pieces)
	(*params)(b.pinned).n = uint32(n)
	if l.scatter {
		if err := l.dma(b.staging, host, b.stream); err != nil {
			return err
		}
	}
	args := uintptr(unsafe.Pointer(&(*params)(b.pinned).args))
	grid := uintptr(min(blocks, (n+blockWarps-1)/blockWarps))
	if err := l.dev.drv.call(cuLaunchKernel, l.kernel, grid, 1, 1, blockThreads, 1, 1, 0, b.stream, args, 0); err != nil {
		return err
	}
	if l.scatter {
		return nil
	}
	return l.dma(b.staging, host, b.stream)
}

// dma copies between device memory and host. The driver refuses a copy that crosses from
// one pinned piece into the next, so it is cut there.
func (l *lane) dma(device uint64, host []byte, stream uintptr) error {
	for len(host) > 0 {
		n := l.dev.drv.unbroken(host)
		p := uintptr(unsafe.Pointer(unsafe.SliceData(host)))
		var err error
		if l.scatter {
			err = l.dev.drv.call(cuMemcpyHtoDAsync, uintptr(device), p, uintptr(n), stream)
		} else {
			err = l.dev.drv.call(cuMemcpyDtoHAsync, p, uintptr(device), uintptr(n), stream)
		}
		if err != nil {
			return err
		}
		device, host = device+uint64(n), host[n:]
	}
	return nil
}

// pause sleeps for lookPause in the kernel: a timer of the runtime waits for 1 ms at
// least where it sleeps in epoll.
func pause() {
	ts := unix.NsecToTimespec(int64(lookPause))
	_ = unix.Nanosleep(&ts, nil) // cut short by a signal it is a shorter pause
}

// wait returns when b has done its work.
func (l *lane) wait(b *buffer) error {
	select {
	case err := <-b.done:
		return err
	case <-l.lead:
	}
	defer func() { l.lead <- struct{}{} }()
	select {
	case err := <-b.done: // seen by the leader before us
		return err
	default:
	}
	return l.look(b)
}

// look asks the driver for the lane's buffers until own is done. Only the leader does.
func (l *lane) look(own *buffer) error {
	leave, err := l.dev.enter()
	if err != nil {
		return l.abandon(own, err)
	}
	defer func() { leave() }()
	l.pauseBytes = forget(l.pauseBytes)
	last, paused := time.Now(), false
	for {
		some, done, err := l.lookOnce(own)
		if paused {
			l.pauseBytes = nextPause(l.pauseBytes, l.inFlight.Load())
		}
		if done {
			return err
		}
		if some {
			last = time.Now()
		}
		// With much in flight the link stays busy through a pause; so does it when the GPU
		// is at something else for long.
		if paused = l.inFlight.Load() >= l.pauseBytes; !paused && time.Since(last) < spinTime {
			continue
		}
		leave()
		pause()
		if leave, err = l.dev.enter(); err != nil {
			leave = func() {}
			return l.abandon(own, err)
		}
	}
}

// forget is pauseBytes at the start of a leader's term. A few late wake-ups in a row set it
// above what the buffers hold, and then no pause would ever say that they are over. What it
// costs where short pauses are right is one that is too long in 180 terms.
func forget(pauseBytes int64) int64 { return max(pauseBytes-pauseBytes/256, pauseBytesMin) }

// abandon gives up a buffer in flight that cannot be asked for. It may still run, so nothing
// of this device is known any more.
func (l *lane) abandon(b *buffer, cause error) error {
	l.landed(b)
	return l.dev.lose(cause)
}

// nextPause is pauseBytes after a pause at whose end inFlight bytes were in flight: with
// none, the link was idle, and the pause too long.
func nextPause(pauseBytes, inFlight int64) int64 {
	if inFlight == 0 {
		return min(2*pauseBytes, pauseBytesMax)
	}
	// One late wake-up must not end the pauses for good.
	return max(pauseBytes-pauseBytes/64, pauseBytesMin)
}

// landed notes that a buffer carries nothing any more.
func (l *lane) landed(b *buffer) {
	b.flying.Store(false)
	l.inFlight.Add(-int64(b.batch.bytes))
}

// lookOnce looks at every buffer in flight, and says whether some were done, and own was.
func (l *lane) lookOnce(own *buffer) (some, done bool, ownErr error) {
	for _, b := range l.buffers {
		if !b.flying.Load() {
			continue
		}
		code := l.dev.drv.code(cuEventQuery, b.event)
		if code == codeNotReady {
			continue
		}
		var err error
		if code != 0 {
			// What cannot be waited for may still run: nothing of this device is
			// known any more.
			err = l.dev.lose(l.dev.drv.error(cuEventQuery, code))
		}
		l.landed(b)
		some = true
		if b == own {
			done, ownErr = true, err
		} else {
			b.done <- err
		}
	}
	return some, done, ownErr
}
