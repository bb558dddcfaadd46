package fuel

import "fmt"

// A reader goes forward through bytes. After its first error, which says where, every
// read returns 0.
type reader struct {
	b     []byte
	at    int
	start int
	in    string // the section, for messages
	err   error
}

func (r *reader) refuse(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("not a valid module: %s, byte %d: %s", r.in, r.at, fmt.Sprintf(format, args...))
	}
}

func (r *reader) byte() byte {
	if r.err != nil || r.at >= len(r.b) {
		r.refuse("it ends in the middle of an item")
		return 0
	}
	r.at++
	return r.b[r.at-1]
}

// u32 reads an unsigned LEB128 number of at most 32 bits.
func (r *reader) u32() uint32 {
	if r.err == nil && r.at < len(r.b) && r.b[r.at] < 0x80 {
		r.at++
		return uint32(r.b[r.at-1])
	}
	var v uint64
	for shift := 0; shift < 35; shift += 7 {
		b := r.byte()
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			if v > 1<<32-1 {
				break
			}
			return uint32(v)
		}
	}
	r.refuse("a number has more than 32 bits")
	return 0
}

// leb passes over a signed LEB128 number of at most bytes.
func (r *reader) leb(bytes int) {
	for range bytes {
		if r.byte() < 0x80 {
			return
		}
	}
	r.refuse("a number has more than %d bytes", bytes)
}

// skip passes over n bytes.
func (r *reader) skip(n int) {
	if r.err == nil && n > len(r.b)-r.at {
		r.refuse("it ends in the middle of an item")
	}
	if r.err == nil {
		r.at += n
	}
}

// count reads how many items of at least itemBytes follow.
func (r *reader) count(itemBytes int) int {
	n := r.u32()
	if left := len(r.b) - r.at; r.err == nil && int64(n) > int64(left/itemBytes) {
		r.refuse("it announces %d items of at least %d bytes, and %d bytes are left", n, itemBytes, left)
	}
	if r.err != nil {
		return 0
	}
	return int(n)
}

// each reads a vector whose items have at least itemBytes.
func (r *reader) each(itemBytes int, item func()) {
	for n := r.count(itemBytes); n > 0 && r.err == nil; n-- {
		item()
	}
}

// atMost refuses a vector of more than most items. It does not pass its length, and
// leaves one that cannot be to count.
func (r *reader) atMost(most int, what string) {
	n := *r
	if have := n.count(1); have > most {
		r.refuse("%d %s; at most %d are allowed", have, what, most)
	}
}

// bytes reads a vector of bytes, such as a name.
func (r *reader) bytes() []byte {
	n := r.count(1)
	r.at += n
	return r.b[r.at-n : r.at]
}

// index reads an index and refuses one that the module as given does not have: what is
// appended to it is out of its reach.
func (r *reader) index(what string, have int) int {
	i := r.u32()
	if r.err == nil && int64(i) >= int64(have) {
		r.refuse("%s %d of %d", what, i, have)
	}
	if r.err != nil {
		return 0
	}
	return int(i)
}

// zero reads a byte that is reserved.
func (r *reader) zero() {
	if b := r.byte(); b != 0 {
		r.refuse("a reserved byte is %#x, not 0", b)
	}
}

func isReference(t byte) bool { return t == TypeFuncref || t == TypeExternref }

func (r *reader) valueType() byte {
	t := r.byte()
	if !isReference(t) && (t < TypeV128 || t > TypeI32) {
		r.refuse("value type %#x", t)
	}
	return t
}

func (r *reader) referenceType() byte {
	t := r.byte()
	if !isReference(t) {
		r.refuse("type %#x; funcref, 0x70, and externref, 0x6f, are the types of references", t)
	}
	return t
}

// peek returns the next byte without passing it.
func (r *reader) peek() byte {
	if r.err != nil || r.at >= len(r.b) {
		r.byte()
		return 0
	}
	return r.b[r.at]
}
