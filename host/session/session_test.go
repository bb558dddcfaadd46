package session

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session/sessionpb"
)

const ms = time.Millisecond

func testHello(id string, boot uint64) *sessionpb.Hello {
	return &sessionpb.Hello{
		NodeId: id, BootId: boot, SlotBytes: 1 << 20, DataAddress: id + ":9", DataToken: []byte(id),
		RulesDigest: []byte("rules"), DeploymentDigest: []byte("deployment"), Caps: &sessionpb.Caps{MaxTokens: 4096},
		Layout: &sessionpb.Layout{Model: "m", HashScheme: "sha256", HashVector: []byte{1, 2}, Groups: []*sessionpb.Group{
			{Name: "sliding", BlockTokens: 16, ChunkBlocks: 8, Layers: 18, KvHeads: 8, HeadDim: 64, Dtype: "bf16", ChunkBytes: 2e6},
			{Name: "full", BlockTokens: 16, ChunkBlocks: 8, Layers: 18, KvHeads: 8, HeadDim: 64, Dtype: "bf16", ChunkBytes: 4e6},
		}},
	}
}

func testConfig(id, peer string, boot uint64, dial bool) Config {
	return Config{Hello: testHello(id, boot), PeerID: peer, Limits: DefaultLimits(), Dial: dial}
}

func testKeys(n int) []Key {
	out := make([]Key, n)
	for i := range out {
		out[i][16], out[i][17] = byte(i), byte(i>>8)
		out[i][KeyBytes-1] = byte(i % 2)
	}
	return out
}

func testDemand(n int, timeout time.Duration) DemandRequest {
	d := DemandRequest{TransferID: "t", RequestID: "r", Leg: LegPD, Keys: testKeys(n), Timeout: timeout}
	for i := range n {
		d.Slots, d.Epochs = append(d.Slots, uint32(i)), append(d.Epochs, uint64(100+i))
	}
	return d
}

// solo is one core whose peer is the test.
type solo struct {
	*Core
	t    testing.TB
	at   time.Duration
	seen []Effect
	// rewind is where a wait of TestWaits began, plus 1, when not at the present time.
	rewind time.Duration
}

func newSolo(t testing.TB, change ...func(*Config)) *solo {
	cfg := testConfig("a", "b", 1, true)
	for _, f := range change {
		f(&cfg)
	}
	c, err := New(0, cfg)
	require.NoError(t, err)
	return &solo{Core: c, t: t}
}

// up makes the session come up at the present time and drops the effects.
func (s *solo) up() *solo {
	s.Connected(s.at)
	s.hello(testHello("b", 2))
	s.Take()
	require.Equal(s.t, Ready, s.State())
	return s
}

func (s *solo) hello(h *sessionpb.Hello) {
	h = fillHello(h, &s.cfg.Limits)
	s.Receive(s.at, envelope(h))
}

// to moves the time, bringing a tick at every wake.
func (s *solo) to(at time.Duration) {
	for {
		w, ok := s.Wake()
		if !ok || w > at {
			break
		}
		require.GreaterOrEqual(s.t, w, s.at, "a wake in the past")
		s.at = w
		s.Tick(w)
		next, ok := s.Wake()
		require.True(s.t, !ok || next > w, "a tick at its wake makes progress")
	}
	s.at = at
	s.Tick(at)
}

// talk moves the time while the peer pings.
func (s *solo) talk(at time.Duration) {
	for s.at < at {
		s.to(min(at, s.at+200*ms))
		s.Receive(s.at, envelope(&sessionpb.Ping{BootId: 2, Seq: 1}))
	}
}

// take returns the effects of one kind since the last take.
func take[E Effect](s *solo) []E {
	s.seen = append(s.seen, s.Take()...)
	var out []E
	kept := s.seen[:0]
	for _, e := range s.seen {
		if x, ok := e.(E); ok {
			out = append(out, x)
		} else {
			kept = append(kept, e)
		}
	}
	s.seen = kept
	return out
}

// sent returns the messages of one kind that were sent since the last look.
func sent[M proto.Message](s *solo) []M {
	s.seen = append(s.seen, s.Take()...)
	var out []M
	kept := s.seen[:0]
	for _, e := range s.seen {
		if x, ok := e.(Send); ok {
			if m, ok := message(x.Envelope).(M); ok {
				out = append(out, m)
				continue
			}
		}
		kept = append(kept, e)
	}
	s.seen = kept
	return out
}

func message(e *sessionpb.Envelope) proto.Message {
	r := e.ProtoReflect()
	f := r.WhichOneof(r.Descriptor().Oneofs().Get(0))
	if f == nil {
		return nil
	}
	return r.Get(f).Message().Interface()
}

func envelope(m proto.Message) *sessionpb.Envelope {
	e := &sessionpb.Envelope{}
	r := e.ProtoReflect()
	fields := r.Descriptor().Fields()
	for i := range fields.Len() {
		if fields.Get(i).Message().FullName() == m.ProtoReflect().Descriptor().FullName() {
			// A copy, as a wire would make.
			r.Set(fields.Get(i), protoreflectValue(proto.Clone(m)))
		}
	}
	return e
}

func causes1(results []Result) []Cause {
	out := make([]Cause, len(results))
	for i := range results {
		out[i] = results[i].Cause
	}
	return out
}

