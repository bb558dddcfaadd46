package abi

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// A Kind says what a rule is for.
type Kind string

const (
	// KindSpec is the rule of one attention type, used by one group.
	KindSpec Kind = "spec"
	// KindPolicy is a rule that applies to all groups.
	KindPolicy Kind = "policy"
)

// A MaskKind names what a query at position q may read, from a closed list. The
// registration check derives the truth from it, so Need cannot be invented.
type MaskKind string

const (
	// MaskCausal: q reads every k <= q. No arguments.
	MaskCausal MaskKind = "causal"
	// MaskWindow: q reads k when q-k < window. Arguments: window.
	MaskWindow MaskKind = "window"
	// MaskChunk: q reads k when both lie in the same run of c tokens. Arguments: c.
	MaskChunk MaskKind = "attention-chunk"
	// MaskSinkWindow: q reads k < sink, and k when q-k < window. Arguments: sink, window.
	MaskSinkWindow MaskKind = "sink+window"
	// MaskState: q reads only the recurrent state saved after token q-1. No arguments.
	MaskState MaskKind = "state"
	// MaskPromptWindow: q reads the whole prompt, and k when q-k < window.
	// Arguments: window.
	MaskPromptWindow MaskKind = "prompt+window"
	// MaskLatent: q reads every k <= q, kept as one latent per ratio tokens.
	// Arguments: ratio.
	MaskLatent MaskKind = "latent"
	// MaskUnverified: none of the above. Need is taken on trust, and every verdict
	// says so.
	MaskUnverified MaskKind = "unverified"
)

// maskArgs is how many parameters each mask names.
var maskArgs = map[MaskKind]int{
	MaskCausal: 0, MaskWindow: 1, MaskChunk: 1, MaskSinkWindow: 2, MaskState: 0,
	MaskPromptWindow: 1, MaskLatent: 1, MaskUnverified: 0,
}

// A Param is one parameter of a rule. Values are integers; an enum is the index of a
// name.
type Param struct {
	// Name as it appears in a deployment file.
	Name string `json:"name"`
	// Min and Max bound the value, both inclusive.
	Min uint64 `json:"min"`
	Max uint64 `json:"max"`
	// Default is used when the file is silent and Required is false.
	Default uint64 `json:"default,omitempty"`
	// Required says that the file must give a value.
	Required bool `json:"required,omitempty"`
	// Unit is what the value counts, for messages: "tokens", "chunks".
	Unit string `json:"unit,omitempty"`
	// Enum, when set, names the values 0..len-1; Min and Max are then 0 and len-1.
	Enum []string `json:"enum,omitempty"`
}

// Check returns an error that names the parameter and its range when v is outside.
func (p *Param) Check(v uint64) error {
	if v < p.Min || v > p.Max {
		unit := ""
		if p.Unit != "" {
			unit = " " + p.Unit
		}
		return errors.New("parameter " + p.Name + " is " + decimal(v) + "; it must be " + decimal(p.Min) + " to " + decimal(p.Max) + unit)
	}
	return nil
}

// A Manifest says what a rule is. It travels as JSON.
type Manifest struct {
	// Name as it appears in a deployment file: lower-case letters, digits and '-'.
	Name string `json:"name"`
	// Version of the rule's behaviour, free text such as "1.2.0".
	Version string `json:"version"`
	Kind    Kind   `json:"kind"`
	// Mask is what attention reads; empty for a policy.
	Mask MaskKind `json:"mask,omitempty"`
	// MaskArgs names, in the order of the mask's arguments, the parameters that
	// give their values.
	MaskArgs []string `json:"mask_args,omitempty"`
	// Params in the order in which Open takes their values.
	Params []Param `json:"params,omitempty"`
}

// paramsMax bounds the parameters of one rule: the largest shipped rule has 3, and a
// module that claims thousands is an attack on the host's memory, not a rule.
const paramsMax = 32

// nameBytesMax bounds names so that they fit a metric label and a table column.
const nameBytesMax = 64

