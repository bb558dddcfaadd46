package check_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
	"pgregory.net/rapid"
)

// named gives a subject a name and both roles.
func named(name string, s check.Subject) check.Subject {
	s.Name, s.Produces, s.Consumes = name, true, true
	return s
}

// storing sets a subject's store cap.
func storing(tokens uint64, s check.Subject) check.Subject {
	open := s.Open
	s.Open = func() (plan.Model, func(), error) {
		m, release, err := open()
		m.MaxStoreTokens = tokens
		return m, release, err
	}
	return s
}

func against(t *testing.T, a, b check.Subject) *check.Report {
	t.Helper()
	rep, err := check.Pair(context.Background(), named("a", a), named("b", b), check.Options{Seed: 1})
	require.NoError(t, err)
	return rep
}

// refusedWays lists the ways that are refused, as "producer to consumer".
func refusedWays(rep *check.Report) []string {
	ways := []string{}
	for _, w := range rep.Ways {
		if w.Counterexample != nil {
			ways = append(ways, w.Producer+" to "+w.Consumer)
		}
	}
	return ways
}

// TestPairOfOneVersion: a deployment against itself is accepted exactly when its own demand
// is covered: by covers, caps for a consumer, and warm.
func TestPairOfOneVersion(t *testing.T) {
	for _, c := range controls() {
		switch c.name { // a producer that keeps less than a cold one is refused by itself
		case "keeps no aligned tails where it is told a junction", "a policy keeps no aligned tails of what it was offered before":
			continue
		}
		switch c.relation {
		case "covers", "warm", "content", "useful", "schedule", "width":
		case "caps":
			if c.name == "stores the tail of the prompt's end, where the engine caps a request" {
				continue // leg probe
			}
		default: // a rule that breaks the laws means nothing in a pair
			continue
		}
		t.Run(c.relation+", "+c.name, func(t *testing.T) {
			rep := against(t, c.s, c.s)
			if c.relation != "covers" && c.relation != "warm" && c.relation != "caps" {
				require.Nil(t, rep.Counterexample, "%v", rep.Counterexample)
				return
			}
			require.NotNil(t, rep.Counterexample)
			require.Equal(t, check.PairRelation, rep.Counterexample.Relation)
			require.Len(t, refusedWays(rep), 2)
		})
	}
	rep := against(t, subject(300, 48, nil, window(9, 0, 4, 2), full(4, 4)), subject(300, 48, nil, window(9, 0, 4, 2), full(4, 4)))
	require.Nil(t, rep.Counterexample, "%v", rep.Counterexample)
	for _, w := range rep.Ways {
		require.Positive(t, w.Cases)
		require.Positive(t, w.Probes)
		require.Zero(t, w.Earlier)
	}
}

// TestPairOfTwoVersions: the negative controls of relation pair. Each side is sound alone.
func TestPairOfTwoVersions(t *testing.T) {
	base := subject(400, 64, nil, window(20, 0, 4, 2), full(4, 4))
	limit := func(tokens uint64) check.Subject {
		return subject(400, 64, []abi.Spec{firstTokens(tokens)}, window(20, 0, 4, 2), full(4, 4))
	}
	for name, c := range map[string]struct {
		a, b    check.Subject
		refused []string
	}{
		"a wider window":                         {base, subject(400, 64, nil, window(40, 0, 4, 2), full(4, 4)), []string{"a to b"}},
		"extra tokens":                           {base, subject(400, 64, nil, window(20, 9, 4, 2), full(4, 4)), []string{"a to b"}},
		"another rule":                           {base, subject(400, 64, nil, part{"sliding", specs.Sink(), []uint64{4, 20}, 4, 2}, full(4, 4)), []string{"a to b"}},
		"no aligned points":                      {base, subject(400, 0, nil, window(20, 0, 4, 2), full(4, 4)), []string{"b to a"}},
		"other aligned points":                   {base, subject(400, 48, nil, window(20, 0, 4, 2), full(4, 4)), []string{"a to b", "b to a"}},
		"a store cap":                            {base, storing(100, subject(400, 64, nil, window(20, 0, 4, 2), full(4, 4))), []string{"a to b", "b to a"}},
		"a store cap, all kept":                  {subject(400, 0, nil, full(4, 4)), storing(100, subject(400, 0, nil, full(4, 4))), []string{"b to a"}},
		"a policy that caps":                     {base, limit(100), []string{"a to b", "b to a"}},
		"a policy that caps at an aligned point": {base, limit(128), []string{"b to a"}},
		"a policy for decoding":                  {base, subject(400, 64, []abi.Spec{policy.PromptOnly()}, window(20, 0, 4, 2), full(4, 4)), nil},
		"a policy for all":                       {base, subject(400, 64, []abi.Spec{policy.RequestLevel()}, window(20, 0, 4, 2), full(4, 4)), nil},
		"only what is new":                       {base, subject(400, 64, []abi.Spec{policy.ChunkLevel()}, window(20, 0, 4, 2), full(4, 4)), []string{"b to a"}},
		"a longer prompt":                        {base, subject(600, 64, nil, window(20, 0, 4, 2), full(4, 4)), nil},
		"states, saved at stops":                 {subject(300, 0, nil, part{"s", specs.State(), []uint64{0}, 8, 1}, full(4, 4)), subject(300, 0, nil, part{"s", specs.State(), []uint64{1}, 8, 1}, full(4, 4)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			rep := against(t, c.a, c.b)
			require.ElementsMatch(t, c.refused, refusedWays(rep), "%v", rep.Counterexample)
			if len(c.refused) > 0 {
				require.Equal(t, check.PairRelation, rep.Counterexample.Relation)
				golden(t, "pair-"+name, rep.Counterexample.String())
			}
			require.LessOrEqual(t, rep.Domain.PromptTokens, uint64(400))
		})
	}
}