// TestWaits asserts the table of waits: nothing happens a nanosecond before, and the
// wait ends at the limit.
func TestWaits(t *testing.T) {
	l := DefaultLimits()
	state := func(want PeerState) func(*solo) bool { return func(s *solo) bool { return s.State() == want } }
	lookupEnds := func(want Cause) func(*solo) bool {
		return func(s *solo) bool {
			d := take[LookupDone](s)
			return len(d) == 1 && d[0].Cause == want && d[0].States.First(abi.Here, 0, d[0].Keys) == d[0].Keys
		}
	}
	demandEnds := func(want Cause) func(*solo) bool {
		return func(s *solo) bool {
			d := take[DemandDone](s)
			return len(d) == 1 && d[0].Results[0].Cause == want && d[0].Results[0].Text != ""
		}
	}
	lapsed := func(s *solo) bool {
		e, c, d := take[JobEnded](s), take[CancelPush](s), sent[*sessionpb.Done](s)
		return len(e) == 1 && len(c) == 1 && len(d) == 1 && slices.ContainsFunc(e[0].Results, func(r Result) bool { return r.Cause == Lapsed && strings.Contains(r.Text, "lease_ms") })
	}
	dialled := func(s *solo) bool { return len(take[Dial](s)) == 1 }
	var job JobID
	for _, w := range []struct {
		name  string
		limit time.Duration
		begin func(*solo)
		quiet bool // the peer says nothing
		ends  func(*solo) bool
	}{
		{"connect and hello, attempt", l.ConnectHello, func(s *solo) { take[Dial](s) }, true,
			func(s *solo) bool { return len(take[Close](s)) == 1 }},
		{"connect and hello, peer", l.ConnectHello, func(s *solo) {}, true, state(Suspect)},
		{"connect and hello, a job that waits", l.ConnectHello, func(s *solo) { s.Demand(s.at, testDemand(2, 0)) }, true, demandEnds(PeerSuspect)},
		{"hello missing", l.ConnectHello, func(s *solo) { s.Connected(s.at) }, true,
			func(s *solo) bool {
				c := take[Close](s)
				return len(c) == 1 && strings.Contains(c[0].Reason, "deadlines.connect_ms")
			}},
		{"first retry", l.RetryMin, func(s *solo) { s.Disconnected(s.at, "refused"); take[Dial](s) }, true, dialled},
		{"retry after a lost session", l.RetryMin, func(s *solo) { s.up(); s.Disconnected(s.at, "reset"); take[Dial](s) }, true, dialled},
		{"ping", l.Ping, func(s *solo) { s.up(); s.to(s.at); sent[*sessionpb.Ping](s) }, true,
			func(s *solo) bool { return len(sent[*sessionpb.Ping](s)) == 1 }},
		{"suspect", l.Suspect, func(s *solo) { s.up() }, true, state(Suspect)},
		{"suspect ends a lookup", l.Suspect - 300*ms, func(s *solo) { s.up(); s.to(s.at + 300*ms); s.Lookup(s.at, "r", testKeys(3), 0) }, true, lookupEnds(PeerSuspect)},
		{"suspect ends a demand", l.Suspect, func(s *solo) { s.up(); s.Demand(s.at, testDemand(2, 0)) }, true, demandEnds(PeerSuspect)},
		{"suspect ends a job of the peer", l.Suspect, func(s *solo) { s.up(); s.incoming(1, 2) }, true,
			func(s *solo) bool { return len(take[JobEnded](s)) == 1 }},
		{"dead", l.Dead, func(s *solo) { s.up() }, true, func(s *solo) bool { return s.State() == Dead && len(take[Close](s)) == 1 }},
		{"a lost session makes suspect", l.ConnectHello, func(s *solo) { s.up(); s.to(s.at + 500*ms); s.Disconnected(s.at, "reset") }, true, state(Suspect)},
		{"lookup", l.Lookup, func(s *solo) { s.up(); s.Lookup(s.at, "r", testKeys(3), 0) }, false, lookupEnds(Deadline)},
		{"lookup, the caller's own", 20 * ms, func(s *solo) { s.up(); s.Lookup(s.at, "r", testKeys(3), 20*ms) }, false, lookupEnds(Deadline)},
		{"demand not begun or without last word", l.RequestDeadline, func(s *solo) { s.up(); s.Demand(s.at, testDemand(2, 0)) }, false, demandEnds(Deadline)},
		{"demand, the request's own", 3 * time.Second, func(s *solo) { s.up(); s.Demand(s.at, testDemand(2, 3*time.Second)) }, false, demandEnds(Deadline)},
		{"demand, at most", l.RequestDeadlineMax, func(s *solo) { s.up(); s.Demand(s.at, testDemand(2, time.Hour)) }, false, demandEnds(Deadline)},
		{"transfer", l.TransferBase + 30*ms, func(s *solo) { // 2 MB and 4 MB at 200 MB/s
			s.up()
			job = s.Demand(s.at, testDemand(2, 0))
			s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(job), Available: []uint32{0, 1}, Last: true}))
		}, false, demandEnds(TransferLate)},
		{"transfer, behind another one", l.TransferBase + 60*ms, func(s *solo) {
			s.up()
			for range 2 {
				job = s.Demand(s.at, testDemand(2, 0))
				s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(job), Available: []uint32{0, 1, 1}}))
			}
			s.Abort(s.at, 1, "it does not matter any more")
			take[DemandDone](s)
		}, false, demandEnds(TransferLate)},
		{"transfer, the request's own deadline is earlier", 100 * ms, func(s *solo) {
			s.up()
			job = s.Demand(s.at, testDemand(2, 100*ms))
			s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(job), Available: []uint32{0, 1}, Last: true}))
		}, false, demandEnds(TransferLate)},
		{"producer, no last word", 2 * time.Second, func(s *solo) { s.up(); s.incoming(1, 2) }, false,
			func(s *solo) bool {
				e, m := take[JobEnded](s), sent[*sessionpb.Supply](s)
				return len(e) == 1 && len(m) == 1 && m[0].Last && m[0].Refused[0].Reason == sessionpb.Reason_REASON_NO_LAST_WORD
			}},
		{"producer, will come", 2 * time.Second, func(s *solo) {
			s.up()
			s.incoming(1, 2)
			s.Answer(s.at, 1, Answer{WillCome: []uint32{0, 1}})
			sent[*sessionpb.Supply](s)
		}, false,
			func(s *solo) bool {
				e, m := take[JobEnded](s), sent[*sessionpb.Supply](s)
				return len(e) == 1 && len(m) == 1 && m[0].Last && m[0].Refused[0].Reason == sessionpb.Reason_REASON_NO_LAST_WORD
			}},
		{"bound supply, never renewed", l.Lease, func(s *solo) { s.up(); s.bound(1, l.Lease) }, false, lapsed},
		{"bound supply, renewed once", l.Lease + 7*time.Second, func(s *solo) {
			s.up()
			s.bound(1, l.Lease)
			at := s.at
			s.talk(at + 7*time.Second)
			s.Receive(s.at, envelope(&sessionpb.Renew{Jobs: []uint64{1}}))
			s.rewind = at + 1
		}, false, lapsed},
		{"bound supply, the next bound after the first was sent", l.Lease + 7*time.Second, func(s *solo) {
			s.up()
			s.bound(1, l.Lease)
			at := s.at
			s.Pushed(s.at, 1, 0, Transferred, "")
			s.talk(at + 7*time.Second)
			s.Supply(s.at, 1, []uint32{1})
			s.rewind = at + 1
		}, false, lapsed},
		{"renewal", l.Lease / 3, func(s *solo) {
			s.up()
			job = s.Demand(s.at, testDemand(2, 0))
			s.cfg.Limits.TransferBase = time.Minute
			s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(job), Available: []uint32{0}}))
		}, false, func(s *solo) bool {
			m := sent[*sessionpb.Renew](s)
			return len(m) == 1 && len(m[0].Jobs) == 1 && m[0].Jobs[0] == uint64(job)
		}},
		{"producer, a push", 2 * time.Second, func(s *solo) { s.up(); s.incoming(1, 2); s.Supply(s.at, 1, []uint32{0, 1}) }, false,
			func(s *solo) bool { return len(take[JobEnded](s)) == 1 && len(take[CancelPush](s)) == 1 }},
	} {
		t.Run(w.name, func(t *testing.T) {
			s := newSolo(t)
			w.begin(s)
			start := s.at
			if s.rewind != 0 {
				start = s.rewind - 1
			}
			if w.quiet {
				s.to(start + w.limit - 1)
			} else {
				s.talk(start + w.limit - 1)
			}
			require.False(t, w.ends(s), "it ended before its limit")
			s.to(start + w.limit)
			require.True(t, w.ends(s), "it did not end at its limit")
		})
	}
}

// incoming brings a demand of the peer with a deadline of 2 s.
func (s *solo) incoming(job JobID, n int) {
	d := testDemand(n, 0)
	s.Receive(s.at, envelope(&sessionpb.Demand{Job: uint64(job), TransferId: "t", RequestId: "r", Leg: LegPD,
		Keys: packKeys(d.Keys), Slots: d.Slots, Epochs: d.Epochs, DeadlineMs: 2000}))
}

// bound brings a demand for two keys with a deadline long after the lease, and supplies
// the first.
func (s *solo) bound(job JobID, lease time.Duration) {
	d := testDemand(2, 0)
	s.Receive(s.at, envelope(&sessionpb.Demand{Job: uint64(job), TransferId: "t", RequestId: "r", Leg: LegPD,
		Keys: packKeys(d.Keys), Slots: d.Slots, Epochs: d.Epochs, DeadlineMs: milliseconds(10 * lease)}))
	require.True(s.t, s.Supply(s.at, job, []uint32{0}))
}

