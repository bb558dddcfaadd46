// Package wasm loads rules from WebAssembly modules of ABI version 1 and runs them on
// wazero, a runtime in pure Go.
//
// # From bytes to a rule
//
// Load takes a module's bytes through these steps and stops at the first that does
// not hold, with a message that says what was expected:
//
//  1. At most ModuleBytesMax bytes that start as a WebAssembly module does, in which
//     no section claims more items than its bytes can hold.
//  2. It exports the marker kv_abi_1, its own memory, and the functions of the ABI
//     with the right types.
//  3. It imports nothing but input and fail from the module kv, and functions of WASI
//     preview 1.
//  4. One instance is made, with _initialize called when it is there, and answers
//     kv_manifest with strict JSON whose manifests all pass abi.Manifest.Validate.
//
// Nothing of the module runs before step 4. The instance has no files, no network, no
// environment and no output; its clock and its random numbers are fixed, so that two
// instances answer the same. (What a plain Go guest prints to standard error when it
// panics is kept, up to a bound, for the message of a TrapError.)
//
// # Concurrency
//
// A module instance runs one call at a time, so a rule borrows one from a bounded pool
// for each call: the most recently used first, for its warm memory. A call that finds
// PoolMax instances borrowed waits. A goroutine that makes many calls can Pin a rule
// instead and have an instance to itself.
//
// A rule opens its handle in an instance when it first meets it. An instance whose
// call ended in anything but an answer, a clean failure (-1) or abi.ErrNoResume (-2)
// is in an unknown state: it is closed, and the next call that needs one makes a fresh
// one.
//
// # Limits
//
// A module is rewritten before it is compiled, so that it counts what it does: each
// entry of a function, turn of a loop, operation on many bytes and call of the host
// burns units of fuel, and with none left the call ends as a FuelError. How many units a
// call has depends on what it is asked for, see CallUnits, ChunkUnits and SetupUnits.
// What a call burns depends on the module's bytes and the call's input alone, so a
// module that runs away is ended at the same instruction on every machine, and the
// check that refuses it says the same everywhere. No clock is read.
//
// The budget has a second purpose. Compiled code cannot be interrupted, so the garbage
// collector of this program waits for a call that is running, and everything else waits
// for the collector: no longer than the budget lasts, see CallUnits.
//
// Memory, tables, the compiler's work and everything that a few bytes can declare much
// of are bounded before the compiler sees the module; package fuel has the limits.
// Compiled code is cached by the digest of the rewritten bytes, which no other version
// of the rewriter makes.
package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/tetratelabs/wazero"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
)

