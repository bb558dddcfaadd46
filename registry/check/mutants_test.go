package check_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// A mix is a small deployment that both judges see: the check and the brute force.
type mix struct {
	groups   []member
	policies []rated
	align    uint64
	limit    uint64
	longest  uint64
	pd       bool
	probe    bool
}

type member struct {
	name   string
	spec   abi.Spec
	params []uint64
	block  uint64
	blocks uint64
	draft  bool
}

type rated struct {
	spec   abi.Spec
	params []uint64
}

func (n *mix) String() string {
	var b strings.Builder
	for _, h := range n.groups {
		fmt.Fprintf(&b, "%s%v %dx%d", h.spec.Manifest().Name, h.params, h.block, h.blocks)
		if u, ok := h.spec.(*unshipped); ok {
			fmt.Fprint(&b, " ", u)
		}
		if h.draft {
			b.WriteString(" draft")
		}
		b.WriteString(", ")
	}
	for _, p := range n.policies {
		fmt.Fprintf(&b, "%s%v, ", p.spec.Manifest().Name, p.params)
	}
	fmt.Fprintf(&b, "align %d, cap %d, max_tokens %d, pd %v, probe %v", n.align, n.limit, n.longest, n.pd, n.probe)
	return b.String()
}

// subject is what the check judges.
func (n *mix) subject() check.Subject {
	s := check.Subject{MaxTokens: n.longest, PD: n.pd, Probe: n.probe}
	for _, h := range n.groups {
		s.Groups = append(s.Groups, check.Claim{Manifest: h.spec.Manifest(), Params: h.params})
	}
	s.Open = func() (plan.Model, func(), error) {
		m := plan.Model{AlignTokens: n.align, MaxStoreTokens: n.limit}
		for _, h := range n.groups {
			r, err := h.spec.Open(h.params)
			if err != nil {
				return m, nil, err
			}
			m.Groups = append(m.Groups, plan.Group{Name: h.name, Rule: r.(abi.SpecRule), BlockTokens: h.block, ChunkTokens: h.block * h.blocks,
				State: h.spec.Manifest().Mask == abi.MaskState, Draft: h.draft})
		}
		for _, p := range n.policies {
			r, err := p.spec.Open(p.params)
			if err != nil {
				return m, nil, err
			}
			m.Policies = append(m.Policies, plan.Policy{Name: p.spec.Manifest().Name, Rule: r})
		}
		return m, func() {}, nil
	}
	return s
}

// world is what the brute force judges. changed is set when a rule with a mutation is asked
// something that it answers in another way than the one that ships.
func (n *mix) world(t require.TestingT, seed uint64, changed *bool) *world {
	w := &world{align: n.align, limit: n.limit, longest: n.longest, pd: n.pd, probe: n.probe, draw: rand.New(rand.NewPCG(seed, seed))}
	for _, h := range n.groups {
		r, err := h.spec.Open(h.params)
		require.NoError(t, err)
		rule := r.(abi.SpecRule)
		if m, ok := r.(*mutant); ok {
			rule = &beside{m.SpecRule, m, changed}
		}
		p := place{name: h.name, rule: rule, block: h.block, chunk: h.block * h.blocks, draft: h.draft}
		p.reads, p.resumes = attention(h.spec.Manifest().Name, h.params, p.chunk)
		p.keepsPrompt, p.state = h.spec.Manifest().Name == "rswa", h.spec.Manifest().Name == "state"
		for i, param := range h.spec.Manifest().Params {
			if param.Name == "extra" {
				p.extra = h.params[i]
			}
		}
		w.places = append(w.places, p)
	}
	for _, p := range n.policies {
		r, err := p.spec.Open(p.params)
		require.NoError(t, err)
		if m, ok := r.(*strayed); ok {
			r = &besidePolicy{m.Rule, m, changed}
		}
		w.policies = append(w.policies, r)
	}
	return w
}

// attention is the definition of each rule's mask, query by query and key by key, and of the
// points that there is something to go on from.
func attention(name string, p []uint64, chunk uint64) (reads func(prompt, q, k uint64) bool, resumes func(n uint64) bool) {
	resumes = func(uint64) bool { return true }
	switch name {
	case "full", "hidden":
		reads = func(_, q, k uint64) bool { return k <= q }
	case "latent":
		reads = func(_, q, k uint64) bool { return k <= q }
		resumes = func(n uint64) bool { return n%p[0] == 0 }
	case "window":
		reads = func(_, q, k uint64) bool { return k <= q && q < k+p[0] }
	case "sink":
		reads = func(_, q, k uint64) bool { return k <= q && (k < p[0] || q < k+p[1]) }
	case "chunked":
		reads = func(_, q, k uint64) bool { return k <= q && q/p[0] == k/p[0] }
	case "state":
		reads = func(_, q, k uint64) bool { return k+1 == q }
		resumes = func(n uint64) bool { return n%chunk == 0 }
	case "rswa":
		reads = func(prompt, q, k uint64) bool { return k <= q && (k < prompt || q < k+p[0]) }
	}
	return reads, resumes
}

