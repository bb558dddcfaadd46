package host

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
)

// A meeting runs the join of this node's producers: it brings the time in, carries the
// effects out, and keeps the hold of each key that the join has.
type meeting struct {
	node  *Node
	start time.Time // the clock of session.Job.Deadline

	mu    sync.Mutex
	join  *join.Join
	holds map[string]map[tier.Key][]hold // by transfer; twice when supplied twice
	timer *time.Timer
	over  bool
	jobs  map[session.JobID]*serving // by serial, until nothing reads what they hold
	// producers are those of the transfers in work: they know which chunk a key is of.
	producers map[string]*producer
}

func newMeeting(n *Node, start time.Time, l join.Limits) *meeting {
	bytes := make([]uint64, len(n.groups))
	for i := range bytes { // a chunk keeps a whole slot, however small it is
		bytes[i] = uint64(n.tier.StrideBytes())
	}
	m := &meeting{node: n, start: start, holds: map[string]map[tier.Key][]hold{}, producers: map[string]*producer{}, jobs: map[session.JobID]*serving{}}
	m.join = join.New(join.Config{Limits: l, ChunkBytes: bytes, Elsewhere: m.elsewhere})
	m.timer = time.AfterFunc(time.Hour, func() { m.do(func(now time.Duration) { m.join.Tick(now) }) })
	return m
}

// do runs one command and carries out what follows from it.
func (m *meeting) do(command func(now time.Duration)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return
	}
	now := time.Since(m.start)
	command(now)
	for effects := m.join.Take(); len(effects) > 0; effects = m.join.Take() {
		for _, e := range effects {
			m.carry(e)
		}
	}
	if at, ok := m.join.Wake(); ok {
		m.timer.Reset(max(0, at-now))
	}
}

func (m *meeting) carry(e join.Effect) {
	switch e := e.(type) {
	case join.Answer:
		m.node.tellOverBudget(e.Peer, e.Answer.Refused)
		m.node.peers.Answer(e.Peer, m.jobs[e.Job].job.ID, e.Answer)
	case join.Free:
		m.free(e.Transfer, tier.Key(e.Key))
		if e.Why == join.Aged || e.Why == join.NoRoom || e.Why == join.Lapsed {
			m.node.metrics.ParkedFreed.WithLabelValues(e.Why.String()).Inc()
			m.node.log.Debug("parked supply let go", "transfer", e.Transfer, "key", tier.Key(e.Key), "why", e.Why)
		}
	case join.Finished:
		m.logFinished(&e)
	}
}

// logFinished says what did not meet, for a few transfers a minute: the counters have them
// all. A transfer in which everything met is no news.
func (m *meeting) logFinished(e *join.Finished) {
	p := m.producers[e.Transfer]
	delete(m.producers, e.Transfer)

	level := slog.LevelDebug
	var demanded, supplied, transferred, unmatched int
	for _, g := range e.Groups {
		demanded, supplied = demanded+len(g.Demanded), supplied+len(g.Supplied)
		transferred, unmatched = transferred+len(g.Transferred), unmatched+len(g.Unmatched)
	}
	if unmatched > 0 {
		level = slog.LevelInfo
	}
	m.node.faults.Log(level, "transfer", e.Transfer, "transfer finished", "transfer", e.Transfer, "leg", e.Leg, "demanded", demanded,
		"supplied", supplied, "transferred", transferred, "unmatched", unmatched, "not_transferred", lateText(func() string { return p.chunksText(notTransferred(e)) }))
}

// notTransferred is what of a transfer was demanded and did not come.
func notTransferred(e *join.Finished) map[tier.Key]bool {
	out := map[tier.Key]bool{}
	for _, g := range e.Groups {
		for _, k := range g.Demanded {
			out[tier.Key(k)] = true
		}
		for _, k := range g.Transferred {
			delete(out, tier.Key(k))
		}
	}
	return out
}

// lateText is made only when its line is written.
type lateText func() string

// LogValue implements slog.LogValuer.
func (t lateText) LogValue() slog.Value { return slog.StringValue(t()) }

func (m *meeting) free(transfer string, key tier.Key) {
	stack := m.holds[transfer][key]
	if len(stack) == 0 {
		return
	}
	if h := stack[len(stack)-1]; !h.isPrivate() || m.node.name(h, key) != nil {
		m.node.letGo(h)
	}
	if len(stack) > 1 {
		m.holds[transfer][key] = stack[:len(stack)-1]
		return
	}
	delete(m.holds[transfer], key)
	if len(m.holds[transfer]) == 0 {
		delete(m.holds, transfer)
	}
}

// begin names a producer's transfer and what it promises; nil = nothing.
func (m *meeting) begin(p *producer, promise join.Promise) error {
	err := errors.New("the node is closing")
	m.do(func(now time.Duration) {
		if err = m.join.Begin(now, p.transfer, p.leg); err != nil {
			return
		}
		m.producers[p.transfer] = p
		if promise != nil {
			err = m.join.Promised(now, p.transfer, promise)
		}
	})
	return err
}

