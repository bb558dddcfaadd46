package replay

import (
	"fmt"

	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry/deploy"
)

// stepTokens is the most tokens that an engine computes in one step: the usual limit
// of chunked prefill.
const stepTokens = 2048

// A sequence is one request in an engine: which block of the region each logical block
// of each group lives in.
type sequence struct {
	s *side
	p *prompt
	// tables[g][b] is the region's block of logical block b, or noBlock.
	tables [][]int32
	// native[g] is how many logical blocks came from the native cache; they are
	// shared with others and never written.
	native []uint64
	// told[g][b]: the daemon knows where logical block b lives.
	told [][]bool
}

func newSequence(s *side, p *prompt) *sequence {
	q := &sequence{s: s, p: p, native: make([]uint64, len(s.groups))}
	for i := range s.groups {
		n := (p.tokens() + s.groups[i].blockTokens - 1) / s.groups[i].blockTokens
		t := make([]int32, n)
		for b := range t {
			t[b] = noBlock
		}
		q.tables = append(q.tables, t)
		q.told = append(q.told, make([]bool, n))
	}
	return q
}

// adopt takes the longest prefix that the engine's blocks still hold, at most limit
// tokens, and returns its length. At least one token is left to compute.
func (q *sequence) adopt(limit uint64) uint64 {
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	n := q.longest(min(limit, q.p.tokens()-1))
	for i := range q.s.groups {
		g, pool := &q.s.groups[i], q.s.pools[i]
		first, end := g.needs(n)
		for b := first; b < end; b++ {
			id, _ := pool.find(q.blockHash(g, b))
			pool.share(id)
			q.tables[i][b] = int32(id)
		}
		q.native[i] = end
	}
	return n
}

// longest returns the largest n <= limit, a whole number of blocks in every group, at
// which all groups still have what attention needs to go on.
func (q *sequence) longest(limit uint64) uint64 {
	step := uint64(1)
	for i := range q.s.groups {
		step = deploy.LCM(step, q.s.groups[i].blockTokens)
	}
	n := limit / step * step
next:
	for n > 0 {
		for i := range q.s.groups {
			g := &q.s.groups[i]
			first, end := g.needs(n)
			for b := first; b < end; b++ {
				if _, ok := q.s.pools[i].find(q.blockHash(g, b)); !ok {
					// Every longer prefix up to n needs this block too.
					n = b * g.blockTokens / step * step
					continue next
				}
			}
		}
		return n
	}
	return 0
}

// blockHash names what logical block b holds once it is complete, or as far as the
// prompt goes.
func (q *sequence) blockHash(g *group, b uint64) hash {
	return q.p.at(min((b+1)*g.blockTokens, q.p.tokens()))
}

// compute is one step of the model: the tokens [from, to) get their KV, in new blocks
// where there are none yet. Blocks that are complete become findable.
func (q *sequence) compute(from, to uint64) error {
	for i := range q.s.groups {
		g := &q.s.groups[i]
		first, end := from/g.blockTokens, (to+g.blockTokens-1)/g.blockTokens
		if err := q.room(i, first, end); err != nil {
			return err
		}
		for b := first; b < end; b++ {
			q.write(g, b, from, to)
		}
		q.publish(i, first, to/g.blockTokens)
	}
	return nil
}

// room gives the logical blocks [first, end) of a group a place where they have none.
func (q *sequence) room(i int, first, end uint64) error {
	t := q.tables[i]
	missing := 0
	for b := first; b < end; b++ {
		if t[b] == noBlock {
			missing++
		}
	}
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	ids, err := q.s.pools[i].take(missing)
	if err != nil {
		return fmt.Errorf("%s: group %s: %w", q.s.daemon.side, q.s.groups[i].name, err)
	}
	for b := first; b < end; b++ {
		if t[b] == noBlock {
			t[b], ids = int32(ids[0]), ids[1:]
		}
	}
	return nil
}

