package wasm

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
)

// cacheDir keeps compiled code for one run of the tests.
var cacheDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-wasm-test-")
	if err != nil {
		panic(err)
	}
	cacheDir = dir
	code := m.Run()
	os.RemoveAll(dir)
	if err := goleak.Find(); err != nil && code == 0 {
		os.Stderr.WriteString(err.Error())
		code = 1
	}
	os.Exit(code)
}

func load(t testing.TB, a *asm, o Options) *Module {
	t.Helper()
	m, err := Load(context.Background(), "test", a.bytes(), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close(context.Background())) })
	return m
}

func open(t testing.TB, m *Module) abi.SpecRule {
	t.Helper()
	r, err := m.Specs()[0].Open(nil)
	require.NoError(t, err)
	return r.(abi.SpecRule)
}

// round8 asks for 8 chunks.
var round8 = abi.Round{BlockTokens: 16, ChunkTokens: 16, PromptTokens: 128, StoredTokens: 128, BoundTokens: 127, Hi: 8}

func TestGoodModule(t *testing.T) {
	m := load(t, good(), Options{})
	require.Equal(t, "test", m.Name())
	require.Regexp(t, `^sha256:[0-9a-f]{64}$`, m.Digest())
	require.Len(t, m.Specs(), 1)
	require.Equal(t, &abi.Manifest{Name: "t", Version: "1", Kind: abi.KindSpec, Mask: abi.MaskCausal}, m.Specs()[0].Manifest())
	r := open(t, m)
	out := abi.NewBitmap(8)
	require.NoError(t, r.Reach(round8, out))
	require.NoError(t, r.Need(round8, out))
	span, err := r.Scan(round8, abi.NewStates(8), out)
	require.NoError(t, err)
	require.Zero(t, span)
	require.True(t, out.Empty())
}

