package attention_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check/attention"
	"github.com/tierd/tierd/specs"
)

// A part is one group: what its arithmetic is, and the rule that claims to know it.
type part struct {
	group         attention.Group
	spec          abi.Spec
	params        []uint64
	block, blocks int // tokens of a block, blocks of a chunk
}

func (p part) String() string {
	return fmt.Sprintf("%s%v in blocks of %d, %d a chunk", p.spec.Manifest().Name, p.params, p.block, p.blocks)
}

func (p part) chunk() int { return p.block * p.blocks }

func (p part) open(t require.TestingT) abi.SpecRule {
	r, err := p.spec.Open(p.params)
	require.NoError(t, err)
	return r.(abi.SpecRule)
}

func (p part) in(block, blocks int) part {
	p.block, p.blocks = block, blocks
	return p
}

func full() part {
	return part{group: attention.Group{Kind: attention.Causal}, spec: specs.Full()}
}

func hiddenStates() part {
	return part{group: attention.Group{Kind: attention.Causal}, spec: specs.Hidden()}
}

func window(w, extra int) part {
	return part{group: attention.Group{Kind: attention.Window, Window: w}, spec: specs.Window(), params: []uint64{uint64(w), uint64(extra)}}
}

func chunked(c int) part {
	return part{group: attention.Group{Kind: attention.Run, Run: c}, spec: specs.Chunked(), params: []uint64{uint64(c)}}
}

func sink(s, w int) part {
	return part{group: attention.Group{Kind: attention.SinkWindow, Sink: s, Window: w}, spec: specs.Sink(), params: []uint64{uint64(s), uint64(w)}}
}

func rswa(w int) part {
	return part{group: attention.Group{Kind: attention.PromptWindow, Window: w}, spec: specs.RSWA(), params: []uint64{uint64(w)}}
}

func latent(r int) part {
	return part{group: attention.Group{Kind: attention.Latent, Ratio: r}, spec: specs.Latent(), params: []uint64{uint64(r)}}
}

func state(mode int) part {
	return part{group: attention.Group{Kind: attention.State, EveryState: mode == 0}, spec: specs.State(), params: []uint64{uint64(mode)}}
}

// every returns one group of each kind and size that small texts can tell apart.
func every() []part {
	parts := []part{full(), hiddenStates(), state(0), state(1)}
	for _, w := range []int{1, 2, 3, 5, 9, 40} {
		parts = append(parts, window(w, 0), rswa(w))
	}
	for _, c := range []int{1, 2, 3, 4, 6, 40} {
		parts = append(parts, chunked(c), latent(c))
	}
	for _, s := range []int{1, 4, 7} {
		parts = append(parts, sink(s, 1), sink(s, 2), sink(s, 5))
	}
	return append(parts, window(3, 2))
}

// words returns a text of n tokens.
func words(n int, seed uint64) []int {
	text := make([]int, n)
	for i := range text {
		seed = seed*6364136223846793005 + 1442695040888963407
		text[i] = int(seed>>33) % attention.Vocabulary
	}
	return text
}

// A truth is a text computed whole.
type truth struct {
	m      *attention.Model
	text   []int
	prompt int
	seq    *attention.Sequence
	logits [][]float64
}

func compute(m *attention.Model, text []int, prompt int) truth {
	s := m.Begin(text, prompt)
	s.EveryState = true
	return truth{m, text, prompt, s, s.Step(len(text))}
}

// unlike says how the logits of the last tokens of a text are not those of the truth: ""
// when they are equal bit for bit, "NaN", or "others".
func (w *truth) unlike(last [][]float64) string {
	how := ""
	for i, want := range w.logits[len(w.logits)-len(last):] {
		for j, v := range last[i] {
			if math.IsNaN(v) {
				return "NaN"
			}
			if v != want[j] {
				how = "others"
			}
		}
	}
	return how
}

// resumed says what becomes of the logits from token n on when a sequence has only the
// chunks of given, of unit tokens, of group 0, and of the other groups every row below n.
func (w *truth) resumed(n, unit int, given abi.Bitmap) string {
	s := w.m.Begin(w.text, w.prompt)
	for c := given.Next(0); c >= 0; c = given.Next(c + 1) {
		s.Load(0, c*unit, w.seq.Rows(0, c*unit, min((c+1)*unit, len(w.text))))
	}
	for g := 1; g < len(w.m.Groups) && n > 0; g++ {
		s.Load(g, 0, w.seq.Rows(g, 0, n))
	}
	s.Resume(n)
	return w.unlike(s.Step(len(w.text)))
}

// A needFunc is a rule's Need.
type needFunc func(abi.Round, abi.Bitmap) error

