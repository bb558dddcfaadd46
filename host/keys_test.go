package host

import (
	"crypto/sha256"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/tier"
)

// TestSequenceGrows: a store brings more hashes while the job of the one before it names its
// chunks, whose keys stay what they are. The race detector sees what is not guarded.
func TestSequenceGrows(t *testing.T) {
	x := text{"a", 4000}
	all := x.hashes()
	const known = 16 * sha256.Size
	s := sequence{hashes: all[:known:known], hashBytes: sha256.Size, hashTokens: blockTokens}
	var wg sync.WaitGroup
	wg.Go(func() {
		for at := known; at < len(all); at += sha256.Size {
			s.more(all[at : at+sha256.Size])
		}
	})
	for chunk := range uint32(4) {
		for range 100 {
			require.Equal(t, tier.MakeKey(s.tenant, x.hash(int(4*chunk+3)), 1), s.key(1, 16, chunk))
			require.LessOrEqual(t, s.tokens(), x.tokens)
		}
	}
	wg.Wait()
	require.Equal(t, x.tokens, s.tokens())
	require.Equal(t, tier.MakeKey(s.tenant, x.hash(999), 0), s.key(0, 16, 249))
}
