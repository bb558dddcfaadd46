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
	if ce := w.owned(prompt, supply); ce != nil {
		return ce, nil
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
	if w.subject.PD {
		w.count("covers")
		for g := range pl.Demand {
			if minus(pl.Demand[g], supply[g]) != nil {
				return w.fail(ce, "covers", g, "the consumer demands chunks that the producer never supplies",
					row{"supply", supply}, row{"demand", pl.Demand}, row{"missing", minusAll(pl.Demand, supply)}), nil
			}
		}
	}
	w.count("needs")
	if ce, err := w.needs(ce, pl); ce != nil || err != nil {
		return ce, err
	}
	w.count("useful")
	if least := w.floor(prompt - 1); pl.ResumeTokens < min(least, prompt-1) {
		ce.WantTokens = least
		g := w.limiting(prompt, local, least, w.tables(w.complete(prompt), prompt))
		return w.fail(ce, "useful", g, "the whole prompt is stored, but the consumer resumes earlier than its last whole chunk",
			row{"supply", supply}, row{"demand", cloneSets(pl.Demand)}, row{"need", w.needAll(prompt, least)}), nil
	}
	return nil, nil
}

// floor returns the last common chunk edge at or before n and the store cap.
func (w *worker) floor(n uint64) uint64 {
	if c := w.model().MaxStoreTokens; c > 0 {
		n = min(n, c)
	}
	l := uint64(1)
	for i := range w.model().Groups {
		l = lcm(l, w.model().Groups[i].ChunkTokens)
	}
	return n / l * l
}

