package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/tierd/tierd/gpu/nvml"
)

const (
	// lookEvery is how often the GPU is looked at: what changes about it lasts hours, and a
	// look costs the driver some milliseconds.
	lookEvery = 5 * time.Second
	// monitorGrace is how long Close waits for a library that hangs, as one does whose GPU
	// has fallen off the bus.
	monitorGrace = time.Second
)

// A Report is how the devices are.
type Report struct {
	// Device is "cuda:0" or "mem", and Why the reason for it.
	Device, Why string
	// Copies by kind of device.
	Stores, Loads map[string]Copies
	// Pinned bytes of the slab, of PinnedOf; PinError says why there will not be more.
	Pinned, PinnedOf int64
	PinError         string

	// What follows is of the GPU, and zero without one.
	Present             bool
	UUID, Name, BusID   string
	Lost                string // why; empty while it works
	TotalBytes, Free    int64
	Regions, Events     int      // that are open, of this process and of engines
	Health              nvml.GPU // zero when NoHealth is set
	NoHealth            string   // why nothing is known about its health
	XIDErrors           uint64   // since the start
	LastXID             uint64
	Warnings            []string
	SecondsSinceChecked float64 // 0 before the first look
}

// monitor looks at one GPU.
type monitor struct {
	gpu  GPU
	log  *slog.Logger
	stop context.CancelFunc
	done chan struct{}
	wg   sync.WaitGroup

	mu       sync.Mutex
	health   nvml.GPU
	absent   string
	free     int64
	total    int64
	xids     uint64
	last     uint64
	lost     bool
	looked   time.Time
	told     []string // warnings that the log has
	warnings []string
}

// startMonitor takes the first look before it returns, because the slab wants to know the
// node of memory next to the GPU.
func startMonitor(g GPU, d Driver, log *slog.Logger) *monitor {
	ctx, stop := context.WithCancel(context.Background())
	m := &monitor{gpu: g, log: log, stop: stop, done: make(chan struct{}), health: nvml.GPU{NUMANode: -1}}
	lib, err := d.Monitor()
	if err != nil {
		m.absent = err.Error()
		if !errors.Is(err, nvml.ErrAbsent) {
			log.Warn("nothing is known about the health of the GPU", "error", err)
		}
		lib = nil
	}
	m.look(lib)
	m.wg.Go(func() { m.run(ctx, lib) })
	if lib != nil {
		m.wg.Go(func() { m.watch(ctx, lib) })
	}
	go func() {
		m.wg.Wait()
		if lib != nil {
			if err := lib.Close(); err != nil {
				log.Warn("the management library could not be closed", "error", err)
			}
		}
		close(m.done)
	}()
	return m
}

func (m *monitor) run(ctx context.Context, lib Monitor) {
	t := time.NewTicker(lookEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			m.look(lib)
		}
	}
}

// look asks the driver and keeps the answer. A library that hangs keeps the last one.
func (m *monitor) look(lib Monitor) {
	free, total, memErr := m.gpu.MemoryBytes()
	lost := m.gpu.Lost()
	var h nvml.GPU
	var err error
	if lib != nil {
		h, err = lib.GPU(m.gpu.Info().UUID)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.looked = time.Now()
	if memErr == nil {
		m.free, m.total = free, total
	}
	if lib != nil {
		if m.absent = ""; err != nil {
			m.absent = err.Error()
		} else {
			m.health = h
		}
	}
	m.warnings = m.health.Warnings()
	for _, w := range m.warnings {
		if !slices.Contains(m.told, w) {
			m.told = append(m.told, w)
			m.log.Warn("the GPU needs attention", "warning", w)
		}
	}
	if lost != nil && !m.lost {
		m.lost = true
		m.log.Error("the GPU is lost: its engines compute everything themselves until this daemon is restarted", "error", lost)
	}
}

func (m *monitor) watch(ctx context.Context, lib Monitor) {
	uuid := m.gpu.Info().UUID
	err := lib.Watch(ctx, func(e nvml.Event) {
		if e.XID == 0 || !SameUUID(e.UUID, uuid) {
			return
		}
		m.mu.Lock()
		m.xids++
		m.last = e.XID
		m.mu.Unlock()
		m.log.Error("the driver reports a critical error of the GPU", "xid", e.XID, "uuid", e.UUID)
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, errors.ErrUnsupported) {
		m.log.Warn("critical errors of the GPU are not heard any more", "error", err)
	}
}

func (m *monitor) node() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.health.NUMANode
}

func (m *monitor) close() {
	m.stop()
	t := time.NewTimer(monitorGrace)
	defer t.Stop()
	select {
	case <-m.done:
	case <-t.C:
		m.log.Warn("the management library does not answer; it is left alone")
	}
}

// Report says how the devices are now. It asks no driver.
func (s *Set) Report() Report {
	r := Report{
		Device: s.Name(), Why: s.why,
		Stores: map[string]Copies{KindMem: s.Host.store.read(), KindCUDA: {}},
		Loads:  map[string]Copies{KindMem: s.Host.load.read(), KindCUDA: {}},
		Health: nvml.GPU{NUMANode: -1},
	}
	s.mu.Lock()
	r.PinnedOf = s.pinOf
	if s.pinned != nil {
		r.Pinned = s.pinned.Bytes()
	}
	if s.pinErr != nil {
		r.PinError = s.pinErr.Error()
	}
	s.mu.Unlock()
	if s.GPU == nil {
		return r
	}
	g := s.GPU.Device.(GPU)
	r.Stores[KindCUDA], r.Loads[KindCUDA] = s.GPU.store.read(), s.GPU.load.read()
	in := g.Info()
	r.Present, r.UUID, r.Name, r.BusID = true, in.UUID, in.Name, in.PCIBusID
	if err := g.Lost(); err != nil {
		r.Lost = err.Error()
	}
	r.Regions, r.Events = g.Open()
	m := s.mon
	m.mu.Lock()
	defer m.mu.Unlock()
	r.Free, r.TotalBytes, r.Health, r.NoHealth = m.free, m.total, m.health, m.absent
	r.XIDErrors, r.LastXID = m.xids, m.last
	r.Warnings = slices.Clone(m.warnings)
	if m.xids > 0 {
		r.Warnings = append(r.Warnings, fmt.Sprintf("%s: the driver has reported %d critical errors since the start, the last with XID %d; look it up in the driver's documentation", in.UUID, m.xids, m.last))
	}
	if !m.looked.IsZero() {
		r.SecondsSinceChecked = time.Since(m.looked).Seconds()
	}
	return r
}
