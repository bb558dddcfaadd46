package host

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
)

// TestRefusedReload: a list of peers that is refused changes nothing, neither sessions nor
// which peers are kept when they are dead.
func TestRefusedReload(t *testing.T) {
	producer, consumer := pair(t, func(c *config.Config) { c.Bounds.Sessions = 1 })
	p, c := attach(t, producer), attach(t, consumer)
	require.Error(t, consumer.SetPeers([]config.Peer{{ID: "x", Control: "127.0.0.1:1"}, {ID: "y", Control: "127.0.0.1:2"}}))
	require.Error(t, consumer.SetPeers([]config.Peer{{ID: "consumer", Control: "127.0.0.1:1"}}), "itself")
	consumer.mu.Lock()
	require.Equal(t, map[string]bool{"producer": true}, consumer.configured)
	require.NotNil(t, consumer.links["producer"].client, "the data connections are still there")
	consumer.mu.Unlock()
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()
	clean(t, producer, consumer)
}

// TestTokenOfAReturningPeer: a consumer that the producer has not configured comes back in
// the moment in which it becomes dead. The token that it is told must be one that the
// data port takes.
func TestTokenOfAReturningPeer(t *testing.T) {
	control := startProxy(t)
	producer := startNode(t, "producer", func(c *config.Config) {
		c.Deadlines.PingMS, c.Deadlines.SuspectMS, c.Deadlines.DeadMS, c.Deadlines.ConnectMS = 50, 200, 400, 200
	})
	control.target.Store(producer.Addresses().Peer)
	consumer := startNode(t, "consumer", withPeer("producer", control.addr()), func(c *config.Config) { c.Deadlines.ConnectMS = 3000 })
	ready(t, consumer, "producer")
	require.Eventually(t, func() bool { return isReady(producer, "consumer") }, 30*time.Second, time.Millisecond)

	control.cut()
	require.Eventually(t, func() bool { return !isReady(producer, "consumer") }, 30*time.Second, time.Millisecond)
	time.Sleep(50 * time.Millisecond)
	producer.mu.Lock() // a stall, as of the disk under the log or of the scheduler
	time.Sleep(300 * time.Millisecond)
	control.mend() // it dials again
	time.Sleep(600 * time.Millisecond)
	producer.mu.Unlock()

	ready(t, consumer, "producer")
	require.Eventually(t, func() bool { return producer.data.Lanes(producer.dataToken("consumer")) > 0 }, 30*time.Second, time.Millisecond)
	serves(t, producer, consumer)
}

// byHand is a session with a node that the test speaks itself, as node id.
type byHand struct {
	t     *testing.T
	cc    *grpc.ClientConn
	hello *sessionpb.Hello
}

func dialByHand(t *testing.T, n *Node, id, data string) *byHand {
	cc, err := grpc.NewClient("passthrough:///"+n.Addresses().Peer, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { cc.Close() })
	return &byHand{t, cc, helloAs(t, n, id, data)}
}

// helloAs is the hello of a node, said by another.
func helloAs(t *testing.T, n *Node, id, data string) *sessionpb.Hello {
	h, err := n.hello()
	require.NoError(t, err)
	h.NodeId, h.BootId, h.DataAddress, h.ProtocolMin, h.ProtocolMax = id, 1, data, 1, 1
	h.Layout.Digest = session.LayoutDigest(h.Layout)
	return h
}

// closedPort is an address at which nobody listens.
func closedPort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// TestStaleDataDialer: a peer whose data port cannot be reached restarts a few times, each
// life shorter than the pause between two tries. One goroutine is left that dials.
func TestStaleDataDialer(t *testing.T) {
	producer := startNode(t, "producer", func(c *config.Config) {
		c.Deadlines.PingMS, c.Deadlines.SuspectMS, c.Deadlines.DeadMS, c.Deadlines.ConnectMS = 40, 150, 250, 100
	})
	b := dialByHand(t, producer, "consumer", closedPort(t))
	const dialer = "host.(*Node).connectData("
	before := goroutines(dialer)
	// live begins a life. On a busy machine the node may still be forgetting the one before.
	boot := uint64(0)
	live := func() (s grpc.BidiStreamingClient[sessionpb.Envelope, sessionpb.Envelope], end context.CancelFunc) {
		require.Eventually(t, func() bool {
			boot++
			b.hello.BootId = boot
			var ctx context.Context
			ctx, end = context.WithCancel(ctxFor(t))
			var err error
			if s, err = sessionpb.NewPeerClient(b.cc).Session(ctx); err == nil {
				err = s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: b.hello}})
			}
			if err == nil {
				if m, err := s.Recv(); err == nil && m.GetHello() != nil {
					return true
				}
			}
			end()
			return false
		}, 30*time.Second, time.Millisecond)
		return s, end
	}
	began := 0
	for range 4 {
		_, end := live()
		for stop := time.Now().Add(2 * time.Second); time.Now().Before(stop); time.Sleep(time.Millisecond) {
			if isReady(producer, "consumer") {
				began++
				break
			}
		}
		end()
		require.Eventually(t, func() bool {
			producer.mu.Lock()
			defer producer.mu.Unlock()
			return producer.links["consumer"] == nil
		}, 30*time.Second, time.Millisecond)
	}
	require.Positive(t, began)
	alone := false
	for try := 0; try < 10 && !alone; try++ { // a life ends when its pongs are late, too
		s, end := live()
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			for m, err := s.Recv(); err == nil; m, err = s.Recv() {
				if p := m.GetPing(); p != nil {
					_ = s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Pong{Pong: &sessionpb.Pong{Seq: p.Seq}}})
				}
			}
		}()
		for stop := time.Now().Add(3 * time.Second); time.Now().Before(stop) && !alone; time.Sleep(dataRetry / 10) {
			alone = isReady(producer, "consumer") && goroutines(dialer)-before == 1
		}
		end()
		<-answered
	}
	require.True(t, alone, "every dialer of a former life has ended, and that of the last one dials")
}

