package fuel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"pgregory.net/rapid"

	shipped "github.com/tierd/tierd/specs/module"
)

// The two engines of the runtime. They are told apart by nothing but speed.
var compiler, interpreter = wazero.NewRuntimeConfigCompiler().WithMemoryLimitPages(256), wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(256)

// An outcome is all that can be seen of a run.
type outcome struct {
	trap   string
	result []uint64
	memory string // digest
	a, b   uint64 // variables
	burnt  int64
}

// run runs a rewritten program with units of fuel.
func run(t require.TestingT, engine wazero.RuntimeConfig, wasm []byte, units uint64, params ...uint64) (o outcome) {
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, engine)
	defer r.Close(ctx)
	mod, err := r.InstantiateWithConfig(ctx, wasm, wazero.NewModuleConfig().WithName("").WithStartFunctions())
	require.NoError(t, err)
	counter := mod.ExportedGlobal(Counter).(api.MutableGlobal)
	counter.Set(units)
	o.result, err = mod.ExportedFunction("run").Call(ctx, params...)
	if err != nil {
		o.trap, _, _ = strings.Cut(err.Error(), "\n")
	}
	if m := mod.ExportedMemory("mem"); m != nil {
		all, _ := m.Read(0, m.Size())
		sum := sha256.Sum256(all)
		o.memory = hex.EncodeToString(sum[:])
	}
	for name, at := range map[string]*uint64{"a": &o.a, "b": &o.b} {
		if g := mod.ExportedGlobal(name); g != nil {
			*at = g.Get()
		}
	}
	o.burnt = int64(units) - int64(counter.Get())
	return o
}

// A rewritten program does what the plain one does, burns the same each time, and
// burns no less than what each instruction weighs that has run: in a program whose
// groups hold one instruction, each pays for itself when it runs.
func TestPrograms(t *testing.T) {
	traps := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		wasm := drawProgram(t)
		x, y := rapid.Uint32().Draw(t, "x"), rapid.Uint32().Draw(t, "y")
		outcomes := map[int]outcome{}
		for group, engine := range map[int]wazero.RuntimeConfig{plain: compiler, groupUnits: compiler, 0: interpreter, 20: interpreter} {
			m, err := rewrite(wasm, group)
			require.NoError(t, err)
			outcomes[group] = run(t, engine, m.Wasm, 1<<40, uint64(x), uint64(y))
		}
		want := outcomes[plain]
		require.Zero(t, want.burnt)
		traps[want.trap]++
		exact := outcomes[0].burnt
		require.Positive(t, exact)
		for _, group := range []int{0, 20, groupUnits} {
			got := outcomes[group]
			require.GreaterOrEqual(t, got.burnt, exact, "groups of %d units", group)
			got.burnt = 0
			require.Equal(t, want, got)
		}
		m, err := Rewrite(wasm)
		require.NoError(t, err)
		all := outcomes[groupUnits].burnt
		require.Equal(t, all, run(t, interpreter, m.Wasm, 1<<40, uint64(x), uint64(y)).burnt)
		// Enough is enough, one unit less is not.
		require.Equal(t, want.trap, run(t, interpreter, m.Wasm, uint64(all), uint64(x), uint64(y)).trap)
		starved := run(t, interpreter, m.Wasm, uint64(all-1), uint64(x), uint64(y))
		require.Equal(t, "wasm error: unreachable", starved.trap)
		require.Greater(t, starved.burnt, all-1)
	})
	require.Greater(t, len(traps), 3, "%v", traps)
}

var corpus = flag.String("corpus", "", "a directory of .wasm files to rewrite and compile, such as the runtime's own")

// TestCorpus tells how many valid modules of a directory can be rewritten. None of
// those may become invalid.
func TestCorpus(t *testing.T) {
	if *corpus == "" {
		t.Skip("give a directory with -corpus")
	}
	ctx := context.Background()
	var valid, rewritten int
	require.NoError(t, filepath.WalkDir(*corpus, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".wasm" {
			return err
		}
		wasm, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(wasm), "\x00asm\x01\x00\x00\x00") {
			return err
		}
		r := wazero.NewRuntimeWithConfig(ctx, compiler)
		defer r.Close(ctx)
		if _, err := r.CompileModule(ctx, wasm); err != nil {
			return nil
		}
		valid++
		m, err := Rewrite(wasm)
		if err != nil {
			t.Logf("%s: %v", filepath.Base(path), err)
			return nil
		}
		rewritten++
		_, err = r.CompileModule(ctx, m.Wasm)
		require.NoError(t, err, path)
		return nil
	}))
	t.Logf("%d valid modules, %d rewritten, %d refused", valid, rewritten, valid-rewritten)
}

