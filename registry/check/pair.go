package check

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// PairRelation is the name of the relation that [Pair] judges.
const PairRelation = "pair"

// A Way is one direction of a pair: who produces, who consumes, and what was found.
type Way struct {
	Producer string `json:"producer"`
	Consumer string `json:"consumer"`
	// Counterexample is the smallest failing case; nil when there is none.
	Counterexample *Counterexample `json:"counterexample,omitempty"`
	// Undecided says that the time was spent before every case had run.
	Undecided bool   `json:"undecided,omitempty"`
	Cases     uint64 `json:"cases"`
	// Probes is the number of prompt lengths that were also looked up in leg probe, and
	// Earlier of how many the consumer resumes earlier than it does on the supply of its own
	// version. That costs computing, never a wait, so it is only reported.
	Probes  uint64 `json:"probes"`
	Earlier uint64 `json:"earlier"`
}

// Outcome is what the way came to, in a few words.
func (w *Way) Outcome() string {
	switch {
	case w.Counterexample != nil:
		return fmt.Sprintf("REFUSED from prompts of %d tokens on", w.Counterexample.PromptTokens)
	case w.Undecided:
		return "undecided"
	case w.Cases == 0:
		return "nothing is demanded without a lookup"
	}
	return "every demand is covered"
}

// Sooner says in how many cases the consumer resumes earlier than with a producer of its own
// version, or is "".
func (w *Way) Sooner() string {
	if w.Earlier == 0 {
		return ""
	}
	return fmt.Sprintf("in leg probe it resumes earlier, so it computes more, than with a producer of its own version for %d of %d prompt lengths", w.Earlier, w.Probes)
}

// Pair judges two versions of a deployment against each other, both ways: what a consumer
// of the one demands in leg pd, a producer of the other supplies, for every prompt length
// up to the shorter longest prompt, since a longer one is refused where it begins. Rules,
// parameters, policies, alignment and caps may differ; the groups and their chunks may not.
//
// The cases are those of covers and caps, which vary what the consumer knows, and of warm,
// which varies what the producer knows. Everything else is judged on each deployment
// alone, by [Run]: what a consumer needs depends on its own rules, and a key that was
// looked up and found is there whoever stored it.
//
// A way runs only when its producer Produces, its consumer Consumes and both use leg pd. It
// is an error when the groups differ, and when no way has both roles.
func Pair(ctx context.Context, a, b Subject, o Options) (*Report, error) {
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	rep := &Report{Cases: map[string]uint64{PairRelation: 0}}
	var ways [][2]Subject
	for _, w := range [...][2]Subject{{a, b}, {b, a}} {
		if w[0].Produces && w[1].Consumes {
			ways = append(ways, w)
		}
	}
	if len(ways) == 0 {
		return nil, fmt.Errorf("roles: neither %s nor %s can be the producer of the other", a.Name, b.Name)
	}
	for i, w := range ways {
		part := o
		if o.Progress != nil {
			part.Progress = func(done, total int) { o.Progress(i*total+done, len(ways)*total) }
		}
		if err := rep.oneWay(ctx, w[0], w[1], part); err != nil {
			return nil, err
		}
	}
	undecided := false
	for i := range rep.Ways {
		w := &rep.Ways[i]
		undecided = undecided || w.Undecided
		if ce := w.Counterexample; ce != nil && (rep.Counterexample == nil || ce.PromptTokens < rep.Counterexample.PromptTokens) {
			rep.Counterexample = ce
		}
	}
	rep.Undecided = undecided && rep.Counterexample == nil
	return rep, nil
}

// oneWay judges a producer's deployment against a consumer's, and adds what it finds.
func (rep *Report) oneWay(ctx context.Context, producer, consumer Subject, o Options) error {
	r, closeAll, err := openPair(producer, consumer, o)
	defer closeAll()
	if err != nil {
		return err
	}
	rep.Domain = r.domain
	way := Way{Producer: producer.Name, Consumer: consumer.Name}
	edges := lengths{len(r.domain.edges), r.domain.edges}
	if producer.Probe && consumer.Probe {
		r.add("leg probe", "edge lengths", edges, 8, (*worker).pairProbe)
	}
	if producer.PD && consumer.PD {
		r.add("covers", "prompt lengths", lengths{n: int(r.domain.PromptTokens)}, 256, (*worker).pairSweep)
		r.add("consumers and producers", "edge lengths", edges, 8, (*worker).pairEdges)
	}
	for _, s := range r.stages {
		if way.Counterexample, err = r.stage(ctx, s); way.Counterexample != nil || err != nil {
			break
		}
	}
	if r.gap && errors.Is(context.Cause(ctx), ErrBudget) {
		way.Undecided, err = way.Counterexample == nil, nil
		for _, line := range r.reached() {
			rep.Reached = append(rep.Reached, fmt.Sprintf("producer %s, consumer %s, %s", producer.Name, consumer.Name, line))
		}
	}
	if err != nil {
		return err
	}
	way.Cases = r.cases[PairRelation].Load()
	for _, w := range r.workers {
		way.Probes, way.Earlier = way.Probes+w.probes, way.Earlier+w.earlier
	}
	rep.Cases[PairRelation] += way.Cases
	rep.Ways = append(rep.Ways, way)
	return nil
}

