package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/cuda"
	"github.com/tierd/tierd/gpu/mem"
	"github.com/tierd/tierd/gpu/nvml"
)

// Choices that name no GPU.
const (
	Auto = "auto"
	Mem  = "mem"
)

// Kinds of devices, for metrics.
const (
	KindMem  = "mem"
	KindCUDA = "cuda"
)

// A GPU is what a node needs of one.
type GPU interface {
	gpu.Ordered
	// Info says which GPU it is.
	Info() cuda.Info
	// Lost returns why it cannot be used any more, or nil.
	Lost() error
	// MemoryBytes is how much memory it has free, and in all.
	MemoryBytes() (free, total int64, err error)
	// Open counts the regions and events that are not closed.
	Open() (regions, events int)
	// Pin makes host memory fast for copies, in the background.
	Pin(mem []byte) (Pinned, error)
}

// Pinned is host memory that is being registered with a GPU.
type Pinned interface {
	// Bytes registered so far.
	Bytes() int64
	// Wait returns when all is, or says why it will not be.
	Wait(ctx context.Context) error
	Close() error
}

// A Driver opens GPUs. Its zero fields mean NVIDIA's.
type Driver struct {
	// List lists the GPUs. An error that wraps cuda.ErrNoDriver or cuda.ErrNoDevice
	// says that there is none.
	List func() ([]cuda.Info, error)
	// Open opens one by its number. What it measures it keeps in the file.
	Open func(ctx context.Context, ordinal int, tuningFile string) (GPU, error)
	// Monitor opens the library that says how GPUs are. An error that wraps
	// nvml.ErrAbsent says that there is none.
	Monitor func() (Monitor, error)
}

// A Monitor says how a GPU is; nvml.Library is one.
type Monitor interface {
	GPU(uuid string) (nvml.GPU, error)
	Watch(ctx context.Context, f func(nvml.Event)) error
	Close() error
}

// nvidia is a cuda.Device as a GPU.
type nvidia struct{ *cuda.Device }

func (d nvidia) Pin(mem []byte) (Pinned, error) {
	p, err := d.Device.Pin(mem)
	if err != nil {
		return nil, err // and not a Pinned that holds nil
	}
	return p, nil
}

func (d Driver) withDefaults() Driver {
	if d.List == nil {
		d.List = cuda.Devices
	}
	if d.Open == nil {
		d.Open = func(ctx context.Context, ordinal int, tuningFile string) (GPU, error) {
			dev, err := cuda.Open(ctx, ordinal, cuda.Options{Separate: true, TuningFile: tuningFile})
			if err != nil {
				return nil, err
			}
			return nvidia{dev}, nil
		}
	}
	if d.Monitor == nil {
		d.Monitor = func() (Monitor, error) {
			l, err := nvml.Open()
			if err != nil {
				return nil, err
			}
			return l, nil
		}
	}
	return d
}

// Options of Open.
type Options struct {
	// Choice is one of those of the package comment.
	Choice string
	// Dir is for the regions in host memory.
	Dir string
	// TuningFile keeps what is measured of a GPU; "" keeps nothing.
	TuningFile string
	Log        *slog.Logger
	Driver     Driver
}

// A Device is one that counts what it copies.
type Device struct {
	gpu.Device
	// Kind is KindMem or KindCUDA.
	Kind  string
	store counter
	load  counter
}

// Copies counts the calls of one direction.
type Copies struct {
	// Bytes of the calls that succeeded, Failures of those that did not.
	Bytes, Failures uint64
	// Seconds that all calls took, waiting for their turn included.
	Seconds float64
	// InWork now.
	InWork int64
}

type counter struct {
	bytes, failures atomic.Uint64
	nanos, inWork   atomic.Int64
}

func (c *counter) count(bytes int, call func() error) error {
	began := time.Now()
	c.inWork.Add(1)
	err := call()
	c.inWork.Add(-1)
	c.nanos.Add(int64(time.Since(began)))
	if err != nil {
		c.failures.Add(1)
		return err
	}
	c.bytes.Add(uint64(bytes))
	return nil
}

func (c *counter) read() Copies {
	return Copies{Bytes: c.bytes.Load(), Failures: c.failures.Load(), Seconds: time.Duration(c.nanos.Load()).Seconds(), InWork: c.inWork.Load()}
}

// Gather implements gpu.Device.
func (d *Device) Gather(ctx context.Context, dst []byte, src gpu.Region, frags []gpu.Fragment) error {
	return d.store.count(len(dst), func() error { return d.Device.Gather(ctx, dst, src, frags) })
}

// Scatter implements gpu.Device.
func (d *Device) Scatter(ctx context.Context, dst gpu.Region, frags []gpu.Fragment, src []byte) error {
	return d.load.count(len(src), func() error { return d.Device.Scatter(ctx, dst, frags, src) })
}

// Lost returns why the device cannot be used any more, or nil.
func (d *Device) Lost() error {
	if g, ok := d.Device.(GPU); ok {
		return g.Lost()
	}
	return nil
}

// UUID of a GPU; "" for host memory.
func (d *Device) UUID() string {
	if g, ok := d.Device.(GPU); ok {
		return g.Info().UUID
	}
	return ""
}

// A Set is the devices of a node.
type Set struct {
	// Host is the device for host memory.
	Host *Device
	// GPU is nil where there is none.
	GPU *Device

	log *slog.Logger
	why string
	mon *monitor // nil without a GPU

	mu     sync.Mutex
	pinned Pinned
	pinOf  int64
	pinErr error
}

