package e2e

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// goodDeployment is judged in a second, and accepted.
const goodDeployment = `
model: good
max_tokens: 300
align_tokens: 64
groups:
  - {name: sliding, rule: window, params: {window: 20}, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: full, rule: full, block_tokens: 4, chunk_blocks: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
policies: [{rule: request-level}]
`

// A job is a directory as a CI gives it to a job, with a deployment that is accepted and one
// that is refused, and the environment that its steps share.
type job struct {
	t    *testing.T
	dir  string
	path string // of programs, as earlier steps left it
}

func newJob(t *testing.T) *job {
	j := &job{t: t, dir: t.TempDir(), path: os.Getenv("PATH")}
	require.NoError(t, os.WriteFile(filepath.Join(j.dir, "deployment.yaml"), []byte(goodDeployment), 0o600))
	refused, err := os.ReadFile(demo("refused/chunk-level-producer.yaml"))
	require.NoError(t, err)
	short := strings.Replace(string(refused), "max_tokens: 131072", "max_tokens: 600", 1) // sooner refused
	require.NotEqual(t, string(refused), short)
	require.NoError(t, os.WriteFile(filepath.Join(j.dir, "deployment-refused.yaml"), []byte(short), 0o600))
	return j
}

// run runs a command in the directory, and returns its status and what it printed.
func (j *job) run(env map[string]string, command ...string) (status int, out string) {
	j.t.Helper()
	cmd := exec.CommandContext(j.t.Context(), command[0], command[1:]...)
	cmd.Dir = j.dir
	cmd.Env = append(os.Environ(), "PATH="+j.path)
	for _, k := range slices.Sorted(maps.Keys(env)) {
		cmd.Env = append(cmd.Env, k+"="+env[k])
	}
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		j.t.Fatalf("%s: %v", command[0], err)
	}
	return cmd.ProcessState.ExitCode(), string(b)
}

// ciFile reads a file of the repository as YAML.
func ciFile(t *testing.T, into any, path ...string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{repo()}, path...)...))
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(b, into))
}

// An action is what action.yml says.
type action struct {
	Inputs map[string]struct {
		Description, Default string
		Required             bool
	}
	Runs struct {
		Using string
		Steps []struct {
			Name, Shell, Run, Uses string
			If                     string
			Env, With              map[string]string
		}
	}
}

// expression is what GitHub puts a value for.
var expression = regexp.MustCompile(`\$\{\{ ([a-z_.]+) \}\}`)

// step runs a step of the action as GitHub does, with what a workflow gives for inputs.
func (j *job) step(name string, inputs map[string]string) (status int, out string) {
	j.t.Helper()
	var a action
	ciFile(j.t, &a, "examples", "ci", "action.yml")
	require.Equal(j.t, "composite", a.Runs.Using)
	known := map[string]string{"github.action_path": filepath.Join(repo(), "examples", "ci"), "runner.temp": filepath.Join(j.dir, "temp")}
	for k, in := range a.Inputs {
		require.NotEmpty(j.t, in.Description, k)
		known["inputs."+k] = in.Default
	}
	for k, v := range inputs {
		require.Contains(j.t, a.Inputs, k)
		known["inputs."+k] = v
	}
	for _, s := range a.Runs.Steps {
		if s.Name != name {
			continue
		}
		require.Equal(j.t, "bash", s.Shell)
		require.NotContains(j.t, s.Run, "${{", "what a workflow gives would be run as a command")
		added := filepath.Join(j.dir, "added-path")
		env := map[string]string{"GITHUB_PATH": added}
		for k, v := range s.Env {
			env[k] = expression.ReplaceAllStringFunc(v, func(e string) string {
				value, ok := known[expression.FindStringSubmatch(e)[1]]
				require.True(j.t, ok, e)
				return value
			})
		}
		script := filepath.Join(j.dir, "step.sh")
		require.NoError(j.t, os.WriteFile(script, []byte(s.Run), 0o600))
		status, out = j.run(env, "bash", "--noprofile", "--norc", "-eo", "pipefail", script)
		if b, err := os.ReadFile(added); err == nil {
			j.path = strings.TrimSpace(string(b)) + ":" + j.path
			require.NoError(j.t, os.Remove(added))
		}
		return status, out
	}
	j.t.Fatalf("action.yml has no step %q", name)
	return 0, ""
}

