package replay

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRowsFollowFromTheSeedAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 300).Draw(t, "bytes")
		seed := rapid.Uint64().Draw(t, "seed")
		a, b := make([]byte, n), make([]byte, n)
		for i := range b {
			b[i] = byte(i)
		}
		fillRow(a, seed)
		fillRow(b, seed)
		require.Equal(t, a, b, "what was there before must not matter")
		require.Zero(t, wrongInRow(a, seed))

		// A prefix of the row is the row of the shorter length.
		m := rapid.IntRange(1, n).Draw(t, "prefix")
		c := make([]byte, m)
		fillRow(c, seed)
		require.Equal(t, a[:m], c)
	})
}

func TestOneFlippedBitIsOneWrongByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		row := make([]byte, rapid.IntRange(1, 300).Draw(t, "bytes"))
		seed := rapid.Uint64().Draw(t, "seed")
		fillRow(row, seed)
		flips := rapid.SliceOfNDistinct(rapid.IntRange(0, len(row)-1), 0, min(len(row), 9), rapid.ID[int]).Draw(t, "at")
		for _, at := range flips {
			row[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		}
		require.Equal(t, len(flips), wrongInRow(row, seed))
	})
}

// Rows of different seeds share next to nothing: a wrong row is wrong almost
// everywhere, so that it cannot pass for a right one.
func TestDifferentPlacesHoldDifferentBytes(t *testing.T) {
	const rowBytes = 256
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) (h hash, group int, row uint64) {
			copy(h[:], rapid.SliceOfN(rapid.Byte(), len(h), len(h)).Draw(t, name+" hash"))
			return h, rapid.IntRange(0, 7).Draw(t, name+" group"), rapid.Uint64Range(0, 1<<20).Draw(t, name+" row")
		}
		h1, g1, r1 := draw("first")
		h2, g2, r2 := draw("second")
		switch rapid.IntRange(0, 3).Draw(t, "differ in") { // one coordinate alone must do
		case 0:
			g2, r2 = g1, r1
		case 1:
			h2, r2 = h1, r1
		case 2:
			h2, g2 = h1, g1
		case 3: // one bit of the hash
			h2, g2, r2 = h1, g1, r1
			h2[rapid.IntRange(0, len(h2)-1).Draw(t, "byte")] ^= 1
		}
		if h1 == h2 && g1 == g2 && r1 == r2 {
			t.Skip("the same place")
		}
		row := make([]byte, rowBytes)
		fillRow(row, rowSeed(&h1, g1, r1))
		wrong := wrongInRow(row, rowSeed(&h2, g2, r2))
		require.Greater(t, wrong, rowBytes*9/10)
	})
}

func TestBytesLookRandom(t *testing.T) {
	row := make([]byte, 1<<20)
	fillRow(row, 1)
	var count [256]int
	for _, b := range row {
		count[b]++
	}
	for v, n := range count { // 4096 expected, standard deviation 64
		require.InDelta(t, len(row)/256, n, 500, "value %d", v)
	}
}

func TestSpoiledRowIsWrongInEveryCacheLine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		row := make([]byte, rapid.IntRange(1, 500).Draw(t, "bytes"))
		seed := rapid.Uint64().Draw(t, "seed")
		fillRow(row, seed)
		spoilRow(row)
		require.Equal(t, (len(row)+63)/64, wrongInRow(row, seed))
	})
}

func BenchmarkFill(b *testing.B) {
	row := make([]byte, 1024)
	b.SetBytes(int64(len(row)))
	for i := 0; b.Loop(); i++ {
		fillRow(row, uint64(i))
	}
}

func BenchmarkCompare(b *testing.B) {
	row := make([]byte, 1024)
	fillRow(row, 1)
	b.SetBytes(int64(len(row)))
	for b.Loop() {
		if wrongInRow(row, 1) != 0 {
			b.Fatal("wrong")
		}
	}
}
