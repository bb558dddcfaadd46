package wasm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
)

// deep is a module whose kv_reach calls itself as often as fits into the stack for its
// fuel and returns, so that the call is a success.
func deep(calls int64) *asm {
	a := good()
	a.funcs = append(a.funcs, asmFunc{name: "deeper", params: []byte{tI32}, body: code(
		opLocalGet, 0, opIf, blockVoid, opLocalGet, 0, i32Const(1), 0x6b, opCall, len(a.imports)+len(a.funcs), opEnd)})
	return a.set("kv_reach", i32Const(calls), opCall, len(a.imports)+len(a.funcs)-1, viewOf(scratch, 1))
}

// A call that went deep leaves no large stack in the instance that is kept.
func TestDeepCallsLeaveNoStack(t *testing.T) {
	p, release := open(t, load(t, deep(100_000), Options{})).(Pinner).Pin()
	defer release()
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)))
	t.Log(p.(Metered).Fuel())
	in := p.(boundSpec).in
	require.LessOrEqual(t, in.stacks[fnReach].Cap(), stackItemsKept)
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)), "the instance goes on")
	require.Same(t, in, p.(boundSpec).in)
}
