package host

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/transfer"
)

// A trap is a port inside that a lying peer wants to be connected to.
type trap struct {
	addr string
	hits atomic.Int64
}

// setTrap listens at an address of this machine that is nobody's: Linux has all of
// 127.0.0.0/8.
func setTrap(t *testing.T, host string) *trap {
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	require.NoError(t, err)
	tr := &trap{addr: l.Addr().String()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tr.hits.Add(1)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return tr
}

func onlyPeers(c *config.Config) { c.PeerCIDRs = nil }

// serveLiar serves a peer that says a data address and knows the protocol.
func serveLiar(t *testing.T, like *Node, listen, data string) (control string) {
	l := &liar{token: transfer.Token{1}}
	l.hello = helloAs(t, like, "liar", data)
	l.hello.DataToken = l.token[:]
	lis, err := net.Listen("tcp", listen)
	require.NoError(t, err)
	srv := grpc.NewServer()
	sessionpb.RegisterPeerServer(srv, l)
	l.wg.Go(func() { _ = srv.Serve(lis) })
	t.Cleanup(func() { srv.Stop(); l.wg.Wait() })
	return lis.Addr().String()
}

// TestNoRelay: a peer that names an address which is neither at its own host nor in
// peer_cidrs is refused, with a reason on both sides, and nothing connects there: whoever
// dialed, whether the address is a number or a name, and whatever engines ask for.
func TestNoRelay(t *testing.T) {
	honest := startNode(t, "honest")
	inside := setTrap(t, "127.0.0.9")
	_, port, err := net.SplitHostPort(inside.addr)
	require.NoError(t, err)
	local := setTrap(t, "127.0.0.1")
	_, localPort, err := net.SplitHostPort(local.addr)
	require.NoError(t, err)
	for name, data := range map[string]string{
		"another address": inside.addr, "the same, in IPv6": "[::ffff:127.0.0.9]:" + port, "any address": "0.0.0.0:" + port, "metadata service": "169.254.169.254:80",
	} {
		t.Run(name+", dialed", func(t *testing.T) {
			log := &logTo{}
			n := startLogged(t, "n", unjudged, log, onlyPeers, withPeer("liar", serveLiar(t, honest, "127.0.0.1:0", data)), withPeer("honest", honest.Addresses().Peer))
			refused(t, n, log, data)
			ready(t, n, "honest")
		})
		t.Run(name+", dialing", func(t *testing.T) {
			log := &logTo{}
			n := startLogged(t, "n", unjudged, log, onlyPeers, withPeer("liar", closedPort(t)))
			b := dialByHand(t, n, "liar", data)
			s, err := sessionpb.NewPeerClient(b.cc).Session(ctxFor(t))
			require.NoError(t, err)
			require.NoError(t, s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: b.hello}}))
			for err == nil {
				_, err = s.Recv()
			}
			require.ErrorContains(t, err, "is neither at that host nor in the peer_cidrs of node", "the liar hears why")
			refused(t, n, log, data)
		})
	}
	t.Run("a name", func(t *testing.T) { // what it means is known when it is dialed
		log := &logTo{}
		n := startLogged(t, "n", unjudged, log, onlyPeers, withPeer("liar", serveLiar(t, honest, "127.0.0.2:0", "localhost:"+localPort)))
		require.Eventually(t, func() bool {
			return said(log, "data_address localhost:"+localPort+" (127.0.0.1) of peer \"liar\"") && said(log, "is neither at that host nor in the peer_cidrs") && said(log, "pause=10s")
		}, 30*time.Second, time.Millisecond)
		time.Sleep(2 * dataRetry)
		require.Nil(t, clientOf(n, "liar"))
	})
	t.Run("not in peers", func(t *testing.T) {
		log := &logTo{}
		n := startLogged(t, "n", unjudged, log, onlyPeers)
		b := dialByHand(t, n, "liar", inside.addr)
		s, err := sessionpb.NewPeerClient(b.cc).Session(ctxFor(t))
		require.NoError(t, err)
		require.NoError(t, s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: b.hello}}))
		for err == nil {
			_, err = s.Recv()
		}
		require.ErrorContains(t, err, `node "liar" at 127.0.0.1 is no peer of node "n"`)
		require.Empty(t, n.peers.Status())
		require.True(t, said(log, `node "liar" at 127.0.0.1 is no peer of node "n"`))
	})
	require.Zero(t, inside.hits.Load(), "somebody connected")
	require.Zero(t, local.hits.Load(), "somebody connected")

	// The trap works: within a range, the same word is enough.
	startNode(t, "n", func(c *config.Config) { c.PeerCIDRs = []string{"127.0.0.9/32"} }, withPeer("liar", serveLiar(t, honest, "127.0.0.1:0", inside.addr)))
	require.Eventually(t, func() bool { return inside.hits.Load() > 0 }, 30*time.Second, time.Millisecond)
}

func clientOf(n *Node, peer string) *transfer.Client {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.links[peer]; l != nil {
		return l.client
	}
	return nil
}

