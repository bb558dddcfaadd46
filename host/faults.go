package host

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// A fault of a consumer is told in the log with the groups and chunks that it took, once:
// not for each request that meets it. Lines go through package limitlog, whose window is a
// minute; the counters count them all.

// levelOf says how loud a cause is. That somebody gives a request up is everyday life, and
// that a tier is full or has dropped something is pressure; the rest asks for attention.
func levelOf(cause string) slog.Level {
	switch cause {
	case metrics.CauseAborted:
		return slog.LevelDebug
	case metrics.CauseNoRoom, metrics.CauseEvicted:
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

// noteQuit notes that demand ends because the producer's engine gave its request up, which
// is an abort, too, or because leg demand asked for more than the producer's plan has, which
// is what that leg is for: no reason to warn.
func (c *consumer) noteQuit(results []session.Result) {
	for i := range results {
		r := results[i].Reason
		if results[i].Cause == session.Unmatched && (r == sessionpb.Reason_REASON_REQUEST_ABORTED || r == sessionpb.Reason_REASON_NOT_PLANNED) {
			c.mu.Lock()
			c.quit = true
			c.mu.Unlock()
			return
		}
	}
}

// faultOf says what is one fault: everything that a peer's silence, lateness or refusal
// ends is one; demand that a producer did not supply is one for each request, because each
// names other chunks; and so are wrong bytes.
func (c *consumer) faultOf(cause string) string {
	switch cause {
	case metrics.CauseUnmatched, metrics.CauseChecksum, metrics.CauseStore:
		return c.owner.ID
	}
	return c.from
}

// closes says whether a peer has said that it closes: what a request misses by that is no
// fault.
func (n *Node) closes(peer string) bool {
	for _, s := range n.peers.Status() {
		if s.ID == peer {
			return s.Left || s.Draining
		}
	}
	return false
}

// tellFaults writes what this request could not have, a line for each cause. It is called
// once, when every wait has ended.
func (c *consumer) tellFaults() {
	c.mu.Lock()
	lost := map[string][]plan.Ref{}
	detail := map[string]string{}
	for _, w := range c.demanded() {
		if f := w.fail; f.cause != "" {
			lost[f.cause] = append(lost[f.cause], w.ref)
			detail[f.cause] = cmp.Or(detail[f.cause], f.detail)
		}
	}
	quit := c.quit
	c.mu.Unlock()
	for cause, refs := range lost {
		level := levelOf(cause)
		if quit && cause == metrics.CauseUnmatched || (cause == metrics.CauseRefused || cause == metrics.CausePeer) && c.node.closes(c.from) {
			level = slog.LevelInfo
		}
		c.node.faults.Log(level, cause, c.faultOf(cause), "a request goes on without chunks that it had planned to have",
			"detail", detail[cause], "peer", c.from, "leg", c.leg, "request", c.name, "transfer", c.transfer, "chunks", c.node.chunksText(refs))
	}
}

// tellWrong writes that a chunk's bytes are not those that were stored: in the slab, when
// they are read again, or on the wire. Every chunk is a fault of its own, and of many the
// first few have a line.
func (n *Node) tellWrong(place, peer string, key tier.Key, err error, args ...any) {
	msg := "a chunk in the slab is not what was stored; it is dropped"
	if place == "wire" {
		msg = "a chunk arrived with other bytes than were sent"
	}
	n.faults.Log(slog.LevelError, "checksum-"+place, key.String(), msg, append(args, "peer", peer, "key", key, "error", err)...)
}

// tellOverBudget writes that chunks are refused because a peer's budget is used up, once a
// minute and peer; the counters have them all.
func (n *Node) tellOverBudget(peer string, refused []session.Refusal) {
	for i := range refused {
		if r := &refused[i]; r.Reason == sessionpb.Reason_REASON_BUSY && r.Text != "" {
			n.faults.Log(slog.LevelWarn, "peer-budget", peer, "chunks that a peer demands are refused", "peer", peer, "chunks", len(r.Indices), "detail", r.Text)
		}
	}
}

// rangesMax bounds the ranges of one line: more say nothing new.
const rangesMax = 16

// chunksText writes chunks as groups with ranges, such as "full {0-3, 7}; sliding {2}".
func (n *Node) chunksText(refs []plan.Ref) string {
	refs = slices.SortedFunc(slices.Values(refs), func(a, b plan.Ref) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Chunk, b.Chunk))
	})
	var b strings.Builder
	ranges := 0
	for i := 0; i < len(refs); ranges++ {
		if ranges == rangesMax {
			fmt.Fprintf(&b, ", and %d more", len(refs)-i)
			break
		}
		last := i
		for last+1 < len(refs) && refs[last+1].Group == refs[i].Group && refs[last+1].Chunk <= refs[last].Chunk+1 {
			last++
		}
		switch {
		case i == 0:
			fmt.Fprintf(&b, "%s {", n.groups[refs[i].Group].name)
		case refs[i].Group != refs[i-1].Group:
			fmt.Fprintf(&b, "}; %s {", n.groups[refs[i].Group].name)
		default:
			b.WriteString(", ")
		}
		fmt.Fprint(&b, refs[i].Chunk)
		if refs[last].Chunk > refs[i].Chunk {
			fmt.Fprintf(&b, "-%d", refs[last].Chunk)
		}
		i = last + 1
	}
	if b.Len() > 0 {
		b.WriteString("}")
	}
	return b.String()
}
