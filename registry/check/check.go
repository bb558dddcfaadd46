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
//	states    the laws on lookup states: retry, pending, more hits; a policy's range hangs
//	          on none
//	covers    what a consumer in leg pd demands, the producer supplies
//	needs     what attention reads is in the demand or local; Need is what the mask says
//	caps      limits and policies of one side are known to, or harmless for, the other
//	content   the KV of a stored chunk does not depend on where the prompt ended
//	useful    what was stored can be used: at every prompt's end, by the next turn, by a
//	          prompt that shares a prefix, and in leg probe as in leg pd
//	schedule  the supply does not depend on how the prompt is split into steps, and an
//	          abort keeps the aligned tails
//	warm      a producer whose GPU or tier already holds a prefix supplies as much
//	width     what is fetched and stored beyond what attention reads is what the rule claims
//	pair      covers, caps and warm, with a producer of one version and a consumer of
//	          another; see [Pair]
//
// The relation cascade judges how a host answers for each state of a chunk in its tier. It
// is driven on the real tier, in the tests of package host.
//
// Covers varies what the consumer knows and the producer does not (its local prefix, its
// own tier) before a cold producer; warm varies what the producer knows and the consumer
// does not: what its tier holds and how often a prefix was offered are what a policy's
// Reach sees beyond what a consumer counts on, and it may only add. Caps is demand beyond
// the supply that is there only because of a limit: a load cap of the consumer, a store
// cap, a policy's range. The same case, with its local prefix, own tier and junction, holds
// without the limit. So each failure has one name. Pure and states come first, because
// nothing else means anything without them; width comes last, because waste is no harm while
// something else is.
//
// # Width
//
// A chunk that a consumer fetches and attention does not read is transfer for nothing; a
// chunk that a producer stores and nobody fetches is storage for nothing. The points at
// which somebody resumes are the deployment's promise: the end of the prompt and of the
// text, the junction, the multiples of align_tokens. What a mask never forgets, every longer
// prompt fetches. A rule that wants more says so with a parameter named extra, in tokens:
// that many before those that attention reads, or before the resume point where it reads
// none, may be fetched, with the chunks that hold them, and are then kept as well. Inside a
// chunk from which nothing is read, the chunk, and what is read a token earlier with its
// extra tokens, are no waste. A policy that narrows widens nothing. Only reported are a group whose need no mask
// confirms, and what is stored by one that counts on an engine which saves a recurrent state
// at every chunk, so that any of them can be resumed; what that one fetches is judged.
//
// # Order
//
// Cases run by prompt length, then by the other dimensions from small to large, so that
// the first failure is the smallest and needs no shrinking. Work is spread over cores in
// blocks of prompt lengths; the smallest failing block wins, whichever core found it.
package check

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// ErrBudget is the cause of a context that ends because the time given to a check is
// spent. Run then returns a report of how far it got, and no error.
var ErrBudget = errors.New("the time given to the check is spent")

// Relations in the order in which they run.
var Relations = []string{"pure", "states", "covers", "needs", "caps", "content", "useful", "schedule", "warm", "width"}

