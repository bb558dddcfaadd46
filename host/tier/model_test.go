package tier

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"pgregory.net/rapid"
)

// model is the tier as one would write it without caring for speed: a list of entries,
// searched from end to end.
type model struct {
	slots   int
	clock   int
	entries []*entry
}

type entry struct {
	slot     Slot
	key      Key
	named    bool
	readable bool
	gone     bool // key gone: detached, or fenced
	owner    Owner
	pins     []Owner
	grabbed  bool
	used     int
	content  []byte
}

func (m *model) find(k Key) *entry {
	for _, e := range m.entries {
		if e.named && !e.gone && e.key == k {
			return e
		}
	}
	return nil
}

func (m *model) state(k Key) abi.State {
	switch e := m.find(k); {
	case e == nil:
		return abi.Miss
	case e.readable:
		return abi.Hit
	}
	return abi.Pending
}

func (m *model) use(keys []Key) {
	for i := len(keys) - 1; i >= 0; i-- {
		if e := m.find(keys[i]); e != nil {
			m.clock++
			e.used = m.clock
		}
	}
}

// sweep removes entries that nothing keeps.
func (m *model) sweep() {
	m.entries = slices.DeleteFunc(m.entries, func(e *entry) bool { return e.gone && len(e.pins) == 0 && !e.grabbed })
}

func (m *model) drop(e *entry) {
	e.gone = true
	m.sweep()
}

// room evicts until n slots are free, or reports that it cannot.
func (m *model) room(n int, protect []Key) bool {
	var idle []*entry
	for _, e := range m.entries {
		if e.readable && !e.gone && len(e.pins) == 0 && !slices.Contains(protect, e.key) {
			idle = append(idle, e)
		}
	}
	free := m.slots - len(m.entries)
	if n > free+len(idle) {
		return false
	}
	slices.SortFunc(idle, func(a, b *entry) int { return a.used - b.used })
	for ; free < n; free++ {
		m.drop(idle[0])
		idle = idle[1:]
	}
	return true
}

// machine runs the tier and the model side by side.
type machine struct {
	p      *Primary
	m      *model
	epochs map[uint32]uint64
	refs   []Ref
	refOf  []Owner
	grabs  []grab
	old    []Slot // handles that are no longer good
}

type grab struct {
	e   *entry
	dst []byte
	end func() error
}

var testOwners = []Owner{{"request", "a"}, {"request", "b"}, {"session", "c"}}

func testKey(i int) Key { return MakeKey(Tenant([]byte("salt")), []byte{byte(i)}, uint32(i%2)) }

func drawKeys(t *rapid.T) (keys []Key) {
	for _, i := range rapid.SliceOfN(rapid.IntRange(0, 9), 0, 6).Draw(t, "keys") {
		keys = append(keys, testKey(i))
	}
	return keys
}

func drawOwner(t *rapid.T) Owner { return rapid.SampledFrom(testOwners).Draw(t, "owner") }

// pick draws an entry that is good for the action, or skips it.
func (x *machine) pick(t *rapid.T, good func(*entry) bool) *entry {
	var of []*entry
	for _, e := range x.m.entries {
		if good(e) {
			of = append(of, e)
		}
	}
	if len(of) == 0 {
		t.Skip("no such slot")
	}
	return of[rapid.IntRange(0, len(of)-1).Draw(t, "slot")]
}

func writing(e *entry) bool  { return !e.readable && !e.gone }
func readable(e *entry) bool { return e.readable && !e.gone }

// handedOut checks that the epoch rose, and adds the entry.
func (x *machine) handedOut(t *rapid.T, s Slot, owner Owner) *entry {
	require.Greater(t, s.Epoch, x.epochs[s.Index], "epoch of slot %d", s.Index)
	x.epochs[s.Index] = s.Epoch
	e := &entry{slot: s, owner: owner}
	x.m.entries = append(x.m.entries, e)
	return e
}

func (x *machine) admit(t *rapid.T) {
	owner, keys := drawOwner(t), drawKeys(t)
	var want []Presence
	need := map[Key]bool{}
	for _, k := range keys {
		switch {
		case need[k]:
			want = append(want, Writing)
		case x.m.state(k) == abi.Hit:
			want = append(want, Readable)
		case x.m.state(k) == abi.Pending:
			want = append(want, Writing)
		default:
			want = append(want, Admitted)
			need[k] = true
		}
	}
	got, err := x.p.Admit(owner, keys)
	if !x.m.room(len(need), keys) {
		var none *ErrNoRoom
		require.ErrorAs(t, err, &none)
		require.Equal(t, len(need), none.Need)
		require.Equal(t, x.m.slots-len(x.m.entries), none.Free)
		require.Less(t, none.Free+none.Evictable, none.Need)
		return
	}
	require.NoError(t, err)
	for i, a := range got {
		require.Equal(t, want[i], a.Presence)
		require.Equal(t, keys[i], a.Key)
		if a.Presence == Admitted {
			e := x.handedOut(t, a.Slot, owner)
			e.key, e.named = a.Key, true
		} else {
			require.Equal(t, x.m.find(a.Key).slot, a.Slot)
		}
	}
	x.m.use(keys)
}

