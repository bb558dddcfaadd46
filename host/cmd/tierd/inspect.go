package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tierd/tierd/host/inspect"
)

// exitModuleRefused is the status of a tierd inspect of what this host does not take for
// a plugin.
const exitModuleRefused = 1

func inspectCommand() *cobra.Command {
	var asJSON bool
	var state string
	cmd := &cobra.Command{
		Use:   "inspect PLUGIN.wasm[#RULE] | exec:./PLUGIN | SHIPPED-RULE",
		Short: "Say what a plugin is: rules, parameters, exports, imports, size, digest, fuel",
		Long: `Inspect says what a plugin is: its rules with their parameters, what it exports and
imports, its size and digest, the memory that it begins with, and the fuel of sample
calls. It judges no rule; tierd check does.

The sample is a prompt of 131072 tokens in 8192 chunks, aligned to 4096 tokens. Parameters
have their defaults, and those that are required 128, or the nearest value that they may
have.

Of a module that this host refuses it says what can be read without running it, and the
refusal.

Exit status: 0 it is a plugin, 1 it is refused, 2 it could not be read.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%d files given; give one plugin, as in: tierd inspect rule.wasm", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cache, err := cacheIn(state)
			if err != nil {
				return err
			}
			ref := args[0]
			if path, _, _ := strings.Cut(ref, "#"); !strings.ContainsAny(path, "/.:") && startsAsWasm(path) {
				ref = "./" + ref // a module by its first bytes, as check takes it, and no shipped rule
			}
			r, err := inspect.Read(cmd.Context(), ref, inspect.Options{CacheDir: cache})
			if err != nil && asJSON {
				_ = json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"ref": args[0], "error": err.Error()})
			}
			if err != nil {
				return err
			}
			if asJSON {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				enc.SetEscapeHTML(false) // "->" in types
				err = enc.Encode(r)
			} else {
				err = r.WriteText(cmd.OutOrStdout())
			}
			if err == nil && r.Refused != "" {
				err = &exitError{exitModuleRefused}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&state, "state", "", stateUsage)
	return cmd
}
