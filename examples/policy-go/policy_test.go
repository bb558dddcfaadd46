package main

import (
	"testing"

	"github.com/tierd/tierd/abi/abitest"
)

func TestPolicy(t *testing.T) { abitest.Run(t, spec{}) }
