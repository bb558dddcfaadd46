package cuda

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"pgregory.net/rapid"
)

// The orders of a lane: a DMA for each run, or many to a command.
var (
	one   = (&lane{dev: &Device{drv: &driver{}}}).orders(Direction{DirectBytes: 1})
	many  = (&lane{dev: &Device{drv: withBatches}}).orders(Direction{DirectBytes: 1})
	loads = (&lane{dev: &Device{drv: withBatches}, scatter: true}).orders(Direction{DirectBytes: batchedLoadMin})
)

var withBatches = &driver{fn: [symbols]uintptr{cuMemcpyBatchAsync: 1}}

// Short fragments of a load never go many to a command.
func TestShortLoadsAreNotBatched(t *testing.T) {
	l := &lane{dev: &Device{drv: withBatches}, scatter: true}
	require.False(t, l.batches(batchedLoadMin-1))
	require.True(t, l.batches(batchedLoadMin))
	require.Equal(t, one, l.orders(Direction{DirectBytes: batchedLoadMin - 1}))
	l.scatter = false
	require.True(t, l.batches(1))
}

// drawList draws fragments of a region, with neighbours, empty ones and long ones.
func drawList(t *rapid.T) (frags []gpu.Fragment, total int) {
	at := int64(0)
	for range rapid.IntRange(0, 60).Draw(t, "fragments") {
		if rapid.IntRange(0, 5).Draw(t, "grid") == 0 {
			row, gap := rapid.Int64Range(1, 1<<20).Draw(t, "row"), rapid.Int64Range(0, 1<<20).Draw(t, "gap")
			rows, step := rapid.IntRange(1, 40).Draw(t, "rows"), row+gap
			if rapid.IntRange(0, 3).Draw(t, "down") == 0 {
				at, step = at+step*int64(rows), -step
			}
			for range rows {
				frags = append(frags, gpu.Fragment{Offset: at, Length: row})
				at, total = at+step, total+int(row)
			}
			at = max(at, 0)
		}
		f := gpu.Fragment{Offset: at, Length: rapid.OneOf(
			rapid.Just(int64(0)), rapid.Int64Range(1, 300), rapid.Int64Range(1, 20000), rapid.Int64Range(1, 9<<20),
		).Draw(t, "length")}
		if rapid.Bool().Draw(t, "elsewhere") {
			f.Offset = rapid.Int64Range(0, 1<<40).Draw(t, "offset")
		}
		frags = append(frags, f)
		at, total = f.Offset+f.Length, total+int(f.Length)
	}
	return frags, total
}

// The batches of a call name each byte of the list once, in its order, within the bounds.
func TestBatchesCoverTheListInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		frags, total := drawList(t)
		direct := rapid.SampledFrom([]int64{1, 4096, 1 << 20, never}).Draw(t, "direct")
		strided := rapid.SampledFrom([]int64{1, 4096, never}).Draw(t, "strided")
		staging := rapid.SampledFrom([]int{64 << 10, 1 << 20, 8 << 20}).Draw(t, "staging")
		base := uint64(1) << 41
		limit, o := full(staging), rapid.SampledFrom([]orders{one, many, loads}).Draw(t, "orders")
		if rapid.Bool().Draw(t, "alone") {
			limit = ramp(total, staging, rapid.Bool().Draw(t, "scatter"))
		}
		p := newPlanner(list{base: base, frags: frags}, Direction{Blocks: 1, DirectBytes: direct, StridedBytes: strided}, limit, o)
		host := 0
		left := append([]gpu.Fragment(nil), frags...)
		expect := func(device uint64, bytes int) {
			for bytes > 0 {
				for len(left) > 0 && left[0].Length == 0 {
					left = left[1:]
				}
				require.NotEmpty(t, left, "more bytes than the list has")
				f := &left[0]
				require.Equal(t, base+uint64(f.Offset), device)
				n := min(bytes, int(f.Length))
				f.Offset, f.Length = f.Offset+int64(n), f.Length-int64(n)
				device, bytes, host = device+uint64(n), bytes-n, host+n
			}
		}
		var b batch
		for p.next(&b) {
			require.Equal(t, host, b.host)
			require.Positive(t, b.bytes)
			require.NotEqual(t, len(b.pieces) == 0, len(b.runs) == 0, "staged or direct")
			require.LessOrEqual(t, len(b.pieces), batchPiecesMax)
			require.LessOrEqual(t, len(b.runs), o.runsMax)
			start := b.host
			for _, c := range b.pieces {
				require.LessOrEqual(t, int(c.bytes), pieceBytesMax)
				require.Equal(t, host-start, int(c.staged))
				expect(c.device, int(c.bytes))
			}
			for _, r := range b.runs {
				require.Equal(t, host, r.host)
				if r.rows > 1 {
					require.GreaterOrEqual(t, r.pitch, uint64(r.bytes), "rows lie one behind the other")
					require.LessOrEqual(t, r.pitch, uint64(pitchBytesMax))
				}
				for row := range r.rows {
					expect(r.device+uint64(row)*r.pitch, r.bytes)
				}
			}
			require.Equal(t, host-start, b.bytes)
			if len(b.runs) == 0 {
				require.LessOrEqual(t, b.bytes, staging)
			} else if last := b.runs[len(b.runs)-1]; b.bytes > directBytesMax {
				require.Equal(t, 1, last.rows, "one row at most is more than the bound")
				require.Less(t, b.bytes-last.bytes, directBytesMax)
			}
		}
		require.Equal(t, total, host)
	})
}

