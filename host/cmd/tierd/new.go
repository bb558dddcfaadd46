package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/host/scaffold"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
)

func newCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "new",
		Short: "Write the directory of something new: a rule",
		// Those of what is not known are not looked at: it is named first.
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("%q is not known; there is: tierd new rule NAME --lang LANGUAGE", args[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			return errors.New("of what? There is: tierd new rule NAME --lang LANGUAGE")
		},
	}
	cmd.AddCommand(newRuleCommand())
	return cmd
}

// newArgs are the flags of tierd new rule.
type newArgs struct{ lang, dir, checkout string }

func newRuleCommand() *cobra.Command {
	var a newArgs
	known := languages()
	cmd := &cobra.Command{
		Use:   "rule NAME --lang " + strings.Join(scaffold.Languages(), "|"),
		Short: "Write the directory of a new rule, which builds, tries and checks itself",
		Long: `Rule writes the directory of a new rule: sliding-window attention, whole, to be turned
into another. It builds itself (make), tries itself (make test) and is judged (make
check), here and in the workflow file for its author's CI. No file is replaced.

NAME is the rule's name: lower-case letters, digits, - and _.

Exit status: 0 written, 2 not.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%d names given; give one, as in: tierd new rule my-window --lang go", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return writeRule(args[0], a, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&a.lang, "lang", "", "the language: "+known)
	f.StringVar(&a.dir, "dir", "", "where to write (default: NAME)")
	f.StringVar(&a.checkout, "tierd", "", "a checkout of tierd that a Go rule is built against (needed where this build is of no published version)")
	return cmd
}

// languages lists what --lang may be.
func languages() string {
	return strings.Join(scaffold.Languages(), ", ") + " (AssemblyScript)"
}

func writeRule(name string, a newArgs, out io.Writer) error {
	known := scaffold.Languages()
	switch {
	case a.lang == "":
		return fmt.Errorf("--lang is missing; choose one of %s", languages())
	case !slices.Contains(known, a.lang):
		return fmt.Errorf("--lang is %q%s known: %s", a.lang, strictyaml.DidYouMean(a.lang, known), languages())
	}
	if a.dir == "" {
		a.dir = name
	}
	if a.lang == "go" && a.checkout == "" && !scaffold.Published() {
		return errors.New("a Go rule requires the module of tierd, and this build is of no published version; add --tierd CHECKOUT, the directory of a checkout of tierd")
	}
	o := scaffold.Options{Name: name, Lang: a.lang}
	if a.checkout != "" {
		var err error
		if o.Tierd, err = checkoutFrom(a.dir, a.checkout); err != nil {
			return err
		}
	}
	files, err := scaffold.Write(a.dir, o)
	if err != nil {
		return err
	}
	return sayWritten(out, a.dir, files)
}

// checkoutFrom returns the path of a checkout as seen from the new directory.
func checkoutFrom(dir, checkout string) (string, error) {
	mod, err := os.Open(filepath.Join(checkout, "go.mod"))
	if err != nil {
		return "", fmt.Errorf("--tierd is %s, which is no checkout of tierd: %w", checkout, err)
	}
	defer mod.Close()
	const module = "module github.com/tierd/tierd"
	if first, _ := bufio.NewReader(io.LimitReader(mod, 1024)).ReadString('\n'); strings.TrimSpace(first) != module {
		return "", fmt.Errorf("--tierd is %s, which is no checkout of tierd: the first line of its go.mod is %q, not %q", checkout, strings.TrimSpace(first), module)
	}
	from, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	to, err := filepath.Abs(checkout)
	if err != nil {
		return "", err
	}
	return filepath.Rel(from, to)
}

// sayWritten prints the files, and what to do next. The directory's Makefile calls tierd;
// where that is not this program, the commands name it.
func sayWritten(out io.Writer, dir string, files []string) error {
	var b strings.Builder
	for _, f := range files {
		fmt.Fprintln(&b, f)
	}
	tierd := ""
	if _, err := exec.LookPath("tierd"); err != nil {
		if self, err := os.Executable(); err == nil {
			tierd = " TIERD=" + shellWord(self)
		}
	}
	if strings.HasPrefix(dir, "-") { // cd would take it for an option
		dir = "./" + dir
	}
	fmt.Fprintf(&b, "\nnext:\n  cd %s\n  make test%s    # builds rule.wasm and tries it\n  make check%s   # judges it\n", shellWord(dir), tierd, tierd)
	_, err := io.WriteString(out, b.String())
	return err
}

// shellWord quotes a path for a shell, where that is needed.
func shellWord(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./@:+,") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
