package faults

import (
	"fmt"
	"regexp"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/daemontest"
)

var legs = []string{"probe", "pd", "demand"}

// A scenario does something to source a while requests come, and returns when it is over.
type scenario struct {
	name   string
	bounds bounds
	legs   []string // nil is all
	// after is how long the traffic goes on after the heal; 0 is the usual time.
	after time.Duration
	// deadline of the requests; 0 is the usual one.
	deadline time.Duration
	play     func(c *cluster, p *play, f *fault)
}

const (
	// quietTime is how long the traffic without a fault lasts, before is that before a
	// fault, after that behind the heal.
	quietTime, quietSlice = 8 * time.Second, 3 * time.Second
	beforeFault           = 1500 * time.Millisecond
	afterHeal             = 3500 * time.Millisecond
)

// quiet plays traffic without a fault and demands that everything hits.
func (c *cluster) quiet(leg string, how time.Duration) []*record {
	c.t.Helper()
	p := c.play(leg, 0)
	time.Sleep(how)
	records := p.stop()
	hits := 0
	for _, r := range records {
		require.NoError(c.t, r.err)
		if r.out.Hit {
			hits++
		} else {
			c.t.Logf("%s: %s: %s", r.id, r.out.Cause, r.out.Detail)
		}
		require.Zero(c.t, r.out.WrongBytes)
	}
	took, _ := healthy(records, time.Time{})
	c.t.Logf("%s, no fault: %d of %d hit; of source b p50 %s, p99 %s, max %s ms; load %s", leg, hits, len(records), ms(took.at(.5)), ms(took.at(.99)), ms(took.max()), load())
	require.Equal(c.t, len(records), hits, "without a fault everything hits")
	return records
}

// suffer plays a scenario with the traffic of a leg.
func (c *cluster) suffer(s *scenario, leg string, quiet []*record) *row {
	c.t.Helper()
	c.idle()
	p := c.play(leg, s.deadline)
	time.Sleep(beforeFault)
	f := &fault{at: time.Now()}
	s.play(c, p, f)
	if f.healed.IsZero() {
		f.healed = time.Now()
	}
	rest := s.after
	if rest == 0 {
		rest = afterHeal
	}
	time.Sleep(time.Until(f.healed.Add(rest)))
	r := judge(s.name, leg, s.bounds, f, p.stop(), quiet)
	r.Leaks = c.leaked()
	if t := c.t; testing.Verbose() {
		causes := map[string]int{}
		for _, q := range p.records {
			if q.source == "a" && !q.out.Hit {
				causes[q.out.Cause+": "+q.out.Detail]++
			}
			if q.source == "b" && !q.out.Hit {
				t.Logf("healthy %s: %v: %s: %s", q.id, q.err, q.out.Cause, q.out.Detail)
			}
		}
		t.Logf("causes of recomputes that name a: %v", causes)
	}
	return r
}

// detect waits until the consumer no longer takes a for ready.
func (c *cluster) detect(f *fault) {
	c.t.Helper()
	await(c.t, "a found silent", func() bool { s := c.c.peer("a").State; return s != "ready" && s != "connecting" })
	f.detected = time.Now()
}

// freeze stops a's daemon for so long, counted from the fault.
func freeze(long time.Duration) func(*cluster, *play, *fault) {
	return func(c *cluster, _ *play, f *fault) {
		c.a.signal(syscall.SIGSTOP)
		f.at = time.Now()
		c.detect(f)
		c.thaw(f, long)
	}
}

// thaw lets a go on when it has been frozen for so long.
func (c *cluster) thaw(f *fault, long time.Duration) {
	time.Sleep(time.Until(f.at.Add(long)))
	c.a.signal(syscall.SIGCONT)
	f.healed = time.Now()
}

// killAndRestart kills a and, after a while, starts it again at the same address. Its
// engine comes back with it.
func killAndRestart(c *cluster, _ *play, f *fault) {
	c.a.kill()
	f.at = time.Now()
	c.detect(f)
	c.back(f, 2*time.Second)
}

// back starts a again, when it has been away for so long, and its engine.
func (c *cluster) back(f *fault, long time.Duration) {
	c.t.Helper()
	c.sources["a"].detach()
	time.Sleep(time.Until(f.at.Add(long)))
	f.healed = time.Now() // a start counts as recovery, too
	c.a.start()
	require.NoError(c.t, c.sources["a"].attach())
}

// flap freezes a again and again, each time just long enough to be found silent.
func flap(c *cluster, _ *play, f *fault) {
	const times, off, on = 5, time.Second, 400 * time.Millisecond
	f.at = time.Now()
	for i := range times {
		c.a.signal(syscall.SIGSTOP)
		time.Sleep(time.Until(f.at.Add(off + time.Duration(i)*(off+on))))
		c.a.signal(syscall.SIGCONT)
		f.healed = time.Now()
		time.Sleep(time.Until(f.at.Add(time.Duration(i+1) * (off + on))))
	}
	f.detected = f.healed // now and then
}

