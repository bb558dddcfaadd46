package main

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/tierd/tierd/host/build"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/tryout"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
	"github.com/tierd/tierd/registry/evidence"
)

// evidenceArgs are the flags that say in which forms a verdict is kept. Each names a file;
// "-" is standard output, and then nothing else is printed there.
type evidenceArgs struct {
	color                    string
	junit, sarif, html       string
	certificate, key         string
	signing                  ed25519.PrivateKey // of the file key
	json, printed            bool               // standard output is taken
	version, command, target string
	plugin                   bool
}

func evidenceFlags(f *pflag.FlagSet, a *checkArgs) {
	e := &a.evidence
	f.StringVar(&e.color, "color", "auto", "colours in the text: auto (on a terminal, unless NO_COLOR is set), always, never")
	f.StringVar(&e.junit, "junit", "", "write a JUnit report to this file; - is standard output, here and below")
	f.StringVar(&e.sarif, "sarif", "", "write a SARIF 2.1.0 log to this file")
	f.StringVar(&e.html, "html", "", "write one HTML page, without scripts, to this file")
	f.StringVar(&e.certificate, "certificate", "", "of a deployment that is accepted: write a signed certificate to this file; needs --key")
	f.StringVar(&e.key, "key", "", "the private key that signs the certificate, as tierd key writes it")
}

// unrepeated are the flags that do not change a verdict, and so do not belong to the
// command that gives it again.
var unrepeated = []string{"json", "color", "junit", "sarif", "html", "certificate", "key", "state", "print-deployment"}

// files are the flags that name a file which is written.
func (e *evidenceArgs) files() [][2]string {
	return [][2]string{{"--junit", e.junit}, {"--sarif", e.sarif}, {"--html", e.html}, {"--certificate", e.certificate}}
}

// prepare reports, before a check that may take a minute, what would keep its verdict from
// being written.
func (e *evidenceArgs) prepare(cmd *cobra.Command, target string, plugin bool, a *checkArgs) error {
	e.json, e.target, e.plugin, e.printed = a.asJSON, target, plugin, a.printDeployment
	b := build.This()
	e.version, e.command = b.String(), commandLine(cmd.Flags(), target)
	switch {
	case !slices.Contains([]string{"auto", "always", "never"}, e.color):
		return fmt.Errorf("--color is %q; known: auto, always, never", e.color)
	case e.certificate != "" && plugin:
		return fmt.Errorf("--certificate is for a deployment, and %s is a plugin: its rules are certified in the deployment that they serve", target)
	case e.certificate != "" && a.against != "":
		return errors.New("--certificate is of one deployment, and --against judges a pair; certify each by itself")
	case e.certificate != "" && e.key == "":
		return errors.New("--certificate needs --key, the private key that signs it; tierd key FILE makes one")
	case e.certificate == "" && e.key != "":
		return errors.New("--key is for --certificate, which is not given")
	}
	if err := e.clash(); err != nil {
		return err
	}
	if e.key != "" {
		data, err := config.ReadAtMost(e.key, evidence.KeyBytesMax)
		var pe *fs.PathError
		if errors.As(err, &pe) {
			return fmt.Errorf("--key is %s: %w; give the private key that tierd key wrote", e.key, pe.Err)
		}
		if err != nil {
			return fmt.Errorf("--key: %w", err)
		}
		if e.signing, err = evidence.ParsePrivateKey(data); err != nil {
			return fmt.Errorf("--key is %s: %w", e.key, err)
		}
	}
	for _, f := range e.files() {
		if f[1] == "" || f[1] == "-" {
			continue
		}
		if err := writable(f[1]); err != nil {
			return fmt.Errorf("%s: %w", f[0], err)
		}
	}
	return nil
}

