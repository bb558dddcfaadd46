package transfer

import (
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/tierd/tierd/host/tier/crc32c"
	"golang.org/x/sys/unix"
)

// inbound is one frame whose payload is on its way.
type inbound struct {
	h    Header
	dst  []byte
	done func(error) // nil when nobody wants the payload, or the Sink has been told
	at   int         // bytes that have come
	sum  uint32      // CRC-32C of them
}

// laneReader reads the frames of one lane.
type laneReader struct {
	c       *Client
	conn    *laneConn
	batch   []inbound
	segs    [][]byte // memory for one piece, in order: one segment for each frame
	scratch []byte   // for payloads that nobody wants

	// The header of the next batch is read in the same call as the end of the last
	// payload: head[:have] is what came of it. heads is for the batch's others.
	head  [headerBytes]byte
	have  int
	heads [(batchItemsMax - 1) * headerBytes]byte

	raw   syscall.RawConn // nil with TLS: bytes must come through it
	into  [][]byte
	n     int
	errno error
	readv func(fd uintptr) bool
}

func newLaneReader(c *Client, conn *laneConn) *laneReader {
	r := &laneReader{c: c, conn: conn}
	if sc, ok := conn.Conn.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			r.raw = raw
		}
	}
	r.readv = func(fd uintptr) bool { // once, so that a read makes no closure
		for {
			r.n, r.errno = unix.Readv(int(fd), r.into)
			if r.errno != unix.EINTR {
				return r.errno != unix.EAGAIN
			}
		}
	}
	return r
}

// receive reads frames until the connection ends.
func (c *Client) receive(conn *laneConn) error {
	defer conn.Close()
	r := newLaneReader(c, conn)
	for {
		if err := r.fill(r.head[r.have:]); err != nil {
			return fmt.Errorf("read frame header: %w", err)
		}
		r.have = 0
		kind, more, h, err := decodeFrame(r.head[:])
		if err != nil {
			return err
		}
		if kind == kindPing {
			continue
		}
		if err := r.headers(h, more); err != nil {
			return err
		}
		r.begin()
		if err := r.payloads(); err != nil {
			return err
		}
	}
}

// fill fills b within IdleTimeout.
func (r *laneReader) fill(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if err := r.conn.SetReadDeadline(time.Now().Add(r.c.o.IdleTimeout)); err != nil {
		return err
	}
	_, err := io.ReadFull(r.conn, b)
	return err
}

// headers reads the rest of a batch's headers and checks them all.
func (r *laneReader) headers(first Header, more int) error {
	r.batch = append(r.batch[:0], inbound{h: first})
	rest := r.heads[:more*headerBytes]
	if err := r.fill(rest); err != nil {
		return fmt.Errorf("read frame headers: %w", err)
	}
	for ; len(rest) > 0; rest = rest[headerBytes:] {
		more--
		kind, after, h, err := decodeFrame(rest[:headerBytes])
		if err != nil {
			return err
		}
		if kind != kindData || after != more {
			return fmt.Errorf("%w: frame header in a batch is of kind %d with %d more, must be of kind 1 with %d", ErrWire, kind, after, more)
		}
		r.batch = append(r.batch, inbound{h: h})
	}
	for i := range r.batch {
		if n := int64(r.batch[i].h.Length); n > r.c.o.FrameBytesMax {
			return fmt.Errorf("%w: header says %d bytes, at most %d are allowed", ErrTooLong, n, r.c.o.FrameBytesMax)
		}
	}
	return nil
}

// begin asks the Sink where the payloads of the batch go.
func (r *laneReader) begin() {
	for i := range r.batch {
		f := &r.batch[i]
		dst, done, err := r.c.sink.Begin(f.h)
		if err == nil && len(dst) != int(f.h.Length) {
			err = fmt.Errorf("data plane: sink gave %d bytes of memory for a payload of %d", len(dst), f.h.Length)
			done(err)
		}
		if err != nil {
			r.c.dropped.Add(1)
			continue
		}
		f.dst, f.done = dst, done
	}
}