// A Subject is what is judged.
type Subject struct {
	// Name of the deployment, in the messages of relation pair, such as its file.
	Name string
	// Produces and Consumes say which roles its nodes take; only [Pair] asks.
	Produces, Consumes bool
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

// A Claim is what a spec rule says of itself: its mask, its parameters' values and, with
// parameter [ExtraParam], its width.
type Claim struct {
	Manifest *abi.Manifest
	Params   []uint64
	// ChunkBytes is the size of the group's chunk, for reports of width; 0 = not known.
	ChunkBytes uint64
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
	// Begin, when set, is called as each stage begins, with the names of what it judges.
	Begin func(stage string)

	tables int // tests: the longest lookup tables of which all are tried; 0 = tableChunks
}

// A Report is the outcome of a run.
type Report struct {
	// Counterexample is the smallest failing case; nil when every relation holds.
	Counterexample *Counterexample
	Domain         Domain
	// Undecided says that the time was spent before every case had run: nothing failed in
	// those that did.
	Undecided bool
	// Reached says how far the run got, one line a stage, when the time was spent. With a
	// Counterexample it means that a smaller one may exist.
	Reached []string
	// Cases is the number of cases per relation.
	Cases map[string]uint64
	// Unverified names the groups whose Need no mask could confirm.
	Unverified []string
	// Ways holds the two directions of [Pair].
	Ways []Way
	// Width says, per group, what is fetched and stored beyond need; only when every
	// relation holds.
	Width []Width
}

// Run judges a subject. It returns an error only when it could not decide: the rules
// could not be opened, or ctx ended for another cause than [ErrBudget].
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
	if o.tables > 0 {
		r.domain.TableChunks = o.tables
	}
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
	if rep.Counterexample == nil && err == nil {
		rep.Width = r.reported()
	}
	if r.gap && errors.Is(context.Cause(ctx), ErrBudget) {
		rep.Reached, rep.Undecided, err = r.reached(), rep.Counterexample == nil, nil
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
	stages  []*stage
	gap     bool // the last stage left cases out before what it returned
	// partners holds, per worker, the producer's side of relation pair.
	partners []*worker
}

// A worker holds one goroutine's rules and scratch memory.
type worker struct {
	*run
	number    int
	planner   *plan.Planner
	witnesses []*witness // per group, then per policy: before each rule of the planner
	other     plan.Model // a second opening of the rules, for pure
	closers   []func()
	reads     []func(q, k, prompt uint64) bool // per group: the mask; nil when unverified
	truths    []truth                          // per group
	widths    []Width                          // per group
	// probes and earlier are those of a Way.
	probes, earlier uint64
	tmp             abi.Bitmap
}

func (w *worker) model() *plan.Model { return w.planner.Model() }

func (w *worker) count(relation string) { w.cases[relation].Add(1) }

func (r *run) open() error {
	for i := range r.options.Workers {
		w := &worker{run: r, number: i}
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
		w.know(&m)
		if w.other, release, err = r.subject.Open(); err != nil {
			return fmt.Errorf("open rules: %w", err)
		}
		w.closers = append(w.closers, release)
	}
	return nil
}

// know prepares what a worker keeps per group.
func (w *worker) know(m *plan.Model) {
	w.truths, w.widths = make([]truth, len(m.Groups)), w.newWidths(m)
	for g := range m.Groups {
		var reads func(q, k, prompt uint64) bool
		if c := &w.subject.Groups[g]; c.Manifest.Mask != abi.MaskUnverified {
			reads = readsOf(c)
		}
		w.reads = append(w.reads, reads)
	}
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
	name    string // of the relations
	unit    string // what prompts counts
	prompts lengths
	block   int // lengths handed to a worker at once
	check   func(w *worker, prompt uint64) (*Counterexample, error)
	upto    int // of prompts, from the first on, that have run without a gap
	// ended holds the blocks beyond upto that have run: from their first case to that
	// behind the last one that ran.
	ended map[int]int
}

// ran notes that the cases from one up to another have run, from being a block's first.
func (s *stage) ran(from, to int) {
	if s.ended == nil {
		s.ended = map[int]int{}
	}
	s.ended[from] = to
	for {
		end, ok := s.ended[s.upto]
		if !ok {
			return
		}
		delete(s.ended, s.upto)
		s.upto = end
	}
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

// plan makes the list of stages, in the order in which they run.
func (r *run) plan() {
	edges := lengths{len(r.domain.edges), r.domain.edges}
	rules := lengths{n: len(r.workers[0].witnesses)}
	r.trials = make([]*trial, rules.n)
	groups, every := len(r.subject.Groups), lengths{n: int(r.subject.MaxTokens)}
	const edge, rule = "edge lengths", "rules"
	r.add("pure", edge, edges, 16, (*worker).pure)
	r.add("pure, each rule alone", rule, rules, 1, (*worker).alone)
	r.add("pure, between neighbours", "runs", lengths{1, []uint64{1}}, 1, (*worker).neighbours)
	r.add("states", "lookup tables' ranges", lengths{n: groups * (r.domain.tableUnits() + 1)}, 1, (*worker).states)
	r.add(strings.Join(r.domain.Sweep, ", "), "prompt lengths", every, 256, (*worker).sweep)
	r.add("needs, partial arrivals", edge, edges, 8, (*worker).arrivals)
	r.add("covers, needs and states, consumers", edge, edges, 8, (*worker).consumers)
	r.add("caps", edge, edges, 8, (*worker).caps)
	r.add("content", edge, edges, 8, (*worker).content)
	r.add("useful, shared prefixes", edge, edges, 8, (*worker).shared)
	r.add("schedule", edge, edges, 8, (*worker).schedule)
	if r.subject.PD {
		r.add("warm", edge, edges, 8, (*worker).warm)
	}
	r.add("width", edge, edges, 8, (*worker).width)
	r.add("width, texts", edge, edges, 8, (*worker).widthOfTexts)
}

// add puts a stage at the end.
func (r *run) add(name, unit string, prompts lengths, block int, check func(*worker, uint64) (*Counterexample, error)) {
	r.stages = append(r.stages, &stage{name: name, unit: unit, prompts: prompts, block: block, check: check})
	r.total += prompts.n
}

func (r *run) all(ctx context.Context) (*Counterexample, error) {
	r.plan()
	again := &stage{name: "pure, once more at the end", unit: "rules", prompts: lengths{n: len(r.trials)}, block: 1, check: (*worker).again}
	r.total += again.prompts.n
	for _, s := range r.stages {
		if r.options.Begin != nil {
			r.options.Begin(s.name)
		}
		ce, err := r.stage(ctx, s)
		if ce != nil && ce.Relation != "pure" || err != nil && ctx.Err() == nil && !clocked(err) { // is state the cause?
			gap := r.gap
			if impure, e := r.stage(ctx, again); impure != nil && e == nil {
				ce, err = impure, nil
			}
			r.gap = gap
		}
		if ce != nil || err != nil {
			return ce, err
		}
	}
	r.stages = append(r.stages, again)
	return r.stage(ctx, again)
}

// reached says of each stage how far it got.
func (r *run) reached() (lines []string) {
	for _, s := range r.stages {
		switch {
		case s.upto == s.prompts.n:
			lines = append(lines, fmt.Sprintf("%s: all %d %s", s.name, s.prompts.n, s.unit))
		case s.upto == 0:
			lines = append(lines, fmt.Sprintf("%s: none of %d %s", s.name, s.prompts.n, s.unit))
		case s.prompts.list != nil:
			lines = append(lines, fmt.Sprintf("%s: the first %d of %d %s, to %d tokens", s.name, s.upto, s.prompts.n, s.unit, s.prompts.at(s.upto-1)))
		default:
			lines = append(lines, fmt.Sprintf("%s: the first %d of %d %s", s.name, s.upto, s.prompts.n, s.unit))
		}
	}
	return lines
}

// stage spreads a stage's prompts over the workers and returns the failure of the
// smallest prompt.
func (r *run) stage(ctx context.Context, s *stage) (*Counterexample, error) {
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
				end, i := min(int(b)+s.block, s.prompts.n), int(b)
				for ; i < end && ctx.Err() == nil; i++ {
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
				mu.Lock()
				s.ran(int(b), i)
				mu.Unlock()
				d := r.done.Add(int64(end) - b)
				if r.options.Progress != nil {
					r.options.Progress(int(d), r.total)
				}
			}
		})
	}
	wg.Wait()
	r.gap = s.upto < first.block
	if err := ctx.Err(); err != nil && r.gap && first.ce == nil {
		return nil, err
	}
	return first.ce, first.err
}
