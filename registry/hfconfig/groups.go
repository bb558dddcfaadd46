package hfconfig

import (
	"fmt"
	"slices"

	"github.com/tierd/tierd/registry/deploy"
)

// A grouper makes the groups of a configuration.
type grouper struct {
	*config
	o     Options
	notes []groupNotes // of each group
}

// A member is what layers of one group have in common.
type member struct {
	kind  kind
	ratio uint64 // 0 = not compressed
}

// groups returns the groups in the order of their first layers, then the draft head's.
func (g *grouper) groups(l *layers) []deploy.Group {
	if g.err != nil {
		return nil
	}
	var order []member
	counts := map[member]uint64{}
	for i, k := range l.kinds {
		m := member{kind: k}
		if l.ratios != nil && l.ratios[i] > 1 {
			m.ratio = l.ratios[i]
		}
		if counts[m]++; counts[m] == 1 && k != none {
			order = append(order, m)
		}
	}
	if len(order) == 0 {
		g.fail("%s leaves no layer that keeps KV or a state; there is nothing to judge", l.from)
	}
	var groups []deploy.Group
	for _, m := range order {
		groups = append(groups, g.group(m, counts[m], l))
	}
	if g.o.Draft && g.err == nil {
		groups = append(groups, g.draft(groups))
	}
	return groups
}

// group returns the group of a member's layers.
func (g *grouper) group(m member, count uint64, l *layers) deploy.Group {
	gr := deploy.Group{BlockTokens: g.o.BlockTokens, ChunkBlocks: g.o.ChunkBlocks, Layers: count}
	what := m.kind.String()
	n := groupNotes{blocks: "--block", dtype: "torch_dtype"}
	switch m.kind {
	case full:
		gr.Name, gr.Rule = "full", "full"
		if g.has("kv_lora_rank") || m.ratio > 0 {
			gr.Name, gr.Rule, what = "latent", "latent", "full_attention over latents (kv_lora_rank)"
		}
		if m.ratio > 0 {
			gr.Name = fmt.Sprintf("latent-%d", m.ratio)
			gr.Params = map[string]any{"compress_ratio": m.ratio}
			what = fmt.Sprintf("full_attention with %d tokens to one entry (compress_ratios)", m.ratio)
			if chunk := g.o.BlockTokens * g.o.ChunkBlocks; chunk%m.ratio != 0 {
				g.fail("compress_ratios has %d, and a chunk has %d tokens (%d blocks of %d); a chunk must hold whole latents, so choose --block and --chunk-blocks such that it is a multiple of %d",
					m.ratio, chunk, g.o.ChunkBlocks, g.o.BlockTokens, m.ratio)
			}
		}
	case sliding:
		gr.Name, gr.Rule = "sliding", "window"
		gr.Params = map[string]any{"window": g.window(l)}
		what += fmt.Sprintf(" with sliding_window %d", gr.Params["window"])
	case chunked:
		gr.Name, gr.Rule = "chunked", "chunked"
		gr.Params = map[string]any{"attention_chunk": g.must("attention_chunk_size", windowMax, "")}
		what += fmt.Sprintf(" with attention_chunk_size %d", gr.Params["attention_chunk"])
	default:
		return g.state(gr, m.kind, l)
	}
	n.head = append(n.head, fmt.Sprintf("%d of %d layers are %s, %s.", count, l.count, what, l.said))
	g.heads(&gr, &n, m.ratio)
	gr.DType = g.dtype(&n)
	g.notes = append(g.notes, n)
	return gr
}

// window returns the size of the window, which some layers have.
func (g *grouper) window(l *layers) uint64 {
	if !g.boolean("use_sliding_window", true) {
		g.fail("%s makes layer %d sliding_attention, and use_sliding_window is false; correct or remove one of the two", l.from, slices.Index(l.kinds, sliding))
	}
	return g.must("sliding_window", windowMax, fmt.Sprintf("because %s makes layer %d sliding_attention", l.from, slices.Index(l.kinds, sliding)))
}

