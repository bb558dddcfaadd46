// Package config reads node.yaml, the configuration of one tierd daemon.
//
// Every key has a unit in its name, every bound and deadline a default that the
// comments here give, and every refusal says which key is wrong, the value it has
// and what to change. An unknown key is refused with the nearest known one, because
// a misspelt deadline that silently keeps its default is found months later.
//
// Paths are relative to the file that names them.
package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/tierd/tierd/registry/deploy/strictyaml"
)

// Config is node.yaml.
type Config struct {
	// File is where the configuration was read; errors name it.
	File string `yaml:"-"`
	// NodeID names this node to its peers: letters, digits, dot, dash, underscore.
	NodeID string `yaml:"node_id"`
	// StateDir keeps verdicts, modules that came from peers and addresses.json, for one
	// daemon at a time. It is made if it is not there; the directory above it must exist.
	StateDir string `yaml:"state_dir"`
	// EngineSocket is the Unix socket for engines, created with mode 0600 in a directory
	// that exists.
	EngineSocket string `yaml:"engine_socket"`
	// PeerListen and DataListen are the host:port for control and for bytes.
	PeerListen string `yaml:"peer_listen"`
	DataListen string `yaml:"data_listen"`
	// Advertise is where peers reach the data port: a host, or host:port when the
	// port is mapped on the way. Empty means the host of DataListen.
	Advertise string `yaml:"advertise"`
	// HTTPListen serves /metrics, /healthz and /readyz, and /statusz to this machine only.
	// Default 127.0.0.1:9470.
	HTTPListen string `yaml:"http_listen"`
	// SlabBytes is the size of the primary tier, in bytes.
	SlabBytes int64 `yaml:"slab_bytes"`
	// SlabDir holds the slab and the engines' regions. It must exist, and be in memory
	// (tmpfs) for anything but tests. Default /dev/shm.
	SlabDir string `yaml:"slab_dir"`
	// Device holds the regions of engines: "mem" is host memory, "cuda:N" or "cuda:UUID" a
	// GPU, and "auto" the first GPU where there is one. Default auto.
	Device string `yaml:"device"`
	// Deployment is the path of the deployment file.
	Deployment string `yaml:"deployment"`
	// Certificate is the path of a certificate of the deployment, which is accepted instead
	// of a check when one of CertificateKeys has signed it and it is of the same deployment,
	// rules and executable. Anything else about it is logged, and the check runs.
	Certificate string `yaml:"certificate"`
	// CertificateKeys are the paths of the public keys, in PEM, whose certificates count.
	CertificateKeys []string `yaml:"certificate_keys"`
	// PeerRules is a directory with rules of other versions that peers run by: a peer's
	// module is looked for there, by its digest, before it is fetched from the peer, and a
	// rule of a peer that is a program is run only when it is there. Whoever can write there
	// can run programs as this daemon. Empty means none.
	PeerRules string `yaml:"peer_rules"`
	// Peers are the nodes that this one dials, and that may dial it.
	Peers []Peer `yaml:"peers"`
	// PeerCIDRs are ranges of addresses: a node that is not in Peers may dial from one, and
	// a peer may name one as its data address. Default 127.0.0.0/8 and ::1/128, which is
	// this machine; a loopback address is believed only of a peer that is itself on it.
	PeerCIDRs []string `yaml:"peer_cidrs"`
	// TLS secures control and data; Insecure says that nothing does.
	TLS      *TLS `yaml:"tls"`
	Insecure bool `yaml:"insecure"`
	// PairCommand runs this program as a process that judges the pair of two versions: how to
	// start it is the program's to know, so it is no key of the file. Empty means that the
	// daemon judges in its own process.
	PairCommand []string `yaml:"-"`
	// LogLevel is debug, info, warn or error. Default info.
	LogLevel  string    `yaml:"log_level"`
	Deadlines Deadlines `yaml:"deadlines"`
	Bounds    Bounds    `yaml:"bounds"`
}

// Peer is one entry of Config.Peers.
type Peer struct {
	ID string `yaml:"id"`
	// Control is the host:port of the peer's peer_listen.
	Control string `yaml:"control"`
	// Identity is the DNS name or URI that the peer's certificate has among its subject
	// alternative names, letter by letter. Empty means ID.
	Identity string `yaml:"identity"`
}

// TLS names PEM files: this node's certificate and key, and the authority that
// signs the certificates of peers.
type TLS struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

