package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
	"github.com/tierd/tierd/registry/stock"
)

// engineArgs are the flags of tierd check for a stock engine.
type engineArgs struct {
	engineName, promotion, policy, retention string
	at                                       []string
}

// engineOnly are the flags of engineArgs.
var engineOnly = []string{"engine", "promotion", "policy", "retention", "at"}

func engineFlags(f *pflag.FlagSet, a *checkArgs) {
	f.StringVar(&a.engineName, "engine", "", "of a deployment: judge it as this engine's: "+strings.Join(deploy.Engines, ", "))
	f.StringVar(&a.promotion, "promotion", "", "of a stock engine: what a lookup answers when it has just started a copy: pending, or retry as in v0.27.1 and before")
	f.StringVar(&a.policy, "policy", "", "of a stock engine: chunk-level (its default), or request-level")
	f.StringVar(&a.retention, "retention", "", "of a stock engine: prefix_cache_retention_interval in tokens (its default is 0), or none")
	f.StringSliceVar(&a.at, "at", nil, "of a stock engine: one case instead of all, as in prompt=7296,gpu=7168; also "+strings.Join(atKeys()[2:], ", "))
}

// engineGiven returns the first flag of a stock engine that is given, or "".
func (a *engineArgs) engineGiven(f *pflag.FlagSet) string {
	if i := slices.IndexFunc(engineOnly, f.Changed); i >= 0 {
		return engineOnly[i]
	}
	return ""
}

// engine has a deployment judged as the flags say, and returns the one case that they name,
// if they do. What a derived deployment says by default is for engine tierd, so a stock
// engine leaves it out; what a person wrote into a file is refused instead.
func (a *engineArgs) engine(f *pflag.FlagSet, d *deploy.Deployment, derived bool) (*stock.At, error) {
	first := a.engineGiven(f)
	if first == "" {
		return nil, nil
	}
	name := a.engineName
	if name == "" {
		name = d.Engine
	}
	if name == deploy.EngineTierd && first != "engine" {
		return nil, fmt.Errorf("--%s is for a stock engine, and %s is of engine tierd; add --engine vllm-0.30", first, d.File())
	}
	params := map[string]any{}
	if a.promotion != "" {
		params["promotion"] = a.promotion
	}
	if a.policy != "" {
		params["policy"] = a.policy
	}
	if a.retention != "" {
		params["retention_interval"] = a.retention
		if n, err := strconv.Atoi(a.retention); err == nil {
			params["retention_interval"] = n
		}
	}
	if derived && name != deploy.EngineTierd {
		d.AlignTokens, d.Policies = 0, nil
	}
	if err := d.SetEngine(name, params); err != nil {
		return nil, err
	}
	if !d.IsStock() && len(a.at) > 0 {
		return nil, fmt.Errorf("--at is for a stock engine, and %s is judged as engine tierd's", d.File())
	}
	at, err := parseAt(a.at)
	if err == nil && at != nil && max(at.Prompt, at.Text) > d.MaxTokens {
		err = fmt.Errorf("--at has a prompt of %d tokens, but max_tokens of %s is %d; give a prompt that the deployment allows", max(at.Prompt, at.Text), d.File(), d.MaxTokens)
	}
	return at, err
}

// atFields are the parts of a case by the name that --at gives them, in the order of
// messages.
var atFields = []struct {
	name  string
	field func(at *stock.At) *uint64
}{
	{"prompt", func(at *stock.At) *uint64 { return &at.Prompt }},
	{"gpu", func(at *stock.At) *uint64 { return &at.GPU }},
	{"loaded", func(at *stock.At) *uint64 { return &at.Loaded }},
	{"primary", func(at *stock.At) *uint64 { return &at.Primary }},
	{"step", func(at *stock.At) *uint64 { return &at.Step }},
	{"generated", func(at *stock.At) *uint64 { return &at.Generated }},
	{"local", func(at *stock.At) *uint64 { return &at.Local }},
	{"text", func(at *stock.At) *uint64 { return &at.Text }},
}

func atKeys() (keys []string) {
	for _, f := range atFields {
		keys = append(keys, f.name)
	}
	return keys
}

// parseAt reads a case such as prompt=7296, gpu=7168.
func parseAt(parts []string) (*stock.At, error) {
	if len(parts) == 0 {
		return nil, nil
	}
	at := &stock.At{}
	for _, p := range parts {
		key, value, _ := strings.Cut(p, "=")
		i := slices.Index(atKeys(), key)
		if i < 0 {
			return nil, fmt.Errorf("--at has %q%s known: %s", key, strictyaml.DidYouMean(key, atKeys()), strings.Join(atKeys(), ", "))
		}
		n, err := strconv.ParseUint(value, 10, 31)
		if err != nil {
			return nil, fmt.Errorf("--at has %s=%s; it must be a number of tokens", key, value)
		}
		*atFields[i].field(at) = n
	}
	if at.Prompt == 0 {
		return nil, fmt.Errorf("--at names no prompt; give its length in tokens, as in: --at prompt=7296,gpu=7168")
	}
	return at, nil
}

// judgeStock returns the verdict of a deployment of a stock engine.
func judgeStock(ctx context.Context, d *deploy.Deployment, at *stock.At, progress io.Writer) (*registry.Verdict, error) {
	bar, done := progressTo(progress)
	defer done()
	return rules.JudgeStock(ctx, d, nil, rules.Options{Check: check.Options{Progress: bar}}, at)
}

// relationsOf returns the relations that a verdict's engine has, in the order in which they
// run.
func relationsOf(v *registry.Verdict) []string {
	switch {
	case v.Engine != deploy.EngineTierd:
		return stock.Relations
	case v.Against != nil:
		return []string{check.PairRelation}
	}
	return check.Relations
}
