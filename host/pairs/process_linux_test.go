package pairs

import (
	"context"
	"encoding/json"
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

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// judgeArg makes the test's program the process of a check.
const judgeArg = "judge-pair"

func apart() []string { return []string{"/proc/self/exe", judgeArg} }

func taskOf(here, there *Shelf, within time.Duration) *task {
	return &task{Here: here.own.side(), There: there.own.side(), Checker: here.checker, Seed: 1, Within: within, CompiledDir: cacheDir}
}

// children are the processes that this one has started and not waited for.
func children(t *testing.T) (pids []int) {
	if _, err := os.Stat("/proc/thread-self/children"); err != nil {
		t.Skip(err) // a kernel without that file
	}
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	var b []byte
	for _, task := range tasks {
		c, err := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		if err == nil {
			b = append(b, c...)
		}
	}
	for _, f := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(f)
		require.NoError(t, err)
		pids = append(pids, pid)
	}
	return pids
}

// TestApart: a process of its own comes to the same verdict as this one, tells how far it
// is, and gives way to everybody else.
func TestApart(t *testing.T) {
	dir := t.TempDir()
	here := changed(t, dir, "window: 20")
	there := changed(t, dir, "window: 40")
	want, err := judge(t.Context(), here.own, there.own, cacheDir, registry.Options{Checker: here.checker, Check: check.Options{Seed: 1}}, discard())
	require.NoError(t, err)
	nice := -1
	steps := 0
	got, err := judgeApart(t.Context(), apart(), taskOf(here, there, time.Minute), func(done, total int) {
		steps++
		if pids := children(t); len(pids) == 1 {
			// The system call says 20 less the niceness.
			if n, err := syscall.Getpriority(syscall.PRIO_PROCESS, pids[0]); err == nil {
				nice = 20 - n
			}
		}
	})
	require.NoError(t, err)
	require.Positive(t, steps)
	require.Equal(t, niceness, nice)
	for _, v := range []*registry.Verdict{want, got} {
		v.Seconds, v.LoadSeconds = 0, 0
	}
	require.Equal(t, want.Ways, got.Ways)
	require.Equal(t, want.Counterexample.String(), got.Counterexample.String())
	x, err := json.Marshal(want.Against)
	require.NoError(t, err)
	y, err := json.Marshal(got.Against)
	require.NoError(t, err)
	require.JSONEq(t, string(x), string(y))
	require.Equal(t, here.checker, got.Checker)
	require.Empty(t, children(t))
}

// TestApartEnds: a process whose time is spent, that nobody waits for any more, that is
// killed or says nonsense, is no verdict, and is gone.
func TestApartEnds(t *testing.T) {
	dir := t.TempDir()
	here := changed(t, dir, "window: 20")
	there := changed(t, dir, "max_tokens: 100", "max_tokens: 100000")
	long := changed(t, dir, "max_tokens: 100", "max_tokens: 100001")
	nothing := func(int, int) {}

	v, err := judgeApart(t.Context(), apart(), taskOf(there, long, 5*time.Second), nothing) // to open the rules takes a second of it
	require.NoError(t, err)
	require.Equal(t, registry.Undecided, v.Verdict)
	require.Equal(t, check.ErrBudget.Error(), v.Undecided)

	tired := errors.New("tired")
	ctx, cancel := context.WithCancelCause(t.Context())
	_, err = judgeApart(ctx, apart(), taskOf(there, long, time.Hour), func(int, int) { cancel(tired) })
	require.ErrorIs(t, err, tired)

	_, err = judgeApart(t.Context(), apart(), taskOf(there, long, time.Hour), func(int, int) {
		for _, pid := range children(t) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	require.ErrorContains(t, err, "the process of the check ended without a verdict (EOF, signal: killed)")

	_, err = judgeApart(t.Context(), []string{"/bin/sh", "-c", "echo hello; echo oh >&2; sleep 60"}, taskOf(here, here, time.Hour), nothing)
	require.ErrorContains(t, err, "invalid character 'h' looking for beginning of value, signal: killed): oh")
	_, err = judgeApart(t.Context(), []string{"/bin/sh", "-c", "echo oh >&2; exit 3"}, taskOf(here, here, time.Hour), nothing)
	require.ErrorContains(t, err, "the process of the check ended without a verdict (EOF, exit status 3): oh")
	_, err = judgeApart(t.Context(), []string{"/none"}, taskOf(here, here, time.Hour), nothing)
	require.ErrorContains(t, err, "the check has no process")

	ctx, cancelBudget := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, check.ErrBudget)
	defer cancelBudget()
	began := time.Now()
	_, err = judgeApart(ctx, []string{"/bin/sh", "-c", "sleep 60"}, taskOf(here, here, time.Hour), nothing)
	require.ErrorIs(t, err, check.ErrBudget)
	require.GreaterOrEqual(t, time.Since(began), lastWords)

	broken := taskOf(here, there, time.Hour)
	broken.There.Modules, broken.Here.Modules = nil, nil
	_, err = judgeApart(t.Context(), apart(), broken, nothing)
	require.ErrorContains(t, err, "is not to be had: its file is not what this node loaded")
	require.Empty(t, children(t))
}

// TestProgramApart: a rule that is a program is run by the process of the check, and is gone
// with it.
func TestProgramApart(t *testing.T) {
	dir := t.TempDir()
	out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "program"), "../../plugins/proc/testdata/rogue").CombinedOutput()
	require.NoError(t, err, string(out))
	here := changed(t, dir, "window: 20")
	there := changed(t, dir, "rule: window", "rule: exec:./program#window")
	v, err := judgeApart(t.Context(), apart(), taskOf(here, there, time.Minute), func(int, int) {})
	require.NoError(t, err)
	require.Equal(t, registry.Accepted, v.Verdict)
	require.Equal(t, filepath.Join(dir, "program"), v.Against.Rules[0].Source)
	require.Eventually(t, func() bool {
		all, err := filepath.Glob("/proc/[0-9]*/exe")
		require.NoError(t, err)
		for _, exe := range all {
			if path, err := os.Readlink(exe); err == nil && path == filepath.Join(dir, "program") {
				return false
			}
		}
		return true
	}, 30*time.Second, 10*time.Millisecond)
}

// TestApartLeftBehind: a program that left the group and keeps stderr open does not hold the
// answer up.
func TestApartLeftBehind(t *testing.T) {
	here := changed(t, t.TempDir(), "window: 20")
	_, err := judgeApart(t.Context(), []string{"/bin/sh", "-c", "setsid sleep 600 >/dev/null & echo pid $! >&2; sleep 1; exit 3"}, taskOf(here, here, time.Hour), func(int, int) {})
	require.Error(t, err)
	_, text, ok := strings.Cut(err.Error(), ": pid ")
	require.True(t, ok, err)
	pid, err := strconv.Atoi(strings.TrimSpace(text))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL), "it still ran")
}
