package vllm

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
)

// Second paths: the masks against a definition per token, the scans against a definition
// over whole tables, one split into steps against another.

// tailBlocks returns, for the blocks below n, those that hold a token of the window before
// an end, and with a drafter the block behind the end.
func tailBlocks(n, block, window int, eagle bool, ends []int) (out abi.Bitmap) {
	for _, e := range ends {
		for tok := max(0, e-(window-1)); tok < e; tok++ {
			if tok/block < n {
				set(&out, tok/block)
			}
		}
		if eagle && e/block < n {
			set(&out, e/block)
		}
	}
	return out
}

// multiples returns the multiples of step from step on, to beyond the end by a tail.
func multiples(step, end int) (out []int) {
	for e := step; step > 0 && e <= end; e += step {
		out = append(out, e)
	}
	return out
}

func TestSlidingMaskPerToken(t *testing.T) {
	const n = 24
	for _, block := range []int{1, 2, 4} {
		for _, align := range []int{4, 8, 12, 16} {
			for window := 1; window <= 20; window++ {
				for _, drafts := range []bool{false, true} {
					g := group{Group: swa(uint64(block), uint64(window)), block: block, eagle: drafts}
					for mode := range 4 {
						r := reachB{align: align, horizon: -1}
						far := n*block + window + 2*align // ends beyond it have tails beyond n
						ends := multiples(align, far)
						switch mode {
						case 1: // a horizon inside a segment
							r.horizon = n - 3
							if !drafts { // with drafters it is not heeded
								ends = append(ends, r.horizon*block)
							}
						case 2: // only the prompt's end and a junction
							r.retention, r.boundaries = Some(0), []int{n*block - 5, align + 1}
							ends = []int{(n*block - 5) / align * align, align}
						case 3: // and one every two segments
							r.retention, r.boundaries = Some(uint64(2*align)), []int{n*block - 5}
							ends = append(multiples(2*align, far), (n*block-5)/align*align)
						}
						m := g.maskB(r)
						want := tailBlocks(n, block, window, drafts, ends)
						if m.all && drafts { // tails moved right by one leave block 0 out; the short cut does not
							set(&want, 0)
						}
						var got abi.Bitmap
						for j := range n {
							if m.block(j) {
								set(&got, j)
							}
						}
						require.Equal(t, Ranges(want), Ranges(got), "block %d, align %d, window %d, drafts %v, mode %d", block, align, window, drafts, mode)
					}
				}
			}
		}
	}
}

func TestMambaMaskPerToken(t *testing.T) {
	const n, block = 24, 4
	for _, align := range []int{4, 8, 16} {
		for _, interval := range []int{0, 4, 8, 16, 32} {
			for boundary := range n * block {
				g := group{Group: mamba(MambaAll, block), block: block}
				m := g.maskB(reachB{align: align, retention: Some(uint64(interval)), boundaries: []int{boundary}, horizon: -1})
				for j := range n {
					end := (j + 1) * block // the state that block j holds
					want := end == boundary/align*align || interval > 0 && end%interval == 0
					require.Equal(t, want, m.block(j), "align %d, interval %d, boundary %d, block %d", align, interval, boundary, j)
				}
			}
		}
	}
}

func TestReachableAPerSegment(t *testing.T) {
	for segment := 2; segment <= 5; segment++ {
		for window := 1; window < segment; window++ {
			for n := range 17 {
				for _, drafts := range []bool{false, true} {
					var want abi.Bitmap
					for _, end := range append(multiples(segment, n), n) {
						start := (end - 1) / segment * segment
						for i := max(0, start, end-window-one(drafts)); i < end; i++ {
							set(&want, i)
						}
					}
					for i := range n {
						require.Equal(t, has(want, i), reachableA(i, n, segment, window, drafts), "chunk %d of %d, segment %d, window %d, drafts %v", i, n, segment, window, drafts)
					}
				}
			}
		}
	}
}

// tables calls f with every table of up to n states of the given ones.
func tables(n int, of []abi.State, f func(states []abi.State)) {
	table := make([]abi.State, 0, n)
	var fill func()
	fill = func() {
		f(table)
		if len(table) == n {
			return
		}
		for _, s := range of {
			table = append(table, s)
			fill()
			table = table[:len(table)-1]
		}
	}
	fill()
}

