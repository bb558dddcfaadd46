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
		"staged":             {StagingBytes: 64 << 10, Buffers: 2, Tuning: small(never, never)},
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
