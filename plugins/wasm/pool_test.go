package wasm

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs/module"
)

// shipped loads the embedded module.
func shipped(t testing.TB, o Options) *Module {
	t.Helper()
	bytes, err := module.Wasm()
	require.NoError(t, err)
	o.CacheDir = cacheDir
	m, err := Load(context.Background(), "shipped", bytes, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close(context.Background())) })
	return m
}

func specNamed(t testing.TB, m *Module, name string) abi.Spec {
	i := slices.IndexFunc(m.Specs(), func(s abi.Spec) bool { return s.Manifest().Name == name })
	require.GreaterOrEqual(t, i, 0)
	return m.Specs()[i]
}

// A question is one call, and everything it answered.
type question struct {
	rule   *rule
	round  abi.Round
	states abi.States
	fn     int
}

type reply struct {
	span abi.Span
	bits abi.Bitmap
	err  error
}

func (q *question) ask(r abi.Rule) (a reply) {
	a.bits = abi.NewBitmap(int(q.round.Hi))
	switch q.fn {
	case fnReach:
		a.err = r.Reach(q.round, a.bits)
	case fnScan:
		a.span, a.err = r.Scan(q.round, q.states, a.bits)
	case fnNeed:
		a.err = r.(abi.SpecRule).Need(q.round, a.bits)
	}
	return a
}

func drawQuestion(rnd *rand.Rand, rules []specRule) *question {
	n := 1 + rnd.IntN(200)
	text := uint64(n*16) - rnd.Uint64N(16)
	q := &question{
		rule: rules[rnd.IntN(len(rules))].rule,
		round: abi.Round{
			BlockTokens: 16, ChunkTokens: 16, PromptTokens: text, StoredTokens: text, ResumeTokens: rnd.Uint64N(text + 1),
			AlignTokens: 64 * rnd.Uint64N(4), BoundTokens: text, Hi: uint32(n),
		},
		states: abi.NewStates(n),
		fn:     []int{fnReach, fnScan, fnNeed}[rnd.IntN(3)],
	}
	for i := range n {
		q.states.Put(i, abi.State(min(1, rnd.IntN(4))))
	}
	return q
}

// poison has no chunk_tokens, by which the rules divide: a guest in Go panics. A host
// asks no such thing, see abi.Round.Validate.
var poison = abi.Round{Hi: 8, StoredTokens: 8}

// Whatever order the calls come in, and whichever instance answers them, the answer is
// that of a fresh instance, also while instances die under it.
func TestPoolAnswersAsAFreshInstance(t *testing.T) {
	m := shipped(t, Options{PoolMax: 4})
	var rules []specRule
	for _, p := range [][]uint64{{1, 0}, {128, 0}, {100, 33}} {
		r, err := specNamed(t, m, "window").Open(p)
		require.NoError(t, err)
		rules = append(rules, r.(specRule))
	}
	r, err := specNamed(t, m, "full").Open(nil)
	require.NoError(t, err)
	rules = append(rules, r.(specRule))

	rnd := rand.New(rand.NewPCG(1, 2))
	questions := make([]*question, 40)
	want := make([]reply, len(questions))
	for i := range questions {
		questions[i] = drawQuestion(rnd, rules)
		fresh, err := m.newInstance()
		require.NoError(t, err)
		want[i] = questions[i].ask(boundSpec{&bound{rule: questions[i].rule, in: fresh}})
		fresh.close()
		require.NoError(t, want[i].err)
	}

	var group sync.WaitGroup
	for g := range 8 {
		group.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 3))
			for range 400 {
				if g == 0 && rnd.IntN(40) == 0 {
					var trap *TrapError
					if err := r.Reach(poison, abi.NewBitmap(8)); !errors.As(err, &trap) {
						t.Errorf("poison: %v", err)
					}
				}
				i := rnd.IntN(len(questions))
				a := questions[i].ask(specRule{questions[i].rule})
				if a.err != nil || a.span != want[i].span || !a.bits.Equal(want[i].bits) {
					t.Errorf("question %d: %+v, fresh instance %+v", i, a, want[i])
					return
				}
			}
		})
	}
	group.Wait()
	require.LessOrEqual(t, len(m.pool.free), 4)
	require.Zero(t, m.pool.lent)
}

func TestGuestPanicPoisonsAndIsQuoted(t *testing.T) {
	m := shipped(t, Options{})
	r, err := specNamed(t, m, "full").Open(nil)
	require.NoError(t, err)
	in, err := m.pool.get()
	require.NoError(t, err)
	round := poison
	err = in.reach(r.(specRule).rule, &round, abi.NewBitmap(8))
	m.pool.put(in, isClean(err))
	var trap *TrapError
	require.ErrorAs(t, err, &trap)
	require.Contains(t, trap.Stderr, "panic: runtime error: integer divide by zero")
	require.Empty(t, m.pool.free)
	require.NoError(t, r.Reach(round8, abi.NewBitmap(8)))
}

