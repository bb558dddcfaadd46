package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/registry/deploy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fakePair struct {
	opt                Options
	producer, consumer *fakeNode
}

func startPair(t *testing.T, leg string, requests int) *fakePair {
	d, err := deploy.Parse("tiny.yaml", []byte(tinyDeployment))
	require.NoError(t, err)
	store := newFakeStore()
	p := &fakePair{producer: startFake(t, d, store, "p"), consumer: startFake(t, d, store, "c")}
	p.opt = Options{
		Requests: tinyTrace(requests), Producer: p.producer.socket, Consumer: p.consumer.socket,
		PeerID: "p", Deployment: d, Leg: leg, Concurrency: DefaultConcurrency,
	}
	return p
}

func (p *fakePair) run(t *testing.T) *Report {
	r, err := Run(t.Context(), p.opt)
	require.NoError(t, err)
	require.Equal(t, r.Requests, r.Hits+r.Recomputed)
	n := 0
	for _, c := range r.RecomputedCauses {
		n += c
	}
	require.Equal(t, r.Recomputed, n, "each recompute has one cause")
	return r
}

func TestReplayHitsAndReusesItsOwnBlocks(t *testing.T) {
	for _, leg := range []string{"pd", "probe"} {
		p := startPair(t, leg, 30)
		done := 0
		p.opt.Progress = func(n int) { done = n }
		r := p.run(t)
		require.Equal(t, 30, r.Hits, "%+v", r)
		require.Equal(t, 30, done)
		require.True(t, r.OK())
		require.Positive(t, r.NativeTokens.Producer, "prompts share a prefix of 512 tokens")
		require.Positive(t, r.NativeTokens.Consumer)
		require.Positive(t, r.Bytes)
		require.Positive(t, r.PullMS.Max)
		require.LessOrEqual(t, r.PullMS.P50, r.PullMS.P99)
		require.LessOrEqual(t, r.PullMS.P99, r.PullMS.Max)
		require.Less(t, r.Groups[0].Demanded, r.Groups[1].Demanded, "a window needs less than everything")
		require.Equal(t, p.consumer.loads, len(p.opt.Requests))
	}
}

func TestBothOrdersOfLegsPDAndDemand(t *testing.T) {
	for _, leg := range []string{"pd", "demand"} {
		bothOrders(t, leg)
	}
}

func bothOrders(t *testing.T, leg string) {
	p := startPair(t, leg, 8)
	p.run(t)
	require.Len(t, p.producer.begins, 8)
	require.Len(t, p.consumer.begins, 8)
	ids := map[string]bool{}
	for _, b := range append(p.producer.begins, p.consumer.begins...) {
		require.NotEmpty(t, b.TransferId)
		ids[b.TransferId] = true
	}
	require.Len(t, ids, 8, "both sides give the same transfer id")
}

// Without a deployment and node ids, the daemons say them.
func TestReplayLearnsFromTheDaemons(t *testing.T) {
	p := startPair(t, "pd", 4)
	p.opt.PeerID, p.opt.Deployment = "", nil
	r := p.run(t)
	require.Equal(t, 4, r.Hits)
	require.Equal(t, "p", p.consumer.begins[0].PeerId)
	require.Equal(t, "c", p.producer.begins[0].PeerId)
	require.Equal(t, Node{"p", p.producer.socket}, r.Producer)
	require.Equal(t, Node{"c", p.consumer.socket}, r.Consumer)
}

func TestReuseIsCappedByTheDaemon(t *testing.T) {
	p := startPair(t, "pd", 12)
	p.producer.reuse = 0
	r := p.run(t)
	require.Zero(t, r.NativeTokens.Producer)
	require.Equal(t, 12, r.Hits)
}

