package transfer

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// benchBytes is what one round moves; benchRounds pairs of rounds give the median.
const (
	benchBytes  = 512 << 20
	benchRounds = 15
	benchArena  = 64 << 20 // both slabs of the benchmark, larger than any cache
)

// BenchmarkVerified moves chunks through the whole data plane and, in the same run and
// in turn with it, the same bytes over as many raw sockets at their best read size.
// "ratio" is the median of the paired rounds, "cpu-ratio" that of CPU seconds per byte.
func BenchmarkVerified(b *testing.B) {
	for _, lanes := range []int{1, DefaultLanes} {
		for _, chunk := range []int{64 << 10, 256 << 10, 1 << 20, 2 << 20} {
			b.Run(fmt.Sprintf("lanes=%d/chunk=%dKiB", lanes, chunk>>10), func(b *testing.B) { benchVerified(b, lanes, chunk) })
		}
	}
}

func benchVerified(b *testing.B, lanes, chunk int) {
	src, dst := make([]byte, benchArena), make([]byte, benchArena)
	rand.Read(src)
	clear(dst)
	ctx := context.Background()
	srv, err := Listen(ctx, "127.0.0.1:0", Options{})
	require.NoError(b, err)
	defer srv.Close()
	token := Token{1}
	srv.Register(token)
	sink := &arenaSink{arena: dst, chunk: chunk}
	cl, err := Dial(ctx, srv.Addr().String(), token, lanes, sink, Options{})
	require.NoError(b, err)
	defer cl.Close()
	items := benchItems(src, chunk)
	raw := newRawLanes(b, lanes)
	defer raw.close()
	size := bestReadSize(raw, src, dst)
	var ratios, cpus, speeds []float64
	for b.Loop() {
		for range benchRounds {
			t1, c1 := timed(func() {
				sink.expect(len(items))
				require.NoError(b, srv.Push(ctx, token, 1, items, nil))
				sink.wait()
			})
			t2, c2 := timed(func() { raw.move(src, dst, benchBytes, size) })
			ratios = append(ratios, t2.Seconds()/t1.Seconds())
			cpus = append(cpus, c1.Seconds()/c2.Seconds())
			speeds = append(speeds, benchBytes/t1.Seconds()/1e9)
		}
	}
	require.Zero(b, sink.bad)
	b.ReportMetric(median(ratios), "ratio")
	b.ReportMetric(median(cpus), "cpu-ratio")
	b.ReportMetric(median(speeds), "GB/s")
	b.ReportMetric(float64(size>>10), "raw-read-KiB")
	b.ReportMetric(0, "ns/op")
}

func benchItems(src []byte, chunk int) []Item {
	items := make([]Item, benchBytes/chunk)
	sums := map[int]uint32{}
	for i := range items {
		at := i * chunk % len(src)
		if _, ok := sums[at]; !ok {
			sums[at] = checksum(src[at : at+chunk])
		}
		items[i] = Item{Slot: uint32(at / chunk), Epoch: 1, Bytes: src[at : at+chunk], Sum: sums[at], Seq: uint32(i)}
	}
	return items
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// timed returns wall and CPU time of f.
func timed(f func()) (wall, cpu time.Duration) {
	var a, z syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &a)
	start := time.Now()
	f()
	wall = time.Since(start)
	syscall.Getrusage(syscall.RUSAGE_SELF, &z)
	return wall, time.Duration(z.Utime.Nano() + z.Stime.Nano() - a.Utime.Nano() - a.Stime.Nano())
}

// arenaSink puts slot i at i*chunk.
type arenaSink struct {
	arena []byte
	chunk int
	wg    sync.WaitGroup
	mu    sync.Mutex
	bad   int
}

func (s *arenaSink) expect(n int) { s.wg.Add(n) }
func (s *arenaSink) wait()        { s.wg.Wait() }

func (s *arenaSink) Begin(h Header) ([]byte, func(error), error) {
	at := int(h.Slot) * s.chunk
	return s.arena[at : at+s.chunk], s.end, nil
}

func (s *arenaSink) end(err error) {
	if err != nil {
		s.mu.Lock()
		s.bad++
		s.mu.Unlock()
	}
	s.wg.Done()
}

// rawLanes is the ceiling: plain sockets, plain writes, plain reads.
type rawLanes struct{ in, out []net.Conn }

func newRawLanes(b testing.TB, n int) *rawLanes {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer ln.Close()
	r := &rawLanes{}
	for range n {
		c, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(b, err)
		d, err := ln.Accept()
		require.NoError(b, err)
		r.in, r.out = append(r.in, c), append(r.out, d)
	}
	return r
}

func (r *rawLanes) close() {
	for i := range r.in {
		r.in[i].Close()
		r.out[i].Close()
	}
}

// move sends total bytes from src to dst, split over the lanes, size bytes a read.
func (r *rawLanes) move(src, dst []byte, total, size int) {
	var wg sync.WaitGroup
	share := total / len(r.in)
	part := len(src) / len(r.in)
	for i := range r.in {
		from, to := src[i*part:(i+1)*part], dst[i*part:(i+1)*part]
		wg.Go(func() {
			for sent := 0; sent < share; {
				at := sent % part
				n, err := r.out[i].Write(from[at:min(at+1<<20, part, at+share-sent)])
				if err != nil {
					panic(err)
				}
				sent += n
			}
		})
		wg.Go(func() {
			for got := 0; got < share; {
				at := got % part
				n, err := r.in[i].Read(to[at:min(at+size, part, at+share-got)])
				if err != nil && err != io.EOF {
					panic(err)
				}
				got += n
			}
		})
	}
	wg.Wait()
}

// bestReadSize tries read sizes and returns the fastest.
func bestReadSize(r *rawLanes, src, dst []byte) (best int) {
	var least time.Duration
	for size := 32 << 10; size <= 4<<20; size *= 2 {
		var took []time.Duration
		for range 3 {
			t, _ := timed(func() { r.move(src, dst, benchBytes/2, size) })
			took = append(took, t)
		}
		if t := slices.Min(took); best == 0 || t < least {
			best, least = size, t
		}
	}
	return best
}
