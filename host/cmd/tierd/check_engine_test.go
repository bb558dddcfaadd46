package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// Each command of examples/vllm/README.md ends as the table says.
func TestExamplesOfStockEngines(t *testing.T) {
	dir := filepath.Join("..", "..", "..", "examples", "vllm")
	text, err := os.ReadFile(filepath.Join(dir, "README.md"))
	require.NoError(t, err)
	rows := regexp.MustCompile("(?m)^\\| `tierd (check [^`]*)` \\| ([^|]*) \\|").FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(rows), 10)
	t.Chdir(dir)
	shown := map[string]bool{}
	for _, row := range rows {
		t.Run(row[1], func(t *testing.T) {
			args := strings.Fields(row[1])
			shown[args[1]] = true
			out, errOut, status := command(t, "", append(args, "--json")...)
			var v registry.Verdict
			require.NoError(t, json.Unmarshal([]byte(out), &v), errOut)
			got, want := "accepted", 0
			if ce := v.Counterexample; ce != nil {
				got, want = fmt.Sprintf("refused by %s at %d tokens", ce.Relation, ce.PromptTokens), exitRefused
			}
			require.Equal(t, row[2], got)
			require.Equal(t, want, status)
			t.Logf("%.1f s, %d cases", v.Seconds, v.Cases)
		})
	}
	files, err := filepath.Glob("*.yaml")
	require.NoError(t, err)
	require.Len(t, shown, len(files), "the table shows every file")
}

// stockFile is a deployment of a stock engine: groups are "rule block params".
func stockFile(engineParams string, groups ...string) string {
	text := "model: m\nmax_tokens: 16384\nengine: vllm-0.30\nengine_params: {" + engineParams + "}\ngroups:\n"
	for i, g := range groups {
		f := strings.SplitN(g, " ", 3)
		text += fmt.Sprintf("  - {name: g%d, rule: %s, block_tokens: %s, %s, layers: 1, kv_heads: 1, head_dim: 8, dtype: bf16}\n", i, f[0], f[1], f[2])
	}
	return text
}

