package vllm

import "github.com/tierd/tierd/abi"

// A reach is one store pass over one group: the chunks from lo up to hi are looked at.
type reach struct {
	lo, hi int
	keep   func(chunk int) bool
}

// pass offers what may be stored when after tokens are computed, and returns what is
// passed on to the secondary tiers.
func (p *Producer) pass(after int) (passed []Key) {
	off := p.offloadable(after)
	var keys []Key
	for i := range p.groups {
		g, s := &p.rules.groups[i], &p.groups[i]
		if g.excluded {
			continue
		}
		if p.handedOver(g) {
			passed = append(passed, p.handOver(i, off)...)
			continue
		}
		rc := p.reach(g, s, off)
		for c := rc.lo; c < rc.hi; c++ {
			last := (c+1)*g.perChunk - 1
			if !has(s.null, last) && rc.keep(c) {
				keys = append(keys, Key{i, c})
			}
		}
	}
	kept, ok := p.store(keys)
	if !ok {
		return passed
	}
	for i := range p.groups {
		if g, s := &p.rules.groups[i], &p.groups[i]; !g.excluded {
			s.cursor = max(s.cursor, g.storable(p.rules.config.Revision, p.stock(g, s, off)))
		}
	}
	return append(passed, kept...)
}

func (p *Producer) stock(g *group, s *stored, off int) stock {
	return stock{prompt: p.prompt, offloadable: off, blocks: s.blocks, keys: p.text / g.chunk, finished: p.over}
}

// reach returns which chunks of a group a pass looks at, and which of them the revision
// takes for reachable.
func (p *Producer) reach(g *group, s *stored, off int) reach {
	rev := p.rules.config.Revision
	n := g.storable(rev, p.stock(g, s, off))
	if rev == RevA {
		return reach{s.cursor, n, func(c int) bool { return reachableA(c, n, g.segment, g.window, g.eagle) }}
	}
	prompt := p.offloadable(p.prompt) / g.chunk
	dense := !p.rules.config.RetentionTokens.Set
	horizon := -1 // a frontier that decoding will move is no end of a hit
	switch {
	case !dense || g.eagle:
	case p.over:
		horizon = n
	case n <= prompt:
		horizon = prompt
	}
	mask := p.mask(g, horizon)
	whole := p.rules.align != 0 && p.rules.align%g.block == 0
	if !p.over || n == prompt || !dense || g.eagle || !g.Kind.sliding() || !whole {
		return reach{s.cursor, n, func(c int) bool { return mask.chunk(c, g.perChunk) }}
	}
	// The text ends elsewhere than the prompt, and the passes so far took the prompt's
	// end for the end. What they left out of the segment that is open now is looked at
	// again.
	blocks := n * g.perChunk
	open := (blocks - blocks%(p.rules.align/g.block)) / g.perChunk
	before := p.mask(g, prompt)
	return reach{min(s.cursor, open), n, func(c int) bool {
		if c < s.cursor && before.chunk(c, g.perChunk) {
			return false
		}
		return mask.chunk(c, g.perChunk)
	}}
}

// mask returns rev B's mask of a group with a horizon in chunks; -1 = none.
func (p *Producer) mask(g *group, horizon int) blockMask {
	r := reachB{align: p.rules.align, retention: p.rules.config.RetentionTokens, horizon: -1}
	if horizon >= 0 {
		r.horizon = horizon * g.perChunk
	}
	r.boundaries = []int{p.prompt - 1}
	if j := int(p.request.JunctionTokens); j > 0 {
		r.boundaries = append(r.boundaries, j)
	}
	return g.maskB(r)
}

// store offers keys to the primary, all or none, and returns what goes on to the
// secondary tiers. It reports false when the primary has no room.
func (p *Producer) store(keys []Key) (passed []Key, ok bool) {
	for _, k := range keys {
		there := p.there(k)
		if there == abi.Miss && p.NoRoom {
			return nil, false
		}
		if p.passesOn(there) {
			passed = append(passed, k)
		}
	}
	for _, k := range passed {
		set(&p.groups[k.Group].offered, k.Chunk)
	}
	return passed, true
}

// there answers what the primary holds of a key that this request did not write.
func (p *Producer) there(k Key) abi.State {
	if p.request.Warm.Primary == nil {
		return abi.Miss
	}
	return p.request.Warm.Primary(k)
}

// passesOn reports whether a key goes on to the secondary tiers, given what the primary
// held of it. Under RequestLevel rev A drops a key that somebody else is writing, and the
// cursor moves past it; rev B parks it until it is readable.
func (p *Producer) passesOn(there abi.State) bool {
	if there == abi.Miss {
		return true
	}
	return p.rules.config.Policy == RequestLevel && (there == abi.Hit || p.rules.config.Revision == RevB)
}

// handedOver reports whether the scheduler hands the states of a group over one by one,
// instead of the group's blocks being looked at: rev B does so in mode align.
func (p *Producer) handedOver(g *group) bool {
	return p.rules.config.Revision == RevB && g.Kind == Mamba && g.Mode == MambaAlign
}

// handOver offers the state of the step that ended, when it ended on a chunk's end. No
// mask is asked, and no later pass offers it again.
func (p *Producer) handOver(i, off int) []Key {
	g := &p.rules.groups[i]
	if p.over || p.computed%g.chunk != 0 || p.computed > off {
		return nil
	}
	kept, _ := p.store([]Key{{i, p.computed/g.chunk - 1}})
	return kept
}
