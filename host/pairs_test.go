package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/pairs"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/status"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/plugins/zoo"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// inWasm opens the rules as they serve, and takes them on trust.
func inWasm(ctx context.Context, d *deploy.Deployment, _ func(done, total int)) (*registry.Entry, func() error, error) {
	l := plugins.NewLoader(plugins.Options{BaseDir: d.Dir(), CacheDir: compiledDir})
	e, err := onTrust(ctx, d, l.Open)
	return e, func() error { return l.Close(context.Background()) }, err
}

// onTrust opens the rules of a deployment and accepts them unjudged.
func onTrust(ctx context.Context, d *deploy.Deployment, open func(ctx context.Context, ref string) (*plugins.Plugin, error)) (*registry.Entry, error) {
	e, err := registry.Open(ctx, d, func(ctx context.Context, _, ref string) (registry.Opened, error) {
		p, err := open(ctx, ref)
		if err != nil {
			return registry.Opened{}, err
		}
		return registry.Opened{Spec: p.Spec, Digest: p.Digest, Source: p.Source}, nil
	})
	if err != nil {
		return nil, err
	}
	e.Verdict = &registry.Verdict{Verdict: registry.Accepted, Model: d.Model}
	return e, nil
}

// compiledDir keeps compiled modules for all tests of a run.
var compiledDir string

// promptOfPairs is how many tokens the prompts of these tests have: two reuse points, and
// more than a window after the last.
const promptOfPairs = 92

// shorter makes the check of a pair short, which grows with the square of the alignment: it
// runs under the race detector here. Longer ones are judged without it, in registry/check.
func shorter(yaml string) string {
	return strings.NewReplacer("max_tokens: 512", "max_tokens: 96", "align_tokens: 64", "align_tokens: 32").Replace(yaml)
}

// startWasm starts a node whose rules are those that ship, compiled once for all tests.
func startWasm(t *testing.T, id string, options ...nodeOption) *Node {
	t.Helper()
	return startWasmLogged(t, id, &logTo{}, options...)
}

func startWasmLogged(t *testing.T, id string, log *logTo, options ...nodeOption) *Node {
	t.Helper()
	return startLogged(t, id, inWasm, log, append(options, func(c *config.Config) {
		if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
			panic(err)
		}
		yaml, err := os.ReadFile(c.Deployment)
		if err == nil {
			err = os.WriteFile(c.Deployment, []byte(shorter(string(yaml))), 0o600)
		}
		if err != nil {
			panic(err)
		}
		if err := os.Symlink(compiledDir, rules.CompiledDir(c.StateDir)); err != nil && !errors.Is(err, fs.ErrExist) {
			panic(err)
		}
	})...)
}

// pairBecomes waits until a node has found out about the pair with a peer.
func pairBecomes(t *testing.T, n *Node, peer, state string) pairs.Finding {
	t.Helper()
	var f pairs.Finding
	require.Eventually(t, func() bool {
		f = n.pairs.Of(peer)
		return f.State != pairs.None && f.State != pairs.Checking
	}, 2*time.Minute, time.Millisecond)
	require.Equal(t, state, f.State, f.Why)
	return f
}

// allLegsWith waits until a node may demand of a peer in every leg.
func allLegsWith(t *testing.T, n *Node, peer string) {
	t.Helper()
	require.Eventually(t, func() bool { return isReady(n, peer) && n.unusable(peer, legPD) == "" }, 2*time.Minute, time.Millisecond, n.unusable(peer, legPD))
}

// hitsIn runs a prompt in a leg and asserts that the consumer gets all that it planned for.
func hitsIn(t *testing.T, p, c *testEngine, id string, leg enginepb.Leg, options ...beginOption) {
	t.Helper()
	p.fresh()
	c.fresh()
	x := text{id, promptOfPairs}
	p.produce(id, x, leg)
	r := c.beginConsumer(id, x, leg, options...)
	hit(t, r, r.load())
	r.finish()
}

