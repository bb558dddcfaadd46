package host

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/registry/plan"
)

// Relation cascade: whatever state a promised chunk is in when it is to be supplied, the key
// has exactly one outcome, within a limit: it is supplied, or it is refused with the reason
// that the tier gave. In particular a key that another request is writing is never dropped
// for good: the request under judgement computed the chunk, too.

// cascadeLimit is how long after the producer's last word a consumer may wait for the
// outcome of a key: the longest wait for a chunk in work, which these tests set to a
// second, and as much again for a slow machine.
const cascadeLimit = 4 * time.Second

// driven is a producer's request that a test drives below the engine's socket, so that it
// can stand in between.
type driven struct {
	t *testing.T
	*producer
	att engine.Attachment
	x   text
	at  uint64
}

func drive(t *testing.T, n *Node, id string, x text, leg enginepb.Leg) *driven {
	t.Helper()
	ctx := ctxFor(t)
	blocks := uint32(x.tokens/blockTokens) + 1
	a, err := n.Attach(ctx, &enginepb.AttachRequest{Regions: []*enginepb.Region{{Group: "sliding", Blocks: blocks}, {Group: "full", Blocks: blocks}}})
	require.NoError(t, err)
	t.Cleanup(a.Close)
	for g, name := range []string{"sliding", "full"} {
		for b := range int(x.tokens / blockTokens) {
			at := []gpu.Fragment{{Offset: int64(b) * blockBytes, Length: blockBytes}}
			require.NoError(t, n.devices.Host.Scatter(ctx, a.(*attachment).spaces[g].region, at, x.block(name, b)))
		}
	}
	r, _, err := a.Begin(ctx, (&testEngine{t: t}).request(id, x, enginepb.Role_PRODUCER, leg))
	require.NoError(t, err)
	return &driven{t: t, producer: r.(*producer), att: a, x: x}
}

// A supplier carries out one step of a request.
type supplier func(p *producer, s engine.Step) error

// honestly is the host as it is.
func honestly(p *producer, s engine.Step) error {
	job, err := p.Store(s)
	if err == nil {
		job()
	}
	return err
}

// dropsPending is a host that supplies nothing that another request is writing at the time,
// and does not come back to it.
func dropsPending() supplier {
	dropped := map[plan.Ref]bool{}
	return func(p *producer, s engine.Step) error {
		todo, err := p.take(s)
		if err != nil {
			return err
		}
		pending := func(ref plan.Ref) bool {
			state := abi.NewStates(1)
			p.node.tier.Lookup([]tier.Key{p.key(ref)}, state)
			dropped[ref] = dropped[ref] || p.chunks[ref] == nil && state.At(0) == abi.Pending
			return dropped[ref]
		}
		for i := range todo {
			todo[i].copies = slices.DeleteFunc(todo[i].copies, func(c copyWork) bool { return c.Promised && pending(c.Ref) })
		}
		p.run(todo, true)
		return nil
	}
}

// to computes up to token n.
func (d *driven) to(n uint64, by supplier) {
	d.t.Helper()
	s := engine.Step{Computed: n, First: d.at == 0}
	from, end := uint32((d.at+blockTokens-1)/blockTokens), uint32((n+blockTokens-1)/blockTokens)
	for _, g := range []string{"sliding", "full"} {
		var ids []uint32
		for b := from; b < end; b++ {
			ids = append(ids, b)
		}
		s.Blocks = append(s.Blocks, &enginepb.BlockRun{Group: g, FirstBlock: from, Ids: ids})
	}
	require.NoError(d.t, by(d.producer, s))
	d.at = n
}

func (d *driven) end(abort bool) {
	d.Finish(engine.Finish{Abort: abort, Computed: d.at})
}

// promised is the keys that the request will supply at its prompt's end.
func (d *driven) promised() (keys []tier.Key) {
	p := d.node.planner()
	defer d.node.planners.Put(p)
	sets, _, err := p.PromptSupply(plan.Start{PromptTokens: d.x.tokens})
	require.NoError(d.t, err)
	for _, ref := range refs(sets) {
		keys = append(keys, d.key(ref))
	}
	return keys
}

