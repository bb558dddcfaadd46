package specs

import "github.com/tierd/tierd/abi"

// RSWA returns the spec of attention that reads the whole prompt, and of the generated
// text a sliding window: the token at q reads every key of the prompt, and those with
// q-k < window. Parameter: window, in tokens.
//
// A token's KV depends on what its query read, so a generated token's KV is not that of
// the same token inside a longer prompt, which read everything. A key names only tokens;
// the rule therefore keeps nothing but chunks that lie wholly inside the prompt.
func RSWA() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "rswa", Version: "1.0.0", Kind: abi.KindSpec,
			Mask: abi.MaskPromptWindow, MaskArgs: []string{"window"},
			Params: []abi.Param{{Name: "window", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"}},
		},
		open: func(p []uint64) abi.SpecRule { return rswa(p[0]) },
	}
}

// An rswa is its window.
type rswa uint64

func (rswa) Reach(r abi.Round, out abi.Bitmap) error {
	s := newShelf(&r, out)
	s.put(chunks{s.lo, r.PromptTokens / r.ChunkTokens})
	return nil
}

// Scan counts from the left: a consumer goes on inside its own prompt, or at its end,
// where everything before is read.
func (rswa) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	return scanPrefix(states, r.Chunks(), demand), nil
}

// Need: the query at n reads the prompt, and what its window reaches of the rest.
func (w rswa) Need(r abi.Round, out abi.Bitmap) error {
	for c := uint64(0); c < uint64(r.Hi) && c*r.ChunkTokens < r.ResumeTokens; c++ {
		last := min((c+1)*r.ChunkTokens, r.ResumeTokens) - 1
		if c*r.ChunkTokens < r.PromptTokens || r.ResumeTokens-last < uint64(w) {
			out.Set(int(c))
		}
	}
	return nil
}
