package wasm_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm"
)

// A raw is an instance of a guest that is called without the host, so that it can be given
// inputs that the host never sends.
type raw struct {
	mod    api.Module
	input  []byte
	length int // what input answers; -1 for the length of the input
	reason string
}

var le = binary.LittleEndian

func newRaw(t testing.TB, file string) *raw {
	t.Helper()
	code, err := os.ReadFile(file)
	require.NoError(t, err)
	ctx := context.Background()
	cache, err := wazero.NewCompilationCacheWithDir(filepath.Join(guestsDir, "..", "compiled"))
	require.NoError(t, err)
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithMemoryLimitPages(wasm.MemoryPagesMax).WithCompilationCache(cache))
	t.Cleanup(func() { require.NoError(t, r.Close(ctx)); require.NoError(t, cache.Close(ctx)) })
	wasi_snapshot_preview1.MustInstantiate(ctx, r)
	g := &raw{length: -1}
	_, err = r.NewHostModuleBuilder("kv").
		NewFunctionBuilder().WithFunc(func(_ context.Context, m api.Module, ptr, room uint32) uint32 {
		if len(g.input) <= int(room) {
			m.Memory().Write(ptr, g.input)
		}
		if g.length >= 0 {
			return uint32(g.length)
		}
		return uint32(len(g.input))
	}).Export("input").
		NewFunctionBuilder().WithFunc(func(_ context.Context, m api.Module, ptr, n uint32) {
		b, _ := m.Memory().Read(ptr, n)
		g.reason = string(b)
	}).Export("fail").Instantiate(ctx)
	require.NoError(t, err)
	g.mod, err = r.InstantiateWithConfig(ctx, code, wazero.NewModuleConfig().WithStartFunctions("_initialize"))
	require.NoError(t, err)
	return g
}

// call returns the answer, or the bytes of the view that it is.
func (g *raw) call(fn string, handle int32, input []byte) (answer int64, view []byte, err error) {
	g.input, g.reason = input, ""
	args := []uint64{uint64(uint32(handle))}
	if fn == "kv_open" {
		args = nil
	}
	res, err := g.mod.ExportedFunction(fn).Call(context.Background(), args...)
	if err != nil {
		return 0, nil, err
	}
	answer = int64(res[0])
	if fn != "kv_open" && answer >= 0 {
		b, ok := g.mod.Memory().Read(uint32(answer>>32), uint32(answer))
		if !ok {
			return 0, nil, fmt.Errorf("the view is outside of the memory")
		}
		view = append([]byte{}, b...)
	}
	return answer, view, nil
}

// record returns the input of kv_open.
func record(index uint32, params ...uint64) []byte {
	b := le.AppendUint32(nil, uint32(8+8*len(params)))
	b = le.AppendUint32(b, index)
	for _, p := range params {
		b = le.AppendUint64(b, p)
	}
	return b
}

// longer returns the record of a round as a newer minor version has it, with extra bytes at
// its end.
func longer(r abi.Round, extra int) []byte {
	b := r.AppendWire(nil)
	le.PutUint32(b, uint32(abi.RoundBytes+extra))
	for range extra {
		b = append(b, 0xee)
	}
	return b
}

var sdkRound = abi.Round{
	BlockTokens: 4, ChunkTokens: 4, PromptTokens: 400, StoredTokens: 400, ResumeTokens: 399,
	AlignTokens: 40, BoundTokens: 399, Lo: 3, Hi: 99,
}

// A record of a newer, longer version is understood, whatever its length.
func TestGuestsReadNewerRecords(t *testing.T) {
	states := abi.NewStates(sdkRound.Chunks())
	states.Fill(0, 50, abi.Hit)
	states.Put(20, abi.Retry)
	states.Put(41, abi.Pending)
	table := states.AppendWire(nil, sdkRound.Chunks())
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			g := newRaw(t, guestFile(t, "window-"+language+".wasm"))
			handle, _, err := g.call("kv_open", 0, record(0, 41))
			require.NoError(t, err)
			require.Zero(t, handle)
			for _, fn := range []string{"kv_reach", "kv_scan", "kv_need"} {
				_, want, err := g.call(fn, 0, append(longer(sdkRound, 0), table...))
				require.NoError(t, err)
				require.NotEmpty(t, want)
				for _, extra := range []int{1, 5, 8, 800, 4096 - abi.RoundBytes} {
					_, got, err := g.call(fn, 0, append(longer(sdkRound, extra), table...))
					require.NoError(t, err)
					require.Equal(t, want, got, "%s, %d bytes more: %s", fn, extra, g.reason)
				}
			}
		})
	}
}

