// Package nvml reads what the driver's management library says of the GPUs of a machine:
// which there are, how much memory they have, how they hang on the bus, and whether they
// are healthy. It never changes a setting.
//
// The library is opened at run time. That it is absent is a normal state, ErrNoDriver, and
// so is a binary without it: the bindings need cgo, and one that was built without cgo
// answers ErrNotBuilt. Both wrap ErrAbsent. A Library exists only when its start
// succeeded, because functions of NVML must not be called after a start that failed.
//
// Copying bytes needs none of this; package gpu/cuda works without.
package nvml

import (
	"errors"
	"fmt"
)

var (
	// ErrAbsent is wrapped when there is nothing to read from.
	ErrAbsent = errors.New("NVML is absent")
	// ErrNoDriver says that the machine has no driver.
	ErrNoDriver = fmt.Errorf("%w: no NVIDIA driver on this machine (libnvidia-ml.so.1)", ErrAbsent)
	// ErrNotBuilt says that this binary was built without cgo.
	ErrNotBuilt = fmt.Errorf("%w: this binary was built without cgo (CGO_ENABLED=1 puts it in)", ErrAbsent)
	// ErrNotFound is wrapped when no GPU has the UUID that was asked for.
	ErrNotFound = errors.New("no GPU with this UUID")
)

// A GPU is what NVML says of one GPU at one time. What the driver does not tell of this
// model is zero, or -1 where it says so.
type GPU struct {
	// UUID is the name that CUDA and nvidia-smi use too: "GPU-" and hexadecimal digits.
	UUID string
	// Name of the model, and PCIBusID as "00000000:00:00.0".
	Name, PCIBusID string
	// TotalBytes and UsedBytes of memory, by all processes.
	TotalBytes, UsedBytes uint64
	// Link is how it hangs on the bus.
	Link Link
	// NUMANode is the node of host memory next to it, or -1.
	NUMANode int
	// ECC says whether memory errors are found. UncorrectedErrors counts those since
	// the driver was loaded that could not be corrected.
	ECC               bool
	UncorrectedErrors uint64
	// RemapPending: rows of memory will be replaced at the next reset. RemapFailed: a
	// row could not be replaced, and the GPU should be.
	RemapPending, RemapFailed bool
}

// A Link is a PCIe link: its generation and number of lanes now, and the largest that
// this GPU and its slot can do together. An idle GPU lowers the generation.
type Link struct {
	Generation, GenerationMax int
	Lanes, LanesMax           int
	// Idle says that the GPU saves power, so that Generation says nothing.
	Idle bool
}

// Warnings says what is wrong with the GPU, one sentence each.
func (g GPU) Warnings() (w []string) {
	l := g.Link
	if l.Lanes > 0 && l.Lanes < l.LanesMax {
		w = append(w, fmt.Sprintf("%s: the PCIe link has %d lanes, but GPU and slot can do %d; reseat the card or look at the riser", g.UUID, l.Lanes, l.LanesMax))
	}
	if !l.Idle && l.Generation > 0 && l.Generation < l.GenerationMax {
		w = append(w, fmt.Sprintf("%s: the PCIe link runs at generation %d, but GPU and slot can do %d", g.UUID, l.Generation, l.GenerationMax))
	}
	if g.UncorrectedErrors > 0 {
		w = append(w, fmt.Sprintf("%s: %d memory errors could not be corrected since the driver was loaded", g.UUID, g.UncorrectedErrors))
	}
	if g.RemapPending {
		w = append(w, fmt.Sprintf("%s: rows of memory wait for replacement; reset the GPU when it is free", g.UUID))
	}
	if g.RemapFailed {
		w = append(w, fmt.Sprintf("%s: a row of memory could not be replaced; replace the GPU", g.UUID))
	}
	return w
}

// An Event is a message of the driver about a GPU.
type Event struct {
	UUID string
	// XID is the number of a critical error, as in the kernel's log; 0 for others.
	XID uint64
	// DoubleBit says that memory had an error that could not be corrected.
	DoubleBit bool
}
