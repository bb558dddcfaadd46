package check

import (
	"errors"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// sweep runs covers, needs and useful for one prompt length.
func (w *worker) sweep(prompt uint64) (*Counterexample, error) {
	start := plan.Start{PromptTokens: prompt}
	supply, resume, err := w.planner.PromptSupply(start)
	if err != nil {
		return w.broken("covers", prompt, err)
	}
	for _, local := range w.locals(prompt) {
		ce, err := w.consumer(prompt, local, supply)
		if ce != nil || err != nil {
			return ce, err
		}
	}
	return w.reuse(start, supply, resume)
}

// locals returns the local prefixes of a consumer: none, one chunk, half, seven eighths.
func (w *worker) locals(prompt uint64) []uint64 {
	out := []uint64{0}
	for _, n := range [...]uint64{w.model().Groups[0].ChunkTokens, prompt / 2, prompt / 8 * 7} {
		if n > out[len(out)-1] && n < prompt {
			out = append(out, n)
		}
	}
	return out
}

// consumer judges one consumer in leg pd, cold or with a local prefix.
func (w *worker) consumer(prompt, local uint64, supply []abi.Bitmap) (*Counterexample, error) {
	pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt, LocalTokens: local}, nil)
	if err != nil {
		return w.broken("covers", prompt, err)
	}
	ce := &Counterexample{PromptTokens: prompt, LocalTokens: local, ResumeTokens: pl.ResumeTokens}
	if pl.Deferred {
		return w.deferred(ce, pl), nil
	}
	if w.subject.PD {
		c := &pdCase{start: plan.Start{PromptTokens: prompt}, ask: plan.Ask{PromptTokens: prompt, LocalTokens: local}}
		if ce, err := w.uncovered(c, pl.ResumeTokens, supply, pl.Demand, "the consumer demands chunks that the producer never supplies"); ce != nil || err != nil {
			return ce, err
		}
	}
	w.count("needs")
	if ce, err := w.needs(ce, pl); ce != nil || err != nil {
		return ce, err
	}
	w.count("useful")
	if least := w.floor(prompt - 1); pl.ResumeTokens < least && pl.ResumeTokens < w.permitted(prompt, prompt, local, least) {
		ce.WantTokens = least
		g := w.limiting(prompt, local, least, w.tables(w.complete(prompt), prompt))
		return w.fail(ce, "useful", g, "the whole prompt is stored, but the consumer resumes earlier than its last whole chunk",
			row{"supply", supply}, row{"demand", cloneSets(pl.Demand)}, row{"need", w.needAll(prompt, least)}), nil
	}
	return nil, nil
}

// deferred refuses a plan that waits although every state is known.
func (w *worker) deferred(ce *Counterexample, pl plan.Plan) *Counterexample {
	g := 0
	for i := range pl.Demand {
		if !pl.Demand[i].Empty() {
			g = i
			break
		}
	}
	ce.ResumeTokens = 0
	return w.fail(ce, "states", g, "the scan is deferred, although every state is known", row{"demand", pl.Demand})
}

// floor returns the last common chunk edge at or before n and the store cap.
func (w *worker) floor(n uint64) uint64 {
	if c := w.model().MaxStoreTokens; c > 0 {
		n = min(n, c)
	}
	l := uint64(1)
	for i := range w.model().Groups {
		l = plan.LCM(l, w.model().Groups[i].ChunkTokens)
	}
	return n / l * l
}

// permitted returns how far, up to token n, the policies let a consumer fetch: n, or the
// last common chunk edge below it up to which every chunk is admitted when a prompt of
// stored tokens is stored, and which every range reaches. A policy may narrow what is stored
// and fetched; then less is useful, by intent. What one policy leaves may be too little for
// another, so they are asked until none narrows it further.
func (w *worker) permitted(stored, prompt, local, n uint64) uint64 {
	for narrowed := true; narrowed; {
		before := n
		for _, p := range w.model().Policies {
			for g := range w.model().Groups {
				limit, err := w.narrow(p.Rule, g, stored, prompt, local, n)
				if err != nil {
					return n // relation covers or pure names the failure
				}
				if limit < n {
					n = w.floor(limit)
				}
			}
		}
		narrowed = n < before
	}
	return n
}

