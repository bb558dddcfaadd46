package e2e

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/specs/module"
)

// in runs the program in a directory and returns what it prints, and its status.
func in(t *testing.T, dir, stdin string, args ...string) (out string, status int) {
	t.Helper()
	cmd := exec.Command(tierd, args...)
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(stdin)
	b, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

// A tried rule is one of the rules in the JSON of tierd check of a plugin.
type triedRule struct {
	Rule, Verdict, Deployment string
	Laws                      []string `json:"laws_broken"`
	Counterexample            map[string]any
	Params                    map[string]uint64
	Seconds                   float64
}

func tried(t *testing.T, out string) (verdict string, rules map[string]triedRule) {
	var v struct {
		Verdict string
		Rules   []triedRule
	}
	require.NoError(t, json.Unmarshal([]byte(out), &v), out)
	rules = map[string]triedRule{}
	for _, r := range v.Rules {
		rules[r.Rule] = r
		t.Logf("%s: %s in %.1f s", r.Rule, r.Verdict, r.Seconds)
	}
	return v.Verdict, rules
}

// The shipped rules, from a file, are accepted without a deployment, but for the policy
// that is wrong for a producer.
func TestCheckOfThePluginThatShips(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	dir := t.TempDir()
	code, err := module.Wasm()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "specs.wasm"), code, 0o600))
	out, status := in(t, dir, "", "check", "specs.wasm#chunk-level", "--json", "--state", "state")
	verdict, rules := tried(t, out)
	require.Equal(t, 1, status)
	require.Equal(t, "refused", verdict)
	require.Equal(t, "warm", rules["chunk-level"].Counterexample["relation"])
	// On a leg where nothing is demanded unasked that policy is right.
	_, status = in(t, dir, "", "check", "specs.wasm#chunk-level", "--legs", "probe", "--state", "state")
	require.Zero(t, status)
	out, status = in(t, dir, "", "check", "specs.wasm#full", "--twin", "full", "--state", "state")
	require.Zero(t, status, out)
	require.Contains(t, out, "full gives the same answers")
}

// Every wrong rule is refused without a deployment, as a module, by a law or a relation.
func TestCheckOfWrongPlugins(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	dir := t.TempDir()
	build := exec.Command("go", "build", "-buildmode=c-shared", "-o", filepath.Join(dir, "wrong.wasm"), "../../registry/check/testdata/adversaries")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
	text, err := build.CombinedOutput()
	require.NoError(t, err, string(text))
	out, status := in(t, dir, "", "check", "wrong.wasm", "--json")
	require.Equal(t, 1, status)
	_, rules := tried(t, out)
	for _, a := range abitest.Adversaries() {
		r, ok := rules[a.Name+"-window"]
		require.True(t, ok, a.Name)
		require.Equal(t, "refused", r.Verdict, a.Name)
		if a.Law != "" {
			require.Contains(t, r.Laws, a.Law, a.Name)
		} else {
			require.Equal(t, a.Relation, r.Counterexample["relation"], a.Name)
		}
	}
	for name, r := range rules {
		require.Equal(t, "refused", r.Verdict, name)
	}
}

// What a refusal says to save and check is refused with the same counterexample.
func TestRefusedPluginCanBeReproduced(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	dir := t.TempDir()
	buildRule(t, "short-tail", filepath.Join(dir, "short-tail.wasm"))
	out, status := in(t, dir, "", "check", "short-tail.wasm", "--json", "--seed", "7")
	require.Equal(t, 1, status)
	_, rules := tried(t, out)
	r := rules["short-tail"]
	require.NoError(t, os.WriteFile(filepath.Join(dir, "saved.yaml"), []byte(r.Deployment), 0o600))
	out, status = in(t, dir, "", "check", "saved.yaml", "--json", "--seed", "7")
	require.Equal(t, 1, status)
	var again triedRule
	require.NoError(t, json.Unmarshal([]byte(out), &again))
	require.Equal(t, "covers", again.Counterexample["relation"])
	require.Equal(t, r.Counterexample, again.Counterexample)
}

// What the README shows of a check without a deployment and of eval is what they print.
func TestReadmeShowsTheCommandsForAuthors(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	text, err := os.ReadFile(filepath.Join(repo(), "README.md"))
	require.NoError(t, err)
	readme := string(text)
	dir := t.TempDir()
	buildRule(t, "short-tail", filepath.Join(dir, "short-tail.wasm"))
	out, _ := in(t, dir, "", "check", "short-tail.wasm")
	out, _, found := strings.Cut(out, "\n\n  deployments ")
	require.True(t, found, out)
	require.Contains(t, readme, indented("$ tierd check short-tail.wasm\n"+out+"\n"))

	shown := regexp.MustCompile(`(?m)^    \$ tierd eval\n(    \{.*\n    \{.*\n)+`).FindString(readme)
	require.NotEmpty(t, shown)
	lines := strings.Split(strings.TrimSpace(shown), "\n")[1:]
	require.GreaterOrEqual(t, len(lines), 4)
	fuel := regexp.MustCompile(`"fuel":\d+`)
	for i := 0; i < len(lines); i += 2 {
		out, status := in(t, dir, strings.TrimSpace(lines[i])+"\n", "eval")
		require.Zero(t, status, out)
		require.Equal(t, fuel.ReplaceAllString(strings.TrimSpace(lines[i+1]), ""), fuel.ReplaceAllString(strings.TrimSpace(out), ""))
	}
}

// indented is how the README shows what a program prints.
func indented(text string) (out string) {
	for line := range strings.Lines(text) {
		if line != "\n" {
			line = "    " + line
		}
		out += line
	}
	return out
}
