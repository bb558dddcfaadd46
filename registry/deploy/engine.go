package deploy

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
)

// EngineTierd is the engine that the daemon serves. Stock engines are only judged.
const EngineTierd = "tierd"

// Engines whose semantics can be judged: tierd's own, and two releases of stock vLLM.
var Engines = []string{EngineTierd, "vllm-0.27", "vllm-0.30"}

// StockRules are the rules that a group of a stock engine may name. Each is one kind of
// vLLM's own KV cache groups; the file's other words keep their meaning.
var StockRules = []string{"full", "hidden", "latent", "window", "chunked", "state", "sink", "rswa"}

// A StockEngine is what engine and engine_params of a deployment say of a stock vLLM.
// Absent keys have the value of an engine that nobody configured.
type StockEngine struct {
	// Promotion is what a lookup answers when it has just started to copy a key from a
	// peer: pending or retry. It changes what is asked for, so it has no default; ""
	// means that the file does not say.
	Promotion string
	// Policy is chunk-level, vLLM's default, or request-level.
	Policy string
	// Retention is prefix_cache_retention_interval in tokens; nil = none, every aligned
	// tail is kept. The default is 0, the tail at the prompt's end alone.
	Retention *uint64
	// PromptOnly is offload_prompt_only.
	PromptOnly bool
	// Speculative says that the engine decodes with EAGLE or MTP though no group is
	// marked with draft.
	Speculative bool
	// MaxOffload is max_offload_tokens, which requests give their producer; MaxLoad is
	// max_load_tokens, which they give their consumer; nil = none.
	MaxOffload, MaxLoad *uint64
	// TurnTokens is by how much a consumer's request may be longer than the prompt that
	// its producer got, as in the next turn of a conversation; 0 = they are the same.
	TurnTokens uint64
	// SharedWrites says that two requests with one prefix may be stored at the same
	// time, so that a producer finds its primary writing keys for another one.
	SharedWrites bool
}

// retentionNone is the word for no retention interval.
const retentionNone = "none"

// IsStock reports whether the deployment is of a stock engine: one that tierd judges and
// does not serve.
func (d *Deployment) IsStock() bool { return d.Engine != EngineTierd }

// SetEngine judges the deployment as if its file named another engine, and gave these
// engine_params instead of its own where both name one. Parameters that the file gives
// stay, so that two releases can be compared.
func (d *Deployment) SetEngine(engine string, params map[string]any) error {
	was := *d
	if engine != "" {
		d.Engine = engine
	}
	all := map[string]any{}
	maps.Copy(all, d.EngineParams)
	maps.Copy(all, params)
	if d.EngineParams = all; len(all) == 0 {
		d.EngineParams = nil
	}
	if err := d.validate(); err != nil {
		*d = was
		return fmt.Errorf("%s, judged as engine %s: %w", d.file, engine, err)
	}
	return nil
}

// Stock returns what a deployment says of its stock engine. Promotion is required here.
func (d *Deployment) Stock() (StockEngine, error) {
	s, err := d.stock()
	if err == nil && s.Promotion == "" {
		err = fmt.Errorf("engine_params.promotion is missing: say what a lookup answers when it has just started to copy a key from a peer, because that decides how far a window's scan walks; retry in vLLM v0.27.1 and before, pending in its main branch since 2026-08-12 and in 0.30 (tierd check --promotion retry|pending)")
	}
	return s, err
}

// stock reads engine_params, in which promotion may be missing: the command line can say
// it.
func (d *Deployment) stock() (s StockEngine, err error) {
	s = StockEngine{Policy: "chunk-level", PromptOnly: true, Retention: new(uint64)}
	p := params{d.EngineParams, "engine_params"}
	known := []string{"promotion", "policy", "retention_interval", "prompt_only", "speculative", "max_offload_tokens", "max_load_tokens", "turn_tokens", "shared_writes"}
	for _, k := range slices.Sorted(maps.Keys(d.EngineParams)) {
		if !slices.Contains(known, k) {
			return s, fmt.Errorf("engine_params has no key %q%s known: %s", k, strictyaml.DidYouMean(k, known), strings.Join(known, ", "))
		}
	}
	if s.Promotion, err = p.word("promotion", "", "pending", "retry"); err != nil {
		return s, err
	}
	if s.Policy, err = p.word("policy", s.Policy, "chunk-level", "request-level"); err != nil {
		return s, err
	}
	if s.PromptOnly, err = p.truth("prompt_only", true); err != nil {
		return s, err
	}
	if s.Speculative, err = p.truth("speculative", false); err != nil {
		return s, err
	}
	if s.SharedWrites, err = p.truth("shared_writes", false); err != nil {
		return s, err
	}
	if v, ok := d.EngineParams["retention_interval"]; ok && v == retentionNone {
		s.Retention = nil
	} else if ok {
		if s.Retention, err = p.tokens("retention_interval", " of tokens, or the word none"); err != nil {
			return s, err
		}
	}
	if s.MaxOffload, err = p.tokens("max_offload_tokens", " of tokens"); err != nil {
		return s, err
	}
	if s.MaxLoad, err = p.tokens("max_load_tokens", " of tokens"); err != nil {
		return s, err
	}
	if s.MaxLoad != nil && d.Engine == "vllm-0.27" {
		return s, fmt.Errorf("engine_params.max_load_tokens is %d, but vllm-0.27 does not know it; remove it, or judge vllm-0.30", *s.MaxLoad)
	}
	turn, err := p.tokens("turn_tokens", " of tokens")
	if turn != nil {
		s.TurnTokens = *turn
	}
	return s, err
}

