package join

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

func newJoin() *Join {
	l := DefaultLimits()
	l.ParkedBytesMax = 100
	return New(Config{Limits: l, ChunkBytes: []uint64{10, 10}})
}

func take[E Effect](j *Join) (out []E) {
	for _, e := range j.Take() {
		if x, ok := e.(E); ok {
			out = append(out, x)
		}
	}
	return out
}

func jobOf(id session.JobID, transfer string, deadline time.Duration, keys ...int) session.Job {
	return session.Job{ID: id, TransferID: transfer, Leg: session.LegPD, Keys: toKeys(keys), Deadline: deadline}
}

// TestLateDemand: after the last word a demand is answered at once, for as long as the
// id is remembered, and exactly so long.
func TestLateDemand(t *testing.T) {
	j := newJoin()
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	require.NoError(t, j.LastWord(0, "t"))
	require.Len(t, take[Finished](j), 1)
	last := DefaultLimits().FinishedAge - 1
	j.Demand(last, "b", jobOf(1, "t", last+time.Hour, 0, 1))
	a := take[Answer](j)
	require.Len(t, a, 1)
	require.True(t, a[0].Answer.Last)
	require.Equal(t, []session.Refusal{{Indices: []uint32{0, 1}, Reason: sessionpb.Reason_REASON_FINISHED}}, a[0].Answer.Refused)
	require.ErrorIs(t, j.Begin(last, "t", session.LegPD), ErrEnded)

	j.Demand(last+1, "b", jobOf(2, "t", last+time.Second, 0))
	require.Empty(t, take[Answer](j), "forgotten: it may be begun yet")
	j.Tick(last + time.Second)
	require.Equal(t, sessionpb.Reason_REASON_NOT_BEGUN, take[Answer](j)[0].Answer.Refused[0].Reason)
	require.Zero(t, j.Status().Transfers)
}

// TestPromise: what the plan leaves out is refused when the promise comes, or with the
// demand when that comes later; what is in it is foretold and still gets its word; what is
// supplied beyond it is available.
func TestPromise(t *testing.T) {
	j := newJoin()
	planned := func(k *Key) (Fate, string) {
		switch i := int(k[16]); {
		case i >= 4:
			return Never, fmt.Sprintf("key %d is not planned", i)
		case i == 3:
			return Open, ""
		}
		return WillCome, ""
	}
	require.ErrorIs(t, j.Promised(0, "t", planned), ErrNotBegun)
	j.Demand(0, "b", jobOf(1, "t", time.Hour, 0, 4, 3, 5))
	require.NoError(t, j.Begin(1, "t", session.LegDemand))
	require.Empty(t, j.Take())
	require.NoError(t, j.Promised(1, "t", planned))
	no := func(i uint32, key int) session.Refusal {
		return session.Refusal{Indices: []uint32{i}, Reason: sessionpb.Reason_REASON_NOT_PLANNED, Text: fmt.Sprintf("key %d is not planned", key)}
	}
	require.Equal(t, []Answer{{"b", 1, session.Answer{WillCome: []uint32{0}, Refused: []session.Refusal{no(1, 4), no(3, 5)}}}}, take[Answer](j))
	j.Demand(2, "b", jobOf(2, "t", time.Hour, 7, 1))
	require.Equal(t, []Answer{{"b", 2, session.Answer{WillCome: []uint32{1}, Refused: []session.Refusal{no(0, 7)}}}}, take[Answer](j))
	j.Demand(3, "b", jobOf(3, "t", time.Hour, 7))
	require.Equal(t, []Answer{{"b", 3, session.Answer{Refused: []session.Refusal{no(0, 7)}, Last: true}}}, take[Answer](j), "nothing is left to wait for")
	require.NoError(t, j.Supply(4, "t", toKeys([]int{0, 7})))
	require.Equal(t, []Answer{{"b", 1, session.Answer{Available: []uint32{0}}}}, take[Answer](j))
	j.Demand(5, "b", jobOf(4, "t", time.Hour, 7))
	require.Equal(t, []uint32{0}, take[Answer](j)[0].Answer.Available, "more than was promised")
	require.NoError(t, j.LastWord(6, "t"))
	for _, a := range take[Answer](j) {
		require.True(t, a.Answer.Last)
		require.Equal(t, sessionpb.Reason_REASON_NOT_SUPPLIED, a.Answer.Refused[0].Reason)
	}
	j.Demand(7, "b", jobOf(5, "t", time.Hour, 1, 6))
	a := take[Answer](j)[0].Answer
	require.Empty(t, a.WillCome, "the last word is said")
	require.Equal(t, []session.Refusal{{Indices: []uint32{0}, Reason: sessionpb.Reason_REASON_NOT_SUPPLIED}, no(1, 6)}, a.Refused)
}