// A writer is another request that has keys in state writing.
type writer struct {
	n     *Node
	owner tier.Owner
	slots map[tier.Key]tier.Slot
}

func write(t *testing.T, n *Node, keys []tier.Key) *writer {
	t.Helper()
	w := &writer{n, tier.Owner{Kind: ownerProduce, ID: "another"}, map[tier.Key]tier.Slot{}}
	admitted, err := n.tier.Admit(w.owner, keys)
	require.NoError(t, err)
	for _, a := range admitted {
		if a.Presence == tier.Admitted {
			w.slots[a.Key] = a.Slot
		}
	}
	return w
}

// commit ends the writes well.
func (w *writer) commit(t *testing.T, x text) {
	t.Helper()
	for k, s := range w.slots {
		group, size := "sliding", w.n.groups[0].chunkBytes
		if k.Group() == 1 {
			group, size = "full", w.n.groups[1].chunkBytes
		}
		b, err := w.n.tier.Bytes(s)
		require.NoError(t, err)
		for c := 0; ; c++ {
			if x.key(group, c) == k {
				copy(b, x.chunk(group, c))
				break
			}
		}
		_, err = w.n.tier.Commit(s, tier.Checksum(b[:size]), size, false)
		require.NoError(t, err)
	}
}

func (w *writer) abort() { w.n.tier.Release(w.owner) }

// fill pins the whole tier but some slots.
func fill(t *testing.T, n *Node, but int) (free func()) {
	t.Helper()
	owner := tier.Owner{Kind: ownerProduce, ID: "filler"}
	s := n.tier.Snapshot()
	_, err := n.tier.Stage(owner, n.tier.Slots()-s.Writing-s.Readable-but)
	require.NoError(t, err)
	return func() { n.tier.Release(owner) }
}

// A cascade is one state of the primary tier at supply time.
type cascade struct {
	state string
	// refusal that the tier's state allows, by its cause; "" = everything must be supplied.
	refusal string
	// brought says that another request brings what this one drops.
	brought bool
	slots   int64
	// before runs when the request under judgement has begun, between when it has
	// computed everything, after when it has ended.
	before, between, after func(t *testing.T, d *driven)
	early                  func(t *testing.T, n *Node, x text) // before it begins
}

func cascades() []cascade {
	var w *writer
	var free func()
	var first *driven
	halfway := func(t *testing.T, d *driven) { // the same prompt, in the middle of chunks
		first = drive(t, d.node, "first", d.x, enginepb.Leg_PD)
		first.to(124, honestly)
	}
	writing := func(t *testing.T, d *driven) { w = write(t, d.node, d.promised()) }
	commits := func(t *testing.T, d *driven) { w.commit(t, d.x) }
	aborts := func(*testing.T, *driven) { w.abort() }
	frees := func(*testing.T, *driven) { free() }
	return []cascade{
		{state: "absent"},
		{state: "writing, then readable", brought: true, before: writing, between: commits},
		{state: "writing, then aborted", before: writing, between: aborts},
		{state: "writing, readable after the last word", brought: true, before: writing, after: commits},
		{state: "writing, aborted after the last word", before: writing, after: aborts},
		{state: "readable", early: func(t *testing.T, n *Node, x text) {
			d := drive(t, n, "first", x, enginepb.Leg_PROBE)
			d.to(x.tokens, honestly)
			d.end(false)
		}},
		{state: "writing by a request, which goes on", brought: true, before: halfway, between: func(t *testing.T, d *driven) {
			first.to(d.x.tokens, honestly)
			first.end(false)
		}},
		{state: "writing by a request, which aborts", before: halfway, between: func(*testing.T, *driven) { first.end(true) }},
		{state: "writing by a request, which aborts late", before: halfway, after: func(*testing.T, *driven) { first.end(true) }},
		{state: "readable, then evicted", before: func(t *testing.T, d *driven) {
			writing(t, d)
			w.commit(t, d.x)
			evictAll(t, d.node)
		}},
		{state: "no room", refusal: "no-room", slots: 40, before: func(t *testing.T, d *driven) { free = fill(t, d.node, 0) }, after: frees},
		{state: "room for some", refusal: "no-room", slots: 40, before: func(t *testing.T, d *driven) { free = fill(t, d.node, 9) }, after: frees},
		{state: "writing, and no room for a copy", refusal: "no-room", slots: 40, before: func(t *testing.T, d *driven) {
			writing(t, d)
			free = fill(t, d.node, 0)
		}, after: func(*testing.T, *driven) { w.abort(); free() }},
	}
}

