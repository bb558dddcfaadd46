package devices

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/cuda"
	"github.com/tierd/tierd/gpu/mem"
	"github.com/tierd/tierd/gpu/nvml"
)

// fake is a GPU in host memory.
type fake struct {
	*mem.Device
	in     cuda.Info
	mu     sync.Mutex
	lost   error
	pinErr error
	closed bool
}

func (f *fake) ImportEvent(context.Context, gpu.Handle) (gpu.Event, error) {
	return nil, errors.ErrUnsupported
}
func (f *fake) Info() cuda.Info { return f.in }
func (f *fake) Name() string    { return fmt.Sprintf("cuda:%d", f.in.Ordinal) }
func (f *fake) Lost() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost
}
func (f *fake) MemoryBytes() (free, total int64, err error) { return 30, 100, f.Lost() }
func (f *fake) Open() (regions, events int)                 { return 0, 0 }
func (f *fake) Pin(mem []byte) (Pinned, error) {
	if f.pinErr != nil {
		return nil, f.pinErr
	}
	return &pin{n: int64(len(mem)), stopped: make(chan struct{})}, nil
}

func (f *fake) Close() error {
	f.closed = true
	return f.Device.Close()
}

type pin struct {
	n       int64
	stopped chan struct{}
}

func (p *pin) Bytes() int64 { return p.n / 2 }
func (p *pin) Wait(ctx context.Context) error {
	<-p.stopped
	return context.Canceled
}
func (p *pin) Close() error { close(p.stopped); return nil }

// gpus is a driver with GPUs of these UUIDs, the last of which cannot be opened.
func gpus(t *testing.T, fakes *[]*fake, uuids ...string) Driver {
	var all []cuda.Info
	for i, u := range uuids {
		all = append(all, cuda.Info{Ordinal: i, Name: "Fake", UUID: "GPU-" + u, MPS: u == "mps"})
	}
	return Driver{
		List: func() ([]cuda.Info, error) { return all, nil },
		Open: func(_ context.Context, ordinal int, _ string) (GPU, error) {
			if all[ordinal].UUID == "GPU-broken" {
				return nil, errors.New("out of memory")
			}
			m, err := mem.New(t.TempDir())
			f := &fake{Device: m, in: all[ordinal]}
			*fakes = append(*fakes, f)
			return f, err
		},
		Monitor: func() (Monitor, error) { return nil, nvml.ErrNoDriver },
	}
}

