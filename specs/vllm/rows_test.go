package vllm

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
)

// The known disagreements of stock vLLM, one test each; the table is in the package
// comment.

// holesOf returns the prompts up to limit at which a cold meeting has a hole.
func holesOf(t *testing.T, c Config, k Case, limit uint64) (prompts []uint64) {
	r := mustNew(t, c)
	for k.PromptTokens = 1; k.PromptTokens <= limit; k.PromptTokens++ {
		m, err := r.Meet(k)
		require.NoError(t, err)
		if !empty(m.Missing) {
			prompts = append(prompts, k.PromptTokens)
		}
	}
	return prompts
}

// warmHoles returns "prompt/hit" of the meetings with a hole, over all GPU hits.
func warmHoles(t *testing.T, c Config, limit uint64) (holes []string) {
	r := mustNew(t, c)
	for p := uint64(1); p <= limit; p++ {
		for hit := r.PeriodTokens(); hit < p; hit += r.PeriodTokens() {
			m, err := r.Meet(Case{PromptTokens: p, Warm: Warm{GPUTokens: hit}})
			require.NoError(t, err)
			if !empty(m.Missing) {
				holes = append(holes, fmt.Sprintf("%d/%d", p, hit))
			}
		}
	}
	return holes
}

// Row 1: null blocks of a producer whose GPU holds the prefix.
func TestRow1NullBlock(t *testing.T) {
	gpu := Warm{GPUTokens: 7168}
	c := producerLeg(RevA, swa(128, 128), full(128))
	require.Equal(t, "{} {}", ranges(meet(t, c, Case{PromptTokens: 7200, Warm: gpu}).Missing))
	require.Equal(t, "{0-54} {}", ranges(meet(t, retry(c), Case{PromptTokens: 7200, Warm: gpu}).Missing))

	for _, c := range []Config{
		producerLeg(RevA, full(16), swa(4, 8)), producerLeg(RevA, full(64), swa(16, 48)),
		dense(producerLeg(RevB, full(16), swa(4, 8))), producerLeg(RevA, full(64), mamba(MambaAll, 64)),
	} {
		require.Empty(t, warmHoles(t, c, 300), c.String())
		require.NotEmpty(t, warmHoles(t, retry(c), 300), c.String())
	}
	// Two kinds fail even when a promotion answers pending: the scan wants a chunk more
	// than the GPU's own prefix cache left, and attention needs.
	require.Contains(t, warmHoles(t, producerLeg(RevA, full(64), swa(16, 17)), 300), "65/64")
	require.Contains(t, warmHoles(t, producerLeg(RevA, full(64), chunked(16, 32)), 300), "65/64")
}

// Row 2: what the store path prunes is never asked for.
func TestRow2Pruning(t *testing.T) {
	none := []Config{
		producerLeg(RevA, full(16), swa(4, 8)), producerLeg(RevA, full(64), swa(16, 17)),
		producerLeg(RevA, full(64), swa(16, 48)), producerLeg(RevA, full(64), chunked(16, 32)),
		producerLeg(RevA, full(16), full(32), swa(4, 8)), producerLeg(RevA, swa(128, 128), full(128)),
		dense(producerLeg(RevB, full(16), swa(4, 8))), producerLeg(RevB, full(64), chunked(16, 32)),
	}
	for _, c := range none {
		for _, step := range []uint64{0, 7, 40} {
			require.Empty(t, holesOf(t, c, Case{StepTokens: step}, 300), c.String())
		}
	}
	// Rev A counts segments in chunks, so they drift off the full group's chunks when
	// those are no multiple of the window group's.
	m, err := mustNew(t, producerLeg(RevA, full(40), swa(16, 16))).FirstHole(Case{StepTokens: 7}, 300)
	require.NoError(t, err)
	require.NotNil(t, m)
}

