package fuel

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func uleb(v uint64) []byte { return binary.AppendUvarint(nil, v) }

func name(s string) []byte { return append(uleb(uint64(len(s))), s...) }

// code joins bytes.
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

func vector(items ...[]byte) []byte {
	return append(uleb(uint64(len(items))), slices.Concat(items...)...)
}

// raw is a module of one section.
func raw(id byte, content ...any) []byte {
	c := code(content...)
	return slices.Concat([]byte("\x00asm\x01\x00\x00\x00"), []byte{id}, uleb(uint64(len(c))), c)
}

// with appends the section of another module.
func with(module []byte, id byte, content ...any) []byte {
	return append(module, raw(id, content...)[8:]...)
}

// A few bytes must not make the decoder ask for gigabytes.
func TestSectionsThatClaimTooMuch(t *testing.T) {
	huge := uleb(1<<32 - 1)
	const claims = "it announces 4294967295 items of at least"
	types := func(n int) []byte { return raw(secType, uleb(uint64(n)), slices.Repeat([]byte{0x60, 0, 0}, n)) }
	// body is a module of one function without parameters.
	body := func(parts ...any) []byte {
		f := code(0, code(parts...), opEnd)
		return with(with(types(1), secFunction, 1, 0), secCode, vector(append(uleb(uint64(len(f))), f...)))
	}
	for _, test := range []struct {
		module []byte
		want   string
	}{
		{raw(secCustom, huge), "section custom, byte 15: " + claims + " 1 bytes, and 0 bytes are left"},
		{raw(secCustom, 1, 0xff), `section custom, byte 12: its name "\xff" is not UTF-8`},
		{raw(secType, huge), "section type, byte 15: " + claims + " 3 bytes, and 0 bytes are left"},
		{raw(secType, 1, 0x60, huge), "section type, byte 17: " + claims + " 1 bytes, and 0 bytes are left"},
		{raw(secType, 1, 0x5f, 0, 0), "section type, byte 12: type form 0x5f; only functions, 0x60, are supported"},
		{raw(secType, 1, 0x60, 1, 0x64, 0), "section type, byte 14: value type 0x64"},
		{raw(secType, 1, 0x60, 65, slices.Repeat([]byte{TypeI32}, 65), 0), "section type, byte 79: a type of 65 parameters and results; at most 64 are allowed"},
		{types(typesMax + 1), "section type, byte 12: 20129 types; at most 20128 are allowed"},
		{raw(secExport, uleb(exportsMax+1), slices.Repeat([]byte{0, 2, 0}, exportsMax+1)), "section export, byte 12: 20129 exports; at most 20128 are allowed"},
		{raw(secElement, uleb(segmentsMax+1), slices.Repeat([]byte{1, 0, 0}, segmentsMax+1)), "section element, byte 12: 100001 segments; at most 100000 are allowed"},
		{raw(secData, uleb(segmentsMax+1), slices.Repeat([]byte{1, 0}, segmentsMax+1)), "section data, byte 12: 100001 segments; at most 100000 are allowed"},
		{raw(secImport, huge), "section import, byte 15: " + claims + " 4 bytes, and 0 bytes are left"},
		{raw(secImport, 1, 0, 0, 9, 0), "section import, byte 14: import of kind 9"},
		{raw(secImport, 1, name("m"), name("t"), 1, 0x70, 0, huge), "section import, byte 16: it imports the table m.t; a module must define its own"},
		{raw(secImport, 1, name("m"), name("g"), 3, TypeI32, 0), "section import, byte 16: it imports the global variable m.g; a module must define its own"},
		{raw(secImport, 1, 0, 0, 0, 0), "section import, byte 15: type 0 of 0"},
		{with(types(1), secImport, uleb(importsMax+1), slices.Repeat([]byte{0, 0, 0, 0}, importsMax+1)), "section import, byte 535: more than 128 imports"},
		{raw(secFunction, huge), "section function, byte 15: " + claims + " 1 bytes, and 0 bytes are left"},
		{with(types(1), secFunction, uleb(functionsMax+1), make([]byte, functionsMax+1)), "section function, byte 20022: 20001 functions; at most 20000 are allowed"},
		{raw(secFunction, 1, 0), "section function, byte 12: type 0 of 0"},
		{raw(secTable, 1, 0x70, 0, uleb(TableElementsMax+1)), "section table, byte 16: a table of 65537 elements; at most 65536 are allowed"},
		{raw(secTable, 17, make([]byte, 60)), "section table, byte 11: 17 tables; at most 16 are allowed"},
		{raw(secTable, 1, 0x40, 0, 0x70, 0, 0), "section table, byte 11: a table with an initial value; only null is supported"},
		{raw(secTable, 1, 0x70, 4, 0), "section table, byte 13: limits with flags 0x4; 0 and 1 are supported"},
		{raw(secTable, 1, 0x7f, 0, 0), "section table, byte 12: type 0x7f; funcref, 0x70, and externref, 0x6f, are the types of references"},
		{with(raw(secTable, 0), secTable, 0), "section table, byte 13: there is one already"},
		{with(raw(secTable, 0), secType, 0), "section type, byte 13: it stands after section table"},
		{raw(secMemory, 1, 3, 0, 0), "section memory, byte 12: limits with flags 0x3; 0 and 1 are supported"},
		{raw(secGlobal, huge), "section global, byte 15: " + claims + " 3 bytes, and 0 bytes are left"},
		{raw(secGlobal, 1, TypeI32, 0, 0x10), "section global, byte 14: instruction 0x10 in a constant expression"},
		{raw(secGlobal, 1, TypeI32, 0, opGlobalGet, 0, opEnd), "section global, byte 15: global 0 of 0"},
		{raw(secGlobal, uleb(globalsMax+1), slices.Repeat([]byte{TypeI32, 0, opI32Const, 0, opEnd}, globalsMax+1)), "section global, byte 10258: 2049 global variables; at most 2048 are allowed"},
		{raw(secExport, 1, huge), "section export, byte 16: " + claims + " 1 bytes, and 0 bytes are left"},
		{raw(secExport, 1, name("tierd:x"), 3, 0), `section export, byte 19: it exports "tierd:x"; names that begin with "tierd:" are the host's`},
		{raw(secExport, 1, name("f"), 0, 0), "section export, byte 15: function 0 of 0"},
		{raw(secExport, 1, name("g"), 3, 0), "section export, byte 15: global 0 of 0"},
		{with(with(raw(secType, 1, 0x60, 1, TypeI32, 0), secFunction, 1, 0), secStart, 0), "section start, byte 22: the function to start with takes 1 parameters and has 0 results; it must have none"},
		{raw(secElement, 1, 1, 0, huge), "section element, byte 18: " + claims + " 1 bytes, and 0 bytes are left"},
		{raw(secElement, 1, 4, 0x41, 0, 0x0b, huge), "section element, byte 20: " + claims + " 1 bytes, and 0 bytes are left"},
		{raw(secElement, 1, 8, 0), "section element, byte 12: element segment of kind 8"},
		{raw(secElement, 1, 5, TypeFuncref, 0x81, 0x80, 4, slices.Repeat([]byte{opRefNull, TypeFuncref, opEnd}, TableElementsMax+1)), "section element, byte 196629: more than 65536 elements in all segments together"},
		{raw(secElement, 1, 1, 0, 1, 0), "section element, byte 15: function 0 of 0"},
		{raw(secCode, 1, 2, 0, opEnd), "it declares 0 functions and has the code of 1"},
		{with(types(1), secFunction, 1, 0), "it declares 1 functions and has the code of 0"},
		{with(with(types(1), secFunction, 1, 0), secCode, 1, 6, 1, uleb(localsMax+1), TypeI32, opEnd), "section code, byte 27: more than 1048576 locals in all functions together"},
		{with(with(types(1), secFunction, 1, 0), secCode, 1, 2, 1, 1), "section code, byte 23: it announces 1 items of at least 2 bytes, and 1 bytes are left"},
		{raw(secData, 1, 1, huge), "section data, byte 17: " + claims + " 1 bytes, and 0 bytes are left"},
		{raw(secData, 1, 0, 0x44), "section data, byte 13: it ends in the middle of an item"},
		{raw(secData, 1, 3, 0), "section data, byte 12: data segment of kind 3"},
		{raw(secFunction), "section function, byte 10: it ends in the middle of an item"},
		{with(raw(secType, 0), secFunction, 0xff, 0xff, 0xff, 0xff, 0xff, 1), "section function, byte 18: a number has more than 32 bits"},
		{raw(secFunction, 0x80, 0x80, 0x80, 0x80, 0x10), "section function, byte 15: a number has more than 32 bits"},
		{raw(secFunction, 0, 0), "section function, byte 11: 1 bytes follow its last item"},
		{raw(99), "section 99, byte 9: this host knows no such section"},
		{body(opGlobalSet, 0), "section code, byte 25: global 0 of 0"}, // the counter
		{body(opCall, 1), "section code, byte 25: function 1 of 1"},    // the function that burns
		{body(opRefFunc, 1), "section code, byte 25: function 1 of 1"},
		{body(opBlock, 1, opEnd), "section code, byte 25: type 1 of 1"}, // that function's type
		{body(opBlock, 0xff, 0x7f, opEnd), "section code, byte 26: type 16383 of 1"},
		{body(opBr, 1), "section code, byte 25: block 1 of 1"},
		{body(opElse), "section code, byte 24: an else without an if"},
		{body(opLocalGet, 0), "section code, byte 25: local 0 of 0"},
		{body(0x12, 0), "section code, byte 23: instruction 0x12, which this host does not know"},
		{body(0xfe, 0), "section code, byte 23: instruction 0xfe, which this host does not know"},
		{body(0xff), "section code, byte 23: instruction 0xff, which this host does not know"},
		{body(prefixMisc, 0x12), "section code, byte 25: instruction 0xfc 0x12, which this host does not know"},
		{body(prefixMisc, 0x8b, 0), "section code, byte 25: instruction 0xfc 0x8b, which this host does not know"},
		{body(prefixVector, 0x80, 2), "section code, byte 26: instruction 0xfd 0x80, which this host does not know"},
		{body(prefixVector, 0x9a, 1), "section code, byte 26: instruction 0xfd 0x9a, which this host does not know"},
		{body(opMemorySize, 1), "section code, byte 25: a reserved byte is 0x1, not 0"},
		{body(opSelectTyped, 2), "section code, byte 25: a select of 2 types; one is supported"},
		{body(opI32Const, 0x80, 0x80, 0x80, 0x80, 0x80, 0), "section code, byte 29: a number has more than 5 bytes"},
		{body(opTableGet, 0), "section code, byte 25: table 0 of 0"},
		{body(opBlock, blockVoid), "section code, byte 26: it ends in the middle of an item"},
		{body(opEnd), "section code, byte 24: 1 bytes follow the end of a function"},
	} {
		_, err := Rewrite(test.module)
		assert.EqualError(t, err, "not a valid module: "+test.want)
	}
	// Functions share the bound on locals.
	half := code(uleb(6), 1, uleb(localsMax/2), 0x7f, opEnd)
	_, err := Rewrite(with(with(types(1), secFunction, 2, 0, 0), secCode, vector(half, half)))
	require.NoError(t, err)
	_, err = Rewrite(with(with(types(1), secFunction, 3, 0, 0, 0), secCode, vector(half, half, half)))
	require.ErrorContains(t, err, "more than 1048576 locals in all functions together")
}

