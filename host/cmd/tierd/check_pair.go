package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/stock"
)

func pairFlags(f *pflag.FlagSet, a *checkArgs) {
	f.StringVar(&a.against, "against", "", "another version of the deployment: judge whether producers of the one can serve consumers of the other, both ways; neither is judged alone")
}

// judgePair returns the verdict of two deployments against each other. Flags of a stock
// engine hold for both.
func judgePair(ctx context.Context, cmd *cobra.Command, here *deploy.Deployment, at *stock.At, a *checkArgs) (*registry.Verdict, error) {
	switch info, err := os.Stat(a.against); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("--against: there is no file %q; give the other version's deployment file", a.against)
	case err == nil && info.IsDir():
		return nil, fmt.Errorf("--against: %s is a directory; give a file of it, as in: --against %s", a.against, filepath.Join(a.against, "deployment.yaml"))
	}
	there, err := deploy.Load(a.against)
	if err != nil {
		return nil, err
	}
	if _, err := a.engine(cmd.Flags(), there, false); err != nil {
		return nil, err
	}
	bar, done := progressTo(cmd.ErrOrStderr())
	defer done()
	o := rules.Options{StateDir: a.state, Check: check.Options{Seed: a.seed, Progress: bar}}
	if here.IsStock() || there.IsStock() {
		return rules.JudgeStock(ctx, here, there, o, at)
	}
	if err := makeState(a.state); err != nil {
		return nil, err
	}
	v, err := rules.Against(ctx, here, there, o)
	if err != nil && !isLayout(err) && errors.Is(context.Cause(ctx), check.ErrBudget) {
		return nil, fmt.Errorf("%s against %s: %w while their rules were being loaded; give --budget more seconds", here.File(), a.against, check.ErrBudget)
	}
	return v, err
}

func isLayout(err error) bool {
	var layout *registry.LayoutError
	return errors.As(err, &layout)
}

// printPair says what a verdict on a pair is about, and what each way came to.
func printPair(w io.Writer, v *registry.Verdict) {
	if v.Against == nil {
		return
	}
	for i := range v.Ways {
		way := &v.Ways[i]
		label := ""
		if i == 0 {
			label = "ways"
		}
		fmt.Fprintf(w, "  %-12s producer %s, consumer %s: %s\n", label, way.Producer, way.Consumer, way.Outcome())
		if sooner := way.Sooner(); sooner != "" {
			fmt.Fprintf(w, "  %-12s   %s\n", "", sooner)
		}
	}
	of := "by relation pair alone"
	if v.Engine != deploy.EngineTierd {
		of = "producers of the one with consumers of the other alone"
	}
	fmt.Fprintf(w, "  %-12s %s, deployment %s, rules %s; %s: check each file by itself, too\n", "against", v.Against.File, short(v.Against.DeploymentDigest), short(v.Against.RulesDigest), of)
}
