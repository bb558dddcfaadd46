package abitest

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

// upTo returns a number in [0, n].
func (c *checker) upTo(n uint64) uint64 { return c.rand.Uint64N(n + 1) }

// drawRound draws a Round with every field set; producer and consumer keep what their
// side can know.
func (c *checker) drawRound() abi.Round {
	block := 1 + c.upTo(3)
	chunk := block * (1 + c.upTo(3))
	chunks := 1 + c.upTo(smallChunksMax-1)
	if c.rand.IntN(8) == 0 {
		chunks = 1 + c.upTo(wideChunksMax-1)
	}
	text := c.upTo(chunks * chunk)
	r := abi.Round{
		BlockTokens: block, ChunkTokens: chunk,
		PromptTokens:   c.upTo(text),
		StoredTokens:   text,
		ResumeTokens:   c.upTo(text),
		AlignTokens:    chunk * c.upTo(4),
		JunctionTokens: c.upTo(text),
		ResidentTokens: c.upTo(text),
		Offers:         c.upTo(3),
		LocalTokens:    c.upTo(text),
		Hi:             uint32(chunks),
	}
	if c.rand.IntN(3) == 0 {
		r.ResumeTokens = 0
	}
	if c.rand.IntN(3) == 0 {
		r.JunctionTokens = 0
	}
	if c.rand.IntN(2) == 0 {
		r.LocalTokens = 0
	}
	r.BoundTokens = r.LocalTokens + c.upTo(text-r.LocalTokens)
	if c.rand.IntN(20) == 0 { // far beyond what is asked for
		r.PromptTokens, r.StoredTokens, r.ResumeTokens = 1<<20, 1<<20, 1<<20-c.upTo(100)
	}
	return r
}

// producer returns r as Reach sees it, over a drawn range.
func (c *checker) producer(r abi.Round) abi.Round {
	r.LocalTokens, r.BoundTokens = 0, 0
	if c.isSpec() {
		r.ResidentTokens, r.Offers = 0, 0
	}
	if c.rand.IntN(2) == 0 {
		r.Lo = uint32(c.upTo(uint64(r.Hi)))
	}
	return r
}

// consumer returns r as Scan sees it.
func (c *checker) consumer(r abi.Round) abi.Round {
	r.ResumeTokens, r.ResidentTokens, r.Offers = 0, 0, 0
	r.Lo = uint32(r.LocalTokens / r.ChunkTokens)
	r.Hi = uint32((r.BoundTokens + r.ChunkTokens - 1) / r.ChunkTokens)
	if r.Hi < r.Lo {
		r.Hi = r.Lo
	}
	return r
}

// drawTable draws the lookup states of n chunks: mostly long runs, as tiers answer.
func (c *checker) drawTable(n int) abi.States {
	t := abi.NewStates(n)
	for i := 0; i < n; {
		end := i + 1
		if c.rand.IntN(2) == 0 {
			end += c.rand.IntN(n)
		}
		s := abi.State(c.rand.IntN(4))
		if c.rand.IntN(3) == 0 {
			s = abi.Hit
		}
		t.Fill(i, min(end, n), s)
		i = end
	}
	return t
}

// swap returns t with every state a turned into b.
func swap(t abi.States, n int, a, b abi.State) abi.States {
	u := append(abi.States(nil), t...)
	for i := t.First(1<<a, 0, n); i < n; i = t.First(1<<a, i+1, n) {
		u.Put(i, b)
	}
	return u
}

// drawRow draws n bits as a row, lowest chunk first.
func drawRow(b abi.Bitmap, n int) string {
	row := make([]byte, n)
	for i := range row {
		row[i] = '.'
		if b.Get(i) {
			row[i] = '#'
		}
	}
	return "[" + string(row) + "]"
}

// describe names the fields of r that are not 0.
func describe(r *abi.Round) string {
	s := fmt.Sprintf("chunks %d to %d, block=%d chunk=%d", r.Lo, r.Hi, r.BlockTokens, r.ChunkTokens)
	for _, f := range []struct {
		name  string
		value uint64
	}{
		{"prompt", r.PromptTokens}, {"stored", r.StoredTokens}, {"resume", r.ResumeTokens}, {"align", r.AlignTokens},
		{"junction", r.JunctionTokens}, {"resident", r.ResidentTokens}, {"offers", r.Offers},
		{"local", r.LocalTokens}, {"bound", r.BoundTokens},
	} {
		if f.value != 0 {
			s += fmt.Sprintf(" %s=%d", f.name, f.value)
		}
	}
	return s
}
