// Package deploy reads a deployment file: one model's KV cache groups, the rules and
// parameters that govern them, the policies, the legs and the limits. A deployment is
// what a verdict is about, and what two nodes must agree on before they exchange bytes.
package deploy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
)

// A Deployment is the contents of a deployment file, with defaults filled in.
type Deployment struct {
	// Model is a free name. Two nodes must give the same one.
	Model string `yaml:"model" json:"model"`
	// MaxTokens is the longest prompt.
	MaxTokens uint64 `yaml:"max_tokens" json:"max_tokens"`
	// HashTokens is the granule of the engine's prefix hash. Default: the greatest
	// common divisor of the groups' blocks.
	HashTokens uint64 `yaml:"hash_tokens" json:"hash_tokens"`
	// AlignTokens is the distance of the points at which every prompt can be resumed;
	// 0 = none. A multiple of every group's chunk. Small values keep nearly every
	// chunk of a window.
	AlignTokens uint64 `yaml:"align_tokens" json:"align_tokens"`
	// Groups of the model, in the engine's order: the index is part of every key.
	Groups   []Group  `yaml:"groups" json:"groups"`
	Policies []Policy `yaml:"policies" json:"policies"`
	// Roles that nodes of this deployment take: producer, consumer. Default: both.
	Roles []string `yaml:"roles" json:"roles"`
	// Legs that are used: pd, demand, probe. Default: pd and probe.
	Legs []string `yaml:"legs" json:"legs"`
	// MaxStoreTokens caps what is stored of one request; 0 = no cap.
	MaxStoreTokens uint64 `yaml:"max_store_tokens" json:"max_store_tokens"`
	// Engine whose semantics are judged, one of Engines. Default: tierd, the only one that
	// the daemon serves.
	Engine string `yaml:"engine" json:"engine"`
	// EngineParams of engines other than tierd; StockEngine has them all.
	EngineParams map[string]any `yaml:"engine_params" json:"engine_params,omitempty"`

	file string // its path, for messages and for rules given as paths
}

// A Group is a set of layers that share a block table and a rule.
type Group struct {
	Name string `yaml:"name" json:"name"`
	// Rule is a shipped name, or ./file.wasm#name.
	Rule   string         `yaml:"rule" json:"rule"`
	Params map[string]any `yaml:"params" json:"params,omitempty"`
	// BlockTokens is the size of one GPU block; ChunkBlocks how many make a chunk.
	BlockTokens uint64 `yaml:"block_tokens" json:"block_tokens"`
	ChunkBlocks uint64 `yaml:"chunk_blocks" json:"chunk_blocks"`
	// Layers, KVHeads, HeadDim and DType give the size of a block's bytes.
	Layers  uint64 `yaml:"layers" json:"layers"`
	KVHeads uint64 `yaml:"kv_heads" json:"kv_heads"`
	HeadDim uint64 `yaml:"head_dim" json:"head_dim"`
	DType   string `yaml:"dtype" json:"dtype"`
	// Draft marks the group of a draft head.
	Draft bool `yaml:"draft" json:"draft,omitempty"`
}

// A Policy names a policy rule.
type Policy struct {
	Rule   string         `yaml:"rule" json:"rule"`
	Params map[string]any `yaml:"params" json:"params,omitempty"`
}

// ChunkTokens is the number of tokens in a chunk of the group.
func (g *Group) ChunkTokens() uint64 { return g.BlockTokens * g.ChunkBlocks }

// BlockBytes is the size of one block of the group on the GPU: K and V of all layers.
func (g *Group) BlockBytes() uint64 {
	return g.Layers * 2 * g.BlockTokens * g.KVHeads * g.HeadDim * dtypeBytes[g.DType]
}

// ChunkBytes is the size of one chunk of the group.
func (g *Group) ChunkBytes() uint64 { return g.BlockBytes() * g.ChunkBlocks }

