package session

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// A world is two cores, their hosts and the network between them, under a fake clock.
// Control messages of one direction keep their order; data has delays of its own, so
// it overtakes control and the other way round, and may be lost or torn.
type world struct {
	t      require.TestingT
	rnd    *rand.Rand
	now    time.Duration
	nodes  [2]*simNode
	events []event
	seq    int
	connID int  // of the present connection; 0 = none
	down   bool // the network refuses connections
	cut    bool // data is lost
	causes map[Cause]int
	base   time.Duration // Limits.TransferBase: with the long one a lease may lapse first
	lapses int
	words  int // keys that a Word has ended
}

// simLease is the shortest lease that Limits.Validate accepts beside the default ping.
const simLease = 750 * ms

type event struct {
	at   time.Duration
	seq  int
	node int // whose state it touches: waits while that one is frozen
	f    func()
}

// simNode is a node: the core and what a host must know of its jobs.
type simNode struct {
	w       *world
	id      int
	core    *Core
	boot    uint64
	frozen  bool
	conn    int           // the connection this side believes in
	last    time.Duration // when the last control message goes out, to keep the order
	heard   time.Duration // when a byte came last on a session
	lookups map[JobID]time.Duration
	demands map[JobID]*simDemand
	jobs    map[JobID]*simJob // producer's
	thawed  time.Duration
	ended   int
	forgets bool // it sends no Renew
}

type simDemand struct {
	n        int
	leg      string
	spoken   bool           // a Supply came
	refused  map[int]Result // by a Word
	promised map[int]bool
	deadline time.Duration
	supplied map[int]time.Duration // when its bytes are late
}

type simJob struct {
	job     Job
	pushing map[uint32]bool
	lease   time.Duration // while something is pushed
}

func newWorld(t require.TestingT, seed uint64) *world {
	w := &world{t: t, causes: map[Cause]int{}, rnd: rand.New(rand.NewPCG(seed, 1)), base: DefaultLimits().TransferBase}
	if w.rnd.IntN(2) == 0 {
		w.base = 3 * time.Second
	}
	w.boot(1)
	w.boot(0) // the one that dials
	return w
}

// boot starts a node, or starts it again as another process.
func (w *world) boot(i int) {
	old := w.nodes[i]
	n := &simNode{w: w, id: i, lookups: map[JobID]time.Duration{}, demands: map[JobID]*simDemand{}, jobs: map[JobID]*simJob{}, boot: 1, heard: w.now}
	if old != nil {
		n.boot = old.boot + 1
		w.hangUp(i)
		w.events = slices.DeleteFunc(w.events, func(e event) bool { return e.node == i })
	}
	cfg := testConfig([]string{"a", "b"}[i], []string{"b", "a"}[i], n.boot, i == 0)
	cfg.Jitter = w.rnd.Float64
	cfg.Limits.Lease, cfg.Limits.TransferBase = simLease, w.base
	c, err := New(w.now, cfg)
	require.NoError(w.t, err)
	n.core = c
	w.nodes[i] = n
	w.carry(n)
}

func (w *world) delay(most time.Duration) time.Duration {
	return 1 + time.Duration(w.rnd.Int64N(int64(most)))
}

func (w *world) after(d time.Duration, node int, f func()) {
	w.seq++
	w.events = append(w.events, event{w.now + d, w.seq, node, f})
}

// hangUp breaks the connection as seen from node i; the other side learns it later,
// after what is on the way.
func (w *world) hangUp(i int) {
	n, o := w.nodes[i], w.nodes[1-i]
	id := n.conn
	if id == 0 {
		return
	}
	n.conn = 0
	if w.connID == id {
		w.connID = 0
	}
	at := max(n.last, w.now+w.delay(20*ms))
	w.after(at-w.now, 1-i, func() {
		if o.conn == id {
			o.conn = 0
			o.core.Disconnected(w.now, "closed by the other side")
			w.carry(o)
		}
	})
}

