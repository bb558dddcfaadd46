package zoo

// Where the memory of good holds what. Its page is the guest's whole world.
const (
	dataAt   = 1024  // the manifest
	inputAt  = 4096  // the input of a call
	inputMax = 28672 // bytes of it
	outputAt = 32768 // a view
	marksAt  = 49152 // the view of a deferred scan
)

// Indexes of the imports of good.
const fnInput, fnFail = 0, 1

// Offsets in an input: of the Round's fields that good reads, and of what follows it.
const atChunkTokens, atStored, atResume, atLo, atHi, atStates = 16, 32, 40, 96, 100, 104

const goodManifest = `{"rules":[{"name":"t","version":"1","kind":"spec","mask":"causal"}]}`

// good returns a module that is in order: full attention. Each crime is good with one
// thing changed, so that what is said of it is said of the crime.
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
			{name: "kv_reach", params: handle, results: view, locals: 4, body: reachBody()},
			{name: "kv_scan", params: handle, results: view, locals: 5, body: scanBody()},
			{name: "kv_need", params: handle, results: view, locals: 4, body: needBody()},
		},
		pages: 1, memory: "memory",
	}
	return a.manifest(goodManifest)
}

// Locals of the bodies below; 0 is the handle.
const (
	lChunks = 1 + iota // how many chunks are asked for
	lEnd               // how many of them are set
	lI                 // the next of them
	lBytes             // of a bitmap
	lDeferred
)

// readInput pulls the input and empties both views.
func readInput() []byte {
	return code(call(fnInput, inputAt, inputMax), opDrop,
		i32Const(outputAt), i32Const(0), i32Const(65536-outputAt), opBulk, bulkFill, 0)
}

// bytesOf sets lBytes to the bytes of lChunks bits.
func bytesOf() []byte {
	return code(get(lChunks), i32Const(7), opI32Add, i32Const(3), opI32Shr, set(lBytes))
}

// setBit sets bit lI of a bitmap.
func setBit(bitmap int64) []byte {
	address := code(get(lI), i32Const(3), opI32Shr, i32Const(bitmap), opI32Add)
	return code(address, address, opI32Load8, 0, 0,
		i32Const(1), get(lI), i32Const(7), opI32And, opI32Shl, opI32Or, opI32Store8, 0, 0)
}

// upTo runs a body for every lI below a local.
func upTo(limit int, body ...any) []byte {
	return code(i32Const(0), set(lI), opBlock, blockVoid, opLoop, blockVoid,
		get(lI), get(limit), opI32GeU, opBrIf, 1,
		code(body...),
		get(lI), i32Const(1), opI32Add, set(lI), opBr, 0, opEnd, opEnd)
}

// answer is the view of lBytes and extra bytes at p.
func answer(p, extra int64) []byte {
	return code(i64Const(p), i64Const(32), opI64Shl, get(lBytes), i32Const(extra), opI32Add, opI64ExtendU, opI64Or)
}

// reachBody names every chunk of the range that is complete.
func reachBody() []byte {
	return code(readInput(),
		load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(),
		load(atStored), load(atChunkTokens), opI32DivU, set(lEnd),
		upTo(lChunks, get(lI), load(atLo), opI32Add, get(lEnd), opI32LtU, opIf, blockVoid, setBit(outputAt), opEnd),
		answer(outputAt, 0))
}

// scanBody counts to the first Miss and demands what is before it; when a Retry is before
// it, it is deferred and marks the Retries.
func scanBody() []byte {
	const lState = lEnd
	state := code(get(lI), i32Const(2), opI32Shr, i32Const(inputAt+atStates), opI32Add, opI32Load8, 0, 0,
		get(lI), i32Const(3), opI32And, i32Const(1), opI32Shl, opI32Shr, i32Const(3), opI32And)
	return code(readInput(), i32Const(0), set(lDeferred),
		load(atHi), load(atLo), opI32Sub, set(lChunks), bytesOf(),
		upTo(lChunks, state, set(lState), get(lState), opI32Eqz, opBrIf, 1,
			get(lState), i32Const(3), opI32Eq, opIf, blockVoid, i32Const(1), set(lDeferred), setBit(marksAt+8), opEnd,
			setBit(outputAt+8)),
		get(lDeferred), opIf, blockVoid,
		i32Const(marksAt), i32Const(1), opI32Store, 2, 4, answer(marksAt, 8), opReturn, opEnd,
		i32Const(outputAt), get(lI), opI32Store, 2, 0, answer(outputAt, 8))
}

// needBody names every chunk that holds a token before the resume point.
func needBody() []byte {
	return code(readInput(),
		load(atHi), set(lChunks), bytesOf(),
		load(atResume), load(atChunkTokens), opI32Add, i32Const(1), opI32Sub, load(atChunkTokens), opI32DivU, set(lEnd),
		upTo(lChunks, get(lI), get(lEnd), opI32LtU, opIf, blockVoid, setBit(outputAt), opEnd),
		answer(outputAt, 0))
}
