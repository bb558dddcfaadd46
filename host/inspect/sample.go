package inspect

import (
	"errors"

	"github.com/tierd/tierd/abi"
)

// The sample round; see the package comment.
const (
	sampleChunkTokens  = 16
	samplePromptTokens = 131072
	sampleAlignTokens  = 4096
	sampleParam        = 128
)

// A Sample is the fuel of the sample calls.
type Sample struct {
	Params       map[string]uint64 `json:"params"`
	ChunkTokens  uint64            `json:"chunk_tokens"`
	PromptTokens uint64            `json:"prompt_tokens"`
	AlignTokens  uint64            `json:"align_tokens"`
	Calls        []Call            `json:"calls"`
}

// A Call is one sample call.
type Call struct {
	// Func is reach, scan of hits, scan of misses or need.
	Func string `json:"func"`
	Fuel uint64 `json:"fuel"`
	// Error is why there is no fuel: the call failed.
	Error string `json:"error,omitempty"`
}

// sampleValue chooses a parameter's value.
func sampleValue(p *abi.Param) uint64 {
	if !p.Required {
		return p.Default
	}
	if len(p.Enum) > 0 {
		return 0
	}
	return min(max(sampleParam, p.Min), p.Max)
}

// sampleOf makes the sample calls, or returns nil where fuel is not counted.
func sampleOf(spec abi.Spec) *Sample {
	s := &Sample{Params: map[string]uint64{}, ChunkTokens: sampleChunkTokens, PromptTokens: samplePromptTokens, AlignTokens: sampleAlignTokens}
	m := spec.Manifest()
	var values []uint64
	for i := range m.Params {
		values = append(values, sampleValue(&m.Params[i]))
		s.Params[m.Params[i].Name] = values[i]
	}
	rule, err := spec.Open(values)
	if err != nil {
		s.Calls = []Call{{Func: "open", Error: err.Error()}}
		return s
	}
	pinned, ok := rule.(interface{ Pin() (abi.Rule, func()) })
	if !ok {
		return nil
	}
	rule, release := pinned.Pin()
	defer release()
	meter, ok := rule.(interface{ Fuel() uint64 })
	if !ok {
		return nil
	}
	s.calls(rule, meter.Fuel)
	return s
}

func (s *Sample) calls(rule abi.Rule, fuel func() uint64) {
	const n = samplePromptTokens / sampleChunkTokens
	both := abi.Round{BlockTokens: sampleChunkTokens, ChunkTokens: sampleChunkTokens, PromptTokens: samplePromptTokens,
		StoredTokens: samplePromptTokens, AlignTokens: sampleAlignTokens, Hi: n}
	producer, consumer := both, both
	producer.ResumeTokens = samplePromptTokens - 1
	consumer.BoundTokens = samplePromptTokens - 1
	hits, misses := abi.NewStates(n), abi.NewStates(n)
	hits.Fill(0, n, abi.Hit)
	call := func(name string, f func(out abi.Bitmap) error) {
		c := Call{Func: name}
		// The first call may open the rule in its instance and make room for its input; the
		// second is what calls take from then on.
		_ = f(abi.NewBitmap(n))
		if err := f(abi.NewBitmap(n)); err != nil && !errors.Is(err, abi.ErrNoResume) {
			c.Error = err.Error()
		} else {
			c.Fuel = fuel()
		}
		s.Calls = append(s.Calls, c)
	}
	call("reach", func(out abi.Bitmap) error { return rule.Reach(producer, out) })
	call("scan of hits", func(out abi.Bitmap) error { _, err := rule.Scan(consumer, hits, out); return err })
	call("scan of misses", func(out abi.Bitmap) error { _, err := rule.Scan(consumer, misses, out); return err })
	if spec, ok := rule.(abi.SpecRule); ok {
		call("need", func(out abi.Bitmap) error { return spec.Need(producer, out) })
	}
}
