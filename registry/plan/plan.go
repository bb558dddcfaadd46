// Package plan decides what a consumer fetches and what a producer supplies, from the
// rules of a deployment. There is one implementation: the daemon runs it for every
// request, and the registration check runs the same one over the whole domain. It is
// pure: no clock, no random, no I/O, no goroutine.
//
// # The consumer
//
// A consumer looks for the highest token E from which all groups can go on. It starts
// at the highest one allowed and passes over the groups in file order: each group's
// scan, bounded by E, answers how far it can go, and E becomes that. It repeats until
// a whole pass leaves E where it was; the demand of that last pass is what is
// fetched. E only falls, so this ends. A policy's range is one more bound of the same
// kind.
//
// The states that the scans read come from a [Source]. In leg pd nothing is asked:
// what the producer of the same prompt will store is taken for a Hit ([Planner.Eager]).
// In leg probe what must be known is asked for in at most two batches
// ([Planner.Probe]).
//
// # The producer
//
// A producer runs the same planner to find the point from which a consumer of its
// prefix will go on, and supplies what the rules' Reach names for that point and for
// the aligned points. [Machine] turns that into copies, step by step, while the
// engine's blocks live and die.
package plan

import (
	"fmt"
	"strings"

	"github.com/tierd/tierd/abi"
)

// A Group is one KV cache group as the planner sees it.
type Group struct {
	Name        string
	Rule        abi.SpecRule
	BlockTokens uint64
	ChunkTokens uint64
	// Draft marks the group of a draft head. Its last position is rewritten when the
	// text goes on, so at the text's end it stores one token less.
	Draft bool
	// State says that what the group keeps is a recurrent state: a block holds the one
	// after its last token, and only if a step of the engine ended there. A chunk is one
	// block.
	State bool
}

// A Policy is an opened policy rule.
type Policy struct {
	Name string
	Rule abi.Rule
}

// A Model is everything of a deployment that planning depends on. Both sides of a
// transfer hold an equal one.
type Model struct {
	Groups   []Group
	Policies []Policy
	// AlignTokens is the distance of the points at which any prompt may be resumed;
	// 0 = none. It is a multiple of every group's ChunkTokens.
	AlignTokens uint64
	// MaxStoreTokens caps what is stored of one request; 0 = no cap.
	MaxStoreTokens uint64
}

// Validate reports the first thing that makes a model unusable.
func (m *Model) Validate() error {
	if len(m.Groups) == 0 {
		return fmt.Errorf("model has no groups")
	}
	for i := range m.Groups {
		g := &m.Groups[i]
		if g.BlockTokens == 0 || g.ChunkTokens == 0 || g.ChunkTokens%g.BlockTokens != 0 {
			return fmt.Errorf("group %s: chunk of %d tokens is not a positive multiple of its block of %d tokens", g.Name, g.ChunkTokens, g.BlockTokens)
		}
		if g.State && g.ChunkTokens != g.BlockTokens {
			return fmt.Errorf("group %s: it keeps a recurrent state, of which a chunk holds one, so a chunk is one block (chunk_blocks: 1), but a chunk has %d tokens and a block %d", g.Name, g.ChunkTokens, g.BlockTokens)
		}
		if m.AlignTokens%g.ChunkTokens != 0 {
			return fmt.Errorf("align_tokens is %d; group %s has chunks of %d tokens, and align_tokens must be a multiple of every chunk", m.AlignTokens, g.Name, g.ChunkTokens)
		}
	}
	return nil
}

// A Source answers lookups for the planner.
type Source interface {
	// States fills out with the states of the chunks [lo, hi) of group g; entry k is
	// chunk lo+k. out has room for hi-lo entries and may hold anything before.
	States(g int, lo, hi uint32, out abi.States) error
}

// An Ask is what a consumer knows of its request.
type Ask struct {
	// PromptTokens is the length of the prompt, at least 1.
	PromptTokens uint64
	// LocalTokens is the prefix that the consumer's GPU already holds.
	LocalTokens uint64
	// LoadCapTokens is a resume point that only this consumer refuses to pass;
	// 0 = none. It is floored to the alignment, because nobody keeps what resuming
	// elsewhere needs.
	LoadCapTokens uint64
}

// A Plan is the outcome for one consumer. Its sets belong to the Planner and are
// overwritten by its next call.
type Plan struct {
	// ResumeTokens is the token to go on from. It equals the local prefix when
	// nothing is fetched.
	ResumeTokens uint64
	// Deferred says that the states of the chunks in Demand must become known before
	// there is a plan; ResumeTokens then means nothing.
	Deferred bool
	// Demand holds, per group, the chunks to fetch, by absolute chunk number.
	Demand []abi.Bitmap
}

// A RuleError is an error of a rule, with what was being asked of it.
type RuleError struct {
	Group string // group or policy
	Func  string // reach, scan or need
	Round abi.Round
	Err   error
}

func (e *RuleError) Error() string { return fmt.Sprintf("%s: %v", e.Call(), e.Err) }

