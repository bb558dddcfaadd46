package vllm

import "github.com/tierd/tierd/abi"

// A Key names a chunk of a group.
type Key struct{ Group, Chunk int }

// A Look answers a lookup.
type Look func(k Key) abi.State

// An Ask is what a consumer knows of its request.
type Ask struct {
	// TextTokens is the length of the request: prompt, and what was generated when it is
	// resumed.
	TextTokens uint64
	// LocalTokens is the prefix that the consumer's GPU holds.
	LocalTokens uint64
	// MaxLoadTokens caps what is loaded beyond LocalTokens; rev B only.
	MaxLoadTokens Optional
}

// A Match is the outcome of one lookup of a request.
type Match struct {
	// Tokens beyond the local prefix that can be loaded. 0 when Deferred.
	Tokens uint64
	// Deferred says that the engine asks again in its next step, from the start.
	Deferred bool
}

// Match looks a request up once: prefix groups first, then window groups from the widest
// down. Each may lower the end of the hit, which is never raised, and may make others be
// looked up again. It calls look once per lookup that vLLM makes, in vLLM's order.
func (r *Rules) Match(a Ask, look Look) Match {
	m := &matcher{rules: r, look: look, text: int(a.TextTokens), local: int(a.LocalTokens)}
	m.end = m.text
	if a.MaxLoadTokens.Set && r.config.Revision == RevB {
		m.capped = true
		m.end = min(m.end, m.local+int(a.MaxLoadTokens.Tokens))
	}
	if len(r.windows) > 0 {
		// The last token is always computed, and a window group could not give up
		// its last chunk for it afterwards.
		m.end--
		if r.mamba != 0 {
			m.end = m.end / r.mamba * r.mamba
		}
	}
	m.verified = make([]bool, len(r.groups))
	for todo := r.order; len(todo) > 0; todo = m.again {
		m.again, m.windowSeen = nil, false
		for _, g := range todo {
			if !m.group(g) {
				return Match{}
			}
		}
	}
	if m.deferred {
		return Match{Deferred: true}
	}
	return Match{Tokens: uint64(m.best)}
}

// A matcher is a Match under way.
type matcher struct {
	rules       *Rules
	look        Look
	text, local int
	capped      bool
	end         int // of the hit, from token 0
	best        int // tokens of the hit so far
	deferred    bool
	verified    []bool // drafter groups that gave up their extra chunk for this end
	windowSeen  bool   // in this round
	again       []int  // groups of the next round
}

// group looks group g up below the current end. It returns false when nothing can be
// loaded.
func (m *matcher) group(gi int) bool {
	g := &m.rules.groups[gi]
	keys := m.text / g.chunk
	m.end = min(m.end, keys*g.chunk)
	if m.capped {
		m.end = m.end / g.chunk * g.chunk
	}
	if m.end-m.local < g.chunk {
		return false
	}
	extra := g.eagle && !m.verified[gi]
	hits, deferred := m.scan(g, gi, keys, extra)
	if hits == 0 && !deferred {
		return false
	}
	if deferred {
		m.deferred = true // a group that cannot say does not lower the end
	} else {
		if extra {
			hits--
			m.verified[gi] = true
		}
		m.end = min(m.end, g.chunk*(m.local/g.chunk+hits))
	}
	tokens := m.end - m.local
	if tokens < g.chunk {
		return false
	}
	if tokens < m.best {
		if !g.eagle {
			clear(m.verified)
		}
		switch {
		case m.deferred: // perhaps nobody has to wait below this end
			m.deferred = false
			m.again = m.rules.order
		case m.windowSeen && m.again == nil:
			m.again = m.rules.windows
		}
	}
	m.windowSeen = m.windowSeen || g.window != 0
	m.best = tokens
	return true
}

// scan looks up the chunks of g below the current end; extra asks for one more chunk,
// which a drafter's group will give up.
func (m *matcher) scan(g *group, gi, keys int, extra bool) (hits int, deferred bool) {
	rev := m.rules.config.Revision
	query := m.end
	if extra && (rev == RevB || g.window != 0) {
		query = min(m.end+g.chunk, keys*g.chunk)
	}
	lo, hi := m.local/g.chunk, ceilDiv(query, g.chunk)
	look := func(chunk int) abi.State { return m.look(Key{gi, chunk}) }
	if g.window == 0 {
		return prefixScan(lo, hi, look)
	}
	window := g.window + one(extra)
	first := window
	if rev == RevB && g.Kind.sliding() {
		end := min(m.end, (hi-one(extra))*g.chunk)
		first = max(g.window, g.firstWindow(end)) + one(extra)
	}
	return slidingScan(rev, lo, hi, window, first, look)
}

// firstWindow is rev B's: how many chunks a hit that ends at token end reads. A hit that
// ends inside a chunk may reach one chunk further back.
func (g *group) firstWindow(end int) int {
	pad := ceilDiv(end, g.chunk)*g.chunk - end
	return ceilDiv(int(g.WindowTokens+g.ExtraTokens)-1+pad, g.chunk)
}
