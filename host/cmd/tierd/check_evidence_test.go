package main

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/evidence"
)

// compiledDir is to be removed in the end.
var compiledDir string

// compiled is a state directory with the shipped rules compiled, which takes half a minute
// under the race detector.
var compiled = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "tierd-test-")
	if err != nil {
		return "", err
	}
	compiledDir = dir
	d, err := deploy.Parse("small.yaml", []byte(smallDeployment))
	if err != nil {
		return "", err
	}
	r, err := rules.Register(context.Background(), d, rules.Options{StateDir: dir})
	if err != nil {
		return "", err
	}
	return dir, errors.Join(r.Close(context.Background()), os.RemoveAll(filepath.Join(dir, "verdicts")))
})

func TestMain(m *testing.M) {
	code := m.Run()
	if compiledDir != "" {
		os.RemoveAll(compiledDir)
	}
	os.Exit(code)
}

// freshState makes a state directory that holds compiled rules, and no verdict.
func freshState(t *testing.T, dir string) {
	t.Helper()
	shared, err := compiled()
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.CopyFS(dir, os.DirFS(shared)))
}

// Files of one run, every one that can be asked for.
var everyFile = []string{"--junit", "junit.xml", "--sarif", "log.sarif", "--html", "page.html"}

// kept reads what a run left, and checks that each file says the same verdict and is whole.
func kept(t *testing.T, verdict string) {
	t.Helper()
	data, err := os.ReadFile("junit.xml")
	require.NoError(t, err)
	var suites struct {
		Tests    int `xml:"tests,attr"`
		Failures int `xml:"failures,attr"`
		Errors   int `xml:"errors,attr"`
	}
	require.NoError(t, xml.Unmarshal(data, &suites))
	require.Positive(t, suites.Tests)
	got := registry.Accepted
	switch {
	case suites.Failures > 0:
		got = registry.Refused
	case suites.Errors > 0:
		got = registry.Undecided
	}
	require.Equal(t, verdict, got, string(data))
	data, err = os.ReadFile("log.sarif")
	require.NoError(t, err)
	var log struct {
		Runs []struct {
			Invocations []struct{ ExitCode int }
		}
	}
	require.NoError(t, json.Unmarshal(data, &log))
	require.Equal(t, map[string]int{registry.Accepted: 0, registry.Refused: exitRefused, registry.Undecided: exitUndecided}[verdict], log.Runs[0].Invocations[0].ExitCode)
	data, err = os.ReadFile("page.html")
	require.NoError(t, err)
	require.Contains(t, string(data), "<title>tierd check: "+verdict)
	require.True(t, strings.HasSuffix(string(data), "</html>\n"))
	for _, f := range []string{"junit.xml", "log.sarif", "page.html"} {
		info, err := os.Stat(f)
		require.NoError(t, err)
		require.Equal(t, fs.FileMode(0o644), info.Mode().Perm()|0o044, "others may read what is no secret")
		require.NoError(t, os.Remove(f))
	}
	strays(t)
}

