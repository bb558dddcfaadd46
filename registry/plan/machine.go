package plan

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/tierd/tierd/abi"
)

// resumePoint returns the token from which a consumer of exactly this prefix will go
// on: at the prompt's end bound by its last token, at the text's end by what is stored.
func (p *Planner) resumePoint(prompt, text, bound uint64) (uint64, error) {
	if err := p.eager.prepare(prompt, text); err != nil {
		return 0, err
	}
	p.eager.own = nil
	pl, err := p.consume(view{prompt: prompt, text: text}, bound, &p.eager)
	return pl.ResumeTokens, err
}

// supply sets in out the chunks of group g, by absolute number, that the rule's Reach
// names and every policy admits.
func (p *Planner) supply(g int, s *Start, text, resume uint64, out abi.Bitmap) error {
	gr := &p.m.Groups[g]
	r := p.round(g, s.PromptTokens, p.stored(g, s.PromptTokens, text))
	r.ResumeTokens, r.JunctionTokens = resume, s.JunctionTokens
	r.Hi = uint32(r.StoredTokens / r.ChunkTokens)
	if err := gr.Rule.Reach(r, out); err != nil {
		return &RuleError{gr.Name, "reach", r, err}
	}
	return p.admit(g, s.PromptTokens, r.StoredTokens, s.ResidentTokens, s.Offers, out)
}

// needed returns the blocks of group g that attention reads to go on from token n: Need
// asked in chunks of one block. The bitmap is the Planner's, valid until its next call.
func (p *Planner) needed(g int, prompt, n uint64) (abi.Bitmap, error) {
	gr := &p.m.Groups[g]
	r := p.round(g, prompt, p.stored(g, prompt, prompt))
	r.ChunkTokens = r.BlockTokens
	r.ResumeTokens = n
	r.Hi = uint32(ceilDiv(n, r.ChunkTokens))
	out := bitmap(&p.need, r.Chunks())
	if err := gr.Rule.Need(r, out); err != nil {
		return out, &RuleError{gr.Name, "need", r, err}
	}
	return out, nil
}

// A Start is what a producer knows when a request begins.
type Start struct {
	PromptTokens uint64
	// JunctionTokens is the end of a prefix known to be shared; 0 = none.
	JunctionTokens uint64
	// ResidentTokens is the prefix that the producer's tier already holds, and Offers
	// how often it was offered before: for policies.
	ResidentTokens uint64
	Offers         uint64
	// Held is, per group, the chunks of this prompt that are readable in the tier and
	// pinned for this request, by absolute number; nil = none. Only chunks that
	// Planner.Wanted names are of use.
	Held []abi.Bitmap
}

// A Ref names one chunk of one group.
type Ref struct {
	Group int
	Chunk uint32
}

// A Copy tells the producer's daemon to copy a run of GPU blocks into the slot of a
// chunk. All of them lie in one chunk.
type Copy struct {
	Ref
	Block  uint32 // first block, counted from the start of the sequence
	Blocks uint32
	// First says that the chunk has no slot yet; Last, that with this copy all its
	// blocks are in the slot.
	First, Last bool
	// Promised says that the chunk is part of the supply once it is complete, so
	// that its key may show as Pending. A chunk that is not promised is staged: what
	// becomes of it is not known yet, and its key must stay invisible.
	Promised bool
}

// Effects are what a step of a Machine asks its daemon to do, in this order.
type Effects struct {
	Copies []Copy
	// Offers are chunks that are now part of the supply. Each chunk is offered once.
	Offers []Ref
	// Drops are staged chunks, whole or begun, that nobody will ask for. A chunk of
	// Start.Held among them is to be unpinned, not removed.
	Drops []Ref
}

// ErrNativeAboveReuse is returned by Native for a GPU prefix above ReuseTokens.
var ErrNativeAboveReuse = errors.New("native prefix is above reuse_tokens")

