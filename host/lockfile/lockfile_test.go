package lockfile

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOneHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	require.NoError(t, os.WriteFile(path, []byte("left by a dead process, whose words were longer"), 0o600))
	l, err := Take(path, "node a (process 1)")
	require.NoError(t, err)
	_, err = Take(path, "node b (process 2)")
	var held *HeldError
	require.ErrorAs(t, err, &held)
	require.Equal(t, HeldError{Path: path, Holder: "node a (process 1)"}, *held)
	require.EqualError(t, err, "node a (process 1) has the lock "+path)
	require.NoError(t, l.Release())
	require.NoError(t, l.Release(), "releasing twice is harmless")
	require.NoFileExists(t, path)
	l, err = Take(path, "node b (process 2)")
	require.NoError(t, err)
	require.NoError(t, l.Release())
}

// Removing the file at release lets nobody in beside the holder.
func TestReleaseIsFreeOfRaces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var inside, taken atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				l, err := Take(path, "x")
				if err != nil {
					var held *HeldError
					if !errors.As(err, &held) {
						t.Errorf("%v", err)
						return
					}
					continue
				}
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d holders", n)
				}
				taken.Add(1)
				inside.Add(-1)
				if err := l.Release(); err != nil {
					t.Errorf("%v", err)
				}
			}
		})
	}
	wg.Wait()
	require.Positive(t, taken.Load())
	require.NoFileExists(t, path)
}

func TestNoDirectory(t *testing.T) {
	_, err := Take(filepath.Join(t.TempDir(), "none", "lock"), "x")
	require.ErrorIs(t, err, os.ErrNotExist)
}
