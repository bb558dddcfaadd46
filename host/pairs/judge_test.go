package pairs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

// A bench is a Judge whose fetches and checks the test answers.
type bench struct {
	*Judge
	t *testing.T

	mu      sync.Mutex
	allowed map[string][2]bool
	told    map[string][]Finding
	kept    map[Version]*registry.Verdict

	fetches atomic.Int64 // begun
	most    atomic.Int64 // at a time
	now     atomic.Int64
	bring   func(ctx context.Context, peer string) error
	verdict func(ctx context.Context) (*registry.Verdict, error)
	drawErr error
}

const hereFile, thereFile = "here.yaml", "there"

func newBench(t *testing.T) *bench {
	d, err := deploy.Parse(hereFile, []byte("model: m\nmax_tokens: 8\ngroups: [{name: full, rule: full, block_tokens: 4, layers: 1, kv_heads: 1, head_dim: 1, dtype: fp8}]"))
	require.NoError(t, err)
	b := &bench{t: t, allowed: map[string][2]bool{}, told: map[string][]Finding{}, kept: map[Version]*registry.Verdict{}}
	b.Judge = New(Options{
		Shelf: &Shelf{own: &bundle{name: hereFile, deployment: d}}, StateDir: "/state", FetchWithin: 30 * time.Second, CheckWithin: 10 * time.Minute,
		Allow: func(peer string, _ Version, take, give bool, why string) {
			if give != (why == "") {
				t.Errorf("%s: give is %v, and the reason is %q", peer, give, why)
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.allowed[peer] = [2]bool{take, give}
		},
		Tell: func(peer string, f Finding) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.told[peer] = append(b.told[peer], f)
		},
	})
	b.Judge.gather = func(ctx context.Context, peer string, v Version) (*bundle, error) {
		b.fetches.Add(1)
		if n := b.now.Add(1); n > b.most.Load() {
			b.most.Store(n)
		}
		defer b.now.Add(-1)
		if b.bring != nil {
			if err := b.bring(ctx, peer); err != nil {
				return nil, err
			}
		}
		return &bundle{}, nil
	}
	b.Judge.check = func(ctx context.Context, _ *bundle, progress func(done, total int)) (*registry.Verdict, error) {
		return b.verdict(ctx)
	}
	b.Judge.kept = func(v Version) *registry.Verdict { b.mu.Lock(); defer b.mu.Unlock(); return b.kept[v] }
	b.Judge.keep = func(v Version, out *registry.Verdict) { b.mu.Lock(); defer b.mu.Unlock(); b.kept[v] = out }
	b.Judge.draw = func(v Version, _ *registry.Verdict) (string, error) {
		return fmt.Sprintf("/state/pairs/%x.txt", v.Rules[:1]), b.drawErr
	}
	b.verdict = func(context.Context) (*registry.Verdict, error) { return verdictOf(nil, nil), nil }
	return b
}

func (b *bench) may(peer string) [2]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.allowed[peer]
}

func (b *bench) tells(peer string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.told[peer])
}

var (
	neither, both = [2]bool{}, [2]bool{true, true}
)

// verdictOf is a verdict whose ways have these counterexamples: with this node as the
// producer, and as the consumer.
func verdictOf(give, take *check.Counterexample) *registry.Verdict {
	v := &registry.Verdict{Verdict: registry.Accepted, Cases: 7, Against: &registry.Side{File: thereFile},
		Ways: []check.Way{{Producer: hereFile, Consumer: thereFile, Counterexample: give}, {Producer: thereFile, Consumer: hereFile, Counterexample: take}}}
	if give != nil || take != nil {
		v.Verdict = registry.Refused
	}
	return v
}

func version(n byte) Version {
	return Version{Rules: digest{n}, Deployment: digest{n, 1}, MaxTokens: 8}
}

