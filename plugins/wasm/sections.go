package wasm

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// The runtime's decoder makes room for as many items as a count in the module says,
// before it reads the first: 12 bytes that claim four thousand million imports ask it
// for hundreds of gigabytes, which ends this program. checkSections therefore walks a
// module first and refuses a count or a length that the bytes after it cannot hold.
// It checks sizes only; whether the module is valid is for the runtime to say.

const (
	// localsMax bounds the local variables of all functions of a module together: they
	// are the one thing that a few bytes can declare many of. A plain Go guest has
	// 50,000.
	localsMax = 1 << 20

	// tableElementsMax bounds the size of a table, at the start and after it has grown:
	// the functions that can be called through a pointer, 4,000 in a plain Go guest.
	tableElementsMax = 1 << 20

	// tablesMax bounds the tables of a module; compilers make one.
	tablesMax = 16
)

var sectionNames = [...]string{
	"custom", "type", "import", "function", "table", "memory", "global", "export", "start", "element", "code", "data", "data count", "tag",
}

// checkSections walks a module that checkBytes has passed. It returns the module to
// compile, which differs from the one given only in that no table may grow beyond
// tableElementsMax: the runtime has no limit of its own for that.
func checkSections(wasm []byte) ([]byte, error) {
	c := &cursor{b: wasm, at: 8}
	tables := false
	for c.at < len(c.b) && c.err == nil {
		start := c.at
		id := c.byte()
		c.in = fmt.Sprintf("section %d", id)
		if int(id) < len(sectionNames) {
			c.in = "section " + sectionNames[id]
		}
		size := c.count(1)
		end := c.at + size
		s := &cursor{b: c.b[:min(end, len(c.b))], at: c.at, in: c.in, err: c.err}
		s.section(id)
		c.err = s.err
		c.at = end
		if id == 4 && tables {
			c.refuse("there is one already")
		}
		if id == 4 && c.err == nil {
			tables = true
			bounded := append(binary.AppendUvarint([]byte{id}, uint64(len(s.tables))), s.tables...)
			c.b = slices.Concat(c.b[:start], bounded, c.b[end:])
			c.at = start + len(bounded)
		}
	}
	return c.b, c.err
}

// A cursor reads forward through bytes. After its first error, which says where, every
// read returns 0.
type cursor struct {
	b      []byte
	at     int
	in     string
	err    error
	locals uint64 // of the functions so far
	tables []byte // the table section, with every table bounded
}

func (c *cursor) refuse(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("not a valid module: %s, byte %d: %s", c.in, c.at, fmt.Sprintf(format, args...))
	}
}

func (c *cursor) byte() byte {
	if c.err == nil && c.at >= len(c.b) {
		c.refuse("it ends in the middle of an item")
	}
	if c.err != nil {
		return 0
	}
	c.at++
	return c.b[c.at-1]
}

// u64 reads an unsigned or, when only its length matters, a signed LEB128 number.
func (c *cursor) u64() (v uint64) {
	for shift := 0; shift < 70; shift += 7 {
		b := c.byte()
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return v
		}
	}
	c.refuse("a number has more than 10 bytes")
	return 0
}

// count reads how many items of at least itemBytes follow.
func (c *cursor) count(itemBytes int) int {
	n := c.u64()
	if left := len(c.b) - c.at; c.err == nil && n > uint64(left/itemBytes) {
		c.refuse("it announces %d items of at least %d bytes, and %d bytes are left", n, itemBytes, left)
	}
	if c.err != nil {
		return 0
	}
	return int(n)
}

// skip passes over a vector of bytes, such as a name.
func (c *cursor) skip() { c.at += c.count(1) }

// each reads a vector whose items have at least itemBytes.
func (c *cursor) each(itemBytes int, item func()) {
	for n := c.count(itemBytes); n > 0 && c.err == nil; n-- {
		item()
	}
}

func (c *cursor) index() { c.u64() }

func (c *cursor) valueType() {
	if b := c.byte(); b == 0x63 || b == 0x64 { // a reference to a type by its number
		c.u64()
	}
}

func (c *cursor) limits() (flags byte, low, high uint64) {
	flags = c.byte()
	low = c.u64()
	if flags&1 != 0 {
		high = c.u64()
	}
	return flags, low, high
}

// table walks one table and adds it to c.tables, bounded.
func (c *cursor) table() {
	start := c.at
	if c.at < len(c.b) && c.b[c.at] == 0x40 {
		c.refuse("a table with an initial value; only null is supported")
	}
	c.valueType()
	kind := c.b[min(start, len(c.b)):min(c.at, len(c.b))]
	flags, low, high := c.limits()
	if flags > 1 {
		c.refuse("a table with flags %#x; 0 and 1 are supported", flags)
	}
	if low > tableElementsMax {
		c.refuse("a table of %d elements; at most %d are allowed", low, tableElementsMax)
	}
	if flags == 0 || high > tableElementsMax {
		high = tableElementsMax
	}
	c.tables = append(append(c.tables, kind...), 1)
	c.tables = binary.AppendUvarint(binary.AppendUvarint(c.tables, low), high)
}

