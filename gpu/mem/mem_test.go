package mem_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/gputest"
	"github.com/tierd/tierd/gpu/mem"
	"github.com/tierd/tierd/gpu/shm"
	"golang.org/x/sys/unix"
)

func open(t *testing.T) gpu.Device {
	d, err := mem.New(t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

func TestConformance(t *testing.T) { gputest.Run(t, open) }

func TestFilesAreUnlinkedAndPrivate(t *testing.T) {
	dir := t.TempDir()
	d, err := mem.New(dir)
	require.NoError(t, err)
	a, err := d.Alloc(t.Context(), 4096)
	require.NoError(t, err)
	_, err = d.Alloc(t.Context(), 4096)
	require.NoError(t, err)
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Len(t, files, 2)
	for _, f := range files {
		st, err := os.Stat(f)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), st.Mode())
	}
	require.NoError(t, a.Close())
	require.NoError(t, d.Close())
	files, err = filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Empty(t, files)
}

func TestNoRoomIsAnErrorWithBothValues(t *testing.T) {
	const want = 1 << 50
	_, err := open(t).Alloc(t.Context(), want)
	var full *shm.NoSpaceError
	if !shmLimit(t) {
		require.Error(t, err) // a file system that refuses by another limit
		return
	}
	require.ErrorAs(t, err, &full)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Equal(t, int64(want), full.WantBytes)
	require.Positive(t, full.FreeBytes)
	require.Less(t, full.FreeBytes, full.WantBytes)
}

// shmLimit reports whether the file system answers a petabyte with ENOSPC.
func shmLimit(t *testing.T) bool {
	f, err := os.Create(filepath.Join(t.TempDir(), "probe"))
	require.NoError(t, err)
	defer f.Close()
	return unix.Fallocate(int(f.Fd()), 0, 0, 1<<50) == unix.ENOSPC
}

// Another process of the same user maps a region by its handle and sees the bytes.
func TestAnotherProcess(t *testing.T) {
	if path := os.Getenv("TIERD_TEST_REGION"); path != "" {
		n, err := strconv.ParseInt(os.Getenv("TIERD_TEST_LENGTH"), 10, 64)
		require.NoError(t, err)
		m, err := shm.Map(path, 0, n)
		require.NoError(t, err)
		copy(m.Bytes(), "from the other side")
		require.NoError(t, m.Close())
		return
	}
	d := open(t)
	r, err := d.Alloc(t.Context(), 8192)
	require.NoError(t, err)
	h, err := r.Export()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAnotherProcess$")
	cmd.Env = append(os.Environ(), "TIERD_TEST_REGION="+h.Path, "TIERD_TEST_LENGTH="+strconv.FormatInt(h.Length, 10))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	got := make([]byte, 19)
	require.NoError(t, d.Gather(context.Background(), got, r, []gpu.Fragment{{Length: 19}}))
	require.Equal(t, "from the other side", string(got))
}

// A file that its owner makes shorter costs the calls that use it, and not the process.
func TestShortenedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "engine")
	require.NoError(t, os.WriteFile(path, make([]byte, 64<<10), 0o600))
	d := open(t)
	r, err := d.Import(t.Context(), gpu.Handle{Kind: gpu.HandleFile, Path: path, Length: 64 << 10})
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, 4096))
	buf := make([]byte, 64<<10)
	for range 3 {
		require.ErrorContains(t, d.Gather(t.Context(), buf, r, []gpu.Fragment{{Length: 64 << 10}}), "is gone: its owner has made the file shorter")
		require.ErrorContains(t, d.Scatter(t.Context(), r, []gpu.Fragment{{Length: 64 << 10}}, buf), "memory at 0x")
	}
	require.NoError(t, d.Gather(t.Context(), buf[:4096], r, []gpu.Fragment{{Length: 4096}}))
	require.NoError(t, r.Close())
}

// TestFileThatShrinks: memory whose owner cuts it off, or removes it, is an error of the copy
// or as before, and never the end of the process.
func TestFileThatShrinks(t *testing.T) {
	const page, size = 4096, 8 * 4096
	d := open(t)
	path := filepath.Join(t.TempDir(), "engine")
	require.NoError(t, os.WriteFile(path, make([]byte, size), 0o600))
	r, err := d.Import(t.Context(), gpu.Handle{Kind: gpu.HandleFile, Path: path, Length: size})
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, page))
	b := make([]byte, page)
	gone := []gpu.Fragment{{Offset: 4 * page, Length: page}}
	require.ErrorContains(t, d.Gather(t.Context(), b, r, gone), "its owner has made the file shorter")
	require.ErrorContains(t, d.Scatter(t.Context(), r, gone, b), "its owner has made the file shorter")
	require.NoError(t, d.Scatter(t.Context(), r, []gpu.Fragment{{Length: page}}, b), "what is left can be used")
	require.NoError(t, os.Remove(path))
	require.NoError(t, d.Gather(t.Context(), b, r, []gpu.Fragment{{Length: page}}), "the name is not the memory")
	require.NoError(t, r.Close())
}
