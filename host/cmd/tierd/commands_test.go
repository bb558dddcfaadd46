package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// command runs one command line and returns what it said and its status, as main would.
func command(t *testing.T, stdin string, args ...string) (out, errOut string, status int) {
	t.Helper()
	root := rootCommand()
	var o, e bytes.Buffer
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&o)
	root.SetErr(&e)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(t.Context())
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		status = exit.status
	case err != nil:
		status = exitUsage
		e.WriteString(cmd.CommandPath() + ": " + err.Error() + "\n")
	}
	return o.String(), e.String(), status
}

// inModules makes a working directory with small modules, which compile at once.
func inModules(t *testing.T) {
	dir := filepath.Join("..", "..", "..", "plugins", "testdata")
	modules := map[string][]byte{"text.wasm": []byte("no module")}
	for _, name := range []string{"one.wasm", "two.wasm"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		modules[name] = b
	}
	modules["one.bin"], modules["one-bin"] = modules["one.wasm"], modules["one.wasm"]
	t.Chdir(t.TempDir())
	t.Setenv("PATH", t.TempDir())
	for name, b := range modules {
		require.NoError(t, os.WriteFile(name, b, 0o600))
	}
	require.NoError(t, os.WriteFile("lines.jsonl", []byte(`{"rule":"./one.wasm","op":"reach","round":{"chunk_tokens":8}}`+"\n"), 0o600))
	require.NoError(t, os.WriteFile("small.yaml", []byte(smallDeployment), 0o600))
	require.NoError(t, os.Mkdir("checkout", 0o700))
	require.NoError(t, os.WriteFile("checkout/go.mod", []byte("module example.org/other\n"), 0o600))
}

// volatile is what differs from build to build and from run to run.
var volatile = regexp.MustCompile(`sha256:[0-9a-f]+|TIERD=\S+|"seconds": [0-9.e-]+|"fuel":\d+`)

