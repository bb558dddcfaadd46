package stock

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/vllm"
)

const (
	// residuesMax is the largest period of which every length runs every relation: three
	// periods of it are some 1,600 lengths, a second of work.
	residuesMax = 512
	// everyMax bounds the lengths of which each one runs covers and needs; it holds three
	// periods of 8,192 tokens, the largest attention chunk of a published model.
	everyMax = 1 << 15
	// lastLengths is how many lengths next to the longest prompt are run when the period
	// is longer than residuesMax: one length there costs a thousand short ones.
	lastLengths = 64
	// lengthsMax bounds all of the lengths. Only periods that no lengths of published
	// blocks have lead to it.
	lengthsMax = 1 << 16
)

// A domain is the prompt lengths of a deployment, or of two.
type domain struct {
	check.Domain
	lengths []length
	// head is the length up to which lengths are run without regard to the period, lead
	// how much of it is there before the rules' answers repeat.
	head, lead uint64
}

// A length of the domain. One that is an edge runs every relation, others run covers and
// needs with the plainest cases.
type length struct {
	tokens uint64
	edge   bool
}

// newDomain returns an error when the lengths to run are too many.
func newDomain(maxTokens uint64, s []deploy.StockEngine, rules ...*vllm.Rules) (*domain, error) {
	d := &domain{Domain: check.Domain{PromptTokens: maxTokens, PeriodTokens: 1}}
	for _, r := range rules {
		d.PeriodTokens = deploy.LCM(d.PeriodTokens, r.PeriodTokens())
		d.lead = max(d.lead, leadTokens(r))
	}
	d.head = min(maxTokens, d.lead+3*min(d.PeriodTokens, maxTokens))
	d.EdgeExhaustive = d.PeriodTokens <= residuesMax
	set := map[uint64]bool{} // length: is an edge
	for n := uint64(1); n <= d.head; n++ {
		if edge := d.EdgeExhaustive || isEdge(n, rules); edge || n <= everyMax {
			set[n] = edge
		}
		if len(set) > lengthsMax {
			return nil, fmt.Errorf("the answers of these rules go by a period of %d tokens, so that more than %d prompt lengths would have to be run; give the groups blocks with a smaller common multiple, or lower max_tokens", d.PeriodTokens, lengthsMax)
		}
	}
	around := func(n, by uint64) {
		for k := n - min(n, by); k <= n+by; k++ {
			if k >= 1 && k <= maxTokens {
				set[k] = true
			}
		}
	}
	last := uint64(lastLengths)
	if d.EdgeExhaustive {
		last = d.PeriodTokens
	}
	around(maxTokens, last-1)
	for _, e := range s { // what a limit changes shows within a chunk behind it
		for _, cap := range []*uint64{e.MaxOffload, e.MaxLoad} {
			if cap != nil && *cap <= maxTokens {
				around(*cap, 2*largestChunk(rules[0])+1)
			}
		}
	}
	for n, edge := range set {
		d.lengths = append(d.lengths, length{n, edge})
		if edge {
			d.EdgeLengths++
		}
	}
	slices.SortFunc(d.lengths, func(a, b length) int { return int(a.tokens) - int(b.tokens) })
	d.EdgesFound = d.EdgeLengths
	d.Sweep, d.Edges = []string{"covers", "needs"}, []string{"schedule", "warm", "states"}
	for _, e := range s {
		if e.SharedWrites && !slices.Contains(d.Edges, "cascade") {
			d.Edges = append(d.Edges, "cascade")
		}
		if (e.MaxOffload != nil || e.MaxLoad != nil || e.TurnTokens > 0) && !slices.Contains(d.Edges, "caps") {
			d.Edges = append(d.Edges, "caps")
		}
	}
	return d, nil
}

// leadTokens is beyond the longest window, so that it begins inside the prompt, by the
// chunks that the ends of hits are rounded by, a drafter's, and one that is too many.
func leadTokens(r *vllm.Rules) (lead uint64) {
	for _, g := range r.Config().Groups {
		lead = max(lead, g.WindowTokens+g.ExtraTokens)
	}
	return lead + 5*largestChunk(r)
}

func largestChunk(r *vllm.Rules) (chunk uint64) {
	for i := range r.Config().Groups {
		chunk = max(chunk, r.ChunkTokens(i))
	}
	return chunk
}

// isEdge reports whether a length is next to a block's edge, or its window's begin is.
func isEdge(n uint64, rules []*vllm.Rules) bool {
	for _, r := range rules {
		for _, g := range r.Config().Groups {
			b := g.BlockTokens
			if near(n, b) || n > g.WindowTokens+g.ExtraTokens && g.WindowTokens > 0 && near(n-g.WindowTokens-g.ExtraTokens, b) {
				return true
			}
		}
	}
	return false
}

func near(n, block uint64) bool { r := n % block; return r <= 1 || r == block-1 }

// lines says the domain in words.
func (d *domain) lines() []string {
	which := fmt.Sprintf("every prompt length from 1 to %d", min(d.head, everyMax))
	if d.head > everyMax {
		which += fmt.Sprintf(", to %d those next to an edge", d.head)
	}
	if d.head < d.PromptTokens {
		which += fmt.Sprintf(", and those next to %d", d.PromptTokens)
	}
	out := []string{fmt.Sprintf("%s, %d in all: %s", which, len(d.lengths), strings.Join(d.Sweep, ", "))}
	where := "all of them"
	if !d.EdgeExhaustive {
		where = fmt.Sprintf("the %d next to an edge of a block, counted from the prompt's begin or from a window's", d.EdgeLengths)
	}
	out = append(out, fmt.Sprintf("%s: %s", where, strings.Join(d.Edges, ", ")))
	if d.head < d.PromptTokens {
		out = append(out, fmt.Sprintf("longer prompts repeat these: the rules' answers go by a period of %d tokens from %d on, which the tests of this check establish over drawn configurations", d.PeriodTokens, d.lead))
	}
	return out
}
