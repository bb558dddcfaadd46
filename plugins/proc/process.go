package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
)

// A method is one of the three functions of a rule.
type method int

const (
	reach method = iota
	scan
	need
	methods
)

func (m method) String() string { return [methods]string{"reach", "scan", "need"}[m] }

const (
	// socketPathBytesMax is what Linux takes: sun_path has 108 bytes, one of them a NUL.
	socketPathBytesMax = 107

	// socketNameBytes is the longest tail that go-plugin appends to the directory it is
	// given: "/plugin-dir" and "/plugin" with 10 digits each.
	socketNameBytes = len("/plugin-dir") + len("/plugin") + 2*10

	// headerBytesMax bounds the headers of an answer, of which none is used.
	headerBytesMax = 16 << 10

	// killGrace is how long a start that was given up waits for the process to be gone. Only
	// one that the kernel cannot kill at once takes longer.
	killGrace = time.Second

	// endGrace is how long a call that lost its connection waits for the process to end, so
	// that the error can say how it did.
	endGrace = 200 * time.Millisecond
)

// A process is one running process of a program. Once it has failed it stays failed.
type process struct {
	program *Program
	dir     string
	child   *child
	client  *plugin.Client
	kv      kvpb.KVClient
	began   time.Time
	queues  [methods]queue
	inWork  atomic.Int64          // calls that are on their way
	lost    func(*process, error) // called once, when it fails

	life context.Context // of its calls
	end  context.CancelFunc

	mu      sync.Mutex
	err     error                // why it failed, or ErrClosed
	handles map[*identity]uint32 // of opened rules
	stopped sync.Once
}

// start starts a process and compares its manifests with those that the program had.
func (p *Program) start(ctx context.Context) (*process, error) {
	pr, err := p.newProcess()
	if err != nil {
		return nil, err
	}
	limit := time.NewTimer(p.options.StartTimeout)
	defer limit.Stop()
	greeted := make(chan error, 1)
	go func() { greeted <- pr.greet() }()
	select {
	case err = <-greeted:
	case <-limit.C:
		err = &TimeoutError{Func: "start", Limit: p.options.StartTimeout, PID: pr.child.id(), Output: pr.child.output.last()}
	case <-ctx.Done():
		err = ctx.Err()
	case <-p.life.Done():
		err = ErrClosed
	}
	if err == nil {
		return pr, nil
	}
	gone := make(chan struct{})
	go func() {
		pr.stop(err)
		close(gone)
	}()
	grace := time.NewTimer(killGrace)
	defer grace.Stop()
	select {
	case <-gone:
	case <-grace.C:
	}
	return nil, err
}

// newProcess makes a process that is not started yet; stop frees it.
func (p *Program) newProcess() (*process, error) {
	dir, err := os.MkdirTemp(p.options.TempDir, "tierd-rule-")
	if err != nil {
		return nil, fmt.Errorf("directory for the socket: %w", err)
	}
	if n := len(dir) + socketNameBytes; n > socketPathBytesMax {
		return nil, errors.Join(fmt.Errorf("the path of a socket in %s may have %d bytes, and %d is what the system takes; set TMPDIR to a shorter path", dir, n, socketPathBytesMax), os.Remove(dir))
	}
	pr := &process{program: p, dir: dir, began: time.Now(), handles: map[*identity]uint32{}}
	pr.life, pr.end = context.WithCancel(p.life)
	for m := range methods {
		pr.queues[m].send = func(batch []*call) error { return pr.send(m, batch) }
	}
	pr.configure()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		pr.end()
		return nil, errors.Join(ErrClosed, os.Remove(dir))
	}
	p.processes[pr] = struct{}{}
	p.wg.Add(1)
	return pr, nil
}

// configure prepares the command and go-plugin's client. Nothing runs yet.
func (pr *process) configure() {
	p := pr.program
	cmd := exec.Command(p.path)
	cmd.Dir = pr.dir
	cmd.Env = []string{} // nil would be this process's own
	pr.child = newChild(cmd, pr.dir, p.checkDigest, &output{log: p.options.Log.With("program", p.path)})
	pr.client = plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  kvpb.Handshake,
		VersionedPlugins: kvpb.Plugins(nil),
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		RunnerFunc: func(_ hclog.Logger, c *exec.Cmd, _ string) (runner.Runner, error) {
			cmd.Env = c.Env // what go-plugin wants the program to know
			return pr.child, nil
		},
		AutoMTLS:         true,
		SkipHostEnv:      true,
		UnixSocketConfig: &plugin.UnixSocketConfig{TempDir: pr.dir},
		StartTimeout:     2 * p.options.StartTimeout, // start is earlier
		SyncStdout:       &stream{output: pr.child.output},
		SyncStderr:       &stream{output: pr.child.output},
		Logger:           quietly(p.options.Log),
		GRPCDialOptions: []grpc.DialOption{
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(kvpb.MessageBytesMax), grpc.MaxCallSendMsgSize(kvpb.MessageBytesMax)),
			grpc.WithMaxHeaderListSize(headerBytesMax),
		},
	})
}

