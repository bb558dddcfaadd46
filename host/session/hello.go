package session

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// digestBytesMax bounds each digest and token of a Hello: 64 bytes hold a SHA-512.
const digestBytesMax = 64

// fillHello returns a copy of a node's hello with what the core knows.
func fillHello(h *sessionpb.Hello, l *Limits) *sessionpb.Hello {
	h = proto.CloneOf(h)
	h.ProtocolMin, h.ProtocolMax = ProtocolMin, ProtocolMax
	if h.Layout == nil {
		h.Layout = &sessionpb.Layout{}
	}
	h.Layout.Digest = LayoutDigest(h.Layout)
	if h.Caps == nil {
		h.Caps = &sessionpb.Caps{}
	}
	h.Caps.MaxKeys, h.Caps.MaxJobs = uint32(l.KeysMax), uint32(l.JobsMax)
	h.Caps.LeaseMs, h.Caps.PartBytes = milliseconds(l.Lease), uint32(l.PartBytesMax)
	return h
}

// LayoutDigest returns the SHA-256 of a layout's fields in their order, each with
// its length before it.
func LayoutDigest(l *sessionpb.Layout) []byte {
	h := sha256.New()
	str := func(s string) {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s))))
		h.Write([]byte(s))
	}
	str(l.GetModel())
	str(l.GetHashScheme())
	str(string(l.GetHashVector()))
	for _, g := range l.GetGroups() {
		for _, f := range groupFields(g) {
			str(f.name + "=" + f.value)
		}
	}
	return h.Sum(nil)
}

type field struct{ name, value string }

func groupFields(g *sessionpb.Group) []field {
	n := func(v uint64) string { return fmt.Sprint(v) }
	return []field{
		{"name", g.GetName()}, {"block_tokens", n(g.GetBlockTokens())}, {"chunk_blocks", n(g.GetChunkBlocks())},
		{"layers", n(g.GetLayers())}, {"kv_heads", n(g.GetKvHeads())}, {"head_dim", n(g.GetHeadDim())},
		{"dtype", g.GetDtype()}, {"draft", fmt.Sprint(g.GetDraft())}, {"chunk_bytes", n(g.GetChunkBytes())},
	}
}

// layoutFields names every field of a layout, so that a refusal can say which differ.
func layoutFields(l *sessionpb.Layout) []field {
	out := []field{{"model", l.GetModel()}, {"hash_scheme", l.GetHashScheme()},
		{"hash_vector", hex.EncodeToString(l.GetHashVector())}, {"groups", fmt.Sprint(len(l.GetGroups()))}}
	for i, g := range l.GetGroups() {
		for _, f := range groupFields(g) {
			out = append(out, field{fmt.Sprintf("groups[%d].%s", i, f.name), f.value})
		}
	}
	return out
}

// differencesMax bounds the differences that a refusal names: more say nothing new.
const differencesMax = 32

// compareLayouts returns what two sides have different. A group that one side does
// not have is named by the count of groups.
func compareLayouts(here, there *sessionpb.Layout) []*sessionpb.Difference {
	var out []*sessionpb.Difference
	theirs := map[string]string{}
	for _, f := range layoutFields(there) {
		theirs[f.name] = f.value
	}
	for _, f := range layoutFields(here) {
		if v, ok := theirs[f.name]; ok && v != f.value && len(out) < differencesMax {
			out = append(out, &sessionpb.Difference{Field: f.name, Here: cut(f.value, differenceBytesMax), There: cut(v, differenceBytesMax)})
		}
	}
	if len(out) == 0 && !slices.Equal(LayoutDigest(here), there.GetDigest()) {
		out = append(out, &sessionpb.Difference{Field: "layout digest",
			Here: hex.EncodeToString(LayoutDigest(here)), There: hex.EncodeToString(there.GetDigest())})
	}
	return out
}

// differenceBytesMax bounds a value in a difference.
const differenceBytesMax = 256

// sameRules says whether two sides may use all legs without a pair check.
func sameRules(a, b *sessionpb.Hello) bool {
	return slices.Equal(a.GetRulesDigest(), b.GetRulesDigest()) &&
		slices.Equal(a.GetDeploymentDigest(), b.GetDeploymentDigest()) &&
		a.GetCaps().GetMaxTokens() == b.GetCaps().GetMaxTokens() &&
		a.GetCaps().GetMaxStoreTokens() == b.GetCaps().GetMaxStoreTokens()
}

// checkHello reports a hello that no right node sends.
func checkHello(h *sessionpb.Hello, l *Limits) error {
	sized := func(what string, n, most int) error {
		if n > most {
			return fmt.Errorf("message Hello: %s has %d bytes; at most %d are allowed", what, n, most)
		}
		return nil
	}
	if h.GetNodeId() == "" {
		return fmt.Errorf("message Hello: node_id is empty")
	}
	if h.GetBootId() == 0 {
		return fmt.Errorf("message Hello: boot_id is 0")
	}
	if h.ProtocolMin == 0 || h.ProtocolMax < h.ProtocolMin {
		return fmt.Errorf("message Hello: protocol range %d..%d", h.ProtocolMin, h.ProtocolMax)
	}
	if n := len(h.GetLayout().GetGroups()); n > l.GroupsMax {
		return fmt.Errorf("message Hello: %d groups; at most %d are allowed", n, l.GroupsMax)
	}
	for _, f := range []struct {
		what    string
		n, most int
	}{
		{"node_id", len(h.NodeId), l.IDBytesMax},
		{"data_address", len(h.DataAddress), l.IDBytesMax},
		{"data_token", len(h.DataToken), digestBytesMax},
		{"rules_digest", len(h.RulesDigest), digestBytesMax},
		{"deployment_digest", len(h.DeploymentDigest), digestBytesMax},
	} {
		if err := sized(f.what, f.n, f.most); err != nil {
			return err
		}
	}
	return nil
}

