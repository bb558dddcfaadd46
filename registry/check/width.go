package check

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// ExtraParam is the parameter by which a rule claims width: how many tokens before those
// that attention reads it fetches and keeps as well. Its unit is tokens; the shipped window
// has it. A rule without it claims none.
const ExtraParam = "extra"

// A Width says how much of a group is fetched and stored beyond what attention reads, over
// the edge lengths of the domain. Chunks are counted once for each case.
type Width struct {
	Group string `json:"group"`
	// ChunkBytes is the size of one chunk; 0 = not known.
	ChunkBytes uint64 `json:"chunk_bytes,omitempty"`
	// ClaimTokens is the rule's claim; see [ExtraParam].
	ClaimTokens uint64 `json:"claim_tokens,omitempty"`
	// Fetched chunks, and those of them that attention does not read from where the
	// consumer resumes on.
	Fetched uint64 `json:"fetched"`
	Unread  uint64 `json:"unread"`
	// UnreadMost is the most chunks that one consumer fetches and attention does not read;
	// it is first met at these lengths.
	UnreadMost   uint64 `json:"unread_most"`
	UnreadPrompt uint64 `json:"unread_prompt_tokens,omitempty"`
	UnreadLocal  uint64 `json:"unread_local_tokens,omitempty"`
	// Stored chunks, and those of them that nobody fetches: no consumer of the same prompt,
	// of the next turn, of a prompt that shares the prefix up to the junction or to an
	// aligned point. What attention never forgets, every longer prompt fetches.
	Stored uint64 `json:"stored"`
	Idle   uint64 `json:"idle"`
	// IdleMost is the most such chunks of one request; it is first met at this length.
	IdleMost   uint64 `json:"idle_most"`
	IdlePrompt uint64 `json:"idle_prompt_tokens,omitempty"`
	// Unbounded says why the group's width, or what it stores, is only reported.
	Unbounded string `json:"unbounded,omitempty"`

	saved bool // the engine saves a state at every chunk
}

// String says the width in a line.
func (x *Width) String() string {
	s := x.Group + ": all that is fetched is read"
	if x.Unread > 0 {
		s = fmt.Sprintf("%s: %.2g %% of what is fetched is not read, at most %s at once, first by a prompt of %d tokens",
			x.Group, 100*float64(x.Unread)/float64(x.Fetched), x.size(x.UnreadMost), x.UnreadPrompt)
	}
	if x.Idle > 0 {
		s += fmt.Sprintf("; %.2g %% of what is stored is fetched by nobody, at most %s of one request, first of a prompt of %d tokens",
			100*float64(x.Idle)/float64(x.Stored), x.size(x.IdleMost), x.IdlePrompt)
	} else {
		s += "; all that is stored is fetched by somebody"
	}
	if x.ClaimTokens > 0 {
		s += fmt.Sprintf(" (the rule claims %d extra tokens)", x.ClaimTokens)
	}
	if x.Unbounded != "" {
		s += fmt.Sprintf(" (reported only: %s)", x.Unbounded)
	}
	return s
}

func (x *Width) size(chunks uint64) string {
	s := fmt.Sprintf("%d chunks", chunks)
	if chunks == 1 {
		s = "1 chunk"
	}
	if chunks > 0 && x.ChunkBytes > 0 {
		s += fmt.Sprintf(" (%d bytes)", chunks*x.ChunkBytes)
	}
	return s
}

// add merges what another worker has seen.
func (x *Width) add(y *Width) {
	x.Fetched, x.Unread, x.Stored, x.Idle = x.Fetched+y.Fetched, x.Unread+y.Unread, x.Stored+y.Stored, x.Idle+y.Idle
	x.saved = x.saved || y.saved
	if y.UnreadMost > 0 {
		x.unread(y.UnreadMost, y.UnreadPrompt, y.UnreadLocal)
	}
	if y.IdleMost > 0 {
		x.idle(y.IdleMost, y.IdlePrompt)
	}
}

func (x *Width) unread(n, prompt, local uint64) {
	at, was := [2]uint64{prompt, local}, [2]uint64{x.UnreadPrompt, x.UnreadLocal}
	if n > x.UnreadMost || n == x.UnreadMost && (at[0] < was[0] || at[0] == was[0] && at[1] < was[1]) {
		x.UnreadMost, x.UnreadPrompt, x.UnreadLocal = n, prompt, local
	}
}

