// Package inspect says what a plugin is: its rules with their parameters, what it exports
// and imports, its size and digest, and the fuel that a call takes. Of a module that this
// host refuses it says what can be read without running it, and the refusal.
//
// # The sample call
//
// Fuel is counted for one round, so that rules can be compared with each other and with a
// budget: a prompt of 131,072 tokens in 8,192 chunks of one block, aligned to 4,096
// tokens, all of it stored, resumed at its last token. Parameters have their defaults; one
// that is required has 128, or the nearest value in its range, and of an enum the first
// name. The calls are reach, a scan in which every chunk is a hit, one in which every
// chunk is a miss, and for a spec the need; each is the second such call of its instance.
package inspect

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
	"github.com/tierd/tierd/specs/module"
)

// A Report is what is known of a plugin.
type Report struct {
	// Ref is what was asked for, Source where it lies: a path, or "shipped".
	Ref    string `json:"ref"`
	Source string `json:"source"`
	Digest string `json:"digest"`
	Bytes  int64  `json:"bytes"`
	// Refused says why this host takes the plugin for none; what follows may be missing.
	Refused string `json:"refused,omitempty"`
	// ABI is the version of the contract that the plugin speaks, from its marker.
	ABI string `json:"abi,omitempty"`
	// MemoryPages, of 64 KiB, that an instance begins with; MemoryPagesMax that it may
	// have.
	MemoryPages    uint64 `json:"memory_pages,omitempty"`
	MemoryPagesMax uint64 `json:"memory_pages_max,omitempty"`
	// Rules, or the one that the reference names.
	Rules []Rule `json:"rules"`
	// Exports and Imports are functions with their types. A subprocess has none.
	Exports []string `json:"exports,omitempty"`
	Imports []string `json:"imports,omitempty"`
}

// A Rule is one rule of a plugin.
type Rule struct {
	Manifest *abi.Manifest `json:"manifest"`
	// Sample holds the sample calls; it is missing where fuel is not counted.
	Sample *Sample `json:"sample,omitempty"`
}

// Options of Read. The zero value keeps no compiled code.
type Options struct {
	// CacheDir keeps compiled modules, as plugins.Options.CacheDir.
	CacheDir string
}

// Read inspects a reference: a shipped rule, a module, ./file.wasm or ./file.wasm#name, or
// exec:./path. Relative paths start at the working directory. The error is one of reading;
// a plugin that is refused is a Report.
func Read(ctx context.Context, ref string, o Options) (*Report, error) {
	path, name, _ := strings.Cut(ref, "#")
	if exec, ok := strings.CutPrefix(path, "exec:"); ok {
		return readProcess(ctx, ref, exec, o)
	}
	if path == "" {
		return nil, errors.New("the name is empty; give a plugin, as in: tierd inspect rule.wasm")
	}
	if !strings.ContainsAny(path, "/.") {
		code, err := module.Wasm()
		if err != nil {
			return nil, err
		}
		return readModule(ctx, &Report{Ref: ref, Source: plugins.Shipped, Rules: []Rule{}}, code, ref, o)
	}
	code, err := readFile(path)
	if err != nil {
		return nil, err
	}
	r := &Report{Ref: ref, Source: path, Rules: []Rule{}}
	if len(code) > wasm.ModuleBytesMax { // the rest of it was not read
		return r.tooLong()
	}
	return readModule(ctx, r, code, name, o)
}

// readFile reads a file no further than a module may be long, and one byte.
func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
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
	return io.ReadAll(io.LimitReader(f, wasm.ModuleBytesMax+1))
}

// tooLong refuses a file of which only the beginning was read.
func (r *Report) tooLong() (*Report, error) {
	info, err := os.Stat(r.Source)
	if err != nil {
		return nil, err
	}
	r.Bytes = info.Size()
	r.Refused = fmt.Sprintf("a module has at most %d bytes: build without debug information and without what you do not need", wasm.ModuleBytesMax)
	return r, nil
}

