package proc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/tierd/tierd/abi"
)

const (
	// CallTimeoutDefault ends a call. The longest honest one, a scan of abi.MaxChunks
	// chunks, takes 50 ms, and a batch no longer; the rest is for a machine that is busy.
	// A request of an engine waits as long for a frozen process, once.
	CallTimeoutDefault = time.Second

	// StartTimeoutDefault bounds the time from the start of a process to its manifests,
	// which takes 50 ms, and the opening of its rules. A program that loads a table or is
	// read from a slow disk has room.
	StartTimeoutDefault = 10 * time.Second

	// RestartsMax is how often a failed process is started again before it is given up: a
	// program that fails six times in a row fails for a reason that no start mends.
	RestartsMax = 5

	// RestartWaitMin is the wait before the first restart; each further one waits twice as
	// long, so that all of them are over in 3 s and one core is not spent on starting.
	RestartWaitMin = 100 * time.Millisecond

	// RestartForget is how long a process must live for its earlier failures to be
	// forgotten: the bound is on failures in a row, not on those of a year.
	RestartForget = 10 * time.Minute

	// CloseGrace bounds the wait of Close for processes that were killed. One that is still
	// there is held by the kernel, such as in a read from a dead network disk.
	CloseGrace = 5 * time.Second

	// FreshMax bounds the processes that Fresh has started and nobody has released. Each
	// has some 20 MB.
	FreshMax = 64

	// ProgramBytesMax bounds the file, which is read whole before each start. A stripped
	// program has 13 MB.
	ProgramBytesMax = 1 << 30
)

// Options says how a program is run. The zero value is usable.
type Options struct {
	// CallTimeout ends a call; 0 means CallTimeoutDefault.
	CallTimeout time.Duration
	// StartTimeout bounds a start; 0 means StartTimeoutDefault.
	StartTimeout time.Duration
	// TempDir is where the private directories of the processes are made; empty means
	// that of the system. Its path must be short, since the path of a socket is.
	TempDir string
	// Log gets what a process prints, and its failures; nil means nowhere.
	Log *slog.Logger

	restartWait, restartForget time.Duration // the constants; tests have less time
}

// A Program is a file that serves rules, and the process that it runs in.
type Program struct {
	path    string
	sum     [sha256.Size]byte
	options Options
	specs   []abi.Spec // set by the first start, never changed

	life context.Context // ends with Close
	end  context.CancelFunc
	wg   sync.WaitGroup // of processes, and of restarts

	opening sync.Mutex // one Open or restart at a time: neither misses the other's rules

	mu        sync.Mutex
	processes map[*process]struct{} // all that are not gone yet
	current   *process              // nil while there is none
	down      error                 // why there is none
	rules     []*identity
	opened    map[string]*rule
	failures  int // in a row
	fresh     int // processes that Fresh has started and nobody has released
	closed    bool
}

// Load starts the program at path and reads its manifests. ctx bounds the start only.
func Load(ctx context.Context, path string, o Options) (*Program, error) {
	if o.CallTimeout < 0 || o.StartTimeout < 0 {
		return nil, fmt.Errorf("program %s: call_timeout is %v and start_timeout is %v; neither may be negative", path, o.CallTimeout, o.StartTimeout)
	}
	if o.CallTimeout == 0 {
		o.CallTimeout = CallTimeoutDefault
	}
	if o.StartTimeout == 0 {
		o.StartTimeout = StartTimeoutDefault
	}
	if o.restartWait == 0 {
		o.restartWait, o.restartForget = RestartWaitMin, RestartForget
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	path, err := filepath.Abs(path) // the process has another working directory
	if err != nil {
		return nil, err
	}
	p := &Program{path: path, options: o, opened: map[string]*rule{}, processes: map[*process]struct{}{}}
	if p.sum, err = digest(path); err != nil {
		return nil, err
	}
	p.life, p.end = context.WithCancel(context.Background())
	pr, err := p.start(ctx)
	if err != nil {
		p.end()
		return nil, fmt.Errorf("program %s: %w", path, err)
	}
	p.serve(pr)
	return p, nil
}

// digest returns the digest of a file that can be a program.
func digest(path string) (sum [sha256.Size]byte, err error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sum, &missingError{path}
	case err != nil:
		return sum, err
	case !info.Mode().IsRegular(): // opening a pipe would wait for its writer
		return sum, fmt.Errorf("%s is not a regular file", path)
	case info.Mode()&0o111 == 0:
		return sum, fmt.Errorf("%s has the mode %v and cannot be run; chmod +x it", path, info.Mode())
	case info.Size() > ProgramBytesMax:
		return sum, fmt.Errorf("%s has %d bytes; at most %d are allowed", path, info.Size(), ProgramBytesMax)
	}
	f, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	var magic [4]byte
	if n, _ := io.ReadFull(f, magic[:]); bytes.Equal(magic[:n], []byte("\x00asm")) {
		return sum, fmt.Errorf("%s is a WebAssembly module, not a program; leave out exec: in its reference", path)
	}
	h := sha256.New()
	h.Write(magic[:min(int64(len(magic)), info.Size())])
	if _, err := io.Copy(h, io.LimitReader(f, ProgramBytesMax)); err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, nil
}

