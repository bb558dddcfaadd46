package vllm

// This file holds the store side's pure functions: how many chunks may be stored, and
// which of them the revision takes for reachable by a lookup.

// A stock is what is known of one group when a store pass looks at it.
type stock struct {
	prompt      int // tokens of the prompt
	offloadable int // leading tokens that may be stored
	blocks      int // GPU blocks allocated
	keys        int // complete chunks of the text
	finished    bool
}

// storable returns how many leading chunks of the group may be stored. While a drafter's
// group decodes, its last chunk is held back: verification may still rewrite the draft
// layer's KV of the last accepted position. In the prompt that KV is stable.
func (g *group) storable(rev Revision, s stock) int {
	n := s.offloadable / g.chunk
	if g.eagle && s.offloadable > s.prompt && !(rev == RevB && s.finished) {
		n = max(0, n-1)
	}
	n = min(n, s.blocks/g.perChunk)
	if rev == RevB {
		n = min(n, s.keys)
	}
	return n
}

// reachableA reports whether rev A keeps chunk i when n chunks may be stored: the tail of
// each segment, and the tail before n, whatever n is in this step.
func reachableA(i, n, segment, window int, eagle bool) bool {
	if segment == 0 {
		return true
	}
	at := i % segment
	length := min(segment, n-(i-at))
	return at >= length-window-one(eagle)
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// A blockSpan is a run of blocks lo <= j < hi.
type blockSpan struct{ lo, hi int }

// A blockMask is rev B's answer to what is reachable, per GPU block. A chunk is kept when
// any of its blocks is.
type blockMask struct {
	all   bool
	every int // distance of the regular tails, in blocks; 0 = there are none
	need  int // blocks of a tail
	shift int // blocks by which a tail is moved to the right
	spans []blockSpan
}

func (m *blockMask) block(j int) bool {
	if m.all || m.every > 0 && j >= m.shift && (j-m.shift)%m.every >= m.every-m.need {
		return true
	}
	for _, s := range m.spans {
		if j >= s.lo && j < s.hi {
			return true
		}
	}
	return false
}

func (m *blockMask) chunk(i, perChunk int) bool {
	if m.all {
		return true
	}
	for j := i * perChunk; j < (i+1)*perChunk; j++ {
		if m.block(j) {
			return true
		}
	}
	return false
}

// A reachB is what rev B's mask of one request depends on, besides the group.
type reachB struct {
	align     int // 0 = none
	retention Optional
	// boundaries are the tokens at which a hit may end that are kept when there is a
	// retention interval: the last of the prompt, and the junction.
	boundaries []int
	// horizon is the block before which the open segment's tail is kept; -1 = none.
	horizon int
}

// maskB returns rev B's mask of a group.
func (g *group) maskB(r reachB) blockMask {
	switch {
	case g.Kind.sliding() && r.align != 0 && r.align%g.block == 0:
		return g.slidingMask(r)
	case g.Kind == Mamba && r.align != 0 && r.retention.Set:
		return g.mambaMask(r)
	}
	return blockMask{all: true}
}

// slidingMask keeps the blocks that native prefix caching needs for a hit, before each
// aligned end, or before those that the retention interval leaves.
func (g *group) slidingMask(r reachB) blockMask {
	m := blockMask{
		need:  ceilDiv(int(g.WindowTokens+g.ExtraTokens)-1, g.block) + one(g.eagle),
		shift: one(g.eagle),
	}
	segment := r.align
	if r.retention.Set {
		segment = int(r.retention.Tokens)
	}
	if segment != 0 {
		m.every = segment / g.block
		if m.need >= m.every {
			return blockMask{all: true}
		}
		if h := r.horizon; h >= 0 && !g.eagle {
			m.spans = append(m.spans, blockSpan{h - m.need, h})
		}
	}
	for _, end := range r.ends(g.block) {
		m.spans = append(m.spans, blockSpan{end + m.shift - m.need, end + m.shift})
	}
	return m
}

// mambaMask keeps the state at each interval's end and the one at each boundary.
func (g *group) mambaMask(r reachB) blockMask {
	m := blockMask{need: 1}
	if r.retention.Tokens > 0 {
		if m.every = int(r.retention.Tokens) / g.block; m.every <= 1 {
			return blockMask{all: true}
		}
	}
	for _, end := range r.ends(g.block) {
		m.spans = append(m.spans, blockSpan{end - 1, end})
	}
	return m
}

// ends returns the blocks before which a hit at each boundary ends: boundaries are
// floored to the alignment.
func (r *reachB) ends(block int) (ends []int) {
	if !r.retention.Set {
		return nil
	}
	for _, b := range r.boundaries {
		if b >= 0 {
			ends = append(ends, b/r.align*r.align/block)
		}
	}
	return ends
}
