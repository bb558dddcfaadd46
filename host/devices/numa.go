package devices

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Policies of set_mempolicy, from the kernel's linux/mempolicy.h.
const (
	policyDefault   = 0
	policyPreferred = 1
	// nodesMax is the number of NUMA nodes that Linux knows.
	nodesMax = 1024
)

// ErrPolicy is wrapped when the kernel does not take a preference of a NUMA node.
var ErrPolicy = errors.New("memory could not be asked for next to the GPU")

// Near runs f so that memory which it makes comes from a NUMA node while that has some,
// and from others after that. With node -1 it only runs f. f must stay on its goroutine.
// An error that wraps ErrPolicy means that f has run without the preference.
func Near(node int, f func() error) error {
	if node < 0 || node >= nodesMax {
		return f()
	}
	runtime.LockOSThread() // the policy is the thread's
	var mask [nodesMax / 64]uint64
	mask[node/64] = 1 << (node % 64)
	_, _, errno := unix.Syscall(unix.SYS_SET_MEMPOLICY, policyPreferred, uintptr(unsafe.Pointer(&mask)), nodesMax+1)
	if errno != 0 {
		runtime.UnlockOSThread()
		if err := f(); err != nil {
			return err
		}
		return fmt.Errorf("%w: node %d: %w", ErrPolicy, node, errno)
	}
	err := f()
	if _, _, errno := unix.Syscall(unix.SYS_SET_MEMPOLICY, policyDefault, 0, 0); errno != 0 {
		return err // the thread stays locked, and so ends with its goroutine
	}
	runtime.UnlockOSThread()
	return err
}
