package join

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

func testKey(i int) Key {
	var k Key
	k[16] = byte(i)
	k[session.KeyBytes-1] = byte(i % 2) // two groups
	return k
}

var testLimits = Limits{
	ParkedAge: 60 * time.Second, ParkedBytesMax: 55, FinishedAge: 60 * time.Second, FinishedMax: 1000, // which of two that finish together goes first is not the model's to say
	TransfersMax: 4, KeysMax: 1000, JobsMax: 6, PeerBytesMax: 45, PeerKeysMax: 1000,
}

// modelPeers are those that demand.
var modelPeers = []string{"p", "q"}

func (j *modelJob) peer() string { return modelPeers[j.id%2] }

// model is the join told by plain sets, searched in full at every question.
type model struct {
	now       time.Duration
	transfers map[string]*modelTransfer
	finished  []finished
	jobs      []*modelJob
	frees     []string
	seq       int
	ends      []string       // finished transfers of this step
	reserved  map[string]int // keys, by peer
}

type modelTransfer struct {
	begun, last bool
	fates       map[int]Fate // nil = no promise
	held        map[int]bool
	no          map[int]sessionpb.Reason // refused or gone
	sent        map[int]bool
	parked      map[int][2]int // since in ns, sequence
}

type modelJob struct {
	id       session.JobID
	t        string
	keys     []int
	words    []string // "", "A", "R<reason>"
	told     []bool   // it will come
	ended    []bool   // the key needs nothing more
	deadline time.Duration
	closed   bool
}

func (m *model) open(t string) *modelTransfer {
	if m.transfers[t] == nil {
		m.transfers[t] = &modelTransfer{held: map[int]bool{}, no: map[int]sessionpb.Reason{}, sent: map[int]bool{}, parked: map[int][2]int{}}
	}
	return m.transfers[t]
}

func (m *model) over(t string) bool {
	return slices.ContainsFunc(m.finished, func(f finished) bool { return f.id == t })
}

func (m *model) liveJobs(t string) (out []*modelJob) {
	for _, j := range m.jobs {
		if !j.closed && (t == "" || j.t == t) {
			out = append(out, j)
		}
	}
	return out
}

func (m *model) bound(t string, k int) (n int) {
	for _, j := range m.liveJobs(t) {
		for i, key := range j.keys {
			if key == k && j.words[i] == "A" && !j.ended[i] {
				n++
			}
		}
	}
	return n
}

func (m *model) word(j *modelJob, i int, w string) {
	j.words[i] = w
	j.ended[i] = w != "A"
}

// available gives a key that is here its word, within the budget of the job's peer.
func (m *model) available(j *modelJob, i int) bool {
	if m.kept(j.peer())+10 > testLimits.PeerBytesMax {
		m.word(j, i, fmt.Sprint("R", sessionpb.Reason_REASON_BUSY))
		return false
	}
	m.word(j, i, "A")
	return true
}

// kept is what a peer takes of its budget.
func (m *model) kept(peer string) uint64 {
	n := m.reserved[peer]
	for _, j := range m.jobs {
		for i, w := range j.words {
			if j.peer() == peer && w == "A" && !j.ended[i] {
				n++
			}
		}
	}
	return uint64(n) * 10
}

func (m *model) free(t string, k int, why Why) {
	m.frees = append(m.frees, fmt.Sprint(t, testKey(k), why))
}

func (m *model) letGo(t string, k int, why Why) {
	mt := m.transfers[t]
	delete(mt.held, k)
	delete(mt.parked, k)
	mt.no[k] = sessionpb.Reason_REASON_EVICTED
	if why == Sent {
		mt.no[k] = sessionpb.Reason_REASON_FINISHED
	}
	m.free(t, k, why)
}

func (m *model) park(t string, k int) {
	m.seq++
	m.transfers[t].parked[k] = [2]int{int(m.now), m.seq}
}

// settle closes what is at its end and sheds what is too much, to a fixed point.
func (m *model) settle() {
	for _, j := range m.liveJobs("") {
		if !slices.Contains(j.ended, false) {
			j.closed = true
		}
	}
	for {
		var oldT string
		oldK, oldSeq, bytes := 0, int(^uint(0)>>1), 0
		for t, mt := range m.transfers {
			for k, p := range mt.parked {
				bytes += 10
				if p[1] < oldSeq {
					oldT, oldK, oldSeq = t, k, p[1]
				}
			}
		}
		if bytes <= int(testLimits.ParkedBytesMax) {
			break
		}
		m.letGo(oldT, oldK, NoRoom)
	}
	for t, mt := range m.transfers {
		if len(m.liveJobs(t)) > 0 || len(mt.held) > 0 || mt.begun && !mt.last {
			continue
		}
		delete(m.transfers, t)
		if mt.begun {
			m.ends = append(m.ends, t)
			m.finished = append(m.finished, finished{t, m.now + testLimits.FinishedAge})
		}
	}
}

