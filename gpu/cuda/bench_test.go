package cuda

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/host/tier/crc32c"
	"golang.org/x/sys/unix"
)

const (
	kib, mib = 1 << 10, 1 << 20
	// roundBytes is what a measured round moves in one direction, and rounds how many
	// there are; the median counts.
	roundBytes = 1 << 30
	rounds     = 7
)

// A rig holds what all measurements use.
type rig struct {
	t      *testing.T
	dev    *Device
	base   uint64
	region gpu.Region
	host   []byte // 2 x roundBytes, pinned
	stream [2]uintptr
}

// TestBench measures and prints the tables of BENCHMARKS.md; `make bench-gpu` runs it. Where
// CUDA_MPS_PIPE_DIRECTORY names the pipes of an MPS daemon, it and the product's process go
// by MPS.
func TestBench(t *testing.T) {
	if os.Getenv("TIERD_BENCH_GPU") == "" {
		t.Skip("skipped: TIERD_BENCH_GPU is not set")
	}
	start := time.Now()
	d := open(t, Options{})
	g := newRig(t, d)
	fmt.Printf("open and pin: %v\n", time.Since(start))
	fmt.Printf("device: %+v\ntuning: %+v\n", d.Info(), d.Tuning())
	fmt.Printf("staging: %d buffers of %d MiB in each direction\n\n", d.opts.Buffers, d.opts.StagingBytes/mib)
	wanted := os.Getenv("TIERD_BENCH_GPU")
	for _, part := range []struct {
		name string
		run  func()
	}{{"speed", g.speed}, {"grid", g.grid}, {"both", g.both}, {"alone", g.alone}, {"cpu", g.cpu}, {"sum", g.sum}, {"direct", g.direct}, {"own", g.ownProcess}, {"beside", g.besideProcess}} {
		if wanted == "1" || strings.Contains(wanted, part.name) {
			start := time.Now()
			part.run()
			fmt.Printf("(%s: %v)\n\n", part.name, time.Since(start).Round(time.Millisecond))
		}
	}
	if strings.Contains(wanted, "sweep") {
		g.sweep()
	}
}

func newRig(t *testing.T, d *Device) *rig {
	h, err := d.AllocHost(2 * roundBytes)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, h.Close()) })
	r, err := d.Alloc(t.Context(), 4*roundBytes)
	require.NoError(t, err)
	g := &rig{t: t, dev: d, base: r.(*region).base, region: r, host: h.Bytes()}
	noisy := noise(1, 64*mib)
	for at := 0; at < len(g.host); at += len(noisy) {
		copy(g.host[at:], noisy)
	}
	leave, err := d.enter()
	require.NoError(t, err)
	defer leave()
	for i := range g.stream {
		require.NoError(t, d.drv.call(cuStreamCreateWithPriority, uintptr(unsafe.Pointer(&g.stream[i])), streamNonBlocking, 0))
	}
	return g
}

// big is one copy by the driver, the ceiling.
func (g *rig) big(dir int, bytes int) {
	leave, err := g.dev.enter()
	require.NoError(g.t, err)
	defer leave()
	host := g.host[dir*roundBytes:][:bytes]
	require.NoError(g.t, g.dev.lanes[dir].dma(g.base+uint64(dir)*2*roundBytes, host, g.stream[dir]))
	require.NoError(g.t, g.dev.drv.call(cuStreamSynchronize, g.stream[dir]))
}