// expression passes over a constant expression.
func (c *cursor) expression() {
	for c.err == nil {
		switch op := c.byte(); op {
		case 0x0b: // end
			return
		case 0x41, 0x42, 0x23, 0xd0, 0xd2: // i32.const, i64.const, global.get, ref.null, ref.func
			c.u64()
		case 0x43: // f32.const
			c.at += 4
		case 0x44: // f64.const
			c.at += 8
		case 0xfd: // v128.const
			c.u64()
			c.at += 16
		case 0x6a, 0x6b, 0x6c, 0x7c, 0x7d, 0x7e: // add, sub, mul
		default:
			c.refuse("instruction %#x in a constant expression", op)
		}
	}
}

// section walks the section that fills the rest of the cursor.
func (c *cursor) section(id byte) {
	switch id {
	case 0:
		c.custom()
	case 1:
		c.each(3, func() {
			if form := c.byte(); form != 0x60 {
				c.refuse("type form %#x; only functions, 0x60, are supported", form)
			}
			c.each(1, c.valueType)
			c.each(1, c.valueType)
		})
	case 2:
		c.each(4, c.importItem)
	case 3:
		c.each(1, c.index)
	case 4:
		n := c.count(3)
		if n > tablesMax {
			c.refuse("%d tables; at most %d are allowed", n, tablesMax)
		}
		c.tables = binary.AppendUvarint(nil, uint64(n))
		for i := 0; i < n && c.err == nil; i++ {
			c.table()
		}
	case 5:
		c.each(2, func() { c.limits() })
	case 6:
		c.each(3, func() { c.valueType(); c.byte(); c.expression() })
	case 7:
		c.each(3, func() { c.skip(); c.byte(); c.index() })
	case 9:
		c.each(2, c.element)
	case 10:
		c.each(3, c.function)
	case 11:
		c.each(2, c.segment)
	case 13:
		c.each(2, func() { c.byte(); c.index() })
	}
}

func (c *cursor) importItem() {
	c.skip()
	c.skip()
	switch kind := c.byte(); kind {
	case 0: // function
		c.index()
	case 1:
		c.table()
	case 2: // memory
		c.limits()
	case 3: // global
		c.valueType()
		c.byte()
	case 4: // tag
		c.byte()
		c.index()
	default:
		c.refuse("import of kind %d", kind)
	}
}

// element walks an element segment; its flags say which parts it has.
func (c *cursor) element() {
	flags := c.u64()
	if flags > 7 {
		c.refuse("element segment of kind %d", flags)
	}
	if flags&1 == 0 { // active
		if flags&2 != 0 {
			c.index() // of the table
		}
		c.expression()
	}
	if flags&3 != 0 {
		c.valueType() // or the kind of element, one byte as well
	}
	if flags&4 != 0 {
		c.each(1, c.expression)
	} else {
		c.each(1, c.index)
	}
}

// function walks the code of one function: its size, its locals; the instructions are
// the runtime's.
func (c *cursor) function() {
	size := c.count(1)
	end := c.at + size
	c.each(2, func() {
		c.locals += min(c.u64(), localsMax+1)
		c.valueType()
	})
	if c.locals > localsMax {
		c.refuse("more than %d locals in all functions together", localsMax)
	}
	if c.at > end {
		c.refuse("the locals of a function go beyond its end")
	}
	c.at = end
}

func (c *cursor) segment() {
	kind := c.u64()
	if kind > 2 {
		c.refuse("data segment of kind %d", kind)
	}
	if kind == 2 {
		c.index() // of the memory
	}
	if kind != 1 {
		c.expression()
	}
	c.skip()
}

// custom walks the names for debugging; other custom sections are not decoded.
func (c *cursor) custom() {
	n := c.count(1)
	name := string(c.b[c.at : c.at+n])
	c.at += n
	if name != "name" {
		return
	}
	for c.at < len(c.b) && c.err == nil {
		id := c.byte()
		size := c.count(1)
		sub := &cursor{b: c.b[:c.at+size], at: c.at, in: c.in, err: c.err}
		named := func() { sub.index(); sub.skip() }
		switch id {
		case 0:
			sub.skip()
		case 1:
			sub.each(2, named)
		case 2:
			sub.each(2, func() { sub.index(); sub.each(2, named) })
		}
		c.err = sub.err
		c.at += size
	}
}
