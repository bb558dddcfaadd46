package tryout

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// WriteText writes the result for people.
func (r *Result) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s %s, %s from %s\n", strings.ToUpper(r.Verdict), r.Rule, r.Version, r.Kind, r.Ref)
	line := func(label, format string, args ...any) {
		fmt.Fprintf(&b, "  %-12s %s\n", label, fmt.Sprintf(format, args...))
	}
	switch {
	case r.Counterexample != nil:
		fmt.Fprintf(&b, "\n%s\n", r.Counterexample)
		r.reproduce(&b)
	case r.Verdict == Undecided && r.Deployment != "":
		fmt.Fprintf(&b, "  could not decide: %s\n\n", r.Why)
		r.reproduce(&b)
	case r.Verdict == Undecided:
		fmt.Fprintf(&b, "  could not decide: %s\n", r.Why)
	case r.Verdict == registry.Refused:
		fmt.Fprintf(&b, "\n%s\n\n", strings.TrimSuffix(r.Why, "\n"))
		if len(r.Params) > 0 {
			line("parameters", "%s", paramsOf(r.Params))
		}
		if r.Twin != "" {
			line("twins", "first is %s, second is %s", r.Ref, r.Twin)
		}
	}
	if r.Verdict == registry.Accepted {
		line("laws", "kept")
		if r.Twin != "" {
			line("twin", "%s gives the same answers", r.Twin)
		}
	}
	if r.Deployments > 0 {
		many := fmt.Sprintf("%d small ones", r.Deployments)
		if r.Deployments == 1 {
			many = "the first small one"
		}
		line("deployments", "%s, with prompts of up to %d tokens, seed %d", many, r.PromptTokens, r.Seed)
		for _, name := range slices.Sorted(maps.Keys(r.Values)) {
			line("", "%s: %s", name, strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Values[name]), " ", ", "), "[]"))
		}
		var parts []string
		for _, name := range check.Relations {
			if n := r.Relations[name]; n > 0 {
				parts = append(parts, fmt.Sprintf("%s %d", name, n))
			}
		}
		line("cases", "%d in %.1f s: %s", r.Cases, r.Seconds, strings.Join(parts, ", "))
	}
	if r.UnverifiedNeed {
		line("need", "no mask of the list describes it, so it is taken on trust")
	}
	line("digest", "%s", r.Digest)
	_, err := io.WriteString(w, b.String())
	return err
}

// reproduce writes the deployment, to be saved and checked.
func (r *Result) reproduce(b *strings.Builder) {
	if len(r.Params) > 0 {
		fmt.Fprintf(b, "  %-12s %s\n", "parameters", paramsOf(r.Params))
	}
	fmt.Fprintf(b, "  %-12s save this file here and run tierd check on it, with --seed %d\n\n", "deployment", r.Seed)
	for l := range strings.Lines(r.Deployment) {
		b.WriteString("      " + l)
	}
	b.WriteString("\n")
}

func paramsOf(p map[string]uint64) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(p)) {
		parts = append(parts, fmt.Sprintf("%s: %d", k, p[k]))
	}
	return "{" + strings.Join(parts, ", ") + "}"
}
