package hfconfig_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/hfconfig"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// golden holds text against a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func model(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "examples", "models", name+".json"))
	require.NoError(t, err)
	return b
}

// summary says the groups on one line each: name, rule, parameters, layers x heads x size.
func summary(d *deploy.Deployment) (lines []string) {
	for i := range d.Groups {
		g := &d.Groups[i]
		params := ""
		for k, v := range g.Params {
			params += fmt.Sprintf(" %s=%v", k, v)
		}
		lines = append(lines, fmt.Sprintf("%s: %s%s %dx%dx%d", g.Name, g.Rule, params, g.Layers, g.KVHeads, g.HeadDim))
	}
	return lines
}

// models are the published layouts of the files in examples/models: the groups, the longest
// prompt, and the bytes of 16 tokens of one layer (of a state: of one state of one layer).
var models = []struct {
	name   string
	groups []string
	tokens uint64
	bytes  []uint64
}{
	{"gpt-oss-120b", []string{"sliding: window window=128 18x8x64", "full: full 18x8x64"}, 131072, []uint64{32 << 10, 32 << 10}},
	{"gpt-oss-20b", []string{"sliding: window window=128 12x8x64", "full: full 12x8x64"}, 131072, []uint64{32 << 10, 32 << 10}},
	{"gemma-3-27b", []string{"sliding: window window=1024 52x16x128", "full: full 10x16x128"}, 131072, []uint64{128 << 10, 128 << 10}},
	{"gemma-2-9b", []string{"sliding: window window=4096 21x8x256", "full: full 21x8x256"}, 8192, []uint64{128 << 10, 128 << 10}},
	{"llama-4-scout", []string{"chunked: chunked attention_chunk=8192 36x8x128", "full: full 12x8x128"}, 10485760, []uint64{64 << 10, 64 << 10}},
	{"mistral-7b-v0.1", []string{"sliding: window window=4096 32x8x128"}, 32768, []uint64{64 << 10}},
	{"llama-3.1-8b", []string{"full: full 32x8x128"}, 131072, []uint64{64 << 10}},
	{"qwen3-next-80b", []string{"linear: state mode=align 36x1x2144", "full: full 12x2x256"}, 262144, []uint64{(32*128*128 + 3*(2*16*128+32*128)) * 2, 32 << 10}},
	{"deepseek-v3", []string{"latent: latent 61x1x288"}, 163840, []uint64{16 * 576 * 2}},
	{"qwen2.5-7b", []string{"full: full 28x4x128"}, 32768, []uint64{32 << 10}},
}

// TestModels derives every model of examples/models, with its golden file, and holds sizes
// against what is known of the model.
func TestModels(t *testing.T) {
	files, err := filepath.Glob("../../examples/models/*.json")
	require.NoError(t, err)
	require.Len(t, files, len(models)+2, "and two encoder-decoders")
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			o := hfconfig.Options{Model: m.name, BlockTokens: 16}
			d, err := hfconfig.Derive(m.name+".json", model(t, m.name), o)
			require.NoError(t, err)
			require.Equal(t, m.groups, summary(d.Deployment))
			require.Equal(t, m.tokens, d.Deployment.MaxTokens)
			require.EqualValues(t, 4096, d.Deployment.AlignTokens)
			for i, want := range m.bytes {
				g := &d.Deployment.Groups[i]
				blocks := g.BlockTokens / 16
				if g.Rule == "state" {
					blocks = 1
				}
				require.Equal(t, want, g.BlockBytes()/g.Layers/blocks, g.Name)
			}
			o.Draft = true
			o.Legs = []string{"pd"}
			with, err := hfconfig.Derive(m.name+".json", model(t, m.name), o)
			require.NoError(t, err)
			draft := with.Deployment.Groups[len(m.groups)]
			require.True(t, draft.Draft)
			require.EqualValues(t, 1, draft.Layers)
			require.Equal(t, d.Deployment.Groups, with.Deployment.Groups[:len(m.groups)])
			golden(t, m.name+".yaml", string(with.YAML()))
			for _, d := range []*hfconfig.Derived{d, with} {
				again, err := deploy.Parse("again.yaml", d.YAML())
				require.NoError(t, err)
				require.Equal(t, d.Deployment.Digest(), again.Digest())
			}
		})
	}
}

