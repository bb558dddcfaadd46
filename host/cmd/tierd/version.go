package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs/module"
)

// A build is what is known of this executable.
type build struct {
	// Version of the module: a tag, a pseudo-version, or "(devel)".
	Version string `json:"version"`
	// Revision of the source, and whether it was changed since; empty and false where
	// the build did not see the version control.
	Revision     string `json:"revision,omitempty"`
	Modified     bool   `json:"modified,omitempty"`
	Go           string `json:"go"`
	Platform     string `json:"platform"`
	RuleContract uint32 `json:"rule_contract"`
	// ShippedRules is the digest of the embedded rules.
	ShippedRules string `json:"shipped_rules"`
}

// thisBuild reads what the toolchain wrote into the executable.
func thisBuild() build {
	b := build{
		Version: "(unknown)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		RuleContract: abi.Major, ShippedRules: module.Digest(),
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		b.source(info)
	}
	return b
}

func (b *build) source(info *debug.BuildInfo) {
	b.Version = info.Main.Version
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
}

// String is one line. A version that is a tag or a pseudo-version says the revision.
func (b *build) String() string {
	if b.Version != "(devel)" && b.Version != "(unknown)" && b.Version != "" {
		return b.Version
	}
	switch {
	case b.Revision == "":
		return b.Version + " of an unknown revision"
	case b.Modified:
		return b.Version + " of revision " + b.Revision + ", modified"
	}
	return b.Version + " of revision " + b.Revision
}

func versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printVersion(cmd.OutOrStdout(), thisBuild(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printVersion(w io.Writer, b build, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(b)
	}
	_, err := fmt.Fprintf(w, "tierd %s\nbuilt with %s for %s\nrule contract version %d\nshipped rules %s\n",
		&b, b.Go, b.Platform, b.RuleContract, b.ShippedRules)
	return err
}
