package wasm

import (
	"context"
	"errors"
	"fmt"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
)

// What a guest calls of the host burns fuel here, not in the guest's code, so that it
// does by whatever way the guest has got hold of the function.
const (
	// hostUnits is what a call of a host function burns: leaving compiled code and coming
	// back takes as long as 64 of its instructions.
	hostUnits = 64

	// bytesPerUnit is how much a unit copies or fills, as in package fuel.
	bytesPerUnit = 16

	// What an item of a list of buffers, an event and a random byte burn.
	bufferUnits, eventUnits, randomUnits = 64, 1 << 12, 16
)

// errFuel unwinds a host function that there is no fuel for. The instance's counter
// says the same, and that is what the caller of the guest goes by.
var errFuel = errors.New("out of fuel")

// spend burns fuel of the call being made.
func (in *instance) spend(units uint64) {
	left := int64(in.fuel.Get()) - int64(units)
	in.fuel.Set(uint64(left))
	if left < 0 {
		panic(errFuel)
	}
}

// instantiateKV makes the module kv, what the host offers to guests.
func instantiateKV(ctx context.Context, r wazero.Runtime) error {
	b := r.NewHostModuleBuilder("kv")
	for _, f := range offers {
		fn := hostInput
		if f.name == "fail" {
			fn = hostFail
		}
		b.NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(fn), f.params, f.results).Export(f.name)
	}
	_, err := b.Instantiate(ctx)
	return err
}

// hostInput is input(ptr, cap) -> len: it copies this call's input when it fits, and
// returns its length.
func hostInput(ctx context.Context, mod api.Module, stack []uint64) {
	in := caller(ctx)
	units, n := uint64(hostUnits), uint64(len(in.in))
	ptr, room := uint32(stack[0]), uint32(stack[1])
	fits := n <= uint64(room)
	if fits {
		units += n / bytesPerUnit
	}
	in.spend(units)
	if fits && !mod.Memory().Write(ptr, in.in) {
		panic(fmt.Errorf("input(%d, %d): the buffer is not inside the memory of %d bytes", ptr, room, mod.Memory().Size()))
	}
	stack[0] = n
}

// hostFail is fail(ptr, len): the reason for answering -1.
func hostFail(ctx context.Context, mod api.Module, stack []uint64) {
	in := caller(ctx)
	in.spend(hostUnits + ReasonBytesMax/bytesPerUnit)
	ptr, n := uint32(stack[0]), uint32(stack[1])
	text, ok := mod.Memory().Read(ptr, n)
	if !ok {
		panic(fmt.Errorf("fail(%d, %d): the reason is not inside the memory of %d bytes", ptr, n, mod.Memory().Size()))
	}
	in.reason = append(in.reason[:0], text[:min(len(text), ReasonBytesMax)]...)
}

// A wasi is a function of WASI preview 1, as the runtime implements it.
type wasi struct {
	api.FunctionDefinition
	run api.GoModuleFunction
}

// wasiFunctions returns the functions of WASI preview 1 by their names.
func wasiFunctions(ctx context.Context, r wazero.Runtime) (map[string]wasi, error) {
	m, err := wasi_snapshot_preview1.NewBuilder(r).Compile(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]wasi{}
	for name, f := range m.ExportedFunctions() {
		all[name] = wasi{f, f.GoFunction().(api.GoModuleFunction)}
	}
	return all, m.Close(ctx)
}

// instantiateWASI makes the module wasi_snapshot_preview1 with the functions named.
func instantiateWASI(ctx context.Context, r wazero.Runtime, functions map[string]wasi) error {
	b := r.NewHostModuleBuilder(wasi_snapshot_preview1.ModuleName)
	for name, f := range functions {
		cost, run := wasiCost(name), f.run
		call := func(ctx context.Context, mod api.Module, stack []uint64) {
			caller(ctx).spend(hostUnits + cost(mod, stack))
			run.Call(ctx, mod, stack)
		}
		b.NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(call), f.ParamTypes(), f.ResultTypes()).Export(name)
	}
	_, err := b.Instantiate(ctx)
	return err
}

// wasiCost returns what a call of a function burns beside hostUnits. One that is not
// listed may look at every byte of the memory, as far as this host knows: it is about
// files, of which there are none.
func wasiCost(name string) func(mod api.Module, stack []uint64) uint64 {
	times := func(units uint64, argument int) func(api.Module, []uint64) uint64 {
		return func(_ api.Module, stack []uint64) uint64 { return units * uint64(uint32(stack[argument])) }
	}
	switch name {
	case "args_get", "args_sizes_get", "environ_get", "environ_sizes_get", "clock_res_get", "clock_time_get", "fd_close",
		"fd_fdstat_get", "fd_fdstat_set_flags", "fd_filestat_get", "fd_prestat_get", "fd_prestat_dir_name", "fd_seek",
		"fd_tell", "proc_exit", "sched_yield":
		return func(api.Module, []uint64) uint64 { return 0 }
	case "random_get": // (buffer, length)
		return times(randomUnits, 1)
	case "fd_read", "fd_write": // (file, buffers, how many, result)
		return times(bufferUnits, 2)
	case "poll_oneoff": // (subscriptions, events, how many, result)
		return times(eventUnits, 2)
	}
	return func(mod api.Module, _ []uint64) uint64 { return uint64(mod.Memory().Size()) }
}
