package vllm

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

// A Warm is what a producer already has of a prompt when its request begins. The zero
// value is a cold producer.
type Warm struct {
	// GPUTokens is the prefix that the GPU's own prefix cache hits. Its window groups
	// get null blocks for all that the next token does not read.
	GPUTokens uint64
	// LoadedTokens, when more, is the prefix that is there after a load from an offload
	// tier: the GPU's hit and the external tokens.
	LoadedTokens uint64
	// Primary answers what the primary holds of the prompt: Hit, Pending (another
	// request is writing it) or Miss; nil = nothing.
	Primary Look
	// NullBelow gives, per group, the first GPU block that is there at the start,
	// instead of what the hits above leave; nil = those.
	NullBelow map[int]uint64
}

// A Request is one request of a producer.
type Request struct {
	PromptTokens uint64
	// MaxOffloadTokens caps what is stored (max_offload_tokens).
	MaxOffloadTokens Optional
	// JunctionTokens is a prefix that is known to be shared; 0 = none. Rev B with a
	// retention interval keeps the tail before it.
	JunctionTokens uint64
	Warm           Warm
	// Reused says that each GPU block that a window group gives back is handed out
	// again at once: chunks that were not stored by then are lost. It makes a difference
	// only when a pass failed for lack of room.
	Reused bool
}

// A Producer stores one request, step by step. It is used by one goroutine at a time.
type Producer struct {
	// NoRoom says that the primary has no room for a new key. A pass that has one then
	// fails: nothing is passed on, the cursor stays, and the next pass offers again.
	NoRoom bool

	rules    *Rules
	request  Request
	prompt   int
	computed int
	text     int
	over     bool // finished or aborted
	groups   []stored
}

// stored is the state of one group.
type stored struct {
	blocks  int        // GPU blocks recorded
	null    abi.Bitmap // recorded blocks without content
	cursor  int        // next chunk to offer
	offered abi.Bitmap // chunks that were passed on
}

// Produce begins a request.
func (r *Rules) Produce(q Request) (*Producer, error) {
	w := &q.Warm
	start := max(w.GPUTokens, w.LoadedTokens)
	switch {
	case q.PromptTokens == 0 || q.PromptTokens > abi.MaxTokens:
		return nil, fmt.Errorf("vllm: a prompt of %d tokens; it must be 1 to %d", q.PromptTokens, uint64(abi.MaxTokens))
	case start >= q.PromptTokens && start > 0:
		return nil, fmt.Errorf("vllm: a prefix of %d tokens is there, but the prompt has %d and its last token is always computed", start, q.PromptTokens)
	case q.JunctionTokens > q.PromptTokens:
		return nil, fmt.Errorf("vllm: junction at %d tokens, beyond the prompt of %d", q.JunctionTokens, q.PromptTokens)
	}
	if err := r.checkLocal("prefix on the GPU", w.GPUTokens); err != nil {
		return nil, err
	}
	p := &Producer{
		rules: r, request: q, prompt: int(q.PromptTokens), text: int(q.PromptTokens),
		computed: int(start), groups: make([]stored, len(r.groups)),
	}
	for i := range r.groups {
		if g := &r.groups[i]; !g.excluded {
			p.groups[i].begin(g, w)
			if below, ok := w.NullBelow[i]; ok {
				p.groups[i].null = nil
				p.groups[i].nullify(0, int(below))
			}
			if w.LoadedTokens > w.GPUTokens && r.config.Policy == ChunkLevel {
				p.groups[i].cursor = ceilDiv(int(w.LoadedTokens), g.chunk)
			}
		}
	}
	return p, nil
}

// begin records the blocks of what is there at the start.
func (s *stored) begin(g *group, w *Warm) {
	gpu, loaded := int(w.GPUTokens), int(w.LoadedTokens)
	s.blocks = ceilDiv(max(gpu, loaded), g.block)
	if gpu > 0 {
		s.nullify(0, g.native(gpu))
	}
	if loaded > gpu {
		s.nullify(0, min(g.dropped(loaded)/g.block, s.blocks))
	}
	if g.Kind == Mamba && g.Mode == MambaNone {
		s.blocks = 0
	}
}

func (s *stored) nullify(lo, hi int) {
	for j := lo; j < hi; j++ {
		set(&s.null, j)
	}
}

// Step computes up to token end and returns the keys that this passes on to the
// secondary tiers: what is new in the primary, and with RequestLevel what was there.
// Tokens beyond the prompt are generated ones.
func (p *Producer) Step(end uint64) ([]Key, error) {
	switch {
	case p.over:
		return nil, fmt.Errorf("vllm: step to token %d, but the request is over", end)
	case end <= uint64(p.computed) || end > abi.MaxTokens:
		return nil, fmt.Errorf("vllm: step to token %d, but %d are computed; a step computes at least one, up to %d in all", end, p.computed, uint64(abi.MaxTokens))
	}
	before := p.computed
	p.computed = int(end)
	p.text = max(p.text, p.computed)
	for i := range p.groups {
		if g := &p.rules.groups[i]; !g.excluded {
			p.groups[i].step(g, before, p.computed, p.request.Reused)
		}
	}
	return p.pass(p.computed), nil
}

// step records the blocks that a step allocates.
func (s *stored) step(g *group, before, end int, reused bool) {
	old := s.blocks
	if g.Kind == Mamba && g.Mode == MambaNone {
		return // one running state, of which no block boundary remains
	}
	s.blocks = max(s.blocks, ceilDiv(end, g.block))
	if g.Kind == Mamba && g.Mode == MambaAlign {
		// The state moves from block to block within the step; it stays in the last.
		s.nullify(before/g.block, (end-1)/g.block)
	}
	if reused && g.window != 0 {
		s.nullify(s.cursor*g.perChunk, min(old, g.dropped(before)/g.block))
	}
}

// Finish ends the request with text tokens in all. The last of them, when generated, was
// sampled and never computed. It returns what the last pass passes on.
func (p *Producer) Finish(text uint64) ([]Key, error) {
	if p.over || text < uint64(p.text) || p.computed < p.prompt || text > uint64(p.computed)+1 {
		return nil, fmt.Errorf("vllm: finish with %d tokens, but %d of a prompt of %d are computed (over: %v); a text ends at most one token behind what is computed", text, p.computed, p.prompt, p.over)
	}
	p.over = true
	p.text = int(text)
	if p.rules.config.Revision == RevA {
		return p.pass(p.text), nil
	}
	return p.pass(max(p.prompt, p.text-1)), nil
}

// Abort ends the request where it is and returns what the last pass passes on.
func (p *Producer) Abort() ([]Key, error) {
	if p.over {
		return nil, fmt.Errorf("vllm: abort, but the request is over")
	}
	p.over = true
	return p.pass(p.computed), nil
}

// Supply returns, per group, all chunks that were passed on so far. The sets belong to
// the producer.
func (p *Producer) Supply() []abi.Bitmap {
	sets := p.rules.sets()
	for i := range p.groups {
		sets[i] = p.groups[i].offered
	}
	return sets
}

// offloadable returns how many leading tokens may be stored when n are computed, which are
// never more than the text has.
func (p *Producer) offloadable(n int) int {
	if m := p.request.MaxOffloadTokens; m.Set {
		n = min(n, int(m.Tokens))
	}
	if p.rules.config.PromptOnly {
		n = min(n, p.prompt)
	}
	return n
}
