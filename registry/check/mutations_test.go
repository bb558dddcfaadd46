package check_test

import (
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
)

// A mutation is one small mistake, made in some of a rule's functions. A function that is
// nil stays as it was.
type mutation struct {
	name  string
	rules []string // those it is tried on; nil = all
	// reach returns the chunks of the whole prefix that are supplied, so that what it
	// changes does not hang on the range that was asked for.
	reach func(x *mutant, r abi.Round) set
	part  func(x *mutant, r abi.Round, out abi.Bitmap) // Reach, where it must hang on the range
	scan  func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error)
	need  func(x *mutant, r abi.Round, out abi.Bitmap) error
}

// A mutant is an opened spec rule with a mutation.
type mutant struct {
	abi.SpecRule // as it ships
	spec         abi.Spec
	params       []uint64
	m            *mutation
	variants     map[[2]int64]abi.SpecRule
}

// mutated is a spec whose rules are mutants.
type mutated struct {
	abi.Spec
	m *mutation
}

func (s *mutated) Open(p []uint64) (abi.Rule, error) {
	r, err := s.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return &mutant{r.(abi.SpecRule), s.Spec, p, s.m, map[[2]int64]abi.SpecRule{}}, nil
}

// with returns the rule with one parameter changed.
func (x *mutant) with(param int, by int64) abi.SpecRule {
	key := [2]int64{int64(param), by}
	if x.variants[key] == nil {
		p := slices.Clone(x.params)
		p[param] = uint64(int64(p[param]) + by)
		x.variants[key] = must(x.spec, p...)
	}
	return x.variants[key]
}

// whole asks a rule what it supplies of the whole prefix.
func whole(rule abi.Rule, r abi.Round) set {
	r.Lo, r.Hi = 0, uint32(r.StoredTokens/r.ChunkTokens)
	out := abi.NewBitmap(64)
	if rule.Reach(r, out[:abi.BitmapWords(r.Chunks())]) != nil {
		return 0
	}
	return set(out[0])
}

func (x *mutant) Reach(r abi.Round, out abi.Bitmap) error {
	switch {
	case x.m.reach != nil:
		s := x.m.reach(x, r)
		for c := r.Lo; c < r.Hi; c++ {
			if s.has(uint64(c)) {
				out.Set(int(c - r.Lo))
			}
		}
		return nil
	case x.m.part != nil:
		x.m.part(x, r, out)
		return nil
	}
	return x.SpecRule.Reach(r, out)
}

func (x *mutant) Scan(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	if x.m.scan != nil {
		return x.m.scan(x, r, s, d)
	}
	return x.SpecRule.Scan(r, s, d)
}

func (x *mutant) Need(r abi.Round, out abi.Bitmap) error {
	if x.m.need != nil {
		return x.m.need(x, r, out)
	}
	return x.SpecRule.Need(r, out)
}

// first and last return the set without its lowest or highest chunk.
func (s set) withoutFirst() set { return s & (s - 1) }
func (s set) withoutLast() set {
	for c := uint64(64); c > 0; c-- {
		if s.has(c - 1) {
			return s &^ (1 << (c - 1))
		}
	}
	return s
}

// drop replaces a bitmap of at most 64 chunks by what f makes of it.
func drop(b abi.Bitmap, f func(set) set) {
	if len(b) > 0 {
		b[0] = uint64(f(set(b[0])))
	}
}

// mutationsOf returns all mutations of a rule with these parameter values.
func mutationsOf(spec abi.Spec, params []uint64, chunk uint64) (out []*mutation) {
	name := spec.Manifest().Name
	for i := range params {
		out = append(out, shifts(spec, params, i, chunk)...)
	}
	for _, list := range [][]mutation{supplyMutations, demandMutations, needMutations, pairMutations} {
		for i := range list {
			if m := &list[i]; m.rules == nil || slices.Contains(m.rules, name) {
				out = append(out, m)
			}
		}
	}
	return out
}

