// Command adversaries is a module of rules that are wrong on purpose: every adversary
// of package abitest around the shipped window rule, and the wrong policy newcomer. The
// registration check must refuse them as WebAssembly just as it refuses them in Go.
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o adversaries.wasm ./registry/check/testdata/adversaries
package main

import (
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/abi/guest"
	"github.com/tierd/tierd/specs"
)

func init() {
	for _, a := range abitest.Adversaries() {
		guest.Export(a.Wrap(specs.Window()))
	}
	guest.Export(abitest.Newcomer())
}

func main() {}
