package fuel

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Bounds on what a few bytes can declare much of. The runtime's decoder makes room for
// as many items as a count says before it reads the first, and a host keeps them for
// each instance.
const (
	// localsMax bounds the local variables of all functions of a module together. A
	// plain Go guest has 50,000.
	localsMax = 1 << 20

	// TableElementsMax bounds the size of a table, at the start and after it has grown,
	// and all element segments together: the functions that can be called through a
	// pointer, 4,000 in a plain Go guest. An instance takes 8 bytes for each.
	TableElementsMax = 1 << 16

	// tablesMax bounds the tables of a module; compilers make one.
	tablesMax = 16

	// globalsMax bounds the global variables. An instance takes about 100 bytes for
	// each, and the compiler one load for each after every call. C has one,
	// AssemblyScript one for each variable at the top level.
	globalsMax = 2048

	// importsMax bounds the imports: WASI preview 1 has 46 functions, this host two more.
	importsMax = 128

	// functionsMax bounds the functions that a module defines. The compiler's time grows
	// with the square of their number: 20,000 that do nothing keep it busy for 4 s, and
	// 100,000 for minutes. A plain Go guest has 3,000.
	functionsMax = 20_000

	// typesMax bounds the types. The runtime keeps a record and a name of each: a million
	// take it 9 s and 400 MB. A plain Go guest has 15; more than one for each function and
	// import are of no use.
	typesMax = functionsMax + importsMax

	// exportsMax bounds the exports, which an instance copies each time it is made: for
	// 900,000 that takes 80 ms. A module that exports all its functions is within it.
	exportsMax = functionsMax + importsMax

	// segmentsMax bounds the data segments, and the element segments, of which an instance
	// copies every one when it is made: 15 ms for these. A plain Go guest has 29,000 of
	// data, because its linker leaves out runs of zeros.
	segmentsMax = 100_000

	// signatureMax bounds the parameters and results of a type together: a call of two
	// bytes moves as many values.
	signatureMax = 64
)

// Section ids.
const (
	secCustom = iota
	secType
	secImport
	secFunction
	secTable
	secMemory
	secGlobal
	secExport
	secStart
	secElement
	secCode
	secData
	secDataCount
	secCount
)

var sectionNames = [secCount]string{
	"custom", "type", "import", "function", "table", "memory", "global", "export", "start", "element", "code", "data", "data count",
}

// order is the order of sections in a module; custom ones may stand anywhere.
var order = [...]int{secType, secImport, secFunction, secTable, secMemory, secGlobal, secExport, secStart, secElement, secDataCount, secCode, secData}

// Value types.
const (
	TypeI32, TypeI64, TypeF32, TypeF64, TypeV128 = 0x7f, 0x7e, 0x7d, 0x7c, 0x7b
	TypeFuncref, TypeExternref                   = 0x70, 0x6f
)

// A module is what the sections before the code say, and the module that is written.
type module struct {
	sections [secCount]*reader // content of each, nil where it is missing
	types    []Func            // without names
	funcs    []int             // type of each function, imported ones first
	imports  []Func
	exports  []Func
	globals  int
	tables   int
	elements int // of all segments
	locals   uint64
	start    int // function, or -1
	group    int // units of a group, or plain
	work     int // of the compiler, estimated, in microseconds

	out  []byte
	fuel []byte // index of the counter, encoded
	burn []byte // index of the function for operations on many bytes, encoded
	// A charge is the code charge, the units to burn in five bytes, and the code check.
	charge, check []byte
}

// split finds the sections.
func (m *module) split(wasm []byte) error {
	r := &reader{b: wasm, at: 8}
	rank := -1
	for r.at < len(r.b) && r.err == nil {
		id := r.byte()
		if id >= secCount {
			r.in = fmt.Sprintf("section %d", id)
			r.refuse("this host knows no such section")
			break
		}
		r.in = "section " + sectionNames[id]
		size := r.count(1)
		if id == secCustom { // names and debug information, which the new code would belie
			c := &reader{b: r.b[:r.at+size], at: r.at, in: r.in, err: r.err}
			if name := c.bytes(); !utf8.Valid(name) {
				c.refuse("its name %q is not UTF-8", name)
			}
			r.at, r.err = r.at+size, c.err
			continue
		}
		if m.sections[id] != nil {
			r.refuse("there is one already")
		}
		at := rankOf(int(id))
		if at < rank {
			r.refuse("it stands after section %s", sectionNames[order[rank]])
		}
		rank = max(rank, at)
		m.sections[id] = &reader{b: r.b[:r.at+size], start: r.at, at: r.at, in: r.in, err: r.err}
		r.at += size
	}
	return r.err
}

