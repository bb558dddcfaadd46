package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tierd/tierd/host/session"
)

// A leg is what the glue must know of one. A new leg is a row here, and what its consumer
// and producer do differently.
type leg struct {
	// eager: the consumer plans without lookups, on what the producer of the same prompt
	// must supply.
	eager bool
	// transfer: supply and demand meet at the producer's join, under a transfer id.
	transfer bool
	// foretold: the producer says at its begin what will come, and what never does.
	foretold bool
}

var legs = map[string]leg{
	session.LegPD:     {eager: true, transfer: true},
	session.LegDemand: {eager: true, transfer: true, foretold: true},
	session.LegProbe:  {},
}

// legNames is the order in which schedules draw them.
var legNames = []string{session.LegPD, session.LegDemand, session.LegProbe}

// A Schedule is everything that a run is made of, besides the delays of messages, which
// follow from its seed.
type Schedule struct {
	Seed    uint64
	Nodes   int
	Model   int
	Slots   int // of each tier
	JobsMax int // of each session and direction
	Encode  bool
	// DialBoth: of each pair both sides dial; else the smaller one.
	DialBoth bool
	// RulesDiffer: nodes run two versions of the rules; what the check of a pair says follows
	// from the seed.
	RulesDiffer bool
	// FewKeys: a message names only a few keys, and not equally many at each node.
	FewKeys bool
	// TightBudget: a peer may keep little more than what one pull needs.
	TightBudget bool
	Requests    []Request
	Faults      []Fault
}

// A Request is one prompt that a producer computes and a consumer wants.
type Request struct {
	ID                 int
	At                 time.Duration // when the consumer begins
	Ahead              time.Duration // how much earlier the producer begins; negative is later
	Consumer, Producer int
	NoProducer         bool // its engine never begins
	Leg                string
	Text               text
	Tokens, Generate   uint64
	Short              uint64 // tokens that the producer's prompt lacks: it supplies less than is demanded
	// The producer's engine: queue, step, preemption.
	Queue, StepTime time.Duration
	StepTokens      uint64
	PreemptAt       uint64
	Preempt         time.Duration
	Native          bool          // its GPU has as much of the prompt as may be reused
	ProducerAbort   time.Duration // after its begin; 0 = never
	// The consumer's engine.
	Timeout       time.Duration
	ConsumerAbort time.Duration // after its begin; 0 = never
	LoadAfter     time.Duration

	outcome string
	done    bool
	crowded bool   // a tier had no room for some of it, or a session no place for a job, or others were in work
	resumed uint64 // where the consumer's engine goes on
}

func (r *Request) transfer() string { return fmt.Sprint("t", r.ID) }

// A Fault strikes at a message boundary: when the message of its phase, or one after it,
// is sent or delivered between two nodes; at By if there is none until then.
type Fault struct {
	Kind      Kind
	Phase     Phase
	A, B      int  // consumer and producer
	OnB       bool // the victim, where one node is: B, else A
	Skip      int  // boundaries to let pass
	Delivered bool // when the message is delivered, not when it is sent
	By        time.Duration
	Lasts     time.Duration
	Strength  int64 // of its kind: a clock's rate, a delay in milliseconds, frames
}

// Least of every drawn run.
const (
	requestsMin = 20
	faultsMin   = 3
)

// Slots of a tier: the least holds a pull after the faults beside what others hold; the most
// has room for everything that a run stores.
const (
	slotsMin = 40
	slotsMax = 120
)

// Draw makes the schedule of a seed.
func Draw(seed uint64) *Schedule {
	r := stream(seed, 7)
	s := &Schedule{Seed: seed, Nodes: 2 + r.n(4), Model: r.n(len(models)), Slots: slotsMin + r.n(slotsMax-slotsMin+1), JobsMax: 1024, Encode: r.one(16)}
	switch r.n(16) {
	case 0:
		s.Nodes = 6 + r.n(12)
	case 1:
		s.Nodes = 18 + r.n(33) // up to 50
	}
	if r.one(6) {
		s.JobsMax = 2 + r.n(3)
	}
	switch how := stream(seed, 8); how.n(8) { // a stream of its own: the rest of a seed stays as it was
	case 0, 1, 2:
		s.DialBoth = true
	case 3:
		s.RulesDiffer = true
	case 4:
		s.FewKeys, s.JobsMax = true, 1024
	case 5:
		s.TightBudget = true
	case 6:
		s.DialBoth, s.RulesDiffer = true, true
	}
	n := requestsMin + r.n(9)
	for i := range n {
		s.Requests = append(s.Requests, drawRequest(&r, s, i))
	}
	const cells = uint64(kinds) * uint64(phases)
	for i := range uint64(faultsMin + r.n(3)) {
		cell := (seed*faultsMin + i) % cells // seeds in a row fall into every cell of the table alike
		if i >= faultsMin {
			cell = r.next() % cells
		}
		s.Faults = append(s.Faults, drawFault(&r, s, Kind(cell/uint64(phases)), Phase(cell%uint64(phases))))
	}
	return s
}

