package wire

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// AllowLegs says what the pair relation with a peer of other rules came to; see
// session.Core.AllowLegs. It is dropped when the peer's last Hello is not of the rules that it
// is about: a session with other ones may have begun before it gets there.
func (p *Peers) AllowLegs(peer string, of func(*sessionpb.Hello) bool, take, give bool, why string) {
	p.command(peer, func(now time.Duration, c *session.Core) {
		if of(c.Hello()) {
			c.AllowLegs(now, take, give, why)
		}
	})
}

// Errors of Fetch. Any other one is about the way to the peer, and the next session may
// have a better one.
var (
	// ErrNotGiven: the peer says that it does not give these bytes out.
	ErrNotGiven = errors.New("not given out")
	// ErrTooLong: they are more than was asked for.
	ErrTooLong = errors.New("too long")
	// ErrWrongBytes: they do not have the digest that was asked for.
	ErrWrongBytes = errors.New("wrong bytes")
)

// Fetch brings the bytes of a digest from a peer, at most bytesMax of them, and compares
// their digest. It waits as long as ctx allows; a peer's session that ends ends it. There is
// one message on its way at a time, so a session that has something to say waits for no more
// than that. One Fetch at a time is made of a peer.
func (p *Peers) Fetch(ctx context.Context, peer string, digest [sha256.Size]byte, bytesMax int) ([]byte, error) {
	a, err := p.find(peer)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	for total := uint64(1); uint64(b.Len()) < total; {
		part, err := a.ask(ctx, digest, uint64(b.Len()))
		switch {
		case err != nil:
			return nil, err
		case part.Lost != "":
			return nil, errors.New(part.Lost)
		case part.Refused != "":
			return nil, fmt.Errorf("%w: %s", ErrNotGiven, part.Refused)
		case part.TotalBytes > uint64(bytesMax):
			return nil, fmt.Errorf("%w: %d bytes; at most %d are taken", ErrTooLong, part.TotalBytes, bytesMax)
		case len(part.Data) == 0 && uint64(b.Len()) < part.TotalBytes:
			return nil, fmt.Errorf("%w: none after %d of %d", ErrWrongBytes, b.Len(), part.TotalBytes)
		case uint64(b.Len()+len(part.Data)) > part.TotalBytes:
			return nil, fmt.Errorf("%w: more than the %d that it said", ErrWrongBytes, part.TotalBytes)
		}
		total = part.TotalBytes
		b.Write(part.Data)
	}
	if got := sha256.Sum256(b.Bytes()); got != digest {
		return nil, fmt.Errorf("%w: asked for sha256:%x, and the %d bytes that came are sha256:%x", ErrWrongBytes, digest, b.Len(), got)
	}
	return b.Bytes(), nil
}

// ask asks for one part and waits for it.
func (a *actor) ask(ctx context.Context, digest [sha256.Size]byte, offset uint64) (session.PartCame, error) {
	type answer struct {
		part session.PartCame
		err  error
	}
	came := make(chan answer, 1)
	err := a.post(func(now time.Duration) {
		if _, err := a.core.Ask(now, digest, offset); err != nil {
			came <- answer{err: err}
			return
		}
		a.part = func(p session.PartCame) { came <- answer{part: p} }
	}, true)
	if err != nil {
		return session.PartCame{}, err
	}
	select {
	case x := <-came:
		return x.part, x.err
	case <-ctx.Done():
		return session.PartCame{}, context.Cause(ctx)
	}
}

// answerAsk answers a peer's Ask out of what the host gives out.
func (a *actor) answerAsk(e session.Asked) {
	data, refused := a.p.host.OnAsk(a.id, e.Digest)
	if refused == "" && e.Offset > uint64(len(data)) {
		refused = fmt.Sprintf("it has %d bytes and none from %d on", len(data), e.Offset)
	}
	now, total := a.p.now(), uint64(len(data))
	if refused != "" {
		a.core.AnswerAsk(now, e.Seq, 0, nil, refused)
		return
	}
	a.core.AnswerAsk(now, e.Seq, total, data[e.Offset:], "")
}
