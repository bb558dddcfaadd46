package check

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"pgregory.net/rapid"
)

// TestSampleDoesNotDependOnWhoHeardIt: whichever witness hears which calls, in whatever
// order, and however often, together they remember the same ones.
func TestSampleDoesNotDependOnWhoHeardIt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := rng(rapid.Uint64().Draw(t, "calls"))
		calls := make([]call, rapid.IntRange(0, 6*sampleMax).Draw(t, "n"))
		for i := range calls {
			r := abi.Round{ChunkTokens: 4, PromptTokens: 1 + draw.below(300), Hi: uint32(draw.below(70))}
			switch draw.below(3) {
			case 0:
				calls[i] = call{"reach", r, nil}
			case 1:
				calls[i] = call{"scan", r, drawnTable(r.Chunks(), 1, &draw)}
			case 2:
				calls[i] = call{"need", r, nil}
			}
		}
		sample := func(witnesses int) (keys []uint64) {
			var ws []*witness
			for range witnesses {
				ws = append(ws, newWitness(nil, "w", 7))
			}
			for range 3 * len(calls) {
				c := calls[draw.below(uint64(len(calls)))]
				c.hear(ws[draw.below(uint64(witnesses))])
			}
			for i := range calls {
				calls[i].hear(ws[i%witnesses])
			}
			kept, broke := agreed(ws)
			require.Nil(t, broke)
			for i := range kept {
				keys = append(keys, kept[i].key)
			}
			require.LessOrEqual(t, len(keys), 3*sampleMax)
			return keys
		}
		want := sample(1)
		for n := 2; n < 5; n++ {
			require.Equal(t, want, sample(n))
		}
	})
}

// hear lets a witness hear the call answered with nothing.
func (c *call) hear(w *witness) {
	n := c.round.Chunks()
	w.heard(*c, n, abi.NewBitmap(n), abi.Span{}, nil)
}

// TestKeyIgnoresWhatLiesBeyondTheTable: a planner's table has room for more than it asks.
func TestKeyIgnoresWhatLiesBeyondTheTable(t *testing.T) {
	a := call{"scan", abi.Round{Hi: 5}, abi.States{0x155}}
	b := call{"scan", abi.Round{Hi: 5}, abi.States{0xffff_fc00 | 0x155}}
	c := call{"scan", abi.Round{Hi: 5}, abi.States{0x055}}
	require.Equal(t, a.key(1), b.key(1))
	require.True(t, a.same(&b))
	require.NotEqual(t, a.key(1), c.key(1))
	require.False(t, a.same(&c))
	require.NotEqual(t, a.key(1), a.key(2))
}

// TestWitnessHearsTheSameCallTwice: a remembered call that comes again with another answer
// is named, with what came between.
func TestWitnessHearsTheSameCallTwice(t *testing.T) {
	w := newWitness(nil, "sliding", 1)
	c := call{"reach", abi.Round{PromptTokens: 9, Hi: 3}, nil}
	c.hear(w)
	for i := range 7 {
		o := call{"need", abi.Round{PromptTokens: uint64(i), Hi: 3}, nil}
		o.hear(w)
	}
	require.Nil(t, w.broke)
	w.heard(c, 3, abi.Bitmap{4}, abi.Span{}, nil)
	require.NotNil(t, w.broke)
	require.Equal(t, "none", w.broke.first.String())
	require.Equal(t, "{2}", w.broke.second.String())
	require.EqualValues(t, 7, w.broke.calls)
	require.Len(t, w.broke.after, afterMax-1)
	require.EqualValues(t, 6, w.broke.after[afterMax-2].round.PromptTokens)
}

func TestAnswersInWords(t *testing.T) {
	for want, a := range map[string]answer{
		"none":                             {},
		"{0, 2-3}":                         {set: abi.Bitmap{13}},
		"4 usable and {0, 2-3}":            {set: abi.Bitmap{13}, span: abi.Span{Usable: 4}},
		"deferred until {0, 2-3} is known": {set: abi.Bitmap{13}, span: abi.Span{Deferred: true}},
		"that no KV can be resumed there":  {err: abi.ErrNoResume},
		"the error " + errAnswer{}.Error(): {err: errAnswer{}},
	} {
		require.Equal(t, want, a.String())
	}
}

type errAnswer struct{}

func (errAnswer) Error() string { return "out of cheese" }
