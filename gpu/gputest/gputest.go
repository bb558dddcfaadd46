// Package gputest is the conformance suite that every gpu.Device passes. A device's
// own tests call Run with a function that makes a fresh device.
package gputest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
)

// Run checks every law of package gpu on devices that open makes. open registers its
// own cleanup.
func Run(t *testing.T, open func(t *testing.T) gpu.Device) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, gpu.Device)
	}{
		{"Fresh", fresh},
		{"RoundTrip", roundTrip},
		{"Bounds", bounds},
		{"Empty", empty},
		{"UseAfterClose", useAfterClose},
		{"Cancelled", cancelled},
		{"Import", imported},
		{"Joined", joined},
		{"JoinedDrawn", joinedDrawn},
		{"Drawn", drawn},
		{"Overlaps", overlaps},
		{"Alignment", alignment},
		{"CancelledMidway", cancelledMidway},
		{"Parallel", parallel},
		{"CloseWaits", closeWaits},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
	t.Run("Foreign", func(t *testing.T) { foreign(t, open(t), open(t)) })
}

const regionBytes = 1 << 20

func alloc(t *testing.T, d gpu.Device, size int64) gpu.Region {
	t.Helper()
	r, err := d.Alloc(t.Context(), size)
	require.NoError(t, err)
	require.Equal(t, size, r.Size())
	t.Cleanup(func() { r.Close() })
	return r
}

func whole(r gpu.Region) []gpu.Fragment { return []gpu.Fragment{{Length: r.Size()}} }

func read(t *testing.T, d gpu.Device, r gpu.Region) []byte {
	t.Helper()
	b := make([]byte, r.Size())
	require.NoError(t, d.Gather(t.Context(), b, r, whole(r)))
	return b
}

