package engine

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// collide looks at every byte of every block.
func collide(reg *enginepb.Region) bool {
	seen := map[[2]uint64]bool{}
	for b := range uint64(reg.Blocks) {
		for _, s := range reg.Layout {
			for k := range s.LengthBytes {
				at := [2]uint64{uint64(s.Memory), s.OffsetBytes + b*s.StrideBytes + k}
				if seen[at] {
					return true
				}
				seen[at] = true
			}
		}
	}
	return false
}

// TestOverlapsAreFound: a layout that is accepted has no byte twice; one that is refused for
// an overlap has, unless its strides differ where areas mix.
func TestOverlapsAreFound(t *testing.T) {
	accepted, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		reg := &enginepb.Region{Group: "full", Blocks: rapid.Uint32Range(1, 6).Draw(t, "blocks")}
		strides := rapid.SliceOfN(rapid.Uint64Range(0, 40), 1, 2).Draw(t, "strides")
		for range rapid.IntRange(1, 4).Draw(t, "fragments") {
			reg.Layout = append(reg.Layout, &enginepb.Stride{
				Memory: rapid.Uint32Range(0, 1).Draw(t, "memory"), OffsetBytes: rapid.Uint64Range(0, 120).Draw(t, "offset"),
				StrideBytes: rapid.SampledFrom(strides).Draw(t, "stride"), LengthBytes: rapid.Uint64Range(1, 12).Draw(t, "length"),
			})
		}
		err := checkApart("full", reg.Layout, reg.Blocks)
		switch found := collide(reg); {
		case err == nil:
			accepted++
			require.False(t, found, "a byte is there twice")
		case len(strides) == 1:
			refused++
			require.True(t, found, "%v", err)
		}
	})
	require.Positive(t, min(accepted, refused), "both happen")
}

