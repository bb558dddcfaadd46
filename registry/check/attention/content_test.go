package attention_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/check/attention"
	"github.com/tierd/tierd/registry/plan"
)

// compute in steps: a prompt in steps of step tokens, then a token at a time.
func computeInSteps(m *attention.Model, text []int, prompt, step int) truth {
	s := m.Begin(text, prompt)
	s.EveryState = true
	w := truth{m: m, text: text, prompt: prompt, seq: s}
	for n := 0; n < len(text); {
		if n < prompt {
			n = min(n+step, prompt)
		} else {
			n++
		}
		w.logits = append(w.logits, s.Step(n)...)
	}
	return w
}

// differ returns, for each layer of group g, the tokens whose rows are not the same in
// two sequences of one text.
func differ(a, b *attention.Sequence, g, size int) (tokens [][]int) {
	for k := range size {
		x, y := a.Rows(g, k, k+1), b.Rows(g, k, k+1)
		if tokens == nil {
			tokens = make([][]int, len(x))
		}
		for i := range x {
			if !slices.EqualFunc(x[i][0], y[i][0], same) {
				tokens[i] = append(tokens[i], k)
			}
		}
	}
	return tokens
}

// same reports whether two numbers are equal. A row that no kind writes stays poison: a
// token inside a latent has none.
func same(x, y float64) bool { return x == y || math.IsNaN(x) && math.IsNaN(y) }

// Rows do not depend on how a text came to be, whole, in steps or decoded, in any mix of
// groups that do not look at the prompt's end.
func TestRowsDoNotDependOnThePrompt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var groups []attention.Group
		for range rapid.IntRange(1, 3).Draw(t, "groups") {
			p := drawPart(t)
			if p.group.Kind == attention.PromptWindow {
				p = full()
			}
			groups = append(groups, p.group)
		}
		m := attention.New(rapid.Uint64().Draw(t, "weights"), 2, groups...)
		text := words(rapid.IntRange(1, 40).Draw(t, "text"), rapid.Uint64().Draw(t, "words"))
		whole := compute(m, text, len(text))
		other := computeInSteps(m, text, rapid.IntRange(1, len(text)).Draw(t, "prompt"), rapid.IntRange(1, len(text)).Draw(t, "step"))
		require.Empty(t, whole.unlike(other.logits))
		for g := range groups {
			for _, tokens := range differ(whole.seq, other.seq, g, len(text)) {
				require.Empty(t, tokens)
			}
		}
	})
}

// Where a group reads the whole prompt, and a window of the rest, what is decoded more
// than a window behind the prompt read less than the same token of a longer prompt. So
// its rows are others in every layer above, whatever the group of that layer. Rows of the
// prompt are the same, bit for bit; and so are those of the first layer, which holds what
// comes of a token alone.
func TestDecodedRowsAreNotAPrompts(t *testing.T) {
	const size, w = 24, 4
	groups := []attention.Group{rswa(w).group, full().group, window(3, 0).group, state(0).group}
	m := attention.New(1, 2, groups...)
	text := words(size, 1)
	long := compute(m, text, size)
	for prompt := 1; prompt <= size; prompt++ {
		short := computeInSteps(m, text, prompt, 5)
		var behind []int // tokens whose query read less
		for n := prompt + w; n < size; n++ {
			behind = append(behind, n)
		}
		for g := range groups {
			for layer, tokens := range differ(short.seq, long.seq, g, size) {
				if g == 0 && layer == 0 {
					require.Empty(t, tokens)
				} else {
					require.Equal(t, behind, tokens, "prompt %d, group %d, its layer %d", prompt, g, layer)
				}
			}
		}
	}
}

// A tier that takes decoded chunks of any group of such a model serves wrong KV: the next
// turn's producer finds the key in its tier and does not store again. No NaN tells.
func TestDecodedChunksCorruptTheNextTurn(t *testing.T) {
	everything := func(p part) part {
		return twist(p, twisted{reach: full().open(t).Reach})
	}
	for name, c := range map[string]struct {
		parts  []part
		broken bool
	}{
		"rswa stores what it decodes":     {[]part{everything(rswa(3).in(2, 1))}, true},
		"rswa":                            {[]part{rswa(3).in(2, 1)}, false},
		"full beside it stores all":       {[]part{rswa(3).in(2, 1), everything(full().in(2, 1))}, true},
		"full beside it stores prompts":   {[]part{rswa(3).in(2, 1), full().in(2, 1)}, false},
		"full beside a window stores all": {[]part{window(3, 0).in(2, 1), full().in(2, 1)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, 3, 0, c.parts...)
			if c.broken {
				d = deployAll(t, 3, c.parts...)
			}
			text := words(16, 2)
			r := run{text: text, prompt: 5, truth: compute(d.m, text, 5)}
			stored, again := tier{}, tier{}
			d.produce(t, r, stored)
			turn := append(slices.Clone(text), words(3, 9)...)
			next := compute(d.m, turn, len(turn)-1)
			d.produce(t, run{text: turn, prompt: next.prompt, held: stored, truth: next}, again)
			how := d.consume(&next, d.eager(t, next.prompt, 0), 0, again)
			if c.broken {
				require.Equal(t, "others", how)
			} else {
				require.Empty(t, how)
			}
		})
	}
}

