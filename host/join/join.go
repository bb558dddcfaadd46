// Package join is the place where supply and demand of one request meet at run time,
// on the producer's side. It is pure: commands and the time in, effects out.
//
// A transfer is what both sides name by one transfer id. The producer's engine
// begins it, supplies keys as their chunks become readable, refuses those that will
// not come, and says a last word. Consumers demand keys by jobs, before or after.
// The join gives every demanded key exactly one word: available, or refused with a
// reason.
//
//	demanded key, at the demand or later           word
//	supplied and held                              available
//	refused before                                 refused, that reason
//	supplied once, let go by age or bytes          refused, evicted
//	supplied once, sent and let go                 refused, finished
//	not mentioned, outside the promise             refused, not planned
//	not mentioned, last word said                  refused, not supplied
//	not mentioned, last word open                  waits; at the job's deadline
//	                                               refused, no last word
//	transfer not begun                             waits; at the job's deadline
//	                                               refused, not begun
//	transfer finished in the last 60 s             refused, finished
//
// In leg demand, where a consumer may ask for more than the transfer's plan has, a key that
// would be refused is available when the host has it elsewhere (Config.Elsewhere).
//
// A producer whose plan is known before it computes gives a promise (leg demand): which
// keys will come, and which never. Jobs hear both at once, those that came before the
// transfer was begun included; what will come gets its word later, as everything else.
//
// # Holding
//
// Supply hands over one pin a key. Each is given back by exactly one Free. A key
// that a job was told is available is bound to it until JobEnded; sent keys are let
// go then, and so are those of a job that ended because its consumer did not renew its
// lease. A key that no job has bound is parked: it is let go after
// Limits.ParkedAge, or, oldest first, when the parked bytes pass
// Limits.ParkedBytesMax or the tier needs the room (Shed).
//
// # The budget of a peer
//
// What is bound to the jobs of one peer, and what the host pins for it beside that
// (Reserve), is bounded in bytes, and so are the keys that only its demands have named. A
// key over the bound is refused, busy, with the bound in the text; it stays parked for
// others. Nothing waits for the budget.
//
// # The end
//
// A transfer is finished when its last word is said, nothing is held and no job is
// open. Its id is remembered for Limits.FinishedAge, so that a late demand is
// answered at once. A transfer that nobody has begun lives as long as its jobs.
package join

