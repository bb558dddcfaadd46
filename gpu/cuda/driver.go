package cuda

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
)

var (
	// ErrNoDriver is wrapped when the machine has no CUDA driver (libcuda.so.1): the
	// normal state of a machine without a GPU.
	ErrNoDriver = errors.New("no CUDA driver on this machine")
	// ErrNoDevice is wrapped when the driver is there and shows no GPU, or not the one
	// that was asked for.
	ErrNoDevice = errors.New("no such GPU")
	// ErrOldDriver is wrapped when the driver lacks functions that this package calls.
	ErrOldDriver = errors.New("the CUDA driver is too old")
)

// library is the driver's soname: that of every version since CUDA 2.
const library = "libcuda.so.1"

// A symbol is a function of the driver.
type symbol int

const (
	cuInit symbol = iota
	cuDriverGetVersion
	cuGetErrorName
	cuGetErrorString
	cuDeviceGetCount
	cuDeviceGet
	cuDeviceGetName
	cuDeviceGetUUID
	cuDeviceGetPCIBusID
	cuDeviceTotalMem
	cuDeviceGetAttribute
	cuDevicePrimaryCtxRetain
	cuDevicePrimaryCtxRelease
	cuCtxSetCurrent
	cuCtxGetStreamPriorityRange
	cuModuleLoadData
	cuModuleUnload
	cuModuleGetFunction
	cuLaunchKernel
	cuMemGetInfo
	cuMemAlloc
	cuMemFree
	cuMemsetD8Async
	cuMemGetAddressRange
	cuMemHostAlloc
	cuMemFreeHost
	cuMemHostGetDevicePointer
	cuMemHostRegister
	cuMemHostUnregister
	cuMemcpyDtoHAsync
	cuMemcpyHtoDAsync
	cuMemcpy2DAsync
	cuMemcpyBatchAsync
	cuStreamCreateWithPriority
	cuStreamDestroy
	cuStreamSynchronize
	cuEventCreate
	cuEventDestroy
	cuEventRecord
	cuEventQuery
	cuIpcGetMemHandle
	cuIpcOpenMemHandle
	cuIpcCloseMemHandle
	cuIpcGetEventHandle
	cuIpcOpenEventHandle
	symbols
)

// symbolNames are the names in the library. The suffix is the version of the function's
// signature, and is part of the driver's stable interface.
var symbolNames = [symbols]string{
	cuInit:                      "cuInit",
	cuDriverGetVersion:          "cuDriverGetVersion",
	cuGetErrorName:              "cuGetErrorName",
	cuGetErrorString:            "cuGetErrorString",
	cuDeviceGetCount:            "cuDeviceGetCount",
	cuDeviceGet:                 "cuDeviceGet",
	cuDeviceGetName:             "cuDeviceGetName",
	cuDeviceGetUUID:             "cuDeviceGetUuid",
	cuDeviceGetPCIBusID:         "cuDeviceGetPCIBusId",
	cuDeviceTotalMem:            "cuDeviceTotalMem_v2",
	cuDeviceGetAttribute:        "cuDeviceGetAttribute",
	cuDevicePrimaryCtxRetain:    "cuDevicePrimaryCtxRetain",
	cuDevicePrimaryCtxRelease:   "cuDevicePrimaryCtxRelease_v2",
	cuCtxSetCurrent:             "cuCtxSetCurrent",
	cuCtxGetStreamPriorityRange: "cuCtxGetStreamPriorityRange",
	cuModuleLoadData:            "cuModuleLoadData",
	cuModuleUnload:              "cuModuleUnload",
	cuModuleGetFunction:         "cuModuleGetFunction",
	cuLaunchKernel:              "cuLaunchKernel",
	cuMemGetInfo:                "cuMemGetInfo_v2",
	cuMemAlloc:                  "cuMemAlloc_v2",
	cuMemFree:                   "cuMemFree_v2",
	cuMemsetD8Async:             "cuMemsetD8Async",
	cuMemGetAddressRange:        "cuMemGetAddressRange_v2",
	cuMemHostAlloc:              "cuMemHostAlloc",
	cuMemFreeHost:               "cuMemFreeHost",
	cuMemHostGetDevicePointer:   "cuMemHostGetDevicePointer_v2",
	cuMemHostRegister:           "cuMemHostRegister_v2",
	cuMemHostUnregister:         "cuMemHostUnregister",
	cuMemcpyDtoHAsync:           "cuMemcpyDtoHAsync_v2",
	cuMemcpyHtoDAsync:           "cuMemcpyHtoDAsync_v2",
	cuMemcpy2DAsync:             "cuMemcpy2DAsync_v2",
	cuMemcpyBatchAsync:          "cuMemcpyBatchAsync",
	cuStreamCreateWithPriority:  "cuStreamCreateWithPriority",
	cuStreamDestroy:             "cuStreamDestroy_v2",
	cuStreamSynchronize:         "cuStreamSynchronize",
	cuEventCreate:               "cuEventCreate",
	cuEventDestroy:              "cuEventDestroy_v2",
	cuEventRecord:               "cuEventRecord",
	cuEventQuery:                "cuEventQuery",
	cuIpcGetMemHandle:           "cuIpcGetMemHandle",
	cuIpcOpenMemHandle:          "cuIpcOpenMemHandle_v2",
	cuIpcCloseMemHandle:         "cuIpcCloseMemHandle",
	cuIpcGetEventHandle:         "cuIpcGetEventHandle",
	cuIpcOpenEventHandle:        "cuIpcOpenEventHandle",
}

