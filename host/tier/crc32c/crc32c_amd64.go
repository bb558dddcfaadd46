package crc32c

import "golang.org/x/sys/cpu"

var hasWide = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42

// wide returns the CRC-32C register after b, whose length is a positive multiple of
// 256, starting from register crc. Neither is inverted.
//
//go:noescape
func wide(crc uint32, b []byte) uint32
