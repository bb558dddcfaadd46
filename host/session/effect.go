package session

import (
	"crypto/sha256"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// KeyBytes is the size of a key on the wire.
const KeyBytes = 52

// A Key names one chunk: tenant, prefix hash, group. It is host/tier's Key.
type Key = [KeyBytes]byte

// A JobID names a lookup or a demand. The consumer's core gives them, counting up
// from Config.FirstJob for as long as it lives, so that an id is never used twice.
type JobID uint64

// Legs.
const (
	LegPD     = "pd"
	LegDemand = "demand"
	LegProbe  = "probe"
)

// A Cause says how a key, a lookup or a job ended.
type Cause uint8

const (
	// Open: not ended.
	Open Cause = iota
	// Transferred: the bytes arrived whole and were verified.
	Transferred
	// Unmatched: the producer refused the key, or its last word did not name it.
	Unmatched
	// Checksum: the bytes arrived and are not those that were stored.
	Checksum
	// Aborted: by the consumer.
	Aborted
	// PeerSuspect: no byte from the peer for Limits.Suspect, or no session in time.
	PeerSuspect
	// Disconnected: the control connection closed under the job.
	Disconnected
	// Deadline: the request's own deadline passed; no word of the producer came.
	Deadline
	// TransferLate: the producer supplied the key and its bytes did not come in time.
	TransferLate
	// PushFailed: the producer supplied the key and could not send it.
	PushFailed
	// NoData: there was no data connection to carry it.
	NoData
	// Busy: a bound of this node or of the peer is reached.
	Busy
	// Refused: the peer does not serve the job: leg, hello, draining.
	Refused
	// Invalid: the request itself breaks a bound; see the text.
	Invalid
	// Answered: a lookup that the peer answered.
	Answered
	// Lapsed: the consumer did not renew its lease on what the producer had bound to it.
	Lapsed
	causes
)

var causeNames = [causes]string{"open", "transferred", "unmatched", "checksum", "aborted", "peer_suspect", "disconnected",
	"deadline", "transfer_late", "push_failed", "no_data", "busy", "refused", "invalid", "answered", "lapsed"}

// String returns the name that logs and metrics use.
func (c Cause) String() string {
	if c >= causes {
		return "unknown"
	}
	return causeNames[c]
}

// Causes returns every cause, for counters that exist from the first scrape.
func Causes() []Cause {
	out := make([]Cause, causes)
	for i := range out {
		out[i] = Cause(i)
	}
	return out
}

// A Result is how one key of a demand ended.
type Result struct {
	Cause Cause
	// Reason is the producer's, when it refused the key; NO_LAST_WORD at the deadline
	// when it could have and did not.
	Reason sessionpb.Reason
	// Text says more, for people; at most Limits.TextBytesMax bytes.
	Text string
}

// A DemandRequest asks a peer for the bytes of keys. Slots and Epochs have one
// entry a key: where the bytes go here, and the fence of that place.
type DemandRequest struct {
	// TransferID is the name that both sides give the transfer.
	TransferID string
	RequestID  string
	Leg        string
	Keys       []Key
	Slots      []uint32
	Epochs     []uint64
	// Timeout is what is left of the request's own deadline; 0 takes
	// Limits.RequestDeadline.
	Timeout time.Duration
}

// A Job is a demand as its producer sees it. The slices are not changed after.
type Job struct {
	ID         JobID
	TransferID string
	RequestID  string
	Leg        string
	Keys       []Key
	Slots      []uint32
	Epochs     []uint64
	// Deadline is when the consumer gives up, on the core's clock.
	Deadline time.Duration
}

// A Query is a lookup as its producer sees it.
type Query struct {
	ID        JobID
	RequestID string
	Keys      []Key
	Deadline  time.Duration
}

// An Answer is a producer's word on keys of a job, by their index in Job.Keys.
type Answer struct {
	Available []uint32
	Refused   []Refusal
	// WillCome is in the producer's plan and not here yet; each key gets another word.
	WillCome []uint32
	// Last is the last word: what is neither available nor refused by now is
	// refused as not supplied.
	Last bool
}

// A Refusal names keys that will not come, and why.
type Refusal struct {
	Indices []uint32
	Reason  sessionpb.Reason
	Text    string
}

// An Effect is what a Core asks its edge to do. The edge carries effects out in
// order.
type Effect interface{ effect() }

type (
	// Send sends a message on the current connection.
	Send struct{ Envelope *sessionpb.Envelope }
	// Dial starts a connection attempt; the edge answers with Connected or
	// Disconnected.
	Dial struct{ Attempt int }
	// Close closes the current connection or gives up the attempt, after what was
	// sent before. The core has forgotten it already.
	Close struct {
		Reason string
		// Protocol says that the peer broke the protocol.
		Protocol bool
	}
	// Changed tells that the peer's state changed.
	Changed struct {
		From, To PeerState
		Reason   string
		// Left is Status.Left.
		Left bool
	}
	// Up tells that a session began.
	Up struct {
		Hello    *sessionpb.Hello
		Protocol uint32
		// Restarted says that the peer is another process than before.
		Restarted bool
		// SameRules says that all legs are allowed without a pair check.
		SameRules bool
	}
	// LookupDone ends a lookup. States holds Miss everywhere unless Cause is Answered.
	LookupDone struct {
		Job    JobID
		States abi.States
		Keys   int
		Cause  Cause
		Text   string
	}
	// Word tells what the producer has said of keys of a demand before its end. Refused
	// are keys that have ended, by their index in the request, with Results in the same
	// order; WillCome are keys in the producer's plan.
	Word struct {
		Job      JobID
		Refused  []uint32
		Results  []Result
		WillCome []uint32
	}
	// DemandDone ends a demand, with one result a key in the order of the request.
	DemandDone struct {
		Job     JobID
		Results []Result
	}
	// LookedUp asks the producer's side for states; answer with AnswerLookup.
	LookedUp struct{ Query Query }
	// Demanded begins a job of the producer's side; answer with Answer.
	Demanded struct{ Job Job }
	// Push asks to send keys of a job on the data connection; report each with Pushed.
	Push struct {
		Job     JobID
		Indices []uint32
	}
	// CancelPush asks to stop what is being pushed for a job. JobEnded follows.
	CancelPush struct {
		Job    JobID
		Reason string
	}
	// JobEnded ends a job of the producer's side; every Demanded gets one.
	JobEnded struct {
		Job     JobID
		Results []Result
		Reason  string
	}
	// Released tells that the consumer needs nothing more of a lookup.
	Released struct{ Job JobID }
	// Asked asks for bytes of what this node runs by, by their SHA-256; answer with
	// AnswerAsk.
	Asked struct {
		Seq    uint64
		Digest [sha256.Size]byte
		Offset uint64
	}
	// PartCame ends an Ask: with data, or with the peer's reason why there is none, or with
	// what became of the session.
	PartCame struct {
		Seq        uint64
		TotalBytes uint64 // of the whole
		Data       []byte
		Refused    string
		Lost       string
	}
)

func (Send) effect()       {}
func (Dial) effect()       {}
func (Close) effect()      {}
func (Changed) effect()    {}
func (Up) effect()         {}
func (LookupDone) effect() {}
func (Word) effect()       {}
func (DemandDone) effect() {}
func (LookedUp) effect()   {}
func (Demanded) effect()   {}
func (Push) effect()       {}
func (CancelPush) effect() {}
func (JobEnded) effect()   {}
func (Released) effect()   {}
func (Asked) effect()      {}
func (PartCame) effect()   {}
