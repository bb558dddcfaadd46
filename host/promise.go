package host

import (
	"fmt"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/join"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// A promise is what a producer in leg demand knows of its prompt's chunks when it begins:
// demands for what will never come are answered then, and not at its last word. It is not
// changed after it is made.
type promise struct {
	chunks                   map[tier.Key]plan.Ref // complete ones of the prompt
	promised, open, admitted []abi.Bitmap          // by group; see plan.Machine.Foreseen
	groups                   []geometry
	prompt, cap              uint64 // tokens; cap 0 = none
}

// promise makes the promise of a producer whose machine is new.
func (p *producer) promise(prompt uint64) (*promise, error) {
	f := &promise{chunks: map[tier.Key]plan.Ref{}, groups: p.node.groups, prompt: prompt, cap: p.planner.Model().MaxStoreTokens}
	var err error
	if f.promised, f.open, f.admitted, err = p.machine.Foreseen(); err != nil {
		return nil, err
	}
	for g := range f.groups {
		for c := range uint32(prompt / f.groups[g].chunkTokens) {
			ref := plan.Ref{Group: g, Chunk: c}
			f.chunks[p.key(ref)] = ref
		}
	}
	return f, nil
}

// fate is a join.Promise.
func (f *promise) fate(k *join.Key) (join.Fate, string) {
	ref, ok := f.chunks[tier.Key(*k)]
	end := (uint64(ref.Chunk) + 1) * f.groups[ref.Group].chunkTokens
	switch {
	case !ok:
		return join.Never, fmt.Sprintf("no chunk of the producer's prompt, which has %d tokens", f.prompt)
	case has(f.promised[ref.Group], ref.Chunk):
		return join.WillCome, ""
	case has(f.open[ref.Group], ref.Chunk):
		return join.Open, ""
	case f.cap > 0 && end > f.cap:
		return join.Never, fmt.Sprintf("beyond the %d tokens that the producer stores of a request (max_store_tokens)", f.cap)
	case !has(f.admitted[ref.Group], ref.Chunk):
		return join.Never, "a policy of the producer does not let it into the tier"
	}
	return join.Never, "the group's rule does not keep it at the point where a consumer of this prompt goes on"
}

func has(b abi.Bitmap, i uint32) bool { return int(i) < len(b)*64 && b.Get(int(i)) }
