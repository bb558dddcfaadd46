package plan_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
)

type bg struct {
	bt, ct, w, extra uint64 // w 0 = full
	draft            bool
}
type bm struct {
	gs         []bg
	align, cap uint64
}

func (g bg) behind(n uint64) uint64 { // tokens kept before n
	if g.w == 0 {
		return n
	}
	return min(n, g.w-1+g.extra)
}
func (g bg) tail(n uint64) map[uint64]bool {
	s := map[uint64]bool{}
	for k := n - g.behind(n); k < n; k++ {
		s[k/g.ct] = true
	}
	return s
}
func (m bm) stored(g bg, prompt, text uint64) uint64 {
	if g.draft && text > prompt {
		text--
	}
	if m.cap > 0 {
		text = min(text, m.cap)
	}
	return text
}
func (m bm) model() plan.Model {
	pm := plan.Model{AlignTokens: m.align, MaxStoreTokens: m.cap}
	for i, g := range m.gs {
		var r abi.Rule
		if g.w == 0 {
			r, _ = specs.Full().Open(nil)
		} else {
			r, _ = specs.Window().Open([]uint64{g.w, g.extra})
		}
		pm.Groups = append(pm.Groups, plan.Group{Name: fmt.Sprint("g", i), Rule: r.(abi.SpecRule), BlockTokens: g.bt, ChunkTokens: g.ct, Draft: g.draft})
	}
	return pm
}

// best is the largest n in (local, bound] that all groups can go on from.
func (m bm) best(local, bound uint64, here func(g int, c uint64) bool) uint64 {
	for n := bound; n > local; n-- {
		ok := true
		for i, g := range m.gs {
			for c := range g.tail(n) {
				if c >= local/g.ct && !here(i, c) {
					ok = false
				}
			}
		}
		if ok {
			return n
		}
	}
	return local
}
func (m bm) capd(n uint64) uint64 {
	if m.cap > 0 {
		return min(n, m.cap)
	}
	return n
}
func (m bm) resume(prompt, text, bound uint64) uint64 {
	return m.best(0, bound, func(g int, c uint64) bool {
		return (c+1)*m.gs[g].ct <= m.stored(m.gs[g], prompt, text)
	})
}

// supply by brute force
func (m bm) supply(prompt, text, bound, junction uint64) []map[uint64]bool {
	var res uint64
	if bound > 0 {
		res = m.resume(prompt, text, bound)
	}
	j := min(junction, prompt)
	if j > 0 {
		j = m.resume(j, j, m.capd(j))
	}
	out := make([]map[uint64]bool, len(m.gs))
	for i, g := range m.gs {
		out[i] = map[uint64]bool{}
		st := m.stored(g, prompt, text)
		add := func(n uint64) {
			for c := range g.tail(n) {
				if (c+1)*g.ct <= st {
					out[i][c] = true
				}
			}
		}
		if g.w == 0 {
			add(st)
			continue
		}
		add(res)
		if j <= st {
			add(j)
		}
		if m.align > 0 {
			for n := m.align; n <= st; n += m.align {
				add(n)
			}
		}
	}
	return out
}

func drawBM(r *rand.Rand) bm {
	var m bm
	l := uint64(1)
	for range 1 + r.IntN(3) {
		g := bg{bt: []uint64{1, 2, 3, 4}[r.IntN(4)]}
		g.ct = g.bt * uint64(1+r.IntN(4))
		if r.IntN(3) > 0 {
			g.w = 1 + uint64(r.IntN(25))
			if r.IntN(3) == 0 {
				g.extra = uint64(r.IntN(9))
			}
		}
		g.draft = r.IntN(5) == 0
		m.gs = append(m.gs, g)
		a := l
		for l%g.ct != 0 {
			l += a
		}
	}
	if r.IntN(2) == 0 {
		m.align = l * uint64(1+r.IntN(2))
	}
	if r.IntN(3) == 0 {
		m.cap = 1 + uint64(r.IntN(80))
	}
	return m
}