// strays reports files that were begun and not ended.
func strays(t *testing.T) {
	t.Helper()
	left, err := filepath.Glob(".*")
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestEvidence: every form at once, with every verdict, of a deployment and of a plugin.
func TestEvidence(t *testing.T) {
	inModules(t)
	_, errOut, status := command(t, "", "key", "ci.pem")
	require.Zero(t, status, errOut)
	require.NoError(t, os.WriteFile("failing.yaml", []byte(strings.Replace(smallDeployment, "rule: full", `rule: "./one.wasm#p"`, 1)), 0o600))
	for _, c := range []struct {
		verdict string
		args    []string
	}{
		{registry.Accepted, []string{"small.yaml"}},
		{registry.Undecided, []string{"small.yaml", "--budget", "0.000001"}},
		{registry.Undecided, []string{"none.yaml"}},
		{registry.Undecided, []string{"failing.yaml"}},
		{registry.Refused, []string{"one.wasm"}},
		{registry.Refused, []string{"./two.wasm"}},
		{registry.Undecided, []string{"text.wasm"}},
	} {
		freshState(t, "state")
		args := append(append([]string{"check", "--state", "state"}, c.args...), everyFile...)
		certificate := !strings.HasSuffix(c.args[0], ".wasm")
		if certificate {
			args = append(args, "--certificate", "c.json", "--key", "ci.pem")
			require.NoError(t, os.WriteFile("c.json", []byte("of an earlier run"), 0o600))
		}
		out, errOut, status := command(t, "", args...)
		require.Equal(t, map[string]int{registry.Accepted: 0, registry.Refused: exitRefused, registry.Undecided: exitUndecided}[c.verdict], status, errOut)
		if status != exitUndecided {
			require.Contains(t, out, strings.ToUpper(c.verdict), "the text is printed all the same")
		}
		kept(t, c.verdict)
		switch {
		case c.verdict == registry.Accepted:
			data, err := os.ReadFile("c.json")
			require.NoError(t, err)
			pub, err := os.ReadFile("ci.pem.pub")
			require.NoError(t, err)
			key, err := evidence.ParsePublicKey(pub)
			require.NoError(t, err)
			_, err = evidence.OpenCertificate(data, []ed25519.PublicKey{key})
			require.NoError(t, err)
		case certificate:
			require.NoFileExists(t, "c.json", "an earlier one would look like this run's")
			require.Contains(t, errOut, "no certificate is written: the verdict is "+c.verdict)
		}
	}
}

// A stock engine's verdicts are kept in the same forms, with the facts that only it has. One
// case alone has no certificate.
func TestEvidenceOfStockEngine(t *testing.T) {
	inModules(t)
	_, errOut, status := command(t, "", "key", "ci.pem")
	require.Zero(t, status, errOut)
	stock := []string{"check", "small.yaml", "--engine", "vllm-0.30", "--promotion", "pending", "--policy", "request-level"}
	_, errOut, status = command(t, "", append(append(stock, everyFile...), "--certificate", "c.json", "--key", "ci.pem")...)
	require.Zero(t, status, errOut)
	data, err := os.ReadFile("junit.xml")
	require.NoError(t, err)
	require.Contains(t, string(data), `<property name="engine" value="vllm-0.30">`)
	require.Contains(t, string(data), `value="tierd check small.yaml --engine=vllm-0.30 --policy=request-level --promotion=pending --seed=1"`)
	kept(t, registry.Accepted)
	require.FileExists(t, "c.json")

	_, errOut, status = command(t, "", append([]string{"check", "small.yaml", "--engine", "vllm-0.30", "--promotion", "retry"}, everyFile...)...)
	require.Equal(t, exitRefused, status, errOut)
	page, err := os.ReadFile("page.html")
	require.NoError(t, err)
	require.Contains(t, string(page), `<tr><th scope="row">engine</th><td>vllm-0.30</td></tr>`)
	kept(t, registry.Refused)

	one := append(stock, "--at", "prompt=16", "--certificate", "c.json", "--key", "ci.pem")
	_, errOut, status = command(t, "", one...)
	require.Equal(t, exitUndecided, status)
	require.Contains(t, errOut, "--certificate is of a whole domain, and --at names one case of it")
	require.NoFileExists(t, "c.json")
}

// What is derived from a model is kept under the model's name, with the command that derives
// it again.
func TestEvidenceOfModel(t *testing.T) {
	model, err := filepath.Abs(filepath.Join("..", "..", "..", "examples", "models", "gpt-oss-120b.json"))
	require.NoError(t, err)
	inModules(t)
	freshState(t, "state")
	args := []string{"check", "--model", model, "--block", "16", "--max-tokens", "256", "--align", "128", "--state", "state", "--print-deployment"}
	_, errOut, status := command(t, "", append(args, everyFile...)...)
	require.Zero(t, status, errOut)
	data, err := os.ReadFile("page.html")
	require.NoError(t, err)
	require.Contains(t, string(data), "tierd check --align=128 --block=16 --max-tokens=256 --model="+model+" --seed=1</pre>")
	kept(t, registry.Accepted)
	out, errOut, status := command(t, "", append(args, "--html", "-")...)
	require.Equal(t, exitUndecided, status)
	require.Empty(t, out)
	require.Contains(t, errOut, "--print-deployment and --html are both -")
}

// With "-" standard output holds one thing.
func TestEvidenceOnStandardOutput(t *testing.T) {
	inModules(t)
	for flag, begins := range map[string]string{"--junit": "<?xml", "--sarif": "{", "--html": "<!DOCTYPE html>"} {
		out, _, status := command(t, "", "check", "one.wasm", flag, "-", "--color", "always")
		require.Equal(t, exitRefused, status)
		require.True(t, strings.HasPrefix(out, begins), out)
		require.NotContains(t, out, "\x1b[1;31mREFUSED")
		out, _, status = command(t, "", "check", "none.yaml", flag, "-")
		require.Equal(t, exitUndecided, status)
		require.True(t, strings.HasPrefix(out, begins), out)
	}
	out, _, _ := command(t, "", "check", "one.wasm", "--color", "always")
	require.Contains(t, out, "\x1b[1;31mREFUSED\x1b[0m")
	out, _, _ = command(t, "", "check", "one.wasm", "--color", "always", "--json")
	require.True(t, json.Valid([]byte(out)))
	for _, args := range [][]string{{"--color", "never"}, {}} { // standard output is no terminal here
		out, _, _ = command(t, "", append([]string{"check", "one.wasm"}, args...)...)
		require.NotContains(t, out, "\x1b")
	}
}

// Colours are for a terminal, and not for one whose user does not want them.
func TestColoured(t *testing.T) {
	tty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("there is no terminal to be had here: ", err)
	}
	defer tty.Close()
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	defer file.Close()
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	auto := &evidenceArgs{color: "auto"}
	require.True(t, auto.coloured(tty), "an empty NO_COLOR says nothing")
	require.False(t, auto.coloured(file))
	require.False(t, (&evidenceArgs{color: "never"}).coloured(tty))
	require.False(t, (&evidenceArgs{color: "auto", json: true}).coloured(tty))
	t.Setenv("TERM", "dumb")
	require.False(t, auto.coloured(tty))
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "1")
	require.False(t, auto.coloured(tty))
	require.True(t, (&evidenceArgs{color: "always"}).coloured(file), "a flag is more than the environment")
}

