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
func All() []abi.Spec { return []abi.Spec{Full(), Window()} }

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

// A chunks is a run of chunk numbers lo <= c < hi, clipped to what a Round asks for.
type chunks struct{ lo, hi uint64 }

// storeRange adds the complete chunks of c that r asks for to out.
func storeRange(r *abi.Round, c chunks, out abi.Bitmap) {
	lo := max(c.lo, uint64(r.Lo))
	hi := min(c.hi, r.StoredTokens/r.ChunkTokens, uint64(r.Hi))
	if lo < hi {
		out.SetRange(int(lo-uint64(r.Lo)), int(hi-uint64(r.Lo)))
	}
}