// TestUntilTheVerdict: a check that takes long leaves leg probe, waits for nobody's sake,
// and says how far it is; its verdict allows every leg to every peer of the version, at
// once, and to those that come later.
func TestUntilTheVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		done := make(chan struct{})
		b.verdict = func(ctx context.Context) (*registry.Verdict, error) { <-done; return verdictOf(nil, nil), nil }
		require.Equal(t, alike(None), b.Of("p"))
		b.Up("p", version(1), 1, false)
		b.Up("q", version(1), 1, false)
		synctest.Wait()
		time.Sleep(5 * time.Minute)
		f := b.Of("p")
		require.Equal(t, Checking, f.State)
		require.Equal(t, "the pair of the two versions is being checked: the check runs", f.Why)
		require.False(t, f.Take || f.Give)
		require.Equal(t, neither, b.may("q"))
		require.Zero(t, b.tells("p"))
		close(done)
		synctest.Wait()
		require.Equal(t, both, b.may("p"))
		require.Equal(t, both, b.may("q"))
		require.EqualValues(t, 1, b.fetches.Load(), "one version, one check")
		require.Equal(t, 1, b.tells("p"))
		b.Up("r", version(1), 1, false)
		require.Equal(t, both, b.may("r"))
		b.Up("s", version(9), 1, true)
		require.Equal(t, Equal, b.Of("s").State)
		require.True(t, b.Of("s").Take)
		require.EqualValues(t, 1, b.Ended(Accepted))
	})
}

// TestEachWayByItself: the way that has a counterexample is not allowed, and the other is.
func TestEachWayByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		b.verdict = func(context.Context) (*registry.Verdict, error) {
			return verdictOf(nil, &check.Counterexample{PromptTokens: 21, Group: "full", Why: "the chunk\nis not there"}), nil
		}
		b.Up("p", version(1), 1, false)
		synctest.Wait()
		f := b.Of("p")
		require.Equal(t, Refused, f.State)
		require.Equal(t, [2]string{Refused, Accepted}, [2]string{f.TakeState, f.GiveState})
		require.Equal(t, "the pair of the two versions is refused with this node as the consumer: prompts of 21 tokens, group full: the chunk is not there", f.Why)
		require.Equal(t, [2]bool{false, true}, b.may("p"))
		require.Equal(t, "the pair of the two versions is refused: prompts of 21 tokens, group full: the chunk is not there", f.TakeNot)
		require.Equal(t, "/state/pairs/01.txt", f.File)
		require.Empty(t, f.FileNot)
		require.EqualValues(t, 1, b.Ended(Refused))
		b.Retry()
		synctest.Wait()
		require.EqualValues(t, 1, b.fetches.Load(), "a refusal is a verdict")

		b.verdict = func(context.Context) (*registry.Verdict, error) {
			v := verdictOf(nil, nil)
			v.Ways = v.Ways[:1] // the peer's deployment has no producer
			return v, nil
		}
		b.Up("p", version(2), 2, false)
		synctest.Wait()
		require.Equal(t, Accepted, b.Of("p").State)
		require.Equal(t, [2]bool{false, true}, b.may("p"))
		require.Equal(t, "the roles of the two deployments leave no such way", b.Of("p").TakeNot)
		require.Equal(t, [2]string{None, Accepted}, [2]string{b.Of("p").TakeState, b.Of("p").GiveState})

		b.verdict = func(context.Context) (*registry.Verdict, error) {
			v := verdictOf(&check.Counterexample{}, nil)
			v.Ways[1].Undecided = true // the time did for one only
			return v, nil
		}
		b.Up("p", version(3), 3, false)
		synctest.Wait()
		require.Equal(t, [2]string{Undecided, Refused}, [2]string{b.Of("p").TakeState, b.Of("p").GiveState})

		b.drawErr = fmt.Errorf("as if: %w", &fs.PathError{Op: "write", Path: "/state/pairs/.new-17", Err: syscall.ENOSPC})
		b.Up("p", version(4), 4, false)
		synctest.Wait()
		require.Empty(t, b.Of("p").File, "it is not there")
		require.Equal(t, "/state/pairs/04.txt: no space left on device", b.Of("p").FileNot)
	})
}

// TestKept: a verdict that was kept needs neither fetch nor check, and a refused one does
// not, either.
func TestKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		v := verdictOf(nil, nil)
		v.Reused = true
		b.kept[version(1)] = v
		b.Up("p", version(1), 1, false)
		synctest.Wait()
		require.Equal(t, both, b.may("p"))
		require.True(t, b.Of("p").Kept)
		b.kept[version(2)] = verdictOf(&check.Counterexample{}, nil)
		b.Up("p", version(2), 1, false)
		require.Equal(t, neither, b.may("p"), "what was allowed to another version is not")
		synctest.Wait()
		require.Equal(t, [2]bool{true, false}, b.may("p"))
		require.Zero(t, b.fetches.Load())
	})
}