func (w *world) dial(n *simNode) {
	o := w.nodes[1-n.id]
	if w.down || o.frozen {
		if !o.frozen { // a frozen node's port answers nothing at all
			w.after(w.delay(10*ms), n.id, func() {
				if n.core.link == linkDialing {
					n.core.Disconnected(w.now, "refused")
					w.carry(n)
				}
			})
		}
		return
	}
	attempt := n.core.attempt
	w.after(w.delay(30*ms), n.id, func() {
		if n.core.link != linkDialing || n.core.attempt != attempt {
			return
		}
		w.seq++
		id := w.seq
		w.connID = id
		n.conn, n.last = id, w.now
		n.core.Connected(w.now)
		w.carry(n)
		w.after(0, 1-n.id, func() {
			o := w.nodes[1-n.id]
			if w.connID != id {
				return
			}
			o.conn, o.last = id, w.now
			o.core.Connected(w.now)
			w.carry(o)
		})
	})
}

// carry carries out the effects of a node's core.
func (w *world) carry(n *simNode) {
	for effects := n.core.Take(); len(effects) > 0; effects = n.core.Take() {
		for _, e := range effects {
			w.effect(n, e)
		}
	}
}

func (w *world) effect(n *simNode, e Effect) {
	switch e := e.(type) {
	case Send:
		w.send(n, e.Envelope)
	case Dial:
		w.dial(n)
	case Close:
		require.False(w.t, e.Protocol, "right nodes keep the protocol: %s", e.Reason)
		w.hangUp(n.id)
	case Up:
		n.heard = w.now
	case Changed:
		if e.To == Connecting {
			n.heard = w.now
		}
	case LookupDone:
		limit, ok := n.lookups[e.Job]
		require.True(w.t, ok, "a lookup ends once")
		require.LessOrEqual(w.t, w.now, max(limit, n.thawed))
		require.NotEqual(w.t, Open, e.Cause)
		delete(n.lookups, e.Job)
		n.ended++
	case Word:
		w.word(n, e)
	case DemandDone:
		w.demandDone(n, e)
	case LookedUp:
		if q := e.Query.ID; w.rnd.IntN(4) > 0 {
			states := abi.NewStates(len(e.Query.Keys))
			states.Fill(0, len(e.Query.Keys), abi.Hit)
			w.after(w.delay(600*ms), n.id, func() { n.core.AnswerLookup(w.now, q, states); w.carry(n) })
		}
	case Demanded:
		require.NotContains(w.t, n.jobs, e.Job.ID)
		n.jobs[e.Job.ID] = &simJob{job: e.Job, pushing: map[uint32]bool{}}
		w.produce(n, e.Job)
	case Push:
		if len(n.jobs[e.Job].pushing) == 0 {
			n.jobs[e.Job].lease = w.now + simLease
		}
		for _, i := range e.Indices {
			require.False(w.t, n.jobs[e.Job].pushing[i], "a key is pushed once")
			n.jobs[e.Job].pushing[i] = true
			w.push(n, e.Job, int(i))
		}
	case CancelPush:
		require.NotEmpty(w.t, n.jobs[e.Job].pushing, "nothing is cancelled for nothing")
		clear(n.jobs[e.Job].pushing)
	case JobEnded:
		j := n.jobs[e.Job]
		require.NotNil(w.t, j, "a job of the producer ends once")
		require.Empty(w.t, j.pushing, "a push that nobody owns")
		require.LessOrEqual(w.t, w.now, max(j.job.Deadline, n.thawed))
		for _, r := range e.Results {
			require.NotEqual(w.t, Open, r.Cause)
			if r.Cause == Lapsed {
				w.lapses++
				require.GreaterOrEqual(w.t, w.now, j.lease, "it lapsed before its lease")
				require.LessOrEqual(w.t, w.now, max(j.lease, n.thawed), "it outlived its lease")
			}
		}
		delete(n.jobs, e.Job)
	}
}

