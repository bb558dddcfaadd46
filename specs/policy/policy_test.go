package policy_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs/policy"
	"pgregory.net/rapid"
)

// admits and fetches say what each policy means, chunk by chunk: whether it lets in the
// chunk that ends at token end, and how far a consumer may fetch.
var admits = map[string]func(p []uint64, r *abi.Round, end uint64) bool{
	"request-level": func(_ []uint64, _ *abi.Round, _ uint64) bool { return true },
	"chunk-level":   func(_ []uint64, r *abi.Round, end uint64) bool { return end > r.ResidentTokens },
	"prompt-only":   func(_ []uint64, r *abi.Round, end uint64) bool { return end <= r.PromptTokens },
	"cap":           func(p []uint64, _ *abi.Round, end uint64) bool { return end <= p[0] },
	"min-reuse":     func(p []uint64, r *abi.Round, _ uint64) bool { return r.Offers >= p[0] },
	"min-pull":      func(_ []uint64, _ *abi.Round, _ uint64) bool { return true },
}

var fetches = map[string]func(p []uint64, r *abi.Round, end uint64) bool{
	"cap":      func(p []uint64, _ *abi.Round, end uint64) bool { return end <= p[0] },
	"min-pull": func(p []uint64, r *abi.Round, _ uint64) bool { return r.BoundTokens > r.LocalTokens+p[0] },
}

func TestPoliciesAgainstTheirMeaning(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chunk := rapid.Uint64Range(1, 9).Draw(t, "chunk")
		lo := rapid.Uint32Range(0, 100).Draw(t, "lo")
		n := rapid.Uint32Range(0, 150).Draw(t, "n")
		r := abi.Round{
			BlockTokens: 1, ChunkTokens: chunk, PromptTokens: rapid.Uint64Range(1, 1000).Draw(t, "prompt"),
			ResidentTokens: rapid.Uint64Range(0, 1000).Draw(t, "resident"), Offers: rapid.Uint64Range(0, 5).Draw(t, "offers"),
			LocalTokens: uint64(lo) * chunk, BoundTokens: (uint64(lo) + uint64(n)) * chunk, Lo: lo, Hi: lo + n,
		}
		for _, s := range policy.All() {
			name := s.Manifest().Name
			var p []uint64
			for _, m := range s.Manifest().Params {
				p = append(p, rapid.Uint64Range(m.Min, min(m.Max, 1000)).Draw(t, name+" "+m.Name))
			}
			if name == "min-reuse" {
				p[0] = p[0]%6 + 1
			}
			rule, err := s.Open(p)
			require.NoError(t, err)
			got := abi.NewBitmap(r.Chunks())
			require.NoError(t, rule.Reach(r, got))
			far := 0
			for i := range r.Chunks() {
				end := (uint64(lo) + uint64(i) + 1) * chunk
				require.Equal(t, admits[name](p, &r, end), got.Get(i), "%s%v chunk %d of %+v", name, p, int(lo)+i, r)
				if f := fetches[name]; f == nil || f(p, &r, end) {
					far = i + 1
				}
			}
			span, err := rule.Scan(r, abi.NewStates(r.Chunks()), abi.NewBitmap(r.Chunks()))
			require.NoError(t, err)
			require.EqualValues(t, far, span.Usable, "%s%v of %+v", name, p, r)
		}
	})
}
