package host

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/transfer"
)

// authority signs certificates for one test.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func writePEM(t *testing.T, path, kind string, der []byte) string {
	t.Helper()
	require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	return path
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	a := &authority{dir: t.TempDir(), cert: cert, key: key}
	writePEM(t, filepath.Join(a.dir, "ca.pem"), "CERTIFICATE", der)
	return a
}

// issue signs a certificate for a node id and names its files in a configuration.
func (a *authority) issue(t *testing.T, nodeID string, changes ...func(*x509.Certificate)) nodeOption {
	t.Helper()
	c := a.write(t, nodeID, nodeID, changes...)
	return func(cfg *config.Config) { cfg.TLS = &c }
}

// write signs a certificate for a node id and writes it to files of a name.
func (a *authority) write(t *testing.T, file, nodeID string, changes ...func(*x509.Certificate)) config.TLS {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: nodeID}, DNSNames: []string{nodeID},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, change := range changes {
		change(tmpl)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	return config.TLS{
		Cert: writePEM(t, filepath.Join(a.dir, file+".pem"), "CERTIFICATE", der),
		Key:  writePEM(t, filepath.Join(a.dir, file+"-key.pem"), "EC PRIVATE KEY", keyDER),
		CA:   filepath.Join(a.dir, "ca.pem"),
	}
}

// said reports whether a log has a text, however often it was quoted on the way.
func said(l *logTo, text string) bool {
	return strings.Contains(strings.ReplaceAll(l.String(), `\`, ""), text)
}

func expired(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = time.Now().Add(-72*time.Hour), time.Now().Add(-48*time.Hour)
}

// TestMutualTLS: control and data are secured, and nobody comes in without a certificate
// of the authority that is for its node id.
func TestMutualTLS(t *testing.T) {
	a := newAuthority(t)
	producer := startNode(t, "producer", a.issue(t, "producer"))
	consumer := startNode(t, "consumer", a.issue(t, "consumer"), withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	hit(t, r, r.load())
	r.finish()

	for name, option := range map[string]nodeOption{
		"stranger": newAuthority(t).issue(t, "stranger"), // of another authority
		"impostor": a.issue(t, "somebody"),               // for another node id
	} {
		n := startNode(t, name, option, withPeer("producer", producer.Addresses().Peer), func(c *config.Config) { c.Deadlines.ConnectMS = 300 })
		require.Eventually(t, func() bool { return n.unusable("producer", "pd") != "" }, 30*time.Second, time.Millisecond)
		producer.mu.Lock()
		require.NotContains(t, producer.links, name)
		producer.mu.Unlock()
	}
	refusedData(t, producer, a)
	conn, err := tls.Dial("tcp", producer.Addresses().Data, &tls.Config{InsecureSkipVerify: true})
	if err == nil { // TLS 1.3: the client hears of the refusal with its first read
		_, err = conn.Read(make([]byte, 1))
		conn.Close()
	}
	require.Error(t, err)
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}

// refusedData: the token of a session is of no use to a node with another's certificate.
func refusedData(t *testing.T, producer *Node, a *authority) {
	t.Helper()
	producer.tokenMu.Lock()
	token := producer.tokens["consumer"]
	producer.tokenMu.Unlock()
	thief := a.write(t, "thief", "thief")
	files, err := openCerts(&thief, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	before := producer.data.Stats()
	_, err = transfer.Dial(ctxFor(t), producer.Addresses().Data, token, 1, nil, transfer.Options{Log: slog.New(slog.DiscardHandler), TLS: files.client(nil)})
	require.ErrorContains(t, err, "certificate is not that of the token's node")
	require.Eventually(t, func() bool { return producer.data.Stats().BadHellos > before.BadHellos }, 10*time.Second, time.Millisecond)
}

// The data port that a peer names must be the peer's own, whoever else has a certificate.
func TestDataPortOfAnotherNode(t *testing.T) {
	a := newAuthority(t)
	other, log := a.write(t, "other", "other"), &logTo{}
	files, err := openCerts(&other, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	data, err := transfer.Listen(ctxFor(t), "127.0.0.1:0", transfer.Options{TLS: files.server()})
	require.NoError(t, err)
	defer data.Close()
	producer := startNode(t, "producer", a.issue(t, "producer"), func(c *config.Config) { c.Advertise = data.Addr().String() })
	consumer := startLogged(t, "consumer", unjudged, log, a.issue(t, "consumer"), withPeer("producer", producer.Addresses().Peer))
	require.Eventually(t, func() bool {
		return said(log, `node "producer" must have a certificate for "producer", but it is for ["other"]`)
	}, 30*time.Second, time.Millisecond)
	require.Zero(t, data.Stats().Frames)
	consumer.mu.Lock()
	defer consumer.mu.Unlock()
	require.Nil(t, consumer.links["producer"].client)
}

// TestIdentity: a configured identity takes the place of the node id, on both ports and in
// both directions; when it is changed, the session ends.
func TestIdentity(t *testing.T) {
	a := newAuthority(t)
	uri, err := url.Parse("spiffe://example/tierd/p")
	require.NoError(t, err)
	only := func(c *x509.Certificate) { c.DNSNames, c.URIs = nil, []*url.URL{uri} }
	producer := startNode(t, "producer", a.issue(t, "producer", only))
	log := &logTo{}
	peer := config.Peer{ID: "producer", Control: producer.Addresses().Peer, Identity: uri.String()}
	consumer := startLogged(t, "consumer", unjudged, log, a.issue(t, "consumer"), func(c *config.Config) { c.Peers = []config.Peer{peer} })
	serves(t, producer, consumer)
	peer.Identity = "spiffe://example/tierd/other"
	require.NoError(t, consumer.SetPeers([]config.Peer{peer}))
	require.Eventually(t, func() bool {
		return !isReady(consumer, "producer") && said(log, `must have a certificate for "spiffe://example/tierd/other", but it is for ["spiffe://example/tierd/p"]`)
	}, 30*time.Second, time.Millisecond)
	peer.Identity = uri.String()
	require.NoError(t, consumer.SetPeers([]config.Peer{peer}))
	serves(t, producer, consumer)
}

// TestExpired: the side that refuses an expired certificate says whose it is and since
// when, and so does the side whose it is; a new one is used without a restart.
func TestExpired(t *testing.T) {
	for _, who := range []string{"producer", "consumer"} {
		t.Run(who, func(t *testing.T) {
			a := newAuthority(t)
			change := map[string][]func(*x509.Certificate){who: {expired}}
			logs := map[string]*logTo{"producer": {}, "consumer": {}}
			producer := startLogged(t, "producer", unjudged, logs["producer"], a.issue(t, "producer", change["producer"]...))
			consumer := startLogged(t, "consumer", unjudged, logs["consumer"], a.issue(t, "consumer", change["consumer"]...), withPeer("producer", producer.Addresses().Peer))
			other := map[string]string{"producer": "consumer", "consumer": "producer"}[who]
			require.Eventually(t, func() bool {
				return said(logs[other], fmt.Sprintf(`the peer's certificate, for ["%s"], expired on `, who)) &&
					said(logs[other], "2.0 days ago: the peer must get a new one")
			}, 30*time.Second, time.Millisecond, "the side that refuses")
			require.Eventually(t, func() bool {
				l := logs[who].String()
				return strings.Contains(l, "a certificate has expired; peers refuse it") && strings.Contains(l, "this node's certificate "+a.dir+"/"+who+".pem expired on ")
			}, 30*time.Second, time.Millisecond, "the side whose it is")
			a.write(t, who, who)
			serves(t, producer, consumer)
		})
	}
}

