// Package registry is the gate that every rule passes before it serves: it opens the
// rules of a deployment, has package registry/check judge them, and hands out the
// planner's model only with an accepted verdict.
//
// It judges a Spec wherever it came from. Opening a reference such as "window" or
// "./mine.wasm#mine" is the caller's [Opener], so this package knows neither
// WebAssembly nor processes.
package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"runtime"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/plan"
)

// An Opened is a spec that a reference led to.
type Opened struct {
	Spec abi.Spec
	// Digest of the bytes that serve, "sha256:..."; it is what a verdict names.
	Digest string
	// Source in words, for tables: "shipped", or a file's path.
	Source string
}

// An Opener opens the reference of a rule. Relative paths start at dir.
type Opener func(ctx context.Context, dir, ref string) (Opened, error)

// Options of Register.
type Options struct {
	Check check.Options
	// Verdicts, when set, keeps accepted verdicts, so that the same rules, deployment
	// and checker are not judged again.
	Verdicts VerdictStore
	// Checker identifies the code that judges, such as the digest of the executable. A
	// kept verdict counts only for the same one.
	Checker string
	// Certified, when set, is asked for a verdict from elsewhere on what is about to be
	// judged, which want says as far as it is known before: model, engine, digests, rules,
	// checker, and the domain's seed and longest prompt. nil = there is none, and the check
	// runs. A verdict that does not fit want is not used. It is not kept either: whoever
	// gave it may take it back.
	Certified func(want *Verdict) *Verdict
	// Now, when set, times the check. Without it Verdict.Seconds is 0.
	Now func() time.Time
}

// An Entry is a registered deployment.
type Entry struct {
	Deployment *deploy.Deployment
	Verdict    *Verdict
	rules      []opened
}

// opened is a group's or policy's rule with its parameters.
type opened struct {
	RuleID
	spec   abi.Spec
	values []uint64
}

// A RuleID says which rule serves where.
type RuleID struct {
	// For is the group's name, or "policy".
	For     string            `json:"for"`
	Ref     string            `json:"ref"`
	Name    string            `json:"name"`
	Version string            `json:"version"`
	Digest  string            `json:"digest"`
	Source  string            `json:"source"`
	Params  map[string]uint64 `json:"params,omitempty"`
}

// A Verdict is what the check said of a deployment, with everything it depends on.
type Verdict struct {
	// Verdict is [Accepted], [Refused] or [Undecided].
	Verdict string `json:"verdict"`
	Model   string `json:"model"`
	// Engine whose semantics were judged: tierd, vllm-0.27, vllm-0.30.
	Engine           string            `json:"engine"`
	DeploymentDigest string            `json:"deployment_digest"`
	RulesDigest      string            `json:"rules_digest"`
	Checker          string            `json:"checker"`
	Rules            []RuleID          `json:"rules"`
	Domain           check.Domain      `json:"domain"`
	DomainText       []string          `json:"domain_text"`
	Cases            uint64            `json:"cases"`
	Relations        map[string]uint64 `json:"relations"`
	Seconds          float64           `json:"seconds"`
	// LoadSeconds is how long it took to load and compile the rules.
	LoadSeconds    float64  `json:"load_seconds"`
	UnverifiedNeed []string `json:"unverified_need,omitempty"`
	// Width says, per group, what is fetched and stored beyond need.
	Width          []check.Width         `json:"width,omitempty"`
	Counterexample *check.Counterexample `json:"counterexample,omitempty"`
	// Undecided says why there is no verdict.
	Undecided string `json:"undecided,omitempty"`
	// Reached says how far the check got, one line a stage, when its time was spent. With a
	// counterexample it means that a smaller one may exist.
	Reached []string `json:"reached,omitempty"`
	// Against is the other deployment, when the verdict is that of a pair.
	Against *Side `json:"against,omitempty"`
	// Ways says of a pair what each direction came to.
	Ways []check.Way `json:"ways,omitempty"`
	// Reused says that the verdict was kept from an earlier run.
	Reused bool `json:"reused,omitempty"`
	// Certificate is the key that signed the verdict, "sha256:..." of its public half, when
	// the verdict was not found here but taken from a certificate.
	Certificate string `json:"certificate,omitempty"`
	// NotKept says why an accepted verdict could not be kept for the next run.
	NotKept string `json:"not_kept,omitempty"`
}

// Verdict values.
const (
	Accepted  = "accepted"
	Refused   = "refused"
	Undecided = "undecided"
)

// A Side is one deployment of a pair.
type Side struct {
	// File that the deployment was read from.
	File             string   `json:"file"`
	Model            string   `json:"model"`
	Engine           string   `json:"engine"`
	DeploymentDigest string   `json:"deployment_digest"`
	RulesDigest      string   `json:"rules_digest"`
	Rules            []RuleID `json:"rules"`
}

