package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/registry/deploy"
)

// An attachment is an attached engine: the device that it is on, its memory and its events.
type attachment struct {
	node   *Node
	device *devices.Device
	spaces []space      // by group; zero where the engine asked for none
	open   []gpu.Region // each memory once
	events []gpu.Event
	reply  *enginepb.AttachReply
}

// A space is where the blocks of a group are.
type space struct {
	region gpu.Region
	// strides are the fragments of a block, with offsets in region.
	strides []stride
}

type stride struct{ offset, stride, length int64 }

// fragments adds those of a block, in the order of its bytes.
func (s *space) fragments(to []gpu.Fragment, block uint32) []gpu.Fragment {
	for _, f := range s.strides {
		to = append(to, gpu.Fragment{Offset: f.offset + int64(block)*f.stride, Length: f.length})
	}
	return to
}

// Attach implements engine.Backend.
func (n *Node) Attach(ctx context.Context, r *enginepb.AttachRequest) (engine.Attachment, error) {
	if err := n.sameDeployment(r.Deployment); err != nil {
		return nil, err
	}
	device, err := n.deviceFor(r)
	if err != nil {
		return nil, err
	}
	a := &attachment{node: n, device: device, spaces: make([]space, len(n.groups)), reply: &enginepb.AttachReply{
		DeploymentDigest: n.entry.Deployment.Digest(), Verdict: n.entry.Verdict.Verdict, HashTokens: n.entry.Deployment.HashTokens,
		NodeId: n.cfg.NodeID, Deployment: n.deployment,
		Device: &enginepb.Device{Name: device.Name(), Uuid: device.UUID(), Kinds: n.memoryKinds()},
	}}
	if err := a.take(ctx, r); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// memoryKinds are those that this node can allocate, the device's own first.
func (n *Node) memoryKinds() []enginepb.MemoryKind {
	if n.devices.GPU != nil {
		return []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_CUDA_IPC, enginepb.MemoryKind_MEMORY_FILE}
	}
	return []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_FILE}
}

// deviceFor chooses the device by the memory that the engine has, or can map.
func (n *Node) deviceFor(r *enginepb.AttachRequest) (*devices.Device, error) {
	kinds := r.Accepts
	if owned := engine.Memories(r.Regions); len(owned) > 0 {
		kinds = []enginepb.MemoryKind{owned[0].Kind}
	}
	if len(kinds) == 0 {
		kinds = []enginepb.MemoryKind{enginepb.MemoryKind_MEMORY_FILE}
	}
	have := n.memoryKinds()
	i := slices.IndexFunc(kinds, func(k enginepb.MemoryKind) bool { return slices.Contains(have, k) })
	if i < 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "the engine has or maps memory of kind %v, and this node's device is %s (%s), which has %v; give the node a GPU (device in its node.yaml), or let the engine map files",
			kinds, n.devices.Name(), n.devices.Why(), have)
	}
	if kinds[i] == enginepb.MemoryKind_MEMORY_FILE {
		if len(r.Events) > 0 {
			return nil, status.Errorf(codes.InvalidArgument, "the engine gives %d events, but its memory is host memory, which no stream fills; leave events out, or use memory of kind MEMORY_CUDA_IPC", len(r.Events))
		}
		return n.devices.Host, nil
	}
	g := n.devices.GPU
	if r.DeviceUuid != "" && !devices.SameUUID(r.DeviceUuid, g.UUID()) {
		return nil, status.Errorf(codes.FailedPrecondition, "the engine is on GPU %s, and this node is on %s (%s); attach to the daemon of the engine's GPU, or name that GPU as device in this node's node.yaml", r.DeviceUuid, g.UUID(), g.Name())
	}
	if err := g.Lost(); err != nil {
		return nil, status.Errorf(codes.Unavailable, "%v; compute without the tier until then", err)
	}
	return g, nil
}

// take allocates or imports the memory of the regions, and opens the events.
func (a *attachment) take(ctx context.Context, r *enginepb.AttachRequest) error {
	owned := map[engine.MemoryName]gpu.Region{}
	for _, m := range engine.Memories(r.Regions) {
		region, err := a.device.Import(ctx, handleOf(m))
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "memory of the engine, %v of %d bytes at offset %d: %v", m.Kind, m.LengthBytes, m.OffsetBytes, err)
		}
		a.open = append(a.open, region)
		owned[engine.NameOf(m)] = region
	}
	for _, want := range r.Regions {
		var err error
		if len(want.Memory) > 0 {
			err = a.lay(want, owned)
		} else {
			err = a.alloc(ctx, want)
		}
		if err != nil {
			return err
		}
	}
	for i, raw := range r.Events {
		dev, ok := a.device.Device.(gpu.Ordered)
		if !ok {
			return status.Errorf(codes.InvalidArgument, "device %s has no streams, and so no events; leave events out", a.device.Name())
		}
		ev, err := dev.ImportEvent(ctx, gpu.Handle{Kind: gpu.HandleCUDAEvent, Opaque: raw})
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "events[%d]: %v", i, err)
		}
		a.events = append(a.events, ev)
	}
	return nil
}

