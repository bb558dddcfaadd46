// Package main is a policy, built as a wasm module: a consumer fetches only when that saves
// it a number of tokens, because computing a few is cheaper than moving them.
//
// Its other half stores everything. One that stored only long prompts would be refused by
// relation useful: the next turn of a conversation may be long enough to fetch what the
// turn before it was too short to store.
package main

import (
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/guest"
)

// minGain is how many tokens a fetch must save.
type minGain uint64

// Reach lets every chunk into the store path.
func (minGain) Reach(r abi.Round, out abi.Bitmap) error {
	out.SetRange(0, r.Chunks())
	return nil
}

// Scan lets all or nothing be fetched; of a policy's scan only the range counts.
func (m minGain) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	if r.BoundTokens < r.LocalTokens+uint64(m) {
		return abi.Span{}, nil
	}
	return abi.Span{Usable: r.Hi - r.Lo}, nil
}

// spec is the policy before its number is chosen.
type spec struct{}

func (spec) Manifest() *abi.Manifest {
	return &abi.Manifest{
		Name: "min-gain", Version: "1.0.0", Kind: abi.KindPolicy,
		Params: []abi.Param{{Name: "gain", Min: 0, Max: 1 << 20, Required: true, Unit: "tokens"}},
	}
}

func (s spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.Manifest().CheckParams(params); err != nil {
		return nil, err
	}
	return minGain(params[0]), nil
}

func init() { guest.Export(spec{}) }

func main() {}
