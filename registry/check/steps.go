package check

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// A producer plays an engine against the planner's machine: it computes, keeps its own
// account of which blocks are alive on the GPU, and collects what is offered.
type producer struct {
	w       *worker
	m       *plan.Machine
	prompt  uint64
	at      uint64
	offered []abi.Bitmap
	copied  [][]uint32 // per group and chunk: blocks copied
	stops   []uint64   // where steps of the prompt must end
	saves   []bool     // per group: states are saved at every block, without a stop
	wrong   string     // what the machine did wrong, in words
	group   int        // where
}

func (w *worker) produce(s plan.Start) (*producer, error) {
	m, err := w.planner.Produce(s)
	if err != nil {
		return nil, err
	}
	p := &producer{w: w, m: m, prompt: s.PromptTokens, stops: m.StopTokens()}
	for range w.model().Groups {
		p.offered = append(p.offered, abi.Bitmap{})
		p.copied = append(p.copied, nil)
	}
	if p.saves, err = w.saved(s); err != nil {
		return nil, err
	}
	return p, nil
}

// take applies the effects of a step from p.at to token n.
func (p *producer) take(fx plan.Effects, n uint64, err error) error {
	if err != nil {
		return err
	}
	for _, c := range fx.Copies {
		gr := &p.w.model().Groups[c.Group]
		for b := uint64(c.Block); b < uint64(c.Block+c.Blocks); b++ {
			ok, err := p.alive(c.Group, b, n)
			if err != nil {
				return err
			}
			if !ok {
				p.blame(c.Group, "block %d is copied after the step from %d to %d, when it is not alive", b, p.at, n)
			}
		}
		have := &p.copied[c.Group]
		for len(*have) <= int(c.Chunk) {
			*have = append(*have, 0)
		}
		(*have)[c.Chunk] += c.Blocks
		if n, full := (*have)[c.Chunk], uint32(gr.ChunkTokens/gr.BlockTokens); c.Last != (n == full) {
			p.blame(c.Group, "chunk %d has %d of %d blocks copied, but last is %v", c.Chunk, n, full, c.Last)
		}
	}
	for _, o := range fx.Offers {
		b := &p.offered[o.Group]
		for len(*b)*64 <= int(o.Chunk) {
			*b = append(*b, 0)
		}
		if b.Get(int(o.Chunk)) {
			p.blame(o.Group, "chunk %d is offered twice", o.Chunk)
		}
		b.Set(int(o.Chunk))
	}
	p.at = n
	return nil
}

func (p *producer) blame(g int, format string, args ...any) {
	if p.wrong == "" {
		p.wrong, p.group = fmt.Sprintf(format, args...), g
	}
}

// alive reports whether block b holds KV on the GPU after the step from p.at to n: it
// was computed in that step, or attention at p.at still reads it.
func (p *producer) alive(g int, b, n uint64) (bool, error) {
	bt := p.w.model().Groups[g].BlockTokens
	if (b+1)*bt > n {
		return false, nil
	}
	if (b+1)*bt > p.at && n > p.at {
		// A recurrent state is there where the step ended, or everywhere.
		return !p.w.model().Groups[g].State || (b+1)*bt == n || p.saves[g], nil
	}
	if p.w.reads[g] != nil { // the mask decides, not what the rule says of it
		return p.w.readsAny(g, p.at, b*bt, min(p.at, (b+1)*bt), p.prompt), nil
	}
	need, err := p.w.need(g, bt, p.prompt, p.at)
	if errors.Is(err, abi.ErrNoResume) {
		return false, nil
	}
	return err == nil && b*bt < p.at && need.Get(int(b)), err
}

func (p *producer) native(n uint64) error {
	p.at = n
	fx, err := p.m.Native(n)
	return p.take(fx, n, err)
}

// upTo computes the prompt up to token n in steps of the given size.
func (p *producer) upTo(n, step uint64) error {
	for p.at < n {
		if err := p.step(p.cut(min(p.at+step, n))); err != nil {
			return err
		}
	}
	return nil
}

// cut returns where a step to token n ends: at the first token on its way where one must.
// Decoding goes token by token, so some step ends at every block.
func (p *producer) cut(n uint64) uint64 {
	if i, _ := slices.BinarySearch(p.stops, p.at+1); i < len(p.stops) {
		n = min(n, p.stops[i])
	}
	for g := range p.w.model().Groups {
		if gr := &p.w.model().Groups[g]; gr.State && !p.saves[g] && p.at >= p.prompt {
			n = min(n, (p.at/gr.BlockTokens+1)*gr.BlockTokens)
		}
	}
	return n
}

