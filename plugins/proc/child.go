package proc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tierd/tierd/abi"
)

// handshakeBytesMax bounds the first line of a program, which holds a certificate of some
// 1,000 bytes.
const handshakeBytesMax = 16 << 10

// exitDrain is how long the output of a process is still read after its end: what it
// printed last is in the pipe already, and a process that it left behind may hold the
// other end for ever.
const exitDrain = 100 * time.Millisecond

// A child is one operating system process. It is go-plugin's runner.Runner, because the
// one that go-plugin brings lets a process outlive its host, takes its output unbounded,
// and waits for ever when a grandchild holds a pipe.
type child struct {
	cmd    *exec.Cmd
	dir    string       // that the socket must be in
	check  func() error // the last look at the file before it is run
	output *output

	stdout, stderr *os.File      // our ends
	line           chan string   // the handshake, checked; closed when there is none
	pending        []byte        // of line, not read by go-plugin yet
	drained        chan struct{} // closed when no more output will come
	ended          chan struct{} // closed when the process is gone
	// What became of the handshake; set before line is closed.
	greeted bool
	bad     error

	mu     sync.Mutex
	pid    int
	killed bool  // nobody may start it any more, or it is started and was killed
	reaped bool  // the pid may be another's
	how    error // of exec.Cmd.Wait
}

func newChild(cmd *exec.Cmd, dir string, check func() error, out *output) *child {
	return &child{
		cmd: cmd, dir: dir, check: check, output: out,
		line: make(chan string, 1), drained: make(chan struct{}), ended: make(chan struct{}),
	}
}

// Start implements runner.Runner. The process is started and awaited by one goroutine on a
// thread of its own: Linux kills the process when the thread that started it ends, and the
// Go runtime ends threads as it likes.
func (c *child) Start(context.Context) error {
	outR, outW, err := os.Pipe()
	if err != nil {
		return err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return errors.Join(err, outR.Close(), outW.Close())
	}
	c.stdout, c.stderr = outR, errR
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = nil, outW, errW
	c.cmd.SysProcAttr = attributes()
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(c.ended)
		err := c.launch()
		outW.Close()
		errW.Close()
		started <- err
		if err == nil {
			c.await()
		}
	}()
	if err := <-started; err != nil {
		return errors.Join(err, outR.Close(), errR.Close())
	}
	go c.drain()
	return nil
}

func (c *child) launch() error {
	if err := c.check(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed {
		return context.Canceled
	}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	c.pid = c.cmd.Process.Pid
	return nil
}

// await waits until the process has ended, ends what it left in its group while its pid
// still names it, and takes its status.
func (c *child) await() {
	awaitExit(c.pid)
	c.mu.Lock()
	killGroup(c.cmd.Process)
	c.reaped = true
	c.mu.Unlock()
	how := c.cmd.Wait()
	c.mu.Lock()
	c.how = how
	c.mu.Unlock()
	late := time.Now().Add(exitDrain)
	_ = c.stdout.SetReadDeadline(late)
	_ = c.stderr.SetReadDeadline(late)
}

// kill ends the process and its group, or keeps it from being started. It does not wait.
func (c *child) kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.killed = true
	if c.pid != 0 && !c.reaped {
		killGroup(c.cmd.Process)
	}
}