// narrow returns how far one policy lets a consumer fetch of one group, up to token n.
func (w *worker) narrow(policy abi.Rule, g int, stored, prompt, local, n uint64) (uint64, error) {
	gr := &w.model().Groups[g]
	r := abi.Round{BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens, PromptTokens: stored, StoredTokens: n,
		AlignTokens: w.model().AlignTokens, Hi: uint32(n / gr.ChunkTokens)}
	set := abi.NewBitmap(r.Chunks())
	if err := policy.Reach(r, set); err != nil {
		return 0, err
	}
	if whole := set.NextUnset(0, r.Chunks()); whole < r.Chunks() {
		n = uint64(whole) * gr.ChunkTokens
	}
	r.PromptTokens, r.LocalTokens, r.BoundTokens, r.Lo = prompt, min(local, n), n, uint32(min(local, n)/gr.ChunkTokens)
	r.Hi = uint32((n + gr.ChunkTokens - 1) / gr.ChunkTokens)
	hits := abi.NewStates(r.Chunks())
	hits.Fill(0, r.Chunks(), abi.Hit)
	span, err := policy.Scan(r, hits, abi.NewBitmap(r.Chunks()))
	return min(n, (uint64(r.Lo)+uint64(span.Usable))*gr.ChunkTokens), err
}

// needs judges one plan: what attention reads from its resume point on is in its demand
// or local.
func (w *worker) needs(ce *Counterexample, pl plan.Plan) (*Counterexample, error) {
	e, local := pl.ResumeTokens, ce.LocalTokens
	if e <= local { // nothing is fetched, nothing is resumed
		return nil, nil
	}
	for g := range pl.Demand {
		ct := w.model().Groups[g].ChunkTokens
		need, err := w.need(g, ct, ce.PromptTokens, e)
		if errors.Is(err, abi.ErrNoResume) {
			return w.fail(ce, "needs", g, "the plan resumes where the rule says that no KV can be resumed", row{"demand", pl.Demand}), nil
		}
		if err != nil {
			return w.broken("needs", ce.PromptTokens, err)
		}
		if bad := w.mask(ce, g, e, ct, need); bad != nil {
			return bad, nil
		}
		need.UnsetRange(0, int(min(local/w.model().Groups[g].ChunkTokens, uint64(len(need)*64))))
		if missing := minus(need, pl.Demand[g]); missing != nil {
			return w.fail(ce, "needs", g, "attention reads chunks that are neither local nor demanded",
				row{"need", at(g, need)}, row{"demand", pl.Demand}, row{"missing", at(g, missing)}), nil
		}
	}
	return nil, nil
}

// need asks the rule of group g what attention reads from token n on. The answer is the
// worker's scratch, in chunks of the given size.
func (w *worker) need(g int, chunk, prompt, n uint64) (abi.Bitmap, error) {
	gr := &w.model().Groups[g]
	r := abi.Round{
		BlockTokens: gr.BlockTokens, ChunkTokens: chunk, PromptTokens: prompt,
		StoredTokens: prompt, ResumeTokens: n, AlignTokens: w.model().AlignTokens,
		Hi: uint32((n + chunk - 1) / chunk),
	}
	if c := w.model().MaxStoreTokens; c > 0 {
		r.StoredTokens = min(prompt, c)
	}
	w.tmp = zeroed(w.tmp, r.Chunks())
	if err := gr.Rule.Need(r, w.tmp); err != nil {
		return w.tmp, &plan.RuleError{Group: gr.Name, Func: "need", Round: r, Err: err}
	}
	return w.tmp, nil
}

// needAll returns what every group's attention reads from token n on, for a drawing.
func (w *worker) needAll(prompt, n uint64) []abi.Bitmap {
	sets := make([]abi.Bitmap, len(w.model().Groups))
	for g := range sets {
		if need, err := w.need(g, w.model().Groups[g].ChunkTokens, prompt, n); err == nil {
			sets[g] = append(abi.Bitmap{}, need...)
		}
	}
	return sets
}

// A reader is a prompt that finds in its tables what another one has supplied.
type reader struct {
	what         string
	prompt, upto uint64 // its length, and how much of it the producer's prompt shares
	sets         []abi.Bitmap
	want         uint64 // where it must be able to resume
}

// reuse judges useful beyond leg pd: the same prompt in leg probe, and the next turn.
func (w *worker) reuse(start plan.Start, supply []abi.Bitmap, resume uint64) (*Counterexample, error) {
	prompt := start.PromptTokens
	if !w.subject.Probe {
		return nil, nil
	}
	text, _, err := w.planner.TextSupply(start, prompt)
	if err != nil {
		return w.broken("useful", prompt, err)
	}
	for g := range text {
		text[g].Or(supply[g])
	}
	return w.readers("useful", prompt,
		reader{"the same prompt in leg probe resumes earlier than in leg pd", prompt, prompt, supply, resume},
		reader{"the next turn resumes earlier than the last whole chunk of the text before it", prompt + 1, prompt, text, w.floor(prompt)})
}

