package fuel

// Instructions that the rewriter treats in a way of their own.
const (
	opUnreachable  = 0x00
	opNop          = 0x01
	opBlock        = 0x02
	opLoop         = 0x03
	opIf           = 0x04
	opElse         = 0x05
	opEnd          = 0x0b
	opBr           = 0x0c
	opBrIf         = 0x0d
	opBrTable      = 0x0e
	opReturn       = 0x0f
	opCall         = 0x10
	opCallIndirect = 0x11
	opDrop         = 0x1a
	opSelect       = 0x1b
	opSelectTyped  = 0x1c
	opLocalGet     = 0x20
	opLocalSet     = 0x21
	opLocalTee     = 0x22
	opGlobalGet    = 0x23
	opGlobalSet    = 0x24
	opTableGet     = 0x25
	opTableSet     = 0x26
	opI32Load      = 0x28
	opI64Load32U   = 0x35
	opI32Store     = 0x36
	opI64Store32   = 0x3e
	opMemorySize   = 0x3f
	opMemoryGrow   = 0x40
	opI32Const     = 0x41
	opI64Const     = 0x42
	opF32Const     = 0x43
	opF64Const     = 0x44
	opI32Eqz       = 0x45
	opI64LtS       = 0x53
	opI64LtU       = 0x54
	opI32DivS      = 0x6d
	opI64Sub       = 0x7d
	opI64DivS      = 0x7f
	opI64Shl       = 0x86
	opI64ShrU      = 0x88
	opF32Ceil      = 0x8d
	opF32Sqrt      = 0x91
	opF32Div       = 0x95
	opF32Min       = 0x96
	opF64Ceil      = 0x9b
	opF64Sqrt      = 0x9f
	opF64Div       = 0xa3
	opF64Min       = 0xa4
	opI32TruncF32S = 0xa8
	opI64TruncF64U = 0xb1
	opI64ExtendU   = 0xad
	opI64Extend32S = 0xc4
	opRefNull      = 0xd0
	opRefIsNull    = 0xd1
	opRefFunc      = 0xd2
	prefixMisc     = 0xfc
	prefixVector   = 0xfd

	blockVoid = 0x40
)

// Instructions after prefixMisc.
const (
	subTruncSatLast = 0x07
	subMemoryInit   = 0x08
	subDataDrop     = 0x09
	subMemoryCopy   = 0x0a
	subMemoryFill   = 0x0b
	subTableInit    = 0x0c
	subElemDrop     = 0x0d
	subTableCopy    = 0x0e
	subTableGrow    = 0x0f
	subTableSize    = 0x10
	subTableFill    = 0x11
)

// Instructions after prefixVector.
const (
	subV128Load     = 0x00
	subV128Store    = 0x0b
	subV128Const    = 0x0c
	subShuffle      = 0x0d
	subSwizzle      = 0x0e
	subExtractFirst = 0x15
	subReplaceLast  = 0x22
	subLoadLane     = 0x54
	subStoreLane    = 0x5b
	subLoadZero32   = 0x5c
	subLoadZero64   = 0x5d
)

// What follows an opcode.
const (
	immUnknown = iota // no such instruction: refused
	immNone
	immOwn // handled by its own case
	immLocal
	immGlobal
	immMemory // alignment and offset
	immI32
	immI64
	imm4
	imm8
)

// An op is what the rewriter must know of an instruction.
type op struct {
	immediate uint8
	weight    uint8
}

// ops is indexed by opcode, vectorWeights by the opcode after prefixVector, where 0
// means that there is no such instruction.
var (
	ops           = plainOps()
	vectorWeights = vectorOps()
)

// plainOps gives each instruction its weight: the units that it burns each time it
// runs. BenchmarkUnit measures what a unit takes of each.
func plainOps() (t [256]op) {
	set := func(first, last int, immediate, weight uint8) {
		for i := first; i <= last; i++ {
			t[i] = op{immediate, weight}
		}
	}
	set(opUnreachable, opNop, immNone, 0)
	set(opBlock, opElse, immOwn, 0)
	set(opEnd, opCallIndirect, immOwn, 1)
	t[opReturn] = op{immNone, 1}
	set(opDrop, opSelect, immNone, 1)
	t[opSelectTyped] = op{immOwn, 1}
	set(opLocalGet, opLocalTee, immLocal, 1)
	set(opGlobalGet, opGlobalSet, immGlobal, 1)
	set(opTableGet, opTableSet, immOwn, weightLoad)
	set(opI32Load, opI64Load32U, immMemory, weightLoad)
	set(opI32Store, opI64Store32, immMemory, weightStore)
	set(opMemorySize, opMemoryGrow, immOwn, 1)
	t[opI32Const], t[opI64Const] = op{immI32, 1}, op{immI64, 1}
	t[opF32Const], t[opF64Const] = op{imm4, 1}, op{imm8, 1}
	set(opI32Eqz, opI64Extend32S, immNone, 1)
	set(opI32DivS, opI32DivS+3, immNone, weightDivide)
	set(opI64DivS, opI64DivS+3, immNone, weightDivide)
	set(opF32Ceil, opF32Min-1, immNone, weightFloat)
	set(opF32Min, opF32Min+2, immNone, weightFloat)
	set(opF64Ceil, opF64Min-1, immNone, weightFloat)
	set(opF64Min, opF64Min+2, immNone, weightFloat)
	t[opF32Sqrt].weight, t[opF64Sqrt].weight = weightRoot, weightRoot
	t[opF32Div].weight, t[opF64Div].weight = weightRoot, weightRoot
	set(opI32TruncF32S, opI32TruncF32S+3, immNone, weightConvert)
	set(opI64TruncF64U-3, opI64TruncF64U, immNone, weightConvert)
	t[opRefNull], t[opRefIsNull], t[opRefFunc] = op{immOwn, 1}, op{immNone, 1}, op{immOwn, 1}
	t[prefixMisc], t[prefixVector] = op{immOwn, 0}, op{immOwn, 0}
	return t
}

func vectorOps() (t [256]uint8) {
	for i := range t {
		t[i] = weightVector
	}
	for _, i := range [...]int{0x9a, 0xa2, 0xa5, 0xa6, 0xaf, 0xb0, 0xb2, 0xb3, 0xb4, 0xbb, 0xc2, 0xc5, 0xc6, 0xcf, 0xd0, 0xd2, 0xd3, 0xd4, 0xe2, 0xee} {
		t[i] = 0 // no such instruction
	}
	for _, i := range [...]int{0xe3, 0xe7, 0xef, 0xf3} { // square roots and divisions
		t[i] = weightRoot
	}
	return t
}
