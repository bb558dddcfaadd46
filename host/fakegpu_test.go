package host

import (
	"context"
	"crypto/sha512"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/cuda"
	"github.com/tierd/tierd/gpu/mem"
	"github.com/tierd/tierd/gpu/nvml"
	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// A fakeDriver has GPUs that are host memory: regions are files, and what stands for a
// handle of CUDA IPC is the digest of a file's path. So the engine of a test opens what the
// node has allocated, and the node what the engine has.
type fakeDriver struct {
	t *testing.T

	mu      sync.Mutex
	gpus    []*fakeGPU
	paths   map[string]gpu.Handle // by handle
	events  map[string]*fakeEvent
	monitor *fakeMonitor
}

const fakeUUID = "GPU-00000000-1111-2222-3333-44444444444"

func newFakeDriver(t *testing.T) *fakeDriver {
	return &fakeDriver{t: t, paths: map[string]gpu.Handle{}, events: map[string]*fakeEvent{}, monitor: &fakeMonitor{}}
}

func (d *fakeDriver) driver() devices.Driver {
	return devices.Driver{
		List: func() ([]cuda.Info, error) { return []cuda.Info{d.info(0), d.info(1)}, nil },
		Open: func(_ context.Context, ordinal int, _ string) (devices.GPU, error) {
			m, err := mem.New(d.t.TempDir())
			if err != nil {
				return nil, err
			}
			g := &fakeGPU{driver: d, mem: m, in: d.info(ordinal)}
			d.mu.Lock()
			d.gpus = append(d.gpus, g)
			d.mu.Unlock()
			return g, nil
		},
		Monitor: func() (devices.Monitor, error) { return d.monitor, nil },
	}
}

func (d *fakeDriver) info(ordinal int) cuda.Info {
	return cuda.Info{Ordinal: ordinal, Name: "Fake 1", UUID: fmt.Sprint(fakeUUID, ordinal), PCIBusID: "0000:01:00.0", TotalBytes: 1 << 30}
}

// handle makes a handle of a region's own.
func (d *fakeDriver) handle(h gpu.Handle) gpu.Handle {
	sum := sha512.Sum512([]byte(h.Path))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.paths[string(sum[:])] = h
	return gpu.Handle{Kind: gpu.HandleCUDA, Opaque: sum[:], Length: h.Length}
}

// open maps what a handle names, as an engine does.
func (d *fakeDriver) open(t *testing.T, m *enginepb.Memory) []byte {
	t.Helper()
	d.mu.Lock()
	h, ok := d.paths[string(m.Handle)]
	d.mu.Unlock()
	require.True(t, ok)
	f, err := shm.Map(h.Path, int64(m.OffsetBytes), int64(m.LengthBytes))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f.Bytes()
}

// event makes an event of an engine's.
func (d *fakeDriver) event(name string) *fakeEvent {
	sum := sha512.Sum512([]byte(name))
	e := &fakeEvent{handle: sum[:]}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events[string(sum[:])] = e
	return e
}

// A fakeEvent is done unless it was recorded and not reached.
type fakeEvent struct {
	handle []byte

	mu      sync.Mutex
	pending chan struct{}
	waits   int
}

func (e *fakeEvent) record() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending = make(chan struct{})
}

func (e *fakeEvent) reach() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.pending)
	e.pending = nil
}

func (e *fakeEvent) Wait(ctx context.Context) error {
	e.mu.Lock()
	p := e.pending
	e.waits++
	e.mu.Unlock()
	if p == nil {
		return nil
	}
	select {
	case <-p:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for event: %w", ctx.Err())
	}
}

func (e *fakeEvent) waited() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waits
}

func (e *fakeEvent) Export() (gpu.Handle, error) { return gpu.Handle{}, errors.ErrUnsupported }
func (e *fakeEvent) Close() error                { return nil }

// fakeGPU is a GPU of a fakeDriver.
type fakeGPU struct {
	driver *fakeDriver
	mem    *mem.Device
	in     cuda.Info

	mu     sync.Mutex
	lost   error
	open   int // regions
	events int // of engines, that are open
}

// fakeRegion is one of mem's with a handle of CUDA's.
type fakeRegion struct {
	gpu.Region
	g    *fakeGPU
	once sync.Once
}

func (r *fakeRegion) Export() (gpu.Handle, error) {
	h, err := r.Region.Export()
	if err != nil {
		return h, err
	}
	return r.g.driver.handle(h), nil
}

func (r *fakeRegion) Close() error {
	r.once.Do(func() {
		r.g.mu.Lock()
		r.g.open--
		r.g.mu.Unlock()
	})
	return r.Region.Close()
}