// word checks what is told before the end: each key once, and only open ones.
func (w *world) word(n *simNode, e Word) {
	d := n.demands[e.Job]
	require.NotNil(w.t, d, "a word after the end")
	require.Len(w.t, e.Results, len(e.Refused))
	for k, i := range e.Refused {
		require.NotContains(w.t, d.refused, int(i), "a key ends once")
		require.NotContains(w.t, []Cause{Open, Transferred}, e.Results[k].Cause)
		d.refused[int(i)] = e.Results[k]
		w.words++
	}
	for _, i := range e.WillCome {
		require.NotContains(w.t, d.refused, int(i), "it does not come")
		require.False(w.t, d.promised[int(i)], "told once")
		d.promised[int(i)] = true
	}
}

// demandDone checks the one end of a demand: each key has a cause, and no wait was
// longer than its limit or ended before it.
func (w *world) demandDone(n *simNode, e DemandDone) {
	d := n.demands[e.Job]
	require.NotNil(w.t, d, "a demand ends once")
	delete(n.demands, e.Job)
	n.ended++
	require.Len(w.t, e.Results, d.n)
	require.LessOrEqual(w.t, w.now, max(d.deadline, n.thawed), "a demand outlives its deadline")
	for i, r := range e.Results {
		w.causes[r.Cause]++
		if told, ok := d.refused[i]; ok {
			require.Equal(w.t, told, r, "the end differs from the word")
		}
		if r.Cause == Deadline && r.Reason != sessionpb.Reason_REASON_NONE {
			require.Equal(w.t, d.leg == LegDemand && !d.spoken, r.Reason == sessionpb.Reason_REASON_NOT_BEGUN)
		}
		switch r.Cause {
		case Deadline:
			require.GreaterOrEqual(w.t, w.now, d.deadline)
			require.NotContains(w.t, d.supplied, i)
		case TransferLate:
			require.Contains(w.t, d.supplied, i)
			require.GreaterOrEqual(w.t, w.now, min(d.deadline, d.supplied[i]))
		case Transferred, Unmatched, Checksum, Aborted, PeerSuspect, Disconnected, PushFailed, NoData, Refused:
		default:
			require.Fail(w.t, "unexpected cause", "%v: %s", r.Cause, r.Text)
		}
	}
}

func (w *world) send(n *simNode, e *sessionpb.Envelope) {
	b, err := proto.Marshal(e)
	require.NoError(w.t, err)
	if n.forgets && e.GetRenew() != nil {
		return
	}
	n.last = max(n.last, w.now+w.delay(20*ms))
	id, o := n.conn, w.nodes[1-n.id]
	w.after(n.last-w.now, 1-n.id, func() {
		if o.conn != id {
			return
		}
		m := &sessionpb.Envelope{}
		require.NoError(w.t, proto.Unmarshal(b, m))
		s := m.GetSupply()
		var d *simDemand
		if s != nil {
			if d = o.demands[JobID(s.Job)]; d != nil {
				d.spoken = true
			}
		}
		o.core.Receive(w.now, m)
		for _, id := range m.GetRenew().GetJobs() {
			if j := o.jobs[JobID(id)]; j != nil && len(j.pushing) > 0 && o.core.jobs.get(JobID(id)) != nil {
				j.lease = w.now + simLease
			}
		}
		if o.core.link == linkUp {
			o.heard = w.now
		}
		if d != nil { // note the limit before effects end the job
			for _, i := range s.Available {
				if c := o.core.demands.get(JobID(s.Job)); c != nil && d.supplied[int(i)] == 0 && c.late[i] != 0 {
					d.supplied[int(i)] = c.late[i]
					require.LessOrEqual(w.t, c.late[i], w.now+o.core.cfg.Limits.transfer(o.core.owed))
				}
			}
		}
		w.carry(o)
	})
}