// optional are functions that a driver may lack: what they do is done without, slower.
// cuMemcpyBatchAsync came with CUDA 12.8.
var optional = map[symbol]bool{cuMemcpyBatchAsync: true}

// has says whether the driver has an optional function.
func (d *driver) has(s symbol) bool { return d.fn[s] != 0 }

// Constants of the driver's header.
const (
	codeOutOfMemory = 2
	codeNoDevice    = 100
	codeNotReady    = 600

	hostAllocPortable    = 1 // CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTREGISTER_PORTABLE
	hostAllocDeviceMap   = 2 // CU_MEMHOSTALLOC_DEVICEMAP
	streamNonBlocking    = 1 // CU_STREAM_NON_BLOCKING
	eventDisableTiming   = 2 // CU_EVENT_DISABLE_TIMING
	eventInterprocess    = 4 // CU_EVENT_INTERPROCESS
	ipcLazyPeerAccess    = 1 // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
	memoryHost           = 1 // CU_MEMORYTYPE_HOST
	memoryDevice         = 2 // CU_MEMORYTYPE_DEVICE
	orderStream          = 1 // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
	preferOverlap        = 1 // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
	attrComputeMajor     = 75
	attrMPS              = 133 // CU_DEVICE_ATTRIBUTE_MPS_ENABLED
	ipcHandleBytes       = 64
	computeMajorMin      = 7 // the kernels are written for sm_70
	driverTextBytesLimit = 256
)

// fatal holds the codes after which, by the driver's documentation, a context gives the
// same error for ever, or the device is gone.
var fatal = map[int]bool{
	4: true, 46: true, 100: true, 101: true, 201: true, 214: true, 220: true, 226: true,
	700: true, 702: true, 709: true, 710: true, 714: true, 715: true, 716: true, 717: true,
	718: true, 719: true, 721: true, 999: true,
}

// An Error is a call of the driver that failed.
type Error struct {
	// Call is the function, as the library names it.
	Call string
	// Code is the driver's number, Name and Text are what it calls it.
	Code       int
	Name, Text string
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d): %s", e.Call, e.Name, e.Code, e.Text) }

// driver is the loaded library.
type driver struct {
	version int // 1000 x major + 10 x minor of the CUDA version that it supports
	fn      [symbols]uintptr

	pinMu sync.Mutex // held by writers of pins
	// pins are the ranges of host memory that Pin was given, of all devices: pinned
	// memory is portable between contexts.
	pins atomic.Pointer[[]*Pinned]
	// hosts are the ranges that AllocHost made, by their first byte.
	hosts sync.Map
}

// load opens the library once in a process; what it found is not going to change.
var load = sync.OnceValues(func() (*driver, error) {
	lib, err := purego.Dlopen(library, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrNoDriver, err)
	}
	d, err := resolve(library, func(name string) uintptr {
		p, err := purego.Dlsym(lib, name)
		if err != nil {
			return 0
		}
		return p
	})
	if err != nil {
		return nil, err
	}
	if err := d.call(cuInit, 0); err != nil {
		if e := (*Error)(nil); errors.As(err, &e) && e.Code == codeNoDevice {
			return nil, fmt.Errorf("%w: %w", ErrNoDevice, err)
		}
		return nil, err
	}
	var v int32
	if err := d.call(cuDriverGetVersion, uintptr(unsafe.Pointer(&v))); err != nil {
		return nil, err
	}
	d.version = int(v)
	return d, nil
})

// resolve looks up every function and names all that are missing.
func resolve(lib string, lookup func(name string) uintptr) (*driver, error) {
	d := &driver{}
	var missing []string
	for s, name := range symbolNames {
		if d.fn[s] = lookup(name); d.fn[s] == 0 && !optional[symbol(s)] {
			missing = append(missing, name)
		}
	}
	if missing != nil {
		return nil, fmt.Errorf("%w: %s lacks %s; install a driver of CUDA 11 or later (R450)", ErrOldDriver, lib, strings.Join(missing, ", "))
	}
	return d, nil
}

// call calls a function of the driver; most need a current context (see Device.enter).
//
//go:uintptrescapes
func (d *driver) call(s symbol, args ...uintptr) error {
	r, _, _ := purego.SyscallN(d.fn[s], args...)
	if code := int(uint32(r)); code != 0 {
		return d.error(s, code)
	}
	return nil
}

// code is call for functions that answer with a code which is no failure.
//
//go:uintptrescapes
func (d *driver) code(s symbol, args ...uintptr) int {
	r, _, _ := purego.SyscallN(d.fn[s], args...)
	return int(uint32(r))
}

func (d *driver) error(s symbol, code int) *Error {
	e := &Error{Call: symbolNames[s], Code: code}
	text := func(s symbol, unknown string) string {
		var p unsafe.Pointer
		if d.code(s, uintptr(code), uintptr(unsafe.Pointer(&p))) != 0 || p == nil {
			return unknown
		}
		return cString(p)
	}
	e.Name = text(cuGetErrorName, "CUDA_ERROR")
	e.Text = text(cuGetErrorString, "the driver has no text for it")
	return e
}

func cString(p unsafe.Pointer) string {
	b := unsafe.Slice((*byte)(p), driverTextBytesLimit)
	for n := range b {
		if b[n] == 0 {
			return string(b[:n])
		}
	}
	return string(b)
}