// A Machine is the producer of one request: it says in each step which GPU blocks to
// copy, so that every chunk of the supply is whole although the engine frees blocks
// that have fallen out of a window.
//
// What is supplied at the prompt's end is known from the start, because the prompt's
// length is: those chunks are promised. What the text's end will add is not known, so
// the chunks from the resume point on are staged as they are computed, and offered or
// dropped when their fate is clear. A block is copied in the step that completes it,
// which is the one moment at which it is surely alive; blocks of a native GPU prefix
// are copied at the start, and ReuseTokens is the longest prefix at which all those
// still wanted are alive.
//
// A recurrent state exists only where a step ended. Where the rule promises states at some
// points only, the engine must end a step at each of them ([Machine.StopTokens]); where it
// promises one for every chunk, the engine is one that saves them all.
//
// While decoding, only chunks that the aligned points ask for are added; the tail of
// the text's end is added by Finish.
//
// Use: Native once, Step after each engine step, then Finish or Abort once. A Machine
// uses its Planner's memory in each call; the two share one goroutine.
type Machine struct {
	p      *Planner
	start  Start
	groups []produced
	resume uint64 // resume point at the prompt's end
	reuse  uint64 // valid when sized
	sized  bool
	done   uint64 // tokens computed
	began  bool
	ended  bool
	tmp    abi.Bitmap
}

// produced is what a Machine knows of one group.
type produced struct {
	promised  abi.Bitmap // the supply at the prompt's end
	held      abi.Bitmap // readable and pinned in the tier
	offered   abi.Bitmap
	staged    abi.Bitmap // whole, not offered
	stageFrom uint64     // chunks from here on are staged
	chunksMax uint64     // chunks that the store cap lets through
	blocks    uint64     // blocks handled so far
	open      bool       // the chunk that blocks stands in has a slot
	stops     bool       // blocks hold states that are saved only where a step ends
}

// Wanted returns, per group, the chunks of the prompt that a producer will keep: those
// to look for and pin in the tier before Produce. The bitmaps are the caller's.
func (p *Planner) Wanted(s Start) ([]abi.Bitmap, error) {
	s.Held = nil
	m, err := p.Produce(s)
	if err != nil {
		return nil, err
	}
	sets := make([]abi.Bitmap, len(m.groups))
	for g := range sets {
		gp := &m.groups[g]
		n := p.stored(g, s.PromptTokens, s.PromptTokens) / p.m.Groups[g].ChunkTokens
		sets[g] = abi.NewBitmap(int(n))
		sets[g].Or(gp.promised)
		sets[g].SetRange(int(min(gp.stageFrom, n)), int(n))
	}
	return sets, nil
}

// Produce returns the machine of one request.
func (p *Planner) Produce(s Start) (*Machine, error) {
	sets, resume, err := p.PromptSupply(s)
	if err != nil {
		return nil, err
	}
	m := &Machine{p: p, start: s, groups: make([]produced, len(p.m.Groups)), resume: resume}
	if err := p.floorJunction(&m.start); err != nil {
		return nil, err
	}
	for g := range m.groups {
		ct := p.m.Groups[g].ChunkTokens
		n := int(p.stored(g, s.PromptTokens, s.PromptTokens) / ct)
		gp := &m.groups[g]
		gp.promised, gp.held = sets[g], abi.NewBitmap(n)
		gp.offered, gp.staged = abi.NewBitmap(n), abi.NewBitmap(n)
		gp.stageFrom = m.resume / ct
		gp.chunksMax = p.capped(abi.MaxTokens) / ct
		if gp.stops, err = p.savedAtStops(g, &m.start); err != nil {
			return nil, err
		}
		if s.Held != nil {
			gp.held.Or(s.Held[g][:min(len(s.Held[g]), len(gp.held))])
		}
	}
	return m, nil
}

// savedAtStops reports whether group g keeps states that the engine saves only where it is
// told to stop: a rule that keeps states when no point is asked for relies on an engine
// that saves all of them.
func (p *Planner) savedAtStops(g int, s *Start) (bool, error) {
	if !p.m.Groups[g].State {
		return false, nil
	}
	r := p.round(g, s.PromptTokens, p.stored(g, s.PromptTokens, s.PromptTokens))
	r.AlignTokens, r.Hi = 0, uint32(r.StoredTokens/r.ChunkTokens)
	out := bitmap(&p.span, r.Chunks())
	if err := p.m.Groups[g].Rule.Reach(r, out); err != nil {
		return false, &RuleError{p.m.Groups[g].Name, "reach", r, err}
	}
	return out.Empty(), nil
}

