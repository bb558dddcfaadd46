// Package fuel rewrites a WebAssembly module so that it counts what it does and traps
// when a counter is used up.
//
// The counter is a global variable that is appended to the module and exported as
// Counter; the host sets it before each call. The code of a function is cut into
// groups, and each group takes its weight off the counter where it begins: the sum of
// the weights of its instructions, a number that is known here. When the counter falls
// below zero, the code traps. A group ends at a loop's head, which every turn passes,
// and where a branch leads that has not paid for the code to come; see type level. An
// operation on many bytes calls an appended function that burns by their number. The
// host's functions are not counted here: the host burns in them itself, by whatever way
// the module reaches them.
//
// So no code runs that has not been paid for, and what a call burns depends on the
// module's bytes, the call's arguments and the memory only: it is the same on every
// machine. TestPrograms holds both against random programs.
//
// # What a unit is worth
//
// An addition weighs 1. The other weights are chosen so that no instruction takes much
// longer for its units: BenchmarkUnit runs a loop around each instruction that waits
// for the one before it, and finds 0.05 to 2 ns a unit on a 2.3 GHz processor. What
// weighs too little is memory that is in no cache: a chain of loads that jumps through
// all 16 MiB takes 14 to 27 ns a unit, and growing the memory page by page to its limit,
// which an instance can do once, up to 0.3 s in all. The
// shipped rules take 0.06 to 0.25 ns.
//
// # What is refused
//
// Whatever this package does not understand: unknown instructions and sections,
// encodings that the runtime might read in another way, an index that the module as
// given does not have and that may therefore be of something appended, exports whose
// names begin with Prefix. Also what a few bytes declare too much of, and what would
// take the runtime's compiler too long. Whether the rest is valid is for the runtime to
// say: what is added leaves valid code valid and invalid code invalid, because it leaves
// the stack as it finds it. Custom sections are checked for their form and dropped:
// names and debug information would tell lies about the new code.
package fuel

import (
	"encoding/binary"
	"fmt"
)

// Names that a rewritten module exports beside its own.
const (
	// Prefix begins the names; a module whose own exports use it is refused.
	Prefix = "tierd:"
	// Counter is the global variable that holds the units left, an i64. It is 0 at
	// first: the host sets it before each call. A negative value says that the code ran
	// out of fuel and trapped.
	Counter = Prefix + "fuel"
	// Start is the function of the start section, when the module has one. The rewritten
	// module has none, so that nothing of it runs before the counter is set.
	Start = Prefix + "start"
)

// Weights, in units. See the package comment for what a unit is worth.
const (
	weightLoad         = 4
	weightStore        = 2
	weightDivide       = 12
	weightRoot         = 8
	weightFloat        = 2
	weightConvert      = 3
	weightVector       = 3
	weightCall         = 2
	weightCallIndirect = 8
	weightEnter        = 4
	weightLoop         = 1
	weightTable        = 4
	weightBulk         = 8
	weightExit         = 64

	// localsPerUnit is how many local variables an entry of a function zeroes for a unit.
	localsPerUnit = 4

	// groupUnits is about the weight of a group. A charge takes four instructions and 20
	// bytes; a branch over the rest of its group has paid for it in vain.
	groupUnits = 256
	plain      = 1 << 40 // in place of groupUnits: no charges

	// dispatchUnits is how much the head of a loop may do beside a branch to be free.
	dispatchUnits = 16

	// Operations on many bytes burn 1 unit for 16 bytes or 2 table elements, and as much
	// as for its bytes for a page of new memory; each is given as the binary logarithm
	// of how many make 1<<scaleShift units. None burns more than for a whole memory, so
	// that one that is bound to fail is not dearer than one that succeeds.
	scaleShift   = 12
	byteShift    = scaleShift + 4
	itemShift    = scaleShift + 1
	pageShift    = 0
	manyUnitsMax = 1 << 20
)

// compilerMicrosecondsMax bounds what the runtime's compiler may have to do with a
// module, by an estimate for the code that is the worst for it: nested loops and blocks
// around many variables, thousands of branches to one place, calls that pass much. A
// plain Go guest of 2.3 MB has an eighth.
const compilerMicrosecondsMax = 40_000_000

// chargeBlocks is how many blocks of the module a charge weighs for the compiler: its if
// ends one and begins two. 6,250 charges in a row take it 2.8 s, 12,500 take it 19 s.
const chargeBlocks = 2

// waitingPerMicrosecond is how many bytes of code, times the charges in it, are a
// microsecond of the compiler's when each few bytes leave a value on the stack that is
// used at the end: 800 KB with 7,800 charges take it 49 s.
const waitingPerMicrosecond = 128

// A Func is a function that a module imports or exports.
type Func struct {
	Module, Name    string // Module is empty for an export
	Params, Results []byte // value types, as the binary format encodes them
}

func (f *Func) values() int { return len(f.Params) + len(f.Results) }

