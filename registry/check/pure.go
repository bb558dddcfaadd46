package check

import (
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// Relation pure asks the same call several times, each time in other circumstances, and
// compares the answers. State can be kept in many places, so it looks in five ways:
//
//   - pure, for every edge length: the calls of that length in order, in reverse, again,
//     on a second instance, and Reach for other splits of its range.
//   - alone, for every rule: calls of some lengths on instances that have served no call
//     before: as the very first, in order, and in reverse.
//   - neighbours, for every rule: the same calls as it serves in the daemon, where an
//     instance is shared, between calls to the same rule with other parameter values and
//     to the deployment's other rules.
//   - during all other relations each worker's witnesses remember some calls; one that
//     comes again must be answered as before.
//   - again, at the end: what was remembered is asked on the worker's own instance, which
//     has served all the calls of the check, and in a long run on a fresh one.
//
// When another relation fails, or cannot be judged, again runs before that is believed: a
// rule that keeps state breaks everything somewhere, and that it keeps state is the cause.
//
// For rules that are pure the outcome depends on the seed alone. A rule that is not may
// be refused for another call when the number of workers is another, because what an
// instance has served by then is another; alone, neighbours and the long run of again do
// not depend on that.

// What is asked of fresh instances. One takes 3 to 6 ms to make for a plain Go guest and
// 50 ms for a subprocess, so a rule gets freshFirst+4 of them: two in alone beside the
// firsts, two in again.
const (
	// freshFirst is how many calls are asked as the first of an instance's life.
	freshFirst = 4
	// aloneLengths is how many of the edge lengths are asked on fresh instances.
	aloneLengths = 12
	// longRunCalls is how many calls one fresh instance serves at the end: state that
	// builds up over thousands of calls shows, and at 20 us a call it is a fifth of a
	// second.
	longRunCalls = 8192
	// singlesMax is the largest number of chunks for which Reach is asked for each chunk
	// alone; of more, as many are drawn.
	singlesMax = 32
	// drawnSplits is how often a range is split at drawn places, into at most
	// splitPiecesMax pieces.
	drawnSplits, splitPiecesMax = 3, 5
	// afterMax is how many of the calls between two answers are kept for the message, the
	// last one included.
	afterMax = 5
)

// An impurity is one call that was answered in two ways.
type impurity struct {
	at            string // group or policy
	call          call
	first, second answer
	how           string // what was different the second time
	calls         uint64 // what the instance had answered since; a fresh one, in all
	after         []call // the last of these
}

// A Twice is the one call of relation pure that was answered in two ways, in words.
type Twice struct {
	// Call is the function, the chunks and the Round's facts.
	Call string `json:"call"`
	// First and Second are the answers; Second is the one that came How.
	First  string `json:"first"`
	Second string `json:"second"`
	How    string `json:"how"`
	// CallsSince is how many calls the same instance had answered between the two, or a
	// fresh instance in all; 0 where that is not known. After are the last of them.
	CallsSince uint64   `json:"calls_since,omitempty"`
	After      []string `json:"after,omitempty"`
}

// impure turns an impurity into a counterexample. When one of the answers is the error of
// a call that the clock ended, nothing is decided.
func (w *worker) impure(im *impurity) (*Counterexample, error) {
	for _, a := range []*answer{&im.first, &im.second} {
		if clocked(a.err) {
			return nil, (&ruleOf{at: im.at}).failed(im.call.fn, im.call.round, a.err)
		}
	}
	lo := int(im.call.round.Lo) // chunks are counted from the start of the sequence; a need's Lo is 0
	first, second := shifted(&im.first, lo), shifted(&im.second, lo)
	t := &Twice{Call: im.call.of(im.at), First: first.String(), Second: second.String(), How: im.how, CallsSince: im.calls}
	for i := range im.after {
		t.After = append(t.After, im.after[i].of(im.at))
	}
	r := &im.call.round
	ce := &Counterexample{PromptTokens: r.PromptTokens, LocalTokens: r.LocalTokens, BoundTokens: r.BoundTokens, Twice: t}
	if im.call.fn == "scan" {
		ce.States, ce.StatesFrom = im.call.states.Format(r.Chunks()), r.Lo
	}
	return w.failAt(ce, "pure", im.at, fmt.Sprintf("%s answers %s at first, and %s %s", im.call.fn, t.First, t.Second, t.How)), nil
}

// ruleOf is one opened rule with the geometries it is called for.
type ruleOf struct {
	at      string // group or policy
	index   int    // in the subject's order: groups, then policies
	groups  []int
	witness *witness
	other   abi.Rule // the same rule opened a second time
}

// failed is the error of a function that must answer.
func (ru *ruleOf) failed(fn string, r abi.Round, err error) error {
	return &plan.RuleError{Group: ru.at, Func: fn, Round: r, Err: err}
}

// rules returns the worker's rules: a group's is asked about that group, a policy's about
// every group.
func (w *worker) rules() (out []ruleOf) {
	m := w.model()
	for g := range m.Groups {
		out = append(out, ruleOf{m.Groups[g].Name, g, []int{g}, w.witnesses[g], w.other.Groups[g].Rule})
	}
	var all []int
	for g := range m.Groups {
		all = append(all, g)
	}
	for i := range m.Policies {
		k := len(m.Groups) + i
		out = append(out, ruleOf{w.witnesses[k].at, k, all, w.witnesses[k], w.other.Policies[i].Rule})
	}
	return out
}

// calls returns the calls that relation pure asks of a rule for one group and prompt
// length: Reach at the prompt's end, of the middle of the range and at another resume
// point; Scan of drawn tables; Need in the middle and at the end.
func (w *worker) calls(ru *ruleOf, g int, prompt uint64) (calls []call) {
	gr := &w.model().Groups[g]
	ct := gr.ChunkTokens
	base := abi.Round{BlockTokens: gr.BlockTokens, ChunkTokens: ct, PromptTokens: prompt, StoredTokens: prompt, AlignTokens: w.model().AlignTokens}
	draw := rng(w.options.Seed ^ prompt ^ uint64(g)<<32)
	up := func(n uint64) uint32 { return uint32((n + ct - 1) / ct) }

	r := base
	r.ResumeTokens, r.Hi = (prompt-1)/ct*ct, uint32(prompt/ct)
	calls = append(calls, call{"reach", r, nil})
	r.ResumeTokens, r.JunctionTokens = draw.below(prompt), draw.below(prompt)
	r.Lo = r.Hi / 3
	calls = append(calls, call{"reach", r, nil})

	r = base
	for i := range 3 {
		r.BoundTokens = prompt - 1
		if i == 2 && prompt > 2 {
			r.BoundTokens = 1 + draw.below(prompt-1)
			r.LocalTokens = draw.below(r.BoundTokens)
		}
		r.Lo, r.Hi = uint32(r.LocalTokens/ct), up(r.BoundTokens)
		calls = append(calls, call{"scan", r, drawnTable(r.Chunks(), i, &draw)})
	}
	if _, ok := ru.other.(abi.SpecRule); ok {
		for _, n := range [...]uint64{prompt - 1, prompt / 2} {
			r = base
			r.ResumeTokens, r.Hi = n, up(n)
			calls = append(calls, call{"need", r, nil})
		}
	}
	return calls
}

// drawnTable draws a lookup table: all Hit with one hole, all four states evenly, or
// mostly Retry, which is what defers.
func drawnTable(n, kind int, draw *rng) abi.States {
	t := abi.NewStates(n)
	for i := range n {
		s := abi.State(draw.below(4))
		if kind == 2 && draw.below(4) > 0 {
			s = abi.Retry
		}
		t.Put(i, s)
	}
	if kind == 0 {
		t.Fill(0, n, abi.Hit)
		if n > 0 {
			t.Put(int(draw.below(uint64(n))), abi.State(draw.below(4)))
		}
	}
	return t
}

// A trial asks the same calls in several ways and compares with the first answers.
type trial struct {
	w     *worker
	ru    *ruleOf
	calls []call
	first []answer
	log   []call // what the instance of the first answers has been asked
}

// begin asks every call in order; these answers are compared with.
func (t *trial) begin(rule abi.Rule) (*Counterexample, error) {
	t.first, t.log = make([]answer, len(t.calls)), slices.Clone(t.calls)
	for i := range t.calls {
		t.w.count("pure")
		a := t.calls[i].ask(rule)
		if a.failed() {
			return t.w.broken("pure", t.calls[i].round.PromptTokens, t.ru.failed(t.calls[i].fn, t.calls[i].round, a.err))
		}
		t.first[i] = a
	}
	return nil, nil
}

// again asks calls of the instance that begin asked, in the given order of their indexes.
func (t *trial) again(rule abi.Rule, order []int, how string) (*Counterexample, error) {
	for _, i := range order {
		if ce, err := t.one(rule, i, how, t.log[i+1:]); ce != nil || err != nil {
			return ce, err
		}
		t.log = append(t.log, t.calls[i])
	}
	return nil, nil
}

// elsewhere asks calls of another instance, a fresh one or not.
func (t *trial) elsewhere(rule abi.Rule, order []int, how string) (*Counterexample, error) {
	var log []call
	for _, i := range order {
		if ce, err := t.one(rule, i, how, log); ce != nil || err != nil {
			return ce, err
		}
		log = append(log, t.calls[i])
	}
	return nil, nil
}

func (t *trial) one(rule abi.Rule, i int, how string, after []call) (*Counterexample, error) {
	t.w.count("pure")
	a := t.calls[i].ask(rule)
	if a.equal(&t.first[i]) {
		return nil, nil
	}
	im := &impurity{at: t.ru.at, call: t.calls[i], first: t.first[i], second: a, how: how,
		calls: uint64(len(after)), after: after[max(0, len(after)-afterMax+1):]}
	if how == onAnother || how == onUsed { // after is not all that it has answered
		im.calls = 0
	}
	return t.w.impure(im)
}

// How an instance that is not fresh is called.
const (
	onAnother = "on another instance"
	onUsed    = "on the instance that served the cases so far"
)

// inOrder returns 0 to n-1, reversed the same backwards.
func inOrder(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	return order
}

func reversed(n int) []int {
	order := inOrder(n)
	slices.Reverse(order)
	return order
}

// pure asks every rule the calls of one prompt length.
func (w *worker) pure(prompt uint64) (*Counterexample, error) {
	for _, ru := range w.rules() {
		for _, g := range ru.groups {
			t := &trial{w: w, ru: &ru, calls: w.calls(&ru, g, prompt)}
			n, used := len(t.calls), ru.witness.wrap()
			if ce, err := t.begin(used); ce != nil || err != nil {
				return ce, err
			}
			for _, pass := range []func() (*Counterexample, error){
				func() (*Counterexample, error) { return t.again(used, reversed(n), "when called again") },
				func() (*Counterexample, error) { return t.again(used, inOrder(n), "when called again") },
				func() (*Counterexample, error) { return t.elsewhere(ru.other, inOrder(n), onAnother) },
				func() (*Counterexample, error) { return t.elsewhere(ru.other, reversed(n), onAnother) },
				func() (*Counterexample, error) { return t.splits(used) },
			} {
				if ce, err := pass(); ce != nil || err != nil {
					return ce, err
				}
			}
		}
	}
	return nil, nil
}

// splits asks every Reach of the trial for its range in pieces: two halves, drawn places,
// and chunk by chunk.
func (t *trial) splits(rule abi.Rule) (*Counterexample, error) {
	for i := range t.calls {
		c := &t.calls[i]
		if c.fn != "reach" {
			continue
		}
		draw := rng(t.w.options.Seed ^ c.round.PromptTokens)
		n := c.round.Chunks()
		cuts := [][]int{{0, n / 2, n}}
		for range drawnSplits {
			at := []int{0, n}
			for range 1 + draw.below(splitPiecesMax-1) {
				at = append(at, int(draw.below(uint64(n)+1)))
			}
			slices.Sort(at)
			cuts = append(cuts, at)
		}
		if n <= singlesMax {
			cuts = append(cuts, inOrder(n+1))
		}
		for _, at := range cuts {
			if ce, err := t.split(rule, i, at); ce != nil || err != nil {
				return ce, err
			}
		}
		for range singlesMax {
			if n <= singlesMax {
				break
			}
			at := int(draw.below(uint64(n)))
			if ce, err := t.piece(rule, i, at, at+1); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// split asks Reach i in the pieces that at cuts, the last piece first.
func (t *trial) split(rule abi.Rule, i int, at []int) (*Counterexample, error) {
	for k := len(at) - 1; k > 0; k-- {
		if ce, err := t.piece(rule, i, at[k-1], at[k]); ce != nil || err != nil {
			return ce, err
		}
	}
	return nil, nil
}

// piece asks Reach i for the chunks [lo, hi) of its range only.
func (t *trial) piece(rule abi.Rule, i, lo, hi int) (*Counterexample, error) {
	t.w.count("pure")
	part := call{fn: "reach", round: t.calls[i].round}
	part.round.Lo, part.round.Hi = t.calls[i].round.Lo+uint32(lo), t.calls[i].round.Lo+uint32(hi)
	a := part.ask(rule)
	if a.failed() {
		return t.w.broken("pure", part.round.PromptTokens, t.ru.failed("reach", part.round, a.err))
	}
	want := answer{set: abi.NewBitmap(hi - lo)}
	for k := lo; k < hi; k++ {
		if t.first[i].set.Get(k) {
			want.set.Set(k - lo)
		}
	}
	if a.equal(&want) {
		return nil, nil
	}
	return t.w.impure(&impurity{at: t.ru.at, call: t.calls[i], first: shifted(&want, lo), second: shifted(&a, lo),
		how: fmt.Sprintf("when chunks %d to %d of the range are asked for alone", part.round.Lo, part.round.Hi)})
}

// shifted returns the answer with its chunks moved up.
func shifted(a *answer, by int) answer {
	out := *a
	out.set = abi.NewBitmap(by + 64*len(a.set))
	for i := a.set.Next(0); i >= 0; i = a.set.Next(i + 1) {
		out.set.Set(by + i)
	}
	return out
}

// fresh opens a rule in an instance that has served no call.
func (w *worker) fresh(index int) (abi.Rule, func(), error) {
	if w.subject.Fresh != nil {
		rule, release, err := w.subject.Fresh(index)
		if err != nil {
			return nil, nil, fmt.Errorf("open a fresh instance: %w", err)
		}
		return rule, release, nil
	}
	m, release, err := w.subject.Open()
	if err != nil {
		return nil, nil, fmt.Errorf("open rules: %w", err)
	}
	if index < len(m.Groups) {
		return m.Groups[index].Rule, release, nil
	}
	return m.Policies[index-len(m.Groups)].Rule, release, nil
}

// onFresh runs f with a fresh instance of a rule.
func (w *worker) onFresh(index int, f func(rule abi.Rule) (*Counterexample, error)) (*Counterexample, error) {
	rule, release, err := w.fresh(index)
	if err != nil {
		return nil, err
	}
	defer release()
	return f(rule)
}

// trialOf returns the calls of a rule at lengths spread over the edge lengths.
func (w *worker) trialOf(ru *ruleOf) *trial {
	t := &trial{w: w, ru: ru}
	edges := w.domain.edges
	n := min(aloneLengths, len(edges))
	for i := range n {
		prompt := edges[(len(edges)-1)*(i+1)/n]
		for _, g := range ru.groups {
			t.calls = append(t.calls, w.calls(ru, g, prompt)...)
		}
	}
	return t
}

// alone judges rule number i, counted from 1, on instances that have served no call, and
// keeps the answers of the first for neighbours.
func (w *worker) alone(number uint64) (*Counterexample, error) {
	ru := w.rules()[number-1]
	t := w.trialOf(&ru)
	w.trials[ru.index] = t
	if ce, err := w.onFresh(ru.index, t.begin); ce != nil || err != nil {
		return ce, err
	}
	n := len(t.calls)
	if ce, err := w.onFresh(ru.index, func(rule abi.Rule) (*Counterexample, error) {
		return t.elsewhere(rule, reversed(n), "on a fresh instance, asked in reverse order")
	}); ce != nil || err != nil {
		return ce, err
	}
	for k := range min(freshFirst, n) {
		i := n - 1 - k // the last length is the longest, and its calls are of every function
		ce, err := w.onFresh(ru.index, func(rule abi.Rule) (*Counterexample, error) {
			return t.elsewhere(rule, []int{i, i}, "on a fresh instance")
		})
		if ce != nil || err != nil {
			return ce, err
		}
	}
	return t.elsewhere(ru.witness.wrap(), reversed(n), onUsed)
}

// neighbours judges every rule as it serves, between calls to its neighbours, which must
// not change its answers. One worker does it: an instance that is shared by two of them
// would be asked in an order that nobody can repeat.
func (w *worker) neighbours(uint64) (*Counterexample, error) {
	if w.subject.Near == nil {
		return nil, nil
	}
	for _, ru := range w.rules() {
		own, others, err := w.subject.Near(ru.index)
		if err != nil {
			return nil, fmt.Errorf("open rules: %w", err)
		}
		t := w.trials[ru.index]
		for i := range t.calls {
			for k := range others {
				o := &others[(i+k)%len(others)] // each is the first for some calls
				t.calls[i].ask(o.Rule)          // what it answers is not judged here
				ce, err := t.one(own, i, "after "+o.Name+" was asked the same", nil)
				if ce != nil || err != nil {
					return ce, err
				}
			}
		}
	}
	return nil, nil
}

// again asks rule number i, counted from 1, what its witnesses remember: once of the
// instances that they heard, and in a long run of fresh ones.
func (w *worker) again(number uint64) (*Counterexample, error) {
	ru := w.rules()[number-1]
	var heard []*witness
	for _, other := range w.workers {
		heard = append(heard, other.witnesses[ru.index])
	}
	kept, broke := agreed(heard)
	if broke != nil {
		return w.impure(broke)
	}
	t := &trial{w: w, ru: &ru}
	for i := range kept {
		t.calls, t.first = append(t.calls, kept[i].call), append(t.first, kept[i].answer)
	}
	n := len(t.calls)
	for _, h := range heard { // not counted as cases: there are as many as workers
		for i := range n {
			if a := t.calls[i].ask(h.rule); !a.equal(&t.first[i]) {
				return w.impure(&impurity{at: ru.at, call: t.calls[i], first: t.first[i], second: a,
					how: "on an instance that served this check", calls: h.asked, after: h.lately(h.asked)})
			}
		}
	}
	if ce, err := w.onFresh(ru.index, func(rule abi.Rule) (*Counterexample, error) {
		return t.elsewhere(rule, reversed(n), "on a fresh instance")
	}); ce != nil || err != nil {
		return ce, err
	}
	return w.onFresh(ru.index, func(rule abi.Rule) (*Counterexample, error) {
		draw := rng(w.options.Seed)
		order := make([]int, min(longRunCalls, longRunCalls*n))
		for i := range order {
			order[i] = int(draw.below(uint64(n)))
		}
		return t.elsewhere(rule, order, "in a long run on a fresh instance")
	})
}

// nearMax is how many other sets of parameter values are asked beside a rule's own.
const nearMax = 4

// NearValues returns parameter values for the neighbours of a rule, at most nearMax sets:
// all at their lowest, all doubled, and each parameter one step away.
func NearValues(m *abi.Manifest, values []uint64) (sets [][]uint64) {
	lowest, doubled := slices.Clone(values), slices.Clone(values)
	for i := range m.Params {
		lowest[i] = m.Params[i].Min
		doubled[i] = min(2*values[i], m.Params[i].Max)
	}
	candidates := [][]uint64{lowest, doubled}
	for i := range m.Params {
		set := slices.Clone(values)
		if set[i] < m.Params[i].Max {
			set[i]++
		} else if set[i] > m.Params[i].Min {
			set[i]--
		}
		candidates = append(candidates, set)
	}
	for _, set := range candidates {
		known := func(s []uint64) bool { return slices.Equal(s, set) }
		if len(sets) < nearMax && !known(values) && !slices.ContainsFunc(sets, known) {
			sets = append(sets, set)
		}
	}
	return sets
}
