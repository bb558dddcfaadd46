package session

import (
	"bytes"
	"crypto/sha256"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// other is the hello of a peer with other rules.
func other(boot uint64) *sessionpb.Hello {
	h := testHello("b", boot)
	h.RulesDigest = []byte("other")
	return h
}

// upOther makes a session with a peer of other rules come up.
func upOther(t *testing.T, change ...func(*Config)) *solo {
	s := newSolo(t, change...)
	s.Connected(0)
	s.hello(other(2))
	require.False(t, take[Up](s)[0].SameRules)
	return s
}

// TestLegsAreTold: the peer hears, once for each change and at the beginning of each
// session, whether it may demand here, and why not; each direction is allowed by itself.
func TestLegsAreTold(t *testing.T) {
	s := upOther(t)
	require.Equal(t, "", sent[*sessionpb.Legs](s)[0].Reason)
	s.AllowLegs(0, false, false, "it is being checked")
	s.AllowLegs(0, false, false, "it is being checked")
	m := sent[*sessionpb.Legs](s)
	require.Len(t, m, 1)
	require.Equal(t, "it is being checked", m[0].Reason)
	s.incoming(1, 1)
	require.Contains(t, sent[*sessionpb.Supply](s)[0].Refused[0].Text, "it is being checked")

	s.AllowLegs(0, false, true, "")
	require.True(t, sent[*sessionpb.Legs](s)[0].Supply)
	s.incoming(2, 1)
	require.Len(t, take[Demanded](s), 1)
	s.Receive(0, envelope(&sessionpb.Legs{Supply: true}))
	require.False(t, s.Status(0).AllLegs, "this node does not accept that way")
	require.True(t, s.Status(0).Supplies)

	s.AllowLegs(0, true, true, "")
	require.Empty(t, sent[*sessionpb.Legs](s), "no news to the peer")
	require.True(t, s.Status(0).AllLegs)
	s.Disconnected(0, "reset")
	s.Connected(0)
	s.hello(other(2))
	require.True(t, s.Status(0).AllLegs, "the same process")
	require.True(t, sent[*sessionpb.Legs](s)[0].Supply)
	s.Disconnected(0, "reset")
	s.Connected(0)
	h := other(2)
	h.DeploymentDigest = []byte("another")
	s.hello(h)
	require.False(t, s.Status(0).AllLegs, "another version")
	s.AllowLegs(0, true, true, "")
	s.Receive(0, envelope(&sessionpb.Legs{Supply: true}))
	s.Disconnected(0, "reset")
	s.Connected(0)
	s.hello(other(3))
	require.False(t, s.Status(0).AllLegs, "another process")
	s.Disconnected(0, "reset")
	s.Connected(0)
	s.hello(testHello("b", 4))
	require.True(t, s.Status(0).AllLegs, "equal rules")
	s.Take()
	s.AllowLegs(0, false, false, "no")
	require.Empty(t, sent[*sessionpb.Legs](s), "equal rules have no pair")
	require.True(t, s.Status(0).AllLegs)
}

// TestPeerWithoutLegs: a peer whose hello has no part_bytes is told nothing and asked
// nothing, and answers demands for itself.
func TestPeerWithoutLegs(t *testing.T) {
	s := newSolo(t)
	s.Connected(0)
	h := fillHello(other(2), &s.cfg.Limits)
	h.Caps.PartBytes = 0
	s.Receive(0, envelope(h))
	s.AllowLegs(0, true, true, "")
	require.Empty(t, sent[*sessionpb.Legs](s))
	require.True(t, s.Status(0).AllLegs)
	_, err := s.Ask(0, [sha256.Size]byte{1}, 0)
	require.EqualError(t, err, "b does not give out what it runs by")
}

// TestAsk: one question at a time, whose answer comes once, or is lost with the session.
func TestAsk(t *testing.T) {
	s := newSolo(t)
	id := [sha256.Size]byte{1}
	_, err := s.Ask(0, id, 0)
	require.EqualError(t, err, "there is no session with b")
	s.up()
	seq, err := s.Ask(0, id, 5)
	require.NoError(t, err)
	m := sent[*sessionpb.Ask](s)
	require.Equal(t, []byte(id[:]), m[0].Digest)
	require.EqualValues(t, 5, m[0].Offset)
	_, err = s.Ask(0, id, 6)
	require.EqualError(t, err, "b has not answered the last question for what it runs by")
	s.Receive(0, envelope(&sessionpb.Part{Seq: seq, TotalBytes: 9, Data: []byte("abcd")}))
	s.Receive(0, envelope(&sessionpb.Part{Seq: seq, TotalBytes: 9, Data: []byte("abcd")}))
	require.Equal(t, []PartCame{{Seq: seq, TotalBytes: 9, Data: []byte("abcd")}}, take[PartCame](s))
	seq, err = s.Ask(0, id, 9)
	require.NoError(t, err)
	s.Disconnected(0, "reset")
	require.Equal(t, []PartCame{{Seq: seq, Lost: "session with b closed: reset"}}, take[PartCame](s))
	s.up()
	seq, err = s.Ask(0, id, 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, seq, "each session counts anew")
	s.to(750 * ms)
	require.Equal(t, seq, take[PartCame](s)[0].Seq, "suspect")
}

// TestAsked: what the peer asks for is answered in order, no part is longer than it may be,
// and the answer to a session that is gone goes nowhere.
func TestAsked(t *testing.T) {
	s := newSolo(t, func(c *Config) { c.Limits.PartBytesMax = 4 }).up()
	id := bytes.Repeat([]byte{3}, sha256.Size)
	s.Receive(0, envelope(&sessionpb.Ask{Seq: 1, Digest: id, Offset: 2}))
	require.Equal(t, []Asked{{Seq: 1, Digest: [sha256.Size]byte(id), Offset: 2}}, take[Asked](s))
	s.AnswerAsk(0, 2, 9, []byte("x"), "")
	require.Empty(t, sent[*sessionpb.Part](s))
	s.AnswerAsk(0, 1, 9, []byte("abcdefg"), "")
	s.AnswerAsk(0, 1, 9, []byte("abcdefg"), "")
	p := sent[*sessionpb.Part](s)
	require.Len(t, p, 1)
	require.Equal(t, "abcd", string(p[0].Data))
	s.Receive(0, envelope(&sessionpb.Ask{Seq: 2, Digest: id}))
	s.Disconnected(0, "reset")
	s.up()
	s.AnswerAsk(0, 2, 9, nil, "no")
	require.Empty(t, sent[*sessionpb.Part](s))
}

// TestWrongAsks: what a right peer never sends closes the session.
func TestWrongAsks(t *testing.T) {
	id := make([]byte, sha256.Size)
	for why, c := range map[string]func(s *solo){
		"message Ask 2 after Ask 0; they must rise by one":     func(s *solo) { s.Receive(0, envelope(&sessionpb.Ask{Seq: 2, Digest: id})) },
		"message Ask: the digest has 3 bytes; it must have 32": func(s *solo) { s.Receive(0, envelope(&sessionpb.Ask{Seq: 1, Digest: id[:3]})) },
		"message Part 1, but the last Ask was 0":               func(s *solo) { s.Receive(0, envelope(&sessionpb.Part{Seq: 1})) },
		"message Part of 32769 bytes; its hello said at most 32768": func(s *solo) {
			_, _ = s.Ask(0, [32]byte{}, 0)
			s.Receive(0, envelope(&sessionpb.Part{Seq: 1, Data: make([]byte, 32769)}))
		},
		"message Ask 2 before the answer to Ask 1": func(s *solo) {
			s.Receive(0, envelope(&sessionpb.Ask{Seq: 1, Digest: id}))
			s.Receive(0, envelope(&sessionpb.Ask{Seq: 2, Digest: id}))
		},
	} {
		s := newSolo(t).up()
		c(s)
		closed := take[Close](s)
		require.Len(t, closed, 1, why)
		require.True(t, closed[0].Protocol)
		require.Contains(t, closed[0].Reason, why)
	}
}

// TestPartFits: a part that does not fit into a message is no limit.
func TestPartFits(t *testing.T) {
	l := DefaultLimits()
	l.KeysMax, l.JobKeysMax, l.MessageBytesMax, l.PartBytesMax = 16, 16, 32<<10, 32<<10
	require.EqualError(t, l.Validate(), "session limits: part_bytes_max is 32768, but message_bytes_max is 32768; a part must fit into a message")
}
