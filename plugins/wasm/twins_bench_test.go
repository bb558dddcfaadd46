package wasm_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tierd/tierd/abi"
)

// benchTurns is how many turns of native and guest are taken in one benchmark: an odd
// number, so that the median is one of them.
const benchTurns = 31

// BenchmarkTwins calls each language's window rule and the native one in turns: a prompt of
// 131,072 tokens in chunks of 16, reusable every 1024. It reports the guest's median time
// of a call and the median of the turns' ratios; ns/op is that of all turns.
func BenchmarkTwins(b *testing.B) {
	round := abi.Round{
		BlockTokens: 16, ChunkTokens: 16, PromptTokens: 1 << 17, StoredTokens: 1 << 17, ResumeTokens: 1<<17 - 1,
		AlignTokens: 1024, BoundTokens: 1<<17 - 1, Hi: 8192,
	}
	out, states := abi.NewBitmap(8192), abi.NewStates(8192)
	scan := func(s abi.State) func(abi.Rule) {
		return func(r abi.Rule) {
			if states.At(0) != s {
				states.Fill(0, 8192, s)
			}
			out.Zero()
			_, _ = r.Scan(round, states, out)
		}
	}
	for _, c := range []struct {
		name string
		call func(abi.Rule)
	}{
		{"reach8192", func(r abi.Rule) { out.Zero(); _ = r.Reach(round, out) }},
		{"scan8192/M", scan(abi.Miss)},
		{"scan8192/H", scan(abi.Hit)},
	} {
		for _, language := range languages {
			b.Run(c.name+"/"+language, func(b *testing.B) { inTurns(b, language, c.call) })
		}
	}
}

func inTurns(b *testing.B, language string, call func(abi.Rule)) {
	p, release := pairAt(b, twin(b, language), 128)
	defer release()
	took := func(r abi.Rule, n int) time.Duration {
		start := time.Now()
		for range n {
			call(r)
		}
		return time.Since(start)
	}
	took(p.native, 100)
	took(p.guest, 100)
	var ratios, guest []float64
	b.ResetTimer()
	n := b.N/benchTurns + 1
	for range benchTurns {
		x, y := took(p.native, n), took(p.guest, n)
		ratios = append(ratios, float64(y)/float64(x))
		guest = append(guest, float64(y.Nanoseconds())/float64(n))
	}
	slices.Sort(ratios)
	slices.Sort(guest)
	b.ReportMetric(ratios[benchTurns/2], "guest/native")
	b.ReportMetric(guest[benchTurns/2], "guest-ns")
}
