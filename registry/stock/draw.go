package stock

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs/vllm"
)

// This file turns a failing meeting into a counterexample that draws itself.

// why says in a sentence what a missing chunk means, per relation.
var why = map[string]string{
	"covers":   "the consumer demands chunks that the producer never supplies",
	"schedule": "the consumer demands chunks that a producer which computes in these steps never supplies",
	"warm":     "the consumer demands chunks that a producer which already holds a prefix never supplies",
	"cascade":  "the consumer demands chunks that the producer drops for good, because another request is writing them",
	"caps":     "the consumer demands chunks beyond a limit that one side alone knows",
}

func (r *run) missing(m *meeting, g int) *check.Counterexample {
	ce := r.begin(m, m.relation(), why[m.relation()])
	missing := make([]abi.Bitmap, len(m.supply))
	for i := range missing {
		missing[i] = slices.Clone(m.demand.Groups[i])
		missing[i].AndNot(m.supply[i])
	}
	r.rows(ce, g, set{"supply", m.supply}, set{"demand", m.demand.Groups}, set{"missing", missing})
	if r.producer == r.consumer { // else it is a pair, in which each side has settings of its own
		holds := r.holdsWith(m)
		if len(holds) == 0 {
			holds = []string{"no other value of one setting alone"}
		}
		ce.Facts = append(ce.Facts, check.Fact{Name: "this case holds with", Value: strings.Join(holds, "; or ")})
	}
	return ce
}

func (r *run) unready(m *meeting, g int) *check.Counterexample {
	ce := r.begin(m, "needs", "a hit loads chunks that no scan looked up, and the engine ends with an assertion")
	r.rows(ce, g, set{"demand", m.demand.Groups}, set{"need", m.demand.Loaded}, set{"missing", m.demand.Unready})
	return ce
}

func (r *run) wide(m *meeting, g int, round []abi.Bitmap, limit int) *check.Counterexample {
	ce := r.begin(m, "states", fmt.Sprintf("one fetch asks for %d chunks of a window of which a hit reads at most %d: promotions answer %s, so the scan walks on", round[g].Count(), limit, r.consumer.rules.Config().Promotion))
	surplus := make([]abi.Bitmap, len(round))
	surplus[g] = slices.Clone(round[g])
	surplus[g].AndNot(m.demand.Loaded[g])
	r.rows(ce, g, set{"demand", round}, set{"need", m.demand.Loaded}, set{"surplus", surplus})
	return ce
}

// begin fills in the facts of the case.
func (r *run) begin(m *meeting, relation, why string) *check.Counterexample {
	p, c := &m.producer.Case, &m.consumer.Ask
	ce := &check.Counterexample{
		Relation: relation, Why: why, PromptTokens: c.TextTokens, LocalTokens: c.LocalTokens,
		GPUTokens: p.Warm.GPUTokens, StepTokens: p.StepTokens,
	}
	if m.demand.Tokens > 0 {
		ce.ResumeTokens = c.LocalTokens + m.demand.Tokens
	}
	if p.PromptTokens != 0 && p.PromptTokens != c.TextTokens {
		ce.ProducerTokens = p.PromptTokens
	}
	if c.MaxLoadTokens.Set {
		ce.LoadCapTokens = c.MaxLoadTokens.Tokens
	}
	if r.name != "" {
		ce.Facts = append(ce.Facts, check.Fact{Name: "direction", Value: r.name})
	}
	if l := p.Warm.LoadedTokens; l > 0 {
		ce.Facts = append(ce.Facts, check.Fact{Name: "loaded by the producer", Value: fmt.Sprintf("%d tokens", l)})
	}
	ce.Facts = append(ce.Facts, m.producer.facts...)
	ce.Facts = append(ce.Facts, m.consumer.facts...)
	cfg := r.producer.rules.Config()
	if relation == "warm" {
		ce.Facts = append(ce.Facts, check.Fact{Name: "policy", Value: cfg.Policy.String()})
	}
	ce.Facts = append(ce.Facts, check.Fact{Name: "a promotion answers", Value: r.consumer.rules.Config().Promotion.String()})
	return ce
}

// A set is a named set per group.
type set struct {
	name string
	sets []abi.Bitmap
}

func (r *run) rows(ce *check.Counterexample, g int, sets ...set) {
	groups := make([]check.GroupRows, len(r.producer.groups))
	for i := range groups {
		groups[i].Name, groups[i].ChunkTokens = r.producer.groups[i], r.producer.rules.ChunkTokens(i)
		for _, s := range sets {
			marks := s.name == "missing" || s.name == "surplus"
			if !marks || s.sets[i] != nil && !s.sets[i].Empty() {
				groups[i].Rows = append(groups[i].Rows, check.RowOfRanges{Name: s.name, Chunks: check.RangesOf(s.sets[i])})
			}
		}
	}
	ce.SetRows(groups, g)
}

// holdsWith tries the failing case with one setting changed, on both sides, and returns
// the changes under which nothing is missing in it. Other cases may fail all the same.
func (r *run) holdsWith(m *meeting) (changes []string) {
	for _, c := range []struct {
		name   string
		change func(c *vllm.Config, p *vllm.Case, a *vllm.Ask) bool // false = there is nothing to change
	}{
		{"policy: request-level (--policy)", func(c *vllm.Config, _ *vllm.Case, _ *vllm.Ask) bool {
			was := c.Policy
			c.Policy = vllm.RequestLevel
			return was != c.Policy
		}},
		{"promotion: pending (--promotion), as vLLM since 2026-08-12", func(c *vllm.Config, _ *vllm.Case, _ *vllm.Ask) bool {
			was := c.Promotion
			c.Promotion = vllm.PromotionPending
			return was != c.Promotion
		}},
		{"retention_interval: none (--retention), vLLM's prefix_cache_retention_interval", func(c *vllm.Config, _ *vllm.Case, _ *vllm.Ask) bool {
			was := c.RetentionTokens
			c.RetentionTokens = vllm.Optional{}
			return was.Set && c.Revision == vllm.RevB
		}},
		{"no max_offload_tokens", func(_ *vllm.Config, p *vllm.Case, _ *vllm.Ask) bool {
			was := p.MaxOffloadTokens
			p.MaxOffloadTokens = vllm.Optional{}
			return was.Set
		}},
		{"no max_load_tokens", func(_ *vllm.Config, _ *vllm.Case, a *vllm.Ask) bool {
			was := a.MaxLoadTokens
			a.MaxLoadTokens = vllm.Optional{}
			return was.Set
		}},
	} {
		cfg, p, a := r.producer.rules.Config(), m.producer.Case, m.consumer.Ask
		if !c.change(&cfg, &p, &a) {
			continue
		}
		rules, err := vllm.New(cfg)
		if err != nil {
			continue // an interval that this change does not allow
		}
		t := meeting{}
		if t.supply, err = rules.Supply(p); err != nil {
			continue
		}
		if t.demand, err = rules.Demand(a, m.consumer.Tiers); err == nil && t.hole() < 0 && first(t.demand.Unready) < 0 {
			changes = append(changes, c.name)
		}
	}
	return changes
}
