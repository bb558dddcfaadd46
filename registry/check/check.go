// Package check runs the supply of a deployment's rules against their demand and
// against the truth, over the whole domain of the deployment, and says "accepted", or
// "refused" with the smallest counterexample.
//
// It drives the planner that the daemon runs, package registry/plan, with the rules that
// the daemon runs, and never a copy of either. The oracle of every relation is another
// code path: demand against supply, need against demand, mask against need, one split
// into steps against another, a fresh instance against a used one.
//
// # Relations
//
//	pure      the same call gives the same answer: again, on a fresh instance, in another
//	          order, between other calls, for any split
//	states    the laws on lookup states: retry, pending, more hits
//	covers    what a consumer in leg pd demands, the producer supplies
//	needs     what attention reads is in the demand or local; Need is what the mask says
//	content   the KV of a stored chunk does not depend on where the prompt ended
//	useful    what was stored can be used: at every prompt's end, by the next turn, by a
//	          prompt that shares a prefix, and in leg probe as in leg pd
//	schedule  the supply does not depend on how the prompt is split into steps, and an
//	          abort keeps the aligned tails
//	warm      a producer whose GPU or tier already holds a prefix supplies as much
//
// Covers varies what the consumer knows and the producer does not (its local prefix, its
// own tier) before a cold producer; warm varies what the producer knows and the consumer
// does not. So each failure has one name. Pure and states come first, because nothing
// else means anything without them.
//
// # Order
//
// Cases run by prompt length, then by the other dimensions from small to large, so that
// the first failure is the smallest and needs no shrinking. Work is spread over cores in
// blocks of prompt lengths; the smallest failing block wins, whichever core found it.
package check

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// Relations in the order in which they run.
var Relations = []string{"pure", "states", "covers", "needs", "content", "useful", "schedule", "warm"}

// A Subject is what is judged.
type Subject struct {
	// Open returns the deployment's model with every rule opened anew, and a function
	// that gives back what it holds. Each worker has its own.
	Open func() (plan.Model, func(), error)
	// Groups says what the groups' rules claim, in the model's order.
	Groups []Claim
	// MaxTokens is the longest prompt.
	MaxTokens uint64
	// PD and Probe are the legs that are used.
	PD, Probe bool
	// Fresh opens one rule, the groups' counted first and then the policies', in an
	// instance that has served no call. nil = what Open returns is that.
	Fresh func(index int) (rule abi.Rule, release func(), err error)
	// Near returns one rule as it serves, and its neighbours, which may share an instance
	// with it. nil = it has none.
	Near func(index int) (rule abi.Rule, neighbours []Neighbour, err error)
}

// A Neighbour is a rule that may share state with another one where they serve: the same
// rule with other parameter values, or another rule of the deployment.
type Neighbour struct {
	Name string
	Rule abi.Rule
}

// A Claim is what a spec rule says of itself: its mask and its parameters' values.
type Claim struct {
	Manifest *abi.Manifest
	Params   []uint64
}

// Options of a run. The zero value is usable.
type Options struct {
	// Workers is the number of goroutines; 0 = GOMAXPROCS.
	Workers int
	// Seed of the drawn cases; it is printed with every verdict.
	Seed uint64
	// Progress, when set, is called now and then, from any goroutine, with the work
	// done so far and in all, in arbitrary units.
	Progress func(done, total int)
}

// A Report is the outcome of a run.
type Report struct {
	// Counterexample is the smallest failing case; nil when every relation holds.
	Counterexample *Counterexample
	Domain         Domain
	// Cases is the number of cases per relation.
	Cases map[string]uint64
	// Unverified names the groups whose Need no mask could confirm.
	Unverified []string
}

// Run judges a subject. It returns an error only when it could not decide: the rules
// could not be opened, or ctx ended.
func Run(ctx context.Context, s Subject, o Options) (*Report, error) {
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	r := &run{subject: s, options: o, cases: map[string]*atomic.Uint64{}}
	for _, name := range Relations {
		r.cases[name] = new(atomic.Uint64)
	}
	err := r.open()
	defer r.close()
	if err != nil {
		return nil, err
	}
	r.domain = newDomain(r.workers[0].model(), &s, o.Seed)
	rep := &Report{Domain: r.domain, Cases: map[string]uint64{}}
	for _, c := range s.Groups {
		if c.Manifest.Mask == abi.MaskUnverified {
			rep.Unverified = append(rep.Unverified, c.Manifest.Name)
		}
	}
	rep.Counterexample, err = r.all(ctx)
	for name, n := range r.cases {
		rep.Cases[name] = n.Load()
	}
	return rep, err
}

type run struct {
	subject Subject
	options Options
	domain  Domain
	workers []*worker
	trials  []*trial // per rule, by relation pure
	cases   map[string]*atomic.Uint64
	done    atomic.Int64
	total   int
}

// A worker holds one goroutine's rules and scratch memory.
type worker struct {
	*run
	planner   *plan.Planner
	witnesses []*witness // per group, then per policy: before each rule of the planner
	other     plan.Model // a second opening of the rules, for pure
	closers   []func()
	reads     []func(q, k, prompt uint64) bool // per group: the mask; nil when unverified
	truths    []truth                          // per group
	tmp       abi.Bitmap
}

func (w *worker) model() *plan.Model { return w.planner.Model() }

func (w *worker) count(relation string) { w.cases[relation].Add(1) }