// TestVersionsThatFit: two nodes whose rules have other parameters, the pair of which is
// accepted, use leg pd in both directions after a while.
func TestVersionsThatFit(t *testing.T) {
	producer := startWasm(t, "producer", withDeployment(replace(deployment, "max_tokens: 512", "max_tokens: 112")))
	consumer := startWasm(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	for _, n := range []*Node{producer, consumer} {
		peer := map[*Node]string{producer: "consumer", consumer: "producer"}[n]
		f := pairBecomes(t, n, peer, pairs.Accepted)
		require.True(t, f.Take && f.Give)
		allLegsWith(t, n, peer)
	}
	hitsIn(t, p, c, "there", enginepb.Leg_PD)
	hitsIn(t, c, p, "back", enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.PeerId = "consumer" })
	hitsIn(t, p, c, "demand", enginepb.Leg_DEMAND)
	clean(t, producer, consumer)
	kept, err := os.ReadDir(consumer.cfg.StateDir + "/pairs")
	require.NoError(t, err)
	require.Len(t, kept, 1)
	require.True(t, strings.HasSuffix(kept[0].Name(), ".json"))
}

// gauge returns the value of a series of a node.
func gauge(t *testing.T, n *Node, name string, labels ...string) float64 {
	t.Helper()
	families, err := n.metrics.Registry().Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.Metric {
			var have []string
			for _, l := range m.Label {
				have = append(have, l.GetValue())
			}
			if f.GetName() == name && slices.Equal(have, labels) {
				return m.Gauge.GetValue() + m.Counter.GetValue()
			}
		}
	}
	require.Fail(t, "no series", "%s %v", name, labels)
	return 0
}

// refusedLegs asserts that leg pd with the producer ends at once at the consumer, with a
// reason, and that leg probe hits.
func refusedLegs(t *testing.T, p, c *testEngine, id string, why ...string) {
	t.Helper()
	p.fresh()
	c.fresh()
	x := text{id, promptOfPairs}
	p.produce(id, x, enginepb.Leg_PROBE)
	for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_DEMAND} {
		r := c.beginConsumer(id+leg.String(), x, leg)
		require.Zero(t, r.reply.ResumeTokens)
		for _, w := range why {
			require.Contains(t, r.reply.Note, w)
		}
		r.finish()
	}
	hitsIn(t, p, c, id+"probe", enginepb.Leg_PROBE)
}

// behind is a node's control port that others find at one address when it starts again.
func behind(control *proxy, n *Node) *Node {
	control.target.Store(n.Addresses().Peer)
	return n
}

