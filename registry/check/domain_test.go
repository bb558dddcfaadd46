package check_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A verdict says how many lengths were drawn, not how many may have been.
func TestDrawnLengthsAreCounted(t *testing.T) {
	d := judge(t, subject(40, 16, nil, full(4, 4))).Domain
	require.Equal(t, 40, d.EdgeLengths) // three periods are longer
	require.Zero(t, d.Drawn)
	d = judge(t, subject(3000, 16, nil, full(4, 4))).Domain
	require.Equal(t, 128, d.Drawn)
}
