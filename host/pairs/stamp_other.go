//go:build !linux

package pairs

import (
	"io/fs"
	"time"
)

// changedAt is when a file has changed, as far as every system tells it.
func changedAt(info fs.FileInfo) time.Time { return info.ModTime() }
