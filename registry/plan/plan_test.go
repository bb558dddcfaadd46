package plan_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
	"pgregory.net/rapid"
)

func open(t require.TestingT, s abi.Spec, p ...uint64) abi.Rule {
	r, err := s.Open(p)
	require.NoError(t, err)
	return r
}

// groupOf is a group that remembers its window for the dense oracle; 0 = full.
type groupOf struct {
	plan.Group
	window uint64
}

func drawModel(t *rapid.T) (plan.Model, []groupOf) {
	var gs []groupOf
	lcm := uint64(1)
	for range rapid.IntRange(1, 3).Draw(t, "groups") {
		g := groupOf{}
		g.BlockTokens = rapid.SampledFrom([]uint64{1, 2, 4}).Draw(t, "block")
		g.ChunkTokens = g.BlockTokens * rapid.Uint64Range(1, 4).Draw(t, "blocks")
		if rapid.Bool().Draw(t, "windowed") {
			g.window = rapid.Uint64Range(1, 30).Draw(t, "window")
			g.Rule = open(t, specs.Window(), g.window, rapid.Uint64Range(0, 5).Draw(t, "extra")).(abi.SpecRule)
		} else {
			g.Rule = open(t, specs.Full()).(abi.SpecRule)
		}
		for a := lcm; lcm%g.ChunkTokens != 0; {
			lcm += a
		}
		gs = append(gs, g)
	}
	m := plan.Model{AlignTokens: lcm * rapid.Uint64Range(0, 3).Draw(t, "align")}
	if rapid.Bool().Draw(t, "capped") {
		m.MaxStoreTokens = rapid.Uint64Range(1, 200).Draw(t, "cap")
	}
	for i := range gs {
		m.Groups = append(m.Groups, gs[i].Group)
	}
	if rapid.Bool().Draw(t, "policy") {
		m.Policies = append(m.Policies, plan.Policy{Name: "request-level", Rule: open(t, policy.RequestLevel())})
	}
	return m, gs
}

// need is the dense truth: the chunks that the query at n reads.
func (g *groupOf) need(n uint64) (out []int) {
	for k := uint64(0); k < n; k++ {
		if g.window == 0 || n-k < g.window {
			if c := int(k / g.ChunkTokens); len(out) == 0 || out[len(out)-1] != c {
				out = append(out, c)
			}
		}
	}
	return out
}

func drawTables(t *rapid.T, m plan.Model, prompt uint64, letters string) []abi.States {
	var tables []abi.States
	for g := range m.Groups {
		n := int(prompt / m.Groups[g].ChunkTokens)
		s, err := abi.ParseStates(string(rapid.SliceOfN(rapid.SampledFrom([]byte(letters)), n, n).Draw(t, "states")))
		require.NoError(t, err)
		tables = append(tables, s)
	}
	return tables
}

// TestPlanReadsOnlyWhatIsThere: whatever the tables say, at the planned resume point all
// that the mask reads is local or demanded, all that is demanded is there, and the point
// keeps every bound.
func TestPlanReadsOnlyWhatIsThere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, gs := drawModel(t)
		p, err := plan.New(m)
		require.NoError(t, err)
		prompt := rapid.Uint64Range(1, 150).Draw(t, "prompt")
		ask := plan.Ask{PromptTokens: prompt, LocalTokens: rapid.Uint64Range(0, prompt).Draw(t, "local"),
			LoadCapTokens: rapid.Uint64Range(0, 160).Draw(t, "loadcap")}
		tables := drawTables(t, m, prompt, "HHHHHHHPM")
		pl, err := p.Settled(ask, tables)
		require.NoError(t, err)
		require.False(t, pl.Deferred)
		e := pl.ResumeTokens
		require.GreaterOrEqual(t, e, ask.LocalTokens)
		if e == ask.LocalTokens {
			for g := range pl.Demand {
				require.True(t, pl.Demand[g].Empty())
			}
			return
		}
		require.Less(t, e, prompt)
		if ask.LoadCapTokens > 0 {
			require.LessOrEqual(t, e, ask.LoadCapTokens)
		}
		if m.MaxStoreTokens > 0 {
			require.LessOrEqual(t, e, m.MaxStoreTokens)
		}
		for g := range gs {
			for _, c := range gs[g].need(e) {
				local := uint64(c+1)*gs[g].ChunkTokens <= ask.LocalTokens
				require.True(t, local || pl.Demand[g].Get(c), "group %d reads chunk %d at %d", g, c, e)
			}
			for i := pl.Demand[g].Next(0); i >= 0; i = pl.Demand[g].Next(i + 1) {
				require.Contains(t, []abi.State{abi.Hit, abi.Pending}, tables[g].At(i))
			}
		}
	})
}

