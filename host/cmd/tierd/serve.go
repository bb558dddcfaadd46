package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/host"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/registry"
)

func serveCommand() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "serve -c node.yaml",
		Short: "Run the daemon of a node",
		Long: `Serve takes its ports, checks the node's deployment and then serves until SIGTERM or
SIGINT. It prints one line when it is ready, and writes the addresses that it really has
to addresses.json in its state directory. The check may take a minute the first time;
/readyz at http_listen says how far it is.

SIGTERM, SIGINT   drain and stop, or give the check up; a second one stops at once
SIGHUP            read peers, peer_cidrs and log_level of the configuration again, and the
                  files of tls (as every connection does when they have changed); the log
                  names other keys that have changed, those of the deployment's file and
                  the files of its rules, all of which need a restart. Peers of other
                  versions that could not be judged are judged again, with what peer_rules
                  has now

Exit status: 0 stopped as asked, 1 stopped at once by a second signal, 2 could not start.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("%q is not expected; the configuration is given by a flag, as in: tierd serve -c %s", args[0], args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "" {
				return fmt.Errorf("no configuration is given; use -c node.yaml")
			}
			pair, err := pairCommand()
			if err != nil {
				return err
			}
			return serve(cmd.Context(), path, cmd.OutOrStdout(), cmd.ErrOrStderr(), pair...)
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "", "the node's configuration")
	return cmd
}

// exitSignal is the status of a daemon that a second signal stopped.
const exitSignal = 1

// serve runs a node until a signal stops it, or ctx ends. pair is its config.PairCommand.
func serve(ctx context.Context, path string, out, errOut io.Writer, pair ...string) error {
	cfg, err := config.Load(path)
	if err != nil {
		return err
	}
	cfg.PairCommand = pair
	level := new(slog.LevelVar)
	if err := setLevel(level, cfg); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level}))

	stop := make(chan os.Signal, 2)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(stop)
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	defer signal.Stop(reload)

	starting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	started := make(chan struct{})
	var node *host.Node
	var startErr error
	go func() {
		defer close(started)
		node, startErr = host.Start(starting, cfg, log)
	}()
	stopped := false
	select {
	case <-started:
	case s := <-stop:
		log.Info("stopping", "signal", s.String())
		stopped = true
		cancel(fmt.Errorf("signal %v", s))
		select {
		case <-started:
		case <-stop:
			return &exitError{exitSignal}
		}
	}
	if startErr != nil {
		return notStarted(startErr, cfg, log)
	}
	if stopped { // it became ready at that moment
		return closeNode(node, stop)
	}
	if err := sayReady(node, out); err != nil {
		return errors.Join(err, closeNode(node, stop))
	}
	for {
		select {
		case <-reload:
			reread(path, cfg, node, level, log)
		case s := <-stop:
			log.Info("stopping", "signal", s.String())
			return closeNode(node, stop)
		case <-ctx.Done():
			return closeNode(node, stop)
		}
	}
}

func setLevel(to *slog.LevelVar, cfg *config.Config) error {
	l, err := cfg.Level()
	if err == nil {
		to.Set(l)
	}
	return err
}

// notStarted is what a start without a node ends the program with: nothing when it was
// asked to stop.
func notStarted(err error, cfg *config.Config, log *slog.Logger) error {
	var stopped *host.Stopped
	var refusal *registry.Refusal
	switch {
	case errors.As(err, &stopped):
		log.Info("stopped while "+stopped.While, "cause", stopped.Cause)
		return nil
	case errors.As(err, &refusal):
		return fmt.Errorf("%w\n%s", err, judged(cfg.Deployment, refusal.Verdict))
	}
	return err
}

// judged says what a verdict is about: the file, and the rules that it led to.
func judged(file string, v *registry.Verdict) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n  deployment  %s, %s", file, v.DeploymentDigest)
	for _, r := range v.Rules {
		fmt.Fprintf(&b, "\n  rule        %s: %s %s from %s, %s", r.For, r.Name, r.Version, r.Source, r.Digest)
	}
	return b.String()
}

// sayReady prints the one line of a ready node, for people and tools.
func sayReady(node *host.Node, out io.Writer) error {
	a := node.Addresses()
	_, err := fmt.Fprintf(out, "ready node_id=%s engine_socket=%s peer_listen=%s data_listen=%s http_listen=%s pid=%d\n",
		a.NodeID, a.EngineSocket, a.Peer, a.Data, a.HTTP, a.PID)
	return err
}

// reread takes up what SIGHUP may change, and names what else has changed since the start.
// A file that cannot be read changes nothing.
func reread(path string, running *config.Config, node *host.Node, level *slog.LevelVar, log *slog.Logger) {
	cfg, err := config.Load(path)
	if err == nil {
		err = allow(node, cfg)
	}
	if err == nil {
		err = setLevel(level, cfg)
	}
	if err != nil {
		log.Error("the configuration could not be read again; the old one stays", "file", path, "error", err)
		return
	}
	if ignored := running.Ignored(cfg); len(ignored) > 0 {
		log.Warn("keys that changed are used only after a restart", "file", path, "keys", strings.Join(ignored, ","))
	}
	node.ReviewDeployment()
	node.ReloadCerts()
	node.ReviewPairs()
	log.Info("peers and log level read again", "file", path, "peers", len(cfg.Peers), "log_level", cfg.LogLevel, "peer_cidrs", len(cfg.PeerCIDRs))
}

func allow(node *host.Node, cfg *config.Config) error {
	cidrs, err := cfg.CIDRs()
	if err != nil {
		return err
	}
	return node.Allow(cfg.Peers, cidrs)
}

// closeNode drains and stops. A second signal does not wait.
func closeNode(node *host.Node, stop <-chan os.Signal) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		node.Close(context.Background())
	}()
	select {
	case <-done:
		return nil
	case <-stop:
		return &exitError{exitSignal}
	}
}
