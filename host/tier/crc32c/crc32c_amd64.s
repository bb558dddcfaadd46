#include "textflag.h"

// Folding constants of the reflected polynomial 0x82f63b78 for a distance of D bits:
// x^(D+31) mod P for the low half of each 128 bits, x^(D-33) mod P for the high half.
// TestConstants computes them from the polynomial.

// D = 2048: one round of four 512-bit accumulators.
DATA fold2048<>+0(SB)/8, $0xdcb17aa4
DATA fold2048<>+8(SB)/8, $0xb9e02b86
GLOBL fold2048<>(SB), RODATA|NOPTR, $16

// D = 512: one accumulator into the next.
DATA fold512<>+0(SB)/8, $0x740eef02
DATA fold512<>+8(SB)/8, $0x9e4addf8
GLOBL fold512<>(SB), RODATA|NOPTR, $16

// D = 384, 256, 128: the lower three lanes of an accumulator into its last one. The
// last lane of the constants is zero: that lane stays as it is.
DATA foldLanes<>+0(SB)/8, $0x1c291d04
DATA foldLanes<>+8(SB)/8, $0xddc0152b
DATA foldLanes<>+16(SB)/8, $0x3da6d0cb
DATA foldLanes<>+24(SB)/8, $0xba4fc28e
DATA foldLanes<>+32(SB)/8, $0xf20c0dfe
DATA foldLanes<>+40(SB)/8, $0x493c7d27
DATA foldLanes<>+48(SB)/8, $0
DATA foldLanes<>+56(SB)/8, $0
GLOBL foldLanes<>(SB), RODATA|NOPTR, $64

// FOLD moves acc forward by the distance of the constants in k and adds next to it.
#define FOLD(k, acc, lo, next) \
	VPCLMULQDQ $0x00, k, acc, lo \
	VPCLMULQDQ $0x11, k, acc, acc \
	VPTERNLOGQ $0x96, next, lo, acc

// wide asks for what comes 4 KiB later: the processor's own prefetching ends with each
// page. It is an eighth faster then on bytes that are in no cache, and may ask for bytes
// behind b, which does nothing.
//
// func wide(crc uint32, b []byte) uint32
TEXT ·wide(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ b_base+8(FP), SI
	MOVQ b_len+16(FP), CX

	VMOVDQU64 0(SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VMOVD AX, X4
	VPXORQ Z4, Z0, Z0
	VBROADCASTI32X4 fold2048<>(SB), Z5
	ADDQ $256, SI
	SUBQ $256, CX
	JZ join

loop:
	PREFETCHT0 4096(SI)
	PREFETCHT0 4160(SI)
	PREFETCHT0 4224(SI)
	PREFETCHT0 4288(SI)
	FOLD(Z5, Z0, Z6, 0(SI))
	FOLD(Z5, Z1, Z7, 64(SI))
	FOLD(Z5, Z2, Z8, 128(SI))
	FOLD(Z5, Z3, Z9, 192(SI))
	ADDQ $256, SI
	SUBQ $256, CX
	JNZ loop

join:
	VBROADCASTI32X4 fold512<>(SB), Z5
	FOLD(Z5, Z0, Z6, Z1)
	FOLD(Z5, Z0, Z6, Z2)
	FOLD(Z5, Z0, Z6, Z3)

	VMOVDQU64 foldLanes<>(SB), Z5
	VPCLMULQDQ $0x00, Z5, Z0, Z6
	VPCLMULQDQ $0x11, Z5, Z0, Z7
	VPXORQ Z7, Z6, Z6
	VEXTRACTI32X4 $3, Z0, X0 // the last lane, unfolded
	VEXTRACTI32X4 $1, Z6, X1
	VEXTRACTI32X4 $2, Z6, X2
	VPXORQ X1, X0, X0
	VPXORQ X2, X6, X6
	VPXORQ X6, X0, X0

	VPEXTRQ $1, X0, BX
	VMOVQ X0, DX
	XORL AX, AX
	CRC32Q DX, AX
	CRC32Q BX, AX
	VZEROUPPER
	MOVL AX, ret+32(FP)
	RET