// StopTokens returns, in rising order, the tokens of the prompt at which a step of the
// engine must end, so that a recurrent state is saved there: those of the supply at the
// prompt's end, and from the resume point on all that the text's end may ask for.
func (m *Machine) StopTokens() []uint64 {
	var stops []uint64
	for g := range m.groups {
		gp, ct := &m.groups[g], m.p.m.Groups[g].ChunkTokens
		for c := gp.nextWanted(0); gp.stops && c < min(gp.chunksMax, m.start.PromptTokens/ct); c = gp.nextWanted(c + 1) {
			stops = append(stops, (c+1)*ct)
		}
	}
	slices.Sort(stops)
	return slices.Compact(stops)
}

// PromptSupply returns what a producer supplies at its prompt's end, per group by
// absolute chunk number, and the point from which a consumer of exactly this prompt
// will go on. The bitmaps are the caller's.
func (p *Planner) PromptSupply(s Start) (sets []abi.Bitmap, resume uint64, err error) {
	bound, err := p.bound(&Ask{PromptTokens: s.PromptTokens})
	if err != nil {
		return nil, 0, err
	}
	return p.supplyAt(s, s.PromptTokens, bound)
}

// TextSupply returns the same at the text's end, text tokens computed, text at least
// the prompt: what the text's end adds to the prompt's supply and to the aligned tails.
func (p *Planner) TextSupply(s Start, text uint64) (sets []abi.Bitmap, resume uint64, err error) {
	return p.supplyAt(s, text, p.capped(text))
}

// AlignedSupply returns what is supplied of a request that ends at text tokens before
// its prompt's end: the aligned tails alone.
func (p *Planner) AlignedSupply(s Start, text uint64) ([]abi.Bitmap, error) {
	sets, _, err := p.supplyAt(s, text, 0)
	return sets, err
}

// supplyAt is the supply of a prefix; bound is the highest resume point, 0 = none.
func (p *Planner) supplyAt(s Start, text, bound uint64) (sets []abi.Bitmap, resume uint64, err error) {
	if err := p.floorJunction(&s); err != nil {
		return nil, 0, err
	}
	if bound > 0 {
		if resume, err = p.resumePoint(s.PromptTokens, text, bound); err != nil {
			return nil, 0, err
		}
	}
	sets = make([]abi.Bitmap, len(p.m.Groups))
	for g := range sets {
		sets[g] = abi.NewBitmap(int(p.stored(g, s.PromptTokens, text) / p.m.Groups[g].ChunkTokens))
		if err := p.supply(g, &s, text, resume, sets[g]); err != nil {
			return nil, 0, err
		}
	}
	return sets, resume, nil
}

// floorJunction moves the junction to the point where a consumer of the prefix below it
// goes on: only what is complete below it has keys that another prompt shares.
func (p *Planner) floorJunction(s *Start) error {
	j := min(s.JunctionTokens, s.PromptTokens)
	if j == 0 {
		s.JunctionTokens = 0
		return nil
	}
	at, err := p.resumePoint(j, j, p.capped(j))
	s.JunctionTokens = at
	return err
}

// Foreseen returns, per group, what is known of the prompt's chunks before any is
// computed: those that the prompt's end offers, those that only the text's end decides
// on, and those that every policy admits. What is neither of the first two is never
// offered. The bitmaps are the caller's.
func (m *Machine) Foreseen() (promised, open, admitted []abi.Bitmap, err error) {
	p, s := m.p, &m.start
	for g := range m.groups {
		gp := &m.groups[g]
		stored := p.stored(g, s.PromptTokens, s.PromptTokens)
		n := stored / p.m.Groups[g].ChunkTokens
		will, may, in := abi.NewBitmap(int(n)), abi.NewBitmap(int(n)), abi.NewBitmap(int(n))
		will.Or(gp.promised)
		may.SetRange(int(min(gp.stageFrom, n)), int(min(gp.chunksMax, n)))
		may.AndNot(will)
		in.SetRange(0, int(n))
		if err := p.admit(g, s.PromptTokens, stored, s.ResidentTokens, s.Offers, in); err != nil {
			return nil, nil, nil, err
		}
		promised, open, admitted = append(promised, will), append(open, may), append(admitted, in)
	}
	return promised, open, admitted, nil
}

// ResumeTokens returns the point from which a consumer of exactly this prompt will go
// on.
func (m *Machine) ResumeTokens() uint64 { return m.resume }

