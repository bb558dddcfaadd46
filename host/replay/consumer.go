package replay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// Causes of a recompute that replay itself names. The others come from the daemon's
// failures: unmatched, checksum, peer, deadline and so on.
const (
	// CauseShort: the prompt holds no whole chunk below its last token.
	CauseShort = "short"
	// CauseNothingPlanned: the daemon planned to fetch nothing, although the engine's
	// own blocks end before the prompt's last whole chunk. The detail is its note.
	CauseNothingPlanned = "nothing-planned"
	// CauseGone: the consumer's daemon, or its answer, is gone.
	CauseGone = "daemon-gone"
	// CauseWrong: bytes that attention would have read were not the right ones.
	CauseWrong = "wrong-bytes"
	// CauseRefused: the daemon refused a call, or a job failed without naming a chunk.
	CauseRefused = "refused"
)

// consumed is what became of a request at the consumer.
type consumed struct {
	hit bool
	// cause of the recompute; empty for a hit. detail is a sentence about it.
	cause, detail string
	// remark is what the daemon said beside a plan; refused its no to the request.
	remark       string
	refused      *refusal
	nativeTokens uint64
	wrongBytes   uint64
	groups       []*enginepb.GroupCount
	failures     []*enginepb.Failure
	// plannedAt is when Begin had its reply, loadedAt when the load's event came; zero when
	// nothing was loaded.
	begunAt, plannedAt, loadedAt time.Time
}

func (c *consumed) miss(cause, detail string) {
	if c.cause == "" {
		c.hit, c.cause, c.detail = false, cause, detail
	}
}

// fail is miss for an error.
func (c *consumed) fail(err error) {
	cause := CauseRefused
	if errors.Is(err, engine.ErrGone) || errors.Is(err, errStuck) {
		cause = CauseGone
	}
	c.miss(cause, err.Error())
}

// consume plans, pulls and judges one request. begun is called once the daemon has
// planned, or has failed to. The error, if any, is one of replay itself.
func (s *side) consume(ctx context.Context, t *turn, begun func()) (*consumed, error) {
	out := &consumed{begunAt: time.Now()}
	q := newSequence(s, t.prompt)
	defer q.close()
	out.nativeTokens = q.adopt(t.prompt.tokens())
	plan, err := call(ctx, s, func(ctx context.Context) (*enginepb.BeginReply, error) {
		return s.client.Begin(ctx, t.begin(enginepb.Role_CONSUMER, out.nativeTokens))
	})
	out.plannedAt = time.Now()
	begun()
	if err != nil {
		out.fail(err)
		errors.As(err, &out.refused)
		return out, ctx.Err()
	}
	resume := out.nativeTokens
	if plan.ResumeTokens > out.nativeTokens {
		out.remark = plan.Note
		resume, err = s.pull(ctx, t, q, plan, out)
		if err != nil {
			out.fail(err)
			s.finishConsumer(ctx, t, out, true)
			return out, ctx.Err()
		}
	} else {
		out.unplanned(q, plan)
	}
	if out.wrongBytes = q.wrong(resume); out.wrongBytes > 0 {
		out.miss(CauseWrong, "")
		resume = 0 // nothing of it can be trusted
	} else if out.cause == "" {
		out.hit = true
	}
	if !t.partial {
		if err := computeRest(q, resume); err != nil {
			return out, err
		}
	}
	s.finishConsumer(ctx, t, out, false)
	return out, ctx.Err()
}

// unplanned judges a plan that fetches nothing.
func (c *consumed) unplanned(q *sequence, plan *enginepb.BeginReply) {
	covered, none := q.covered(c.nativeTokens)
	switch {
	case covered:
	case none:
		c.miss(CauseShort, plan.Note)
	case plan.Note != "":
		c.miss(CauseNothingPlanned, plan.Note)
	default:
		c.miss(CauseNothingPlanned, "the daemon gave no reason: neither its own tier nor its peer has chunks to go on from")
	}
}

// finishConsumer ends the request at its daemon and takes its counts.
func (s *side) finishConsumer(ctx context.Context, t *turn, out *consumed, abort bool) {
	reply, err := call(ctx, s, func(ctx context.Context) (*enginepb.FinishReply, error) {
		return s.client.Finish(ctx, &enginepb.FinishRequest{RequestId: t.id, Abort: abort})
	})
	if err != nil && !out.hit {
		out.fail(err)
	}
	out.groups = reply.GetGroups()
}

