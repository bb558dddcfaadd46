package vllm

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
)

var producers = []Config{
	producerLeg(RevA, full(16), swa(4, 8)), producerLeg(RevA, full(64), eagle(swa(16, 48))),
	producerLeg(RevA, full(64), chunked(16, 32)), producerLeg(RevA, full(64), mamba(MambaAll, 16)),
	producerLeg(RevB, full(16), swa(4, 8)), dense(producerLeg(RevB, full(16), swa(4, 8))),
	dense(producerLeg(RevB, full(64), eagle(swa(16, 17)))), producerLeg(RevB, full(64), chunked(16, 32)),
	dense(producerLeg(RevB, swa(8, 9), swa(4, 20))), producerLeg(RevB, full(64), mamba(MambaAll, 16)),
}

// drawSteps draws ends of steps up to end.
func drawSteps(t *rapid.T, end uint64) (ends []uint64) {
	for at := uint64(0); at < end; {
		at = min(end, at+rapid.Uint64Range(1, 50).Draw(t, "step"))
		ends = append(ends, at)
	}
	return ends
}

// The supply of rev B does not depend on how a prompt is split into steps. Rev A takes the
// end of each step for the prompt's: it stores more, never less. Each key is passed on once.
func TestSchedule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.SampledFrom(producers).Draw(t, "config")
		c.BlocksPerChunk = rapid.Uint64Range(1, 3).Draw(t, "blocks per chunk")
		if c.RetentionTokens.Set && c.RetentionTokens.Tokens == 0 && rapid.Bool().Draw(t, "interval") {
			c.RetentionTokens = Some(c.BlocksPerChunk * 96)
		}
		r, err := New(c)
		require.NoError(t, err)
		prompt := rapid.Uint64Range(1, 300).Draw(t, "prompt")
		whole, err := r.Supply(Case{PromptTokens: prompt})
		require.NoError(t, err)
		p, err := r.Produce(Request{PromptTokens: prompt, Reused: rapid.Bool().Draw(t, "reused")})
		require.NoError(t, err)
		seen := map[Key]bool{}
		once := func(keys []Key, err error) {
			require.NoError(t, err)
			for _, k := range keys {
				require.False(t, seen[k], "%v twice", k)
				seen[k] = true
			}
		}
		for _, end := range drawSteps(t, prompt) {
			once(p.Step(end))
		}
		once(p.Finish(prompt))
		split := p.Supply()
		for i := range whole {
			if c.Revision == RevB {
				require.Equal(t, Ranges(whole[i]), Ranges(split[i]), "group %d", i)
			}
			require.Equal(t, "{}", Ranges(minus(whole[i], split[i])), "group %d", i)
		}
	})
}

// A request that is aborted at a token, with tails kept densely, has supplied what a prompt
// of that many tokens would have: rev B looks at the open segment again.
func TestAbort(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := dense(rapid.SampledFrom(producers).Draw(t, "config"))
		c.BlocksPerChunk = rapid.Uint64Range(1, 3).Draw(t, "blocks per chunk")
		r, err := New(c)
		require.NoError(t, err)
		prompt := rapid.Uint64Range(1, 300).Draw(t, "prompt")
		p, err := r.Produce(Request{PromptTokens: prompt})
		require.NoError(t, err)
		at := rapid.Uint64Range(1, prompt).Draw(t, "abort at")
		for _, end := range drawSteps(t, at) {
			_, err := p.Step(end)
			require.NoError(t, err)
		}
		before := ranges(p.Supply())
		_, err = p.Abort()
		require.NoError(t, err)
		whole, err := r.Supply(Case{PromptTokens: at})
		require.NoError(t, err)
		for i, s := range p.Supply() {
			require.Equal(t, "{}", Ranges(minus(whole[i], s)), "group %d, before the abort %s", i, before)
		}
		_, err = p.Step(at + 1)
		require.ErrorContains(t, err, "the request is over")
	})
}

// Rev A submits chunks at each step's end that the prompt's end does not need.
func TestFrontierIsNoHorizon(t *testing.T) {
	for rev, extra := range map[Revision]int{RevA: 4, RevB: 0} {
		r := mustNew(t, dense(producerLeg(rev, full(256), swa(4, 8))))
		whole, err := r.Supply(Case{PromptTokens: 2400})
		require.NoError(t, err)
		split, err := r.Supply(Case{PromptTokens: 2400, StepTokens: 800})
		require.NoError(t, err)
		require.Equal(t, extra, split[1].Count()-whole[1].Count(), rev)
	}
}

