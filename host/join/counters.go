package join

import "github.com/tierd/tierd/host/session"

// Legs are the legs that counters tell apart, in the order of their index; a leg of
// another name is counted under the last.
var Legs = [...]string{session.LegPD, session.LegDemand, session.LegProbe, "other"}

// Counts holds one number a group and leg, in keys. A group that the deployment does
// not have is counted in the row after the last.
type Counts [][len(Legs)]uint64

// Counters counts keys by group and leg since the start. They only rise, and exist,
// as zeros, from the start. A producer's Join keeps them for what is demanded from
// it; a consumer keeps its own with AddDemanded and AddResults. At rest
// Demanded = Transferred + Unmatched + Failed.
type Counters struct {
	Demanded    Counts
	Supplied    Counts // producer: keys of Supply, once a transfer
	Transferred Counts
	// Unmatched: no producer's word, or its refusal.
	Unmatched Counts
	// Failed: supplied and not transferred, or the job ended before.
	Failed Counts
}

// NewCounters returns zeros for a deployment's groups.
func NewCounters(groups int) Counters {
	c := func() Counts { return make(Counts, groups+1) }
	return Counters{c(), c(), c(), c(), c()}
}

func (c *Counters) add(to *Counts, group uint32, leg string) {
	row := min(int64(group), int64(len(*to)-1))
	col := 0
	for col < len(Legs)-1 && Legs[col] != leg {
		col++
	}
	(*to)[row][col]++
}

// AddDemanded counts the keys of a consumer's demand.
func (c *Counters) AddDemanded(leg string, keys []Key) {
	for i := range keys {
		c.add(&c.Demanded, Group(&keys[i]), leg)
	}
}

// AddResults counts how the keys of a consumer's demand ended.
func (c *Counters) AddResults(leg string, keys []Key, results []session.Result) {
	for i := range keys {
		to := &c.Failed
		switch results[i].Cause {
		case session.Transferred:
			to = &c.Transferred
		case session.Unmatched, session.Deadline:
			to = &c.Unmatched
		}
		c.add(to, Group(&keys[i]), leg)
	}
}
