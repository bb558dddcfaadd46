package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/gputest"
)

// The conformance suite on a driver of Go functions.
func TestConformanceWithoutGPU(t *testing.T) {
	small := func(direct, strided int64) *Tuning {
		return &Tuning{Gather: Direction{3, direct, strided}, Scatter: Direction{5, direct, strided}}
	}
	for name, o := range map[string]Options{
		"staged":             {StagingBytes: 256 << 10, Buffers: 2, Tuning: small(never, never)},
		"strided and direct": {StagingBytes: 1 << 20, Tuning: small(4096, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			gputest.Run(t, func(t *testing.T) gpu.Device { return f.open(t, o) })
		})
	}
}

// A storm is callers of one device, each with its own part of a region.
type storm struct {
	f    *fakeDriver
	d    *Device
	seed uint64
	// callers make so many calls each, unless one ends in an error that stop is true for.
	callers, calls int
	// cancel is one in how many calls has a context that ends; 0 is none.
	cancel int
	stop   func(error) bool
	// fine says which errors a call may have.
	fine func(error) bool
	// fail is the driver's, once all have their memory.
	fail *func(symbol) int

	failed atomic.Int64
}

const stormBytes = 3 << 20

func (s *storm) run(t *testing.T) {
	t.Helper()
	host, err := s.d.AllocHost(int64(s.callers) * stormBytes)
	require.NoError(t, err)
	var regions []gpu.Region
	for range s.callers {
		reg, err := s.d.Alloc(t.Context(), stormBytes)
		require.NoError(t, err)
		regions = append(regions, reg)
	}
	s.f.fail.Store(s.fail)
	s.f.delay.Store(slow(s.seed))
	var wg sync.WaitGroup
	for w, reg := range regions {
		src := make([]byte, stormBytes)
		if w%2 == 0 {
			src = host.Bytes()[w*stormBytes:][:stormBytes]
		}
		wg.Go(func() {
			c := &soaker{dev: s.d, r: rand.New(rand.NewPCG(s.seed, uint64(w))), src: src, dst: make([]byte, stormBytes)}
			for range s.calls {
				err := s.call(c, reg)
				if err != nil && !s.fine(err) {
					t.Errorf("caller %d: %v", w, err)
				}
				if err != nil && s.stop != nil && s.stop(err) {
					return
				}
			}
		})
	}
	wg.Wait()
	s.f.fail.Store(nil)
	s.f.delay.Store(nil)
	s.f.atRest(t, s.d)
}

// call scatters a list and gathers it again.
func (s *storm) call(c *soaker, reg gpu.Region) error {
	frags, total := c.list(stormBytes)
	src, dst := c.src[:total], c.dst[:total]
	copy(src, noise(c.r.Uint64(), total))
	ctx := context.Background()
	if s.cancel > 0 && c.r.IntN(s.cancel) == 0 {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.r.IntN(2000))*time.Microsecond)
		defer cancel()
	}
	want := bytes.Clone(src)
	err := s.d.Scatter(ctx, reg, frags, src)
	clear(src) // it is ours again
	if err == nil {
		err = s.d.Gather(ctx, dst, reg, frags)
	}
	if err != nil {
		clear(dst)
		s.failed.Add(1)
		return err
	}
	if !bytes.Equal(want, dst) {
		return fmt.Errorf("wrong bytes: %d fragments, %d bytes, the first of %d", len(frags), total, frags[0].Length)
	}
	return nil
}

func stormSeed(t *testing.T) uint64 {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("TIERD_LANE_SEED"); s != "" {
		_, err := fmt.Sscan(s, &seed)
		require.NoError(t, err)
	}
	t.Log("seed", seed)
	return seed
}

// some returns f for one call in n, from a drawn row of its own.
func some(seed uint64, n int, code int, which ...symbol) *func(symbol) int {
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(seed, 99))
	f := func(s symbol) int {
		for _, w := range which {
			if s == w {
				mu.Lock()
				defer mu.Unlock()
				if r.IntN(n) == 0 {
					return code
				}
			}
		}
		return 0
	}
	return &f
}

func slow(seed uint64) *func() time.Duration {
	var n atomic.Uint64
	f := func() time.Duration {
		return time.Duration(rand.New(rand.NewPCG(seed, n.Add(1))).IntN(200)) * time.Microsecond
	}
	return &f
}

var stormTuning = &Tuning{Gather: Direction{16, 16 << 10, 4 << 10}, Scatter: Direction{24, 64 << 10, 4 << 10}}