var dtypeBytes = map[string]uint64{"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}

// Limits of a deployment file. They keep arithmetic far from overflow and name a typing
// error before it becomes an allocation.
const (
	// groupsMax: the model with most groups published has 5.
	groupsMax = 64
	// chunkBytesMax: 1 GiB is a thousand times the chunk that moves best.
	chunkBytesMax = 1 << 30
	// nameBytesMax bounds names, which appear in tables and as metric labels.
	nameBytesMax = 128
	// dimMax bounds layers, heads and head size.
	dimMax = 1 << 16
)

// Load reads and parses a deployment file.
func Load(path string) (*Deployment, error) {
	data, err := read(path)
	if err != nil {
		return nil, fmt.Errorf("deployment file: %w", err)
	}
	d, err := Parse(path, data)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// fileBytesMax bounds a deployment file: a thousand times what one has.
const fileBytesMax = 1 << 20

// read reads a file that may be a pipe, or have no end.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, fileBytesMax+1))
	if err == nil && len(data) > fileBytesMax {
		err = fmt.Errorf("%s has more than %d bytes", path, fileBytesMax)
	}
	return data, err
}

// Parse parses a deployment file. name is its path: it appears in messages, and rules
// given as relative paths are looked for beside it.
func Parse(name string, data []byte) (*Deployment, error) {
	d := &Deployment{file: name}
	if err := strictyaml.Decode(name, data, d); err != nil {
		return nil, err
	}
	d.defaults()
	if err := d.validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return d, nil
}

// Dir is the directory that relative rule paths are resolved in.
func (d *Deployment) Dir() string { return filepath.Dir(d.file) }

// File is the path that the deployment was parsed under.
func (d *Deployment) File() string { return d.file }

func (d *Deployment) defaults() {
	if len(d.Roles) == 0 {
		d.Roles = []string{"producer", "consumer"}
	}
	if len(d.Legs) == 0 {
		d.Legs = []string{"pd", "probe"}
	}
	if d.Engine == "" {
		d.Engine = EngineTierd
	}
	for i := range d.Groups {
		g := &d.Groups[i]
		if g.ChunkBlocks == 0 {
			g.ChunkBlocks = 1
		}
	}
	if d.HashTokens == 0 {
		for i := range d.Groups {
			d.HashTokens = gcd(d.HashTokens, d.Groups[i].BlockTokens)
		}
	}
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// LCM returns the least common multiple of a and b; of 0 and b it is b.
func LCM(a, b uint64) uint64 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return a / gcd(a, b) * b
}

func (d *Deployment) validate() error {
	switch {
	case d.Model == "":
		return fmt.Errorf("model is missing; give the model a name")
	case !printable(d.Model):
		return fmt.Errorf("model is %q; a name has 1 to %d printable characters", d.Model, nameBytesMax)
	case d.AlignTokens > abi.MaxTokens:
		return fmt.Errorf("align_tokens is %d; it must be at most %d", d.AlignTokens, uint64(abi.MaxTokens))
	case d.MaxTokens == 0 || d.MaxTokens > abi.MaxTokens/2:
		return fmt.Errorf("max_tokens is %d; it must be 1 to %d", d.MaxTokens, uint64(abi.MaxTokens/2))
	case len(d.Groups) == 0:
		return fmt.Errorf("groups is empty; a model has at least one")
	case len(d.Groups) > groupsMax:
		return fmt.Errorf("groups has %d entries; at most %d are supported", len(d.Groups), groupsMax)
	}
	for i := range d.Groups {
		if err := d.validateGroup(i); err != nil {
			return err
		}
	}
	if err := d.validateEngine(); err != nil {
		return err
	}
	for i, p := range d.Policies {
		if p.Rule == "" {
			return fmt.Errorf("policies[%d]: rule is missing", i)
		}
	}
	if err := oneOf("roles", d.Roles, "producer", "consumer"); err != nil {
		return err
	}
	return oneOf("legs", d.Legs, "pd", "demand", "probe")
}

func (d *Deployment) validateGroup(i int) error {
	g := &d.Groups[i]
	at := fmt.Sprintf("groups[%d]", i)
	if g.Name == "" {
		return fmt.Errorf("%s: name is missing", at)
	}
	if !printable(g.Name) {
		return fmt.Errorf("%s: name is %q; a name has 1 to %d printable characters", at, g.Name, nameBytesMax)
	}
	at = "group " + g.Name
	for j := range i {
		if d.Groups[j].Name == g.Name {
			return fmt.Errorf("%s: groups[%d] and groups[%d] have the same name", at, j, i)
		}
	}
	if g.Rule == "" {
		return fmt.Errorf("%s: rule is missing; a shipped name such as full or window, or ./file.wasm#name", at)
	}
	for _, f := range []struct {
		name string
		v    uint64
	}{{"block_tokens", g.BlockTokens}, {"chunk_blocks", g.ChunkBlocks}, {"layers", g.Layers}, {"kv_heads", g.KVHeads}, {"head_dim", g.HeadDim}} {
		if f.v == 0 || f.v > dimMax {
			return fmt.Errorf("%s: %s is %d; it must be 1 to %d", at, f.name, f.v, dimMax)
		}
	}
	if dtypeBytes[g.DType] == 0 {
		return fmt.Errorf("%s: dtype is %q; it must be one of bf16, fp16, fp32, fp8, int8", at, g.DType)
	}
	if c := product(g.Layers, 2, g.BlockTokens, g.KVHeads, g.HeadDim, dtypeBytes[g.DType], g.ChunkBlocks); c > chunkBytesMax {
		return fmt.Errorf("%s: a chunk would have more than %d bytes; lower chunk_blocks", at, chunkBytesMax)
	}
	if d.HashTokens == 0 || g.BlockTokens%d.HashTokens != 0 {
		return fmt.Errorf("%s: block_tokens is %d, hash_tokens is %d; every block must be a whole number of hash granules", at, g.BlockTokens, d.HashTokens)
	}
	if d.AlignTokens%g.ChunkTokens() != 0 {
		return fmt.Errorf("%s: align_tokens is %d, but its chunks have %d tokens (%d blocks of %d); align_tokens must be a multiple of every chunk, such as %d",
			at, d.AlignTokens, g.ChunkTokens(), g.ChunkBlocks, g.BlockTokens, d.chunkLCM())
	}
	if (d.MaxTokens+g.ChunkTokens()-1)/g.ChunkTokens() > abi.MaxChunks {
		return fmt.Errorf("%s: max_tokens %d in chunks of %d tokens is more than %d chunks; raise chunk_blocks", at, d.MaxTokens, g.ChunkTokens(), abi.MaxChunks)
	}
	return nil
}

// printable reports whether a name can be shown on a terminal as it is.
func printable(s string) bool {
	return len(s) <= nameBytesMax && utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// product multiplies, and stops at the largest uint64 instead of overflowing.
func product(factors ...uint64) uint64 {
	p := uint64(1)
	for _, f := range factors {
		hi, lo := bits.Mul64(p, f)
		if hi != 0 {
			return math.MaxUint64
		}
		p = lo
	}
	return p
}

func (d *Deployment) chunkLCM() uint64 {
	l := uint64(0)
	for i := range d.Groups {
		l = LCM(l, d.Groups[i].ChunkTokens())
	}
	return l
}

func oneOf(key string, values []string, known ...string) error {
	for i, v := range values {
		if !slices.Contains(known, v) {
			return fmt.Errorf("%s has %q%s known: %s", key, v, strictyaml.DidYouMean(v, known), strings.Join(known, ", "))
		}
		if slices.Contains(values[:i], v) {
			return fmt.Errorf("%s has %q twice", key, v)
		}
	}
	return nil
}

// Group returns the index of a group by name, or -1.
func (d *Deployment) Group(name string) int {
	return slices.IndexFunc(d.Groups, func(g Group) bool { return g.Name == name })
}

// Digest names the deployment's contents: "sha256:" and hex, over its JSON form with
// defaults filled in, so that comments and key order do not count.
func (d *Deployment) Digest() string { return digest(d) }

func digest(v any) string {
	sum := sha256.Sum256(canonical(v))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Values returns the parameter values of a rule in manifest order, from a map of the
// file. at names the group or policy in messages.
func Values(at string, m *abi.Manifest, given map[string]any) ([]uint64, error) {
	var names []string
	for i := range m.Params {
		names = append(names, m.Params[i].Name)
	}
	if err := unknownParam(m.Name, names, given); err != nil {
		return nil, fmt.Errorf("%s: %w", at, err)
	}
	values := make([]uint64, len(m.Params))
	for i := range m.Params {
		p := &m.Params[i]
		v, ok := given[p.Name]
		if !ok {
			if p.Required {
				return nil, fmt.Errorf("%s: rule %s needs parameter %s (%d to %d %s)", at, m.Name, p.Name, p.Min, p.Max, p.Unit)
			}
			values[i] = p.Default
			continue
		}
		u, err := paramValue(p, v)
		if err != nil {
			return nil, fmt.Errorf("%s: rule %s: %w", at, m.Name, err)
		}
		values[i] = u
	}
	return values, nil
}

// unknownParam reports the first given parameter, by name, that the rule does not have.
func unknownParam(rule string, names []string, given map[string]any) error {
	for _, k := range slices.Sorted(maps.Keys(given)) {
		switch {
		case slices.Contains(names, k):
		case len(names) == 0:
			return fmt.Errorf("rule %s takes no parameters, but %q is given", rule, k)
		default:
			return fmt.Errorf("rule %s has no parameter %q%s known: %s", rule, k, strictyaml.DidYouMean(k, names), strings.Join(names, ", "))
		}
	}
	return nil
}

func paramValue(p *abi.Param, v any) (uint64, error) {
	if s, ok := v.(string); ok && len(p.Enum) > 0 {
		if i := slices.Index(p.Enum, s); i >= 0 {
			return uint64(i), nil
		}
		return 0, fmt.Errorf("parameter %s is %q%s known: %s", p.Name, s, strictyaml.DidYouMean(s, p.Enum), strings.Join(p.Enum, ", "))
	}
	if s, ok := v.(string); ok {
		return 0, fmt.Errorf("parameter %s is the text %q; it must be an integer from %d to %d", p.Name, s, p.Min, p.Max)
	}
	i, ok := v.(int)
	if !ok || i < 0 {
		return 0, fmt.Errorf("parameter %s is %v; it must be an integer from %d to %d", p.Name, v, p.Min, p.Max)
	}
	return uint64(i), p.Check(uint64(i))
}
