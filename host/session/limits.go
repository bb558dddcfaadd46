package session

import (
	"fmt"
	"math/bits"
	"time"
)

// Limits holds every wait and bound of a session. DefaultLimits gives the values
// that tierd ships; all of them are configuration.
type Limits struct {
	// ConnectHello is how long a connection attempt may take until the peer's Hello
	// is accepted, and how long jobs wait for it before the peer is suspect.
	ConnectHello time.Duration
	// RetryMin and RetryMax bound the pause between attempts; it doubles from one
	// to the other, and jitter takes up to half of it away.
	RetryMin, RetryMax time.Duration
	// Ping is the time between two Pings.
	Ping time.Duration
	// Suspect is the silence, on control and data, after which the peer's jobs end.
	Suspect time.Duration
	// Dead is the silence after which the connection is closed.
	Dead time.Duration
	// Lookup is the longest wait for the answer to a Lookup.
	Lookup time.Duration
	// RequestDeadline is a demand's own deadline when its request gives none, and
	// RequestDeadlineMax the most that a peer is believed when it gives one.
	RequestDeadline, RequestDeadlineMax time.Duration
	// TransferBase and TransferBytesPerSecond limit the wait for the bytes of keys
	// that a Supply has named: base + bytes/rate, over all bytes that the peer has
	// supplied to this node and that are not there, because they share the data
	// connections. The request's own deadline comes before it.
	TransferBase           time.Duration
	TransferBytesPerSecond uint64
	// Lease is how long what is bound to a demand of the peer is kept without a Renew
	// of it. The peer is told in the Hello and renews three times in that time.
	Lease time.Duration
	// Drain is how long the edge waits for jobs in work before it closes.
	Drain time.Duration

	// KeysMax bounds the keys of one message.
	KeysMax int
	// JobsMax bounds the jobs in work, per session and direction.
	JobsMax int
	// JobKeysMax bounds the keys of all jobs in work, per session and direction.
	JobKeysMax int
	// IDBytesMax bounds node, transfer and request ids.
	IDBytesMax int
	// TextBytesMax bounds a reason's text; what is longer is cut.
	TextBytesMax int
	// GroupsMax bounds the groups of a layout that a peer names.
	GroupsMax int
	// QueueMessages bounds the messages that wait for a slow connection.
	QueueMessages int
	// MessageBytesMax bounds one encoded Envelope.
	MessageBytesMax int
	// PartBytesMax bounds the bytes of rules in one message. There is one on its way at a
	// time, and what a session has to say waits behind no more than it.
	PartBytesMax int
}

// DefaultLimits returns the values of the design's table of waits, and bounds that
// fit one another: a Demand of KeysMax keys is 52 bytes of key, at most 5 of slot
// and 10 of epoch each, 2.2 MB, below MessageBytesMax.
func DefaultLimits() Limits {
	return Limits{
		ConnectHello:           750 * time.Millisecond,
		RetryMin:               50 * time.Millisecond,
		RetryMax:               500 * time.Millisecond,
		Ping:                   250 * time.Millisecond,
		Suspect:                750 * time.Millisecond,
		Dead:                   2 * time.Second,
		Lookup:                 500 * time.Millisecond,
		RequestDeadline:        30 * time.Second,
		RequestDeadlineMax:     10 * time.Minute,
		TransferBase:           500 * time.Millisecond,
		TransferBytesPerSecond: 200e6,
		Lease:                  10 * time.Second,
		Drain:                  5 * time.Second,
		KeysMax:                32768, // two groups of 131,072 tokens in chunks of 16, twice
		JobsMax:                1024,
		JobKeysMax:             8 * 32768, // 14 MB of keys a direction
		IDBytesMax:             256,
		TextBytesMax:           256,
		GroupsMax:              1024,
		QueueMessages:          8192, // every job of both directions may end at once with two messages each, twice
		MessageBytesMax:        4 << 20,
		PartBytesMax:           32 << 10, // 26 us at 10 Gbit/s, and the largest module in 256 questions
	}
}

// KeysMin is what every node takes in one message, whatever its bounds: the smallest
// MessageBytesMax that tierd's configuration allows, 64 KiB, has room for 855 keys. A job that
// waits for a peer's Hello must keep to it to be sure that it can be sent.
const KeysMin = 512

// perKeyBytesMax is the most that one key takes in an encoded Demand: the key, a
// slot of 32 bits and an epoch of 64 as varints.
const perKeyBytesMax = KeyBytes + 5 + 10

