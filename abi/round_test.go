package abi

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func drawRound(t *rapid.T) Round {
	u := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
	return Round{
		BlockTokens: u("block"), ChunkTokens: u("chunk"), PromptTokens: u("prompt"), StoredTokens: u("stored"),
		ResumeTokens: u("resume"), AlignTokens: u("align"), JunctionTokens: u("junction"), ResidentTokens: u("resident"),
		Offers: u("offers"), LocalTokens: u("local"), BoundTokens: u("bound"),
		Lo: rapid.Uint32().Draw(t, "lo"), Hi: rapid.Uint32().Draw(t, "hi"),
	}
}

func TestRoundWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawRound(t)
		tail := rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "tail")
		newer := rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "newer")
		wire := want.AppendWire(nil)
		require.Len(t, wire, RoundBytes)
		// A newer minor version appends fields; they are skipped.
		binary.LittleEndian.PutUint32(wire, uint32(RoundBytes+len(newer)))
		wire = append(append(wire, newer...), tail...)

		var got Round
		rest, err := got.DecodeWire(wire)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, append([]byte{}, tail...), append([]byte{}, rest...))
	})
}

// The order of the fields on the wire is part of the version.
func TestRoundWireLayout(t *testing.T) {
	r := Round{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}
	wire := r.AppendWire(nil)
	require.Equal(t, []byte{104, 0, 0, 0, 0, 0, 0, 0}, wire[:8])
	for i := range 11 {
		require.EqualValues(t, i+1, binary.LittleEndian.Uint64(wire[8+8*i:]))
	}
	require.Equal(t, []byte{12, 0, 0, 0, 13, 0, 0, 0}, wire[96:])
}

func TestRoundDecodeErrors(t *testing.T) {
	head := func(size uint32, n int) []byte {
		b := make([]byte, n)
		binary.LittleEndian.PutUint32(b, size)
		return b
	}
	for want, in := range map[string][]byte{
		"round record: 7 bytes, shorter than its 8-byte head":            make([]byte, 7),
		"round record: size field says 96; version 1 needs at least 104": head(96, 104),
		"round record: size field says 4104; at most 4096 is read":       head(4104, 8192),
		"round record: size field says 112, but only 104 bytes follow":   head(112, 104),
	} {
		_, err := new(Round).DecodeWire(in)
		require.EqualError(t, err, want)
	}
}

func TestRoundValidate(t *testing.T) {
	good := Round{BlockTokens: 16, ChunkTokens: 32, Hi: 4}
	require.NoError(t, good.Validate())
	for want, change := range map[string]func(*Round){
		"round: block_tokens is 0; a block holds at least 1 token":                       func(r *Round) { r.BlockTokens = 0 },
		"round: chunk_tokens is 0; it must be a positive multiple of block_tokens, 16":   func(r *Round) { r.ChunkTokens = 0 },
		"round: chunk_tokens is 40; it must be a positive multiple of block_tokens, 16":  func(r *Round) { r.ChunkTokens = 40 },
		"round: hi is 4, below lo, 5":                                                    func(r *Round) { r.Lo = 5 },
		"round: hi is 1048577; the contract allows 1048576 chunks":                       func(r *Round) { r.Hi = MaxChunks + 1 },
		"round: bound_tokens is 2147483649; the contract allows 2147483648":              func(r *Round) { r.BoundTokens = MaxTokens + 1 },
		"round: resident_tokens is 18446744073709551615; the contract allows 2147483648": func(r *Round) { r.ResidentTokens = 1<<64 - 1 },
	} {
		r := good
		change(&r)
		require.EqualError(t, r.Validate(), want)
	}
	edge := Round{BlockTokens: 1, ChunkTokens: 1, PromptTokens: MaxTokens, Offers: MaxTokens, Lo: MaxChunks, Hi: MaxChunks}
	require.NoError(t, edge.Validate())
	require.Zero(t, edge.Chunks())
}

func FuzzRoundDecodeWire(f *testing.F) {
	r := Round{BlockTokens: 16, ChunkTokens: 16, Hi: 9}
	f.Add(r.AppendWire(nil))
	f.Add(append(r.AppendWire(nil), 1, 2, 3))
	f.Add([]byte{104, 0, 0, 0})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, in []byte) {
		var r Round
		rest, err := r.DecodeWire(in)
		if err != nil {
			return
		}
		size := len(in) - len(rest)
		require.GreaterOrEqual(t, size, RoundBytes)
		require.Equal(t, in[8:RoundBytes], r.AppendWire(nil)[8:])
		_ = r.Validate() // never panics
	})
}
