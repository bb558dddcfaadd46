package wasm

import (
	"context"
	"sync"
)

// A pool lends the instances of a module, the most recently returned first. At most
// max are lent by get at one time; pins come on top, because a goroutine that pins
// several rules must not wait for itself.
type pool struct {
	module *Module
	max    int

	mu     sync.Mutex
	back   sync.Cond // an instance came back, or the pool closed
	free   []*instance
	lent   int // by get
	pinned int // by pin
	closed bool
}

func (p *pool) init(m *Module, max int) {
	p.module, p.max = m, max
	p.back.L = &p.mu
}

// add puts a first instance into the pool.
func (p *pool) add(in *instance) {
	p.mu.Lock()
	p.free = append(p.free, in)
	p.mu.Unlock()
}

// get borrows an instance: a free one, else a fresh one, else it waits.
func (p *pool) get() (*instance, error) {
	p.mu.Lock()
	for {
		if p.closed {
			p.mu.Unlock()
			return nil, ErrClosed
		}
		if in := p.pop(); in != nil {
			p.lent++
			p.mu.Unlock()
			return in, nil
		}
		if p.lent < p.max {
			p.lent++
			p.mu.Unlock()
			in, err := p.module.newInstance()
			if err != nil {
				p.put(nil, false)
			}
			return in, err
		}
		p.back.Wait()
	}
}

func (p *pool) pop() *instance {
	if len(p.free) == 0 {
		return nil
	}
	in := p.free[len(p.free)-1]
	p.free[len(p.free)-1] = nil
	p.free = p.free[:len(p.free)-1]
	return in
}

// put returns what get lent. An instance that is not clean, or has too many handles,
// is closed; in is nil when there is none to return.
func (p *pool) put(in *instance, clean bool) {
	p.mu.Lock()
	p.lent--
	p.giveBack(in, clean)
}

// pin borrows an instance, a newly made one if it must be fresh, without counting it
// against max. It never waits.
func (p *pool) pin(fresh bool) (*instance, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	p.pinned++
	var in *instance
	if !fresh {
		in = p.pop()
	}
	p.mu.Unlock()
	if in != nil {
		return in, nil
	}
	in, err := p.module.newInstance()
	if err != nil {
		p.unpin(nil, false)
	}
	return in, err
}

func (p *pool) unpin(in *instance, clean bool) {
	p.mu.Lock()
	p.pinned--
	p.giveBack(in, clean)
}

// giveBack keeps the instance when it is fit to be used again and the pool has room.
// It unlocks p.mu.
func (p *pool) giveBack(in *instance, clean bool) {
	keep := in != nil && clean && in.opened < instanceHandlesMax && len(p.free)+p.lent < p.max
	if keep {
		p.free = append(p.free, in)
	}
	if p.closed {
		p.back.Broadcast() // drain waits for the last one
	} else {
		p.back.Signal()
	}
	p.mu.Unlock()
	if in != nil && !keep {
		in.close()
	}
}

// drain closes the pool to new borrowers and waits until everything is back.
func (p *pool) drain(ctx context.Context) error {
	wake := func() {
		p.mu.Lock()
		p.back.Broadcast()
		p.mu.Unlock()
	}
	stop := context.AfterFunc(ctx, wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.back.Broadcast()
	for p.lent+p.pinned > 0 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p.back.Wait()
	}
	return nil
}
