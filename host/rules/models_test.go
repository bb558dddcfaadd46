package rules_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/hfconfig"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// natively opens the shipped rules without a module, which is faster. That the module answers
// the same is tested elsewhere.
func natively(_ context.Context, _, ref string) (registry.Opened, error) {
	for _, s := range append(specs.All(), policy.All()...) {
		if s.Manifest().Name == ref {
			return registry.Opened{Spec: s, Digest: "sha256:" + ref, Source: "native"}, nil
		}
	}
	return registry.Opened{}, fmt.Errorf("rule %s: unknown", ref)
}

// TestModels judges every model of examples/models, with and without a draft head, in each leg
// and in both: over prompts that reach beyond two windows, two runs of local attention and two
// alignments, with eight chunks to a window. `make check-models` judges them in blocks of 16
// over their whole length.
func TestModels(t *testing.T) {
	files, err := filepath.Glob("../../examples/models/*.json")
	require.NoError(t, err)
	refused := []string{"t5-small", "whisper-large-v3"}
	judged := 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		o := hfconfig.Options{Model: name, BlockTokens: 16}
		d, err := hfconfig.Derive(file, data, o)
		if slices.Contains(refused, name) {
			require.ErrorIs(t, err, hfconfig.ErrNotPrefixCacheable)
			continue
		}
		require.NoError(t, err)
		reach := largest(d.Deployment)
		align := reach / 2
		o.BlockTokens, o.ChunkBlocks, o.AlignTokens, o.MaxTokens = reach/32, 4, &align, 2*reach+reach/4+5
		for _, o.Legs = range [][]string{{"pd"}, {"probe"}, {"pd", "probe"}} {
			for _, o.Draft = range []bool{false, true} {
				judged++
				t.Run(fmt.Sprintf("%s/%s/draft=%v", name, strings.Join(o.Legs, "+"), o.Draft), func(t *testing.T) {
					d, err := hfconfig.Derive(file, data, o)
					require.NoError(t, err)
					e, err := registry.Register(context.Background(), d.Deployment, natively, registry.Options{})
					require.NoError(t, err)
					require.Equal(t, registry.Accepted, e.Verdict.Verdict)
					if slices.Contains(o.Legs, "pd") {
						require.Greater(t, e.Verdict.Relations["covers"], o.MaxTokens)
					}
					require.Greater(t, e.Verdict.Relations["needs"], o.MaxTokens)
				})
			}
		}
	}
	require.Equal(t, 10*3*2, judged)
}

// largest is the largest parameter of a rule, or 256 where no rule has one above that.
func largest(d *deploy.Deployment) uint64 {
	n := 256
	for i := range d.Groups {
		for _, v := range d.Groups[i].Params {
			if tokens, ok := v.(int); ok {
				n = max(n, tokens)
			}
		}
	}
	return uint64(n)
}

// The mark of a draft head's group reaches the planner that judges it.
func TestDraftIsSeen(t *testing.T) {
	data, err := os.ReadFile("../../examples/models/llama-3.1-8b.json")
	require.NoError(t, err)
	d, err := hfconfig.Derive("llama.json", data, hfconfig.Options{Model: "llama", BlockTokens: 16, MaxTokens: 600, Draft: true})
	require.NoError(t, err)
	e, err := registry.Open(context.Background(), d.Deployment, natively)
	require.NoError(t, err)
	m := e.Model()
	require.False(t, m.Groups[0].Draft)
	require.True(t, m.Groups[1].Draft)
}