// Fragments at the crossover go without staging, the others between them do not, and
// neighbours count as one.
func TestCrossover(t *testing.T) {
	const k = 1 << 20
	frags := []gpu.Fragment{{Offset: 0, Length: 4096}, {Offset: 8 * k, Length: k - 1}, {Offset: 20 * k, Length: k / 2}, {Offset: 20*k + k/2, Length: k / 2}, {Offset: 40 * k, Length: k}, {Offset: 60 * k, Length: 100}}
	p := newPlanner(list{frags: frags}, Direction{DirectBytes: k, StridedBytes: never}, full(8*k), one)
	var got [][2]int
	var b batch
	for p.next(&b) {
		got = append(got, [2]int{len(b.runs), b.bytes})
	}
	require.Equal(t, [][2]int{{0, 4096 + k - 1}, {2, 2 * k}, {0, 100}}, got)
}

// Equal lengths at equal distances are one run where that is long enough; a grid of
// blocks in many layers is one run a block.
func TestStridedRuns(t *testing.T) {
	const row, layers, blocks = 16 << 10, 64, 4
	var frags []gpu.Fragment
	total := 0
	for _, b := range []int64{7, 3, 100, 8} {
		for l := range int64(layers) {
			frags = append(frags, gpu.Fragment{Offset: l*(1<<24) + b*row, Length: row})
			total += row
		}
	}
	o := one
	plan := func(d Direction, frags []gpu.Fragment) (runs, pieces int) {
		p := newPlanner(list{frags: frags}, d, full(4<<20), o)
		var b batch
		for p.next(&b) {
			runs, pieces = runs+len(b.runs), pieces+len(b.pieces)
		}
		return runs, pieces
	}
	d := Direction{DirectBytes: never, StridedBytes: row}
	runs, pieces := plan(d, frags)
	require.Equal(t, [2]int{blocks, 0}, [2]int{runs, pieces})
	d.StridedBytes = row + 1
	runs, pieces = plan(d, frags)
	require.Equal(t, [2]int{0, total / pieceBytesMax}, [2]int{runs, pieces}, "rows are too short")
	d.StridedBytes = row
	runs, pieces = plan(d, frags[:31])
	require.Equal(t, [2]int{0, 31 * row / pieceBytesMax}, [2]int{runs, pieces}, "too few rows")
	pair := []gpu.Fragment{{Offset: 0, Length: 1 << 20}, {Offset: 1 << 30, Length: 1 << 20}, {Offset: 5 << 20, Length: 1 << 20}}
	runs, _ = plan(d, pair)
	require.Zero(t, runs, "two or three fragments are always at equal distances, or nearly")
	var turn []gpu.Fragment
	for i := range int64(20) { // the last of these is the first of others
		turn = append(turn, gpu.Fragment{Offset: i << 20, Length: row})
	}
	for i := range int64(layers - 1) {
		turn = append(turn, gpu.Fragment{Offset: 19<<20 + (i+1)<<21, Length: row})
	}
	runs, pieces = plan(d, turn)
	require.Equal(t, [2]int{1, 19 * row / pieceBytesMax}, [2]int{runs, pieces}, "the distance changes")
	for i := range frags {
		frags[i].Offset *= 1 << 10
	}
	runs, pieces = plan(d, frags)
	require.Equal(t, [2]int{0, total / pieceBytesMax}, [2]int{runs, pieces}, "further apart than the driver allows")

	// Rows of a load that can go many to a command do, unless a strided DMA has enough of them.
	d = Direction{DirectBytes: row, StridedBytes: row}
	var long []gpu.Fragment
	for l := range int64(stridedLoadMin / row) {
		long = append(long, gpu.Fragment{Offset: l << 20, Length: row})
	}
	for _, c := range []struct {
		o    orders
		rows []gpu.Fragment
		runs int
	}{{one, long[1:], 1}, {many, long[1:], 1}, {loads, long[1:], len(long) - 1}, {loads, long, 1}} {
		o = c.o
		runs, pieces = plan(d, c.rows)
		require.Equal(t, [2]int{c.runs, 0}, [2]int{runs, pieces}, "%+v, %d rows", o, len(c.rows))
	}
}

