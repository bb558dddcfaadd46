package main

import (
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/guest"
)

// spec is the rule before its window is chosen.
type spec struct{}

func (spec) Manifest() *abi.Manifest {
	return &abi.Manifest{
		Name: "my-window", Version: "1.0.0", Kind: abi.KindSpec,
		Mask: abi.MaskWindow, MaskArgs: []string{"window"},
		Params: []abi.Param{{Name: "window", Min: 2, Max: 1 << 20, Required: true, Unit: "tokens"}},
	}
}

func (s spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.Manifest().CheckParams(params); err != nil {
		return nil, err
	}
	return window(params[0]), nil
}

func init() { guest.Export(spec{}) }

func main() {}
