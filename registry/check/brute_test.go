package check_test

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/tierd/tierd/abi"
)

// This file judges a small deployment by trying everything. It shares no code with package
// check and none with package plan: the planner, the producer, the masks and the relations
// are written here once more, as the design says them, with sets of chunks, loops over all
// lengths, prefixes, steps and tables, and no thought of speed. What it says of a rule is
// held against what the check says, in mutants_test.go.

// A set of chunks or blocks. The domain has less than 64 of them.
type set uint64

func (s set) has(c uint64) bool { return c < 64 && s>>c&1 != 0 }
func (s *set) add(c uint64)     { *s |= 1 << c }

// from returns the chunks of s from number c on.
func (s set) from(c uint64) set {
	if c >= 64 {
		return 0
	}
	return s >> c << c
}

// upTo returns the set of the first n chunks.
func upTo(n uint64) set { return ^(^set(0)).from(n) }

// A place is one group.
type place struct {
	name         string
	rule         abi.SpecRule
	block, chunk uint64
	draft        bool
	keepsPrompt  bool // of a generated text it keeps nothing
	state        bool // a chunk stands for the recurrent state at its end
	// extra is how many tokens before those that attention reads the rule says it fetches.
	extra uint64
	// reads is the mask: whether the query at q reads the key at k < q. nil = unverified:
	// what the rule's Need says is believed.
	reads func(prompt, q, k uint64) bool
	// resumes says whether there is anything to go on from at n.
	resumes func(n uint64) bool
}

// A world is a deployment.
type world struct {
	places   []place
	policies []abi.Rule
	align    uint64
	limit    uint64 // store cap; 0 = none
	longest  uint64 // longest prompt
	tables   uint64 // longest lookup tables of which all are tried
	pd       bool
	probe    bool
	draw     *rand.Rand

	// broken holds the relations that do not hold, each with its first case.
	broken map[string]string
	// beyond is the first case where a search over all resume points finds a later one
	// than the planner does.
	beyond string

	words  [1]uint64
	table  [2]uint64
	truths map[[4]uint64]set
	sups   map[[6]uint64]supplied
	wanted map[[3]uint64]set
	free   []*world // without the policies, the store cap, or both
	floors uint64
}

type supplied struct {
	sets   []set
	resume uint64
}

func (w *world) breaks(relation, format string, args ...any) {
	if w.broken[relation] == "" {
		w.broken[relation] = fmt.Sprintf(format, args...)
	}
}

// judge fills broken.
func (w *world) judge() {
	w.broken, w.truths, w.sups = map[string]string{}, map[[4]uint64]set{}, map[[6]uint64]supplied{}
	w.wanted = map[[3]uint64]set{}
	w.release()
	for w.floors = 1; ; w.floors++ {
		common := true
		for _, p := range w.places {
			common = common && w.floors%p.chunk == 0
		}
		if common {
			break
		}
	}
	for g := range w.places {
		w.laws(g)
	}
	for prompt := uint64(1); prompt <= w.longest; prompt++ {
		w.splits(prompt)
		w.consumers(prompt)
		w.arrivals(prompt)
		w.blocks(prompt)
		w.readers(prompt)
		w.caps(prompt)
		w.texts(prompt)
		w.shelves(prompt)
		w.aborts(prompt)
		w.warm(prompt)
	}
}

// The three functions of a rule, as sets.

func (w *world) round(g int, prompt, stored uint64) abi.Round {
	p := &w.places[g]
	return abi.Round{BlockTokens: p.block, ChunkTokens: p.chunk, PromptTokens: prompt, StoredTokens: stored, AlignTokens: w.align}
}

func (w *world) reach(rule abi.Rule, r abi.Round) set {
	w.words[0] = 0
	if err := rule.Reach(r, w.words[:abi.BitmapWords(r.Chunks())]); err != nil {
		w.breaks("pure", "reach of %+v fails: %v", r, err)
	}
	return set(w.words[0]) << r.Lo
}

// scan returns what a scan says of a table by absolute chunk number; its set is by absolute
// number too.
func (w *world) scan(rule abi.Rule, r abi.Round, at func(c uint64) abi.State) (abi.Span, set) {
	w.words[0], w.table = 0, [2]uint64{}
	t := abi.States(w.table[:])
	for c := r.Lo; c < r.Hi; c++ {
		t.Put(int(c-r.Lo), at(uint64(c)))
	}
	span, err := rule.Scan(r, t, w.words[:abi.BitmapWords(r.Chunks())])
	if err != nil {
		w.breaks("pure", "scan of %+v fails: %v", r, err)
	}
	if span.Deferred {
		span.Usable = 0
	}
	return span, set(w.words[0]) << r.Lo
}

// need returns what the rule says that attention reads to go on from n, in units of the
// given size; false when nothing can be resumed there.
func (w *world) need(g int, unit, prompt, n uint64) (set, bool) {
	r := w.round(g, prompt, w.capped(prompt))
	r.ChunkTokens, r.ResumeTokens, r.Hi = unit, n, uint32((n+unit-1)/unit)
	w.words[0] = 0
	err := w.places[g].rule.Need(r, w.words[:abi.BitmapWords(r.Chunks())])
	if err != nil && !errors.Is(err, abi.ErrNoResume) {
		w.breaks("pure", "need of %+v fails: %v", r, err)
	}
	return set(w.words[0]), err == nil
}

