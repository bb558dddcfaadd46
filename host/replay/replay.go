package replay

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
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
	// PeerID is the node id that the producer's daemon must have. Empty means that
	// whatever it says is right.
	PeerID string
	// Deployment is the one that both nodes must serve. nil means that each side plays
	// the one of its own daemon.
	Deployment *deploy.Deployment
	// Leg is "pd", "demand" or "probe".
	Leg string
	// Salt goes into every hash. Empty means the name of the leg, so that the second
	// leg of a run does not find the first one's chunks.
	Salt string
	// RequestsPerSecond limits how fast requests start; 0 = as fast as they can.
	RequestsPerSecond float64
	// Concurrency is how many requests the consumer plays at a time; at least 1.
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

var legs = map[string]enginepb.Leg{"pd": enginepb.Leg_PD, "demand": enginepb.Leg_DEMAND, "probe": enginepb.Leg_PROBE}

// Check reports the first option that makes no sense.
func (o *Options) Check() error {
	switch {
	case len(o.Requests) == 0:
		return errors.New("there are no requests to play")
	case legs[o.Leg] == 0:
		return fmt.Errorf("leg is %q; it must be pd, demand or probe", o.Leg)
	case !(o.RequestsPerSecond >= 0) || math.IsInf(o.RequestsPerSecond, 0): // NaN is not >= 0
		return fmt.Errorf("rate is %v requests a second; it must be 0 (no limit) or a number above", o.RequestsPerSecond)
	case o.Concurrency < 1 || o.Concurrency > concurrencyMax:
		return fmt.Errorf("concurrency is %d; it must be 1 to %d", o.Concurrency, concurrencyMax)
	case samePath(o.Producer, o.Consumer):
		return fmt.Errorf("producer and consumer are the same socket, %s; a replay needs the daemons of two nodes", o.Producer)
	}
	for i := range o.Requests {
		if err := o.Requests[i].check(); err != nil {
			return fmt.Errorf("%s: %w", o.Requests[i].at(i), err)
		}
	}
	return nil
}