// saved reports per group whether the engine saves every recurrent state: a rule that
// keeps states although no point is asked for has such an engine.
func (w *worker) saved(s plan.Start) ([]bool, error) {
	saves := make([]bool, len(w.model().Groups))
	for g := range saves {
		gr := &w.model().Groups[g]
		if !gr.State {
			continue
		}
		r := abi.Round{BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens, PromptTokens: s.PromptTokens,
			StoredTokens: s.PromptTokens, Hi: uint32(s.PromptTokens / gr.ChunkTokens)}
		out := abi.NewBitmap(r.Chunks())
		if err := gr.Rule.Reach(r, out); err != nil {
			return nil, &plan.RuleError{Group: gr.Name, Func: "reach", Round: r, Err: err}
		}
		saves[g] = !out.Empty()
	}
	return saves, nil
}

func (p *producer) step(n uint64) error {
	fx, err := p.m.Step(n)
	return p.take(fx, n, err)
}

func (p *producer) finish(n uint64) error {
	fx, err := p.m.Finish(n)
	return p.take(fx, n, err)
}

// schedule judges that the supply is the same for any split into steps, and that an
// abort keeps the aligned tails.
func (w *worker) schedule(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt)
	for _, text := range w.texts(prompt, &draw) {
		want, err := w.finalSupply(prompt, text)
		if err != nil {
			return w.broken("schedule", prompt, err)
		}
		if ce, err := w.nextTurn(prompt, text, want); ce != nil || err != nil {
			return ce, err
		}
		for _, step := range w.stepSizes(text, &draw) {
			w.count("schedule")
			p, err := w.produce(plan.Start{PromptTokens: prompt})
			if err == nil {
				err = p.run(text, step, &draw)
			}
			if err != nil {
				return w.broken("schedule", prompt, err)
			}
			ce := &Counterexample{PromptTokens: prompt, TextTokens: text, StepTokens: step}
			if p.wrong != "" {
				return w.fail(ce, "schedule", p.group, p.wrong, row{"supply", p.offered}), nil
			}
			for g := range want {
				missing, more := minus(want[g], p.offered[g]), minus(p.offered[g], want[g])
				if missing != nil || more != nil {
					text := "steps of this size supply less than one step does"
					if missing == nil {
						text, missing = "steps of this size supply chunks that one step does not", more
					}
					return w.fail(ce, "schedule", g, text, row{"one step", want}, row{"supply", p.offered}, row{"missing", at(g, missing)}), nil
				}
			}
		}
	}
	for text := prompt + 1; text <= min(everyCaseMax, w.subject.MaxTokens); text++ {
		want, err := w.finalSupply(prompt, text)
		if err != nil {
			return w.broken("useful", prompt, err)
		}
		if ce, err := w.nextTurn(prompt, text, want); ce != nil || err != nil {
			return ce, err
		}
	}
	return w.aborts(prompt, &draw)
}

// nextTurn judges that a prompt which begins with a whole text resumes at its last whole chunk.
func (w *worker) nextTurn(prompt, text uint64, supply []abi.Bitmap) (*Counterexample, error) {
	if !w.subject.Probe {
		return nil, nil
	}
	return w.readers("useful", prompt, reader{"the next turn resumes earlier than the last whole chunk of the text before it",
		text + 1, text, supply, w.floor(w.wholeText(prompt, text))})
}

// texts returns text lengths for a prompt: none generated, and a few ends of decoding.
func (w *worker) texts(prompt uint64, draw *rng) []uint64 {
	ct := w.model().Groups[0].ChunkTokens
	out := []uint64{prompt}
	for _, more := range [...]uint64{1, ct, 1 + draw.below(4*ct)} {
		if n := prompt + more; n > out[len(out)-1] && n <= w.subject.MaxTokens {
			out = append(out, n)
		}
	}
	return out
}

// wholeText is how much of a text all groups can store: a draft group leaves out the last
// token of a generated text, and what attends to a prompt in its own way keeps none of it.
func (w *worker) wholeText(prompt, text uint64) uint64 {
	whole := text
	for g := range w.model().Groups {
		if w.model().Groups[g].Draft && text > prompt {
			whole = min(whole, text-1)
		}
		if w.subject.Groups[g].Manifest.Mask == abi.MaskPromptWindow {
			whole = min(whole, prompt)
		}
	}
	return whole
}

// finalSupply is what a request supplies in all: at its prompt's end and its text's end.
func (w *worker) finalSupply(prompt, text uint64) ([]abi.Bitmap, error) {
	s := plan.Start{PromptTokens: prompt}
	want, _, err := w.planner.PromptSupply(s)
	if err != nil {
		return nil, err
	}
	more, _, err := w.planner.TextSupply(s, text)
	if err != nil {
		return nil, err
	}
	for g := range want {
		more[g].Or(want[g])
	}
	return more, nil
}