func ms64(r *rng, lo, hi int64) time.Duration {
	return time.Duration(r.between(lo*1000, hi*1000)) * 1000
}

func drawRequest(r *rng, s *Schedule, id int) Request {
	q := Request{ID: id, At: ms64(r, 30, 3000), Consumer: r.n(s.Nodes), Leg: legNames[r.n(len(legNames))],
		Text: text{uint64(r.n(6)), uint64(r.n(4))}, Tokens: uint64(r.between(9, 100)),
		Queue: ms64(r, 0, 30), StepTime: ms64(r, 1, 25), StepTokens: uint64(r.between(4, 40)),
		Timeout: ms64(r, 100, 4000), LoadAfter: ms64(r, 0, 10), Native: r.one(3)}
	if q.Producer = r.n(s.Nodes - 1); q.Producer >= q.Consumer {
		q.Producer++
	}
	switch {
	case id == 0:
		q.At = ms64(r, 0, 20)
	case r.one(2): // soon after another one, so that they meet
		q.At = s.Requests[r.n(id)].At + ms64(r, 0, 20)
	}
	switch r.n(4) {
	case 0:
		q.Ahead = ms64(r, -100, 100)
	case 1:
		q.Ahead = ms64(r, -1500, 0) // late demand's other half: an early one
	default:
		q.Ahead = ms64(r, 20, 600)
	}
	if r.one(6) { // more than a small tier holds beside others
		q.Tokens = uint64(r.between(100, 250))
	}
	if r.one(3) {
		q.Generate = uint64(r.n(24))
	}
	if r.one(4) {
		q.PreemptAt, q.Preempt = uint64(r.between(1, int64(q.Tokens))), ms64(r, 50, 1500)
	}
	if r.one(8) {
		q.ProducerAbort = ms64(r, 1, 300)
	}
	if r.one(6) {
		q.ConsumerAbort = ms64(r, 0, 200)
	}
	q.NoProducer = r.one(16)
	if r.one(10) {
		q.Short = uint64(r.between(1, int64(q.Tokens)-1))
	}
	return q
}

// drawFault draws a fault, and sees to it that some request gives it its boundary.
func drawFault(r *rng, s *Schedule, kind Kind, phase Phase) Fault {
	q := &s.Requests[r.n(len(s.Requests))]
	f := Fault{Kind: kind, Phase: phase, OnB: r.one(2), Skip: r.n(3), Delivered: r.one(2),
		By: ms64(r, 200, 3600), Lasts: ms64(r, 5, 200)}
	if r.one(2) {
		f.Lasts = ms64(r, 200, 2600)
	}
	if f.Kind == KindForget { // longer than a lease, under a deadline that is longer still
		f.Lasts = ms64(r, 1100, 2600)
		q.Timeout = ms64(r, 2800, 4000)
	}
	switch f.Kind {
	case KindDrift:
		f.Strength = r.between(850, 1150)
	case KindSlow, KindSkew:
		f.Strength = r.between(5, 400)
	case KindCorrupt:
		f.Strength = r.between(1, 4)
	}
	switch f.Phase {
	case PhaseHello:
		if f.Skip = 0; r.one(2) || f.Kind == KindCutData { // not the first ones, which come at once
			f.Skip = 2 + r.n(2)
		}
	case PhaseLookup:
		q.Leg = session.LegProbe
	case PhaseAbort:
		q.ConsumerAbort, q.NoProducer = ms64(r, 1, 60), false
		q.Ahead, q.Leg, q.Tokens, f.Skip = ms64(r, -300, -100), session.LegPD, min(max(q.Tokens, 24), 100), 0
		q.Short = 0
	case PhaseSupply, PhaseTransfer, PhaseLastWord, PhaseDone:
		q.Ahead, q.NoProducer, q.ConsumerAbort = ms64(r, 0, 300), false, 0
	}
	f.A, f.B = q.Consumer, q.Producer
	return f
}