// params is a map of a file with its name, for messages.
type params struct {
	given map[string]any
	name  string
}

func (p params) word(key, silent string, known ...string) (string, error) {
	v, ok := p.given[key]
	if !ok {
		return silent, nil
	}
	s, text := v.(string)
	if !text || !slices.Contains(known, s) {
		return "", fmt.Errorf("%s.%s is %v%s it must be %s", p.name, key, v, strictyaml.DidYouMean(fmt.Sprint(v), known), strings.Join(known, " or "))
	}
	return s, nil
}

func (p params) truth(key string, silent bool) (bool, error) {
	v, ok := p.given[key]
	if !ok {
		return silent, nil
	}
	b, is := v.(bool)
	if !is {
		return false, fmt.Errorf("%s.%s is %v; it must be true or false", p.name, key, v)
	}
	return b, nil
}

// tokens returns a number of tokens, or nil when the file is silent.
func (p params) tokens(key, what string) (*uint64, error) {
	v, ok := p.given[key]
	if !ok {
		return nil, nil
	}
	n, is := v.(int)
	if !is || n < 0 || n > abi.MaxTokens {
		return nil, fmt.Errorf("%s.%s is %v; it must be a number%s, 0 to %d", p.name, key, v, what, uint64(abi.MaxTokens))
	}
	u := uint64(n)
	return &u, nil
}

// validateEngine reports what a deployment of its engine may not say.
func (d *Deployment) validateEngine() error {
	switch {
	case !slices.Contains(Engines, d.Engine):
		return fmt.Errorf("engine is %q%s known: %s", d.Engine, strictyaml.DidYouMean(d.Engine, Engines), strings.Join(Engines, ", "))
	case !d.IsStock() && len(d.EngineParams) > 0:
		return fmt.Errorf("engine_params are given, but engine tierd takes none; remove them")
	case !d.IsStock():
		return nil
	case d.AlignTokens != 0:
		return fmt.Errorf("align_tokens is %d, but %s knows no such distance: it keeps the tails that its retention_interval and its full chunks name; set align_tokens to 0", d.AlignTokens, d.Engine)
	case d.MaxStoreTokens != 0:
		return fmt.Errorf("max_store_tokens is %d, which engine tierd reads; %s caps by engine_params.max_offload_tokens", d.MaxStoreTokens, d.Engine)
	case len(d.Policies) > 0:
		return fmt.Errorf("policies names %q, but %s runs no policy rules; remove policies, and say engine_params.policy: chunk-level (vLLM's default) or request-level", d.Policies[0].Rule, d.Engine)
	}
	for i := range d.Groups {
		g := &d.Groups[i]
		if !slices.Contains(StockRules, g.Rule) {
			return fmt.Errorf("group %s: rule is %q, but %s has rules of its own and runs no others%s name what the group's attention is: %s", g.Name, g.Rule, d.Engine, strictyaml.DidYouMean(g.Rule, StockRules), strings.Join(StockRules, ", "))
		}
		if first := &d.Groups[0]; g.ChunkBlocks != first.ChunkBlocks {
			return fmt.Errorf("group %s has chunk_blocks %d, group %s has %d; vLLM has one blocks_per_chunk for all groups, so give them the same", first.Name, first.ChunkBlocks, g.Name, g.ChunkBlocks)
		}
	}
	if !slices.Contains(d.Legs, "pd") {
		return fmt.Errorf("legs is %v; of %s leg pd is judged, in which a consumer takes every key for one that its producer has; in leg probe it asks first, so it waits for no key that is not there. Add pd to legs", d.Legs, d.Engine)
	}
	_, err := d.stock()
	return err
}