// shifts returns mutations in which some functions read a parameter as one more or less than
// it is, and single functions as a chunk more or less.
func shifts(spec abi.Spec, params []uint64, i int, chunk uint64) (out []*mutation) {
	p := &spec.Manifest().Params[i]
	for _, by := range []int64{-1, 1, -int64(chunk), int64(chunk)} {
		v := int64(params[i]) + by
		if v < int64(p.Min) || v > int64(p.Max) {
			continue
		}
		for fns := 1; fns < 8; fns++ {
			if by != 1 && by != -1 && fns != 1 && fns != 2 && fns != 4 {
				continue
			}
			m := &mutation{name: fmt.Sprintf("%s%+d in", p.Name, by)}
			if fns&1 != 0 {
				m.name += " Reach"
				m.reach = func(x *mutant, r abi.Round) set { return whole(x.with(i, by), r) }
			}
			if fns&2 != 0 {
				m.name += " Scan"
				m.scan = func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
					return x.with(i, by).Scan(r, s, d)
				}
			}
			if fns&4 != 0 {
				m.name += " Need"
				m.need = func(x *mutant, r abi.Round, out abi.Bitmap) error { return x.with(i, by).Need(r, out) }
			}
			out = append(out, m)
		}
	}
	return out
}

// told returns a Reach that is told another Round.
func told(change func(r *abi.Round)) func(x *mutant, r abi.Round) set {
	return func(x *mutant, r abi.Round) set {
		stored := r.StoredTokens
		change(&r)
		return whole(x.SpecRule, r) & upTo(stored/r.ChunkTokens)
	}
}

// less returns a Reach from whose answer something is taken or to which it is added.
func less(change func(s set, r *abi.Round) set) func(x *mutant, r abi.Round) set {
	return func(x *mutant, r abi.Round) set {
		return change(whole(x.SpecRule, r), &r) & upTo(r.StoredTokens/r.ChunkTokens)
	}
}