// TestProbeSeesEnough: asking in at most two batches gives the plan that knowing every
// state gives.
func TestProbeSeesEnough(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, _ := drawModel(t)
		p, err := plan.New(m)
		require.NoError(t, err)
		prompt := rapid.Uint64Range(1, 150).Draw(t, "prompt")
		ask := plan.Ask{PromptTokens: prompt, LocalTokens: rapid.Uint64Range(0, prompt).Draw(t, "local")}
		truth := drawTables(t, m, prompt, "HHHHHPM")
		known := drawTables(t, m, prompt, "RRRRH")
		for g := range known { // the own tier never contradicts the truth
			for i := range int(prompt / m.Groups[g].ChunkTokens) {
				if known[g].At(i) == abi.Hit {
					truth[g].Put(i, abi.Hit)
				}
			}
		}
		want, err := p.Settled(ask, truth)
		require.NoError(t, err)
		resume, demand := want.ResumeTokens, cloneSets(want.Demand)

		for round := 0; ; round++ {
			require.LessOrEqual(t, round, plan.ProbeRounds)
			step, err := p.Probe(ask, known, round)
			require.NoError(t, err)
			if step.Done {
				require.Equal(t, resume, step.Plan.ResumeTokens)
				for g := range demand {
					require.True(t, demand[g].Equal(step.Plan.Demand[g]))
				}
				return
			}
			asked := 0
			for g := range step.Lookup {
				for i := step.Lookup[g].Next(0); i >= 0; i = step.Lookup[g].Next(i + 1) {
					require.Equal(t, abi.Retry, known[g].At(i), "only what is unknown is asked")
					known[g].Put(i, truth[g].At(i))
					asked++
				}
			}
			require.Positive(t, asked)
		}
	})
}

func cloneSets(s []abi.Bitmap) (out []abi.Bitmap) {
	for _, b := range s {
		out = append(out, slices.Clone(b))
	}
	return out
}

// TestProbeAnswersLate: what no batch answered is a Miss, and the plan still ends.
func TestProbeAnswersLate(t *testing.T) {
	m := plan.Model{Groups: []plan.Group{{Name: "full", Rule: open(t, specs.Full()).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 4}}}
	p, err := plan.New(m)
	require.NoError(t, err)
	known, err := abi.ParseStates("HHRH")
	require.NoError(t, err)
	step, err := p.Probe(plan.Ask{PromptTokens: 17}, []abi.States{known}, plan.ProbeRounds)
	require.NoError(t, err)
	require.True(t, step.Done)
	require.EqualValues(t, 8, step.Plan.ResumeTokens)
}

// TestLoadCapIsFloored: a cap that only the consumer knows is moved down to a point whose
// tail every producer keeps; without such points it means that nothing is fetched.
func TestLoadCapIsFloored(t *testing.T) {
	m := plan.Model{AlignTokens: 16, Groups: []plan.Group{
		{Name: "full", Rule: open(t, specs.Full()).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 4},
		{Name: "sliding", Rule: open(t, specs.Window(), 5, 0).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 8},
	}}
	for _, c := range []struct{ align, loadCap, local, want uint64 }{
		{16, 0, 0, 64}, {16, 70, 0, 64}, {16, 64, 0, 64}, {16, 63, 0, 48}, {16, 15, 0, 0}, {0, 63, 0, 0}, {16, 40, 36, 36},
	} {
		m.AlignTokens = c.align
		p, err := plan.New(m)
		require.NoError(t, err)
		pl, err := p.Eager(plan.Ask{PromptTokens: 65, LoadCapTokens: c.loadCap, LocalTokens: c.local}, nil)
		require.NoError(t, err)
		require.Equal(t, c.want, pl.ResumeTokens, "%+v", c)
	}
}

