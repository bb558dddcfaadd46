package rules_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// BenchmarkCheck judges the demo's deployment over every prompt length to 131,072, with the
// rules that the daemon runs and with the same rules native, in one run. It reports the
// seconds of covers, needs and useful, the seconds of all relations, and how many times as
// long the rules in WebAssembly take as the native ones.
func BenchmarkCheck(b *testing.B) {
	for _, blocks := range []uint64{8, 1} {
		b.Run(fmt.Sprintf("chunk=%d", 16*blocks), func(b *testing.B) {
			d, err := deploy.Load("../../examples/demo/deployment.yaml")
			require.NoError(b, err)
			for g := range d.Groups {
				d.Groups[g].ChunkBlocks = blocks
			}
			var sweep, all, native time.Duration
			for b.Loop() {
				s, a := timed(b, func(o check.Options) error {
					r, err := rules.Register(context.Background(), d, rules.Options{Check: o})
					if err == nil {
						err = r.Close(context.Background())
					}
					return err
				})
				sweep, all = sweep+s, all+a
				_, a = timed(b, func(o check.Options) error {
					_, err := registry.Register(context.Background(), d, inGo, registry.Options{Check: o})
					return err
				})
				native += a
			}
			n := float64(b.N)
			b.ReportMetric(sweep.Seconds()/n, "s/covers+needs+useful")
			b.ReportMetric(all.Seconds()/n, "s/all")
			b.ReportMetric(float64(all)/float64(native), "x-native")
			b.ReportMetric(float64(runtime.GOMAXPROCS(0)), "cores")
		})
	}
}

// timed returns how long the sweep over every length took, and the whole check without the
// loading of its rules.
func timed(b *testing.B, register func(check.Options) error) (sweep, all time.Duration) {
	var began, stage time.Time
	inSweep := false
	err := register(check.Options{Seed: rules.DefaultSeed, Begin: func(name string) {
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		if inSweep {
			sweep = now.Sub(stage)
		}
		stage, inSweep = now, strings.HasPrefix(name, "covers, needs, useful")
	}})
	require.NoError(b, err)
	require.NotZero(b, sweep)
	return sweep, time.Since(began)
}

// inGo opens the demo's rules as they are written, without WebAssembly.
func inGo(_ context.Context, _, ref string) (registry.Opened, error) {
	spec, ok := map[string]abi.Spec{"window": specs.Window(), "full": specs.Full(), "request-level": policy.RequestLevel()}[ref]
	if !ok {
		return registry.Opened{}, fmt.Errorf("no rule %s here", ref)
	}
	return registry.Opened{Spec: spec, Digest: "sha256:native", Source: "native"}, nil
}