// TestLapsed: what a job had bound goes when its consumer did not renew its lease, unless
// another job has it bound.
func TestLapsed(t *testing.T) {
	j := newJoin()
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	require.NoError(t, j.Supply(0, "t", toKeys([]int{0, 1})))
	j.Demand(0, "b", jobOf(1, "t", time.Hour, 0, 1))
	j.Demand(0, "c", jobOf(1, "t", time.Hour, 1))
	lapsed := session.Result{Cause: session.Lapsed}
	j.JobEnded(1, "b", 1, []session.Result{lapsed, lapsed})
	require.Equal(t, []Free{{"t", testKey(0), Lapsed}}, take[Free](j))
	j.JobEnded(1, "c", 1, []session.Result{{Cause: session.PushFailed}})
	require.Empty(t, take[Free](j), "parked again")
	j.Demand(2, "b", jobOf(2, "t", time.Hour, 0))
	require.Equal(t, sessionpb.Reason_REASON_EVICTED, take[Answer](j)[0].Answer.Refused[0].Reason)
}

// TestDrain: what jobs wait for is refused at once, later demands too, and what is bound
// stays bound.
func TestDrain(t *testing.T) {
	j := newJoin()
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	require.NoError(t, j.Supply(0, "t", toKeys([]int{0})))
	j.Demand(1, "b", jobOf(1, "t", time.Hour, 0, 1))
	j.Demand(1, "b", jobOf(2, "never begun", time.Hour, 2, 3))
	require.Len(t, take[Answer](j), 1, "one key is available, the others wait")
	j.Drain(2)
	refused := map[session.JobID][]uint32{}
	for _, a := range take[Answer](j) {
		require.True(t, a.Answer.Last)
		for _, r := range a.Answer.Refused {
			require.Equal(t, sessionpb.Reason_REASON_DRAINING, r.Reason)
			refused[a.Job] = append(refused[a.Job], r.Indices...)
		}
	}
	require.Equal(t, map[session.JobID][]uint32{1: {1}, 2: {0, 1}}, refused)
	j.Demand(3, "b", jobOf(3, "t", time.Hour, 0))
	a := take[Answer](j)
	require.Len(t, a, 1)
	require.Equal(t, sessionpb.Reason_REASON_DRAINING, a[0].Answer.Refused[0].Reason)
}

// TestShed: the oldest parked keys make room for another transfer, all that are asked for
// or none, and never what a job has bound.
func TestShed(t *testing.T) {
	j := newJoin()
	for at, id := range []string{"old", "own", "new"} {
		require.NoError(t, j.Begin(time.Duration(at), id, session.LegPD))
		require.NoError(t, j.Supply(time.Duration(at), id, toKeys([]int{2 * at, 2*at + 1})))
	}
	j.Demand(3, "b", jobOf(1, "old", time.Second, 0))
	j.Take()
	require.False(t, j.Shed(3, 4, "own"), "bound: 0, own: 2 and 3")
	require.Empty(t, j.Take())
	require.False(t, j.Shed(3, 0, "own"))
	require.True(t, j.Shed(3, 2, "own"))
	require.Equal(t, []Free{{"old", testKey(1), NoRoom}, {"new", testKey(4), NoRoom}}, take[Free](j))
	require.True(t, j.Shed(3, 3, ""))
	require.Equal(t, []Free{{"own", testKey(2), NoRoom}, {"own", testKey(3), NoRoom}, {"new", testKey(5), NoRoom}}, take[Free](j))
	require.Zero(t, j.Status().ParkedKeys)
	j.Demand(3, "b", jobOf(2, "own", time.Second, 2))
	require.Equal(t, sessionpb.Reason_REASON_EVICTED, take[Answer](j)[0].Answer.Refused[0].Reason)
}

