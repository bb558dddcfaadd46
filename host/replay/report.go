package replay

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/tierd/tierd/host/engine/enginepb"
)

// A Report is what a replay found. Its JSON form is what `tierd replay --json` prints.
type Report struct {
	Leg string `json:"leg"`
	// Producer and Consumer are the two daemons.
	Producer Node `json:"producer"`
	Consumer Node `json:"consumer"`
	// Requests = Hits + Recomputed.
	Requests   int `json:"requests"`
	Hits       int `json:"hits"`
	Recomputed int `json:"recomputed"`
	// RequestsLeft were not played, or not to their end, because the replay was stopped.
	RequestsLeft int `json:"requests_left,omitempty"`
	// WrongBytes counts bytes that attention would have read and that were not right.
	WrongBytes uint64 `json:"wrong_bytes"`
	// Bytes that the consumer's daemon pulled.
	Bytes uint64 `json:"bytes"`
	// OwnTierBytes that it had in its own tier already.
	OwnTierBytes uint64  `json:"own_tier_bytes"`
	Seconds      float64 `json:"seconds"`
	// PullMS is how long the consumer waited, in milliseconds: from the moment that
	// both sides were ready (the producer had finished, the consumer had begun) until
	// the bytes were in its blocks. Pulls is how many such waits there were.
	PullMS Quantiles `json:"pull_ms"`
	Pulls  int       `json:"pulls"`
	// Groups in deployment order, in chunks.
	Groups []GroupReport `json:"groups"`
	// RecomputedCauses counts the recomputed requests by their cause.
	RecomputedCauses map[string]int `json:"recomputed_causes"`
	// FailedChunks counts the chunks that daemons could not deliver, by cause.
	FailedChunks map[string]int `json:"failed_chunks"`
	// NativeTokens is how much of the prompts the engines' own blocks still held.
	NativeTokens NativeReport `json:"native_tokens"`
	// Details are the first sentences that daemons gave, mostly with a recompute, each
	// with how often it came.
	Details []Detail `json:"details,omitempty"`
	// DetailsLeftOut counts sentences that were others than those.
	DetailsLeftOut int `json:"details_left_out,omitempty"`
}

// A Node is a daemon that was played against.
type Node struct {
	ID     string `json:"node_id"`
	Socket string `json:"socket"`
}

// A Detail is one sentence of a daemon.
type Detail struct {
	Cause string `json:"cause"`
	Text  string `json:"text"`
	Count int    `json:"count"`
}

// Quantiles of a duration in milliseconds. Of fewer than p99Pulls waits P99 is the
// longest one, and says no more than Max.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// GroupReport counts the chunks of one group over all requests. Of what was demanded,
// each chunk was in the consumer's own tier, came from its peer, or stayed unmatched:
// Demanded = OwnTier + Transferred + Unmatched, except that a chunk which came and was
// found spoiled before the engine had it counts as both of the last two.
type GroupReport struct {
	Name     string `json:"name"`
	Demanded uint64 `json:"demanded"`
	// OwnTier chunks were in the consumer's tier already, or on their way there for
	// another request.
	OwnTier uint64 `json:"own_tier"`
	// Supplied by the producer.
	Supplied uint64 `json:"supplied"`
	// Transferred whole from the peer.
	Transferred uint64 `json:"transferred"`
	// Unmatched could not be had: FailedChunks has the causes.
	Unmatched uint64 `json:"unmatched"`
}

// NativeReport is in tokens.
type NativeReport struct {
	Producer uint64 `json:"producer"`
	Consumer uint64 `json:"consumer"`
}

// Unmatched is the chunks of all groups that no supply had.
func (r *Report) Unmatched() (n uint64) {
	for i := range r.Groups {
		n += r.Groups[i].Unmatched
	}
	return n
}

// OK reports whether no byte was wrong and no demand unmatched.
func (r *Report) OK() bool { return r.WrongBytes == 0 && r.Unmatched() == 0 }

const (
	// detailsMax bounds Report.Details: the first few tell the story.
	detailsMax = 8
	// p99Pulls is how many waits it takes before their 99th percentile is printed.
	p99Pulls = 100
)

