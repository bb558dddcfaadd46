package cuda

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu"
	"github.com/tierd/tierd/gpu/gputest"
	"golang.org/x/sys/unix"
)

// fixed spares the tests the measurement.
var fixed = Tuning{Gather: Direction{16, never, never}, Scatter: Direction{16, never, never}}

// open returns a device, or skips the test where there is no GPU; with
// TIERD_GPU=required it fails there.
func open(t testing.TB, o Options) *Device {
	t.Helper()
	d, err := Open(context.Background(), 0, o)
	if (errors.Is(err, ErrNoDriver) || errors.Is(err, ErrNoDevice)) && os.Getenv("TIERD_GPU") != "required" {
		t.Skipf("skipped: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func TestConformance(t *testing.T) {
	small := func(direct, strided int64) *Tuning {
		return &Tuning{Gather: Direction{3, direct, strided}, Scatter: Direction{5, direct, strided}}
	}
	for name, o := range map[string]Options{
		"as shipped":            {Tuning: &fixed},
		"small staging buffers": {StagingBytes: 64 << 10, Buffers: 2, Tuning: small(never, never)},
		"all direct":            {Tuning: small(1, never)},
		"strided":               {Tuning: small(never, 1)},
		"direct from 4 KiB":     {StagingBytes: 1 << 20, Buffers: 3, Tuning: small(4096, never)},
	} {
		t.Run(name, func(t *testing.T) {
			open(t, o) // skips, and keeps the context alive from one case to the next
			gputest.Run(t, func(t *testing.T) gpu.Device { return open(t, o) })
		})
	}
}

// Without a driver Open says so, and nothing else happens.
func TestNoDriver(t *testing.T) {
	if h, err := purego.Dlopen(library, purego.RTLD_LAZY); err == nil {
		purego.Dlclose(h)
		t.Skip("this machine has a driver")
	}
	_, err := Open(t.Context(), 0, Options{})
	require.ErrorIs(t, err, ErrNoDriver)
	require.ErrorContains(t, err, "cuda:0: no CUDA driver on this machine: libcuda.so.1")
	_, err = Devices()
	require.ErrorIs(t, err, ErrNoDriver)
}

func TestOptionsAreBounded(t *testing.T) {
	for _, o := range []Options{
		{Buffers: 1}, {Buffers: 17}, {Buffers: -1},
		{StagingBytes: 1}, {StagingBytes: 64<<10 + 1}, {StagingBytes: 257 << 20}, {StagingBytes: -4096},
	} {
		_, err := Open(t.Context(), 0, o)
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrNoDriver, "%+v is refused before the driver is asked", o)
	}
}

func TestErrorsHaveTheDriversNameAndText(t *testing.T) {
	d := open(t, Options{Tuning: &fixed})
	require.EqualError(t, d.drv.call(cuMemFree, 12345), "cuMemFree_v2: CUDA_ERROR_INVALID_VALUE (1): invalid argument")
	_, err := d.Alloc(t.Context(), 2*d.Info().TotalBytes)
	require.Regexp(t, `^cuda:0: alloc: \d+ bytes wanted, but the GPU has \d+ bytes free; make the region smaller: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory$`, err.Error())
	require.NoError(t, d.Lost(), "no room is no loss")
	for _, n := range []int{-1, 99} {
		_, err = Open(t.Context(), n, Options{})
		require.ErrorIs(t, err, ErrNoDevice)
	}
}

func TestDevices(t *testing.T) {
	d := open(t, Options{Tuning: &fixed})
	all, err := Devices()
	require.NoError(t, err)
	require.Contains(t, all, d.Info())
	t.Logf("%+v", all)
	require.Regexp(t, `^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`, d.Info().UUID)
}

// Every GPU of the machine at the same time, with its own bytes.
func TestSeveralGPUs(t *testing.T) {
	first := open(t, Options{Tuning: &fixed})
	all, err := Devices()
	require.NoError(t, err)
	if len(all) < 2 {
		t.Skipf("skipped: this machine has %d GPU", len(all))
	}
	var wg sync.WaitGroup
	for i := range all {
		d, err := Open(t.Context(), i, Options{Tuning: &fixed})
		require.NoError(t, err)
		defer d.Close()
		r, err := d.Alloc(t.Context(), 64<<20)
		require.NoError(t, err)
		if i > 0 {
			require.ErrorIs(t, first.Gather(t.Context(), make([]byte, 1), r, []gpu.Fragment{{Length: 1}}), gpu.ErrForeign)
		}
		wg.Go(func() {
			for k := range 10 {
				src, dst := noise(uint64(i*100+k), 64<<20), make([]byte, 64<<20)
				if err := errors.Join(d.Scatter(t.Context(), r, []gpu.Fragment{{Length: 64 << 20}}, src), d.Gather(t.Context(), dst, r, []gpu.Fragment{{Length: 64 << 20}})); err != nil {
					t.Errorf("GPU %d: %v", i, err)
				} else if !bytes.Equal(src, dst) {
					t.Errorf("GPU %d: other bytes", i)
				}
			}
		})
	}
	wg.Wait()
}

func noise(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 9))
	for i := 0; i+8 <= n; i += 8 {
		*(*uint64)(unsafe.Pointer(&b[i])) = r.Uint64()
	}
	return b
}

