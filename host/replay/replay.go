package replay

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry/deploy"
)

// Options say what to play against whom.
type Options struct {
	// Requests in the order in which they are played.
	Requests []Request
	// Producer and Consumer are the engine sockets of the two daemons.
	Producer, Consumer string
	// PeerID and ConsumerID are the node ids of the two daemons. Empty means that
	// the daemon says it itself.
	PeerID, ConsumerID string
	// Deployment is the one that both nodes serve. nil means that of the producer.
	Deployment *deploy.Deployment
	// Leg is "pd" or "probe".
	Leg string
	// Salt goes into every hash. Empty means the name of the leg, so that the second
	// leg of a run does not find the first one's chunks.
	Salt string
	// RequestsPerSecond limits how fast requests start; 0 = as fast as they can.
	RequestsPerSecond float64
	// Concurrency is how many requests the consumer plays at a time; 0 means
	// DefaultConcurrency.
	Concurrency int
	// Progress, when set, is told how many requests are done. It is called from one
	// goroutine at a time.
	Progress func(done int)
}

const (
	// DefaultConcurrency: one request is compared while the next is pulled.
	DefaultConcurrency = 2
	// concurrencyMax bounds the blocks that the consumer's regions need.
	concurrencyMax = 64
)

// learn fills in what the daemons can say themselves.
func (o *Options) learn(ctx context.Context) error {
	if o.PeerID == "" || o.Deployment == nil {
		id, d, err := ask(ctx, "producer", o.Producer)
		if err != nil {
			return err
		}
		if o.PeerID == "" {
			o.PeerID = id
		}
		if o.Deployment == nil {
			o.Deployment = d
		}
	}
	if o.ConsumerID == "" {
		id, _, err := ask(ctx, "consumer", o.Consumer)
		if err != nil {
			return err
		}
		o.ConsumerID = id
	}
	return nil
}

var legs = map[string]enginepb.Leg{"pd": enginepb.Leg_PD, "probe": enginepb.Leg_PROBE}

// Check reports the first option that makes no sense.
func (o *Options) Check() error {
	switch {
	case len(o.Requests) == 0:
		return errors.New("replay: no requests")
	case o.Deployment == nil:
		return errors.New("replay: no deployment")
	case legs[o.Leg] == 0:
		return fmt.Errorf("replay: leg is %q; it must be pd or probe", o.Leg)
	case o.PeerID == "":
		return errors.New("replay: the node id of the producer's daemon is not given")
	case o.RequestsPerSecond < 0:
		return fmt.Errorf("replay: rate is %v requests a second; it must be 0 (no limit) or more", o.RequestsPerSecond)
	case o.Concurrency < 0 || o.Concurrency > concurrencyMax:
		return fmt.Errorf("replay: concurrency is %d; it must be 1 to %d", o.Concurrency, concurrencyMax)
	}
	for i := range o.Requests {
		if err := o.Requests[i].check(); err != nil {
			return fmt.Errorf("replay: request %d: %w", i, err)
		}
		if n := o.Requests[i].PromptTokens; n > o.Deployment.MaxTokens {
			return fmt.Errorf("replay: request %d has %d tokens, but max_tokens of the deployment is %d", i, n, o.Deployment.MaxTokens)
		}
	}
	return nil
}

// A task is one request on its way through both sides.
type task struct {
	id     string
	prompt *prompt
	// early: the consumer begins before the producer.
	early bool
	// begun is closed when the consumer has begun.
	begun chan struct{}

	// Set by the producer before produced is closed.
	doneAt     time.Time
	production *produced
	produceErr error
	produced   chan struct{}
}

// A run is one call of Run.
type run struct {
	opt                Options
	nonce              string
	producer, consumer *side
	tally              *tally
}