// TestActionBuilds: the step that builds leaves a tierd for the steps after it, from the
// action's own checkout and from another.
func TestActionBuilds(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	for _, inputs := range []map[string]string{nil, {"source": repo()}} {
		j := newJob(t)
		status, out := j.step("build tierd", inputs)
		require.Zero(t, status, out)
		status, out = j.run(nil, "sh", "-c", "command -v tierd && tierd version")
		require.Zero(t, status, out)
		require.Contains(t, out, filepath.Join(j.dir, "temp", "tierd-bin", "tierd"))
	}
	status, _ := newJob(t).step("build tierd", map[string]string{"source": "none"})
	require.NotZero(t, status)
}

// A gitlabJob is what gitlab-ci.yml says of its one job.
type gitlabJob struct {
	Variables            map[string]string
	BeforeScript, Script []string
}

func (g *gitlabJob) UnmarshalYAML(n *yaml.Node) error {
	var v struct {
		Variables    map[string]string
		BeforeScript []string `yaml:"before_script"`
		Script       []string
	}
	err := n.Decode(&v)
	*g = gitlabJob{v.Variables, v.BeforeScript, v.Script}
	return err
}

// gitlab runs those of the job's commands that script picks, in one shell, as GitLab does.
func (j *job) gitlab(shell string, variables map[string]string, script func(g *gitlabJob) []string) (status int, out string) {
	j.t.Helper()
	var file map[string]*gitlabJob
	ciFile(j.t, &file, "examples", "ci", "gitlab-ci.yml")
	g := file["tierd-check"]
	require.NotNil(j.t, g)
	env := map[string]string{"CI_PROJECT_DIR": j.dir}
	maps.Copy(env, g.Variables)
	for k := range variables {
		require.Contains(j.t, g.Variables, k)
	}
	maps.Copy(env, variables)
	return j.run(env, shell, "-ec", strings.Join(script(g), "\n"))
}

// TestGitLabBuilds: the job builds tierd from a checkout.
func TestGitLabBuilds(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	j := newJob(t)
	status, out := j.gitlab("sh", map[string]string{"TIERD_SOURCE": repo()}, func(g *gitlabJob) []string {
		return append(g.BeforeScript, "command -v tierd", "tierd version")
	})
	require.Zero(t, status, out)
	require.Contains(t, out, filepath.Join(j.dir, ".tierd-bin", "tierd"))
}

// TestPreCommitHook runs the hook's entry as pre-commit does: split into words by the rules
// of a shell, and followed by the names of files.
func TestPreCommitHook(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	require.NoError(t, program())
	var hooks []struct {
		ID, Entry, Files, Language string
		Types                      []string
		RequireSerial              bool `yaml:"require_serial"`
	}
	ciFile(t, &hooks, ".pre-commit-hooks.yaml")
	require.Len(t, hooks, 1)
	h := hooks[0]
	require.Equal(t, "tierd-check", h.ID)
	require.Equal(t, "golang", h.Language)
	files := regexp.MustCompile(h.Files)
	for name, want := range map[string]bool{"deployment.yaml": true, "a/deployment-refused.yml": true, "node.yaml": false, "my-deployment.yaml": false, "deployment.go": false} {
		require.Equal(t, want, files.MatchString(name), name)
	}
	j := newJob(t)
	j.path = filepath.Dir(tierd) + ":" + j.path
	hook := func(names ...string) (int, string) {
		return j.run(nil, append([]string{"sh", "-c", h.Entry + ` "$@"`, "pre-commit"}, names...)...)
	}
	status, out := hook("deployment.yaml")
	require.Zero(t, status, out)
	require.Contains(t, out, "ACCEPTED  good")
	status, out = hook("deployment-refused.yaml", "none.yaml", "deployment.yaml")
	require.Equal(t, 1, status, out)
	require.Contains(t, out, "REFUSED  gpt-oss-120b")
	require.Contains(t, out, `there is no file "none.yaml"`)
	require.Contains(t, out, "ACCEPTED  good")
	status, out = hook("none.yaml", "deployment.yaml")
	require.Equal(t, 2, status, out)
}
