package fuel

import (
	"encoding/binary"
	"fmt"
	"math"
)

// A level is the code that runs at most once each time its head is passed: the body of
// a function or of a loop, without the loops inside, which are levels of their own.
//
// The code of a level is cut into groups of about groupUnits, and each group pays for
// itself where it begins. A branch may go over the beginning of a group into its
// middle; there another group is begun, so that whoever runs code has paid for it. Many
// small groups would be slow, one for all the level would charge a branch that skips
// most of it for all of it: Go compiles a whole function to one loop, every jump of
// which goes through its head.
type level struct {
	group   int  // number of the current group
	units   int  // of it
	charge  int  // where in out its charge stands; -1 for a head that pays nothing
	landing bool // a branch that has not paid for the code to come leads here
	toll    int  // what each group pays for a head that does not
	from    int  // out's length after the head
}

// A frame is a block, loop, if or function whose end has not come.
type frame struct {
	op     byte
	level  int // that its end belongs to
	values int // that a branch to it moves, at most
	group  int // of that level, at its beginning
	from   int // lowest group of that level that branches to its end, or math.MaxInt
	edges  int // branches to it
}

// A writer rewrites the code of functions.
type writer struct {
	*reader
	m      *module
	levels []level
	frames []frame
	copied int // everything before it has been written
	locals int
	compilerWork
}

// compilerWork is what makes the runtime's compiler slow on a function.
type compilerWork struct {
	loops   int
	depths  int // of the loops, in one another, added up
	blocks  int
	edges   int // branches
	squares int // of the number of branches to each block, added up
	calls   int
	values  int // that the calls pass and return
	charges int // that this package adds, each of which is a block to the compiler
	bytes   int // of code: as a measure of the values that wait on the stack
}

// microseconds estimates how long the compiler is busy with a function that is made to
// keep it busy. For others it is far too much, which does no harm.
func (c *compilerWork) microseconds(locals, globals int) int {
	blocks, edges := c.blocks+chargeBlocks*c.charges, c.edges+c.charges
	return locals*(locals*c.loops/4+c.depths/2+4*edges) + c.squares/4096 + blocks*blocks/32 + 3*c.calls*globals/2 + 20*c.values +
		c.bytes*c.charges/waitingPerMicrosecond
}

// flush writes the code read so far.
func (w *writer) flush() {
	w.m.out = append(w.m.out, w.b[w.copied:w.at]...)
	w.copied = w.at
}

// burn writes a charge whose units are filled in later, and returns where.
func (w *writer) burn() int {
	m := w.m
	if m.group == plain {
		return -1
	}
	m.out = append(append(m.out, m.charge...), 0x80, 0x80, 0x80, 0x80, 0)
	at := len(m.out) - 5
	m.out = append(m.out, m.check...)
	w.charges++
	return at
}

// pay accounts for units of the code that was read last, which begins at from. It
// begins another group before that code when the current one is full or a branch
// leads here.
func (w *writer) pay(from, units int) {
	l := &w.levels[len(w.levels)-1]
	if units > 0 && (l.landing || l.units > 0 && l.units+units > w.m.group) {
		w.close(l)
		w.m.out = append(w.m.out, w.b[w.copied:from]...)
		w.copied = from
		l.charge = w.burn()
		l.group++
		l.units, l.landing = l.toll, false
	}
	l.units += units
}

// close ends the current group.
func (w *writer) close(l *level) {
	if l.charge >= 0 {
		putUvarint5(w.m.out[l.charge:], uint32(l.units))
	}
}

// open begins a level whose head stands here and costs units.
func (w *writer) open(units int) {
	w.flush()
	charge := w.burn()
	w.levels = append(w.levels, level{charge: charge, units: units, from: len(w.m.out)})
}

// leave ends the innermost level.
func (w *writer) leave() {
	w.close(&w.levels[len(w.levels)-1])
	w.levels = w.levels[:len(w.levels)-1]
}

