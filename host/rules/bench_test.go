package rules_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// BenchmarkPlan plans for a prompt of 131,072 tokens in the demo's deployment, with the
// rules that the daemon runs and with the same rules native, in one run.
func BenchmarkPlan(b *testing.B) {
	d, err := deploy.Load("../../examples/demo/deployment.yaml")
	require.NoError(b, err)
	d.MaxTokens = 4096 // the verdict is not what is measured
	r, err := rules.Register(context.Background(), d, rules.Options{})
	require.NoError(b, err)
	defer r.Close(context.Background())

	native := r.Model()
	for i, open := range []func() (abi.Rule, error){
		func() (abi.Rule, error) { return specs.Window().Open([]uint64{128, 0}) },
		func() (abi.Rule, error) { return specs.Full().Open(nil) },
	} {
		rule, err := open()
		require.NoError(b, err)
		native.Groups[i].Rule = rule.(abi.SpecRule)
	}
	rule, err := policy.RequestLevel().Open(nil)
	require.NoError(b, err)
	native.Policies = []plan.Policy{{Name: "request-level", Rule: rule}}

	took := map[bool]time.Duration{}
	for b.Loop() {
		for _, wasm := range []bool{true, false} {
			m := native
			if wasm {
				m = r.Model()
			}
			p, err := plan.New(m)
			require.NoError(b, err)
			began := time.Now()
			pl, err := p.Eager(plan.Ask{PromptTokens: 131072}, nil)
			took[wasm] += time.Since(began)
			require.NoError(b, err)
			require.EqualValues(b, 131071, pl.ResumeTokens)
		}
	}
	b.ReportMetric(float64(took[true].Microseconds())/float64(b.N), "us/plan")
	b.ReportMetric(float64(took[true])/float64(took[false]), "x-native")
}