// One bit that changes on its way is found, whatever the daemon says.
func TestFlippedBitIsAWrongByte(t *testing.T) {
	p := startPair(t, "pd", 6)
	flips := 0
	p.consumer.deliver = func(group string, block uint32, b []byte) string {
		if group == "full" && block == 3 && flips == 0 {
			flips++
			b[len(b)/2] ^= 4
		}
		return ""
	}
	r := p.run(t)
	require.EqualValues(t, 1, r.WrongBytes)
	require.Equal(t, map[string]int{CauseWrong: 1}, r.RecomputedCauses)
	require.False(t, r.OK())
}

// A block that never arrives although the daemon says so is wrong in every row.
func TestMissingBlockIsWrong(t *testing.T) {
	p := startPair(t, "probe", 3)
	first := true
	p.consumer.deliver = func(group string, block uint32, b []byte) string {
		if group == "full" && block == 20 && first {
			first = false
			copy(b, make([]byte, len(b)))
		}
		return ""
	}
	r := p.run(t)
	require.Greater(t, r.WrongBytes, uint64(1000))
}

func TestNamedFailureIsARecompute(t *testing.T) {
	p := startPair(t, "pd", 9)
	n := 0
	p.consumer.deliver = func(group string, block uint32, b []byte) string {
		if n++; n == 50 {
			return "checksum"
		}
		return ""
	}
	r := p.run(t)
	require.Equal(t, map[string]int{"checksum": 1}, r.RecomputedCauses)
	require.Equal(t, map[string]int{"checksum": 1}, r.FailedChunks)
	require.Equal(t, 8, r.Hits, "what was computed locally is right and serves the next turn")
	require.Zero(t, r.WrongBytes)
}

func TestShortPromptIsARecompute(t *testing.T) {
	p := startPair(t, "pd", 2)
	p.opt.Requests = append(p.opt.Requests, Request{PromptTokens: 100, IDs: []uint64{77}})
	r := p.run(t)
	require.Equal(t, map[string]int{CauseShort: 1}, r.RecomputedCauses)
}

// A plan that fetches nothing, and says why, is a recompute; what the engine's own
// blocks hold is still right.
func TestNoteIsARecompute(t *testing.T) {
	p := startPair(t, "probe", 9)
	p.consumer.note = "peer p is suspect"
	r := p.run(t)
	require.Equal(t, map[string]int{CauseNothingPlanned: 9}, r.RecomputedCauses)
	require.Equal(t, []Detail{{CauseNothingPlanned, "peer p is suspect", 9}}, r.Details)
	require.Positive(t, r.NativeTokens.Consumer, "it computed the prompts itself, and finds them again")
	require.True(t, r.OK())
}

// Whichever daemon dies, and at whichever moment, the replay ends and counts.
func TestDaemonDies(t *testing.T) {
	for _, who := range []string{"producer", "consumer"} {
		for _, leg := range []string{"pd", "probe"} {
			t.Run(who+" "+leg, func(t *testing.T) {
				p := startPair(t, leg, 40)
				victim := map[string]*fakeNode{"producer": p.producer, "consumer": p.consumer}[who]
				stopped := make(chan struct{})
				n := 0
				p.consumer.deliver = func(string, uint32, []byte) string {
					if n++; n == 300 {
						go func() {
							victim.stop()
							victim.store.lose()
							close(stopped)
						}()
					}
					return ""
				}
				r := p.run(t)
				<-stopped
				require.Zero(t, r.WrongBytes)
				want := map[string]string{"producer": "peer", "consumer": CauseGone}[who]
				require.Positive(t, r.RecomputedCauses[want], "%+v", r)
			})
		}
	}
}

func TestCancelEndsTheRun(t *testing.T) {
	p := startPair(t, "pd", 40)
	ctx, cancel := context.WithCancel(t.Context())
	p.opt.Progress = func(n int) {
		if n == 3 {
			cancel()
		}
	}
	r, err := Run(ctx, p.opt)
	require.ErrorIs(t, err, context.Canceled)
	require.GreaterOrEqual(t, r.Requests, 3)
	require.Equal(t, r.Requests, r.Hits+r.Recomputed)
	require.Equal(t, 40, r.Requests+r.RequestsLeft)
	require.Positive(t, r.RequestsLeft)
	var table bytes.Buffer
	require.NoError(t, r.WriteTable(&table))
	require.Contains(t, table.String(), fmt.Sprintf("leg pd: %d of 40 requests", r.Requests))
	require.Contains(t, table.String(), fmt.Sprintf("%d requests were not played to the end\n", r.RequestsLeft))
}

