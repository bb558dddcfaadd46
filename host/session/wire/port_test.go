package wire

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
)

// tcpNode is a node on a real port.
type tcpNode struct {
	*testHost
	addr string
	log  *logBuffer
}

func startTCP(t *testing.T, cfg Config) *tcpNode {
	n := &tcpNode{log: &logBuffer{}}
	n.testHost = &testHost{id: cfg.Hello.NodeId, ups: map[string]int{}, again: map[string]bool{}, states: map[string][]session.PeerState{}}
	cfg.Limits, cfg.Logger = session.DefaultLimits(), slog.New(slog.NewTextHandler(n.log, nil))
	p, err := New(cfg, n.testHost)
	require.NoError(t, err)
	n.peers = p
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n.addr = lis.Addr().String()
	served := make(chan error, 1)
	go func() { served <- p.Serve(lis) }()
	t.Cleanup(func() {
		p.Close()
		if err := <-served; !errors.Is(err, ErrClosed) { // closed before it had begun to serve
			require.NoError(t, err)
		}
	})
	return n
}

func eventually(t *testing.T, f func() bool, what string) {
	t.Helper()
	require.Eventually(t, f, 10*time.Second, 5*ms, what)
}

// TestFailedDialIsTheDialers: the reason is the error of the dialer, in no words of gRPC.
func TestFailedDialIsTheDialers(t *testing.T) {
	dial := func(_ context.Context, addr string) (net.Conn, error) {
		return nil, &net.DNSError{Err: "no such host", Name: addr, IsNotFound: true}
	}
	b := startTCP(t, Config{Hello: hello("b", 1), Dial: dial, Peers: []PeerAddr{{ID: "a", Control: "nowhere:7000"}}})
	eventually(t, func() bool { return state(b.testHost, "a") == session.Dead }, "it is dead")
	const reason = "dial nowhere:7000: lookup nowhere:7000: no such host"
	require.Contains(t, b.log.String(), `"no connection to a: `+reason+`"`)
	require.Contains(t, b.log.String(), `deadlines.dead_ms, 2s; no connection: `+reason+`"`)
	require.NotContains(t, b.log.String(), "rpc error")
}

// TestGarbage: whatever comes in on the port, the node lives, says what it saw, and
// serves its peer.
func TestGarbage(t *testing.T) {
	n := startTCP(t, Config{Hello: hello("a", 1)})
	b := startTCP(t, Config{Hello: hello("b", 1), Peers: []PeerAddr{{ID: "a", Control: n.addr}}})
	eventually(t, func() bool { return state(n.testHost, "b") == session.Ready }, "session")

	for _, garbage := range []string{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x00\x01\x02\x03", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"} {
		c, err := net.Dial("tcp", n.addr)
		require.NoError(t, err)
		_, err = c.Write([]byte(garbage))
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	eventually(t, func() bool { return contains(n.log, "speaks another protocol") }, "a log of the garbage")

	cc, err := grpc.NewClient(n.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer cc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	dial := func(first *sessionpb.Envelope) error {
		s, err := sessionpb.NewPeerClient(cc).Session(ctx)
		require.NoError(t, err)
		if first != nil {
			require.NoError(t, s.Send(first))
		}
		for {
			if _, err := s.Recv(); err != nil {
				return err
			}
		}
	}
	ping := &sessionpb.Envelope{Message: &sessionpb.Envelope_Ping{Ping: &sessionpb.Ping{}}}
	require.Equal(t, codes.InvalidArgument, status.Code(dial(ping)), "no hello")
	require.Equal(t, codes.DeadlineExceeded, status.Code(dial(nil)), "silence")
	big := hello("x", 1)
	big.DataToken = make([]byte, session.DefaultLimits().MessageBytesMax+1)
	require.Equal(t, codes.ResourceExhausted, status.Code(dial(helloMessage(big))), "too large")
	own := dial(helloMessage(hello("a", 5)))
	require.ErrorContains(t, own, "this node's own")
	bad := hello("x", 1)
	bad.ProtocolMin, bad.ProtocolMax = 1, 1
	bad.DataToken = make([]byte, 1000)
	require.ErrorContains(t, dial(helloMessage(bad)), "data_token has 1000 bytes")

	require.Equal(t, session.Ready, state(n.testHost, "b"))
	_, err = b.peers.Lookup(ctx, "a", "r", keys(3))
	require.NoError(t, err)
}

// TestGarbageStormIsBounded: a port scanner has one line, and a count at the end.
func TestGarbageStormIsBounded(t *testing.T) {
	log := &logBuffer{}
	p, err := New(Config{Hello: hello("a", 1), Limits: session.DefaultLimits(), Logger: slog.New(slog.NewTextHandler(log, nil))}, &testHost{id: "a"})
	require.NoError(t, err)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- p.Serve(lis) }()
	const storm = 200
	for range storm {
		c, err := net.Dial("tcp", lis.Addr().String())
		require.NoError(t, err)
		_, err = c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
		require.NoError(t, err)
		for b := make([]byte, 64); err == nil; { // until the port has read it and hung up
			_, err = c.Read(b)
		}
		require.NoError(t, c.Close())
	}
	p.Close()
	require.NoError(t, <-served)
	require.Equal(t, 1, strings.Count(log.String(), "speaks another protocol"))
	require.Contains(t, log.String(), fmt.Sprintf("cause=garbage left_out=%d ", storm-1))
}

func contains(l *logBuffer, s string) bool { return strings.Contains(l.String(), s) }

func helloMessage(h *sessionpb.Hello) *sessionpb.Envelope {
	return &sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: h}}
}

