// Package evidence turns what a check found into what a CI can keep: a JUnit report, a
// SARIF log, an HTML page, and a signed certificate that a daemon accepts instead of
// checking.
//
// Every renderer is a function of a [Report] and of nothing else: no clock, no file, no
// randomness. The same report gives the same bytes.
//
//	JUnit   for the test tab of a CI: a suite per finding, a case per relation
//	SARIF   for code scanning: a result per refusal, at the group's line in the file
//	HTML    for people: one page without scripts and without requests, with each group's
//	        chunks drawn as a table
//	Paint   for a terminal: colours in the text that tierd check prints
//
// # What counts as passed
//
// An accepted finding passes every relation that has cases in its domain. A refused one
// fails exactly the relation that refused it; how many cases of the others had run says
// nothing about those that had not, so they are skipped and not passed. An undecided one
// passes nothing: its suite has an error, because a CI that only counts failures must not
// become green by running out of time.
//
// # The certificate
//
// [Certify] writes what an accepted verdict says as an in-toto statement, with the
// deployment's digest and each rule's as its subjects, in a DSSE envelope that an ed25519
// key signs. [Certificate.Against] tells a daemon whether it says, of what the daemon is
// about to judge, exactly what the daemon's own check would be about: the same deployment,
// rules, parameters, checker and seed. A certificate has no date and does not expire. It
// cannot become wrong, because all that a verdict depends on is in it; it is withdrawn by
// taking its key out of the daemon's configuration.
package evidence

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

// A Report is what one run of tierd check found.
type Report struct {
	// Version of tierd, as "tierd version" says it.
	Version string
	// Command that gives the same verdict; empty = not known.
	Command string
	// Findings has at least one.
	Findings []Finding
}

// A Finding is what was found of one deployment, of a pair of them, or of one rule of a
// plugin.
type Finding struct {
	// Verdict of the deployment. That of a rule names the rule as its Model.
	*registry.Verdict
	// File that was judged, as it was given: a path, or a plugin's reference.
	File string
	// Lines of the keys of File, by path, such as "groups[0].name"; nil when File is no
	// deployment file.
	Lines map[string]int
	// Groups of the deployment in the file's order, for Lines.
	Groups []string
	// Rule says that a plugin's rule was judged, in small deployments made for it.
	Rule bool
	// Laws that the rule breaks, and Why: the reason of a refusal that has no counterexample.
	Laws []string
	Why  string
	// Deployment is the text of the deployment in which a rule was refused.
	Deployment string
}

// Undecided returns the finding of a run that ended by an error before there was a verdict.
func Undecided(file string, err error) Finding {
	return Finding{File: file, Verdict: &registry.Verdict{Verdict: registry.Undecided, Model: file, Undecided: err.Error()}}
}

// title says what was judged, in a few words.
func (f *Finding) title() string {
	if f.Against != nil {
		return fmt.Sprintf("%s against %s", f.Model, f.Against.File)
	}
	return f.Model
}

// summary says the verdict in a sentence.
func (f *Finding) summary() string {
	switch {
	case f.Counterexample != nil:
		return fmt.Sprintf("refused by relation %s, group %s: %s", f.Counterexample.Relation, f.Counterexample.Group, f.Counterexample.Why)
	case f.Verdict.Verdict == registry.Refused && len(f.Laws) > 0:
		return fmt.Sprintf("refused: the rule breaks the law %s", strings.Join(f.Laws, ", "))
	case f.Verdict.Verdict == registry.Refused:
		return "refused: " + firstLine(f.Why)
	case f.Verdict.Verdict == registry.Undecided:
		return "undecided: " + firstLine(f.Undecided)
	}
	return fmt.Sprintf("accepted: %d cases hold", f.Cases)
}

// details is everything that is to be said of a finding that is not accepted.
func (f *Finding) details() string {
	var b strings.Builder
	switch {
	case f.Counterexample != nil:
		b.WriteString(f.Counterexample.String())
	case f.Verdict.Verdict == registry.Refused:
		fmt.Fprintln(&b, f.Why)
	case f.Verdict.Verdict == registry.Undecided:
		fmt.Fprintln(&b, f.Undecided)
	}
	if len(f.Reached) > 0 {
		fmt.Fprintf(&b, "\nreached\n")
		for _, l := range f.Reached {
			fmt.Fprintf(&b, "  %s\n", l)
		}
	}
	if f.Deployment != "" {
		fmt.Fprintf(&b, "\ndeployment\n%s", indent(f.Deployment))
	}
	return b.String()
}

// relations are those that a finding speaks of, in the order in which they run; then those
// that package check does not have, such as the relations of an engine, by name.
func (f *Finding) relations() []string {
	names := slices.Clone(check.Relations)
	if f.Against != nil || f.Engine != "" && f.Engine != deploy.EngineTierd { // judged by relations of its own
		names = nil
	}
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	known := len(names)
	for name := range f.Relations {
		add(name)
	}
	slices.Sort(names[known:])
	if f.Counterexample != nil {
		add(f.Counterexample.Relation)
	}
	return names
}

// ran reports whether the finding comes from a check that has begun.
func (f *Finding) ran() bool { return len(f.Relations) > 0 }

// path is the file of a finding without the name of a rule in it, slash-separated.
func (f *Finding) path() string {
	p := strings.TrimPrefix(f.File, "exec:")
	if f.Rule {
		p, _, _ = strings.Cut(p, "#")
	}
	return filepath.ToSlash(filepath.Clean(p))
}

// line returns the line of the finding's file that the failure is about: that of the group,
// of the first policy, or 0 when it is not known.
func (f *Finding) line() int {
	if f.Counterexample == nil || f.Lines == nil {
		return 0
	}
	if i := slices.Index(f.Groups, f.Counterexample.Group); i >= 0 {
		return f.Lines[fmt.Sprintf("groups[%d]", i)]
	}
	if strings.HasPrefix(f.Counterexample.Group, "policy") {
		return f.Lines["policies"]
	}
	return 0
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

func indent(s string) string {
	var b strings.Builder
	for l := range strings.Lines(s) {
		b.WriteString("  " + l)
	}
	return b.String()
}
