// Command perchunk is the module of the rule beside it.
package main

import (
	"github.com/tierd/tierd/abi/guest"
	"github.com/tierd/tierd/plugins/wasm/testdata/perchunk/perchunk"
)

func init() { guest.Export(perchunk.Spec{}) }

func main() {}