// TestConsumerIsTheBestOfAllPoints: in leg pd the plan resumes at the largest token that
// a search over all of them finds, and demands what is read there and no more.
func TestConsumerIsTheBestOfAllPoints(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range bruteModels {
		m := drawBM(r)
		p, err := plan.New(m.model())
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			prompt := 1 + uint64(r.IntN(90))
			local := uint64(0)
			if r.IntN(2) == 0 {
				local = uint64(r.IntN(int(prompt)))
			}
			var own []abi.States
			for _, g := range m.gs {
				n := int(prompt / g.ct)
				s := abi.NewStates(n)
				for i := range n {
					switch r.IntN(8) {
					case 0:
						s.Put(i, abi.Hit)
					case 1:
						s.Put(i, abi.Pending)
					}
				}
				own = append(own, s)
			}
			if r.IntN(2) == 0 {
				own = nil
			}
			here := func(g int, c uint64) bool {
				ct := m.gs[g].ct
				return (c+1)*ct <= m.stored(m.gs[g], prompt, prompt) || own != nil && (c+1)*ct <= prompt && m.cap == 0 && own[g].At(int(c)) != abi.Miss
			}
			bound := min(prompt-1, m.capd(prompt))
			want := m.best(local, bound, here)
			lc := uint64(0)
			if r.IntN(4) == 0 {
				lc = uint64(r.IntN(100))
				if lc > 0 && want > max(lc, local) {
					fl := uint64(0)
					if m.align > 0 {
						fl = lc / m.align * m.align
					}
					want = m.best(local, max(fl, local), here)
				}
			}
			pl, err := p.Eager(plan.Ask{PromptTokens: prompt, LocalTokens: local, LoadCapTokens: lc}, own)
			if err != nil || pl.Deferred {
				t.Fatal(err, pl)
			}
			if pl.ResumeTokens != want {
				t.Fatalf("%+v prompt %d local %d loadcap %d own %v: E %d want %d", m, prompt, local, lc, own, pl.ResumeTokens, want)
			}
			for i, g := range m.gs {
				w := map[uint64]bool{}
				if want > local {
					w = g.tail(want)
					for c := range w {
						if c < local/g.ct {
							delete(w, c)
						}
					}
				}
				for c := uint64(0); c < uint64(len(pl.Demand[i]))*64; c++ {
					if pl.Demand[i].Get(int(c)) != w[c] {
						t.Fatalf("%+v prompt %d local %d group %d chunk %d: demand %v want %v at %d", m, prompt, local, i, c, !w[c], w[c], want)
					}
				}
				if uint64(len(w)) != uint64(pl.Demand[i].Count()) {
					t.Fatal("demand beyond")
				}
			}
		}
	}
}