// truth returns the units that hold a token below n which any query from n on reads, by the
// mask.
func (w *world) truth(g int, unit, prompt, n uint64) set {
	key := [4]uint64{uint64(g), unit, prompt, n}
	if s, ok := w.truths[key]; ok {
		return s
	}
	s := set(0)
	for q := n; q < n+w.longest; q++ {
		for k := uint64(0); k < n; k++ {
			if w.places[g].reads(prompt, q, k) {
				s.add(k / unit)
			}
		}
	}
	w.truths[key] = s
	return s
}

// The planner.

func (w *world) capped(n uint64) uint64 {
	if w.limit > 0 {
		return min(n, w.limit)
	}
	return n
}

// stored is how much of a text group g stores.
func (w *world) stored(g int, prompt, text uint64) uint64 {
	if w.places[g].draft && text > prompt {
		text--
	}
	return w.capped(text)
}

// admitted returns the complete chunks that every policy lets in.
func (w *world) admitted(g int, prompt, stored, resident, offers uint64) set {
	whole := stored / w.places[g].chunk
	s := upTo(whole)
	for _, p := range w.policies {
		r := w.round(g, prompt, stored)
		r.ResidentTokens, r.Offers, r.Hi = resident, offers, uint32(whole)
		s &= w.reach(p, r)
	}
	return s
}

// A view is what a consumer sees: its request and a table for each group.
type view struct {
	prompt, text, local uint64
	at                  func(g int, c uint64) abi.State
}

// A meal is what a consumer decides: where it resumes and what it fetches for that.
type meal struct {
	resume   uint64
	demand   []set
	deferred bool
}

// consume finds the highest point from which all groups can go on.
func (w *world) consume(v view, bound uint64) meal {
	m := meal{resume: bound, demand: make([]set, len(w.places))}
	for changed := true; changed && m.resume > v.local; {
		before := m.resume
		for g := range w.places {
			if m.resume <= v.local {
				break
			}
			span, demand := w.scan(w.places[g].rule, w.scanned(g, v, m.resume), func(c uint64) abi.State { return v.at(g, c) })
			if m.demand[g] = demand; span.Deferred {
				m.deferred = true
				return m
			}
			m.resume = min(m.resume, w.reached(g, v, span))
		}
		if m.resume == before {
			m.resume = w.ranges(v, m.resume)
		}
		changed = m.resume < before
	}
	if m.resume <= v.local {
		return meal{resume: v.local, demand: make([]set, len(w.places))}
	}
	return m
}

func (w *world) scanned(g int, v view, bound uint64) abi.Round {
	r := w.round(g, v.prompt, w.stored(g, v.prompt, v.text))
	r.LocalTokens, r.BoundTokens = v.local, bound
	r.Lo, r.Hi = uint32(v.local/r.ChunkTokens), uint32((bound+r.ChunkTokens-1)/r.ChunkTokens)
	return r
}

func (w *world) reached(g int, v view, span abi.Span) uint64 {
	return (v.local/w.places[g].chunk + uint64(span.Usable)) * w.places[g].chunk
}

// ranges returns how far below e the policies let a consumer fetch.
func (w *world) ranges(v view, e uint64) uint64 {
	low := e
	for _, p := range w.policies {
		for g := range w.places {
			if v.local >= e {
				continue
			}
			span, _ := w.scan(p, w.scanned(g, v, e), func(c uint64) abi.State { return v.at(g, c) })
			low = min(low, w.reached(g, v, span))
		}
	}
	return low
}

// eager plans against what the producer of the same prefix will store; own is what the own
// tier says of a chunk.
func (w *world) eager(prompt, text, local, bound uint64, own func(g int, c uint64) abi.State) meal {
	admitted := make([]set, len(w.places))
	for g := range w.places {
		admitted[g] = w.admitted(g, prompt, w.stored(g, prompt, text), 0, 0)
	}
	return w.consume(view{prompt, text, local, func(g int, c uint64) abi.State {
		if (c+1)*w.places[g].chunk > w.stored(g, prompt, text) {
			return abi.Miss
		}
		if own != nil && own(g, c) != abi.Miss {
			return own(g, c)
		}
		if admitted[g].has(c) {
			return abi.Hit
		}
		return abi.Miss
	}}, bound)
}

func (w *world) bound(prompt uint64) uint64 { return min(prompt-1, w.capped(prompt)) }

// supply returns what a prefix supplies and where a consumer of it resumes: at the prompt's
// end bound by its last token, at the text's end by what is stored, and in between only what
// the aligned points ask for (bound 0).
func (w *world) supply(prompt, text, bound, junction, resident, offers uint64) ([]set, uint64) {
	key := [6]uint64{prompt, text, bound, junction, resident, offers}
	if s, ok := w.sups[key]; ok {
		return s.sets, s.resume
	}
	s := supplied{}
	if bound > 0 {
		s.resume = w.eager(prompt, text, 0, bound, nil).resume
	}
	j := min(junction, prompt)
	if j > 0 {
		j = w.eager(j, j, 0, w.capped(j), nil).resume
	}
	for g := range w.places {
		r := w.round(g, prompt, w.stored(g, prompt, text))
		r.ResumeTokens, r.JunctionTokens = s.resume, j
		r.Hi = uint32(r.StoredTokens / r.ChunkTokens)
		s.sets = append(s.sets, w.reach(w.places[g].rule, r)&w.admitted(g, prompt, r.StoredTokens, resident, offers))
	}
	w.sups[key] = s
	return s.sets, s.resume
}