// Generated tokens are stored only when the engine is told to. Rev A then counts the last
// sampled token, which was never computed; rev B does not.
func TestGenerated(t *testing.T) {
	for rev, want := range map[Revision]string{RevA: "{0-2}", RevB: "{0-1}"} {
		c := producerLeg(rev, full(16))
		k := Case{PromptTokens: 33, GeneratedTokens: 15}
		sets, err := mustNew(t, c).Supply(k)
		require.NoError(t, err)
		require.Equal(t, "{0-1}", ranges(sets))
		c.PromptOnly = false
		sets, err = mustNew(t, c).Supply(k)
		require.NoError(t, err)
		require.Equal(t, want, ranges(sets), rev)
	}
}

// A text that goes on behind the prompt moves the last tail: rev B with dense tails keeps
// the one at the text's end too.
func TestTextsEnd(t *testing.T) {
	c := dense(producerLeg(RevB, full(64), swa(4, 8)))
	c.PromptOnly = false
	sets, err := mustNew(t, c).Supply(Case{PromptTokens: 72, GeneratedTokens: 21})
	require.NoError(t, err)
	// 92 tokens are computed, 23 chunks: tails before 64, before the prompt's end at 72,
	// and before the end at 92, which the passes while decoding had left out.
	require.Equal(t, "{0} {14-17, 21-22}", ranges(sets))

	// What no pass had room for is offered at the end, by the end's own tails.
	p, err := mustNew(t, c).Produce(Request{PromptTokens: 72})
	require.NoError(t, err)
	p.NoRoom = true
	for _, end := range []uint64{72, 92} {
		keys, err := p.Step(end)
		require.NoError(t, err)
		require.Empty(t, keys)
	}
	p.NoRoom = false
	_, err = p.Finish(93)
	require.NoError(t, err)
	require.Equal(t, "{0} {14-15, 21-22}", ranges(p.Supply()))

	// Wherever the text ends, that tail is there, and no key is passed on twice.
	for text := uint64(74); text < 140; text++ {
		p, err := mustNew(t, c).Produce(Request{PromptTokens: 72})
		require.NoError(t, err)
		seen := map[Key]bool{}
		once := func(keys []Key, err error) {
			require.NoError(t, err)
			for _, k := range keys {
				require.False(t, seen[k], "%v twice, text of %d", k, text)
				seen[k] = true
			}
		}
		once(p.Step(72))
		once(p.Step(73))
		if text > 74 {
			once(p.Step(text - 1))
		}
		once(p.Finish(text))
		for chunk := (text - 1) / 4; chunk > (text-1)/4-2; chunk-- {
			require.True(t, seen[Key{1, int(chunk - 1)}], "chunk %d, text of %d", chunk-1, text)
		}
	}
}

// The stock of a group is what is allocated, also while decoding.
func TestHeldBackWhileDecoding(t *testing.T) {
	c := producerLeg(RevB, eagle(full(4)))
	c.PromptOnly = false
	p, err := mustNew(t, c).Produce(Request{PromptTokens: 8})
	require.NoError(t, err)
	for _, s := range []struct {
		end  uint64
		want []Key
	}{{8, []Key{{0, 0}, {0, 1}}}, {12, nil}, {15, nil}, {16, []Key{{0, 2}}}} {
		keys, err := p.Step(s.end)
		require.NoError(t, err)
		require.Equal(t, s.want, keys, "step to %d", s.end)
	}
	keys, err := p.Finish(17)
	require.NoError(t, err)
	require.Equal(t, []Key{{0, 3}}, keys, "nothing can be rewritten any more")
}

// Blocks that a window group gave back while the primary had no room are lost when they
// were handed out again.
func TestReusedBlocks(t *testing.T) {
	for reused, want := range map[bool]string{false: "{0-1} {2-3, 6-7}", true: "{0-1} {6-7}"} {
		r := mustNew(t, dense(producerLeg(RevB, full(16), swa(4, 8))))
		p, err := r.Produce(Request{PromptTokens: 32, Reused: reused})
		require.NoError(t, err)
		p.NoRoom = true
		for _, end := range []uint64{16, 24, 28} {
			keys, err := p.Step(end)
			require.NoError(t, err)
			require.Empty(t, keys)
		}
		p.NoRoom = false
		_, err = p.Step(32)
		require.NoError(t, err)
		require.Equal(t, want, ranges(p.Supply()))
	}
}

// A junction that is known to be shared keeps its own tail.
func TestJunction(t *testing.T) {
	sets, err := mustNew(t, producerLeg(RevB, full(16), swa(4, 8))).Supply(Case{PromptTokens: 70, JunctionTokens: 33})
	require.NoError(t, err)
	require.Equal(t, "{0-3} {6-7, 14-15}", ranges(sets))
}