func (x *Width) idle(n, prompt uint64) {
	if n > x.IdleMost || n == x.IdleMost && prompt < x.IdlePrompt {
		x.IdleMost, x.IdlePrompt = n, prompt
	}
}

// claim returns the tokens that a rule claims beyond need.
func (c *Claim) claim() uint64 {
	if i := c.Manifest.Param(ExtraParam); i >= 0 && c.Manifest.Params[i].Unit == "tokens" {
		return c.Params[i]
	}
	return 0
}

// forgets reports whether a query far enough on no longer reads an old key. What is never
// forgotten is fetched again by every longer prompt.
func (c *Claim) forgets() bool {
	switch c.Manifest.Mask {
	case abi.MaskWindow, abi.MaskChunk, abi.MaskSinkWindow, abi.MaskState:
		return true
	}
	return false
}

// newWidths returns a worker's empty reports.
func (r *run) newWidths(m *plan.Model) []Width {
	out := make([]Width, len(m.Groups))
	for g := range out {
		c := &r.subject.Groups[g]
		out[g] = Width{Group: m.Groups[g].Name, ChunkBytes: c.ChunkBytes, ClaimTokens: c.claim()}
		if c.Manifest.Mask == abi.MaskUnverified {
			out[g].Unbounded = "its need is taken on trust"
		}
	}
	return out
}

// everyCaseMax is the longest prompt, and the longest text, of which what longer ones are
// sampled for is tried in full: each local prefix, junction, cap, shared prefix, end of the
// text, run of chunks in the own tier, and arrival with two chunks missing.
const everyCaseMax = 32