// TestMachineAgainstBruteForce: whatever the groups, caps, junction, held chunks, native
// prefix and steps, the machine copies living blocks only, ends every chunk that it
// began exactly once, supplies what the definitions say, and reuse_tokens is the largest
// point at which all that is wanted lives.
func TestMachineAgainstBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for range 4 * bruteModels {
		m := drawBM(r)
		p, _ := plan.New(m.model())
		prompt := 1 + uint64(r.IntN(70))
		s := plan.Start{PromptTokens: prompt}
		if r.IntN(2) == 0 {
			s.JunctionTokens = uint64(r.IntN(80))
		}
		wanted, err := p.Wanted(s)
		if err != nil {
			t.Fatal(err)
		}
		if r.IntN(2) == 0 {
			for g := range wanted {
				for i := range wanted[g] {
					wanted[g][i] &= r.Uint64() | r.Uint64()
				}
			}
			s.Held = wanted
		}
		mc, err := p.Produce(s)
		if err != nil {
			t.Fatal(err)
		}
		desc := fmt.Sprintf("%+v %+v", m, s)
		promptSup := m.supply(prompt, prompt, min(prompt-1, m.capd(prompt)), s.JunctionTokens)
		resume := m.resume(prompt, prompt, min(prompt-1, m.capd(prompt)))
		if mc.ResumeTokens() != resume {
			t.Fatalf("%s resume %d want %d", desc, mc.ResumeTokens(), resume)
		}
		held := func(g int, c uint64) bool {
			return s.Held != nil && c < uint64(len(s.Held[g]))*64 && s.Held[g].Get(int(c))
		}
		needAt := func(g bg, n uint64) uint64 { // oldest token read
			if g.w == 0 {
				return 0
			}
			return n - min(n, g.w-1)
		}
		// reuse by brute force
		want := uint64(0)
		for n := uint64(0); n < prompt; n++ {
			ok := true
			for i, g := range m.gs {
				for b := uint64(0); (b+1)*g.bt <= n; b++ {
					c := b * g.bt / g.ct
					wantd := (promptSup[i][c] || c >= resume/g.ct && (c+1)*g.ct <= m.capd(1<<30)) && !held(i, c)
					if wantd && (b+1)*g.bt <= needAt(g, n) {
						ok = false
					}
				}
			}
			if ok {
				want = n
			}
		}
		reuse, err := mc.ReuseTokens()
		if err != nil || reuse != want {
			t.Fatalf("%s reuse %d want %d %v", desc, reuse, want, err)
		}
		// run
		type key struct {
			g int
			c uint32
		}
		copied, open, offered, dropped := map[key]uint64{}, map[key]bool{}, map[key]int{}, map[key]int{}
		var at uint64
		take := func(fx plan.Effects, to uint64, native bool) {
			for _, c := range fx.Copies {
				k := key{c.Group, c.Chunk}
				g := m.gs[c.Group]
				if held(c.Group, uint64(c.Chunk)) {
					t.Fatalf("%s held chunk %v copied", desc, k)
				}
				if c.First == open[k] || offered[k] > 0 || dropped[k] > 0 {
					t.Fatalf("%s first %v wrong/after end %v", desc, c, offered[k])
				}
				open[k] = true
				for b := uint64(c.Block); b < uint64(c.Block+c.Blocks); b++ {
					if b*g.bt/g.ct != uint64(c.Chunk) || (b+1)*g.bt > to {
						t.Fatalf("%s block %d chunk %v", desc, b, k)
					}
					if b != uint64(c.Chunk)*(g.ct/g.bt)+copied[k] {
						t.Fatalf("%s out of order", desc)
					}
					copied[k]++
					alive := !native && (b+1)*g.bt > at || (b+1)*g.bt > needAt(g, at)
					if native {
						alive = (b+1)*g.bt > needAt(g, to)
					}
					if !alive {
						t.Fatalf("%s dead block %d of group %d at %d->%d", desc, b, c.Group, at, to)
					}
				}
				if c.Last != (copied[k] == g.ct/g.bt) {
					t.Fatalf("%s last", desc)
				}
				if c.Promised != promptSup[c.Group][uint64(c.Chunk)] {
					t.Fatalf("%s promised %v", desc, c)
				}
			}
			for _, o := range fx.Offers {
				k := key{o.Group, o.Chunk}
				offered[k]++
				if offered[k] > 1 || dropped[k] > 0 {
					t.Fatalf("%s offered twice %v", desc, k)
				}
				if !held(o.Group, uint64(o.Chunk)) && copied[k] != m.gs[o.Group].ct/m.gs[o.Group].bt {
					t.Fatalf("%s offered hole %v", desc, k)
				}
			}
			for _, d := range fx.Drops {
				k := key{d.Group, d.Chunk}
				dropped[k]++
				if dropped[k] > 1 || offered[k] > 0 {
					t.Fatalf("%s dropped twice %v", desc, k)
				}
				if !open[k] && !held(d.Group, uint64(d.Chunk)) {
					t.Fatalf("%s dropped never opened %v", desc, k)
				}
			}
			at = to
		}
		n := uint64(0)
		if reuse > 0 && r.IntN(2) == 0 {
			n = 1 + uint64(r.IntN(int(reuse)))
		}
		fx, err := mc.Native(n)
		if err != nil {
			t.Fatal(err)
		}
		take(fx, n, true)
		text := prompt + uint64(r.IntN(50))
		if r.IntN(4) == 0 {
			text = uint64(r.IntN(int(prompt)))
		}
		text = max(text, n)
		mx := 1 + r.IntN(20)
		for at < text {
			to := at + 1 + uint64(r.IntN(mx))
			if at < prompt {
				to = min(to, prompt)
			}
			to = min(to, text)
			fx, err := mc.Step(to)
			if err != nil {
				t.Fatal(err)
			}
			take(fx, to, false)
			if r.IntN(10) == 0 { // a step that computes nothing
				fx, err := mc.Step(to)
				if err != nil || len(fx.Copies)+len(fx.Offers) > 0 {
					t.Fatal(desc, err, fx)
				}
				take(fx, to, false)
			}
		}
		abort := r.IntN(3) == 0
		if abort {
			fx, err = mc.Abort()
		} else {
			fx, err = mc.Finish(text)
		}
		if err != nil {
			t.Fatal(err)
		}
		take(fx, text, false)
		for k := range open {
			if offered[k]+dropped[k] != 1 {
				t.Fatalf("%s chunk %v leaked, text %d", desc, k, text)
			}
		}
		if s.Held != nil {
			for g := range s.Held {
				for i := s.Held[g].Next(0); i >= 0; i = s.Held[g].Next(i + 1) {
					if k := (key{g, uint32(i)}); offered[k]+dropped[k] != 1 {
						t.Fatalf("%s held %v offered %d dropped %d", desc, k, offered[k], dropped[k])
					}
				}
			}
		}
		// final supply
		wantSup := make([]map[uint64]bool, len(m.gs))
		merge := func(x []map[uint64]bool) {
			for g := range x {
				if wantSup[g] == nil {
					wantSup[g] = map[uint64]bool{}
				}
				for c := range x[g] {
					wantSup[g][c] = true
				}
			}
		}
		exact := text >= prompt
		if exact {
			merge(promptSup)
			merge(m.supply(prompt, text, 0, s.JunctionTokens))
			if !abort {
				merge(m.supply(prompt, text, m.capd(text), s.JunctionTokens))
			}
		} else if text > 0 {
			merge(m.supply(text, text, 0, 0))
		}
		got := 0
		for k := range offered {
			got++
			if exact && !wantSup[k.g][uint64(k.c)] {
				t.Fatalf("%s text %d abort %v: offers %v, not wanted", desc, text, abort, k)
			}
		}
		for g := range wantSup {
			for c := range wantSup[g] {
				if offered[key{g, uint32(c)}] != 1 {
					t.Fatalf("%s native %d text %d abort %v: misses group %d chunk %d", desc, n, text, abort, g, c)
				}
			}
		}
		if _, err := mc.Step(text + 1); err == nil {
			t.Fatal("step after end")
		}
		if _, err := mc.Finish(text + 1); err == nil {
			t.Fatal("finish after end")
		}
		if _, err := mc.Native(0); err == nil {
			t.Fatal("native after end")
		}
		if _, err := mc.Abort(); err == nil {
			t.Fatal("abort after end")
		}
	}
}