// deployAll is deploy without the policy that keeps decoded chunks out.
func deployAll(t require.TestingT, seed uint64, parts ...part) *deployment {
	d := deploy(t, seed, 0, parts...)
	m := *d.planner.Model()
	m.Policies = nil
	var err error
	d.planner, err = plan.New(m)
	require.NoError(t, err)
	return d
}

// subject is the same deployment before the check.
func (d *deployment) subject(t require.TestingT, maxTokens int) check.Subject {
	s := check.Subject{MaxTokens: uint64(maxTokens), PD: true, Probe: true}
	for _, p := range d.parts {
		s.Groups = append(s.Groups, check.Claim{Manifest: p.spec.Manifest(), Params: p.params})
	}
	s.Open = func() (plan.Model, func(), error) {
		m := *d.planner.Model()
		m.Groups = slices.Clone(m.Groups)
		for g, p := range d.parts {
			m.Groups[g].Rule = p.open(t)
		}
		return m, func() {}, nil
	}
	return s
}

// Relation content refuses a rule that stores a decoded chunk when, and only when, the
// arithmetic gives that chunk other rows inside a longer prompt, and names that chunk. The
// rule, of one of the two groups, stores the chunks of the prompt, and at one prompt length
// one more; the domain is just long enough to decode that one.
func TestContentIsWhatTheArithmeticSays(t *testing.T) {
	const window = 5
	for _, in := range []struct{ block, blocks, beside int }{{1, 1, 4}, {1, 3, 1}, {4, 1, 2}} {
		for wrong, size := range []int{in.block * in.blocks, in.beside} {
			name := fmt.Sprintf("blocks of %d, %d a chunk, beside chunks of %d, group %d", in.block, in.blocks, in.beside, wrong)
			t.Run(name, func(t *testing.T) {
				refused := 0
				for _, prompt := range []int{1, 4} {
					edge := (prompt + window) / size // chunk of the first token that reads less
					for c := max(prompt/size, edge-1); c <= edge+1; c++ {
						parts := []part{rswa(window).in(in.block, in.blocks), full().in(1, in.beside)}
						parts[wrong] = twist(parts[wrong], twisted{reach: oneMore(t, prompt, c)})
						parts[1-wrong] = twist(parts[1-wrong], twisted{reach: oneMore(t, 0, 0)})
						d := deployAll(t, 1, parts...)
						if judgeContent(t, d, wrong, prompt, c, size) {
							refused++
						}
					}
				}
				require.NotZero(t, refused)
			})
		}
	}
}

// judgeContent asks the arithmetic about chunk c of group g, decoded after a prompt, and
// requires that the check says the same.
func judgeContent(t *testing.T, d *deployment, g, prompt, c, size int) (refused bool) {
	text := words((c+1)*size, 1)
	short, long := computeInSteps(d.m, text, min(prompt, len(text)), 5), compute(d.m, text, len(text))
	other := slices.ContainsFunc(differ(short.seq, long.seq, g, len(text)), func(tokens []int) bool {
		return len(tokens) > 0 && tokens[len(tokens)-1] >= c*size
	})
	rep, err := check.Run(context.Background(), d.subject(t, len(text)), check.Options{Workers: 1})
	require.NoError(t, err)
	ce := rep.Counterexample
	if !other {
		require.True(t, ce == nil || ce.Relation != "content", "prompt %d, chunk %d: its rows are right, but: %v", prompt, c, ce)
		return false
	}
	require.NotNil(t, ce, "prompt %d, chunk %d: its rows are others, but the rule is accepted", prompt, c)
	require.Equal(t, "content", ce.Relation, ce)
	require.EqualValues(t, prompt, ce.PromptTokens)
	require.Equal(t, []check.Range{{First: uint32(c), Last: uint32(c)}}, ce.Surplus, ce)
	require.Equal(t, d.planner.Model().Groups[g].Name, ce.Group)
	return true
}

// oneMore keeps the chunks of the prompt, and of one prompt length chunk c.
func oneMore(t require.TestingT, prompt, c int) func(abi.Round, abi.Bitmap) error {
	in := rswa(1).open(t)
	return func(r abi.Round, out abi.Bitmap) error {
		if r.PromptTokens == uint64(prompt) && int(r.Lo) <= c && c < int(min(uint64(r.Hi), r.StoredTokens/r.ChunkTokens)) {
			out.Set(c - int(r.Lo))
		}
		return in.Reach(r, out)
	}
}
