package engine

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/engine/enginepb"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a backend that records what it is asked, in order.
type fake struct {
	dir string

	mu       sync.Mutex
	log      []string
	attached int
	block    chan struct{} // jobs wait for it when set
	refuse   error         // of Store
}

func (f *fake) note(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, fmt.Sprintf(format, args...))
}

func (f *fake) lines() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.log...)
}

func (f *fake) Attach(_ context.Context, r *enginepb.AttachRequest) (Attachment, error) {
	f.mu.Lock()
	f.attached++
	path := filepath.Join(f.dir, fmt.Sprintf("region%d", f.attached))
	f.mu.Unlock()
	a := &fakeAttachment{f: f}
	for _, reg := range r.Regions {
		file, err := shm.Create(path+reg.Group, int64(reg.Blocks)*64, true)
		if err != nil {
			return nil, err
		}
		a.files = append(a.files, file)
		a.reply = append(a.reply, &enginepb.RegionReply{Group: reg.Group, Path: file.Path(), StrideBytes: 64, Blocks: reg.Blocks})
	}
	return a, nil
}

type fakeAttachment struct {
	f     *fake
	files []*shm.File
	reply []*enginepb.RegionReply
}

func (a *fakeAttachment) Reply() *enginepb.AttachReply {
	return &enginepb.AttachReply{Regions: a.reply, Verdict: "accepted", HashTokens: 16}
}

func (a *fakeAttachment) Begin(_ context.Context, r *enginepb.BeginRequest) (Request, *enginepb.BeginReply, error) {
	a.f.note("begin %s", r.RequestId)
	if strings.HasPrefix(r.RequestId, "bad") {
		return nil, nil, status.Error(codes.Unavailable, "backend says no")
	}
	return &fakeRequest{f: a.f, id: r.RequestId, interrupted: make(chan struct{})}, &enginepb.BeginReply{ReuseTokens: 48}, nil
}

func (a *fakeAttachment) Close() {
	for _, f := range a.files {
		f.Close()
	}
	a.f.note("detached")
}

type fakeRequest struct {
	f           *fake
	id          string
	once        sync.Once
	interrupted chan struct{}
}

func (r *fakeRequest) job(what string) Job {
	return func() *enginepb.Event {
		if b := r.f.block; b != nil {
			select {
			case <-b:
			case <-r.interrupted:
				return &enginepb.Event{Error: what + " interrupted"}
			}
		}
		r.f.note("%s %s", what, r.id)
		return &enginepb.Event{Ok: true, Error: what}
	}
}

func (r *fakeRequest) Store(s Step) (Job, error) {
	if r.f.refuse != nil {
		return nil, r.f.refuse
	}
	return r.job(fmt.Sprintf("store %d", s.Computed)), nil
}

func (r *fakeRequest) Load([]*enginepb.BlockRun, uint32) (Job, error) { return r.job("load"), nil }

func (r *fakeRequest) Interrupt(string) { r.once.Do(func() { close(r.interrupted) }) }

func (r *fakeRequest) Finish(f Finish) *enginepb.FinishReply {
	r.f.note("finish %s abort=%v computed=%d", r.id, f.Abort, f.Computed)
	return &enginepb.FinishReply{Groups: []*enginepb.GroupCount{{Group: "full", Demanded: f.Computed}}}
}

var testBounds = Bounds{EnginesMax: 2, RequestsMax: 3, JobsMax: 4, MessageBytesMax: 64 << 10, EventsWithin: 300 * time.Millisecond}

var testLimits = Limits{
	MaxTokens: 1024, HashTokens: 16, Roles: []string{"producer", "consumer"}, Legs: []string{"pd", "demand", "probe"},
	Groups: []GroupLimits{
		{Name: "sliding", BlockTokens: 16, BlockBytes: 64, ChunkBlocks: 2}, {Name: "full", BlockTokens: 16, BlockBytes: 64, ChunkBlocks: 2},
		{Name: "none", BlockTokens: 16, BlockBytes: 64, ChunkBlocks: 2},
	},
}

