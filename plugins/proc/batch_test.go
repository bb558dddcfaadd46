package proc

import (
	"errors"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi/kvpb"
)

func item(handle, hi int) *kvpb.Item {
	return &kvpb.Item{Handle: uint32(handle), Round: &kvpb.Round{Hi: uint32(hi)}}
}

// TestQueue: every call gets its own answer, no batch breaks a bound, one is on its way at a
// time, and the queue is at rest at the end.
func TestQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		his := rapid.SliceOfN(rapid.SampledFrom([]int{1, 100, 8192, kvpb.ChunksMax / 3, kvpb.ChunksMax}), 1, 60).Draw(t, "hi")
		each := rapid.IntRange(1, 5).Draw(t, "each")
		var mu sync.Mutex // as one process has one
		q := &queue{}
		q.send = func(batch []*call) error {
			require.True(t, mu.TryLock(), "one batch at a time")
			defer mu.Unlock()
			b := &kvpb.Batch{}
			for _, c := range batch {
				b.Items = append(b.Items, c.item)
			}
			require.NotEmpty(t, batch)
			require.NoError(t, b.Check())
			runtime.Gosched()
			for _, c := range batch {
				c.result = &kvpb.Result{Usable: c.item.Handle}
			}
			return nil
		}
		var wg sync.WaitGroup
		for i, hi := range his {
			wg.Go(func() {
				for k := range each {
					res, err := q.do(item(i*each+k, hi))
					require.NoError(t, err)
					require.EqualValues(t, i*each+k, res.Usable)
				}
			})
		}
		wg.Wait()
		require.False(t, q.flying)
		require.Empty(t, q.waiting)
	})
}

// TestQueueOrder: what waits travels in the order in which it came, as many as fit.
func TestQueueOrder(t *testing.T) {
	q, arrived, let := &queue{}, make(chan []int), make(chan bool)
	q.send = func(batch []*call) error {
		var handles []int
		for _, c := range batch {
			handles = append(handles, int(c.item.Handle))
			c.result = &kvpb.Result{}
		}
		arrived <- handles
		<-let
		return nil
	}
	var wg sync.WaitGroup
	add := func(handle, hi int) {
		q.mu.Lock()
		n := len(q.waiting)
		q.mu.Unlock()
		wg.Go(func() { _, _ = q.do(item(handle, hi)) })
		for handle > 0 {
			q.mu.Lock()
			came := len(q.waiting) > n
			q.mu.Unlock()
			if came {
				break
			}
			runtime.Gosched()
		}
	}
	add(0, 1)
	require.Equal(t, []int{0}, <-arrived)
	add(1, kvpb.ChunksMax/2)
	add(2, kvpb.ChunksMax/2)
	add(3, 1)
	for i := range kvpb.ItemsMax {
		add(4+i, 0)
	}
	let <- true
	require.Equal(t, []int{1, 2}, <-arrived, "as many chunks as a batch takes")
	let <- true
	third := <-arrived
	require.Len(t, third, kvpb.ItemsMax)
	require.Equal(t, 3, third[0])
	let <- true
	require.Equal(t, []int{3 + kvpb.ItemsMax}, <-arrived)
	let <- true
	wg.Wait()
}

// TestQueueFails: the error of a batch is that of all who wait and of all who come.
func TestQueueFails(t *testing.T) {
	failure := errors.New("gone")
	q, sending, let := &queue{}, make(chan bool), make(chan bool)
	q.send = func([]*call) error {
		sending <- true
		<-let
		return failure
	}
	errs := make([]error, 20)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = q.do(item(i, 1)) })
		if i == 0 {
			<-sending
		}
	}
	for {
		q.mu.Lock()
		n := len(q.waiting)
		q.mu.Unlock()
		if n == len(errs)-1 {
			break
		}
		runtime.Gosched()
	}
	let <- true
	wg.Wait()
	for _, err := range errs {
		require.Equal(t, failure, err)
	}
	_, err := q.do(item(0, 1))
	require.Equal(t, failure, err)
}