// A tally adds up what became of each request.
type tally struct {
	mu         sync.Mutex
	requests   int // that are to be played
	sum        Report
	index      map[string]int
	chunkBytes []uint64 // per group
	pulls      []time.Duration
	// refused counts the requests to which a side's daemon said no; refusals are the
	// first such answers.
	refused  map[string]int
	refusals []*refusal
}

func newTally(producer, consumer *side, leg string, requests int) *tally {
	y := &tally{requests: requests, index: map[string]int{}, refused: map[string]int{}}
	y.sum = Report{
		Leg: leg, Producer: Node{producer.daemon.id, producer.daemon.socket}, Consumer: Node{consumer.daemon.id, consumer.daemon.socket},
		RecomputedCauses: map[string]int{}, FailedChunks: map[string]int{},
	}
	for i := range consumer.groups {
		g := &consumer.groups[i]
		y.index[g.name] = i
		y.chunkBytes = append(y.chunkBytes, g.chunkBytes())
		y.sum.Groups = append(y.sum.Groups, GroupReport{Name: g.name})
	}
	return y
}

// add counts one request; its producer's part has ended.
func (y *tally) add(t *task, c *consumed, progress func(int)) {
	y.mu.Lock()
	defer y.mu.Unlock()
	r := &y.sum
	if c.hit {
		r.Hits++
	} else {
		r.Recomputed++
		r.RecomputedCauses[c.cause]++
		y.detail(c.cause, c.detail)
	}
	r.Requests++
	y.detail("note", c.remark)
	y.no(c.refused)
	if t.produceErr != nil {
		y.detail("not stored", t.produceErr.Error())
		var no *refusal
		errors.As(t.produceErr, &no)
		y.no(no)
	}
	r.WrongBytes += c.wrongBytes
	r.NativeTokens.Consumer += c.nativeTokens
	for _, f := range c.failures {
		r.FailedChunks[f.Cause]++
	}
	if p := t.production; p != nil {
		r.NativeTokens.Producer += p.nativeTokens
		y.each(p.groups, func(g *GroupReport, n *enginepb.GroupCount) { g.Supplied += n.Supplied })
	}
	y.each(c.groups, func(g *GroupReport, n *enginepb.GroupCount) {
		own := n.Demanded - min(n.Demanded, n.Transferred+n.Unmatched)
		g.Demanded += n.Demanded
		g.OwnTier += own
		g.Transferred += n.Transferred
		g.Unmatched += n.Unmatched
		r.Bytes += n.Bytes
		r.OwnTierBytes += own * y.chunkBytes[y.index[n.Group]]
	})
	if !c.loadedAt.IsZero() && t.production != nil {
		ready := t.doneAt
		if c.begunAt.After(ready) {
			ready = c.begunAt
		}
		y.pulls = append(y.pulls, max(0, c.loadedAt.Sub(ready)))
	}
	if progress != nil {
		progress(r.Hits + r.Recomputed)
	}
}

// note keeps a sentence that came without a recompute.
func (y *tally) note(cause, text string) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.detail(cause, text)
}

func (y *tally) detail(cause, text string) {
	if text == "" {
		return
	}
	r := &y.sum
	for i := range r.Details {
		if d := &r.Details[i]; d.Cause == cause && d.Text == text {
			d.Count++
			return
		}
	}
	if len(r.Details) == detailsMax {
		r.DetailsLeftOut++
		return
	}
	r.Details = append(r.Details, Detail{cause, text, 1})
}

// no counts a request that a daemon refused.
func (y *tally) no(r *refusal) {
	if r == nil {
		return
	}
	if y.refused[r.side]++; y.refused[r.side] == 1 {
		y.refusals = append(y.refusals, r)
	}
}

// refusedAll returns a daemon's answer when it refused every request: nothing was
// replayed then.
func (y *tally) refusedAll() error {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, r := range y.refusals {
		if y.refused[r.side] == y.requests {
			return fmt.Errorf("every request was refused: %w", r)
		}
	}
	return nil
}

func (y *tally) each(counts []*enginepb.GroupCount, f func(*GroupReport, *enginepb.GroupCount)) {
	for _, n := range counts {
		if i, ok := y.index[n.Group]; ok {
			f(&y.sum.Groups[i], n)
		}
	}
}

