package tier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The relation cascade, on the real tier: each state that a key can be in when it is to
// be supplied.
func TestCascade(t *testing.T) {
	const limit = 2 * time.Second
	p := newTier(t, 2)
	k := keysFrom(0, 4)
	reader := Owner{"session", "r"}
	decide := func(key Key, waited time.Duration) (Decision, error) {
		_, found := p.Pin(reader, []Key{key})
		return Cascade(found[0], nil, waited, limit)
	}
	want := func(d Decision, reason error, key Key, waited time.Duration) {
		t.Helper()
		got, err := decide(key, waited)
		require.Equal(t, d, got)
		require.ErrorIs(t, err, reason)
	}
	want(Refuse, ErrAbsent, k[0], 0)
	as, err := p.Admit(me, k[:1])
	require.NoError(t, err)
	want(Defer, nil, k[0], limit-1)
	want(Refuse, ErrSlow, k[0], limit)
	woken := p.Watch(k[0])
	_, err = p.Commit(as[0].Slot, 0, 0, false)
	require.NoError(t, err)
	<-woken
	want(Supply, nil, k[0], limit)
	put(t, p, k[1:2])
	want(Supply, nil, k[1], 0)
	_, err = p.Admit(me, k[2:3]) // both are pinned by the reader
	d, err := Cascade(Absent, err, 0, limit)
	require.Equal(t, Refuse, d)
	var none *ErrNoRoom
	require.ErrorAs(t, err, &none)
	p.Release(reader)
	put(t, p, k[2:4])
	want(Refuse, ErrAbsent, k[0], 0) // evicted
	as, err = p.Admit(me, k[:1])
	if err == nil {
		require.NoError(t, p.Drop(as[0].Slot))
	}
	want(Refuse, ErrAbsent, k[0], 0) // its write was dropped
}
