package check

import (
	"errors"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
)

// A key names the tokens of a prefix and nothing else, so the KV under it must not depend
// on where the prompt ended. It does when a query reads other tokens because of that:
// what it computed is then not what the same token has inside a longer prompt.

// contentChunks bounds the chunks of a text that are judged, from the prompt's last whole
// one on: the first that are decoded, where the mask has just changed, and as many at the
// text's end.
const contentChunks = 8

// content judges that what is stored of a prompt and of the text after it is what a prompt
// as long as the text would have stored.
func (w *worker) content(prompt uint64) (*Counterexample, error) {
	draw := rng(w.options.Seed ^ prompt<<3)
	for _, text := range w.contentTexts(prompt, &draw) {
		supply, err := w.finalSupply(prompt, text)
		if err != nil {
			return w.broken("content", prompt, err)
		}
		for g := range supply {
			ct := w.model().Groups[g].ChunkTokens
			first, end := prompt/ct-min(prompt/ct, 1), text/ct
			for c := first; c < end; c++ {
				if c == first+contentChunks && end > c+contentChunks {
					c = end - contentChunks
				}
				if c >= uint64(len(supply[g]))*64 || !supply[g].Get(int(c)) {
					continue
				}
				for _, n := range [...]uint64{c * ct, (c+1)*ct - 1} {
					if ce, err := w.sameContent(g, prompt, text, n, supply); ce != nil || err != nil {
						return ce, err
					}
				}
			}
		}
	}
	return nil, nil
}

// contentTexts returns the text lengths to judge: a little decoded, and enough that a
// window of any parameter's size has moved on by a whole chunk of any group, or as much of
// that as the domain has.
func (w *worker) contentTexts(prompt uint64, draw *rng) []uint64 {
	texts, most := w.texts(prompt, draw), w.subject.MaxTokens
	ct := uint64(0)
	for g := range w.model().Groups {
		ct = max(ct, w.model().Groups[g].ChunkTokens)
	}
	for g := range w.subject.Groups {
		for _, p := range w.subject.Groups[g].Params {
			if p < most && prompt+p < most {
				texts = append(texts, min(prompt+p+2*ct, most))
			}
		}
	}
	return texts
}

// sameContent judges one token of a stored chunk of group g: the queries of its position
// must read the same, in every group, whether the prompt ended before it or goes on after
// it. In every group, because layers interleave: what a token's KV holds in one layer is
// computed from what its queries read in all layers below, and those may be of any group.
func (w *worker) sameContent(g int, prompt, text, n uint64, supply []abi.Bitmap) (*Counterexample, error) {
	w.count("content")
	groups := w.model().Groups
	for i := range groups {
		h := (g + i) % len(groups) // its own group first
		same, err := w.readsSame(h, h == g, prompt, text, n)
		if err != nil {
			return w.broken("content", prompt, err)
		}
		if same {
			continue
		}
		why := "a chunk is stored whose KV is not what its key names: its queries read less, or more, than they would inside a longer prompt"
		if h != g {
			why = "a chunk is stored whose KV is not what its key names: it is computed from layers of group " + groups[h].Name +
				", whose queries at its tokens read less, or more, than they would inside a longer prompt; keep such chunks out of the store, as the policy prompt-only does"
		}
		wrong := abi.NewBitmap(64 * len(supply[g]))
		wrong.Set(int(n / groups[g].ChunkTokens))
		ce := &Counterexample{PromptTokens: prompt, TextTokens: text}
		return w.fail(ce, "content", g, why, row{"supply", supply}, row{"surplus", at(g, wrong)}), nil
	}
	return nil, nil
}

// readsSame reports whether the query at n in group g reads the same when the prompt ends
// at prompt as when it goes on to the text's end. A mask that depends on the prompt says it
// itself, to the token: what it leaves unread begins at the prompt's end. Of other masks the
// rule is asked, in blocks, when the chunk is its own or no mask confirms what it says.
func (w *worker) readsSame(g int, own bool, prompt, text, n uint64) (bool, error) {
	gr := &w.model().Groups[g]
	switch mask := w.subject.Groups[g].Manifest.Mask; {
	case mask == abi.MaskPromptWindow:
		return n <= prompt || w.reads[g](n, prompt, prompt) == w.reads[g](n, prompt, text+1), nil
	case !own && mask != abi.MaskUnverified:
		return true, nil
	}
	ask := func(prompt uint64) (abi.Bitmap, error) {
		r := abi.Round{
			BlockTokens: gr.BlockTokens, ChunkTokens: gr.BlockTokens, PromptTokens: prompt, StoredTokens: text,
			ResumeTokens: n, AlignTokens: w.model().AlignTokens, Hi: uint32((n + gr.BlockTokens - 1) / gr.BlockTokens),
		}
		set := abi.NewBitmap(r.Chunks())
		err := gr.Rule.Need(r, set)
		if errors.Is(err, abi.ErrNoResume) {
			return nil, nil
		}
		if err != nil {
			err = &plan.RuleError{Group: gr.Name, Func: "need", Round: r, Err: err}
		}
		return set, err
	}
	short, err := ask(prompt)
	if err != nil {
		return false, err
	}
	long, err := ask(text + 1)
	return err == nil && short.Equal(long), err
}
