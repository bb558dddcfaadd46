package policy_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs/policy"
	"pgregory.net/rapid"
)

// TestAdmit: request-level admits every chunk; chunk-level exactly those that are not
// wholly resident.
func TestAdmit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chunk := rapid.Uint64Range(1, 9).Draw(t, "chunk")
		lo := rapid.Uint32Range(0, 100).Draw(t, "lo")
		r := abi.Round{BlockTokens: 1, ChunkTokens: chunk, ResidentTokens: rapid.Uint64Range(0, 1000).Draw(t, "resident"),
			Lo: lo, Hi: lo + rapid.Uint32Range(0, 150).Draw(t, "n")}
		for _, s := range policy.All() {
			rule, err := s.Open(nil)
			require.NoError(t, err)
			got := abi.NewBitmap(r.Chunks())
			require.NoError(t, rule.Reach(r, got))
			for i := range r.Chunks() {
				wholly := (uint64(lo)+uint64(i)+1)*chunk <= r.ResidentTokens
				want := s.Manifest().Name == "request-level" || !wholly
				require.Equal(t, want, got.Get(i), "%s chunk %d of %+v", s.Manifest().Name, int(lo)+i, r)
			}
			span, err := rule.Scan(r, abi.NewStates(r.Chunks()), abi.NewBitmap(r.Chunks()))
			require.NoError(t, err)
			require.EqualValues(t, r.Chunks(), span.Usable)
		}
	})
}
