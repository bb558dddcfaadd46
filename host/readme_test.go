package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/replay"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/hfconfig"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// readme returns the README, and a fenced block of it in the given language.
func readme(t *testing.T, language string) (text, block string) {
	b, err := os.ReadFile(filepath.Join(root(t), "README.md"))
	require.NoError(t, err)
	_, block, found := strings.Cut(string(b), "```"+language+"\n")
	require.True(t, found)
	block, _, found = strings.Cut(block, "```")
	require.True(t, found)
	return string(b), block
}

// The rule that the README shows is the one that is tested.
func TestReadmeShowsTheExample(t *testing.T) {
	_, code := readme(t, "go")
	example, err := os.ReadFile(filepath.Join(root(t), "examples", "window-go", "window.go"))
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(string(example), code), "README.md and examples/window-go/window.go differ")
}

// So is the deployment.
func TestReadmeShowsTheDeployment(t *testing.T) {
	_, deployment := readme(t, "yaml")
	example, err := os.ReadFile(filepath.Join(root(t), "examples", "window-go", "deployment.yaml"))
	require.NoError(t, err)
	require.Equal(t, string(example), deployment)
}

// What the README shows of a derived deployment is what its command prints.
func TestReadmeShowsTheModel(t *testing.T) {
	const file = "examples/models/gpt-oss-120b.json"
	text, _ := readme(t, "go")
	require.Contains(t, text, "\n    tierd check --model "+file+" --block 16 --print-deployment\n")
	config, err := os.ReadFile(filepath.Join(root(t), file))
	require.NoError(t, err)
	d, err := hfconfig.Derive(file, config, hfconfig.Options{Model: "gpt-oss-120b", BlockTokens: 16})
	require.NoError(t, err)
	first, _, found := strings.Cut(string(d.YAML()), "\n  # 18 of 36 layers are full_attention")
	require.True(t, found)
	require.Contains(t, text, "\n\n    "+strings.ReplaceAll(first, "\n", "\n    ")+"\n      ...\n")
}

// So is a status: its golden file is what package status draws.
func TestReadmeShowsTheStatus(t *testing.T) {
	text, _ := readme(t, "go")
	drawn, err := os.ReadFile(filepath.Join(root(t), "host", "status", "testdata", "readme.txt"))
	require.NoError(t, err)
	var block strings.Builder
	for line := range strings.Lines(string(drawn)) {
		if line != "\n" {
			line = "    " + line
		}
		block.WriteString(line)
	}
	require.Contains(t, text, "\n    $ tierd status -c node.yaml\n"+block.String())
	require.FileExists(t, filepath.Join(root(t), "host", "metrics", "METRICS.md"))
	require.Contains(t, text, "`host/metrics/METRICS.md`")
}

// Every file that the README names exists.
func TestReadmeNamesFilesThatExist(t *testing.T) {
	text, _ := readme(t, "go")
	names := regexp.MustCompile(`examples/[a-z0-9_/.-]*[a-z0-9]`).FindAllString(text, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		_, err := os.Stat(filepath.Join(root(t), name))
		require.NoError(t, err, name)
	}
}

// TestDemoDemands: the README and the demo's deployment say how much the replay's 300 requests
// demand. What moves is a little less, by what is still in the consumer's own tier from
// requests before. The model has 18 times the layers.
func TestDemoDemands(t *testing.T) {
	const modelLayers = 18
	file := filepath.Join(root(t), "examples", "demo", "deployment.yaml")
	yaml, err := os.ReadFile(file)
	require.NoError(t, err)
	d, err := deploy.Parse(file, yaml)
	require.NoError(t, err)
	entry, err := registry.Open(t.Context(), d, func(_ context.Context, _, ref string) (registry.Opened, error) {
		for _, s := range append(specs.All(), policy.All()...) {
			if s.Manifest().Name == ref {
				return registry.Opened{Spec: s, Digest: "sha256:native", Source: "native"}, nil
			}
		}
		return registry.Opened{}, errors.New("no such rule")
	})
	require.NoError(t, err)
	planner, err := plan.New(entry.Model())
	require.NoError(t, err)
	requests, err := replay.LoadTrace(filepath.Join(root(t), "examples", "traces", "conversation_trace_1000.jsonl"), 300)
	require.NoError(t, err)
	require.Len(t, requests, 300)

	bytes := uint64(0)
	for i := range requests {
		p, err := planner.Eager(plan.Ask{PromptTokens: requests[i].PromptTokens}, nil)
		require.NoError(t, err)
		for g, demand := range p.Demand {
			bytes += uint64(demand.Count()) * d.Groups[g].ChunkBytes()
		}
	}
	gb := float64(bytes) / 1e9
	text, _ := readme(t, "go")
	require.Contains(t, text, fmt.Sprintf("They demand %.1f GB", gb))
	require.Contains(t, string(yaml), fmt.Sprintf("%d\n  # requests demand %.1f GB instead of %.0f", len(requests), gb, modelLayers*gb))
	require.Contains(t, string(yaml), fmt.Sprintf("a chunk is only %d times smaller", modelLayers))
}
