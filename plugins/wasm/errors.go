package wasm

import (
	"errors"
	"fmt"
	"strings"
)

// ErrClosed is returned by every call after Module.Close.
var ErrClosed = errors.New("wasm module is closed")

// A GuestError is a clean failure: the guest answered -1 and gave a reason. The
// instance goes on.
type GuestError struct {
	Rule   string // name of the rule
	Func   string // "kv_reach", "kv_scan", ...
	Reason string // the guest's own words
}

func (e *GuestError) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("rule %s: %s failed and gave no reason", e.Rule, e.Func)
	}
	return fmt.Sprintf("rule %s: %s: %s", e.Rule, e.Func, oneLine(e.Reason))
}

// A ProtocolError says that a guest answered what ABI version 1 does not allow. The
// instance is thrown away.
type ProtocolError struct {
	Rule    string
	Func    string
	Problem string // what it answered and what was expected
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("rule %s: %s broke the ABI: %s", e.Rule, e.Func, e.Problem)
}

// A TrapError says that a call ended in a trap, a panic or an exit. The instance is
// thrown away.
type TrapError struct {
	Rule   string
	Func   string
	Err    error  // what the runtime says
	Stderr string // the beginning of what the guest printed, if it did
}

// Error is one line: the first line of what the runtime says, without its stack of
// compiled functions, and the lines that the guest printed.
func (e *TrapError) Error() string {
	cause, _, _ := strings.Cut(e.Err.Error(), "\n")
	cause = strings.TrimSuffix(cause, " (recovered by wazero)")
	if e.Stderr == "" {
		return fmt.Sprintf("rule %s: %s trapped: %s", e.Rule, e.Func, cause)
	}
	return fmt.Sprintf("rule %s: %s trapped: %s; it printed: %s", e.Rule, e.Func, cause, oneLine(e.Stderr))
}

func (e *TrapError) Unwrap() error { return e.Err }

// A FuelError says that a call burnt all its fuel and was ended. It would be on every
// machine. The instance is thrown away.
type FuelError struct {
	Rule   string
	Func   string
	Budget uint64 // units that the call had
}

func (e *FuelError) Error() string {
	return fmt.Sprintf("rule %s: %s was ended after the %d units of fuel that it had; does a loop or a recursion of it not end? "+
		"If it does, work on whole words of states and bitmaps, as the SDK's functions for ranges do, not on single chunks",
		e.Rule, e.Func, e.Budget)
}
