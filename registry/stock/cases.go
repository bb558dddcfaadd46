package stock

import (
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/vllm"
)

// A producer is what one side did and held when it computed a prompt.
type producer struct {
	relation string // that its failure falls under, unless the consumer's is caps
	vllm.Case
	facts []check.Fact
}

// A consumer is what the other side held and asked for.
type consumer struct {
	relation string // covers, or caps
	plain    bool   // its primary is empty and all arrives in the next step
	vllm.Ask
	vllm.Tiers
	facts []check.Fact
}

const (
	// prefixesMax is how many GPU prefixes of one prompt are tried: the shortest, those
	// next to a window's begin, and the longest. All are while there are no more.
	prefixesMax = 24
	// longPrefixesMax is that of a prompt of more than longTokens, which only repeats what
	// shorter ones show.
	longPrefixesMax = 6
	longTokens      = 1 << 15
	// stepsMax bounds the steps of one prompt. Small steps of long prompts show nothing
	// that small steps of short ones do not.
	stepsMax = 64
)

// A side is one engine, as producer or as consumer.
type side struct {
	rules  *vllm.Rules
	engine deploy.StockEngine
	groups []string
	block  uint64 // least common multiple of the blocks: every GPU prefix is one of it
	chunk  uint64 // the largest chunk
	window uint64 // the longest window, with what it retains
}

func newSide(d *deploy.Deployment) (*side, error) {
	c, err := Config(d)
	if err != nil {
		return nil, err
	}
	e, err := d.Stock()
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range d.Groups {
		names = append(names, d.Groups[i].Name)
	}
	return sideOf(c, e, names)
}

func sideOf(c vllm.Config, e deploy.StockEngine, groups []string) (*side, error) {
	s := &side{engine: e, groups: groups, block: 1}
	var err error
	if s.rules, err = vllm.New(c); err != nil {
		return nil, err
	}
	for i := range c.Groups {
		g := &c.Groups[i]
		s.block = deploy.LCM(s.block, g.BlockTokens)
		s.window = max(s.window, g.WindowTokens+g.ExtraTokens)
	}
	s.chunk = largestChunk(s.rules)
	return s, nil
}

// prefixes returns the GPU prefixes that a prompt may have, in rising order, at most limit
// of them.
func (s *side) prefixes(prompt uint64, limit int) (out []uint64) {
	n := int((prompt - 1) / s.block)
	add := func(k int) {
		if k >= 1 && k <= n && len(out) < limit {
			out = append(out, uint64(k)*s.block)
		}
	}
	if n <= limit {
		for k := range n {
			add(k + 1)
		}
		return out
	}
	at := n - int(s.window/s.block) // the window's begin, when the hit is the longest
	for k := range limit {          // from the outside in, so that each end has its share
		for _, p := range []int{n - k, 1 + k, at + k, at - k} {
			if v := uint64(max(p, 0)) * s.block; !slices.Contains(out, v) {
				add(p)
			}
		}
	}
	slices.Sort(out)
	return out
}

// most is how many GPU prefixes of a prompt are tried.
func most(prompt uint64) int {
	if prompt > longTokens {
		return longPrefixesMax
	}
	return prefixesMax
}

// upTo returns what answers so for the chunks within the first n tokens, and Miss beyond.
func (s *side) upTo(n uint64, answer abi.State) vllm.Look {
	return func(k vllm.Key) abi.State {
		if uint64(k.Chunk+1)*s.rules.ChunkTokens(k.Group) <= n {
			return answer
		}
		return abi.Miss
	}
}

// producers returns what may have become of a prompt at the producer, from small to large
// and by relation. One that is no edge has the first alone.
func (s *side) producers(l length) []producer {
	p := l.tokens
	out := []producer{{relation: "covers", Case: vllm.Case{PromptTokens: p}}}
	if !l.edge {
		return out
	}
	out = append(out, s.scheduled(p)...)
	out = append(out, s.warmed(p)...)
	if s.engine.SharedWrites {
		for _, q := range []uint64{s.chunk, p} {
			if q <= p {
				out = append(out, producer{"cascade", vllm.Case{PromptTokens: p, Warm: vllm.Warm{Primary: s.upTo(q, abi.Pending)}},
					[]check.Fact{{Name: "another request", Value: fmt.Sprintf("is writing the first %d tokens", q)}}})
			}
		}
	}
	if m := s.engine.MaxOffload; m != nil {
		facts := []check.Fact{{Name: "max_offload_tokens", Value: fmt.Sprint(*m)}}
		out = append(out, producer{"caps", vllm.Case{PromptTokens: p, MaxOffloadTokens: vllm.Some(*m)}, facts})
		for _, g := range s.prefixes(p, 2) {
			out = append(out, producer{"caps", vllm.Case{PromptTokens: p, MaxOffloadTokens: vllm.Some(*m), Warm: vllm.Warm{GPUTokens: g}}, facts})
		}
	}
	return out
}

// scheduled returns the producers that compute a prompt in steps, and generate.
func (s *side) scheduled(p uint64) (out []producer) {
	steps := []uint64{0}
	for _, n := range []uint64{s.block, s.block + 1, s.chunk - min(s.chunk-1, 1), s.chunk, 2*s.chunk + 1, 2048, 8192} {
		if n < p && p/n <= stepsMax && !slices.Contains(steps, n) {
			steps = append(steps, n)
		}
	}
	slices.Sort(steps)
	generated := []uint64{1}
	if !s.engine.PromptOnly {
		generated = append(generated, 2, s.chunk, s.chunk+1, 2*s.chunk+1)
	}
	for _, n := range steps {
		for _, k := range generated {
			r := producer{"schedule", vllm.Case{PromptTokens: p, StepTokens: n, GeneratedTokens: k}, nil}
			r.facts = []check.Fact{{Name: "generates", Value: fmt.Sprintf("%d tokens", k)}}
			out = append(out, r)
		}
	}
	return out
}

