package cuda

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/tierd/tierd/gpu"
)

// Tuning is what is measured of a device.
type Tuning struct {
	Gather  Direction `json:"gather"`
	Scatter Direction `json:"scatter"`
}

// Direction is the tuning of one direction.
type Direction struct {
	// Blocks is how many blocks of 512 threads a kernel has.
	Blocks int `json:"blocks"`
	// DirectBytes is from which length on a fragment goes without staging, by a DMA of
	// its own; StridedBytes is from which length on fragments at equal distances do, by
	// one DMA for all. The largest number means none.
	DirectBytes  int64 `json:"direct_bytes"`
	StridedBytes int64 `json:"strided_bytes"`
}

func (t Tuning) direction(scatter bool) Direction {
	if scatter {
		return t.Scatter
	}
	return t.Gather
}

const (
	// blocksMax bounds a Tuning: no GPU has more multiprocessors.
	blocksMax = 1024
	// tuneBytes is what one measured move carries: 1.2 ms on PCIe 5.
	tuneBytes = 64 << 20
	// tuneFragmentBytes is the fragment size for which the blocks are chosen: the
	// smallest that matters, and the hardest.
	tuneFragmentBytes = 4096
	// tuneRepeats of which the fastest counts: an engine may be at work meanwhile.
	tuneRepeats = 5
	// warmUpTime lets the clocks of an idle GPU rise before anything counts.
	warmUpTime = 50 * time.Millisecond
	// enoughBlocks is the share of the best speed for which the smallest number of blocks
	// is taken.
	enoughBlocks = 0.99
	// enoughDirect and enoughStrided are the shares of the speed of staged copies from
	// which on direct and strided ones are preferred, as they take nothing of the model;
	// enoughSeparate is both for Options.Separate. A call is measured alone, and several at
	// a time are up to twice as fast without staging.
	enoughDirect   = 0.985
	enoughStrided  = 0.95
	enoughSeparate = 0.35
	// tuningFileBytesMax bounds what is read of a TuningFile: room for thousands of GPUs.
	tuningFileBytesMax = 1 << 20
)

// candidates of the measurement.
var (
	blockCandidates   = []int{4, 8, 12, 16, 24, 32, 48, 64}
	directCandidates  = []int64{16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20}
	stridedCandidates = []int64{1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10}
)

func (t Tuning) check() error {
	for _, d := range []Direction{t.Gather, t.Scatter} {
		if d.Blocks < 1 || d.Blocks > blocksMax || d.DirectBytes < 1 || d.StridedBytes < 1 {
			return fmt.Errorf("tuning: %d blocks, direct from %d bytes on, strided from %d; blocks must be 1 to %d, and the bytes positive", d.Blocks, d.DirectBytes, d.StridedBytes, blocksMax)
		}
	}
	return nil
}

// tune returns what was given, what the file has, or what is measured.
func (d *Device) tune(ctx context.Context) (Tuning, error) {
	if d.opts.Tuning != nil {
		return *d.opts.Tuning, d.opts.Tuning.check()
	}
	key := d.tuningKey()
	kept, err := readTunings(d.opts.TuningFile)
	if err != nil {
		return Tuning{}, err
	}
	if t, ok := kept[key]; ok && t.check() == nil {
		return t, nil
	}
	t, err := d.measure(ctx)
	if err != nil {
		return Tuning{}, fmt.Errorf("measure the device: %w", err)
	}
	if d.opts.TuningFile == "" {
		return t, nil
	}
	kept[key] = t
	return t, writeTunings(d.opts.TuningFile, kept)
}

// tuningKey names all that a measurement depends on.
func (d *Device) tuningKey() string {
	sum := sha256.Sum256([]byte(copyPTX))
	batched := 0
	if d.drv.has(cuMemcpyBatchAsync) {
		batched = batchedRunsMax
	}
	return fmt.Sprintf("%s cuda-%d kernel-%s staging-%dx%d separate-%t batched-%d", d.info.UUID, d.info.DriverVersion, hex.EncodeToString(sum[:6]), d.opts.Buffers, d.opts.StagingBytes, d.opts.Separate, batched)
}

// readTunings returns what the file holds; nothing when it is not there, or is damaged:
// then the device is measured again.
func readTunings(path string) (map[string]Tuning, error) {
	kept := map[string]Tuning{}
	if path == "" {
		return kept, nil
	}
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return kept, nil
	}
	if err != nil {
		return nil, fmt.Errorf("tuning file: %w", err)
	}
	if st.Size() > tuningFileBytesMax {
		return nil, fmt.Errorf("tuning file %s has %d bytes; at most %d are read: remove it", path, st.Size(), tuningFileBytesMax)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("tuning file: %w", err)
	}
	if json.Unmarshal(b, &kept) != nil || kept == nil {
		return map[string]Tuning{}, nil
	}
	return kept, nil
}

