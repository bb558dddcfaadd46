package check

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// spreadBlock is how many items a worker of Spread takes at once: few, because the last
// ones cost most, and still thousands of times what taking them costs.
const spreadBlock = 4

// Spread calls f with each of 0..n-1, spread over the workers of o, and returns what the
// smallest item led to that led to anything: a finding, or an error. Items beyond it may
// have run or not, those before it have all run. reached counts the leading items that ran
// without a gap; when ctx ends before all of them did, err is ctx's.
//
// f says which worker calls it, from 0, so that each can have scratch memory of its own.
func Spread[T any](ctx context.Context, n int, o Options, f func(worker, item int) (*T, error)) (found *T, reached int, err error) {
	workers := o.Workers
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	var (
		next, stop, done atomic.Int64
		mu               sync.Mutex
		wg               sync.WaitGroup
		first            = n // the smallest item that led to anything
		ran              stage
	)
	stop.Store(int64(n))
	for w := range workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				from := int(next.Add(spreadBlock)) - spreadBlock
				if from >= int(stop.Load()) {
					return
				}
				to, i := min(from+spreadBlock, n), from
				for ; i < to && ctx.Err() == nil; i++ {
					t, e := f(w, i)
					if t == nil && e == nil {
						continue
					}
					mu.Lock()
					if i < first {
						first, found, err = i, t, e
						stop.Store(int64(from))
					}
					mu.Unlock()
					break
				}
				mu.Lock()
				ran.ran(from, i)
				mu.Unlock()
				if d := done.Add(int64(to - from)); o.Progress != nil {
					o.Progress(int(d), n)
				}
			}
		})
	}
	wg.Wait()
	if found == nil && err == nil && ran.upto < n {
		err = ctx.Err()
	}
	return found, ran.upto, err
}
