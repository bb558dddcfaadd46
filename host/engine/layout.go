package engine

import (
	"cmp"
	"slices"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// checkMemory holds the layouts, the memory and the events of an Attach against the
// deployment.
func (l *Limits) checkMemory(r *enginepb.AttachRequest) error {
	for i, k := range r.Accepts {
		if k != enginepb.MemoryKind_MEMORY_FILE && k != enginepb.MemoryKind_MEMORY_CUDA_IPC {
			return invalid("accepts[%d] is %v; it must be MEMORY_FILE or MEMORY_CUDA_IPC", i, k)
		}
	}
	if len(r.DeviceUuid) > IDBytesMax {
		return invalid("device_uuid has %d bytes; at most %d", len(r.DeviceUuid), IDBytesMax)
	}
	if len(r.Events) > EventsMax {
		return invalid("events has %d handles; at most %d: an event may be recorded again and again", len(r.Events), EventsMax)
	}
	for i, h := range r.Events {
		if len(h) != HandleBytes {
			return invalid("events[%d] has %d bytes; a CUDA IPC handle has %d", i, len(h), HandleBytes)
		}
	}
	kind := enginepb.MemoryKind_MEMORY_UNSPECIFIED
	owned, daemons := "", ""
	for _, reg := range r.Regions {
		g, err := l.group(reg.Group)
		if err != nil {
			return err
		}
		if n := len(reg.Memory); n > StridesMax {
			return invalid("group %q: %d memories; at most %d, since a block has no more fragments: name only what the layout uses", reg.Group, n, StridesMax)
		}
		first := make(map[MemoryName]int, len(reg.Memory))
		for i, m := range reg.Memory {
			if err := checkOwned(reg.Group, i, m); err != nil {
				return err
			}
			if kind != enginepb.MemoryKind_MEMORY_UNSPECIFIED && m.Kind != kind {
				return invalid("group %q: memory[%d] is %v, but other memory of this engine is %v; all must be of one kind", reg.Group, i, m.Kind, kind)
			}
			kind = m.Kind
			if j, ok := first[NameOf(m)]; ok {
				return invalid("group %q: memory[%d] and memory[%d] are the same; name it once", reg.Group, j, i)
			}
			first[NameOf(m)] = i
		}
		if len(reg.Memory) > 0 {
			owned = reg.Group
		} else {
			daemons = reg.Group
		}
		if err := g.checkLayout(reg); err != nil {
			return err
		}
	}
	if owned != "" && daemons != "" {
		return invalid("group %q has memory of the engine's and group %q has none; give memory for every region, or for none", owned, daemons)
	}
	return nil
}

// checkOwned looks at one memory of the engine's.
func checkOwned(group string, i int, m *enginepb.Memory) error {
	switch {
	case m.Kind == enginepb.MemoryKind_MEMORY_FILE && m.Path == "":
		return invalid("group %q: memory[%d] is a file without a path", group, i)
	case m.Kind == enginepb.MemoryKind_MEMORY_CUDA_IPC && len(m.Handle) != HandleBytes:
		return invalid("group %q: memory[%d] has a handle of %d bytes; a CUDA IPC handle has %d", group, i, len(m.Handle), HandleBytes)
	case m.Kind != enginepb.MemoryKind_MEMORY_FILE && m.Kind != enginepb.MemoryKind_MEMORY_CUDA_IPC:
		return invalid("group %q: memory[%d] is of kind %v; it must be MEMORY_FILE or MEMORY_CUDA_IPC", group, i, m.Kind)
	case m.LengthBytes == 0 || m.LengthBytes > memoryBytesMax || m.OffsetBytes > memoryBytesMax:
		return invalid("group %q: memory[%d] is %d bytes at offset %d; it must have 1 to %d bytes", group, i, m.LengthBytes, m.OffsetBytes, uint64(memoryBytesMax))
	}
	return nil
}

// checkLayout holds a region's layout against its group's geometry and its memory.
func (g *GroupLimits) checkLayout(reg *enginepb.Region) error {
	layout := LayoutOf(reg, g.BlockBytes)
	name, n := reg.Group, uint64(len(layout))
	switch {
	case n > StridesMax:
		return invalid("group %q: layout has %d fragments a block; at most %d", name, n, StridesMax)
	case n*g.ChunkBlocks > gpu.FragmentsMax:
		return invalid("group %q: layout has %d fragments a block and a chunk has %d blocks, which is %d fragments; one copy has at most %d: use larger fragments or fewer chunk_blocks", name, n, g.ChunkBlocks, n*g.ChunkBlocks, gpu.FragmentsMax)
	}
	memories, sum := uint64(max(1, len(reg.Memory))), uint64(0)
	for i, s := range layout {
		switch {
		case uint64(s.Memory) >= memories:
			return invalid("group %q: layout[%d] is in memory %d, but the region has memories 0 to %d", name, i, s.Memory, memories-1)
		case s.LengthBytes == 0:
			return invalid("group %q: layout[%d] has length_bytes 0; leave it out", name, i)
		case s.LengthBytes > g.BlockBytes-sum:
			return invalid("group %q: the first %d fragments of the layout have more than the %d bytes of a block (sum %d, then %d)", name, i+1, g.BlockBytes, sum, s.LengthBytes)
		case s.OffsetBytes > memoryBytesMax || s.StrideBytes > memoryBytesMax/uint64(reg.Blocks):
			return invalid("group %q: layout[%d] has offset_bytes %d and stride_bytes %d, which leads beyond %d bytes", name, i, s.OffsetBytes, s.StrideBytes, uint64(memoryBytesMax))
		}
		sum += s.LengthBytes
		if len(reg.Memory) == 0 {
			continue
		}
		if end, have := StrideEnd(s, reg.Blocks), reg.Memory[s.Memory].LengthBytes; end > have {
			return invalid("group %q: layout[%d] ends at byte %d with %d blocks, but memory[%d] has %d bytes", name, i, end, reg.Blocks, s.Memory, have)
		}
	}
	if sum != g.BlockBytes {
		return invalid("group %q: the fragments of the layout have %d bytes together, but a block has %d (layers x 2 x block_tokens x kv_heads x head_dim x bytes of the dtype); list every layer's K and V", name, sum, g.BlockBytes)
	}
	return checkApart(name, layout, reg.Blocks)
}

// LayoutOf is a region's layout, or that of one fragment a block when it names none.
func LayoutOf(reg *enginepb.Region, blockBytes uint64) []*enginepb.Stride {
	if len(reg.Layout) > 0 {
		return reg.Layout
	}
	return []*enginepb.Stride{{StrideBytes: blockBytes, LengthBytes: blockBytes}}
}

// StrideEnd is where the fragment of the last block ends.
func StrideEnd(s *enginepb.Stride, blocks uint32) uint64 {
	return s.OffsetBytes + uint64(blocks-1)*s.StrideBytes + s.LengthBytes
}

// checkApart refuses a layout in which two fragments share a byte.
func checkApart(group string, layout []*enginepb.Stride, blocks uint32) error {
	order := make([]int, len(layout))
	for i := range order {
		order[i] = i
		if s := layout[i]; blocks > 1 && s.StrideBytes < s.LengthBytes {
			return invalid("group %q: layout[%d] has stride_bytes %d, below its length_bytes, %d; blocks would overlap", group, i, s.StrideBytes, s.LengthBytes)
		}
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := layout[i], layout[j]
		return cmp.Or(cmp.Compare(a.Memory, b.Memory), cmp.Compare(a.OffsetBytes, b.OffsetBytes))
	})
	for k, i := range order {
		a := layout[i]
		end := StrideEnd(a, blocks)
		for _, j := range order[k+1:] {
			b := layout[j]
			if b.Memory != a.Memory || b.OffsetBytes >= end {
				break
			}
			if blocks > 1 && a.StrideBytes != b.StrideBytes {
				return invalid("group %q: layout[%d] and layout[%d] lie between each other with stride_bytes %d and %d; give equal strides, or places that do not mix", group, min(i, j), max(i, j), a.StrideBytes, b.StrideBytes)
			}
			if meet(a, b, uint64(blocks)) {
				return invalid("group %q: layout[%d] (offset_bytes %d, length_bytes %d) and layout[%d] (offset_bytes %d, length_bytes %d) overlap in some block (stride_bytes %d)",
					group, i, a.OffsetBytes, a.LengthBytes, j, b.OffsetBytes, b.LengthBytes, a.StrideBytes)
			}
		}
	}
	return nil
}