// A daemon that answers nothing is given up, and its region is not used again.
func TestStuckDaemon(t *testing.T) {
	p := startPair(t, "probe", 5)
	release := make(chan struct{})
	n := 0
	p.consumer.deliver = func(string, uint32, []byte) string {
		if n++; n == 40 {
			<-release
		}
		return ""
	}
	p.opt.Concurrency, p.opt.Salt = 1, "s"
	producer, err := meet(t.Context(), "producer", p.opt.Producer)
	require.NoError(t, err)
	consumer, err := meet(t.Context(), "consumer", p.opt.Consumer)
	require.NoError(t, err)
	r, err := newRun(t.Context(), p.opt, producer, consumer)
	require.NoError(t, err)
	defer r.close()
	r.producer.calls, r.producer.waits = 300*time.Millisecond, 300*time.Millisecond
	r.consumer.waits = 300 * time.Millisecond
	report, err := r.play(t.Context())
	close(release)
	require.NoError(t, err)
	require.Equal(t, 5, report.Recomputed, "%+v", report)
	require.Equal(t, 5, report.RecomputedCauses[CauseGone])
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	require.True(t, strings.HasSuffix(table.String(), "\n5 requests were recomputed because the consumer's daemon was gone\n"), table.String())
}

// Regions that do not fit the deployment are refused before anything is written.
func TestRegionOfAnotherSizeIsRefused(t *testing.T) {
	p := startPair(t, "pd", 1)
	p.opt.Deployment = nil
	p.producer.serves = strings.Replace(tinyDeployment, "layers: 2", "layers: 3", 1)
	p.consumer.serves = p.producer.serves
	_, err := Run(t.Context(), p.opt)
	require.ErrorContains(t, err, "group full: the blocks of its region have 4096 bytes, those of its deployment 6144")
}

// What makes a replay senseless is said at its start.
func TestReplayIsRefused(t *testing.T) {
	wide := strings.Replace(tinyDeployment, "window: 128", "window: 256", 1)
	for want, change := range map[string]func(*fakePair){
		"are the same socket":    func(p *fakePair) { p.opt.Consumer = p.opt.Producer },
		"same node, \"p\"":       func(p *fakePair) { p.consumer.node = "p" },
		"peer-id is \"elsewhere": func(p *fakePair) { p.opt.PeerID = "elsewhere" },
		`consumer's daemon at`: func(p *fakePair) {
			p.consumer.note = `peer "p" is not known to this node (it has none); add it to peers in its configuration`
		},
		"leg is pd, but the deployment was checked for legs probe": func(p *fakePair) {
			p.producer.refuse = status.Error(codes.FailedPrecondition, "leg is pd, but the deployment was checked for legs probe")
		},
		"consumer's daemon: no": func(p *fakePair) { p.consumer.refuse = status.Error(codes.Internal, "no") },
		"rate is NaN":           func(p *fakePair) { p.opt.RequestsPerSecond = math.NaN() },
		"different layouts": func(p *fakePair) {
			p.opt.Deployment = nil
			p.consumer.serves = strings.Replace(tinyDeployment, "head_dim: 32", "head_dim: 64", 1)
		},
		"here 32, there 64": func(p *fakePair) {
			p.opt.Deployment = nil
			p.consumer.serves = strings.Replace(tinyDeployment, "head_dim: 32", "head_dim: 64", 1)
		},
		"the consumer's daemon at": func(p *fakePair) { p.consumer.serves = wide },
		"the producer's daemon at": func(p *fakePair) { p.producer.serves = wide },
		"above max_tokens, 16384": func(p *fakePair) {
			p.opt.Requests = []Request{{PromptTokens: 512 * 40, IDs: make([]uint64, 40), At: "trace:7"}}
		},
		"trace:7: input_length is 20480": func(p *fakePair) {
			p.opt.Requests = []Request{{PromptTokens: 512 * 40, IDs: make([]uint64, 40), At: "trace:7"}}
		},
	} {
		p := startPair(t, "pd", 2)
		change(p)
		r, err := Run(t.Context(), p.opt)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "rpc error")
		require.Nil(t, r)
		require.Empty(t, p.producer.begins, want)
	}
}

