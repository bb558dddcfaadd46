// Package tryout judges a rule without a deployment, for its author: it makes small
// deployments from what the rule's manifest says, and puts each through the gate that a
// real one passes, package registry.
//
// Try goes in three steps and stops at the first that fails:
//
//  1. The laws that a rule keeps alone, by abitest.Check. A rule that breaks the law "kept"
//     and no other is refused for it in the end, when no deployment draws a picture.
//  2. With a twin, abitest.Twins: another implementation of the rule gives the same
//     answers.
//  3. Some twenty small deployments, smallest parameters first, each judged by
//     registry.Register. So the counterexample of a refusal is small, and its deployment
//     is a text that can be saved and checked again.
//
// What it accepts keeps the relations in these deployments. It is no verdict on another
// deployment: a daemon judges its own before it serves.
//
// # The deployments
//
// The rule stands beside a full group, before it or behind it, and once alone; a policy
// stands over a full and a window group. Blocks have a few tokens, chunks a few blocks,
// the alignment is none, one or a few common chunks, and prompts have up to a few
// hundred tokens, so that a window is shorter than a prompt by far. Parameters take their
// smallest value, values around the chunk's size, drawn ones up to five chunks, their
// default and their largest. All of it follows from the manifest and the seed.
//
// A rule in a subprocess, whose calls take a hundred times as long, is judged in a third of
// them.
//
// A parameter whose smallest value is more than that scales everything, up to
// promptTokensMax; beyond it the rule is undecided.
package tryout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

// Undecided is the verdict on a rule that could not be judged, beside
// registry.Accepted and registry.Refused.
const Undecided = "undecided"

// A Subject is a rule to be tried.
type Subject struct {
	// Ref leads to the rule, as a deployment file in the working directory would write it.
	Ref    string
	Spec   abi.Spec
	Digest string
}

// Options of Try.
type Options struct {
	// Seed of the drawn parameters and cases. The same seed gives the same verdict.
	Seed uint64
	// Legs of the deployments: pd, probe, or both.
	Legs []string
	// Twin, when set, is compared with the rule; TwinRef is how it is called.
	Twin    abi.Spec
	TwinRef string
	// Progress, when set, is told how many deployments are done, of how many.
	Progress func(done, total int)
}

// A Result is what was found of one rule.
type Result struct {
	Ref     string       `json:"ref"`
	Rule    string       `json:"rule"`
	Version string       `json:"version"`
	Kind    abi.Kind     `json:"kind"`
	Mask    abi.MaskKind `json:"mask,omitempty"`
	Digest  string       `json:"digest"`
	Seed    uint64       `json:"seed"`
	// Verdict is accepted, refused or undecided.
	Verdict string `json:"verdict"`
	// Laws, when broken, are named here, and Twin when it answers differently. Why says
	// how, and why a rule is undecided.
	Laws []string `json:"laws_broken,omitempty"`
	Twin string   `json:"twin,omitempty"`
	Why  string   `json:"why,omitempty"`
	// Counterexample of a relation, in the deployment of this text at these parameters.
	Counterexample *check.Counterexample `json:"counterexample,omitempty"`
	Params         map[string]uint64     `json:"params,omitempty"`
	Deployment     string                `json:"deployment,omitempty"`
	// Deployments judged, with prompts of up to PromptTokens, at these parameter Values;
	// Cases in all, and by relation.
	Deployments  int                 `json:"deployments"`
	PromptTokens uint64              `json:"prompt_tokens,omitempty"`
	Values       map[string][]uint64 `json:"values,omitempty"`
	Cases        uint64              `json:"cases"`
	Relations    map[string]uint64   `json:"relations,omitempty"`
	// UnverifiedNeed says that no mask of the list describes the rule's Need.
	UnverifiedNeed bool    `json:"unverified_need,omitempty"`
	Seconds        float64 `json:"seconds"`
}

