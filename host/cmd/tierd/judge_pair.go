package main

import (
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/host/pairs"
)

const judgePairName = "judge-pair"

// judgePairCommand is for the daemon alone: it starts itself once more to judge the pair of
// its own and a peer's version.
func judgePairCommand() *cobra.Command {
	return &cobra.Command{
		Use:    judgePairName,
		Short:  "Judge the pair of two versions for a daemon",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return pairs.Serve(cmd.InOrStdin(), cmd.OutOrStdout()) },
	}
}

// pairCommand starts this very program, also when its file has been replaced since, as in an
// upgrade: a verdict names who judged.
func pairCommand() ([]string, error) {
	if runtime.GOOS == "linux" {
		return []string{"/proc/self/exe", judgePairName}, nil
	}
	path, err := os.Executable()
	return []string{path, judgePairName}, err
}