// supply hands holds to the join.
func (m *meeting) supply(transfer string, offers []offer) {
	if len(offers) == 0 {
		return
	}
	taken := false
	m.do(func(now time.Duration) {
		taken = true
		keys := make([]session.Key, len(offers))
		if m.holds[transfer] == nil {
			m.holds[transfer] = map[tier.Key][]hold{}
		}
		for i, o := range offers {
			keys[i] = session.Key(o.key)
			m.holds[transfer][o.key] = append(m.holds[transfer][o.key], o.hold)
		}
		if err := m.join.Supply(now, transfer, keys); err != nil {
			m.node.log.Warn("supply came too late", "transfer", transfer, "error", err)
		}
	})
	if !taken {
		for _, o := range offers {
			m.node.letGo(o.hold)
		}
	}
}

func (m *meeting) refuse(transfer string, refusals []join.Refusal) {
	if len(refusals) > 0 {
		m.do(func(now time.Duration) { _ = m.join.Refuse(now, transfer, refusals) }) // ended: it has its word
	}
}

func (m *meeting) lastWord(transfer string) {
	m.do(func(now time.Duration) { _ = m.join.LastWord(now, transfer) })
}

func (m *meeting) report(transfer string) (r []join.GroupReport) {
	m.do(func(time.Duration) { r = m.join.Report(transfer) })
	return r
}

func (m *meeting) demand(v *serving) {
	m.do(func(now time.Duration) {
		m.jobs[v.serial] = v
		j := v.job
		j.ID = v.serial
		m.join.Demand(now, v.peer, j)
	})
}

func (m *meeting) jobEnded(v *serving, results []session.Result) {
	m.do(func(now time.Duration) { m.join.JobEnded(now, v.peer, v.serial, results) })
	m.do(func(time.Duration) { delete(m.jobs, v.serial) }) // it has no answers any more
}

// reserve takes what the tier holds for a peer out of its budget, key by key: fits says which
// have room, and refused is the answer for the others.
func (m *meeting) reserve(peer string, keys []session.Key) (fits []bool, refused session.Refusal) {
	fits = make([]bool, len(keys))
	m.do(func(time.Duration) {
		for i := range keys {
			fits[i] = m.join.Reserve(peer, &keys[i])
		}
		refused = session.Refusal{Reason: sessionpb.Reason_REASON_BUSY, Text: m.join.OverBudget()}
	})
	return fits, refused
}

// giveBack ends what reserve took.
func (m *meeting) giveBack(peer string, keys []session.Key) {
	m.do(func(time.Duration) {
		for i := range keys {
			m.join.Return(peer, &keys[i])
		}
	})
}

func (m *meeting) peerBytes(peer string) (n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.join.PeerBytes(peer)
}

// elsewhere is join.Config.Elsewhere: a key of leg demand that the transfer does not supply
// and the tier holds all the same is pinned for the job. It runs under m.mu.
func (m *meeting) elsewhere(peer string, job session.JobID, i int, k *session.Key) bool {
	v := m.jobs[job]
	if v.ctx.Err() != nil {
		return false // the job ends just now
	}
	refs, found := m.node.tier.Pin(v.owner, []tier.Key{tier.Key(*k)})
	if found[0] != tier.Readable {
		return false
	}
	if !m.join.Reserve(peer, k) {
		_ = m.node.tier.Unpin(refs[0]) // only ErrNotPinned, when the owner was released
		return false
	}
	v.keep(uint32(i), pinned(refs[0]))
	return true
}

// withRoom takes slots for a request. When the tier has none left, the oldest supply
// that nobody has asked for goes first; it stays readable until its slot is taken.
func (m *meeting) withRoom(transfer string, admit func() error) error {
	for {
		err := admit()
		var full *tier.ErrNoRoom
		if !errors.As(err, &full) {
			return err
		}
		shed := false
		m.do(func(now time.Duration) {
			shed = m.join.Shed(now, full.Need-full.Free-full.Evictable, transfer)
		})
		if !shed { // each round lets at least one key go, so this ends
			return err
		}
	}
}

// hold returns what a key of a transfer is held by, while a job has it bound.
func (m *meeting) hold(transfer string, key tier.Key) (hold, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	stack := m.holds[transfer][key]
	if len(stack) == 0 {
		return hold{}, false
	}
	return stack[0], true
}

// status is for metrics.
func (m *meeting) status() (s join.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.join.Status()
}

// drain refuses what peers still wait for: no engine is left that could supply it.
func (m *meeting) drain() { m.do(m.join.Drain) }

// close lets everything go. Nothing is pushed any more.
func (m *meeting) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.over = true
	m.timer.Stop()
	for _, keys := range m.holds {
		for _, stack := range keys {
			for _, h := range stack {
				m.node.letGo(h)
			}
		}
	}
	m.holds = nil
}
