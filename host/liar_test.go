package host

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/host/transfer"
)

// A liar is a peer that speaks the protocol and says what is not true.
type liar struct {
	sessionpb.UnimplementedPeerServer
	hello *sessionpb.Hello
	data  *transfer.Server
	token transfer.Token

	mu     sync.Mutex
	demand lie
	told   int
	wg     sync.WaitGroup
}

// A lie is what a liar does with a demand.
type lie func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand)

// tell sets the lie, and returns how many were told of the ones before.
func (l *liar) tell(f lie) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	told := l.told
	l.demand, l.told = f, 0
	return told
}

// Session implements the peers' service: every lookup is a hit.
func (l *liar) Session(st grpc.BidiStreamingServer[sessionpb.Envelope, sessionpb.Envelope]) error {
	var mu sync.Mutex
	send := func(e *sessionpb.Envelope) {
		mu.Lock()
		defer mu.Unlock()
		_ = st.Send(e)
	}
	send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: l.hello}})
	for {
		m, err := st.Recv()
		if err != nil {
			return nil
		}
		switch m := m.Message.(type) {
		case *sessionpb.Envelope_Ping:
			send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Pong{Pong: &sessionpb.Pong{Seq: m.Ping.Seq}}})
		case *sessionpb.Envelope_Demand:
			l.mu.Lock()
			f := l.demand
			l.told++
			l.mu.Unlock()
			if f != nil {
				l.wg.Go(func() { f(l, send, m.Demand) })
			}
		case *sessionpb.Envelope_Lookup:
			n := len(m.Lookup.Keys) / tier.KeyBytes
			send(&sessionpb.Envelope{Message: &sessionpb.Envelope_States{States: &sessionpb.States{Job: m.Lookup.Job, States: allHit(n)}}})
		}
	}
}

func allHit(n int) []byte {
	b := make([]byte, (n+31)/32*8)
	for i := range n {
		b[i/4] |= 1 << (i % 4 * 2)
	}
	return b
}

func supplyOf(job uint64, available []uint32, last bool, refused ...*sessionpb.Refused) *sessionpb.Envelope {
	return &sessionpb.Envelope{Message: &sessionpb.Envelope_Supply{Supply: &sessionpb.Supply{Job: job, Available: available, Refused: refused, Last: last}}}
}

func willComeOf(job uint64, keys ...uint32) *sessionpb.Envelope {
	return &sessionpb.Envelope{Message: &sessionpb.Envelope_Supply{Supply: &sessionpb.Supply{Job: job, WillCome: keys}}}
}

func doneOf(job uint64, codes []sessionpb.Code) *sessionpb.Envelope {
	return &sessionpb.Envelope{Message: &sessionpb.Envelope_Done{Done: &sessionpb.Done{Job: job, Codes: codes}}}
}

