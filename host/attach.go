package host

import (
	"context"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry/deploy"
)

// An attachment is an attached engine: its memory, one region a group.
type attachment struct {
	node    *Node
	regions []gpu.Region // nil where the engine asked for none
	reply   *enginepb.AttachReply
}

// Attach implements engine.Backend.
func (n *Node) Attach(ctx context.Context, r *enginepb.AttachRequest) (engine.Attachment, error) {
	if err := n.sameDeployment(r.Deployment); err != nil {
		return nil, err
	}
	a := &attachment{node: n, regions: make([]gpu.Region, len(n.groups)), reply: &enginepb.AttachReply{
		DeploymentDigest: n.entry.Deployment.Digest(), Verdict: n.entry.Verdict.Verdict, HashTokens: n.entry.Deployment.HashTokens,
		NodeId: n.cfg.NodeID, Deployment: n.deployment,
	}}
	for _, want := range r.Regions {
		g := n.group(want.Group)
		size := int64(want.Blocks) * n.groups[g].blockBytes
		region, err := n.device.Alloc(ctx, size)
		if err != nil {
			a.Close()
			return nil, status.Errorf(codes.ResourceExhausted, "region of group %s, %d blocks of %d bytes: %v", want.Group, want.Blocks, n.groups[g].blockBytes, err)
		}
		a.regions[g] = region
		h, err := region.Export()
		if err != nil || h.Kind != gpu.HandleFile {
			a.Close()
			return nil, status.Errorf(codes.Internal, "region of group %s cannot be mapped by another process (kind %q): %v", want.Group, h.Kind, err)
		}
		a.reply.Regions = append(a.reply.Regions, &enginepb.RegionReply{
			Group: want.Group, Path: h.Path, OffsetBytes: uint64(h.Offset), StrideBytes: uint64(n.groups[g].blockBytes), Blocks: want.Blocks,
		})
	}
	return a, nil
}

// sameDeployment refuses an engine that runs another deployment than the one that was
// checked: the verdict is not about it.
func (n *Node) sameDeployment(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	here := n.entry.Deployment
	there, err := deploy.Parse("the engine's deployment", data)
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if there.Digest() == here.Digest() {
		return nil
	}
	differ := "rules, parameters, policies, alignment or limits differ"
	if d := here.Layout().Diff(there.Layout()); len(d) > 0 {
		differ = strings.Join(d, "; ")
	}
	return status.Errorf(codes.FailedPrecondition, "this node serves deployment %s (%s), the engine has %s (%s): %s; give the engine the node's file, or an empty one, or restart the node with the engine's",
		here.Model, here.Digest(), there.Model, there.Digest(), differ)
}

// Reply implements engine.Attachment.
func (a *attachment) Reply() *enginepb.AttachReply { return a.reply }

// Begin implements engine.Attachment.
func (a *attachment) Begin(ctx context.Context, r *enginepb.BeginRequest) (engine.Request, *enginepb.BeginReply, error) {
	if r.Role == enginepb.Role_PRODUCER {
		return a.beginProducer(ctx, r)
	}
	return a.beginConsumer(ctx, r)
}

// Close implements engine.Attachment.
func (a *attachment) Close() {
	for _, r := range a.regions {
		if r != nil {
			if err := r.Close(); err != nil {
				a.node.log.Error("an engine's region could not be freed", "error", err)
			}
		}
	}
}
