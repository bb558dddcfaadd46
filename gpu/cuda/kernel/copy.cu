// The two kernels of package cuda: gather copies pieces of a region into a staging
// buffer, scatter copies them back. copy.ptx beside this file is made from it by
// `go generate ./gpu/cuda` (clang with the target nvptx64; no CUDA toolkit), and is what
// the driver compiles for the device that it finds.
//
// A warp has an equal share of the list, and copies one piece after the other: at most 4 KiB
// each, so that the shares are equal in bytes too, whatever the fragments were. Eight loads
// of 16 bytes are in flight in each lane before the first store. The list lies in pinned
// host memory and is read over PCIe: an upload would queue behind the DMA of the other
// direction. Each lane reads the entry of one piece, so that a warp's share of the list is
// one long read and not 32 short ones, which cost a load 2 % of the link.

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
	unsigned warp = __nvvm_read_ptx_sreg_ctaid_x() * perBlock + (thread >> 5);
	unsigned share = (n + warps - 1) / warps;
	unsigned first = warp * share, end = first + share < n ? first + share : n;
	for (; first < end; first += 32) {
		Quad mine = {};
		if (first + lane < end)
			mine = *(const Quad *)(list + first + lane);
		unsigned have = end - first < 32 ? end - first : 32;
		for (unsigned k = 0; k < have; k++) {
			unsigned low = __nvvm_shfl_sync_idx_i32(-1, mine.x, k, 31);
			unsigned high = __nvvm_shfl_sync_idx_i32(-1, mine.y, k, 31);
			unsigned staged = __nvvm_shfl_sync_idx_i32(-1, mine.z, k, 31);
			unsigned bytes = __nvvm_shfl_sync_idx_i32(-1, mine.w, k, 31);
			char *device = (char *)((unsigned long long)high << 32 | low);
			if (Gather)
				copy(staging + staged, device, bytes, lane);
			else
				copy(device, staging + staged, bytes, lane);
		}
	}
}

KERNEL void tierd_gather(const Piece *list, unsigned n, char *staging) { move<true>(list, n, staging); }

KERNEL void tierd_scatter(const Piece *list, unsigned n, char *staging) { move<false>(list, n, staging); }
