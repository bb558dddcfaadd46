package wire

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// Bounds of what has not said a right Hello.
const (
	// handshakesMax bounds the streams whose Hello is awaited.
	handshakesMax = 256
	// connectionsPerSession bounds the TCP connections: a peer has one, and a second
	// for a moment while it reconnects.
	connectionsPerSession = 4
	// preambleLimit is how long a TCP connection may take to become HTTP/2.
	preambleLimit = 5 * time.Second
	// streamsPerConnectionMax: a session is one stream.
	streamsPerConnectionMax = 4
)

// Serve takes connections of peers until Close; it returns nil then.
func (p *Peers) Serve(lis net.Listener) error {
	l := &p.cfg.Limits
	opts := []grpc.ServerOption{grpc.MaxRecvMsgSize(l.MessageBytesMax), grpc.MaxSendMsgSize(l.MessageBytesMax),
		grpc.MaxConcurrentStreams(streamsPerConnectionMax), grpc.ConnectionTimeout(preambleLimit), grpc.WaitForHandlers(true)}
	first := []byte("PRI")
	if p.cfg.ServerTLS != nil {
		opts = append(opts, grpc.Creds(credentials.NewTLS(p.cfg.ServerTLS)))
		first = []byte{0x16} // a TLS handshake record
	}
	srv := grpc.NewServer(opts...)
	sessionpb.RegisterPeerServer(srv, &server{p: p})
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.stops = append(p.stops, func() { stopServer(srv, l.ConnectHello) })
	p.mu.Unlock()
	err := srv.Serve(&watchedListener{Listener: lis, p: p, first: first, most: int64(p.cfg.SessionsMax * connectionsPerSession)})
	if errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return err
}

// stopServer lets the streams end by themselves, so that the last words they carry go
// out, and cuts what has not ended after limit.
func stopServer(srv *grpc.Server, limit time.Duration) {
	cut := time.AfterFunc(limit, srv.Stop)
	defer cut.Stop()
	srv.GracefulStop()
}

type server struct {
	sessionpb.UnimplementedPeerServer
	p       *Peers
	waiting atomic.Int64
}

// Session runs one connection that a peer dialed.
func (s *server) Session(st grpc.BidiStreamingServer[sessionpb.Envelope, sessionpb.Envelope]) error {
	from := "unknown"
	pr, ok := grpcpeer.FromContext(st.Context())
	if ok {
		from = pr.Addr.String()
	}
	if s.waiting.Add(1) > handshakesMax {
		s.waiting.Add(-1)
		s.p.shy.warn("handshakes", "peer stream refused", "remote", from, "reason", "too many streams wait for their hello", "most", handshakesMax)
		return status.Errorf(codes.ResourceExhausted, "%d streams wait for their hello, the most allowed", handshakesMax)
	}
	c, err := s.accept(st, pr)
	s.waiting.Add(-1)
	if err != nil {
		s.p.shy.warn("accept", "peer stream refused", "remote", from, "reason", err.Error())
		return err
	}
	s.p.wg.Go(func() { c.serve(func() {}) })
	<-c.gone
	// Returning ends the stream, and with it what Send and Recv wait for.
	return status.Error(codes.Aborted, c.reason)
}

// accept waits for the Hello and gives the connection to the peer's actor.
func (s *server) accept(st grpc.BidiStreamingServer[sessionpb.Envelope, sessionpb.Envelope], pr *grpcpeer.Peer) (*conn, error) {
	l := &s.p.cfg.Limits
	type first struct {
		e   *sessionpb.Envelope
		err error
	}
	got := make(chan first, 1)
	go func() { // ends with the stream
		e, err := st.Recv()
		got <- first{e, err}
	}()
	var f first
	select {
	case f = <-got:
	case <-time.After(l.ConnectHello):
		return nil, status.Errorf(codes.DeadlineExceeded, "no hello within deadlines.connect_ms, %v", l.ConnectHello)
	}
	if f.err != nil {
		return nil, f.err
	}
	h := f.e.GetHello()
	if h == nil || h.NodeId == "" || len(h.NodeId) > l.IDBytesMax {
		return nil, status.Error(codes.InvalidArgument, "the first message must be a Hello with a node id")
	}
	if err := s.p.verify(h.NodeId, pr); err != nil {
		return nil, err
	}
	c := newConn(st, false, l.QueueMessages, l.ConnectHello)
	c.first = f.e
	if err := s.p.give(c, h); err != nil {
		return nil, err
	}
	return c, nil
}

// verify ties the node id to the certificate.
func (p *Peers) verify(nodeID string, pr *grpcpeer.Peer) error {
	if p.cfg.Verify == nil || pr == nil {
		return nil
	}
	info, ok := pr.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return nil
	}
	if err := p.cfg.Verify(nodeID, info.State); err != nil {
		return status.Errorf(codes.PermissionDenied, "node id %q: %v", nodeID, err)
	}
	return nil
}

// give hands a connection to the actor of the node that dialed it.
func (p *Peers) give(c *conn, h *sessionpb.Hello) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.peers[h.NodeId]
	switch {
	case p.closed:
		return status.Error(codes.Unavailable, "this node closes")
	case h.NodeId == p.cfg.Hello.NodeId:
		return status.Errorf(codes.InvalidArgument, "node id %q is this node's own", h.NodeId)
	case a == nil && len(p.peers) >= p.cfg.SessionsMax:
		return status.Errorf(codes.ResourceExhausted, "%d peers, the most allowed", p.cfg.SessionsMax)
	case a == nil:
		var err error
		if a, err = p.add(PeerAddr{ID: h.NodeId}, false); err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
	}
	if err := a.post(func(now time.Duration) { a.incoming(now, c, h) }, false); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// watchedListener bounds connections and logs those that speak another protocol.
type watchedListener struct {
	net.Listener
	p     *Peers
	first []byte
	most  int64
	open  atomic.Int64
}

func (w *watchedListener) Accept() (net.Conn, error) {
	for {
		c, err := w.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if w.open.Add(1) <= w.most {
			return &watchedConn{Conn: c, w: w}, nil
		}
		w.open.Add(-1)
		_ = c.Close()
		w.p.shy.warn("connections", "peer connection refused", "remote", c.RemoteAddr().String(), "reason", "too many connections", "most", w.most)
	}
}

type watchedConn struct {
	net.Conn
	w    *watchedListener
	seen bool // bytes came; one reader
	once sync.Once
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.seen && n > 0 {
		c.seen = true
		k := min(n, len(c.w.first))
		if !bytes.Equal(b[:k], c.w.first[:k]) {
			c.w.p.shy.warn("garbage", "peer connection speaks another protocol", "remote", c.RemoteAddr().String(),
				"first_bytes", fmt.Sprintf("%.32q", b[:n]), "expected", fmt.Sprintf("%q", c.w.first))
		}
	}
	return n, err
}

func (c *watchedConn) Close() error {
	c.once.Do(func() { c.w.open.Add(-1) })
	return c.Conn.Close()
}
