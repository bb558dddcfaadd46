package sim

import (
	"bytes"
	"encoding/binary"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
)

// Geometry: small, so that a run has many chunks and few bytes.
const (
	blockTokens   = 4
	blockBytes    = 24
	chunkBytesMax = 4 * blockBytes
	alignTokens   = 32
)

// A model is a deployment as the simulation runs it: shipped rules, opened natively.
type model struct {
	name string
	plan.Model
}

func (m *model) chunkBytes(g int) int {
	return int(m.Groups[g].ChunkTokens/m.Groups[g].BlockTokens) * blockBytes
}

func group(name string, s abi.Spec, chunkBlocks uint64, params ...uint64) plan.Group {
	r, err := s.Open(params)
	if err != nil {
		panic(err)
	}
	return plan.Group{Name: name, Rule: r.(abi.SpecRule), BlockTokens: blockTokens, ChunkTokens: chunkBlocks * blockTokens}
}

// models are the deployments that schedules choose from.
var models = []func() model{
	func() model {
		return model{"full", plan.Model{Groups: []plan.Group{group("full", specs.Full(), 2)}}}
	},
	func() model {
		return model{"window+full", plan.Model{AlignTokens: alignTokens, Groups: []plan.Group{
			group("sliding", specs.Window(), 2, 20, 0), group("full", specs.Full(), 4)}}}
	},
	func() model {
		return model{"sink+full", plan.Model{AlignTokens: alignTokens, Groups: []plan.Group{
			group("sink", specs.Sink(), 2, 4, 16), group("full", specs.Full(), 4)}}}
	},
	func() model {
		return model{"chunked+full", plan.Model{Groups: []plan.Group{
			group("chunked", specs.Chunked(), 2, 32), group("full", specs.Full(), 2)}}}
	},
	func() model {
		g := group("state", specs.State(), 1, 1)
		g.BlockTokens, g.ChunkTokens, g.State = 16, 16, true
		return model{"state+full", plan.Model{AlignTokens: alignTokens, Groups: []plan.Group{g, group("full", specs.Full(), 4)}}}
	},
}

// layout is what the nodes say of the model in their hellos.
func (m *model) layout() *sessionpb.Layout {
	l := &sessionpb.Layout{Model: m.name, HashScheme: "sim", HashVector: []byte{1}}
	for g := range m.Groups {
		l.Groups = append(l.Groups, &sessionpb.Group{Name: m.Groups[g].Name, BlockTokens: m.Groups[g].BlockTokens,
			ChunkBlocks: m.Groups[g].ChunkTokens / m.Groups[g].BlockTokens, ChunkBytes: uint64(m.chunkBytes(g))})
	}
	return l
}

// A text is a prompt by its family; two texts of a family share their first branchTokens.
type text struct{ family, branch uint64 }

// branchTokens is where texts of one family part.
const branchTokens = 32

// key names a chunk: the hash is of the prefix up to its last token.
func (t text) key(g int, chunkTokens uint64, chunk uint32) (k tier.Key) {
	end := (uint64(chunk) + 1) * chunkTokens
	h := mix(t.family<<20 + end)
	if end > branchTokens {
		h = mix(h + t.branch + 1)
	}
	var hash [16]byte
	binary.LittleEndian.PutUint64(hash[:], h)
	binary.LittleEndian.PutUint64(hash[8:], t.family)
	return tier.MakeKey([tier.TenantBytes]byte{1}, hash[:], uint32(g))
}

// content is what a chunk holds: it follows from its key, so a slot with the bytes of
// another key is seen at once.
func content(k tier.Key, n int) []byte {
	out := make([]byte, 0, n+8)
	h := binary.LittleEndian.Uint64(k[tier.TenantBytes:]) + uint64(k.Group())
	for len(out) < n {
		h = mix(h + 0x9e3779b97f4a7c15)
		out = binary.LittleEndian.AppendUint64(out, h)
	}
	return out[:n]
}

// isContent says whether b is what a chunk of key k holds.
func isContent(k tier.Key, b []byte) bool {
	h := binary.LittleEndian.Uint64(k[tier.TenantBytes:]) + uint64(k.Group())
	var word [8]byte
	for len(b) > 0 {
		h = mix(h + 0x9e3779b97f4a7c15)
		binary.LittleEndian.PutUint64(word[:], h)
		n := min(8, len(b))
		if !bytes.Equal(word[:n], b[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
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
