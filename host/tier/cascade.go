package tier

import (
	"errors"
	"fmt"
	"time"
)

// A Decision is what becomes of one key that a peer or a lower tier is to be supplied
// with.
type Decision uint8

const (
	// Supply: the key is pinned; send it.
	Supply Decision = iota
	// Defer: it is being written; ask again when Watch wakes or the limit is reached.
	Defer
	// Refuse: it cannot be supplied. The asker is told, so that it does not wait.
	Refuse
)

// String returns the name of the decision.
func (d Decision) String() string { return [...]string{"supply", "defer", "refuse"}[d%3] }

// Reasons of a refusal. They are wrapped with details.
var (
	// ErrAbsent: the key was never stored, was dropped, or was evicted since.
	ErrAbsent = errors.New("key is not in the tier")
	// ErrSlow: the key was still being written when the limit was reached.
	ErrSlow = errors.New("key was being written for too long")
)

// Cascade decides from how Pin or Admit found a key, the error that Admit gave, and how
// long the key has been waited for. It is total: each state of the tier has an answer,
// no key is dropped without a word, and none waits beyond limit.
func Cascade(found Presence, admit error, waited, limit time.Duration) (Decision, error) {
	switch {
	case admit != nil:
		return Refuse, admit // no room, or closed: both say why themselves
	case found == Readable:
		return Supply, nil
	case found == Writing || found == Admitted:
		if waited < limit {
			return Defer, nil
		}
		return Refuse, fmt.Errorf("%w: waited %v, limit %v", ErrSlow, waited, limit)
	}
	return Refuse, ErrAbsent
}
