package rules_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// rogue builds the program of rules that does what the file "mode" beside it says, once.
var rogue = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "tierd-rules-test-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "rogue")
	out, err := exec.Command("go", "build", "-o", path, "../../plugins/proc/testdata/rogue").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, nil
})

// compiled keeps what tests compile, for all of them: the shipped rules take each a second.
var compiled string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-rules-test-")
	if err != nil {
		panic(err)
	}
	compiled = dir
	code := m.Run()
	os.RemoveAll(dir)
	if path, err := rogue(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// state returns a new state directory, without a verdict, with what was compiled before.
func state(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Symlink(compiled, rules.CompiledDir(dir)))
	return dir
}

// program returns a directory with the program and its mode.
func program(t *testing.T, mode string) (dir string) {
	t.Helper()
	if testing.Short() {
		t.Skip("builds a program")
	}
	path, err := rogue()
	require.NoError(t, err)
	dir = t.TempDir()
	require.NoError(t, os.Link(path, filepath.Join(dir, "rogue")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "mode"), []byte(mode), 0o600))
	return dir
}

// native opens the shipped rules and the adversaries in this process.
func native(_ context.Context, _, ref string) (registry.Opened, error) {
	all := append(specs.All(), policy.All()...)
	for _, a := range abitest.Adversaries() {
		all = append(all, a.Wrap(specs.Window()))
	}
	for _, s := range all {
		if s.Manifest().Name == ref {
			return registry.Opened{Spec: s, Digest: "sha256:" + ref, Source: "native"}, nil
		}
	}
	return registry.Opened{}, errors.New(ref)
}

// TestProgramIsJudged: the check of a rule in a process of its own asks what it asks of the
// rule in this one, and its verdict names the file.
func TestProgramIsJudged(t *testing.T) {
	dir, ctx := program(t, "honest"), context.Background()
	e, err := registry.Register(ctx, deployment(t, dir, 140, "window", "request-level"), native, registry.Options{Check: check.Options{Seed: rules.DefaultSeed}})
	require.NoError(t, err)
	kept := state(t)
	for _, reused := range []bool{false, true} {
		r, err := rules.Register(ctx, deployment(t, dir, 140, "exec:./rogue#window", "exec:./rogue#request-level"), rules.Options{StateDir: kept})
		require.NoError(t, err)
		require.Equal(t, e.Verdict.Relations, r.Verdict.Relations)
		require.Equal(t, reused, r.Verdict.Reused)
		bytes, err := os.ReadFile(filepath.Join(dir, "rogue"))
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("sha256:%x", sha256.Sum256(bytes)), r.Verdict.Rules[0].Digest)
		require.Equal(t, filepath.Join(dir, "rogue"), r.Verdict.Rules[0].Source)
		require.NoError(t, r.Close(ctx))
	}
}

// TestAdversariesAsPrograms: the same wrong rules, in a process of their own, are refused
// with the same counterexample. One that keeps state is refused for that, but for which
// call depends on how its calls met.
func TestAdversariesAsPrograms(t *testing.T) {
	dir, ctx := program(t, "adversaries"), context.Background()
	for _, a := range abitest.Adversaries() {
		if !slices.Contains([]string{"forgetful", "liar", "hasty", "moody"}, a.Name) { // one a relation
			continue
		}
		t.Run(a.Name, func(t *testing.T) {
			_, err := rules.Register(ctx, deployment(t, dir, 200, "exec:./rogue#"+a.Name+"-window", "request-level"), rules.Options{StateDir: state(t)})
			var refusal, want *registry.Refusal
			require.ErrorAs(t, err, &refusal)
			require.Equal(t, a.Relation, refusal.Verdict.Counterexample.Relation, refusal.Error())
			if a.Law == abitest.LawPure {
				return
			}
			_, err = registry.Register(ctx, deployment(t, dir, 200, a.Name+"-window", "request-level"), native, registry.Options{Check: check.Options{Seed: rules.DefaultSeed}})
			require.ErrorAs(t, err, &want)
			require.Equal(t, want.Verdict.Counterexample.String(), refusal.Verdict.Counterexample.String())
		})
	}
}

// TestProgramsThatFailTheirCheck: a process that ends, or whose rule fails, is refused with
// the call; one that the clock ended is not decided.
func TestProgramsThatFailTheirCheck(t *testing.T) {
	for mode, want := range map[string]string{
		"call exits":      `it printed last: "I have had enough"`,
		"call is killed":  "ended (signal: killed) during ",
		"call panics":     "rule window: scan: the rule panicked: runtime error: index out of range",
		"call fails":      `rule window: scan: \x1b[31mno \ufffdway\n`,
		"call is stopped": "had no answer after 1s, and process",
	} {
		t.Run(mode, func(t *testing.T) {
			dir := program(t, mode)
			_, err := rules.Register(context.Background(), deployment(t, dir, 200, "exec:./rogue#window", "request-level"), rules.Options{StateDir: state(t)})
			require.ErrorContains(t, err, want)
			var refusal *registry.Refusal
			require.Equal(t, mode != "call is stopped", errors.As(err, &refusal), err)
			if refusal != nil {
				// A call that fails only when it comes again is named as one answered in two ways.
				ce := refusal.Verdict.Counterexample
				require.Equal(t, "sliding", ce.Group)
				require.True(t, ce.Twice != nil || strings.Contains(ce.Why, " of sliding, chunks 0 to"), ce.Why)
			}
		})
	}
}
