package proc

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrClosed is returned by every call after Program.Close.
	ErrClosed = errors.New("the program is closed")

	// ErrRestarting is wrapped by the error of a call while the process is being started
	// again. The failure that made it necessary is wrapped too.
	ErrRestarting = errors.New("the process is being started again")

	// ErrGivenUp is wrapped by the error of every call once the process failed too often
	// to be started again. The last failure is wrapped too.
	ErrGivenUp = errors.New("the process is not started any more")
)

// A RuleError is a clean failure: the rule itself gave a reason. The process goes on.
type RuleError struct {
	Rule   string // name of the rule
	Func   string // "open", "reach", "scan", "need"
	Reason string // the program's own words, what does not print escaped
}

func (e *RuleError) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("rule %s: %s failed and gave no reason", e.Rule, e.Func)
	}
	return fmt.Sprintf("rule %s: %s: %s", e.Rule, e.Func, e.Reason)
}

// A ProtocolError says that a program answered what version 1 of the subprocess ABI does
// not allow.
type ProtocolError struct {
	Rule    string // name of the rule; empty when the whole message was wrong
	Func    string // "start", "manifest", "open", "reach", "scan", "need"
	Problem string // what it answered and what was expected
	Output  string // what it printed last, quoted
}

func (e *ProtocolError) Error() string {
	who := "the program"
	if e.Rule != "" {
		who = "rule " + e.Rule
	}
	return fmt.Sprintf("%s: %s broke the ABI: %s%s", who, e.Func, e.Problem, printed(e.Output))
}

// A CallError says that the process ended, or closed its socket, before it had answered.
type CallError struct {
	Func   string // "start", "manifest", "open", "reach", "scan", "need"
	PID    int
	Calls  int    // how many were in work: any of them may be the cause
	How    string // how the process ended
	Output string // what it printed last, quoted
}

func (e *CallError) Error() string {
	return fmt.Sprintf("process %d %s during %s%s%s", e.PID, e.How, e.Func, among(e.Calls), printed(e.Output))
}

// A TimeoutError says that the process did not answer in time and was killed.
type TimeoutError struct {
	Func   string // "start", "manifest", "open", "reach", "scan", "need"
	PID    int
	Calls  int           // how many were in work: any of them may be the cause
	Limit  time.Duration // Options.CallTimeout or Options.StartTimeout
	Output string        // what it printed last, quoted
}

// Timeout reports true: whether there would have been an answer, nobody knows.
func (e *TimeoutError) Timeout() bool { return true }

func (e *TimeoutError) Error() string {
	what := e.Func + among(e.Calls) + " had no answer"
	if e.Func == "start" {
		what = "it was not ready"
	}
	return fmt.Sprintf("%s after %v, and process %d was killed%s", what, e.Limit, e.PID, printed(e.Output))
}

// A DigestError says that the file of a program is not the one that was loaded.
type DigestError struct {
	Path      string
	Want, Got string // "sha256:..."
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("%s was replaced: its digest is %s, but %s was loaded; put that file back, or check the deployment with the new one", e.Path, e.Got, e.Want)
}

// among says that a call was not alone: another one may be the cause.
func among(calls int) string {
	if calls <= 1 {
		return ""
	}
	return fmt.Sprintf(" (one of %d calls in work)", calls)
}

func printed(output string) string {
	if output == "" {
		return ""
	}
	return "; it printed last: " + output
}
