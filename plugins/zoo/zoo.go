// Package zoo holds WebAssembly modules that are bad on purpose, one for each crime, for
// the tests of everything that opens a plugin: whatever a file holds, the program that
// opens it must say what is wrong, go on, and be no larger afterwards.
//
// Each module is a right rule of full attention, put together by hand, with one thing
// changed; so what is said of it is said of the crime. The rule itself is accepted
// (Good). A few of the animals only look dangerous: they stay within the limits and do
// no harm, and are marked so. All others must be refused.
//
// The messages are in testdata/messages.txt, as an author reads them from tierd check.
package zoo

import (
	"fmt"
	"strings"
)

// A Crime is a bad module.
type Crime struct {
	// Name is lower case with dashes, and a file name.
	Name string
	// What it does, in words that go on from "a module that".
	What string
	Wasm []byte
	// Harmless says that it stays within the limits, and is accepted.
	Harmless bool
}

// Good returns the module that all others are made from, a rule named t without
// parameters, of mask causal. It is accepted.
func Good() []byte { return good().bytes() }

// Modules returns the zoo, in a stable order. It is built anew for each call: some of the
// animals are large.
func Modules() []Crime {
	var all []Crime
	for _, part := range [][]Crime{runaways(), liars(), keepers(), shapes(), malformed(), manifests(), bombs()} {
		all = append(all, part...)
	}
	return all
}

// functions are the exports that a host calls.
var functions = []string{"kv_manifest", "kv_open", "kv_reach", "kv_scan", "kv_need"}

// made is a crime of a module of this package's assembler.
func made(name, what string, a *asm) Crime { return Crime{Name: name, What: what, Wasm: a.bytes()} }

const wasi = "wasi_snapshot_preview1"

// runaways do not end, or end in a trap.
func runaways() (all []Crime) {
	spin := forever()
	for _, f := range functions {
		all = append(all, made("spins-in-"+strings.TrimPrefix(f, "kv_"), "spins in "+f, good().first(f, spin)))
	}
	initialize := good()
	initialize.add(asmFunc{name: "_initialize", body: spin})
	start := good()
	start.start = "begin"
	start.add(asmFunc{name: "begin", body: spin})
	recursing := good()
	recursing.first("kv_reach", get(0), opCall, uleb(fnFail+4), opDrop) // kv_reach itself
	mutual := good()
	other := mutual.add(asmFunc{locals: 0, body: code(i32Const(0), opCall, uleb(fnFail+5), opDrop)}) // kv_scan
	mutual.first("kv_scan", opCall, uleb(uint64(other)))
	deep := good()
	n := deep.add(asmFunc{locals: 1000})
	deep.funcs[n-2].body = call(n)
	deep.first("kv_need", call(n))
	return append(all,
		made("spins-in-initialize", "spins in _initialize", initialize),
		made("spins-in-start", "spins in its start section", start),
		made("spins-through-calls", "calls an empty function without end in kv_reach", callsForever()),
		made("spins-late", "spins in its thousandth scan", good().onCall("kv_scan", 1000, spin)),
		made("recurses", "calls itself in kv_reach", recursing),
		made("recurses-by-two", "has two functions that call each other in kv_scan", mutual),
		made("recurses-with-locals", "calls itself in kv_need, with a thousand variables each time", deep),
		made("grows-memory", "asks for memory without end in kv_reach", good().first("kv_reach", forever(i32Const(1), opMemoryGrow, 0, opDrop))),
		made("copies-gigabytes", "copies 4 MiB without end in kv_reach", bulk(bulkCopy)),
		made("fills-gigabytes", "fills 4 MiB without end in kv_reach", bulk(bulkFill)),
		made("asks-without-end", "pulls its input without end in kv_scan", good().first("kv_scan", forever(call(fnInput, inputAt, inputMax), opDrop))),
		made("complains-without-end", "gives a reason without end in kv_scan", good().first("kv_scan", forever(call(fnFail, 0, 65536)))),
		floods(), randoms(),
		made("traps", "traps in kv_reach", good().first("kv_reach", opUnreachable)),
		made("traps-late", "traps in the third call of kv_reach", good().onCall("kv_reach", 3, opUnreachable)),
		made("divides-by-zero", "divides by zero in kv_scan", good().first("kv_scan", i32Const(1), i32Const(0), opI32DivU, opDrop)),
		made("reads-outside", "reads outside its memory in kv_need", good().first("kv_need", i32Const(-8), opI64Load, 3, 0, opDrop)),
		made("calls-nothing", "calls an empty element of its table", nullCall()),
		exits("exits", "calls proc_exit in kv_reach", "kv_reach", 3),
		exits("exits-well", "calls proc_exit with 0 in kv_scan", "kv_scan", 0),
		exits("exits-at-once", "calls proc_exit with 0 in _initialize", "_initialize", 0),
		made("start-traps", "traps in its start section", startOf(code(opUnreachable))),
		made("bad-input-pointer", "gives kv.input a buffer outside its memory", good().first("kv_reach", call(fnInput, 65530, 4096), opDrop)),
		made("bad-fail-pointer", "gives kv.fail a reason outside its memory", good().set("kv_reach", call(fnFail, -1, 100), i64Const(-1))),
		made("long-reason", "gives kv.fail a reason of 1 MiB", longReason()),
		made("rude-reason", "gives kv.fail a reason that commands the terminal", rudeReason()),
	)
}

