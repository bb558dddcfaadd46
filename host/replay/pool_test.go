package replay

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// naivePool is the same cache as a slice of records that is searched from end to end.
type naivePool struct {
	users map[uint32]int
	holds map[uint32]hash
	freed []uint32 // free blocks in the order in which they were freed
}

func (n *naivePool) findable(h hash) (uint32, bool) {
	for id, x := range n.holds {
		if x == h {
			return id, true
		}
	}
	return 0, false
}

// next is the block that must be taken: the last freed one of those that hold
// nothing, else the first freed one.
func (n *naivePool) next() uint32 {
	for i := len(n.freed) - 1; i >= 0; i-- {
		if _, known := n.holds[n.freed[i]]; !known {
			return n.freed[i]
		}
	}
	return n.freed[0]
}

func (n *naivePool) drop(id uint32) {
	for i, x := range n.freed {
		if x == id {
			n.freed = append(n.freed[:i:i], n.freed[i+1:]...)
		}
	}
}

func TestPoolMatchesNaiveModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Uint32Range(1, 12).Draw(t, "blocks")
		p := newPool(size)
		model := &naivePool{users: map[uint32]int{}, holds: map[uint32]hash{}}
		for id := size; id > 0; id-- {
			model.freed = append(model.freed, id-1)
		}
		used := func() (ids []uint32) {
			for id := range size {
				if model.users[id] > 0 {
					ids = append(ids, id)
				}
			}
			return ids
		}
		someHash := rapid.Custom(func(t *rapid.T) hash { return hash{byte(rapid.IntRange(1, 9).Draw(t, "hash"))} })

		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				n := rapid.IntRange(0, 4).Draw(t, "n")
				ids, err := p.take(n)
				if n > len(model.freed) {
					require.Error(t, err)
					require.Empty(t, ids)
					return
				}
				require.NoError(t, err)
				for _, id := range ids {
					require.Equal(t, model.next(), id)
					delete(model.holds, id)
					model.drop(id)
					model.users[id] = 1
				}
			},
			"publish": func(t *rapid.T) {
				ids := used()
				if len(ids) == 0 {
					t.Skip("none in use")
				}
				id, h := rapid.SampledFrom(ids).Draw(t, "id"), someHash.Draw(t, "h")
				p.publish(id, h)
				if _, ok := model.findable(h); !ok {
					model.holds[id] = h
				}
			},
			"share": func(t *rapid.T) {
				h := someHash.Draw(t, "h")
				id, ok := p.find(h)
				want, wantOK := model.findable(h)
				require.Equal(t, wantOK, ok)
				if !ok {
					return
				}
				require.Equal(t, want, id)
				p.share(id)
				model.drop(id)
				model.users[id]++
			},
			"release": func(t *rapid.T) {
				ids := used()
				if len(ids) == 0 {
					t.Skip("none in use")
				}
				ids = rapid.Permutation(ids).Draw(t, "ids")[:rapid.IntRange(1, len(ids)).Draw(t, "n")]
				p.release(ids...)
				for i := len(ids) - 1; i >= 0; i-- {
					if model.users[ids[i]]--; model.users[ids[i]] == 0 {
						model.freed = append(model.freed, ids[i])
					}
				}
			},
			"": func(t *rapid.T) {
				require.Equal(t, len(model.freed), p.free)
				for h := range 10 {
					want, wantOK := model.findable(hash{byte(h)})
					got, ok := p.find(hash{byte(h)})
					require.Equal(t, wantOK, ok)
					require.Equal(t, want, got)
				}
			},
		})
	})
}