// openPair opens both deployments for each worker. The run is the consumer's; its partners
// are the producer's workers.
func openPair(producer, consumer Subject, o Options) (r *run, closeAll func(), err error) {
	longest := min(producer.MaxTokens, consumer.MaxTokens)
	producer.MaxTokens, consumer.MaxTokens = longest, longest
	cases := map[string]*atomic.Uint64{PairRelation: new(atomic.Uint64)}
	p := &run{subject: producer, options: o, cases: cases}
	c := &run{subject: consumer, options: o, cases: cases}
	closeAll = func() { p.close(); c.close() }
	for _, side := range [...]*run{p, c} {
		if err := side.openPlain(); err != nil {
			return nil, closeAll, fmt.Errorf("%s: %w", side.subject.Name, err)
		}
	}
	c.partners = p.workers
	x, y := p.workers[0].model(), c.workers[0].model()
	if err := sameChunks(x, y); err != nil {
		return nil, closeAll, fmt.Errorf("%s and %s: %w", producer.Name, consumer.Name, err)
	}
	both := plan.LCM(period(x, &producer), period(y, &consumer))
	c.domain = pairDomain(domainBy(both, x, &producer, o.Seed), domainBy(both, y, &consumer, o.Seed))
	return c, closeAll, nil
}

// openPlain opens the rules of each worker, without the witnesses of relation pure.
func (r *run) openPlain() error {
	for i := range r.options.Workers {
		m, release, err := r.subject.Open()
		if err != nil {
			return fmt.Errorf("open rules: %w", err)
		}
		w := &worker{run: r, number: i, closers: []func(){release}}
		r.workers = append(r.workers, w)
		if len(m.Groups) != len(r.subject.Groups) {
			return fmt.Errorf("%d groups, but %d claims", len(m.Groups), len(r.subject.Groups))
		}
		if w.planner, err = plan.New(m); err != nil {
			return err
		}
		w.know(&m)
	}
	return nil
}

// sameChunks reports the first difference that keeps two models from sharing keys.
func sameChunks(x, y *plan.Model) error {
	if len(x.Groups) != len(y.Groups) {
		return fmt.Errorf("%d and %d groups; they must be equal", len(x.Groups), len(y.Groups))
	}
	for g := range x.Groups {
		a, b := &x.Groups[g], &y.Groups[g]
		if a.Name != b.Name || a.BlockTokens != b.BlockTokens || a.ChunkTokens != b.ChunkTokens {
			return fmt.Errorf("group %d is %s with blocks of %d and chunks of %d tokens, and %s with %d and %d; they must be equal",
				g, a.Name, a.BlockTokens, a.ChunkTokens, b.Name, b.BlockTokens, b.ChunkTokens)
		}
	}
	return nil
}

// pairDomain joins the domains, by one period, of two deployments with equal chunks.
func pairDomain(x, y Domain) Domain {
	d := Domain{
		PromptTokens: x.PromptTokens, PeriodTokens: x.PeriodTokens, Seed: x.Seed,
		Drawn: x.Drawn, EdgeExhaustive: x.EdgeExhaustive,
		Sweep: []string{PairRelation}, Edges: []string{PairRelation + " (local prefixes, load caps, own tiers, warm producers)"},
	}
	d.edges = slices.Concat(x.edges, y.edges)
	slices.Sort(d.edges)
	d.edges = slices.Compact(d.edges)
	draw := rng(d.Seed)
	d.thin(&draw)
	d.EdgeLengths = len(d.edges)
	return d
}

// partner is the producer's side of a worker.
func (w *worker) partner() *worker { return w.partners[w.number] }

