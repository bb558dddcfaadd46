package abitest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/tierd/tierd/abi"
)

// A Difference is the first call to which two implementations of one rule give different
// answers.
type Difference struct {
	Rule string // name and parameter values
	// Func is the function that differs: open, reach, scan or need.
	Func string
	// Round and States of the call; States is empty but for a scan.
	Round, States string
	// First and Second are the answers, drawn, and Marks points at what differs when
	// both are chunk sets.
	First, Second, Marks string
}

func (d *Difference) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rule %s: the twins differ in %s\n", d.Rule, d.Func)
	for _, l := range []struct{ name, text string }{
		{"round", d.Round}, {"states", d.States}, {"first", d.First}, {"second", d.Second}, {"differ", d.Marks},
	} {
		if l.text != "" {
			fmt.Fprintf(&b, "  %-8s %s\n", l.name, l.text)
		}
	}
	fmt.Fprintf(&b, "  (abitest seed %d)", Seed)
	return b.String()
}

const (
	twinSets      = 20 // parameter values at which twins are compared
	twinTokensMax = 12 // stored lengths and resume points of the small domain
	twinTableMax  = 3  // chunks of which all lookup tables are tried
	twinRounds    = 24 // drawn rounds for each parameter value
	twinTables    = 6  // drawn tables for each of those
)

// twinChunks are the block and chunk sizes of the small domain.
var twinChunks = [...][2]uint64{{1, 1}, {1, 2}, {2, 4}}

// Twins compares two implementations of one rule, such as native and WebAssembly: the
// same parameters and mask, and the same answers, at parameter values drawn as in Check,
// small ones first, over every small round and lookup table and over drawn ones. It returns
// the first *Difference, another error when the manifests differ, and nil when it found
// nothing. Names, versions and the wording of errors may differ.
//
// Like Check it knows no right answer: twins that are wrong in the same way are equal.
func Twins(first, second abi.Spec) error {
	if err := sameManifest(first.Manifest(), second.Manifest()); err != nil {
		return err
	}
	c := &checker{spec: first, manifest: first.Manifest(), rand: rand.New(rand.NewPCG(Seed, 1))}
	for _, params := range c.twinParams() {
		c.params = params
		p := pair{checker: c}
		var errs [2]error
		p.rules[0], errs[0] = first.Open(params)
		p.rules[1], errs[1] = second.Open(params)
		if (errs[0] == nil) != (errs[1] == nil) {
			return &Difference{Rule: c.ruleName(), Func: "open", First: opened(errs[0]), Second: opened(errs[1])}
		}
		if errs[0] != nil {
			continue
		}
		for _, compare := range []func() *Difference{p.smallReaches, p.smallNeeds, p.smallScans, p.drawn} {
			if d := compare(); d != nil {
				return d
			}
		}
	}
	return nil
}

func opened(err error) string {
	if err == nil {
		return "opened"
	}
	return "the error " + fmt.Sprintf("%q", err)
}

func sameManifest(a, b *abi.Manifest) error {
	for _, m := range []*abi.Manifest{a, b} {
		if err := m.Validate(); err != nil {
			return err
		}
	}
	differ := func(what string, x, y any) error {
		return fmt.Errorf("rules %s and %s are no twins: %s is %v in the first and %v in the second", a.Name, b.Name, what, x, y)
	}
	switch {
	case a.Kind != b.Kind:
		return differ("kind", a.Kind, b.Kind)
	case a.Mask != b.Mask || !slices.Equal(a.MaskArgs, b.MaskArgs):
		return differ("mask", fmt.Sprint(a.Mask, a.MaskArgs), fmt.Sprint(b.Mask, b.MaskArgs))
	case len(a.Params) != len(b.Params):
		return differ("the number of parameters", len(a.Params), len(b.Params))
	}
	for i := range a.Params {
		p, q := &a.Params[i], &b.Params[i]
		what := fmt.Sprintf("parameter %d, ", i)
		switch {
		case p.Name != q.Name:
			return differ(what+"its name,", p.Name, q.Name)
		case p.Min != q.Min || p.Max != q.Max:
			return differ("the range of parameter "+p.Name, fmt.Sprintf("%d to %d", p.Min, p.Max), fmt.Sprintf("%d to %d", q.Min, q.Max))
		case p.Required != q.Required || p.Default != q.Default:
			return differ("the default of parameter "+p.Name, defaultOf(p), defaultOf(q))
		case !slices.Equal(p.Enum, q.Enum):
			return differ("the enum of parameter "+p.Name, p.Enum, q.Enum)
		}
	}
	return nil
}

func defaultOf(p *abi.Param) string {
	if p.Required {
		return "none, for it is required,"
	}
	return fmt.Sprint(p.Default)
}

// twinParams draws parameter values, small ones first, so that a difference is small.
func (c *checker) twinParams() [][]uint64 {
	params := c.manifest.Params
	if len(params) == 0 {
		return [][]uint64{nil}
	}
	sets := make([][]uint64, twinSets)
	for i := range sets {
		sets[i] = make([]uint64, len(params))
		for j := range params {
			p := &params[j]
			switch i {
			case 0:
				sets[i][j] = p.Min
			case 1:
				sets[i][j] = p.Max
			default: // half of them so small that each step shows
				sets[i][j] = p.Min + c.upTo(min(p.Max-p.Min, []uint64{6, 24}[i%2]))
			}
		}
	}
	slices.SortFunc(sets, func(a, b []uint64) int {
		if x, y := slices.Max(a), slices.Max(b); x != y {
			return int(min(x, abi.MaxTokens)) - int(min(y, abi.MaxTokens))
		}
		return slices.Compare(a, b)
	})
	return sets
}