// Relation pure: Reach for a part of the range says the same as for the whole.
func (w *world) splits(prompt uint64) {
	rules := make([]abi.Rule, 0, len(w.places)+len(w.policies))
	for g := range w.places {
		rules = append(rules, w.places[g].rule)
	}
	for i, rule := range append(rules, w.policies...) {
		for g := range w.places {
			if i < len(w.places) && i != g {
				continue
			}
			for _, resume := range []uint64{prompt - 1, prompt / 2} {
				r := w.round(g, prompt, prompt)
				r.ResumeTokens, r.JunctionTokens, r.Hi = resume, prompt/3, uint32(prompt/r.ChunkTokens)
				whole := w.reach(rule, r)
				for lo := range r.Hi {
					for hi := lo + 1; hi <= r.Hi; hi++ {
						part := r
						part.Lo, part.Hi = lo, hi
						if w.reach(rule, part) != whole&upTo(uint64(hi)).from(uint64(lo)) {
							w.breaks("pure", "rule %d: %+v", i, part)
						}
					}
				}
			}
		}
	}
}

// Relation states: the laws, for all tables of a few chunks.
func (w *world) laws(g int) {
	p := &w.places[g]
	for n := uint64(1); n <= w.tables; n++ {
		for _, lo := range []uint64{0, 1, 3} {
			for _, bound := range []uint64{(lo + n) * p.chunk, (lo+n)*p.chunk - 1, (lo+n-1)*p.chunk + 1} {
				if bound <= lo*p.chunk {
					continue
				}
				r := w.round(g, bound+1, bound+1)
				r.LocalTokens, r.BoundTokens, r.Lo, r.Hi = lo*p.chunk, bound, uint32(lo), uint32(lo+n)
				w.lawsOf(g, r)
			}
		}
	}
	for hi := uint64(1); hi*p.chunk <= w.longest; hi++ {
		for lo := range hi {
			for _, bound := range []uint64{hi * p.chunk, hi*p.chunk - 1, (hi-1)*p.chunk + 1} {
				if bound <= lo*p.chunk {
					continue
				}
				r := w.round(g, bound+1, bound+1)
				r.LocalTokens, r.BoundTokens, r.Lo, r.Hi = lo*p.chunk, bound, uint32(lo), uint32(hi)
				for _, p := range w.policies {
					w.rangeOf(p, r)
				}
				if hi-lo > w.tables && lo < 2 && bound%p.chunk == 0 {
					w.longLaws(g, r)
				}
			}
		}
	}
}

// rangeOf: how far a policy lets a consumer fetch is known before any lookup.
func (w *world) rangeOf(policy abi.Rule, r abi.Round) {
	n := r.Chunks()
	first, _ := w.scan(policy, r, func(uint64) abi.State { return abi.Miss })
	tables := []uint64{^uint64(0) / 3, ^uint64(0) / 3 * 2, ^uint64(0)} // all in one state
	for code := range uint64(1) << (2 * min(n, 3)) {                   // of the first chunks; the others are Misses
		tables = append(tables, code)
	}
	for _, code := range tables {
		span, _ := w.scan(policy, r, func(c uint64) abi.State { return abi.State(code >> (2 * (c - uint64(r.Lo))) & 3) })
		if span.Deferred || int(span.Usable) > n || span != first {
			w.breaks("states", "a policy's range is %+v for %+v, table %b", span, r, code)
		}
	}
}

// lawsOf judges all tables of a Round's chunks, of which there are few.
func (w *world) lawsOf(g int, r abi.Round) {
	j := &jurist{w: w, g: g, r: r, few: make([]*said, 1<<(2*r.Chunks()))}
	for code := range j.few {
		j.judge(code)
	}
}

// longLaws judges the tables of many chunks that are all in one state but one.
func (w *world) longLaws(g int, r abi.Round) {
	j := &jurist{w: w, g: g, r: r, many: map[int]*said{}}
	for base := range 4 {
		for hole := range 4 {
			for at := range r.Chunks() {
				code := 0
				for i := range r.Chunks() {
					code |= base << (2 * i)
				}
				j.judge(code&^(3<<(2*at)) | hole<<(2*at))
			}
		}
	}
}

// said is what a scan says of one table.
type said struct {
	span   abi.Span
	demand set
}

// A jurist judges the tables of one Round. A table is a code: two bits a chunk.
type jurist struct {
	w *world
	g int
	r abi.Round
	// What the scan said, by code.
	few  []*said
	many map[int]*said
}

func (j *jurist) state(code, i int) abi.State { return abi.State(code >> (2 * i) & 3) }