// start serves a fake backend and returns its socket.
func start(t *testing.T, l Limits) (*fake, *Server, string) {
	t.Helper()
	dir := t.TempDir()
	f := &fake{dir: dir}
	sock := filepath.Join(dir, "e.sock")
	ln, err := Listen(sock)
	require.NoError(t, err)
	s := NewServer(f, &l, testBounds, slog.New(slog.DiscardHandler))
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		s.Close(ctx)
		require.NoError(t, <-done)
		require.NoError(t, ln.Close())
	})
	return f, s, sock
}

func ctxFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

var regions = []*enginepb.Region{{Group: "sliding", Blocks: 8}, {Group: "full", Blocks: 8}}

func attach(t *testing.T, sock string) *Client {
	t.Helper()
	c, err := Dial(ctxFor(t), sock)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	reply, err := c.Attach(ctxFor(t), "test", nil, regions)
	require.NoError(t, err)
	require.NotEmpty(t, reply.EngineId)
	return c
}

// begin is a valid producer request of 64 tokens; edit changes it.
func begin(id string, edit ...func(*enginepb.BeginRequest)) *enginepb.BeginRequest {
	r := &enginepb.BeginRequest{
		RequestId: id, PromptTokens: 64, HashBytes: 16, Hashes: make([]byte, 4*16),
		Role: enginepb.Role_PRODUCER, Leg: enginepb.Leg_PD, TransferId: "t" + id,
	}
	for _, e := range edit {
		e(r)
	}
	return r
}

func consumer(r *enginepb.BeginRequest) { r.Role = enginepb.Role_CONSUMER }

func TestJobsRunInOrderAndEndOnce(t *testing.T) {
	f, _, sock := start(t, testLimits)
	c := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("r"))
	require.NoError(t, err)
	var jobs []uint64
	for _, n := range []uint64{16, 16, 48} {
		j, err := c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: n})
		require.NoError(t, err)
		jobs = append(jobs, j)
	}
	for _, j := range jobs {
		ev, err := c.Wait(ctxFor(t), j)
		require.NoError(t, err)
		require.True(t, ev.Ok)
		require.Equal(t, "r", ev.RequestId)
	}
	reply, err := c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "r", ComputedTokens: 48})
	require.NoError(t, err)
	require.Equal(t, uint64(48), reply.Groups[0].Demanded)
	require.Equal(t, []string{"begin r", "store 16 r", "store 16 r", "store 48 r", "finish r abort=false computed=48"}, f.lines())

	_, err = c.Begin(ctxFor(t), begin("r")) // the id is free again
	require.NoError(t, err)
}

func TestClosedStreamIsTheLastWord(t *testing.T) {
	f, s, sock := start(t, testLimits)
	f.block = make(chan struct{})
	c := attach(t, sock)
	other := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("r"))
	require.NoError(t, err)
	job, err := c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: 16})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { n, _ := s.Counts(); return n == 1 }, 5*time.Second, time.Millisecond)
	require.Equal(t, []string{"begin r", "finish r abort=true computed=16", "detached"}, f.lines())
	_, err = c.Wait(ctxFor(t), job)
	require.ErrorIs(t, err, ErrGone)
	_, err = other.Begin(ctxFor(t), begin("r")) // another engine's request is another request
	require.NoError(t, err)
}

func TestAbortInterruptsAJob(t *testing.T) {
	f, _, sock := start(t, testLimits)
	f.block = make(chan struct{})
	c := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("r"))
	require.NoError(t, err)
	job, err := c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: 16})
	require.NoError(t, err)
	_, err = c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: "r", Abort: true})
	require.NoError(t, err)
	ev, err := c.Wait(ctxFor(t), job)
	require.NoError(t, err)
	require.Equal(t, "store 16 interrupted", ev.Error)
}

func TestServerCloseEndsEverything(t *testing.T) {
	f, s, sock := start(t, testLimits)
	f.block = make(chan struct{})
	c := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("r"))
	require.NoError(t, err)
	job, err := c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: 16})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	s.Close(ctx)
	ev, err := c.Wait(ctxFor(t), job) // the event of an accepted job still comes
	require.NoError(t, err)
	require.False(t, ev.Ok)
	<-c.Gone()
	_, err = c.Begin(ctxFor(t), begin("s"))
	require.Error(t, err)
	require.Contains(t, f.lines(), "detached")
}

