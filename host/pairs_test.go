package host

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/pairs"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// inWasm opens the rules as they serve, and takes them on trust.
func inWasm(ctx context.Context, d *deploy.Deployment, _ func(done, total int)) (*registry.Entry, func() error, error) {
	l := plugins.NewLoader(plugins.Options{BaseDir: d.Dir(), CacheDir: compiledDir})
	e, err := registry.Open(ctx, d, func(ctx context.Context, _, ref string) (registry.Opened, error) {
		p, err := l.Open(ctx, ref)
		if err != nil {
			return registry.Opened{}, err
		}
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, nil
	})
	if err != nil {
		return nil, nil, err
	}
	e.Verdict = &registry.Verdict{Verdict: registry.Accepted, Model: d.Model}
	return e, func() error { return l.Close(context.Background()) }, nil
}

// compiledDir keeps compiled modules for all tests of a run.
var compiledDir string

// pairBecomes waits until a node has found out about the pair with a peer.
func pairBecomes(t *testing.T, n *Node, peer, state string) pairs.Finding {
	t.Helper()
	var f pairs.Finding
	require.Eventually(t, func() bool {
		f = n.pairs.Of(peer)
		return f.State != pairs.None && f.State != pairs.Checking
	}, 50*time.Second, time.Millisecond)
	require.Equal(t, state, f.State, f.Why)
	return f
}

// allLegsWith waits until a node may demand of a peer in every leg.
func allLegsWith(t *testing.T, n *Node, peer string) {
	t.Helper()
	require.Eventually(t, func() bool { return isReady(n, peer) && n.unusable(peer, legPD) == "" }, 50*time.Second, time.Millisecond, n.unusable(peer, legPD))
}

// hitsIn runs a prompt in a leg and asserts that the consumer gets all that it planned for.
func hitsIn(t *testing.T, p, c *testEngine, id string, leg enginepb.Leg, options ...beginOption) {
	t.Helper()
	p.fresh()
	c.fresh()
	x := text{id, 300}
	p.produce(id, x, leg)
	r := c.beginConsumer(id, x, leg, options...)
	hit(t, r, r.load())
	r.finish()
}

// TestVersionsThatFit: two nodes whose rules have other parameters, the pair of which is
// accepted, use leg pd in both directions after a while.
func TestVersionsThatFit(t *testing.T) {
	producer := startJudged(t, "producer", inWasm, withDeployment(replace(deployment, "max_tokens: 512", "max_tokens: 400")))
	consumer := startJudged(t, "consumer", inWasm, withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	for _, n := range []*Node{producer, consumer} {
		peer := map[*Node]string{producer: "consumer", consumer: "producer"}[n]
		f := pairBecomes(t, n, peer, pairs.Accepted)
		require.True(t, f.Take && f.Give)
		allLegsWith(t, n, peer)
	}
	hitsIn(t, p, c, "there", enginepb.Leg_PD)
	hitsIn(t, c, p, "back", enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.PeerId = "consumer" })
	hitsIn(t, p, c, "demand", enginepb.Leg_DEMAND)
	clean(t, producer, consumer)
	kept, err := os.ReadDir(consumer.cfg.StateDir + "/pairs")
	require.NoError(t, err)
	require.Len(t, kept, 1)
	require.True(t, strings.HasSuffix(kept[0].Name(), ".json"))
}
