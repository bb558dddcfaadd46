package abi

import "math/bits"

// A Bitmap is a set of chunk offsets, 64 a word, least significant bit first. Bit k
// stands for chunk Lo+k of the Round it answers. Its methods work a word at a time,
// so a rule that names ranges is fast without being clever.
//
// Bits at and beyond the length that the caller has in mind are 0; the host checks
// this at the boundary.
type Bitmap []uint64

// BitmapWords returns how many words hold n bits.
func BitmapWords(n int) int { return (n + 63) / 64 }

// NewBitmap returns an empty set with room for n bits.
func NewBitmap(n int) Bitmap { return make(Bitmap, BitmapWords(n)) }

// Get reports whether bit i is set.
func (b Bitmap) Get(i int) bool { return b[i>>6]>>(uint(i)&63)&1 != 0 }

// Set sets bit i.
func (b Bitmap) Set(i int) { b[i>>6] |= 1 << (uint(i) & 63) }

// Unset clears bit i.
func (b Bitmap) Unset(i int) { b[i>>6] &^= 1 << (uint(i) & 63) }

// SetRange sets the bits lo <= i < hi; it does nothing when hi <= lo.
func (b Bitmap) SetRange(lo, hi int) {
	for lo < hi {
		m, end := wordMask(lo, hi)
		b[lo>>6] |= m
		lo = end
	}
}

// UnsetRange clears the bits lo <= i < hi; it does nothing when hi <= lo.
func (b Bitmap) UnsetRange(lo, hi int) {
	for lo < hi {
		m, end := wordMask(lo, hi)
		b[lo>>6] &^= m
		lo = end
	}
}

// SetTails sets the size bits before each of first, first+step and so on, up to last: those
// of them that lie in [0, n). Step must be positive; first may be far below 0 and last far
// above n, since only the points whose tails reach into the n bits are visited.
func (b Bitmap) SetTails(first, last, step, size, n int) {
	if first <= 0 {
		first += (step - first) / step * step
	}
	last = min(last, n+size-1)
	switch {
	case first > last:
		return
	case size >= step: // they touch
		b.SetRange(max(first-size, 0), min(first+(last-first)/step*step, n))
		return
	}
	for c := first; c <= last; c += step {
		lo, hi := max(c-size, 0), min(c, n)
		if lo>>6 == (hi-1)>>6 && lo < hi { // twice as fast in WebAssembly as a loop
			b[lo>>6] |= ^uint64(0) << (uint(lo) & 63) & (^uint64(0) >> (uint(-hi) & 63))
		} else {
			b.SetRange(lo, hi)
		}
	}
}

// CountRange returns how many of the bits lo <= i < hi are set.
func (b Bitmap) CountRange(lo, hi int) (n int) {
	for lo < hi {
		m, end := wordMask(lo, hi)
		n += bits.OnesCount64(b[lo>>6] & m)
		lo = end
	}
	return n
}

// wordMask returns the mask of [lo, hi) inside lo's word, and the first bit after
// that word. lo < hi.
func wordMask(lo, hi int) (m uint64, end int) {
	m = ^uint64(0) << (uint(lo) & 63)
	end = lo&^63 + 64
	if end > hi {
		m &= ^uint64(0) >> uint(end-hi)
	}
	return m, end
}

// Zero clears every word.
func (b Bitmap) Zero() { clear(b) }

// Count returns how many bits are set.
func (b Bitmap) Count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

// Empty reports whether no bit is set.
func (b Bitmap) Empty() bool {
	for _, w := range b {
		if w != 0 {
			return false
		}
	}
	return true
}

// Next returns the first set bit at or after i, or -1.
func (b Bitmap) Next(i int) int {
	if i < 0 {
		i = 0
	}
	for w := i >> 6; w < len(b); w++ {
		v := b[w]
		if w == i>>6 {
			v &= ^uint64(0) << (uint(i) & 63)
		}
		if v != 0 {
			return w<<6 + bits.TrailingZeros64(v)
		}
	}
	return -1
}

// NextUnset returns the first unset bit at or after i and before n, or n.
func (b Bitmap) NextUnset(i, n int) int {
	for i < n {
		v := ^b[i>>6] >> (uint(i) & 63)
		if v != 0 {
			return min(i+bits.TrailingZeros64(v), n)
		}
		i = i&^63 + 64
	}
	return n
}

// Or adds the bits of o, which must not be longer than b.
func (b Bitmap) Or(o Bitmap) {
	for i, w := range o {
		b[i] |= w
	}
}

// And keeps the bits that o has too. Words beyond o are cleared.
func (b Bitmap) And(o Bitmap) {
	for i := range b {
		if i < len(o) {
			b[i] &= o[i]
		} else {
			b[i] = 0
		}
	}
}

// AndNot removes the bits of o.
func (b Bitmap) AndNot(o Bitmap) {
	for i := range b {
		if i < len(o) {
			b[i] &^= o[i]
		}
	}
}

// Equal reports whether b and o hold the same bits; trailing empty words do not count.
func (b Bitmap) Equal(o Bitmap) bool {
	if len(o) > len(b) {
		b, o = o, b
	}
	for i, w := range b {
		if i < len(o) && w != o[i] || i >= len(o) && w != 0 {
			return false
		}
	}
	return true
}

// AppendWire appends exactly ceil(n/8) bytes, least significant bit first.
func (b Bitmap) AppendWire(out []byte, n int) []byte {
	for i := 0; i < (n+7)/8; i++ {
		out = append(out, byte(b[i>>3]>>(uint(i)&7*8)))
	}
	return out
}

// DecodeWire fills b from exactly ceil(n/8) bytes. It reports false when the length
// is wrong, b is too short, or a padding bit is set.
func (b Bitmap) DecodeWire(in []byte, n int) bool {
	if len(in) != (n+7)/8 || len(b) < BitmapWords(n) {
		return false
	}
	if n&7 != 0 && in[len(in)-1]>>(uint(n)&7) != 0 {
		return false
	}
	b.Zero()
	for i, v := range in {
		b[i>>3] |= uint64(v) << (uint(i) & 7 * 8)
	}
	return true
}
