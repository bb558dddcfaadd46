package specs

import "github.com/tierd/tierd/abi"

// Window returns the spec of sliding-window attention: the token at q reads the keys
// k with q-k < window. Parameters: window, in tokens, and extra, how many tokens
// before the window are kept and fetched as well (an engine that retains more than
// it attends to asks for it).
//
// It keeps the tails that end at the points where somebody may resume, and nothing
// between them.
func Window() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "window", Version: "1.0.0", Kind: abi.KindSpec,
			Mask: abi.MaskWindow, MaskArgs: []string{"window"},
			Params: []abi.Param{
				{Name: "window", Min: 1, Max: 1 << 24, Required: true, Unit: "tokens"},
				{Name: "extra", Min: 0, Max: 1 << 24, Unit: "tokens"},
			},
		},
		open: func(p []uint64) abi.SpecRule { return &window{size: p[0], extra: p[1]} },
	}
}

type window struct{ size, extra uint64 }

// behind is how many tokens before a resume point are kept and fetched: the window
// of the token at the point, less that token itself, and the extra ones.
func (w *window) behind() uint64 { return w.size - 1 + w.extra }

// tail returns the chunks that hold the tokens [n-behind, n).
func (w *window) tail(n, chunkTokens uint64) chunks {
	first := n - min(n, w.behind())
	if first == n {
		return chunks{}
	}
	return chunks{first / chunkTokens, (n-1)/chunkTokens + 1}
}

// Reach keeps the tail of the resume point, of the junction and of every aligned
// point up to the stored length.
func (w *window) Reach(r abi.Round, out abi.Bitmap) error {
	s := newShelf(&r, out)
	s.put(w.tail(r.ResumeTokens, r.ChunkTokens))
	if n := r.JunctionTokens; 0 < n && n <= r.StoredTokens {
		s.put(w.tail(r.JunctionTokens, r.ChunkTokens))
	}
	s.putTails(&r, (w.behind()+r.ChunkTokens-1)/r.ChunkTokens)
	return nil
}

// Scan tries the ends from the right: the first one whose tail is here is the answer.
// A chunk that is a Miss rules out every end whose tail holds it, and tails only
// move left with their ends, so the next end to try is that chunk's left edge.
func (w *window) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	base := uint64(r.Lo)
	for end := r.Chunks(); end > 0; {
		n := min(r.BoundTokens, (base+uint64(end))*r.ChunkTokens)
		t := w.tail(n, r.ChunkTokens)
		lo, hi := int(max(t.lo, base)-base), int(max(t.hi, base)-base)
		if miss := states.Last(abi.Absent, lo, hi); miss >= lo {
			end = miss
			if miss == hi-1 && w.behind() > 0 { // skip a whole run of misses at once
				end = states.Last(abi.Here|abi.Unknown, 0, miss) + 1
			}
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

// Need: the query at n reads the key k when n-k < window, so the oldest is
// n-(window-1); later queries read nothing older.
func (w *window) Need(r abi.Round, out abi.Bitmap) error {
	n := r.ResumeTokens
	oldest := uint64(0)
	if n+1 > w.size {
		oldest = n + 1 - w.size
	}
	if oldest == n { // the window holds the query's own token only
		return nil
	}
	for c := oldest / r.ChunkTokens; c < uint64(r.Hi) && c*r.ChunkTokens < n; c++ {
		out.Set(int(c))
	}
	return nil
}
