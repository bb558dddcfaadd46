package plan_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/plan"
	"github.com/tierd/tierd/specs"
)

func stateMachine(t *testing.T, mode uint64, s plan.Start) *plan.Machine {
	p, err := plan.New(plan.Model{AlignTokens: 48, Groups: []plan.Group{
		{Name: "state", Rule: open(t, specs.State(), mode).(abi.SpecRule), BlockTokens: 8, ChunkTokens: 8, State: true},
		{Name: "full", Rule: open(t, specs.Full()).(abi.SpecRule), BlockTokens: 4, ChunkTokens: 12},
	}})
	require.NoError(t, err)
	m, err := p.Produce(s)
	require.NoError(t, err)
	return m
}

// states returns the tokens of the states that effects offer.
func states(fx plan.Effects) (at []uint64) {
	for _, o := range fx.Offers {
		if o.Group == 0 {
			at = append(at, (uint64(o.Chunk)+1)*8)
		}
	}
	return at
}

// A recurrent state exists only where a step ended, so the engine is told where to stop:
// at the resume point, at aligned points, and at what the text's end may ask for.
func TestStatesAreSavedAtStops(t *testing.T) {
	m := stateMachine(t, 1, plan.Start{PromptTokens: 131})
	require.EqualValues(t, 120, m.ResumeTokens())
	require.Equal(t, []uint64{48, 96, 120, 128}, m.StopTokens())
	_, err := m.Native(0)
	require.NoError(t, err)
	fx, err := m.Step(48)
	require.NoError(t, err)
	require.Equal(t, []uint64{48}, states(fx))
	_, err = m.Step(100)
	require.ErrorIs(t, err, plan.ErrStopPassed)
	require.EqualError(t, err, "step from 48 to 100 tokens passes a token of stop_tokens, where a recurrent state must be saved: 96, for group state; end a step there")
	fx, err = m.Step(90) // the error changed nothing; a stop that nobody asked for saves nothing
	require.NoError(t, err)
	require.Empty(t, states(fx))
	for _, n := range []uint64{96, 120} {
		fx, err = m.Step(n)
		require.NoError(t, err)
		require.Equal(t, []uint64{n}, states(fx))
	}
	_, err = m.Step(131) // past a state that only the text's end would have used
	require.NoError(t, err)
}

// An engine that saves every state needs no stops, and what is held needs none either.
func TestStatesWithoutStops(t *testing.T) {
	m := stateMachine(t, 0, plan.Start{PromptTokens: 131})
	require.Empty(t, m.StopTokens())
	_, err := m.Native(0)
	require.NoError(t, err)
	fx, err := m.Step(131)
	require.NoError(t, err)
	require.Len(t, states(fx), 16)

	held := []abi.Bitmap{abi.NewBitmap(16), nil}
	held[0].Set(48/8 - 1)
	m = stateMachine(t, 1, plan.Start{PromptTokens: 131, Held: held})
	require.Equal(t, []uint64{96, 120, 128}, m.StopTokens())
}

func TestAStateChunkIsOneBlock(t *testing.T) {
	_, err := plan.New(plan.Model{Groups: []plan.Group{{Name: "g", BlockTokens: 8, ChunkTokens: 16, State: true}}})
	require.EqualError(t, err, "group g: it keeps a recurrent state, of which a chunk holds one, so a chunk is one block (chunk_blocks: 1), but a chunk has 16 tokens and a block 8")
}