func callsForever() *asm {
	a := good()
	n := a.add(asmFunc{})
	return a.first("kv_reach", forever(call(n)))
}

func bulk(op int) *asm {
	const size = 4 << 20
	a := good()
	a.pages = 2*size>>16 + 1
	if op == bulkFill {
		return a.first("kv_reach", forever(i32Const(0), i32Const(7), i32Const(size), opBulk, bulkFill, 0))
	}
	return a.first("kv_reach", forever(i32Const(size), i32Const(0), i32Const(size), opBulk, bulkCopy, 0, 0))
}

// floods prints without end to standard error.
func floods() Crime {
	a := good()
	n := a.imported(wasi, "fd_write", []byte{tI32, tI32, tI32, tI32}, []byte{tI32})
	store := func(at, v int64) []byte { return code(i32Const(at), i32Const(v), opI32Store, 2, 0) }
	return made("floods", "prints to standard error without end in kv_reach",
		a.first("kv_reach", store(8, outputAt), store(12, 32768), forever(call(n, 2, 8, 1, 16), opDrop)))
}

// randoms asks for 8 MiB of random numbers without end: much work for each of its own
// instructions.
func randoms() Crime {
	a := good()
	a.pages = 140
	n := a.imported(wasi, "random_get", []byte{tI32, tI32}, []byte{tI32})
	return made("randoms", "asks WASI for 8 MiB of random numbers without end in kv_reach",
		a.first("kv_reach", forever(call(n, 65536, 8<<20), opDrop)))
}

func nullCall() *asm {
	a := good()
	a.table = code(tFuncref, 0, 1)
	return a.first("kv_reach", i32Const(0), opCallIndirect, 2, 0) // of the type of kv_abi_1
}

func exits(name, what, export string, status int64) Crime {
	a := good()
	n := a.imported(wasi, "proc_exit", []byte{tI32}, nil)
	if export == "_initialize" {
		a.add(asmFunc{name: export})
	}
	return made(name, what, a.first(export, call(n, status)))
}

func startOf(body []byte) *asm {
	a := good()
	a.start = "begin"
	a.add(asmFunc{name: "begin", body: body})
	return a
}

func longReason() *asm {
	a := good()
	a.pages = 32
	return a.set("kv_reach", i32Const(65536), i32Const('x'), i32Const(1<<20), opBulk, bulkFill, 0, call(fnFail, 65536, 1<<20), i64Const(-1))
}

func rudeReason() *asm {
	const reason = "\x1b[2J\x1b]0;owned\x07\r\nACCEPTED\n"
	a := good()
	a.data = append([]byte(goodManifest), reason...)
	return a.set("kv_reach", call(fnFail, int64(dataAt+len(goodManifest)), int64(len(reason))), i64Const(-1))
}

