package tryout

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/tierd/tierd/abi"
)

// A trial is one deployment to judge a rule in.
type trial struct {
	values []uint64 // of the rule's parameters
	text   string   // of the deployment file
}

// A geometry is the shape of a deployment, before it is scaled.
type geometry struct {
	block, blocks         uint64 // of the tried rule's group
	fullBlock, fullBlocks uint64 // of the full group; 0 = there is none
	fullFirst             bool
	align                 uint64
}

// geometries: chunks smaller than, equal to and no divisor of the companion's; no
// alignment, the smallest and larger ones; either order, and alone.
var geometries = [...]geometry{
	{block: 4, blocks: 2, fullBlock: 4, fullBlocks: 4, align: 32},
	{block: 2, blocks: 2, fullBlock: 4, fullBlocks: 2},
	{block: 4, blocks: 2, fullBlock: 4, fullBlocks: 1, align: 8},
	{block: 3, blocks: 2, fullBlock: 4, fullBlocks: 1, fullFirst: true, align: 24},
	{block: 1, blocks: 4, align: 16},
}

const (
	// promptTokensMax bounds the longest prompt of a trial, and so its time: a check of
	// that many lengths takes some seconds.
	promptTokensMax = 8192
	// promptTokensMin is three periods of the geometries, so that what repeats is seen
	// to repeat.
	promptTokensMin = 96
	// valuesMax bounds the parameter values that are tried in the first geometry; the
	// others take two each.
	valuesMax = 10
	// scaleMany is the scale up to which there are that many: prompts grow with it, and the
	// time of a trial with their number.
	scaleMany = 4
	// extremesMax bounds the parameters that are tried at their largest value alone.
	extremesMax = 3
	// chunksSpanned is how many chunks the largest small value covers. More would only
	// make prompts longer.
	chunksSpanned = 5
)

func (g *geometry) chunk() uint64 { return g.block * g.blocks }

// trials makes the deployments of a rule, those with the smallest parameters first.
func trials(m *abi.Manifest, ref string, legs []string, seed uint64) ([]trial, error) {
	scale, err := scaleOf(m)
	if err != nil {
		return nil, err
	}
	draw := rand.New(rand.NewPCG(seed, 0))
	type shaped struct {
		geometry
		values []uint64
	}
	var all []shaped
	for i, g := range geometries {
		g.block, g.fullBlock, g.align = g.block*scale, g.fullBlock*scale, g.align*scale
		sets := vectors(m, &g, draw)
		first, others := valuesMax, 2
		if scale > scaleMany {
			first, others = valuesMax/2, 1
		}
		if i > 0 { // other ones for each geometry
			sets = pick(sets, 2*i, others)
		} else {
			sets = append(pick(sets, 0, first), extremes(m, &g)...)
		}
		for _, v := range sets {
			all = append(all, shaped{g, v})
		}
	}
	slices.SortStableFunc(all, func(a, b shaped) int { return compareSums(a.values, b.values) })
	var out []trial
	for _, s := range all {
		out = append(out, trial{s.values, text(m, ref, legs, &s.geometry, s.values, scale)})
	}
	return out, nil
}

// thin keeps every third trial, and the last.
func thin(all []trial) (out []trial) {
	for i := range all {
		if i%3 == 0 || i == len(all)-1 {
			out = append(out, all[i])
		}
	}
	return out
}