func TestAnEngineWithoutEventsIsGone(t *testing.T) {
	_, s, sock := start(t, testLimits)
	c, err := Dial(ctxFor(t), sock)
	require.NoError(t, err)
	defer c.Close()
	reply, err := c.rpc.Attach(ctxFor(t), &enginepb.AttachRequest{})
	require.NoError(t, err)
	_, err = c.rpc.Begin(ctxFor(t), func() *enginepb.BeginRequest { r := begin("r"); r.EngineId = reply.EngineId; return r }())
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.Eventually(t, func() bool { n, _ := s.Counts(); return n == 0 }, 5*time.Second, time.Millisecond)
}

// TestRefusals holds the code and text of every refusal against a golden file.
func TestRefusals(t *testing.T) {
	f, _, sock := start(t, testLimits)
	ctx := ctxFor(t)
	c := attach(t, sock)
	type B = enginepb.BeginRequest
	beginErr := func(edit func(*B)) error { _, err := c.Begin(ctx, begin("x", edit)); return err }
	storeErr := func(m *enginepb.StoreRequest) error {
		if m.RequestId == "" {
			m.RequestId = "p"
		}
		_, err := c.Store(ctx, m)
		return err
	}
	loadErr := func(m *enginepb.LoadRequest) error { _, err := c.Load(ctx, m); return err }
	finishErr := func(m *enginepb.FinishRequest) error { _, err := c.Finish(ctx, m); return err }
	attachErr := func(regions ...*enginepb.Region) error {
		e, err := Dial(ctx, sock)
		require.NoError(t, err)
		defer e.Close()
		_, err = e.Attach(ctx, "e", nil, regions)
		return err
	}
	blocks := func(group string, first uint32, ids ...uint32) []*enginepb.BlockRun {
		return []*enginepb.BlockRun{{Group: group, FirstBlock: first, Ids: ids}}
	}

	_, err := c.Begin(ctx, begin("p"))
	require.NoError(t, err)
	require.NoError(t, storeErr(&enginepb.StoreRequest{ComputedTokens: 32}))
	_, err = c.Begin(ctx, begin("fresh"))
	require.NoError(t, err)
	_, err = c.Begin(ctx, begin("c", consumer))
	require.NoError(t, err)

	cases := []struct {
		name string
		err  error
	}{
		{"attach unknown group", attachErr(&enginepb.Region{Group: "slidin", Blocks: 1})},
		{"attach group twice", attachErr(&enginepb.Region{Group: "full", Blocks: 1}, &enginepb.Region{Group: "full", Blocks: 1})},
		{"attach no blocks", attachErr(&enginepb.Region{Group: "full"})},
		{"no request id", beginErr(func(r *B) { r.RequestId = "" })},
		{"duplicate request id", beginErr(func(r *B) { r.RequestId = "p" })},
		{"long id", beginErr(func(r *B) { r.PeerId = strings.Repeat("p", 257) })},
		{"long salt", beginErr(func(r *B) { r.TenantSalt = make([]byte, 257) })},
		{"empty prompt", beginErr(func(r *B) { r.PromptTokens = 0 })},
		{"long prompt", beginErr(func(r *B) { r.PromptTokens = 1025 })},
		{"long deadline", beginErr(func(r *B) { r.DeadlineMs = 600_001 })},
		{"hash too short", beginErr(func(r *B) { r.HashBytes = 15 })},
		{"hash too long", beginErr(func(r *B) { r.HashBytes = 33 })},
		{"hashes no whole number", beginErr(func(r *B) { r.Hashes = make([]byte, 63) })},
		{"too few hashes", beginErr(func(r *B) { r.Hashes = make([]byte, 48) })},
		{"no role", beginErr(func(r *B) { r.Role = 0 })},
		{"no leg", beginErr(func(r *B) { r.Leg = 0 })},
		{"pd without transfer_id", beginErr(func(r *B) { r.TransferId = "" })},
		{"demand without transfer_id", beginErr(func(r *B) { r.Leg = enginepb.Leg_DEMAND; r.TransferId = "" })},
		{"store cap in pd", beginErr(func(r *B) { r.MaxStoreTokens = 32 })},
		{"producer with local_tokens", beginErr(func(r *B) { r.LocalTokens = 1 })},
		{"producer with max_load_tokens", beginErr(func(r *B) { r.MaxLoadTokens = 1 })},
		{"consumer with junction_tokens", beginErr(func(r *B) { consumer(r); r.JunctionTokens = 1 })},
		{"consumer with store cap", beginErr(func(r *B) { consumer(r); r.Leg = enginepb.Leg_PROBE; r.MaxStoreTokens = 1 })},
		{"local above prompt", beginErr(func(r *B) { consumer(r); r.LocalTokens = 65 })},
		{"junction above prompt", beginErr(func(r *B) { r.JunctionTokens = 65 })},
		{"too many requests", beginErr(func(*B) {})},
		{"store for unknown request", storeErr(&enginepb.StoreRequest{RequestId: "nobody"})},
		{"store for a consumer", storeErr(&enginepb.StoreRequest{RequestId: "c"})},
		{"computed goes back", storeErr(&enginepb.StoreRequest{ComputedTokens: 31})},
		{"native in a later store", storeErr(&enginepb.StoreRequest{ComputedTokens: 32, NativeTokens: 1})},
		{"native above reuse", storeErr(&enginepb.StoreRequest{RequestId: "fresh", ComputedTokens: 64, NativeTokens: 49})},
		{"native above computed", storeErr(&enginepb.StoreRequest{RequestId: "fresh", ComputedTokens: 16, NativeTokens: 32})},
		{"more_hashes no whole number", storeErr(&enginepb.StoreRequest{ComputedTokens: 80, MoreHashes: make([]byte, 17)})},
		{"more_hashes missing", storeErr(&enginepb.StoreRequest{ComputedTokens: 80})},
		{"more_hashes too early", storeErr(&enginepb.StoreRequest{ComputedTokens: 64, MoreHashes: make([]byte, 16)})},
		{"store unknown group", storeErr(&enginepb.StoreRequest{ComputedTokens: 48, Blocks: blocks("x", 0, 1)})},
		{"store group without region", storeErr(&enginepb.StoreRequest{ComputedTokens: 48, Blocks: blocks("none", 0, 1)})},
		{"block id out of range", storeErr(&enginepb.StoreRequest{ComputedTokens: 48, Blocks: blocks("full", 2, 7, 8)})},
		{"logical block out of range", storeErr(&enginepb.StoreRequest{ComputedTokens: 48, Blocks: blocks("full", 1<<31, 1)})},
		{"computed too high", storeErr(&enginepb.StoreRequest{ComputedTokens: 1<<31 + 1})},
		{"load for a producer", loadErr(&enginepb.LoadRequest{RequestId: "p"})},
		{"load one block twice", loadErr(&enginepb.LoadRequest{RequestId: "c", Blocks: blocks("full", 0, 3, 3)})},
		{"finish with other tokens", finishErr(&enginepb.FinishRequest{RequestId: "p", ComputedTokens: 48})},
		{"finish unknown request", finishErr(&enginepb.FinishRequest{RequestId: "nobody"})},
		{"oversized message", beginErr(func(r *B) { r.TenantSalt = make([]byte, 65<<10) })},
	}
	require.NoError(t, loadErr(&enginepb.LoadRequest{RequestId: "c"}))
	cases = append(cases, struct {
		name string
		err  error
	}{"second load", loadErr(&enginepb.LoadRequest{RequestId: "c"})})
	attach(t, sock)
	cases = append(cases, struct {
		name string
		err  error
	}{"too many engines", attachErr()})
	f.refuse = errors.New("rule failed")
	cases = append(cases, struct {
		name string
		err  error
	}{"backend fails", storeErr(&enginepb.StoreRequest{ComputedTokens: 48})})

	var got strings.Builder
	for _, c := range cases {
		require.Error(t, c.err, c.name)
		st := status.Convert(c.err)
		fmt.Fprintf(&got, "%s\n    %v: %s\n", c.name, st.Code(), st.Message())
	}
	golden(t, "testdata/refusals.txt", got.String())
	for _, l := range f.lines() {
		require.NotContains(t, l, " x", "a refused message reached the backend")
	}
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func TestRolesAndLegsOfTheDeployment(t *testing.T) {
	l := testLimits
	l.Roles, l.Legs = []string{"consumer"}, []string{"probe"}
	_, _, sock := start(t, l)
	c := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("x"))
	require.ErrorContains(t, err, "role is producer, but the deployment was checked for roles consumer")
	_, err = c.Begin(ctxFor(t), begin("x", consumer))
	require.ErrorContains(t, err, "leg is pd, but the deployment was checked for legs probe")
}