// Row 3: what is held back of a drafter's group while decoding is not asked for.
func TestRow3EagleTail(t *testing.T) {
	for _, rev := range []Revision{RevA, RevB} {
		c := producerLeg(rev, eagle(full(16)))
		c.PromptOnly = false
		for _, generated := range []uint64{1, 2, 15, 16, 17, 33} {
			require.Empty(t, holesOf(t, c, Case{GeneratedTokens: generated}, 100), rev)
		}
	}
	// The prompt's own chunk is held back too when the primary had no room for it
	// before decoding began; rev B gives it out when the request ends.
	for rev, want := range map[Revision]string{RevA: "{0-1}", RevB: "{0-2}"} {
		c := producerLeg(rev, eagle(full(16)))
		c.PromptOnly = false
		p, err := mustNew(t, c).Produce(Request{PromptTokens: 48})
		require.NoError(t, err)
		p.NoRoom = true
		_, err = p.Step(48)
		require.NoError(t, err)
		p.NoRoom = false
		_, err = p.Step(49)
		require.NoError(t, err)
		_, err = p.Finish(50)
		require.NoError(t, err)
		require.Equal(t, want, ranges(p.Supply()), rev)
	}
}

// Row 4, as far as the store path goes: without room until the end, nothing is passed on.
func TestRow4PrimaryFull(t *testing.T) {
	p, err := mustNew(t, producerLeg(RevA, full(16))).Produce(Request{PromptTokens: 48})
	require.NoError(t, err)
	p.NoRoom = true
	keys, err := p.Step(40)
	require.NoError(t, err)
	require.Empty(t, keys)
	p.NoRoom = false
	keys, err = p.Step(48)
	require.NoError(t, err)
	require.Equal(t, []Key{{0, 0}, {0, 1}, {0, 2}}, keys, "the same keys are offered in the next step")

	p, err = mustNew(t, producerLeg(RevA, full(16))).Produce(Request{PromptTokens: 48})
	require.NoError(t, err)
	p.NoRoom = true
	_, err = p.Step(48)
	require.NoError(t, err)
	_, err = p.Finish(48)
	require.NoError(t, err)
	require.Equal(t, "{}", ranges(p.Supply()))
}

// Row 5, as far as the store path goes: another request is writing the same keys.
func TestRow5PendingAtCascade(t *testing.T) {
	pending := Warm{Primary: func(Key) abi.State { return abi.Pending }}
	require.Equal(t, "{0-2}", ranges(meet(t, producerLeg(RevA, full(16)), Case{PromptTokens: 50, Warm: pending}).Missing))
	require.Equal(t, "{}", ranges(meet(t, producerLeg(RevB, full(16)), Case{PromptTokens: 50, Warm: pending}).Missing))
}

// Row 6: the consumer knows neither the producer's cap nor where its prompt ended.
func TestRow6Truncation(t *testing.T) {
	m := meet(t, producerLeg(RevA, full(16), swa(4, 8)), Case{PromptTokens: 64, MaxOffloadTokens: Some(48)})
	require.Equal(t, "{3} {14-15}", ranges(m.Missing))
	for _, rev := range []Revision{RevA, RevB} {
		m = meet(t, producerLeg(rev, full(16)), Case{PromptTokens: 64, GeneratedTokens: 33, TextTokens: 97})
		require.Equal(t, "{4-5}", ranges(m.Missing), rev)
	}
}

// Row 7: the meaning of a lookup's answer decides how much is fetched.
func TestRow7OverDemand(t *testing.T) {
	c := producerLeg(RevA, swa(128, 128), full(128))
	k := Case{PromptTokens: 7200, Warm: Warm{GPUTokens: 7168}}
	m := meet(t, retry(c), k)
	require.Equal(t, 112, m.Groups[0].Count()+m.Groups[1].Count())
	require.Equal(t, 57, m.Supply[0].Count()+m.Supply[1].Count())
	require.Equal(t, 55, m.Missing[0].Count())
	m = meet(t, c, k)
	require.Equal(t, 57, m.Groups[0].Count()+m.Groups[1].Count())

	for _, rev := range []Revision{RevA, RevB} {
		for _, g := range []Group{swa(4, 8), eagle(swa(4, 8)), chunked(4, 8), mamba(MambaAll, 4)} {
			c := producerLeg(rev, full(16), g)
			limit, _ := mustNew(t, c).WindowChunks(1)
			limit += one(g.Eagle)
			widest := 0
			for p := uint64(1); p <= 200; p++ {
				for _, round := range meet(t, c, Case{PromptTokens: p}).Rounds {
					require.LessOrEqual(t, round[1].Count(), limit, "%s, prompt %d", &c, p)
				}
				for _, round := range meet(t, retry(c), Case{PromptTokens: p}).Rounds {
					widest = max(widest, round[1].Count())
				}
			}
			require.Greater(t, widest, limit, c.String())
		}
	}
}

