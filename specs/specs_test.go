package specs_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
	"pgregory.net/rapid"
)

// reads is the definition of each mask, query by query and key by key.
var reads = map[string]func(p []uint64, prompt, q, k uint64) bool{
	"full":    func(_ []uint64, _, q, k uint64) bool { return k <= q },
	"hidden":  func(_ []uint64, _, q, k uint64) bool { return k <= q },
	"latent":  func(_ []uint64, _, q, k uint64) bool { return k <= q },
	"window":  func(p []uint64, _, q, k uint64) bool { return k <= q && q-k < p[0] },
	"sink":    func(p []uint64, _, q, k uint64) bool { return k <= q && (k < p[0] || q-k < p[1]) },
	"chunked": func(p []uint64, _, q, k uint64) bool { return k <= q && q/p[0] == k/p[0] },
	"state":   func(_ []uint64, _, q, k uint64) bool { return k+1 == q },
	"rswa":    func(p []uint64, prompt, q, k uint64) bool { return k <= q && (k < prompt || q-k < p[0]) },
}

// prefixes are the rules that keep every complete chunk, whatever points are asked for.
var prefixes = map[string]bool{"full": true, "hidden": true, "latent": true, "rswa": true}

// resumes reports whether there is a point at n: latents must be full, and states saved.
func resumes(name string, p []uint64, n, chunk uint64) bool {
	switch name {
	case "latent":
		return n%p[0] == 0
	case "state":
		return n%chunk == 0
	}
	return true
}

// dense returns the chunks that hold a token k < n that any query q >= n reads; nil where
// there is no point.
func dense(name string, p []uint64, prompt, n, chunk uint64) map[uint64]bool {
	if !resumes(name, p, n, chunk) {
		return nil
	}
	out := map[uint64]bool{}
	for q := n; q < n+2*chunk+2; q++ {
		for k := uint64(0); k < n; k++ {
			if reads[name](p, prompt, q, k) {
				out[k/chunk] = true
			}
		}
	}
	return out
}

// kept returns the chunks that a rule keeps and fetches for going on at n: those that are
// read, and where chunked attention reads nothing because its run ends inside a KV chunk,
// those of that run.
func kept(name string, p []uint64, prompt, n, chunk uint64) map[uint64]bool {
	out := dense(name, p, prompt, n, chunk)
	if name == "chunked" && n%chunk != 0 && n%p[0] == 0 {
		for k := n - p[0]; k < n; k++ {
			out[k/chunk] = true
		}
	}
	return out
}

func openAt(t require.TestingT, s abi.Spec, p []uint64) abi.SpecRule {
	r, err := s.Open(p)
	require.NoError(t, err)
	return r.(abi.SpecRule)
}

// draw returns a rule with drawn small parameters.
func draw(t *rapid.T) (s abi.Spec, p []uint64, rule abi.SpecRule) {
	s = rapid.SampledFrom(specs.All()).Draw(t, "spec")
	for i := range s.Manifest().Params {
		m := s.Manifest().Params[i]
		p = append(p, rapid.Uint64Range(m.Min, min(m.Max, 40)).Draw(t, m.Name))
	}
	return s, p, openAt(t, s, p)
}

func needOf(t require.TestingT, rule abi.SpecRule, block, chunk, prompt, n uint64) map[uint64]bool {
	r := abi.Round{BlockTokens: block, ChunkTokens: chunk, PromptTokens: prompt, StoredTokens: n + 1, ResumeTokens: n, Hi: uint32((n + chunk - 1) / chunk)}
	b := abi.NewBitmap(r.Chunks())
	if err := rule.Need(r, b); err != nil {
		require.ErrorIs(t, err, abi.ErrNoResume)
		return nil
	}
	out := map[uint64]bool{}
	for i := b.Next(0); i >= 0; i = b.Next(i + 1) {
		out[uint64(i)] = true
	}
	return out
}

func TestNeedIsTheDenseMask(t *testing.T) {
	for _, s := range specs.All() {
		name, params := s.Manifest().Name, s.Manifest().Params
		for _, p := range [][]uint64{{1, 1}, {2, 1}, {5, 4}, {8, 1}, {9, 2}, {40, 2}} {
			p = p[:len(params)]
			if name == "state" {
				p[0] %= 2
			}
			rule := openAt(t, s, p)
			for _, chunk := range []uint64{1, 4, 6} {
				for n := uint64(0); n < 50; n++ {
					for _, prompt := range []uint64{n + 1, n, n - min(n, 3), n/2 + 1} {
						require.Equal(t, dense(name, p, prompt, n, chunk), needOf(t, rule, 1, chunk, prompt, n),
							"%s%v chunk %d prompt %d n %d", name, p, chunk, prompt, n)
					}
				}
			}
		}
	}
}

