package plugins

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/plugins/zoo"
	"github.com/tierd/tierd/specs/module"
)

// TestOpenBytes: a reference of another machine names a rule in bytes that are given, and
// its path is never looked at.
func TestOpenBytes(t *testing.T) {
	l := loader(t, Options{})
	shipped, err := module.Wasm()
	require.NoError(t, err)
	for ref, name := range map[string]string{"window": "window", "./none.wasm#full": "full", "/etc/passwd#window": "window"} {
		p, err := l.OpenBytes(context.Background(), ref, "peer", shipped)
		require.NoError(t, err)
		require.Equal(t, name, p.Spec.Manifest().Name)
		require.Equal(t, module.Digest(), p.Digest)
		require.Equal(t, "peer", p.Source)
	}
	p, err := l.OpenBytes(context.Background(), "./only.wasm", "peer", zoo.Good())
	require.NoError(t, err)
	require.Equal(t, "t", p.Spec.Manifest().Name)
	for ref, why := range map[string]string{
		"exec:./rm#window": "rule exec:./rm#window: it is no module",
		"oci:a@b#window":   "rule oci:a@b#window: it is no module",
		"./x.wasm#winow":   "did you mean window?",
	} {
		_, err := l.OpenBytes(context.Background(), ref, "peer", shipped)
		require.ErrorContains(t, err, why)
	}
	path, name, ok := ProgramOf("exec:./a/b#c")
	require.True(t, ok)
	require.Equal(t, []string{"./a/b", "c"}, []string{path, name})
	_, _, ok = ProgramOf("./a.wasm#c")
	require.False(t, ok)
}
