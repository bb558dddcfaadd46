package plugins

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/proc"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/module"
	"github.com/tierd/tierd/specs/policy"
)

// cacheDir keeps compiled code for one run of the tests.
var cacheDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-plugins-test-")
	if err != nil {
		panic(err)
	}
	cacheDir = dir
	code := m.Run()
	os.RemoveAll(dir)
	if err := goleak.Find(); err != nil && code == 0 {
		os.Stderr.WriteString(err.Error())
		code = 1
	}
	os.Exit(code)
}

func loader(t *testing.T, o Options) *Loader {
	o.CacheDir = cacheDir
	l := NewLoader(o)
	t.Cleanup(func() { require.NoError(t, l.Close(context.Background())) })
	return l
}

func TestEveryShippedRuleOpens(t *testing.T) {
	l := loader(t, Options{})
	for _, native := range append(specs.All(), policy.All()...) {
		p, err := l.Open(context.Background(), native.Manifest().Name)
		require.NoError(t, err)
		require.Equal(t, native.Manifest(), p.Spec.Manifest())
		require.Equal(t, module.Digest(), p.Digest)
		require.Equal(t, Shipped, p.Source)
		require.NoError(t, p.Close(context.Background()), "the loader owns it")
	}
	require.Len(t, l.modules, 1, "one module for all of them")
}

func TestOpenOwnsItsModule(t *testing.T) {
	p, err := Open(context.Background(), "window", Options{CacheDir: cacheDir})
	require.NoError(t, err)
	r, err := p.Spec.Open([]uint64{16, 0})
	require.NoError(t, err)
	out := abi.NewBitmap(4)
	round := abi.Round{BlockTokens: 16, ChunkTokens: 16, StoredTokens: 64, ResumeTokens: 63, Hi: 4}
	require.NoError(t, r.Reach(round, out))
	require.NoError(t, p.Close(context.Background()))
	require.ErrorIs(t, r.Reach(round, out), wasm.ErrClosed)
}

// A module from a file, by every way to write the reference.
func TestFile(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{"one.wasm", "two.wasm"} {
		bytes, err := os.ReadFile(filepath.Join("testdata", file))
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), bytes, 0o644))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "sub", file), bytes, 0o644))
	}
	one, two := filepath.Join(dir, "one.wasm"), filepath.Join(dir, "two.wasm")
	l := loader(t, Options{BaseDir: filepath.Join(dir, "sub")})
	for ref, want := range map[string][2]string{
		"../one.wasm":          {"p", one},
		"../one.wasm#p":        {"p", one},
		"../two.wasm#q":        {"q", two},
		"./one.wasm":           {"p", filepath.Join(dir, "sub", "one.wasm")},
		"./x/../../two.wasm#p": {"p", two},
		two + "#q":             {"q", two},
	} {
		p, err := l.Open(context.Background(), ref)
		require.NoError(t, err, ref)
		require.Equal(t, want, [2]string{p.Spec.Manifest().Name, p.Source}, ref)
		require.Regexp(t, "^sha256:[0-9a-f]{64}$", p.Digest)
	}
	require.Len(t, l.modules, 2, "the same bytes are one module")
	for ref, want := range map[string]string{
		"../two.wasm":   "rule ../two.wasm: the module holds 2 rules; add #name, one of: p, q",
		"../two.wasm#r": "rule ../two.wasm#r: the module holds no rule r; did you mean p? It holds: p, q",
		"../one.wasm#q": "rule ../one.wasm#q: the module holds no rule q; did you mean p? It holds: p",
	} {
		_, err := l.Open(context.Background(), ref)
		require.EqualError(t, err, want)
	}
}