// clash refuses two things for one file, and the check's own input as a file to write.
func (e *evidenceArgs) clash() error {
	input, _, _ := strings.Cut(strings.TrimPrefix(e.target, "exec:"), "#")
	taken := []struct{ what, path string }{{"what is checked", input}, {"--key", e.key}}
	if e.json {
		taken = append(taken, struct{ what, path string }{"--json", "-"})
	}
	if e.printed {
		taken = append(taken, struct{ what, path string }{"--print-deployment", "-"})
	}
	for _, f := range e.files() {
		if f[1] == "" {
			continue
		}
		for _, t := range taken {
			if t.path != "" && sameFile(t.path, f[1]) {
				return fmt.Errorf("%s and %s are both %s; give each a file of its own", t.what, f[0], f[1])
			}
		}
		taken = append(taken, struct{ what, path string }{f[0], f[1]})
	}
	return nil
}

func sameFile(a, b string) bool {
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && x.Mode().IsRegular() && os.SameFile(x, y)
}

// commandLine is the command that gives the same verdict.
func commandLine(f *pflag.FlagSet, target string) string {
	words := []string{"tierd", "check"}
	if !f.Changed("model") { // which is among the flags
		words = append(words, shellWord(target))
	}
	f.VisitAll(func(fl *pflag.Flag) {
		if slices.Contains(unrepeated, fl.Name) || !fl.Changed && fl.Name != "seed" {
			return
		}
		values := []string{fl.Value.String()}
		if s, ok := fl.Value.(pflag.SliceValue); ok {
			values = []string{strings.Join(s.GetSlice(), ",")}
		}
		for _, v := range values {
			words = append(words, "--"+fl.Name+"="+shellWord(v))
		}
	})
	return strings.Join(words, " ")
}

// deliver writes a run's evidence and prints the text, and returns the error with the exit
// status. text is what standard output gets when no file is "-".
func (e *evidenceArgs) deliver(cmd *cobra.Command, findings []evidence.Finding, text []byte) error {
	failed := e.write(cmd, findings)
	if !slices.ContainsFunc(e.files(), func(f [2]string) bool { return f[1] == "-" }) {
		if e.coloured(cmd.OutOrStdout()) {
			text = []byte(evidence.Paint(string(text)))
		}
		if _, err := cmd.OutOrStdout().Write(text); err != nil {
			failed = errors.Join(failed, err)
		}
	}
	if failed != nil { // the verdict has been printed: nothing more belongs on standard output
		fmt.Fprintf(cmd.ErrOrStderr(), "tierd check: %v\n", failed)
		return &exitError{exitUndecided}
	}
	switch evidence.Overall(findings) {
	case registry.Refused:
		return &exitError{exitRefused}
	case registry.Undecided:
		return &exitError{exitUndecided}
	}
	return nil
}

// coloured reports whether text on w has colours.
func (e *evidenceArgs) coloured(w io.Writer) bool {
	return !e.json && coloured(e.color, w)
}

// write writes every file that was asked for. One that cannot be written does not keep the
// others from being.
func (e *evidenceArgs) write(cmd *cobra.Command, findings []evidence.Finding) (failed error) {
	r := &evidence.Report{Version: e.version, Command: e.command, Findings: findings}
	put := func(flag, path string, data []byte, err error) {
		if err == nil && path == "-" {
			_, err = cmd.OutOrStdout().Write(data)
		} else if err == nil {
			err = writeWhole(path, data)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", flag, err))
		}
	}
	for _, f := range []struct {
		flag, path string
		render     func(*evidence.Report) ([]byte, error)
	}{{"--junit", e.junit, evidence.JUnit}, {"--sarif", e.sarif, evidence.SARIF}, {"--html", e.html, evidence.HTML}} {
		if f.path != "" {
			data, err := f.render(r)
			put(f.flag, f.path, data, err)
		}
	}
	switch {
	case e.certificate == "":
	case evidence.Overall(findings) != registry.Accepted:
		fmt.Fprintf(cmd.ErrOrStderr(), "tierd check: no certificate is written: the verdict is %s\n", evidence.Overall(findings))
		if err := forget(e.certificate); err != nil {
			failed = errors.Join(failed, fmt.Errorf("--certificate: an earlier one is still there: %w", err))
		}
	default:
		data, err := evidence.Certify(findings[0].Verdict, e.version, e.signing)
		put("--certificate", e.certificate, data, err)
	}
	return failed
}

