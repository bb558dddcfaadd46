package tier

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/gpu/shm"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newTier(t testing.TB, slots int) *Primary {
	t.Helper()
	p, err := New(Options{Path: filepath.Join(t.TempDir(), "slab"), SlotBytes: 64, Slots: slots})
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func keysFrom(lo, n int) []Key {
	out := make([]Key, n)
	for i := range out {
		out[i] = MakeKey(Tenant(nil), fmt.Append(nil, lo+i), 0)
	}
	return out
}

var me = Owner{"test", "me"}

// put makes keys readable without pins.
func put(t testing.TB, p *Primary, keys []Key) {
	t.Helper()
	as, err := p.Admit(me, keys)
	require.NoError(t, err)
	for _, a := range as {
		_, err := p.Commit(a.Slot, Checksum(nil), 0, false)
		require.NoError(t, err)
	}
}

func lookup(p *Primary, keys []Key) string {
	s := abi.NewStates(len(keys))
	p.Lookup(keys, s)
	return s.Format(len(keys))
}

func TestKey(t *testing.T) {
	a := MakeKey(Tenant([]byte("a")), []byte("hash"), 7)
	require.Equal(t, uint32(7), a.Group())
	require.NotEqual(t, a, MakeKey(Tenant([]byte("b")), []byte("hash"), 7))
	require.NotEqual(t, a, MakeKey(Tenant([]byte("a")), []byte("hash"), 8))
	require.NotEqual(t, a, MakeKey(Tenant([]byte("a")), []byte("hasi"), 7))
	require.Equal(t, a, MakeKey(Tenant([]byte("a")), append([]byte("hash"), make([]byte, 28)...), 7))
	long := make([]byte, 40)
	require.Equal(t, MakeKey(Tenant(nil), long[:32], 1), MakeKey(Tenant(nil), long, 1))
	require.Contains(t, a.String(), "/g7")
}

// A prefix is evicted from its tail, however its chunks were committed.
func TestPrefixLosesItsTailFirst(t *testing.T) {
	p := newTier(t, 8)
	prefix := keysFrom(0, 8)
	as, err := p.Admit(me, prefix)
	require.NoError(t, err)
	for _, i := range rand.Perm(8) {
		_, err := p.Commit(as[i].Slot, 0, 0, false)
		require.NoError(t, err)
	}
	for n := 1; n <= 3; n++ {
		put(t, p, keysFrom(100+n, 1))
		require.Equal(t, "HHHHHHHH"[:8-n]+"MMM"[:n], lookup(p, prefix))
	}
	// Pinned in a batch and unpinned in any order: the same.
	refs, _ := p.Pin(me, prefix)
	for _, i := range rand.Perm(5) {
		require.NoError(t, p.Unpin(refs[i]))
	}
	put(t, p, keysFrom(200, 4)) // takes the three others and one of the prefix
	require.Equal(t, "HHHHMMMM", lookup(p, prefix))
}

// Eviction meets pinned slots at the old end and passes over them; when their pins end,
// in whatever order, each is as old as it was.
func TestPassedOverSlotsKeepTheirAge(t *testing.T) {
	p := newTier(t, 8)
	prefix, others := keysFrom(0, 6), keysFrom(50, 2)
	put(t, p, prefix)
	refs, _ := p.Pin(me, prefix)
	for n := range 3 { // newer than the prefix, so eviction meets the prefix first
		put(t, p, keysFrom(50+2*n, 2))
	}
	require.Equal(t, "MM", lookup(p, others))
	for _, i := range []int{3, 0, 5, 1, 4, 2} {
		require.NoError(t, p.Unpin(refs[i]))
		require.NoError(t, p.check())
	}
	for n := 1; n <= 6; n++ {
		put(t, p, keysFrom(100+n, 1))
		require.Equal(t, "HHHHHH"[:6-n]+"MMMMMM"[:n], lookup(p, prefix))
	}
}

// With more passed-over slots than the walk covers, order is no longer exact, but no
// slot is lost.
func TestManyPassedOverSlots(t *testing.T) {
	const n = 5 * relistStepsMax
	p := newTier(t, n+1)
	k := keysFrom(0, n)
	put(t, p, k)
	refs, _ := p.Pin(me, k)
	put(t, p, keysFrom(n, 1))
	put(t, p, keysFrom(n+1, 1))
	for _, i := range rand.Perm(n) {
		require.NoError(t, p.Unpin(refs[i]))
	}
	require.NoError(t, p.check())
	put(t, p, keysFrom(2*n, n+1)) // takes every one of them
	require.NoError(t, p.check())
	require.Equal(t, n+1, p.Snapshot().Evictable)
}