// The digests of the two deployments are both named.
func TestOtherDeploymentIsRefused(t *testing.T) {
	p := startPair(t, "probe", 1)
	other, err := deploy.Parse("other.yaml", []byte(strings.Replace(tinyDeployment, "window: 128", "window: 256", 1)))
	require.NoError(t, err)
	mine := p.opt.Deployment.Digest()
	p.opt.Deployment = other
	_, err = Run(t.Context(), p.opt)
	require.ErrorContains(t, err, mine)
	require.ErrorContains(t, err, other.Digest())
}

// Two nodes with other rules may exchange bytes: each engine follows its own node's.
func TestEachSidePlaysItsOwnDeployment(t *testing.T) {
	p := startPair(t, "probe", 6)
	p.opt.Deployment = nil
	p.producer.serves = strings.Replace(tinyDeployment, "window: 128", "window: 512", 1)
	r := p.run(t)
	require.Zero(t, r.WrongBytes)
	require.Equal(t, 6, r.Hits)
}

// A daemon that says no only once it runs is heard once, too.
func TestEveryRequestRefused(t *testing.T) {
	y := &tally{requests: 2, refused: map[string]int{}}
	y.no(&refusal{"consumer", "first"})
	require.NoError(t, y.refusedAll())
	y.no(nil)
	y.no(&refusal{"consumer", "second"})
	require.EqualError(t, y.refusedAll(), "every request was refused: consumer's daemon: first")
}

func TestSocketThatNobodyServes(t *testing.T) {
	p := startPair(t, "pd", 1)
	dir := t.TempDir()
	dead := filepath.Join(dir, "dead")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for socket, why := range map[string]string{
		dead: "connection refused", file: "connection refused", filepath.Join(dir, "none"): "no such file or directory",
	} {
		p.opt.Consumer = socket
		_, err = Run(t.Context(), p.opt)
		require.EqualError(t, err, "consumer: no daemon answers at "+socket+" ("+why+"): is tierd serve running, and ready? tierd status says; the socket is there once the check has accepted")
	}
}

// A program that is no tierd is no tierd's daemon.
func TestSocketOfAnotherProgram(t *testing.T) {
	p := startPair(t, "pd", 1)
	p.opt.Producer = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", p.opt.Producer)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("SSH-2.0-x\r\n"))
			c.Close()
		}
	}()
	_, err = Run(t.Context(), p.opt)
	l.Close()
	<-done
	require.ErrorContains(t, err, "does not answer as a daemon's engine socket does")
	require.NotContains(t, err.Error(), "rpc error")
}

func TestOptionsAreChecked(t *testing.T) {
	good := Options{Requests: tinyTrace(1), Producer: "/p", Consumer: "/c", Leg: "pd", Concurrency: 1}
	require.NoError(t, good.Check())
	for want, change := range map[string]func(*Options){
		"no requests":       func(o *Options) { o.Requests = nil },
		`leg is "x"`:        func(o *Options) { o.Leg = "x" },
		"rate is -1":        func(o *Options) { o.RequestsPerSecond = -1 },
		"rate is NaN":       func(o *Options) { o.RequestsPerSecond = math.NaN() },
		"rate is +Inf":      func(o *Options) { o.RequestsPerSecond = math.Inf(1) },
		"rate is -Inf":      func(o *Options) { o.RequestsPerSecond = math.Inf(-1) },
		"concurrency is 0":  func(o *Options) { o.Concurrency = 0 },
		"concurrency is -1": func(o *Options) { o.Concurrency = -1 },
		"concurrency is 65": func(o *Options) { o.Concurrency = concurrencyMax + 1 },
		"same socket, /p":   func(o *Options) { o.Consumer = "/x/../p" },
		"trace:3: hash_ids": func(o *Options) { o.Requests = []Request{{PromptTokens: 1, At: "trace:3"}} },
	} {
		o := good
		change(&o)
		err := o.Check()
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "replay:")
	}
}