// writeTunings replaces the file in one step.
func writeTunings(path string, kept map[string]Tuning) error {
	b, err := json.MarshalIndent(kept, "", "  ")
	if err != nil {
		return fmt.Errorf("tuning file: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("tuning file: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("tuning file: %w", err)
	}
	return nil
}

// A bench is the memory that a measurement uses.
type bench struct {
	dev  *Device
	ctx  context.Context
	base uint64
	host []byte
}

// measure chooses the tuning of this device.
func (d *Device) measure(ctx context.Context) (t Tuning, err error) {
	host, err := d.AllocHost(tuneBytes)
	if err != nil {
		return Tuning{}, err
	}
	defer host.Close()
	reg, err := d.Alloc(ctx, 2*tuneBytes)
	if err != nil {
		return Tuning{}, err
	}
	defer reg.Close()
	m := &bench{dev: d, ctx: ctx, base: reg.(*region).base, host: host.Bytes()}
	for start := time.Now(); time.Since(start) < warmUpTime; {
		if _, err := m.seconds(d.lanes[0], Direction{16, never, never}, tuneFragmentBytes, false); err != nil {
			return Tuning{}, err
		}
	}
	if t.Gather, err = m.direction(d.lanes[0]); err != nil {
		return Tuning{}, err
	}
	t.Scatter, err = m.direction(d.lanes[1])
	return t, err
}

func (m *bench) direction(l *lane) (Direction, error) {
	best := Direction{DirectBytes: never, StridedBytes: never}
	times := make([]float64, len(blockCandidates))
	fastest := 0.0
	for i, n := range blockCandidates {
		s, err := m.seconds(l, Direction{n, never, never}, tuneFragmentBytes, false)
		if err != nil {
			return Direction{}, err
		}
		if times[i] = s; fastest == 0 || s < fastest {
			fastest = s
		}
	}
	for i := len(blockCandidates) - 1; i >= 0; i-- {
		if fastest/times[i] >= enoughBlocks {
			best.Blocks = blockCandidates[i]
		}
	}
	staged := best
	direct, strided := enoughDirect, enoughStrided
	if m.dev.opts.Separate {
		direct, strided = enoughSeparate, enoughSeparate
	}
	var err error
	best.DirectBytes, err = m.crossover(l, staged, Direction{staged.Blocks, 1, never}, directCandidates, direct, false)
	if err != nil {
		return Direction{}, err
	}
	best.StridedBytes, err = m.crossover(l, staged, Direction{staged.Blocks, never, 1}, stridedCandidates, strided, true)
	if err != nil {
		return Direction{}, err
	}
	return best, nil
}

// crossover is the first length from which on other has a share of the speed of staged.
func (m *bench) crossover(l *lane, staged, other Direction, lengths []int64, share float64, grid bool) (int64, error) {
	from := int64(never)
	for i := len(lengths) - 1; i >= 0; i-- {
		s, err := m.seconds(l, staged, lengths[i], grid)
		if err != nil {
			return 0, err
		}
		o, err := m.seconds(l, other, lengths[i], grid)
		if err != nil {
			return 0, err
		}
		if s/o < share {
			break
		}
		from = lengths[i]
	}
	return from, nil
}

// seconds is how long tuneBytes take in fragments of this size that are spread over the
// region with a gap behind each, in their order (grid) or in no order: the fastest of
// tuneRepeats.
func (m *bench) seconds(l *lane, d Direction, fragment int64, grid bool) (float64, error) {
	frags := make([]gpu.Fragment, tuneBytes/fragment)
	for i := range frags {
		frags[i] = gpu.Fragment{Offset: 2 * fragment * int64(i), Length: fragment}
	}
	if !grid {
		r := rand.New(rand.NewPCG(1, uint64(fragment)))
		r.Shuffle(len(frags), func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
	}
	best := 0.0
	for range tuneRepeats {
		start := time.Now()
		if err := l.move(m.ctx, Tuning{Gather: d, Scatter: d}, list{base: m.base, frags: frags, apart: true}, m.host); err != nil {
			return 0, err
		}
		if s := time.Since(start).Seconds(); best == 0 || s < best {
			best = s
		}
	}
	return best, nil
}