// TestSlowPeers: peers that never answer cost their deadline, hold up nobody's caller, and
// their version is undecided, with the reason. Another peer of the version is asked before.
func TestSlowPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		b.bring = func(ctx context.Context, peer string) error {
			if peer == "good" {
				return nil
			}
			<-ctx.Done()
			return &unavailable{why: context.Cause(ctx).Error(), passing: true}
		}
		began := time.Now()
		for n := range byte(2 * fetchesMax) {
			b.Up(fmt.Sprint("slow", n), version(n), 1, false)
		}
		b.Up("good", version(0), 1, false)
		require.Zero(t, time.Since(began))
		time.Sleep(30*time.Second - 1)
		synctest.Wait()
		require.EqualValues(t, fetchesMax, b.now.Load())
		require.Equal(t, Checking, b.Of("slow1").State)
		time.Sleep(60 * time.Second)
		synctest.Wait()
		require.EqualValues(t, fetchesMax, b.most.Load())
		f := b.Of("slow1")
		require.Equal(t, Undecided, f.State)
		require.Equal(t, "the pair of the two versions is undecided: slow1: it did not come within deadlines.pair_fetch_ms, 30s; it is tried again after a pause of 1m0s", f.Why)
		require.Equal(t, neither, b.may("slow1"))
		require.Equal(t, Accepted, b.Of("slow0").State, "another peer of that version had it")
		require.Zero(t, b.now.Load())
	})
}

// TestTries: what failed by the way to the peer is tried again with its sessions, a few
// times for each of its processes, and at a reload; what failed by itself at a reload only.
func TestTries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		passing := true
		b.bring = func(context.Context, string) error { return &unavailable{why: "no", passing: passing} }
		up := func(boot uint64, times int, fetches int) {
			t.Helper()
			for range times {
				b.Up("p", version(1), boot, false)
				synctest.Wait()
			}
			require.EqualValues(t, fetches, b.fetches.Load())
			require.Equal(t, Undecided, b.Of("p").State)
		}
		up(1, 9, triesMax)
		up(2, 9, 2*triesMax)
		b.Retry()
		synctest.Wait()
		require.EqualValues(t, 2*triesMax+1, b.fetches.Load())
		passing = false
		up(3, 9, 2*triesMax+2)
		b.Up("q", version(1), 1, false)
		synctest.Wait()
		require.EqualValues(t, 2*triesMax+3, b.fetches.Load(), "another peer of the version")
		b.Gone("q")
		b.Retry()
		synctest.Wait()
		require.EqualValues(t, 2*triesMax+4, b.fetches.Load())
		b.bring = func(context.Context, string) error { return always("never") }
		up(4, 9, 2*triesMax+5)
		up(5, 9, 2*triesMax+5)
		b.bring = nil
		b.Retry()
		synctest.Wait()
		require.Equal(t, both, b.may("p"))
		b.Retry()
		synctest.Wait()
		require.EqualValues(t, 2*triesMax+6, b.fetches.Load(), "what is decided stays")
	})
}

// TestBudget: a check that is not done in its time is undecided, and the next one may run.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		var at, most int
		b.verdict = func(ctx context.Context) (*registry.Verdict, error) {
			at++
			most = max(most, at)
			defer func() { at-- }()
			<-ctx.Done()
			if errors.Is(context.Cause(ctx), check.ErrBudget) {
				return &registry.Verdict{Verdict: registry.Undecided, Undecided: check.ErrBudget.Error()}, nil
			}
			return nil, ctx.Err()
		}
		b.Up("p", version(1), 1, false)
		b.Up("q", version(2), 1, false)
		time.Sleep(20*time.Minute + 1)
		synctest.Wait()
		for _, peer := range []string{"p", "q"} {
			require.Equal(t, "the pair of the two versions is undecided: the check was not done within deadlines.pair_check_ms, 10m0s", b.Of(peer).Why)
		}
		require.Equal(t, 1, most, "one check at a time")
		b.Up("p", version(1), 2, false)
		synctest.Wait()
		require.Equal(t, Undecided, b.Of("p").State, "the same check would take as long again")
		require.EqualValues(t, 2, b.Ended(Undecided))
		require.Empty(t, b.kept)
	})
}

