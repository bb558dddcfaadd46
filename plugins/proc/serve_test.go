package proc

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// A request is one call, and what it was answered.
type request struct {
	m      method
	round  abi.Round
	states abi.States
}

type answer struct {
	set  abi.Bitmap
	span abi.Span
	err  string
}

func drawRequest(t *rapid.T, kind abi.Kind) request {
	u := func(name string, most uint64) uint64 { return rapid.Uint64Range(0, most).Draw(t, name) }
	block := 1 + u("block", 15)
	chunk := block * (1 + u("blocks", 3))
	chunks := 1 + u("chunks", 300)
	text := u("text", chunks*chunk)
	q := request{m: method(rapid.IntRange(0, int(need)).Draw(t, "method"))}
	if kind == abi.KindPolicy && q.m == need {
		q.m = scan
	}
	q.round = abi.Round{
		BlockTokens: block, ChunkTokens: chunk, PromptTokens: u("prompt", text), StoredTokens: text,
		ResumeTokens: u("resume", text), AlignTokens: chunk * u("align", 4), JunctionTokens: u("junction", text), Hi: uint32(chunks),
	}
	if q.m == need {
		return q
	}
	q.round.Lo = uint32(u("lo", chunks))
	if q.m == scan {
		q.round.LocalTokens = uint64(q.round.Lo) * chunk
		q.round.BoundTokens = chunks * chunk
		q.states = abi.NewStates(q.round.Chunks())
		for i := 0; i < q.round.Chunks(); {
			end := i + int(1+u("run", 100))
			q.states.Fill(i, min(end, q.round.Chunks()), abi.State(u("state", 3)))
			i = end
		}
	}
	return q
}

func (q *request) ask(r abi.Rule) (a answer) {
	var err error
	a.set = abi.NewBitmap(int(q.round.Hi))
	switch q.m {
	case reach:
		err = r.Reach(q.round, a.set)
	case scan:
		a.span, err = r.Scan(q.round, q.states, a.set)
	default:
		err = r.(abi.SpecRule).Need(q.round, a.set)
	}
	if err != nil {
		a.err = err.Error()
	}
	return a
}

// TestAnswersAreNative: the rule in the process answers as the same rule in this one, for
// calls alone and in whatever batches many goroutines make.
func TestAnswersAreNative(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	for _, s := range p.Specs() {
		var native abi.Spec
		for _, n := range append(specs.All(), policy.All()...) {
			if n.Manifest().Name == s.Manifest().Name {
				native = n
			}
		}
		require.Equal(t, native.Manifest(), s.Manifest())
		rapid.Check(t, func(t *rapid.T) {
			params := make([]uint64, len(s.Manifest().Params))
			for i := range params {
				m := s.Manifest().Params[i]
				params[i] = m.Min + rapid.Uint64Range(0, min(m.Max-m.Min, 50)).Draw(t, "param")
			}
			served, err := s.Open(params)
			require.NoError(t, err)
			twin, err := native.Open(params)
			require.NoError(t, err)
			requests := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) request { return drawRequest(t, s.Manifest().Kind) }), 1, 40).Draw(t, "requests")
			want := make([]answer, len(requests))
			for i := range requests {
				want[i] = requests[i].ask(twin)
				require.Equal(t, want[i], requests[i].ask(served), "alone: %+v", requests[i])
			}
			callers := rapid.IntRange(2, 16).Draw(t, "callers")
			got := make([]answer, len(requests))
			var wg sync.WaitGroup
			for c := range callers {
				wg.Go(func() {
					for i := c; i < len(requests); i += callers {
						got[i] = requests[i].ask(served)
					}
				})
			}
			wg.Wait()
			require.Equal(t, want, got)
		})
	}
}

// TestLaws: the conformance test of package abi holds through the process.
func TestLaws(t *testing.T) {
	all := newRogue(t, "").load().Specs()
	if raceEnabled { // the goroutines are the same; make test asks all without the detector
		all = all[:1]
	}
	for _, s := range all {
		abitest.Run(t, s)
	}
}

