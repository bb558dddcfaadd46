package host

import (
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// failure is why a chunk could not be had.
type failure struct{ cause, detail string }

// failureOf says how a key of a demand ended, in the words of events and metrics.
func failureOf(r session.Result) failure {
	detail := r.Text
	if detail == "" {
		detail = r.Cause.String()
	}
	switch r.Cause {
	case session.Deadline:
		switch r.Reason { // a living peer that did not begin or end the request
		case sessionpb.Reason_REASON_NO_LAST_WORD, sessionpb.Reason_REASON_NOT_BEGUN:
			return failure{metrics.CauseUnmatched, detail}
		}
		return failure{metrics.CauseDeadline, detail}
	case session.Unmatched:
		if detail == session.Unmatched.String() {
			detail = session.ReasonText(r.Reason)
		}
		switch r.Reason {
		case sessionpb.Reason_REASON_EVICTED:
			return failure{metrics.CauseEvicted, detail}
		case sessionpb.Reason_REASON_NO_ROOM:
			return failure{metrics.CauseNoRoom, detail}
		case sessionpb.Reason_REASON_BUSY: // as its consumer counts it
			return failure{metrics.CauseRefused, detail}
		}
		return failure{metrics.CauseUnmatched, detail}
	case session.Checksum:
		return failure{metrics.CauseChecksum, detail}
	case session.Aborted:
		return failure{metrics.CauseAborted, detail}
	case session.TransferLate:
		return failure{metrics.CauseDeadline, detail}
	case session.Busy, session.Refused, session.Invalid:
		return failure{metrics.CauseRefused, detail}
	}
	return failure{metrics.CausePeer, r.Cause.String() + ": " + detail}
}

// outcomeOf is the label under which a finished wait for a peer is counted: the
// gravest end of any of its keys.
func outcomeOf(results []session.Result) string {
	worst, rank := "ok", 0
	for _, r := range results {
		outcome, k := "ok", 0
		switch r.Cause {
		case session.Transferred, session.Unmatched, session.Checksum, session.Answered:
		case session.Aborted:
			outcome, k = "aborted", 1
		case session.Busy, session.Refused, session.Invalid:
			outcome, k = "refused", 2
		case session.Deadline, session.TransferLate:
			outcome, k = "deadline", 3
		default:
			outcome, k = "peer", 4
		}
		if k > rank {
			worst, rank = outcome, k
		}
	}
	return worst
}
