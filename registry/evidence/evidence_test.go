package evidence

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/owenrumney/go-sarif/v3/pkg/report/v210/sarif"
	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
	"github.com/tierd/tierd/registry/stock"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), name)
}

func digest(b string) string { return "sha256:" + strings.Repeat(b, 32) }

// accepted is what a verdict looks like; its numbers are fixed, so that golden files change
// only when a format does.
func accepted() *registry.Verdict {
	return &registry.Verdict{
		Verdict: registry.Accepted, Model: "gpt-oss", Engine: "tierd", DeploymentDigest: digest("d1"), RulesDigest: digest("d2"), Checker: digest("d3"),
		Rules: []registry.RuleID{
			{For: "sliding", Ref: "./mine.wasm#mine", Name: "mine", Version: "1.0.0", Digest: digest("e1"), Source: "mine.wasm", Params: map[string]uint64{"window": 20, "extra": 0}},
			{For: "full", Ref: "full", Name: "full", Version: "1.0.0", Digest: digest("e2"), Source: "shipped"},
			{For: "policy", Ref: "request-level", Name: "request-level", Version: "1.0.0", Digest: digest("e2"), Source: "shipped"},
			{For: "policy", Ref: "request-level", Name: "request-level", Version: "1.0.0", Digest: digest("e2"), Source: "shipped"},
		},
		Domain:     check.Domain{PromptTokens: 256, PeriodTokens: 64, EdgeLengths: 9, EdgesFound: 9, Drawn: 3, Seed: 1, TableChunks: 6, Sweep: []string{"covers"}, Edges: []string{"pure"}, Tables: []string{"states"}},
		DomainText: []string{"every prompt length from 1 to 256: covers", "9 prompt lengths: pure"},
		Cases:      60, Relations: map[string]uint64{"pure": 10, "states": 20, "covers": 30, "warm": 0}, Seconds: 1.25, LoadSeconds: 0.5,
	}
}

func refused() *registry.Verdict {
	v := accepted()
	v.Verdict = registry.Refused
	v.Counterexample = &check.Counterexample{
		Relation: "covers", Group: "sliding", Why: "the consumer demands chunks that the producer never supplies", PromptTokens: 106, ResumeTokens: 105,
		Groups: []check.GroupRows{
			{Name: "sliding", ChunkTokens: 8, Rows: []check.RowOfRanges{
				{Name: "supply", Chunks: []check.Range{{First: 11, Last: 11}, {First: 13, Last: 13}}},
				{Name: "demand", Chunks: []check.Range{{First: 11, Last: 13}}},
				{Name: "missing", Chunks: []check.Range{{First: 12, Last: 12}}},
			}},
			{Name: "full", ChunkTokens: 16, Rows: []check.RowOfRanges{{Name: "supply", Chunks: []check.Range{{First: 0, Last: 6}}}, {Name: "demand", Chunks: []check.Range{{First: 0, Last: 6}}}}},
		},
	}
	return v
}

const file = `model: gpt-oss
max_tokens: 256
groups:
  - name: sliding
    rule: mine
  - {name: full, rule: full}
policies: [{rule: request-level}]
`

func finding(v *registry.Verdict) Finding {
	return Finding{Verdict: v, File: "deploy/a b.yaml", Lines: strictyaml.Lines([]byte(file)), Groups: []string{"sliding", "full"}}
}

