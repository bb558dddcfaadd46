package engine

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/host/engine/enginepb"
)

// Bounds of the fields of one message.
const (
	// IDBytesMax of a request, transfer or peer id and of an engine's name.
	IDBytesMax = 256
	// SaltBytesMax of a tenant's salt.
	SaltBytesMax = 256
	// HashBytesMin and HashBytesMax of one prefix hash: below 128 bits two prefixes
	// may meet by accident, above 256 the key has no room.
	HashBytesMin, HashBytesMax = 16, 32
	// DeadlineMSMax of one request: ten minutes, which is also what a peer believes.
	DeadlineMSMax = 600_000
	// StridesMax of one group: K and V of 512 layers. Each pair is compared at Attach.
	StridesMax = 1024
	// EventsMax of one engine: a step in work for each, and more than it has streams.
	EventsMax = 256
	// HandleBytes of a CUDA IPC handle, of memory or of an event.
	HandleBytes = 64
	// memoryBytesMax keeps sums of offsets far from overflow; no host has a petabyte.
	memoryBytesMax = 1 << 50
)

// Limits are the facts of the node's deployment that messages are held against.
type Limits struct {
	// MaxTokens is the longest prompt, HashTokens the granule of the hash.
	MaxTokens, HashTokens uint64
	Groups                []GroupLimits
	// Roles and Legs that the deployment lists: "producer", "pd" and so on.
	Roles, Legs []string
}

// GroupLimits are the facts of one group.
type GroupLimits struct {
	Name        string
	BlockTokens uint64
	// BlockBytes is the size of a block, ChunkBlocks how many make a chunk.
	BlockBytes, ChunkBlocks uint64
}

