package limitlog

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func logger(b *bytes.Buffer, level slog.Level) *Log {
	return New(slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})))
}

// TestStorm: a cause writes LinesMax lines and one count in each window, another is not
// held back by it, and every line is written or counted.
func TestStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := logger(&b, slog.LevelInfo)
		const storm, minutes = 600, 3
		for range minutes {
			for i := range storm {
				l.Log(slog.LevelWarn, "checksum", fmt.Sprint(i), "a chunk is wrong", "chunk", i)
			}
			l.Log(slog.LevelInfo, "peer", "b", "a peer is silent")
			time.Sleep(Window)
			synctest.Wait()
		}
		l.Close()
		count := func(s string) int { return strings.Count(b.String(), s) }
		require.Equal(t, minutes*LinesMax, count(`level=WARN msg="a chunk is wrong" cause=checksum chunk=`))
		require.Equal(t, minutes, count(fmt.Sprintf(`level=WARN msg="more lines like those before were left out" cause=checksum left_out=%d lines_max=5 window=1m0s`, storm-LinesMax)))
		require.Equal(t, minutes, count("cause=peer"))
		require.Equal(t, minutes*(LinesMax+2), strings.Count(b.String(), "\n"))
	})
}

// TestOneLineAFault: the same fault has one line in a window, however often it is met.
func TestOneLineAFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := logger(&b, slog.LevelInfo)
		for range 1000 {
			l.Log(slog.LevelWarn, "peer", "b", "silent", "peer", "b")
			l.Log(slog.LevelWarn, "peer", "c", "silent", "peer", "c")
		}
		require.Equal(t, 1, strings.Count(b.String(), "peer=b"))
		require.Equal(t, 1, strings.Count(b.String(), "peer=c"))
		l.Close() // says the rest, and leaves no timer
		require.Contains(t, b.String(), "cause=peer left_out=1998 ")
		time.Sleep(2 * Window)
		require.Equal(t, 3, strings.Count(b.String(), "\n"))
	})
}

// TestNotWritten: what the logger would not write is not counted as left out, either.
func TestNotWritten(t *testing.T) {
	var b bytes.Buffer
	l := logger(&b, slog.LevelInfo)
	for range 100 {
		l.Log(slog.LevelDebug, "aborted", "x", "given up")
	}
	l.Close()
	require.Empty(t, b.String())
	l = logger(&b, slog.LevelDebug)
	for range 100 {
		l.Log(slog.LevelDebug, "aborted", "x", "given up")
	}
	l.Close()
	require.Equal(t, 100, strings.Count(b.String(), "\n"), "below Info nothing is left out")
}
