package check

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// A Range is an inclusive run of chunk numbers. In JSON it is [first, last].
type Range struct{ First, Last uint32 }

// MarshalJSON writes [first, last].
func (r Range) MarshalJSON() ([]byte, error) { return json.Marshal([2]uint32{r.First, r.Last}) }

// UnmarshalJSON reads [first, last].
func (r *Range) UnmarshalJSON(b []byte) error {
	var a [2]uint32
	err := json.Unmarshal(b, &a)
	r.First, r.Last = a[0], a[1]
	return err
}

func (r Range) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// RangesOf returns a set as runs, in order.
func RangesOf(b abi.Bitmap) []Range { return rangesOf(b) }

func rangesOf(b abi.Bitmap) []Range {
	out := []Range{}
	for i := b.Next(0); i >= 0; {
		j := b.NextUnset(i, 64*len(b))
		out = append(out, Range{uint32(i), uint32(j - 1)})
		i = b.Next(j)
	}
	return out
}

// A Counterexample is one case that breaks a relation. It draws itself with String.
type Counterexample struct {
	Relation string `json:"relation"`
	// Group whose chunks break it; for a policy's own fault, "policy NAME".
	Group string `json:"group"`
	// Producer and Consumer name the deployments of relation pair.
	Producer string `json:"producer,omitempty"`
	Consumer string `json:"consumer,omitempty"`
	// Why, in a sentence.
	Why          string `json:"why"`
	PromptTokens uint64 `json:"prompt_tokens"`
	LocalTokens  uint64 `json:"local_tokens"`
	// ResumeTokens is where the consumer resumes; WantTokens where it should have.
	ResumeTokens uint64 `json:"resume_tokens,omitempty"`
	WantTokens   uint64 `json:"want_tokens,omitempty"`
	// ProducerTokens and SharedTokens: the producer's prompt, when it is another one,
	// and the prefix that both share.
	ProducerTokens uint64 `json:"producer_tokens,omitempty"`
	SharedTokens   uint64 `json:"shared_tokens,omitempty"`
	// ResidentTokens and GPUTokens: what the producer's tier and GPU already held.
	ResidentTokens uint64 `json:"resident_tokens,omitempty"`
	GPUTokens      uint64 `json:"gpu_tokens,omitempty"`
	// Offers is how often the producer was offered the prefix before; JunctionTokens the
	// junction that it was told.
	Offers         uint64 `json:"offers,omitempty"`
	JunctionTokens uint64 `json:"junction_tokens,omitempty"`
	// LoadCapTokens is the consumer's own load cap, StoreCapTokens the producer's own store
	// cap for the request.
	LoadCapTokens  uint64 `json:"load_cap_tokens,omitempty"`
	StoreCapTokens uint64 `json:"store_cap_tokens,omitempty"`
	// TextTokens, StepTokens and AbortTokens: how the producer's engine ran.
	TextTokens  uint64 `json:"text_tokens,omitempty"`
	StepTokens  uint64 `json:"step_tokens,omitempty"`
	AbortTokens uint64 `json:"abort_tokens,omitempty"`
	BoundTokens uint64 `json:"bound_tokens,omitempty"`
	// States of a lookup table, from chunk StatesFrom on: M, H, P, R.
	States     string `json:"states,omitempty"`
	StatesFrom uint32 `json:"states_from,omitempty"`
	// Supply, Demand, Need and Missing of the group.
	Supply  []Range `json:"supply"`
	Demand  []Range `json:"demand"`
	Need    []Range `json:"need,omitempty"`
	Missing []Range `json:"missing"`
	// Surplus chunks of the group: named, but by no right.
	Surplus []Range `json:"surplus,omitempty"`
	// Facts of the case that only its engine has, in the order in which they are drawn.
	Facts []Fact `json:"facts,omitempty"`
	// Twice is the call that relation pure refuses: one that was answered in two ways.
	Twice *Twice `json:"twice,omitempty"`
	// Groups holds every group's rows, for the drawing.
	Groups []GroupRows `json:"groups,omitempty"`
}

// A Fact of a case is a name and what it was, such as "promotion" and "retry".
type Fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// GroupRows are the named chunk sets of one group.
type GroupRows struct {
	Name        string        `json:"name"`
	ChunkTokens uint64        `json:"chunk_tokens"`
	Rows        []RowOfRanges `json:"rows"`
}

// RowOfRanges is one named chunk set.
type RowOfRanges struct {
	Name   string  `json:"name"`
	Chunks []Range `json:"chunks"`
}

// row is a named set per group; sets may be shorter than the groups.
type row struct {
	name string
	sets []abi.Bitmap
}

// at returns sets in which only group g has one.
func at(g int, b abi.Bitmap) []abi.Bitmap {
	sets := make([]abi.Bitmap, g+1)
	sets[g] = b
	return sets
}

