package wasm

import (
	"fmt"
	"strings"
	"unicode"
)

// What a module says of itself, its names and its reasons, goes into messages, and from
// there to a log or a terminal, which obeys what it is sent.

// loadMessageBytesMax bounds what is said of a module that does not load: a name in it may
// have megabytes.
const loadMessageBytesMax = 1024

// clean makes a guest's text valid.
func clean(text []byte) string {
	return strings.TrimSpace(strings.ToValidUTF8(string(text), "\uFFFD"))
}

// oneLine shows a guest's text: its lines joined, so that none of them passes for one of
// ours, and without what does not print.
func oneLine(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.Join(lines, " | "))
}

// A shownError is an error whose text may hold what a module says: it is shown on one line,
// and no further than loadMessageBytesMax.
type shownError struct{ err error }

func (e *shownError) Error() string {
	text := e.err.Error()
	if n := len(text); n > loadMessageBytesMax {
		const half = loadMessageBytesMax / 2
		text = fmt.Sprintf("%s ... (%d bytes left out) ... %s", text[:half], n-2*half, text[n-half:])
	}
	return oneLine(strings.ToValidUTF8(text, "\uFFFD"))
}

func (e *shownError) Unwrap() error { return e.err }