// TestVersionsThatDoNotFit: the consumer's window needs more than the producer's version
// stores. That way stays on leg probe, everything says why, and the other way is allowed.
// When the producer comes again with the consumer's rules, all legs are.
func TestVersionsThatDoNotFit(t *testing.T) {
	control := startProxy(t)
	wider := replace(deployment, "window: 20", "window: 40")
	logged := &logTo{}
	producer := behind(control, startWasm(t, "producer"))
	consumer := startWasmLogged(t, "consumer", logged, withPeer("producer", control.addr()), withDeployment(wider))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	f := pairBecomes(t, consumer, "producer", pairs.Refused)
	require.False(t, f.Take)
	require.True(t, f.Give)
	require.False(t, pairBecomes(t, producer, "consumer", pairs.Refused).Give)

	const why = "prompts of 32 tokens, group sliding: the consumer demands chunks that the producer, of another version, never supplies (rule: producer window 1.0.0 window 20 extra 0, consumer window 1.0.0 window 40 extra 0)"
	x := text{"a", promptOfPairs}
	p.produce("a", x, enginepb.Leg_PROBE)
	r := c.beginConsumer("a", x, enginepb.Leg_PD)
	require.Equal(t, "peer producer runs other rules, parameters or limits, and leg pd is not allowed with it: the pair of the two versions is refused: "+why+
		"; the whole counterexample is in "+f.File+"; use leg probe", r.reply.Note)
	r.finish()
	drawing, err := os.ReadFile(f.File)
	require.NoError(t, err)
	require.Contains(t, string(drawing), "missing")
	allLegsWith(t, producer, "consumer")
	hitsIn(t, c, p, "back", enginepb.Leg_PD, func(b *enginepb.BeginRequest) { b.PeerId = "consumer" })
	// Leg probe is allowed; what it finds of the narrower window is too little to go on from.
	r = c.beginConsumer("probe", x, enginepb.Leg_PROBE)
	require.NotContains(t, r.reply.Note, "not allowed")
	r.finish()

	s := statusz(t, consumer)
	require.True(t, strings.HasPrefix("the pair of the two versions is refused: "+why, s.Peers[0].Pair.PeerReason))
	require.NotEmpty(t, s.Peers[0].Pair.PeerReason)
	s.Peers[0].Pair.PeerReason = ""
	require.Equal(t, status.Pair{State: "refused", Reason: "the pair of the two versions is refused with this node as the consumer: " + why, CounterexampleFile: f.File, Gives: true,
		DeploymentDigest: f.Deployment, RulesDigest: f.Rules}, s.Peers[0].Pair)
	require.Contains(t, strings.Join(s.Attention, "\n"), "peer producer runs another version: the pair of the two versions is refused with this node as the consumer: "+why+"; the whole counterexample is in "+f.File)
	require.Contains(t, status.Text(s, false), "refused  probe")
	for _, node := range []struct {
		n    *Node
		peer string
		by   map[string]string // the state of each direction
	}{
		{consumer, "producer", map[string]string{"consume": "refused", "produce": "accepted"}},
		{producer, "consumer", map[string]string{"consume": "accepted", "produce": "refused"}},
	} {
		for direction, state := range node.by {
			for _, s := range pairs.States() {
				require.Equal(t, s == state, gauge(t, node.n, "tierd_peer_pair", direction, node.peer, s) == 1, "%s: %s %s", node.peer, direction, s)
			}
		}
	}
	require.EqualValues(t, 1, gauge(t, consumer, "tierd_peer_pair_checks_total", "refused"))
	require.Zero(t, gauge(t, consumer, "tierd_peer_leg_allowed", "pd", "producer"))
	require.Equal(t, 1, strings.Count(logged.String(), "not every leg is allowed with it"))

	control.cut()
	producer.Close(context.Background())
	producer = behind(control, startWasm(t, "producer", withDeployment(wider)))
	control.mend()
	p = attach(t, producer)
	allLegsWith(t, consumer, "producer")
	require.Equal(t, pairs.Equal, consumer.pairs.Of("producer").State)
	hitsIn(t, p, c, "equal", enginepb.Leg_PD)
	clean(t, producer, consumer)
}