// TestParked: supply that no job binds is let go after its age, exactly, and oldest
// first when the bytes are too many.
func TestParked(t *testing.T) {
	j := newJoin()
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	for i := range 10 {
		require.NoError(t, j.Supply(time.Duration(i), "t", toKeys([]int{i})))
	}
	require.Empty(t, take[Free](j), "100 bytes fit")
	require.NoError(t, j.Supply(10, "t", toKeys([]int{10})))
	require.Equal(t, []Free{{"t", testKey(0), NoRoom}}, take[Free](j))
	age := DefaultLimits().ParkedAge
	j.Tick(age)
	require.Empty(t, take[Free](j))
	j.Demand(age, "b", jobOf(1, "t", age+time.Second, 0, 1)) // 1 is bound in the last moment
	a := take[Answer](j)[0].Answer
	require.Equal(t, []uint32{1}, a.Available)
	require.Equal(t, sessionpb.Reason_REASON_EVICTED, a.Refused[0].Reason)
	j.Tick(age + 2)
	require.Equal(t, []Free{{"t", testKey(2), Aged}}, take[Free](j))
	// A failed push parks the key again, with a new age.
	j.JobEnded(age+2, "b", 1, make([]session.Result, 2))
	j.Tick(2*age + 1)
	frees := take[Free](j)
	require.NotContains(t, frees, Free{"t", testKey(1), Aged})
	j.Tick(2*age + 2)
	require.Equal(t, []Free{{"t", testKey(1), Aged}}, take[Free](j))
}

// TestTwoPeers: a key goes to every job that waits for it and is let go after the
// last of them.
func TestTwoPeers(t *testing.T) {
	j := newJoin()
	j.Demand(0, "c", jobOf(1, "t", time.Second, 3))
	j.Demand(0, "b", jobOf(1, "t", time.Second, 3, 4))
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	require.ErrorIs(t, j.Begin(0, "t", session.LegPD), ErrBegun)
	require.NoError(t, j.Supply(0, "t", toKeys([]int{3})))
	require.Equal(t, []Answer{
		{"b", 1, session.Answer{Available: []uint32{0}}},
		{"c", 1, session.Answer{Available: []uint32{0}, Last: true}},
	}, take[Answer](j))
	sent := []session.Result{{Cause: session.Transferred}}
	j.JobEnded(0, "c", 1, sent)
	require.Empty(t, take[Free](j))
	require.NoError(t, j.LastWord(0, "t"))
	require.True(t, take[Answer](j)[0].Answer.Last)
	require.NoError(t, j.LastWord(0, "t"), "twice is harmless")
	j.JobEnded(0, "b", 1, append(sent, session.Result{Cause: session.Unmatched}))
	effects := j.Take()
	require.Equal(t, Free{"t", testKey(3), Sent}, effects[0])
	f := effects[1].(Finished)
	require.Equal(t, []GroupReport{
		{Group: 0, Demanded: toKeys([]int{4}), Unmatched: toKeys([]int{4})},
		{Group: 1, Demanded: toKeys([]int{3}), Supplied: toKeys([]int{3}), Transferred: toKeys([]int{3})},
	}, f.Groups)
}

// TestWordsOutOfPlace: supply without begin or after the last word gives every pin
// back and says why.
func TestWordsOutOfPlace(t *testing.T) {
	j := newJoin()
	require.ErrorIs(t, j.Supply(0, "t", toKeys([]int{1, 2})), ErrNotBegun)
	require.Len(t, take[Free](j), 2)
	require.ErrorIs(t, j.Refuse(0, "t", nil), ErrNotBegun)
	require.ErrorIs(t, j.LastWord(0, "t"), ErrNotBegun)
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	require.NoError(t, j.Supply(0, "t", toKeys([]int{1})))
	require.NoError(t, j.LastWord(0, "t"))
	require.ErrorIs(t, j.Supply(0, "t", toKeys([]int{2})), ErrEnded)
	require.Equal(t, []Free{{"t", testKey(2), Late}}, take[Free](j))
	require.Len(t, j.Report("t"), 1)
}

