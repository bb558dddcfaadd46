package specs

import "github.com/tierd/tierd/abi"

// Full returns the spec of full causal attention: every token reads every earlier
// one. It keeps every complete chunk and resumes after the longest unbroken prefix.
func Full() abi.Spec {
	return &spec{
		manifest: abi.Manifest{Name: "full", Version: "1.0.0", Kind: abi.KindSpec, Mask: abi.MaskCausal},
		open:     func([]uint64) abi.SpecRule { return full{} },
	}
}

// Hidden returns the spec of a group that keeps hidden states, one a token, of which a
// later layer reads all: the same as Full under a name of its own.
func Hidden() abi.Spec {
	return &spec{
		manifest: abi.Manifest{Name: "hidden", Version: "1.0.0", Kind: abi.KindSpec, Mask: abi.MaskCausal},
		open:     func([]uint64) abi.SpecRule { return full{} },
	}
}

type full struct{}

func (full) Reach(r abi.Round, out abi.Bitmap) error {
	s := newShelf(&r, out)
	s.put(s.chunks)
	return nil
}

// Scan counts from the left to the first Miss. What is not known before it decides
// how long the prefix is, so the answer waits for all of it.
func (full) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	return scanPrefix(states, r.Chunks(), demand), nil
}

func scanPrefix(states abi.States, n int, demand abi.Bitmap) abi.Span {
	end := states.First(abi.Absent, 0, n)
	if states.First(abi.Unknown, 0, end) < end {
		states.Mark(abi.Unknown, 0, end, demand)
		return abi.Span{Deferred: true}
	}
	demand.SetRange(0, end)
	return abi.Span{Usable: uint32(end)}
}

// Need: the query at n reads every key k < n.
func (full) Need(r abi.Round, out abi.Bitmap) error {
	last := (r.ResumeTokens + r.ChunkTokens - 1) / r.ChunkTokens // first chunk wholly at or after n
	out.SetRange(0, int(min(last, uint64(r.Hi))))
	return nil
}
