package wasm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
)

// The functions that an instance is called through, indexes of instance.fns.
const (
	fnOpen = iota
	fnReach
	fnScan
	fnNeed
	fnManifest
	fnCount
)

var fnNames = [fnCount]string{"kv_open", "kv_reach", "kv_scan", "kv_need", "kv_manifest"}

// Answers of a guest that are not a view.
const (
	answerFailed   = -1
	answerNoResume = -2
)

// handleMax bounds a handle: an i32 that is not negative.
const handleMax = 1<<31 - 1

// An instance is one instance of a module. One goroutine uses it at a time.
//
// It is its own context: the host functions get back the context of the call, and in
// it the instance, without a lookup or an allocation. That context has no deadline
// and is never done.
type instance struct {
	module *Module
	mod    api.Module
	mem    api.Memory
	fns    [fnCount]api.Function // nil where the export is missing
	// stacks are the guest's stacks that the runtime keeps, one for each of fns: its own
	// fields, which it tells nobody about. TestDeepCallsLeaveNoStack fails when they are
	// not found any more.
	stacks [fnCount]reflect.Value
	// fuel is the counter of units left, budget what it was set to for the last call.
	fuel   api.MutableGlobal
	budget uint64
	// handles holds the handle of each opened rule by its id, or -1. opened counts them.
	handles []int32
	opened  int
	// in is the input of the call being made, reason what fail was called with.
	in, reason []byte
	stderr     stderr
	stack      [1]uint64
}

// stackField is the field of the runtime's functions that holds their stack, after one
// that keeps others from implementing the interface.
const stackField = 1

type instanceKey struct{}

func (in *instance) Deadline() (time.Time, bool) { return time.Time{}, false }
func (in *instance) Done() <-chan struct{}       { return nil }
func (in *instance) Err() error                  { return nil }

func (in *instance) Value(key any) any {
	if key == (instanceKey{}) {
		return in
	}
	return nil
}

// caller returns the instance whose call ctx belongs to.
func caller(ctx context.Context) *instance {
	if in, ok := ctx.(*instance); ok {
		return in
	}
	return ctx.Value(instanceKey{}).(*instance)
}

// stderr keeps the beginning of what a guest prints there.
type stderr struct{ text []byte }

func (s *stderr) Write(p []byte) (int, error) {
	if room := ReasonBytesMax - len(s.text); room > 0 {
		s.text = append(s.text, p[:min(room, len(p))]...)
	}
	return len(p), nil
}

// newInstance makes a fresh instance.
func (m *Module) newInstance() (*instance, error) {
	in := &instance{module: m}
	config := wazero.NewModuleConfig().
		WithName("").         // anonymous: there are many
		WithStartFunctions(). // none: the counter is not set yet
		WithStderr(&in.stderr)
	mod, err := m.runtime.InstantiateModule(in, m.code, config)
	if err != nil {
		return nil, in.trap("", "instantiation", err)
	}
	in.mod, in.mem = mod, mod.ExportedMemory("memory")
	in.fuel = mod.ExportedGlobal(fuel.Counter).(api.MutableGlobal)
	for i := range fnNames {
		in.find(i)
	}
	if m.start {
		err = in.setUp(fuel.Start, "the start function")
	}
	if err == nil {
		err = in.setUp("_initialize", "_initialize")
	}
	if err != nil {
		in.close()
		return nil, err
	}
	in.refill(0) // no call has been made
	return in, nil
}

// setUp calls a function of the module, if it has it, that takes and returns nothing.
func (in *instance) setUp(export, name string) error {
	f := in.mod.ExportedFunction(export)
	if f == nil {
		return nil
	}
	in.refill(SetupUnits)
	if err := f.CallWithStack(in, nil); err != nil {
		return in.trap("", name, err)
	}
	return nil
}

// refill gives the next call its fuel.
func (in *instance) refill(units uint64) {
	in.budget = units
	in.fuel.Set(units)
}

// burnt returns the units that the last call has burnt.
func (in *instance) burnt() uint64 {
	if left := int64(in.fuel.Get()); left > 0 {
		return in.budget - uint64(left)
	}
	return in.budget
}

func (in *instance) close() {
	// The error would come from the files of the instance, which has none.
	_ = in.mod.Close(context.Background())
}