func (j *jurist) said(code int) said {
	s := j.many[code]
	if j.few != nil {
		s = j.few[code]
	}
	if s != nil {
		return *s
	}
	span, demand := j.w.scan(j.w.places[j.g].rule, j.r, func(c uint64) abi.State { return j.state(code, int(c)-int(j.r.Lo)) })
	s = &said{span, demand >> j.r.Lo}
	if j.few != nil {
		j.few[code] = s
	} else {
		j.many[code] = s
	}
	return *s
}

func (j *jurist) judge(code int) {
	n, a := j.r.Chunks(), j.said(code)
	here, unknown, pending := set(0), set(0), code
	for i := range n {
		switch j.state(code, i) {
		case abi.Hit:
			here.add(uint64(i))
		case abi.Pending:
			here.add(uint64(i))
			pending ^= 3 << (2 * i) // becomes Hit
		case abi.Retry:
			unknown.add(uint64(i))
		}
	}
	where := func(law string) {
		j.w.breaks("states", "group %s, %s: chunks %d to %d, bound %d, table %0*b: %+v", j.w.places[j.g].name, law, j.r.Lo, j.r.Hi, j.r.BoundTokens, 2*n, code, a)
	}
	if int(a.span.Usable) > n {
		where("usable beyond the range")
	}
	if j.said(pending) != a {
		where("Pending is not Hit")
	}
	if a.span.Deferred {
		if a.demand == 0 || a.demand&^unknown != 0 {
			where("deferred, and marks not what is unknown")
		}
		return
	}
	if a.demand&^here != 0 {
		where("demands what is not here")
	}
	for i := range n {
		if j.state(code, i) == abi.Miss {
			if b := j.said(code | int(abi.Hit)<<(2*i)); !b.span.Deferred && b.span.Usable < a.span.Usable {
				where("fewer usable for one more Hit")
			}
		}
	}
	// Whatever the unknown turns out to be, as much is usable; and it is as if it were not
	// here. Of many unknown chunks, all are here, or none.
	known := func(hits set) int {
		code := code
		for i := range n {
			if unknown.has(uint64(i)) {
				code &^= 3 << (2 * i)
				if hits.has(uint64(i)) {
					code |= int(abi.Hit) << (2 * i)
				}
			}
		}
		return code
	}
	for sub := unknown; unknown != 0; sub = (sub - 1) & unknown {
		if b := j.said(known(sub)); b.span != a.span || sub == 0 && b.demand != a.demand {
			where("not deferred, but the answer hangs on what is unknown")
		}
		if sub == 0 {
			break
		}
		if uint64(n) > j.w.tables {
			sub = unknown & -unknown // and then 0
		}
	}
}

// A diner is one consumer, with what it alone knows, and what its producer is told.
type diner struct {
	prompt, local uint64
	junction      uint64
	loadCap       uint64 // 0 = none
	own           func(g int, c uint64) abi.State
}

// dine returns what a consumer decides, and what it then lacks: what it demands, and neither
// the producer supplies nor it owns.
func (w *world) dine(d diner) (m meal, lacks []set) {
	bound := w.bound(d.prompt)
	if d.loadCap > 0 {
		bound = min(bound, d.loadCap/w.align*w.align)
	}
	supply, _ := w.supply(d.prompt, d.prompt, w.bound(d.prompt), d.junction, 0, 0)
	m = w.eager(d.prompt, d.prompt, d.local, bound, d.own)
	for g := range w.places {
		lack := m.demand[g] &^ supply[g]
		for c := uint64(0); c < 64 && d.own != nil; c++ {
			if d.own(g, c) != abi.Miss {
				lack &^= 1 << c
			}
		}
		lacks = append(lacks, lack)
	}
	return m, lacks
}

// release makes the deployments that have one limit less, or none.
func (w *world) release() {
	for _, keep := range []struct{ policies, limit bool }{{false, true}, {true, false}, {false, false}} {
		f := *w
		f.broken, f.sups, f.free = map[string]string{}, map[[6]uint64]supplied{}, nil
		if !keep.policies {
			f.policies = nil
		}
		if !keep.limit {
			f.limit = 0
		}
		w.free = append(w.free, &f)
	}
}

// blame names the relation that a lack breaks: caps when a limit is all that is wrong, and
// the same consumer lacks nothing without it. A load cap is such a limit.
func (w *world) blame(d diner) string {
	if d.loadCap > 0 {
		return "caps"
	}
	for _, f := range w.free {
		m, lacks := f.dine(d)
		ok := !m.deferred
		for _, lack := range lacks {
			ok = ok && lack == 0
		}
		if ok && (len(f.policies) != len(w.policies) || f.limit != w.limit) {
			return "caps"
		}
	}
	return "covers"
}