func TestTooManyJobs(t *testing.T) {
	f, _, sock := start(t, testLimits)
	f.block = make(chan struct{})
	c := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("r"))
	require.NoError(t, err)
	var last uint64
	for range testBounds.JobsMax {
		last, err = c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: 16})
		require.NoError(t, err)
	}
	_, err = c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: 16})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	close(f.block)
	_, err = c.Wait(ctxFor(t), last)
	require.NoError(t, err)
	_, err = c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: "r", ComputedTokens: 16})
	require.NoError(t, err)
}

func TestAFailedBeginFreesItsID(t *testing.T) {
	_, _, sock := start(t, testLimits)
	c := attach(t, sock)
	for range 2 {
		_, err := c.Begin(ctxFor(t), begin("bad"))
		require.Equal(t, codes.Unavailable, status.Code(err))
	}
}

func TestGarbageOnTheSocket(t *testing.T) {
	_, _, sock := start(t, testLimits)
	for _, garbage := range []string{"GET / HTTP/1.1\r\n\r\n", strings.Repeat("\x00\xff", 4096), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff"} {
		conn, err := net.Dial("unix", sock)
		require.NoError(t, err)
		_, _ = conn.Write([]byte(garbage))
		conn.Close()
	}
	c := attach(t, sock)
	_, err := c.Begin(ctxFor(t), begin("r"))
	require.NoError(t, err)
}

