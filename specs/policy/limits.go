package policy

import "github.com/tierd/tierd/abi"

// tokensMax and offersMax bound the parameters: more tokens than a context has, and more
// offers than anybody waits for.
const (
	tokensMax = 1 << 24
	offersMax = 1 << 20
)

// PromptOnly stores what lies wholly in the prompt and nothing of the generated text: for
// answers that no later prompt repeats.
func PromptOnly() abi.Spec { return plain("prompt-only", promptOnly{}) }

type promptOnly struct{ fetchAll }

func (promptOnly) Reach(r abi.Round, out abi.Bitmap) error {
	admit(&r, r.PromptTokens, out)
	return nil
}

// Cap stores and fetches nothing beyond the first tokens of a sequence. Parameter:
// tokens.
func Cap() abi.Spec {
	return &spec{
		abi.Manifest{Name: "cap", Version: "1.0.0", Kind: abi.KindPolicy, Params: []abi.Param{
			{Name: "tokens", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"},
		}},
		func(p []uint64) abi.Rule { return limit(p[0]) },
	}
}

type limit uint64

func (l limit) Reach(r abi.Round, out abi.Bitmap) error {
	admit(&r, uint64(l), out)
	return nil
}

func (l limit) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	whole := min(uint64(l)/r.ChunkTokens, uint64(r.Hi))
	return abi.Span{Usable: uint32(max(whole, uint64(r.Lo)) - uint64(r.Lo))}, nil
}

// MinReuse stores a prefix only when it was offered before, so that prompts which never
// come back take no room. Parameter: offers, how often. A consumer that does not ask
// first can count on nothing, so such a node serves lookups only.
func MinReuse() abi.Spec {
	return &spec{
		abi.Manifest{Name: "min-reuse", Version: "1.0.0", Kind: abi.KindPolicy, Params: []abi.Param{
			{Name: "offers", Min: 1, Max: offersMax, Required: true, Unit: "offers"},
		}},
		func(p []uint64) abi.Rule { return minReuse{offers: p[0]} },
	}
}

type minReuse struct {
	fetchAll
	offers uint64
}

func (m minReuse) Reach(r abi.Round, out abi.Bitmap) error {
	if r.Offers >= m.offers {
		out.SetRange(0, r.Chunks())
	}
	return nil
}

// MinPull fetches only when more than some tokens can be saved: below that, computing
// them is faster than moving them. Parameter: tokens.
func MinPull() abi.Spec {
	return &spec{
		abi.Manifest{Name: "min-pull", Version: "1.0.0", Kind: abi.KindPolicy, Params: []abi.Param{
			{Name: "tokens", Min: 1, Max: tokensMax, Required: true, Unit: "tokens"},
		}},
		func(p []uint64) abi.Rule { return minPull(p[0]) },
	}
}

type minPull uint64

func (minPull) Reach(r abi.Round, out abi.Bitmap) error {
	out.SetRange(0, r.Chunks())
	return nil
}

func (m minPull) Scan(r abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	if r.BoundTokens-min(r.LocalTokens, r.BoundTokens) <= uint64(m) {
		return abi.Span{}, nil
	}
	return abi.Span{Usable: uint32(r.Chunks())}, nil
}

// admit sets the chunks that end at or before token n.
func admit(r *abi.Round, n uint64, out abi.Bitmap) {
	whole := min(n/r.ChunkTokens, uint64(r.Hi))
	if lo := uint64(r.Lo); whole > lo {
		out.SetRange(0, int(whole-lo))
	}
}