// Relations covers, caps and needs, and the part of useful in leg pd: every local prefix, own
// tiers, load caps and junctions.
func (w *world) consumers(prompt uint64) {
	for local := range prompt {
		m := w.served(diner{prompt: prompt, local: local}, "cold")
		least := w.common(prompt - 1)
		if m.resume < least && m.resume < w.permitted(prompt, prompt, local, least) {
			w.breaks("useful", "prompt %d local %d resumes at %d, below %d", prompt, local, m.resume, least)
		}
		if best := w.best(prompt, local); m.resume < best && w.beyond == "" && len(w.policies) == 0 {
			w.beyond = fmt.Sprintf("prompt %d local %d resumes at %d, and could at %d", prompt, local, m.resume, best)
		}
	}
	if !w.pd {
		return
	}
	for junction := uint64(1); junction <= prompt; junction++ {
		w.served(diner{prompt: prompt, junction: junction}, "with a junction")
		cold, _ := w.supply(prompt, prompt, w.bound(prompt), 0, 0, 0)
		told, _ := w.supply(prompt, prompt, w.bound(prompt), junction, 0, 0)
		for g := range cold {
			if cold[g]&^told[g] != 0 {
				w.breaks("covers", "prompt %d, with a junction at %d: group %s supplies %b, without %b", prompt, junction, w.places[g].name, told[g], cold[g])
			}
		}
	}
	for limit := w.align; limit > 0 && limit < prompt; limit += w.align {
		for local := range limit {
			w.served(diner{prompt: prompt, local: local, loadCap: limit}, "with a load cap")
		}
	}
	for _, local := range []uint64{0, prompt / 3} {
		for lo := uint64(0); lo < prompt; lo += 2 {
			for hi := lo + 2; hi < prompt+2; hi += 2 {
				w.owner(prompt, local, func(g int, c uint64) bool { at := c * w.places[g].chunk; return lo <= at && at < hi })
			}
		}
		for range 4 {
			held := make([]uint64, len(w.places))
			for g := range held {
				held[g] = w.draw.Uint64() & w.draw.Uint64()
			}
			w.owner(prompt, local, func(g int, c uint64) bool { return set(held[g]).has(c) })
		}
	}
}

// owner judges a consumer whose own tier has some chunks, or is being given them.
func (w *world) owner(prompt, local uint64, has func(g int, c uint64) bool) {
	for _, state := range []abi.State{abi.Hit, abi.Pending} {
		own := func(g int, c uint64) abi.State {
			if has(g, c) {
				return state
			}
			return abi.Miss
		}
		w.served(diner{prompt: prompt, local: local, own: own}, "own tier")
	}
}

// served judges one consumer: the producer supplies what it demands and does not own, and
// what attention reads is local or demanded.
func (w *world) served(d diner, who string) meal {
	m, lacks := w.dine(d)
	if m.deferred {
		w.breaks("states", "prompt %d local %d (%s): deferred with all known", d.prompt, d.local, who)
		return m
	}
	for g, lack := range lacks {
		if w.pd && lack != 0 && (w.broken["covers"] == "" || w.broken["caps"] == "") {
			w.breaks(w.blame(d), "prompt %d local %d junction %d load cap %d (%s): group %s demands chunks %b for resuming at %d, and lacks %b",
				d.prompt, d.local, d.junction, d.loadCap, who, w.places[g].name, m.demand[g], m.resume, lack)
		}
	}
	w.fed(d.prompt, d.local, m, who)
	return m
}

// fed judges that what attention reads from the resume point on is there.
func (w *world) fed(prompt, local uint64, m meal, who string) {
	if m.resume <= local {
		return
	}
	for g := range w.places {
		p := &w.places[g]
		said, ok := w.need(g, p.chunk, prompt, m.resume)
		truth := said
		if p.reads != nil {
			truth = w.truth(g, p.chunk, prompt, m.resume)
			ok = ok && p.resumes(m.resume)
		}
		if !ok || said != truth || truth.from(local/p.chunk)&^m.demand[g] != 0 {
			w.breaks("needs", "prompt %d local %d (%s): group %s resumes at %d, reads %b, says %b, demands %b", prompt, local, who, p.name, m.resume, truth, said, m.demand[g])
		}
		if may := w.may(g, prompt, m.resume); p.reads != nil && m.demand[g]&^may != 0 {
			w.breaks("width", "prompt %d local %d (%s): group %s resumes at %d, may fetch %b, demands %b", prompt, local, who, p.name, m.resume, may, m.demand[g])
		}
	}
}

// may is what relation width lets a consumer fetch: what attention reads, and the extra tokens
// before that, or before the resume point where nothing is read. Inside a chunk from which
// nothing is read: also the chunk, and what is read a token earlier with its extra tokens.
func (w *world) may(g int, prompt, n uint64) set {
	p := &w.places[g]
	if p.reads == nil || n == 0 {
		return 0
	}
	tokens, s := w.truth(g, 1, prompt, n), set(0)
	if tokens == 0 && n%p.chunk != 0 {
		s.add(n / p.chunk)
		tokens = w.truth(g, 1, prompt, n-1)
	}
	tokens.add(n)
	for range p.extra {
		tokens |= tokens >> 1
	}
	for k := range n {
		if tokens.has(k) {
			s.add(k / p.chunk)
		}
	}
	return s
}

// forgets reports whether there is a key that queries far behind it do not read. All other
// keys are read, and so fetched, by every longer prompt.
func (p *place) forgets() bool {
	const far = 1 << 20
	for k := range uint64(64) {
		if !p.reads(2*far, far, k) {
			return true
		}
	}
	return false
}