// Open makes the device for host memory and opens the GPU that was chosen, which takes
// half a second where it has to be measured.
func Open(ctx context.Context, o Options) (*Set, error) {
	o.Driver = o.Driver.withDefaults()
	host, err := mem.New(o.Dir)
	if err != nil {
		return nil, err
	}
	s := &Set{Host: &Device{Device: host, Kind: KindMem}, log: o.Log}
	g, err := s.choose(ctx, &o)
	if err != nil {
		return nil, errors.Join(err, host.Close())
	}
	if g != nil {
		s.GPU = &Device{Device: g, Kind: KindCUDA}
		if g.Info().MPS {
			s.why += "; under CUDA's MPS"
		}
		s.mon = startMonitor(g, o.Driver, o.Log)
	}
	o.Log.Info("device", "device", s.Name(), "uuid", s.uuid(), "reason", s.why)
	return s, nil
}

// choose returns the GPU, or nil for host memory alone, and says why.
func (s *Set) choose(ctx context.Context, o *Options) (GPU, error) {
	if o.Choice == Mem {
		s.why = "device is mem"
		return nil, nil
	}
	all, err := o.Driver.List()
	none := errors.Is(err, cuda.ErrNoDriver) || errors.Is(err, cuda.ErrNoDevice) || err == nil && len(all) == 0
	if o.Choice == Auto {
		switch {
		case none && err == nil:
			s.why = "device is auto, and the driver has no GPU"
			return nil, nil
		case none:
			s.why = fmt.Sprintf("device is auto, and there is no GPU to use: %v", err)
			return nil, nil
		case err == nil:
			var g GPU
			if g, err = o.Driver.Open(ctx, 0, o.TuningFile); err == nil {
				s.why = fmt.Sprintf("device is auto, and this is the first of %d GPUs", len(all))
				return g, nil
			}
			if ctx.Err() != nil {
				return nil, err
			}
		}
		s.why = fmt.Sprintf("device is auto, and the GPU could not be opened: %v", err)
		o.Log.Warn("a GPU is there and cannot be used; engines get host memory", "error", err)
		return nil, nil
	}
	name, ok := strings.CutPrefix(o.Choice, "cuda:")
	if err != nil || !ok {
		return nil, fmt.Errorf("device is %s: %w", o.Choice, err)
	}
	ordinal, err := find(all, name)
	if err != nil {
		return nil, fmt.Errorf("device is %s, but %w", o.Choice, err)
	}
	g, err := o.Driver.Open(ctx, ordinal, o.TuningFile)
	if err != nil {
		return nil, fmt.Errorf("device is %s: %w", o.Choice, err)
	}
	s.why = "device is " + o.Choice
	return g, nil
}

// find returns the number of the GPU with this number or UUID.
func find(all []cuda.Info, name string) (int, error) {
	var have []string
	for _, in := range all {
		if name == fmt.Sprint(in.Ordinal) || SameUUID(name, in.UUID) {
			return in.Ordinal, nil
		}
		have = append(have, fmt.Sprintf("cuda:%d (%s)", in.Ordinal, in.UUID))
	}
	if len(have) == 0 {
		return 0, errors.New("the driver has no GPU; use auto or mem")
	}
	return 0, fmt.Errorf("the driver has %s; name one of them, or use auto", strings.Join(have, ", "))
}

// SameUUID compares two UUIDs of GPUs, each with or without "GPU-" in front.
func SameUUID(a, b string) bool {
	bare := func(s string) string { return strings.TrimPrefix(strings.ToLower(s), "gpu-") }
	return bare(a) == bare(b)
}

// Name is the GPU's, or "mem".
func (s *Set) Name() string {
	if s.GPU != nil {
		return s.GPU.Name()
	}
	return s.Host.Name()
}

func (s *Set) uuid() string {
	if s.GPU != nil {
		return s.GPU.UUID()
	}
	return ""
}

// Why says in words why this device was chosen, and whether it is used under MPS.
func (s *Set) Why() string { return s.why }

// Node is the NUMA node of host memory next to the GPU, or -1.
func (s *Set) Node() int {
	if s.mon == nil {
		return -1
	}
	return s.mon.node()
}

// Pin makes the slab fast for the GPU, in the background. It is undone by Close.
func (s *Set) Pin(slab []byte) {
	if s.GPU == nil {
		return
	}
	p, err := s.GPU.Device.(GPU).Pin(slab)
	s.mu.Lock()
	s.pinned, s.pinOf, s.pinErr = p, int64(len(slab)), err
	s.mu.Unlock()
	if err != nil {
		s.log.Warn("the slab cannot be pinned; copies to the GPU are slow", "error", err)
		return
	}
	began := time.Now()
	go func() { // ends with Close at the latest
		err := p.Wait(context.Background())
		if errors.Is(err, context.Canceled) {
			return
		}
		s.mu.Lock()
		s.pinErr = err
		s.mu.Unlock()
		if err != nil {
			s.log.Warn("the slab cannot be pinned; copies to the GPU are slow", "error", err)
			return
		}
		s.log.Info("slab pinned", "bytes", len(slab), "seconds", time.Since(began).Seconds())
	}()
}

// Close closes the devices. The slab must still be mapped, and no copy be at work on it.
func (s *Set) Close() error {
	var errs []error
	s.mu.Lock()
	pinned := s.pinned
	s.pinned = nil
	s.mu.Unlock()
	if pinned != nil {
		errs = append(errs, pinned.Close())
	}
	if s.mon != nil {
		s.mon.close()
	}
	if s.GPU != nil {
		errs = append(errs, s.GPU.Close())
	}
	return errors.Join(append(errs, s.Host.Close())...)
}
