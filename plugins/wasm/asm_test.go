package wasm

import (
	"slices"
)

// An asm is a WebAssembly module put together by hand: just enough of the binary
// format for one crime a module.
type asm struct {
	imports []asmImport
	funcs   []asmFunc
	pages   uint32 // of its own memory; 0 for none
	memory  string // name under which the memory is exported; "" for none
	data    []byte // at dataAt
	table   []byte // one table, encoded; nil for none
	customs int    // bytes of a custom section, to make it large
	start   bool   // the last function is that of the start section
}

type asmImport struct {
	module, name    string
	params, results []byte
	memory          bool
}

type asmFunc struct {
	name            string
	params, results []byte
	body            []byte
}

// dataAt is where data lies in memory; scratch is free memory after it.
const dataAt, scratch = 1024, 32768

// Value types and opcodes.
const (
	tI32, tI64 = 0x7f, 0x7e

	opUnreachable, opLoop, opIf, opEnd, opBr, opCall, opDrop = 0x00, 0x03, 0x04, 0x0b, 0x0c, 0x10, 0x1a
	opLocalGet, opI64Load, opI32Store, opI64Store            = 0x20, 0x29, 0x36, 0x37
	opMemoryGrow, opI32Const, opI64Const                     = 0x40, 0x41, 0x42
	opI32Eq, opI32Ne, opI64Eq, opI64Or, opI64ExtendI32U      = 0x46, 0x47, 0x51, 0x84, 0xad
	blockVoid                                                = 0x40
)

func uleb(v uint64) (b []byte) {
	for ; v >= 0x80; v >>= 7 {
		b = append(b, byte(v)|0x80)
	}
	return append(b, byte(v))
}

func sleb(v int64) (b []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if v == 0 && c&0x40 == 0 || v == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

// code joins opcodes and encoded operands.
func code(parts ...any) (b []byte) {
	for _, p := range parts {
		switch p := p.(type) {
		case int:
			b = append(b, byte(p))
		case []byte:
			b = append(b, p...)
		}
	}
	return b
}

func i32Const(v int64) []byte { return code(opI32Const, sleb(v)) }
func i64Const(v int64) []byte { return code(opI64Const, sleb(v)) }

// answer is the body that returns a view of n bytes at p.
func viewOf(p, n int64) []byte { return i64Const(p<<32 | n) }

// call calls an imported function, by its index, with two numbers.
func call(f int, a, b int64) []byte { return code(i32Const(a), i32Const(b), opCall, f) }

// Indexes of the imports of good.
const fnInput, fnFail = 0, 1

func vector(items ...[]byte) []byte {
	return append(uleb(uint64(len(items))), slices.Concat(items...)...)
}
func name(s string) []byte { return append(uleb(uint64(len(s))), s...) }

func section(id byte, content []byte) []byte {
	return append(append([]byte{id}, uleb(uint64(len(content)))...), content...)
}

func (a *asm) bytes() []byte {
	var types, imports, funcs, exports, codes [][]byte
	typeOf := func(params, results []byte) []byte {
		t := code(0x60, uleb(uint64(len(params))), params, uleb(uint64(len(results))), results)
		types = append(types, t) // no need to share them
		return uleb(uint64(len(types) - 1))
	}
	index := 0
	for _, i := range a.imports {
		kind := code(0x02, 0x00, 1) // a memory of at least 1 page
		if !i.memory {
			kind = code(0x00, typeOf(i.params, i.results))
			index++
		}
		imports = append(imports, code(name(i.module), name(i.name), kind))
	}
	for _, f := range a.funcs {
		funcs = append(funcs, typeOf(f.params, f.results))
		exports = append(exports, code(name(f.name), 0x00, uleb(uint64(index))))
		body := code(0, f.body, opEnd) // no locals
		codes = append(codes, append(uleb(uint64(len(body))), body...))
		index++
	}
	b := []byte("\x00asm\x01\x00\x00\x00")
	if a.customs > 0 {
		b = append(b, section(0, append(name("large"), make([]byte, a.customs)...))...)
	}
	b = append(b, section(1, vector(types...))...)
	b = append(b, section(2, vector(imports...))...)
	b = append(b, section(3, vector(funcs...))...)
	if a.table != nil {
		b = append(b, section(4, vector(a.table))...)
	}
	if a.pages > 0 {
		b = append(b, section(5, vector(code(0x00, uleb(uint64(a.pages)))))...)
	}
	if a.memory != "" {
		exports = append(exports, code(name(a.memory), 0x02, 0))
	}
	b = append(b, section(7, vector(exports...))...)
	if a.start {
		b = append(b, section(8, uleb(uint64(index-1)))...)
	}
	b = append(b, section(10, vector(codes...))...)
	if len(a.data) > 0 {
		b = append(b, section(11, vector(code(0x00, i32Const(dataAt), opEnd, uleb(uint64(len(a.data))), a.data)))...)
	}
	return b
}

// set gives an export a new body.
func (a *asm) set(export string, parts ...any) *asm {
	a.find(export).body = code(parts...)
	return a
}

func (a *asm) find(export string) *asmFunc {
	return &a.funcs[slices.IndexFunc(a.funcs, func(f asmFunc) bool { return f.name == export })]
}

func (a *asm) drop(export string) *asm {
	a.funcs = slices.DeleteFunc(a.funcs, func(f asmFunc) bool { return f.name == export })
	return a
}

func (a *asm) manifest(json string) *asm {
	a.data = []byte(json)
	return a.set("kv_manifest", viewOf(dataAt, int64(len(json))))
}

const goodManifest = `{"rules":[{"name":"t","version":"1","kind":"spec","mask":"causal"}]}`

// good returns a module that is in order: its rule stores nothing, finds nothing usable
// and needs nothing, for rounds of 8 chunks.
func good() *asm {
	handle, view := []byte{tI32}, []byte{tI64}
	a := &asm{
		imports: []asmImport{
			{module: "kv", name: "input", params: []byte{tI32, tI32}, results: []byte{tI32}},
			{module: "kv", name: "fail", params: []byte{tI32, tI32}},
		},
		funcs: []asmFunc{
			{name: "kv_abi_1"},
			{name: "kv_manifest", results: view},
			{name: "kv_open", results: view, body: i64Const(0)},
			{name: "kv_reach", params: handle, results: view, body: viewOf(scratch, 1)},
			{name: "kv_scan", params: handle, results: view, body: viewOf(scratch, 9)},
			{name: "kv_need", params: handle, results: view, body: viewOf(scratch, 1)},
		},
		pages: 1, memory: "memory",
	}
	return a.manifest(goodManifest)
}