// width judges what is fetched and stored beyond what attention reads: no more than the
// rule claims. A policy may narrow both, which widens nothing.
func (w *worker) width(prompt uint64) (*Counterexample, error) {
	for _, local := range w.locals(prompt) {
		if ce, err := w.fetched(plan.Ask{PromptTokens: prompt, LocalTokens: local}, true); ce != nil || err != nil {
			return ce, err
		}
	}
	draw := rng(w.options.Seed ^ prompt<<5)
	for _, junction := range [...]uint64{0, 1 + draw.below(prompt)} {
		if ce, err := w.stored(plan.Start{PromptTokens: prompt, JunctionTokens: junction}, prompt, true, &draw); ce != nil || err != nil {
			return ce, err
		}
	}
	if prompt <= everyCaseMax {
		for junction := uint64(1); junction <= prompt; junction++ {
			if ce, err := w.stored(plan.Start{PromptTokens: prompt, JunctionTokens: junction}, prompt, false, &draw); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return w.othersFetched(prompt, &draw)
}

// othersFetched judges consumers beside those that are counted: with other local prefixes,
// a load cap, an own tier, and after a partial arrival.
func (w *worker) othersFetched(prompt uint64, draw *rng) (*Counterexample, error) {
	a := w.model().AlignTokens
	asks := []plan.Ask{{PromptTokens: prompt, LocalTokens: draw.below(prompt)}, {PromptTokens: prompt, LocalTokens: prompt - 1}}
	if a > 0 {
		asks = append(asks, plan.Ask{PromptTokens: prompt, LocalTokens: draw.below(prompt), LoadCapTokens: draw.below(prompt) / a * a})
	}
	if prompt <= everyCaseMax {
		for local := range prompt {
			asks = append(asks, plan.Ask{PromptTokens: prompt, LocalTokens: local})
			for limit := a; a > 0 && limit < prompt; limit += a {
				asks = append(asks, plan.Ask{PromptTokens: prompt, LocalTokens: local, LoadCapTokens: limit})
			}
		}
	}
	for _, ask := range asks {
		if ce, err := w.fetched(ask, false); ce != nil || err != nil {
			return ce, err
		}
	}
	ce, err := w.eachOwn(prompt, draw, func(local uint64, own []abi.States) (*Counterexample, error) {
		ask := plan.Ask{PromptTokens: prompt, LocalTokens: local}
		pl, err := w.planner.Eager(ask, own)
		if err != nil {
			return w.broken("width", prompt, err)
		}
		return w.wide(ask, pl, own, false)
	})
	if ce != nil || err != nil {
		return ce, err
	}
	return w.eachArrival(prompt, draw, func(local uint64, tables []abi.States) (*Counterexample, error) {
		ask := plan.Ask{PromptTokens: prompt, LocalTokens: local}
		pl, err := w.planner.Settled(ask, tables)
		if err != nil {
			return w.broken("width", prompt, err)
		}
		return w.wide(ask, pl, tables, false)
	})
}

// widthOfTexts judges what is stored beyond need of a text that goes on after its prompt: for
// a few ends, and for a short prompt all of them.
func (w *worker) widthOfTexts(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt<<6)
	texts := w.texts(prompt, &draw)[1:]
	for text := prompt + 1; text <= min(everyCaseMax, w.subject.MaxTokens); text++ {
		texts = append(texts, text)
	}
	for _, text := range texts {
		for _, junction := range [...]uint64{0, 1 + draw.below(prompt)} {
			if ce, err := w.stored(plan.Start{PromptTokens: prompt, JunctionTokens: junction}, text, false, &draw); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// fetched judges the demand of a consumer of a cold producer.
func (w *worker) fetched(ask plan.Ask, counted bool) (*Counterexample, error) {
	pl, err := w.planner.Eager(ask, nil)
	if err != nil {
		return w.broken("width", ask.PromptTokens, err)
	}
	return w.wide(ask, pl, nil, counted)
}

// wide judges one consumer's demand against its need, and counts it for the report.
func (w *worker) wide(ask plan.Ask, pl plan.Plan, states []abi.States, counted bool) (*Counterexample, error) {
	prompt, local, n := ask.PromptTokens, ask.LocalTokens, pl.ResumeTokens
	if pl.Deferred || n <= local {
		return nil, nil // the relations before have judged such plans
	}
	for g := range pl.Demand {
		x := &w.widths[g]
		if !counted && x.Unbounded != "" {
			continue
		}
		need, err := w.read(g, w.model().Groups[g].ChunkTokens, prompt, n)
		if err != nil {
			return w.broken("width", prompt, err)
		}
		w.count("width")
		surplus := minus(pl.Demand[g], need)
		unread := uint64(surplus.Count())
		if counted {
			x.Fetched += uint64(pl.Demand[g].Count())
			x.Unread += unread
		}
		if unread == 0 {
			continue
		}
		if counted {
			x.unread(unread, prompt, local)
		}
		if x.Unbounded != "" {
			continue
		}
		if beyond := w.beyond(g, prompt, n, surplus); !beyond.Empty() {
			ce := &Counterexample{PromptTokens: prompt, LocalTokens: local, LoadCapTokens: ask.LoadCapTokens, ResumeTokens: n}
			if states != nil {
				ce.States = states[g].Format(int(prompt / w.model().Groups[g].ChunkTokens))
			}
			why := fmt.Sprintf("the consumer fetches %s that attention does not read; %s", x.size(unread), x.allowed(beyond))
			return w.fail(ce, "width", g, why, row{"demand", cloneSets(pl.Demand)}, row{"need", at(g, need)}, row{"surplus", at(g, beyond)}), nil
		}
	}
	return nil, nil
}

// beyond returns what of a surplus the rule's claim does not let through: the chunks of which
// no token is among the extra ones before what attention reads, or before the resume point n
// where it reads nothing. Such a point inside a chunk is served by what is read a token earlier,
// too.
func (w *worker) beyond(g int, prompt, n uint64, surplus abi.Bitmap) abi.Bitmap {
	extra := w.widths[g].ClaimTokens
	if extra == 0 {
		return surplus
	}
	ct := w.model().Groups[g].ChunkTokens
	inside := n%ct != 0 && !w.readsAny(g, n, 0, n, prompt)
	out := append(abi.Bitmap{}, surplus...)
	for i := surplus.Next(0); i >= 0; i = surplus.Next(i + 1) {
		lo, hi := uint64(i)*ct, uint64(i+1)*ct+extra
		if hi > n || w.readsAny(g, n, lo, hi, prompt) || inside && w.readsAny(g, n-1, lo, min(hi, n-1), prompt) {
			out.Unset(i)
		}
	}
	return out
}

// read returns what a consumer that resumes at token n may fetch of group g. Inside a chunk
// from which attention reads nothing, such as where a run of chunked attention ends, that is
// the chunk and what is read a token earlier: no longer prompt looks at such a point, so a
// rule need not tell it from the points around it.
func (w *worker) read(g int, chunk, prompt, n uint64) (abi.Bitmap, error) {
	need, err := w.need(g, chunk, prompt, n)
	if err == nil && n%chunk != 0 && need.Empty() {
		need, err = w.need(g, chunk, prompt, n-1)
		if errors.Is(err, abi.ErrNoResume) {
			return nil, nil
		}
		may := abi.NewBitmap(int(n/chunk) + 1)
		copy(may, need)
		may.Set(int(n / chunk)) // with runs of one token nothing is ever read
		return may, err
	}
	return need, err
}

// allowed says what the claim lets through.
func (x *Width) allowed(beyond abi.Bitmap) string {
	if x.ClaimTokens == 0 {
		return "the rule claims no extra tokens (parameter " + ExtraParam + ", in tokens)"
	}
	return fmt.Sprintf("the rule claims %d extra tokens, and %s beyond those", x.ClaimTokens, x.size(uint64(beyond.Count())))
}

// stored judges what one request supplies, at its prompt's end and at its text's end, against
// the demands that its points of resumption make, and counts it for the report.
func (w *worker) stored(s plan.Start, text uint64, counted bool, draw *rng) (*Counterexample, error) {
	first, resume, err := w.planner.PromptSupply(s)
	if err != nil {
		return w.broken("width", s.PromptTokens, err)
	}
	supply, next, err := w.planner.TextSupply(s, text)
	if err != nil {
		return w.broken("width", s.PromptTokens, err)
	}
	points := []uint64{resume, next}
	if j := s.JunctionTokens; j > 0 {
		_, at, err := w.planner.TextSupply(plan.Start{PromptTokens: j}, j)
		if err != nil {
			return w.broken("width", s.PromptTokens, err)
		}
		points = append(points, at)
	}
	saves, err := w.saved(plan.Start{PromptTokens: text})
	if err != nil {
		return w.broken("width", s.PromptTokens, err)
	}
	for g := range supply {
		supply[g].Or(first[g])
		w.count("width")
		x := &w.widths[g]
		if saves[g] {
			x.saved = true
		}
		if !counted && (saves[g] || x.Unbounded != "") {
			continue
		}
		idle, stored, err := w.idle(g, text, supply[g], points, draw)
		if err != nil {
			return w.broken("width", s.PromptTokens, err)
		}
		if counted {
			n := uint64(idle.Count())
			x.Stored += stored
			x.Idle += n
			if n > 0 {
				x.idle(n, s.PromptTokens)
			}
		}
		if idle.Empty() || saves[g] || x.Unbounded != "" {
			continue
		}
		if err := w.late(g, text, idle, points); err != nil {
			return w.broken("width", s.PromptTokens, err)
		}
		if !idle.Empty() {
			ce := &Counterexample{PromptTokens: s.PromptTokens, JunctionTokens: s.JunctionTokens, ResumeTokens: resume}
			if text > s.PromptTokens {
				ce.TextTokens = text
			}
			why := fmt.Sprintf("the producer stores %s that nobody fetches: no consumer of this prompt, of the next turn, or at an aligned point", x.size(uint64(idle.Count())))
			return w.fail(ce, "width", g, why, row{"supply", supply}, row{"surplus", at(g, idle)}), nil
		}
	}
	return nil, nil
}

// alignedTries is how many intervals between aligned points are tried at each end, and
// drawn between: a short alignment has thousands, all alike. All of them are, while there
// are at most everyInterval.
const alignedTries, everyInterval = 3, 32

// intervals returns the numbers of the intervals between aligned points to try: that before
// point i+1 is i, and the one behind the last point has none.
func intervals(last uint64, draw *rng) (tries []uint64) {
	if last < everyInterval {
		for i := range last + 1 {
			tries = append(tries, i)
		}
		return tries
	}
	for i := range uint64(alignedTries) {
		tries = append(tries, i, last-i, draw.below(last+1))
	}
	slices.Sort(tries)
	return slices.Compact(tries)
}

// idle returns the chunks of a text's supply that no scan demands which resumes at one of the
// points or at an aligned one, and how many chunks of the supply were looked at. A tail never
// reaches less far back at an earlier point, so a chunk that is not demanded at the first
// aligned point behind it is not at any later one.
func (w *worker) idle(g int, text uint64, supply abi.Bitmap, points []uint64, draw *rng) (idle abi.Bitmap, stored uint64, err error) {
	if !w.subject.Groups[g].forgets() && w.widths[g].Unbounded == "" {
		return nil, uint64(supply.Count()), nil
	}
	rest := append(abi.Bitmap{}, supply...)
	for _, n := range points {
		if err := w.unmark(g, text, 0, n, rest); err != nil {
			return nil, 0, err
		}
	}
	ct, a := w.model().Groups[g].ChunkTokens, w.model().AlignTokens
	if a == 0 {
		return rest, uint64(supply.Count()), nil
	}
	judged := abi.NewBitmap(64 * len(rest))
	last := w.storedTokens(text) / a
	for _, i := range intervals(last, draw) {
		lo, hi := i*a/ct, min((i+1)*a/ct, uint64(64*len(rest)))
		if lo >= hi {
			continue
		}
		judged.SetRange(int(lo), int(hi))
		if c := rest.Next(int(lo)); i < last && c >= 0 && uint64(c) < hi {
			if err := w.unmark(g, text, uint64(c)*ct, (i+1)*a, rest); err != nil {
				return nil, 0, err
			}
		}
	}
	rest.And(judged)
	judged.And(supply)
	return rest, uint64(judged.Count()), nil
}

// storedTokens is how much of a text the deployment stores.
func (w *worker) storedTokens(text uint64) uint64 {
	if c := w.model().MaxStoreTokens; c > 0 {
		return min(text, c)
	}
	return text
}

// late takes out of a set of idle chunks what somebody fetches after all, at one of the points
// or at an aligned one, far behind the chunk or with a local prefix that ends at the first of
// them. No tail asks for that, but a rule may. It is asked only before a refusal.
func (w *worker) late(g int, text uint64, idle abi.Bitmap, points []uint64) error {
	ct, a := w.model().Groups[g].ChunkTokens, w.model().AlignTokens
	for n := a; a > 0 && n <= w.storedTokens(text); n += a {
		points = append(points, n)
	}
	for _, n := range points {
		if err := w.unmark(g, text, 0, n, idle); err != nil {
			return err
		}
		c := idle.Next(0)
		if c < 0 {
			return nil
		}
		if err := w.unmark(g, text, uint64(c)*ct, n, idle); err != nil {
			return err
		}
	}
	return nil
}

// unmark takes out of set what group g fetches to resume at token n, with a local prefix,
// when everything is there.
func (w *worker) unmark(g int, prompt, local, n uint64, set abi.Bitmap) error {
	if n <= local {
		return nil
	}
	gr := &w.model().Groups[g]
	ct := gr.ChunkTokens
	r := abi.Round{
		BlockTokens: gr.BlockTokens, ChunkTokens: ct, PromptTokens: prompt, StoredTokens: prompt, AlignTokens: w.model().AlignTokens,
		LocalTokens: local, BoundTokens: n, Lo: uint32(local / ct), Hi: uint32((n + ct - 1) / ct),
	}
	hits, demand := abi.NewStates(r.Chunks()), abi.NewBitmap(r.Chunks())
	hits.Fill(0, r.Chunks(), abi.Hit)
	if _, err := gr.Rule.Scan(r, hits, demand); err != nil {
		return &plan.RuleError{Group: gr.Name, Func: "scan", Round: r, Err: err}
	}
	for i := demand.Next(0); i >= 0; i = demand.Next(i + 1) {
		if c := i + int(r.Lo); c < 64*len(set) {
			set.Unset(c)
		}
	}
	return nil
}

// reported merges what the workers have seen.
func (r *run) reported() []Width {
	out := r.newWidths(r.workers[0].model())
	for _, w := range r.workers {
		for g := range out {
			out[g].add(&w.widths[g])
		}
	}
	for g := range out {
		if out[g].saved {
			out[g].Unbounded = "what is stored, because the engine saves a state at every chunk, and any of them can be resumed"
		}
	}
	return out
}