func (x *machine) stage(t *rapid.T) {
	owner, n := drawOwner(t), rapid.IntRange(0, 4).Draw(t, "n")
	got, err := x.p.Stage(owner, n)
	if !x.m.room(n, nil) {
		var none *ErrNoRoom
		require.ErrorAs(t, err, &none)
		return
	}
	require.NoError(t, err)
	require.Len(t, got, n)
	for _, s := range got {
		x.handedOut(t, s, owner)
	}
}

func (x *machine) name(t *rapid.T) {
	e := x.pick(t, writing)
	k := testKey(rapid.IntRange(0, 9).Draw(t, "key"))
	err := x.p.Name(e.slot, k)
	if e.named || x.m.find(k) != nil {
		require.ErrorIs(t, err, ErrExists)
		return
	}
	require.NoError(t, err)
	e.key, e.named = k, true
	x.m.use([]Key{k})
}

func (x *machine) commit(t *rapid.T) {
	e := x.pick(t, writing)
	keep := rapid.Bool().Draw(t, "keep")
	b, err := x.p.Bytes(e.slot)
	require.NoError(t, err)
	require.Len(t, b, int(x.p.SlotBytes()))
	n := rapid.IntRange(0, len(b)).Draw(t, "bytes")
	for i := range n {
		b[i] = byte(e.slot.Index)<<4 ^ byte(e.slot.Epoch) ^ byte(i)
	}
	var woken <-chan struct{}
	if e.named {
		woken = x.p.Watch(e.key)
		require.False(t, isClosed(woken))
	}
	ref, err := x.p.Commit(e.slot, Checksum(b[:n]), int64(n), keep)
	switch {
	case !e.named:
		require.ErrorIs(t, err, ErrUnnamed)
		return
	case e.grabbed:
		require.ErrorIs(t, err, ErrBusy)
		return
	}
	require.NoError(t, err)
	require.True(t, isClosed(woken))
	e.readable, e.content = true, slices.Clone(b[:n])
	require.Equal(t, keep, !ref.Zero())
	if keep {
		e.pins = append(e.pins, e.owner)
		x.hold(ref, e.owner)
	}
	e.owner = Owner{}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (x *machine) hold(r Ref, o Owner) {
	x.refs, x.refOf = append(x.refs, r), append(x.refOf, o)
}

func (x *machine) dropWrite(t *rapid.T) {
	e := x.pick(t, writing)
	var woken <-chan struct{} = closedChan
	if e.named {
		woken = x.p.Watch(e.key)
	}
	require.NoError(t, x.p.Drop(e.slot))
	require.True(t, isClosed(woken))
	x.old = append(x.old, e.slot)
	x.m.drop(e)
}

func (x *machine) pinKeys(t *rapid.T) {
	owner, keys := drawOwner(t), drawKeys(t)
	refs, found := x.p.Pin(owner, keys)
	for i, k := range keys {
		want := map[abi.State]Presence{abi.Miss: Absent, abi.Pending: Writing, abi.Hit: Readable}[x.m.state(k)]
		require.Equal(t, want, found[i])
		require.Equal(t, want == Readable, !refs[i].Zero())
		if want == Readable {
			e := x.m.find(k)
			require.Equal(t, e.slot, refs[i].Slot)
			e.pins = append(e.pins, owner)
			x.hold(refs[i], owner)
		}
	}
	x.m.use(keys)
}

func (x *machine) bySlot(s Slot) *entry {
	for _, e := range x.m.entries {
		if e.slot == s {
			return e
		}
	}
	return nil
}

func (x *machine) unpinOne(t *rapid.T) {
	if len(x.refs) == 0 {
		t.Skip("no pins")
	}
	i := rapid.IntRange(0, len(x.refs)-1).Draw(t, "ref")
	r, o := x.refs[i], x.refOf[i]
	require.NoError(t, x.p.Unpin(r))
	require.ErrorIs(t, x.p.Unpin(r), ErrNotPinned)
	x.refs, x.refOf = slices.Delete(x.refs, i, i+1), slices.Delete(x.refOf, i, i+1)
	e := x.bySlot(r.Slot)
	at := slices.Index(e.pins, o)
	e.pins = slices.Delete(e.pins, at, at+1)
	x.m.sweep()
}

func (x *machine) release(t *rapid.T) {
	o := drawOwner(t)
	pins, writes := 0, 0
	for _, e := range slices.Clone(x.m.entries) {
		if writing(e) && e.owner == o {
			writes++
			x.old = append(x.old, e.slot)
			x.m.drop(e)
		}
		e.pins = slices.DeleteFunc(e.pins, func(p Owner) bool {
			if p == o {
				pins++
			}
			return p == o
		})
	}
	x.m.sweep()
	for i := len(x.refs) - 1; i >= 0; i-- {
		if x.refOf[i] == o {
			x.refs, x.refOf = slices.Delete(x.refs, i, i+1), slices.Delete(x.refOf, i, i+1)
		}
	}
	gotPins, gotWrites := x.p.Release(o)
	require.Equal(t, []int{pins, writes}, []int{gotPins, gotWrites})
}

func (x *machine) grabSlot(t *rapid.T) {
	e := x.pick(t, writing)
	dst, end, err := x.p.Grab(e.slot)
	if e.grabbed {
		require.ErrorIs(t, err, ErrBusy)
		return
	}
	require.NoError(t, err)
	e.grabbed = true
	x.grabs = append(x.grabs, grab{e, dst, end})
}

func (x *machine) endGrab(t *rapid.T) {
	if len(x.grabs) == 0 {
		t.Skip("no grabs")
	}
	i := rapid.IntRange(0, len(x.grabs)-1).Draw(t, "grab")
	g := x.grabs[i]
	x.grabs = slices.Delete(x.grabs, i, i+1)
	for k := range g.dst {
		g.dst[k] = 0xff // late bytes: nobody else may see them
	}
	for range 2 {
		err := g.end()
		require.Equal(t, g.e.gone, errors.Is(err, ErrStale))
	}
	g.e.grabbed = false
	x.m.sweep()
}

func (x *machine) invalidate(t *rapid.T) {
	e := x.pick(t, readable)
	require.NoError(t, x.p.Invalidate(e.slot, ReasonChecksum))
	x.old = append(x.old, e.slot)
	x.m.drop(e)
}

// late tries everything with a handle that is no longer good.
func (x *machine) late(t *rapid.T) {
	if len(x.old) == 0 {
		t.Skip("no old handles")
	}
	s := x.old[rapid.IntRange(0, len(x.old)-1).Draw(t, "old")]
	_, _, err := x.p.Grab(s)
	require.ErrorIs(t, err, ErrStale)
	_, err = x.p.Commit(s, 0, 0, true)
	require.ErrorIs(t, err, ErrStale)
	require.ErrorIs(t, x.p.Drop(s), ErrStale)
	require.ErrorIs(t, x.p.Name(s, testKey(99)), ErrStale)
	require.ErrorIs(t, x.p.Invalidate(s, ReasonLost), ErrStale)
}

// compare checks the invariants and that both sides look the same from outside.
func (x *machine) compare(t *rapid.T) {
	require.NoError(t, x.p.check())
	var keys []Key
	for i := range 10 {
		keys = append(keys, testKey(i))
	}
	states := abi.NewStates(len(keys))
	x.p.Lookup(keys, states)
	var snap = x.p.Snapshot()
	want := Snapshot{}
	for i, k := range keys {
		require.Equal(t, x.m.state(k), states.At(i), "key %d", i)
		require.Equal(t, x.m.state(k) != abi.Pending, isClosed(x.p.Watch(k)))
	}
	for _, e := range x.m.entries {
		switch {
		case readable(e):
			want.Readable++
			want.ResidentBytes += int64(len(e.content))
			if len(e.pins) == 0 {
				want.Evictable++
			}
		case writing(e):
			want.Writing++
		case e.readable:
			want.Detached++
		default:
			want.Fenced++
		}
	}
	want.Free = x.m.slots - len(x.m.entries)
	snap.Stats, snap.Pins, snap.Slots = Stats{}, nil, 0
	require.Equal(t, want, snap)
	for _, r := range x.refs {
		require.NoError(t, r.Verify(), "a pinned slot keeps its bytes")
		require.Equal(t, string(x.bySlot(r.Slot).content), string(r.Bytes))
	}
}

// TestAgainstModel runs random operations on the tier and on the model.
func TestAgainstModel(t *testing.T) {
	dir := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		slots := rapid.IntRange(1, 8).Draw(t, "slots")
		now := time.Unix(0, 0)
		p, err := New(Options{Path: filepath.Join(dir, fmt.Sprint(n)), SlotBytes: 100, Slots: slots, Now: func() time.Time {
			now = now.Add(time.Second)
			return now
		}})
		require.NoError(t, err)
		x := &machine{p: p, m: &model{slots: slots}, epochs: map[uint32]uint64{}}
		t.Repeat(map[string]func(*rapid.T){
			"admit": x.admit, "admit2": x.admit, "stage": x.stage, "name": x.name, "commit": x.commit,
			"commit2": x.commit, "drop": x.dropWrite, "pin": x.pinKeys, "unpin": x.unpinOne, "unpin2": x.unpinOne,
			"release": x.release, "grab": x.grabSlot, "endGrab": x.endGrab, "invalidate": x.invalidate, "late": x.late,
			"touch": func(t *rapid.T) {
				keys := drawKeys(t)
				p.Touch(keys)
				x.m.use(keys)
			},
			"": x.compare,
		})
		for _, o := range testOwners {
			p.Release(o)
		}
		for _, g := range x.grabs {
			g.end()
		}
		require.NoError(t, p.check())
		s := p.Snapshot()
		require.Empty(t, s.Pins, "an owner that is gone leaves nothing")
		require.Equal(t, s.Slots, s.Free+s.Evictable)
		require.NoError(t, p.Close())
		require.Nil(t, p.mem, "unmapped")
	})
}