func TestWhatIsLoaded(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	b, err := os.ReadFile(r.path())
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("sha256:%x", sha256.Sum256(b)), p.Digest())
	var names []string
	for _, s := range p.Specs() {
		names = append(names, s.Manifest().Name)
	}
	require.Equal(t, []string{"window", "full", "request-level"}, names)

	window := p.Specs()[0]
	_, err = window.Open([]uint64{0, 0})
	require.ErrorContains(t, err, "rule window: parameter window is 0; it must be")
	one, err := window.Open([]uint64{16, 0})
	require.NoError(t, err)
	again, err := window.Open([]uint64{16, 0})
	require.NoError(t, err)
	require.Equal(t, one, again, "one rule per parameters")
	require.Len(t, p.rules, 1)
	require.Equal(t, concurrency, one.(interface{ Concurrency() int }).Concurrency())
	_, ok := r.rule(p, "request-level").(abi.SpecRule)
	require.False(t, ok, "a policy has no Need")
	require.ErrorContains(t, one.Reach(abi.Round{Lo: 2, Hi: 1}, nil), "rule window: round asks for chunks 2 to 1; Lo <= Hi <= 1048576")
}

// TestWhatTheProcessGets: nothing of this process's environment, input or directory.
func TestWhatTheProcessGets(t *testing.T) {
	t.Setenv("TIERD_SECRET", "x")
	r := newRogue(t, "call reports")
	_, err := ask(r.rule(r.load(), "full"))
	var clean *RuleError
	require.ErrorAs(t, err, &clean)
	require.Equal(t, "environment [PLUGIN_CLIENT_CERT PLUGIN_MAX_PORT PLUGIN_MIN_PORT PLUGIN_PROTOCOL_VERSIONS PLUGIN_UNIX_SOCKET_DIR TIERD_RULES], "+
		"directory tierd-rule- drwx------, stdin /dev/null, group true", clean.Reason)
}

// TestByHand: a person who starts the program learns what it is, and nothing is printed to
// standard output.
func TestByHand(t *testing.T) {
	r := newRogue(t, "")
	cmd := exec.Command(r.path())
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 2, exit.ExitCode())
	require.Empty(t, out)
	require.Equal(t, `rogue holds rules for tierd, which starts it; it does nothing by itself.
Rules: window 1.0.0, full 1.0.0, request-level 1.0.0
In a deployment file, name one as   rule: "exec:./rogue#window"
`, stderr.String())
}

// TestFresh: a process of its own that has served nothing, one rule, and an end.
func TestFresh(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	rule := r.rule(p, "window", 16, 0)
	require.Len(t, processesOf(r.path()), 1)
	fresh, release, err := rule.(interface {
		Fresh() (abi.Rule, func(), error)
	}).Fresh()
	require.NoError(t, err)
	require.Len(t, processesOf(r.path()), 2)
	want, err := ask(rule)
	require.NoError(t, err)
	got, err := ask(fresh)
	require.NoError(t, err)
	require.Equal(t, want, got)
	_, ok := fresh.(abi.SpecRule)
	require.True(t, ok)

	r.mode("call exits") // of the fresh one; the other goes on
	_, err = ask(fresh)
	var dead *CallError
	require.ErrorAs(t, err, &dead)
	r.mode("")
	_, err = ask(fresh)
	require.ErrorAs(t, err, &dead, "it stays dead")
	works(t, rule)
	release()
	release()
	require.Len(t, processesOf(r.path()), 1)
	require.Zero(t, p.fresh)

	_, _, err = rule.(specRule).Fresh()
	require.NoError(t, err) // and never released: Close ends it
	p.fresh = FreshMax
	_, _, err = rule.(specRule).Fresh()
	require.EqualError(t, err, "rule window: 64 fresh processes of program "+r.path()+" are in use; at most 64 are allowed: release some")
	p.fresh = 1
	r.mode("exit")
	_, _, err = rule.(specRule).Fresh()
	require.ErrorContains(t, err, `rule window: process`)
	require.Equal(t, 1, p.fresh)
}

