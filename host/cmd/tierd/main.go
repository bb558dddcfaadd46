// Command tierd is the node daemon and its tools:
//
//	tierd serve -c node.yaml       run the daemon of a node
//	tierd status                   say what a running daemon does
//	tierd check deployment.yaml    judge a deployment
//	tierd check plugin.wasm        judge the rules of a plugin, without a deployment
//	tierd key ci.pem               make a key that signs certificates
//	tierd inspect plugin.wasm      say what a plugin is and needs
//	tierd eval                     ask rules single questions, a line of JSON each
//	tierd new rule NAME --lang go  write the directory of a new rule
//	tierd replay ...               play both engines against two daemons
//	tierd version                  say which build this is
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/tierd/tierd/registry/deploy/strictyaml"

	"github.com/tierd/tierd/host/build"
)

// commands are the subcommands, each from its own file.
var commands = []func() *cobra.Command{
	serveCommand,
	statusCommand,
	checkCommand,
	keyCommand,
	inspectCommand,
	evalCommand,
	newCommand,
	replayCommand,
	judgePairCommand,
	versionCommand,
}

func main() { os.Exit(run(os.Args[1:])) }

// exitUsage is the status of a command line that cannot be understood, and of a command
// that could not do its work.
const exitUsage = 2

// run runs one command line and returns the exit status.
func run(args []string) int {
	root := rootCommand()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(context.Background())
	var exit *exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.status
	}
	fmt.Fprintf(root.ErrOrStderr(), "%s: %v\n", cmd.CommandPath(), err)
	return exitUsage
}

func rootCommand() *cobra.Command {
	b := build.This()
	root := &cobra.Command{
		Use:     "tierd",
		Version: b.String(), // for --version
		Short:   "Moves KV cache between nodes, and serves no rule before its demand is covered by its supply",
		// Errors are printed once, by run; a wrong flag does not need the whole usage.
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(flagError)
	for _, c := range commands {
		root.AddCommand(c())
	}
	return root
}

// flagError says of a flag that cannot be read what it must be: what the flag package says
// names functions of Go's library.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
		name := "--" + unknown.GetSpecifiedName()
		return fmt.Errorf("there is no flag %s%s %s --help lists them", name, strictyaml.DidYouMean(name, names), cmd.CommandPath())
	case errors.As(err, &invalid):
		must := "must be another value"
		switch kind := invalid.GetFlag().Value.Type(); {
		case errors.Is(err, strconv.ErrRange):
			must = "is out of the range of numbers"
		case strings.HasPrefix(kind, "uint"):
			must = "must be an integer of at least 0"
		case strings.HasPrefix(kind, "int"):
			must = "must be an integer"
		case strings.HasPrefix(kind, "float"):
			must = "must be a number"
		case kind == "bool":
			must = "must be true or false"
		case kind == "duration":
			must = "must be a time with its unit, as in 30s"
		}
		return fmt.Errorf("--%s is %q; it %s", invalid.GetFlag().Name, invalid.GetValue(), must)
	}
	return err
}
