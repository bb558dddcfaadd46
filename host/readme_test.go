package host_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The rule that the README shows is the one that is tested.
func TestReadmeShowsTheExample(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root(t), "README.md"))
	require.NoError(t, err)
	example, err := os.ReadFile(filepath.Join(root(t), "examples", "rule-go", "window.go"))
	require.NoError(t, err)
	_, code, found := strings.Cut(string(readme), "```go\n")
	require.True(t, found)
	code, _, found = strings.Cut(code, "```")
	require.True(t, found)
	require.True(t, strings.HasSuffix(string(example), code), "README.md and examples/rule-go/window.go differ")
}