// Every refusal says what was expected.
func TestRefusals(t *testing.T) {
	with := func(i asmImport) *asm {
		a := good()
		a.imports = append(a.imports, i)
		return a
	}
	retype := func(export string, params, results []byte, body ...any) *asm {
		a := good()
		f := a.find(export)
		f.params, f.results, f.body = params, results, code(body...)
		return a
	}
	noMemory := good()
	noMemory.memory = ""
	ownName := good()
	ownName.memory = "mem"
	imported := good()
	imported.pages, imported.data = 0, nil
	imported.imports = append(imported.imports, asmImport{module: "env", name: "memory", memory: true})
	tooMuch := good()
	tooMuch.pages = MemoryPagesMax + 1
	large := good()
	large.customs = ModuleBytesMax
	program := good()
	program.funcs = append(program.funcs, asmFunc{name: "_start"})
	spec := `{"name":"t","version":"1","kind":"spec","mask":"causal"}`
	for _, test := range []struct {
		name  string
		bytes []byte
		want  string
	}{
		{"empty", nil, `not WebAssembly: it starts with "", not "\x00asm"`},
		{"text", []byte("#!/bin/sh\n"), `not WebAssembly: it starts with "#!/b", not "\x00asm"`},
		{"component", []byte("\x00asm\x0d\x00\x01\x00"), "not a core WebAssembly module of version 1: its version bytes are 0d 00 01 00 (a component? this host takes core modules)"},
		{"truncated", good().bytes()[:60], "not a valid module: section import, byte 50: it announces 22 items of at least 1 bytes, and 10 bytes are left"},
		{"size", large.bytes(), "8388915 bytes; at most 8388608 are allowed: build without debug information (-ldflags='-s -w') and without encoding/json"},
		{"no marker", good().drop("kv_abi_1").bytes(), "no export kv_abi_1, the marker of ABI version 1; is it a tierd rule?"},
		{"other major", func() []byte {
			a := good()
			a.find("kv_abi_1").name = "kv_abi_2"
			return a.bytes()
		}(), "no export kv_abi_1, the marker of ABI version 1; it exports kv_abi_2, but this host speaks version 1 only: rebuild it with this version's SDK, or use a newer host"},
		{"no manifest", good().drop("kv_manifest").bytes(), "no export kv_manifest of type () -> (i64)"},
		{"no open", good().drop("kv_open").bytes(), "no export kv_open of type () -> (i64)"},
		{"no reach", good().drop("kv_reach").bytes(), "no export kv_reach of type (i32) -> (i64)"},
		{"no scan", good().drop("kv_scan").bytes(), "no export kv_scan of type (i32) -> (i64)"},
		{"no need", good().drop("kv_need").bytes(), "no export kv_need of type (i32) -> (i64), and rule t is of kind spec"},
		{"marker type", retype("kv_abi_1", nil, []byte{tI32}, i32Const(0)).bytes(), "export kv_abi_1 has type () -> (i32); ABI version 1 wants () -> ()"},
		{"reach type", retype("kv_reach", []byte{tI32, tI32}, []byte{tI64}, i64Const(0)).bytes(), "export kv_reach has type (i32,i32) -> (i64); ABI version 1 wants (i32) -> (i64)"},
		{"need type", retype("kv_need", []byte{tI64}, []byte{tI64}, i64Const(0)).bytes(), "export kv_need has type (i64) -> (i64); ABI version 1 wants (i32) -> (i64)"},
		{"unknown kv import", with(asmImport{module: "kv", name: "foo"}).bytes(), "it needs kv.foo; this host offers input, fail"},
		{"import type", func() []byte {
			a := good()
			a.imports[1].params = []byte{tI64}
			return a.bytes()
		}(), "it imports kv.fail with type (i64) -> (); this host offers (i32,i32) -> ()"},
		{"unknown module", with(asmImport{module: "env", name: "abort"}).bytes(), "it needs env.abort; this host offers the modules kv (input, fail) and wasi_snapshot_preview1"},
		{"unknown wasi", with(asmImport{module: "wasi_snapshot_preview1", name: "sock_open"}).bytes(), "it needs wasi_snapshot_preview1.sock_open, which is not in WASI preview 1"},
		{"imported memory", imported.bytes(), "it imports its memory as env.memory; a module must define and export its own"},
		{"memory not exported", noMemory.bytes(), `no export "memory"; a module must export its memory under that name`},
		{"memory under another name", ownName.bytes(), `no export "memory"; a module must export its memory under that name`},
		{"memory too large", tooMuch.bytes(), "not a valid module: section memory: min 257 pages (16 Mi) over limit of 256 pages (16 Mi)"},
		{"program", program.bytes(), "it exports _start, as a program does, and no _initialize; build it as a library (Go: -buildmode=c-shared)"},
		{"manifest traps", good().set("kv_manifest", opUnreachable).bytes(), "rule (loading): kv_manifest trapped: wasm error: unreachable"},
		{"manifest fails", good().set("kv_manifest", i64Const(-1)).bytes(), "rule (loading): kv_manifest failed and gave no reason"},
		{"manifest is not resumable", good().set("kv_manifest", i64Const(-2)).bytes(), "rule (loading): kv_manifest broke the ABI: it answered -2, which only kv_need may"},
		{"manifest outside memory", good().set("kv_manifest", viewOf(65530, 10)).bytes(), "rule (loading): kv_manifest broke the ABI: the view of 10 bytes at 65530 is not inside the memory of 65536 bytes"},
		{"manifest too long", good().set("kv_manifest", viewOf(0, manifestBytesMax+1)).bytes(), "kv_manifest: 262145 bytes; at most 262144 are read"},
		{"manifest is not JSON", good().manifest("rules: []").bytes(), "kv_manifest: invalid character 'r' looking for beginning of value"},
		{"manifest has unknown fields", good().manifest(`{"rules":[{"name":"t","colour":"red"}]}`).bytes(), `kv_manifest: json: unknown field "colour"`},
		{"manifest goes on", good().manifest(goodManifest + "{}").bytes(), "kv_manifest: more follows the JSON object at byte 69"},
		{"no rules", good().manifest(`{"rules":[]}`).bytes(), "kv_manifest: 0 rules; a module holds 1 to 64"},
		{"too many rules", good().manifest(`{"rules":[` + strings.Repeat(spec+",", 64) + spec + `]}`).bytes(), "kv_manifest: 65 rules; a module holds 1 to 64"},
		{"invalid manifest", good().manifest(`{"rules":[{"name":"t","version":"1","kind":"x"}]}`).bytes(), `kv_manifest: manifest of rule t: kind is "x"; it must be "spec" or "policy"`},
		{"rule twice", good().manifest(`{"rules":[` + spec + "," + spec + `]}`).bytes(), "kv_manifest: rule t is declared twice"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Load(context.Background(), "x.wasm", test.bytes, Options{})
			require.ErrorContains(t, err, "wasm module x.wasm: ")
			got := strings.TrimPrefix(err.Error(), "wasm module x.wasm: ")
			if strings.HasSuffix(test.want, ": ") { // the rest is the runtime's
				require.True(t, strings.HasPrefix(got, test.want), got)
				return
			}
			got, _, _ = strings.Cut(got, "\nwasm stack trace")
			require.Equal(t, test.want, got)
		})
	}
	_, err := Load(context.Background(), "x.wasm", good().bytes(), Options{PoolMax: -1})
	require.EqualError(t, err, "wasm module x.wasm: PoolMax is -1 and CompileTimeout is 2m0s; neither may be negative")
}