func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "e.sock")
	s, err := Listen(path)
	require.NoError(t, err)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), st.Mode().Perm())

	_, err = Listen(path)
	require.ErrorIs(t, err, ErrLiveSocket)
	require.ErrorContains(t, err, fmt.Sprintf("(process %d has the lock %s.lock); stop that daemon or choose another engine_socket", os.Getpid(), path))
	require.NoError(t, s.Close())
	for _, left := range []string{path, path + ".lock"} {
		_, err = os.Stat(left)
		require.ErrorIs(t, err, fs.ErrNotExist)
	}

	// A daemon that was killed leaves its socket.
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close())
	s, err = Listen(path)
	require.NoError(t, err)
	require.NoError(t, s.Close())

	// Another program that listens there is left alone.
	live, err := net.Listen("unix", path)
	require.NoError(t, err)
	_, err = Listen(path)
	require.ErrorIs(t, err, ErrLiveSocket)
	require.NoError(t, live.Close())

	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = Listen(path)
	require.ErrorContains(t, err, "is no socket")
}

func TestCredentials(t *testing.T) {
	path := filepath.Join(t.TempDir(), "e.sock")
	s, err := Listen(path)
	require.NoError(t, err)
	defer s.Close()
	go func() {
		if c, err := net.Dial("unix", path); err == nil {
			defer c.Close()
			var b [1]byte
			_, _ = c.Read(b[:])
		}
	}()
	conn, err := s.Accept()
	require.NoError(t, err)
	defer conn.Close()
	me := uint32(os.Geteuid())
	_, info, err := peerCredentials{uid: me}.ServerHandshake(conn)
	require.NoError(t, err)
	require.Equal(t, int32(os.Getpid()), info.(Process).PID)
	if me != 0 {
		_, _, err = peerCredentials{uid: me + 1}.ServerHandshake(conn)
		require.ErrorContains(t, err, "is not allowed")
	}
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	_, _, err = peerCredentials{uid: me}.ServerHandshake(a)
	require.ErrorContains(t, err, "only a Unix socket")
}

func TestRegionsAreShared(t *testing.T) {
	_, _, sock := start(t, testLimits)
	c := attach(t, sock)
	r := c.Region("full")
	require.NotNil(t, r)
	require.Nil(t, c.Region("none"))
	copy(r.Block(3), "hello")
	m, err := shm.Map(r.mappingPath(t, sock), 3*64, 5)
	require.NoError(t, err)
	defer m.Close()
	require.Equal(t, "hello", string(m.Bytes()))
}

// mappingPath finds the fake backend's file of the group.
func (r *Region) mappingPath(t *testing.T, sock string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(filepath.Dir(sock), "region*"+r.Group))
	require.NoError(t, err)
	require.Len(t, found, 1)
	return found[0]
}
