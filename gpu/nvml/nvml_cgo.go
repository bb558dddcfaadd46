//go:build cgo && linux

package nvml

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"

	api "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Built says whether this binary can read NVML.
const Built = true

const (
	// affinityWordsMax is the size of the set of NUMA nodes that is asked for: 1024
	// nodes, which is what Linux knows.
	affinityWordsMax = 16
	// watchPause is between two looks of Watch. It does not wait in the library, which
	// takes half a core for that.
	watchPause = 250 * time.Millisecond
)

// A Library is the management library, started.
type Library struct {
	api api.Interface

	mu     sync.RWMutex // held for reading by calls, for writing by Close
	closed bool
}

// Open starts the library. An error that wraps ErrAbsent is no failure of the machine.
func Open() (*Library, error) {
	l := &Library{api: api.New()}
	switch ret := l.api.Init(); ret {
	case api.SUCCESS:
		return l, nil
	case api.ERROR_LIBRARY_NOT_FOUND, api.ERROR_DRIVER_NOT_LOADED:
		return nil, ErrNoDriver
	default:
		// The text comes from a table of the bindings: the library is not to be asked.
		return nil, fmt.Errorf("NVML: start: %s (%d)", ret.String(), int(ret))
	}
}

// fail is an error of a call on one GPU.
func fail(call, of string, ret api.Return) error {
	return fmt.Errorf("NVML: %s of %s: %s (%d)", call, of, ret.String(), int(ret))
}

func (l *Library) use() (done func(), err error) {
	l.mu.RLock()
	if l.closed {
		l.mu.RUnlock()
		return nil, errors.New("NVML: the library is closed")
	}
	return l.mu.RUnlock, nil
}

// GPUs reads all GPUs.
func (l *Library) GPUs() ([]GPU, error) {
	done, err := l.use()
	if err != nil {
		return nil, err
	}
	defer done()
	n, ret := l.api.DeviceGetCount()
	if ret != api.SUCCESS {
		return nil, fail("count", "the GPUs", ret)
	}
	gpus := make([]GPU, n)
	for i := range gpus {
		d, ret := l.api.DeviceGetHandleByIndex(i)
		if ret != api.SUCCESS {
			return nil, fail("handle", fmt.Sprintf("GPU %d", i), ret)
		}
		if gpus[i], err = read(d); err != nil {
			return nil, err
		}
	}
	return gpus, nil
}

// GPU reads the one with this UUID.
func (l *Library) GPU(uuid string) (GPU, error) {
	done, err := l.use()
	if err != nil {
		return GPU{}, err
	}
	defer done()
	d, ret := l.api.DeviceGetHandleByUUID(uuid)
	switch ret {
	case api.SUCCESS:
		return read(d)
	case api.ERROR_NOT_FOUND, api.ERROR_INVALID_ARGUMENT:
		return GPU{}, fmt.Errorf("NVML: %w: %s", ErrNotFound, uuid)
	default:
		return GPU{}, fail("handle", uuid, ret)
	}
}

// read asks for everything. Identity and memory must be known; the rest is not told by
// every model and every virtual machine.
func read(d api.Device) (g GPU, err error) {
	var ret api.Return
	if g.UUID, ret = d.GetUUID(); ret != api.SUCCESS {
		return GPU{}, fail("UUID", "a GPU", ret)
	}
	if g.Name, ret = d.GetName(); ret != api.SUCCESS {
		return GPU{}, fail("name", g.UUID, ret)
	}
	m, ret := d.GetMemoryInfo()
	if ret != api.SUCCESS {
		return GPU{}, fail("memory", g.UUID, ret)
	}
	g.TotalBytes, g.UsedBytes = m.Total, m.Used
	if p, ret := d.GetPciInfo(); ret == api.SUCCESS {
		for _, c := range p.BusId {
			if c == 0 {
				break
			}
			g.PCIBusID += string(rune(c))
		}
	}
	g.Link, g.NUMANode = link(d), node(d)
	if on, _, ret := d.GetEccMode(); ret == api.SUCCESS {
		g.ECC = on == api.FEATURE_ENABLED
	}
	if n, ret := d.GetTotalEccErrors(api.MEMORY_ERROR_TYPE_UNCORRECTED, api.VOLATILE_ECC); ret == api.SUCCESS {
		g.UncorrectedErrors = n
	}
	if _, _, pending, failed, ret := d.GetRemappedRows(); ret == api.SUCCESS {
		g.RemapPending, g.RemapFailed = pending, failed
	}
	return g, nil
}

