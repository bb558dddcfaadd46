package abi

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawTable draws a table as a model of one State an entry, in runs.
func drawTable(t *rapid.T, n int) []State {
	s := make([]State, n)
	for i := 0; i < n; {
		run := rapid.IntRange(1, 70).Draw(t, "run")
		v := State(rapid.IntRange(0, 3).Draw(t, "state"))
		for ; run > 0 && i < n; run-- {
			s[i] = v
			i++
		}
	}
	return s
}

func table(s []State) States {
	t := make(States, (len(s)+31)/32)
	for i, v := range s {
		t[i/32] |= uint64(v) << (i % 32 * 2)
	}
	return t
}

func TestStatesWordsAgainstEntries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 600).Draw(t, "n")
		s := drawTable(t, n)
		w := table(s)
		lo, hi := drawRange(t, n)
		c := Class(rapid.IntRange(0, 15).Draw(t, "class"))
		in := func(i int) bool { return c>>s[i]&1 == 1 }

		first, last := hi, lo-1
		for i := hi - 1; i >= lo; i-- {
			if in(i) {
				first = i
				last = max(last, i)
			}
		}
		if lo <= hi {
			require.Equal(t, first, w.First(c, lo, hi))
			require.Equal(t, last, w.Last(c, lo, hi))
		} else { // an empty range holds nothing
			require.Equal(t, hi, w.First(c, lo, hi))
			require.Equal(t, lo-1, w.Last(c, lo, hi))
		}

		marked := make(set, n)
		for i := lo; i < hi; i++ {
			marked[i] = in(i)
		}
		out := NewBitmap(n)
		w.Mark(c, lo, hi, out)
		marked.same(t, out)

		letters := ""
		for i, v := range s {
			require.Equal(t, v, w.At(i))
			letters += v.String()
		}
		require.Equal(t, letters, w.Format(n))
		parsed, err := ParseStates(letters)
		require.NoError(t, err)
		require.Equal(t, w, parsed)

		v := State(rapid.IntRange(0, 3).Draw(t, "fill"))
		for i := lo; i < hi; i++ {
			s[i] = v
		}
		w.Fill(lo, hi, v)
		require.Equal(t, table(s), w)
		if n > 0 {
			i := rapid.IntRange(0, n-1).Draw(t, "i")
			s[i] = State(rapid.IntRange(0, 3).Draw(t, "put"))
			w.Put(i, s[i])
			require.Equal(t, table(s), w)
		}
	})
}

func TestStatesWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 200).Draw(t, "n")
		s := drawTable(t, n)
		dirty := table(s)
		if n%32 != 0 {
			dirty[len(dirty)-1] |= ^uint64(0) << (n % 32 * 2) // beyond n: not sent
		}
		wire := dirty.AppendWire(nil, n)
		require.Len(t, wire, (n+31)/32*8)
		for i, v := range s {
			require.Equal(t, v, State(wire[i/4]>>(i%4*2)&3))
		}
		got := NewStates(n)
		require.True(t, got.DecodeWire(wire, n))
		require.Equal(t, table(s), got)
		require.False(t, got.DecodeWire(append(wire, 0), n))
		if n > 0 {
			require.False(t, got.DecodeWire(wire[1:], n))
			require.False(t, States{}.DecodeWire(wire, n))
		}
	})
}

func TestStateLetters(t *testing.T) {
	require.Equal(t, "MHPR", Miss.String()+Hit.String()+Pending.String()+Retry.String())
	require.Equal(t, "State(7)", State(7).String())
	_, err := ParseStates("HHx")
	require.EqualError(t, err, `lookup states "HHx": byte 2 is 'x'; only M, H, P and R are states`)
}

func FuzzParseStates(f *testing.F) {
	f.Add("")
	f.Add("HHPMR")
	f.Add("h")
	f.Add("MHPRMHPRMHPRMHPRMHPRMHPRMHPRMHPRMHPR")
	f.Fuzz(func(t *testing.T, letters string) {
		if s, err := ParseStates(letters); err == nil {
			require.Equal(t, letters, s.Format(len(letters)))
		}
	})
}

func FuzzStatesDecodeWire(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add([]byte{0xe4, 0, 0, 0, 0, 0, 0, 0}, 4)
	f.Add(make([]byte, 16), 33)
	f.Fuzz(func(t *testing.T, in []byte, n int) {
		if n < 0 || n > MaxChunks {
			return
		}
		s := NewStates(n)
		if s.DecodeWire(in, n) {
			again := NewStates(n)
			require.True(t, again.DecodeWire(s.AppendWire(nil, n), n))
			require.Equal(t, s.Format(n), again.Format(n))
		}
	})
}
