// Package attention is a small transformer: ground truth about KV that no rule wrote.
// Nothing but tests imports it.
//
// # The story
//
// The check judges a rule's Need by a mask, and demand by Need. Masks and rules are both
// predicates over token numbers, and the same mistake can be in both. This package asks
// the arithmetic instead. A [Sequence] computes the logits of a text, token by token,
// through layers of real attention, and keeps what it computed in rows: a row for each
// layer and token. A row that was never computed or loaded is poison: it holds NaN. A
// second Sequence is given only some chunks of the rows of the first, is told to resume
// at a token, and computes the rest. Either its logits are those of the first, bit for
// bit, because the additions run in the same order; or it read something it was not
// given, and NaN spreads to every later logit; or it read too little, and they differ.
//
// So the tests can show, without any table of expected chunks:
//
//   - Need names every chunk that is read, and none that is not;
//   - where Need says ErrNoResume, all whole chunks together are not enough;
//   - what the planner demands and the producer machine copies is enough, for any split
//     into steps, native prefix and local prefix, with everything else freed;
//   - a key names tokens only, so the rows under it must not depend on where the prompt
//     ended. They do where attention looks at the prompt's end, in every layer above.
//
// # The model
//
// Layers interleave the groups, several rounds of them, as hybrids do: a row of an upper
// layer depends on what all groups below it read. Tokens are embedded with their
// position; a layer is normed attention of [Heads] heads and a normed two-layer
// perceptron, both residual; logits are products with the embeddings. Weights are drawn
// from a seed. What a group's query at q reads:
//
//	Causal        all rows up to its own
//	Window        the last Window rows, its own included
//	Run           its own run of Run tokens, up to its own row
//	SinkWindow    the first Sink rows, and the last Window
//	PromptWindow  all rows of the prompt, and the last Window
//	Latent        one row for Ratio tokens, the mean of their keys and values, kept at the
//	              last of them; and the mean of the tokens since
//	State         a matrix for each head, decayed by a gate and added to at every token,
//	              kept as a row after the tokens where the engine saves it
//
// The mean of an unfinished latent and the running matrix live with the sequence, not in
// rows: they are what a resumed sequence does not have.
//
// Where Ratio does not divide a chunk, a latent belongs to the chunk of its last token. An
// engine that kept it with its first would copy a chunk before all of it is computed.
//
// # What it does not model
//
// Paged kernels, low precision and batches: a real engine's sums depend on their order,
// so real KV is equal up to rounding only. Draft heads. Positions relative to the
// window's start. Kernels that multiply a masked row by zero instead of skipping it,
// which spreads NaN but no number.
package attention

import "math"

// Sizes of the model: small, because only who reads whom matters.
const (
	// Heads is the number of attention heads.
	Heads = 2
	// HeadSize is the number of components of a head's query, key and value.
	HeadSize = 2
	// Vocabulary is the number of tokens.
	Vocabulary = 5

	width  = Heads * HeadSize
	hidden = 2 * width
)

// A Kind is what a group's attention reads.
type Kind int

// The kinds, as in the package comment.
const (
	Causal Kind = iota
	Window
	Run
	SinkWindow
	PromptWindow
	Latent
	State
)

// A Group is a set of layers of one kind. Sizes are in tokens; those that the kind does
// not name mean nothing.
type Group struct {
	Kind                     Kind
	Window, Sink, Run, Ratio int
	// EveryState says that the engine saves the states of a State after every token;
	// otherwise only after the last token of a Step.
	EveryState bool
}

// Reads reports whether the query at token q reads the row of token k in a sequence whose
// first prompt tokens are its prompt. For a Latent it is asked of the rows that hold one,
// for a State of the row that a sequence resumed at q starts from.
func (g Group) Reads(q, k, prompt int) bool {
	inWindow := k > q-g.Window
	switch {
	case k > q:
		return false
	case g.Kind == Window:
		return inWindow
	case g.Kind == Run:
		return k >= q-q%g.Run // not before the first token of the query's run
	case g.Kind == SinkWindow:
		return k < g.Sink || inWindow
	case g.Kind == PromptWindow:
		return k < prompt || inWindow
	case g.Kind == Latent:
		return k%g.Ratio == g.Ratio-1
	case g.Kind == State:
		return k+1 == q
	}
	return true
}

