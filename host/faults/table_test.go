package faults

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A fault is when what happened to source a.
type fault struct {
	at, detected, healed time.Time
	// note says how the case is known to have met what it is about.
	note string
}

// bounds of a case; 0 is none.
type bounds struct {
	// max of the requests that name the faulted source, p50 of those begun after the
	// detection, recovered until 95 % of the pulls hit.
	max, p50, recovered time.Duration
}

// The bounds that must hold.
var (
	frozen = bounds{max: time.Second, p50: 5 * time.Millisecond, recovered: 2 * time.Second}
	killed = bounds{max: 100 * time.Millisecond, p50: 5 * time.Millisecond, recovered: 2 * time.Second}
)

// healthyFactor is how much longer requests that name the healthy source may take, at
// their 99th percentile, than without a fault.
const healthyFactor = 2

// healthyFloor is below every wait for a peer. What takes less than that and more than
// without a fault did not wait for the faulted source: it is other work on the machine.
const healthyFloor = 400 * time.Millisecond

// recoveredShare of the pulls must hit for a source to have recovered.
const recoveredShare = 0.95

// times are durations, sorted.
type times []time.Duration

func (t times) at(q float64) time.Duration {
	if len(t) == 0 {
		return 0
	}
	return t[min(len(t)-1, int(q*float64(len(t))))]
}

func (t times) max() time.Duration { return t.at(1) }

func sorted(t times) times { slices.Sort(t); return t }

// A row is what one case came to in one leg.
type row struct {
	Case, Leg string
	Bounds    bounds
	Note      string
	// Faulted requests named the faulted source; After of them began when it was detected.
	Faulted, After int
	P50, Max       time.Duration
	Detected       time.Duration
	Healthy        int
	HealthyHits    int
	P99, HealthMax time.Duration
	// Of the same session without a fault.
	QuietP99, QuietMax time.Duration
	// Pulls that the healed source had computed: of those of the first two seconds and of
	// the later ones, how many hit; Recovered is after which time 95 % do, FirstHit that of
	// the first.
	Early, EarlyHits, Later, LaterHits int
	FirstHit, Recovered                time.Duration
	NoResult                           int
	WrongBytes                         uint64
	Leaks                              []string
	// Failed says what was asserted and did not hold.
	Failed []string
}

// healthy are the times of the requests that name b and were in work at a time or later.
func healthy(records []*record, since time.Time) (t times, hits int) {
	for _, r := range records {
		if r.source == "b" && !r.end().Before(since) {
			t = append(t, r.out.Took)
			if r.out.Hit {
				hits++
			}
		}
	}
	return sorted(t), hits
}

// judge turns records into a row.
func judge(name, leg string, b bounds, f *fault, records, quiet []*record) *row {
	r := &row{Case: name, Leg: leg, Bounds: b, Note: f.note, Detected: f.detected.Sub(f.at)}
	var all, after times
	for _, q := range records {
		if q.err != nil || !q.out.Hit && q.out.Cause == "" {
			r.NoResult++
			continue
		}
		r.WrongBytes += q.out.WrongBytes
		if q.source == "a" && q.end().After(f.at) && q.out.Began.Before(f.healed) {
			from := q.out.Began
			if from.Before(f.at) {
				from = f.at
			}
			all = append(all, q.end().Sub(from))
			if !q.out.Began.Before(f.detected) {
				after = append(after, q.out.Took)
			}
		}
	}
	r.Faulted, r.Max = len(all), sorted(all).max()
	r.After, r.P50 = len(after), sorted(after).at(.5)
	took, hits := healthy(records, f.at)
	r.Healthy, r.HealthyHits, r.P99, r.HealthMax = len(took), hits, took.at(.99), took.max()
	took, _ = healthy(quiet, time.Time{})
	r.QuietP99, r.QuietMax = took.at(.99), took.max()
	r.recovery(f, records)
	return r
}