// TestBounds: each bound answers; none grows.
func TestBounds(t *testing.T) {
	l := DefaultLimits()
	l.TransfersMax, l.JobsMax, l.KeysMax, l.FinishedMax = 2, 2, 5, 1
	j := New(Config{Limits: l, ChunkBytes: []uint64{10, 10}})
	busy := func() bool {
		a := take[Answer](j)
		return len(a) == 1 && a[0].Answer.Last && a[0].Answer.Refused[0].Reason == sessionpb.Reason_REASON_BUSY
	}
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	j.Demand(0, "b", jobOf(1, "u", time.Second, 0))
	require.False(t, busy())
	require.ErrorIs(t, j.Begin(0, "v", session.LegPD), ErrFull)
	j.Demand(0, "b", jobOf(2, "v", time.Second, 0))
	require.True(t, busy(), "transfers")
	j.Demand(0, "b", jobOf(3, "t", time.Second, 0, 1, 2, 3, 4))
	require.True(t, busy(), "keys")
	require.NoError(t, j.Supply(0, "t", toKeys([]int{1, 2, 3, 4, 5})))
	require.Equal(t, []Free{{"t", testKey(5), NoRoom}}, take[Free](j))
	require.NoError(t, j.Refuse(0, "t", []Refusal{{Key: testKey(6)}}), "not remembered, refused at the last word")
	j.Demand(0, "b", jobOf(1, "u", time.Second, 0))
	require.True(t, busy(), "a job twice")
	k := New(Config{Limits: l})
	for _, id := range []string{"x", "y"} {
		require.NoError(t, k.Begin(0, id, "odd leg"))
		require.NoError(t, k.LastWord(0, id))
		require.Equal(t, 1, k.Status().Finished)
	}
	require.ErrorIs(t, k.Begin(0, "y", session.LegPD), ErrEnded)
	require.NoError(t, k.Begin(0, "x", session.LegPD), "the oldest is forgotten")
}

// A duo is two cores with a wire of 10 ms, a the consumer and b the producer, and b's join.
type duo struct {
	t       *testing.T
	now     time.Duration
	cores   map[string]*session.Core
	join    *Join
	wire    []post
	ends    map[session.JobID]time.Duration
	results map[session.JobID][]session.Result
	heard   map[session.JobID][]heard // what came before the end
}

type post struct {
	at time.Duration
	to string
	e  *sessionpb.Envelope
}

type heard struct {
	at               time.Duration
	refused, promise []uint32
}

const way = 10 * time.Millisecond

func newDuo(t *testing.T) *duo {
	d := &duo{t: t, cores: map[string]*session.Core{}, join: New(Config{Limits: DefaultLimits(), ChunkBytes: []uint64{10, 10}}),
		ends: map[session.JobID]time.Duration{}, results: map[session.JobID][]session.Result{}, heard: map[session.JobID][]heard{}}
	for id, peer := range map[string]string{"a": "b", "b": "a"} {
		c, err := session.New(0, session.Config{PeerID: peer, Limits: session.DefaultLimits(),
			Hello: &sessionpb.Hello{NodeId: id, BootId: 1}})
		require.NoError(t, err)
		c.Connected(0)
		d.cores[id] = c
	}
	return d
}

// carry carries out effects until there are none.
func (d *duo) carry() {
	for busy := true; busy; {
		busy = false
		for id, c := range d.cores {
			for _, e := range c.Take() {
				busy = true
				d.effect(id, c, e)
			}
		}
		for _, e := range d.join.Take() {
			busy = true
			if a, ok := e.(Answer); ok {
				d.cores["b"].Answer(d.now, a.Job, a.Answer)
			}
		}
	}
}

