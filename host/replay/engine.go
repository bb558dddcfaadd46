package replay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry/deploy"
)

const (
	// callTimeout ends one call to a daemon. Begin may do two lookups of 500 ms and
	// Finish waits for the request's jobs; none has a reason to take longer than this.
	callTimeout = 20 * time.Second
	// jobTimeout ends the wait for a job's event: a request may wait 30 s for its
	// peer, and then its load needs room to end as a failure of the daemon's own.
	jobTimeout = 45 * time.Second
)

// errStuck is wrapped when a daemon let a deadline of replay pass. What it still does
// with the region is unknown, so the region is not used again.
var errStuck = errors.New("the daemon gave no answer in time")

// A group is what replay must know of a group of the deployment.
type group struct {
	index       int
	name        string
	blockTokens uint64
	chunkBlocks uint64
	// window is how far attention looks back, in tokens; 0 = over everything.
	window uint64
	// foreign: the rule is none that replay knows, so neither is what attention reads.
	// The engine keeps everything, and what a load leaves out is not missed.
	foreign bool
	// rows of rowBytes each make a block: layer, then K or V, then token.
	rows     uint64
	rowBytes uint64
}

// chunkTokens is the length of a chunk.
func (g *group) chunkTokens() uint64 { return g.blockTokens * g.chunkBlocks }

// chunkBytes is the size of a chunk.
func (g *group) chunkBytes() uint64 { return g.rows * g.rowBytes * g.chunkBlocks }

// groupsOf reads the groups of a deployment.
func groupsOf(d *deploy.Deployment) ([]group, error) {
	var out []group
	for i := range d.Groups {
		g := &d.Groups[i]
		blockRows := g.Layers * 2 * g.BlockTokens
		x := group{
			index: i, name: g.Name, blockTokens: g.BlockTokens, chunkBlocks: g.ChunkBlocks,
			rows: blockRows, rowBytes: g.BlockBytes() / blockRows,
		}
		switch g.Rule {
		case "full":
		case "window":
			w, ok := g.Params["window"].(int)
			if !ok || w < 1 {
				return nil, fmt.Errorf("group %s: parameter window is %v; it must be at least 1", g.Name, g.Params["window"])
			}
			x.window = uint64(w)
		default:
			x.foreign = true
		}
		out = append(out, x)
	}
	return out, nil
}

// needs returns the blocks that attention reads to go on from token n: first <= b <
// end. The last may be read in part.
func (g *group) needs(n uint64) (first, end uint64) {
	if g.window > 0 && n+1 > g.window {
		first = (n + 1 - g.window) / g.blockTokens
	}
	end = (n + g.blockTokens - 1) / g.blockTokens
	return min(first, end), end
}

// A daemon is what one says of itself.
type daemon struct {
	// side is "producer" or "consumer".
	side       string
	socket, id string
	// digest names the deployment that it serves.
	digest     string
	deployment *deploy.Deployment
}

// meet attaches without regions, just to hear which node this is and what it serves.
func meet(ctx context.Context, side, socket string) (*daemon, error) {
	client, reply, err := greet(ctx, side, socket, nil)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	d := &daemon{side: side, socket: socket, id: reply.NodeId, digest: reply.DeploymentDigest}
	d.deployment, err = deploy.Parse("the deployment of the "+side+"'s daemon", reply.Deployment)
	return d, err
}

// greet connects to a daemon and attaches.
func greet(ctx context.Context, side, socket string, regions []*enginepb.Region) (*engine.Client, *enginepb.AttachReply, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := knock(ctx, socket); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", side, err)
	}
	client, err := engine.Dial(ctx, socket)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", side, err)
	}
	reply, err := client.Attach(ctx, "tierd replay, "+side, nil, regions)
	if err == nil {
		return client, reply, nil
	}
	client.Close()
	switch status.Code(err) {
	case codes.Unavailable, codes.Unimplemented, codes.DeadlineExceeded:
		err = fmt.Errorf("what listens at %s does not answer as a daemon's engine socket does: is it the engine_socket of tierd serve, and is that daemon ready (not still checking its deployment, nor stopping) and run by this user?", socket)
	default:
		err = fmt.Errorf("attach to the daemon at %s: %s", socket, status.Convert(err).Message())
	}
	return nil, nil, fmt.Errorf("%s: %w", side, err)
}

// knock connects to a socket, only to say in one sentence why that is not possible.
func knock(ctx context.Context, socket string) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err == nil {
		return conn.Close()
	}
	why := err.Error()
	var errno syscall.Errno
	if errors.As(err, &errno) {
		why = errno.Error()
	}
	return fmt.Errorf("no daemon answers at %s (%s): is tierd serve running, and ready? tierd status says; the socket is there once the check has accepted", socket, why)
}

// A side is one engine: its connection, its blocks and the state of its daemon.
type side struct {
	daemon *daemon
	client *engine.Client
	groups []group
	// calls bounds each call, waits each wait for a job's event.
	calls, waits time.Duration

	mu    sync.Mutex // guards pools
	pools []*pool

	gone atomic.Pointer[error]
}

