// Package lockfile lets one process at a time have a path.
//
// The lock is the kernel's (flock), so it ends with its process however that ends; the
// file only carries it, and the words of its holder. Release removes the file, which is
// free of races because Take counts a lock only when, with it held, the path still leads
// to the locked file: whoever opened the file before it was removed tries again.
package lockfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// holderBytesMax is what Take reads of a holder's words: a name and a number.
const holderBytesMax = 256

// triesMax bounds the race of several processes for one path. Each lost try means that
// another process released it, so a handful is plenty.
const triesMax = 8

// A HeldError says that a live process has the lock.
type HeldError struct {
	Path string
	// Holder is what that process said of itself; empty while it starts.
	Holder string
}

func (e *HeldError) Error() string {
	if e.Holder == "" {
		return "another live process has the lock " + e.Path
	}
	return fmt.Sprintf("%s has the lock %s", e.Holder, e.Path)
}

// A Lock is held until Release, or until the process ends.
type Lock struct {
	path string
	file *os.File
	once sync.Once
	err  error
}

// Take makes the file at path, with mode 0600, and locks it. holder is what others are
// told that want it too. A file that a dead process left behind is taken over; a live
// one's is a *HeldError.
func Take(path, holder string) (*Lock, error) {
	for range triesMax {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			said, _ := io.ReadAll(io.LimitReader(f, holderBytesMax))
			f.Close()
			if !errors.Is(err, unix.EWOULDBLOCK) {
				return nil, &os.PathError{Op: "flock", Path: path, Err: err}
			}
			return nil, &HeldError{Path: path, Holder: strings.TrimSpace(string(said))}
		}
		if !leadsTo(path, f) {
			f.Close()
			continue
		}
		if err := say(f, holder); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return &Lock{path: path, file: f}, nil
	}
	return nil, &HeldError{Path: path}
}

func say(f *os.File, holder string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(holder+"\n"), 0)
	return err
}

func leadsTo(path string, f *os.File) bool {
	a, errA := f.Stat()
	b, errB := os.Lstat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// Release removes the file, and then lets the lock go. Releasing twice is harmless.
func (l *Lock) Release() error {
	l.once.Do(func() {
		if leadsTo(l.path, l.file) { // else somebody removed it, and it may be another's by now
			l.err = os.Remove(l.path)
		}
		l.err = errors.Join(l.err, l.file.Close())
	})
	return l.err
}
