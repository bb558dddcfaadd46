package stock

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/vllm"
)

// Relations in the order in which a prompt length runs them; states runs once all lengths
// have run the others.
var Relations = []string{"covers", "needs", "schedule", "warm", "cascade", "caps", "states"}

// Options of Judge and Against.
type Options struct {
	// Check says how many workers there are and who hears of the progress. No case is
	// drawn, so its seed counts for nothing.
	Check check.Options
	// Checker identifies the code that judges, such as the digest of the executable.
	Checker string
	// Now, when set, times the check. Without it Verdict.Seconds is 0.
	Now func() time.Time
	// At, when set, is the one case that is run, instead of the domain.
	At *At
}

// An At is one case, in tokens: what a person saw in the field. 0 = not so.
type At struct {
	Prompt    uint64
	GPU       uint64 // prefix on the producer's GPU
	Loaded    uint64 // prefix that the producer loaded from a tier
	Primary   uint64 // prefix in the producer's primary
	Step      uint64 // size of the producer's steps
	Generated uint64 // tokens that the producer generated
	Local     uint64 // prefix on the consumer's GPU
	Text      uint64 // consumer's request, when it is longer
}

// Judge runs a deployment of a stock engine against itself, as producer and as consumer.
// The verdict is accepted, refused, or undecided when ctx ended by check.ErrBudget; an
// error means that there is none.
func Judge(ctx context.Context, d *deploy.Deployment, o Options) (*registry.Verdict, error) {
	s, err := newSide(d)
	if err != nil {
		return nil, err
	}
	return verdict(ctx, d, nil, []direction{{"", s, s}}, o)
}

// A direction is a producer of one engine and a consumer of another, or of the same.
type direction struct {
	name               string // of the direction, when there are two
	producer, consumer *side
}

// verdict judges each direction in turn, until one is refused.
func verdict(ctx context.Context, d, against *deploy.Deployment, directions []direction, o Options) (*registry.Verdict, error) {
	clock := o.Now
	if clock == nil {
		clock = func() time.Time { return time.Time{} }
	}
	began := clock()
	v := &registry.Verdict{
		Verdict: registry.Accepted, Model: d.Model, Engine: d.Engine, DeploymentDigest: d.Digest(), Checker: o.Checker,
		Relations: map[string]uint64{}, Rules: ruleIDs(d, directions[0].producer, o.Checker),
	}
	v.RulesDigest = rulesDigest(v.Rules, directions[0].producer)
	maxTokens := d.MaxTokens
	if against != nil {
		v.Against = pairSide(against, directions[0].consumer, o.Checker)
		maxTokens = min(maxTokens, against.MaxTokens)
	}
	for i, dir := range directions {
		r, err := newRun(dir, maxTokens, o)
		if err != nil {
			return nil, fmt.Errorf("check deployment %s: %w", d.Model, err)
		}
		if i == 0 {
			v.Domain, v.DomainText = r.domain.Domain, r.text(o.At)
		} else {
			v.DomainText = append(v.DomainText, "the same, the other way round")
		}
		err = r.all(ctx)
		for name, n := range r.counts() {
			v.Relations[name] += n
			v.Cases += n
		}
		switch spent := errors.Is(context.Cause(ctx), check.ErrBudget); {
		case err != nil && !spent:
			return nil, fmt.Errorf("check deployment %s: %w", d.Model, err)
		case err != nil:
			v.Verdict, v.Undecided = registry.Undecided, check.ErrBudget.Error()
		case r.found != nil:
			v.Verdict, v.Counterexample = registry.Refused, r.found
		}
		if r.gap {
			v.Reached = append(v.Reached, r.reached()...)
		}
		if v.Verdict != registry.Accepted {
			break
		}
	}
	v.Seconds = clock().Sub(began).Seconds()
	return v, nil
}