// FuzzRewrite: no bytes make the rewriter panic. What it accepts of valid modules is
// valid, and does the same where there is a function to run.
func FuzzRewrite(f *testing.F) {
	for _, s := range spenders() {
		if !strings.HasPrefix(s.name, "0x") { // the loops around arithmetic are all alike
			f.Add(spend(s.body))
		}
	}
	for seed := range 8 {
		f.Add(rapid.Custom(drawProgram).Example(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		wasm := append([]byte("\x00asm\x01\x00\x00\x00"), in[min(len(in), 8):]...)
		_, _, _ = Functions(wasm)
		m, err := Rewrite(wasm)
		if err != nil || len(wasm) > 1<<16 {
			return
		}
		ctx := context.Background()
		r := wazero.NewRuntimeWithConfig(ctx, compiler)
		defer r.Close(ctx)
		if _, err := r.CompileModule(ctx, wasm); err != nil {
			return
		}
		code, err := r.CompileModule(ctx, m.Wasm)
		require.NoError(t, err)
		f := code.ExportedFunctions()["run"]
		if f == nil || len(m.Imports) > 0 || m.Start {
			return
		}
		const units = 1 << 16
		params := make([]uint64, len(f.ParamTypes()))
		for _, v := range f.ParamTypes() {
			if v == TypeV128 {
				params = append(params, 0)
			}
		}
		mod, err := r.InstantiateModule(ctx, code, wazero.NewModuleConfig().WithName("").WithStartFunctions())
		if err != nil {
			return
		}
		require.NoError(t, mod.Close(ctx))
		metered := run(t, compiler, m.Wasm, units, params...)
		if metered.burnt > units { // it may never end without fuel
			require.Equal(t, "wasm error: unreachable", metered.trap)
			return
		}
		p, err := Plain(wasm)
		require.NoError(t, err)
		plain := run(t, compiler, p.Wasm, units, params...)
		require.Zero(t, plain.burnt)
		plain.burnt = metered.burnt
		require.Equal(t, plain, metered)
	})
}

// The shipped module is large: a rewriter that is not linear would show.
func TestShippedModule(t *testing.T) {
	wasm, err := shipped.Wasm()
	require.NoError(t, err)
	m, err := Rewrite(wasm)
	require.NoError(t, err)
	require.Less(t, len(m.Wasm), len(wasm)*3/2)
	imports, exports, err := Functions(wasm)
	require.NoError(t, err)
	require.Equal(t, m.Imports, imports)
	require.Equal(t, m.Exports, exports)
	again, err := Rewrite(wasm)
	require.NoError(t, err)
	require.Equal(t, m.Wasm, again.Wasm)
	_, err = Rewrite(m.Wasm)
	require.ErrorContains(t, err, `it exports "tierd:fuel"; names that begin with "tierd:" are the host's`)
}

// The free head of a loop that dispatches is paid for by whatever leads back to it, an
// inner loop too.
func TestInnerLoopPaysForFreeHead(t *testing.T) {
	const turnUnits = 10 // local.get, global.get, const, add, global.set, br_table, loop, br
	run1 := code(0, opLoop, blockVoid, opBlock, blockVoid,
		opGlobalGet, 0, opI64Const, 1, 0x7c, opGlobalSet, 0, opLocalGet, 0, opBrTable, 1, 0, 0, opEnd,
		opLoop, blockVoid, opBr, 1, opEnd, opEnd, opEnd)
	m := with(raw(secType, 1, 0x60, 1, TypeI32, 0), secFunction, 1, 0)
	m = with(m, secGlobal, 1, TypeI64, 1, opI64Const, 0, opEnd)
	m = with(m, secExport, 2, name("run"), 0, 0, name("a"), 3, 0)
	m = with(m, secCode, vector(append(uleb(uint64(len(run1))), run1...)))
	r, err := Rewrite(m)
	require.NoError(t, err)
	const units = 100_000
	o := run(t, compiler, r.Wasm, units, 0)
	require.Equal(t, "wasm error: unreachable", o.trap)
	require.LessOrEqual(t, o.a, uint64(units/turnUnits), "turns")
}
