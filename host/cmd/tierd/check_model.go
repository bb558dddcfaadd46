package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/hfconfig"
)

// modelArgs are the flags of tierd check for a model's configuration.
type modelArgs struct {
	model, name, dtype        string
	block, chunkBlocks, align uint64
	maxTokens                 uint64
	draft, printDeployment    bool
}

// modelOnly are the flags that need --model. --legs serves a plugin too.
var modelOnly = []string{"name", "block", "chunk-blocks", "align", "max-tokens", "dtype", "draft", "print-deployment"}

func modelFlags(f *pflag.FlagSet, a *checkArgs) {
	f.StringVar(&a.model, "model", "", "instead of a deployment: config.json of a Hugging Face model, from which one is derived")
	f.Uint64Var(&a.block, "block", 0, "of a model: tokens of a block of the engine's GPU cache, such as 16")
	f.Uint64Var(&a.chunkBlocks, "chunk-blocks", hfconfig.ChunkBlocksDefault, fmt.Sprintf("of a model: blocks of a chunk; of a stock engine its default, %d", stockChunkBlocks))
	f.Uint64Var(&a.align, "align", 0, fmt.Sprintf("of a model: distance of the reuse points in tokens, 0 = none (default: the smallest multiple of a chunk that is at least %d)", hfconfig.AlignTokensMin))
	f.Uint64Var(&a.maxTokens, "max-tokens", 0, "of a model: the longest prompt (default: max_position_embeddings)")
	f.StringVar(&a.dtype, "dtype", "", "of a model: data type of the KV, one of bf16, fp16, fp32, fp8, int8 (default: the model's)")
	f.StringVar(&a.name, "name", "", "of a model: its name in the deployment (default: that of the file, or of the directory of a config.json)")
	f.BoolVar(&a.draft, "draft", false, "of a model: with a draft head of one layer (EAGLE, MTP)")
	f.BoolVar(&a.printDeployment, "print-deployment", false, "of a model: print the derived deployment file, and the verdict below it as comments")
}

// modelUse reports flags that do not go together.
func modelUse(f *pflag.FlagSet, a *checkArgs) error {
	if f.Changed("model") {
		switch {
		case f.Changed("twin"):
			return errors.New("--twin is for a plugin, and --model for a model's configuration; leave out one of them")
		case a.printDeployment && a.asJSON:
			return errors.New("--print-deployment and --json print different files; give one of them")
		case f.Changed("chunk-blocks") && a.chunkBlocks == 0:
			return errors.New("--chunk-blocks is 0; a chunk has at least 1 block")
		case f.Changed("max-tokens") && a.maxTokens == 0:
			return errors.New("--max-tokens is 0; the longest prompt has at least 1 token")
		case !f.Changed("block"):
			return errors.New("--model needs the size of the engine's blocks, as in: tierd check --model config.json --block 16")
		}
		return nil
	}
	for _, name := range modelOnly {
		if f.Changed(name) {
			return fmt.Errorf("--%s goes with --model, as in: tierd check --model config.json --block 16; a deployment file says it itself", name)
		}
	}
	return nil
}

// stockChunkBlocks is the default of vLLM's blocks_per_chunk.
const stockChunkBlocks = 1

// derive returns the deployment of the model that --model names.
func derive(f *pflag.FlagSet, a *checkArgs) (*hfconfig.Derived, error) {
	data, err := readModelConfig(a.model)
	if err != nil {
		return nil, err
	}
	o := hfconfig.Options{Model: a.name, BlockTokens: a.block, ChunkBlocks: a.chunkBlocks, MaxTokens: a.maxTokens, DType: a.dtype, Draft: a.draft}
	if o.Model == "" {
		if o.Model, err = modelName(a.model); err != nil {
			return nil, err
		}
	}
	if !f.Changed("chunk-blocks") && a.engineName != "" && a.engineName != deploy.EngineTierd {
		o.ChunkBlocks = stockChunkBlocks
	}
	if f.Changed("align") {
		o.AlignTokens = &a.align
	}
	if f.Changed("legs") {
		o.Legs = a.legs
	}
	return hfconfig.Derive(a.model, data, o)
}

// readModelConfig reads a file that may be a directory, a pipe, or have no end.
func readModelConfig(path string) ([]byte, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil, fmt.Errorf("%s is a directory; give the configuration in it, as in: --model %s", path, filepath.Join(path, "config.json"))
	}
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("there is no file %q; --model takes the config.json of a Hugging Face model", path)
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, hfconfig.FileBytesMax+1)) // Derive says that it is too long
}

// modelName is the name of a file without its ending, or of its directory where the file
// has the name that they all have.
func modelName(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	base := filepath.Base(abs)
	if base == "config.json" && filepath.Dir(abs) != string(filepath.Separator) {
		return filepath.Base(filepath.Dir(abs)), nil
	}
	return strings.TrimSuffix(base, filepath.Ext(base)), nil
}

// deployment returns what is judged: the file's, or that of a model. derived is nil for a
// file.
func deployment(cmd *cobra.Command, path string, a *checkArgs) (d *deploy.Deployment, derived *hfconfig.Derived, err error) {
	if a.model == "" {
		d, err = deploy.Load(path)
		if err != nil && filepath.Ext(path) == ".json" {
			err = fmt.Errorf("%w. If this is the config.json of a model: tierd check --model %s --block 16", err, shellWord(path))
		}
		return d, nil, err
	}
	if derived, err = derive(cmd.Flags(), a); err != nil {
		return nil, nil, err
	}
	return derived.Deployment, derived, nil
}

// printDerived prints the deployment file, and makes comments of what the command prints
// after it, so that all of it together is still a deployment file.
func printDerived(cmd *cobra.Command, d *hfconfig.Derived) error {
	out := cmd.OutOrStdout()
	if _, err := out.Write(d.YAML()); err != nil {
		return err
	}
	cmd.SetOut(&commenter{w: out})
	return nil
}

// A commenter writes lines as comments of YAML.
type commenter struct {
	w    io.Writer
	last []byte // of a line that has not ended
}

func (c *commenter) Write(p []byte) (int, error) {
	c.last = append(c.last, p...)
	end := bytes.LastIndexByte(c.last, '\n') + 1
	var out bytes.Buffer
	for line := range bytes.Lines(c.last[:end]) {
		out.WriteString("#")
		if len(line) > 1 {
			out.WriteByte(' ')
		}
		out.Write(line)
	}
	c.last = append(c.last[:0], c.last[end:]...)
	if _, err := c.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}
