package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/host/eval"
)

// exitEvalErrors is the status of a tierd eval that answered some line with an error.
const exitEvalErrors = 1

func evalCommand() *cobra.Command {
	var state string
	cmd := &cobra.Command{
		Use:   "eval [FILE]",
		Short: "Ask rules single questions, a line of JSON each",
		Long: `Eval reads questions from FILE, or from standard input, and prints an answer for each
line that is not blank, in order and at once, so that another program can drive it:

  {"rule":"window","params":{"window":20},"op":"reach","round":{"chunk_tokens":8,"prompt_tokens":64,"resume_tokens":56}}
  {"set":[[4,6]],"fuel":1234}

rule     a shipped name, ./file.wasm#name or exec:./path#name, from the working directory
params   as in a deployment file: integers, or the names of an enum
op       reach (the supply), scan (the demand) or need (the truth)
round    chunk_tokens, and what the question is about; what is left out is

           block_tokens      chunk_tokens
           stored_tokens     prompt_tokens
           lo                of a scan local_tokens / chunk_tokens, else 0
           hi                of a reach stored_tokens / chunk_tokens, of a need
                             resume_tokens / chunk_tokens, rounded up, of a scan
                             bound_tokens / chunk_tokens, rounded up, or the end of states
           bound_tokens      of a scan hi * chunk_tokens
           prompt_tokens, resume_tokens, align_tokens, junction_tokens, resident_tokens,
           offers, local_tokens  0

states   of a scan: a letter for each chunk from lo on, M, H, P or R

set      inclusive ranges of chunk numbers of the sequence
usable, deferred   of a scan only
fuel     where it is counted
error    in place of all others; the next line goes on

Exit status: 0 every line was answered, 1 some answer is an error, 2 the lines could not
be read.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("%d files given; give one, or none for standard input, as in: tierd eval lines.jsonl", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var in io.Reader = cmd.InOrStdin()
			if len(args) == 1 && args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			cache, err := cacheIn(state)
			if err != nil {
				return err
			}
			_, failed, err := eval.Run(cmd.Context(), in, cmd.OutOrStdout(), eval.Options{CacheDir: cache})
			if err != nil {
				return err
			}
			if failed > 0 {
				return &exitError{exitEvalErrors}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&state, "state", "", stateUsage)
	return cmd
}

const stateUsage = "directory that keeps accepted verdicts and compiled modules; made if it is not there, in one that is"

// makeState makes the state directory, but not those above it: one that had to be made
// would be a misspelt one.
func makeState(dir string) error {
	if dir == "" {
		return nil
	}
	if info, err := os.Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("--state is %s, which cannot be made: %w; make the directory above it, or correct the path", dir, bare(err))
	}
	return nil
}

// cacheIn returns where a state directory keeps compiled modules, as package rules does.
func cacheIn(state string) (string, error) {
	if state == "" {
		return "", nil
	}
	return filepath.Join(state, "compiled"), makeState(state)
}

// bare is an error of a file without the operation and the path, which the message has.
func bare(err error) error {
	if e, ok := err.(*os.PathError); ok {
		return e.Err
	}
	return err
}
