package check

import "github.com/tierd/tierd/abi"

// mask compares what a rule says is needed from token n on with what its manifest's mask
// lets the query at n read. Every mask of the closed list reads less and less of an old
// prefix as the query moves on, so the query at n reads all that later ones do.
//
// It goes token by token, from the definition, and remembers the points it has seen.
func (w *worker) mask(ce *Counterexample, g int, n uint64, need abi.Bitmap) *Counterexample {
	claim := &w.subject.Groups[g]
	if w.masked[g][n] || claim.Manifest.Mask == abi.MaskUnverified || !w.domain.maskAt(n) {
		return nil
	}
	gr := &w.model().Groups[g]
	want := abi.NewBitmap(int(n/gr.ChunkTokens) + 1)
	reads := readsOf(claim)
	for k := uint64(0); k < n; k++ {
		if reads(n, k, ce.PromptTokens) {
			want.Set(int(k / gr.ChunkTokens))
			k = (k/gr.ChunkTokens+1)*gr.ChunkTokens - 1 // the chunk is decided
		}
	}
	if want.Equal(need) {
		w.masked[g][n] = true
		return nil
	}
	mask := string(claim.Manifest.Mask)
	if missing := minus(want, need); missing != nil {
		return w.fail(ce, "needs", g, "Need leaves out chunks that attention reads, by the mask "+mask,
			row{"mask", at(g, want)}, row{"need", at(g, need)}, row{"missing", at(g, missing)})
	}
	return w.fail(ce, "needs", g, "Need names chunks that attention does not read, by the mask "+mask,
		row{"mask", at(g, want)}, row{"need", at(g, need)}, row{"surplus", at(g, minus(need, want))})
}

// maskAt reports whether Need at n is compared with the mask: at every point of the
// first three periods, and at the edges after them.
func (d *Domain) maskAt(n uint64) bool {
	return n <= 3*d.PeriodTokens || d.isEdgeLength(n)
}

func (d *Domain) isEdgeLength(n uint64) bool {
	lo, hi := 0, len(d.edges)
	for lo < hi {
		if mid := (lo + hi) / 2; d.edges[mid] < n {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo < len(d.edges) && d.edges[lo] == n
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