// A Model is a transformer with fixed weights.
type Model struct {
	Groups []Group
	layers []layer
	embed  []float64 // Vocabulary rows
	poison []float64 // a row of NaN, as long as the longest
}

type layer struct {
	group              int
	query, key, value  []float64
	gate               []float64 // of a State: one a head
	out, widen, narrow []float64
}

// New returns a model whose layers are rounds times all groups, in order, with weights
// drawn from seed.
func New(seed uint64, rounds int, groups ...Group) *Model {
	draw := func(n int) []float64 {
		w := make([]float64, n)
		for i := range w {
			w[i] = uniform(&seed)
		}
		return w
	}
	m := &Model{Groups: groups, embed: draw(Vocabulary * width)}
	for i := range rounds * len(groups) {
		m.layers = append(m.layers, layer{
			group: i % len(groups),
			query: draw(width * width), key: draw(width * width), value: draw(width * width),
			gate: draw(Heads * width), out: draw(width * width),
			widen: draw(hidden * width), narrow: draw(width * hidden),
		})
	}
	m.poison = make([]float64, max(2*width, Heads*HeadSize*HeadSize))
	for i := range m.poison {
		m.poison[i] = math.NaN()
	}
	return m
}

// uniform draws from [-1, 1): splitmix64.
func uniform(seed *uint64) float64 {
	*seed += 0x9e3779b97f4a7c15
	z := *seed
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return float64(int64(z^z>>31)) / (1 << 63)
}

// A Sequence is one request on one engine: its text so far and its rows.
type Sequence struct {
	m      *Model
	tokens []int
	prompt int
	done   int
	// EveryState says that the states of all groups are saved after every token.
	EveryState bool
	rows       [][][]float64 // by layer and token
	carry      [][]float64   // by layer: the unfinished latent's sum, or the state
}

// Begin returns a sequence of a text, of which the first prompt tokens are its prompt. All
// rows are poison; nothing is computed yet.
func (m *Model) Begin(text []int, prompt int) *Sequence {
	s := &Sequence{m: m, tokens: text, prompt: prompt}
	for range m.layers {
		rows := make([][]float64, len(text))
		for k := range rows {
			rows[k] = m.poison
		}
		s.rows = append(s.rows, rows)
	}
	s.carry = make([][]float64, len(m.layers))
	s.Resume(0)
	return s
}

// A Chunk is the rows of one group for consecutive tokens, by layer of the group.
type Chunk [][][]float64

// Rows returns what group g keeps of the tokens [lo, hi). Of a State that is the row of
// the last token alone.
func (s *Sequence) Rows(g, lo, hi int) (c Chunk) {
	for i, rows := range s.rows {
		if s.m.layers[i].group != g {
			continue
		}
		part := append([][]float64(nil), rows[lo:hi]...)
		if s.m.Groups[g].Kind == State {
			for k := range part[:len(part)-1] {
				part[k] = s.m.poison
			}
		}
		c = append(c, part)
	}
	return c
}

// Load puts rows of group g at the tokens from lo on, as far as the text goes.
func (s *Sequence) Load(g, lo int, c Chunk) {
	for i, rows := range s.rows {
		if s.m.layers[i].group == g {
			copy(rows[lo:], c[0])
			c = c[1:]
		}
	}
}

// Poison makes the rows of group g for the tokens [lo, hi) NaN.
func (s *Sequence) Poison(g, lo, hi int) {
	for i, rows := range s.rows {
		for k := lo; s.m.layers[i].group == g && k < hi; k++ {
			rows[k] = s.m.poison
		}
	}
}

// Resume makes token n the next to compute. What the sequence carries is then what the
// rows say: the state of token n-1; of an unfinished latent nothing.
func (s *Sequence) Resume(n int) {
	s.done = n
	for i := range s.m.layers {
		g := s.m.Groups[s.m.layers[i].group]
		switch {
		case n == 0, g.Kind == Latent && n%g.Ratio == 0:
			s.carry[i] = make([]float64, len(s.m.poison))
		case g.Kind == State:
			s.carry[i] = s.rows[i][n-1]
		default:
			s.carry[i] = s.m.poison
		}
	}
}

