package vllm

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
)

// A promotion that takes several steps: the request is looked up again in each, and what
// is asked for stays the same.
func TestSlowPromotion(t *testing.T) {
	slow := Tiers{Arrive: func(k Key, wait int) abi.State {
		if wait < 3 {
			return abi.Pending
		}
		return abi.Hit
	}}
	for _, p := range []Promotion{PromotionPending, PromotionRetry} {
		c := Defaults(RevA, full(16), swa(4, 8))
		c.Promotion = p
		fast, err := mustNew(t, c).Demand(Ask{TextTokens: 70}, Tiers{})
		require.NoError(t, err)
		require.Equal(t, 2, fast.Steps)
		d, err := mustNew(t, c).Demand(Ask{TextTokens: 70}, slow)
		require.NoError(t, err)
		require.Equal(t, 4, d.Steps)
		require.Equal(t, ranges(fast.Groups), ranges(d.Groups), p)
		require.Equal(t, uint64(64), d.Tokens)
		require.Len(t, d.Rounds, 1)
	}
}

// One failed key costs its whole fetch, and the request loads nothing more from peers.
func TestFailedFetch(t *testing.T) {
	fail := func(bad Key) Tiers {
		return Tiers{Arrive: func(k Key, wait int) abi.State {
			switch {
			case k == bad && wait == 2:
				return abi.Miss
			case wait < 2 || k.Group == 1:
				return abi.Pending
			}
			return abi.Hit
		}}
	}
	c := Defaults(RevA, full(16), swa(4, 8))
	d, err := mustNew(t, c).Demand(Ask{TextTokens: 70}, fail(Key{1, 15}))
	require.NoError(t, err)
	require.True(t, d.Failed)
	require.Zero(t, d.Tokens)
	require.Equal(t, "{0-3} {14-15}", ranges(d.Groups))
	require.Equal(t, "{} {}", ranges(d.Loaded))
}

// What the consumer's own primary holds, or is being given, is not fetched.
func TestOwnPrimary(t *testing.T) {
	for _, pending := range []int{0, 3} {
		asked := map[Key]int{}
		own := Tiers{Primary: func(k Key) abi.State {
			if k.Group != 0 || k.Chunk > 1 {
				return abi.Miss
			}
			if asked[k]++; asked[k] <= pending {
				return abi.Pending
			}
			return abi.Hit
		}}
		d, err := mustNew(t, Defaults(RevA, full(16), swa(4, 8))).Demand(Ask{TextTokens: 70}, own)
		require.NoError(t, err)
		require.Equal(t, max(2, pending+1), d.Steps)
		require.Equal(t, "{2-3} {14-15}", ranges(d.Groups))
		require.Equal(t, "{0-3} {14-15}", ranges(d.Loaded))
		require.Equal(t, "{} {}", ranges(d.Unready))
	}
}

// A tier that does not know yet fetches nothing, and is asked until it knows.
func TestSecondaryRetry(t *testing.T) {
	asked := map[Key]int{}
	probe := Tiers{Secondary: func(k Key) abi.State {
		if asked[k]++; asked[k] == 1 {
			return abi.Retry
		}
		if k.Group == 0 && k.Chunk == 3 {
			return abi.Miss
		}
		return abi.Hit
	}}
	d, err := mustNew(t, Defaults(RevA, full(16), swa(4, 8))).Demand(Ask{TextTokens: 70}, probe)
	require.NoError(t, err)
	require.Equal(t, uint64(48), d.Tokens)
	require.Equal(t, "{0-2} {10-11, 14-15}", ranges(d.Groups), "the window below the first end was fetched too")

	never := Tiers{Secondary: func(Key) abi.State { return abi.Retry }}
	_, err = mustNew(t, Defaults(RevA, full(16))).Demand(Ask{TextTokens: 70}, never)
	require.EqualError(t, err, "vllm: a request of 70 tokens is still deferred after it was looked up 4096 times")
}