// A policy needs no kv_need, and WASI is there for who asks.
func TestPolicyAndWASI(t *testing.T) {
	a := good().drop("kv_need").manifest(`{"rules":[{"name":"p","version":"1","kind":"policy"}]}`)
	a.imports = append(a.imports, asmImport{
		module: "wasi_snapshot_preview1", name: "random_get",
		params: []byte{tI32, tI32}, results: []byte{tI32},
	})
	// Random numbers are fixed: every instance reads the same byte.
	a.set("kv_reach", call(2, scratch, 1), opDrop, viewOf(scratch, 1))
	m := load(t, a, Options{})
	r, err := m.Specs()[0].Open(nil)
	require.NoError(t, err)
	_, isSpec := r.(abi.SpecRule)
	require.False(t, isSpec)
	var first abi.Bitmap
	for range 3 {
		p, release := r.(Pinner).Pin()
		out := abi.NewBitmap(8)
		require.NoError(t, p.Reach(round8, out))
		if first == nil {
			first = out
		}
		require.Equal(t, first, out)
		defer release() // keep the instance, so that the next one is fresh
	}
}

// What a guest may answer, and what each wrong answer is called.
func TestAnswers(t *testing.T) {
	fail := func(text string) []byte { return call(fnFail, scratch, int64(len(text))) }
	store := func(at int64, value int64) []byte { return code(i32Const(at), i64Const(value), opI64Store, 3, 0) }
	for _, test := range []struct {
		name, export string
		body         []byte
		want         string // "" for an answer
		clean        bool   // the instance goes on
	}{
		{"clean failure", "kv_reach", code(store(scratch, 0x6f6e), fail("no"), i64Const(-1)), "rule t: kv_reach: no", true},
		{"failure without reason", "kv_reach", i64Const(-1), "rule t: kv_reach failed and gave no reason", true},
		{"reason that is not text", "kv_reach", code(store(scratch, 0xff), fail("x"), i64Const(-1)), "rule t: kv_reach: \uFFFD", true},
		{"no resume", "kv_need", i64Const(-2), abi.ErrNoResume.Error(), true},
		{"no resume of reach", "kv_reach", i64Const(-2), "rule t: kv_reach broke the ABI: it answered -2, which only kv_need may", false},
		{"other negative", "kv_need", i64Const(-3), "rule t: kv_need broke the ABI: it answered -3; an answer is a view, -1 or, of kv_need, -2", false},
		{"short view", "kv_reach", viewOf(scratch, 0), "rule t: kv_reach broke the ABI: the view has 0 bytes; exactly 1 are expected", false},
		{"long view", "kv_reach", viewOf(scratch, 2), "rule t: kv_reach broke the ABI: the view has 2 bytes; exactly 1 are expected", false},
		{"scan view", "kv_scan", viewOf(scratch, 8), "rule t: kv_scan broke the ABI: the view has 8 bytes; exactly 9 are expected", false},
		{"view outside", "kv_reach", viewOf(65536, 1), "rule t: kv_reach broke the ABI: the view of 1 bytes at 65536 is not inside the memory of 65536 bytes", false},
		{"view far outside", "kv_reach", viewOf(1<<31-1, 1), "rule t: kv_reach broke the ABI: the view of 1 bytes at 2147483647 is not inside the memory of 65536 bytes", false},
		{"last byte", "kv_reach", viewOf(65535, 1), "", true},
		{"too many usable", "kv_scan", code(store(scratch, 9), viewOf(scratch, 9)), "rule t: kv_scan broke the ABI: 9 chunks are usable of 8", false},
		{"unknown flags", "kv_scan", code(store(scratch, 1<<33), viewOf(scratch, 9)), "rule t: kv_scan broke the ABI: flags are 0x2; only bit 0, deferred, is known", false},
		{"deferred", "kv_scan", code(store(scratch, 1<<32), viewOf(scratch, 9)), "", true},
		{"trap", "kv_reach", code(opUnreachable), "rule t: kv_reach trapped: wasm error: unreachable", false},
		{"reason outside", "kv_reach", code(call(fnFail, 65530, 7), i64Const(-1)), "rule t: kv_reach trapped: fail(65530, 7): the reason is not inside the memory of 65536 bytes", false},
		{"input outside", "kv_reach", code(call(fnInput, 65530, 200), opDrop, i64Const(-1)), "rule t: kv_reach trapped: input(65530, 200): the buffer is not inside the memory of 65536 bytes", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			{
				m := load(t, good().set(test.export, test.body), Options{})
				r := open(t, m)
				before := m.pool.free[0]
				var err error
				out := abi.NewBitmap(8)
				switch test.export {
				case "kv_reach":
					err = r.Reach(round8, out)
				case "kv_scan":
					_, err = r.Scan(round8, abi.NewStates(8), out)
				case "kv_need":
					err = r.Need(round8, out)
				}
				if test.want == "" {
					require.NoError(t, err)
				} else {
					require.Error(t, err)
					got, _, _ := strings.Cut(err.Error(), "\nwasm stack trace")
					require.Equal(t, test.want, got)
				}
				require.Equal(t, test.clean, len(m.pool.free) == 1 && m.pool.free[0] == before)
				require.Equal(t, test.clean, !before.mod.IsClosed())
			}
		})
	}
}