// TestLease: a consumer renews what waits for bytes and nothing else, three times a lease;
// who knows of no leases neither renews nor loses anything; a demand that still waits for
// its producer has no lease.
func TestLease(t *testing.T) {
	l := DefaultLimits()
	slow := func(c *Config) { c.Limits.TransferBase = time.Minute }
	s := newSolo(t, slow).up()
	waiting := s.Demand(s.at, testDemand(1, time.Minute))
	due := s.Demand(s.at, testDemand(2, time.Minute))
	s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(due), Available: []uint32{0, 1}}))
	s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(waiting), WillCome: []uint32{0}}))
	s.talk(s.at + l.Lease)
	renews := sent[*sessionpb.Renew](s)
	require.Len(t, renews, 3)
	for _, m := range renews {
		require.Equal(t, []uint64{uint64(due)}, m.Jobs)
	}
	s.Arrived(s.at, due, 0, Transferred, "")
	s.Arrived(s.at, due, 1, Transferred, "")
	s.talk(s.at + l.Lease)
	require.Empty(t, sent[*sessionpb.Renew](s), "nothing waits for bytes")

	old := newSolo(t, slow)
	old.Connected(0)
	h := fillHello(testHello("b", 2), &l)
	h.Caps.LeaseMs = 0
	old.Receive(0, envelope(h))
	due = old.Demand(0, testDemand(1, time.Minute))
	old.Receive(0, envelope(&sessionpb.Supply{Job: uint64(due), Available: []uint32{0}}))
	old.bound(1, l.Lease)
	old.talk(3 * l.Lease)
	require.Empty(t, sent[*sessionpb.Renew](old), "it does not know the message")
	require.Empty(t, take[JobEnded](old), "and sends none")

	p := newSolo(t).up()
	p.incoming(1, 1)
	require.EqualValues(t, 10_000, fillHello(testHello("b", 2), &l).Caps.LeaseMs)
	p.Receive(p.at, envelope(&sessionpb.Renew{Jobs: []uint64{1, 1}}))
	require.Empty(t, take[Close](p))
	p.Receive(p.at, envelope(&sessionpb.Renew{Jobs: []uint64{2}}))
	require.Contains(t, take[Close](p)[0].Reason, "Renew for job 2, but the last one that came is 1")
	p = newSolo(t, func(c *Config) { c.Limits.JobsMax = 1 }).up()
	p.incoming(1, 1)
	p.Receive(p.at, envelope(&sessionpb.Renew{Jobs: []uint64{1, 1}}))
	require.Contains(t, take[Close](p)[0].Reason, "Renew for 2 jobs; at most 1")

	// A peer that asks for haste is not served faster than it is pinged.
	require.Equal(t, l.Ping, l.renewal(1))
	require.Equal(t, 20*time.Second, l.renewal(60_000))
}

// TestWords: what a Supply refuses or promises is told before the demand ends, once; what
// it promises may still be supplied or refused, and the end says it all.
func TestWords(t *testing.T) {
	s := newSolo(t).up()
	d := testDemand(5, 0)
	d.Leg = LegDemand
	id := s.Demand(s.at, d)
	say := func(m *sessionpb.Supply) []Word {
		m.Job = uint64(id)
		s.Receive(s.at, envelope(m))
		return take[Word](s)
	}
	no := func(r sessionpb.Reason, i ...uint32) []*sessionpb.Refused {
		return []*sessionpb.Refused{{Indices: i, Reason: r, Text: "so it is"}}
	}
	w := say(&sessionpb.Supply{WillCome: []uint32{0, 1, 2, 2}, Refused: no(sessionpb.Reason_REASON_NOT_PLANNED, 4, 4)})
	require.Equal(t, []Word{{Job: id, Refused: []uint32{4}, Results: []Result{{Unmatched, sessionpb.Reason_REASON_NOT_PLANNED, "so it is"}}, WillCome: []uint32{0, 1, 2}}}, w)
	require.Empty(t, say(&sessionpb.Supply{WillCome: []uint32{0, 4}}), "no news")
	require.Empty(t, say(&sessionpb.Supply{Available: []uint32{0}}), "bytes speak for themselves")
	require.Empty(t, say(&sessionpb.Supply{WillCome: []uint32{0}}), "it is more than promised")
	w = say(&sessionpb.Supply{Refused: no(sessionpb.Reason_REASON_NO_ROOM, 1)})
	require.Equal(t, []uint32{1}, w[0].Refused)
	require.True(t, s.Arrived(s.at, id, 0, Transferred, ""))
	require.Empty(t, say(&sessionpb.Supply{Last: true}), "the end says it")
	end := take[DemandDone](s)[0].Results
	require.Equal(t, []Cause{Transferred, Unmatched, Unmatched, Unmatched, Unmatched}, causes1(end))
	require.Equal(t, sessionpb.Reason_REASON_NOT_SUPPLIED, end[2].Reason)
	s.Demand(s.at, d)
	id++
	say(&sessionpb.Supply{WillCome: []uint32{5}})
	require.Contains(t, take[Close](s)[0].Reason, "Supply for job 2: key 5 of 5 will come")
}

// TestWillCome: a producer says so once a key, and the key still gets its word.
func TestWillCome(t *testing.T) {
	s := newSolo(t).up()
	s.incoming(1, 4)
	words := func(a Answer) *sessionpb.Supply {
		require.True(t, s.Answer(s.at, 1, a))
		if m := sent[*sessionpb.Supply](s); len(m) > 0 {
			return m[0]
		}
		return nil
	}
	m := words(Answer{WillCome: []uint32{0, 1, 1, 77}, Refused: []Refusal{{Indices: []uint32{3}, Reason: sessionpb.Reason_REASON_NOT_PLANNED}}})
	require.Equal(t, []uint32{0, 1}, m.WillCome)
	require.Equal(t, "not in the plan of the producer's request", m.Refused[0].Text)
	require.False(t, m.Last)
	require.Nil(t, words(Answer{WillCome: []uint32{1, 3}}), "no news, no message")
	m = words(Answer{Available: []uint32{0}, WillCome: []uint32{0, 2}})
	require.Equal(t, []uint32{0}, m.Available)
	require.Equal(t, []uint32{2}, m.WillCome)
	m = words(Answer{WillCome: []uint32{1}, Last: true})
	require.True(t, m.Last)
	require.Equal(t, []uint32{1, 2}, m.Refused[0].Indices)
	require.Empty(t, m.WillCome)
}

// TestBackoff: the pause doubles from RetryMin to RetryMax, jitter takes up to half.
func TestBackoff(t *testing.T) {
	for jitter, factor := range map[float64]float64{0: 1, 0.5: 0.75, 1: 0.5} {
		s := newSolo(t, func(c *Config) { c.Jitter = func() float64 { return jitter } })
		want := []time.Duration{50 * ms, 100 * ms, 200 * ms, 400 * ms, 500 * ms, 500 * ms}
		for _, pause := range want {
			require.Len(t, take[Dial](s), 1)
			s.Disconnected(s.at, "refused")
			pause = time.Duration(float64(pause) * factor)
			s.to(s.at + pause - 1)
			require.Empty(t, take[Dial](s))
			s.to(s.at + 1)
		}
		require.Equal(t, Suspect, s.State(), "attempts do not hide that there is no session")
	}
}