func (l *Limits) group(name string) (*GroupLimits, error) {
	names := make([]string, len(l.Groups))
	for i := range l.Groups {
		if l.Groups[i].Name == name {
			return &l.Groups[i], nil
		}
		names[i] = l.Groups[i].Name
	}
	return nil, invalid("group %q is not in the deployment; its groups are %s", name, strings.Join(names, ", "))
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

func (l *Limits) checkAttach(r *enginepb.AttachRequest) error {
	if len(r.EngineName) > IDBytesMax {
		return invalid("engine_name has %d bytes; at most %d", len(r.EngineName), IDBytesMax)
	}
	seen := map[string]bool{}
	for _, reg := range r.Regions {
		if _, err := l.group(reg.Group); err != nil {
			return err
		}
		if seen[reg.Group] {
			return invalid("group %q has two regions; ask for one with all its blocks", reg.Group)
		}
		seen[reg.Group] = true
		if reg.Blocks == 0 {
			return invalid("region of group %q has 0 blocks; ask for at least 1 or leave the group out", reg.Group)
		}
	}
	return l.checkMemory(r)
}

func (l *Limits) checkBegin(r *enginepb.BeginRequest) error {
	for _, f := range []struct{ name, value string }{
		{"request_id", r.RequestId}, {"peer_id", r.PeerId}, {"transfer_id", r.TransferId},
	} {
		if len(f.value) > IDBytesMax {
			return invalid("%s has %d bytes; at most %d", f.name, len(f.value), IDBytesMax)
		}
	}
	switch {
	case r.RequestId == "":
		return invalid("request_id is empty; give one that is unique among the engine's live requests")
	case len(r.TenantSalt) > SaltBytesMax:
		return invalid("tenant_salt has %d bytes; at most %d: give a hash of a longer one", len(r.TenantSalt), SaltBytesMax)
	case r.PromptTokens == 0:
		return invalid("prompt_tokens is 0; a prompt has at least 1 token")
	case r.PromptTokens > l.MaxTokens:
		return invalid("prompt_tokens is %d; the deployment's max_tokens is %d, and longer prompts were not checked: raise max_tokens or do not use the tier for this request", r.PromptTokens, l.MaxTokens)
	case r.DeadlineMs > DeadlineMSMax:
		return invalid("deadline_ms is %d; at most %d", r.DeadlineMs, DeadlineMSMax)
	}
	if err := l.checkHashes(r); err != nil {
		return err
	}
	if err := l.checkLeg(r); err != nil {
		return err
	}
	return checkSide(r)
}

func (l *Limits) checkHashes(r *enginepb.BeginRequest) error {
	if r.HashBytes < HashBytesMin || r.HashBytes > HashBytesMax {
		return invalid("hash_bytes is %d; it must be %d to %d", r.HashBytes, HashBytesMin, HashBytesMax)
	}
	n := uint64(len(r.Hashes))
	if n%uint64(r.HashBytes) != 0 {
		return invalid("hashes has %d bytes, which is no whole number of hashes of %d bytes", n, r.HashBytes)
	}
	if got, want := n/uint64(r.HashBytes), r.PromptTokens/l.HashTokens; got != want {
		return invalid("hashes holds %d hashes, but a prompt of %d tokens has %d whole granules of %d tokens (hash_tokens); send one hash for each", got, r.PromptTokens, want, l.HashTokens)
	}
	return nil
}

func (l *Limits) checkLeg(r *enginepb.BeginRequest) error {
	var role, leg string
	switch r.Role {
	case enginepb.Role_PRODUCER:
		role = "producer"
	case enginepb.Role_CONSUMER:
		role = "consumer"
	default:
		return invalid("role is %v; it must be PRODUCER or CONSUMER", r.Role)
	}
	switch r.Leg {
	case enginepb.Leg_PD:
		leg = "pd"
	case enginepb.Leg_DEMAND:
		leg = "demand"
	case enginepb.Leg_PROBE:
		leg = "probe"
	default:
		return invalid("leg is %v; it must be PD, DEMAND or PROBE", r.Leg)
	}
	switch {
	case !slices.Contains(l.Roles, role):
		return status.Errorf(codes.FailedPrecondition, "role is %s, but the deployment was checked for roles %s; add the role and check again", role, strings.Join(l.Roles, ", "))
	case !slices.Contains(l.Legs, leg):
		return status.Errorf(codes.FailedPrecondition, "leg is %s, but the deployment was checked for legs %s; add the leg and check again", leg, strings.Join(l.Legs, ", "))
	case leg != "probe" && r.TransferId == "":
		return invalid("transfer_id is empty; leg %s needs the name that both sides give the transfer", leg)
	case leg == "pd" && r.MaxStoreTokens > 0:
		return invalid("max_store_tokens is %d in leg pd, where the consumer cannot know it and would demand more than is stored; put the cap into the deployment (max_store_tokens) or use leg demand or probe", r.MaxStoreTokens)
	}
	return nil
}

// checkSide refuses what only the other side can say.
func checkSide(r *enginepb.BeginRequest) error {
	producer := r.Role == enginepb.Role_PRODUCER
	switch {
	case producer && r.LocalTokens > 0:
		return invalid("local_tokens is %d, but role is PRODUCER; a producer gives native_tokens with its first Store", r.LocalTokens)
	case producer && r.MaxLoadTokens > 0:
		return invalid("max_load_tokens is %d, but role is PRODUCER; only a consumer loads", r.MaxLoadTokens)
	case !producer && r.JunctionTokens > 0:
		return invalid("junction_tokens is %d, but role is CONSUMER; only a producer keeps what a junction needs", r.JunctionTokens)
	case !producer && r.MaxStoreTokens > 0:
		return invalid("max_store_tokens is %d, but role is CONSUMER; only a producer stores", r.MaxStoreTokens)
	case r.LocalTokens > r.PromptTokens:
		return invalid("local_tokens is %d, above prompt_tokens, %d", r.LocalTokens, r.PromptTokens)
	case r.JunctionTokens > r.PromptTokens:
		return invalid("junction_tokens is %d, above prompt_tokens, %d", r.JunctionTokens, r.PromptTokens)
	}
	return nil
}

// checkStore holds a step against the request's earlier ones. r.mu is held.
func (r *request) checkStore(m *enginepb.StoreRequest) error {
	switch {
	case r.role != enginepb.Role_PRODUCER:
		return status.Errorf(codes.FailedPrecondition, "request %q is a consumer; only a producer stores", r.id)
	case m.ComputedTokens < r.computed:
		return invalid("computed_tokens is %d, below the %d of the store before; it never goes back: finish the request and begin a new one", m.ComputedTokens, r.computed)
	case m.ComputedTokens > abi.MaxTokens:
		return invalid("computed_tokens is %d; at most %d", m.ComputedTokens, uint64(abi.MaxTokens))
	case r.stored && m.NativeTokens > 0:
		return invalid("native_tokens is %d in a later store; it is given with the first one", m.NativeTokens)
	case m.NativeTokens > r.reuse:
		return invalid("native_tokens is %d, above the %d that Begin answered as reuse_tokens; a chunk that was promised is no longer on the GPU: recompute from %d", m.NativeTokens, r.reuse, r.reuse)
	case m.NativeTokens > m.ComputedTokens:
		return invalid("native_tokens is %d, above computed_tokens, %d", m.NativeTokens, m.ComputedTokens)
	}
	if err := r.checkMoreHashes(m); err != nil {
		return err
	}
	if err := r.checkEvent(m.Event); err != nil {
		return err
	}
	return r.checkBlocks(m.Blocks)
}

func (r *request) checkMoreHashes(m *enginepb.StoreRequest) error {
	hb, ht := uint64(r.begin.HashBytes), r.engine.server.limits.HashTokens
	n := uint64(len(m.MoreHashes))
	if n%hb != 0 {
		return invalid("more_hashes has %d bytes, which is no whole number of hashes of %d bytes", n, hb)
	}
	have, want := r.hashes+n/hb, max(r.begin.PromptTokens, m.ComputedTokens)/ht
	if have != want {
		return invalid("%d hashes are known with more_hashes, but %d computed tokens hold %d whole granules of %d tokens (hash_tokens); send one hash for each new one", have, m.ComputedTokens, want, ht)
	}
	return nil
}

// checkEvent refuses an event that the engine has not given.
func (r *request) checkEvent(event uint32) error {
	if n := r.engine.marks; uint64(event) > uint64(n) {
		return invalid("event is %d, but the engine attached with %d events; count from 1, and 0 is none", event, n)
	}
	return nil
}

// checkBlocks holds block numbers against the region of their group.
func (r *request) checkBlocks(runs []*enginepb.BlockRun) error {
	for _, run := range runs {
		g, err := r.engine.server.limits.group(run.Group)
		if err != nil {
			return err
		}
		blocks, ok := r.engine.blocks[run.Group]
		if !ok {
			return status.Errorf(codes.FailedPrecondition, "blocks of group %q, but the engine attached without a region for it; attach with one", run.Group)
		}
		if last := uint64(run.FirstBlock) + uint64(len(run.Ids)); last > abi.MaxTokens/g.BlockTokens {
			return invalid("group %q: logical block %d; a sequence of %d tokens has %d blocks of %d tokens", run.Group, last-1, uint64(abi.MaxTokens), abi.MaxTokens/g.BlockTokens, g.BlockTokens)
		}
		for i, id := range run.Ids {
			if id >= blocks {
				return invalid("group %q: logical block %d is in block %d, but the region has blocks 0 to %d", run.Group, uint64(run.FirstBlock)+uint64(i), id, blocks-1)
			}
		}
	}
	return nil
}

// checkLoad refuses a second load, and destinations that two chunks would share.
// r.mu is held.
func (r *request) checkLoad(m *enginepb.LoadRequest) error {
	switch {
	case r.role != enginepb.Role_CONSUMER:
		return status.Errorf(codes.FailedPrecondition, "request %q is a producer; only a consumer loads", r.id)
	case r.loaded:
		return status.Errorf(codes.FailedPrecondition, "request %q has been loaded; a request is loaded once", r.id)
	}
	if err := r.checkEvent(m.Event); err != nil {
		return err
	}
	if err := r.checkBlocks(m.Blocks); err != nil {
		return err
	}
	type place struct {
		group string
		id    uint32
	}
	seen := map[place]uint64{}
	for _, run := range m.Blocks {
		for i, id := range run.Ids {
			logical := uint64(run.FirstBlock) + uint64(i)
			if other, ok := seen[place{run.Group, id}]; ok {
				return invalid("group %q: logical blocks %d and %d are both to be loaded into block %d; give each its own", run.Group, other, logical, id)
			}
			seen[place{run.Group, id}] = logical
		}
	}
	return nil
}

// checkFinish holds the end of a producer against its steps. r.mu is held.
func (r *request) checkFinish(m *enginepb.FinishRequest) error {
	if m.ComputedTokens != 0 && m.ComputedTokens != r.computed {
		return invalid("computed_tokens is %d at the end, but the last store said %d; store the last step first", m.ComputedTokens, r.computed)
	}
	return nil
}