// heads gives an attention group the size of its vectors.
func (g *grouper) heads(gr *deploy.Group, n *groupNotes, ratio uint64) {
	if g.has("kv_lora_rank") {
		rank, rope := g.must("kv_lora_rank", dimMax, ""), g.must("qk_rope_head_dim", dimMax, "because kv_lora_rank is given")
		vector := rank + rope
		per := 2 * max(ratio, 1) // a block counts two vectors a token, and ratio tokens share one
		gr.KVHeads, gr.HeadDim = 1, ceilDiv(vector, per)
		n.heads, n.dim = "one latent for all heads", "see above"
		of := "every token"
		if ratio > 1 {
			of = fmt.Sprintf("every %d tokens", ratio)
		}
		n.head = append(n.head, fmt.Sprintf("One latent of kv_lora_rank %d + qk_rope_head_dim %d = %d values serves %s. A block counts head_dim for each token, once for K and once for V: %d / %d%s.",
			rank, rope, vector, of, vector, per, rounded(vector, per)))
		return
	}
	attention := g.integer("num_attention_heads", 1, dimMax, 0)
	n.heads = "num_key_value_heads"
	if gr.KVHeads = g.integer("num_key_value_heads", 1, dimMax, 0); !g.has("num_key_value_heads") {
		gr.KVHeads = g.must("num_attention_heads", dimMax, "or num_key_value_heads")
		n.heads = "num_attention_heads, without num_key_value_heads"
	}
	n.dim = "head_dim"
	if gr.HeadDim = g.integer("head_dim", 1, dimMax, 0); !g.has("head_dim") {
		hidden := g.must("hidden_size", hiddenMax, "or head_dim")
		attention = g.must("num_attention_heads", dimMax, "or head_dim")
		if g.err != nil {
			return
		}
		if hidden%attention != 0 {
			g.fail("head_dim is missing, and hidden_size %d is no multiple of num_attention_heads %d; add head_dim", hidden, attention)
		}
		gr.HeadDim, n.dim = hidden/attention, fmt.Sprintf("hidden_size %d / num_attention_heads %d", hidden, attention)
	}
	if attention > 0 && (gr.KVHeads > attention || gr.KVHeads > 0 && attention%gr.KVHeads != 0) {
		g.fail("num_key_value_heads is %d, and num_attention_heads is %d; every KV head serves a whole number of heads, so correct one of the two", gr.KVHeads, attention)
	}
	if ratio > 1 {
		n.dim += fmt.Sprintf(" %d / compress_ratio %d%s: so many tokens share one", gr.HeadDim, ratio, rounded(gr.HeadDim, ratio))
		gr.HeadDim = ceilDiv(gr.HeadDim, ratio)
	}
}

// state gives a group of recurrent states its geometry: one state a chunk, which is one
// block.
func (g *grouper) state(gr deploy.Group, k kind, l *layers) deploy.Group {
	n := groupNotes{blocks: "a chunk of the attention groups: a block holds one state", dtype: "torch_dtype",
		heads: "so that a block has as many values; see above", dim: "the same"}
	gr.Rule, gr.Params = "state", map[string]any{"mode": "align"}
	gr.BlockTokens, gr.ChunkBlocks = gr.BlockTokens*gr.ChunkBlocks, 1
	name, values, sum := g.stateSize(k)
	gr.Name = name
	if values >= valuesMax {
		g.fail("a state has %s: together %d values and more; correct the key that is too large", sum, valuesMax)
	}
	if values == 0 && g.err == nil {
		g.fail("conv_L_cache is 1: a convolution over one token keeps nothing, so these layers are no group; call them something else in %s", l.from)
	}
	gr.KVHeads = 1
	for gr.HeadDim = ceilDiv(values, 2*gr.BlockTokens); gr.HeadDim > dimMax && gr.KVHeads < dimMax; {
		gr.KVHeads *= 2
		gr.HeadDim = ceilDiv(values, product(2*gr.BlockTokens, gr.KVHeads))
	}
	n.head = append(n.head, fmt.Sprintf("%d of %d layers are %s, %s, and keep a recurrent state.", gr.Layers, l.count, k, l.said),
		fmt.Sprintf("A state has %d values a layer: %s. A block holds one state, not a vector for each of its tokens: "+
			"kv_heads and head_dim are chosen so that 2 x block_tokens x kv_heads x head_dim is that number%s.",
			values, sum, rounded(values, 2*gr.BlockTokens*gr.KVHeads)),
		"mode align: a state is saved where the engine is told to stop, not at every chunk's end.")
	gr.DType = g.dtype(&n)
	g.notes = append(g.notes, n)
	return gr
}