// everySaved reports whether a group's rule counts on an engine that saves every recurrent
// state: it keeps some although there is no point at which somebody resumes.
func (w *world) everySaved(g int) bool {
	for n := uint64(1); n <= w.longest && w.places[g].state; n++ {
		r := w.round(g, n, n)
		r.AlignTokens, r.Hi = 0, uint32(n/r.ChunkTokens)
		if w.reach(w.places[g].rule, r) != 0 {
			return true
		}
	}
	return false
}

// fetched returns what somebody fetches of a group to resume at n when all is there: with no
// local prefix, or with any.
func (w *world) fetched(g int, prompt, n uint64) set {
	key := [3]uint64{uint64(g), prompt, n}
	if s, ok := w.wanted[key]; ok {
		return s
	}
	s := set(0)
	for local := range n {
		_, demand := w.scan(w.places[g].rule, w.scanned(g, view{prompt, prompt, local, nil}, n), func(uint64) abi.State { return abi.Hit })
		s |= demand
	}
	w.wanted[key] = s
	return s
}

// shelves judges the width of what is stored, for all ends of the text, and for all junctions:
// somebody fetches it, who resumes at the prompt's end, the text's end, the junction or an
// aligned point.
func (w *world) shelves(prompt uint64) {
	for g := range w.places {
		if p := &w.places[g]; p.reads == nil || !p.forgets() || w.everySaved(g) {
			continue
		}
		for text := prompt; text <= w.longest; text++ {
			w.shelf(g, prompt, text, 0)
			w.shelf(g, prompt, text, 1+w.draw.Uint64N(prompt))
		}
		for junction := uint64(1); junction <= prompt; junction++ {
			w.shelf(g, prompt, prompt, junction)
		}
	}
}

func (w *world) shelf(g int, prompt, text, junction uint64) {
	first, a := w.supply(prompt, prompt, w.bound(prompt), junction, 0, 0)
	last, b := w.supply(prompt, text, w.capped(text), junction, 0, 0)
	points := []uint64{a, b}
	if junction > 0 {
		points = append(points, w.eager(junction, junction, 0, w.capped(junction), nil).resume)
	}
	for n := w.align; n > 0 && n <= w.capped(text); n += w.align {
		points = append(points, n)
	}
	idle := first[g] | last[g]
	for _, n := range points {
		idle &^= w.fetched(g, text, n)
	}
	if idle != 0 {
		w.breaks("width", "prompt %d text %d junction %d: group %s stores %b and %b, and nobody at %v fetches %b", prompt, text, junction, w.places[g].name, first[g], last[g], points, idle)
	}
}

// Relation caps, where a producer stores less of one request than the deployment says, which it
// may in leg probe: what it stores is enough for the resume point below its cap.
func (w *world) caps(prompt uint64) {
	for limit := uint64(1); limit < prompt && w.probe; limit++ {
		if w.limit > 0 && limit >= w.limit {
			return
		}
		less := *w
		less.limit, less.sups = limit, map[[6]uint64]supplied{}
		supply, resume := less.supply(prompt, prompt, less.bound(prompt), 0, 0, 0)
		w.read("caps", prompt, prompt, prompt, supply, resume, "store cap of one request")
	}
}

// arrivals: whatever part of the chunks has arrived, with up to two holes, the consumer uses
// only what is there, and that is enough.
func (w *world) arrivals(prompt uint64) {
	type hole struct {
		g int
		c uint64
	}
	holes := []hole{{-1, 0}} // none
	for g := range w.places {
		for c := range prompt / w.places[g].chunk {
			holes = append(holes, hole{g, c})
		}
	}
	for i, a := range holes {
		for _, b := range holes[:i+1] {
			here := func(g int, c uint64) bool {
				return (c+1)*w.places[g].chunk <= prompt && hole{g, c} != a && hole{g, c} != b
			}
			for _, local := range []uint64{0, prompt / 3} {
				m := w.consume(view{prompt, prompt, local, func(g int, c uint64) abi.State {
					if here(g, c) {
						return abi.Hit
					}
					return abi.Miss
				}}, w.bound(prompt))
				if m.deferred {
					w.breaks("states", "prompt %d local %d: deferred with all known", prompt, local)
					continue
				}
				for g := range w.places {
					for c := uint64(0); c < 64; c++ {
						if m.demand[g].has(c) && !here(g, c) {
							w.breaks("needs", "prompt %d local %d: uses chunk %d of group %s, which did not arrive", prompt, local, c, w.places[g].name)
						}
					}
				}
				w.fed(prompt, local, m, "after a partial arrival")
			}
		}
	}
}

// blocks: Need in blocks, which says what stays on the GPU, is the mask.
func (w *world) blocks(prompt uint64) {
	for g := range w.places {
		p := &w.places[g]
		if p.reads == nil {
			continue
		}
		for n := uint64(0); n <= prompt; n++ {
			if said, ok := w.need(g, p.block, prompt, n); ok && (!p.resumes(n) || said != w.truth(g, p.block, prompt, n)) {
				w.breaks("needs", "prompt %d: group %s reads %b blocks at %d, says %b", prompt, p.name, w.truth(g, p.block, prompt, n), n, said)
			}
		}
	}
}

// common returns the last edge of all groups' chunks at or below n and the cap.
func (w *world) common(n uint64) uint64 { return w.capped(n) / w.floors * w.floors }