func (d *duo) effect(id string, c *session.Core, e session.Effect) {
	switch e := e.(type) {
	case session.Send:
		d.wire = append(d.wire, post{d.now + way, map[string]string{"a": "b", "b": "a"}[id], e.Envelope})
	case session.Demanded:
		d.join.Demand(d.now, "a", e.Job)
	case session.Push:
		for _, i := range e.Indices {
			d.cores["a"].Arrived(d.now, e.Job, int(i), session.Transferred, "")
			c.Pushed(d.now, e.Job, int(i), session.Transferred, "")
		}
	case session.JobEnded:
		d.join.JobEnded(d.now, "a", e.Job, e.Results)
	case session.Word:
		d.heard[e.Job] = append(d.heard[e.Job], heard{d.now, e.Refused, e.WillCome})
	case session.DemandDone:
		d.ends[e.Job], d.results[e.Job] = d.now, e.Results
	}
}

// run moves the time, waking each part when it asks for it.
func (d *duo) run(until time.Duration) {
	for d.carry(); d.now < until; d.carry() {
		next := until
		if len(d.wire) > 0 {
			next = min(next, d.wire[0].at)
		}
		for _, c := range d.cores {
			if at, ok := c.Wake(); ok {
				next = min(next, max(at, d.now))
			}
		}
		if at, ok := d.join.Wake(); ok {
			next = min(next, max(at, d.now))
		}
		d.now = next
		for len(d.wire) > 0 && d.wire[0].at <= d.now {
			p := d.wire[0]
			d.wire = d.wire[1:]
			d.cores[p.to].Receive(d.now, p.e)
		}
		for _, c := range d.cores {
			c.Tick(d.now)
		}
		d.join.Tick(d.now)
	}
}

func (d *duo) demand(leg string, timeout time.Duration, keys ...int) session.JobID {
	n := len(keys)
	id := d.cores["a"].Demand(d.now, session.DemandRequest{TransferID: "t", Leg: leg, Keys: toKeys(keys), Timeout: timeout,
		Slots: make([]uint32, n), Epochs: make([]uint64, n)})
	d.carry()
	return id
}

// TestOneRoundTrip: what the last word leaves out is unmatched one way later; a late demand
// is answered in one round trip; what was supplied arrives.
func TestOneRoundTrip(t *testing.T) {
	for _, leg := range []string{session.LegPD, session.LegDemand} {
		d := newDuo(t)
		d.run(50 * time.Millisecond)
		first := d.demand(leg, 0, 0, 1, 2)
		d.run(200 * time.Millisecond)
		require.NoError(t, d.join.Begin(d.now, "t", leg))
		require.NoError(t, d.join.Supply(d.now, "t", toKeys([]int{0, 2})))
		d.run(300 * time.Millisecond)
		require.NotContains(t, d.ends, first)
		require.NoError(t, d.join.LastWord(d.now, "t"))
		d.run(400 * time.Millisecond)
		require.Equal(t, 300*time.Millisecond+way, d.ends[first])
		require.Equal(t, session.Unmatched, d.results[first][1].Cause)
		require.Equal(t, session.Transferred, d.results[first][2].Cause)
		late := d.demand(leg, 0, 7)
		d.run(500 * time.Millisecond)
		require.Equal(t, 400*time.Millisecond+2*way, d.ends[late])
		require.Equal(t, sessionpb.Reason_REASON_FINISHED, d.results[late][0].Reason)
	}
}

