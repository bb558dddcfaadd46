package pairs

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// findingOf reads a verdict that is accepted or refused.
func (j *Judge) findingOf(v Version, verdict *registry.Verdict) Finding {
	f := Finding{State: Accepted, TakeState: None, GiveState: None, Kept: verdict.Reused}
	there := verdict.Against.File
	const roles = "the roles of the two deployments leave no such way"
	f.TakeNot, f.GiveNot = roles, roles
	var refused []string
	for i := range verdict.Ways {
		w := &verdict.Ways[i]
		ok, why, state := w.Counterexample == nil && !w.Undecided, "", stateOf(w)
		if !ok {
			why = refusal(w)
			refused = append(refused, way(w, there)+": "+why)
			why = "the pair of the two versions is refused: " + why
		}
		if w.Producer == there {
			f.Take, f.TakeNot, f.TakeState = ok, why, state
		} else {
			f.Give, f.GiveNot, f.GiveState = ok, why, state
		}
	}
	if refused == nil {
		f.Why = fmt.Sprintf("the pair of the two versions is accepted: %d cases", verdict.Cases)
		return f
	}
	f.State, f.Why = Refused, "the pair of the two versions is refused with "+strings.Join(refused, "; with ")
	path, err := j.draw(v, verdict)
	if f.File = path; err != nil {
		f.File, f.FileNot = "", fmt.Sprintf("%s: %v", path, cause(err))
	}
	return f
}

// stateOf is the state of one direction.
func stateOf(w *check.Way) string {
	switch {
	case w.Counterexample != nil:
		return Refused
	case w.Undecided:
		return Undecided
	}
	return Accepted
}

// way says who is who.
func way(w *check.Way, there string) string {
	if w.Producer == there {
		return "this node as the consumer"
	}
	return "this node as the producer"
}

// refusal is why a way is not allowed, in one line.
func refusal(w *check.Way) string {
	ce := w.Counterexample
	if ce == nil {
		return "it was not checked to its end"
	}
	return line(fmt.Sprintf("prompts of %d tokens, group %s: %s", ce.PromptTokens, ce.Group, ce.Why))
}

// lineBytesMax bounds what is said of a pair in one line.
const lineBytesMax = 512

// line makes text that came from elsewhere fit into one line.
func line(s string) string {
	s = strings.ToValidUTF8(s, "?")
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if len(s) <= lineBytesMax {
		return s
	}
	s = s[:lineBytesMax]
	return strings.ToValidUTF8(s, "") + "..."
}
