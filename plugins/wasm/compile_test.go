package wasm

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
)

// bomb is a module whose kv_reach has many variables that change in nested loops.
func bomb(locals, loops int) []byte {
	a := good()
	a.set("kv_reach", viewOf(scratch, 1))
	b := a.bytes()
	i := findSection(b, 10)
	j := findSection(b, 11)
	var codes [][]byte
	for _, f := range a.funcs {
		body := code(0, f.body, opEnd)
		if f.name == "kv_reach" {
			var w bytes.Buffer
			w.Write(code(1, uleb(uint64(locals)), tI32))
			for range loops {
				w.Write(code(opLoop, blockVoid))
			}
			for l := 1; l <= locals; l++ {
				w.Write(code(opLocalGet, uleb(uint64(l)), i32Const(1), 0x6a, 0x21, uleb(uint64(l))))
			}
			for range loops {
				w.Write(code(opLocalGet, 0, 0x0d, 0, opEnd)) // br_if 0
			}
			w.Write(f.body)
			w.Write([]byte{opEnd})
			body = w.Bytes()
		}
		codes = append(codes, append(uleb(uint64(len(body))), body...))
	}
	return append(append(append([]byte{}, b[:i]...), section(10, vector(codes...))...), b[j:]...)
}

// TestCompilerBombs: 10 KB can keep the compiler busy for hours, and it cannot be
// interrupted. What would is refused without trying; what takes it seconds is not, and
// is not waited for longer than CompileTimeout.
func TestCompilerBombs(t *testing.T) {
	_, err := Load(context.Background(), "test", bomb(1000, 1000), Options{})
	require.EqualError(t, err, "wasm module test: the function that ends at byte 15948 has 1001 blocks, 1000 branches, 0 calls and 1001 locals; "+
		"the runtime's compiler would take too long: split it, or let your compiler optimise it")
	require.NoError(t, func() error { _, err := fuel.Rewrite(bomb(60, 60)); return err }())
	_, err = Load(context.Background(), "test", bomb(60, 60), Options{CompileTimeout: time.Millisecond})
	require.ErrorContains(t, err, "it was still being compiled after 1ms")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = Load(ctx, "test", bomb(60, 60), Options{})
	require.ErrorIs(t, err, context.Canceled)
	time.Sleep(10 * time.Millisecond)
}

// findSection returns where a section begins.
func findSection(b []byte, id byte) int {
	at := 8
	for at < len(b) {
		i := at
		s := b[at]
		at++
		n, sh := 0, 0
		for {
			c := b[at]
			at++
			n |= int(c&0x7f) << sh
			sh += 7
			if c < 0x80 {
				break
			}
		}
		if s == id {
			return i
		}
		at += n
	}
	return -1
}