// A plan that fetches nothing is a hit only where there was nothing left to plan.
func TestNothingPlannedIsNoHit(t *testing.T) {
	groups := []group{{name: "full", blockTokens: 16, chunkBlocks: 8, rows: 1, rowBytes: 1}, {name: "wide", index: 1, blockTokens: 16, chunkBlocks: 16, rows: 1, rowBytes: 1}}
	for _, c := range []struct {
		prompt, native, cap uint64
		note, cause         string
	}{
		{prompt: 1000, native: 0, cause: CauseNothingPlanned},
		{prompt: 1000, native: 752, cause: CauseNothingPlanned},
		{prompt: 1000, native: 752, note: "busy", cause: CauseNothingPlanned},
		{prompt: 1000, native: 768},               // the last chunk that both groups have whole
		{prompt: 1000, native: 992, note: "busy"}, // nothing was missed
		{prompt: 1000, native: 512, cap: 600},
		{prompt: 1024, native: 1008, cause: CauseNothingPlanned}, // 1023 was possible
		{prompt: 255, native: 0, cause: CauseShort},
		{prompt: 255, native: 240, cause: CauseShort},
		{prompt: 1, native: 0, cause: CauseShort},
	} {
		s := &side{groups: groups, daemon: &daemon{deployment: &deploy.Deployment{MaxStoreTokens: c.cap}}}
		req := &Request{PromptTokens: c.prompt, IDs: make([]uint64, 2)}
		out := &consumed{nativeTokens: c.native}
		out.unplanned(newSequence(s, newPrompt(req, "", 16)), &enginepb.BeginReply{ResumeTokens: c.native, Note: c.note})
		require.Equal(t, c.cause, out.cause, "%+v", c)
		if c.note != "" && c.cause != "" {
			require.Equal(t, c.note, out.detail)
		}
		if c.cause == CauseNothingPlanned {
			require.NotEmpty(t, out.detail)
		}
	}
}

// Nobody knows what attention of a foreign rule reads: what was loaded is judged, and
// what was not is not missed.
func TestForeignRule(t *testing.T) {
	d, err := deploy.Parse("d.yaml", []byte(strings.Replace(tinyDeployment, "rule: window", `rule: "./r.wasm#my-window"`, 1)))
	require.NoError(t, err)
	groups, err := groupsOf(d)
	require.NoError(t, err)
	require.Equal(t, []bool{true, false}, []bool{groups[0].foreign, groups[1].foreign})
	s := &side{groups: groups, daemon: &daemon{deployment: d}}
	q := newSequence(s, newPrompt(&Request{PromptTokens: 100, IDs: []uint64{1}}, "", 16))
	require.EqualValues(t, 3*groups[1].rows*groups[1].rowBytes, q.wrong(48), "of the group full alone")
}

// Own tier, transferred and unmatched add up to the demand, and the bytes tell them apart.
func TestOwnTierIsToldApart(t *testing.T) {
	p := startPair(t, "probe", 6)
	p.consumer.held = 1
	r := p.run(t)
	bytes := uint64(0)
	for i, g := range r.Groups {
		require.Equal(t, g.Demanded, g.OwnTier+g.Transferred+g.Unmatched)
		require.Positive(t, g.OwnTier)
		bytes += g.OwnTier * p.opt.Deployment.Groups[i].ChunkBytes()
	}
	require.Equal(t, bytes, r.OwnTierBytes)
}

