package transfer

import (
	"log/slog"
	"sync"
	"time"
)

// limitedLog writes at most one line per cause and interval, and says how many it
// kept back: a port scanner must not fill a disk.
type limitedLog struct {
	log      *slog.Logger
	interval time.Duration

	mu     sync.Mutex
	causes map[string]*causeLog // causes are literals of this package, so it stays small
}

type causeLog struct {
	last time.Time
	kept int
}

func newLimitedLog(o Options) *limitedLog {
	return &limitedLog{log: o.Log, interval: o.LogInterval, causes: map[string]*causeLog{}}
}

func (l *limitedLog) warn(cause string, args ...any) {
	now := time.Now()
	l.mu.Lock()
	c := l.causes[cause]
	if c == nil {
		c = &causeLog{}
		l.causes[cause] = c
	}
	if !c.last.IsZero() && now.Sub(c.last) < l.interval {
		c.kept++
		l.mu.Unlock()
		return
	}
	kept := c.kept
	c.last, c.kept = now, 0
	l.mu.Unlock()
	if kept > 0 {
		args = append(args, "similar_lines_kept_back", kept)
	}
	l.log.Warn(cause, args...)
}