// A local prefix shortens what is asked for and loaded.
func TestLocalPrefix(t *testing.T) {
	d, err := mustNew(t, Defaults(RevA, full(16), swa(4, 8))).Demand(Ask{TextTokens: 70, LocalTokens: 32}, Tiers{})
	require.NoError(t, err)
	require.Equal(t, "{2-3} {14-15}", ranges(d.Groups))
	require.Equal(t, uint64(32), d.Tokens)
}

func TestDemandRefuses(t *testing.T) {
	r := mustNew(t, Defaults(RevA, full(16)))
	for _, c := range []struct {
		ask  Ask
		want string
	}{
		{Ask{}, "vllm: a request of 0 tokens; it must be 1 to 2147483648"},
		{Ask{TextTokens: 16, LocalTokens: 32}, "vllm: local prefix of 32 tokens, but the request has 16"},
		{Ask{TextTokens: 16, LocalTokens: 8}, "vllm: local prefix of 8 tokens ends inside a block of 16 tokens of group 0"},
		{Ask{TextTokens: 16, MaxLoadTokens: Some(8)}, "vllm: max_load_tokens is 8, but vllm-0.27 does not know it"},
	} {
		_, err := r.Demand(c.ask, Tiers{})
		require.EqualError(t, err, c.want)
	}
}

// Whatever the tiers answer: what is fetched was not in the primary and was a Hit of a
// secondary tier, what is loaded beyond that was in the primary, and the tokens are within
// the request. With a promotion that answers pending no more is fetched than with retry.
func TestDemandLaws(t *testing.T) {
	configs := append([]Config{
		producerLeg(RevA, eagle(full(16)), eagle(swa(4, 8))), producerLeg(RevB, eagle(full(16)), eagle(swa(4, 8))),
		producerLeg(RevA, full(16), full(32), swa(4, 8)), producerLeg(RevA, full(16), mamba(MambaAlign, 16)),
	}, producers...)
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.SampledFrom(configs).Draw(t, "config")
		text := rapid.Uint64Range(1, 200).Draw(t, "text")
		table := func(label string, of ...abi.State) Look {
			seed := rapid.Uint64().Draw(t, label)
			return func(k Key) abi.State {
				h := (seed ^ uint64(k.Group)<<32 ^ uint64(k.Chunk)) * 0x9e3779b97f4a7c15
				return of[h>>32%uint64(len(of))]
			}
		}
		tiers := Tiers{
			Primary:   table("primary", abi.Miss, abi.Miss, abi.Hit),
			Secondary: table("secondary", abi.Hit, abi.Hit, abi.Hit, abi.Hit, abi.Miss),
		}
		var fetched [2]int
		for i, p := range []Promotion{PromotionPending, PromotionRetry} {
			c.Promotion = p
			r, err := New(c)
			require.NoError(t, err)
			d, err := r.Demand(Ask{TextTokens: text}, tiers)
			require.NoError(t, err)
			require.LessOrEqual(t, d.Tokens, text)
			rounds := 0
			for g := range d.Groups {
				fetched[i] += d.Groups[g].Count()
				for k := d.Groups[g].Next(0); k >= 0; k = d.Groups[g].Next(k + 1) {
					require.Equal(t, abi.Miss, tiers.Primary(Key{g, k}))
					require.Equal(t, abi.Hit, tiers.Secondary(Key{g, k}))
				}
				beyond := minus(minus(d.Loaded[g], d.Groups[g]), d.Unready[g])
				for k := beyond.Next(0); k >= 0; k = beyond.Next(k + 1) {
					require.Equal(t, abi.Hit, tiers.Primary(Key{g, k}))
				}
				for _, round := range d.Rounds {
					rounds += round[g].Count()
				}
			}
			require.Equal(t, fetched[i], rounds, "every key is fetched once")
		}
		if c.Revision == RevA && len(c.Groups) == 2 {
			require.LessOrEqual(t, fetched[0], fetched[1])
		}
	})
}
