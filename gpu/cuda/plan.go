package cuda

import (
	"math"
	"slices"

	"github.com/tierd/tierd/gpu"
)

const (
	// pieceBytesMax is what one warp copies at a time: 8 loads of 16 bytes in each of
	// 32 lanes. Larger pieces would leave warps idle at the end of a batch.
	pieceBytesMax = 4096
	// batchPiecesMax bounds the list of a batch, which lies in pinned memory: 16 bytes
	// a piece, so 256 KiB. A batch of 4 MiB in whole pieces has 1024; only fragments
	// below 256 bytes fill the list first.
	batchPiecesMax = 16384
	// directBytesMax bounds a batch without staging, and so how long a cancelled call
	// still runs: 32 MiB take 0.6 ms.
	directBytesMax = 32 << 20
	// directRunsMax bounds its number of DMAs for the same reason; one costs 1 us.
	directRunsMax = 64
	// batchedRunsMax bounds it where the driver takes them all as one command, at 0.4 us a
	// fragment: the first DMAs of a call then run beside the submission of the others.
	batchedRunsMax = 512
	// batchedLoadMin is from which length on loads go that way. The driver (580) does not
	// give shorter ones to the copy engine but writes them itself, at 13 GB/s, 6 core-seconds
	// for 20 GB and a half of the speed of an engine's kernels.
	batchedLoadMin = 32 << 10
	// stridedRowsMin tells a grid from a list in which a few fragments happen to lie at
	// equal distances, and stridedBytesMin is the least that a strided DMA is worth its
	// command: 2.3 us lie between two DMAs, a fifth of 512 KiB on PCIe 5. Between two loads
	// lie 4 us, so that rows which can go many to a command do, up to stridedLoadMin: a
	// daemon's loads were a sixth faster, and its stores no faster.
	stridedRowsMin  = 8
	stridedBytesMin = 512 << 10
	stridedLoadMin  = 2 << 20
	// pitchBytesMax is the largest distance of rows that the driver takes.
	pitchBytesMax = 1<<31 - 1
	// batchBytesMin is the least that a call is cut into to overlap its own kernels
	// with its own DMA: 2 MiB cross in 40 us, ten times what a batch costs.
	batchBytesMin = 2 << 20
)

// never is a length above that of every fragment.
const never = math.MaxInt64

// A piece is an entry of the list that a kernel reads; see kernel/copy.cu.
type piece struct {
	device uint64 // address in the region
	staged uint32 // offset in the staging buffer
	bytes  uint32
}

// A run is one DMA between a region and the host's side: rows of bytes each, one behind
// the other on the host, pitch apart in the region. Most runs have one row.
type run struct {
	device uint64
	pitch  uint64
	host   int // on the host's side
	bytes  int
	rows   int
}

// A batch is what one staging buffer carries in one go: pieces that a kernel gathers and
// one DMA moves, or, without staging, a few runs. Its host bytes are contiguous.
type batch struct {
	pieces      []piece
	runs        []run
	host, bytes int
}

// A list is what a call moves: the fragments of a region at base, in which parts begin at
// the seams. apart is CheckFragments' word for it.
type list struct {
	base  uint64
	frags []gpu.Fragment
	seams []int64
	apart bool
}

// orders say what goes without staging.
type orders struct {
	// runsMax bounds a batch.
	runsMax int
	// stridedMin is the least bytes of a strided DMA whose rows could go by themselves.
	stridedMin int64
}

// A planner cuts a call into batches.
type planner struct {
	list
	dir Direction
	// limit is how many bytes the staged batch has that begins at this byte of the call.
	limit func(host int) int
	orders
	host int // bytes planned so far

	used int64 // bytes of frags[0] that are planned
	// rows is how many fragments from frags[0] on are one strided run; 1 for a long
	// fragment, and 0 for one that goes by staging.
	rows int
	// known is how many fragments behind frags[0] were looked at and begin no run.
	known int
}

// newPlanner plans the move of a list. No piece or run crosses a seam.
func newPlanner(what list, dir Direction, limit func(host int) int, o orders) *planner {
	p := &planner{list: what, dir: dir, limit: limit, orders: o}
	if !p.apart {
		p.frags = merge(p.frags, p.seams)
	}
	p.classify()
	return p
}

// ramp is the limit for a call of total bytes that finds its lane idle. Its first kernel of
// a store and the last of a load run beside no DMA, so these batches are small; those
// behind and in front of them grow to what a buffer holds. A call that finds others there
// has DMAs beside its kernels anyhow, and fills its buffers.
func ramp(total, stagingBytes int, scatter bool) func(host int) int {
	return func(host int) int {
		share := host
		if scatter {
			share = (total - host) / 2
		}
		share = (share + pieceBytesMax - 1) &^ (pieceBytesMax - 1)
		return min(stagingBytes, max(batchBytesMin, share))
	}
}