// permitted returns want, or the last common edge below it, if the policies let in and let
// fetch all that lies below that.
func (w *world) permitted(producer, reader, local, want uint64) uint64 {
	for ; want > 0; want = (want - 1) / w.floors * w.floors {
		ok := true
		for g := range w.places {
			ok = ok && w.admitted(g, producer, want, 0, 0) == upTo(want/w.places[g].chunk)
		}
		v := view{reader, reader, min(local, want), func(int, uint64) abi.State { return abi.Hit }}
		if ok && w.ranges(v, want) == want {
			return want
		}
	}
	return 0
}

// best searches all points for the last from which a consumer in leg pd could go on: all
// that is read there, by the masks, is complete or local.
func (w *world) best(prompt, local uint64) uint64 {
	for n := w.bound(prompt); n > local; n-- {
		ok := true
		for g := range w.places {
			p := &w.places[g]
			if p.reads == nil {
				return 0
			}
			ok = ok && p.resumes(n) && w.truth(g, p.chunk, prompt, n).from(local/p.chunk)&^upTo(w.stored(g, prompt, prompt)/p.chunk) == 0
		}
		if ok {
			return n
		}
	}
	return local
}

// read judges useful, or caps, for a prompt that finds the chunks of sets that end at or before upto.
func (w *world) read(relation string, producer, reader, upto uint64, sets []set, want uint64, who string) {
	m := w.consume(view{reader, reader, 0, func(g int, c uint64) abi.State {
		if end := (c + 1) * w.places[g].chunk; end <= upto && end <= reader && sets[g].has(c) {
			return abi.Hit
		}
		return abi.Miss
	}}, w.bound(reader))
	if m.deferred {
		w.breaks("states", "prompt %d: deferred with all known", reader)
		return
	}
	if m.resume < want && m.resume < w.permitted(producer, reader, 0, want) {
		w.breaks(relation, "%s: prompt %d shares %d of %d, resumes at %d and not at %d", who, reader, upto, producer, m.resume, want)
	}
}

// readers judges useful where the reader looks up first: the same prompt, the next turn, and
// prompts that share an aligned prefix, or one up to a junction.
func (w *world) readers(prompt uint64) {
	if !w.probe {
		return
	}
	supply, resume := w.supply(prompt, prompt, w.bound(prompt), 0, 0, 0)
	w.read("useful", prompt, prompt, prompt, supply, resume, "same prompt")
	w.read("useful", prompt, prompt+1, prompt, w.final(prompt, prompt), w.common(prompt), "next turn")
	for x := uint64(1); x < prompt; x++ {
		if w.align > 0 {
			w.read("useful", prompt, prompt, x, supply, min(x/w.align*w.align, w.common(x)), "shared prefix")
		}
		more, _ := w.supply(prompt, prompt, w.bound(prompt), x, 0, 0)
		w.read("useful", prompt, prompt, x, more, w.common(x), "junction")
	}
}

// final is the supply at the prompt's end and at the text's end.
func (w *world) final(prompt, text uint64) []set {
	a, _ := w.supply(prompt, prompt, w.bound(prompt), 0, 0, 0)
	b, _ := w.supply(prompt, text, w.capped(text), 0, 0, 0)
	out := make([]set, len(a))
	for g := range a {
		out[g] = a[g] | b[g]
	}
	return out
}

// texts judges what is supplied of a text after a prompt: its content, its use by the next
// turn, and that it is the same however the steps fall.
func (w *world) texts(prompt uint64) {
	for text := prompt; text <= w.longest; text++ {
		final := w.final(prompt, text)
		w.content(prompt, text, final)
		if w.probe {
			whole := text
			for _, p := range w.places {
				if p.draft && text > prompt {
					whole = min(whole, text-1)
				}
				if p.keepsPrompt {
					whole = min(whole, prompt)
				}
			}
			w.read("useful", prompt, text+1, text, final, w.common(whole), "next turn of a text")
		}
		for step := uint64(1); step <= text; step++ {
			w.sameFor(prompt, text, final, func(uint64) uint64 { return step })
		}
		for range 4 {
			w.sameFor(prompt, text, final, func(uint64) uint64 { return 1 + w.draw.Uint64N(12) })
		}
	}
}

// content: at each token of a stored chunk the queries of all groups, whose layers its KV is
// computed from, read the same in this prompt and in every longer one.
func (w *world) content(prompt, text uint64, sets []set) {
	for n := uint64(0); n < text; n++ {
		same := true
		for g := range w.places {
			for longer := text; longer <= text+1 && w.places[g].reads != nil; longer++ {
				for k := range n {
					same = same && w.places[g].reads(prompt, n, k) == w.places[g].reads(longer, n, k)
				}
			}
		}
		for g := range w.places {
			if !same && sets[g].has(n/w.places[g].chunk) {
				w.breaks("content", "prompt %d text %d: group %s stores token %d", prompt, text, w.places[g].name, n)
			}
		}
	}
}

// A line is a producer's request on its way: what it has promised, what it keeps until its
// fate is known, and what it has offered.
type line struct {
	promised, offered, dropped []set
	from                       []uint64 // chunks from here on are kept
	done                       uint64
}