// reports holds one report of each kind that tierd check can end with.
func reports() map[string]*Report {
	budget := accepted()
	budget.Verdict, budget.Undecided, budget.Reached = registry.Undecided, check.ErrBudget.Error(), []string{"pure: all 9 edge lengths", "states: the first 2 of 9 tables"}
	late := refused()
	late.Reached = []string{"covers: the first 200 of 256 prompt lengths"}
	pair := refused()
	pair.Counterexample.Relation = "pair"
	pair.Relations = map[string]uint64{"pair": 7}
	pair.Against = &registry.Side{File: "b.yaml", Model: "gpt-oss", Engine: "tierd", DeploymentDigest: digest("b1"), RulesDigest: digest("b2")}
	pair.Ways = []check.Way{
		{Producer: "a.yaml", Consumer: "b.yaml", Cases: 3},
		{Producer: "b.yaml", Consumer: "a.yaml", Cases: 4, Counterexample: pair.Counterexample, Probes: 9, Earlier: 2},
	}
	vllm := refused()
	vllm.Engine, vllm.UnverifiedNeed = "vllm-0.30", []string{"mine"}
	vllm.Domain.Seed, vllm.Domain.Drawn = 0, 0
	vllm.Counterexample.Group = "policy request-level"
	vllm.Counterexample.Groups = nil
	vllm.Counterexample.Facts = []check.Fact{{Name: "promotion", Value: "retry"}}
	vllm.Counterexample.Twice = &check.Twice{Call: "Reach of [0,2)", First: "{0}", Second: "{1}", How: "in another order", CallsSince: 1, After: []string{"Scan"}}
	rule := func(v *registry.Verdict, name string) Finding {
		v.Model, v.Engine, v.DeploymentDigest, v.Checker = name+" 1.0.0", "", "", ""
		return Finding{Verdict: v, File: "./rules.wasm#" + name, Rule: true}
	}
	law := rule(&registry.Verdict{Verdict: registry.Refused, Relations: map[string]uint64{}}, "lawless")
	law.Laws, law.Why = []string{"kept"}, "law kept: the tail at 64 needs chunk 7\nand chunk 8"
	drawn := rule(refused(), "b")
	drawn.Deployment = "model: tryout\nmax_tokens: 96\n"
	stuck := rule(&registry.Verdict{Verdict: registry.Undecided, Undecided: "parameter w is at least 5000"}, "long")
	all := map[string]*Report{
		"accepted": {Findings: []Finding{finding(accepted())}}, "refused": {Findings: []Finding{finding(refused())}},
		"budget": {Findings: []Finding{finding(budget)}}, "refused-late": {Findings: []Finding{finding(late)}},
		"error": {Findings: []Finding{Undecided("/etc/none.yaml", errors.New("there is no file"))}},
		"pair":  {Findings: []Finding{finding(pair)}}, "vllm": {Findings: []Finding{finding(vllm)}},
		"rules": {Findings: []Finding{rule(accepted(), "a"), drawn, law, stuck}},
	}
	for _, r := range all {
		r.Version, r.Command = "v1.2.3", "tierd check 'deploy/a b.yaml' --seed=1"
	}
	return all
}

// judged are real verdicts on a small deployment with each of the adversaries.
func judged(t *testing.T) (out []*registry.Verdict) {
	for _, a := range append(abitest.Adversaries(), abitest.Adversary{Wrap: func(s abi.Spec) abi.Spec { return s }}) {
		d, err := deploy.Parse("d.yaml", []byte(`
model: small
max_tokens: 100
align_tokens: 64
groups:
  - {name: sliding, rule: mine, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
policies: [{rule: request-level}]
`))
		require.NoError(t, err)
		open := func(_ context.Context, _, ref string) (registry.Opened, error) {
			s := a.Wrap(specs.Window())
			for _, shipped := range append(specs.All(), policy.All()...) {
				if shipped.Manifest().Name == ref {
					s = shipped
				}
			}
			return registry.Opened{Spec: s, Digest: digest("aa"), Source: "native"}, nil
		}
		e, err := registry.Register(context.Background(), d, open, registry.Options{Check: check.Options{Seed: 1}, Checker: digest("cc")})
		var refusal *registry.Refusal
		switch {
		case errors.As(err, &refusal):
			out = append(out, refusal.Verdict)
		case err == nil:
			out = append(out, e.Verdict)
		default:
			require.NoError(t, err)
		}
	}
	return out
}

// TestGolden holds each format of each kind of report against a file. HTML is held only for
// two: a browser reads the others, in host/e2e/page.
func TestGolden(t *testing.T) {
	for name, r := range reports() {
		junit, err := JUnit(r)
		require.NoError(t, err)
		golden(t, name+".junit.xml", junit)
		log, err := SARIF(r)
		require.NoError(t, err)
		golden(t, name+".sarif", log)
		page, err := HTML(r)
		require.NoError(t, err)
		if name == "refused" || name == "rules" {
			golden(t, name+".html", page)
		}
		if name == "pair" {
			require.Contains(t, string(page), "<li>producer a.yaml, consumer b.yaml: every demand is covered</li>")
			require.Contains(t, string(page), "</li><li>producer b.yaml, consumer a.yaml: REFUSED from prompts of ")
			require.Contains(t, string(page), "; in leg probe it resumes earlier, so it computes more, than with a producer of its own version for 2 of 9 prompt lengths</li>")
		}
		again, err := HTML(reports()[name])
		require.NoError(t, err)
		require.Equal(t, page, again, "the same report gives the same bytes")
	}
}

// A suiteXML is JUnit as a reader of it sees it, not as it is written here.
type suiteXML struct {
	Name     string    `xml:"name,attr"`
	Tests    int       `xml:"tests,attr"`
	Failures int       `xml:"failures,attr"`
	Errors   int       `xml:"errors,attr"`
	Skipped  int       `xml:"skipped,attr"`
	Cases    []caseXML `xml:"testcase"`
}

