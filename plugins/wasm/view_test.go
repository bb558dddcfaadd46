package wasm

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
)

// saying answers every call with the 8 bytes at the start of its memory.
func saying() *asm {
	answer := code(i32Const(0), opI64Load, 3, 0)
	return good().set("kv_reach", answer).set("kv_scan", answer).set("kv_need", answer)
}

// FuzzViews: whatever a guest answers and has in its memory, a call fails, or what it
// returns is what lies in the memory at the view, of exactly the bytes asked for.
func FuzzViews(f *testing.F) {
	f.Add(uint64(64)<<32|1, []byte{0xff}, uint16(64), uint8(8))
	f.Add(uint64(64)<<32|9, []byte{2, 0, 0, 0, 1, 0, 0, 0, 3}, uint16(64), uint8(8))
	f.Add(^uint64(0), []byte{}, uint16(8), uint8(0))
	f.Add(^uint64(1), []byte{}, uint16(8), uint8(3))
	f.Add(uint64(65535)<<32|2, []byte{1, 2, 3}, uint16(65533), uint8(12))
	f.Add(uint64(1<<31)<<32|1, []byte{}, uint16(8), uint8(5))
	m := load(f, saying(), Options{})
	f.Cleanup(func() { require.NoError(f, m.Close(context.Background())) })
	r := m.rules.intern(m.Specs()[0].(*spec), nil)
	f.Fuzz(func(t *testing.T, answer uint64, content []byte, at uint16, chunks uint8) {
		in, err := m.pool.pin(false)
		require.NoError(t, err)
		defer m.pool.unpin(in, false)
		_, err = in.handle(r)
		require.NoError(t, err)
		in.mem.Write(uint32(at), content) // what does not fit is not written
		require.True(t, in.mem.WriteUint64Le(0, answer))
		round := abi.Round{BlockTokens: 1, ChunkTokens: 1, PromptTokens: 300, StoredTokens: 300, ResumeTokens: 300, BoundTokens: 300, Hi: uint32(chunks)}
		n := int(chunks)
		ptr, size := uint32(answer>>32), uint32(answer)
		seen, inside := in.mem.Read(ptr, size)
		whole := inside && int64(answer) >= 0

		for fn, call := range map[string]func(*rule, *abi.Round, abi.Bitmap) error{"reach": in.reach, "need": in.need} {
			out := abi.NewBitmap(n)
			if err := call(r, &round, out); err == nil {
				require.True(t, whole, fn)
				require.Equal(t, (n+7)/8, int(size), fn)
				require.Equal(t, append([]byte{}, seen...), out.AppendWire([]byte{}, n), fn)
			} else if int64(answer) == answerNoResume && fn == "need" {
				require.ErrorIs(t, err, abi.ErrNoResume)
			}
		}
		demand := abi.NewBitmap(n)
		span, err := in.scan(r, &round, abi.NewStates(n), demand)
		if err == nil {
			require.True(t, whole)
			require.Equal(t, 8+(n+7)/8, int(size))
			require.Equal(t, binary.LittleEndian.Uint32(seen), span.Usable)
			require.LessOrEqual(t, int(span.Usable), n)
			require.Equal(t, binary.LittleEndian.Uint32(seen[4:]) == 1, span.Deferred)
			require.Equal(t, append([]byte{}, seen[8:]...), demand.AppendWire([]byte{}, n))
			return
		}
		var protocol *ProtocolError
		var guest *GuestError
		require.True(t, errors.As(err, &protocol) || errors.As(err, &guest), "%v", err)
	})
}
