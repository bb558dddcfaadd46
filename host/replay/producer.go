package replay

import (
	"context"
	"errors"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// produced is what became of a request at the producer.
type produced struct {
	nativeTokens uint64
	groups       []*enginepb.GroupCount
}

// produce prefills one request and stores it.
func (s *side) produce(ctx context.Context, t *turn) (*produced, error) {
	begun, err := call(ctx, s, func(ctx context.Context) (*enginepb.BeginReply, error) {
		return s.client.Begin(ctx, t.begin(enginepb.Role_PRODUCER, 0))
	})
	if err != nil {
		return nil, err
	}
	q := newSequence(s, t.prompt)
	defer q.close()
	out := &produced{nativeTokens: q.adopt(begun.ReuseTokens)}
	computed, err := s.prefill(ctx, t, q, out.nativeTokens, begun.StopTokens)
	reply, finishErr := call(ctx, s, func(ctx context.Context) (*enginepb.FinishReply, error) {
		return s.client.Finish(ctx, &enginepb.FinishRequest{RequestId: t.id, ComputedTokens: computed, Abort: err != nil})
	})
	if err != nil {
		return nil, err
	}
	out.groups = reply.GetGroups()
	return out, finishErr
}

// prefill computes the prompt from token from on and stores each step while the next
// is computed. It returns the tokens that the daemon knows to be computed.
func (s *side) prefill(ctx context.Context, t *turn, q *sequence, from uint64, stops []uint64) (computed uint64, err error) {
	type stored struct{ job, computed uint64 }
	var last *stored
	settle := func() error {
		if last == nil {
			return nil
		}
		ev, err := q.s.wait(ctx, last.job)
		if err != nil {
			return err
		}
		if !ev.Ok {
			t.refusedStore(ev.Error)
		}
		q.slide(last.computed)
		last = nil
		return nil
	}
	if t.step != nil {
		if err := t.step(from); err != nil {
			return from, err
		}
	}
	for n := from; n < t.prompt.tokens(); {
		next := stepEnd(n, t.prompt.tokens(), stops)
		if err := q.compute(n, next); err != nil {
			return computed, err
		}
		step := &enginepb.StoreRequest{RequestId: t.id, ComputedTokens: next, Blocks: q.untold()}
		if n == from { // the first one says where the prefill started
			step.NativeTokens = from
		}
		job, err := call(ctx, q.s, func(ctx context.Context) (uint64, error) { return q.s.client.Store(ctx, step) })
		if err != nil {
			return computed, err
		}
		// The blocks of the step before may go only now that its job is done.
		if err := settle(); err != nil {
			return computed, err
		}
		last = &stored{job, next}
		n, computed = next, next
		if t.step != nil {
			if err := t.step(n); err != nil {
				return computed, errors.Join(err, settle())
			}
		}
	}
	return computed, settle()
}

// stepEnd is where a step from token n ends: after at most stepTokens, at the prompt's
// end, or at a point that the daemon wants a step to end at.
func stepEnd(n, prompt uint64, stops []uint64) uint64 {
	end := min(n+stepTokens, prompt)
	for _, stop := range stops {
		if stop > n {
			return min(end, stop)
		}
	}
	return end
}