// evictAll takes every readable chunk that nobody pins out of the tier.
func evictAll(t *testing.T, n *Node) {
	t.Helper()
	owner := tier.Owner{Kind: ownerProduce, ID: "pressure"}
	s := n.tier.Snapshot()
	slots, err := n.tier.Stage(owner, n.tier.Slots()-s.Writing)
	require.NoError(t, err)
	for _, slot := range slots {
		require.NoError(t, n.tier.Drop(slot))
	}
	require.Zero(t, n.tier.Snapshot().Readable)
}

// An outcome of one key: "supplied", "refused: CAUSE", or "lost".
type outcomes map[string][]string

// broken says which key breaks relation cascade, and how; "" when none does.
func (c *cascade) broken(keys []string, o outcomes, waited time.Duration) string {
	if waited > cascadeLimit {
		return fmt.Sprintf("the last outcome took %v after the last word; the limit is %v", waited.Round(time.Second), cascadeLimit)
	}
	for _, k := range keys {
		switch got := o[k]; {
		case len(got) != 1:
			return fmt.Sprintf("key %s has %d outcomes %v", k, len(got), got)
		case got[0] == "supplied":
		case c.refusal == "" || got[0] != "refused: "+c.refusal:
			return fmt.Sprintf("key %s is %s, where its state, %s, lets it be supplied", k, got[0], c.state)
		}
	}
	return ""
}

// counts is the outcomes in words.
func (o outcomes) counts() string {
	n := map[string]int{}
	for _, all := range o {
		for _, s := range all {
			n[s]++
		}
	}
	var parts []string
	for _, s := range slices.Sorted(maps.Keys(n)) {
		parts = append(parts, fmt.Sprintf("%d %s", n[s], s))
	}
	return strings.Join(parts, ", ")
}