// TestPrintedAsChanged: what is set after deriving is in what is printed.
func TestPrintedAsChanged(t *testing.T) {
	_, err := hfconfig.Derive("m.json", model(t, "llama-3.1-8b"), hfconfig.Options{Model: "no: 'word'\u2028", BlockTokens: 32, ChunkBlocks: 4})
	require.ErrorContains(t, err, "printable")
	d, err := hfconfig.Derive("m\n.json", model(t, "llama-3.1-8b"), hfconfig.Options{Model: "no: 'word' <é>", BlockTokens: 32, ChunkBlocks: 4})
	require.NoError(t, err)
	d.Deployment.Engine = "vllm-0.30"
	d.Deployment.EngineParams = map[string]any{"promotion": "pending", "retention_interval": 64, "prompt_only": true}
	d.Deployment.MaxStoreTokens = 7
	d.Deployment.AlignTokens, d.Deployment.Policies = 0, nil
	text := string(d.YAML())
	require.True(t, strings.HasPrefix(text, "# Derived from m?.json by tierd check --model.\n"), text)
	require.Contains(t, text, "\nengine: vllm-0.30\nengine_params: {promotion: pending, prompt_only: true, retention_interval: 64}\n")
	require.Contains(t, text, "\nalign_tokens: 0\n")
	require.NotContains(t, text, "policies")
	require.Contains(t, text, "\nmax_store_tokens: 7\n")
	require.Contains(t, text, `model: "no: 'word' <é>"`)
}

// config is a small configuration with keys replaced or added; nil removes one.
func config(change map[string]any) []byte {
	keys := map[string]any{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
		"max_position_embeddings": 1000, "torch_dtype": "bfloat16"}
	for k, v := range change {
		keys[k] = v
	}
	var b []string
	for k, v := range keys {
		if v == nil {
			continue
		}
		if _, text := v.(string); !text {
			v = strings.NewReplacer(" ", ",").Replace(fmt.Sprintf("%v", v))
		} else if !strings.HasPrefix(v.(string), "{") && !strings.HasPrefix(v.(string), "[") && v != "null" {
			v = fmt.Sprintf("%q", v)
		}
		b = append(b, fmt.Sprintf("%q: %v", k, v))
	}
	return []byte("{" + strings.Join(b, ", ") + "}")
}

type keys = map[string]any

