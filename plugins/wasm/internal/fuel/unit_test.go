package fuel

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// A spender is an endless loop around code made to be as slow as it can for its units.
type spender struct {
	name string
	body []byte
}

// Locals of a spender: two of each type.
var (
	spenderTypes = []byte{TypeI32, TypeI64, TypeF32, TypeF64, TypeV128}
	localOf      = map[byte]byte{TypeI32: 0, TypeI64: 2, TypeF32: 4, TypeF64: 6, TypeV128: 8}
)

// chain makes code whose every instruction waits for the one before it.
func chain(in []byte, out byte, op ...byte) (body []byte) {
	for range 64 {
		for i, t := range in {
			body = append(body, opLocalGet, localOf[t]+byte(min(i, 1)))
		}
		body = append(append(body, op...), opLocalSet, localOf[out])
	}
	return body
}

func spenders() (s []spender) {
	add := func(name string, body []byte) { s = append(s, spender{name, body}) }
	numeric := func(first, last int, out byte, in ...byte) {
		for op := first; op <= last; op++ {
			add(fmt.Sprintf("%#x", op), chain(in, out, byte(op)))
		}
	}
	const i, l, f, d, v = TypeI32, TypeI64, TypeF32, TypeF64, TypeV128
	numeric(0x45, 0x45, i, i)
	numeric(0x46, 0x4f, i, i, i)
	numeric(0x51, 0x5a, i, l, l)
	numeric(0x5b, 0x60, i, f, f)
	numeric(0x61, 0x66, i, d, d)
	numeric(0x67, 0x69, i, i)
	numeric(0x6a, 0x78, i, i, i)
	numeric(0x79, 0x7b, l, l)
	numeric(0x7c, 0x8a, l, l, l)
	numeric(0x8b, 0x91, f, f)
	numeric(0x92, 0x98, f, f, f)
	numeric(0x99, 0x9f, d, d)
	numeric(0xa0, 0xa6, d, d, d)
	for op, t := range map[int][2]byte{0xa7: {l, i}, 0xa8: {f, i}, 0xa9: {f, i}, 0xaa: {d, i}, 0xab: {d, i}, 0xac: {i, l}, 0xae: {f, l}, 0xaf: {f, l},
		0xb0: {d, l}, 0xb1: {d, l}, 0xb2: {i, f}, 0xb3: {i, f}, 0xb4: {l, f}, 0xb5: {l, f}, 0xb6: {d, f}, 0xb7: {i, d}, 0xb8: {i, d}, 0xb9: {l, d}, 0xba: {l, d}, 0xbb: {f, d}} {
		numeric(op, op, t[1], t[0])
	}
	for k, in := range []byte{f, f, d, d, f, f, d, d} {
		out := byte(i)
		if k > 3 {
			out = l
		}
		add(fmt.Sprintf("0xfc %d", k), chain([]byte{in}, out, prefixMisc, byte(k)))
	}
	for sub := 0x0e; sub < 256; sub++ {
		op := []byte{prefixVector, byte(sub)}
		if sub >= 0x80 {
			op = append(op, 1)
		}
		in, out := []byte{v, v}, byte(v)
		switch {
		case vectorWeights[sub] == 0 || sub >= 0x0f && sub <= 0x22 || sub >= subLoadLane && sub <= subLoadZero64:
			continue
		case slices.Contains([]int{0x53, 0x63, 0x64, 0x83, 0x84, 0xa3, 0xa4, 0xc3, 0xc4}, sub):
			in, out = []byte{v}, i
		case sub == 0x52:
			in = []byte{v, v, v}
		case slices.Contains([]int{0x4d, 0x5e, 0x5f, 0x60, 0x61, 0x62, 0x67, 0x68, 0x69, 0x6a, 0x74, 0x75, 0x7a, 0x7c, 0x7d, 0x7e, 0x7f, 0x80, 0x81, 0x87, 0x88, 0x89, 0x8a,
			0x94, 0xa0, 0xa1, 0xa7, 0xa8, 0xa9, 0xaa, 0xc0, 0xc1, 0xc7, 0xc8, 0xc9, 0xca, 0xe0, 0xe1, 0xe3, 0xec, 0xed, 0xef, 0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff}, sub):
			in = []byte{v}
		case slices.Contains([]int{0x6b, 0x6c, 0x6d, 0x8b, 0x8c, 0x8d, 0xab, 0xac, 0xad, 0xcb, 0xcc, 0xcd}, sub):
			in = []byte{v, i}
		}
		add(fmt.Sprintf("0xfd %#x", sub), chain(in, out, op...))
	}
	add("0xfd shuffle", chain([]byte{v, v}, v, append([]byte{prefixVector, subShuffle}, make([]byte, 16)...)...))
	add("chase", chain([]byte{i}, i, opI32Load, 2, 0))
	add("store", chain([]byte{i, l, i}, i, opI64Store32-7, 0, 0, opLocalGet, 1, 0x6a)) // i64.store, far apart
	grow := []byte{opI32Const, 1, opMemoryGrow, 0, opDrop}
	add("grow", slices.Repeat(grow, 16))
	add("ref.func", slices.Repeat([]byte{opRefFunc, 1, opDrop}, 16))
	add("call", slices.Repeat([]byte{opCall, 1}, 16))
	add("call_indirect", slices.Repeat([]byte{opI32Const, 0, opCallIndirect, 0, 0}, 16))
	add("fill", []byte{opI32Const, 0, opI32Const, 1, opI32Const, 0x80, 0x80, 0x80, 0x08, prefixMisc, subMemoryFill, 0})
	add("copy", []byte{opI32Const, 0x80, 0x80, 0x80, 0x04, opI32Const, 0, opI32Const, 0x80, 0x80, 0x80, 0x04, prefixMisc, subMemoryCopy, 0, 0})
	add("copy little", slices.Repeat([]byte{opI32Const, 32, opI32Const, 0, opI32Const, 15, prefixMisc, subMemoryCopy, 0, 0}, 16))
	add("table fill", []byte{opI32Const, 0, opRefNull, TypeFuncref, opI32Const, 0x80, 0x80, 0x04, prefixMisc, subTableFill, 0})
	add("table copy", []byte{opI32Const, 0, opI32Const, 1, opI32Const, 0xff, 0xff, 0x03, prefixMisc, subTableCopy, 0, 0})
	add("table grow", slices.Repeat([]byte{opRefNull, TypeFuncref, opI32Const, 1, prefixMisc, subTableGrow, 0, opDrop}, 4))
	add("empty", nil)
	return s
}

