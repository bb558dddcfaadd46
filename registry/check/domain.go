package check

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// A Domain says over which cases the relations were run: which part is exhaustive, and
// which part goes by period.
type Domain struct {
	// PromptTokens is the longest prompt; covers, needs and useful run every length
	// from 1.
	PromptTokens uint64 `json:"prompt_tokens"`
	// PeriodTokens is the length after which the rules' answers repeat, shifted: the
	// least common multiple of all chunk sizes and the alignment.
	PeriodTokens uint64 `json:"period_tokens"`
	// EdgeLengths is the number of prompt lengths over which the other relations run:
	// all residues of the first three periods and of the last one when the period is
	// short, else those lengths in them next to a block's, a chunk's, the alignment's
	// or a parameter's edge, and drawn ones.
	EdgeLengths int `json:"edge_lengths"`
	// EdgesFound is how many such lengths there are; when there are more than are run, the
	// shorter half of those that are run is complete and the rest is drawn.
	EdgesFound int `json:"edges_found"`
	// EdgeExhaustive says that all residues are among them.
	EdgeExhaustive bool `json:"edge_exhaustive"`
	// Drawn of the edge lengths were drawn with Seed.
	Drawn int    `json:"drawn"`
	Seed  uint64 `json:"seed"`
	// TableChunks is the largest number of chunks whose lookup tables were all tried.
	TableChunks int `json:"table_chunks"`

	// Sweep, Edges and Tables name the relations that ran over every length, over the
	// edge lengths and over lookup tables: those that the deployment's legs ask for.
	Sweep  []string `json:"sweep"`
	Edges  []string `json:"edges"`
	Tables []string `json:"tables"`

	edges []uint64
}

const (
	// tableChunks: all 4^6 = 4,096 tables of 6 chunks are tried, per range and bound.
	tableChunks = 6
	// residuesMax is the largest period of which all residues are run: four periods of
	// it are 2,048 lengths, about a second of work.
	residuesMax = 512
	// windowTokensMax bounds the lengths that are searched for edges at each end. Periods are
	// mostly under 100,000 tokens; sizes of chunks without a common factor make one as long
	// as the longest prompt, where a search of 2^30 lengths takes minutes and gigabytes.
	windowTokensMax = 1 << 20
	// edgeLengthsMax bounds the edge lengths, each of which costs about a hundred plans and
	// some twenty prompts computed in steps: chunks of one token would make every length
	// an edge.
	edgeLengthsMax = 4096
	// drawnLengths is the number of drawn lengths beside the edges.
	drawnLengths = 128
)

func newDomain(m *plan.Model, s *Subject, seed uint64) Domain {
	return domainBy(period(m, s), m, s, seed)
}

// period returns the length after which the answers of a deployment's rules repeat.
func period(m *plan.Model, s *Subject) uint64 {
	p := max(1, m.AlignTokens)
	for i := range m.Groups {
		p = plan.LCM(p, m.Groups[i].ChunkTokens)
	}
	for i := range s.Groups {
		if c := &s.Groups[i]; c.Manifest.Mask == abi.MaskChunk || c.Manifest.Mask == abi.MaskLatent {
			p = plan.LCM(p, max(1, c.Params[c.Manifest.Param(c.Manifest.MaskArgs[0])]))
		}
	}
	return p
}

// domainBy is the domain of a deployment whose answers are taken to repeat after period
// tokens.
func domainBy(period uint64, m *plan.Model, s *Subject, seed uint64) Domain {
	d := Domain{PromptTokens: s.MaxTokens, Seed: seed, TableChunks: tableChunks, PeriodTokens: period}
	d.Sweep, d.Edges, d.Tables = []string{"needs", "useful"}, []string{"pure", "schedule"}, []string{"states"}
	if s.PD {
		d.Sweep = append([]string{"covers"}, d.Sweep...)
		d.Edges = append(d.Edges, "warm")
	}
	d.Edges = append(d.Edges, "needs (partial arrivals)", "caps", "content", "width")
	if s.Probe && m.AlignTokens > 0 {
		d.Edges = append(d.Edges, "useful (shared prefixes)")
	}
	d.EdgeExhaustive = d.PeriodTokens <= residuesMax
	set := d.ruled(m, s)
	draw := rng(seed)
	before := len(set)
	for len(set) < before+drawnLengths && uint64(len(set)) < s.MaxTokens {
		set[1+draw.below(s.MaxTokens)] = true
	}
	d.Drawn = len(set) - before
	for n := range set {
		d.edges = append(d.edges, n)
	}
	slices.Sort(d.edges)
	d.thin(&draw)
	d.EdgeLengths = len(d.edges)
	return d
}

