package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/deploy"
)

// tinyModel is a configuration whose check takes a second.
const tinyModel = `{"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 2, "num_attention_heads": 4,
	"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 90, "torch_dtype": "bfloat16"}`

func inModels(t *testing.T) {
	golden, err := filepath.Abs("testdata")
	require.NoError(t, err)
	whisper, err := os.ReadFile("../../../examples/models/whisper-large-v3.json")
	require.NoError(t, err)
	t.Chdir(t.TempDir())
	t.Setenv("GOLDEN", golden)
	require.NoError(t, os.MkdirAll("Tiny-4L", 0o700))
	require.NoError(t, os.WriteFile("Tiny-4L/config.json", []byte(tinyModel), 0o600))
	require.NoError(t, os.WriteFile("tiny.v1.json", []byte(tinyModel), 0o600))
	require.NoError(t, os.WriteFile("whisper.json", whisper, 0o600))
	require.NoError(t, os.WriteFile("small.yaml", []byte(smallDeployment), 0o600))
}

// TestModelCommands holds what tierd check --model says to wrong flags and files against a
// golden file.
func TestModelCommands(t *testing.T) {
	inModels(t)
	var got strings.Builder
	for _, line := range []string{
		"--model Tiny-4L/config.json", "--model Tiny-4L --block 16", "--model none.json --block 16", "--model small.yaml --block 16",
		"--model tiny.v1.json --block 16 small.yaml", "--model tiny.v1.json --block 16 --twin window", "--model tiny.v1.json --block x", "tiny.v1.json", "--model tiny.v1.json --block 16 --chunk-blocks 0", "--model tiny.v1.json --block 16 --max-tokens 0",
		"--model tiny.v1.json --block 16 --json --print-deployment", "--model tiny.v1.json --block 16 --align 100",
		"--model tiny.v1.json --block 16 --legs pod", "--model tiny.v1.json --block 16 --dtype bf17", "--model whisper.json --block 16",
		"--model whisper.json --block 16 --json", "--model tiny.v1.json --block 16 --state none/state",
		"--block 16 small.yaml", "--print-deployment small.yaml", "small.yaml --draft", "small.yaml --chunk-blocks 8", "small.yaml --align 0", "small.yaml --max-tokens 5",
		"small.yaml --dtype bf16", "small.yaml --name x", "small.yaml --legs pd",
	} {
		out, errOut, status := command(t, "", append([]string{"check"}, strings.Fields(line)...)...)
		got.WriteString("$ tierd check " + line + "\n" + out)
		for l := range strings.Lines(errOut) {
			got.WriteString("2> " + l)
		}
		got.WriteString("=> " + string(rune('0'+status)) + "\n\n")
		require.Equal(t, exitUndecided, status, line)
	}
	golden := filepath.Join(os.Getenv("GOLDEN"), "model.txt")
	if *rewrite {
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

// TestPrintDeployment: what is printed is a deployment file, of the digest that was judged
// and of the same verdict, which stands below it.
func TestPrintDeployment(t *testing.T) {
	inModels(t)
	flags := strings.Fields("--block 4 --chunk-blocks 2 --align 32 --draft --legs probe --dtype fp8")
	model := append([]string{"check", "--model", "Tiny-4L/config.json"}, flags...)
	printed, errOut, status := command(t, "", append(model, "--print-deployment")...)
	require.Zero(t, status, errOut)
	require.Contains(t, printed, "\n# ACCEPTED  Tiny-4L\n")
	require.NoError(t, os.WriteFile("printed.yaml", []byte(printed), 0o600))
	d, err := deploy.Load("printed.yaml")
	require.NoError(t, err)
	require.Equal(t, "Tiny-4L", d.Model)
	require.EqualValues(t, 90, d.MaxTokens)
	require.EqualValues(t, 32, d.AlignTokens)
	require.Equal(t, []string{"probe"}, d.Legs)
	require.Len(t, d.Groups, 3)
	require.Equal(t, "fp8", d.Groups[2].DType)
	require.True(t, d.Groups[2].Draft)

	var verdict struct {
		Verdict string `json:"verdict"`
		Digest  string `json:"deployment_digest"`
	}
	out, errOut, status := command(t, "", append(model, "--json")...)
	require.Zero(t, status, errOut)
	require.NoError(t, json.Unmarshal([]byte(out), &verdict))
	require.Equal(t, "accepted", verdict.Verdict)
	require.Equal(t, d.Digest(), verdict.Digest)

	out, errOut, status = command(t, "", "check", "printed.yaml", "--json")
	require.Zero(t, status, errOut)
	require.NoError(t, json.Unmarshal([]byte(out), &verdict))
	require.Equal(t, d.Digest(), verdict.Digest)
}

// A stock engine's chunk is one block, unless it is said.
func TestModelOfAStockEngine(t *testing.T) {
	inModels(t)
	args := strings.Fields("check --model tiny.v1.json --block 4 --engine vllm-0.30 --promotion pending --policy request-level --retention none --print-deployment")
	for want, more := range map[string][]string{"chunk_blocks: 1 ": nil, "chunk_blocks: 3 ": {"--chunk-blocks", "3"}} {
		out, errOut, status := command(t, "", append(args, more...)...)
		require.NotEqual(t, exitUndecided, status, errOut)
		require.Contains(t, out, want)
		require.NotContains(t, out, "align_tokens: 4096")
	}
}

// A model has the name of its file, or of its directory when the file's says nothing.
func TestModelName(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.Mkdir("Llama-3.1-8B", 0o700))
	for path, want := range map[string]string{
		"a/gpt-oss-120b.json": "gpt-oss-120b", "mistral-7b-v0.1.json": "mistral-7b-v0.1", "x/Qwen2.5-7B/config.json": "Qwen2.5-7B", "/config.json": "config", "noending": "noending",
	} {
		got, err := modelName(path)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	t.Chdir("Llama-3.1-8B")
	got, err := modelName("config.json")
	require.NoError(t, err)
	require.Equal(t, "Llama-3.1-8B", got)
}

// The comments stay whole lines however the text arrives.
func TestCommenter(t *testing.T) {
	var out strings.Builder
	c := &commenter{w: &out}
	for _, s := range []string{"one\ntw", "o\n", "\n", "three", "\n"} {
		n, err := c.Write([]byte(s))
		require.NoError(t, err)
		require.Equal(t, len(s), n)
	}
	require.Equal(t, "# one\n# two\n#\n# three\n", out.String())
}
