package session

import (
	"fmt"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// A query is a lookup of the peer that the host has not answered.
type query struct{ Query }

// keyState of a producer's job.
type keyState uint8

const (
	keyPending keyState = iota // the host has not said a word
	keyPushing                 // named as available
	keyEnded
)

// A producerJob is a demand of the peer.
type producerJob struct {
	Job
	state   []keyState
	results []Result
	pending int
	pushing int
	last    bool
	told    []bool        // per key: the consumer knows that it will come; nil before the first
	lease   time.Duration // when what is bound to the job is let go, unless it is renewed
}

// refusedTextsMax bounds the different refusals of one Supply; with TextBytesMax it
// keeps the message far below MessageBytesMax.
const refusedTextsMax = 64

// reasonTexts says each reason for people.
var reasonTexts = map[sessionpb.Reason]string{
	sessionpb.Reason_REASON_NOT_SUPPLIED:    "not in the request's supply",
	sessionpb.Reason_REASON_EVICTED:         "evicted before the demand came",
	sessionpb.Reason_REASON_NO_ROOM:         "no room to keep it",
	sessionpb.Reason_REASON_STORE_FAILED:    "its store failed",
	sessionpb.Reason_REASON_REQUEST_ABORTED: "the producer's request was aborted",
	sessionpb.Reason_REASON_NOT_BEGUN:       "the producer has not begun the request by the deadline",
	sessionpb.Reason_REASON_NO_LAST_WORD:    "the producer said no last word by the deadline",
	sessionpb.Reason_REASON_BUSY:            "a bound of the producer is reached",
	sessionpb.Reason_REASON_LEG:             "the pair is not accepted for this leg",
	sessionpb.Reason_REASON_DRAINING:        "the producer is draining",
	sessionpb.Reason_REASON_FINISHED:        "the transfer is finished and what it held is gone",
	sessionpb.Reason_REASON_MISS:            "not in the producer's tier",
	sessionpb.Reason_REASON_NOT_PLANNED:     "not in the plan of the producer's request",
}

// ReasonText says a reason for people.
func ReasonText(r sessionpb.Reason) string {
	if s, ok := reasonTexts[r]; ok {
		return s
	}
	return "refused by the producer"
}

// admit reports why a new job of the peer is not taken.
func (c *Core) admit(keys int) sessionpb.Reason {
	l := &c.cfg.Limits
	switch {
	case c.localDraining:
		return sessionpb.Reason_REASON_DRAINING
	case c.jobs.len()+c.queries.len() >= l.JobsMax || c.jobsKeys+keys > l.JobKeysMax:
		return sessionpb.Reason_REASON_BUSY
	}
	return sessionpb.Reason_REASON_NONE
}

func (c *Core) receiveLookup(m *sessionpb.Lookup) error {
	id := JobID(m.GetJob())
	if err := c.fresh("Lookup", id); err != nil {
		return err
	}
	keys, err := unpackKeys("Lookup", m.Keys, c.cfg.Limits.KeysMax)
	if err != nil {
		return err
	}
	if len(m.RequestId) > c.cfg.Limits.IDBytesMax {
		return fmt.Errorf("Lookup: request_id has %d bytes; at most %d are allowed", len(m.RequestId), c.cfg.Limits.IDBytesMax)
	}
	if r := c.admit(len(keys)); r != sessionpb.Reason_REASON_NONE {
		c.sendStates(id, abi.NewStates(len(keys)), len(keys), r)
		return nil
	}
	q := &query{Query{ID: id, RequestID: m.RequestId, Keys: keys, Deadline: c.now + wait(m.DeadlineMs, c.cfg.Limits.RequestDeadlineMax)}}
	c.queries.put(id, q)
	c.waits(q.Deadline)
	c.jobsKeys += len(keys)
	c.emit(LookedUp{q.Query})
	return nil
}

func (c *Core) dropQuery(q *query) {
	c.queries.drop(q.ID)
	c.jobsKeys -= len(q.Keys)
}

func (c *Core) sendStates(id JobID, states abi.States, n int, r sessionpb.Reason) {
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_States{States: &sessionpb.States{
		Job: uint64(id), States: states.AppendWire(nil, n), Reason: r}}})
}

