package main

import (
	"testing"

	"github.com/tierd/tierd/abi/abitest"
)

func TestRule(t *testing.T) { abitest.Run(t, spec{}) }
