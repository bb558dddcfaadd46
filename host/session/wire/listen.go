package wire

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/halfopen"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// Bounds of what has not said a right Hello. A peer has one connection with one stream;
// over a bound the oldest goes, see package halfopen.
const (
	// connsPerAddressMax: every peer that runs on one machine may reconnect at once.
	connsPerAddressMax = 64
	// connsMax: as many machines as a rack has may do so.
	connsMax = 256
	// preambleLimit is how long a TCP connection may take to become HTTP/2, and how long it
	// may be without a session.
	preambleLimit = 5 * time.Second
	// streamsPerConnectionMax: a session is one stream, and the next may begin before the
	// last one's end has been read.
	streamsPerConnectionMax = 4
	// hellosPerAddressMax and hellosMax bound the streams whose Hello is awaited: each may
	// hold one message in memory.
	hellosPerAddressMax = 64
	hellosMax           = 256
)

// ports are what has come in and has no session, over all listeners.
type ports struct {
	conns, streams *halfopen.Set
}

func newPorts(cfg *Config) ports {
	return ports{
		conns:   halfopen.New(connsPerAddressMax, connsMax, preambleLimit),
		streams: halfopen.New(hellosPerAddressMax, hellosMax, cfg.Limits.ConnectHello),
	}
}

// Serve takes connections of peers until Close; it returns nil then.
func (p *Peers) Serve(lis net.Listener) error {
	l := &p.cfg.Limits
	opts := []grpc.ServerOption{grpc.MaxRecvMsgSize(l.MessageBytesMax), grpc.MaxSendMsgSize(l.MessageBytesMax),
		grpc.MaxConcurrentStreams(streamsPerConnectionMax), grpc.ConnectionTimeout(preambleLimit), grpc.WaitForHandlers(true)}
	first, creds := []byte("PRI"), insecure.NewCredentials()
	if p.cfg.ServerTLS != nil {
		creds = credentials.NewTLS(p.cfg.ServerTLS)
		first = []byte{0x16} // a TLS handshake record
	}
	opts = append(opts, grpc.Creds(serverCreds{creds, p}))
	srv := grpc.NewServer(opts...)
	sessionpb.RegisterPeerServer(srv, &server{p: p})
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.stops = append(p.stops, func() { stopServer(srv, l.ConnectHello) })
	p.mu.Unlock()
	err := srv.Serve(&watchedListener{Listener: lis, p: p, first: first})
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

// closing is what a peer is told that dials a node that closes.
const closing = "this node closes"

type server struct {
	sessionpb.UnimplementedPeerServer
	p *Peers
}

// serverCreds ties what gRPC knows of a connection to the listener's, and logs the
// handshakes that fail, of which gRPC says nothing.
type serverCreds struct {
	credentials.TransportCredentials
	p *Peers
}

// cameIn is the AuthInfo of a connection that came in.
type cameIn struct {
	credentials.AuthInfo
	conn *watchedConn
}

// ServerHandshake implements credentials.TransportCredentials.
func (s serverCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := s.TransportCredentials.ServerHandshake(raw)
	w, _ := raw.(*watchedConn)
	if err != nil {
		if w == nil || !w.garbage.Load() { // else the log has it
			s.p.shy.warn("handshake", "peer connection refused", "remote", raw.RemoteAddr().String(), "reason", s.p.cfg.Explain(err).Error())
		}
		return nil, nil, err
	}
	return c, cameIn{info, w}, nil
}

// Clone implements credentials.TransportCredentials.
func (s serverCreds) Clone() credentials.TransportCredentials {
	return serverCreds{s.TransportCredentials.Clone(), s.p}
}

// Session runs one connection that a peer dialed.
func (s *server) Session(st grpc.BidiStreamingServer[sessionpb.Envelope, sessionpb.Envelope]) error {
	pr, ok := grpcpeer.FromContext(st.Context())
	if !ok {
		return status.Error(codes.Internal, "gRPC does not say where the stream comes from")
	}
	from := pr.Addr.String()
	c, err := s.accept(st, pr)
	if c := status.Code(err); c == codes.Canceled || c == codes.Unavailable {
		// The peer has dialed and closes, or has another connection by now; or this node closes.
		s.p.shy.Log.Log(slog.LevelInfo, "accept-ended", err.Error(), "peer stream ended before its session", "remote", from, "reason", err.Error())
		return err
	}
	if err != nil {
		s.p.shy.warn("accept", "peer stream refused", "remote", from, "reason", err.Error())
		return err
	}
	if in, ok := pr.AuthInfo.(cameIn); ok && in.conn != nil {
		in.conn.known()
		defer in.conn.unknown()
	}
	s.p.wg.Go(func() { c.serve(func() {}) })
	<-c.gone
	// Returning ends the stream, and with it what Send and Recv wait for.
	return status.Error(codes.Aborted, c.reason)
}

// accept waits for the Hello and gives the connection to the peer's actor.
func (s *server) accept(st grpc.BidiStreamingServer[sessionpb.Envelope, sessionpb.Envelope], pr *grpcpeer.Peer) (*conn, error) {
	l, began := &s.p.cfg.Limits, time.Now()
	type first struct {
		e   *sessionpb.Envelope
		err error
	}
	pushed := make(chan struct{})
	waiting, _ := s.p.ports.streams.Add(halfopen.From(pr.Addr), sync.OnceFunc(func() { close(pushed) }))
	defer waiting.Done()
	got := make(chan first, 1)
	go func() { // ends with the stream
		e, err := st.Recv()
		got <- first{e, err}
	}()
	var f first
	select {
	case f = <-got:
	case <-pushed:
		if time.Since(began) < l.ConnectHello {
			return nil, status.Errorf(codes.ResourceExhausted, "too many streams wait for their hello, of which this was the oldest; at most %d may of one address, %d of all", hellosPerAddressMax, hellosMax)
		}
		return nil, status.Errorf(codes.DeadlineExceeded, "no hello within deadlines.connect_ms, %v", l.ConnectHello)
	}
	if f.err != nil {
		return nil, f.err
	}
	h := f.e.GetHello()
	if h == nil || h.NodeId == "" || len(h.NodeId) > l.IDBytesMax {
		return nil, status.Error(codes.InvalidArgument, "the first message must be a Hello with a node id")
	}
	judge := func() error { return s.p.judge(h.NodeId, pr) }
	if err := judge(); err != nil {
		return nil, err
	}
	if s.p.cfg.CheckHello != nil {
		if err := s.p.cfg.CheckHello(h, pr.Addr); err != nil {
			return nil, status.Error(codes.PermissionDenied, err.Error())
		}
	}
	c := newConn(st, false, l.QueueMessages, l.ConnectHello)
	c.first, c.judge, c.remote = f.e, judge, func() net.Addr { return pr.Addr }
	if err := s.p.give(c, h); err != nil {
		return nil, err
	}
	return c, nil
}

// judge says why a node that dialed is refused, as a status.
func (p *Peers) judge(nodeID string, pr *grpcpeer.Peer) error {
	if err := p.verify(nodeID, pr); err != nil {
		return err
	}
	if p.cfg.Admit != nil {
		if err := p.cfg.Admit(nodeID, pr.Addr); err != nil {
			return status.Error(codes.PermissionDenied, err.Error())
		}
	}
	return nil
}

// verify ties the node id to the certificate.
func (p *Peers) verify(nodeID string, pr *grpcpeer.Peer) error {
	if p.cfg.Verify == nil || pr == nil {
		return nil
	}
	auth := pr.AuthInfo
	if in, ok := auth.(cameIn); ok {
		auth = in.AuthInfo
	}
	info, ok := auth.(credentials.TLSInfo)
	if !ok {
		return status.Errorf(codes.PermissionDenied, "node id %q comes without a certificate", nodeID)
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
		return status.Error(codes.Unavailable, closing)
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

// watchedListener bounds connections that have no session, and logs those that speak
// another protocol.
type watchedListener struct {
	net.Listener
	p     *Peers
	first []byte
}

func (w *watchedListener) Accept() (net.Conn, error) {
	c, err := w.Listener.Accept()
	if err != nil {
		return nil, err
	}
	wc := &watchedConn{Conn: c, w: w}
	wc.wait()
	return wc, nil
}

type watchedConn struct {
	net.Conn
	w       *watchedListener
	seen    bool // bytes came; one reader
	garbage atomic.Bool

	mu       sync.Mutex
	sessions int             // on it; a stream of another may begin before the last one's has ended
	open     *halfopen.Entry // nil while it has a session
	closed   bool
}

// known: the connection has a session, which other bounds hold.
func (c *watchedConn) known() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sessions++
	if c.open != nil {
		c.open.Done()
		c.open = nil
	}
}

// unknown: a session on it has ended.
func (c *watchedConn) unknown() {
	c.mu.Lock()
	c.sessions--
	c.mu.Unlock()
	c.wait()
}

// wait puts a connection without session among those that wait for one.
func (c *watchedConn) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.open != nil || c.sessions > 0 {
		return
	}
	e, pushed := c.w.p.ports.conns.Add(halfopen.From(c.RemoteAddr()), func() { _ = c.Conn.Close() })
	c.open = e
	if pushed {
		c.w.p.shy.warn("connections", "peer connection closed", "remote", c.RemoteAddr().String(), "reason",
			"too many connections without a session; the oldest goes", "most", connsMax, "most_of_one_address", connsPerAddressMax)
	}
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.seen && n > 0 {
		c.seen = true
		k := min(n, len(c.w.first))
		if !bytes.Equal(b[:k], c.w.first[:k]) {
			c.garbage.Store(true)
			c.w.p.shy.warn("garbage", "peer connection speaks another protocol", "remote", c.RemoteAddr().String(),
				"first_bytes", fmt.Sprintf("%.32q", b[:n]), "expected", fmt.Sprintf("%q", c.w.first))
		}
	}
	return n, err
}

func (c *watchedConn) Close() error {
	c.mu.Lock()
	c.closed = true
	if c.open != nil {
		c.open.Done()
		c.open = nil
	}
	c.mu.Unlock()
	return c.Conn.Close()
}
