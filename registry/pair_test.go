package registry_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

func entry(t *testing.T, name, yaml string) *registry.Entry {
	t.Helper()
	d, err := deploy.Parse(name, []byte(yaml))
	require.NoError(t, err)
	e, err := registry.Open(context.Background(), d, native)
	require.NoError(t, err)
	return e
}

func TestAgainst(t *testing.T) {
	a := entry(t, "a.yaml", file)
	v, err := registry.Against(context.Background(), a, entry(t, "b.yaml", strings.Replace(file, "max_tokens: 200", "max_tokens: 300", 1)), registry.Options{Checker: "c"})
	require.NoError(t, err)
	require.Equal(t, registry.Accepted, v.Verdict)
	require.Equal(t, "b.yaml", v.Against.File)
	require.NotEqual(t, v.DeploymentDigest, v.Against.DeploymentDigest)
	require.Equal(t, v.RulesDigest, v.Against.RulesDigest)
	require.Len(t, v.Ways, 2)
	require.Positive(t, v.Ways[0].Cases)
	require.EqualValues(t, 200, v.Domain.PromptTokens)
	require.Equal(t, "prompts of 201 to 300 tokens are refused at begin on one side", v.DomainText[len(v.DomainText)-1])

	v, err = registry.Against(context.Background(), a, entry(t, "b.yaml", strings.Replace(file, "window: 20", "window: 40", 1)), registry.Options{})
	require.NoError(t, err)
	require.Equal(t, registry.Refused, v.Verdict)
	require.Equal(t, "a.yaml", v.Counterexample.Producer)
	require.Equal(t, "b.yaml", v.Counterexample.Consumer)
	require.Equal(t, "pair", v.Counterexample.Relation)
	require.Nil(t, v.Ways[1].Counterexample, "what is stored for the wider window serves the narrower one")

	probe := strings.Replace(file, "policies:", "legs: [probe]\npolicies:", 1)
	v, err = registry.Against(context.Background(), a, entry(t, "b.yaml", probe), registry.Options{})
	require.NoError(t, err)
	require.Equal(t, registry.Accepted, v.Verdict)
	require.Zero(t, v.Cases)
	require.Equal(t, []string{"no case: leg pd is not used by both, and in every other leg the producer says of each key whether it has it"}, v.DomainText)
}

// TestAgainstCannotJudge: another layout is an error that names the fields with both values,
// and a spent budget leaves the pair undecided.
func TestAgainstCannotJudge(t *testing.T) {
	a := entry(t, "a.yaml", file)
	_, err := registry.Against(context.Background(), a, entry(t, "b.yaml", strings.Replace(file, "head_dim: 4", "head_dim: 8", 1)), registry.Options{})
	var layout *registry.LayoutError
	require.ErrorAs(t, err, &layout)
	require.EqualError(t, err, "a.yaml (here) and b.yaml (there) have different layouts, so no chunk of one fits the other, whatever the rules are; make equal: groups[0].head_dim: here 4, there 8")

	_, err = registry.Against(context.Background(), entry(t, "a.yaml", "roles: [consumer]"+file), entry(t, "b.yaml", "roles: [consumer]"+file), registry.Options{})
	require.EqualError(t, err, "check a.yaml against b.yaml: roles: neither a.yaml nor b.yaml can be the producer of the other")

	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(check.ErrBudget)
	v, err := registry.Against(ctx, a, a, registry.Options{})
	require.NoError(t, err)
	require.Equal(t, registry.Undecided, v.Verdict)
	require.Equal(t, check.ErrBudget.Error(), v.Undecided)
	require.NotEmpty(t, v.Reached)

	other := errors.New("another cause")
	ctx, cancel = context.WithCancelCause(context.Background())
	cancel(other)
	_, err = registry.Against(ctx, a, a, registry.Options{})
	require.ErrorIs(t, err, context.Canceled)
}