// bruteModels is how many deployments are drawn: a second of work.
const bruteModels = 1000

func TestNativeAfterTheEnd(t *testing.T) {
	m := bm{gs: []bg{{bt: 4, ct: 8, w: 9}, {bt: 4, ct: 4}}}
	p, err := plan.New(m.model())
	require.NoError(t, err)
	mc, err := p.Produce(plan.Start{PromptTokens: 40})
	require.NoError(t, err)
	_, err = mc.Abort()
	require.NoError(t, err)
	_, err = mc.Native(8)
	require.ErrorContains(t, err, "after the request's end")
}

// TestReuseGoesBeyondTheStoreCap: with all that is kept in the tier already, nothing
// above the cap holds a native prefix back.
func TestReuseGoesBeyondTheStoreCap(t *testing.T) {
	m := bm{gs: []bg{{bt: 4, ct: 8, w: 9}}, cap: 16}
	p, err := plan.New(m.model())
	require.NoError(t, err)
	s := plan.Start{PromptTokens: 1000}
	s.Held, err = p.Wanted(s)
	require.NoError(t, err)
	mc, err := p.Produce(s)
	require.NoError(t, err)
	reuse, err := mc.ReuseTokens()
	require.NoError(t, err)
	require.EqualValues(t, 999, reuse)
}
