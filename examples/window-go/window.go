// Package main is a rule for sliding-window attention, built as a wasm module: how
// small a whole rule can be. The token at q reads the keys k with q-k < window.
package main

import "github.com/tierd/tierd/abi"

// window is the attention's width in tokens.
type window uint64

// tail returns the chunks lo <= c < hi that hold the tokens which the query at n reads.
func (w window) tail(n, chunkTokens uint64) (lo, hi int) {
	return int((n - min(n, uint64(w)-1)) / chunkTokens), int((n + chunkTokens - 1) / chunkTokens)
}

// Reach stores the tail of every point at which somebody may go on.
func (w window) Reach(r abi.Round, out abi.Bitmap) error {
	base, complete := int(r.Lo), int(r.StoredTokens/r.ChunkTokens)
	keep := func(lo, hi int) { // of these chunks, the complete ones that were asked for
		out.SetRange(max(lo, base)-base, min(hi, complete, int(r.Hi))-base)
	}
	keep(w.tail(r.ResumeTokens, r.ChunkTokens))
	if r.JunctionTokens <= r.StoredTokens {
		keep(w.tail(r.JunctionTokens, r.ChunkTokens))
	}
	// Aligned points lie at the ends of chunks, so their tails have one size, in chunks.
	if step := int(r.AlignTokens / r.ChunkTokens); step > 0 {
		size := int((uint64(w) + r.ChunkTokens - 2) / r.ChunkTokens)
		out.SetTails(step-base, complete-base, step, size, r.Chunks())
	}
	return nil
}

// Scan tries one end after the other from the right: the first whose tail is here.
func (w window) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	base := int(r.Lo)
	for end := r.Chunks(); end > 0; {
		lo, hi := w.tail(min(r.BoundTokens, uint64(base+end)*r.ChunkTokens), r.ChunkTokens)
		lo, hi = max(lo-base, 0), max(hi-base, 0)
		miss := states.Last(abi.Absent, lo, hi)
		switch {
		case miss >= lo: // no end whose last chunk is a miss will do: go on left of them
			end = states.Last(abi.Here|abi.Unknown, 0, miss) + 1
		case states.First(abi.Unknown, lo, hi) < hi: // ask for these, then scan again
			states.Mark(abi.Unknown, lo, hi, demand)
			return abi.Span{Deferred: true}, nil
		default:
			demand.SetRange(lo, hi)
			return abi.Span{Usable: uint32(end)}, nil
		}
	}
	return abi.Span{}, nil
}

// Need is the truth that the other two are judged by, so it shares no code with them:
// the query at n reads the keys n-window+1 to n-1.
func (w window) Need(r abi.Round, out abi.Bitmap) error {
	n := r.ResumeTokens
	if n == 0 {
		return nil
	}
	oldest := n + 1 - min(n+1, uint64(w))
	out.SetRange(int(oldest/r.ChunkTokens), min(int((n-1)/r.ChunkTokens)+1, int(r.Hi)))
	return nil
}
