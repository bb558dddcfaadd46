package faults

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/replay"
)

// engineEnv makes the test's own program an engine: its value is an engineJob, as JSON.
const engineEnv = "TIERD_FAULTS_ENGINE"

// An engineJob is one request of an engine in a process of its own, which stops when it has
// computed so many tokens.
type engineJob struct {
	Socket  string
	ID, Leg string
	Tokens  uint64
}

func engineProcess(job string) int {
	err := func() error {
		var j engineJob
		if err := json.Unmarshal([]byte(job), &j); err != nil {
			return err
		}
		e, err := replay.AttachEngine(context.Background(), "an engine", j.Socket, []replay.Request{*middle()}, 1, callLimit)
		if err != nil {
			return err
		}
		return e.Produce(context.Background(), &replay.Turn{ID: j.ID, Salt: j.ID, Leg: j.Leg, Peer: "c", Request: middle(), Step: func(computed uint64) error {
			if computed >= j.Tokens {
				fmt.Println("computed")
				select {}
			}
			return nil
		}})
	}()
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// middle is a request of four steps of 2048 tokens.
func middle() *replay.Request {
	r := &replay.Request{PromptTokens: 8192}
	for i := range uint64(16) {
		r.IDs = append(r.IDs, 1<<41+i)
	}
	return r
}

const (
	// wordBound is what "one round trip after the producer's last word" may take here: the
	// round trip, two engine sockets, and the scheduling of five processes.
	wordBound = 10 * time.Millisecond
	// wordMax is what a single one may take of that on a machine that is shared.
	wordMax = 100 * time.Millisecond
	// killBound is what a kernel may take in addition to let go of a process that is killed,
	// with the memory that it has mapped, before it closes its connections.
	killBound = 50 * time.Millisecond
)

// demoGroups of the deployment: one of sliding windows, one of full attention.
const demoGroups = 2

// A wordRow is what came of requests whose end is a word, not a silence.
type wordRow struct {
	Case, Leg string
	// Bound of the median, and of the slowest.
	Bound, BoundMax time.Duration
	// Since says what Took counts from.
	Since  string
	Took   times
	Causes map[string]int
	Named  int // chunks named, with their groups
	Groups map[string]bool
	// Before counts requests that ended before the producer's engine did.
	Before int
	Left   []string
	Failed []string
}

func (r *wordRow) fail(format string, args ...any) {
	r.Failed = append(r.Failed, fmt.Sprintf(format, args...))
}

// took adds one request that is a recompute with a cause.
func (r *wordRow) took(d time.Duration, out *replay.Outcome) {
	r.Took = append(r.Took, max(0, d))
	r.Causes[cmp.Or(out.Cause, "hit")]++
	groups := map[string]bool{}
	for _, f := range out.Failed {
		if f.Group == "" || f.Detail == "" {
			r.fail("a failure does not name its group and reason: %v", f)
		}
		r.Named++
		r.Groups[f.Group], groups[f.Group] = true, true
	}
	if (out.Cause == "unmatched" || out.Cause == "no-room") && len(groups) != demoGroups {
		r.fail("chunks of %d groups are named; all %d miss some", len(groups), demoGroups)
	}
	if out.WrongBytes > 0 {
		r.fail("%d wrong bytes", out.WrongBytes)
	}
}

// asking is a consumer's request that waits for its producer.
type asking struct {
	turn replay.Turn
	out  *replay.Outcome
	err  error
	done chan struct{}
}

func (a *asking) end() time.Time { return a.out.Began.Add(a.out.Took) }

// ask begins a request of the producer at a node, and waits until its demand is there.
func (c *cluster) ask(n *node, id, leg string) *asking {
	c.t.Helper()
	a := &asking{turn: replay.Turn{ID: id, Salt: id, Leg: leg, Peer: n.id, Request: middle(), Deadline: deadline}, done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.out, a.err = c.engine.Consume(context.Background(), &a.turn)
	}()
	await(c.t, "a demand at "+n.id, func() bool { return n.peer("c").Serves > 0 })
	return a
}

// answered waits for the end of a request.
func (c *cluster) answered(a *asking) *replay.Outcome {
	c.t.Helper()
	<-a.done
	require.NoError(c.t, a.err)
	return a.out
}

// produce is the producer's side of a request.
func (c *cluster) produce(n *node, turn replay.Turn, step func(computed uint64) error) error {
	turn.Peer, turn.Step = "c", step
	return c.sources[n.id].engine.Load().Produce(context.Background(), &turn)
}

var errStop = errors.New("the engine stops")

// A wording is one way in which a producer has less than was asked for.
type wording struct {
	name, since string
	legs        []string
	play        func(c *cluster, r *wordRow, id, leg string)
	// bound of the median and of the slowest; 0 is wordBound and wordMax.
	bound time.Duration
	// rounds at most; 0 is as many as the others.
	rounds int
}

var wordings = []wording{
	{name: "producer out of room (row 4)", since: "its last word", legs: []string{"pd"}, play: func(c *cluster, r *wordRow, id, leg string) {
		a := c.ask(c.a, id, leg)
		var last time.Time
		require.Error(c.t, c.produce(c.a, a.turn, func(uint64) error { last = time.Now(); return nil }))
		out := c.answered(a)
		r.took(a.end().Sub(last), out)
		if out.Cause != "no-room" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "producer out of room (row 4)", since: "its second step", legs: []string{"demand"}, play: func(c *cluster, r *wordRow, id, leg string) {
		a := c.ask(c.a, id, leg)
		var second time.Time
		_ = c.produce(c.a, a.turn, func(computed uint64) error {
			if computed == 2*2048 {
				second = time.Now()
				select {
				case <-a.done:
					r.Before++
				case <-time.After(2 * time.Second):
				}
			}
			return nil
		})
		out := c.answered(a)
		r.took(a.end().Sub(second), out)
		if out.Cause != "no-room" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "producer holds nothing (row 8)", since: "its abort", legs: []string{"pd"}, play: func(c *cluster, r *wordRow, id, leg string) {
		a := c.ask(c.b, id, leg)
		var stop time.Time
		require.ErrorIs(c.t, c.produce(c.b, a.turn, func(uint64) error { stop = time.Now(); return errStop }), errStop)
		out := c.answered(a)
		r.took(a.end().Sub(stop), out)
		if out.Cause != "unmatched" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "producer holds nothing (row 8)", since: "its begin, of another prompt", legs: []string{"demand"}, play: func(c *cluster, r *wordRow, id, leg string) {
		a := c.ask(c.b, id, leg)
		other := a.turn
		other.Salt += "another prompt"
		began := time.Now()
		require.ErrorIs(c.t, c.produce(c.b, other, func(uint64) error {
			select {
			case <-a.done:
				r.Before++
			case <-time.After(2 * time.Second):
			}
			return errStop
		}), errStop)
		out := c.answered(a)
		r.took(a.end().Sub(began), out)
		if out.Cause != "unmatched" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "producer holds nothing (row 8)", since: "begin", legs: []string{"probe"}, play: func(c *cluster, r *wordRow, id, leg string) {
		turn := replay.Turn{ID: id, Salt: id, Leg: leg, Peer: "b", Request: middle(), Deadline: deadline}
		out, err := c.engine.Consume(context.Background(), &turn)
		require.NoError(c.t, err)
		r.took(out.Took, out)
		if out.Cause != replay.CauseNothingPlanned {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "demand after the last word", since: "begin", legs: []string{"pd", "demand"}, play: func(c *cluster, r *wordRow, id, leg string) {
		turn := replay.Turn{ID: id, Salt: id, Leg: leg, Peer: "b", Request: middle(), Deadline: deadline}
		require.ErrorIs(c.t, c.produce(c.b, turn, func(computed uint64) error {
			if computed >= 2048 {
				return errStop
			}
			return nil
		}), errStop)
		out, err := c.engine.Consume(context.Background(), &turn)
		require.NoError(c.t, err)
		r.took(out.Took, out)
		if out.Cause != "unmatched" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "producer aborts in the middle", since: "its abort", legs: []string{"pd", "demand"}, play: func(c *cluster, r *wordRow, id, leg string) {
		a := c.ask(c.b, id, leg)
		var stop time.Time
		require.ErrorIs(c.t, c.produce(c.b, a.turn, func(computed uint64) error {
			if computed < 2*2048 {
				return nil
			}
			stop = time.Now()
			return errStop
		}), errStop)
		out := c.answered(a)
		r.took(a.end().Sub(stop), out)
		if out.Cause != "unmatched" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "consumer aborts while it waits", since: "its abort, until the producer has let go", legs: []string{"pd", "demand"}, play: func(c *cluster, r *wordRow, id, leg string) {
		turn := replay.Turn{ID: id, Salt: id, Leg: leg, Peer: "b", Request: middle(), Deadline: deadline}
		require.NoError(c.t, c.engine.Abandon(context.Background(), &turn, 50*time.Millisecond))
		stop := time.Now()
		await(c.t, "the demand forgotten", func() bool { return c.b.peer("c").Serves == 0 })
		r.Took = append(r.Took, time.Since(stop))
		r.Causes["aborted"]++
		require.NoError(c.t, c.produce(c.b, turn, nil), "and the producer goes on")
	}},
	{name: "consumer aborts in mid-transfer", since: "its abort, until the producer has let go", legs: []string{"pd", "demand", "probe"}, play: func(c *cluster, r *wordRow, id, leg string) {
		turn := replay.Turn{ID: id, Salt: id, Leg: leg, Peer: "b", Request: long(), Deadline: deadline}
		require.NoError(c.t, c.produce(c.b, turn, nil))
		require.NoError(c.t, c.engine.Abandon(context.Background(), &turn, time.Millisecond))
		stop := time.Now()
		await(c.t, "the demand forgotten", func() bool { return c.b.peer("c").Serves == 0 })
		r.Took = append(r.Took, time.Since(stop))
		r.Causes["aborted"]++
	}},
	{name: "engine killed in mid-store", since: "its kill", legs: []string{"pd", "demand"}, bound: killBound, play: func(c *cluster, r *wordRow, id, leg string) {
		a := c.ask(c.b, id, leg)
		killed := c.killEngine(engineJob{Socket: c.b.socket(), ID: id, Leg: leg, Tokens: 2 * 2048})
		out := c.answered(a)
		r.took(a.end().Sub(killed), out)
		if out.Cause != "unmatched" {
			r.fail("cause %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "engine killed in mid-store", since: "begin", legs: []string{"probe"}, play: func(c *cluster, r *wordRow, id, leg string) {
		turn := replay.Turn{ID: id, Salt: id, Leg: leg, Peer: "b", Request: middle(), Deadline: deadline}
		c.killEngine(engineJob{Socket: c.b.socket(), ID: id, Leg: leg, Tokens: 3 * 2048})
		out, err := c.engine.Consume(context.Background(), &turn)
		require.NoError(c.t, err)
		r.took(out.Took, out)
		if !out.Hit { // the tail at 4096 is aligned, and complete
			r.fail("what was stored is of no use: %s: %s", out.Cause, out.Detail)
		}
	}},
	{name: "consumer killed in mid-transfer", since: "its end, until the producer has let go", legs: []string{"pd", "demand", "probe"}, rounds: 3, play: func(c *cluster, r *wordRow, id, leg string) {
		c.met(r, id, func(id string) (time.Duration, *replay.Outcome) {
			done := c.transferring(id, leg)
			c.c.kill()
			stop := time.Now() // its kernel closes its connections last
			await(c.t, "the demand forgotten", func() bool { return c.b.peer("c").Serves == 0 })
			took := time.Since(stop)
			out := <-done
			c.c.start()
			c.attach()
			c.joined()
			return took, out
		})
	}},
	{name: "consumer frozen in mid-transfer", since: "its freeze, until the producer has let go", legs: []string{"pd", "demand", "probe"}, rounds: 3, bound: time.Second, play: func(c *cluster, r *wordRow, id, leg string) {
		c.met(r, id, func(id string) (time.Duration, *replay.Outcome) {
			done := c.transferring(id, leg)
			stop := time.Now()
			c.c.signal(syscall.SIGSTOP)
			await(c.t, "the demand forgotten", func() bool { return c.b.peer("c").Serves == 0 })
			took := time.Since(stop)
			time.Sleep(shortFreeze)
			c.c.signal(syscall.SIGCONT)
			out := <-done
			c.joined()
			return took, out
		})
	}},
}

// met plays something in the middle of a transfer until it is met there: one that hits was
// over before.
func (c *cluster) met(r *wordRow, id string, play func(id string) (time.Duration, *replay.Outcome)) {
	c.t.Helper()
	const tries = 10
	for i := range tries {
		took, out := play(fmt.Sprintf("%s-%d", id, i))
		if out.WrongBytes > 0 {
			r.fail("%d wrong bytes", out.WrongBytes)
		}
		if out.Hit {
			continue
		}
		r.Took = append(r.Took, took)
		r.Causes[out.Cause]++
		return
	}
	r.fail("in %d tries every transfer was over before", tries)
}

// transferring begins a long request that b has computed, and returns while its bytes are
// on their way. The channel brings what becomes of it.
func (c *cluster) transferring(id, leg string) <-chan *replay.Outcome {
	c.t.Helper()
	turn := replay.Turn{ID: id, Salt: id, Leg: leg, Peer: "b", Request: long(), Deadline: deadline}
	require.NoError(c.t, c.produce(c.b, turn, nil))
	done := make(chan *replay.Outcome, 1)
	go func() {
		out, err := c.engine.Consume(context.Background(), &turn)
		if err != nil {
			out = &replay.Outcome{Cause: err.Error()}
		}
		done <- out
	}()
	for c.b.peer("c").Serves == 0 && len(done) == 0 {
	}
	return done
}

// killEngine kills an engine in the middle of a request, and returns when.
func (c *cluster) killEngine(j engineJob) time.Time {
	c.t.Helper()
	job, err := json.Marshal(j)
	require.NoError(c.t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), engineEnv+"="+string(job))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "computed\n" {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		c.t.Fatalf("the engine's process said %q: %v", line, err)
	}
	killed := time.Now()
	require.NoError(c.t, cmd.Process.Kill())
	_ = cmd.Wait()
	return killed
}

// TestWords: whoever knows that something will not come says so, and what was waited for
// ends with it: a producer without room, one that holds nothing, aborts on either side, and
// an engine that is killed.
func TestWords(t *testing.T) {
	if testing.Short() {
		t.Skip("starts real processes")
	}
	rounds := 3
	if *full {
		rounds = 20
	}
	c := newCluster(t, func(c *cluster) {
		c.a.slab = 1 << 20 // 16 slots: less than a step
		c.a.parked, c.b.parked = time.Second, time.Second
	})
	for k, w := range wordings {
		for _, leg := range w.legs {
			if !chosen(w.name) || !*full && w.rounds > 0 && leg != w.legs[0] {
				continue
			}
			c.idle()
			r := &wordRow{Case: w.name, Leg: leg, Since: w.since, Bound: cmp.Or(w.bound, wordBound), BoundMax: cmp.Or(w.bound, wordMax),
				Causes: map[string]int{}, Groups: map[string]bool{}}
			rounds := rounds
			if w.rounds > 0 {
				if rounds = min(rounds, w.rounds); !*full {
					rounds = 1 // these take seconds
				}
			}
			for i := range rounds {
				w.play(c, r, fmt.Sprintf("%s-%d-%d", leg, k, i), leg)
			}
			r.Left = c.leaked()
			slices.Sort(r.Took)
			r.check(rounds)
			results.say(r)
			t.Logf("%s", r.line())
			for _, f := range r.Failed {
				t.Errorf("%s, %s: %s", r.Case, r.Leg, f)
			}
		}
	}
}

// check says what does not hold.
func (r *wordRow) check(rounds int) {
	if p50 := r.Took.at(.5); p50 > 2*r.Bound {
		r.fail("the median is %v after %s; the bound is %v", p50, r.Since, r.Bound)
	}
	if m := r.Took.max(); m > 2*r.BoundMax {
		r.fail("one took %v after %s; the bound is %v", m, r.Since, r.BoundMax)
	}
	if len(r.Left) > 0 {
		r.fail("left: %s", strings.Join(r.Left, "; "))
	}
	if r.beforeMatters() && r.Before < rounds {
		r.fail("%d of %d were told before the producer's engine finished", r.Before, rounds)
	}
}

// beforeMatters: a refusal is told before the producer finishes.
func (r *wordRow) beforeMatters() bool { return r.Leg == "demand" && strings.Contains(r.Case, "row") }

func (r *wordRow) line() string {
	var causes []string
	for c, n := range r.Causes {
		causes = append(causes, fmt.Sprintf("%s %d", c, n))
	}
	slices.Sort(causes)
	groups := 0
	for range r.Groups {
		groups++
	}
	before := "-"
	if r.beforeMatters() {
		before = share(r.Before, len(r.Took))
	}
	return fmt.Sprintf("| %s | %s | %d | %s | %d in %d | %s | %s | %s | %s | %s |\n", r.Case, r.Leg, len(r.Took), strings.Join(causes, ", "), r.Named, groups, before,
		r.Since, missed(r.Took.at(.5), r.Bound), missed(r.Took.max(), r.BoundMax), cmp.Or(strings.Join(r.Left, "; "), "0"))
}

const wordHeader = `
## Words: what will not come is said

| case | leg | requests | ended as | chunks named, in groups | told before the producer finished | counted from | p50 | max | left |
| --- | --- | --: | --- | --: | --: | --- | --: | --: | --- |
`

func (p *report) say(r *wordRow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.words = append(p.words, r)
}

func (p *report) wordTable() string {
	var b strings.Builder
	b.WriteString(wordHeader)
	for _, r := range p.words {
		b.WriteString(r.line())
	}
	return b.String()
}