type caseXML struct {
	Name      string `xml:"name,attr"`
	ClassName string `xml:"classname,attr"`
	Time      string `xml:"time,attr"`
	Inner     []struct {
		XMLName xml.Name
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	} `xml:",any"`
}

// readJUnit parses a report, and checks what a schema of it would: known elements in the
// order that strict readers want, at most one outcome per case, and sums that are right.
func readJUnit(t *testing.T, data []byte) []suiteXML {
	t.Helper()
	var doc struct {
		XMLName  xml.Name   `xml:"testsuites"`
		Tests    int        `xml:"tests,attr"`
		Failures int        `xml:"failures,attr"`
		Errors   int        `xml:"errors,attr"`
		Skipped  int        `xml:"skipped,attr"`
		Suites   []suiteXML `xml:"testsuite"`
	}
	require.NoError(t, xml.Unmarshal(data, &doc))
	var all suiteXML
	for _, s := range doc.Suites {
		require.NotEmpty(t, s.Name)
		require.Len(t, s.Cases, s.Tests)
		names := map[string]bool{}
		sums := map[string]int{}
		for _, c := range s.Cases {
			require.NotEmpty(t, c.ClassName)
			require.NotEmpty(t, c.Time)
			require.False(t, names[c.Name], "a case is there once")
			names[c.Name] = true
			outcomes := 0
			for i, x := range c.Inner {
				switch k := x.XMLName.Local; k {
				case "properties":
					require.Zero(t, i, "properties come first")
				case "skipped", "failure", "error":
					outcomes++
					sums[k]++
					require.NotEmpty(t, x.Message)
				default:
					t.Errorf("element %s is not known", k)
				}
			}
			require.LessOrEqual(t, outcomes, 1)
		}
		require.Equal(t, map[string]int{"failure": s.Failures, "error": s.Errors, "skipped": s.Skipped},
			map[string]int{"failure": sums["failure"], "error": sums["error"], "skipped": sums["skipped"]})
		all.Tests, all.Failures, all.Errors, all.Skipped = all.Tests+s.Tests, all.Failures+s.Failures, all.Errors+s.Errors, all.Skipped+s.Skipped
	}
	require.Equal(t, []int{all.Tests, all.Failures, all.Errors, all.Skipped}, []int{doc.Tests, doc.Failures, doc.Errors, doc.Skipped})
	return doc.Suites
}

// validSARIF checks a log against the official schema, and that the library, which knows
// every property of it, loses none on the way.
func validSARIF(t *testing.T, data []byte) *sarif.Report {
	t.Helper()
	r, err := sarif.FromBytes(data)
	require.NoError(t, err)
	for _, run := range r.Runs { // the library writes these empty where the schema has a default
		require.Empty(t, run.Language+run.Tool.Driver.Language+strings.Join(run.NewlineSequences, ""))
		run.Language, run.Tool.Driver.Language, run.NewlineSequences = "en-US", "en-US", []string{"\r\n", "\n"}
	}
	require.NoError(t, r.Validate())
	again, err := json.Marshal(r)
	require.NoError(t, err)
	var want, got any
	require.NoError(t, json.Unmarshal(data, &want))
	require.NoError(t, json.Unmarshal(again, &got))
	lost(t, "", want, got)
	for _, run := range r.Runs {
		for _, x := range run.Results {
			require.Equal(t, *x.RuleID, *run.Tool.Driver.Rules[x.RuleIndex].ID)
			require.Equal(t, x.Kind == "fail", x.Level != "none", "only what fails has a level")
			require.NotEmpty(t, x.PartialFingerprints)
		}
	}
	return r
}

// lost reports what is in want and not in got. The library adds defaults.
func lost(t *testing.T, at string, want, got any) {
	t.Helper()
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		require.True(t, ok, at)
		for k := range w {
			if _, there := g[k]; !there && (w[k] == false || w[k] == 0.0) {
				continue // a default
			}
			lost(t, at+"."+k, w[k], g[k])
		}
	case []any:
		g, _ := got.([]any)
		require.Len(t, g, len(w), at)
		for i := range w {
			lost(t, fmt.Sprintf("%s[%d]", at, i), w[i], g[i])
		}
	default:
		require.Equal(t, want, got, at)
	}
}

