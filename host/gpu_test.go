package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/cuda"
	"github.com/tierd/tierd/gpu/cuda/standin"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/tier"
)

// needGPU skips a test where there is no GPU; with TIERD_GPU=required it fails there.
func needGPU(t *testing.T) {
	t.Helper()
	_, err := cuda.Devices()
	if (errors.Is(err, cuda.ErrNoDriver) || errors.Is(err, cuda.ErrNoDevice)) && os.Getenv("TIERD_GPU") != "required" {
		t.Skipf("skipped: %v", err)
	}
	require.NoError(t, err)
}

// onGPU is a node with a GPU and a slab in memory.
func onGPU(t *testing.T, slab int64) nodeOption {
	dir, err := os.MkdirTemp("/dev/shm", "tierd-test")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return func(c *config.Config) {
		withDeployment(gpuDeployment)(c)
		c.Device, c.SlabBytes, c.SlabDir, c.Bounds.ParkedBytes = "cuda:0", slab, dir, slab/2
		c.Deadlines.RequestMS, c.Deadlines.PendingMS = 20_000, 2000
	}
}

// gpuPair has the consumer on a GPU of its own where there are two.
func gpuPair(t *testing.T, slab int64) (producer, consumer *Node) {
	all, err := cuda.Devices()
	require.NoError(t, err)
	producer = startNode(t, "producer", onGPU(t, slab))
	consumer = startNode(t, "consumer", onGPU(t, slab), withPeer("producer", producer.Addresses().Peer), func(c *config.Config) {
		c.Device = fmt.Sprintf("cuda:%d", min(1, len(all)-1))
	})
	t.Logf("producer on %s (%s), consumer on %s (%s)", producer.devices.Name(), producer.devices.GPU.UUID(), consumer.devices.Name(), consumer.devices.GPU.UUID())
	ready(t, consumer, "producer")
	for _, n := range []*Node{producer, consumer} {
		require.Eventually(t, func() bool { r := n.devices.Report(); return r.Pinned == r.PinnedOf && r.PinError == "" }, time.Minute, 10*time.Millisecond, "the slab is pinned")
	}
	return producer, consumer
}

// openHandles is how many regions and events of their GPUs the nodes have open.
func openHandles(nodes ...*Node) (n int) {
	for _, node := range nodes {
		r := node.devices.Report()
		n += r.Regions + r.Events
	}
	return n
}

// freeGPU is the memory that is free on the GPUs of both.
func freeGPU(t *testing.T, nodes ...*Node) (sum int64) {
	for _, n := range nodes {
		free, _, err := n.devices.GPU.Device.(devices.GPU).MemoryBytes()
		require.NoError(t, err)
		sum += free
	}
	return sum
}

// TestGPUPair: engines of every layout write in streams of their own, store behind an event,
// and others load over the network; every byte is compared, and nothing is left behind.
func TestGPUPair(t *testing.T) {
	needGPU(t)
	producer, consumer := gpuPair(t, 2<<30) // room for all texts: what is parked stays
	number := uint64(0)
	for _, from := range gpuLayouts {
		for _, to := range gpuLayouts {
			before := freeGPU(t, producer, consumer)
			p, err := startStand(producer, from, 160)
			require.NoError(t, err)
			c, err := startStand(consumer, to, 160)
			require.NoError(t, err)
			for _, leg := range []enginepb.Leg{enginepb.Leg_PD, enginepb.Leg_PROBE} {
				number++
				o := order{Do: "produce", ID: fmt.Sprint(number), Seed: number * 7919, Tokens: 1537, Step: 400, Leg: leg, Delay: 20 * time.Millisecond}
				res, err := p.tell(o)
				require.NoError(t, err)
				require.Zero(t, res.Failures, res.Note)
				require.Greater(t, res.JobSeconds[0], 0.015, "a store waits for the engine's stream")
				o.Do, o.Peer = "consume", "producer"
				res, err = c.tell(o)
				require.NoError(t, err)
				require.Zero(t, res.Wrong, "wrong bytes from %s to %s", from, to)
				require.Zero(t, res.Failures, res.Note)
				require.Equal(t, uint64(1536), res.Resume, "%s", res.Note)
				require.Positive(t, res.Loaded)
			}
			require.NoError(t, p.end())
			require.NoError(t, c.end())
			clean(t, producer, consumer)
			require.Eventually(t, func() bool { return freeGPU(t, producer, consumer) > before-64<<20 }, 10*time.Second, 10*time.Millisecond, "the engines' memory is given back")
		}
	}
	s := consumer.Status()
	require.NotNil(t, s.Device.GPU)
	t.Logf("%+v %+v", *s.Device.GPU, s.Device.Copies)
	require.Empty(t, s.Device.GPU.Lost)
}