func indices(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

// push sends bytes for every slot of a demand, under any job: with wrong checksums, or cut
// short.
func (l *liar) push(d *sessionpb.Demand, job uint64, bad bool, cut int) {
	var items []transfer.Item
	for i := range d.Slots {
		size := chunkBlocks["sliding"] * blockBytes
		if d.Keys[(i+1)*tier.KeyBytes-1] == 1 {
			size = chunkBlocks["full"] * blockBytes
		}
		b := make([]byte, size-cut)
		it := transfer.Item{Slot: d.Slots[i], Epoch: d.Epochs[i], Seq: uint32(i), Bytes: b, Sum: tier.Checksum(b)}
		if bad {
			it.Sum++
		}
		items = append(items, it)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = l.data.Push(ctx, l.token, job, items, nil)
}

var lies = map[string]lie{
	"silence": func(*liar, func(*sessionpb.Envelope), *sessionpb.Demand) {},
	"supply without bytes": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, indices(len(d.Slots)), true))
	},
	"a promise that is not kept": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(willComeOf(d.Job, indices(len(d.Slots))...))
	},
	"a promise out of range": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(willComeOf(d.Job, 1<<31))
	},
	"a promise, broken key by key": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(willComeOf(d.Job, indices(len(d.Slots))...))
		for i := range d.Slots {
			send(supplyOf(d.Job, nil, false, &sessionpb.Refused{Indices: []uint32{uint32(i)}, Reason: sessionpb.Reason_REASON_NO_ROOM}))
		}
	},
	"renewals of what it never asked for": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Renew{Renew: &sessionpb.Renew{Jobs: []uint64{d.Job}}}})
	},
	"supply of an unknown job": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job+1<<40, indices(3), true))
	},
	"supply out of range": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, []uint32{1 << 31}, true))
	},
	"one key supplied a million times": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, make([]uint32, 1_000_000), false))
		send(supplyOf(d.Job, nil, true))
	},
	"a hundred thousand refusals": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		var rs []*sessionpb.Refused
		for i := range 100_000 {
			rs = append(rs, &sessionpb.Refused{Indices: []uint32{uint32(i % len(d.Slots))}, Reason: sessionpb.Reason(i), Text: "x"})
		}
		send(supplyOf(d.Job, nil, false, rs...))
	},
	"available and refused": func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, indices(len(d.Slots)), true, &sessionpb.Refused{Indices: indices(len(d.Slots)), Reason: 1}))
		l.push(d, d.Job, false, 0)
	},
	"done with too few codes": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(doneOf(d.Job, make([]sessionpb.Code, 1)))
	},
	"done, all sent, no bytes": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		codes := make([]sessionpb.Code, len(d.Slots))
		for i := range codes {
			codes[i] = sessionpb.Code_CODE_SENT
		}
		send(doneOf(d.Job, codes))
	},
	"wrong checksums": func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, indices(len(d.Slots)), true))
		l.push(d, d.Job, true, 0)
		l.push(d, d.Job, true, 0)
	},
	"short frames": func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, indices(len(d.Slots)), true))
		l.push(d, d.Job, false, 4)
	},
	"right and wrong at once": func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, indices(len(d.Slots)), true))
		var wg sync.WaitGroup
		for k := range 6 {
			wg.Go(func() { l.push(d, d.Job, k%2 == 1, 0) })
		}
		wg.Wait()
	},
	"bytes after the last word": func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(supplyOf(d.Job, nil, true))
		time.Sleep(20 * time.Millisecond)
		l.push(d, d.Job, false, 0)
		l.push(d, d.Job+1, false, 0)
	},
	"abort of our job": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Abort{Abort: &sessionpb.Abort{Job: d.Job}}})
	},
	"second hello": func(l *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: l.hello}})
	},
	"hello refused late": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(&sessionpb.Envelope{Message: &sessionpb.Envelope_HelloRefused{HelloRefused: &sessionpb.HelloRefused{Reason: "x"}}})
	},
	"goaway": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) {
		send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Goaway{Goaway: &sessionpb.Goaway{Reason: "x"}}})
		time.Sleep(20 * time.Millisecond)
		send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Ping{Ping: &sessionpb.Ping{BootId: 99}}}) // breaks the protocol: the session is made anew
	},
	"nothing in a message": func(_ *liar, send func(*sessionpb.Envelope), d *sessionpb.Demand) { send(&sessionpb.Envelope{}) },
}

// TestLiarProducer: whatever a peer answers to a demand, the request ends in time, what is
// missing is named, and nothing stays held.
func TestLiarProducer(t *testing.T) {
	t.Parallel()
	data, err := transfer.Listen(context.Background(), "127.0.0.1:0", transfer.Options{})
	require.NoError(t, err)
	defer data.Close()
	l := &liar{data: data, token: transfer.Token{1, 2, 3}}
	defer l.wg.Wait()
	data.Register(l.token)
	l.hello = helloAs(t, startNode(t, "producer"), "producer", data.Addr().String())
	l.hello.DataToken = l.token[:]
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	srv := grpc.NewServer(grpc.MaxRecvMsgSize(8 << 20))
	sessionpb.RegisterPeerServer(srv, l)
	l.wg.Go(func() { _ = srv.Serve(lis) })
	defer srv.Stop()
	const limit = 300 // ms
	consumer := startNode(t, "consumer", withPeer("producer", lis.Addr().String()), func(c *config.Config) {
		c.Deadlines.TransferMS, c.Deadlines.RequestMS = limit/3, limit
	})
	c := attach(t, consumer)
	heard := 0
	for name, f := range lies {
		for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND, enginepb.Leg_PROBE} {
			id := fmt.Sprintf("%s, %v", name, leg)
			t.Run(id, func(t *testing.T) {
				ready(t, consumer, "producer")
				l.tell(f)
				c.fresh()
				x := text{id, 300}
				var reply *enginepb.BeginReply
				require.Eventually(t, func() bool { // the lie before may just have ended the session
					var err error
					reply, err = c.c.Begin(ctxFor(t), c.request(id, x, enginepb.Role_CONSUMER, leg))
					require.NoError(t, err)
					if reply.Note == "" {
						return true
					}
					_, err = c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: id})
					require.NoError(t, err)
					return false
				}, 30*time.Second, time.Millisecond)
				r := &consuming{e: c, id: id, x: x, reply: reply, tables: map[string]map[int]uint32{}}
				began := time.Now()
				ev, err := c.c.Wait(ctxFor(t), r.startLoad()) // nothing to compare: the bytes are lies
				require.NoError(t, err)
				t.Logf("ended after %v, the limit is %d ms: %v", time.Since(began), limit, causes(ev))
				require.Less(t, time.Since(began), limit*time.Millisecond+backstopGrace, "the backstop ended it")
				require.Equal(t, ev.Ok, len(ev.Failures) == 0)
				for _, f := range ev.Failures {
					require.NotEmpty(t, f.Detail)
				}
				reply2 := r.finish()
				for _, g := range reply2.Groups {
					require.Equal(t, g.Demanded, g.Transferred+g.Unmatched)
				}
				clean(t, consumer)
				heard += l.tell(nil)
			})
		}
	}
	require.Greater(t, heard, len(lies), "nearly every lie was asked for")
}