// TestChoice: what is chosen, and what is said about it.
func TestChoice(t *testing.T) {
	none := Driver{List: func() ([]cuda.Info, error) { return nil, fmt.Errorf("CUDA: %w", cuda.ErrNoDriver) }}
	broken := Driver{List: func() ([]cuda.Info, error) { return nil, fmt.Errorf("CUDA: %w", cuda.ErrOldDriver) }}
	var fakes []*fake
	for _, c := range []struct {
		choice    string
		driver    Driver
		name, why string
		err       string
	}{
		{"mem", gpus(t, &fakes, "a"), "mem", "device is mem", ""},
		{"auto", gpus(t, &fakes, "a", "b"), "cuda:0", "device is auto, and this is the first of 2 GPUs", ""},
		{"auto", none, "mem", "device is auto, and there is no GPU to use: CUDA: no CUDA driver on this machine", ""},
		{"auto", gpus(t, &fakes), "mem", "device is auto, and the driver has no GPU", ""},
		{"auto", gpus(t, &fakes, "broken"), "mem", "device is auto, and the GPU could not be opened: out of memory", ""},
		{"auto", broken, "mem", "device is auto, and the GPU could not be opened: CUDA: the CUDA driver is too old", ""},
		{"cuda:1", gpus(t, &fakes, "a", "b"), "cuda:1", "device is cuda:1", ""},
		{"cuda:GPU-b", gpus(t, &fakes, "a", "b"), "cuda:1", "device is cuda:GPU-b", ""},
		{"cuda:B", gpus(t, &fakes, "a", "b"), "cuda:1", "device is cuda:B", ""},
		{"auto", gpus(t, &fakes, "mps", "a"), "cuda:0", "device is auto, and this is the first of 2 GPUs; under CUDA's MPS", ""},
		{"cuda:0", gpus(t, &fakes, "mps"), "cuda:0", "device is cuda:0; under CUDA's MPS", ""},
		{"cuda:1", gpus(t, &fakes, "mps", "b"), "cuda:1", "device is cuda:1", ""},
		{"cuda:2", gpus(t, &fakes, "a", "b"), "", "", "device is cuda:2, but the driver has cuda:0 (GPU-a), cuda:1 (GPU-b); name one of them, or use auto"},
		{"cuda:0", gpus(t, &fakes), "", "", "device is cuda:0, but the driver has no GPU; use auto or mem"},
		{"cuda:0", none, "", "", "device is cuda:0: CUDA: no CUDA driver on this machine"},
		{"cuda:0", gpus(t, &fakes, "broken"), "", "", "device is cuda:0: out of memory"},
	} {
		s, err := Open(t.Context(), Options{Choice: c.choice, Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Driver: c.driver})
		if c.err != "" {
			require.EqualError(t, err, c.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []string{c.name, c.why}, []string{s.Name(), s.Why()})
		require.Equal(t, "mem", s.Host.Name(), "host memory is there with every choice")
		require.Equal(t, -1, s.Node())
		r := s.Report()
		require.Equal(t, c.name != "mem", r.Present)
		if r.Present {
			require.Equal(t, "NVML is absent: no NVIDIA driver on this machine (libnvidia-ml.so.1)", r.NoHealth)
			require.Equal(t, []int64{30, 100}, []int64{r.Free, r.TotalBytes})
			require.Equal(t, s.Name() == "cuda:1", r.UUID == "GPU-b")
		}
		require.NoError(t, s.Close())
	}
	for _, f := range fakes {
		require.True(t, f.closed)
	}
}

// monitored is a monitor that the test leads.
type monitored struct {
	mu     sync.Mutex
	is     nvml.GPU
	events chan nvml.Event
	hangs  chan struct{}
	closed bool
}

func (m *monitored) GPU(uuid string) (nvml.GPU, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.is.UUID = uuid
	return m.is, nil
}

func (m *monitored) Watch(ctx context.Context, f func(nvml.Event)) error {
	for {
		select {
		case e := <-m.events:
			f(e)
		case <-ctx.Done():
			if m.hangs != nil {
				<-m.hangs
			}
			return ctx.Err()
		}
	}
}

func (m *monitored) Close() error { m.closed = true; return nil }

// TestHealth: warnings are said in the log once, and in each report as long as they hold;
// critical errors are counted; the slab's part that is pinned is known.
func TestHealth(t *testing.T) {
	var fakes []*fake
	var log bytes.Buffer
	m := &monitored{is: nvml.GPU{NUMANode: 3, Link: nvml.Link{Lanes: 4, LanesMax: 16}}, events: make(chan nvml.Event)}
	d := gpus(t, &fakes, "a")
	d.Monitor = func() (Monitor, error) { return m, nil }
	s, err := Open(t.Context(), Options{Choice: "auto", Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil)), Driver: d})
	require.NoError(t, err)
	require.Equal(t, 3, s.Node())
	lanes := "GPU-a: the PCIe link has 4 lanes, but GPU and slot can do 16; reseat the card or look at the riser"
	require.Equal(t, []string{lanes}, s.Report().Warnings)
	s.mon.look(m)
	m.events <- nvml.Event{UUID: "GPU-other", XID: 13}
	m.events <- nvml.Event{UUID: "GPU-a", DoubleBit: true}
	m.events <- nvml.Event{UUID: "GPU-a", XID: 79}
	m.events <- nvml.Event{UUID: "GPU-a", XID: 0}
	r := s.Report()
	require.Equal(t, []uint64{1, 79}, []uint64{r.XIDErrors, r.LastXID})
	require.Len(t, r.Warnings, 2)
	require.Contains(t, r.Warnings[1], "GPU-a: the driver has reported 1 critical errors since the start, the last with XID 79")
	m.mu.Lock()
	m.is.Link.Lanes = 16
	m.mu.Unlock()
	s.mon.look(m)
	require.Len(t, s.Report().Warnings, 1, "the link was mended")

	s.Pin(make([]byte, 1000))
	r = s.Report()
	require.Equal(t, []int64{500, 1000}, []int64{r.Pinned, r.PinnedOf})
	require.Empty(t, r.PinError)
	fakes[0].lost = fmt.Errorf("cuda:0: %w: as if", gpu.ErrLost)
	s.mon.look(m)
	s.mon.look(m)
	require.Equal(t, "cuda:0: device is lost: as if", s.Report().Lost)
	require.Equal(t, int64(100), s.Report().TotalBytes, "what was known stays")
	require.ErrorIs(t, s.GPU.Lost(), gpu.ErrLost)
	require.NoError(t, s.Host.Lost())
	require.NoError(t, s.Close())
	require.True(t, m.closed)
	require.Equal(t, 1, bytes.Count(log.Bytes(), []byte(lanes)))
	require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("the GPU is lost: its engines")))
}

