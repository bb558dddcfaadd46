package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/tierd/tierd/host/replay"
	"github.com/tierd/tierd/registry/deploy"
	"golang.org/x/term"
)

// Exit statuses of tierd replay.
const (
	exitReplayWrong  = 1
	exitReplayFailed = 2
)

func replayCommand() *cobra.Command {
	var opt replay.Options
	var trace, deployment string
	var requests int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "replay --trace FILE --producer SOCKET --consumer SOCKET",
		Short: "Play both engines of a recorded trace against two daemons and compare every byte",
		Long: `Replay plays the engines of a producer and a consumer against two running daemons:
chunked prefill, block reuse, native prefix hits, stores, plans and loads, with the
prompts of a trace. It compares every byte that the consumer would read with bytes that
it generates anew.

Exit status: 0 all bytes right and all demand matched, 1 a byte was wrong or demand
stayed unmatched, 2 the replay could not run.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fail := func(err error) error {
				fmt.Fprintf(cmd.ErrOrStderr(), "tierd replay: %v\n", err)
				return &exitError{exitReplayFailed}
			}
			if requests < 0 {
				return fail(fmt.Errorf("--requests is %d; it must be 0 (all) or more", requests))
			}
			var err error
			if opt.Requests, err = replay.LoadTrace(trace, requests); err != nil {
				return fail(err)
			}
			if deployment != "" {
				if opt.Deployment, err = deploy.Load(deployment); err != nil {
					return fail(err)
				}
			}
			bar := requestBar(cmd.ErrOrStderr(), len(opt.Requests), opt.Leg)
			opt.Progress = bar.update
			report, err := replay.Run(cmd.Context(), opt)
			bar.clear()
			if err != nil {
				return fail(err)
			}
			if err := printReport(cmd.OutOrStdout(), report, asJSON); err != nil {
				return fail(err)
			}
			if !report.OK() {
				return &exitError{exitReplayWrong}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&trace, "trace", "", "trace file: one JSON object a line with input_length and hash_ids")
	f.StringVar(&opt.Producer, "producer", "", "engine socket of the producer's daemon")
	f.StringVar(&opt.Consumer, "consumer", "", "engine socket of the consumer's daemon")
	f.IntVar(&requests, "requests", 0, "play the first N requests; 0 = all")
	f.StringVar(&opt.Leg, "leg", "pd", "pd (the consumer demands without asking) or probe (it asks first)")
	f.Float64Var(&opt.RequestsPerSecond, "rate", 0, "requests to start a second; 0 = as fast as they go")
	f.IntVar(&opt.Concurrency, "concurrency", replay.DefaultConcurrency, "requests that the consumer plays at a time")
	f.StringVar(&opt.Salt, "salt", "", "mixed into every hash; runs of one salt find each other's chunks (default: the leg)")
	f.StringVar(&opt.PeerID, "peer-id", "", "node id of the producer's daemon (default: what it says)")
	f.StringVar(&deployment, "deployment", "", "deployment file of the two nodes (default: what the producer's daemon says)")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON")
	for _, name := range []string{"trace", "producer", "consumer"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is not declared above
		}
	}
	return cmd
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
