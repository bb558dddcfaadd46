package replay

import (
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
	// Requests = Hits + Recomputed.
	Requests   int `json:"requests"`
	Hits       int `json:"hits"`
	Recomputed int `json:"recomputed"`
	// WrongBytes counts bytes that attention would have read and that were not right.
	WrongBytes uint64 `json:"wrong_bytes"`
	// Bytes that the consumer's daemon pulled.
	Bytes   uint64  `json:"bytes"`
	Seconds float64 `json:"seconds"`
	// PullMS is how long the consumer waited, in milliseconds: from the moment that
	// both sides were ready (the producer had finished, the consumer had begun) until
	// the bytes were in its blocks.
	PullMS Quantiles `json:"pull_ms"`
	// Groups in deployment order, in chunks.
	Groups []GroupReport `json:"groups"`
	// RecomputedCauses counts the recomputed requests by their cause.
	RecomputedCauses map[string]int `json:"recomputed_causes"`
	// FailedChunks counts the chunks that daemons could not deliver, by cause.
	FailedChunks map[string]int `json:"failed_chunks"`
	// NativeTokens is how much of the prompts the engines' own blocks still held.
	NativeTokens NativeReport `json:"native_tokens"`
	// Details are the first sentences that daemons gave with a recompute.
	Details []string `json:"details,omitempty"`
}

// Quantiles of a duration in milliseconds.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// GroupReport counts the chunks of one group over all requests.
type GroupReport struct {
	Name string `json:"name"`
	// Demanded by the consumer from its peer, Supplied by the producer, Transferred
	// whole, Unmatched: demanded, and the producer's last word does not have it.
	Demanded    uint64 `json:"demanded"`
	Supplied    uint64 `json:"supplied"`
	Transferred uint64 `json:"transferred"`
	Unmatched   uint64 `json:"unmatched"`
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

// detailsMax bounds Report.Details: the first few tell the story.
const detailsMax = 8

// A tally adds up what became of each request.
type tally struct {
	mu    sync.Mutex
	sum   Report
	index map[string]int
	pulls []time.Duration
}

func newTally(groups []group, requests int) *tally {
	y := &tally{index: map[string]int{}}
	y.sum = Report{Requests: requests, RecomputedCauses: map[string]int{}, FailedChunks: map[string]int{}}
	for i := range groups {
		y.index[groups[i].name] = i
		y.sum.Groups = append(y.sum.Groups, GroupReport{Name: groups[i].name})
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
	if t.produceErr != nil {
		y.detail("producer", t.produceErr.Error())
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
		g.Demanded += n.Demanded
		g.Transferred += n.Transferred
		g.Unmatched += n.Unmatched
		r.Bytes += n.Bytes
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
	r := &y.sum
	line := cause + ": " + text
	if text != "" && len(r.Details) < detailsMax && !slices.Contains(r.Details, line) {
		r.Details = append(r.Details, line)
	}
}

func (y *tally) each(counts []*enginepb.GroupCount, f func(*GroupReport, *enginepb.GroupCount)) {
	for _, n := range counts {
		if i, ok := y.index[n.Group]; ok {
			f(&y.sum.Groups[i], n)
		}
	}
}

func (y *tally) report(leg string, took time.Duration) *Report {
	r := &y.sum
	r.Leg, r.Seconds = leg, took.Seconds()
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
	perSecond := 0.0
	if r.Seconds > 0 {
		perSecond = float64(r.Bytes) / r.Seconds / 1e9
	}
	fmt.Fprintf(w, "leg %s: %d requests in %.1f s: %d hits, %d recomputed, %d wrong bytes\n",
		r.Leg, r.Requests, r.Seconds, r.Hits, r.Recomputed, r.WrongBytes)
	fmt.Fprintf(w, "pulled %.2f GB (%.2f GB/s); a pull took %.1f ms (median), %.1f ms (p99), %.1f ms (longest)\n",
		float64(r.Bytes)/1e9, perSecond, r.PullMS.P50, r.PullMS.P99, r.PullMS.Max)
	fmt.Fprintf(w, "found in the engines' own blocks: %d tokens at the producer, %d at the consumer\n\n",
		r.NativeTokens.Producer, r.NativeTokens.Consumer)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "group\tdemanded\tsupplied\ttransferred\tunmatched\t")
	for _, g := range r.Groups {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t\n", g.Name, g.Demanded, g.Supplied, g.Transferred, g.Unmatched)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	writeCounts(w, "recomputed requests by cause: ", r.RecomputedCauses)
	writeCounts(w, "chunks that did not arrive, by cause: ", r.FailedChunks)
	for _, d := range r.Details {
		fmt.Fprintln(w, "  "+strings.ReplaceAll(d, "\n", "\n  "))
	}
	return nil
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
