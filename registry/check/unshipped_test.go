package check_test

import (
	"fmt"
	"math/rand/v2"

	"github.com/tierd/tierd/abi"
)

// An unshipped is a rule of no known attention: going on from token n reads the tokens
// [first[n], n), where first is drawn and never falls. Its supply and its demand are built
// from that need alone, so they agree; no mask can confirm the need.
type unshipped struct{ first []uint64 }

// drawUnshipped draws a rule for texts of less than 64 tokens.
func drawUnshipped(r *rand.Rand) *unshipped {
	u := &unshipped{first: []uint64{0}}
	for n := uint64(1); n < 64; n++ {
		first := u.first[n-1]
		if r.IntN(2) == 0 {
			first += r.Uint64N(6)
		}
		u.first = append(u.first, min(first, n-1)) // at least the token before
	}
	return u
}

func (u *unshipped) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "unshipped", Version: "1", Kind: abi.KindSpec, Mask: abi.MaskUnverified}
}

func (u *unshipped) String() string { return fmt.Sprint(u.first) }

func (u *unshipped) Open([]uint64) (abi.Rule, error) { return u, nil }

// tail returns the chunks that going on from n reads.
func (u *unshipped) tail(n, chunk uint64) (s set) {
	for k := u.first[n]; k < n; k++ {
		s.add(k / chunk)
	}
	return s
}

func (u *unshipped) Reach(r abi.Round, out abi.Bitmap) error {
	s := u.tail(r.ResumeTokens, r.ChunkTokens)
	if r.JunctionTokens <= r.StoredTokens {
		s |= u.tail(r.JunctionTokens, r.ChunkTokens)
	}
	for n := r.AlignTokens; n > 0 && n <= r.StoredTokens; n += r.AlignTokens {
		s |= u.tail(n, r.ChunkTokens)
	}
	for c := r.Lo; c < r.Hi; c++ {
		if s.has(uint64(c)) && uint64(c+1)*r.ChunkTokens <= r.StoredTokens {
			out.Set(int(c - r.Lo))
		}
	}
	return nil
}

func (u *unshipped) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	for end := r.Chunks(); end > 0; end-- {
		s := u.tail(min(r.BoundTokens, (uint64(r.Lo)+uint64(end))*r.ChunkTokens), r.ChunkTokens).from(uint64(r.Lo)) >> r.Lo
		missing, unknown := false, set(0)
		for i := range end {
			if s.has(uint64(i)) {
				missing = missing || states.At(i) == abi.Miss
				if states.At(i) == abi.Retry {
					unknown.add(uint64(i))
				}
			}
		}
		switch {
		case missing:
			continue
		case unknown != 0:
			demand[0] = uint64(unknown)
			return abi.Span{Deferred: true}, nil
		}
		demand[0] = uint64(s)
		return abi.Span{Usable: uint32(end)}, nil
	}
	return abi.Span{}, nil
}

func (u *unshipped) Need(r abi.Round, out abi.Bitmap) error {
	if len(out) > 0 {
		out[0] = uint64(u.tail(r.ResumeTokens, r.ChunkTokens))
	}
	return nil
}