// A Module is a rewritten module.
type Module struct {
	// Wasm is the module to run.
	Wasm []byte
	// Start says that it exports Start, to be called before anything else.
	Start bool
	// Imports and Exports are the functions of the module as it was given.
	Imports, Exports []Func
}

// Rewrite returns a module that does what wasm does and counts. wasm begins with the
// eight bytes of a core module of version 1; the caller has looked.
func Rewrite(wasm []byte) (*Module, error) { return rewrite(wasm, groupUnits) }

// Plain returns what Rewrite returns but for the charges, so that nothing is burnt:
// what a rewritten module is compared with, in tests and benchmarks.
func Plain(wasm []byte) (*Module, error) { return rewrite(wasm, plain) }

func rewrite(wasm []byte, group int) (*Module, error) {
	m := &module{start: -1, group: group}
	if err := m.split(wasm); err != nil {
		return nil, err
	}
	m.out = make([]byte, 0, len(wasm)+len(wasm)/2+256)
	m.out = append(m.out, wasm[:8]...)
	if err := m.write(); err != nil {
		return nil, err
	}
	return &Module{Wasm: m.out, Start: m.start >= 0, Imports: m.imports, Exports: m.exports}, nil
}

// Functions reads no more of a module than what its functions are called and take.
func Functions(wasm []byte) (imports, exports []Func, err error) {
	m := &module{start: -1}
	if err := m.split(wasm); err != nil {
		return nil, nil, err
	}
	if err := m.readTypes(); err != nil {
		return nil, nil, err
	}
	err = m.walk(secExport, m.readExports)
	return m.imports, m.exports, err
}

// write writes the sections in their order.
func (m *module) write() error {
	if err := m.readTypes(); err != nil {
		return err
	}
	m.extend(secType, len(m.types), 0x60, 2, TypeI32, TypeI32, 1, TypeI32)
	m.copy(secImport)
	m.extend(secFunction, len(m.funcs)-len(m.imports), binary.AppendUvarint(nil, uint64(len(m.types)))...)
	m.burn = binary.AppendUvarint(nil, uint64(len(m.funcs)))
	if err := m.walk(secTable, m.readTables); err != nil {
		return err
	}
	if err := m.walk(secMemory, func(r *reader) { r.each(2, func() { limits(r) }) }); err != nil {
		return err
	}
	m.copy(secMemory)
	if err := m.walk(secGlobal, m.readGlobals); err != nil {
		return err
	}
	if m.sections[secGlobal] == nil {
		m.readGlobals(nil)
	}
	if err := m.walk(secStart, m.readStart); err != nil {
		return err
	}
	if err := m.walk(secExport, m.readExports); err != nil {
		return err
	}
	m.writeExports()
	if err := m.walk(secElement, func(r *reader) { r.atMost(segmentsMax, "segments"); r.each(2, func() { m.element(r) }) }); err != nil {
		return err
	}
	m.copy(secElement)
	if err := m.walk(secDataCount, func(r *reader) { r.u32() }); err != nil {
		return err
	}
	m.copy(secDataCount)
	if err := m.code(m.sections[secCode]); err != nil {
		return err
	}
	if err := m.walk(secData, func(r *reader) { r.atMost(segmentsMax, "segments"); r.each(2, func() { m.data(r) }) }); err != nil {
		return err
	}
	m.copy(secData)
	return nil
}

// copy writes a section as it is.
func (m *module) copy(id byte) {
	if r := m.sections[id]; r != nil {
		m.section(id, func() { m.out = append(m.out, r.b[r.start:]...) })
	}
}

// extend writes a section, a vector of n items, with one more.
func (m *module) extend(id byte, n int, item ...byte) {
	m.section(id, func() {
		m.out = binary.AppendUvarint(m.out, uint64(n+1))
		if r := m.sections[id]; r != nil {
			items := reader{b: r.b, at: r.start}
			items.u32()
			m.out = append(m.out, items.b[items.at:]...)
		}
		m.out = append(m.out, item...)
	})
}

func (m *module) writeExports() {
	var added []byte
	n := 1
	r := m.sections[secExport]
	if r != nil {
		items := reader{b: r.b, at: r.start}
		n += int(items.u32())
		added = append(added, items.b[items.at:]...)
	}
	added = append(added, byte(len(Counter)))
	added = append(append(append(added, Counter...), 3), m.fuel...)
	if m.start >= 0 {
		n++
		added = append(added, byte(len(Start)))
		added = binary.AppendUvarint(append(append(added, Start...), 0), uint64(m.start))
	}
	m.section(secExport, func() {
		m.out = append(binary.AppendUvarint(m.out, uint64(n)), added...)
	})
}

func errCount(r *reader, n, defined int) error {
	if r != nil && r.err != nil {
		return r.err
	}
	return fmt.Errorf("not a valid module: it declares %d functions and has the code of %d", defined, n)
}
