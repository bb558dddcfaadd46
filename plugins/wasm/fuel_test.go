package wasm

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
)

// runaways are ways in which kv_reach does not end, or not soon.
func runaways() map[string]*asm {
	loop := func(body ...any) []byte { return code(opLoop, blockVoid, code(body...), opBr, 0, opEnd, i64Const(-1)) }
	big := int64(MemoryPagesMax << 16)
	spin := good().set("kv_reach", loop())
	recurse := good().set("kv_reach", opLocalGet, 0, opCall, 5) // itself: two imports and three functions stand before it
	grow := good().set("kv_reach", loop(i32Const(1), opMemoryGrow, 0, opDrop))
	fill := good().set("kv_reach", loop(i32Const(0), i32Const(7), i32Const(big), 0xfc, 11, 0))
	fill.pages = MemoryPagesMax
	move := good().set("kv_reach", loop(i32Const(1), i32Const(0), i32Const(big-1), 0xfc, 10, 0, 0))
	move.pages = MemoryPagesMax
	input := good().set("kv_reach", loop(call(fnInput, scratch, 4096), opDrop))
	failing := good().set("kv_reach", loop(call(fnFail, 0, 512)))
	wasi := func(name string, params int, args ...int64) *asm {
		a := good()
		a.pages = MemoryPagesMax
		a.imports = append(a.imports, asmImport{
			module: "wasi_snapshot_preview1", name: name,
			params: []byte(strings.Repeat("\x7f", params)), results: []byte{tI32},
		})
		var body []byte
		for _, v := range args {
			body = append(body, i32Const(v)...)
		}
		return a.set("kv_reach", loop(body, opCall, 2, opDrop))
	}
	return map[string]*asm{
		"spin": spin, "recurse": recurse, "grow": grow, "fill": fill, "copy": move, "input": input, "fail": failing,
		"random": wasi("random_get", 2, 0, 4096), "write": wasi("fd_write", 4, 2, 0, 4096, 0), "poll": wasi("poll_oneoff", 4, 0, 65536, 100, 0),
		"paths": wasi("path_create_directory", 3, 3, 0, big),
	}
}

// A guest that does not end is ended when its fuel is burnt, whatever it does, and the
// instance is replaced. What it has burnt is the same in every instance.
func TestRunawaysEnd(t *testing.T) {
	for name, a := range runaways() {
		t.Run(name, func(t *testing.T) {
			r := open(t, load(t, a, Options{}))
			for range 2 {
				p, release := r.(Pinner).Pin()
				began := time.Now()
				err := p.Reach(round8, abi.NewBitmap(8))
				t.Logf("%v for %d units", time.Since(began), p.(Metered).Fuel())
				if name == "recurse" { // whichever comes first
					var trap *TrapError
					var out *FuelError
					require.True(t, errors.As(err, &trap) || errors.As(err, &out), "%v", err)
				} else {
					require.Equal(t, &FuelError{Rule: "t", Func: "kv_reach", Budget: CallUnits + 8*ChunkUnits}, err)
				}
				require.LessOrEqual(t, p.(Metered).Fuel(), uint64(CallUnits+8*ChunkUnits))
				require.NoError(t, p.(abi.SpecRule).Need(round8, abi.NewBitmap(8)), "the instance is replaced")
				require.Less(t, p.(Metered).Fuel(), uint64(100))
				release()
			}
		})
	}
}

// A collection that is asked for while a guest runs away ends with the guest.
func TestCollectorIsNotHeld(t *testing.T) {
	p, release := open(t, load(t, runaways()["spin"], Options{})).(Pinner).Pin()
	defer release()
	began, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		close(began)
		for range 3 {
			runtime.GC()
		}
	}()
	<-began
	for range 20 {
		require.Error(t, p.Reach(round8, abi.NewBitmap(8)))
	}
	<-ended
}