func (w *world) begin(prompt uint64) *line {
	sets, resume := w.supply(prompt, prompt, w.bound(prompt), 0, 0, 0)
	l := &line{promised: sets, offered: make([]set, len(sets)), dropped: make([]set, len(sets))}
	for g := range sets {
		l.from = append(l.from, resume/w.places[g].chunk)
	}
	return l
}

// computed says that tokens up to n are there.
func (w *world) computed(l *line, prompt, n uint64) {
	crossed := false
	for g := range w.places {
		crossed = crossed || n/w.places[g].chunk > l.done/w.places[g].chunk
		l.offered[g] |= l.promised[g] & upTo(n/w.places[g].chunk)
	}
	if l.done = n; !crossed || n <= prompt {
		return
	}
	aligned, _ := w.supply(prompt, n, 0, 0, 0, 0)
	keep, resume := w.supply(prompt, n, w.capped(n), 0, 0, 0)
	for g := range w.places {
		staged := w.staged(l, g)
		l.offered[g] |= staged & aligned[g]
		l.dropped[g] |= staged &^ aligned[g] &^ keep[g] & upTo(resume/w.places[g].chunk)
	}
}

// staged returns the whole chunks of group g that are kept and neither promised nor dropped.
func (w *world) staged(l *line, g int) set {
	whole := min(l.done, w.capped(l.done)) / w.places[g].chunk
	return upTo(whole).from(l.from[g]) &^ l.promised[g] &^ l.dropped[g] &^ l.offered[g]
}

// sameFor judges one split of a text into steps.
func (w *world) sameFor(prompt, text uint64, final []set, step func(at uint64) uint64) {
	l := w.begin(prompt)
	for l.done < text {
		end := text
		if l.done < prompt {
			end = prompt
		}
		w.computed(l, prompt, min(l.done+step(l.done), end))
	}
	last, _ := w.supply(prompt, text, w.capped(text), 0, 0, 0)
	for g := range w.places {
		l.offered[g] |= w.staged(l, g) & last[g]
		if l.offered[g] != final[g] {
			w.breaks("schedule", "prompt %d text %d, first step %d: group %s offers %b, not %b", prompt, text, step(0), w.places[g].name, l.offered[g], final[g])
		}
	}
}

// aborts: a request that ends inside its prompt leaves at least the aligned tails of a
// prompt of that length.
func (w *world) aborts(prompt uint64) {
	for k := uint64(1); k < prompt; k++ {
		l := w.begin(prompt)
		w.computed(l, prompt, k)
		last, _ := w.supply(prompt, k, 0, 0, 0, 0)
		short, _ := w.supply(k, k, 0, 0, 0, 0)
		for g := range w.places {
			if offered := l.offered[g] | w.staged(l, g)&last[g]; short[g]&^offered != 0 {
				w.breaks("schedule", "prompt %d ended at %d: group %s offers %b, a prompt of that length %b", prompt, k, w.places[g].name, offered, short[g])
			}
		}
	}
}

// Relation warm: with any prefix in its tier, offered any number of times, or on its GPU, the
// producer supplies what a cold consumer demands, and all that a cold producer does.
func (w *world) warm(prompt uint64) {
	if !w.pd {
		return
	}
	m := w.eager(prompt, prompt, 0, w.bound(prompt), nil)
	cold, _ := w.supply(prompt, prompt, w.bound(prompt), 0, 0, 0)
	for resident := uint64(0); resident <= prompt && len(w.policies) > 0; resident++ {
		for _, offers := range []uint64{0, 1, 2, 3, 1000} {
			supply, _ := w.supply(prompt, prompt, w.bound(prompt), 0, resident, offers)
			for g := range w.places {
				if all := m.demand[g] | cold[g]; all&^supply[g] != 0 {
					w.breaks("warm", "prompt %d resident %d offers %d: group %s promises %b, supplied %b", prompt, resident, offers, w.places[g].name, all, supply[g])
				}
			}
		}
	}
	l := w.begin(prompt)
	reuse := uint64(0)
	for n := uint64(1); n < prompt; n++ {
		if dead, _, resumes := w.dead(l, prompt, n); resumes && !dead {
			reuse = n
		}
	}
	for n := uint64(1); n <= reuse; n++ {
		if _, really, resumes := w.dead(l, prompt, n); resumes && really {
			w.breaks("warm", "prompt %d: dead blocks are copied after a native prefix of %d", prompt, n)
		}
	}
}

// dead reports whether, after a native GPU prefix of n tokens, some block of a chunk that is
// promised or kept is gone: by what the rules say, and by the masks.
func (w *world) dead(l *line, prompt, n uint64) (said, really, resumes bool) {
	for g := range w.places {
		p := &w.places[g]
		alive, ok := w.need(g, p.block, prompt, n)
		if !ok {
			return false, false, false
		}
		truth := alive
		if p.reads != nil {
			truth = w.truth(g, p.block, prompt, n)
		}
		for b := range n / p.block {
			c := b * p.block / p.chunk
			if (c+1)*p.chunk > w.capped(1<<30) || c < l.from[g] && !l.promised[g].has(c) {
				continue
			}
			said = said || !alive.has(b)
			really = really || !truth.has(b)
		}
	}
	return said, really, true
}
