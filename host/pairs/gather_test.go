package pairs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/plugins/zoo"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

const testFile = `
model: tiny
max_tokens: 100
align_tokens: 64
groups:
  - {name: sliding, rule: window, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: bf16}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: bf16}
policies: [{rule: request-level}]
`

// sideOf is a node of the test by its deployment: its shelf is what serves.
func sideOf(t *testing.T, dir, yaml string) *Shelf {
	t.Helper()
	d, err := deploy.Parse(filepath.Join(dir, "deployment.yaml"), []byte(yaml))
	require.NoError(t, err)
	l := plugins.NewLoader(plugins.Options{BaseDir: dir, CacheDir: cacheDir})
	e, err := registry.Open(t.Context(), d, func(ctx context.Context, _, ref string) (registry.Opened, error) {
		p, err := l.Open(ctx, ref)
		if err != nil {
			return registry.Opened{}, err
		}
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, nil
	})
	require.NoError(t, err)
	defer l.Close(context.Background())
	return NewShelf(e, "sha256:checker")
}

// changed is side with a change: what is new, or what is old and what is new.
func changed(t *testing.T, dir string, change ...string) *Shelf {
	t.Helper()
	if len(change) == 1 {
		change = []string{"window: 20", change[0]}
	}
	require.Contains(t, testFile, change[0])
	return sideOf(t, dir, strings.Replace(testFile, change[0], change[1], 1))
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

var cacheDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-pairs-test-")
	if err != nil {
		panic(err)
	}
	cacheDir = dir
	if len(os.Args) == 2 && os.Args[1] == judgeArg {
		if err := Serve(os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		os.Exit(0)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func (s *Shelf) version() Version {
	d := s.own.deployment
	return Version{Rules: s.own.rulesDigest(), Deployment: sha256.Sum256(d.Canonical()), MaxTokens: d.MaxTokens, MaxStoreTokens: d.MaxStoreTokens}
}

// A wireOf is a peer whose shelf is asked, and how often.
type wireOf struct {
	*Shelf
	asked map[digest]int
	spoil func(id digest, b []byte) ([]byte, error)
}

func (w *wireOf) fetch(_ context.Context, _ string, id digest, bytesMax int) ([]byte, error) {
	w.asked[id]++
	b, refused := w.Give(id)
	if refused != "" {
		return nil, fmt.Errorf("%w: %s", wire.ErrNotGiven, refused)
	}
	if w.spoil != nil {
		return w.spoil(id, b)
	}
	if len(b) > bytesMax {
		return nil, wire.ErrTooLong
	}
	return b, nil
}

func newGatherer(t *testing.T, here, there *Shelf) (*gatherer, *wireOf) {
	w := &wireOf{Shelf: there, asked: map[digest]int{}}
	return &gatherer{shelf: here, fetch: w.fetch, cache: &moduleCache{dir: filepath.Join(t.TempDir(), "fetched"), bytesMax: cacheBytesMax, log: discard()}}, w
}

// otherModule is a module with one rule, t, which is full attention. It is small, so that it
// is compiled at once.
func otherModule(t *testing.T, dir string) (path string, id digest) {
	code := zoo.Good()
	path = filepath.Join(dir, "mine.wasm")
	require.NoError(t, os.WriteFile(path, code, 0o600))
	return path, sha256.Sum256(code)
}

// TestGatherAndJudge: what a peer runs by is brought from it by digest, a module that is
// here already is not, and the pair is judged with what serves there.
func TestGatherAndJudge(t *testing.T) {
	dir := t.TempDir()
	path, id := otherModule(t, dir)
	here := sideOf(t, dir, testFile)
	judgeOf := func(g *gatherer, there *Shelf) *registry.Verdict {
		b, err := g.gather(t.Context(), "p", there.version())
		require.NoError(t, err)
		v, err := judge(t.Context(), here.own, b, cacheDir, registry.Options{Checker: here.checker, Check: check.Options{Seed: 1, Workers: 1}}, discard())
		require.NoError(t, err)
		require.Equal(t, textOf(there.own.rulesDigest()), v.Against.RulesDigest)
		return v
	}
	there := sideOf(t, dir, strings.Replace(testFile, "window: 20", "window: 40", 1))
	g, w := newGatherer(t, here, there)
	v := judgeOf(g, there)
	require.Equal(t, registry.Refused, v.Verdict)
	require.Len(t, w.asked, 2, "the deployment and the list of rules")
	j := New(Options{Shelf: here, StateDir: t.TempDir()})
	defer j.Close()
	f := j.findingOf(there.version(), v)
	require.True(t, f.Take, "what is stored for the wider window serves the narrower one")
	require.False(t, f.Give)
	require.Contains(t, f.Why, "refused with this node as the producer: prompts of 32 tokens, group sliding: the consumer demands chunks that the producer, of another version, never supplies")
	drawn, err := os.ReadFile(f.File)
	require.NoError(t, err)
	require.Contains(t, string(drawn), "here: "+here.own.name)
	require.Contains(t, string(drawn), v.Counterexample.String())

	there = sideOf(t, dir, strings.Replace(testFile, "rule: full", "rule: ./mine.wasm#t", 1))
	g, w = newGatherer(t, here, there)
	require.Equal(t, registry.Accepted, judgeOf(g, there).Verdict)
	require.Equal(t, 1, w.asked[id])
	again := func(why string) {
		t.Helper()
		b, err := g.gather(t.Context(), "p", there.version())
		require.NoError(t, err)
		require.Equal(t, id, digest(sha256.Sum256(b.modules[id])))
		require.Equal(t, 1, w.asked[id], why)
	}
	again("it was kept")
	g.cache.dir = t.TempDir()
	g.local = newLocalDir(dir)
	again("it is in the operator's directory")
	require.Equal(t, dir, filepath.Dir(path))
}

// TestUnavailable: what is not to be had, or is not what it should be, is a reason and no
// verdict; only the way to the peer is a reason to ask it again.
func TestUnavailable(t *testing.T) {
	dir := t.TempDir()
	_, id := otherModule(t, dir)
	here := sideOf(t, dir, testFile)
	there := sideOf(t, dir, strings.Replace(testFile, "rule: full", "rule: ./mine.wasm#t", 1))
	program := func(v *Version, w *wireOf) {
		d := *there.own.deployment
		d.Groups = append([]deploy.Group{}, d.Groups...)
		d.Groups[1].Rule = "exec:./rm#t"
		doc := d.Canonical()
		w.bytes[sha256.Sum256(doc)] = doc
		v.Deployment = sha256.Sum256(doc)
	}
	for name, c := range map[string]struct {
		change       func(v *Version, w *wireOf)
		why          string
		passing, all bool
	}{
		"wrong bytes": {func(_ *Version, w *wireOf) {
			w.spoil = func(got digest, b []byte) ([]byte, error) {
				if got == id {
					b = bytes.Clone(b)
					b[9] ^= 1
				}
				return b, nil
			}
		}, "its module of rule t, " + short(id) + ", is not to be had: wrong bytes", false, false},
		"too long": {func(_ *Version, w *wireOf) {
			w.spoil = func(got digest, b []byte) ([]byte, error) {
				if got == id {
					return nil, fmt.Errorf("%w: 9999999 bytes; at most 8388608 are taken", wire.ErrTooLong)
				}
				return b, nil
			}
		}, "too long: 9999999 bytes; at most 8388608 are taken", false, false},
		"the session ends": {func(_ *Version, w *wireOf) {
			w.spoil = func(digest, []byte) ([]byte, error) { return nil, errors.New("session closed") }
		}, "session closed", true, false},
		"not given": {func(v *Version, w *wireOf) { v.Deployment = digest{1} }, "not given out: sha256:010000000000 is not part of this node's deployment", false, false},
		"caps":      {func(v *Version, w *wireOf) { v.MaxTokens = 7 }, "its hello says max_tokens 7 and max_store_tokens 0, and its deployment 100 and 0", false, false},
		"no deployment": {func(v *Version, w *wireOf) {
			w.bytes[digest(sha256.Sum256([]byte("{}")))] = []byte("{}")
			v.Deployment = sha256.Sum256([]byte("{}"))
		}, "model is missing; give the model a name; is it a newer version of tierd?", false, true},
		"another list": {func(v *Version, w *wireOf) {
			doc := []byte("sliding\x00window\x001\x00sha256:00\x00[1]\n")
			w.bytes[sha256.Sum256(doc)] = doc
			v.Rules = sha256.Sum256(doc)
		}, "its deployment names 3 rules, and its list has 1", false, true},
		"a program": {program, "rule exec:./rm#t of full is a program, " + textOf(id) + ", and none is fetched from a peer or run because one names it: put that file into peer_rules and send SIGHUP; it is not in peer_rules, which is not set (a restart sets it)", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			fresh := *there
			fresh.bytes = map[digest][]byte{}
			for k, b := range there.bytes {
				fresh.bytes[k] = b
			}
			g, w := newGatherer(t, here, &fresh)
			v := there.version()
			c.change(&v, w)
			_, err := g.gather(t.Context(), "p", v)
			var u *unavailable
			require.ErrorAs(t, err, &u)
			require.Contains(t, u.why, c.why)
			require.Equal(t, c.passing, u.passing)
			require.Equal(t, c.all, u.all)
			require.Nil(t, g.cache.get(id), "nothing is kept that is not whole")
		})
	}
	// The file of a program is found by its digest; nothing of the peer's path is used.
	g, w := newGatherer(t, here, there)
	v := there.version()
	program(&v, w)
	g.local = newLocalDir(dir)
	b, err := g.gather(t.Context(), "p", v)
	require.NoError(t, err)
	require.Equal(t, map[digest]string{id: filepath.Join(dir, "mine.wasm")}, b.programs)
	require.Zero(t, w.asked[id])
}

// TestShelf gives out what the deployment is made of, and nothing else.
func TestShelf(t *testing.T) {
	dir := t.TempDir()
	path, id := otherModule(t, dir)
	yaml := strings.Replace(testFile, "rule: full", "rule: ./mine.wasm#t", 1)
	s := sideOf(t, dir, yaml)
	for _, known := range []digest{id, s.own.rulesDigest(), s.version().Deployment} {
		b, refused := s.Give(known)
		require.Empty(t, refused)
		require.Equal(t, known, digest(sha256.Sum256(b)))
	}
	_, refused := s.Give(digest{7})
	require.Equal(t, "sha256:070000000000 is not part of this node's deployment", refused)

	d, err := deploy.Parse(filepath.Join(dir, "deployment.yaml"), []byte(yaml))
	require.NoError(t, err)
	l := plugins.NewLoader(plugins.Options{BaseDir: dir, CacheDir: cacheDir})
	defer l.Close(context.Background())
	e, err := registry.Open(t.Context(), d, func(ctx context.Context, _, ref string) (registry.Opened, error) {
		p, err := l.Open(ctx, ref)
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, err
	})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, []byte("other"), 0o600))
	_, refused = NewShelf(e, "c").Give(id)
	require.Equal(t, "the file of rule t has changed since this node started", refused)
}

