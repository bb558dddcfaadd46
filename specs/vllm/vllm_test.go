package vllm

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
)

func full(block uint64) Group { return Group{Kind: Full, BlockTokens: block} }

func swa(block, window uint64) Group {
	return Group{Kind: SlidingWindow, BlockTokens: block, WindowTokens: window}
}

func chunked(block, attention uint64) Group {
	return Group{Kind: ChunkedLocal, BlockTokens: block, WindowTokens: attention}
}

func mamba(mode MambaMode, block uint64) Group {
	return Group{Kind: Mamba, Mode: mode, BlockTokens: block}
}

func eagle(g Group) Group { g.Eagle = true; return g }

// producerLeg is a configuration that passes on all that it holds, as a producer must.
func producerLeg(rev Revision, groups ...Group) Config {
	c := Defaults(rev, groups...)
	c.Policy = RequestLevel
	return c
}

func dense(c Config) Config { c.RetentionTokens = Optional{}; return c }

func retry(c Config) Config { c.Promotion = PromotionRetry; return c }

func mustNew(t testing.TB, c Config) *Rules {
	t.Helper()
	r, err := New(c)
	require.NoError(t, err)
	return r
}

func meet(t testing.TB, c Config, k Case) *Meeting {
	t.Helper()
	m, err := mustNew(t, c).Meet(k)
	require.NoError(t, err)
	return m
}

// ranges writes the sets of all groups.
func ranges(sets []abi.Bitmap) string {
	var s []string
	for _, b := range sets {
		s = append(s, Ranges(b))
	}
	return strings.Join(s, " ")
}

// The worked example of a segment: 9 chunks of 4 under full chunks of 16, window 8.
func TestReachExample(t *testing.T) {
	for _, c := range []struct {
		group Group
		want  string
	}{
		{swa(4, 8), "{0-1} {2-3, 6-8}"},
		{eagle(swa(4, 8)), "{0-1} {1-3, 5-8}"},
	} {
		sets, err := mustNew(t, Defaults(RevA, full(16), c.group)).Supply(Case{PromptTokens: 36})
		require.NoError(t, err)
		require.Equal(t, c.want, ranges(sets))
	}
}

// The answers of the sliding scan, window 2 unless said: end, or deferred, in both
// revisions, and the number of lookups.
func TestScanExamples(t *testing.T) {
	for _, c := range []struct {
		states string
		window int
		a, b   string
		n      int
	}{
		{"HHHH", 2, "4", "4", 2}, {"PPPP", 2, "deferred", "deferred", 2},
		{"RRRR", 2, "deferred", "deferred", 4}, {"HRHH", 2, "4", "4", 2},
		{"HHRH", 2, "deferred", "deferred", 4}, {"HHMP", 2, "deferred", "2", 4},
		{"HMH", 2, "1", "1", 3}, {"MHHH", 3, "4", "4", 3},
		// Three of the same answer under a window of 1.
		{"HHH", 1, "3", "3", 1}, {"PPP", 1, "deferred", "deferred", 1},
		{"RRR", 1, "deferred", "deferred", 3}, {"MMM", 1, "0", "0", 3},
	} {
		for rev, want := range map[Revision]string{RevA: c.a, RevB: c.b} {
			states, err := abi.ParseStates(c.states)
			require.NoError(t, err)
			n := 0
			end, deferred := slidingScan(rev, 0, len(c.states), c.window, c.window, func(i int) abi.State { n++; return states.At(i) })
			got := fmt.Sprint(end)
			if deferred {
				got = "deferred"
			}
			require.Equal(t, want, got, "%s in %s", c.states, rev)
			require.Equal(t, c.n, n, "%s in %s", c.states, rev)
		}
	}
}

// The worked example of a lookup: a hit may end inside a chunk, and the rightmost window
// moves with it.
func TestMatchExample(t *testing.T) {
	c := Defaults(RevA, full(16), swa(4, 8))
	m := meet(t, c, Case{PromptTokens: 64})
	require.Equal(t, "{0-3} {14-15}", ranges(m.Groups))
	require.Equal(t, uint64(63), m.Tokens)
	require.Equal(t, 2, m.Steps)
	require.Equal(t, "{0-3} {14-15}", ranges(m.Loaded))
	m = meet(t, c, Case{PromptTokens: 70})
	require.Equal(t, "{0-3} {14-15}", ranges(m.Groups))
	require.Equal(t, uint64(64), m.Tokens)
}

// A drafter's group gives up a chunk once per end of the hit: when another kind of group
// lowers the end, it does so again, and window groups are looked up once more.
func TestMatchRounds(t *testing.T) {
	for _, rev := range []Revision{RevA, RevB} {
		var calls []Key
		m := mustNew(t, Defaults(rev, swa(4, 8), eagle(swa(4, 16)))).Match(Ask{TextTokens: 41}, func(k Key) abi.State {
			calls = append(calls, k)
			if k == (Key{0, 8}) {
				return abi.Miss
			}
			return abi.Hit
		})
		require.Equal(t, uint64(32), m.Tokens)
		require.Equal(t, []Key{
			{1, 9}, {1, 8}, {1, 7}, {1, 6}, {1, 5}, // the widest first; one is given up: 36
			{0, 8}, {0, 7}, {0, 6}, // 32
			{1, 8}, {1, 7}, {1, 6}, {1, 5}, {1, 4},
			{0, 7}, {0, 6},
		}, calls, rev)
	}
}

