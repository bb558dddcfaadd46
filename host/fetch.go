package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/host/transfer"
)

// A link is what this node knows of a peer.
type link struct {
	reason string // of the last change of state

	// The data connections of the current session.
	session uint64 // names one PeerUp, over all links: what an older one dialed is of no use
	address string
	token   transfer.Token
	client  *transfer.Client
}

// linkSessions numbers the sessions of all links. A link that is forgotten and made again
// must not use a number twice: the dialer of the one before would take itself for current.
var linkSessions atomic.Uint64

// PeerUp implements wire.Host: the data connections are dialed, unless those of the
// session before still do.
func (s sessions) PeerUp(peer string, h *sessionpb.Hello, restarted, allLegs bool) {
	n := s.node
	n.pairUp(peer, h, allLegs)
	n.data.RegisterFor(n.dataToken(peer), peer)
	n.mu.Lock()
	l := n.link(peer)
	var token transfer.Token
	copy(token[:], h.DataToken)
	if l.client != nil && !restarted && l.address == h.DataAddress && l.token == token {
		select {
		case <-l.client.Done():
		default:
			n.mu.Unlock()
			return
		}
	}
	l.session = linkSessions.Add(1)
	old, number := l.client, l.session
	l.client, l.address, l.token = nil, h.DataAddress, token
	closing := n.closing
	n.mu.Unlock()
	if closing {
		return
	}
	n.wg.Go(func() {
		if old != nil {
			old.Close()
		}
		n.connectData(peer, h.DataAddress, token, number)
	})
}

// PeerState implements wire.Host.
func (s sessions) PeerState(peer string, c session.Changed) {
	n := s.node
	switch {
	case c.To == session.Dead:
		n.pairs.Gone(peer)
	case c.From == session.Suspect && c.To == session.Ready: // the session that it had, or a new one
		n.pairs.Heard(peer)
	}
	n.mu.Lock()
	l := n.link(peer)
	l.reason = c.Reason
	gone := c.To == session.Dead && !n.configured[peer]
	var client *transfer.Client
	if gone || c.Left { // after a goodbye the data port closes as well, and the next has other tokens
		client, l.client = l.client, nil
		l.session = linkSessions.Add(1)
	}
	if gone {
		delete(n.links, peer)
	}
	n.mu.Unlock()
	if gone {
		n.forgetToken(peer)
	}
	if client != nil {
		n.wg.Go(func() { client.Close() })
	}
}

// link returns a peer's entry; n.mu is held.
func (n *Node) link(peer string) *link {
	l := n.links[peer]
	if l == nil {
		l = &link{}
		n.links[peer] = l
	}
	return l
}

// connectData dials until it succeeds or the session is another one.
func (n *Node) connectData(peer, address string, token transfer.Token, number uint64) {
	for pause := dataRetry; ; pause = min(2*pause, dataRetryMax) {
		ctx, cancel := context.WithTimeout(n.life, n.waits.connect)
		c, err := transfer.Dial(ctx, address, token, transfer.DefaultLanes, &sink{node: n, peer: peer}, n.dialOptions(peer, address))
		cancel()
		n.mu.Lock()
		l := n.links[peer]
		current := l != nil && l.session == number && !n.closing
		if current && err == nil {
			l.client = c
		}
		n.mu.Unlock()
		switch {
		case err == nil && !current:
			c.Close()
			return
		case err == nil:
			n.watchData(peer, c, number)
			return
		case !current:
			return
		}
		var refused *refusedAddress
		if errors.As(err, &refused) {
			pause = dataRefusedRetry
		}
		n.faults.Log(slog.LevelWarn, "data-connection", peer, "no data connection to peer, retrying", "peer", peer, "address", address, "error", err, "pause", pause)
		select {
		case <-n.life.Done():
			return
		case <-time.After(pause):
		}
	}
}

// Pauses between two tries to get any data connection. They double from dataRetry to
// dataRetryMax, which is short enough for a port that comes back. An address that this node's
// own configuration refuses stays refused until that, or what its name means, is changed.
const (
	dataRetry        = 500 * time.Millisecond
	dataRetryMax     = 2 * time.Second
	dataRefusedRetry = 10 * time.Second
)

// refusedAddress is the error for a data address that this node may not connect to.
type refusedAddress struct{ error }

func (r *refusedAddress) Unwrap() error { return r.error }

// watchData tells the session when a client has ended by itself.
func (n *Node) watchData(peer string, c *transfer.Client, number uint64) {
	<-c.Done()
	n.mu.Lock()
	l := n.links[peer]
	current := l != nil && l.session == number && !n.closing
	n.mu.Unlock()
	if current {
		n.peers.DataLost(peer, fmt.Sprintf("data connections ended: %v", c.Err()))
	}
}

// A sink takes the frames of one peer.
type sink struct {
	node *Node
	peer string
}

