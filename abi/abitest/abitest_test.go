package abitest_test

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

func TestShippedRulesKeepTheLaws(t *testing.T) {
	for _, s := range append(specs.All(), policy.All()...) {
		t.Run(s.Manifest().Name, func(t *testing.T) { abitest.Run(t, s) })
	}
	t.Run("newcomer", func(t *testing.T) { abitest.Run(t, abitest.Newcomer()) })
}

// Check catches every adversary that breaks a law, by that law's name, and lets the
// others pass: they are for the registration check.
func TestAdversaries(t *testing.T) {
	// What a rule with parameters supplies may not depend on them; then the answer of
	// another one is as good.
	indifferent := map[string]bool{"latent": true, "rswa": true}
	all := specs.All()
	for i, a := range abitest.Adversaries() {
		// Each is tried on two kinds of rule and, in turn, on one of the others.
		for _, s := range []abi.Spec{specs.Full(), specs.Window(), all[i%len(all)]} {
			t.Run(a.Name+"/"+s.Manifest().Name, func(t *testing.T) {
				wrong := a.Wrap(s)
				require.Equal(t, a.Name+"-"+s.Manifest().Name, wrong.Manifest().Name)
				err := abitest.Check(wrong)
				if a.Law == "" || a.Params && len(s.Manifest().Params) == 0 || a.Name == "gossip" && indifferent[s.Manifest().Name] {
					require.NoError(t, err)
					return
				}
				require.Contains(t, broken(err), a.Law)
				require.ErrorContains(t, err, a.Law)
				require.ErrorContains(t, err, "seed")
				t.Log(err)
			})
		}
	}
}

func TestCheckRepeatsItself(t *testing.T) {
	wrong := abitest.Hasty(specs.Window())
	require.Equal(t, abitest.Check(wrong).Error(), abitest.Check(wrong).Error())
}

// broken lists the laws in the error of Check.
func broken(err error) (laws []string) {
	if err == nil {
		return nil
	}
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		if v := (*abitest.Violation)(nil); errors.As(e, &v) {
			laws = append(laws, v.Law)
		}
	}
	return laws
}

// A custom is the full rule with one function replaced.
type custom struct {
	abi.Spec
	open  func() error
	reach func(abi.Round, abi.Bitmap) error
	scan  func(abi.Round, abi.States, abi.Bitmap) (abi.Span, error)
	need  func(abi.Round, abi.Bitmap) error
	plain bool
}

type customRule struct {
	abi.SpecRule
	c *custom
}

func (c *custom) Open(p []uint64) (abi.Rule, error) {
	if c.open != nil {
		return nil, c.open()
	}
	r, err := c.Spec.Open(p)
	if c.plain {
		return struct{ abi.Rule }{r}, nil
	}
	return customRule{r.(abi.SpecRule), c}, err
}

func (r customRule) Reach(rd abi.Round, out abi.Bitmap) error {
	if r.c.reach != nil {
		return r.c.reach(rd, out)
	}
	return r.SpecRule.Reach(rd, out)
}

func (r customRule) Scan(rd abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
	if r.c.scan != nil {
		return r.c.scan(rd, s, d)
	}
	return r.SpecRule.Scan(rd, s, d)
}

func (r customRule) Need(rd abi.Round, out abi.Bitmap) error {
	if r.c.need != nil {
		return r.c.need(rd, out)
	}
	return r.SpecRule.Need(rd, out)
}