// TestPairProbeIsReported: a consumer that finds less than in its own version's supply is
// no failure, but is counted, whether leg pd is used or not.
func TestPairProbeIsReported(t *testing.T) {
	for _, pd := range []bool{true, false} {
		a, b := subject(300, 0, nil, window(20, 0, 4, 2), full(4, 4)), subject(300, 0, nil, window(40, 0, 4, 2), full(4, 4))
		a.PD, b.PD = pd, pd
		rep := against(t, a, b)
		require.Equal(t, pd, rep.Counterexample != nil)
		narrow, wide := rep.Ways[0], rep.Ways[1] // the producer's window
		require.Equal(t, pd, narrow.Cases > 0)
		require.Equal(t, narrow.Probes, wide.Probes)
		require.Greater(t, narrow.Earlier, narrow.Probes/2)
		require.Less(t, narrow.Earlier, narrow.Probes, "short prompts have no tail")
		require.Zero(t, wide.Earlier)
	}
}

// TestPairCannotJudge: what is no pair is an error.
func TestPairCannotJudge(t *testing.T) {
	base := subject(100, 0, nil, window(20, 0, 4, 2), full(4, 4))
	for want, b := range map[string]check.Subject{
		"a and b: 2 and 1 groups; they must be equal": subject(100, 0, nil, full(4, 4)),
		"a and b: group 0 is sliding with blocks of 4 and chunks of 8 tokens, and sliding with 4 and 16; they must be equal": subject(100, 0, nil, window(20, 0, 4, 4), full(4, 4)),
		"b: open rules: out of cheese": {MaxTokens: 9, Open: func() (plan.Model, func(), error) { return plan.Model{}, nil, errors.New("out of cheese") }},
	} {
		_, err := check.Pair(context.Background(), named("a", base), named("b", b), check.Options{})
		require.EqualError(t, err, want)
	}
	a, b := named("a", base), named("b", base)
	a.Consumes, b.Consumes = false, false
	_, err := check.Pair(context.Background(), a, b, check.Options{})
	require.EqualError(t, err, "roles: neither a nor b can be the producer of the other")
	b.Consumes = true
	rep, err := check.Pair(context.Background(), a, b, check.Options{})
	require.NoError(t, err)
	require.Len(t, rep.Ways, 1)
	require.Equal(t, "a", rep.Ways[0].Producer)
}

// TestPairBudget: a pair whose time is spent is undecided, never accepted.
func TestPairBudget(t *testing.T) {
	base := named("a", subject(2000, 64, nil, window(20, 0, 4, 2), full(4, 4)))
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	rep, err := check.Pair(ctx, base, base, check.Options{Workers: 1, Progress: func(done, total int) {
		if done > total*2/3 {
			cancel(check.ErrBudget)
		}
	}})
	require.NoError(t, err)
	require.True(t, rep.Undecided)
	require.False(t, rep.Ways[0].Undecided)
	require.True(t, rep.Ways[1].Undecided)
	require.NotEmpty(t, rep.Reached)
}

// side is a deployment of a window and full attention, in plain numbers.
type side struct{ window, extra, align, stored uint64 }

const (
	bruteWindowChunk = 8
	bruteFullChunk   = 12
	bruteTokens      = 110
)

func (d side) subject() check.Subject {
	return storing(d.stored, subject(bruteTokens, d.align, nil, window(d.window, d.extra, 4, 2), full(4, 3)))
}

func (d side) cap(n uint64) uint64 {
	if d.stored > 0 {
		return min(n, d.stored)
	}
	return n
}

// resume is the highest token up to bound whose last chunk is complete in both groups.
func (d side) resume(prompt, bound, local uint64) uint64 {
	for n := bound; n > local; n-- {
		ok := true
		for _, ct := range []uint64{bruteWindowChunk, bruteFullChunk} {
			if ct == bruteWindowChunk && d.window+d.extra == 1 {
				continue // nothing behind the token is read
			}
			ok = ok && (n-1)/ct*ct+ct <= d.cap(prompt)
		}
		if ok {
			return n
		}
	}
	return local
}

// tail lists the window's chunks that going on from n reads or claims.
func (d side) tail(n uint64) (chunks []uint64) {
	for k := n - min(n, d.window-1+d.extra); k < n; k++ {
		chunks = append(chunks, k/bruteWindowChunk)
	}
	return slices.Compact(chunks)
}