// fail completes a counterexample of group g.
func (w *worker) fail(ce *Counterexample, relation string, g int, why string, rows ...row) *Counterexample {
	ce.Relation, ce.Why = relation, why
	groups := make([]GroupRows, len(w.model().Groups))
	for i := range groups {
		gr := &groups[i]
		gr.Name, gr.ChunkTokens = w.model().Groups[i].Name, w.model().Groups[i].ChunkTokens
		for _, r := range rows {
			if i < len(r.sets) && r.sets[i] != nil {
				gr.Rows = append(gr.Rows, RowOfRanges{r.name, rangesOf(r.sets[i])})
			}
		}
	}
	ce.SetRows(groups, g)
	return ce
}

// SetRows gives a counterexample its groups' rows. Those of group g, whose chunks break the
// relation, are its Supply, Demand, Need, Missing and Surplus.
func (ce *Counterexample) SetRows(groups []GroupRows, g int) {
	ce.Group, ce.Groups = groups[g].Name, groups
	ce.Supply, ce.Demand, ce.Missing = []Range{}, []Range{}, []Range{}
	for _, r := range groups[g].Rows {
		switch r.Name {
		case "supply":
			ce.Supply = r.Chunks
		case "demand":
			ce.Demand = r.Chunks
		case "need":
			ce.Need = r.Chunks
		case "missing":
			ce.Missing = r.Chunks
		case "surplus":
			ce.Surplus = r.Chunks
		}
	}
}

// failAt completes a counterexample that is about one rule's answers, not about sets.
func (w *worker) failAt(ce *Counterexample, relation, group, why string) *Counterexample {
	ce.Relation, ce.Group, ce.Why = relation, group, why
	ce.Supply, ce.Demand, ce.Missing = []Range{}, []Range{}, []Range{}
	return ce
}

// broken turns an error of a rule into a counterexample: a rule is total over its
// parameters and every round. Other errors are passed on, and so is a call that was ended
// by the clock: whether it would have answered depends on the machine, so there is no
// verdict.
func (w *worker) broken(relation string, prompt uint64, err error) (*Counterexample, error) {
	var re *plan.RuleError
	if err == nil || !errors.As(err, &re) || clocked(err) {
		return nil, err
	}
	ce := &Counterexample{PromptTokens: prompt, LocalTokens: re.Round.LocalTokens}
	return w.failAt(ce, relation, re.Group, "the rule fails where it must answer: "+err.Error()), nil
}

// clocked reports whether err is that of a call that the clock ended.
func clocked(err error) bool {
	var clock interface{ Timeout() bool }
	return errors.As(err, &clock) && clock.Timeout()
}

// minus returns the bits of a that b does not have, or nil when there are none.
func minus(a, b abi.Bitmap) abi.Bitmap {
	var out abi.Bitmap
	for i, v := range a {
		if i < len(b) {
			v &^= b[i]
		}
		if v != 0 {
			if out == nil {
				out = make(abi.Bitmap, len(a))
			}
			out[i] = v
		}
	}
	return out
}

// minusAll returns minus for every group.
func minusAll(a, b []abi.Bitmap) []abi.Bitmap {
	out := make([]abi.Bitmap, len(a))
	for g := range a {
		out[g] = minus(a[g], b[g])
	}
	return out
}

func zeroed(b abi.Bitmap, n int) abi.Bitmap {
	if w := abi.BitmapWords(n); cap(b) >= w {
		b = b[:w]
		b.Zero()
		return b
	}
	return abi.NewBitmap(n)
}

// Case returns what is known of the case and is not nothing, in the order in which it is
// drawn: Facts are among it.
func (ce *Counterexample) Case() (facts []Fact) {
	if ce.Producer != "" {
		facts = append(facts, Fact{"producer", ce.Producer}, Fact{"consumer", ce.Consumer})
	}
	for _, f := range []struct {
		name string
		v    uint64
		show bool
	}{
		{"prompt", ce.PromptTokens, true},
		{"producer's prompt", ce.ProducerTokens, ce.ProducerTokens != 0},
		{"shared prefix", ce.SharedTokens, ce.SharedTokens != 0},
		{"text", ce.TextTokens, ce.TextTokens != 0},
		{"steps of", ce.StepTokens, ce.StepTokens != 0},
		{"aborted at", ce.AbortTokens, ce.AbortTokens != 0},
		{"in the producer's tier", ce.ResidentTokens, ce.ResidentTokens != 0},
		{"on the producer's GPU", ce.GPUTokens, ce.GPUTokens != 0},
		{"local prefix", ce.LocalTokens, true},
		{"consumer's load cap", ce.LoadCapTokens, ce.LoadCapTokens != 0},
		{"request's store cap", ce.StoreCapTokens, ce.StoreCapTokens != 0},
		{"resume bound", ce.BoundTokens, ce.BoundTokens != 0},
		{"resumes at", ce.ResumeTokens, ce.ResumeTokens != 0 || ce.WantTokens != 0},
		{"should resume at", ce.WantTokens, ce.WantTokens != 0},
	} {
		if f.show {
			facts = append(facts, Fact{f.name, fmt.Sprintf("%d tokens", f.v)})
		}
	}
	facts = append(facts, ce.Facts...)
	if ce.States != "" {
		facts = append(facts, Fact{"lookup states", fmt.Sprintf("%s from chunk %d (M miss, H hit, P pending, R retry)", ce.States, ce.StatesFrom)})
	}
	return facts
}