// judge returns what the arithmetic has against a Need for group 0 at token n, in chunks
// of unit tokens.
func (w *truth) judge(need needFunc, n, unit int) error {
	whole := len(w.text) / unit // chunks that can be stored
	r := abi.Round{
		BlockTokens: uint64(unit), ChunkTokens: uint64(unit), PromptTokens: uint64(w.prompt),
		StoredTokens: uint64(len(w.text)), ResumeTokens: uint64(n), Hi: uint32((n + unit - 1) / unit),
	}
	set := abi.NewBitmap(max(r.Chunks(), whole))
	switch err := need(r, set); {
	case errors.Is(err, abi.ErrNoResume):
		set.Zero()
		set.SetRange(0, whole)
		if how := w.resumed(n, unit, set); how != "NaN" {
			return fmt.Errorf("no resume at %d, chunks of %d, prompt %d: but all whole chunks are enough (%q)", n, unit, w.prompt, how)
		}
		return nil
	case err != nil:
		return err
	}
	if how := w.resumed(n, unit, set); how != "" {
		return fmt.Errorf("resume at %d, chunks of %d, prompt %d: need leaves out what is read (%s)", n, unit, w.prompt, how)
	}
	for c := set.Next(0); c >= 0; c = set.Next(c + 1) {
		if !w.holds(c, n, unit) {
			continue
		}
		set.Unset(c)
		if how := w.resumed(n, unit, set); how != "NaN" {
			return fmt.Errorf("resume at %d, chunks of %d, prompt %d: need names chunk %d, which is not read (%q)", n, unit, w.prompt, c, how)
		}
		set.Set(c)
	}
	return nil
}

// holds reports whether a chunk holds a row below token n. All do, but of a Latent such a
// chunk as lies inside one: the latent is kept where its last token is. Need names it all
// the same, which costs a fetch of nothing.
func (w *truth) holds(c, n, unit int) bool {
	g := w.m.Groups[0]
	return g.Kind != attention.Latent || min(n, (c+1)*unit)/g.Ratio > c*unit/g.Ratio
}

