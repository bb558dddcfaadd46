package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
)

// pids and lines replace what differs between two runs or two versions.
var (
	pids  = regexp.MustCompile(`process \d+`)
	lines = regexp.MustCompile(`:\d+\)`)
)

func golden(err error, r *rogue) string {
	s := strings.ReplaceAll(err.Error(), r.path(), "ROGUE")
	return pids.ReplaceAllString(s, "process N")
}

// soon is the limit of what is to run into it.
const soon = 300 * time.Millisecond

// TestStartsThatFail: a program that does not come up is an error that says why, and
// nothing is left of it.
func TestStartsThatFail(t *testing.T) {
	for mode, want := range map[string]string{
		"exit":              `process N ended (exit status 7) during start; it printed last: "no licence found"`,
		"grandchild":        `process N ended (exit status 0) during start; it printed last: "<nil>"`,
		"garbage":           `the program: start broke the ABI: its first line is "hello, I am a program", not a handshake; does its main call serve.Main, and print nothing before?`,
		"flood":             `the program: start broke the ABI: its first line is "` + strings.Repeat("x", 80) + `", not a handshake; does its main call serve.Main, and print nothing before?`,
		"version 2":         `the program: start broke the ABI: it speaks version 2 of the ABI, and this tierd version 1; build it with the abi/serve of this tierd`,
		"tcp":               `the program: start broke the ABI: it listens at tcp "127.0.0.1:1"; it must be a Unix socket in the directory that it was given`,
		"elsewhere":         `the program: start broke the ABI: it listens at unix "/tmp/somewhere/socket"; it must be a Unix socket in the directory that it was given`,
		"net rpc":           `the program: start broke the ABI: it speaks no gRPC; go-plugin's GRPCServer must be set`,
		"no certificate":    `the program: start broke the ABI: it gave no certificate; go-plugin's AutoMTLS must be supported`,
		"false certificate": `the program: start broke the ABI: go-plugin refused its handshake: error parsing server cert: x509: malformed certificate`,
		"silent":            `it was not ready after 300ms, and process N was killed`,
		"deaf":              `it was not ready after 300ms, and process N was killed`,
		"lie: no rules":     `the program: manifest broke the ABI: it serves 0 rules; 1 to 64 are allowed`,
		"lie: twins":        `the program: manifest broke the ABI: it serves two rules of the name full`,
		"lie: mask":         `the program: manifest broke the ABI: manifest of rule full: mask "telepathy" is not in the list: causal, window, attention-chunk, sink+window, state, prompt+window, latent, unverified`,
		"lie: huge manifest": `the program: manifest broke the ABI: its answer is too large (grpc: received message larger than max (2097182 vs. 1048576)); ` +
			`at most 1048576 bytes are read`,
	} {
		t.Run(mode, func(t *testing.T) {
			r := newRogue(t, mode)
			if mode == "silent" || mode == "deaf" {
				r.options.StartTimeout = soon
			}
			_, err := Load(context.Background(), r.path(), r.options)
			require.Error(t, err)
			require.Equal(t, "program ROGUE: "+want, golden(err, r))
			var clock interface{ Timeout() bool }
			require.Equal(t, mode == "silent" || mode == "deaf", errors.As(err, &clock))
			r.nothingLeft()
		})
	}
}

// TestCallsThatFail: whatever a process does in the middle of a call, the call ends with an
// error that says so, the process is replaced, and the rule works again.
func TestCallsThatFail(t *testing.T) {
	for mode, want := range map[string]string{
		"call is killed":  `process N ended (signal: killed) during scan`,
		"call exits":      `process N ended (exit status 3) during scan; it printed last: "I have had enough"`,
		"call overflows":  `process N ended (exit status 2) during scan; it printed last: "fatal error: stack overflow"`,
		"call hangs":      `scan had no answer after 300ms, and process N was killed`,
		"call is stopped": `scan had no answer after 300ms, and process N was killed`,
	} {
		t.Run(mode, func(t *testing.T) {
			r := newRogue(t, "")
			clocked := strings.Contains(want, "300ms")
			if clocked {
				r.options.CallTimeout = soon
			}
			p := r.load()
			rule := r.rule(p, "full")
			works(t, rule)
			old := processesOf(r.path())
			require.Len(t, old, 1)
			r.mode(mode)
			_, err := ask(rule)
			r.mode("")
			require.Error(t, err)
			require.Equal(t, "rule full: "+want, golden(err, r))
			var clock interface{ Timeout() bool }
			require.Equal(t, clocked, errors.As(err, &clock) && clock.Timeout())
			if !clocked { // on a slow machine the honest call may end the same way again
				works(t, rule)
				require.NotContains(t, processesOf(r.path()), old[0])
				require.Contains(t, r.log.String(), "a rule's program is running again")
			}
			require.Contains(t, r.log.String(), "a rule's program failed; it is started again")
		})
	}
}