// ReuseTokens returns the longest native GPU prefix hit that the engine may use: at
// which every wanted chunk below it is alive on the GPU or held in the tier.
func (m *Machine) ReuseTokens() (uint64, error) {
	if m.sized {
		return m.reuse, nil
	}
	n, err := m.longestReuse()
	m.reuse, m.sized = n, err == nil
	return n, err
}

// wanted reports whether chunk c of a group is to be copied when it is computed.
func (gp *produced) wanted(c uint64) bool {
	if c >= gp.chunksMax || has(gp.held, c) {
		return false
	}
	return c >= gp.stageFrom || has(gp.promised, c)
}

// nextWanted returns the lowest chunk from c on that is to be copied when computed; at
// or beyond chunksMax when there is none.
func (gp *produced) nextWanted(c uint64) uint64 {
	for ; ; c++ {
		if c < gp.stageFrom {
			next := gp.promised.Next(int(c))
			if next < 0 || uint64(next) > gp.stageFrom {
				next = int(gp.stageFrom)
			}
			c = uint64(next)
		}
		if c >= gp.chunksMax || gp.wanted(c) {
			return c
		}
	}
}

func has(b abi.Bitmap, c uint64) bool { return c < uint64(len(b))*64 && b.Get(int(c)) }

// longestReuse finds the largest prefix. Attention reads less and less of an old prefix as
// it goes on, so a chunk that is dead at one prefix is dead at every longer one, and
// bisection finds the last good one. Only where some group cannot go on from every token
// (latent attention keeps one entry for several tokens) the points between two common
// chunk edges are tried one by one.
func (m *Machine) longestReuse() (uint64, error) {
	edge := uint64(1)
	for g := range m.groups {
		edge = LCM(edge, m.p.m.Groups[g].ChunkTokens)
	}
	top := m.start.PromptTokens - 1
	k, _, err := m.lastGood(0, top/edge, func(k uint64) uint64 { return k * edge })
	if err != nil {
		return 0, err
	}
	lo, hi := k*edge, min((k+1)*edge-1, top)
	n, gaps, err := m.lastGood(lo, hi, func(n uint64) uint64 { return n })
	if err != nil || !gaps {
		return n, err
	}
	for n = hi; n > lo; n-- {
		if ok, _, err := m.reusable(n); ok || err != nil {
			return n, err
		}
	}
	return lo, nil
}