// dispatch makes the head of a loop free that does nothing but choose, by a branch that
// was just read, which group comes next. The code before the loop pays for the first
// pass, each group for the pass that may follow. The branch must not lead to the head.
func (w *writer) dispatch() {
	n := len(w.levels)
	l := &w.levels[n-1]
	if l.landing = true; n == 1 || l.group > 0 || l.charge < 0 || l.units > dispatchUnits || len(w.m.out) != l.from || w.levels[n-2].landing {
		return
	}
	w.m.out = w.m.out[:l.charge-len(w.m.charge)]
	w.levels[n-2].units += l.units
	l.charge, l.toll = -1, l.units
}

func (w *writer) enter(op byte, values int) {
	i := len(w.levels) - 1
	w.frames = append(w.frames, frame{op: op, level: i, values: values, group: w.levels[i].group, from: math.MaxInt})
	if w.blocks++; op == opLoop {
		w.loops++
		w.depths += len(w.levels)
	}
}

// branch notes a branch to the frame depth out.
func (w *writer) branch(depth int) {
	f := &w.frames[len(w.frames)-1-depth]
	w.edges++
	w.squares += 2*f.edges + 1
	f.edges++
	f.from = min(f.from, w.levels[f.level].group)
}

// join begins the code that is reached from the current group and from group from.
func (w *writer) join(from int) {
	if l := &w.levels[len(w.levels)-1]; from < l.group {
		l.landing = true
	}
}

// code writes the code section, with the function for operations on many bytes at its
// end.
func (m *module) code(r *reader) error {
	n := 0
	if r != nil {
		n = r.count(3)
	}
	if defined := len(m.funcs) - len(m.imports); r == nil && defined > 0 || n != defined {
		return errCount(r, n, defined)
	}
	w := &writer{reader: r, m: m}
	m.section(secCode, func() {
		m.out = binary.AppendUvarint(m.out, uint64(n+1))
		for i := range n {
			w.function(&m.types[m.funcs[len(m.imports)+i]])
		}
		m.sized(m.burnMany)
	})
	if r == nil {
		return nil
	}
	if r.err == nil && r.at != len(r.b) {
		r.refuse("%d bytes follow the last function", len(r.b)-r.at)
	}
	return r.err
}

// function rewrites one function.
func (w *writer) function(t *Func) {
	size := w.count(1)
	if w.err != nil {
		return
	}
	whole := w.b
	w.b, w.copied = w.b[:w.at+size], w.at
	locals := 0
	w.each(2, func() {
		locals += int(min(w.u32(), localsMax+1))
		w.valueType()
	})
	if w.m.locals += uint64(locals); w.m.locals > localsMax {
		w.refuse("more than %d locals in all functions together", localsMax)
	}
	w.locals = len(t.Params) + locals
	w.compilerWork = compilerWork{bytes: size}
	w.m.sized(func() {
		w.levels, w.frames = w.levels[:0], w.frames[:0]
		w.open(weightEnter + locals/localsPerUnit + len(t.Params))
		w.enter(opBlock, len(t.Results))
		for len(w.frames) > 0 && w.err == nil {
			w.instruction()
		}
		w.flush()
	})
	if w.err == nil && w.at != len(w.b) {
		w.refuse("%d bytes follow the end of a function", len(w.b)-w.at)
	}
	w.m.work += w.microseconds(w.locals, w.m.globals+1)
	if w.err == nil && w.m.work > compilerMicrosecondsMax {
		w.err = fmt.Errorf("the function that ends at byte %d has %d blocks, %d branches, %d calls and %d locals; "+
			"the runtime's compiler would take too long: split it, or let your compiler optimise it", w.at, w.blocks, w.edges, w.calls, w.locals)
	}
	w.b = whole
}

