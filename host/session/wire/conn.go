package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/host/limitlog"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// stream is either end of a session's gRPC stream.
type stream interface {
	Send(*sessionpb.Envelope) error
	Recv() (*sessionpb.Envelope, error)
	Context() context.Context
}

// A conn is one connection with a peer: a reader, a writer, and their queues.
type conn struct {
	s      stream
	dialed bool // by this node
	up     bool // actor only: the session began on it

	out     chan *sessionpb.Envelope // to the writer
	adopted chan struct{}            // closed when deliver is set
	deliver func(*sessionpb.Envelope, error) error
	unread  chan struct{}       // one entry a message that the actor has not taken
	first   *sessionpb.Envelope // a message that was read before adoption, or nil

	once    sync.Once
	ending  chan struct{} // closed: write what is queued, then end
	gone    chan struct{} // closed: end now
	goOnce  sync.Once
	reason  string        // why; set before ending or gone is closed
	linger  time.Duration // the longest wait for what is queued to go out
	close   func()        // of a dialed connection
	remote  func() net.Addr
	explain func(error) error
	judge   func() error // asks again whether the node is allowed
	queued  atomic.Int64 // encoded bytes in out
}

func newConn(s stream, dialed bool, queue int, linger time.Duration) *conn {
	return &conn{s: s, dialed: dialed, out: make(chan *sessionpb.Envelope, queue), adopted: make(chan struct{}),
		unread: make(chan struct{}, unreadMax), ending: make(chan struct{}), gone: make(chan struct{}), linger: linger,
		remote: func() net.Addr { return nil }, judge: func() error { return nil }}
}

// queue reports whether there was room.
func (c *conn) queue(e *sessionpb.Envelope) bool {
	size := int64(proto.Size(e))
	// One message always has room: its size is bounded by itself.
	if n := c.queued.Add(size); n > queuedBytesMax && n > size {
		c.queued.Add(-size)
		return false
	}
	select {
	case c.out <- e:
		return true
	default:
		c.queued.Add(-size)
		return false
	}
}

// send writes one message that was queued.
func (c *conn) send(e *sessionpb.Envelope) error {
	c.queued.Add(-int64(proto.Size(e)))
	return c.s.Send(e)
}

// finish ends the connection after what is queued, or after linger.
func (c *conn) finish(reason string) {
	c.once.Do(func() {
		c.reason = reason
		close(c.ending)
	})
}

// cut ends the connection now.
func (c *conn) cut(reason string) {
	c.finish(reason)
	c.goOnce.Do(func() { close(c.gone) })
}

// read notes that the actor took a message.
func (c *conn) read() { <-c.unread }

// serve runs the connection until it ends; cancel makes Send and Recv return.
func (c *conn) serve(cancel func()) {
	var wg sync.WaitGroup
	written, read := make(chan struct{}), make(chan struct{})
	wg.Go(func() { defer close(written); c.write() })
	wg.Go(func() { defer close(read); c.receive() })
	<-c.ending
	limit := time.NewTimer(c.linger)
	defer limit.Stop()
	select {
	case <-written:
	case <-c.gone:
	case <-limit.C:
	}
	if c.dialed {
		// Cancelling a gRPC call may drop what Send has taken; the peer's end of the
		// stream says that it has read everything.
		select {
		case <-read:
		case <-c.gone:
		case <-limit.C:
		}
	}
	c.cut(c.reason)
	cancel()
	wg.Wait()
}

// write sends what is queued until the connection ends.
func (c *conn) write() {
	for {
		select {
		case e := <-c.out:
			if c.send(e) != nil {
				return // the reader learns why
			}
		case <-c.ending:
			for {
				select {
				case e := <-c.out:
					if c.send(e) != nil {
						return
					}
				default:
					if cs, ok := c.s.(interface{ CloseSend() error }); ok {
						_ = cs.CloseSend()
					}
					return
				}
			}
		case <-c.gone:
			return
		}
	}
}