// Deadlines are in milliseconds, but for the rate. Zero means the default.
type Deadlines struct {
	// RequestMS: how long a request may wait for a peer unless it says itself. 30000.
	RequestMS int64 `yaml:"request_ms"`
	// LookupMS: one batch of lookups. 500.
	LookupMS int64 `yaml:"lookup_ms"`
	// ConnectMS: connect and hello. 750.
	ConnectMS int64 `yaml:"connect_ms"`
	// RetryMS, RetryMaxMS: between two tries to connect; it doubles from one to the other.
	// 50, 500.
	RetryMS    int64 `yaml:"retry_ms"`
	RetryMaxMS int64 `yaml:"retry_max_ms"`
	// PingMS, SuspectMS, DeadMS: between pings; without a byte. 250, 750, 2000.
	PingMS    int64 `yaml:"ping_ms"`
	SuspectMS int64 `yaml:"suspect_ms"`
	DeadMS    int64 `yaml:"dead_ms"`
	// TransferMS: what a transfer gets on top of its bytes. 500.
	TransferMS int64 `yaml:"transfer_ms"`
	// TransferMBPerS: the rate, in MB (10^6 bytes) a second, at which the bytes of a
	// transfer and of a chunk being written are given time. 200.
	TransferMBPerS int64 `yaml:"transfer_mb_per_s"`
	// PendingMS: what a chunk being written gets on top of its bytes. 2000.
	PendingMS int64 `yaml:"pending_ms"`
	// ParkedMS: unbound supply. 60000.
	ParkedMS int64 `yaml:"parked_ms"`
	// LeaseMS: supply that is bound to a demand, without a renewal by its consumer. 10000.
	LeaseMS int64 `yaml:"lease_ms"`
	// FinishedMS: how long the id of a finished transfer is remembered. 60000.
	FinishedMS int64 `yaml:"finished_ms"`
	// DrainMS: from SIGTERM to exit. 5000.
	DrainMS int64 `yaml:"drain_ms"`
	// PairFetchMS: what a peer of another version runs by, from asking to having it. 30000.
	PairFetchMS int64 `yaml:"pair_fetch_ms"`
	// PairCheckMS: one check of the pair of two versions, in the background. 600000.
	PairCheckMS int64 `yaml:"pair_check_ms"`
}

// Bounds limit what others can make this node hold. Zero means the default.
type Bounds struct {
	// Engines attached at a time. 8.
	Engines int64 `yaml:"engines"`
	// Requests live in one engine. 1024.
	Requests int64 `yaml:"requests"`
	// ParkedBytes of the slab for supply that waits for its consumer, a slot for each chunk.
	// Half of slab_bytes.
	ParkedBytes int64 `yaml:"parked_bytes"`
	// PeerPinnedBytes that the demands of one peer may keep from being reused: what is bound
	// to them, and what the tier holds of them, a slot for each chunk. A chunk over it is
	// refused. 0 is half of slab_bytes, so that one peer leaves room for this node's requests
	// and for other peers, or what one longest prompt of the deployment takes if that is more.
	PeerPinnedBytes int64 `yaml:"peer_pinned_bytes"`
	// Sessions with peers. 64.
	Sessions int64 `yaml:"sessions"`
	// MessageBytes of one control message. 4 MiB: the hashes of a prompt of two
	// million tokens at 16 tokens a granule and 32 bytes a hash.
	MessageBytes int64 `yaml:"message_bytes"`
}

// Limits of the values above.
const (
	// DeadlineMSMax: an hour. A longer wait is a hang by another name.
	DeadlineMSMax = 3_600_000
	// TransferMBPerSMax: a terabyte a second is faster than any network of a node.
	TransferMBPerSMax = 1_000_000
	// MessageBytesMin: the hashes and block numbers of a short prompt must fit.
	MessageBytesMin = 64 << 10
	// MessageBytesMax: one message is held in memory whole, per stream.
	MessageBytesMax = 64 << 20
	// SocketPathBytesMax is what the kernel's sockaddr_un holds, less its zero byte.
	SocketPathBytesMax = 107
	// CertificateKeysMax: each key is tried with each signature of a certificate.
	CertificateKeysMax = 16
	// PeerCIDRsMax: each is tried with each address.
	PeerCIDRsMax = 64
	// IdentityBytesMax: a SPIFFE ID has at most 2048 bytes.
	IdentityBytesMax = 2048
	// BoundMax keeps every count in 32 bits.
	BoundMax = 1 << 20
)

