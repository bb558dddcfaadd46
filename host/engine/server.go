package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// A Backend does what engines ask for.
type Backend interface {
	// Attach judges the deployment and allocates the regions. Its error is a gRPC
	// status.
	Attach(ctx context.Context, r *enginepb.AttachRequest) (Attachment, error)
}

// An Attachment is an attached engine as the backend sees it.
type Attachment interface {
	// Reply is the answer to Attach; the server adds the engine id.
	Reply() *enginepb.AttachReply
	// Begin opens a request that was checked. It may take as long as the plan needs
	// lookups, and ends early with ctx.
	Begin(ctx context.Context, r *enginepb.BeginRequest) (Request, *enginepb.BeginReply, error)
	// Close frees the regions. It is called once, after the last request has ended.
	Close()
}

// A Request is the backend's side of one request. Store and Load are called in order,
// one at a time; their jobs run in the same order, one at a time.
type Request interface {
	// Store takes up a step and returns the job that copies its blocks.
	Store(s Step) (Job, error)
	// Load returns the job that brings what was fetched into the named blocks, once the
	// engine's event is reached; see Step.Event.
	Load(blocks []*enginepb.BlockRun, event uint32) (Job, error)
	// Interrupt makes the jobs that run or wait end soon. It may be called at any
	// time and more than once.
	Interrupt(cause string)
	// Finish ends the request, after its last job. It is called exactly once.
	Finish(f Finish) *enginepb.FinishReply
}

// A Job does its work and returns its one event; the server fills in the numbers.
type Job func() *enginepb.Event

// A Step is a store that was checked.
type Step struct {
	// Computed tokens, ever rising. First says that this is the request's first
	// step, which started from Native tokens.
	Computed, Native uint64
	First            bool
	Blocks           []*enginepb.BlockRun
	MoreHashes       []byte
	// Event to wait for before the blocks are touched, counted from 1 in the engine's
	// AttachRequest; 0 = none.
	Event uint32
}

// A Finish says how a request ends.
type Finish struct {
	Abort bool
	// Computed tokens at the end.
	Computed uint64
	// Cause says why, when Abort is set and the engine did not ask for it.
	Cause string
}

// Bounds limit what engines can make the daemon hold.
type Bounds struct {
	// EnginesMax attached at a time.
	EnginesMax int
	// RequestsMax live in one engine.
	RequestsMax int
	// JobsMax of one engine whose event it has not read yet.
	JobsMax int
	// MessageBytesMax of one message.
	MessageBytesMax int
	// EventsWithin is how long an engine may take from Attach to Events.
	EventsWithin time.Duration
}

// JobsPerRequest is what JobsMax allows for each request: a step in work, the next
// one, and the load or the end behind them.
const JobsPerRequest = 4

// handshakeTimeout bounds a connection that says nothing or garbage.
const handshakeTimeout = 2 * time.Second

// closeGrace is how long Close waits for engines to read their last events.
const closeGrace = 500 * time.Millisecond

// streamsMax bounds the calls in work on one connection.
const streamsMax = 4096

// A Server is the engine API of one daemon.
type Server struct {
	enginepb.UnimplementedEngineServer
	backend Backend
	limits  *Limits
	bounds  Bounds
	log     *slog.Logger
	grpc    *grpc.Server

	mu       sync.Mutex
	engines  map[string]*attached
	draining bool
	idle     chan struct{} // closed and replaced whenever an engine or request ends
}

// NewServer returns a server that is not serving yet.
func NewServer(b Backend, l *Limits, bounds Bounds, log *slog.Logger) *Server {
	s := &Server{backend: b, limits: l, bounds: bounds, log: log, engines: map[string]*attached{}, idle: make(chan struct{})}
	s.grpc = grpc.NewServer(
		grpc.Creds(peerCredentials{uid: uint32(os.Geteuid())}),
		grpc.MaxRecvMsgSize(bounds.MessageBytesMax),
		grpc.MaxConcurrentStreams(streamsMax),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.WaitForHandlers(true),
	)
	enginepb.RegisterEngineServer(s.grpc, s)
	return s
}

// Serve accepts engines on l until Close.
func (s *Server) Serve(l net.Listener) error {
	err := s.grpc.Serve(l)
	if errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return err
}

// Close refuses new engines and requests, waits for the live requests until ctx ends,
// and then takes the rest for gone.
func (s *Server) Close(ctx context.Context) {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	for {
		s.mu.Lock()
		idle, live := s.idle, s.requestsLocked()
		s.mu.Unlock()
		if live == 0 {
			break
		}
		select {
		case <-idle:
			continue
		case <-ctx.Done():
		}
		break
	}
	s.mu.Lock()
	all := make([]*attached, 0, len(s.engines))
	for _, e := range s.engines {
		all = append(all, e)
	}
	s.mu.Unlock()
	for _, e := range all {
		e.leave("the daemon stops")
	}
	for _, e := range all {
		<-e.left
	}
	// The last events are in the streams; an engine that does not read them is cut off.
	cut := time.AfterFunc(closeGrace, s.grpc.Stop)
	defer cut.Stop()
	s.grpc.GracefulStop()
}

func (s *Server) requestsLocked() (n int) {
	for _, e := range s.engines {
		n += e.live()
	}
	return n
}

// Counts returns the engines attached and their live requests.
func (s *Server) Counts() (engines, requests int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.engines), s.requestsLocked()
}