// Every function that the host calls has a budget, and the message names it.
func TestBudgets(t *testing.T) {
	spin := code(opLoop, blockVoid, opBr, 0, opEnd)
	for export, where := range map[string]string{"kv_manifest": "kv_manifest", "_initialize": "_initialize", "start": "the start function"} {
		a := good()
		if strings.HasPrefix(export, "kv_") {
			a.set(export, spin, i64Const(-1))
		} else {
			a.funcs = append(a.funcs, asmFunc{name: export, body: spin})
			a.start = export == "start"
		}
		_, err := Load(context.Background(), "x.wasm", a.bytes(), Options{})
		require.EqualError(t, err, "wasm module x.wasm: rule (loading): "+where+" was ended after the 16777216 units of fuel that it had; "+
			"does a loop or a recursion of it not end? If it does, work on whole words of states and bitmaps, as the SDK's functions for ranges do, not on single chunks")
	}
	m := load(t, good().set("kv_open", spin, i64Const(0)), Options{})
	_, err := m.Specs()[0].Open(nil)
	require.Equal(t, &FuelError{Rule: "t", Func: "kv_open", Budget: SetupUnits}, err)

	// A call about more chunks has more.
	r := open(t, load(t, good().set("kv_scan", spin, i64Const(0)), Options{}))
	round := round8
	round.Hi = 1000
	_, err = r.Scan(round, abi.NewStates(1000), abi.NewBitmap(1000))
	require.Equal(t, &FuelError{Rule: "t", Func: "kv_scan", Budget: CallUnits + 1000*ChunkUnits}, err)
	round.StoredTokens = 5000 * round.ChunkTokens
	_, err = r.Scan(round, abi.NewStates(1000), abi.NewBitmap(1000))
	require.Equal(t, &FuelError{Rule: "t", Func: "kv_scan", Budget: CallUnits + 5000*ChunkUnits}, err)
	var clock interface{ Timeout() bool }
	require.False(t, errors.As(err, &clock), "a rule that runs away is wrong, not slow")
}

// A start function runs, under fuel, before anything else.
func TestStartFunction(t *testing.T) {
	// It writes a usable chunk to where kv_scan's answer lies.
	a := good()
	a.funcs = append(a.funcs, asmFunc{name: "begin", body: code(i32Const(scratch), i32Const(3), opI32Store, 2, 0)})
	a.start = true
	span, err := open(t, load(t, a, Options{})).Scan(round8, abi.NewStates(8), abi.NewBitmap(8))
	require.NoError(t, err)
	require.EqualValues(t, 3, span.Usable)
}

// shippedRules opens every rule of the shipped module with its smallest parameters.
func shippedRules(t testing.TB) (rules []specRule) {
	for _, s := range shipped(t, Options{}).Specs() {
		var params []uint64
		for _, p := range s.Manifest().Params {
			params = append(params, p.Min)
		}
		if s.Manifest().Kind != abi.KindSpec {
			continue
		}
		r, err := s.Open(params)
		require.NoError(t, err)
		rules = append(rules, r.(specRule))
	}
	return rules
}

// The rewritten module answers what the plain one does.
func TestFuelChangesNothing(t *testing.T) {
	metered := shippedRules(t)
	var plain []specRule
	plainly(func() {
		for _, r := range shippedRules(t) {
			require.NoError(t, r.Reach(round8, abi.NewBitmap(8))) // its instance is made here
			plain = append(plain, r)
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		q := drawQuestion(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)), metered)
		for i, r := range metered {
			require.Equal(t, q.ask(plain[i]), q.ask(r))
		}
	})
}

// burns asks a fresh instance the same questions and returns what each has burnt.
func burns(t testing.TB) (units []uint64) {
	ask := func(r specRule) {
		p, release, err := r.Fresh()
		require.NoError(t, err)
		defer release()
		require.Zero(t, p.(Metered).Fuel())
		rnd := rand.New(rand.NewPCG(7, 7))
		for range 300 {
			if a := drawQuestion(rnd, []specRule{r}).ask(p); a.err != nil {
				require.ErrorIs(t, a.err, abi.ErrNoResume)
			}
			units = append(units, p.(Metered).Fuel())
		}
	}
	for _, r := range shippedRules(t) {
		ask(r)
	}
	return units
}

// What calls burn is the same in another instance, in another process, and while the
// collectors of host and guest are busy.
func TestBurnIsDeterministic(t *testing.T) {
	const child = "TIERD_TEST_BURNS"
	want := burns(t)
	if os.Getenv(child) != "" {
		require.NoError(t, json.NewEncoder(os.Stdout).Encode(want))
		return
	}
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	}()
	require.Equal(t, want, burns(t))
	close(stop)
	<-done

	cmd := exec.Command(os.Args[0], "-test.run=^TestBurnIsDeterministic$")
	cmd.Env = append(os.Environ(), child+"=1", "GOGC=20")
	out, err := cmd.Output()
	require.NoError(t, err, "%s", out)
	var other []uint64
	require.NoError(t, json.NewDecoder(strings.NewReader(string(out))).Decode(&other))
	require.Equal(t, want, other)
}