// ruled returns the edge lengths that the period and the parameters give, without drawn ones.
func (d *Domain) ruled(m *plan.Model, s *Subject) map[uint64]bool {
	set := map[uint64]bool{}
	add := func(n uint64) {
		if n >= 1 && n <= s.MaxTokens {
			set[n] = true
		}
	}
	around := func(n uint64) { add(n - min(n, 1)); add(n); add(n + 1) }
	sizes := chunkSizes(m)
	first, last := d.windows()
	for n, end := uint64(1), min(first, s.MaxTokens); n <= end; n++ {
		if d.EdgeExhaustive || isEdge(sizes, n) {
			add(n)
		}
	}
	for n := s.MaxTokens - min(s.MaxTokens, last) + 1; n <= s.MaxTokens; n++ {
		if d.EdgeExhaustive || isEdge(sizes, n) {
			add(n)
		}
	}
	around(m.MaxStoreTokens)
	for g := range s.Groups {
		for _, p := range s.Groups[g].Params {
			around(p)
			around(p + m.Groups[g].ChunkTokens)
		}
	}
	return set
}

// thin keeps the shorter half of what may be kept, where most failures show first, and
// draws the other half from the longer lengths.
func (d *Domain) thin(draw *rng) {
	d.EdgesFound = len(d.edges)
	const half = edgeLengthsMax / 2
	if len(d.edges) <= edgeLengthsMax {
		return
	}
	rest := d.edges[half:]
	for i := range half { // the first half places of rest become a drawn sample
		j := i + int(draw.below(uint64(len(rest)-i)))
		rest[i], rest[j] = rest[j], rest[i]
	}
	d.edges = d.edges[:edgeLengthsMax]
	slices.Sort(d.edges)
}

// windows returns how many of the shortest and how many of the longest lengths are searched
// for edges: the first three periods and the last one.
func (d *Domain) windows() (first, last uint64) {
	if d.PeriodTokens > windowTokensMax {
		return windowTokensMax, windowTokensMax
	}
	return min(3*d.PeriodTokens, windowTokensMax), d.PeriodTokens
}

// chunkSizes returns each size of a chunk once, in tokens.
func chunkSizes(m *plan.Model) []uint64 {
	var sizes []uint64
	for i := range m.Groups {
		sizes = append(sizes, m.Groups[i].ChunkTokens)
	}
	slices.Sort(sizes)
	return slices.Compact(sizes)
}

// isEdge reports whether n is next to an edge of a chunk of one of the sizes. Blocks' edges
// inside a chunk are met by the drawn lengths and by the steps.
func isEdge(sizes []uint64, n uint64) bool {
	for _, c := range sizes {
		if r := n % c; r <= 1 || r == c-1 {
			return true
		}
	}
	return false
}

// Lines says the domain in words, one line for each part of it.
func (d *Domain) Lines() []string {
	where := "next to the edges of chunks in the first three periods and the last one"
	if first, last := d.windows(); first < min(3*d.PeriodTokens, d.PromptTokens) {
		where = fmt.Sprintf("next to the edges of chunks in the first %d and the last %d lengths", first, last)
	}
	if d.EdgeExhaustive {
		where = "all of the first three periods and the last one"
	}
	if d.EdgesFound > d.EdgeLengths {
		where += fmt.Sprintf(", drawn from %d beyond the first %d", d.EdgesFound, edgeLengthsMax/2)
	}
	lines := []string{
		fmt.Sprintf("every prompt length from 1 to %d: %s", d.PromptTokens, strings.Join(d.Sweep, ", ")),
		fmt.Sprintf("%d prompt lengths, %s (a period is %d tokens), %d of them drawn with seed %d: %s",
			d.EdgeLengths, where, d.PeriodTokens, d.Drawn, d.Seed, strings.Join(d.Edges, ", ")),
	}
	if len(d.Tables) > 0 {
		lines = append(lines, fmt.Sprintf("every lookup table of 1 to %d chunks, and long ones: %s", d.TableChunks, strings.Join(d.Tables, ", ")))
	}
	return lines
}

// rng is a small generator (splitmix64), so that drawn cases depend on the seed alone.
type rng uint64

func (r *rng) next() uint64 {
	*r += 0x9e3779b97f4a7c15
	z := uint64(*r)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// below returns a number in [0, n).
func (r *rng) below(n uint64) uint64 {
	hi, _ := bits.Mul64(r.next(), n)
	return hi
}