// attach attaches with one region a group, large enough for so many live requests.
func attach(ctx context.Context, d *daemon, requests []Request, live int) (*side, error) {
	groups, err := groupsOf(d.deployment)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.side, err)
	}
	s := &side{daemon: d, groups: groups, calls: callTimeout, waits: jobTimeout}
	var regions []*enginepb.Region
	for i, blocks := range blocksFor(groups, requests, live) {
		regions = append(regions, &enginepb.Region{Group: groups[i].name, Blocks: blocks})
		s.pools = append(s.pools, newPool(blocks))
	}
	client, reply, err := greet(ctx, d.side, d.socket, regions)
	if err != nil {
		return nil, err
	}
	s.client = client
	if err := s.checkReply(reply); err != nil {
		client.Close()
		return nil, fmt.Errorf("attach to the %s's daemon at %s: %w", d.side, d.socket, err)
	}
	return s, nil
}

// checkReply refuses regions that do not fit the deployment: replay would write beside
// the blocks.
func (s *side) checkReply(r *enginepb.AttachReply) error {
	if r.HashTokens != s.daemon.deployment.HashTokens {
		return fmt.Errorf("its hash_tokens is %d, but its deployment says %d", r.HashTokens, s.daemon.deployment.HashTokens)
	}
	for i := range s.groups {
		g := &s.groups[i]
		region := s.client.Region(g.name)
		if region == nil {
			return fmt.Errorf("it gave no region for group %s", g.name)
		}
		if region.StrideBytes != g.rows*g.rowBytes {
			return fmt.Errorf("group %s: the blocks of its region have %d bytes, those of its deployment %d", g.name, region.StrideBytes, g.rows*g.rowBytes)
		}
	}
	return nil
}

// A refusal is a daemon's no to one call.
type refusal struct{ side, message string }

func (r *refusal) Error() string { return r.side + "'s daemon: " + r.message }

// lost marks the daemon as gone when err says so, and returns err in plain words.
func (s *side) lost(err error) error {
	if err == nil {
		return nil
	}
	st, fromDaemon := status.FromError(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded) || st.Code() == codes.DeadlineExceeded:
		err = fmt.Errorf("%s: %w", s.daemon.side, errStuck)
	case errors.Is(err, engine.ErrGone) || st.Code() == codes.Unavailable:
		err = fmt.Errorf("%s: %w", s.daemon.side, engine.ErrGone)
	case fromDaemon:
		return &refusal{s.daemon.side, st.Message()}
	default:
		return fmt.Errorf("%s: %w", s.daemon.side, err)
	}
	s.gone.CompareAndSwap(nil, &err)
	return err
}

// down returns why the daemon is not to be called any more, or nil.
func (s *side) down() error {
	if e := s.gone.Load(); e != nil {
		return *e
	}
	select {
	case <-s.client.Gone():
		return s.lost(engine.ErrGone)
	default:
		return nil
	}
}

// call runs one call with its deadline, unless the daemon is known to be gone.
func call[T any](ctx context.Context, s *side, f func(context.Context) (T, error)) (T, error) {
	var zero T
	if err := s.down(); err != nil {
		return zero, err
	}
	limited, cancel := context.WithTimeout(ctx, s.calls)
	defer cancel()
	v, err := f(limited)
	if err != nil && ctx.Err() != nil {
		return zero, ctx.Err()
	}
	return v, s.lost(err)
}

// wait returns the event of a job.
func (s *side) wait(ctx context.Context, job uint64) (*enginepb.Event, error) {
	limited, cancel := context.WithTimeout(ctx, s.waits)
	defer cancel()
	ev, err := s.client.Wait(limited, job)
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return ev, s.lost(err)
}

// blocksFor returns the size of each region: room for the longest of the requests
// that are live at the same time, and some for the native prefix cache.
func blocksFor(groups []group, requests []Request, live int) []uint32 {
	longest := make([]uint64, live)
	for i := range requests {
		n := requests[i].PromptTokens
		for j := range longest {
			if n > longest[j] {
				n, longest[j] = longest[j], n
			}
		}
	}
	out := make([]uint32, len(groups))
	for i := range groups {
		g := &groups[i]
		cache, total := uint64(fullCacheTokens), uint64(0)
		if g.window > 0 {
			cache = windowCacheTokens
		}
		for _, n := range longest {
			if g.window > 0 { // two steps in flight, the window, and the chunks it touches
				n = min(n, 2*stepTokens+2*g.window)
			}
			total += n/g.blockTokens + 1 + 4*g.chunkBlocks
		}
		out[i] = uint32(total + cache/g.blockTokens)
	}
	return out
}

// Room for the native prefix cache of one group: the last few prompts, and of a sliding
// window, of which most is never asked for again, less. It is small on purpose: a cache
// that held everything would leave nothing to pull.
const (
	fullCacheTokens   = 96 << 10
	windowCacheTokens = 16 << 10
)

// group returns a group by name, or nil.
func (s *side) group(name string) *group {
	for i := range s.groups {
		if s.groups[i].name == name {
			return &s.groups[i]
		}
	}
	return nil
}
