package module_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/module"
	"github.com/tierd/tierd/specs/policy"
)

// cacheDir keeps compiled code for one run of the tests.
var cacheDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-module-test-")
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

func gunzip(t *testing.T, path string) []byte {
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	b, err := io.ReadAll(z)
	require.NoError(t, err)
	return b
}

func load(t *testing.T, code []byte) *wasm.Module {
	m, err := wasm.Load(context.Background(), "shipped", code, wasm.Options{CacheDir: cacheDir})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close(context.Background())) })
	return m
}

func embedded(t *testing.T) *wasm.Module {
	code, err := module.Wasm()
	require.NoError(t, err)
	m := load(t, code)
	require.Equal(t, m.Digest(), module.Digest())
	return m
}

// The committed module is the one that its sources build: byte by byte with the
// toolchain it was built with, in behaviour with another one.
func TestRebuild(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("go", "run", "./build", dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	rebuilt := gunzip(t, filepath.Join(dir, "specs.wasm.gz"))
	if runtime.Version() == module.Toolchain() {
		committed, err := module.Wasm()
		require.NoError(t, err)
		require.True(t, bytes.Equal(committed, rebuilt),
			"specs.wasm.gz is not what its sources build: run go generate ./specs/module and commit the result")
		return
	}
	twins(t, load(t, rebuilt))
}

// Every shipped rule answers natively and as WebAssembly the same, bit for bit.
func TestTwins(t *testing.T) { twins(t, embedded(t)) }

func twins(t *testing.T, m *wasm.Module) {
	natives := append(specs.All(), policy.All()...)
	require.Len(t, m.Specs(), len(natives))
	for i, native := range natives {
		twin := m.Specs()[i]
		require.Equal(t, native.Manifest(), twin.Manifest())
		t.Run(native.Manifest().Name+"/drawn", func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { drawn(t, native, twin) })
		})
		t.Run(native.Manifest().Name+"/small", func(t *testing.T) { small(t, native, twin) })
	}
}

// text is what an error says, without the prefix that tells where it came from.
func text(err error) string {
	var g *wasm.GuestError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &g):
		return g.Reason
	}
	return err.Error()
}

type testing2 interface {
	require.TestingT
	Helper()
}

// pair opens a rule twice. It returns nil when both refuse the parameters, in the same
// words.
func pair(t testing2, native, twin abi.Spec, params []uint64) (a, b abi.Rule, release func()) {
	t.Helper()
	a, errA := native.Open(params)
	b, errB := twin.Open(params)
	require.Equal(t, text(errA), text(errB), "Open(%d)", params)
	if errA != nil {
		return nil, nil, nil
	}
	b, release = b.(wasm.Pinner).Pin()
	return a, b, release
}

// same asks both rules everything about one round and table.
func same(t testing2, a, b abi.Rule, r abi.Round, states abi.States) {
	t.Helper()
	n := r.Chunks()
	outA, outB := abi.NewBitmap(n), abi.NewBitmap(n)
	errA, errB := a.Reach(r, outA), b.Reach(r, outB)
	if text(errA) != text(errB) || !outA.Equal(outB) {
		require.Fail(t, "Reach differs", "%+v: native %b %v, wasm %b %v", r, outA, errA, outB, errB)
	}
	outA.Zero()
	outB.Zero()
	spanA, errA := a.Scan(r, states, outA)
	spanB, errB := b.Scan(r, states, outB)
	if text(errA) != text(errB) || spanA != spanB || !outA.Equal(outB) {
		require.Fail(t, "Scan differs", "%+v %s: native %+v %b %v, wasm %+v %b %v", r, states.Format(n), spanA, outA, errA, spanB, outB, errB)
	}
	specA, ok := a.(abi.SpecRule)
	specB, okB := b.(abi.SpecRule)
	require.Equal(t, ok, okB)
	if !ok {
		return
	}
	r.Lo = 0
	needA, needB := abi.NewBitmap(int(r.Hi)), abi.NewBitmap(int(r.Hi))
	errA, errB = specA.Need(r, needA), specB.Need(r, needB)
	require.Equal(t, errors.Is(errA, abi.ErrNoResume), errors.Is(errB, abi.ErrNoResume))
	if text(errA) != text(errB) || errA == nil && !needA.Equal(needB) {
		require.Fail(t, "Need differs", "%+v: native %b %v, wasm %b %v", r, needA, errA, needB, errB)
	}
}

