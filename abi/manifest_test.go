package abi

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func goodManifest() Manifest {
	return Manifest{
		Name: "window", Version: "1.0.0", Kind: KindSpec, Mask: MaskWindow, MaskArgs: []string{"window"},
		Params: []Param{
			{Name: "window", Min: 1, Max: 1 << 20, Required: true, Unit: "tokens"},
			{Name: "mode", Max: 1, Enum: []string{"all", "align"}},
		},
	}
}

func TestManifestMessages(t *testing.T) {
	good := goodManifest()
	require.NoError(t, good.Validate())
	const p = "manifest of rule window: "
	for want, change := range map[string]func(*Manifest){
		`rule name "": 1 to 64 of a-z, 0-9, - and _ are allowed`:       func(m *Manifest) { m.Name = "" },
		`rule name "Window": 1 to 64 of a-z, 0-9, - and _ are allowed`: func(m *Manifest) { m.Name = "Window" },
		fmt.Sprintf(`rule name %q: 1 to 64 of a-z, 0-9, - and _ are allowed`, strings.Repeat("a", 65)): func(m *Manifest) {
			m.Name = strings.Repeat("a", 65)
		},
		p + `version "" must have 1 to 64 bytes`: func(m *Manifest) { m.Version = "" },
		p + `33 parameters; at most 32 are allowed`: func(m *Manifest) {
			m.Params = make([]Param, 33)
		},
		p + `parameter name "a b": 1 to 64 of a-z, 0-9, - and _ are allowed`: func(m *Manifest) { m.Params[0].Name = "a b" },
		p + `parameter window is declared twice`:                             func(m *Manifest) { m.Params[1].Name = "window" },
		p + `parameter window: max is 0, below min, 1`:                       func(m *Manifest) { m.Params[0].Max = 0 },
		p + `parameter window: max is 2147483649; the contract allows 2147483648`: func(m *Manifest) {
			m.Params[0].Max = MaxTokens + 1
		},
		p + `parameter mode: an enum of 2 names ranges from 0 to 1, but min and max are 0 and 2`: func(m *Manifest) {
			m.Params[1].Max = 2
		},
		p + `default of parameter window is 0; it must be 1 to 1048576 tokens`: func(m *Manifest) { m.Params[0].Required = false },
		p + `kind is ""; it must be "spec" or "policy"`:                        func(m *Manifest) { m.Kind = "" },
		p + `a policy has no mask, but mask is "window"`:                       func(m *Manifest) { m.Kind = KindPolicy },
		p + `mask "sliding" is not in the list: causal, window, attention-chunk, sink+window, state, prompt+window, latent, unverified`: func(m *Manifest) {
			m.Mask = "sliding"
		},
		p + `mask sink+window takes 2 arguments, but mask_args names 1`: func(m *Manifest) { m.Mask = MaskSinkWindow },
		p + `mask_args names "size", which is no parameter`:             func(m *Manifest) { m.MaskArgs = []string{"size"} },
	} {
		m := goodManifest()
		change(&m)
		require.EqualError(t, m.Validate(), want)
	}
	policy := Manifest{Name: "cap", Version: "1", Kind: KindPolicy}
	require.NoError(t, policy.Validate())
}

// Every mask of the list is accepted with as many arguments as it takes, and no mask
// of the list is missing from the message.
func TestEveryMaskCanBeDeclared(t *testing.T) {
	m := goodManifest()
	m.Mask = "?"
	message := m.Validate().Error()
	for mask, n := range maskArgs {
		m := goodManifest()
		m.Mask = mask
		m.MaskArgs = []string{"window", "mode"}[:n]
		require.NoError(t, m.Validate(), mask)
		require.Contains(t, message, string(mask))
	}
}

func TestCheckParams(t *testing.T) {
	m := goodManifest()
	require.NoError(t, m.CheckParams([]uint64{1, 1}))
	require.EqualError(t, m.CheckParams([]uint64{1}), "rule window takes 2 parameters; 1 were given")
	require.EqualError(t, m.CheckParams([]uint64{0, 0}), "rule window: parameter window is 0; it must be 1 to 1048576 tokens")
	require.EqualError(t, m.CheckParams([]uint64{9, 2}), "rule window: parameter mode is 2; it must be 0 to 1")
	require.Equal(t, 1, m.Param("mode"))
	require.Equal(t, -1, m.Param("none"))
}

func FuzzManifestValidate(f *testing.F) {
	m := goodManifest()
	b, err := json.Marshal(&m)
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte(`{"name":"x","version":"1","kind":"policy"}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var m Manifest
		if json.Unmarshal(in, &m) != nil || m.Validate() != nil {
			return
		}
		// A valid manifest travels, and its lowest values can be opened.
		b, err := json.Marshal(&m)
		require.NoError(t, err)
		var again Manifest
		require.NoError(t, json.Unmarshal(b, &again))
		require.NoError(t, again.Validate())
		lowest := make([]uint64, len(m.Params))
		for i, p := range m.Params {
			lowest[i] = p.Min
		}
		require.NoError(t, m.CheckParams(lowest))
	})
}

// TestManifestsThatWouldHurtTheirHost: a divisor of 0, and texts that a terminal obeys.
func TestManifestsThatWouldHurtTheirHost(t *testing.T) {
	good := func() Manifest {
		return Manifest{Name: "t", Version: "1", Kind: KindSpec, Mask: MaskChunk, MaskArgs: []string{"c"},
			Params: []Param{{Name: "c", Min: 1, Max: 9, Default: 1}}}
	}
	m := good()
	if err := m.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(m *Manifest){
		"whose min is 0":       func(m *Manifest) { m.Params[0].Min = 0 },
		"version \"\\x1b[2J\"": func(m *Manifest) { m.Version = "\x1b[2J" },
		"unit \"\\x1b[2J\"":    func(m *Manifest) { m.Params[0].Unit = "\x1b[2J" },
		"enum name \"a\\rb\"":  func(m *Manifest) { m.Params[0].Enum = []string{"a\rb"} },
	} {
		m := good()
		change(&m)
		if err := m.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
