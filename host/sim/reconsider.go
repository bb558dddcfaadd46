package sim

import (
	"slices"
	"time"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/registry/plan"
)

// usable mirrors Node.unusable: whether a peer can be asked in the request's leg.
func (c *consumer) usable(p *peer) bool {
	s := p.core.Status(c.n.local())
	return (s.State == session.Ready || s.State == session.Connecting) && (s.State != session.Ready || s.AllLegs || !c.leg.transfer)
}

// foretold says whether the peer answers for each chunk of the demand by itself.
func (c *consumer) foretold() bool { return c.leg.foretold && c.peer != nil }

// reconsider mirrors consumer.reconsiderLocked: the plan of leg demand is made again, a moment
// later, after something was lost.
func (c *consumer) reconsider() {
	if !c.doubt || c.rethink || !c.sealed || !c.foretold() || c.finished || c.settled {
		return
	}
	if c.open == 0 && (c.fell || len(c.unasked()) == 0) {
		return
	}
	c.rethink = true
	c.open++ // demandMore takes it back
	pause := time.Duration(c.n.w.rnd.between(1, 50)) * time.Microsecond
	if c.n.local()+2*pause >= c.deadline {
		pause = 0 // the limit of a wait is to the nanosecond here
	}
	c.n.w.after(pause, c.n, func() {
		if !c.finished {
			c.n.moved = true
			c.planAgain()
		}
	})
}

// planAgain mirrors consumer.reconsider: what the new plan does not use is given up, and what it
// adds is demanded.
func (c *consumer) planAgain() {
	resume, uses := c.hope()
	for _, x := range c.demanded() {
		if x.ended || uses[x.ref] {
			continue
		}
		c.lostLater(x)
		c.doubt = false
		if x.fetch != nil {
			c.peer.core.Arrived(c.n.local(), x.fetch.id, x.index, session.Aborted, "not wanted any more")
			c.peer.carry()
		}
	}
	var again []*want
	for _, x := range c.spare {
		if !x.asked && uses[x.ref] {
			again = append(again, x)
		}
	}
	if len(again) > 0 {
		c.stride = max(2*c.stride, c.n.w.model.AlignTokens)
		if c.fell = resume <= c.stride; !c.fell {
			c.ceiling = resume - c.stride
		}
	}
	c.n.w.result.Rethought++
	c.demandMore(again)
}

// hope mirrors consumer.hope.
func (c *consumer) hope() (resume uint64, uses map[plan.Ref]bool) {
	c.doubt = false
	known := c.here()
	for _, x := range c.demanded() {
		if !x.ended {
			known[x.ref.Group].Put(int(x.ref.Chunk), abi.Hit)
		}
	}
	var spare []*want
	if c.usable(c.peer) && !c.fell && c.n.local() < c.deadline {
		spare = c.unasked()
	}
	resume, uses = c.hopeFor(known, 0)
	if len(spare) == 0 {
		return resume, uses
	}
	for _, x := range spare {
		known[x.ref.Group].Put(int(x.ref.Chunk), abi.Hit)
	}
	if more, with := c.hopeFor(known, c.ceiling); more > resume {
		return more, with
	}
	return resume, uses
}

func (c *consumer) hopeFor(known []abi.States, limit uint64) (uint64, map[plan.Ref]bool) {
	ask := c.ask
	ask.LoadCapTokens = limit
	pl := must(c.n.w.plan.Settled(ask, known))
	uses := map[plan.Ref]bool{}
	for _, ref := range refs(pl.Demand) {
		uses[ref] = true
	}
	return pl.ResumeTokens, uses
}

func (c *consumer) unasked() (out []*want) {
	for _, x := range c.spare {
		if !x.asked {
			out = append(out, x)
		}
	}
	return out
}

// tailsBelow mirrors consumer.tailsBelow: the chunks of the aligned points below the resume
// point, beside the demand.
func (c *consumer) tailsBelow(resume uint64, demand []plan.Ref) []*want {
	if resume == 0 {
		return nil
	}
	sets := must(c.n.w.plan.AlignedSupply(plan.Start{PromptTokens: c.ask.PromptTokens}, c.ask.PromptTokens))
	return c.wantsOf(slices.DeleteFunc(refs(sets), func(ref plan.Ref) bool {
		from := uint64(ref.Chunk) * c.n.w.model.Groups[ref.Group].ChunkTokens
		return slices.Contains(demand, ref) || from >= resume
	}))
}