// TestAttachMemory: what an engine says of its memory is held against the deployment.
func TestAttachMemory(t *testing.T) {
	l := testLimits // blocks of 64 bytes
	raw := make([]byte, HandleBytes)
	ipc := func(length uint64) *enginepb.Memory {
		return &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_CUDA_IPC, Handle: raw, LengthBytes: length}
	}
	file := &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_FILE, Path: "/dev/shm/x", LengthBytes: 4096}
	region := func(memory []*enginepb.Memory, layout ...*enginepb.Stride) *enginepb.AttachRequest {
		return &enginepb.AttachRequest{Regions: []*enginepb.Region{{Group: "full", Blocks: 4, Layout: layout, Memory: memory}}}
	}
	type strides = []*enginepb.Stride
	kv := strides{{StrideBytes: 32, LengthBytes: 32}, {OffsetBytes: 128, StrideBytes: 32, LengthBytes: 32}}
	for name, r := range map[string]*enginepb.AttachRequest{
		"default":              region(nil),
		"K and V in planes":    region(nil, kv...),
		"K and V side by side": region([]*enginepb.Memory{ipc(256)}, &enginepb.Stride{StrideBytes: 64, LengthBytes: 32}, &enginepb.Stride{OffsetBytes: 32, StrideBytes: 64, LengthBytes: 32}),
		"two allocations":      region([]*enginepb.Memory{ipc(128), {Kind: enginepb.MemoryKind_MEMORY_CUDA_IPC, Handle: raw, OffsetBytes: 4096, LengthBytes: 128}}, kv[0], &enginepb.Stride{Memory: 1, StrideBytes: 32, LengthBytes: 32}),
		"a file":               region([]*enginepb.Memory{file}),
		"events":               {Events: [][]byte{raw, raw}, Accepts: []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_CUDA_IPC}},
		"groups that share": {Regions: []*enginepb.Region{
			{Group: "full", Blocks: 4, Memory: []*enginepb.Memory{ipc(256)}}, {Group: "sliding", Blocks: 4, Memory: []*enginepb.Memory{ipc(256)}},
		}},
	} {
		before := proto.Clone(r)
		require.NoError(t, l.checkAttach(r), name)
		require.True(t, proto.Equal(before, r), "%s: a check changes nothing", name)
	}
	for _, c := range []struct {
		want string
		r    *enginepb.AttachRequest
	}{
		{`group "full": the fragments of the layout have 32 bytes together, but a block has 64 (layers x 2 x block_tokens x kv_heads x head_dim x bytes of the dtype); list every layer's K and V`, region(nil, kv[0])},
		{`group "full": the first 2 fragments of the layout have more than the 64 bytes of a block (sum 32, then 33)`, region(nil, kv[0], &enginepb.Stride{OffsetBytes: 128, StrideBytes: 33, LengthBytes: 33})},
		{`group "full": layout[1] has length_bytes 0; leave it out`, region(nil, kv[0], &enginepb.Stride{})},
		{`group "full": layout[1] is in memory 1, but the region has memories 0 to 0`, region(nil, kv[0], &enginepb.Stride{Memory: 1, StrideBytes: 32, LengthBytes: 32})},
		{`group "full": layout[1] ends at byte 256 with 4 blocks, but memory[0] has 255 bytes`, region([]*enginepb.Memory{ipc(255)}, kv...)},
		{`group "full": layout[0] has stride_bytes 63, below its length_bytes, 64; blocks would overlap`, region(nil, &enginepb.Stride{StrideBytes: 63, LengthBytes: 64})},
		{`group "full": layout[0] (offset_bytes 0, length_bytes 32) and layout[1] (offset_bytes 96, length_bytes 32) overlap in some block (stride_bytes 32)`, region(nil, kv[0], &enginepb.Stride{OffsetBytes: 96, StrideBytes: 32, LengthBytes: 32})},
		{`group "full": layout[0] and layout[1] lie between each other with stride_bytes 32 and 40; give equal strides, or places that do not mix`, region(nil, kv[0], &enginepb.Stride{OffsetBytes: 127, StrideBytes: 40, LengthBytes: 32})},
		{`group "full": layout[0] has offset_bytes 0 and stride_bytes 1125899906842624, which leads beyond 1125899906842624 bytes`, region(nil, &enginepb.Stride{StrideBytes: 1 << 50, LengthBytes: 64})},
		{`group "full": memory[0] has a handle of 63 bytes; a CUDA IPC handle has 64`, region([]*enginepb.Memory{{Kind: enginepb.MemoryKind_MEMORY_CUDA_IPC, Handle: raw[1:], LengthBytes: 256}})},
		{`group "full": memory[0] is of kind MEMORY_UNSPECIFIED; it must be MEMORY_FILE or MEMORY_CUDA_IPC`, region([]*enginepb.Memory{{LengthBytes: 256}})},
		{`group "full": memory[0] is a file without a path`, region([]*enginepb.Memory{{Kind: enginepb.MemoryKind_MEMORY_FILE, LengthBytes: 256}})},
		{`group "full": memory[0] is 0 bytes at offset 0; it must have 1 to 1125899906842624 bytes`, region([]*enginepb.Memory{ipc(0)})},
		{`group "full": memory[1] is MEMORY_FILE, but other memory of this engine is MEMORY_CUDA_IPC; all must be of one kind`, region([]*enginepb.Memory{ipc(256), file})},
		{`group "full": memory[0] and memory[1] are the same; name it once`, region([]*enginepb.Memory{ipc(256), ipc(256)})},
		{`group "full" has memory of the engine's and group "sliding" has none; give memory for every region, or for none`, &enginepb.AttachRequest{Regions: []*enginepb.Region{
			{Group: "full", Blocks: 4, Memory: []*enginepb.Memory{ipc(256)}}, {Group: "sliding", Blocks: 4}}}},
		{`events[1] has 63 bytes; a CUDA IPC handle has 64`, &enginepb.AttachRequest{Events: [][]byte{raw, raw[1:]}}},
		{`events has 257 handles; at most 256: an event may be recorded again and again`, &enginepb.AttachRequest{Events: make([][]byte, 257)}},
		{`accepts[0] is MEMORY_UNSPECIFIED; it must be MEMORY_FILE or MEMORY_CUDA_IPC`, &enginepb.AttachRequest{Accepts: make([]enginepb.MemoryKind, 1)}},
		{`device_uuid has 257 bytes; at most 256`, &enginepb.AttachRequest{DeviceUuid: string(make([]byte, 257))}},
		{`group "full": 1025 memories; at most 1024, since a block has no more fragments: name only what the layout uses`, region(slices.Repeat([]*enginepb.Memory{ipc(256)}, 1025))},
		{`group "full": layout has 1025 fragments a block; at most 1024`, region(nil, make(strides, 1025)...)},
	} {
		require.ErrorContains(t, l.checkAttach(c.r), c.want)
	}
	l.Groups = []GroupLimits{{Name: "full", BlockTokens: 16, BlockBytes: 64, ChunkBlocks: 1 << 20}}
	require.ErrorContains(t, l.checkAttach(region(nil, kv...)), `group "full": layout has 2 fragments a block and a chunk has 1048576 blocks, which is 2097152 fragments; one copy has at most 1048576`)
}