// spend is a module whose function run loops around body, with 16 MiB of memory that
// is full of pointers to the cache line 64 x 4099 further.
func spend(body []byte) []byte {
	locals := []byte{0}
	for _, t := range spenderTypes {
		locals[0]++
		locals = append(locals, 2, t)
	}
	run := slices.Concat(locals, []byte{opI32Const, 1, opLocalSet, 1, opI64Const, 1, opLocalSet, 3, opLoop, blockVoid}, body, []byte{opBr, 0, opEnd, opEnd})
	size := func(b []byte) []byte { return append(binary.AppendUvarint(nil, uint64(len(b))), b...) }
	section := func(id byte, b ...byte) []byte { return append([]byte{id}, size(b)...) }
	code := slices.Concat([]byte{2}, size(run), []byte{2, 0, opEnd})
	return slices.Concat([]byte("\x00asm\x01\x00\x00\x00"),
		section(secType, 1, 0x60, 0, 0), section(secFunction, 2, 0, 0), section(secTable, 1, TypeFuncref, 1, 0x80, 0x80, 0x04, 0x80, 0x80, 0x04),
		section(secMemory, 1, 0, 0x80, 0x02), section(secExport, 2, 3, 'r', 'u', 'n', 0, 0, 3, 'm', 'e', 'm', 2, 0),
		section(secElement, 1, 0, opI32Const, 0, opEnd, 1, 1), section(secCode, code...))
}

// BenchmarkUnit tells what a unit of fuel takes in the slowest code for it. The worst
// of them times a budget is how long a call can last.
func BenchmarkUnit(b *testing.B) {
	for _, s := range spenders() {
		b.Run(s.name, func(b *testing.B) {
			ctx := context.Background()
			r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithMemoryLimitPages(256))
			defer r.Close(ctx)
			m, err := Rewrite(spend(s.body))
			require.NoError(b, err)
			mod, err := r.InstantiateWithConfig(ctx, m.Wasm, wazero.NewModuleConfig())
			require.NoError(b, err)
			memory, _ := mod.Memory().Read(0, 1<<24)
			for at := uint32(0); at < 1<<24; at += 64 {
				binary.LittleEndian.PutUint32(memory[at:], (at+64*4099*7)&(1<<24-1))
			}
			const units = 1 << 22
			counter, run := mod.ExportedGlobal(Counter).(api.MutableGlobal), mod.ExportedFunction("run")
			best := time.Hour
			for range 5 {
				counter.Set(units)
				began := time.Now()
				_, err = run.Call(ctx)
				best = min(best, time.Since(began))
				require.Error(b, err)
				require.Negative(b, int64(counter.Get()))
			}
			b.ReportMetric(float64(best.Nanoseconds())/units, "ns/unit")
			b.ReportMetric(0, "ns/op")
		})
	}
}
