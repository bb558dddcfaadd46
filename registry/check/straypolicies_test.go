package check_test

import "github.com/tierd/tierd/abi"

// A stray is one small mistake in a policy. A function that is nil stays as it was.
type stray struct {
	name  string
	reach func(in abi.Rule, r abi.Round) set
	scan  func(in abi.Rule, r abi.Round, s abi.States) (abi.Span, error)
}

// A strayed is an opened policy with a mistake.
type strayed struct {
	abi.Rule // as it ships
	m        *stray
}

type strayedSpec struct {
	abi.Spec
	m *stray
}

func (s *strayedSpec) Open(p []uint64) (abi.Rule, error) {
	r, err := s.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return &strayed{r, s.m}, nil
}

func (x *strayed) Reach(r abi.Round, out abi.Bitmap) error {
	if x.m.reach == nil {
		return x.Rule.Reach(r, out)
	}
	s := x.m.reach(x.Rule, r)
	for c := r.Lo; c < r.Hi; c++ {
		if s.has(uint64(c)) {
			out.Set(int(c - r.Lo))
		}
	}
	return nil
}

func (x *strayed) Scan(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	if x.m.scan == nil {
		return x.Rule.Scan(r, s, d)
	}
	return x.m.scan(x.Rule, r, s)
}

// besidePolicy asks the policy that ships and the one with a mistake the same, notes whether
// they differ, and answers as the latter.
type besidePolicy struct {
	ships   abi.Rule
	strayed abi.Rule
	changed *bool
}

func (b *besidePolicy) Reach(r abi.Round, out abi.Bitmap) error {
	other := abi.NewBitmap(r.Chunks())
	was := b.ships.Reach(r, other)
	err := b.strayed.Reach(r, out)
	*b.changed = *b.changed || (was == nil) != (err == nil) || !other.Equal(out)
	return err
}

func (b *besidePolicy) Scan(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	was, _ := b.ships.Scan(r, s, abi.NewBitmap(r.Chunks()))
	span, err := b.strayed.Scan(r, s, d)
	*b.changed = *b.changed || was != span
	return span, err
}

// admits asks a policy what it lets in of the whole prefix.
func admits(in abi.Rule, r abi.Round) set { return whole(in, r) }

// letting returns a Reach whose answer is changed.
func letting(change func(s set, r *abi.Round) set) func(in abi.Rule, r abi.Round) set {
	return func(in abi.Rule, r abi.Round) set {
		return change(admits(in, r), &r) & upTo(r.StoredTokens/r.ChunkTokens)
	}
}

// toldPolicy returns a Reach that is told another Round.
func toldPolicy(change func(r *abi.Round)) func(in abi.Rule, r abi.Round) set {
	return func(in abi.Rule, r abi.Round) set {
		stored := r.StoredTokens
		change(&r)
		return admits(in, r) & upTo(stored/r.ChunkTokens)
	}
}

// ranging returns a Scan whose range is changed.
func ranging(change func(n uint32, r *abi.Round, s abi.States) abi.Span) func(in abi.Rule, r abi.Round, s abi.States) (abi.Span, error) {
	return func(in abi.Rule, r abi.Round, s abi.States) (abi.Span, error) {
		span, err := in.Scan(r, s, abi.NewBitmap(r.Chunks()))
		if err != nil {
			return span, err
		}
		return change(span.Usable, &r, s), nil
	}
}

