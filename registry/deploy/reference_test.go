package deploy

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReference: the table in README.md has a row for every key that the parser knows, and for no
// other, with the defaults that Parse fills in.
func TestReference(t *testing.T) {
	var keys func(v reflect.Type, path string) []string
	keys = func(v reflect.Type, path string) (out []string) {
		for i := range v.NumField() {
			f := v.Field(i)
			name := f.Tag.Get("yaml")
			if name == "" {
				continue
			}
			out = append(out, path+name)
			if f.Type == reflect.TypeFor[[]Group]() {
				out = append(out, keys(f.Type.Elem(), path+name+"[].")...)
			}
		}
		return out
	}
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(readme), "| key | | default |\n| --- | --- | --- |\n")
	require.True(t, ok, "README.md has the table")
	table, _, _ := strings.Cut(rest, "\n\n")
	var rows []string
	word := regexp.MustCompile("`([^`]+)`")
	for _, row := range strings.Split(table, "\n") {
		path := ""
		for _, m := range word.FindAllStringSubmatch(strings.Split(row, "|")[1], -1) {
			if i := strings.LastIndex(m[1], "."); i >= 0 {
				path = m[1][:i+1]
				rows = append(rows, m[1])
			} else {
				rows = append(rows, path+m[1])
			}
		}
	}
	want := keys(reflect.TypeFor[Deployment](), "")
	slices.Sort(rows)
	slices.Sort(want)
	require.Equal(t, want, rows)
	require.Equal(t, []string{"rule", "params"}, keys(reflect.TypeFor[Policy](), ""), "the row of policies names them")

	d, err := Parse("x.yaml", []byte("model: m\nmax_tokens: 64\ngroups:\n- {name: a, rule: full, block_tokens: 8, layers: 1, kv_heads: 1, head_dim: 1, dtype: bf16}\n- {name: b, rule: full, block_tokens: 12, layers: 1, kv_heads: 1, head_dim: 1, dtype: bf16}\n"))
	require.NoError(t, err)
	require.EqualValues(t, 4, d.HashTokens)
	require.EqualValues(t, 1, d.Groups[0].ChunkBlocks)
	require.Equal(t, []string{"producer", "consumer"}, d.Roles)
	require.Equal(t, []string{"pd", "probe"}, d.Legs)
	require.Equal(t, EngineTierd, d.Engine)
	require.Zero(t, d.AlignTokens+d.MaxStoreTokens)
}
