package host_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const modulePath = "github.com/tierd/tierd"

// topLevel is all that may stand at the top of the repository, besides hidden files
// and what make builds.
var topLevel = []string{
	"abi", "specs", "registry", "plugins", "gpu", "host", "examples",
	"go.mod", "go.sum", "Makefile", "README.md", "RATIONALE.md", "LICENSE",
	"bin",
}

// mayImport says, for a directory and everything below it, which directories of this
// module it may import besides itself. The longest directory that matches counts.
var mayImport = map[string][]string{
	"abi":             {},
	"specs":           {"abi"},
	"registry/plan":   {"abi"},
	"registry/deploy": {"abi"},
	"registry/check":  {"abi", "registry/plan", "registry/deploy"},
	"registry":        {"abi", "registry/plan", "registry/check", "registry/deploy"},
	// A stock engine's rules are judged in its verdict's form, and its groups' parameters are
	// those of the rules that ship: nothing of either is opened from a plugin.
	"registry/stock": {"abi", "specs", "registry"},
	// What is derived from a model's configuration is a deployment, and no more.
	"registry/hfconfig": {"registry/deploy"},
	"plugins":           {"abi", "specs"},
	"gpu":               {},
	"host":              {"abi", "specs", "registry", "plugins", "gpu"},
	"examples":          {"abi"},
}

// stdlibOnly are directories that import nothing from other modules; grpcToo are those
// below them that are the subprocess ABI, which no other code below them imports.
var (
	stdlibOnly = []string{"abi", "specs", "registry/plan", "registry/check", "registry/hfconfig", "examples"}
	grpcToo    = []string{"abi/kvpb", "abi/serve"}
)

// pure are directories without clock, randomness or goroutines of their own; impure are
// directories below them that do what the pure ones are spared: the session's streams,
// and the program that builds the embedded module.
var (
	pure   = []string{"abi", "specs", "registry", "host/join", "host/session", "host/sim"}
	impure = []string{"host/session/wire", "specs/module/build"}
)

// clock is what asks package time what time it is, or to wait.
var clock = []string{"Now", "Since", "Until", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker", "Sleep"}

type goFile struct {
	dir     string // slash-separated, from the root
	path    string
	imports []string
	syntax  *ast.File
}

func root(t *testing.T) string {
	wd, err := os.Getwd()
	require.NoError(t, err)
	return filepath.Dir(wd)
}

// sources parses every Go file that is no test and was not generated.
func sources(t *testing.T) (files []goFile) {
	base := root(t)
	err := filepath.WalkDir(base, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && p != base && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(base, p)
		if err != nil {
			return err
		}
		g := goFile{dir: path.Dir(filepath.ToSlash(rel)), path: filepath.ToSlash(rel), syntax: f}
		for _, s := range f.Imports {
			v, err := strconv.Unquote(s.Path.Value)
			if err != nil {
				return err
			}
			g.imports = append(g.imports, v)
		}
		files = append(files, g)
		return nil
	})
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files
}

// within reports whether dir is one of the listed directories or below one.
func within(dir string, list []string) bool {
	return slices.ContainsFunc(list, func(d string) bool { return dir == d || strings.HasPrefix(dir, d+"/") })
}

// owner returns the longest key of mayImport that dir is in.
func owner(dir string) (best string) {
	for d := range mayImport {
		if within(dir, []string{d}) && len(d) > len(best) {
			best = d
		}
	}
	return best
}

func TestImportRules(t *testing.T) {
	for _, f := range sources(t) {
		own := owner(f.dir)
		if own == "" {
			t.Errorf("%s is in no directory of the layout", f.path)
			continue
		}
		for _, imp := range f.imports {
			first, _, _ := strings.Cut(imp, "/")
			switch dir, ours := strings.CutPrefix(imp, modulePath+"/"); {
			case imp == "C" && own == "gpu":
			case ours:
				if owner(dir) != own && !within(dir, mayImport[own]) {
					t.Errorf("%s imports %s; %s may import only %v of this module", f.path, dir, own, mayImport[own])
				}
				if own == "abi" && within(dir, grpcToo) && !within(f.dir, grpcToo) {
					t.Errorf("%s imports %s; a rule that is a module must not carry gRPC", f.path, dir)
				}
			case strings.Contains(first, ".") && within(f.dir, stdlibOnly) && !within(f.dir, grpcToo):
				t.Errorf("%s imports %s; %s imports only the standard library and abi", f.path, imp, own)
			}
		}
	}
}

// The pure packages give the same answer whenever and wherever they run.
func TestPurePackages(t *testing.T) {
	for _, f := range sources(t) {
		if !within(f.dir, pure) || within(f.dir, impure) {
			continue
		}
		for _, imp := range f.imports {
			// The conformance test draws from a generator with a fixed seed.
			seeded := imp == "math/rand/v2" && f.dir == "abi/abitest"
			if strings.HasPrefix(imp, "math/rand") && !seeded || imp == "crypto/rand" {
				t.Errorf("%s imports %s; it must not depend on randomness", f.path, imp)
			}
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				if !within(f.dir, []string{"registry/check"}) {
					t.Errorf("%s starts a goroutine; only registry/check may, to spread its cases over cores", f.path)
				}
			case *ast.SelectorExpr:
				pkg, ok := n.X.(*ast.Ident)
				if !ok {
					return true
				}
				if pkg.Name == "time" && slices.Contains(clock, n.Sel.Name) {
					t.Errorf("%s uses time.%s; time is given to it by its caller", f.path, n.Sel.Name)
				}
				// The functions of math/rand/v2 that use the shared, unseeded source.
				if pkg.Name == "rand" && n.Sel.Name != "New" && n.Sel.Name != "NewPCG" && ast.IsExported(n.Sel.Name) && n.Sel.Name != "Rand" {
					t.Errorf("%s uses rand.%s; draw from a generator with a fixed seed", f.path, n.Sel.Name)
				}
			}
			return true
		})
	}
}

func TestTopLevelIsTheDesigns(t *testing.T) {
	entries, err := os.ReadDir(root(t))
	require.NoError(t, err)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(topLevel, e.Name()) {
			t.Errorf("%s stands at the top level; the layout has only %v", e.Name(), topLevel)
		}
	}
}

// Each example with its own go.mod is one that make test visits.
func TestExampleModulesAreInTheMakefile(t *testing.T) {
	base := root(t)
	makefile, err := os.ReadFile(filepath.Join(base, "Makefile"))
	require.NoError(t, err)
	mods, err := filepath.Glob(filepath.Join(base, "examples", "*", "go.mod"))
	require.NoError(t, err)
	require.NotEmpty(t, mods)
	for _, m := range mods {
		dir, err := filepath.Rel(base, filepath.Dir(m))
		require.NoError(t, err)
		require.Contains(t, strings.Fields(string(makefile)), filepath.ToSlash(dir))
	}
}
