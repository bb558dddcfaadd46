package evidence

import (
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// Types of a certificate's statement.
const (
	StatementType = "https://in-toto.io/Statement/v1"
	PredicateType = "https://github.com/tierd/tierd/check/v1"
)

// A Statement is an in-toto statement, version 1: what it is about, and what it says.
type Statement struct {
	Type          string    `json:"_type"`
	Subject       []Subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     Predicate `json:"predicate"`
}

// A Subject is a subject: the deployment, or the rule of a group or policy.
type Subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

// A Predicate is what an accepted verdict says, without what differs from run to run.
type Predicate struct {
	Verdict          string            `json:"verdict"`
	Model            string            `json:"model"`
	Engine           string            `json:"engine"`
	DeploymentDigest string            `json:"deploymentDigest"`
	RulesDigest      string            `json:"rulesDigest"`
	Rules            []registry.RuleID `json:"rules"`
	Checker          Checker           `json:"checker"`
	// Seed of the drawn cases.
	Seed       uint64            `json:"seed"`
	Domain     check.Domain      `json:"domain"`
	DomainText []string          `json:"domainText"`
	Cases      uint64            `json:"cases"`
	Relations  map[string]uint64 `json:"relations"`
	// UnverifiedNeed names the rules whose Need was taken on trust.
	UnverifiedNeed []string `json:"unverifiedNeed,omitempty"`
}

// A Checker is the program that judged.
type Checker struct {
	Version string `json:"version"`
	// Digest of the executable. It differs from build to build and from platform to
	// platform: the check is code, and only the same code would have said the same.
	Digest string `json:"digest"`
}

// Certify returns a signed certificate of an accepted verdict of one deployment. version
// is that of the program that judged.
func Certify(v *registry.Verdict, version string, key ed25519.PrivateKey) ([]byte, error) {
	switch {
	case v.Against != nil:
		return nil, errors.New("the verdict is that of a pair of deployments; a certificate is of one: check the deployment by itself")
	case v.Verdict != registry.Accepted:
		return nil, fmt.Errorf("the verdict is %s; only an accepted deployment has a certificate", v.Verdict)
	}
	p := Predicate{
		Verdict: v.Verdict, Model: v.Model, Engine: v.Engine, DeploymentDigest: v.DeploymentDigest, RulesDigest: v.RulesDigest,
		Rules: v.Rules, Checker: Checker{version, v.Checker}, Seed: v.Domain.Seed, Domain: v.Domain, DomainText: v.DomainText,
		Cases: v.Cases, Relations: v.Relations, UnverifiedNeed: v.UnverifiedNeed,
	}
	s := Statement{Type: StatementType, PredicateType: PredicateType, Predicate: p, Subject: p.subjects()}
	if err := s.check(); err != nil {
		return nil, err
	}
	payload, err := json.Marshal(&s)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	data, err := seal(payload, key)
	if err == nil && len(data) >= CertificateBytesMax {
		err = fmt.Errorf("certificate has %d bytes; at most %d are read", len(data), CertificateBytesMax)
	}
	return append(data, '\n'), err
}

// subjects of a predicate: the deployment, then the rules in its order.
func (p *Predicate) subjects() []Subject {
	of := func(name, digest string) Subject {
		algorithm, sum, _ := strings.Cut(digest, ":")
		return Subject{name, map[string]string{algorithm: sum}}
	}
	out := []Subject{of("deployment "+p.Model, p.DeploymentDigest)}
	policies := 0
	for i := range p.Rules {
		ru := &p.Rules[i]
		name := fmt.Sprintf("group %s: %s", ru.For, ru.Name)
		if ru.For == "policy" { // several have that name
			name = fmt.Sprintf("policies[%d]: %s", policies, ru.Name)
			policies++
		}
		out = append(out, of(name, ru.Digest))
	}
	return out
}

// check reports what a statement that is a certificate cannot be.
func (s *Statement) check() error {
	p := &s.Predicate
	switch {
	case s.Type != StatementType:
		return fmt.Errorf("its _type is %q; it must be %q", s.Type, StatementType)
	case s.PredicateType != PredicateType:
		return fmt.Errorf("its predicateType is %q; it must be %q", s.PredicateType, PredicateType)
	case p.Verdict != registry.Accepted:
		return fmt.Errorf("its verdict is %q; only %q counts", p.Verdict, registry.Accepted)
	case len(p.Rules) == 0 || p.Cases == 0:
		return fmt.Errorf("it speaks of %d rules and %d cases; both must be more than none", len(p.Rules), p.Cases)
	case p.Seed != p.Domain.Seed:
		return fmt.Errorf("its seed is %d, but its domain's is %d", p.Seed, p.Domain.Seed)
	}
	digests := map[string]string{"deployment": p.DeploymentDigest, "rules": p.RulesDigest, "checker": p.Checker.Digest}
	for i := range p.Rules {
		digests["rule "+p.Rules[i].Name] = p.Rules[i].Digest
	}
	for _, name := range slices.Sorted(maps.Keys(digests)) {
		if !isDigest(digests[name]) {
			return fmt.Errorf("the digest of %s is %q; it must be sha256: and 64 hexadecimal digits", name, digests[name])
		}
	}
	sum := uint64(0)
	for _, n := range p.Relations {
		sum += n
	}
	if sum != p.Cases {
		return fmt.Errorf("it speaks of %d cases, but its relations of %d", p.Cases, sum)
	}
	want := p.subjects()
	if !slices.EqualFunc(s.Subject, want, func(a, b Subject) bool { return a.Name == b.Name && maps.Equal(a.Digest, b.Digest) }) {
		return fmt.Errorf("its subjects are not the deployment and the %d rules that its predicate names", len(p.Rules))
	}
	return nil
}

func isDigest(s string) bool {
	sum, ok := strings.CutPrefix(s, "sha256:")
	b, err := hex.DecodeString(sum)
	return ok && err == nil && len(b) == 32 && strings.ToLower(sum) == sum
}

// A Certificate is one whose signature has been verified.
type Certificate struct {
	// KeyID of the key that signed it.
	KeyID     string
	Statement Statement
}

// OpenCertificate reads a certificate that one of the keys has signed. The error says what
// is wrong with it, from "its ..." on.
func OpenCertificate(data []byte, keys []ed25519.PublicKey) (*Certificate, error) {
	payload, id, err := unseal(data, keys)
	if err != nil {
		return nil, err
	}
	c := &Certificate{KeyID: id}
	if err := json.Unmarshal(payload, &c.Statement); err != nil {
		return nil, fmt.Errorf("its payload is no statement: %w", err)
	}
	if err := c.Statement.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// A Difference is a value of a certificate that is not what a node would judge.
type Difference struct{ Name, Certificate, Here string }

func (d Difference) String() string {
	return fmt.Sprintf("%s: %s in the certificate, %s here", d.Name, d.Certificate, d.Here)
}

// Against compares a certificate with what is about to be judged: a verdict that has all
// that is known before the check. It returns the certificate's verdict, or, when it is
// about something else, every difference.
func (c *Certificate) Against(here *registry.Verdict) (*registry.Verdict, []Difference) {
	p := &c.Statement.Predicate
	var out []Difference
	same := func(name string, a, b any) {
		if x, y := fmt.Sprint(a), fmt.Sprint(b); x != y {
			out = append(out, Difference{name, x, y})
		}
	}
	same("model", p.Model, here.Model)
	same("engine", p.Engine, here.Engine)
	same("deployment digest", p.DeploymentDigest, here.DeploymentDigest)
	same("rules digest", p.RulesDigest, here.RulesDigest)
	same("checker digest", p.Checker.Digest, here.Checker)
	same("seed", p.Seed, here.Domain.Seed)
	same("longest prompt", p.Domain.PromptTokens, here.Domain.PromptTokens)
	same("number of rules", len(p.Rules), len(here.Rules))
	for i := range min(len(p.Rules), len(here.Rules)) {
		a, b := &p.Rules[i], &here.Rules[i]
		same("rule of "+b.For, fmt.Sprintf("%s %s of %s", a.Name, a.Version, a.For), fmt.Sprintf("%s %s of %s", b.Name, b.Version, b.For))
		same("digest of the rule of "+b.For, a.Digest, b.Digest)
		same("parameters of the rule of "+b.For, a.Params, b.Params) // in the keys' order
	}
	if out != nil {
		return nil, out
	}
	return &registry.Verdict{
		Verdict: registry.Accepted, Model: p.Model, Engine: p.Engine, DeploymentDigest: p.DeploymentDigest, RulesDigest: p.RulesDigest,
		Checker: p.Checker.Digest, Rules: here.Rules, Domain: p.Domain, DomainText: p.DomainText, Cases: p.Cases, Relations: p.Relations,
		UnverifiedNeed: p.UnverifiedNeed, Certificate: c.KeyID,
	}, nil
}
