package vllm

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

// askStepsMax bounds how often a request is asked again in one Demand. With answers that
// arrive within some steps a request settles within a few; vLLM itself has no bound.
const askStepsMax = 4096

// Tiers are what a consumer's lookups meet. The zero value is the consumer of eager
// prefill/decode: an empty primary, a peer that is said to have every key, and copies
// that are readable in the next step.
type Tiers struct {
	// Primary answers Hit or Pending for what the primary holds before the request, else
	// Miss; nil = it is empty. It has room for all that is promoted.
	Primary Look
	// Secondary answers Hit, Miss or Retry for what the primary does not hold; nil = Hit.
	Secondary Look
	// Arrive answers what became of a key, wait steps after its promotion began, wait
	// from 1: Hit, it is readable; Pending, it is under way; Miss, its fetch failed, and
	// with it all of the same fetch that has not arrived. nil = Hit.
	Arrive func(k Key, wait int) abi.State
}

// A Demand is what a consumer asked its secondary tiers for, and what came of it.
type Demand struct {
	// Groups holds, per group, the chunks that were fetched: all that a scan touched
	// and that a secondary tier had. A scan that looks is a scan that fetches.
	Groups []abi.Bitmap
	// Rounds holds the same per step that fetched anything: one fetch of one request.
	Rounds [][]abi.Bitmap
	// Tokens beyond the local prefix that are loaded.
	Tokens uint64
	// Loaded holds the chunks that are copied from the primary to the GPU: those of
	// blocks that the KV manager keeps for a hit of this length.
	Loaded []abi.Bitmap
	// Unready holds the loaded chunks that the primary does not hold. vLLM asserts that
	// there are none, so one chunk ends the engine.
	Unready []abi.Bitmap
	// Steps is how often the request was looked up.
	Steps int
	// Failed says that a fetch failed, so that the request computed what it lacked.
	Failed bool
}

// Demand looks a request up, step after step, until no answer is waited for. It returns
// an error when the request never settles, or when the ask is one that the revision does
// not know.
func (r *Rules) Demand(a Ask, t Tiers) (Demand, error) {
	if err := r.checkAsk(&a); err != nil {
		return Demand{}, err
	}
	c := &consumer{rules: r, tiers: t, primary: make([]abi.States, len(r.groups))}
	for i := range r.groups {
		c.primary[i] = abi.NewStates(int(a.TextTokens) / r.groups[i].chunk)
	}
	c.out.Groups = r.sets()
	for c.out.Steps < askStepsMax {
		c.out.Steps++
		c.round = nil
		m := r.Match(a, c.lookup)
		if c.round != nil {
			c.out.Rounds = append(c.out.Rounds, c.round)
		}
		if !m.Deferred {
			c.out.Tokens = m.Tokens
			r.loads(&c.out, &a, c.held)
			return c.out, nil
		}
		c.settle()
	}
	return c.out, fmt.Errorf("vllm: a request of %d tokens is still deferred after it was looked up %d times", a.TextTokens, askStepsMax)
}

func (r *Rules) checkAsk(a *Ask) error {
	switch {
	case a.TextTokens == 0 || a.TextTokens > abi.MaxTokens:
		return fmt.Errorf("vllm: a request of %d tokens; it must be 1 to %d", a.TextTokens, uint64(abi.MaxTokens))
	case a.LocalTokens > a.TextTokens:
		return fmt.Errorf("vllm: local prefix of %d tokens, but the request has %d", a.LocalTokens, a.TextTokens)
	case a.MaxLoadTokens.Set && r.config.Revision == RevA:
		return fmt.Errorf("vllm: max_load_tokens is %d, but %s does not know it", a.MaxLoadTokens.Tokens, RevA)
	case a.MaxLoadTokens.Tokens > abi.MaxTokens:
		return fmt.Errorf("vllm: max_load_tokens is %d; it must be at most %d", a.MaxLoadTokens.Tokens, uint64(abi.MaxTokens))
	}
	return r.checkLocal("local prefix", a.LocalTokens)
}

