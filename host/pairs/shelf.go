package pairs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs/module"
)

// A digest is a SHA-256. In text it is "sha256:" and hex.
type digest = [sha256.Size]byte

func digestOf(text string) (d digest, err error) {
	b, err := hex.DecodeString(strings.TrimPrefix(text, "sha256:"))
	if err != nil || len(b) != len(d) {
		return d, fmt.Errorf("digest %.80q is not of the form sha256:hex", text)
	}
	return digest(b), nil
}

func textOf(d digest) string { return "sha256:" + hex.EncodeToString(d[:]) }

// short is enough of a digest to tell two apart.
func short(d digest) string { return "sha256:" + hex.EncodeToString(d[:6]) }

// A Shelf is what a node's own deployment is made of, by digest: it is given out to peers,
// and it is this node's side of every check.
type Shelf struct {
	own     *bundle
	bytes   map[digest][]byte
	missing map[digest]string // why bytes of the deployment cannot be given out
	checker string
}

// NewShelf takes what a registered deployment is made of. Modules are read again where they
// came from, and one that has changed since is not given out: what serves is the one before.
// checker is the executable that judges, as verdicts name it.
func NewShelf(e *registry.Entry, checker string) *Shelf {
	d := e.Deployment
	s := &Shelf{own: &bundle{name: d.File(), deployment: d, rules: e.Rules(), modules: map[digest][]byte{}, programs: map[digest]string{}},
		bytes: map[digest][]byte{}, missing: map[digest]string{}, checker: checker}
	for _, doc := range [][]byte{d.Canonical(), e.RulesText()} {
		s.bytes[sha256.Sum256(doc)] = doc
	}
	s.own.rulesText = e.RulesText()
	for i := range s.own.rules {
		r := &s.own.rules[i]
		id, err := digestOf(r.Digest)
		if err != nil {
			continue // a rule that no plugin serves; only tests have them
		}
		if _, _, program := plugins.ProgramOf(r.Ref); program {
			s.own.programs[id] = r.Source
			s.missing[id] = fmt.Sprintf("rule %s is a program, and programs are not given out", r.Name)
			continue
		}
		b, err := moduleOf(r)
		switch {
		case err != nil:
			s.missing[id] = fmt.Sprintf("the module of rule %s cannot be read: %v", r.Name, err)
		case sha256.Sum256(b) != id:
			s.missing[id] = fmt.Sprintf("the file of rule %s has changed since this node started", r.Name)
		default:
			s.bytes[id], s.own.modules[id] = b, b
		}
	}
	return s
}

func moduleOf(r *registry.RuleID) ([]byte, error) {
	if r.Source == plugins.Shipped {
		return module.Wasm()
	}
	return config.ReadAtMost(r.Source, moduleBytesMax)
}

// Give returns bytes of this node's deployment, or why it does not have them.
func (s *Shelf) Give(id [sha256.Size]byte) (data []byte, refused string) {
	if b, ok := s.bytes[id]; ok {
		return b, ""
	}
	if why, ok := s.missing[id]; ok {
		return nil, why
	}
	return nil, short(id) + " is not part of this node's deployment"
}

// A bundle is what one side of a pair is made of.
type bundle struct {
	name       string // of the side, in verdicts
	deployment *deploy.Deployment
	rules      []registry.RuleID // of groups, then of policies
	rulesText  []byte            // the list that their digest is of
	modules    map[digest][]byte
	programs   map[digest]string // paths on this machine
}

// rulesDigest names the rules and their parameters together.
func (b *bundle) rulesDigest() digest { return sha256.Sum256(b.rulesText) }

// refs are the references of the deployment, in the order of the rules.
func refs(d *deploy.Deployment) (refs, places []string) {
	for i := range d.Groups {
		refs, places = append(refs, d.Groups[i].Rule), append(places, d.Groups[i].Name)
	}
	for _, p := range d.Policies {
		refs, places = append(refs, p.Rule), append(places, "policy")
	}
	return refs, places
}
