package plugins

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// OpenAll opens what Open opens for each of the references that it returns.
func TestOpenAll(t *testing.T) {
	ctx := context.Background()
	l := loader(t, Options{})
	for ref, want := range map[string][]string{
		"./testdata/one.wasm":   {"./testdata/one.wasm#p"},
		"./testdata/two.wasm":   {"./testdata/two.wasm#p", "./testdata/two.wasm#q"},
		"./testdata/two.wasm#q": {"./testdata/two.wasm#q"},
		"window":                {"window"},
	} {
		refs, all, err := l.OpenAll(ctx, ref)
		require.NoError(t, err, ref)
		require.Equal(t, want, refs)
		for i, p := range all {
			alone, err := l.Open(ctx, refs[i])
			require.NoError(t, err)
			require.Equal(t, alone, p)
		}
	}
	for _, ref := range []string{"./testdata/none.wasm", "./testdata/two.wasm#r", "none"} {
		_, _, err := l.OpenAll(ctx, ref)
		require.Error(t, err, ref)
	}
	_, err := l.Open(ctx, "./testdata/two.wasm")
	var many *AmbiguousError
	require.ErrorAs(t, err, &many)
	require.Equal(t, []string{"p", "q"}, many.Names)
	require.EqualError(t, err, "rule ./testdata/two.wasm: the module holds 2 rules; add #name, one of: p, q")
	_, err = l.Open(ctx, "./testdata/none.wasm")
	require.ErrorContains(t, err, "relative to the working directory")
}