// TestReports: what each format says of each kind of report, and of real verdicts.
func TestReports(t *testing.T) {
	all := reports()
	for i, v := range judged(t) {
		all[fmt.Sprint("judged ", i, " ", v.Verdict)] = &Report{Version: "v1", Findings: []Finding{finding(v)}}
	}
	seen := map[string]int{}
	for name, r := range all {
		t.Run(name, func(t *testing.T) {
			data, err := JUnit(r)
			require.NoError(t, err)
			suites := readJUnit(t, data)
			require.Len(t, suites, len(r.Findings))
			log, err := SARIF(r)
			require.NoError(t, err)
			run := validSARIF(t, log).Runs[0]
			results := 0
			for i := range r.Findings {
				f, s := &r.Findings[i], suites[i]
				seen[f.Verdict.Verdict]++
				switch f.Verdict.Verdict {
				case registry.Accepted:
					require.Zero(t, s.Failures+s.Errors)
					require.Positive(t, s.Tests-s.Skipped)
					continue
				case registry.Refused:
					require.Equal(t, []int{1, 0}, []int{s.Failures, s.Errors})
					require.Equal(t, 1, s.Tests-s.Skipped, "what was not run to its end does not pass")
					require.Equal(t, "error", run.Results[results].Level)
				case registry.Undecided:
					require.Equal(t, []int{0, 1}, []int{s.Failures, s.Errors}, "a CI that counts is not green")
					require.Equal(t, "open", run.Results[results].Kind)
					require.False(t, *run.Invocations[0].ExecutionSuccessful)
				}
				if f.Counterexample != nil {
					require.Equal(t, f.Counterexample.Relation, *run.Results[results].RuleID)
					require.Contains(t, string(log), f.Counterexample.Group)
					failed := slices.IndexFunc(s.Cases, func(c caseXML) bool { return c.Name == f.Counterexample.Relation })
					require.Contains(t, s.Cases[failed].Inner[1].Text, f.Counterexample.String(), "the drawing is whole")
				}
				results++
			}
			require.Len(t, run.Results, results)
		})
	}
	require.Greater(t, seen[registry.Refused], 5)
	require.Greater(t, seen[registry.Accepted], 1)
}

// The line is that of the group that failed; the path is a reference.
func TestSARIFLocation(t *testing.T) {
	at := func(f Finding) (uri string, line *int) {
		data, err := SARIF(&Report{Findings: []Finding{f}})
		require.NoError(t, err)
		p := validSARIF(t, data).Runs[0].Results[0].Locations[0].PhysicalLocation
		if p.Region != nil {
			line = p.Region.StartLine
		}
		return *p.ArtifactLocation.URI, line
	}
	f := finding(refused())
	uri, line := at(f)
	require.Equal(t, "deploy/a%20b.yaml", uri)
	require.Equal(t, 4, *line)
	f.Counterexample.Group = "full"
	_, line = at(f)
	require.Equal(t, 6, *line)
	f.Counterexample.Group = "policy request-level"
	_, line = at(f)
	require.Equal(t, 7, *line)
	f.Lines, f.File = nil, "/etc/tierd/d.yaml"
	uri, line = at(f)
	require.Equal(t, "file:///etc/tierd/d.yaml", uri)
	require.Nil(t, line)
	f.Rule, f.File = true, "exec:./my-rule#x"
	uri, _ = at(f)
	require.Equal(t, "my-rule", uri)
}

// A fingerprint stays when the case changes, and differs between groups and relations.
func TestSARIFFingerprint(t *testing.T) {
	print := func(change func(*check.Counterexample)) string {
		f := finding(refused())
		change(f.Counterexample)
		data, err := SARIF(&Report{Findings: []Finding{f}})
		require.NoError(t, err)
		return validSARIF(t, data).Runs[0].Results[0].PartialFingerprints["tierdFinding/v1"]
	}
	same := print(func(*check.Counterexample) {})
	require.Equal(t, same, print(func(ce *check.Counterexample) { ce.PromptTokens++ }))
	require.NotEqual(t, same, print(func(ce *check.Counterexample) { ce.Group = "full" }))
	require.NotEqual(t, same, print(func(ce *check.Counterexample) { ce.Relation = "needs" }))
}

// What a name may hold, no format takes for its own.
func TestHostileNames(t *testing.T) {
	const evil = "]]>&<script>alert(1)</script>\"'\x00\x1b[31m\xff\U0001F600{{.}}"
	v := refused()
	v.Model, v.Counterexample.Group, v.Counterexample.Why, v.Rules[0].Name, v.DomainText[0] = evil, evil, evil, evil, evil
	v.Counterexample.Groups[0].Name, v.Counterexample.Groups[0].Rows[0].Name = evil, evil
	f := finding(v)
	f.File, f.Deployment, f.Reached = evil, evil, []string{evil}
	r := &Report{Version: evil, Command: evil, Findings: []Finding{f}}
	data, err := JUnit(r)
	require.NoError(t, err)
	require.Contains(t, readJUnit(t, data)[0].Name, "]]>&<script>alert(1)</script>")
	log, err := SARIF(r)
	require.NoError(t, err)
	validSARIF(t, log)
	page, err := HTML(r)
	require.NoError(t, err)
	require.NotContains(t, string(page), "<script")
	require.Contains(t, string(page), "&lt;script&gt;")
	require.True(t, utf8.Valid(page))
	require.NotContains(t, string(page), "\x1b")
}

