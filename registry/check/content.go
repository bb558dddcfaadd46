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
// window of any parameter's size has moved on.
func (w *worker) contentTexts(prompt uint64, draw *rng) []uint64 {
	texts := w.texts(prompt, draw)
	ct := w.model().Groups[0].ChunkTokens
	for g := range w.subject.Groups {
		for _, p := range w.subject.Groups[g].Params {
			if n := prompt + p + 2*ct; p < w.subject.MaxTokens && n <= w.subject.MaxTokens {
				texts = append(texts, n)
			}
		}
	}
	return texts
}

// sameContent judges one token of a stored chunk: its query must read the same blocks
// whether the prompt ended before it or goes on after it. Where the mask depends on the
// prompt, the mask says what is read, and not what the rule says of it.
func (w *worker) sameContent(g int, prompt, text, n uint64, supply []abi.Bitmap) (*Counterexample, error) {
	gr := &w.model().Groups[g]
	w.count("content")
	ask := func(prompt uint64) (abi.Bitmap, error) {
		r := abi.Round{
			BlockTokens: gr.BlockTokens, ChunkTokens: gr.BlockTokens, PromptTokens: prompt, StoredTokens: text,
			ResumeTokens: n, AlignTokens: w.model().AlignTokens, Hi: uint32((n + gr.BlockTokens - 1) / gr.BlockTokens),
		}
		set := abi.NewBitmap(r.Chunks())
		if w.subject.Groups[g].Manifest.Mask == abi.MaskPromptWindow {
			for b := range uint64(r.Hi) {
				if w.readsAny(g, n, b*gr.BlockTokens, min(n, (b+1)*gr.BlockTokens), prompt) {
					set.Set(int(b))
				}
			}
			return set, nil
		}
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
		return w.broken("content", prompt, err)
	}
	long, err := ask(text + 1)
	if err != nil {
		return w.broken("content", prompt, err)
	}
	if short.Equal(long) {
		return nil, nil
	}
	wrong := abi.NewBitmap(64 * len(supply[g]))
	wrong.Set(int(n / gr.ChunkTokens))
	ce := &Counterexample{PromptTokens: prompt, TextTokens: text}
	return w.fail(ce, "content", g, "a chunk is stored whose KV is not what its key names: its queries read less, or more, than they would inside a longer prompt",
		row{"supply", supply}, row{"surplus", at(g, wrong)}), nil
}
