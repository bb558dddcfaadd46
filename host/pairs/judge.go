package pairs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
)

// States of a pair, as metrics and status name them.
const (
	None      = "none"      // no session yet
	Equal     = "equal"     // nothing to judge
	Checking  = "checking"  // leg probe only until the verdict
	Accepted  = "accepted"  // every way that there is
	Refused   = "refused"   // a way at least
	Undecided = "undecided" // leg probe only; Finding.Why says why
)

// States returns all of them.
func States() []string { return []string{None, Equal, Checking, Accepted, Refused, Undecided} }

// A Finding is what is known of the pair with a peer.
type Finding struct {
	State string
	// TakeState and GiveState are the states of the two directions, of this node as the
	// consumer and as the producer: None also for one that the roles leave no way for.
	TakeState, GiveState string
	// Take allows this node to demand of the peer in every leg, and Give the peer to demand
	// here; TakeNot and GiveNot say, in one line each, why not.
	Take, Give       bool
	TakeNot, GiveNot string
	// Why is the state in one line; empty for None and Equal.
	Why string
	// File has the whole counterexample of a refusal; when it could not be kept, File is empty
	// and FileNot says where it was to be, and why it is not.
	File, FileNot string
	// Kept says that the verdict was kept from before.
	Kept bool
	// Deployment and Rules are the peer's digests.
	Deployment, Rules string
}

// alike is the finding of a pair whose directions are in one state.
func alike(state string) Finding {
	return Finding{State: state, TakeState: state, GiveState: state}
}

// Options of New. All are needed but Log, LocalDir and Tell.
type Options struct {
	Shelf *Shelf
	// StateDir keeps verdicts and fetched modules; LocalDir is the operator's directory.
	StateDir, LocalDir string
	// CompiledDir has the compiled code of this node's own modules.
	CompiledDir string
	// Command starts a process that calls [Serve] with its standard input and output. Empty
	// means that checks run in this process, beside everything else that it does.
	Command []string
	// FetchWithin bounds what is fetched from one peer, all together, and CheckWithin one
	// check, the loading of its rules included.
	FetchWithin, CheckWithin time.Duration
	// Seed draws the cases, as that of a deployment's own check does.
	Seed uint64
	// Fetch brings bytes from a peer; see wire.Peers.Fetch. It ends with ctx.
	Fetch func(ctx context.Context, peer string, id [32]byte, bytesMax int) ([]byte, error)
	// Allow tells the peer's session what it may do as long as it is of the version. It must
	// not block, nor call the Judge.
	Allow func(peer string, v Version, take, give bool, why string)
	// Tell is called with each verdict, or with what is undecided, for each peer that has the
	// version, from any goroutine.
	Tell func(peer string, f Finding)
	Log  *slog.Logger
}

// A Judge knows what the pair with each peer came to, and finds out. Its methods may be
// called from any goroutine, and wait for nothing but each other.
type Judge struct {
	o        Options
	gather   func(ctx context.Context, peer string, v Version) (*bundle, error)
	check    func(ctx context.Context, there *bundle, progress func(done, total int)) (*registry.Verdict, error)
	kept     func(v Version) *registry.Verdict
	keep     func(v Version, verdict *registry.Verdict)
	draw     func(v Version, verdict *registry.Verdict) (path string, err error) // of a refusal
	life     context.Context
	end      context.CancelFunc
	wg       sync.WaitGroup
	fetching chan struct{} // one entry for each that fetches, or waits with what it has fetched
	checking chan struct{}

	mu       sync.Mutex
	closed   bool
	peers    map[string]*standing
	versions map[Version]*inquiry
	counts   map[string]uint64 // inquiries ended, by state
}

// standing is what a peer runs by.
type standing struct {
	version Version
	boot    uint64
	equal   bool
}

// An inquiry is one version, and what was found of it. The Judge's lock guards it.
type inquiry struct {
	version Version
	peers   map[string]bool // that have it
	cancel  context.CancelFunc
	running bool
	finding Finding
	settled bool            // another peer or session would change nothing
	failed  map[string]bool // peers that do not give what they should
	asked   map[string]bool // peers that were asked, since it runs
	again   map[string]bool // peers that were asked, and have another way or process now
	retry   bool            // Retry came, since it runs
	tries   int             // since a peer or process of one was new, without those after a pause
	pauses  int             // since then, too
	pause   *time.Timer     // to the next try; nil = none
	seq     uint64          // rises with the time at which it ended

	doing   atomic.Pointer[string] // while it runs
	percent atomic.Int64
}