// full is the limit of a call that fills its buffers.
func full(stagingBytes int) func(host int) int { return func(int) int { return stagingBytes } }

// merge leaves out empty fragments and makes one of neighbours in the list that are
// neighbours in the region too, with no seam between them. It copies only when there is
// something to do.
func merge(frags []gpu.Fragment, seams []int64) []gpu.Fragment {
	seam := func(at int64) bool {
		_, found := slices.BinarySearch(seams, at)
		return found
	}
	end := int64(-1)
	for i, f := range frags {
		if f.Length != 0 && f.Offset != end || f.Length != 0 && seam(end) {
			end = f.Offset + f.Length
			continue
		}
		out := append(make([]gpu.Fragment, 0, len(frags)), frags[:i]...)
		for _, f := range frags[i:] {
			switch {
			case f.Length == 0:
			case f.Offset == end && !seam(end):
				out[len(out)-1].Length += f.Length
				end += f.Length
			default:
				out = append(out, f)
				end = f.Offset + f.Length
			}
		}
		return out
	}
	return frags
}

// classify says how the fragment at hand goes.
func (p *planner) classify() {
	p.rows = 0
	if len(p.frags) == 0 {
		return
	}
	if p.known > 0 {
		p.known--
	} else if n := p.strided(); n > 0 {
		p.rows = n
		return
	}
	if p.frags[0].Length >= p.dir.DirectBytes {
		p.rows = 1
	}
}

// strided returns how many fragments from the one at hand on have equal lengths and
// distances, when one DMA for them is worth it.
func (p *planner) strided() int {
	first := p.frags[0]
	if first.Length < p.dir.StridedBytes || len(p.frags) < 2 {
		return 0
	}
	pitch := p.frags[1].Offset - first.Offset
	if pitch < first.Length || pitch > pitchBytesMax {
		return 0
	}
	end := int64(never)
	if i, _ := slices.BinarySearch(p.seams, first.Offset+1); i < len(p.seams) {
		end = p.seams[i]
	}
	n := 1
	for n < len(p.frags) && p.frags[n].Length == first.Length && p.frags[n].Offset-p.frags[n-1].Offset == pitch && p.frags[n].Offset < end {
		n++
	}
	least := int64(stridedBytesMin)
	if first.Length >= p.dir.DirectBytes {
		least = p.stridedMin
	}
	if n >= stridedRowsMin && int64(n) >= (least+first.Length-1)/first.Length {
		return n
	}
	// The last of them may be the first of others.
	p.known = max(0, n-2)
	return 0
}

// done says that everything is planned.
func (p *planner) done() bool { return len(p.frags) == 0 }

// take takes n bytes of the fragment at hand.
func (p *planner) take(n int64) {
	p.used += n
	p.host += int(n)
	if p.used == p.frags[0].Length {
		p.frags, p.used = p.frags[1:], 0
		p.classify()
	}
}

// next fills b with the next batch, and reports whether there was one.
func (p *planner) next(b *batch) bool {
	b.pieces, b.runs, b.host = b.pieces[:0], b.runs[:0], p.host
	if p.done() {
		return false
	}
	if p.rows > 0 {
		for p.rows > 0 && p.host-b.host < directBytesMax && len(b.runs) < p.runsMax {
			b.runs = append(b.runs, p.run(directBytesMax-(p.host-b.host)))
		}
	} else {
		limit := p.limit(p.host)
		for !p.done() && p.rows == 0 && p.host-b.host < limit && len(b.pieces) < batchPiecesMax {
			f, staged := p.frags[0], p.host-b.host
			n := min(f.Length-p.used, pieceBytesMax, int64(limit-staged))
			b.pieces = append(b.pieces, piece{device: p.base + uint64(f.Offset+p.used), staged: uint32(staged), bytes: uint32(n)})
			p.take(n)
		}
	}
	b.bytes = p.host - b.host
	return true
}

// run takes the next run, of at most room bytes where that leaves it a row.
func (p *planner) run(room int) run {
	f := p.frags[0]
	r := run{device: p.base + uint64(f.Offset+p.used), host: p.host, rows: 1}
	if p.rows == 1 {
		n := min(f.Length-p.used, int64(room))
		r.bytes = int(n)
		p.take(n)
		return r
	}
	r.pitch, r.bytes = uint64(p.frags[1].Offset-f.Offset), int(f.Length)
	r.rows = min(p.rows, max(1, room/r.bytes))
	p.host += r.rows * r.bytes
	p.frags = p.frags[r.rows:]
	if p.rows -= r.rows; p.rows == 0 {
		p.classify()
	}
	return r
}