var supplyMutations = []mutation{
	{name: "supply lacks its first chunk", reach: less(func(s set, _ *abi.Round) set { return s.withoutFirst() })},
	{name: "supply lacks its last chunk", reach: less(func(s set, _ *abi.Round) set { return s.withoutLast() })},
	{name: "supply lacks the last whole chunk of the prefix", reach: less(func(s set, r *abi.Round) set {
		return s & upTo(max(r.StoredTokens/r.ChunkTokens, 1)-1)
	})},
	{name: "supply lacks every odd chunk", reach: less(func(s set, _ *abi.Round) set { return s & 0x5555555555555555 })},
	{name: "supply has every whole chunk", reach: less(func(_ set, r *abi.Round) set { return ^set(0) })},
	{name: "supply has the chunk before each", reach: less(func(s set, _ *abi.Round) set { return s | s>>1 })},
	{name: "supply has the chunk after each", reach: less(func(s set, _ *abi.Round) set { return s | s<<1 })},
	{name: "supply is one chunk late", reach: less(func(s set, _ *abi.Round) set { return s << 1 })},
	{name: "supply is empty", reach: less(func(set, *abi.Round) set { return 0 })},
	{name: "supply of short prompts is empty", reach: less(func(s set, r *abi.Round) set {
		if r.PromptTokens < 14 {
			return 0
		}
		return s
	})},
	{name: "supply of one prompt length lacks a chunk", reach: less(func(s set, r *abi.Round) set {
		if r.PromptTokens == 23 {
			return s.withoutLast()
		}
		return s
	})},
	{name: "supply ends at the resume point's chunk", reach: less(func(s set, r *abi.Round) set {
		return s & upTo(r.ResumeTokens/r.ChunkTokens)
	})},
	{name: "align ignored", reach: told(func(r *abi.Round) { r.AlignTokens = 0 })},
	{name: "align doubled", reach: told(func(r *abi.Round) { r.AlignTokens *= 2 })},
	{name: "align taken for a chunk", reach: told(func(r *abi.Round) { r.AlignTokens = min(r.AlignTokens, r.ChunkTokens) })},
	{name: "last aligned point forgotten", reach: func(x *mutant, r abi.Round) set {
		plain, less := r, r
		plain.AlignTokens = 0
		less.StoredTokens -= min(r.StoredTokens, max(r.AlignTokens, 1))
		return whole(x.SpecRule, plain) | whole(x.SpecRule, less)
	}},
	{name: "aligned points of the generated text forgotten", reach: func(x *mutant, r abi.Round) set {
		plain, prompt := r, r
		plain.AlignTokens = 0
		prompt.StoredTokens = min(r.StoredTokens, r.PromptTokens)
		return whole(x.SpecRule, plain) | whole(x.SpecRule, prompt)
	}},
	{name: "junction ignored", reach: told(func(r *abi.Round) { r.JunctionTokens = 0 })},
	{name: "junction taken for the resume point", reach: told(func(r *abi.Round) {
		if r.JunctionTokens > 0 {
			r.ResumeTokens, r.JunctionTokens = r.JunctionTokens, 0
		}
	})},
	{name: "junction one token early", reach: told(func(r *abi.Round) { r.JunctionTokens -= min(1, r.JunctionTokens) })},
	{name: "resume point ignored", reach: told(func(r *abi.Round) { r.ResumeTokens = 0 })},
	{name: "resume point one token early", reach: told(func(r *abi.Round) { r.ResumeTokens -= min(1, r.ResumeTokens) })},
	{name: "resume point one token late", reach: told(func(r *abi.Round) { r.ResumeTokens = min(r.ResumeTokens+1, r.StoredTokens) })},
	{name: "resume point one chunk early", reach: told(func(r *abi.Round) { r.ResumeTokens -= min(r.ChunkTokens, r.ResumeTokens) })},
	{name: "resume point floored to its chunk", reach: told(func(r *abi.Round) { r.ResumeTokens -= r.ResumeTokens % r.ChunkTokens })},
	{name: "resume point taken for the prompt's end", reach: told(func(r *abi.Round) { r.ResumeTokens = r.PromptTokens - 1 })},
	{name: "resume point taken for the stored end", reach: told(func(r *abi.Round) { r.ResumeTokens = r.StoredTokens })},
	{name: "cap ignored", reach: told(func(r *abi.Round) { r.StoredTokens = max(r.StoredTokens, r.PromptTokens) })},
	{name: "text end forgotten: nothing more is stored", reach: less(func(s set, r *abi.Round) set {
		if r.StoredTokens > r.PromptTokens {
			return 0
		}
		return s
	})},
	{name: "text end forgotten: the prompt's end is taken", reach: told(func(r *abi.Round) { r.StoredTokens = min(r.StoredTokens, r.PromptTokens) })},
	{name: "generated text taken for prompt", reach: told(func(r *abi.Round) { r.PromptTokens = max(r.PromptTokens, r.StoredTokens) })},
	{name: "stored length one token short", reach: told(func(r *abi.Round) { r.StoredTokens -= min(1, r.StoredTokens) })},
	{name: "first chunk of the range dropped", part: func(x *mutant, r abi.Round, out abi.Bitmap) {
		if x.SpecRule.Reach(r, out) == nil && r.Hi > r.Lo {
			out.Unset(0)
		}
	}},
	{name: "chunks counted from the range's start", part: func(x *mutant, r abi.Round, out abi.Bitmap) {
		s := whole(x.SpecRule, r)
		for c := range r.Hi - r.Lo {
			if s.has(uint64(c)) {
				out.Set(int(c))
			}
		}
	}},
}

// as returns a Scan that takes one state for another.
func as(from, to abi.State) func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	return func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		return x.SpecRule.Scan(r, become(s, r.Chunks(), from, to), d)
	}
}

// after returns a Scan whose answer is changed where it has one.
func after(change func(r *abi.Round, s abi.States, span *abi.Span, d abi.Bitmap)) func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	return func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		span, err := x.SpecRule.Scan(r, s, d)
		if err == nil && !span.Deferred {
			change(&r, s, &span, d)
		}
		return span, err
	}
}

