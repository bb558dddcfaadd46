package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs/module"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			version, revision := "(unknown)", ""
			if info, ok := debug.ReadBuildInfo(); ok {
				version = info.Main.Version
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						revision = " " + s.Value
					}
				}
			}
			fmt.Fprintf(cmd.OutOrStdout(), "tierd %s%s\nbuilt with %s for %s/%s\nrule contract version %d\nshipped rules %s\n",
				version, revision, runtime.Version(), runtime.GOOS, runtime.GOARCH, abi.Major, module.Digest())
			return nil
		},
	}
}
