// Package limitlog writes log lines about faults, so few that a storm of them does not
// fill a disk or hide other lines, and so that none goes unmentioned.
//
// A line belongs to a cause, one of a handful of literals such as "checksum" (where a
// configured peer has one of its own, its id is in it), and to a fault, such as the peer that fell silent. In each window of a cause
//
//   - a fault has one line, however many requests it meets,
//   - all faults together have [LinesMax] lines,
//   - what was left out is counted, and said in one line when the window ends.
//
// A window begins with its first line and takes [Window]. So a cause writes at most
// LinesMax+1 lines in that time, and the first line of a new fault is never late.
package limitlog

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	// LinesMax of a cause in one window: enough to see whether the faults have something
	// in common, few enough to be read.
	LinesMax = 5
	// Window is how long a cause's lines count together.
	Window = time.Minute
)

// A Log is a slog.Logger with that limit. Its methods may be called from any goroutine.
type Log struct {
	log *slog.Logger

	mu     sync.Mutex
	causes map[string]*window
	closed bool
}

// window is the current one of a cause; there is none before its first line.
type window struct {
	faults map[string]bool // that have their line; LinesMax at most
	level  slog.Level      // the highest of what was left out
	left   int
	timer  *time.Timer
}

// New returns a Log that writes to l. Close it after the last line.
func New(l *slog.Logger) *Log { return &Log{log: l, causes: map[string]*window{}} }

// Log writes a line of a fault, or counts it. The line names the cause, unless that is the
// message. A level that the logger does not write is
// neither, and one below Info is not limited: who asks for it wants to see it all.
func (l *Log) Log(level slog.Level, cause, fault, msg string, args ...any) {
	if !l.log.Enabled(context.Background(), level) || level >= slog.LevelInfo && !l.admit(level, cause, fault) {
		return
	}
	if cause != msg {
		args = append([]any{"cause", cause}, args...)
	}
	l.log.Log(context.Background(), level, msg, args...)
}

func (l *Log) admit(level slog.Level, cause, fault string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return true // what a node says at its very end is little
	}
	w := l.causes[cause]
	if w == nil {
		w = &window{faults: map[string]bool{}}
		w.timer = time.AfterFunc(Window, func() { l.end(cause, w) })
		l.causes[cause] = w
	}
	if w.faults[fault] || len(w.faults) == LinesMax {
		w.left++
		w.level = max(w.level, level)
		return false
	}
	w.faults[fault] = true
	return true
}

// end closes a window; the next line of the cause begins another.
func (l *Log) end(cause string, w *window) {
	l.mu.Lock()
	if l.causes[cause] != w {
		l.mu.Unlock()
		return
	}
	delete(l.causes, cause)
	left, level := w.left, w.level
	l.mu.Unlock()
	if left > 0 {
		l.log.Log(context.Background(), level, "more lines like those before were left out", "cause", cause, "left_out", left, "lines_max", LinesMax, "window", Window)
	}
}

// Close says what was left out in the windows that are open.
func (l *Log) Close() {
	l.mu.Lock()
	l.closed = true
	open := map[string]*window{}
	for cause, w := range l.causes {
		w.timer.Stop()
		open[cause] = w
	}
	l.mu.Unlock()
	for cause, w := range open {
		l.end(cause, w)
	}
}
