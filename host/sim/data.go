package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/tier"
)

// lanes is how many connections a data link has: frames of two lanes overtake each other.
const lanes = 2

// frameTime is how long a chunk takes on a lane, most of the time; one in slowFrames takes
// up to slowFrameTime, so that much can happen between its first byte and its last.
const (
	frameTime     = 600 * time.Microsecond
	slowFrames    = 16
	slowFrameTime = 80 * time.Millisecond
)

// A frame is one chunk on its way.
type frame struct {
	job   session.JobID
	seq   uint32
	slot  tier.Slot
	sum   uint32
	bytes []byte
	dst   []byte // set between its begin and its end at the consumer
	end   func() error
	fetch *fetch
	into  uint32 // index of the slot that dst is
}

// An item is one chunk that a producer is to push.
type item struct {
	v     *serving
	index uint32
	hold  hold
}

// A link is the data connections that a consumer has dialed to a producer.
type link struct {
	consumer *peer // the consumer's view of the producer
	producer *peer // the producer's view of the consumer
	pipes    [lanes]pipe
	sending  [lanes]*item
	open     []*frame // begun at the consumer
	up       bool
}

// An outbox is what a producer has to push to one consumer.
type outbox struct {
	link      *link
	items     []*item
	downSince time.Duration
}

// dialData makes the consumer's data connections, until they are up or the session is
// another one; it mirrors connectData and transfer.Client.
func (p *peer) dialData(number int, pause time.Duration) {
	w, n := p.n.w, p.n
	if p.dataSession != number || p.link != nil && p.link.up {
		return
	}
	target := w.nodes[p.i]
	there, back := w.path(n.i, p.i), w.path(p.i, n.i)
	w.after(there.delay()+pause, n, func() { p.dialData(number, min(2*pause, 500*ms)) })
	if target.dead {
		return
	}
	w.cross(there, target, there.delay(), func() {
		producer := target.peers[n.i]
		l := &link{consumer: p, producer: producer, up: true}
		for i := range l.pipes {
			l.pipes[i] = w.pipe(target, n)
		}
		w.cross(back, n, back.delay(), func() {
			if !l.up || p.dataSession != number || p.link != nil && p.link.up {
				l.drop(false)
				return
			}
			p.link = l
			w.note("data up", n.i, p.i, 0)
			w.after(0, target, func() { producer.linkUp(l) })
		})
	})
}

// linkUp is the producer's side of new data connections.
func (p *peer) linkUp(l *link) {
	if !l.up {
		return
	}
	if p.out.link != nil {
		p.out.link.drop(true)
	}
	p.out.link = l
	p.pump()
}

// drop ends data connections. What was begun is cut, what was being written has failed.
func (l *link) drop(redial bool) {
	if !l.up {
		return
	}
	l.up = false
	w := l.consumer.n.w
	for i := range l.pipes {
		l.pipes[i].q = nil
	}
	if c := l.consumer; !c.n.dead {
		w.after(c.n.w.path(l.producer.n.i, c.n.i).delay(), c.n, func() {
			for _, f := range l.open {
				c.frameEnd(f, errCut)
			}
			l.open = nil
			if c.link == l {
				c.link = nil
				if redial {
					c.dialData(c.dataSession, 50*ms)
				}
			}
		})
	}
	if p := l.producer; !p.n.dead && p.out.link == l {
		p.out.link, p.out.downSince = nil, w.now
		w.after(w.path(l.consumer.n.i, p.n.i).delay(), p.n, func() {
			for _, it := range l.sending {
				if it != nil {
					p.pushed(it, session.PushFailed)
				}
			}
			l.sending = [lanes]*item{}
			p.pump()
		})
	}
}

var errCut = errors.New("its connection was lost")

// push queues chunks for a consumer; each waits for a lane at most laneWait.
func (p *peer) push(items []*item) {
	w := p.n.w
	p.out.items = append(p.out.items, items...)
	p.pump()
	for _, it := range items {
		p.laneWait(it, w.now)
	}
}

func (p *peer) laneWait(it *item, since time.Duration) {
	w := p.n.w
	w.after(since+w.waits.laneWait-w.now, p.n, func() {
		switch {
		case !slices.Contains(p.out.items, it):
		case p.out.link != nil || p.out.downSince > since:
			p.laneWait(it, max(p.out.downSince, w.now-w.waits.laneWait/2))
		default:
			p.out.items = slices.DeleteFunc(p.out.items, func(x *item) bool { return x == it })
			p.pushed(it, session.NoData)
		}
	})
}

// pump gives free lanes their next chunk.
func (p *peer) pump() {
	l := p.out.link
	if l == nil || !l.up {
		return
	}
	for i := range l.pipes {
		for l.sending[i] == nil && len(p.out.items) > 0 {
			it := p.out.items[0]
			p.out.items = p.out.items[1:]
			if it.hold.verify() != nil {
				p.n.w.fail("bytes", "node %d pushes a chunk whose bytes are not those that were stored", p.n.i)
			}
			l.sending[i] = it
			p.write(l, i, it)
		}
	}
}

