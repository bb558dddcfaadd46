package specs

import "github.com/tierd/tierd/abi"

// Sink returns the spec of sliding-window attention with attention sinks that are kept in
// the cache: the token at q reads the keys k < sink, and those with q-k < window.
// Parameters: sink and window, in tokens.
func Sink() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "sink", Version: "1.0.0", Kind: abi.KindSpec,
			Mask: abi.MaskSinkWindow, MaskArgs: []string{"sink", "window"},
			Params: []abi.Param{
				{Name: "sink", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"},
				{Name: "window", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"},
			},
		},
		open: func(p []uint64) abi.SpecRule {
			return &sink{tailRule{behind(p[1] - 1), p[0]}, p[0], p[1]}
		},
	}
}

type sink struct {
	tailRule
	size, window uint64
}

// Need: the query at n reads what is left of both the sink and its window.
func (s *sink) Need(r abi.Round, out abi.Bitmap) error {
	needWindow(&r, s.window, out)
	for c := uint64(0); c < uint64(r.Hi) && c*r.ChunkTokens < min(s.size, r.ResumeTokens); c++ {
		out.Set(int(c))
	}
	return nil
}