// TestLandedAfterTheEnd: the bytes are whole, the engine finishes, and only then does the
// fetch hear of them. They are not pinned for a request that has ended.
func TestLandedAfterTheEnd(t *testing.T) {
	_, consumer := pair(t)
	e := attach(t, consumer)
	r := e.beginConsumer("a", text{"a", 300}, enginepb.Leg_PD)
	var f *fetch
	require.Eventually(t, func() bool {
		consumer.mu.Lock()
		defer consumer.mu.Unlock()
		for _, x := range consumer.fetches {
			f = x
		}
		return f != nil
	}, 30*time.Second, time.Millisecond)
	w := f.wants[0]
	dst, end, err := consumer.tier.Grab(w.slot)
	require.NoError(t, err)
	size := consumer.groups[w.ref.Group].chunkBytes
	sum := tier.Checksum(dst[:size])
	require.NoError(t, end())
	r.finish()
	require.ErrorIs(t, f.c.landed(w, sum, size), errEnded)
	clean(t, consumer)
}

// TestThreeNodes: both of two nodes dial each other, and a third dials both; KV goes
// every way at once.
func TestThreeNodes(t *testing.T) {
	producer := startNode(t, "producer")
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	require.NoError(t, producer.SetPeers([]config.Peer{{ID: "consumer", Control: consumer.Addresses().Peer}}))
	third := startNode(t, "third", withPeer("producer", producer.Addresses().Peer), withPeer("consumer", consumer.Addresses().Peer))
	ready(t, consumer, "producer")
	ready(t, producer, "consumer")
	ready(t, third, "producer")
	ready(t, third, "consumer")
	p, c, d := attach(t, producer), attach(t, consumer), attach(t, third)
	from := func(peer string) beginOption { return func(b *enginepb.BeginRequest) { b.PeerId = peer } }
	for k := range 3 {
		there, back := text{fmt.Sprint("there", k), 200}, text{fmt.Sprint("back", k), 200}
		p.fresh()
		c.fresh()
		d.fresh()
		p.produce(fmt.Sprint("there", k), there, enginepb.Leg_PD)
		r := c.beginConsumer(fmt.Sprint("there", k), there, enginepb.Leg_PD)
		hit(t, r, r.load())
		r.finish()
		p.fresh()
		c.fresh()
		c.produce(fmt.Sprint("back", k), back, enginepb.Leg_PD)
		r = p.beginConsumer(fmt.Sprint("back", k), back, enginepb.Leg_PD, from("consumer"))
		hit(t, r, r.load())
		r.finish()
		r = d.beginConsumer(fmt.Sprint("third", k), back, enginepb.Leg_PROBE, from("consumer"))
		hit(t, r, r.load())
		r.finish()
	}
	clean(t, producer, consumer, third)
}

// TestARefusedPeerThatKeepsDialing: a peer whose hello is refused dials again and again, and is
// forgotten and known anew; the log of both sides has each fault once, with both values.
func TestARefusedPeerThatKeepsDialing(t *testing.T) {
	brisk := func(c *config.Config) {
		d := &c.Deadlines
		d.RetryMS, d.RetryMaxMS, d.ConnectMS, d.PingMS, d.SuspectMS, d.DeadMS = 5, 10, 1000, 20, 100, 150
	}
	pLog, cLog := &logTo{}, &logTo{}
	producer := startLogged(t, "producer", unjudged, pLog, brisk)
	consumer := startLogged(t, "consumer", unjudged, cLog, brisk, withPeer("producer", producer.Addresses().Peer),
		withDeployment(strings.ReplaceAll(deployment, "chunk_blocks: 4", "chunk_blocks: 8")))
	// The producer knows the consumer only while it dials: it forgets it, and meets it again.
	for range 3 {
		require.Eventually(t, func() bool { return len(producer.peers.Status()) == 1 }, 30*time.Second, time.Millisecond)
		require.Eventually(t, func() bool { return len(producer.peers.Status()) == 0 }, 30*time.Second, 100*time.Microsecond)
	}
	for _, log := range []*logTo{pLog, cLog} {
		warned := strings.Count(log.String(), "level=WARN msg=\"peer state changed\"") + strings.Count(log.String(), "level=WARN msg=\"no session with peer")
		require.Positive(t, warned)
		require.LessOrEqual(t, warned, 6, log.String()) // suspect, dead and no session, each for at most two reasons
		require.Contains(t, log.String(), "layouts differ, so bytes cannot be exchanged")
	}
	require.Contains(t, cLog.String(), "pause_from=5ms pause_to=10ms")
	for _, s := range consumer.Status().Peers {
		require.Contains(t, s.Reason, "layouts differ", "not that it is silent: %s", s.State)
	}
}