// instruction reads one instruction and accounts for it.
func (w *writer) instruction() {
	from := w.at
	code := w.byte()
	o := &ops[code]
	switch o.immediate {
	case immNone:
	case immLocal:
		w.index("local", w.locals)
	case immGlobal:
		w.index("global", w.m.globals)
	case immMemory:
		w.memory()
	case immI32:
		w.leb(5)
	case immI64:
		w.leb(10)
	case imm4:
		w.skip(4)
	case imm8:
		w.skip(8)
	case immOwn:
		w.own(code, from)
		return
	default:
		w.at = from
		w.refuse("instruction %#x, which this host does not know", code)
	}
	w.pay(from, int(o.weight))
}

func (w *writer) memory() {
	w.u32()
	w.u32()
}

// own handles the instructions with immOwn.
func (w *writer) own(code byte, from int) {
	switch code {
	case opBlock, opLoop, opIf, opElse, opEnd:
		w.structure(code, from)
	case opBr, opBrIf:
		w.branches(from, 1, 1)
	case opBrTable:
		if w.branches(from, w.count(1)+1, weightTable) {
			w.dispatch()
		}
	case opCall:
		if f := w.index("function", len(w.m.funcs)); w.err == nil {
			w.call(from, weightCall, w.m.funcs[f])
		}
	case opCallIndirect:
		t := w.index("type", len(w.m.types))
		w.index("table", w.m.tables)
		if w.err == nil {
			w.call(from, weightCallIndirect, t)
		}
	case opSelectTyped:
		if n := w.byte(); n != 1 {
			w.refuse("a select of %d types; one is supported", n)
		}
		w.valueType()
		w.pay(from, 1)
	case opTableGet, opTableSet:
		w.index("table", w.m.tables)
		w.pay(from, weightLoad)
	case opMemorySize:
		w.zero()
		w.pay(from, 1)
	case opMemoryGrow:
		w.zero()
		w.many(from, weightExit, pageShift)
	case opRefNull:
		w.referenceType()
		w.pay(from, 1)
	case opRefFunc:
		w.index("function", len(w.m.funcs))
		w.pay(from, weightExit)
	case prefixMisc:
		w.misc(from)
	case prefixVector:
		w.vector(from)
	}
}

func (w *writer) call(from, units, t int) {
	values := w.m.types[t].values()
	w.pay(from, units+values)
	w.calls++
	w.values += values
}

// branches handles an instruction with n branches, one of which is taken. It reports
// whether none leads to the head of the innermost loop.
func (w *writer) branches(from, n, units int) (onward bool) {
	at, values := w.at, 0
	onward = true
	for i := 0; i < n && w.err == nil; i++ {
		f := &w.frames[len(w.frames)-1-w.index("block", len(w.frames))]
		values = max(values, f.values)
		onward = onward && (f.op != opLoop || f.level < len(w.levels)-2)
	}
	w.pay(from, units+values) // may begin the group that the branches come from
	w.at = at
	for i := 0; i < n && w.err == nil; i++ {
		w.branch(int(w.u32()))
	}
	return onward
}

// many handles an operation on as many bytes, or 1<<shift of them, as the topmost
// value says.
func (w *writer) many(from, units int, shift byte) {
	w.pay(from, units)
	m := w.m
	m.out = append(m.out, w.b[w.copied:from]...)
	w.copied = from
	if m.group != plain {
		m.out = append(append(m.out, opI32Const, shift, opCall), m.burn...)
	}
}

// misc handles what follows prefixMisc.
func (w *writer) misc(from int) {
	switch sub := w.byte(); {
	case sub <= subTruncSatLast:
		w.pay(from, weightConvert)
	case sub == subMemoryInit:
		w.u32()
		w.zero()
		w.many(from, weightBulk, byteShift)
	case sub == subMemoryCopy:
		w.zero()
		w.zero()
		w.many(from, weightBulk, byteShift)
	case sub == subMemoryFill:
		w.zero()
		w.many(from, weightBulk, byteShift)
	case sub == subTableInit:
		w.u32()
		w.index("table", w.m.tables)
		w.many(from, weightBulk, itemShift)
	case sub == subTableCopy:
		w.index("table", w.m.tables)
		w.index("table", w.m.tables)
		w.many(from, weightBulk, itemShift)
	case sub == subTableGrow, sub == subTableFill:
		w.index("table", w.m.tables)
		w.many(from, weightExit, itemShift)
	case sub == subTableSize:
		w.index("table", w.m.tables)
		w.pay(from, 1)
	case sub == subDataDrop, sub == subElemDrop:
		w.u32()
		w.pay(from, 1)
	default:
		w.refuse("instruction 0xfc %#x, which this host does not know", sub)
	}
}

