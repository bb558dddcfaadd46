package stock

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/vllm"
)

// An engine that is accepted, with one thing gone wrong in it, is refused by the relation
// that is about that thing. Some of these vLLM itself never does.
func TestControls(t *testing.T) {
	limit := uint64(1 << 20) // a cap that is never reached
	e := deploy.StockEngine{PromptOnly: true, SharedWrites: true, MaxOffload: &limit}
	s := sideWith(t, 4, 8, e, vllm.Group{Kind: vllm.Full, BlockTokens: 16})
	c := s.rules.Config()
	c.Policy = vllm.RequestLevel
	s, err := sideOf(c, e, []string{"full", "sliding"})
	require.NoError(t, err)

	forgets := func(when func(c *vllm.Case) bool) func(r *run) {
		return func(r *run) {
			r.supply = func(c vllm.Case) ([]abi.Bitmap, error) {
				sets, err := s.rules.Supply(c)
				if when(&c) {
					sets[0] = nil
				}
				return sets, err
			}
		}
	}
	asks := func(change func(a *vllm.Ask, tiers *vllm.Tiers, d *vllm.Demand)) func(r *run) {
		return func(r *run) {
			r.demand = func(a vllm.Ask, tiers vllm.Tiers) (vllm.Demand, error) {
				d, err := s.rules.Demand(a, tiers)
				change(&a, &tiers, &d)
				return d, err
			}
		}
	}
	beyond := func(d *vllm.Demand) { d.Groups[0] = abi.Bitmap{1 << 40} }
	for _, k := range []struct {
		name, relation string
		wrong          func(r *run)
	}{
		{"nothing", "", func(*run) {}},
		{"supplies nothing of a prompt of 40", "covers", forgets(func(c *vllm.Case) bool { return c.PromptTokens == 40 })},
		{"asks for more when its GPU holds a prefix", "covers", asks(func(a *vllm.Ask, _ *vllm.Tiers, d *vllm.Demand) {
			if a.LocalTokens > 0 {
				beyond(d)
			}
		})},
		{"asks for more when chunks come late", "covers", asks(func(_ *vllm.Ask, tiers *vllm.Tiers, d *vllm.Demand) {
			if tiers.Arrive != nil {
				beyond(d)
			}
		})},
		{"asks for more when its primary holds a prefix", "covers", asks(func(_ *vllm.Ask, tiers *vllm.Tiers, d *vllm.Demand) {
			if tiers.Primary != nil {
				beyond(d)
			}
		})},
		{"loads what it did not look up", "needs", asks(func(a *vllm.Ask, _ *vllm.Tiers, d *vllm.Demand) {
			if a.LocalTokens == 32 {
				d.Unready[1] = abi.Bitmap{2}
			}
		})},
		{"forgets in steps", "schedule", forgets(func(c *vllm.Case) bool { return c.StepTokens > 0 })},
		{"forgets when it generates", "schedule", forgets(func(c *vllm.Case) bool { return c.GeneratedTokens > 0 })},
		{"forgets what its GPU holds", "warm", forgets(func(c *vllm.Case) bool { return c.Warm.GPUTokens == 48 })},
		{"forgets what it loaded", "warm", forgets(func(c *vllm.Case) bool { return c.Warm.LoadedTokens > 0 })},
		{"forgets what its primary holds", "warm", forgets(func(c *vllm.Case) bool {
			return c.Warm.Primary != nil && c.Warm.Primary(vllm.Key{}) == abi.Hit
		})},
		{"drops what is being written", "cascade", forgets(func(c *vllm.Case) bool {
			return c.Warm.Primary != nil && c.Warm.Primary(vllm.Key{}) == abi.Pending
		})},
		{"takes every cap for 0", "caps", forgets(func(c *vllm.Case) bool { return c.MaxOffloadTokens.Set })},
		{"fetches the window's whole prefix", "states", asks(func(_ *vllm.Ask, _ *vllm.Tiers, d *vllm.Demand) {
			for _, round := range d.Rounds {
				if n := len(round[1]); n > 0 {
					round[1].SetRange(0, min(5, 64*n))
				}
			}
		})},
	} {
		t.Run(k.name, func(t *testing.T) {
			r, err := newRun(direction{"", s, s}, 4096, Options{})
			require.NoError(t, err)
			k.wrong(r)
			require.NoError(t, r.all(t.Context()))
			if k.relation == "" {
				require.Nil(t, r.found)
				counts := r.counts()
				for _, name := range Relations {
					require.NotZero(t, counts[name], name)
				}
				return
			}
			require.NotNil(t, r.found)
			require.Equal(t, k.relation, r.found.Relation, r.found.String())
		})
	}
}