// Validate reports the first pair of values that cannot work together.
func (l *Limits) Validate() error {
	waits := []struct {
		name string
		v    time.Duration
	}{
		{"connect_hello", l.ConnectHello}, {"retry_min", l.RetryMin}, {"retry_max", l.RetryMax},
		{"ping", l.Ping}, {"suspect", l.Suspect}, {"dead", l.Dead}, {"lookup", l.Lookup},
		{"request_deadline", l.RequestDeadline}, {"request_deadline_max", l.RequestDeadlineMax},
		{"transfer_base", l.TransferBase}, {"lease", l.Lease}, {"drain", l.Drain},
	}
	for _, w := range waits {
		if w.v < time.Millisecond {
			return fmt.Errorf("session limit %s is %v; it must be at least 1 ms", w.name, w.v)
		}
	}
	counts := []struct {
		name string
		v    int
	}{
		{"keys_max", l.KeysMax}, {"jobs_max", l.JobsMax}, {"job_keys_max", l.JobKeysMax}, {"id_bytes_max", l.IDBytesMax}, {"text_bytes_max", l.TextBytesMax},
		{"groups_max", l.GroupsMax}, {"queue_messages", l.QueueMessages}, {"message_bytes_max", l.MessageBytesMax}, {"part_bytes_max", l.PartBytesMax},
	}
	for _, c := range counts {
		if c.v < 1 {
			return fmt.Errorf("session limit %s is %d; it must be at least 1", c.name, c.v)
		}
	}
	switch {
	case l.TransferBytesPerSecond == 0:
		return fmt.Errorf("session limit transfer_bytes_per_second is 0; it must be positive")
	case 2*l.Ping > l.Suspect:
		return fmt.Errorf("session limits: ping is %v and suspect %v; one late ping would make a living peer suspect: suspect must be at least twice ping", l.Ping, l.Suspect)
	case l.Suspect >= l.Dead:
		return fmt.Errorf("session limits: suspect is %v and dead %v; dead must be longer", l.Suspect, l.Dead)
	case l.Lease < renewals*l.Ping:
		return fmt.Errorf("session limits: lease is %v and ping %v; a lease is renewed %d times while it lasts, and no more often than pings are sent: lease must be at least %d times ping",
			l.Lease, l.Ping, renewals, renewals)
	case l.RetryMax < l.RetryMin:
		return fmt.Errorf("session limits: retry_max is %v, below retry_min, %v", l.RetryMax, l.RetryMin)
	case l.RequestDeadlineMax < l.RequestDeadline:
		return fmt.Errorf("session limits: request_deadline_max is %v, below request_deadline, %v", l.RequestDeadlineMax, l.RequestDeadline)
	case l.JobKeysMax < l.KeysMax:
		return fmt.Errorf("session limits: job_keys_max is %d, below keys_max, %d: the largest message would always be refused", l.JobKeysMax, l.KeysMax)
	case l.PartBytesMax+4096 > l.MessageBytesMax:
		return fmt.Errorf("session limits: part_bytes_max is %d, but message_bytes_max is %d; a part must fit into a message", l.PartBytesMax, l.MessageBytesMax)
	case l.KeysMax*perKeyBytesMax+4096 > l.MessageBytesMax:
		return fmt.Errorf("session limits: keys_max is %d, which may need %d bytes a message, but message_bytes_max is %d",
			l.KeysMax, l.KeysMax*perKeyBytesMax+4096, l.MessageBytesMax)
	}
	return nil
}

// renewals is how many times a lease is renewed while it lasts: two may be late.
const renewals = 3

// renewal returns the pause between two renewals of a peer's lease, 0 when it has none.
// A peer that names a shorter lease than Limits.Validate accepts is not served faster.
func (l *Limits) renewal(leaseMS uint32) time.Duration {
	if leaseMS == 0 {
		return 0
	}
	return max(l.Ping, time.Duration(leaseMS)*time.Millisecond/renewals)
}

// transfer returns the longest wait for n bytes.
func (l *Limits) transfer(n uint64) time.Duration {
	// No deadline needs to be longer than that; it keeps sums from overflowing.
	const secondsMax = 1 << 30
	s, rest := n/l.TransferBytesPerSecond, n%l.TransferBytesPerSecond
	hi, lo := bits.Mul64(rest, uint64(time.Second))
	frac, _ := bits.Div64(hi, lo, l.TransferBytesPerSecond) // rest < rate, so the quotient is below a second
	return l.TransferBase + time.Duration(min(s, secondsMax))*time.Second + time.Duration(frac)
}
