package abi

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// set is the model of a Bitmap: one bool a bit.
type set []bool

func (s set) bitmap() Bitmap {
	b := NewBitmap(len(s))
	for i, v := range s {
		if v {
			b[i/64] |= 1 << (i % 64)
		}
	}
	return b
}

// same requires that b holds the bits of s, and nothing in the last word beyond them.
func (s set) same(t require.TestingT, b Bitmap) {
	require.Equal(t, s.bitmap(), b)
}

// drawSet draws n bits in runs, so that full and empty words occur.
func drawSet(t *rapid.T, n int, label string) set {
	s := make(set, n)
	for i := 0; i < n; {
		run := rapid.IntRange(1, 140).Draw(t, label+" run")
		v := rapid.Bool().Draw(t, label+" bit")
		for ; run > 0 && i < n; run-- {
			s[i] = v
			i++
		}
	}
	return s
}

func drawRange(t *rapid.T, n int) (lo, hi int) {
	return rapid.IntRange(0, n).Draw(t, "lo"), rapid.IntRange(0, n).Draw(t, "hi")
}

func TestBitmapWordsAgainstBits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 400).Draw(t, "n")
		s := drawSet(t, n, "set")
		b := s.bitmap()
		lo, hi := drawRange(t, n)

		count := 0
		for i := lo; i < hi; i++ {
			if s[i] {
				count++
			}
		}
		require.Equal(t, count, b.CountRange(lo, hi))
		total := 0
		for i, v := range s {
			require.Equal(t, v, b.Get(i))
			if v {
				total++
			}
		}
		require.Equal(t, total, b.Count())
		require.Equal(t, total == 0, b.Empty())

		next, unset := -1, n
		for i := n - 1; i >= lo; i-- {
			if s[i] {
				next = i
			} else {
				unset = i
			}
		}
		require.Equal(t, next, b.Next(lo))
		require.Equal(t, b.Next(0), b.Next(-rapid.IntRange(1, 70).Draw(t, "negative")))
		if lo <= n {
			require.Equal(t, unset, b.NextUnset(lo, n))
		}

		value := rapid.Bool().Draw(t, "value")
		for i := lo; i < hi; i++ {
			s[i] = value
		}
		if value {
			b.SetRange(lo, hi)
		} else {
			b.UnsetRange(lo, hi)
		}
		s.same(t, b)
		if n > 0 {
			i := rapid.IntRange(0, n-1).Draw(t, "i")
			b.Set(i)
			s[i] = true
			s.same(t, b)
			b.Unset(i)
			s[i] = false
			s.same(t, b)
		}
		b.Zero()
		require.True(t, b.Empty())
	})
}

// TestSetTails: one tail after the other, bit by bit.
func TestSetTails(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 300).Draw(t, "n")
		s := drawSet(t, n, "set")
		b := s.bitmap()
		first := rapid.IntRange(-300, n+100).Draw(t, "first")
		last := rapid.IntRange(-300, n+300).Draw(t, "last")
		step := rapid.IntRange(1, 150).Draw(t, "step")
		size := rapid.IntRange(0, 200).Draw(t, "size")
		for c := first; c <= last; c += step {
			for i := c - size; i < c; i++ {
				if i >= 0 && i < n {
					s[i] = true
				}
			}
		}
		b.SetTails(first, last, step, size, n)
		s.same(t, b)
	})
	b := NewBitmap(64) // it visits no more points than bits, so this ends
	b.SetTails(-1<<40, 1<<40, 1, 0, 64)
	require.True(t, b.Empty())
	b.SetTails(-1<<40, 1<<40, 1, 1<<30, 64)
	require.Equal(t, 64, b.Count())
}

func TestBitmapAlgebraAgainstBits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 300).Draw(t, "n")
		a := drawSet(t, n, "a")
		o := drawSet(t, rapid.IntRange(0, n).Draw(t, "shorter"), "o")
		at := func(i int) bool { return i < len(o) && o[i] }
		for name, op := range map[string]struct {
			do   func(b, o Bitmap)
			want func(i int) bool
		}{
			"or":      {Bitmap.Or, func(i int) bool { return a[i] || at(i) }},
			"and":     {Bitmap.And, func(i int) bool { return a[i] && at(i) }},
			"and not": {Bitmap.AndNot, func(i int) bool { return a[i] && !at(i) }},
		} {
			b := a.bitmap()
			op.do(b, o.bitmap())
			want := make(set, n)
			for i := range want {
				want[i] = op.want(i)
			}
			require.Equal(t, want.bitmap(), b, name)
		}
		// The shorter operand may be on either side when the longer one is removed.
		b := o.bitmap()
		b.AndNot(a.bitmap())
		b.And(a.bitmap())
		require.True(t, b.Empty())

		longer := append(a.bitmap(), 0, 0)
		require.True(t, longer.Equal(a.bitmap()))
		require.True(t, a.bitmap().Equal(longer))
		longer[len(longer)-1] = 1
		require.False(t, longer.Equal(a.bitmap()))
		require.False(t, a.bitmap().Equal(longer))
	})
}

func TestBitmapWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 300).Draw(t, "n")
		s := drawSet(t, n, "set")
		wire := s.bitmap().AppendWire(nil, n)
		require.Len(t, wire, (n+7)/8)
		for i, v := range s {
			require.Equal(t, v, wire[i/8]>>(i%8)&1 == 1)
		}
		got := NewBitmap(n + 64)
		got.SetRange(0, n+64) // what was there does not matter
		require.True(t, got.DecodeWire(wire, n))
		require.True(t, got.Equal(s.bitmap()))

		require.False(t, got.DecodeWire(append(wire, 0), n), "too long")
		if n > 0 {
			require.False(t, got.DecodeWire(wire[:len(wire)-1], n), "too short")
			require.False(t, Bitmap{}.DecodeWire(wire, n), "no room")
		}
		if n%8 != 0 {
			wire[len(wire)-1] |= 1 << rapid.IntRange(n%8, 7).Draw(t, "padding")
			require.False(t, got.DecodeWire(wire, n), "padding")
		}
	})
}

func FuzzBitmapDecodeWire(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add([]byte{0xff}, 8)
	f.Add([]byte{0x1f}, 5)
	f.Add([]byte{0x20}, 5)
	f.Add(make([]byte, 17), 130)
	f.Fuzz(func(t *testing.T, in []byte, n int) {
		if n < 0 || n > MaxChunks {
			return
		}
		b := NewBitmap(n)
		if b.DecodeWire(in, n) {
			require.Equal(t, append([]byte{}, in...), b.AppendWire([]byte{}, n))
			require.Equal(t, -1, b.Next(n))
		}
	})
}
