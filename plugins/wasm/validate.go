package wasm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"

	"github.com/tierd/tierd/abi"
)

// A signature is a function that one side expects of the other.
type signature struct {
	name            string
	params, results []api.ValueType
	optional        bool
}

var (
	none = []api.ValueType{}
	i32  = []api.ValueType{api.ValueTypeI32}
	i64  = []api.ValueType{api.ValueTypeI64}
	i32s = []api.ValueType{api.ValueTypeI32, api.ValueTypeI32}
)

const marker = "kv_abi_1"

// exports is what a module of ABI version 1 exports beside its memory. kv_need is
// required by the manifest, when a rule of it is of kind spec.
var exports = []signature{
	{name: marker, params: none, results: none},
	{name: "kv_manifest", params: none, results: i64},
	{name: "kv_open", params: none, results: i64},
	{name: "kv_reach", params: i32, results: i64},
	{name: "kv_scan", params: i32, results: i64},
	{name: "kv_need", params: i32, results: i64, optional: true},
	{name: "_initialize", params: none, results: none, optional: true},
}

// offers is what the module kv of this host exports.
var offers = []signature{
	{name: "input", params: i32s, results: i32},
	{name: "fail", params: i32s, results: none},
}

func typeString(params, results []api.ValueType) string {
	names := func(types []api.ValueType) string {
		s := make([]string, len(types))
		for i, t := range types {
			s[i] = api.ValueTypeName(t)
		}
		return "(" + strings.Join(s, ",") + ")"
	}
	return names(params) + " -> " + names(results)
}

// checkBytes refuses what cannot be a module without reading further.
func checkBytes(wasm []byte) error {
	switch {
	case len(wasm) > ModuleBytesMax:
		return fmt.Errorf("%d bytes; at most %d are allowed: build without debug information (-ldflags='-s -w') and without encoding/json", len(wasm), ModuleBytesMax)
	case len(wasm) < 8 || string(wasm[:4]) != "\x00asm":
		return fmt.Errorf("not WebAssembly: it starts with %q, not %q", wasm[:min(len(wasm), 4)], "\x00asm")
	case wasm[4] != 1 || wasm[5] != 0 || wasm[6] != 0 || wasm[7] != 0:
		return fmt.Errorf("not a core WebAssembly module of version 1: its version bytes are % x (a component? this host takes core modules)", wasm[4:8])
	}
	return nil
}

func (m *Module) checkExports() error {
	have := m.code.ExportedFunctions()
	if have[marker] == nil {
		return errors.New("no export kv_abi_1, the marker of ABI version 1" + otherMajors(have))
	}
	for _, want := range exports {
		f := have[want.name]
		if f == nil && want.optional {
			continue
		}
		if f == nil {
			return fmt.Errorf("no export %s of type %s", want.name, typeString(want.params, want.results))
		}
		if !slices.Equal(f.ParamTypes(), want.params) || !slices.Equal(f.ResultTypes(), want.results) {
			return fmt.Errorf("export %s has type %s; ABI version 1 wants %s", want.name,
				typeString(f.ParamTypes(), f.ResultTypes()), typeString(want.params, want.results))
		}
	}
	if imported := m.code.ImportedMemories(); len(imported) > 0 {
		module, name, _ := imported[0].Import()
		return fmt.Errorf("it imports its memory as %s.%s; a module must define and export its own", module, name)
	}
	if m.code.ExportedMemories()["memory"] == nil {
		return errors.New(`no export "memory"; a module must export its memory under that name`)
	}
	if have["_initialize"] == nil && have["_start"] != nil {
		return errors.New("it exports _start, as a program does, and no _initialize; build it as a library (Go: -buildmode=c-shared)")
	}
	return nil
}

// otherMajors says which other versions a module speaks.
func otherMajors(have map[string]api.FunctionDefinition) string {
	var found []string
	for name := range have {
		if strings.HasPrefix(name, "kv_abi_") {
			found = append(found, name)
		}
	}
	if found == nil {
		return "; is it a tierd rule?"
	}
	slices.Sort(found)
	return fmt.Sprintf("; it exports %s, but this host speaks version %d only: rebuild it with this version's SDK, or use a newer host",
		strings.Join(found, ", "), abi.Major)
}

// checkImports refuses an import that this host does not offer and reports whether
// the module needs WASI.
func (m *Module) checkImports(wasi map[string]api.FunctionDefinition) (needsWASI bool, err error) {
	for _, f := range m.code.ImportedFunctions() {
		module, name, _ := f.Import()
		switch module {
		case "kv":
			i := slices.IndexFunc(offers, func(s signature) bool { return s.name == name })
			if i < 0 {
				return false, fmt.Errorf("it needs kv.%s; this host offers input, fail", name)
			}
			if want := offers[i]; !slices.Equal(f.ParamTypes(), want.params) || !slices.Equal(f.ResultTypes(), want.results) {
				return false, fmt.Errorf("it imports kv.%s with type %s; this host offers %s", name,
					typeString(f.ParamTypes(), f.ResultTypes()), typeString(want.params, want.results))
			}
		case wasi_snapshot_preview1.ModuleName:
			if wasi[name] == nil {
				return false, fmt.Errorf("it needs %s.%s, which is not in WASI preview 1", module, name)
			}
			needsWASI = true
		default:
			return false, fmt.Errorf("it needs %s.%s; this host offers the modules kv (input, fail) and %s", module, name, wasi_snapshot_preview1.ModuleName)
		}
	}
	return needsWASI, nil
}

// readManifest makes the first instance, asks it for the manifest and leaves it in the
// pool.
func (m *Module) readManifest(ctx context.Context) error {
	in, err := m.newInstance(ctx)
	if err != nil {
		return err
	}
	raw, err := in.manifest()
	if err != nil {
		return err
	}
	manifests, err := decodeManifest(raw)
	if err != nil {
		return err
	}
	for i := range manifests {
		if manifests[i].Kind == abi.KindSpec && in.fns[fnNeed] == nil {
			return fmt.Errorf("no export kv_need of type %s, and rule %s is of kind spec", typeString(i32, i64), manifests[i].Name)
		}
		m.specs = append(m.specs, &spec{module: m, index: uint32(i), manifest: &manifests[i]})
	}
	m.pool.add(in)
	return nil
}

// decodeManifest reads what kv_manifest answered.
func decodeManifest(raw []byte) ([]abi.Manifest, error) {
	var v struct {
		Rules []abi.Manifest `json:"rules"`
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("kv_manifest: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("kv_manifest: more follows the JSON object at byte %d", d.InputOffset())
	}
	if len(v.Rules) == 0 || len(v.Rules) > rulesMax {
		return nil, fmt.Errorf("kv_manifest: %d rules; a module holds 1 to %d", len(v.Rules), rulesMax)
	}
	for i := range v.Rules {
		r := &v.Rules[i]
		if err := r.Validate(); err != nil {
			return nil, fmt.Errorf("kv_manifest: %w", err)
		}
		for j := range i {
			if v.Rules[j].Name == r.Name {
				return nil, fmt.Errorf("kv_manifest: rule %s is declared twice", r.Name)
			}
		}
	}
	return v.Rules, nil
}