// meet reports whether two fragments of one stride share a byte in any two blocks. a
// begins first.
func meet(a, b *enginepb.Stride, blocks uint64) bool {
	// Only the last block of a that begins at or in front of b, and the one behind it,
	// can: blocks of a are apart, and so are those of b.
	d := b.OffsetBytes - a.OffsetBytes
	if blocks == 1 {
		return d < a.LengthBytes
	}
	k, rest := d/a.StrideBytes, d%a.StrideBytes
	return k < blocks && rest < a.LengthBytes || k+1 < blocks && a.StrideBytes-rest < b.LengthBytes
}

// A MemoryName is what tells memories of an engine apart.
type MemoryName struct {
	kind           enginepb.MemoryKind
	path, handle   string
	offset, length uint64
}

// NameOf returns the name of a memory. Of the path and the handle only the one that its
// kind uses counts.
func NameOf(m *enginepb.Memory) MemoryName {
	n := MemoryName{kind: m.Kind, offset: m.OffsetBytes, length: m.LengthBytes}
	if m.Kind == enginepb.MemoryKind_MEMORY_CUDA_IPC {
		n.handle = string(m.Handle)
	} else {
		n.path = m.Path
	}
	return n
}

// Memories returns the different memories that the regions name, each once.
func Memories(regions []*enginepb.Region) (all []*enginepb.Memory) {
	seen := map[MemoryName]bool{}
	for _, reg := range regions {
		for _, m := range reg.Memory {
			if n := NameOf(m); !seen[n] {
				seen[n] = true
				all = append(all, m)
			}
		}
	}
	return all
}
