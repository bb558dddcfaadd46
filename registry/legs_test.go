package registry_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry"
)

// TestLegDemandIsJudgedAsProbe: the same relations over the same cases, and the same
// verdict: what leg pd refuses because a key would never come, leg demand may have, for its
// producer says so; beside leg pd it is held to that.
func TestLegDemandIsJudgedAsProbe(t *testing.T) {
	judge := func(legs, yaml string) *registry.Verdict {
		e, err := registry.Register(context.Background(), parse(t, yaml+"legs: ["+legs+"]\n"), native, registry.Options{Checker: "c"})
		var refused *registry.Refusal
		if errors.As(err, &refused) {
			return refused.Verdict
		}
		require.NoError(t, err)
		return e.Verdict
	}
	small := strings.Replace(file, "max_tokens: 200", "max_tokens: 100", 1)
	chunkLevel := strings.Replace(small, "request-level", "chunk-level", 1)
	probe, demand := judge("probe", small), judge("demand", small)
	require.Equal(t, registry.Accepted, demand.Verdict)
	require.Equal(t, probe.Relations, demand.Relations)
	require.Equal(t, probe.Domain, demand.Domain)
	require.Positive(t, demand.Relations["useful"])
	both := judge("pd, demand", small)
	require.Equal(t, registry.Accepted, both.Verdict)
	require.Greater(t, both.Relations["covers"], demand.Relations["covers"])
	require.Equal(t, judge("probe", chunkLevel).Verdict, judge("demand", chunkLevel).Verdict)
	require.Equal(t, registry.Refused, judge("pd, demand", chunkLevel).Verdict)
}
