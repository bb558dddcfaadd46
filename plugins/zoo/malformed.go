package zoo

import (
	"fmt"
	"slices"
)

// The longest module that a host takes has 8 MiB; this one is longer.
const tooLargeBytes = 9 << 20

// malformed are bytes that are no module, or none that can be used.
func malformed() (all []Crime) {
	g := Good()
	for i, at := range boundaries(g) {
		if at < len(g) { // the last boundary is the whole module
			all = append(all, Crime{Name: fmt.Sprintf("truncated-before-section-%d", i+1), What: fmt.Sprintf("ends before its section number %d", i+1), Wasm: g[:at]})
		}
		if i > 0 {
			before := boundaries(g)[i-1]
			for _, cut := range []struct {
				where string
				at    int
			}{{"head", before + 1}, {"middle", (before + at) / 2}, {"end", at - 1}} {
				all = append(all, Crime{Name: fmt.Sprintf("truncated-in-section-%d-%s", i, cut.where),
					What: fmt.Sprintf("ends in its section number %d", i), Wasm: g[:cut.at]})
			}
		}
	}
	raw := func(name, what string, b []byte) { all = append(all, Crime{Name: name, What: what, Wasm: b}) }
	raw("empty", "is empty", nil)
	raw("half-a-head", "has 4 bytes", []byte(head)[:4])
	raw("text", "is a shell script", []byte("#!/bin/sh\nexec true\n"))
	raw("elf", "is an executable", []byte("\x7fELF\x02\x01\x01\x00"))
	raw("component", "is a component", []byte("\x00asm\x0d\x00\x01\x00"))
	raw("wasm-version-2", "is of WebAssembly version 2", slices.Concat([]byte("\x00asm\x02\x00\x00\x00"), g[8:]))
	raw("bare-head", "is a module of nothing", []byte(head))
	raw("trailing-garbage", "has bytes behind its last section", slices.Concat(g, []byte("garbage")))
	raw("sections-twice", "has every section twice", slices.Concat(g, g[8:]))
	raw("sections-reversed", "has its sections in reverse order", reversedSections(g))
	raw("unknown-section", "has a section of an unknown kind", slices.Concat(g, section(99, []byte{1, 2, 3})))
	raw("tags", "has a section of exception tags", slices.Concat(g, section(13, code(1, 0, 0))))
	raw("endless-number", "has a section whose length does not end", slices.Concat([]byte(head), []byte{1}, repeat([]byte{0xff}, 64)))
	raw("two-memories", "has two memories", replaced(g, 5, code(2, 0, 1, 0, 1)))
	raw("memory-of-17-mib", "starts with 257 pages", replaced(g, 5, code(1, 0, uleb(257))))
	raw("memory-of-4-gib", "starts with 65,536 pages", replaced(g, 5, code(1, 0, uleb(65536))))
	raw("memory-shared", "has a shared memory", replaced(g, 5, code(1, 3, 1, 2)))
	raw("memory-64", "has a memory with 64-bit addresses", replaced(g, 5, code(1, 4, 1)))
	raw("memory-max-below-min", "has a memory whose maximum is below its minimum", replaced(g, 5, code(1, 1, 2, 1)))
	raw("claims-imports", "claims four thousand million imports", replaced(g, 2, uleb(1<<32-1)))
	raw("claims-functions", "claims four thousand million functions", replaced(g, 3, uleb(1<<32-1)))
	raw("claims-code", "claims a function of 4 GiB", replaced(g, 10, code(1, uleb(1<<32-1))))
	raw("more-code-than-functions", "has code for a function that it does not declare", replaced(g, 3, vector([]byte{0}, []byte{0})))
	raw("data-outside", "has data outside its memory", replaced(g, 11, vector(code(0, i32Const(65530), opEnd, uleb(100), repeat([]byte{1}, 100)))))
	all = append(all,
		made("stack-underflow", "takes from an empty stack", good().set("kv_reach", opDrop, i64Const(0))),
		made("wrong-result", "returns an i32 for an i64", good().set("kv_reach", i32Const(0))),
		made("unknown-instruction", "has an instruction that does not exist", good().set("kv_reach", 0xff, i64Const(0))),
		made("tail-call", "calls in place of returning", good().set("kv_open", 0x12, uleb(fnFail+3))),
		made("unknown-local", "reads a variable that it does not have", good().first("kv_open", get(1<<20), opDrop)),
		made("branches-nowhere", "branches out of more blocks than it has", good().first("kv_open", opBr, uleb(1<<20))),
	)
	return all
}

func reversedSections(b []byte) []byte {
	at := boundaries(b)
	out := []byte(head)
	for i := len(at) - 1; i > 0; i-- {
		out = append(out, b[at[i-1]:at[i]]...)
	}
	return out
}