// A submission that the driver refuses half way fails its call alone: what was on its way
// has ended when the call returns, and the lane goes on.
func TestRefusedSubmissions(t *testing.T) {
	f, seed := newFake(t), stormSeed(t)
	d := f.open(t, Options{StagingBytes: 256 << 10, Buffers: 3, Tuning: stormTuning})
	refused := func(err error) bool {
		var e *Error
		return errors.As(err, &e) && e.Code == 1 && !errors.Is(err, gpu.ErrLost) || errors.Is(err, context.DeadlineExceeded)
	}
	s := &storm{f: f, d: d, seed: seed, callers: 6, calls: 15, cancel: 5, fine: refused}
	s.fail = some(seed, 40, 1, cuLaunchKernel, cuMemcpyDtoHAsync, cuMemcpyHtoDAsync, cuMemcpy2DAsync, cuMemcpyBatchAsync, cuEventRecord)
	s.run(t)
	require.Positive(t, s.failed.Load())
	require.NoError(t, d.Lost())
	s.cancel, s.calls, s.fail, s.fine = 0, 2, nil, func(error) bool { return false }
	s.run(t)
}

// A device that is lost ends all calls, whichever call of the driver says so first.
func TestLostInFlight(t *testing.T) {
	for _, which := range []symbol{cuEventQuery, cuLaunchKernel, cuEventRecord, cuCtxSetCurrent} {
		t.Run(symbolNames[which], func(t *testing.T) {
			f, seed := newFake(t), stormSeed(t)
			d := f.open(t, Options{StagingBytes: 256 << 10, Buffers: 3, Tuning: stormTuning})
			lost := func(err error) bool { return errors.Is(err, gpu.ErrLost) }
			s := &storm{f: f, d: d, seed: seed, callers: 6, calls: 1 << 20, fine: lost, stop: lost, fail: some(seed, 200, 719, which)}
			s.run(t)
			require.ErrorIs(t, d.Lost(), gpu.ErrLost)
		})
	}
}

// What cannot be waited for may still run, so the device is lost also when the driver's
// reason alone would not be one.
func TestLostWhenItCannotWait(t *testing.T) {
	for _, which := range []symbol{cuCtxSetCurrent, cuEventQuery} {
		f := newFake(t)
		d := f.open(t, Options{Tuning: stormTuning})
		reg, err := d.Alloc(t.Context(), 4096)
		require.NoError(t, err)
		submitted := false
		fail := func(s symbol) int {
			if s == which && submitted {
				return 1
			}
			submitted = submitted || s == cuEventRecord
			return 0
		}
		f.fail.Store(&fail)
		err = d.Scatter(t.Context(), reg, []gpu.Fragment{{Length: 4096}}, make([]byte, 4096))
		f.fail.Store(nil)
		require.ErrorIs(t, err, gpu.ErrLost, "%s", symbolNames[which])
		f.atRest(t, d)
	}
}

// When a call returns whose submission was refused half way, nothing of it moves any more.
func TestNothingMovesAfterARefusal(t *testing.T) {
	frags, src := make([]gpu.Fragment, 64), make([]byte, 64*1024)
	for i := range frags {
		frags[i] = gpu.Fragment{Offset: int64(i) * 3000, Length: 1024}
	}
	for name, c := range map[string]struct {
		dir     Direction
		refused symbol
	}{
		"kernel behind a DMA": {Direction{1, never, never}, cuLaunchKernel},
		"event":               {Direction{1, never, never}, cuEventRecord},
		"event of DMAs":       {Direction{1, 1, never}, cuEventRecord},
		"some of many DMAs":   {Direction{1, 1, never}, cuMemcpyHtoDAsync},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			d := f.open(t, Options{Tuning: &Tuning{Gather: c.dir, Scatter: c.dir}})
			reg, err := d.Alloc(t.Context(), 1<<20)
			require.NoError(t, err)
			late := func() time.Duration { return time.Millisecond }
			f.delay.Store(&late)
			given := false // a command that moves bytes
			fail := func(s symbol) int {
				if s == c.refused && given {
					return 1
				}
				given = given || s == cuMemcpyHtoDAsync
				return 0
			}
			f.fail.Store(&fail)
			err = d.Scatter(t.Context(), reg, frags, src)
			require.Zero(t, f.busy.Load(), "commands that still run")
			require.ErrorContains(t, err, symbolNames[c.refused])
			require.NoError(t, d.Lost())
		})
	}
}