// pairSweep judges one prompt length with the few local prefixes of covers.
func (w *worker) pairSweep(prompt uint64) (*Counterexample, error) {
	supply, _, err := w.partner().planner.PromptSupply(plan.Start{PromptTokens: prompt})
	if err != nil {
		return w.pairBroken(w.partner(), prompt, err)
	}
	for _, local := range w.locals(prompt) {
		if ce, err := w.pairCase(plan.Ask{PromptTokens: prompt, LocalTokens: local}, nil, supply); ce != nil || err != nil {
			return ce, err
		}
	}
	return nil, nil
}

// pairEdges varies what the consumer alone knows, then what the producer alone knows.
func (w *worker) pairEdges(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt<<6)
	supply, _, err := w.partner().planner.PromptSupply(plan.Start{PromptTokens: prompt})
	if err != nil {
		return w.pairBroken(w.partner(), prompt, err)
	}
	if ce, err := w.pairConsumers(prompt, supply, &draw); ce != nil || err != nil {
		return ce, err
	}
	return w.pairProducers(prompt, &draw)
}

// pairConsumers judges consumers with local prefixes, load caps and tiers of their own.
func (w *worker) pairConsumers(prompt uint64, supply []abi.Bitmap, draw *rng) (*Counterexample, error) {
	var asks []plan.Ask
	for _, local := range w.manyLocals(prompt, draw) {
		asks = append(asks, plan.Ask{PromptTokens: prompt, LocalTokens: local})
	}
	for _, m := range [...]*plan.Model{w.model(), w.partner().model()} {
		for _, limit := range [...]uint64{m.AlignTokens, prompt / 2, prompt - 1, draw.below(prompt)} {
			if limit > 0 && limit < prompt {
				asks = append(asks, plan.Ask{PromptTokens: prompt, LoadCapTokens: limit}, plan.Ask{PromptTokens: prompt, LoadCapTokens: limit, LocalTokens: draw.below(prompt)})
			}
		}
	}
	for _, ask := range asks {
		if ce, err := w.pairCase(ask, nil, supply); ce != nil || err != nil {
			return ce, err
		}
	}
	return w.eachOwn(prompt, draw, func(local uint64, own []abi.States) (*Counterexample, error) {
		return w.pairCase(plan.Ask{PromptTokens: prompt, LocalTokens: local}, own, supply)
	})
}

// pairCase judges one consumer. What its own tier has it takes from there.
func (w *worker) pairCase(ask plan.Ask, own []abi.States, supply []abi.Bitmap) (*Counterexample, error) {
	pl, err := w.planner.Eager(ask, own)
	if err != nil {
		return w.pairBroken(w, ask.PromptTokens, err)
	}
	ce := &Counterexample{PromptTokens: ask.PromptTokens, LocalTokens: ask.LocalTokens, LoadCapTokens: ask.LoadCapTokens, ResumeTokens: pl.ResumeTokens}
	if pl.Deferred {
		ce = w.deferred(ce, pl)
		ce.Relation, ce.Producer, ce.Consumer = PairRelation, w.partner().subject.Name, w.subject.Name
		return ce, nil
	}
	return w.pairCovered(ce, pl.Demand, supply, own), nil
}

// pairCovered refuses a demand that is not inside a supply.
func (w *worker) pairCovered(ce *Counterexample, demand, supply []abi.Bitmap, own []abi.States) *Counterexample {
	w.count(PairRelation)
	for g := range demand {
		c := &pdCase{own: own}
		missing := lacks(demand[g], supply[g], c.of(g))
		if missing == nil {
			continue
		}
		if own != nil {
			ce.States = own[g].Format(int(ce.PromptTokens / w.model().Groups[g].ChunkTokens))
		}
		ce.Producer, ce.Consumer = w.partner().subject.Name, w.subject.Name
		why := "the consumer demands chunks that the producer, of another version, never supplies" + w.differ(g)
		return w.fail(ce, PairRelation, g, why, row{"supply", supply}, row{"demand", cloneSets(demand)}, row{"missing", at(g, missing)})
	}
	return nil
}