// run drives one state in one leg with a supplier and returns every key's outcomes.
func (c *cascade) run(t *testing.T, leg enginepb.Leg, by supplier, lastWord bool) (keys []string, o outcomes, waited time.Duration) {
	t.Helper()
	slots := c.slots
	if slots == 0 {
		slots = 200
	}
	producer := startNode(t, "producer", slabOf(slots), func(c *config.Config) { c.Deadlines.PendingMS = 1000 })
	consumer := startNode(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	x := text{"cascade", 300}
	if c.early != nil {
		c.early(t, producer, x)
	}
	d := drive(t, producer, "second", x, leg)
	at := func(f func(*testing.T, *driven)) {
		if f != nil {
			f(t, d)
		}
	}
	e := attach(t, consumer)
	var r *consuming
	var job uint64
	if leg == enginepb.Leg_PD { // it waits already
		r = e.beginConsumer("second", x, leg, func(b *enginepb.BeginRequest) { b.DeadlineMs = 6_000 })
		job = r.startLoad()
		require.Eventually(t, func() bool { return producer.meeting.status().Jobs == 1 }, 30*time.Second, time.Millisecond)
	}
	at(c.before)
	d.to(124, by) // in the middle of chunks
	d.to(x.tokens, by)
	at(c.between)
	began := time.Now()
	if lastWord {
		d.end(false)
	}
	if leg == enginepb.Leg_PROBE {
		at(c.after)
		keys, o = lookedUp(d)
	} else {
		ev, err := e.c.Wait(ctxFor(t), job)
		require.NoError(t, err)
		waited = time.Since(began)
		keys, o = demanded(r, ev)
		r.compare(ev.ResumeTokens)
		at(c.after)
		r.finish()
	}
	if !lastWord {
		d.end(true)
	}
	clean(t, producer, consumer)
	return keys, o, waited
}

// demanded returns the outcomes that a consumer heard. What it used it has compared.
func demanded(r *consuming, ev *enginepb.Event) (keys []string, o outcomes) {
	o = outcomes{}
	for _, g := range r.reply.Demand {
		for _, c := range g.Chunks {
			for k := c.First; k <= c.Last; k++ {
				keys = append(keys, fmt.Sprint(g.Group, " ", k))
			}
		}
	}
	failed := map[string]bool{}
	for _, f := range ev.Failures {
		k := fmt.Sprint(f.Group, " ", f.Chunk)
		failed[k] = true
		o[k] = append(o[k], "refused: "+f.Cause)
	}
	for _, k := range keys {
		if !failed[k] {
			o[k] = append(o[k], "supplied")
		}
	}
	sort.Strings(keys)
	return keys, o
}

// lookedUp returns what lookups say of the promised keys once nothing is in work any more:
// in leg probe, to be supplied is to be in the tier.
func lookedUp(d *driven) (keys []string, o outcomes) {
	o = outcomes{}
	promised := d.promised()
	state := abi.NewStates(len(promised))
	for end := time.Now().Add(cascadeLimit); ; time.Sleep(5 * time.Millisecond) {
		d.node.tier.Lookup(promised, state)
		if state.First(abi.Absent|abi.Unknown, 0, len(promised)) == len(promised) && d.node.tier.Snapshot().Writing == 0 || time.Now().After(end) {
			break
		}
	}
	for i, k := range promised {
		name := k.String()
		keys = append(keys, name)
		switch state.At(i) {
		case abi.Hit:
			o[name] = []string{"supplied"}
		case abi.Miss:
			o[name] = []string{"lost"}
		}
	}
	return keys, o
}

// TestCascade holds the outcome of every state against relation cascade, and the table of
// them against a golden file. Where the tier has no room, leg probe promises nothing: its
// engine heard of the failure in the answer to the step.
func TestCascade(t *testing.T) {
	var table strings.Builder
	for i := range cascades() {
		for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
			c := &cascades()[i]
			if leg == enginepb.Leg_PROBE && c.refusal != "" {
				continue
			}
			t.Run(fmt.Sprint(c.state, ", ", leg), func(t *testing.T) {
				keys, o, waited := c.run(t, leg, honestly, true)
				require.NotEmpty(t, keys)
				require.Empty(t, c.broken(keys, o, waited))
				fmt.Fprintf(&table, "%-40s %-6s %s\n", c.state, leg, o.counts())
			})
		}
	}
	golden(t, "testdata/cascade.txt", table.String())
}

// TestCascadeControls: a host that drops a pending key is refused in every state in which
// there is one, and in no other; so is one that keeps its last word.
func TestCascadeControls(t *testing.T) {
	for i := range cascades() {
		for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
			c := &cascades()[i]
			if c.refusal != "" {
				continue
			}
			t.Run(fmt.Sprint(c.state, ", ", leg), func(t *testing.T) {
				keys, o, waited := c.run(t, leg, dropsPending(), true)
				why := c.broken(keys, o, waited)
				t.Log(why)
				there := c.brought && leg == enginepb.Leg_PROBE // a lookup finds whatever is in the tier
				if strings.HasPrefix(c.state, "writing") && !there {
					require.Contains(t, why, "lets it be supplied")
					return
				}
				require.Empty(t, why)
			})
		}
	}
	t.Run("no last word", func(t *testing.T) {
		c := &cascades()[4] // writing, aborted after the last word
		keys, o, waited := c.run(t, enginepb.Leg_PD, dropsPending(), false)
		require.Contains(t, c.broken(keys, o, waited), "took")
	})
}
