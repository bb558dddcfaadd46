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

// TestLocalDir: a file is found by what it holds, and hashed again when it may hold something
// else, though its size and the time that it shows are as before, or is too young to say so.
func TestLocalDir(t *testing.T) {
	d := newLocalDir(t.TempDir())
	d.young = 0 // nobody can make a file old
	id := func(text string) digest { return sha256.Sum256([]byte(text)) }
	path := filepath.Join(d.dir, "x")
	old := time.Now().Add(-time.Hour)
	put := func(path, text string) {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		require.NoError(t, os.Chtimes(path, old, old))
	}
	// change waits for a tick of the file system's clock.
	change := func(text string) {
		before, err := os.Stat(path)
		require.NoError(t, err)
		for after := before; changedAt(after).Equal(changedAt(before)); {
			put(path, text)
			after, err = os.Stat(path)
			require.NoError(t, err)
		}
	}
	find := func(text string) string {
		got, err := d.find(t.Context(), id(text))
		require.NoError(t, err)
		return got
	}
	put(path, "one")
	require.Equal(t, path, find("one"))
	require.Empty(t, find("two"))
	d.known["x"] = fileHash{d.known["x"].file, id("two")}
	require.Equal(t, path, find("two"), "it is not hashed again")
	require.Nil(t, d.read(t.Context(), id("two")), "what is used has the digest")
	change("six")
	require.Equal(t, path, find("six"), "written in its place, and its time set back")
	require.Equal(t, []byte("six"), d.read(t.Context(), id("six")))

	// Files of a package have one size and one time; a link leads to another one.
	store := t.TempDir()
	put(filepath.Join(store, "1"), "ten")
	put(filepath.Join(store, "2"), "few")
	link := filepath.Join(d.dir, "link")
	require.NoError(t, os.Symlink(filepath.Join(store, "1"), link))
	require.Equal(t, link, find("ten"))
	require.NoError(t, os.Remove(link))
	require.NoError(t, os.Symlink(filepath.Join(store, "2"), link))
	require.Equal(t, link, find("few"))
	require.Empty(t, find("ten"))
	require.NoError(t, os.Remove(link))

	d.young = time.Hour
	change("seven")
	require.Equal(t, path, find("seven"))
	require.NotContains(t, d.known, "link")
	require.Equal(t, id("six"), d.known["x"].id, "it may change within a tick")
	require.NoError(t, os.Remove(path))
	require.Empty(t, find("seven"))
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
