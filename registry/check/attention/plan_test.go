package attention_test

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/check/attention"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs/policy"
)

// A deployment is groups whose arithmetic and whose rules are both at hand.
type deployment struct {
	parts   []part
	m       *attention.Model
	planner *plan.Planner
}

// deploy opens a deployment. Where a group looks at the prompt's end, nothing but prompts
// is stored: see TestDecodedRowsAreNotAPrompts.
func deploy(t require.TestingT, seed uint64, align int, parts ...part) *deployment {
	d := &deployment{parts: parts}
	pm := plan.Model{AlignTokens: uint64(align)}
	var groups []attention.Group
	for _, p := range parts {
		groups = append(groups, p.group)
		pm.Groups = append(pm.Groups, plan.Group{
			Name: p.spec.Manifest().Name, Rule: p.open(t), BlockTokens: uint64(p.block), ChunkTokens: uint64(p.chunk()),
			State: p.group.Kind == attention.State,
		})
		if p.group.Kind == attention.PromptWindow && len(parts) > 1 && pm.Policies == nil {
			r, err := policy.PromptOnly().Open(nil)
			require.NoError(t, err)
			pm.Policies = []plan.Policy{{Name: "prompt-only", Rule: r}}
		}
	}
	d.m = attention.New(seed, 2, groups...)
	var err error
	d.planner, err = plan.New(pm)
	require.NoError(t, err)
	return d
}

// resumable reports whether an engine whose GPU holds a prefix of n tokens can go on: the
// states of n are saved, and no latent is cut.
func (d *deployment) resumable(n int) bool {
	for _, p := range d.parts {
		if p.group.Kind == attention.State && n%p.chunk() != 0 || p.group.Kind == attention.Latent && n%p.group.Ratio != 0 {
			return false
		}
	}
	return true
}

// free makes poison of the blocks of a sequence below token n that no query from n on
// reads, but not of the block that n stands in: what an engine's GPU still holds there.
func (d *deployment) free(s *attention.Sequence, prompt, n, size int) {
	for g, p := range d.parts {
		for lo := 0; lo+p.block <= n; lo += p.block {
			if !readLater(p.group, lo, lo+p.block, prompt, n, size) {
				s.Poison(g, lo, lo+p.block)
			}
		}
	}
}

// readLater reports whether a query of [n, size) reads a row of [lo, hi).
func readLater(g attention.Group, lo, hi, prompt, n, size int) bool {
	for q := n; q < size; q++ {
		for k := lo; k < hi; k++ {
			if g.Reads(q, k, prompt) {
				return true
			}
		}
	}
	return false
}

// A tier is what producers have offered, by chunk.
type tier map[plan.Ref]attention.Chunk

// A run is one request on a producer.
type run struct {
	text   []int
	prompt int
	native int   // prefix that its GPU already holds
	ends   []int // where steps end, besides stops and every decoded token
	abort  int   // token at which it is aborted; 0 = not
	joint  int   // end of a prefix known to be shared; 0 = none
	hasty  bool  // the engine frees blocks of a step before they are copied: a control
	held   tier  // what its tier already holds of this text
	truth  truth // the same text and prompt, computed whole
}

// start is what the producer knows when a request begins: of what its tier holds, the
// chunks that it wants.
func (d *deployment) start(t require.TestingT, r run) plan.Start {
	start := plan.Start{PromptTokens: uint64(r.prompt), JunctionTokens: uint64(r.joint)}
	if r.held != nil {
		wanted, err := d.planner.Wanted(start)
		require.NoError(t, err)
		for g := range wanted {
			for c := wanted[g].Next(0); c >= 0; c = wanted[g].Next(c + 1) {
				if r.held[plan.Ref{Group: g, Chunk: uint32(c)}] == nil {
					wanted[g].Unset(c)
				}
			}
		}
		start.Held = wanted
	}
	return start
}