// stepSizes returns the steps to try: all at once, an engine's usual 2048, a chunk and a
// token less, a block and a token more, one token while that is short, and drawn (0).
func (w *worker) stepSizes(text uint64, draw *rng) []uint64 {
	gr := &w.model().Groups[0]
	sizes := []uint64{text, 2048, gr.ChunkTokens - 1, gr.BlockTokens + 1, 1 + draw.below(text), 0}
	if text <= oneTokenStepsMax {
		sizes = append(sizes, 1)
	}
	slices.Sort(sizes)
	sizes = slices.Compact(sizes)
	slices.Reverse(sizes) // one step first: the simplest case
	return slices.DeleteFunc(sizes, func(n uint64) bool { return n > text })
}

// oneTokenStepsMax bounds the texts that are also computed one token at a time.
const oneTokenStepsMax = 2048

// run computes the whole text in steps of the given size; 0 draws each step. The prompt
// is never mixed with decoding in one step, which is what engines do.
func (p *producer) run(text, step uint64, draw *rng) error {
	if err := p.native(0); err != nil {
		return err
	}
	for p.at < text {
		n := step
		if n == 0 {
			n = 1 + draw.below(3*p.w.model().Groups[0].ChunkTokens)
		}
		end := text
		if p.at < p.prompt {
			end = p.prompt
		}
		if err := p.step(p.cut(min(p.at+n, end))); err != nil {
			return err
		}
	}
	return p.finish(text)
}

// aborts judges that a request that ends at k tokens of its prompt has supplied at least
// the aligned tails of a prompt of k tokens.
func (w *worker) aborts(prompt uint64, draw *rng) (*Counterexample, error) {
	ct := w.model().Groups[0].ChunkTokens
	ends := []uint64{ct, ct + 1, prompt / 2, prompt - 1, draw.below(prompt), w.model().AlignTokens, w.model().AlignTokens + 1}
	slices.Sort(ends)
	for _, k := range slices.Compact(ends) {
		if k == 0 || k >= prompt {
			continue
		}
		w.count("schedule")
		want, err := w.planner.AlignedSupply(plan.Start{PromptTokens: k}, k)
		if err != nil {
			return w.broken("schedule", prompt, err)
		}
		p, err := w.produce(plan.Start{PromptTokens: prompt})
		if err == nil {
			err = p.native(0)
		}
		if err == nil {
			err = p.upTo(k, 1+draw.below(2*ct))
		}
		if err == nil {
			err = p.finish(k)
		}
		if err != nil {
			return w.broken("schedule", prompt, err)
		}
		ce := &Counterexample{PromptTokens: prompt, AbortTokens: k}
		if p.wrong != "" {
			return w.fail(ce, "schedule", p.group, p.wrong, row{"supply", p.offered}), nil
		}
		for g := range want {
			if missing := minus(want[g], p.offered[g]); missing != nil {
				return w.fail(ce, "schedule", g, "an abort supplies less than a prompt that ends there does; the supply depends on the steps so far",
					row{"shorter prompt", want}, row{"supply", p.offered}, row{"missing", at(g, missing)}), nil
			}
		}
	}
	return nil, nil
}

// A promise is what consumers of a prompt count on: what a cold one demands, and all that a
// cold producer supplies, on some of which those count that resume elsewhere, such as at an
// aligned point below a load cap of their own.
type promise struct {
	resume uint64
	demand []abi.Bitmap
	cold   []abi.Bitmap
}

// warm judges that a producer whose tier or GPU already holds a prefix supplies what a
// cold one does.
func (w *worker) warm(prompt uint64) (*Counterexample, error) {
	pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt}, nil)
	if err != nil {
		return w.broken("warm", prompt, err)
	}
	have := promise{resume: pl.ResumeTokens, demand: cloneSets(pl.Demand)}
	if have.cold, _, err = w.planner.PromptSupply(plan.Start{PromptTokens: prompt}); err != nil {
		return w.broken("warm", prompt, err)
	}
	if ce, err := w.warmPolicies(prompt, &have); ce != nil || err != nil {
		return ce, err
	}
	return w.eachWarm("warm", prompt, func(s plan.Start, gpu uint64) (*Counterexample, error) {
		return w.warmCase(s, gpu, &have)
	})
}

// kept refuses, as part of a relation, a supply that holds less than was promised. why says
// who supplies it.
func (w *worker) kept(ce *Counterexample, relation, why string, supply []abi.Bitmap, have *promise) *Counterexample {
	ce.ResumeTokens = have.resume
	for g := range supply {
		if minus(have.demand[g], supply[g]) != nil {
			return w.fail(ce, relation, g, why+", and the consumer demands the rest",
				row{"supply", supply}, row{"demand", have.demand}, row{"missing", minusAll(have.demand, supply)})
		}
	}
	for g := range supply {
		if minus(have.cold[g], supply[g]) != nil {
			return w.fail(ce, relation, g, why+", and a consumer that resumes earlier, such as at an aligned point below a load cap of its own, counts on the rest",
				row{"cold producer", have.cold}, row{"supply", supply}, row{"missing", minusAll(have.cold, supply)})
		}
	}
	return nil
}

