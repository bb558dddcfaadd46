// Package admit says which nodes a node talks to, and to which addresses it connects on
// their word.
//
// A node has a session with the peers that its configuration lists, and with nodes that
// come from an address in one of its CIDRs. With TLS the certificate of either must be
// for the node: one of its subject alternative names, a DNS name or a URI, is the peer's
// identity, letter by letter. The identity is the node id unless the configuration gives
// another, such as spiffe://example/tierd/node-b. Wildcards and common names do not
// count: the first would let one node be another, the second is free text.
//
// A peer names one address that this node connects to: its data port, in its Hello. A
// node that dialed whatever it is told would be a way into its own network. So the
// address must be at the host of the peer's configured control address, or in a CIDR.
// A loopback address is believed only of a peer that is itself on this machine. A name is
// resolved once, when it is dialed, and each address that comes of it is judged again,
// so that a name cannot mean one address here and another there.
package admit

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// A Peer is one configured peer.
type Peer struct {
	ID string
	// Control is the host:port of its control port.
	Control string
	// Identity is a DNS name or a URI of its certificate; empty is ID.
	Identity string
}

func (p *Peer) host() string {
	h, _, err := net.SplitHostPort(p.Control)
	if err != nil {
		return p.Control
	}
	return h
}

// A List is who is allowed. It does not change; a new configuration makes a new one.
type List struct {
	node  string
	peers map[string]Peer
	cidrs []netip.Prefix
}

// New returns the list of a node.
func New(node string, peers []Peer, cidrs []netip.Prefix) *List {
	l := &List{node: node, peers: make(map[string]Peer, len(peers)), cidrs: cidrs}
	for _, p := range peers {
		l.peers[p.ID] = p
	}
	return l
}

func (l *List) within(ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	return slices.ContainsFunc(l.cidrs, func(p netip.Prefix) bool { return p.Contains(ip) })
}

func (l *List) ranges() string {
	if len(l.cidrs) == 0 {
		return "it has none"
	}
	s := make([]string, len(l.cidrs))
	for i, p := range l.cidrs {
		s[i] = p.String()
	}
	return strings.Join(s, ", ")
}

// Session says why a node that dials from an address is refused; nil when it is not.
func (l *List) Session(id string, from netip.Addr) error {
	if _, ok := l.peers[id]; ok || l.within(from) {
		return nil
	}
	at := "an address that is no IP"
	if from.IsValid() {
		at = from.String()
	}
	return fmt.Errorf("node %q at %s is no peer of node %q: it is not in peers there, and its address is in none of the peer_cidrs; add it to either", id, at, l.node)
}

// Identity returns what a node's certificate must be for.
func (l *List) Identity(id string) string {
	if p := l.peers[id]; p.Identity != "" {
		return p.Identity
	}
	return id
}

// Certificate says why a certificate is not that of a node; nil when it is.
func (l *List) Certificate(id string, cert *x509.Certificate) error {
	want := l.Identity(id)
	if slices.Contains(cert.DNSNames, want) {
		return nil
	}
	names := slices.Clone(cert.DNSNames)
	for _, u := range cert.URIs {
		if u.String() == want {
			return nil
		}
		names = append(names, u.String())
	}
	has := "no DNS name and no URI"
	if len(names) > 0 {
		has = fmt.Sprintf("%q", names)
	}
	kind := "DNS"
	if strings.Contains(want, "://") {
		kind = "URI"
	}
	return fmt.Errorf("node %q must have a certificate for %q, but it is for %s (common name %q, which does not count); issue it with the subject alternative name %s:%s, or set identity of the peer to a name that it has",
		id, want, has, cert.Subject.CommonName, kind, want)
}

// noDestination are addresses that no peer is at.
func noDestination(ip netip.Addr) bool {
	return ip.IsUnspecified() || ip.IsMulticast() || ip == netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// believed reports whether a peer's word for an address is enough. near: the peer is
// itself on this machine.
func (l *List) believed(ip netip.Addr, near bool) bool {
	return l.within(ip) && (near || !ip.IsLoopback())
}

func (l *List) refusal(id, address string, ip netip.Addr) error {
	where := "which is not in peers, is not"
	if p, ok := l.peers[id]; ok {
		where = fmt.Sprintf("whose control address is %s, is neither at that host nor", p.Control)
	}
	what := address
	if h, _, err := net.SplitHostPort(address); err != nil || h != ip.String() {
		what += " (" + ip.String() + ")"
	}
	extra := ""
	if ip.IsLoopback() {
		extra = ", and a loopback address is believed only of a peer on the same machine"
	}
	return fmt.Errorf("data_address %s of peer %q, %s in the peer_cidrs of node %q (%s)%s; correct advertise there, or add its address to peer_cidrs here",
		what, id, where, l.node, l.ranges(), extra)
}

// DataAddress judges the data address of a peer's Hello, without resolving names: nil
// means that it is allowed, or that it hangs on what its name resolves to (Dial). near:
// the peer's control connection does not leave this machine.
func (l *List) DataAddress(id, address string, near bool) error {
	host, port, err := net.SplitHostPort(address)
	if err == nil {
		var n int
		if n, err = strconv.Atoi(port); err == nil && (n < 1 || n > 65535) || host == "" {
			err = fmt.Errorf("no port of a host")
		}
	}
	if err != nil {
		return fmt.Errorf("data_address %.80q of peer %q is not host:port with a port of 1 to 65535; correct advertise there", address, id)
	}
	p, configured := l.peers[id]
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return nil // a name
	}
	ip = ip.Unmap()
	switch control, err := netip.ParseAddr(p.host()); {
	case noDestination(ip):
		return l.refusal(id, address, ip)
	case l.believed(ip, near):
		return nil
	case configured && err == nil && control.Unmap() == ip:
		return nil
	case configured && err != nil && p.host() != "" && !ip.IsLoopback():
		return nil // it may be what the name of the control address resolves to
	}
	return l.refusal(id, address, ip)
}

// A Resolver turns a name into addresses; net.DefaultResolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Dial returns what judges each address that the data address of a peer resolves to, just
// before it is connected to.
func (l *List) Dial(ctx context.Context, r Resolver, id, address string, near bool) func(netip.Addr) error {
	host, _, _ := net.SplitHostPort(address)
	p, configured := l.peers[id]
	return func(ip netip.Addr) error {
		ip = ip.Unmap()
		switch {
		case noDestination(ip):
		case configured && p.host() != "" && strings.EqualFold(host, p.host()), l.believed(ip, near):
			return nil
		case configured && p.host() != "":
			all, err := r.LookupNetIP(ctx, "ip", p.host())
			if err != nil {
				return fmt.Errorf("data_address %s of peer %q cannot be compared with its control address %s: %w", address, id, p.Control, err)
			}
			if slices.ContainsFunc(all, func(a netip.Addr) bool { return a.Unmap() == ip }) {
				return nil
			}
		}
		return l.refusal(id, address, ip)
	}
}