func (g *fakeGPU) add(r gpu.Region, err error) (gpu.Region, error) {
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	g.open++
	g.mu.Unlock()
	return &fakeRegion{Region: r, g: g}, nil
}

func (g *fakeGPU) Open() (regions, events int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open, g.events
}

// idle says that nothing is open.
func (g *fakeGPU) idle() bool {
	regions, events := g.Open()
	return regions+events == 0
}

func (g *fakeGPU) lose() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.lost = fmt.Errorf("%s: %w: as if it had fallen off the bus", g.Name(), gpu.ErrLost)
}

func (g *fakeGPU) Name() string    { return fmt.Sprintf("cuda:%d", g.in.Ordinal) }
func (g *fakeGPU) Info() cuda.Info { return g.in }
func (g *fakeGPU) Close() error    { return g.mem.Close() }

func (g *fakeGPU) Lost() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lost
}

func (g *fakeGPU) MemoryBytes() (free, total int64, err error) { return 3 << 28, 1 << 30, g.Lost() }

func (g *fakeGPU) Alloc(ctx context.Context, size int64) (gpu.Region, error) {
	if err := g.Lost(); err != nil {
		return nil, err
	}
	return g.add(g.mem.Alloc(ctx, size))
}

func (g *fakeGPU) Import(ctx context.Context, h gpu.Handle) (gpu.Region, error) {
	g.driver.mu.Lock()
	file, ok := g.driver.paths[string(h.Opaque)]
	g.driver.mu.Unlock()
	if !ok || h.Kind != gpu.HandleCUDA {
		return nil, errors.New("no such handle")
	}
	return g.add(g.mem.Import(ctx, gpu.Handle{Kind: gpu.HandleFile, Path: file.Path, Offset: h.Offset, Length: h.Length}))
}

func (g *fakeGPU) ImportEvent(_ context.Context, h gpu.Handle) (gpu.Event, error) {
	g.driver.mu.Lock()
	defer g.driver.mu.Unlock()
	if e := g.driver.events[string(h.Opaque)]; e != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.events++
		return &openEvent{fakeEvent: e, g: g}, nil
	}
	return nil, errors.New("no such event")
}

// openEvent is an engine's event as a GPU has opened it.
type openEvent struct {
	*fakeEvent
	g    *fakeGPU
	once sync.Once
}

func (e *openEvent) Close() error {
	e.once.Do(func() {
		e.g.mu.Lock()
		defer e.g.mu.Unlock()
		e.g.events--
	})
	return nil
}

// inner takes the wrapping off a region.
func inner(r gpu.Region) gpu.Region {
	parts := gpu.Parts(r)
	bare := make([]gpu.Region, len(parts))
	for i, p := range parts {
		bare[i] = p.(*fakeRegion).Region
	}
	if len(bare) == 1 {
		return bare[0]
	}
	j, err := gpu.Join(bare...)
	if err != nil {
		panic(err)
	}
	return j
}

func (g *fakeGPU) Gather(ctx context.Context, dst []byte, src gpu.Region, frags []gpu.Fragment) error {
	if err := g.Lost(); err != nil {
		return err
	}
	return g.mem.Gather(ctx, dst, inner(src), frags)
}

func (g *fakeGPU) Scatter(ctx context.Context, dst gpu.Region, frags []gpu.Fragment, src []byte) error {
	if err := g.Lost(); err != nil {
		return err
	}
	return g.mem.Scatter(ctx, inner(dst), frags, src)
}

func (g *fakeGPU) Pin(mem []byte) (devices.Pinned, error) { return fakePinned(len(mem)), nil }

type fakePinned int

func (p fakePinned) Bytes() int64               { return int64(p) }
func (p fakePinned) Wait(context.Context) error { return nil }
func (p fakePinned) Close() error               { return nil }

// fakeMonitor says what it is told to say.
type fakeMonitor struct {
	mu sync.Mutex
	is nvml.GPU
}

func (m *fakeMonitor) GPU(uuid string) (nvml.GPU, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.is
	g.UUID = uuid
	return g, nil
}

func (m *fakeMonitor) Watch(ctx context.Context, f func(nvml.Event)) error {
	<-ctx.Done()
	return ctx.Err()
}

func (m *fakeMonitor) Close() error { return nil }

// startFake is a node on GPU 0 of a fake driver.
func startFake(t *testing.T, d *fakeDriver, id string, options ...nodeOption) (*Node, *fakeGPU) {
	t.Helper()
	cfg := testConfig(t, id, options...)
	cfg.Device = "auto"
	n := startConfig(t, id, cfg, unjudged, &logTo{}, d.driver())
	d.mu.Lock()
	defer d.mu.Unlock()
	return n, d.gpus[len(d.gpus)-1]
}

// soon is what a test waits for at most where something must happen.
const soon = 30 * time.Second