// bombs are small or large modules that cost much more than they weigh, and some that
// only look so.
func bombs() (all []Crime) {
	with := func(name, what string, sections ...[]byte) Crime {
		a := good()
		a.after = sections
		return made(name, what, a)
	}
	lying := func(content []byte) []byte { return custom("name", section(1, content)) }
	many := make([][]byte, 100_000)
	for i := range many {
		many[i] = custom(fmt.Sprintf("x%d", i), []byte{0})
	}
	names := func(n int) []byte {
		entries := make([][]byte, n)
		for i := range entries {
			entries[i] = code(uleb(uint64(i)), name(fmt.Sprintf("function_number_%d_of_many", i)))
		}
		return custom("name", section(1, vector(entries...)))
	}
	first := good()
	first.before = [][]byte{custom("padding", make([]byte, tooLargeBytes))}
	all = append(all,
		made("9-mib", "has 9 MiB, most of them padding", first),
		with("custom-without-name", "has a custom section without a name", section(0, nil)),
		with("custom-name-outside", "has a custom section with a name longer than it", section(0, code(uleb(1<<32-1)))),
	)
	for _, c := range []Crime{ // of the name section nothing is read
		with("names-that-lie", "claims four thousand million function names", lying(uleb(1<<32-1))),
		with("names-that-lie-of-locals", "claims four thousand million names of variables", custom("name", section(2, code(1, 0, uleb(1<<32-1))))),
		with("name-outside", "has a name that is longer than its section", lying(code(1, 0, uleb(1<<32-1)))),
		with("custom-sections", "has 100,000 custom sections", many...),
		with("names", "has 100,000 names for functions that it does not have", names(100_000)),
		with("debug-sections", "has 4 MiB of debug sections", custom(".debug_info", make([]byte, 2<<20)), custom(".debug_line", make([]byte, 2<<20))),
		made("hoards-memory", "takes all the memory that it may have, and answers", good().first("kv_reach", i32Const(255), opMemoryGrow, 0, opDrop)),
		made("chatters", "prints 32 KiB to standard error in every call", chatters()),
		made("sleeps", "sleeps an hour in every scan", sleeps()),
	} {
		c.Harmless = true
		all = append(all, c)
	}
	table := good()
	table.table = code(tFuncref, 0, uleb(1<<32-1))
	grown := good()
	grown.table = code(tFuncref, 0, 1)
	// ref.null func, size, table.grow 0
	grown.first("kv_reach", forever(0xd0, tFuncref, i32Const(1<<16), opBulk, 0x0f, 0, opDrop))
	locals := good()
	locals.add(asmFunc{locals: 1<<20 + 1})
	maxLocals := good()
	maxLocals.add(asmFunc{locals: 1<<32 - 1})
	return append(all,
		made("table-of-4-billion", "has a table of four thousand million elements", table),
		made("grows-a-table", "lets its table grow without end in kv_reach", grown),
		made("locals", "has a function with a million variables", locals),
		made("locals-of-4-billion", "has a function with four thousand million variables", maxLocals),
		made("nests", "has 1,000 blocks in each other, and traps", nest(1000)),
		made("branches", "has a branch with a thousand targets, and does not open", branch(1000)),
		made("loops", "has 30 loops in each other that change 30 variables, and answers nonsense", loops(30, 30)),
		made("functions", "has 2,000 functions, and traps", manyFunctions(2000)),
	)
}

// CompileBombs returns modules that keep a compiler busy for minutes or hours. They have
// no place among the others, because a compiler cannot be interrupted: open them in a
// process that ends.
func CompileBombs() []Crime {
	return []Crime{
		made("loops", "has 800 loops in each other that change 800 variables", loops(800, 800)),
		made("nests", "has 100,000 blocks in each other", nest(100_000)),
		made("branches", "has a branch with a million targets", branch(1_000_000)),
		made("functions", "has 100,000 functions", manyFunctions(100_000)),
	}
}

func nest(blocks int) *asm {
	return good().first("kv_open", repeat(code(opBlock, blockVoid), blocks), repeat([]byte{opEnd}, blocks), opUnreachable)
}

// branch has a br_table whose targets are all the function's end.
func branch(targets int) *asm {
	return good().first("kv_open", i64Const(-1), i32Const(0), 0x0e, uleb(uint64(targets)), repeat([]byte{0}, targets+1))
}

func chatters() *asm {
	a := good()
	n := a.imported(wasi, "fd_write", []byte{tI32, tI32, tI32, tI32}, []byte{tI32})
	store := func(at, v int64) []byte { return code(i32Const(at), i32Const(v), opI32Store, 2, 0) }
	return a.first("kv_reach", store(8, outputAt), store(12, 32768), call(n, 2, 8, 1, 16), opDrop)
}

// sleeps polls a clock an hour ahead: a host whose clock stands still does not wait.
func sleeps() *asm {
	a := good()
	n := a.imported(wasi, "poll_oneoff", []byte{tI32, tI32, tI32, tI32}, []byte{tI32})
	// A subscription of 48 bytes at 64: userdata, tag 0 (clock), clock id 1, timeout.
	return a.first("kv_scan", i32Const(64), i32Const(0), i32Const(48), opBulk, bulkFill, 0,
		i32Const(80), i32Const(1), opI32Store, 2, 0,
		i32Const(88), i64Const(3600e9), opI64Store, 3, 0,
		call(n, 64, 128, 1, 256), opDrop)
}

// loops has many variables that change in nested loops.
func loops(locals, loops int) *asm {
	a := good()
	f := a.find("kv_reach")
	f.locals = locals
	var b []byte
	b = append(b, repeat(code(opLoop, blockVoid), loops)...)
	for l := 1; l <= locals; l++ {
		b = append(b, code(get(l), i32Const(1), opI32Add, set(l))...)
	}
	b = append(b, repeat(code(get(0), opBrIf, 0, opEnd), loops)...)
	f.body = append(b, viewOf(outputAt, 1<<20)...)
	return a
}

func manyFunctions(n int) *asm {
	a := good()
	a.first("kv_open", opUnreachable)
	for range n {
		a.add(asmFunc{params: []byte{tI32}, results: []byte{tI32}, body: code(get(0), i32Const(1), opI32Add)})
	}
	return a
}
