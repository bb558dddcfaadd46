package gputest

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"pgregory.net/rapid"
)

// joined: a joined region lives by its parts.
func joined(t *testing.T, d gpu.Device) {
	a, b, c := alloc(t, d, 100), alloc(t, d, 200), alloc(t, d, 300)
	j, err := gpu.Join(b, a, c)
	require.NoError(t, err)
	require.Equal(t, int64(600), j.Size())
	require.Equal(t, []int64{0, 200, 300}, []int64{j.Start(0), j.Start(1), j.Start(2)})
	_, err = j.Export()
	require.Error(t, err)
	_, err = gpu.Join(a, b, a)
	require.ErrorContains(t, err, "part 2 is there twice")
	_, err = gpu.Join(a, j)
	require.Error(t, err)
	_, err = gpu.Join()
	require.Error(t, err)

	want := noise(rand.New(rand.NewPCG(8, 8)), 600)
	cut := []gpu.Fragment{{Length: 200}, {Offset: 200, Length: 100}, {Offset: 600}, {Offset: 300, Length: 300}}
	require.NoError(t, d.Scatter(t.Context(), j, cut, want))
	require.Equal(t, want[:200], read(t, d, b))
	require.Equal(t, want[200:300], read(t, d, a))
	require.Equal(t, want[300:], read(t, d, c))
	host := bytes.Repeat([]byte{0x5a}, 2)
	for _, frags := range [][]gpu.Fragment{
		{{Offset: 199, Length: 2}}, {{Offset: 200, Length: 1}, {Offset: 299, Length: 1}, {Offset: 598, Length: 3}}, {{Offset: 600, Length: 2}},
	} {
		require.ErrorIs(t, d.Scatter(t.Context(), j, frags, host), gpu.ErrFragments)
		require.ErrorIs(t, d.Gather(t.Context(), host, j, frags), gpu.ErrFragments)
	}
	require.Equal(t, []byte{0x5a, 0x5a}, host, "what is refused has touched nothing")
	require.NoError(t, j.Close())
	require.Equal(t, want[:200], read(t, d, b), "the parts stay open")
	require.NoError(t, a.Close())
	require.ErrorIs(t, d.Gather(t.Context(), host, j, []gpu.Fragment{{Length: 2}}), gpu.ErrClosed, "a part is closed")
}

// joinedDrawn: blocks with their fragments over several regions, as engines keep them that
// have an allocation for each layer, against plain slices.
func joinedDrawn(t *testing.T, d gpu.Device) {
	rapid.Check(t, func(rt *rapid.T) {
		layers := rapid.IntRange(1, 6).Draw(rt, "layers")
		blocks := rapid.IntRange(1, 40).Draw(rt, "blocks")
		page := int64(rapid.SampledFrom([]int{1, 16, 100, 4096, 16384, 70000}).Draw(rt, "page"))
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1))
		var parts []gpu.Region
		var models [][]byte
		defer func() {
			for _, p := range parts {
				require.NoError(t, p.Close())
			}
		}()
		for range layers {
			reg, err := d.Alloc(t.Context(), 2*int64(blocks)*page)
			require.NoError(t, err)
			parts = append(parts, reg)
			models = append(models, make([]byte, reg.Size()))
		}
		j, err := gpu.Join(parts...)
		require.NoError(t, err)
		var frags []gpu.Fragment
		ids := r.Perm(blocks)[:1+r.IntN(blocks)]
		src := quick(r.Uint64(), len(ids)*layers*2*int(page))
		rest := src
		for _, b := range ids {
			for l := range layers {
				for kv := range 2 {
					at := (int64(kv*blocks) + int64(b)) * page
					frags = append(frags, gpu.Fragment{Offset: j.Start(l) + at, Length: page})
					copy(models[l][at:at+page], rest)
					rest = rest[page:]
				}
			}
		}
		require.NoError(t, d.Scatter(t.Context(), j, frags, src))
		for l, p := range parts {
			require.True(t, bytes.Equal(models[l], read(t, d, p)), "layer %d", l)
		}
		dst := make([]byte, len(src))
		require.NoError(t, d.Gather(t.Context(), dst, j, frags))
		require.True(t, bytes.Equal(src, dst))
	})
}