// greet starts the process, connects, and reads its manifests. It returns soon after the
// process is killed.
func (pr *process) greet() error {
	if _, err := pr.client.Start(); err != nil {
		return pr.unstarted(err)
	}
	conn, err := pr.client.Client()
	if err != nil {
		return pr.why("start", 1, err)
	}
	kv, err := conn.Dispense(kvpb.Name)
	if err != nil {
		return err
	}
	pr.kv = kv.(kvpb.KVClient)
	reply, err := pr.kv.Manifest(pr.life, &kvpb.ManifestRequest{})
	if err != nil {
		return pr.why("manifest", 1, err)
	}
	manifests, err := readManifests(reply)
	if err != nil {
		return &ProtocolError{Func: "manifest", Problem: err.Error()}
	}
	return pr.program.setManifests(manifests)
}

// unstarted says why a start failed.
func (pr *process) unstarted(err error) error {
	c := pr.child
	if c.id() == 0 {
		return err
	}
	c.kill()
	<-c.drained // and so the handshake was judged
	switch {
	case c.bad != nil:
		return c.bad
	case c.greeted:
		return &ProtocolError{Func: "start", Problem: "go-plugin refused its handshake: " + cut(err.Error()), Output: c.output.last()}
	}
	<-c.ended
	return &CallError{Func: "start", PID: c.id(), Calls: 1, How: c.end(), Output: c.output.last()}
}

// readManifests returns the manifests that a program answered, when they are valid.
func readManifests(reply *kvpb.ManifestReply) ([]*abi.Manifest, error) {
	if n := len(reply.GetRules()); n == 0 || n > kvpb.RulesMax {
		return nil, fmt.Errorf("it serves %d rules; 1 to %d are allowed", n, kvpb.RulesMax)
	}
	var out []*abi.Manifest
	seen := map[string]bool{}
	for _, r := range reply.GetRules() {
		m := r.ABI()
		if err := m.Validate(); err != nil {
			return nil, err
		}
		if seen[m.Name] {
			return nil, fmt.Errorf("it serves two rules of the name %s", m.Name)
		}
		seen[m.Name] = true
		out = append(out, m)
	}
	return out, nil
}

// openRules opens rules in this process, and keeps their handles.
func (pr *process) openRules(rules []*identity) error {
	for len(rules) > 0 {
		some := rules[:min(len(rules), kvpb.ItemsMax)]
		rules = rules[len(some):]
		request := &kvpb.OpenRequest{}
		for _, r := range some {
			request.Openings = append(request.Openings, &kvpb.Opening{Rule: r.index, Params: r.params})
		}
		ctx, cancel := pr.within(pr.program.options.StartTimeout)
		reply, err := pr.kv.Open(ctx, request)
		if err != nil {
			err = pr.fail(pr.whyUntil(ctx, "open", len(some), pr.program.options.StartTimeout, err))
			cancel()
			return err
		}
		cancel()
		if n := len(reply.GetOpened()); n != len(some) {
			return pr.fail(&ProtocolError{Func: "open", Problem: fmt.Sprintf("%d rules were to be opened, and it answered for %d", len(some), n)})
		}
		if err := pr.keepHandles(some, reply.GetOpened()); err != nil {
			return err
		}
	}
	return nil
}

func (pr *process) keepHandles(rules []*identity, opened []*kvpb.Opened) error {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	for i, r := range rules {
		if opened[i].Error != nil {
			return &RuleError{Rule: r.manifest.Name, Func: "open", Reason: cut(opened[i].GetError())}
		}
		pr.handles[r] = opened[i].GetHandle()
	}
	return nil
}

// call makes one call of an opened rule.
func (pr *process) call(m method, r *identity, item *kvpb.Item) (*kvpb.Result, error) {
	pr.mu.Lock()
	handle, err := pr.handles[r], pr.err
	pr.mu.Unlock()
	if err != nil {
		return nil, err
	}
	item.Handle = handle
	return pr.queues[m].do(item)
}

// send sends a batch and gives every call its result.
func (pr *process) send(m method, batch []*call) error {
	request := &kvpb.Batch{Items: make([]*kvpb.Item, len(batch))}
	for i, c := range batch {
		request.Items[i] = c.item
	}
	limit := pr.program.options.CallTimeout
	ctx, cancel := pr.within(limit)
	defer cancel()
	pr.inWork.Add(int64(len(batch)))
	defer pr.inWork.Add(-int64(len(batch)))
	var reply *kvpb.Results
	var err error
	switch m {
	case reach:
		reply, err = pr.kv.Reach(ctx, request)
	case scan:
		reply, err = pr.kv.Scan(ctx, request)
	default:
		reply, err = pr.kv.Need(ctx, request)
	}
	if err != nil {
		return pr.fail(pr.whyUntil(ctx, m.String(), int(pr.inWork.Load()), limit, err))
	}
	results := reply.GetResults()
	if len(results) != len(batch) {
		return pr.fail(&ProtocolError{Func: m.String(), Problem: fmt.Sprintf("%d calls were in the message, and it answered %d", len(batch), len(results))})
	}
	for i, c := range batch {
		c.result = results[i]
	}
	return nil
}