// A file is there whole or not at all, and what stood there before stays until then.
func TestWriteWhole(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, writeWhole("a", []byte("one")))
	require.NoError(t, os.Chmod("a", 0o640))
	require.NoError(t, os.Symlink("a", "link"))
	require.NoError(t, writeWhole("link", []byte("two")))
	data, err := os.ReadFile("a")
	require.NoError(t, err)
	require.Equal(t, "two", string(data), "the link's target is replaced, and not the link")
	info, err := os.Stat("a")
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o640), info.Mode().Perm())
	require.NoError(t, writeWhole("/dev/null", []byte("three")))
	info, err = os.Stat("/dev/null")
	require.NoError(t, err)
	require.NotZero(t, info.Mode()&fs.ModeDevice, "a device is not replaced by a file")

	err = writeWhole("none/b", []byte("x"))
	require.EqualError(t, err, "none/b cannot be written: no such file or directory")
	err = writeWhole("a/b", []byte("x"))
	require.EqualError(t, err, "a/b cannot be written: not a directory")
	require.NoError(t, os.Mkdir("d", 0o700))
	require.Error(t, writeWhole("d", []byte("x")))
	require.NoError(t, os.WriteFile("full", []byte("before"), 0o600))
	if fill, err := os.OpenFile("/dev/full", os.O_WRONLY, 0); err == nil {
		fill.Close()
		require.ErrorContains(t, writeWhole("/dev/full", []byte("x")), "no space left on device")
	}
	strays(t)
}

