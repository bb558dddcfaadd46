package tier

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/shm"
	"golang.org/x/sys/unix"
)

// SlotsMax bounds a tier: 2^24 slots of the smallest size are 64 GiB, and their
// bookkeeping is about 4 GiB; more is a mistake in a unit.
const SlotsMax = 1 << 24

// slotAlignBytes is the stride granule: pages, so that slots can be the target of
// direct I/O and of a GPU's DMA.
const slotAlignBytes = 4096

// An Owner is whoever keeps a slot from being reused: a request of an engine, a peer's
// session, a write to disk. Kind becomes a metric label, so there are few of them.
type Owner struct{ Kind, ID string }

func (o Owner) String() string { return o.Kind + "/" + o.ID }

// A Slot is a handle of one slot for one use of it.
type Slot struct {
	Index uint32
	// Epoch rises each time the slot is handed out; it is never 0.
	Epoch uint64
}

// Options of a primary tier.
type Options struct {
	// Path of the shared-memory file, such as one under /dev/shm. A file left behind
	// by a dead process is replaced.
	Path string
	// Memory, when set, is the slab instead of a file: at least Slots strides, the
	// caller's, and nothing that another process can map. For a simulation of many nodes.
	Memory []byte
	// SlotBytes is the room in a slot: the size of the largest chunk. Slots lie
	// SlotBytes apart, rounded up to 4096.
	SlotBytes int64
	// Slots is their number.
	Slots int
	// Now is the clock for ages of pins; nil means time.Now.
	Now func() time.Time
}

type slotState uint8

const (
	slotFree slotState = iota
	slotWriting
	slotReadable
	slotDetached
	slotFenced
)

var slotStateNames = [...]string{"free", "writing", "readable", "detached", "fenced"}

func (s slotState) String() string { return slotStateNames[s] }

const none = -1 // no slot: the end of the recency list

// slotInfo is the bookkeeping of one slot.
type slotInfo struct {
	state   slotState
	named   bool // has a key; writing and readable slots with a key are in the index
	grabbed bool // the data plane puts bytes into it
	listed  bool // is in the recency list
	epoch   uint64
	key     Key
	sum     uint32
	bytes   int64 // length of the content; readable and detached
	pins    int   // read pins

	owner    Owner     // of the write pin; writing and fenced
	since    time.Time // of the write pin
	grabbedT time.Time

	batch        uint64 // last call of Admit that listed its key
	stamp        uint64 // last use
	newer, older int32

	watch chan struct{} // closed when the slot leaves writing; nil until watched
}

// pin is one read pin.
type pin struct {
	slot  uint32
	owner Owner
	since time.Time
}

// holdings is everything that one owner keeps.
type holdings struct {
	pins    map[uint64]struct{} // ids of read pins
	writing map[uint32]struct{} // slots in state writing
}

// Primary is the primary tier. Its methods may be called at the same time.
type Primary struct {
	file      *shm.File // nil when the memory is the caller's
	slotBytes int64
	stride    int64
	now       func() time.Time

	mu     sync.Mutex
	closed bool
	mem    []byte
	slots  []slotInfo
	free   []uint32
	index  map[Key]uint32
	owners map[Owner]*holdings
	pins   map[uint64]pin
	pinID  uint64 // last one handed out
	stamp  uint64 // last use
	batch  uint64 // number of the last call of Admit

	newest, oldest int32 // ends of the recency list
	idle           int   // readable slots without pins
	counts         [len(slotStateNames)]int
	grabs          int
	residentBytes  int64
	stats          Stats
}

// StrideBytes is how far apart slots of slotBytes lie.
func StrideBytes(slotBytes int64) int64 {
	return (slotBytes + slotAlignBytes - 1) &^ (slotAlignBytes - 1)
}