// beside asks the rule that ships and its mutant the same, notes whether they differ, and
// answers as the mutant.
type beside struct {
	ships   abi.SpecRule
	mutant  abi.SpecRule
	changed *bool
}

func (b *beside) note(same bool) { *b.changed = *b.changed || !same }

func (b *beside) Reach(r abi.Round, out abi.Bitmap) error {
	other := slices.Clone(out)
	was := b.ships.Reach(r, other)
	err := b.mutant.Reach(r, out)
	b.note((was == nil) == (err == nil) && other.Equal(out))
	return err
}

func (b *beside) Scan(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	other := slices.Clone(d)
	was, _ := b.ships.Scan(r, s, other)
	span, err := b.mutant.Scan(r, s, d)
	b.note(was.Deferred == span.Deferred && (was.Deferred || was.Usable == span.Usable) && other.Equal(d))
	return span, err
}

func (b *beside) Need(r abi.Round, out abi.Bitmap) error {
	other := slices.Clone(out)
	was := b.ships.Need(r, other)
	err := b.mutant.Need(r, out)
	b.note((was == nil) == (err == nil) && (err != nil || other.Equal(out)))
	return err
}

// A trial is one mutant in one deployment, and what the two judges say of it.
type trial struct {
	rule, mutation string
	mix            mix
	changed        bool
	broken         map[string]string
	beyond         string
	refused        *check.Counterexample
}

// verdict is what the check says, in a word or two.
func (c *trial) verdict() string {
	if c.refused == nil {
		return "accepted"
	}
	return "refused: " + c.refused.Relation
}

// judge runs both judges, over the same lengths and lookup tables.
func (c *trial) judge(t require.TestingT, seed, tables uint64) {
	w := c.mix.world(t, seed, &c.changed)
	w.tables = tables
	w.judge()
	c.broken, c.beyond = w.broken, w.beyond
	rep, err := check.Run(context.Background(), c.mix.subject(), check.Options{Seed: seed, Workers: 1}.WithTables(int(w.tables)))
	require.NoError(t, err, c.mix.String())
	c.refused = rep.Counterexample
}

// disagree says in what the two judges disagree, or "".
func (c *trial) disagree() string {
	switch {
	case c.refused == nil && len(c.broken) > 0:
		return fmt.Sprintf("accepted, but by brute force it breaks %v", c.broken)
	case c.refused != nil && len(c.broken) == 0:
		return "refused, but by brute force nothing is broken:\n" + c.refused.String()
	case c.refused != nil && c.broken[c.refused.Relation] == "":
		return fmt.Sprintf("refused by %s, but by brute force it breaks %v:\n%s", c.refused.Relation, c.broken, c.refused)
	}
	return ""
}

// each runs f for every trial, spread over the cores.
func each(trials []*trial, f func(c *trial)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(trials)); i = next.Add(1) - 1 {
				f(trials[i])
			}
		})
	}
	wg.Wait()
}

// homes are the deployments in which each rule and its mutants are tried: the rule first,
// then what stands beside it.
var homes = map[string][]mix{
	"full":    {small(12, 0, 26, member{"a", specs.Full(), nil, 2, 2, false}, member{"b", specs.Window(), []uint64{5, 1}, 3, 1, false})},
	"hidden":  {small(0, 19, 23, member{"a", specs.Hidden(), nil, 1, 4, false}, member{"b", specs.Full(), nil, 2, 1, false})},
	"latent":  {small(12, 0, 26, member{"a", specs.Latent(), []uint64{3}, 3, 2, false}, member{"b", specs.Full(), nil, 2, 2, false})},
	"window":  {small(12, 0, 26, member{"a", specs.Window(), []uint64{7, 0}, 2, 2, false}, member{"b", specs.Full(), nil, 3, 1, false}), small(0, 0, 23, member{"a", specs.Window(), []uint64{6, 3}, 1, 3, false})},
	"sink":    {small(12, 0, 26, member{"a", specs.Sink(), []uint64{3, 5}, 2, 1, false}, member{"b", specs.Full(), nil, 3, 1, false})},
	"chunked": {small(12, 0, 26, member{"a", specs.Chunked(), []uint64{12}, 2, 2, false}, member{"b", specs.Full(), nil, 3, 1, false})},
	"state":   {small(12, 0, 26, member{"a", specs.State(), []uint64{0}, 4, 1, false}, member{"b", specs.Full(), nil, 3, 1, false}), small(12, 0, 26, member{"a", specs.State(), []uint64{1}, 4, 1, false}, member{"b", specs.Full(), nil, 3, 1, false})},
	"rswa":    {small(12, 0, 26, member{"a", specs.RSWA(), []uint64{5}, 2, 2, false}), promptOnly(small(12, 0, 26, member{"a", specs.RSWA(), []uint64{5}, 2, 2, false}, member{"b", specs.Full(), nil, 3, 1, false}))},
}

