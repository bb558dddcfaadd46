package crc32c

import (
	"hash/crc32"
	"math/bits"
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func std(sum uint32, b []byte) uint32 { return crc32.Update(sum, table, b) }

func TestKnownAnswers(t *testing.T) {
	// RFC 3720, appendix B.4.
	require.Equal(t, uint32(0x8a9136aa), Checksum(make([]byte, 32)))
	require.Equal(t, uint32(0xe3069283), Checksum([]byte("123456789")))
	require.Zero(t, Checksum(nil))
}

// Every length around the block sizes, at every alignment of a cache line.
func TestEqualsStandardLibrary(t *testing.T) {
	t.Logf("wide version in use: %v", hasWide)
	r := rand.NewChaCha8([32]byte{1})
	buf := make([]byte, 5000)
	r.Read(buf)
	for n := 0; n <= 2600; n++ {
		at := n % 64
		require.Equal(t, std(0, buf[at:at+n]), Checksum(buf[at:at+n]), "length %d", n)
	}
	if !hasWide {
		return
	}
	for n := 256; n <= 4096; n += 256 { // below wideBytesMin too
		for _, start := range []uint32{0, 1, 0xffffffff, 0x80000000} {
			require.Equal(t, std(start, buf[7:7+n]), ^wide(^start, buf[7:7+n]), "length %d start %x", n, start)
		}
	}
}

func TestUpdateIsConcatenation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		n := rapid.IntRange(0, 1<<17).Draw(t, "n")
		cut := rapid.IntRange(0, n).Draw(t, "cut")
		buf := make([]byte, n)
		r := rand.New(rand.NewPCG(seed, 0))
		for i := range buf {
			buf[i] = byte(r.Uint32())
		}
		want := std(0, buf)
		require.Equal(t, want, Checksum(buf))
		require.Equal(t, want, Update(Checksum(buf[:cut]), buf[cut:]))
	})
}

// The constants in the assembly are powers of x modulo the polynomial.
func TestConstants(t *testing.T) {
	power := func(n int) uint64 {
		r := uint64(1)
		for range n {
			if r <<= 1; r>>32 != 0 {
				r ^= 0x11edc6f41
			}
		}
		return uint64(bits.Reverse32(uint32(r)))
	}
	text, err := os.ReadFile("crc32c_amd64.s")
	require.NoError(t, err)
	got := map[string][]uint64{}
	for _, m := range regexp.MustCompile(`DATA (\w+)<>\+\d+\(SB\)/8, \$(\w+)`).FindAllStringSubmatch(string(text), -1) {
		v, err := strconv.ParseUint(m[2], 0, 64)
		require.NoError(t, err)
		got[m[1]] = append(got[m[1]], v)
	}
	pair := func(ds ...int) (out []uint64) {
		for _, d := range ds {
			out = append(out, power(d+31), power(d-33))
		}
		return out
	}
	require.Equal(t, map[string][]uint64{
		"fold2048":  pair(2048),
		"fold512":   pair(512),
		"foldLanes": append(pair(384, 256, 128), 0, 0),
	}, got)
}

func FuzzChecksum(f *testing.F) {
	f.Add([]byte("123456789"), uint32(0))
	f.Add(make([]byte, 2048), ^uint32(0))
	f.Fuzz(func(t *testing.T, b []byte, start uint32) {
		if got, want := Update(start, b), std(start, b); got != want {
			t.Fatalf("%d bytes from %08x: %08x, standard library says %08x", len(b), start, got, want)
		}
	})
}

func BenchmarkChecksum(b *testing.B) {
	buf := make([]byte, 256<<10)
	b.Run("here", func(b *testing.B) {
		b.SetBytes(int64(len(buf)))
		for b.Loop() {
			Checksum(buf)
		}
	})
	b.Run("standard", func(b *testing.B) {
		b.SetBytes(int64(len(buf)))
		for b.Loop() {
			std(0, buf)
		}
	})
}
