package abi

import (
	"fmt"
	"math/bits"
)

// A State is what a lookup answers for one chunk. The four meanings are part of the
// versioned contract, because a change of meaning changes demand.
type State uint8

const (
	// Miss: not here.
	Miss State = 0
	// Hit: it can be fetched now.
	Hit State = 1
	// Pending: here, being written; wait for it.
	Pending State = 2
	// Retry: not known yet; ask again.
	Retry State = 3
)

// String returns the letter of the state: M, H, P or R.
func (s State) String() string {
	if s > Retry {
		return fmt.Sprintf("State(%d)", uint8(s))
	}
	return "MHPR"[s : s+1]
}

// States is a finished lookup table: 2 bits a chunk, 32 chunks a word, lowest chunk
// first. Entry k stands for chunk Lo+k of the Round. The words are the wire format.
type States []uint64

// StatesWords returns how many words hold n states.
func StatesWords(n int) int { return (n + 31) / 32 }

// NewStates returns a table of n states, all Miss.
func NewStates(n int) States { return make(States, StatesWords(n)) }

// ParseStates returns the table that letters such as "HHPM" draw, lowest chunk first.
func ParseStates(letters string) (States, error) {
	t := NewStates(len(letters))
	for i := 0; i < len(letters); i++ {
		s := State(0)
		for s <= Retry && "MHPR"[s] != letters[i] {
			s++
		}
		if s > Retry {
			return nil, fmt.Errorf("lookup states %q: byte %d is %q; only M, H, P and R are states", letters, i, letters[i])
		}
		t.Put(i, s)
	}
	return t, nil
}

const evenBits = 0x5555555555555555 // the low bit of each of 32 entries

// At returns entry i.
func (t States) At(i int) State { return State(t[i>>5] >> (uint(i) & 31 * 2) & 3) }

// Put sets entry i.
func (t States) Put(i int, s State) {
	sh := uint(i) & 31 * 2
	t[i>>5] = t[i>>5]&^(3<<sh) | uint64(s&3)<<sh
}

// Fill sets the entries lo <= i < hi.
func (t States) Fill(lo, hi int, s State) {
	v := evenBits * uint64(s&3)
	for lo < hi {
		m := ^uint64(0) << (uint(lo) & 31 * 2)
		end := lo&^31 + 32
		if end > hi {
			m &= ^uint64(0) >> (uint(end-hi) * 2)
		}
		t[lo>>5] = t[lo>>5]&^m | v&m
		lo = end
	}
}

// A Class is a set of states, for the searches below: 1<<Hit | 1<<Pending and so on.
type Class uint8

const (
	// Here holds the states of a chunk that is or will be readable: Hit and Pending.
	Here Class = 1<<Hit | 1<<Pending
	// NotHere holds Miss and Retry.
	NotHere Class = 1<<Miss | 1<<Retry
	// Unknown holds Retry alone.
	Unknown Class = 1 << Retry
	// Absent holds Miss alone.
	Absent Class = 1 << Miss
)

// match returns a word with the low bit of each entry of w that is in c.
func (c Class) match(w uint64) uint64 {
	lo, hi := w&evenBits, w>>1&evenBits
	var m uint64
	if c&(1<<Miss) != 0 {
		m |= ^(lo | hi)
	}
	if c&(1<<Hit) != 0 {
		m |= lo &^ hi
	}
	if c&(1<<Pending) != 0 {
		m |= hi &^ lo
	}
	if c&(1<<Retry) != 0 {
		m |= lo & hi
	}
	return m & evenBits
}

// First returns the lowest i in [lo, hi) whose state is in c, or hi.
func (t States) First(c Class, lo, hi int) int {
	for lo < hi {
		m := c.match(t[lo>>5]) >> (uint(lo) & 31 * 2)
		if m != 0 {
			return min(lo+bits.TrailingZeros64(m)/2, hi)
		}
		w, whole := t[lo>>5], lo&31 == 0
		lo = lo&^31 + 32
		for whole && lo < hi && t[lo>>5] == w { // tables are mostly long runs of one state
			lo += 32
		}
	}
	return hi
}

// Last returns the highest i in [lo, hi) whose state is in c, or lo-1.
func (t States) Last(c Class, lo, hi int) int {
	for lo < hi {
		i := hi - 1
		m := c.match(t[i>>5]) << (62 - uint(i)&31*2)
		if m != 0 {
			return max(i-bits.LeadingZeros64(m)/2, lo-1)
		}
		w, whole := t[i>>5], i&31 == 31
		hi = i &^ 31
		for whole && lo < hi && t[hi>>5-1] == w {
			hi -= 32
		}
	}
	return lo - 1
}

// Mark sets in out the bits of the entries lo <= i < hi whose state is in c.
func (t States) Mark(c Class, lo, hi int, out Bitmap) {
	for i := t.First(c, lo, hi); i < hi; i = t.First(c, i+1, hi) {
		out.Set(i)
	}
}

// Format returns the letters of the first n entries.
func (t States) Format(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = "MHPR"[t.At(i)]
	}
	return string(b)
}

// AppendWire appends the table of n entries, padded with zeros to 8 bytes.
func (t States) AppendWire(out []byte, n int) []byte {
	for i := 0; i < StatesWords(n); i++ {
		w := t[i]
		if tail := n - i*32; tail < 32 {
			w &= ^uint64(0) >> (uint(32-tail) * 2)
		}
		out = append(out, byte(w), byte(w>>8), byte(w>>16), byte(w>>24),
			byte(w>>32), byte(w>>40), byte(w>>48), byte(w>>56))
	}
	return out
}

// DecodeWire fills t from exactly the bytes that AppendWire writes for n entries. It
// reports false when the length is wrong or t is too short.
func (t States) DecodeWire(in []byte, n int) bool {
	if len(in) != 8*StatesWords(n) || len(t) < StatesWords(n) {
		return false
	}
	for i := 0; i < StatesWords(n); i++ {
		b := in[8*i : 8*i+8 : 8*i+8]
		t[i] = uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 |
			uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56
	}
	return true
}