// Try judges one rule. open opens the references of the deployments: the rule's own, and
// those of shipped rules. The error is ctx's; everything else is in the result.
func Try(ctx context.Context, s Subject, open registry.Opener, o Options) (*Result, error) {
	began := time.Now()
	m := s.Spec.Manifest()
	r := &Result{Ref: s.Ref, Rule: m.Name, Version: m.Version, Kind: m.Kind, Mask: m.Mask, Digest: s.Digest, Seed: o.Seed,
		Verdict: registry.Accepted, UnverifiedNeed: m.Mask == abi.MaskUnverified,
		Relations: map[string]uint64{}, Values: map[string][]uint64{}}
	defer func() { r.Seconds = time.Since(began).Seconds() }()
	laws := &Result{}
	if err := abitest.Check(s.Spec); err != nil {
		laws.refusedBy(err)
		if !slices.Equal(laws.Laws, []string{abitest.LawKept}) {
			r.refusedBy(err)
			return r, ctx.Err()
		}
	}
	if o.Twin != nil {
		r.Twin = o.TwinRef
		if err := abitest.Twins(s.Spec, o.Twin); err != nil {
			var differ *abitest.Difference
			r.Verdict, r.Why = Undecided, err.Error()
			if errors.As(err, &differ) {
				r.Verdict = registry.Refused
			}
			return r, ctx.Err()
		}
	}
	trials, err := trials(m, s.Ref, o.Legs, o.Seed)
	if err != nil {
		r.Verdict, r.Why = Undecided, err.Error()
		return r, nil
	}
	if slow(s.Spec, trials[0].values) {
		trials = thin(trials)
	}
	for i := range trials {
		if done, err := r.judge(ctx, s, &trials[i], open, o.Seed); done || err != nil {
			return r, err
		}
		if o.Progress != nil {
			o.Progress(i+1, len(trials))
		}
	}
	if laws.Laws != nil {
		r.Verdict, r.Laws, r.Why = laws.Verdict, laws.Laws, laws.Why
	}
	return r, nil
}

// slow reports whether a call of the rule crosses to another process, whose answers take
// long and come in batches.
func slow(spec abi.Spec, values []uint64) bool {
	rule, err := spec.Open(values)
	if err != nil {
		return false // judge says why
	}
	_, ok := rule.(interface{ Concurrency() int })
	return ok
}

// refusedBy takes over the laws that abitest found broken.
func (r *Result) refusedBy(err error) {
	r.Verdict, r.Why = registry.Refused, err.Error()
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			var v *abitest.Violation
			if errors.As(e, &v) {
				r.Laws = append(r.Laws, v.Law)
			}
		}
	}
}

// judge puts one deployment through the gate. done says that there is no need to go on.
func (r *Result) judge(ctx context.Context, s Subject, t *trial, open registry.Opener, seed uint64) (done bool, err error) {
	r.Params, r.Deployment = t.params(s.Spec.Manifest()), t.text
	if _, err := s.Spec.Open(t.values); err != nil {
		r.Verdict, r.Laws = registry.Refused, []string{abitest.LawTotal}
		r.Why = fmt.Sprintf("the rule cannot be opened with parameters in its ranges: %v", err)
		return true, nil
	}
	d, err := deploy.Parse("deployment.yaml", []byte(t.text))
	if err != nil {
		return true, fmt.Errorf("a deployment that was made here is not valid, which is a mistake of this program: %w\n%s", err, t.text)
	}
	e, err := registry.Register(ctx, d, open, registry.Options{Check: check.Options{Seed: seed}})
	var refusal *registry.Refusal
	switch {
	case errors.As(err, &refusal):
		r.Verdict, r.Counterexample = registry.Refused, refusal.Verdict.Counterexample
		r.count(t, s.Spec.Manifest(), d, refusal.Verdict)
		return true, nil
	case ctx.Err() != nil:
		return true, ctx.Err()
	case err != nil:
		r.Verdict, r.Why = Undecided, err.Error()
		return true, nil
	}
	r.Params, r.Deployment = nil, ""
	r.count(t, s.Spec.Manifest(), d, e.Verdict)
	return false, nil
}

// count adds what one deployment's verdict says.
func (r *Result) count(t *trial, m *abi.Manifest, d *deploy.Deployment, v *registry.Verdict) {
	r.Deployments++
	r.PromptTokens = max(r.PromptTokens, d.MaxTokens)
	r.Cases += v.Cases
	for name, n := range v.Relations {
		r.Relations[name] += n
	}
	for i := range m.Params {
		r.Values[m.Params[i].Name] = insert(r.Values[m.Params[i].Name], t.values[i])
	}
}

// Overall is the verdict on several rules together: refused when one is, else undecided
// when one is.
func Overall(rs []*Result) string {
	seen := map[string]bool{}
	for _, r := range rs {
		seen[r.Verdict] = true
	}
	for _, v := range []string{registry.Refused, Undecided} {
		if seen[v] {
			return v
		}
	}
	return registry.Accepted
}

// Relation is the relation that refused the rule, or empty.
func (r *Result) Relation() string {
	if r.Counterexample == nil {
		return ""
	}
	return r.Counterexample.Relation
}

func (t *trial) params(m *abi.Manifest) map[string]uint64 {
	out := map[string]uint64{}
	for i := range m.Params {
		out[m.Params[i].Name] = t.values[i]
	}
	return out
}