func link(d api.Device) (l Link) {
	known := func(n int, ret api.Return) int {
		if ret != api.SUCCESS {
			return 0
		}
		return n
	}
	l.Generation = known(d.GetCurrPcieLinkGeneration())
	l.GenerationMax = known(d.GetMaxPcieLinkGeneration())
	l.Lanes = known(d.GetCurrPcieLinkWidth())
	l.LanesMax = known(d.GetMaxPcieLinkWidth())
	state, ret := d.GetPerformanceState()
	l.Idle = ret != api.SUCCESS || state != api.PSTATE_0
	if u, ret := d.GetUtilizationRates(); ret == api.SUCCESS && u.Gpu == 0 && u.Memory == 0 {
		l.Idle = true // a GPU with nothing to do may rest its link and not its clocks
	}
	return l
}

// node is the first NUMA node whose memory is next to the GPU.
func node(d api.Device) int {
	words, ret := d.GetMemoryAffinity(affinityWordsMax, api.AFFINITY_SCOPE_NODE)
	if ret != api.SUCCESS {
		return -1
	}
	for i, w := range words {
		if w != 0 {
			return i*bits.UintSize + bits.TrailingZeros(w)
		}
	}
	return -1
}

// Watch calls f for each message of the driver about its GPUs until ctx ends. A driver
// that sends none, as in some virtual machines, makes it fail with errors.ErrUnsupported.
func (l *Library) Watch(ctx context.Context, f func(Event)) error {
	done, err := l.use()
	if err != nil {
		return err
	}
	defer done()
	set, ret := l.api.EventSetCreate()
	if ret != api.SUCCESS {
		return fail("event set", "the GPUs", ret)
	}
	defer set.Free()
	if err := l.register(set); err != nil {
		return err
	}
	for ctx.Err() == nil {
		e, ret := set.Wait(0)
		switch ret {
		case api.ERROR_TIMEOUT:
			select {
			case <-ctx.Done():
			case <-time.After(watchPause):
			}
		case api.SUCCESS:
			out := Event{DoubleBit: e.EventType == api.EventTypeDoubleBitEccError}
			if e.EventType == api.EventTypeXidCriticalError {
				out.XID = e.EventData
			}
			out.UUID, _ = e.Device.GetUUID()
			f(out)
		default:
			return fail("wait for events", "the GPUs", ret)
		}
	}
	return ctx.Err()
}

func (l *Library) register(set api.EventSet) error {
	n, ret := l.api.DeviceGetCount()
	if ret != api.SUCCESS {
		return fail("count", "the GPUs", ret)
	}
	for i := range n {
		d, ret := l.api.DeviceGetHandleByIndex(i)
		if ret != api.SUCCESS {
			return fail("handle", fmt.Sprintf("GPU %d", i), ret)
		}
		switch ret := d.RegisterEvents(api.EventTypeXidCriticalError|api.EventTypeDoubleBitEccError, set); ret {
		case api.SUCCESS:
		case api.ERROR_NOT_SUPPORTED:
			return fmt.Errorf("NVML: events of GPU %d: %w", i, errors.ErrUnsupported)
		default:
			return fail("register events", fmt.Sprintf("GPU %d", i), ret)
		}
	}
	return nil
}

// Close ends the use of the library, once no call uses it; a Watch must be ended first.
// Closing twice is harmless.
func (l *Library) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	if ret := l.api.Shutdown(); ret != api.SUCCESS {
		return fmt.Errorf("NVML: end: %s (%d)", ret.String(), int(ret))
	}
	return nil
}