// TestARuleThatFails: what is the rule's own fault costs its call alone.
func TestARuleThatFails(t *testing.T) {
	for mode, want := range map[string]string{
		"call panics": `rule full: scan: the rule panicked: runtime error: index out of range [0] with length 0 (main.go:LINE)`,
		"call fails":  `rule full: scan: \x1b[31mno \ufffdway\n`,
	} {
		t.Run(mode, func(t *testing.T) {
			r := newRogue(t, "")
			p := r.load()
			rule := r.rule(p, "full")
			old := processesOf(r.path())
			for range 3 {
				r.mode(mode)
				_, err := ask(rule)
				require.Error(t, err)
				require.Equal(t, want, lines.ReplaceAllString(err.Error(), ":LINE)"))
				var clean *RuleError
				require.ErrorAs(t, err, &clean)
				r.mode("")
				works(t, rule)
			}
			require.Equal(t, old, processesOf(r.path()), "the same process")
		})
	}
}

// TestLies: an answer that makes no sense is an error of its call, and a message that makes
// none an error of all its calls and the end of the process.
func TestLies(t *testing.T) {
	for lie, want := range map[string]string{
		"usable":    `usable is 4, but only 3 chunks were asked for`,
		"bits":      `the set has a bit beyond its 3 chunks; the padding of the last byte must be 0`,
		"short":     `the set has 0 bytes; 3 chunks take exactly 1`,
		"long":      `the set has 2 bytes; 3 chunks take exactly 1`,
		"no resume": `usable, deferred or no_resume is set where the call has none`,
	} {
		t.Run(lie, func(t *testing.T) {
			r := newRogue(t, "lie: nothing")
			rule := r.rule(r.load(), "full")
			_, err := ask(rule)
			require.NoError(t, err)
			old := processesOf(r.path())
			r.mode("lie: " + lie)
			_, err = ask(rule)
			require.EqualError(t, err, "rule full: scan broke the ABI: "+want)
			require.Equal(t, old, processesOf(r.path()))
		})
	}
}

func TestLiesAboutTheMessage(t *testing.T) {
	for lie, want := range map[string]string{
		"fewer":  `1 calls were in the message, and it answered 0`,
		"more":   `1 calls were in the message, and it answered 2`,
		"huge":   `its answer is too large (grpc: received message larger than max (2097162 vs. 1048576)); at most 1048576 bytes are read`,
		"status": `it answered the whole message with the status DeadlineExceeded: wait \x1b[31mlonger`,
	} {
		t.Run(lie, func(t *testing.T) {
			r := newRogue(t, "lie: nothing")
			rule := r.rule(r.load(), "full")
			r.mode("lie: " + lie)
			_, err := ask(rule)
			require.EqualError(t, err, "rule full: the program: scan broke the ABI: "+want)
			var clock interface{ Timeout() bool }
			require.False(t, errors.As(err, &clock), "its word is no clock")
			_, err = ask(rule)
			require.Error(t, err)
		})
	}
}

func TestReasonIsCut(t *testing.T) {
	r := newRogue(t, "lie: reason")
	_, err := ask(r.rule(r.load(), "full"))
	var clean *RuleError
	require.ErrorAs(t, err, &clean)
	require.Len(t, clean.Reason, kvpb.ReasonBytesMax)
}

func TestOpenLies(t *testing.T) {
	r := newRogue(t, "lie: opened")
	_, err := r.load().Specs()[0].Open(nil)
	require.EqualError(t, err, "rule full: the program: open broke the ABI: 1 rules were to be opened, and it answered for 0")
}

func TestOpenIsRefused(t *testing.T) {
	r := newRogue(t, "closed")
	_, err := r.load().Specs()[1].Open(nil)
	require.EqualError(t, err, "rule full: open: the table is locked")
}

