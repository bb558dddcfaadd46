package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/tierd/tierd/host/replay"
	"github.com/tierd/tierd/registry/deploy"
	"golang.org/x/term"
)

// Exit statuses of tierd replay. One that a signal stopped ends with exitSignalled and
// the signal's number, as shells count: 130 for SIGINT, 143 for SIGTERM.
const (
	exitReplayWrong  = 1
	exitReplayFailed = 2
	exitSignalled    = 128
)

// replayArgs are the arguments that are not replay's own options.
type replayArgs struct {
	trace, deployment string
	requests          int
	asJSON            bool
}

func replayCommand() *cobra.Command {
	var opt replay.Options
	var args replayArgs
	cmd := &cobra.Command{
		Use:   "replay --trace FILE --producer SOCKET --consumer SOCKET",
		Short: "Play both engines of a recorded trace against two daemons and compare every byte",
		Long: `Replay plays the engines of a producer and a consumer against two running daemons:
chunked prefill, block reuse, native prefix hits, stores, plans and loads, with the
prompts of a trace. It compares every byte that the consumer would read with bytes that
it generates anew.

A request is a hit when the consumer went on from the point that its daemon planned, with
the right bytes. The others are recomputed, each for one named cause; nothing-planned is
the daemon's decision to fetch nothing. A daemon that is lost on the way does not end the
replay: what it would have served is recomputed and counted.

Exit status: 0 all bytes right and all demand matched, also when requests were
recomputed; 1 a byte was wrong or demand stayed unmatched, as when the producer's daemon
is lost in the middle of a transfer; 2 the replay could not run.
After SIGINT or SIGTERM it prints the report of what was played until then and ends with
130 or 143; a second signal ends it at once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runReplay(cmd, &opt, &args) },
	}
	f := cmd.Flags()
	f.StringVar(&args.trace, "trace", "", "trace file: one JSON object a line with input_length and hash_ids")
	f.StringVar(&opt.Producer, "producer", "", "engine socket of the producer's daemon")
	f.StringVar(&opt.Consumer, "consumer", "", "engine socket of the consumer's daemon")
	f.IntVar(&args.requests, "requests", 0, "play the first N requests; 0 = all")
	f.StringVar(&opt.Leg, "leg", "pd", "pd (the consumer demands without asking), demand (the producer answers for each chunk) or probe (the consumer asks first)")
	f.Float64Var(&opt.RequestsPerSecond, "rate", 0, "requests to start a second; 0 = as fast as they go")
	f.IntVar(&opt.Concurrency, "concurrency", replay.DefaultConcurrency, "requests that the consumer plays at a time")
	f.StringVar(&opt.Salt, "salt", "", "mixed into every hash; runs of one salt find each other's chunks (default: the leg)")
	f.StringVar(&opt.PeerID, "peer-id", "", "node id that the producer's daemon must have (default: any)")
	f.StringVar(&args.deployment, "deployment", "", "deployment file that both nodes must serve (default: what each daemon says)")
	f.BoolVar(&args.asJSON, "json", false, "print the report as JSON")
	for _, name := range []string{"trace", "producer", "consumer"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is not declared above
		}
	}
	return cmd
}

func runReplay(cmd *cobra.Command, opt *replay.Options, args *replayArgs) error {
	reported := false
	fail := func(err error) error {
		fmt.Fprintf(cmd.ErrOrStderr(), "tierd replay: %v\n", err)
		if args.asJSON && !reported { // standard output holds one JSON object in any case
			_ = json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"error": err.Error()})
		}
		return &exitError{exitReplayFailed}
	}
	if args.requests < 0 {
		return fail(fmt.Errorf("--requests is %d; it must be 0 (all) or more", args.requests))
	}
	var err error
	if opt.Requests, err = replay.LoadTrace(args.trace, args.requests); err != nil {
		return fail(err)
	}
	if n := len(opt.Requests); n < args.requests {
		fmt.Fprintf(cmd.ErrOrStderr(), "tierd replay: --requests is %d, but %s has only %d; playing those\n", args.requests, args.trace, n)
	}
	if args.deployment != "" {
		if opt.Deployment, err = deploy.Load(args.deployment); err != nil {
			return fail(err)
		}
	}
	bar := requestBar(cmd.ErrOrStderr(), len(opt.Requests), opt.Leg)
	opt.Progress = bar.update
	ctx, release := interruptible(cmd.Context())
	defer release()
	report, err := replay.Run(ctx, *opt)
	bar.clear()
	if report != nil {
		reported = true
		if err := printReport(cmd.OutOrStdout(), report, args.asJSON); err != nil {
			return fail(err)
		}
	}
	var caught *signalError
	switch {
	case err != nil && errors.As(context.Cause(ctx), &caught):
		_ = fail(fmt.Errorf("stopped by the %v", caught))
		return &exitError{exitSignalled + int(caught.signal)}
	case err != nil:
		return fail(err)
	case !report.OK():
		return &exitError{exitReplayWrong}
	}
	return nil
}

// A signalError is why a context ended.
type signalError struct{ signal syscall.Signal }

func (e *signalError) Error() string { return e.signal.String() + " signal" }

// interruptible returns a context that the first SIGINT or SIGTERM ends. The next one
// has its usual effect.
func interruptible(ctx context.Context) (interrupted context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			cancel(&signalError{s.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

func printReport(w io.Writer, r *replay.Report, asJSON bool) error {
	if !asJSON {
		return r.WriteTable(w)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// A bar shows how far the replay is, on a terminal only.
type bar struct{ *progressbar.ProgressBar }

func requestBar(w io.Writer, requests int, leg string) bar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return bar{}
	}
	return bar{progressbar.NewOptions(requests, progressbar.OptionSetWriter(f),
		progressbar.OptionSetDescription("leg "+leg), progressbar.OptionClearOnFinish(), progressbar.OptionShowCount(), progressbar.OptionThrottle(100*time.Millisecond))}
}

// A bar that cannot be drawn is no reason to stop.

func (b bar) update(done int) {
	if b.ProgressBar != nil {
		_ = b.Set(done)
	}
}

func (b bar) clear() {
	if b.ProgressBar != nil {
		_ = b.Clear()
	}
}