// judgeAll judges a Need at every token of a text, in chunks of several sizes. For a group
// that looks at the prompt's end it also tries prompts that end inside the text.
func judgeAll(p part, need needFunc, seed uint64, size int) error {
	m := attention.New(seed, 2, p.group, attention.Group{Kind: attention.Window, Window: 3})
	prompts := []int{size}
	if p.group.Kind == attention.PromptWindow {
		prompts = []int{1, 4, 9, size}
	}
	for _, prompt := range prompts {
		w := compute(m, words(size, seed), min(prompt, size))
		for unit := 1; unit <= 6; unit++ {
			for n := range size {
				if err := w.judge(need, n, unit); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Need names what attention reads to go on from a token, all of it and nothing else, and
// says ErrNoResume only where all that can be stored is not enough.
func TestNeedIsWhatIsRead(t *testing.T) {
	for _, p := range every() {
		t.Run(fmt.Sprint(p.spec.Manifest().Name, p.params), func(t *testing.T) {
			require.NoError(t, judgeAll(p, p.open(t).Need, 1, 19))
		})
	}
}

func TestNeedIsWhatIsReadInDrawnCases(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPart(t)
		size := rapid.IntRange(1, 60).Draw(t, "text")
		beside := drawPart(t).group
		beside.Ratio = 1 // it is to go on from every token
		m := attention.New(rapid.Uint64().Draw(t, "weights"), 2, p.group, beside)
		w := compute(m, words(size, rapid.Uint64().Draw(t, "words")), rapid.IntRange(1, size).Draw(t, "prompt"))
		unit := rapid.IntRange(1, 16).Draw(t, "chunk")
		for range 4 {
			require.NoError(t, w.judge(p.open(t).Need, rapid.IntRange(0, size-1).Draw(t, "resume"), unit))
		}
	})
}

// drawPart draws a group of any kind, sizes small beside the texts.
func drawPart(t *rapid.T) part {
	size := func(label string) int { return rapid.IntRange(1, 20).Draw(t, label) }
	p := full()
	switch rapid.SampledFrom([]attention.Kind{attention.Causal, attention.Window, attention.Run, attention.SinkWindow, attention.PromptWindow, attention.Latent, attention.State}).Draw(t, "kind") {
	case attention.Window:
		p = window(size("window"), rapid.SampledFrom([]int{0, 0, 3}).Draw(t, "extra"))
	case attention.Run:
		p = chunked(size("run"))
	case attention.SinkWindow:
		p = sink(size("sink"), size("window"))
	case attention.PromptWindow:
		p = rswa(size("window"))
	case attention.Latent:
		p = latent(rapid.IntRange(1, 6).Draw(t, "ratio"))
	case attention.State:
		p = state(rapid.IntRange(0, 1).Draw(t, "mode"))
	}
	p.block, p.blocks = rapid.IntRange(1, 4).Draw(t, "block"), rapid.IntRange(1, 3).Draw(t, "blocks")
	if p.group.Kind == attention.State {
		p.blocks = 1
	}
	return p
}

// A wrongNeed is a Need for a group that is wrong in one way, and what the arithmetic says.
type wrongNeed struct {
	part part
	need needFunc
	want string
}

func wrongNeeds(t require.TestingT) map[string]wrongNeed {
	need := func(p part) needFunc { return p.open(t).Need }
	always := func(err error) needFunc { return func(abi.Round, abi.Bitmap) error { return err } }
	const short, surplus, possible = "need leaves out what is read (NaN)", "which is not read", "all whole chunks are enough"
	return map[string]wrongNeed{
		"full, first chunk forgotten": {full(), func(r abi.Round, out abi.Bitmap) error {
			err := need(full())(r, out)
			out.UnsetRange(0, 1)
			return err
		}, short},
		"full, last chunk forgotten": {full(), func(r abi.Round, out abi.Bitmap) error {
			out.SetRange(0, int(r.ResumeTokens/r.ChunkTokens)) // of a partial chunk, nothing
			return nil
		}, short},
		"window a token short":               {window(5, 0), need(window(4, 0)), short},
		"window a token long":                {window(5, 0), need(window(6, 0)), surplus},
		"window taken for full":              {window(5, 0), need(full()), surplus},
		"sink forgotten":                     {sink(4, 3), need(window(3, 0)), short},
		"sink a token short":                 {sink(4, 3), need(sink(3, 3)), short},
		"sink a token long":                  {sink(4, 3), need(sink(5, 3)), surplus},
		"attention chunk taken for a window": {chunked(6), need(window(6, 0)), surplus},
		"attention chunk cut a token late": {chunked(6), func(r abi.Round, out abi.Bitmap) error {
			for c := range uint64(r.Hi) { // runs of the token before the resume point
				if last := min((c+1)*r.ChunkTokens, r.ResumeTokens) - 1; last/6 == (r.ResumeTokens-1)/6 {
					out.Set(int(c))
				}
			}
			return nil
		}, surplus},
		"attention chunk misaligned": {chunked(6), func(r abi.Round, out abi.Bitmap) error {
			for c := range uint64(r.Hi) { // runs that begin at token 1
				if last := min((c+1)*r.ChunkTokens, r.ResumeTokens) - 1; (last+5)/6 == (r.ResumeTokens+5)/6 {
					out.Set(int(c))
				}
			}
			return nil
		}, short},
		"state a chunk early": {state(0), func(r abi.Round, out abi.Bitmap) error {
			if r.ResumeTokens%r.ChunkTokens != 0 {
				return abi.ErrNoResume
			}
			if c := int(r.ResumeTokens / r.ChunkTokens); c > 1 {
				out.Set(c - 2)
			}
			return nil
		}, short},
		"state resumed inside a chunk": {state(0), func(r abi.Round, out abi.Bitmap) error {
			if c := int(r.ResumeTokens / r.ChunkTokens); c > 0 {
				out.Set(c - 1)
			}
			return nil
		}, short},
		"state taken for full":           {state(0), need(full()), surplus},
		"state never resumed":            {state(0), always(abi.ErrNoResume), possible},
		"latent never resumed":           {latent(3), always(abi.ErrNoResume), possible},
		"latent resumed inside a latent": {latent(3), need(full()), short},
		"latent of another ratio":        {latent(3), need(latent(2)), short},
		"rswa, prompt forgotten":         {rswa(3), need(window(3, 0)), short},
		"rswa, window forgotten": {rswa(3), func(r abi.Round, out abi.Bitmap) error {
			for c := range uint64(r.Hi) {
				if c*r.ChunkTokens < r.PromptTokens {
					out.Set(int(c))
				}
			}
			return nil
		}, short},
		"rswa taken for full": {rswa(3), need(full()), surplus},
	}
}

// The arithmetic rejects each Need that is wrong in one way.
func TestWrongNeedsAreRejected(t *testing.T) {
	for name, c := range wrongNeeds(t) {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, judgeAll(c.part, c.need, 1, 19), c.want)
		})
	}
}

// A model in which the arithmetic itself is wrong is told apart as well: no two kinds
// give the same logits, so none of the tests compares a kind with itself under another
// name.
func TestKindsDiffer(t *testing.T) {
	var seen [][]float64
	for _, p := range []part{full(), window(4, 0), window(5, 0), chunked(4), chunked(5), sink(1, 4), sink(2, 4), rswa(4), latent(2), latent(3), state(0)} {
		w := compute(attention.New(1, 2, p.group), words(16, 1), 3)
		last := w.logits[15]
		require.False(t, slices.ContainsFunc(seen, func(o []float64) bool { return slices.Equal(o, last) }), p)
		seen = append(seen, last)
	}
}
