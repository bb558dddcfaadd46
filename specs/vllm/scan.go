package vllm

import "github.com/tierd/tierd/abi"

// This file holds the two scans of the demand side. They look a chunk up by calling
// look, and every call counts: it may start a promotion.

// prefixScan looks up the chunks from lo up to hi, from the left, until one is a Miss.
// It returns how many it counted, and whether an answer was one to wait for. A Retry is
// not counted, but the scan goes on, so that the lookups behind it start early.
func prefixScan(lo, hi int, look func(chunk int) abi.State) (hits int, deferred bool) {
	for i := lo; i < hi; i++ {
		switch look(i) {
		case abi.Hit:
			hits++
		case abi.Pending:
			hits++
			deferred = true
		case abi.Retry:
			deferred = true
		case abi.Miss:
			return hits, deferred
		}
	}
	return hits, deferred
}

// slidingScan looks up the chunks from hi down to lo until window of them in a row are
// here, or on their way. It returns the end of that run, counted from lo; when there is
// none, the length of the run that begins at lo.
//
// first is the length of a run that begins at the right edge; it may be longer than
// window. Rev A passes window.
//
// In rev A any Retry or Pending on the way defers the scan. In rev B a Pending counts
// only while it is in the run at hand; a Retry always does.
func slidingScan(rev Revision, lo, hi, window, first int, look func(chunk int) abi.State) (end int, deferred bool) {
	run, want, pending := 0, first, false
	for i := hi - 1; i >= lo; i-- {
		switch look(i) {
		case abi.Hit:
			run++
		case abi.Pending:
			run++
			pending = true
		case abi.Retry:
			deferred = true
			run, want = 0, window
		case abi.Miss:
			run, want = 0, window
			pending = pending && rev == RevA
		}
		if run == want {
			return i - lo + want, deferred || pending
		}
	}
	return run, deferred || pending
}