// What this package adds to code is more for the compiler to do, and counts: a function
// without a branch has a charge for every few instructions.
func TestChargesAreWork(t *testing.T) {
	function := func(parts ...any) []byte {
		f := code(1, 1, TypeF32, code(parts...), opEnd)
		m := with(raw(secType, 1, 0x60, 0, 0), secFunction, 1, 0)
		return with(m, secCode, vector(append(uleb(uint64(len(f))), f...)))
	}
	long := func(roots int) []byte {
		return function(opLocalGet, 0, slices.Repeat([]byte{opF32Sqrt}, roots), opLocalSet, 0)
	}
	_, err := Rewrite(long(100_000)) // 0.7 s of the compiler's time
	require.NoError(t, err)
	_, err = Rewrite(long(1_000_000)) // minutes
	require.ErrorContains(t, err, "has 1 blocks, 0 branches, 0 calls and 1 locals; the runtime's compiler would take too long")
	_, err = Plain(long(1_000_000)) // has no charges
	require.NoError(t, err)

	// Values that wait on the stack live through all charges in between.
	waiting := func(values int) []byte {
		return function(slices.Repeat([]byte{opLocalGet, 0, opF32Sqrt}, values), slices.Repeat([]byte{0x92}, values-1), opLocalSet, 0)
	}
	_, err = Rewrite(waiting(20_000)) // 0.3 s
	require.NoError(t, err)
	_, err = Rewrite(waiting(200_000)) // 49 s
	require.ErrorContains(t, err, "the runtime's compiler would take too long")
}
