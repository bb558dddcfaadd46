package pairs

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tierd/tierd/host/config"
)

// A moduleCache keeps fetched modules in a directory, the least recently used ones out. What
// cannot be kept is fetched again.
type moduleCache struct {
	dir      string
	bytesMax int64
	log      *slog.Logger
}

func (c *moduleCache) path(id digest) string {
	return filepath.Join(c.dir, hex.EncodeToString(id[:])+".wasm")
}

func (c *moduleCache) get(id digest) []byte {
	path := c.path(id)
	b, err := readRegular(path, moduleBytesMax)
	if err != nil {
		return nil
	}
	if sha256.Sum256(b) != id { // the disk, or somebody else
		os.Remove(path)
		return nil
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now)
	return b
}

func (c *moduleCache) put(id digest, b []byte) {
	if err := writeWhole(c.path(id), b); err != nil {
		c.log.Warn("a peer's module could not be kept; it is fetched again when it is needed", "error", err)
		return
	}
	prune(c.dir, c.path(id), func(n int, bytes int64) bool { return bytes <= c.bytesMax })
}

// prune removes the oldest files of a directory but one, until enough says so of how many
// files are left, and of their bytes.
func prune(dir, but string, enough func(n int, bytes int64) bool) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	var files []fs.FileInfo
	total := int64(0)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			files = append(files, info)
			total += info.Size()
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), strings.Compare(a.Name(), b.Name()))
	})
	left := len(files)
	for _, f := range files {
		path := filepath.Join(dir, f.Name())
		if enough(left, total) {
			return
		}
		if path != but && os.Remove(path) == nil {
			left--
			total -= f.Size()
		}
	}
}

// readRegular reads a file and no pipe, which would wait.
func readRegular(path string, bytesMax int64) ([]byte, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: path, Err: fs.ErrInvalid}
	}
	return config.ReadAtMost(path, bytesMax)
}

// cause is what went wrong, without the path, which may be that of a file on its way.
func cause(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &link):
		return link.Err
	}
	return err
}

// writeWhole writes a file whole or not at all, and makes its directory.
func writeWhole(path string, b []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