// produce is a host that says its words in any order, or never.
func (w *world) produce(n *simNode, j Job) {
	if w.rnd.IntN(2) == 0 { // a plan, and what it says of some keys
		var a Answer
		for i := range j.Keys {
			switch w.rnd.IntN(6) {
			case 0:
				a.Refused = append(a.Refused, Refusal{Indices: []uint32{uint32(i)}, Reason: sessionpb.Reason_REASON_NOT_PLANNED})
			case 1, 2, 3:
				a.WillCome = append(a.WillCome, uint32(i))
			}
		}
		w.after(w.delay(time.Second), n.id, func() { n.core.Answer(w.now, j.ID, a); w.carry(n) })
	}
	for i := range j.Keys {
		switch w.rnd.IntN(5) {
		case 0: // no word
		case 1:
			w.after(w.delay(2*time.Second), n.id, func() {
				n.core.Refuse(w.now, j.ID, Refusal{Indices: []uint32{uint32(i)}, Reason: sessionpb.Reason_REASON_EVICTED})
				w.carry(n)
			})
		default:
			w.after(w.delay(time.Second), n.id, func() { n.core.Supply(w.now, j.ID, []uint32{uint32(i)}); w.carry(n) })
		}
	}
	if w.rnd.IntN(3) > 0 {
		w.after(w.delay(3*time.Second), n.id, func() { n.core.LastWord(w.now, j.ID); w.carry(n) })
	}
}

// push is a data plane: the bytes arrive late, torn or never, and the producer learns
// of its own part only.
func (w *world) push(n *simNode, id JobID, i int) {
	o, boot := w.nodes[1-n.id], w.nodes[1-n.id].boot
	if fate := w.rnd.IntN(10); !w.cut && fate > 0 {
		cause := Transferred
		if fate == 1 {
			cause = Checksum
		}
		w.after(w.delay(800*ms), o.id, func() {
			o := w.nodes[1-n.id]
			if o.boot != boot || w.nodes[n.id] != n { // the connection went with the process
				return
			}
			o.core.DataActivity(w.now, w.now)
			if o.core.link == linkUp {
				o.heard = w.now
			}
			o.core.Arrived(w.now, id, i, cause, "")
			w.carry(o)
		})
	}
	if w.rnd.IntN(8) > 0 {
		cause := Transferred
		if w.rnd.IntN(10) == 0 {
			cause = PushFailed
		}
		w.after(w.delay(900*ms), n.id, func() {
			if j := n.jobs[id]; j != nil {
				delete(j.pushing, uint32(i))
			}
			n.core.Pushed(w.now, id, i, cause, "")
			w.carry(n)
		})
	}
}

// run moves the time, one event or wake after the other.
func (w *world) run(until time.Duration) {
	for {
		at, do := until+1, func() {}
		for _, n := range w.nodes {
			if n.frozen {
				continue
			}
			if t, ok := n.core.Wake(); ok && t < at {
				at, do = t, func() { n.core.Tick(w.now); w.carry(n) }
			}
		}
		first, seq := -1, 0
		for i, e := range w.events {
			if w.nodes[e.node].frozen {
				continue
			}
			if e.at < at || e.at == at && first >= 0 && e.seq < seq {
				at, first, seq = e.at, i, e.seq
			}
		}
		if at > until {
			break
		}
		if first >= 0 {
			e := w.events[first]
			w.events = slices.Delete(w.events, first, first+1)
			do = e.f
		}
		w.now = max(w.now, at)
		do()
		w.tick()
		w.check()
	}
	w.now = until
}

// tick brings the same instant to both nodes, for what ends together.
func (w *world) tick() {
	for _, n := range w.nodes {
		if !n.frozen {
			n.core.Tick(w.now)
			w.carry(n)
		}
	}
}

// must fails the run; unlike package require it costs nothing when all is well.
func (w *world) must(ok bool, format string, args ...any) {
	if !ok {
		require.FailNow(w.t, fmt.Sprintf(format, args...))
	}
}

