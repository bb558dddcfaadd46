package wire

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReasonsWithoutPorts: a reason that differs by the port of this end alone is the same, and
// takes no place of another one.
func TestReasonsWithoutPorts(t *testing.T) {
	n := startTCP(t, Config{Hello: hello("a", 1)})
	a, err := n.peers.prepare(PeerAddr{ID: "b", Control: "127.0.0.1:1"}, true)
	require.NoError(t, err)
	for port := range 2 * reasonsMax {
		a.logFailure(fmt.Sprintf("write tcp [::1]:%d->127.0.0.1:1: write: broken pipe", 40000+port))
	}
	a.logFailure("layouts differ")
	require.Equal(t, 1, strings.Count(n.log.String(), "broken pipe"), n.log)
	require.Contains(t, n.log.String(), "layouts differ")
}
