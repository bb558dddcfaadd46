package vllm

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

// A Case is one meeting of a producer and a consumer of the same prompt in eager
// prefill/decode: the consumer takes every key for one that the producer has.
type Case struct {
	PromptTokens uint64
	// StepTokens is the size of the producer's steps; 0 = the prompt in one step.
	StepTokens uint64
	// GeneratedTokens is how many tokens the producer generates before it ends.
	GeneratedTokens uint64
	// AbortTokens, when more than 0, ends the producer's request early: at the end of the
	// first step that reaches this token.
	AbortTokens uint64
	// MaxOffloadTokens, JunctionTokens, Warm, Reused: as in Request.
	MaxOffloadTokens Optional
	JunctionTokens   uint64
	Warm             Warm
	Reused           bool
	// TextTokens is the length of the consumer's request when it is longer than the
	// producer's prompt: the next turn of a conversation. 0 = the prompt.
	TextTokens uint64
	// LocalTokens and MaxLoadTokens: as in Ask, of the consumer.
	LocalTokens   uint64
	MaxLoadTokens Optional
	// Tiers are the consumer's.
	Tiers Tiers
}

// A Meeting is what came of a Case.
type Meeting struct {
	Case   Case
	Config Config
	// Supply holds, per group, what the producer passed on.
	Supply []abi.Bitmap
	Demand
	// Missing holds the demand that was never supplied: a hole. One missing chunk fails
	// the whole fetch, after the consumer waited for it, and the prompt is computed again.
	Missing []abi.Bitmap
}

// Hole reports whether something was demanded that was never supplied, or is to be loaded
// though nobody looked it up.
func (m *Meeting) Hole() bool { return !empty(m.Missing) || !empty(m.Unready) }

func empty(sets []abi.Bitmap) bool {
	for _, b := range sets {
		if !b.Empty() {
			return false
		}
	}
	return true
}

// Meet lets a producer and a consumer of these rules meet.
func (r *Rules) Meet(c Case) (*Meeting, error) { return MeetAcross(r, r, c) }

// MeetAcross lets a producer of one configuration and a consumer of another meet, as
// when a fleet is upgraded node by node. Their groups must have equal chunks, because
// otherwise they have no key in common.
func MeetAcross(producer, consumer *Rules, c Case) (*Meeting, error) {
	if len(producer.groups) != len(consumer.groups) {
		return nil, fmt.Errorf("vllm: the producer has %d groups, the consumer %d; they have no key in common", len(producer.groups), len(consumer.groups))
	}
	for i := range producer.groups {
		if a, b := producer.groups[i].chunk, consumer.groups[i].chunk; a != b {
			return nil, fmt.Errorf("vllm: chunks of group %d have %d tokens at the producer and %d at the consumer; they have no key in common", i, a, b)
		}
	}
	m := &Meeting{Case: c, Config: consumer.Config()}
	var err error
	if m.Supply, err = producer.Supply(c); err != nil {
		return nil, err
	}
	ask := Ask{TextTokens: max(c.PromptTokens, c.TextTokens), LocalTokens: c.LocalTokens, MaxLoadTokens: c.MaxLoadTokens}
	if m.Demand, err = consumer.Demand(ask, c.Tiers); err != nil {
		return nil, err
	}
	m.Missing = consumer.sets()
	for i := range m.Missing {
		m.Missing[i] = minus(m.Groups[i], m.Supply[i])
	}
	return m, nil
}

// FirstHole lets a case happen with every prompt from 1 token, or from the first that the
// case allows, to maxTokens, and returns the first meeting with a hole; nil = none.
func (r *Rules) FirstHole(c Case, maxTokens uint64) (*Meeting, error) {
	least := max(c.Warm.GPUTokens, c.Warm.LoadedTokens, c.LocalTokens, c.JunctionTokens) + 1
	for c.PromptTokens = least; c.PromptTokens <= maxTokens; c.PromptTokens++ {
		if m, err := r.Meet(c); err != nil || m.Hole() {
			return m, err
		}
	}
	return nil, nil
}

// Supply runs a producer through a case and returns what it passed on, per group.
func (r *Rules) Supply(c Case) ([]abi.Bitmap, error) {
	p, err := r.Produce(Request{
		PromptTokens: c.PromptTokens, MaxOffloadTokens: c.MaxOffloadTokens,
		JunctionTokens: c.JunctionTokens, Warm: c.Warm, Reused: c.Reused,
	})
	if err != nil {
		return nil, err
	}
	for _, end := range r.StepEnds(c.PromptTokens, max(c.Warm.GPUTokens, c.Warm.LoadedTokens), c.StepTokens) {
		if _, err := p.Step(end); err != nil {
			return nil, err
		}
		if c.AbortTokens > 0 && end >= c.AbortTokens {
			_, err := p.Abort()
			return p.Supply(), err
		}
	}
	for k := uint64(1); k < c.GeneratedTokens; k++ { // the last one is never computed
		if _, err := p.Step(c.PromptTokens + k); err != nil {
			return nil, err
		}
	}
	_, err = p.Finish(c.PromptTokens + c.GeneratedTokens)
	return p.Supply(), err
}

// StepEnds returns the tokens at which the steps of a prompt end, from a prefix that is
// there on, in steps of at most size tokens; 0 = as long as they can be. With a Mamba
// group in mode align, steps before its last block boundary end on a block boundary when
// they reach one, and the step that crosses the last one ends there. With drafters that
// boundary is one block earlier.
func (r *Rules) StepEnds(prompt, from, size uint64) (ends []uint64) {
	if size == 0 {
		size = prompt
	}
	block := uint64(0)
	drafts := r.config.Speculative
	for i := range r.groups {
		g := &r.groups[i]
		drafts = drafts || g.Eagle
		if g.Kind == Mamba && g.Mode == MambaAlign && !g.excluded {
			block = uint64(g.block)
		}
	}
	last := uint64(0)
	if block > 0 {
		if last = prompt / block * block; drafts {
			last -= min(last, block)
		}
	}
	for at := from; at < prompt; {
		end := min(at+size, prompt)
		switch {
		case at >= last:
		case end >= last:
			end = last
		case end/block*block > at:
			end = end / block * block
		}
		ends = append(ends, end)
		at = end
	}
	return ends
}
