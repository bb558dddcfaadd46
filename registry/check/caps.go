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
	for _, limit := range [...]uint64{a, a + 1, prompt / 2, prompt - 1, stored + 1, draw.below(prompt)} {
		if limit == 0 || limit >= prompt {
			continue
		}
		for _, local := range [...]uint64{0, draw.below(prompt)} {
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
	for _, limit := range [...]uint64{ct - 1, ct, ct + 1, m.AlignTokens, prompt / 2, prompt - 1, 1 + draw.below(prompt)} {
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

// limited reports whether a demand beyond the supply is there only because of a limit:
// without the policies and the store cap, the same consumer's demand is covered. It returns
// what the limit is, in words; "" when it is none.
func (w *worker) limited(prompt, local uint64) (string, error) {
	for _, without := range [...]struct {
		what string
		is   bool
		drop func(m *plan.Model)
	}{
		{"the policies", len(w.model().Policies) > 0, func(m *plan.Model) { m.Policies = nil }},
		{"the store cap", w.model().MaxStoreTokens > 0, func(m *plan.Model) { m.MaxStoreTokens = 0 }},
		{"the policies and the store cap", len(w.model().Policies) > 0 && w.model().MaxStoreTokens > 0,
			func(m *plan.Model) { m.Policies, m.MaxStoreTokens = nil, 0 }},
	} {
		if !without.is {
			continue
		}
		m := *w.model()
		without.drop(&m)
		free, err := plan.New(m)
		if err != nil {
			return "", err
		}
		supply, _, err := free.PromptSupply(plan.Start{PromptTokens: prompt})
		if err != nil {
			return "", err
		}
		pl, err := free.Eager(plan.Ask{PromptTokens: prompt, LocalTokens: local}, nil)
		if err != nil {
			return "", err
		}
		covered := !pl.Deferred
		for g := range pl.Demand {
			covered = covered && minus(pl.Demand[g], supply[g]) == nil
		}
		if covered {
			return without.what, nil
		}
	}
	return "", nil
}

// uncovered refuses a consumer whose demand is not inside the supply: by relation caps when
// a limit is the cause, and else by relation covers.
func (w *worker) uncovered(ce *Counterexample, g int, supply, demand []abi.Bitmap) (*Counterexample, error) {
	demand = cloneSets(demand)
	limit, err := w.limited(ce.PromptTokens, ce.LocalTokens)
	if err != nil {
		return w.broken("covers", ce.PromptTokens, err)
	}
	relation, why := "covers", "the consumer demands chunks that the producer never supplies"
	if limit != "" {
		relation = "caps"
		why = "by " + limit + " the consumer resumes at a point for which the producer keeps too little, and demands chunks that it never supplies; without a limit it would not"
	}
	return w.fail(ce, relation, g, why, row{"supply", supply}, row{"demand", demand}, row{"missing", minusAll(demand, supply)}), nil
}