// The known rows of stock vLLM come out, through the command line, as the facts say. The
// golden file holds what the command prints, up to the digests.
func TestCheckEngineRows(t *testing.T) {
	golden, err := filepath.Abs(filepath.Join("testdata", "check_engine.txt"))
	require.NoError(t, err)
	const full16, full64, full128 = "full 16 params: {}", "full 64 params: {}", "full 128 params: {}"
	const swa4, swa17, swa48, swa128 = "window 4 params: {window: 8}", "window 16 params: {window: 17}", "window 16 params: {window: 48}", "window 128 params: {window: 128}"
	t.Chdir(t.TempDir())
	var got strings.Builder
	for _, c := range []struct {
		row, flags, params string
		groups             []string
		verdict            string
	}{
		{"1, pending", "--engine vllm-0.27 --promotion pending --policy request-level", "", []string{swa128, full128}, "ACCEPTED"},
		{"1, retry", "--engine vllm-0.27 --promotion retry --policy request-level", "", []string{swa128, full128}, "REFUSED"},
		{"1, w = 1 mod block", "--engine vllm-0.27 --promotion pending --policy request-level", "", []string{full64, swa17}, "REFUSED"},
		{"2", "--engine vllm-0.27 --promotion pending --policy request-level", "", []string{full64, swa48}, "ACCEPTED"},
		{"3, 0.27", "--engine vllm-0.27 --promotion pending --policy request-level", "prompt_only: false", []string{"full 16 draft: true"}, "ACCEPTED"},
		{"3, 0.30", "--promotion pending --policy request-level", "prompt_only: false", []string{"full 16 draft: true"}, "ACCEPTED"},
		{"6", "--engine vllm-0.27 --promotion pending --policy request-level", "max_offload_tokens: 48", []string{full16, swa4}, "REFUSED"},
		{"7, pending", "--engine vllm-0.27 --promotion pending --policy request-level", "", []string{full16, swa4}, "ACCEPTED"},
		{"7, retry", "--engine vllm-0.27 --promotion retry --policy request-level", "", []string{full16, swa4}, "REFUSED"},
		{"7, retry, by itself", "--engine vllm-0.27 --promotion retry --policy request-level --at prompt=256", "", []string{swa128, full128}, "REFUSED"},
		{"9", "--promotion pending --policy request-level", "", []string{full16, swa4}, "REFUSED"},
		{"9, dense", "--promotion pending --policy request-level --retention none", "", []string{full16, swa4}, "ACCEPTED"},
		{"10", "--promotion pending --policy request-level --retention none", "", []string{full64, swa17}, "REFUSED"},
		{"11", "--engine vllm-0.27 --promotion pending --policy request-level", "", []string{"full 16 draft: true", "window 4 draft: true, params: {window: 8}"}, "REFUSED"},
		{"11, by itself", "--engine vllm-0.27 --promotion pending --policy request-level --at prompt=64", "", []string{"full 16 draft: true", "window 4 draft: true, params: {window: 8}"}, "REFUSED"},
		{"12", "--engine vllm-0.27 --promotion pending --policy request-level", "", []string{full64, "state 16 params: {mode: all}"}, "REFUSED"},
		{"13", "--promotion pending --policy request-level --retention 32", "", []string{full16, swa4}, "REFUSED"},
		{"gate", "--promotion pending", "", []string{full128}, "REFUSED"},
		{"gate, 0.27", "--engine vllm-0.27 --promotion pending", "", []string{full128}, "REFUSED"},
		{"gate, request-level", "--promotion pending --policy request-level", "", []string{full128}, "ACCEPTED"},
		{"trace of 57 chunks", "--engine vllm-0.27 --promotion retry --policy request-level --at prompt=7296,gpu=7168", "", []string{swa128, full128}, "REFUSED"},
	} {
		require.NoError(t, os.WriteFile("d.yaml", []byte(stockFile(c.params, c.groups...)), 0o600))
		out, errOut, status := command(t, "", append([]string{"check", "d.yaml"}, strings.Fields(c.flags)...)...)
		require.Empty(t, errOut)
		require.Equal(t, map[string]int{"ACCEPTED": 0, "REFUSED": exitRefused}[c.verdict], status, out)
		require.True(t, strings.HasPrefix(out, c.verdict+"  m\n"), "row %s: %s", c.row, out)
		fmt.Fprintf(&got, "row %s: tierd check d.yaml %s\n%s\n", c.row, c.flags, untilCases(out))
	}
	if *rewrite {
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

// untilCases leaves out how many cases ran, which depends on the workers, and the digests.
func untilCases(out string) string {
	out, _, _ = strings.Cut(out, "  cases ")
	return regexp.MustCompile(`, sha256:[0-9a-f]+`).ReplaceAllString(out, "")
}

// What goes wrong names what to write instead.
func TestCheckEngineErrors(t *testing.T) {
	inModules(t)
	require.NoError(t, os.WriteFile("stock.yaml", []byte(stockFile("", "full 16 params: {}")), 0o600))
	aligned := regexp.MustCompile(`(?m)^engine.*\n`).ReplaceAllString(stockFile("", "full 16 params: {}"), "")
	require.NoError(t, os.WriteFile("aligned.yaml", []byte("align_tokens: 32\n"+aligned), 0o600))
	for line, want := range map[string]string{
		"check one.wasm --engine vllm-0.30":                         "tierd check: --engine is for a deployment, and one.wasm is taken for a plugin: a stock engine runs none\n",
		"check one.wasm --promotion retry":                          "tierd check: --promotion is for a deployment, and one.wasm is taken for a plugin: a stock engine runs none\n",
		"check small.yaml --promotion retry":                        "tierd check: --promotion is for a stock engine, and small.yaml is of engine tierd; add --engine vllm-0.30\n",
		"check stock.yaml --engine tierd --at prompt=3":             "tierd check: --at is for a stock engine, and stock.yaml is judged as engine tierd's\n",
		"check stock.yaml --engine vllm-0.3":                        "tierd check: stock.yaml, judged as engine vllm-0.3: engine is \"vllm-0.3\"; did you mean \"vllm-0.30\"? known: tierd, vllm-0.27, vllm-0.30\n",
		"check stock.yaml --engine vllm-0.27":                       "tierd check: stock.yaml: engine_params.promotion is missing: say what a lookup answers when it has just started to copy a key from a peer, because that decides how far a window's scan walks; retry in vLLM v0.27.1 and before, pending in its main branch since 2026-08-12 and in 0.30 (tierd check --promotion retry|pending)\n",
		"check stock.yaml --promotion maybe":                        "tierd check: stock.yaml, judged as engine vllm-0.30: engine_params.promotion is maybe; it must be pending or retry\n",
		"check stock.yaml --promotion retry --retention some":       "tierd check: stock.yaml, judged as engine vllm-0.30: engine_params.retention_interval is some; it must be a number of tokens, or the word none, 0 to 2147483648\n",
		"check stock.yaml --promotion retry --at prompt=5,gpu=3":    "tierd check: check deployment m: vllm: prefix on the GPU of 3 tokens ends inside a block of 16 tokens of group 0\n",
		"check stock.yaml --promotion retry --at prompt=999999":     "tierd check: --at has a prompt of 999999 tokens, but max_tokens of stock.yaml is 16384; give a prompt that the deployment allows\n",
		"check stock.yaml --promotion retry --at prmpt=5":           "tierd check: --at has \"prmpt\"; did you mean \"prompt\"? known: prompt, gpu, loaded, primary, step, generated, local, text\n",
		"check stock.yaml --promotion retry --at prompt=x":          "tierd check: --at has prompt=x; it must be a number of tokens\n",
		"check stock.yaml --promotion retry --at gpu=16":            "tierd check: --at names no prompt; give its length in tokens, as in: --at prompt=7296,gpu=7168\n",
		"check aligned.yaml --engine vllm-0.30 --promotion pending": "tierd check: aligned.yaml, judged as engine vllm-0.30: align_tokens is 32, but vllm-0.30 knows no such distance: it keeps the tails that its retention_interval and its full chunks name; set align_tokens to 0\n",
	} {
		_, errOut, status := command(t, "", strings.Fields(line)...)
		require.Equal(t, exitUndecided, status, line)
		require.Equal(t, want, errOut, line)
	}
	out, _, status := command(t, "", "check", "stock.yaml", "--promotion", "retry", "--budget", "0.000001")
	require.Equal(t, exitUndecided, status)
	require.Contains(t, out, "UNDECIDED  m: the time given to the check is spent; nothing failed so far. Give --budget more seconds\n  reached      holes: none of ")
}

// The daemon serves its own engine's rules alone, and says so at its start.
func TestServeRefusesAStockEngine(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("stock.yaml", []byte(stockFile("promotion: pending", "full 16 params: {}")), 0o600))
	require.NoError(t, os.Mkdir("state", 0o700))
	require.NoError(t, os.WriteFile("node.yaml", []byte("node_id: a\nstate_dir: state\nengine_socket: e.sock\npeer_listen: 127.0.0.1:0\ndata_listen: 127.0.0.1:0\nhttp_listen: 127.0.0.1:0\nslab_bytes: 67108864\ndeployment: stock.yaml\n"), 0o600))
	_, errOut, status := command(t, "", "serve", "-c", "node.yaml")
	require.Equal(t, exitUsage, status)
	require.Contains(t, errOut, "stock.yaml: engine is vllm-0.30, whose own rules run inside the engine: tierd check judges them, and no daemon serves them. Write engine: tierd, with align_tokens and policies, for what tierd is to serve")
}

// What the README shows of a stock engine's check is what the command prints.
func TestReadmeShowsAStockCheck(t *testing.T) {
	t.Chdir(filepath.Join("..", "..", ".."))
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	line := regexp.MustCompile(`(?m)^    \$ tierd (check examples/vllm/.*)$`).FindStringSubmatch(string(readme))
	require.NotNil(t, line)
	out, _, status := command(t, "", strings.Fields(line[1])...)
	require.Equal(t, exitRefused, status)
	out, _, found := strings.Cut(out, "\n\n  rules ")
	require.True(t, found, out)
	shown := ""
	for l := range strings.Lines(out + "\n") {
		if l != "\n" {
			l = "    " + l
		}
		shown += l
	}
	require.Contains(t, string(readme), line[0]+"\n"+shown)
	// Each key of the table is one that a deployment may say.
	_, table, _ := strings.Cut(string(readme), "\n| `promotion` |")
	table, _, _ = strings.Cut("| `promotion` |"+table, "\n\n")
	keys := regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|").FindAllStringSubmatch(table, -1)
	require.Len(t, keys, 9)
	for _, key := range keys {
		_, err := deploy.Parse("d.yaml", []byte(stockFile(key[1]+": x", "full 16 params: {}")))
		require.ErrorContains(t, err, "engine_params."+key[1]+" is x;", "a wrong value of a known key")
	}
}