var strays = []stray{
	{name: "admits no first chunk", reach: letting(func(s set, _ *abi.Round) set { return s.withoutFirst() })},
	{name: "admits no last chunk", reach: letting(func(s set, _ *abi.Round) set { return s.withoutLast() })},
	{name: "admits nothing", reach: letting(func(set, *abi.Round) set { return 0 })},
	{name: "admits everything", reach: letting(func(set, *abi.Round) set { return ^set(0) })},
	{name: "admits only the prompt", reach: letting(func(s set, r *abi.Round) set { return s & upTo(r.PromptTokens/r.ChunkTokens) })},
	{name: "admits only generated text", reach: letting(func(s set, r *abi.Round) set { return s.from(r.PromptTokens / r.ChunkTokens) })},
	{name: "admits what its tier does not hold", reach: letting(func(s set, r *abi.Round) set { return s.from(r.ResidentTokens / r.ChunkTokens) })},
	{name: "admits what its tier does not hold, rounded up", reach: letting(func(s set, r *abi.Round) set {
		return s.from((r.ResidentTokens + r.ChunkTokens - 1) / r.ChunkTokens)
	})},
	{name: "admits nothing when its tier holds the prompt", reach: letting(func(s set, r *abi.Round) set {
		if r.ResidentTokens >= r.PromptTokens {
			return 0
		}
		return s
	})},
	{name: "admits nothing when its tier holds half", reach: letting(func(s set, r *abi.Round) set {
		if r.ResidentTokens*2 == r.PromptTokens {
			return 0
		}
		return s
	})},
	{name: "admits the first offer only", reach: letting(func(s set, r *abi.Round) set {
		if r.Offers > 0 {
			return 0
		}
		return s
	})},
	{name: "admits no third offer", reach: letting(func(s set, r *abi.Round) set {
		if r.Offers == 3 {
			return 0
		}
		return s
	})},
	{name: "is told that its tier holds nothing", reach: toldPolicy(func(r *abi.Round) { r.ResidentTokens = 0 })},
	{name: "is told one offer less", reach: toldPolicy(func(r *abi.Round) { r.Offers -= min(r.Offers, 1) })},
	{name: "is told one offer more", reach: toldPolicy(func(r *abi.Round) { r.Offers++ })},
	{name: "is told the text for the prompt", reach: toldPolicy(func(r *abi.Round) { r.PromptTokens = max(r.PromptTokens, r.StoredTokens) })},
	{name: "is told one token of the prompt less", reach: toldPolicy(func(r *abi.Round) { r.PromptTokens-- })},
	{name: "forgets the text's end", reach: letting(func(s set, r *abi.Round) set {
		if r.StoredTokens > r.PromptTokens {
			return 0
		}
		return s
	})},
	{name: "admits nothing of short prompts", reach: letting(func(s set, r *abi.Round) set {
		if r.PromptTokens < 14 {
			return 0
		}
		return s
	})},
	{name: "admits nothing once the text is long", reach: letting(func(s set, r *abi.Round) set {
		if r.StoredTokens > 16 {
			return 0
		}
		return s
	})},
	{name: "range is one chunk short", scan: ranging(func(n uint32, _ *abi.Round, _ abi.States) abi.Span { return abi.Span{Usable: n - min(n, 1)} })},
	{name: "range is nothing", scan: ranging(func(uint32, *abi.Round, abi.States) abi.Span { return abi.Span{} })},
	{name: "range is everything", scan: ranging(func(_ uint32, r *abi.Round, _ abi.States) abi.Span { return abi.Span{Usable: r.Hi - r.Lo} })},
	{name: "range is beyond the chunks", scan: ranging(func(n uint32, r *abi.Round, _ abi.States) abi.Span { return abi.Span{Usable: r.Hi - r.Lo + 1} })},
	{name: "range is deferred", scan: ranging(func(n uint32, _ *abi.Round, _ abi.States) abi.Span { return abi.Span{Usable: n, Deferred: true} })},
	{name: "range ends before what is pending", scan: ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
		return abi.Span{Usable: min(n, uint32(s.First(1<<abi.Pending, 0, r.Chunks())))}
	})},
	{name: "range ends before what is unknown", scan: ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
		return abi.Span{Usable: min(n, uint32(s.First(abi.Unknown, 0, r.Chunks())))}
	})},
	{name: "range is deferred while something is unknown", scan: ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
		return abi.Span{Usable: n, Deferred: s.First(abi.Unknown, 0, r.Chunks()) < r.Chunks()}
	})},
	{name: "range ends before what is not here", scan: ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
		return abi.Span{Usable: min(n, uint32(s.First(abi.NotHere, 0, r.Chunks())))}
	})},
	{name: "range is nothing when all is here", scan: ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
		if s.First(abi.NotHere, 0, r.Chunks()) == r.Chunks() {
			n = 0
		}
		return abi.Span{Usable: n}
	})},
	{name: "range ends at the last hit", scan: ranging(func(n uint32, r *abi.Round, s abi.States) abi.Span {
		return abi.Span{Usable: min(n, uint32(s.Last(1<<abi.Hit, 0, r.Chunks())+1))}
	})},
	{name: "range ends at the bound's chunk", scan: ranging(func(n uint32, r *abi.Round, _ abi.States) abi.Span {
		return abi.Span{Usable: min(n, uint32(r.BoundTokens/r.ChunkTokens)-min(r.Lo, uint32(r.BoundTokens/r.ChunkTokens)))}
	})},
	{name: "range is nothing with a local prefix", scan: ranging(func(n uint32, r *abi.Round, _ abi.States) abi.Span {
		if r.LocalTokens > 0 {
			n = 0
		}
		return abi.Span{Usable: n}
	})},
}
