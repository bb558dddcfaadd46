// Package plugins opens rules by the references that a deployment file uses:
//
//	window                  a rule that ships with tierd, from the embedded module
//	./file.wasm#name        a rule of a WebAssembly module, relative to Options.BaseDir
//	./file.wasm             the same, when the module holds one rule only
//	exec:./path#name        a rule of a program that runs as a subprocess
//	exec:./path             the same, when the program serves one rule only
//	oci:ref@digest#name     an OCI artifact; this build does not open it yet
//
// cross and encoder are refused by name: no KV of theirs belongs to a prefix.
//
// Every reference ends in an abi.Spec and the digest of the bytes that serve it: of the
// module, or of the program's file. What the rule does is not judged here: that is the
// registry's work.
//
// A module cannot do more than answer. A program is native code that runs with the rights
// of this process, and is fenced in against mistakes only: see package proc.
package plugins

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/proc"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/specs/module"
)

// Shipped is the Source of a rule of the embedded module.
const Shipped = "shipped"

// ErrUnsupported is wrapped by the error for a kind of reference that this build does
// not open.
var ErrUnsupported = errors.New("not supported by this build")

// ErrNotPrefixCacheable is wrapped by the error for the names of two kinds of attention for
// which there can be no rule.
var ErrNotPrefixCacheable = errors.New("not prefix-cacheable")

// notCacheable are their names.
var notCacheable = map[string]bool{"cross": true, "encoder": true}

// Options says where references point and how modules run. The zero value resolves
// paths against the working directory and keeps no compiled code.
type Options struct {
	// BaseDir is what a relative path is relative to: the directory of the deployment
	// file.
	BaseDir string
	// CacheDir and PoolMax are those of wasm.Options.
	CacheDir string
	PoolMax  int
	// Log gets what programs print, and their failures; nil means nowhere.
	Log *slog.Logger
}

// A Plugin is an opened reference.
type Plugin struct {
	// Spec is the rule before its parameters are chosen.
	Spec abi.Spec
	// Digest is "sha256:" and the digest of the module's or the program's bytes.
	Digest string
	// Source says where the bytes came from: Shipped, or the path of a file.
	Source string

	close func(context.Context) error
}

// Close frees what Open took. A Plugin of a Loader is freed with the loader, and its
// Close does nothing.
func (p *Plugin) Close(ctx context.Context) error {
	if p.close == nil {
		return nil
	}
	return p.close(ctx)
}

// Open opens one reference. Use a Loader for several: it loads each module once.
func Open(ctx context.Context, ref string, o Options) (*Plugin, error) {
	l := NewLoader(o)
	p, err := l.Open(ctx, ref)
	if err != nil {
		return nil, errors.Join(err, l.Close(context.WithoutCancel(ctx)))
	}
	p.close = l.Close
	return p, nil
}

// A Loader opens the references of one deployment. References to the same bytes share
// one module, whatever path they came by; references to the same path share one program.
// It is safe for concurrent use.
type Loader struct {
	options Options

	mu       sync.Mutex
	modules  map[[sha256.Size]byte]*wasm.Module // by the digest of their bytes
	programs map[string]*proc.Program           // by path
}

// NewLoader returns a loader that has loaded nothing yet.
func NewLoader(o Options) *Loader {
	return &Loader{options: o, modules: map[[sha256.Size]byte]*wasm.Module{}, programs: map[string]*proc.Program{}}
}

// Close closes every module and ends every program. The rules that came from them must no longer be used.
func (l *Loader) Close(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for key, m := range l.modules {
		if err := m.Close(ctx); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(l.modules, key)
	}
	for path, p := range l.programs {
		if err := p.Close(ctx); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(l.programs, path)
	}
	return errors.Join(errs...)
}

// Open opens one reference.
func (l *Loader) Open(ctx context.Context, ref string) (*Plugin, error) {
	if strings.HasPrefix(ref, "oci:") {
		return nil, fmt.Errorf("rule %s: references that start with oci: are %w; give a shipped name, ./file.wasm#name or exec:./path#name", ref, ErrUnsupported)
	}
	if program, ok := strings.CutPrefix(ref, "exec:"); ok {
		return l.openProgram(ctx, ref, program)
	}
	path, name, named := strings.Cut(ref, "#")
	switch {
	case path == "":
		return nil, fmt.Errorf("rule %q: empty; give a shipped name or ./file.wasm#name", ref)
	case named && name == "":
		return nil, fmt.Errorf("rule %q: no name follows #; give %s#name, or leave out # where there is one rule", ref, path)
	case isPath(path):
		return l.openFile(ctx, ref, path, name)
	case strings.ContainsAny(path, "/\\.") || named:
		return nil, fmt.Errorf("rule %s: not a shipped name; a path starts with ./, ../ or /, as in ./file.wasm#name", ref)
	}
	return l.openShipped(ctx, ref)
}

func isPath(s string) bool {
	return strings.HasPrefix(s, "./") || strings.HasPrefix(s, "../") || filepath.IsAbs(s)
}