// TestSilentAtTheDeadline: the producer owed a word in leg pd, and the reason says so. In
// leg probe, and without a session, there is none.
func TestSilentAtTheDeadline(t *testing.T) {
	for _, c := range []struct {
		leg  string
		up   bool
		want sessionpb.Reason
		text string
	}{
		{LegPD, true, sessionpb.Reason_REASON_NO_LAST_WORD, "had not begun or not finished"},
		{LegProbe, true, sessionpb.Reason_REASON_NONE, "no word of the producer"},
		{LegPD, false, sessionpb.Reason_REASON_NONE, "no session with the producer"},
		{LegDemand, true, sessionpb.Reason_REASON_NOT_BEGUN, "had not begun the request"},
		{LegDemand, false, sessionpb.Reason_REASON_NONE, "no session with the producer"},
		{"demand, begun", true, sessionpb.Reason_REASON_NO_LAST_WORD, "had not finished the request"},
	} {
		s := newSolo(t)
		if c.up {
			s.up()
		}
		d := testDemand(2, 100*ms)
		leg, begun := strings.CutSuffix(c.leg, ", begun")
		d.Leg = leg
		id := s.Demand(s.at, d)
		if begun {
			s.Receive(s.at, envelope(&sessionpb.Supply{Job: uint64(id), WillCome: []uint32{0}}))
		}
		s.to(s.at + 100*ms)
		for _, r := range take[DemandDone](s)[0].Results {
			require.Equal(t, Deadline, r.Cause)
			require.Equal(t, c.want, r.Reason)
			require.Contains(t, r.Text, c.text)
		}
	}
}

// TestSuspectAnswersAtOnce: requests that name a suspect or dead peer do not wait.
func TestSuspectAnswersAtOnce(t *testing.T) {
	s := newSolo(t).up()
	for _, at := range []time.Duration{800 * ms, 5 * time.Second} {
		s.to(at)
		s.Lookup(s.at, "r", testKeys(3), 0)
		s.Demand(s.at, testDemand(3, 0))
		require.Equal(t, PeerSuspect, take[LookupDone](s)[0].Cause)
		require.Equal(t, []Cause{PeerSuspect, PeerSuspect, PeerSuspect}, causes1(take[DemandDone](s)[0].Results))
		require.True(t, s.Idle())
	}
}

// TestThaw: a byte before Dead makes a suspect peer ready again on the same session.
func TestThaw(t *testing.T) {
	s := newSolo(t).up()
	s.Demand(s.at, testDemand(2, 0))
	s.to(1500 * ms)
	require.Equal(t, Suspect, s.State())
	require.Len(t, sent[*sessionpb.Abort](s), 1, "the producer is told for when it thaws")
	s.Receive(s.at, envelope(&sessionpb.Pong{Seq: 1}))
	require.Equal(t, Ready, s.State())
	require.Empty(t, take[Close](s))
	s.Receive(s.at, envelope(&sessionpb.Supply{Job: 1, Available: []uint32{0}, Last: true})) // late
	require.Len(t, take[DemandDone](s), 1, "the job ended once")
}

// TestDataIsLife: bytes on the data connections keep a peer ready.
func TestDataIsLife(t *testing.T) {
	s := newSolo(t).up()
	for s.at < 5*time.Second {
		s.to(s.at + 700*ms)
		s.DataActivity(s.at+40*ms, s.at+30*ms)
		s.at += 40 * ms
	}
	require.Equal(t, Ready, s.State())
	last := s.at - 10*ms
	s.to(last + DefaultLimits().Suspect)
	require.Equal(t, Suspect, s.State(), "and the silence is counted from the last of them")
}

// TestHelloRefused: the refusal names every field that differs and both values.
func TestHelloRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*sessionpb.Hello)
		want   []string
	}{
		"model":       {func(h *sessionpb.Hello) { h.Layout.Model = "other" }, []string{`model: here "m", there "other"`}},
		"hash scheme": {func(h *sessionpb.Hello) { h.Layout.HashScheme = "xx" }, []string{`hash_scheme: here "sha256", there "xx"`}},
		"hash vector": {func(h *sessionpb.Hello) { h.Layout.HashVector = []byte{9} }, []string{`hash_vector: here "0102", there "09"`}},
		"two fields of a group": {func(h *sessionpb.Hello) { h.Layout.Groups[1].KvHeads = 4; h.Layout.Groups[1].ChunkBytes = 2e6 },
			[]string{`groups[1].kv_heads: here "8", there "4"`, `groups[1].chunk_bytes: here "4000000", there "2000000"`}},
		"a group more": {func(h *sessionpb.Hello) { h.Layout.Groups = h.Layout.Groups[:1] }, []string{`groups: here "2", there "1"`}},
		"node":         {func(h *sessionpb.Hello) { h.NodeId = "c" }, []string{`node_id: here "b", there "c"`}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSolo(t)
			s.Demand(s.at, testDemand(1, 0))
			s.Connected(s.at)
			h := testHello("b", 2)
			c.change(h)
			s.hello(h)
			refused := sent[*sessionpb.HelloRefused](s)
			require.Len(t, refused, 1)
			require.Len(t, refused[0].Differences, len(c.want))
			closed := take[Close](s)
			require.Len(t, closed, 1)
			for _, w := range c.want {
				require.Contains(t, closed[0].Reason, w)
			}
			done := take[DemandDone](s)
			require.Equal(t, Refused, done[0].Results[0].Cause, "a job that waits ends at once")
			require.Equal(t, Suspect, s.State())

			// The side that is refused says the same, the other way round.
			o := newSolo(t)
			o.Connected(0)
			o.Receive(0, envelope(refused[0]))
			require.Equal(t, Suspect, o.State())
			for _, w := range c.want {
				w = strings.NewReplacer("here", "there", "there", "here").Replace(w)
				require.Contains(t, take[Close](o)[0].Reason, w[strings.Index(w, " "):][:6])
				break
			}
		})
	}
}

// TestRefusedAgainAndAgain: a peer whose hello is refused at every attempt is dead after its time,
// for that reason, and stays so: nothing changes until it is accepted, or refused for another.
func TestRefusedAgainAndAgain(t *testing.T) {
	s := newSolo(t)
	refused := func(model string) (changes []Changed) {
		s.Connected(s.at)
		h := testHello("b", 2)
		h.Layout.Model = model
		s.hello(h)
		s.to(s.at + 300*ms)
		return take[Changed](s)
	}
	c := refused("x")
	require.Equal(t, Suspect, c[0].To)
	for s.State() != Dead {
		c = append(c, refused("x")...)
	}
	require.Len(t, c, 2)
	require.Equal(t, c[0].Reason, c[1].Reason)
	require.Contains(t, c[1].Reason, `model: here "m", there "x"`)
	for range 5 {
		require.Empty(t, refused("x"))
	}
	c = refused("y")
	require.Len(t, c, 2, "%v", c)
	require.Contains(t, c[1].Reason, `there "y"`)
	require.Empty(t, refused("y"))
	s.Connected(s.at)
	s.hello(testHello("b", 2))
	require.Equal(t, Ready, take[Changed](s)[0].To)
	s.to(s.at + 3*time.Second)
	c = take[Changed](s)
	require.Contains(t, c[len(c)-1].Reason, "no byte from b", "that it is silent now")
}

