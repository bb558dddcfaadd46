package e2e

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// reports holds the reports of the n-th check of a job against what came of it.
func (j *job) reports(n string, refused bool) {
	j.t.Helper()
	junit, err := os.ReadFile(filepath.Join(j.dir, "tierd-reports", n+".xml"))
	require.NoError(j.t, err)
	failures := 0
	for d := xml.NewDecoder(bytes.NewReader(junit)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(j.t, err, string(junit))
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "failure" {
			failures++
		}
	}
	require.Equal(j.t, refused, failures > 0, string(junit))
	data, err := os.ReadFile(filepath.Join(j.dir, "tierd-reports", n+".sarif"))
	require.NoError(j.t, err)
	var sarif struct {
		Version string
		Runs    []struct{ Results []struct{ Level string } }
	}
	require.NoError(j.t, json.Unmarshal(data, &sarif))
	require.Equal(j.t, "2.1.0", sarif.Version)
	require.Len(j.t, sarif.Runs, 1)
	level := ""
	for _, r := range sarif.Runs[0].Results {
		level += r.Level
	}
	require.Equal(j.t, refused, strings.Contains(level, "error"), string(data))
}

// ciCases are what a job may be given, and how it ends. Each line is judged, whatever came of
// those before it, and a refusal counts more than a file that cannot be judged.
var ciCases = []struct {
	checks  string
	status  int
	refused []bool // of each report
	said    []string
}{
	{"deployment.yaml\n", 0, []bool{false}, []string{"tierd check deployment.yaml", "ACCEPTED  good"}},
	{"deployment-refused.yaml", 1, []bool{true}, []string{"REFUSED  gpt-oss-120b", "missing"}},
	{"  deployment-refused.yaml  --seed 3\n\nnone.yaml\ndeployment.yaml --seed 4\n", 1, nil, []string{"REFUSED  gpt-oss-120b", `there is no file "none.yaml"`, "ACCEPTED  good"}},
	{"none*.yaml", 2, nil, []string{`there is no file "none*.yaml"`}},
	{"\n", 2, nil, []string{"nothing to judge"}},
}

// TestActionChecks runs the step that checks.
func TestActionChecks(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	require.NoError(t, program())
	for _, c := range ciCases {
		j := newJob(t)
		j.path = filepath.Dir(tierd) + ":" + j.path
		status, out := j.step("check", map[string]string{"checks": c.checks})
		j.judged(c.status, c.refused, c.said, status, out)
	}
}

// TestGitLabChecks runs the job's script in the shells that a runner may have.
func TestGitLabChecks(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	require.NoError(t, program())
	for i, c := range ciCases {
		j := newJob(t)
		j.path = filepath.Dir(tierd) + ":" + j.path
		status, out := j.gitlab([]string{"sh", "bash"}[i%2], map[string]string{"TIERD_CHECKS": c.checks}, func(g *gitlabJob) []string { return g.Script })
		j.judged(c.status, c.refused, c.said, status, out)
	}
}

func (j *job) judged(want int, refused []bool, said []string, status int, out string) {
	j.t.Helper()
	require.Equal(j.t, want, status, out)
	for _, s := range said {
		require.Contains(j.t, out, s)
	}
	for i, r := range refused {
		j.reports(string(rune('1'+i)), r)
	}
}