func (l *Loader) openShipped(ctx context.Context, name string) (*Plugin, error) {
	bytes, err := module.Wasm()
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", name, err)
	}
	m, err := l.load(ctx, Shipped, bytes)
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", name, err)
	}
	for _, s := range m.Specs() {
		if s.Manifest().Name == name {
			return &Plugin{Spec: s, Digest: m.Digest(), Source: Shipped}, nil
		}
	}
	if notCacheable[name] {
		return nil, fmt.Errorf("rule %s: %w: what such a layer keeps belongs to the whole input of an encoder, not to a prefix of the text; "+
			"leave the group out, or compute it again", name, ErrNotPrefixCacheable)
	}
	names := ruleNames(m.Specs())
	return nil, fmt.Errorf("rule %s: no shipped rule has this name; %sShipped: %s", name, didYouMean(name, names), strings.Join(names, ", "))
}

func (l *Loader) openFile(ctx context.Context, ref, path, name string) (*Plugin, error) {
	if !filepath.IsAbs(path) {
		path = filepath.Join(l.options.BaseDir, path)
	}
	bytes, err := readModule(path)
	if errors.Is(err, fs.ErrNotExist) && l.options.BaseDir == "" {
		err = missingError{path, "module", "the working directory"}
	}
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	m, err := l.load(ctx, path, bytes)
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	spec, err := choose(m.Specs(), name, "module")
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	return &Plugin{Spec: spec, Digest: m.Digest(), Source: path}, nil
}

func (l *Loader) openProgram(ctx context.Context, ref, program string) (*Plugin, error) {
	path, name, named := strings.Cut(program, "#")
	switch {
	case path == "":
		return nil, fmt.Errorf("rule %q: empty; give exec:./path#name", ref)
	case named && name == "":
		return nil, fmt.Errorf("rule %q: no name follows #; give exec:%s#name, or leave out # where there is one rule", ref, path)
	case !isPath(path):
		return nil, fmt.Errorf("rule %s: the path after exec: starts with ./, ../ or /, as in exec:./path#name", ref)
	case !filepath.IsAbs(path):
		path = filepath.Join(l.options.BaseDir, path)
	}
	p, err := l.run(ctx, path)
	if err != nil && l.options.BaseDir == "" {
		if _, missing := os.Stat(path); errors.Is(missing, fs.ErrNotExist) {
			err = missingError{path, "program", "the working directory"}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	spec, err := choose(p.Specs(), name, "program")
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	return &Plugin{Spec: spec, Digest: p.Digest(), Source: path}, nil
}

// choose returns the spec of a name, or the only one when there is no name.
func choose(specs []abi.Spec, name, what string) (abi.Spec, error) {
	names := ruleNames(specs)
	switch i := slices.Index(names, name); {
	case i >= 0:
		return specs[i], nil
	case name != "":
		return nil, fmt.Errorf("the %s holds no rule %s; %sIt holds: %s", what, name, didYouMean(name, names), strings.Join(names, ", "))
	case len(specs) > 1:
		return nil, &AmbiguousError{what, names}
	}
	return specs[0], nil
}

// A missingError is the path of a module or a program that is not there, and what it is
// relative to. It is an fs.ErrNotExist.
type missingError struct{ path, what, base string }

func (e missingError) Error() string {
	return fmt.Sprintf("there is no file %s; build the %s first, or correct the path, which is relative to %s", e.path, e.what, e.base)
}

func (missingError) Unwrap() error { return fs.ErrNotExist }

// readModule reads a file no further than a module may be long.
func readModule(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missingError{path, "module", "the deployment file"}
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // opening a pipe would wait for its writer
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, wasm.ModuleBytesMax+1)) // one more is what wasm.Load refuses
}

func (l *Loader) load(ctx context.Context, source string, bytes []byte) (*wasm.Module, error) {
	key := sha256.Sum256(bytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := l.modules[key]; m != nil {
		return m, nil
	}
	m, err := wasm.Load(ctx, source, bytes, wasm.Options{CacheDir: l.options.CacheDir, PoolMax: l.options.PoolMax})
	if err != nil {
		return nil, err
	}
	l.modules[key] = m
	return m, nil
}

// run starts a program, or returns the one that runs.
func (l *Loader) run(ctx context.Context, path string) (*proc.Program, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.programs[path]; p != nil {
		return p, nil
	}
	p, err := proc.Load(ctx, path, proc.Options{Log: l.options.Log})
	if err != nil {
		return nil, err
	}
	l.programs[path] = p
	return p, nil
}

func ruleNames(specs []abi.Spec) []string {
	var names []string
	for _, s := range specs {
		names = append(names, s.Manifest().Name)
	}
	return names
}

// didYouMean asks for the nearest name, when at most half of the letters are wrong.
func didYouMean(name string, names []string) string {
	best := nearest(name, names)
	if best == "" || edits(name, best) > max(1, len(name)/2) {
		return ""
	}
	return "did you mean " + best + "? "
}

// nearest returns the name that is the fewest edits away, the first of equals.
func nearest(name string, names []string) string {
	best, fewest := "", -1
	for _, n := range names {
		if d := edits(name, n); fewest < 0 || d < fewest {
			best, fewest = n, d
		}
	}
	return best
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := diagonal
			if a[i-1] != b[j-1] {
				change++
			}
			diagonal = row[j]
			row[j] = min(change, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
