// Package specs holds the spec rules that ship with tierd, one attention type a
// file. The same source runs natively, where it is the model that tests compare
// with, and inside the embedded WebAssembly module of package specs/module, which
// is what the daemon runs.
//
// A file gives a rule's three functions. Reach and Scan may share code with each
// other; Need is written from the attention's definition and shares none, because it
// is what the other two are judged by.
package specs

import "github.com/tierd/tierd/abi"

// All returns the shipped spec rules in a stable order.
func All() []abi.Spec {
	return []abi.Spec{Full(), Hidden(), Latent(), Window(), Sink(), Chunked(), State(), RSWA()}
}

// spec is a manifest with the function that opens the rule once its parameters have
// been checked.
type spec struct {
	manifest abi.Manifest
	open     func(params []uint64) abi.SpecRule
}

func (s *spec) Manifest() *abi.Manifest { return &s.manifest }

func (s *spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.manifest.CheckParams(params); err != nil {
		return nil, err
	}
	return s.open(params), nil
}

// A chunks is a run of chunk numbers lo <= c < hi.
type chunks struct{ lo, hi uint64 }

// A shelf is the part of a Reach's answer that may be set: the complete chunks that the
// Round asks for.
type shelf struct {
	chunks
	base uint64
	out  abi.Bitmap
}

func newShelf(r *abi.Round, out abi.Bitmap) shelf {
	return shelf{chunks{uint64(r.Lo), min(r.StoredTokens/r.ChunkTokens, uint64(r.Hi))}, uint64(r.Lo), out}
}

// put sets those of the chunks c that are on the shelf.
func (s *shelf) put(c chunks) {
	lo, hi := max(c.lo, s.lo), min(c.hi, s.hi)
	if lo < hi {
		s.out.SetRange(int(lo-s.base), int(hi-s.base))
	}
}

// putTails sets the size chunks before each aligned point up to the stored length, those
// of them that are on the shelf. A point is a multiple of the chunk.
func (s *shelf) putTails(r *abi.Round, size uint64) {
	if step := int(r.AlignTokens / r.ChunkTokens); step > 0 {
		base, end := int(s.base), int(s.hi)
		s.out.SetTails(step-base, int(r.StoredTokens/r.ChunkTokens)-base, step, int(size), end-base)
	}
}
