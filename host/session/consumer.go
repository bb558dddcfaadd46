package session

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// A lookup in work.
type lookup struct {
	id        JobID
	requestID string
	keys      []Key
	deadline  time.Duration
	sent      bool
}

// A demand in work.
type demand struct {
	id       JobID
	req      DemandRequest
	deadline time.Duration
	sent     bool
	open     int // keys that have not ended
	results  []Result
	late     []time.Duration // per key: when its bytes are late; 0 = not supplied
	promised []bool          // per key: the producer said that it will come; nil before the first
	next     time.Duration   // the earliest wait; may be too early, never too late
	spoken   bool            // a Supply came: the producer has begun the request
	told     bool            // the producer knows the fate of every key by itself
}

// refusal reports why a new job cannot be given to the peer now.
func (c *Core) refusal(keys int, ids ...string) (Cause, string) {
	l := &c.cfg.Limits
	most := l.KeysMax
	if c.link == linkUp { // else its Hello will say what it takes
		most = c.keysMax()
	}
	for _, id := range ids {
		if len(id) > l.IDBytesMax {
			return Invalid, fmt.Sprintf("id %.32q... has %d bytes; at most %d are allowed", id, len(id), l.IDBytesMax)
		}
	}
	switch {
	case keys == 0:
		return Invalid, "no keys"
	case keys > most:
		return Invalid, fmt.Sprintf("%d keys; at most %d go into one message", keys, most)
	case c.localDraining:
		return Refused, "this node is draining"
	case c.peerDraining:
		return Refused, "the peer is draining"
	case c.state == Suspect || c.state == Dead:
		return PeerSuspect, fmt.Sprintf("peer %s is %v", c.cfg.PeerID, c.state)
	case c.lookups.len()+c.demands.len() >= l.JobsMax:
		return Busy, fmt.Sprintf("%d jobs are in work with %s, the most allowed", l.JobsMax, c.cfg.PeerID)
	case c.demandKeys+keys > l.JobKeysMax:
		return Busy, fmt.Sprintf("%d keys are in work with %s and %d more are asked for; at most %d are allowed", c.demandKeys, c.cfg.PeerID, keys, l.JobKeysMax)
	}
	return Open, ""
}

// Lookup asks the peer for states. It waits at most timeout, and never longer than
// Limits.Lookup; 0 is Limits.Lookup. LookupDone is the answer, at once when the peer
// cannot be asked.
func (c *Core) Lookup(now time.Duration, requestID string, keys []Key, timeout time.Duration) JobID {
	c.advance(now)
	c.nextJob++
	if timeout <= 0 || timeout > c.cfg.Limits.Lookup {
		timeout = c.cfg.Limits.Lookup
	}
	l := &lookup{id: c.nextJob, requestID: requestID, keys: keys, deadline: c.now + timeout}
	if cause, text := c.refusal(len(keys), requestID); cause != Open {
		c.emit(LookupDone{Job: l.id, States: abi.NewStates(len(keys)), Keys: len(keys), Cause: cause, Text: text})
		return l.id
	}
	c.lookups.put(l.id, l)
	c.waits(l.deadline)
	c.demandKeys += len(keys)
	c.sendLookup(l)
	return l.id
}

func (c *Core) sendLookup(l *lookup) {
	if c.link != linkUp {
		return
	}
	if most := c.keysMax(); len(l.keys) > most {
		c.endLookup(l, Invalid, c.tooManyKeys(len(l.keys), most))
		return
	}
	l.sent = true
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Lookup{Lookup: &sessionpb.Lookup{
		Job: uint64(l.id), RequestId: l.requestID, Keys: packKeys(l.keys), DeadlineMs: milliseconds(l.deadline - c.now)}}})
}

// endLookup ends a lookup without an answer.
func (c *Core) endLookup(l *lookup, cause Cause, text string) {
	c.forgetLookup(l)
	c.emit(LookupDone{Job: l.id, States: abi.NewStates(len(l.keys)), Keys: len(l.keys), Cause: cause, Text: text})
	if l.sent {
		c.sendAbort(l.id, text)
	}
}

