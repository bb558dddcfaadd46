package evidence

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/tierd/tierd/registry"
)

// sarifSchema names the schema that the log follows.
const sarifSchema = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

// home is where the program's documentation is.
const home = "https://github.com/tierd/tierd"

// The objects of SARIF 2.1.0 that are written, with the names of its section 3.
type (
	sarifLog struct {
		Schema  string     `json:"$schema"`
		Version string     `json:"version"`
		Runs    []sarifRun `json:"runs"`
	}
	sarifRun struct {
		Tool        sarifTool         `json:"tool"`
		Invocations []sarifInvocation `json:"invocations"`
		Results     []sarifResult     `json:"results"`
		Properties  map[string]any    `json:"properties,omitempty"`
	}
	sarifTool struct {
		Driver sarifDriver `json:"driver"`
	}
	sarifDriver struct {
		Name           string      `json:"name"`
		Version        string      `json:"version,omitempty"`
		InformationURI string      `json:"informationUri"`
		Rules          []sarifRule `json:"rules"`
	}
	sarifRule struct {
		ID               string       `json:"id"`
		Name             string       `json:"name"`
		ShortDescription sarifText    `json:"shortDescription"`
		Default          sarifDefault `json:"defaultConfiguration"`
	}
	sarifDefault struct {
		Level string `json:"level"`
	}
	sarifText struct {
		Text string `json:"text"`
	}
	sarifInvocation struct {
		CommandLine         string              `json:"commandLine,omitempty"`
		ExecutionSuccessful bool                `json:"executionSuccessful"`
		ExitCode            int                 `json:"exitCode"`
		Notifications       []sarifNotification `json:"toolExecutionNotifications,omitempty"`
	}
	sarifNotification struct {
		Level     string          `json:"level"`
		Message   sarifText       `json:"message"`
		Locations []sarifLocation `json:"locations,omitempty"`
	}
	sarifResult struct {
		RuleID              string            `json:"ruleId"`
		RuleIndex           int               `json:"ruleIndex"`
		Kind                string            `json:"kind"`
		Level               string            `json:"level"`
		Message             sarifText         `json:"message"`
		Locations           []sarifLocation   `json:"locations"`
		PartialFingerprints map[string]string `json:"partialFingerprints"`
	}
	sarifLocation struct {
		Physical sarifPhysical  `json:"physicalLocation"`
		Logical  []sarifLogical `json:"logicalLocations,omitempty"`
	}
	sarifPhysical struct {
		Artifact sarifArtifact `json:"artifactLocation"`
		Region   *sarifRegion  `json:"region,omitempty"`
	}
	sarifArtifact struct {
		URI string `json:"uri"`
	}
	sarifRegion struct {
		StartLine int `json:"startLine"`
	}
	sarifLogical struct {
		Name               string `json:"name"`
		FullyQualifiedName string `json:"fullyQualifiedName"`
		Kind               string `json:"kind"`
	}
)

// Rules of a log besides the relations.
const (
	ruleLaw       = "law"
	ruleUndecided = "undecided"
)

// relationSays is what each relation promises, as package check says it.
var relationSays = map[string]string{
	"pure":        "The same call gives the same answer: again, on a fresh instance, in another order, between other calls, for any split.",
	"states":      "The laws on lookup states hold: retry, pending, more hits.",
	"covers":      "What a consumer demands, the producer supplies.",
	"needs":       "What attention reads is in the demand or local, and need is what the mask says.",
	"caps":        "Limits and policies of one side are known to, or harmless for, the other.",
	"content":     "The KV of a stored chunk does not depend on where the prompt ended.",
	"useful":      "What was stored can be used.",
	"schedule":    "The supply does not depend on how the prompt is split into steps, and an abort keeps the aligned tails.",
	"warm":        "A producer whose GPU or tier already holds a prefix supplies as much.",
	"width":       "No more is fetched or stored than attention reads, and the rule claims.",
	"pair":        "What consumers of one version demand, producers of the other supply.",
	"cascade":     "A chunk that another request is writing is supplied all the same.",
	ruleLaw:       "A rule keeps the laws of the contract alone.",
	ruleUndecided: "The check came to a verdict.",
}

