//go:build !wasip1

// A guest that holds adversaries imports this package, and package testing would make
// it half as large again.

package abitest

import (
	"testing"

	"github.com/tierd/tierd/abi"
)

// Run is Check for a test.
func Run(t *testing.T, s abi.Spec) {
	t.Helper()
	if err := Check(s); err != nil {
		t.Error(err)
	}
}