// promptOnly returns the mix with nothing of a generated text stored: what stands beside
// attention that reads a prompt in its own way is computed from it.
func promptOnly(n mix) mix {
	n.policies = []rated{{policy.PromptOnly(), nil}}
	return n
}

func small(align, limit, longest uint64, groups ...member) mix {
	return mix{groups: groups, align: align, limit: limit, longest: longest, pd: true, probe: true}
}

// TestMutants breaks each shipped rule in many small ways. What changes the rule in the
// domain and breaks a relation by brute force is refused, by a relation that it breaks;
// nothing else is.
func TestMutants(t *testing.T) {
	for _, spec := range specs.All() {
		name := spec.Manifest().Name
		t.Run(name, func(t *testing.T) {
			var trials []*trial
			for _, home := range homes[name] {
				h := home.groups[0]
				rule := name + fmt.Sprint(h.params)
				trials = append(trials, &trial{rule: rule, mutation: asShipped, mix: home})
				for _, m := range mutationsOf(h.spec, h.params, h.block*h.blocks) {
					at := home
					at.groups = slices.Clone(home.groups)
					at.groups[0].spec = &mutated{h.spec, m}
					trials = append(trials, &trial{rule: rule, mutation: m.name, mix: at})
				}
			}
			compare(t, trials)
		})
	}
}

// compare runs the trials, prints what came of them, and fails for each on which the judges
// disagree.
func compare(t *testing.T, trials []*trial) {
	const seed = 1
	if raceEnabled { // a tenth: the goroutines are the same
		kept := trials[:0]
		for i, c := range trials {
			if i%10 == 0 || c.mutation == asShipped {
				kept = append(kept, c)
			}
		}
		trials = kept
	}
	each(trials, func(c *trial) { c.judge(t, seed, 5) })
	sound, changed, refused := true, 0, 0
	for _, c := range trials {
		var broken []string
		for _, r := range check.Relations {
			if c.broken[r] != "" {
				broken = append(broken, r)
			}
		}
		t.Logf("%-14s %-52s changed %-5v  by brute force %-40s %s", c.rule, c.mutation, c.changed, strings.Join(broken, " "), c.verdict())
		if d := c.disagree(); d != "" {
			t.Errorf("%s, %s, in %s: %s", c.rule, c.mutation, c.mix.String(), d)
		}
		if c.mutation == asShipped {
			sound = c.refused == nil
			require.False(t, c.changed)
			require.Equal(t, ships(&c.mix), c.verdict(), c.mix.String())
		} else if !c.changed && sound != (c.refused == nil) {
			t.Errorf("%s, %s: nothing changed, but %s", c.rule, c.mutation, c.verdict())
		}
		if c.changed {
			changed++
			if c.refused != nil {
				refused++
			}
		}
	}
	t.Logf("%d mutants behave in another way, and %d of them are refused", changed, refused)
	if !raceEnabled {
		require.GreaterOrEqual(t, changed, 5)
		require.GreaterOrEqual(t, refused, 5)
	}
}

// TestStrayPolicies does the same with the shipped policies: over a window and full
// attention, for all legs and without leg pd.
func TestStrayPolicies(t *testing.T) {
	params := map[string][]uint64{"cap": {14}, "min-reuse": {2}, "min-pull": {5}}
	for _, spec := range policy.All() {
		name := spec.Manifest().Name
		t.Run(name, func(t *testing.T) {
			var trials []*trial
			for _, pd := range []bool{true, false} {
				home := homes["window"][0]
				home.longest, home.pd = 19, pd
				home.policies = []rated{{spec, params[name]}}
				rule := fmt.Sprint(name, params[name])
				trials = append(trials, &trial{rule: rule, mutation: asShipped, mix: home})
				for i := range strays {
					at := home
					at.policies = []rated{{&strayedSpec{spec, &strays[i]}, params[name]}}
					trials = append(trials, &trial{rule: rule, mutation: strays[i].name, mix: at})
				}
			}
			compare(t, trials)
		})
	}
}

// ships is the verdict that a deployment of shipped rules has.
func ships(n *mix) string {
	if len(n.policies) > 0 && n.policies[0].spec.Manifest().Name == "chunk-level" && n.pd {
		return "refused: warm"
	}
	return "accepted"
}

// asShipped names the trial of a rule without a mutation.
const asShipped = "none"
