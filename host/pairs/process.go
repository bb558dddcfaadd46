package pairs

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

// A task is what a process of its own judges.
type task struct {
	Here, There side
	Checker     string
	Seed        uint64
	Within      time.Duration
	CompiledDir string
}

// A side is a bundle on its way to that process.
type side struct {
	Name              string
	Deployment, Rules []byte // in the forms that their digests are of
	Modules           map[digest][]byte
	Programs          map[digest]string
}

func (b *bundle) side() side {
	return side{Name: b.name, Deployment: b.deployment.Canonical(), Rules: b.rulesText, Modules: b.modules, Programs: b.programs}
}

func (s *side) bundle() (*bundle, error) {
	d, err := deploy.ParseCanonical(s.Name, s.Deployment)
	if err != nil {
		return nil, err
	}
	ids, err := registry.ParseRulesText(s.Rules)
	if err != nil {
		return nil, err
	}
	return &bundle{name: s.Name, deployment: d, rules: ids, rulesText: s.Rules, modules: s.Modules, programs: s.Programs}, nil
}

// A word is what the process says, one JSON value after the other: how far it is, and at
// last a verdict or an error.
type word struct {
	Done    int               `json:"done,omitempty"`
	Total   int               `json:"total,omitempty"`
	Verdict *registry.Verdict `json:"verdict,omitempty"`
	Error   string            `json:"error,omitempty"`
}

const (
	// wordsBytesMax bounds what the process says: a verdict has some 50 KiB, and progress
	// 30 bytes for each percent.
	wordsBytesMax = 16 << 20
	// lastWords is how long a process whose time is spent may take to say how far it got.
	lastWords = 5 * time.Second
	// complaintBytesMax is what is kept of what it writes to standard error, for messages.
	complaintBytesMax = 1 << 10
)

// Serve judges what in says and tells out, for [Options.Command]. It is the whole life of
// that process, which begins by giving way to everybody else.
func Serve(in io.Reader, out io.Writer) error {
	giveWay()
	var t task
	if err := gob.NewDecoder(in).Decode(&t); err != nil {
		return fmt.Errorf("what is to be judged: %w", err)
	}
	enc := json.NewEncoder(out)
	v, err := t.judge(func(done, total int) { _ = enc.Encode(word{Done: done, Total: total}) })
	if err != nil {
		return enc.Encode(word{Error: err.Error()})
	}
	return enc.Encode(word{Verdict: v})
}

// judge tells of its progress once a percent.
func (t *task) judge(progress func(done, total int)) (*registry.Verdict, error) {
	here, err := t.Here.bundle()
	if err != nil {
		return nil, err
	}
	there, err := t.There.bundle()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), t.Within, check.ErrBudget)
	defer cancel()
	told := -1
	return judge(ctx, here, there, t.CompiledDir, registry.Options{Checker: t.Checker, Now: time.Now,
		Check: check.Options{Seed: t.Seed, Workers: 1, Progress: func(done, total int) { // one worker, so one caller at a time
			if percent := done * 100 / max(total, 1); percent > told {
				told = percent
				progress(done, total)
			}
		}}}, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})))
}

// judgeApart has a pair judged in a process of its own, which ctx ends.
func judgeApart(ctx context.Context, command []string, t *task, progress func(done, total int)) (*registry.Verdict, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = []string{"GOMAXPROCS=1", "TMPDIR=" + os.TempDir()}
	cmd.SysProcAttr = attributes()
	var question bytes.Buffer
	if err := gob.NewEncoder(&question).Encode(t); err != nil {
		return nil, err
	}
	complaint := &head{most: complaintBytesMax}
	cmd.Stdin, cmd.Stderr = &question, complaint
	// A program of a rule that left the group outlives it, and may hold stderr open.
	cmd.WaitDelay = lastWords
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	// The kernel kills the process when the thread that started it ends, which it must not
	// do before.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("the check has no process: %w", err)
	}
	stop := watch(ctx, cmd.Process)
	last, err := listen(out, progress)
	stop()
	exit := reap(cmd, err == nil)
	switch {
	case err == nil && last.Verdict != nil:
		return last.Verdict, nil
	case err == nil:
		return nil, errors.New(last.Error)
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	}
	return nil, fmt.Errorf("the process of the check ended without a verdict (%v, %v): %s", err, exit, line(complaint.String()))
}

// watch kills a process when ctx ends; when its time is spent, it may first say how far it
// got. The process must not be waited for before stop has returned.
func watch(ctx context.Context, p *os.Process) (stop func()) {
	ended, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-ended:
			return
		case <-ctx.Done():
		}
		if errors.Is(context.Cause(ctx), check.ErrBudget) {
			select {
			case <-ended:
				return
			case <-time.After(lastWords):
			}
		}
		kill(p)
	}()
	return func() { close(ended); <-watched }
}

// reap ends a process, with the programs that it has started, and takes its status. One
// that has not had its last word may be about to end by itself, and its status says how.
func reap(cmd *exec.Cmd, done bool) error {
	if !done {
		exited := make(chan struct{})
		go func() { defer close(exited); awaitExit(cmd.Process.Pid) }() // ends with the process
		select {
		case <-exited:
		case <-time.After(time.Second):
		}
		defer func() { <-exited }()
	}
	kill(cmd.Process)
	return cmd.Wait()
}

// listen takes the words of the process, and returns the last one.
func listen(out io.Reader, progress func(done, total int)) (last word, err error) {
	dec := json.NewDecoder(io.LimitReader(out, wordsBytesMax))
	for {
		var w word
		switch err := dec.Decode(&w); {
		case err != nil:
			return w, err
		case w.Error != "", w.Verdict != nil && w.Verdict.Against != nil:
			return w, nil
		case w.Verdict != nil:
			return w, errors.New("the verdict is not on a pair")
		}
		progress(w.Done, w.Total)
	}
}

// A head keeps the first bytes that are written to it.
type head struct {
	bytes.Buffer
	most int
}

func (h *head) Write(b []byte) (int, error) {
	_, _ = h.Buffer.Write(b[:min(len(b), h.most-h.Len())])
	return len(b), nil
}