func TestClose(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	rule := r.rule(p, "full")
	r.mode("call hangs")
	ended := make(chan error)
	go func() {
		_, err := ask(rule)
		ended <- err
	}()
	require.Eventually(t, func() bool { q := &p.current.queues[scan]; q.mu.Lock(); defer q.mu.Unlock(); return q.flying }, hang, 1)
	require.NoError(t, p.Close(context.Background()), "a call that hangs holds nobody up")
	require.ErrorIs(t, <-ended, ErrClosed)
	_, err := ask(rule)
	require.ErrorIs(t, err, ErrClosed)
	_, _, err = rule.(specRule).Fresh()
	require.ErrorIs(t, err, ErrClosed)
	_, err = p.Specs()[0].Open([]uint64{99, 0})
	require.ErrorIs(t, err, ErrClosed)
	require.NoError(t, p.Close(context.Background()))
	again, err := p.Specs()[1].Open(nil)
	require.NoError(t, err, "what was opened opens again")
	_, err = ask(again)
	require.ErrorIs(t, err, ErrClosed)
}

func TestFilesThatAreNoProgram(t *testing.T) {
	dir := t.TempDir()
	at := func(name string, data string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(data), mode))
		return path
	}
	text, module, script := at("text", "hello", 0o644), at("m.wasm", "\x00asm\x01", 0o755), at("elf", "\x7fELF", 0o755)
	for path, want := range map[string]string{
		filepath.Join(dir, "none"): "there is no file " + filepath.Join(dir, "none") + "; build the program first, or correct the path, which is relative to the deployment file",
		dir:                        dir + " is not a regular file",
		text:                       text + " has the mode -rw-r--r-- and cannot be run; chmod +x it",
		module:                     module + " is a WebAssembly module, not a program; leave out exec: in its reference",
		script:                     "program " + script + ": fork/exec " + script + ": exec format error",
	} {
		_, err := Load(context.Background(), path, Options{TempDir: "/tmp"})
		require.EqualError(t, err, want)
	}
	_, err := Load(context.Background(), filepath.Join(dir, "none"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Load(context.Background(), script, Options{CallTimeout: -1})
	require.EqualError(t, err, "program "+script+": call_timeout is -1ns and start_timeout is 0s; neither may be negative")

	large := at("large", "", 0o755)
	require.NoError(t, os.Truncate(large, ProgramBytesMax+1))
	_, err = Load(context.Background(), large, Options{})
	require.EqualError(t, err, large+" has 1073741825 bytes; at most 1073741824 are allowed")
}

// TestSocketPath: the directory whose sockets just fit is used, the next longer one is not.
func TestSocketPath(t *testing.T) {
	r := newRogue(t, "")
	r.options.TempDir = filepath.Join(r.tmp(), strings.Repeat("d", socketPathBytesMax-socketNameBytes-len("/tierd-rule-")-10-len(r.tmp())-1))
	require.NoError(t, os.Mkdir(r.options.TempDir, 0o700))
	p, err := Load(context.Background(), r.path(), r.options)
	require.NoError(t, err)
	require.NoError(t, p.Close(context.Background()))
	r.options.TempDir += "012345678901"
	require.NoError(t, os.Mkdir(r.options.TempDir, 0o700))
	_, err = Load(context.Background(), r.path(), r.options)
	require.ErrorContains(t, err, "bytes, and 107 is what the system takes; set TMPDIR to a shorter path")
	left, err := os.ReadDir(r.options.TempDir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestLoadIsGivenUp(t *testing.T) {
	r := newRogue(t, "silent")
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for len(processesOf(r.path())) == 0 {
		}
		cancel()
	}()
	_, err := Load(ctx, r.path(), r.options)
	require.True(t, errors.Is(err, context.Canceled), err)
	r.nothingLeft()
}