// A Refusal is the error of a deployment whose rules disagree.
type Refusal struct{ Verdict *Verdict }

func (r *Refusal) Error() string {
	return fmt.Sprintf("deployment %s is refused\n%s", r.Verdict.Model, r.Verdict.Counterexample)
}

// An Unjudged is the error of a deployment whose check ran out of time.
type Unjudged struct{ Verdict *Verdict }

func (u *Unjudged) Error() string {
	return fmt.Sprintf("deployment %s is not judged: %s", u.Verdict.Model, u.Verdict.Undecided)
}

// Open opens the rules of a deployment without judging them.
func Open(ctx context.Context, d *deploy.Deployment, open Opener) (*Entry, error) {
	e := &Entry{Deployment: d}
	for i := range d.Groups {
		g := &d.Groups[i]
		if err := e.open(ctx, open, "group "+g.Name, g.Name, g.Rule, abi.KindSpec, g.Params); err != nil {
			return nil, err
		}
	}
	for i, p := range d.Policies {
		if err := e.open(ctx, open, fmt.Sprintf("policies[%d]", i), "policy", p.Rule, abi.KindPolicy, p.Params); err != nil {
			return nil, err
		}
	}
	if _, err := e.model(false); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Entry) open(ctx context.Context, open Opener, at, who, ref string, kind abi.Kind, params map[string]any) error {
	o, err := open(ctx, e.Deployment.Dir(), ref)
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	m := o.Spec.Manifest()
	if err := m.Validate(); err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	if m.Kind != kind {
		return fmt.Errorf("%s: rule %s is a %s; a %s is needed here", at, ref, m.Kind, kind)
	}
	values, err := deploy.Values(at, m, params)
	if err != nil {
		return err
	}
	id := RuleID{For: who, Ref: ref, Name: m.Name, Version: m.Version, Digest: o.Digest, Source: o.Source, Params: map[string]uint64{}}
	for i := range m.Params {
		id.Params[m.Params[i].Name] = values[i]
	}
	e.rules = append(e.rules, opened{id, o.Spec, values})
	return nil
}

// A pinner is a rule that can be bound to one goroutine, which makes its calls cheaper.
type pinner interface {
	Pin() (r abi.Rule, release func())
}

// Model returns the planner's model. Its rules are safe for many goroutines.
func (e *Entry) Model() plan.Model {
	m, err := e.model(false)
	if err != nil {
		panic("registry: a rule opened once does not open again: " + err.Error())
	}
	return m.Model
}

// opening is a model with what must be given back.
type opening struct {
	plan.Model
	releases []func()
}

func (o *opening) release() {
	for _, r := range o.releases {
		r()
	}
}

func (e *Entry) model(pin bool) (*opening, error) {
	d := e.Deployment
	o := &opening{Model: plan.Model{AlignTokens: d.AlignTokens, MaxStoreTokens: d.MaxStoreTokens}}
	for i := range e.rules {
		ru := &e.rules[i]
		rule, err := ru.spec.Open(ru.values)
		if err != nil {
			o.release()
			return nil, fmt.Errorf("%s: open rule %s: %w", ru.For, ru.Ref, err)
		}
		if p, ok := rule.(pinner); ok && pin {
			var release func()
			rule, release = p.Pin()
			o.releases = append(o.releases, release)
		}
		if i >= len(d.Groups) {
			o.Policies = append(o.Policies, plan.Policy{Name: ru.Name, Rule: rule})
			continue
		}
		spec, ok := rule.(abi.SpecRule)
		if !ok {
			o.release()
			return nil, fmt.Errorf("group %s: rule %s has no Need", ru.For, ru.Ref)
		}
		g := &d.Groups[i]
		if err := wholeLatents(ru, g); err != nil {
			o.release()
			return nil, err
		}
		o.Groups = append(o.Groups, plan.Group{Name: g.Name, Rule: spec, BlockTokens: g.BlockTokens, ChunkTokens: g.ChunkTokens(), Draft: g.Draft,
			State: ru.spec.Manifest().Mask == abi.MaskState})
	}
	return o, nil
}

// wholeLatents reports a group whose chunks cut a latent. Whether the first or the last of
// the tokens that a latent is made of has it is the engine's affair, so a chunk that ends
// between them may hold it or not.
func wholeLatents(ru *opened, g *deploy.Group) error {
	m := ru.spec.Manifest()
	if m.Mask != abi.MaskLatent {
		return nil
	}
	ratio := m.Param(m.MaskArgs[0])
	if r := ru.values[ratio]; r > 1 && g.ChunkTokens()%r != 0 {
		return fmt.Errorf("group %s: rule %s makes one latent of %d tokens (%s), and a chunk has %d (%d blocks of %d); a chunk must hold whole latents: make it a multiple of %d",
			g.Name, ru.Ref, r, m.Params[ratio].Name, g.ChunkTokens(), g.ChunkBlocks, g.BlockTokens, r)
	}
	return nil
}

