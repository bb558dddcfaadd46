package specs

import "github.com/tierd/tierd/abi"

// Chunked returns the spec of chunked local attention: the token at q reads the keys
// k <= q of the same run of attention_chunk tokens. Parameter: attention_chunk, in
// tokens.
//
// Going on from a multiple of attention_chunk reads nothing that was stored. Inside a KV
// chunk the rule makes no use of that: only a consumer whose bound is that very token could
// find such a point, and what is kept for a point must be of use to those that come with a
// longer prompt, who look at chunk ends.
func Chunked() abi.Spec {
	return &spec{
		manifest: abi.Manifest{
			Name: "chunked", Version: "1.0.0", Kind: abi.KindSpec,
			Mask: abi.MaskChunk, MaskArgs: []string{"attention_chunk"},
			Params: []abi.Param{
				{Name: "attention_chunk", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"},
			},
		},
		open: func(p []uint64) abi.SpecRule { return &chunked{tailRule{tailer: run(p[0])}, p[0]} },
	}
}

// A run is a tail that begins at the last multiple of it; inside a KV chunk, at the last
// multiple below its end.
type run uint64

func (c run) first(n, chunkTokens uint64) uint64 {
	if n%chunkTokens != 0 {
		n--
	}
	return n / uint64(c) * uint64(c)
}

func (c run) even() uint64 { return 0 }

// empty: the tail of a multiple of c holds nothing, and a chunk end is a multiple of the
// chunk.
func (c run) empty(n, chunkTokens uint64) uint64 {
	both := uint64(c) / gcd(uint64(c), chunkTokens) * chunkTokens
	return n / both * both
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

type chunked struct {
	tailRule
	size uint64
}

// Need: the query at n reads the key k when both lie in the same run.
func (c *chunked) Need(r abi.Round, out abi.Bitmap) error {
	n := r.ResumeTokens
	for i := range uint64(r.Hi) {
		lo, hi := i*r.ChunkTokens, min((i+1)*r.ChunkTokens, n)
		if lo < hi && (hi-1)/c.size == n/c.size { // its last token before n
			out.Set(int(i))
		}
	}
	return nil
}