// Call is what was being asked, in words.
func (e *RuleError) Call() string {
	var facts strings.Builder
	for _, f := range []struct {
		name string
		v    uint64
	}{
		{"stored", e.Round.StoredTokens}, {"resume", e.Round.ResumeTokens}, {"align", e.Round.AlignTokens},
		{"junction", e.Round.JunctionTokens}, {"resident", e.Round.ResidentTokens},
		{"local", e.Round.LocalTokens}, {"bound", e.Round.BoundTokens},
	} {
		if f.v > 0 {
			fmt.Fprintf(&facts, ", %s_tokens %d", f.name, f.v)
		}
	}
	return fmt.Sprintf("%s of %s, chunks %d to %d (prompt_tokens %d%s)",
		e.Func, e.Group, e.Round.Lo, e.Round.Hi, e.Round.PromptTokens, &facts)
}

func (e *RuleError) Unwrap() error { return e.Err }

// A Planner plans for one model. It owns scratch memory and is used by one goroutine
// at a time.
type Planner struct {
	m      Model
	states abi.States   // of the group being scanned
	span   abi.Bitmap   // what a rule answers, relative to Lo
	need   abi.Bitmap   // of Need
	demand []abi.Bitmap // per group, absolute
	marks  []bool       // per group: demand holds the marks of a deferred scan
	eager  eagerSource
	known  tableSource
}

// New returns a planner. The model must be valid.
func New(m Model) (*Planner, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	p := &Planner{m: m, demand: make([]abi.Bitmap, len(m.Groups)), marks: make([]bool, len(m.Groups))}
	p.eager.p = p
	p.eager.admit = make([]abi.Bitmap, len(m.Groups))
	return p, nil
}

// Model returns the model that the planner plans for.
func (p *Planner) Model() *Model { return &p.m }

// capped returns the smaller of n and the store cap.
func (p *Planner) capped(n uint64) uint64 {
	if p.m.MaxStoreTokens > 0 {
		return min(n, p.m.MaxStoreTokens)
	}
	return n
}

// stored returns the tokens of group g that a producer stores when text tokens are
// computed and the prompt has prompt of them.
func (p *Planner) stored(g int, prompt, text uint64) uint64 {
	if p.m.Groups[g].Draft && text > prompt {
		text--
	}
	return p.capped(text)
}

func ceilDiv(a, b uint64) uint64 { return (a + b - 1) / b }

// round returns a Round of group g with what both sides know.
func (p *Planner) round(g int, prompt, stored uint64) abi.Round {
	gr := &p.m.Groups[g]
	return abi.Round{
		BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens,
		PromptTokens: prompt, StoredTokens: stored, AlignTokens: p.m.AlignTokens,
	}
}

// bitmap returns *b, emptied and long enough for n bits.
func bitmap(b *abi.Bitmap, n int) abi.Bitmap {
	if w := abi.BitmapWords(n); cap(*b) < w {
		*b = make(abi.Bitmap, w+w/2)[:w]
	} else {
		*b = (*b)[:w]
		b.Zero()
	}
	return *b
}

// A view is one side's look at one prefix: the part of a Round that does not depend on
// the group.
type view struct {
	prompt uint64 // tokens of the prompt
	text   uint64 // tokens of prompt and generated text that the producer stores from
	local  uint64 // prefix on the consumer's GPU
}

// consume finds the plan of a view against a finished table. bound is the highest
// resume point allowed.
func (p *Planner) consume(v view, bound uint64, src Source) (Plan, error) {
	for g := range p.m.Groups {
		bitmap(&p.demand[g], int(ceilDiv(bound, p.m.Groups[g].ChunkTokens)))
		p.marks[g] = false
	}
	e := bound
	for again := true; again && e > v.local; {
		pass, err := p.pass(v, e, src)
		if err != nil {
			return Plan{}, err
		}
		if again = pass < e; !again {
			if pass, err = p.policyRange(v, e, src); err != nil {
				return Plan{}, err
			}
			again = pass < e
		}
		e = pass
	}
	if e <= v.local { // nothing above the local prefix can be had, whatever is unknown
		for g := range p.demand {
			p.demand[g].Zero()
		}
		return Plan{ResumeTokens: v.local, Demand: p.demand}, nil
	}
	return Plan{ResumeTokens: e, Deferred: p.onlyMarks(), Demand: p.demand}, nil
}

// pass lets every group scan below e, in file order, and returns how far all can go.
// It stops early at the local prefix.
func (p *Planner) pass(v view, e uint64, src Source) (uint64, error) {
	for g := range p.m.Groups {
		if e <= v.local {
			return e, nil
		}
		usable, deferred, err := p.scan(g, v, e, src)
		if err != nil {
			return 0, err
		}
		if !deferred { // a group that cannot say does not tighten
			e = min(e, usable)
		}
	}
	return e, nil
}

