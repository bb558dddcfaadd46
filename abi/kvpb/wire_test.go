package kvpb

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// TestRound: every field of a Round arrives, through bytes.
func TestRound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
		want := abi.Round{
			BlockTokens: u("block"), ChunkTokens: u("chunk"), PromptTokens: u("prompt"), StoredTokens: u("stored"),
			ResumeTokens: u("resume"), AlignTokens: u("align"), JunctionTokens: u("junction"), ResidentTokens: u("resident"),
			Offers: u("offers"), LocalTokens: u("local"), BoundTokens: u("bound"),
			Lo: rapid.Uint32().Draw(t, "lo"), Hi: rapid.Uint32().Draw(t, "hi"),
		}
		wire, err := proto.Marshal(FromRound(&want))
		require.NoError(t, err)
		var m Round
		require.NoError(t, proto.Unmarshal(wire, &m))
		require.Equal(t, want, m.ABI())
	})
	var none *Round
	require.Zero(t, none.ABI())
}

func TestManifest(t *testing.T) {
	enum := &abi.Manifest{
		Name: "x", Version: "1", Kind: abi.KindSpec, Mask: abi.MaskSinkWindow, MaskArgs: []string{"b", "a"},
		Params: []abi.Param{
			{Name: "a", Min: 1, Max: 2, Default: 2, Unit: "tokens"}, {Name: "b", Max: 9, Required: true},
			{Name: "mode", Max: 1, Enum: []string{"all", "align"}},
		},
	}
	require.NoError(t, enum.Validate())
	manifests := []*abi.Manifest{enum}
	for _, s := range append(specs.All(), policy.All()...) {
		manifests = append(manifests, s.Manifest())
	}
	for _, want := range manifests {
		wire, err := proto.Marshal(FromManifest(want))
		require.NoError(t, err)
		var m Manifest
		require.NoError(t, proto.Unmarshal(wire, &m))
		require.Equal(t, want, m.ABI())
	}
}

func items(n int, lo, hi uint32) *Batch {
	b := &Batch{}
	for range n {
		b.Items = append(b.Items, &Item{Round: &Round{Lo: lo, Hi: hi}})
	}
	return b
}

func TestBatchBounds(t *testing.T) {
	for want, b := range map[string]*Batch{
		"": nil,
		"the batch has 1025 items; at most 1024 are allowed":                 items(ItemsMax+1, 0, 0),
		"item 0 has no round":                                                {Items: []*Item{{}}},
		"item 1 has no round":                                                {Items: []*Item{items(1, 0, 1).Items[0], nil}},
		"item 0 asks for chunks 2 to 1; lo <= hi <= 1048576":                 items(1, 2, 1),
		"item 0 asks for chunks 0 to 1048577; lo <= hi <= 1048576":           items(1, 0, abi.MaxChunks+1),
		"the batch reaches over 1048577 chunks; at most 1048576 are allowed": {Items: append(items(1, 0, abi.MaxChunks).Items, items(1, 0, 1).Items...)},
	} {
		if want == "" {
			require.NoError(t, b.Check())
		} else {
			require.EqualError(t, b.Check(), want)
		}
	}
	require.NoError(t, items(ItemsMax, 0, ChunksMax/ItemsMax).Check())
	require.NoError(t, items(1, abi.MaxChunks, abi.MaxChunks).Check())
}

// TestLargestMessages: what the bounds allow fits the largest message, both ways.
func TestLargestMessages(t *testing.T) {
	huge := abi.Round{
		BlockTokens: 1 << 63, ChunkTokens: 1 << 63, PromptTokens: 1 << 63, StoredTokens: 1 << 63, ResumeTokens: 1 << 63, AlignTokens: 1 << 63,
		JunctionTokens: 1 << 63, ResidentTokens: 1 << 63, Offers: 1 << 63, LocalTokens: 1 << 63, BoundTokens: 1 << 63, Lo: 1 << 31, Hi: 1 << 31,
	}
	b, r, o := &Batch{}, &Results{}, &OpenRequest{}
	reason := strings.Repeat("x", ReasonBytesMax)
	const each = ChunksMax / ItemsMax
	for range ItemsMax {
		b.Items = append(b.Items, &Item{Handle: HandlesMax, Round: FromRound(&huge), States: make([]byte, 8*abi.StatesWords(each))})
		r.Results = append(r.Results, &Result{Set: make([]byte, each/8), Usable: 1 << 31, Deferred: true, NoResume: true, Error: &reason})
		o.Openings = append(o.Openings, &Opening{Rule: RulesMax, Params: []uint64{abi.MaxTokens, abi.MaxTokens, abi.MaxTokens, abi.MaxTokens, 31: abi.MaxTokens}})
	}
	for _, m := range []proto.Message{b, r, o} {
		require.Less(t, proto.Size(m), MessageBytesMax)
	}
}

func TestSetInto(t *testing.T) {
	out := abi.NewBitmap(11)
	require.NoError(t, (&Result{Set: []byte{0xff, 0x05}}).SetInto(out, 11))
	require.Equal(t, abi.Bitmap{0x5ff}, out)
	require.EqualError(t, (&Result{Set: []byte{1}}).SetInto(out, 11), "the set has 1 bytes; 11 chunks take exactly 2")
	require.EqualError(t, (&Result{Set: []byte{1, 8}}).SetInto(out, 11), "the set has a bit beyond its 11 chunks; the padding of the last byte must be 0")
	require.NoError(t, (*Result)(nil).SetInto(nil, 0))
}

// TestProtoSaysTheBounds: what kv.proto promises to other languages is what is held.
func TestProtoSaysTheBounds(t *testing.T) {
	text, err := os.ReadFile("kv.proto")
	require.NoError(t, err)
	number := func(pattern string) int {
		m := regexp.MustCompile(pattern).FindSubmatch(text)
		require.NotNil(t, m, pattern)
		n, err := strconv.Atoi(string(m[1]))
		require.NoError(t, err)
		return n
	}
	require.Equal(t, RulesMax, number(`At most (\d+)\. A rule is named`))
	require.Equal(t, ItemsMax, number(`at most (\d+) items`))
	require.Equal(t, ChunksMax, 1<<number(`at most 2\^(\d+) chunks`))
	require.Equal(t, ReasonBytesMax, number(`of which (\d+) bytes are kept`))
	require.EqualValues(t, abi.Major, number(`subprocess ABI of tierd, version (\d+)`))
	require.EqualValues(t, abi.Major, number(`protocol version (\d+), gRPC`))
	require.Equal(t, []uint{abi.Major}, []uint{Handshake.ProtocolVersion})
	require.Len(t, Plugins(nil), 1)
	require.Contains(t, Plugins(nil)[abi.Major], Name)
}