// eachWarm calls do for producers of a prompt whose tier and GPU hold prefixes.
func (w *worker) eachWarm(relation string, prompt uint64, do func(s plan.Start, gpu uint64) (*Counterexample, error)) (*Counterexample, error) {
	ct := w.model().Groups[0].ChunkTokens
	residents := []uint64{0, ct, prompt / 2, prompt}
	slices.Sort(residents)
	for _, resident := range slices.Compact(residents) {
		if resident > prompt {
			continue
		}
		s := plan.Start{PromptTokens: prompt, ResidentTokens: resident, Offers: min(resident, 1)}
		var err error
		if s.Held, err = w.held(s, resident); err != nil {
			return w.broken(relation, prompt, err)
		}
		m, err := w.planner.Produce(s)
		if err != nil {
			return w.broken(relation, prompt, err)
		}
		reuse, err := m.ReuseTokens()
		if err != nil {
			return w.broken(relation, prompt, err)
		}
		gpus := []uint64{0, min(ct, reuse), reuse / 2, reuse - min(reuse, 1), reuse}
		slices.Sort(gpus)
		for _, gpu := range slices.Compact(gpus) {
			if ce, err := do(s, gpu); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// warmPolicies judges what the policies admit for many resident prefixes and numbers of
// offers: only they see these, so no machine is needed.
func (w *worker) warmPolicies(prompt uint64, have *promise) (*Counterexample, error) {
	return w.eachOffer(prompt, func(s plan.Start) (*Counterexample, error) {
		w.count("warm")
		supply, _, err := w.planner.PromptSupply(s)
		if err != nil {
			return w.broken("warm", prompt, err)
		}
		why := "a producer that already holds a prefix supplies less than a cold one"
		if s.ResidentTokens == 0 {
			why = "a producer that was offered a prefix before supplies less than the first time"
		}
		ce := &Counterexample{PromptTokens: prompt, ResidentTokens: s.ResidentTokens, Offers: s.Offers}
		return w.kept(ce, "warm", why, supply, have), nil
	})
}

// eachOffer calls do for many resident prefixes and numbers of offers, when there are
// policies, which alone see them.
func (w *worker) eachOffer(prompt uint64, do func(s plan.Start) (*Counterexample, error)) (*Counterexample, error) {
	if len(w.model().Policies) == 0 {
		return nil, nil
	}
	draw := rng(w.options.Seed ^ prompt)
	ct := w.model().Groups[0].ChunkTokens
	residents := []uint64{0, min(ct, prompt), prompt / 4, prompt / 2, prompt / 4 * 3, prompt - 1, prompt, draw.below(prompt), draw.below(prompt) / ct * ct}
	slices.Sort(residents)
	for _, resident := range slices.Compact(residents) {
		for _, offers := range [...]uint64{0, 1, 2, 3, 4 + draw.below(1000)} {
			if ce, err := do(plan.Start{PromptTokens: prompt, ResidentTokens: resident, Offers: offers}); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}

// held returns the chunks below the resident prefix that a producer would pin.
func (w *worker) held(s plan.Start, resident uint64) ([]abi.Bitmap, error) {
	sets, err := w.planner.Wanted(s)
	if err != nil {
		return nil, err
	}
	for g := range sets {
		whole := int(resident / w.model().Groups[g].ChunkTokens)
		sets[g].UnsetRange(whole, max(whole, 64*len(sets[g])))
	}
	return sets, nil
}

func (w *worker) warmCase(s plan.Start, gpu uint64, have *promise) (*Counterexample, error) {
	w.count("warm")
	p, err := w.warmed(s, gpu)
	if p == nil || err != nil {
		return w.broken("warm", s.PromptTokens, err)
	}
	ce := &Counterexample{PromptTokens: s.PromptTokens, ResidentTokens: s.ResidentTokens, GPUTokens: gpu, ResumeTokens: have.resume}
	if p.wrong != "" {
		return w.fail(ce, "warm", p.group, p.wrong, row{"supply", p.offered}), nil
	}
	return w.kept(ce, "warm", "a producer that already holds a prefix supplies less than a cold one", p.offered, have), nil
}

// warmed runs a producer to its prompt's end from a native GPU prefix; nil when no engine
// can have that prefix, because it cannot be gone on from.
func (w *worker) warmed(s plan.Start, gpu uint64) (*producer, error) {
	p, err := w.produce(s)
	if err == nil {
		err = p.native(gpu)
	}
	if errors.Is(err, abi.ErrNoResume) {
		return nil, nil
	}
	if err == nil {
		err = p.upTo(s.PromptTokens, s.PromptTokens)
	}
	return p, err
}