func drawn(t *rapid.T, native, twin abi.Spec) {
	params := []uint64{}
	for _, p := range native.Manifest().Params {
		near := rapid.Uint64Range(p.Min, min(p.Max, p.Min+300))
		params = append(params, rapid.OneOf(near, rapid.Just(p.Max), rapid.Uint64Range(p.Min, p.Max), rapid.Just(p.Max+1)).Draw(t, p.Name))
	}
	a, b, release := pair(t, native, twin, params)
	if a == nil {
		return
	}
	defer release()
	for range 4 {
		block := rapid.Uint64Range(1, 32).Draw(t, "block")
		chunk := block * rapid.Uint64Range(1, 8).Draw(t, "blocks")
		hi := rapid.Uint32Range(0, 300).Draw(t, "hi")
		token := rapid.Uint64Range(0, uint64(hi+2)*chunk)
		r := abi.Round{
			BlockTokens: block, ChunkTokens: chunk,
			PromptTokens: token.Draw(t, "prompt"), StoredTokens: token.Draw(t, "stored"), ResumeTokens: token.Draw(t, "resume"),
			AlignTokens: chunk * rapid.Uint64Range(0, 9).Draw(t, "align"), JunctionTokens: token.Draw(t, "junction"),
			ResidentTokens: token.Draw(t, "resident"), Offers: rapid.Uint64Range(0, 3).Draw(t, "offers"),
			LocalTokens: token.Draw(t, "local"), BoundTokens: token.Draw(t, "bound"),
			Lo: rapid.Uint32Range(0, hi).Draw(t, "lo"), Hi: hi,
		}
		states := abi.NewStates(r.Chunks())
		for i := 0; i < r.Chunks(); {
			end := min(r.Chunks(), i+rapid.IntRange(1, 90).Draw(t, "run"))
			states.Fill(i, end, abi.State(rapid.IntRange(0, 3).Draw(t, "state")))
			i = end
		}
		same(t, a, b, r, states)
	}
}

// small takes all lookup tables of up to 4 chunks, all bounds and all resume points,
// for the smallest parameters.
func small(t *testing.T, native, twin abi.Spec) {
	for step := range uint64(4) {
		var params []uint64
		for _, p := range native.Manifest().Params {
			params = append(params, min(p.Min+step*step, p.Max))
		}
		a, b, release := pair(t, native, twin, params)
		require.NotNil(t, a)
		for n := uint64(0); n <= 4; n++ {
			for point := range 2*n + 1 {
				for table := range uint64(1) << (2 * n) {
					same(t, a, b, abi.Round{
						BlockTokens: 1, ChunkTokens: 2, PromptTokens: 2 * n, StoredTokens: 2 * n, ResumeTokens: point,
						AlignTokens: 2 * (table % 3), JunctionTokens: table % (2*n + 1), ResidentTokens: point, BoundTokens: point,
						Lo: uint32(min(table%2, n)), Hi: uint32(n),
					}, abi.States{table}[:min(n, 1)])
				}
			}
		}
		release()
		if len(params) == 0 {
			break
		}
	}
}

// The largest round of the contract fits a guest, whose buffers grow for it and then
// serve a small one again.
func TestLargestRound(t *testing.T) {
	m := embedded(t)
	for i, native := range append(specs.All(), policy.All()...) {
		var params []uint64
		for _, p := range native.Manifest().Params {
			params = append(params, min(p.Min+1000, p.Max))
		}
		a, b, release := pair(t, native, m.Specs()[i], params)
		require.NotNil(t, a)
		const tokens = abi.MaxChunks * 16
		r := abi.Round{
			BlockTokens: 16, ChunkTokens: 16, PromptTokens: tokens, StoredTokens: tokens, ResumeTokens: tokens - 1,
			AlignTokens: 4096, BoundTokens: tokens - 1, Hi: abi.MaxChunks,
		}
		require.NoError(t, r.Validate())
		states := abi.NewStates(abi.MaxChunks)
		same(t, a, b, r, states)
		states.Fill(0, abi.MaxChunks, abi.Hit)
		states.Put(abi.MaxChunks/2, abi.Retry)
		same(t, a, b, r, states)
		r.Hi = 3
		same(t, a, b, r, states[:1])
		release()
	}
}

// The rules keep the laws also as the bytes that serve.
func TestLaws(t *testing.T) {
	for _, s := range embedded(t).Specs() {
		t.Run(s.Manifest().Name, func(t *testing.T) { abitest.Run(t, s) })
	}
}