// Step computes up to token n and returns the logits of the tokens that it computed.
func (s *Sequence) Step(n int) (logits [][]float64) {
	for ; s.done < n; s.done++ {
		q := s.done
		x := s.m.input(s.tokens[q], q)
		for i := range s.m.layers {
			l := &s.m.layers[i]
			h := norm(x)
			add(x, times(l.out, s.attend(i, q, n, h)))
			wide := times(l.widen, norm(x))
			for j, v := range wide {
				wide[j] = max(0, v) // of a NaN, NaN
			}
			add(x, times(l.narrow, wide))
		}
		logits = append(logits, times(s.m.embed, norm(x)))
	}
	return logits
}

// input is the embedding of a token at a position.
func (m *Model) input(token, at int) []float64 {
	x := append([]float64(nil), m.embed[token*width:(token+1)*width]...)
	for i := range x {
		x[i] += math.Sin(float64(at+1) / float64(i+1))
	}
	return x
}

// attend is the attention of layer i for the query at q, in a step that ends before token
// end. It writes the layer's row of token q where there is one.
func (s *Sequence) attend(i, q, end int, h []float64) []float64 {
	l, rows := &s.m.layers[i], s.rows[i]
	g := s.m.Groups[l.group]
	query, own := times(l.query, h), append(times(l.key, h), times(l.value, h)...)
	var read [][]float64
	switch g.Kind {
	case State:
		return s.recur(i, q, end, h, query, own)
	case Latent:
		mean := make([]float64, len(own))
		sum := s.carry[i][:len(own)]
		for j := range own {
			mean[j] = (sum[j] + own[j]) / float64(q%g.Ratio+1)
		}
		if q%g.Ratio == g.Ratio-1 {
			rows[q] = mean
			s.carry[i] = make([]float64, len(own))
		} else {
			s.carry[i] = append([]float64(nil), sum...)
			add(s.carry[i], own)
			read = append(read, mean)
		}
	default:
		rows[q] = own
	}
	for k := range q + 1 {
		if g.Reads(q, k, s.prompt) {
			read = append(read, rows[k])
		}
	}
	return soft(query, read)
}

// recur moves the state of layer i past token q and reads it.
func (s *Sequence) recur(i, q, end int, h, query, own []float64) []float64 {
	l := &s.m.layers[i]
	gates := times(l.gate, h)
	next, out := make([]float64, len(s.m.poison)), make([]float64, width)
	for a := range width { // a component of a value
		head := a / HeadSize
		decay := 1 / (1 + math.Exp(-gates[head]))
		for b := range HeadSize { // a component of its head's key
			j, k := a*HeadSize+b, head*HeadSize+b
			next[j] = decay*s.carry[i][j] + own[width+a]*own[k]
			out[a] += next[j] * query[k]
		}
	}
	s.carry[i] = next
	if s.EveryState || s.m.Groups[l.group].EveryState || q == end-1 {
		s.rows[i][q] = next
	}
	return out
}

// soft is softmax attention over the rows that are read, each a key and a value.
func soft(query []float64, rows [][]float64) []float64 {
	out := make([]float64, width)
	for at := 0; at < width; at += HeadSize {
		sum := 0.0
		for _, r := range rows {
			score := 0.0
			for j := at; j < at+HeadSize; j++ {
				score += query[j] * r[j]
			}
			w := math.Exp(score) // inputs are normed: it cannot overflow
			sum += w
			for j := at; j < at+HeadSize; j++ {
				out[j] += w * r[width+j]
			}
		}
		for j := at; j < at+HeadSize; j++ {
			out[j] /= sum
		}
	}
	return out
}

// times is a matrix, row by row, times a vector.
func times(m, x []float64) []float64 {
	y := make([]float64, len(m)/len(x))
	for i := range y {
		for j, v := range x {
			y[i] += m[i*len(x)+j] * v
		}
	}
	return y
}

func add(x, y []float64) {
	for i, v := range y {
		x[i] += v
	}
}

// norm scales a vector to a mean square of 1.
func norm(x []float64) []float64 {
	sum := 1e-9
	for _, v := range x {
		sum += v * v
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = v / math.Sqrt(sum/float64(len(x)))
	}
	return y
}
