package proc

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/abi"
)

// rogueBinary is testdata/rogue, built once.
var rogueBinary string

func TestMain(m *testing.M) {
	if os.Getenv("TIERD_TEST_HOST") != "" {
		hostToBeKilled()
	}
	dir, err := os.MkdirTemp("", "rogue-")
	if err != nil {
		panic(err)
	}
	rogueBinary = filepath.Join(dir, "rogue")
	if out, err := exec.Command("go", "build", "-o", rogueBinary, "./testdata/rogue").CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build testdata/rogue: %v\n%s", err, out))
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// hang bounds what would otherwise wait for ever; no test is decided by it.
const hang = time.Minute

// A rogue is a copy of the program in a directory of its own, where a file tells it what
// to do.
type rogue struct {
	t       testing.TB
	dir     string
	options Options
	log     *logBuffer
}

func newRogue(t testing.TB, mode string) *rogue {
	t.Helper()
	dir, err := os.MkdirTemp("", "p") // t.TempDir's path may be too long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rogue{t: t, dir: dir, log: &logBuffer{}}
	require.NoError(t, os.Link(rogueBinary, r.path()))
	require.NoError(t, os.Mkdir(r.tmp(), 0o700))
	r.options = Options{
		CallTimeout: hang, StartTimeout: hang, TempDir: r.tmp(), restartWait: time.Millisecond, restartForget: RestartForget,
		Log: slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelInfo})),
	}
	r.mode(mode)
	return r
}

func (r *rogue) path() string { return filepath.Join(r.dir, "rogue") }
func (r *rogue) tmp() string  { return filepath.Join(r.dir, "tmp") }

// mode tells the program what to do from now on.
func (r *rogue) mode(m string) {
	r.t.Helper()
	next := filepath.Join(r.dir, "next")
	require.NoError(r.t, os.WriteFile(next, []byte(m), 0o600))
	require.NoError(r.t, os.Rename(next, filepath.Join(r.dir, "mode")))
}

// load loads the program, and sees that nothing is left of it at the end of the test.
func (r *rogue) load() *Program {
	r.t.Helper()
	p, err := Load(context.Background(), r.path(), r.options)
	require.NoError(r.t, err)
	r.t.Cleanup(func() {
		require.NoError(r.t, p.Close(context.Background()))
		r.nothingLeft()
	})
	return p
}

// nothingLeft requires that no process, file or goroutine is left.
func (r *rogue) nothingLeft() {
	r.t.Helper()
	require.Empty(r.t, processesOf(r.path()))
	left, err := os.ReadDir(r.tmp())
	require.NoError(r.t, err)
	require.Empty(r.t, left)
	if _, bench := r.t.(*testing.B); !bench { // which runs in more than one goroutine
		goleak.VerifyNone(r.t)
	}
}

// processesOf returns the ids of the processes that run a program and are not zombies.
func processesOf(path string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, link := range all {
		if exe, err := os.Readlink(link); err == nil && exe == path {
			pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
			pids = append(pids, pid)
		}
	}
	return pids
}

// rule opens a rule of a program.
func (r *rogue) rule(p *Program, name string, params ...uint64) abi.Rule {
	r.t.Helper()
	for _, s := range p.Specs() {
		if s.Manifest().Name == name {
			rule, err := s.Open(params)
			require.NoError(r.t, err)
			return rule
		}
	}
	r.t.Fatalf("no rule %s", name)
	return nil
}

// ask is a scan of three chunks that are all here.
func ask(r abi.Rule) (abi.Span, error) {
	states := abi.NewStates(3)
	states.Fill(0, 3, abi.Hit)
	return r.Scan(abi.Round{BlockTokens: 16, ChunkTokens: 16, PromptTokens: 48, StoredTokens: 48, BoundTokens: 47, Hi: 3}, states, abi.NewBitmap(3))
}

// works requires that a rule answers, as soon as the process that it needs runs.
func works(t testing.TB, r abi.Rule) {
	t.Helper()
	require.Eventually(t, func() bool {
		span, err := ask(r)
		return err == nil && span == abi.Span{Usable: 3}
	}, hang, time.Millisecond)
}

// logBuffer keeps what is logged.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
