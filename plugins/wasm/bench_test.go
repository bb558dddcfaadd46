package wasm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
)

// round8192 is a prompt of 131,072 tokens in chunks of 16, reusable every 1024.
var round8192 = abi.Round{
	BlockTokens: 16, ChunkTokens: 16, PromptTokens: 1 << 17, StoredTokens: 1 << 17, ResumeTokens: 1<<17 - 1,
	AlignTokens: 1024, BoundTokens: 1<<17 - 1, Hi: 8192,
}

// compare runs call on the native window rule and on the module's, in turns, and
// reports the time of both and their ratio. ns/op is the sum.
func compare(b *testing.B, call func(abi.Rule)) {
	params := []uint64{128, 0}
	native, err := specs.Window().Open(params)
	require.NoError(b, err)
	r, err := specNamed(b, shipped(b, Options{}), "window").Open(params)
	require.NoError(b, err)
	pinned, release := r.(Pinner).Pin()
	defer release()
	var took [3]time.Duration
	rules := [3]abi.Rule{native, r, pinned}
	for _, rule := range rules {
		call(rule)
	}
	const turn = 64
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i += turn {
		n := min(turn, b.N-i)
		for k, rule := range rules {
			start := time.Now()
			for range n {
				call(rule)
			}
			took[k] += time.Since(start)
		}
	}
	per := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / float64(b.N) }
	b.ReportMetric(per(took[0]), "native-ns")
	b.ReportMetric(per(took[1]), "wasm-ns")
	b.ReportMetric(per(took[2]), "pinned-ns")
	b.ReportMetric(per(took[1])/per(took[0]), "wasm/native")
}

func BenchmarkReach8192(b *testing.B) {
	out := abi.NewBitmap(8192)
	compare(b, func(r abi.Rule) {
		out.Zero()
		_ = r.Reach(round8192, out)
	})
}

func BenchmarkScan8192(b *testing.B) {
	for _, s := range []abi.State{abi.Miss, abi.Hit} {
		b.Run(s.String(), func(b *testing.B) {
			states, demand := abi.NewStates(8192), abi.NewBitmap(8192)
			states.Fill(0, 8192, s)
			compare(b, func(r abi.Rule) {
				demand.Zero()
				_, _ = r.Scan(round8192, states, demand)
			})
		})
	}
}

func BenchmarkScan1024(b *testing.B) {
	round := round8192
	round.Hi, round.BoundTokens = 1024, 1<<14-1
	states, demand := abi.NewStates(1024), abi.NewBitmap(1024)
	compare(b, func(r abi.Rule) {
		demand.Zero()
		_, _ = r.Scan(round, states, demand)
	})
}

// BenchmarkOverhead asks for no chunk at all.
func BenchmarkOverhead(b *testing.B) {
	round := abi.Round{BlockTokens: 16, ChunkTokens: 16}
	compare(b, func(r abi.Rule) { _ = r.Reach(round, nil) })
}

// BenchmarkDeadline is a call of a small module with and without a deadline.
func BenchmarkDeadline(b *testing.B) {
	for name, o := range map[string]Options{"trusted": {Trusted: true}, "file": {}} {
		b.Run(name, func(b *testing.B) {
			p, release := open(b, load(b, good(), o)).(Pinner).Pin()
			defer release()
			out := abi.NewBitmap(8)
			b.ReportAllocs()
			for range b.N {
				_ = p.Reach(round8, out)
			}
		})
	}
}

func BenchmarkPool(b *testing.B) {
	m := load(b, good(), Options{Trusted: true})
	for range b.N {
		in, _ := m.pool.get()
		m.pool.put(in, true)
	}
}
