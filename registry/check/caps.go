package check

import (
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// A limit is known to both sides, as the deployment's max_store_tokens and the policies
// are; or it is one side's own, as a consumer's load cap and a producer's store cap for
// one request are, and then it must do no harm. What demand finds no supply only because of
// a limit is relation caps: without the limit the same case holds.

// caps judges limits that one side alone knows.
func (w *worker) caps(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt<<4)
	if w.subject.PD {
		supply, _, err := w.planner.PromptSupply(plan.Start{PromptTokens: prompt})
		if err != nil {
			return w.broken("caps", prompt, err)
		}
		if ce, err := w.loadCaps(prompt, supply, &draw); ce != nil || err != nil {
			return ce, err
		}
	}
	if w.subject.Probe {
		return w.storeCaps(prompt, &draw)
	}
	return nil, nil
}

// loadCaps judges a consumer that resumes at an aligned point below a cap that only it
// knows, and without aligned points fetches nothing then. A cap above the store cap is
// none.
func (w *worker) loadCaps(prompt uint64, supply []abi.Bitmap, draw *rng) (*Counterexample, error) {
	a, stored := w.model().AlignTokens, w.model().MaxStoreTokens
	limits := []uint64{a, a + 1, prompt / 2, prompt - 1, stored + 1, draw.below(prompt)}
	for limit := 2 * a; a > 0 && limit < min(prompt, everyCaseMax); limit += a {
		limits = append(limits, limit)
	}
	for _, limit := range limits {
		if limit == 0 || limit >= prompt {
			continue
		}
		locals := []uint64{0, draw.below(prompt)}
		if prompt <= everyCaseMax && a > 0 && limit%a == 0 {
			locals = locals[:0]
			for local := range limit {
				locals = append(locals, local)
			}
		}
		for _, local := range locals {
			ce := &Counterexample{PromptTokens: prompt, LocalTokens: local, LoadCapTokens: limit}
			pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt, LocalTokens: local, LoadCapTokens: limit}, nil)
			if err != nil {
				return w.broken("caps", prompt, err)
			}
			if ce.ResumeTokens = pl.ResumeTokens; pl.Deferred {
				return w.deferred(ce, pl), nil
			}
			w.count("caps")
			for g := range pl.Demand {
				if minus(pl.Demand[g], supply[g]) != nil {
					return w.fail(ce, "caps", g, "a consumer with a load cap resumes at an aligned point, and demands chunks that the producer never supplies",
						row{"supply", supply}, row{"demand", pl.Demand}, row{"missing", minusAll(pl.Demand, supply)}), nil
				}
			}
			w.count("needs")
			if ce, err := w.needs(ce, pl); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// storeCaps judges a producer that stores less of one request than the deployment says,
// which it may in leg probe: what it does store can be used, up to the last point that fits
// below its cap.
func (w *worker) storeCaps(prompt uint64, draw *rng) (*Counterexample, error) {
	m := *w.model()
	ct := m.Groups[0].ChunkTokens
	limits := []uint64{ct - 1, ct, ct + 1, m.AlignTokens, prompt / 2, prompt - 1, 1 + draw.below(prompt)}
	for limit := uint64(1); prompt <= everyCaseMax && limit < prompt; limit++ {
		limits = append(limits, limit)
	}
	for _, limit := range limits {
		if limit == 0 || limit >= prompt || w.model().MaxStoreTokens > 0 && limit >= w.model().MaxStoreTokens {
			continue
		}
		m.MaxStoreTokens = limit
		capped, err := plan.New(m)
		if err != nil {
			return nil, err
		}
		supply, resume, err := capped.PromptSupply(plan.Start{PromptTokens: prompt})
		if err != nil {
			return w.broken("caps", prompt, err)
		}
		ce, err := w.readers("caps", prompt, reader{"a producer with a store cap for one request keeps what cannot be used: the same prompt in leg probe resumes earlier than the cap allows",
			prompt, prompt, supply, resume})
		if ce != nil {
			ce.StoreCapTokens = limit
		}
		if ce != nil || err != nil {
			return ce, err
		}
	}
	return nil, nil
}

// A pdCase is one consumer in leg pd, and the producer of its prompt.
type pdCase struct {
	start plan.Start
	ask   plan.Ask
	own   []abi.States // what the consumer's own tier holds; nil = nothing
}

// lacks returns what of a demand is neither supplied nor in the consumer's own tier; nil =
// nothing.
func lacks(demand, supply abi.Bitmap, own abi.States) abi.Bitmap {
	missing := minus(demand, supply)
	for i := missing.Next(0); i >= 0; i = missing.Next(i + 1) {
		if i < 32*len(own) && own.At(i) != abi.Miss {
			missing.Unset(i)
		}
	}
	if missing.Empty() {
		return nil
	}
	return missing
}

// of returns what the consumer's own tier holds of group g.
func (c *pdCase) of(g int) abi.States {
	if c.own == nil {
		return nil
	}
	return c.own[g]
}

// covered reports whether a model covers a case.
func (c *pdCase) covered(m plan.Model) (bool, error) {
	p, err := plan.New(m)
	if err != nil {
		return false, err
	}
	supply, _, err := p.PromptSupply(c.start)
	if err != nil {
		return false, err
	}
	pl, err := p.Eager(c.ask, c.own)
	if err != nil || pl.Deferred {
		return false, err
	}
	for g := range pl.Demand {
		if lacks(pl.Demand[g], supply[g], c.of(g)) != nil {
			return false, nil
		}
	}
	return true, nil
}

// limited reports whether a demand beyond the supply is there only because of a limit:
// without the policies and the store cap, the same consumer's demand is covered. It returns
// what the limit is, in words; "" when it is none.
func (w *worker) limited(c *pdCase) (string, error) {
	policies, limit := len(w.model().Policies) > 0, w.model().MaxStoreTokens > 0
	for _, without := range [...]struct {
		what string
		is   bool
		drop func(m *plan.Model)
	}{
		{"the policies", policies, func(m *plan.Model) { m.Policies = nil }},
		{"the store cap", limit, func(m *plan.Model) { m.MaxStoreTokens = 0 }},
		{"the policies and the store cap", policies && limit, func(m *plan.Model) { m.Policies, m.MaxStoreTokens = nil, 0 }},
	} {
		if !without.is {
			continue
		}
		m := *w.model()
		without.drop(&m)
		if ok, err := c.covered(m); ok || err != nil {
			return without.what, err
		}
	}
	return "", nil
}

// uncovered judges a demand against a supply. What is missing is refused by relation caps
// when a limit is the cause, and else by relation covers, with why.
func (w *worker) uncovered(c *pdCase, resume uint64, supply, demand []abi.Bitmap, why string) (*Counterexample, error) {
	w.count("covers")
	for g := range demand {
		missing := lacks(demand[g], supply[g], c.of(g))
		if missing == nil {
			continue
		}
		demand = cloneSets(demand)
		ce := &Counterexample{PromptTokens: c.ask.PromptTokens, LocalTokens: c.ask.LocalTokens, JunctionTokens: c.start.JunctionTokens, ResumeTokens: resume}
		if c.own != nil {
			ce.States = c.own[g].Format(int(c.ask.PromptTokens / w.model().Groups[g].ChunkTokens))
		}
		limit, err := w.limited(c)
		if err != nil {
			return w.broken("covers", c.ask.PromptTokens, err)
		}
		relation := "covers"
		if limit != "" {
			relation = "caps"
			why = "by " + limit + " the consumer resumes at a point for which the producer keeps too little, and demands chunks that it never supplies; without a limit it would not"
		}
		all := minusAll(demand, supply)
		if c.own != nil {
			all = at(g, missing)
		}
		return w.fail(ce, relation, g, why, row{"supply", supply}, row{"demand", demand}, row{"missing", all}), nil
	}
	return nil, nil
}
