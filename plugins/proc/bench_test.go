package proc

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
)

// benchChunks is what the largest shipped deployment asks for: 131,072 tokens in chunks of
// 16.
const benchChunks = 8192

// reachMax is the ceiling of one call of benchChunks chunks.
const reachMax = 400 * time.Microsecond

// median times f until b is satisfied and returns the median.
func median(b *testing.B, f func()) time.Duration {
	times := make([]time.Duration, 0, b.N)
	for b.Loop() {
		began := time.Now()
		f()
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	return times[len(times)/2]
}

// BenchmarkCall is one caller: the cost of the way to the process and back, beside the same
// rule in this process and the ceiling.
func BenchmarkCall(b *testing.B) {
	r := newRogue(b, "honest")
	served := r.rule(r.load(), "window", 4096, 0)
	native, err := specs.Window().Open([]uint64{4096, 0})
	require.NoError(b, err)
	for _, n := range []uint32{1, benchChunks} {
		round := abi.Round{BlockTokens: 16, ChunkTokens: 16, PromptTokens: 16 * uint64(n), StoredTokens: 16 * uint64(n), ResumeTokens: 16*uint64(n) - 1, AlignTokens: 4096, Hi: n}
		ask := round
		ask.ResumeTokens, ask.BoundTokens = 0, 16*uint64(n)-1
		hits := abi.NewStates(int(n))
		hits.Fill(0, int(n), abi.Hit)
		out := abi.NewBitmap(int(n))
		for name, call := range map[string]func(abi.Rule) error{
			"reach":     func(r abi.Rule) error { return r.Reach(round, out) },
			"scan miss": func(r abi.Rule) error { _, err := r.Scan(ask, abi.NewStates(int(n)), out); return err },
			"scan hit":  func(r abi.Rule) error { _, err := r.Scan(ask, hits, out); return err },
		} {
			b.Run(fmt.Sprintf("%s, chunks %d", name, n), func(b *testing.B) {
				nativeTimes := make([]time.Duration, 101)
				for i := range nativeTimes {
					began := time.Now()
					require.NoError(b, call(native))
					nativeTimes[i] = time.Since(began)
				}
				slices.Sort(nativeTimes)
				m := median(b, func() {
					if err := call(served); err != nil {
						b.Fatal(err)
					}
				})
				b.ReportMetric(float64(m.Microseconds()), "median-us")
				b.ReportMetric(float64(nativeTimes[50].Nanoseconds())/1e3, "native-us")
				b.ReportMetric(float64(m)/float64(reachMax), "of-ceiling")
			})
		}
	}
}

// BenchmarkTogether is many callers of small scans, as the check has them.
func BenchmarkTogether(b *testing.B) {
	r := newRogue(b, "honest")
	served := r.rule(r.load(), "window", 200, 0)
	for _, callers := range []int{1, 8, 16, 32, 64, 128, 256} {
		b.Run(fmt.Sprintf("callers %d", callers), func(b *testing.B) {
			b.ReportAllocs()
			turns := make(chan struct{}, callers)
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for range turns {
						if _, err := ask(served); err != nil {
							b.Error(err)
						}
					}
				})
			}
			for b.Loop() {
				turns <- struct{}{}
			}
			close(turns)
			wg.Wait()
		})
	}
}

// BenchmarkStart is a process from nothing to its manifests, and its end.
func BenchmarkStart(b *testing.B) {
	r := newRogue(b, "honest")
	served := r.rule(r.load(), "full")
	for b.Loop() {
		_, release, err := served.(specRule).Fresh()
		require.NoError(b, err)
		release()
	}
}
