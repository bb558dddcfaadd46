package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// ErrGone is wrapped by calls of a client whose stream of events has ended: the
// daemon is gone, or Close was called. The engine goes on alone.
var ErrGone = errors.New("the daemon is gone")

// clientMessageBytesMax is what the client takes from the daemon in one message: the
// reply to Begin may list every chunk of a long prompt.
const clientMessageBytesMax = 64 << 20

// A Client is one engine's connection to the daemon of its node. Its methods may be
// called from any number of goroutines.
type Client struct {
	conn *grpc.ClientConn
	rpc  enginepb.EngineClient

	cancel context.CancelFunc // ends the stream of events
	done   chan struct{}      // closed when the dispatcher has ended

	mu       sync.Mutex
	id       string
	regions  []*Region
	results  map[uint64]*enginepb.Event // events that nobody has waited for yet
	waiters  map[uint64]chan struct{}   // closed when the job's event is in results
	gone     error
	attached bool
}

// A Region is the memory of one group. What the daemon allocated as a file is mapped into
// this process; memory on a GPU is the caller's to open, by Memory.
type Region struct {
	Group string
	// StrideBytes is the size of one block, Blocks how many there are.
	StrideBytes uint64
	Blocks      uint32
	// Layout says where the fragments of a block are. Memory is what the daemon has
	// allocated; nil when the engine owns the memory.
	Layout []*enginepb.Stride
	Memory *enginepb.Memory

	mapping *shm.Mapping
}

// Bytes is the whole memory of a region that is mapped here, or nil. It must not be used
// after the client's Close.
func (r *Region) Bytes() []byte {
	if r.mapping == nil {
		return nil
	}
	return r.mapping.Bytes()
}

// Block returns the memory of block id of a region that is mapped here and has the layout
// of one fragment. It must not be used after the client's Close.
func (r *Region) Block(id uint32) []byte {
	off := uint64(id) * r.StrideBytes
	return r.mapping.Bytes()[off : off+r.StrideBytes : off+r.StrideBytes]
}

// Dial connects to a daemon's engine socket. The context bounds the connection
// attempt only.
func Dial(ctx context.Context, socket string) (*Client, error) {
	conn, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(clientMessageBytesMax)))
	if err != nil {
		return nil, fmt.Errorf("engine socket %s: %w", socket, err)
	}
	return &Client{
		conn: conn, rpc: enginepb.NewEngineClient(conn), done: make(chan struct{}),
		results: map[uint64]*enginepb.Event{}, waiters: map[uint64]chan struct{}{},
	}, nil
}

// Attach registers the engine, maps its regions and opens the stream of events. A
// client attaches once. deployment is the deployment file; empty means the node's own.
func (c *Client) Attach(ctx context.Context, name string, deployment []byte, regions []*enginepb.Region) (*enginepb.AttachReply, error) {
	return c.AttachWith(ctx, &enginepb.AttachRequest{EngineName: name, Deployment: deployment, Regions: regions})
}

// AttachWith is Attach with all that an AttachRequest can say.
func (c *Client) AttachWith(ctx context.Context, r *enginepb.AttachRequest) (*enginepb.AttachReply, error) {
	c.mu.Lock()
	again := c.attached
	c.attached = true
	c.mu.Unlock()
	if again {
		return nil, errors.New("engine client: attached already; a client attaches once")
	}
	reply, err := c.rpc.Attach(ctx, r, grpc.WaitForReady(false))
	if err != nil {
		close(c.done)
		return nil, err
	}
	streamCtx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	stop := context.AfterFunc(ctx, cancel) // until the stream is open, ctx bounds it
	stream, err := c.rpc.Events(streamCtx, &enginepb.EventsRequest{EngineId: reply.EngineId})
	if err == nil {
		_, err = stream.Header() // sent once the daemon counts on the stream
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = c.mapRegions(reply)
	}
	if err != nil {
		cancel()
		close(c.done)
		return nil, err
	}
	c.mu.Lock()
	c.id = reply.EngineId
	c.mu.Unlock()
	go c.dispatch(stream)
	return reply, nil
}

func (c *Client) mapRegions(reply *enginepb.AttachReply) error {
	for _, r := range reply.Regions {
		region := &Region{Group: r.Group, StrideBytes: r.StrideBytes, Blocks: r.Blocks, Layout: r.Layout, Memory: r.Memory}
		m := r.Memory
		if m == nil && r.Path != "" { // a daemon that knows files alone
			m = &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_FILE, Path: r.Path, OffsetBytes: r.OffsetBytes, LengthBytes: r.StrideBytes * uint64(r.Blocks)}
		}
		if m.GetKind() == enginepb.MemoryKind_MEMORY_FILE {
			var err error
			if region.mapping, err = shm.Map(m.Path, int64(m.OffsetBytes), int64(m.LengthBytes)); err != nil {
				return fmt.Errorf("region of group %s: %w", r.Group, err)
			}
		}
		c.regions = append(c.regions, region)
	}
	return nil
}

