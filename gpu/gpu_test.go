package gpu_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
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
		apart, err := gpu.CheckFragments(1000, frags, total, true)
		require.Equal(t, overlap, err != nil, "%v", err)
		again, gather := gpu.CheckFragments(1000, frags, total, false)
		require.NoError(t, gather)
		join := false
		for i, f := range frags {
			join = join || f.Length == 0 || i > 0 && f.Offset == frags[i-1].Offset+frags[i-1].Length
		}
		require.Equal(t, [2]bool{!join, !join}, [2]bool{apart, again}, "apart")
		if overlap {
			require.ErrorIs(t, err, gpu.ErrFragments)
			require.ErrorContains(t, err, "overlap in the destination")
		}
	})
}

// Long lists, which processors share, against a look at each byte of the region.
func TestLongLists(t *testing.T) {
	const n, length, size = 70_000, 8, 1 << 21
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	rapid.Check(t, func(t *rapid.T) {
		runtime.GOMAXPROCS(rapid.IntRange(1, 5).Draw(t, "processors"))
		frags := make([]gpu.Fragment, n)
		for i := range frags {
			frags[i] = gpu.Fragment{Offset: int64(i) * 2 * length, Length: length}
		}
		seed := rapid.Uint64().Draw(t, "seed")
		if rapid.Bool().Draw(t, "shuffled") {
			rand.New(rand.NewPCG(seed, 1)).Shuffle(n, func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
		}
		// At the borders of what a processor looks at, too.
		place := rapid.OneOf(rapid.IntRange(0, n-2), rapid.Custom(func(t *rapid.T) int {
			runs := rapid.IntRange(2, 4).Draw(t, "runs")
			return n*rapid.IntRange(1, runs-1).Draw(t, "run")/runs - 1
		}))
		for range rapid.IntRange(0, 2).Draw(t, "changes") {
			i, j := place.Draw(t, "i"), place.Draw(t, "j")
			switch rapid.SampledFrom([]string{"same", "twice", "doubled", "behind", "empty", "off", "longer", "outside", "negative"}).Draw(t, "change") {
			case "same":
				frags[i].Offset = frags[j].Offset
			case "twice":
				frags[i+1].Offset = frags[i].Offset
			case "doubled": // and one of them half a length off
				for k := i + 1; k < n; k++ {
					frags[k].Length = 2 * length
				}
				frags[n-1].Offset += length
			case "behind":
				frags[i+1].Offset = frags[i].Offset + frags[i].Length
			case "empty":
				frags[i].Length = 0
			case "off":
				frags[i].Offset += rapid.Int64Range(1, length+1).Draw(t, "by")
			case "longer":
				frags[i].Length += rapid.Int64Range(1, length+1).Draw(t, "by")
			case "outside":
				frags[i].Offset = size - 1
			case "negative":
				frags[i].Offset = -1
			}
		}
		total, apart, outside, overlap := 0, true, -1, false
		for i, f := range frags {
			total += int(f.Length)
			apart = apart && f.Length > 0 && (i == 0 || f.Offset != frags[i-1].Offset+frags[i-1].Length)
			if outside < 0 && (f.Offset < 0 || f.Offset+f.Length > size) {
				outside = i
			}
		}
		var taken [size]bool
		for _, f := range frags {
			if outside < 0 {
				part := taken[f.Offset : f.Offset+f.Length]
				overlap = overlap || slices.Contains(part, true)
				for k := range part {
					part[k] = true
				}
			}
		}
		for _, disjoint := range []bool{false, true} {
			got, err := gpu.CheckFragments(size, frags, total, disjoint)
			switch {
			case outside >= 0:
				require.ErrorContains(t, err, fmt.Sprintf("fragment %d is %d bytes at offset %d", outside, frags[outside].Length, frags[outside].Offset))
			case disjoint && overlap:
				require.ErrorContains(t, err, "overlap in the destination")
			default:
				require.NoError(t, err)
				require.Equal(t, apart, got)
				_, err = gpu.CheckFragments(size, frags, total-1, disjoint)
				require.ErrorContains(t, err, fmt.Sprintf("hold %d bytes, but the host side has %d", total, total-1))
				_, err = gpu.CheckFragments(size, frags, total+1, disjoint)
				require.ErrorContains(t, err, fmt.Sprintf("they hold %d bytes, but the host side has %d", total, total+1))
			}
		}
	})
}

// Fragments of one length, most of them at multiples of it, close together: against a look
// at each byte.
func TestEqualLengths(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.Int64Range(1, 9).Draw(t, "length")
		off := rapid.Int64Range(0, length-1).Draw(t, "off")
		n := rapid.IntRange(1, 12).Draw(t, "n")
		size := 40 * length
		taken, overlap := make([]bool, size), false
		var frags []gpu.Fragment
		for range n {
			f := gpu.Fragment{Offset: rapid.Int64Range(0, 38).Draw(t, "cell") * length, Length: length}
			if rapid.IntRange(0, 3).Draw(t, "which") == 0 {
				f.Offset += off
			}
			frags = append(frags, f)
			for at := range length {
				overlap = overlap || taken[f.Offset+at]
				taken[f.Offset+at] = true
			}
		}
		_, err := gpu.CheckFragments(size, frags, n*int(length), true)
		require.Equal(t, overlap, err != nil, "%v", err)
	})
}