func TestOldDriverNamesWhatIsMissing(t *testing.T) {
	_, err := resolve("libcuda.so.1", func(name string) uintptr {
		if name == "cuIpcOpenMemHandle_v2" || name == "cuLaunchKernel" {
			return 0
		}
		return 1
	})
	require.ErrorIs(t, err, ErrOldDriver)
	require.EqualError(t, err, "the CUDA driver is too old: libcuda.so.1 lacks cuLaunchKernel, cuIpcOpenMemHandle_v2; install a driver of CUDA 11 or later (R450)")
}

// A call that is alone begins (store) or ends (load) with small batches, whose kernels run
// beside no DMA, and fills its buffers in between.
func TestRamp(t *testing.T) {
	const mib = 1 << 20
	batches := func(total, staging int, scatter bool) (bytes []int) {
		p := newPlanner(list{frags: []gpu.Fragment{{Length: int64(total)}}}, Direction{DirectBytes: never, StridedBytes: never}, ramp(total, staging, scatter), one)
		for b := (&batch{}); p.next(b); {
			bytes = append(bytes, b.bytes)
		}
		return bytes
	}
	require.Equal(t, []int{2 * mib, 2 * mib, 4 * mib, 8 * mib, 16 * mib, 16 * mib, 2 * mib}, batches(50*mib, 16*mib, false))
	require.Equal(t, []int{16 * mib, 16 * mib, 9 * mib, 4*mib + mib/2, 2*mib + mib/4, 2 * mib, mib / 4}, batches(50*mib, 16*mib, true))
	require.Equal(t, []int{2 * mib, mib}, batches(3*mib, 16*mib, false))
	require.Equal(t, []int{2 * mib, mib}, batches(3*mib, 16*mib, true))
	require.Equal(t, []int{4*mib + mib/2 + pieceBytesMax, 2*mib + mib/4, 2 * mib, mib/4 + 3 - pieceBytesMax}, batches(9*mib+3, 16*mib, true), "batches end at whole pieces")
	require.Equal(t, []int{64 << 10, 64 << 10, 7}, batches(128<<10+7, 64<<10, false), "small buffers")
}

// A pause that left the link idle makes the lane pause less; others make it pause a little
// more, so that one late wake-up is forgotten.
func TestNextPause(t *testing.T) {
	at := int64(pauseBytesMin)
	for range 20 {
		at = nextPause(at, 0)
	}
	require.Equal(t, int64(pauseBytesMax), at)
	at = nextPause(pauseBytesMin, 0)
	require.Equal(t, int64(2*pauseBytesMin), at)
	n := 0
	for ; at > pauseBytesMin; n++ {
		at = nextPause(at, 1)
	}
	require.Equal(t, int64(pauseBytesMin), at)
	require.InDelta(t, 45, n, 2)
	const held = DefaultBuffers * DefaultStagingBytes
	for at, n = pauseBytesMax, 0; at > held; n++ {
		at = forget(at)
	}
	require.InDelta(t, 530, n, 5, "a lane whose buffers hold less than pauseBytes pauses again")
	require.Equal(t, int64(pauseBytesMin), forget(pauseBytesMin))
}