// Row 9: by default rev B keeps only the tail before the last full chunk that ends before
// the prompt's last token; the consumer asks for the tail at the prompt's end.
func TestRow9PromptEnd(t *testing.T) {
	c := producerLeg(RevB, full(16), swa(4, 8))
	m := meet(t, c, Case{PromptTokens: 64})
	require.Equal(t, "{} {14-15}", ranges(m.Missing))
	require.Equal(t, "{0-3} {10-11}", ranges(m.Supply))
	m = meet(t, producerLeg(RevB, swa(128, 128), full(128)), Case{PromptTokens: 7168})
	require.Equal(t, "{55} {0-55}", ranges(m.Groups))
	require.Equal(t, "{54} {0-55}", ranges(m.Supply))
	// One length in 16. A prompt of exactly one full chunk loads nothing: its last token
	// is always computed.
	require.Equal(t, []uint64{32, 48, 64, 80, 96, 112, 128}, holesOf(t, c, Case{}, 128))
	require.Empty(t, holesOf(t, dense(c), Case{}, 320))
}

// Row 10: with a window of 1 modulo the block, rev B's scan wants one chunk more than its
// mask keeps.
func TestRow10WindowOneMore(t *testing.T) {
	c := producerLeg(RevB, full(64), swa(16, 17))
	m := meet(t, c, Case{PromptTokens: 130})
	require.Equal(t, "{0-1} {6-7}", ranges(m.Groups))
	require.Equal(t, "{0-1} {7}", ranges(m.Supply))
	for _, c := range []Config{c, dense(c)} {
		holes := holesOf(t, c, Case{}, 300)
		require.Len(t, holes, 300-64)
		require.Equal(t, uint64(65), holes[0], "every prompt longer than one full chunk")
	}
}

// Row 11: giving up the extra chunk moves the end, and the next round asks for chunks
// that no tail keeps.
func TestRow11EagleSecondRound(t *testing.T) {
	m := meet(t, producerLeg(RevA, eagle(full(16)), eagle(swa(4, 8))), Case{PromptTokens: 64})
	require.Len(t, m.Rounds, 2)
	require.Equal(t, "{} {10-12}", ranges(m.Rounds[1]))
	require.Equal(t, "{} {12}", ranges(m.Missing))
}

// Row 12: the end of a hit is rounded to the state's chunk, which is no segment's tail.
func TestRow12MambaAll(t *testing.T) {
	c := producerLeg(RevA, full(64), mamba(MambaAll, 16))
	m := meet(t, c, Case{PromptTokens: 128})
	require.Equal(t, "{0-1} {6}", ranges(m.Groups))
	require.Equal(t, "{0-1} {3, 7}", ranges(m.Supply))
	require.Equal(t, []uint64{128, 192, 256}, holesOf(t, c, Case{}, 256))
	// In mode align no step ends there, so the state was never saved.
	for _, rev := range []Revision{RevA, RevB} {
		c := producerLeg(rev, full(16), mamba(MambaAlign, 16))
		require.Equal(t, []uint64{32, 48, 64, 80, 96}, holesOf(t, c, Case{}, 100), rev)
	}
}

// Row 13: a prompt that is a multiple of the full chunk and not of the interval.
func TestRow13Interval(t *testing.T) {
	c := producerLeg(RevB, full(16), swa(4, 8))
	c.RetentionTokens = Some(32)
	m := meet(t, c, Case{PromptTokens: 80})
	require.Equal(t, "{0-4} {18-19}", ranges(m.Groups))
	require.Equal(t, "{0-4} {6-7, 14-15}", ranges(m.Supply))
	require.Equal(t, []uint64{48, 80, 112}, holesOf(t, c, Case{}, 128))
}

// Row 16: what only the consumer knows moves its end to where no tail is kept.
func TestRow16ConsumersLimits(t *testing.T) {
	c := producerLeg(RevB, full(16), swa(4, 8))
	require.Equal(t, "{} {}", ranges(meet(t, c, Case{PromptTokens: 70}).Missing))
	require.Equal(t, "{} {2-3}", ranges(meet(t, c, Case{PromptTokens: 70, MaxLoadTokens: Some(24)}).Missing))
	require.Equal(t, "{} {}", ranges(meet(t, dense(c), Case{PromptTokens: 70, MaxLoadTokens: Some(24)}).Missing))
}

