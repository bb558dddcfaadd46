package gpu_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"pgregory.net/rapid"
)

// The ways to find an overlap agree with comparing all pairs.
func TestOverlapsAreFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		equal := rapid.Bool().Draw(t, "equal lengths")
		length := rapid.Int64Range(1, 12).Draw(t, "length")
		grid := rapid.SampledFrom([]int64{1, length}).Draw(t, "grid")
		frags := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) gpu.Fragment {
			f := gpu.Fragment{Offset: grid * rapid.Int64Range(0, 400/grid).Draw(t, "offset"), Length: length}
			if !equal {
				f.Length = rapid.Int64Range(0, 12).Draw(t, "its length")
			} else if rapid.IntRange(0, 9).Draw(t, "empty") == 0 {
				f.Length = 0
			}
			return f
		}), 0, 12).Draw(t, "fragments")
		total, overlap := 0, false
		for i, a := range frags {
			total += int(a.Length)
			for _, b := range frags[:i] {
				overlap = overlap || a.Length > 0 && b.Length > 0 && a.Offset < b.Offset+b.Length && b.Offset < a.Offset+a.Length
			}
		}
		err := gpu.CheckFragments(1000, frags, total, true)
		require.Equal(t, overlap, err != nil, "%v", err)
		require.NoError(t, gpu.CheckFragments(1000, frags, total, false))
		if overlap {
			require.ErrorIs(t, err, gpu.ErrFragments)
			require.ErrorContains(t, err, "overlap in the destination")
		}
	})
}

func TestOverlapNamesBoth(t *testing.T) {
	want := "fragments refused: fragments 2 [90, 100) and 0 [95, 105) overlap in the destination"
	require.EqualError(t, gpu.CheckFragments(1000, []gpu.Fragment{{Offset: 95, Length: 10}, {Offset: 20, Length: 10}, {Offset: 90, Length: 10}}, 30, true), want)
	want = "fragments refused: fragments 2 [90, 100) and 0 [95, 106) overlap in the destination"
	require.EqualError(t, gpu.CheckFragments(1000, []gpu.Fragment{{Offset: 95, Length: 11}, {Offset: 20, Length: 10}, {Offset: 90, Length: 10}}, 31, true), want)
}

// BenchmarkCheckFragments checks the list of 32 MiB in random order.
func BenchmarkCheckFragments(b *testing.B) {
	for _, c := range []struct {
		name string
		last int64
		step int64
	}{{"pages", 4096, 8192}, {"one length", 4096, 8193}, {"two lengths", 4095, 8192}} {
		frags := make([]gpu.Fragment, 8192)
		for i := range frags {
			frags[i] = gpu.Fragment{Offset: int64(i) * c.step, Length: 4096}
		}
		frags[len(frags)-1].Length = c.last
		rand.New(rand.NewPCG(1, 1)).Shuffle(len(frags), func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				require.NoError(b, gpu.CheckFragments(1<<40, frags, 4096*8191+int(c.last), true))
			}
		})
	}
}