// Each wrong rule breaks the law it was made for.
func TestEachLawIsCaught(t *testing.T) {
	calls := 0
	for name, test := range map[string]struct {
		law  string
		rule custom
	}{
		"open fails":        {abitest.LawTotal, custom{open: func() error { return errors.New("no") }}},
		"no need":           {abitest.LawTotal, custom{plain: true}},
		"reach fails":       {abitest.LawTotal, custom{reach: func(abi.Round, abi.Bitmap) error { return errors.New("no") }}},
		"reach panics":      {abitest.LawTotal, custom{reach: func(r abi.Round, out abi.Bitmap) error { out.Set(1 << 20); return nil }}},
		"reach has padding": {abitest.LawTotal, custom{reach: func(r abi.Round, out abi.Bitmap) error { clearTo(out, r.Chunks()); return nil }}},
		"need fails":        {abitest.LawTotal, custom{need: func(abi.Round, abi.Bitmap) error { return errors.New("no") }}},
		"need depends on calls": {abitest.LawPure, custom{need: func(r abi.Round, out abi.Bitmap) error {
			if calls++; calls%2 == 0 {
				return abi.ErrNoResume
			}
			return nil
		}}},
		"scan fails": {abitest.LawTotal, custom{scan: func(abi.Round, abi.States, abi.Bitmap) (abi.Span, error) { return abi.Span{}, errors.New("no") }}},
		"scan counts too far": {abitest.LawTotal, custom{scan: func(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
			return abi.Span{Usable: uint32(r.Chunks()) + 1}, nil
		}}},
		"scan changes the table": {abitest.LawPure, custom{scan: func(r abi.Round, s abi.States, _ abi.Bitmap) (abi.Span, error) {
			s.Fill(0, r.Chunks(), abi.Hit)
			return abi.Span{}, nil
		}}},
		"reach depends on the split": {abitest.LawPure, custom{reach: func(r abi.Round, out abi.Bitmap) error {
			if r.Chunks() > 0 && uint64(r.Lo+1)*r.ChunkTokens <= r.StoredTokens {
				out.Set(0)
			}
			return nil
		}}},
		"reach stores a partial chunk": {abitest.LawComplete, custom{reach: func(r abi.Round, out abi.Bitmap) error {
			out.SetRange(0, r.Chunks())
			return nil
		}}},
		"reach takes the prompt for what is stored": {abitest.LawComplete, custom{reach: func(r abi.Round, out abi.Bitmap) error {
			return keepTo(r, out, max(r.StoredTokens, min(r.PromptTokens, 1<<19)))
		}}},
		"reach forgets the last aligned point": {abitest.LawKept, custom{reach: func(r abi.Round, out abi.Bitmap) error {
			if r.ResumeTokens == 0 && r.AlignTokens > 0 && r.StoredTokens > 0 {
				return keepTo(r, out, r.StoredTokens-1)
			}
			return keepTo(r, out, r.StoredTokens)
		}}},
		"reach forgets junctions": {abitest.LawKept, custom{reach: func(r abi.Round, out abi.Bitmap) error {
			if r.ResumeTokens == 0 && r.AlignTokens == 0 {
				return nil
			}
			return keepTo(r, out, r.StoredTokens)
		}}},
		"scan demands a miss": {abitest.LawAnswered, custom{scan: func(r abi.Round, _ abi.States, d abi.Bitmap) (abi.Span, error) {
			d.SetRange(0, r.Chunks())
			return abi.Span{}, nil
		}}},
		"scan dislikes hits": {abitest.LawMonotone, custom{scan: func(r abi.Round, s abi.States, _ abi.Bitmap) (abi.Span, error) {
			return abi.Span{Usable: uint32(s.First(abi.Here, 0, r.Chunks()))}, nil
		}}},
		"scan takes retry for miss": {abitest.LawUnknown, custom{scan: func(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			end := s.First(abi.NotHere, 0, r.Chunks())
			d.SetRange(0, end)
			return abi.Span{Usable: uint32(end)}, nil
		}}},
		"scan defers without a mark": {abitest.LawUnknown, custom{scan: func(abi.Round, abi.States, abi.Bitmap) (abi.Span, error) {
			return abi.Span{Deferred: true}, nil
		}}},
		"scan defers for a hit": {abitest.LawUnknown, custom{scan: func(r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			s.Mark(abi.Here, 0, r.Chunks(), d)
			return abi.Span{Deferred: !d.Empty()}, nil
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			c := test.rule
			c.Spec = specs.Full()
			err := abitest.Check(&c)
			require.Contains(t, broken(err), test.law)
		})
	}
}

// keepTo keeps the chunks that end at or before a token.
func keepTo(r abi.Round, out abi.Bitmap, token uint64) error {
	out.SetRange(0, int(min(token/r.ChunkTokens, uint64(r.Hi)))-int(r.Lo))
	return nil
}

func clearTo(b abi.Bitmap, n int) {
	if n%64 != 0 {
		b.Set(n)
	}
}

func TestMessage(t *testing.T) {
	c := &custom{Spec: specs.Full(), reach: func(r abi.Round, out abi.Bitmap) error { return errors.New("boom") }}
	require.EqualError(t, errors.Unwrap(join{abitest.Check(c)}),
		`rule full breaks the law "total" (every parameter value in range and every valid Round gets an answer about [Lo, Hi)): `+
			`Reach of chunks 0 to 4, block=1 chunk=4 prompt=9 stored=11 resume=1 align=12 junction=2 answered the error "boom"`)
}

// join unwraps to the first of joined errors.
type join struct{ error }

func (j join) Unwrap() error { return j.error.(interface{ Unwrap() []error }).Unwrap()[0] }

// Fresh instances are the dearest part of Check over a module or a process, so there are
// few, and each is given back.
func TestFreshInstancesAreFew(t *testing.T) {
	f := &fresh{Spec: specs.Window()}
	require.NoError(t, abitest.Check(f))
	require.Equal(t, 12*5, f.made)
	require.Zero(t, f.open)
	f = &fresh{Spec: specs.Window(), fails: true}
	require.ErrorContains(t, abitest.Check(f), "a fresh instance could not be made: no more processes")
}

// fresh is a spec whose rules count the instances made of them.
type fresh struct {
	abi.Spec
	made, open int
	fails      bool
}

type freshRule struct {
	abi.SpecRule
	f *fresh
}

func (f *fresh) Open(p []uint64) (abi.Rule, error) {
	r, err := f.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return &freshRule{r.(abi.SpecRule), f}, nil
}

func (r *freshRule) Fresh() (abi.Rule, func(), error) {
	if r.f.fails {
		return nil, nil, errors.New("no more processes")
	}
	r.f.made++
	r.f.open++
	return r.SpecRule, func() { r.f.open-- }, nil
}

// The refusal of a rule that keeps state names the call, both answers and what was
// different.
func TestMessagesAboutState(t *testing.T) {
	for name, wrap := range map[string]func(abi.Spec) abi.Spec{
		"weary": abitest.Weary, "nostalgic": abitest.Nostalgic, "follower": abitest.Follower, "echo": abitest.Echo,
		"shy": abitest.Shy, "choppy": abitest.Choppy, "hoarder": abitest.Hoarder, "gossip": abitest.Gossip, "moody": abitest.Moody,
	} {
		t.Run(name, func(t *testing.T) {
			got := abitest.Check(wrap(specs.Window())).Error() + "\n"
			path := filepath.Join("testdata", name+".txt")
			if *rewrite {
				require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(want), got)
		})
	}
}

var rewrite = flag.Bool("rewrite", false, "rewrite the golden messages")