// end says in words how the process ended.
func (c *child) end() string {
	select {
	case <-c.ended:
	default:
		return "closed its socket"
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.how == nil {
		return "ended (exit status 0)"
	}
	return fmt.Sprintf("ended (%v)", c.how)
}

// drain reads both outputs to their end: the first line is the handshake.
func (c *child) drain() {
	var wg sync.WaitGroup
	wg.Go(func() {
		defer c.stdout.Close()
		r := bufio.NewReaderSize(c.stdout, handshakeBytesMax)
		out := &stream{output: c.output}
		c.handshake(r, out)
		_, _ = io.Copy(out, onlyReader{r})
	})
	wg.Go(func() {
		defer c.stderr.Close()
		_, _ = io.Copy(&stream{output: c.output}, onlyReader{c.stderr})
	})
	wg.Wait()
	close(c.drained)
}

// onlyReader keeps io.Copy from finding a faster way than Write, which sets the pace.
type onlyReader struct{ io.Reader }

// handshake reads and checks the first line. One that is none goes to out.
func (c *child) handshake(r *bufio.Reader, out io.Writer) {
	defer close(c.line)
	text, err := r.ReadSlice('\n')
	line := string(text)
	if err == nil {
		if c.bad = c.checkLine(strings.TrimSpace(line)); c.bad == nil {
			c.greeted = true
			c.line <- line
			return
		}
	}
	_, _ = io.WriteString(out, line)
	if c.bad == nil && len(line) > 0 {
		c.bad = notHandshake(line)
	}
}

func notHandshake(line string) error {
	const most = 80
	return &ProtocolError{Func: "start", Problem: fmt.Sprintf(
		"its first line is %q, not a handshake; does its main call serve.Main, and print nothing before?", strings.TrimSpace(line[:min(len(line), most)]))}
}

// checkLine judges core|version|network|address|protocol|certificate before go-plugin acts
// on it.
func (c *child) checkLine(line string) error {
	bad := func(format string, args ...any) error {
		return &ProtocolError{Func: "start", Problem: fmt.Sprintf(format, args...)}
	}
	f := strings.Split(line, "|")
	if len(f) < 4 || f[0] != strconv.Itoa(coreVersion) {
		return notHandshake(line)
	}
	version, err := strconv.Atoi(f[1])
	if err != nil {
		return notHandshake(line)
	}
	switch {
	case version != abi.Major:
		return bad("it speaks version %d of the ABI, and this tierd version %d; build it with the abi/serve of this tierd", version, abi.Major)
	case f[2] != "unix" || filepath.Dir(filepath.Dir(f[3])) != c.dir:
		return bad("it listens at %s %q; it must be a Unix socket in the directory that it was given", f[2], f[3])
	case len(f) < 5 || f[4] != "grpc":
		return bad("it speaks no gRPC; go-plugin's GRPCServer must be set")
	case len(f) < 6 || f[5] == "":
		return bad("it gave no certificate; go-plugin's AutoMTLS must be supported")
	}
	return nil
}

// coreVersion is the version of go-plugin's handshake.
const coreVersion = 1

// Read gives go-plugin the handshake, and nothing of what is printed later.
func (c *child) Read(p []byte) (int, error) {
	if len(c.pending) == 0 {
		line, ok := <-c.line
		if !ok {
			return 0, io.EOF
		}
		c.pending = []byte(line)
	}
	n := copy(p, c.pending)
	c.pending = c.pending[n:]
	return n, nil
}

// Close does nothing: drain closes.
func (c *child) Close() error { return nil }

// Stdout implements runner.Runner.
func (c *child) Stdout() io.ReadCloser { return c }

// Stderr implements runner.Runner; drain has it.
func (c *child) Stderr() io.ReadCloser { return io.NopCloser(strings.NewReader("")) }

// Wait implements runner.Runner.
func (c *child) Wait(context.Context) error {
	<-c.ended
	<-c.drained
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.how
}

// Kill implements runner.Runner.
func (c *child) Kill(context.Context) error {
	c.kill()
	return nil
}

// ID implements runner.Runner.
func (c *child) ID() string { return strconv.Itoa(c.id()) }

func (c *child) id() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pid
}

// Name implements runner.Runner.
func (c *child) Name() string { return c.cmd.Path }

// Diagnose implements runner.Runner.
func (c *child) Diagnose(context.Context) string { return "" }

// PluginToHost implements runner.Runner.
func (c *child) PluginToHost(network, address string) (string, string, error) {
	return network, address, nil
}

// HostToPlugin implements runner.Runner.
func (c *child) HostToPlugin(network, address string) (string, string, error) {
	return network, address, nil
}