// liars answer what ABI version 1 does not allow, or what is not so.
func liars() (all []Crime) {
	store := func(at, v int64) []byte { return code(i32Const(at), i32Const(v), opI32Store, 2, 0) }
	for _, f := range []string{"kv_reach", "kv_scan", "kv_need"} {
		short := strings.TrimPrefix(f, "kv_")
		all = append(all,
			made("short-view-"+short, "answers "+f+" with a view that is too short", good().set(f, viewOf(outputAt, 0))),
			made("long-view-"+short, "answers "+f+" with a view that is too long", good().set(f, viewOf(outputAt, 30000))),
			made("answers-minus-3-"+short, "answers "+f+" with -3", good().set(f, i64Const(-3))),
		)
	}
	return append(all,
		made("view-outside", "answers kv_reach with a view that ends outside its memory", good().set("kv_reach", readInput(), load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), answer(65536, 0))),
		made("view-far-outside", "answers kv_scan with a view at 2 GiB", good().set("kv_scan", readInput(), load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), answer(1<<31-1, 8))),
		made("no-resume-in-reach", "answers kv_reach with -2", good().set("kv_reach", i64Const(-2))),
		made("smallest-answer", "answers kv_need with the smallest number", good().set("kv_need", i64Const(-1<<63))),
		made("no-reason", "answers kv_scan with -1 and gives no reason", good().set("kv_scan", i64Const(-1))),
		made("never-resumes", "says of every point that no KV can be resumed there", good().set("kv_need", i64Const(-2))),
		made("supply-outside", "sets padding bits in what it stores", good().first("kv_reach", code(call(fnInput, inputAt, inputMax), opDrop,
			load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), store(outputAt, -1), answer(outputAt, 0), opReturn))),
		made("demand-outside", "sets padding bits in what it demands", scanAnswering(store(outputAt+8, -1))),
		made("demand-of-misses", "demands what is not there", scanAnswering(store(outputAt, 0), upTo(lChunks, setBit(outputAt+8)))),
		made("usable-beyond", "calls more chunks usable than there are", scanAnswering(i32Const(outputAt), get(lChunks), i32Const(1), opI32Add, opI32Store, 2, 0)),
		made("unknown-flags", "sets flags that do not exist", scanAnswering(store(outputAt+4, 2))),
		made("bad-handle", "opens with a handle beyond 2^31-1", good().set("kv_open", i64Const(1<<31))),
		made("open-minus-3", "opens with -3", good().set("kv_open", i64Const(-3))),
		made("open-fails", "does not open, and gives no reason", good().set("kv_open", i64Const(-1))),
		made("stores-nothing", "stores nothing, and so is right only when nobody asks", good().set("kv_reach",
			readInput(), load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), answer(outputAt, 0))),
	)
}

// scanAnswering is good with a scan that empties its view, runs a body and answers the
// view, whatever the table says.
func scanAnswering(body ...any) *asm {
	return good().set("kv_scan", readInput(), load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), code(body...), answer(outputAt, 8))
}

// keepers keep state between calls.
func keepers() []Crime {
	nothing := code(readInput(), load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), answer(outputAt, 0), opReturn)
	once := good()
	once.onCall("kv_need", 1, nothing)
	counting := good()
	g := counting.global()
	counting.first("kv_reach", opGlobalGet, g, i32Const(1), opI32Add, opGlobalSet, g,
		opGlobalGet, g, i32Const(3), opI32RemU, opI32Eqz, opIf, blockVoid, nothing, opEnd)
	late := good()
	g = late.global()
	late.first("kv_need", opGlobalGet, g, i32Const(1), opI32Add, opGlobalSet, g,
		i32Const(2000), opGlobalGet, g, opI32LtU, opIf, blockVoid, nothing, opEnd)
	prompt := good()
	g = prompt.global()
	prompt.first("kv_need", code(readInput()), opGlobalGet, g, load(24), opI32Eq, opIf, blockVoid, nothing, opEnd, load(24), opGlobalSet, g)
	return []Crime{
		made("keeps-state", "answers every third kv_reach with nothing", counting),
		made("shy", "answers the first kv_need of an instance with nothing", once),
		made("remembers-the-prompt", "answers kv_need with nothing when the prompt is as long as before", prompt),
		made("tires", "answers kv_need with nothing after 2,000 calls", late),
		made("shares-handles", "answers by the rule that was opened last", lastOpened()),
	}
}

// lastOpened holds one rule with a parameter that says how much of the prompt it stores;
// all its handles are one.
func lastOpened() *asm {
	a := good()
	g := a.global()
	a.set("kv_open", call(fnInput, inputAt, inputMax), opDrop, load(8), opGlobalSet, g, i64Const(0))
	a.first("kv_scan", opGlobalGet, g, opI32Eqz, opIf, blockVoid, readInput(),
		load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(), answer(outputAt, 8), opReturn, opEnd)
	return a.manifest(`{"rules":[{"name":"t","version":"1","kind":"spec","mask":"causal","params":[{"name":"on","min":0,"max":1,"default":1}]}]}`)
}

