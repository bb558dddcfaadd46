package guest

import (
	"strconv"
	"unsafe"

	"github.com/tierd/tierd/abi"
)

// inputBytesMax bounds the input of one call: a Round record of a newer minor
// version, at most 4 KiB, and the states of abi.MaxChunks chunks.
const inputBytesMax = 4096 + abi.MaxChunks/4

//go:wasmimport kv input
//go:noescape
func hostInput(ptr unsafe.Pointer, cap uint32) uint32

//go:wasmimport kv fail
//go:noescape
func hostFail(ptr unsafe.Pointer, len uint32)

//go:wasmexport kv_abi_1
func kvABI1() {}

//go:wasmexport kv_manifest
func kvManifest() int64 {
	manifest = appendManifest(manifest[:0], module.specs)
	return view(unsafe.Pointer(unsafe.SliceData(manifest)), int64(len(manifest)))
}

// manifest keeps the last answer of kv_manifest alive while the host reads it.
var manifest []byte

//go:wasmexport kv_open
func kvOpen() int64 {
	n, ok := pull()
	if !ok {
		return tell(failed)
	}
	return tell(module.open(n))
}

//go:wasmexport kv_reach
func kvReach(handle int32) int64 {
	n, ok := pull()
	if !ok {
		return tell(failed)
	}
	return answer(module.reach(handle, n))
}

//go:wasmexport kv_scan
func kvScan(handle int32) int64 {
	n, ok := pull()
	if !ok {
		return tell(failed)
	}
	return answer(module.scan(handle, n))
}

//go:wasmexport kv_need
func kvNeed(handle int32) int64 {
	n, ok := pull()
	if !ok {
		return tell(failed)
	}
	return answer(module.need(handle, n))
}

// pull copies this call's input into module.in and returns its length in bytes.
func pull() (int, bool) {
	in := room(&module.in, 1)
	n := int(hostInput(unsafe.Pointer(unsafe.SliceData(in)), uint32(8*len(in))))
	if n <= 8*len(in) {
		return n, true
	}
	if n > inputBytesMax {
		module.fail("input of " + strconv.Itoa(n) + " bytes; at most " + strconv.Itoa(inputBytesMax) + " are read")
		return 0, false
	}
	in = room(&module.in, (n+7)/8)
	hostInput(unsafe.Pointer(unsafe.SliceData(in)), uint32(8*len(in)))
	return n, true
}

// answer turns the number of bytes in module.out into a view of them.
func answer(v int64) int64 {
	if v < 0 {
		return tell(v)
	}
	return view(unsafe.Pointer(unsafe.SliceData(module.out)), v)
}

// tell gives the host the reason of a failed call.
func tell(v int64) int64 {
	if v == failed && module.reason != "" {
		hostFail(unsafe.Pointer(unsafe.StringData(module.reason)), uint32(len(module.reason)))
		module.reason = ""
	}
	return v
}

func view(p unsafe.Pointer, n int64) int64 { return int64(uintptr(p))<<32 | n }