// rows calls f for each row of the tokens [from, to) that logical block b holds.
func (q *sequence) rows(g *group, b, from, to uint64, f func(row []byte, seed uint64)) {
	start := b * g.blockTokens
	lo, hi := max(from, start)-start, min(to, start+g.blockTokens)-start
	mem := q.s.client.Region(g.name).Block(uint32(q.tables[g.index][b]))
	h := q.blockHash(g, b)
	for base := uint64(0); base < g.rows; base += g.blockTokens {
		for row := base + lo; row < base+hi; row++ {
			f(mem[row*g.rowBytes:(row+1)*g.rowBytes:(row+1)*g.rowBytes], rowSeed(&h, g.index, row))
		}
	}
}

func (q *sequence) write(g *group, b, from, to uint64) { q.rows(g, b, from, to, fillRow) }

// publish makes the logical blocks [first, end), all complete, findable.
func (q *sequence) publish(i int, first, end uint64) {
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	for b := first; b < end; b++ {
		q.s.pools[i].publish(uint32(q.tables[i][b]), q.blockHash(&q.s.groups[i], b))
	}
}

// wrong compares everything that attention reads to go on from token n with what it
// must be, and returns how many bytes differ. A block that is not there at all differs
// in every byte, unless nobody knows whether attention reads it. Blocks that are right
// become findable.
func (q *sequence) wrong(n uint64) (wrong uint64) {
	for i := range q.s.groups {
		g := &q.s.groups[i]
		first, end := g.needs(n)
		for b := first; b < end; b++ {
			if q.tables[i][b] == noBlock {
				if !g.foreign {
					wrong += g.rows * g.rowBytes
				}
				continue
			}
			bad := 0
			q.rows(g, b, 0, n, func(row []byte, seed uint64) { bad += wrongInRow(row, seed) })
			wrong += uint64(bad)
			if bad == 0 && (b+1)*g.blockTokens <= n {
				q.publish(i, b, b+1)
			}
		}
	}
	return wrong
}

// slide frees the blocks that attention no longer reads from token n on.
func (q *sequence) slide(n uint64) {
	for i := range q.s.groups {
		first, _ := q.s.groups[i].needs(n)
		q.free(i, 0, first)
	}
}

// close frees all blocks.
func (q *sequence) close() {
	for i := range q.s.groups {
		q.free(i, 0, uint64(len(q.tables[i])))
	}
}

func (q *sequence) free(i int, first, end uint64) {
	var ids []uint32
	for b := first; b < end; b++ {
		if id := q.tables[i][b]; id != noBlock {
			ids = append(ids, uint32(id))
			q.tables[i][b] = noBlock
		}
	}
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	q.s.pools[i].release(ids...)
}

// untold returns where the blocks live that the daemon has not been told of yet.
func (q *sequence) untold() (runs []*enginepb.BlockRun) {
	for i := range q.s.groups {
		var run *enginepb.BlockRun
		for b, id := range q.tables[i] {
			if id == noBlock || q.told[i][b] {
				run = nil
				continue
			}
			if run == nil {
				run = &enginepb.BlockRun{Group: q.s.groups[i].name, FirstBlock: uint32(b)}
				runs = append(runs, run)
			}
			run.Ids = append(run.Ids, uint32(id))
			q.told[i][b] = true
		}
	}
	return runs
}

// covered reports whether the first n tokens leave nothing to plan: they reach the end
// of the last whole chunk that a plan can resume at. none: the prompt has no such chunk.
func (q *sequence) covered(n uint64) (covered, none bool) {
	stored := q.p.tokens()
	if most := q.s.daemon.deployment.MaxStoreTokens; most > 0 {
		stored = min(stored, most)
	}
	last := q.p.tokens() - 1
	for i := range q.s.groups { // a point needs whole chunks in every group
		last = min(last, stored/q.s.groups[i].chunkTokens()*q.s.groups[i].chunkTokens())
	}
	return last > 0 && n >= last, last == 0
}