// AnswerLookup answers a query; it reports false when nobody waits for it any more.
func (c *Core) AnswerLookup(now time.Duration, id JobID, states abi.States) bool {
	c.advance(now)
	q := c.queries.get(id)
	if q == nil || len(states) < abi.StatesWords(len(q.Keys)) {
		return false
	}
	c.dropQuery(q)
	c.sendStates(id, states, len(q.Keys), sessionpb.Reason_REASON_NONE)
	return true
}

func (c *Core) receiveDemand(m *sessionpb.Demand) error {
	l := &c.cfg.Limits
	id := JobID(m.GetJob())
	if err := c.fresh("Demand", id); err != nil {
		return err
	}
	keys, err := unpackKeys("Demand", m.Keys, l.KeysMax)
	if err != nil {
		return err
	}
	if len(m.Slots) != len(keys) || len(m.Epochs) != len(keys) {
		return fmt.Errorf("Demand: %d keys, %d slots, %d epochs", len(keys), len(m.Slots), len(m.Epochs))
	}
	for _, s := range []string{m.TransferId, m.RequestId, m.Leg} {
		if len(s) > l.IDBytesMax {
			return fmt.Errorf("Demand: an id has %d bytes; at most %d are allowed", len(s), l.IDBytesMax)
		}
	}
	j := &producerJob{
		Job: Job{ID: id, TransferID: m.TransferId, RequestID: m.RequestId, Leg: m.Leg, Keys: keys, Slots: m.Slots, Epochs: m.Epochs,
			Deadline: c.now + wait(m.DeadlineMs, l.RequestDeadlineMax)},
		pending: len(keys),
	}
	r := c.admit(len(keys))
	if r == sessionpb.Reason_REASON_NONE && !c.maySupply(m.Leg) {
		r = sessionpb.Reason_REASON_LEG
	}
	if r != sessionpb.Reason_REASON_NONE {
		all := make([]uint32, len(keys))
		for i := range all {
			all[i] = uint32(i)
		}
		text := ReasonText(r)
		if r == sessionpb.Reason_REASON_LEG && c.legs.why != "" {
			text = cut(text+": "+c.legs.why, l.TextBytesMax)
		}
		c.sendSupply(id, nil, []*sessionpb.Refused{{Indices: all, Reason: r, Text: text}}, true)
		return nil
	}
	j.state, j.results = make([]keyState, len(keys)), make([]Result, len(keys))
	c.jobs.put(id, j)
	c.waits(j.Deadline)
	c.jobsKeys += len(keys)
	c.emit(Demanded{j.Job})
	return nil
}

func (c *Core) sendSupply(id JobID, available []uint32, refused []*sessionpb.Refused, last bool) {
	c.sendWords(&sessionpb.Supply{Job: uint64(id), Available: available, Refused: refused, Last: last})
}

func (c *Core) sendWords(s *sessionpb.Supply) {
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Supply{Supply: s}})
}

// Supply says that keys of a job are here and are to be pushed.
func (c *Core) Supply(now time.Duration, id JobID, indices []uint32) bool {
	return c.Answer(now, id, Answer{Available: indices})
}

// Refuse says that keys of a job will not come.
func (c *Core) Refuse(now time.Duration, id JobID, refusals ...Refusal) bool {
	return c.Answer(now, id, Answer{Refused: refusals})
}

// LastWord says that nothing more comes for a job.
func (c *Core) LastWord(now time.Duration, id JobID) bool {
	return c.Answer(now, id, Answer{Last: true})
}

// Answer is the producer's word on keys of a job, in one message. Keys that have had
// a word are left out. It reports false when the job has ended.
func (c *Core) Answer(now time.Duration, id JobID, a Answer) bool {
	c.advance(now)
	j := c.jobs.get(id)
	if j == nil {
		return false
	}
	available := j.take(a.Available, keyPushing)
	if j.pushing == 0 { // what is bound from now on has a whole lease
		j.lease = c.now + c.cfg.Limits.Lease
		c.waits(j.lease)
	}
	j.pushing += len(available)
	var refused []*sessionpb.Refused
	for _, r := range a.Refused {
		text := cut(r.Text, c.cfg.Limits.TextBytesMax)
		if text == "" {
			text = ReasonText(r.Reason)
		}
		refused = j.refuse(refused, j.take(r.Indices, keyEnded), r.Reason, text)
	}
	if a.Last && j.pending > 0 {
		r := sessionpb.Reason_REASON_NOT_SUPPLIED
		refused = j.refuse(refused, j.takePending(), r, ReasonText(r))
	}
	last := !j.last && j.pending == 0
	j.last = j.pending == 0
	willCome := j.promise(a.WillCome)
	if len(available)+len(refused)+len(willCome) > 0 || last {
		c.sendWords(&sessionpb.Supply{Job: uint64(id), Available: available, Refused: refused, Last: last, WillCome: willCome})
	}
	if len(available) > 0 {
		c.emit(Push{Job: id, Indices: available})
	}
	c.settleJob(j)
	return true
}