// A missingError is the path of a program that is not there. It is an fs.ErrNotExist.
type missingError struct{ path string }

func (e *missingError) Error() string {
	return fmt.Sprintf("there is no file %s; build the program first, or correct the path, which is relative to the deployment file", e.path)
}

func (*missingError) Unwrap() error { return fs.ErrNotExist }

// checkDigest reports a file that is not the one that was loaded.
func (p *Program) checkDigest() error {
	sum, err := digest(p.path)
	if err == nil && sum != p.sum {
		err = &DigestError{Path: p.path, Want: inWords(p.sum), Got: inWords(sum)}
	}
	return err
}

func inWords(sum [sha256.Size]byte) string { return "sha256:" + hex.EncodeToString(sum[:]) }

// Digest returns "sha256:" and the hexadecimal digest of the file.
func (p *Program) Digest() string { return inWords(p.sum) }

// Specs returns the program's rules in the order of its manifests.
func (p *Program) Specs() []abi.Spec { return p.specs }

// Close ends the process, and those that Fresh has started, and waits until they are gone.
// Calls get ErrClosed from then on, those in work too. When ctx ends first, or CloseGrace
// is over, Close returns an error; what is left ends by itself.
func (p *Program) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.current, p.down = nil, ErrClosed
	for pr := range p.processes {
		go pr.stop(ErrClosed)
	}
	p.mu.Unlock()
	p.end()
	gone := make(chan struct{})
	go func() {
		p.wg.Wait()
		close(gone)
	}()
	grace := time.NewTimer(CloseGrace)
	defer grace.Stop()
	select {
	case <-gone:
		return nil
	case <-grace.C:
		return fmt.Errorf("program %s: close: its process was killed and is still there after %v", p.path, CloseGrace)
	case <-ctx.Done():
		return fmt.Errorf("program %s: close: %w", p.path, ctx.Err())
	}
}

// running returns the process, or why there is none.
func (p *Program) running() (*process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current, p.down
}

// serve makes a process the one that calls go to.
func (p *Program) serve(pr *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed { // and so the process is being stopped
		return
	}
	p.current, p.down = pr, nil
	pr.mu.Lock()
	err := pr.err
	pr.lost = p.lost
	pr.mu.Unlock()
	if err != nil { // it has failed already, and told nobody
		p.lostLocked(pr, err)
	}
}

// lost takes note of a process that has failed, and sees to the next.
func (p *Program) lost(pr *process, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lostLocked(pr, err)
}

func (p *Program) lostLocked(pr *process, err error) {
	if p.closed {
		return
	}
	go pr.stop(err)
	if time.Since(pr.began) >= p.options.restartForget {
		p.failures = 0
	}
	p.fellLocked(err)
	p.wg.Go(p.restart)
}

// fellLocked counts a failure, and words what calls get until there is a process again.
func (p *Program) fellLocked(err error) {
	p.failures++
	p.current = nil
	if p.failures > RestartsMax {
		p.down = fmt.Errorf("program %s: %w, because it failed %d times in a row; mend it and restart the daemon: %w", p.path, ErrGivenUp, p.failures, err)
		p.options.Log.Error("a rule's program failed too often and is given up; mend it and restart the daemon", "program", p.path, "failures", p.failures, "error", err)
		return
	}
	p.down = fmt.Errorf("program %s: %w after a failure: %w", p.path, ErrRestarting, err)
	p.options.Log.Error("a rule's program failed; it is started again", "program", p.path, "failures", p.failures, "error", err)
}

// restart starts the process again, until it runs or is given up.
func (p *Program) restart() {
	for {
		p.mu.Lock()
		failures, closed := p.failures, p.closed
		p.mu.Unlock()
		if closed || failures > RestartsMax {
			return
		}
		wait := time.NewTimer(p.options.restartWait << (failures - 1))
		select {
		case <-wait.C:
		case <-p.life.Done():
			wait.Stop()
			return
		}
		err := p.startAgain()
		if err == nil {
			return
		}
		p.mu.Lock()
		if !p.closed {
			p.fellLocked(err)
		}
		p.mu.Unlock()
	}
}

// startAgain starts a process with all rules open, and lets calls go to it.
func (p *Program) startAgain() error {
	pr, err := p.start(p.life)
	if err != nil {
		return err
	}
	p.opening.Lock()
	defer p.opening.Unlock()
	p.mu.Lock()
	rules := p.rules
	p.mu.Unlock()
	if err := pr.openRules(rules); err != nil {
		pr.stop(err)
		return err
	}
	p.serve(pr)
	p.options.Log.Info("a rule's program is running again", "program", p.path)
	return nil
}
