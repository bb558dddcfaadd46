package evidence

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

//go:embed page.css
var pageCSS string

//go:embed page.html
var pageHTML string

var page = template.Must(template.New("page").Parse(pageHTML))

// policy of the page: it loads nothing, runs nothing, sends nothing, and takes its style
// only from the style sheet that was written with it.
func contentPolicy() string {
	sum := sha256.Sum256([]byte(pageCSS))
	return "default-src 'none'; img-src data:; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; base-uri 'none'; form-action 'none'"
}

// pageData is what the template is given.
type pageData struct {
	Policy, Title, Version, Command string
	Overall                         string
	CSS                             template.CSS
	Findings                        []pageFinding
}

type pageFinding struct {
	*Finding
	ID             string
	Number         int
	Word           string
	Title, Summary string
	Facts          []check.Fact
	Grids          []grid
	Relations      []pageRelation
	RuleRows       []pageRule
	Text           string // what cannot be drawn: laws that are broken, an error
	Smaller        bool   // the check ended before smaller cases had run
}

type pageRelation struct {
	Name, Says, Class, Outcome string
	Cases                      uint64
}

type pageRule struct {
	registry.RuleID
	ParamWords string
}

// HTML returns the report as one page that needs nothing else: no script, no request.
func HTML(r *Report) ([]byte, error) {
	d := pageData{Policy: contentPolicy(), Version: r.Version, Command: r.Command, Overall: Overall(r.Findings), CSS: template.CSS(pageCSS)}
	for i := range r.Findings {
		d.Findings = append(d.Findings, r.Findings[i].page(i+1))
	}
	d.Title = "tierd check: " + d.Overall
	if len(d.Findings) == 1 {
		d.Title += ", " + d.Findings[0].Title
	}
	var b bytes.Buffer
	if err := page.Execute(&b, &d); err != nil {
		return nil, fmt.Errorf("html: %w", err)
	}
	return bytes.Map(shown, b.Bytes()), nil
}

// shown returns the character that a page has for r. Names of files may hold bytes that are
// no text, and characters that HTML does not allow.
func shown(r rune) rune {
	if unicode.IsControl(r) && r != '\n' && r != '\t' {
		return utf8.RuneError
	}
	return r
}

// Overall is the verdict on several findings together: refused when one is, else undecided
// when one is.
func Overall(fs []Finding) string {
	worst := registry.Accepted
	for i := range fs {
		switch v := fs[i].Verdict.Verdict; {
		case v == registry.Refused, v == registry.Undecided && worst == registry.Accepted:
			worst = v
		}
	}
	return worst
}

func (f *Finding) page(n int) pageFinding {
	p := pageFinding{Finding: f, ID: fmt.Sprintf("f%d", n), Number: n, Word: f.Verdict.Verdict, Title: f.title(), Summary: f.summary()}
	if ce := f.Counterexample; ce != nil {
		p.Facts, p.Smaller = ce.Case(), len(f.Reached) > 0
		for i := range ce.Groups {
			if len(ce.Groups[i].Rows) > 0 {
				p.Grids = append(p.Grids, newGrid(n, i, &ce.Groups[i]))
			}
		}
	} else if f.Verdict.Verdict != registry.Accepted {
		if p.Text = strings.TrimSpace(f.Why + f.Undecided); p.Text == firstLine(p.Text) && len(f.Laws) == 0 {
			p.Text = "" // the summary says it
		}
	}
	if f.ran() {
		for _, name := range f.relations() {
			p.Relations = append(p.Relations, f.relation(name))
		}
	}
	for _, ru := range f.Rules {
		p.RuleRows = append(p.RuleRows, pageRule{ru, strings.TrimSpace(paramWords(ru.Params))})
	}
	return p
}

func (f *Finding) relation(name string) pageRelation {
	p := pageRelation{Name: name, Says: relationSays[name], Cases: f.Relations[name]}
	switch {
	case f.Counterexample != nil && f.Counterexample.Relation == name:
		p.Class, p.Outcome = "refused", "refused"
	case f.Verdict.Verdict != registry.Accepted:
		p.Class, p.Outcome = "open", "not finished"
	case p.Cases == 0:
		p.Class, p.Outcome = "open", "no case in the domain"
	default:
		p.Class, p.Outcome = "accepted", "holds"
	}
	return p
}

func paramWords(p map[string]uint64) string {
	if len(p) == 0 {
		return ""
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(p)) {
		parts = append(parts, fmt.Sprintf("%s: %d", k, p[k]))
	}
	return " {" + strings.Join(parts, ", ") + "}"
}