// stopAndRestart asks a to end, as in a rolling upgrade, and starts it again.
func stopAndRestart(c *cluster, _ *play, f *fault) {
	c.a.signal(syscall.SIGTERM)
	f.at = time.Now()
	<-c.a.Exited
	f.note = fmt.Sprintf("it ended after %s ms", ms(time.Since(f.at)))
	c.detect(f)
	c.back(f, 2*time.Second)
}

// remove takes a out of the consumer's configuration and kills it. Later both come back.
func remove(c *cluster, _ *play, f *fault) {
	c.c.reload(peer{"b", c.b.control})
	f.at = time.Now()
	await(c.t, "a removed", func() bool { return c.c.peer("a").ID == "" || !c.c.peer("a").Configured })
	f.detected = time.Now()
	c.a.kill()
	time.Sleep(time.Until(f.at.Add(time.Second)))
	c.c.reload(peer{"a", c.a.control}, peer{"b", c.b.control})
	c.back(f, 2*time.Second)
}

// replace kills a and starts another process of its name at a new address, which the
// consumer then is told.
func replace(c *cluster, _ *play, f *fault) {
	c.a.kill()
	f.at = time.Now()
	c.detect(f)
	c.a.control = daemontest.FreeAddress(c.t)
	c.sources["a"].detach()
	time.Sleep(time.Until(f.at.Add(time.Second)))
	f.healed = time.Now()
	c.a.start()
	require.NoError(c.t, c.sources["a"].attach())
	c.c.reload(peer{"a", c.a.control}, peer{"b", c.b.control})
}

// scenarios that one cluster bears one after the other.
func scenarios() []scenario {
	return []scenario{
		{name: "freeze 30 s", bounds: frozen, play: freeze(30 * time.Second)},
		{name: "freeze in hello", bounds: frozen, play: freezeHello},
		{name: "freeze in lookup", bounds: frozen, legs: []string{"probe"}, play: freezeLookup},
		{name: "freeze in demand", bounds: frozen, legs: []string{"pd", "demand"}, play: freezeDemand},
		{name: "freeze in mid-transfer", bounds: frozen, play: freezeTransfer},
		{name: "freeze 1 s, five times", bounds: bounds{max: frozen.max, recovered: frozen.recovered}, play: flap},
		{name: "kill, restart", bounds: killed, play: killAndRestart},
		{name: "stop, restart", bounds: killed, play: stopAndRestart},
		{name: "remove", bounds: killed, play: remove},
		{name: "replace at a new address", bounds: killed, play: replace},
	}
}

// TestSlice is the part of the cases that make test plays.
func TestSlice(t *testing.T) {
	if *full {
		t.Skip("-full plays it as a part of TestFaults")
	}
	if testing.Short() {
		t.Skip("starts real processes")
	}
	c := newCluster(t, func(c *cluster) { c.a.parked, c.b.parked = 2*time.Second, 2*time.Second })
	quiet := c.quiet("pd", quietSlice)
	for _, s := range []scenario{
		{name: "freeze 2.5 s", bounds: frozen, after: 2500 * time.Millisecond, play: freeze(2500 * time.Millisecond)},
		{name: "kill, restart", bounds: killed, after: 2500 * time.Millisecond, play: killAndRestart},
	} {
		settle(t, c.suffer(&s, "pd", quiet))
	}
}

// TestFaults plays every scenario in every leg, each leg on clusters of its own.
func TestFaults(t *testing.T) {
	if !*full {
		t.Skip("make test-faults plays it")
	}
	for _, leg := range legs {
		t.Run(leg, func(t *testing.T) {
			playAll(t, leg, scenarios(), func() *cluster { return newCluster(t, nil) })
		})
		t.Run(leg+" behind a relay", func(t *testing.T) {
			var r relay
			playAll(t, leg, relayScenarios(&r), func() *cluster { return relayed(t, &r) })
		})
	}
}

// playAll plays the chosen scenarios of a leg on one cluster.
func playAll(t *testing.T, leg string, all []scenario, start func() *cluster) {
	var c *cluster
	var quiet []*record
	for i := range all {
		s := &all[i]
		if s.legs != nil && !slices.Contains(s.legs, leg) || !chosen(s.name) {
			continue
		}
		if c == nil {
			c = start()
			quiet = c.quiet(leg, quietTime)
		}
		settle(t, c.suffer(s, leg, quiet))
	}
}

// chosen says whether -only names a case.
func chosen(name string) bool { return regexp.MustCompile(*only).MatchString(name) }