// What a device takes it gives back.
func TestMemoryIsBackAtTheStart(t *testing.T) {
	keep := open(t, Options{Tuning: &fixed})
	before, _, err := keep.MemoryBytes()
	require.NoError(t, err)
	for range 20 {
		d, err := Open(t.Context(), 0, Options{Tuning: &fixed})
		require.NoError(t, err)
		for range 4 {
			_, err := d.Alloc(t.Context(), 512<<20)
			require.NoError(t, err)
		}
		_, err = d.NewEvent()
		require.NoError(t, err)
		require.NoError(t, d.Close(), "a device closes its regions")
	}
	after, _, err := keep.MemoryBytes()
	require.NoError(t, err)
	require.InDelta(t, before, after, 8<<20)
}

// Copies are right before, while and after host memory is pinned, also across the borders
// of its pieces, and Close waits for them.
func TestPin(t *testing.T) {
	d := open(t, Options{Tuning: &fixed})
	mem, err := unix.Mmap(-1, 0, 2*pinPieceBytes+12345, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	_, err = d.Pin(mem[1:])
	require.ErrorContains(t, err, "begin at a page")
	reg, err := d.Alloc(t.Context(), 64<<20)
	require.NoError(t, err)
	want := noise(4, 64<<20)
	all := []gpu.Fragment{{Length: 64 << 20}}
	require.NoError(t, d.Scatter(t.Context(), reg, all, want))
	p, err := d.Pin(mem[:len(mem)-4096])
	require.NoError(t, err)
	_, err = d.Pin(mem[4096:])
	require.ErrorContains(t, err, "another Pin")
	check := func() {
		for _, at := range []int{0, pinPieceBytes - 1000, pinPieceBytes - 32<<20, len(mem) - 64<<20} {
			part := mem[at : at+64<<20]
			clear(part)
			require.NoError(t, d.Gather(t.Context(), part, reg, all))
			require.True(t, bytes.Equal(want, part), "at %d", at)
			require.NoError(t, d.Scatter(t.Context(), reg, all, part))
		}
	}
	check()
	require.NoError(t, p.Wait(t.Context()))
	require.Equal(t, int64(len(mem)-4096), p.Bytes())
	check()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			part := mem[i*32<<20 : (i+1)*32<<20]
			if err := d.Gather(t.Context(), part, reg, []gpu.Fragment{{Length: 32 << 20}}); err != nil || !bytes.Equal(part, want[:32<<20]) {
				t.Errorf("beside Close: %v", err)
			}
		})
	}
	require.NoError(t, p.Close())
	require.NoError(t, p.Close(), "closing twice is harmless")
	wg.Wait()
	check()
	p, err = d.Pin(mem)
	require.NoError(t, err)
	require.NoError(t, p.Close(), "in the middle of the work")
}

func TestTuningIsMeasuredOnceAndKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	start := time.Now()
	d := open(t, Options{TuningFile: file})
	t.Logf("measured in %v: %+v", time.Since(start), d.Tuning())
	require.Contains(t, blockCandidates, d.Tuning().Gather.Blocks)
	require.Contains(t, blockCandidates, d.Tuning().Scatter.Blocks)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	kept := map[string]Tuning{}
	require.NoError(t, json.Unmarshal(b, &kept))
	require.Equal(t, map[string]Tuning{d.tuningKey(): d.Tuning()}, kept)
	odd := Tuning{Gather: Direction{7, 77, 7}, Scatter: Direction{9, 99, 9}}
	kept[d.tuningKey()] = odd
	require.NoError(t, writeTunings(file, kept))
	require.Equal(t, odd, open(t, Options{TuningFile: file}).Tuning(), "what is kept is not measured again")
	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))
	require.Contains(t, blockCandidates, open(t, Options{TuningFile: file}).Tuning().Gather.Blocks, "a damaged file is replaced")
	sep := open(t, Options{TuningFile: file, Separate: true}).Tuning()
	t.Logf("for a separate process: %+v", sep)
	require.LessOrEqual(t, sep.Gather.DirectBytes, int64(1<<20))
	require.LessOrEqual(t, sep.Scatter.DirectBytes, int64(1<<20))
	_, err = Open(t.Context(), 0, Options{Tuning: &Tuning{}})
	require.ErrorContains(t, err, "tuning: 0 blocks")
}

// faults are kernels that misbehave.
const faultsPTX = `.version 6.0
.target sm_70
.address_size 64
.visible .entry trap() { trap; }
.visible .entry spin(.param .u64 ns) {
	.reg .u64 %t<4>; .reg .pred %p;
	ld.param.u64 %t1, [ns];
	mov.u64 %t2, %globaltimer;
	add.u64 %t2, %t2, %t1;
again:
	mov.u64 %t3, %globaltimer;
	setp.lt.u64 %p, %t3, %t2;
	@%p bra again;
	ret;
}
` + "\x00"

// fault loads one of them. Loading waits for the work of the context, so it must come
// before that.
func fault(t testing.TB, d *Device, name string) (f, stream uintptr) {
	leave, err := d.enter()
	require.NoError(t, err)
	defer leave()
	var module uintptr
	require.NoError(t, d.drv.call(cuModuleLoadData, uintptr(unsafe.Pointer(&module)), uintptr(unsafe.Pointer(unsafe.StringData(faultsPTX)))))
	require.NoError(t, d.function(&f, module, name+"\x00"))
	require.NoError(t, d.drv.call(cuStreamCreateWithPriority, uintptr(unsafe.Pointer(&stream)), streamNonBlocking, 0))
	return f, stream
}

func launch(t testing.TB, d *Device, f, stream uintptr, arg uint64) {
	leave, err := d.enter()
	require.NoError(t, err)
	defer leave()
	args := []unsafe.Pointer{unsafe.Pointer(&arg)}
	require.NoError(t, d.drv.call(cuLaunchKernel, f, 1, 1, 1, 1, 1, 1, 0, stream, uintptr(unsafe.Pointer(&args[0])), 0))
	runtime.KeepAlive(&arg)
}

// again runs this test binary as another process, with one test and an environment.
func again(t *testing.T, test string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// A lost device fails every call with the driver's error; closing works, and the process
// lives. The process is another one, because its context is past saving.
func TestDeviceLoss(t *testing.T) {
	if os.Getenv("TIERD_TEST_LOSS") == "" {
		open(t, Options{Tuning: &fixed})
		cmd := again(t, "TestDeviceLoss", "TIERD_TEST_LOSS=1")
		cmd.Args = append(cmd.Args, "-test.timeout=20s")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "the process lives: cuda:0: device is lost: cu")
		t.Logf("%s", out)
		return
	}
	d, err := Open(t.Context(), 0, Options{Tuning: &fixed})
	require.NoError(t, err)
	reg, err := d.Alloc(t.Context(), 4<<20)
	require.NoError(t, err)
	const workers = 8
	host, err := d.AllocHost(workers << 22)
	require.NoError(t, err)
	trap, stream := fault(t, d, "trap")
	ev, err := d.NewEvent()
	require.NoError(t, err)
	all := []gpu.Fragment{{Length: 4 << 20}}
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			buf := host.Bytes()[i<<22:][:4<<20]
			if i == 0 {
				buf = make([]byte, 4<<20) // one that is not pinned
			}
			for {
				err := d.Gather(t.Context(), buf, reg, all)
				if err == nil {
					err = d.Scatter(t.Context(), reg, all, buf)
				}
				if err != nil {
					if !errors.Is(err, gpu.ErrLost) {
						t.Errorf("other error than loss: %v", err)
					}
					return
				}
			}
		})
	}
	time.Sleep(20 * time.Millisecond)
	launch(t, d, trap, stream, 0)
	wg.Wait()
	var lost *LostError
	require.ErrorAs(t, d.Lost(), &lost)
	require.Contains(t, lost.Cause.Name, "CUDA_ERROR_")
	for _, err := range []error{
		d.Gather(t.Context(), host.Bytes()[:4<<20], reg, all), d.Scatter(t.Context(), reg, all, host.Bytes()[:4<<20]), ev.Wait(t.Context()),
		second(d.Alloc(t.Context(), 1)), second(d.NewEvent()), second(d.Pin(make([]byte, 1<<20)[:0])), second(reg.Export()),
	} {
		require.Error(t, err)
	}
	require.ErrorIs(t, d.Gather(t.Context(), host.Bytes()[:4<<20], reg, all), gpu.ErrLost)
	require.ErrorIs(t, second(d.Alloc(t.Context(), 1)), gpu.ErrLost)
	require.ErrorIs(t, ev.Wait(t.Context()), gpu.ErrLost)
	require.NoError(t, host.Close())
	require.NoError(t, ev.Close())
	require.NoError(t, reg.Close())
	require.NoError(t, d.Close())
	fmt.Println("the process lives:", lost)
}

