package deploy_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/deploy"
)

const stock = `
model: m
max_tokens: 1024
engine: vllm-0.30
engine_params: {promotion: pending}
groups:
  - {name: sliding, rule: window, params: {window: 64}, block_tokens: 16, chunk_blocks: 2, layers: 2, kv_heads: 4, head_dim: 8, dtype: bf16}
  - {name: full, rule: full, block_tokens: 32, chunk_blocks: 2, layers: 3, kv_heads: 4, head_dim: 8, dtype: fp32}
`

func TestStockEngine(t *testing.T) {
	zero, cap := uint64(0), uint64(48)
	for _, c := range []struct {
		params string
		want   deploy.StockEngine
	}{
		{"{promotion: pending}", deploy.StockEngine{Promotion: "pending", Policy: "chunk-level", PromptOnly: true, Retention: &zero}},
		{"{promotion: retry, policy: request-level, retention_interval: none, prompt_only: false, speculative: true, max_offload_tokens: 48, max_load_tokens: 0, turn_tokens: 48, shared_writes: true}",
			deploy.StockEngine{Promotion: "retry", Policy: "request-level", Speculative: true, MaxOffload: &cap, MaxLoad: &zero, TurnTokens: 48, SharedWrites: true}},
		{"{promotion: retry, retention_interval: 48}", deploy.StockEngine{Promotion: "retry", Policy: "chunk-level", PromptOnly: true, Retention: &cap}},
	} {
		d, err := deploy.Parse("d.yaml", []byte(strings.Replace(stock, "{promotion: pending}", c.params, 1)))
		require.NoError(t, err)
		require.True(t, d.IsStock())
		got, err := d.Stock()
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
}

func TestRefusedStockFiles(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"promotion: pending", "promotion: pendin", `d.yaml: engine_params.promotion is pendin; did you mean "pending"? it must be pending or retry`},
		{"promotion: pending", "policy: 3", "d.yaml: engine_params.policy is 3; it must be chunk-level or request-level"},
		{"promotion: pending", "promtion: pending", `d.yaml: engine_params has no key "promtion"; did you mean "promotion"? known: promotion, policy, retention_interval, prompt_only, speculative, max_offload_tokens, max_load_tokens, turn_tokens, shared_writes`},
		{"promotion: pending", "prompt_only: 1", "d.yaml: engine_params.prompt_only is 1; it must be true or false"},
		{"promotion: pending", "retention_interval: dense", "d.yaml: engine_params.retention_interval is dense; it must be a number of tokens, or the word none, 0 to 2147483648"},
		{"promotion: pending", "max_offload_tokens: -1", "d.yaml: engine_params.max_offload_tokens is -1; it must be a number of tokens, 0 to 2147483648"},
		{"0.30\nengine_params: {promotion: pending}", "0.27\nengine_params: {max_load_tokens: 5}", "d.yaml: engine_params.max_load_tokens is 5, but vllm-0.27 does not know it; remove it, or judge vllm-0.30"},
		{"engine:", "policies: [{rule: request-level}]\nengine:", `d.yaml: policies names "request-level", but vllm-0.30 runs no policy rules; remove policies, and say engine_params.policy: chunk-level (vLLM's default) or request-level`},
		{"engine:", "max_store_tokens: 5\nengine:", "d.yaml: max_store_tokens is 5, which engine tierd reads; vllm-0.30 caps by engine_params.max_offload_tokens"},
		{"engine:", "legs: [probe]\nengine:", "d.yaml: legs is [probe]; of vllm-0.30 leg pd is judged, in which a consumer takes every key for one that its producer has; in leg probe it asks first, so it waits for no key that is not there. Add pd to legs"},
		{"rule: full", "rule: ./mine.wasm#full", `d.yaml: group full: rule is "./mine.wasm#full", but vllm-0.30 has rules of its own and runs no others; name what the group's attention is: full, hidden, latent, window, chunked, state, sink, rswa`},
		{"block_tokens: 32, chunk_blocks: 2", "block_tokens: 32, chunk_blocks: 1", "d.yaml: group sliding has chunk_blocks 2, group full has 1; vLLM has one blocks_per_chunk for all groups, so give them the same"},
	} {
		_, err := deploy.Parse("d.yaml", []byte(strings.Replace(stock, c.old, c.new, 1)))
		require.EqualError(t, err, c.want)
	}
	d, err := deploy.Parse("d.yaml", []byte(strings.Replace(stock, "promotion: pending", "", 1)))
	require.NoError(t, err, "the command line may say it")
	_, err = d.Stock()
	require.ErrorContains(t, err, "engine_params.promotion is missing: say what a lookup answers")
}

func TestSetEngine(t *testing.T) {
	d, err := deploy.Parse("d.yaml", []byte(stock))
	require.NoError(t, err)
	before := d.Digest()
	require.NoError(t, d.SetEngine("vllm-0.27", map[string]any{"policy": "request-level"}))
	s, err := d.Stock()
	require.NoError(t, err)
	require.Equal(t, [2]string{"pending", "request-level"}, [2]string{s.Promotion, s.Policy}, "what the file says stays")
	require.NotEqual(t, before, d.Digest())
	after := d.Digest()
	require.EqualError(t, d.SetEngine("vllm-0.27", map[string]any{"max_load_tokens": 3}),
		"d.yaml, judged as engine vllm-0.27: engine_params.max_load_tokens is 3, but vllm-0.27 does not know it; remove it, or judge vllm-0.30")
	require.Equal(t, after, d.Digest(), "an error changes nothing")

	d, err = deploy.Parse("d.yaml", []byte(good))
	require.NoError(t, err)
	require.ErrorContains(t, d.SetEngine("vllm-0.30", nil), "set align_tokens to 0")
	require.Equal(t, "tierd", d.Engine)
}