// TestHeldChunksAreNotCopied: what the tier holds is offered at once, and only the rest
// is copied.
func TestHeldChunksAreNotCopied(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, _ := drawModel(t)
		p, err := plan.New(m)
		require.NoError(t, err)
		start := plan.Start{PromptTokens: rapid.Uint64Range(1, 150).Draw(t, "prompt"), JunctionTokens: rapid.Uint64Range(0, 150).Draw(t, "junction")}
		wanted, err := p.Wanted(start)
		require.NoError(t, err)
		start.Held = cloneSets(wanted)
		for g := range start.Held {
			for i := start.Held[g].Next(0); i >= 0; i = start.Held[g].Next(i + 1) {
				if rapid.Bool().Draw(t, "evicted") {
					start.Held[g].Unset(i)
				}
			}
		}
		final, _, err := p.PromptSupply(start)
		require.NoError(t, err)
		mc, err := p.Produce(start)
		require.NoError(t, err)
		reuse, err := mc.ReuseTokens()
		require.NoError(t, err)
		gpu := rapid.Uint64Range(0, reuse).Draw(t, "gpu")
		offered := make([]map[uint32]bool, len(m.Groups))
		for g := range offered {
			offered[g] = map[uint32]bool{}
		}
		take := func(fx plan.Effects, err error) {
			require.NoError(t, err)
			for _, c := range fx.Copies {
				h := start.Held[c.Group]
				require.False(t, int(c.Chunk) < 64*len(h) && h.Get(int(c.Chunk)), "held, yet copied")
			}
			for _, o := range fx.Offers {
				require.False(t, offered[o.Group][o.Chunk], "offered twice")
				offered[o.Group][o.Chunk] = true
			}
		}
		take(mc.Native(gpu))
		take(mc.Step(start.PromptTokens))
		for g := range final {
			for i := final[g].Next(0); i >= 0; i = final[g].Next(i + 1) {
				require.True(t, offered[g][uint32(i)], "group %d chunk %d is promised, but not offered", g, i)
			}
			require.Equal(t, final[g].Count(), len(offered[g]))
		}
	})
}

// TestJunctionIsKept: a prompt that shares only the junction's prefix resumes where a
// consumer of just that prefix would.
func TestJunctionIsKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, _ := drawModel(t)
		m.MaxStoreTokens = 0
		p, err := plan.New(m)
		require.NoError(t, err)
		prompt := rapid.Uint64Range(2, 150).Draw(t, "prompt")
		junction := rapid.Uint64Range(1, prompt-1).Draw(t, "junction")
		_, want, err := p.TextSupply(plan.Start{PromptTokens: junction}, junction)
		require.NoError(t, err)
		supply, _, err := p.PromptSupply(plan.Start{PromptTokens: prompt, JunctionTokens: junction})
		require.NoError(t, err)
		var tables []abi.States
		for g := range supply {
			n := int(junction / m.Groups[g].ChunkTokens)
			s := abi.NewStates(n)
			for i := range n {
				if supply[g].Get(i) {
					s.Put(i, abi.Hit)
				}
			}
			tables = append(tables, s)
		}
		pl, err := p.Settled(plan.Ask{PromptTokens: prompt}, tables)
		require.NoError(t, err)
		require.GreaterOrEqual(t, pl.ResumeTokens, want)
	})
}

