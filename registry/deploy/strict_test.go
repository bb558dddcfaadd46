package deploy_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/deploy"
)

// TestWhatAFileMayNotHide: a second document, or names and numbers that no rule and no
// terminal should see.
func TestWhatAFileMayNotHide(t *testing.T) {
	file := func(head, name string) []byte {
		return []byte(head + "\nmax_tokens: 300\ngroups:\n  - {name: " + name + ", rule: full, block_tokens: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}\n")
	}
	_, err := deploy.Parse("d.yaml", file("model: x", "full"))
	require.NoError(t, err)
	for _, c := range []struct {
		data []byte
		want string
	}{
		{append(file("model: x", "full"), "---\nbogus: 1\n"...), "d.yaml:5: a second document begins"},
		{append(file("model: x", "full"), "...\n]}\n"...), "not valid YAML"},
		{file(`model: "\e[31mx"`, "full"), `model is "\x1b[31mx"`},
		{file("model: x", `"a\nb"`), `name is "a\nb"`},
		{file("model: x\nalign_tokens: 4294967296", "full"), "align_tokens is 4294967296; it must be at most 2147483648"},
	} {
		_, err := deploy.Parse("d.yaml", c.data)
		require.ErrorContains(t, err, c.want)
	}
}