// pull loads what the plan demands and returns the token to go on from.
func (s *side) pull(ctx context.Context, t *turn, q *sequence, plan *enginepb.BeginReply, out *consumed) (uint64, error) {
	dest, err := q.destinations(slices.Concat(plan.Demand, plan.Fallback))
	if err != nil {
		return 0, err
	}
	defer dest.free()
	job, err := call(ctx, s, func(ctx context.Context) (uint64, error) {
		return s.client.Load(ctx, &enginepb.LoadRequest{RequestId: t.id, Blocks: dest.runs})
	})
	if err != nil {
		return 0, err
	}
	ev, err := s.wait(ctx, job)
	if err != nil {
		return 0, err
	}
	out.loadedAt = time.Now()
	out.failures = ev.Failures
	switch {
	case ev.ResumeTokens == plan.ResumeTokens:
	case len(ev.Failures) > 0:
		f := root(ev.Failures)
		out.miss(f.Cause, f.Detail)
	default:
		out.miss(CauseRefused, ev.Error)
	}
	// More than was planned, or less than was there already, is no answer.
	return min(max(ev.ResumeTokens, out.nativeTokens), plan.ResumeTokens), nil
}

// causeAborted is a daemon's word for a chunk that it does not want any more: because of
// others that it cannot have, or because the request has ended.
const causeAborted = "aborted"

// root is the first failure that is none of the others' consequence.
func root(failures []*enginepb.Failure) *enginepb.Failure {
	for _, f := range failures {
		if f.Cause != causeAborted {
			return f
		}
	}
	return failures[0]
}

// computeRest is the local part: from the resume point to the prompt's end.
func computeRest(q *sequence, from uint64) error {
	if from == 0 { // also when what was there is wrong
		q.close()
	}
	for n := from; n < q.p.tokens(); {
		next := stepEnd(n, q.p.tokens(), nil)
		if err := q.compute(n, next); err != nil {
			return err
		}
		q.slide(next)
		n = next
	}
	return nil
}

// destinations is where a load puts its chunks.
type destinations struct {
	runs []*enginepb.BlockRun
	free func()
}

// destinations finds room for every block of the demanded chunks and spoils it. Where
// a block is there already, shared with other requests, the load gets a spare one.
func (q *sequence) destinations(demand []*enginepb.GroupChunks) (*destinations, error) {
	spare := make([][]uint32, len(q.s.groups))
	d := &destinations{free: func() {
		q.s.mu.Lock()
		defer q.s.mu.Unlock()
		for i, ids := range spare {
			q.s.pools[i].release(ids...)
		}
	}}
	for _, gc := range demand {
		g := q.s.group(gc.Group)
		if g == nil {
			d.free()
			return nil, errors.New("the plan names group " + gc.Group + ", which the deployment given to replay has not")
		}
		for _, c := range gc.Chunks {
			first, end := uint64(c.First)*g.chunkBlocks, (uint64(c.Last)+1)*g.chunkBlocks
			run, ids, err := q.destination(g, first, end)
			spare[g.index] = append(spare[g.index], ids...)
			if err != nil {
				d.free()
				return nil, err
			}
			d.runs = append(d.runs, run)
		}
	}
	return d, nil
}

func (q *sequence) destination(g *group, first, end uint64) (run *enginepb.BlockRun, spare []uint32, err error) {
	t := q.tables[g.index]
	if end > uint64(len(t)) || first > end {
		return nil, nil, errors.New("the plan demands a chunk beyond the prompt in group " + g.name)
	}
	native := min(max(q.native[g.index], first), end) // blocks before it are shared
	q.s.mu.Lock()
	spare, err = q.s.pools[g.index].take(int(native - first))
	q.s.mu.Unlock()
	if err == nil {
		err = q.room(g.index, native, end)
	}
	if err != nil {
		return nil, spare, err
	}
	run = &enginepb.BlockRun{Group: g.name, FirstBlock: uint32(first), Ids: append([]uint32(nil), spare...)}
	for b := native; b < end; b++ {
		run.Ids = append(run.Ids, uint32(t[b]))
		q.rows(g, b, 0, (b+1)*g.blockTokens, func(row []byte, _ uint64) { spoilRow(row) })
	}
	return run, spare, nil
}
