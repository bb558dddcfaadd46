package crc32c

import (
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Bytes that end where memory does: what is asked for ahead lies behind it.
func TestEndOfMemory(t *testing.T) {
	page := os.Getpagesize()
	const pages = 3
	mem, err := unix.Mmap(-1, 0, (pages+2)*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	all := mem
	defer func() { require.NoError(t, unix.Munmap(all)) }()
	rand.NewChaCha8([32]byte{2}).Read(mem)
	require.NoError(t, unix.Mprotect(mem[pages*page:], unix.PROT_NONE))
	mem = mem[:pages*page]
	for n := range len(mem) + 1 {
		end := mem[len(mem)-n:]
		require.Equal(t, std(7, end), Update(7, end), "the last %d bytes", n)
	}
}
