package session

import (
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// legs is what two sides of different rules, parameters or caps allow each other, and the
// bytes of the rules that they ask each other for to find out.
type legs struct {
	take, give bool   // what this node allows itself and the peer; see AllowLegs
	why        string // of give, when it is false
	supplies   bool   // the peer's word
	peerWhy    string // when it is false

	askSeq uint64 // of the last Ask of this session
	asking bool   // its Part is awaited

	peerSeq   uint64 // of the peer's last Ask
	answering bool   // the host has not answered it
}

// restart forgets what belongs to a process of the peer that is gone.
func (g *legs) restart() { *g = legs{} }

// session begins to count anew: sequences belong to one connection.
func (g *legs) session() { g.askSeq, g.peerSeq, g.asking, g.answering = 0, 0, false, false }

// AllowLegs says what the pair relation of the two sides' rules, parameters and caps came
// to: take allows this node to demand of the peer in every leg, give allows the peer to
// demand here. Without them it is leg probe only. The peer is told of give, with the reason
// when it is false, so that it does not demand in vain. It holds until the peer is another
// process or has other rules.
func (c *Core) AllowLegs(now time.Duration, take, give bool, why string) {
	c.advance(now)
	why = cut(why, c.cfg.Limits.TextBytesMax)
	news := give != c.legs.give || why != c.legs.why
	c.legs.take, c.legs.give, c.legs.why = take, give, why
	if news {
		c.sendLegs()
	}
}

// sendLegs tells the peer whether it may demand here in every leg.
func (c *Core) sendLegs() {
	if c.link != linkUp || c.sameRules() || c.hello.GetCaps().GetPartBytes() == 0 {
		return
	}
	m := &sessionpb.Legs{Supply: c.legs.give}
	if !m.Supply {
		m.Reason = c.legs.why
	}
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Legs{Legs: m}})
}

func (c *Core) receiveLegs(m *sessionpb.Legs) error {
	c.legs.supplies, c.legs.peerWhy = m.GetSupply(), cut(m.GetReason(), c.cfg.Limits.TextBytesMax)
	return nil
}

// Hello is what the peer said in its last session; nil before the first.
func (c *Core) Hello() *sessionpb.Hello { return c.hello }

func (c *Core) sameRules() bool { return c.hello != nil && sameRules(c.cfg.Hello, c.hello) }

// mayDemand says whether this node may demand of the peer in a leg. A peer that sends no
// Legs has said nothing, and answers for itself.
func (c *Core) mayDemand(leg string) bool {
	return leg == LegProbe || c.sameRules() || c.legs.take && (c.legs.supplies || c.hello.GetCaps().GetPartBytes() == 0)
}

// maySupply says whether the peer may demand here in a leg.
func (c *Core) maySupply(leg string) bool { return leg == LegProbe || c.sameRules() || c.legs.give }

func (c *Core) legText(leg string) string {
	if c.legs.take {
		return fmt.Sprintf("leg %q: rules, deployment or caps of %s differ and it does not accept the pair; only leg %q is allowed: %s", leg, c.cfg.PeerID, LegProbe, c.legs.peerWhy)
	}
	return fmt.Sprintf("leg %q: rules, deployment or caps of %s differ and the pair is not accepted; only leg %q is allowed", leg, c.cfg.PeerID, LegProbe)
}

// Ask asks the peer for bytes of what it runs by, by their SHA-256, from offset on. The
// answer is a [PartCame] of the number that is returned. The error says why the peer
// cannot be asked now.
func (c *Core) Ask(now time.Duration, digest [sha256.Size]byte, offset uint64) (seq uint64, err error) {
	c.advance(now)
	switch {
	case c.link != linkUp:
		return 0, fmt.Errorf("there is no session with %s", c.cfg.PeerID)
	case c.hello.GetCaps().GetPartBytes() == 0:
		return 0, fmt.Errorf("%s does not give out what it runs by", c.cfg.PeerID)
	case c.legs.asking:
		return 0, fmt.Errorf("%s has not answered the last question for what it runs by", c.cfg.PeerID)
	}
	c.legs.askSeq++
	c.legs.asking = true
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Ask{Ask: &sessionpb.Ask{Seq: c.legs.askSeq, Digest: digest[:], Offset: offset}}})
	return c.legs.askSeq, nil
}

// AnswerAsk answers an [Asked], with at most Limits.PartBytesMax of data. refused says why
// there is none.
func (c *Core) AnswerAsk(now time.Duration, seq uint64, totalBytes uint64, data []byte, refused string) {
	c.advance(now)
	if !c.legs.answering || seq != c.legs.peerSeq {
		return // of a connection that is gone
	}
	c.legs.answering = false
	data = data[:min(len(data), c.cfg.Limits.PartBytesMax)]
	c.send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Part{Part: &sessionpb.Part{
		Seq: seq, TotalBytes: totalBytes, Data: data, Refused: cut(refused, c.cfg.Limits.TextBytesMax)}}})
}

func (c *Core) receiveAsk(m *sessionpb.Ask) error {
	switch {
	case c.legs.answering:
		return fmt.Errorf("message Ask %d before the answer to Ask %d", m.GetSeq(), c.legs.peerSeq)
	case m.GetSeq() != c.legs.peerSeq+1:
		return fmt.Errorf("message Ask %d after Ask %d; they must rise by one", m.GetSeq(), c.legs.peerSeq)
	case len(m.Digest) != sha256.Size:
		return fmt.Errorf("message Ask: the digest has %d bytes; it must have %d", len(m.Digest), sha256.Size)
	}
	c.legs.peerSeq++
	c.legs.answering = true
	c.emit(Asked{Seq: m.Seq, Digest: [sha256.Size]byte(m.Digest), Offset: m.Offset})
	return nil
}

func (c *Core) receivePart(m *sessionpb.Part) error {
	most := uint64(c.hello.GetCaps().GetPartBytes())
	switch {
	case m.GetSeq() == 0 || m.GetSeq() > c.legs.askSeq:
		return fmt.Errorf("message Part %d, but the last Ask was %d", m.GetSeq(), c.legs.askSeq)
	case uint64(len(m.Data)) > most:
		return fmt.Errorf("message Part of %d bytes; its hello said at most %d", len(m.Data), most)
	case !c.legs.asking || m.Seq != c.legs.askSeq:
		return nil // nobody waits any more
	}
	c.legs.asking = false
	c.emit(PartCame{Seq: m.Seq, TotalBytes: m.TotalBytes, Data: m.Data, Refused: cut(m.Refused, c.cfg.Limits.TextBytesMax)})
	return nil
}

// loseAsk ends the wait for a Part.
func (c *Core) loseAsk(text string) {
	if c.legs.asking {
		c.legs.asking = false
		c.emit(PartCame{Seq: c.legs.askSeq, Lost: text})
	}
}