// ruleIDs names each group's rule. The bytes that judge are the checker's own, so the
// digest is of the engine's name and the checker.
func ruleIDs(d *deploy.Deployment, s *side, checker string) (ids []registry.RuleID) {
	sum := sha256.Sum256([]byte(d.Engine + "\x00" + checker))
	c := s.rules.Config()
	for i := range d.Groups {
		g := &d.Groups[i]
		id := registry.RuleID{For: g.Name, Ref: g.Rule, Name: c.Groups[i].Kind.String(), Version: d.Engine, Source: "stock", Params: map[string]uint64{}}
		id.Digest = "sha256:" + hex.EncodeToString(sum[:])
		if w := c.Groups[i].WindowTokens; w > 0 {
			id.Params["window"] = w
		}
		if x := c.Groups[i].ExtraTokens; x > 0 {
			id.Params["extra"] = x
		}
		if c.Groups[i].Kind == vllm.Mamba {
			id.Name += " " + c.Groups[i].Mode.String()
		}
		ids = append(ids, id)
	}
	return ids
}

// rulesDigest names the rules with the settings that they depend on.
func rulesDigest(ids []registry.RuleID, s *side) string {
	h := sha256.New()
	c := s.rules.Config()
	fmt.Fprintf(h, "%s\n", c.String())
	for _, id := range ids {
		fmt.Fprintf(h, "%s\x00%s\x00%s\x00%s\x00%v\n", id.For, id.Name, id.Version, id.Digest, id.Params)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

// pairSide describes the other deployment of a pair.
func pairSide(d *deploy.Deployment, s *side, checker string) *registry.Side {
	ids := ruleIDs(d, s, checker)
	return &registry.Side{File: d.File(), Model: d.Model, Engine: d.Engine, DeploymentDigest: d.Digest(), RulesDigest: rulesDigest(ids, s), Rules: ids}
}

// A run is the check of one direction.
type run struct {
	direction
	// supply and demand run one side of a case: the producer's and the consumer's rules.
	supply  func(vllm.Case) ([]abi.Bitmap, error)
	demand  func(vllm.Ask, vllm.Tiers) (vllm.Demand, error)
	options Options
	domain  *domain
	tallies []map[string]uint64 // per worker: cases per relation
	found   *check.Counterexample
	gap     bool // a stage left lengths out
	holes   int  // leading lengths that have run the holes' relations
	states  int  // and those that have run states
}

func newRun(dir direction, maxTokens uint64, o Options) (*run, error) {
	r := &run{direction: dir, supply: dir.producer.rules.Supply, demand: dir.consumer.rules.Demand, options: o}
	if at := o.At; at != nil {
		r.domain = &domain{Domain: check.Domain{PromptTokens: at.Prompt, PeriodTokens: dir.producer.rules.PeriodTokens(), EdgeLengths: 1, EdgesFound: 1}, lengths: []length{{at.Prompt, true}}}
		return r, nil
	}
	var err error
	r.domain, err = newDomain(maxTokens, []deploy.StockEngine{dir.producer.engine, dir.consumer.engine}, dir.producer.rules, dir.consumer.rules)
	return r, err
}

// all runs the holes' relations over every length, and then states.
func (r *run) all(ctx context.Context) (err error) {
	n := len(r.domain.lengths)
	o := r.options.Check
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	for range o.Workers {
		r.tallies = append(r.tallies, map[string]uint64{})
	}
	progress := func(from int) check.Options {
		c := o
		if o.Progress != nil {
			c.Progress = func(done, _ int) { o.Progress(from+done, 2*n) }
		}
		return c
	}
	r.found, r.holes, err = check.Spread(ctx, n, progress(0), func(w, i int) (*check.Counterexample, error) {
		return r.length(r.domain.lengths[i], r.tallies[w])
	})
	if r.found != nil || err != nil {
		r.gap = ctx.Err() != nil
		return err
	}
	r.found, r.states, err = check.Spread(ctx, n, progress(n), func(w, i int) (*check.Counterexample, error) {
		return r.width(r.domain.lengths[i], r.tallies[w])
	})
	r.gap = (r.found != nil || err != nil) && ctx.Err() != nil
	return err
}

func (r *run) counts() map[string]uint64 {
	all := map[string]uint64{}
	for _, t := range r.tallies {
		for name, n := range t {
			all[name] += n
		}
	}
	return all
}

// reached says how far a run got whose time was spent.
func (r *run) reached() (lines []string) {
	for _, s := range []struct {
		name string
		n    int
	}{{"holes", r.holes}, {"states", r.states}} {
		name := s.name
		if r.name != "" {
			name = r.name + ", " + name
		}
		switch all := len(r.domain.lengths); s.n {
		case 0:
			lines = append(lines, fmt.Sprintf("%s: none of %d prompt lengths", name, all))
		case all:
			lines = append(lines, fmt.Sprintf("%s: all %d prompt lengths", name, all))
		default:
			lines = append(lines, fmt.Sprintf("%s: the first %d of %d prompt lengths, to %d tokens", name, s.n, all, r.domain.lengths[s.n-1].tokens))
		}
	}
	return lines
}

// text says the domain: what was run, and what no case of it is about.
func (r *run) text(at *At) []string {
	p, c := r.producer.rules.Config(), r.consumer.rules.Config()
	lines := []string{"leg pd of " + p.String()}
	if r.producer != r.consumer {
		lines = []string{"leg pd, a producer of " + p.String(), "a consumer of " + c.String()}
	}
	if at != nil {
		return append(lines, fmt.Sprintf("one case alone, given by hand: prompt %d", at.Prompt))
	}
	lines = append(lines, r.domain.lines()...)
	lines = append(lines, "producers that hold nothing, a prefix on the GPU, loaded, or in the primary, compute in steps and generate; consumers that hold a prefix on the GPU or in the primary, or get chunks late; each against each")
	not := "not run: aborts, a full primary, eviction, partial tails, tier filters, null blocks inside a chunk whose last block is there"
	if !r.producer.engine.SharedWrites {
		not += ", two requests that store one prefix at a time (shared_writes)"
	}
	if r.consumer.engine.TurnTokens == 0 {
		not += ", a consumer whose request is longer than the producer's prompt (turn_tokens)"
	}
	return append(lines, not)
}

// A meeting is one producer and one consumer of a length, with what each came to.
type meeting struct {
	producer
	consumer
	supply []abi.Bitmap
	demand vllm.Demand
}

// both returns the producers and consumers of a length: those of the domain, or the one
// case that was asked for.
func (r *run) both(l length) ([]producer, []consumer) {
	if at := r.options.At; at != nil {
		p, c := r.given(at)
		return []producer{p}, []consumer{c}
	}
	return r.producer.producers(l), r.consumer.consumers(l)
}

// given is the case that was asked for.
func (r *run) given(at *At) (producer, consumer) {
	p := producer{relation: "covers", Case: vllm.Case{PromptTokens: at.Prompt, StepTokens: at.Step, GeneratedTokens: at.Generated}}
	p.Warm = vllm.Warm{GPUTokens: at.GPU, LoadedTokens: at.Loaded}
	if m := r.producer.engine.MaxOffload; m != nil {
		p.relation, p.MaxOffloadTokens = "caps", vllm.Some(*m)
		p.facts = append(p.facts, check.Fact{Name: "max_offload_tokens", Value: fmt.Sprint(*m)})
	}
	if at.Primary > 0 {
		p.Warm.Primary = r.producer.upTo(at.Primary, abi.Hit)
		p.facts = append(p.facts, check.Fact{Name: "producer's primary", Value: fmt.Sprintf("holds the first %d tokens", at.Primary)})
	}
	if at.Generated > 0 {
		p.facts = append(p.facts, check.Fact{Name: "generates", Value: fmt.Sprintf("%d tokens", at.Generated)})
	}
	switch {
	case p.relation == "caps":
	case at.GPU > 0 || at.Loaded > 0 || at.Primary > 0:
		p.relation = "warm"
	case at.Step > 0 || at.Generated > 0:
		p.relation = "schedule"
	}
	c := consumer{relation: "covers", plain: true, Ask: vllm.Ask{TextTokens: max(at.Prompt, at.Text), LocalTokens: at.Local}}
	if m := r.consumer.engine.MaxLoad; m != nil {
		c.relation, c.plain, c.MaxLoadTokens = "caps", false, vllm.Some(*m)
		c.facts = append(c.facts, check.Fact{Name: "max_load_tokens", Value: fmt.Sprint(*m)})
	}
	if at.Text > at.Prompt {
		c.relation = "caps"
	}
	return p, c
}

// length holds every producer of a length against every consumer, relation by relation.
func (r *run) length(l length, tally map[string]uint64) (*check.Counterexample, error) {
	producers, consumers := r.both(l)
	supplies := make([][]abi.Bitmap, len(producers))
	demands := make([]vllm.Demand, len(consumers))
	var err error
	for i := range producers {
		if supplies[i], err = r.supply(producers[i].Case); err != nil {
			return nil, err
		}
	}
	for i := range consumers {
		if demands[i], err = r.demand(consumers[i].Ask, consumers[i].Tiers); err != nil {
			return nil, err
		}
	}
	for _, relation := range Relations[:len(Relations)-1] {
		for i := range producers {
			for j := range consumers {
				m := meeting{producers[i], consumers[j], supplies[i], demands[j]}
				if relation == "needs" {
					if i > 0 {
						continue
					}
					tally[relation]++
					if g := first(m.demand.Unready); g >= 0 {
						return r.unready(&m, g), nil
					}
					continue
				}
				if m.relation() != relation {
					continue
				}
				tally[relation]++
				if g := m.hole(); g >= 0 {
					return r.missing(&m, g), nil
				}
			}
		}
	}
	return nil, nil
}

// relation is what a failure of the meeting falls under: caps when a limit of either side
// is part of it, else what the producer did.
func (m *meeting) relation() string {
	if m.consumer.relation != "covers" {
		return m.consumer.relation
	}
	return m.producer.relation
}

// hole returns the first group with a chunk that is demanded and not supplied, or -1.
func (m *meeting) hole() int {
	for g, d := range m.demand.Groups {
		s := m.supply[g]
		for w, bits := range d {
			if w < len(s) {
				bits &^= s[w]
			}
			if bits != 0 {
				return g
			}
		}
	}
	return -1
}

// first returns the first group with a set that is not empty, or -1.
func first(sets []abi.Bitmap) int {
	for g, b := range sets {
		if !b.Empty() {
			return g
		}
	}
	return -1
}

// width holds each fetch of a plain consumer against what a hit can read of a window.
func (r *run) width(l length, tally map[string]uint64) (*check.Counterexample, error) {
	_, consumers := r.both(l)
	for _, c := range consumers {
		if !c.plain {
			continue
		}
		d, err := r.demand(c.Ask, c.Tiers)
		if err != nil {
			return nil, err
		}
		tally["states"]++
		for _, round := range d.Rounds {
			for g := range round {
				if limit := r.consumer.readable(g); limit > 0 && round[g].Count() > limit {
					return r.wide(&meeting{consumer: c, demand: d}, g, round, limit), nil
				}
			}
		}
	}
	return nil, nil
}

// readable is the largest number of chunks of a window that one hit reads, and one more in
// a drafter's group, which gives it up; 0 = the group is no window.
func (s *side) readable(g int) int {
	n, window := s.rules.WindowChunks(g)
	if !window {
		return 0
	}
	c := s.rules.Config()
	gr := &c.Groups[g]
	if c.Revision == vllm.RevB && (gr.Kind == vllm.SlidingWindow || gr.Kind == vllm.SlidingWindowMLA) {
		chunk := s.rules.ChunkTokens(g) // a hit that ends inside a chunk reads one more
		n = max(n, int((gr.WindowTokens+gr.ExtraTokens-1+chunk-1+chunk-1)/chunk))
	}
	if s.drafts(g) {
		n++
	}
	return n
}

// drafts reports whether the revision takes a group for a drafter's.
func (s *side) drafts(g int) bool {
	c := s.rules.Config()
	marked := false
	for i := range c.Groups {
		marked = marked || c.Groups[i].Eagle
	}
	return c.Groups[g].Eagle || c.Revision == vllm.RevA && c.Speculative && !marked
}
