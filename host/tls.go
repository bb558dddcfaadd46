package host

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/tierd/tierd/host/config"
)

const (
	// certReviewInterval is how often the files are looked at without a handshake: an
	// expiry is worth one line an hour.
	certReviewInterval = time.Hour
	// certWarnAhead is how long before its end a certificate is warned about; one that
	// lives shorter is warned about in the last third of its life.
	certWarnAhead = 14 * 24 * time.Hour
	// certSettled is the age from which a file's time stamp is believed to change with
	// every write: clocks of file systems tick in steps of up to a second or two.
	certSettled = 3 * time.Second
	// certFileBytesMax: a bundle of some hundred authorities has that much.
	certFileBytesMax = 1 << 20
)

// certFiles are the PEM files of mutual TLS. They are looked at at every handshake and
// read again when they have changed. A renewal writes several files, so what is read in
// between may not fit: then the files before stay in use, and the log says so once.
type certFiles struct {
	names [3]string // cert, key, ca
	log   *slog.Logger
	now   func() time.Time

	mu      sync.Mutex
	stamps  [3]stamp
	settled bool
	in      *certs
	refused string // what was wrong with the files that are not used; "" when they are
}

// certs is what the files held.
type certs struct {
	cert tls.Certificate // with its leaf
	pool *x509.CertPool
	ca   time.Time // when the first authority in the file expires
	text [3]string
}

// A stamp changes when a file does.
type stamp struct {
	size            int64
	inode           uint64
	modified, since syscall.Timespec
}

func openCerts(c *config.TLS, log *slog.Logger) (*certFiles, error) {
	f := &certFiles{names: [3]string{c.Cert, c.Key, c.CA}, log: log, now: time.Now}
	var err error
	if f.stamps, f.settled, err = f.look(); err == nil {
		f.in, err = f.read()
	}
	if err != nil {
		return nil, err
	}
	f.review()
	return f, nil
}

// look returns the stamps of the files. settled: they are old enough to be relied on.
func (f *certFiles) look() (s [3]stamp, settled bool, err error) {
	settled = true
	for i, name := range f.names {
		st, err := os.Stat(name)
		if err != nil {
			return s, false, fmt.Errorf("tls.%s is %s: %w", certKeys[i], name, cause(err))
		}
		if !st.Mode().IsRegular() {
			return s, false, fmt.Errorf("tls.%s is %s, which is no file", certKeys[i], name) // a pipe would hold up every handshake
		}
		s[i].size = st.Size()
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			s[i].inode, s[i].modified, s[i].since = sys.Ino, sys.Mtim, sys.Ctim
			settled = settled && f.now().Sub(time.Unix(sys.Ctim.Unix())) > certSettled
		}
	}
	return s, settled, nil
}

var certKeys = [3]string{"cert", "key", "ca"}

func (f *certFiles) read() (*certs, error) {
	in := &certs{pool: x509.NewCertPool()}
	for i, name := range f.names {
		b, err := config.ReadAtMost(name, certFileBytesMax)
		if err != nil {
			return nil, fmt.Errorf("tls.%s is %s: %w", certKeys[i], name, cause(err))
		}
		in.text[i] = string(b)
	}
	var err error
	if in.cert, err = tls.X509KeyPair([]byte(in.text[0]), []byte(in.text[1])); err != nil {
		return nil, fmt.Errorf("tls.cert is %s, tls.key is %s: %w", f.names[0], f.names[1], err)
	}
	// A file that is cut off in a later block would pass for a shorter chain.
	if _, err := parseCerts([]byte(in.text[0])); err != nil {
		return nil, fmt.Errorf("tls.cert is %s: %w", f.names[0], err)
	}
	if in.cert.Leaf == nil {
		if in.cert.Leaf, err = x509.ParseCertificate(in.cert.Certificate[0]); err != nil {
			return nil, fmt.Errorf("tls.cert is %s: %w", f.names[0], err)
		}
	}
	authorities, err := parseCerts([]byte(in.text[2]))
	if err != nil {
		return nil, fmt.Errorf("tls.ca is %s: %w", f.names[2], err)
	}
	for _, c := range authorities {
		in.pool.AddCert(c)
		if in.ca.IsZero() || c.NotAfter.Before(in.ca) {
			in.ca = c.NotAfter
		}
	}
	return in, nil
}

// current returns what the files hold, or held when they were last whole.
func (f *certFiles) current() *certs {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, settled, err := f.look()
	if err == nil && f.settled && s == f.stamps {
		return f.in
	}
	var in *certs
	if err == nil {
		in, err = f.read()
	}
	if err != nil {
		if err.Error() != f.refused {
			f.refused = err.Error()
			f.log.Error("the TLS files have changed and cannot be used; those from before stay", "error", err)
		}
		f.settled = false // looked at anew at the next handshake
		return f.in
	}
	f.stamps, f.settled = s, settled
	if in.text == f.in.text && f.refused == "" {
		return f.in
	}
	f.in, f.refused = in, ""
	f.log.Info("TLS files read again", "cert", f.names[0], "names", certNames(in.cert.Leaf), "expires", in.cert.Leaf.NotAfter.UTC().Format(time.RFC3339))
	return f.in
}

