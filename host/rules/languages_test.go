package rules_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/host/scaffold"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// source is the file of each language's scaffold that a mistake is made in.
var source = map[string]string{"go": "window.go", "c": "rule.c", "rust": "src/lib.rs", "as": "rule.ts"}

// A mistake is one line that is changed, the same idea in every language.
type mistake struct {
	name     string
	relation string // that refuses it
	changes  map[string][2]string
}

var mistakes = []mistake{
	{"the tail that is stored is one token short", "covers", map[string][2]string{
		"go":   {"Reach(r abi.Round, out abi.Bitmap) error {\n", "Reach(r abi.Round, out abi.Bitmap) error {\n\tw--\n"},
		"c":    {"uint64_t behind = params[0] - 1;", "uint64_t behind = params[0] - 2;"},
		"rust": {"let behind = p[0] - 1;", "let behind = p[0] - 2;"},
		"as":   {"const behind = p[0] - 1;", "const behind = p[0] - 2;"},
	}},
	{"the last chunk is not demanded", "needs", map[string][2]string{
		"go":   {"demand.SetRange(lo, hi)", "demand.SetRange(lo, hi-1)"},
		"c":    {"kv_set_range(demand, lo, hi);", "kv_set_range(demand, lo, hi - 1);"},
		"rust": {"demand.set_range(lo, hi);", "demand.set_range(lo, hi - 1);"},
		"as":   {"demand.setRange(lo, hi);", "demand.setRange(lo, hi - 1);"},
	}},
	{"what is not known counts as here", "states", map[string][2]string{
		"go":   {"states.First(abi.Unknown, lo, hi) < hi", "states.First(abi.Unknown, lo, hi) < lo"},
		"c":    {"kv_first(s, KV_UNKNOWN, lo, hi) < hi", "kv_first(s, KV_UNKNOWN, lo, hi) < lo"},
		"rust": {"states.first(kv::UNKNOWN, lo, hi) < hi", "states.first(kv::UNKNOWN, lo, hi) < lo"},
		"as":   {"states.first(UNKNOWN, lo, hi) < hi", "states.first(UNKNOWN, lo, hi) < lo"},
	}},
	{"need forgets the oldest token", "needs", map[string][2]string{
		"go":   {"oldest := n + 1 - min(n+1, uint64(w))", "oldest := n + 2 - min(n+2, uint64(w))"},
		"c":    {"n < params[0] ? 0 : n - params[0] + 1", "n + 1 < params[0] ? 0 : n - params[0] + 2"},
		"rust": {"(n + 1).saturating_sub(p[0])", "(n + 2).saturating_sub(p[0])"},
		"as":   {"n < p[0] ? 0 : n - p[0] + 1", "n + 1 < p[0] ? 0 : n - p[0] + 2"},
	}},
}

// build writes a new rule, makes the mistake in it, and builds it.
func build(t *testing.T, dir, lang string, m *mistake) {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	_, err = scaffold.Write(dir, scaffold.Options{Name: "my-window", Lang: lang, Tierd: root})
	require.NoError(t, err)
	if m != nil {
		file := filepath.Join(dir, source[lang])
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		old, changed := m.changes[lang][0], m.changes[lang][1]
		require.Equal(t, 1, strings.Count(string(b), old), "%s of %s must hold %q once: correct the table", file, lang, old)
		require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(b), old, changed, 1)), 0o600))
	}
	out, err := exec.Command("make", "-C", dir, "ASC="+filepath.Join(root, ".build/as/node_modules/.bin/asc")).CombinedOutput()
	require.NoError(t, err, string(out))
}

// needGuests skips the test where make guests has not run, or fails where it must have.
func needGuests(t *testing.T) {
	t.Helper()
	for lang := range source {
		if _, err := os.Stat("../../.build/guests/window-" + lang + ".wasm"); err != nil {
			if os.Getenv("TIERD_GUESTS") == "required" {
				t.Fatalf("%v: run make guests", err)
			}
			t.Skip("the compilers may be missing: run make guests")
		}
	}
}

// A new rule in each language is accepted as it is written, and with one line broken it is
// refused, in every language by the same first counterexample.
func TestLanguagesAreRefusedAlike(t *testing.T) {
	needGuests(t)
	ctx := context.Background()
	// A tail that begins one token before the end of a chunk shows an off-by-one.
	text := strings.Replace(file, "{window: 20}", "{window: 18}", 1)
	judge := func(t *testing.T, lang string, m *mistake) error {
		dir := t.TempDir()
		build(t, dir, lang, m)
		d, err := deploy.Parse(filepath.Join(dir, "d.yaml"), fmt.Appendf(nil, text, 130, "./rule.wasm#my-window", "request-level"))
		require.NoError(t, err)
		r, err := rules.Register(ctx, d, rules.Options{StateDir: state(t)})
		if err == nil {
			require.NoError(t, r.Close(ctx))
		}
		return err
	}
	for _, lang := range scaffold.Languages() {
		t.Run("no mistake/"+lang, func(t *testing.T) { require.NoError(t, judge(t, lang, nil)) })
	}
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			first := ""
			for _, lang := range scaffold.Languages() {
				var refusal *registry.Refusal
				require.ErrorAs(t, judge(t, lang, &m), &refusal, lang)
				ce := refusal.Verdict.Counterexample
				require.Equal(t, m.relation, ce.Relation, "%s: %s", lang, ce)
				require.Equal(t, "sliding", ce.Group)
				if first == "" {
					first = ce.String()
					t.Log(first)
				}
				require.Equal(t, first, ce.String(), lang)
			}
		})
	}
}