func TestRateSpreadsTheStarts(t *testing.T) {
	p := startPair(t, "pd", 5)
	p.opt.RequestsPerSecond = 50
	start := time.Now()
	p.run(t)
	require.GreaterOrEqual(t, time.Since(start), 80*time.Millisecond, "the fifth starts 4/50 s after the first")
}

// The smallest rate does not overflow into "at once".
func TestTinyRateWaits(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := &run{opt: Options{RequestsPerSecond: math.SmallestNonzeroFloat64}}
	for range 100 { // select is fair: a start that is due would be taken now and then
		require.Error(t, r.pace(ctx, time.Now(), 1))
	}
}

func TestReportReadsBack(t *testing.T) {
	p := startPair(t, "pd", 3)
	r := p.run(t)
	text, err := json.Marshal(r)
	require.NoError(t, err)
	var keys map[string]any
	require.NoError(t, json.Unmarshal(text, &keys))
	for _, k := range []string{"producer", "consumer", "own_tier_bytes", "pulls", "requests", "hits", "recomputed", "wrong_bytes", "bytes", "seconds", "pull_ms", "groups", "recomputed_causes"} {
		require.Contains(t, keys, k)
	}
	var table bytes.Buffer
	require.NoError(t, r.WriteTable(&table))
	for _, want := range []string{
		"leg pd: 3 requests", "from node p (" + p.producer.socket + ") to node c (" + p.consumer.socket + ")\n",
		"from the consumer's own tier 0 B, pulled ", "MB", "sliding", "full", "own tier +", "unmatched",
	} {
		require.Contains(t, table.String(), want)
	}
	require.NotContains(t, table.String(), "p99", "of three pulls the longest says it all")
	r.Pulls = p99Pulls
	table.Reset()
	require.NoError(t, r.WriteTable(&table))
	require.Contains(t, table.String(), "ms (p99)")
}

func TestDetailsAreGrouped(t *testing.T) {
	y := &tally{}
	for range 3 {
		for i := range detailsMax + 2 {
			y.detail("peer", fmt.Sprint("sentence ", i))
		}
		y.detail("peer", "")
	}
	require.Len(t, y.sum.Details, detailsMax)
	require.Equal(t, Detail{"peer", "sentence 0", 3}, y.sum.Details[0])
	require.Equal(t, 6, y.sum.DetailsLeftOut)
	var table bytes.Buffer
	require.NoError(t, y.sum.WriteTable(&table))
	require.Contains(t, table.String(), "  3 x peer: sentence 0\n")
	require.Contains(t, table.String(), "  and 6 other sentences\n")
}

func TestSizesArePrintedInTheirUnit(t *testing.T) {
	for bytes, want := range map[float64]string{0: "0 B", 999: "999 B", 4096: "4.1 kB", 33554432: "33.6 MB", 8.54e9: "8.54 GB"} {
		require.Equal(t, want, size(bytes))
	}
}

func TestQuantilesAreOfTheDurations(t *testing.T) {
	var d []time.Duration
	require.Zero(t, quantile(d, 0.5))
	for i := range 100 {
		d = append(d, time.Duration(i+1)*time.Millisecond)
	}
	require.Equal(t, 50.0, quantile(d, 0.5))
	require.Equal(t, 99.0, quantile(d, 0.99))
	require.Equal(t, 100.0, quantile(d, 1))
}

var _ enginepb.EngineServer = (*fakeNode)(nil)

// What a chunk given up because of another one is counted as is that other one's cause.
func TestRootOfFailures(t *testing.T) {
	aborted, room := &enginepb.Failure{Cause: causeAborted}, &enginepb.Failure{Cause: "no-room"}
	require.Equal(t, room, root([]*enginepb.Failure{aborted, room, aborted}))
	require.Equal(t, aborted, root([]*enginepb.Failure{aborted, aborted}))
}