// payloads reads the payloads of the batch to where the Sink wants them, piece by piece.
func (r *laneReader) payloads() error {
	for rest := r.batch; len(rest) > 0; {
		r.nextPiece(rest)
		last := &rest[len(rest)-1]
		ahead := len(r.segs) == len(rest) && last.at+len(r.segs[len(rest)-1]) == int(last.h.Length)
		if err := r.fillPiece(ahead); err != nil {
			return r.cut(rest, err)
		}
		for _, seg := range r.segs {
			f := &rest[0]
			if f.done != nil {
				f.sum = crc32c.Update(f.sum, seg)
			}
			if f.at += len(seg); f.at == int(f.h.Length) {
				r.finish(f)
				rest = rest[1:]
			}
		}
	}
	return nil
}

// nextPiece lists the memory for the next PieceBytes, which may end inside a frame.
func (r *laneReader) nextPiece(rest []inbound) {
	r.segs = r.segs[:0]
	room := r.c.o.PieceBytes
	for i := range rest {
		f := &rest[i]
		n := min(int(f.h.Length)-f.at, room)
		if f.done != nil {
			r.segs = append(r.segs, f.dst[f.at:f.at+n])
		} else {
			if r.scratch == nil {
				r.scratch = make([]byte, r.c.o.PieceBytes)
			}
			r.segs = append(r.segs, r.scratch[:n])
		}
		if room -= n; room == 0 {
			return
		}
	}
}

// fillPiece fills the segments within IdleTimeout. With ahead it also takes what has
// come of the next header, but does not wait for it.
func (r *laneReader) fillPiece(ahead bool) error {
	if err := r.conn.SetReadDeadline(time.Now().Add(r.c.o.IdleTimeout)); err != nil {
		return err
	}
	if r.raw == nil {
		for _, seg := range r.segs {
			if _, err := io.ReadFull(r.conn, seg); err != nil {
				return err
			}
		}
		return nil
	}
	want := 0
	r.into = r.into[:0]
	for _, seg := range r.segs {
		if len(seg) > 0 {
			r.into = append(r.into, seg)
			want += len(seg)
		}
	}
	if ahead {
		r.into = append(r.into, r.head[:])
	}
	for all := r.into; want > 0; {
		err := r.raw.Read(r.readv)
		switch {
		case err != nil:
			return err
		case r.errno != nil:
			return r.errno
		case r.n == 0:
			return io.ErrUnexpectedEOF
		}
		want -= r.n
		n := r.n
		for len(r.into) > 0 && n >= len(r.into[0]) {
			n -= len(r.into[0])
			r.into = r.into[1:]
		}
		if want > 0 {
			r.into[0] = r.into[0][n:]
			continue
		}
		r.have = -want
		clear(all)
		r.into = all[:0]
	}
	return nil
}

// finish tells the Sink about a payload that has come whole.
func (r *laneReader) finish(f *inbound) {
	done := f.done
	if done == nil {
		return
	}
	f.done = nil
	if f.sum != f.h.Sum {
		r.c.mismatched.Add(1)
		done(&ErrChecksum{Want: f.h.Sum, Got: f.sum})
		return
	}
	r.c.frames.Add(1)
	r.c.bytes.Add(uint64(f.h.Length))
	done(nil)
}

// cut tells the Sink that the rest of the batch will not come.
func (r *laneReader) cut(rest []inbound, err error) error {
	for i := range rest {
		f := &rest[i]
		if f.done == nil {
			continue
		}
		r.c.cut.Add(1)
		f.done(fmt.Errorf("%w: payload of %d bytes did not come whole: %w", ErrLane, f.h.Length, err))
		f.done = nil
	}
	return fmt.Errorf("%w: %w", ErrLane, err)
}