func (m *model) tick(now time.Duration) {
	m.now = now
	for _, j := range m.liveJobs("") {
		r := sessionpb.Reason_REASON_NO_LAST_WORD
		if !m.transfers[j.t].begun {
			r = sessionpb.Reason_REASON_NOT_BEGUN
		}
		for i := range j.keys {
			if j.words[i] == "" && j.deadline <= now {
				m.word(j, i, fmt.Sprint("R", r))
			}
		}
	}
	for t, mt := range m.transfers {
		for k, p := range mt.parked {
			if time.Duration(p[0])+testLimits.ParkedAge <= now {
				m.letGo(t, k, Aged)
			}
		}
	}
	m.settle()
	m.finished = slices.DeleteFunc(m.finished, func(f finished) bool { return f.until <= now })
}

func (m *model) supply(t string, keys []int) {
	mt := m.transfers[t]
	if mt == nil || !mt.begun || mt.last || m.over(t) {
		for _, k := range keys {
			m.free(t, k, Late)
		}
		return
	}
	for _, k := range keys {
		if mt.held[k] {
			m.free(t, k, Twice)
			continue
		}
		mt.held[k] = true
		delete(mt.no, k)
		for _, j := range m.liveJobs(t) {
			for i := range j.keys {
				if j.keys[i] == k && j.words[i] == "" {
					m.available(j, i)
				}
			}
		}
		if m.bound(t, k) == 0 {
			m.park(t, k)
		}
	}
	m.settle()
}

// foretell applies a transfer's promise to the keys of a job that wait.
func (m *model) foretell(j *modelJob) {
	mt := m.transfers[j.t]
	for i, k := range j.keys {
		if mt.fates == nil || j.words[i] != "" {
			continue
		}
		if mt.fates[k] == Never {
			m.word(j, i, fmt.Sprint("R", sessionpb.Reason_REASON_NOT_PLANNED))
		}
		j.told[i] = j.told[i] || mt.fates[k] == WillCome && !mt.last
	}
}

func (m *model) promise(t string, fates map[int]Fate) {
	mt := m.transfers[t]
	if mt == nil || !mt.begun || mt.last {
		return
	}
	mt.fates = fates
	for _, j := range m.liveJobs(t) {
		m.foretell(j)
	}
	m.settle()
}

func (m *model) refuse(t string, keys []int, r sessionpb.Reason) {
	mt := m.transfers[t]
	if mt == nil || !mt.begun || mt.last {
		return
	}
	for _, k := range keys {
		if mt.held[k] && m.bound(t, k) > 0 {
			continue
		}
		if mt.held[k] {
			m.letGo(t, k, Withdrawn)
		}
		mt.no[k] = r
		for _, j := range m.liveJobs(t) {
			for i := range j.keys {
				if j.keys[i] == k && j.words[i] == "" {
					m.word(j, i, fmt.Sprint("R", r))
				}
			}
		}
	}
	m.settle()
}

func (m *model) lastWord(t string) {
	mt := m.transfers[t]
	if mt == nil || !mt.begun {
		return
	}
	mt.last = true
	for _, j := range m.liveJobs(t) {
		for i := range j.keys {
			if j.words[i] == "" {
				m.word(j, i, fmt.Sprint("R", sessionpb.Reason_REASON_NOT_SUPPLIED))
			}
		}
	}
	m.settle()
}

func (m *model) demand(j *modelJob) {
	j.words, j.ended, j.told = make([]string, len(j.keys)), make([]bool, len(j.keys)), make([]bool, len(j.keys))
	m.jobs = append(m.jobs, j)
	all := sessionpb.Reason_REASON_NONE
	switch {
	case m.over(j.t):
		all = sessionpb.Reason_REASON_FINISHED
	case len(m.liveJobs("")) > testLimits.JobsMax, m.transfers[j.t] == nil && len(m.transfers) >= testLimits.TransfersMax:
		all = sessionpb.Reason_REASON_BUSY
	}
	if all != sessionpb.Reason_REASON_NONE {
		for i := range j.keys {
			m.word(j, i, fmt.Sprint("R", all))
		}
		j.closed = true
		return
	}
	mt := m.open(j.t)
	for i, k := range j.keys {
		r, no := mt.no[k]
		switch {
		case mt.held[k]:
			if m.available(j, i) {
				delete(mt.parked, k)
			}
		case no:
			m.word(j, i, fmt.Sprint("R", r))
		}
	}
	m.foretell(j)
	for i := range j.keys {
		if mt.last && j.words[i] == "" {
			m.word(j, i, fmt.Sprint("R", sessionpb.Reason_REASON_NOT_SUPPLIED))
		}
	}
	m.settle()
	m.tick(m.now)
}