// supplies and demands are sets of "group chunk".
func (d side) supplies(prompt uint64) map[string]bool {
	set := map[string]bool{}
	points := []uint64{d.resume(prompt, min(prompt-1, d.cap(prompt)), 0)}
	for n := d.align; d.align > 0 && n <= d.cap(prompt); n += d.align {
		points = append(points, n)
	}
	for _, n := range points {
		for _, c := range d.tail(n) {
			set[fmt.Sprint("sliding ", c)] = true
		}
	}
	for c := uint64(0); (c+1)*bruteFullChunk <= d.cap(prompt); c++ {
		set[fmt.Sprint("full ", c)] = true
	}
	return set
}

func (d side) demands(prompt, local, loadCap uint64) map[string]bool {
	set := map[string]bool{}
	n := d.resume(prompt, min(prompt-1, d.cap(prompt)), local)
	if loadCap > 0 && n > max(loadCap, local) {
		n = 0
		if d.align > 0 {
			n = loadCap / d.align * d.align
		}
	}
	if n <= local {
		return set
	}
	for _, c := range d.tail(n) {
		if c >= local/bruteWindowChunk {
			set[fmt.Sprint("sliding ", c)] = true
		}
	}
	for c := local / bruteFullChunk; c*bruteFullChunk < n; c++ {
		set[fmt.Sprint("full ", c)] = true
	}
	return set
}

func missing(producer, consumer side, prompt, local, loadCap uint64) (out []string) {
	have := producer.supplies(prompt)
	for k := range consumer.demands(prompt, local, loadCap) {
		if !have[k] {
			out = append(out, k)
		}
	}
	return out
}

func bruteRefuses(producer, consumer side) bool {
	for p := uint64(1); p <= bruteTokens; p++ {
		have := producer.supplies(p)
		for l := range p {
			for load := range p {
				if l > 0 && load > 0 && load%8 > 1 {
					continue // the load cap only matters by its aligned point
				}
				for k := range consumer.demands(p, l, load) {
					if !have[k] {
						return true
					}
				}
			}
		}
	}
	return false
}

// TestPairAgainstBruteForce: drawn pairs of versions, both ways, against a model that knows
// tokens and nothing of the planner. A counterexample's missing chunks are missing there.
func TestPairAgainstBruteForce(t *testing.T) {
	outcomes := map[bool]int{}
	draw := func(t *rapid.T, who string) side {
		return side{
			window: rapid.SampledFrom([]uint64{1, 2, 8, 9, 10, 17, 30}).Draw(t, who+" window"),
			extra:  rapid.SampledFrom([]uint64{0, 0, 1, 8}).Draw(t, who+" extra"),
			align:  rapid.SampledFrom([]uint64{0, 24, 48, 72}).Draw(t, who+" align"),
			stored: rapid.SampledFrom([]uint64{0, 0, 24, 47, 70}).Draw(t, who+" stored"),
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		a := draw(t, "a")
		b := a
		if rapid.Bool().Draw(t, "one change") {
			c := draw(t, "b")
			switch rapid.IntRange(0, 3).Draw(t, "which") {
			case 0:
				b.window = c.window
			case 1:
				b.extra = c.extra
			case 2:
				b.align = c.align
			case 3:
				b.stored = c.stored
			}
		} else {
			b = draw(t, "b")
		}
		rep, err := check.Pair(context.Background(), named("a", a.subject()), named("b", b.subject()), check.Options{Seed: 1})
		require.NoError(t, err)
		for i, w := range [][2]side{{a, b}, {b, a}} {
			want := bruteRefuses(w[0], w[1])
			outcomes[want]++
			ce := rep.Ways[i].Counterexample
			require.Equal(t, want, ce != nil, "producer %+v, consumer %+v: %v", w[0], w[1], ce)
			if ce == nil || ce.States != "" {
				continue
			}
			var got []string
			for _, r := range ce.Missing {
				for c := r.First; c <= r.Last; c++ {
					got = append(got, fmt.Sprint(ce.Group, " ", c))
				}
			}
			require.Subset(t, missing(w[0], w[1], ce.PromptTokens, ce.LocalTokens, ce.LoadCapTokens), got, ce.String())
		}
	})
	require.Greater(t, outcomes[true], 20)
	require.Greater(t, outcomes[false], 20)
}

// The period that a verdict on a pair states is that of both, and all lengths of its first
// three are run when it says so.
func TestPairPeriodIsThatOfBoth(t *testing.T) {
	a, b := subject(2000, 48, nil, window(20, 0, 4, 2), full(4, 4)), subject(2000, 80, nil, window(20, 0, 4, 2), full(4, 4))
	rep, err := check.Pair(context.Background(), named("a", a), named("b", b), check.Options{Seed: 1})
	require.NoError(t, err)
	require.EqualValues(t, 240, rep.Domain.PeriodTokens)
	require.True(t, rep.Domain.EdgeExhaustive)
	require.GreaterOrEqual(t, rep.Domain.EdgeLengths, 4*240)
}
