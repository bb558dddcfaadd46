package host

import (
	"sync"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/plan"
)

// geometry is what the flows need of a group.
type geometry struct {
	name        string
	chunkTokens uint64
	chunkBlocks uint64
	blockBytes  int64
	chunkBytes  int64
}

func geometryOf(d *deploy.Deployment) []geometry {
	out := make([]geometry, len(d.Groups))
	for i := range d.Groups {
		g := &d.Groups[i]
		out[i] = geometry{
			name: g.Name, chunkTokens: g.ChunkTokens(), chunkBlocks: g.ChunkBlocks,
			blockBytes: int64(g.BlockBytes()), chunkBytes: int64(g.ChunkBytes()),
		}
	}
	return out
}

// A sequence turns chunks of one request into keys. A producer's grows with each store, while
// the jobs of the stores before still name their chunks.
type sequence struct {
	tenant     [tier.TenantBytes]byte
	hashBytes  int
	hashTokens uint64

	mu     sync.RWMutex
	hashes []byte
}

// more adds the hashes of tokens that follow.
func (s *sequence) more(hashes []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hashes = append(s.hashes, hashes...)
}

// key returns the key of a chunk whose last token has a known hash. Chunks are whole
// numbers of hash granules, so every complete chunk has one.
func (s *sequence) key(group int, chunkTokens uint64, chunk uint32) tier.Key {
	last := int((uint64(chunk)+1)*chunkTokens/s.hashTokens) - 1
	s.mu.RLock()
	defer s.mu.RUnlock()
	return tier.MakeKey(s.tenant, s.hashes[last*s.hashBytes:(last+1)*s.hashBytes], uint32(group))
}

// tokens is how far the text's hashes are known.
func (s *sequence) tokens() uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return uint64(len(s.hashes)/s.hashBytes) * s.hashTokens
}

// refs lists the bits of per-group sets, group by group, by rising chunk.
func refs(sets []abi.Bitmap) []plan.Ref {
	var out []plan.Ref
	for g, set := range sets {
		for i := set.Next(0); i >= 0; i = set.Next(i + 1) {
			out = append(out, plan.Ref{Group: g, Chunk: uint32(i)})
		}
	}
	return out
}

func tierKeys(keys []session.Key) []tier.Key {
	out := make([]tier.Key, len(keys))
	for i := range keys {
		out[i] = tier.Key(keys[i])
	}
	return out
}