// before returns a Scan that is told another Round of the same range.
func before(change func(r *abi.Round)) func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	return func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		change(&r)
		return x.SpecRule.Scan(r, s, d)
	}
}

// put returns the table with one entry changed.
func put(s abi.States, n, i int, state abi.State) abi.States {
	t := append(abi.States(nil), s...)
	if i >= 0 && i < n {
		t.Put(i, state)
	}
	return t
}

var demandMutations = []mutation{
	{name: "Retry used as Hit", scan: as(abi.Retry, abi.Hit)},
	{name: "Retry used as Miss", scan: as(abi.Retry, abi.Miss)},
	{name: "Retry used as Pending", scan: as(abi.Retry, abi.Pending)},
	{name: "Pending used as Miss", scan: as(abi.Pending, abi.Miss)},
	{name: "Pending used as Retry", scan: as(abi.Pending, abi.Retry)},
	{name: "Pending used as Hit", scan: as(abi.Pending, abi.Hit)},
	{name: "Miss used as Hit", scan: as(abi.Miss, abi.Hit)},
	{name: "Miss used as Retry", scan: as(abi.Miss, abi.Retry)},
	{name: "Hit used as Pending", scan: as(abi.Hit, abi.Pending)},
	{name: "Hit used as Miss", scan: as(abi.Hit, abi.Miss)},
	{name: "one usable less", scan: after(func(_ *abi.Round, _ abi.States, span *abi.Span, _ abi.Bitmap) { span.Usable -= min(span.Usable, 1) })},
	{name: "one usable less, and its chunk not fetched", scan: after(func(_ *abi.Round, _ abi.States, span *abi.Span, d abi.Bitmap) {
		if span.Usable > 0 {
			span.Usable--
			d.Unset(int(span.Usable))
		}
	})},
	{name: "one usable more", scan: after(func(r *abi.Round, _ abi.States, span *abi.Span, _ abi.Bitmap) {
		span.Usable = min(span.Usable+1, uint32(r.Chunks()))
	})},
	{name: "usable beyond the range", scan: after(func(_ *abi.Round, _ abi.States, span *abi.Span, _ abi.Bitmap) { span.Usable++ })},
	{name: "usable counted from the prompt's start", scan: after(func(r *abi.Round, _ abi.States, span *abi.Span, _ abi.Bitmap) {
		if span.Usable > 0 {
			span.Usable = min(span.Usable+r.Lo, uint32(r.Chunks()))
		}
	})},
	{name: "all usable whatever is missing", scan: after(func(r *abi.Round, _ abi.States, span *abi.Span, _ abi.Bitmap) { span.Usable = uint32(r.Chunks()) })},
	{name: "nothing usable when all is here", scan: after(func(r *abi.Round, s abi.States, span *abi.Span, d abi.Bitmap) {
		if n := r.Chunks(); n > 2 && s.First(abi.NotHere, 0, n) == n {
			span.Usable = 0
			d.Zero()
		}
	})},
	{name: "usable floored to align", scan: after(func(r *abi.Round, _ abi.States, span *abi.Span, d abi.Bitmap) {
		if end := uint64(r.Lo) + uint64(span.Usable); r.AlignTokens > 0 {
			end -= end % (r.AlignTokens / r.ChunkTokens)
			span.Usable = uint32(max(end, uint64(r.Lo)) - uint64(r.Lo))
			d.UnsetRange(int(span.Usable), r.Chunks())
		}
	})},
	{name: "usable only when the whole range is", scan: after(func(r *abi.Round, _ abi.States, span *abi.Span, d abi.Bitmap) {
		if int(span.Usable) < r.Chunks() {
			span.Usable = 0
			d.Zero()
		}
	})},
	{name: "demand lacks its first chunk", scan: after(func(_ *abi.Round, _ abi.States, _ *abi.Span, d abi.Bitmap) {
		if i := d.Next(0); i >= 0 {
			d.Unset(i)
		}
	})},
	{name: "demand lacks its last chunk", scan: after(func(_ *abi.Round, _ abi.States, _ *abi.Span, d abi.Bitmap) { drop(d, set.withoutLast) })},
	{name: "demand is empty", scan: after(func(_ *abi.Round, _ abi.States, _ *abi.Span, d abi.Bitmap) { d.Zero() })},
	{name: "demand has the chunk before", scan: after(func(_ *abi.Round, s abi.States, span *abi.Span, d abi.Bitmap) {
		if i := d.Next(0) - 1; i >= 0 && 1<<s.At(i)&abi.Here != 0 {
			d.Set(i)
		}
	})},
	{name: "demand has the chunk before, here or not", scan: after(func(_ *abi.Round, _ abi.States, _ *abi.Span, d abi.Bitmap) {
		if i := d.Next(0) - 1; i >= 0 {
			d.Set(i)
		}
	})},
	{name: "demand has all that is here below its end", scan: after(func(_ *abi.Round, s abi.States, span *abi.Span, d abi.Bitmap) {
		s.Mark(abi.Here, 0, int(span.Usable), d)
	})},
	{name: "demand has all that is here", scan: after(func(r *abi.Round, s abi.States, _ *abi.Span, d abi.Bitmap) { s.Mark(abi.Here, 0, r.Chunks(), d) })},
	{name: "demand lacks what is pending", scan: after(func(r *abi.Round, s abi.States, _ *abi.Span, d abi.Bitmap) {
		for i := range r.Chunks() {
			if s.At(i) == abi.Pending {
				d.Unset(i)
			}
		}
	})},
	{name: "demand lacks the chunk that the local prefix ends in", scan: after(func(r *abi.Round, _ abi.States, _ *abi.Span, d abi.Bitmap) {
		if r.LocalTokens%r.ChunkTokens != 0 && r.Chunks() > 0 {
			d.Unset(0)
		}
	})},
	{name: "greedy with a local prefix", scan: after(func(r *abi.Round, s abi.States, span *abi.Span, d abi.Bitmap) {
		if r.LocalTokens > 0 && span.Usable > 0 {
			s.Mark(abi.Here, 0, int(span.Usable), d)
		}
	})},
	{name: "local prefix ignored", scan: before(func(r *abi.Round) { r.LocalTokens = 0 })},
	{name: "bound ignored", scan: before(func(r *abi.Round) { r.BoundTokens = uint64(r.Hi) * r.ChunkTokens })},
	{name: "bound one token early", scan: before(func(r *abi.Round) { r.BoundTokens -= min(1, r.BoundTokens) })},
	{name: "bound taken for the prompt's end", scan: before(func(r *abi.Round) { r.BoundTokens = r.PromptTokens })},
	{name: "never resumed inside a chunk", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		if r.BoundTokens%r.ChunkTokens != 0 && r.Hi > r.Lo {
			r.Hi--
			r.BoundTokens = uint64(r.Hi) * r.ChunkTokens
		}
		return x.SpecRule.Scan(r, s, d)
	}},
	{name: "first chunk taken for a Hit", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		span, err := x.SpecRule.Scan(r, put(s, r.Chunks(), 0, abi.Hit), d)
		if r.Chunks() > 0 && 1<<s.At(0)&abi.Here == 0 {
			d.Unset(0)
		}
		return span, err
	}},
	{name: "last chunk taken for a Hit", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		n := r.Chunks()
		span, err := x.SpecRule.Scan(r, put(s, n, n-1, abi.Hit), d)
		if n > 0 && 1<<s.At(n-1)&abi.Here == 0 {
			d.Unset(n - 1)
		}
		return span, err
	}},
	{name: "first chunk taken for a Miss", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		return x.SpecRule.Scan(r, put(s, r.Chunks(), 0, abi.Miss), d)
	}},
	{name: "deferred while anything is unknown", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		if n := r.Chunks(); s.First(abi.Unknown, 0, n) < n {
			s.Mark(abi.Unknown, 0, n, d)
			return abi.Span{Deferred: true}, nil
		}
		return x.SpecRule.Scan(r, s, d)
	}},
	{name: "deferred marks all", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		span, err := x.SpecRule.Scan(r, s, d)
		if span.Deferred {
			d.SetRange(0, r.Chunks())
		}
		return span, err
	}},
	{name: "deferred marks nothing", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		span, err := x.SpecRule.Scan(r, s, d)
		if span.Deferred {
			d.Zero()
		}
		return span, err
	}},
	{name: "deferred while anything is pending", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		if n := r.Chunks(); s.First(1<<abi.Pending, 0, n) < n {
			s.Mark(1<<abi.Pending, 0, n, d)
			return abi.Span{Deferred: true}, nil
		}
		return x.SpecRule.Scan(r, s, d)
	}},
	{name: "the first state and not the last", rules: []string{"state"}, scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		i := s.First(abi.Here, 0, r.Chunks())
		if i == r.Chunks() || s.First(abi.Unknown, 0, r.Chunks()) < r.Chunks() {
			return x.SpecRule.Scan(r, s, d)
		}
		if uint64(r.Lo+uint32(i)+1)*r.ChunkTokens > r.BoundTokens {
			return abi.Span{}, nil
		}
		d.Set(i)
		return abi.Span{Usable: uint32(i + 1)}, nil
	}},
	{name: "scanned as a prefix", rules: []string{"window", "sink", "chunked", "state", "latent"}, scan: prefixScan},
	{name: "scanned as a window of 5", rules: []string{"full", "hidden", "latent", "rswa", "sink", "chunked", "state"}, scan: func(_ *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		return must(specs.Window(), 5, 0).Scan(r, s, d)
	}},
}