func TestPaint(t *testing.T) {
	v := refused()
	text := "REFUSED  gpt-oss\n\n" + v.Counterexample.String() + "\n  rules  x\nREFUSED is a word\nACCEPTED  b\nUNDECIDED  c: why"
	painted := Paint(text)
	require.Equal(t, text, strings.NewReplacer(red, "", green, "", yellow, "", plain, "").Replace(painted), "colours alone are added")
	for _, want := range []string{red + "REFUSED" + plain + "  gpt-oss\n", red + "    missing", green + "ACCEPTED" + plain, yellow + "UNDECIDED" + plain + "  c: why", "\nREFUSED is a word\n",
		red + "refused by relation covers"} {
		require.Contains(t, painted, want)
	}
	require.Equal(t, 3, strings.Count(painted, red), "verdict, sentence, row")
}

// TestGrid: however many chunks there are, each missing one is in a column of its own with
// its name, a row's cells say what the sets hold, and the table stays readable.
func TestGrid(t *testing.T) {
	for _, missing := range [][]check.Range{{{First: 0, Last: 0}}, {{First: 8191, Last: 8191}}, {{First: 4000, Last: 4000}, {First: 4002, Last: 4009}}, everyThird()} {
		var stripes []check.Range
		for k := uint32(1); k < 8190; k += 2 {
			stripes = append(stripes, check.Range{First: k, Last: k})
		}
		g := newGrid(1, 0, &check.GroupRows{Name: "g", ChunkTokens: 16, Rows: []check.RowOfRanges{
			{Name: "supply", Chunks: stripes}, {Name: "demand", Chunks: []check.Range{{First: 0, Last: 8191}}}, {Name: "missing", Chunks: missing}}})
		require.LessOrEqual(t, len(g.Columns), columnsMax+3*brokenRunsMax)
		next := uint32(0)
		for _, c := range g.Columns {
			require.Equal(t, next, c.First, "columns follow on each other")
			next = c.Last + 1
		}
		require.EqualValues(t, 8192, next)
		for i, r := range missing {
			if i == brokenRunsMax {
				break
			}
			require.True(t, slices.ContainsFunc(g.Broken, func(b broken) bool {
				return strings.HasPrefix(b.Says, fmt.Sprintf("chunk %d, tokens %d to ", r.First, r.First*16))
			}) ||
				slices.ContainsFunc(g.Columns, func(c column) bool { return c.Range == r && c.Broken }) || r.Last > r.First, "%v", r)
		}
		counted := uint64(0)
		for i, c := range g.Columns {
			require.Equal(t, overlap(missing, c.Range) > 0, g.Rows[2].Cells[i].ID != "")
			counted += overlap(stripes, c.Range)
		}
		require.EqualValues(t, len(stripes), counted)
	}
	g := newGrid(1, 0, &check.GroupRows{Name: "g", ChunkTokens: 8, Rows: []check.RowOfRanges{{Name: "missing", Chunks: []check.Range{{First: 12, Last: 12}}}}})
	require.Len(t, g.Columns, 13)
	require.Equal(t, []broken{{"f1-g0-missing-12", "chunk 12, tokens 96 to 103: missing"}}, g.Broken)
	empty := newGrid(1, 0, &check.GroupRows{Name: "g", ChunkTokens: 8, Rows: []check.RowOfRanges{{Name: "supply"}}})
	require.Empty(t, empty.Columns)
}

func everyThird() (out []check.Range) {
	for k := uint32(0); k < 8192; k += 3 {
		out = append(out, check.Range{First: k, Last: k})
	}
	return out
}

// A SARIF rule says what its relation promises, whichever check has it.
func TestEveryRelationIsSaid(t *testing.T) {
	for _, names := range [][]string{check.Relations, stock.Relations, {check.PairRelation}} {
		for _, name := range names {
			log, err := SARIF(&Report{Findings: []Finding{{Verdict: &registry.Verdict{
				Verdict: registry.Accepted, Relations: map[string]uint64{name: 1}}}}})
			require.NoError(t, err)
			require.NotContains(t, string(log), "Relation "+name+" holds.")
		}
	}
}