import (
	"bytes"
	"container/heap"
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// Key names a chunk; its last four bytes are the group.
type Key = session.Key

// Group returns the group index of a key.
func Group(k *Key) uint32 { return binary.BigEndian.Uint32(k[session.KeyBytes-4:]) }

// Errors of the producer's commands.
var (
	// ErrNotBegun: supply for a transfer that Begin has not named.
	ErrNotBegun = errors.New("transfer is not begun")
	// ErrBegun: Begin for a transfer in work.
	ErrBegun = errors.New("transfer is begun already")
	// ErrEnded: a word on a transfer after its last word.
	ErrEnded = errors.New("transfer has its last word")
	// ErrFull: Limits.TransfersMax transfers are in work.
	ErrFull = errors.New("too many transfers")
)

// Limits bounds a Join.
type Limits struct {
	// ParkedAge is how long a key that no job has bound is held.
	ParkedAge time.Duration
	// ParkedBytesMax bounds the bytes of such keys; the oldest go first.
	ParkedBytesMax uint64
	// FinishedAge is how long a finished id is remembered, and FinishedMax how many.
	FinishedAge time.Duration
	FinishedMax int
	// TransfersMax bounds the transfers in work, those that only a demand has named
	// included.
	TransfersMax int
	// KeysMax bounds the keys that are remembered, over all transfers.
	KeysMax int
	// JobsMax bounds the open jobs, over all peers.
	JobsMax int
	// PeerBytesMax bounds the bytes that are kept for one peer: bound to its jobs, once for
	// each job, or reserved.
	PeerBytesMax uint64
	// PeerKeysMax bounds the remembered keys that a peer's demands have named first.
	PeerKeysMax int
}

// DefaultLimits returns what tierd ships.
func DefaultLimits() Limits {
	return Limits{
		ParkedAge:      60 * time.Second,
		ParkedBytesMax: 8 << 30,
		FinishedAge:    60 * time.Second,
		FinishedMax:    1 << 16, // 1000 requests a second for a minute
		TransfersMax:   1 << 14,
		KeysMax:        1 << 20, // 64 prompts of 131,072 tokens in chunks of 16 and two groups; some 350 MB when full
		JobsMax:        1 << 14,
		PeerBytesMax:   8 << 30,
		PeerKeysMax:    1 << 19, // half of KeysMax: one peer does not take all
	}
}

// Config is what a Join is made of.
type Config struct {
	Limits Limits
	// ChunkBytes is what a chunk takes of the memory that the bounds are of, by group index.
	ChunkBytes []uint64
	// Elsewhere, when set, says whether the host has a key beside the transfer's supply, and
	// has pinned it for a job under the peer's budget: leg demand asks it for a key that is
	// refused otherwise. The pin is the host's, until the job ends.
	Elsewhere func(peer string, job session.JobID, index int, k *Key) bool
}

// An Effect is what the join asks its host to do, in order.
type Effect interface{ effect() }

type (
	// Answer is a word on keys of a peer's job; see session.Core.Answer.
	Answer struct {
		Peer   string
		Job    session.JobID
		Answer session.Answer
	}
	// Free gives back the pin that Supply took.
	Free struct {
		Transfer string
		Key      Key
		Why      Why
	}
	// Finished ends a transfer, with what met and what did not.
	Finished struct {
		Transfer string
		Leg      string
		Groups   []GroupReport
	}
)

func (Answer) effect()   {}
func (Free) effect()     {}
func (Finished) effect() {}

// Why says why a pin is given back.
type Why uint8

const (
	// Sent: a job took the key.
	Sent Why = iota
	// Aged: no job bound it for Limits.ParkedAge.
	Aged
	// NoRoom: the parked bytes or the remembered keys passed their bound, or the tier
	// needs the slot.
	NoRoom
	// Twice: it is held already.
	Twice
	// Withdrawn: the producer refused it after supplying it.
	Withdrawn
	// Late: it came without begin or after the last word.
	Late
	// Lapsed: its consumer did not renew its lease.
	Lapsed
)

// String returns the name that logs and metrics use.
func (w Why) String() string {
	return [...]string{"sent", "aged", "no_room", "twice", "withdrawn", "late", "lapsed"}[w]
}

// A GroupReport holds the key sets of one group of a transfer, each sorted.
type GroupReport struct {
	Group                                      uint32
	Demanded, Supplied, Transferred, Unmatched []Key
}

type phase uint8

const (
	unknown phase = iota // demanded only
	here                 // supplied, the pin is held
	refused              // will not come
	gone                 // was here
)

// entry is one key of a transfer.
type entry struct {
	t      *transfer
	key    Key
	phase  phase
	reason sessionpb.Reason // refused, gone
	text   string
	bound  int           // jobs that were told it is available
	parked *list.Element // in Join.parked when here and not bound
	since  time.Duration // when it was parked
	wait   []waiter
	by     string // the peer whose demand named it first; "" = the producer

	demanded, supplied, transferred, unmatched bool
}

type waiter struct {
	j *job
	i int
}

type transfer struct {
	id      string
	leg     string
	begun   bool
	last    bool
	promise Promise // nil = none given
	keys    map[Key]*entry
	held    int // entries in phase here
	jobs    []*job
}

// A Promise says before a key is computed what is known of it, and why it never comes.
// It is a function of the key alone.
type Promise func(*Key) (Fate, string)

// Fate of a key that is not mentioned yet.
type Fate uint8

const (
	// Open: not known before the last word.
	Open Fate = iota
	// WillCome: in the plan; not a word yet.
	WillCome
	// Never: not in the plan.
	Never
)

type jobName struct {
	peer string
	id   session.JobID
}

type keyWord uint8

const (
	wordNone keyWord = iota
	wordAvailable
	wordElsewhere // available, and the host's pin
	wordEnded
)

type job struct {
	jobName
	t        *transfer
	leg      string
	entries  []*entry
	word     []keyWord
	open     int // keys with no word, and available ones
	pending  int // keys with no word
	deadline time.Duration
	at       int // in Join.deadlines; -1 when out
}

type finished struct {
	id    string
	until time.Duration
}

// A Join holds the transfers of a producer.
type Join struct {
	cfg       Config
	now       time.Duration
	out       []Effect
	transfers map[string]*transfer
	jobs      map[jobName]*job
	deadlines deadlines // jobs with pending keys
	draining  bool
	parked    list.List // *entry, oldest first
	bytes     uint64    // of parked
	keys      int
	peers     map[string]*share
	done      map[string]struct{}
	doneOrder list.List // finished, oldest first
}

// share is what a peer takes of its budget; there is none of a peer that takes nothing.
type share struct {
	bytes uint64
	keys  int
}

// New returns an empty Join.
func New(cfg Config) *Join {
	return &Join{cfg: cfg, transfers: map[string]*transfer{}, jobs: map[jobName]*job{}, peers: map[string]*share{}, done: map[string]struct{}{}}
}

// Take returns the effects since the last call.
func (j *Join) Take() []Effect {
	out := j.out
	j.out = nil
	return out
}

func (j *Join) emit(e Effect) { j.out = append(j.out, e) }

// Status is a snapshot of what a Join holds.
type Status struct {
	Transfers, Jobs, Keys, Finished, ParkedKeys int
	ParkedBytes                                 uint64
}

// Status returns a snapshot.
func (j *Join) Status() Status {
	return Status{Transfers: len(j.transfers), Jobs: len(j.jobs), Keys: j.keys, Finished: len(j.done),
		ParkedKeys: j.parked.Len(), ParkedBytes: j.bytes}
}

// PeerBytes returns the bytes that are kept for a peer.
func (j *Join) PeerBytes(peer string) uint64 {
	if s := j.peers[peer]; s != nil {
		return s.bytes
	}
	return 0
}

// Reserve takes a key's bytes out of a peer's budget, for what the host pins for it. It
// reports false when they pass the bound; then nothing is taken.
func (j *Join) Reserve(peer string, k *Key) bool {
	n := j.chunkBytes(k)
	if j.PeerBytes(peer)+n > j.cfg.Limits.PeerBytesMax {
		return false
	}
	j.charge(peer, n, 0)
	return true
}

// Return gives back what Reserve took.
func (j *Join) Return(peer string, k *Key) { j.discharge(peer, j.chunkBytes(k), 0) }

// OverBudget is the text of a refusal over Limits.PeerBytesMax.
func (j *Join) OverBudget() string {
	return fmt.Sprintf("the producer keeps at most %d bytes at a time for the demands of one peer, its bounds.peer_pinned_bytes", j.cfg.Limits.PeerBytesMax)
}

func (j *Join) charge(peer string, bytes uint64, keys int) {
	s := j.peers[peer]
	if s == nil {
		s = &share{}
		j.peers[peer] = s
	}
	s.bytes, s.keys = s.bytes+bytes, s.keys+keys
}

func (j *Join) discharge(peer string, bytes uint64, keys int) {
	s := j.peers[peer]
	if s.bytes, s.keys = s.bytes-bytes, s.keys-keys; *s == (share{}) {
		delete(j.peers, peer)
	}
}

// Report returns the key sets of a transfer in work, by group.
func (j *Join) Report(id string) []GroupReport {
	if t := j.transfers[id]; t != nil {
		return t.report()
	}
	return nil
}

func (t *transfer) report() []GroupReport {
	byGroup := map[uint32]*GroupReport{}
	for k, e := range t.keys {
		g := byGroup[Group(&k)]
		if g == nil {
			g = &GroupReport{Group: Group(&k)}
			byGroup[g.Group] = g
		}
		for _, s := range []struct {
			in  bool
			set *[]Key
		}{{e.demanded, &g.Demanded}, {e.supplied, &g.Supplied}, {e.transferred, &g.Transferred}, {e.unmatched, &g.Unmatched}} {
			if s.in {
				*s.set = append(*s.set, k)
			}
		}
	}
	out := make([]GroupReport, 0, len(byGroup))
	for _, g := range byGroup {
		for _, set := range [][]Key{g.Demanded, g.Supplied, g.Transferred, g.Unmatched} {
			slices.SortFunc(set, func(a, b Key) int { return bytes.Compare(a[:], b[:]) })
		}
		out = append(out, *g)
	}
	slices.SortFunc(out, func(a, b GroupReport) int { return int(int64(a.Group) - int64(b.Group)) })
	return out
}

// Wake returns when Tick must be called next.
func (j *Join) Wake() (time.Duration, bool) {
	at, ok := time.Duration(0), false
	earlier := func(t time.Duration) {
		if !ok || t < at {
			at, ok = t, true
		}
	}
	if len(j.deadlines) > 0 {
		earlier(j.deadlines[0].deadline)
	}
	if e := j.parked.Front(); e != nil {
		earlier(e.Value.(*entry).since + j.cfg.Limits.ParkedAge)
	}
	if e := j.doneOrder.Front(); e != nil {
		earlier(e.Value.(finished).until)
	}
	return at, ok
}

// Tick brings the time and ends every wait that is over.
func (j *Join) Tick(now time.Duration) {
	j.now = max(j.now, now)
	for len(j.deadlines) > 0 && j.deadlines[0].deadline <= j.now {
		j.expire(j.deadlines[0])
	}
	for e := j.parked.Front(); e != nil && e.Value.(*entry).since+j.cfg.Limits.ParkedAge <= j.now; e = j.parked.Front() {
		j.letGo(e.Value.(*entry), Aged)
	}
	for e := j.doneOrder.Front(); e != nil && e.Value.(finished).until <= j.now; e = j.doneOrder.Front() {
		j.forget(e)
	}
}

func (j *Join) forget(e *list.Element) {
	delete(j.done, j.doneOrder.Remove(e).(finished).id)
}

// Begin names a transfer that this node produces. Demands that came before are
// bound to it.
func (j *Join) Begin(now time.Duration, id, leg string) error {
	j.Tick(now)
	t := j.transfers[id]
	if _, over := j.done[id]; over {
		return fmt.Errorf("begin of transfer %q: %w", id, ErrEnded)
	}
	if t != nil && t.begun {
		return fmt.Errorf("begin of transfer %q: %w", id, ErrBegun)
	}
	if t == nil {
		if len(j.transfers) >= j.cfg.Limits.TransfersMax {
			return fmt.Errorf("begin of transfer %q: %d are in work, the most allowed: %w", id, len(j.transfers), ErrFull)
		}
		t = j.open(id)
	}
	t.begun, t.leg = true, leg
	return nil
}

// Promised gives a transfer in work its promise, once, before its first supply. Jobs that
// wait are told what will come and what never does.
func (j *Join) Promised(now time.Duration, id string, p Promise) error {
	j.Tick(now)
	t, err := j.producing(id)
	if err != nil {
		return fmt.Errorf("promise: %w", err)
	}
	t.promise = p
	b := batch{}
	for _, x := range t.jobs {
		for i, w := range x.word {
			if w == wordNone && !j.foretell(b, waiter{x, i}) {
				x.entries[i].wait = dropWaiter(x.entries[i].wait, x)
			}
		}
	}
	j.flush(b, false)
	return nil
}

// foretell tells a job what its transfer's promise says of a key that is not mentioned. It
// reports false when that is the key's last word.
func (j *Join) foretell(b batch, w waiter) bool {
	if w.j.t.promise == nil {
		return true
	}
	switch fate, why := w.j.t.promise(&w.j.entries[w.i].key); fate {
	case Never:
		j.refuse(b, w, sessionpb.Reason_REASON_NOT_PLANNED, why)
		return false
	case WillCome:
		if !w.j.t.last {
			b.willCome(w)
		}
	}
	return true
}

func (j *Join) open(id string) *transfer {
	t := &transfer{id: id, keys: map[Key]*entry{}}
	j.transfers[id] = t
	return t
}

// producing returns the transfer that a producer's word is about.
func (j *Join) producing(id string) (*transfer, error) {
	t := j.transfers[id]
	_, over := j.done[id]
	switch {
	case over || t != nil && t.last:
		return nil, fmt.Errorf("transfer %q: %w", id, ErrEnded)
	case t == nil || !t.begun:
		return nil, fmt.Errorf("transfer %q: %w", id, ErrNotBegun)
	}
	return t, nil
}

// entryOf returns the entry of a key, or nil when no more can be remembered.
func (j *Join) entryOf(t *transfer, k *Key) *entry {
	e := t.keys[*k]
	if e == nil && j.keys < j.cfg.Limits.KeysMax {
		e = &entry{t: t, key: *k}
		t.keys[*k] = e
		j.keys++
	}
	return e
}

// Supply says that keys are readable here, each with a pin for the join. Jobs that
// wait for them are told; the rest is parked. With an error every pin is given back.
func (j *Join) Supply(now time.Duration, id string, keys []Key) error {
	j.Tick(now)
	t, err := j.producing(id)
	if err != nil {
		for _, k := range keys {
			j.emit(Free{id, k, Late})
		}
		return fmt.Errorf("supply of %d keys: %w", len(keys), err)
	}
	b := batch{}
	for i := range keys {
		e := j.entryOf(t, &keys[i])
		switch {
		case e == nil:
			j.emit(Free{id, keys[i], NoRoom})
			continue
		case e.phase == here:
			j.emit(Free{id, keys[i], Twice})
			continue
		}
		e.phase, e.reason, e.text = here, 0, ""
		e.supplied = true
		t.held++
		for _, w := range e.wait {
			j.bind(b, w, e)
		}
		e.wait = nil
		if e.bound == 0 {
			j.park(e)
		}
	}
	j.flush(b, false)
	j.shed()
	return nil
}

// bind gives a key that is here the word available, unless it passes the peer's budget.
func (j *Join) bind(b batch, w waiter, e *entry) {
	if !j.Reserve(w.j.peer, &e.key) {
		j.refuse(b, w, sessionpb.Reason_REASON_BUSY, j.OverBudget())
		return
	}
	b.available(w)
	w.j.word[w.i] = wordAvailable
	j.decide(w.j)
	j.unpark(e)
	e.bound++
}

// decide notes that one more key of a job has a word.
func (j *Join) decide(x *job) {
	x.pending--
	if x.pending == 0 && x.at >= 0 {
		heap.Remove(&j.deadlines, x.at)
	}
}

func (j *Join) chunkBytes(k *Key) uint64 {
	if g := Group(k); int64(g) < int64(len(j.cfg.ChunkBytes)) {
		return j.cfg.ChunkBytes[g]
	}
	return 0
}

func (j *Join) park(e *entry) {
	e.since = j.now
	e.parked = j.parked.PushBack(e)
	j.bytes += j.chunkBytes(&e.key)
}

func (j *Join) unpark(e *entry) {
	if e.parked != nil {
		j.parked.Remove(e.parked)
		e.parked = nil
		j.bytes -= j.chunkBytes(&e.key)
	}
}

// shed lets the oldest parked keys go until the rest fits.
func (j *Join) shed() {
	for j.bytes > j.cfg.Limits.ParkedBytesMax {
		j.letGo(j.parked.Front().Value.(*entry), NoRoom)
	}
}

// Shed lets the n oldest parked keys go, because the tier has no room for what transfer
// asks for; keys of that transfer stay, whose head is worth more than its tail. It lets
// none go when there are fewer.
func (j *Join) Shed(now time.Duration, n int, transfer string) bool {
	j.Tick(now)
	var oldest []*entry
	for e := j.parked.Front(); e != nil && len(oldest) < n; e = e.Next() {
		if p := e.Value.(*entry); p.t.id != transfer {
			oldest = append(oldest, p)
		}
	}
	if len(oldest) < n {
		return false
	}
	for _, e := range oldest {
		j.letGo(e, NoRoom)
	}
	return n > 0
}

// letGo gives the pin of a held key back.
func (j *Join) letGo(e *entry, why Why) {
	j.unpark(e)
	e.phase, e.reason = gone, sessionpb.Reason_REASON_EVICTED
	if why == Sent {
		e.reason = sessionpb.Reason_REASON_FINISHED
	}
	e.t.held--
	j.emit(Free{e.t.id, e.key, why})
	j.settle(e.t)
}

// A Refusal says why a key will not come.
type Refusal struct {
	Key    Key
	Reason sessionpb.Reason
	Text   string
}

// Refuse says that keys will not come. One that is parked is given back; one that a
// job has bound stays with it.
func (j *Join) Refuse(now time.Duration, id string, refusals []Refusal) error {
	j.Tick(now)
	t, err := j.producing(id)
	if err != nil {
		return fmt.Errorf("refusal of %d keys: %w", len(refusals), err)
	}
	b := batch{}
	for i := range refusals {
		r := &refusals[i]
		e := j.entryOf(t, &r.Key)
		if e == nil || e.phase == here && e.bound > 0 {
			continue
		}
		if e.phase == here {
			j.letGo(e, Withdrawn)
		}
		e.phase, e.reason, e.text = refused, r.Reason, r.Text
		for _, w := range e.wait {
			j.refuse(b, w, r.Reason, r.Text)
		}
		e.wait = nil
	}
	j.flush(b, false)
	return nil
}

// elsewhere asks the host for a key that is refused. What a bound refuses, a drain or a
// deadline stays refused.
func (j *Join) elsewhere(peer string, job session.JobID, leg string, i int, k *Key, r sessionpb.Reason) bool {
	switch r {
	case sessionpb.Reason_REASON_BUSY, sessionpb.Reason_REASON_DRAINING, sessionpb.Reason_REASON_NOT_BEGUN, sessionpb.Reason_REASON_NO_LAST_WORD:
		return false
	}
	return leg == session.LegDemand && j.cfg.Elsewhere != nil && j.cfg.Elsewhere(peer, job, i, k)
}

// refuse gives a key of a job its word refused, unless the host has it elsewhere.
func (j *Join) refuse(b batch, w waiter, r sessionpb.Reason, text string) {
	if j.elsewhere(w.j.peer, w.j.id, w.j.leg, w.i, &w.j.entries[w.i].key, r) {
		w.j.word[w.i] = wordElsewhere
		j.decide(w.j)
		b.available(w)
		return
	}
	w.j.word[w.i] = wordEnded
	w.j.open--
	j.decide(w.j)
	e := w.j.entries[w.i]
	e.unmatched = true
	b.refused(w, r, text)
}

// LastWord says that the transfer's supply is complete. Every key that a job waits
// for is refused, and so is every later demand of a key not mentioned. It is no error
// to say it twice.
func (j *Join) LastWord(now time.Duration, id string) error {
	j.Tick(now)
	t, err := j.producing(id)
	if errors.Is(err, ErrEnded) {
		return nil
	} else if err != nil {
		return fmt.Errorf("last word: %w", err)
	}
	t.last = true
	b := batch{}
	for _, x := range t.jobs {
		j.refusePending(b, x, sessionpb.Reason_REASON_NOT_SUPPLIED)
	}
	j.flush(b, true)
	j.settle(t)
	return nil
}

func (j *Join) refusePending(b batch, x *job, r sessionpb.Reason) {
	for i, w := range x.word {
		if w == wordNone {
			j.refuse(b, waiter{x, i}, r, "")
			x.entries[i].wait = dropWaiter(x.entries[i].wait, x)
		}
	}
}

func dropWaiter(ws []waiter, x *job) []waiter {
	return slices.DeleteFunc(ws, func(w waiter) bool { return w.j == x })
}

// expire refuses what a job waits for at its deadline.
func (j *Join) expire(x *job) {
	r := sessionpb.Reason_REASON_NO_LAST_WORD
	if !x.t.begun {
		r = sessionpb.Reason_REASON_NOT_BEGUN
	}
	b := batch{}
	j.refusePending(b, x, r)
	j.flush(b, true)
}

// Drain says that nothing will be supplied any more: every key that a job waits for is
// refused, and so is every later demand. What was bound before may still be sent.
func (j *Join) Drain(now time.Duration) {
	j.Tick(now)
	j.draining = true
	for len(j.deadlines) > 0 {
		b := batch{}
		j.refusePending(b, j.deadlines[0], sessionpb.Reason_REASON_DRAINING)
		j.flush(b, true)
	}
}

// Demand brings a job of a peer. An Answer tells at once what is known at once; the
// deadline is that of the consumer's request.
func (j *Join) Demand(now time.Duration, peer string, d session.Job) {
	j.Tick(now)
	name := jobName{peer, d.ID}
	t := j.transfers[d.TransferID]
	_, over := j.done[d.TransferID]
	switch {
	case over:
		j.refuseAll(peer, &d, sessionpb.Reason_REASON_FINISHED)
		return
	case j.draining:
		j.refuseAll(peer, &d, sessionpb.Reason_REASON_DRAINING)
		return
	case j.jobs[name] != nil, len(j.jobs) >= j.cfg.Limits.JobsMax, j.keys+len(d.Keys) > j.cfg.Limits.KeysMax,
		j.peerKeys(peer)+len(d.Keys) > j.cfg.Limits.PeerKeysMax,
		t == nil && len(j.transfers) >= j.cfg.Limits.TransfersMax:
		j.refuseAll(peer, &d, sessionpb.Reason_REASON_BUSY)
		return
	case t == nil:
		t = j.open(d.TransferID)
	}
	n := len(d.Keys)
	x := &job{jobName: name, t: t, leg: d.Leg, entries: make([]*entry, n), word: make([]keyWord, n), open: n, pending: n,
		deadline: d.Deadline, at: -1}
	j.jobs[name] = x
	t.jobs = append(t.jobs, x)
	b := batch{}
	for i := range d.Keys {
		before := j.keys
		e := j.entryOf(t, &d.Keys[i])
		if j.keys > before {
			e.by = peer
			j.charge(peer, 0, 1)
		}
		e.demanded = true
		x.entries[i] = e
		w := waiter{x, i}
		switch {
		case e.phase == here:
			j.bind(b, w, e)
		case e.phase == refused || e.phase == gone:
			j.refuse(b, w, e.reason, e.text)
		case !j.foretell(b, w):
		case t.last:
			j.refuse(b, w, sessionpb.Reason_REASON_NOT_SUPPLIED, "")
		default:
			e.wait = append(e.wait, w)
		}
	}
	if x.pending > 0 {
		heap.Push(&j.deadlines, x)
	}
	j.flush(b, t.last)
	j.Tick(now) // its deadline may be over
}

func (j *Join) peerKeys(peer string) int {
	if s := j.peers[peer]; s != nil {
		return s.keys
	}
	return 0
}

// refuseAll answers a demand that is not taken.
func (j *Join) refuseAll(peer string, d *session.Job, r sessionpb.Reason) {
	a := session.Answer{Last: true}
	var refused []uint32
	for i := range d.Keys {
		if j.elsewhere(peer, d.ID, d.Leg, i, &d.Keys[i], r) {
			a.Available = append(a.Available, uint32(i))
		} else {
			refused = append(refused, uint32(i))
		}
	}
	if len(refused) > 0 {
		a.Refused = []session.Refusal{{Indices: refused, Reason: r}}
	}
	j.emit(Answer{peer, d.ID, a})
}

// JobEnded tells how the keys of a peer's job ended at the session, one result a key
// in the order of the demand. Keys that it had bound are let go when they were sent,
// else parked again.
func (j *Join) JobEnded(now time.Duration, peer string, id session.JobID, results []session.Result) {
	j.Tick(now)
	x := j.jobs[jobName{peer, id}]
	if x == nil || len(results) != len(x.word) {
		return
	}
	for i, r := range results {
		e, word := x.entries[i], x.word[i]
		if word == wordEnded {
			continue
		}
		x.word[i] = wordEnded
		x.open--
		e.unmatched = e.unmatched || r.Cause == session.Unmatched
		if word == wordElsewhere {
			continue
		}
		if word == wordNone {
			j.decide(x)
			e.wait = dropWaiter(e.wait, x)
			continue
		}
		e.bound--
		j.Return(peer, &e.key)
		e.transferred = e.transferred || r.Cause == session.Transferred
		if e.bound > 0 {
			continue
		}
		switch {
		case e.transferred:
			j.letGo(e, Sent)
		case r.Cause == session.Lapsed:
			j.letGo(e, Lapsed)
		default:
			j.park(e)
		}
	}
	j.closeJob(x)
	j.shed()
}

// closeJob forgets a job of which every key has ended.
func (j *Join) closeJob(x *job) {
	if x.open > 0 || j.jobs[x.jobName] != x {
		return
	}
	delete(j.jobs, x.jobName)
	x.t.jobs = slices.DeleteFunc(slices.Clone(x.t.jobs), func(o *job) bool { return o == x })
	j.settle(x.t)
}

// settle ends a transfer of which nothing is left.
func (j *Join) settle(t *transfer) {
	if len(t.jobs) > 0 || t.held > 0 || j.transfers[t.id] != t || t.begun && !t.last {
		return
	}
	delete(j.transfers, t.id)
	j.keys -= len(t.keys)
	for _, e := range t.keys {
		if e.by != "" {
			j.discharge(e.by, 0, 1)
		}
	}
	if !t.begun {
		return
	}
	j.emit(Finished{Transfer: t.id, Leg: t.leg, Groups: t.report()})
	j.done[t.id] = struct{}{}
	j.doneOrder.PushBack(finished{t.id, j.now + j.cfg.Limits.FinishedAge})
	if len(j.done) > j.cfg.Limits.FinishedMax {
		j.forget(j.doneOrder.Front())
	}
}

// batch gathers the words of one command, one Answer a job.
type batch map[*job]*session.Answer

func (b batch) of(x *job) *session.Answer {
	if b[x] == nil {
		b[x] = &session.Answer{}
	}
	return b[x]
}

func (b batch) available(w waiter) {
	a := b.of(w.j)
	a.Available = append(a.Available, uint32(w.i))
}

func (b batch) willCome(w waiter) {
	a := b.of(w.j)
	a.WillCome = append(a.WillCome, uint32(w.i))
}

func (b batch) refused(w waiter, r sessionpb.Reason, text string) {
	a := b.of(w.j)
	for i := range a.Refused {
		if m := &a.Refused[i]; m.Reason == r && m.Text == text {
			m.Indices = append(m.Indices, uint32(w.i))
			return
		}
	}
	a.Refused = append(a.Refused, session.Refusal{Indices: []uint32{uint32(w.i)}, Reason: r, Text: text})
}

// flush emits the answers in the order of peers and jobs, and forgets jobs that have
// nothing left.
func (j *Join) flush(b batch, last bool) {
	jobs := make([]*job, 0, len(b))
	for x := range b {
		jobs = append(jobs, x)
	}
	slices.SortFunc(jobs, func(a, c *job) int {
		if a.peer != c.peer {
			if a.peer < c.peer {
				return -1
			}
			return 1
		}
		return int(int64(a.id) - int64(c.id))
	})
	for _, x := range jobs {
		a := b[x]
		slices.Sort(a.Available)
		a.Last = last || x.pending == 0
		j.emit(Answer{x.peer, x.id, *a})
	}
	for _, x := range jobs {
		j.closeJob(x)
	}
}

// deadlines is a heap of jobs by deadline.
type deadlines []*job

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, k int) bool { return d[i].deadline < d[k].deadline }
func (d deadlines) Swap(i, k int) {
	d[i], d[k] = d[k], d[i]
	d[i].at, d[k].at = i, k
}

// Push is for package heap.
func (d *deadlines) Push(x any) {
	j := x.(*job)
	j.at = len(*d)
	*d = append(*d, j)
}

// Pop is for package heap.
func (d *deadlines) Pop() any {
	old := *d
	j := old[len(old)-1]
	j.at = -1
	*d = old[:len(old)-1]
	return j
}
