package pairs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// loaders open rules apart from those that serve: a check borrows many instances, and one of
// a rule that serves may be waited for.
type loaders struct {
	// own is for this node's modules, which the start has compiled already, and other for
	// those of peers, whose code is not kept on the disk.
	own, other *plugins.Loader
	modules    map[digest][]byte // this node's
}

func newLoaders(here *bundle, compiledDir string, log *slog.Logger) *loaders {
	return &loaders{own: plugins.NewLoader(plugins.Options{CacheDir: compiledDir, Log: log}), other: plugins.NewLoader(plugins.Options{Log: log}), modules: here.modules}
}

func (l *loaders) close() error {
	return errors.Join(l.own.Close(context.Background()), l.other.Close(context.Background()))
}

// open opens the rules of a side.
func (l *loaders) open(ctx context.Context, b *bundle) (*registry.Entry, error) {
	next := 0
	e, err := registry.Open(ctx, b.deployment, func(ctx context.Context, _, ref string) (registry.Opened, error) {
		r := &b.rules[next] // rules are opened in the order of the list
		next++
		p, err := l.rule(ctx, b, r, ref)
		if err != nil {
			return registry.Opened{}, err
		}
		if p.Digest != r.Digest {
			return registry.Opened{}, fmt.Errorf("rule %s is now %s, and was %s", ref, p.Digest, r.Digest)
		}
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, nil
	})
	if err == nil && !bytes.Equal(e.RulesText(), b.rulesText) {
		err = fmt.Errorf("its rules are %s when they are opened here, and it says %s", e.RulesDigest(), textOf(b.rulesDigest()))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.name, err)
	}
	return e, nil
}

func (l *loaders) rule(ctx context.Context, b *bundle, r *registry.RuleID, ref string) (*plugins.Plugin, error) {
	id, err := digestOf(r.Digest)
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	if path, ok := b.programs[id]; ok {
		_, name, _ := plugins.ProgramOf(ref)
		if name != "" {
			name = "#" + name
		}
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
		return l.other.Open(ctx, "exec:"+path+name)
	}
	if m := l.modules[id]; m != nil {
		return l.own.OpenBytes(ctx, ref, short(id), m)
	}
	if m := b.modules[id]; m != nil {
		return l.other.OpenBytes(ctx, ref, short(id), m)
	}
	return nil, fmt.Errorf("rule %s, %s, is not to be had: its file is not what this node loaded", ref, r.Digest)
}

// judge judges this node's side against a peer's by relation pair.
func judge(ctx context.Context, here, there *bundle, compiledDir string, o registry.Options, log *slog.Logger) (v *registry.Verdict, err error) {
	l := newLoaders(here, compiledDir, log)
	defer func() {
		if c := l.close(); c != nil {
			log.Error("rules of a pair could not be closed", "error", c)
		}
	}()
	x, err := l.open(ctx, here)
	if err != nil {
		return nil, err
	}
	y, err := l.open(ctx, there)
	if err != nil {
		return nil, err
	}
	return registry.Against(ctx, x, y, o)
}

// A verdictDir keeps verdicts on pairs, the oldest out. What cannot be kept is judged again.
type verdictDir struct {
	dir string
	log *slog.Logger
}

// verdictForm changes when a kept verdict of before must not be used.
const verdictForm = "pair-1"

// keyOf names everything that a verdict on this node and a version depends on.
func keyOf(s *Shelf, seed uint64, v Version) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%d\n%s\n%x\n%x\n%x\n%d %d\n", verdictForm, s.checker, seed, s.own.deployment.Digest(), s.own.rulesDigest(), v.Deployment, v.Rules, v.MaxTokens, v.MaxStoreTokens)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// verdictsIn is the directory of the verdicts on pairs.
func verdictsIn(stateDir string) string { return filepath.Join(stateDir, "pairs") }

// load returns a kept verdict on a pair, or nil.
func (d *verdictDir) load(key string, s *Shelf, v Version) *registry.Verdict {
	b, err := readRegular(filepath.Join(d.dir, key+".json"), verdictBytesMax)
	if err != nil {
		return nil
	}
	var out registry.Verdict
	if json.Unmarshal(b, &out) != nil || out.Against == nil || len(out.Ways) == 0 || out.Verdict != registry.Accepted && out.Verdict != registry.Refused ||
		out.Checker != s.checker || out.DeploymentDigest != s.own.deployment.Digest() || out.RulesDigest != textOf(s.own.rulesDigest()) ||
		out.Against.DeploymentDigest != textOf(v.Deployment) || out.Against.RulesDigest != textOf(v.Rules) {
		return nil
	}
	for i := range out.Ways {
		if out.Ways[i].Undecided {
			return nil // the time may do today
		}
	}
	out.Reused = true
	return &out
}

// draw sees that the whole counterexample of a refusal is in a file, which somebody may have
// removed since the verdict was kept. It returns where that is, with an error, too.
func (d *verdictDir) draw(key string, v *registry.Verdict) (path string, err error) {
	path = filepath.Join(d.dir, key+".txt")
	if info, err := os.Lstat(path); v.Reused && err == nil && info.Mode().IsRegular() {
		return path, nil
	}
	if err = writeWhole(path, []byte(draw(v))); err == nil {
		d.prune(path)
	}
	return path, err
}

// save keeps a verdict that is decided.
func (d *verdictDir) save(key string, v *registry.Verdict) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err == nil {
		err = writeWhole(filepath.Join(d.dir, key+".json"), b)
	}
	if err != nil {
		d.log.Warn("a verdict on a pair could not be kept; it is judged again after a restart", "error", err)
		return
	}
	d.prune(filepath.Join(d.dir, key+".json"))
}

// prune bounds the files, one of which is new.
func (d *verdictDir) prune(but string) {
	prune(d.dir, but, func(n int, bytes int64) bool { return n <= 2*verdictsMax })
}

// draw writes a refusal for people.
func draw(v *registry.Verdict) string {
	var b strings.Builder
	side := func(name, deployment, rules string) {
		fmt.Fprintf(&b, "%s\n  deployment %s\n  rules      %s\n", name, deployment, rules)
	}
	here := v.Ways[0].Producer
	if here == v.Against.File {
		here = v.Ways[0].Consumer
	}
	side("here: "+here, v.DeploymentDigest, v.RulesDigest)
	side("there: "+v.Against.File, v.Against.DeploymentDigest, v.Against.RulesDigest)
	for i := range v.Ways {
		w := &v.Ways[i]
		fmt.Fprintf(&b, "\nproducer %s, consumer %s: %s\n", w.Producer, w.Consumer, w.Outcome())
		if w.Counterexample != nil {
			fmt.Fprintf(&b, "%s\n", w.Counterexample)
		}
	}
	return b.String()
}

// spent says why a check has no verdict.
func spent(ctx context.Context, within time.Duration, err error) error {
	if errors.Is(context.Cause(ctx), check.ErrBudget) {
		return always("the check was not done within deadlines.pair_check_ms, %v", within)
	}
	return always("%v", err)
}