// Validate reports the first thing wrong with a manifest.
func (m *Manifest) Validate() error {
	if err := checkName("rule", m.Name); err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("manifest of rule %s: "+format, append([]any{m.Name}, args...)...)
	}
	if m.Version == "" || len(m.Version) > nameBytesMax {
		return bad("version %q must have 1 to %d bytes", m.Version, nameBytesMax)
	}
	if !shown(m.Version) {
		return bad("version %q has characters that do not print", m.Version)
	}
	if len(m.Params) > paramsMax {
		return bad("%d parameters; at most %d are allowed", len(m.Params), paramsMax)
	}
	for i := range m.Params {
		if err := m.checkParam(i); err != nil {
			return bad("%w", err)
		}
	}
	switch m.Kind {
	case KindPolicy:
		if m.Mask != "" || len(m.MaskArgs) > 0 {
			return bad("a policy has no mask, but mask is %q", m.Mask)
		}
		return nil
	case KindSpec:
	default:
		return bad("kind is %q; it must be %q or %q", m.Kind, KindSpec, KindPolicy)
	}
	n, ok := maskArgs[m.Mask]
	if !ok {
		return bad("mask %q is not in the list: causal, window, attention-chunk, sink+window, state, prompt+window, latent, unverified", m.Mask)
	}
	if len(m.MaskArgs) != n {
		return bad("mask %s takes %d arguments, but mask_args names %d", m.Mask, n, len(m.MaskArgs))
	}
	for _, a := range m.MaskArgs {
		if m.Param(a) < 0 {
			return bad("mask_args names %q, which is no parameter", a)
		}
		if p := &m.Params[m.Param(a)]; p.Min == 0 && (m.Mask == MaskChunk || m.Mask == MaskLatent) {
			return bad("mask %s divides by parameter %s, whose min is 0; it must be at least 1", m.Mask, a)
		}
	}
	return nil
}

func (m *Manifest) checkParam(i int) error {
	p := &m.Params[i]
	if err := checkName("parameter", p.Name); err != nil {
		return err
	}
	for j := range i {
		if m.Params[j].Name == p.Name {
			return fmt.Errorf("parameter %s is declared twice", p.Name)
		}
	}
	if !shown(p.Unit) {
		return fmt.Errorf("parameter %s: unit %q must have at most %d printable characters", p.Name, p.Unit, nameBytesMax)
	}
	for _, e := range p.Enum {
		if e == "" || !shown(e) {
			return fmt.Errorf("parameter %s: enum name %q must have 1 to %d printable characters", p.Name, e, nameBytesMax)
		}
	}
	if p.Max < p.Min {
		return fmt.Errorf("parameter %s: max is %d, below min, %d", p.Name, p.Max, p.Min)
	}
	if p.Max > MaxTokens {
		return fmt.Errorf("parameter %s: max is %d; the contract allows %d", p.Name, p.Max, uint64(MaxTokens))
	}
	if len(p.Enum) > 0 && (p.Min != 0 || p.Max != uint64(len(p.Enum)-1)) {
		return fmt.Errorf("parameter %s: an enum of %d names ranges from 0 to %d, but min and max are %d and %d",
			p.Name, len(p.Enum), len(p.Enum)-1, p.Min, p.Max)
	}
	if !p.Required {
		if err := p.Check(p.Default); err != nil {
			return fmt.Errorf("default of %w", err)
		}
	}
	return nil
}

// Param returns the index of a parameter by name, or -1.
func (m *Manifest) Param(name string) int {
	for i := range m.Params {
		if m.Params[i].Name == name {
			return i
		}
	}
	return -1
}

// CheckParams reports the first value that does not fit the manifest.
func (m *Manifest) CheckParams(values []uint64) error {
	if len(values) != len(m.Params) {
		return errors.New("rule " + m.Name + " takes " + strconv.Itoa(len(m.Params)) + " parameters; " + strconv.Itoa(len(values)) + " were given")
	}
	for i := range m.Params {
		if err := m.Params[i].Check(values[i]); err != nil {
			return errors.New("rule " + m.Name + ": " + err.Error())
		}
	}
	return nil
}

// decimal writes a number. What a guest runs of this package does not use fmt, which
// would make up a third of its module.
func decimal(v uint64) string { return strconv.FormatUint(v, 10) }

// shown reports whether a text of a manifest can be printed as it is: a manifest comes
// from anywhere, and a terminal obeys what it is sent.
func shown(s string) bool {
	return len(s) <= nameBytesMax && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

func checkName(what, s string) error {
	if s == "" || len(s) > nameBytesMax || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
		return fmt.Errorf("%s name %q: 1 to %d of a-z, 0-9, - and _ are allowed", what, s, nameBytesMax)
	}
	return nil
}
