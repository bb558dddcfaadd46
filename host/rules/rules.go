// Package rules opens and registers a deployment the way the tierd binary does, for
// "tierd check" and "tierd serve" alike: references lead to plugins, compiled code and
// accepted verdicts are kept on disk, and the executable itself is the checker that a
// verdict names.
package rules

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

// DefaultSeed draws the cases of a check whose options give no seed, so that a CI and a
// node that judge the same deployment judge the same cases.
const DefaultSeed = 1

// Options of Register. The zero value keeps nothing on disk and draws with DefaultSeed.
type Options struct {
	// StateDir keeps accepted verdicts, and compiled modules beside them; empty = none.
	StateDir string
	Check    check.Options
	// Certificate is the path of a certificate that is accepted instead of a check, when one
	// of Keys has signed it and it is of the same deployment, rules, executable and seed;
	// empty = none. What is wrong with one is logged, and the check runs.
	Certificate string
	Keys        []ed25519.PublicKey
	// Log gets what rules that are programs print, and their failures; nil = nowhere.
	Log *slog.Logger
}

// A Registered deployment. Close it after the last use of its rules.
type Registered struct {
	*registry.Entry
	loader *plugins.Loader
}

// Close frees the plugins.
func (r *Registered) Close(ctx context.Context) error { return r.loader.Close(ctx) }

// Register opens the rules of a deployment and judges them, unless a verdict of the same
// rules, deployment and executable is kept or certified. A refusal is a *registry.Refusal; any other
// error means that there is no verdict.
func Register(ctx context.Context, d *deploy.Deployment, o Options) (*Registered, error) {
	if err := served(d); err != nil {
		return nil, err
	}
	ro, err := o.registry()
	if err != nil {
		return nil, err
	}
	if o.Certificate != "" {
		ro.Certified = o.certified
	}
	loader, open := o.opener(d)
	e, err := registry.Register(ctx, d, open, ro)
	if err != nil {
		if c := loader.Close(context.WithoutCancel(ctx)); c != nil {
			err = errors.Join(err, c)
		}
		var refusal *registry.Refusal
		if !errors.As(err, &refusal) {
			err = fmt.Errorf("%s: %w", d.File(), err)
		}
		return nil, err
	}
	return &Registered{e, loader}, nil
}

// registry returns the options of package registry.
func (o *Options) registry() (ro registry.Options, err error) {
	ro = registry.Options{Check: o.Check, Now: time.Now}
	if ro.Check.Seed == 0 {
		ro.Check.Seed = DefaultSeed
	}
	if o.StateDir != "" {
		ro.Verdicts = dirStore(filepath.Join(o.StateDir, "verdicts"))
	}
	ro.Checker, err = checker()
	return ro, err
}

// opener returns what opens the references of a deployment's file.
func (o *Options) opener(d *deploy.Deployment) (*plugins.Loader, registry.Opener) {
	po := plugins.Options{BaseDir: d.Dir(), Log: o.Log}
	if o.StateDir != "" {
		po.CacheDir = CompiledDir(o.StateDir)
	}
	loader := plugins.NewLoader(po)
	return loader, func(ctx context.Context, _, ref string) (registry.Opened, error) {
		p, err := loader.Open(ctx, ref)
		if err != nil {
			return registry.Opened{}, err
		}
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, nil
	}
}

// Against judges two deployments against each other by relation pair, as
// [registry.Against] does, and neither of them alone. Such a verdict is not kept.
func Against(ctx context.Context, a, b *deploy.Deployment, o Options) (v *registry.Verdict, err error) {
	ro, err := o.registry()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	var entries []*registry.Entry
	for _, d := range [...]*deploy.Deployment{a, b} {
		loader, open := o.opener(d)
		defer func() { err = errors.Join(err, loader.Close(context.WithoutCancel(ctx))) }()
		e, err := registry.Open(ctx, d, open)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.File(), err)
		}
		entries = append(entries, e)
	}
	loaded := time.Since(began)
	if v, err = registry.Against(ctx, entries[0], entries[1], ro); v != nil {
		v.LoadSeconds = loaded.Seconds()
	}
	return v, err
}

// checker returns the digest of the running executable.
var checker = sync.OnceValues(func() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", err
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
})

// CompiledDir is where a state directory keeps compiled modules.
func CompiledDir(stateDir string) string { return filepath.Join(stateDir, "compiled") }

// Checker returns the digest of the running executable, by which verdicts name who judged.
func Checker() (string, error) { return checker() }

// dirStore keeps one file a verdict.
type dirStore string

func (d dirStore) path(key string) string { return filepath.Join(string(d), key+".json") }

// verdictBytesMax bounds a kept verdict; one of 64 groups has some 50 KiB.
const verdictBytesMax = 1 << 20

// Load returns nil for whatever is no readable verdict: then it is not kept.
func (d dirStore) Load(key string) []byte {
	info, err := os.Lstat(d.path(key))
	if err != nil || !info.Mode().IsRegular() || info.Size() > verdictBytesMax { // opening a pipe would wait
		return nil
	}
	b, err := os.ReadFile(d.path(key))
	if err != nil {
		return nil
	}
	return b
}

// Save writes the file whole or not at all.
func (d dirStore) Save(key string, data []byte) error {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(string(d), key+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), d.path(key))
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