// TestCapOfOneSide: the producer stores less of a prompt than the consumer demands.
func TestCapOfOneSide(t *testing.T) {
	producer := startWasm(t, "producer", withDeployment(replace(deployment, "legs:", "max_store_tokens: 64\nlegs:")))
	consumer := startWasm(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	f := pairBecomes(t, consumer, "producer", pairs.Refused)
	require.Contains(t, f.Why, "(max_store_tokens: producer 64, consumer 0)")
	require.True(t, f.Give)
	refusedLegs(t, p, c, "a", "the pair of the two versions is refused", "max_store_tokens: producer 64, consumer 0")
	clean(t, producer, consumer)
}

// TestNoRoomForTheCounterexample: when state_dir takes no file, every place that would name the
// one of the counterexample says why it is not there.
func TestNoRoomForTheCounterexample(t *testing.T) {
	logged := &logTo{}
	producer := startWasm(t, "producer")
	consumer := startWasmLogged(t, "consumer", logged, withPeer("producer", producer.Addresses().Peer), withDeployment(replace(deployment, "window: 20", "window: 40")), func(c *config.Config) {
		if err := errors.Join(os.MkdirAll(c.StateDir, 0o700), os.WriteFile(c.StateDir+"/pairs", nil, 0o600)); err != nil { // a directory's place, for root as well
			panic(err)
		}
	})
	ready(t, consumer, "producer")
	f := pairBecomes(t, consumer, "producer", pairs.Refused)
	require.Empty(t, f.File)
	require.Regexp(t, "^"+regexp.QuoteMeta(consumer.cfg.StateDir)+"/pairs/[0-9a-f]{32}.txt: not a directory$", f.FileNot)
	const why = "; the whole counterexample could not be kept in "
	r := attach(t, consumer).beginConsumer("a", text{"a", 90}, enginepb.Leg_PD)
	require.Contains(t, r.reply.Note, why+f.FileNot+"; make room there, and let this node write, before its next start; use leg probe")
	r.finish()
	s := statusz(t, consumer)
	require.Equal(t, f.FileNot, s.Peers[0].Pair.CounterexampleNotKept)
	require.Contains(t, strings.Join(s.Attention, ""), why+f.FileNot)
	require.Eventually(t, func() bool { return strings.Contains(logged.String(), `counterexample="`+f.FileNot) }, 30*time.Second, time.Millisecond)
}

// TestVerdictsOutliveARestart: a node that comes again uses the verdict of before, accepted
// or refused, and asks the peer for nothing.
func TestVerdictsOutliveARestart(t *testing.T) {
	state := t.TempDir()
	producer := startWasm(t, "producer")
	for i, other := range []string{replace(deployment, "max_tokens: 512", "max_tokens: 112"), replace(deployment, "window: 20", "window: 40")} {
		for again := range 2 {
			consumer := startWasm(t, "consumer", withPeer("producer", producer.Addresses().Peer), withDeployment(other), func(c *config.Config) { c.StateDir = state })
			ready(t, consumer, "producer")
			f := pairBecomes(t, consumer, "producer", []string{pairs.Accepted, pairs.Refused}[i])
			require.Equal(t, again == 1, f.Kept)
			require.Equal(t, i == 0, f.Take)
			require.True(t, f.Give)
			consumer.Close(context.Background())
		}
	}
	kept, err := os.ReadDir(state + "/pairs")
	require.NoError(t, err)
	require.Len(t, kept, 3, "two verdicts and one drawing")
}

// moduleWith is a module with one rule, t, which is full attention, compiled at once; with
// another mark it has other bytes. It takes four parts to fetch.
func moduleWith(mark byte) []byte {
	size := 100_000
	section := binary.AppendUvarint([]byte{0}, uint64(2+size))
	return slices.Concat(zoo.Good(), section, []byte{1, mark}, make([]byte, size))
}

// TestModuleOfThePeer: a module that this node does not have comes from the peer, in both
// directions whoever dialed, and is kept.
func TestModuleOfThePeer(t *testing.T) {
	withModule := func(mark byte) nodeOption {
		return func(c *config.Config) {
			withDeployment(replace(deployment, "rule: full", "rule: ./mine.wasm#t"))(c)
			if err := os.WriteFile(filepath.Join(filepath.Dir(c.Deployment), "mine.wasm"), moduleWith(mark), 0o600); err != nil {
				panic(err)
			}
		}
	}
	producer := startWasm(t, "producer", withModule('x'))
	consumer := startWasm(t, "consumer", withModule('y'), withPeer("producer", producer.Addresses().Peer))
	for n, peer := range map[*Node]string{producer: "consumer", consumer: "producer"} {
		ready(t, consumer, "producer")
		pairBecomes(t, n, peer, pairs.Accepted)
		allLegsWith(t, n, peer)
		fetched, err := os.ReadDir(n.cfg.StateDir + "/fetched")
		require.NoError(t, err)
		require.Len(t, fetched, 1)
	}
	hitsIn(t, attach(t, producer), attach(t, consumer), "a", enginepb.Leg_PD)
	clean(t, producer, consumer)
}

// A teller is a peer whose session the test speaks, and which answers what it is asked.
type teller struct {
	*byHand
	answer func(a *sessionpb.Ask) *sessionpb.Part // nil = nothing is ever answered
	legs   chan *sessionpb.Legs
	asks   atomic.Int64
}

// tells runs sessions of a peer by hand until the test ends.
func tells(t *testing.T, n *Node, id string, rules, deployment [32]byte, answer func(a *sessionpb.Ask) *sessionpb.Part) *teller {
	x := &teller{byHand: dialByHand(t, n, id, closedPort(t)), answer: answer, legs: make(chan *sessionpb.Legs, 64)}
	x.hello.RulesDigest, x.hello.DeploymentDigest, x.hello.Caps.PartBytes = rules[:], deployment[:], 32<<10
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			x.session(ctx)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return x
}

func (x *teller) session(ctx context.Context) {
	s, err := sessionpb.NewPeerClient(x.cc).Session(ctx)
	if err != nil || s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Hello{Hello: x.hello}}) != nil {
		return
	}
	for {
		m, err := s.Recv()
		if err != nil {
			return
		}
		if p := m.GetPing(); p != nil {
			_ = s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Pong{Pong: &sessionpb.Pong{Seq: p.Seq}}})
		}
		if l := m.GetLegs(); l != nil {
			x.legs <- l
		}
		if a := m.GetAsk(); a != nil {
			x.asks.Add(1)
			if x.answer != nil {
				_ = s.Send(&sessionpb.Envelope{Message: &sessionpb.Envelope_Part{Part: x.answer(a)}})
			}
		}
	}
}