// vector handles what follows prefixVector.
func (w *writer) vector(from int) {
	sub := w.byte()
	if sub >= 0x80 && w.byte() != 1 || vectorWeights[sub] == 0 {
		w.refuse("instruction 0xfd %#x, which this host does not know", sub)
		return
	}
	switch {
	case sub <= subV128Store, sub == subLoadZero32, sub == subLoadZero64:
		w.memory()
	case sub == subV128Const, sub == subShuffle:
		w.skip(16)
	case sub >= subExtractFirst && sub <= subReplaceLast:
		w.byte()
	case sub >= subLoadLane && sub <= subStoreLane:
		w.memory()
		w.byte()
	}
	w.pay(from, int(vectorWeights[sub]))
}

// structure handles what begins and ends blocks.
func (w *writer) structure(code byte, from int) {
	switch code {
	case opBlock:
		values := w.blockType()
		w.pay(from, values)
		w.enter(code, values)
	case opIf:
		values := w.blockType()
		w.pay(from, 1+values)
		w.enter(code, values)
	case opLoop:
		values := w.blockType()
		if l := &w.levels[len(w.levels)-1]; l.toll > 0 && l.landing {
			w.pay(from, weightLoop) // a branch from inside may lead to the head that is free
		}
		w.enter(code, values)
		w.open(weightLoop + values)
	case opElse:
		f := &w.frames[len(w.frames)-1]
		if f.op != opIf {
			w.refuse("an else without an if")
			return
		}
		f.op = opElse
		w.branch(0) // from the end of the first half over the second
		w.join(f.group)
	case opEnd:
		f := w.frames[len(w.frames)-1]
		w.frames = w.frames[:len(w.frames)-1]
		switch {
		case f.op == opLoop || len(w.frames) == 0:
			w.leave()
		default:
			w.join(f.from)
			if f.op == opIf {
				w.join(f.group)
			}
		}
	}
}

// blockType returns the number of values that go into a block and come out.
func (w *writer) blockType() int {
	if b := w.peek(); b == blockVoid {
		w.at++
		return 0
	} else if b >= TypeExternref && b < 0x80 {
		w.valueType()
		return 1
	}
	t := w.index("type", len(w.m.types))
	if w.err != nil || w.b[w.at-1]&0x40 != 0 {
		w.refuse("a block of a negative type")
		return 0
	}
	return w.m.types[t].values()
}

// burnMany is the body of the function that pays for an operation on many bytes. It is
// called with the number of items and the binary logarithm of how many of them make
// 1<<scaleShift units, and returns the number of items.
func (m *module) burnMany() {
	charge := make([]byte, 5)
	putUvarint5(charge, manyUnitsMax)
	m.out = append(m.out, 1, 1, TypeI64,
		opLocalGet, 0, opI64ExtendU, opI64Const, scaleShift, opI64Shl, opLocalGet, 1, opI64ExtendU, opI64ShrU, opLocalTee, 2)
	m.out = append(append(m.out, opI64Const), charge...)
	m.out = append(append(m.out, opLocalGet, 2, opI64Const), charge...)
	m.out = append(m.out, opI64LtU, opSelect, opLocalSet, 2)
	m.out = append(append(m.out, opGlobalGet), m.fuel...)
	m.out = append(append(m.out, opLocalGet, 2), m.check...)
	m.out = append(m.out, opLocalGet, 0, opEnd)
}