// A file that cannot be written in the end is named, the others are written, and the
// verdict is printed; its status says that the evidence is not whole.
func TestEvidenceThatCannotBeWritten(t *testing.T) {
	inModules(t)
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip(err)
	}
	freshState(t, "state")
	out, errOut, status := command(t, "", "check", "small.yaml", "--state", "state", "--junit", "/dev/full", "--html", "page.html")
	require.Equal(t, exitUndecided, status)
	require.Contains(t, out, "ACCEPTED")
	require.Contains(t, errOut, "tierd check: --junit: write /dev/full: no space left on device")
	require.FileExists(t, "page.html")
}

// The command that gives the same verdict again leaves out where this one was kept.
func TestCommandAgain(t *testing.T) {
	inModules(t)
	out, _, _ := command(t, "", "check", "one.wasm#p", "--legs", "pd,probe", "--seed", "7", "--junit", "-", "--html", "x.html", "--color", "never")
	require.Contains(t, out, `value="tierd check &#39;one.wasm#p&#39; --legs=pd,probe --seed=7"`)
}

func TestKey(t *testing.T) {
	t.Chdir(t.TempDir())
	out, errOut, status := command(t, "", "key", "ci.pem")
	require.Zero(t, status, errOut)
	info, err := os.Stat("ci.pem")
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode().Perm(), "nobody else reads the private half")
	before, err := os.ReadFile("ci.pem")
	require.NoError(t, err)
	private, err := evidence.ParsePrivateKey(before)
	require.NoError(t, err)
	data, err := os.ReadFile("ci.pem.pub")
	require.NoError(t, err)
	public, err := evidence.ParsePublicKey(data)
	require.NoError(t, err)
	require.Equal(t, private.Public(), public)
	require.Contains(t, out, evidence.KeyID(public))

	_, errOut, status = command(t, "", "key", "ci.pem")
	require.Equal(t, exitUsage, status)
	require.Contains(t, errOut, "ci.pem is there already; a key is not replaced")
	require.NoError(t, os.WriteFile("b.pub", nil, 0o600))
	_, errOut, _ = command(t, "", "key", "b")
	require.Contains(t, errOut, "b.pub is there already")
	require.NoFileExists(t, "b", "both halves or none")
	after, err := os.ReadFile("ci.pem")
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// The README's commands, and the two keys that it tells a node's owner to set.
func TestReadmeEvidence(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "README.md"))
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Evidence\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	node := nodeFile
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("deployment.yaml", []byte(smallDeployment), 0o600))
	commands := 0
	for line := range strings.Lines(section) {
		line, ok := strings.CutPrefix(line, "    ")
		if args, is := strings.CutPrefix(line, "tierd "); ok && is {
			args, _, _ = strings.Cut(args, "#")
			words := strings.Fields(args)
			if words[0] == "check" {
				freshState(t, "state")
				words = append(words, "--state", "state")
			}
			_, errOut, status := command(t, "", words...)
			require.Zero(t, status, errOut)
			commands++
		} else if ok {
			node += line
		}
	}
	require.Equal(t, 2, commands)
	for _, f := range []string{"junit.xml", "tierd.sarif", "tierd.html", "certificate.json", "ci.pem.pub"} {
		require.FileExists(t, f)
	}
	c, err := config.Parse(filepath.Join(t.TempDir(), "node.yaml"), []byte(node))
	require.NoError(t, err)
	require.Equal(t, "certificate.json", filepath.Base(c.Certificate))
	require.Equal(t, "ci.pem.pub", filepath.Base(c.CertificateKeys[0]))
	for _, flag := range []string{"--junit", "--sarif", "--html", "--certificate"} {
		require.Contains(t, section, "| `"+flag+" FILE` |")
	}
}
