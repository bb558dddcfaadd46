package cuda

import (
	"context"
	"fmt"
	"sync"

	"github.com/tierd/tierd/gpu"
)

// A watch looks for the events that callers wait for: one goroutine for a device, while there
// are any. Each look takes the driver's lock and each pause a system call, and all requests
// of an engine's step may wait for the same event.
type watch struct {
	dev *Device

	mu      sync.Mutex
	waits   map[*eventWait]struct{}
	looking bool
}

type eventWait struct {
	event *Event
	done  chan error // cap 1
}

// wait returns when the event is reached, the context has ended, or the event cannot be
// asked for any more.
func (w *watch) wait(ctx context.Context, e *Event) error {
	one := &eventWait{event: e, done: make(chan error, 1)}
	w.mu.Lock()
	if w.waits == nil {
		w.waits = map[*eventWait]struct{}{}
	}
	w.waits[one] = struct{}{}
	if !w.looking {
		w.looking = true
		go w.run()
	}
	w.mu.Unlock()
	select {
	case err := <-one.done:
		return err
	case <-ctx.Done():
		w.mu.Lock()
		delete(w.waits, one)
		w.mu.Unlock()
		return ctx.Err()
	}
}

// run looks and sleeps in turns until nobody waits.
func (w *watch) run() {
	for {
		w.mu.Lock()
		byEvent := map[*Event][]*eventWait{}
		for one := range w.waits {
			byEvent[one.event] = append(byEvent[one.event], one)
		}
		w.looking = len(byEvent) > 0
		w.mu.Unlock()
		if len(byEvent) == 0 {
			return
		}
		w.look(byEvent)
		pause()
	}
}

// look asks for each event once, and ends the waits of those that are reached or fail.
func (w *watch) look(byEvent map[*Event][]*eventWait) {
	all := func(err error) {
		for _, waits := range byEvent {
			w.end(waits, err)
		}
	}
	done, err := w.dev.use(context.Background())
	if err != nil {
		all(err)
		return
	}
	defer done()
	leave, err := w.dev.enter()
	if err != nil {
		all(err)
		return
	}
	defer leave()
	for e, waits := range byEvent {
		if reached, err := e.query(); reached || err != nil {
			w.end(waits, err)
		}
	}
}

func (w *watch) end(waits []*eventWait, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, one := range waits {
		if _, ok := w.waits[one]; ok {
			delete(w.waits, one)
			one.done <- err
		}
	}
}

// query says whether the event is reached. It needs a current context.
func (e *Event) query() (reached bool, err error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.event == 0 {
		return false, gpu.ErrClosed
	}
	switch code := e.dev.drv.code(cuEventQuery, e.event); code {
	case 0:
		return true, nil
	case codeNotReady:
		return false, nil
	default:
		return false, e.dev.check(e.dev.drv.error(cuEventQuery, code))
	}
}

// Wait implements gpu.Event. It is late by up to 0.1 ms.
func (e *Event) Wait(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		err = e.dev.watch.wait(ctx, e)
	}
	if err != nil {
		return fmt.Errorf("wait for event: %w", err)
	}
	return nil
}