// changed wakes Close.
func (s *Server) changed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.idle)
	s.idle = make(chan struct{})
}

var errDraining = status.Error(codes.Unavailable, "the daemon is stopping; attach again when it is back, and compute locally until then")

// Attach implements the engine API.
func (s *Server) Attach(ctx context.Context, r *enginepb.AttachRequest) (*enginepb.AttachReply, error) {
	if err := s.limits.checkAttach(r); err != nil {
		return nil, err
	}
	var id [16]byte
	rand.Read(id[:])
	e := newAttached(s, hex.EncodeToString(id[:]), r.EngineName)
	s.mu.Lock()
	switch {
	case s.draining:
		s.mu.Unlock()
		return nil, errDraining
	case len(s.engines) >= s.bounds.EnginesMax:
		n := len(s.engines)
		s.mu.Unlock()
		return nil, status.Errorf(codes.ResourceExhausted, "%d engines are attached, and bounds.engines is %d; detach one or raise the bound", n, s.bounds.EnginesMax)
	}
	s.engines[e.id] = e
	s.mu.Unlock()

	a, err := s.backend.Attach(ctx, r)
	if err != nil {
		s.forget(e)
		close(e.left)
		return nil, err
	}
	reply := a.Reply()
	reply.EngineId = e.id
	s.mu.Lock()
	draining := s.draining
	if !draining { // from here on Close ends it
		e.open(a, reply, len(r.Events), s.bounds.EventsWithin)
	}
	s.mu.Unlock()
	if draining { // Close could not end what had no attachment yet, and waits for left
		a.Close()
		s.forget(e)
		close(e.left)
		return nil, errDraining
	}
	s.log.Info("engine attached", "engine", e.name, "regions", len(reply.Regions))
	return reply, nil
}

func (s *Server) forget(e *attached) {
	s.mu.Lock()
	delete(s.engines, e.id)
	s.mu.Unlock()
	s.changed()
}

// engine returns an attached engine whose stream of events is open.
func (s *Server) engine(id string) (*attached, error) {
	s.mu.Lock()
	e := s.engines[id]
	s.mu.Unlock()
	if e == nil || !e.ready(false) {
		if e != nil && e.ready(true) {
			return nil, status.Error(codes.FailedPrecondition, "Events is not open for this engine; open the stream after Attach and before the first request")
		}
		return nil, status.Error(codes.NotFound, "no engine with this engine_id is attached; its stream of events may have closed: attach again")
	}
	return e, nil
}

// Events implements the engine API: it sends results until either side ends the stream.
func (s *Server) Events(r *enginepb.EventsRequest, stream grpc.ServerStreamingServer[enginepb.Event]) error {
	s.mu.Lock()
	e := s.engines[r.EngineId]
	s.mu.Unlock()
	if e == nil {
		return status.Error(codes.NotFound, "no engine with this engine_id is attached: attach first")
	}
	if err := e.claimStream(); err != nil {
		return err
	}
	defer func() {
		e.leave("the engine left") // its client closes the stream; a crash ends it the same way
		<-e.left
	}()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		events, open := e.takeEvents(stream.Context())
		for _, ev := range events {
			if err := stream.Send(ev); err != nil {
				return err
			}
		}
		if !open {
			if err := stream.Context().Err(); err != nil {
				return status.FromContextError(err).Err()
			}
			return status.Error(codes.Unavailable, "the daemon stops")
		}
	}
}

// Begin implements the engine API.
func (s *Server) Begin(ctx context.Context, r *enginepb.BeginRequest) (*enginepb.BeginReply, error) {
	e, err := s.engine(r.EngineId)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	if draining {
		return nil, errDraining
	}
	if err := s.limits.checkBegin(r); err != nil {
		return nil, err
	}
	return e.begin(ctx, r)
}

// Store implements the engine API.
func (s *Server) Store(_ context.Context, r *enginepb.StoreRequest) (*enginepb.JobReply, error) {
	req, err := s.request(r.EngineId, r.RequestId, false)
	if err != nil {
		return nil, err
	}
	return req.store(r)
}

// Load implements the engine API.
func (s *Server) Load(_ context.Context, r *enginepb.LoadRequest) (*enginepb.JobReply, error) {
	req, err := s.request(r.EngineId, r.RequestId, false)
	if err != nil {
		return nil, err
	}
	return req.load(r)
}

// Finish implements the engine API.
func (s *Server) Finish(ctx context.Context, r *enginepb.FinishRequest) (*enginepb.FinishReply, error) {
	req, err := s.request(r.EngineId, r.RequestId, true)
	if err != nil {
		return nil, err
	}
	done, err := req.finish(r)
	if err != nil {
		return nil, err
	}
	select {
	case <-done:
		return req.counts, nil
	case <-ctx.Done(): // the request ends all the same
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// request returns a live request, and with beginning also one that is still in Begin.
func (s *Server) request(engineID, requestID string, beginning bool) (*request, error) {
	e, err := s.engine(engineID)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.requests[requestID]
	if r == nil || r.backend == nil && !beginning {
		return nil, status.Errorf(codes.NotFound, "no live request %q; begin it first, and name it until it is finished", requestID)
	}
	return r, nil
}

func stopTimer(t *time.Timer) {
	if t != nil {
		t.Stop()
	}
}

// describe is the name of an engine in messages.
func describe(name string) string {
	if name == "" {
		return "an unnamed engine"
	}
	return fmt.Sprintf("engine %q", name)
}
