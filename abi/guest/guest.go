// Package guest is the Go SDK for rules that ship as a WebAssembly module.
//
// # Writing a module
//
// A module is an ordinary main package that exports its specs from init:
//
//	package main
//
//	import "github.com/tierd/tierd/abi/guest"
//
//	func init() { guest.Export(MyRule()) }
//
//	func main() {}
//
// and is built as a library, so that the host can call it again and again:
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -trimpath -ldflags='-s -w' -o rule.wasm
//
// Export must run before the first call of the host, that is, from an init function:
// in a library main is never called. The same package builds natively, where Export
// only remembers the specs; run package abitest over them there.
//
// # What it does
//
// The package exports the functions of ABI version 1 and imports the two functions
// that the host offers, both described in the design's section on the wasm ABI. An
// input is pulled into one buffer and an answer is left in another; both grow to the
// largest call seen and are used again, so that a call allocates nothing after the
// first of its size. States and bitmaps are little-endian words on the wire and in
// memory, so neither is converted.
//
// A rule that panics ends its instance: the host reports the panic's text, throws the
// instance away and starts a fresh one.
package guest

import (
	"encoding/binary"
	"errors"
	"strconv"
	"unsafe"

	"github.com/tierd/tierd/abi"
)

// Export makes the specs the rules of this module, in this order. It may be called
// more than once; the rules add up.
func Export(specs ...abi.Spec) { module.specs = append(module.specs, specs...) }

// Answers of an export that are not a view.
const (
	failed   = -1 // the reason was given to the import fail
	noResume = -2 // kv_need: abi.ErrNoResume
)

// module is what this module exports. A guest is one instance with one goroutine.
var module core

// A core answers the calls of ABI version 1, wherever the input comes from and the
// answer goes to. The files for each platform are a thin shell around it.
type core struct {
	specs []abi.Spec
	rules []opened
	// reason is why the last call returned failed.
	reason string
	// in is the input of this call, out the view that it returns. They hold words, so
	// that states and bitmaps in them are aligned.
	in, out []uint64
	// newer holds the Round of a record whose size is not that of this version.
	newer abi.Round
}

// An opened is a rule behind a handle; need is nil for a policy.
type opened struct {
	rule abi.Rule
	spec abi.SpecRule
}

func (c *core) fail(reason string) int64 {
	c.reason = reason
	return failed
}

// room returns buffer *b with at least n words.
func room(b *[]uint64, n int) []uint64 {
	if len(*b) < n {
		*b = make([]uint64, max(n, 2*len(*b), 512))
	}
	return *b
}

// bytesOf returns the first n bytes of w.
func bytesOf(w []uint64, n int) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), n)
}

// open opens the rule that the n bytes of input name and returns its handle: size
// u32, rule index u32, then one u64 a parameter.
func (c *core) open(n int) int64 {
	in := bytesOf(c.in, n)
	le := binary.LittleEndian
	if n < 8 || int(le.Uint32(in)) > n || le.Uint32(in) < 8 || le.Uint32(in)%8 != 0 {
		return c.fail("kv_open: " + strconv.Itoa(n) + " bytes are not a record of size, rule index and parameters")
	}
	index := le.Uint32(in[4:])
	if uint64(index) >= uint64(len(c.specs)) {
		return c.fail("kv_open: rule index is " + strconv.FormatUint(uint64(index), 10) +
			"; this module has " + strconv.Itoa(len(c.specs)) + " rules")
	}
	params := make([]uint64, (le.Uint32(in)-8)/8)
	for i := range params {
		params[i] = le.Uint64(in[8+8*i:])
	}
	rule, err := c.specs[index].Open(params)
	if err != nil {
		return c.fail(err.Error())
	}
	o := opened{rule: rule}
	o.spec, _ = rule.(abi.SpecRule)
	c.rules = append(c.rules, o)
	return int64(len(c.rules) - 1)
}

