package check_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// TestPurityForAnyNumberOfWorkers: a rule that keeps state is refused by relation pure,
// and the message names both answers, whatever the cores; one that keeps none is judged by
// the same number of cases.
func TestPurityForAnyNumberOfWorkers(t *testing.T) {
	parts := func(wrap func(abi.Spec) abi.Spec) check.Subject {
		return subject(200, 64, nil, part{"sliding", wrap(specs.Window()), []uint64{20, 0}, 4, 2}, full(4, 4))
	}
	var cases map[string]uint64
	for _, workers := range []int{1, 3} {
		o := check.Options{Seed: 1, Workers: workers}
		for _, a := range abitest.Adversaries() {
			if a.Relation != "pure" {
				continue
			}
			rep, err := check.Run(context.Background(), parts(a.Wrap), o)
			require.NoError(t, err)
			require.NotNil(t, rep.Counterexample, "%s, %d workers: accepted", a.Name, workers)
			require.Equal(t, "pure", rep.Counterexample.Relation, "%s, %d workers", a.Name, workers)
			require.NotEqual(t, rep.Counterexample.Twice.First, rep.Counterexample.Twice.Second)
			require.NotEmpty(t, rep.Counterexample.Twice.How)
		}
		rep, err := check.Run(context.Background(), parts(func(s abi.Spec) abi.Spec { return s }), o)
		require.NoError(t, err)
		require.Nil(t, rep.Counterexample)
		if cases == nil {
			cases = rep.Cases
		}
		require.Equal(t, cases, rep.Cases, "%d workers", workers)
	}
}

// tiring is the window rule, whose opened rules count the calls of one function and are
// wrong, each by itself, from a number of them on.
type tiring struct {
	abi.Spec
	needs, scans int // 0 = never
}

type tiringRule struct {
	abi.SpecRule
	t            *tiring
	needs, scans int
}

func (t *tiring) Open(p []uint64) (abi.Rule, error) {
	r, err := t.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return &tiringRule{SpecRule: r.(abi.SpecRule), t: t}, nil
}

func (r *tiringRule) Scan(rd abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	span, err := r.SpecRule.Scan(rd, s, d)
	if r.scans++; r.t.scans > 0 && r.scans > r.t.scans && span.Deferred {
		s.Mark(abi.Unknown, 0, rd.Chunks(), d)
	}
	return span, err
}

func (r *tiringRule) Need(rd abi.Round, out abi.Bitmap) error {
	if r.needs++; r.t.needs > 0 && r.needs > r.t.needs {
		return nil
	}
	return r.SpecRule.Need(rd, out)
}

// TestStateThatBuildsUp: a rule that turns after more calls than the other tests of
// relation pure make is found on the instance that has served the check, and one that turns
// after more than any worker's instance has served in the long run.
func TestStateThatBuildsUp(t *testing.T) {
	for _, c := range []struct {
		name    string
		rule    tiring
		longest uint64
		workers int
		how     string
	}{
		{"on the instance that served", tiring{Spec: specs.Window(), scans: 40_000}, 900, 1, "on an instance that served this check"},
		{"in the long run", tiring{Spec: specs.Window(), needs: 2400}, 12, 6, "in a long run on a fresh instance"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := subject(c.longest, 8, nil, part{"sliding", &c.rule, []uint64{20, 0}, 4, 2})
			rep, err := check.Run(context.Background(), s, check.Options{Seed: 1, Workers: c.workers})
			require.NoError(t, err)
			require.NotNil(t, rep.Counterexample, "accepted")
			require.Equal(t, "pure", rep.Counterexample.Relation)
			require.Equal(t, c.how, rep.Counterexample.Twice.How)
		})
	}
}