const (
	// ModuleBytesMax bounds a module. A plain Go guest with encoding/json linked has
	// 3.3 MB; twice that is room, and more is likely a mistake in the build.
	ModuleBytesMax = 8 << 20

	// MemoryPagesMax bounds an instance's memory, in pages of 64 KiB: 16 MiB. A plain
	// Go guest starts with 38 and needs 112 under garbage collection churn; a state
	// table of abi.MaxChunks chunks takes 4.
	MemoryPagesMax = 256

	// ReasonBytesMax is how much is kept of the reason that a guest gives for a failed
	// call, and of what it printed before it trapped.
	ReasonBytesMax = 512

	// CallUnits and ChunkUnits are the fuel of a call of kv_reach, kv_scan or kv_need: a
	// base, and ChunkUnits for each chunk of the sequence, up to Hi or to the stored tokens,
	// whichever is more: a rule may look at every aligned point to answer for one chunk. A
	// plain Go guest that treats every chunk on its own burns 500 for one, a quarter; one
	// that works on words burns 10. The base is there for a guest's own garbage collection.
	// A unit takes up to 2 ns, so a call about 8192 chunks lasts 45 ms at the most, half a
	// second if it does nothing but miss the caches (see package fuel), and the collector of
	// this program waits as long; a deployment whose longest sequence has more chunks allows
	// for more.
	CallUnits  = 1 << 22
	ChunkUnits = 1 << 11

	// SetupUnits is the fuel of the start function, of _initialize, of kv_manifest and of
	// one kv_open each: 35 ms, half a second if it does nothing but miss the caches. The
	// _initialize of a plain Go guest burns 1.3 million.
	SetupUnits = 1 << 24

	// CompileTimeoutDefault is a hundred times what a plain Go guest takes on a core of its
	// own, so that a busy machine or an instrumented build does not reach it.
	CompileTimeoutDefault = 2 * time.Minute

	// PoolMaxDefault bounds the instances of one module. A plain Go guest takes 3.3 MB
	// each; more instances than cores only serve goroutines that are not running.
	PoolMaxDefault = 32

	// stackItemsKept bounds the stack that an instance keeps for each of its functions from
	// call to call, in items of the runtime's: bytes where it compiles, as it does on amd64
	// and arm64, else words of 8. It starts with 10 KB, doubles that up to 100 MB as calls
	// go deeper, and never gives it back. The shipped rules never need more than it starts
	// with; a rule that needs more than this pays for growing it in each call.
	stackItemsKept = 1 << 20

	// manifestBytesMax bounds the JSON of kv_manifest: rulesMax rules at 4 KiB each.
	manifestBytesMax = rulesMax * 4096

	// rulesMax bounds the rules of one module; the shipped one has about 20.
	rulesMax = 64

	// instanceHandlesMax is how many rules are opened in one instance before it is
	// replaced by a fresh one: a guest has no way to close a handle, so its memory
	// grows with each. A deployment opens as many as it has groups and policies; only
	// a check over parameter ranges opens thousands.
	instanceHandlesMax = 4096
)

// Options says how a module is run. The zero value is right.
type Options struct {
	// CacheDir is where compiled code is kept, keyed by the digest of the rewritten
	// module and the version of the compiler; the shipped module, of plain Go, takes
	// 1.1 s to compile and 65 to 70 ms to read back. Whoever can write there can run native code in this process. Empty
	// means no cache.
	CacheDir string

	// CompileTimeout ends the wait for the compiler: the last resort, since a module that
	// would take it long is refused before. 0 means CompileTimeoutDefault.
	CompileTimeout time.Duration

	// PoolMax bounds the instances that calls borrow at one time; pinned ones do not
	// count. 0 means PoolMaxDefault.
	PoolMax int
}

// A Module is a loaded module and its instances. It is safe for use by many goroutines
// at once, and so are the rules of its specs.
type Module struct {
	name    string
	digest  string
	size    int // bytes, as given
	opts    Options
	start   bool // it exports fuel.Start
	imports []Signature
	exports []Signature
	specs   []abi.Spec
	runtime wazero.Runtime
	cache   wazero.CompilationCache // nil without CacheDir
	code    wazero.CompiledModule
	rules   ruleTable
	pool    pool
}