func rankOf(id int) int {
	for i, o := range order {
		if o == id {
			return i
		}
	}
	return -1
}

// walk reads a section with read, to its last byte.
func (m *module) walk(id int, read func(*reader)) error {
	r := m.sections[id]
	if r == nil {
		return nil
	}
	read(r)
	if r.err == nil && r.at != len(r.b) {
		r.refuse("%d bytes follow its last item", len(r.b)-r.at)
	}
	return r.err
}

// readTypes reads everything that signatures are made of.
func (m *module) readTypes() error {
	for _, s := range []struct {
		id   int
		read func(*reader)
	}{
		{secType, func(r *reader) { r.atMost(typesMax, "types"); r.each(3, func() { m.readType(r) }) }},
		{secImport, func(r *reader) { r.each(4, func() { m.readImport(r) }) }},
		{secFunction, func(r *reader) {
			r.each(1, func() { m.funcs = append(m.funcs, r.index("type", len(m.types))) })
			if n := len(m.funcs) - len(m.imports); n > functionsMax {
				r.refuse("%d functions; at most %d are allowed", n, functionsMax)
			}
		}},
	} {
		if err := m.walk(s.id, s.read); err != nil {
			return err
		}
	}
	return nil
}

func (m *module) readType(r *reader) {
	if form := r.byte(); form != 0x60 {
		r.refuse("type form %#x; only functions, 0x60, are supported", form)
	}
	list := func() []byte {
		n := 0
		r.each(1, func() { r.valueType(); n++ })
		return r.b[r.at-n : r.at]
	}
	t := Func{Params: list(), Results: list()}
	if n := len(t.Params) + len(t.Results); n > signatureMax {
		r.refuse("a type of %d parameters and results; at most %d are allowed", n, signatureMax)
	}
	m.types = append(m.types, t)
}

func (m *module) readImport(r *reader) {
	f := Func{Module: string(r.bytes()), Name: string(r.bytes())}
	switch kind := r.byte(); kind {
	case 0: // function
		t := r.index("type", len(m.types))
		if r.err != nil {
			return
		}
		m.funcs = append(m.funcs, t)
		f.Params, f.Results = m.types[t].Params, m.types[t].Results
		m.imports = append(m.imports, f)
	case 1:
		r.refuse("it imports the table %s.%s; a module must define its own", f.Module, f.Name)
	case 2: // memory; what is wrong with that is for the caller to say
		limits(r)
	case 3:
		r.refuse("it imports the global variable %s.%s; a module must define its own", f.Module, f.Name)
	default:
		r.refuse("import of kind %d", kind)
	}
	if len(m.funcs) > importsMax {
		r.refuse("more than %d imports", importsMax)
	}
}

func limits(r *reader) (low, high uint32) {
	flags := r.byte()
	if flags > 1 {
		r.refuse("limits with flags %#x; 0 and 1 are supported", flags)
	}
	low, high = r.u32(), math.MaxUint32
	if flags == 1 {
		high = r.u32()
	}
	return low, high
}

// readTables walks the tables and writes them with none larger than TableElementsMax:
// the runtime has no limit of its own.
func (m *module) readTables(r *reader) {
	n := r.count(3)
	if n > tablesMax {
		r.refuse("%d tables; at most %d are allowed", n, tablesMax)
		return
	}
	m.tables = n
	m.section(secTable, func() {
		m.out = binary.AppendUvarint(m.out, uint64(n))
		for range n {
			if r.at < len(r.b) && r.b[r.at] == 0x40 {
				r.refuse("a table with an initial value; only null is supported")
			}
			m.out = append(m.out, r.referenceType(), 1)
			low, high := limits(r)
			if low > TableElementsMax {
				r.refuse("a table of %d elements; at most %d are allowed", low, TableElementsMax)
			}
			m.out = binary.AppendUvarint(m.out, uint64(low))
			m.out = binary.AppendUvarint(m.out, uint64(min(high, TableElementsMax)))
		}
	})
}

