package check

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// A call is one question to a rule.
type call struct {
	fn     string // reach, scan or need
	round  abi.Round
	states abi.States // of a scan
}

// An answer is what a rule said to a call. Its err is set when it did not answer; that
// includes abi.ErrNoResume, which is an answer of need.
type answer struct {
	set  abi.Bitmap
	span abi.Span
	err  error
}

// ask puts the call to a rule.
func (c *call) ask(rule abi.Rule) (a answer) {
	switch c.fn {
	case "reach":
		a.set = abi.NewBitmap(c.round.Chunks())
		a.err = rule.Reach(c.round, a.set)
	case "scan":
		a.set = abi.NewBitmap(c.round.Chunks())
		a.span, a.err = rule.Scan(c.round, c.states, a.set)
	case "need":
		spec, ok := rule.(abi.SpecRule)
		if !ok {
			return answer{err: errors.New("a policy has no need")}
		}
		a.set = abi.NewBitmap(int(c.round.Hi))
		a.err = spec.Need(c.round, a.set)
	}
	a.settle()
	return a
}

// settle empties what has no meaning.
func (a *answer) settle() {
	if a.err != nil {
		a.set, a.span = nil, abi.Span{}
	}
	if a.span.Deferred {
		a.span.Usable = 0
	}
}

// failed reports whether the rule did not answer a call that it must answer.
func (a *answer) failed() bool { return a.err != nil && !errors.Is(a.err, abi.ErrNoResume) }

func (a *answer) equal(b *answer) bool {
	return (a.err == nil) == (b.err == nil) && a.failed() == b.failed() && a.span == b.span && a.set.Equal(b.set)
}

func (a *answer) String() string {
	switch set := words(rangesOf(a.set)); {
	case a.failed():
		return "the error " + a.err.Error()
	case a.err != nil:
		return "that no KV can be resumed there"
	case a.span.Deferred:
		return "deferred until " + set + " is known"
	case a.span.Usable > 0:
		return fmt.Sprintf("%d usable and %s", a.span.Usable, set)
	default:
		return set
	}
}

// of is the call in words, asked of a group's or a policy's rule.
func (c *call) of(at string) string {
	return (&plan.RuleError{Group: at, Func: c.fn, Round: c.round}).Call()
}

func (c *call) same(d *call) bool {
	if c.fn != d.fn || c.round != d.round {
		return false
	}
	n := c.round.Chunks()
	return c.fn != "scan" || slices.Equal(c.states.AppendWire(nil, n), d.states.AppendWire(nil, n))
}

// keys are the multipliers of a call's key: one for each word of a Round, the last one
// for the table.
var keys = func() (k [14]uint64) {
	draw := rng(0x7469657264)
	for i := range k {
		k[i] = draw.next() | 1
	}
	return k
}()

// key is a number that the call and the seed determine. It costs a few nanoseconds: every
// call of a check has its key taken.
func (c *call) key(seed uint64) uint64 {
	r := &c.round
	h := seed + uint64(len(c.fn))<<32 + uint64(c.fn[0])
	h += r.BlockTokens*keys[0] + r.ChunkTokens*keys[1] + r.PromptTokens*keys[2] + r.StoredTokens*keys[3] +
		r.ResumeTokens*keys[4] + r.AlignTokens*keys[5] + r.JunctionTokens*keys[6] + r.ResidentTokens*keys[7] +
		r.Offers*keys[8] + r.LocalTokens*keys[9] + r.BoundTokens*keys[10] + uint64(r.Lo)*keys[11] + uint64(r.Hi)*keys[12]
	for i, w := range c.states {
		if n := c.round.Chunks() - 32*i; n < 32 {
			w &= 1<<(2*n) - 1 // what lies beyond the table is nobody's
		}
		h = (h ^ w) * keys[13]
		h ^= h >> 29
	}
	g := rng(h)
	return g.next()
}

// sampleMax is how many calls of one function of one rule are remembered with their
// answers, to be asked again at the end of the check. Each function has its own, because a
// check makes many more scans than anything else.
const sampleMax = 64

// A witness stands between a worker and a rule, and remembers some calls and what they
// were answered: of each function those with the smallest keys. Which calls these are depends on the seed
// and on the calls that the check makes, not on which worker made them. A remembered
// call that comes again must be answered as before.
type witness struct {
	rule   abi.Rule
	at     string
	seed   uint64
	asked  uint64 // calls so far
	reach  sample
	scan   sample
	need   sample
	recent [afterMax]call
	broke  *impurity // the first call that was answered in two ways
}