// Load checks and compiles a module. The name only appears in messages: a path, or a
// shipped module's name. The context bounds the loading.
func Load(ctx context.Context, name string, wasm []byte, o Options) (*Module, error) {
	if o.CompileTimeout == 0 {
		o.CompileTimeout = CompileTimeoutDefault
	}
	if o.PoolMax == 0 {
		o.PoolMax = PoolMaxDefault
	}
	if o.PoolMax < 0 || o.CompileTimeout < 0 {
		return nil, fmt.Errorf("wasm module %s: PoolMax is %d and CompileTimeout is %v; neither may be negative", name, o.PoolMax, o.CompileTimeout)
	}
	sum := sha256.Sum256(wasm)
	m := &Module{name: name, digest: "sha256:" + hex.EncodeToString(sum[:]), size: len(wasm), opts: o}
	m.pool.init(m, o.PoolMax)
	if err := m.load(ctx, wasm); err != nil {
		m.release(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("wasm module %s: %w", name, &shownError{err})
	}
	return m, nil
}

// rewrite is replaced by benchmarks, to tell what fuel costs.
var rewrite = fuel.Rewrite

func (m *Module) load(ctx context.Context, wasm []byte) error {
	if err := checkBytes(wasm); err != nil {
		return err
	}
	metered, err := rewrite(wasm)
	if err != nil {
		return err
	}
	m.start = metered.Start
	m.imports, m.exports = signatures(metered.Imports), signatures(metered.Exports)
	config := wazero.NewRuntimeConfig().WithMemoryLimitPages(MemoryPagesMax)
	if m.opts.CacheDir != "" {
		cache, err := wazero.NewCompilationCacheWithDir(m.opts.CacheDir)
		if err != nil {
			return fmt.Errorf("compilation cache: %w", err)
		}
		m.cache = cache
		config = config.WithCompilationCache(cache)
	}
	m.runtime = wazero.NewRuntimeWithConfig(ctx, config)
	if err := m.compile(ctx, metered.Wasm); err != nil {
		return err
	}
	if err := m.checkExports(); err != nil {
		return err
	}
	needed, err := m.checkImports(ctx)
	if err != nil {
		return err
	}
	if needed != nil {
		if err := instantiateWASI(ctx, m.runtime, needed); err != nil {
			return err
		}
	}
	if err := instantiateKV(ctx, m.runtime); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return m.readManifest()
}

// Name returns the name given to Load.
func (m *Module) Name() string { return m.name }

// Digest returns "sha256:" and the hexadecimal digest of the module's bytes.
func (m *Module) Digest() string { return m.digest }

// Size returns the length of the module in bytes, as it was given.
func (m *Module) Size() int { return m.size }

// Imports returns the functions that the module imports, in its own order.
func (m *Module) Imports() []Signature { return m.imports }

// Exports returns the functions that the module exports, in its own order.
func (m *Module) Exports() []Signature { return m.exports }

// Specs returns the module's rules in the order of its manifest. The rule that a spec
// of abi.KindSpec opens satisfies abi.SpecRule; each satisfies Pinner and Fresher.
func (m *Module) Specs() []abi.Spec { return m.specs }

// Close waits until every borrowed instance is back and every pin released, then frees
// the module. Calls that start later get ErrClosed. When ctx ends first it returns its
// error and frees nothing; it may be called again.
func (m *Module) Close(ctx context.Context) error {
	if err := m.pool.drain(ctx); err != nil {
		return fmt.Errorf("wasm module %s: close: %w", m.name, err)
	}
	return m.release(context.WithoutCancel(ctx))
}

func (m *Module) release(ctx context.Context) error {
	var err error
	if m.runtime != nil {
		err = m.runtime.Close(ctx)
	}
	if m.cache != nil {
		if e := m.cache.Close(ctx); err == nil {
			err = e
		}
	}
	return err
}

// compile compiles the module within Options.CompileTimeout. The compiler cannot be
// interrupted, and some functions of a few kilobytes, such as many variables in deep
// loops, take it hours: then it is left behind, and freed when it ends.
func (m *Module) compile(ctx context.Context, wasm []byte) error {
	type result struct {
		code wazero.CompiledModule
		err  error
	}
	runtime, cache := m.runtime, m.cache
	ended := make(chan result, 1)
	go func() {
		code, err := runtime.CompileModule(context.WithoutCancel(ctx), wasm)
		ended <- result{code, err}
	}()
	limit := time.NewTimer(m.opts.CompileTimeout)
	defer limit.Stop()
	var why error
	select {
	case r := <-ended:
		if m.code = r.code; r.err != nil {
			return fmt.Errorf("not a valid module: %w", r.err)
		}
		return nil
	case <-ctx.Done():
		why = ctx.Err()
	case <-limit.C:
		why = fmt.Errorf("it was still being compiled after %v; is a function of it very large, or are its loops nested very deep?", m.opts.CompileTimeout)
	}
	left := &Module{runtime: runtime, cache: cache}
	m.runtime, m.cache = nil, nil // released when the compiler is done with them
	go func() {
		<-ended
		_ = left.release(context.Background())
	}()
	return why
}
