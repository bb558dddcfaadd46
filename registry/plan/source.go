package plan

import "github.com/tierd/tierd/abi"

// eagerSource is the table of a prompt whose producer has not been asked: a chunk is a
// Hit when it is complete within what the producer stores and every policy admits it
// on a producer whose tier holds nothing. A chunk that the own tier knows is what the
// own tier says.
type eagerSource struct {
	p      *Planner
	admit  []abi.Bitmap // per group: complete and admitted
	chunks []uint64     // per group: how many of admit mean anything
	text   uint64       // what admit was computed for; 0 = nothing yet
	prompt uint64
	own    []abi.States // by absolute chunk number; nil = the own tier holds nothing
}

// prepare computes the admitted chunks for a prefix, unless it is the one it has.
func (s *eagerSource) prepare(prompt, text uint64) error {
	if s.text == text && s.prompt == prompt {
		return nil
	}
	p := s.p
	s.text = 0
	s.chunks = s.chunks[:0]
	for g := range p.m.Groups {
		st := p.stored(g, prompt, text)
		n := st / p.m.Groups[g].ChunkTokens
		s.chunks = append(s.chunks, n)
		admitted := bitmap(&s.admit[g], int(n))
		admitted.SetRange(0, int(n))
		if err := p.admit(g, prompt, st, 0, 0, admitted); err != nil {
			return err
		}
	}
	s.prompt, s.text = prompt, text
	return nil
}

func (s *eagerSource) States(g int, lo, hi uint32, out abi.States) error {
	n := int(hi - lo)
	end := int(min(uint64(hi), max(s.chunks[g], uint64(lo)))) - int(lo)
	if len(s.p.m.Policies) == 0 {
		out.Fill(0, end, abi.Hit)
		out.Fill(end, n, abi.Miss)
	} else {
		out.Fill(0, n, abi.Miss)
		// Runs of admitted chunks, a word at a time.
		a := s.admit[g]
		for i := a.Next(int(lo)); i >= 0 && i < int(lo)+end; {
			j := a.NextUnset(i, int(lo)+end)
			out.Fill(i-int(lo), j-int(lo), abi.Hit)
			i = a.Next(j)
		}
	}
	if s.own != nil {
		own := s.own[g]
		known := min(len(own)*32, int(hi))
		for i := own.First(abi.Here, int(min(uint32(known), lo)), known); i < known; i = own.First(abi.Here, i+1, known) {
			if uint64(i) < s.chunks[g] { // an incomplete chunk of this prompt has no key
				out.Put(i-int(lo), own.At(i))
			}
		}
	}
	return nil
}

// admit removes from set the chunks of group g that some policy does not let into the
// store path. set holds absolute chunk numbers, from 0.
func (p *Planner) admit(g int, prompt, stored, resident, offers uint64, set abi.Bitmap) error {
	for i := range p.m.Policies {
		r := p.round(g, prompt, stored)
		r.ResidentTokens, r.Offers = resident, offers
		r.Hi = uint32(stored / r.ChunkTokens)
		out := bitmap(&p.span, r.Chunks())
		if err := p.m.Policies[i].Rule.Reach(r, out); err != nil {
			return &RuleError{"policy " + p.m.Policies[i].Name, "reach", r, err}
		}
		set.And(out)
	}
	return nil
}

// A tableSource reads tables of absolute chunk numbers. In optimist mode what is
// unknown counts as a Hit; in final mode as a Miss. Chunks beyond a table are Misses.
type tableSource struct {
	tables  []abi.States
	chunks  []uint64 // complete chunks of the prompt, per group
	unknown abi.State
}

func (s *tableSource) States(g int, lo, hi uint32, out abi.States) error {
	t := s.tables[g]
	n := int(min(uint64(hi), s.chunks[g], uint64(len(t))*32))
	copyStates(out, t, int(lo), n)
	if n < int(hi) {
		out.Fill(max(n, int(lo))-int(lo), int(hi-lo), abi.Miss)
	}
	if s.unknown != abi.Retry {
		end := max(n, int(lo)) - int(lo)
		for i := out.First(abi.Unknown, 0, end); i < end; i = out.First(abi.Unknown, i+1, end) {
			out.Put(i, s.unknown)
		}
	}
	return nil
}

// copyStates copies the entries lo <= i < hi of src to the front of dst.
func copyStates(dst, src abi.States, lo, hi int) {
	if hi <= lo {
		return
	}
	word, sh := lo>>5, uint(lo)&31*2
	for i := 0; i < abi.StatesWords(hi-lo); i++ {
		w := src[word+i] >> sh
		if sh != 0 && word+i+1 < len(src) {
			w |= src[word+i+1] << (64 - sh)
		}
		dst[i] = w
	}
}
