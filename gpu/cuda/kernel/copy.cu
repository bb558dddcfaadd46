// The two kernels of package cuda: gather copies pieces of a region into a staging
// buffer, scatter copies them back. copy.ptx beside this file is made from it by
// `go generate ./gpu/cuda` (clang with the target nvptx64; no CUDA toolkit), and is what
// the driver compiles for the device that it finds.
//
// A warp takes one piece at a time: at most 4 KiB, so that a list of pieces spreads evenly
// over the warps whatever the fragments were. Eight loads of 16 bytes are in flight in each
// lane before the first store. The list lies in pinned host memory and is read over PCIe,
// 16 bytes a piece: an upload would queue behind the DMA of the other direction. The next
// entry is asked for before the current piece is copied.

#define KERNEL extern "C" __attribute__((global))

struct Piece {
	unsigned long long device; // address in the region
	unsigned staged;           // offset in the staging buffer
	unsigned bytes;
};

typedef unsigned Quad __attribute__((ext_vector_type(4)));
#define GLOBAL_MEMORY __attribute__((address_space(1)))

// One warp copies n units.
template <typename Unit>
static inline __attribute__((device)) void units(char *to, const char *from, unsigned n, unsigned lane) {
	GLOBAL_MEMORY Unit *d = (GLOBAL_MEMORY Unit *)to;
	const GLOBAL_MEMORY Unit *s = (const GLOBAL_MEMORY Unit *)from;
	unsigned i = lane;
	for (; i + 7 * 32 < n; i += 8 * 32) {
		Unit v[8];
#pragma unroll
		for (int k = 0; k < 8; k++)
			v[k] = s[i + k * 32];
#pragma unroll
		for (int k = 0; k < 8; k++)
			d[i + k * 32] = v[k];
	}
	for (; i < n; i += 32)
		d[i] = s[i];
}

// The widest unit that divides both addresses and the length: 16, 4 or 1 bytes.
static inline __attribute__((device)) void copy(char *to, const char *from, unsigned bytes, unsigned lane) {
	unsigned long long odd = (unsigned long long)to | (unsigned long long)from | bytes;
	if (!(odd & 15))
		units<Quad>(to, from, bytes / 16, lane);
	else if (!(odd & 3))
		units<unsigned>(to, from, bytes / 4, lane);
	else
		units<char>(to, from, bytes, lane);
}

template <bool Gather>
static inline __attribute__((device)) void move(const Piece *list, unsigned n, char *staging) {
	unsigned thread = __nvvm_read_ptx_sreg_tid_x(), lane = thread & 31;
	unsigned perBlock = __nvvm_read_ptx_sreg_ntid_x() >> 5;
	unsigned warps = __nvvm_read_ptx_sreg_nctaid_x() * perBlock;
	unsigned i = __nvvm_read_ptx_sreg_ctaid_x() * perBlock + (thread >> 5);
	Quad next = {};
	if (i < n)
		next = *(const Quad *)(list + i);
	for (; i < n; i += warps) {
		Quad now = next;
		if (i + warps < n)
			next = *(const Quad *)(list + i + warps);
		char *device = (char *)((unsigned long long)now.y << 32 | now.x);
		if (Gather)
			copy(staging + now.z, device, now.w, lane);
		else
			copy(device, staging + now.z, now.w, lane);
	}
}

KERNEL void tierd_gather(const Piece *list, unsigned n, char *staging) { move<true>(list, n, staging); }

KERNEL void tierd_scatter(const Piece *list, unsigned n, char *staging) { move<false>(list, n, staging); }
