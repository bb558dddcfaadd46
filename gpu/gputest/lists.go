package gputest

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"pgregory.net/rapid"
)

// drawnBytes is the region of drawn lists: larger than what a device moves at a time.
const drawnBytes = 24 << 20

// drawn: lists of every shape, against a plain byte slice.
func drawn(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, drawnBytes)
	model := make([]byte, drawnBytes)
	rapid.Check(t, func(rt *rapid.T) {
		frags, total := drawList(rt, drawnBytes)
		seed := rapid.Uint64().Draw(rt, "seed of the bytes")
		src := quick(seed, total)
		rest := src
		for _, f := range frags {
			copy(model[f.Offset:f.Offset+f.Length], rest)
			rest = rest[f.Length:]
		}
		require.NoError(rt, d.Scatter(t.Context(), reg, frags, src))
		got := make([]byte, total)
		require.NoError(rt, d.Gather(t.Context(), got, reg, frags))
		require.True(rt, bytes.Equal(src, got), "gather returns what scatter put")
	})
	require.True(t, bytes.Equal(model, read(t, d, reg)), "scatter touches nothing else")
}

// drawList draws disjoint fragments in any order: of one size on a grid, as a KV cache
// has, or of every length and alignment, with empty ones and neighbours between them.
func drawList(rt *rapid.T, size int64) (frags []gpu.Fragment, total int) {
	at := int64(0)
	grain := rapid.SampledFrom([]int64{1, 4, 16, 256, 4096, 65536, 1 << 20}).Draw(rt, "grain")
	long := rapid.Int64Range(1, 64).Draw(rt, "grains of the longest")
	for range rapid.IntRange(0, 200).Draw(rt, "fragments") {
		at += grain * rapid.Int64Range(0, 3).Draw(rt, "gap")
		n := grain * rapid.Int64Range(0, long).Draw(rt, "grains")
		if at+n > size {
			break
		}
		frags = append(frags, gpu.Fragment{Offset: at, Length: n})
		at, total = at+n, total+int(n)
	}
	if len(frags) > 0 && rapid.Bool().Draw(rt, "shuffled") {
		frags = rapid.Permutation(frags).Draw(rt, "order")
	}
	return frags, total
}

// quick returns n bytes of noise, eight at a time.
func quick(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		v := r.Uint64()
		for k := range 8 {
			b[i+k] = byte(v >> (8 * k))
		}
	}
	return b[:n]
}

// overlaps: one overlap anywhere in a drawn list, and nothing is written.
func overlaps(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, 1<<20)
	want := quick(11, 1<<20)
	require.NoError(t, d.Scatter(t.Context(), reg, whole(reg), want))
	rapid.Check(t, func(rt *rapid.T) {
		frags, total := drawList(rt, 1<<20)
		if total == 0 {
			return
		}
		victim := frags[rapid.IntRange(0, len(frags)-1).Draw(rt, "victim")]
		if victim.Length == 0 {
			return
		}
		inside := rapid.Int64Range(0, victim.Length-1).Draw(rt, "inside")
		at := victim.Offset + inside
		frags = append(frags, gpu.Fragment{Offset: at, Length: rapid.Int64Range(1, 1<<20-at).Draw(rt, "length")})
		total += int(frags[len(frags)-1].Length)
		if rapid.Bool().Draw(rt, "shuffled") {
			frags = rapid.Permutation(frags).Draw(rt, "order")
		}
		require.ErrorIs(rt, d.Scatter(t.Context(), reg, frags, make([]byte, total)), gpu.ErrFragments)
		got := make([]byte, total)
		require.NoError(rt, d.Gather(t.Context(), got, reg, frags), "a gather may read a byte twice")
	})
	require.True(t, bytes.Equal(want, read(t, d, reg)), "a refused list writes nothing")
}

// alignment: every pair of alignments of the two sides, with lengths around the widths
// that a copy may use.
func alignment(t *testing.T, d gpu.Device) {
	const room = 256
	reg := alloc(t, d, 64*room)
	for host := range int64(17) {
		var frags []gpu.Fragment
		// A fragment of this length in front moves the host's side of the others.
		frags = append(frags, gpu.Fragment{Offset: 0, Length: host})
		total := host
		for dev := range int64(17) {
			n := []int64{1, 3, 4, 15, 16, 17, 31, 32, 33, 64, 100}[(host+dev)%11]
			frags = append(frags, gpu.Fragment{Offset: (dev+1)*room + dev, Length: n})
			total += n
		}
		model := bytes.Repeat([]byte{0xee}, 64*room)
		require.NoError(t, d.Scatter(t.Context(), reg, whole(reg), model))
		src := quick(uint64(host), int(total))
		rest := src
		for _, f := range frags {
			copy(model[f.Offset:f.Offset+f.Length], rest)
			rest = rest[f.Length:]
		}
		require.NoError(t, d.Scatter(t.Context(), reg, frags, src))
		require.True(t, bytes.Equal(model, read(t, d, reg)), "host side begins %d bytes off", host)
		got := bytes.Repeat([]byte{0xdd}, int(total)+2)
		require.NoError(t, d.Gather(t.Context(), got[1:total+1], reg, frags))
		require.True(t, bytes.Equal(src, got[1:total+1]))
		require.Equal(t, []byte{0xdd, 0xdd}, []byte{got[0], got[total+1]}, "bytes beside the slice")
	}
}

// cancelledMidway: contexts end at any time while calls run. When a call has returned,
// its slice and its part of the region are left alone; the calls of others go on.
func cancelledMidway(t *testing.T, d gpu.Device) {
	reg := alloc(t, d, drawnBytes)
	const half = drawnBytes / 2
	var frags []gpu.Fragment
	for at := int64(0); at < half; at += 16384 {
		frags = append(frags, gpu.Fragment{Offset: at, Length: 8192})
	}
	host := make([]byte, half/2)
	var stop atomic.Bool
	var wg sync.WaitGroup
	var other error
	wg.Go(func() { // a neighbour in the other half whose context stays
		src, dst := quick(1, half), make([]byte, half)
		place := []gpu.Fragment{{Offset: half, Length: half}}
		for !stop.Load() && other == nil {
			if other = d.Scatter(t.Context(), reg, place, src); other == nil {
				other = d.Gather(t.Context(), dst, reg, place)
			}
			if other == nil && !bytes.Equal(src, dst) {
				other = context.DeadlineExceeded
			}
		}
	})
	r := rand.New(rand.NewPCG(3, 3))
	for range 50 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(2000))*time.Microsecond)
		err := d.Gather(ctx, host, reg, frags)
		clear(host)
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		require.Equal(t, -1, bytes.IndexByte(host, 0x77), "the slice is ours again")
		for i := range host {
			host[i] = 0x77
		}
		if err := d.Scatter(ctx, reg, frags, host); err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		clear(host) // nobody reads it any more
		require.NoError(t, d.Scatter(t.Context(), reg, frags, host))
		cancel()
	}
	stop.Store(true)
	wg.Wait()
	require.NoError(t, other, "the calls of others go on, with their own bytes")
	require.NoError(t, d.Gather(t.Context(), host, reg, frags))
	require.True(t, bytes.Equal(make([]byte, len(host)), host), "a write of a cancelled call came late")
}
