// Package policy holds the policy rules that ship with tierd. A policy speaks for all
// groups: its Reach is what may enter the store path, its Scan how far may be
// fetched. What a consumer may count on is its Reach on a producer whose tier holds
// nothing yet.
package policy

import "github.com/tierd/tierd/abi"

// All returns the shipped policies in a stable order.
func All() []abi.Spec {
	return []abi.Spec{RequestLevel(), ChunkLevel(), PromptOnly(), Cap(), MinReuse(), MinPull()}
}

// RequestLevel offers every chunk of every request, whether its tier holds it already
// or not, so that a producer with a warm cache supplies as much as a cold one.
func RequestLevel() abi.Spec { return plain("request-level", requestLevel{}) }

// ChunkLevel offers only chunks that the tier does not hold yet. It saves work on a
// node that only caches for itself; for a producer of prefill/decode it is refused,
// because the warmer its cache is the less it supplies.
func ChunkLevel() abi.Spec { return plain("chunk-level", chunkLevel{}) }

type spec struct {
	manifest abi.Manifest
	open     func(params []uint64) abi.Rule
}

func plain(name string, rule abi.Rule) abi.Spec {
	m := abi.Manifest{Name: name, Version: "1.0.0", Kind: abi.KindPolicy}
	return &spec{m, func([]uint64) abi.Rule { return rule }}
}

func (s *spec) Manifest() *abi.Manifest { return &s.manifest }

func (s *spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.manifest.CheckParams(params); err != nil {
		return nil, err
	}
	return s.open(params), nil
}

// fetchAll is the Scan of a policy that limits no fetch.
type fetchAll struct{}

func (fetchAll) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	return abi.Span{Usable: r.Hi - r.Lo}, nil
}

type requestLevel struct{ fetchAll }

func (requestLevel) Reach(r abi.Round, out abi.Bitmap) error {
	out.SetRange(0, r.Chunks())
	return nil
}

type chunkLevel struct{ fetchAll }

func (chunkLevel) Reach(r abi.Round, out abi.Bitmap) error {
	held := r.ResidentTokens / r.ChunkTokens
	if held < uint64(r.Lo) {
		held = uint64(r.Lo)
	}
	if held < uint64(r.Hi) {
		out.SetRange(int(held-uint64(r.Lo)), r.Chunks())
	}
	return nil
}