// What a guest cannot read it refuses with a reason, in the same words in every language,
// and goes on.
func TestGuestsRefuse(t *testing.T) {
	with := func(change func(r *abi.Round)) []byte {
		r := sdkRound
		change(&r)
		return r.AppendWire(nil)
	}
	size := func(n uint32) []byte {
		b := sdkRound.AppendWire(nil)
		le.PutUint32(b, n)
		return b
	}
	cases := []struct {
		fn     string
		handle int32
		input  []byte
		want   string
	}{
		{"kv_open", 0, record(0, 1), "parameter window is 1; it must be 2 to 1048576 tokens"},
		{"kv_open", 0, record(0, 1<<20+1), "parameter window is 1048577; it must be 2 to 1048576 tokens"},
		{"kv_open", 0, record(0, 1<<63), "parameter window is 9223372036854775808; it must be 2 to 1048576 tokens"},
		{"kv_open", 0, record(0), "takes 1 parameters; 0 were given"},
		{"kv_open", 0, record(0, 5, 6), "takes 1 parameters; 2 were given"},
		{"kv_open", 0, record(1, 5), "kv_open: rule index is 1; this module has 1 rules"},
		{"kv_open", 0, nil, "kv_open: 0 bytes are not a record of size, rule index and parameters"},
		{"kv_open", 0, record(0, 5)[:12], "kv_open: 12 bytes are not a record of size, rule index and parameters"},
		{"kv_reach", 7, size(104), "handle 7 is not open; this instance opened 1"},
		{"kv_reach", 0, size(104)[:7], "round record: size 0 in 7 bytes; version 1 reads 104 to 4096"},
		{"kv_reach", 0, size(96), "round record: size 96 in 104 bytes; version 1 reads 104 to 4096"},
		{"kv_need", 0, size(112), "round record: size 112 in 104 bytes; version 1 reads 104 to 4096"},
		{"kv_scan", 0, size(4104), "round record: size 4104 in 104 bytes; version 1 reads 104 to 4096"},
		{"kv_reach", 0, with(func(r *abi.Round) { r.Lo = 100 }), "round: chunks 100 to 99 are no range below 1048576"},
		{"kv_need", 0, with(func(r *abi.Round) { r.Hi = 1<<20 + 1 }), "round: chunks 3 to 1048577 are no range below 1048576"},
		{"kv_scan", 0, sdkRound.AppendWire(nil), "kv_scan: the states of 96 chunks are 24 bytes, but only 0 follow the round"},
	}
	for _, language := range languages {
		t.Run(language, func(t *testing.T) {
			g := newRaw(t, guestFile(t, "window-"+language+".wasm"))
			open, _, err := g.call("kv_open", 0, record(0, 9))
			require.NoError(t, err)
			require.Zero(t, open)
			for _, c := range cases {
				answer, _, err := g.call(c.fn, c.handle, c.input)
				require.NoError(t, err, c.want)
				require.EqualValues(t, -1, answer, c.want)
				switch {
				case strings.HasPrefix(c.want, "takes"): // a name comes before it
					require.Contains(t, g.reason, c.want)
				case language == "go" && strings.HasPrefix(c.want, "round record:"): // in the words of package abi
					require.Contains(t, g.reason, "round record: ")
				default:
					require.Equal(t, c.want, strings.TrimPrefix(g.reason, "rule my-window: "))
				}
			}
			g.length = 266241
			answer, _, err := g.call("kv_reach", 0, nil)
			require.NoError(t, err)
			require.EqualValues(t, -1, answer)
			require.Equal(t, "input of 266241 bytes; at most 266240 are read", g.reason)
			g.length = -1
			answer, view, err := g.call("kv_reach", 0, sdkRound.AppendWire(nil))
			require.NoError(t, err)
			require.Positive(t, answer)
			require.Len(t, view, 12)
		})
	}
}