func second[T any](_ T, err error) error { return err }

// shared is what one process tells another in these tests.
type shared struct {
	Region, Event gpu.Handle
	Size          int64
}

// Another process imports a region and an event: it waits for the work in front of the
// event, sees the bytes, and writes its own.
func TestAnotherProcess(t *testing.T) {
	if os.Getenv("TIERD_TEST_SHARED") != "" {
		importer(t)
		return
	}
	d := open(t, Options{Tuning: &fixed})
	before, _, err := d.MemoryBytes()
	require.NoError(t, err)
	const size = 33<<20 + 1000
	reg, err := d.Alloc(t.Context(), size)
	require.NoError(t, err)
	want := noise(6, size)
	all := []gpu.Fragment{{Length: size}}
	require.NoError(t, d.Scatter(t.Context(), reg, all, want))
	ev, err := d.NewEvent()
	require.NoError(t, err)
	s := shared{Size: size}
	s.Region, err = reg.Export()
	require.NoError(t, err)
	s.Event, err = ev.Export()
	require.NoError(t, err)
	_, err = d.Import(t.Context(), s.Region)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	_, err = d.ImportEvent(t.Context(), s.Event)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	_, err = d.Import(t.Context(), s.Event)
	require.ErrorContains(t, err, `handle is of kind "cuda-ipc-event"`)
	b, err := json.Marshal(s)
	require.NoError(t, err)
	spin, stream := fault(t, d, "spin")

	cmd := again(t, "TestAnotherProcess", "TIERD_TEST_SHARED="+string(b))
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	await(t, out, "ready\n")
	launch(t, d, spin, stream, uint64(700*time.Millisecond))
	require.NoError(t, ev.Record(stream))
	_, err = in.Write([]byte("go"))
	require.NoError(t, err)
	in.Close()
	rest, err := io.ReadAll(out)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait(), "%s", rest)
	t.Logf("%s", rest)
	got := make([]byte, size)
	require.NoError(t, d.Gather(t.Context(), got, reg, all))
	require.True(t, bytes.Equal(noise(7, size), got), "what the other process wrote")

	killedImporter(t, d, string(b))
	require.NoError(t, d.Gather(t.Context(), got, reg, all), "the death of an importer changes nothing here")
	require.NoError(t, ev.Close())
	require.NoError(t, reg.Close())
	require.ErrorIs(t, ev.Wait(t.Context()), gpu.ErrClosed)
	after, _, err := d.MemoryBytes()
	require.NoError(t, err)
	require.InDelta(t, before, after, 8<<20, "no memory is left behind")
}

// killedImporter starts importers and kills them in the middle of their work.
func killedImporter(t *testing.T, d *Device, s string) {
	for range 2 {
		cmd := again(t, "TestAnotherProcess", "TIERD_TEST_SHARED="+s, "TIERD_TEST_KILLED=1")
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		await(t, out, "ready\n")
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, cmd.Process.Kill())
		require.Error(t, cmd.Wait())
	}
}