// check holds after every step.
func (w *world) check() {
	l := DefaultLimits()
	for _, n := range w.nodes {
		c := n.core
		w.must(len(n.lookups) == c.lookups.len() && len(n.demands) == c.demands.len() && len(n.jobs) == c.jobs.len(),
			"node %d: jobs that the host does not know", n.id)
		if n.frozen {
			continue
		}
		silence := w.now - n.heard
		switch c.State() {
		case Ready:
			w.must(silence < l.Suspect, "node %d: silent for %v and ready", n.id, silence)
		case Connecting:
			w.must(silence < l.ConnectHello, "node %d: connecting for %v", n.id, silence)
			w.must(c.jobs.len()+c.queries.len() == 0, "node %d: jobs of the peer without a session", n.id)
		default:
			w.must(c.Idle(), "node %d: a %v peer has jobs", n.id, c.State())
		}
		for id, end := range n.lookups {
			w.must(w.now < end, "node %d: lookup %d outlives its limit", n.id, id)
		}
		for id, d := range n.demands {
			w.must(w.now < d.deadline, "node %d: demand %d outlives its deadline", n.id, id)
			for i, late := range d.supplied {
				w.must(w.now < late || c.demands.get(id).results[i].Cause != Open, "node %d: bytes of %d/%d are late and the key is open", n.id, id, i)
			}
		}
		for id, j := range n.jobs {
			w.must(w.now < j.job.Deadline, "node %d: job %d outlives its deadline", n.id, id)
			w.must(len(j.pushing) == 0 || w.now < j.lease, "node %d: what is bound to job %d outlives its lease", n.id, id)
		}
		w.checkSums(n)
		t, ok := c.Wake()
		w.must(!ok || t > w.now, "node %d: a wait is overdue", n.id)
		exact, _ := c.nextWait()
		w.must(t <= exact, "node %d: the wake %v is after a wait, %v", n.id, t, exact)
	}
}

// checkSums compares what the core counts with what it holds.
func (w *world) checkSums(n *simNode) {
	c := n.core
	keys, jobs, owed := 0, 0, uint64(0)
	for _, d := range c.demands.all() {
		keys += len(d.results)
		for i := range d.late {
			if d.late[i] != 0 && d.results[i].Cause == Open {
				owed += c.chunkBytes(&d.req.Keys[i])
			}
		}
	}
	for _, x := range c.lookups.all() {
		keys += len(x.keys)
	}
	for _, j := range c.jobs.all() {
		jobs += len(j.Keys)
	}
	for _, q := range c.queries.all() {
		jobs += len(q.Keys)
	}
	w.must(keys == c.demandKeys && jobs == c.jobsKeys && owed == c.owed, "node %d: keys %d/%d, keys of the peer %d/%d, bytes owed %d/%d",
		n.id, c.demandKeys, keys, c.jobsKeys, jobs, c.owed, owed)
}

func (w *world) demand(i, keys int, timeout time.Duration) JobID {
	n := w.nodes[i]
	req := testDemand(keys, timeout)
	req.Leg = []string{LegPD, LegDemand}[w.rnd.IntN(2)]
	id := n.core.Demand(w.now, req)
	n.demands[id] = &simDemand{n: keys, leg: req.Leg, deadline: w.now + timeout, supplied: map[int]time.Duration{}, refused: map[int]Result{}, promised: map[int]bool{}}
	w.carry(n)
	return id
}

func (w *world) lookup(i, keys int) {
	n := w.nodes[i]
	id := n.core.Lookup(w.now, "r", testKeys(keys), 0)
	n.lookups[id] = w.now + DefaultLimits().Lookup
	w.carry(n)
}

func (w *world) freeze(i int) { w.nodes[i].frozen = true }

func (w *world) thaw(i int) {
	n := w.nodes[i]
	n.frozen = false
	n.thawed = w.now
	// Its clock has moved while nothing ran.
	n.core.Tick(w.now)
	w.carry(n)
}

