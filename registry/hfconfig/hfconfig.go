// Package hfconfig derives a deployment from the config.json of a Hugging Face model: which
// layers keep what kind of KV, and how big it is. It is pure: bytes in, a deployment out.
//
// # Which layer is of which kind
//
// A configuration says it in one of these ways. The first one given counts, and the others
// that are given too must say the same:
//
//	layer_types              one word for each layer
//	hybrid_override_pattern  one letter for each layer: M Mamba, * attention, - and E neither
//	full_attention_interval  every n-th layer is full, the others are linear
//	attention_chunk_size     chunked, but full where no_rope_layers is 0; without it every 4th
//	sliding_window           sliding, but full at every sliding_window_pattern-th layer, or
//	                         below max_window_layers; use_sliding_window: false = no window
//	none of them             all layers are full
//
// kv_lora_rank makes full layers latent, and compress_ratios gives each layer's compression.
// What stands in text_config counts before what stands beside it.
//
// # Which groups
//
// Layers of one kind are one group, in the order of their first layers. An engine may split a
// kind into several groups of equal size; each then runs the same rule, and the verdict does
// not depend on how often. Cross and encoder attention is refused: it is not
// prefix-cacheable.
//
// # Sizes
//
// A deployment counts a block as K and V: layers x 2 x block_tokens x kv_heads x head_dim x
// dtype. A latent is one vector a token, and a recurrent state one for a whole block, so
// for these groups kv_heads and head_dim are chosen such that this product is the size of
// what is there, rounded up; the printed deployment says so. What is not read: layers that
// share another layer's KV, sizes that differ between layers of a kind, and another data type
// for a part of a state.
package hfconfig

import (
	"fmt"

	"github.com/tierd/tierd/registry/deploy"
)

// Options are what a model's configuration does not say.
type Options struct {
	// Model is the deployment's name for the model.
	Model string
	// BlockTokens is the engine's block of an attention group, and ChunkBlocks how many make
	// a chunk; 0 = ChunkBlocksDefault. A recurrent state has one block a chunk, of the
	// same tokens.
	BlockTokens, ChunkBlocks uint64
	// AlignTokens is the distance of the reuse points; nil = the smallest multiple of the
	// chunk that is at least AlignTokensMin.
	AlignTokens *uint64
	// MaxTokens is the longest prompt; 0 = max_position_embeddings.
	MaxTokens uint64
	// DType of the KV, as in a deployment; empty = the model's.
	DType string
	// Legs of the deployment; none = a deployment's default.
	Legs []string
	// Draft adds the group of a draft head: one layer with the geometry of the model's full
	// attention.
	Draft bool
}

const (
	// ChunkBlocksDefault makes chunks of 128 tokens from the blocks of 16 that most engines
	// use: 256 KiB a layer and more, which moves at full speed.
	ChunkBlocksDefault = 8
	// AlignTokensMin is the least default distance of reuse points: one in 4096 tokens keeps a
	// quarter of the chunks of a window of 1024, and costs a shared prefix at most 4095 tokens.
	AlignTokensMin = 4096
)

// A Derived deployment, with where each part of it came from.
type Derived struct {
	// Deployment may be changed, and is printed as it is.
	Deployment *deploy.Deployment
	notes      notes
}

// Derive returns the deployment of the model whose configuration is data. file is its path,
// for messages.
func Derive(file string, data []byte, o Options) (*Derived, error) {
	d, err := derive(file, data, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	// What was derived is read as a file would be, so that it has the same defaults, limits
	// and digest.
	d.Deployment, err = deploy.Parse(file, d.YAML())
	if err != nil {
		return nil, err
	}
	return d, nil
}

func derive(file string, data []byte, o Options) (*Derived, error) {
	if o.BlockTokens == 0 || o.BlockTokens > blockTokensMax {
		return nil, fmt.Errorf("the block has %d tokens; give the engine's, 1 to %d", o.BlockTokens, blockTokensMax)
	}
	if o.ChunkBlocks == 0 {
		o.ChunkBlocks = ChunkBlocksDefault
	}
	if o.ChunkBlocks > blockTokensMax {
		return nil, fmt.Errorf("a chunk has %d blocks; give 1 to %d", o.ChunkBlocks, blockTokensMax)
	}
	c, err := open(data)
	if err != nil {
		return nil, err
	}
	layers := c.layers()
	g := grouper{config: c, o: o}
	groups := g.groups(&layers)
	d := &Derived{Deployment: &deploy.Deployment{
		Model: o.Model, Groups: groups, Legs: o.Legs,
		Policies: []deploy.Policy{{Rule: "request-level"}},
	}, notes: notes{file: file, groups: g.notes}}
	d.align(o)
	if d.Deployment.MaxTokens = o.MaxTokens; o.MaxTokens == 0 {
		d.Deployment.MaxTokens = c.must("max_position_embeddings", tokensMax, "or give the longest prompt with --max-tokens")
		d.notes.maxTokens = "max_position_embeddings"
	} else {
		d.notes.maxTokens = "--max-tokens"
	}
	return d, c.err
}

// align chooses the alignment.
func (d *Derived) align(o Options) {
	defer func() { d.notes.derivedAlign = d.Deployment.AlignTokens }()
	if o.AlignTokens != nil {
		d.Deployment.AlignTokens, d.notes.alignTokens = *o.AlignTokens, "--align"
		return
	}
	chunk := o.BlockTokens * o.ChunkBlocks
	d.Deployment.AlignTokens = (AlignTokensMin + chunk - 1) / chunk * chunk
	d.notes.alignTokens = fmt.Sprintf("the smallest multiple of a chunk's %d tokens that is at least %d", chunk, AlignTokensMin)
}
