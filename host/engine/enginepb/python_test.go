package enginepb_test

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// TestPythonStub holds the messages that the Python client was generated from against those
// of this package: both come from engine.proto, by `make proto`.
func TestPythonStub(t *testing.T) {
	source, err := os.ReadFile("../../../examples/pytorch-pd/tierd_engine/engine_pb2.py")
	require.NoError(t, err)
	_, literal, ok := strings.Cut(string(source), "AddSerializedFile(b'")
	require.True(t, ok, "engine_pb2.py has no serialized file; run make proto")
	var there descriptorpb.FileDescriptorProto
	require.NoError(t, proto.Unmarshal(pythonBytes(t, literal), &there))
	here := protodesc.ToFileDescriptorProto(enginepb.File_engine_proto)
	here.Name = there.Name // the Python one has its package's name in front
	dropJSONNames(here.MessageType)
	dropJSONNames(there.MessageType)
	require.True(t, proto.Equal(here, &there), "engine_pb2.py is not generated from this engine.proto; run make proto")
}

// pythonBytes reads a literal of Python's up to its closing single quote.
func pythonBytes(t *testing.T, s string) (out []byte) {
	for s[0] != '\'' {
		if s[0] == '\\' && (s[1] == '"' || s[1] == '\'') {
			out, s = append(out, s[1]), s[2:]
			continue
		}
		r, _, tail, err := strconv.UnquoteChar(s, 0)
		require.NoError(t, err)
		out, s = append(out, byte(r)), tail
	}
	return out
}

// dropJSONNames removes what one generator keeps and the other leaves out.
func dropJSONNames(messages []*descriptorpb.DescriptorProto) {
	for _, m := range messages {
		for _, f := range m.Field {
			f.JsonName = nil
		}
	}
}