func noise(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// fresh: a region is zero, even where another was before.
func fresh(t *testing.T, d gpu.Device) {
	require.NotEmpty(t, d.Name())
	for range 3 {
		r := alloc(t, d, regionBytes)
		require.Equal(t, make([]byte, regionBytes), read(t, d, r))
		require.NoError(t, d.Scatter(t.Context(), r, whole(r), bytes.Repeat([]byte{0xa5}, regionBytes)))
		require.NoError(t, r.Close())
		require.NoError(t, r.Close(), "closing twice is harmless")
	}
	for _, size := range []int64{0, -1} {
		_, err := d.Alloc(t.Context(), size)
		require.Error(t, err, "size %d", size)
	}
}

// lists returns disjoint fragments in random order that lie in size bytes.
func lists(r *rand.Rand, size int64) (frags []gpu.Fragment, total int) {
	for at := int64(0); at < size; {
		gap, n := r.Int64N(5000), r.Int64N(9000)
		if r.IntN(4) == 0 {
			gap = 0
		}
		if r.IntN(8) == 0 {
			n = 0
		}
		at += gap
		if n = min(n, size-at); n < 0 {
			break
		}
		frags = append(frags, gpu.Fragment{Offset: at, Length: n})
		at += n
		total += int(n)
	}
	r.Shuffle(len(frags), func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
	return frags, total
}

// roundTrip: against a plain byte slice, for random lists.
func roundTrip(t *testing.T, d gpu.Device) {
	r := rand.New(rand.NewPCG(1, 2))
	reg := alloc(t, d, regionBytes)
	model := make([]byte, regionBytes)
	for range 20 {
		frags, total := lists(r, regionBytes)
		src := noise(r, total)
		rest := src
		for _, f := range frags {
			copy(model[f.Offset:f.Offset+f.Length], rest)
			rest = rest[f.Length:]
		}
		require.NoError(t, d.Scatter(t.Context(), reg, frags, src))
		dst := make([]byte, total)
		require.NoError(t, d.Gather(t.Context(), dst, reg, frags))
		require.True(t, bytes.Equal(src, dst), "gather returns what scatter put")
	}
	require.True(t, bytes.Equal(model, read(t, d, reg)), "scatter touches nothing else")
	twice := []gpu.Fragment{{Offset: 10, Length: 100}, {Offset: 50, Length: 100}}
	dst := make([]byte, 200)
	require.NoError(t, d.Gather(t.Context(), dst, reg, twice), "a gather may read a byte twice")
	require.Equal(t, append(bytes.Clone(model[10:110]), model[50:150]...), dst)
}

// bounds: what is refused has touched nothing.
func bounds(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, 4096)
	want := noise(rand.New(rand.NewPCG(3, 4)), 4096)
	require.NoError(t, d.Scatter(t.Context(), reg, whole(reg), want))
	const far = 1<<63 - 1
	both := map[string][]gpu.Fragment{
		"past the end":      {{Offset: 4000, Length: 97}},
		"starts past":       {{Offset: 4097, Length: 0}},
		"negative offset":   {{Offset: -1, Length: 10}},
		"negative length":   {{Offset: 10, Length: -1}},
		"overflow":          {{Offset: far, Length: far}},
		"length overflow":   {{Offset: 1, Length: far}},
		"good, then beyond": {{Offset: 0, Length: 10}, {Offset: 4096, Length: 1}},
		"too short a host":  {{Offset: 0, Length: 101}},
		"too long a host":   {{Offset: 0, Length: 99}},
		"none":              nil,
	}
	for name, frags := range both {
		host := bytes.Repeat([]byte{0x5a}, 100)
		require.ErrorIs(t, d.Scatter(t.Context(), reg, frags, host), gpu.ErrFragments, name)
		require.ErrorIs(t, d.Gather(t.Context(), host, reg, frags), gpu.ErrFragments, name)
		require.Equal(t, bytes.Repeat([]byte{0x5a}, 100), host, name)
	}
	for name, frags := range map[string][]gpu.Fragment{
		"same":            {{Offset: 0, Length: 50}, {Offset: 0, Length: 50}},
		"one byte":        {{Offset: 0, Length: 50}, {Offset: 49, Length: 50}},
		"inside":          {{Offset: 0, Length: 90}, {Offset: 40, Length: 10}},
		"descending":      {{Offset: 60, Length: 50}, {Offset: 20, Length: 50}},
		"around an empty": {{Offset: 100, Length: 50}, {Offset: 0, Length: 0}, {Offset: 110, Length: 50}},
	} {
		total := 0
		for _, f := range frags {
			total += int(f.Length)
		}
		require.ErrorIs(t, d.Scatter(t.Context(), reg, frags, make([]byte, total)), gpu.ErrFragments, name)
	}
	many := make([]gpu.Fragment, gpu.FragmentsMax)
	require.NoError(t, d.Gather(t.Context(), nil, reg, many))
	require.ErrorIs(t, d.Gather(t.Context(), nil, reg, append(many, gpu.Fragment{})), gpu.ErrFragments, "more than FragmentsMax")
	require.Equal(t, want, read(t, d, reg))
}

// empty: lengths of zero are no special case for a caller.
func empty(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, 4096)
	for _, frags := range [][]gpu.Fragment{nil, {}, {{}}, {{Offset: 4096}}, {{Offset: 7}, {Offset: 7}}} {
		require.NoError(t, d.Gather(t.Context(), nil, reg, frags))
		require.NoError(t, d.Scatter(t.Context(), reg, frags, nil))
	}
	mixed := []gpu.Fragment{{Offset: 5}, {Offset: 5, Length: 1}, {Offset: 5}}
	require.NoError(t, d.Scatter(t.Context(), reg, mixed, []byte{9}))
	require.Equal(t, byte(9), read(t, d, reg)[5])
}

