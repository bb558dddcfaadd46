package hfconfig

import (
	"fmt"
	"slices"
	"strings"
)

// A kind is what a layer keeps.
type kind int

const (
	full kind = iota
	sliding
	chunked
	linear // a recurrent state of linear attention
	mamba  // one of a state-space layer
	conv   // the last inputs of a short convolution
	none   // nothing: no attention
)

// layerTypes are the words of layer_types.
var layerTypes = map[string]kind{
	"full_attention": full, "sliding_attention": sliding, "chunked_attention": chunked,
	"linear_attention": linear, "conv": conv,
}

func (k kind) String() string {
	return [...]string{"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba", "conv", "without attention"}[k]
}

// Layers say of each layer what it keeps.
type layers struct {
	count uint64
	kinds []kind
	// from is the key that said so, and what it said.
	from, said string
	// ratios are compress_ratios, when given.
	ratios []uint64
}

// defaultPatterns are the values of sliding_window_pattern that the configurations of these
// model types leave out, because their classes in the transformers library have them as
// defaults.
var defaultPatterns = map[string]uint64{"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}

// layers reads the kinds of all layers.
func (c *config) layers() layers {
	l := layers{count: c.must("num_hidden_layers", layersMax, "")}
	for _, read := range []func(*config, uint64) layers{
		(*config).byType, (*config).byLetter, (*config).byInterval, (*config).byChunkSize, (*config).byWindow,
	} {
		if c.err != nil {
			return l
		}
		o := read(c, l.count)
		if o.kinds == nil || c.err != nil {
			continue
		}
		if l.kinds == nil {
			l.kinds, l.from, l.said = o.kinds, o.from, o.said
			continue
		}
		for i, k := range o.kinds {
			if k != l.kinds[i] {
				c.fail("%s makes layer %d %s, and %s makes it %s; correct or remove one of the two", l.from, i, l.kinds[i], o.from, k)
			}
		}
	}
	if l.kinds == nil {
		l.kinds, l.from = make([]kind, l.count), "num_hidden_layers"
		l.said = "because no key says anything else"
	}
	l.ratios, _ = list[uint64](c, "compress_ratios", l.count, "integers of at least 0")
	for i, r := range l.ratios {
		switch {
		case r > ratioMax:
			c.fail("compress_ratios[%d] is %d; it must be 0 to %d", i, r, ratioMax)
		case r > 1 && l.kinds[i] != full:
			c.fail("compress_ratios[%d] is %d, and %s makes layer %d %s; only full attention is compressed, so give 0", i, r, l.from, i, l.kinds[i])
		}
	}
	return l
}

func (c *config) byType(count uint64) layers {
	words, ok := list[string](c, "layer_types", count, "words")
	if !ok {
		return layers{}
	}
	l := layers{from: "layer_types", said: "by layer_types"}
	for i, w := range words {
		k, ok := layerTypes[w]
		if !ok {
			c.fail("layer_types[%d] is %.60q; known: chunked_attention, conv, full_attention, linear_attention, sliding_attention; "+
				"for another kind write a deployment file and give its group a rule", i, w)
		}
		l.kinds = append(l.kinds, k)
	}
	return l
}

func (c *config) byLetter(count uint64) layers {
	raw, ok := c.get("hybrid_override_pattern")
	if !ok {
		return layers{}
	}
	letters, ok := text(raw)
	switch {
	case !ok:
		c.fail("hybrid_override_pattern is %s; it must be text of the letters M, *, - and E", show(raw))
	case uint64(len(letters)) != count:
		c.fail("hybrid_override_pattern has %d letters, and num_hidden_layers is %d; give one for each layer", len(letters), count)
	}
	l := layers{from: "hybrid_override_pattern", said: "by hybrid_override_pattern"}
	for i, b := range []byte(letters) {
		at := strings.IndexByte("M*-E", b)
		if at < 0 {
			c.fail("hybrid_override_pattern has %q at %d; known: M (Mamba), * (attention), - (MLP), E (experts)", b, i)
			return layers{}
		}
		l.kinds = append(l.kinds, [...]kind{mamba, full, none, none}[at])
	}
	return l
}

func (c *config) byInterval(count uint64) layers {
	if !c.has("full_attention_interval") {
		return layers{}
	}
	n := c.integer("full_attention_interval", 1, layersMax, 0)
	return every(n, count, linear, "full_attention_interval", fmt.Sprintf("by full_attention_interval %d", n))
}

// every makes each n-th layer full, and the others k.
func every(n, count uint64, k kind, from, said string) layers {
	l := layers{from: from, said: said}
	for i := range count {
		if n > 0 && (i+1)%n == 0 {
			l.kinds = append(l.kinds, full)
		} else {
			l.kinds = append(l.kinds, k)
		}
	}
	return l
}

// chunkedInterval: without no_rope_layers every 4th layer is full, as in Llama 4.
const chunkedInterval = 4

func (c *config) byChunkSize(count uint64) layers {
	if !c.has("attention_chunk_size") {
		return layers{}
	}
	if raw, ok := c.get("no_rope_layers"); !ok || show(raw) == "[]" {
		return every(chunkedInterval, count, chunked, "attention_chunk_size", "without no_rope_layers, where every 4th layer is full")
	}
	rope, ok := list[uint64](c, "no_rope_layers", count, "0 (full) and 1")
	if !ok {
		return layers{}
	}
	l := layers{from: "no_rope_layers", said: "by no_rope_layers (0 = full)"}
	for i, r := range rope {
		if r > 1 {
			c.fail("no_rope_layers[%d] is %d; it must be 0 (full attention) or 1 (chunked)", i, r)
			return layers{}
		}
		l.kinds = append(l.kinds, [...]kind{full, chunked}[r])
	}
	return l
}

// byWindow reads the keys around sliding_window. Alone it is no pattern where another key
// has one: there it is only the window's size.
func (c *config) byWindow(count uint64) layers {
	pattern := c.has("sliding_window_pattern")
	if !c.boolean("use_sliding_window", true) {
		return layers{}
	}
	if !c.has("sliding_window") {
		if pattern && !c.has("layer_types") {
			c.fail("sliding_window_pattern is given, and sliding_window is missing; add it, or remove the pattern")
		}
		return layers{}
	}
	switch {
	case pattern:
		n := c.integer("sliding_window_pattern", 1, layersMax, 0)
		return every(n, count, sliding, "sliding_window_pattern", fmt.Sprintf("by sliding_window_pattern %d", n))
	case slices.ContainsFunc([]string{"layer_types", "hybrid_override_pattern", "full_attention_interval", "attention_chunk_size"}, c.has):
		return layers{}
	case c.has("compress_ratios"):
		c.fail("sliding_window and compress_ratios are both given, and no layer_types: what a layer keeps that has both a window and compressed entries is not known here; " +
			"write a deployment file with a group for each")
		return layers{}
	case c.has("use_sliding_window") && c.has("max_window_layers"):
		below := c.integer("max_window_layers", 0, layersMax, 0)
		l := layers{from: "max_window_layers", said: fmt.Sprintf("by max_window_layers %d, below which they are full", below)}
		for i := range count {
			l.kinds = append(l.kinds, map[bool]kind{true: full, false: sliding}[i < below])
		}
		return l
	}
	if raw, ok := c.get("model_type"); ok {
		if name, _ := text(raw); defaultPatterns[name] > 0 {
			n := defaultPatterns[name]
			return every(n, count, sliding, "model_type", fmt.Sprintf("by model_type %s, of which one layer in %d is full", name, n))
		}
	}
	return every(0, count, sliding, "sliding_window", "because no key says that one is full")
}