// A fresher is a rule that can be had in a newly made instance, which has served no call.
// Opening the rule again may lead to an instance that has.
type fresher interface {
	Fresh() (r abi.Rule, release func(), err error)
}

// fresh opens rule i in an instance that has served no call.
func (e *Entry) fresh(i int) (abi.Rule, func(), error) {
	ru := &e.rules[i]
	rule, err := ru.spec.Open(ru.values)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: rule %s: %w", ru.For, ru.Ref, err)
	}
	switch r := rule.(type) {
	case fresher:
		return r.Fresh()
	case pinner:
		rule, release := r.Pin()
		return rule, release, nil
	}
	return rule, func() {}, nil
}

// near opens rule i as it serves, and beside it what may share an instance with it: the
// same rule with other parameter values, and the deployment's other rules. Values that the
// rule refuses are left out: a rule may refuse what its ranges alone allow.
func (e *Entry) near(i int) (abi.Rule, []check.Neighbour, error) {
	ru := &e.rules[i]
	own, err := ru.spec.Open(ru.values)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: rule %s: %w", ru.For, ru.Ref, err)
	}
	var near []check.Neighbour
	for _, values := range check.NearValues(ru.spec.Manifest(), ru.values) {
		if r, err := ru.spec.Open(values); err == nil {
			near = append(near, check.Neighbour{Name: fmt.Sprintf("%s with the values %d", ru.Name, values), Rule: r})
		}
	}
	for k := range e.rules {
		if other := &e.rules[k]; k != i {
			r, err := other.spec.Open(other.values)
			if err != nil {
				return nil, nil, fmt.Errorf("%s: rule %s: %w", other.For, other.Ref, err)
			}
			near = append(near, check.Neighbour{Name: other.Name + " of " + other.For, Rule: r})
		}
	}
	return own, near, nil
}