// stateSize returns the name of a group of states, the values that one layer keeps, and from
// what they are counted. An engine that keeps a part of a state in another data type needs
// more bytes for it.
func (g *grouper) stateSize(k kind) (name string, values uint64, sum string) {
	switch k {
	case linear:
		name = "linear"
		heads, keyHeads := g.must("linear_num_value_heads", dimMax, ""), g.must("linear_num_key_heads", dimMax, "")
		key, value := g.must("linear_key_head_dim", dimMax, ""), g.must("linear_value_head_dim", dimMax, "")
		kernel := g.must("linear_conv_kernel_dim", dimMax, "")
		channels := 2*keyHeads*key + heads*value
		values = product(heads, key, value) + product(kernel-min(kernel, 1), channels)
		sum = fmt.Sprintf("linear_num_value_heads %d x linear_key_head_dim %d x linear_value_head_dim %d, and the last %d inputs of a convolution over %d channels",
			heads, key, value, kernel-min(kernel, 1), channels)
	case mamba:
		name = "mamba"
		heads, dim, size := g.must("mamba_num_heads", dimMax, ""), g.must("mamba_head_dim", dimMax, ""), g.must("ssm_state_size", dimMax, "")
		inner, shared, kernel := heads*dim, g.must("n_groups", dimMax, ""), g.must("conv_kernel", dimMax, "")
		channels := inner + 2*shared*size
		values = product(heads, dim, size) + product(kernel-min(kernel, 1), channels)
		sum = fmt.Sprintf("mamba_num_heads %d x mamba_head_dim %d x ssm_state_size %d, and the last %d inputs of a convolution over %d channels",
			heads, dim, size, kernel-min(kernel, 1), channels)
	case conv:
		name = "conv"
		kernel, hidden := g.must("conv_L_cache", dimMax, ""), g.must("hidden_size", hiddenMax, "")
		values = product(kernel-min(kernel, 1), hidden)
		sum = fmt.Sprintf("the last %d inputs (conv_L_cache less one) of hidden_size %d", kernel-min(kernel, 1), hidden)
	}
	return name, values, sum
}

// draft returns the group of a draft head: one layer that reads everything.
func (g *grouper) draft(groups []deploy.Group) deploy.Group {
	i := slices.IndexFunc(groups, func(gr deploy.Group) bool { return gr.Rule == "full" || gr.Rule == "latent" && gr.Params == nil })
	if i < 0 {
		i = slices.IndexFunc(groups, func(gr deploy.Group) bool { return gr.Rule != "state" && gr.Rule != "latent" })
	}
	if i < 0 {
		g.fail("a draft head is asked for, and no layer has attention whose geometry it could have; leave out --draft, or write a deployment file")
		return deploy.Group{}
	}
	gr := groups[i]
	n := g.notes[i]
	n.head = []string{fmt.Sprintf("--draft: a draft head (EAGLE, MTP) of one layer with the geometry of group %s.", gr.Name)}
	if gr.Rule != "full" && gr.Rule != "latent" {
		gr.Rule, gr.Params = "full", nil
		n.head = append(n.head, "It is taken to read everything, which asks for most.")
	}
	n.head = append(n.head, "No rule sees that it is a draft: with draft: true, the planner stores one token less of a "+
		"text that went on after the prompt, because the head writes its last position again.")
	n.layers = "--draft"
	gr.Name, gr.Layers, gr.Draft = "draft", 1, true
	g.notes = append(g.notes, n)
	return gr
}

// dtypes are the names of data types, as a configuration and as a deployment says them.
var dtypes = map[string]string{
	"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int8": "int8",
}

// dtype returns the data type of the KV: the model's, where none is asked for.
func (g *grouper) dtype(n *groupNotes) string {
	if g.o.DType != "" {
		n.dtype = "--dtype"
		return g.o.DType
	}
	for _, key := range []string{"torch_dtype", "dtype"} {
		raw, ok := g.get(key)
		if !ok {
			continue
		}
		n.dtype = key
		name, _ := text(raw)
		if dtypes[name] == "" {
			g.fail("%s is %s; known: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8; or give the KV's type with --dtype", key, show(raw))
		}
		return dtypes[name]
	}
	g.fail("torch_dtype is missing, and so is dtype; add one, or give the KV's type with --dtype")
	return ""
}

// rounded says that a quotient is rounded up, where it is.
func rounded(a, b uint64) string {
	if b == 0 || a%b == 0 {
		return ""
	}
	return ", rounded up"
}

func ceilDiv(a, b uint64) uint64 { return (a + b - 1) / b }

// valuesMax bounds the values of a recurrent state: a thousand times the 2^20 that models
// have.
const valuesMax = 1 << 30

// product multiplies, and stops at valuesMax.
func product(factors ...uint64) uint64 {
	p := uint64(1)
	for _, f := range factors {
		if f > 0 && p > valuesMax/f {
			return valuesMax
		}
		p *= f
	}
	return p
}