func prefixScan(_ *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	return must(specs.Full()).Scan(r, s, d)
}

func everyNeed(_ *mutant, r abi.Round, out abi.Bitmap) error { return must(specs.Full()).Need(r, out) }

// knowing returns a Need whose answer is changed where it has one.
func knowing(change func(r *abi.Round, out abi.Bitmap)) func(x *mutant, r abi.Round, out abi.Bitmap) error {
	return func(x *mutant, r abi.Round, out abi.Bitmap) error {
		err := x.SpecRule.Need(r, out)
		if err == nil && len(out) > 0 {
			change(&r, out)
		}
		return err
	}
}

// at returns a Need that is told another Round.
func asked(change func(r *abi.Round)) func(x *mutant, r abi.Round, out abi.Bitmap) error {
	return func(x *mutant, r abi.Round, out abi.Bitmap) error {
		change(&r)
		return x.SpecRule.Need(r, out)
	}
}

var needMutations = []mutation{
	{name: "need lacks its first chunk", need: knowing(func(_ *abi.Round, out abi.Bitmap) { drop(out, set.withoutFirst) })},
	{name: "need lacks its last chunk", need: knowing(func(_ *abi.Round, out abi.Bitmap) { drop(out, set.withoutLast) })},
	{name: "need has the chunk before", need: knowing(func(_ *abi.Round, out abi.Bitmap) { out[0] |= out[0] >> 1 })},
	{name: "need has every chunk", need: everyNeed},
	{name: "need is empty", need: knowing(func(_ *abi.Round, out abi.Bitmap) { out.Zero() })},
	{name: "need in blocks lacks its first", need: knowing(func(r *abi.Round, out abi.Bitmap) {
		if r.ChunkTokens == r.BlockTokens {
			drop(out, set.withoutFirst)
		}
	})},
	{name: "need in blocks has every one", need: knowing(func(r *abi.Round, out abi.Bitmap) {
		if r.ChunkTokens == r.BlockTokens {
			out.SetRange(0, int(min(uint64(r.Hi), (r.ResumeTokens+r.ChunkTokens-1)/r.ChunkTokens)))
		}
	})},
	{name: "need resumes one token early", need: asked(func(r *abi.Round) { r.ResumeTokens -= min(1, r.ResumeTokens) })},
	{name: "need resumes one token late", need: asked(func(r *abi.Round) { r.ResumeTokens++ })},
	{name: "need resumes at the chunk's start", need: asked(func(r *abi.Round) { r.ResumeTokens -= r.ResumeTokens % r.ChunkTokens })},
	{name: "need takes the text for the prompt", need: asked(func(r *abi.Round) { r.PromptTokens = r.ResumeTokens })},
	{name: "need takes the prompt for a short one", need: asked(func(r *abi.Round) { r.PromptTokens = min(r.PromptTokens, 3) })},
	{name: "need can resume nowhere", need: func(*mutant, abi.Round, abi.Bitmap) error { return abi.ErrNoResume }},
	{name: "need can resume at chunk ends only", need: func(x *mutant, r abi.Round, out abi.Bitmap) error {
		if r.ResumeTokens%r.ChunkTokens != 0 {
			return abi.ErrNoResume
		}
		return x.SpecRule.Need(r, out)
	}},
	{name: "need can resume at even tokens only", need: func(x *mutant, r abi.Round, out abi.Bitmap) error {
		if r.ResumeTokens%2 != 0 {
			return abi.ErrNoResume
		}
		return x.SpecRule.Need(r, out)
	}},
	{name: "need can resume anywhere", rules: []string{"latent", "state"}, need: anywhere},
}