// await reads until what was written ends in text.
func await(t *testing.T, r io.Reader, text string) {
	var seen []byte
	b := make([]byte, 1)
	for !bytes.HasSuffix(seen, []byte(text)) {
		_, err := r.Read(b)
		require.NoError(t, err, "%s", seen)
		seen = append(seen, b[0])
	}
}

func importer(t *testing.T) {
	var s shared
	require.NoError(t, json.Unmarshal([]byte(os.Getenv("TIERD_TEST_SHARED")), &s))
	d, err := Open(t.Context(), 0, Options{Tuning: &fixed})
	require.NoError(t, err)
	for _, h := range []gpu.Handle{
		{Kind: gpu.HandleCUDA, Opaque: s.Region.Opaque, Offset: 34 << 20, Length: 1},
		{Kind: gpu.HandleCUDA, Opaque: s.Region.Opaque, Offset: 1, Length: 34 << 20},
		{Kind: gpu.HandleCUDA, Opaque: s.Region.Opaque, Offset: -1, Length: 1},
		{Kind: gpu.HandleCUDA, Opaque: s.Region.Opaque[1:], Length: 1},
		{Kind: gpu.HandleFile, Path: "/dev/null", Length: 1},
	} {
		_, err := d.Import(t.Context(), h)
		require.Error(t, err)
		require.NoError(t, d.Lost())
	}
	reg, err := d.Import(t.Context(), s.Region)
	require.NoError(t, err)
	ev, err := d.ImportEvent(t.Context(), s.Event)
	require.NoError(t, err)
	all := []gpu.Fragment{{Length: s.Size}}
	got := make([]byte, s.Size)
	if os.Getenv("TIERD_TEST_KILLED") != "" {
		fmt.Print("\nready\n")
		for {
			require.NoError(t, d.Gather(t.Context(), got, reg, all))
		}
	}
	require.NoError(t, d.Gather(t.Context(), got, reg, all))
	require.True(t, bytes.Equal(noise(6, int(s.Size)), got), "what the owner wrote")
	fmt.Print("\nready\n")
	_, err = io.ReadAll(os.Stdin)
	require.NoError(t, err)
	start := time.Now()
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, ev.Wait(short), context.DeadlineExceeded, "the owner's kernel still runs")
	require.NoError(t, ev.Wait(t.Context()))
	fmt.Println("waited for the owner's stream:", time.Since(start))
	require.Greater(t, time.Since(start), 300*time.Millisecond)
	require.NoError(t, d.Scatter(t.Context(), reg, all, noise(7, int(s.Size))))
	h, err := reg.Export()
	require.NoError(t, err)
	require.Equal(t, s.Region, h)
	require.NoError(t, ev.Close())
	require.NoError(t, reg.Close())
	require.NoError(t, d.Close())
}

// The stream of an engine in PyTorch: its tensor lies in our region, and its event keeps
// the store behind the kernels that fill it.
func TestPyTorchEngine(t *testing.T) {
	d := open(t, Options{Tuning: &fixed})
	if exec.Command("python3", "-c", "import torch").Run() != nil {
		t.Skip("skipped: python3 has no PyTorch here")
	}
	const size = 64 << 20
	reg, err := d.Alloc(t.Context(), size)
	require.NoError(t, err)
	h, err := reg.Export()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "python3", filepath.Join("testdata", "engine.py"))
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	dec, enc := json.NewDecoder(out), json.NewEncoder(in)
	require.NoError(t, enc.Encode(map[string]any{"handle": h.Opaque, "bytes": size}))
	var e struct{ Event []byte }
	require.NoError(t, dec.Decode(&e))
	ev, err := d.ImportEvent(t.Context(), gpu.Handle{Kind: gpu.HandleCUDAEvent, Opaque: e.Event})
	require.NoError(t, err)
	got := make([]byte, size)
	for round := 1; round <= 3; round++ {
		require.NoError(t, enc.Encode(map[string]any{"value": round}))
		var launched struct{ Launched bool }
		require.NoError(t, dec.Decode(&launched))
		start := time.Now()
		require.NoError(t, ev.Wait(t.Context()))
		t.Logf("round %d: waited %v for the engine's stream", round, time.Since(start))
		require.NoError(t, d.Gather(t.Context(), got, reg, []gpu.Fragment{{Length: size}}))
		require.Equal(t, size, bytes.Count(got, []byte{byte(round)}), "the store came after the engine's kernels")
		for i := range got {
			got[i] = byte(100 + round)
		}
		require.NoError(t, d.Scatter(t.Context(), reg, []gpu.Fragment{{Length: size}}, got))
		require.NoError(t, enc.Encode(map[string]any{"check": 100 + round}))
		var checked struct{ Same bool }
		require.NoError(t, dec.Decode(&checked))
		require.True(t, checked.Same, "the engine reads what was loaded")
	}
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Wait())
	require.NoError(t, ev.Close())
}

