package evidence

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"strings"

	"github.com/tierd/tierd/registry"
)

// The elements of a JUnit report, as Jenkins and GitLab read them. There is no standard;
// these are the elements and attributes that all readers know.
type (
	junitSuites struct {
		XMLName  xml.Name     `xml:"testsuites"`
		Name     string       `xml:"name,attr"`
		Tests    int          `xml:"tests,attr"`
		Failures int          `xml:"failures,attr"`
		Errors   int          `xml:"errors,attr"`
		Skipped  int          `xml:"skipped,attr"`
		Time     string       `xml:"time,attr"`
		Suites   []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name       string          `xml:"name,attr"`
		Tests      int             `xml:"tests,attr"`
		Failures   int             `xml:"failures,attr"`
		Errors     int             `xml:"errors,attr"`
		Skipped    int             `xml:"skipped,attr"`
		Time       string          `xml:"time,attr"`
		File       string          `xml:"file,attr"`
		Properties []junitProperty `xml:"properties>property"`
		Cases      []junitCase     `xml:"testcase"`
	}
	junitCase struct {
		Name       string           `xml:"name,attr"`
		Class      string           `xml:"classname,attr"`
		Time       string           `xml:"time,attr"`
		File       string           `xml:"file,attr"`
		Line       int              `xml:"line,attr,omitempty"`
		Properties *junitProperties `xml:"properties"`
		Skipped    *junitOutcome    `xml:"skipped"`
		Error      *junitOutcome    `xml:"error"`
		Failure    *junitOutcome    `xml:"failure"`
	}
	junitProperties struct {
		List []junitProperty `xml:"property"`
	}
	junitProperty struct {
		Name  string `xml:"name,attr"`
		Value string `xml:"value,attr"`
	}
	junitOutcome struct {
		Message string `xml:"message,attr"`
		Type    string `xml:"type,attr,omitempty"`
		Text    string `xml:",cdata"`
	}
)

// JUnit returns the report as a JUnit XML file: one suite per finding, one test case per
// relation, with the number of its cases as a property. The failing relation holds the
// drawing. A suite whose verdict is undecided has a test case "verdict" with an error.
func JUnit(r *Report) ([]byte, error) {
	all := junitSuites{Name: "tierd check"}
	seconds := 0.0
	for i := range r.Findings {
		s := r.Findings[i].junit(r)
		all.Suites = append(all.Suites, s)
		all.Tests += s.Tests
		all.Failures += s.Failures
		all.Errors += s.Errors
		all.Skipped += s.Skipped
		seconds += r.Findings[i].Seconds
	}
	all.Time = junitTime(seconds)
	b, err := xml.MarshalIndent(&all, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("junit: %w", err)
	}
	return bytes.Join([][]byte{[]byte(xml.Header), b, []byte("\n")}, nil), nil
}

func junitTime(seconds float64) string { return fmt.Sprintf("%.3f", seconds) }

func (f *Finding) junit(r *Report) junitSuite {
	s := junitSuite{Name: xmlText(f.title()), Time: junitTime(f.Seconds), File: xmlText(f.path())}
	for _, p := range f.properties(r) {
		s.Properties = append(s.Properties, junitProperty{xmlText(p[0]), xmlText(p[1])})
	}
	s.Cases = f.junitCases()
	s.Tests = len(s.Cases)
	for i := range s.Cases {
		c := &s.Cases[i]
		c.Class, c.Time, c.File = "tierd.check."+xmlText(strings.ReplaceAll(f.title(), ".", "_")), junitTime(0), s.File
		switch { // a file whose numbers are not the sums of its elements is refused by some readers
		case c.Failure != nil:
			s.Failures++
		case c.Error != nil:
			s.Errors++
		case c.Skipped != nil:
			s.Skipped++
		}
	}
	return s
}

func (f *Finding) junitCases() (cases []junitCase) {
	outcome := func(kind string) *junitOutcome {
		return &junitOutcome{Message: xmlText(f.summary()), Type: kind, Text: xmlText(f.details())}
	}
	if f.Verdict.Verdict == registry.Undecided {
		cases = append(cases, junitCase{Name: "verdict", Error: outcome(registry.Undecided)})
	}
	if f.Rule && f.Verdict.Verdict != registry.Undecided {
		c := junitCase{Name: "laws"}
		switch {
		case f.Verdict.Verdict == registry.Refused && f.Counterexample == nil:
			c.Failure = outcome("law")
		case f.Counterexample != nil: // one law may be broken too, and the counterexample shows why
			c.Skipped = &junitOutcome{Message: "not reported beside a counterexample"}
		}
		cases = append(cases, c)
	} else if f.Verdict.Verdict == registry.Refused && f.Counterexample == nil {
		cases = append(cases, junitCase{Name: "verdict", Failure: outcome(registry.Refused)})
	}
	if !f.ran() {
		return cases
	}
	for _, name := range f.relations() {
		n := f.Relations[name]
		c := junitCase{Name: name, Properties: &junitProperties{[]junitProperty{{"cases", fmt.Sprint(n)}}}}
		switch {
		case f.Counterexample != nil && f.Counterexample.Relation == name:
			c.Failure, c.Line = outcome(name), f.line()
		case f.Verdict.Verdict != registry.Accepted:
			c.Skipped = &junitOutcome{Message: fmt.Sprintf("not finished: %d cases held before the check ended", n)}
		case n == 0:
			c.Skipped = &junitOutcome{Message: "no case of it is in the domain"}
		}
		cases = append(cases, c)
	}
	return cases
}

// properties are what a verdict depends on, as names and values.
func (f *Finding) properties(r *Report) (out [][2]string) {
	add := func(name, value string) {
		if value != "" {
			out = append(out, [2]string{name, value})
		}
	}
	add("verdict", f.Verdict.Verdict)
	add("tierd", r.Version)
	add("command", r.Command)
	add("engine", f.Engine)
	if f.ran() {
		if f.Domain.Seed != 0 { // of a stock engine nothing is drawn
			add("seed", fmt.Sprint(f.Domain.Seed))
		}
		add("cases", fmt.Sprint(f.Cases))
	}
	for _, l := range f.DomainText {
		add("domain", l)
	}
	add("deployment digest", f.DeploymentDigest)
	add("rules digest", f.RulesDigest)
	add("checker digest", f.Checker)
	for _, ru := range f.Rules {
		add("rule of "+ru.For, ruleWords(&ru))
	}
	if f.Against != nil {
		add("against", f.Against.File)
		add("against engine", f.Against.Engine)
		add("against deployment digest", f.Against.DeploymentDigest)
		add("against rules digest", f.Against.RulesDigest)
		for i := range f.Ways {
			add("way", fmt.Sprintf("producer %s, consumer %s: %s", f.Ways[i].Producer, f.Ways[i].Consumer, f.Ways[i].Outcome()))
		}
	}
	add("need unverified", strings.Join(f.UnverifiedNeed, ", "))
	return out
}

func ruleWords(ru *registry.RuleID) string {
	return fmt.Sprintf("%s %s%s from %s, %s", ru.Name, ru.Version, paramWords(ru.Params), ru.Source, ru.Digest)
}

// xmlText replaces what XML 1.0 cannot hold. encoding/xml does it everywhere but in CDATA.
func xmlText(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t', r == '\n', r == '\r', 0x20 <= r && r <= 0xD7FF, 0xE000 <= r && r <= 0xFFFD, 0x10000 <= r && r <= 0x10FFFF:
			return r
		}
		return '�'
	}, s)
}
