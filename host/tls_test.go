package host

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
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

// issue signs a certificate for a node id on the loopback address.
func (a *authority) issue(t *testing.T, nodeID string) nodeOption {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: nodeID}, DNSNames: []string{nodeID},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	c := &config.TLS{
		Cert: writePEM(t, filepath.Join(a.dir, nodeID+".pem"), "CERTIFICATE", der),
		Key:  writePEM(t, filepath.Join(a.dir, nodeID+"-key.pem"), "EC PRIVATE KEY", keyDER),
		CA:   filepath.Join(a.dir, "ca.pem"),
	}
	return func(cfg *config.Config) { cfg.TLS = c }
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
	conn, err := tls.Dial("tcp", producer.Addresses().Data, &tls.Config{InsecureSkipVerify: true})
	if err == nil { // TLS 1.3: the client hears of the refusal with its first read
		_, err = conn.Read(make([]byte, 1))
		conn.Close()
	}
	require.Error(t, err)
	clean(t, producer, consumer)
	serves(t, producer, consumer)
}
