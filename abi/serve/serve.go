// Package serve is the SDK for rules that run as a program of their own: a rule in Go
// that cannot be a WebAssembly module, because it needs a C library, more memory than a
// module gets, or files.
//
// The whole of main is one call:
//
//	func main() { serve.Main(myRule{}) }
//
// The daemon starts the program, asks for its manifests and calls its rules in batches,
// over gRPC on a Unix socket (package abi/kvpb has the protocol). It is the same abi.Rule
// that abi/guest makes a module of, and the same tests hold it: abitest.Run, and
// "tierd check" with a deployment that names exec:./program#rule.
//
// # What a rule may count on
//
// Each rule is opened once per parameters, and one goroutine uses it at a time, as
// package abi says. Calls of different rules run at the same time.
//
// A panic is an error of the call that caused it, with its place; the process survives,
// and the rule is opened anew before it is called again. What ends the process (os.Exit,
// running out of memory or stack, a race on a map) fails every call in work, and the
// daemon starts it again, a few times.
//
// The daemon takes a call that has no answer within a second for a failure and ends the
// process, without notice: there is nothing to save, because a rule has no state.
//
// # What it may not count on
//
// The environment is empty, the standard input is empty, and the working directory is
// private and thrown away. Standard output belongs to the protocol until Main has begun;
// what is printed after that, there or to standard error, goes to the daemon's log, which
// keeps a bounded part of it.
package serve

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
)

// Main serves the specs to the daemon that started this program, and returns when it is
// no longer wanted. Started by hand it says what the program is, and exits with status 2;
// specs that cannot be served are said too, with status 1.
func Main(specs ...abi.Spec) {
	err := check(specs)
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "%s: %v\n", program(), err)
		os.Exit(1)
	case os.Getenv(kvpb.Handshake.MagicCookieKey) != kvpb.Handshake.MagicCookieValue:
		introduce(os.Stderr, program(), specs)
		os.Exit(2)
	}
	// Serve puts pipes in their place that lead over gRPC, where the last words of a process
	// that ends get lost. The daemon reads the real ones.
	stdout, stderr := os.Stdout, os.Stderr
	begin := func() { os.Stdout, os.Stderr = stdout, stderr }
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig:  kvpb.Handshake,
		VersionedPlugins: kvpb.Plugins(newServer(specs, begin)),
		Logger:           hclog.New(&hclog.LoggerOptions{Name: "go-plugin", Level: hclog.Error, Output: stderr}),
		GRPCServer: func(o []grpc.ServerOption) *grpc.Server {
			return grpc.NewServer(append(o, grpc.MaxRecvMsgSize(kvpb.MessageBytesMax), grpc.MaxSendMsgSize(kvpb.MessageBytesMax))...)
		},
	})
}

// check reports the first thing for which no daemon would take these specs.
func check(specs []abi.Spec) error {
	if len(specs) == 0 || len(specs) > kvpb.RulesMax {
		return fmt.Errorf("serve.Main got %d specs; give it 1 to %d", len(specs), kvpb.RulesMax)
	}
	seen := map[string]bool{}
	for _, s := range specs {
		m := s.Manifest()
		if err := m.Validate(); err != nil {
			return err
		}
		if seen[m.Name] {
			return fmt.Errorf("two specs have the name %s; a name stands for one rule of a program", m.Name)
		}
		seen[m.Name] = true
	}
	return nil
}

func program() string {
	if path, err := os.Executable(); err == nil {
		return filepath.Base(path)
	}
	return "this program"
}

// introduce tells somebody who started the program by hand what it is.
func introduce(w io.Writer, program string, specs []abi.Spec) {
	var names []string
	for _, s := range specs {
		names = append(names, s.Manifest().Name+" "+s.Manifest().Version)
	}
	fmt.Fprintf(w, `%s holds rules for tierd, which starts it; it does nothing by itself.
Rules: %s
In a deployment file, name one as   rule: "exec:./%s#%s"
`, program, strings.Join(names, ", "), program, specs[0].Manifest().Name)
}
