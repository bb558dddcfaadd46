package check_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

func TestEveryKindIsAccepted(t *testing.T) {
	for name, s := range map[string]check.Subject{
		"sink":                                 subject(300, 48, nil, part{"a", specs.Sink(), []uint64{5, 19}, 4, 2}, full(4, 3)),
		"sink wider than window":               subject(300, 48, nil, part{"a", specs.Sink(), []uint64{60, 2}, 4, 2}, full(4, 3)),
		"chunked":                              subject(300, 48, nil, part{"a", specs.Chunked(), []uint64{48}, 4, 2}, full(4, 3)),
		"chunked alone":                        subject(300, 0, nil, part{"a", specs.Chunked(), []uint64{64}, 16, 1}),
		"latent":                               subject(300, 24, nil, part{"a", specs.Latent(), []uint64{1}, 4, 2}, full(4, 3)),
		"latent of four":                       subject(300, 24, nil, part{"a", specs.Latent(), []uint64{4}, 4, 2}, window(9, 0, 4, 1)),
		"latent of three":                      subject(300, 24, nil, part{"a", specs.Latent(), []uint64{3}, 4, 2}, full(4, 3)),
		"hidden":                               subject(300, 24, nil, part{"a", specs.Hidden(), nil, 4, 2}, full(4, 3)),
		"state, all saved":                     subject(300, 48, nil, part{"a", specs.State(), []uint64{0}, 8, 1}, full(4, 3)),
		"state, saved at stops":                subject(300, 48, nil, part{"a", specs.State(), []uint64{1}, 8, 1}, full(4, 3)),
		"state without aligned":                subject(300, 0, nil, full(4, 4), part{"a", specs.State(), []uint64{1}, 32, 1}),
		"rswa":                                 subject(300, 24, nil, part{"a", specs.RSWA(), []uint64{20}, 4, 2}),
		"rswa and full":                        subject(300, 24, []abi.Spec{policy.PromptOnly()}, part{"a", specs.RSWA(), []uint64{20}, 4, 2}, full(4, 3)),
		"rswa and a window":                    subject(300, 24, []abi.Spec{policy.PromptOnly()}, window(9, 0, 4, 2), part{"a", specs.RSWA(), []uint64{7}, 4, 3}),
		"chunked, runs that end inside chunks": subject(300, 48, nil, part{"a", specs.Chunked(), []uint64{22}, 4, 2}, full(4, 3)),
		"chunked, runs inside one chunk":       subject(300, 0, nil, part{"a", specs.Chunked(), []uint64{5}, 4, 2}),
	} {
		t.Run(name, func(t *testing.T) {
			rep := judge(t, s)
			if rep.Counterexample != nil {
				t.Fatal(rep.Counterexample)
			}
		})
	}
}