// TestGPULoss: a fault on the GPU ends the jobs on it, each with the driver's own word, and
// neither the daemon nor engines in host memory. It runs in a process of its own, whose GPU
// is past saving after it.
func TestGPULoss(t *testing.T) {
	needGPU(t)
	if os.Getenv("TIERD_TEST_LOSS") == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestGPULoss$", "-test.v", "-test.timeout=60s")
		cmd.Env = append(os.Environ(), "TIERD_TEST_LOSS=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		t.Logf("%s", out)
		return
	}
	producer, consumer := gpuPair(t, 1<<30)
	breaker, err := standin.Open(0)
	require.NoError(t, err)
	p, err := startStand(producer, "layers", 160)
	require.NoError(t, err)
	c, err := startStand(consumer, "own", 160)
	require.NoError(t, err)
	o := order{Do: "produce", ID: "before", Seed: 1, Tokens: 513, Step: 512, Leg: enginepb.Leg_PD}
	_, err = p.tell(o)
	require.NoError(t, err)
	o.Do, o.Peer = "consume", "producer"
	res, err := c.tell(o)
	require.NoError(t, err)
	require.Equal(t, []uint64{512, 0}, []uint64{res.Resume, res.Wrong})

	require.NoError(t, breaker.Trap())
	o = order{Do: "produce", ID: "after", Seed: 2, Tokens: 513, Step: 512, Leg: enginepb.Leg_PD}
	res, err = p.tell(o)
	require.NoError(t, err, "the engine's own process works on")
	require.Positive(t, res.Failures)
	require.Contains(t, res.Note, "cuda:0: device is lost: cu")
	o.Do, o.Peer = "consume", "producer"
	res, err = c.tell(o)
	require.NoError(t, err)
	require.Zero(t, res.Resume, "it computes everything itself: %s", res.Note)
	require.NotEmpty(t, res.Note)
	s := producer.Status()
	require.True(t, s.Ready)
	require.Contains(t, s.Device.GPU.Lost, "restart the daemon")
	require.NotEmpty(t, s.Attention)
	t.Log(s.Attention)
	_, err = startStand(producer, "runs", 16)
	require.ErrorContains(t, err, "device is lost")
	host, err := engine.Dial(ctxFor(t), producer.Addresses().EngineSocket)
	require.NoError(t, err)
	_, err = host.Attach(ctxFor(t), "in host memory", nil, []*enginepb.Region{{Group: "full", Blocks: 16}})
	require.NoError(t, err)
	require.NotNil(t, host.Region("full").Bytes())
	require.NoError(t, host.Close())
	require.NoError(t, p.end())
	require.NoError(t, c.end())
}

// TestGPUSoak: pairs of engines of every layout, random texts, small slabs that must evict,
// engines that are killed at any moment. It takes TIERD_SOAK_GPU, such as 6m; 5 s without.
func TestGPUSoak(t *testing.T) {
	needGPU(t)
	length, err := time.ParseDuration(os.Getenv("TIERD_SOAK_GPU"))
	if err != nil {
		length = 5 * time.Second
	}
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	producer, consumer := gpuPair(t, 448<<20)
	var all tally
	soakGPU(t, producer, consumer, 3*time.Second, seed, &tally{}) // what the driver keeps, it has now
	before := freeGPU(t, producer, consumer)
	soakGPU(t, producer, consumer, length, seed+1, &all)
	clean(t, producer, consumer)
	require.Eventually(t, func() bool {
		e, _ := producer.counts()
		f, _ := consumer.counts()
		return e+f == 0 && openHandles(producer, consumer) == 0 && freeGPU(t, producer, consumer) >= before-16<<20
	}, 20*time.Second, 20*time.Millisecond, "free before: %d", before)
	t.Logf("%d requests, %.1f GB loaded, %d hits, %d with failures, %d engines killed, %d slots evicted; wrong bytes %d; free before and after %d, %d",
		all.rounds, float64(all.loaded)/1e9, all.hits, all.failed, all.killed,
		producer.tier.Snapshot().Evictions+consumer.tier.Snapshot().Evictions, all.wrong, before, freeGPU(t, producer, consumer))
	require.Zero(t, all.wrong)
	require.Positive(t, all.hits)
	require.Zero(t, openHandles(producer, consumer))
	require.NoError(t, producer.devices.GPU.Lost())
	for _, n := range []*Node{producer, consumer} {
		require.Empty(t, n.Status().Device.PinError)
	}
}