// Defaults returns a configuration that holds every default.
func Defaults() Config {
	return Config{
		HTTPListen: "127.0.0.1:9470",
		SlabDir:    "/dev/shm",
		Device:     "auto",
		LogLevel:   "info",
		PeerCIDRs:  []string{"127.0.0.0/8", "::1/128"},
		Deadlines: Deadlines{
			RequestMS: 30_000, LookupMS: 500, ConnectMS: 750, RetryMS: 50, RetryMaxMS: 500,
			PingMS: 250, SuspectMS: 750, DeadMS: 2_000,
			TransferMS: 500, TransferMBPerS: 200, PendingMS: 2_000, ParkedMS: 60_000, LeaseMS: 10_000, FinishedMS: 60_000, DrainMS: 5_000,
			PairFetchMS: 30_000, PairCheckMS: 600_000,
		},
		Bounds: Bounds{Engines: 8, Requests: 1024, Sessions: 64, MessageBytes: 4 << 20},
	}
}

// Load reads the file at path.
func Load(path string) (*Config, error) {
	data, err := ReadAtMost(path, strictyaml.FileBytesMax)
	if err != nil {
		return nil, fmt.Errorf("node configuration: %w", err)
	}
	return Parse(path, data)
}

// ReadAtMost reads a file that may be a pipe or have no end, as a device does that is given
// by mistake. A file of more than maxBytes is an error.
func ReadAtMost(path string, maxBytes int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err == nil && int64(len(data)) > maxBytes {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("it has more than %d bytes", maxBytes)}
	}
	return data, err
}

// Parse reads a configuration whose file is (or would be) at path.
func Parse(path string, data []byte) (*Config, error) {
	c := Defaults()
	c.File = path
	if err := strictyaml.Decode(path, data, &c); err != nil {
		return nil, err
	}
	c.fillZeros()
	c.resolve(filepath.Dir(path))
	if err := c.Validate(); err != nil {
		if line := lineOf(err, strictyaml.Lines(data)); line > 0 {
			return nil, fmt.Errorf("%s:%d: %w", path, line, err)
		}
		return nil, c.Errorf("%w", err)
	}
	return &c, nil
}

// lineOf returns the line of the key that a message of Validate begins with, or 0 when the
// file does not have it.
func lineOf(err error, lines map[string]int) int {
	key := strings.TrimRight(strings.SplitN(err.Error(), " ", 2)[0], ":")
	return lines[key]
}

// Errorf is fmt.Errorf with the configuration's file in front. Whoever finds out that a
// value does not work, such as a port that is taken, uses it too.
func (c *Config) Errorf(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if c.File == "" {
		return err
	}
	return fmt.Errorf("%s: %w", c.File, err)
}

// fillZeros gives fields that were written as 0 or "" their defaults.
func (c *Config) fillZeros() {
	d := Defaults()
	for i, f := range c.Deadlines.fields() {
		if *f.value == 0 {
			*f.value = *d.Deadlines.fields()[i].value
		}
	}
	for i, f := range c.Bounds.fields() {
		if *f.value == 0 {
			*f.value = *d.Bounds.fields()[i].value
		}
	}
	if len(c.CertificateKeys) == 0 {
		c.CertificateKeys = nil // [] is none, too
	}
	if c.Bounds.ParkedBytes == 0 {
		c.Bounds.ParkedBytes = c.SlabBytes / 2
	}
	for _, s := range []struct{ at, or *string }{
		{&c.HTTPListen, &d.HTTPListen}, {&c.SlabDir, &d.SlabDir}, {&c.Device, &d.Device}, {&c.LogLevel, &d.LogLevel},
	} {
		if *s.at == "" {
			*s.at = *s.or
		}
	}
}

func (c *Config) resolve(dir string) {
	paths := []*string{&c.StateDir, &c.EngineSocket, &c.SlabDir, &c.Deployment, &c.Certificate, &c.PeerRules}
	for i := range c.CertificateKeys {
		paths = append(paths, &c.CertificateKeys[i])
	}
	if c.TLS != nil {
		paths = append(paths, &c.TLS.Cert, &c.TLS.Key, &c.TLS.CA)
	}
	for _, p := range paths {
		if *p != "" && !filepath.IsAbs(*p) {
			*p = filepath.Join(dir, *p)
		}
	}
}

type field struct {
	name  string
	value *int64
}

