package transfer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"
)

var (
	// ErrNoSession is the result of items pushed to a token that is not registered,
	// or no longer.
	ErrNoSession = errors.New("data plane: no such session")
	// ErrNoLane is the result of items for which no lane came up in time.
	ErrNoLane = errors.New("data plane: no lane is up")
	// ErrLane is wrapped when a lane ended in the middle of a frame.
	ErrLane = errors.New("data plane: lane ended in the middle of a frame")
	// ErrTooLong is wrapped when an item or a frame is longer than allowed.
	ErrTooLong = errors.New("data plane: frame too long")
	// ErrRefused is wrapped when a producer refuses a hello. Dialing again with the
	// same token is of no use.
	ErrRefused = errors.New("data plane: hello refused")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("data plane: closed")
)

// An ErrChecksum says that a payload is not the bytes that were stored.
type ErrChecksum struct {
	// Want is the CRC-32C in the header, Got that of the payload.
	Want, Got uint32
}

func (e *ErrChecksum) Error() string {
	return fmt.Sprintf("data plane: checksum mismatch: header carries %08x, payload has %08x", e.Want, e.Got)
}

// An Item is one chunk to push. Slot and Epoch name its destination, Seq its number
// in the job.
type Item struct {
	Slot  uint32
	Epoch uint64
	// Bytes are read until the item's result is given, and must not change.
	Bytes []byte
	// Sum is the CRC-32C of Bytes that was computed when they were stored.
	Sum uint32
	Seq uint32
}

// A Sink says where payloads go. Begin is called from several goroutines.
type Sink interface {
	// Begin returns the memory for a payload: exactly h.Length bytes. done is called
	// once, with nil when the payload is there and has its checksum, with an
	// *ErrChecksum when it has not, and with another error when the lane ended. An
	// error of Begin makes the receiver drop the payload.
	//
	// Neither Begin nor done may wait: they hold up a lane. Neither may close the
	// Receiver.
	Begin(h Header) (dst []byte, done func(error), err error)
}

// A Pusher is the producer's end of a transport.
type Pusher interface {
	// Register lets a consumer with this token in.
	Register(token Token)
	// Unregister ends a session: its lanes are closed, its items fail.
	Unregister(token Token)
	// Push sends the items over the lanes of a session. It calls done exactly once
	// for each item, one call at a time, and returns after the last of them: nil,
	// or the first error. done may be nil.
	Push(ctx context.Context, token Token, job uint64, items []Item, done func(i int, err error)) error
	// Close ends all sessions.
	Close() error
}

// A Receiver is the consumer's end of a session.
type Receiver interface {
	// Lanes is the number of lanes that are up.
	Lanes() int
	// Done is closed when no lane is up and none will be dialed again: after Close,
	// or when the producer refused the token.
	Done() <-chan struct{}
	// Err says why, once Done is closed.
	Err() error
	// Close ends the session. When it returns every done of the Sink has been called.
	Close() error
}

// A Transport is a way to move frames between two hosts. TCP is one; RDMA or shared
// memory can be another.
type Transport interface {
	Listen(ctx context.Context, addr string, o Options) (Pusher, error)
	Dial(ctx context.Context, addr string, token Token, lanes int, sink Sink, o Options) (Receiver, error)
}

// Options of both ends. The zero value means the defaults named at each field.
type Options struct {
	// TLS, when set, is used on every connection.
	TLS *tls.Config
	// Log gets few lines: one per cause and minute, with a count of the others. Nil means
	// slog.Default.
	Log *slog.Logger

	// FrameBytesMax bounds a payload. Default DefaultFrameBytesMax.
	FrameBytesMax int64
	// PieceBytes is how much is read before its checksum is computed. Default
	// DefaultPieceBytes.
	PieceBytes int
	// SocketBufferBytes sets the send and receive buffer of the kernel; 0 leaves
	// them to its own tuning.
	SocketBufferBytes int
	// Verify, when set, says why the certificate of a lane of a server with TLS is not
	// that of the node that its token was registered for.
	Verify func(nodeID string, state tls.ConnectionState) error
	// Reach, when set, says why a client may not connect to an address, after names are
	// resolved and before anything is sent there.
	Reach func(ip netip.Addr) error
	// Explain, when set, adds what is known here to the error of a connection.
	Explain func(error) error
	// ConnsMax bounds the connections of a server; one more is refused. HellosMax bounds
	// those that have not said hello yet, and HellosPerAddressMax those of them from one
	// address; one more ends the oldest of the address that has the most. Defaults
	// DefaultConnsMax, DefaultHellosMax and DefaultHellosPerAddressMax.
	ConnsMax, HellosMax, HellosPerAddressMax int

	// HelloTimeout bounds connect, TLS handshake and hello. Default 750 ms.
	HelloTimeout time.Duration
	// PingInterval is how often an idle lane carries a ping. Default 250 ms.
	PingInterval time.Duration
	// IdleTimeout bounds the silence on a lane, and the time for one piece. Default
	// 2 s, eight pings.
	IdleTimeout time.Duration
	// WriteTimeout bounds the time for one written piece: a consumer that does not
	// read for so long has lost the lane. Default 2 s.
	WriteTimeout time.Duration
	// AbortGrace is how long a frame that is on its way may take to end after its
	// push was cancelled, before its lane is given up. Default 100 ms.
	AbortGrace time.Duration
	// LaneWait is how long a push waits while its session has no lane. Default
	// 750 ms.
	LaneWait time.Duration
	// RetryMin and RetryMax bound the pause before a lost lane is dialed again; it
	// doubles from one to the other, with jitter. Defaults 50 ms and 500 ms.
	RetryMin, RetryMax time.Duration
}

