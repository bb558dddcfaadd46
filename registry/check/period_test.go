package check_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/check"
)

var periodMutants = flag.Int("periods", 60, "deployments of the test of periods")

// TestPeriod: what the relations over edge lengths say of a deployment, most often one with
// a mistake in it, they say too when they run over every length; so the first periods, the
// last one and what lies next to a parameter stand for all.
func TestPeriod(t *testing.T) {
	n := *periodMutants
	if raceEnabled { // the goroutines are the same
		n /= 10
	}
	t.Logf("seed %d", *mixSeed)
	r := rand.New(rand.NewPCG(*mixSeed, 91))
	refused, spared := 0, 0
	for i := 0; i < n; {
		c := drawMutant(r)
		if c == nil {
			continue
		}
		period, shipped := max(1, c.mix.align), true
		for _, h := range c.mix.groups {
			_, invented := h.spec.(*unshipped) // made for short prompts
			shipped = shipped && !invented
			period = common(period, h.block*h.blocks)
			if name := h.spec.Manifest().Name; name == "chunked" || name == "latent" {
				period = common(period, h.params[0])
			}
		}
		if !shipped || period > 10 { // mistakes are made in prompts of at most 64 chunks
			continue
		}
		i++
		c.mix.longest = max(6*period, 40)
		s, o := c.mix.subject(), check.Options{Seed: *mixSeed}.WithTables(2)
		some, few, err := check.RunOver(context.Background(), s, o, false)
		require.NoError(t, err)
		every, all, err := check.RunOver(context.Background(), s, o, true)
		require.NoError(t, err)
		require.Equal(t, every == nil, some == nil, "%s in %s, %s, period %d:\nover all lengths: %v\nover the edges: %v", c.mutation, c.rule, c.mix.String(), period, every, some)
		if every != nil {
			refused++
		}
		if few < all {
			spared++
		}
	}
	t.Logf("%d of %d refused; in %d of them lengths are left out", refused, n, spared)
	require.NotZero(t, refused)
	require.Greater(t, n, refused)
	require.NotZero(t, spared)
}
