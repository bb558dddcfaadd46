// Package main is a rule with a mistake, for the demo: sliding-window attention whose
// producer keeps a tail that is one chunk too short. Each of its two halves looks
// reasonable alone, and a daemon that trusted them would let consumers wait for a chunk
// that never comes. `tierd check` refuses it and draws the chunk.
//
// It is the rule in ../window-go, written out more plainly, with the mistake in Reach.
package main

import (
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/guest"
)

// window is the attention's width in tokens.
type window uint64

// tail returns the chunks lo <= c < hi that hold the tokens which the query at n reads.
func (w window) tail(n, chunkTokens uint64) (lo, hi uint64) {
	if w < 2 { // the query's own token only
		return n / chunkTokens, n / chunkTokens
	}
	return (n - min(n, uint64(w)-1)) / chunkTokens, (n + chunkTokens - 1) / chunkTokens
}

// Reach stores the tail of every point at which somebody may go on.
func (w window) Reach(r abi.Round, out abi.Bitmap) error {
	short := w - window(min(uint64(w), r.ChunkTokens)) // the mistake: one chunk less than the window
	keep := func(n uint64) {
		lo, hi := short.tail(n, r.ChunkTokens)
		hi = min(hi, r.StoredTokens/r.ChunkTokens, uint64(r.Hi))
		if lo = max(lo, uint64(r.Lo)); lo < hi && n <= r.StoredTokens {
			out.SetRange(int(lo)-int(r.Lo), int(hi)-int(r.Lo))
		}
	}
	keep(r.ResumeTokens)
	keep(r.JunctionTokens)
	for n := r.AlignTokens; n > 0 && n <= r.StoredTokens; n += r.AlignTokens {
		keep(n)
	}
	return nil
}

// Scan tries one end after the other from the right: the first whose tail is here.
func (w window) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	for end := r.Chunks(); end > 0; end-- {
		n := min(r.BoundTokens, (uint64(r.Lo)+uint64(end))*r.ChunkTokens)
		first, last := w.tail(n, r.ChunkTokens)
		lo, hi := int(max(first, uint64(r.Lo)))-int(r.Lo), int(last)-int(r.Lo)
		if states.First(abi.Absent, lo, hi) < hi {
			continue
		}
		if states.First(abi.Unknown, lo, hi) < hi {
			states.Mark(abi.Unknown, lo, hi, demand)
			return abi.Span{Deferred: true}, nil
		}
		demand.SetRange(lo, hi)
		return abi.Span{Usable: uint32(end)}, nil
	}
	return abi.Span{}, nil
}

// Need is the truth that the other two are judged by, so it shares no code with them.
func (w window) Need(r abi.Round, out abi.Bitmap) error {
	for c := uint64(0); c < uint64(r.Hi) && c*r.ChunkTokens < r.ResumeTokens; c++ {
		if lastToken := min((c+1)*r.ChunkTokens, r.ResumeTokens) - 1; r.ResumeTokens-lastToken < uint64(w) {
			out.Set(int(c))
		}
	}
	return nil
}

// spec is the rule before its window is chosen.
type spec struct{}

func (spec) Manifest() *abi.Manifest {
	return &abi.Manifest{
		Name: "short-tail", Version: "1.0.0", Kind: abi.KindSpec,
		Mask: abi.MaskWindow, MaskArgs: []string{"window"},
		Params: []abi.Param{{Name: "window", Min: 2, Max: 1 << 20, Required: true, Unit: "tokens"}},
	}
}

func (s spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.Manifest().CheckParams(params); err != nil {
		return nil, err
	}
	return window(params[0]), nil
}

func init() { guest.Export(spec{}) }

func main() {}