// TestFetchedIsBounded: while one check takes long, what others have fetched and keep until
// their turn is bounded, however many versions come; their turns come all the same.
func TestFetchedIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		done := make(chan struct{})
		b.verdict = func(context.Context) (*registry.Verdict, error) { <-done; return verdictOf(nil, nil), nil }
		const versions = 100
		for n := range byte(versions) {
			b.Up(fmt.Sprint("p", n), version(n), 1, false)
		}
		synctest.Wait()
		require.EqualValues(t, checksMax+fetchesMax, b.fetches.Load())
		for n := range versions / 2 {
			b.Gone(fmt.Sprint("p", n))
		}
		synctest.Wait()
		close(done)
		synctest.Wait()
		for n := versions / 2; n < versions; n++ {
			require.Equal(t, both, b.may(fmt.Sprint("p", n)))
		}
	})
}

// TestGone: what only peers need that are gone, or that have another version now, is given
// up; and Close ends and waits for the rest.
func TestGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		var running atomic.Int64
		b.verdict = func(ctx context.Context) (*registry.Verdict, error) {
			running.Add(1)
			defer running.Add(-1)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		b.Up("p", version(1), 1, false)
		b.Up("q", version(1), 1, false)
		synctest.Wait()
		b.Gone("p")
		synctest.Wait()
		require.EqualValues(t, 1, running.Load(), "q has that version")
		require.Equal(t, None, b.Of("p").State)
		b.Up("q", version(2), 2, false)
		synctest.Wait()
		require.EqualValues(t, 1, running.Load(), "and now another one")
		require.EqualValues(t, 2, b.fetches.Load())
		require.Zero(t, b.tells("q"))
		b.Up("q", version(2), 2, true)
		synctest.Wait()
		require.Zero(t, running.Load())
		b.Up("p", version(3), 1, false)
		synctest.Wait()
		require.EqualValues(t, 1, running.Load())
		b.Close()
		require.Zero(t, running.Load())
		b.Up("p", version(4), 1, false)
		b.Retry()
		b.Gone("p")
		require.Zero(t, b.tells("p"))
	})
}

// TestVersionsForgotten: a peer that comes with one version after the other does not fill
// the memory.
func TestVersionsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		for n := range byte(2 * versionsMax) {
			b.Up("p", version(n), uint64(n), false)
			synctest.Wait()
			require.Equal(t, both, b.may("p"))
		}
		require.LessOrEqual(t, len(b.versions), versionsMax+1)
		_, last := b.versions[version(2*versionsMax-2)]
		_, first := b.versions[version(0)]
		require.True(t, last)
		require.False(t, first)
	})
}

// TestChangedMeanwhile: what would begin an undecided version again, and comes while it is
// still in work, begins it again at its end.
func TestChangedMeanwhile(t *testing.T) {
	var none error
	noWay := &unavailable{why: "no way", passing: true}
	for name, c := range map[string]struct {
		first  error // of p's first fetch
		change func(b *bench)
		other  bool // q is asked after p
		want   string
		asked  int64
	}{
		"nothing":                         {noWay, func(*bench) {}, false, Undecided, 1},
		"a reload":                        {always("not here"), func(b *bench) { b.Retry() }, false, Accepted, 2},
		"a session, before another fails": {noWay, func(b *bench) { b.Up("p", version(1), 1, false) }, true, Accepted, 3},
		"bytes, before another fails":     {noWay, func(b *bench) { b.Heard("p") }, true, Accepted, 3},
		"a process, before another fails": {&unavailable{why: "changed"}, func(b *bench) { b.Up("p", version(1), 2, false) }, true, Accepted, 3},
		"bytes of one that gives nothing": {&unavailable{why: "changed"}, func(b *bench) { b.Heard("p") }, true, Undecided, 2},
		"it is gone":                      {noWay, func(b *bench) { b.Up("p", version(1), 1, false); b.Gone("p") }, true, Undecided, 2},
		"no need":                         {none, func(b *bench) { b.Up("p", version(1), 2, false); b.Retry() }, false, Accepted, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				defer b.Close()
				last := "p"
				if c.other {
					last = "q"
				}
				times := map[string]int{}
				changed := make(chan struct{})
				b.bring = func(_ context.Context, peer string) error {
					times[peer]++
					n := times[peer]
					if peer == last && n == 1 {
						<-changed
					}
					switch {
					case peer == "q":
						return &unavailable{why: "not given"}
					case n == 1:
						return c.first
					}
					return nil
				}
				b.Up("p", version(1), 1, false)
				if c.other {
					b.Up("q", version(1), 1, false)
				}
				synctest.Wait()
				c.change(b)
				close(changed)
				synctest.Wait()
				of := "p"
				if b.Of("p").State == None {
					of = "q"
				}
				require.Equal(t, c.want, b.Of(of).State)
				require.Equal(t, c.asked, b.fetches.Load())
				require.NotContains(t, b.Of(of).Why, "no peer that has these rules", "the reason is that of the peers")
			})
		})
	}
}