// begin reads the handle and the Round of a call of n bytes; the rest of the input
// starts at the byte end. It returns nil when it has called fail. The Round lives in
// the input.
func (c *core) begin(handle int32, n int) (o *opened, r *abi.Round, end int) {
	if uint32(handle) >= uint32(len(c.rules)) {
		c.fail("handle " + strconv.Itoa(int(handle)) + " is not open; this instance opened " + strconv.Itoa(len(c.rules)))
		return nil, nil, 0
	}
	// A record of this version is the struct as it lies in memory, after its head.
	if n >= abi.RoundBytes && uint32(c.in[0]) == abi.RoundBytes {
		r, end = (*abi.Round)(unsafe.Pointer(&c.in[1])), abi.RoundBytes
	} else {
		rest, err := c.newer.DecodeWire(bytesOf(c.in, n))
		if err != nil {
			c.fail(err.Error())
			return nil, nil, 0
		}
		r, end = &c.newer, n-len(rest)
	}
	if r.Hi < r.Lo || r.Hi > abi.MaxChunks {
		c.fail("round: chunks " + strconv.FormatUint(uint64(r.Lo), 10) + " to " + strconv.FormatUint(uint64(r.Hi), 10) +
			" are no range below " + strconv.Itoa(abi.MaxChunks))
		return nil, nil, 0
	}
	return &c.rules[handle], r, end
}

// The cast in begin needs the struct to be the record without its head of 8 bytes.
var _ = [1]byte{}[unsafe.Sizeof(abi.Round{})-(abi.RoundBytes-8)]

// bitmap returns an empty bitmap for bits bits in out, after skip words.
func (c *core) bitmap(skip, bits int) abi.Bitmap {
	w := abi.BitmapWords(bits)
	b := abi.Bitmap(room(&c.out, skip+w)[skip : skip+w])
	b.Zero()
	return b
}

// beyond reports whether a bit at or beyond bits is set in the last word of b: the host
// sees only those of the last byte.
func beyond(b abi.Bitmap, bits int) bool { return bits&63 != 0 && b[len(b)-1]>>(uint(bits)&63) != 0 }

func (c *core) failBeyond(fn string, bits int) int64 {
	return c.fail(fn + ": the rule set a bit at or beyond " + strconv.Itoa(bits) + ", the chunks asked for")
}

// reach, scan and need leave their answer in out and return how many bytes of it are
// the view, or a negative answer.

func (c *core) reach(handle int32, n int) int64 {
	o, r, _ := c.begin(handle, n)
	if o == nil {
		return failed
	}
	bits := r.Chunks()
	out := c.bitmap(0, bits)
	if err := o.rule.Reach(*r, out); err != nil {
		return c.fail(err.Error())
	}
	if beyond(out, bits) {
		return c.failBeyond("kv_reach", bits)
	}
	return int64(bits+7) / 8
}

func (c *core) scan(handle int32, n int) int64 {
	o, r, end := c.begin(handle, n)
	if o == nil {
		return failed
	}
	bits := r.Chunks()
	words := abi.StatesWords(bits)
	if n-end < 8*words {
		return c.fail("kv_scan: the states of " + strconv.Itoa(bits) + " chunks are " + strconv.Itoa(8*words) +
			" bytes, but only " + strconv.Itoa(n-end) + " follow the round")
	}
	if end%8 != 0 { // a newer record of odd size: align the states again
		copy(bytesOf(c.in, n), bytesOf(c.in, n)[end:])
		end = 0
	}
	demand := c.bitmap(1, bits)
	span, err := o.rule.Scan(*r, abi.States(c.in[end/8:end/8+words]), demand)
	if err != nil {
		return c.fail(err.Error())
	}
	if beyond(demand, bits) {
		return c.failBeyond("kv_scan", bits)
	}
	c.out[0] = uint64(span.Usable)
	if span.Deferred {
		c.out[0] |= 1 << 32
	}
	return 8 + int64(bits+7)/8
}

func (c *core) need(handle int32, n int) int64 {
	o, r, _ := c.begin(handle, n)
	if o == nil {
		return failed
	}
	if o.spec == nil {
		return c.fail("kv_need: a policy has no need")
	}
	out := c.bitmap(0, int(r.Hi))
	err := o.spec.Need(*r, out)
	switch {
	case err == nil && beyond(out, int(r.Hi)):
		return c.failBeyond("kv_need", int(r.Hi))
	case err == nil:
		return int64(r.Hi+7) / 8
	case err == abi.ErrNoResume || errors.Is(err, abi.ErrNoResume):
		return noResume
	}
	return c.fail(err.Error())
}
