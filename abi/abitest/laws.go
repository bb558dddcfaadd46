package abitest

import (
	"errors"
	"slices"

	"github.com/tierd/tierd/abi"
)

// padding reports a bit that is set at or beyond n.
func padding(b abi.Bitmap, n int) bool { return b.Next(n) >= 0 }

// reach asks for one set; ok is false when the rule has no answer, which is recorded.
func (c *checker) reach(rule abi.Rule, r abi.Round) (out abi.Bitmap, ok bool) {
	defer c.recovered("Reach of " + describe(&r))
	n := r.Chunks()
	b := abi.NewBitmap(n)
	if err := rule.Reach(r, b); err != nil {
		c.breaks(LawTotal, "Reach of %s answered the error %q", describe(&r), err)
		return nil, false
	}
	if padding(b, n) {
		c.breaks(LawTotal, "Reach of %s set bit %d, and was asked for %d chunks", describe(&r), b.Next(n), n)
		return nil, false
	}
	return b, true
}

func (c *checker) checkReach(used, fresh abi.Rule, r abi.Round) {
	first, ok := c.reach(used, r)
	if !ok {
		return
	}
	n := r.Chunks()
	same := func(rule abi.Rule, which string) {
		if again, ok := c.reach(rule, r); ok && !again.Equal(first) {
			c.breaks(LawPure, "Reach of %s answered %s, and %s %s", describe(&r), drawRow(first, n), which, drawRow(again, n))
		}
	}
	same(used, "the second time")
	same(fresh, "on a fresh instance")
	c.reach(used, c.producer(c.drawRound())) // something else
	same(used, "after another call")
	c.checkSplit(used, r, first)
	if !c.isSpec() {
		return // a policy speaks about chunks that may never be stored
	}
	c.complete(&r, first)
}

// checkSplit asks for [Lo, Hi) in drawn pieces, the last one first, and chunk by chunk.
func (c *checker) checkSplit(rule abi.Rule, r abi.Round, whole abi.Bitmap) {
	n := r.Chunks()
	for range splitsPerReach {
		cuts := []int{0, n}
		for range 1 + c.rand.IntN(3) {
			cuts = append(cuts, c.rand.IntN(n+1))
		}
		slices.Sort(cuts)
		if !c.checkPieces(rule, r, whole, cuts) {
			return
		}
	}
	var all []int
	for i := range min(n, smallChunksMax) + 1 {
		all = append(all, n-min(n, smallChunksMax)+i)
	}
	c.checkPieces(rule, r, whole, all)
}

// checkPieces asks for the pieces that cuts makes of the range.
func (c *checker) checkPieces(rule abi.Rule, r abi.Round, whole abi.Bitmap, cuts []int) bool {
	for k := len(cuts) - 1; k > 0; k-- {
		piece := r
		piece.Lo, piece.Hi = r.Lo+uint32(cuts[k-1]), r.Lo+uint32(cuts[k])
		got, ok := c.reach(rule, piece)
		if !ok {
			return false
		}
		n := piece.Chunks()
		want := abi.NewBitmap(n)
		for i := range n {
			if whole.Get(cuts[k-1] + i) {
				want.Set(i)
			}
		}
		if !got.Equal(want) {
			c.breaks(LawPure, "Reach of %s answered %s, and for chunks %d to %d of them alone %s, not %s", describe(&r),
				drawRow(whole, r.Chunks()), piece.Lo, piece.Hi, drawRow(got, n), drawRow(want, n))
			return false
		}
	}
	return true
}

func (c *checker) need(rule abi.SpecRule, r abi.Round) (out abi.Bitmap, none, ok bool) {
	defer c.recovered("Need of " + describe(&r))
	b := abi.NewBitmap(int(r.Hi))
	err := rule.Need(r, b)
	if errors.Is(err, abi.ErrNoResume) {
		return nil, true, true
	}
	if err != nil {
		c.breaks(LawTotal, "Need of %s answered the error %q", describe(&r), err)
		return nil, false, false
	}
	if padding(b, int(r.Hi)) {
		c.breaks(LawTotal, "Need of %s set bit %d, and was asked for %d chunks", describe(&r), b.Next(int(r.Hi)), r.Hi)
		return nil, false, false
	}
	return b, false, true
}

func (c *checker) checkNeed(used, fresh abi.SpecRule, r abi.Round) {
	r.Lo = 0
	r.ResidentTokens, r.Offers, r.LocalTokens, r.BoundTokens = 0, 0, 0, 0
	first, none, ok := c.need(used, r)
	if !ok {
		return
	}
	for i, rule := range []abi.SpecRule{used, fresh} {
		again, noneAgain, ok := c.need(rule, r)
		if ok && (none != noneAgain || !again.Equal(first)) {
			c.breaks(LawPure, "Need of %s answered two things, the second %s", describe(&r),
				[]string{"on the same instance", "on a fresh instance"}[i])
		}
	}
}

// An answer is what one scan said.
type answer struct {
	span   abi.Span
	demand abi.Bitmap
}

func (a *answer) equal(b *answer) bool { return a.span == b.span && a.demand.Equal(b.demand) }

func (a *answer) draw(n int) string {
	if a.span.Deferred {
		return "deferred " + drawRow(a.demand, n)
	}
	usable := abi.NewBitmap(n)
	usable.SetRange(0, int(a.span.Usable))
	return "usable " + drawRow(usable, n) + " demand " + drawRow(a.demand, n)
}