// New returns a Judge that knows nobody. Close it.
func New(o Options) *Judge {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Tell == nil {
		o.Tell = func(string, Finding) {}
	}
	j := &Judge{o: o, fetching: make(chan struct{}, fetchesMax), checking: make(chan struct{}, checksMax),
		peers: map[string]*standing{}, versions: map[Version]*inquiry{}, counts: map[string]uint64{}}
	j.life, j.end = context.WithCancel(context.Background())
	g := &gatherer{shelf: o.Shelf, local: newLocalDir(o.LocalDir), fetch: o.Fetch,
		cache: &moduleCache{dir: filepath.Join(o.StateDir, "fetched"), bytesMax: cacheBytesMax, log: o.Log}}
	verdicts := &verdictDir{dir: verdictsIn(o.StateDir), log: o.Log}
	j.gather = g.gather
	j.check = func(ctx context.Context, there *bundle, progress func(done, total int)) (*registry.Verdict, error) {
		if len(o.Command) > 0 {
			return judgeApart(ctx, o.Command, &task{Here: o.Shelf.own.side(), There: there.side(), Checker: o.Shelf.checker, Seed: o.Seed,
				Within: o.CheckWithin, CompiledDir: o.CompiledDir}, progress)
		}
		return judge(ctx, o.Shelf.own, there, o.CompiledDir, registry.Options{Checker: o.Shelf.checker, Now: time.Now,
			Check: check.Options{Seed: o.Seed, Workers: 1, Progress: progress}}, o.Log)
	}
	j.kept = func(v Version) *registry.Verdict { return verdicts.load(keyOf(o.Shelf, o.Seed, v), o.Shelf, v) }
	j.keep = func(v Version, verdict *registry.Verdict) { verdicts.save(keyOf(o.Shelf, o.Seed, v), verdict) }
	j.draw = func(v Version, verdict *registry.Verdict) (string, error) {
		return verdicts.draw(keyOf(o.Shelf, o.Seed, v), verdict)
	}
	return j
}

// Close ends what is in work and waits for it.
func (j *Judge) Close() {
	j.mu.Lock()
	j.closed = true
	for _, q := range j.versions {
		q.wake()
	}
	j.mu.Unlock()
	j.end()
	j.wg.Wait()
}

// Up tells that a session with a peer began: what it runs by, which process it is, and
// whether that is equal to this node's.
func (j *Judge) Up(peer string, v Version, boot uint64, equal bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return
	}
	before := j.peers[peer]
	if before != nil && (before.version != v || before.equal != equal) {
		j.leaveLocked(peer)
	}
	j.peers[peer] = &standing{version: v, boot: boot, equal: equal}
	if equal {
		return
	}
	q := j.versions[v]
	switch {
	case q == nil:
		j.forgetLocked()
		q = &inquiry{version: v, peers: map[string]bool{}, failed: map[string]bool{}}
		j.versions[v] = q
		j.startLocked(q)
	case q.running || q.finding.State == Undecided && !q.settled:
		if before == nil || before.boot != boot || before.version != v {
			q.tries, q.pauses = 0, 0
			delete(q.failed, peer)
		}
		j.againLocked(q, peer)
	}
	q.peers[peer] = true
	j.allowLocked(peer, q)
}

// Heard tells that a peer with a session is heard again after a silence, with which a fetch
// from it has ended.
func (j *Judge) Heard(peer string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	p := j.peers[peer]
	if p == nil || p.equal || j.closed {
		return
	}
	if q := j.versions[p.version]; q.running || q.finding.State == Undecided && !q.settled {
		j.againLocked(q, peer)
		j.allowLocked(peer, q)
	}
}

// againLocked begins an inquiry again, now or at its end, because a peer may give now what it
// did not give before.
func (j *Judge) againLocked(q *inquiry, peer string) {
	switch {
	case q.failed[peer] || q.tries >= triesMax:
	case q.running && q.asked[peer]:
		q.again[peer] = true
	case q.running: // it is asked yet
	default:
		j.startLocked(q)
	}
}

// Gone tells that a peer is dead or no longer a peer. What only it needs is given up.
func (j *Judge) Gone(peer string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.leaveLocked(peer)
}

// Retry begins again with everything that is undecided, as after a reload.
func (j *Judge) Retry() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return
	}
	for v, q := range j.versions {
		switch {
		case q.running:
			q.retry = true
		case q.finding.State != Undecided:
		case len(q.peers) == 0:
			delete(j.versions, v)
		default:
			j.restartLocked(q)
			for peer := range q.peers {
				j.allowLocked(peer, q)
			}
		}
	}
}

// restartLocked begins an inquiry as if nothing was known of its version.
func (j *Judge) restartLocked(q *inquiry) {
	q.tries, q.pauses, q.settled = 0, 0, false
	clear(q.failed)
	j.startLocked(q)
}

