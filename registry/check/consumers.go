package check

import (
	"errors"
	"slices"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// consumers judges consumers with many local prefixes, and own tiers, the laws for
// the Rounds that they make, and Need in blocks, which says what stays on the GPU.
func (w *worker) consumers(prompt uint64) (*Counterexample, error) {
	start := plan.Start{PromptTokens: prompt}
	supply, _, err := w.planner.PromptSupply(start)
	if err != nil {
		return w.broken("covers", prompt, err)
	}
	draw := rng(w.options.Seed ^ prompt<<1)
	for _, local := range w.manyLocals(prompt, &draw) {
		if ce, err := w.consumer(prompt, local, supply); ce != nil || err != nil {
			return ce, err
		}
	}
	for _, n := range [...]uint64{prompt - 1, prompt, draw.below(prompt), draw.below(prompt)} {
		for g := range w.model().Groups {
			bt := w.model().Groups[g].BlockTokens
			need, err := w.need(g, bt, prompt, n)
			if errors.Is(err, abi.ErrNoResume) {
				continue
			}
			if err != nil {
				return w.broken("needs", prompt, err)
			}
			w.count("needs")
			if ce := w.mask(&Counterexample{PromptTokens: prompt, ResumeTokens: n}, g, n, bt, need); ce != nil {
				return ce, nil
			}
		}
	}
	if ce, err := w.owned(prompt, supply, &draw); ce != nil || err != nil {
		return ce, err
	}
	return w.drawnLaws(prompt, &draw)
}

// manyLocals returns local prefixes below the prompt: next to chunks' edges, all while the
// prompt and the period are short, and drawn.
func (w *worker) manyLocals(prompt uint64, draw *rng) []uint64 {
	ct := w.model().Groups[0].ChunkTokens
	locals := []uint64{prompt - 1, prompt - min(prompt, ct), prompt - min(prompt, ct+1), ct - 1, ct + 1}
	if d := &w.domain; prompt <= 3*d.PeriodTokens && d.PeriodTokens <= everyLocalMax {
		for n := range prompt {
			locals = append(locals, n)
		}
	}
	for range drawnLocals {
		locals = append(locals, draw.below(prompt))
	}
	return slices.DeleteFunc(locals, func(n uint64) bool { return n >= prompt })
}

const (
	// everyLocalMax is the longest period for which every local prefix is tried.
	everyLocalMax = 64
	// drawnLocals, drawnOwns and drawnRounds are drawn cases per length.
	drawnLocals, drawnOwns, drawnRounds = 8, 4, 3
)

// owned judges covers and needs when the consumer's own tier holds, or is being given,
// part of the prompt: only what it does not have is asked of the peer. The part is the
// first half, the second, the middle third, or drawn chunk by chunk.
func (w *worker) owned(prompt uint64, supply []abi.Bitmap, draw *rng) (*Counterexample, error) {
	if !w.subject.PD {
		return nil, nil
	}
	return w.eachOwn(prompt, draw, func(local uint64, own []abi.States) (*Counterexample, error) {
		return w.ownCase(prompt, local, supply, own)
	})
}

// eachOwn calls do for consumers whose own tier holds part of the prompt. Of a short prompt
// that is every run of chunks, too.
func (w *worker) eachOwn(prompt uint64, draw *rng, do func(local uint64, own []abi.States) (*Counterexample, error)) (*Counterexample, error) {
	for _, s := range [...]abi.State{abi.Hit, abi.Pending} {
		for _, part := range [...]struct{ lo, hi uint64 }{{0, prompt / 2}, {prompt / 2, prompt}, {prompt / 3, prompt / 3 * 2}} {
			own := w.ownTables(prompt, func(i, n int) abi.State {
				if at := uint64(i) * prompt / uint64(n); at >= part.lo && at < part.hi {
					return s
				}
				return abi.Miss
			})
			if ce, err := do(0, own); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	for range drawnOwns {
		local := uint64(0)
		if draw.below(2) == 0 {
			local = draw.below(prompt)
		}
		own := w.ownTables(prompt, func(int, int) abi.State {
			return [...]abi.State{abi.Miss, abi.Miss, abi.Hit, abi.Pending}[draw.below(4)]
		})
		if ce, err := do(local, own); ce != nil || err != nil {
			return ce, err
		}
	}
	if prompt > everyCaseMax {
		return nil, nil
	}
	return w.everyOwn(prompt, do)
}

// everyOwn calls do for consumers whose own tier holds the chunks that begin in a run of
// tokens.
func (w *worker) everyOwn(prompt uint64, do func(local uint64, own []abi.States) (*Counterexample, error)) (*Counterexample, error) {
	unit := w.model().Groups[0].ChunkTokens
	for g := range w.model().Groups {
		unit = min(unit, w.model().Groups[g].ChunkTokens)
	}
	for lo := uint64(0); lo < prompt; lo += unit {
		for hi := lo + unit; hi < prompt+unit; hi += unit {
			for _, s := range [...]abi.State{abi.Hit, abi.Pending} {
				own := make([]abi.States, len(w.model().Groups))
				for g := range own {
					ct := w.model().Groups[g].ChunkTokens
					n := prompt / ct
					own[g] = abi.NewStates(int(n))
					for c := (lo + ct - 1) / ct; c < n && c*ct < hi; c++ {
						own[g].Put(int(c), s)
					}
				}
				for _, local := range [...]uint64{0, prompt / 3} {
					if ce, err := do(local, own); ce != nil || err != nil {
						return ce, err
					}
				}
			}
		}
	}
	return nil, nil
}

// ownTables returns what an own tier says of every whole chunk i of n of each group.
func (w *worker) ownTables(prompt uint64, state func(i, n int) abi.State) []abi.States {
	own := make([]abi.States, len(w.model().Groups))
	for g := range own {
		n := int(prompt / w.model().Groups[g].ChunkTokens)
		own[g] = abi.NewStates(n)
		for i := range n {
			own[g].Put(i, state(i, n))
		}
	}
	return own
}

// ownCase judges one consumer whose own tier holds part of the prompt.
func (w *worker) ownCase(prompt, local uint64, supply []abi.Bitmap, own []abi.States) (*Counterexample, error) {
	pl, err := w.planner.Eager(plan.Ask{PromptTokens: prompt, LocalTokens: local}, own)
	if err != nil {
		return w.broken("covers", prompt, err)
	}
	ce := &Counterexample{PromptTokens: prompt, LocalTokens: local, ResumeTokens: pl.ResumeTokens}
	if pl.Deferred {
		return w.deferred(ce, pl), nil
	}
	c := &pdCase{plan.Start{PromptTokens: prompt}, plan.Ask{PromptTokens: prompt, LocalTokens: local}, own}
	if ce, err := w.uncovered(c, pl.ResumeTokens, supply, pl.Demand, "the consumer's own tier holds part of the prompt; of the rest it demands chunks that the producer never supplies"); ce != nil || err != nil {
		return ce, err
	}
	w.count("needs")
	return w.needs(ce, pl)
}

// drawnLaws judges the laws on lookup states for Rounds that a consumer of this prompt
// makes.
func (w *worker) drawnLaws(prompt uint64, draw *rng) (*Counterexample, error) {
	if prompt < 2 {
		return nil, nil
	}
	for g := range w.model().Groups {
		gr := &w.model().Groups[g]
		for range drawnRounds {
			bound := 1 + draw.below(prompt-1)
			local := draw.below(bound)
			r := abi.Round{
				BlockTokens: gr.BlockTokens, ChunkTokens: gr.ChunkTokens, PromptTokens: prompt, StoredTokens: prompt,
				AlignTokens: w.model().AlignTokens, LocalTokens: local, BoundTokens: bound,
				Lo: uint32(local / gr.ChunkTokens), Hi: uint32((bound + gr.ChunkTokens - 1) / gr.ChunkTokens),
			}
			if c := w.model().MaxStoreTokens; c > 0 {
				r.StoredTokens = min(prompt, c)
			}
			t := abi.NewStates(r.Chunks())
			t.Fill(0, r.Chunks(), [...]abi.State{abi.Hit, abi.Hit, abi.Pending, abi.Retry}[draw.below(4)])
			for range draw.below(4) {
				t.Put(int(draw.below(uint64(r.Chunks()))), abi.State(draw.below(4)))
			}
			w.count("states")
			if ce, err := w.law(g, r, t); ce != nil || err != nil {
				return ce, err
			}
			if ce, err := w.ranges(g, r, t); ce != nil || err != nil {
				return ce, err
			}
		}
	}
	return nil, nil
}