// TestFilesChange: what the files hold is used from the next handshake on, once it is
// whole; until then the files before stay, and the log says so once.
func TestFilesChange(t *testing.T) {
	a, log := newAuthority(t), &logTo{}
	c := a.write(t, "n", "one")
	f, err := openCerts(&c, slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err)
	name := func() string { return f.current().cert.Leaf.DNSNames[0] }
	require.Equal(t, "one", name())
	a.write(t, "n", "two")
	require.Equal(t, "two", name())

	next := a.write(t, "next", "three")
	read := func(path string) []byte {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		return b
	}
	write := func(path string, b []byte) { require.NoError(t, os.WriteFile(path, b, 0o600)) }
	for what, torn := range map[string]func(){
		"a new certificate beside the old key": func() { write(c.Cert, read(next.Cert)) },
		"half a certificate":                   func() { b := read(next.Cert); write(c.Cert, b[:len(b)/2]) },
		"half a chain":                         func() { b := read(next.Cert); write(c.Cert, append(b, b[:len(b)/2]...)); write(c.Key, read(next.Key)) },
		"an empty key":                         func() { write(c.Key, nil) },
		"a pipe": func() {
			require.NoError(t, os.Remove(c.Key))
			require.NoError(t, syscall.Mkfifo(c.Key, 0o600))
		},
		"a file without end": func() { write(c.CA, make([]byte, certFileBytesMax+1)) },
		"no certificate":     func() { require.NoError(t, os.Remove(c.Cert)) },
		"half an authority":  func() { b := read(c.CA); write(c.CA, append(b, b[:len(b)/2]...)) },
	} {
		cert, key, ca := read(c.Cert), read(c.Key), read(c.CA)
		lines := strings.Count(log.String(), "cannot be used")
		torn()
		for range 3 {
			require.Equal(t, "two", name(), what)
		}
		require.Equal(t, lines+1, strings.Count(log.String(), "cannot be used"), what)
		require.NoError(t, os.RemoveAll(c.Key))
		write(c.Cert, cert)
		write(c.Key, key)
		write(c.CA, ca)
		require.Equal(t, "two", name(), what)
	}
	write(c.Cert, read(next.Cert))
	write(c.Key, read(next.Key))
	require.Equal(t, "three", name())

	// Settled files are not read again, and a change is seen all the same.
	old := time.Now().Add(time.Hour)
	f.now = func() time.Time { return old }
	require.Equal(t, "three", name())
	require.True(t, f.settled)
	in := f.current()
	require.Same(t, in, f.current())
	f.now = time.Now
	a.write(t, "n", "four")
	require.Equal(t, "four", name())
}