// shelfOf gives out what a deployment is made of, with a module of its own.
func shelfOf(t *testing.T, mark byte) (bytesOf map[[32]byte][]byte, rulesID, deploymentID, moduleID [32]byte) {
	dir, more := t.TempDir(), moduleWith(mark)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "mine.wasm"), more, 0o600))
	d, err := deploy.Parse(filepath.Join(dir, "d.yaml"), []byte(shorter(replace(deployment, "rule: full", "rule: ./mine.wasm#t"))))
	require.NoError(t, err)
	e, closeRules, err := inWasm(t.Context(), d, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, closeRules()) }()
	bytesOf = map[[32]byte][]byte{}
	put := func(b []byte) [32]byte { id := sha256.Sum256(b); bytesOf[id] = b; return id }
	return bytesOf, put(e.RulesText()), put(d.Canonical()), put(more)
}

// partOf is the right answer.
func partOf(all map[[32]byte][]byte, a *sessionpb.Ask) *sessionpb.Part {
	b, ok := all[[32]byte(a.Digest)]
	if !ok {
		return &sessionpb.Part{Seq: a.Seq, Refused: "not here"}
	}
	rest := b[a.Offset:]
	return &sessionpb.Part{Seq: a.Seq, TotalBytes: uint64(len(b)), Data: rest[:min(len(rest), 32<<10)]}
}