// An instance opens as many rules as the host asks of one, and refuses the next; refusing
// often takes no memory.
func TestGuestsHandles(t *testing.T) {
	for _, language := range languages[1:] { // in Go the table grows
		t.Run(language, func(t *testing.T) {
			g := newRaw(t, guestFile(t, "window-"+language+".wasm"))
			const handles = 4096 // the host's instanceHandlesMax
			for i := range handles {
				handle, _, err := g.call("kv_open", 0, record(0, uint64(2+i)))
				require.NoError(t, err)
				require.EqualValues(t, i, handle)
			}
			before := g.mod.Memory().Size()
			for range 5000 {
				answer, _, err := g.call("kv_open", 0, record(0, 5))
				require.NoError(t, err)
				require.EqualValues(t, -1, answer)
				require.Equal(t, "kv_open: this instance has opened 4096 rules, as many as it keeps", g.reason)
			}
			require.Equal(t, before, g.mod.Memory().Size())
			require.LessOrEqual(t, before, uint32(2<<20), "bytes of an instance")
			for _, h := range []int32{0, handles - 1} { // each keeps its own parameters
				r := abi.Round{BlockTokens: 1, ChunkTokens: 1, PromptTokens: 9000, StoredTokens: 9000, ResumeTokens: 8000, Hi: 8000}
				_, view, err := g.call("kv_need", h, r.AppendWire(nil))
				require.NoError(t, err)
				need := abi.NewBitmap(8000)
				require.True(t, need.DecodeWire(view, 8000))
				require.Equal(t, int(h)+1, need.Count())
			}
		})
	}
}

// probe builds the module of testdata/sdk in a language, as the example of that language is
// built.
func probe(t *testing.T, language string) *raw {
	t.Helper()
	guestFile(t, "window-"+language+".wasm") // so that the compilers are there
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS("../../examples/window-"+language)))
	source := map[string]string{"c": "rule.c", "rust": "src/lib.rs", "as": "rule.ts"}[language]
	extension := map[string]string{"c": "c", "rust": "rs", "as": "ts"}[language]
	b, err := os.ReadFile("testdata/sdk/probe." + extension)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, source), b, 0o600))
	asc, err := filepath.Abs("../../.build/as/node_modules/.bin/asc")
	require.NoError(t, err)
	out, err := exec.Command("make", "-C", dir, "-B", "ASC="+asc).CombinedOutput()
	require.NoError(t, err, string(out))
	return newRaw(t, filepath.Join(dir, "rule.wasm"))
}

// TestSDK tries the three SDKs with a module of two rules.
func TestSDK(t *testing.T) {
	for _, language := range languages[1:] {
		t.Run(language, func(t *testing.T) {
			g := probe(t, language)
			sdkAnswers(t, g)
			rapid.Check(t, func(t *rapid.T) { primitive(t, g) })
		})
	}
}

// buildC builds the example in C with other flags, and without one line of it when that is
// given.
func buildC(t *testing.T, without string, flags ...string) *raw {
	t.Helper()
	guestFile(t, "window-c.wasm") // so that the compiler is there
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS("../../examples/window-c")))
	b, err := os.ReadFile(filepath.Join(dir, "rule.c"))
	require.NoError(t, err)
	require.Contains(t, string(b), without)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rule.c"), []byte(strings.Replace(string(b), without, "", 1)), 0o600))
	clang := os.Getenv("CLANG")
	if clang == "" {
		clang = "clang"
	}
	c := exec.Command(clang, append([]string{"--target=wasm32", "-nostdlib", "-ffreestanding", "-Wl,--no-entry", "-Wl,--stack-first",
		"-o", "rule.wasm", "rule.c"}, flags...)...)
	c.Dir = dir
	out, err := c.CombinedOutput()
	require.NoError(t, err, string(out))
	return newRaw(t, filepath.Join(dir, "rule.wasm"))
}

// The flags of an author's build change no answer. Without bulk memory the compiler calls
// libc's functions, also to move the states behind a record of odd size.
func TestCFlags(t *testing.T) {
	r := sdkRound
	r.Hi = 1 << 20
	input := append(longer(r, 5), make([]byte, 8*abi.StatesWords(r.Chunks()))...)
	for i := abi.RoundBytes + 5; i < len(input); i++ {
		input[i] = byte(i * i >> 4)
	}
	answers := func(t *testing.T, g *raw) (all [][]byte) {
		handle, _, err := g.call("kv_open", 0, record(0, 9))
		require.NoError(t, err)
		for _, fn := range []string{"kv_reach", "kv_scan", "kv_need"} {
			_, view, err := g.call(fn, int32(handle), input)
			require.NoError(t, err)
			require.NotEmpty(t, view, g.reason)
			all = append(all, view)
		}
		return all
	}
	want := answers(t, newRaw(t, guestFile(t, "window-c.wasm")))
	for _, flags := range []string{"-O0 -mcpu=mvp", "-O2 -mcpu=mvp", "-Oz -mcpu=mvp", "-O0 -mbulk-memory", "-O3 -msimd128 -mbulk-memory"} {
		t.Run(flags, func(t *testing.T) { require.Equal(t, want, answers(t, buildC(t, "", strings.Fields(flags)...))) })
	}
}