func (c *Core) forgetLookup(l *lookup) {
	c.lookups.drop(l.id)
	c.demandKeys -= len(l.keys)
}

func (c *Core) sendAbort(id JobID, reason string) {
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Abort{Abort: &sessionpb.Abort{
		Job: uint64(id), Reason: cut(reason, c.cfg.Limits.TextBytesMax)}}})
}

func (c *Core) receiveStates(m *sessionpb.States) error {
	id := JobID(m.GetJob())
	if err := c.issued("States", id); err != nil {
		return err
	}
	l := c.lookups.get(id)
	if l == nil {
		return nil // late
	}
	states := abi.NewStates(len(l.keys))
	if !states.DecodeWire(m.States, len(l.keys)) {
		return fmt.Errorf("message States for job %d: %d bytes for %d keys; %d are expected", id, len(m.States), len(l.keys), 8*abi.StatesWords(len(l.keys)))
	}
	c.forgetLookup(l)
	text := ""
	if m.Reason != sessionpb.Reason_REASON_NONE {
		text = ReasonText(m.Reason)
	}
	c.emit(LookupDone{Job: id, States: states, Keys: len(l.keys), Cause: Answered, Text: text})
	return nil
}

// Release tells the peer that what it holds for a lookup may be let go.
func (c *Core) Release(now time.Duration, id JobID) {
	c.advance(now)
	if c.issued("Release", id) == nil {
		c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Done{Done: &sessionpb.Done{Job: uint64(id), Release: true}}})
	}
}

// Demand asks the peer for the bytes of keys. DemandDone is the one end, at once
// when the peer cannot be asked.
func (c *Core) Demand(now time.Duration, req DemandRequest) JobID {
	c.advance(now)
	c.nextJob++
	n := len(req.Keys)
	timeout := req.Timeout
	if timeout <= 0 {
		timeout = c.cfg.Limits.RequestDeadline
	}
	timeout = min(timeout, c.cfg.Limits.RequestDeadlineMax)
	d := &demand{id: c.nextJob, req: req, deadline: c.now + timeout, open: n, results: make([]Result, n)}
	d.next = d.deadline
	cause, text := c.refusal(n, req.TransferID, req.RequestID, req.Leg)
	if len(req.Slots) != n || len(req.Epochs) != n {
		cause, text = Invalid, fmt.Sprintf("%d keys, %d slots and %d epochs; each key needs one of both", n, len(req.Slots), len(req.Epochs))
	}
	if cause != Open {
		for i := range d.results {
			d.results[i] = Result{Cause: cause, Text: text}
		}
		c.emit(DemandDone{Job: d.id, Results: d.results})
		return d.id
	}
	d.late = make([]time.Duration, n)
	c.demands.put(d.id, d)
	c.waits(d.next)
	c.demandKeys += n
	c.sendDemand(d)
	return d.id
}

func (c *Core) tooManyKeys(keys, most int) string {
	return fmt.Sprintf("%d keys; %s takes at most %d in one message", keys, c.cfg.PeerID, most)
}

func (c *Core) sendDemand(d *demand) {
	if c.link != linkUp {
		return
	}
	if !c.mayDemand(d.req.Leg) {
		c.endDemand(d, Refused, c.legText(d.req.Leg))
		return
	}
	if most := c.keysMax(); len(d.req.Keys) > most {
		c.endDemand(d, Invalid, c.tooManyKeys(len(d.req.Keys), most))
		return
	}
	d.sent = true
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Demand{Demand: &sessionpb.Demand{
		Job: uint64(d.id), TransferId: d.req.TransferID, RequestId: d.req.RequestID, Leg: d.req.Leg,
		Keys: packKeys(d.req.Keys), Slots: d.req.Slots, Epochs: d.req.Epochs, DeadlineMs: milliseconds(d.deadline - c.now)}}})
}

