package tier

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/gpu"
)

// A tier in the caller's memory is like any other, and nothing of it is a file.
func TestMemory(t *testing.T) {
	_, err := New(Options{Memory: make([]byte, 3*4096-1), SlotBytes: 64, Slots: 3})
	require.EqualError(t, err, "primary tier: 12287 bytes of memory; 3 slots of 64 bytes, 4096 apart, need 12288")

	mem := make([]byte, 3*4096)
	p, err := New(Options{Memory: mem, SlotBytes: 64, Slots: 3})
	require.NoError(t, err)
	require.Equal(t, gpu.Handle{}, p.Export())
	as, err := p.Admit(me, keysFrom(0, 1))
	require.NoError(t, err)
	b, err := p.Bytes(as[0].Slot)
	require.NoError(t, err)
	copy(b, "content")
	require.Equal(t, "content", string(mem[as[0].Slot.Index*4096:][:7]))
	ref, err := p.Commit(as[0].Slot, Checksum(b[:7]), 7, true)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	require.NoError(t, ref.Verify(), "a pin keeps the memory")
	require.NoError(t, p.Unpin(ref))
	require.NoError(t, p.Close())

	p, err = New(Options{Memory: mem, SlotBytes: 64, Slots: 3})
	require.NoError(t, err)
	require.NoError(t, p.Close())
}

// Which slots are free next does not depend on the order of a map.
func TestReleaseFreesInOrder(t *testing.T) {
	for range 20 {
		p := newTier(t, 32)
		_, err := p.Stage(me, 32)
		require.NoError(t, err)
		_, writes := p.Release(me)
		require.Equal(t, 32, writes)
		again, err := p.Stage(me, 32)
		require.NoError(t, err)
		for i, s := range again {
			require.Equal(t, Slot{Index: uint32(31 - i), Epoch: 2}, s)
		}
	}
}