// produce runs a request through the producer machine on an engine that frees blocks as
// soon as it may, and puts what is offered into the tier. The copies that the machine asks
// for are taken from the engine's rows at that moment.
func (d *deployment) produce(t require.TestingT, r run, out tier) {
	m, err := d.planner.Produce(d.start(t, r))
	require.NoError(t, err)
	reuse, err := m.ReuseTokens()
	require.NoError(t, err)
	native := min(r.native, int(reuse))
	for !d.resumable(native) {
		native--
	}
	s := d.m.Begin(r.text, r.prompt)
	for g := range d.parts {
		if native > 0 {
			s.Load(g, 0, r.truth.seq.Rows(g, 0, native))
		}
	}
	d.free(s, r.prompt, native, len(r.text))
	s.Resume(native)
	slots := tier{}
	apply := func(fx plan.Effects, err error) {
		require.NoError(t, err)
		for _, c := range fx.Copies {
			p := d.parts[c.Group]
			if c.First {
				slots[c.Ref] = d.m.Begin(make([]int, p.chunk()), 1).Rows(c.Group, 0, p.chunk())
			}
			at := int(c.Block)*p.block - int(c.Chunk)*p.chunk()
			for i, rows := range s.Rows(c.Group, int(c.Block)*p.block, int(c.Block+c.Blocks)*p.block) {
				copy(slots[c.Ref][i][at:], rows)
			}
		}
		for _, ref := range fx.Offers {
			if slots[ref] == nil {
				slots[ref] = r.held[ref]
			}
			require.NotNil(t, slots[ref], "offered without a copy")
			out[ref] = slots[ref]
		}
	}
	apply(m.Native(uint64(native)))
	ends := append(slices.Clone(r.ends), r.prompt)
	for _, n := range m.StopTokens() {
		ends = append(ends, int(n))
	}
	for n := r.prompt + 1; n <= len(r.text); n++ {
		ends = append(ends, n)
	}
	slices.Sort(ends)
	at := native
	for _, n := range slices.Compact(ends) {
		if n <= at || n > len(r.text) {
			continue
		}
		d.free(s, r.prompt, at, len(r.text))
		how := r.truth.unlikeAt(at, s.Step(n))
		require.Empty(t, how, "the engine frees what it reads")
		if r.hasty {
			d.free(s, r.prompt, n, len(r.text))
		}
		apply(m.Step(uint64(n)))
		if at = n; r.abort > 0 && at >= r.abort {
			apply(m.Abort())
			return
		}
	}
	apply(m.Finish(uint64(len(r.text))))
}

// unlikeAt is unlike for logits that begin at token n.
func (w *truth) unlikeAt(n int, logits [][]float64) string {
	part := truth{logits: w.logits[:n+len(logits)]}
	return part.unlike(logits)
}

// notOffered is what consume says of a demand that nobody supplies.
const notOffered = "demands a chunk that was not offered"

// consume resumes at the point of a plan with the demanded chunks, the local prefix, and
// poison, and says what is wrong: "" or how its logits are not those of the truth.
func (d *deployment) consume(w *truth, pl plan.Plan, local int, from tier) string {
	s := d.m.Begin(w.text, w.prompt)
	s.EveryState = true
	for g, p := range d.parts {
		for k := range local { // of a GPU prefix, what the query at its end reads
			if readLater(p.group, k, k+1, w.prompt, local, len(w.text)) {
				s.Load(g, k, w.seq.Rows(g, k, k+1))
			}
		}
		for c := pl.Demand[g].Next(0); c >= 0; c = pl.Demand[g].Next(c + 1) {
			rows := from[plan.Ref{Group: g, Chunk: uint32(c)}]
			if rows == nil {
				return notOffered
			}
			s.Load(g, c*p.chunk(), rows)
		}
	}
	s.Resume(int(pl.ResumeTokens))
	return w.unlike(s.Step(len(w.text)))
}

// eager plans in leg pd.
func (d *deployment) eager(t require.TestingT, prompt, local int) plan.Plan {
	pl, err := d.planner.Eager(plan.Ask{PromptTokens: uint64(prompt), LocalTokens: uint64(local)}, nil)
	require.NoError(t, err)
	require.False(t, pl.Deferred)
	return pl
}

// probe plans in leg probe over the chunks of a tier that end at or before token shared.
func (d *deployment) probe(t require.TestingT, prompt, local, shared int, from tier) plan.Plan {
	known := make([]abi.States, len(d.parts))
	for g, p := range d.parts {
		n := min(prompt, shared) / p.chunk()
		known[g] = abi.NewStates(n)
		for c := range n {
			if from[plan.Ref{Group: g, Chunk: uint32(c)}] != nil {
				known[g].Put(c, abi.Hit)
			} else {
				known[g].Put(c, abi.Miss)
			}
		}
	}
	pl, err := d.planner.Settled(plan.Ask{PromptTokens: uint64(prompt), LocalTokens: uint64(local)}, known)
	require.NoError(t, err)
	return pl
}