// Under MPS kernels of ours run beside those of an engine, and Separate does nothing.
func TestMPS(t *testing.T) {
	if os.Getenv("TIERD_TEST_MPS") != "" {
		d := open(t, Options{Separate: true})
		require.True(t, d.Info().MPS)
		require.False(t, d.opts.Separate)
		reg, err := d.Alloc(t.Context(), 1<<20)
		require.NoError(t, err)
		src, dst := noise(1, 1<<19), make([]byte, 1<<19)
		var frags []gpu.Fragment
		for at := int64(0); at < 1<<20; at += 8192 {
			frags = append(frags, gpu.Fragment{Offset: at, Length: 4096})
		}
		require.NoError(t, d.Scatter(t.Context(), reg, frags, src))
		require.NoError(t, d.Gather(t.Context(), dst, reg, frags))
		require.True(t, bytes.Equal(src, dst))
		return
	}
	d := open(t, Options{Separate: true, Tuning: &Tuning{Gather: Direction{8, never, never}, Scatter: Direction{8, never, never}}})
	if d.Info().MPS {
		t.Skip("this process is under MPS")
	}
	require.True(t, d.opts.Separate)
	control, err := exec.LookPath("nvidia-cuda-mps-control")
	if err != nil {
		t.Skip("skipped: no nvidia-cuda-mps-control here")
	}
	env := append(os.Environ(), "TIERD_TEST_MPS=1", "CUDA_MPS_PIPE_DIRECTORY="+t.TempDir(), "CUDA_MPS_LOG_DIRECTORY="+t.TempDir())
	mps := func(in string, args ...string) error {
		cmd := exec.CommandContext(t.Context(), control, args...)
		cmd.Env, cmd.Stdin = env, strings.NewReader(in)
		return cmd.Run()
	}
	require.NoError(t, mps("", "-d"))
	defer func() { require.NoError(t, mps("quit\n")) }()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMPS$", "-test.v", "-test.timeout=60s")
	cmd.Env = env
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestMPS")
}

// Allocations that lie at equal distances are no grid: the driver refuses a strided copy
// over several.
func TestStridedOverAllocations(t *testing.T) {
	d := open(t, Options{Tuning: &Tuning{Gather: Direction{8, never, 1}, Scatter: Direction{8, never, 1}}})
	const parts, page = 24, 64 << 10
	var regions []gpu.Region
	for range parts {
		r, err := d.Alloc(t.Context(), 2<<20)
		require.NoError(t, err)
		regions = append(regions, r)
	}
	j, err := gpu.Join(regions...)
	require.NoError(t, err)
	for _, at := range []int64{0, 1 << 20, 2<<20 - page} {
		var frags []gpu.Fragment
		for i := range parts {
			frags = append(frags, gpu.Fragment{Offset: j.Start(i) + at, Length: page})
		}
		abs, err := absolute(j, []*region{regions[0].(*region), regions[1].(*region)}, list{frags: frags[:2]})
		require.NoError(t, err)
		t.Logf("distance %d, seams %d", abs.frags[1].Offset-abs.frags[0].Offset, len(abs.seams))
		src, dst := noise(uint64(at), parts*page), make([]byte, parts*page)
		require.NoError(t, d.Scatter(t.Context(), j, frags, src))
		require.NoError(t, d.Gather(t.Context(), dst, j, frags))
		require.True(t, bytes.Equal(src, dst))
		for i, r := range regions {
			got := make([]byte, page)
			require.NoError(t, d.Gather(t.Context(), got, r, []gpu.Fragment{{Offset: at, Length: page}}))
			require.True(t, bytes.Equal(src[i*page:(i+1)*page], got), "part %d", i)
		}
	}
}
