package wasm_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/specs"
)

// The rule of examples/window-* in each language. The shipped window rule with no extra
// tokens is their model: written apart from them, in another shape.
var languages = []string{"go", "c", "rust", "as"}

var twinsSeed = flag.Uint64("twins-seed", 0, "seed of the windows that the twins are compared at; 0 draws one")

// guestsDir is where make guests leaves the modules, seen from this directory.
const guestsDir = "../../.build/guests"

// guestFile returns the path of a module that make guests builds. Without it the test is
// skipped, or fails where TIERD_GUESTS=required says that it must be there.
func guestFile(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(guestsDir, name)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("TIERD_GUESTS") == "required" {
			t.Fatalf("%v: run make guests", err)
		}
		t.Skip(name + " is not built: run make guests")
	}
	return path
}

// twin loads the window rule of a language.
func twin(t testing.TB, language string) abi.Spec {
	t.Helper()
	code, err := os.ReadFile(guestFile(t, "window-"+language+".wasm"))
	require.NoError(t, err)
	m, err := wasm.Load(context.Background(), language, code, wasm.Options{CacheDir: filepath.Join(guestsDir, "..", "compiled")})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close(context.Background())) })
	require.Len(t, m.Specs(), 1)
	return m.Specs()[0]
}

// pairAt opens the twin and its model with one window.
func pairAt(t require.TestingT, twin abi.Spec, window uint64) (p pair, release func()) {
	native, err := specs.Window().Open([]uint64{window, 0})
	require.NoError(t, err)
	guest, err := twin.Open([]uint64{window})
	require.NoError(t, err)
	guest, release = guest.(wasm.Pinner).Pin()
	return pair{native.(abi.SpecRule), guest.(abi.SpecRule), window}, release
}

// A pair is the same rule twice.
type pair struct {
	native, guest abi.SpecRule
	window        uint64
}

func (p pair) reach(t require.TestingT, r abi.Round) {
	a, b := abi.NewBitmap(r.Chunks()), abi.NewBitmap(r.Chunks())
	require.NoError(t, p.native.Reach(r, a))
	require.NoError(t, p.guest.Reach(r, b))
	if !a.Equal(b) {
		require.Fail(t, "Reach differs", "window %d, %+v: native %b, guest %b", p.window, r, a, b)
	}
}

func (p pair) scan(t require.TestingT, r abi.Round, states abi.States) {
	a, b := abi.NewBitmap(r.Chunks()), abi.NewBitmap(r.Chunks())
	spanA, err := p.native.Scan(r, states, a)
	require.NoError(t, err)
	spanB, err := p.guest.Scan(r, states, b)
	require.NoError(t, err)
	if spanA != spanB || !a.Equal(b) {
		require.Fail(t, "Scan differs", "window %d, %+v, %s: native %+v %b, guest %+v %b", p.window, r, states.Format(r.Chunks()), spanA, a, spanB, b)
	}
}

func (p pair) need(t require.TestingT, r abi.Round) {
	r.Lo = 0
	a, b := abi.NewBitmap(int(r.Hi)), abi.NewBitmap(int(r.Hi))
	require.NoError(t, p.native.Need(r, a))
	require.NoError(t, p.guest.Need(r, b))
	if !a.Equal(b) {
		require.Fail(t, "Need differs", "window %d, %+v: native %b, guest %b", p.window, r, a, b)
	}
}

// windows draws parameter values: the smallest and the largest, and others that small
// rounds tell apart.
func windows(t *testing.T) []uint64 {
	seed := *twinsSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("to draw the same windows again: -twins-seed %d", seed)
	draw := rand.New(rand.NewPCG(seed, 0))
	list := []uint64{2, 1 << 20}
	n := 20
	if raceEnabled || testing.Short() {
		n = 3
	}
	for len(list) < n {
		list = append(list, 2+draw.Uint64N(25))
	}
	return list
}

// TestTwinsOnTheSmallDomain: every language answers everything as the native rule does,
// on all small rounds and all small lookup tables.
func TestTwinsOnTheSmallDomain(t *testing.T) {
	list := windows(t)
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			spec := twin(t, language)
			for _, w := range list {
				p, release := pairAt(t, spec, w)
				for _, chunk := range []uint64{1, 3} {
					smallReaches(t, p, chunk)
					smallScans(t, p, chunk)
					smallNeeds(t, p, chunk)
				}
				release()
			}
		})
	}
}