// A rule without one of its functions is refused by name.
func TestCForgottenFunction(t *testing.T) {
	for _, f := range []string{"reach", "scan"} {
		g := buildC(t, fmt.Sprintf(", .%s = %s", f, f), "-O2", "-mbulk-memory", "-Wno-unused-function")
		answer, _, err := g.call("kv_open", 0, record(0, 9))
		require.NoError(t, err)
		require.EqualValues(t, -1, answer)
		require.Equal(t, "kv_open: KV_RULES gives rule 0 no "+f, g.reason)
	}
}

// primitive: the searches and ranges do what package abi does, also on ranges that reach
// beyond the chunks asked for.
func primitive(t *rapid.T, g *raw) {
	op := rapid.SampledFrom([]uint64{0, 1, 2, 3, 4, 5, 6, 8}).Draw(t, "op")
	class := rapid.Uint64Range(0, 15).Draw(t, "class")
	n := rapid.IntRange(0, 200).Draw(t, "n")
	lo := rapid.IntRange(-64, n+70).Draw(t, "lo")
	hi := rapid.IntRange(-64, n+70).Draw(t, "hi")
	states := abi.NewStates(n)
	for i := 0; i < n; {
		end := min(n, i+rapid.IntRange(1, 70).Draw(t, "run"))
		states.Fill(i, end, abi.State(rapid.IntRange(0, 3).Draw(t, "state")))
		i = end
	}
	r := abi.Round{BlockTokens: 1, ChunkTokens: 1, Lo: 5, Hi: uint32(5 + n)}
	handle, _, err := g.call("kv_open", 0, record(0, op, class, uint64(lo+64), uint64(hi+64)))
	require.NoError(t, err)
	if handle < 0 { // the table is full: a new instance would be next
		t.Skip(g.reason)
	}
	_, view, err := g.call("kv_scan", int32(handle), append(r.AppendWire(nil), states.AppendWire(nil, n)...))

	usable, demand := 0, abi.NewBitmap(n)
	from, to := max(lo, 0), min(hi, n)
	switch outside := lo < 0 || lo >= n; {
	case (op == 5 || op == 6) && outside:
		require.Error(t, err, "a single index outside traps")
		return
	case op == 0:
		if usable = states.First(abi.Class(class), from, to); usable >= to || from >= to {
			usable = hi
		}
	case op == 1:
		if usable = states.Last(abi.Class(class), from, to); usable < from || from >= to {
			usable = lo - 1
		}
	case op == 2:
		states.Mark(abi.Class(class), from, to, demand)
	case op == 3:
		states.Fill(from, to, abi.State(class&3))
		states.Mark(abi.Here, 0, n, demand)
	case op == 4:
		demand.SetRange(from, to)
	case op == 5:
		demand.Set(lo)
	case op == 6:
		usable = int(states.At(lo))
	case op == 8:
		for at := lo; at <= hi; at += int(class) + 1 {
			demand.SetRange(max(at-(lo+64)&31, 0), min(at, n))
		}
	}
	require.NoError(t, err)
	got := abi.NewBitmap(n)
	require.Len(t, view, 8+(n+7)/8, g.reason)
	require.True(t, got.DecodeWire(view[8:], n))
	require.Equal(t, int32(usable), int32(le.Uint32(view)))
	require.Equal(t, demand, got)
}

// sdkAnswers: a scan may not say that nothing can be resumed, need may, and a policy has no
// need.
func sdkAnswers(t *testing.T, g *raw) {
	noResume, _, err := g.call("kv_open", 0, record(0, 7, 0, 0, 0))
	require.NoError(t, err)
	echo, _, err := g.call("kv_open", 0, record(1))
	require.NoError(t, err)
	require.EqualValues(t, 1, echo)
	for _, c := range []struct {
		fn     string
		handle int64
		answer int64
		reason string
	}{
		{"kv_reach", noResume, -1, "100%: no reach, 4294967295 or 18446744073709551615"},
		{"kv_scan", noResume, -2, ""}, // which the host refuses
		{"kv_need", noResume, -2, ""},
		{"kv_need", echo, -1, "kv_need: the rule gives no need, which only a policy may leave out"},
	} {
		answer, _, err := g.call(c.fn, int32(c.handle), append(longer(sdkRound, 0), make([]byte, 24)...))
		require.NoError(t, err)
		require.Equal(t, c.answer, answer, c.fn)
		require.Equal(t, c.reason, g.reason)
	}
	_, view, err := g.call("kv_reach", int32(echo), sdkRound.AppendWire(nil))
	require.NoError(t, err)
	require.Equal(t, []byte(strings.Repeat("\xff", 12)), view)
}
