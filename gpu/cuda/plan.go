package cuda

import (
	"math"

	"github.com/tierd/tierd/gpu"
)

const (
	// pieceBytesMax is what one warp copies at a time: 8 loads of 16 bytes in each of
	// 32 lanes. Larger pieces would leave warps idle at the end of a batch.
	pieceBytesMax = 4096
	// batchPiecesMax bounds the list of a batch, which lies in pinned memory: 16 bytes
	// a piece, so 256 KiB. A batch of 8 MiB in whole pieces has 2048; only fragments
	// below 512 bytes fill the list first.
	batchPiecesMax = 16384
	// directBytesMax bounds a batch without staging, and so how long a cancelled call
	// still runs: 32 MiB take 0.6 ms.
	directBytesMax = 32 << 20
	// directRunsMax bounds its number of DMAs for the same reason; one costs 1 us.
	directRunsMax = 64
	// batchBytesMin is the least that a call is cut into to overlap its own kernels
	// with its own DMA: 2 MiB cross in 40 us, ten times what a batch costs.
	batchBytesMin = 2 << 20
	// batchesPerCall is into how many batches a call is cut where that leaves them
	// batchBytesMin: its first kernel and the host's last look run beside no DMA.
	batchesPerCall = 4
)

// neverDirect is a crossover above every fragment.
const neverDirect = math.MaxInt64

// A piece is an entry of the list that a kernel reads; see kernel/copy.cu.
type piece struct {
	device uint64 // address in the region
	staged uint32 // offset in the staging buffer
	bytes  uint32
}

// A run is one DMA between a region and the host's side.
type run struct {
	device      uint64
	host, bytes int // on the host's side
}

// A batch is what one staging buffer carries in one go: pieces that a kernel gathers and
// one DMA moves, or, without staging, a few long runs. Its host bytes are contiguous.
type batch struct {
	pieces      []piece
	runs        []run
	host, bytes int
}

// A planner cuts a call into batches. Neighbours in the list that are neighbours in the
// region too are one fragment to it.
type planner struct {
	base     uint64 // address of the region
	frags    []gpu.Fragment
	direct   int64 // fragments of this many bytes or more go without staging
	limit    int   // bytes of a staged batch
	host     int   // bytes planned so far
	at, left int64 // what is left of the fragment at hand: offset in the region, bytes
	long     bool  // the fragment at hand goes without staging
}

// newPlanner plans the move of total bytes through staging buffers of stagingBytes.
func newPlanner(base uint64, frags []gpu.Fragment, total int, direct int64, stagingBytes int) *planner {
	share := (total/batchesPerCall + pieceBytesMax - 1) &^ (pieceBytesMax - 1)
	p := &planner{base: base, frags: frags, direct: direct, limit: min(stagingBytes, max(batchBytesMin, share))}
	p.advance()
	return p
}

// advance takes the next fragment, with its neighbours, if there is one.
func (p *planner) advance() {
	for len(p.frags) > 0 {
		f := p.frags[0]
		switch {
		case f.Length == 0:
		case p.left == 0:
			p.at, p.left = f.Offset, f.Length
		case f.Offset == p.at+p.left:
			p.left += f.Length
		default:
			p.long = p.left >= p.direct
			return
		}
		p.frags = p.frags[1:]
	}
	p.long = p.left >= p.direct
}

// take takes up to n bytes off the fragment at hand.
func (p *planner) take(n int64) (device uint64, host, bytes int) {
	n = min(n, p.left)
	device, host, bytes = p.base+uint64(p.at), p.host, int(n)
	p.at, p.left, p.host = p.at+n, p.left-n, p.host+bytes
	if p.left == 0 {
		p.advance()
	}
	return device, host, bytes
}

// next fills b with the next batch, and reports whether there was one.
func (p *planner) next(b *batch) bool {
	b.pieces, b.runs, b.host, b.bytes = b.pieces[:0], b.runs[:0], p.host, 0
	if p.left == 0 {
		return false
	}
	if p.long {
		for p.left > 0 && p.long && b.bytes < directBytesMax && len(b.runs) < directRunsMax {
			device, host, n := p.take(int64(directBytesMax - b.bytes))
			b.runs = append(b.runs, run{device: device, host: host, bytes: n})
			b.bytes += n
		}
		return true
	}
	for p.left > 0 && !p.long && b.bytes < p.limit && len(b.pieces) < batchPiecesMax {
		device, _, n := p.take(int64(min(pieceBytesMax, p.limit-b.bytes)))
		b.pieces = append(b.pieces, piece{device: device, staged: uint32(b.bytes), bytes: uint32(n)})
		b.bytes += n
	}
	return true
}
