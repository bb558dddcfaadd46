package stock

import (
	"context"
	"fmt"
	"strings"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// Against judges two deployments of stock engines as they meet while a fleet is upgraded
// node by node: a producer of a with a consumer of b, and then the other way round. The
// verdict is a's, with b as its Against. An error means that there is none: also when the
// two have no key in common, so that nothing of one is ever found by the other.
func Against(ctx context.Context, a, b *deploy.Deployment, o Options) (*registry.Verdict, error) {
	if err := Comparable(a, b); err != nil {
		return nil, err
	}
	x, err := newSide(a)
	if err != nil {
		return nil, err
	}
	y, err := newSide(b)
	if err != nil {
		return nil, err
	}
	way := func(p, c *deploy.Deployment) string {
		return fmt.Sprintf("producer %s (%s), consumer %s (%s)", p.File(), p.Engine, c.File(), c.Engine)
	}
	return verdict(ctx, a, b, []direction{{way(a, b), x, y}, {way(b, a), y, x}}, o)
}

// Comparable reports why two deployments have no key in common, if they have none: an
// engine names a chunk by its own hashes, and two sides find each other's only when model,
// granule and chunks are equal.
func Comparable(a, b *deploy.Deployment) error {
	if a.IsStock() != b.IsStock() {
		return fmt.Errorf("%s is of engine %s and %s of engine %s; their keys are made differently, so they have none in common and exchange nothing", a.File(), a.Engine, b.File(), b.Engine)
	}
	if diff := a.Layout().Diff(b.Layout()); len(diff) > 0 {
		return fmt.Errorf("%s and %s have no key in common, because their layouts differ; here is the first, there the second: %s", a.File(), b.File(), strings.Join(diff, "; "))
	}
	return nil
}
