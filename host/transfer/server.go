package transfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/tierd/tierd/host/halfopen"
)

// A Server is the producer's end: it accepts lanes and pushes frames down them.
type Server struct {
	o    Options
	ln   net.Listener
	log  limitedLog
	stop context.CancelFunc
	wg   sync.WaitGroup

	hellos *halfopen.Set // connections that have not said hello
	sent   sentCounts

	mu       sync.Mutex
	closed   bool
	sessions map[Token]*session
	conns    map[net.Conn]struct{}
	stats    ServerStats
}

// ServerStats counts what has happened since Listen.
type ServerStats struct {
	// Conns and Sessions are current numbers.
	Conns, Sessions int
	// RefusedConns were closed because of ConnsMax, or to make room for a newer one
	// because of HellosMax or HellosPerAddressMax; BadHellos because they did not begin
	// with a hello that fits.
	RefusedConns, BadHellos uint64
	// LanesLost ended with an error.
	LanesLost uint64
	// Frames and Bytes of payload written.
	Frames, Bytes uint64
}

// Listen opens the data port. The server ends when ctx does, or at Close.
func Listen(ctx context.Context, addr string, o Options) (*Server, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	s := &Server{
		o: o, ln: ln, log: newLimitedLog(o), stop: stop,
		// The deadline of greet is what ends a hello that does not come, and says so.
		hellos:   halfopen.New(o.HellosPerAddressMax, o.HellosMax, 2*o.HelloTimeout),
		sessions: map[Token]*session{}, conns: map[net.Conn]struct{}{},
	}
	s.wg.Add(2)
	go s.accept()
	go func() {
		defer s.wg.Done()
		<-ctx.Done()
		s.shut()
	}()
	return s, nil
}

// Addr is the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Close implements Pusher. When it returns, every item has its result.
func (s *Server) Close() error {
	s.stop()
	s.wg.Wait()
	s.log.Close()
	return nil
}

// shut closes everything; goroutines end because their connections do.
func (s *Server) shut() {
	s.mu.Lock()
	s.closed = true
	sessions := s.sessions
	s.sessions = map[Token]*session{}
	conns := make([]net.Conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	s.ln.Close()
	for _, c := range conns {
		c.Close()
	}
	for _, sess := range sessions {
		sess.end(ErrClosed)
	}
}

// Register implements Pusher. Registering twice is harmless.
func (s *Server) Register(token Token) { s.RegisterFor(token, "") }

// RegisterFor lets a consumer with this token in that Options.Verify finds to be the node
// of that id.
func (s *Server) RegisterFor(token Token, nodeID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.sessions[token] == nil {
		s.sessions[token] = &session{nodeID: nodeID, o: s.o, lanes: map[uint16]*lane{}, downSince: time.Now()}
	}
}

// Unregister implements Pusher.
func (s *Server) Unregister(token Token) {
	s.mu.Lock()
	sess := s.sessions[token]
	delete(s.sessions, token)
	s.mu.Unlock()
	if sess != nil {
		sess.end(ErrNoSession)
	}
}

// Lanes is the number of lanes of a session that are up.
func (s *Server) Lanes(token Token) int {
	s.mu.Lock()
	sess := s.sessions[token]
	s.mu.Unlock()
	if sess == nil {
		return 0
	}
	sess.mu.Lock()
	defer sess.mu.Unlock()
	return len(sess.lanes)
}

// HalfOpen returns how many connections have not said hello, and how many were closed to
// make room for newer ones.
func (s *Server) HalfOpen() (conns int, closed uint64) { return s.hellos.Counts() }

// Stats returns the counters.
func (s *Server) Stats() ServerStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Conns, st.Sessions = len(s.conns), len(s.sessions)
	st.Frames, st.Bytes = s.sent.frames.Load(), s.sent.bytes.Load()
	return st
}

// Push implements Pusher.
func (s *Server) Push(ctx context.Context, token Token, job uint64, items []Item, done func(i int, err error)) error {
	if len(items) == 0 {
		return nil
	}
	p := newPush(job, items, done)
	for i := range items {
		if n := int64(len(items[i].Bytes)); n > s.o.FrameBytesMax {
			p.failAll(fmt.Errorf("%w: item %d has %d bytes, at most %d are allowed; nothing was sent", ErrTooLong, i, n, s.o.FrameBytesMax))
			return p.first
		}
	}
	s.mu.Lock()
	sess, closed := s.sessions[token], s.closed
	s.mu.Unlock()
	switch {
	case closed:
		p.failAll(ErrClosed)
	case sess == nil:
		p.failAll(ErrNoSession)
	default:
		sess.push(ctx, p)
	}
	return p.first
}

