package vllm

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

// A Revision is one of the two rule sets.
type Revision uint8

const (
	// RevA is vLLM 0.27: its main branch of 2026-08-20.
	RevA Revision = iota + 1
	// RevB is vLLM 0.30.
	RevB
)

// A Promotion is what a lookup answers when it has just started to copy a key from a
// secondary tier into the primary.
type Promotion uint8

const (
	// PromotionPending: abi.Pending, as since 2026-08-12.
	PromotionPending Promotion = iota + 1
	// PromotionRetry: abi.Retry, as in v0.27.1 and before.
	PromotionRetry
)

// A Policy says which keys of a request go on to the secondary tiers.
type Policy uint8

const (
	// ChunkLevel passes on only what is newly written to the primary, and skips all
	// that was loaded from a tier. Rev A calls it BLOCK_LEVEL. It is the default.
	ChunkLevel Policy = iota + 1
	// RequestLevel passes on every key of the request, also those that the primary
	// holds already.
	RequestLevel
)

// An Optional is a number of tokens, or none: the zero value.
type Optional struct {
	Tokens uint64
	Set    bool
}

// Some returns the Optional that holds n tokens.
func Some(n uint64) Optional { return Optional{n, true} }

// A Group is one KV cache group: layers that share a block table.
type Group struct {
	Kind Kind
	// BlockTokens is the number of tokens of one GPU block; for attention kinds that is
	// the block size times the decode-context-parallel size.
	BlockTokens uint64
	// WindowTokens is the window of the sliding-window kinds, the attention chunk of
	// ChunkedLocal; 0 for the others.
	WindowTokens uint64
	// ExtraTokens are kept behind a sliding window without being attended
	// (extra_retained_tokens). Rev A ignores them when it looks up and stores.
	ExtraTokens uint64
	// Mode of a Mamba group.
	Mode MambaMode
	// Eagle marks a group that holds layers of an EAGLE or MTP drafter.
	Eagle bool
	// NotCacheable marks a group that takes no part in prefix caching. Rev B leaves it
	// out of offload; rev A knows no such thing.
	NotCacheable bool
}

// A Config is what the rules of one engine depend on. Defaults returns one with the
// values of an engine that nobody configured.
type Config struct {
	Revision Revision
	Groups   []Group
	// BlocksPerChunk is the number of consecutive GPU blocks that are offloaded as one.
	BlocksPerChunk uint64
	// RetentionTokens is prefix_cache_retention_interval: none keeps the tail of every
	// aligned segment, 0 only those at the prompt's end and at the junction, n also one
	// every n tokens. The store path of rev A does not read it.
	RetentionTokens Optional
	// PromptOnly stores no generated token (offload_prompt_only).
	PromptOnly bool
	Policy     Policy
	Promotion  Promotion
	// Speculative says that the engine decodes with EAGLE or MTP. Rev A then takes every
	// group for a drafter's when none is marked.
	Speculative bool
}

// Defaults returns the configuration of an engine that nobody configured.
func Defaults(rev Revision, groups ...Group) Config {
	return Config{
		Revision: rev, Groups: groups, BlocksPerChunk: 1, RetentionTokens: Some(0),
		PromptOnly: true, Policy: ChunkLevel, Promotion: PromotionPending,
	}
}

