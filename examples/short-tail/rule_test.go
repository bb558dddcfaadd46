package main

import (
	"testing"

	"github.com/tierd/tierd/abi/abitest"
)

// The mistake breaks no law that a rule can break alone: its author's own unit tests
// would pass. It takes the check of a deployment, which runs the two halves against
// each other, to find it.
func TestEveryLawHolds(t *testing.T) { abitest.Run(t, spec{}) }
