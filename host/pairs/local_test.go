package pairs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLocalDir: a file is found by what it holds, and hashed again when its size or time says
// that it may hold something else, or is too young to say so.
func TestLocalDir(t *testing.T) {
	d := newLocalDir(t.TempDir())
	id := func(text string) digest { return sha256.Sum256([]byte(text)) }
	path := filepath.Join(d.dir, "x")
	write := func(text string, at time.Time) {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		require.NoError(t, os.Chtimes(path, at, at))
	}
	find := func(text string) string {
		got, err := d.find(t.Context(), id(text))
		require.NoError(t, err)
		return got
	}
	old := time.Now().Add(-time.Hour)
	write("one", old)
	require.Equal(t, path, find("one"))
	require.Empty(t, find("two"))
	write("two", old)
	require.Empty(t, find("two"), "it is not hashed again")
	require.Equal(t, path, find("one"))
	require.Nil(t, d.read(t.Context(), id("one")), "what is used has the digest")
	write("two", old.Add(time.Nanosecond))
	require.Equal(t, path, find("two"), "another time")
	write("three", old.Add(time.Nanosecond))
	require.Equal(t, path, find("three"), "another size")
	young := time.Now().Add(time.Minute) // as if the file had been written just now, whenever that is
	write("seven", young)
	require.Equal(t, path, find("seven"))
	write("eight", young)
	require.Equal(t, path, find("eight"), "it may have changed within a tick")
	require.Equal(t, []byte("eight"), d.read(t.Context(), id("eight")))
	require.NoError(t, os.Remove(path))
	require.Empty(t, find("eight"))
	require.Empty(t, d.known, "what is gone is forgotten")

	none := newLocalDir("")
	got, err := none.find(t.Context(), id("one"))
	require.NoError(t, err)
	require.Empty(t, got)
}

// TestSearchEnds: a search ends with its context, while it waits for another one and between
// two pieces of a file; the peer is asked again then.
func TestSearchEnds(t *testing.T) {
	why := errors.New("the node closes")
	ended, end := context.WithCancelCause(t.Context())
	end(why)

	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	reads := 0
	h := sha256.New()
	err := pour(ctx, h, readerFunc(func(b []byte) (int, error) {
		if reads++; reads == 2 {
			cancel(why)
		}
		return copy(b, "piece"), nil
	}))
	require.ErrorIs(t, err, why)
	require.Equal(t, 2, reads)
	whole := bytes.Repeat([]byte("piece"), 1<<17)
	h.Reset()
	require.NoError(t, pour(t.Context(), h, bytes.NewReader(whole)))
	require.Equal(t, sha256.Sum256(whole), digest(h.Sum(nil)))
	require.ErrorIs(t, pour(t.Context(), h, io.MultiReader(strings.NewReader("a"), readerFunc(func([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }))), os.ErrDeadlineExceeded)

	dir := t.TempDir()
	d := newLocalDir(dir)
	d.turn <- struct{}{} // another search is in work
	_, err = d.find(ended, digest{})
	require.ErrorIs(t, err, why)
	leave(d.turn)

	here := sideOf(t, dir, testFile)
	_, id := otherModule(t, dir)
	there := sideOf(t, dir, strings.Replace(testFile, "rule: full", "rule: ./mine.wasm#t", 1))
	g, _ := newGatherer(t, here, there)
	g.local = d
	_, err = g.program(ended, &there.own.rules[1], id)
	var u *unavailable
	require.ErrorAs(t, err, &u)
	require.True(t, u.passing)
	require.Contains(t, u.why, "is looked for in "+dir+": the node closes")
}

type readerFunc func(b []byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }
