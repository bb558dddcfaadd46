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
)

// TestSoak moves random lists through pinned memory, from many goroutines and by devices
// of every kind at the same time, with calls that are cancelled and regions that come and
// go, and compares every byte. It takes TIERD_SOAK_GPU, such as 5m; 3 s without.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("TIERD_SOAK_GPU"))
	if err != nil {
		length = 3 * time.Second
	}
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	keep := open(t, Options{Tuning: &fixed})
	start, _, err := keep.MemoryBytes()
	require.NoError(t, err)
	// The driver keeps some memory of its own from the first time that much is in flight
	// (22 MiB on an H200). Whatever is taken after that was lost.
	soak(t, time.Second, seed)
	before, _, err := keep.MemoryBytes()
	require.NoError(t, err)
	soak(t, length, seed+1)
	after, _, err := keep.MemoryBytes()
	require.NoError(t, err)
	t.Logf("free before, after 1 s, after all: %d, %d, %d", start, before, after)
	require.InDelta(t, before, after, 8<<20, "no memory is left behind")
}

func soak(t *testing.T, length time.Duration, seed uint64) {
	const workers, stripe = 4, 40 << 20
	var devices []*Device
	for _, o := range []Options{
		{Tuning: &Tuning{Gather: Direction{16, 2 << 20, 1024}, Scatter: Direction{24, 2 << 20, 1024}}},
		{StagingBytes: 1 << 20, Buffers: 3, Tuning: &Tuning{Gather: Direction{4, never, never}, Scatter: Direction{132, never, never}}},
		{Tuning: &Tuning{Gather: Direction{8, 4 << 10, 1024}, Scatter: Direction{8, 4 << 10, 1024}}},
	} {
		d, err := Open(t.Context(), 0, o)
		require.NoError(t, err)
		devices = append(devices, d)
	}
	host, err := devices[0].AllocHost(int64(len(devices)) * workers * 2 * stripe)
	require.NoError(t, err)
	var calls, moved, cancelled atomic.Int64
	end := time.Now().Add(length)
	var wg sync.WaitGroup
	for i, d := range devices {
		for w := range workers {
			n := i*workers + w
			wg.Go(func() {
				s := &soaker{dev: d, r: rand.New(rand.NewPCG(seed, uint64(n))), src: host.Bytes()[2*n*stripe:][:stripe], dst: host.Bytes()[(2*n+1)*stripe:][:stripe]}
				for time.Now().Before(end) && !t.Failed() {
					if err := s.round(&calls, &moved, &cancelled); err != nil {
						t.Errorf("device %d, worker %d: %v", i, w, err)
					}
				}
			})
		}
	}
	wg.Wait()
	require.NoError(t, host.Close())
	for _, d := range devices {
		require.NoError(t, d.Close())
	}
	t.Logf("%d calls, %.1f GB, %d cancelled, no wrong byte", calls.Load(), float64(moved.Load())/1e9, cancelled.Load())
}

type soaker struct {
	dev      *Device
	r        *rand.Rand
	src, dst []byte
}

// round makes a region, moves some lists and gives it back.
func (s *soaker) round(calls, moved, cancelled *atomic.Int64) error {
	size := int64(len(s.src))
	reg, err := s.dev.Alloc(context.Background(), size)
	if err != nil {
		return err
	}
	for range 1 + s.r.IntN(20) {
		frags, total := s.list(size)
		src, dst := s.src[:total], s.dst[:total]
		copy(src, noise(s.r.Uint64(), min(total, 64<<10)))
		for n := 64 << 10; n < total; n *= 2 { // every 64 KiB differ in one word
			copy(src[n:], src[:n])
			src[n] ^= byte(n >> 16)
		}
		ctx, cancel := context.Background(), func() {}
		if s.r.IntN(10) == 0 {
			ctx, cancel = context.WithTimeout(ctx, time.Duration(s.r.IntN(500))*time.Microsecond)
		}
		err := s.dev.Scatter(ctx, reg, frags, src)
		clear(dst)
		if err == nil {
			err = s.dev.Gather(ctx, dst, reg, frags)
		}
		cancel()
		calls.Add(2)
		moved.Add(2 * int64(total))
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			cancelled.Add(1)
		case err != nil:
			return err
		case !bytes.Equal(src, dst):
			return fmt.Errorf("wrong bytes: %d fragments, %d bytes, the first of %d", len(frags), total, frags[0].Length)
		}
	}
	return reg.Close()
}

// list is a grid, blocks in random order, or anything.
func (s *soaker) list(size int64) (frags []gpu.Fragment, total int) {
	grain := int64(1) << s.r.IntN(22)
	step := grain + []int64{0, 16, grain, 5}[s.r.IntN(4)]
	shape := s.r.IntN(3)
	for at := int64(s.r.IntN(4096)); at+grain <= size && len(frags) < 20000; at += step {
		n := grain
		if shape == 2 {
			n = s.r.Int64N(grain + 1)
		}
		frags = append(frags, gpu.Fragment{Offset: at, Length: n})
		total += int(n)
	}
	if shape > 0 {
		s.r.Shuffle(len(frags), func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
	}
	return frags, total
}