func (r *run) open() error {
	for range r.options.Workers {
		w := &worker{run: r}
		m, release, err := r.subject.Open()
		if err != nil {
			return fmt.Errorf("open rules: %w", err)
		}
		w.closers = append(w.closers, release)
		r.workers = append(r.workers, w)
		if w.planner, err = plan.New(w.witness(m)); err != nil {
			return err
		}
		if len(m.Groups) != len(r.subject.Groups) {
			return fmt.Errorf("%d groups, but %d claims", len(m.Groups), len(r.subject.Groups))
		}
		w.truths = make([]truth, len(m.Groups))
		for g := range m.Groups {
			var reads func(q, k, prompt uint64) bool
			if c := &r.subject.Groups[g]; c.Manifest.Mask != abi.MaskUnverified {
				reads = readsOf(c)
			}
			w.reads = append(w.reads, reads)
		}
		if w.other, release, err = r.subject.Open(); err != nil {
			return fmt.Errorf("open rules: %w", err)
		}
		w.closers = append(w.closers, release)
	}
	return nil
}

// witness puts a witness before each rule of a model.
func (w *worker) witness(m plan.Model) plan.Model {
	m.Groups, m.Policies = slices.Clone(m.Groups), slices.Clone(m.Policies)
	for g := range m.Groups {
		gr := &m.Groups[g]
		h := newWitness(gr.Rule, gr.Name, w.options.Seed)
		w.witnesses = append(w.witnesses, h)
		gr.Rule = specWitness{h, gr.Rule}
	}
	for i := range m.Policies {
		p := &m.Policies[i]
		h := newWitness(p.Rule, "policy "+p.Name, w.options.Seed)
		w.witnesses = append(w.witnesses, h)
		p.Rule = h
	}
	return m
}

// broke returns the first call, of any of the worker's rules, that was answered in two
// ways.
func (w *worker) broke() *impurity {
	for _, h := range w.witnesses {
		if h.broke != nil {
			return h.broke
		}
	}
	return nil
}

func (r *run) close() {
	for _, w := range r.workers {
		for _, c := range w.closers {
			c()
		}
	}
}

// A stage runs one set of relations over a list of prompt lengths.
type stage struct {
	prompts lengths
	block   int // lengths handed to a worker at once
	check   func(w *worker, prompt uint64) (*Counterexample, error)
}

// lengths is a list of prompt lengths in rising order: all of 1..n, or a given list.
type lengths struct {
	n    int
	list []uint64
}

func (l lengths) at(i int) uint64 {
	if l.list != nil {
		return l.list[i]
	}
	return uint64(i) + 1
}

func (r *run) all(ctx context.Context) (*Counterexample, error) {
	edges := lengths{len(r.domain.edges), r.domain.edges}
	rules := lengths{n: len(r.workers[0].witnesses)}
	r.trials = make([]*trial, rules.n)
	again := stage{rules, 1, (*worker).again}
	stages := []stage{
		{edges, 16, (*worker).pure},
		{rules, 1, (*worker).alone},
		{lengths{1, []uint64{1}}, 1, (*worker).neighbours},
		{lengths{len(r.subject.Groups) * (tableUnits() + 1), nil}, 1, (*worker).states},
		{lengths{int(r.subject.MaxTokens), nil}, 256, (*worker).sweep},
		{edges, 8, (*worker).arrivals},
		{edges, 8, (*worker).consumers},
		{edges, 8, (*worker).content},
		{edges, 8, (*worker).shared},
		{edges, 8, (*worker).schedule},
	}
	if r.subject.PD {
		stages = append(stages, stage{edges, 8, (*worker).warm})
	}
	for _, s := range append(stages, again) {
		r.total += s.prompts.n
	}
	for _, s := range stages {
		ce, err := r.stage(ctx, s)
		if ce != nil && ce.Relation != "pure" || err != nil && ctx.Err() == nil && !clocked(err) { // is state the cause?
			if impure, e := r.stage(ctx, again); impure != nil && e == nil {
				ce, err = impure, nil
			}
		}
		if ce != nil || err != nil {
			return ce, err
		}
	}
	return r.stage(ctx, again)
}

// stage spreads a stage's prompts over the workers and returns the failure of the
// smallest prompt.
func (r *run) stage(ctx context.Context, s stage) (*Counterexample, error) {
	type result struct {
		block int
		ce    *Counterexample
		err   error
	}
	var (
		next  atomic.Int64
		stop  atomic.Int64 // blocks at and beyond it are not begun
		mu    sync.Mutex
		first = result{block: s.prompts.n}
		wg    sync.WaitGroup
	)
	stop.Store(int64(s.prompts.n))
	for _, w := range r.workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				b := next.Add(int64(s.block)) - int64(s.block)
				if b >= stop.Load() {
					return
				}
				end := min(int(b)+s.block, s.prompts.n)
				for i := int(b); i < end; i++ {
					ce, err := s.check(w, s.prompts.at(i))
					if im := w.broke(); im != nil && err == nil {
						ce, err = w.impure(im)
					}
					if ce == nil && err == nil {
						continue
					}
					mu.Lock()
					if i < first.block {
						first = result{i, ce, err}
						stop.Store(b)
					}
					mu.Unlock()
					break
				}
				d := r.done.Add(int64(end) - b)
				if r.options.Progress != nil {
					r.options.Progress(int(d), r.total)
				}
			}
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil && first.ce == nil {
		return nil, err
	}
	return first.ce, first.err
}
