package pairs

import (
	"io/fs"
	"syscall"
	"time"
)

// changedAt is when a file, or what is known of it, has changed, by the clock of its file
// system: nobody sets it.
func changedAt(info fs.FileInfo) time.Time {
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		return time.Unix(sys.Ctim.Unix())
	}
	return info.ModTime()
}