// Of returns what is known of the pair with a peer.
func (j *Judge) Of(peer string) Finding {
	j.mu.Lock()
	defer j.mu.Unlock()
	p := j.peers[peer]
	switch {
	case p == nil:
		return alike(None)
	case p.equal:
		f := alike(Equal)
		f.Take, f.Give, f.Deployment, f.Rules = true, true, textOf(p.version.Deployment), textOf(p.version.Rules)
		return f
	}
	return j.versions[p.version].now()
}

// Ended returns how many inquiries have ended in a state, since the start.
func (j *Judge) Ended(state string) uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.counts[state]
}

// now is the finding with how far the work is.
func (q *inquiry) now() Finding {
	f := q.finding
	if !q.running {
		return f
	}
	f.Why = "the pair of the two versions is being checked"
	if doing := q.doing.Load(); doing != nil {
		f.Why += ": " + *doing
	}
	if p := q.percent.Load(); p > 0 {
		f.Why += fmt.Sprintf(", %d %%", p)
	}
	f.TakeNot, f.GiveNot = f.Why, f.Why
	return f
}

// leaveLocked takes a peer from its version.
func (j *Judge) leaveLocked(peer string) {
	p := j.peers[peer]
	if p == nil {
		return
	}
	delete(j.peers, peer)
	q := j.versions[p.version]
	if p.equal || q == nil {
		return
	}
	delete(q.peers, peer)
	delete(q.failed, peer)
	if len(q.peers) == 0 && q.running {
		q.cancel()
		delete(j.versions, p.version)
	}
}

// forgetLocked drops the oldest versions that nobody has.
func (j *Judge) forgetLocked() {
	var idle []*inquiry
	for _, q := range j.versions {
		if !q.running && len(q.peers) == 0 {
			idle = append(idle, q)
		}
	}
	slices.SortFunc(idle, func(a, b *inquiry) int { return int(int64(a.seq) - int64(b.seq)) })
	for i := 0; i < len(idle)-versionsMax; i++ {
		delete(j.versions, idle[i].version)
	}
}

func (j *Judge) allowLocked(peer string, q *inquiry) {
	f := q.now()
	j.o.Allow(peer, q.version, f.Take, f.Give, f.GiveNot)
}

// startLocked begins an inquiry.
func (j *Judge) startLocked(q *inquiry) {
	q.wake()
	ctx, cancel := context.WithCancel(j.life)
	q.cancel, q.running = cancel, true
	q.asked, q.again, q.retry = map[string]bool{}, map[string]bool{}, false
	q.tries++
	q.percent.Store(0)
	q.doing.Store(nil)
	q.finding = alike(Checking)
	q.finding.Deployment, q.finding.Rules = textOf(q.version.Deployment), textOf(q.version.Rules)
	j.wg.Go(func() {
		defer cancel()
		j.ended(ctx, q, j.find(ctx, q))
	})
}

// ended takes what an inquiry came to, unless nobody waits for it any more.
func (j *Judge) ended(ctx context.Context, q *inquiry, f Finding) {
	f.Deployment, f.Rules = textOf(q.version.Deployment), textOf(q.version.Rules)
	j.mu.Lock()
	if ctx.Err() != nil {
		j.mu.Unlock()
		return
	}
	j.counts[f.State]++
	q.seq = j.counts[Accepted] + j.counts[Refused] + j.counts[Undecided]
	q.running, q.finding = false, f
	switch {
	case f.State != Undecided:
	case q.retry:
		j.restartLocked(q)
	case !q.settled && q.hasNews():
		j.startLocked(q)
	case !q.settled && q.mayGive():
		f = j.pauseLocked(q)
	}
	var peers []string
	for peer := range q.peers {
		peers = append(peers, peer)
		j.allowLocked(peer, q)
	}
	j.mu.Unlock()
	slices.Sort(peers)
	for _, peer := range peers {
		j.o.Tell(peer, f)
	}
}

// pauseLocked tries an inquiry again after a while: a peer that was too slow once, and whose
// session goes on, gives no other sign that it has become faster. It returns the finding that
// says so.
func (j *Judge) pauseLocked(q *inquiry) Finding {
	pause := min(pauseMax, pauseMin<<min(q.pauses, 16))
	q.pauses++
	var t *time.Timer
	t = time.AfterFunc(pause, func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		if q.pause != t || j.closed || j.versions[q.version] != q || !q.mayGive() {
			return
		}
		j.startLocked(q)
		q.tries-- // those are for what its sessions bring
		for peer := range q.peers {
			j.allowLocked(peer, q)
		}
	})
	q.pause = t
	f := &q.finding
	f.Why += fmt.Sprintf("; it is tried again after a pause of %v", pause)
	f.TakeNot, f.GiveNot = f.Why, f.Why
	return *f
}

