package kvpb

import (
	"context"

	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"

	"github.com/tierd/tierd/abi"
)

// Name is the name under which go-plugin finds the service.
const Name = "kv"

// Handshake is what a program checks before it serves, so that one that is started by hand
// can say what it is. It is no secret and protects nothing.
var Handshake = plugin.HandshakeConfig{
	ProtocolVersion: abi.Major, MagicCookieKey: "TIERD_RULES", MagicCookieValue: "kv-abi-1",
}

// Plugins returns the service as go-plugin wants it, by protocol version: version 1 is
// that of abi.Major. A side that only asks gives no server, and gets a KVClient from
// Dispense(Name).
func Plugins(s KVServer) map[int]plugin.PluginSet {
	return map[int]plugin.PluginSet{abi.Major: {Name: &service{server: s}}}
}

type service struct {
	plugin.NetRPCUnsupportedPlugin
	server KVServer
}

// GRPCServer implements plugin.GRPCPlugin.
func (s *service) GRPCServer(_ *plugin.GRPCBroker, g *grpc.Server) error {
	RegisterKVServer(g, s.server)
	return nil
}

// GRPCClient implements plugin.GRPCPlugin.
func (*service) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, c *grpc.ClientConn) (any, error) {
	return NewKVClient(c), nil
}
