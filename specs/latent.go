package specs

import "github.com/tierd/tierd/abi"

// Latent returns the spec of attention over compressed latents: every token reads all
// earlier ones, of which compress_ratio tokens share one latent. A latent that is not
// full is not stored, so a sequence goes on only from a multiple of compress_ratio.
// Parameter: compress_ratio, in tokens; 1 is multi-head latent attention.
func Latent() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "latent", Version: "1.0.0", Kind: abi.KindSpec,
			Mask: abi.MaskLatent, MaskArgs: []string{"compress_ratio"},
			Params: []abi.Param{
				{Name: "compress_ratio", Min: 1, Max: 1 << 16, Default: 1, Unit: "tokens"},
			},
		},
		open: func(p []uint64) abi.SpecRule { return latent(p[0]) },
	}
}

// A latent is its ratio.
type latent uint64

// Reach keeps every complete chunk.
func (latent) Reach(r abi.Round, out abi.Bitmap) error { return full{}.Reach(r, out) }

// Scan resumes after the longest unbroken prefix that ends with a full latent. What is
// behind that end does not matter, so only what is before it must be known.
func (l latent) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	end := states.First(abi.Absent, 0, r.Chunks())
	for end > 0 && min(r.BoundTokens, (uint64(r.Lo)+uint64(end))*r.ChunkTokens)%uint64(l) != 0 {
		end--
	}
	return scanPrefix(states, end, demand), nil
}

// Need: the query at n reads every latent before n, and there is none for a part.
func (l latent) Need(r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens%uint64(l) != 0 {
		return abi.ErrNoResume
	}
	for c := uint64(0); c < uint64(r.Hi) && c*r.ChunkTokens < r.ResumeTokens; c++ {
		out.Set(int(c))
	}
	return nil
}