// onlyMarks reports whether any group deferred. If so, it empties the demand of those
// that did not: until all can say, nothing is fetched.
func (p *Planner) onlyMarks() bool {
	deferred := false
	for _, m := range p.marks {
		deferred = deferred || m
	}
	for g, m := range p.marks {
		if deferred && !m {
			p.demand[g].Zero()
		}
	}
	return deferred
}

// scanRound returns the Round that the scan of group g below e sees.
func (p *Planner) scanRound(g int, v view, e uint64) abi.Round {
	r := p.round(g, v.prompt, p.stored(g, v.prompt, v.text))
	r.LocalTokens, r.BoundTokens = v.local, e
	r.Lo, r.Hi = uint32(v.local/r.ChunkTokens), uint32(ceilDiv(e, r.ChunkTokens))
	return r
}

// scan runs the scan of group g below e and returns how far the group can go, in
// tokens. Its demand, or the marks of all its deferred scans, go to p.demand[g].
func (p *Planner) scan(g int, v view, e uint64, src Source) (usable uint64, deferred bool, err error) {
	gr := &p.m.Groups[g]
	r := p.scanRound(g, v, e)
	if err := p.lookup(g, &r, src); err != nil {
		return 0, false, err
	}
	out := bitmap(&p.span, r.Chunks())
	span, err := gr.Rule.Scan(r, p.states, out)
	if err == nil && int(span.Usable) > r.Chunks() {
		err = fmt.Errorf("usable is %d, but only %d chunks were asked for", span.Usable, r.Chunks())
	}
	if err != nil {
		return 0, false, &RuleError{gr.Name, "scan", r, err}
	}
	switch {
	case span.Deferred && !p.marks[g]:
		p.demand[g].Zero()
		p.marks[g] = true
		orShifted(p.demand[g], out, int(r.Lo))
	case span.Deferred:
		orShifted(p.demand[g], out, int(r.Lo))
	case !p.marks[g]: // deferred is sticky
		p.demand[g].Zero()
		orShifted(p.demand[g], out, int(r.Lo))
	}
	return min(e, (uint64(r.Lo)+uint64(span.Usable))*gr.ChunkTokens), span.Deferred, nil
}

func (p *Planner) lookup(g int, r *abi.Round, src Source) error {
	if w := abi.StatesWords(r.Chunks()); cap(p.states) < w {
		p.states = make(abi.States, w+w/2)[:w]
	} else {
		p.states = p.states[:w]
	}
	return src.States(g, r.Lo, r.Hi, p.states)
}

// policyRange returns the lowest bound that any policy sets below e.
func (p *Planner) policyRange(v view, e uint64, src Source) (uint64, error) {
	limit := e
	for i := range p.m.Policies {
		for g := range p.m.Groups {
			r := p.scanRound(g, v, e)
			if err := p.lookup(g, &r, src); err != nil {
				return 0, err
			}
			span, err := p.m.Policies[i].Rule.Scan(r, p.states, bitmap(&p.span, r.Chunks()))
			if err == nil && span.Deferred {
				err = fmt.Errorf("deferred, but a policy's range cannot wait for lookups")
			}
			if err != nil {
				return 0, &RuleError{"policy " + p.m.Policies[i].Name, "scan", r, err}
			}
			limit = min(limit, (uint64(r.Lo)+uint64(span.Usable))*r.ChunkTokens)
		}
	}
	return limit, nil
}

// bound returns the highest resume point that a consumer may ask for before any table
// is read: its last token is always computed, and caps count from token 0.
func (p *Planner) bound(ask *Ask) (uint64, error) {
	if ask.PromptTokens == 0 || ask.PromptTokens > abi.MaxTokens {
		return 0, fmt.Errorf("prompt of %d tokens; it must be 1 to %d", ask.PromptTokens, uint64(abi.MaxTokens))
	}
	return min(ask.PromptTokens-1, p.capped(ask.PromptTokens)), nil
}

// withLoadCap plans, and plans again below the floored load cap when it is exceeded.
func (p *Planner) withLoadCap(ask *Ask, src Source) (Plan, error) {
	bound, err := p.bound(ask)
	if err != nil {
		return Plan{}, err
	}
	v := view{ask.PromptTokens, ask.PromptTokens, ask.LocalTokens}
	pl, err := p.consume(v, bound, src)
	if err != nil || pl.Deferred || ask.LoadCapTokens == 0 || pl.ResumeTokens <= max(ask.LoadCapTokens, ask.LocalTokens) {
		return pl, err
	}
	floored := uint64(0)
	if p.m.AlignTokens > 0 {
		floored = ask.LoadCapTokens / p.m.AlignTokens * p.m.AlignTokens
	}
	return p.consume(v, floored, src)
}

// orShifted sets in dst the bits of src moved up by shift places. dst must have room.
func orShifted(dst, src abi.Bitmap, shift int) {
	word, bit := shift>>6, uint(shift)&63
	for i, w := range src {
		if w == 0 {
			continue
		}
		dst[word+i] |= w << bit
		if bit != 0 && w>>(64-bit) != 0 {
			dst[word+i+1] |= w >> (64 - bit)
		}
	}
}