// TestModuleCache: the bytes that are kept are bounded, the least recently used go, and a
// file that is not what its name says is no module.
func TestModuleCache(t *testing.T) {
	c := &moduleCache{dir: filepath.Join(t.TempDir(), "fetched"), bytesMax: 250, log: discard()}
	put := func(n byte) digest {
		b := bytes.Repeat([]byte{n}, 100)
		id := digest(sha256.Sum256(b))
		c.put(id, b)
		old := time.Now().Add(time.Duration(n) * time.Second)
		require.NoError(t, os.Chtimes(c.path(id), old, old))
		return id
	}
	one, two := put(1), put(2)
	require.NotNil(t, c.get(one))
	future := time.Now().Add(time.Minute)
	require.NoError(t, os.Chtimes(c.path(one), future, future)) // as if it was used last
	three := put(3)
	require.Nil(t, c.get(two))
	require.NotNil(t, c.get(one))
	require.NotNil(t, c.get(three))
	require.NoError(t, os.WriteFile(c.path(one), []byte("other"), 0o600))
	require.Nil(t, c.get(one))
	require.NoFileExists(t, c.path(one))
	require.Nil(t, c.get(digest{}))
	files, err := os.ReadDir(c.dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
}

// TestVerdictDir: a verdict is kept for the two versions and the executable, and for
// nothing else; the oldest go.
func TestVerdictDir(t *testing.T) {
	dir := t.TempDir()
	here := sideOf(t, dir, testFile)
	d := &verdictDir{dir: filepath.Join(dir, "pairs"), log: discard()}
	of := func(v Version) *registry.Verdict {
		return &registry.Verdict{Verdict: registry.Accepted, Checker: here.checker, DeploymentDigest: here.own.deployment.Digest(), RulesDigest: textOf(here.own.rulesDigest()),
			Ways: []check.Way{{Producer: "a", Consumer: "b"}}, Against: &registry.Side{File: "b", DeploymentDigest: textOf(v.Deployment), RulesDigest: textOf(v.Rules)}}
	}
	keep := func(v Version, out *registry.Verdict) *registry.Verdict {
		d.save(keyOf(here, 1, v), out)
		return d.load(keyOf(here, 1, v), here, v)
	}
	v := version(1)
	require.True(t, keep(v, of(v)).Reused)
	other := v
	other.MaxStoreTokens++
	require.Nil(t, d.load(keyOf(here, 1, other), here, other))
	require.Nil(t, d.load(keyOf(here, 2, v), here, v))
	require.Nil(t, d.load(keyOf(here, 1, v), here, version(2)), "the file is of another version")
	for name, change := range map[string]func(*registry.Verdict){
		"checker":   func(x *registry.Verdict) { x.Checker = "c" },
		"undecided": func(x *registry.Verdict) { x.Verdict = registry.Undecided },
		"half":      func(x *registry.Verdict) { x.Ways[0].Undecided = true },
		"here":      func(x *registry.Verdict) { x.RulesDigest = "r" },
	} {
		x := of(v)
		change(x)
		require.Nil(t, keep(v, x), name)
	}
	refused := of(v)
	refused.Verdict, refused.Counterexample = registry.Refused, &check.Counterexample{Relation: "pair", Why: "so"}
	refused.Ways[0].Counterexample = refused.Counterexample
	kept := keep(v, refused)
	require.Equal(t, registry.Refused, kept.Verdict)
	drawn := func(v *registry.Verdict, is string) {
		path, err := d.draw(keyOf(here, 1, version(1)), v)
		require.NoError(t, err)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Contains(t, string(text), is)
	}
	const drawing = "producer a, consumer b: REFUSED"
	drawn(kept, drawing) // nobody had drawn it yet
	path, err := d.draw(keyOf(here, 1, v), refused)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, []byte("as it was"), 0o600))
	drawn(kept, "as it was")
	drawn(refused, drawing)
	require.NoError(t, os.Remove(path))
	drawn(kept, drawing) // somebody had made room
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Mkdir(path, 0o700))
	_, err = d.draw(keyOf(here, 1, v), kept)
	require.EqualError(t, cause(err), "file exists", "without the name of the file on its way")
	require.NoError(t, os.Remove(path))
	for n := range byte(3 * versionsMax) {
		x := version(n)
		require.NotNil(t, keep(x, of(x)))
	}
	files, err := os.ReadDir(d.dir)
	require.NoError(t, err)
	require.Len(t, files, 2*verdictsMax)
}
