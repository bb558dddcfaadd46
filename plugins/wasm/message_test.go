package wasm

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a module says is shown on one line, without what a terminal obeys.
func TestOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "",
		"plain":                             "plain",
		" two\n\n lines \r\n":               "two | lines",
		"\x1b[2J\x1b]0;owned\x07\nACCEPTED": "\uFFFD[2J\uFFFD]0;owned\uFFFD | ACCEPTED",
		"a\u202eb\u0085c":                   "a\uFFFDb\uFFFDc",
		strings.Repeat("x", ReasonBytesMax): strings.Repeat("x", ReasonBytesMax),
	} {
		require.Equal(t, want, oneLine(text))
	}
	require.Equal(t, "rule t: kv_reach: no | ACCEPTED", (&GuestError{Rule: "t", Func: "kv_reach", Reason: "no\nACCEPTED"}).Error())
}

// A name of megabytes does not fill a log, and what stands behind it is still read.
func TestShownError(t *testing.T) {
	cause := errors.New("it needs kv." + strings.Repeat("n", 1<<20) + "; this host offers input, fail")
	err := &shownError{cause}
	require.ErrorIs(t, err, cause)
	require.Less(t, len(err.Error()), 2*loadMessageBytesMax)
	require.Regexp(t, `^it needs kv\.n+ \.\.\. \(1047594 bytes left out\) \.\.\. n+; this host offers input, fail$`, err.Error())
	require.Equal(t, "short", (&shownError{errors.New("short")}).Error())
}