// Plain and rewritten code of the same module do not meet in the cache, and the second
// load of a module finds the first one's.
func TestCacheTellsRewrittenCodeApart(t *testing.T) {
	dir := t.TempDir()
	entries := func() (n int) {
		require.NoError(t, os.CopyFS(t.TempDir(), os.DirFS(dir))) // it can be read
		versions, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, v := range versions {
			files, err := os.ReadDir(dir + "/" + v.Name())
			require.NoError(t, err)
			n += len(files)
		}
		return n
	}
	spin := runaways()["spin"]
	load(t, spin, Options{CacheDir: dir})
	first := entries()
	r := open(t, load(t, spin, Options{CacheDir: dir}))
	require.Equal(t, first, entries(), "the second load compiles nothing")
	plainly(func() { load(t, spin, Options{CacheDir: dir}) })
	require.Equal(t, first+1, entries())
	var out *FuelError
	require.ErrorAs(t, r.Reach(round8, abi.NewBitmap(8)), &out, "rewritten code, from the cache")
}

func TestFresh(t *testing.T) {
	// kv_reach counts its calls in memory and answers with the count.
	counting := code(i32Const(scratch), i32Const(scratch), 0x28, 2, 0, i32Const(1), 0x6a, opI32Store, 2, 0, viewOf(scratch, 1))
	m := load(t, good().set("kv_reach", counting), Options{})
	r := open(t, m)
	ask := func(r abi.Rule) uint64 {
		out := abi.NewBitmap(8)
		require.NoError(t, r.Reach(round8, out))
		return out[0]
	}
	require.EqualValues(t, 1, ask(r))
	for range 2 {
		f, release, err := r.(Fresher).Fresh()
		require.NoError(t, err)
		require.Implements(t, (*abi.SpecRule)(nil), f)
		require.EqualValues(t, 1, ask(f))
		require.EqualValues(t, 2, ask(f))
		require.Positive(t, f.(Metered).Fuel())
		release()
		release()
		require.Error(t, f.Reach(round8, abi.NewBitmap(8)))
	}
	require.EqualValues(t, 2, ask(r), "the pool has its own instance still")
	require.Zero(t, m.pool.pinned)
	require.NoError(t, m.Close(context.Background()))
	_, _, err := r.(Fresher).Fresh()
	require.EqualError(t, err, "rule t: wasm module is closed")
}

func TestDescribe(t *testing.T) {
	a := good()
	m := load(t, a, Options{})
	require.Equal(t, len(a.bytes()), m.Size())
	text := func(s []Signature) (lines []string) {
		for _, f := range s {
			lines = append(lines, f.String())
		}
		return lines
	}
	imports := []string{"kv.input (i32,i32) -> (i32)", "kv.fail (i32,i32) -> ()"}
	exports := []string{"kv_abi_1 () -> ()", "kv_manifest () -> (i64)", "kv_open () -> (i64)", "kv_reach (i32) -> (i64)", "kv_scan (i32) -> (i64)", "kv_need (i32) -> (i64)"}
	require.Equal(t, imports, text(m.Imports()))
	require.Equal(t, exports, text(m.Exports()))
	i, e, err := Describe(a.bytes())
	require.NoError(t, err)
	require.Equal(t, m.Imports(), i)
	require.Equal(t, m.Exports(), e)

	a.imports = append(a.imports, asmImport{module: "env", name: "abort"})
	a.set("kv_reach", 0xff)
	_, err = Load(context.Background(), "x", a.bytes(), Options{})
	require.Error(t, err)
	i, _, err = Describe(a.bytes())
	require.NoError(t, err)
	require.Equal(t, append(imports, "env.abort () -> ()"), text(i))
	_, _, err = Describe([]byte("hello"))
	require.EqualError(t, err, `not WebAssembly: it starts with "hell", not "\x00asm"`)
	_, _, err = Describe(a.bytes()[:60])
	require.ErrorContains(t, err, "not a valid module: section import")
}

// The names that the host adds are its own.
func TestReservedNames(t *testing.T) {
	a := good()
	a.funcs = append(a.funcs, asmFunc{name: fuel.Counter})
	_, err := Load(context.Background(), "x", a.bytes(), Options{})
	require.ErrorContains(t, err, `it exports "tierd:fuel"; names that begin with "tierd:" are the host's`)
}