// TestWrongKinds: rules of these kinds with one mistake are refused by the relation that the
// mistake belongs to.
func TestWrongKinds(t *testing.T) {
	everything := func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error {
		return must(specs.Full()).Reach(r, out)
	}
	for name, c := range map[string]struct {
		relation string
		spec     abi.Spec
		params   []uint64
		blocks   uint64
	}{
		"rswa stores what it decodes": {"content", &twisted{Spec: specs.RSWA(), reach: everything}, []uint64{20}, 2},
		"rswa stores what it decodes, and needs all": {"content", &twisted{Spec: specs.RSWA(), reach: everything, need: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			return must(specs.Full()).Need(r, out)
		}}, []uint64{20}, 2},
		"state only where resumed": {"caps", &twisted{Spec: specs.State(), reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.AlignTokens = 0
			return in.Reach(r, out)
		}}, []uint64{1}, 1},
		"state resumed inside a chunk": {"needs", &twisted{Spec: specs.State(), scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			return must(specs.Full()).Scan(r, s, d)
		}}, []uint64{0}, 1},
		"state is taken for attention": {"needs", &twisted{Spec: specs.State(), need: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			return must(specs.Full()).Need(r, out)
		}}, []uint64{0}, 1},
		"latent resumed inside a latent": {"needs", &twisted{Spec: specs.Latent(), scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			return must(specs.Full()).Scan(r, s, d)
		}}, []uint64{4}, 2},
		"latent resumed inside a latent, and Need agrees": {"needs", &twisted{Spec: specs.Latent(), scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			return must(specs.Full()).Scan(r, s, d)
		}, need: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			return must(specs.Full()).Need(r, out)
		}}, []uint64{4}, 2},
		"state resumed inside a chunk, and Need agrees": {"needs", &twisted{Spec: specs.State(), scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			at := s.Last(abi.Here|abi.Unknown, 0, r.Chunks())
			if at < 0 {
				return abi.Span{}, nil
			}
			d.Set(at)
			return abi.Span{Usable: uint32(at + 1), Deferred: s.At(at) == abi.Retry}, nil
		}, need: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			if r.ResumeTokens > 0 {
				out.Set(int((r.ResumeTokens - 1) / r.ChunkTokens))
			}
			return nil
		}}, []uint64{0}, 1},
		"sink is not stored": {"covers", &twisted{Spec: specs.Sink(), reach: func(_ abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			return must(specs.Window(), 9, 0).Reach(r, out)
		}}, []uint64{5, 9}, 2},
		"sink is not fetched": {"needs", &twisted{Spec: specs.Sink(), scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			return must(specs.Window(), 9, 0).Scan(r, s, d)
		}}, []uint64{5, 9}, 2},
		"chunked is taken for a window": {"needs", &twisted{Spec: specs.Chunked(), scan: func(_ abi.SpecRule, r abi.Round, s abi.States, d abi.Bitmap) (abi.Span, error) {
			return must(specs.Window(), 9, 0).Scan(r, s, d)
		}}, []uint64{24}, 2},
		"chunked stores its last run only": {"caps", &twisted{Spec: specs.Chunked(), reach: func(in abi.SpecRule, r abi.Round, out abi.Bitmap) error {
			r.AlignTokens = 0
			return in.Reach(r, out)
		}}, []uint64{100}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			rep := judge(t, subject(300, 48, nil, part{"a", c.spec, c.params, 8, c.blocks}, full(4, 4)))
			require.NotNil(t, rep.Counterexample)
			require.Equal(t, c.relation, rep.Counterexample.Relation, rep.Counterexample.String())
			require.Equal(t, "a", rep.Counterexample.Group)
			golden(t, "kind-"+name, rep.Counterexample.String())
		})
	}
}

// unmasked is a spec whose manifest names no mask.
type unmasked struct{ abi.Spec }

func (u unmasked) Manifest() *abi.Manifest {
	m := *u.Spec.Manifest()
	m.Mask, m.MaskArgs = abi.MaskUnverified, nil
	return &m
}

// TestContentOfAHybrid: beside a group that looks at the prompt's end, what is decoded is
// not what its key names in any group.
func TestContentOfAHybrid(t *testing.T) {
	for name, c := range map[string]struct {
		with part
		rswa abi.Spec
	}{
		"full":           {full(4, 3), specs.RSWA()},
		"window":         {window(9, 0, 4, 3), specs.RSWA()},
		"full, unmasked": {full(4, 3), unmasked{specs.RSWA()}},
	} {
		t.Run(name, func(t *testing.T) {
			with := c.with
			rep := judge(t, subject(300, 48, nil, with, part{"a", c.rswa, []uint64{20}, 8, 2}))
			require.NotNil(t, rep.Counterexample)
			require.Equal(t, "content", rep.Counterexample.Relation, rep.Counterexample.String())
			require.Equal(t, with.name, rep.Counterexample.Group)
			golden(t, "kind-rswa-beside-"+name, rep.Counterexample.String())
		})
	}
}

func must(s abi.Spec, params ...uint64) abi.SpecRule {
	r, err := s.Open(params)
	if err != nil {
		panic(err)
	}
	return r.(abi.SpecRule)
}
