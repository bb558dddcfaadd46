package e2e

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stubProgram stands for tierd where only the demo's shell script is under test: it is
// ready at once, and a replay of it never ends by itself.
const stubProgram = `#!/bin/sh
case "$1" in
check)
	mkdir -p "$3"
	;;
serve)
	state=$(sed -n 's/^state_dir: //p' "$3")
	echo 'msg="peer session up"'
	: >"$state/addresses.json"
	exec sleep 3600
	;;
replay)
	echo "$$" >replaying.tmp
	mv replaying.tmp replaying
	exec sleep 3600
	;;
esac
`

// A TERM to the demo's shell alone ends the demo, its replay and its daemons, and leaves
// no file behind.
func TestDemoStopsOnTerm(t *testing.T) {
	if testing.Short() {
		t.Skip("starts real processes")
	}
	root := t.TempDir()
	require.NoError(t, os.CopyFS(filepath.Join(root, "examples", "demo"), os.DirFS(demo(""))))
	require.NoError(t, os.Mkdir(filepath.Join(root, "bin"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(root, "bin", "tierd"), []byte(stubProgram), 0o700))
	script := exec.Command("sh", filepath.Join(root, "examples", "demo", "run.sh"))
	script.Env = append(os.Environ(), "TMPDIR="+root)
	var out bytes.Buffer
	script.Stdout, script.Stderr = &out, &out
	script.WaitDelay = patience // the stubs have its output too
	require.NoError(t, script.Start())
	ended := make(chan error, 1)
	go func() { ended <- script.Wait() }()

	var replayPID int
	for deadline := time.Now().Add(patience); replayPID == 0; time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "no replay after %v", patience)
		if b, err := os.ReadFile(filepath.Join(root, "replaying")); err == nil {
			replayPID, err = strconv.Atoi(strings.TrimSpace(string(b)))
			require.NoError(t, err)
		}
	}
	require.NoError(t, script.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-ended:
		var exit *exec.ExitError
		require.True(t, errors.As(err, &exit), "%v\n%s", err, &out)
		require.Equal(t, 143, exit.ExitCode(), &out)
	case <-time.After(patience):
		script.Process.Kill()
		<-ended
		t.Fatalf("the demo did not stop:\n%s", &out)
	}
	require.Contains(t, out.String(), "the demo was stopped")
	require.ErrorIs(t, syscall.Kill(replayPID, 0), syscall.ESRCH, "the replay outlives the demo")
	left, err := filepath.Glob(filepath.Join(root, ".build", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}
