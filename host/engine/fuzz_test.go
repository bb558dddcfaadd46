package engine

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// FuzzMessages: whatever decodes as a message is accepted or refused with a reason, and
// what is accepted can be relied on.
func FuzzMessages(f *testing.F) {
	add := func(m proto.Message) {
		b, err := proto.Marshal(m)
		require.NoError(f, err)
		f.Add(b)
	}
	add(begin("r"))
	add(begin("r", consumer, func(r *enginepb.BeginRequest) { r.LocalTokens = 64 }))
	add(&enginepb.StoreRequest{ComputedTokens: 80, MoreHashes: make([]byte, 16), Blocks: []*enginepb.BlockRun{{Group: "full", FirstBlock: 1 << 31, Ids: []uint32{1 << 31}}}})
	add(&enginepb.LoadRequest{Blocks: []*enginepb.BlockRun{{Group: "full", FirstBlock: 1<<32 - 1, Ids: []uint32{1, 1}}}})
	add(&enginepb.AttachRequest{Regions: []*enginepb.Region{{Group: "full", Blocks: 1}}})
	add(&enginepb.AttachRequest{Events: [][]byte{make([]byte, 64)}, Regions: []*enginepb.Region{{Group: "full", Blocks: 1 << 31, Layout: []*enginepb.Stride{
		{StrideBytes: 1 << 63, LengthBytes: 1 << 63}, {OffsetBytes: 1<<64 - 1, LengthBytes: 1<<64 - 1}}, Memory: []*enginepb.Memory{{Kind: 2, Handle: make([]byte, 64), LengthBytes: 1 << 60}}}}})
	l := testLimits
	s := &Server{limits: &l, bounds: testBounds}
	refusal := func(t *testing.T, err error) {
		if err != nil {
			st, ok := status.FromError(err)
			require.True(t, ok)
			require.NotEqual(t, codes.Unknown, st.Code())
			require.NotEmpty(t, st.Message())
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		b := &enginepb.BeginRequest{}
		if proto.Unmarshal(data, b) == nil {
			err := l.checkBegin(b)
			refusal(t, err)
			if err == nil {
				require.Equal(t, b.PromptTokens/l.HashTokens*uint64(b.HashBytes), uint64(len(b.Hashes)))
			}
		}
		a := &enginepb.AttachRequest{}
		if proto.Unmarshal(data, a) == nil {
			err := l.checkAttach(a)
			refusal(t, err)
			for _, reg := range a.Regions {
				var sum, end uint64
				for _, s := range LayoutOf(reg, 64) {
					if err == nil {
						sum, end = sum+s.LengthBytes, max(end, StrideEnd(s, reg.Blocks))
					}
				}
				require.True(t, err != nil || sum == 64 && end <= 3*memoryBytesMax)
			}
		}
		e := &attached{server: s, blocks: map[string]uint32{"full": 8}}
		r := &request{engine: e, id: "r", role: enginepb.Role_PRODUCER, begin: begin("r"), hashes: 4, reuse: 48, computed: 16}
		m := &enginepb.StoreRequest{}
		if proto.Unmarshal(data, m) == nil {
			err := r.checkStore(m)
			refusal(t, err)
			if err == nil {
				require.GreaterOrEqual(t, m.ComputedTokens, r.computed)
			}
		}
		r.role = enginepb.Role_CONSUMER
		d := &enginepb.LoadRequest{}
		if proto.Unmarshal(data, d) == nil {
			refusal(t, r.checkLoad(d))
		}
	})
}