// recovery judges what came after the heal.
func (r *row) recovery(f *fault, records []*record) {
	const window = 2 * time.Second
	var pulls []*record
	for _, q := range records {
		if q.source == "a" && q.stored && q.err == nil && !q.out.Began.Before(f.healed) {
			pulls = append(pulls, q)
		}
	}
	hits := 0
	for _, q := range pulls {
		after := q.out.Began.Sub(f.healed)
		if q.out.Hit {
			hits++
			if r.FirstHit == 0 {
				r.FirstHit = after
			}
		}
		if after < window {
			r.Early++
			if q.out.Hit {
				r.EarlyHits++
			}
		} else {
			r.Later++
			if q.out.Hit {
				r.LaterHits++
			}
		}
	}
	for _, q := range pulls { // the first from which on enough hit
		if float64(hits) >= recoveredShare*float64(len(pulls)) && hits > 0 {
			r.Recovered = max(r.Recovered, r.FirstHit)
			return
		}
		r.Recovered = q.out.Began.Sub(f.healed)
		if len(pulls) > 0 && q.out.Hit {
			hits--
		}
		pulls = pulls[1:]
	}
	r.Recovered = time.Hour // never
}

// check says what does not hold: counts exactly, times at twice their bound.
func (r *row) check() {
	fail := func(bad bool, format string, args ...any) {
		if bad {
			r.Failed = append(r.Failed, fmt.Sprintf(format, args...))
		}
	}
	b := r.Bounds
	fail(r.NoResult > 0, "%d requests have no result", r.NoResult)
	fail(r.WrongBytes > 0, "%d wrong bytes", r.WrongBytes)
	fail(r.HealthyHits < r.Healthy, "of %d requests that name the healthy source %d hit", r.Healthy, r.HealthyHits)
	fail(r.Healthy == 0 || r.Faulted == 0, "%d requests name the faulted source, %d the healthy one", r.Faulted, r.Healthy)
	fail(len(r.Leaks) > 0, "left: %s", strings.Join(r.Leaks, "; "))
	fail(b.max > 0 && r.Max > 2*b.max, "a request that names the faulted source took %v; the bound is %v", r.Max, b.max)
	fail(b.p50 > 0 && r.After == 0, "no request began after the detection")
	// Where a wait has a limit of its own, as a lookup has, max does not say how long it took.
	found := max(b.max, frozen.max)
	fail(b.p50 > 0 && r.Detected > 2*found, "it was detected after %v; the bound is %v", r.Detected, found)
	fail(b.p50 > 0 && r.P50 > 2*b.p50, "the median after the detection is %v; the bound is %v", r.P50, b.p50)
	fail(b.recovered > 0 && r.Recovered > 2*b.recovered, "95 %% of the pulls hit from %v after the heal on; the bound is %v", r.Recovered, b.recovered)
	fail(r.P99 > max(2*healthyFactor*r.QuietP99, healthyFloor), "p99 of the healthy source is %v, and %v without a fault", r.P99, r.QuietP99)
}

func ms(d time.Duration) string {
	switch m := float64(d) / float64(time.Millisecond); {
	case m < 10:
		return fmt.Sprintf("%.1f", m)
	default:
		return fmt.Sprintf("%.0f", m)
	}
}

// missed marks a time above its bound.
func missed(d, bound time.Duration) string {
	if bound > 0 && d > bound {
		return ms(d) + " (!)"
	}
	return ms(d)
}

func share(n, of int) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%d/%d", n, of)
}

const header = `| case | leg | faulted: requests | max | p50 after detection | detected | healthy: hits | p99 | max | quiet p99 | quiet max | hits in 2 s | first hit | 95 % from | hits later | no result | wrong bytes | left |
| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --- |
`

func (r *row) line() string {
	cells := []string{r.Case, r.Leg, fmt.Sprint(r.Faulted), missed(r.Max, r.Bounds.max), missed(r.P50, r.Bounds.p50), ms(r.Detected),
		share(r.HealthyHits, r.Healthy), missed(r.P99, healthyFactor*r.QuietP99), ms(r.HealthMax), ms(r.QuietP99), ms(r.QuietMax),
		share(r.EarlyHits, r.Early), ms(r.FirstHit), missed(r.Recovered, r.Bounds.recovered), share(r.LaterHits, r.Later),
		fmt.Sprint(r.NoResult), fmt.Sprint(r.WrongBytes), cmp.Or(strings.Join(r.Leaks, "; "), "0")}
	if r.After == 0 {
		cells[4], cells[5] = "-", "-"
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}

// A report collects the rows.
type report struct {
	mu    sync.Mutex
	rows  []*row
	words []*wordRow
	// skipped are cases that this machine cannot play, and why.
	skipped []string
	began   time.Time
}

func (p *report) add(r *row) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rows = append(p.rows, r)
}

func (p *report) skip(why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.skipped = append(p.skipped, why)
}

