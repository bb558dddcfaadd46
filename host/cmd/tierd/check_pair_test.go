package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry"
)

// took is what differs from run to run in a printed verdict: how many cases a refused way
// has run depends on the workers, and a slow machine says how far it is.
var took = regexp.MustCompile(`[0-9]+ in [0-9.]+ s, and [0-9.]+ s|: pair [0-9]+\n|sha256:[0-9a-f]+|tierd check: [0-9]+ % done\n`)

// TestCheckAgainst holds what is said of pairs, with the status, against a golden file.
func TestCheckAgainst(t *testing.T) {
	golden, err := filepath.Abs(filepath.Join("testdata", "pair.txt"))
	require.NoError(t, err)
	inModules(t)
	const pair = `model: small
max_tokens: 300
groups:
  - {name: sliding, rule: window, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
`
	for name, edit := range map[string][2]string{
		"a.yaml": {"", ""}, "longer.yaml": {"max_tokens: 300", "max_tokens: 400"}, "wider.yaml": {"window: 20", "window: 40"},
		"layout.yaml": {"head_dim: 4", "head_dim: 8"}, "broken.yaml": {"groups", "gruops"},
	} {
		text := strings.Replace(pair, edit[0], edit[1], 1)
		require.True(t, name == "a.yaml" || text != pair, name)
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	var got strings.Builder
	for _, line := range []string{
		"check a.yaml --against a.yaml", "check a.yaml --against longer.yaml", "check a.yaml --against wider.yaml",
		"check a.yaml --against layout.yaml", "check a.yaml --against broken.yaml", "check a.yaml --against none.yaml", "check a.yaml --against .",
		"check none.yaml --against a.yaml", "check one.wasm --against a.yaml", "check a.yaml --against a.yaml --budget 0.000001",
	} {
		out, errOut, status := command(t, "", append(strings.Fields(line), "--state", "state")...) // compiled once
		got.WriteString("$ tierd " + line + "\n" + took.ReplaceAllStringFunc(out+errOut, func(s string) string {
			switch {
			case strings.HasPrefix(s, "sha256:"):
				return "sha256:N"
			case strings.HasPrefix(s, ": pair"):
				return ": pair N\n"
			case strings.HasPrefix(s, "tierd check"):
				return ""
			}
			return "N in N s, and N s"
		}))
		got.WriteString("status " + string(rune('0'+status)) + "\n\n")
	}
	if *rewrite {
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())

	out, _, status := command(t, "", "check", "a.yaml", "--against", "wider.yaml", "--json", "--state", "state")
	require.Equal(t, exitRefused, status)
	var v registry.Verdict
	require.NoError(t, json.Unmarshal([]byte(out), &v))
	require.Equal(t, "wider.yaml", v.Against.File)
	require.Equal(t, "wider.yaml", v.Counterexample.Consumer)
	require.Len(t, v.Ways, 2)
	require.Nil(t, v.Ways[1].Counterexample)
}
