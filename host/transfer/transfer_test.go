package transfer

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// slabSink is a small stand-in for a tier: slots with epochs.
type slabSink struct {
	slotBytes int

	mu      sync.Mutex
	mem     []byte
	epochs  []uint64
	jobs    map[uint64]bool // known jobs
	results map[string][]error
	begun   chan Header // when set, Begin reports here
	changed chan struct{}
}

func newSlabSink(slots, slotBytes int, jobs ...uint64) *slabSink {
	s := &slabSink{
		slotBytes: slotBytes, mem: make([]byte, slots*slotBytes), epochs: make([]uint64, slots),
		jobs: map[uint64]bool{}, results: map[string][]error{}, changed: make(chan struct{}, 1),
	}
	for i := range s.epochs {
		s.epochs[i] = 1
	}
	for _, j := range jobs {
		s.jobs[j] = true
	}
	return s
}

func at(job uint64, seq uint32) string { return fmt.Sprintf("%d/%d", job, seq) }

func (s *slabSink) slot(i int) []byte { return s.mem[i*s.slotBytes : (i+1)*s.slotBytes] }

func (s *slabSink) Begin(h Header) ([]byte, func(error), error) {
	if s.begun != nil {
		s.begun <- h
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.jobs[h.Job]:
		return nil, nil, errors.New("unknown job")
	case int(h.Slot) >= len(s.epochs) || s.epochs[h.Slot] != h.Epoch:
		return nil, nil, errors.New("old epoch")
	case int(h.Length) > s.slotBytes:
		return nil, nil, errors.New("too long")
	}
	return s.slot(int(h.Slot))[:h.Length], func(err error) {
		s.mu.Lock()
		k := at(h.Job, h.Seq)
		s.results[k] = append(s.results[k], err)
		s.mu.Unlock()
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}, nil
}

// await waits until n payloads have ended, and checks that none ended twice.
func (s *slabSink) await(t *testing.T, n int) map[string]error {
	t.Helper()
	limit := time.After(20 * time.Second)
	for {
		s.mu.Lock()
		out := map[string]error{}
		for k, v := range s.results {
			require.Len(t, v, 1, "payload %s ended more than once", k)
			out[k] = v[0]
		}
		s.mu.Unlock()
		if len(out) >= n {
			return out
		}
		select {
		case <-s.changed:
		case <-limit:
			t.Fatalf("%d of %d payloads ended", len(out), n)
		}
	}
}

// results collects what Push says of each item.
type results struct {
	mu  sync.Mutex
	got map[int][]error
}

func (r *results) done(i int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.got == nil {
		r.got = map[int][]error{}
	}
	r.got[i] = append(r.got[i], err)
}

func (r *results) once(t *testing.T, n int) []error {
	t.Helper()
	require.Len(t, r.got, n)
	out := make([]error, n)
	for i, v := range r.got {
		require.Len(t, v, 1, "item %d has more than one result", i)
		out[i] = v[0]
	}
	return out
}

