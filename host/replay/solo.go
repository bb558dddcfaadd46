package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// A turn is the part of a request that one engine plays.
type turn struct {
	id     string
	prompt *prompt
	leg    enginepb.Leg
	salt   string
	// peer is the node id of the other side.
	peer string
	// deadline is the request's own; 0 leaves it to the daemon.
	deadline time.Duration
	// partial: the engine computes nothing behind the resume point.
	partial bool
	// refusedStore is told of a step that the daemon did not keep.
	refusedStore func(text string)
	// step, when set, is called before the first step of a prefill and after each; its
	// error aborts.
	step func(computed uint64) error
}

// begin is the call that opens a request on either side.
func (t *turn) begin(role enginepb.Role, local uint64) *enginepb.BeginRequest {
	return &enginepb.BeginRequest{
		RequestId: t.id, TransferId: t.id, Role: role, Leg: t.leg,
		TenantSalt:   []byte(t.salt),
		PromptTokens: t.prompt.tokens(), Hashes: t.prompt.wire(), HashBytes: uint32(len(hash{})),
		PeerId: t.peer, LocalTokens: local, DeadlineMs: uint64(t.deadline.Milliseconds()),
	}
}

// An Engine is one of the two engines that Run plays, for callers that decide themselves
// who asks for what and when, and who measure every request by itself. Its methods may be
// called from any number of goroutines.
type Engine struct{ s *side }

// A Turn is what one engine does of a request. The other side's Turn has the same ID,
// Leg, Salt and Request.
type Turn struct {
	// ID is the request's id and that of the transfer.
	ID      string
	Request *Request
	// Leg is "pd", "demand" or "probe".
	Leg string
	// Salt goes into every hash: prompts of different salts share nothing.
	Salt string
	// Peer is the node id of the other side.
	Peer string
	// Deadline is the request's own, in whole milliseconds; 0 leaves it to the daemon.
	Deadline time.Duration
	// Step, when set, is called by Produce once the request has begun, and after every step
	// that was given to the daemon, with the tokens computed so far. An error ends the
	// request with abort.
	Step func(computed uint64) error
}

// An Outcome is what a request came to at its consumer.
type Outcome struct {
	// Hit: the request went on from the point that was planned, with the right bytes.
	Hit bool
	// Cause and Detail say why it is no hit; see the constants Cause*, and the causes of
	// a daemon's failures.
	Cause, Detail string
	// Failed are the chunks that the daemon could not deliver.
	Failed []*enginepb.Failure
	// WrongBytes of what attention would have read.
	WrongBytes uint64
	// Transferred counts the chunks that came from the peer, over all groups.
	Transferred uint64
	Began       time.Time
	// Planned is what Begin took, Took the time from Begin to the moment at which the engine
	// knew where to go on.
	Planned, Took time.Duration
}

// AttachEngine attaches an engine with room for so many of the requests at a time, the
// longest ones. name is for messages and logs. No call waits longer than callLimit for the
// daemon's answer, and no job longer than three times that.
func AttachEngine(ctx context.Context, name, socket string, requests []Request, live int, callLimit time.Duration) (*Engine, error) {
	d, err := meet(ctx, name, socket)
	if err != nil {
		return nil, err
	}
	s, err := attach(ctx, d, requests, live)
	if err != nil {
		return nil, err
	}
	s.calls, s.waits = callLimit, 3*callLimit
	return &Engine{s}, nil
}

// Close detaches: the last word for all requests of the engine.
func (e *Engine) Close() error { return e.s.client.Close() }

// Gone returns why the daemon is not to be called any more, or nil.
func (e *Engine) Gone() error { return e.s.down() }

func (e *Engine) turn(t *Turn) (*turn, error) {
	if err := t.Request.check(); err != nil {
		return nil, fmt.Errorf("request %s: %w", t.ID, err)
	}
	if legs[t.Leg] == 0 {
		return nil, fmt.Errorf("request %s: leg is %q; it must be pd, demand or probe", t.ID, t.Leg)
	}
	return &turn{
		id: t.ID, prompt: newPrompt(t.Request, t.Salt, e.s.daemon.deployment.HashTokens),
		leg: legs[t.Leg], salt: t.Salt, peer: t.Peer, deadline: t.Deadline, partial: true, step: t.Step,
	}, nil
}

// Produce prefills the request and stores every step. The error says why some of it was
// not kept.
func (e *Engine) Produce(ctx context.Context, t *Turn) error {
	p, err := e.turn(t)
	if err != nil {
		return err
	}
	refused := ""
	p.refusedStore = func(text string) { refused = text }
	if _, err = e.s.produce(ctx, p); err == nil && refused != "" {
		err = &refusal{e.s.daemon.side, refused}
	}
	return err
}

// Consume plans, pulls and judges the request. It does not compute what is behind the
// resume point. The error is for what is no outcome: a Turn that makes no sense, a context
// that ended.
func (e *Engine) Consume(ctx context.Context, t *Turn) (*Outcome, error) {
	p, err := e.turn(t)
	if err != nil {
		return nil, err
	}
	c, err := e.s.consume(ctx, p, func() {})
	if err != nil {
		return nil, err
	}
	out := &Outcome{
		Hit: c.hit, Cause: c.cause, Detail: c.detail, Failed: c.failures, WrongBytes: c.wrongBytes,
		Began: c.begunAt, Planned: c.plannedAt.Sub(c.begunAt), Took: c.plannedAt.Sub(c.begunAt),
	}
	if !c.loadedAt.IsZero() {
		out.Took = c.loadedAt.Sub(c.begunAt)
	}
	for _, g := range c.groups {
		out.Transferred += g.Transferred
	}
	return out, nil
}

// Abandon begins the request as a consumer and gives it up after so long, without a load.
func (e *Engine) Abandon(ctx context.Context, t *Turn, after time.Duration) error {
	p, err := e.turn(t)
	if err != nil {
		return err
	}
	_, err = call(ctx, e.s, func(ctx context.Context) (*enginepb.BeginReply, error) {
		return e.s.client.Begin(ctx, p.begin(enginepb.Role_CONSUMER, 0))
	})
	if err != nil {
		return err
	}
	time.Sleep(after)
	_, err = call(ctx, e.s, func(ctx context.Context) (*enginepb.FinishReply, error) {
		return e.s.client.Finish(ctx, &enginepb.FinishRequest{RequestId: p.id, Abort: true})
	})
	return err
}