// TestOversizeOnSession: a message beyond the bound ends that session, with a log; the
// peer may come again.
func TestOversizeOnSession(t *testing.T) {
	n := startTCP(t, Config{Hello: hello("a", 1)})
	cc, err := grpc.NewClient(n.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer cc.Close()
	for range 2 {
		s, err := sessionpb.NewPeerClient(cc).Session(t.Context())
		require.NoError(t, err)
		c, err := session.New(0, session.Config{Hello: hello("x", 3), PeerID: "a", Limits: session.DefaultLimits()})
		require.NoError(t, err)
		c.Connected(0)
		for _, e := range c.Take() {
			if m, ok := e.(session.Send); ok {
				require.NoError(t, s.Send(m.Envelope))
			}
		}
		eventually(t, func() bool { return state(n.testHost, "x") == session.Ready }, "session")
		require.NoError(t, s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Goaway{Goaway: &sessionpb.Goaway{Reason: string(make([]byte, 5<<20))}}}))
		for err == nil {
			_, err = s.Recv()
		}
		eventually(t, func() bool { return state(n.testHost, "x") != session.Ready }, "closed")
	}
	require.True(t, contains(n.log, "larger than max"))
}

// TestLayoutRefused: both sides log the field and both values, and neither exits.
func TestLayoutRefused(t *testing.T) {
	n := startTCP(t, Config{Hello: hello("a", 1)})
	other := hello("b", 1)
	other.Layout.HashScheme = "xx"
	b := startTCP(t, Config{Hello: other, Peers: []PeerAddr{{ID: "a", Control: n.addr}}})
	for _, l := range []*logBuffer{n.log, b.log} {
		eventually(t, func() bool {
			return contains(l, "hash_scheme") && contains(l, `\"s\"`) && contains(l, `\"xx\"`)
		}, "a log that names the difference")
	}
}

// authority signs certificates for nodes.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	require.NoError(t, err)
	a := &authority{key: key, pool: x509.NewCertPool()}
	a.cert, err = x509.ParseCertificate(der)
	require.NoError(t, err)
	a.pool.AddCert(a.cert)
	return a
}

// config returns the two sides' TLS of a node.
func (a *authority) config(t *testing.T, node string) (server, client *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: node}, NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{node}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	require.NoError(t, err)
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return &tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: a.pool, ClientAuth: tls.RequireAndVerifyClientCert},
		&tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: a.pool}
}

// TestTLS: peers with certificates of one authority meet; a stranger, a plain peer and
// a node under another's name do not.
func TestTLS(t *testing.T) {
	ca, stranger := newAuthority(t), newAuthority(t)
	verify := func(node string, s tls.ConnectionState) error {
		if got := s.PeerCertificates[0].DNSNames; len(got) != 1 || got[0] != node {
			return fmt.Errorf("the certificate names %q", got)
		}
		return nil
	}
	node := func(a *authority, cert, id, dials string) *tcpNode {
		cfg := Config{Hello: hello(id, 1), Verify: verify}
		if a != nil {
			cfg.ServerTLS, cfg.ClientTLS = a.config(t, cert)
		}
		if dials != "" {
			cfg.Peers = []PeerAddr{{ID: "a", Control: dials}}
		}
		return startTCP(t, cfg)
	}
	a := node(ca, "a", "a", "")
	b := node(ca, "b", "b", a.addr)
	eventually(t, func() bool { return state(b.testHost, "a") == session.Ready }, "session")
	liar := node(ca, "c", "d", a.addr)
	eventually(t, func() bool { return contains(a.log, "certificate names") }, "the lie is logged")
	misled := func() *tcpNode {
		cfg := Config{Hello: hello("g", 1), Verify: verify, Peers: []PeerAddr{{ID: "z", Control: a.addr}}}
		cfg.ServerTLS, cfg.ClientTLS = ca.config(t, "g")
		return startTCP(t, cfg)
	}()
	eventually(t, func() bool { return contains(misled.log, "certificate names") }, "another node answers at the address")
	strange := node(stranger, "e", "e", a.addr)
	plain := node(nil, "", "f", a.addr)
	eventually(t, func() bool { return contains(a.log, "speaks another protocol") }, "the plain peer is logged")
	time.Sleep(300 * ms)
	for _, n := range []*tcpNode{liar, strange, plain} {
		require.NotEqual(t, session.Ready, state(n.testHost, "a"), n.id)
	}
	require.Len(t, a.peers.Status(), 1)

	_, err := New(Config{Hello: hello("x", 1), Limits: session.DefaultLimits(), ClientTLS: &tls.Config{}}, b.testHost)
	require.ErrorContains(t, err, "one direction only")
}