// Copies over the border of two pinned pieces are cut there, in every way that bytes go, and
// Close of a piece waits for them.
func TestCopiesOverPinnedPieces(t *testing.T) {
	const half, page = 1 << 20, 12 << 10
	for name, dir := range map[string]Direction{"staged": {2, never, never}, "direct": {2, 1, never}, "strided": {2, never, 1}} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			d := f.open(t, Options{StagingBytes: 256 << 10, Buffers: 2, Tuning: &Tuning{Gather: dir, Scatter: dir}})
			mem := make([]byte, 2*half)
			var pins []*Pinned
			for _, m := range [][]byte{mem[:half], mem[half:]} {
				p, err := d.Pin(m)
				require.NoError(t, err)
				require.NoError(t, p.Wait(t.Context()))
				pins = append(pins, p)
			}
			reg, err := d.Alloc(t.Context(), 8*half)
			require.NoError(t, err)
			var frags []gpu.Fragment
			for i := range int64(2*half/page - 1) {
				frags = append(frags, gpu.Fragment{Offset: i * 3 * page, Length: page})
			}
			host := mem[1000:][:len(frags)*page]
			want := noise(1, len(host))
			copy(host, want)
			late := func() time.Duration { return 100 * time.Microsecond }
			f.delay.Store(&late)
			require.NoError(t, d.Scatter(t.Context(), reg, frags, host))
			clear(host)
			ended := make(chan error)
			before := f.calls[cuEventRecord].Load()
			go func() { ended <- d.Gather(t.Context(), host, reg, frags) }()
			for f.calls[cuEventRecord].Load() == before {
				time.Sleep(10 * time.Microsecond)
			}
			for _, p := range pins {
				require.NoError(t, p.Close())
			}
			require.NoError(t, <-ended)
			require.True(t, bytes.Equal(want, host))
		})
	}
}

// Allocations that are neighbours, in a region that joins them in another order: no copy
// leaves one of them, or the driver refuses it.
func TestNoCopyLeavesAnAllocation(t *testing.T) {
	const parts, page = 12, 64 << 10
	for name, dir := range map[string]Direction{"staged": {2, never, never}, "direct": {2, 1, never}, "strided": {2, never, 1}} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			d := f.open(t, Options{StagingBytes: 1 << 20, Buffers: 2, Tuning: &Tuning{Gather: dir, Scatter: dir}})
			var regions []gpu.Region
			for range parts {
				r, err := d.Alloc(t.Context(), shareBytes)
				require.NoError(t, err)
				regions = append(regions, r)
			}
			j, err := gpu.Join(append(regions[5:len(regions):len(regions)], regions[:5]...)...)
			require.NoError(t, err)
			for _, length := range []int64{page, shareBytes} {
				var frags []gpu.Fragment
				neighbours := 0
				for i := range parts { // by address
					frags = append(frags, gpu.Fragment{Offset: j.Start((i + parts - 5) % parts), Length: length})
					if i > 0 && regions[i].(*region).base == regions[i-1].(*region).base+shareBytes {
						neighbours++
					}
				}
				require.Greater(t, neighbours, stridedRowsMin)
				src, dst := noise(1, parts*int(length)), make([]byte, parts*length)
				require.NoError(t, d.Scatter(t.Context(), j, frags, src))
				require.NoError(t, d.Gather(t.Context(), dst, j, frags))
				require.True(t, bytes.Equal(src, dst))
			}
		})
	}
}

// With much in flight the leader sleeps after every look, also after the first.
func TestLeaderSleepsWhileMuchIsInFlight(t *testing.T) {
	f := newFake(t)
	d := f.open(t, Options{Buffers: 2, Tuning: &fixed})
	reg, err := d.Alloc(t.Context(), 2*pauseBytesMin)
	require.NoError(t, err)
	const looks = 20
	var queries atomic.Int64
	var contexts [2]int64
	fail := func(s symbol) int {
		if s != cuEventQuery {
			return 0
		}
		switch n := queries.Add(1); {
		case n == 1:
			contexts[0] = f.calls[cuCtxSetCurrent].Load()
		case n > 2*looks: // two buffers
			if contexts[1] == 0 {
				contexts[1] = f.calls[cuCtxSetCurrent].Load()
			}
			return 0
		}
		return codeNotReady
	}
	f.fail.Store(&fail)
	require.NoError(t, d.Scatter(t.Context(), reg, []gpu.Fragment{{Length: 2 * pauseBytesMin}}, make([]byte, 2*pauseBytesMin)))
	require.Equal(t, int64(looks), contexts[1]-contexts[0], "the context is set again after each sleep")
}