// Row 17: other chunks on the two sides.
func TestRow17NoCommonKey(t *testing.T) {
	a, b := mustNew(t, producerLeg(RevA, full(16))), mustNew(t, producerLeg(RevA, full(32)))
	_, err := MeetAcross(a, b, Case{PromptTokens: 64})
	require.EqualError(t, err, "vllm: chunks of group 0 have 16 tokens at the producer and 32 at the consumer; they have no key in common")
	// Equal chunks and another revision: a producer that was upgraded first.
	m, err := MeetAcross(mustNew(t, producerLeg(RevB, full(16), swa(4, 8))), mustNew(t, producerLeg(RevA, full(16), swa(4, 8))), Case{PromptTokens: 64})
	require.NoError(t, err)
	require.Equal(t, "{} {14-15}", ranges(m.Missing))
}

// The policy gate: the warmer its cache, the less a chunk-level producer supplies.
func TestPolicyGate(t *testing.T) {
	primary := func(k Key) abi.State { return abi.Hit }
	for _, rev := range []Revision{RevA, RevB} {
		for _, w := range []Warm{{Primary: primary}, {GPUTokens: 7168, Primary: primary}, {LoadedTokens: 7168, Primary: primary}} {
			k := Case{PromptTokens: 7200, Warm: w}
			c := Defaults(rev, full(128))
			require.Equal(t, "{0-55}", ranges(meet(t, c, k).Missing), "%s %+v", &c, w)
			c.Policy = RequestLevel
			require.Equal(t, "{}", ranges(meet(t, c, k).Missing), "%s %+v", &c, w)
		}
		// What was loaded is skipped even when the primary has let it go.
		loaded := Warm{LoadedTokens: 7168}
		require.Equal(t, "{0-55}", ranges(meet(t, Defaults(rev, full(128)), Case{PromptTokens: 7200, Warm: loaded}).Missing))
		require.Equal(t, "{}", ranges(meet(t, producerLeg(rev, full(128)), Case{PromptTokens: 7200, Warm: loaded}).Missing))
		// A producer whose GPU alone is warm stores anew, under either policy.
		require.Equal(t, "{}", ranges(meet(t, Defaults(rev, full(128)), Case{PromptTokens: 7200, Warm: Warm{GPUTokens: 7168}}).Missing))
	}
}

// The trace from the field: 57 keys demanded in the sliding group, 2 ever existed.
func TestTrace57(t *testing.T) {
	m := meet(t, retry(producerLeg(RevA, swa(128, 128), full(128))), Case{PromptTokens: 7296, Warm: Warm{GPUTokens: 7168}})
	require.Equal(t, "{0-56} {0-56}", ranges(m.Groups))
	require.Equal(t, "{55-56} {0-56}", ranges(m.Supply))
	require.Equal(t, "{0-54} {}", ranges(m.Missing))
	require.Equal(t, 55, m.Missing[0].Count())
	// With blocks of 16 the last 8 of 57 are there.
	m = meet(t, retry(producerLeg(RevA, swa(16, 128), full(16))), Case{PromptTokens: 57*16 + 1, Warm: Warm{GPUTokens: 57 * 16}})
	require.Equal(t, "{49-56}", Ranges(m.Supply[0]))
	require.Equal(t, 49, m.Missing[0].Count())
}

// A hit that ends inside a chunk reads one chunk more than rev A looks up; rev B does.
func TestUnreadyLoad(t *testing.T) {
	m := meet(t, producerLeg(RevA, full(12), swa(8, 8)), Case{PromptTokens: 64})
	require.Equal(t, uint64(60), m.Tokens)
	require.Equal(t, "{0-4} {7}", ranges(m.Groups))
	require.Equal(t, "{0-4} {6-7}", ranges(m.Loaded))
	require.Equal(t, "{} {6}", ranges(m.Unready))
	require.True(t, m.Hole())
	hole, err := mustNew(t, producerLeg(RevB, full(12), swa(8, 8))).FirstHole(Case{}, 300)
	require.NoError(t, err)
	require.Nil(t, hole)
}
