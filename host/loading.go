package host

import (
	"errors"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/registry/plan"
)

// loadsMax is how many chunks of one load are copied at a time. Their checksums, of bytes
// that are in no cache, run at 10 to 16 GB/s a core and PCIe 5 at 55; 16 were a tenth faster
// than 8.
const loadsMax = 16

// loading is the work of one load: chunks go into the engine's blocks, several at a time.
type loading struct {
	c      *consumer
	to     map[plan.Ref][]uint32 // destinations
	copied map[plan.Ref]bool
}

// brought is the end of one chunk's copy.
type brought struct {
	ref plan.Ref
	w   *want
	err error
}

// arriving copies what has come and what comes, until every want has ended. What comes by
// another way than the wire, and is still to be copied then, is rest's.
func (l *loading) arriving() {
	c := l.c
	c.mu.Lock()
	queue := make([]*want, 0, len(c.wants))
	for _, w := range c.demanded() {
		if !w.hold.zero() {
			queue = append(queue, w)
		}
	}
	c.fresh = nil
	c.mu.Unlock()
	settled := c.settled
	ends := make(chan brought, loadsMax)
	seen := map[plan.Ref]bool{}
	for flying := 0; ; {
		for len(queue) > 0 && flying < loadsMax {
			w := queue[0]
			queue = queue[1:]
			if seen[w.ref] || l.to[w.ref] == nil {
				continue
			}
			seen[w.ref] = true
			flying++
			go func() { ends <- l.bring(w.ref, w) }()
		}
		if settled == nil && flying == 0 && len(queue) == 0 {
			return
		}
		select {
		case end := <-ends:
			flying--
			l.took(end)
		case <-c.news:
			queue = append(queue, c.takeFresh()...)
		case <-settled:
			settled = nil
			queue = append(queue, c.takeFresh()...)
		}
	}
}

// takeFresh returns what has come since it was asked last.
func (c *consumer) takeFresh() []*want {
	c.mu.Lock()
	defer c.mu.Unlock()
	fresh := c.fresh
	c.fresh = nil
	return fresh
}

// took takes up the end of a copy, and reports whether the chunk is in its blocks.
func (l *loading) took(end brought) bool {
	if end.err != nil {
		l.c.spoiled(end.w, end.err)
		return false
	}
	l.copied[end.ref] = true
	return true
}

// rest plans over what is there until every chunk of the plan is in its blocks. A chunk
// that proves wrong is no longer there, and the plan is made again.
func (l *loading) rest() (resume uint64, loaded []plan.Ref, err error) {
	c := l.c
	known, here := c.here()
	for ref := range here {
		if l.to[ref] == nil {
			known[ref.Group].Put(int(ref.Chunk), abi.Miss)
		}
	}
	for {
		resume, demand, err := c.settle(known)
		if err != nil {
			return c.ask.LocalTokens, nil, err
		}
		var todo []plan.Ref
		for _, ref := range demand {
			if !l.copied[ref] {
				todo = append(todo, ref)
			}
		}
		if len(todo) == 0 {
			return resume, demand, nil
		}
		for _, ref := range l.copy(todo, here) {
			known[ref.Group].Put(int(ref.Chunk), abi.Miss)
		}
	}
}

// copy copies chunks that are here, and returns those that proved wrong.
func (l *loading) copy(todo []plan.Ref, here map[plan.Ref]*want) (wrong []plan.Ref) {
	ends := make(chan brought, loadsMax)
	flying := 0
	for len(todo) > 0 || flying > 0 {
		for len(todo) > 0 && flying < loadsMax && len(wrong) == 0 {
			ref := todo[0]
			todo = todo[1:]
			flying++
			go func() { ends <- l.bring(ref, here[ref]) }()
		}
		if len(wrong) > 0 {
			todo = nil // the next plan may want less
		}
		if flying == 0 {
			break
		}
		end := <-ends
		flying--
		if !l.took(end) {
			wrong = append(wrong, end.ref)
		}
	}
	return wrong
}

// bring compares a chunk with its checksum and copies it to its blocks.
func (l *loading) bring(ref plan.Ref, w *want) brought {
	if w == nil {
		return brought{ref: ref, err: errors.New("planned, but not here")}
	}
	c := l.c
	began := time.Now()
	c.mu.Lock()
	h := w.hold
	c.mu.Unlock()
	err := h.verify()
	if err == nil {
		space := &c.engine.spaces[ref.Group]
		frags := make([]gpu.Fragment, 0, len(l.to[ref])*len(space.strides))
		for _, id := range l.to[ref] {
			frags = space.fragments(frags, id)
		}
		err = c.engine.device.Scatter(c.ctx, space.region, frags, h.bytes)
	}
	m := c.node.metrics
	m.LoadSeconds.Add(time.Since(began).Seconds())
	if err == nil {
		m.LoadBytes.WithLabelValues(c.node.groups[ref.Group].name).Add(float64(len(h.bytes)))
	}
	return brought{ref: ref, w: w, err: err}
}