// When PoolMax instances are out, a call waits for one to come back; a pin does not.
func TestPoolWaits(t *testing.T) {
	m := load(t, good(), Options{PoolMax: 2})
	r := open(t, m)
	synctest.Test(t, func(t *testing.T) {
		// The condition variable must belong to the bubble for its waits to be seen.
		m.pool.back = sync.Cond{L: &m.pool.mu}
		a, err := m.pool.get()
		require.NoError(t, err)
		b, err := m.pool.get()
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- r.Reach(round8, abi.NewBitmap(8)) }()
		synctest.Wait()
		require.Empty(t, done)

		p, release := r.(Pinner).Pin()
		require.NoError(t, p.Reach(round8, abi.NewBitmap(8)))
		release()
		synctest.Wait()
		require.Empty(t, done, "a pin that ends does not lend its instance")

		m.pool.put(a, true)
		require.NoError(t, <-done)
		m.pool.put(b, true)
	})
	require.Zero(t, m.pool.lent)
	require.Zero(t, m.pool.pinned)
	require.LessOrEqual(t, len(m.pool.free), 2)
	_, err := m.pool.get()
	require.NoError(t, err)
	m.pool.put(nil, false)
}

func TestMostRecentlyUsedFirst(t *testing.T) {
	m := load(t, good(), Options{})
	a, _ := m.pool.get()
	b, _ := m.pool.get()
	m.pool.put(a, true)
	m.pool.put(b, true)
	c, _ := m.pool.get()
	require.Same(t, b, c)
	m.pool.put(c, true)
}

// An instance that has opened many rules is replaced, because it cannot close any.
func TestHandlesAreBounded(t *testing.T) {
	a := good().manifest(`{"rules":[{"name":"t","version":"1","kind":"spec","mask":"causal","params":[{"name":"x","min":0,"max":100000}]}]}`)
	m := load(t, a, Options{})
	first := m.pool.free[0]
	for i := range uint64(instanceHandlesMax) {
		_, err := m.Specs()[0].Open([]uint64{i})
		require.NoError(t, err)
	}
	require.True(t, first.mod.IsClosed())
	r, err := m.Specs()[0].Open([]uint64{3})
	require.NoError(t, err)
	require.NotSame(t, first, m.pool.free[0])
	require.NoError(t, r.Reach(round8, abi.NewBitmap(8)))
	require.Len(t, m.rules.rules, instanceHandlesMax, "the same parameters are the same rule")
}

func TestPin(t *testing.T) {
	m := load(t, good().set("kv_scan", opUnreachable), Options{})
	r := open(t, m)
	p, release := r.(Pinner).Pin()
	_, isSpec := p.(abi.SpecRule)
	require.True(t, isSpec)
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)))
	require.Equal(t, 1, m.pool.pinned)
	_, err := p.Scan(round8, abi.NewStates(8), abi.NewBitmap(8))
	require.Error(t, err)
	require.Zero(t, m.pool.pinned, "a poisoned instance is given up at once")
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)), "and replaced by the next call")
	release()
	release() // nothing to release twice
	require.Zero(t, m.pool.pinned)
	require.EqualError(t, p.Reach(round8, abi.NewBitmap(8)), "rule t: used after its pin was released")
}

func TestClose(t *testing.T) {
	m, err := Load(context.Background(), "test", good().bytes(), Options{})
	require.NoError(t, err)
	r := open(t, m)
	p, release := r.(Pinner).Pin()
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)))

	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.EqualError(t, m.Close(ended), "wasm module test: close: context canceled")
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)), "a pin that is out still works")
	require.ErrorIs(t, r.Reach(round8, abi.NewBitmap(8)), ErrClosed)
	_, err = m.Specs()[0].Open(nil)
	require.EqualError(t, err, "rule t: wasm module is closed")

	done := make(chan error)
	go func() { done <- m.Close(context.Background()) }()
	release()
	require.NoError(t, <-done)
	p, release = r.(Pinner).Pin()
	require.ErrorIs(t, p.Reach(round8, abi.NewBitmap(8)), ErrClosed)
	release()
}

func TestCallsDoNotAllocate(t *testing.T) {
	m := shipped(t, Options{})
	r, err := specNamed(t, m, "window").Open([]uint64{128, 0})
	require.NoError(t, err)
	out, states := abi.NewBitmap(8), abi.NewStates(8)
	p, release := r.(Pinner).Pin()
	defer release()
	for _, rule := range []abi.SpecRule{r.(abi.SpecRule), p.(abi.SpecRule)} {
		require.Zero(t, testing.AllocsPerRun(50, func() {
			_ = rule.Reach(round8, out)
			_, _ = rule.Scan(round8, states, out)
			_ = rule.Need(round8, out)
		}))
	}
}