// TestLegDemandHearsAtOnce: what the producer's plan leaves out is known to the consumer one
// way after it begins, or one round trip after the demand when that comes later, by key and
// reason, while the producer computes; so is a key for which it finds no room.
func TestLegDemandHearsAtOnce(t *testing.T) {
	d := newDuo(t)
	d.run(50 * time.Millisecond)
	early := d.demand(session.LegDemand, 0, 0, 1, 5)
	d.run(200 * time.Millisecond)
	require.Empty(t, d.heard, "not begun: nothing is known")
	require.NoError(t, d.join.Begin(d.now, "t", session.LegDemand))
	require.NoError(t, d.join.Promised(d.now, "t", func(k *Key) (Fate, string) {
		if k[16] >= 4 {
			return Never, "beyond the cap"
		}
		return WillCome, ""
	}))
	d.run(300 * time.Millisecond)
	require.Equal(t, []heard{{200*time.Millisecond + way, []uint32{2}, []uint32{0, 1}}}, d.heard[early])
	late := d.demand(session.LegDemand, 0, 6, 1)
	none := d.demand(session.LegDemand, 0, 6, 7)
	d.run(400 * time.Millisecond)
	require.Equal(t, []heard{{300*time.Millisecond + 2*way, []uint32{0}, []uint32{1}}}, d.heard[late])
	require.Equal(t, 300*time.Millisecond+2*way, d.ends[none], "it ends: nothing of it will come")
	require.Equal(t, session.Result{Cause: session.Unmatched, Reason: sessionpb.Reason_REASON_NOT_PLANNED, Text: "beyond the cap"}, d.results[none][1])
	require.NoError(t, d.join.Refuse(d.now, "t", []Refusal{{Key: testKey(1), Reason: sessionpb.Reason_REASON_NO_ROOM}}))
	d.run(500 * time.Millisecond)
	require.Equal(t, heard{400*time.Millisecond + way, []uint32{1}, nil}, d.heard[early][1])
	require.Equal(t, 400*time.Millisecond+way, d.ends[late], "its last key")
	require.NotContains(t, d.ends, early)
	require.NoError(t, d.join.Supply(d.now, "t", toKeys([]int{0})))
	d.run(600 * time.Millisecond)
	require.Equal(t, session.Transferred, d.results[early][0].Cause)
}

// TestNotBegunExactly: a demand for a request that nobody begins ends at its own deadline on
// both sides, no earlier and no later, and the producer's word comes too late to matter.
func TestNotBegunExactly(t *testing.T) {
	for _, leg := range []string{session.LegPD, session.LegDemand} {
		d := newDuo(t)
		d.run(50 * time.Millisecond)
		id := d.demand(leg, 700*time.Millisecond, 0, 1)
		d.run(750*time.Millisecond - 1)
		require.NotContains(t, d.ends, id)
		require.Equal(t, 1, d.join.Status().Jobs)
		d.run(2 * time.Second)
		require.Equal(t, 750*time.Millisecond, d.ends[id])
		require.Equal(t, session.Deadline, d.results[id][0].Cause)
		want := sessionpb.Reason_REASON_NO_LAST_WORD
		if leg == session.LegDemand {
			want = sessionpb.Reason_REASON_NOT_BEGUN
		}
		require.Equal(t, want, d.results[id][0].Reason)
		require.Zero(t, d.join.Status().Jobs)
		require.Zero(t, d.join.Status().Transfers)
	}
}

// TestPeerBudget: what is kept for one peer is bounded in bytes and in keys; over a bound the
// keys are refused at once, with the bound in the text, and other peers do not notice.
func TestPeerBudget(t *testing.T) {
	l := DefaultLimits()
	l.PeerBytesMax, l.PeerKeysMax = 20, 6
	j := New(Config{Limits: l, ChunkBytes: []uint64{10, 10}})
	require.NoError(t, j.Begin(0, "t", session.LegPD))
	j.Demand(0, "b", jobOf(1, "t", time.Second, 1, 2, 3))
	require.True(t, j.Reserve("b", &Key{}))
	require.NoError(t, j.Supply(0, "t", toKeys([]int{1, 2, 3})))
	a := take[Answer](j)
	require.Len(t, a, 1)
	require.Equal(t, []uint32{0}, a[0].Answer.Available)
	require.Equal(t, []session.Refusal{{Indices: []uint32{1, 2}, Reason: sessionpb.Reason_REASON_BUSY,
		Text: "the producer keeps at most 20 bytes at a time for the demands of one peer, its bounds.peer_pinned_bytes"}}, a[0].Answer.Refused)
	require.False(t, j.Reserve("b", &Key{}))
	require.Equal(t, 2, j.Status().ParkedKeys, "what is refused stays for others")
	j.Demand(0, "c", jobOf(1, "t", time.Second, 2, 3))
	require.Equal(t, []uint32{0, 1}, take[Answer](j)[0].Answer.Available, "another peer has its own budget")

	j.JobEnded(0, "b", 1, []session.Result{{Cause: session.Transferred}, {}, {}})
	j.Return("b", &Key{})
	require.Zero(t, j.PeerBytes("b"))
	require.EqualValues(t, 20, j.PeerBytes("c"))
	require.NoError(t, j.Supply(0, "t", toKeys([]int{4, 5})))
	j.Demand(0, "b", jobOf(2, "t", time.Second, 4, 5))
	j.Take()
	require.EqualValues(t, 20, j.PeerBytes("b"), "the budget is whole again")

	// Keys: three were named by b first, the others by the producer.
	j.Demand(0, "b", jobOf(3, "t", time.Second, 10, 11, 12, 13))
	busy := take[Answer](j)[0].Answer
	require.True(t, busy.Last)
	require.Equal(t, sessionpb.Reason_REASON_BUSY, busy.Refused[0].Reason)
	j.Demand(0, "b", jobOf(4, "t", time.Second, 10, 11, 12))
	require.Empty(t, take[Answer](j), "they wait")
	j.Demand(0, "c", jobOf(2, "t", time.Second, 20, 21, 22, 23))
	require.Empty(t, take[Answer](j), "and so do those of another peer")
}

