package engine

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// attached is one engine: its requests, and the events that it has not read yet.
type attached struct {
	server *Server
	id     string
	name   string

	gone   context.Context // ends when the engine is gone
	leaves context.CancelFunc
	left   chan struct{} // closed when the last word of every request is spoken

	mu         sync.Mutex
	attachment Attachment // nil while attaching
	blocks     map[string]uint32
	marks      int // events that it gave at Attach
	streaming  bool
	leaving    bool
	watchdog   *time.Timer
	beginning  sync.WaitGroup
	requests   map[string]*request
	jobs       int // accepted, event not sent
	lastJob    uint64
	events     []*enginepb.Event
	more       chan struct{} // has room for one; a token says that events is not empty
}

func newAttached(s *Server, id, name string) *attached {
	e := &attached{server: s, id: id, name: name, left: make(chan struct{}), requests: map[string]*request{}, more: make(chan struct{}, 1)}
	e.gone, e.leaves = context.WithCancel(context.Background())
	return e
}

// open makes the engine findable, and takes it for gone when it opens no stream.
func (e *attached) open(a Attachment, reply *enginepb.AttachReply, marks int, within time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.attachment, e.blocks, e.marks = a, map[string]uint32{}, marks
	for _, r := range reply.Regions {
		e.blocks[r.Group] = r.Blocks
	}
	e.watchdog = time.AfterFunc(within, func() {
		e.mu.Lock()
		streaming := e.streaming
		e.mu.Unlock()
		if !streaming {
			e.leave("it opened no stream of events in time")
		}
	})
}

func (e *attached) ready(opening bool) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.attachment != nil && !e.leaving && (e.streaming || opening)
}

func (e *attached) claimStream() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.attachment == nil || e.leaving:
		return status.Error(codes.NotFound, "no engine with this engine_id is attached: attach first")
	case e.streaming:
		return status.Error(codes.AlreadyExists, "Events is open already for this engine; it is opened once")
	}
	e.streaming = true
	stopTimer(e.watchdog)
	return nil
}

func (e *attached) live() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.requests)
}

// post queues an event for the stream.
func (e *attached) post(ev *enginepb.Event) {
	e.mu.Lock()
	e.events = append(e.events, ev)
	e.mu.Unlock()
	select {
	case e.more <- struct{}{}:
	default:
	}
}