// New makes the slab and returns an empty tier.
func New(o Options) (*Primary, error) {
	switch {
	case o.SlotBytes <= 0:
		return nil, fmt.Errorf("primary tier: slot is %d bytes; it must hold at least 1", o.SlotBytes)
	case o.Slots <= 0 || o.Slots > SlotsMax:
		return nil, fmt.Errorf("primary tier: %d slots; it must have 1 to %d", o.Slots, SlotsMax)
	case o.SlotBytes > (1<<62)/int64(o.Slots):
		return nil, fmt.Errorf("primary tier: %d slots of %d bytes do not fit an address space", o.Slots, o.SlotBytes)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	stride := StrideBytes(o.SlotBytes)
	size, mem := stride*int64(o.Slots), o.Memory
	var f *shm.File
	if mem == nil {
		var err error
		if f, err = shm.Create(o.Path, size, true); err != nil {
			return nil, fmt.Errorf("primary tier: %d slots of %d bytes: %w", o.Slots, o.SlotBytes, err)
		}
		mem = f.Bytes()
		// Best effort: large pages where the kernel gives them, page tables filled now
		// rather than in the middle of the first transfers.
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
		_ = unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	} else if int64(len(mem)) < size {
		return nil, fmt.Errorf("primary tier: %d bytes of memory; %d slots of %d bytes, %d apart, need %d", len(mem), o.Slots, o.SlotBytes, stride, size)
	}
	p := &Primary{
		file: f, slotBytes: o.SlotBytes, stride: stride, now: o.Now, mem: mem[:size],
		slots: make([]slotInfo, o.Slots), free: make([]uint32, o.Slots),
		index: make(map[Key]uint32, o.Slots), owners: map[Owner]*holdings{}, pins: map[uint64]pin{},
		newest: none, oldest: none,
	}
	for i := range p.free {
		p.free[i] = uint32(o.Slots - 1 - i)
	}
	p.counts[slotFree] = o.Slots
	return p, nil
}

// SlotBytes is the room in one slot.
func (p *Primary) SlotBytes() int64 { return p.slotBytes }

// Memory is the whole slab, for a device to register. It is for nobody to read or write,
// and is unmapped some time after Close.
func (p *Primary) Memory() []byte { return p.mem }

// Slots is the number of slots.
func (p *Primary) Slots() int { return len(p.slots) }

// StrideBytes is the distance of two slots in the file.
func (p *Primary) StrideBytes() int64 { return p.stride }

// Export says how another process of the same user can map the slab.
// There is no way to map memory that the caller gave: the handle is empty.
func (p *Primary) Export() gpu.Handle {
	if p.file == nil {
		return gpu.Handle{}
	}
	return gpu.Handle{Kind: gpu.HandleFile, Path: p.file.Path(), Length: p.stride * int64(len(p.slots))}
}

// Close removes the file. Every later operation gets ErrClosed, but whoever holds a pin
// or a grab keeps the memory until it ends; the last one unmaps it.
func (p *Primary) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	for i := range p.slots {
		p.wake(uint32(i))
	}
	if p.held() {
		if p.file == nil {
			return nil
		}
		return p.file.Unlink()
	}
	p.mem = nil
	if p.file == nil {
		return nil
	}
	return p.file.Close()
}

// held reports whether anybody may still use the memory.
func (p *Primary) held() bool { return len(p.pins) > 0 || p.counts[slotWriting] > 0 || p.grabs > 0 }

// settle unmaps a closed slab once nobody holds it. It is called wherever a hold ends.
func (p *Primary) settle() {
	if p.closed && p.mem != nil && !p.held() {
		p.mem = nil
		if p.file == nil {
			return
		}
		if err := p.file.Close(); err != nil && !os.IsNotExist(err) {
			p.stats.CloseErrors++
		}
	}
}

// Lookup sets out[i] to the state of keys[i]: Miss, Hit or Pending. It has no side
// effect, not even on recency. out has room for len(keys) states.
func (p *Primary) Lookup(keys []Key, out abi.States) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range keys {
		state := abi.Miss
		if s, ok := p.index[keys[i]]; ok && !p.closed {
			state = abi.Pending
			if p.slots[s].state == slotReadable {
				state = abi.Hit
			}
		}
		out.Put(i, state)
	}
}

// Touch marks the keys as used, last key first; absent ones are skipped.
func (p *Primary) Touch(keys []Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.touch(keys)
}

func (p *Primary) touch(keys []Key) {
	for i := len(keys) - 1; i >= 0; i-- {
		if s, ok := p.index[keys[i]]; ok {
			p.use(s)
		}
	}
}

// Watch returns a channel that is closed when the key leaves state writing: at once
// when it is not in it.
func (p *Primary) Watch(key Key) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, ok := p.index[key]
	if !ok || p.closed || p.slots[i].state != slotWriting {
		return closedChan
	}
	s := &p.slots[i]
	if s.watch == nil {
		s.watch = make(chan struct{})
	}
	return s.watch
}

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (p *Primary) wake(i uint32) {
	if s := &p.slots[i]; s.watch != nil {
		close(s.watch)
		s.watch = nil
	}
}

// memory of a slot's first n bytes.
func (p *Primary) memory(i uint32, n int64) []byte {
	at := int64(i) * p.stride
	return p.mem[at : at+n : at+n]
}

// at returns the slot of a handle if its epoch is current and it is in one of the
// states.
func (p *Primary) at(h Slot, states ...slotState) (*slotInfo, error) {
	if int64(h.Index) >= int64(len(p.slots)) {
		return nil, stale(h, "the tier has %d slots", len(p.slots))
	}
	s := &p.slots[h.Index]
	if s.epoch != h.Epoch {
		return nil, stale(h, "the slot is at epoch %d", s.epoch)
	}
	for _, st := range states {
		if s.state == st {
			return s, nil
		}
	}
	return nil, stale(h, "the slot is %v", s.state)
}

func (p *Primary) setState(s *slotInfo, to slotState) {
	p.counts[s.state]--
	p.counts[to]++
	s.state = to
}