// TestLibraryThatHangs: Close leaves it alone.
func TestLibraryThatHangs(t *testing.T) {
	var fakes []*fake
	m := &monitored{hangs: make(chan struct{}), events: make(chan nvml.Event)}
	d := gpus(t, &fakes, "a")
	d.Monitor = func() (Monitor, error) { return m, nil }
	s, err := Open(t.Context(), Options{Choice: "auto", Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Driver: d})
	require.NoError(t, err)
	began := time.Now()
	require.NoError(t, s.Close())
	require.Less(t, time.Since(began), 2*monitorGrace)
	require.True(t, fakes[0].closed)
	close(m.hangs)
	<-s.mon.done
}

// TestPinRefused: the node goes on, and says so.
func TestPinRefused(t *testing.T) {
	var fakes []*fake
	s, err := Open(t.Context(), Options{Choice: "auto", Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Driver: gpus(t, &fakes, "a")})
	require.NoError(t, err)
	fakes[0].pinErr = errors.New("ulimit -l")
	s.Pin(make([]byte, 10))
	require.Equal(t, "ulimit -l", s.Report().PinError)
	require.NoError(t, s.Close())
}

// TestCopiesAreCounted in both directions, failures apart.
func TestCopiesAreCounted(t *testing.T) {
	s, err := Open(t.Context(), Options{Choice: "mem", Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	reg, err := s.Host.Alloc(t.Context(), 100)
	require.NoError(t, err)
	b := make([]byte, 60)
	require.NoError(t, s.Host.Gather(t.Context(), b, reg, []gpu.Fragment{{Length: 60}}))
	require.NoError(t, s.Host.Scatter(t.Context(), reg, []gpu.Fragment{{Length: 20}, {Offset: 40, Length: 20}}, b[:40]))
	require.Error(t, s.Host.Scatter(t.Context(), reg, []gpu.Fragment{{Length: 101}}, b))
	r := s.Report()
	st, ld := r.Stores[KindMem], r.Loads[KindMem]
	require.Positive(t, min(st.Seconds, ld.Seconds))
	st.Seconds, ld.Seconds = 0, 0
	require.Equal(t, Copies{Bytes: 60}, st)
	require.Equal(t, Copies{Bytes: 40, Failures: 1}, ld)
	require.NoError(t, s.Close())
}

// TestNear: the policy holds while f runs and not after it, and a node that is not there
// is a preference that is not followed, and no failure.
func TestNear(t *testing.T) {
	policy := func() int {
		var mode int32
		_, _, errno := unix.Syscall(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), 0, 0)
		if errno != 0 {
			t.Skipf("this kernel tells no policy: %v", errno)
		}
		return int(mode)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := policy()
	ran := 0
	err := Near(0, func() error {
		ran++
		require.Equal(t, policyPreferred, policy())
		return nil
	})
	if errors.Is(err, ErrPolicy) {
		t.Skipf("this kernel takes no policy: %v", err)
	}
	require.NoError(t, err)
	require.Equal(t, before, policy())
	require.EqualError(t, Near(0, func() error { ran++; return errors.New("mine") }), "mine")
	require.NoError(t, Near(-1, func() error { ran++; require.Equal(t, before, policy()); return nil }))
	require.ErrorIs(t, Near(nodesMax-1, func() error { ran++; return nil }), ErrPolicy)
	require.EqualError(t, Near(nodesMax-1, func() error { ran++; return errors.New("mine") }), "mine")
	require.Equal(t, 5, ran)
	require.Equal(t, before, policy())
}