// tally is what a soak came to.
type tally struct {
	mu                           sync.Mutex
	rounds, hits, failed, killed int
	loaded, wrong                uint64
}

func soakGPU(t *testing.T, producer, consumer *Node, length time.Duration, seed uint64, all *tally) {
	end := time.Now().Add(length)
	var wg sync.WaitGroup
	for i, layout := range gpuLayouts {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			var p, c *stand
			defer func() {
				for _, s := range []*stand{p, c} {
					if s != nil {
						s.kill()
					}
				}
			}()
			for n := 0; time.Now().Before(end) && !t.Failed(); n++ {
				var err error
				if p == nil {
					p, err = startStand(producer, layout, 100)
				}
				if c == nil && err == nil {
					c, err = startStand(consumer, gpuLayouts[r.IntN(len(gpuLayouts))], 100)
				}
				if err != nil {
					t.Errorf("pair %d: %v", i, err)
					return
				}
				if i, killed := soakRound(t, r, p, c, fmt.Sprintf("%d-%d-%d", seed, i, n), all); killed {
					*[]**stand{&p, &c}[i] = nil
				}
			}
		})
	}
	wg.Wait()
}

// soakRound is one text from one engine to another, at the same time; in some one of the two
// is killed on the way.
func soakRound(t *testing.T, r *rand.Rand, p, c *stand, id string, all *tally) (which int, killed bool) {
	o := order{Do: "produce", ID: id, Seed: r.Uint64(), Tokens: 1 + r.Uint64N(1500), Step: 1 + r.Uint64N(700), Leg: enginepb.Leg_PD, Delay: time.Duration(r.IntN(5)) * time.Millisecond}
	if r.IntN(3) == 0 {
		o.Seed %= 40 // a text that was there before, maybe
	}
	d := o
	d.Do, d.Peer = "consume", "producer"
	which, killed = r.IntN(2), r.IntN(20) == 0
	if killed {
		victim := []*stand{p, c}[which]
		timer := time.AfterFunc(time.Duration(r.IntN(60))*time.Millisecond, func() { _ = victim.cmd.Process.Kill() })
		defer timer.Stop()
	}
	var res, sent outcome
	var err, sendErr error
	var wg sync.WaitGroup
	wg.Go(func() { sent, sendErr = p.tell(o) })
	wg.Go(func() { res, err = c.tell(d) })
	wg.Wait()
	if killed {
		[]*stand{p, c}[which].kill()
	} else if err != nil || sendErr != nil {
		t.Errorf("%s: consumer: %v; producer: %v", id, err, sendErr)
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	all.rounds++
	all.loaded += res.Loaded
	all.wrong += res.Wrong
	if res.Wrong > 0 {
		t.Errorf("%s: %d wrong bytes", id, res.Wrong)
	}
	if res.Loaded > 0 {
		all.hits++
	}
	if res.Failures+sent.Failures > 0 {
		all.failed++
	}
	if killed {
		all.killed++
	}
	return which, killed
}

func cpuSeconds() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// TestGPUBench prints what the daemon reaches end to end, with TIERD_BENCH_GPU set.
func TestGPUBench(t *testing.T) {
	if os.Getenv("TIERD_BENCH_GPU") == "" {
		t.Skip("a measurement; set TIERD_BENCH_GPU")
	}
	needGPU(t)
	const tokens = 8192
	producer, consumer := gpuPair(t, 3<<30)
	benchChecksum(t, producer)
	benchOne(t)
	for k, layout := range gpuLayouts {
		p, err := startStand(producer, layout, tokens/gpuTokens)
		require.NoError(t, err)
		c, err := startStand(consumer, layout, tokens/gpuTokens)
		require.NoError(t, err)
		own, err := startStand(producer, layout, tokens/gpuTokens)
		require.NoError(t, err)
		var store, load, pull, cpuStore, cpuLoad []float64
		for i := range 5 {
			o := order{Do: "produce", ID: fmt.Sprintf("%s-%d", layout, i), Seed: uint64(1000*k + i), Tokens: tokens, Step: tokens, Leg: enginepb.Leg_PROBE, Quick: true}
			before, cpu := producer.devices.Report().Stores[devices.KindCUDA].Bytes, cpuSeconds()
			res, err := p.tell(o)
			require.NoError(t, err)
			require.Zero(t, res.Failures, res.Note)
			bytes := float64(producer.devices.Report().Stores[devices.KindCUDA].Bytes - before)
			store = append(store, bytes/1e9/res.JobSeconds[0])
			cpuStore = append(cpuStore, (cpuSeconds()-cpu)/bytes*20e9)
			o.Do = "consume"
			cpu = cpuSeconds()
			res, err = own.tell(o)
			require.NoError(t, err)
			load = append(load, float64(res.Loaded)/1e9/res.JobSeconds[0])
			cpuLoad = append(cpuLoad, (cpuSeconds()-cpu)/float64(res.Loaded)*20e9)
			o.Peer = "producer"
			res, err = c.tell(o)
			require.NoError(t, err)
			require.Zero(t, res.Failures, res.Note)
			pull = append(pull, float64(res.Loaded)/1e9/res.Seconds)
		}
		t.Logf("layout %-6s store %.1f GB/s, load from the own slab %.1f GB/s, load from a peer over TCP on this host %.2f GB/s; core-seconds for 20 GB: store %.2f, load %.2f",
			layout, median(store), median(load), median(pull), median(cpuStore), median(cpuLoad))
		for _, s := range []*stand{p, c, own} {
			require.NoError(t, s.end())
		}
		clean(t, producer, consumer)
	}
}

// benchOne stores one chunk of 1 MiB after the other, each in a job of its own.
func benchOne(t *testing.T) {
	n := startNode(t, "one", onGPU(t, 1<<30), withDeployment(`
model: one
max_tokens: 16384
groups: [{name: full, rule: full, block_tokens: 16, chunk_blocks: 2, layers: 8, kv_heads: 8, head_dim: 128, dtype: bf16}]
legs: [probe]
`))
	p, err := startStand(n, "layers", 512, "full")
	require.NoError(t, err)
	var jobs []float64
	var copies devices.Copies
	for i := range 8 {
		res, err := p.tell(order{Do: "produce", ID: fmt.Sprintf("one-%d", i), Seed: uint64(100_000 + i), Tokens: 8192, Step: 32, Leg: enginepb.Leg_PROBE, Quick: true})
		require.NoError(t, err)
		require.Zero(t, res.Failures, res.Note)
		jobs = append(jobs, res.JobSeconds...)
		copies = n.devices.Report().Stores[devices.KindCUDA]
	}
	t.Logf("a job of one 1 MiB chunk alone, of %d: p50 %.0f us from the engine's call to the event it reads, of which the copy has %.0f us in the mean",
		len(jobs), median(jobs)*1e6, copies.Seconds*1e6*(1<<20)/float64(copies.Bytes))
	require.NoError(t, p.end())
}

// benchChecksum measures the checksum of bytes that a copy has just brought, and of others,
// beside the copy itself.
func benchChecksum(t *testing.T, n *Node) {
	dev := n.devices.GPU
	const size, chunks = 4 << 20, 256
	reg, err := dev.Alloc(t.Context(), size*chunks)
	require.NoError(t, err)
	defer reg.Close()
	slab := n.tier.Memory()[:size*chunks]
	var big, alone, hot, cold, both []float64
	for range 5 {
		began := time.Now()
		require.NoError(t, dev.Gather(context.Background(), slab, reg, []gpu.Fragment{{Length: size * chunks}}))
		big = append(big, size*chunks/1e9/time.Since(began).Seconds())
		var copies, sums time.Duration
		for i := range chunks {
			b := slab[i*size:][:size]
			began = time.Now()
			require.NoError(t, dev.Gather(context.Background(), b, reg, []gpu.Fragment{{Offset: int64(i * size), Length: size}}))
			copies += time.Since(began)
			began = time.Now()
			tier.Checksum(b)
			sums += time.Since(began)
		}
		alone, hot = append(alone, size*chunks/1e9/copies.Seconds()), append(hot, size*chunks/1e9/sums.Seconds())
		began = time.Now()
		tier.Checksum(slab)
		cold = append(cold, size*chunks/1e9/time.Since(began).Seconds())
		var wg sync.WaitGroup
		next := make(chan int)
		began = time.Now()
		for range copiesMax {
			wg.Go(func() {
				for i := range next {
					b := slab[i*size:][:size]
					if err := dev.Gather(context.Background(), b, reg, []gpu.Fragment{{Offset: int64(i * size), Length: size}}); err != nil {
						t.Error(err)
					}
					tier.Checksum(b)
				}
			})
		}
		for i := range chunks {
			next <- i
		}
		close(next)
		wg.Wait()
		both = append(both, size*chunks/1e9/time.Since(began).Seconds())
	}
	t.Logf("GB/s: one big copy %.1f; copies of 4 MiB one after the other %.1f; checksum on one core of what was just copied %.1f, of other bytes %.1f; %d copies at a time, each with its checksum %.1f",
		median(big), median(alone), median(hot), median(cold), copiesMax, median(both))
}
