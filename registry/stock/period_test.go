package stock

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/vllm"
)

// drawSide draws a small configuration of every kind, whatever it is worth.
func drawSide(t *rapid.T, blocks ...uint64) *side {
	rev := rapid.SampledFrom([]vllm.Revision{vllm.RevA, vllm.RevB}).Draw(t, "revision")
	c := vllm.Defaults(rev)
	c.Promotion = rapid.SampledFrom([]vllm.Promotion{vllm.PromotionPending, vllm.PromotionPending, vllm.PromotionRetry}).Draw(t, "promotion")
	c.Policy = rapid.SampledFrom([]vllm.Policy{vllm.RequestLevel, vllm.RequestLevel, vllm.ChunkLevel}).Draw(t, "policy")
	c.PromptOnly = rapid.Bool().Draw(t, "prompt only")
	c.BlocksPerChunk = rapid.Uint64Range(1, 2).Draw(t, "blocks per chunk")
	unit := c.BlocksPerChunk * 48
	switch rapid.IntRange(0, 2).Draw(t, "retention") {
	case 1:
		c.RetentionTokens = vllm.Optional{}
	case 2:
		c.RetentionTokens = vllm.Some(unit)
	}
	state := uint64(0)
	var names []string
	for i := range rapid.IntRange(1, 3).Draw(t, "groups") {
		g := vllm.Group{BlockTokens: rapid.SampledFrom(blocks).Draw(t, "block"), Eagle: rapid.IntRange(0, 5).Draw(t, "eagle") == 0}
		g.Kind = rapid.SampledFrom([]vllm.Kind{vllm.Full, vllm.Full, vllm.MLA, vllm.SlidingWindow, vllm.SlidingWindow, vllm.ChunkedLocal, vllm.Mamba}).Draw(t, "kind")
		switch g.Kind {
		case vllm.SlidingWindow:
			g.WindowTokens = rapid.Uint64Range(1, 2*slices.Max(blocks)+4).Draw(t, "window")
			g.ExtraTokens = rapid.SampledFrom([]uint64{0, 0, 3}).Draw(t, "extra")
		case vllm.ChunkedLocal:
			g.WindowTokens = rapid.SampledFrom([]uint64{6, 8, 12, 32}).Draw(t, "attention chunk")
		case vllm.Mamba:
			if state == 0 {
				state = g.BlockTokens
			}
			g.BlockTokens, g.Mode = state, rapid.SampledFrom([]vllm.MambaMode{vllm.MambaAlign, vllm.MambaAll}).Draw(t, "mode")
		}
		c.Groups = append(c.Groups, g)
		names = append(names, string(rune('a'+i)))
	}
	e := deploy.StockEngine{PromptOnly: c.PromptOnly, SharedWrites: rapid.IntRange(0, 9).Draw(t, "shared") == 0}
	s, err := sideOf(c, e, names)
	if err != nil {
		t.Skip(err)
	}
	return s
}

// fails says which relation a length fails first, in the holes' relations and in states; ""
// for each that it holds.
func (r *run) fails(t require.TestingT, prompt uint64) (hole, wide string) {
	ce, err := r.length(length{prompt, true}, map[string]uint64{})
	require.NoError(t, err)
	if ce != nil {
		hole = ce.Relation + " " + ce.Group
	}
	if ce, err = r.width(length{prompt, true}, map[string]uint64{}); ce != nil {
		wide = ce.Group
	}
	require.NoError(t, err)
	return hole, wide
}

// What a length fails repeats with the period that a verdict states, from the length on
// that it states: over many periods, for drawn configurations and drawn residues.
func TestPeriod(t *testing.T) {
	const periods, residues = 6, 4
	rapid.Check(t, func(t *rapid.T) {
		s := drawSide(t, 2, 3, 4, 8)
		r, err := newRun(direction{"", s, s}, 1<<20, Options{})
		if err != nil {
			t.Skip(err)
		}
		period := r.domain.PeriodTokens
		if period > 48 {
			t.Skip("long")
		}
		c := s.rules.Config()
		for range residues {
			p := r.domain.lead + rapid.Uint64Range(1, period).Draw(t, "residue")
			hole, wide := r.fails(t, p)
			for k := range uint64(periods) {
				h, w := r.fails(t, p+(k+1)*period)
				require.Equal(t, [2]string{hole, wide}, [2]string{h, w}, "%s\nprompt %d and %d periods of %d more", c.String(), p, k+1, period)
			}
		}
	})
}

// Where a period is long, a length that is next to no edge runs the plainest cases alone.
// The first failure is found all the same: over drawn configurations with long blocks.
func TestEdgesFindTheFirstFailure(t *testing.T) {
	thinned := 0
	rapid.Check(t, func(t *rapid.T) {
		s := drawSide(t, 8, 16, 24)
		r, err := newRun(direction{"", s, s}, 1<<20, Options{})
		if err != nil || r.domain.head > 400 {
			t.Skip("long")
		}
		first := func(edge func(n uint64) bool) uint64 {
			for p := uint64(1); p <= r.domain.head; p++ {
				ce, err := r.length(length{p, edge(p)}, map[string]uint64{})
				require.NoError(t, err)
				if ce != nil {
					return p
				}
			}
			return 0
		}
		all := first(func(uint64) bool { return true })
		some := first(func(n uint64) bool {
			e := isEdge(n, []*vllm.Rules{s.rules})
			if !e {
				thinned++
			}
			return e
		})
		c := s.rules.Config()
		require.Equal(t, all, some, c.String())
	})
	require.Greater(t, thinned, 1000)
}