// shapes have the wrong imports and exports.
func shapes() (all []Crime) {
	for i, f := range functions {
		all = append(all,
			made("without-"+strings.TrimPrefix(f, "kv_"), "has no export "+f, good().drop(f)),
			made("type-of-"+strings.TrimPrefix(f, "kv_"), "exports "+f+" with another type", good().retype(f, []byte{tI64, tI32}, []byte{tI32})))
		if i > 0 {
			all = append(all, made("no-result-"+strings.TrimPrefix(f, "kv_"), "exports "+f+" without a result", good().retype(f, []byte{tI32}, nil)))
		}
	}
	importing := func(module, name string, params, results []byte) *asm {
		a := good()
		a.imported(module, name, params, results)
		return a
	}
	other := func(module, name string, kind []byte) *asm {
		a := good()
		a.imports = append(a.imports, asmImport{module: module, name: name, kind: kind})
		return a
	}
	major := good()
	major.find("kv_abi_1").name = "kv_abi_2"
	initialize := good()
	initialize.add(asmFunc{name: "_initialize", params: []byte{tI32}})
	program := good()
	program.add(asmFunc{name: "_start"})
	input := good()
	input.imports[fnInput].params = []byte{tI64, tI64}
	input.set("kv_reach", opUnreachable).set("kv_scan", opUnreachable).set("kv_need", opUnreachable)
	noMemory := good()
	noMemory.memory = ""
	hidden := good()
	hidden.memory = "mem"
	foreign := good()
	foreign.pages, foreign.data = 0, nil
	foreign.imports = append(foreign.imports, asmImport{module: "env", name: "memory", kind: code(2, 0, 1)})
	notMemory := good()
	notMemory.memory = ""
	notMemory.add(asmFunc{name: "memory"})
	return append(all,
		made("no-marker", "has no marker", good().drop("kv_abi_1")),
		made("other-major", "has the marker of ABI version 2", major),
		made("type-of-marker", "has a marker with a parameter", good().retype("kv_abi_1", []byte{tI32}, nil)),
		made("type-of-initialize", "has an _initialize with a parameter", initialize),
		made("type-of-input", "imports kv.input with another type", input),
		made("program", "is a program and no library", program),
		made("imports-kv-nope", "imports kv.nope", importing("kv", "nope", nil, nil)),
		made("imports-unknown-wasi", "imports a WASI function that does not exist", importing(wasi, "sock_open", nil, nil)),
		made("imports-wasi-type", "imports a WASI function with another type", importing(wasi, "fd_write", nil, nil)),
		made("imports-later-wasi", "imports a later WASI", importing("wasi:io/streams@0.2.0", "read", nil, nil)),
		made("imports-env-foo", "imports env.foo", importing("env", "foo", []byte{tI32}, nil)),
		made("imports-memory", "imports its memory", foreign),
		made("imports-table", "imports a table", other("env", "table", code(1, tFuncref, 0, 1))),
		made("imports-global", "imports a global", other("env", "base", code(3, tI32, 0))),
		made("imports-long-name", "imports a function with a name of 1 MiB", importing("kv", strings.Repeat("n", 1<<20), nil, nil)),
		made("imports-rude-name", "imports a function whose name commands the terminal", importing("kv", "\x1b[2J\x1b]0;owned\x07\r\nACCEPTED", nil, nil)),
		made("no-memory-export", "does not export its memory", noMemory),
		made("memory-by-another-name", "exports its memory as mem", hidden),
		made("memory-is-a-function", "exports a function as memory", notMemory),
	)
}

