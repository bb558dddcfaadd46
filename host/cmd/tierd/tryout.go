package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/tierd/tierd/host/tryout"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry"
)

// pluginRef returns the reference that a command line's argument is, when it leads to a
// plugin and not to another file: an exec: reference, or a WebAssembly module by its name
// or its first bytes. ./ in front of a path may be left out.
func pluginRef(arg string) (ref string, ok bool) {
	if strings.HasPrefix(arg, "exec:") {
		return arg, true
	}
	path, _, _ := strings.Cut(arg, "#")
	if filepath.Ext(path) != ".wasm" && !startsAsWasm(path) {
		return "", false
	}
	if filepath.IsAbs(path) || strings.HasPrefix(path, "./") || strings.HasPrefix(path, "../") {
		return arg, true
	}
	return "./" + arg, true
}

func startsAsWasm(path string) bool {
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() { // opening a pipe would wait
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [4]byte
	_, err = io.ReadFull(f, head[:])
	return err == nil && string(head[:]) == "\x00asm"
}

// tryArgs are the flags of tierd check for a plugin.
type tryArgs struct {
	state, twin string
	legs        []string
	against     string // of a deployment: the other version
	seed        uint64
	asJSON      bool
	// budgetSeconds is the most that a deployment's check may take; 0 = no limit.
	budgetSeconds float64
}

// checkPlugin judges the rules of a plugin and says what was found.
func checkPlugin(cmd *cobra.Command, ref string, a *checkArgs) error {
	results, err := tryPlugin(cmd.Context(), ref, a.tryArgs, cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	text, err := rendered(func(w io.Writer) error { return printResults(w, results, a.asJSON) })
	if err != nil {
		return err
	}
	return a.evidence.deliver(cmd, ruleFindings(results), text)
}

// tryPlugin judges the rules of a plugin. The error is one of opening or reading.
func tryPlugin(ctx context.Context, ref string, a tryArgs, progress io.Writer) (results []*tryout.Result, err error) {
	for _, leg := range a.legs {
		if !slices.Contains([]string{"pd", "probe"}, leg) {
			return nil, fmt.Errorf("--legs has %q; known: pd, demand, probe", leg)
		}
	}
	cache, err := cacheIn(a.state)
	if err != nil {
		return nil, err
	}
	loader := plugins.NewLoader(plugins.Options{CacheDir: cache})
	defer func() { err = errors.Join(err, loader.Close(context.WithoutCancel(ctx))) }()
	refs, opened, err := loader.OpenAll(ctx, ref)
	if err != nil {
		return nil, err
	}
	o := tryout.Options{Seed: a.seed, Legs: a.legs, TwinRef: a.twin}
	if a.twin != "" {
		if len(refs) > 1 {
			return nil, fmt.Errorf("--twin compares one rule, and %s holds %d; add #name, as in %s", ref, len(refs), refs[0])
		}
		twin := a.twin
		if r, ok := pluginRef(twin); ok {
			twin = r
		}
		p, err := loader.Open(ctx, twin)
		if err != nil {
			return nil, err
		}
		o.Twin = p.Spec
	}
	open := func(ctx context.Context, _, ref string) (registry.Opened, error) {
		p, err := loader.Open(ctx, ref)
		if err != nil {
			return registry.Opened{}, err
		}
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, nil
	}
	update, done := progressTo(progress)
	results = []*tryout.Result{}
	for i, p := range opened {
		o.Progress = func(d, total int) { update(i*total+d, len(opened)*total) }
		r, err := tryout.Try(ctx, tryout.Subject{Ref: refs[i], Spec: p.Spec, Digest: p.Digest}, open, o)
		if err != nil {
			done()
			return nil, err
		}
		results = append(results, r)
	}
	done()
	return results, nil
}

func printResults(w io.Writer, results []*tryout.Result, asJSON bool) error {
	var b bytes.Buffer
	if asJSON {
		enc := json.NewEncoder(&b)
		enc.SetIndent("", "  ")
		err := enc.Encode(struct {
			Verdict string           `json:"verdict"`
			Rules   []*tryout.Result `json:"rules"`
		}{tryout.Overall(results), results})
		if err != nil {
			return err
		}
	}
	counts := map[string]int{}
	for i, r := range results {
		counts[r.Verdict]++
		if asJSON {
			continue
		}
		if i > 0 {
			b.WriteByte('\n')
		}
		if err := r.WriteText(&b); err != nil {
			return err
		}
	}
	if len(results) > 1 && !asJSON {
		fmt.Fprintf(&b, "\n%d rules: %d accepted, %d refused, %d undecided\n", len(results),
			counts[registry.Accepted], counts[registry.Refused], counts[tryout.Undecided])
	}
	_, err := b.WriteTo(w)
	return err
}