// TestProtocolVersions: the highest common version wins; none is a refusal with both
// ranges.
// What the edge refuses ends like any refused hello: the peer hears why, and jobs that
// wait are answered; afterwards, or without a hello awaited, it is nothing.
func TestRefuseHello(t *testing.T) {
	s := newSolo(t)
	s.Connected(0)
	s.Demand(0, testDemand(2, time.Second))
	s.RefuseHello(0, "data_address x:1 is not its own")
	refused := sent[*sessionpb.HelloRefused](s)
	require.Len(t, refused, 1)
	require.Equal(t, "data_address x:1 is not its own", refused[0].Reason)
	require.Equal(t, Suspect, s.State())
	s.RefuseHello(0, "again")
	require.Empty(t, sent[*sessionpb.HelloRefused](s))
	up := newSolo(t).up()
	up.RefuseHello(0, "late")
	require.Equal(t, Ready, up.State())
}

func TestProtocolVersions(t *testing.T) {
	span := func(lo, hi uint32) *sessionpb.Hello { return &sessionpb.Hello{ProtocolMin: lo, ProtocolMax: hi} }
	v, d := negotiate(span(1, 3), span(2, 5))
	require.Nil(t, d)
	require.EqualValues(t, 3, v)
	v, d = negotiate(span(2, 5), span(1, 3))
	require.Nil(t, d)
	require.EqualValues(t, 3, v)
	_, d = negotiate(span(1, 1), span(2, 5))
	require.Equal(t, "1..1", d[0].Here)
	require.Equal(t, "2..5", d[0].There)

	s := newSolo(t)
	s.Connected(0)
	h := fillHello(testHello("b", 2), &s.cfg.Limits)
	h.ProtocolMin, h.ProtocolMax = 7, 9
	s.Receive(0, envelope(h))
	require.Contains(t, take[Close](s)[0].Reason, `protocol: here "1..1", there "7..9"`)
}

// TestLegs: with other rules only probe is allowed, on both sides, until the pair is
// accepted.
func TestLegs(t *testing.T) {
	s := newSolo(t)
	s.Connected(0)
	h := testHello("b", 2)
	h.RulesDigest = []byte("others")
	s.hello(h)
	require.False(t, take[Up](s)[0].SameRules)
	ask := func(leg string) Cause {
		d := testDemand(1, 0)
		d.Leg = leg
		s.Demand(0, d)
		if done := take[DemandDone](s); len(done) == 1 {
			return done[0].Results[0].Cause
		}
		return Open
	}
	require.Equal(t, Refused, ask(LegPD))
	require.Equal(t, Refused, ask(LegDemand))
	require.Equal(t, Open, ask(LegProbe))
	s.incoming(1, 1)
	m := sent[*sessionpb.Supply](s)
	require.True(t, m[0].Last)
	require.Equal(t, sessionpb.Reason_REASON_LEG, m[0].Refused[0].Reason)
	s.AllowLegs(0, true, true, "")
	require.Equal(t, Refused, ask(LegPD), "the peer has not accepted")
	s.Receive(0, envelope(&sessionpb.Legs{Reason: "it is being checked"}))
	s.Demand(0, testDemand(1, 0))
	require.Contains(t, take[DemandDone](s)[0].Results[0].Text, "does not accept the pair; only leg \"probe\" is allowed: it is being checked")
	s.Receive(0, envelope(&sessionpb.Legs{Supply: true}))
	require.Equal(t, Open, ask(LegPD))
	require.True(t, s.Status(0).AllLegs)
	s.incoming(2, 1)
	require.Len(t, take[Demanded](s), 1)
}

// TestKeyEnds: every way in which a key can end.
func TestKeyEnds(t *testing.T) {
	s := newSolo(t).up()
	id := s.Demand(0, testDemand(8, 0))
	require.EqualValues(t, 30_000, sent[*sessionpb.Demand](s)[0].DeadlineMs)
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Available: []uint32{0, 1, 2, 3, 4}, Refused: []*sessionpb.Refused{
		{Indices: []uint32{5}, Reason: sessionpb.Reason_REASON_EVICTED, Text: "gone"}, {Indices: []uint32{6}, Reason: sessionpb.Reason_REASON_BUSY}}}))
	require.True(t, s.Arrived(0, id, 0, Transferred, ""))
	require.False(t, s.Arrived(0, id, 0, Transferred, ""), "once")
	require.True(t, s.Arrived(0, id, 1, Checksum, "crc"))
	require.False(t, s.Arrived(0, id, 5, Transferred, ""), "refused")
	require.False(t, s.Arrived(0, id, 99, Transferred, ""))
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Last: true}))
	require.Empty(t, take[DemandDone](s))
	s.Receive(0, envelope(&sessionpb.Done{Job: 1, Codes: []sessionpb.Code{1, 1, 1, sessionpb.Code_CODE_NO_DATA, sessionpb.Code_CODE_PUSH_FAILED, 2, 2, 2}}))
	require.Empty(t, take[DemandDone](s), "key 2 was sent and may still be on its way")
	require.True(t, s.Arrived(0, id, 2, Transferred, ""))
	done := take[DemandDone](s)
	require.Len(t, done, 1)
	require.Equal(t, []Cause{Transferred, Checksum, Transferred, NoData, PushFailed, Unmatched, Busy, Unmatched}, causes1(done[0].Results))
	require.Equal(t, "gone", done[0].Results[5].Text)
	require.Equal(t, sessionpb.Reason_REASON_NOT_SUPPLIED, done[0].Results[7].Reason)
	require.Empty(t, sent[*sessionpb.Abort](s))
	require.False(t, s.Abort(0, id, "late"), "a job ends once")
}

// TestUnmatchedAfterLastWord: the last word ends the job in the step that brings it.
func TestUnmatchedAfterLastWord(t *testing.T) {
	s := newSolo(t).up()
	s.Demand(0, testDemand(3, 0))
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Last: true}))
	require.Equal(t, []Cause{Unmatched, Unmatched, Unmatched}, causes1(take[DemandDone](s)[0].Results))
}

// TestDataOvertakesControl: bytes may come before the Supply that names them.
func TestDataOvertakesControl(t *testing.T) {
	s := newSolo(t).up()
	id := s.Demand(0, testDemand(1, 0))
	require.True(t, s.Arrived(0, id, 0, Transferred, ""))
	require.Equal(t, []Cause{Transferred}, causes1(take[DemandDone](s)[0].Results))
	require.True(t, sent[*sessionpb.Done](s)[0].Release)
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Available: []uint32{0}, Last: true}))
	s.Receive(0, envelope(&sessionpb.Done{Job: 1, Codes: []sessionpb.Code{1}}))
	require.Empty(t, take[Close](s), "late messages are ignored")
}

// TestDataLost: supplied keys end, others go on waiting for their word.
func TestDataLost(t *testing.T) {
	s := newSolo(t).up()
	s.Demand(0, testDemand(2, 0))
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Available: []uint32{0}}))
	s.DataLost(0, "reset")
	require.Empty(t, take[DemandDone](s))
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Last: true}))
	require.Equal(t, []Cause{NoData, Unmatched}, causes1(take[DemandDone](s)[0].Results))
	require.Len(t, sent[*sessionpb.Abort](s), 1, "the producer may still hold key 0")
}