// TestNeedAndReachLie: the same for the other two functions, whose answers have no span.
func TestNeedAndReachLie(t *testing.T) {
	r := newRogue(t, "lie: usable")
	rule := r.rule(r.load(), "full").(abi.SpecRule)
	round, out := abi.Round{BlockTokens: 16, ChunkTokens: 16, Hi: 3}, abi.NewBitmap(3)
	require.EqualError(t, rule.Reach(round, out), "rule full: reach broke the ABI: usable, deferred or no_resume is set where the call has none")
	require.EqualError(t, rule.Need(round, out), "rule full: need broke the ABI: usable, deferred or no_resume is set where the call has none")
	r.mode("lie: no resume")
	require.EqualError(t, rule.Need(round, out), "rule full: need broke the ABI: no_resume is set, and so are chunks")
	r.mode("lie: bits")
	require.ErrorContains(t, rule.Reach(round, out), "reach broke the ABI: the set has a bit")
	require.ErrorContains(t, rule.Need(round, out), "need broke the ABI: the set has a bit")
}

// TestAllOfABatchFail: the calls that travel together, and those that wait, all hear of it.
func TestAllOfABatchFail(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	rule := r.rule(p, "full")
	r.mode("call is killed")
	errs := make([]error, 100)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = ask(rule) })
	}
	wg.Wait()
	r.mode("")
	for _, err := range errs {
		var dead *CallError
		require.ErrorAs(t, err, &dead)
		require.Equal(t, "scan", dead.Func)
	}
	works(t, rule)
}

// TestGivenUp: after the last restart every call fails at once, with the last failure and
// what to do.
func TestGivenUp(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	rule := r.rule(p, "full")
	for range RestartsMax {
		works(t, rule)
		r.mode("call exits")
		_, err := ask(rule)
		require.Error(t, err)
		r.mode("")
	}
	works(t, rule)
	r.mode("call exits")
	_, err := ask(rule)
	require.Error(t, err)
	_, err = ask(rule)
	require.ErrorIs(t, err, ErrGivenUp)
	require.Equal(t, `rule full: program ROGUE: the process is not started any more, because it failed 6 times in a row; mend it and restart the daemon: `+
		`process N ended (exit status 3) during scan; it printed last: "I have had enough"`, golden(err, r))
	require.Contains(t, r.log.String(), "failed too often and is given up")
	p.wg.Wait() // nothing is being started
	require.Empty(t, processesOf(r.path()))
	_, err = p.Specs()[1].Open(nil)
	require.NoError(t, err, "a rule that was open once opens, and fails when it is called")
	_, err = p.Specs()[0].Open([]uint64{16, 0})
	require.ErrorIs(t, err, ErrGivenUp)
}

// TestStartsAgainUntilGivenUp: starts that fail count like calls that fail.
func TestStartsAgainUntilGivenUp(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	rule := r.rule(p, "full")
	r.mode("call exits")
	_, err := ask(rule)
	require.Error(t, err)
	r.mode("exit")
	require.Eventually(t, func() bool { _, err = ask(rule); return errors.Is(err, ErrGivenUp) }, hang, time.Millisecond)
	require.ErrorContains(t, err, `ended (exit status 7) during start; it printed last: "no licence found"`)
}

// TestFailuresAreForgotten: those of a process that has lived long do not count.
func TestFailuresAreForgotten(t *testing.T) {
	r := newRogue(t, "")
	r.options.restartForget = 1
	p := r.load()
	rule := r.rule(p, "full")
	for range 2 * RestartsMax {
		works(t, rule)
		r.mode("call exits")
		_, err := ask(rule)
		require.Error(t, err)
		r.mode("")
	}
	works(t, rule)
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Equal(t, 1, p.failures)
}

// TestRestarting: while there is no process a call fails at once, and what it fails of is
// undecided when the failure was.
func TestRestarting(t *testing.T) {
	r := newRogue(t, "")
	r.options.CallTimeout, r.options.restartWait = soon, hang
	p := r.load()
	rule := r.rule(p, "full")
	r.mode("call hangs")
	_, err := ask(rule)
	require.Error(t, err)
	_, err = ask(rule)
	require.ErrorIs(t, err, ErrRestarting)
	require.Equal(t, "rule full: program ROGUE: the process is being started again after a failure: scan had no answer after 300ms, and process N was killed", golden(err, r))
	var clock *TimeoutError
	require.ErrorAs(t, err, &clock)
	require.True(t, clock.Timeout())
	require.Equal(t, soon, clock.Limit)
}

