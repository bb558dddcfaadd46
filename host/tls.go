package host

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"slices"

	"github.com/tierd/tierd/host/config"
)

// loadTLS returns the configurations of the two ends of mutual TLS. The certificate is
// read anew for each handshake, so that a renewed file is used without a restart; the
// authority is read once.
func loadTLS(c *config.TLS) (server, client *tls.Config, err error) {
	if c == nil {
		return nil, nil, nil
	}
	read := func() (*tls.Certificate, error) {
		cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("tls: certificate %s with key %s: %w", c.Cert, c.Key, err)
		}
		return &cert, nil
	}
	if _, err := read(); err != nil {
		return nil, nil, err
	}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, nil, fmt.Errorf("tls: ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, nil, fmt.Errorf("tls: ca %s holds no certificate in PEM", c.CA)
	}
	server = &tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return read() },
	}
	client = &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return read() },
	}
	return server, client, nil
}

// verifyNode ties a node id to the certificate that its peer presents: the id is one of
// its DNS names, or its common name.
func verifyNode(nodeID string, s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return fmt.Errorf("no certificate was presented")
	}
	cert := s.PeerCertificates[0]
	if cert.Subject.CommonName == nodeID || slices.Contains(cert.DNSNames, nodeID) {
		return nil
	}
	return fmt.Errorf("the certificate is for %q (DNS names %q); the node id must be among its names", cert.Subject.CommonName, cert.DNSNames)
}
