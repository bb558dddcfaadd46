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
	"github.com/tierd/tierd/plugins/wasm/internal/fuel"
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

// A Signature is a function that a module imports or exports.
type Signature struct {
	Module          string // that it is imported from; empty for an export
	Name            string
	Params, Results []api.ValueType
}

// String returns, for example, "kv.input (i32,i32) -> (i32)".
func (s Signature) String() string {
	name := s.Name
	if s.Module != "" {
		name = s.Module + "." + name
	}
	return name + " " + typeString(s.Params, s.Results)
}

func signatures(functions []fuel.Func) []Signature {
	s := make([]Signature, len(functions))
	for i, f := range functions {
		s[i] = Signature(f)
	}
	return s
}

// Describe returns the functions that a module imports and exports without judging
// them: it reads no more of a module than that, so it has an answer for many that Load
// refuses. The error says why it has none.
func Describe(wasm []byte) (imports, exports []Signature, err error) {
	if err := checkBytes(wasm); err != nil {
		return nil, nil, err
	}
	i, e, err := fuel.Functions(wasm)
	if err != nil {
		return nil, nil, err
	}
	return signatures(i), signatures(e), nil
}

func typeString(params, results []api.ValueType) string {
	names := func(types []api.ValueType) string {
		s := make([]string, len(types))
		for i, t := range types {
			s[i] = api.ValueTypeName(t)
			switch t {
			case fuel.TypeV128:
				s[i] = "v128"
			case fuel.TypeFuncref:
				s[i] = "funcref"
			}
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

// checkImports refuses an import that this host does not offer and returns the
// functions of WASI that the module needs.
func (m *Module) checkImports(ctx context.Context) (needed map[string]wasi, err error) {
	var all map[string]wasi
	for i := range m.imports {
		f := &m.imports[i]
		var offer *Signature
		switch f.Module {
		case "kv":
			k := slices.IndexFunc(offers, func(s signature) bool { return s.name == f.Name })
			if k < 0 {
				return nil, fmt.Errorf("it needs kv.%s; this host offers input, fail", f.Name)
			}
			offer = &Signature{Params: offers[k].params, Results: offers[k].results}
		case wasi_snapshot_preview1.ModuleName:
			if all == nil {
				if all, err = wasiFunctions(ctx, m.runtime); err != nil {
					return nil, err
				}
				needed = map[string]wasi{}
			}
			w, ok := all[f.Name]
			if !ok {
				return nil, fmt.Errorf("it needs %s.%s, which is not in WASI preview 1", f.Module, f.Name)
			}
			needed[f.Name] = w
			offer = &Signature{Params: w.ParamTypes(), Results: w.ResultTypes()}
		default:
			return nil, fmt.Errorf("it needs %s.%s; this host offers the modules kv (input, fail) and %s", f.Module, f.Name, wasi_snapshot_preview1.ModuleName)
		}
		if !slices.Equal(f.Params, offer.Params) || !slices.Equal(f.Results, offer.Results) {
			return nil, fmt.Errorf("it imports %s.%s with type %s; this host offers %s", f.Module, f.Name,
				typeString(f.Params, f.Results), typeString(offer.Params, offer.Results))
		}
	}
	return needed, nil
}

// readManifest makes the first instance, asks it for the manifest and leaves it in the
// pool.
func (m *Module) readManifest() error {
	in, err := m.newInstance()
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