// TestLiarConsumer: a consumer that says anything, restarts in the middle of it and asks
// for others' transfers costs an honest one nothing but what it took.
func TestLiarConsumer(t *testing.T) {
	t.Parallel()
	producer, consumer := pair(t)
	b := dialByHand(t, producer, "liar", closedPort(t))
	p, c := attach(t, producer), attach(t, consumer)
	stop, lying := make(chan struct{}), sync.WaitGroup{}
	sessions, messages := 0, 0
	lying.Go(func() {
		rnd := rand.New(rand.NewPCG(3, 4))
		for {
			select {
			case <-stop:
				return
			default:
			}
			sessions++
			messages += b.lieOnce(rnd)
		}
	})
	x := text{"honest", 300}
	for n := range 40 {
		p.fresh()
		c.fresh()
		id := fmt.Sprint("h", n)
		p.produce(id, x, enginepb.Leg_PD)
		r := c.beginConsumer(id, x, enginepb.Leg_PD)
		ev := r.load()
		if !ev.Ok { // the liar has demanded all of the transfer before it
			require.Positive(t, causes(ev)["evicted"]+causes(ev)["unmatched"], ev.Error)
		}
		r.finish()
	}
	close(stop)
	lying.Wait()
	t.Logf("%d sessions and %d messages of the liar", sessions, messages)
	require.Positive(t, messages)
	clean(t, consumer)
	require.NoError(t, b.cc.Close())
	require.Eventually(t, func() bool { return !isReady(producer, "liar") }, 30*time.Second, time.Millisecond)
	clean(t, producer)
	serves(t, producer, consumer)
}

// lieOnce speaks one session and returns how many messages it had.
func (b *byHand) lieOnce(rnd *rand.Rand) (sent int) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s, err := sessionpb.NewPeerClient(b.cc).Session(ctx)
	if err != nil {
		return 0
	}
	b.hello.BootId++
	if s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: b.hello}}) != nil {
		return 0
	}
	job := uint64(0)
	for range 1 + rnd.IntN(60) {
		job += rnd.Uint64N(4) // mostly rising, as it must
		if s.Send(b.lie(rnd, job)) != nil {
			break
		}
		sent++
		if rnd.IntN(5) == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	if rnd.IntN(2) == 0 {
		_ = s.CloseSend()
		time.Sleep(5 * time.Millisecond)
	}
	return sent
}

func (b *byHand) lie(rnd *rand.Rand, job uint64) *sessionpb.Envelope {
	x, n := text{"honest", 300}, 1+rnd.IntN(40)
	var keys []byte
	for range n {
		group := []string{"sliding", "full"}[rnd.IntN(2)]
		k := x.key(group, rnd.IntN(300/blockTokens/chunkBlocks[group]))
		if rnd.IntN(10) == 0 {
			k[tier.KeyBytes-1], k[tier.KeyBytes-4] = 0xff, 0xff // a group that nobody has
		}
		keys = append(keys, k[:]...)
	}
	switch rnd.IntN(7) {
	default:
		d := &sessionpb.Demand{Job: job, TransferId: []string{"", "t-h0", "t-h1", "t-h2", "nope"}[rnd.IntN(5)], RequestId: "x",
			Leg: []string{"pd", "probe", "", "zzz"}[rnd.IntN(4)], Keys: keys, DeadlineMs: uint32(rnd.IntN(3000))}
		for range n {
			d.Slots, d.Epochs = append(d.Slots, rnd.Uint32()), append(d.Epochs, rnd.Uint64())
		}
		return &sessionpb.Envelope{Message: &sessionpb.Envelope_Demand{Demand: d}}
	case 3:
		return &sessionpb.Envelope{Message: &sessionpb.Envelope_Lookup{Lookup: &sessionpb.Lookup{Job: job, Keys: keys}}}
	case 4:
		return &sessionpb.Envelope{Message: &sessionpb.Envelope_Abort{Abort: &sessionpb.Abort{Job: rnd.Uint64N(job + 1)}}}
	case 5:
		return &sessionpb.Envelope{Message: &sessionpb.Envelope_Done{Done: &sessionpb.Done{
			Job: rnd.Uint64N(job + 1), Release: true, Codes: make([]sessionpb.Code, rnd.IntN(2)*n)}}}
	case 6:
		return &sessionpb.Envelope{Message: &sessionpb.Envelope_Renew{Renew: &sessionpb.Renew{}}}
	}
}