// call calls fn with in.in as the input and units of fuel, and returns the answer.
// What it returns as an error is not clean: the instance must not be used again.
func (in *instance) call(rule string, fn int, handle int32, units uint64) (int64, error) {
	in.reason = in.reason[:0]
	in.stack[0] = uint64(uint32(handle))
	in.refill(units)
	if err := in.fns[fn].CallWithStack(in, in.stack[:]); err != nil {
		return 0, in.trap(rule, fnNames[fn], err)
	}
	if in.stacks[fn].Cap() > stackItemsKept {
		in.find(fn) // anew
	}
	return int64(in.stack[0]), nil
}

// find looks a function up, which gives it a new, small stack.
func (in *instance) find(fn int) {
	f := in.mod.ExportedFunction(fnNames[fn])
	if in.fns[fn] = f; f != nil {
		in.stacks[fn] = reflect.ValueOf(f).Elem().Field(stackField)
	}
}

// callUnits is the fuel of a call about a round.
func callUnits(round *abi.Round) uint64 {
	chunks := uint64(round.Hi)
	if round.ChunkTokens > 0 {
		chunks = max(chunks, min(round.StoredTokens/round.ChunkTokens, abi.MaxChunks))
	}
	return CallUnits + ChunkUnits*chunks
}

// trap turns an error of the runtime into one of this package.
func (in *instance) trap(rule, fn string, err error) error {
	if rule == "" {
		rule = "(loading)"
	}
	if in.fuel != nil && int64(in.fuel.Get()) < 0 {
		return &FuelError{Rule: rule, Func: fn, Budget: in.budget}
	}
	return &TrapError{Rule: rule, Func: fn, Err: err, Stderr: clean(in.stderr.text)}
}

// clean failures keep the instance; everything else that can go wrong does not.

func isClean(err error) bool {
	if err == nil || err == abi.ErrNoResume {
		return true
	}
	var g *GuestError
	return errors.As(err, &g)
}

// refused is the error for a negative answer.
func (in *instance) refused(rule string, fn int, answer int64) error {
	switch {
	case answer == answerFailed:
		return &GuestError{Rule: rule, Func: fnNames[fn], Reason: clean(in.reason)}
	case answer == answerNoResume && fn == fnNeed:
		return abi.ErrNoResume
	case answer == answerNoResume:
		return protocol(rule, fn, "it answered -2, which only kv_need may")
	}
	return protocol(rule, fn, "it answered %d; an answer is a view, -1 or, of kv_need, -2", answer)
}

func protocol(rule string, fn int, format string, args ...any) error {
	return &ProtocolError{Rule: rule, Func: fnNames[fn], Problem: fmt.Sprintf(format, args...)}
}

// view calls fn and returns the view it answers, which must have exactly size bytes.
// It is valid until the next call.
func (in *instance) view(rule string, fn int, handle int32, units uint64, size int) ([]byte, error) {
	answer, err := in.call(rule, fn, handle, units)
	if err != nil {
		return nil, err
	}
	if answer < 0 {
		return nil, in.refused(rule, fn, answer)
	}
	ptr, n := uint32(answer>>32), uint32(answer)
	if int64(n) != int64(size) {
		return nil, protocol(rule, fn, "the view has %d bytes; exactly %d are expected", n, size)
	}
	b, ok := in.mem.Read(ptr, n)
	if !ok {
		return nil, protocol(rule, fn, "the view of %d bytes at %d is not inside the memory of %d bytes", n, ptr, in.mem.Size())
	}
	return b, nil
}

// manifest returns a copy of the JSON of kv_manifest.
func (in *instance) manifest() ([]byte, error) {
	const rule = "(loading)"
	in.in = in.in[:0]
	answer, err := in.call(rule, fnManifest, 0, SetupUnits)
	if err != nil {
		return nil, err
	}
	if answer < 0 {
		return nil, in.refused(rule, fnManifest, answer)
	}
	ptr, n := uint32(answer>>32), uint32(answer)
	if n > manifestBytesMax {
		return nil, fmt.Errorf("kv_manifest: %d bytes; at most %d are read", n, manifestBytesMax)
	}
	b, ok := in.mem.Read(ptr, n)
	if !ok {
		return nil, protocol(rule, fnManifest, "the view of %d bytes at %d is not inside the memory of %d bytes", n, ptr, in.mem.Size())
	}
	return append([]byte(nil), b...), nil
}

