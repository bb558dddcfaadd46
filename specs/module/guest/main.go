// Command guest is the module that tierd embeds: every rule it ships, as WebAssembly.
// Package specs/module holds the result and the test that builds it again.
package main

import (
	"github.com/tierd/tierd/abi/guest"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

func init() {
	guest.Export(specs.All()...)
	guest.Export(policy.All()...)
}

func main() {}
