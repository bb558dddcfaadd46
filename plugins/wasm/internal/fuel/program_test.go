package fuel

import (
	"encoding/binary"
	"slices"

	"pgregory.net/rapid"
)

// A program is a random module: functions of type (i32, i32) -> i32 that use memory,
// a table, variables, every kind of block and branch, and call one another. A variable
// counts the turns of loops and the calls down, so that a program ends.
type program struct {
	t      *rapid.T
	b      []byte
	labels []label
	left   int // statements
}

type label struct {
	loop  bool
	value bool // a branch to it takes an i32
}

const (
	programFuncs          = 4
	programLocals         = 5 // 0 to 4 are i32, 5 is i64
	globalI32, globalI64  = 1, 2
	globalSteps           = 0
	opI64Load, opI64Store = 0x29, 0x37
	opI32WrapI64          = 0xa7
	bodyBlocks            = 6
)

func sleb(b []byte, v int64) []byte {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if v == 0 && c&0x40 == 0 || v == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

func (p *program) op(b ...byte) { p.b = append(p.b, b...) }

func (p *program) i32(v int32) { p.b = sleb(append(p.b, opI32Const), int64(v)) }

func (p *program) draw(n int) int { return rapid.IntRange(0, n-1).Draw(p.t, "") }

// step counts down and traps at zero.
func (p *program) step() {
	p.op(opGlobalGet, globalSteps, opI32Const, 1, 0x6b, opGlobalSet, globalSteps)
	p.op(opGlobalGet, globalSteps, opI32Eqz, opIf, blockVoid, opUnreachable, opEnd)
}

// address leaves an address on the stack, most often one inside the memory.
func (p *program) address(depth int) {
	p.expr(depth)
	if p.draw(30) > 0 {
		p.i32(0xfff)
		p.op(0x71)
	}
}

// expr leaves an i32 on the stack.
func (p *program) expr(depth int) {
	kind := p.draw(16)
	if depth == 0 {
		kind %= 3
	}
	switch kind {
	case 0:
		p.i32(rapid.Int32().Draw(p.t, ""))
	case 1:
		p.op(opLocalGet, byte(p.draw(programLocals)))
	case 2:
		p.op(opGlobalGet, globalI32)
	case 3, 4, 5:
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.op(byte(0x46 + p.draw(10)))
	case 6, 7:
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.op(byte(0x6a + p.draw(15))) // divisions among them
	case 8:
		p.address(depth - 1)
		p.op(opI32Load, 2, byte(p.draw(128)))
	case 9:
		p.expr(depth - 1)
		p.op(opIf, TypeI32)
		p.labels = append(p.labels, label{value: true})
		p.statements(2)
		p.expr(depth - 1)
		p.op(opElse)
		p.expr(depth - 1)
		p.op(opEnd)
		p.labels = p.labels[:len(p.labels)-1]
	case 10:
		p.op(opBlock, TypeI32)
		p.labels = append(p.labels, label{value: true})
		p.statements(2)
		p.expr(depth - 1)
		p.op(opEnd)
		p.labels = p.labels[:len(p.labels)-1]
	case 11:
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.op(opCall, byte(p.draw(programFuncs)))
	case 12:
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.i32(7) // of 8 elements, one is null and two of another type
		p.op(0x71, opCallIndirect, 0, 0)
	case 13:
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.expr(depth - 1)
		p.op(opSelect)
	case 14:
		p.op(opLocalGet, programLocals, opI32WrapI64)
	case 15:
		if p.draw(2) == 0 {
			p.op(opMemorySize, 0)
		} else {
			p.i32(int32(p.draw(3)))
			p.op(opMemoryGrow, 0)
		}
	}
}

func (p *program) statements(n int) {
	for range p.draw(n + 1) {
		p.statement()
	}
}

func (p *program) block(op byte) {
	p.op(op, blockVoid)
	p.labels = append(p.labels, label{loop: op == opLoop})
	if op == opLoop {
		p.step()
	}
	p.statements(bodyBlocks)
	if op == opIf && p.draw(2) == 0 {
		p.op(opElse)
		p.statements(bodyBlocks)
	}
	p.op(opEnd)
	p.labels = p.labels[:len(p.labels)-1]
}

// branch returns the depth of a label that takes no value.
func (p *program) branch() (depth byte, ok bool) {
	d := p.draw(len(p.labels))
	return byte(d), !p.labels[len(p.labels)-1-d].value
}

func (p *program) statement() {
	if p.left--; p.left < 0 {
		return
	}
	switch p.draw(15) {
	case 0, 1, 2:
		p.expr(3)
		p.op(opLocalSet, byte(p.draw(programLocals)))
	case 3:
		p.expr(2)
		p.op(opI64ExtendU, opGlobalGet, globalI64, byte(0x7c+p.draw(3)), opGlobalSet, globalI64)
		p.op(opGlobalGet, globalI64, opLocalSet, programLocals)
	case 4:
		p.address(2)
		p.expr(2)
		p.op(opI32Store, 2, byte(p.draw(128)))
	case 5, 6:
		p.block(opBlock)
	case 7:
		p.block(opLoop)
	case 8, 9:
		p.expr(2)
		p.block(opIf)
	case 10:
		if d, ok := p.branch(); ok {
			p.expr(2)
			p.op(opBrIf, d)
		}
	case 11:
		p.table()
	case 12:
		p.address(1)
		p.expr(1)
		p.i32(int32(p.draw(200)))
		p.op(prefixMisc, subMemoryFill, 0)
	case 13:
		p.address(1)
		p.address(1)
		p.i32(int32(p.draw(5000)))
		p.op(prefixMisc, subMemoryCopy, 0, 0)
	case 14: // long code without a branch
		for range p.draw(300) {
			p.op(opLocalGet, 0, opLocalGet, 1, 0x6a, opLocalSet, 0)
		}
	}
}

// table dispatches as compilers do: blocks, one in another, and a jump to one's end.
func (p *program) table() {
	n := 1 + p.draw(5)
	loop := p.draw(2) == 0
	if loop {
		p.op(opLoop, blockVoid)
		p.labels = append(p.labels, label{value: true}) // others must not branch to it: it does not count
	}
	for range n {
		p.op(opBlock, blockVoid)
		p.labels = append(p.labels, label{})
	}
	p.op(opLocalGet, 2, opBrTable)
	p.b = binary.AppendUvarint(p.b, uint64(n))
	for range n + 1 {
		d := p.draw(n)
		if out, ok := p.branch(); ok && p.draw(4) == 0 && !p.labels[len(p.labels)-1-int(out)].loop { // nor from here
			d = int(out)
		}
		p.op(byte(d))
	}
	for i := range n {
		p.op(opEnd)
		p.labels = p.labels[:len(p.labels)-1]
		if loop && p.draw(8) == 0 { // back to the head, out of a loop that stands where the jump leads
			p.op(opLoop, blockVoid)
			p.step()
			p.expr(1)
			p.op(opLocalSet, 2, opBr, byte(n-i), opEnd)
		}
		p.statements(3)
		if loop && p.draw(3) == 0 { // back to the head
			p.step()
			p.expr(1)
			p.op(opLocalSet, 2, opBr, byte(n-1-i))
		}
	}
	if loop {
		p.op(opEnd)
		p.labels = p.labels[:len(p.labels)-1]
	}
}

// drawProgram returns a random module.
func drawProgram(t *rapid.T) []byte {
	size := func(b []byte) []byte { return append(binary.AppendUvarint(nil, uint64(len(b))), b...) }
	section := func(id byte, b ...byte) []byte { return append([]byte{id}, size(b)...) }
	codes := []byte{programFuncs + 1}
	for range programFuncs {
		p := &program{t: t, left: 40, labels: []label{{value: true}}}
		p.op(2, programLocals-2, TypeI32, 1, TypeI64)
		p.step()
		p.statements(20)
		p.expr(2)
		p.op(opEnd)
		codes = append(codes, size(p.b)...)
	}
	codes = append(codes, size([]byte{0, opEnd})...)
	return slices.Concat([]byte("\x00asm\x01\x00\x00\x00"),
		section(secType, 2, 0x60, 2, TypeI32, TypeI32, 1, TypeI32, 0x60, 0, 0),
		section(secFunction, programFuncs+1, 0, 0, 0, 0, 1),
		section(secTable, 1, TypeFuncref, 0, 8),
		section(secMemory, 1, 1, 1, 3),
		section(secGlobal, 3, TypeI32, 1, opI32Const, 0xe4, 0x00, opEnd, TypeI32, 1, opI32Const, 3, opEnd, TypeI64, 1, opI64Const, 5, opEnd),
		section(secExport, 4, 3, 'r', 'u', 'n', 0, 0, 3, 'm', 'e', 'm', 2, 0, 1, 'a', 3, 1, 1, 'b', 3, 2),
		section(secElement, 1, 0, opI32Const, 0, opEnd, 7, 0, 1, 2, 3, 0, 4, 4),
		section(secCode, codes...),
		section(secData, 1, 0, opI32Const, 16, opEnd, 4, 1, 2, 3, 4))
}
