package gpu_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"pgregory.net/rapid"
)

// held is a region that tells when it is locked.
type held struct {
	serial uint64
	own    bool
	log    *[]uint64

	mu     sync.RWMutex
	closed bool
	locks  int
}

func (h *held) Size() int64                 { return 10 }
func (h *held) Export() (gpu.Handle, error) { return gpu.Handle{}, errors.ErrUnsupported }
func (h *held) Serial() uint64              { return h.serial }
func (h *held) Release()                    { h.locks--; h.mu.RUnlock() }

func (h *held) Hold() bool {
	h.mu.RLock()
	h.locks++
	*h.log = append(*h.log, h.serial)
	return !h.closed
}

func (h *held) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	return nil
}

// foreign is a region of another kind of device.
type foreign struct{ gpu.Region }

// Parts are locked in the order of their serials, returned in that of the region, and let go
// once, whether the call begins or not.
func TestHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var log, order []uint64
		var parts []*held
		var regions []gpu.Region
		alien, closed := false, false
		for _, serial := range r.Perm(rapid.IntRange(1, 6).Draw(t, "parts")) {
			h := &held{serial: uint64(serial), own: r.IntN(10) > 0, closed: r.IntN(8) == 0, log: &log}
			alien, closed = alien || !h.own, closed || h.closed
			parts, order = append(parts, h), append(order, h.serial)
			if r.IntN(15) == 0 {
				alien = true
				regions = append(regions, foreign{h})
			} else {
				regions = append(regions, h)
			}
		}
		slices.Sort(order)
		reg := regions[0]
		if len(regions) > 1 || rapid.Bool().Draw(t, "joined") {
			j, err := gpu.Join(regions...)
			require.NoError(t, err)
			reg = j
		}
		got, release, err := gpu.Hold(reg, func(h *held) bool { return h.own })
		switch {
		case alien:
			require.ErrorIs(t, err, gpu.ErrForeign)
			require.Empty(t, log, "nothing is locked")
		case closed:
			require.ErrorIs(t, err, gpu.ErrClosed)
			require.Equal(t, order, log)
		default:
			require.NoError(t, err)
			require.Equal(t, parts, got)
			require.Equal(t, order, log)
			for _, h := range parts {
				require.Equal(t, 1, h.locks)
			}
			release()
		}
		for _, h := range parts {
			require.Zero(t, h.locks)
			require.NoError(t, h.Close(), "nobody holds it")
		}
	})
}