// warmed returns the producers that hold a prefix: on the GPU, from a load, and in the
// primary, each with and without the primary holding it too.
func (s *side) warmed(p uint64) (out []producer) {
	add := func(w vllm.Warm, held uint64) {
		r := producer{"warm", vllm.Case{PromptTokens: p, Warm: w}, nil}
		if held > 0 {
			r.Warm.Primary = s.upTo(held, abi.Hit)
			r.facts = append(r.facts, check.Fact{Name: "producer's primary", Value: fmt.Sprintf("holds the first %d tokens", held)})
		}
		out = append(out, r)
	}
	gpus := s.prefixes(p, most(p))
	for _, g := range gpus {
		add(vllm.Warm{GPUTokens: g}, 0)
	}
	for _, held := range []uint64{s.chunk, p} {
		if held <= p {
			add(vllm.Warm{}, held)
		}
	}
	for _, g := range s.prefixes(p, 4) {
		add(vllm.Warm{GPUTokens: g}, g)
	}
	for _, l := range s.loads(p, gpus) {
		add(l, 0)
		add(l, l.LoadedTokens)
	}
	return out
}

// loads returns what a producer may have loaded of a prompt from a tier, without a prefix
// on its GPU and with one: the ends of the hits that its own lookup finds when the tier
// holds a prefix of the prompt.
func (s *side) loads(p uint64, gpus []uint64) (out []vllm.Warm) {
	held := []uint64{s.chunk, p / 2 / s.chunk * s.chunk, p - min(p, s.chunk), p - min(p, s.window), p}
	local := []uint64{0}
	if len(gpus) > 0 {
		local = append(local, gpus[0])
	}
	for _, g := range local {
		for _, q := range held {
			m := s.rules.Match(vllm.Ask{TextTokens: p, LocalTokens: g}, s.upTo(q, abi.Hit))
			w := vllm.Warm{GPUTokens: g, LoadedTokens: g + m.Tokens}
			same := func(o vllm.Warm) bool { return o.GPUTokens == g && o.LoadedTokens == w.LoadedTokens }
			if m.Tokens > 0 && w.LoadedTokens < p && !slices.ContainsFunc(out, same) {
				out = append(out, w)
			}
		}
	}
	return out
}

// consumers returns who may ask for a prompt, from the plainest on. For a length that is
// no edge they are those whose GPU holds nothing, or a little.
func (s *side) consumers(l length) []consumer {
	p := l.tokens
	ask := vllm.Ask{TextTokens: p}
	out := []consumer{{relation: "covers", plain: true, Ask: ask}}
	n := 2
	if l.edge {
		n = most(p) / 2
	}
	for _, n := range s.prefixes(p, n) {
		out = append(out, consumer{relation: "covers", plain: true, Ask: vllm.Ask{TextTokens: p, LocalTokens: n}})
	}
	if !l.edge {
		return out
	}
	out = append(out, s.busy(ask)...)
	for i, c := range slices.Clone(out) {
		if m := s.engine.MaxLoad; m != nil && c.plain {
			c.relation, c.plain, c.MaxLoadTokens = "caps", false, vllm.Some(*m)
			c.facts = []check.Fact{{Name: "max_load_tokens", Value: fmt.Sprint(*m)}}
			out = append(out, c)
		}
		if t := s.engine.TurnTokens; t > 0 && i == 0 {
			c = out[0]
			c.relation, c.plain = "caps", false
			more := []uint64{1, s.chunk - p%s.chunk, s.chunk, t} // to the chunk's edge, too
			slices.Sort(more)
			for _, n := range slices.Compact(more) {
				if c.TextTokens = p + n; n <= t {
					out = append(out, c)
				}
			}
		}
	}
	return out
}

// busy returns the consumers whose primary holds something already, and those to whom
// some of what they asked for comes late.
func (s *side) busy(ask vllm.Ask) (out []consumer) {
	add := func(t vllm.Tiers, name, value string) {
		out = append(out, consumer{"covers", false, ask, t, []check.Fact{{Name: name, Value: value}}})
	}
	half := ask.TextTokens / 2
	add(vllm.Tiers{Primary: s.upTo(half, abi.Hit)}, "consumer's primary", fmt.Sprintf("holds the first %d tokens", half))
	odd := func(k vllm.Key, wait int) abi.State { return arrives(k.Chunk%2 == 0 || wait > 2) }
	add(vllm.Tiers{Arrive: odd}, "arrival", "every second chunk comes two steps late")
	for g, name := range s.groups {
		if len(s.groups) == 1 || !s.rules.Offloaded(g) {
			continue
		}
		held := func(k vllm.Key) abi.State {
			if k.Group == g {
				return abi.Hit
			}
			return abi.Miss
		}
		late := func(k vllm.Key, wait int) abi.State { return arrives(k.Group != g || wait > 2) }
		add(vllm.Tiers{Primary: held}, "consumer's primary", "holds all of group "+name)
		add(vllm.Tiers{Arrive: late}, "arrival", "group "+name+" comes two steps late")
	}
	return out
}

func arrives(now bool) abi.State {
	if now {
		return abi.Hit
	}
	return abi.Pending
}
