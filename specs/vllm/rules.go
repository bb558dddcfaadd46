package vllm

import (
	"slices"

	"github.com/tierd/tierd/abi"
)

// Rules are the rules of one configuration: how it stores and how it looks up. They are
// immutable and safe for concurrent use.
type Rules struct {
	config  Config
	groups  []group
	order   []int // groups in the order in which they are looked up
	windows []int // the window groups of order
	// align is the chunk to which the ends of hits are taken to be aligned when the
	// store path decides what can be reached; 0 = none.
	align int
	// mamba is the chunk of the Mamba groups in modes align and all; 0 = no such group.
	mamba int
}

// A group is a Group with what follows from it. Its numbers are tokens unless they say
// otherwise.
type group struct {
	Group
	eagle    bool // as the revision sees it
	excluded bool
	block    int
	chunk    int
	perChunk int // blocks of a chunk
	window   int // in chunks; 0 = scanned as a prefix
	segment  int // rev A: chunks of a segment of which only the tail is kept; 0 = all is kept
}

// New returns the rules of a configuration.
func New(c Config) (*Rules, error) {
	c.Groups = slices.Clone(c.Groups)
	if err := c.Validate(); err != nil {
		return nil, err
	}
	r := &Rules{config: c, groups: make([]group, len(c.Groups))}
	marked := slices.ContainsFunc(c.Groups, func(g Group) bool { return g.Eagle })
	for i := range c.Groups {
		g := group{Group: c.Groups[i], block: int(c.Groups[i].BlockTokens), perChunk: int(c.BlocksPerChunk)}
		g.chunk = g.block * g.perChunk
		g.eagle = g.Eagle || c.Revision == RevA && c.Speculative && !marked
		if g.excluded = c.excludes(&g.Group); !g.excluded {
			g.window = windowChunks(c.Revision, &g.Group, g.chunk)
		}
		if g.Kind == Mamba && g.Mode != MambaNone && !g.excluded {
			r.mamba = g.chunk
		}
		r.groups[i] = g
	}
	r.align = r.alignment()
	for i := range r.groups {
		g := &r.groups[i]
		if c.Revision == RevA {
			g.segment = segmentChunks(r.align, g.chunk, g.window)
		}
		if g.window == 0 && !g.excluded {
			r.order = append(r.order, i)
		}
		if g.window != 0 {
			r.windows = append(r.windows, i)
		}
	}
	slices.SortStableFunc(r.windows, func(a, b int) int { return r.groups[b].window - r.groups[a].window })
	r.order = append(r.order, r.windows...)
	return r, nil
}

// Config returns the configuration of the rules.
func (r *Rules) Config() Config {
	c := r.config
	c.Groups = slices.Clone(c.Groups)
	return c
}

// ChunkTokens returns the number of tokens of a chunk of group g.
func (r *Rules) ChunkTokens(g int) uint64 { return uint64(r.groups[g].chunk) }

// WindowChunks returns how many chunks in a row a lookup of group g wants to find, and
// false when it scans a prefix instead.
func (r *Rules) WindowChunks(g int) (int, bool) { return r.groups[g].window, r.groups[g].window != 0 }

// Offloaded reports whether group g takes part in offload.
func (r *Rules) Offloaded(g int) bool { return !r.groups[g].excluded }

// PeriodTokens returns a length after which the answers of a cold engine repeat,
// shifted: the least common multiple of all chunks, attention chunks, rev A's segments
// and the retention interval; at most abi.MaxTokens.
func (r *Rules) PeriodTokens() uint64 {
	period := uint64(1)
	for i := range r.groups {
		g := &r.groups[i]
		if g.excluded {
			continue
		}
		period = lcm(period, uint64(g.chunk*max(1, g.segment)))
		if g.Kind == ChunkedLocal {
			period = lcm(period, g.WindowTokens)
		}
	}
	if r.config.Revision == RevB && r.config.RetentionTokens.Tokens > 0 {
		period = lcm(period, r.config.RetentionTokens.Tokens)
	}
	return period
}

func lcm(a, b uint64) uint64 {
	g, rest := a, b
	for rest != 0 {
		g, rest = rest, g%rest
	}
	return min(a/g*b, abi.MaxTokens)
}

// windowChunks returns how many chunks in a row a lookup wants to find; 0 = it scans a
// prefix.
func windowChunks(rev Revision, g *Group, chunk int) int {
	w := int(g.WindowTokens)
	switch {
	case g.Kind.sliding() && rev == RevB:
		return max(ceilDiv(w, chunk), ceilDiv(w-1+int(g.ExtraTokens), chunk))
	case g.Kind.sliding() || g.Kind == ChunkedLocal:
		return ceilDiv(w, chunk)
	case g.Kind == Mamba:
		return 1
	}
	return 0
}

// alignment returns the chunk that all prefix groups share; 0 when they differ. When
// there is no prefix group, rev B takes the largest chunk and rev A none.
func (r *Rules) alignment() int {
	align, largest, prefixes := 0, 0, 0
	for i := range r.groups {
		g := &r.groups[i]
		if g.excluded {
			continue
		}
		largest = max(largest, g.chunk)
		if g.window != 0 {
			continue
		}
		if prefixes++; prefixes == 1 {
			align = g.chunk
		} else if align != g.chunk {
			return 0
		}
	}
	if prefixes == 0 && r.config.Revision == RevB {
		return largest
	}
	return align
}

// segmentChunks is rev A's: how many chunks a segment between two possible ends of hits
// has; 0 when no chunk of it can be spared.
func segmentChunks(align, chunk, window int) int {
	if window == 0 || align <= chunk || window >= align/chunk {
		return 0
	}
	return align / chunk
}

// dropped returns how many leading tokens of a group the KV manager no longer keeps on
// the GPU once n tokens are computed. Blocks wholly inside become null.
func (g *group) dropped(n int) int {
	switch {
	case g.Kind.sliding():
		return max(0, n-int(g.WindowTokens)+1-int(g.ExtraTokens))
	case g.Kind == ChunkedLocal:
		return n / int(g.WindowTokens) * int(g.WindowTokens)
	case g.Kind == Mamba:
		return max(0, n-1)
	}
	return 0
}

// native returns how many leading blocks are null after a prefix hit of n tokens, a
// multiple of the block, on the GPU: a window group finds only what its next token reads.
func (g *group) native(n int) int {
	if g.Kind.sliding() {
		return max(0, n/g.block-ceilDiv(int(g.WindowTokens)-1, g.block))
	}
	return g.dropped(n) / g.block
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// set adds i to a set, which grows when it must.
func set(b *abi.Bitmap, i int) {
	for len(*b) <= i>>6 {
		*b = append(*b, 0)
	}
	b.Set(i)
}

// has reports whether i is in a set of any length.
func has(b abi.Bitmap, i int) bool { return i>>6 < len(b) && b.Get(i) }

// minus returns what is in a and not in b.
func minus(a, b abi.Bitmap) abi.Bitmap {
	d := slices.Clone(a)
	d.AndNot(b)
	return d
}