// acceptPause is how long accept rests after an error such as too many open files:
// long enough not to spin, short against HelloTimeout.
const acceptPause = 20 * time.Millisecond

func (s *Server) accept() {
	defer s.wg.Done()
	for {
		c, err := s.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			s.log.warn("data port cannot accept connections", "error", err)
			time.Sleep(acceptPause)
			continue
		}
		waiting, ok := s.admit(c)
		if !ok {
			c.Close()
			continue
		}
		go func() {
			defer s.wg.Done()
			s.serve(c, waiting)
		}()
	}
}

// admit counts a connection in, if there is room.
func (s *Server) admit(c net.Conn) (waiting *halfopen.Entry, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, false
	case len(s.conns) >= s.o.ConnsMax:
		s.stats.RefusedConns++
		s.log.warn("data port is full", "remote", c.RemoteAddr(), "conns", len(s.conns), "conns_max", s.o.ConnsMax)
		return nil, false
	}
	waiting, pushed := s.hellos.Add(halfopen.From(c.RemoteAddr()), func() { c.Close() })
	if pushed {
		s.stats.RefusedConns++
		s.log.warn("data port has too many connections that say nothing; the oldest goes", "remote", c.RemoteAddr(),
			"hellos_max", s.o.HellosMax, "hellos_per_address_max", s.o.HellosPerAddressMax)
	}
	s.conns[c] = struct{}{}
	s.wg.Add(1)
	return waiting, true
}

// serve takes one connection from its hello to its end.
func (s *Server) serve(c net.Conn, waiting *halfopen.Entry) {
	tune(c, s.o)
	stream, sess, number, err := s.greet(c)
	if !waiting.Done() && err == nil {
		err = ErrClosed // to make room, just as it said hello
	}
	if err != nil {
		s.mu.Lock()
		pushed := errors.Is(err, net.ErrClosed) || errors.Is(err, ErrClosed) // which admit has counted
		if !pushed {
			s.stats.BadHellos++
		}
		quiet := s.closed || pushed
		s.mu.Unlock()
		if !quiet {
			s.log.warn("data port refused a connection", "remote", c.RemoteAddr(), "error", s.o.Explain(err))
		}
	} else {
		err = sess.run(newLane(stream, c, number, &s.sent))
		s.mu.Lock()
		if err != nil && !s.closed {
			s.stats.LanesLost++
			s.log.warn("data lane lost", "remote", c.RemoteAddr(), "lane", number, "error", err)
		}
		s.mu.Unlock()
	}
	c.Close()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// greet does TLS and the hello, all within HelloTimeout.
func (s *Server) greet(c net.Conn) (net.Conn, *session, uint16, error) {
	if err := c.SetDeadline(time.Now().Add(s.o.HelloTimeout)); err != nil {
		return nil, nil, 0, err
	}
	stream := c
	if s.o.TLS != nil {
		stream = tls.Server(c, s.o.TLS)
	}
	var buf [helloBytes]byte
	if n, err := io.ReadFull(stream, buf[:]); err != nil {
		return nil, nil, 0, fmt.Errorf("hello: %d of %d bytes came within %v: %w", n, helloBytes, s.o.HelloTimeout, err)
	}
	h, err := decodeHello(buf[:])
	if err != nil {
		return nil, nil, 0, err // a stranger gets no answer
	}
	answer := ack{version: Version, status: statusOK}
	s.mu.Lock()
	sess := s.sessions[h.token]
	switch {
	case h.version != Version:
		answer.status = statusVersion
	case s.closed:
		answer.status = statusClosing
	case sess == nil:
		answer.status = statusToken
	case h.lane >= LanesMax:
		answer.status = statusLane
	}
	s.mu.Unlock()
	var wrong error
	if t, ok := stream.(*tls.Conn); ok && answer.status == statusOK && s.o.Verify != nil {
		if wrong = s.o.Verify(sess.nodeID, t.ConnectionState()); wrong != nil {
			answer.status = statusIdentity
		}
	}
	if _, err := stream.Write(answer.append(nil)); err != nil {
		return nil, nil, 0, fmt.Errorf("ack: %w", err)
	}
	if wrong != nil {
		return nil, nil, 0, fmt.Errorf("%w: %v: %w", ErrRefused, answer.status, wrong)
	}
	if answer.status != statusOK {
		return nil, nil, 0, fmt.Errorf("%w: %v (version %d, lane %d)", ErrRefused, answer.status, h.version, h.lane)
	}
	return stream, sess, h.lane, c.SetDeadline(time.Time{})
}