// TestProducer: a job from its demand to its Done, and the words that come too late.
func TestProducer(t *testing.T) {
	s := newSolo(t).up()
	s.incoming(1, 5)
	j := take[Demanded](s)[0].Job
	require.Equal(t, testKeys(5), j.Keys)
	require.Equal(t, 2*time.Second, j.Deadline)
	require.True(t, s.Supply(0, 1, []uint32{0, 1, 1, 77}))
	require.Equal(t, []uint32{0, 1}, take[Push](s)[0].Indices)
	require.Equal(t, []uint32{0, 1}, sent[*sessionpb.Supply](s)[0].Available)
	require.True(t, s.Refuse(0, 1, Refusal{Indices: []uint32{1, 2}, Reason: sessionpb.Reason_REASON_EVICTED}))
	require.Equal(t, []uint32{2}, sent[*sessionpb.Supply](s)[0].Refused[0].Indices, "key 1 has its word")
	require.True(t, s.Pushed(0, 1, 0, Transferred, ""))
	require.False(t, s.Pushed(0, 1, 0, Transferred, ""))
	require.False(t, s.Pushed(0, 1, 3, Transferred, ""), "never supplied")
	require.True(t, s.LastWord(0, 1))
	m := sent[*sessionpb.Supply](s)[0]
	require.True(t, m.Last)
	require.Equal(t, []uint32{3, 4}, m.Refused[0].Indices)
	require.Empty(t, take[JobEnded](s))
	require.True(t, s.Pushed(0, 1, 1, PushFailed, "reset"))
	require.Equal(t, []Cause{Transferred, PushFailed, Unmatched, Unmatched, Unmatched}, causes1(take[JobEnded](s)[0].Results))
	require.Equal(t, []sessionpb.Code{1, 3, 2, 2, 2}, sent[*sessionpb.Done](s)[0].Codes)
	require.False(t, s.LastWord(0, 1))
	require.True(t, s.Idle())
}

// TestAbortInEveryState: an Abort is always acknowledged, and what is being pushed is
// cancelled.
func TestAbortInEveryState(t *testing.T) {
	for name, c := range map[string]struct {
		words  func(*solo)
		cancel int
		ended  int
	}{
		"no word":     {func(s *solo) {}, 0, 1},
		"refused one": {func(s *solo) { s.Refuse(0, 1, Refusal{Indices: []uint32{0}}) }, 0, 1},
		"pushing":     {func(s *solo) { s.Supply(0, 1, []uint32{0}) }, 1, 1},
		"pushing, last word": {func(s *solo) {
			s.Answer(0, 1, Answer{Available: []uint32{0}, Last: true})
		}, 1, 1},
		"pushed": {func(s *solo) { s.Supply(0, 1, []uint32{0}); s.Pushed(0, 1, 0, Transferred, "") }, 0, 1},
		"done":   {func(s *solo) { s.LastWord(0, 1); take[JobEnded](s) }, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSolo(t).up()
			s.incoming(1, 2)
			c.words(s)
			s.Receive(0, envelope(&sessionpb.Abort{Job: 1, Reason: "gone"}))
			require.EqualValues(t, 1, sent[*sessionpb.AbortAck](s)[0].Job)
			require.Len(t, take[CancelPush](s), c.cancel)
			require.Len(t, take[JobEnded](s), c.ended)
			require.False(t, s.Pushed(0, 1, 0, Transferred, ""), "nobody owns a push after an abort")
			require.True(t, s.Idle())
			s.Receive(0, envelope(&sessionpb.Abort{Job: 1}))
			require.Len(t, sent[*sessionpb.AbortAck](s), 1, "twice is harmless")
		})
	}
}

// TestRestart: another boot id voids what was known; ids of the new process start
// anew.
func TestRestart(t *testing.T) {
	s := newSolo(t).up()
	s.incoming(9, 1)
	s.Demand(s.at, testDemand(1, 0))
	s.AllowLegs(0, true, true, "")
	s.Disconnected(0, "reset")
	require.Len(t, take[JobEnded](s), 1)
	require.Len(t, take[Demanded](s), 1)
	require.Equal(t, []Cause{Disconnected}, causes1(take[DemandDone](s)[0].Results))
	s.Connected(0)
	s.hello(testHello("b", 3))
	require.True(t, take[Up](s)[0].Restarted)
	s.incoming(1, 1)
	require.Len(t, take[Demanded](s), 1)
	require.Empty(t, take[Close](s))
	s.Receive(0, envelope(&sessionpb.Ping{BootId: 2}))
	require.True(t, take[Close](s)[0].Protocol, "a ping of the old process")
}

// TestNothingOfTheOldConnection: what is due when a new connection replaces the old one, and the
// timers have not come to yet, is not said on the new one, and does not close it: a peer that
// hears anything before the Hello ends the session.
func TestNothingOfTheOldConnection(t *testing.T) {
	for _, at := range []time.Duration{260 * ms, 800 * ms, 2100 * ms} { // a Ping; silence; death
		s := newSolo(t).up()
		s.Demand(0, testDemand(2, 200*ms))
		s.Lookup(0, "r", testKeys(1), 100*ms)
		s.incoming(1, 2)
		s.Supply(0, 1, []uint32{0})
		s.Take()
		s.seen = nil
		s.Connected(at)
		effects := s.Take()
		require.Empty(t, pick[Close](effects), "at %v", at)
		require.Empty(t, pick[Dial](effects), "at %v", at)
		sends := pick[Send](effects)
		require.Len(t, sends, 1, "at %v", at)
		require.NotNil(t, sends[0].Envelope.GetHello())
		require.Len(t, pick[DemandDone](effects), 1)
		require.Len(t, pick[LookupDone](effects), 1)
		require.Len(t, pick[JobEnded](effects), 1)
		s.at = at
		s.hello(testHello("b", 2))
		require.Equal(t, Ready, s.State(), "the session goes on")
		require.Empty(t, take[Close](s))
	}
	// An attempt that connects after its limit is over, as ever.
	s := newSolo(t)
	s.Take()
	s.Connected(DefaultLimits().ConnectHello)
	require.Len(t, pick[Close](s.Take()), 1)
}

func pick[E Effect](effects []Effect) (out []E) {
	for _, e := range effects {
		if x, ok := e.(E); ok {
			out = append(out, x)
		}
	}
	return out
}

// TestReconnectKeepsWaitingJobs: a job that comes while there is no session waits for
// it; after the same process reconnects, ids go on.
func TestReconnectKeepsWaitingJobs(t *testing.T) {
	s := newSolo(t).up()
	s.incoming(9, 1)
	s.Disconnected(0, "reset")
	s.Take()
	id := s.Demand(0, testDemand(1, time.Second))
	s.to(100 * ms)
	s.Connected(s.at)
	s.hello(testHello("b", 2))
	m := sent[*sessionpb.Demand](s)
	require.Len(t, m, 1)
	require.EqualValues(t, id, m[0].Job)
	require.EqualValues(t, 900, m[0].DeadlineMs, "the wait has used its share")
	s.incoming(9, 1)
	require.True(t, take[Close](s)[0].Protocol, "an id of the same process comes twice")
}

// TestLeft: a peer that said that it closes has left when its session ends, until it is back or
// there is something wrong with it; one that says nothing has not.
func TestLeft(t *testing.T) {
	gone := func(goodbye bool) *solo {
		s := newSolo(t).up()
		if goodbye {
			s.Receive(0, envelope(&sessionpb.Goaway{Reason: "rollout"}))
			require.True(t, s.Status(0).Draining)
			require.False(t, s.Left(), "it is still there")
		}
		s.Disconnected(0, "closed")
		return s
	}
	s := gone(true)
	s.to(50 * ms)
	s.Disconnected(51*ms, "connection refused")
	s.to(5 * time.Second)
	require.Equal(t, Dead, s.State())
	for _, c := range take[Changed](s)[1:] { // but the one to Ready
		require.True(t, c.Left, "%+v", c)
	}
	s.Connected(s.at)
	s.hello(testHello("b", 2))
	require.False(t, s.Left(), "it is back")
	s.Disconnected(s.at, "reset")
	require.False(t, s.Left(), "it said nothing this time")

	s = gone(true)
	require.True(t, s.Left())
	s.Connected(s.at)
	h := testHello("b", 2)
	h.Layout.Model = "x"
	s.hello(h)
	c := take[Changed](s)
	require.Equal(t, Suspect, c[len(c)-1].To)
	require.False(t, c[len(c)-1].Left, "it is back, and does not fit")

	s = gone(false)
	s.to(5 * time.Second)
	for _, c := range take[Changed](s) {
		require.False(t, c.Left, "%+v", c)
	}
}