// endKey ends one key; it reports whether the key was open.
func (c *Core) endKey(d *demand, i int, r Result) bool {
	if d.results[i].Cause != Open {
		return false
	}
	if d.late[i] != 0 {
		c.owed -= c.chunkBytes(&d.req.Keys[i])
	}
	d.results[i] = r
	d.open--
	return true
}

// endDemand ends every open key of a demand for one cause.
func (c *Core) endDemand(d *demand, cause Cause, text string) {
	for i := range d.results {
		c.endKey(d, i, Result{Cause: cause, Text: text})
	}
	c.settle(d)
}

// settle ends a demand whose last key has ended.
func (c *Core) settle(d *demand) {
	if d.open > 0 || c.demands.get(d.id) != d {
		return
	}
	c.demands.drop(d.id)
	c.demandKeys -= len(d.results)
	c.emit(DemandDone{Job: d.id, Results: d.results})
	if !d.sent || d.told {
		return
	}
	codes := make([]sessionpb.Code, len(d.results))
	for i, r := range d.results {
		switch r.Cause {
		case Transferred:
			codes[i] = sessionpb.Code_CODE_SENT
		case Unmatched, Busy, Refused:
			codes[i] = sessionpb.Code_CODE_REFUSED
		case Checksum:
			codes[i] = sessionpb.Code_CODE_CHECKSUM
		case PushFailed:
			codes[i] = sessionpb.Code_CODE_PUSH_FAILED
		default: // the producer may still hold it
			c.sendAbort(d.id, r.Cause.String()+": "+r.Text)
			return
		}
	}
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Done{Done: &sessionpb.Done{Job: uint64(d.id), Release: true, Codes: codes}}})
}

// expireDemand ends the keys of a demand whose waits are over.
func (c *Core) expireDemand(d *demand) {
	if c.now >= d.deadline {
		for i, at := range d.late {
			if at != 0 {
				c.endKey(d, i, Result{Cause: TransferLate, Text: "supplied, but its bytes did not come by the request's deadline"})
			}
		}
		c.endSilent(d)
		return
	}
	d.next = d.deadline
	for i, at := range d.late {
		if at == 0 || d.results[i].Cause != Open {
			continue
		}
		if at <= c.now {
			c.endKey(d, i, Result{Cause: TransferLate, Text: "supplied, but its bytes did not come within deadlines.transfer_ms and their own time"})
			continue
		}
		d.next = min(d.next, at)
	}
	c.settle(d)
}

// endSilent ends the keys of which the producer has said no word by the request's
// deadline. Where it owed one, the reason says so.
func (c *Core) endSilent(d *demand) {
	r := Result{Cause: Deadline, Text: "no session with the producer by the request's deadline"}
	if d.sent {
		r.Text = "no word of the producer by the request's deadline"
	}
	switch {
	case d.sent && d.req.Leg == LegDemand: // where a producer that has begun says so
		r.Reason, r.Text = sessionpb.Reason_REASON_NOT_BEGUN, "the producer had not begun the request by its deadline"
	case d.sent && d.req.Leg != LegProbe:
		r.Reason, r.Text = sessionpb.Reason_REASON_NO_LAST_WORD, "the producer had not begun or not finished the request by its deadline"
	}
	unfinished := Result{Cause: Deadline, Reason: sessionpb.Reason_REASON_NO_LAST_WORD, Text: "the producer had not finished the request by its deadline"}
	for i := range d.results {
		if d.spoken && d.req.Leg != LegProbe {
			c.endKey(d, i, unfinished)
		}
		c.endKey(d, i, r)
	}
	c.settle(d)
}

// supplied notes that the bytes of keys are coming and limits the wait for them. All
// that the peer owes shares the data connections, so all of it counts.
func (c *Core) supplied(d *demand, fresh []int) {
	if len(fresh) == 0 {
		return
	}
	if c.owed == 0 {
		c.renewAt = c.now + c.renewal()
		c.waits(c.renewAt)
	}
	for _, i := range fresh {
		c.owed += c.chunkBytes(&d.req.Keys[i])
	}
	at := c.now + c.cfg.Limits.transfer(c.owed)
	for _, i := range fresh {
		d.late[i] = at
	}
	d.next = min(d.next, at)
	c.waits(at)
}