// Looking is not fetching: a looked-up key is evicted as if nobody had looked.
func TestLookupIsNoUse(t *testing.T) {
	p := newTier(t, 2)
	k := keysFrom(0, 3)
	put(t, p, k[:1])
	put(t, p, k[1:2])
	lookup(p, k[:1])
	put(t, p, k[2:])
	require.Equal(t, "MHH", lookup(p, k))
	p.Touch(k[1:2])
	put(t, p, k[:1])
	require.Equal(t, "HHM", lookup(p, k))
}

// Field log 58: reserve 10, write 6, skip 4, for many rounds.
func TestSkippedReservationsLeaveNothing(t *testing.T) {
	p := newTier(t, 16)
	for round := range 2000 {
		o := Owner{"request", fmt.Sprint(round)}
		k := keysFrom(10*round, 10)
		as, err := p.Admit(o, k)
		require.NoError(t, err)
		for _, a := range as[:6] {
			_, err := p.Commit(a.Slot, 0, 0, false)
			require.NoError(t, err)
		}
		require.Equal(t, "HHHHHHPPPP", lookup(p, k))
		if round%2 == 0 {
			for _, a := range as[6:] {
				require.NoError(t, p.Drop(a.Slot))
			}
		} else {
			p.Release(o)
		}
		require.Equal(t, "HHHHHHMMMM", lookup(p, k))
	}
	s := p.Snapshot()
	require.Zero(t, s.Writing)
	require.Empty(t, s.Pins)
	require.NoError(t, p.check())
}

func TestNoRoomSaysWhy(t *testing.T) {
	p := newTier(t, 4)
	k := keysFrom(0, 10)
	put(t, p, k[:3])
	refs, _ := p.Pin(me, k[:1])
	_, err := p.Stage(Owner{"request", "w"}, 1)
	require.NoError(t, err)
	_, err = p.Admit(me, k[1:6]) // 1 and 2 are there, and protected
	var none *ErrNoRoom
	require.ErrorAs(t, err, &none)
	require.Equal(t, ErrNoRoom{Need: 3, Free: 0, Evictable: 0, Pinned: 1, Writing: 1, Slots: 4}, *none)
	require.Equal(t, "HHHMMM", lookup(p, k[:6]), "all or nothing")
	_, err = p.Stage(me, 5)
	require.ErrorContains(t, err, "it can never fit")
	require.NoError(t, p.Unpin(refs[0]))
	require.Equal(t, uint64(2), p.Snapshot().Refused)
}

// A slot whose transfer was aborted in the middle can be given to somebody else once
// the data plane has let go, and late bytes never show.
func TestFence(t *testing.T) {
	p := newTier(t, 1)
	k := keysFrom(0, 2)
	as, err := p.Admit(me, k[:1])
	require.NoError(t, err)
	dst, end, err := p.Grab(as[0].Slot)
	require.NoError(t, err)
	require.Len(t, dst, 64)
	woken := p.Watch(k[0])
	require.NoError(t, p.Drop(as[0].Slot))
	require.True(t, isClosed(woken))
	require.Equal(t, "M", lookup(p, k[:1]), "the key goes at once")
	_, err = p.Admit(me, k[1:])
	var none *ErrNoRoom
	require.ErrorAs(t, err, &none, "the memory does not")
	snap := p.Snapshot()
	require.Equal(t, 1, snap.Fenced)
	require.Equal(t, PinGrab, snap.Pins[0].Kind)
	copy(dst, "late")
	require.ErrorIs(t, end(), ErrStale)
	as2, err := p.Admit(me, k[1:])
	require.NoError(t, err)
	require.Greater(t, as2[0].Slot.Epoch, as[0].Slot.Epoch)
	_, _, err = p.Grab(as[0].Slot)
	require.ErrorIs(t, err, ErrStale)
}

func TestSnapshotSaysWhoHoldsWhatForHowLong(t *testing.T) {
	now := time.Unix(1000, 0)
	p, err := New(Options{Path: filepath.Join(t.TempDir(), "slab"), SlotBytes: 64, Slots: 8, Now: func() time.Time { return now }})
	require.NoError(t, err)
	k := keysFrom(0, 4)
	const content = 40
	admitted, err := p.Admit(me, k[:2])
	require.NoError(t, err)
	for _, a := range admitted {
		_, err := p.Commit(a.Slot, 0, content, false)
		require.NoError(t, err)
	}
	a, b := Owner{"request", "a"}, Owner{"session", "b"}
	p.Pin(a, k[:2])
	now = now.Add(time.Minute)
	p.Pin(b, k[:1])
	_, err = p.Admit(b, k[2:])
	require.NoError(t, err)
	now = now.Add(time.Second)
	require.Equal(t, []PinCount{
		{a, PinRead, 2, 2 * content, 61 * time.Second},
		{b, PinRead, 1, content, time.Second},
		{b, PinWrite, 2, 2 * 64, time.Second},
	}, p.Snapshot().Pins)
	p.Release(a)
	p.Release(b)
	require.NoError(t, p.Close())
}