// TestReachHoldsTheDenseMask: at every point that Reach is asked for, it keeps all
// complete chunks that the mask reads there, and with no extra tokens nothing else.
func TestReachHoldsTheDenseMask(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p, rule := draw(t)
		name := s.Manifest().Name
		chunk := rapid.Uint64Range(1, 9).Draw(t, "chunk")
		stored := rapid.Uint64Range(0, 120).Draw(t, "stored")
		align := chunk * rapid.Uint64Range(0, 4).Draw(t, "align")
		resume := rapid.Uint64Range(0, stored).Draw(t, "resume")
		junction := rapid.Uint64Range(0, stored+3).Draw(t, "junction")
		lo := rapid.Uint64Range(0, 3).Draw(t, "lo")
		hi := max(lo, stored/chunk+rapid.Uint64Range(0, 2).Draw(t, "over"))
		r := abi.Round{BlockTokens: chunk, ChunkTokens: chunk, PromptTokens: stored, StoredTokens: stored, ResumeTokens: resume,
			AlignTokens: align, JunctionTokens: junction, Lo: uint32(lo), Hi: uint32(hi)}
		got := abi.NewBitmap(r.Chunks())
		require.NoError(t, rule.Reach(r, got))

		points := []uint64{resume}
		if junction <= stored {
			points = append(points, junction)
		}
		for n := align; align > 0 && n <= stored; n += align {
			points = append(points, n)
		}
		want := map[uint64]bool{}
		for _, n := range points {
			for c := range kept(name, p, stored, n, chunk) {
				want[c] = true
			}
		}
		for c := lo; c < hi; c++ {
			complete := (c+1)*chunk <= stored
			has := got.Get(int(c - lo))
			if has && !complete {
				t.Fatalf("chunk %d is not complete at %d tokens", c, stored)
			}
			if want[c] && complete && !has {
				t.Fatalf("%s%v: chunk %d is read at one of %v, but not kept", name, p, c, points)
			}
			wide := prefixes[name] || name == "window" && p[1] > 0 || name == "state" && p[0] == 0
			if !wide && has && !want[c] {
				t.Fatalf("%s%v: chunk %d is kept, but read at none of %v", name, p, c, points)
			}
		}
	})
}

// TestScanFindsTheBestEnd: on tables without Retry, the scan answers the rightmost end
// whose dense need is here, and demands all of it.
func TestScanFindsTheBestEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p, rule := draw(t)
		name := s.Manifest().Name
		if name == "window" {
			p[1] = 0 // extra tokens are demanded too; TestScanExtra
			rule = openAt(t, s, p)
		}
		chunk := rapid.Uint64Range(1, 9).Draw(t, "chunk")
		lo := rapid.Uint64Range(0, 3).Draw(t, "lo")
		n := rapid.IntRange(1, 70).Draw(t, "n")
		bound := (lo+uint64(n))*chunk - rapid.Uint64Range(0, chunk-1).Draw(t, "short")
		letters := rapid.SliceOfN(rapid.SampledFrom([]byte("HHHPM")), n, n).Draw(t, "states")
		table, err := abi.ParseStates(string(letters))
		require.NoError(t, err)
		r := abi.Round{BlockTokens: chunk, ChunkTokens: chunk, PromptTokens: bound + 1, StoredTokens: bound + 1,
			LocalTokens: lo * chunk, BoundTokens: bound, Lo: uint32(lo), Hi: uint32(lo) + uint32(n)}
		demand := abi.NewBitmap(n)
		span, err := rule.Scan(r, table, demand)
		require.NoError(t, err)
		require.False(t, span.Deferred)

		best := 0
		for end := n; end > 0 && best == 0; end-- {
			at := min(bound, (lo+uint64(end))*chunk)
			ok := resumes(name, p, at, chunk)
			for c := range kept(name, p, bound+1, at, chunk) {
				ok = ok && (c < lo || table.At(int(c-lo)) != abi.Miss)
			}
			if ok {
				best = end
			}
		}
		require.EqualValues(t, best, span.Usable, "%s%v chunk %d lo %d bound %d %s", name, p, chunk, lo, bound, letters)
		if best == 0 {
			require.True(t, demand.Empty())
			return
		}
		need := kept(name, p, bound+1, min(bound, (lo+uint64(best))*chunk), chunk)
		for i := range n {
			require.Equal(t, need[lo+uint64(i)], demand.Get(i), "chunk %d", lo+uint64(i))
		}
	})
}

// TestScanExtra: a window with extra tokens scans as a window that is that much longer.
func TestScanExtra(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, x := rapid.Uint64Range(1, 30).Draw(t, "window"), rapid.Uint64Range(0, 30).Draw(t, "extra")
		short, long := openAt(t, specs.Window(), []uint64{w, x}), openAt(t, specs.Window(), []uint64{w + x, 0})
		n := rapid.IntRange(1, 40).Draw(t, "n")
		table, err := abi.ParseStates(string(rapid.SliceOfN(rapid.SampledFrom([]byte("HHHPMR")), n, n).Draw(t, "states")))
		require.NoError(t, err)
		r := abi.Round{BlockTokens: 4, ChunkTokens: 4, PromptTokens: 4 * uint64(n), StoredTokens: 4 * uint64(n), BoundTokens: 4 * uint64(n), Hi: uint32(n)}
		d1, d2 := abi.NewBitmap(n), abi.NewBitmap(n)
		s1, err := short.Scan(r, table, d1)
		require.NoError(t, err)
		s2, err := long.Scan(r, table, d2)
		require.NoError(t, err)
		require.Equal(t, s2, s1)
		require.Equal(t, d2, d1)
	})
}

func TestParametersOutOfRange(t *testing.T) {
	_, err := specs.Window().Open([]uint64{0, 0})
	require.EqualError(t, err, "rule window: parameter window is 0; it must be 1 to 16777216 tokens")
	_, err = specs.Full().Open([]uint64{1})
	require.EqualError(t, err, "rule full takes 0 parameters; 1 were given")
}