func TestPadding(t *testing.T) {
	m := load(t, good().set("kv_reach", i32Const(scratch), i32Const(0x20), opI32Store, 2, 0, viewOf(scratch, 1)), Options{})
	r := open(t, m)
	round := round8
	round.Hi = 5
	require.EqualError(t, r.Reach(round, abi.NewBitmap(5)), "rule t: kv_reach broke the ABI: a bit at or beyond 5 is set: the padding of a bitmap is 0")
	round.Hi = 6
	out := abi.NewBitmap(6)
	require.NoError(t, r.Reach(round, out))
	require.Equal(t, abi.Bitmap{0x20}, out)
	round.Hi, round.Lo = 4, 5
	require.EqualError(t, r.Reach(round, out), "rule t: round asks for chunks 5 to 4; Lo <= Hi <= 1048576")
	round.Lo, round.Hi = 0, abi.MaxChunks+1
	_, err := r.Scan(round, nil, nil)
	require.EqualError(t, err, "rule t: round asks for chunks 0 to 1048577; Lo <= Hi <= 1048576")
	require.EqualError(t, r.Need(round, nil), "rule t: round asks for chunks 0 to 1048577; Lo <= Hi <= 1048576")
}

func TestOpenAnswers(t *testing.T) {
	for want, body := range map[string][]byte{
		"rule t: kv_open failed and gave no reason":                                                        i64Const(-1),
		"rule t: kv_open broke the ABI: it answered -2, which only kv_need may":                            i64Const(-2),
		"rule t: kv_open broke the ABI: it answered the handle 2147483648; a handle is at most 2147483647": i64Const(1 << 31),
	} {
		m := load(t, good().set("kv_open", body), Options{})
		_, err := m.Specs()[0].Open(nil)
		require.EqualError(t, err, want)
	}
	m := load(t, good(), Options{})
	_, err := m.Specs()[0].Open([]uint64{1})
	require.EqualError(t, err, "rule t takes 0 parameters; 1 were given")
}

// The input is what the contract says: a record of parameters, a Round, a Round and a
// table. The guest answers with the bytes it was given.
func TestInputs(t *testing.T) {
	a := good().manifest(`{"rules":[{"name":"t","version":"1","kind":"policy","params":[{"name":"x","min":0,"max":9},{"name":"y","min":0,"max":9}]}]}`)
	// reason = input, for each call
	tell := func(n int64) []byte {
		return code(call(fnInput, scratch, n), opDrop, call(fnFail, scratch, n), i64Const(-1))
	}
	a.set("kv_open", tell(24))
	a.set("kv_scan", tell(112))
	m := load(t, a, Options{})
	_, err := m.Specs()[0].Open([]uint64{7, 8})
	var g *GuestError
	require.ErrorAs(t, err, &g)
	require.Equal(t, "kv_open", g.Func)
	require.Equal(t, "\x18\x00\x00\x00\x00\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00", g.Reason)

	m = load(t, good().set("kv_scan", tell(112)), Options{})
	states, err := abi.ParseStates("HPRMMMMM")
	require.NoError(t, err)
	text := round8 // whose bytes are all ASCII: a reason is text
	text.PromptTokens, text.StoredTokens = 127, 126
	_, err = open(t, m).Scan(text, states, abi.NewBitmap(8))
	require.ErrorAs(t, err, &g)
	require.Equal(t, string(states.AppendWire(text.AppendWire(nil), 8)), g.Reason)
}

func TestInputTellsItsLength(t *testing.T) {
	// A buffer of 1 byte is too small: nothing is copied, the length comes back.
	body := code(i32Const(scratch), call(fnInput, scratch+8, 1), opI32Store, 2, 0, viewOf(scratch, 1))
	m := load(t, good().set("kv_reach", body), Options{})
	out := abi.NewBitmap(8)
	require.NoError(t, open(t, m).Reach(round8, out))
	require.EqualValues(t, abi.RoundBytes, out[0])
}

