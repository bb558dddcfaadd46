package zoo

import (
	"bytes"
	"slices"
)

// An asm is a WebAssembly module put together by hand: just enough of the binary format
// for one crime a module.
type asm struct {
	imports []asmImport
	funcs   []asmFunc
	pages   uint32   // of its own memory; 0 for none
	memory  string   // name under which the memory is exported; "" for none
	data    []byte   // at dataAt
	table   []byte   // one table, encoded; nil for none
	globals int      // mutable i32 globals, 0 at the start
	start   string   // the function of the start section; "" for none
	before  [][]byte // whole sections put before all others
	after   [][]byte // and behind all others
}

type asmImport struct {
	module, name    string
	params, results []byte
	kind            []byte // of an import that is no function, encoded
}

// An asmFunc is exported under its name, unless that is empty or it is the start function.
type asmFunc struct {
	name            string
	params, results []byte
	locals          int // i32 variables after the parameters
	body            []byte
}

// Value types and opcodes.
const (
	tI32, tI64, tFuncref = 0x7f, 0x7e, 0x70

	opUnreachable, opBlock, opLoop, opIf, opElse, opEnd, opBr, opBrIf, opReturn, opCall = 0x00, 0x02, 0x03, 0x04, 0x05, 0x0b, 0x0c, 0x0d, 0x0f, 0x10

	opCallIndirect, opDrop, opLocalGet, opLocalSet, opGlobalGet, opGlobalSet = 0x11, 0x1a, 0x20, 0x21, 0x23, 0x24

	opI32Load, opI64Load, opI32Load8, opI32Store, opI64Store, opI32Store8 = 0x28, 0x29, 0x2d, 0x36, 0x37, 0x3a

	opMemoryGrow, opI32Const, opI64Const = 0x40, 0x41, 0x42

	opI32Eqz, opI32Eq, opI32LtU, opI32GeU            = 0x45, 0x46, 0x49, 0x4f
	opI32Add, opI32Sub, opI32Mul, opI32DivU          = 0x6a, 0x6b, 0x6c, 0x6e
	opI32RemU, opI32And, opI32Or, opI32Shl, opI32Shr = 0x70, 0x71, 0x72, 0x74, 0x76
	opI64Or, opI64Shl, opI64ExtendU                  = 0x84, 0x86, 0xad

	opBulk, bulkCopy, bulkFill = 0xfc, 0x0a, 0x0b

	blockVoid = 0x40
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
		default:
			panic("zoo: code is made of opcodes and bytes")
		}
	}
	return b
}

func i32Const(v int64) []byte { return code(opI32Const, sleb(v)) }
func i64Const(v int64) []byte { return code(opI64Const, sleb(v)) }
func get(local int) []byte    { return code(opLocalGet, uleb(uint64(local))) }
func set(local int) []byte    { return code(opLocalSet, uleb(uint64(local))) }

// load reads an i32 of the input, at a fixed offset.
func load(offset int64) []byte { return code(i32Const(inputAt), opI32Load, 2, uleb(uint64(offset))) }

// viewOf is the body that answers a view of n bytes at p.
func viewOf(p, n int64) []byte { return i64Const(p<<32 | n) }

// call calls a function by its index with i32 constants.
func call(f int, args ...int64) []byte {
	var b []byte
	for _, a := range args {
		b = append(b, i32Const(a)...)
	}
	return code(b, opCall, uleb(uint64(f)))
}

// forever repeats a body without end.
func forever(body ...any) []byte {
	return code(opLoop, blockVoid, code(body...), opBr, 0, opEnd)
}

func vector(items ...[]byte) []byte {
	return append(uleb(uint64(len(items))), slices.Concat(items...)...)
}

func name(s string) []byte { return append(uleb(uint64(len(s))), s...) }

func section(id byte, content []byte) []byte {
	return append(append([]byte{id}, uleb(uint64(len(content)))...), content...)
}

func custom(label string, content []byte) []byte {
	return section(0, append(name(label), content...))
}

const head = "\x00asm\x01\x00\x00\x00"