// TestElsewhere: in leg demand a key that is refused is available when the host has it; in
// leg pd, and over a bound, it is not asked.
func TestElsewhere(t *testing.T) {
	var asked []int
	j := New(Config{Limits: DefaultLimits(), ChunkBytes: []uint64{10, 10}, Elsewhere: func(peer string, job session.JobID, i int, k *Key) bool {
		require.Equal(t, "b", peer)
		asked = append(asked, int(k[16]))
		return int(k[16])%2 == 0
	}})
	require.NoError(t, j.Begin(0, "t", session.LegDemand))
	d := jobOf(1, "t", time.Second, 2, 3, 4)
	d.Leg = session.LegDemand
	j.Demand(0, "b", d)
	require.NoError(t, j.Promised(0, "t", func(k *Key) (Fate, string) {
		if k[16] == 4 {
			return WillCome, ""
		}
		return Never, "not in the plan"
	}))
	a := take[Answer](j)[0].Answer
	require.Equal(t, []uint32{0}, a.Available)
	require.Equal(t, []uint32{2}, a.WillCome)
	require.Equal(t, []session.Refusal{{Indices: []uint32{1}, Reason: sessionpb.Reason_REASON_NOT_PLANNED, Text: "not in the plan"}}, a.Refused)
	require.Equal(t, []int{2, 3}, asked)
	require.NoError(t, j.LastWord(0, "t"))
	require.Equal(t, session.Answer{Available: []uint32{2}, Last: true}, take[Answer](j)[0].Answer)
	require.Equal(t, 1, j.Status().Jobs, "it is open until it has ended")
	j.JobEnded(0, "b", 1, make([]session.Result, 3))
	require.Zero(t, j.Status().Jobs)
	require.Zero(t, j.Status().Transfers)
	d.ID = 2
	j.Take()
	j.Demand(0, "b", d) // the transfer is finished
	require.Equal(t, session.Answer{Available: []uint32{0, 2}, Refused: []session.Refusal{{Indices: []uint32{1}, Reason: sessionpb.Reason_REASON_FINISHED}}, Last: true}, take[Answer](j)[0].Answer)

	asked = nil
	require.NoError(t, j.Begin(0, "u", session.LegPD))
	j.Demand(0, "b", jobOf(3, "u", time.Second, 2))
	require.NoError(t, j.LastWord(0, "u"))
	require.Equal(t, sessionpb.Reason_REASON_NOT_SUPPLIED, take[Answer](j)[0].Answer.Refused[0].Reason)
	d.ID, d.TransferID, d.Deadline = 4, "never begun", time.Second
	j.Demand(0, "b", d)
	j.Tick(time.Second)
	require.Equal(t, sessionpb.Reason_REASON_NOT_BEGUN, take[Answer](j)[0].Answer.Refused[0].Reason)
	require.Empty(t, asked)
}
