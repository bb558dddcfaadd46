package check_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry/check"
)

// A verdict says how many lengths were drawn, not how many may have been.
func TestDrawnLengthsAreCounted(t *testing.T) {
	d := judge(t, subject(40, 16, nil, full(4, 4))).Domain
	require.Equal(t, 40, d.EdgeLengths) // three periods are longer
	require.Zero(t, d.Drawn)
	d = judge(t, subject(3000, 16, nil, full(4, 4))).Domain
	require.Equal(t, 128, d.Drawn)
}

// Sizes of chunks without a common factor make a period as long as the longest prompt. The
// search for edges ends anyhow, and the domain says how far it went.
func TestLongPeriodsAreSearchedAtTheirEnds(t *testing.T) {
	const longest = 1 << 30
	d := check.DomainOf(t, subject(longest, 16, nil, full(16, 509), full(16, 511), full(16, 513)))
	require.Greater(t, d.PeriodTokens, uint64(longest/3))
	require.Contains(t, d.Lines()[1], "next to the edges of chunks in the first 1048576 and the last 1048576 lengths")
	edges := check.EdgesOf(d)
	require.Equal(t, d.EdgeLengths, len(edges))
	for _, n := range []uint64{16*509 - 1, 16 * 509, 16*509 + 1, longest - longest%(16*511)} {
		require.True(t, slices.Contains(edges, n), n)
	}
	middle := 0
	for _, n := range edges {
		if n > 1<<20+1 && n <= longest-1<<20 {
			middle++
		}
	}
	require.LessOrEqual(t, middle, d.Drawn)
	require.Greater(t, middle, d.Drawn-8) // one in 500 is drawn at an end
	// A period that fits is searched as before.
	d = check.DomainOf(t, subject(longest, 16, nil, full(16, 8), full(16, 9)))
	require.Contains(t, d.Lines()[1], "in the first three periods and the last one")
}
