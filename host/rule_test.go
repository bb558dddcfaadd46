package host

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// failing is a shipped rule that fails on command, as a module that traps does.
type failing struct {
	abi.Spec
	scan, reach *atomic.Bool
}

type failingRule struct {
	abi.SpecRule
	f failing
}

var errTrap = errors.New("the module trapped")

func (f failing) Open(params []uint64) (abi.Rule, error) {
	r, err := f.Spec.Open(params)
	if err != nil {
		return nil, err
	}
	return failingRule{r.(abi.SpecRule), f}, nil
}

func (r failingRule) Scan(x abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	if r.f.scan.Load() {
		return abi.Span{}, errTrap
	}
	return r.SpecRule.Scan(x, states, demand)
}

func (r failingRule) Reach(x abi.Round, out abi.Bitmap) error {
	if r.f.reach.Load() {
		return errTrap
	}
	return r.SpecRule.Reach(x, out)
}

func (r failingRule) Need(x abi.Round, out abi.Bitmap) error {
	if r.f.reach.Load() {
		return errTrap
	}
	return r.SpecRule.Need(x, out)
}

// startFailing starts a node whose group full fails on command.
func startFailing(t *testing.T, id string, options ...nodeOption) (n *Node, scan, reach *atomic.Bool) {
	t.Helper()
	scan, reach = new(atomic.Bool), new(atomic.Bool)
	return startJudged(t, id, func(ctx context.Context, d *deploy.Deployment, _ func(done, total int)) (*registry.Entry, func() error, error) {
		e, err := registry.Open(ctx, d, func(_ context.Context, _, ref string) (registry.Opened, error) {
			o := registry.Opened{Digest: "sha256:native", Source: "native"}
			switch ref {
			case "full":
				o.Spec = failing{specs.Full(), scan, reach}
			case "window":
				o.Spec = specs.Window()
			default:
				o.Spec = policy.RequestLevel()
			}
			return o, nil
		})
		if err != nil {
			return nil, nil, err
		}
		e.Verdict = &registry.Verdict{Verdict: registry.Accepted}
		return e, func() error { return nil }, nil
	}, options...), scan, reach
}

// TestARuleFailsAtRunTime: a rule that passed its check and fails later costs the
// request its plan, never the request; and the node serves on when it works again.
func TestARuleFailsAtRunTime(t *testing.T) {
	producer, producerScan, producerReach := startFailing(t, "producer")
	consumer, consumerScan, _ := startFailing(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)

	consumerScan.Store(true)
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
		r := c.beginConsumer("a", x, leg)
		require.Contains(t, r.reply.Note, "no plan: scan of full")
		require.Zero(t, r.reply.ResumeTokens)
		require.True(t, r.load().Ok)
		r.finish()
	}
	consumerScan.Store(false)

	r := c.beginConsumer("b", x, enginepb.Leg_PROBE) // planned, and then the rule fails
	consumerScan.Store(true)
	ev := r.load()
	require.False(t, ev.Ok)
	require.Zero(t, ev.ResumeTokens)
	require.Contains(t, ev.Error, errTrap.Error())
	r.finish()
	consumerScan.Store(false)
	clean(t, producer, consumer)

	producerScan.Store(true)
	_, err := p.c.Begin(ctxFor(t), p.request("c", x, enginepb.Role_PRODUCER, enginepb.Leg_PD))
	require.Equal(t, codes.Internal, status.Code(err))
	require.ErrorContains(t, err, "compute without the tier")
	producerScan.Store(false)

	// In the middle of a text: what was promised before is delivered, the rest is not.
	y := text{"d", 100}
	r = c.beginConsumer("d", y, enginepb.Leg_PD)
	q, _ := p.beginProducer("d", y, enginepb.Leg_PD)
	q.settle(q.step(100, 0))
	producerReach.Store(true)
	m := &enginepb.StoreRequest{RequestId: "d", ComputedTokens: 112, MoreHashes: append(append(y.hash(25), y.hash(26)...), y.hash(27)...)}
	_, err = p.c.Store(ctxFor(t), m)
	require.Equal(t, codes.Internal, status.Code(err))
	require.ErrorContains(t, err, "finish it with abort")
	q.finish(true)
	hit(t, r, r.load())
	r.finish()
	producerReach.Store(false)
	clean(t, producer, consumer)

	// The last word is said at once, although the engine has not finished the request: at the
	// first step all of the prompt is refused by name, and later what the text would have added.
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		c.fresh()
		p.fresh()
		z, id := text{"z" + leg.String(), 300}, "z"+leg.String()
		r = c.beginConsumer(id, z, leg)
		jobsOf(t, producer, 1)
		q, reply := p.beginProducer(id, z, leg)
		require.Positive(t, reply.ReuseTokens)
		producerReach.Store(true)
		_, err = p.c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: id, ComputedTokens: reply.ReuseTokens, NativeTokens: reply.ReuseTokens})
		require.ErrorContains(t, err, "finish it with abort")
		ev = r.load()
		require.Zero(t, ev.ResumeTokens)
		require.Contains(t, ev.Failures[0].Detail, "a rule of the producer failed: need of full")
		producerReach.Store(false)
		r.finish()
		q.finish(true)
		clean(t, producer, consumer)

		long, short := text{"l" + leg.String(), 120}, text{"l" + leg.String(), 100}
		q, _ = p.beginProducer("l"+id, short, leg)
		r = c.beginConsumer("l"+id, long, leg)
		require.Eventually(t, func() bool { return producer.meeting.status().Jobs > 0 }, 30*time.Second, time.Millisecond) // in leg demand a second one may follow
		job := q.step(100, 0)
		producerReach.Store(true)
		m := &enginepb.StoreRequest{RequestId: "l" + id, ComputedTokens: 112, MoreHashes: append(append(long.hash(25), long.hash(26)...), long.hash(27)...)}
		_, err = p.c.Store(ctxFor(t), m)
		require.ErrorContains(t, err, "finish it with abort")
		ev = r.load()
		require.False(t, ev.Ok)
		require.True(t, q.settle(job).Ok)
		producerReach.Store(false)
		r.finish()
		q.finish(true)
		clean(t, producer, consumer)
	}
	serves(t, producer, consumer)
}