const (
	// DefaultFrameBytesMax is 64 MiB: 32 times the largest chunk that we tune for.
	// A longer frame would hold a lane for long.
	DefaultFrameBytesMax = 64 << 20
	// frameBytesLimit is what the wire's length field can say, less than 2^31 so that
	// it fits an int everywhere.
	frameBytesLimit = 1<<31 - 1
	// DefaultPieceBytes is 256 KiB: large enough that a read call costs little, small
	// enough to be in the second-level cache when the checksum is computed.
	DefaultPieceBytes = 256 << 10
	// pieceBytesMin keeps the number of reads per frame bounded.
	pieceBytesMin = 4 << 10
	// writePieceBytes is how much is written under one WriteTimeout: 1 MiB in 2 s is
	// a rate that only a broken path falls short of.
	writePieceBytes = 1 << 20
	// batchItemsMax bounds the small frames that one write call carries: 64 of 16 KiB
	// fill a piece.
	batchItemsMax = 64
	// DefaultConnsMax is 1024 connections: 128 peers with 8 lanes each.
	DefaultConnsMax = 1024
	// DefaultHellosMax is 512: two machines' worth of peers that dial their lanes at
	// once. A flood of strangers holds at most so many connections, each for HelloTimeout.
	DefaultHellosMax = 512
	// DefaultHellosPerAddressMax is 256: 64 peers on one machine with DefaultLanes each.
	DefaultHellosPerAddressMax = 256
	// DefaultLanes is the number of lanes that a session is dialed with by default.
	DefaultLanes = 4
	// LanesMax bounds the lanes of a session; beyond 64 they only share one link.
	LanesMax = 64
)

func orDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

func (o Options) withDefaults() (Options, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	orDefault(&o.FrameBytesMax, DefaultFrameBytesMax)
	orDefault(&o.PieceBytes, DefaultPieceBytes)
	orDefault(&o.ConnsMax, DefaultConnsMax)
	orDefault(&o.HellosMax, DefaultHellosMax)
	orDefault(&o.HellosPerAddressMax, DefaultHellosPerAddressMax)
	if o.Explain == nil {
		o.Explain = func(err error) error { return err }
	}
	orDefault(&o.HelloTimeout, 750*time.Millisecond)
	orDefault(&o.PingInterval, 250*time.Millisecond)
	orDefault(&o.IdleTimeout, 2*time.Second)
	orDefault(&o.WriteTimeout, 2*time.Second)
	orDefault(&o.AbortGrace, 100*time.Millisecond)
	orDefault(&o.LaneWait, 750*time.Millisecond)
	orDefault(&o.RetryMin, 50*time.Millisecond)
	orDefault(&o.RetryMax, 500*time.Millisecond)
	switch {
	case o.FrameBytesMax > frameBytesLimit:
		return o, fmt.Errorf("data plane: frames of %d bytes allowed, but the wire can say %d", o.FrameBytesMax, frameBytesLimit)
	case o.PieceBytes < pieceBytesMin:
		return o, fmt.Errorf("data plane: pieces are %d bytes; they must be at least %d", o.PieceBytes, pieceBytesMin)
	case o.PingInterval >= o.IdleTimeout:
		return o, fmt.Errorf("data plane: ping every %v does not keep a lane alive that ends after %v of silence", o.PingInterval, o.IdleTimeout)
	case o.RetryMax < o.RetryMin:
		return o, fmt.Errorf("data plane: longest pause before dialing again is %v, below the shortest, %v", o.RetryMax, o.RetryMin)
	}
	return o, nil
}