// mixes are groups as in hybrids that are served today, and each kind beside full.
func mixes() map[string][]part {
	return map[string][]part{
		"full":                     {full().in(2, 2)},
		"window and full":          {window(5, 0).in(2, 2), full().in(2, 3)},
		"wide window, one block":   {window(11, 0).in(3, 1), full().in(1, 4)},
		"window of one":            {window(1, 0).in(2, 1), full().in(2, 2)},
		"window with extra":        {window(3, 4).in(1, 3), full().in(2, 2)},
		"two windows":              {window(3, 0).in(1, 2), window(9, 0).in(2, 2)},
		"chunked and full":         {chunked(8).in(2, 2), full().in(2, 2)},
		"chunked, odd":             {chunked(5).in(2, 2), full().in(1, 3)},
		"sink, window, full":       {sink(3, 4).in(2, 2), window(6, 0).in(1, 2), full().in(2, 2)},
		"state, all saved":         {state(0).in(4, 1), full().in(2, 2)},
		"state, saved at stops":    {state(1).in(4, 1), full().in(2, 1), window(3, 0).in(2, 1)},
		"latent of two, window":    {latent(2).in(2, 2), window(4, 0).in(2, 1)},
		"latent of three, full":    {latent(3).in(2, 2), full().in(3, 1)},
		"latent as one layer each": {latent(1).in(2, 3)},
		"hidden, window":           {hiddenStates().in(2, 2), window(4, 0).in(4, 1)},
		"rswa":                     {rswa(4).in(2, 2)},
		"rswa and full":            {rswa(3).in(2, 1), full().in(2, 2)},
		"rswa and window":          {rswa(6).in(1, 3), window(3, 0).in(2, 1)},
	}
}

// A tally says what a test reached, so that it cannot pass by resuming nowhere.
type tally struct{ resumed, inside, cases int }

func (y *tally) add(d *deployment, pl plan.Plan, local int) {
	y.cases++
	if n := int(pl.ResumeTokens); n > local {
		y.resumed++
		if slices.ContainsFunc(d.parts, func(p part) bool { return n%p.chunk() != 0 }) {
			y.inside++
		}
	}
}

// A life is a prompt and what becomes of its chunks.
type life struct {
	run
	local   int // prefix on the consumers' GPUs
	shared  int // tokens that another prompt shares
	evicted int // every so many chunks of the tier are evicted after the first turn; 0 = none
	loadCap int // of the consumer of the first turn; 0 = none
}

// live runs a prompt, and what is decoded after it, on a producer and has consumers go on
// from what it offered: one of the same prompt in leg pd; the next turn in leg probe; the
// next turn in leg pd from a producer that holds what is left of the first turn's chunks;
// and another prompt, which shares some tokens.
func (d *deployment) live(t require.TestingT, l life, y *tally) {
	for !d.resumable(l.local) {
		l.local--
	}
	l.truth = compute(d.m, l.text, l.prompt)
	stored := tier{}
	d.produce(t, l.run, stored)
	resume := func(what string, w *truth, pl plan.Plan, local int, from tier) {
		y.add(d, pl, local)
		require.Empty(t, d.consume(w, pl, local, from), "%s, resume at %d", what, pl.ResumeTokens)
	}
	if l.abort == 0 {
		pl, err := d.planner.Eager(plan.Ask{PromptTokens: uint64(l.prompt), LocalTokens: uint64(l.local), LoadCapTokens: uint64(l.loadCap)}, nil)
		require.NoError(t, err)
		resume("leg pd", &l.truth, pl, l.local, stored)
	}
	for ref := range stored {
		if l.evicted > 0 && (int(ref.Chunk)+ref.Group)%l.evicted == 0 {
			delete(stored, ref)
		}
	}

	text := append(slices.Clone(l.text), words(7, 9)...)
	next := compute(d.m, text, len(l.text)+5)
	resume("next turn in leg probe", &next, d.probe(t, next.prompt, l.local, len(l.text), stored), l.local, stored)
	fresh := tier{}
	d.produce(t, run{text: text, prompt: next.prompt, native: l.native, ends: l.ends, held: stored, truth: next}, fresh)
	resume("next turn in leg pd", &next, d.eager(t, next.prompt, l.local), l.local, fresh)

	l.local = min(l.local, l.shared)
	for !d.resumable(l.local) {
		l.local--
	}
	other := compute(d.m, append(slices.Clone(l.text[:l.shared]), words(9, 5)...), l.shared+6)
	resume("another prompt", &other, d.probe(t, other.prompt, l.local, l.shared, stored), l.local, stored)
}