// Validate reports the first thing that makes a configuration unusable: a value out of
// range, or one that vLLM itself refuses, or dies of, when it starts.
func (c *Config) Validate() error {
	switch {
	case c.Revision != RevA && c.Revision != RevB:
		return fmt.Errorf("vllm: revision is %d; it must be %s or %s", uint8(c.Revision), RevA, RevB)
	case c.Promotion != PromotionPending && c.Promotion != PromotionRetry:
		return fmt.Errorf("vllm: promotion is %d; say what a started promotion answers: %s (main since 2026-08-12) or %s (v0.27.1)", uint8(c.Promotion), PromotionPending, PromotionRetry)
	case c.Policy != ChunkLevel && c.Policy != RequestLevel:
		return fmt.Errorf("vllm: policy is %d; it must be %s or %s", uint8(c.Policy), ChunkLevel, RequestLevel)
	case len(c.Groups) == 0:
		return fmt.Errorf("vllm: there are no groups; name at least one")
	case c.BlocksPerChunk == 0 || c.BlocksPerChunk > abi.MaxTokens:
		return fmt.Errorf("vllm: blocks_per_chunk is %d; it must be 1 to %d", c.BlocksPerChunk, uint64(abi.MaxTokens))
	case c.RetentionTokens.Tokens > abi.MaxTokens:
		return fmt.Errorf("vllm: retention_interval is %d; it must be at most %d", c.RetentionTokens.Tokens, uint64(abi.MaxTokens))
	}
	mamba := uint64(0) // chunk of the Mamba groups whose states can be reused
	for i := range c.Groups {
		g := &c.Groups[i]
		if err := c.validateGroup(g); err != nil {
			return fmt.Errorf("vllm: group %d (%s): %w", i, g.Kind, err)
		}
		if c.excludes(g) || g.Kind != Mamba || g.Mode == MambaNone {
			continue
		}
		chunk := g.BlockTokens * c.BlocksPerChunk
		if mamba != 0 && mamba != chunk {
			return fmt.Errorf("vllm: group %d (%s) has chunks of %d tokens, an earlier Mamba group has %d; vLLM stops at start unless all Mamba groups in modes align and all share one chunk size", i, g.Kind, chunk, mamba)
		}
		mamba = chunk
	}
	return nil
}

func (c *Config) validateGroup(g *Group) error {
	switch g.Kind {
	case Full, MLA, HiddenState, Sink, RSWA, Mamba:
		if g.WindowTokens != 0 {
			return fmt.Errorf("window is %d tokens, but this kind has none; leave it 0", g.WindowTokens)
		}
	case SlidingWindow, SlidingWindowMLA, ChunkedLocal:
		if g.WindowTokens == 0 {
			return fmt.Errorf("window is 0 tokens; vLLM stops at start unless it is at least 1")
		}
	case Cross, EncoderOnly, KpoolTail:
		if !c.excludes(g) {
			return fmt.Errorf("%s knows no scan for this kind and stops at start with a bare assertion; serve the model without offload", c.Revision)
		}
	default:
		return fmt.Errorf("the kind is unknown; vLLM stops at start with a bare assertion")
	}
	chunk := g.BlockTokens * c.BlocksPerChunk
	switch {
	case g.BlockTokens == 0 || g.BlockTokens > abi.MaxTokens || chunk > abi.MaxTokens:
		return fmt.Errorf("a block of %d tokens makes a chunk of %d; both must be 1 to %d", g.BlockTokens, chunk, uint64(abi.MaxTokens))
	case g.WindowTokens > abi.MaxTokens || g.ExtraTokens > abi.MaxTokens:
		return fmt.Errorf("a window of %d tokens with %d extra; both must be at most %d", g.WindowTokens, g.ExtraTokens, uint64(abi.MaxTokens))
	case g.ExtraTokens != 0 && !g.Kind.sliding():
		return fmt.Errorf("%d extra tokens, but only a sliding window retains extra tokens; leave it 0", g.ExtraTokens)
	case g.Mode > MambaAll || g.Mode != MambaNone && g.Kind != Mamba:
		return fmt.Errorf("mamba mode is %d; it must be 0 unless the kind is %s", uint8(g.Mode), Mamba)
	case g.NotCacheable && c.Revision == RevA:
		return fmt.Errorf("the group takes no part in prefix caching; %s cannot leave a group out of offload", RevA)
	}
	if c.Revision == RevB && c.RetentionTokens.Set && !c.excludes(g) && g.Kind.windowed() && c.RetentionTokens.Tokens%chunk != 0 {
		return fmt.Errorf("retention_interval is %d, the chunk has %d tokens; vLLM stops at start unless the interval is a multiple of the chunks of every window group", c.RetentionTokens.Tokens, chunk)
	}
	return nil
}

// excludes reports whether a group is left out of offload. Its index stays its own.
func (c *Config) excludes(g *Group) bool {
	return c.Revision == RevB && (g.NotCacheable || g.Kind == KpoolTail)
}
