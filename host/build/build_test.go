package build

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestInfoNamesTheRevision(t *testing.T) {
	settings := func(modified string) []debug.BuildSetting {
		return []debug.BuildSetting{{Key: "vcs.revision", Value: "c1fa94f"}, {Key: "vcs.modified", Value: modified}}
	}
	for want, info := range map[string]*debug.BuildInfo{
		"(devel) of revision c1fa94f":           {Main: debug.Module{Version: "(devel)"}, Settings: settings("false")},
		"(devel) of revision c1fa94f, modified": {Main: debug.Module{Version: "(devel)"}, Settings: settings("true")},
		"(devel) of an unknown revision":        {Main: debug.Module{Version: "(devel)"}},
		"v1.2.3":                                {Main: debug.Module{Version: "v1.2.3"}, Settings: settings("false")},
	} {
		var b Info
		b.source(info)
		require.Equal(t, want, b.String())
	}
}