// What the planner demands is offered by the producer machine, and is enough to resume:
// for every prompt to 26 tokens, several local prefixes, native prefixes and steps.
func TestDemandIsEnough(t *testing.T) {
	for name, parts := range mixes() {
		t.Run(name, func(t *testing.T) {
			var y tally
			for _, align := range []int{0, 24} {
				d := deploy(t, 3, align, parts...)
				for prompt := 1; prompt <= 26; prompt++ {
					step := 1 + prompt*7%5
					l := life{
						run:   run{text: words(prompt+prompt%6, 2), prompt: prompt, native: prompt * 5 % 17},
						local: prompt * 3 % 11 % prompt, shared: prompt * 2 / 3,
					}
					for n := step; n < prompt; n += step {
						l.ends = append(l.ends, n)
					}
					d.live(t, l, &y)
				}
			}
			require.Greater(t, y.resumed, y.cases/3)
			t.Logf("%d cases, %d resumed, %d of them inside a chunk", y.cases, y.resumed, y.inside)
		})
	}
}

func TestDemandIsEnoughInDrawnCases(t *testing.T) {
	var y tally
	defer func() { t.Logf("%d cases, %d resumed, %d of them inside a chunk", y.cases, y.resumed, y.inside) }()
	rapid.Check(t, func(t *rapid.T) {
		var parts []part
		edge := uint64(1) // aligned points do not cut a latent: TestAlignedPointsInsideALatent
		for range rapid.IntRange(1, 3).Draw(t, "groups") {
			p := drawPart(t)
			parts = append(parts, p)
			edge = plan.LCM(plan.LCM(edge, uint64(p.chunk())), uint64(max(1, p.group.Ratio)))
		}
		align := int(edge) * rapid.IntRange(0, 3).Draw(t, "align")
		d := deploy(t, rapid.Uint64().Draw(t, "weights"), align, parts...)
		d.planner.Model().MaxStoreTokens = rapid.SampledFrom([]uint64{0, 0, 0, 1, 7, 16, 25}).Draw(t, "store cap")
		prompt := rapid.IntRange(1, 40).Draw(t, "prompt")
		text := prompt + rapid.IntRange(0, 14).Draw(t, "decoded")
		below := func(label string, n int) int { return rapid.IntRange(0, n).Draw(t, label) }
		shared := below("shared", text)
		d.live(t, life{
			run: run{
				text:   words(text, rapid.Uint64().Draw(t, "words")),
				prompt: prompt,
				native: below("native", prompt-1),
				ends:   rapid.SliceOfN(rapid.IntRange(1, prompt), 0, 5).Draw(t, "steps"),
				abort:  rapid.SampledFrom([]int{0, 0, 1 + prompt/2, text}).Draw(t, "abort"),
				joint:  rapid.SampledFrom([]int{0, min(shared, prompt)}).Draw(t, "junction"),
			},
			local:   below("local", prompt-1),
			shared:  shared,
			evicted: below("evicted", 4),
			loadCap: rapid.SampledFrom([]int{0, 0, 1 + prompt/2}).Draw(t, "load cap"),
		}, &y)
	})
}

// Where aligned points cut a latent, a consumer with a load cap of its own goes on from a
// point before one, and nobody keeps the window's tail there. The check refuses such a
// deployment, because its prompts resume earlier than their last whole chunk.
func TestAlignedPointsInsideALatent(t *testing.T) {
	d := deploy(t, 1, 6, latent(5).in(1, 2), window(1, 3).in(1, 3))
	w, out := compute(d.m, words(22, 1), 22), tier{}
	d.produce(t, run{text: w.text, prompt: 22, truth: w}, out)
	pl, err := d.planner.Eager(plan.Ask{PromptTokens: 22, LoadCapTokens: 12}, nil)
	require.NoError(t, err)
	require.Equal(t, notOffered, d.consume(&w, pl, 0, out))
	rep, err := check.Run(context.Background(), d.subject(t, 22), check.Options{Workers: 1})
	require.NoError(t, err)
	require.NotNil(t, rep.Counterexample)
	require.Equal(t, "useful", rep.Counterexample.Relation)
}

