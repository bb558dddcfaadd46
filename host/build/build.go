// Package build says which build of tierd this executable is, for tierd version and for
// the status of a daemon.
package build

import (
	"runtime"
	"runtime/debug"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs/module"
)

// Info is what is known of an executable.
type Info struct {
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

// This reads what the toolchain wrote into the running executable.
func This() Info {
	b := Info{
		Version: "(unknown)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		RuleContract: abi.Major, ShippedRules: module.Digest(),
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		b.source(info)
	}
	return b
}

func (b *Info) source(info *debug.BuildInfo) {
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
func (b *Info) String() string {
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
