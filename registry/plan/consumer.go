package plan

import "github.com/tierd/tierd/abi"

// Eager plans for leg pd, where the peer computes the same prompt and is not asked.
// own holds per group what the consumer's own tier says, by absolute chunk number;
// nil = it holds nothing. A chunk that the own tier has is demanded like any other:
// the caller takes it from there.
func (p *Planner) Eager(ask Ask, own []abi.States) (Plan, error) {
	if _, err := p.bound(&ask); err != nil {
		return Plan{}, err
	}
	if err := p.eager.prepare(ask.PromptTokens, ask.PromptTokens); err != nil {
		return Plan{}, err
	}
	p.eager.own = own
	pl, err := p.withLoadCap(&ask, &p.eager)
	p.eager.own = nil
	return pl, err
}

// A ProbeStep is where a plan in leg probe stands.
type ProbeStep struct {
	// Done says that Plan is final.
	Done bool
	Plan Plan
	// Lookup holds, per group, the chunks to ask for next, in one batch, when not
	// Done.
	Lookup []abi.Bitmap
}

// ProbeRounds is the number of batched lookups that a plan in leg probe may need: the
// demand that would follow if everything unknown were a Hit, then all the rest.
const ProbeRounds = 2

// Probe plans for leg probe. known holds per group, by absolute chunk number, what is
// known so far, Retry where nothing is; chunks beyond a table count as Misses. Call it
// with round 0, and after each batch of answers with the next round; round
// ProbeRounds is always Done, and takes what is still unknown for a Miss.
func (p *Planner) Probe(ask Ask, known []abi.States, round int) (ProbeStep, error) {
	bound, err := p.bound(&ask)
	if err != nil {
		return ProbeStep{}, err
	}
	src := p.table(&ask, known)
	if round >= ProbeRounds {
		src.unknown = abi.Miss
	}
	pl, err := p.withLoadCap(&ask, src)
	if err != nil || !pl.Deferred {
		return ProbeStep{Done: err == nil, Plan: pl}, err
	}
	if round == 0 {
		src.unknown = abi.Hit
		if pl, err = p.withLoadCap(&ask, src); err != nil {
			return ProbeStep{}, err
		}
		if look := p.unknownOf(known, pl.Demand, nil); look != nil {
			return ProbeStep{Lookup: look}, nil
		}
	}
	all := make([]abi.Bitmap, len(p.m.Groups))
	for g := range all {
		ct := p.m.Groups[g].ChunkTokens
		n := int(min(ceilDiv(bound, ct), src.chunks[g]))
		all[g] = abi.NewBitmap(n)
		all[g].SetRange(int(min(uint64(n), ask.LocalTokens/ct)), n)
	}
	if look := p.unknownOf(known, all, all); look != nil {
		return ProbeStep{Lookup: look}, nil
	}
	src.unknown = abi.Miss
	pl, err = p.withLoadCap(&ask, src)
	return ProbeStep{Done: err == nil, Plan: pl}, err
}

// unknownOf returns, in fresh bitmaps or in into, the chunks of sets whose state is
// Retry; nil when there are none.
func (p *Planner) unknownOf(known []abi.States, sets, into []abi.Bitmap) []abi.Bitmap {
	if into == nil {
		into = make([]abi.Bitmap, len(sets))
	}
	some := false
	for g, set := range sets {
		look := abi.NewBitmap(64 * len(set))
		for i := set.Next(0); i >= 0; i = set.Next(i + 1) {
			if i < 32*len(known[g]) && known[g].At(i) == abi.Retry {
				look.Set(i)
				some = true
			}
		}
		into[g] = look
	}
	if !some {
		return nil
	}
	return into
}

// Settled plans over what is there, with nothing left to ask: after a partial arrival,
// or when a Pending chunk did not come in time. What is unknown counts as a Miss.
func (p *Planner) Settled(ask Ask, known []abi.States) (Plan, error) {
	src := p.table(&ask, known)
	src.unknown = abi.Miss
	return p.withLoadCap(&ask, src)
}

func (p *Planner) table(ask *Ask, known []abi.States) *tableSource {
	s := &p.known
	s.tables, s.unknown = known, abi.Retry
	s.chunks = s.chunks[:0]
	for g := range p.m.Groups {
		s.chunks = append(s.chunks, ask.PromptTokens/p.m.Groups[g].ChunkTokens)
	}
	return s
}
