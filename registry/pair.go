package registry

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/tierd/tierd/registry/check"
)

// A LayoutError is the error of two deployments that cannot exchange bytes at all.
type LayoutError struct {
	A, B string // their files
	// Diff has one line for each field that differs.
	Diff []string
}

func (e *LayoutError) Error() string {
	return fmt.Sprintf("%s (here) and %s (there) have different layouts, so no chunk of one fits the other, whatever the rules are; make equal: %s",
		e.A, e.B, strings.Join(e.Diff, "; "))
}

// Against judges two versions of a deployment against each other, both ways, by relation
// pair alone: whether each is sound by itself is [Register]'s to say. The verdict is
// undecided when ctx ends by [check.ErrBudget]. The error is a *LayoutError when the two
// cannot exchange bytes, and otherwise means that there is no verdict.
func Against(ctx context.Context, a, b *Entry, o Options) (*Verdict, error) {
	clock := o.Now
	if clock == nil {
		clock = func() time.Time { return time.Time{} }
	}
	da, db := a.Deployment, b.Deployment
	if diff := da.Layout().Diff(db.Layout()); len(diff) > 0 {
		return nil, &LayoutError{da.File(), db.File(), diff}
	}
	o.Check.Workers = max(a.workers(o.Check.Workers), b.workers(o.Check.Workers))
	began := clock()
	rep, err := check.Pair(ctx, a.subject(), b.subject(), o.Check)
	if err != nil {
		return nil, fmt.Errorf("check %s against %s: %w", da.File(), db.File(), err)
	}
	v := &Verdict{
		Verdict: Accepted, Model: da.Model, Engine: da.Engine, DeploymentDigest: da.Digest(), RulesDigest: a.RulesDigest(), Checker: o.Checker,
		Rules: a.ruleIDs(), Domain: rep.Domain, DomainText: rep.Domain.Lines(), Relations: rep.Cases, Cases: rep.Cases[check.PairRelation],
		Counterexample: rep.Counterexample, Reached: rep.Reached, Ways: rep.Ways,
		Against: &Side{File: db.File(), Model: db.Model, Engine: db.Engine, DeploymentDigest: db.Digest(), RulesDigest: b.RulesDigest(), Rules: b.ruleIDs()},
	}
	if longer := max(da.MaxTokens, db.MaxTokens); longer > rep.Domain.PromptTokens {
		v.DomainText = append(v.DomainText, fmt.Sprintf("prompts of %d to %d tokens are refused at begin on one side", rep.Domain.PromptTokens+1, longer))
	}
	if !has(da.Legs, "pd") || !has(db.Legs, "pd") {
		v.DomainText = []string{"no case: leg pd is not used by both, and in every other leg the producer says of each key whether it has it"}
	}
	v.Seconds = clock().Sub(began).Seconds()
	switch {
	case rep.Counterexample != nil:
		v.Verdict = Refused
	case rep.Undecided:
		v.Verdict, v.Undecided = Undecided, check.ErrBudget.Error()
	}
	return v, nil
}

// ruleIDs says which rules serve.
func (e *Entry) ruleIDs() []RuleID {
	ids := make([]RuleID, len(e.rules))
	for i := range e.rules {
		ids[i] = e.rules[i].RuleID
	}
	return ids
}