// shared judges that a prompt which shares a prefix resumes at its last aligned point.
func (w *worker) shared(prompt uint64) (*Counterexample, error) {
	if ce, err := w.junctions(prompt); ce != nil || err != nil {
		return ce, err
	}
	a := w.model().AlignTokens
	if a == 0 || prompt < 2 || !w.subject.Probe {
		return nil, nil
	}
	supply, _, err := w.planner.PromptSupply(plan.Start{PromptTokens: prompt})
	if err != nil {
		return w.broken("useful", prompt, err)
	}
	draw := rng(w.options.Seed ^ prompt)
	last := prompt / a * a
	points := []uint64{prompt / 2, prompt - 1, last, last - min(last, 1), last + 1, a, a + 1, draw.below(prompt)}
	for _, x := range append(points, everyPoint(prompt)...) {
		if x == 0 || x >= prompt {
			continue
		}
		ce, err := w.readers("useful", prompt, reader{"a prompt that shares a prefix resumes earlier than its last aligned point",
			prompt, x, supply, min(x/a*a, w.floor(x))})
		if ce != nil || err != nil {
			return ce, err
		}
	}
	return nil, nil
}

// junctions judges that a producer which is told a junction supplies no less, and that a
// prompt which shares the prefix up to it resumes there.
func (w *worker) junctions(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt<<2)
	pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt}, nil)
	if err != nil {
		return w.broken("covers", prompt, err)
	}
	have := promise{resume: pl.ResumeTokens, demand: cloneSets(pl.Demand)}
	if have.cold, _, err = w.planner.PromptSupply(plan.Start{PromptTokens: prompt}); err != nil {
		return w.broken("covers", prompt, err)
	}
	ct := w.model().Groups[0].ChunkTokens
	for _, x := range append([]uint64{ct, prompt / 2, prompt - 1, prompt, 1 + draw.below(prompt)}, everyPoint(prompt)...) {
		if x == 0 || x > prompt {
			continue
		}
		supply, _, err := w.planner.PromptSupply(plan.Start{PromptTokens: prompt, JunctionTokens: x})
		if err != nil {
			return w.broken("covers", prompt, err)
		}
		if w.subject.PD {
			c := &pdCase{start: plan.Start{PromptTokens: prompt, JunctionTokens: x}, ask: plan.Ask{PromptTokens: prompt}}
			const less = "a producer that is told a junction supplies less"
			ce, err := w.uncovered(c, have.resume, supply, have.demand, less+", and the consumer demands the rest")
			if ce == nil && err == nil {
				ce = w.kept(&Counterexample{PromptTokens: prompt, JunctionTokens: x}, "covers", less, supply, &have)
			}
			if ce != nil || err != nil {
				return ce, err
			}
		}
		if w.subject.Probe && x < prompt {
			ce, err := w.readers("useful", prompt, reader{"a prompt that shares the prefix up to the junction resumes earlier than its last whole chunk",
				prompt, x, supply, w.floor(x)})
			if ce != nil {
				ce.JunctionTokens = x
			}
			if ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// everyPoint returns all points inside a short prompt.
func everyPoint(prompt uint64) (points []uint64) {
	for x := uint64(1); x < prompt && prompt <= everyCaseMax; x++ {
		points = append(points, x)
	}
	return points
}

// readers judges, as part of a relation, prompts that look up what another one supplied.
func (w *worker) readers(relation string, producer uint64, rds ...reader) (*Counterexample, error) {
	for _, rd := range rds {
		w.count(relation)
		tables := w.tables(rd.sets, rd.upto)
		step, err := w.planner.Probe(plan.Ask{PromptTokens: rd.prompt}, tables, 0)
		if err != nil {
			return w.broken(relation, rd.prompt, err)
		}
		if step.Plan.ResumeTokens >= rd.want || step.Plan.ResumeTokens >= w.permitted(producer, rd.prompt, 0, rd.want) {
			continue
		}
		ce := &Counterexample{PromptTokens: rd.prompt, ProducerTokens: producer, SharedTokens: rd.upto,
			ResumeTokens: step.Plan.ResumeTokens, WantTokens: rd.want}
		need := w.needAll(rd.prompt, rd.want)
		rows := []row{{"supply", rd.sets}, {"demand", cloneSets(step.Plan.Demand)}, {"need", need}, {"missing", minusAll(need, rd.sets)}}
		return w.fail(ce, relation, w.limiting(rd.prompt, 0, rd.want, tables), rd.what, rows...), nil
	}
	return nil, nil
}

// cloneSets copies a plan's sets, which the planner's next call overwrites.
func cloneSets(sets []abi.Bitmap) []abi.Bitmap {
	out := make([]abi.Bitmap, len(sets))
	for g := range sets {
		out[g] = append(abi.Bitmap{}, sets[g]...)
	}
	return out
}

// complete returns all whole chunks of a prompt.
func (w *worker) complete(prompt uint64) []abi.Bitmap {
	sets := make([]abi.Bitmap, len(w.model().Groups))
	for g := range sets {
		n := int(prompt / w.model().Groups[g].ChunkTokens)
		sets[g] = abi.NewBitmap(n)
		sets[g].SetRange(0, n)
	}
	return sets
}

// limiting returns the first group that by itself cannot go on from token want.
func (w *worker) limiting(prompt, local, want uint64, tables []abi.States) int {
	for g := range w.model().Groups {
		gr := &w.model().Groups[g]
		r := abi.Round{
			BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens, PromptTokens: prompt, StoredTokens: prompt,
			AlignTokens: w.model().AlignTokens, LocalTokens: local, BoundTokens: want,
			Lo: uint32(local / gr.ChunkTokens), Hi: uint32((want + gr.ChunkTokens - 1) / gr.ChunkTokens),
		}
		if r.Hi < r.Lo {
			continue
		}
		t := abi.NewStates(r.Chunks())
		for i := range r.Chunks() {
			if c := i + int(r.Lo); c < 32*len(tables[g]) {
				t.Put(i, tables[g].At(c))
			}
		}
		span, err := gr.Rule.Scan(r, t, abi.NewBitmap(r.Chunks()))
		if err != nil || min(want, (uint64(r.Lo)+uint64(span.Usable))*gr.ChunkTokens) < want {
			return g
		}
	}
	return 0
}

// tables returns lookup tables in which the chunks of sets that end at or before token
// upto are Hits.
func (w *worker) tables(sets []abi.Bitmap, upto uint64) []abi.States {
	out := make([]abi.States, len(sets))
	for g := range sets {
		n := int(upto / w.model().Groups[g].ChunkTokens)
		out[g] = abi.NewStates(n)
		for i := sets[g].Next(0); i >= 0 && i < n; {
			j := sets[g].NextUnset(i, min(n, 64*len(sets[g])))
			out[g].Fill(i, j, abi.Hit)
			i = sets[g].Next(j)
		}
	}
	return out
}

// arrivals judges needs after a partial arrival: the planner settles on whatever is
// there, and what attention then reads must still be there.
func (w *worker) arrivals(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt)
	return w.eachArrival(prompt, &draw, func(local uint64, tables []abi.States) (*Counterexample, error) {
		w.count("needs")
		pl, err := w.planner.Settled(plan.Ask{PromptTokens: prompt, LocalTokens: local}, tables)
		if err != nil {
			return w.broken("needs", prompt, err)
		}
		ce := &Counterexample{PromptTokens: prompt, LocalTokens: local, ResumeTokens: pl.ResumeTokens}
		if pl.Deferred {
			return w.deferred(ce, pl), nil
		}
		for g := range pl.Demand {
			for i := pl.Demand[g].Next(0); i >= 0; i = pl.Demand[g].Next(i + 1) {
				if i >= 32*len(tables[g]) || tables[g].At(i) != abi.Hit {
					ce.States = tables[g].Format(int(prompt / w.model().Groups[g].ChunkTokens))
					return w.fail(ce, "needs", g, "after a partial arrival the plan uses a chunk that did not arrive", row{"demand", pl.Demand}), nil
				}
			}
		}
		return w.needs(ce, pl)
	})
}

// arrivalTries is how many drawn partial arrivals are tried per length.
const arrivalTries = 6

// eachArrival calls do for prompts of which all but a few chunks have arrived: drawn ones,
// with up to two missing in each group, and of a short prompt all with up to two missing.
func (w *worker) eachArrival(prompt uint64, draw *rng, do func(local uint64, tables []abi.States) (*Counterexample, error)) (*Counterexample, error) {
	tables := w.ownTables(prompt, func(int, int) abi.State { return abi.Hit })
	type hole struct{ g, c int }
	miss := func(local uint64, holes ...hole) (*Counterexample, error) {
		for _, h := range holes {
			tables[h.g].Put(h.c, abi.Miss)
		}
		ce, err := do(local, tables)
		for _, h := range holes {
			tables[h.g].Put(h.c, abi.Hit)
		}
		return ce, err
	}
	for try := range arrivalTries {
		var holes []hole
		for g := range tables {
			n := prompt / w.model().Groups[g].ChunkTokens
			for i := try % 3; i > 0 && n > 0; i-- {
				holes = append(holes, hole{g, int(draw.below(n))})
			}
		}
		local := uint64(0)
		if try%2 == 1 {
			local = draw.below(prompt)
		}
		if ce, err := miss(local, holes...); ce != nil || err != nil {
			return ce, err
		}
	}
	var all []hole
	for g := range tables {
		for c := 0; prompt <= everyCaseMax && c < int(prompt/w.model().Groups[g].ChunkTokens); c++ {
			all = append(all, hole{g, c})
		}
	}
	for i := range all {
		for j := range i + 1 { // j = i: one hole
			for _, local := range [...]uint64{0, prompt / 3} {
				if ce, err := miss(local, all[i], all[j]); ce != nil || err != nil {
					return ce, err
				}
			}
		}
	}
	return nil, nil
}
