package replay

import (
	"encoding/binary"
	"math/bits"
)

// The bytes of a token's row, that is, what one layer keeps as K or as V for one
// token, are a stream of words that follow from a 64-bit seed. Word i is the folded
// product of a counter: one multiplication for 8 bytes, several GB/s a core, and any
// difference of seed or place shows in half of the bits.

const (
	step1       = 0xa0761d6478bd642f // odd: the counter visits every word
	step2       = 2 * step1 & (1<<64 - 1)
	step3       = 3 * step1 & (1<<64 - 1)
	step4       = 4 * step1 & (1<<64 - 1)
	patternMask = 0xe7037ed1a0b428db
)

func fold(c uint64) uint64 {
	hi, lo := bits.Mul64(c, c^patternMask)
	return hi ^ lo
}

// rowSeed is the seed of one row. h is the hash of the prefix up to the end of its
// block, row counts through layers, K and V, and tokens of the block.
func rowSeed(h *hash, group int, row uint64) uint64 {
	le := binary.LittleEndian
	s := fold(le.Uint64(h[0:]) ^ step1*(uint64(group)+1))
	s = fold(s ^ le.Uint64(h[8:]))
	return fold(s+fold(le.Uint64(h[16:])^row)) ^ le.Uint64(h[24:])
}

// fillRow writes the stream of a seed over dst.
func fillRow(dst []byte, seed uint64) {
	le := binary.LittleEndian
	c := seed
	for len(dst) >= 32 {
		d := dst[:32:32]
		le.PutUint64(d[0:], fold(c))
		le.PutUint64(d[8:], fold(c+step1))
		le.PutUint64(d[16:], fold(c+step2))
		le.PutUint64(d[24:], fold(c+step3))
		c += step4
		dst = dst[32:]
	}
	for len(dst) > 0 {
		var w [8]byte
		le.PutUint64(w[:], fold(c))
		dst = dst[copy(dst, w[:]):]
		c += step1
	}
}

// wrongInRow returns how many bytes of got differ from the stream of a seed.
func wrongInRow(got []byte, seed uint64) (wrong int) {
	le := binary.LittleEndian
	c := seed
	for len(got) >= 32 {
		g := got[:32:32]
		x0 := le.Uint64(g[0:]) ^ fold(c)
		x1 := le.Uint64(g[8:]) ^ fold(c+step1)
		x2 := le.Uint64(g[16:]) ^ fold(c+step2)
		x3 := le.Uint64(g[24:]) ^ fold(c+step3)
		if x0|x1|x2|x3 != 0 {
			wrong += bytesSet(x0) + bytesSet(x1) + bytesSet(x2) + bytesSet(x3)
		}
		c += step4
		got = got[32:]
	}
	for len(got) > 0 {
		var w [8]byte
		le.PutUint64(w[:], fold(c))
		n := min(8, len(got))
		for i := range n {
			if got[i] != w[i] {
				wrong++
			}
		}
		got = got[n:]
		c += step1
	}
	return wrong
}

// bytesSet counts the bytes of x that are not 0.
func bytesSet(x uint64) (n int) {
	for ; x != 0; x >>= 8 {
		if x&0xff != 0 {
			n++
		}
	}
	return n
}

// spoilRow changes a row so that it is surely not what it should become: one word in
// every 64 bytes, a cache line, is turned round.
func spoilRow(dst []byte) {
	for i := 0; i < len(dst); i += 64 {
		dst[i] ^= 0xff
	}
}