// TestWorld drives two nodes through faults; check holds after every step, and when
// the faults are over everything ends and the session is back.
func TestWorld(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(rt, rapid.Uint64().Draw(rt, "seed"))
		node := rapid.IntRange(0, 1)
		asked := 0
		rt.Repeat(map[string]func(*rapid.T){
			"demand": func(rt *rapid.T) {
				if i := node.Draw(rt, "node"); !w.nodes[i].frozen {
					asked++
					w.demand(i, rapid.IntRange(1, 5).Draw(rt, "keys"), time.Duration(rapid.IntRange(1, 4000).Draw(rt, "timeout"))*ms)
				}
			},
			"lookup": func(rt *rapid.T) {
				if i := node.Draw(rt, "node"); !w.nodes[i].frozen {
					w.lookup(i, rapid.IntRange(1, 5).Draw(rt, "keys"))
				}
			},
			"abort": func(rt *rapid.T) {
				n := w.nodes[node.Draw(rt, "node")]
				if !n.frozen && n.core.nextJob > 0 {
					n.core.Abort(w.now, JobID(rapid.Uint64Range(1, uint64(n.core.nextJob)).Draw(rt, "job")), "a whim")
					w.carry(n)
				}
			},
			"data lost": func(rt *rapid.T) {
				if n := w.nodes[node.Draw(rt, "node")]; !n.frozen {
					n.core.DataLost(w.now, "reset")
					w.carry(n)
				}
			},
			"freeze": func(rt *rapid.T) { w.freeze(node.Draw(rt, "node")) },
			"thaw": func(rt *rapid.T) {
				if i := node.Draw(rt, "node"); w.nodes[i].frozen {
					w.thaw(i)
				}
			},
			"disconnect": func(rt *rapid.T) {
				if i := node.Draw(rt, "node"); !w.nodes[i].frozen && w.nodes[i].conn != 0 {
					w.hangUp(i)
					w.nodes[i].core.Disconnected(w.now, "reset")
					w.carry(w.nodes[i])
				}
			},
			"restart": func(rt *rapid.T) { w.boot(node.Draw(rt, "node")) },
			"forget": func(rt *rapid.T) {
				w.nodes[node.Draw(rt, "node")].forgets = rapid.Bool().Draw(rt, "forgets")
			},
			"network":  func(rt *rapid.T) { w.down = rapid.Bool().Draw(rt, "down") },
			"cut data": func(rt *rapid.T) { w.cut = rapid.Bool().Draw(rt, "cut") },
			"time": func(rt *rapid.T) {
				w.run(w.now + time.Duration(rapid.IntRange(1, 1500).Draw(rt, "ms"))*ms)
			},
			"": func(*rapid.T) { w.tick(); w.check() },
		})
		w.down, w.cut = false, false
		for i := range w.nodes {
			if w.nodes[i].frozen {
				w.thaw(i)
			}
		}
		w.run(w.now + 10*time.Second)
		for i, n := range w.nodes {
			require.True(rt, n.core.Idle(), "node %d has jobs", i)
			require.Equal(rt, Ready, n.core.State(), "node %d", i)
		}
		// The session that is back works: a demand that the host answers ends by it.
		id := w.demand(0, 3, 4*time.Second)
		w.run(w.now + 5*time.Second)
		require.NotContains(rt, w.nodes[0].demands, id)
	})
}

// TestDeterministic: the same inputs give the same effects.
func TestDeterministic(t *testing.T) {
	var causes map[Cause]int
	lapses, words := 0, 0
	trace := func() string {
		w := newWorld(t, 7)
		causes = w.causes
		w.nodes[1].forgets = true
		defer func() { lapses, words = w.lapses, w.words }()
		for i := range 120 {
			w.demand(i%2, 1+i%5, time.Duration(1+i%3)*600*ms)
			w.lookup(i%2, 3)
			w.run(w.now + 130*ms)
			if i%13 == 12 {
				w.hangUp(0)
				w.nodes[0].core.Disconnected(w.now, "reset")
				w.carry(w.nodes[0])
			}
		}
		return fmt.Sprint(w.seq, w.rnd.Uint64(), w.nodes[0].core.Status(w.now), w.nodes[1].core.Status(w.now))
	}
	require.Equal(t, trace(), trace())
	for _, c := range []Cause{Transferred, Unmatched, Checksum, Deadline, TransferLate, PushFailed, Disconnected} {
		require.NotZero(t, causes[c], "the run shows %v", c)
	}
	require.NotZero(t, lapses, "the run shows leases that lapse")
	require.NotZero(t, words, "the run shows keys that end before their demand")
}