// refused waits until a node has said why, and sees that an engine hears it too.
func refused(t *testing.T, n *Node, log *logTo, data string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return said(log, "data_address "+data) && said(log, "is neither at that host nor in the peer_cidrs of node \"n\"")
	}, 30*time.Second, time.Millisecond)
	require.Nil(t, clientOf(n, "liar"))
	require.False(t, isReady(n, "liar"))
}

// TestPeerIDIsNoAddress: what an engine calls a peer is an id of the configuration, and
// never dialed.
func TestPeerIDIsNoAddress(t *testing.T) {
	n, inside := startNode(t, "n"), setTrap(t, "127.0.0.9")
	e := attach(t, n)
	for _, id := range []string{inside.addr, "liar", "127.0.0.9", "http://" + inside.addr} {
		req := e.request(id, text{"a", 300}, enginepb.Role_CONSUMER, enginepb.Leg_PROBE)
		req.PeerId = id
		reply, err := e.c.Begin(ctxFor(t), req)
		if err == nil {
			require.Contains(t, reply.Note, "is not known to this node")
			_, err = e.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: id})
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "peer_id")
		}
	}
	require.Zero(t, inside.hits.Load())
}

// TestCIDRsAreReadAgain: a range that is taken away ends the sessions that it let in, and
// one that is given lets them in again.
func TestCIDRsAreReadAgain(t *testing.T) {
	producer := startNode(t, "producer")
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	serves(t, producer, consumer)
	require.NoError(t, producer.Allow(nil, nil))
	require.Eventually(t, func() bool { return !isReady(producer, "consumer") && !isReady(consumer, "producer") }, 30*time.Second, time.Millisecond)
	time.Sleep(100 * time.Millisecond)
	require.False(t, isReady(consumer, "producer"))
	cidrs, err := consumer.cfg.CIDRs()
	require.NoError(t, err)
	require.NoError(t, producer.Allow(nil, cidrs))
	serves(t, producer, consumer)
}

// TestInsecureWarns: a port that other machines reach without TLS is opened only when the
// configuration says so, and the log warns of each.
func TestInsecureWarns(t *testing.T) {
	for _, host := range []string{"0.0.0.0", "[::]", ""} {
		log := &logTo{}
		open := func(c *config.Config) {
			c.PeerListen, c.DataListen, c.Advertise = host+":0", host+":0", "127.0.0.1"
			c.Insecure = true
		}
		n := startLogged(t, "n", unjudged, log, open)
		require.True(t, said(log, `msg="anybody who reaches this port can read and write KV: insecure is true and tls is not set" peer_listen=`+n.Addresses().Peer) ||
			said(log, `insecure is true and tls is not set" peer_listen="`+n.Addresses().Peer), log.String())
		require.True(t, said(log, "data_listen="), log.String())
		n.Close(context.Background())

		cfg := testConfig(t, "n", open)
		cfg.Insecure = false // past Validate, as a name would be that means another address here
		_, err := start(ctxFor(t), cfg, logInto(&logTo{}), unjudged)
		require.ErrorContains(t, err, "where other machines can reach it, and tls is not set")
		require.Error(t, cfg.Validate())
	}
	log := &logTo{}
	startLogged(t, "n", unjudged, log)
	require.False(t, said(log, "insecure is true"))
}

// TestSilentConnections: a thousand connections that say nothing, on each port of a node,
// are held in number, and requests, probes and new peers go on meanwhile.
func TestSilentConnections(t *testing.T) {
	producer, consumer := pair(t)
	p, c := attach(t, producer), attach(t, consumer)
	before := descriptors(t)
	const each = 1000
	a := producer.Addresses()
	for _, addr := range []string{a.Peer, a.Data, a.HTTP} {
		for range each {
			conn, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			t.Cleanup(func() { conn.Close() })
		}
	}
	held := descriptors(t) - before - 3*each // those of the node
	require.LessOrEqual(t, held, 64+transfer.DefaultHellosPerAddressMax+httpConnsPerAddressMax+16)
	var slowest time.Duration
	for k := range 20 {
		p.fresh()
		c.fresh()
		id := fmt.Sprint("s", k)
		x := text{id, 200}
		p.produce(id, x, enginepb.Leg_PD)
		began := time.Now()
		r := c.beginConsumer(id, x, enginepb.Leg_PD)
		hit(t, r, r.load())
		r.finish()
		slowest = max(slowest, time.Since(began))
	}
	status, _ := get(t, "http://"+a.HTTP+"/readyz")
	require.Equal(t, 200, status)
	began := time.Now()
	third := startNode(t, "third", withPeer("producer", a.Peer))
	ready(t, third, "producer")
	t.Logf("%d silent connections hold %d descriptors of the node; slowest of 20 requests %v; a new peer is ready after %v", 3*each, held, slowest, time.Since(began))
	_, body := get(t, "http://"+a.HTTP+"/metrics")
	require.Regexp(t, `tierd_half_open_closed_connections_total\{port="control"\} [1-9]`, body)
	require.Regexp(t, `tierd_half_open_closed_connections_total\{port="data"\} [1-9]`, body)
}