// TestPeersThatDoNotGive: a peer whose module is not what it says, is too large, comes too
// slowly or not at all, leaves the pair undecided with the reason. It keeps its session, is
// on leg probe, is told why, and holds nobody up: not the requests of another peer, and not
// the check of its version. Nothing is left of it.
func TestPeersThatDoNotGive(t *testing.T) {
	fds, before := descriptors(t), runtime.NumGoroutine()
	t.Run("peers", func(t *testing.T) {
		all, rulesID, deploymentID, moduleID := shelfOf(t, 'q')
		n := startWasm(t, "producer", func(c *config.Config) { c.Deadlines.PairFetchMS = 3000 })
		for _, c := range []struct {
			id     string
			answer func(a *sessionpb.Ask) *sessionpb.Part
			why    string
		}{
			{"wrong", func(a *sessionpb.Ask) *sessionpb.Part {
				p := partOf(all, a)
				if [32]byte(a.Digest) == moduleID && a.Offset > 0 {
					p.Data = bytes.Clone(p.Data)
					p.Data[0] ^= 1
				}
				return p
			}, "wrong bytes: asked for sha256:" + hex.EncodeToString(moduleID[:])},
			{"large", func(a *sessionpb.Ask) *sessionpb.Part {
				p := partOf(all, a)
				if [32]byte(a.Digest) == moduleID {
					p.TotalBytes = 8<<20 + 1
				}
				return p
			}, "too long: 8388609 bytes; at most 8388608 are taken"},
			{"empty", func(a *sessionpb.Ask) *sessionpb.Part { return &sessionpb.Part{Seq: a.Seq, TotalBytes: 7} }, "wrong bytes: none after 0 of 7"},
			{"liar", func(a *sessionpb.Ask) *sessionpb.Part {
				return &sessionpb.Part{Seq: a.Seq, TotalBytes: 2, Data: []byte("{}")}
			}, "wrong bytes: asked for"},
			{"mean", func(a *sessionpb.Ask) *sessionpb.Part { return partOf(nil, a) }, "not given out: not here"},
			{"slow", func(a *sessionpb.Ask) *sessionpb.Part {
				p := partOf(all, a)
				if [32]byte(a.Digest) == moduleID {
					time.Sleep(20 * time.Millisecond) // it would take half an hour
					p.Data = p.Data[:1]
				}
				return p
			}, "it did not come within deadlines.pair_fetch_ms, 3s"},
			{"silent", nil, "it did not come within deadlines.pair_fetch_ms, 3s"},
		} {
			id := c.id
			x := tells(t, n, id, rulesID, deploymentID, c.answer)
			require.Eventually(t, func() bool { return isReady(n, id) }, 30*time.Second, time.Millisecond)
			f := pairBecomes(t, n, id, pairs.Undecided)
			require.Contains(t, f.Why, id+": its ")
			require.Contains(t, f.Why, c.why)
			require.Contains(t, n.unusable(id, legPD), "the pair of the two versions is undecided")
			require.Empty(t, n.unusable(id, legProbe))
			require.True(t, isReady(n, id))
			require.Eventually(t, func() bool {
				l := <-x.legs
				require.False(t, l.Supply)
				return strings.Contains(l.Reason, "undecided")
			}, 30*time.Second, time.Millisecond)
		}
		require.NoFileExists(t, n.cfg.StateDir+"/fetched/"+hex.EncodeToString(moduleID[:])+".wasm")
		// A peer of the same version that gives what it has is judged at once.
		tells(t, n, "good", rulesID, deploymentID, func(a *sessionpb.Ask) *sessionpb.Part { return partOf(all, a) })
		pairBecomes(t, n, "good", pairs.Accepted)
		require.Equal(t, pairs.Accepted, n.pairs.Of("liar").State)
		require.FileExists(t, n.cfg.StateDir+"/fetched/"+hex.EncodeToString(moduleID[:])+".wasm")
		clean(t, n)
	})
	for end := time.Now().Add(5 * time.Second); descriptors(t) > fds || runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			require.Fail(t, "something is left", "%d descriptors of %d, %d goroutines of %d\n%s", descriptors(t), fds, runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}

// TestProbeWhileTheCheckTakesLong: while one peer's check does not end, and many others never
// answer, requests of leg probe are served and their sessions stay; Close waits for nothing.
func TestProbeWhileTheCheckTakesLong(t *testing.T) {
	producer := startWasm(t, "producer")
	consumer := startWasm(t, "consumer", withPeer("producer", producer.Addresses().Peer), withDeployment(replace(deployment, "max_tokens: 512", "max_tokens: 480")),
		func(c *config.Config) { c.Deadlines.PairFetchMS = 600_000 })
	for k := range 12 {
		tells(t, consumer, fmt.Sprint("silent", k), [32]byte{1, byte(k)}, [32]byte{2}, nil)
	}
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	for k := range 12 {
		require.Eventually(t, func() bool { return isReady(consumer, fmt.Sprint("silent", k)) }, 30*time.Second, time.Millisecond)
		require.Equal(t, pairs.Checking, consumer.pairs.Of(fmt.Sprint("silent", k)).State)
		hitsIn(t, p, c, fmt.Sprint("a", k), enginepb.Leg_PROBE)
	}
	for _, s := range consumer.peers.Status() {
		require.Equal(t, session.Ready, s.State)
		require.EqualValues(t, 1, s.Sessions)
	}
	clean(t, producer, consumer)
	require.NoError(t, p.c.Close())
	require.NoError(t, c.c.Close())
	began := time.Now()
	consumer.Close(context.Background())
	t.Logf("closed in %v while %d peers were waited for", time.Since(began), 12)
	require.Less(t, time.Since(began), 20*time.Second, "deadlines.pair_fetch_ms is 600 s")
}

// TestThePeersWord: this node accepts the pair, and the peer does not say that it supplies:
// no request demands in vain, and the reason is the peer's.
func TestThePeersWord(t *testing.T) {
	all, rulesID, deploymentID, _ := shelfOf(t, 'w')
	n := startWasm(t, "consumer")
	tells(t, n, "producer", rulesID, deploymentID, func(a *sessionpb.Ask) *sessionpb.Part { return partOf(all, a) })
	f := pairBecomes(t, n, "producer", pairs.Accepted)
	require.True(t, f.Take)
	c := attach(t, n)
	r := c.beginConsumer("a", text{"a", promptOfPairs}, enginepb.Leg_PD)
	require.Contains(t, r.reply.Note, "this node accepts the pair of the two versions, and the peer does not yet supply: it has not said why; use leg probe")
	r.finish()
	clean(t, n)
}

// TestProgramOfThePeer: a peer's rule that is a program is neither fetched nor run, until the
// operator has put its file into peer_rules and reloads.
func TestProgramOfThePeer(t *testing.T) {
	local := t.TempDir()
	program := filepath.Join(t.TempDir(), "program")
	out, err := exec.Command("go", "build", "-o", program, "../plugins/proc/testdata/rogue").CombinedOutput()
	require.NoError(t, err, string(out))
	code, err := os.ReadFile(program)
	require.NoError(t, err)
	producer := startWasm(t, "producer", func(c *config.Config) {
		withDeployment(replace(deployment, "rule: window", "rule: exec:./program#window"))(c)
		if err := os.WriteFile(filepath.Join(filepath.Dir(c.Deployment), "program"), code, 0o700); err != nil {
			panic(err)
		}
	})
	consumer := startWasm(t, "consumer", withPeer("producer", producer.Addresses().Peer), func(c *config.Config) { c.PeerRules = local })
	ready(t, consumer, "producer")
	f := pairBecomes(t, consumer, "producer", pairs.Undecided)
	sum := sha256.Sum256(code)
	require.Contains(t, f.Why, "rule exec:./program#window of sliding is a program, sha256:"+hex.EncodeToString(sum[:])+
		", and none is fetched from a peer or run because one names it: put that file into peer_rules and send SIGHUP; it is not in "+local)
	pairBecomes(t, producer, "consumer", pairs.Accepted)
	require.Contains(t, producer.unusable("consumer", legPD), "the peer does not yet supply: the pair of the two versions is undecided: rule exec:./program#window of sliding is a program")
	require.NoDirExists(t, consumer.cfg.StateDir+"/fetched")
	p, c := attach(t, producer), attach(t, consumer)
	refusedLegs(t, p, c, "a", "the pair of the two versions is undecided: rule exec:./program#window")

	require.NoError(t, os.WriteFile(filepath.Join(local, "whatever"), code, 0o700))
	consumer.ReviewPairs()
	pairBecomes(t, consumer, "producer", pairs.Accepted)
	allLegsWith(t, consumer, "producer")
	allLegsWith(t, producer, "consumer")
	hitsIn(t, p, c, "b", enginepb.Leg_PD)
	clean(t, producer, consumer)
}