// renewal returns the pause between two renewals of what the peer has bound to this
// node's demands; 0 when the peer takes none.
func (c *Core) renewal() time.Duration {
	return c.cfg.Limits.renewal(c.hello.GetCaps().GetLeaseMs())
}

// renew tells the producer which demands still wait for bytes.
func (c *Core) renew() {
	c.renewAt = c.now + c.renewal()
	c.soonest = 0
	var jobs []uint64
	for id, d := range c.demands.all() {
		if d.awaitsBytes() {
			jobs = append(jobs, uint64(id))
		}
	}
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Renew{Renew: &sessionpb.Renew{Jobs: jobs}}})
}

// awaitsBytes says whether a key of a demand is supplied and not there.
func (d *demand) awaitsBytes() bool {
	for i, at := range d.late {
		if at != 0 && d.results[i].Cause == Open {
			return true
		}
	}
	return false
}

// chunkBytes returns the size of a key's chunk.
func (c *Core) chunkBytes(k *Key) uint64 {
	h := c.cfg.Hello
	g := binary.BigEndian.Uint32(k[KeyBytes-4:])
	if groups := h.Layout.Groups; int64(g) < int64(len(groups)) && groups[g].GetChunkBytes() > 0 {
		return groups[g].ChunkBytes
	}
	return h.SlotBytes
}

func (c *Core) receiveSupply(m *sessionpb.Supply) error {
	id := JobID(m.GetJob())
	if err := c.issued("Supply", id); err != nil {
		return err
	}
	d := c.demands.get(id)
	if d == nil {
		return nil // late
	}
	if err := checkSupply(m, uint32(len(d.results))); err != nil {
		return err
	}
	d.spoken = true
	c.supplied(d, d.fresh(m.Available))
	w := Word{Job: id, WillCome: d.promise(m.WillCome)}
	refuse := func(i uint32, r Result) {
		if c.endKey(d, int(i), r) {
			w.Refused, w.Results = append(w.Refused, i), append(w.Results, r)
		}
	}
	for _, r := range m.Refused {
		res := c.refusedResult(r)
		for _, i := range r.GetIndices() {
			refuse(i, res)
		}
	}
	if m.Last {
		for i := range d.late {
			if d.late[i] == 0 {
				refuse(uint32(i), Result{Cause: Unmatched, Reason: sessionpb.Reason_REASON_NOT_SUPPLIED, Text: "the producer's last word does not name it"})
			}
		}
	}
	if d.open > 0 && len(w.Refused)+len(w.WillCome) > 0 { // else its end says it all
		c.emit(w)
	}
	c.settle(d)
	return nil
}

// checkSupply reports an index that a demand of n keys does not have.
func checkSupply(m *sessionpb.Supply, n uint32) error {
	for _, i := range m.Available {
		if i >= n {
			return fmt.Errorf("Supply for job %d: key %d of %d", m.Job, i, n)
		}
	}
	for _, i := range m.WillCome {
		if i >= n {
			return fmt.Errorf("Supply for job %d: key %d of %d will come", m.Job, i, n)
		}
	}
	for _, r := range m.Refused {
		for _, i := range r.GetIndices() {
			if i >= n {
				return fmt.Errorf("Supply for job %d: refused key %d of %d", m.Job, i, n)
			}
		}
	}
	return nil
}

// fresh returns the keys of a Supply that it is news of.
func (d *demand) fresh(available []uint32) []int {
	var fresh []int
	named := make([]bool, len(d.results))
	for _, i := range available {
		if !named[i] && d.late[i] == 0 && d.results[i].Cause == Open {
			named[i] = true // a second mention is no news
			fresh = append(fresh, int(i))
		}
	}
	return fresh
}