// settle checks a row, shows it, keeps it and fails the test when it is not as it must be.
func settle(t *testing.T, r *row) {
	t.Helper()
	r.check()
	results.add(r)
	t.Logf("%s", r.line())
	if r.Note != "" {
		t.Logf("%s", r.Note)
	}
	for _, f := range r.Failed {
		t.Errorf("%s, %s: %s", r.Case, r.Leg, f)
	}
}

func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(b))[:3], " ")
}

func machine() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	kernel, _, _ := bytes.Cut(u.Release[:], []byte{0})
	model := "unknown processor"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
				model = strings.TrimSpace(v)
				break
			}
		}
	}
	return fmt.Sprintf("%d cores of %s, Linux %s, %s", runtime.NumCPU(), model, kernel, runtime.Version())
}

const intro = `# Real faults

Two sources, a and b, and a consumer, c, are three processes of the real daemon; make
test-faults plays these cases and writes this file. Requests of the real trace (prompts of
%d to %d tokens) begin at %d a second, whether or not those before have ended, and name a and b
in turn. Something happens to a. Every byte that reaches the consumer's engine is compared with
what its key says that it must be. The doc comment of package host/faults tells how.

Machine: %s; load average %s. Deployment: that of examples/demo with 2 KV
heads, a chunk of full attention is 64 KiB. Supply that nobody asks for waits 3 s here instead of
60; everything else has its default. Times in milliseconds; (!) marks what misses its bound, and
the run fails at twice a bound.

## Faults of a source

`

const legend = `
- faulted: requests that name a and were in work between the fault and the heal. max counts from
  the fault, or from the request's begin when that was later; its bound is 1000 for a freeze
  and for a black hole, 100 when the process is gone, and the limit of the wait, which is the
  only thing that ends it, plus 100 when a source lives and does not answer (a lookup has 500 ms,
  those demands had 1000). With 90 % of the packets lost a byte still comes now and then: until
  it does not for 750 ms, only a request's own deadline is promised (5 s here); marked above half.
- p50 after detection: of requests begun when the consumer called a suspect or dead; bound 5.
  "detected" is how long that took. A source that lives is never detected: there all count.
- healthy: all requests that name b, from the fault to the end of the case, 3.5 s after the heal
  (a process that starts again takes from the same cores). All must hit. The p99 may be twice that of the same traffic without a fault (quiet).
- hits in 2 s: pulls begun in the first two seconds after the heal, whose source had computed the
  request; "95 % from" is from when on 95 % of all pulls after the heal hit, and not before
  the first that did; bound 2000. A heal is
  the moment of the thaw, of the new process's start, or at which the network carries again. A
  restarted source is empty: its engine must attach and store first, which is in the time.
- left: pins, slots in state writing, requests, waits, parked supply, and goroutines and
  descriptors above those before the case, on any node, after at most 20 s.
`

// write writes the table as Markdown.
func (p *report) write(path string) error {
	if path == "" {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, intro, promptMin, promptMax, rate, machine(), p.loads())
	b.WriteString(header)
	for _, r := range p.rows {
		b.WriteString(r.line())
	}
	b.WriteString(legend)
	b.WriteString("\n## How a case is known to have met its phase\n\n")
	for _, r := range p.rows {
		if r.Note != "" {
			fmt.Fprintf(&b, "- %s, %s: %s.\n", r.Case, r.Leg, r.Note)
		}
	}
	b.WriteString(p.wordTable())
	if len(p.skipped) > 0 {
		b.WriteString("\n## Not played\n\n")
		for _, s := range p.skipped {
			fmt.Fprintf(&b, "- %s.\n", s)
		}
	}
	b.WriteString("\n## What did not hold\n\n")
	bad := 0
	for _, r := range p.rows {
		for _, f := range r.Failed {
			fmt.Fprintf(&b, "- %s, %s: %s.\n", r.Case, r.Leg, f)
			bad++
		}
	}
	for _, r := range p.words {
		for _, f := range r.Failed {
			fmt.Fprintf(&b, "- %s, %s: %s.\n", r.Case, r.Leg, f)
			bad++
		}
	}
	if bad == 0 {
		b.WriteString("Nothing.\n")
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func (p *report) loads() string {
	if p.began.IsZero() {
		return load()
	}
	return fmt.Sprintf("%s at the end, after %.0f minutes", load(), time.Since(p.began).Minutes())
}
