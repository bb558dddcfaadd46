package faults

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/replay"
)

// shortFreeze is how long a source is frozen in a given phase: until long after it is dead.
const shortFreeze = 3 * time.Second

// longTokens is the length of a request whose bytes take long enough to be met on their way.
const longTokens = 60 << 10

// long is a request of longTokens.
var long = sync.OnceValue(func() *replay.Request {
	r := &replay.Request{PromptTokens: longTokens}
	for i := range uint64(longTokens / 512) {
		r.IDs = append(r.IDs, 1<<40+i)
	}
	return r
})

// lone is a request beside the traffic, which names a.
type lone struct {
	*record
	turn replay.Turn
	done chan struct{}
}

func (p *play) lone(what string, r *replay.Request) *lone {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := fmt.Sprintf("%s-%s-%d", p.name, what, len(p.records))
	return &lone{record: &record{id: id, source: "a"}, done: make(chan struct{}),
		turn: replay.Turn{ID: id, Salt: id, Request: r, Leg: p.leg, Peer: "a", Deadline: p.deadline}}
}

// store computes the request at a.
func (l *lone) store(c *cluster) {
	c.t.Helper()
	t := l.turn
	t.Peer = "c"
	require.NoError(c.t, c.sources["a"].engine.Load().Produce(context.Background(), &t))
}

// consume begins the request at the consumer. It is one of the play's.
func (l *lone) consume(p *play) {
	p.wg.Go(func() {
		defer close(l.done)
		l.out, l.err = p.c.engine.Consume(context.Background(), &l.turn)
		if l.err != nil {
			l.out = &replay.Outcome{Began: time.Now()}
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.records = append(p.records, l.record)
	})
}

// freezeHello: the consumer learns of a while that is frozen, so that its connection is
// taken by the kernel, and no Hello comes.
func freezeHello(c *cluster, _ *play, f *fault) {
	c.c.reload(peer{"b", c.b.control})
	await(c.t, "a removed", func() bool { return c.c.peer("a").ID == "" || !c.c.peer("a").Configured })
	c.a.signal(syscall.SIGSTOP)
	// The session that a itself had dialed would go on as one of a peer that is not configured.
	await(c.t, "a forgotten", func() bool { p := c.c.peer("a"); return p.ID == "" || p.State == "dead" })
	c.c.reload(peer{"a", c.a.control}, peer{"b", c.b.control})
	await(c.t, "a configured", func() bool { return c.c.peer("a").Configured })
	f.at = time.Now()
	await(c.t, "a suspect", func() bool { return c.c.peer("a").State == "suspect" })
	f.detected = time.Now()
	s := c.c.peer("a")
	require.Zero(c.t, s.Sessions)
	require.Contains(c.t, s.Reason, "no session")
	f.note = "sessions 0, " + s.Reason
	c.thaw(f, shortFreeze)
}

// freezeLookup: a lookup is sent to a while it is frozen and not yet suspect.
func freezeLookup(c *cluster, p *play, f *fault) {
	l := p.lone("lookup", &trace()[0])
	l.store(c)
	c.a.signal(syscall.SIGSTOP)
	f.at = time.Now()
	l.consume(p)
	c.detect(f)
	<-l.done
	require.NoError(c.t, l.err)
	require.Contains(c.t, l.out.Detail, "lookup at peer a")
	f.note = fmt.Sprintf("after %s ms: %s", ms(l.out.Took), l.out.Detail)
	c.thaw(f, shortFreeze)
}

// freezeDemand: a demand for what a has not begun waits there.
func freezeDemand(c *cluster, p *play, f *fault) {
	l := p.lone("demand", &trace()[0])
	l.consume(p)
	time.Sleep(200 * time.Millisecond) // thousands of round trips
	require.Positive(c.t, c.c.peer("a").Demands, "c waits")
	require.Positive(c.t, c.a.peer("c").Serves, "and a has taken the demand")
	c.a.signal(syscall.SIGSTOP)
	f.at = time.Now()
	c.detect(f)
	<-l.done
	require.NoError(c.t, l.err)
	require.Equal(c.t, "peer", l.out.Cause)
	require.True(c.t, l.out.Began.Before(f.at) && l.end().After(f.at), "it waited at the freeze")
	f.note = fmt.Sprintf("begun %s ms before the freeze and ended %s ms after it: %s", ms(f.at.Sub(l.out.Began)), ms(l.end().Sub(f.at)), l.out.Detail)
	c.thaw(f, shortFreeze)
}

// freezeTransfer: some of a long request's bytes are there, and some are not.
func freezeTransfer(c *cluster, p *play, f *fault) {
	const tries = 20
	const bytes = "tierd_kv_offload_tiering_read_bytes_total"
	const some = longTokens * 512 / 8
	for range tries {
		l := p.lone("transfer", long())
		l.store(c)
		before := c.c.metric(bytes)
		l.consume(p)
		for c.c.metric(bytes) < before+some {
		}
		c.a.signal(syscall.SIGSTOP)
		f.at = time.Now()
		select {
		case <-l.done: // it was faster
			c.a.signal(syscall.SIGCONT)
			require.NoError(c.t, l.err)
			continue
		case <-time.After(100 * time.Millisecond):
		}
		c.detect(f)
		<-l.done
		require.NoError(c.t, l.err)
		// Silence, or the time for so many bytes, which may be over earlier.
		require.Contains(c.t, []string{"peer", "deadline"}, l.out.Cause, l.out.Detail)
		require.Positive(c.t, l.out.Transferred)
		require.NotEmpty(c.t, l.out.Failed)
		f.note = fmt.Sprintf("%d chunks had come and %d were missing: %s", l.out.Transferred, len(l.out.Failed), strings.ReplaceAll(l.out.Detail, "\n", " "))
		c.thaw(f, shortFreeze)
		return
	}
	c.t.Fatalf("in %d tries the bytes were there before the freeze", tries)
}