// write puts one frame on a lane.
func (p *peer) write(l *link, lane int, it *item) {
	w, x := p.n.w, &l.pipes[lane]
	j := &it.v.job
	f := &frame{job: j.ID, seq: it.index, slot: tier.Slot{Index: j.Slots[it.index], Epoch: j.Epochs[it.index]},
		sum: it.hold.sum, bytes: slices.Clone(it.hold.bytes)}
	if x.p.corrupt > 0 {
		x.p.corrupt--
		f.bytes[0] ^= 0x40
	}
	c, takes := l.consumer, frameTime
	if x.p.rnd.one(slowFrames) {
		takes = time.Duration(x.p.rnd.between(int64(frameTime), int64(slowFrameTime)))
	}
	takes = max(takes, x.p.clogged-w.now) // what nobody reads is not written
	x.put(x.p.skew, func() { c.frameBegin(l, f) })
	x.put(x.p.skew+takes, func() {
		if f.dst != nil {
			l.open = slices.DeleteFunc(l.open, func(o *frame) bool { return o == f })
			c.frameEnd(f, nil)
		} else {
			c.heardData()
		}
	})
	w.after(takes, p.n, func() {
		if l.sending[lane] != it {
			return
		}
		l.sending[lane] = nil
		p.pushed(it, session.Transferred)
		p.pump()
	})
}

func (p *peer) pushed(it *item, cause session.Cause) {
	if it.v.stopped {
		return
	}
	it.v.pushing--
	p.core.Pushed(p.n.local(), it.v.job.ID, int(it.index), cause, "")
	p.carry()
}

// heardData notes that bytes came on a data connection.
func (p *peer) heardData() {
	now := p.n.local()
	p.heardByte(now)
	p.core.DataActivity(now, now)
	p.carry()
}

// frameBegin mirrors sink.Begin: the frame goes into its slot, or nowhere.
func (p *peer) frameBegin(l *link, f *frame) {
	w, n := p.n.w, p.n
	n.moved = true
	p.heardData()
	w.boundary(PhaseTransfer, p.i, n.i, false)
	t := p.demands[f.job]
	slot := f.slot
	if w.broken.Fence {
		if t = n.waiting(&slot, &f.seq); t == nil {
			return
		}
	} else {
		if t == nil || int(f.seq) >= len(t.wants) {
			w.note("frame unwanted", n.i, p.i, uint64(f.job))
			return
		}
		if x := t.wants[f.seq]; x.slot != slot || len(f.bytes) != w.model.chunkBytes(x.ref.Group) {
			return
		}
	}
	dst, end, err := n.tier.Grab(slot)
	if err != nil {
		w.note("frame fenced", n.i, p.i, uint64(f.job))
		return
	}
	n.grabs++
	n.filled[slot.Index] = true
	f.dst, f.end, f.fetch, f.into = dst, end, t, slot.Index
	copy(dst, f.bytes[:len(f.bytes)/2])
	l.open = append(l.open, f)
	w.boundary(PhaseTransfer, p.i, n.i, true)
}

// waiting is a receiver without a fence: whoever waits for bytes in a slot gets them.
func (n *node) waiting(slot *tier.Slot, seq *uint32) *fetch {
	for _, c := range n.consumers {
		for _, f := range c.fetches {
			for i, x := range f.wants {
				if !x.ended && x.slot.Index == slot.Index {
					*slot, *seq = x.slot, uint32(i)
					return f
				}
			}
		}
	}
	return nil
}

// frameEnd is the end of a frame that was begun: whole when err is nil.
func (p *peer) frameEnd(f *frame, err error) {
	n := p.n
	n.moved = true
	p.heardData()
	cause := session.NoData
	if err == nil {
		copy(f.dst[len(f.bytes)/2:], f.bytes[len(f.bytes)/2:])
		if tier.Checksum(f.dst[:len(f.bytes)]) != f.sum {
			err, cause = errors.New("checksum"), session.Checksum
		}
	}
	n.grabs--
	n.filled[f.into] = false
	err = errors.Join(err, f.end())
	if f.fetch == nil {
		return
	}
	if x := f.fetch.wants[f.seq]; err == nil && x.slot != f.slot {
		n.w.fail("fence", "node %d: bytes for slot %d epoch %d go into its epoch %d", n.i, f.slot.Index, f.slot.Epoch, x.slot.Epoch)
	}
	if err == nil && f.fetch.c.landed(f.fetch.wants[f.seq], f.sum) {
		cause = session.Transferred
	} else {
		f.fetch.over[f.seq] = true
	}
	n.w.note("arrived", n.i, p.i, uint64(f.job)<<8|uint64(cause))
	f.fetch.c.peer.core.Arrived(n.local(), f.fetch.id, int(f.seq), cause, "")
	f.fetch.c.peer.carry()
}