// errUnwanted makes the receiver drop a frame.
var errUnwanted = errors.New("nobody waits for this frame")

// Begin implements transfer.Sink. The bytes go straight into the slot, which stays
// unreadable until they are verified.
func (s *sink) Begin(h transfer.Header) ([]byte, func(error), error) {
	n := s.node
	n.peers.DataActivity(s.peer)
	n.mu.Lock()
	f := n.fetches[peerJob{s.peer, session.JobID(h.Job)}]
	n.mu.Unlock()
	if f == nil || int64(h.Seq) >= int64(len(f.wants)) {
		return nil, nil, errUnwanted
	}
	w := f.wants[h.Seq]
	size := n.groups[w.ref.Group].chunkBytes
	slot := tier.Slot{Index: h.Slot, Epoch: h.Epoch}
	if w.slot != slot || int64(h.Length) != size {
		return nil, nil, errUnwanted
	}
	dst, end, err := n.tier.Grab(slot)
	if err != nil {
		return nil, nil, err
	}
	return dst[:size:size], func(err error) {
		if came(err) {
			n.peers.DataActivity(s.peer)
		}
		f.arrived(s.peer, session.JobID(h.Job), int(h.Seq), h.Sum, errors.Join(err, end()))
	}, nil
}

// came says whether a payload that ended with err has come: one that was cut off with its
// connection has not, and the end of a connection is no sign of life.
func came(err error) bool {
	var mismatch *transfer.ErrChecksum
	return err == nil || errors.As(err, &mismatch)
}

// A fetch is one demand of a consumer.
type fetch struct {
	c     *consumer
	peer  string
	wants []*want // in the order of the demand
	began time.Time
	// endWait ends it in the node's waits in work.
	endWait func()
	job     session.JobID // 0 before start; guarded by consumer.mu
}

// arrived takes up one chunk. The session hears of it after it is readable.
func (f *fetch) arrived(peer string, id session.JobID, i int, sum uint32, err error) {
	n := f.c.node
	w := f.wants[i]
	size := n.groups[w.ref.Group].chunkBytes
	if err == nil {
		if err = f.c.landed(w, sum, size); err == nil {
			n.peers.Arrived(peer, id, i, session.Transferred, "")
			return
		}
	}
	var mismatch *transfer.ErrChecksum
	if errors.As(err, &mismatch) {
		n.metrics.Checksum.WithLabelValues("wire").Inc()
		n.tellWrong("wire", peer, w.key, err, "group", n.groups[w.ref.Group].name, "chunk", w.ref.Chunk, "request", f.c.name)
		n.peers.Arrived(peer, id, i, session.Checksum, err.Error())
		return
	}
	n.peers.Arrived(peer, id, i, session.NoData, err.Error())
}

// start registers the fetch before its first byte can come.
func (f *fetch) start(peer string, id session.JobID) {
	n := f.c.node
	n.mu.Lock()
	n.fetches[peerJob{peer, id}] = f
	n.mu.Unlock()
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.job = id
	for i, w := range f.wants {
		if w.ended { // given up before the demand was sent
			f.forgo(i)
		}
	}
}

// forgo tells the session that a chunk of a demand is not wanted any more. When none is, the
// producer hears an abort; else what still comes is dropped, because its slot has another
// epoch. The consumer's mu is held.
func (f *fetch) forgo(i int) {
	if f.job != 0 {
		f.c.node.peers.Arrived(f.peer, f.job, i, session.Aborted, forgone.detail)
	}
}

// forgone ends a chunk of leg demand that no plan uses any more.
var forgone = failure{metrics.CauseAborted, "not wanted any more: the plan without what the producer has refused does not use it"}

// word takes up what the producer refuses before the demand's end.
func (f *fetch) word(w session.Word) {
	wants, failures := make([]*want, len(w.Refused)), make([]failure, len(w.Refused))
	for k, i := range w.Refused {
		wants[k], failures[k] = f.wants[i], failureOf(w.Results[k])
	}
	f.c.noteQuit(w.Results)
	f.c.lose(wants, failures)
}

// done ends the fetch: what has not arrived has a cause now, and its slot is free for
// others at once; late bytes meet another epoch.
func (f *fetch) done(peer string, id session.JobID, results []session.Result) {
	n := f.c.node
	n.mu.Lock()
	delete(n.fetches, peerJob{peer, id})
	n.mu.Unlock()
	f.endWait()
	outcome := outcomeOf(results)
	n.metrics.Waits.WithLabelValues(metrics.WaitTransfer, outcome).Inc()
	n.metrics.TransferSeconds.WithLabelValues(outcome).Observe(time.Since(f.began).Seconds())
	f.c.noteQuit(results)
	failures := make([]failure, len(results))
	for i, r := range results {
		failures[i] = failureOf(r)
	}
	f.c.lose(f.wants, failures)
}
