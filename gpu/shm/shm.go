// Package shm makes and maps shared-memory files: the memory that the daemon and an
// engine on the same host both see.
//
// A file is created for its owner alone (mode 0600), locked for as long as its maker
// lives, and fully allocated before anyone maps it: a file system without room is an
// error at Create, never a SIGBUS in the middle of a copy. Room is asked for before it
// is taken, so that a file that cannot fit takes none from others meanwhile. The lock is
// how a file that a dead process left behind is told from one in use.
package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrInUse is wrapped when the file exists and a live process holds its lock.
var ErrInUse = errors.New("in use by a live process")

// A NoSpaceError says that a file system has no room for a file.
type NoSpaceError struct {
	Path string
	// WantBytes is the size asked for, FreeBytes what the file system had left.
	WantBytes, FreeBytes int64
}

func (e *NoSpaceError) Error() string {
	return fmt.Sprintf("shared memory %s: %d bytes wanted, but its file system has %d bytes free; make the file smaller or the file system larger",
		e.Path, e.WantBytes, e.FreeBytes)
}

// Unwrap lets errors.Is find unix.ENOSPC.
func (e *NoSpaceError) Unwrap() error { return unix.ENOSPC }

// createTriesMax bounds the race of two processes for one path. Each lost try means
// that another process made progress, so a handful is plenty.
const createTriesMax = 8

// A File is a shared-memory file that this process made.
type File struct {
	path string
	file *os.File
	mem  []byte

	once sync.Once
	err  error
}

// Create makes a file of size bytes at path and maps it. When replace is set, a file
// that is already there is removed first, provided that it is a regular file of this
// user and no live process holds its lock; otherwise an existing file is an error
// that wraps fs.ErrExist or ErrInUse.
func Create(path string, size int64, replace bool) (*File, error) {
	if size <= 0 || int64(int(size)) != size {
		return nil, fmt.Errorf("shared memory %s: size is %d bytes; it must be positive and fit the address space", path, size)
	}
	for range createTriesMax {
		f, err := createLocked(path)
		switch {
		case err == nil:
			return allocate(f, path, size)
		case errors.Is(err, errLostRace):
			continue
		case !replace || !errors.Is(err, fs.ErrExist):
			return nil, fmt.Errorf("shared memory: %w", err)
		}
		if err := removeStale(path); err != nil {
			return nil, fmt.Errorf("shared memory: %w", err)
		}
	}
	return nil, fmt.Errorf("shared memory %s: another process took the path in each of %d tries: %w", path, createTriesMax, ErrInUse)
}

var errLostRace = errors.New("another process removed the file before it was locked")

// createLocked returns a new file at path whose lock we hold. Between open and lock
// another process may take the file for a stale one and remove it; so it counts only
// when, with the lock held, the path still leads to it.
func createLocked(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil || !samePath(f, path) {
		f.Close()
		return nil, errLostRace
	}
	return f, nil
}

func samePath(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Lstat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// removeStale removes the file at path if no live process holds its lock.
func removeStale(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &fs.PathError{Op: "fstat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s exists with mode %o and owner %d; only a regular file of user %d is replaced: remove it or choose another path",
			path, st.Mode, st.Uid, os.Geteuid())
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("%s: %w: stop that process or choose another path", path, ErrInUse)
	}
	if !samePath(f, path) {
		return nil // replaced under us; the next try sees what is there now
	}
	return os.Remove(path)
}

func allocate(f *os.File, path string, size int64) (*File, error) {
	fail := func(err error) (*File, error) {
		os.Remove(path)
		f.Close()
		return nil, err
	}
	if free, known := freeBytes(f); known && free < size {
		return fail(&NoSpaceError{Path: path, WantBytes: size, FreeBytes: free})
	}
	if err := fallocate(int(f.Fd()), size); err != nil {
		if !errors.Is(err, unix.ENOSPC) {
			return fail(fmt.Errorf("shared memory %s: allocate %d bytes: %w", path, size, err))
		}
		// Others took the room since. Give back what was had, and only then count.
		_ = f.Truncate(0)
		free, _ := freeBytes(f)
		return fail(&NoSpaceError{Path: path, WantBytes: size, FreeBytes: free})
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fail(fmt.Errorf("shared memory %s: map %d bytes: %w", path, size, err))
	}
	return &File{path: path, file: f, mem: mem}, nil
}

func fallocate(fd int, size int64) error {
	for {
		// Signals of the Go scheduler interrupt a long fallocate; it starts again
		// over pages that are already there, so it gets further each time.
		if err := unix.Fallocate(fd, 0, 0, size); err != unix.EINTR {
			return err
		}
	}
}

// freeBytes is what the file system of f has left for an ordinary user. It is not known
// where there is no limit, such as a tmpfs without size.
func freeBytes(f *os.File) (free int64, known bool) {
	var st unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &st) != nil || st.Blocks == 0 {
		return 0, false
	}
	return int64(st.Bavail) * st.Bsize, true
}

// InMemory reports whether dir is in a file system that keeps files in memory.
func InMemory(dir string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC || st.Type == unix.HUGETLBFS_MAGIC, nil
}

// Path of the file.
func (f *File) Path() string { return f.path }

// Bytes is the mapped memory. It must not be used after Close.
func (f *File) Bytes() []byte { return f.mem }

// Unlink removes the name; the memory stays mapped until Close.
func (f *File) Unlink() error {
	if !samePath(f.file, f.path) {
		return nil // gone already, or another process's file by now
	}
	return os.Remove(f.path)
}

// Close removes the file, unmaps it and drops its lock. Closing twice is harmless.
func (f *File) Close() error {
	f.once.Do(func() {
		f.err = errors.Join(f.Unlink(), unix.Munmap(f.mem), f.file.Close())
		f.mem = nil
	})
	return f.err
}

// A Mapping is a part of a file that another process made.
type Mapping struct {
	whole []byte
	mem   []byte
	once  sync.Once
	err   error
}

// Map maps length bytes at offset of the file at path. It refuses a range that the
// file does not hold, which would be a SIGBUS later.
func Map(path string, offset, length int64) (*Mapping, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("map shared memory: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("map shared memory: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("map shared memory %s: it is no regular file but %v", path, st.Mode())
	}
	if offset < 0 || length <= 0 || offset > st.Size() || length > st.Size()-offset {
		return nil, fmt.Errorf("map shared memory %s: %d bytes at offset %d wanted, but the file has %d bytes", path, length, offset, st.Size())
	}
	skip := offset % int64(os.Getpagesize())
	whole, err := unix.Mmap(int(f.Fd()), offset-skip, int(length+skip), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map shared memory %s: %d bytes at offset %d: %w", path, length, offset, err)
	}
	return &Mapping{whole: whole, mem: whole[skip : skip+length : skip+length]}, nil
}

// Bytes is the mapped memory. It must not be used after Close.
func (m *Mapping) Bytes() []byte { return m.mem }

// Close unmaps. Closing twice is harmless.
func (m *Mapping) Close() error {
	m.once.Do(func() {
		m.mem = nil
		m.err = unix.Munmap(m.whole)
	})
	return m.err
}