func TestExpiryIsToldAhead(t *testing.T) {
	a := newAuthority(t)
	c := a.write(t, "n", "n", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-24*time.Hour), time.Now().Add(60*24*time.Hour)
	})
	log := &logTo{}
	f, err := openCerts(&c, slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err)
	const file = `key=tls.cert`
	lines := func() (out []string) {
		for l := range strings.Lines(log.String()) {
			if strings.Contains(l, file) {
				out = append(out, l)
			}
		}
		return out
	}
	require.Empty(t, lines(), "60 days are time enough")
	cert, ca := f.days()
	require.InDelta(t, 60, cert, 0.01)
	require.InDelta(t, 1.0/24, ca, 0.01)
	at := func(days float64) {
		f.now = func() time.Time { return time.Now().Add(time.Duration(days * 24 * float64(time.Hour))) }
		f.review()
	}
	at(45)
	require.Empty(t, lines())
	at(47)
	require.Len(t, lines(), 1)
	require.Contains(t, lines()[0], "level=WARN msg=\"a certificate expires soon")
	require.Contains(t, lines()[0], "days=13.0")
	at(61)
	require.Len(t, lines(), 2)
	require.Contains(t, lines()[1], "level=ERROR msg=\"a certificate has expired")
	cert, _ = f.days()
	require.InDelta(t, -1, cert, 0.01)
	at(-2)
	require.Contains(t, lines()[2], "is not valid yet")

	short := a.write(t, "short", "short", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(time.Hour) })
	log = &logTo{}
	f, err = openCerts(&short, slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err)
	require.Empty(t, lines(), "one that lives an hour is told of in its last 20 minutes")
	at(0.7 / 24)
	require.Len(t, lines(), 1)
}

// TestOldTLS: nothing below TLS 1.3 is spoken.
func TestOldTLS(t *testing.T) {
	a := newAuthority(t)
	n := startNode(t, "n", a.issue(t, "n"))
	c := a.write(t, "c", "c")
	cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	require.NoError(t, err)
	for _, addr := range []string{n.Addresses().Peer, n.Addresses().Data} {
		_, err := tls.Dial("tcp", addr, &tls.Config{MaxVersion: tls.VersionTLS12, InsecureSkipVerify: true, Certificates: []tls.Certificate{cert}})
		require.ErrorContains(t, err, "protocol version not supported")
	}
	resp, body := get(t, "http://"+n.Addresses().HTTP+"/metrics")
	require.Equal(t, 200, resp)
	require.Regexp(t, `tierd_tls_expiry_days\{of="cert"\} 0\.04`, body)
}

// TestReadmeCertificates: what the README says makes certificates that two nodes meet with.
func TestReadmeCertificates(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("no openssl")
	}
	text, err := os.ReadFile(filepath.Join("..", "README.md"))
	require.NoError(t, err)
	_, script, found := strings.Cut(string(text), "```sh\n")
	require.True(t, found)
	script, _, found = strings.Cut(script, "```")
	require.True(t, found)
	require.Contains(t, script, "node-a node-b")
	dir := t.TempDir()
	cmd := exec.Command("sh", "-e", "-c", strings.ReplaceAll(script, "node-a node-b", "producer consumer"))
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	of := func(node string) nodeOption {
		return func(c *config.Config) {
			c.TLS = &config.TLS{Cert: filepath.Join(dir, node+".pem"), Key: filepath.Join(dir, node+"-key.pem"), CA: filepath.Join(dir, "ca.pem")}
		}
	}
	producer := startNode(t, "producer", of("producer"), onlyPeers, withPeer("consumer", closedPort(t)))
	consumer := startNode(t, "consumer", of("consumer"), onlyPeers, withPeer("producer", producer.Addresses().Peer))
	serves(t, producer, consumer)
}

// TestAuthorityChanges: a new authority is trusted from the next handshake on, and an old
// one no longer, without a restart.
func TestAuthorityChanges(t *testing.T) {
	old, next := newAuthority(t), newAuthority(t)
	producer := startNode(t, "producer", old.issue(t, "producer"))
	consumer := startNode(t, "consumer", next.issue(t, "consumer"), withPeer("producer", producer.Addresses().Peer))
	time.Sleep(100 * time.Millisecond)
	require.False(t, isReady(consumer, "producer"))
	read := func(a *authority) []byte {
		b, err := os.ReadFile(filepath.Join(a.dir, "ca.pem"))
		require.NoError(t, err)
		return b
	}
	both := append(read(old), read(next)...)
	for _, a := range []*authority{old, next} {
		require.NoError(t, os.WriteFile(filepath.Join(a.dir, "ca.pem"), both, 0o600))
	}
	serves(t, producer, consumer)
}
