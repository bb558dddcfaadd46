package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// controls are what a wrong node would do, which invariant must see it, and within how
// many seeds.
var controls = []struct {
	name   string
	broken Break
	kinds  []string
	seeds  int
}{
	{"an abort's acknowledgement is dropped", Break{AckLost: true}, []string{"abort without ack"}, 20},
	{"an abort is dropped", Break{AbortLost: true}, []string{"abort without ack"}, 20},
	{"the epoch fence is ignored", Break{Fence: true}, []string{"fence", "bytes"}, 100},
	{"a deadline is forgotten", Break{Deadline: true}, []string{"wait"}, 20},
	{"a result is given twice", Break{DoneTwice: true}, []string{"result twice"}, 5},
	{"a pin is not let go", Break{Pin: true}, []string{"pin"}, 5},
	{"a slot is not let go", Break{Slot: true}, []string{"pin"}, 10},
	{"a budget is not given back", Break{Budget: true}, []string{"budget"}, 5},
	{"legs are not refused", Break{Legs: true}, []string{"leg"}, 40},
	{"a lost session is not dialed again", Break{Recover: true}, []string{"recovery", "left behind"}, 20},
}

// TestControls: whatever is broken on purpose is found, by the invariant that it breaks.
func TestControls(t *testing.T) {
	for _, c := range controls {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for seed := uint64(1); seed <= uint64(c.seeds); seed++ {
				if r := Run(Draw(seed), Options{Break: c.broken}); r.Failure != nil {
					require.Contains(t, c.kinds, r.Failure.Kind, "seed %d: %v", seed, r.Failure)
					t.Logf("found at seed %d of %d: %v", seed, c.seeds, r.Failure)
					return
				}
			}
			require.Fail(t, "not found", "in %d seeds", c.seeds)
		})
	}
}
