package registry_test

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// A crowd is a rule that wants many callers at once, and can be bound to one.
type crowd struct {
	abi.Spec
	opened       *atomic.Int32
	pinned, most *atomic.Int32
}

type crowdRule struct {
	abi.SpecRule
	crowd
}

const crowdSize = 100

func (c crowd) Open(params []uint64) (abi.Rule, error) {
	c.opened.Add(1)
	r, err := c.Spec.Open(params)
	return crowdRule{r.(abi.SpecRule), c}, err
}

func (crowdRule) Concurrency() int { return crowdSize }

func (r crowdRule) Pin() (abi.Rule, func()) {
	n := r.pinned.Add(1)
	r.most.Store(max(n, r.most.Load())) // opened by one goroutine
	return r.SpecRule, func() { r.pinned.Add(-1) }
}

// TestConcurrency: the check has as many workers as a rule wants, and a rule that is bound
// to its caller no more instances than run at a time; the verdict is the same.
func TestConcurrency(t *testing.T) {
	for _, workers := range []int{0, crowdSize / 2, 2 * crowdSize} {
		var opened, pinned, most atomic.Int32
		open := func(ctx context.Context, dir, ref string) (registry.Opened, error) {
			o, err := native(ctx, dir, ref)
			if ref == "full" {
				o.Spec = crowd{o.Spec, &opened, &pinned, &most}
			}
			return o, err
		}
		e, err := registry.Register(context.Background(), parse(t, file), open, registry.Options{Check: check.Options{Workers: workers}})
		require.NoError(t, err)
		require.Equal(t, registry.Accepted, e.Verdict.Verdict)
		require.GreaterOrEqual(t, int(opened.Load()), 2*max(workers, crowdSize), "each worker opens the rules twice")
		require.Zero(t, pinned.Load(), "all are released")
		require.Positive(t, most.Load())
		require.LessOrEqual(t, int(most.Load()), 2*runtime.GOMAXPROCS(0)+1)
	}
}
