// Package perchunk is a window rule without any of the functions for ranges: it divides once a
// chunk. It shows what the same arithmetic costs natively and in WebAssembly.
package perchunk

import "github.com/tierd/tierd/abi"

// Spec is the rule before its window is chosen.
type Spec struct{}

func (Spec) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "per-chunk", Version: "1", Kind: abi.KindPolicy,
		Params: []abi.Param{{Name: "window", Min: 1, Max: 1 << 20, Required: true, Unit: "tokens"}}}
}

func (Spec) Open(params []uint64) (abi.Rule, error) { return window(params[0]), nil }

type window uint64

// Reach keeps a chunk that holds a token of the tail of the next aligned point.
func (w window) Reach(r abi.Round, out abi.Bitmap) error {
	for c := r.Lo; c < r.Hi; c++ {
		start := uint64(c) * r.ChunkTokens
		next := (start/r.AlignTokens + 1) * r.AlignTokens
		if start+r.ChunkTokens+uint64(w) > next+1 {
			out.Set(int(c - r.Lo))
		}
	}
	return nil
}

func (window) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	return abi.Span{Usable: r.Hi - r.Lo}, nil
}
