package halfopen

import (
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestFrom(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1:5": "10.0.0.1", "[::ffff:10.0.0.1]:5": "10.0.0.1",
		"[2001:db8::1:2:3:4]:5": "2001:db8::", "[fe80::1%lo]:5": "fe80::",
	} {
		a, err := net.ResolveTCPAddr("tcp", in)
		require.NoError(t, err)
		require.Equal(t, addr(want), From(a), in)
	}
	require.Equal(t, netip.Addr{}, From(&net.UnixAddr{Name: "x"}))
	require.Equal(t, netip.Addr{}, From(nil))
}

// The model: the entries of each address, oldest first.
func TestFairness(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		per := rapid.IntRange(1, 4).Draw(t, "per address")
		total := rapid.IntRange(1, 8).Draw(t, "total")
		s := New(per, total, time.Hour)
		type thing struct {
			entry *Entry
			ended bool
			from  int
		}
		var live []*thing // oldest first
		count := func(from int) (n int) {
			for _, x := range live {
				if x.from == from {
					n++
				}
			}
			return n
		}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			if len(live) > 0 && rapid.IntRange(0, 3).Draw(t, "kind") == 0 {
				i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
				require.True(t, live[i].entry.Done())
				require.False(t, live[i].entry.Done())
				live = slices.Delete(live, i, i+1)
				continue
			}
			x := &thing{from: rapid.IntRange(1, 4).Draw(t, "from")}
			var out *thing
			switch {
			case count(x.from) >= per:
				out = live[slices.IndexFunc(live, func(y *thing) bool { return y.from == x.from })]
			case len(live) >= total:
				for _, y := range live {
					if out == nil || count(y.from) > count(out.from) {
						out = y
					}
				}
			}
			var pushed bool
			x.entry, pushed = s.Add(netip.AddrFrom4([4]byte{10, 0, 0, byte(x.from)}), func() { x.ended = true })
			require.Equal(t, out != nil, pushed)
			if out != nil {
				require.True(t, out.ended)
				require.False(t, out.entry.Done())
				live = slices.DeleteFunc(live, func(y *thing) bool { return y == out })
			}
			live = append(live, x)
			for _, y := range live {
				require.False(t, y.ended)
			}
			n, _ := s.Counts()
			require.Equal(t, len(live), n)
		}
		for _, x := range live {
			x.entry.Done()
		}
		require.Empty(t, s.by)
	})
}

func TestAge(t *testing.T) {
	s := New(8, 8, 30*time.Millisecond)
	var ended atomic.Int32
	e, _ := s.Add(addr("10.0.0.1"), func() { ended.Add(1) })
	quick, _ := s.Add(addr("10.0.0.1"), func() { ended.Add(10) })
	require.True(t, quick.Done())
	require.Eventually(t, func() bool { return ended.Load() == 1 }, 10*time.Second, time.Millisecond)
	require.False(t, e.Done())
	time.Sleep(60 * time.Millisecond)
	require.Equal(t, int32(1), ended.Load(), "what is done is not ended")
}
