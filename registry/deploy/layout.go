package deploy

import "fmt"

// HashScheme names how engines of this version chain prefix hashes into keys. It is
// part of the layout.
const HashScheme = "prefix-chain-v1"

// A Layout is what two sides must have equal to exchange bytes at all. Rules,
// parameters, policies, alignment and caps are not in it: they may differ between
// versions, and the relation between the two sides judges them.
type Layout struct {
	Model      string        `json:"model"`
	HashScheme string        `json:"hash_scheme"`
	HashTokens uint64        `json:"hash_tokens"`
	Groups     []GroupLayout `json:"groups"`
}

// GroupLayout is the geometry of one group.
type GroupLayout struct {
	Name        string `json:"name"`
	BlockTokens uint64 `json:"block_tokens"`
	ChunkBlocks uint64 `json:"chunk_blocks"`
	Layers      uint64 `json:"layers"`
	KVHeads     uint64 `json:"kv_heads"`
	HeadDim     uint64 `json:"head_dim"`
	DType       string `json:"dtype"`
}

// Layout returns the layout of the deployment.
func (d *Deployment) Layout() Layout {
	l := Layout{Model: d.Model, HashScheme: HashScheme, HashTokens: d.HashTokens}
	for i := range d.Groups {
		g := &d.Groups[i]
		l.Groups = append(l.Groups, GroupLayout{g.Name, g.BlockTokens, g.ChunkBlocks, g.Layers, g.KVHeads, g.HeadDim, g.DType})
	}
	return l
}

// Digest names the layout.
func (l Layout) Digest() string { return digest(l) }

// Fields returns the layout as named values, in a fixed order, for comparison on the
// wire and in messages.
func (l Layout) Fields() [][2]string {
	f := [][2]string{
		{"model", l.Model}, {"hash_scheme", l.HashScheme},
		{"hash_tokens", fmt.Sprint(l.HashTokens)}, {"groups", fmt.Sprint(len(l.Groups))},
	}
	for i, g := range l.Groups {
		at := fmt.Sprintf("groups[%d].", i)
		f = append(f,
			[2]string{at + "name", g.Name}, [2]string{at + "block_tokens", fmt.Sprint(g.BlockTokens)},
			[2]string{at + "chunk_blocks", fmt.Sprint(g.ChunkBlocks)}, [2]string{at + "layers", fmt.Sprint(g.Layers)},
			[2]string{at + "kv_heads", fmt.Sprint(g.KVHeads)}, [2]string{at + "head_dim", fmt.Sprint(g.HeadDim)},
			[2]string{at + "dtype", g.DType})
	}
	return f
}

// Diff returns one line for each field that differs: "field: here X, there Y".
func (l Layout) Diff(other Layout) []string {
	a, b := l.Fields(), other.Fields()
	there := map[string]string{}
	for _, f := range b {
		there[f[0]] = f[1]
	}
	var lines []string
	for _, f := range a {
		v, ok := there[f[0]]
		delete(there, f[0])
		if !ok {
			v = "nothing"
		}
		if v != f[1] {
			lines = append(lines, fmt.Sprintf("%s: here %s, there %s", f[0], f[1], v))
		}
	}
	for _, f := range b {
		if v, ok := there[f[0]]; ok {
			lines = append(lines, fmt.Sprintf("%s: here nothing, there %s", f[0], v))
		}
	}
	return lines
}