func TestEverySymbolHasAName(t *testing.T) {
	for s, name := range symbolNames {
		require.NotEmpty(t, name, "symbol %d", s)
	}
}

// Neighbours in the address space that are two allocations stay two fragments.
func TestNoPieceCrossesASeam(t *testing.T) {
	frags := []gpu.Fragment{{Offset: 0, Length: 100}, {Offset: 100, Length: 50}, {Offset: 150, Length: 0}, {Offset: 150, Length: 50}, {Offset: 200, Length: 10}}
	require.Equal(t, []gpu.Fragment{{Offset: 0, Length: 210}}, merge(frags, nil))
	require.Equal(t, []gpu.Fragment{{Offset: 0, Length: 150}, {Offset: 150, Length: 60}}, merge(frags, []int64{0, 150}))
	require.Len(t, frags, 5, "the caller's list is left alone")

	var grid []gpu.Fragment
	for i := range int64(40) {
		grid = append(grid, gpu.Fragment{Offset: i << 20, Length: 1 << 18})
	}
	var rows []int
	for p, b := newPlanner(list{frags: grid, seams: []int64{0, 10 << 20, 12 << 20, 30<<20 + 1}}, Direction{DirectBytes: never, StridedBytes: 1}, full(4<<20), one), (&batch{}); p.next(b); {
		for _, r := range b.runs {
			rows = append(rows, r.rows)
		}
		rows = append(rows, -len(b.pieces))
	}
	require.Equal(t, []int{10, 0, -2 * 64, 19, 9, 0}, rows, "runs end at seams, and the two fragments between two of them are staged")
}

// What goes by one command of the driver is pinned as a whole, by Pin as far as it has got or
// by AllocHost.
func TestIsPinned(t *testing.T) {
	d := &driver{}
	mem := make([]byte, 3000)
	require.False(t, d.isPinned(mem[:1]))
	p := &Pinned{mem: mem[:1000]}
	require.NoError(t, d.add(p))
	require.False(t, d.isPinned(mem[:1]), "nothing is registered yet")
	p.bytes.Store(600)
	require.True(t, d.isPinned(mem[:600]))
	require.False(t, d.isPinned(mem[100:601]))
	d.hosts.Store(address(mem[2000:]), uintptr(500))
	d.hosts.Store(address(mem[2500:]), uintptr(100))
	require.True(t, d.isPinned(mem[2000:2500]))
	require.True(t, d.isPinned(mem[2550:2600]))
	require.False(t, d.isPinned(mem[2000:2501]), "two allocations")
	require.False(t, d.isPinned(mem[1999:2001]))
}

// A batch without staging has as many fragments as one command takes.
func TestRunsOfABatch(t *testing.T) {
	var frags []gpu.Fragment
	for i := range int64(5000) {
		frags = append(frags, gpu.Fragment{Offset: i * 300, Length: 200})
	}
	for _, o := range []orders{one, many} {
		p := newPlanner(list{frags: frags}, Direction{DirectBytes: 1, StridedBytes: never}, full(4<<20), o)
		total := 0
		for b := (&batch{}); p.next(b); {
			require.LessOrEqual(t, len(b.runs), o.runsMax)
			require.Empty(t, b.pieces)
			total += len(b.runs)
		}
		require.Equal(t, 5000, total)
	}
}

// A batch has no more pieces than its list has room for, however short they are.
func TestPiecesOfABatch(t *testing.T) {
	var frags []gpu.Fragment
	for i := range int64(2*batchPiecesMax + 1) {
		frags = append(frags, gpu.Fragment{Offset: i * 3, Length: 2})
	}
	p := newPlanner(list{frags: frags, apart: true}, Direction{DirectBytes: never, StridedBytes: never}, full(4<<20), one)
	var pieces []int
	for b := (&batch{}); p.next(b); {
		pieces = append(pieces, len(b.pieces))
	}
	require.Equal(t, []int{batchPiecesMax, batchPiecesMax, 1}, pieces)
}

// A driver that lacks an optional function is none too old.
func TestOptionalFunctions(t *testing.T) {
	d, err := resolve("libcuda.so.1", func(name string) uintptr {
		if name == "cuMemcpyBatchAsync" {
			return 0
		}
		return 1
	})
	require.NoError(t, err)
	require.False(t, d.has(cuMemcpyBatchAsync))
	require.True(t, d.has(cuMemcpy2DAsync))
}