// TestCommands holds what commands say, with their status, against a golden file: each of
// its cases begins with the command line.
func TestCommands(t *testing.T) {
	golden, err := filepath.Abs(filepath.Join("testdata", "commands.txt"))
	require.NoError(t, err)
	inModules(t)
	var got strings.Builder
	for _, line := range []string{
		"check", "check a b", "check none.yaml", "check .", "check one.wasm#", "check exec:./none", "check lines.jsonl", "new rule My-rule --lang c", "check none.wasm", "check text.wasm",
		"check small.yaml --twin window", "check small.yaml --legs pd", "check small.yaml --budget 0.000001", "check small.yaml --budget -1", "check small.yaml --budget NaN", "check small.yaml --budget x", "check small.yaml --seed -1", "check small.yaml --seed 99999999999999999999", "check small.yaml --jsn", "check small.yaml --json=maybe", "check small.yaml --html=", "check small.yaml --at=", "check small.yaml --state none/state", "check one.wasm --state none/state",
		"check one.wasm --legs pod", "check two.wasm --twin one.wasm", "check one.wasm --twin windo",
		"check one.wasm", "check ./two.wasm", "check one.bin", "check one.wasm#p", "check one.wasm#q", "check one.wasm --json", "check none.wasm --json",
		"check one.wasm --color sometimes", "check small.yaml --certificate c.json", "check small.yaml --key key.pem", "check one.wasm --certificate c.json --key key.pem",
		"check small.yaml --certificate c.json --key none.pem", "check small.yaml --certificate c.json --key text.wasm", "check small.yaml --certificate c.json --key /dev/zero", "check small.yaml --certificate c.json --key .",
		"check small.yaml --junit a --html ./a", "check small.yaml --sarif small.yaml", "check small.yaml --certificate c.json --key c.json", "check small.yaml --json --junit -", "check small.yaml --html - --junit -",
		"check small.yaml --junit none/junit.xml", "check small.yaml --html checkout", "check none.yaml --json --junit none/x", "key", "key small.yaml", "key none/ci.pem",
		"inspect", "inspect one.wasm", "inspect one.wasm --json", "inspect text.wasm", "inspect text.wasm --json", "inspect none.wasm", "inspect none.wasm --json", "inspect one-bin",
		"eval", "eval lines.jsonl", "eval none.jsonl", "eval a b", "eval --state none/state",
		"new", "new policy x", "new policy x --lang go", "new rule", "new rule my-rule", "new rule my-rule --lang c++", "new rule my-rule --lang rast", "new rule my-rule --lang go",
		"new rule my-rule --lang go --tierd none", "new rule my-rule --lang go --tierd checkout",
	} {
		out, errOut, status := command(t, `{"op":"need"}`, strings.Fields(line)...)
		got.WriteString("$ tierd " + line + "\n" + out)
		if out != "" && !strings.HasSuffix(out, "\n") {
			t.Errorf("tierd %s: what it prints does not end its last line", line)
		}
		for l := range strings.Lines(errOut) {
			got.WriteString("2> " + l)
		}
		got.WriteString("=> " + string(rune('0'+status)) + "\n\n")
	}
	text := volatile.ReplaceAllStringFunc(got.String(), func(s string) string {
		return regexp.MustCompile(`[:= ]*[0-9a-f./e-]+$|=\S+$`).ReplaceAllString(s, ":N")
	})
	if *rewrite {
		require.NoError(t, os.MkdirAll(filepath.Dir(golden), 0o755))
		require.NoError(t, os.WriteFile(golden, []byte(text), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), text)
}

// A new rule's files are printed, and there; a second time nothing is replaced.
func TestNewRule(t *testing.T) {
	inModules(t)
	out, errOut, status := command(t, "", "new", "rule", "my-rule", "--lang", "c", "--dir", "some dir")
	require.Zero(t, status, errOut)
	files, next, found := strings.Cut(out, "\nnext:\n")
	require.True(t, found, out)
	require.NotEmpty(t, files)
	for f := range strings.Lines(files) {
		require.FileExists(t, strings.TrimSuffix(f, "\n"))
	}
	self, err := os.Executable()
	require.NoError(t, err)
	require.Equal(t, []string{"  cd 'some dir'", "  make test TIERD=" + self + "    # builds rule.wasm and tries it", "  make check TIERD=" + self + "   # judges it"},
		strings.Split(strings.TrimSuffix(next, "\n"), "\n"))
	out, _, status = command(t, "", "new", "rule", "--lang", "c", "--", "-x")
	require.Zero(t, status)
	require.Contains(t, out, "\n  cd ./-x\n", "cd takes no option for a directory")
	_, errOut, status = command(t, "", "new", "rule", "my-rule", "--lang", "c", "--dir", "some dir")
	require.Equal(t, exitUsage, status)
	require.NotEmpty(t, errOut)
}

// The checkout is named as it is seen from the new directory, wherever that is.
func TestCheckoutFrom(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.Mkdir("tierd", 0o700))
	require.NoError(t, os.WriteFile("tierd/go.mod", []byte("module github.com/tierd/tierd\n\ngo 1.26\n"), 0o600))
	for dir, want := range map[string]string{"my-rule": "../tierd", "a/b": "../../tierd", "tierd/examples/x": "../.."} {
		got, err := checkoutFrom(dir, "tierd")
		require.NoError(t, err)
		require.Equal(t, filepath.FromSlash(want), got)
	}
	require.Equal(t, "a/b-c", shellWord("a/b-c"))
	require.Equal(t, `'it'\''s'`, shellWord("it's"))
	require.Equal(t, "''", shellWord(""))
}

// The state directory is made, those above it are not.
func TestCheckMakesItsStateOnly(t *testing.T) {
	inModules(t)
	_, errOut, status := command(t, "", "check", "small.yaml", "--state", "state")
	require.Zero(t, status, errOut)
	require.DirExists(t, "state/verdicts")
	_, errOut, status = command(t, "", "check", "small.yaml", "--state", "none/state")
	require.Equal(t, exitUndecided, status)
	require.Contains(t, errOut, "make the directory above it")
	require.NoDirExists(t, "none")
	out, _, status := command(t, "", "check", "small.yaml", "--state", "small.yaml", "--json")
	require.Equal(t, exitUndecided, status)
	require.True(t, json.Valid([]byte(out)), out)
	require.Contains(t, out, "file exists")
}
