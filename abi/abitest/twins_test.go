package abitest_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

func TestARuleIsItsOwnTwin(t *testing.T) {
	for _, s := range append(specs.All(), policy.All()...) {
		require.NoError(t, abitest.Twins(s, s), s.Manifest().Name)
	}
}

// A calls counts the calls of a spec's rules.
type calls struct {
	abi.Spec
	n *int
}

type callsRule struct {
	abi.SpecRule
	n *int
}

func (c calls) Open(p []uint64) (abi.Rule, error) {
	r, err := c.Spec.Open(p)
	if err != nil {
		return nil, err
	}
	return callsRule{r.(abi.SpecRule), c.n}, nil
}

func (c callsRule) Reach(r abi.Round, out abi.Bitmap) error { *c.n++; return c.SpecRule.Reach(r, out) }
func (c callsRule) Need(r abi.Round, out abi.Bitmap) error  { *c.n++; return c.SpecRule.Need(r, out) }
func (c callsRule) Scan(r abi.Round, t abi.States, d abi.Bitmap) (abi.Span, error) {
	*c.n++
	return c.SpecRule.Scan(r, t, d)
}

// Over a transport where a call takes 0.2 ms the comparison still takes seconds.
func TestTwinsCallsAreBounded(t *testing.T) {
	n := 0
	require.NoError(t, abitest.Twins(calls{specs.Window(), &n}, specs.Window()))
	t.Logf("%d calls of each twin", n)
	require.Less(t, n, 50_000)
	require.Greater(t, n, 20_000)
}

// TestTwinsThatDiffer: every rule that is wrong without keeping state differs from the right
// one, in the function that is wrong, and the first difference is the same one each time and
// drawn. State is for Check to find.
func TestTwinsThatDiffer(t *testing.T) {
	wrongIn := map[string]string{
		"forgetful": "reach", "frontier": "reach", "moody": "reach", "liar": "need",
		"greedy": "scan", "blind": "scan", "hasty": "scan", "lagging": "scan", "miser": "scan",
	}
	for _, a := range abitest.Adversaries() {
		if wrongIn[a.Name] == "" {
			require.Equal(t, "pure", a.Relation, a.Name)
			continue
		}
		t.Run(a.Name, func(t *testing.T) {
			err := abitest.Twins(specs.Window(), a.Wrap(specs.Window()))
			var d *abitest.Difference
			require.ErrorAs(t, err, &d)
			require.Equal(t, wrongIn[a.Name], d.Func)
			require.EqualError(t, abitest.Twins(specs.Window(), a.Wrap(specs.Window())), err.Error())
			golden(t, "twins-"+a.Name, err.Error())
		})
	}
}

// Errors count as answers, whatever they say.
func TestTwinsCompareErrors(t *testing.T) {
	boom := &custom{Spec: specs.Full(), reach: func(r abi.Round, _ abi.Bitmap) error { return os.ErrClosed }}
	panics := &custom{Spec: specs.Full(), need: func(abi.Round, abi.Bitmap) error { panic("boom") }}
	noResume := &custom{Spec: specs.Full(), need: func(abi.Round, abi.Bitmap) error { return abi.ErrNoResume }}
	closed := &custom{Spec: specs.Full(), open: func() error { return os.ErrClosed }}
	require.NoError(t, abitest.Twins(boom, &custom{Spec: specs.Full(), reach: func(abi.Round, abi.Bitmap) error { return os.ErrExist }}))
	require.NoError(t, abitest.Twins(noResume, noResume))
	for name, s := range map[string]abi.Spec{"error": boom, "panic": panics, "no-resume": noResume, "open": closed} {
		err := abitest.Twins(specs.Full(), s)
		var d *abitest.Difference
		require.ErrorAs(t, err, &d)
		golden(t, "twins-"+name, err.Error())
	}
}

// remade is a spec with another manifest.
type remade struct {
	abi.Spec
	change func(m *abi.Manifest)
}

func (r remade) Manifest() *abi.Manifest {
	m := *r.Spec.Manifest()
	m.Params = append([]abi.Param(nil), m.Params...)
	r.change(&m)
	return &m
}

func TestTwinsHaveTheSameParameters(t *testing.T) {
	for name, change := range map[string]func(m *abi.Manifest){
		"range":    func(m *abi.Manifest) { m.Params[0].Max = 9 },
		"default":  func(m *abi.Manifest) { m.Params[1].Default = 9 },
		"required": func(m *abi.Manifest) { m.Params[0].Required, m.Params[0].Default = false, 3 },
		"name":     func(m *abi.Manifest) { m.Params[1].Name = "more" },
		"number":   func(m *abi.Manifest) { m.Params = m.Params[:1] },
		"mask":     func(m *abi.Manifest) { m.Mask, m.MaskArgs = abi.MaskCausal, nil },
		"kind":     func(m *abi.Manifest) { m.Kind, m.Mask, m.MaskArgs = abi.KindPolicy, "", nil },
		"invalid":  func(m *abi.Manifest) { m.Version = "" },
	} {
		err := abitest.Twins(specs.Window(), remade{specs.Window(), change})
		require.Error(t, err, name)
		golden(t, "twins-manifest-"+name, err.Error())
	}
	other := remade{specs.Window(), func(m *abi.Manifest) { m.Name, m.Version = "mine", "2.0.0" }}
	require.NoError(t, abitest.Twins(specs.Window(), other), "a twin may have another name")
}

func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *rewrite {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text+"\n"), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), text+"\n")
}