func (a *asm) bytes() []byte {
	var types, imports, funcs, exports, codes, globals [][]byte
	typeOf := func(params, results []byte) []byte {
		t := code(0x60, uleb(uint64(len(params))), params, uleb(uint64(len(results))), results)
		types = append(types, t) // no need to share them
		return uleb(uint64(len(types) - 1))
	}
	index := 0
	for _, i := range a.imports {
		kind := i.kind
		if kind == nil {
			kind = code(0x00, typeOf(i.params, i.results))
			index++
		}
		imports = append(imports, code(name(i.module), name(i.name), kind))
	}
	var start []byte
	for _, f := range a.funcs {
		funcs = append(funcs, typeOf(f.params, f.results))
		switch {
		case f.name == "":
		case f.name == a.start:
			start = section(8, uleb(uint64(index)))
		default:
			exports = append(exports, code(name(f.name), 0x00, uleb(uint64(index))))
		}
		locals := code(0)
		if f.locals > 0 {
			locals = code(1, uleb(uint64(f.locals)), tI32)
		}
		body := code(locals, f.body, opEnd)
		codes = append(codes, append(uleb(uint64(len(body))), body...))
		index++
	}
	for range a.globals {
		globals = append(globals, code(tI32, 1, i32Const(0), opEnd))
	}
	if a.memory != "" {
		exports = append(exports, code(name(a.memory), 0x02, 0))
	}
	b := slices.Concat([]byte(head), slices.Concat(a.before...))
	add := func(id byte, content []byte) { b = append(b, section(id, content)...) }
	add(1, vector(types...))
	add(2, vector(imports...))
	add(3, vector(funcs...))
	if a.table != nil {
		add(4, vector(a.table))
	}
	if a.pages > 0 {
		add(5, vector(code(0x00, uleb(uint64(a.pages)))))
	}
	if a.globals > 0 {
		add(6, vector(globals...))
	}
	add(7, vector(exports...))
	b = append(b, start...)
	add(10, vector(codes...))
	if len(a.data) > 0 {
		add(11, vector(code(0x00, i32Const(dataAt), opEnd, uleb(uint64(len(a.data))), a.data)))
	}
	return append(b, slices.Concat(a.after...)...)
}

func (a *asm) find(export string) *asmFunc {
	return &a.funcs[slices.IndexFunc(a.funcs, func(f asmFunc) bool { return f.name == export })]
}

// set gives an export a new body.
func (a *asm) set(export string, parts ...any) *asm {
	a.find(export).body = code(parts...)
	return a
}

// first puts code before the body of an export, which goes on as before.
func (a *asm) first(export string, parts ...any) *asm {
	f := a.find(export)
	f.body = append(code(parts...), f.body...)
	return a
}

// onCall puts code before the body of an export that runs in its nth call only.
func (a *asm) onCall(export string, nth int64, parts ...any) *asm {
	g := a.global()
	return a.first(export, opGlobalGet, g, i32Const(1), opI32Add, opGlobalSet, g,
		opGlobalGet, g, i32Const(nth), opI32Eq, opIf, blockVoid, code(parts...), opEnd)
}

// global adds a mutable i32 and returns its index.
func (a *asm) global() int {
	a.globals++
	return a.globals - 1
}

func (a *asm) drop(export string) *asm {
	a.funcs = slices.DeleteFunc(a.funcs, func(f asmFunc) bool { return f.name == export })
	return a
}

// add appends a function and returns its index.
func (a *asm) add(f asmFunc) int {
	n := len(a.funcs)
	for _, i := range a.imports {
		if i.kind == nil {
			n++
		}
	}
	a.funcs = append(a.funcs, f)
	return n
}

// imported adds a function import behind the two of good and moves nothing: the bodies of
// good call imports only. It returns its index.
func (a *asm) imported(module, name string, params, results []byte) int {
	a.imports = append(a.imports, asmImport{module: module, name: name, params: params, results: results})
	return len(a.imports) - 1
}

// retype gives an export another type; the body traps.
func (a *asm) retype(export string, params, results []byte) *asm {
	f := a.find(export)
	f.params, f.results, f.body = params, results, code(opUnreachable)
	return a
}

// manifest gives the module another manifest and the room for it.
func (a *asm) manifest(json string) *asm {
	a.data = []byte(json)
	a.pages = max(a.pages, uint32(dataAt+len(json))>>16+1)
	return a.set("kv_manifest", viewOf(dataAt, int64(len(json))))
}

// boundaries returns where the sections of a module begin, and its end.
func boundaries(b []byte) (at []int) {
	i := len(head)
	for i < len(b) {
		at = append(at, i)
		n, shift := 0, 0
		for i++; ; i++ {
			n |= int(b[i]&0x7f) << shift
			shift += 7
			if b[i] < 0x80 {
				break
			}
		}
		i += 1 + n
	}
	return append(at, i)
}

// replaced returns the module with the content of one section replaced.
func replaced(b []byte, id byte, content []byte) []byte {
	at := boundaries(b)
	for k := range len(at) - 1 {
		if b[at[k]] == id {
			return slices.Concat(b[:at[k]], section(id, content), b[at[k+1]:])
		}
	}
	panic("zoo: no such section")
}

// repeat returns n copies of b.
func repeat(b []byte, n int) []byte { return bytes.Repeat(b, n) }