// TestPurityIsTheCause: what a rule that keeps state breaks elsewhere is not reported when
// the state itself can be shown.
func TestPurityIsTheCause(t *testing.T) {
	for name, tw := range map[string]twisted{
		"supplies less after many calls": {reach: func() func(abi.SpecRule, abi.Round, abi.Bitmap) error {
			var calls atomic.Int64
			return func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
				if calls.Add(1) > 30_000 {
					return nil
				}
				return in.Reach(r, out)
			}
		}()},
		"finds nothing after many calls": {scan: func() func(abi.SpecRule, abi.Round, abi.States, abi.Bitmap) (abi.Span, error) {
			var calls atomic.Int64
			return func(in abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
				if calls.Add(1) > 70_000 {
					return abi.Span{}, nil
				}
				return in.Scan(r, s, d)
			}
		}()},
	} {
		t.Run(name, func(t *testing.T) {
			tw.Spec = specs.Window()
			s := subject(3000, 64, nil, part{"sliding", &tw, []uint64{20, 0}, 4, 2}, full(4, 4))
			ce := judge(t, s).Counterexample
			require.NotNil(t, ce)
			require.Equal(t, "pure", ce.Relation, ce.String())
		})
	}
}

// TestPoliciesMustBePure: a policy serves every group, and its state may show between two
// of them only.
func TestPoliciesMustBePure(t *testing.T) {
	var mu sync.Mutex
	last := uint64(0)
	p := &choosy{policy.RequestLevel(), func(r *abi.Round) bool {
		mu.Lock()
		defer mu.Unlock()
		other := last != 0 && last != r.ChunkTokens
		last = r.ChunkTokens
		return !other
	}}
	ce := judge(t, subject(400, 64, []abi.Spec{p}, window(20, 0, 4, 2), full(4, 4))).Counterexample
	require.NotNil(t, ce)
	require.Equal(t, "pure", ce.Relation, ce.String())
	require.Equal(t, "policy request-level", ce.Group)
}

// TestFreshInstancesAreFew: they are the dearest part of the check, so their number does
// not depend on the deployment's size, and each is given back.
func TestFreshInstancesAreFew(t *testing.T) {
	for _, longest := range []uint64{1, 100, 900} {
		s := subject(longest, 64, []abi.Spec{policy.RequestLevel()}, window(20, 0, 4, 2), full(4, 4))
		var mu sync.Mutex
		opened, open := map[int]int{}, 0
		s.Fresh = func(index int) (abi.Rule, func(), error) {
			m, release, err := s.Open()
			mu.Lock()
			defer mu.Unlock()
			opened[index]++
			open++
			rule := abi.Rule(nil)
			if index < len(m.Groups) {
				rule = m.Groups[index].Rule
			} else {
				rule = m.Policies[0].Rule
			}
			return rule, func() {
				mu.Lock()
				defer mu.Unlock()
				open--
				release()
			}, err
		}
		rep := judge(t, s)
		require.Nil(t, rep.Counterexample)
		require.Zero(t, open)
		require.Equal(t, map[int]int{0: 8, 1: 8, 2: 8}, opened)
	}
	s := subject(300, 64, nil, full(4, 4))
	s.Fresh = func(int) (abi.Rule, func(), error) { return nil, nil, fmt.Errorf("no more processes") }
	_, err := check.Run(context.Background(), s, check.Options{})
	require.EqualError(t, err, "open a fresh instance: no more processes")
}

// TestClockInTheSecondAnswer: a call that the clock ended decides nothing, also where it
// was answered before.
func TestClockInTheSecondAnswer(t *testing.T) {
	var calls atomic.Int64
	late := twisted{Spec: specs.Window(), need: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
		if calls.Add(1) == 20 {
			return tooLate{}
		}
		return in.Need(r, out)
	}}
	_, err := check.Run(context.Background(), subject(400, 64, nil, part{"sliding", &late, []uint64{20, 0}, 4, 2}, full(4, 4)), check.Options{Seed: 1, Workers: 1})
	require.ErrorContains(t, err, "need of sliding, chunks 0 to ")
	require.ErrorContains(t, err, ": still running")
}

func TestNearValues(t *testing.T) {
	m := specs.Window().Manifest()
	require.Equal(t, [][]uint64{{1, 0}, {40, 14}, {21, 7}, {20, 8}}, check.NearValues(m, []uint64{20, 7}))
	require.Equal(t, [][]uint64{{2, 0}, {1, 1}}, check.NearValues(m, []uint64{1, 0}))
	top := m.Params[0].Max
	require.Equal(t, [][]uint64{{1, 0}, {top - 1, 0}, {top, 1}}, check.NearValues(m, []uint64{top, 0}))
	require.Empty(t, check.NearValues(specs.Full().Manifest(), nil))
}