func smallReaches(t *testing.T, p pair, chunk uint64) {
	const chunks = 5
	for stored := range chunks*chunk + 3 {
		for resume := range stored + 2 {
			for _, junction := range []uint64{0, 1, stored / 2, stored, stored + 1} {
				for align := uint64(0); align <= 3*chunk; align += chunk {
					for lo := range uint32(chunks + 1) {
						for hi := lo; hi <= chunks; hi += 1 + lo%2 {
							p.reach(t, abi.Round{
								BlockTokens: chunk, ChunkTokens: chunk, PromptTokens: stored, StoredTokens: stored,
								ResumeTokens: resume, AlignTokens: align, JunctionTokens: junction, Lo: lo, Hi: hi,
							})
						}
					}
				}
			}
		}
	}
}

func smallScans(t *testing.T, p pair, chunk uint64) {
	for n := range uint32(6) {
		for _, lo := range []uint32{0, 2} {
			for bound := range uint64(lo+n+1)*chunk + 1 {
				r := abi.Round{BlockTokens: chunk, ChunkTokens: chunk, PromptTokens: bound + 1, BoundTokens: bound, Lo: lo, Hi: lo + n}
				for table := range uint64(1) << (2 * n) {
					p.scan(t, r, abi.States{table}[:min(n, 1)])
				}
			}
		}
	}
}

func smallNeeds(t *testing.T, p pair, chunk uint64) {
	for hi := range uint32(7) {
		for resume := range uint64(hi)*chunk + 3 {
			p.need(t, abi.Round{BlockTokens: chunk, ChunkTokens: chunk, PromptTokens: resume + 1, StoredTokens: resume, ResumeTokens: resume, Hi: hi})
		}
	}
}

// TestTwinsDrawn goes beyond the small domain: long tables, wide ranges, lengths up to the
// contract's bounds.
func TestTwinsDrawn(t *testing.T) {
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			spec := twin(t, language)
			rapid.Check(t, func(t *rapid.T) {
				window := rapid.OneOf(rapid.Uint64Range(2, 300), rapid.Uint64Range(2, 1<<20)).Draw(t, "window")
				p, release := pairAt(t, spec, window)
				defer release()
				for range 4 {
					r, states := drawRound(t)
					p.reach(t, r)
					p.scan(t, r, states)
					p.need(t, r)
				}
			})
		})
	}
}

func drawRound(t *rapid.T) (abi.Round, abi.States) {
	block := rapid.Uint64Range(1, 32).Draw(t, "block")
	chunk := block * rapid.Uint64Range(1, 8).Draw(t, "blocks")
	hi := rapid.Uint32Range(0, 300).Draw(t, "hi")
	token := rapid.OneOf(rapid.Uint64Range(0, uint64(hi+2)*chunk), rapid.Uint64Range(0, abi.MaxTokens))
	r := abi.Round{
		BlockTokens: block, ChunkTokens: chunk,
		PromptTokens: token.Draw(t, "prompt"), StoredTokens: token.Draw(t, "stored"), ResumeTokens: token.Draw(t, "resume"),
		AlignTokens: chunk * rapid.Uint64Range(0, 9).Draw(t, "align"), JunctionTokens: token.Draw(t, "junction"),
		BoundTokens: token.Draw(t, "bound"),
		Lo:          rapid.Uint32Range(0, hi).Draw(t, "lo"), Hi: hi,
	}
	states := abi.NewStates(r.Chunks())
	for i := 0; i < r.Chunks(); {
		end := min(r.Chunks(), i+rapid.IntRange(1, 90).Draw(t, "run"))
		states.Fill(i, end, abi.State(rapid.IntRange(0, 3).Draw(t, "state")))
		i = end
	}
	return r, states
}

// The largest round of the contract fits every guest, which then serves a small one again.
func TestTwinsLargestRound(t *testing.T) {
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			p, release := pairAt(t, twin(t, language), 1000)
			defer release()
			const tokens = abi.MaxChunks * 16
			r := abi.Round{
				BlockTokens: 16, ChunkTokens: 16, PromptTokens: tokens, StoredTokens: tokens, ResumeTokens: tokens - 1,
				AlignTokens: 4096, BoundTokens: tokens - 1, Hi: abi.MaxChunks,
			}
			require.NoError(t, r.Validate())
			states := abi.NewStates(abi.MaxChunks)
			for _, hi := range []uint32{abi.MaxChunks, 3} {
				r.Hi = hi
				p.reach(t, r)
				p.need(t, r)
				for _, s := range []abi.State{abi.Miss, abi.Hit, abi.Retry} {
					states.Fill(0, int(hi), s)
					p.scan(t, r, states)
				}
			}
		})
	}
}

// Every twin says the same of itself, and keeps the laws.
func TestTwinsManifestsAndLaws(t *testing.T) {
	want := twin(t, languages[0]).Manifest()
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			spec := twin(t, language)
			require.Equal(t, want, spec.Manifest())
			abitest.Run(t, spec)
		})
	}
}
