package cuda

import (
	"context"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
)

// watched is a device of the fake driver with events behind a command that runs until go is
// closed.
func watched(t *testing.T, events int) (f *fakeDriver, d *Device, evs []*Event, reach func(i int)) {
	f = newFake(t)
	d = f.open(t, Options{Tuning: &Tuning{Gather: Direction{1, never, never}, Scatter: Direction{1, never, never}}})
	var gates []chan struct{}
	for range events {
		e, err := d.NewEvent()
		require.NoError(t, err)
		var stream uintptr
		require.NoError(t, d.drv.call(cuStreamCreateWithPriority, uintptr(unsafe.Pointer(&stream)), streamNonBlocking, 0))
		gate := make(chan struct{})
		f.do(stream, func() { <-gate })
		require.NoError(t, e.Record(stream))
		evs, gates = append(evs, e), append(gates, gate)
	}
	var once = make([]sync.Once, events)
	reach = func(i int) { once[i].Do(func() { close(gates[i]) }) }
	t.Cleanup(func() {
		for i := range events {
			reach(i)
		}
	})
	return f, d, evs, reach
}

// waitAll waits for each event so many times; outcomes come in any order.
func waitAll(ctx context.Context, times int, evs ...*Event) <-chan error {
	ends := make(chan error, times*len(evs))
	for _, e := range evs {
		for range times {
			go func() { ends <- e.Wait(ctx) }()
		}
	}
	return ends
}

func (w *watch) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.looking && len(w.waits) == 0
}

func (w *watch) waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.waits)
}

const soon = 20 * time.Second

// Many that wait for few events cost as many looks as the events.
func TestWatchLooksOnceForAll(t *testing.T) {
	f, d, evs, reach := watched(t, 3)
	began := time.Now()
	ends := waitAll(t.Context(), 100, evs...)
	require.Eventually(t, func() bool { return d.watch.waiting() == 300 }, soon, time.Millisecond)
	asked, at := f.calls[cuEventQuery].Load(), time.Now()
	time.Sleep(20 * time.Millisecond)
	looks := f.calls[cuEventQuery].Load() - asked
	require.Positive(t, looks)
	require.LessOrEqual(t, looks, 3*(int64(time.Since(at)/lookPause)+2), "a look at each event between two pauses")
	for i := range evs {
		require.Equal(t, 300-100*i, d.watch.waiting())
		reach(i)
		for range 100 {
			require.NoError(t, <-ends)
		}
	}
	require.Eventually(t, d.watch.idle, soon, time.Millisecond)
	t.Log(looks, "looks in 20 ms;", time.Since(began))

	never, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, never.Wait(t.Context()), "an event that was never recorded is done")
}

// Each way in which a wait ends, while others go on.
func TestWatchEnds(t *testing.T) {
	_, d, evs, reach := watched(t, 3)
	ctx, cancel := context.WithCancel(t.Context())
	cancelled, closed, others := waitAll(ctx, 10, evs[0]), waitAll(t.Context(), 10, evs[1]), waitAll(t.Context(), 10, evs[0], evs[2])
	require.Eventually(t, func() bool { return d.watch.waiting() == 40 }, soon, time.Millisecond)
	cancel()
	for range 10 {
		require.ErrorIs(t, <-cancelled, context.Canceled)
	}
	require.ErrorIs(t, evs[0].Wait(ctx), context.Canceled)
	require.NoError(t, evs[1].Close())
	for range 10 {
		err := <-closed
		require.ErrorIs(t, err, gpu.ErrClosed)
		require.EqualError(t, err, "wait for event: region is closed")
	}
	require.Empty(t, others)
	reach(0)
	for range 10 {
		require.NoError(t, <-others)
	}
	require.Equal(t, 10, d.watch.waiting())
	reach(2)
	for range 10 {
		require.NoError(t, <-others)
	}
	require.Eventually(t, d.watch.idle, soon, time.Millisecond)
}

// A device that is lost or closed ends every wait, and so does an event that cannot be
// asked for.
func TestWatchOfALostDevice(t *testing.T) {
	f, d, evs, _ := watched(t, 2)
	ends := waitAll(t.Context(), 5, evs...)
	require.Eventually(t, func() bool { return d.watch.waiting() == 10 }, soon, time.Millisecond)
	fail := func(s symbol) int {
		if s == cuEventQuery {
			return 1
		}
		return 0
	}
	f.fail.Store(&fail)
	for range 10 {
		var e *Error
		require.ErrorAs(t, <-ends, &e)
		require.Equal(t, [2]any{"cuEventQuery", 1}, [2]any{e.Call, e.Code})
	}
	f.fail.Store(nil)
	require.NoError(t, d.Lost())
	require.Eventually(t, d.watch.idle, soon, time.Millisecond)

	ends = waitAll(t.Context(), 5, evs...)
	require.Eventually(t, func() bool { return d.watch.waiting() == 10 }, soon, time.Millisecond)
	_ = d.lose(&Error{Call: "cuEventQuery", Code: 719})
	for range 10 {
		require.ErrorIs(t, <-ends, gpu.ErrLost)
	}
	require.Eventually(t, d.watch.idle, soon, time.Millisecond)

	_, d, evs, reach := watched(t, 1)
	ends = waitAll(t.Context(), 5, evs...)
	require.Eventually(t, func() bool { return d.watch.waiting() == 5 }, soon, time.Millisecond)
	reach(0)
	require.NoError(t, d.Close())
	for range 5 {
		if err := <-ends; err != nil { // reached in front of Close
			require.ErrorIs(t, err, gpu.ErrClosed)
		}
	}
	require.Eventually(t, d.watch.idle, soon, time.Millisecond)
}
