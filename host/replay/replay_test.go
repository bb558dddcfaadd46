package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

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
		PeerID: "p", ConsumerID: "c", Deployment: d, Leg: leg,
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

func TestBothOrdersOfLegPD(t *testing.T) {
	p := startPair(t, "pd", 8)
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
	p.opt.PeerID, p.opt.ConsumerID, p.opt.Deployment = "", "", nil
	r := p.run(t)
	require.Equal(t, 4, r.Hits)
	require.Equal(t, "p", p.consumer.begins[0].PeerId)
	require.Equal(t, "c", p.producer.begins[0].PeerId)
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
	require.Equal(t, map[string]int{CauseNotPlanned: 9}, r.RecomputedCauses)
	require.Equal(t, []string{"not-planned: peer p is suspect"}, r.Details)
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
	_, err := Run(ctx, p.opt)
	require.ErrorIs(t, err, context.Canceled)
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
	groups, err := groupsOf(p.opt.Deployment)
	require.NoError(t, err)
	r := &run{opt: p.opt, nonce: "x", tally: newTally(groups, 5)}
	r.opt.Concurrency, r.opt.Salt = 1, "s"
	r.producer, err = attach(t.Context(), "producer", p.opt.Producer, groups, 16, blocksFor(groups, p.opt.Requests, 1))
	require.NoError(t, err)
	defer r.producer.client.Close()
	r.consumer, err = attach(t.Context(), "consumer", p.opt.Consumer, groups, 16, blocksFor(groups, p.opt.Requests, 1))
	require.NoError(t, err)
	defer r.consumer.client.Close()
	r.producer.calls, r.producer.waits = 300*time.Millisecond, 300*time.Millisecond
	r.consumer.waits = 300 * time.Millisecond
	report, err := r.play(t.Context())
	close(release)
	require.NoError(t, err)
	require.Equal(t, 5, report.Recomputed, "%+v", report)
	require.Equal(t, 5, report.RecomputedCauses[CauseGone])
}

func TestAttachNamesWhatDiffers(t *testing.T) {
	p := startPair(t, "pd", 1)
	other, err := deploy.Parse("other.yaml", []byte(strings.Replace(tinyDeployment, "layers: 2", "layers: 3", 1)))
	require.NoError(t, err)
	p.opt.Deployment = other
	_, err = Run(t.Context(), p.opt)
	require.ErrorContains(t, err, "group full: its blocks have 4096 bytes, those of the deployment given to replay 6144")
}

func TestOptionsAreChecked(t *testing.T) {
	d, err := deploy.Parse("tiny.yaml", []byte(tinyDeployment))
	require.NoError(t, err)
	good := Options{Requests: tinyTrace(1), Deployment: d, Leg: "pd", PeerID: "p"}
	require.NoError(t, good.Check())
	for want, change := range map[string]func(*Options){
		"no requests":               func(o *Options) { o.Requests = nil },
		"no deployment":             func(o *Options) { o.Deployment = nil },
		`leg is "x"`:                func(o *Options) { o.Leg = "x" },
		"node id":                   func(o *Options) { o.PeerID = "" },
		"rate is -1":                func(o *Options) { o.RequestsPerSecond = -1 },
		"concurrency is 65":         func(o *Options) { o.Concurrency = concurrencyMax + 1 },
		"max_tokens of the deploym": func(o *Options) { o.Requests = []Request{{PromptTokens: 512 * 40, IDs: make([]uint64, 40)}} },
	} {
		o := good
		change(&o)
		require.ErrorContains(t, o.Check(), want)
	}
}

func TestRateSpreadsTheStarts(t *testing.T) {
	p := startPair(t, "pd", 5)
	p.opt.RequestsPerSecond = 50
	start := time.Now()
	p.run(t)
	require.GreaterOrEqual(t, time.Since(start), 80*time.Millisecond, "the fifth starts 4/50 s after the first")
}

func TestReportReadsBack(t *testing.T) {
	p := startPair(t, "pd", 3)
	r := p.run(t)
	text, err := json.Marshal(r)
	require.NoError(t, err)
	var keys map[string]any
	require.NoError(t, json.Unmarshal(text, &keys))
	for _, k := range []string{"requests", "hits", "recomputed", "wrong_bytes", "bytes", "seconds", "pull_ms", "groups", "recomputed_causes"} {
		require.Contains(t, keys, k)
	}
	var table bytes.Buffer
	require.NoError(t, r.WriteTable(&table))
	for _, want := range []string{"leg pd: 3 requests", "sliding", "full", "unmatched"} {
		require.Contains(t, table.String(), want)
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