func (y *tally) report(took time.Duration) *Report {
	y.mu.Lock()
	defer y.mu.Unlock()
	r := &y.sum
	r.Seconds, r.Pulls, r.RequestsLeft = took.Seconds(), len(y.pulls), y.requests-r.Requests
	slices.Sort(y.pulls)
	r.PullMS = Quantiles{P50: quantile(y.pulls, 0.5), P99: quantile(y.pulls, 0.99), Max: quantile(y.pulls, 1)}
	return r
}

// quantile returns the smallest of the sorted durations that at least the share q of
// them does not exceed, in milliseconds; 0 when there is none.
func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := max(int(math.Ceil(q*float64(len(sorted))))-1, 0)
	return float64(sorted[i]) / float64(time.Millisecond)
}

// WriteTable prints the report for a reader.
func (r *Report) WriteTable(w io.Writer) error {
	of := ""
	if r.RequestsLeft > 0 {
		of = fmt.Sprintf(" of %d", r.Requests+r.RequestsLeft)
	}
	fmt.Fprintf(w, "leg %s: %d%s requests in %.1f s: %d hits, %d recomputed, %d wrong bytes\n",
		r.Leg, r.Requests, of, r.Seconds, r.Hits, r.Recomputed, r.WrongBytes)
	fmt.Fprintf(w, "from node %s (%s) to node %s (%s)\n", r.Producer.ID, r.Producer.Socket, r.Consumer.ID, r.Consumer.Socket)
	fmt.Fprintf(w, "from the consumer's own tier %s, pulled %s%s\n", size(float64(r.OwnTierBytes)), size(float64(r.Bytes)), r.pace())
	fmt.Fprintf(w, "found in the engines' own blocks: %d tokens at the producer, %d at the consumer\n\n",
		r.NativeTokens.Producer, r.NativeTokens.Consumer)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "group\tsupplied\tdemanded =\town tier +\ttransferred +\tunmatched\t")
	for _, g := range r.Groups {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t\n", g.Name, g.Supplied, g.Demanded, g.OwnTier, g.Transferred, g.Unmatched)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	writeCounts(w, "recomputed requests by cause: ", r.RecomputedCauses)
	writeCounts(w, "chunks that could not be had, by cause: ", r.FailedChunks)
	for _, d := range r.Details {
		fmt.Fprintf(w, "  %d x %s: %s\n", d.Count, d.Cause, strings.ReplaceAll(d.Text, "\n", "\n  "))
	}
	if r.DetailsLeftOut > 0 {
		fmt.Fprintf(w, "  and %d other sentences\n", r.DetailsLeftOut)
	}
	if n := r.RecomputedCauses[CauseGone]; n > 0 {
		fmt.Fprintf(w, "\n%s recomputed because the consumer's daemon was gone\n", requestsWere(n))
	}
	if r.RequestsLeft > 0 {
		fmt.Fprintf(w, "\nthe replay was stopped: %s not played to the end\n", requestsWere(r.RequestsLeft))
	}
	return nil
}

func requestsWere(n int) string {
	if n == 1 {
		return "1 request was"
	}
	return fmt.Sprintf("%d requests were", n)
}

// pace says how fast the pulls were.
func (r *Report) pace() string {
	if r.Pulls == 0 || r.Seconds <= 0 {
		return ""
	}
	p99 := ""
	if r.Pulls >= p99Pulls {
		p99 = fmt.Sprintf("%.1f ms (p99), ", r.PullMS.P99)
	}
	return fmt.Sprintf(" (%s/s); a pull took %.1f ms (median), %s%.1f ms (longest)", size(float64(r.Bytes)/r.Seconds), r.PullMS.P50, p99, r.PullMS.Max)
}

// size prints a number of bytes with three figures or so.
func size(bytes float64) string {
	switch {
	case bytes >= 1e9:
		return fmt.Sprintf("%.2f GB", bytes/1e9)
	case bytes >= 1e6:
		return fmt.Sprintf("%.1f MB", bytes/1e6)
	case bytes >= 1e3:
		return fmt.Sprintf("%.1f kB", bytes/1e3)
	}
	return fmt.Sprintf("%.0f B", bytes)
}

func writeCounts(w io.Writer, title string, counts map[string]int) {
	if len(counts) == 0 {
		return
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, counts[k]))
	}
	fmt.Fprintln(w, "\n"+title+strings.Join(parts, ", "))
}
