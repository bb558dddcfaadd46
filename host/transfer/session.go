package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// A session is the producer's view of one consumer: its lanes and the pushes that wait
// for them. Lanes take items one at a time, round robin over the pushes, so a large job
// does not hold up a small one.
type session struct {
	nodeID string // whose it is, for Options.Verify
	o      Options

	mu        sync.Mutex
	ended     error // set once the session takes no more pushes
	lanes     map[uint16]*lane
	queue     []*push   // pushes with items that no lane has taken
	downSince time.Time // when the last lane went; meaningless while one is up
}

// push is one call of Push.
type push struct {
	job   uint64
	items []Item
	next  int // first item that no lane has taken; guarded by session.mu

	mu       sync.Mutex
	done     func(i int, err error)
	left     int
	first    error
	finished chan struct{}
}

func newPush(job uint64, items []Item, done func(int, error)) *push {
	return &push{job: job, items: items, done: done, left: len(items), finished: make(chan struct{})}
}

// result gives item i its one result.
func (p *push) result(i int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && p.first == nil {
		p.first = fmt.Errorf("job %d item %d (seq %d) to slot %d: %w", p.job, i, p.items[i].Seq, p.items[i].Slot, err)
	}
	if p.done != nil {
		p.done(i, err)
	}
	if p.left--; p.left == 0 {
		close(p.finished)
	}
}

func (p *push) failAll(err error) {
	for i := range p.items {
		p.result(i, err)
	}
}

// push queues p and waits until each item has its result.
func (s *session) push(ctx context.Context, p *push) {
	s.mu.Lock()
	if err := s.ended; err != nil {
		s.mu.Unlock()
		p.failAll(err)
		return
	}
	s.queue = append(s.queue, p)
	s.wakeAll()
	s.mu.Unlock()

	started := time.Now()
	timer := time.NewTimer(s.o.LaneWait)
	defer timer.Stop()
	for {
		select {
		case <-p.finished:
			return
		case <-ctx.Done():
			s.cancel(p, context.Cause(ctx))
			<-p.finished
			return
		case <-timer.C:
			wait := s.laneWait(started)
			if wait <= 0 {
				s.cancel(p, fmt.Errorf("%w for %v", ErrNoLane, s.o.LaneWait))
			}
			timer.Reset(max(wait, s.o.LaneWait/4))
		}
	}
}

// laneWait is how much longer a push that started then waits for a lane.
func (s *session) laneWait(started time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lanes) > 0 {
		return s.o.LaneWait
	}
	since := started
	if s.downSince.After(since) {
		since = s.downSince
	}
	return s.o.LaneWait - time.Since(since)
}

// wakeAll tells idle lanes that there is work.
func (s *session) wakeAll() {
	for _, l := range s.lanes {
		select {
		case l.wake <- struct{}{}:
		default: // it is awake, or has been told
		}
	}
}

// take gives a lane its next batch, items [from, to) of one push: one item, or several
// small ones that one write call carries, but no more than the lane's share. p is nil
// when nothing waits. A batch never mixes pushes, because cancelling one may cost the
// lane, and with it the batch.
func (s *session) take(l *lane) (p *push, from, to int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.mu.Lock()
	l.limit = time.Time{}
	l.mu.Unlock()
	l.current = nil
	if s.ended != nil || len(s.queue) == 0 {
		return nil, 0, 0
	}
	p = s.queue[0]
	s.queue = s.queue[1:]
	from, to = p.next, p.next+1
	share := min((len(p.items)-from)/max(len(s.lanes), 1), batchItemsMax)
	for size := len(p.items[from].Bytes); to-from < share; to++ {
		if size += len(p.items[to].Bytes); size > writePieceBytes {
			break
		}
	}
	if p.next = to; to < len(p.items) {
		s.queue = append(s.queue, p)
	}
	l.current = p
	return p, from, to
}

// cancel fails what no lane has taken yet, and hurries what is on its way: the bytes
// belong to the caller again when Push returns.
func (s *session) cancel(p *push, err error) {
	s.mu.Lock()
	from := p.next
	p.next = len(p.items)
	for k, q := range s.queue {
		if q == p {
			s.queue = append(s.queue[:k:k], s.queue[k+1:]...)
			break
		}
	}
	for _, l := range s.lanes {
		if l.current == p {
			l.hurry(time.Now().Add(s.o.AbortGrace))
		}
	}
	s.mu.Unlock()
	for i := from; i < len(p.items); i++ {
		p.result(i, err)
	}
}

// end fails every push and closes every lane.
func (s *session) end(err error) {
	s.mu.Lock()
	if s.ended != nil {
		s.mu.Unlock()
		return
	}
	s.ended = err
	queue := append([]*push(nil), s.queue...)
	for _, l := range s.lanes {
		l.raw.Close()
	}
	s.mu.Unlock()
	for _, p := range queue {
		s.cancel(p, err)
	}
}