func (c *checker) scan(rule abi.Rule, r abi.Round, t abi.States) (a *answer, ok bool) {
	n := r.Chunks()
	defer c.recovered("Scan of " + describe(&r) + " states " + t.Format(n))
	table := slices.Clone(t)
	demand := abi.NewBitmap(n)
	span, err := rule.Scan(r, table, demand)
	switch {
	case err != nil:
		c.breaks(LawTotal, "Scan of %s states %s answered the error %q", describe(&r), t.Format(n), err)
		return nil, false
	case int64(span.Usable) > int64(n) && !span.Deferred:
		c.breaks(LawTotal, "Scan of %s states %s answered %d usable chunks of %d", describe(&r), t.Format(n), span.Usable, n)
		return nil, false
	case padding(demand, n):
		c.breaks(LawTotal, "Scan of %s states %s demands bit %d, and was asked for %d chunks", describe(&r), t.Format(n), demand.Next(n), n)
		return nil, false
	case !slices.Equal(table, t):
		c.breaks(LawPure, "Scan of %s states %s changed the table to %s", describe(&r), t.Format(n), table.Format(n))
	}
	if span.Deferred {
		span.Usable = 0 // has no meaning
	}
	return &answer{span, demand}, true
}

// checkScans draws tables, and takes all 4^n when there are few.
func (c *checker) checkScans(used, fresh abi.Rule, r abi.Round) {
	n := r.Chunks()
	if n == 0 {
		c.checkScan(used, fresh, r, nil)
		return
	}
	if n <= 2 {
		for v := range uint64(1) << (2 * n) {
			c.checkScan(used, fresh, r, abi.States{v})
		}
		return
	}
	for range tablesPerRound {
		c.checkScan(used, fresh, r, c.drawTable(n))
	}
}

func (c *checker) checkScan(used, fresh abi.Rule, r abi.Round, t abi.States) {
	first, ok := c.scan(used, r, t)
	if !ok {
		return
	}
	n := r.Chunks()
	for i, rule := range []abi.Rule{used, fresh} {
		if again, ok := c.scan(rule, r, t); ok && !again.equal(first) {
			c.breaks(LawPure, "Scan of %s states %s answered %s, and %s %s", describe(&r), t.Format(n), first.draw(n),
				[]string{"the second time", "on a fresh instance"}[i], again.draw(n))
		}
	}
	if !c.isSpec() {
		return // of a policy's scan only the usable count is used, and it need not look at states
	}
	c.checkDemand(&r, t, first)
	c.checkSwaps(used, &r, t, first)
	c.checkMonotone(used, &r, t, first)
}

// checkDemand compares the demand with the states that were given.
func (c *checker) checkDemand(r *abi.Round, t abi.States, a *answer) {
	n := r.Chunks()
	allowed, law := abi.Here, LawAnswered
	if a.span.Deferred {
		allowed, law = abi.Unknown, LawUnknown
	}
	for i := a.demand.Next(0); i >= 0; i = a.demand.Next(i + 1) {
		if allowed&(1<<t.At(i)) == 0 {
			c.breaks(law, "Scan of %s states [%s] answered %s, and chunk %d is %v", describe(r), t.Format(n), a.draw(n), int(r.Lo)+i, t.At(i))
			return
		}
	}
	if a.span.Deferred && a.demand.Empty() {
		c.breaks(LawUnknown, "Scan of %s states [%s] is deferred and marks no chunk to look up", describe(r), t.Format(n))
	}
}

// checkSwaps compares the answer with those of tables that differ in one state.
func (c *checker) checkSwaps(rule abi.Rule, r *abi.Round, t abi.States, a *answer) {
	n := r.Chunks()
	differs := func(law string, from, to abi.State, same func(b *answer) bool) {
		if t.First(1<<from, 0, n) >= n {
			return
		}
		u := swap(t, n, from, to)
		if b, ok := c.scan(rule, *r, u); ok && !same(b) {
			c.breaks(law, "Scan of %s states [%s] answered %s, and states [%s] %s", describe(r), t.Format(n), a.draw(n), u.Format(n), b.draw(n))
		}
	}
	differs(LawPending, abi.Pending, abi.Hit, a.equal)
	if a.span.Deferred {
		return
	}
	// Whatever the unknown chunks turn out to be, the usable count stands; and while
	// they are unknown they count as not here.
	differs(LawUnknown, abi.Retry, abi.Miss, a.equal)
	differs(LawUnknown, abi.Retry, abi.Hit, func(b *answer) bool { return a.span == b.span })
}

// checkMonotone turns one chunk into a Hit.
func (c *checker) checkMonotone(rule abi.Rule, r *abi.Round, t abi.States, a *answer) {
	n := r.Chunks()
	if n == 0 || a.span.Deferred {
		return
	}
	i := c.rand.IntN(n)
	u := slices.Clone(t)
	u.Put(i, abi.Hit)
	if b, ok := c.scan(rule, *r, u); ok && !b.span.Deferred && b.span.Usable < a.span.Usable {
		c.breaks(LawMonotone, "Scan of %s states [%s] answered %s, and with chunk %d a Hit, [%s], %s",
			describe(r), t.Format(n), a.draw(n), int(r.Lo)+i, u.Format(n), b.draw(n))
	}
}