// Rev B asks for the chunk that is given up in prefix groups too.
func TestEagleWidening(t *testing.T) {
	for rev, want := range map[Revision]uint64{RevA: 48, RevB: 64} {
		require.Equal(t, want, meet(t, Defaults(rev, full(32), eagle(full(16))), Case{PromptTokens: 80}).Tokens, rev)
	}
}

// The first window of rev B ends where the hit ends once the drafter's chunk is given up.
func TestFirstWindow(t *testing.T) {
	m := meet(t, dense(producerLeg(RevB, full(12), swa(8, 8))), Case{PromptTokens: 64})
	require.Equal(t, "{0-4} {6-7}", ranges(m.Rounds[0]), "a hit of 60 tokens reads from token 53 on")
	m = meet(t, dense(producerLeg(RevB, full(12), eagle(swa(8, 8)))), Case{PromptTokens: 64})
	require.Equal(t, "{0-4} {6-7}", ranges(m.Rounds[0]), "chunk 7 is given up, so the hit ends at 56")
	m = meet(t, dense(producerLeg(RevB, full(12), eagle(swa(8, 8)))), Case{PromptTokens: 72})
	require.Equal(t, "{0-5} {7-8}", ranges(m.Rounds[0]))
}

// max_load_tokens ends a hit on a chunk, of every group that is looked up after it.
func TestMaxLoad(t *testing.T) {
	r := mustNew(t, Defaults(RevB, full(4)))
	for limit, want := range map[uint64]uint64{0: 0, 3: 0, 4: 4, 30: 28, 100: 68} {
		d, err := r.Demand(Ask{TextTokens: 70, MaxLoadTokens: Some(limit)}, Tiers{})
		require.NoError(t, err)
		require.Equal(t, want, d.Tokens, "limit %d", limit)
	}
}

// Rev A counts every group as a drafter's when speculation is on and none is marked.
func TestSpeculativeWithoutMark(t *testing.T) {
	for _, rev := range []Revision{RevA, RevB} {
		c := producerLeg(rev, full(16), full(16))
		c.Speculative, c.PromptOnly = true, false
		sets, err := mustNew(t, c).Supply(Case{PromptTokens: 30, GeneratedTokens: 18})
		require.NoError(t, err)
		want := "{0-1} {0-1}" // the text of 48 tokens has 47 computed ones
		require.Equal(t, want, ranges(sets), rev)
		c.Groups[0].Eagle = true
		sets, err = mustNew(t, c).Supply(Case{PromptTokens: 30, GeneratedTokens: 18})
		require.NoError(t, err)
		if rev == RevA { // only the marked group holds its last chunk back
			want = "{0-1} {0-2}"
		}
		require.Equal(t, want, ranges(sets), rev)
	}
}

func TestPeriod(t *testing.T) {
	require.Equal(t, uint64(16), mustNew(t, Defaults(RevA, full(16), swa(4, 9))).PeriodTokens())
	require.Equal(t, uint64(24), mustNew(t, Defaults(RevA, full(12), swa(8, 9))).PeriodTokens())
	require.Equal(t, uint64(96), mustNew(t, Defaults(RevB, full(16), chunked(16, 96))).PeriodTokens())
	c := Defaults(RevB, full(16), swa(4, 8))
	c.RetentionTokens = Some(32)
	require.Equal(t, uint64(32), mustNew(t, c).PeriodTokens())
	require.Equal(t, uint64(160), mustNew(t, Defaults(RevA, full(40), swa(16, 16))).PeriodTokens(), "segments of 32")
	require.Equal(t, uint64(abi.MaxTokens), mustNew(t, Defaults(RevA, full(1<<30-1), full(1<<30), full(1<<30+1))).PeriodTokens())
}

// Whether a cold meeting has a hole repeats with the period, once the prompt is longer than
// a few periods and every window.
func TestHolesRepeat(t *testing.T) {
	interval := producerLeg(RevB, full(16), swa(4, 8))
	interval.RetentionTokens = Some(32)
	for _, c := range append([]Config{
		interval, producerLeg(RevA, full(40), swa(16, 16)), producerLeg(RevA, full(12), swa(8, 8)),
		producerLeg(RevA, eagle(full(16)), eagle(swa(4, 8))), producerLeg(RevB, full(64), swa(16, 17)),
		producerLeg(RevB, full(16), mamba(MambaAlign, 16)),
	}, producers...) {
		r := mustNew(t, c)
		period := r.PeriodTokens()
		for p := 3*period + 64; p < 4*period+64; p++ {
			near, err := r.Meet(Case{PromptTokens: p})
			require.NoError(t, err)
			far, err := r.Meet(Case{PromptTokens: p + period})
			require.NoError(t, err)
			require.Equal(t, near.Hole(), far.Hole(), "%s\n%s", near, far)
		}
	}
}

// BenchmarkMeet lets a prompt of 131,072 tokens meet, with chunks of 16 and of 128.
func BenchmarkMeet(b *testing.B) {
	for _, block := range []uint64{16, 128} {
		b.Run(fmt.Sprint(block), func(b *testing.B) {
			r := mustNew(b, producerLeg(RevB, full(block), swa(block, 1024)))
			for b.Loop() {
				if _, err := r.Meet(Case{PromptTokens: 131072}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