// forget removes a certificate of an earlier run, which would look like this run's.
func forget(path string) error {
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return nil
	}
	return os.Remove(path)
}

// writable reports why a file could not be written, without touching what is there.
func writable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return fmt.Errorf("%s is a directory; give a file in it", path)
	case err == nil && !info.Mode().IsRegular():
		return nil // a pipe or a device: opening it may wait
	}
	f, err := besides(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// besides makes a file in path's directory, to take its place. An error names path.
func besides(path string) (*os.File, error) {
	for i := range 100 {
		// Not os.CreateTemp, whose files only their owner may read.
		name := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%d-%d", filepath.Base(path), os.Getpid(), i))
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		var pe *fs.PathError
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, fs.ErrExist):
		case errors.As(err, &pe):
			return nil, fmt.Errorf("%s cannot be written: %w", path, pe.Err)
		default:
			return nil, fmt.Errorf("%s cannot be written: %w", path, err)
		}
	}
	return nil, fmt.Errorf("%s cannot be written: too many files .%s.* stand beside it", path, filepath.Base(path))
}

// writeWhole writes a file whole or not at all: whoever finds it finds all of it. A pipe or
// a device is written to as it is, and a link's target is what is replaced.
func writeWhole(path string, data []byte) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(data)
		return errors.Join(err, f.Close())
	}
	f, tmpErr := besides(path)
	if tmpErr != nil {
		return tmpErr
	}
	if err == nil {
		err = f.Chmod(info.Mode().Perm())
	} else {
		err = nil
	}
	if err == nil {
		_, err = f.Write(data)
	}
	if err == nil {
		err = f.Sync() // else the name may outlive the bytes
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("%s cannot be written: %w", path, err)
	}
	return nil
}

// deploymentFinding is the finding of a deployment file, with the lines of its groups.
func deploymentFinding(path string, d *deploy.Deployment, v *registry.Verdict) evidence.Finding {
	f := evidence.Finding{Verdict: v, File: path}
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() { // a pipe has been read
		return f
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return f
	}
	f.Lines = strictyaml.Lines(data)
	for i := range d.Groups {
		f.Groups = append(f.Groups, d.Groups[i].Name)
	}
	return f
}

// ruleFindings are the findings of a plugin's rules.
func ruleFindings(results []*tryout.Result) (out []evidence.Finding) {
	for _, r := range results {
		v := &registry.Verdict{
			Verdict: r.Verdict, Model: r.Rule + " " + r.Version, RulesDigest: r.Digest, Cases: r.Cases, Relations: r.Relations,
			Seconds: r.Seconds, Counterexample: r.Counterexample,
			Rules: []registry.RuleID{{For: "tried", Ref: r.Ref, Name: r.Rule, Version: r.Version, Digest: r.Digest, Source: r.Ref, Params: r.Params}},
		}
		v.Domain.Seed = r.Seed
		if r.Deployments > 0 {
			v.DomainText = append(v.DomainText, fmt.Sprintf("%d small deployments, with prompts of up to %d tokens, drawn with seed %d", r.Deployments, r.PromptTokens, r.Seed))
		}
		if r.UnverifiedNeed {
			v.UnverifiedNeed = []string{r.Rule}
		}
		f := evidence.Finding{Verdict: v, File: r.Ref, Rule: true, Laws: r.Laws, Deployment: r.Deployment}
		switch r.Verdict {
		case registry.Undecided:
			v.Undecided = r.Why
		case registry.Refused:
			f.Why = r.Why
		}
		out = append(out, f)
	}
	return out
}

// errorFinding is the finding of a run that ended by an error.
func (e *evidenceArgs) errorFinding(err error) []evidence.Finding {
	f := evidence.Undecided(e.target, err)
	f.Rule = e.plugin
	return []evidence.Finding{f}
}

// rendered runs print on a buffer.
func rendered(print func(w io.Writer) error) ([]byte, error) {
	var b bytes.Buffer
	err := print(&b)
	return b.Bytes(), err
}
