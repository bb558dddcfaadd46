package proc

import (
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
	"github.com/tierd/tierd/specs"
)

// A mouth is a process that answers given bytes, whatever it is asked.
type mouth struct {
	kvpb.KVClient
	reply *kvpb.Results
}

func (m mouth) Reach(context.Context, *kvpb.Batch, ...grpc.CallOption) (*kvpb.Results, error) {
	return m.reply, nil
}

func (m mouth) Scan(context.Context, *kvpb.Batch, ...grpc.CallOption) (*kvpb.Results, error) {
	return m.reply, nil
}

func (m mouth) Need(context.Context, *kvpb.Batch, ...grpc.CallOption) (*kvpb.Results, error) {
	return m.reply, nil
}

// mouthOf returns a rule whose process answers a reply.
func mouthOf(reply *kvpb.Results) specRule {
	log := slog.New(slog.DiscardHandler)
	p := &Program{options: Options{CallTimeout: hang, Log: log}}
	id := &identity{manifest: specs.Full().Manifest()}
	pr := &process{
		program: p, kv: mouth{reply: reply}, life: context.Background(), handles: map[*identity]uint32{id: 0},
		child: newChild(exec.Command(""), "", nil, &output{log: log}),
	}
	for m := range methods {
		pr.queues[m].send = func(batch []*call) error { return pr.send(m, batch) }
	}
	return specRule{&rule{identity: id, program: p, process: func() (*process, error) { return pr, nil }}}
}

// FuzzResults: whatever a process answers, a call has an answer inside its range or an
// error.
func FuzzResults(f *testing.F) {
	reason := "no"
	for _, r := range []*kvpb.Results{
		{}, {Results: []*kvpb.Result{{Set: []byte{7}, Usable: 3}}}, {Results: []*kvpb.Result{{Set: []byte{8}}}},
		{Results: []*kvpb.Result{{NoResume: true}}}, {Results: []*kvpb.Result{{Error: &reason}}},
		{Results: []*kvpb.Result{{Deferred: true, Set: []byte{1}}}}, {Results: []*kvpb.Result{{Usable: 1 << 31, Set: []byte{1}}, nil}},
	} {
		b, err := proto.Marshal(r)
		require.NoError(f, err)
		f.Add(b, uint16(3))
	}
	f.Fuzz(func(t *testing.T, reply []byte, n uint16) {
		var results kvpb.Results
		if proto.Unmarshal(reply, &results) != nil {
			return // gRPC makes an error of it
		}
		round := abi.Round{BlockTokens: 1, ChunkTokens: 1, Hi: uint32(n)}
		out := abi.NewBitmap(int(n))
		if mouthOf(&results).Reach(round, out) == nil {
			require.Less(t, out.Next(int(n)), 0)
		}
		span, err := mouthOf(&results).Scan(round, abi.NewStates(int(n)), out)
		if err == nil {
			require.Less(t, out.Next(int(n)), 0)
			require.LessOrEqual(t, span.Usable, uint32(n))
		}
		if err := mouthOf(&results).Need(round, out); err == nil || errors.Is(err, abi.ErrNoResume) {
			require.Less(t, out.Next(int(n)), 0)
		}
	})
}

// FuzzManifests: whatever a process says of its rules, they are refused or they are valid.
func FuzzManifests(f *testing.F) {
	full := kvpb.FromManifest(specs.Full().Manifest())
	for _, r := range []*kvpb.ManifestReply{{}, {Rules: []*kvpb.Manifest{full}}, {Rules: []*kvpb.Manifest{full, full}}, {Rules: []*kvpb.Manifest{nil}}, {Rules: []*kvpb.Manifest{kvpb.FromManifest(specs.Window().Manifest())}}} {
		b, err := proto.Marshal(r)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, reply []byte) {
		var r kvpb.ManifestReply
		if proto.Unmarshal(reply, &r) != nil {
			return
		}
		manifests, err := readManifests(&r)
		if err != nil {
			return
		}
		for i, m := range manifests {
			require.NoError(t, m.Validate())
			require.True(t, proto.Equal(r.Rules[i], kvpb.FromManifest(m)) || len(r.Rules[i].ProtoReflect().GetUnknown()) > 0 || len(m.Params) > 0, "nothing is lost")
		}
	})
}

// FuzzHandshake: whatever a program prints first is a handshake that leads into the given
// directory, or an error.
func FuzzHandshake(f *testing.F) {
	f.Add("1|1|unix|/d/plugin-dir1/plugin2|grpc|QUJD")
	f.Add("1|2|unix|/d/plugin-dir1/plugin2|grpc|QUJD")
	f.Add("1|1|unix|/d/../e/x/plugin2|grpc|QUJD|true")
	f.Add("hello")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		err := (&child{dir: "/d"}).checkLine(line)
		var broke *ProtocolError
		require.True(t, err == nil || errors.As(err, &broke))
	})
}
