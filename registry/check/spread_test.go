package check_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/check"
	"pgregory.net/rapid"
)

// Whatever the number of workers, the smallest item that leads to anything is returned,
// and all before it have run.
func TestSpread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, workers := rapid.IntRange(0, 200).Draw(t, "n"), rapid.IntRange(1, 9).Draw(t, "workers")
		hits := rapid.SliceOfN(rapid.IntRange(0, 200), 0, 4).Draw(t, "hits")
		least, bad := n, errors.New("bad")
		leads := map[int]bool{}
		for _, h := range hits {
			leads[h] = true
			least = min(least, h)
		}
		ran := make([]atomic.Bool, n)
		got, reached, err := check.Spread(context.Background(), n, check.Options{Workers: workers}, func(w, i int) (*int, error) {
			if ran[i].Swap(true) || w >= workers {
				return nil, errors.New("twice, or a worker too many")
			}
			switch {
			case leads[i] && i%2 == 1:
				return nil, bad
			case leads[i]:
				return &i, nil
			}
			return nil, nil
		})
		for i := range least {
			require.True(t, ran[i].Load())
		}
		require.GreaterOrEqual(t, reached, least)
		switch {
		case least == n:
			require.NoError(t, err)
			require.Nil(t, got)
			require.Equal(t, n, reached)
		case least%2 == 1:
			require.Equal(t, bad, err)
		default:
			require.NoError(t, err)
			require.Equal(t, least, *got)
		}
	})
}

// A context that ends stops it, and what ran without a gap is counted.
func TestSpreadEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	_, reached, err := check.Spread(ctx, 1000, check.Options{Workers: 2}, func(_, i int) (*int, error) {
		if i == 100 {
			cancel(check.ErrBudget)
		}
		return nil, nil
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, check.ErrBudget, context.Cause(ctx))
	require.Greater(t, reached, 90)
	require.Less(t, reached, 1000)
}
