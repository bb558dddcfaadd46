package vllm

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, file, got string) {
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "run go test -update ./specs/vllm when the change is meant")
}

func TestRefusals(t *testing.T) {
	with := func(rev Revision, f func(*Config), groups ...Group) Config {
		c := Defaults(rev, groups...)
		if f != nil {
			f(&c)
		}
		return c
	}
	ring := Group{Kind: KpoolTail, BlockTokens: 4, WindowTokens: 4}
	cases := []Config{
		{},
		with(RevA, func(c *Config) { c.Promotion = 0 }, full(16)),
		with(RevA, func(c *Config) { c.Policy = 0 }, full(16)),
		with(RevA, nil),
		with(RevA, func(c *Config) { c.BlocksPerChunk = 0 }, full(16)),
		with(RevA, func(c *Config) { c.BlocksPerChunk = abi.MaxTokens }, full(16)),
		with(RevB, func(c *Config) { c.RetentionTokens = Some(1 << 40) }, full(16)),
		with(RevA, nil, full(0)),
		with(RevA, nil, full(16), Group{Kind: Cross, BlockTokens: 16}),
		with(RevB, nil, full(16), Group{Kind: EncoderOnly, BlockTokens: 16}),
		with(RevA, nil, full(16), Group{BlockTokens: 16}),
		with(RevA, nil, full(16), ring),
		with(RevA, nil, swa(16, 0)),
		with(RevA, nil, swa(16, 1<<40)),
		with(RevA, nil, Group{Kind: Full, BlockTokens: 16, WindowTokens: 8}),
		with(RevA, nil, Group{Kind: Full, BlockTokens: 16, ExtraTokens: 8}),
		with(RevA, nil, Group{Kind: Full, BlockTokens: 16, Mode: MambaAll}),
		with(RevA, nil, Group{Kind: Full, BlockTokens: 16, NotCacheable: true}),
		with(RevA, nil, mamba(MambaAll, 16), mamba(MambaAlign, 32)),
		with(RevB, func(c *Config) { c.RetentionTokens = Some(24) }, full(16), swa(16, 32)),
	}
	var got strings.Builder
	for _, c := range cases {
		_, err := New(c)
		require.Error(t, err)
		got.WriteString(err.Error() + "\n")
	}
	for _, err := range []error{
		second(ParseKind("swo")), second(ParseMambaMode("some")), second(ParseRevision("vllm-0.28")),
		second(ParsePromotion("hit")), second(ParsePolicy("block")),
	} {
		got.WriteString(err.Error() + "\n")
	}
	golden(t, "testdata/refusals.txt", got.String())
}

func second[T any](_ T, err error) error { return err }

// What vLLM starts with.
func TestAccepted(t *testing.T) {
	for _, c := range []Config{
		Defaults(RevB, Group{Kind: KpoolTail, BlockTokens: 4, WindowTokens: 4}, full(16)),
		Defaults(RevB, Group{Kind: Cross, BlockTokens: 16, NotCacheable: true}, full(16)),
		Defaults(RevA, mamba(MambaAll, 16), mamba(MambaNone, 32)),
		Defaults(RevB, Group{Kind: RSWA, BlockTokens: 16}, Group{Kind: Sink, BlockTokens: 16}),
	} {
		require.NoError(t, c.Validate())
	}
	// Rev A's store path does not read the interval.
	c := Defaults(RevA, full(16), swa(16, 32))
	c.RetentionTokens = Some(24)
	require.NoError(t, c.Validate())
}

func TestNames(t *testing.T) {
	for k := Full; k <= KpoolTail; k++ {
		got, err := ParseKind(k.String())
		require.NoError(t, err)
		require.Equal(t, k, got)
	}
	for _, rev := range []Revision{RevA, RevB} {
		got, err := ParseRevision(rev.String())
		require.NoError(t, err)
		require.Equal(t, rev, got)
	}
	require.Equal(t, "Kind(99)", Kind(99).String())
	require.Equal(t, "Promotion(0)", Promotion(0).String())
	require.Equal(t, "none", Optional{}.String())
	require.Equal(t, "0", Some(0).String())
}

// The drawings of a hole, of a long prompt and of all that a case may say.
func TestDrawings(t *testing.T) {
	var got strings.Builder
	c := dense(producerLeg(RevB, full(16), eagle(swa(4, 9))))
	c.Groups[1].ExtraTokens, c.BlocksPerChunk, c.PromptOnly, c.Speculative = 3, 2, false, true
	for _, m := range []*Meeting{
		meet(t, producerLeg(RevB, full(16), swa(4, 8)), Case{PromptTokens: 64}),
		meet(t, producerLeg(RevA, full(12), swa(8, 8)), Case{PromptTokens: 64}),
		meet(t, retry(producerLeg(RevA, swa(128, 128), full(128))), Case{PromptTokens: 7296, Warm: Warm{GPUTokens: 7168}}),
		meet(t, retry(producerLeg(RevA, swa(16, 128), full(128))), Case{PromptTokens: 7296, Warm: Warm{GPUTokens: 7168}}),
		meet(t, c, Case{
			PromptTokens: 200, StepTokens: 40, GeneratedTokens: 9, JunctionTokens: 32, TextTokens: 260, LocalTokens: 16,
			MaxOffloadTokens: Some(190), MaxLoadTokens: Some(170), Warm: Warm{GPUTokens: 32, LoadedTokens: 40}, Reused: true,
		}),
		meet(t, producerLeg(RevA, full(16), mamba(MambaAlign, 16)), Case{PromptTokens: 96, StepTokens: 40, AbortTokens: 50,
			Tiers: Tiers{Arrive: func(Key, int) abi.State { return abi.Miss }}}),
	} {
		got.WriteString(m.String() + "\n")
	}
	golden(t, "testdata/drawings.txt", got.String())
}