func (d *Deadlines) fields() []field {
	return []field{
		{"request_ms", &d.RequestMS}, {"lookup_ms", &d.LookupMS}, {"connect_ms", &d.ConnectMS},
		{"retry_ms", &d.RetryMS}, {"retry_max_ms", &d.RetryMaxMS},
		{"ping_ms", &d.PingMS}, {"suspect_ms", &d.SuspectMS}, {"dead_ms", &d.DeadMS},
		{"transfer_ms", &d.TransferMS}, {"transfer_mb_per_s", &d.TransferMBPerS}, {"pending_ms", &d.PendingMS},
		{"parked_ms", &d.ParkedMS}, {"lease_ms", &d.LeaseMS}, {"finished_ms", &d.FinishedMS}, {"drain_ms", &d.DrainMS},
		{"pair_fetch_ms", &d.PairFetchMS}, {"pair_check_ms", &d.PairCheckMS},
	}
}

// fields are the counts; parked_bytes and peer_pinned_bytes follow slab_bytes and are not among
// them.
func (b *Bounds) fields() []field {
	return []field{
		{"engines", &b.Engines}, {"requests", &b.Requests}, {"sessions", &b.Sessions}, {"message_bytes", &b.MessageBytes},
	}
}

// Millis turns one of the deadlines into a duration.
func Millis(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

// Level is LogLevel for slog.
func (c *Config) Level() (slog.Level, error) {
	switch strings.ToLower(c.LogLevel) {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("log_level is %q; it must be debug, info, warn or error", c.LogLevel)
}

// device has the choices of package devices.
var device = regexp.MustCompile(`^(auto|mem|cuda:[0-9]{1,4}|cuda:(GPU-)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12})$`)

var nodeID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// Validate reports the first value that a node cannot start with.
func (c *Config) Validate() error {
	for _, f := range []struct{ name, value, what string }{
		{"node_id", c.NodeID, "the name by which peers know this node"},
		{"state_dir", c.StateDir, "a directory that only this daemon writes to"},
		{"engine_socket", c.EngineSocket, "the path of the Unix socket for engines"},
		{"peer_listen", c.PeerListen, "the host:port for peers' control streams"},
		{"data_listen", c.DataListen, "the host:port for peers' bytes"},
		{"deployment", c.Deployment, "the path of the deployment file"},
	} {
		if f.value == "" {
			return fmt.Errorf("%s is missing; set it to %s", f.name, f.what)
		}
	}
	if !nodeID.MatchString(c.NodeID) {
		return fmt.Errorf("node_id is %q; it must be 1 to 64 letters, digits, dots, dashes or underscores", c.NodeID)
	}
	if n := len(c.EngineSocket); n > SocketPathBytesMax {
		return fmt.Errorf("engine_socket %s has %d bytes; a Unix socket's path has at most %d: choose a shorter path", c.EngineSocket, n, SocketPathBytesMax)
	}
	if c.SlabBytes == 0 {
		return errors.New("slab_bytes is missing or 0; set it to the bytes of host memory that the tier may use, such as 1073741824 for 1 GiB")
	}
	if c.SlabBytes < 0 {
		return fmt.Errorf("slab_bytes is %d; set it to the bytes of host memory that the tier may use, such as 1073741824 for 1 GiB", c.SlabBytes)
	}
	if !device.MatchString(c.Device) {
		return fmt.Errorf("device is %q; it must be auto, mem, cuda:N with a number such as cuda:0, or cuda:UUID with the UUID that nvidia-smi -L prints", c.Device)
	}
	if _, err := c.Level(); err != nil {
		return err
	}
	return firstOf(c.validateCertificate, c.validateAddresses, c.validateTLS, c.validatePeers, c.validateNumbers)
}

func firstOf(checks ...func() error) error {
	for _, check := range checks {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) validateCertificate() error {
	n := len(c.CertificateKeys)
	switch {
	case c.Certificate != "" && n == 0:
		return errors.New("certificate is set, but certificate_keys lists none; list the public keys whose certificates this node accepts")
	case c.Certificate == "" && n > 0:
		return errors.New("certificate_keys is set, but certificate is not; set it to the certificate's path, or remove certificate_keys")
	case n > CertificateKeysMax:
		return fmt.Errorf("certificate_keys lists %d keys; it may list %d", n, CertificateKeysMax)
	}
	for i, path := range c.CertificateKeys {
		if path == "" {
			return fmt.Errorf("certificate_keys[%d] is empty; it must be the path of a public key", i)
		}
	}
	return nil
}

func (c *Config) validateAddresses() error {
	for _, a := range []struct{ name, value string }{
		{"peer_listen", c.PeerListen}, {"data_listen", c.DataListen}, {"http_listen", c.HTTPListen},
	} {
		if err := checkHostPort(a.name, a.value); err != nil {
			return err
		}
	}
	if err := c.clash(); err != nil {
		return err
	}
	if err := checkAdvertise(c.Advertise); err != nil {
		return err
	}
	host, _, _ := net.SplitHostPort(c.DataListen)
	if ip := net.ParseIP(host); c.Advertise == "" && (host == "" || ip != nil && ip.IsUnspecified()) {
		return fmt.Errorf("data_listen is %s, which names no host that a peer could connect to; set advertise to this node's host name or address", c.DataListen)
	}
	return nil
}

// clash refuses two keys with one address: the same host, or one that means every address of
// the machine. Port 0 is another one each time.
func (c *Config) clash() error {
	listens := []struct{ name, value string }{{"http_listen", c.HTTPListen}, {"data_listen", c.DataListen}, {"peer_listen", c.PeerListen}}
	for i, a := range listens {
		for _, b := range listens[:i] {
			h, p := address(a.value)
			g, q := address(b.value)
			switch every := h == "" || g == ""; {
			case p != q || p == 0:
			case h == g:
				return fmt.Errorf("%s is %s, and so is %s; give each a port of its own", a.name, a.value, b.name)
			case every:
				return fmt.Errorf("%s is %s and %s is %s, of which one is every address of this machine; give each a port of its own", a.name, a.value, b.name, b.value)
			}
		}
	}
	return nil
}

// address is a checked host:port with its port as a number; the host is "" when it means every
// address of the machine.
func address(hostport string) (host string, port int) {
	host, name, _ := net.SplitHostPort(hostport)
	port, _ = net.LookupPort("tcp", name)
	switch ip := net.ParseIP(host); {
	case ip != nil && ip.IsUnspecified():
		host = ""
	case ip != nil:
		host = ip.String()
	case strings.EqualFold(host, "localhost"):
		host = "127.0.0.1"
	}
	return strings.ToLower(host), port
}

func checkAdvertise(a string) error {
	host, port, err := net.SplitHostPort(a)
	if err != nil { // no port, or an IPv6 address without brackets
		host = a
	} else if n, err := net.LookupPort("tcp", port); err != nil || n == 0 || host == "" {
		return fmt.Errorf("advertise is %q; it must be a host, such as node-a, or host:port, such as node-a:7001", a)
	}
	if strings.ContainsAny(host, "/[]") || strings.Contains(host, ":") && net.ParseIP(host) == nil {
		return fmt.Errorf("advertise is %q; it must be a host, such as node-a, or host:port, such as node-a:7001", a)
	}
	return nil
}

func checkHostPort(name, value string) error {
	_, port, err := net.SplitHostPort(value)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%s is %q; it must be host:port, such as 127.0.0.1:7000", name, value)
	}
	return nil
}

// Loopback reports whether only processes of this machine reach a host:port. Of names only
// localhost counts: what another one means is not known before it is listened on.
func Loopback(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (c *Config) validateTLS() error {
	if c.TLS != nil {
		if c.Insecure {
			return errors.New("both tls and insecure: true are set; remove one of the two")
		}
		for _, f := range []struct{ name, value string }{{"cert", c.TLS.Cert}, {"key", c.TLS.Key}, {"ca", c.TLS.CA}} {
			if f.value == "" {
				return fmt.Errorf("tls.%s is missing; tls needs the PEM files cert, key and ca", f.name)
			}
		}
		return nil
	}
	if c.Insecure {
		return nil
	}
	for _, a := range []struct{ name, value string }{{"peer_listen", c.PeerListen}, {"data_listen", c.DataListen}} {
		if !Loopback(a.value) {
			return fmt.Errorf("%s is %s, which other machines can reach, and tls is not set; set tls: {cert, key, ca}, or listen on 127.0.0.1, or set insecure: true when every machine on that network is trusted", a.name, a.value)
		}
	}
	return nil
}

func (c *Config) validatePeers() error {
	seen := map[string]bool{}
	for i, p := range c.Peers {
		switch {
		case !nodeID.MatchString(p.ID):
			return fmt.Errorf("peers[%d].id is %q; it must be the peer's node_id: 1 to 64 letters, digits, dots, dashes or underscores", i, p.ID)
		case p.ID == c.NodeID:
			return fmt.Errorf("peers[%d].id is %q, which is this node's own node_id; remove the entry or correct it", i, p.ID)
		case seen[p.ID]:
			return fmt.Errorf("peers[%d].id is %q a second time; each peer is listed once", i, p.ID)
		}
		seen[p.ID] = true
		if err := checkHostPort(fmt.Sprintf("peers[%d].control", i), p.Control); err != nil {
			return err
		}
		if n := len(p.Identity); n > IdentityBytesMax || strings.ContainsAny(p.Identity, " *\t\r\n") {
			return fmt.Errorf("peers[%d].identity is %.80q, %d bytes; it must be one DNS name or URI of the peer's certificate, without wildcards, of at most %d bytes", i, p.Identity, n, IdentityBytesMax)
		}
	}
	if _, err := c.CIDRs(); err != nil {
		return err
	}
	if n := int64(len(c.Peers)); n > c.Bounds.Sessions {
		return fmt.Errorf("%d peers are listed, but bounds.sessions is %d; raise the bound or list fewer", n, c.Bounds.Sessions)
	}
	return nil
}

// CIDRs are PeerCIDRs, parsed.
func (c *Config) CIDRs() ([]netip.Prefix, error) {
	if n := len(c.PeerCIDRs); n > PeerCIDRsMax {
		return nil, fmt.Errorf("peer_cidrs lists %d ranges; it may list %d", n, PeerCIDRsMax)
	}
	out := make([]netip.Prefix, len(c.PeerCIDRs))
	for i, s := range c.PeerCIDRs {
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil:
			return nil, fmt.Errorf("peer_cidrs[%d] is %q; it must be a range of addresses, such as 10.0.0.0/24, or 10.0.0.7/32 for one", i, s)
		case p.Addr().Is4In6():
			return nil, fmt.Errorf("peer_cidrs[%d] is %s, IPv4 written as IPv6; write it as IPv4, such as 10.0.0.0/24", i, s)
		case p != p.Masked():
			return nil, fmt.Errorf("peer_cidrs[%d] is %s, which has bits behind its %d; write %s, or %s/%d for that one address", i, s, p.Bits(), p.Masked(), p.Addr(), p.Addr().BitLen())
		}
		out[i] = p
	}
	return out, nil
}

func (c *Config) validateNumbers() error {
	d := &c.Deadlines
	for _, f := range d.fields() {
		most, unit := int64(DeadlineMSMax), "milliseconds"
		if f.value == &d.TransferMBPerS {
			most, unit = TransferMBPerSMax, "MB per second"
		}
		if *f.value < 1 || *f.value > most {
			return fmt.Errorf("deadlines.%s is %d; it must be 1 to %d %s", f.name, *f.value, most, unit)
		}
	}
	switch {
	case d.RetryMaxMS < d.RetryMS:
		return fmt.Errorf("deadlines: retry_ms is %d and retry_max_ms %d; the pause doubles from one to the other, so retry_max_ms must not be smaller", d.RetryMS, d.RetryMaxMS)
	case d.LeaseMS < 3*d.PingMS:
		return fmt.Errorf("deadlines: lease_ms is %d and ping_ms %d; a lease is renewed three times while it lasts, and no more often than pings are sent: lease_ms must be at least three times ping_ms", d.LeaseMS, d.PingMS)
	}
	if 2*d.PingMS > d.SuspectMS || d.SuspectMS >= d.DeadMS {
		return fmt.Errorf("deadlines: ping_ms is %d, suspect_ms %d and dead_ms %d; suspect_ms must be at least twice ping_ms, or one late ping makes a healthy peer suspect, and dead_ms must be longer than suspect_ms", d.PingMS, d.SuspectMS, d.DeadMS)
	}
	b := &c.Bounds
	for _, f := range b.fields() {
		lo, hi := int64(1), int64(BoundMax)
		if f.name == "message_bytes" {
			lo, hi = MessageBytesMin, MessageBytesMax
		}
		if *f.value < lo || *f.value > hi {
			return fmt.Errorf("bounds.%s is %d; it must be %d to %d", f.name, *f.value, lo, hi)
		}
	}
	if b.ParkedBytes < 1 || b.ParkedBytes > c.SlabBytes {
		return fmt.Errorf("bounds.parked_bytes is %d; it must be 1 to slab_bytes, %d; 0 means half of that", b.ParkedBytes, c.SlabBytes)
	}
	if b.PeerPinnedBytes < 0 || b.PeerPinnedBytes > c.SlabBytes {
		return fmt.Errorf("bounds.peer_pinned_bytes is %d; it must be 1 to slab_bytes, %d; 0 means half of that, or what one longest prompt takes", b.PeerPinnedBytes, c.SlabBytes)
	}
	return nil
}