// Run plays the requests and reports. The error is for what kept it from playing them
// at all: options, a daemon that cannot be reached, a cancelled context.
func Run(ctx context.Context, opt Options) (*Report, error) {
	if opt.Concurrency == 0 {
		opt.Concurrency = DefaultConcurrency
	}
	if opt.Salt == "" {
		opt.Salt = opt.Leg
	}
	if err := opt.learn(ctx); err != nil {
		return nil, err
	}
	if err := opt.Check(); err != nil {
		return nil, err
	}
	groups, err := groupsOf(opt.Deployment)
	if err != nil {
		return nil, err
	}
	var nonce [4]byte
	rand.Read(nonce[:]) // transfer ids of two runs must differ
	r := &run{opt: opt, nonce: hex.EncodeToString(nonce[:]), tally: newTally(groups, len(opt.Requests))}
	hashTokens := opt.Deployment.HashTokens
	if r.producer, err = attach(ctx, "producer", opt.Producer, groups, hashTokens, blocksFor(groups, opt.Requests, 1)); err != nil {
		return nil, err
	}
	defer r.producer.client.Close()
	if r.consumer, err = attach(ctx, "consumer", opt.Consumer, groups, hashTokens, blocksFor(groups, opt.Requests, opt.Concurrency)); err != nil {
		return nil, err
	}
	defer r.consumer.client.Close()
	return r.play(ctx)
}

func (r *run) play(ctx context.Context) (*Report, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	start := time.Now()
	queue := make(chan *task)
	var workers sync.WaitGroup
	for range r.opt.Concurrency {
		workers.Go(func() {
			for t := range queue {
				if err := r.second(ctx, t); err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := range r.opt.Requests {
		if r.pace(ctx, start, i) != nil {
			break
		}
		r.first(ctx, i, queue)
	}
	close(queue)
	workers.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("replay stopped: %w", context.Cause(ctx))
	}
	return r.tally.report(r.opt.Leg, time.Since(start)), nil
}

// pace waits until request i may start.
func (r *run) pace(ctx context.Context, start time.Time, i int) error {
	if r.opt.RequestsPerSecond == 0 {
		return ctx.Err()
	}
	at := start.Add(time.Duration(float64(i) / r.opt.RequestsPerSecond * float64(time.Second)))
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Until(at)):
		return nil
	}
}

// first plays the producer's part of request i and hands the request over.
func (r *run) first(ctx context.Context, i int, queue chan<- *task) {
	t := &task{
		id:     fmt.Sprintf("%s-%s-%d", r.opt.Leg, r.nonce, i),
		prompt: newPrompt(&r.opt.Requests[i], r.opt.Salt, r.opt.Deployment.HashTokens),
		early:  r.opt.Leg == "pd" && i%2 == 1,
		begun:  make(chan struct{}), produced: make(chan struct{}),
	}
	if t.early {
		queue <- t
		<-t.begun
	}
	// Without a consumer's daemon nobody will ask for the bytes.
	if t.produceErr = r.consumer.down(); t.produceErr == nil {
		t.production, t.produceErr = r.produce(ctx, t)
	}
	t.doneAt = time.Now()
	close(t.produced)
	if !t.early {
		queue <- t
	}
}

// second plays the consumer's part and counts the request.
func (r *run) second(ctx context.Context, t *task) error {
	var once sync.Once
	begun := func() { once.Do(func() { close(t.begun) }) }
	out, err := r.consume(ctx, t, begun)
	begun()
	<-t.produced
	if err == nil {
		r.tally.add(t, out, r.opt.Progress)
	}
	return err
}

// begin is the call that opens a request on either side.
func (r *run) begin(t *task, role enginepb.Role, local uint64) *enginepb.BeginRequest {
	b := &enginepb.BeginRequest{
		RequestId: t.id, TransferId: t.id, Role: role, Leg: legs[r.opt.Leg],
		TenantSalt:   []byte(r.opt.Salt),
		PromptTokens: t.prompt.tokens(), Hashes: t.prompt.wire(), HashBytes: uint32(len(hash{})),
		PeerId: r.opt.PeerID, LocalTokens: local,
	}
	if role == enginepb.Role_PRODUCER {
		b.PeerId = r.opt.ConsumerID
	}
	return b
}