// TestTriedAgainAfterAPause: a peer that was too slow and whose session goes on is asked again
// after pauses that double to an hour, which the reason names; not one that does not give what
// it should, nor for a version that nobody has any more, nor after the Judge's end. What its
// sessions bring is tried at once all the same.
func TestTriedAgainAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		slow := &unavailable{why: "slow", passing: true}
		var fail error = slow
		b.bring = func(context.Context, string) error { b.mu.Lock(); defer b.mu.Unlock(); return fail }
		from := func(err error) { b.mu.Lock(); defer b.mu.Unlock(); fail = err }
		asked := int64(0)
		more := func(n int64, why string) {
			t.Helper()
			synctest.Wait()
			require.Equal(t, asked+n, b.fetches.Load(), why)
			asked += n
		}
		b.Up("p", version(1), 1, false)
		more(1, "at once")
		for n, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60} {
			pause *= time.Minute
			f := b.Of("p")
			require.Equal(t, Undecided, f.State)
			require.Equal(t, fmt.Sprintf("the pair of the two versions is undecided: p: slow; it is tried again after a pause of %v", pause), f.Why)
			require.Equal(t, f.Why, f.TakeNot)
			require.Equal(t, f.Why, f.GiveNot)
			require.Equal(t, n+1, b.tells("p"))
			b.mu.Lock()
			told := b.told["p"][n]
			b.mu.Unlock()
			require.Equal(t, f, told)
			time.Sleep(pause - 1)
			more(0, "in the pause")
			time.Sleep(time.Nanosecond)
			more(1, "after it")
		}
		for n := range 9 {
			b.Heard("p")
			if n < triesMax-1 { // the first try was at the beginning of its session
				more(1, "it was silent for a while")
			}
			more(0, "as often as without pauses")
		}
		time.Sleep(time.Hour)
		more(1, "the last pause began with the last try")
		b.Up("p", version(1), 2, false)
		more(1, "another process")
		require.Contains(t, b.Of("p").Why, "after a pause of 1m0s")
		b.Gone("p")
		time.Sleep(24 * time.Hour)
		more(0, "nobody has the version")
		b.Up("p", version(1), 2, false)
		more(1, "it is back")
		from(&unavailable{why: "changed"})
		time.Sleep(24 * time.Hour)
		more(1, "once, and what it gives is not what it should be")
		require.Equal(t, "the pair of the two versions is undecided: p: changed", b.Of("p").Why)
		from(always("never"))
		b.Retry()
		time.Sleep(24 * time.Hour)
		more(1, "every peer would have the same to say")

		from(slow)
		b.Retry()
		more(1, "a reload")
		from(nil)
		time.Sleep(time.Minute)
		more(1, "it has become faster")
		require.Equal(t, both, b.may("p"))
		time.Sleep(24 * time.Hour)
		more(0, "what is decided stays")

		from(slow)
		b.Up("q", version(2), 1, false)
		more(1, "at once")
		b.Close()
		time.Sleep(24 * time.Hour)
		more(0, "the Judge is closed")
	})
}

// TestHeardAgain: a peer that was silent for a while has no new session, and what failed by
// its silence is tried again all the same, as often as with sessions.
func TestHeardAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.Close()
		b.Heard("p")
		b.bring = func(context.Context, string) error { return &unavailable{why: "silence", passing: true} }
		b.Up("p", version(1), 1, false)
		synctest.Wait()
		for range 9 {
			b.Heard("p")
			synctest.Wait()
		}
		require.EqualValues(t, triesMax, b.fetches.Load())
		b.bring = nil
		b.Up("p", version(1), 2, false)
		synctest.Wait()
		require.Equal(t, both, b.may("p"))
		b.Up("q", version(2), 2, true)
		b.Heard("p")
		b.Heard("q")
		synctest.Wait()
		require.EqualValues(t, triesMax+1, b.fetches.Load(), "what is decided stays")
	})
}