// Memory outlives Close for as long as somebody holds it.
func TestCloseWithHolders(t *testing.T) {
	p := newTier(t, 4)
	k := keysFrom(0, 3)
	put(t, p, k[:1])
	refs, _ := p.Pin(me, k[:1])
	as, err := p.Admit(me, k[1:])
	require.NoError(t, err)
	dst, end, err := p.Grab(as[0].Slot)
	require.NoError(t, err)
	woken := p.Watch(k[1])
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	require.True(t, isClosed(woken), "nobody waits for a tier that is closed")
	require.NoFileExists(t, p.Export().Path)
	require.Equal(t, "MMM", lookup(p, k))
	dst[0] = 1
	require.NoError(t, refs[0].Verify())
	_, err = p.Admit(me, k)
	require.ErrorIs(t, err, ErrClosed)
	_, err = p.Commit(as[0].Slot, 0, 0, false)
	require.ErrorIs(t, err, ErrClosed)
	p.Release(me)
	require.NotNil(t, p.mem)
	require.ErrorIs(t, end(), ErrStale)
	require.Nil(t, p.mem)
}

func TestSlabFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	o := Options{Path: path, SlotBytes: 5000, Slots: 3}
	p, err := New(o)
	require.NoError(t, err)
	require.Equal(t, int64(8192), p.StrideBytes())
	_, err = New(o)
	require.ErrorIs(t, err, shm.ErrInUse)
	as, err := p.Admit(me, keysFrom(0, 2))
	require.NoError(t, err)
	b, err := p.Bytes(as[1].Slot)
	require.NoError(t, err)
	require.Len(t, b, 5000)
	copy(b, "seen through the file")
	h := p.Export()
	m, err := shm.Map(h.Path, h.Offset+int64(as[1].Slot.Index)*p.StrideBytes(), p.SlotBytes())
	require.NoError(t, err)
	require.Equal(t, b, m.Bytes())
	require.NoError(t, m.Close())
	p.Release(me)
	require.NoError(t, p.Close())
	require.NoError(t, os.WriteFile(path, []byte("stale"), 0o600))
	p, err = New(o)
	require.NoError(t, err, "a file that nobody holds is replaced")
	require.NoError(t, p.Close())
}

func TestOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]Options{
		"at least 1":            {SlotBytes: 0, Slots: 1},
		"it must have 1 to":     {SlotBytes: 1, Slots: 0},
		"1 to 16777216":         {SlotBytes: 1, Slots: SlotsMax + 1},
		"do not fit an address": {SlotBytes: 1 << 61, Slots: 8},
	} {
		_, err := New(o)
		require.ErrorContains(t, err, want)
	}
}

// Field log 57: many owners store, read and abort at once; at the end nothing is held.
func TestParallelOwners(t *testing.T) {
	p := newTier(t, 100)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(w)))
			for round := range 300 {
				o := Owner{"request", fmt.Sprintf("%d/%d", w, round)}
				k := keysFrom(10*r.IntN(30), 10)
				as, err := p.Admit(o, k)
				if err == nil {
					for i, a := range as {
						if a.Presence != Admitted || r.IntN(10) == 0 {
							continue
						}
						dst, end, err := p.Grab(a.Slot)
						if err != nil {
							panic(err)
						}
						n := copy(dst, a.Key[:])
						if err := end(); err != nil {
							panic(err)
						}
						if _, err := p.Commit(a.Slot, Checksum(dst[:n]), int64(n), i%2 == 0); err != nil {
							panic(err)
						}
					}
				}
				refs, _ := p.Pin(o, k)
				for _, ref := range refs {
					if !ref.Zero() && (ref.Verify() != nil || Key(ref.Bytes) != ref.Key) {
						panic("a reader saw other bytes than were stored")
					}
				}
				p.Release(o)
			}
		})
	}
	wg.Wait()
	require.NoError(t, p.check())
	require.Empty(t, p.Snapshot().Pins)
}

func BenchmarkLookup(b *testing.B) {
	p := newTier(b, 8192)
	k := keysFrom(0, 8192)
	put(b, p, k[:4096])
	s := abi.NewStates(len(k))
	b.ResetTimer()
	for b.Loop() {
		p.Lookup(k, s)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/8192, "ns/key")
}

func BenchmarkTouch(b *testing.B) {
	p := newTier(b, 8192)
	k := keysFrom(0, 8192)
	put(b, p, k)
	b.ResetTimer()
	for b.Loop() {
		p.Touch(k)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/8192, "ns/key")
}

// One batch in, one batch out, at a full tier.
func BenchmarkAdmitCommitEvict(b *testing.B) {
	p := newTier(b, 8192)
	put(b, p, keysFrom(0, 8192))
	at := 8192
	for b.Loop() {
		b.StopTimer()
		k := keysFrom(at, 1024)
		at += 1024
		b.StartTimer()
		put(b, p, k)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1024, "ns/key")
}