// checkLocal reports a prefix that no GPU can hold: it ends inside a block.
func (r *Rules) checkLocal(what string, n uint64) error {
	for i := range r.groups {
		if g := &r.groups[i]; !g.excluded && n%uint64(g.block) != 0 {
			return fmt.Errorf("vllm: %s of %d tokens ends inside a block of %d tokens of group %d", what, n, g.block, i)
		}
	}
	return nil
}

// sets returns an empty set per group.
func (r *Rules) sets() []abi.Bitmap { return make([]abi.Bitmap, len(r.groups)) }

// A flight is a key that is being promoted since a step. All of one step are one fetch.
type flight struct {
	key  Key
	step int
}

// A consumer is a Demand under way.
type consumer struct {
	rules   *Rules
	tiers   Tiers
	primary []abi.States // what promotions put there
	flights []flight     // promotions under way, in the order of their lookups
	round   []abi.Bitmap
	out     Demand
}

// held answers what the primary says.
func (c *consumer) held(k Key) abi.State {
	if s := c.primary[k.Group].At(k.Chunk); s != abi.Miss || c.tiers.Primary == nil {
		return s
	}
	return c.tiers.Primary(k)
}

// lookup answers as the tiering manager does, and starts a promotion of what a secondary
// tier has.
func (c *consumer) lookup(k Key) abi.State {
	if s := c.held(k); s == abi.Hit || s == abi.Pending {
		return s
	}
	if c.out.Failed { // the peer is not asked again for this request
		return abi.Miss
	}
	s := abi.Hit
	if c.tiers.Secondary != nil {
		s = c.tiers.Secondary(k)
	}
	if s != abi.Hit {
		return s
	}
	c.primary[k.Group].Put(k.Chunk, abi.Pending)
	c.flights = append(c.flights, flight{k, c.out.Steps})
	if c.round == nil {
		c.round = c.rules.sets()
	}
	set(&c.round[k.Group], k.Chunk)
	set(&c.out.Groups[k.Group], k.Chunk)
	if c.rules.config.Promotion == PromotionRetry {
		return abi.Retry
	}
	return abi.Pending
}

// settle lets a step pass: promotions under way arrive, or fail. One failed key drops
// all keys of its fetch, and the request asks no peer again.
func (c *consumer) settle() {
	failed := map[int]bool{} // steps whose fetch failed
	state := func(f flight) abi.State {
		if c.tiers.Arrive == nil {
			return abi.Hit
		}
		return c.tiers.Arrive(f.key, c.out.Steps+1-f.step)
	}
	var flying []flight
	for _, f := range c.flights {
		switch state(f) {
		case abi.Hit:
			c.primary[f.key.Group].Put(f.key.Chunk, abi.Hit)
		case abi.Miss:
			failed[f.step] = true
			c.out.Failed = true
			fallthrough
		default:
			flying = append(flying, f)
		}
	}
	c.flights = flying[:0]
	for _, f := range flying {
		if failed[f.step] {
			c.primary[f.key.Group].Put(f.key.Chunk, abi.Miss)
		} else {
			c.flights = append(c.flights, f)
		}
	}
}

// loads fills in what a hit copies to the GPU.
func (r *Rules) loads(d *Demand, a *Ask, held Look) {
	d.Loaded, d.Unready = r.sets(), r.sets()
	if d.Tokens == 0 {
		return
	}
	local, end := int(a.LocalTokens), int(a.LocalTokens+d.Tokens)
	for i := range r.groups {
		g := &r.groups[i]
		if g.excluded {
			continue
		}
		block := max(ceilDiv(local, g.block), g.dropped(end)/g.block)
		if block >= ceilDiv(end, g.block) {
			continue
		}
		for chunk := block / g.perChunk; chunk < ceilDiv(end, g.chunk); chunk++ {
			set(&d.Loaded[i], chunk)
			if held(Key{i, chunk}) != abi.Hit {
				set(&d.Unready[i], chunk)
			}
		}
	}
}