// A sample is the calls of one function that a witness remembers.
type sample struct {
	full bool
	last uint64 // the largest key, when full
	kept []testimony
}

// of returns the sample of a function.
func (w *witness) of(fn string) *sample {
	switch fn {
	case "reach":
		return &w.reach
	case "scan":
		return &w.scan
	}
	return &w.need
}

// A testimony is a call that a witness remembers.
type testimony struct {
	key    uint64
	call   call
	answer answer
	when   uint64 // the number of calls before it
}

func newWitness(rule abi.Rule, at string, seed uint64) *witness {
	return &witness{rule: rule, at: at, seed: seed}
}

// wrap returns the rule with the witness before it.
func (w *witness) wrap() abi.Rule {
	if spec, ok := w.rule.(abi.SpecRule); ok {
		return specWitness{w, spec}
	}
	return w
}

type specWitness struct {
	*witness
	spec abi.SpecRule
}

func (w *witness) Reach(r abi.Round, out abi.Bitmap) error {
	err := w.rule.Reach(r, out)
	w.heard(call{"reach", r, nil}, r.Chunks(), out, abi.Span{}, err)
	return err
}

func (w *witness) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	span, err := w.rule.Scan(r, states, demand)
	w.heard(call{"scan", r, states[:abi.StatesWords(r.Chunks())]}, r.Chunks(), demand, span, err)
	return span, err
}

func (w specWitness) Need(r abi.Round, out abi.Bitmap) error {
	err := w.spec.Need(r, out)
	w.heard(call{"need", r, nil}, int(r.Hi), out, abi.Span{}, err)
	return err
}

// heard takes note of a call. It copies what it keeps.
func (w *witness) heard(c call, n int, set abi.Bitmap, span abi.Span, err error) {
	w.recent[w.asked%afterMax] = call{c.fn, c.round, nil}
	w.asked++
	key, s := c.key(w.seed), w.of(c.fn)
	if s.full && key > s.last {
		return
	}
	a := answer{slices.Clone(set[:abi.BitmapWords(n)]), span, err}
	a.settle()
	if i := slices.IndexFunc(s.kept, func(t testimony) bool { return t.key == key }); i >= 0 {
		if t := &s.kept[i]; w.broke == nil && t.call.same(&c) && !t.answer.equal(&a) {
			w.broke = &impurity{at: w.at, call: t.call, first: t.answer, second: a, how: "when the same call came again",
				calls: w.asked - t.when - 2, after: w.lately(w.asked - t.when - 2)}
		}
		return
	}
	if s.full {
		s.kept = slices.DeleteFunc(s.kept, func(t testimony) bool { return t.key == s.last })
	}
	c.states = slices.Clone(c.states)
	s.kept = append(s.kept, testimony{key, c, a, w.asked - 1})
	if s.full = len(s.kept) == sampleMax; s.full {
		s.last = slices.MaxFunc(s.kept, byKey).key
	}
}

// lately returns the last calls before the one just heard, at most n.
func (w *witness) lately(n uint64) (calls []call) {
	for i := min(n, afterMax-1); i > 0; i-- {
		calls = append(calls, w.recent[(w.asked-1-i)%afterMax])
	}
	return calls
}

func byKey(a, b testimony) int {
	switch {
	case a.key < b.key:
		return -1
	case a.key > b.key:
		return 1
	}
	return 0
}

// agreed merges what the witnesses of one rule remember: of each function the calls with
// the smallest keys of all, in the order of their keys. The impurity is that of two
// witnesses that heard the same call answered in two ways.
func agreed(ws []*witness) (out []testimony, broke *impurity) {
	for _, fn := range [...]string{"reach", "scan", "need"} {
		var all []testimony
		for _, w := range ws {
			all = append(all, w.of(fn).kept...)
		}
		slices.SortStableFunc(all, byKey)
		kept := all[:0]
		for _, t := range all {
			if n := len(kept); n > 0 && kept[n-1].key == t.key {
				if o := &kept[n-1]; o.call.same(&t.call) && !o.answer.equal(&t.answer) {
					return nil, &impurity{at: ws[0].at, call: t.call, first: o.answer, second: t.answer, how: "on another instance"}
				}
				continue
			}
			kept = append(kept, t)
		}
		out = append(out, kept[:min(len(kept), sampleMax)]...)
	}
	slices.SortFunc(out, byKey)
	return out, nil
}