// needs judges one plan: what attention reads from its resume point on is in its demand
// or local.
func (w *worker) needs(ce *Counterexample, pl plan.Plan) (*Counterexample, error) {
	e, local := pl.ResumeTokens, ce.LocalTokens
	if e <= local { // nothing is fetched, nothing is resumed
		return nil, nil
	}
	for g := range pl.Demand {
		need, err := w.need(g, ce.PromptTokens, e)
		if errors.Is(err, abi.ErrNoResume) {
			return w.fail(ce, "needs", g, "the plan resumes where the rule says that no KV can be resumed", row{"demand", pl.Demand}), nil
		}
		if err != nil {
			return w.broken("needs", ce.PromptTokens, err)
		}
		if bad := w.mask(ce, g, e, need); bad != nil {
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
// worker's scratch.
func (w *worker) need(g int, prompt, n uint64) (abi.Bitmap, error) {
	gr := &w.model().Groups[g]
	r := abi.Round{
		BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens, PromptTokens: prompt,
		StoredTokens: prompt, ResumeTokens: n, AlignTokens: w.model().AlignTokens,
		Hi: uint32((n + gr.ChunkTokens - 1) / gr.ChunkTokens),
	}
	if c := w.model().MaxStoreTokens; c > 0 {
		r.StoredTokens = min(prompt, c)
	}
	w.tmp = zeroed(w.tmp, r.Chunks())
	return w.tmp, gr.Rule.Need(r, w.tmp)
}

// needAll returns what every group's attention reads from token n on, for a drawing.
func (w *worker) needAll(prompt, n uint64) []abi.Bitmap {
	sets := make([]abi.Bitmap, len(w.model().Groups))
	for g := range sets {
		if need, err := w.need(g, prompt, n); err == nil {
			sets[g] = append(abi.Bitmap{}, need...)
		}
	}
	return sets
}

// owned judges covers when the consumer's own tier holds, or is being given, part of the
// prompt: only what it does not have is asked of the peer.
func (w *worker) owned(prompt uint64, supply []abi.Bitmap) *Counterexample {
	if !w.subject.PD || !w.domain.isEdgeLength(prompt) {
		return nil
	}
	for _, s := range [...]abi.State{abi.Hit, abi.Pending} {
		for _, part := range [...]struct{ lo, hi uint64 }{{0, prompt / 2}, {prompt / 2, prompt}, {prompt / 3, prompt / 3 * 2}} {
			own := make([]abi.States, len(supply))
			for g := range own {
				n := int(prompt / w.model().Groups[g].ChunkTokens)
				own[g] = abi.NewStates(n)
				own[g].Fill(int(part.lo)*n/int(prompt), int(part.hi)*n/int(prompt), s)
			}
			pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt}, own)
			if err != nil {
				ce, _ := w.broken("covers", prompt, err)
				return ce
			}
			w.count("covers")
			for g := range pl.Demand {
				missing := minus(pl.Demand[g], supply[g])
				for i := missing.Next(0); i >= 0; i = missing.Next(i + 1) {
					if own[g].At(i) == s {
						missing.Unset(i)
					}
				}
				if missing.Empty() {
					continue
				}
				ce := &Counterexample{PromptTokens: prompt, ResumeTokens: pl.ResumeTokens, States: own[g].Format(int(prompt / w.model().Groups[g].ChunkTokens))}
				return w.fail(ce, "covers", g, "the consumer's own tier holds part of the prompt; of the rest it demands chunks that the producer never supplies",
					row{"supply", supply}, row{"demand", pl.Demand}, row{"missing", at(g, missing)})
			}
		}
	}
	return nil
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
	return w.readers(prompt,
		reader{"the same prompt in leg probe resumes earlier than in leg pd", prompt, prompt, supply, resume},
		reader{"the next turn resumes earlier than the last whole chunk of the text before it", prompt + 1, prompt, text, w.floor(prompt)})
}

// shared judges that a prompt which shares a prefix resumes at its last aligned point.
func (w *worker) shared(prompt uint64) (*Counterexample, error) {
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
	for _, x := range [...]uint64{prompt / 2, prompt - 1, last, last - min(last, 1), last + 1, a, a + 1, draw.below(prompt)} {
		if x == 0 || x >= prompt {
			continue
		}
		ce, err := w.readers(prompt, reader{"a prompt that shares a prefix resumes earlier than its last aligned point",
			prompt, x, supply, min(x/a*a, w.floor(x))})
		if ce != nil || err != nil {
			return ce, err
		}
	}
	return nil, nil
}

func (w *worker) readers(producer uint64, rds ...reader) (*Counterexample, error) {
	for _, rd := range rds {
		w.count("useful")
		tables := w.tables(rd.sets, rd.upto)
		step, err := w.planner.Probe(plan.Ask{PromptTokens: rd.prompt}, tables, 0)
		if err != nil {
			return w.broken("useful", rd.prompt, err)
		}
		if step.Plan.ResumeTokens >= rd.want {
			continue
		}
		ce := &Counterexample{PromptTokens: rd.prompt, ProducerTokens: producer, SharedTokens: rd.upto,
			ResumeTokens: step.Plan.ResumeTokens, WantTokens: rd.want}
		need := w.needAll(rd.prompt, rd.want)
		rows := []row{{"supply", rd.sets}, {"demand", cloneSets(step.Plan.Demand)}, {"need", need}, {"missing", minusAll(need, rd.sets)}}
		return w.fail(ce, "useful", w.limiting(rd.prompt, 0, rd.want, tables), rd.what, rows...), nil
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
	tables := make([]abi.States, len(w.model().Groups))
	for try := range arrivalTries {
		for g := range tables {
			n := int(prompt / w.model().Groups[g].ChunkTokens)
			tables[g] = abi.NewStates(n)
			tables[g].Fill(0, n, abi.Hit)
			for holes := try % 3; holes > 0 && n > 0; holes-- {
				tables[g].Put(int(draw.below(uint64(n))), abi.Miss)
			}
		}
		local := uint64(0)
		if try%2 == 1 {
			local = draw.below(prompt)
		}
		w.count("needs")
		pl, err := w.planner.Settled(plan.Ask{PromptTokens: prompt, LocalTokens: local}, tables)
		if err != nil {
			return w.broken("needs", prompt, err)
		}
		ce := &Counterexample{PromptTokens: prompt, LocalTokens: local, ResumeTokens: pl.ResumeTokens}
		for g := range pl.Demand {
			for i := pl.Demand[g].Next(0); i >= 0; i = pl.Demand[g].Next(i + 1) {
				if i >= 32*len(tables[g]) || tables[g].At(i) != abi.Hit {
					ce.States = tables[g].Format(int(prompt / w.model().Groups[g].ChunkTokens))
					return w.fail(ce, "needs", g, "after a partial arrival the plan uses a chunk that did not arrive", row{"demand", pl.Demand}), nil
				}
			}
		}
		if bad, err := w.needs(ce, pl); bad != nil || err != nil {
			return bad, err
		}
	}
	return nil, nil
}

// arrivalTries is how many drawn partial arrivals are tried per length.
const arrivalTries = 6
