package plan_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
	"pgregory.net/rapid"
)

// TestForeseen: what a machine foresees agrees with what it does in any steps: a promised
// chunk is offered by the prompt's end, one that is neither promised nor open never is, and
// no policy keeps out what is promised.
func TestForeseen(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		model, _ := drawModel(rt)
		p, err := plan.New(model)
		require.NoError(rt, err)
		prompt := rapid.Uint64Range(1, 120).Draw(rt, "prompt")
		text := prompt + rapid.Uint64Range(0, 40).Draw(rt, "decoded")
		m, err := p.Produce(plan.Start{PromptTokens: prompt, JunctionTokens: rapid.Uint64Range(0, prompt).Draw(rt, "junction")})
		require.NoError(rt, err)
		promised, open, admitted, err := m.Foreseen()
		require.NoError(rt, err)
		in := func(sets []abi.Bitmap, r plan.Ref) bool {
			return int(r.Chunk) < len(sets[r.Group])*64 && sets[r.Group].Get(int(r.Chunk))
		}
		offered := map[plan.Ref]bool{}
		take := func(fx plan.Effects, err error) {
			require.NoError(rt, err)
			for _, r := range fx.Offers {
				offered[r] = true
				if within := (uint64(r.Chunk)+1)*model.Groups[r.Group].ChunkTokens <= prompt; within {
					require.True(rt, in(promised, r) || in(open, r), "%v is offered and was not foreseen", r)
				}
			}
		}
		take(m.Native(0))
		for n := uint64(0); n < text; {
			most := text
			if n < prompt {
				most = prompt
			}
			n = min(most, n+rapid.Uint64Range(1, 30).Draw(rt, "step"))
			take(m.Step(n))
			if n != prompt {
				continue
			}
			for g := range promised {
				for c := promised[g].Next(0); c >= 0; c = promised[g].Next(c + 1) {
					r := plan.Ref{Group: g, Chunk: uint32(c)}
					require.True(rt, offered[r], "%v was promised and is not there at the prompt's end", r)
					require.True(rt, in(admitted, r))
					require.False(rt, in(open, r))
				}
			}
		}
		take(m.Finish(text))
	})
}
