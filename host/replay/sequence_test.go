package replay

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The longest native prefix is what trying every length finds.
func TestLongestMatchesTryingEveryLength(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := []group{
			{index: 0, name: "full", blockTokens: rapid.SampledFrom([]uint64{8, 16}).Draw(t, "block"), rows: 1, rowBytes: 1},
			{index: 1, name: "sliding", blockTokens: 16, window: rapid.Uint64Range(1, 100).Draw(t, "window"), rows: 1, rowBytes: 1},
		}
		s := &side{groups: groups, pools: []*pool{newPool(300), newPool(300)}}
		req := &Request{PromptTokens: rapid.Uint64Range(1, 512).Draw(t, "prompt"), IDs: []uint64{5}}
		q := newSequence(s, newPrompt(req, "", 8))

		cached := make([]map[uint64]bool, 2)
		for i := range groups {
			cached[i] = map[uint64]bool{}
			holes := rapid.IntRange(0, 4).Draw(t, "holes")
			blocks := req.PromptTokens / groups[i].blockTokens
			for b := range blocks {
				cached[i][b] = true
			}
			for range holes {
				if blocks > 0 {
					delete(cached[i], rapid.Uint64Range(0, blocks-1).Draw(t, "hole"))
				}
			}
			for b := range cached[i] {
				ids, err := s.pools[i].take(1)
				require.NoError(t, err)
				s.pools[i].publish(ids[0], q.blockHash(&groups[i], b))
			}
		}
		limit := rapid.Uint64Range(0, req.PromptTokens).Draw(t, "limit")
		want := uint64(0)
		for n := uint64(16); n <= limit; n += 16 {
			ok := true
			for p := uint64(0); p < n; p++ { // the tokens that the query at n reads
				ok = ok && cached[0][p/groups[0].blockTokens]
				if n-p < groups[1].window {
					ok = ok && cached[1][p/16]
				}
			}
			if ok {
				want = n
			}
		}
		require.Equal(t, want, q.longest(limit))

		// Adopted blocks are shared with whoever has them, and can be given back.
		free := []int{s.pools[0].free, s.pools[1].free}
		n := q.adopt(limit)
		require.Equal(t, q.longest(min(limit, req.PromptTokens-1)), n)
		q.close()
		require.Equal(t, free, []int{s.pools[0].free, s.pools[1].free})
	})
}

// Steps cover the prompt without a gap, are no longer than allowed, and end at every
// stop.
func TestStepsCoverThePrompt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prompt := rapid.Uint64Range(1, 20000).Draw(t, "prompt")
		from := rapid.Uint64Range(0, prompt-1).Draw(t, "from")
		stops := rapid.SliceOfN(rapid.Uint64Range(1, 25000), 0, 5).Draw(t, "stops")
		for i := 1; i < len(stops); i++ {
			stops[i] = max(stops[i], stops[i-1])
		}
		ends := map[uint64]bool{}
		for n := from; n < prompt; {
			next := stepEnd(n, prompt, stops)
			require.Greater(t, next, n)
			require.LessOrEqual(t, next-n, uint64(stepTokens))
			require.LessOrEqual(t, next, prompt)
			ends[next] = true
			n = next
		}
		require.True(t, ends[prompt])
		for _, s := range stops {
			if s > from && s <= prompt {
				require.True(t, ends[s], "stop at %d", s)
			}
		}
	})
}

func TestRegionHoldsTheLongestPrompts(t *testing.T) {
	groups := []group{
		{name: "full", blockTokens: 16, chunkBlocks: 8},
		{name: "sliding", blockTokens: 16, chunkBlocks: 8, window: 128},
	}
	reqs := []Request{{PromptTokens: 16000}, {PromptTokens: 160}, {PromptTokens: 32000}}
	one, two := blocksFor(groups, reqs, 1), blocksFor(groups, reqs, 2)
	require.GreaterOrEqual(t, one[0], uint32(2000))
	require.GreaterOrEqual(t, two[0], one[0]+1000)
	require.Less(t, one[1], one[0], "a sliding window needs less")
}
