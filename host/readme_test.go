package host_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// readme returns the README, and a fenced block of it in the given language.
func readme(t *testing.T, language string) (text, block string) {
	b, err := os.ReadFile(filepath.Join(root(t), "README.md"))
	require.NoError(t, err)
	_, block, found := strings.Cut(string(b), "```"+language+"\n")
	require.True(t, found)
	block, _, found = strings.Cut(block, "```")
	require.True(t, found)
	return string(b), block
}

// The rule that the README shows is the one that is tested.
func TestReadmeShowsTheExample(t *testing.T) {
	_, code := readme(t, "go")
	example, err := os.ReadFile(filepath.Join(root(t), "examples", "rule-go", "window.go"))
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(string(example), code), "README.md and examples/rule-go/window.go differ")
}

// So is the deployment, and the lines of go.mod that a copy must change are there.
func TestReadmeShowsHowToCopyTheExample(t *testing.T) {
	text, deployment := readme(t, "yaml")
	example, err := os.ReadFile(filepath.Join(root(t), "examples", "rule-go", "deployment.yaml"))
	require.NoError(t, err)
	require.Equal(t, string(example), deployment)
	mod, err := os.ReadFile(filepath.Join(root(t), "examples", "rule-go", "go.mod"))
	require.NoError(t, err)
	for _, line := range strings.Split(string(mod), "\n") {
		if strings.HasPrefix(line, "module ") || strings.HasPrefix(line, "replace ") {
			require.Contains(t, text, "`"+line+"`")
		}
	}
}

// Every file that the README names exists.
func TestReadmeNamesFilesThatExist(t *testing.T) {
	text, _ := readme(t, "go")
	names := regexp.MustCompile(`examples/[a-z0-9_/.-]*[a-z0-9]`).FindAllString(text, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		_, err := os.Stat(filepath.Join(root(t), name))
		require.NoError(t, err, name)
	}
}