func TestReasonIsCut(t *testing.T) {
	m := load(t, good().set("kv_reach", call(fnFail, 0, 65536), i64Const(-1)), Options{})
	err := open(t, m).Reach(round8, abi.NewBitmap(8))
	var g *GuestError
	require.ErrorAs(t, err, &g)
	require.Len(t, g.Reason, ReasonBytesMax)
}

func TestMemoryStopsAtItsLimit(t *testing.T) {
	grow := func(pages int64, op int) []byte {
		return code(i32Const(pages), opMemoryGrow, 0, i32Const(-1), op, opIf, blockVoid, opUnreachable, opEnd)
	}
	body := code(grow(MemoryPagesMax-1, opI32Eq), grow(1, opI32Ne), viewOf(scratch, 1))
	m := load(t, good().set("kv_reach", body), Options{})
	p, release := open(t, m).(Pinner).Pin()
	defer release()
	require.NoError(t, p.Reach(round8, abi.NewBitmap(8)))
	require.EqualValues(t, MemoryPagesMax<<16, p.(boundSpec).in.mem.Size())
}

// A table grows to its bound and no further, whether the module gives none or a higher
// one; a lower one stands.
func TestTablesStopAtTheirLimit(t *testing.T) {
	const refNull, tableGrow = 0xd0, 0x0f
	grow := func(n int64, op int) []byte {
		return code(refNull, 0x70, i32Const(n), 0xfc, tableGrow, 0, i32Const(-1), op, opIf, blockVoid, opUnreachable, opEnd)
	}
	for _, test := range []struct {
		table []byte
		limit int64
	}{
		{code(0x70, 0, 1), fuel.TableElementsMax},
		{code(0x70, 1, 1, uleb(1<<32-1)), fuel.TableElementsMax},
		{code(0x70, 1, 1, 7), 7},
	} {
		a := good().set("kv_reach", grow(test.limit-1, opI32Eq), grow(1, opI32Ne), viewOf(scratch, 1))
		a.table = test.table
		p, release := open(t, load(t, a, Options{})).(Pinner).Pin()
		require.NoError(t, p.Reach(round8, abi.NewBitmap(8)))
		release()
	}
}

// What a guest prints before it traps is part of the message.
func TestStderrIsKept(t *testing.T) {
	in := &instance{module: &Module{}}
	in.stderr.Write([]byte("panic: x\n"))
	in.stderr.Write(make([]byte, 10*ReasonBytesMax))
	require.Len(t, in.stderr.text, ReasonBytesMax)
	in.stderr.text = in.stderr.text[:9]
	require.EqualError(t, in.trap("t", "kv_reach", errors.New("exit")), `rule t: kv_reach trapped: exit; it printed: panic: x`)
}

func FuzzDecodeManifest(f *testing.F) {
	f.Add([]byte(goodManifest))
	f.Add([]byte(`{"rules":[{"name":"p","version":"1","kind":"policy","params":[{"name":"x","min":0,"max":3,"enum":["a"]}]}]}`))
	f.Add([]byte(`{"rules":[]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		rules, err := decodeManifest(in)
		if err != nil {
			return
		}
		require.NotEmpty(t, rules)
		for i := range rules {
			require.NoError(t, rules[i].Validate())
		}
	})
}

// No bytes, however close to a module, make Load panic.
func FuzzLoad(f *testing.F) {
	f.Add(good().bytes())
	f.Add(good().drop("kv_need").bytes())
	f.Add([]byte("\x00asm\x01\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := Load(context.Background(), "fuzz", in, Options{})
		if err == nil {
			require.NoError(t, m.Close(context.Background()))
		}
	})
}

var rewriteFiles = flag.Bool("rewrite", false, "write the modules that other packages' tests read from testdata")

// The modules in ../testdata are made here: policies p, and p and q, that do nothing.
func TestTestdata(t *testing.T) {
	const p, q = `{"name":"p","version":"1","kind":"policy"}`, `{"name":"q","version":"1","kind":"policy"}`
	for file, rules := range map[string]string{"one.wasm": p, "two.wasm": p + "," + q} {
		path, want := filepath.Join("..", "testdata", file), good().drop("kv_need").manifest(`{"rules":[`+rules+`]}`).bytes()
		if *rewriteFiles {
			require.NoError(t, os.WriteFile(path, want, 0o644))
		}
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, want, got, "run go test ./plugins/wasm -run TestTestdata -rewrite")
	}
}