// handle returns the handle of r in this instance and opens it when it has none.
func (in *instance) handle(r *rule) (int32, error) {
	if r.id < len(in.handles) && in.handles[r.id] >= 0 {
		return in.handles[r.id], nil
	}
	return in.open(r)
}

func (in *instance) open(r *rule) (int32, error) {
	le := binary.LittleEndian
	in.in = le.AppendUint32(in.in[:0], uint32(8+8*len(r.params)))
	in.in = le.AppendUint32(in.in, r.spec.index)
	for _, v := range r.params {
		in.in = le.AppendUint64(in.in, v)
	}
	answer, err := in.call(r.name, fnOpen, 0, SetupUnits)
	if err != nil {
		return 0, err
	}
	if answer < 0 {
		return 0, in.refused(r.name, fnOpen, answer)
	}
	if answer > handleMax {
		return 0, protocol(r.name, fnOpen, "it answered the handle %d; a handle is at most %d", answer, handleMax)
	}
	for len(in.handles) <= r.id {
		in.handles = append(in.handles, -1)
	}
	in.handles[r.id] = int32(answer)
	in.opened++
	return int32(answer), nil
}

// begin writes the Round into the input and returns the handle of r.
func (in *instance) begin(r *rule, round *abi.Round) (int32, error) {
	h, err := in.handle(r)
	in.in = round.AppendWire(in.in[:0])
	return h, err
}

func (in *instance) reach(r *rule, round *abi.Round, out abi.Bitmap) error {
	h, err := in.begin(r, round)
	if err != nil {
		return err
	}
	n := round.Chunks()
	b, err := in.view(r.name, fnReach, h, callUnits(round), (n+7)/8)
	if err != nil {
		return err
	}
	return readBitmap(r.name, fnReach, out, b, n)
}

func (in *instance) scan(r *rule, round *abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	h, err := in.begin(r, round)
	if err != nil {
		return abi.Span{}, err
	}
	n := round.Chunks()
	in.in = appendStates(in.in, states, n)
	b, err := in.view(r.name, fnScan, h, callUnits(round), 8+(n+7)/8)
	if err != nil {
		return abi.Span{}, err
	}
	usable, flags := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	if flags&^1 != 0 {
		return abi.Span{}, protocol(r.name, fnScan, "flags are %#x; only bit 0, deferred, is known", flags)
	}
	span := abi.Span{Usable: usable, Deferred: flags&1 != 0}
	if int64(usable) > int64(n) {
		return abi.Span{}, protocol(r.name, fnScan, "%d chunks are usable of %d", usable, n)
	}
	return span, readBitmap(r.name, fnScan, demand, b[8:], n)
}

func (in *instance) need(r *rule, round *abi.Round, out abi.Bitmap) error {
	h, err := in.begin(r, round)
	if err != nil {
		return err
	}
	n := int(round.Hi)
	b, err := in.view(r.name, fnNeed, h, callUnits(round), (n+7)/8)
	if err != nil {
		return err
	}
	return readBitmap(r.name, fnNeed, out, b, n)
}

// appendStates appends the wire form of n states, a word at a time.
func appendStates(b []byte, t abi.States, n int) []byte {
	words := abi.StatesWords(n)
	for i := 0; i < words; i++ {
		w := t[i]
		if tail := n - i*32; tail < 32 {
			w &= ^uint64(0) >> (uint(32-tail) * 2)
		}
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

// readBitmap fills the first n bits of out from exactly (n+7)/8 bytes, a word at a
// time, and refuses a bit beyond them.
func readBitmap(rule string, fn int, out abi.Bitmap, b []byte, n int) error {
	if n&7 != 0 && b[len(b)-1]>>(uint(n)&7) != 0 {
		return protocol(rule, fn, "a bit at or beyond %d is set: the padding of a bitmap is 0", n)
	}
	i := 0
	for ; len(b) >= 8; i++ {
		out[i] = binary.LittleEndian.Uint64(b)
		b = b[8:]
	}
	if len(b) > 0 {
		var w [8]byte
		copy(w[:], b)
		out[i] = binary.LittleEndian.Uint64(w[:])
	}
	return nil
}
