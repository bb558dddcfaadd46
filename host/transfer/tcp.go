package transfer

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// TCP is the transport of this package.
type TCP struct{}

var _ Transport = TCP{}

// Listen implements Transport.
func (TCP) Listen(ctx context.Context, addr string, o Options) (Pusher, error) {
	s, err := Listen(ctx, addr, o)
	if err != nil {
		return nil, err // not a nil *Server in an interface
	}
	return s, nil
}

// Dial implements Transport.
func (TCP) Dial(ctx context.Context, addr string, token Token, lanes int, sink Sink, o Options) (Receiver, error) {
	c, err := Dial(ctx, addr, token, lanes, sink, o)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// tune sets the options of a connection. All of them are best effort: a lane without
// them is slower, not wrong.
func tune(c net.Conn, o Options) {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	_ = tc.SetNoDelay(true) // a frame's tail must not wait for an acknowledgement
	if o.SocketBufferBytes > 0 {
		_ = tc.SetReadBuffer(o.SocketBufferBytes)
		_ = tc.SetWriteBuffer(o.SocketBufferBytes)
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		// Pings to a host that is gone are never acknowledged: end the lane then.
		ms := int(max(o.IdleTimeout, o.WriteTimeout) / time.Millisecond)
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms)
	})
}