// samePath reports whether two paths lead to one file.
func samePath(a, b string) bool {
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	x, err := os.Stat(a)
	if err != nil {
		return false // who dials it says so
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// judge reports what makes a replay against these two daemons senseless.
func (o *Options) judge(producer, consumer *daemon) error {
	switch {
	case producer.id == consumer.id:
		return fmt.Errorf("the daemons at %s and %s are the same node, %q; a replay needs two nodes", producer.socket, consumer.socket, producer.id)
	case o.PeerID != "" && o.PeerID != producer.id:
		return fmt.Errorf("the producer's daemon at %s is node %q, but peer-id is %q; leave peer-id out, or give the socket of that node", producer.socket, producer.id, o.PeerID)
	}
	if o.Deployment != nil {
		for _, d := range []*daemon{producer, consumer} {
			if want := o.Deployment.Digest(); d.digest != want {
				return fmt.Errorf("the %s's daemon at %s serves deployment %s, but the deployment given to replay is %s; give replay that node's own file, or none",
					d.side, d.socket, d.digest, want)
			}
		}
	}
	if diff := producer.deployment.Layout().Diff(consumer.deployment.Layout()); len(diff) > 0 {
		return fmt.Errorf("the two nodes have different layouts and never exchange a byte (here: %s, there: %s): %s", producer.id, consumer.id, strings.Join(diff, "; "))
	}
	for i := range o.Requests {
		n := o.Requests[i].PromptTokens
		for _, d := range []*daemon{producer, consumer} {
			if most := d.deployment.MaxTokens; n > most {
				return fmt.Errorf("%s: input_length is %d tokens, above max_tokens, %d, of the %s's deployment; play a shorter trace or raise max_tokens", o.Requests[i].at(i), n, most, d.side)
			}
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
// all: options, a daemon that cannot be reached or refuses everything, a context that
// ended. When some requests had been played by then, the report is about those.
func Run(ctx context.Context, opt Options) (*Report, error) {
	if opt.Salt == "" {
		opt.Salt = opt.Leg
	}
	if err := opt.Check(); err != nil {
		return nil, err
	}
	producer, err := meet(ctx, "producer", opt.Producer)
	if err != nil {
		return nil, err
	}
	consumer, err := meet(ctx, "consumer", opt.Consumer)
	if err != nil {
		return nil, err
	}
	if err := opt.judge(producer, consumer); err != nil {
		return nil, err
	}
	r, err := newRun(ctx, opt, producer, consumer)
	if err != nil {
		return nil, err
	}
	defer r.close()
	for _, s := range []*side{r.producer, r.consumer} {
		if err := r.tryOut(ctx, s); err != nil {
			return nil, err
		}
	}
	return r.play(ctx)
}

// newRun attaches both engines.
func newRun(ctx context.Context, opt Options, producer, consumer *daemon) (*run, error) {
	var nonce [4]byte
	rand.Read(nonce[:]) // transfer ids of two runs must differ
	r := &run{opt: opt, nonce: hex.EncodeToString(nonce[:])}
	var err error
	if r.producer, err = attach(ctx, producer, opt.Requests, 1); err != nil {
		return nil, err
	}
	if r.consumer, err = attach(ctx, consumer, opt.Requests, opt.Concurrency); err != nil {
		r.producer.client.Close()
		return nil, err
	}
	r.tally = newTally(r.producer, r.consumer, opt.Leg, len(opt.Requests))
	return r, nil
}

func (r *run) close() {
	r.producer.client.Close()
	r.consumer.client.Close()
}

// noteUnknownPeer is part of the note with which a daemon says that its configuration
// does not list the peer. Such a replay can only recompute.
const noteUnknownPeer = "is not known to this node"

// tryOut opens and ends a request of one token, so that a daemon that would refuse every
// request, or does not know its peer, says so once and at the start.
func (r *run) tryOut(ctx context.Context, s *side) error {
	role := enginepb.Role_CONSUMER
	if s == r.producer {
		role = enginepb.Role_PRODUCER
	}
	t := &task{
		id:     fmt.Sprintf("%s-%s-tryout-%s", r.opt.Leg, r.nonce, s.daemon.side),
		prompt: newPrompt(&Request{PromptTokens: 1, IDs: []uint64{0}}, r.opt.Salt, s.daemon.deployment.HashTokens),
	}
	reply, err := call(ctx, s, func(ctx context.Context) (*enginepb.BeginReply, error) {
		return s.client.Begin(ctx, r.turn(t, s).begin(role, 0))
	})
	if err != nil {
		return err
	}
	_, err = call(ctx, s, func(ctx context.Context) (*enginepb.FinishReply, error) {
		return s.client.Finish(ctx, &enginepb.FinishRequest{RequestId: t.id, Abort: true})
	})
	if err == nil && strings.Contains(reply.Note, noteUnknownPeer) {
		err = fmt.Errorf("the %s's daemon at %s: %s", s.daemon.side, s.daemon.socket, reply.Note)
	}
	return err
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
	report := r.tally.report(time.Since(start))
	if report.Requests == 0 {
		report = nil
	}
	if ctx.Err() != nil {
		return report, fmt.Errorf("the replay stopped: %w", context.Cause(ctx))
	}
	if err := r.tally.refusedAll(); err != nil {
		return nil, err
	}
	return report, nil
}

// pace waits until request i may start.
func (r *run) pace(ctx context.Context, start time.Time, i int) error {
	if r.opt.RequestsPerSecond == 0 {
		return ctx.Err()
	}
	const longest = 1 << 62 // nanoseconds: an age, and no overflow at the smallest rates
	at := start.Add(time.Duration(min(longest, float64(i)/r.opt.RequestsPerSecond*float64(time.Second))))
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
		prompt: newPrompt(&r.opt.Requests[i], r.opt.Salt, r.producer.daemon.deployment.HashTokens),
		early:  r.opt.Leg != "probe" && i%2 == 1,
		begun:  make(chan struct{}), produced: make(chan struct{}),
	}
	if t.early {
		queue <- t
		<-t.begun
	}
	// Without a consumer's daemon nobody will ask for the bytes.
	if t.produceErr = r.consumer.down(); t.produceErr == nil {
		t.production, t.produceErr = r.producer.produce(ctx, r.turn(t, r.producer))
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
	out, err := r.consumer.consume(ctx, r.turn(t, r.consumer), begun)
	begun()
	<-t.produced
	if err == nil {
		r.tally.add(t, out, r.opt.Progress)
	}
	return err
}

// turn is the part of a request that one of the engines plays.
func (r *run) turn(t *task, s *side) *turn {
	other := r.producer
	if s == r.producer {
		other = r.consumer
	}
	return &turn{id: t.id, prompt: t.prompt, leg: legs[r.opt.Leg], salt: r.opt.Salt, peer: other.daemon.id,
		refusedStore: func(text string) { r.tally.note("store", text) }}
}