func compareSums(a, b []uint64) int {
	var x, y uint64 // at most 32 values of at most abi.MaxTokens
	for _, v := range a {
		x += v
	}
	for _, v := range b {
		y += v
	}
	switch {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}

// pick returns n of the sets, from the i-th on, around the end.
func pick(sets [][]uint64, i, n int) (out [][]uint64) {
	for k := range min(n, len(sets)) {
		out = append(out, sets[(i+k)%len(sets)])
	}
	return out
}

// scaleOf returns by how much the geometries must grow so that the smallest value of
// every parameter spans a few chunks only, and a ratio divides them.
func scaleOf(m *abi.Manifest) (uint64, error) {
	scale := uint64(1)
	grow := func(p *abi.Param, to uint64) error {
		if scale = max(scale, to); scale*promptTokensMin > promptTokensMax/4 {
			return fmt.Errorf("parameter %s is at least %d %s, and the deployments that are made here have prompts of at most %d tokens, too short to show what it does; write a deployment, and run tierd check on it",
				p.Name, p.Min, p.Unit, promptTokensMax)
		}
		return nil
	}
	for i := range m.Params {
		p := &m.Params[i]
		need := uint64(1)
		for len(p.Enum) == 0 && !divides(m, p.Name) && chunksSpanned*geometries[0].chunk()*need < p.Min {
			need *= 2
		}
		if err := grow(p, need); err != nil {
			return 0, err
		}
	}
	for i := range m.Params { // last, so that what the others ask for is kept
		if p := &m.Params[i]; divides(m, p.Name) && len(divisors(p, geometries[0].chunk()*scale)) == 0 {
			if err := grow(p, scale*max(1, p.Min)); err != nil {
				return 0, err
			}
		}
	}
	return scale, nil
}

// divides reports whether a parameter must divide the chunk: a latent's ratio, since
// nothing can be resumed between two of its multiples.
func divides(m *abi.Manifest, param string) bool {
	return m.Mask == abi.MaskLatent && slices.Contains(m.MaskArgs, param)
}

// spans reports whether a parameter is the run of chunked attention. Between its edges and
// those of the chunks lie points that a consumer cannot go on from, although what they
// need is stored. The shipped rule makes no use of them; one that does is right by its mask,
// and refused in deployments whose runs are no multiples of their chunks.
func spans(m *abi.Manifest, param string) bool {
	return m.Mask == abi.MaskChunk && slices.Contains(m.MaskArgs, param)
}

// multiples returns the first few multiples of n that p allows.
func multiples(p *abi.Param, n uint64) (out []uint64) {
	for v := n * max(1, (p.Min+n-1)/n); v <= p.Max && len(out) < chunksSpanned; v += n {
		out = append(out, v)
	}
	return out
}

func divisors(p *abi.Param, n uint64) (out []uint64) {
	for d := max(1, p.Min); d <= min(n, p.Max); d++ {
		if n%d == 0 {
			out = append(out, d)
		}
	}
	return out
}

// small returns the values of a parameter that a geometry makes interesting, in the order
// of interest: the smallest, those around the chunk's size, drawn ones.
func small(m *abi.Manifest, p *abi.Param, g *geometry, draw *rand.Rand) (out []uint64) {
	c := g.chunk()
	if divides(m, p.Name) {
		return divisors(p, c)
	}
	if spans(m, p.Name) {
		return multiples(p, c)
	}
	if n := uint64(len(p.Enum)); n > 0 {
		for v := range min(n, valuesMax) {
			out = append(out, v)
		}
		return out
	}
	for _, v := range []uint64{
		p.Min, c + 1, 2*c + 1, c, c - 1, 1 + draw.Uint64N(chunksSpanned*c), 3 * c, 1 + draw.Uint64N(chunksSpanned*c), p.Min + 1,
	} {
		if v = min(max(v, p.Min), p.Max); !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// vectors combines the small values of all parameters: the n-th of one with the n+3-rd of
// the next, so that equal and different ones meet.
func vectors(m *abi.Manifest, g *geometry, draw *rand.Rand) [][]uint64 {
	if len(m.Params) == 0 {
		return [][]uint64{nil}
	}
	values, most := make([][]uint64, len(m.Params)), 0
	for i := range m.Params {
		values[i] = small(m, &m.Params[i], g, draw)
		if len(values[i]) == 0 { // a ratio with no divisor of this chunk
			return nil
		}
		most = max(most, len(values[i]))
	}
	var out [][]uint64
	for n := range min(most, valuesMax) {
		v := make([]uint64, len(m.Params))
		for i := range v {
			k := n
			if n > 0 { // the first is the smallest of all
				k = n + 3*i
			}
			v[i] = values[i][k%len(values[i])]
		}
		out = append(out, v)
	}
	return out
}

// extremes returns the defaults, the largest values, and each largest value beside the
// smallest of the others.
func extremes(m *abi.Manifest, g *geometry) (out [][]uint64) {
	n := len(m.Params)
	if n == 0 {
		return nil
	}
	least, standard, most := make([]uint64, n), make([]uint64, n), make([]uint64, n)
	for i := range m.Params {
		p := &m.Params[i]
		least[i], standard[i], most[i] = p.Min, p.Default, p.Max
		if p.Required {
			standard[i] = min(max(3*g.chunk()-1, p.Min), p.Max)
		}
		if divides(m, p.Name) {
			ok := divisors(p, g.chunk())
			least[i], most[i] = ok[0], ok[len(ok)-1]
			if !slices.Contains(ok, standard[i]) {
				standard[i] = ok[0]
			}
		}
	}
	out = [][]uint64{standard, most}
	for i := range min(n, extremesMax) {
		if n > 1 {
			v := slices.Clone(least)
			v[i] = most[i]
			out = append(out, v)
		}
	}
	return out
}

// text writes the deployment file.
func text(m *abi.Manifest, ref string, legs []string, g *geometry, values []uint64, scale uint64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "model: tryout\nmax_tokens: %d\nalign_tokens: %d\ngroups:\n", g.promptTokens(values, scale), g.align)
	group := func(name, rule, params string, block, blocks uint64) {
		if name == "tried" && m.Mask == abi.MaskState { // a chunk holds one state
			block, blocks = block*blocks, 1
		}
		fmt.Fprintf(&b, "  - {name: %s, rule: %s%s, block_tokens: %d, chunk_blocks: %d, layers: 1, kv_heads: 1, head_dim: 1, dtype: fp8}\n",
			name, rule, params, block, blocks)
	}
	policy := "request-level"
	if m.Kind == abi.KindPolicy {
		policy = fmt.Sprintf("%q%s", ref, paramsText(m, values))
		group("sliding", "window", fmt.Sprintf(", params: {window: %d}", 2*g.chunk()+1), g.block, g.blocks)
		if g.fullBlock == 0 {
			g.fullBlock, g.fullBlocks = g.block, g.blocks
		}
		group("full", "full", "", g.fullBlock, g.fullBlocks)
	} else {
		if g.fullFirst {
			group("full", "full", "", g.fullBlock, g.fullBlocks)
		}
		group("tried", fmt.Sprintf("%q", ref), paramsText(m, values), g.block, g.blocks)
		if !g.fullFirst && g.fullBlock > 0 {
			group("full", "full", "", g.fullBlock, g.fullBlocks)
		}
	}
	more := ""
	if m.Mask == abi.MaskPromptWindow && (g.fullFirst || g.fullBlock > 0) {
		// What decodes under a smaller mask changes what layers above it compute, too.
		more = ", {rule: prompt-only}"
	}
	fmt.Fprintf(&b, "policies: [{rule: %s}%s]\nlegs: [%s]\n", policy, more, strings.Join(legs, ", "))
	return b.String()
}

func paramsText(m *abi.Manifest, values []uint64) string {
	if len(values) == 0 {
		return ""
	}
	var parts []string
	for i := range m.Params {
		v := fmt.Sprint(values[i])
		if e := m.Params[i].Enum; len(e) > 0 {
			v = fmt.Sprintf("%q", e[values[i]])
		}
		parts = append(parts, m.Params[i].Name+": "+v)
	}
	return ", params: {" + strings.Join(parts, ", ") + "}"
}

// promptTokens is the longest prompt: twice the values that are small, so that what a
// window leaves out is longer than the window, and some chunks.
func (g *geometry) promptTokens(values []uint64, scale uint64) uint64 {
	n := promptTokensMin * scale
	for _, v := range values {
		if v <= 2*chunksSpanned*g.chunk() {
			n = max(n, 2*v+8*g.chunk())
		}
	}
	return min(n, promptTokensMax)
}

// insert adds v to a sorted list without repetition.
func insert(list []uint64, v uint64) []uint64 {
	i, found := slices.BinarySearch(list, v)
	if found {
		return list
	}
	return slices.Insert(list, i, v)
}
