package sim

import (
	"flag"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tierd/tierd/host/session"
)

var (
	firstSeed = flag.Uint64("seed", 1, "first seed of TestSeeds")
	seeds     = flag.Int("seeds", 300, "seeds of TestSeeds")
	verbose   = flag.Bool("trace", false, "print the trace of the first seed")
)

// batch is what many runs came to.
type batch struct {
	fired         Coverage
	results       map[string]int
	causes        map[string]int
	runs, steps   int
	pulls, hits   int
	simulated     time.Duration
	noRoom        int
	rare          map[string]int // what must occur among many runs
	failedSeed    uint64
	failed        *Failure
	requests, few int
}

// play runs seeds over all cores, and stops at the first that fails.
func play(first uint64, n int, o Options) *batch {
	b := &batch{results: map[string]int{}, causes: map[string]int{}, rare: map[string]int{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var next atomic.Int64
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				i := next.Add(1) - 1
				mu.Lock()
				stop := b.failed != nil
				mu.Unlock()
				if i >= int64(n) || stop {
					return
				}
				seed := first + uint64(i)
				s := Draw(seed)
				r := Run(s, o)
				mu.Lock()
				b.add(seed, s, &r)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return b
}

func (b *batch) add(seed uint64, s *Schedule, r *Result) {
	if r.Failure != nil {
		if b.failed == nil || seed < b.failedSeed {
			b.failed, b.failedSeed = r.Failure, seed
		}
		return
	}
	b.runs++
	b.steps += r.Steps
	b.pulls += r.Pulls
	b.hits += r.Hits
	b.simulated += r.End
	b.requests += len(s.Requests)
	if len(s.Requests) < requestsMin || r.Struck < faultsMin {
		b.few++
	}
	b.noRoom += r.NoRoom
	b.rare["leases lapsed"] += r.Lapsed
	b.rare["over a peer's budget"] += r.OverBudget
	b.rare["sent from elsewhere"] += r.Elsewhere
	b.rare["second plans of leg demand"] += r.Rethought
	b.rare["duplicate connections"] += r.Duplicates
	b.rare["keys refused by leg or drain"] += r.Causes[session.Refused]
	b.fired.Add(&r.Fired)
	for k, v := range r.Results {
		b.results[k] += v
	}
	for k, v := range r.Causes {
		b.causes[k.String()] += v
	}
}

func count(m map[string]int) string {
	out := ""
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out += fmt.Sprintf("  %s %d", k, m[k])
	}
	return out
}

// cpu is the time that this process has spent on cores.
func cpu() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// keyEnds are the ways in which a key of a right request ends.
var keyEnds = []session.Cause{session.Transferred, session.Unmatched, session.Checksum, session.Aborted, session.PeerSuspect, session.Disconnected,
	session.Deadline, session.TransferLate, session.PushFailed, session.NoData, session.Busy, session.Refused, session.Invalid}

// TestSeeds plays seeds; every invariant holds after every step of each.
func TestSeeds(t *testing.T) {
	if *verbose {
		r := Run(Draw(*firstSeed), Options{Trace: func(s string) { fmt.Println(s) }})
		fmt.Println(r.Failure, r.Results)
	}
	began, used := time.Now(), cpu()
	b := play(*firstSeed, *seeds, Options{})
	took := time.Since(began)
	busy := cpu() - used
	if b.failed != nil {
		s := Shrink(Draw(b.failedSeed), Options{}, b.failed.Kind)
		r := Run(s, Options{})
		t.Fatalf("seed %d fails: %v\nshrunk to:\n%v\nwhich fails: %v", b.failedSeed, b.failed, s, r.Failure)
	}
	t.Logf("seeds %d to %d: %d runs, %d steps, %v simulated, in %v, %v of it on the cores: %.0f runs a second of one core\n"+
		"%v\nrequests:%s\nkeys:%s\nrare:%s\npulls after the last fault: %d of %d hit",
		*firstSeed, *firstSeed+uint64(*seeds)-1, b.runs, b.steps, b.simulated, took.Round(time.Millisecond), busy.Round(time.Millisecond),
		float64(b.runs)/busy.Seconds(), &b.fired, count(b.results), count(b.causes), count(b.rare), b.hits, b.pulls)
	require.Zero(t, b.few, "every run has at least %d requests and %d faults that struck", requestsMin, faultsMin)
	if *seeds >= 300 { // fewer may leave a cell empty
		require.Empty(t, b.fired.Empty(), "cells that no fault fell into")
		for _, c := range keyEnds {
			require.NotZero(t, b.causes[c.String()], "keys that end by %v", c)
		}
		for what, n := range b.rare {
			require.NotZero(t, n, what)
		}
		require.NotZero(t, b.noRoom, "chunks for which a producer has no room")
	}
}