// TestRefusedConnection: nothing waits for a peer whose address takes no connection; what
// waits for one that may still answer does so to its limit.
func TestRefusedConnection(t *testing.T) {
	s := newSolo(t).up()
	s.Disconnected(0, "reset")
	demand := s.Demand(0, testDemand(1, time.Second))
	s.to(50 * ms)
	require.Len(t, take[Dial](s), 1)
	require.Equal(t, Connecting, s.State(), "an attempt is in work")
	s.Disconnected(51*ms, "connection refused")
	require.Equal(t, Suspect, s.State())
	require.Equal(t, "no connection to b: connection refused", take[Changed](s)[1].Reason)
	done := take[DemandDone](s)
	require.Len(t, done, 1)
	require.Equal(t, demand, done[0].Job)
	require.Equal(t, []Cause{PeerSuspect}, causes1(done[0].Results))
	s.Demand(51*ms, testDemand(1, time.Second))
	require.Len(t, take[DemandDone](s), 1, "it is answered at once")
	s.to(2 * time.Second)
	require.Equal(t, Dead, s.State(), "no byte came")
	c := take[Changed](s)
	require.Equal(t, "no byte from b on control or data for deadlines.dead_ms, 2s; no connection: connection refused", c[len(c)-1].Reason, "and what to mend")
	s.Connected(s.at)
	s.hello(testHello("b", 2))
	require.Equal(t, Ready, s.State())
	s.to(s.at + 3*time.Second)
	c = take[Changed](s)
	require.Equal(t, Dead, c[len(c)-1].To)
	require.NotContains(t, c[len(c)-1].Reason, "no connection", "there was one")

	s = newSolo(t)
	require.Len(t, take[Dial](s), 1)
	s.Connected(0)
	s.Demand(0, testDemand(1, time.Second))
	s.Disconnected(1*ms, "reset before the hello")
	require.Equal(t, Connecting, s.State(), "the other side may have chosen another connection")
	require.Empty(t, take[DemandDone](s))
}

// TestBounds: over a bound is an answer, on both sides.
func TestBounds(t *testing.T) {
	small := func(c *Config) { c.Limits.JobsMax, c.Limits.KeysMax, c.Limits.JobKeysMax = 2, 4, 6 }
	s := newSolo(t, small).up()
	ends := func() Cause {
		if d := take[DemandDone](s); len(d) > 0 {
			return d[0].Results[0].Cause
		}
		return Open
	}
	s.Demand(0, testDemand(5, 0))
	require.Equal(t, Invalid, ends(), "keys of one message")
	s.Demand(0, testDemand(4, 0))
	require.Equal(t, Open, ends())
	s.Demand(0, testDemand(3, 0))
	require.Equal(t, Busy, ends(), "keys of all jobs")
	s.Lookup(0, "r", testKeys(1), 0)
	s.Demand(0, testDemand(1, 0))
	require.Equal(t, Busy, ends(), "jobs")
	bad := testDemand(1, 0)
	bad.Epochs = nil
	s.Demand(0, bad)
	require.Equal(t, Invalid, ends())
	bad = testDemand(1, 0)
	bad.RequestID = strings.Repeat("x", 257)
	s.Demand(0, bad)
	require.Equal(t, Invalid, ends())

	s.incoming(1, 4)
	require.Len(t, take[Demanded](s), 1)
	s.incoming(2, 3)
	require.Equal(t, sessionpb.Reason_REASON_BUSY, sent[*sessionpb.Supply](s)[0].Refused[0].Reason)
	s.Receive(0, envelope(&sessionpb.Lookup{Job: 3, Keys: packKeys(testKeys(1)), DeadlineMs: 500}))
	require.Len(t, take[LookedUp](s), 1)
	s.Receive(0, envelope(&sessionpb.Lookup{Job: 4, Keys: packKeys(testKeys(1)), DeadlineMs: 500}))
	require.Equal(t, sessionpb.Reason_REASON_BUSY, sent[*sessionpb.States](s)[0].Reason)
	s.AllowLegs(0, true, true, "")
	s.Receive(0, envelope(&sessionpb.Demand{Job: 5, TransferId: "not begun", Leg: LegDemand, Keys: packKeys(testKeys(1)), Slots: []uint32{0}, Epochs: []uint64{1}, DeadlineMs: 500}))
	require.Equal(t, sessionpb.Reason_REASON_BUSY, sent[*sessionpb.Supply](s)[0].Refused[0].Reason, "open demands in leg demand are jobs")
	s.incoming(6, 5)
	require.True(t, take[Close](s)[0].Protocol, "keys of one message, from a peer that was told the bound")
}

// TestKeysOfTheSmallerBound: a message names no more keys than the side with the smaller bound
// takes; Status says how many, and what waited for a Hello that says less ends by name instead
// of breaking the protocol.
func TestKeysOfTheSmallerBound(t *testing.T) {
	keys := func(own, theirs int) *solo {
		s := newSolo(t, func(c *Config) { c.Limits.KeysMax = own })
		require.Equal(t, min(own, KeysMin), s.Status(0).KeysMax, "before the hello")
		s.Demand(0, testDemand(5, 0))
		s.Lookup(0, "r", testKeys(5), 0)
		s.Connected(0)
		h := fillHello(testHello("b", 2), &s.cfg.Limits)
		h.Caps.MaxKeys = uint32(theirs)
		s.Receive(0, envelope(h))
		return s
	}
	s := keys(1000, 4)
	require.Equal(t, 4, s.Status(0).KeysMax)
	require.Empty(t, sent[*sessionpb.Demand](s))
	require.Empty(t, sent[*sessionpb.Lookup](s))
	d, l := take[DemandDone](s), take[LookupDone](s)
	require.Equal(t, "5 keys; b takes at most 4 in one message", d[0].Results[0].Text)
	require.Equal(t, Invalid, d[0].Results[0].Cause)
	require.Equal(t, Invalid, l[0].Cause)
	require.True(t, s.Idle())
	require.Equal(t, 6, keys(6, 1000).Status(0).KeysMax)
	require.Equal(t, 6, keys(6, 0).Status(0).KeysMax, "it does not say")
	s = keys(1000, 5)
	require.Len(t, sent[*sessionpb.Demand](s), 1)
	require.Len(t, sent[*sessionpb.Lookup](s), 1)
}