// take moves the pending keys among indices to a state and returns them.
func (j *producerJob) take(indices []uint32, to keyState) []uint32 {
	var out []uint32
	for _, i := range indices {
		if int64(i) < int64(len(j.state)) && j.state[i] == keyPending {
			j.state[i] = to
			j.pending--
			out = append(out, i)
		}
	}
	return out
}

// promise notes which pending keys among indices the consumer is told of, once each.
func (j *producerJob) promise(indices []uint32) []uint32 {
	var out []uint32
	for _, i := range indices {
		if int64(i) >= int64(len(j.state)) || j.state[i] != keyPending {
			continue
		}
		if j.told == nil {
			j.told = make([]bool, len(j.state))
		}
		if !j.told[i] {
			j.told[i] = true
			out = append(out, i)
		}
	}
	return out
}

func (j *producerJob) takePending() []uint32 {
	out := make([]uint32, 0, j.pending)
	for i, s := range j.state {
		if s == keyPending {
			j.state[i] = keyEnded
			out = append(out, uint32(i))
		}
	}
	j.pending = 0
	return out
}

// refuse records the refusal of keys and adds it to a Supply.
func (j *producerJob) refuse(to []*sessionpb.Refused, indices []uint32, r sessionpb.Reason, text string) []*sessionpb.Refused {
	if len(indices) == 0 {
		return to
	}
	for _, i := range indices {
		j.results[i] = Result{Cause: Unmatched, Reason: r, Text: text}
	}
	for _, m := range to {
		if m.Reason == r && (m.Text == text || len(to) >= refusedTextsMax) {
			m.Indices = append(m.Indices, indices...)
			return to
		}
	}
	if len(to) >= refusedTextsMax {
		text = ReasonText(r)
	}
	return append(to, &sessionpb.Refused{Indices: indices, Reason: r, Text: text})
}

// Pushed tells how the push of one key ended: Transferred when all bytes are on the
// connection, else PushFailed, Checksum or NoData. It reports false when the job or
// the key has ended.
func (c *Core) Pushed(now time.Duration, id JobID, index int, cause Cause, text string) bool {
	c.advance(now)
	j := c.jobs.get(id)
	if j == nil || index < 0 || index >= len(j.state) || j.state[index] != keyPushing || cause == Open {
		return false
	}
	j.state[index] = keyEnded
	j.pushing--
	j.results[index] = Result{Cause: cause, Text: cut(text, c.cfg.Limits.TextBytesMax)}
	c.settleJob(j)
	return true
}

// settleJob ends a job of which every key has ended.
func (c *Core) settleJob(j *producerJob) {
	if j.last && j.pushing == 0 && j.pending == 0 {
		c.endJob(j, "", true)
	}
}

// stopJob ends the open keys of a job; what is being pushed is cancelled.
func (c *Core) stopJob(j *producerJob, cause Cause, text string) {
	if j.pushing > 0 {
		c.emit(CancelPush{Job: j.ID, Reason: text})
	}
	for i, s := range j.state {
		if s != keyEnded {
			j.state[i] = keyEnded
			j.results[i] = Result{Cause: cause, Text: text}
		}
	}
	j.pending, j.pushing = 0, 0
}

// endJob forgets a job; tell sends the consumer its Done.
func (c *Core) endJob(j *producerJob, reason string, tell bool) {
	c.jobs.drop(j.ID)
	c.jobsKeys -= len(j.Keys)
	if tell && c.link == linkUp {
		codes := make([]sessionpb.Code, len(j.results))
		for i, r := range j.results {
			codes[i] = producerCode(r.Cause)
		}
		c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Done{Done: &sessionpb.Done{Job: uint64(j.ID), Codes: codes}}})
	}
	c.emit(JobEnded{Job: j.ID, Results: j.results, Reason: reason})
}