// dispatch hands each event to whoever waits for its job.
func (c *Client) dispatch(stream grpc.ServerStreamingClient[enginepb.Event]) {
	defer close(c.done)
	for {
		ev, err := stream.Recv()
		c.mu.Lock()
		if err != nil {
			c.gone = fmt.Errorf("%w: %w", ErrGone, err)
			for _, w := range c.waiters {
				close(w)
			}
			clear(c.waiters)
			c.mu.Unlock()
			return
		}
		c.results[ev.JobId] = ev
		if w := c.waiters[ev.JobId]; w != nil {
			close(w)
			delete(c.waiters, ev.JobId)
		}
		c.mu.Unlock()
	}
}

// Region returns the memory of a group, or nil when the engine asked for none.
func (c *Client) Region(group string) *Region {
	for _, r := range c.regions {
		if r.Group == group {
			return r
		}
	}
	return nil
}

// giveUpWait bounds what a Begin that was given up takes to tell the daemon. The daemon
// answers in well under a millisecond unless it is frozen, and then the caller should go
// on without it.
const giveUpWait = 250 * time.Millisecond

// Begin opens a request. The client fills in the engine id. When ctx ends before the
// reply, the request is finished with abort: nothing of it stays live.
func (c *Client) Begin(ctx context.Context, r *enginepb.BeginRequest) (*enginepb.BeginReply, error) {
	if err := ctx.Err(); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	r.EngineId = c.engineID()
	reply, err := c.rpc.Begin(ctx, r)
	if code := status.Code(err); code == codes.DeadlineExceeded || code == codes.Canceled {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveUpWait)
		defer cancel()
		// NotFound: it was not live. Any other error: the daemon is gone or frozen, and
		// the end of the stream of events ends the request.
		_, _ = c.rpc.Finish(end, &enginepb.FinishRequest{EngineId: r.EngineId, RequestId: r.RequestId, Abort: true})
	}
	return reply, err
}

// Store tells that a step of a producer has ended, and returns the job's number.
func (c *Client) Store(ctx context.Context, r *enginepb.StoreRequest) (job uint64, err error) {
	r.EngineId = c.engineID()
	reply, err := c.rpc.Store(ctx, r)
	return reply.GetJobId(), err
}

// Load brings what was fetched into the named blocks, and returns the job's number.
func (c *Client) Load(ctx context.Context, r *enginepb.LoadRequest) (job uint64, err error) {
	r.EngineId = c.engineID()
	reply, err := c.rpc.Load(ctx, r)
	return reply.GetJobId(), err
}

// Finish ends a request. It returns once all of the request's jobs have ended.
func (c *Client) Finish(ctx context.Context, r *enginepb.FinishRequest) (*enginepb.FinishReply, error) {
	r.EngineId = c.engineID()
	return c.rpc.Finish(ctx, r)
}

func (c *Client) engineID() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.id
}

// Wait returns the event of a job, once: a second Wait for the same job waits until
// its context ends. Every job is waited for, or its event stays in memory until Close.
func (c *Client) Wait(ctx context.Context, job uint64) (*enginepb.Event, error) {
	c.mu.Lock()
	if ev, ok := c.results[job]; ok {
		delete(c.results, job)
		c.mu.Unlock()
		return ev, nil
	}
	if c.gone != nil {
		defer c.mu.Unlock()
		return nil, c.gone
	}
	w := c.waiters[job]
	if w == nil {
		w = make(chan struct{})
		c.waiters[job] = w
	}
	c.mu.Unlock()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-w:
		return c.Wait(ctx, job)
	}
}

// Gone is closed when the stream of events has ended: compute everything locally.
func (c *Client) Gone() <-chan struct{} { return c.done }

// Close ends the stream of events, which is the last word for every request, and
// unmaps the regions.
func (c *Client) Close() error {
	c.mu.Lock()
	attached := c.attached
	c.mu.Unlock()
	if c.cancel != nil {
		c.cancel()
	}
	err := c.conn.Close()
	if attached {
		<-c.done
	}
	for _, r := range c.regions {
		if r.mapping != nil {
			err = errors.Join(err, r.mapping.Close())
		}
	}
	c.regions = nil
	return err
}
