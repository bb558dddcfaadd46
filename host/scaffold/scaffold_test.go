package scaffold

import (
	"context"
	"encoding/json"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/specs"
)

var rewrite = flag.Bool("rewrite", false, "write the examples, and the answers of the cases, again")

const examples = "../../examples"

// tree returns the files below a directory, without what is built there.
func tree(t *testing.T, dir string) map[string]string {
	files := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		switch name, _ := filepath.Rel(dir, p); {
		case err != nil:
			return err
		case d.IsDir() && (name == "node_modules" || name == "target"):
			return filepath.SkipDir
		case d.IsDir() || name == "rule.wasm":
		default:
			b, err := os.ReadFile(p)
			files[name] = string(b)
			return err
		}
		return nil
	}))
	return files
}

// The examples are what Write writes, byte for byte.
func TestExamplesAreWhatIsWritten(t *testing.T) {
	for _, lang := range Languages() {
		t.Run(lang, func(t *testing.T) {
			example := filepath.Join(examples, "window-"+lang)
			if *rewrite {
				for name := range tree(t, example) {
					require.NoError(t, os.Remove(filepath.Join(example, name)))
				}
				_, err := Write(example, Options{Name: exampleName, Lang: lang, Tierd: "../.."})
				require.NoError(t, err)
			}
			dir := filepath.Join(t.TempDir(), "new")
			files, err := Write(dir, Options{Name: exampleName, Lang: lang, Tierd: "../.."})
			require.NoError(t, err)
			written := tree(t, dir)
			require.Len(t, files, len(written))
			require.Equal(t, tree(t, example), written, "change the templates, then run go test ./host/scaffold -rewrite")
		})
	}
}

// Another name stands everywhere, and nothing of the example's is left.
func TestOtherName(t *testing.T) {
	for _, lang := range Languages() {
		dir := t.TempDir()
		_, err := Write(dir, Options{Name: "0_x-9", Lang: lang})
		require.NoError(t, err)
		named := 0
		for name, text := range tree(t, dir) {
			require.NotContains(t, text, exampleName, name)
			if strings.Contains(text, "0_x-9") {
				named++
			}
		}
		require.Equal(t, 3, named, "the source, the deployment and the cases of %s have the name", lang)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	long := strings.Repeat("a", 65)
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Name: "", Lang: "c"}, `rule name "": 1 to 64 of a-z, 0-9, - and _ are allowed`},
		{Options{Name: "My rule", Lang: "c"}, `rule name "My rule": 1 to 64 of a-z, 0-9, - and _ are allowed`},
		{Options{Name: "../x", Lang: "go"}, `rule name "../x": 1 to 64 of a-z, 0-9, - and _ are allowed`},
		{Options{Name: long, Lang: "go"}, `rule name "` + long + `": 1 to 64 of a-z, 0-9, - and _ are allowed`},
		{Options{Name: "x", Lang: "java"}, `rule x: language "java" is not known; choose one of go, c, rust, as`},
		{Options{Name: "x"}, `rule x: language "" is not known; choose one of go, c, rust, as`},
	} {
		files, err := Write(dir, c.o)
		require.EqualError(t, err, c.want)
		require.Empty(t, files)
	}
	require.Empty(t, tree(t, dir))

	mine := filepath.Join(dir, "rule.c")
	require.NoError(t, os.WriteFile(mine, []byte("mine"), 0o600))
	_, err := Write(dir, Options{Name: "x", Lang: "c"})
	require.EqualError(t, err, "rule x: "+mine+" is there already, and is not replaced; choose another directory, or move it away")
	require.Equal(t, map[string]string{"rule.c": "mine"}, tree(t, dir), "nothing else is written")

	// What goes wrong half way leaves nothing behind.
	blocked := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(blocked, "src"), nil, 0o600))
	_, err = Write(blocked, Options{Name: "x", Lang: "rust"})
	require.ErrorContains(t, err, filepath.Join(blocked, "src"))
	require.Equal(t, map[string]string{"src": ""}, tree(t, blocked))
}

func TestGoMod(t *testing.T) {
	b, err := templates.ReadFile("templates/go/go.mod.tmpl")
	require.NoError(t, err)
	template := string(b)
	require.Contains(t, template, modReplace)
	head := "module example.com/rule\n\ngo 1.26.0\n\nrequire github.com/tierd/tierd "
	for _, c := range []struct{ checkout, version, want string }{
		{"", "v1.2.3", "v1.2.3\n"},
		{"../..", "v1.2.3", "v0.0.0\n\nreplace github.com/tierd/tierd => ../..\n"},
		{"/src/tierd", "", "v0.0.0\n\nreplace github.com/tierd/tierd => /src/tierd\n"},
		{"tierd", "", "v0.0.0\n\nreplace github.com/tierd/tierd => ./tierd\n"},
		{"/my src/tierd", "", "v0.0.0\n\nreplace github.com/tierd/tierd => \"/my src/tierd\"\n"},
	} {
		require.Equal(t, head+c.want, goMod(template, c.checkout, c.version))
	}
	require.Equal(t, modVersion, version(), "a test is no published build")
	for _, c := range []struct {
		version, sum string
		want         bool
	}{
		{"(devel)", "", false},
		{"v1.2.3", "", true},
		{"v1.2.3+dirty", "", false},
		{"v0.0.0-20261130131054-d0f02f791c10", "", false},
		{"v0.0.0-20261130131054-d0f02f791c10", "h1:x", true},
		{"v1.2.4-0.20261130131054-d0f02f791c10", "", false},
		{"v1.2.4-rc.1", "", true},
	} {
		require.Equal(t, c.want, published(debug.Module{Version: c.version, Sum: c.sum}), c.version)
	}
}

