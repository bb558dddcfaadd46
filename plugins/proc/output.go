package proc

import (
	"bytes"
	"log/slog"
	"strconv"
	"sync"
	"time"
)

const (
	// outputTailBytes is how much is kept of what a process printed last, for the message
	// of its failure.
	outputTailBytes = 512

	// outputLinesMax bounds the lines of one process that are logged: enough for a program
	// that says what it does, too few to fill a disk.
	outputLinesMax = 100

	// outputLineBytesMax cuts a logged line.
	outputLineBytesMax = 512

	// outputBytesPerSecond is how fast the output of a process is read. One that prints
	// more waits in its own write, and the daemon spends no processor time on it.
	outputBytesPerSecond = 1 << 20
)

// An output takes what a process prints: the first lines go to the log, the last bytes are
// kept.
type output struct {
	log *slog.Logger

	mu    sync.Mutex
	tail  []byte
	cause []byte // the line with which the Go runtime ended the process
	lines int
}

// A stream is one of the ways to print. It is written by one goroutine.
type stream struct {
	*output
	line []byte // begun, and not logged yet
}

// Write implements io.Writer. It takes as long as outputBytesPerSecond allows.
func (s *stream) Write(b []byte) (int, error) {
	s.mu.Lock()
	s.tail = append(s.tail, b[max(0, len(b)-outputTailBytes):]...)
	s.tail = s.tail[max(0, len(s.tail)-outputTailBytes):]
	for rest := b; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte("\n"))
		if room := outputLineBytesMax - len(s.line); room > 0 {
			s.line = append(s.line, part[:min(room, len(part))]...)
		}
		if rest = after; whole {
			s.endLine()
		}
	}
	s.mu.Unlock()
	time.Sleep(time.Duration(len(b)) * time.Second / outputBytesPerSecond)
	return len(b), nil
}

// endLine logs the line that was begun, when it is one of the first. s.mu is held.
func (s *stream) endLine() {
	line := bytes.TrimSpace(s.line)
	if s.cause == nil && (bytes.HasPrefix(line, []byte("panic: ")) || bytes.HasPrefix(line, []byte("fatal error: "))) {
		s.cause = bytes.Clone(line)
	}
	if len(line) > 0 && s.lines < outputLinesMax {
		s.lines++
		s.log.Info("a rule's process printed", "line", shown(line))
		if s.lines == outputLinesMax {
			s.log.Warn("a rule's process prints much; the rest of it is not logged", "lines", s.lines)
		}
	}
	s.line = s.line[:0]
}

// last returns what was printed last, quoted; empty when nothing was. After a crash of the
// Go runtime that is the line before the stacks, of which there may be many.
func (o *output) last() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := bytes.TrimSpace(o.tail)
	if o.cause != nil {
		text = o.cause
	}
	if len(text) == 0 {
		return ""
	}
	return strconv.QuoteToASCII(string(text))
}

// shown escapes what does not print: a terminal obeys what it is sent.
func shown(text []byte) string {
	q := strconv.QuoteToASCII(string(text))
	return q[1 : len(q)-1]
}