// pairProducers judges producers that are told a junction, or whose tier or GPU already
// holds a prefix, before a cold consumer.
func (w *worker) pairProducers(prompt uint64, draw *rng) (*Counterexample, error) {
	pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt}, nil)
	if err != nil {
		return w.pairBroken(w, prompt, err)
	}
	p, demand := w.partner(), cloneSets(pl.Demand)
	judge := func(s plan.Start) (*Counterexample, error) {
		supply, _, err := p.planner.PromptSupply(s)
		if err != nil {
			return w.pairBroken(p, prompt, err)
		}
		ce := &Counterexample{PromptTokens: prompt, JunctionTokens: s.JunctionTokens, ResidentTokens: s.ResidentTokens, Offers: s.Offers, ResumeTokens: pl.ResumeTokens}
		return w.pairCovered(ce, demand, supply, nil), nil
	}
	if ce, err := judge(plan.Start{PromptTokens: prompt, JunctionTokens: 1 + draw.below(prompt)}); ce != nil || err != nil {
		return ce, err
	}
	if ce, err := p.eachOffer(prompt, judge); ce != nil || err != nil {
		return ce, err
	}
	return p.eachWarm(PairRelation, prompt, func(s plan.Start, gpu uint64) (*Counterexample, error) {
		warm, err := p.warmed(s, gpu)
		if warm == nil || err != nil {
			return w.pairBroken(p, prompt, err)
		}
		ce := &Counterexample{PromptTokens: prompt, ResidentTokens: s.ResidentTokens, GPUTokens: gpu, ResumeTokens: pl.ResumeTokens}
		return w.pairCovered(ce, demand, warm.offered, nil), nil
	})
}

// pairProbe counts the prompts for which a lookup finds less than it would in the supply of
// the consumer's own version. Where leg pd is covered there are none; where it is refused
// or not used, they say what leg probe is worth.
func (w *worker) pairProbe(prompt uint64) (*Counterexample, error) {
	supply, _, err := w.partner().planner.PromptSupply(plan.Start{PromptTokens: prompt})
	if err != nil {
		return w.pairBroken(w.partner(), prompt, err)
	}
	resume, err := w.probed(prompt, supply)
	if err != nil {
		return w.pairBroken(w, prompt, err)
	}
	own, _, err := w.planner.PromptSupply(plan.Start{PromptTokens: prompt})
	if err != nil {
		return w.pairBroken(w, prompt, err)
	}
	full, err := w.probed(prompt, own)
	if err != nil {
		return w.pairBroken(w, prompt, err)
	}
	w.probes++
	if resume < full {
		w.earlier++
	}
	return nil, nil
}

// probed returns where a prompt resumes in leg probe when its tables are a supply.
func (w *worker) probed(prompt uint64, supply []abi.Bitmap) (uint64, error) {
	step, err := w.planner.Probe(plan.Ask{PromptTokens: prompt}, w.tables(supply, prompt), 0)
	return step.Plan.ResumeTokens, err
}

// pairBroken turns an error of a rule of one side into a counterexample.
func (w *worker) pairBroken(side *worker, prompt uint64, err error) (*Counterexample, error) {
	ce, err := side.broken(PairRelation, prompt, err)
	if ce != nil {
		ce.Producer, ce.Consumer = w.partner().subject.Name, w.subject.Name
		ce.Why = side.subject.Name + ": " + ce.Why
	}
	return ce, err
}

// differ says in what the producer's settings differ from the consumer's, for group g.
func (w *worker) differ(g int) string {
	p := w.partner()
	x, y := p.model(), w.model()
	var parts []string
	add := func(what, producer, consumer string) {
		if producer != consumer {
			parts = append(parts, fmt.Sprintf("%s: producer %s, consumer %s", what, producer, consumer))
		}
	}
	add("rule", p.subject.Groups[g].words(), w.subject.Groups[g].words())
	add("align_tokens", fmt.Sprint(x.AlignTokens), fmt.Sprint(y.AlignTokens))
	add("max_store_tokens", fmt.Sprint(x.MaxStoreTokens), fmt.Sprint(y.MaxStoreTokens))
	add("policies", policyNames(x), policyNames(y))
	if parts == nil {
		return ""
	}
	return " (" + strings.Join(parts, "; ") + ")"
}

// words are a rule's name, version and values.
func (c *Claim) words() string {
	s := c.Manifest.Name + " " + c.Manifest.Version
	for i := range c.Manifest.Params {
		s += fmt.Sprintf(" %s %d", c.Manifest.Params[i].Name, c.Params[i])
	}
	return s
}

func policyNames(m *plan.Model) string {
	names := make([]string, len(m.Policies))
	for i := range m.Policies {
		names[i] = m.Policies[i].Name
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
