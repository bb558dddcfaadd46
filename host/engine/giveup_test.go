package engine

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// slow is a backend whose calls wait: each says on in that it has begun, and goes on with
// out or, but for Attach, with its context.
type slow struct {
	Backend
	attach  bool
	in, out chan struct{}
}

func makeSlow(b Backend, attach bool) slow {
	return slow{b, attach, make(chan struct{}, 1), make(chan struct{})}
}

func (b slow) Attach(ctx context.Context, r *enginepb.AttachRequest) (Attachment, error) {
	if b.attach {
		b.in <- struct{}{}
		<-b.out
	}
	a, err := b.Backend.Attach(ctx, r)
	return slowAttachment{a, b}, err
}

type slowAttachment struct {
	Attachment
	b slow
}

func (a slowAttachment) Begin(ctx context.Context, r *enginepb.BeginRequest) (Request, *enginepb.BeginReply, error) {
	if a.b.attach {
		return a.Attachment.Begin(ctx, r)
	}
	a.b.in <- struct{}{}
	select {
	case <-a.b.out:
		return a.Attachment.Begin(ctx, r)
	case <-ctx.Done():
	}
	if r.RequestId == "stubborn" { // it had its plan already
		return a.Attachment.Begin(ctx, r)
	}
	return nil, nil, status.FromContextError(ctx.Err()).Err()
}

// TestCloseWhileAttaching: the daemon stops while an engine's regions are being made,
// which takes seconds when they are large. The attachment is undone, and Close ends.
func TestCloseWhileAttaching(t *testing.T) {
	f, s, sock := start(t, testLimits)
	b := makeSlow(f, true)
	s.backend = b
	c, err := Dial(ctxFor(t), sock)
	require.NoError(t, err)
	attached := make(chan error, 1)
	go func() {
		_, err := c.Attach(context.Background(), "slow", nil, regions)
		attached <- err
	}()
	<-b.in
	closed := make(chan struct{})
	go func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		s.Close(ctx)
		close(closed)
	}()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.draining
	}, 10*time.Second, time.Millisecond)
	close(b.out)
	require.Equal(t, codes.Unavailable, status.Code(<-attached))
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		require.Fail(t, "Close waits for an engine that nobody ends")
	}
	require.Contains(t, f.lines(), "detached")
	require.NoError(t, c.Close())
}

// TestBeginGivenUp: whenever a caller of Begin gives up (before the daemon hears of it,
// while it plans, when the reply is on its way), nothing of the request stays live, and
// its id is free at once.
func TestBeginGivenUp(t *testing.T) {
	f, s, sock := start(t, testLimits)
	c := attach(t, sock)
	live := 0
	const tries, longest = 1000, 2 * time.Millisecond
	for i := range tries {
		ctx, cancel := context.WithTimeout(context.Background(), longest*time.Duration(i)/tries)
		id := fmt.Sprint("r", i%2)
		_, err := c.Begin(ctx, begin(id, func(b *enginepb.BeginRequest) {
			if i%2 == 0 {
				consumer(b)
			}
		}))
		cancel()
		if err == nil {
			live++
			_, err = c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: id})
			require.NoError(t, err)
			continue
		}
		require.Contains(t, []codes.Code{codes.DeadlineExceeded, codes.Canceled}, status.Code(err), "%v", err)
		require.Eventually(t, func() bool { _, n := s.Counts(); return n == 0 }, 10*time.Second, 100*time.Microsecond)
	}
	t.Logf("%d of %d begins ended in time", live, tries)
	begins, ends := 0, 0
	for _, l := range f.lines() {
		switch l[:5] {
		case "begin":
			begins++
		case "finis":
			ends++
		}
	}
	require.Equal(t, begins, ends, "each request of the backend had one end")
}

// TestFinishOfARequestInBegin: the word of an engine that has lost its call cancels it,
// whether or not the backend still comes back with a request.
func TestFinishOfARequestInBegin(t *testing.T) {
	f, s, sock := start(t, testLimits)
	b := makeSlow(f, false)
	s.backend = b
	c := attach(t, sock)
	for _, id := range []string{"prompt", "stubborn"} {
		begun := make(chan error, 1)
		go func() {
			_, err := c.rpc.Begin(context.Background(), begin(id, func(r *enginepb.BeginRequest) { r.EngineId = c.engineID() }))
			begun <- err
		}()
		<-b.in
		_, err := c.Store(ctxFor(t), &enginepb.StoreRequest{RequestId: id, ComputedTokens: 16})
		require.Equal(t, codes.NotFound, status.Code(err), "it is not live yet")
		_, err = c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: id, Abort: true})
		require.NoError(t, err)
		_, n := s.Counts()
		require.Zero(t, n)
		require.Equal(t, codes.Canceled, status.Code(<-begun))
	}
	require.Equal(t, []string{"begin stubborn", "finish stubborn abort=true computed=0"}, f.lines())
}