var (
	linearSizes = keys{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
	mambaSizes  = keys{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4}
)

func join(maps ...keys) keys {
	all := keys{}
	for _, m := range maps {
		for k, v := range m {
			all[k] = v
		}
	}
	return all
}

// TestKeys: each way to say what the layers are.
func TestKeys(t *testing.T) {
	const sf = `["sliding_attention", "full_attention", "full_attention", "sliding_attention"]`
	for _, c := range []struct {
		what string
		keys keys
		want []string
	}{
		{"no key", nil, []string{"full: full 4x2x16"}},
		{"a null is no value", keys{"sliding_window": "null", "layer_types": "null"}, []string{"full: full 4x2x16"}},
		{"nested", keys{"num_hidden_layers": nil, "num_attention_heads": nil, "num_key_value_heads": nil, "head_dim": nil,
			"text_config": `{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "is_encoder_decoder": false}`}, []string{"full: full 3x3x32"}},
		{"what is nested counts first", keys{"text_config": `{"num_hidden_layers": 3}`}, []string{"full: full 3x2x16"}},
		{"head size from the hidden size", keys{"head_dim": nil, "hidden_size": 192}, []string{"full: full 4x2x24"}},
		{"every head has its own KV", keys{"num_key_value_heads": nil}, []string{"full: full 4x8x16"}},
		{"layer_types", keys{"layer_types": sf, "sliding_window": 7}, []string{"sliding: window window=7 2x2x16", "full: full 2x2x16"}},
		{"layer_types and a chunk", keys{"layer_types": `["full_attention", "chunked_attention", "chunked_attention", "full_attention"]`, "attention_chunk_size": 9,
			"no_rope_layers": "[0, 1, 1, 0]"}, []string{"full: full 2x2x16", "chunked: chunked attention_chunk=9 2x2x16"}},
		{"layer_types and a window that no layer has", keys{"layer_types": `["full_attention", "full_attention", "full_attention", "full_attention"]`, "sliding_window": 7}, []string{"full: full 4x2x16"}},
		{"a window is for all", keys{"sliding_window": 7}, []string{"sliding: window window=7 4x2x16"}},
		{"a window that is not used", keys{"sliding_window": 7, "use_sliding_window": false, "sliding_window_pattern": 2, "max_window_layers": 1}, []string{"full: full 4x2x16"}},
		{"a pattern", keys{"sliding_window": 7, "sliding_window_pattern": 2}, []string{"sliding: window window=7 2x2x16", "full: full 2x2x16"}},
		{"a pattern longer than the model", keys{"sliding_window": 7, "sliding_window_pattern": 6}, []string{"sliding: window window=7 4x2x16"}},
		{"a pattern of one is no window", keys{"sliding_window": 7, "sliding_window_pattern": 1}, []string{"full: full 4x2x16"}},
		{"the pattern of the model's type", keys{"sliding_window": 7, "model_type": "gemma2"}, []string{"sliding: window window=7 2x2x16", "full: full 2x2x16"}},
		{"full below max_window_layers", keys{"sliding_window": 7, "use_sliding_window": true, "max_window_layers": 3}, []string{"full: full 3x2x16", "sliding: window window=7 1x2x16"}},
		{"max_window_layers without a switch", keys{"sliding_window": 7, "max_window_layers": 3}, []string{"sliding: window window=7 4x2x16"}},
		{"chunks", keys{"attention_chunk_size": 9}, []string{"chunked: chunked attention_chunk=9 3x2x16", "full: full 1x2x16"}},
		{"chunks, with an empty list", keys{"attention_chunk_size": 9, "no_rope_layers": "[ ]"}, []string{"chunked: chunked attention_chunk=9 3x2x16", "full: full 1x2x16"}},
		{"chunks where there is a rotation", keys{"attention_chunk_size": 9, "no_rope_layers": "[0, 1, 0, 1]"}, []string{"full: full 2x2x16", "chunked: chunked attention_chunk=9 2x2x16"}},
		{"no_rope_layers of a model without chunks", keys{"no_rope_layers": "[0, 1, 0, 1]"}, []string{"full: full 4x2x16"}},
		{"an interval", join(keys{"full_attention_interval": 2}, linearSizes), []string{"linear: state mode=align 2x1x2", "full: full 2x2x16"}},
		{"an interval and a list that says the same", join(keys{"full_attention_interval": 2,
			"layer_types": `["linear_attention", "full_attention", "linear_attention", "full_attention"]`}, linearSizes), []string{"linear: state mode=align 2x1x2", "full: full 2x2x16"}},
		{"letters", join(keys{"hybrid_override_pattern": "M-*M"}, mambaSizes), []string{"mamba: state mode=align 2x1x4", "full: full 1x2x16"}},
		{"letters with experts", join(keys{"hybrid_override_pattern": "ME*E"}, mambaSizes), []string{"mamba: state mode=align 1x1x4", "full: full 1x2x16"}},
		{"convolutions", keys{"layer_types": `["conv", "conv", "full_attention", "conv"]`, "conv_L_cache": 3, "hidden_size": 257}, []string{"conv: state mode=align 3x1x3", "full: full 1x2x16"}},
		{"latents", keys{"kv_lora_rank": 100, "qk_rope_head_dim": 28}, []string{"latent: latent 4x1x64"}},
		{"latents of an odd size", keys{"kv_lora_rank": 100, "qk_rope_head_dim": 27}, []string{"latent: latent 4x1x64"}},
		{"latents, compressed", keys{"kv_lora_rank": 100, "qk_rope_head_dim": 28, "compress_ratios": "[0, 4, 1, 128]"},
			[]string{"latent: latent 2x1x64", "latent-4: latent compress_ratio=4 1x1x16", "latent-128: latent compress_ratio=128 1x1x1"}},
		{"heads, compressed", keys{"compress_ratios": "[0, 4, 4, 0]"}, []string{"full: full 2x2x16", "latent-4: latent compress_ratio=4 2x2x4"}},
		{"fp8", keys{"torch_dtype": nil, "dtype": "float8_e4m3fn"}, []string{"full: full 4x2x16"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			d, err := hfconfig.Derive("config.json", config(c.keys), hfconfig.Options{Model: "m", BlockTokens: 16})
			require.NoError(t, err)
			require.Equal(t, c.want, summary(d.Deployment))
			again, err := deploy.Parse("again.yaml", d.YAML())
			require.NoError(t, err)
			require.Equal(t, d.Deployment.Digest(), again.Digest(), string(d.YAML()))
		})
	}
}

// TestDraftGeometry: the head has the full attention's size, or that of what there is.
func TestDraftGeometry(t *testing.T) {
	for _, c := range []struct {
		keys keys
		want string
	}{
		{nil, "draft: full 1x2x16"},
		{keys{"sliding_window": 7}, "draft: full 1x2x16"},
		{keys{"attention_chunk_size": 7, "kv_lora_rank": 100, "qk_rope_head_dim": 28}, "draft: latent 1x1x64"},
		{keys{"compress_ratios": "[4, 4, 4, 0]"}, "draft: full 1x2x16"},
	} {
		d, err := hfconfig.Derive("config.json", config(c.keys), hfconfig.Options{Model: "m", BlockTokens: 16, Draft: true})
		require.NoError(t, err)
		s := summary(d.Deployment)
		require.Equal(t, c.want, s[len(s)-1])
	}
}

// TestOptions: what the configuration does not say.
func TestOptions(t *testing.T) {
	zero, some := uint64(0), uint64(480)
	derive := func(o hfconfig.Options) *deploy.Deployment {
		t.Helper()
		o.Model, o.BlockTokens = "m", 16
		d, err := hfconfig.Derive("config.json", config(nil), o)
		require.NoError(t, err)
		return d.Deployment
	}
	require.EqualValues(t, 4096, derive(hfconfig.Options{}).AlignTokens)
	require.EqualValues(t, 4128, derive(hfconfig.Options{ChunkBlocks: 3}).AlignTokens, "the first multiple of 48 from 4096 on")
	require.EqualValues(t, 16000, derive(hfconfig.Options{ChunkBlocks: 1000}).AlignTokens)
	require.Zero(t, derive(hfconfig.Options{AlignTokens: &zero}).AlignTokens)
	require.EqualValues(t, 480, derive(hfconfig.Options{ChunkBlocks: 3, AlignTokens: &some}).AlignTokens)
	require.EqualValues(t, 1000, derive(hfconfig.Options{}).MaxTokens)
	require.EqualValues(t, 2000, derive(hfconfig.Options{MaxTokens: 2000}).MaxTokens)
	require.Equal(t, "fp8", derive(hfconfig.Options{DType: "fp8"}).Groups[0].DType)
	require.Equal(t, []string{"probe"}, derive(hfconfig.Options{Legs: []string{"probe"}}).Legs)
}

// TestRefusals holds the messages of what cannot be derived against a golden file.
func TestRefusals(t *testing.T) {
	four := func(word string) string {
		return `["full_attention", "` + word + `", "full_attention", "full_attention"]`
	}
	align := uint64(100)
	ok := hfconfig.Options{Model: "m", BlockTokens: 16}
	var got strings.Builder
	for _, c := range []struct {
		what string
		data []byte
		o    hfconfig.Options
	}{
		{"an empty file", nil, ok},
		{"no JSON", []byte("model: m"), ok},
		{"a list", []byte("[1]"), ok},
		{"null", []byte("null"), ok},
		{"text_config is text", config(keys{"text_config": "x"}), ok},
		{"T5", model(t, "t5-small"), ok},
		{"Whisper", model(t, "whisper-large-v3"), ok},
		{"an encoder around a decoder", config(keys{"is_encoder_decoder": true, "text_config": `{"is_encoder_decoder": false}`}), ok},
		{"is_encoder_decoder is a number", config(keys{"is_encoder_decoder": 1}), ok},
		{"no layers", config(keys{"num_hidden_layers": nil}), ok},
		{"the language model is elsewhere", config(keys{"num_hidden_layers": nil, "llm_config": `{"num_hidden_layers": 2}`}), ok},
		{"no layers at all", config(keys{"num_hidden_layers": 0}), ok},
		{"too many layers", config(keys{"num_hidden_layers": 1000000000}), ok},
		{"layers are text", []byte(`{"num_hidden_layers": "x\u0007` + "\u2028" + `y"}`), ok},
		{"layers are no integer", config(keys{"num_hidden_layers": 1.5}), ok},
		{"layer_types is too short", config(keys{"layer_types": `["full_attention"]`}), ok},
		{"layer_types is text", config(keys{"layer_types": "full_attention"}), ok},
		{"an unknown layer type", config(keys{"layer_types": four("ring_attention")}), ok},
		{"a sliding layer without a window", config(keys{"layer_types": four("sliding_attention")}), ok},
		{"a sliding layer, and no window is used", config(keys{"layer_types": four("sliding_attention"), "sliding_window": 7, "use_sliding_window": false}), ok},
		{"a chunked layer without a size", config(keys{"layer_types": four("chunked_attention")}), ok},
		{"layer_types against a pattern", config(keys{"layer_types": four("sliding_attention"), "sliding_window": 7, "sliding_window_pattern": 2}), ok},
		{"layer_types against an interval", config(keys{"layer_types": four("linear_attention"), "full_attention_interval": 2}), ok},
		{"a window of 0", config(keys{"sliding_window": 0}), ok},
		{"a window of many", config(keys{"sliding_window": 1 << 24, "max_position_embeddings": 1, "x": 1}), hfconfig.Options{Model: "m", BlockTokens: 16, MaxTokens: 1 << 40}},
		{"a window of too many", config(keys{"sliding_window": 1<<24 + 1}), ok},
		{"a pattern without a window", config(keys{"sliding_window_pattern": 2}), ok},
		{"a pattern of 0", config(keys{"sliding_window": 7, "sliding_window_pattern": 0}), ok},
		{"use_sliding_window is text", config(keys{"sliding_window": 7, "use_sliding_window": "no"}), ok},
		{"no_rope_layers has another number", config(keys{"attention_chunk_size": 9, "no_rope_layers": "[0, 1, 2, 0]"}), ok},
		{"no_rope_layers is too long", config(keys{"attention_chunk_size": 9, "no_rope_layers": "[0, 1, 1, 1, 0]"}), ok},
		{"an unknown letter", config(keys{"hybrid_override_pattern": "M*-x"}), ok},
		{"a letter too many", config(keys{"hybrid_override_pattern": "M*-M*"}), ok},
		{"letters as a list", config(keys{"hybrid_override_pattern": "[1]"}), ok},
		{"nothing kept", config(keys{"hybrid_override_pattern": "----"}), ok},
		{"a state without sizes", config(keys{"full_attention_interval": 2}), ok},
		{"a state-space layer without sizes", config(keys{"hybrid_override_pattern": "MMM*"}), ok},
		{"a convolution over one token", config(keys{"layer_types": four("conv"), "conv_L_cache": 1, "hidden_size": 8}), ok},
		{"a huge state", config(join(keys{"full_attention_interval": 2}, linearSizes, keys{"linear_num_value_heads": 65536, "linear_key_head_dim": 65536, "linear_value_head_dim": 65536})), ok},
		{"a latent without its rotary part", config(keys{"kv_lora_rank": 512}), ok},
		{"too few ratios", config(keys{"compress_ratios": "[0]"}), ok},
		{"a negative ratio", config(keys{"compress_ratios": "[0, -1, 0, 0]"}), ok},
		{"a ratio of many", config(keys{"compress_ratios": "[0, 65537, 0, 0]"}), ok},
		{"a ratio of a window", config(keys{"sliding_window": 7, "sliding_window_pattern": 2, "compress_ratios": "[4, 0, 0, 0]"}), ok},
		{"a window and ratios", config(keys{"sliding_window": 7, "compress_ratios": "[4, 0, 0, 0]"}), ok},
		{"a ratio that a chunk does not hold", config(keys{"compress_ratios": "[0, 256, 0, 0]"}), ok},
		{"no heads", config(keys{"num_attention_heads": nil, "num_key_value_heads": nil}), ok},
		{"heads that do not divide", config(keys{"num_key_value_heads": 3}), ok},
		{"heads as a list", config(keys{"num_key_value_heads": "[2, 2, 2, 2]"}), ok},
		{"no head size", config(keys{"head_dim": nil}), ok},
		{"a head size that does not divide", config(keys{"head_dim": nil, "hidden_size": 100}), ok},
		{"no data type", config(keys{"torch_dtype": nil}), ok},
		{"an unknown data type", config(keys{"torch_dtype": "float4"}), ok},
		{"no longest prompt", config(keys{"max_position_embeddings": nil}), ok},
		{"no block", config(nil), hfconfig.Options{Model: "m"}},
		{"a block of many", config(nil), hfconfig.Options{Model: "m", BlockTokens: 65537}},
		{"a chunk of many", config(nil), hfconfig.Options{Model: "m", BlockTokens: 16, ChunkBlocks: 65537}},
		{"an alignment inside a chunk", config(nil), hfconfig.Options{Model: "m", BlockTokens: 16, AlignTokens: &align}},
		{"an unknown type asked for", config(nil), hfconfig.Options{Model: "m", BlockTokens: 16, DType: "bf17"}},
		{"an unknown leg", config(nil), hfconfig.Options{Model: "m", BlockTokens: 16, Legs: []string{"pf"}}},
		{"a draft of states", config(join(keys{"hybrid_override_pattern": "MMMM"}, mambaSizes)), hfconfig.Options{Model: "m", BlockTokens: 16, Draft: true}},
	} {
		_, err := hfconfig.Derive("config.json", c.data, c.o)
		require.Error(t, err, c.what)
		fmt.Fprintf(&got, "%s\n  %v\n", c.what, err)
	}
	golden(t, "refusals.txt", got.String())
	for _, name := range []string{"t5-small", "whisper-large-v3"} {
		_, err := hfconfig.Derive("config.json", model(t, name), ok)
		require.ErrorIs(t, err, hfconfig.ErrNotPrefixCacheable)
	}
}

// TestLimits: each limit lets its value pass, and not one more.
func TestLimits(t *testing.T) {
	o := hfconfig.Options{Model: "m", BlockTokens: 16}
	derive := func(change keys, o hfconfig.Options) error {
		_, err := hfconfig.Derive("config.json", config(change), o)
		return err
	}
	require.NoError(t, derive(keys{"num_hidden_layers": 1024}, o))
	require.ErrorContains(t, derive(keys{"num_hidden_layers": 1025}, o), "1 to 1024")
	require.NoError(t, derive(keys{"sliding_window": 1 << 24}, o))
	require.NoError(t, derive(keys{"head_dim": nil, "hidden_size": 1 << 16}, o))
	require.ErrorContains(t, derive(keys{"head_dim": 65537}, o), "1 to 65536")
	require.ErrorContains(t, derive(keys{"head_dim": nil, "hidden_size": 1<<20 + 1}, o), "1 to 1048576")
	data := config(nil)
	padded := append(data, strings.Repeat(" ", hfconfig.FileBytesMax-len(data))...)
	_, err := hfconfig.Derive("config.json", padded, o)
	require.NoError(t, err)
	_, err = hfconfig.Derive("config.json", append(padded, ' '), o)
	require.EqualError(t, err, "config.json: more than 1048576 bytes; a model's configuration has some thousand")
	require.ErrorContains(t, derive(keys{"max_position_embeddings": 1<<30 + 1}, o), "1 to 1073741824")
}

// FuzzDerive: no configuration makes it fail without a message, and what is derived is a
// deployment that is printed as it is.
func FuzzDerive(f *testing.F) {
	files, err := filepath.Glob("../../examples/models/*.json")
	require.NoError(f, err)
	for _, file := range files {
		b, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(b, uint64(16), uint64(8), true, "m")
	}
	f.Add(config(join(keys{"hybrid_override_pattern": "M-*E"}, mambaSizes)), uint64(1), uint64(1), true, "a.b-c_d")
	f.Add(config(keys{"layer_types": `["conv", "conv", "full_attention", "conv"]`, "conv_L_cache": 3, "hidden_size": 257}), uint64(1<<16), uint64(1<<16), false, "no")
	f.Add(config(keys{"compress_ratios": "[0, 4, 4, 0]"}), uint64(3), uint64(4), true, "1e5")
	f.Add([]byte(`{"num_hidden_layers": 18446744073709551615, "text_config": {}}`), uint64(1), uint64(0), false, "x: y")
	f.Fuzz(func(t *testing.T, data []byte, block, chunk uint64, draft bool, name string) {
		d, err := hfconfig.Derive("config.json", data, hfconfig.Options{Model: name, BlockTokens: block, ChunkBlocks: chunk, Draft: draft})
		if err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		require.LessOrEqual(t, len(d.Deployment.Groups), 65)
		again, err := deploy.Parse("again.yaml", d.YAML())
		require.NoError(t, err, string(d.YAML()))
		require.Equal(t, d.Deployment.Digest(), again.Digest())
	})
}