// review looks at the files, and warns of an end that is near.
func (f *certFiles) review() {
	in := f.current()
	now := f.now()
	for _, c := range []struct {
		key, file   string
		since, ends time.Time
	}{
		{"tls.cert", f.names[0], in.cert.Leaf.NotBefore, in.cert.Leaf.NotAfter},
		{"tls.ca", f.names[2], time.Time{}, in.ca},
	} {
		ahead := certWarnAhead
		if !c.since.IsZero() {
			ahead = min(ahead, c.ends.Sub(c.since)/3)
		}
		left := c.ends.Sub(now)
		args := []any{"key", c.key, "file", c.file, "expires", c.ends.UTC().Format(time.RFC3339), "days", fmt.Sprintf("%.1f", days(left))}
		switch {
		case left <= 0:
			f.log.Error("a certificate has expired; peers refuse it: write a new one to the same file, which is used without a restart", args...)
		case left <= ahead:
			f.log.Warn("a certificate expires soon; write a new one to the same file, which is used without a restart", args...)
		}
		if now.Before(c.since) {
			f.log.Error("a certificate is not valid yet; peers refuse it: see that the clock of this machine is right", "key", c.key, "file", c.file, "valid_from", c.since.UTC().Format(time.RFC3339))
		}
	}
}

func days(d time.Duration) float64 { return d.Hours() / 24 }

// days returns the days until the certificate and the first authority expire; negative
// when they have.
func (f *certFiles) days() (cert, ca float64) {
	in := f.current()
	return days(in.cert.Leaf.NotAfter.Sub(f.now())), days(in.ca.Sub(f.now()))
}

// own says what is wrong with this node's own certificate; "" when nothing is.
func (f *certFiles) own() string {
	f.mu.Lock()
	leaf := f.in.cert.Leaf
	f.mu.Unlock()
	return f.outside(leaf)
}

// outside says that a certificate is used outside its time; "" when it is not.
func (f *certFiles) outside(c *x509.Certificate) string {
	switch now := f.now(); {
	case now.After(c.NotAfter):
		return fmt.Sprintf("expired on %s, %.1f days ago", c.NotAfter.UTC().Format(time.RFC3339), days(now.Sub(c.NotAfter)))
	case now.Before(c.NotBefore):
		return fmt.Sprintf("is not valid before %s, in %.1f days", c.NotBefore.UTC().Format(time.RFC3339), days(c.NotBefore.Sub(now)))
	}
	return ""
}

// explain adds to the error of a connection whose certificate it is about. The alert of a
// peer does not say that this node's own one has expired, nor does the error of a port
// say whose it has refused.
func (f *certFiles) explain(err error) error {
	var refused *tls.CertificateVerificationError
	if errors.As(err, &refused) && len(refused.UnverifiedCertificates) > 0 {
		leaf := refused.UnverifiedCertificates[0]
		if text := f.outside(leaf); text != "" {
			return fmt.Errorf("the peer's certificate, for %s, %s: the peer must get a new one: %w", certNames(leaf), text, err)
		}
		return fmt.Errorf("the peer's certificate, for %s, does not verify with tls.ca, %s: %w", certNames(leaf), f.names[2], err)
	}
	// The alert may be lost with the connection, so any error may be about it.
	if text := f.own(); err != nil && text != "" {
		return fmt.Errorf("%w; this node's certificate %s %s: write a new one to the same file", err, f.names[0], text)
	}
	return err
}

// verify judges the chain that a peer presents. It asks for no host name: who a peer is,
// its identity says (admit.List.Certificate), which its caller looks at; a host name would
// bind a certificate to a machine.
func (f *certFiles) verify(state tls.ConnectionState, usage x509.ExtKeyUsage) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("no certificate was presented")
	}
	leaf, between := state.PeerCertificates[0], x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		between.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: f.current().pool, Intermediates: between, CurrentTime: f.now(), KeyUsages: []x509.ExtKeyUsage{usage},
	})
	if err == nil {
		return nil
	}
	if text := f.outside(leaf); text != "" {
		return fmt.Errorf("the peer's certificate, for %s, %s: the peer must get a new one: %w", certNames(leaf), text, err)
	}
	return fmt.Errorf("the peer's certificate, for %s, does not verify with tls.ca, %s: %w", certNames(leaf), f.names[2], err)
}

// server returns the configuration of ports. Each handshake gets one of its own, with what
// the files hold then; nothing of an earlier connection is resumed, so that a certificate
// that is refused today was not let in by a ticket of yesterday.
func (f *certFiles) server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			in := f.current()
			return &tls.Config{
				MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, Time: f.now, Certificates: []tls.Certificate{in.cert},
				ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: in.pool,
			}, nil
		},
	}
}

// client returns the configuration of dials. identity, when set, judges the certificate on
// top of its chain.
func (f *certFiles) client(identity func(tls.ConnectionState) error) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Time: f.now,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert := f.current().cert
			return &cert, nil
		},
		// Not insecure: it only leaves out the host name. VerifyConnection verifies the
		// chain, with the authorities that the file has now.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if err := f.verify(s, x509.ExtKeyUsageServerAuth); err != nil {
				return err
			}
			if identity != nil {
				return identity(s)
			}
			return nil
		},
	}
}

// certNames lists a certificate's names for a message.
func certNames(c *x509.Certificate) string {
	names := slices.Clone(c.DNSNames)
	for _, u := range c.URIs {
		names = append(names, u.String())
	}
	const most = 4 // a message, not a list
	if len(names) > most {
		names = append(names[:most], "...")
	}
	return fmt.Sprintf("%.256q", names)
}

// parseCerts reads the certificates of a PEM file, all of which must be right: half an
// authority file would refuse half the peers.
func parseCerts(data []byte) (out []*x509.Certificate, err error) {
	blocks := 0
	for rest := data; ; blocks++ {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		if b.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	if begun := bytes.Count(data, []byte("-----BEGIN ")); begun != blocks {
		return nil, fmt.Errorf("%d PEM blocks begin in it and %d are whole", begun, blocks)
	}
	if len(out) == 0 {
		return nil, errors.New("it holds no certificate in PEM")
	}
	return out, nil
}
