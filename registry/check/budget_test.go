package check_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs"
)

// late is a window rule that stores nothing from prompts of 150 tokens on.
func late() abi.Spec {
	return &twisted{Spec: specs.Window(), reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
		if r.PromptTokens >= 150 {
			out.Zero()
			return nil
		}
		return in.Reach(r, out)
	}}
}

// A check whose time is spent says how far it got, at whatever point it is ended. It never
// says accepted, and a counterexample that it has is a real one.
func TestBudget(t *testing.T) {
	good := subject(160, 16, nil, window(9, 0, 4, 2), full(4, 2))
	bad := subject(160, 16, nil, part{"late", late(), []uint64{9, 0}, 4, 2}, full(4, 2))
	whole, err := check.Run(t.Context(), bad, check.Options{})
	require.NoError(t, err)
	require.NotNil(t, whole.Counterexample)
	require.EqualValues(t, 150, whole.Counterexample.PromptTokens)

	// run ends the time after n reports of progress.
	run := func(s check.Subject, n int64) (*check.Report, bool) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		if n == 0 {
			cancel(check.ErrBudget)
		}
		var calls atomic.Int64
		rep, err := check.Run(ctx, s, check.Options{Workers: 1, Progress: func(int, int) {
			if calls.Add(1) == n {
				cancel(check.ErrBudget)
			}
		}})
		require.NoError(t, err)
		return rep, ctx.Err() != nil
	}
	outcomes := map[string]int{}
	step := int64(5)
	if raceEnabled {
		step = 40
	}
	for n := int64(0); ; n += step {
		rep, spent := run(good, n)
		if !spent {
			require.False(t, rep.Undecided)
			require.Empty(t, rep.Reached)
			break
		}
		require.Nil(t, rep.Counterexample)
		if !rep.Undecided { // it was the last report
			outcomes["accepted"]++
			require.Empty(t, rep.Reached)
			continue
		}
		outcomes["undecided"]++
		all := 0
		for _, line := range rep.Reached {
			if strings.Contains(line, ": all ") {
				all++
			}
		}
		require.Less(t, all, len(rep.Reached), "something must be left: %q", rep.Reached)
	}
	require.LessOrEqual(t, outcomes["accepted"], 1)
	require.Greater(t, outcomes["undecided"], 3)
	for n := int64(0); n < 40; n += 3 {
		rep, _ := run(bad, n)
		switch ce := rep.Counterexample; {
		case ce == nil:
			require.True(t, rep.Undecided, "after %d reports", n)
			require.NotEmpty(t, rep.Reached)
		case len(rep.Reached) == 0:
			require.Equal(t, whole.Counterexample, ce)
		default:
			require.GreaterOrEqual(t, ce.PromptTokens, uint64(150))
		}
	}

	// Another cause is an error, as before.
	other := errors.New("another cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(other)
	_, err = check.Run(ctx, good, check.Options{})
	require.ErrorIs(t, err, context.Canceled)
}

// How far a check got, in words.
func TestReached(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	rep, err := check.Run(ctx, subject(300, 0, nil, full(4, 2)), check.Options{Workers: 1, Progress: func(done, total int) {
		if done > total*2/3 {
			cancel(check.ErrBudget)
		}
	}})
	require.NoError(t, err)
	require.True(t, rep.Undecided)
	golden(t, "reached", fmt.Sprintln(strings.Join(rep.Reached, "\n")))
}
