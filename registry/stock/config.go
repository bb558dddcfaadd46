package stock

import (
	"fmt"
	"maps"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/vllm"
)

// kinds are vLLM's kinds by the rule that a deployment file names.
var kinds = map[string]vllm.Kind{
	"full": vllm.Full, "hidden": vllm.HiddenState, "latent": vllm.MLA, "window": vllm.SlidingWindow,
	"chunked": vllm.ChunkedLocal, "state": vllm.Mamba, "sink": vllm.Sink, "rswa": vllm.RSWA,
}

// Config returns the configuration of vLLM's rules that a deployment names. A group's
// parameters are read as those of tierd's own rule of that name, with one mode more: a
// state may be of mode none.
func Config(d *deploy.Deployment) (vllm.Config, error) {
	if !d.IsStock() {
		return vllm.Config{}, fmt.Errorf("%s: engine is %s, whose rules package registry judges", d.File(), d.Engine)
	}
	s, err := d.Stock()
	if err != nil {
		return vllm.Config{}, fmt.Errorf("%s: %w", d.File(), err)
	}
	rev, err := vllm.ParseRevision(d.Engine)
	if err != nil {
		return vllm.Config{}, fmt.Errorf("%s: %w", d.File(), err)
	}
	c := vllm.Defaults(rev)
	if c.Promotion, err = vllm.ParsePromotion(s.Promotion); err != nil {
		return c, err
	}
	if c.Policy, err = vllm.ParsePolicy(s.Policy); err != nil {
		return c, err
	}
	c.RetentionTokens = optional(s.Retention)
	c.PromptOnly, c.Speculative = s.PromptOnly, s.Speculative
	c.BlocksPerChunk = d.Groups[0].ChunkBlocks
	for i := range d.Groups {
		g, err := group(&d.Groups[i])
		if err != nil {
			return c, fmt.Errorf("%s: %w", d.File(), err)
		}
		c.Groups = append(c.Groups, g)
	}
	if err := c.Validate(); err != nil {
		return c, fmt.Errorf("%s: %w", d.File(), err)
	}
	return c, nil
}

func optional(n *uint64) vllm.Optional {
	if n == nil {
		return vllm.Optional{}
	}
	return vllm.Some(*n)
}

func group(d *deploy.Group) (vllm.Group, error) {
	g := vllm.Group{Kind: kinds[d.Rule], BlockTokens: d.BlockTokens, Eagle: d.Draft}
	at := "group " + d.Name
	given := maps.Clone(d.Params)
	none := g.Kind == vllm.Mamba && given["mode"] == vllm.MambaNone.String()
	if none {
		delete(given, "mode")
	}
	m := manifest(d.Rule)
	values, err := deploy.Values(at, m, given)
	if err != nil {
		return g, err
	}
	param := func(name string) uint64 { return values[m.Param(name)] }
	switch {
	case none:
	case g.Kind == vllm.SlidingWindow:
		g.WindowTokens, g.ExtraTokens = param("window"), param("extra")
	case g.Kind == vllm.ChunkedLocal:
		g.WindowTokens = param("attention_chunk")
	case g.Kind == vllm.Mamba:
		g.Mode, err = vllm.ParseMambaMode(m.Params[m.Param("mode")].Enum[param("mode")])
	}
	return g, err
}

// manifest returns the manifest of tierd's own rule of a name that deploy knows.
func manifest(rule string) *abi.Manifest {
	for _, s := range specs.All() {
		if m := s.Manifest(); m.Name == rule {
			return m
		}
	}
	panic("stock: no rule is named " + rule)
}