// TestOpenHangs: a rule that never opens ends at the limit of a start.
func TestOpenHangs(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	p.options.StartTimeout = soon
	r.mode("open hangs")
	_, err := p.Specs()[1].Open(nil)
	r.mode("")
	require.Equal(t, "rule full: open had no answer after 300ms, and process N was killed", golden(err, r))
}

// TestReplaced: a file that is not the one that was judged is not run.
func TestReplaced(t *testing.T) {
	r := newRogue(t, "")
	p := r.load()
	rule := r.rule(p, "full")
	b, err := os.ReadFile(r.path())
	require.NoError(t, err)
	require.NoError(t, os.Remove(r.path()))
	require.NoError(t, os.WriteFile(r.path(), append(b, 0), 0o755))
	works(t, rule) // the old one runs
	_, _, err = rule.(specRule).Fresh()
	var other *DigestError
	require.ErrorAs(t, err, &other)
	require.Equal(t, p.Digest(), other.Want)
	require.Equal(t, "rule full: "+r.path()+" was replaced: its digest is "+other.Got+", but "+other.Want+" was loaded; put that file back, or check the deployment with the new one", err.Error())
	r.mode("call exits")
	_, err = ask(rule)
	require.Error(t, err)
	require.Eventually(t, func() bool { _, err = ask(rule); return errors.Is(err, ErrGivenUp) }, hang, time.Millisecond)
	require.ErrorAs(t, err, &other)
}

// TestOtherManifest: a program that says something else when it is started again is not
// the one that was judged, whatever its digest.
func TestOtherManifest(t *testing.T) {
	r := newRogue(t, "")
	rule := r.rule(r.load(), "full")
	r.mode("call exits")
	_, err := ask(rule)
	require.Error(t, err)
	r.mode("renamed")
	require.Eventually(t, func() bool { _, err = ask(rule); return errors.Is(err, ErrGivenUp) }, hang, time.Millisecond)
	require.ErrorContains(t, err, "manifest broke the ABI: its manifests are not those that it had when it was loaded")
}

// TestNoise: a program that prints all the time is served, its first lines are logged, and
// nothing that a terminal obeys gets through.
func TestNoise(t *testing.T) {
	r := newRogue(t, "call is noisy")
	_, err := ask(r.rule(r.load(), "full"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Contains(r.log.String(), "prints much") }, hang, time.Millisecond)
	log := r.log.String()
	require.Equal(t, outputLinesMax, strings.Count(log, "a rule's process printed"))
	require.NotContains(t, log, "\x1b")
	require.Contains(t, log, "noise on standard")
}

// TestOutput: long lines are cut, and the last bytes kept.
func TestOutput(t *testing.T) {
	r := newRogue(t, "")
	o := &stream{output: &output{log: r.options.Log}}
	for _, s := range []string{"a", "b\n\n", strings.Repeat("c", 2*outputLineBytesMax) + "\n", strings.Repeat("d", 2*outputTailBytes) + "\x07"} {
		n, err := o.Write([]byte(s))
		require.NoError(t, err)
		require.Equal(t, len(s), n)
	}
	require.Equal(t, 2, strings.Count(r.log.String(), "\n"))
	require.Contains(t, r.log.String(), "line=ab\n")
	require.Contains(t, r.log.String(), "line="+strings.Repeat("c", outputLineBytesMax)+"\n")
	require.Equal(t, `"`+strings.Repeat("d", outputTailBytes-1)+`\a"`, o.last())
}

// hostToBeKilled is a host that loads a program, says the program's process, and waits.
func hostToBeKilled() {
	p, err := Load(context.Background(), os.Getenv("TIERD_TEST_HOST"), Options{TempDir: os.Getenv("TIERD_TEST_TMP")})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(p.current.child.id())
	time.Sleep(time.Hour)
}

// TestTheHostDies: no process outlives a host that is killed.
func TestTheHostDies(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	r := newRogue(t, "")
	host := exec.Command(self)
	host.Env = append(os.Environ(), "TIERD_TEST_HOST="+r.path(), "TIERD_TEST_TMP="+r.tmp())
	out, err := host.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, host.Start())
	line := make([]byte, 32)
	n, err := out.Read(line)
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(line[:n])))
	require.NoError(t, err, string(line))
	require.Equal(t, []int{pid}, processesOf(r.path()))
	require.NoError(t, host.Process.Signal(syscall.SIGKILL))
	_ = host.Wait()
	require.Eventually(t, func() bool { return len(processesOf(r.path())) == 0 }, hang, time.Millisecond)
}
