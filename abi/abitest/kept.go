package abitest

import "github.com/tierd/tierd/abi"

// checkKept asks for the same points by another name. The end of the prompt, an aligned
// point and a junction are all points at which somebody goes on, and what the rule keeps for
// one of them when it is the resume point, and attention needs there, it must keep for each.
// It asks no more: whether what it keeps is enough is for the registration check.
func (c *checker) checkKept(rule abi.SpecRule, r abi.Round) {
	r.Lo, r.ResumeTokens, r.JunctionTokens = 0, 0, 0
	r.ResidentTokens, r.Offers, r.LocalTokens, r.BoundTokens = 0, 0, 0, 0
	r.StoredTokens = min(r.StoredTokens, uint64(r.Hi)*r.ChunkTokens)
	if align := r.AlignTokens; align > 0 {
		last := r.StoredTokens / align * align
		for _, stored := range []uint64{r.StoredTokens, last} {
			for _, prompt := range []uint64{stored / 2, uint64(r.Hi) * r.ChunkTokens} {
				for _, n := range []uint64{align, last} {
					asked := r
					asked.StoredTokens, asked.PromptTokens = stored, prompt
					c.checkPoint(rule, asked, n, "align")
				}
			}
		}
	}
	for _, n := range []uint64{r.StoredTokens / 2, r.StoredTokens} {
		asked := r
		asked.AlignTokens, asked.JunctionTokens = 0, n
		c.checkPoint(rule, asked, n, "junction")
	}
}

// checkPoint holds what r keeps against what it keeps when token n is the resume point too.
func (c *checker) checkPoint(rule abi.SpecRule, r abi.Round, n uint64, field string) {
	if n == 0 || n > r.StoredTokens {
		return
	}
	named := r
	named.ResumeTokens = n
	need, none, ok := c.need(rule, named)
	if !ok || none {
		return
	}
	with, ok := c.reach(rule, named)
	if !ok {
		return
	}
	without, ok := c.reach(rule, r)
	if !ok || !c.complete(&r, without) {
		return
	}
	for i := need.Next(0); i >= 0; i = need.Next(i + 1) {
		if with.Get(i) && !without.Get(i) {
			c.breaks(LawKept, "Reach of %s answered %s, and with resume=%d %s; going on at token %d, which %s asks for, needs chunk %d",
				describe(&r), drawRow(without, r.Chunks()), n, drawRow(with, r.Chunks()), n, field, i)
			return
		}
	}
}

// complete reports whether out, the answer of Reach, names only chunks that are stored whole.
func (c *checker) complete(r *abi.Round, out abi.Bitmap) bool {
	for i := out.Next(0); i >= 0; i = out.Next(i + 1) {
		if end := (uint64(r.Lo) + uint64(i) + 1) * r.ChunkTokens; end > r.StoredTokens {
			c.breaks(LawComplete, "Reach of %s answered %s; chunk %d ends at token %d, and only %d are stored",
				describe(r), drawRow(out, r.Chunks()), int(r.Lo)+i, end, r.StoredTokens)
			return false
		}
	}
	return true
}
