package stock

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/vllm"
)

func sideWith(t testing.TB, blocks, window uint64, e deploy.StockEngine, groups ...vllm.Group) *side {
	t.Helper()
	c := vllm.Defaults(vllm.RevB, append(groups, vllm.Group{Kind: vllm.SlidingWindow, BlockTokens: blocks, WindowTokens: window})...)
	c.RetentionTokens = vllm.Optional{}
	names := make([]string, len(c.Groups))
	s, err := sideOf(c, e, names)
	require.NoError(t, err)
	return s
}

func mustDomain(t *testing.T, maxTokens uint64, e []deploy.StockEngine, s *side) *domain {
	t.Helper()
	d, err := newDomain(maxTokens, e, s.rules)
	require.NoError(t, err)
	return d
}

func tokensOf(d *domain, edges bool) (out []uint64) {
	for _, l := range d.lengths {
		if l.edge || !edges {
			out = append(out, l.tokens)
		}
	}
	return out
}

// The lengths of a domain: all to three periods beyond the windows, the last period, and
// those around a cap; edges alone where a period is long; and bounds on all of it.
func TestLengths(t *testing.T) {
	full := func(block uint64) vllm.Group { return vllm.Group{Kind: vllm.Full, BlockTokens: block} }
	s := sideWith(t, 16, 128, deploy.StockEngine{}, full(16))
	d := mustDomain(t, 131072, nil, s)
	require.EqualValues(t, 16, d.PeriodTokens)
	all := tokensOf(d, false)
	head := int(128 + 5*16 + 3*16)
	require.Len(t, all, head+16)
	require.Equal(t, all, tokensOf(d, true), "all are edges when the period is short")
	require.EqualValues(t, []uint64{uint64(head), 131072 - 15, 131072}, []uint64{all[head-1], all[head], all[len(all)-1]})

	small := mustDomain(t, 100, nil, s)
	require.Len(t, small.lengths, 100)
	require.Equal(t, "every prompt length from 1 to 100, 100 in all: covers, needs", small.lines()[0])
	require.Len(t, small.lines(), 2, "nothing goes by period")

	cap := uint64(5000)
	d = mustDomain(t, 131072, []deploy.StockEngine{{MaxOffload: &cap}}, s)
	for n := cap - 33; n <= cap+33; n++ {
		require.True(t, slices.Contains(tokensOf(d, true), n), n)
	}
	require.Contains(t, d.Edges, "caps")

	// A period of 8,192: every length runs, edges run all, and the end is short.
	s = sideWith(t, 16, 128, deploy.StockEngine{}, full(16), vllm.Group{Kind: vllm.ChunkedLocal, BlockTokens: 16, WindowTokens: 8192})
	d = mustDomain(t, 131072, nil, s)
	require.EqualValues(t, 8192, d.PeriodTokens)
	require.EqualValues(t, 8192+80+3*8192, d.head)
	all, edges := tokensOf(d, false), tokensOf(d, true)
	require.Equal(t, everyMax, len(slices.DeleteFunc(slices.Clone(all), func(n uint64) bool { return n > everyMax })))
	require.Less(t, len(edges), len(all)/4)
	for _, n := range []uint64{1, 15, 16, 17, 127, 128, 129, 8191, 8192, 8193, 131072 - lastLengths + 1, 131072} {
		require.True(t, slices.Contains(edges, n), n)
	}
	require.False(t, slices.Contains(edges, 8192+8))

	// Blocks that have no short common multiple.
	s = sideWith(t, 17, 30, deploy.StockEngine{}, full(11), full(13), full(16))
	_, err := newDomain(1<<20, nil, s.rules)
	require.EqualError(t, err, "the answers of these rules go by a period of 38896 tokens, so that more than 65536 prompt lengths would have to be run; give the groups blocks with a smaller common multiple, or lower max_tokens")
	require.Len(t, mustDomain(t, 20000, nil, s).lengths, 20000)
}

// GPU prefixes of a prompt: all while they are few, else both ends and the window's begin;
// steps are never too many.
func TestPrefixesAndSteps(t *testing.T) {
	s := sideWith(t, 16, 128, deploy.StockEngine{PromptOnly: true}, vllm.Group{Kind: vllm.Full, BlockTokens: 16})
	require.Empty(t, s.prefixes(16, prefixesMax))
	require.Equal(t, []uint64{16, 32}, s.prefixes(33, prefixesMax))
	require.Len(t, s.prefixes(16*prefixesMax+1, prefixesMax), prefixesMax)
	p := s.prefixes(10001, prefixesMax)
	require.Len(t, p, prefixesMax)
	for _, n := range []uint64{16, 32, 10000 - 128 - 16, 10000 - 128, 10000 - 128 + 16, 10000 - 16, 10000} {
		require.Contains(t, p, n)
	}
	require.Equal(t, longPrefixesMax, most(longTokens+1))
	require.Len(t, s.prefixes(131072, most(131072)), longPrefixesMax)
	for _, prompt := range []uint64{1, 5, 100, 1000, 131072} {
		for _, k := range s.scheduled(prompt) {
			if k.StepTokens > 0 {
				require.LessOrEqual(t, prompt/k.StepTokens, uint64(stepsMax))
			}
		}
	}
}

// Loads are the ends that the producer's own lookup can have.
func TestLoads(t *testing.T) {
	s := sideWith(t, 16, 128, deploy.StockEngine{}, vllm.Group{Kind: vllm.Full, BlockTokens: 64})
	for _, w := range s.loads(1000, []uint64{64}) {
		require.Less(t, w.LoadedTokens, uint64(1000))
		require.Greater(t, w.LoadedTokens, w.GPUTokens)
		require.Zero(t, w.LoadedTokens%64, "of a prompt that ends inside a full chunk")
	}
	require.NotEmpty(t, s.loads(1000, nil))
}

// BenchmarkJudge judges gpt-oss-120b's layout to 131,072 tokens, accepted.
func BenchmarkJudge(b *testing.B) {
	s := sideWith(b, 16, 128, deploy.StockEngine{PromptOnly: true}, vllm.Group{Kind: vllm.Full, BlockTokens: 16})
	c := s.rules.Config()
	c.Policy = vllm.RequestLevel
	s, err := sideOf(c, s.engine, s.groups)
	require.NoError(b, err)
	for b.Loop() {
		r, err := newRun(direction{"", s, s}, 131072, Options{})
		require.NoError(b, err)
		require.NoError(b, r.all(b.Context()))
		require.Nil(b, r.found)
	}
}