// A Mamba group in mode align has states where steps end.
func TestMambaAlign(t *testing.T) {
	for _, rev := range []Revision{RevA, RevB} {
		r := mustNew(t, producerLeg(rev, full(16), mamba(MambaAlign, 16)))
		require.Equal(t, []uint64{96, 100}, r.StepEnds(100, 0, 0))
		require.Equal(t, []uint64{32, 64, 96, 100}, r.StepEnds(100, 0, 40))
		require.Equal(t, []uint64{7, 14, 16, 23, 30, 32, 33}, r.StepEnds(33, 0, 7))
		sets, err := r.Supply(Case{PromptTokens: 100, StepTokens: 40})
		require.NoError(t, err)
		require.Equal(t, "{0-5} {1, 3, 5}", ranges(sets), rev)
		sets, err = r.Supply(Case{PromptTokens: 100, StepTokens: 40, MaxOffloadTokens: Some(64)})
		require.NoError(t, err)
		require.Equal(t, "{0-3} {1, 3}", ranges(sets), rev)
		// With drafters the last stop is one block earlier.
		r = mustNew(t, producerLeg(rev, eagle(full(16)), mamba(MambaAlign, 16)))
		require.Equal(t, []uint64{80, 100}, r.StepEnds(100, 0, 0))
	}
	sets, err := mustNew(t, producerLeg(RevA, full(16), mamba(MambaNone, 16))).Supply(Case{PromptTokens: 100})
	require.NoError(t, err)
	require.Equal(t, "{0-5} {}", ranges(sets))
}

// What a warm start leaves on the GPU.
func TestWarmBlocks(t *testing.T) {
	for _, c := range []struct {
		group Group
		warm  Warm
		want  string
	}{
		{swa(4, 8), Warm{GPUTokens: 32}, "{0-5}"},
		{swa(4, 9), Warm{GPUTokens: 32}, "{0-5}"},
		{swa(4, 10), Warm{GPUTokens: 32}, "{0-4}"},
		{chunked(4, 16), Warm{GPUTokens: 32}, "{0-7}"},
		{chunked(4, 16), Warm{GPUTokens: 28}, "{0-3}"},
		{mamba(MambaAll, 4), Warm{GPUTokens: 32}, "{0-6}"},
		{full(4), Warm{GPUTokens: 32}, "{}"},
		{swa(4, 8), Warm{LoadedTokens: 33}, "{0-5}"},
		{Group{Kind: SlidingWindow, BlockTokens: 4, WindowTokens: 8, ExtraTokens: 9}, Warm{LoadedTokens: 33}, "{0-3}"},
		{swa(4, 8), Warm{GPUTokens: 16, LoadedTokens: 20}, "{0-2}"},
		{swa(4, 8), Warm{GPUTokens: 32, NullBelow: map[int]uint64{0: 2}}, "{0-1}"},
	} {
		p, err := mustNew(t, producerLeg(RevA, c.group)).Produce(Request{PromptTokens: 64, Warm: c.warm})
		require.NoError(t, err)
		require.Equal(t, c.want, Ranges(p.groups[0].null), "%s, %+v", c.group, c.warm)
	}
}

// A group that takes no part in prefix caching keeps its index and is left out.
func TestExcludedGroup(t *testing.T) {
	ring := Group{Kind: KpoolTail, BlockTokens: 3}
	c := producerLeg(RevB, ring, full(16), swa(4, 8))
	r := mustNew(t, c)
	require.False(t, r.Offloaded(0))
	m := meet(t, c, Case{PromptTokens: 70})
	require.Equal(t, "{} {0-3} {14-15}", ranges(m.Groups))
	require.Equal(t, "{} {0-3} {14-15}", ranges(m.Supply))
	require.Equal(t, "{} {} {}", ranges(m.Missing))
}

func TestProducerRefuses(t *testing.T) {
	r := mustNew(t, producerLeg(RevA, full(16)))
	for _, c := range []struct {
		request Request
		want    string
	}{
		{Request{}, "vllm: a prompt of 0 tokens; it must be 1 to 2147483648"},
		{Request{PromptTokens: abi.MaxTokens + 1}, "vllm: a prompt of 2147483649 tokens; it must be 1 to 2147483648"},
		{Request{PromptTokens: 32, Warm: Warm{GPUTokens: 32}}, "vllm: a prefix of 32 tokens is there, but the prompt has 32 and its last token is always computed"},
		{Request{PromptTokens: 32, JunctionTokens: 33}, "vllm: junction at 33 tokens, beyond the prompt of 32"},
		{Request{PromptTokens: 32, Warm: Warm{GPUTokens: 17}}, "vllm: prefix on the GPU of 17 tokens ends inside a block of 16 tokens of group 0"},
	} {
		_, err := r.Produce(c.request)
		require.EqualError(t, err, c.want)
	}
	p, err := r.Produce(Request{PromptTokens: 32})
	require.NoError(t, err)
	_, err = p.Finish(32)
	require.EqualError(t, err, "vllm: finish with 32 tokens, but 0 of a prompt of 32 are computed (over: false); a text ends at most one token behind what is computed")
	_, err = p.Step(0)
	require.EqualError(t, err, "vllm: step to token 0, but 0 are computed; a step computes at least one, up to 2147483648 in all")
}
