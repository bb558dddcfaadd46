package sim

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A seed is a run: played again, it goes the same way to the last step, whether it fails or
// not, and whether somebody watches.
func TestReplay(t *testing.T) {
	digests := map[uint64]uint64{}
	for seed := uint64(1); seed <= 12; seed++ {
		s := Draw(seed)
		require.Equal(t, s, Draw(seed))
		r := Run(s, Options{})
		require.Equal(t, Draw(seed), s, "a run leaves its schedule as it is")
		var lines int
		again := Run(Draw(seed), Options{Trace: func(string) { lines++ }})
		require.Equal(t, r, again, "seed %d", seed)
		require.Greater(t, lines, 1000)
		require.NotContains(t, digests, r.Digest, "seeds %d and %d", digests[r.Digest], seed)
		digests[r.Digest] = seed
	}
	for _, b := range []Break{{Pin: true}, {Deadline: true}, {AbortLost: true}} {
		seed := uint64(1)
		for Run(Draw(seed), Options{Break: b}).Failure == nil {
			seed++
		}
		r, again := Run(Draw(seed), Options{Break: b}), Run(Draw(seed), Options{Break: b})
		require.Equal(t, r, again, "seed %d", seed)
		require.NotNil(t, r.Failure)
	}
}

// What fails shrinks to what makes it fail.
func TestShrink(t *testing.T) {
	shrunk := func(b Break) *Schedule {
		for seed := uint64(1); ; seed++ {
			s := Draw(seed)
			r := Run(s, Options{Break: b})
			if r.Failure == nil {
				continue
			}
			small := Shrink(s, Options{Break: b}, r.Failure.Kind)
			t.Logf("seed %d: %v\n%v", seed, r.Failure, small)
			again := Run(small, Options{Break: b})
			require.NotNil(t, again.Failure)
			require.Equal(t, r.Failure.Kind, again.Failure.Kind)
			require.Nil(t, Run(small, Options{}).Failure, "without the break it passes")
			return small
		}
	}
	s := shrunk(Break{Pin: true}) // one request of leg pd is enough
	require.Len(t, s.Requests, 1)
	require.Empty(t, s.Faults)
	require.Equal(t, 2, s.Nodes)
	require.Equal(t, 3, strings.Count(s.String(), "\n")+1)

	s = shrunk(Break{AbortLost: true})
	require.LessOrEqual(t, len(s.Requests), 2)
	require.LessOrEqual(t, len(s.Faults), 1)

	s = shrunk(Break{Recover: true}) // nothing goes wrong before a session is lost
	require.Len(t, s.Faults, 1)
	require.LessOrEqual(t, s.Nodes, 4)
}