// run drives one lane until it ends. It returns nil when the consumer or the session
// ended it between two frames.
func (s *session) run(l *lane) error {
	s.mu.Lock()
	if s.ended != nil {
		s.mu.Unlock()
		return nil
	}
	if old := s.lanes[l.number]; old != nil {
		old.raw.Close() // the consumer dialed again: it knows better than we do
	}
	s.lanes[l.number] = l
	s.mu.Unlock()

	watched := make(chan struct{})
	go func() {
		defer close(watched)
		l.watch()
	}()
	err := s.feed(l)
	l.raw.Close()
	<-watched

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes[l.number] == l {
		delete(s.lanes, l.number)
	}
	if len(s.lanes) == 0 {
		s.downSince = time.Now()
	}
	if s.ended != nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// feed writes items, and pings when there are none.
func (s *session) feed(l *lane) error {
	ping := time.NewTicker(s.o.PingInterval)
	defer ping.Stop()
	for {
		if p, from, to := s.take(l); p != nil {
			err := l.write(s.o, p.job, p.items[from:to])
			if err != nil {
				err = fmt.Errorf("%w: %w", ErrLane, err)
			}
			for i := from; i < to; i++ {
				p.result(i, err)
			}
			if err != nil {
				return err
			}
			continue
		}
		select {
		case <-l.wake:
		case <-l.gone:
			return nil
		case <-ping.C:
			if err := l.ping(s.o); err != nil {
				return err
			}
		}
	}
}

// A lane is one connection, on the producer's side.
type lane struct {
	conn    net.Conn // the stream, TLS or not
	raw     net.Conn // the connection below it: closing it says no goodbye and never waits
	number  uint16
	wake    chan struct{}
	gone    chan struct{} // closed when the consumer closed its end
	current *push         // whose items are being written; guarded by session.mu

	headers [batchItemsMax * headerBytes]byte
	vec     [1 + batchItemsMax][]byte
	bufs    net.Buffers
	sent    *sentCounts

	mu    sync.Mutex
	limit time.Time // no write of the current item may last longer, when set
}

// sentCounts is shared by the lanes of a server.
type sentCounts struct{ frames, bytes atomic.Uint64 }

func newLane(conn, raw net.Conn, number uint16, sent *sentCounts) *lane {
	return &lane{conn: conn, raw: raw, number: number, sent: sent, wake: make(chan struct{}, 1), gone: make(chan struct{})}
}

// watch notices that the consumer is gone. A consumer sends nothing after its hello, so
// any byte ends the lane too. This read has no deadline: that a silent consumer is alive
// shows in its acknowledging our pings (TCP_USER_TIMEOUT).
func (l *lane) watch() {
	var b [1]byte
	_, err := l.conn.Read(b[:])
	close(l.gone)
	if err == nil || errors.Is(err, io.EOF) {
		l.raw.Close()
	}
}

// hurry sets the time at which the current item must be written.
func (l *lane) hurry(limit time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.limit.IsZero() {
		l.limit = limit
		_ = l.conn.SetWriteDeadline(limit)
	}
}

// allow gives the next piece its deadline.
func (l *lane) allow(d time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := time.Now().Add(d)
	if !l.limit.IsZero() && l.limit.Before(at) {
		at = l.limit
	}
	return l.conn.SetWriteDeadline(at)
}

// write sends the frames of a batch; payloads go from the slab to the kernel.
func (l *lane) write(o Options, job uint64, items []Item) error {
	headers := l.headers[:0]
	for k := range items {
		it := &items[k]
		headers = appendFrame(headers, kindData, len(items)-1-k, Header{
			Job: job, Seq: it.Seq, Slot: it.Slot, Epoch: it.Epoch, Length: uint32(len(it.Bytes)), Sum: it.Sum,
		})
	}
	vec, size := append(l.vec[:0], headers), 0
	for k := range items {
		for rest := items[k].Bytes; len(rest) > 0; {
			piece := rest[:min(len(rest), writePieceBytes-size)]
			rest = rest[len(piece):]
			vec = append(vec, piece)
			if size += len(piece); size == writePieceBytes {
				if err := l.flush(o, vec); err != nil {
					return err
				}
				vec, size = l.vec[:0], 0
			}
		}
		l.sent.frames.Add(1)
		l.sent.bytes.Add(uint64(len(items[k].Bytes)))
	}
	if len(vec) == 0 {
		return nil
	}
	return l.flush(o, vec)
}

// flush writes one piece under one deadline.
func (l *lane) flush(o Options, vec [][]byte) error {
	if err := l.allow(o.WriteTimeout); err != nil {
		return err
	}
	l.bufs = vec
	_, err := l.bufs.WriteTo(l.conn)
	return err
}

func (l *lane) ping(o Options) error {
	if err := l.allow(o.WriteTimeout); err != nil {
		return err
	}
	_, err := l.conn.Write(appendFrame(l.headers[:0], kindPing, 0, Header{}))
	return err
}
