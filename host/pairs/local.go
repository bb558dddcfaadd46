package pairs

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/tierd/tierd/host/config"
)

// A localDir is the operator's directory of rules of other versions; nil is none. Files are
// found by the digest of what they hold, whatever their names. A file is hashed once for as
// long as it is the same one, and its size and times stay: a directory may hold 64 GiB, and
// each unknown rule of a peer is looked for in it. What is found is hashed again by whoever
// opens it.
type localDir struct {
	dir   string
	turn  chan struct{}       // one entry for the search in work; the others go on with its hashes
	known map[string]fileHash // by name; whoever has the turn
	young time.Duration       // settledAfter
}

// A fileHash is what a file held. Neither its size nor the time that it shows tells two apart
// alone: packages and archives give all of their files one time, and a link leads elsewhere
// from one moment to the next.
type fileHash struct {
	file fs.FileInfo
	id   digest
}

func (h *fileHash) isOf(info fs.FileInfo) bool {
	return os.SameFile(h.file, info) && h.file.Size() == info.Size() && h.file.ModTime().Equal(info.ModTime()) &&
		changedAt(h.file).Equal(changedAt(info))
}

// settledAfter is the age from which on a file's time tells whether it has changed: a change
// within the tick of the file system's clock, two seconds at most, does not show.
const settledAfter = 2 * time.Second

func newLocalDir(dir string) *localDir {
	if dir == "" {
		return nil
	}
	return &localDir{dir: dir, turn: make(chan struct{}, 1), known: map[string]fileHash{}, young: settledAfter}
}

func (d *localDir) String() string {
	if d == nil {
		return "peer_rules, which is not set (a restart sets it)"
	}
	return d.dir
}

// find returns the path of the file with a digest, or "". It ends with ctx.
func (d *localDir) find(ctx context.Context, id digest) (string, error) {
	if d == nil {
		return "", nil
	}
	if !enter(ctx, d.turn) {
		return "", context.Cause(ctx)
	}
	defer leave(d.turn)
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return "", err
	}
	if len(entries) > localFilesMax {
		return "", fmt.Errorf("%s has %d files; at most %d are looked at", d.dir, len(entries), localFilesMax)
	}
	names := make(map[string]bool, len(entries))
	for _, e := range entries {
		names[e.Name()] = true
	}
	maps.DeleteFunc(d.known, func(name string, _ fileHash) bool { return !names[name] })
	for _, e := range entries {
		got, err := d.digestOf(ctx, e.Name())
		switch {
		case ctx.Err() != nil:
			return "", context.Cause(ctx)
		case err == nil && got == id:
			return filepath.Join(d.dir, e.Name()), nil
		}
	}
	return "", nil
}

// digestOf returns what a file holds, from memory when it has not changed.
func (d *localDir) digestOf(ctx context.Context, name string) (id digest, err error) {
	path := filepath.Join(d.dir, name)
	info, err := os.Stat(path)
	if err != nil {
		return id, err
	}
	if !info.Mode().IsRegular() || info.Size() > localFileBytesMax { // opening a pipe would wait
		return id, fs.ErrInvalid
	}
	if k, ok := d.known[name]; ok && k.isOf(info) {
		return k.id, nil
	}
	settled := time.Since(changedAt(info)) >= d.young // before it is read
	id, err = hashFile(ctx, path)
	if err == nil && settled {
		d.known[name] = fileHash{info, id}
	}
	return id, err
}

// read returns the module with a digest, or nil.
func (d *localDir) read(ctx context.Context, id digest) []byte {
	path, err := d.find(ctx, id)
	if err != nil || path == "" {
		return nil
	}
	b, err := config.ReadAtMost(path, moduleBytesMax)
	if err != nil || sha256.Sum256(b) != id {
		return nil
	}
	return b
}

func hashFile(ctx context.Context, path string) (id digest, err error) {
	f, err := os.Open(path)
	if err != nil {
		return id, err
	}
	defer f.Close()
	h := sha256.New()
	if err := pour(ctx, h, io.LimitReader(f, localFileBytesMax)); err != nil {
		return id, err
	}
	return digest(h.Sum(nil)), nil
}

// pour hashes what r has, and ends with ctx between two reads.
func pour(ctx context.Context, h hash.Hash, r io.Reader) error {
	b := make([]byte, 256<<10)
	for ctx.Err() == nil {
		n, err := r.Read(b)
		h.Write(b[:n])
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
	return context.Cause(ctx)
}
