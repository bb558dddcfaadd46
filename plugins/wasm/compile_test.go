package wasm

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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

// TestCompilerIsNotWaitedForForEver: 1,900 bytes keep the compiler busy for seconds, 10 KB
// for hours, and it cannot be interrupted.
func TestCompilerIsNotWaitedForForEver(t *testing.T) {
	began := time.Now()
	_, err := Load(context.Background(), "test", bomb(110, 110), Options{CompileTimeout: 50 * time.Millisecond})
	require.ErrorContains(t, err, "it was still being compiled after 50ms")
	require.Less(t, time.Since(began), 500*time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = Load(ctx, "test", bomb(110, 110), Options{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
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