// readGlobals copies the global variables and adds the counter.
func (m *module) readGlobals(r *reader) {
	n, start := 0, 0
	if r != nil {
		n = r.count(3)
		start = r.at
		for range n {
			r.valueType()
			r.byte()
			m.expression(r)
			m.globals++
		}
		if m.globals > globalsMax {
			r.refuse("%d global variables; at most %d are allowed", m.globals, globalsMax)
		}
	}
	m.fuel = binary.AppendUvarint(nil, uint64(m.globals))
	m.charge = slices.Concat([]byte{opGlobalGet}, m.fuel, []byte{opI64Const})
	m.check = slices.Concat([]byte{opI64Sub, opGlobalSet}, m.fuel, []byte{opGlobalGet}, m.fuel,
		[]byte{opI64Const, 0, opI64LtS, opIf, blockVoid, opUnreachable, opEnd})
	m.section(secGlobal, func() {
		m.out = binary.AppendUvarint(m.out, uint64(n+1))
		if r != nil {
			m.out = append(m.out, r.b[start:r.at]...)
		}
		m.out = append(m.out, TypeI64, 1, opI64Const, 0, opEnd)
	})
}

// expression passes over a constant expression.
func (m *module) expression(r *reader) {
	for r.err == nil {
		switch op := r.byte(); op {
		case opEnd:
			return
		case opI32Const:
			r.leb(5)
		case opI64Const:
			r.leb(10)
		case opF32Const:
			r.skip(4)
		case opF64Const:
			r.skip(8)
		case opGlobalGet:
			r.index("global", m.globals)
		case opRefNull:
			r.referenceType()
		case opRefFunc:
			r.index("function", len(m.funcs))
		case prefixVector:
			if sub := r.byte(); sub != subV128Const {
				r.refuse("instruction 0xfd %#x in a constant expression", sub)
			}
			r.skip(16)
		default:
			r.refuse("instruction %#x in a constant expression", op)
		}
	}
}

// readExports reads the exports. Names that begin with Prefix are this package's.
func (m *module) readExports(r *reader) {
	r.atMost(exportsMax, "exports")
	r.each(3, func() {
		f := Func{Name: string(r.bytes())}
		if strings.HasPrefix(f.Name, Prefix) {
			r.refuse("it exports %q; names that begin with %q are the host's", f.Name, Prefix)
		}
		switch kind := r.byte(); kind {
		case 0:
			i := r.index("function", len(m.funcs))
			if r.err == nil {
				f.Params, f.Results = m.types[m.funcs[i]].Params, m.types[m.funcs[i]].Results
				m.exports = append(m.exports, f)
			}
		case 1, 2:
			r.u32() // the module's own are all there are
		case 3:
			if m.fuel != nil {
				r.index("global", m.globals)
			} else {
				r.u32()
			}
		default:
			r.refuse("export of kind %d", kind)
		}
	})
}

func (m *module) readStart(r *reader) {
	m.start = r.index("function", len(m.funcs))
	if r.err != nil {
		return
	}
	if t := m.types[m.funcs[m.start]]; len(t.Params)+len(t.Results) > 0 {
		r.refuse("the function to start with takes %d parameters and has %d results; it must have none", len(t.Params), len(t.Results))
	}
}

// element walks an element segment; its flags say which parts it has.
func (m *module) element(r *reader) {
	flags := r.u32()
	if flags > 7 {
		r.refuse("element segment of kind %d", flags)
	}
	if flags&1 == 0 { // active
		if flags&2 != 0 {
			r.index("table", m.tables)
		}
		m.expression(r)
	}
	expressions := flags&4 != 0
	if flags&3 != 0 && expressions {
		r.referenceType()
	} else if flags&3 != 0 {
		r.zero() // the kind of element, functions
	}
	r.each(1, func() {
		if m.elements++; expressions {
			m.expression(r)
		} else {
			r.index("function", len(m.funcs))
		}
	})
	if m.elements > TableElementsMax {
		r.refuse("more than %d elements in all segments together", TableElementsMax)
	}
}

func (m *module) data(r *reader) {
	kind := r.u32()
	if kind > 2 {
		r.refuse("data segment of kind %d", kind)
	}
	if kind == 2 {
		r.zero() // the memory
	}
	if kind != 1 {
		m.expression(r)
	}
	r.bytes()
}

// section writes a section whose content write appends. Its size takes five bytes,
// whatever it is, so that it can be filled in afterwards.
func (m *module) section(id byte, write func()) {
	m.out = append(m.out, id)
	m.sized(write)
}

// sized writes what write appends, after its size.
func (m *module) sized(write func()) {
	at := len(m.out)
	m.out = append(m.out, 0x80, 0x80, 0x80, 0x80, 0)
	write()
	putUvarint5(m.out[at:], uint32(len(m.out)-at-5))
}

// putUvarint5 fills five bytes with v, which they can hold.
func putUvarint5(b []byte, v uint32) {
	for i := range 4 {
		b[i] = byte(v>>(7*i)) | 0x80
	}
	b[4] = byte(v >> 28)
}
