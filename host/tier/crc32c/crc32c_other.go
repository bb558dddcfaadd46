//go:build !amd64

package crc32c

const hasWide = false

func wide(uint32, []byte) uint32 { panic("unreachable: hasWide is false") }