func TestScansOverAllTables(t *testing.T) {
	all := []abi.State{abi.Miss, abi.Hit, abi.Pending, abi.Retry}
	here := func(s abi.State) bool { return s == abi.Hit || s == abi.Pending }
	tables(6, all, func(states []abi.State) {
		n := 0
		look := func(i int) abi.State { n++; return states[i] }
		end, deferred := prefixScan(0, len(states), look)
		// A scan looks up to and with the first Miss, counts what is here, and waits when
		// any of it is not known to be readable.
		seen, hits, wait := 0, 0, false
		for seen < len(states) && (seen == 0 || states[seen-1] != abi.Miss) {
			seen++
		}
		for _, s := range states[:seen] {
			hits += one(here(s))
			wait = wait || s == abi.Pending || s == abi.Retry
		}
		require.Equal(t, [3]any{hits, wait, seen}, [3]any{end, deferred, n}, "%v", states)

		for window := 1; window <= 3; window++ {
			for first := window; first <= window+1; first++ {
				for _, rev := range []Revision{RevA, RevB} {
					n = 0
					end, deferred := slidingScan(rev, 0, len(states), window, first, look)
					wantEnd, stop, wait := slidingByRuns(rev, states, window, first)
					require.Equal(t, [3]any{wantEnd, wait, len(states) - stop}, [3]any{end, deferred, n}, "%s, %v, window %d, first %d", rev, states, window, first)
				}
			}
		}
	})
}

// slidingByRuns says what a sliding scan answers by looking at whole runs of chunks that
// are here: the end, the lowest chunk looked up, and whether to wait.
func slidingByRuns(rev Revision, states []abi.State, window, first int) (end, stop int, wait bool) {
	here := func(s abi.State) bool { return s == abi.Hit || s == abi.Pending }
	end, stop = 0, 0
	lo := 0 // of the last run that was begun
	for hi := len(states); hi > 0; {
		run := 0
		for run < hi && here(states[hi-1-run]) {
			run++
		}
		want := window
		if hi == len(states) {
			want = first
		}
		if run >= want {
			end, stop, lo = hi, hi-want, hi-want
			goto found
		}
		if run == hi { // it begins at chunk 0
			end, stop, lo = run, 0, 0
			goto found
		}
		hi -= run + 1
	}
	end, stop, lo = 0, 0, 0
found:
	for i := stop; i < len(states); i++ {
		inRun := i >= lo && i < end
		switch states[i] {
		case abi.Retry:
			wait = true
		case abi.Pending:
			wait = wait || rev == RevA || inRun
		}
	}
	return end, stop, wait
}

// What a match in rev B answers can be loaded: all that the GPU keeps was looked up and
// was a Hit, for drawn tables.
func TestMatchLoadsWhatItFound(t *testing.T) {
	configs := []Config{
		producerLeg(RevB, full(16), swa(4, 8)), producerLeg(RevB, full(12), swa(8, 8)),
		producerLeg(RevB, full(12), swa(8, 9), swa(6, 20)), producerLeg(RevB, swa(8, 9), swa(6, 20)),
		producerLeg(RevB, full(16), mamba(MambaAll, 16)), producerLeg(RevB, full(64), chunked(16, 32)),
	}
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.SampledFrom(configs).Draw(t, "config")
		r, err := New(dense(c))
		require.NoError(t, err)
		text := rapid.Uint64Range(1, 200).Draw(t, "text")
		holes := rapid.MapOfN(rapid.Custom(func(t *rapid.T) Key {
			return Key{rapid.IntRange(0, len(c.Groups)-1).Draw(t, "group"), rapid.IntRange(0, 60).Draw(t, "chunk")}
		}), rapid.Just(true), 0, 8).Draw(t, "holes")
		look := func(k Key) abi.State {
			if holes[k] {
				return abi.Miss
			}
			return abi.Hit
		}
		d, err := r.Demand(Ask{TextTokens: text}, Tiers{Primary: look, Secondary: func(Key) abi.State { return abi.Miss }})
		require.NoError(t, err)
		require.Equal(t, 1, d.Steps)
		require.True(t, empty(d.Groups), "nothing is fetched from a tier that has nothing")
		require.True(t, empty(d.Unready), "text %d: loads %d, unready %s", text, d.Tokens, ranges(d.Unready))
	})
}