func producerCode(c Cause) sessionpb.Code {
	switch c {
	case Transferred:
		return sessionpb.Code_CODE_SENT
	case Unmatched:
		return sessionpb.Code_CODE_REFUSED
	case Checksum:
		return sessionpb.Code_CODE_CHECKSUM
	case NoData:
		return sessionpb.Code_CODE_NO_DATA
	case PushFailed:
		return sessionpb.Code_CODE_PUSH_FAILED
	case Aborted, Deadline, PeerSuspect, Lapsed:
		return sessionpb.Code_CODE_CANCELLED
	}
	return sessionpb.Code_CODE_FAILED
}

// expireJob ends a job at its consumer's deadline. The last word is spoken for what
// is pending; a push is cancelled.
func (c *Core) expireJob(j *producerJob) {
	if j.pending > 0 {
		r := sessionpb.Reason_REASON_NO_LAST_WORD
		c.sendSupply(j.ID, nil, j.refuse(nil, j.takePending(), r, ReasonText(r)), true)
	}
	const text = "the consumer's deadline passed"
	c.stopJob(j, Deadline, text)
	c.endJob(j, text, true)
}

// leased says whether a job's end may come from its lease: something is bound to it, and
// the consumer is one that renews.
func (c *Core) leased(j *producerJob) bool {
	return j.pushing > 0 && c.hello.GetCaps().GetLeaseMs() > 0
}

// lapse ends a job whose consumer lives and does not want what is bound to it any more.
func (c *Core) lapse(j *producerJob) {
	text := fmt.Sprintf("the consumer did not renew its lease within deadlines.lease_ms, %v", c.cfg.Limits.Lease)
	c.stopJob(j, Lapsed, text)
	c.endJob(j, text, true)
}

// receiveRenew gives jobs another lease. One that has ended is no news to the consumer
// yet.
func (c *Core) receiveRenew(m *sessionpb.Renew) error {
	if n := len(m.Jobs); n > c.cfg.Limits.JobsMax {
		return fmt.Errorf("message Renew for %d jobs; at most %d are allowed", n, c.cfg.Limits.JobsMax)
	}
	for _, id := range m.Jobs {
		if err := c.seen("Renew", JobID(id)); err != nil {
			return err
		}
		if j := c.jobs.get(JobID(id)); j != nil {
			j.lease = c.now + c.cfg.Limits.Lease
		}
	}
	return nil
}

// receiveAbort cancels a job of the peer, whatever state it is in, and says so.
func (c *Core) receiveAbort(m *sessionpb.Abort) error {
	id := JobID(m.GetJob())
	if err := c.seen("Abort", id); err != nil {
		return err
	}
	if q := c.queries.get(id); q != nil {
		c.dropQuery(q)
	}
	if j := c.jobs.get(id); j != nil {
		text := cut(m.Reason, c.cfg.Limits.TextBytesMax)
		c.stopJob(j, Aborted, text)
		c.endJob(j, text, false)
	}
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_AbortAck{AbortAck: &sessionpb.AbortAck{Job: uint64(id)}}})
	return nil
}

// receiveRelease ends a job of which the consumer has everything, and lets go what
// is held for a lookup.
func (c *Core) receiveRelease(m *sessionpb.Done) error {
	id := JobID(m.GetJob())
	if err := c.seen("Done (release)", id); err != nil {
		return err
	}
	if len(m.Codes) == 0 {
		c.emit(Released{id})
		return nil
	}
	j := c.jobs.get(id)
	if j == nil {
		return nil // its own end came first
	}
	if len(m.Codes) != len(j.results) {
		return fmt.Errorf("message Done (release) for job %d: %d codes for %d keys", id, len(m.Codes), len(j.results))
	}
	const text = "the consumer has ended it"
	if j.pushing > 0 { // the host has not reported them; the consumer may know better
		c.emit(CancelPush{Job: id, Reason: text})
	}
	for i, code := range m.Codes {
		if code == sessionpb.Code_CODE_SENT && j.state[i] == keyPushing {
			j.state[i] = keyEnded
			j.results[i] = Result{Cause: Transferred}
		}
	}
	j.pushing = 0
	c.stopJob(j, Aborted, text)
	c.endJob(j, text, false)
	return nil
}
