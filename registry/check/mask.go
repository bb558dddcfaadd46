package check

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

// A truth is what a mask reads from one point on, kept for the next case: neighbouring
// prompts mostly resume at the same point.
type truth struct {
	n, prompt, chunk uint64
	reads            abi.Bitmap
}

// mask compares what a rule says is needed from token n on with what its manifest's mask
// lets the query at n read, and that there is something to go on from at n. Every mask of the closed list reads less and less of an old
// prefix as the query moves on, so the query at n reads all that later ones do.
func (w *worker) mask(ce *Counterexample, g int, n, chunk uint64, need abi.Bitmap) *Counterexample {
	claim := &w.subject.Groups[g]
	if claim.Manifest.Mask == abi.MaskUnverified {
		return nil
	}
	if every := resumeEvery(claim, chunk); n%every != 0 {
		return w.fail(ce, "needs", g, fmt.Sprintf("Need answers for token %d, where there is nothing to go on from: by the mask %s that is so only at multiples of %d tokens; return ErrNoResume elsewhere",
			n, claim.Manifest.Mask, every), row{"need", at(g, need)})
	}
	t := &w.truths[g]
	if t.n != n || t.prompt != ce.PromptTokens && claim.Manifest.Mask == abi.MaskPromptWindow || t.chunk != chunk {
		t.n, t.prompt, t.chunk = n, ce.PromptTokens, chunk
		t.reads = zeroed(t.reads, int(n/chunk)+1)
		for c := uint64(0); c*chunk < n; c++ {
			if w.readsAny(g, n, c*chunk, min(n, (c+1)*chunk), ce.PromptTokens) {
				t.reads.Set(int(c))
			}
		}
	}
	if t.reads.Equal(need) {
		return nil
	}
	what := "chunks"
	if chunk != w.model().Groups[g].ChunkTokens {
		what = "blocks"
	}
	mask := string(claim.Manifest.Mask)
	if missing := minus(t.reads, need); missing != nil {
		ce = w.fail(ce, "needs", g, "Need leaves out "+what+" that attention reads, by the mask "+mask,
			row{"mask", at(g, t.reads)}, row{"need", at(g, need)}, row{"missing", at(g, missing)})
	} else {
		ce = w.fail(ce, "needs", g, "Need names "+what+" that attention does not read, by the mask "+mask,
			row{"mask", at(g, t.reads)}, row{"need", at(g, need)}, row{"surplus", at(g, minus(need, t.reads))})
	}
	ce.Groups[g].ChunkTokens = chunk // the unit of the rows
	return ce
}

// resumeEvery is how many tokens lie between two points that a sequence can go on from: a
// latent holds that many tokens and is stored when it is full, and a recurrent state is kept
// at the ends of chunks, which are blocks. Everything else goes on from every token.
func resumeEvery(c *Claim, chunk uint64) uint64 {
	switch c.Manifest.Mask {
	case abi.MaskLatent:
		return c.Params[c.Manifest.Param(c.Manifest.MaskArgs[0])]
	case abi.MaskState:
		return chunk
	}
	return 1
}

// readsAny reports whether the query at q reads a key of [lo, hi), hi at most q. What a
// mask of the closed list reads below q is a prefix, a run that ends at q, or both, so
// the first and the last token of the range decide.
func (w *worker) readsAny(g int, q, lo, hi, prompt uint64) bool {
	return lo < hi && (w.reads[g](q, lo, prompt) || w.reads[g](q, hi-1, prompt))
}

// readsOf returns the predicate of a mask: whether the query at q reads the key at k < q.
func readsOf(c *Claim) func(q, k, prompt uint64) bool {
	arg := func(i int) uint64 { return c.Params[c.Manifest.Param(c.Manifest.MaskArgs[i])] }
	switch c.Manifest.Mask {
	case abi.MaskWindow:
		window := arg(0)
		return func(q, k, _ uint64) bool { return q-k < window }
	case abi.MaskChunk:
		size := arg(0)
		return func(q, k, _ uint64) bool { return q/size == k/size }
	case abi.MaskSinkWindow:
		sink, window := arg(0), arg(1)
		return func(q, k, _ uint64) bool { return k < sink || q-k < window }
	case abi.MaskPromptWindow:
		window := arg(0)
		return func(q, k, prompt uint64) bool { return k < prompt || q-k < window }
	case abi.MaskState:
		return func(q, k, _ uint64) bool { return k == q-1 }
	default: // causal and latent read everything
		return func(_, _, _ uint64) bool { return true }
	}
}
