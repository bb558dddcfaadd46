package faults

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierd/tierd/host/replay"
)

const (
	// rate of the requests, a second; every second one names source a.
	rate = 20
	// The trace's prompts between these lengths, in tokens: a chunk at least, and short
	// enough that two cores compute, store, send and compare rate of them a second.
	promptMin, promptMax = 512, 16384
	// liveConsumer and liveSource bound the requests that the engines have room for.
	liveConsumer, liveSource = 48, 5
	// callLimit is longer than any freeze: an engine whose daemon is frozen waits for it.
	callLimit = time.Minute
	// deadline of every request, which is beyond what any wait for a peer may take.
	deadline = 5 * time.Second
)

var trace = sync.OnceValue(func() []replay.Request {
	all, err := replay.LoadTrace(filepath.Join(repo(), "examples", "traces", "conversation_trace_1000.jsonl"), 0)
	if err != nil {
		panic(err)
	}
	return slices.DeleteFunc(all, func(r replay.Request) bool { return r.PromptTokens < promptMin || r.PromptTokens > promptMax })
})

// sourcePatience is how long a request waits for its turn at a source.
const sourcePatience = time.Second

// A source is the engine of a source. It computes up to liveSource requests at a time.
type source struct {
	n      *node
	engine atomic.Pointer[replay.Engine]
	room   chan struct{}
}

func newSource(n *node) *source { return &source{n: n, room: make(chan struct{}, liveSource)} }

func (s *source) attach() error {
	e, err := replay.AttachEngine(context.Background(), "the engine at "+s.n.id, s.n.socket(), trace(), liveSource, callLimit)
	if err != nil {
		return err
	}
	s.detach()
	s.engine.Store(e)
	return nil
}

func (s *source) detach() {
	if e := s.engine.Swap(nil); e != nil {
		e.Close()
	}
}

var (
	errBusy = errors.New("the source computes enough already")
	errAway = errors.New("the source has no daemon")
)

// produce computes a request, unless there is enough in work for long.
func (s *source) produce(t *replay.Turn) error {
	select {
	case s.room <- struct{}{}:
		defer func() { <-s.room }()
	case <-time.After(sourcePatience):
		return errBusy
	}
	e := s.engine.Load()
	if e == nil {
		return errAway
	}
	return e.Produce(context.Background(), t)
}

// A record is one request.
type record struct {
	id     string
	source string
	// stored: its source has computed and stored it.
	stored bool
	out    *replay.Outcome
	err    error
}

func (r *record) end() time.Time { return r.out.Began.Add(r.out.Took) }

// A play is traffic at the fixed rate.
type play struct {
	c        *cluster
	leg      string
	name     string
	deadline time.Duration
	quit     chan struct{}
	wg       sync.WaitGroup

	mu      sync.Mutex
	records []*record
}

// play starts traffic in a leg. The requests' deadline is the usual one when it is 0.
func (c *cluster) play(leg string, limit time.Duration) *play {
	c.next++
	p := &play{c: c, leg: leg, deadline: cmp.Or(limit, deadline), name: fmt.Sprintf("%s-%d", leg, c.next), quit: make(chan struct{})}
	p.wg.Go(p.run)
	return p
}

// stop ends the traffic and returns what became of every request, by their beginning.
func (p *play) stop() []*record {
	close(p.quit)
	p.wg.Wait()
	slices.SortFunc(p.records, func(a, b *record) int { return a.out.Began.Compare(b.out.Began) })
	return p.records
}

// run begins requests until stop.
func (p *play) run() {
	start := time.Now()
	for i := 0; ; i++ {
		select {
		case <-p.quit:
			return
		case <-time.After(time.Until(start.Add(time.Duration(i) * time.Second / rate))):
		}
		p.wg.Go(func() { p.request(i) })
	}
}

// ahead is by how much the source of a request begins before its consumer. In legs pd and
// demand every second demand is early. In leg probe a consumer finds only what is there:
// it waits for the source, if that goes on, for a while.
func (p *play) ahead(i int) (ahead, most time.Duration) {
	switch {
	case p.leg == "probe":
		return 200 * time.Millisecond, 2 * time.Second
	case i/2%2 == 1:
		return -20 * time.Millisecond, 0
	}
	return 150 * time.Millisecond, 0
}

func (p *play) request(i int) {
	s := p.c.sources[[]string{"a", "b"}[i%2]]
	r := &trace()[i%len(trace())]
	id := fmt.Sprintf("%s-%d", p.name, i)
	turn := func(peer string) *replay.Turn {
		return &replay.Turn{ID: id, Salt: id, Request: r, Leg: p.leg, Peer: peer, Deadline: p.deadline}
	}
	rec := &record{id: id, source: s.n.id}
	ahead, most := p.ahead(i)
	produced := make(chan error, 1)
	produce := func() { produced <- s.produce(turn("c")) }
	consume := func() {
		rec.out, rec.err = p.c.engine.Consume(context.Background(), turn(s.n.id))
		if rec.err != nil {
			rec.out = &replay.Outcome{Began: time.Now()}
		}
	}
	if ahead >= 0 {
		begun := time.Now()
		p.wg.Go(produce)
		select {
		case err := <-produced:
			produced <- err
			time.Sleep(time.Until(begun.Add(ahead)))
		case <-time.After(max(ahead, most)):
		}
	} else {
		p.wg.Go(func() {
			time.Sleep(-ahead)
			produce()
		})
	}
	consume()
	rec.stored = <-produced == nil
	p.mu.Lock()
	p.records = append(p.records, rec)
	p.mu.Unlock()
}