// SARIF returns the report as a SARIF 2.1.0 log with one run: a result for each refusal, at
// the line of the group in the deployment file, and for each finding that is undecided a
// result of kind "open", which fails nothing, beside a notification that does.
func SARIF(r *Report) ([]byte, error) {
	run := sarifRun{Results: []sarifResult{}, Properties: map[string]any{}}
	ids := []string{}
	for i := range r.Findings {
		for _, name := range r.Findings[i].relations() {
			if !slices.Contains(ids, name) {
				ids = append(ids, name)
			}
		}
	}
	ids = append(ids, ruleLaw, ruleUndecided)
	driver := sarifDriver{Name: "tierd", Version: r.Version, InformationURI: home}
	for _, id := range ids {
		says := relationSays[id]
		if says == "" {
			says = "Relation " + id + " holds."
		}
		driver.Rules = append(driver.Rules, sarifRule{ID: id, Name: id, ShortDescription: sarifText{says}, Default: sarifDefault{"error"}})
	}
	run.Tool.Driver = driver
	invocation := sarifInvocation{CommandLine: r.Command, ExecutionSuccessful: true}
	findings := []map[string]string{}
	for i := range r.Findings {
		f := &r.Findings[i]
		facts := map[string]string{"subject": f.title()}
		for _, p := range f.properties(r) {
			if before := facts[p[0]]; before != "" { // a line of the domain, another policy
				p[1] = before + "; " + p[1]
			}
			facts[p[0]] = p[1]
		}
		findings = append(findings, facts)
		switch f.Verdict.Verdict {
		case registry.Refused:
			run.Results = append(run.Results, f.sarif(ids))
			invocation.ExitCode = 1
		case registry.Undecided:
			run.Results = append(run.Results, f.sarif(ids))
			invocation.ExecutionSuccessful = false
			invocation.Notifications = append(invocation.Notifications,
				sarifNotification{"error", sarifText{f.sarifMessage()}, []sarifLocation{f.sarifLocation()}})
		}
	}
	if invocation.ExitCode == 0 && !invocation.ExecutionSuccessful {
		invocation.ExitCode = 2
	}
	run.Invocations, run.Properties["findings"] = []sarifInvocation{invocation}, findings
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	if err := enc.Encode(sarifLog{sarifSchema, "2.1.0", []sarifRun{run}}); err != nil {
		return nil, fmt.Errorf("sarif: %w", err)
	}
	return b.Bytes(), nil
}

func (f *Finding) sarif(ids []string) sarifResult {
	res := sarifResult{RuleID: ruleLaw, Kind: "fail", Level: "error", Message: sarifText{f.sarifMessage()},
		Locations: []sarifLocation{f.sarifLocation()}}
	group := ""
	switch {
	case f.Verdict.Verdict == registry.Undecided: // any level but none says that it failed
		res.RuleID, res.Kind, res.Level = ruleUndecided, "open", "none"
	case f.Counterexample != nil:
		res.RuleID, group = f.Counterexample.Relation, f.Counterexample.Group
	}
	res.RuleIndex = slices.Index(ids, res.RuleID)
	// Not the lengths of the case: the same mistake stays the same alert when the file
	// changes elsewhere.
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %q", f.title(), f.path(), res.RuleID, group))
	res.PartialFingerprints = map[string]string{"tierdFinding/v1": hex.EncodeToString(sum[:])}
	return res
}

func (f *Finding) sarifMessage() string {
	summary := f.summary()
	first, rest, _ := strings.Cut(f.details(), "\n")
	if !strings.HasSuffix(summary, first) {
		rest = "\n" + f.details()
	}
	return strings.TrimSpace(f.title() + " is " + summary + "\n" + rest)
}

func (f *Finding) sarifLocation() sarifLocation {
	l := sarifLocation{Physical: sarifPhysical{Artifact: sarifArtifact{fileURI(f.path())}}}
	if line := f.line(); line > 0 {
		l.Physical.Region = &sarifRegion{line}
	}
	if f.Counterexample != nil {
		l.Logical = []sarifLogical{{Name: f.Counterexample.Group, FullyQualifiedName: f.Model + "/" + f.Counterexample.Group, Kind: "object"}}
	}
	return l
}

// fileURI is a reference to a file: relative, as a code host wants it, or file:///.
func fileURI(p string) string {
	if path.IsAbs(p) {
		return (&url.URL{Scheme: "file", Path: p}).String()
	}
	return (&url.URL{Path: p}).String()
}
