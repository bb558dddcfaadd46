package proc

import (
	"sync"

	"github.com/tierd/tierd/abi/kvpb"
)

// A call is one call on its way through a queue.
type call struct {
	item   *kvpb.Item
	result *kvpb.Result
	err    error
	// turn tells a waiting caller to go on: true to send the next batch, false when it has
	// its answer.
	turn chan bool
}

var calls = sync.Pool{New: func() any { return &call{turn: make(chan bool, 1)} }}

// A queue makes batches of concurrent calls. A caller that finds no batch on its way sends
// its call at once; the others wait, and when the batch is back the first of them sends
// all. So a batch holds what came while the last one travelled, no call waits for company,
// and the queue needs no goroutine.
type queue struct {
	// send answers every call of a batch, or fails them all: then nothing is sent any more.
	send func(batch []*call) error

	mu      sync.Mutex
	waiting []*call
	flying  bool
	err     error // set once, by the first batch that failed
}

// do makes one call.
func (q *queue) do(item *kvpb.Item) (*kvpb.Result, error) {
	c := calls.Get().(*call)
	c.item = item
	q.mu.Lock()
	if err := q.err; err != nil {
		q.mu.Unlock()
		calls.Put(c)
		return nil, err
	}
	q.waiting = append(q.waiting, c)
	mine := !q.flying
	q.flying = true
	q.mu.Unlock()
	if mine || <-c.turn {
		q.fly()
	}
	result, err := c.result, c.err
	c.item, c.result, c.err = nil, nil, nil
	calls.Put(c)
	return result, err
}

// fly sends the batch that the caller is the first of, and passes the turn on.
func (q *queue) fly() {
	q.mu.Lock()
	batch := q.take()
	q.mu.Unlock()
	err := q.send(batch)
	q.mu.Lock()
	if err != nil && q.err == nil {
		q.err = err
		batch, q.waiting = append(batch, q.waiting...), nil
	}
	for _, c := range batch {
		c.err = err
	}
	q.flying = len(q.waiting) > 0
	if q.flying {
		q.waiting[0].turn <- true
	}
	q.mu.Unlock()
	for _, c := range batch[1:] {
		c.turn <- false
	}
}

// take removes the next batch from the queue. q.mu is held, and a call waits.
func (q *queue) take() []*call {
	n, chunks := 0, 0
	for _, c := range q.waiting {
		chunks += int(c.item.Round.Hi)
		if n == kvpb.ItemsMax || chunks > kvpb.ChunksMax {
			break
		}
		n++
	}
	batch := q.waiting[:n:n]
	q.waiting = q.waiting[n:]
	if len(q.waiting) == 0 {
		q.waiting = nil // the batch keeps the array
	}
	return batch
}
