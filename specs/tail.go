package specs

import "github.com/tierd/tierd/abi"

// A tailRule is an attention that, going on from token n, reads no tokens but [first(n), n)
// and those below head. It keeps and fetches the chunks that hold them: the tails that
// end at the points where somebody may resume, and nothing between them.
type tailRule struct {
	tailer
	// head is how many tokens at the start every query reads.
	head uint64
}

// A tailer says where tails begin.
type tailer interface {
	// first returns the first token of the tail that ends at n. It never falls when n
	// rises.
	first(n, chunkTokens uint64) uint64
	// empty returns the last chunk end at or before n, a chunk end, whose tail holds no
	// token; 0 always does.
	empty(n, chunkTokens uint64) uint64
	// even is how many tokens each tail has that begins behind token 0; 0 when tails
	// differ.
	even() uint64
}

// tail returns the chunks that hold the tokens [first(n), n).
func (t *tailRule) tail(n, chunkTokens uint64) chunks {
	first := t.first(n, chunkTokens)
	if first == n {
		return chunks{}
	}
	return chunks{first / chunkTokens, (n-1)/chunkTokens + 1}
}

// headOf returns the chunks that hold the head of a sequence of n tokens.
func (t *tailRule) headOf(n, chunkTokens uint64) chunks {
	return chunks{0, (min(t.head, n) + chunkTokens - 1) / chunkTokens}
}

// Reach keeps the tail of the resume point, of the junction and of every aligned point
// up to the stored length, and the head of the last of them.
func (t *tailRule) Reach(r abi.Round, out abi.Bitmap) error {
	s := newShelf(&r, out)
	last := r.ResumeTokens
	s.put(t.tail(last, r.ChunkTokens))
	if n := r.JunctionTokens; 0 < n && n <= r.StoredTokens {
		s.put(t.tail(n, r.ChunkTokens))
		last = max(last, n)
	}
	if r.AlignTokens > 0 {
		t.putAligned(&s, &r)
		last = max(last, r.StoredTokens/r.AlignTokens*r.AlignTokens)
	}
	if t.head > 0 {
		s.put(t.headOf(last, r.ChunkTokens))
	}
	return nil
}

// putAligned keeps the tails of the aligned points.
func (t *tailRule) putAligned(s *shelf, r *abi.Round) {
	if even := t.even(); even > 0 {
		s.putTails(r, (even+r.ChunkTokens-1)/r.ChunkTokens)
		return
	}
	// The first point that matters is the first whose tail can reach into the range.
	n := max(1, s.lo*r.ChunkTokens/r.AlignTokens) * r.AlignTokens
	for ; n <= r.StoredTokens; n += r.AlignTokens {
		c := t.tail(n, r.ChunkTokens)
		if c.lo >= s.hi {
			return
		}
		s.put(c)
	}
}

// Scan tries the ends from the right: the first one whose head and tail are here is the
// answer. A Miss in the head rules out every end behind it. A Miss in a tail rules out
// every end whose tail holds it, and tails only move left with their ends, so the next
// end to try is that chunk's left edge.
func (t *tailRule) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	base := uint64(r.Lo)
	head, end := 0, r.Chunks()
	if t.head > 0 {
		head = min(end, int(max(t.headOf(r.BoundTokens, r.ChunkTokens).hi, base)-base))
		if miss := states.First(abi.Absent, 0, head); miss < head {
			end = miss
		}
	}
	for end > 0 {
		c := t.tail(min(r.BoundTokens, (base+uint64(end))*r.ChunkTokens), r.ChunkTokens)
		lo, hi := int(max(c.lo, base)-base), int(max(c.hi, base)-base)
		if miss := states.Last(abi.Absent, lo, hi); miss >= lo {
			end = miss
			if miss == hi-1 { // skip a whole run of misses at once
				here := states.Last(abi.Here|abi.Unknown, 0, miss) + 1
				none := t.empty((base+uint64(miss))*r.ChunkTokens, r.ChunkTokens) / r.ChunkTokens
				end = max(here, int(max(none, base)-base))
			}
			continue
		}
		head = min(head, end)
		if states.First(abi.Unknown, lo, hi) < hi || states.First(abi.Unknown, 0, head) < head {
			states.Mark(abi.Unknown, 0, head, demand)
			states.Mark(abi.Unknown, lo, hi, demand)
			return abi.Span{Deferred: true}, nil
		}
		demand.SetRange(0, head)
		demand.SetRange(lo, hi)
		return abi.Span{Usable: uint32(end)}, nil
	}
	return abi.Span{}, nil
}
