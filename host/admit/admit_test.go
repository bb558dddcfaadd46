package admit

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden file anew")

func cidrs(s ...string) (out []netip.Prefix) {
	for _, c := range s {
		out = append(out, netip.MustParsePrefix(c))
	}
	return out
}

var peers = []Peer{
	{ID: "b", Control: "10.0.0.2:7000"},
	{ID: "c", Control: "node-c:7000", Identity: "spiffe://example/tierd/c"},
	{ID: "six", Control: "[2001:db8::6]:7000"},
	{ID: "here", Control: "127.0.0.1:7000"},
}

// names is a resolver.
type names map[string][]netip.Addr

func (n names) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{ip}, nil
	}
	if a := n[strings.ToLower(host)]; a != nil {
		return a, nil
	}
	return nil, errors.New("no such host")
}

var zone = names{
	"node-c": {netip.MustParseAddr("10.0.0.3")}, "node-c-data": {netip.MustParseAddr("::ffff:10.0.0.3")}, "inside": {netip.MustParseAddr("10.1.0.9")},
	"cloud": {netip.MustParseAddr("169.254.169.254")}, "me": {netip.MustParseAddr("127.0.0.1")}, "db": {netip.MustParseAddr("10.0.0.99")},
}

// reach is what a data address comes to: the words of the Hello, then of the dial.
func reach(l *List, id, address string, near bool) error {
	if err := l.DataAddress(id, address, near); err != nil {
		return err
	}
	host, _, _ := net.SplitHostPort(address)
	ips, err := zone.LookupNetIP(context.Background(), "ip", host)
	if err != nil {
		return err
	}
	for _, ip := range ips {
		if err := l.Dial(context.Background(), zone, id, address, near)(ip); err != nil {
			return err
		}
	}
	return nil
}

func TestAllowed(t *testing.T) {
	l := New("a", peers, cidrs("10.1.0.0/16", "127.0.0.0/8", "::1/128"))
	for _, c := range []struct {
		id, address string
		near        bool
	}{
		{"b", "10.0.0.2:7001", false}, {"b", "[::ffff:10.0.0.2]:7001", false}, {"b", "10.1.2.3:7001", false}, {"b", "inside:7001", false},
		{"c", "node-c:7001", false}, {"c", "NODE-C:7001", false}, {"c", "10.0.0.3:7001", false}, {"c", "node-c-data:7001", false},
		{"six", "[2001:db8::6]:1", false}, {"here", "127.0.0.1:7001", true}, {"here", "127.0.0.1:7001", false}, {"here", "127.0.0.5:7001", true},
		{"stranger", "10.1.0.1:65535", false}, {"stranger", "127.0.0.1:7001", true}, {"stranger", "[::1]:7001", true}, {"stranger", "me:7001", true},
	} {
		require.NoError(t, reach(l, c.id, c.address, c.near), "%+v", c)
	}
	require.NoError(t, l.Session("b", netip.MustParseAddr("192.0.2.1")), "a configured peer may come from anywhere: its certificate says who it is")
	require.NoError(t, l.Session("b", netip.Addr{}))
	require.NoError(t, l.Session("stranger", netip.MustParseAddr("10.1.0.1")))
	require.NoError(t, l.Session("stranger", netip.MustParseAddr("::ffff:10.1.0.1")))
}

func TestRefusals(t *testing.T) {
	l := New("a", peers, cidrs("10.1.0.0/16", "127.0.0.0/8"))
	var got strings.Builder
	for _, c := range []struct {
		id, address string
		near        bool
	}{
		{"b", "10.0.0.3:7001", false}, {"b", "169.254.169.254:80", false}, {"b", "cloud:80", false}, {"b", "127.0.0.1:6379", false}, {"b", "me:6379", false},
		{"b", "0.0.0.0:7001", true}, {"b", "[::]:7001", true}, {"b", "224.0.0.1:7001", false}, {"b", "255.255.255.255:7001", false},
		{"c", "10.0.0.99:7001", false}, {"c", "db:5432", false}, {"c", "127.0.0.1:22", false}, {"here", "db:5432", true},
		{"stranger", "10.0.0.2:7000", false}, {"stranger", "db:5432", false},
		{"b", "", false}, {"b", "10.0.0.2", false}, {"b", "10.0.0.2:0", false}, {"b", "10.0.0.2:65536", false}, {"b", "10.0.0.2:http", false}, {"b", ":7001", false},
	} {
		err := reach(l, c.id, c.address, c.near)
		require.Error(t, err, "%+v", c)
		fmt.Fprintf(&got, "%s says %q\n    %v\n", c.id, c.address, err)
	}
	none := New("a", nil, nil)
	fmt.Fprintf(&got, "session\n    %v\n    %v\n", l.Session("x", netip.MustParseAddr("192.0.2.7")), none.Session("x", netip.Addr{}))
	fmt.Fprintf(&got, "no ranges\n    %v\n", none.DataAddress("x", "10.0.0.1:1", true))
	spiffe, _ := url.Parse("spiffe://example/tierd/b")
	for _, cert := range []*x509.Certificate{
		{Subject: pkix.Name{CommonName: "b"}},
		{Subject: pkix.Name{CommonName: "x"}, DNSNames: []string{"c", "*.b", "B"}, URIs: []*url.URL{spiffe}},
	} {
		fmt.Fprintf(&got, "certificate\n    %v\n    %v\n", l.Certificate("b", cert), l.Certificate("c", cert))
	}
	const golden = "testdata/refusals.txt"
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

func TestCertificate(t *testing.T) {
	l := New("a", peers, nil)
	c, err := url.Parse("spiffe://example/tierd/c")
	require.NoError(t, err)
	require.NoError(t, l.Certificate("b", &x509.Certificate{DNSNames: []string{"other", "b"}}))
	require.NoError(t, l.Certificate("c", &x509.Certificate{URIs: []*url.URL{c}}))
	require.NoError(t, l.Certificate("stranger", &x509.Certificate{DNSNames: []string{"stranger"}}))
	require.Error(t, l.Certificate("c", &x509.Certificate{DNSNames: []string{"c"}}), "an identity takes the place of the node id")
}

// TestNoOpenRelay: whatever a peer that is not on this machine says, no address outside
// its own host and the ranges is reached, and none on loopback.
func TestNoOpenRelay(t *testing.T) {
	inside := cidrs("10.1.0.0/16", "127.0.0.0/8", "::1/128")
	l := New("a", peers, inside)
	ip := rapid.Custom(func(t *rapid.T) netip.Addr {
		b := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "ip")
		switch rapid.IntRange(0, 4).Draw(t, "kind") {
		case 0:
			return netip.AddrFrom16([16]byte(b))
		case 1:
			return netip.AddrFrom4([4]byte{127, b[0], b[1], b[2]})
		case 2:
			return netip.AddrFrom4([4]byte{10, b[0] % 3, b[1] % 2, b[2] % 5})
		case 3:
			return netip.AddrFrom16(netip.AddrFrom4([4]byte{10, 0, 0, b[0] % 5}).As16())
		}
		return netip.AddrFrom4([4]byte(b))
	})
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.SampledFrom([]string{"b", "c", "six", "stranger"}).Draw(t, "id")
		a := ip.Draw(t, "address")
		err := reach(l, id, netip.AddrPortFrom(a, 7001).String(), false)
		plain := a.Unmap()
		own := map[string]string{"b": "10.0.0.2", "c": "10.0.0.3", "six": "2001:db8::6"}[id]
		allowed := own == plain.String() || inside[0].Contains(plain)
		require.Equal(t, allowed, err == nil, "%v", err)
	})
}
