package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/status"
)

// exitNotReady is the status of tierd status for a daemon that answers and cannot serve.
const exitNotReady = 1

// watchSecondsMin keeps a watch from being a load: a status walks every slot of the tier.
const watchSecondsMin = 0.2

// statusArgs are the flags of tierd status.
type statusArgs struct {
	config, state, address string
	asJSON                 bool
	watchSeconds           float64
	color                  string
}

func statusCommand() *cobra.Command {
	var a statusArgs
	cmd := &cobra.Command{
		Use:   "status [-c node.yaml | --state DIR | --address HOST:PORT]",
		Short: "Say what a running daemon does, of whom it waits and who holds what",
		Long: `Status asks a daemon of this machine for its peers, chunks, waits, pins and rules, and
draws them. Without a flag it asks 127.0.0.1:9470, where a daemon listens that does not set
http_listen. It answers while the rules are checked, and while the daemon drains.

Exit status: 0 the daemon is ready, whatever its peers are, 1 it answers and is not ready:
it starts, checks its rules or stops, 2 there is no answer.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("%q is not expected; a configuration is given by a flag, as in: tierd status -c %s", args[0], args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.validate(cmd); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return a.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&a.config, "config", "c", "", "the configuration of the daemon's node")
	f.StringVar(&a.state, "state", "", "the daemon's state directory")
	f.StringVar(&a.address, "address", "", "the daemon's http_listen")
	f.BoolVar(&a.asJSON, "json", false, "print the JSON form, which package host/status documents")
	f.Float64Var(&a.watchSeconds, "watch", 0, "ask again every so many seconds, until Ctrl-C; with --json, a line each")
	f.StringVar(&a.color, "color", "auto", "colours in the text: auto (on a terminal, unless NO_COLOR is set), always, never")
	return cmd
}

func (a *statusArgs) validate(cmd *cobra.Command) error {
	if a.address != "" {
		_, port, err := net.SplitHostPort(a.address)
		if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil {
			return fmt.Errorf("--address is %q; it must be host:port, such as 127.0.0.1:9470", a.address)
		}
	}
	given := 0
	for _, s := range []string{a.config, a.state, a.address} {
		if s != "" {
			given++
		}
	}
	switch {
	case given > 1:
		return errors.New("more than one of -c, --state and --address is given; each of them says where the daemon is")
	case cmd.Flags().Changed("watch") && !(a.watchSeconds >= watchSecondsMin):
		return fmt.Errorf("--watch is %v; it must be at least %v seconds", a.watchSeconds, watchSecondsMin)
	case !slices.Contains([]string{"auto", "always", "never"}, a.color):
		return fmt.Errorf("--color is %q; known: auto, always, never", a.color)
	}
	return nil
}

// locate finds the daemon.
func (a *statusArgs) locate() (status.Address, error) {
	switch {
	case a.address != "":
		return status.Address{HTTPListen: a.address}, nil
	case a.state != "":
		return status.Locate(a.state)
	case a.config == "":
		return status.Address{HTTPListen: config.Defaults().HTTPListen}, nil
	}
	cfg, err := config.Load(a.config)
	if err != nil {
		return status.Address{}, err
	}
	at, err := status.Locate(cfg.StateDir)
	if errors.Is(err, fs.ErrPermission) && !strings.HasSuffix(cfg.HTTPListen, ":0") { // another user's: the port is known all the same
		return status.Address{NodeID: cfg.NodeID, HTTPListen: cfg.HTTPListen}, nil
	}
	if at.NodeID != "" && at.NodeID != cfg.NodeID {
		return at, fmt.Errorf("state directory %s is that of node %s, and %s is the configuration of %s; has node_id changed since the daemon started?", cfg.StateDir, at.NodeID, a.config, cfg.NodeID)
	}
	return at, err
}

// ask gets a status, wherever the daemon is by now: one that was started again has another
// port.
func (a *statusArgs) ask(ctx context.Context) (*status.Status, []byte, error) {
	at, err := a.locate()
	if err != nil {
		return nil, nil, err
	}
	return status.Get(ctx, at)
}

func (a *statusArgs) run(ctx context.Context, out, errOut io.Writer) error {
	if a.watchSeconds == 0 {
		s, body, err := a.ask(ctx)
		if err != nil {
			return err
		}
		if err := a.print(out, s, body); err != nil {
			return err
		}
		return ended(s)
	}
	var last *status.Status
	for {
		s, body, err := a.ask(ctx)
		switch {
		case ctx.Err() != nil: // whoever watches has seen the last one
			return ended(last)
		case err != nil:
			fmt.Fprintf(errOut, "tierd status: %v\n", err)
		default:
			if err := a.print(out, s, body); err != nil {
				return err
			}
		}
		last = s
		select {
		case <-ctx.Done():
			return ended(last)
		case <-time.After(time.Duration(a.watchSeconds * float64(time.Second))):
		}
	}
}

// ended turns the last answer into an exit status.
func ended(s *status.Status) error {
	switch {
	case s == nil:
		return &exitError{exitUsage}
	case !s.Ready:
		return &exitError{exitNotReady}
	}
	return nil
}

// clearScreen moves a terminal's cursor home and clears what is below.
const clearScreen = "\x1b[H\x1b[J"

func (a *statusArgs) print(out io.Writer, s *status.Status, body []byte) (err error) {
	watch := a.watchSeconds > 0
	switch {
	case a.asJSON && watch:
		_, err = fmt.Fprintf(out, "%s\n", status.Line(body))
	case a.asJSON:
		_, err = out.Write(body)
	case watch && onTerminal(out):
		_, err = fmt.Fprint(out, clearScreen, status.Text(s, coloured(a.color, out)))
	case watch:
		_, err = fmt.Fprintf(out, "%s\n", status.Text(s, coloured(a.color, out)))
	default:
		_, err = fmt.Fprint(out, status.Text(s, coloured(a.color, out)))
	}
	return err
}

// coloured reports whether text on w has colours, by the value of a flag --color.
func coloured(flag string, w io.Writer) bool {
	if flag != "auto" {
		return flag == "always"
	}
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && onTerminal(w)
}

func onTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