// manifests say what is not so, or cannot be read.
func manifests() (all []Crime) {
	rule := func(fields string) string { return `{"rules":[{"name":"t","version":"1",` + fields + `}]}` }
	param := func(p string) string { return rule(`"kind":"spec","mask":"causal","params":[` + p + `]`) }
	for _, m := range []struct{ name, what, json string }{
		{"invents-a-mask", "names a mask that does not exist", rule(`"kind":"spec","mask":"telepathic"`)},
		{"mask-of-a-window", "claims the mask of a window but needs everything", rule(`"kind":"spec","mask":"window","mask_args":["w"],"params":[{"name":"w","min":1,"max":64,"default":8}]`)},
		{"mask-without-argument", "claims a window and names no parameter for it", rule(`"kind":"spec","mask":"window"`)},
		{"mask-divides-by-zero", "claims chunks of a size that may be 0", rule(`"kind":"spec","mask":"attention-chunk","mask_args":["c"],"params":[{"name":"c","min":0,"max":9}]`)},
		{"manifest-is-no-json", "has a manifest that is not JSON", "rules: [t]"},
		{"manifest-is-empty", "has an empty manifest", ""},
		{"manifest-unknown-field", "has a manifest with an unknown field", rule(`"kind":"spec","mask":"causal","colour":"red"`)},
		{"manifest-goes-on", "has two manifests", goodManifest + goodManifest},
		{"manifest-of-numbers", "has a manifest with a number for a name", `{"rules":[{"name":7}]}`},
		{"manifest-negative", "has a manifest with a negative range", param(`{"name":"x","min":-1,"max":9}`)},
		{"manifest-huge-number", "has a manifest with a number of 10,000 digits", param(`{"name":"x","min":0,"max":` + strings.Repeat("9", 10_000) + `}`)},
		{"manifest-nests", "has a manifest of 100,000 brackets", strings.Repeat("[", 100_000)},
		{"manifest-huge", "has a manifest of 300,000 bytes", rule(`"kind":"spec","mask":"causal"`) + strings.Repeat(" ", 300_000)},
		{"manifest-no-rules", "has a manifest without rules", `{"rules":[]}`},
		{"manifest-65-rules", "has a manifest with 65 rules", manyRules(65)},
		{"manifest-rule-twice", "has a manifest with one rule twice", `{"rules":[{"name":"t","version":"1","kind":"policy"},{"name":"t","version":"2","kind":"policy"}]}`},
		{"manifest-min-above-max", "has a parameter whose min is above its max", param(`{"name":"x","min":9,"max":1}`)},
		{"manifest-enum-mismatch", "has an enum with more names than its range", param(`{"name":"x","min":0,"max":1,"enum":["a","b","c"]}`)},
		{"manifest-default-outside", "has a default outside its range", param(`{"name":"x","min":2,"max":3}`)},
		{"manifest-33-parameters", "has 33 parameters", param(manyParams(33))},
		{"manifest-rude-name", "has a rule whose name commands the terminal", `{"rules":[{"name":"\u001b[2J","version":"1","kind":"policy"}]}`},
		{"manifest-long-name", "has a rule with a name of 100,000 letters", `{"rules":[{"name":"` + strings.Repeat("t", 100_000) + `","version":"1","kind":"policy"}]}`},
		{"manifest-of-a-policy", "is a policy where a spec is needed", rule(`"kind":"policy"`)},
		{"manifest-of-a-state", "claims to keep recurrent states, in chunks of two blocks", rule(`"kind":"spec","mask":"state"`)},
	} {
		all = append(all, made(m.name, m.what, good().manifest(m.json)))
	}
	return append(all,
		made("mask-of-everything", "claims to read everything but needs only the last 8 tokens", lastChunk()),
		made("manifest-outside", "has a manifest outside its memory", good().set("kv_manifest", viewOf(65530, 100))),
		made("manifest-claims-4-gigabytes", "has a manifest of 4 GiB", good().set("kv_manifest", viewOf(0, 1<<32-1))),
		made("manifest-fails", "has no manifest, and says why", good().set("kv_manifest", call(fnFail, dataAt, 9), i64Const(-1))),
		made("manifest-traps", "traps in kv_manifest", good().set("kv_manifest", opUnreachable)),
	)
}

// lastChunk needs only the chunk that holds the token before the resume point.
func lastChunk() *asm {
	return good().set("kv_need", readInput(),
		load(atHi), set(lChunks), bytesOf(),
		load(atResume), opI32Eqz, opIf, blockVoid, answer(outputAt, 0), opReturn, opEnd,
		load(atResume), i32Const(1), opI32Sub, load(atChunkTokens), opI32DivU, set(lI),
		setBit(outputAt), answer(outputAt, 0))
}

func manyRules(n int) string {
	var rules []string
	for i := range n {
		rules = append(rules, fmt.Sprintf(`{"name":"t%d","version":"1","kind":"spec","mask":"causal"}`, i))
	}
	return `{"rules":[` + strings.Join(rules, ",") + `]}`
}

func manyParams(n int) string {
	var params []string
	for i := range n {
		params = append(params, fmt.Sprintf(`{"name":"x%d","min":0,"max":1}`, i))
	}
	return strings.Join(params, ",")
}
