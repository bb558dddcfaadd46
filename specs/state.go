package specs

import "github.com/tierd/tierd/abi"

// State returns the spec of a recurrent state (Mamba, linear attention): a query reads
// nothing but the state after the token before it. A chunk stands for the state at its
// end, so a sequence goes on only from a chunk end whose state was saved. Parameter:
// mode, where the engine saves states:
//
//	all    at every chunk end
//	align  only where it is told to stop: at the resume point, the junction and the
//	       aligned points
func State() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "state", Version: "1.0.0", Kind: abi.KindSpec, Mask: abi.MaskState,
			Params: []abi.Param{{Name: "mode", Min: 0, Max: 1, Enum: []string{"all", "align"}}},
		},
		open: func(p []uint64) abi.SpecRule { return state{everywhere: p[0] == 0} },
	}
}

type state struct{ everywhere bool }

// Reach keeps the states at the points where somebody may resume, or all.
func (t state) Reach(r abi.Round, out abi.Bitmap) error {
	s := newShelf(&r, out)
	if t.everywhere {
		s.put(s.chunks)
		return nil
	}
	s.put(stateAt(r.ResumeTokens, r.ChunkTokens))
	if r.JunctionTokens <= r.StoredTokens {
		s.put(stateAt(r.JunctionTokens, r.ChunkTokens))
	}
	s.putTails(&r, 1)
	return nil
}

// stateAt returns the chunk whose state is that at token n; none inside a chunk.
func stateAt(n, chunkTokens uint64) chunks {
	if n == 0 || n%chunkTokens != 0 {
		return chunks{}
	}
	return chunks{n/chunkTokens - 1, n / chunkTokens}
}

// Scan takes the last state that is here. The end of the range is no chunk end when it is
// bounded inside one, and then there is no state.
func (state) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	end := r.Chunks()
	if end > 0 && uint64(r.Hi)*r.ChunkTokens > r.BoundTokens {
		end--
	}
	at := states.Last(abi.Here|abi.Unknown, 0, end)
	if at < 0 {
		return abi.Span{}, nil
	}
	demand.Set(at)
	if states.At(at) == abi.Retry {
		return abi.Span{Deferred: true}, nil
	}
	return abi.Span{Usable: uint32(at + 1)}, nil
}

// Need: the query at n reads the state after token n-1, and only a chunk end has one.
func (state) Need(r abi.Round, out abi.Bitmap) error {
	switch n := r.ResumeTokens; {
	case n == 0:
	case n%r.ChunkTokens != 0:
		return abi.ErrNoResume
	default:
		if c := n/r.ChunkTokens - 1; c < uint64(r.Hi) {
			out.Set(int(c))
		}
	}
	return nil
}
