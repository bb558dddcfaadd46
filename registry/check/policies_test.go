package check_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// TestPoliciesThatNarrowEachOther: what one policy leaves may be too little for another.
// Then nothing is fetched, by intent, whichever stands first.
func TestPoliciesThatNarrowEachOther(t *testing.T) {
	policies := []rated{{policy.MinPull(), []uint64{10}}, {policy.Cap(), []uint64{8}}}
	for range 2 {
		n := small(0, 0, 60, member{"a", specs.Window(), []uint64{9, 0}, 2, 2, false}, member{"b", specs.Full(), nil, 3, 1, false})
		n.policies = policies
		if ce := judge(t, n.subject()).Counterexample; ce != nil {
			t.Fatal(ce)
		}
		slices.Reverse(policies)
	}
}

// TestRangeHangsOnNoLookup: a policy is asked how far may be fetched before anything is
// known, and nothing waits for its answer.
func TestRangeHangsOnNoLookup(t *testing.T) {
	for why, scan := range map[string]func(in abi.Rule, r abi.Round, s abi.States) (abi.Span, error){
		"a policy's scan is deferred, but its range must be known before any lookup": ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
			return abi.Span{Usable: n, Deferred: s.First(abi.Unknown, 0, r.Chunks()) < r.Chunks()}
		}),
		"a policy's range hangs on the lookup states: it lets 0 chunks be fetched, and 1 when all are Hits; it must be known before any lookup": ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
			return abi.Span{Usable: min(n, uint32(s.First(abi.Unknown, 0, r.Chunks())))}
		}),
		"a policy lets 2 chunks be fetched of 1": ranging(func(n uint32, _ *abi.Round, _ abi.States) abi.Span { return abi.Span{Usable: n + 1} }),
	} {
		s := subject(300, 24, []abi.Spec{&strayedSpec{policy.RequestLevel(), &stray{scan: scan}}}, window(9, 0, 4, 2), full(4, 3))
		ce := judge(t, s).Counterexample
		require.NotNil(t, ce, why)
		require.Equal(t, "states", ce.Relation, ce.String())
		require.Equal(t, "policy request-level", ce.Group)
		require.Equal(t, why, ce.Why)
	}
}
