package transfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A Client is the consumer's end of a session.
type Client struct {
	o     Options
	addr  string
	token Token
	sink  Sink
	log   limitedLog

	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup
	done chan struct{}

	up atomic.Int64
	frames, bytes, dropped,
	mismatched, cut, lost atomic.Uint64

	mu  sync.Mutex
	err error
}

// ClientStats counts what has happened since Dial.
type ClientStats struct {
	// Lanes that are up now.
	Lanes int
	// Frames and Bytes of payload that arrived with their checksum.
	Frames, Bytes uint64
	// Dropped frames were refused by the Sink; Mismatched ones had another checksum;
	// Cut ones ended with their lane.
	Dropped, Mismatched, Cut uint64
	// LanesLost counts lanes that ended with an error.
	LanesLost uint64
}

// Dial opens the lanes of a session and receives frames into sink until Close. It
// returns when every lane has been tried: the error is the first one when none came up.
// A lane that is lost or did not come up is dialed again, unless the producer refused
// the token. ctx bounds Dial only.
func Dial(ctx context.Context, addr string, token Token, lanes int, sink Sink, o Options) (*Client, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if lanes < 1 || lanes > LanesMax {
		return nil, fmt.Errorf("data plane: %d lanes; a session has 1 to %d", lanes, LanesMax)
	}
	c := &Client{o: o, addr: addr, token: token, sink: sink, log: newLimitedLog(o), done: make(chan struct{})}
	c.ctx, c.stop = context.WithCancel(context.Background())
	detach := context.AfterFunc(ctx, c.stop) // an end of ctx ends the first tries
	tried := make(chan error, lanes)
	c.wg.Add(lanes)
	for i := range lanes {
		go func() {
			defer c.wg.Done()
			c.keep(uint16(i), tried)
		}()
	}
	go func() {
		c.wg.Wait()
		c.log.Close()
		close(c.done)
	}()
	var first error
	failed := 0
	for range lanes {
		if err := <-tried; err != nil {
			failed++
			if first == nil {
				first = err
			}
		}
	}
	if !detach() {
		c.Close()
		return nil, fmt.Errorf("data plane: dial %s: %w", addr, context.Cause(ctx))
	}
	if failed == lanes {
		c.Close()
		return nil, first
	}
	return c, nil
}

// Lanes implements Receiver.
func (c *Client) Lanes() int { return int(c.up.Load()) }

// Done implements Receiver.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err implements Receiver.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close implements Receiver.
func (c *Client) Close() error {
	c.fail(ErrClosed)
	c.stop()
	<-c.done
	return nil
}

func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
}

// Stats returns the counters.
func (c *Client) Stats() ClientStats {
	return ClientStats{
		Lanes: c.Lanes(), Frames: c.frames.Load(), Bytes: c.bytes.Load(), Dropped: c.dropped.Load(),
		Mismatched: c.mismatched.Load(), Cut: c.cut.Load(), LanesLost: c.lost.Load(),
	}
}

// keep keeps one lane up. The result of the first try goes to tried.
func (c *Client) keep(number uint16, tried chan<- error) {
	pause, said := c.o.RetryMin, false
	for {
		conn, err := c.connect(number)
		if err == nil {
			c.up.Add(1) // before Dial returns, which says how many lanes are up
		}
		if tried != nil {
			tried <- err
			tried = nil
		}
		if err == nil {
			pause, said = c.o.RetryMin, false
			err = c.receive(conn)
			c.up.Add(-1)
			if c.ctx.Err() == nil {
				c.lost.Add(1)
			}
		}
		switch {
		case c.ctx.Err() != nil:
			return
		case errors.Is(err, ErrRefused):
			c.fail(err)
			return
		}
		select {
		case <-c.ctx.Done(): // often just after the lanes: the peer has closed
			return
		case <-time.After(pause/2 + rand.N(pause/2+1)):
		}
		if !said { // once for each time that it goes down, not for each try
			c.log.warn("data lane down, dialing again", "addr", c.addr, "lane", number, "error", err)
			said = true
		}
		pause = min(2*pause, c.o.RetryMax)
	}
}

// laneConn is a connection that ends with the client. Closing it closes the connection
// below TLS, which never waits.
type laneConn struct {
	net.Conn
	raw    net.Conn
	detach func() bool
}

func (l *laneConn) Close() error {
	l.detach()
	return l.raw.Close()
}

// connect dials, does TLS and says hello, all within HelloTimeout.
func (c *Client) connect(number uint16) (*laneConn, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.o.HelloTimeout)
	defer cancel()
	d := net.Dialer{Control: c.reach}
	raw, err := d.DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return nil, fmt.Errorf("data plane: lane %d: %w", number, err)
	}
	conn := &laneConn{Conn: raw, raw: raw, detach: context.AfterFunc(c.ctx, func() { raw.Close() })}
	fail := func(err error) (*laneConn, error) {
		conn.Close()
		return nil, fmt.Errorf("data plane: lane %d to %s: %w", number, c.addr, c.o.Explain(err))
	}
	tune(raw, c.o)
	deadline, _ := ctx.Deadline()
	if err := raw.SetDeadline(deadline); err != nil {
		return fail(err)
	}
	if c.o.TLS != nil {
		t := tls.Client(raw, c.tlsConfig())
		if err := t.HandshakeContext(ctx); err != nil {
			return fail(err)
		}
		conn.Conn = t
	}
	if _, err := conn.Write(hello{version: Version, lane: number, token: c.token}.append(nil)); err != nil {
		return fail(err)
	}
	var buf [ackBytes]byte
	if _, err := io.ReadFull(conn, buf[:]); err != nil {
		return fail(fmt.Errorf("no answer to hello within %v: %w", c.o.HelloTimeout, err))
	}
	a, err := decodeAck(buf[:])
	if err != nil {
		return fail(err)
	}
	if a.status != statusOK {
		return fail(fmt.Errorf("%w: %v (here version %d, there %d)", ErrRefused, a.status, Version, a.version))
	}
	if err := raw.SetDeadline(time.Time{}); err != nil {
		return fail(err)
	}
	return conn, nil
}

// reach is asked for each address that is about to be connected to.
func (c *Client) reach(_, address string, _ syscall.RawConn) error {
	if c.o.Reach == nil {
		return nil
	}
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	return c.o.Reach(ap.Addr())
}

// tlsConfig fills in the server name that tls.Dial would.
func (c *Client) tlsConfig() *tls.Config {
	if c.o.TLS.ServerName != "" || c.o.TLS.InsecureSkipVerify {
		return c.o.TLS
	}
	cfg := c.o.TLS.Clone()
	if host, _, err := net.SplitHostPort(c.addr); err == nil {
		cfg.ServerName = host
	}
	return cfg
}