// String draws the counterexample: the facts of the case, then for each group a ruler of
// chunks with one line a set, the failing group's missing chunks marked.
func (ce *Counterexample) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "refused by relation %s, group %s: %s\n\n", ce.Relation, ce.Group, ce.Why)
	for _, f := range ce.Case() {
		fmt.Fprintf(&b, "  %-24s %s\n", f.Name, f.Value)
	}
	if ce.Twice != nil {
		ce.Twice.draw(&b)
	}
	for i := range ce.Groups {
		ce.Groups[i].draw(&b)
	}
	return b.String()
}

func (t *Twice) draw(b *strings.Builder) {
	fmt.Fprintf(b, "\n  %-24s %s\n  %-24s %s\n  %-24s %s %s\n", "call", t.Call, "first answer", t.First, "second answer", t.Second, t.How)
	switch t.CallsSince {
	case 0:
		for _, c := range t.After[max(0, len(t.After)-1):] {
			fmt.Fprintf(b, "  %-24s %s\n", "right after", c)
		}
	case 1:
		fmt.Fprintf(b, "  %-24s %s\n", "after", t.After[0])
	default:
		fmt.Fprintf(b, "  %-24s %d other calls", "after", t.CallsSince)
		for i, c := range t.After {
			if i == 0 {
				fmt.Fprintf(b, ", the last of them")
			}
			fmt.Fprintf(b, "\n  %-24s   %s", "", c)
		}
		fmt.Fprintf(b, "\n")
	}
}

// drawnChunksMax is the widest ruler that fits a terminal beside its labels.
const drawnChunksMax = 56

func (g *GroupRows) draw(b *strings.Builder) {
	lo, hi := g.span()
	if len(g.Rows) == 0 {
		return
	}
	fmt.Fprintf(b, "\n  group %s, chunks of %d tokens", g.Name, g.ChunkTokens)
	switch {
	case hi < lo:
		fmt.Fprintf(b, "\n")
		hi = lo
	case hi == lo:
		fmt.Fprintf(b, ", chunk %d\n", lo)
	default:
		fmt.Fprintf(b, ", chunks %d to %d\n", lo, hi)
	}
	width := int(hi-lo) + 1
	cell := 1 // chunks per column
	for (width+cell-1)/cell > drawnChunksMax {
		cell++
	}
	if cell > 1 {
		fmt.Fprintf(b, "    (one column = %d chunks)\n", cell)
	}
	marks := map[string]byte{"supply": 'S', "demand": 'D', "need": 'N', "missing": '^', "surplus": '^', "mask": 'A'}
	for _, r := range g.Rows {
		m := marks[r.Name]
		if m == 0 {
			m = '#'
		}
		line := []byte(strings.Repeat(".", (width+cell-1)/cell))
		if m == '^' {
			line = []byte(strings.Repeat(" ", len(line)))
		}
		for _, c := range r.Chunks {
			for x := max(c.First, lo); x <= c.Last && x <= hi; x++ {
				line[int(x-lo)/cell] = m
			}
		}
		fmt.Fprintf(b, "    %-14s %s  %s\n", r.Name, strings.TrimRight(string(line), " "), words(r.Chunks))
	}
}

// span returns the chunks to draw: from a little before the first difference that
// matters to the last chunk named. hi < lo when no row names any.
func (g *GroupRows) span() (lo, hi uint32) {
	lo = ^uint32(0)
	for _, r := range g.Rows {
		for _, c := range r.Chunks {
			lo, hi = min(lo, c.First), max(hi, c.Last)
		}
	}
	if lo == ^uint32(0) {
		return 1, 0
	}
	if hi < drawnChunksMax {
		lo = 0
	}
	return lo, hi
}

func words(rs []Range) string {
	if len(rs) == 0 {
		return "none"
	}
	const most = 8
	var out []string
	for i, r := range rs {
		if i == most {
			out = append(out, fmt.Sprintf("and %d more runs", len(rs)-most))
			break
		}
		out = append(out, r.String())
	}
	return "{" + strings.Join(out, ", ") + "}"
}