// wake ends the pause.
func (q *inquiry) wake() {
	if q.pause != nil {
		q.pause.Stop()
		q.pause = nil
	}
}

// mayGive says whether there is a peer that has not failed by itself.
func (q *inquiry) mayGive() bool {
	for peer := range q.peers {
		if !q.failed[peer] {
			return true
		}
	}
	return false
}

// hasNews says whether a peer may give now what none gave since the inquiry runs.
func (q *inquiry) hasNews() bool {
	for peer := range q.peers {
		if !q.failed[peer] && (!q.asked[peer] || q.again[peer]) {
			return true
		}
	}
	return false
}

// find does the work of an inquiry.
func (j *Judge) find(ctx context.Context, q *inquiry) Finding {
	do := func(what string) { q.doing.Store(&what) }
	if v := j.kept(q.version); v != nil {
		return j.findingOf(q.version, v)
	}
	do("it waits for its turn")
	if !enter(ctx, j.fetching) {
		return Finding{}
	}
	there, err := j.bring(ctx, q, do)
	if err != nil {
		<-j.fetching
		return j.undecided(q, err)
	}
	do("it waits for another check")
	turn := enter(ctx, j.checking)
	<-j.fetching // not before: what waits keeps in memory what was fetched
	if !turn {
		return Finding{}
	}
	defer func() { <-j.checking }()
	do("the check runs")
	budget, cancel := context.WithTimeoutCause(ctx, j.o.CheckWithin, check.ErrBudget)
	defer cancel()
	v, err := j.check(budget, there, func(done, total int) { q.percent.Store(int64(done) * 100 / int64(max(total, 1))) })
	switch {
	case err != nil:
		return j.undecided(q, spent(budget, j.o.CheckWithin, err))
	case v.Verdict == registry.Undecided:
		return j.undecided(q, spent(budget, j.o.CheckWithin, errors.New(v.Undecided)))
	}
	f := j.findingOf(q.version, v)
	j.keep(q.version, v)
	return f
}

// enter takes a place, unless ctx ends first.
func enter(ctx context.Context, places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		return ctx.Err() == nil || leave(places)
	case <-ctx.Done():
		return false
	}
}

func leave(places chan struct{}) bool { <-places; return false }

// bring gathers what a version is made of from the peers that have it, one after the other.
func (j *Judge) bring(ctx context.Context, q *inquiry, do func(string)) (*bundle, error) {
	var why []string
	for {
		peer := j.another(q)
		if peer == "" {
			return nil, &unavailable{why: reasons(why)}
		}
		do("what " + peer + " runs by is fetched")
		within, cancel := context.WithTimeoutCause(ctx, j.o.FetchWithin, fmt.Errorf("it did not come within deadlines.pair_fetch_ms, %v", j.o.FetchWithin))
		b, err := j.gather(within, peer, q.version)
		cancel()
		if err == nil || ctx.Err() != nil {
			return b, err
		}
		var u *unavailable
		if !errors.As(err, &u) || u.all {
			return nil, err
		}
		why = append(why, peer+": "+u.why)
		if !u.passing {
			j.fail(q, peer)
		}
	}
}

// reasons joins why each peer gave nothing.
func reasons(why []string) string {
	const most = 3 // a line, not a list
	switch n := len(why); {
	case n == 0:
		return "no peer that has these rules is there"
	case n > most:
		return fmt.Sprintf("%s; and %d more peers", strings.Join(why[:most], "; "), n-most)
	}
	return strings.Join(why, "; ")
}

// fail notes that a peer is not asked again for this version.
func (j *Judge) fail(q *inquiry, peer string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if q.peers[peer] {
		q.failed[peer] = true
	}
}

// another returns a peer of a version that was not asked and is now, the first by name, or "".
func (j *Judge) another(q *inquiry) (next string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for peer := range q.peers {
		if !q.asked[peer] && !q.failed[peer] && (next == "" || peer < next) {
			next = peer
		}
	}
	if next != "" {
		q.asked[next] = true
	}
	return next
}

// undecided is the finding of what could not be judged.
func (j *Judge) undecided(q *inquiry, err error) Finding {
	var u *unavailable
	j.mu.Lock()
	q.settled = !errors.As(err, &u) || u.all
	j.mu.Unlock()
	why := "the pair of the two versions is undecided: " + line(err.Error())
	f := alike(Undecided)
	f.Why, f.TakeNot, f.GiveNot = why, why, why
	return f
}
