package host

import (
	"slices"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// foretold says whether a peer answers for each chunk of the demand by itself.
func (c *consumer) foretold() bool { return c.leg == legDemand && c.from != "" }

// reconsiderLocked has the plan of leg demand made again after something was lost, while
// there is something to give up or to ask for. c.mu is held.
func (c *consumer) reconsiderLocked() {
	if !c.doubt || c.rethink || !c.sealed || !c.foretold() || c.ctx.Err() != nil {
		return
	}
	if c.open == 0 && (c.fell || len(c.unasked()) == 0) {
		return
	}
	c.rethink = true
	c.open++ // demandMore takes it back
	c.wg.Go(c.reconsider)
}

// reconsider makes the plan of leg demand again after something was lost. What the new plan
// does not use is given up, so that nobody waits for it; when it is no better than the local
// prefix that is everything. What it adds is demanded.
func (c *consumer) reconsider() {
	var h hope
	for settled := false; !settled; {
		h = c.hope()
		c.mu.Lock()
		if settled = !c.doubt; !settled { // something was lost meanwhile
			c.mu.Unlock()
		}
	}
	var again []*want
	if h.err == nil {
		for _, w := range c.demanded() {
			if !w.ended && !h.uses[w.ref] {
				c.loseLocked(w, forgone)
				if w.fetch != nil {
					w.fetch.forgo(w.index)
				}
			}
		}
		for _, w := range c.spare {
			if !w.asked && h.uses[w.ref] {
				again = append(again, w)
			}
		}
	}
	if len(again) > 0 {
		c.lowerCeiling(h.resume)
	}
	c.mu.Unlock()
	c.demandMore(c.from, again, h.err)
}

// A hope is a plan over what is here, what is still awaited, and maybe spare chunks that
// nobody has asked for yet.
type hope struct {
	resume uint64
	uses   map[plan.Ref]bool
	err    error
}

// hope returns the best plan that what was lost leaves possible. Spare chunks count only
// below the ceiling, and only when they make a better plan than none.
func (c *consumer) hope() hope {
	usable := c.node.unusable(c.from, c.leg) == ""
	c.mu.Lock()
	c.doubt = false
	known, _ := c.hereLocked()
	for _, w := range c.demanded() {
		if !w.ended {
			known[w.ref.Group].Put(int(w.ref.Chunk), abi.Hit)
		}
	}
	limit := c.ceiling
	var spare []*want
	if usable && !c.fell && c.ctx.Err() == nil && time.Now().Before(c.deadline) {
		spare = c.unasked()
	}
	c.mu.Unlock()
	sure := c.hopeFor(known, c.ask.LoadCapTokens)
	if len(spare) == 0 || sure.err != nil {
		return sure
	}
	for _, w := range spare {
		known[w.ref.Group].Put(int(w.ref.Chunk), abi.Hit)
	}
	if own := c.ask.LoadCapTokens; own > 0 && (limit == 0 || own < limit) {
		limit = own
	}
	if more := c.hopeFor(known, limit); more.err != nil || more.resume > sure.resume {
		return more
	}
	return sure
}

func (c *consumer) hopeFor(known []abi.States, loadCap uint64) hope {
	ask := c.ask
	ask.LoadCapTokens = loadCap
	resume, demand, err := c.settleAsk(ask, known)
	h := hope{resume: resume, uses: make(map[plan.Ref]bool, len(demand)), err: err}
	for _, ref := range demand {
		h.uses[ref] = true
	}
	return h
}

// unasked returns the spare wants that were not demanded. c.mu is held.
func (c *consumer) unasked() (out []*want) {
	for _, w := range c.spare {
		if !w.asked {
			out = append(out, w)
		}
	}
	return out
}

// lowerCeiling says where to look next should spare chunks for a resume point be refused as
// well: each time twice as far below, so that the tries are few however many aligned points
// there are, and what is found is at most about as far below the shared prefix as the first
// try was above it. c.mu is held.
func (c *consumer) lowerCeiling(resume uint64) {
	c.stride = max(2*c.stride, c.node.model.AlignTokens)
	if c.fell = resume <= c.stride; !c.fell {
		c.ceiling = resume - c.stride
	}
}

// tailsBelow returns the chunks beside the demand that every producer of a prompt with a
// shared prefix keeps: those of the aligned points below the resume point.
func (c *consumer) tailsBelow(p *plan.Planner, resume uint64, demand []plan.Ref) ([]plan.Ref, error) {
	if resume <= c.ask.LocalTokens {
		return nil, nil
	}
	sets, err := p.AlignedSupply(plan.Start{PromptTokens: c.ask.PromptTokens}, c.ask.PromptTokens)
	if err != nil {
		return nil, err
	}
	planned := make(map[plan.Ref]bool, len(demand))
	for _, ref := range demand {
		planned[ref] = true
	}
	return slices.DeleteFunc(refs(sets), func(ref plan.Ref) bool {
		ct := c.node.groups[ref.Group].chunkTokens
		from := uint64(ref.Chunk) * ct
		return planned[ref] || from+ct <= c.ask.LocalTokens || from >= resume
	}), nil
}