// takeEvents waits for events. open is false when the engine is gone; what was posted
// until then is still returned.
func (e *attached) takeEvents(ctx context.Context) (events []*enginepb.Event, open bool) {
	open = true
	select {
	case <-e.more:
	case <-ctx.Done():
		open = false
	case <-e.left:
		open = false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	events, e.events = e.events, nil
	e.jobs -= len(events)
	return events, open
}

// leave takes the engine for gone: no new request, an end for each live one, then the
// regions. It returns at once; left is closed at the end.
func (e *attached) leave(why string) {
	e.mu.Lock()
	if e.leaving || e.attachment == nil {
		e.mu.Unlock()
		return
	}
	e.leaving = true
	stopTimer(e.watchdog)
	e.mu.Unlock()
	e.leaves()
	go func() {
		e.beginning.Wait()
		e.mu.Lock()
		live := make([]*request, 0, len(e.requests))
		for _, r := range e.requests {
			live = append(live, r)
		}
		e.mu.Unlock()
		for _, r := range live {
			r.abandon(why)
		}
		for _, r := range live {
			<-r.ended
		}
		e.attachment.Close()
		e.server.forget(e)
		e.server.log.Info("engine left", "engine", e.name, "reason", why, "requests_ended", len(live))
		close(e.left)
	}()
}

// begin opens a request. Its id is taken while the backend plans, so that a second
// request with the same id is refused and not confused with it.
func (e *attached) begin(ctx context.Context, b *enginepb.BeginRequest) (*enginepb.BeginReply, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &request{
		engine: e, id: b.RequestId, role: b.Role, begin: b, hashes: uint64(len(b.Hashes)) / uint64(b.HashBytes),
		giveUp: cancel, counts: &enginepb.FinishReply{}, ended: make(chan struct{}),
	}
	e.mu.Lock()
	switch {
	case ctx.Err() != nil: // its Finish may have come before it
		e.mu.Unlock()
		return nil, status.FromContextError(ctx.Err()).Err()
	case e.leaving:
		e.mu.Unlock()
		return nil, status.Error(codes.NotFound, "the engine is gone: attach again")
	case e.requests[r.id] != nil:
		e.mu.Unlock()
		return nil, status.Errorf(codes.AlreadyExists, "request %q is live already; finish it first or choose another request_id", r.id)
	case len(e.requests) >= e.server.bounds.RequestsMax:
		n := len(e.requests)
		e.mu.Unlock()
		return nil, status.Errorf(codes.ResourceExhausted, "%s has %d live requests, and bounds.requests is %d; finish some or raise the bound", describe(e.name), n, e.server.bounds.RequestsMax)
	}
	e.requests[r.id] = r
	e.beginning.Add(1)
	e.mu.Unlock()
	defer e.beginning.Done()

	defer context.AfterFunc(e.gone, cancel)()
	backend, reply, err := e.attachment.Begin(ctx, b)
	if err != nil {
		e.drop(r)
		close(r.ended)
		return nil, err
	}
	e.mu.Lock()
	r.backend, r.reuse = backend, reply.ReuseTokens
	err = ctx.Err() // with the lock: a Finish finds the backend, or its giveUp is seen here
	e.mu.Unlock()
	if err != nil { // the caller does not hear that it is live
		r.mu.Lock()
		defer r.mu.Unlock()
		if !r.finishing {
			r.end(Finish{Abort: true, Cause: "the caller of Begin gave up"})
		}
		return nil, status.FromContextError(err).Err()
	}
	return reply, nil
}

func (e *attached) drop(r *request) {
	e.mu.Lock()
	delete(e.requests, r.id)
	e.mu.Unlock()
	e.server.changed()
}

// request is the server's book of one request: it checks, numbers and orders jobs.
type request struct {
	engine  *attached
	id      string
	role    enginepb.Role
	begin   *enginepb.BeginRequest
	giveUp  func()  // ends Begin early
	backend Request // set once, under engine.mu, when Begin is done
	reuse   uint64
	counts  *enginepb.FinishReply // final once ended is closed
	ended   chan struct{}

	mu        sync.Mutex // orders the calls of one request; never held while a job runs
	stored    bool
	loaded    bool
	computed  uint64
	hashes    uint64 // granules whose hash is known
	finishing bool
	running   bool
	queue     []func()
}

// enqueue adds work behind the request's other work. r.mu is held.
func (r *request) enqueue(work func()) {
	r.queue = append(r.queue, work)
	if !r.running {
		r.running = true
		go r.work()
	}
}

func (r *request) work() {
	for {
		r.mu.Lock()
		if len(r.queue) == 0 {
			r.running, r.queue = false, nil
			r.mu.Unlock()
			return
		}
		next := r.queue[0]
		r.queue = slices.Delete(r.queue, 0, 1)
		r.mu.Unlock()
		next()
	}
}

// accept numbers a job and queues it. r.mu is held. admit has counted it.
func (r *request) accept(job Job) *enginepb.JobReply {
	e := r.engine
	e.mu.Lock()
	e.lastJob++
	id := e.lastJob
	e.mu.Unlock()
	r.enqueue(func() {
		ev := job()
		ev.JobId, ev.RequestId = id, r.id
		e.post(ev)
	})
	return &enginepb.JobReply{JobId: id}
}

// admit counts a job against the engine's bound. r.mu is held.
func (r *request) admit() error {
	if r.finishing {
		return status.Errorf(codes.FailedPrecondition, "request %q is being finished and takes no more jobs", r.id)
	}
	e := r.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.leaving {
		return status.Error(codes.NotFound, "the engine is gone: attach again")
	}
	if e.jobs >= e.server.bounds.JobsMax {
		return status.Errorf(codes.ResourceExhausted, "%s has %d jobs whose events it has not read, and at most %d are allowed; read Events faster or give fewer jobs", describe(e.name), e.jobs, e.server.bounds.JobsMax)
	}
	e.jobs++
	return nil
}

// refused takes back what admit counted.
func (r *request) refused(err error) (*enginepb.JobReply, error) {
	r.engine.mu.Lock()
	r.engine.jobs--
	r.engine.mu.Unlock()
	if _, ok := status.FromError(err); !ok {
		err = status.Error(codes.Internal, err.Error())
	}
	return nil, err
}

func (r *request) store(m *enginepb.StoreRequest) (*enginepb.JobReply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.checkStore(m); err != nil {
		return nil, err
	}
	if err := r.admit(); err != nil {
		return nil, err
	}
	job, err := r.backend.Store(Step{
		Computed: m.ComputedTokens, Native: m.NativeTokens, First: !r.stored,
		Blocks: m.Blocks, MoreHashes: m.MoreHashes, Event: m.Event,
	})
	if err != nil {
		return r.refused(err)
	}
	r.stored, r.computed = true, m.ComputedTokens
	r.hashes += uint64(len(m.MoreHashes)) / uint64(r.begin.HashBytes)
	return r.accept(job), nil
}

func (r *request) load(m *enginepb.LoadRequest) (*enginepb.JobReply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.checkLoad(m); err != nil {
		return nil, err
	}
	if err := r.admit(); err != nil {
		return nil, err
	}
	job, err := r.backend.Load(m.Blocks, m.Event)
	if err != nil {
		return r.refused(err)
	}
	r.loaded = true
	return r.accept(job), nil
}

// finish queues the request's end and returns a channel that is closed after it.
func (r *request) finish(m *enginepb.FinishRequest) (<-chan struct{}, error) {
	if r.cancelBegin() {
		return r.ended, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.finishing {
		return nil, status.Errorf(codes.NotFound, "request %q is finished or being finished", r.id)
	}
	f := Finish{Abort: m.Abort, Computed: r.computed}
	if r.role == enginepb.Role_PRODUCER {
		if err := r.checkFinish(m); err != nil {
			return nil, err
		}
		if m.ComputedTokens > 0 {
			f.Computed = m.ComputedTokens
		}
	}
	if m.Abort {
		r.backend.Interrupt("the engine aborted the request")
	}
	r.end(f)
	return r.ended, nil
}

// cancelBegin makes Begin end the request, when Begin is still at work.
func (r *request) cancelBegin() bool {
	r.engine.mu.Lock()
	defer r.engine.mu.Unlock()
	if r.backend != nil {
		return false
	}
	r.giveUp()
	return true
}

// abandon ends the request because its engine is gone.
func (r *request) abandon(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.backend.Interrupt(why)
	if !r.finishing {
		r.end(Finish{Abort: true, Computed: r.computed, Cause: why})
	}
}

// end queues the end. r.mu is held.
func (r *request) end(f Finish) {
	r.finishing = true
	r.enqueue(func() {
		r.counts = r.backend.Finish(f)
		r.engine.drop(r)
		close(r.ended)
	})
}
