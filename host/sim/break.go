package sim

import "time"

// A Break makes a part of every node wrong on purpose. The negative controls show with it
// that the simulation would notice.
type Break struct {
	// AckLost: an Abort is carried out, and its acknowledgement is dropped.
	AckLost bool
	// AbortLost: an Abort never reaches the core.
	AbortLost bool
	// Fence: frames go into a slot whatever its epoch, and whoever waits for it.
	Fence bool
	// Deadline: a demand's own deadline does not wake the node.
	Deadline bool
	// DoneTwice: a demand's result is given twice.
	DoneTwice bool
	// Pin: what the join gives back is not let go.
	Pin bool
	// Slot: the slot of a chunk that did not come is not let go.
	Slot bool
	// Budget: what a job has taken of its peer's budget is not given back.
	Budget bool
	// Legs: every leg is allowed, whatever the rules.
	Legs bool
	// Recover: a session that was lost is not dialed again.
	Recover bool
}

// forgets says whether the break leaves a peer's core asleep: one of its demands is due.
func (p *peer) forgets(now time.Duration) bool {
	for _, f := range p.demands {
		if now >= f.deadline {
			return true
		}
	}
	return false
}
