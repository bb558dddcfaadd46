package specs

import "github.com/tierd/tierd/abi"

// tokensMax bounds a parameter that counts tokens of context: 2^24, the reach of no
// published attention, and small enough that sums of two fit anywhere.
const tokensMax = 1 << 24

// Window returns the spec of sliding-window attention: the token at q reads the keys
// k with q-k < window. Parameters: window, in tokens, and extra, how many tokens
// before the window are kept and fetched as well (an engine that retains more than
// it attends to asks for it).
func Window() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "window", Version: "1.0.0", Kind: abi.KindSpec,
			Mask: abi.MaskWindow, MaskArgs: []string{"window"},
			Params: []abi.Param{
				{Name: "window", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"},
				{Name: "extra", Min: 0, Max: tokensMax, Unit: "tokens"},
			},
		},
		open: func(p []uint64) abi.SpecRule {
			return &window{tailRule{tailer: behind(p[0] - 1 + p[1])}, p[0]}
		},
	}
}

// A behind is a tail of that many tokens: of a window, all but the query's own token,
// which is not stored yet, and the extra ones.
type behind uint64

func (b behind) first(n, _ uint64) uint64 { return n - min(n, uint64(b)) }
func (b behind) even() uint64             { return uint64(b) }

func (b behind) empty(n, _ uint64) uint64 {
	if b == 0 {
		return n
	}
	return 0
}

type window struct {
	tailRule
	size uint64
}

// Need: the query at n reads the key k when n-k < window, so the oldest is
// n-(window-1); later queries read nothing older.
func (w *window) Need(r abi.Round, out abi.Bitmap) error {
	needWindow(&r, w.size, out)
	return nil
}

func needWindow(r *abi.Round, size uint64, out abi.Bitmap) {
	n := r.ResumeTokens
	oldest := uint64(0)
	if n+1 > size {
		oldest = n + 1 - size
	}
	if oldest == n { // the window holds the query's own token only
		return
	}
	for c := oldest / r.ChunkTokens; c < uint64(r.Hi) && c*r.ChunkTokens < n; c++ {
		out.Set(int(c))
	}
}