// lastGood bisects [lo, hi] for the last i whose point can be reused; lo's is taken to be
// one. gaps says that it met a point from which some group cannot go on.
func (m *Machine) lastGood(lo, hi uint64, point func(i uint64) uint64) (last uint64, gaps bool, err error) {
	for lo < hi {
		mid := lo + (hi-lo+1)/2
		ok, gap, err := m.reusable(point(mid))
		if err != nil {
			return 0, false, err
		}
		gaps = gaps || gap
		if ok {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return lo, gaps, nil
}

// reusable reports whether, after a native hit of n tokens, every block below n of every
// wanted chunk is still on the GPU. gap says that some group cannot go on from n.
func (m *Machine) reusable(n uint64) (ok, gap bool, err error) {
	for g := range m.groups {
		gp, gr := &m.groups[g], &m.p.m.Groups[g]
		alive, err := m.p.needed(g, m.start.PromptTokens, n)
		if errors.Is(err, abi.ErrNoResume) {
			return false, true, nil
		}
		if err != nil {
			return false, false, err
		}
		perChunk, whole := gr.ChunkTokens/gr.BlockTokens, n/gr.BlockTokens
		for c := gp.nextWanted(0); c < gp.chunksMax && c*perChunk < whole; c = gp.nextWanted(c + 1) {
			end := int(min((c+1)*perChunk, whole))
			if alive.NextUnset(int(c*perChunk), end) < end {
				return false, false, nil
			}
		}
	}
	return true, false, nil
}

// LCM returns the least common multiple of two positive token counts: where chunks of both
// sizes end. When it is too large for 64 bits it returns abi.MaxTokens, which no prompt
// reaches either.
func LCM(a, b uint64) uint64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	if hi, lo := bits.Mul64(a/x, b); hi == 0 {
		return lo
	}
	return abi.MaxTokens
}

// Native takes up a native GPU prefix hit of n tokens; 0 when there is none. Blocks of
// the prefix that are wanted are copied, and chunks held in the tier are offered.
func (m *Machine) Native(n uint64) (Effects, error) {
	var fx Effects
	switch {
	case m.ended:
		return fx, fmt.Errorf("native prefix of %d tokens after the request's end", n)
	case m.began:
		return fx, fmt.Errorf("native prefix of %d tokens given twice", n)
	}
	if n > 0 {
		if reuse, err := m.ReuseTokens(); err != nil {
			return fx, err
		} else if n > reuse {
			return fx, fmt.Errorf("%w: %d tokens, at most %d", ErrNativeAboveReuse, n, reuse)
		}
		if ok, _, err := m.reusable(n); err != nil {
			return fx, err
		} else if !ok {
			return fx, fmt.Errorf("native prefix of %d tokens: %w", n, abi.ErrNoResume)
		}
	}
	m.began = true
	for g := range m.groups {
		gp := &m.groups[g]
		for i := gp.held.Next(0); i >= 0; i = gp.held.Next(i + 1) {
			if has(gp.promised, uint64(i)) {
				m.offer(g, uint64(i), &fx)
			} else {
				gp.staged.Set(i)
			}
		}
		m.copyTo(g, n, &fx)
	}
	m.done = n
	return fx, nil
}

// Step says that the engine has computed up to token n.
func (m *Machine) Step(n uint64) (Effects, error) {
	var fx Effects
	if err := m.check(n); err != nil {
		return fx, err
	}
	if err := m.passes(n); err != nil {
		return fx, err
	}
	crossed := false
	for g := range m.groups {
		m.copyTo(g, n, &fx)
		ct := m.p.m.Groups[g].ChunkTokens
		crossed = crossed || n/ct > m.done/ct
	}
	m.done = n
	if crossed && n > m.start.PromptTokens {
		return fx, m.settle(&fx)
	}
	return fx, nil
}

// ErrStopPassed is wrapped by the error for a step that does not end at a token of
// StopTokens on its way.
var ErrStopPassed = errors.New("passes a token of stop_tokens, where a recurrent state must be saved")

// passes reports a promised state that the step to token n jumps over.
func (m *Machine) passes(n uint64) error {
	for g := range m.groups {
		gp, ct := &m.groups[g], m.p.m.Groups[g].ChunkTokens
		if !gp.stops {
			continue
		}
		for c := gp.promised.Next(int(m.done / ct)); c >= 0 && (uint64(c)+1)*ct < n; c = gp.promised.Next(c + 1) {
			if !has(gp.held, uint64(c)) {
				return fmt.Errorf("step from %d to %d tokens %w: %d, for group %s; end a step there", m.done, n, ErrStopPassed, (uint64(c)+1)*ct, m.p.m.Groups[g].Name)
			}
		}
	}
	return nil
}

func (m *Machine) check(n uint64) error {
	switch {
	case m.ended:
		return fmt.Errorf("step to %d tokens after the request's end", n)
	case !m.began:
		return fmt.Errorf("step to %d tokens before the native prefix was given", n)
	case n < m.done:
		return fmt.Errorf("step to %d tokens, below the %d already computed", n, m.done)
	case n > abi.MaxTokens:
		return fmt.Errorf("step to %d tokens; at most %d", n, uint64(abi.MaxTokens))
	}
	return nil
}

// copyTo asks for the wanted blocks of group g that are complete at token n.
func (m *Machine) copyTo(g int, n uint64, fx *Effects) {
	gp, gr := &m.groups[g], &m.p.m.Groups[g]
	perChunk, end := gr.ChunkTokens/gr.BlockTokens, n/gr.BlockTokens
	if gp.stops { // of all blocks of the step, at most the last holds a state
		if n%gr.BlockTokens == 0 && end > gp.blocks {
			gp.blocks = end - 1
		} else {
			gp.blocks = end
		}
	}
	for b := gp.blocks; b < end; {
		c := b / perChunk
		stop := min((c+1)*perChunk, end)
		if gp.wanted(c) {
			last := stop == (c+1)*perChunk
			fx.Copies = append(fx.Copies, Copy{
				Ref: Ref{g, uint32(c)}, Block: uint32(b), Blocks: uint32(stop - b),
				First: !gp.open, Last: last, Promised: has(gp.promised, c),
			})
			gp.open = !last
			if last && has(gp.promised, c) {
				m.offer(g, c, fx)
			} else if last {
				set(&gp.staged, c)
			}
		}
		b = stop
	}
	gp.blocks = end
}

func (m *Machine) offer(g int, c uint64, fx *Effects) {
	set(&m.groups[g].offered, c)
	fx.Offers = append(fx.Offers, Ref{g, uint32(c)})
}

// set sets bit c, growing b when needed.
func set(b *abi.Bitmap, c uint64) {
	for uint64(len(*b))*64 <= c {
		*b = append(*b, 0)
	}
	b.Set(int(c))
}

// settle offers the staged chunks that the aligned points ask for, and drops those that
// no later end of the text can ask for.
func (m *Machine) settle(fx *Effects) error {
	prompt := m.start.PromptTokens
	resume, err := m.p.resumePoint(prompt, m.done, m.p.capped(m.done))
	if err != nil {
		return err
	}
	for g := range m.groups {
		gp, gr := &m.groups[g], &m.p.m.Groups[g]
		if gp.staged.Empty() {
			continue
		}
		if err := m.offerStaged(g, 0, fx); err != nil {
			return err
		}
		// The tail of a later end holds, of the chunks below this resume point, only
		// such as the tail of this point holds.
		keep := bitmap(&m.tmp, int(m.p.stored(g, prompt, m.done)/gr.ChunkTokens))
		if err := m.p.supply(g, &m.start, m.done, resume, keep); err != nil {
			return err
		}
		for i := gp.staged.Next(0); i >= 0 && uint64(i) < resume/gr.ChunkTokens; i = gp.staged.Next(i + 1) {
			if !has(keep, uint64(i)) {
				m.drop(g, uint64(i), fx)
			}
		}
	}
	return nil
}

// offerStaged offers the staged chunks of group g that belong to the supply at the
// tokens computed so far.
func (m *Machine) offerStaged(g int, resume uint64, fx *Effects) error {
	gp, gr := &m.groups[g], &m.p.m.Groups[g]
	n := m.p.stored(g, m.start.PromptTokens, m.done) / gr.ChunkTokens
	want := bitmap(&m.tmp, int(n))
	if err := m.p.supply(g, &m.start, m.done, resume, want); err != nil {
		return err
	}
	for i := gp.staged.Next(0); i >= 0; i = gp.staged.Next(i + 1) {
		if has(want, uint64(i)) {
			gp.staged.Unset(i)
			m.offer(g, uint64(i), fx)
		}
	}
	return nil
}

func (m *Machine) drop(g int, c uint64, fx *Effects) {
	m.groups[g].staged.Unset(int(c))
	fx.Drops = append(fx.Drops, Ref{g, uint32(c)})
}

// Finish ends the request at its text's end, n tokens computed. Below the prompt's end
// it is an abort.
func (m *Machine) Finish(n uint64) (Effects, error) {
	fx, err := m.Step(n)
	if err != nil {
		return fx, err
	}
	resume := uint64(0)
	if n >= m.start.PromptTokens {
		if resume, err = m.p.resumePoint(m.start.PromptTokens, n, m.p.capped(n)); err != nil {
			return fx, err
		}
	}
	return fx, m.end(resume, &fx)
}

// Abort ends the request where it stands: what the aligned points ask for is kept.
func (m *Machine) Abort() (Effects, error) {
	var fx Effects
	if m.ended {
		return fx, fmt.Errorf("abort after the request's end")
	}
	return fx, m.end(0, &fx)
}

func (m *Machine) end(resume uint64, fx *Effects) error {
	m.ended = true
	var first error
	for g := range m.groups {
		gp, gr := &m.groups[g], &m.p.m.Groups[g]
		if err := m.offerStaged(g, resume, fx); err != nil && first == nil {
			first = err
		}
		for i := gp.staged.Next(0); i >= 0; i = gp.staged.Next(i + 1) {
			m.drop(g, uint64(i), fx)
		}
		if gp.open {
			fx.Drops = append(fx.Drops, Ref{g, uint32(gp.blocks / (gr.ChunkTokens / gr.BlockTokens))})
		}
	}
	return first
}