func TestReferencesThatDoNotOpen(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "text.wasm"), []byte("hello, world"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "large.wasm"), make([]byte, wasm.ModuleBytesMax+10), 0o644))
	l := loader(t, Options{BaseDir: dir})
	at := func(name string) string { return filepath.Join(dir, name) }
	for ref, want := range map[string]string{
		"":                 `rule "": empty; give a shipped name or ./file.wasm#name`,
		"#window":          `rule "#window": empty; give a shipped name or ./file.wasm#name`,
		"./x.wasm#":        `rule "./x.wasm#": no name follows #; give ./x.wasm#name, or leave out # where there is one rule`,
		"oci:r@sha256:0#x": "rule oci:r@sha256:0#x: references that start with oci: are not supported by this build; give a shipped name, ./file.wasm#name or exec:./path#name",
		"exec:":            `rule "exec:": empty; give exec:./path#name`,
		"exec:./p#":        `rule "exec:./p#": no name follows #; give exec:./p#name, or leave out # where there is one rule`,
		"exec:#x":          `rule "exec:#x": empty; give exec:./path#name`,
		"exec:p#x":         "rule exec:p#x: the path after exec: starts with ./, ../ or /, as in exec:./path#name",
		"exec:./p#x":       "rule exec:./p#x: there is no file " + at("p") + "; build the program first, or correct the path, which is relative to the deployment file",
		"exec:./#x":        "rule exec:./#x: " + dir + " is not a regular file",
		"exec:./text.wasm": "rule exec:./text.wasm: " + at("text.wasm") + " has the mode -rw-r--r-- and cannot be run; chmod +x it",
		"cross":            "rule cross: not prefix-cacheable: what such a layer keeps belongs to the whole input of an encoder, not to a prefix of the text; leave the group out, or compute it again",
		"encoder":          "rule encoder: not prefix-cacheable: what such a layer keeps belongs to the whole input of an encoder, not to a prefix of the text; leave the group out, or compute it again",
		"windo":            "rule windo: no shipped rule has this name; did you mean window? Shipped: " + shippedNames(),
		"chunklevel":       "rule chunklevel: no shipped rule has this name; did you mean chunk-level? Shipped: " + shippedNames(),
		"x.wasm":           "rule x.wasm: not a shipped name; a path starts with ./, ../ or /, as in ./file.wasm#name",
		"a/b.wasm#x":       "rule a/b.wasm#x: not a shipped name; a path starts with ./, ../ or /, as in ./file.wasm#name",
		"window#window":    "rule window#window: not a shipped name; a path starts with ./, ../ or /, as in ./file.wasm#name",
		"./text.wasm#x":    "rule ./text.wasm#x: wasm module " + at("text.wasm") + `: not WebAssembly: it starts with "hell", not "\x00asm"`,
		"./large.wasm#x":   "rule ./large.wasm#x: wasm module " + at("large.wasm") + ": 8388609 bytes; at most 8388608 are allowed: build without debug information (-ldflags='-s -w') and without encoding/json",
		"./none.wasm":      "rule ./none.wasm: there is no file " + at("none.wasm") + "; build the module first, or correct the path, which is relative to the deployment file",
		"./":               "rule ./: " + dir + " is not a regular file",
	} {
		_, err := l.Open(context.Background(), ref)
		require.EqualError(t, err, want, ref)
	}
	_, err := l.Open(context.Background(), "oci:x")
	require.ErrorIs(t, err, ErrUnsupported)
	_, err = l.Open(context.Background(), "./none.wasm")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = Open(context.Background(), "./none.wasm", Options{BaseDir: dir})
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// TestProgram: a rule of a program, by every way to write the reference.
func TestProgram(t *testing.T) {
	dir, err := os.MkdirTemp("", "p")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "rules"), "./proc/testdata/rogue")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	require.NoError(t, os.Symlink(filepath.Join(dir, "rules"), filepath.Join(dir, "sub", "link")))
	bytes, err := os.ReadFile(filepath.Join(dir, "rules"))
	require.NoError(t, err)

	l := loader(t, Options{BaseDir: filepath.Join(dir, "sub")})
	for ref, want := range map[string][2]string{
		"exec:../rules#window":                            {"window", filepath.Join(dir, "rules")},
		"exec:./../rules#full":                            {"full", filepath.Join(dir, "rules")},
		"exec:./link#request-level":                       {"request-level", filepath.Join(dir, "sub", "link")},
		"exec:" + filepath.Join(dir, "rules") + "#window": {"window", filepath.Join(dir, "rules")},
	} {
		p, err := l.Open(context.Background(), ref)
		require.NoError(t, err, ref)
		require.Equal(t, want, [2]string{p.Spec.Manifest().Name, p.Source}, ref)
		require.Equal(t, fmt.Sprintf("sha256:%x", sha256.Sum256(bytes)), p.Digest)
	}
	require.Len(t, l.programs, 2, "one process a path")
	for ref, want := range map[string]string{
		"exec:../rules":     "rule exec:../rules: the program holds 3 rules; add #name, one of: window, full, request-level",
		"exec:../rules#ful": "rule exec:../rules#ful: the program holds no rule ful; did you mean full? It holds: window, full, request-level",
	} {
		_, err := l.Open(context.Background(), ref)
		require.EqualError(t, err, want)
	}

	require.NoError(t, os.WriteFile(filepath.Join(dir, "mode"), []byte("lie: nothing"), 0o600)) // serves one rule
	p, err := Open(context.Background(), "exec:./rules", Options{BaseDir: dir})
	require.NoError(t, err)
	r, err := p.Spec.Open(nil)
	require.NoError(t, err)
	require.NoError(t, p.Close(context.Background()))
	require.ErrorIs(t, r.Reach(abi.Round{BlockTokens: 1, ChunkTokens: 1}, nil), proc.ErrClosed)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "mode"), []byte("exit"), 0o600))
	_, err = Open(context.Background(), "exec:./rules", Options{BaseDir: dir})
	var dead *proc.CallError
	require.ErrorAs(t, err, &dead)
}

func shippedNames() string {
	var names []string
	for _, s := range append(specs.All(), policy.All()...) {
		names = append(names, s.Manifest().Name)
	}
	return strings.Join(names, ", ")
}

func TestLoaderIsConcurrent(t *testing.T) {
	l := loader(t, Options{})
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for range 8 {
		group.Go(func() {
			_, err := l.Open(context.Background(), "full")
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
		})
	}
	group.Wait()
	require.NoError(t, errors.Join(errs...))
}

func TestEdits(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"window", "window", 0}, {"windo", "window", 1}, {"kitten", "sitting", 3}, {"ab", "ba", 2}} {
		require.Equal(t, test.want, edits(test.a, test.b), "%q %q", test.a, test.b)
	}
	require.Equal(t, "b", nearest("b", []string{"a", "b", "c"}))
	require.Equal(t, "a", nearest("x", []string{"a", "b"}))
	require.Equal(t, "did you mean window? ", didYouMean("windov", []string{"full", "window"}))
	require.Empty(t, didYouMean("nope", []string{"full", "window"}))
	require.Empty(t, didYouMean("nope", nil))
}