// RulesDigest names the rules and parameters of an entry together.
func (e *Entry) RulesDigest() string {
	sum := sha256.Sum256(e.RulesText())
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Register opens the rules of a deployment and judges them. A refused deployment is a
// *Refusal; one whose check was ended by [check.ErrBudget] an *Unjudged; any other error
// means that there was no verdict.
func Register(ctx context.Context, d *deploy.Deployment, open Opener, o Options) (*Entry, error) {
	clock := o.Now
	if clock == nil {
		clock = func() time.Time { return time.Time{} }
	}
	began := clock()
	e, err := Open(ctx, d, open)
	if err != nil {
		return nil, err
	}
	loaded := clock().Sub(began)
	key := verdictKey(d.Digest(), e.RulesDigest(), o.Checker, fmt.Sprint(o.Check.Seed))
	if v := loadVerdict(o.Verdicts, key); v != nil && v.of(e) && v.Checker == o.Checker {
		v.LoadSeconds = loaded.Seconds()
		e.Verdict = v
		return e, nil
	}
	if v := e.certified(o); v != nil {
		v.LoadSeconds = loaded.Seconds()
		e.Verdict = v
		return e, nil
	}
	if err := e.judge(ctx, o, clock); err != nil {
		return nil, err
	}
	e.Verdict.LoadSeconds = loaded.Seconds()
	switch e.Verdict.Verdict {
	case Refused:
		return nil, &Refusal{e.Verdict}
	case Undecided:
		return nil, &Unjudged{e.Verdict}
	}
	if err := saveVerdict(o.Verdicts, key, e.Verdict); err != nil {
		e.Verdict.NotKept = err.Error() // it is a verdict all the same
	}
	return e, nil
}

// certified returns the verdict of Options.Certified when it is one on this entry.
func (e *Entry) certified(o Options) *Verdict {
	if o.Certified == nil {
		return nil
	}
	d := e.Deployment
	want := &Verdict{Model: d.Model, Engine: d.Engine, DeploymentDigest: d.Digest(), RulesDigest: e.RulesDigest(), Checker: o.Checker, Rules: e.ruleIDs()}
	want.Domain.Seed, want.Domain.PromptTokens = o.Check.Seed, d.MaxTokens
	v := o.Certified(want)
	if v == nil || v.Verdict != Accepted || !v.of(e) || v.Engine != want.Engine || v.Checker != want.Checker || v.Against != nil ||
		v.Domain.Seed != want.Domain.Seed || v.Domain.PromptTokens != want.Domain.PromptTokens {
		return nil
	}
	return v
}

// subject returns what the check judges of an entry.
func (e *Entry) subject() check.Subject {
	d := e.Deployment
	// Leg demand is judged as leg probe: what the producer refuses, a consumer plans without,
	// as it does without a key that was not found.
	s := check.Subject{Name: d.File(), MaxTokens: d.MaxTokens, PD: has(d.Legs, "pd"), Probe: has(d.Legs, "probe") || has(d.Legs, "demand"),
		Produces: has(d.Roles, "producer"), Consumes: has(d.Roles, "consumer")}
	for i := range d.Groups {
		s.Groups = append(s.Groups, check.Claim{Manifest: e.rules[i].spec.Manifest(), Params: e.rules[i].values, ChunkBytes: d.Groups[i].ChunkBytes()})
	}
	// An instance of its own makes calls cheaper for as many workers as run at a time; more
	// of them, which wait for a process most of the time, share.
	pins := 2 * runtime.GOMAXPROCS(0) // a worker opens the rules twice
	s.Open = func() (plan.Model, func(), error) {
		pins--
		m, err := e.model(pins >= 0)
		if err != nil {
			return plan.Model{}, nil, err
		}
		return m.Model, m.release, nil
	}
	s.Fresh, s.Near = e.fresh, e.near
	return s
}

func (e *Entry) judge(ctx context.Context, o Options, clock func() time.Time) error {
	d, s := e.Deployment, e.subject()
	o.Check.Workers = e.workers(o.Check.Workers)
	began := clock()
	rep, err := check.Run(ctx, s, o.Check)
	if err != nil {
		return fmt.Errorf("check deployment %s: %w", d.Model, err)
	}
	v := &Verdict{
		Verdict: Accepted, Model: d.Model, Engine: d.Engine, DeploymentDigest: d.Digest(), RulesDigest: e.RulesDigest(), Checker: o.Checker, Rules: e.ruleIDs(),
		Domain: rep.Domain, DomainText: rep.Domain.Lines(), Relations: rep.Cases,
		UnverifiedNeed: rep.Unverified, Width: rep.Width, Counterexample: rep.Counterexample, Reached: rep.Reached,
	}
	for _, n := range rep.Cases {
		v.Cases += n
	}
	v.Seconds = clock().Sub(began).Seconds()
	switch {
	case rep.Counterexample != nil:
		v.Verdict = Refused
	case rep.Undecided:
		v.Verdict, v.Undecided = Undecided, check.ErrBudget.Error()
	}
	e.Verdict = v
	return nil
}

// A concurrent rule says how many callers at once suit it, such as one whose calls travel
// to a process together.
type concurrent interface{ Concurrency() int }

// workers returns how many workers the check should have: n, or as many as suit a rule. The
// verdict does not depend on it.
func (e *Entry) workers(n int) int {
	m := e.Model()
	rules := make([]abi.Rule, 0, len(e.rules))
	for i := range m.Groups {
		rules = append(rules, m.Groups[i].Rule)
	}
	for i := range m.Policies {
		rules = append(rules, m.Policies[i].Rule)
	}
	for _, r := range rules {
		if c, ok := r.(concurrent); ok && c.Concurrency() > max(n, runtime.GOMAXPROCS(0)) {
			n = c.Concurrency()
		}
	}
	return n
}

func has(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

// A VerdictStore keeps accepted verdicts between runs. The host backs it with its state
// directory.
type VerdictStore interface {
	// Load returns what Save kept under key, or nil.
	Load(key string) []byte
	Save(key string, data []byte) error
}

// of reports whether v is a verdict on e.
func (v *Verdict) of(e *Entry) bool {
	if v.Model != e.Deployment.Model || v.DeploymentDigest != e.Deployment.Digest() || v.RulesDigest != e.RulesDigest() ||
		v.Counterexample != nil || len(v.Rules) != len(e.rules) {
		return false
	}
	for i := range e.rules {
		if v.Rules[i].For != e.rules[i].For || v.Rules[i].Digest != e.rules[i].Digest {
			return false
		}
	}
	return true
}

func verdictKey(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s\n", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// loadVerdict returns a kept verdict that says accepted, or nil.
func loadVerdict(s VerdictStore, key string) *Verdict {
	if s == nil {
		return nil
	}
	var v Verdict
	if b := s.Load(key); b == nil || json.Unmarshal(b, &v) != nil || v.Verdict != Accepted {
		return nil
	}
	v.Reused = true
	return &v
}

func saveVerdict(s VerdictStore, key string, v *Verdict) error {
	if s == nil {
		return nil
	}
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return s.Save(key, b)
}