func useAfterClose(t *testing.T, d gpu.Device) {
	reg, open := alloc(t, d, 4096), alloc(t, d, 4096)
	require.NoError(t, reg.Close())
	buf := make([]byte, 1)
	one := []gpu.Fragment{{Length: 1}}
	require.ErrorIs(t, d.Gather(t.Context(), buf, reg, one), gpu.ErrClosed)
	require.ErrorIs(t, d.Scatter(t.Context(), reg, one, buf), gpu.ErrClosed)
	_, err := reg.Export()
	require.ErrorIs(t, err, gpu.ErrClosed)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close(), "closing twice is harmless")
	require.ErrorIs(t, d.Gather(t.Context(), buf, open, one), gpu.ErrClosed, "a device closes its regions")
	_, err = d.Alloc(t.Context(), 4096)
	require.ErrorIs(t, err, gpu.ErrClosed)
}

func foreign(t *testing.T, d, other gpu.Device) {
	reg := alloc(t, other, 4096)
	require.ErrorIs(t, d.Gather(t.Context(), make([]byte, 1), reg, []gpu.Fragment{{Length: 1}}), gpu.ErrForeign)
	require.ErrorIs(t, d.Scatter(t.Context(), reg, []gpu.Fragment{{Length: 1}}, make([]byte, 1)), gpu.ErrForeign)
}

func cancelled(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, 4096)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	buf := bytes.Repeat([]byte{1}, 4096)
	require.ErrorIs(t, d.Scatter(ctx, reg, whole(reg), buf), context.Canceled)
	require.ErrorIs(t, d.Gather(ctx, buf, reg, whole(reg)), context.Canceled)
	_, err := d.Alloc(ctx, 4096)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, make([]byte, 4096), read(t, d, reg), "a call that never began has touched nothing")
}

// imported: an exported region is the same bytes, and outlives the import.
func imported(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, 3*4096)
	h, err := reg.Export()
	require.NoError(t, err)
	require.Equal(t, reg.Size(), h.Length)
	also, err := d.Import(t.Context(), h)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("this device cannot import its own region in one process")
	}
	require.NoError(t, err)
	want := noise(rand.New(rand.NewPCG(5, 6)), 3*4096)
	require.NoError(t, d.Scatter(t.Context(), also, whole(also), want))
	require.Equal(t, want, read(t, d, reg))
	require.NoError(t, also.Close())
	require.Equal(t, want, read(t, d, reg))
	h.Length++
	_, err = d.Import(t.Context(), h)
	require.Error(t, err, "a range that the region does not have")
}

// parallel: many goroutines, each in its own stripe, in fragments that interleave with
// those of the others.
func parallel(t *testing.T, d gpu.Device) {
	const workers, grain = 16, 512
	reg := alloc(t, d, regionBytes)
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(7, uint64(w)))
			var frags []gpu.Fragment
			for at := int64(w * grain); at < regionBytes; at += workers * grain {
				frags = append(frags, gpu.Fragment{Offset: at, Length: grain})
			}
			dst := make([]byte, len(frags)*grain)
			for range 5 {
				r.Shuffle(len(frags), func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
				src := noise(r, len(dst))
				if err := errors.Join(d.Scatter(t.Context(), reg, frags, src), d.Gather(t.Context(), dst, reg, frags)); err != nil {
					errs[w] = err
				} else if !bytes.Equal(src, dst) {
					errs[w] = errors.New("read back other bytes than written")
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// closeWaits: regions are closed under the feet of running calls, which either succeed
// or say ErrClosed.
func closeWaits(t *testing.T, d gpu.Device) {
	for range 8 {
		reg := alloc(t, d, regionBytes)
		var wg sync.WaitGroup
		errs := make([]error, 4)
		for w := range errs {
			wg.Go(func() {
				buf := make([]byte, regionBytes)
				for range 20 {
					if errs[w] = d.Gather(t.Context(), buf, reg, whole(reg)); errs[w] != nil {
						return
					}
				}
			})
		}
		require.NoError(t, reg.Close())
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				require.ErrorIs(t, err, gpu.ErrClosed)
			}
		}
	}
}