// negotiate returns the highest protocol version that both sides speak, or what
// differs.
func negotiate(here, there *sessionpb.Hello) (uint32, []*sessionpb.Difference) {
	v := min(here.ProtocolMax, there.ProtocolMax)
	if v >= here.ProtocolMin && v >= there.ProtocolMin {
		return v, nil
	}
	span := func(h *sessionpb.Hello) string { return fmt.Sprintf("%d..%d", h.ProtocolMin, h.ProtocolMax) }
	return 0, []*sessionpb.Difference{{Field: "protocol", Here: span(here), There: span(there)}}
}

// receiveHello judges the peer's hello: the session begins or is refused.
func (c *Core) receiveHello(h *sessionpb.Hello) {
	if err := checkHello(h, &c.cfg.Limits); err != nil {
		c.broken("%v", err)
		return
	}
	version, diffs := negotiate(c.cfg.Hello, h)
	switch {
	case diffs != nil:
		c.refuseHello("no common protocol version", diffs)
		return
	case h.NodeId != c.cfg.PeerID:
		c.refuseHello("another node answers at this address", []*sessionpb.Difference{{Field: "node_id", Here: c.cfg.PeerID, There: h.NodeId}})
		return
	}
	if diffs = compareLayouts(c.cfg.Hello.Layout, h.GetLayout()); len(diffs) > 0 {
		c.refuseHello("layouts differ, so bytes cannot be exchanged", diffs)
		return
	}
	restarted := c.hello != nil && c.hello.BootId != h.BootId
	if restarted || c.hello == nil {
		c.peerJob = 0
		c.legs.restart()
	} else if !sameRules(c.hello, h) {
		c.legs.restart()
	}
	c.legs.session()
	c.hello = h
	c.unfitFor = ""
	c.link = linkUp
	c.left, c.peerDraining = false, false
	c.aliveAt = c.now
	c.soonest = 0
	c.pingAt = c.now // measures the round trip at once
	c.sessions++
	c.change(Ready, "session")
	c.emit(Up{Hello: h, Protocol: version, Restarted: restarted, SameRules: sameRules(c.cfg.Hello, h)})
	if c.localDraining {
		c.send(goaway("draining"))
	}
	c.sendLegs()
	c.sendWaiting()
	c.advance(c.now)
}

// sendWaiting sends the jobs that waited for the session, by rising id.
func (c *Core) sendWaiting() {
	var ids []JobID
	for id := range c.lookups.all() {
		ids = append(ids, id)
	}
	for id := range c.demands.all() {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		if l := c.lookups.get(id); l != nil {
			c.sendLookup(l)
		} else if d := c.demands.get(id); d != nil {
			c.sendDemand(d)
		}
	}
}

// refuseHello ends the attempt, tells the peer why, and ends the jobs that wait: the
// cause is no fault that time heals.
func (c *Core) refuseHello(reason string, diffs []*sessionpb.Difference) {
	m := &sessionpb.HelloRefused{Reason: reason, Differences: diffs}
	c.emit(Send{&sessionpb.Envelope{Message: &sessionpb.Envelope_HelloRefused{HelloRefused: m}}})
	c.unfit(fmt.Sprintf("hello of %s refused: %s", c.cfg.PeerID, c.refusalText(m, "here", "there")))
}

// refused takes the peer's refusal.
func (c *Core) refused(m *sessionpb.HelloRefused) {
	c.unfit(fmt.Sprintf("%s refuses this node's hello: %s", c.cfg.PeerID, c.refusalText(m, "there", "here")))
}

// RefuseHello is called in the place of Receive with a Hello that the edge does not accept, for
// a reason that is not about the layout, such as an address in it.
func (c *Core) RefuseHello(now time.Duration, reason string) {
	c.advance(now)
	if c.link == linkOpen {
		c.refuseHello(reason, nil)
	}
}

// unfit ends an attempt of a peer that is there and cannot be talked to. While it is dead
// already for the same reason nothing changes: it dials, or is dialed, on and on.
func (c *Core) unfit(text string) {
	c.left = false
	c.hangUp(text, false)
	if c.state != Dead || c.unfitFor != text {
		c.unfitFor = text
		c.change(Suspect, text)
	}
	c.endAll(Refused, text)
	c.advance(c.now) // one that was dead before is dead again
}

// refusalText writes a refusal with both values of every difference; here and there
// name the sides as the reader sees them.
func (c *Core) refusalText(m *sessionpb.HelloRefused, here, there string) string {
	var b strings.Builder
	b.WriteString(cut(m.Reason, differenceBytesMax))
	for i, d := range m.Differences {
		if i == differencesMax {
			break
		}
		fmt.Fprintf(&b, "; %s: %s %q, %s %q", cut(d.GetField(), differenceBytesMax),
			here, cut(d.GetHere(), differenceBytesMax), there, cut(d.GetThere(), differenceBytesMax))
	}
	return b.String()
}
