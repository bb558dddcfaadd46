package check

import (
	"fmt"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// tablesPerUnit is how many of the short tables one worker judges at a time: few enough
// that all workers have some, also those of a rule that wants many callers at once.
const tablesPerUnit = 64

// tableUnits is how many units the short tables of one group are: 4^n of each length n.
func (d *Domain) tableUnits() (units int) {
	for n := 1; n <= d.TableChunks; n++ {
		units += unitsOf(n)
	}
	return units
}

func unitsOf(n int) int { return (1<<(2*n) + tablesPerUnit - 1) / tablesPerUnit }

// states judges the laws on lookup states: all tables of a few chunks, and long ones that
// are uniform, with one hole, or drawn. Units count from 1: for each group those of the
// short tables by length, and then one for the long ones.
func (w *worker) states(unit uint64) (*Counterexample, error) {
	perGroup := w.domain.tableUnits() + 1
	g, u := int(unit-1)/perGroup, int(unit-1)%perGroup
	if u == perGroup-1 {
		return w.longTables(g)
	}
	n := 1
	for ; u >= unitsOf(n); n++ {
		u -= unitsOf(n)
	}
	t := abi.NewStates(n)
	for code := u * tablesPerUnit; code < min((u+1)*tablesPerUnit, 1<<(2*n)); code++ {
		t[0] = uint64(code)
		if ce, err := w.tableAt(g, n, t); ce != nil || err != nil {
			return ce, err
		}
	}
	return nil, nil
}

// tableAt judges one table at several places and bounds.
func (w *worker) tableAt(g, n int, t abi.States) (*Counterexample, error) {
	ct := w.model().Groups[g].ChunkTokens
	for _, lo := range [...]uint64{0, 1, 3} {
		end := (lo + uint64(n)) * ct
		for _, bound := range [...]uint64{end, end - 1, end - ct + 1} {
			if bound <= lo*ct || bound > end || bound+ct > abi.MaxTokens {
				continue
			}
			if ce, err := w.laws(g, lo, n, bound, t); ce != nil || err != nil {
				return ce, err
			}
			if n <= rangeChunks {
				if ce, err := w.ranges(g, w.lawRound(g, lo, n, bound), t); ce != nil || err != nil {
					return ce, err
				}
			}
		}
	}
	return nil, nil
}

// rangeChunks is the longest of the short tables that policies are asked about: a range
// that hangs on one chunk's state shows in the shortest.
const rangeChunks = 3

// ranges judges how far the policies let a consumer fetch for one table and Round. In leg
// probe they are asked before anything is known, and nothing waits for them; so a range
// that hung on lookups would end where the lookups have not begun.
func (w *worker) ranges(g int, r abi.Round, t abi.States) (*Counterexample, error) {
	n := r.Chunks()
	hits := abi.NewStates(n)
	hits.Fill(0, n, abi.Hit)
	for i := range w.model().Policies {
		p := &w.model().Policies[i]
		w.count("states")
		d := abi.NewBitmap(n)
		span, err := p.Rule.Scan(r, t, d)
		if err != nil {
			return w.broken("states", r.PromptTokens, &plan.RuleError{Group: "policy " + p.Name, Func: "scan", Round: r, Err: err})
		}
		d.Zero()
		known, err := p.Rule.Scan(r, hits, d)
		if err != nil {
			return w.broken("states", r.PromptTokens, &plan.RuleError{Group: "policy " + p.Name, Func: "scan", Round: r, Err: err})
		}
		var text string
		switch {
		case span.Deferred:
			text = "a policy's scan is deferred, but its range must be known before any lookup"
		case int(span.Usable) > n:
			text = fmt.Sprintf("a policy lets %d chunks be fetched of %d", span.Usable, n)
		case span != known:
			text = fmt.Sprintf("a policy's range hangs on the lookup states: it lets %d chunks be fetched, and %d when all are Hits; it must be known before any lookup", span.Usable, known.Usable)
		default:
			continue
		}
		ce := &Counterexample{PromptTokens: r.PromptTokens, LocalTokens: r.LocalTokens, BoundTokens: r.BoundTokens, States: t.Format(n), StatesFrom: r.Lo}
		return w.failAt(ce, "states", "policy "+p.Name, text), nil
	}
	return nil, nil
}

// longTables judges tables as long as the deployment's longest prompt and shorter.
func (w *worker) longTables(g int) (*Counterexample, error) {
	ct := w.model().Groups[g].ChunkTokens
	longest := int(w.subject.MaxTokens / ct)
	if ce, err := w.longRanges(g, longest); ce != nil || err != nil {
		return ce, err
	}
	draw := rng(w.options.Seed)
	for _, n := range [...]int{w.domain.TableChunks + 1, 31, 32, 33, 64, 65, int(w.domain.PeriodTokens/ct) + 1, longest} {
		if n <= w.domain.TableChunks || n > longest {
			continue
		}
		for base := abi.Miss; base <= abi.Retry; base++ {
			for hole := abi.Miss; hole <= abi.Retry; hole++ {
				for _, i := range [...]int{0, n / 2, n - 1} {
					t := abi.NewStates(n)
					t.Fill(0, n, base)
					t.Put(i, hole)
					if ce, err := w.laws(g, 0, n, uint64(n)*ct, t); ce != nil || err != nil {
						return ce, err
					}
				}
			}
		}
		for range drawnTables {
			t := abi.NewStates(n)
			t.Fill(0, n, abi.Hit)
			for range draw.below(4) {
				t.Put(int(draw.below(uint64(n))), abi.State(draw.below(4)))
			}
			lo := min(draw.below(3), uint64(abi.MaxChunks-n))
			if ce, err := w.laws(g, lo, n, 0, t); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// longRanges judges how far the policies let a consumer fetch for tables of more than
// rangeChunks chunks: a policy may let nothing be fetched of a short prompt.
func (w *worker) longRanges(g, longest int) (*Counterexample, error) {
	lengths := []int{64, 65, longest}
	for n := rangeChunks + 1; n <= 33; n++ {
		lengths = append(lengths, n)
	}
	ct := w.model().Groups[g].ChunkTokens
	for _, n := range lengths {
		if len(w.model().Policies) == 0 || n > longest || n == 0 {
			continue
		}
		for base := abi.Miss; base <= abi.Retry; base++ {
			for hole := abi.Miss; hole <= abi.Retry; hole++ {
				for _, i := range [...]int{0, n / 2, n - 1} {
					t := abi.NewStates(n)
					t.Fill(0, n, base)
					t.Put(i, hole)
					if ce, err := w.ranges(g, w.lawRound(g, 0, n, uint64(n)*ct), t); ce != nil || err != nil {
						return ce, err
					}
				}
			}
		}
	}
	return nil, nil
}

// drawnTables is the number of drawn long tables per length.
const drawnTables = 48

// laws judges the laws of package abi for one table of n chunks from lo on; bound 0
// means the end of the last chunk.
func (w *worker) laws(g int, lo uint64, n int, bound uint64, t abi.States) (*Counterexample, error) {
	if bound == 0 {
		bound = (lo + uint64(n)) * w.model().Groups[g].ChunkTokens
	}
	w.count("states")
	return w.law(g, w.lawRound(g, lo, n, bound), t)
}

// lawRound is the Round of a scan of n chunks from lo on.
func (w *worker) lawRound(g int, lo uint64, n int, bound uint64) abi.Round {
	gr := &w.model().Groups[g]
	return abi.Round{
		BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens, PromptTokens: bound + 1, StoredTokens: bound + 1,
		AlignTokens: w.model().AlignTokens, LocalTokens: lo * gr.ChunkTokens, BoundTokens: bound,
		Lo: uint32(lo), Hi: uint32(lo) + uint32(n),
	}
}

// law judges the laws for one table and Round.
func (w *worker) law(g int, r abi.Round, t abi.States) (*Counterexample, error) {
	gr, n := &w.model().Groups[g], r.Chunks()
	l := lawyer{rule: gr.Rule, r: r, n: n, t: t}
	text, err := l.judge()
	if err != nil {
		return w.broken("states", r.PromptTokens, &plan.RuleError{Group: gr.Name, Func: "scan", Round: r, Err: err})
	}
	if text == "" {
		return nil, nil
	}
	ce := &Counterexample{PromptTokens: r.PromptTokens, LocalTokens: r.LocalTokens, BoundTokens: r.BoundTokens, States: t.Format(n), StatesFrom: r.Lo}
	return w.failAt(ce, "states", gr.Name, text), nil
}

// A lawyer holds one scan against the laws.
type lawyer struct {
	rule abi.Rule
	r    abi.Round
	n    int
	t    abi.States
}

func (l *lawyer) scan(t abi.States) (abi.Span, abi.Bitmap, error) {
	d := abi.NewBitmap(l.n)
	s, err := l.rule.Scan(l.r, t, d)
	return s, d, err
}

// with returns the table with every entry of one state replaced.
func (l *lawyer) with(from, to abi.State) (abi.States, bool) {
	t := append(abi.States(nil), l.t...)
	changed := false
	for i := range l.n {
		if t.At(i) == from {
			t.Put(i, to)
			changed = true
		}
	}
	return t, changed
}

// judge returns the law that the table breaks, in words, or "".
func (l *lawyer) judge() (string, error) {
	span, demand, err := l.scan(l.t)
	if err != nil {
		return "", err
	}
	if int(span.Usable) > l.n {
		return fmt.Sprintf("%d chunks are called usable of %d", span.Usable, l.n), nil
	}
	allowed := abi.Here
	if span.Deferred {
		allowed = abi.Unknown
		if demand.Empty() {
			return "the scan is deferred, but marks no chunk whose state must become known", nil
		}
	}
	for i := demand.Next(0); i >= 0; i = demand.Next(i + 1) {
		if i >= l.n || 1<<l.t.At(i)&allowed == 0 {
			if span.Deferred {
				return fmt.Sprintf("the scan is deferred and marks chunk %d, whose state is known", i), nil
			}
			return fmt.Sprintf("chunk %d is demanded, but its state is neither Hit nor Pending", i), nil
		}
	}
	if text, err := l.unchanged(span, demand, abi.Pending, abi.Hit, "Pending turned into Hit"); text != "" || err != nil {
		return text, err
	}
	if span.Deferred {
		return "", nil
	}
	if text, err := l.unchanged(span, demand, abi.Retry, abi.Miss, "Retry turned into Miss, although the scan was not deferred,"); text != "" || err != nil {
		return text, err
	}
	if t, changed := l.with(abi.Retry, abi.Hit); changed {
		s, _, err := l.scan(t)
		if err != nil {
			return "", err
		}
		if s != span {
			return fmt.Sprintf("the answer hangs on what is not known yet, but the scan is not deferred: with Hits for Retries, %d usable became %d", span.Usable, s.Usable), nil
		}
	}
	return l.monotone(span)
}

// unchanged judges that replacing one state by another changes nothing.
func (l *lawyer) unchanged(span abi.Span, demand abi.Bitmap, from, to abi.State, what string) (string, error) {
	t, changed := l.with(from, to)
	if !changed {
		return "", nil
	}
	s, d, err := l.scan(t)
	if err != nil {
		return "", err
	}
	if s.Deferred != span.Deferred || !s.Deferred && s.Usable != span.Usable || !d.Equal(demand) {
		return fmt.Sprintf("%s changes the answer: %d usable and demand %v became %d and %v",
			what, span.Usable, rangesOf(demand), s.Usable, rangesOf(d)), nil
	}
	return "", nil
}

// monotone judges that one more Hit never makes fewer chunks usable.
func (l *lawyer) monotone(span abi.Span) (string, error) {
	step := max(1, l.n/8)
	for i := 0; i < l.n; i += step {
		if l.t.At(i) != abi.Miss {
			continue
		}
		t := append(abi.States(nil), l.t...)
		t.Put(i, abi.Hit)
		s, _, err := l.scan(t)
		if err != nil {
			return "", err
		}
		if !s.Deferred && s.Usable < span.Usable {
			return fmt.Sprintf("one more Hit, at chunk %d, makes fewer chunks usable: %d became %d", i, span.Usable, s.Usable), nil
		}
	}
	return "", nil
}