func (m *model) jobEnded(j *modelJob, results []session.Result) {
	if j.closed {
		return
	}
	mt := m.transfers[j.t]
	for i, k := range j.keys {
		if j.ended[i] {
			continue
		}
		j.ended[i] = true
		if j.words[i] == "" {
			j.words[i] = "E"
			continue
		}
		mt.sent[k] = mt.sent[k] || results[i].Cause == session.Transferred
		if m.bound(j.t, k) > 0 {
			continue
		}
		switch {
		case mt.sent[k]:
			m.letGo(j.t, k, Sent)
		case results[i].Cause == session.Lapsed:
			m.letGo(j.t, k, Lapsed)
		default:
			m.park(j.t, k)
		}
	}
	m.settle()
}

// TestModel drives the join and the set model with the same commands.
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		j := New(Config{Limits: testLimits, ChunkBytes: []uint64{10, 10}})
		m := &model{transfers: map[string]*modelTransfer{}, reserved: map[string]int{}}
		words, told := map[session.JobID][]string{}, map[session.JobID][]bool{}
		pins := 0
		next := session.JobID(0)
		name := rapid.SampledFrom([]string{"a", "b", "c", "d", "e"})
		keys := rapid.SliceOfN(rapid.IntRange(0, 7), 1, 6)

		observe := func(rt *rapid.T) {
			var frees, ends []string
			for _, e := range j.Take() {
				switch e := e.(type) {
				case Answer:
					require.NotEmpty(rt, len(e.Answer.Available)+len(e.Answer.Refused)+len(e.Answer.WillCome), "an empty answer")
					for _, i := range e.Answer.WillCome {
						require.Empty(rt, words[e.Job][i], "a promise after the word")
						require.False(rt, told[e.Job][i], "a second promise")
						told[e.Job][i] = true
					}
					for _, i := range e.Answer.Available {
						require.Empty(rt, words[e.Job][i], "a second word")
						words[e.Job][i] = "A"
					}
					for _, r := range e.Answer.Refused {
						for _, i := range r.Indices {
							require.Empty(rt, words[e.Job][i], "a second word")
							words[e.Job][i] = fmt.Sprint("R", r.Reason)
						}
					}
					require.Equal(rt, !slices.Contains(words[e.Job], ""), e.Answer.Last, "last iff every key has a word")
				case Free:
					pins--
					frees = append(frees, fmt.Sprint(e.Transfer, e.Key, e.Why))
				case Finished:
					ends = append(ends, e.Transfer)
					checkReport(rt, e.Groups)
				}
			}
			require.ElementsMatch(rt, m.frees, frees, "pins given back")
			require.ElementsMatch(rt, m.ends, ends, "transfers finished")
			m.frees, m.ends = nil, nil
			for _, x := range m.jobs {
				require.Equal(rt, x.told, told[x.id], "job %d: what it is told will come", x.id)
				for i, w := range x.words {
					if w != "E" && w != words[x.id][i] {
						rt.Fatalf("job %d key %d: word %q, expected %q", x.id, i, words[x.id][i], w)
					}
				}
			}
			held := 0
			for _, mt := range m.transfers {
				held += len(mt.held)
			}
			require.Equal(rt, held, pins, "every pin is held or given back")
			require.Len(rt, m.liveJobs(""), j.Status().Jobs)
			require.Len(rt, m.transfers, j.Status().Transfers)
			require.Len(rt, m.finished, j.Status().Finished)
			require.LessOrEqual(rt, j.Status().ParkedBytes, testLimits.ParkedBytesMax)
			for _, p := range modelPeers {
				require.LessOrEqual(rt, j.PeerBytes(p), testLimits.PeerBytesMax)
				require.Equal(rt, m.kept(p), j.PeerBytes(p), "what is kept for %s", p)
			}
		}

		rt.Repeat(map[string]func(*rapid.T){
			"begin": func(rt *rapid.T) {
				id := name.Draw(rt, "transfer")
				err := j.Begin(m.now, id, session.LegPD)
				mt := m.transfers[id]
				full := mt == nil && len(m.transfers) >= testLimits.TransfersMax
				require.Equal(rt, m.over(id) || mt != nil && mt.begun || full, err != nil, "%v", err)
				if err == nil {
					m.open(id).begun = true
				}
			},
			"promise": func(rt *rapid.T) {
				id := name.Draw(rt, "transfer")
				if mt := m.transfers[id]; mt == nil || mt.fates != nil {
					rt.Skip("once, for a transfer in work")
				}
				fates := map[int]Fate{}
				for k := range 8 {
					fates[k] = rapid.SampledFrom([]Fate{Open, WillCome, Never}).Draw(rt, "fate")
				}
				m.promise(id, fates)
				_ = j.Promised(m.now, id, func(k *Key) (Fate, string) { return fates[int(k[16])], "" })
			},
			"supply": func(rt *rapid.T) {
				id, ks := name.Draw(rt, "transfer"), keys.Draw(rt, "keys")
				pins += len(ks)
				m.supply(id, ks)
				_ = j.Supply(m.now, id, toKeys(ks))
			},
			"refuse": func(rt *rapid.T) {
				id, ks := name.Draw(rt, "transfer"), keys.Draw(rt, "keys")
				m.refuse(id, ks, sessionpb.Reason_REASON_STORE_FAILED)
				var rs []Refusal
				for _, k := range toKeys(ks) {
					rs = append(rs, Refusal{Key: k, Reason: sessionpb.Reason_REASON_STORE_FAILED})
				}
				_ = j.Refuse(m.now, id, rs)
			},
			"last": func(rt *rapid.T) {
				id := name.Draw(rt, "transfer")
				m.lastWord(id)
				_ = j.LastWord(m.now, id)
			},
			"demand": func(rt *rapid.T) {
				next++
				x := &modelJob{id: next, t: name.Draw(rt, "transfer"), keys: keys.Draw(rt, "keys"),
					deadline: m.now + time.Duration(rapid.IntRange(0, 90).Draw(rt, "deadline"))*time.Second}
				words[x.id], told[x.id] = make([]string, len(x.keys)), make([]bool, len(x.keys))
				j.Demand(m.now, x.peer(), session.Job{ID: x.id, TransferID: x.t, Leg: session.LegPD, Keys: toKeys(x.keys), Deadline: x.deadline})
				m.demand(x)
			},
			"end": func(rt *rapid.T) {
				if len(m.jobs) == 0 {
					rt.Skip("no job")
				}
				x := rapid.SampledFrom(m.jobs).Draw(rt, "job")
				results := make([]session.Result, len(x.keys))
				for i := range results {
					results[i].Cause = rapid.SampledFrom([]session.Cause{session.Transferred, session.PushFailed, session.Aborted, session.Unmatched, session.Lapsed}).Draw(rt, "cause")
				}
				m.jobEnded(x, results)
				j.JobEnded(m.now, x.peer(), x.id, results)
			},
			"reserve": func(rt *rapid.T) {
				p := rapid.SampledFrom(modelPeers).Draw(rt, "peer")
				fits := m.kept(p)+10 <= testLimits.PeerBytesMax
				if fits {
					m.reserved[p]++
				}
				require.Equal(rt, fits, j.Reserve(p, &Key{}))
			},
			"return": func(rt *rapid.T) {
				p := rapid.SampledFrom(modelPeers).Draw(rt, "peer")
				if m.reserved[p] == 0 {
					rt.Skip("nothing is reserved")
				}
				m.reserved[p]--
				j.Return(p, &Key{})
			},
			"time": func(rt *rapid.T) {
				if at, ok := j.Wake(); ok && rapid.Bool().Draw(rt, "to the wake") {
					require.Greater(rt, at, m.now, "nothing is overdue")
					j.Tick(at - 1)
					require.Empty(rt, j.Take(), "nothing happens before the wake")
					m.tick(at)
					j.Tick(at)
					return
				}
				m.tick(m.now + time.Duration(rapid.IntRange(0, 70).Draw(rt, "seconds"))*time.Second)
				j.Tick(m.now)
			},
			"": observe,
		})

		// The end: last words, then time. Nothing is left.
		for p, n := range m.reserved {
			for range n {
				j.Return(p, &Key{})
			}
		}
		for id := range m.transfers {
			_ = j.Begin(m.now, id, session.LegPD)
			_ = j.LastWord(m.now, id)
		}
		for x := range j.jobs {
			j.JobEnded(m.now, x.peer, x.id, make([]session.Result, len(j.jobs[x].word)))
		}
		j.Tick(m.now + 100*time.Second) // parked keys age, transfers finish
		j.Tick(m.now + 200*time.Second)
		require.Equal(rt, Status{}, j.Status())
		require.Empty(rt, j.peers, "no budget is taken")
	})
}

func toKeys(ks []int) []Key {
	out := make([]Key, len(ks))
	for i, k := range ks {
		out[i] = testKey(k)
	}
	return out
}

func checkReport(t require.TestingT, groups []GroupReport) {
	for _, g := range groups {
		for _, k := range g.Transferred {
			require.Contains(t, g.Supplied, k, "transferred lies in supplied")
			require.Contains(t, g.Demanded, k, "transferred lies in demanded")
		}
		for _, k := range g.Unmatched {
			require.Contains(t, g.Demanded, k, "unmatched lies in demanded")
		}
	}
}