func readModule(ctx context.Context, r *Report, code []byte, name string, o Options) (*Report, error) {
	sum := sha256.Sum256(code)
	r.Digest, r.Bytes = "sha256:"+hex.EncodeToString(sum[:]), int64(len(code))
	m, err := wasm.Load(ctx, r.Source, code, wasm.Options{CacheDir: o.CacheDir})
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		r.Refused = err.Error()
		if imports, exports, err := wasm.Describe(code); err == nil {
			r.sections(imports, exports, code)
		}
		return r, nil
	}
	defer m.Close(context.WithoutCancel(ctx))
	r.sections(m.Imports(), m.Exports(), code)
	names := []string{}
	for _, s := range m.Specs() {
		names = append(names, s.Manifest().Name)
	}
	if name != "" && !slices.Contains(names, name) {
		return nil, fmt.Errorf("%s: no rule %q there%s it holds: %s", r.Source, name, strictyaml.DidYouMean(name, names), strings.Join(names, ", "))
	}
	for _, s := range m.Specs() {
		if name == "" || s.Manifest().Name == name {
			r.Rules = append(r.Rules, Rule{s.Manifest(), sampleOf(s)})
		}
	}
	return r, nil
}

const marker = "kv_abi_"

// sections takes over what the sections of a module say.
func (r *Report) sections(imports, exports []wasm.Signature, code []byte) {
	var versions []string
	for _, s := range exports {
		r.Exports = append(r.Exports, s.String())
		if v, ok := strings.CutPrefix(s.Name, marker); ok {
			versions = append(versions, v)
		}
	}
	for _, s := range imports {
		r.Imports = append(r.Imports, s.String())
	}
	slices.Sort(r.Exports)
	slices.Sort(r.Imports)
	r.Imports = slices.Compact(r.Imports) // a module may import a function twice
	r.ABI = strings.Join(versions, ", ")
	if pages, ok := memoryPages(code); ok {
		r.MemoryPages, r.MemoryPagesMax = pages, wasm.MemoryPagesMax
	}
}

// memoryPages returns the least size of a module's own memory. It believes nothing: what
// is no module has no pages.
func memoryPages(code []byte) (pages uint64, ok bool) {
	const memorySection = 5
	for at := uint64(8); at < uint64(len(code)); {
		id := code[at]
		size, n := uleb(code[at+1:])
		at += 1 + n
		if n == 0 || size > uint64(len(code))-at {
			return 0, false
		}
		if id == memorySection {
			body := code[at : at+size]
			count, n := uleb(body)
			if n == 0 || count == 0 || uint64(len(body)) < n+2 {
				return 0, false
			}
			pages, n = uleb(body[n+1:]) // behind the flags
			return pages, n > 0
		}
		at += size
	}
	return 0, false
}

// uleb reads an unsigned LEB128 number of at most 32 bits and returns its length; 0 when
// there is none.
func uleb(b []byte) (v, n uint64) {
	for i := 0; i < min(len(b), 5); i++ {
		v |= uint64(b[i]&0x7f) << (7 * i)
		if b[i] < 0x80 {
			return v, uint64(i + 1)
		}
	}
	return 0, 0
}

// readProcess inspects a subprocess: the executable, and what it says of itself.
func readProcess(ctx context.Context, ref, path string, o Options) (*Report, error) {
	r := &Report{Ref: ref, Source: path, Rules: []Rule{}}
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", path))
	}
	h := sha256.New()
	if r.Bytes, err = io.Copy(h, f); err != nil {
		return nil, err
	}
	r.Digest = "sha256:" + hex.EncodeToString(h.Sum(nil))
	l := plugins.NewLoader(plugins.Options{CacheDir: o.CacheDir})
	defer l.Close(context.WithoutCancel(ctx))
	_, all, err := l.OpenAll(ctx, ref)
	switch {
	case errors.Is(err, plugins.ErrUnsupported) || ctx.Err() != nil:
		return nil, err
	case err != nil:
		r.Refused = err.Error()
		return r, nil
	}
	for _, p := range all {
		r.Digest = p.Digest // of the bytes that were started
		r.Rules = append(r.Rules, Rule{p.Spec.Manifest(), sampleOf(p.Spec)})
	}
	return r, nil
}
