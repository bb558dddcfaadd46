package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// What "tierd new rule" writes builds, tries itself and is accepted, by the commands of its
// own Makefile.
func TestNewRule(t *testing.T) {
	t.Parallel() // a command, which no deadline binds
	if testing.Short() {
		t.Skip("runs the real program")
	}
	require.NoError(t, program())
	for _, lang := range []string{"go", "c", "rust", "as"} {
		t.Run(lang, func(t *testing.T) {
			t.Parallel()
			if _, err := os.Stat(filepath.Join(repo(), ".build/guests", "window-"+lang+".wasm")); err != nil {
				if os.Getenv("TIERD_GUESTS") == "required" {
					t.Fatalf("%v: run make guests", err)
				}
				t.Skip("the compiler may be missing: run make guests")
			}
			dir := filepath.Join(t.TempDir(), "mine")
			out, err := exec.Command(tierd, "new", "rule", "mine", "--lang", lang, "--dir", dir, "--tierd", repo()).CombinedOutput()
			require.NoError(t, err, string(out))
			out, err = exec.Command("make", "-C", dir, "test", "check", "TIERD="+tierd,
				"ASC="+filepath.Join(repo(), ".build/as/node_modules/.bin/asc")).CombinedOutput()
			require.NoError(t, err, string(out))
			require.Contains(t, string(out), "ACCEPTED  mine 1.0.0")
			require.Contains(t, string(out), "ACCEPTED  my-model")
		})
	}
}