// TestLookup: the states come back packed, and a late answer has no effect.
func TestLookup(t *testing.T) {
	s := newSolo(t).up()
	id := s.Lookup(0, "r", testKeys(5), 0)
	m := sent[*sessionpb.Lookup](s)[0]
	require.EqualValues(t, 500, m.DeadlineMs)

	p := newSolo(t).up()
	p.Receive(0, envelope(m))
	q := take[LookedUp](p)[0].Query
	require.Equal(t, testKeys(5), q.Keys)
	states, err := abi.ParseStates("HMPHR")
	require.NoError(t, err)
	require.True(t, p.AnswerLookup(0, q.ID, states))
	require.False(t, p.AnswerLookup(0, q.ID, states))
	a := sent[*sessionpb.States](p)[0]

	s.Receive(0, envelope(a))
	d := take[LookupDone](s)[0]
	require.Equal(t, Answered, d.Cause)
	require.Equal(t, "HMPHR", d.States.Format(5))
	s.Receive(0, envelope(a))
	require.Empty(t, take[LookupDone](s))
	s.Release(0, id)
	p.Receive(0, envelope(sent[*sessionpb.Done](s)[0]))
	require.Equal(t, id, take[Released](p)[0].Job)
}

// TestDrain: both sides stop taking jobs, those in work go on.
func TestDrain(t *testing.T) {
	s := newSolo(t).up()
	s.incoming(1, 1)
	s.Demand(0, testDemand(1, 0))
	s.Drain(0, "rollout")
	require.Equal(t, "rollout", sent[*sessionpb.Goaway](s)[0].Reason)
	s.incoming(2, 1)
	require.Equal(t, sessionpb.Reason_REASON_DRAINING, sent[*sessionpb.Supply](s)[0].Refused[0].Reason)
	require.False(t, s.Idle())
	s.LastWord(0, 1)
	s.Receive(0, envelope(&sessionpb.Supply{Job: 1, Last: true}))
	require.True(t, s.Idle())

	p := newSolo(t).up()
	p.Receive(0, envelope(&sessionpb.Goaway{Reason: "rollout"}))
	p.Demand(0, testDemand(1, 0))
	require.Equal(t, Refused, take[DemandDone](p)[0].Results[0].Cause)
	p.Disconnected(0, "closed")
	p.Connected(0)
	p.hello(testHello("b", 3))
	p.Demand(0, testDemand(1, 0))
	require.Empty(t, take[DemandDone](p), "the new process takes jobs")
}

// TestProtocolErrors: what a right peer never sends closes the session with a reason.
func TestProtocolErrors(t *testing.T) {
	keys := packKeys(testKeys(2))
	for name, m := range map[string]proto.Message{
		"empty":                     nil,
		"second Hello":              fillHello(testHello("b", 2), ptr(DefaultLimits())),
		"Demand without keys":       &sessionpb.Demand{Job: 5},
		"Demand with torn keys":     &sessionpb.Demand{Job: 5, Keys: keys[1:]},
		"Demand without slots":      &sessionpb.Demand{Job: 5, Keys: keys},
		"Demand with job 0":         &sessionpb.Demand{Job: 0, Keys: keys, Slots: []uint32{1, 2}, Epochs: []uint64{1, 2}},
		"Lookup with torn keys":     &sessionpb.Lookup{Job: 5, Keys: keys[1:]},
		"Lookup with a long id":     &sessionpb.Lookup{Job: 5, Keys: keys, RequestId: strings.Repeat("x", 300)},
		"States never asked for":    &sessionpb.States{Job: 99},
		"States of the wrong size":  &sessionpb.States{Job: 1, States: []byte{1}},
		"Supply never asked for":    &sessionpb.Supply{Job: 99},
		"Supply beyond the keys":    &sessionpb.Supply{Job: 2, Available: []uint32{2}},
		"Supply refuses beyond":     &sessionpb.Supply{Job: 2, Refused: []*sessionpb.Refused{{Indices: []uint32{1 << 31}}}},
		"Done with too few codes":   &sessionpb.Done{Job: 2, Codes: []sessionpb.Code{1}},
		"Done never asked for":      &sessionpb.Done{Job: 99},
		"release of an unknown job": &sessionpb.Done{Job: 99, Release: true},
		"Abort of an unknown job":   &sessionpb.Abort{Job: 99},
		"AbortAck never asked for":  &sessionpb.AbortAck{Job: 99},
		"Ping of another boot":      &sessionpb.Ping{BootId: 77},
		"Pong from the future":      &sessionpb.Pong{Seq: 1 << 40},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSolo(t).up()
			s.Lookup(0, "r", testKeys(2), 0)
			s.Demand(0, testDemand(2, 0))
			e := &sessionpb.Envelope{}
			if m != nil {
				e = envelope(m)
			}
			s.Receive(0, e)
			closed := take[Close](s)
			require.Len(t, closed, 1)
			require.True(t, closed[0].Protocol)
			require.Contains(t, closed[0].Reason, "peer b breaks the protocol: ")
			require.Len(t, take[DemandDone](s), 1)
			require.Len(t, take[LookupDone](s), 1)
			require.True(t, s.Idle())
		})
	}
}

func ptr[T any](v T) *T { return &v }

// TestLimits: each pair of limits that cannot work together is refused by name.
func TestLimits(t *testing.T) {
	l := DefaultLimits()
	require.NoError(t, l.Validate())
	for want, change := range map[string]func(*Limits){
		"ping is 0s":                func(l *Limits) { l.Ping = 0 },
		"at least twice ping":       func(l *Limits) { l.Ping = 400 * ms },
		"lease must be at least 3":  func(l *Limits) { l.Lease = 700 * ms },
		"dead must be longer":       func(l *Limits) { l.Dead = l.Suspect },
		"below retry_min":           func(l *Limits) { l.RetryMax = l.RetryMin - ms },
		"request_deadline_max":      func(l *Limits) { l.RequestDeadlineMax = ms },
		"message_bytes_max":         func(l *Limits) { l.MessageBytesMax = 1 << 20 },
		"jobs_max is 0":             func(l *Limits) { l.JobsMax = 0 },
		"transfer_bytes_per_second": func(l *Limits) { l.TransferBytesPerSecond = 0 },
		"job_keys_max is 5":         func(l *Limits) { l.JobKeysMax = 5 },
	} {
		l := DefaultLimits()
		change(&l)
		require.ErrorContains(t, l.Validate(), want)
	}
	require.Equal(t, 500*ms, l.transfer(0))
	require.Equal(t, 1500*ms, l.transfer(200e6))
	require.Equal(t, 500*ms+5, l.transfer(1))
	require.Positive(t, l.transfer(1<<64-1))
}

// TestLargestMessage: what the bounds allow fits MessageBytesMax.
func TestLargestMessage(t *testing.T) {
	l := DefaultLimits()
	n := l.KeysMax
	d := &sessionpb.Demand{Job: 1 << 63, TransferId: strings.Repeat("x", l.IDBytesMax), RequestId: strings.Repeat("x", l.IDBytesMax),
		Leg: strings.Repeat("x", l.IDBytesMax), Keys: make([]byte, n*KeyBytes), DeadlineMs: 1<<32 - 1}
	for range n {
		d.Slots, d.Epochs = append(d.Slots, 1<<32-1), append(d.Epochs, 1<<64-1)
	}
	require.Less(t, proto.Size(envelope(d)), l.MessageBytesMax)

	s := newSolo(t).up()
	s.incoming(1, n)
	var rs []Refusal
	for i := range n {
		rs = append(rs, Refusal{Indices: []uint32{uint32(i)}, Reason: sessionpb.Reason_REASON_OTHER, Text: fmt.Sprint(i, strings.Repeat("x", 300))})
	}
	s.Refuse(0, 1, rs...)
	require.Less(t, proto.Size(envelope(sent[*sessionpb.Supply](s)[0])), l.MessageBytesMax/4)
}
