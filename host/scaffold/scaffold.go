// Package scaffold writes the directory of a new rule: a whole one, for sliding-window
// attention, to be turned into another. It is what "tierd new rule" does.
//
// In every language the directory builds itself (make), tries itself (make test) and is
// judged (make check), here and in the workflow file for its author's CI. The C, Rust and
// AssemblyScript ones bring a copy of their SDK, the only other file that the rule needs;
// a Go one requires the module of tierd.
//
// The examples window-go, window-c, window-rust and window-as are what Write writes for the
// name my-window. To change them, change the templates and run
//
//	go test ./host/scaffold -rewrite
package scaffold

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/guest/as"
	"github.com/tierd/tierd/abi/guest/c"
	"github.com/tierd/tierd/abi/guest/rust"
)

// Options of Write.
type Options struct {
	// Name of the rule, as its manifest has it: lower-case letters, digits, - and _.
	Name string
	// Lang is one of Languages.
	Lang string
	// Tierd is the directory of a checkout of tierd, absolute or relative to the new
	// directory, which a Go rule is then built against. Empty means the published module
	// of this program's version. Other languages do not use it.
	Tierd string
}

// The templates are the files for the name exampleName. A suffix keeps Go's tools from
// taking them for packages of this module.
const (
	exampleName    = "my-window"
	templateSuffix = ".tmpl"
)

//go:embed all:templates
var templates embed.FS

// languages in the order in which they are offered. sdk is where the copy of an SDK lies.
var languages = []struct{ name, sdk, source string }{
	{name: "go"},
	{"c", "kv.h", c.Header},
	{"rust", "src/kv.rs", rust.Source},
	{"as", "kv.ts", as.Source},
}

// Languages returns what Options.Lang may be: go, c, rust, as (AssemblyScript).
func Languages() []string {
	var names []string
	for _, l := range languages {
		names = append(names, l.name)
	}
	return names
}

// Write writes the files of a new rule into dir, which is made when it is missing, and
// returns their paths, each of which begins with dir. It replaces no file: when one of them
// is there already it writes none.
func Write(dir string, o Options) (files []string, err error) {
	content, err := render(o)
	if err != nil {
		return nil, err
	}
	var names []string
	for name := range content {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		to := filepath.Join(dir, filepath.FromSlash(name))
		if _, err := os.Lstat(to); err == nil {
			return nil, fmt.Errorf("rule %s: %s is there already, and is not replaced; choose another directory, or move it away", o.Name, to)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("rule %s: %w", o.Name, err)
		}
	}
	for _, name := range names {
		to := filepath.Join(dir, filepath.FromSlash(name))
		if err := create(to, content[name]); err != nil {
			for _, f := range files { // half a rule is of no use
				os.Remove(f)
			}
			return nil, fmt.Errorf("rule %s: %w", o.Name, err)
		}
		files = append(files, to)
	}
	return files, nil
}

// create writes a file that is not there yet.
func create(name, content string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(name)
	}
	return err
}

// render returns the content of each file by its slash-separated name.
func render(o Options) (map[string]string, error) {
	if err := (&abi.Manifest{Name: o.Name, Version: "1", Kind: abi.KindPolicy}).Validate(); err != nil {
		return nil, err
	}
	i := slices.Index(Languages(), o.Lang)
	if i < 0 {
		return nil, fmt.Errorf("rule %s: language %q is not known; choose one of %s", o.Name, o.Lang, strings.Join(Languages(), ", "))
	}
	content := map[string]string{}
	for _, from := range []string{"common", o.Lang} {
		base := path.Join("templates", from)
		err := fs.WalkDir(templates, base, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := templates.ReadFile(p)
			name := strings.TrimSuffix(strings.TrimPrefix(p, base+"/"), templateSuffix)
			content[name] = strings.ReplaceAll(string(b), exampleName, o.Name)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if l := languages[i]; l.sdk != "" {
		content[l.sdk] = l.source
	}
	if mod, ok := content["go.mod"]; ok {
		content["go.mod"] = goMod(mod, o.Tierd, version())
	}
	return content, nil
}

// What the template of go.mod says of tierd.
const (
	modVersion = "v0.0.0"
	modReplace = "\nreplace github.com/tierd/tierd => ../..\n"
)

// goMod has the template lead to a checkout, or to the published module of a version.
func goMod(template, checkout, version string) string {
	if checkout == "" {
		return strings.Replace(strings.Replace(template, modReplace, "", 1), modVersion, version, 1)
	}
	checkout = filepath.ToSlash(checkout)
	if !path.IsAbs(checkout) && !filepath.IsAbs(checkout) && !strings.HasPrefix(checkout, "./") && !strings.HasPrefix(checkout, "../") {
		checkout = "./" + checkout // else it would be a module's path
	}
	if strings.ContainsAny(checkout, " \t\"'`(),;[]{}") {
		checkout = strconv.Quote(checkout)
	}
	return strings.Replace(template, modReplace, strings.Replace(modReplace, "../..", checkout, 1), 1)
}

// version returns the version of this program's module that can be downloaded, or v0.0.0
// where there is none: then go.mod must get a replace line.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || !published(info.Main) {
		return modVersion
	}
	return info.Main.Version
}

// Published reports whether this program is of a version that can be downloaded, so that a
// Go rule can be built against it without a checkout.
func Published() bool { return version() != modVersion }

var pseudoVersion = regexp.MustCompile(`[-.]\d{14}-[0-9a-f]{12}$`)

// published reports whether a main module's version can be downloaded. One that was
// downloaded has a sum; a build in a checkout has none, and its pseudo-version may be of a
// commit that only this checkout has.
func published(m debug.Module) bool {
	if !strings.HasPrefix(m.Version, "v") || strings.Contains(m.Version, "+") {
		return false
	}
	return m.Sum != "" || !pseudoVersion.MatchString(m.Version)
}