// receive brings messages to the actor until the stream ends.
func (c *conn) receive() {
	select {
	case <-c.adopted:
	case <-c.gone:
		return
	}
	for {
		e, err := c.first, error(nil)
		if c.first = nil; e == nil {
			e, err = c.s.Recv()
		}
		switch {
		case errors.Is(err, io.EOF):
			err = errors.New("closed by the peer")
		case err != nil && c.explain != nil:
			err = c.explain(err)
		}
		select {
		case c.unread <- struct{}{}:
		case <-c.gone:
			return
		}
		if c.deliver(e, err) != nil {
			<-c.unread
			c.cut("closed")
			return
		}
		if err != nil {
			c.cut(err.Error())
			return
		}
	}
}

// clientTLS returns the TLS of a connection to a node, which must be whom it says.
func (p *Peers) clientTLS(nodeID string) *tls.Config {
	cfg := p.cfg.ClientTLS
	if p.cfg.Verify == nil {
		return cfg
	}
	before := cfg.VerifyConnection
	cfg = cfg.Clone()
	cfg.VerifyConnection = func(state tls.ConnectionState) error {
		if before != nil {
			if err := before(state); err != nil {
				return err
			}
		}
		if err := p.cfg.Verify(nodeID, state); err != nil {
			return fmt.Errorf("node id %q: %w", nodeID, err)
		}
		return nil
	}
	return cfg
}

// connect opens a stream to a node at an address. It sets remote as soon as something there
// takes a connection, which may be long before it ends.
func (p *Peers) connect(ctx context.Context, nodeID, addr string, remote *atomic.Pointer[net.Addr]) (*conn, error) {
	creds := insecure.NewCredentials()
	if p.cfg.ClientTLS != nil {
		creds = credentials.NewTLS(p.clientTLS(nodeID))
	}
	l := &p.cfg.Limits
	opts := []grpc.DialOption{grpc.WithTransportCredentials(creds), grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0), grpc.WithDisableRetry(), grpc.WithDisableServiceConfig(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: l.ConnectHello}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(l.MessageBytesMax), grpc.MaxCallSendMsgSize(l.MessageBytesMax))}
	dial := p.cfg.Dial
	if dial == nil {
		dial = func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		}
	}
	var failed atomic.Pointer[error]
	opts = append(opts, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := dial(ctx, addr)
		if err != nil {
			failed.Store(&err)
			return nil, err
		}
		a := c.RemoteAddr()
		remote.Store(&a)
		return c, nil
	}))
	cc, err := grpc.NewClient("passthrough:///"+addr, opts...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	s, err := sessionpb.NewPeerClient(cc).Session(ctx)
	if err != nil {
		_ = cc.Close()
		if why := failed.Load(); why != nil && remote.Load() == nil {
			err = *why // which gRPC wraps in three sentences of its own
		}
		return nil, fmt.Errorf("dial %s: %w", addr, p.cfg.Explain(err))
	}
	c := newConn(s, true, l.QueueMessages, l.ConnectHello)
	c.close = func() { _ = cc.Close() }
	c.remote = func() net.Addr {
		if a := remote.Load(); a != nil {
			return *a
		}
		return nil
	}
	c.judge = func() error { // the configuration names the peer; its certificate is what can be wrong
		pr, ok := grpcpeer.FromContext(s.Context())
		if !ok {
			return nil
		}
		return p.verify(nodeID, pr)
	}
	c.explain = p.cfg.Explain
	return c, nil
}

// shyLog writes few lines about what anybody can cause from outside: one per fault and
// minute, with a count of the others. See package limitlog.
type shyLog struct{ *limitlog.Log }

// warn writes a line. The fault is the peer, which the cause may name after a blank, with
// the reason among args.
func (s shyLog) warn(cause, msg string, args ...any) {
	cause, fault, _ := strings.Cut(cause, " ")
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == "reason" {
			fault += fmt.Sprint(" ", args[i+1])
		}
	}
	s.Log.Log(slog.LevelWarn, cause, fault, msg, args...)
}

func goawayMessage(reason string) *sessionpb.Envelope {
	return &sessionpb.Envelope{Message: &sessionpb.Envelope_Goaway{Goaway: &sessionpb.Goaway{Reason: reason}}}
}