// calls returns what moves roundBytes of fragments of this size, in random order or as a
// grid, cut into calls.
func (g *rig) calls(d *Device, reg gpu.Region, dir int, fragment int, w way, grid bool) func() {
	callBytes, workers := w.bytes, w.workers
	n := roundBytes / fragment
	frags := make([]gpu.Fragment, n)
	for i := range frags {
		frags[i] = gpu.Fragment{Offset: int64(dir)*2*roundBytes + int64(i)*2*int64(fragment), Length: int64(fragment)}
	}
	if !grid {
		rand.New(rand.NewPCG(1, 1)).Shuffle(n, func(i, j int) { frags[i], frags[j] = frags[j], frags[i] })
	}
	per := callBytes / fragment
	return func() {
		var next atomic.Int64
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for {
					i := int(next.Add(1)) - 1
					if i*callBytes >= roundBytes {
						return
					}
					host := g.host[dir*roundBytes+i*callBytes:][:callBytes]
					var err error
					if dir == 0 {
						err = d.Gather(context.Background(), host, reg, frags[i*per:(i+1)*per])
					} else {
						err = d.Scatter(context.Background(), reg, frags[i*per:(i+1)*per], host)
					}
					if err != nil {
						g.t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
}

func seconds(f func()) float64 {
	start := time.Now()
	f()
	return time.Since(start).Seconds()
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// A way is how calls reach the device: how long each is, and how many run at a time.
type way struct {
	name           string
	bytes, workers int
}

var ways = []way{{"1 GiB, 1 at a time", roundBytes, 1}, {"32 MiB, 2 at a time", 32 * mib, 2}, {"32 MiB, 4 at a time", 32 * mib, 4}, {"8 MiB, 4 at a time", 8 * mib, 4}, {"2 MiB, 8 at a time", 2 * mib, 8}}

func (g *rig) speed() {
	fmt.Println("| direction | fragment | one big copy GB/s |", "calls |", "GB/s | share |")
	for dir, name := range []string{"store", "load"} {
		for _, f := range []int{4 * kib, 16 * kib, 64 * kib, 256 * kib, mib} {
			runs := make([]func(), len(ways))
			for i, w := range ways {
				runs[i] = g.calls(g.dev, g.region, dir, f, w, false)
				runs[i]()
			}
			var big []float64
			got := make([][]float64, len(ways))
			for range rounds {
				big = append(big, seconds(func() { g.big(dir, roundBytes) }))
				for i := range ways {
					got[i] = append(got[i], seconds(runs[i]))
				}
			}
			b := roundBytes / median(big) / 1e9
			for i, w := range ways {
				v := roundBytes / median(got[i]) / 1e9
				fmt.Printf("| %s | %d KiB | %.1f | %s | %.1f | %.3f |\n", name, f/kib, b, w.name, v, v/b)
			}
		}
	}
}

// grid is speed for fragments at equal distances, which go without a kernel where the
// tuning says so.
func (g *rig) grid() {
	d, reg := g.other(Options{Tuning: &Tuning{Gather: Direction{16, never, 1}, Scatter: Direction{16, never, 1}}})
	fmt.Println("| direction, grid | row | one big copy GB/s | calls | GB/s | share |")
	for dir, name := range []string{"store", "load"} {
		for _, f := range []int{kib, 4 * kib, 16 * kib, 64 * kib, 256 * kib} {
			for _, w := range []way{ways[2], ways[4]} {
				run := g.calls(d, reg, dir, f, w, true)
				run()
				var big, got []float64
				for range rounds {
					big = append(big, seconds(func() { g.big(dir, roundBytes) }))
					got = append(got, seconds(run))
				}
				b, v := roundBytes/median(big)/1e9, roundBytes/median(got)/1e9
				fmt.Printf("| %s | %d KiB | %.1f | %s | %.1f | %.3f |\n", name, f/kib, b, w.name, v, v/b)
			}
		}
	}
}

// other is another device of the same GPU, with a region.
func (g *rig) other(o Options) (*Device, gpu.Region) {
	d := open(g.t, o)
	reg, err := d.Alloc(g.t.Context(), 4*roundBytes)
	require.NoError(g.t, err)
	return d, reg
}

func together(a, b func()) {
	var wg sync.WaitGroup
	wg.Go(a)
	wg.Go(b)
	wg.Wait()
}

func (g *rig) both() {
	fmt.Println("| both directions at once | GB/s, sum | share of big copies at once |")
	var big []float64
	sizes := []int{4 * kib, 16 * kib, 256 * kib}
	got := make([][]float64, len(sizes)*len(ways))
	name := make([]string, len(got))
	for range rounds {
		big = append(big, seconds(func() { together(func() { g.big(0, roundBytes) }, func() { g.big(1, roundBytes) }) }))
		for i, f := range sizes {
			for k, w := range ways {
				n := i*len(ways) + k
				name[n] = fmt.Sprintf("%d KiB, %s", f/kib, w.name)
				a, b := g.calls(g.dev, g.region, 0, f, w, false), g.calls(g.dev, g.region, 1, f, w, false)
				got[n] = append(got[n], seconds(func() { together(a, b) }))
			}
		}
	}
	b := 2 * roundBytes / median(big) / 1e9
	fmt.Printf("| big copies | %.1f | 1 |\n", b)
	for i := range got {
		v := 2 * roundBytes / median(got[i]) / 1e9
		fmt.Printf("| %s | %.1f | %.3f |\n", name[i], v, v/b)
	}
}

// alone: one chunk at a time, and nothing else.
func (g *rig) alone() {
	fmt.Println("| one call of 1 MiB alone | fragment | p50 us | p99 us |")
	for dir, name := range []string{"store", "load"} {
		for _, f := range []int{4 * kib, 16 * kib, 64 * kib, mib} {
			var frags []gpu.Fragment
			for at := 0; at < mib; at += f {
				frags = append(frags, gpu.Fragment{Offset: int64(2 * at), Length: int64(f)})
			}
			var us []float64
			for range 2000 {
				us = append(us, 1e6*seconds(func() {
					if dir == 0 {
						require.NoError(g.t, g.dev.Gather(context.Background(), g.host[:mib], g.region, frags))
					} else {
						require.NoError(g.t, g.dev.Scatter(context.Background(), g.region, frags, g.host[:mib]))
					}
				}))
			}
			slices.Sort(us)
			fmt.Printf("| %s | %d KiB | %.1f | %.1f |\n", name, f/kib, us[1000], us[1980])
		}
	}
}

func cpuSeconds() float64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

func (g *rig) cpu() {
	fmt.Println("| CPU | core-seconds for 20 GB |")
	for dir, name := range []string{"store", "load"} {
		for _, f := range []int{4 * kib, 16 * kib} {
			for _, w := range ways {
				run := g.calls(g.dev, g.region, dir, f, w, false)
				run()
				before := cpuSeconds()
				for range rounds {
					run()
				}
				fmt.Printf("| %s, %d KiB, %s | %.2f |\n", name, f/kib, w.name, (cpuSeconds()-before)/(rounds*roundBytes)*20e9)
			}
		}
	}
}

// sum is what checksums of the bytes cost where the CPU computes them.
func (g *rig) sum() {
	var s []float64
	for range rounds {
		s = append(s, seconds(func() { crc32c.Checksum(g.host[:roundBytes]) }))
	}
	fmt.Printf("CRC-32C on one core: %.1f GB/s, %.2f core-seconds for 20 GB\n", roundBytes/median(s)/1e9, 20e9/roundBytes*median(s))
}

// direct is fragments in random order that go without a kernel: many to a command where the
// driver can, and each by a DMA of its own.
func (g *rig) direct() {
	fmt.Printf("| | fragment | staged | many to a command | core-seconds for 20 GB | one DMA each |\n")
	batched := g.dev.drv.fn[cuMemcpyBatchAsync]
	all := &Tuning{Gather: Direction{16, 1, never}, Scatter: Direction{16, 1, never}}
	d, reg := g.other(Options{Tuning: all})
	for dir, name := range []string{"store", "load"} {
		for _, f := range []int{8 * kib, 16 * kib, 32 * kib, 64 * kib, 128 * kib, 256 * kib, 1024 * kib} {
			var rates [3][]float64
			var cpu float64
			staged, direct := g.calls(g.dev, g.region, dir, f, ways[2], false), g.calls(d, reg, dir, f, ways[2], false)
			for range 3 {
				rates[0] = append(rates[0], roundBytes/1e9/seconds(staged))
				before := cpuSeconds()
				rates[1] = append(rates[1], roundBytes/1e9/seconds(direct))
				cpu += cpuSeconds() - before
				g.dev.drv.fn[cuMemcpyBatchAsync] = 0
				rates[2] = append(rates[2], roundBytes/1e9/seconds(direct))
				g.dev.drv.fn[cuMemcpyBatchAsync] = batched
			}
			fmt.Printf("| %s | %d KiB | %.1f | %.1f | %.2f | %.1f |\n", name, f/kib, median(rates[0]), median(rates[1]), cpu/(3*roundBytes)*20e9, median(rates[2]))
		}
	}
}

// loads are what runs beside the product: each moves bytes until it is told to stop, and
// returns how many.
func (g *rig) loads() (names []string, runs []func(stop *atomic.Bool) int) {
	add := func(name string, bytes int, f func()) {
		names = append(names, name)
		runs = append(runs, func(stop *atomic.Bool) (n int) {
			for !stop.Load() {
				f()
				n += bytes
			}
			return n
		})
	}
	names, runs = append(names, "alone"), append(runs, func(*atomic.Bool) int { return 0 })
	add("one big copy, store", roundBytes/4, func() { g.big(0, roundBytes/4) })
	add("one big copy, load", roundBytes/4, func() { g.big(1, roundBytes/4) })
	strided, sreg := g.other(Options{Tuning: &Tuning{Gather: Direction{16, never, 1}, Scatter: Direction{16, never, 1}}})
	for dir, name := range []string{"store", "load"} {
		for _, f := range []int{4 * kib, 16 * kib} {
			add(fmt.Sprintf("%s, %d KiB", name, f/kib), roundBytes, g.calls(g.dev, g.region, dir, f, ways[2], false))
		}
		add(name+", 16 KiB on a grid, without a kernel", roundBytes, g.calls(strided, sreg, dir, 16*kib, ways[2], true))
	}
	separate, preg := g.other(Options{Separate: true})
	fmt.Printf("tuning for a separate process: %+v\n", separate.Tuning())
	for dir, name := range []string{"store", "load"} {
		add(name+", 256 KiB", roundBytes, g.calls(g.dev, g.region, dir, 256*kib, ways[2], false))
		for _, f := range []int{16 * kib, 32 * kib, 64 * kib, 256 * kib} {
			add(fmt.Sprintf("%s, %d KiB, Separate", name, f/kib), roundBytes, g.calls(separate, preg, dir, f, ways[2], false))
		}
	}
	return names, runs
}

// beside prints what product says while each load runs.
func (g *rig) beside(title string, product func(secs float64) float64) {
	productRounds, secs := 5, 0.7
	if os.Getenv("TIERD_BENCH_GPU") != "1" { // a part alone is to be quick
		productRounds, secs = 3, 0.5
	}
	names, runs := g.loads()
	tflops, rates := make([][]float64, len(runs)), make([][]float64, len(runs))
	for range productRounds {
		for i, run := range runs {
			var stop atomic.Bool
			moved := make(chan int)
			start := time.Now()
			go func() { moved <- run(&stop) }()
			time.Sleep(50 * time.Millisecond)
			tflops[i] = append(tflops[i], product(secs))
			stop.Store(true)
			n := <-moved
			rates[i] = append(rates[i], float64(n)/time.Since(start).Seconds()/1e9)
		}
	}
	fmt.Printf("| %s | TFLOP/s | share | copy GB/s |\n", title)
	for i, name := range names {
		fmt.Printf("| %s | %.0f | %.3f | %.1f |\n", name, median(tflops[i]), median(tflops[i])/median(tflops[0]), median(rates[i]))
	}
}

// besideProcess: the product runs in a process of its own, as an engine does.
func (g *rig) besideProcess() {
	cmd := exec.CommandContext(g.t.Context(), "python3", filepath.Join("testdata", "product.py"))
	in, err := cmd.StdinPipe()
	require.NoError(g.t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(g.t, err)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		fmt.Println("skipped: no python3:", err)
		return
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		fmt.Println("skipped: python3 has no PyTorch here:", cmd.Wait())
		return
	}
	g.beside("8192^3 bf16 product in a PyTorch process", func(secs float64) float64 {
		fmt.Fprintln(in, secs)
		require.True(g.t, lines.Scan())
		v, err := strconv.ParseFloat(lines.Text(), 64)
		require.NoError(g.t, err)
		return v
	})
	in.Close()
	io.Copy(io.Discard, out)
	require.NoError(g.t, cmd.Wait())
}

// ownProcess: the product runs in this process, by cuBLAS, so that kernels of the copies
// and of the product may run at the same time.
func (g *rig) ownProcess() {
	path, err := exec.Command("python3", "-c", "import glob,sysconfig;print(glob.glob(sysconfig.get_paths()['purelib']+'/nvidia/**/libcublas.so*',recursive=True)[0])").Output()
	if err != nil {
		fmt.Println("skipped: no cuBLAS here")
		return
	}
	lib, err := purego.Dlopen(strings.TrimSpace(string(path)), purego.RTLD_NOW|purego.RTLD_GLOBAL)
	require.NoError(g.t, err)
	sym := func(name string) uintptr {
		p, err := purego.Dlsym(lib, name)
		require.NoError(g.t, err)
		return p
	}
	leave, err := g.dev.enter()
	require.NoError(g.t, err)
	var handle uintptr
	r, _, _ := purego.SyscallN(sym("cublasCreate_v2"), uintptr(unsafe.Pointer(&handle)))
	require.Zero(g.t, r)
	var stream uintptr
	require.NoError(g.t, g.dev.drv.call(cuStreamCreateWithPriority, uintptr(unsafe.Pointer(&stream)), streamNonBlocking, 0))
	r, _, _ = purego.SyscallN(sym("cublasSetStream_v2"), handle, stream)
	require.Zero(g.t, r)
	work, err := g.dev.Alloc(g.t.Context(), 64*mib)
	require.NoError(g.t, err)
	defer work.Close()
	r, _, _ = purego.SyscallN(sym("cublasSetWorkspace_v2"), handle, uintptr(work.(*region).base), 64*mib)
	require.Zero(g.t, r)
	leave()
	const n = 8192
	var m [3]uint64
	for i := range m {
		reg, err := g.dev.Alloc(g.t.Context(), 2*n*n)
		require.NoError(g.t, err)
		defer reg.Close()
		b := noise(uint64(i), 2*n*n)
		for k := 1; k < len(b); k += 2 {
			b[k] = 0x3f | b[k]&0x80 // bf16 of size 0.5 to 2, either sign
		}
		require.NoError(g.t, g.dev.Scatter(g.t.Context(), reg, []gpu.Fragment{{Length: 2 * n * n}}, b))
		m[i] = reg.(*region).base
	}
	gemm := sym("cublasGemmEx")
	one, zero := float32(1), float32(0)
	product := func(times int) {
		leave, err := g.dev.enter()
		require.NoError(g.t, err)
		defer leave()
		const bf16, compute32F = 14, 68
		for range times {
			r, _, _ := purego.SyscallN(gemm, handle, 0, 0, n, n, n, uintptr(unsafe.Pointer(&one)), uintptr(m[0]), bf16, n, uintptr(m[1]), bf16, n,
				uintptr(unsafe.Pointer(&zero)), uintptr(m[2]), bf16, n, compute32F, ^uintptr(0))
			require.Zero(g.t, r)
		}
		require.NoError(g.t, g.dev.drv.call(cuStreamSynchronize, stream))
	}
	product(50)
	g.beside("8192^3 bf16 product in this process", func(secs float64) float64 {
		var speeds []float64
		for start := time.Now(); time.Since(start).Seconds() < secs; {
			speeds = append(speeds, 2*n*n*n*20/seconds(func() { product(20) })/1e12)
		}
		return median(speeds)
	})
}

// sweep compares sizes and numbers of staging buffers.
func (g *rig) sweep() {
	fmt.Println("| staging | direction | fragment |", "GB/s by way |")
	for _, o := range []Options{{StagingBytes: 4 * mib, Buffers: 8}, {StagingBytes: 8 * mib, Buffers: 4}, {StagingBytes: 16 * mib, Buffers: 8}, {StagingBytes: 32 * mib, Buffers: 8}} {
		for _, blocks := range []int{8, 16} {
			o.Tuning = &Tuning{Gather: Direction{blocks, never, never}, Scatter: Direction{blocks, never, never}}
			d, err := Open(g.t.Context(), 0, o)
			require.NoError(g.t, err)
			reg, err := d.Alloc(g.t.Context(), 4*roundBytes)
			require.NoError(g.t, err)
			for dir, name := range []string{"store", "load"} {
				for _, f := range []int{4 * kib, 16 * kib} {
					fmt.Printf("| %d x %d MiB, %d blocks | %s | %d KiB |", o.Buffers, o.StagingBytes/mib, blocks, name, f/kib)
					for _, w := range ways {
						run := g.calls(d, reg, dir, f, w, false)
						run()
						var s []float64
						for range 3 {
							s = append(s, seconds(run))
						}
						fmt.Printf(" %.1f |", roundBytes/median(s)/1e9)
					}
					fmt.Println()
				}
			}
			require.NoError(g.t, d.Close())
		}
	}
}