// promise notes keys that will come and returns those that it is news of.
func (d *demand) promise(willCome []uint32) []uint32 {
	var news []uint32
	for _, i := range willCome {
		if d.late[i] != 0 || d.results[i].Cause != Open {
			continue
		}
		if d.promised == nil {
			d.promised = make([]bool, len(d.results))
		}
		if !d.promised[i] {
			d.promised[i] = true
			news = append(news, i)
		}
	}
	return news
}

func (c *Core) refusedResult(r *sessionpb.Refused) Result {
	res := Result{Cause: Unmatched, Reason: r.GetReason(), Text: cut(r.GetText(), c.cfg.Limits.TextBytesMax)}
	switch res.Reason {
	case sessionpb.Reason_REASON_BUSY:
		res.Cause = Busy
	case sessionpb.Reason_REASON_LEG, sessionpb.Reason_REASON_DRAINING:
		res.Cause = Refused
	}
	if res.Text == "" {
		res.Text = ReasonText(res.Reason)
	}
	return res
}

// receiveDone takes a producer's end of a job: what it says was sent may still be on
// the way, everything else has ended.
func (c *Core) receiveDone(m *sessionpb.Done) error {
	id := JobID(m.GetJob())
	if err := c.issued("Done", id); err != nil {
		return err
	}
	d := c.demands.get(id)
	if d == nil {
		return nil // late
	}
	if len(m.Codes) != len(d.results) {
		return fmt.Errorf("message Done for job %d: %d codes for %d keys", id, len(m.Codes), len(d.results))
	}
	d.told = true
	var fresh []int
	for i, code := range m.Codes {
		var r Result
		switch code {
		case sessionpb.Code_CODE_SENT:
			if d.late[i] == 0 && d.results[i].Cause == Open {
				fresh = append(fresh, i)
			}
			continue
		case sessionpb.Code_CODE_REFUSED:
			r = Result{Cause: Unmatched, Reason: sessionpb.Reason_REASON_OTHER, Text: "refused by the producer"}
		case sessionpb.Code_CODE_CHECKSUM:
			r = Result{Cause: Checksum, Text: "the producer's own copy is wrong"}
		case sessionpb.Code_CODE_NO_DATA:
			r = Result{Cause: NoData, Text: "the producer has no data connection"}
		case sessionpb.Code_CODE_CANCELLED:
			r = Result{Cause: PushFailed, Text: "cancelled by the producer"}
		default:
			r = Result{Cause: PushFailed, Text: "the producer could not send it"}
		}
		c.endKey(d, i, r)
	}
	c.supplied(d, fresh)
	c.settle(d)
	return nil
}

// Abort ends a lookup or a demand of this node. It reports false when the job has
// ended before.
func (c *Core) Abort(now time.Duration, id JobID, reason string) bool {
	c.advance(now)
	if l := c.lookups.get(id); l != nil {
		c.endLookup(l, Aborted, reason)
		return true
	}
	if d := c.demands.get(id); d != nil {
		c.endDemand(d, Aborted, reason)
		return true
	}
	return false
}

// Arrived tells how the bytes of one key ended at this node: Transferred, Checksum,
// NoData. It reports false when the key had ended before, and then the bytes must not
// be used.
func (c *Core) Arrived(now time.Duration, id JobID, index int, cause Cause, text string) bool {
	c.advance(now)
	d := c.demands.get(id)
	if d == nil || index < 0 || index >= len(d.results) || cause == Open || cause >= causes {
		return false
	}
	ok := c.endKey(d, index, Result{Cause: cause, Text: cut(text, c.cfg.Limits.TextBytesMax)})
	c.settle(d)
	return ok
}

// DataLost tells that the data connections from the peer are gone: the bytes that
// were supplied and have not come will not come.
func (c *Core) DataLost(now time.Duration, text string) {
	c.advance(now)
	text = cut(text, c.cfg.Limits.TextBytesMax)
	for _, d := range c.demands.all() {
		for i := range d.late {
			if d.late[i] != 0 {
				c.endKey(d, i, Result{Cause: NoData, Text: text})
			}
		}
		c.settle(d)
	}
}
