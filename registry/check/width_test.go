package check_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs"
)

// TestWidthIsReported: what the shipped rules fetch and store beyond need, in words. The
// group's bytes are those of its chunks.
func TestWidthIsReported(t *testing.T) {
	unmasked := func(s abi.Spec) abi.Spec { return unverified{s} }
	var lines []string
	for _, c := range []struct {
		name string
		s    check.Subject
	}{
		{"a window", subject(300, 48, nil, window(20, 0, 4, 2), full(4, 4))},
		{"a window with extra", subject(300, 48, nil, window(20, 11, 4, 2), full(4, 4))},
		{"states, all saved", subject(300, 48, nil, part{"state", specs.State(), []uint64{0}, 8, 1}, full(4, 4))},
		{"states, saved at stops", subject(300, 48, nil, part{"state", specs.State(), []uint64{1}, 8, 1}, full(4, 4))},
		{"no mask", subject(300, 48, nil, part{"trusted", unmasked(specs.Window()), []uint64{20, 11}, 4, 2}, full(4, 4))},
	} {
		for i := range c.s.Groups {
			c.s.Groups[i].ChunkBytes = 4096
		}
		rep := judge(t, c.s)
		require.Nil(t, rep.Counterexample, "%v", rep.Counterexample)
		require.Len(t, rep.Width, len(c.s.Groups))
		for i := range rep.Width {
			lines = append(lines, fmt.Sprintf("%s, %s", c.name, &rep.Width[i]))
		}
	}
	golden(t, "width", strings.Join(lines, "\n")+"\n")
}

// TestWidthIsTheSameForAnyWorkers: sums and extremes do not depend on who saw what.
func TestWidthIsTheSameForAnyWorkers(t *testing.T) {
	s := subject(300, 48, nil, window(20, 11, 4, 2), full(4, 4))
	var first []check.Width
	for _, workers := range []int{1, 2, 5} {
		rep, err := check.Run(t.Context(), s, check.Options{Seed: 1, Workers: workers})
		require.NoError(t, err)
		require.Nil(t, rep.Counterexample)
		if first == nil {
			first = rep.Width
		}
		require.Equal(t, first, rep.Width)
	}
}

// unverified claims no mask.
type unverified struct{ abi.Spec }

func (u unverified) Manifest() *abi.Manifest {
	m := *u.Spec.Manifest()
	m.Mask, m.MaskArgs = abi.MaskUnverified, nil
	return &m
}