// anywhere is a Need that forgets where there is nothing to resume.
func anywhere(x *mutant, r abi.Round, out abi.Bitmap) error {
	if x.SpecRule.Need(r, out) == nil {
		return nil
	}
	if x.spec.Manifest().Name == "latent" {
		return must(specs.Full()).Need(r, out)
	}
	out.Set(int((r.ResumeTokens - 1) / r.ChunkTokens))
	return nil
}

// pairMutations make one mistake in two functions, which then agree with each other.
var pairMutations = []mutation{
	{name: "resumed anywhere, and Need agrees", rules: []string{"latent"}, scan: prefixScan, need: anywhere},
	{name: "resumed inside the last chunk, and Need agrees", rules: []string{"state"}, need: anywhere, scan: func(_ *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		n := r.Chunks()
		at := s.Last(abi.Here|abi.Unknown, 0, n)
		if at < 0 {
			return abi.Span{}, nil
		}
		d.Set(at)
		return abi.Span{Usable: uint32(at + 1), Deferred: s.At(at) == abi.Retry}, nil
	}},
	{name: "taken for full attention in Scan and Need", rules: []string{"window", "sink", "chunked", "state"}, scan: prefixScan, need: everyNeed},
	{name: "taken for full attention in Reach and Scan", rules: []string{"window", "sink", "chunked", "latent", "rswa"}, scan: prefixScan,
		reach: func(_ *mutant, r abi.Round) set { return whole(must(specs.Full()), r) }},
	{name: "stores and fetches a chunk less", reach: less(func(s set, _ *abi.Round) set { return s.withoutFirst() }),
		scan: after(func(_ *abi.Round, _ abi.States, _ *abi.Span, d abi.Bitmap) { drop(d, set.withoutFirst) })},
	{name: "stores and fetches a chunk more", reach: less(func(s set, _ *abi.Round) set { return s | s>>1 }),
		scan: after(func(_ *abi.Round, s abi.States, _ *abi.Span, d abi.Bitmap) {
			if i := d.Next(0) - 1; i >= 0 && 1<<s.At(i)&abi.Here != 0 {
				d.Set(i)
			}
		})},
	{name: "no resume inside a chunk, in Scan and Need", scan: func(x *mutant, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
		if r.BoundTokens%r.ChunkTokens != 0 && r.Hi > r.Lo {
			r.Hi--
			r.BoundTokens = uint64(r.Hi) * r.ChunkTokens
		}
		return x.SpecRule.Scan(r, s, d)
	}, need: func(x *mutant, r abi.Round, out abi.Bitmap) error {
		if r.ChunkTokens != r.BlockTokens && r.ResumeTokens%r.ChunkTokens != 0 {
			return abi.ErrNoResume
		}
		return x.SpecRule.Need(r, out)
	}},
}