// TestDraftGroupsLastToken: the last generated position of a draft group is rewritten
// when the text goes on, so the chunk that holds it is not stored.
func TestDraftGroupsLastToken(t *testing.T) {
	m := plan.Model{Groups: []plan.Group{
		{Name: "full", Rule: open(t, specs.Full()).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 4},
		{Name: "draft", Rule: open(t, specs.Full()).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 4, Draft: true},
	}}
	p, err := plan.New(m)
	require.NoError(t, err)
	sets, _, err := p.TextSupply(plan.Start{PromptTokens: 8}, 16)
	require.NoError(t, err)
	require.Equal(t, 4, sets[0].Count())
	require.Equal(t, 3, sets[1].Count())
	sets, _, err = p.PromptSupply(plan.Start{PromptTokens: 16})
	require.NoError(t, err)
	require.Equal(t, 4, sets[1].Count(), "the prompt's chunks are stable")
}

func TestMachineRefusesMisuse(t *testing.T) {
	m := plan.Model{Groups: []plan.Group{{Name: "sliding", Rule: open(t, specs.Window(), 8, 0).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 4}}, AlignTokens: 16}
	p, err := plan.New(m)
	require.NoError(t, err)
	_, err = p.Produce(plan.Start{})
	require.EqualError(t, err, "prompt of 0 tokens; it must be 1 to 2147483648")
	mc, err := p.Produce(plan.Start{PromptTokens: 64})
	require.NoError(t, err)
	_, err = mc.Step(4)
	require.EqualError(t, err, "step to 4 tokens before the native prefix was given")
	reuse, err := mc.ReuseTokens()
	require.NoError(t, err)
	require.EqualValues(t, 18, reuse, "the tail that ends at 16 starts with the block of token 9; the query at 19 no longer reads it")
	_, err = mc.Native(32)
	require.ErrorIs(t, err, plan.ErrNativeAboveReuse)
	require.EqualError(t, err, "native prefix is above reuse_tokens: 32 tokens, at most 18")
	_, err = mc.Native(16)
	require.NoError(t, err)
	_, err = mc.Native(16)
	require.EqualError(t, err, "native prefix of 16 tokens given twice")
	_, err = mc.Step(12)
	require.EqualError(t, err, "step to 12 tokens, below the 16 already computed")
	_, err = mc.Finish(64)
	require.NoError(t, err)
	_, err = mc.Step(65)
	require.EqualError(t, err, "step to 65 tokens after the request's end")
	_, err = mc.Abort()
	require.EqualError(t, err, "abort after the request's end")
}

// sparse can go on only from multiples of every: a stand-in for latent attention.
type sparse struct {
	abi.SpecRule
	every uint64
}

func (s sparse) Need(r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens%s.every != 0 {
		return abi.ErrNoResume
	}
	return s.SpecRule.Need(r, out)
}

// TestReuseWhereNotEveryTokenResumes: the longest reuse is the largest prefix that works,
// found here by trying all, and a prefix that cannot be resumed is refused.
func TestReuseWhereNotEveryTokenResumes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		every := rapid.SampledFrom([]uint64{1, 2, 4}).Draw(t, "every")
		w := rapid.Uint64Range(1, 40).Draw(t, "window")
		m := plan.Model{AlignTokens: 32, Groups: []plan.Group{
			{Name: "latent", Rule: sparse{open(t, specs.Full()).(abi.SpecRule), every}, BlockTokens: 4, ChunkTokens: 8},
			{Name: "sliding", Rule: open(t, specs.Window(), w, 0).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 16},
		}}
		p, err := plan.New(m)
		require.NoError(t, err)
		start := plan.Start{PromptTokens: rapid.Uint64Range(1, 200).Draw(t, "prompt")}
		mc, err := p.Produce(start)
		require.NoError(t, err)
		reuse, err := mc.ReuseTokens()
		require.NoError(t, err)
		best := uint64(0)
		for n := uint64(1); n < start.PromptTokens; n++ {
			if other, err := p.Produce(start); err == nil {
				if _, err = other.Native(n); err == nil {
					best = n
				} else if n <= reuse {
					require.ErrorIs(t, err, abi.ErrNoResume, "%d tokens of %d", n, reuse)
				}
			}
		}
		require.Equal(t, best, reuse)
		// By the definition: the query at reuse+every no longer reads a wanted block.
		require.True(t, reuse == 0 || reuse%every == 0)
	})
}
