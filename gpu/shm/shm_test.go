package shm_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu/shm"
	"golang.org/x/sys/unix"
)

func TestCreate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	f, err := shm.Create(path, 10000, true)
	require.NoError(t, err)
	require.Len(t, f.Bytes(), 10000)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())

	_, err = shm.Create(path, 10000, true)
	require.ErrorIs(t, err, shm.ErrInUse, "its lock is held")
	_, err = shm.Create(path, 10000, false)
	require.ErrorIs(t, err, fs.ErrExist)
	require.NoError(t, f.Close())
	require.NoError(t, f.Close(), "closing twice is harmless")
	_, err = os.Stat(path)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestStaleFileIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	require.NoError(t, os.WriteFile(path, []byte("left by a dead process"), 0o600))
	_, err := shm.Create(path, 4096, false)
	require.ErrorIs(t, err, fs.ErrExist)
	f, err := shm.Create(path, 4096, true)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 4096), f.Bytes())
	require.NoError(t, f.Close())
}

func TestOnlyRegularFilesAreReplaced(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "precious")
	require.NoError(t, os.WriteFile(target, []byte("precious"), 0o600))
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	require.NoError(t, os.Symlink(target, link))
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{link, fifo, dir} {
		_, err := shm.Create(path, 4096, true)
		require.Error(t, err, path)
		_, err = shm.Map(path, 0, 8)
		require.Error(t, err, path)
	}
	got, err := os.ReadFile(target)
	require.NoError(t, err)
	require.Equal(t, "precious", string(got))
}

// Many at once want one path, where a stale file lies: exactly one gets it, each time.
func TestOneWinner(t *testing.T) {
	for range 50 {
		path := filepath.Join(t.TempDir(), "slab")
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		var wg sync.WaitGroup
		files, errs := make([]*shm.File, 8), make([]error, 8)
		for i := range files {
			wg.Go(func() { files[i], errs[i] = shm.Create(path, 4096, true) })
		}
		wg.Wait()
		won := 0
		for i, f := range files {
			if f == nil {
				require.ErrorIs(t, errs[i], shm.ErrInUse)
				continue
			}
			won++
			m, err := shm.Map(path, 0, 4096)
			require.NoError(t, err)
			copy(f.Bytes(), "mine")
			require.True(t, bytes.HasPrefix(m.Bytes(), []byte("mine")), "the path leads to the winner's file")
			require.NoError(t, m.Close())
			require.NoError(t, f.Close())
		}
		require.LessOrEqual(t, won, 1)
	}
}

func TestMapRefusesWhatTheFileDoesNotHold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	f, err := shm.Create(path, 10000, true)
	require.NoError(t, err)
	defer f.Close()
	for _, r := range [][2]int64{{0, 10001}, {10001, 1}, {-1, 1}, {0, 0}, {0, -1}, {1, 1<<63 - 1}, {9999, 2}} {
		_, err := shm.Map(path, r[0], r[1])
		require.Error(t, err, "%v", r)
	}
	f.Bytes()[9999] = 7
	m, err := shm.Map(path, 9990, 10)
	require.NoError(t, err)
	require.Len(t, m.Bytes(), 10)
	require.Equal(t, byte(7), m.Bytes()[9])
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
}

func TestSizes(t *testing.T) {
	dir := t.TempDir()
	for _, size := range []int64{0, -1} {
		_, err := shm.Create(filepath.Join(dir, "slab"), size, true)
		require.ErrorContains(t, err, "must be positive")
	}
	_, err := shm.Create(filepath.Join(dir, "slab"), 1<<50, true)
	var full *shm.NoSpaceError
	require.ErrorAs(t, err, &full)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "1125899906842624 bytes wanted")
	require.Positive(t, full.FreeBytes, "nothing is taken before it is known to fit")
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	require.LessOrEqual(t, full.FreeBytes, int64(st.Blocks)*st.Bsize)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "a failure leaves no file")
}

func TestInMemory(t *testing.T) {
	yes, err := shm.InMemory("/dev/shm")
	require.NoError(t, err)
	require.True(t, yes)
	no, err := shm.InMemory("/proc")
	require.NoError(t, err)
	require.False(t, no)
	_, err = shm.InMemory("/none")
	require.ErrorIs(t, err, fs.ErrNotExist)
}