// alloc makes the memory of a group, as long as its layout needs.
func (a *attachment) alloc(ctx context.Context, want *enginepb.Region) error {
	layout := a.layoutOf(want)
	var size uint64
	for _, s := range layout {
		size = max(size, engine.StrideEnd(s, want.Blocks))
	}
	g := a.node.group(want.Group)
	region, err := a.device.Alloc(ctx, int64(size))
	if err != nil {
		return status.Errorf(codes.ResourceExhausted, "region of group %s, %d blocks of %d bytes: %v", want.Group, want.Blocks, a.node.groups[g].blockBytes, err)
	}
	a.open = append(a.open, region)
	h, err := region.Export()
	if err != nil {
		return status.Errorf(codes.Internal, "region of group %s cannot be mapped by another process: %v", want.Group, err)
	}
	a.spaces[g] = space{region: region, strides: stridesOf(layout, func(uint32) int64 { return 0 })}
	reply := a.replyFor(want)
	reply.Memory = memoryOf(h)
	if h.Kind == gpu.HandleFile {
		reply.Path, reply.OffsetBytes = h.Path, uint64(h.Offset)
	}
	return nil
}

// lay makes one region of the memories of a group that the engine owns.
func (a *attachment) lay(want *enginepb.Region, owned map[engine.MemoryName]gpu.Region) error {
	parts := make([]gpu.Region, len(want.Memory))
	for i, m := range want.Memory {
		parts[i] = owned[engine.NameOf(m)]
	}
	layout := a.layoutOf(want)
	s := space{region: parts[0], strides: stridesOf(layout, func(uint32) int64 { return 0 })}
	if len(parts) > 1 {
		j, err := gpu.Join(parts...)
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "group %s: %v", want.Group, err)
		}
		s = space{region: j, strides: stridesOf(layout, func(m uint32) int64 { return j.Start(int(m)) })}
	}
	a.spaces[a.node.group(want.Group)] = s
	a.replyFor(want)
	return nil
}

func stridesOf(layout []*enginepb.Stride, start func(memory uint32) int64) []stride {
	out := make([]stride, len(layout))
	for i, s := range layout {
		out[i] = stride{offset: start(s.Memory) + int64(s.OffsetBytes), stride: int64(s.StrideBytes), length: int64(s.LengthBytes)}
	}
	return out
}

func (a *attachment) layoutOf(want *enginepb.Region) []*enginepb.Stride {
	return engine.LayoutOf(want, uint64(a.node.groups[a.node.group(want.Group)].blockBytes))
}

func (a *attachment) replyFor(want *enginepb.Region) *enginepb.RegionReply {
	reply := &enginepb.RegionReply{Group: want.Group, StrideBytes: uint64(a.node.groups[a.node.group(want.Group)].blockBytes), Blocks: want.Blocks, Layout: a.layoutOf(want)}
	a.reply.Regions = append(a.reply.Regions, reply)
	return reply
}

// handleOf and memoryOf turn what the engine API says into what devices say, and back.
func handleOf(m *enginepb.Memory) gpu.Handle {
	h := gpu.Handle{Kind: gpu.HandleFile, Path: m.Path, Opaque: m.Handle, Offset: int64(m.OffsetBytes), Length: int64(m.LengthBytes)}
	if m.Kind == enginepb.MemoryKind_MEMORY_CUDA_IPC {
		h.Kind, h.Path = gpu.HandleCUDA, ""
	}
	return h
}

func memoryOf(h gpu.Handle) *enginepb.Memory {
	m := &enginepb.Memory{Kind: enginepb.MemoryKind_MEMORY_FILE, Path: h.Path, Handle: h.Opaque, OffsetBytes: uint64(h.Offset), LengthBytes: uint64(h.Length)}
	if h.Kind == gpu.HandleCUDA {
		m.Kind = enginepb.MemoryKind_MEMORY_CUDA_IPC
	}
	return m
}

// wait returns once the engine's stream has reached an event, counted from 1; 0 is none.
// It ends at the deadline: a kernel that never ends must not hold a request.
func (a *attachment) wait(ctx context.Context, event uint32, deadline time.Time) error {
	if event == 0 {
		return nil
	}
	n := a.node
	endWait := n.open.begin(metrics.WaitEvent)
	limited, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	err := a.events[event-1].Wait(limited)
	endWait()
	outcome := "ok"
	switch {
	case err == nil:
	case ctx.Err() != nil:
		outcome = "aborted"
	case errors.Is(err, context.DeadlineExceeded):
		outcome = "deadline"
		err = fmt.Errorf("the engine's stream has not reached event %d by the request's deadline", event)
	default:
		outcome = "refused"
	}
	n.metrics.Waits.WithLabelValues(metrics.WaitEvent, outcome).Inc()
	return err
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
	for _, e := range a.events {
		if err := e.Close(); err != nil {
			a.node.log.Error("an engine's event could not be closed", "error", err)
		}
	}
	for _, r := range a.open {
		if err := r.Close(); err != nil {
			a.node.log.Error("an engine's region could not be freed", "error", err)
		}
	}
}
