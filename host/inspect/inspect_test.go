package inspect

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/specs/module"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// cached keeps compiled code for one run of the tests.
var cached Options

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-inspect-test-")
	if err != nil {
		panic(err)
	}
	cached.CacheDir = dir
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// inDir puts the modules that the tests read into the working directory.
func inDir(t *testing.T) {
	one, err := os.ReadFile(filepath.Join("..", "..", "plugins", "testdata", "two.wasm"))
	require.NoError(t, err)
	specs, err := module.Wasm()
	require.NoError(t, err)
	t.Chdir(t.TempDir())
	for name, b := range map[string][]byte{
		"two.wasm": one, "specs.wasm": specs, "cut.wasm": specs[:1000], "text.wasm": []byte("text\n"),
		"marker.wasm": bytes.Replace(one, []byte("kv_abi_1"), []byte("kv_abi_7"), 1),
		"big.wasm":    make([]byte, wasm.ModuleBytesMax+5),
	} {
		require.NoError(t, os.WriteFile(name, b, 0o600))
	}
}

// volatile is what changes with every build of the embedded module.
var volatile = regexp.MustCompile(`sha256:[0-9a-f]{64}|\d+ bytes|with \d+|byte \d+|announces \d+|(reach|hits|misses|need) +\d+`)

func steady(text string) string {
	return volatile.ReplaceAllStringFunc(text, func(s string) string { return regexp.MustCompile(`[0-9a-f]{64}|\b\d+\b`).ReplaceAllString(s, "N") })
}

// TestText holds what is printed of a plugin, good and bad, against golden files.
func TestText(t *testing.T) {
	wd, err := os.Getwd()
	require.NoError(t, err)
	inDir(t)
	for _, ref := range []string{
		"window", "specs.wasm", "./specs.wasm#request-level", "two.wasm#q", "cut.wasm", "text.wasm", "marker.wasm", "big.wasm",
	} {
		t.Run(ref, func(t *testing.T) {
			r, err := Read(context.Background(), ref, cached)
			require.NoError(t, err)
			var b bytes.Buffer
			require.NoError(t, r.WriteText(&b))
			golden := filepath.Join(wd, "testdata", regexp.MustCompile(`[^a-z.]+`).ReplaceAllString(ref, "-")+".txt")
			if *rewrite {
				require.NoError(t, os.MkdirAll(filepath.Dir(golden), 0o755))
				require.NoError(t, os.WriteFile(golden, []byte(steady(b.String())), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			require.Equal(t, string(want), steady(b.String()))
		})
	}
}

// What is read of a file is what the loader says of it.
func TestReadAgreesWithTheLoader(t *testing.T) {
	inDir(t)
	r, err := Read(context.Background(), "specs.wasm", cached)
	require.NoError(t, err)
	require.Equal(t, module.Digest(), r.Digest)
	code, err := module.Wasm()
	require.NoError(t, err)
	require.EqualValues(t, len(code), r.Bytes)
	l := plugins.NewLoader(plugins.Options{CacheDir: cached.CacheDir})
	_, all, err := l.OpenAll(context.Background(), "./specs.wasm")
	require.NoError(t, err)
	require.Len(t, r.Rules, len(all))
	for i, p := range all {
		require.Equal(t, p.Spec.Manifest(), r.Rules[i].Manifest)
	}
	require.NoError(t, l.Close(context.Background()))
	// JSON holds all of it, and says nothing that the text does not.
	b, err := json.Marshal(r)
	require.NoError(t, err)
	var back Report
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, r, &back)
}

// The same call burns the same, whichever reference led to the rule.
func TestSamplesRepeat(t *testing.T) {
	inDir(t)
	var first []Call
	for _, ref := range []string{"window", "specs.wasm#window", "./specs.wasm"} {
		r, err := Read(context.Background(), ref, cached)
		require.NoError(t, err)
		for _, rule := range r.Rules {
			if rule.Manifest.Name != "window" {
				continue
			}
			require.NotNil(t, rule.Sample)
			require.Len(t, rule.Sample.Calls, 4)
			if first == nil {
				first = rule.Sample.Calls
			}
			require.Equal(t, first, rule.Sample.Calls)
		}
	}
	for _, c := range first {
		require.Empty(t, c.Error)
		require.Positive(t, c.Fuel)
	}
}

func TestWhatCannotBeRead(t *testing.T) {
	inDir(t)
	for ref, want := range map[string]string{
		"":                "the name is empty",
		"none.wasm":       "no such file",
		".":               "not a regular file",
		"windo":           `shipped: no rule "windo" there; did you mean "window"? it holds: full, hidden, latent, `,
		"specs.wasm#none": `specs.wasm: no rule "none" there; it holds: full, hidden, latent, `,
		"exec:./none":     "no such file",
		"exec:.":          "not a regular file",
	} {
		_, err := Read(context.Background(), ref, cached)
		require.ErrorContains(t, err, want, ref)
	}
}

func TestMemoryPagesBelievesNothing(t *testing.T) {
	head := "\x00asm\x01\x00\x00\x00"
	for code, want := range map[string]uint64{
		head + "\x05\x03\x01\x00\x02":                         2,
		head + "\x05\x04\x01\x01\x03\x09":                     3,
		head + "\x01\x01\x00\x05\x05\x01\x00\x80\x01":         0, // cut
		head + "\x01\x01\x00\x05\x04\x01\x00\x80\x01":         128,
		head + "\x05\x03\x01\x00":                             0,
		head + "\x05\x01\x00":                                 0, // none
		head + "\x05\xff\xff\xff\xff\xff\xff":                 0,
		head + "\x05\x07\x01\x00\xff\xff\xff\xff\xff\x01\x01": 0,
		head + "\x05": 0,
		head:          0,
		"":            0,
	} {
		got, ok := memoryPages([]byte(code))
		require.Equal(t, want, got, "%q", code)
		require.Equal(t, want > 0, ok, "%q", code)
	}
}

func FuzzMemoryPages(f *testing.F) {
	f.Add([]byte("\x00asm\x01\x00\x00\x00\x05\x03\x01\x00\x02"))
	f.Fuzz(func(t *testing.T, code []byte) { memoryPages(code) })
}
