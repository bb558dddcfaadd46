package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/evidence"
	"golang.org/x/term"
)

// An exitError carries the exit status of a command that has said all it has to say.
type exitError struct{ status int }

func (e *exitError) Error() string { return fmt.Sprintf("exit status %d", e.status) }

// Exit statuses of tierd check.
const (
	exitRefused   = 1
	exitUndecided = 2
)

// budgetSecondsMax is a year, far above what any check takes and far below where a
// duration overflows.
const budgetSecondsMax = 366 * 24 * 3600

// checkArgs are the flags of tierd check.
type checkArgs struct {
	tryArgs
	engineArgs
	modelArgs
	evidence evidenceArgs
}

func checkCommand() *cobra.Command {
	var a checkArgs
	cmd := &cobra.Command{
		Use:   "check DEPLOYMENT.yaml | PLUGIN.wasm[#RULE] | exec:./PLUGIN[#RULE] | --model CONFIG.json --block N",
		Short: "Judge a deployment, or the rules of a plugin: is every demand covered by the supply?",
		Long: `Check opens the rules that a deployment names and runs their supply against their
demand over the deployment's whole domain, with the planner that the daemon runs.

Given a plugin instead, it judges each of its rules without a deployment: the laws that a
rule keeps alone, then the same relations in some twenty small deployments that it makes
from the manifest. What it accepts is likely right; a daemon still judges the deployment
that it serves. With --twin it also compares the rule's answers with another
implementation's.

A deployment whose engine is a stock vLLM, or that --engine takes for one, is judged by the
rules of that release: which chunks its consumers ask for and its producers never supply.

With --model it derives the deployment from the config.json of a Hugging Face model, and
judges that; --print-deployment shows it, as a file to keep.

With --against it judges two versions of a deployment instead, as a rolling upgrade has
them side by side: producers of the one before consumers of the other.

The verdict is printed, and written to as many files as are asked for: --junit, --sarif and
--html also when it is refused or undecided, --certificate only when it is accepted. A
file is written whole or not at all.

Exit status: 0 accepted, 1 refused (the smallest counterexample is drawn),
2 could not decide, or could not write a file.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("model") {
				if len(args) > 0 {
					return fmt.Errorf("%s is given besides --model; one thing is judged at a time", args[0])
				}
				return nil
			}
			if len(args) != 1 {
				return fmt.Errorf("%d files given; give one deployment file or plugin, as in: tierd check deployment.yaml", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCheck(cmd, strings.Join(append(args, a.model), ""), &a)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&a.asJSON, "json", false, "print the verdict as JSON")
	f.StringVar(&a.state, "state", "", stateUsage)
	f.Uint64Var(&a.seed, "seed", rules.DefaultSeed, "seed of the drawn cases, and of a plugin's drawn parameters")
	f.StringSliceVar(&a.legs, "legs", []string{"pd", "probe"}, "of a plugin or a model: the legs that its deployments use, of pd, demand and probe")
	f.StringVar(&a.twin, "twin", "", "of a plugin with one rule: another implementation, which must give the same answers")
	f.Float64Var(&a.budgetSeconds, "budget", 0, "of a deployment: the most seconds that the check may take; when they are spent the verdict is undecided (0 = no limit)")
	engineFlags(f, &a)
	modelFlags(f, &a)
	pairFlags(f, &a)
	evidenceFlags(f, &a)
	return cmd
}

// runCheck judges what arg names: a file, a plugin, or what --model names.
func runCheck(cmd *cobra.Command, arg string, a *checkArgs) error {
	ref, plugin := pluginRef(arg)
	err := withoutValue(cmd.Flags())
	if err == nil {
		err = modelUse(cmd.Flags(), a)
	}
	prepared := false
	if err == nil {
		err = a.evidence.prepare(cmd, arg, plugin && a.model == "", a)
		prepared = err == nil
	}
	switch {
	case !prepared:
	case a.model != "":
		err = checkDeployment(cmd, arg, a)
	case plugin && a.engineGiven(cmd.Flags()) != "":
		err = fmt.Errorf("--%s is for a deployment, and %s is taken for a plugin: a stock engine runs none", a.engineGiven(cmd.Flags()), arg)
	case plugin && a.against != "":
		err = fmt.Errorf("--against is for a deployment file, and %s is taken for a plugin", arg)
	case plugin:
		err = checkPlugin(cmd, ref, a)
	case cmd.Flags().Changed("twin") || cmd.Flags().Changed("legs"):
		err = fmt.Errorf("--twin and --legs are for a plugin, and %s is taken for a deployment file", arg)
	default:
		if err = isFile(arg); err == nil {
			err = checkDeployment(cmd, arg, a)
		}
	}
	var exit *exitError
	if err == nil || errors.As(err, &exit) {
		return err
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "tierd check: %v\n", err)
	if prepared {
		if failed := a.evidence.write(cmd, a.evidence.errorFinding(err)); failed != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "tierd check: %v\n", failed)
		}
	}
	if a.asJSON {
		_ = json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"verdict": "undecided", "error": err.Error()})
	}
	return &exitError{exitUndecided}
}

// withoutValue reports a flag whose value is empty, as a script gives it that names a
// variable which is not set. A report that nobody writes would not be missed.
func withoutValue(f *pflag.FlagSet) (err error) {
	f.Visit(func(fl *pflag.Flag) {
		empty := fl.Value.String() == ""
		if s, ok := fl.Value.(pflag.SliceValue); ok {
			empty = len(s.GetSlice()) == 0
		}
		if empty && err == nil {
			err = fmt.Errorf("--%s is empty; give it a value, or leave it out", fl.Name)
		}
	})
	return err
}

// isFile returns what to do about an argument that is no file.
func isFile(arg string) error {
	info, err := os.Stat(arg)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("there is no file %q; give a deployment file, a module, as in rule.wasm, or a program, as in exec:./rule", arg)
	case err == nil && info.IsDir():
		return fmt.Errorf("%s is a directory; give a file of it, as in: tierd check %s", arg, filepath.Join(arg, "deployment.yaml"))
	}
	return nil
}

// checkDeployment judges a deployment file, or the deployment that is derived from a model.
func checkDeployment(cmd *cobra.Command, path string, a *checkArgs) error {
	ctx := cmd.Context()
	if !(a.budgetSeconds >= 0 && a.budgetSeconds <= budgetSecondsMax) { // NaN is neither
		return fmt.Errorf("--budget is %v seconds; it must be 0 to %d", a.budgetSeconds, budgetSecondsMax)
	}
	if a.budgetSeconds > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, time.Duration(a.budgetSeconds*float64(time.Second)), check.ErrBudget)
		defer cancel()
	}
	d, derived, err := deployment(cmd, path, a)
	if err != nil {
		return err
	}
	at, err := a.engine(cmd.Flags(), d, derived != nil)
	if err != nil {
		return err
	}
	if at != nil && a.evidence.certificate != "" {
		return errors.New("--certificate is of a whole domain, and --at names one case of it; leave one of the two out")
	}
	if a.printDeployment {
		if err := printDerived(cmd, derived); err != nil {
			return err
		}
	}
	var v *registry.Verdict
	switch {
	case a.against != "":
		v, err = judgePair(ctx, cmd, d, at, a)
	case d.IsStock():
		v, err = judgeStock(ctx, d, at, cmd.ErrOrStderr())
	default:
		v, err = judge(ctx, d, a.state, a.seed, cmd.ErrOrStderr())
	}
	if err != nil {
		return err
	}
	text, err := rendered(func(w io.Writer) error {
		if !a.asJSON {
			printVerdict(w, v)
			return nil
		}
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	})
	if err != nil {
		return err
	}
	f := deploymentFinding(path, d, v)
	if derived != nil { // the file is the model's, and holds no groups
		f.Lines = nil
		if v.Verdict == registry.Refused {
			f.Deployment = string(derived.YAML())
		}
	}
	return a.evidence.deliver(cmd, []evidence.Finding{f}, text)
}

// judge returns the verdict of a deployment of engine tierd: accepted, refused, or
// undecided because ctx ended by [check.ErrBudget].
func judge(ctx context.Context, d *deploy.Deployment, state string, seed uint64, progress io.Writer) (*registry.Verdict, error) {
	if err := makeState(state); err != nil {
		return nil, err
	}
	bar, done := progressTo(progress)
	defer done()
	r, err := rules.Register(ctx, d, rules.Options{StateDir: state, Check: check.Options{Seed: seed, Progress: bar}})
	var refusal *registry.Refusal
	var unjudged *registry.Unjudged
	switch {
	case errors.As(err, &refusal):
		return refusal.Verdict, nil
	case errors.As(err, &unjudged):
		return unjudged.Verdict, nil
	case err != nil && errors.Is(context.Cause(ctx), check.ErrBudget):
		return nil, fmt.Errorf("%s: %w while its rules were being loaded; give --budget more seconds", d.File(), check.ErrBudget)
	case err != nil:
		return nil, err
	}
	return r.Verdict, r.Close(ctx)
}

// progressEvery is how often a check says how far it is where there is no terminal: often
// enough to show that it lives, seldom enough for a log.
const progressEvery = 10 * time.Second

// progressTo returns a progress function that draws a bar when w is a terminal, and
// writes a line now and then when it is not.
func progressTo(w io.Writer) (update func(done, total int), finish func()) {
	var mu sync.Mutex
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		next := time.Now().Add(progressEvery)
		return func(done, total int) {
			mu.Lock()
			defer mu.Unlock()
			if now := time.Now(); now.After(next) {
				next = now.Add(progressEvery)
				fmt.Fprintf(w, "tierd check: %d %% done\n", 100*done/max(total, 1))
			}
		}, func() {}
	}
	var bar *progressbar.ProgressBar
	update = func(done, total int) {
		mu.Lock()
		defer mu.Unlock()
		if bar == nil {
			bar = progressbar.NewOptions(total, progressbar.OptionSetWriter(f), progressbar.OptionSetDescription("checking"),
				progressbar.OptionClearOnFinish(), progressbar.OptionShowCount())
		}
		_ = bar.Set(max(done, int(bar.State().CurrentNum))) // workers report out of order
	}
	return update, func() {
		mu.Lock()
		defer mu.Unlock()
		if bar != nil {
			_ = bar.Finish()
		}
	}
}

func printVerdict(w io.Writer, v *registry.Verdict) {
	switch v.Verdict {
	case registry.Refused:
		fmt.Fprintf(w, "REFUSED  %s\n\n%s\n", v.Model, v.Counterexample)
		if len(v.Reached) > 0 {
			fmt.Fprintf(w, "The time was spent before all smaller cases had run: a smaller one may fail, too.\n\n")
		}
	case registry.Undecided:
		fmt.Fprintf(w, "UNDECIDED  %s: %s; nothing failed so far. Give --budget more seconds\n", v.Model, v.Undecided)
	default:
		fmt.Fprintf(w, "ACCEPTED  %s\n", v.Model)
	}
	for i, line := range v.Reached {
		label := ""
		if i == 0 {
			label = "reached"
		}
		fmt.Fprintf(w, "  %-12s %s\n", label, line)
	}
	for i, r := range v.Rules {
		label := ""
		if i == 0 {
			label = "rules"
		}
		fmt.Fprintf(w, "  %-12s %s: %s %s%s from %s, %s\n", label, r.For, r.Name, r.Version, params(r.Params), r.Source, short(r.Digest))
	}
	label := "domain"
	if v.Counterexample != nil {
		label = "searched"
	}
	for i, line := range v.DomainText {
		if i == 0 && v.Counterexample != nil {
			line = "in this order, up to the failure: " + line
		}
		fmt.Fprintf(w, "  %-12s %s\n", label, line)
		label = ""
	}
	var parts []string
	for _, name := range relationsOf(v) {
		if n := v.Relations[name]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", name, n))
		}
	}
	if v.Certificate != "" {
		fmt.Fprintf(w, "  %-12s signed by the key %s\n", "certificate", v.Certificate)
	}
	took := fmt.Sprintf("in %.1f s, and %.1f s to load the rules", v.Seconds, v.LoadSeconds)
	switch {
	case v.Engine != deploy.EngineTierd: // its rules are in this program
		took = fmt.Sprintf("in %.1f s", v.Seconds)
	case v.Reused:
		took = "reused from an earlier check"
	}
	fmt.Fprintf(w, "  %-12s %d %s: %s\n", "cases", v.Cases, took, strings.Join(parts, ", "))
	if v.NotKept != "" {
		fmt.Fprintf(w, "  %-12s the verdict could not be kept for the next run: %s\n", "not kept", v.NotKept)
	}
	if len(v.UnverifiedNeed) > 0 {
		fmt.Fprintf(w, "  %-12s of %s: no mask of the list describes it, so it is taken on trust\n", "need", strings.Join(v.UnverifiedNeed, ", "))
	}
	printPair(w, v)
	for i := range v.Width {
		label := ""
		if i == 0 {
			label = "width"
		}
		fmt.Fprintf(w, "  %-12s %s\n", label, &v.Width[i])
	}
	fmt.Fprintf(w, "  %-12s deployment %s, rules %s, checker %s\n", "digests", short(v.DeploymentDigest), short(v.RulesDigest), short(v.Checker))
}

func params(p map[string]uint64) string {
	if len(p) == 0 {
		return ""
	}
	var parts []string
	for k, v := range p {
		parts = append(parts, fmt.Sprintf("%s: %d", k, v))
	}
	sort.Strings(parts)
	return " {" + strings.Join(parts, ", ") + "}"
}

// short cuts a digest to what a person compares.
func short(digest string) string {
	const hexDigits = 12
	if i := strings.IndexByte(digest, ':'); i >= 0 && len(digest) > i+1+hexDigits {
		return digest[:i+1+hexDigits]
	}
	return digest
}