// within returns a context for one message. Its deadline is no context's deadline, because
// gRPC would tell the process of it, which could then be the first to say that it is over.
func (pr *process) within(limit time.Duration) (ctx context.Context, cancel func()) {
	ctx, end := context.WithCancelCause(pr.life)
	late := time.AfterFunc(limit, func() { end(context.DeadlineExceeded) })
	return ctx, func() {
		late.Stop()
		end(nil)
	}
}

// whyUntil is why for a call within a limit.
func (pr *process) whyUntil(ctx context.Context, fn string, n int, limit time.Duration, err error) error {
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return &TimeoutError{Func: fn, PID: pr.child.id(), Calls: n, Limit: limit, Output: pr.child.output.last()}
	}
	return pr.why(fn, n, err)
}

// why makes of gRPC's error what it means here. The status is the process's own word
// unless the connection was lost, so its code is believed only for what is no excuse.
func (pr *process) why(fn string, n int, err error) error {
	if pr.life.Err() != nil {
		return ErrClosed
	}
	s := status.Convert(err)
	switch s.Code() {
	case codes.Unavailable, codes.Canceled:
		limit := time.NewTimer(endGrace)
		defer limit.Stop()
		select {
		case <-pr.child.drained:
			<-pr.child.ended
		case <-limit.C:
		}
		return &CallError{Func: fn, PID: pr.child.id(), Calls: n, How: pr.child.end(), Output: pr.child.output.last()}
	case codes.ResourceExhausted:
		return &ProtocolError{Func: fn, Problem: fmt.Sprintf("its answer is too large (%s); at most %d bytes are read", cut(s.Message()), kvpb.MessageBytesMax), Output: pr.child.output.last()}
	}
	return &ProtocolError{Func: fn, Problem: fmt.Sprintf("it answered the whole message with the status %v: %s", s.Code(), cut(s.Message())), Output: pr.child.output.last()}
}

// fail ends the process for a reason, the first of which counts, and returns that.
func (pr *process) fail(err error) error {
	pr.mu.Lock()
	if pr.err != nil {
		err = pr.err
		pr.mu.Unlock()
		return err
	}
	pr.err = err
	lost := pr.lost
	pr.mu.Unlock()
	pr.child.kill()
	if lost != nil {
		lost(pr, err)
	}
	return err
}

// stop ends the process, whatever it does, and removes what it had; calls get the error.
// It returns when the process is gone.
func (pr *process) stop(err error) {
	pr.mu.Lock()
	if pr.err == nil {
		pr.err = err
	}
	pr.mu.Unlock()
	pr.stopped.Do(func() {
		p := pr.program
		defer p.wg.Done()
		pr.end()
		// First of all the process: go-plugin's Kill asks it politely, and waits for ever for
		// the answer of one that is frozen.
		pr.child.kill()
		pr.client.Kill()
		if err := os.RemoveAll(pr.dir); err != nil {
			p.options.Log.Warn("the directory of a rule's process could not be removed", "error", err)
		}
		p.mu.Lock()
		delete(p.processes, pr)
		p.mu.Unlock()
	})
}

// setManifests keeps the manifests of the first start, and holds later ones to them.
func (p *Program) setManifests(manifests []*abi.Manifest) error {
	if p.specs == nil {
		for i, m := range manifests {
			p.specs = append(p.specs, &spec{program: p, index: uint32(i), manifest: m})
		}
		return nil
	}
	same := len(manifests) == len(p.specs)
	for i := 0; same && i < len(manifests); i++ {
		same = reflect.DeepEqual(manifests[i], p.specs[i].Manifest())
	}
	if !same {
		return &ProtocolError{Func: "manifest", Problem: "its manifests are not those that it had when it was loaded; a program answers the same each time it is started"}
	}
	return nil
}

// quietly returns a logger for go-plugin, which calls much an error that is none: its words
// are debug messages here.
func quietly(log *slog.Logger) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{Name: "go-plugin", Level: hclog.Info, DisableTime: true, Output: debugLines{log}})
}

type debugLines struct{ log *slog.Logger }

func (d debugLines) Write(b []byte) (int, error) {
	d.log.Debug(shown(bytes.TrimSpace(b)))
	return len(b), nil
}

// cut returns what is kept of the program's own words.
func cut(text string) string {
	return shown([]byte(text[:min(len(text), kvpb.ReasonBytesMax)]))
}