// What is found at the borders between processors, for each number of them.
func TestBordersOfLongLists(t *testing.T) {
	const n = 70_000
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for runs := 1; runs <= 8; runs++ {
		runtime.GOMAXPROCS(runs)
		for k := range runs {
			at := n * k / runs
			check := func(change func(frags []gpu.Fragment)) (apart bool, err error) {
				frags, total := make([]gpu.Fragment, n), 0
				for i := range frags {
					frags[i] = gpu.Fragment{Offset: int64(i) * 32, Length: 8 + int64(i%2)}
				}
				change(frags)
				for _, f := range frags {
					total += int(f.Length)
				}
				return gpu.CheckFragments(n*32, frags, total, true)
			}
			apart, err := check(func([]gpu.Fragment) {})
			require.NoError(t, err)
			require.True(t, apart)
			apart, err = check(func(frags []gpu.Fragment) { clear(frags[:max(at, 1)]) })
			require.NoError(t, err)
			require.False(t, apart, "the first are empty")
			if at == 0 {
				continue
			}
			_, err = check(func(frags []gpu.Fragment) { frags[at].Offset = frags[at-1].Offset + 7 })
			require.ErrorContains(t, err, "overlap in the destination", "%d processors, border %d", runs, k)
			apart, err = check(func(frags []gpu.Fragment) { frags[at].Offset = frags[at-1].Offset + frags[at-1].Length })
			require.NoError(t, err)
			require.False(t, apart, "two meet at the border")
		}
	}
}

// Sums above what an int64 holds are refused, however many processors make them.
func TestSumsDoNotWrap(t *testing.T) {
	const far = math.MaxInt64
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	frags := make([]gpu.Fragment, 70_000)
	for runs := 1; runs <= 4; runs++ {
		runtime.GOMAXPROCS(runs)
		clear(frags)
		// Together they are 2^64 above what one has.
		frags[1].Length, frags[len(frags)/2-1].Length, frags[len(frags)-1].Length = far, far, far
		frags[40_000].Length = 2
		_, err := gpu.CheckFragments(far, frags, far, false)
		require.EqualError(t, err, "fragments refused: the first 35000 hold 18446744073709551614 bytes, but the host side has 9223372036854775807")
	}
}

// What one processor refuses is refused, also where the others' bytes are what was wanted.
func TestLongListIsRefusedAsAWhole(t *testing.T) {
	frags := make([]gpu.Fragment, 70_000)
	for i := range frags {
		frags[i] = gpu.Fragment{Offset: int64(i), Length: 1}
		if i >= len(frags)/4 {
			frags[i].Offset = -1
		}
	}
	for runs := 2; runs <= 4; runs++ {
		_, err := gpu.CheckFragments(1<<20, frags[:len(frags)/4*runs], len(frags)/4, false)
		require.EqualError(t, err, "fragments refused: fragment 17500 is 1 bytes at offset -1, but the region has 1048576 bytes")
	}
}

func TestOverlapNamesBoth(t *testing.T) {
	want := "fragments refused: fragments 2 [90, 100) and 0 [95, 105) overlap in the destination"
	_, err := gpu.CheckFragments(1000, []gpu.Fragment{{Offset: 95, Length: 10}, {Offset: 20, Length: 10}, {Offset: 90, Length: 10}}, 30, true)
	require.EqualError(t, err, want)
	want = "fragments refused: fragments 2 [90, 100) and 0 [95, 106) overlap in the destination"
	_, err = gpu.CheckFragments(1000, []gpu.Fragment{{Offset: 95, Length: 11}, {Offset: 20, Length: 10}, {Offset: 90, Length: 10}}, 31, true)
	require.EqualError(t, err, want)
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
				_, err := gpu.CheckFragments(1<<40, frags, 4096*8191+int(c.last), true)
				require.NoError(b, err)
			}
		})
	}
}