// A supply that is wrong is told apart: by a demand that was not offered, or, where blocks
// were freed before they were copied, by NaN.
func TestWrongSupplyIsNotEnough(t *testing.T) {
	reach := func(p part) func(abi.Round, abi.Bitmap) error { return p.open(t).Reach }
	for name, c := range map[string]struct {
		part  part
		hasty bool
		want  string
	}{
		"window a token short":          {twist(window(6, 0).in(2, 1), twisted{reach: reach(window(5, 0))}), false, notOffered},
		"sink forgotten":                {twist(sink(3, 4).in(2, 1), twisted{reach: reach(window(4, 0))}), false, notOffered},
		"state where nobody resumes":    {twist(state(1).in(4, 1), twisted{reach: func(abi.Round, abi.Bitmap) error { return nil }}), false, notOffered},
		"window freed before its copy":  {window(3, 0).in(1, 1), true, "NaN"},
		"window copied in time":         {window(3, 0).in(1, 1), false, ""},
		"chunked freed before its copy": {chunked(4).in(1, 1), true, "NaN"},
	} {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, 3, 0, c.part, full().in(3, 2))
			how := ""
			for prompt := 1; prompt <= 30 && how == ""; prompt++ {
				w := compute(d.m, words(prompt, 2), prompt)
				out := tier{}
				d.produce(t, run{text: w.text, prompt: prompt, ends: []int{prompt / 2}, hasty: c.hasty, truth: w}, out)
				how = d.consume(&w, d.eager(t, prompt, 0), 0, out)
			}
			require.Equal(t, c.want, how)
		})
	}
}

// A rule whose Scan is wrong makes the model read NaN, or asks for what was not offered.
func TestWrongDemandIsNotEnough(t *testing.T) {
	scan := func(p part) scanFunc { return p.open(t).Scan }
	for name, c := range map[string]struct {
		part part
		scan scanFunc
	}{
		"window a token short": {window(6, 0).in(1, 1), scan(window(5, 0))},
		"sink forgotten":       {sink(3, 4).in(2, 1), scan(window(4, 0))},
		"chunked as a window":  {chunked(8).in(2, 1), scan(window(3, 0))},
		"state as full":        {state(0).in(4, 1), scan(full())},
		"latent as full":       {latent(4).in(2, 1), scan(full())},
		"state a chunk early": {state(0).in(4, 1), func(r abi.Round, s abi.States, out abi.Bitmap) (abi.Span, error) {
			span, err := state(0).open(t).Scan(r, s, out)
			if n := int(span.Usable); n > 1 {
				out.Unset(n - 1)
				out.Set(n - 2)
			}
			return span, err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, 3, 0, twist(c.part, twisted{scan: c.scan}), full().in(2, 1))
			how := ""
			for prompt := 1; prompt <= 30 && how == ""; prompt++ {
				w := compute(d.m, words(prompt, 2), prompt)
				all := tier{} // the whole prompt, so that only the demand can be short
				for g, p := range d.parts {
					for c := range prompt / p.chunk() {
						all[plan.Ref{Group: g, Chunk: uint32(c)}] = w.seq.Rows(g, c*p.chunk(), (c+1)*p.chunk())
					}
				}
				how = d.consume(&w, d.eager(t, prompt, 0), 0, all)
			}
			require.Equal(t, "NaN", how)
		})
	}
}

type scanFunc func(abi.Round, abi.States, abi.Bitmap) (abi.Span, error)

// twisted is a shipped rule with a function replaced.
type twisted struct {
	abi.SpecRule
	spec  abi.Spec
	reach func(abi.Round, abi.Bitmap) error
	scan  scanFunc
}

func twist(p part, by twisted) part {
	by.spec = p.spec
	p.spec = twistedSpec{p.spec, by}
	return p
}

type twistedSpec struct {
	abi.Spec
	by twisted
}

func (s twistedSpec) Open(params []uint64) (abi.Rule, error) {
	r, err := s.Spec.Open(params)
	if err != nil {
		return nil, err
	}
	by := s.by
	by.SpecRule = r.(abi.SpecRule)
	return by, nil
}

func (r twisted) Reach(x abi.Round, out abi.Bitmap) error {
	if r.reach != nil {
		return r.reach(x, out)
	}
	return r.SpecRule.Reach(x, out)
}

func (r twisted) Scan(x abi.Round, s abi.States, out abi.Bitmap) (abi.Span, error) {
	if r.scan != nil {
		return r.scan(x, s, out)
	}
	return r.SpecRule.Scan(x, s, out)
}
