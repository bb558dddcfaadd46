package wasm

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/module"
)

// round8192 is a prompt of 131,072 tokens in chunks of 16, reusable every 1024.
var round8192 = abi.Round{
	BlockTokens: 16, ChunkTokens: 16, PromptTokens: 1 << 17, StoredTokens: 1 << 17, ResumeTokens: 1<<17 - 1,
	AlignTokens: 1024, BoundTokens: 1<<17 - 1, Hi: 8192,
}

// plainly loads modules that burn nothing while f runs.
func plainly(f func()) {
	defer func() { rewrite = fuel.Rewrite }()
	rewrite = fuel.Plain
	f()
}

// inTurns runs each of the functions for a while, again and again in turn, and
// returns the median time of one call of each.
func inTurns(b *testing.B, functions ...func()) []float64 {
	const rounds, turn = 31, time.Millisecond
	times := make([][]float64, len(functions))
	for _, f := range functions {
		f()
	}
	b.ResetTimer()
	for range rounds {
		for i, f := range functions {
			n, began := 0, time.Now()
			for time.Since(began) < turn {
				for range 8 {
					f()
				}
				n += 8
			}
			times[i] = append(times[i], float64(time.Since(began).Nanoseconds())/float64(n))
		}
	}
	medians := make([]float64, len(functions))
	for i, t := range times {
		slices.Sort(t)
		medians[i] = t[len(t)/2]
	}
	b.ReportMetric(0, "ns/op")
	return medians
}

// compare reports the time of call on the native window rule, and on the module's:
// borrowed for each call, pinned, and pinned without fuel.
func compare(b *testing.B, call func(abi.Rule)) {
	params := []uint64{128, 0}
	native, err := specs.Window().Open(params)
	require.NoError(b, err)
	open := func() abi.Rule {
		r, err := specNamed(b, shipped(b, Options{}), "window").Open(params)
		require.NoError(b, err)
		return r
	}
	pin := func(r abi.Rule) abi.Rule {
		p, release := r.(Pinner).Pin()
		b.Cleanup(release)
		return p
	}
	r := open()
	pinned := pin(r)
	var plain abi.Rule
	plainly(func() { plain = pin(open()); call(plain) })
	t := inTurns(b, func() { call(native) }, func() { call(r) }, func() { call(pinned) }, func() { call(plain) })
	b.ReportMetric(t[0], "native-ns")
	b.ReportMetric(t[1], "wasm-ns")
	b.ReportMetric(t[2], "pinned-ns")
	b.ReportMetric(t[2]/t[0], "pinned/native")
	b.ReportMetric(t[2]/t[3], "fuel/plain")
	b.ReportMetric(float64(pinned.(Metered).Fuel()), "units")
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

// BenchmarkCall is a call of a small module: the compiled function with and without
// fuel, and all that a pinned rule does around it.
func BenchmarkCall(b *testing.B) {
	metered := load(b, good(), Options{})
	var plain *Module
	plainly(func() { plain = load(b, good(), Options{}) })
	p, release := open(b, metered).(Pinner).Pin()
	defer release()
	out := abi.NewBitmap(8)
	_ = p.Reach(round8, out)
	in, bare := p.(boundSpec).in, plain.pool.free[0]
	raw := func(in *instance) { _ = in.fns[fnReach].CallWithStack(in, in.stack[:]) }
	t := inTurns(b, func() { in.refill(CallUnits); raw(in) }, func() { raw(bare) }, func() { _ = p.Reach(round8, out) })
	b.ReportMetric(t[0], "fuel-ns")
	b.ReportMetric(t[1], "plain-ns")
	b.ReportMetric(t[0]/t[1], "fuel/plain")
	b.ReportMetric(t[2], "pinned-reach-ns")
}

// BenchmarkLoad loads the shipped module, of plain Go, and one of the size that C has.
func BenchmarkLoad(b *testing.B) {
	shipped, err := module.Wasm()
	require.NoError(b, err)
	ctx := context.Background()
	for name, wasm := range map[string][]byte{"go": shipped, "small": good().bytes()} {
		for kind, dir := range map[string]string{"cold": "", "cached": b.TempDir()} {
			b.Run(name+"/"+kind, func(b *testing.B) {
				for range b.N {
					m, err := Load(ctx, name, wasm, Options{CacheDir: dir})
					require.NoError(b, err)
					require.NoError(b, m.Close(ctx))
				}
			})
		}
		b.Run(name+"/rewrite", func(b *testing.B) {
			b.SetBytes(int64(len(wasm)))
			for range b.N {
				_, err := fuel.Rewrite(wasm)
				require.NoError(b, err)
			}
		})
	}
}

func BenchmarkPool(b *testing.B) {
	m := load(b, good(), Options{})
	for range b.N {
		in, _ := m.pool.get()
		m.pool.put(in, true)
	}
}
