package pairs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// A Version is what a peer's hello says that it runs by.
type Version struct {
	Rules, Deployment         [sha256.Size]byte
	MaxTokens, MaxStoreTokens uint64
}

// An unavailable says why a peer's side of a pair cannot be judged.
type unavailable struct {
	why string
	// passing: the way to the peer failed, and its next session may have a better one.
	passing bool
	// all: another peer of the same version would have the same to say.
	all bool
}

func (u *unavailable) Error() string { return u.why }

func always(format string, args ...any) error {
	return &unavailable{why: fmt.Sprintf(format, args...), all: true}
}

// A gatherer brings together what a peer runs by.
type gatherer struct {
	shelf *Shelf
	local *localDir
	cache *moduleCache
	// fetch brings bytes from a peer, as wire.Peers.Fetch does.
	fetch func(ctx context.Context, peer string, id [sha256.Size]byte, bytesMax int) ([]byte, error)
}

// gather returns the side of a version, or an *unavailable.
func (g *gatherer) gather(ctx context.Context, peer string, v Version) (*bundle, error) {
	doc, err := g.take(ctx, peer, v.Deployment, "deployment", deploymentBytesMax)
	if err != nil {
		return nil, err
	}
	b := &bundle{name: "deployment " + short(v.Deployment), modules: map[digest][]byte{}, programs: map[digest]string{}}
	if b.deployment, err = deploy.ParseCanonical(b.name, doc); err != nil {
		return nil, always("%v; is it a newer version of tierd?", err)
	}
	if err := fits(b.deployment, v); err != nil {
		return nil, err
	}
	if doc, err = g.take(ctx, peer, v.Rules, "list of rules", rulesBytesMax); err != nil {
		return nil, err
	}
	if b.rules, err = registry.ParseRulesText(doc); err != nil {
		return nil, always("%v", err)
	}
	b.rulesText = doc
	return b, g.takeRules(ctx, peer, b)
}

// fits holds a deployment against what the hello said of it.
func fits(d *deploy.Deployment, v Version) error {
	switch {
	case d.MaxTokens != v.MaxTokens || d.MaxStoreTokens != v.MaxStoreTokens:
		return &unavailable{why: fmt.Sprintf("its hello says max_tokens %d and max_store_tokens %d, and its deployment %d and %d", v.MaxTokens, v.MaxStoreTokens, d.MaxTokens, d.MaxStoreTokens)}
	case d.IsStock():
		return always("its deployment's engine is %s, which no daemon serves", d.Engine)
	}
	return nil
}

// takeRules takes the modules and finds the programs of a side.
func (g *gatherer) takeRules(ctx context.Context, peer string, b *bundle) error {
	refs, places := refs(b.deployment)
	if len(refs) != len(b.rules) {
		return always("its deployment names %d rules, and its list has %d", len(refs), len(b.rules))
	}
	for i := range b.rules {
		r := &b.rules[i]
		id, err := digestOf(r.Digest)
		if err != nil || r.For != places[i] {
			return always("line %d of its list of rules is not that of rule %s of %s", i+1, refs[i], places[i])
		}
		r.Ref = refs[i]
		if _, _, program := plugins.ProgramOf(r.Ref); program {
			if b.programs[id], err = g.program(ctx, r, id); err != nil {
				return err
			}
			continue
		}
		if b.modules[id] != nil {
			continue
		}
		if len(b.modules) == modulesMax {
			return always("it has more than %d modules, the most that are judged", modulesMax)
		}
		if b.modules[id], err = g.module(ctx, peer, r, id); err != nil {
			return err
		}
	}
	return nil
}

// program returns the path of a program that the operator has placed here.
func (g *gatherer) program(ctx context.Context, r *registry.RuleID, id digest) (string, error) {
	if path, ok := g.shelf.own.programs[id]; ok {
		return path, nil
	}
	path, err := g.local.find(ctx, id)
	if ctx.Err() != nil {
		return "", &unavailable{why: fmt.Sprintf("rule %s is looked for in %s: %v", r.Ref, g.local, context.Cause(ctx)), passing: true}
	}
	if err == nil && path == "" {
		err = fmt.Errorf("it is not in %s", g.local)
	}
	if err != nil {
		return "", always("rule %s of %s is a program, %s, and none is fetched from a peer or run because one names it: put that file into peer_rules and send SIGHUP; %v", r.Ref, r.For, textOf(id), err)
	}
	return path, nil
}

// module returns the bytes of a module from the nearest place.
func (g *gatherer) module(ctx context.Context, peer string, r *registry.RuleID, id digest) ([]byte, error) {
	if b := g.shelf.own.modules[id]; b != nil {
		return b, nil
	}
	if b := g.local.read(ctx, id); b != nil {
		return b, nil
	}
	if b := g.cache.get(id); b != nil {
		return b, nil
	}
	b, err := g.take(ctx, peer, id, fmt.Sprintf("module of rule %s", r.Name), moduleBytesMax)
	if err == nil {
		g.cache.put(id, b)
	}
	return b, err
}

// take fetches bytes that a peer must have.
func (g *gatherer) take(ctx context.Context, peer string, id digest, what string, bytesMax int) ([]byte, error) {
	if b, ok := g.shelf.bytes[id]; ok {
		return b, nil
	}
	b, err := g.fetch(ctx, peer, id, bytesMax)
	if err == nil && sha256.Sum256(b) != id {
		err = wire.ErrWrongBytes
	}
	if err == nil {
		return b, nil
	}
	u := &unavailable{why: fmt.Sprintf("its %s, %s, is not to be had: %v", what, short(id), err)}
	u.passing = !errors.Is(err, wire.ErrNotGiven) && !errors.Is(err, wire.ErrTooLong) && !errors.Is(err, wire.ErrWrongBytes)
	return nil, u
}