// A question is one line of cases.jsonl.
type question struct {
	Rule   string            `json:"rule"`
	Params map[string]uint64 `json:"params"`
	Op     string            `json:"op"`
	Round  struct {
		Block    uint64 `json:"block_tokens"`
		Chunk    uint64 `json:"chunk_tokens"`
		Prompt   uint64 `json:"prompt_tokens"`
		Stored   uint64 `json:"stored_tokens"`
		Resume   uint64 `json:"resume_tokens"`
		Align    uint64 `json:"align_tokens"`
		Junction uint64 `json:"junction_tokens"`
		Local    uint64 `json:"local_tokens"`
		Bound    uint64 `json:"bound_tokens"`
		Lo       uint32 `json:"lo"`
		Hi       uint32 `json:"hi"`
	} `json:"round"`
	States string `json:"states"`
}

// answer asks a rule and returns the line that tierd eval prints, without the fuel.
func (q *question) answer(t *testing.T, rule abi.SpecRule) string {
	r := abi.Round{
		BlockTokens: q.Round.Block, ChunkTokens: q.Round.Chunk, PromptTokens: q.Round.Prompt, StoredTokens: q.Round.Stored,
		ResumeTokens: q.Round.Resume, AlignTokens: q.Round.Align, JunctionTokens: q.Round.Junction,
		LocalTokens: q.Round.Local, BoundTokens: q.Round.Bound, Lo: q.Round.Lo, Hi: q.Round.Hi,
	}
	require.NoError(t, r.Validate())
	set := abi.NewBitmap(int(r.Hi))
	var a struct {
		Set      [][2]uint32 `json:"set"`
		Usable   *uint32     `json:"usable,omitempty"`
		Deferred *bool       `json:"deferred,omitempty"`
	}
	switch q.Op {
	case "reach":
		require.NoError(t, rule.Reach(r, set))
	case "need":
		require.NoError(t, rule.Need(r, set))
	case "scan":
		require.Len(t, q.States, r.Chunks())
		states := abi.NewStates(r.Chunks())
		for i, letter := range q.States {
			states.Put(i, abi.State(strings.IndexRune("MHPR", letter)))
		}
		span, err := rule.Scan(r, states, set)
		require.NoError(t, err)
		a.Usable, a.Deferred = &span.Usable, &span.Deferred
	default:
		require.Fail(t, q.Op)
	}
	a.Set = [][2]uint32{}
	for i := set.Next(0); i >= 0; {
		j := set.NextUnset(i, int(r.Hi))
		a.Set = append(a.Set, [2]uint32{r.Lo + uint32(i), r.Lo + uint32(j-1)})
		i = set.Next(j)
	}
	b, err := json.Marshal(a)
	require.NoError(t, err)
	return string(b) + "\n"
}

// The answers of the cases, which make test compares, are those of the native rule, and
// every guest gives them.
func TestCases(t *testing.T) {
	const base = "templates/common/"
	b, err := os.ReadFile(base + "cases.jsonl")
	require.NoError(t, err)
	answers := func(open func(window uint64) abi.Rule) (out string) {
		for line := range strings.Lines(string(b)) {
			var q question
			d := json.NewDecoder(strings.NewReader(line))
			d.DisallowUnknownFields()
			require.NoError(t, d.Decode(&q))
			require.Equal(t, "./rule.wasm#"+exampleName, q.Rule)
			out += q.answer(t, open(q.Params["window"]).(abi.SpecRule))
		}
		return out
	}
	native := answers(func(window uint64) abi.Rule {
		r, err := specs.Window().Open([]uint64{window, 0})
		require.NoError(t, err)
		return r
	})
	if *rewrite {
		require.NoError(t, os.WriteFile(base+"cases.want", []byte(native), 0o644))
	}
	want, err := os.ReadFile(base + "cases.want")
	require.NoError(t, err)
	require.Equal(t, native, string(want), "run go test ./host/scaffold -rewrite")

	for _, lang := range Languages() {
		t.Run(lang, func(t *testing.T) {
			file := filepath.Join("../../.build/guests", "window-"+lang+".wasm")
			if _, err := os.Stat(file); err != nil {
				if os.Getenv("TIERD_GUESTS") == "required" {
					t.Fatalf("%v: run make guests", err)
				}
				t.Skip(file + " is not built: run make guests")
			}
			loader := plugins.NewLoader(plugins.Options{BaseDir: ".", CacheDir: "../../.build/compiled"})
			defer loader.Close(context.Background())
			p, err := loader.Open(context.Background(), "./"+file+"#"+exampleName)
			require.NoError(t, err)
			require.Equal(t, native, answers(func(window uint64) abi.Rule {
				r, err := p.Spec.Open([]uint64{window})
				require.NoError(t, err)
				return r
			}))
		})
	}
}
