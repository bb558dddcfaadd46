// Package halfopen bounds what has come in on a port and has not said who it is:
// connections before their hello, streams before theirs.
//
// A port that refuses the newest when too many wait lets whoever opens connections and
// says nothing keep everybody else out. So the oldest goes instead: an honest peer says
// its hello in milliseconds, and is gone from the set before a flood has pushed it out.
// The set is fair between addresses: when one address has its share, its own oldest
// goes; when the whole set is full, the oldest of the address that has the most.
// Whatever is still in the set after Within goes too, however few there are.
package halfopen

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

// prefix6Bits is the part of an IPv6 address that counts as one address: a host commonly
// owns all addresses with its first 64 bits.
const prefix6Bits = 64

// From returns the address that a connection is counted under. What is no IP address,
// such as a connection in memory, shares one.
func From(a net.Addr) netip.Addr {
	ip := IP(a)
	if ip.Is6() {
		if p, err := ip.WithZone("").Prefix(prefix6Bits); err == nil {
			return p.Addr()
		}
	}
	return ip
}

// IP returns the IP address of a connection's end, IPv4 in its short form, or the zero
// Addr when it has none.
func IP(a net.Addr) netip.Addr {
	if a == nil {
		return netip.Addr{}
	}
	p, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return p.Addr().Unmap()
}

// A Set holds what is half open.
type Set struct {
	perAddressMax, totalMax int
	within                  time.Duration

	mu     sync.Mutex
	by     map[netip.Addr][]*Entry // oldest first
	count  int
	order  uint64
	pushed uint64
}

// New returns an empty set: at most perAddressMax entries of one address, totalMax in
// all, each for at most within, or as long as it likes when within is 0.
func New(perAddressMax, totalMax int, within time.Duration) *Set {
	return &Set{perAddressMax: perAddressMax, totalMax: totalMax, within: within, by: map[netip.Addr][]*Entry{}}
}

// An Entry is one thing that is half open.
type Entry struct {
	set   *Set
	from  netip.Addr
	order uint64
	end   func()
	timer *time.Timer
	in    bool // set.mu
}

// Add takes something in. end ends it, from another goroutine, and must not wait; it is
// called at most once, and not after Done. pushed says that another entry was ended to
// make room.
func (s *Set) Add(from netip.Addr, end func()) (e *Entry, pushed bool) {
	s.mu.Lock()
	var out *Entry
	switch own := s.by[from]; {
	case len(own) >= s.perAddressMax:
		out = own[0]
	case s.count >= s.totalMax:
		out = s.crowd()
	}
	if out != nil {
		s.remove(out)
		s.pushed++
	}
	s.order++
	e = &Entry{set: s, from: from, order: s.order, end: end, in: true}
	s.by[from] = append(s.by[from], e)
	s.count++
	if s.within > 0 {
		e.timer = time.AfterFunc(s.within, func() {
			if e.leave() {
				end()
			}
		})
	}
	s.mu.Unlock()
	if out != nil {
		out.stop()
		out.end()
	}
	return e, out != nil
}

func (e *Entry) stop() {
	if e.timer != nil {
		e.timer.Stop()
	}
}

// crowd returns the oldest entry of the address that has the most; of two that have as
// many, of the one whose oldest is older.
func (s *Set) crowd() (out *Entry) {
	most := 0
	for _, own := range s.by {
		if len(own) > most || len(own) == most && own[0].order < out.order {
			most, out = len(own), own[0]
		}
	}
	return out
}

// remove takes an entry out; s.mu is held.
func (s *Set) remove(e *Entry) {
	own := s.by[e.from]
	for i := range own {
		if own[i] == e {
			own = append(own[:i:i], own[i+1:]...)
			break
		}
	}
	if len(own) == 0 {
		delete(s.by, e.from)
	} else {
		s.by[e.from] = own
	}
	e.in = false
	s.count--
}

func (e *Entry) leave() bool {
	e.set.mu.Lock()
	defer e.set.mu.Unlock()
	if !e.in {
		return false
	}
	e.set.remove(e)
	return true
}

// Done takes the entry out: it has said who it is, or has ended. It reports false when it
// was ended to make room, or for its age.
func (e *Entry) Done() bool {
	e.stop()
	return e.leave()
}

// Counts returns how many entries there are, and how many were ended to make room.
func (s *Set) Counts() (entries int, pushed uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count, s.pushed
}