// keysMax is how many keys a message to a node may name.
func (s *Schedule) keysMax(i int) int {
	if s.FewKeys {
		return 3 + i%4
	}
	return session.DefaultLimits().KeysMax
}

// budgetSlots is a tight budget of a peer: a pull keeps up to 13 chunks.
const budgetSlots = 16

// rules is the version of the rules that a node runs.
func (s *Schedule) rules(i int) byte {
	if s.RulesDiffer {
		return byte(i % 2)
	}
	return 0
}

// accepted says what the check of a pair comes to; both sides come to the same.
func (s *Schedule) accepted(i, k int) bool {
	r := stream(s.Seed, 9, uint64(min(i, k)), uint64(max(i, k)))
	return s.rules(i) == s.rules(k) || !r.one(3)
}

// linked says whether two nodes know each other: those that a request or a fault names.
func (s *Schedule) linked(i, k int) bool {
	for q := range s.Requests {
		if c, p := s.Requests[q].Consumer, s.Requests[q].Producer; c == i && p == k || c == k && p == i {
			return true
		}
	}
	for f := range s.Faults {
		if a, b := s.Faults[f].A, s.Faults[f].B; a == i && b == k || a == k && b == i {
			return true
		}
	}
	return false
}

func (s *Schedule) lastFault() (at time.Duration) {
	for i := range s.Faults {
		at = max(at, s.Faults[i].By)
	}
	return at
}

func (s *Schedule) lastRequest() (at time.Duration) {
	for i := range s.Requests {
		at = max(at, s.Requests[i].At)
	}
	return at
}

// clone copies a schedule as it was before a run.
func (s *Schedule) clone() *Schedule {
	c := *s
	c.Requests, c.Faults = slices.Clone(s.Requests), slices.Clone(s.Faults)
	for i := range c.Requests {
		q := &c.Requests[i]
		q.outcome, q.done, q.crowded, q.resumed = "", false, false, 0
	}
	return &c
}

// String draws the schedule, for people and for a bug report.
func (s *Schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d nodes, model %s, %d slots, %d jobs a session; both dial: %v, rules differ: %v, few keys: %v, tight budget: %v\n",
		s.Seed, s.Nodes, models[s.Model%len(models)]().name, s.Slots, s.JobsMax, s.DialBoth, s.RulesDiffer, s.FewKeys, s.TightBudget)
	for i := range s.Requests {
		q := &s.Requests[i]
		fmt.Fprintf(&b, "  request %d: node %d from node %d, leg %s, %d+%d tokens of text %d.%d; begins %v, producer %v earlier", q.ID, q.Consumer, q.Producer,
			q.Leg, q.Tokens, q.Generate, q.Text.family, q.Text.branch, q.At, q.Ahead)
		if q.NoProducer {
			b.WriteString(", never")
		}
		if q.Short > 0 {
			fmt.Fprintf(&b, ", with %d tokens less", q.Short)
		}
		fmt.Fprintf(&b, "; deadline %v", q.Timeout)
		if q.ConsumerAbort > 0 {
			fmt.Fprintf(&b, "; consumer aborts after %v", q.ConsumerAbort)
		}
		if q.ProducerAbort > 0 {
			fmt.Fprintf(&b, "; producer aborts after %v", q.ProducerAbort)
		}
		if q.Preempt > 0 {
			fmt.Fprintf(&b, "; preempted at token %d for %v", q.PreemptAt, q.Preempt)
		}
		b.WriteByte('\n')
	}
	for i := range s.Faults {
		f := &s.Faults[i]
		at, on := "sent", f.A
		if f.Delivered {
			at = "delivered"
		}
		if f.OnB {
			on = f.B
		}
		fmt.Fprintf(&b, "  fault: %v at %v %d %s between nodes %d and %d, on %d, by %v, lasts %v, strength %d\n",
			f.Kind, f.Phase, f.Skip+1, at, f.A, f.B, on, f.By, f.Lasts, f.Strength)
	}
	return b.String()
}