func listen(t *testing.T, o Options) *Server {
	t.Helper()
	if o.Log == nil {
		o.Log = quiet
	}
	s, err := Listen(t.Context(), "127.0.0.1:0", o)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func dial(t *testing.T, addr string, token Token, lanes int, sink Sink, o Options) *Client {
	t.Helper()
	if o.Log == nil {
		o.Log = quiet
	}
	c, err := Dial(t.Context(), addr, token, lanes, sink, o)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func newToken() (t Token) {
	rand.Read(t[:])
	return t
}

func randomItems(n, bytesMax int) []Item {
	items := make([]Item, n)
	for i := range items {
		b := make([]byte, mrand.IntN(bytesMax+1))
		rand.Read(b)
		items[i] = Item{Slot: uint32(i), Epoch: 1, Bytes: b, Sum: checksum(b), Seq: uint32(i)}
	}
	return items
}

func TestRandomSizes(t *testing.T) {
	for _, lanes := range []int{1, 3, 8} {
		srv, token := listen(t, Options{}), newToken()
		srv.Register(token)
		const n, size = 200, 100 << 10
		sink := newSlabSink(n, size, 7)
		cl := dial(t, srv.Addr().String(), token, lanes, sink, Options{PieceBytes: pieceBytesMin})
		require.Equal(t, lanes, cl.Lanes())
		items := randomItems(n, size)
		items[0].Bytes, items[0].Sum = nil, 0
		var r results
		require.NoError(t, srv.Push(t.Context(), token, 7, items, r.done))
		for _, err := range r.once(t, n) {
			require.NoError(t, err)
		}
		for k, err := range sink.await(t, n) {
			require.NoError(t, err, k)
		}
		for i := range items {
			require.True(t, bytes.Equal(items[i].Bytes, sink.slot(i)[:len(items[i].Bytes)]), "slot %d", i)
		}
		require.Equal(t, uint64(n), srv.Stats().Frames)
		require.Equal(t, srv.Stats().Bytes, cl.Stats().Bytes)
	}
}

func TestLargeFrames(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	const n, size = 6, 5<<20 + 13
	sink := newSlabSink(n, size, 1)
	dial(t, srv.Addr().String(), token, 2, sink, Options{})
	items := make([]Item, n)
	for i := range items {
		b := make([]byte, size-i)
		rand.Read(b)
		items[i] = Item{Slot: uint32(i), Epoch: 1, Bytes: b, Sum: checksum(b), Seq: uint32(i)}
	}
	require.NoError(t, srv.Push(t.Context(), token, 1, items, nil))
	for k, err := range sink.await(t, n) {
		require.NoError(t, err, k)
	}
	for i := range items {
		require.True(t, bytes.Equal(items[i].Bytes, sink.slot(i)[:len(items[i].Bytes)]))
	}
}

// What the sink does not want leaves no trace, and the lane lives on.
func TestUnwantedFramesAreDropped(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	sink := newSlabSink(4, 1000, 1)
	sink.epochs[1] = 5
	cl := dial(t, srv.Addr().String(), token, 1, sink, Options{PieceBytes: pieceBytesMin})
	b := bytes.Repeat([]byte{0xee}, 1000)
	long := bytes.Repeat([]byte{0xee}, 20000)
	good := Item{Slot: 0, Epoch: 1, Bytes: b, Sum: checksum(b), Seq: 0}
	require.NoError(t, srv.Push(t.Context(), token, 99, []Item{{Slot: 2, Epoch: 1, Bytes: b, Sum: checksum(b)}}, nil))
	require.NoError(t, srv.Push(t.Context(), token, 1, []Item{
		{Slot: 1, Epoch: 4, Bytes: b, Sum: checksum(b)},
		{Slot: 3, Epoch: 1, Bytes: long, Sum: checksum(long)},
		{Slot: 1 << 31, Epoch: 1, Bytes: long, Sum: checksum(long)},
		{Slot: 2, Epoch: 0, Bytes: nil},
		good,
	}, nil))
	require.Equal(t, map[string]error{"1/0": nil}, sink.await(t, 1))
	require.Equal(t, uint64(5), cl.Stats().Dropped)
	require.Equal(t, uint64(0), cl.Stats().LanesLost)
	require.Equal(t, b, sink.slot(0))
	require.Equal(t, make([]byte, 3000), sink.mem[1000:])
}

// A sink that gives the wrong amount of memory gets an error and loses the payload.
func TestSinkWithWrongMemory(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	ended := make(chan error, 1)
	dial(t, srv.Addr().String(), token, 1, sinkFunc(func(h Header) ([]byte, func(error), error) {
		return make([]byte, h.Length-1), func(err error) { ended <- err }, nil
	}), Options{})
	require.NoError(t, srv.Push(t.Context(), token, 1, []Item{{Bytes: []byte{1, 2}}}, nil))
	require.ErrorContains(t, <-ended, "1 bytes of memory for a payload of 2")
}

type sinkFunc func(Header) ([]byte, func(error), error)

func (f sinkFunc) Begin(h Header) ([]byte, func(error), error) { return f(h) }

// proxy forwards connections to addr; mangle sees what the server sends and may change
// it or end the connection.
func proxy(t *testing.T, addr string, mangle func(conn int, offset int64, b []byte) error) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	wg.Go(func() {
		for n := 0; ; n++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", addr)
			if err != nil {
				c.Close()
				continue
			}
			mu.Lock()
			open = append(open, c, up)
			mu.Unlock()
			wg.Go(func() { io.Copy(up, c); up.Close() })
			wg.Go(func() {
				defer c.Close()
				defer up.Close()
				buf := make([]byte, 8192)
				for offset := int64(0); ; {
					k, err := up.Read(buf)
					if k > 0 {
						if mangle(n, offset, buf[:k]) != nil {
							return
						}
						if _, err := c.Write(buf[:k]); err != nil {
							return
						}
						offset += int64(k)
					}
					if err != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln.Addr().String()
}

// One bit flipped on the wire ends as ErrChecksum for exactly that item.
func TestFlippedBit(t *testing.T) {
	const n, size = 20, 30000
	const victim = 13
	flipAt := int64(ackBytes + n*headerBytes + victim*size + 12345)
	// Pings would move the offset; an idle lane sends none for a minute here.
	srv, token := listen(t, Options{PingInterval: time.Minute, IdleTimeout: time.Hour}), newToken()
	srv.Register(token)
	addr := proxy(t, srv.Addr().String(), func(_ int, offset int64, b []byte) error {
		if i := flipAt - offset; i >= 0 && i < int64(len(b)) {
			b[i] ^= 4
		}
		return nil
	})
	sink := newSlabSink(n, size, 1)
	cl := dial(t, addr, token, 1, sink, Options{IdleTimeout: time.Hour})
	items := make([]Item, n)
	for i := range items {
		b := make([]byte, size)
		rand.Read(b)
		items[i] = Item{Slot: uint32(i), Epoch: 1, Bytes: b, Sum: checksum(b), Seq: uint32(i)}
	}
	require.NoError(t, srv.Push(t.Context(), token, 1, items, nil))
	for k, err := range sink.await(t, n) {
		if k != at(1, victim) {
			require.NoError(t, err, k)
			continue
		}
		var bad *ErrChecksum
		require.ErrorAs(t, err, &bad)
		require.Equal(t, items[victim].Sum, bad.Want)
		require.Equal(t, checksum(sink.slot(victim)), bad.Got)
	}
	require.Equal(t, uint64(1), cl.Stats().Mismatched)
	require.Zero(t, cl.Stats().LanesLost)
}

// A bit flipped in a header ends the lane; the consumer dials again and the rest works.
func TestFlippedHeaderBit(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	addr := proxy(t, srv.Addr().String(), func(conn int, offset int64, b []byte) error {
		if i := ackBytes + 20 - offset; conn == 0 && i >= 0 && i < int64(len(b)) {
			b[i] ^= 1
		}
		return nil
	})
	var log lockedBuffer
	sink := newSlabSink(2, 100, 1)
	cl := dial(t, addr, token, 1, sink, Options{Log: slog.New(slog.NewTextHandler(&log, nil)), RetryMin: time.Millisecond, RetryMax: time.Millisecond})
	b := []byte("one chunk")
	require.Eventually(t, func() bool {
		_ = srv.Push(t.Context(), token, 1, []Item{{Slot: 0, Epoch: 1, Bytes: b, Sum: checksum(b)}}, nil)
		sink.mu.Lock()
		defer sink.mu.Unlock()
		return len(sink.results) > 0
	}, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, uint64(1), cl.Stats().LanesLost)
	require.Contains(t, log.String(), "frame header carries CRC-32C")
}

// The producer dies in the middle of a frame: that payload ends as cut, once.
func TestCutMidFrame(t *testing.T) {
	const size = 1 << 20
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	addr := proxy(t, srv.Addr().String(), func(conn int, offset int64, b []byte) error {
		if conn == 0 && offset > size/2 {
			return io.EOF
		}
		return nil
	})
	sink := newSlabSink(1, size, 1)
	cl := dial(t, addr, token, 1, sink, Options{RetryMin: time.Millisecond})
	b := make([]byte, size)
	_ = srv.Push(t.Context(), token, 1, []Item{{Slot: 0, Epoch: 1, Bytes: b, Sum: checksum(b)}}, nil)
	require.ErrorIs(t, sink.await(t, 1)["1/0"], ErrLane)
	require.Equal(t, uint64(1), cl.Stats().Cut)
	require.Eventually(t, func() bool { return cl.Lanes() == 1 }, 10*time.Second, time.Millisecond, "the lane is dialed again")
	require.NoError(t, srv.Push(t.Context(), token, 1, []Item{{Slot: 0, Epoch: 1, Bytes: b, Sum: checksum(b), Seq: 1}}, nil))
	require.NoError(t, sink.await(t, 2)["1/1"])
}

// A producer that falls silent in the middle of a frame ends the lane after IdleTimeout.
func TestSilenceMidFrame(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		ln.Close()
		defer c.Close()
		var h [helloBytes]byte
		io.ReadFull(c, h[:])
		c.Write(ack{version: Version}.append(nil))
		c.Write(appendFrame(nil, kindData, 0, Header{Job: 1, Epoch: 1, Length: 1000}))
		c.Write(make([]byte, 500))
		io.Copy(io.Discard, c) // until the consumer gives up
	}()
	sink := newSlabSink(1, 1000, 1)
	dial(t, ln.Addr().String(), Token{}, 1, sink, Options{PingInterval: 10 * time.Millisecond, IdleTimeout: 50 * time.Millisecond})
	err = sink.await(t, 1)["1/0"]
	require.ErrorIs(t, err, ErrLane)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

// Pings keep an idle lane alive well beyond IdleTimeout.
func TestIdleLaneLives(t *testing.T) {
	o := Options{PingInterval: 10 * time.Millisecond, IdleTimeout: 500 * time.Millisecond}
	srv, token := listen(t, o), newToken()
	srv.Register(token)
	cl := dial(t, srv.Addr().String(), token, 2, newSlabSink(1, 1), o)
	time.Sleep(1200 * time.Millisecond)
	require.Zero(t, cl.Stats().LanesLost)
	require.Equal(t, 2, cl.Lanes())
}

// A push is cancelled while the consumer reads nothing: every item has its one result
// soon, and no bytes are read after that.
func TestCancelledPush(t *testing.T) {
	srv, token := listen(t, Options{WriteTimeout: time.Hour, AbortGrace: 10 * time.Millisecond}), newToken()
	srv.Register(token)
	conns := stuckConsumer(t, srv, token, 2)
	defer conns()
	const n = 64
	items := make([]Item, n)
	for i := range items {
		items[i] = Item{Slot: uint32(i), Epoch: 1, Bytes: make([]byte, 4<<20), Seq: uint32(i)}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var r results
	time.AfterFunc(100*time.Millisecond, cancel)
	err := srv.Push(ctx, token, 1, items, r.done)
	require.Error(t, err)
	for i := range items {
		clear(items[i].Bytes) // a race with a lane that still reads is seen by -race
	}
	lane, cancelled := 0, 0
	for _, err := range r.once(t, n) {
		switch {
		case errors.Is(err, context.Canceled):
			cancelled++
		case errors.Is(err, ErrLane):
			lane++
		}
	}
	require.NotZero(t, cancelled)
	require.NotZero(t, lane)
}

// stuckConsumer says hello on some lanes and then reads nothing.
func stuckConsumer(t *testing.T, srv *Server, token Token, lanes int) (closeAll func()) {
	var open []net.Conn
	for i := range lanes {
		c, err := net.Dial("tcp", srv.Addr().String())
		require.NoError(t, err)
		_, err = c.Write(hello{version: Version, lane: uint16(i), token: token}.append(nil))
		require.NoError(t, err)
		var a [ackBytes]byte
		_, err = io.ReadFull(c, a[:])
		require.NoError(t, err)
		open = append(open, c)
	}
	require.Eventually(t, func() bool { return srv.Lanes(token) == lanes }, 10*time.Second, time.Millisecond)
	return func() {
		for _, c := range open {
			c.Close()
		}
	}
}

// A consumer that reads nothing loses its lanes after WriteTimeout.
func TestStuckConsumer(t *testing.T) {
	srv, token := listen(t, Options{WriteTimeout: 50 * time.Millisecond, LaneWait: 50 * time.Millisecond}), newToken()
	srv.Register(token)
	defer stuckConsumer(t, srv, token, 2)()
	items := make([]Item, 40)
	for i := range items {
		items[i] = Item{Bytes: make([]byte, 4<<20)}
	}
	var r results
	err := srv.Push(t.Context(), token, 1, items, r.done)
	require.Error(t, err)
	var lane, none int
	for _, err := range r.once(t, len(items)) {
		switch {
		case errors.Is(err, ErrLane):
			lane++
		case errors.Is(err, ErrNoLane):
			none++
		}
	}
	require.Equal(t, 2, lane, "one item was on each lane")
	require.NotZero(t, none)
	require.Zero(t, srv.Lanes(token))
}

// A slow sink is not a dead one.
func TestSlowConsumer(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	const n, size = 30, 256 << 10
	inner := newSlabSink(n, size, 1)
	dial(t, srv.Addr().String(), token, 1, sinkFunc(func(h Header) ([]byte, func(error), error) {
		time.Sleep(5 * time.Millisecond)
		return inner.Begin(h)
	}), Options{})
	require.NoError(t, srv.Push(t.Context(), token, 1, randomItems(n, size), nil))
	for k, err := range inner.await(t, n) {
		require.NoError(t, err, k)
	}
}

// Many jobs at once, some cancelled at random; each item of each has one result.
func TestManyJobs(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	const jobs, n, size = 40, 20, 20000
	var ids []uint64
	for j := range jobs {
		ids = append(ids, uint64(j))
	}
	sink := newSlabSink(jobs*n, size, ids...)
	dial(t, srv.Addr().String(), token, 4, sink, Options{})
	var wg sync.WaitGroup
	var wanted atomic.Int64
	for j := range jobs {
		wg.Go(func() {
			items := randomItems(n, size)
			for i := range items {
				items[i].Slot = uint32(j*n + i)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if j%4 == 0 {
				time.AfterFunc(time.Duration(mrand.IntN(3))*time.Millisecond, cancel)
			}
			var r results
			_ = srv.Push(ctx, token, uint64(j), items, r.done)
			for _, err := range r.once(t, n) {
				if err == nil {
					wanted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.GreaterOrEqual(t, wanted.Load(), int64(jobs*n*3/4))
	for k, err := range sink.await(t, int(wanted.Load())) {
		require.NoError(t, err, k)
	}
}

func TestSessionsEnd(t *testing.T) {
	srv, token := listen(t, Options{LaneWait: 20 * time.Millisecond}), newToken()
	b := []Item{{Bytes: []byte{1}}, {Bytes: []byte{2}}}
	check := func(want error) {
		t.Helper()
		var r results
		require.ErrorIs(t, srv.Push(t.Context(), token, 1, b, r.done), want)
		for _, err := range r.once(t, 2) {
			require.ErrorIs(t, err, want)
		}
	}
	check(ErrNoSession)
	srv.Register(token)
	check(ErrNoLane)
	_, err := Dial(t.Context(), srv.Addr().String(), newToken(), 2, newSlabSink(1, 1), Options{Log: quiet})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "token of no session")

	cl := dial(t, srv.Addr().String(), token, 2, newSlabSink(1, 1), Options{RetryMin: time.Millisecond})
	srv.Unregister(token)
	<-cl.Done() // dialed again, refused, given up
	require.ErrorIs(t, cl.Err(), ErrRefused)
	check(ErrNoSession)

	require.NoError(t, srv.Push(t.Context(), token, 1, nil, nil), "nothing is nothing")
	require.NoError(t, srv.Close())
	check(ErrClosed)
}

// Unregister in the middle of pushes: they end.
func TestUnregisterUnderPush(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	defer stuckConsumer(t, srv, token, 2)()
	time.AfterFunc(50*time.Millisecond, func() { srv.Unregister(token) })
	items := make([]Item, 20)
	for i := range items {
		items[i] = Item{Bytes: make([]byte, 4<<20)}
	}
	var r results
	require.Error(t, srv.Push(t.Context(), token, 1, items, r.done))
	for _, err := range r.once(t, len(items)) {
		if err != nil && !errors.Is(err, ErrLane) {
			require.ErrorIs(t, err, ErrNoSession)
		}
	}
}

func TestItemTooLong(t *testing.T) {
	srv, token := listen(t, Options{FrameBytesMax: 10}), newToken()
	srv.Register(token)
	var r results
	err := srv.Push(t.Context(), token, 1, []Item{{Bytes: make([]byte, 10)}, {Bytes: make([]byte, 11)}}, r.done)
	require.ErrorIs(t, err, ErrTooLong)
	require.ErrorContains(t, err, "11 bytes, at most 10")
	r.once(t, 2)
	// The other side has its own limit, and ends the lane.
	big := listen(t, Options{})
	big.Register(token)
	cl := dial(t, big.Addr().String(), token, 1, newSlabSink(1, 100, 1), Options{FrameBytesMax: 10, RetryMin: time.Hour, RetryMax: time.Hour})
	_ = big.Push(t.Context(), token, 1, []Item{{Bytes: make([]byte, 11)}}, nil)
	require.Eventually(t, func() bool { return cl.Stats().LanesLost == 1 }, 10*time.Second, time.Millisecond)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Garbage gives one line, and the port goes on serving.
func TestGarbage(t *testing.T) {
	var log lockedBuffer
	srv, token := listen(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil)), HelloTimeout: time.Second}), newToken()
	srv.Register(token)
	for i := range 50 {
		c, err := net.Dial("tcp", srv.Addr().String())
		require.NoError(t, err)
		junk := make([]byte, i)
		rand.Read(junk)
		if i%2 == 0 {
			junk = []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
		}
		c.Write(junk)
		c.Close()
	}
	require.Eventually(t, func() bool { return srv.Stats().Conns == 0 }, 10*time.Second, time.Millisecond)
	require.Equal(t, 1, bytes.Count([]byte(log.String()), []byte("\n")), "%s", log.String())
	require.Contains(t, log.String(), "data port refused a connection")
	sink := newSlabSink(1, 10, 1)
	dial(t, srv.Addr().String(), token, 1, sink, Options{})
	b := []byte{1}
	require.NoError(t, srv.Push(t.Context(), token, 1, []Item{{Epoch: 1, Bytes: b, Sum: checksum(b)}}, nil))
	require.NoError(t, sink.await(t, 1)["1/0"])
}

// Connections that say nothing are bounded in number and in time.
func TestSilentStrangers(t *testing.T) {
	srv := listen(t, Options{HellosMax: 2, HelloTimeout: 100 * time.Millisecond})
	var open []net.Conn
	for range 5 {
		c, err := net.Dial("tcp", srv.Addr().String())
		require.NoError(t, err)
		open = append(open, c)
	}
	for _, c := range open {
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err, "closed by the server")
		c.Close()
	}
	require.Eventually(t, func() bool { return srv.Stats().Conns == 0 }, 10*time.Second, time.Millisecond)
	st := srv.Stats()
	require.Equal(t, uint64(3), st.RefusedConns)
	require.Equal(t, uint64(2), st.BadHellos)
}

// Whoever opens connections and says nothing keeps nobody out: the oldest of them goes.
func TestSilentStrangersKeepNobodyOut(t *testing.T) {
	srv, token := listen(t, Options{HellosPerAddressMax: 8, HelloTimeout: time.Minute}), newToken()
	srv.Register(token)
	for range 100 {
		c, err := net.Dial("tcp", srv.Addr().String())
		require.NoError(t, err)
		defer c.Close()
	}
	cl := dial(t, srv.Addr().String(), token, 4, newSlabSink(1, 1), Options{})
	require.Equal(t, 4, cl.Lanes())
	require.LessOrEqual(t, srv.Stats().Conns, 8+4)
	require.GreaterOrEqual(t, srv.Stats().RefusedConns, uint64(92))
}

// A name is judged by the addresses that it resolves to, before anything goes there.
func TestReach(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	_, port, err := net.SplitHostPort(srv.Addr().String())
	require.NoError(t, err)
	var asked []netip.Addr
	var mu sync.Mutex
	deny := func(ip netip.Addr) error {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, ip)
		return fmt.Errorf("%v is not for us", ip)
	}
	_, err = Dial(t.Context(), "localhost:"+port, token, 1, nil, Options{Log: quiet, Reach: deny})
	require.ErrorContains(t, err, "127.0.0.1 is not for us")
	require.Contains(t, asked, netip.MustParseAddr("127.0.0.1"))
	require.Zero(t, srv.Stats().BadHellos)
	require.Zero(t, srv.Stats().Conns)
}

func TestConnsMax(t *testing.T) {
	srv, token := listen(t, Options{ConnsMax: 3}), newToken()
	srv.Register(token)
	cl := dial(t, srv.Addr().String(), token, 5, newSlabSink(1, 1), Options{RetryMin: time.Hour, RetryMax: time.Hour})
	require.Equal(t, 3, cl.Lanes(), "some lanes are enough")
	require.Equal(t, 3, srv.Stats().Conns)
}

// A lane that dials again under its number replaces the old one.
func TestLaneIsReplaced(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	defer stuckConsumer(t, srv, token, 1)()
	defer stuckConsumer(t, srv, token, 1)()
	require.Eventually(t, func() bool { return srv.Stats().Conns == 1 && srv.Lanes(token) == 1 }, 10*time.Second, time.Millisecond)
}

func TestOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]Options{
		"frames of":            {FrameBytesMax: frameBytesLimit + 1},
		"pieces are":           {PieceBytes: pieceBytesMin - 1},
		"does not keep a lane": {PingInterval: time.Second, IdleTimeout: time.Second},
		"longest pause":        {RetryMin: 2 * time.Second, RetryMax: time.Second},
	} {
		_, err := Listen(t.Context(), "127.0.0.1:0", o)
		require.ErrorContains(t, err, want)
	}
	for _, lanes := range []int{0, -1, LanesMax + 1} {
		_, err := Dial(t.Context(), "127.0.0.1:1", Token{}, lanes, nil, Options{})
		require.ErrorContains(t, err, "a session has 1 to 64")
	}
	_, err := Dial(t.Context(), "127.0.0.1:1", Token{}, 2, nil, Options{Log: quiet})
	require.Error(t, err, "nobody listens there")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Dial(ctx, "127.0.0.1:1", Token{}, 2, nil, Options{Log: quiet})
	require.ErrorIs(t, err, context.Canceled)
}

// Sessions that come and go leave no file descriptor behind.
func TestNoDescriptorLeak(t *testing.T) {
	count := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc")
		}
		return len(d)
	}
	round := func() {
		srv, err := Listen(t.Context(), "127.0.0.1:0", Options{Log: quiet})
		require.NoError(t, err)
		token := newToken()
		srv.Register(token)
		sink := newSlabSink(4, 1000, 1)
		cl, err := Dial(t.Context(), srv.Addr().String(), token, 4, sink, Options{Log: quiet})
		require.NoError(t, err)
		require.NoError(t, srv.Push(t.Context(), token, 1, randomItems(4, 1000), nil))
		require.NoError(t, cl.Close())
		require.ErrorIs(t, cl.Err(), ErrClosed)
		require.NoError(t, srv.Close())
	}
	round()
	before := count()
	for range 20 {
		round()
	}
	require.LessOrEqual(t, count(), before)
}

// A process that has gone is one line for each lane that it had, however often its port is tried.
func TestLaneDownIsSaidOnce(t *testing.T) {
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	var log lockedBuffer
	var tries atomic.Int64
	dial(t, srv.Addr().String(), token, 2, newSlabSink(1, 1), Options{
		RetryMin: time.Millisecond, RetryMax: time.Millisecond, Log: slog.New(slog.NewTextHandler(&log, nil)),
		Reach: func(netip.Addr) error { tries.Add(1); return nil },
	})
	require.NoError(t, srv.Close())
	require.Eventually(t, func() bool { return tries.Load() > 50 }, 10*time.Second, time.Millisecond)
	lines := strings.Count(log.String(), "dialing again") // one that was told "shutting down" has given up
	require.True(t, lines == 1 || lines == 2, log.String())
}