// A pair is two rules opened with the same parameters.
type pair struct {
	*checker
	rules [2]abi.Rule
}

// An outcome is what one of them answered.
type outcome struct {
	answer answer
	err    string // "", or what happened instead
	text   string // of the error
}

func (o *outcome) draw(fn string, n int) string {
	switch {
	case o.err != "":
		return o.err + o.text
	case fn == "scan":
		return o.answer.draw(n)
	}
	return drawRow(o.answer.demand, n)
}

// call makes one call of either rule and compares. scan is nil but for a scan.
func (p *pair) call(fn string, r abi.Round, states abi.States) *Difference {
	var o [2]outcome
	for i := range o {
		o[i] = p.ask(p.rules[i], fn, r, states)
	}
	if o[0].err == o[1].err && (o[0].err != "" || o[0].answer.equal(&o[1].answer)) {
		return nil
	}
	n := r.Chunks()
	d := &Difference{Rule: p.ruleName(), Func: fn, Round: describe(&r), First: o[0].draw(fn, n), Second: o[1].draw(fn, n)}
	if fn == "scan" {
		d.States = "[" + states.Format(n) + "]"
	} else if o[0].err == "" && o[1].err == "" {
		d.Marks = marks(o[0].answer.demand, o[1].answer.demand, n)
	}
	return d
}

// marks points at the bits in which two rows differ, under the rows.
func marks(a, b abi.Bitmap, n int) string {
	row := []byte(strings.Repeat(" ", n+1))
	for i := range n {
		if a.Get(i) != b.Get(i) {
			row[i+1] = '^'
		}
	}
	return strings.TrimRight(string(row), " ")
}

func (p *pair) ask(rule abi.Rule, fn string, r abi.Round, states abi.States) (o outcome) {
	defer func() {
		if v := recover(); v != nil {
			o.err, o.text = "a panic", fmt.Sprintf(": %v", v)
		}
	}()
	o.answer.demand = abi.NewBitmap(r.Chunks())
	var err error
	switch fn {
	case "reach":
		err = rule.Reach(r, o.answer.demand)
	case "need":
		err = rule.(abi.SpecRule).Need(r, o.answer.demand)
	default:
		o.answer.span, err = rule.Scan(r, slices.Clone(states), o.answer.demand)
	}
	if o.answer.span.Deferred {
		o.answer.span.Usable = 0 // has no meaning
	}
	switch {
	case errors.Is(err, abi.ErrNoResume):
		o.err = "no resume"
	case err != nil:
		o.err, o.text = "an error", fmt.Sprintf(": %q", err)
	}
	return o
}

func (p *pair) smallReaches() *Difference {
	for _, g := range twinChunks {
		for stored := range uint64(twinTokensMax + 1) {
			for resume := range stored + 1 {
				for align := uint64(0); align <= 2*g[1]; align += g[1] {
					r := abi.Round{BlockTokens: g[0], ChunkTokens: g[1], PromptTokens: stored, StoredTokens: stored,
						ResumeTokens: resume, AlignTokens: align, Hi: uint32(stored / g[1])}
					if d := p.call("reach", r, nil); d != nil {
						return d
					}
				}
			}
		}
	}
	return nil
}

func (p *pair) smallNeeds() *Difference {
	if !p.isSpec() {
		return nil
	}
	for _, g := range twinChunks {
		for resume := range uint64(twinTokensMax + 1) {
			r := abi.Round{BlockTokens: g[0], ChunkTokens: g[1], PromptTokens: resume, StoredTokens: resume,
				ResumeTokens: resume, Hi: uint32((resume + g[1] - 1) / g[1])}
			if d := p.call("need", r, nil); d != nil {
				return d
			}
		}
	}
	return nil
}

func (p *pair) smallScans() *Difference {
	for _, g := range twinChunks {
		for n := range twinTableMax + 1 {
			for code := range uint64(1) << (2 * n) {
				for lo := range uint64(2) {
					end := (lo + uint64(n)) * g[1]
					for bound := end; bound+g[1] > end && bound >= lo*g[1]; bound-- {
						r := abi.Round{BlockTokens: g[0], ChunkTokens: g[1], PromptTokens: end + 1, StoredTokens: end + 1,
							LocalTokens: lo * g[1], BoundTokens: bound, Lo: uint32(lo), Hi: uint32(lo) + uint32(n)}
						if d := p.call("scan", r, abi.States{code}); d != nil {
							return d
						}
						if bound == 0 {
							break
						}
					}
				}
			}
		}
	}
	return nil
}

func (p *pair) drawn() *Difference {
	for range twinRounds {
		r := p.drawRound()
		if d := p.call("reach", p.producer(r), nil); d != nil {
			return d
		}
		if p.isSpec() {
			need := r
			need.ResidentTokens, need.Offers, need.LocalTokens, need.BoundTokens = 0, 0, 0, 0
			if d := p.call("need", need, nil); d != nil {
				return d
			}
		}
		c := p.consumer(r)
		for range twinTables {
			t := abi.States(nil)
			if n := c.Chunks(); n > 0 {
				t = p.drawTable(n)
			}
			if d := p.call("scan", c, t); d != nil {
				return d
			}
		}
	}
	return nil
}
