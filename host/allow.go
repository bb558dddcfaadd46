package host

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/tierd/tierd/host/admit"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/halfopen"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/transfer"
)

func (n *Node) allow(peers []config.Peer, cidrs []netip.Prefix) *admit.List {
	list := make([]admit.Peer, len(peers))
	for i, p := range peers {
		list[i] = admit.Peer{ID: p.ID, Control: p.Control, Identity: p.Identity}
	}
	return admit.New(n.cfg.NodeID, list, cidrs)
}

// admit is wire.Config.Admit.
func (n *Node) admit(nodeID string, from net.Addr) error {
	return n.allowed.Load().Session(nodeID, halfopen.IP(from))
}

// checkHello is wire.Config.CheckHello: this node will dial the data address.
func (n *Node) checkHello(h *sessionpb.Hello, from net.Addr) error {
	return n.allowed.Load().DataAddress(h.NodeId, h.DataAddress, halfopen.IP(from).IsLoopback())
}

// verifyNode is wire.Config.Verify and transfer.Options.Verify.
func (n *Node) verifyNode(nodeID string, s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return errors.New("no certificate was presented")
	}
	return n.allowed.Load().Certificate(nodeID, s.PeerCertificates[0])
}

// dialOptions are those of data connections to a peer, at an address that the peer gave.
func (n *Node) dialOptions(peer, address string) transfer.Options {
	o := n.dataOptions
	near := halfopen.IP(n.peers.Remote(peer)).IsLoopback()
	o.Reach = func(ip netip.Addr) error {
		ctx, cancel := context.WithTimeout(n.life, n.waits.connect)
		defer cancel()
		if err := n.allowed.Load().Dial(ctx, net.DefaultResolver, peer, address, near)(ip); err != nil {
			return &refusedAddress{err}
		}
		return nil
	}
	if n.certs != nil {
		o.TLS = n.certs.client(func(s tls.ConnectionState) error { return n.verifyNode(peer, s) })
	}
	return o
}

// reviewCerts looks at the certificates while nobody connects.
func (n *Node) reviewCerts() {
	tick := time.NewTicker(certReviewInterval)
	defer tick.Stop()
	for {
		select {
		case <-n.life.Done():
			return
		case <-tick.C:
			n.certs.review()
		}
	}
}

// ReloadCerts looks at the TLS files, as SIGHUP does, and says when they expire soon.
func (n *Node) ReloadCerts() {
	if n.certs != nil {
		n.certs.review()
	}
}
