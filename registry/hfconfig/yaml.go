package hfconfig

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/tierd/tierd/registry/deploy"
)

// notes say where the parts of a deployment came from.
type notes struct {
	file                   string
	maxTokens, alignTokens string
	derivedAlign           uint64 // that alignTokens is said of
	groups                 []groupNotes
}

type groupNotes struct {
	head                              []string // lines above the group
	blocks, layers, heads, dim, dtype string   // beside its keys
}

// YAML returns the deployment as a file, with a comment for each group that says from which
// key it was derived.
func (d *Derived) YAML() []byte {
	var w writer
	dep := d.Deployment
	w.comment(0, "Derived from "+shown(d.notes.file)+" by tierd check --model.")
	w.line(0, "model", plain(dep.Model), "")
	w.line(0, "max_tokens", dep.MaxTokens, d.notes.maxTokens)
	if dep.HashTokens > 0 {
		w.line(0, "hash_tokens", dep.HashTokens, "the greatest common divisor of the blocks")
	}
	align := d.notes.alignTokens
	if dep.AlignTokens != d.notes.derivedAlign {
		align = ""
	}
	w.line(0, "align_tokens", dep.AlignTokens, align)
	w.raw("groups:")
	for i := range dep.Groups {
		w.group(&dep.Groups[i], &d.notes.groups[i])
	}
	if len(dep.Policies) > 0 {
		w.raw("policies:")
	}
	for _, p := range dep.Policies {
		w.raw("  - {rule: %s%s}", plain(p.Rule), flow(", params: ", p.Params))
	}
	if dep.Roles != nil {
		w.line(0, "roles", flowList(dep.Roles), "")
	}
	if dep.Legs != nil {
		w.line(0, "legs", flowList(dep.Legs), "")
	}
	if dep.MaxStoreTokens > 0 {
		w.line(0, "max_store_tokens", dep.MaxStoreTokens, "")
	}
	if dep.Engine != "" {
		w.line(0, "engine", plain(dep.Engine), "")
	}
	if len(dep.EngineParams) > 0 {
		w.raw("%s", flow("engine_params: ", dep.EngineParams))
	}
	return []byte(w.b.String())
}

// shown returns a path as a comment may hold it.
func shown(path string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, path)
}

// A writer writes the lines of a file.
type writer struct{ b strings.Builder }

func (w *writer) raw(format string, args ...any) { fmt.Fprintf(&w.b, format+"\n", args...) }

// commentColumns is the width of comments of several lines.
const commentColumns = 96

// comment writes a paragraph.
func (w *writer) comment(indent int, text string) {
	line := fmt.Sprintf("%*s#", indent, "")
	for i, word := range strings.Fields(text) {
		if i > 0 && len(line)+1+len(word) > commentColumns {
			w.raw("%s", line)
			line = fmt.Sprintf("%*s#", indent, "")
		}
		line += " " + word
	}
	w.raw("%s", line)
}

// noteColumn is where the comments beside values stand.
const noteColumn = 26

func (w *writer) line(indent int, key string, value any, note string) {
	s := fmt.Sprintf("%*s%s: %v", indent, "", key, value)
	if note != "" {
		s = fmt.Sprintf("%-*s # %s", noteColumn, s, note)
	}
	w.raw("%s", s)
}

func (w *writer) group(g *deploy.Group, n *groupNotes) {
	for _, text := range n.head {
		w.comment(2, text)
	}
	w.raw("  - name: %s", plain(g.Name))
	w.line(4, "rule", plain(g.Rule), "")
	if len(g.Params) > 0 {
		w.raw("%s", flow("    params: ", g.Params))
	}
	chunks := ""
	if g.Rule != "state" {
		chunks = fmt.Sprintf("--chunk-blocks: chunks of %d tokens", g.ChunkTokens())
	}
	w.line(4, "block_tokens", g.BlockTokens, n.blocks)
	w.line(4, "chunk_blocks", g.ChunkBlocks, chunks)
	w.line(4, "layers", g.Layers, n.layers)
	w.line(4, "kv_heads", g.KVHeads, n.heads)
	w.line(4, "head_dim", g.HeadDim, n.dim)
	w.line(4, "dtype", g.DType, n.dtype)
	if g.Draft {
		w.line(4, "draft", true, "")
	}
}

// word is text that YAML takes for text without quotes, unless it is one of notText.
var (
	word    = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*$`)
	notText = []string{"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
)

// plain returns text as YAML writes it: quoted where it must be.
func plain(s string) string {
	if word.MatchString(s) && !slices.Contains(notText, strings.ToLower(s)) {
		return s
	}
	return value(s)
}

// flow returns a map on one line after a key, or nothing for an empty one.
func flow(key string, m map[string]any) string {
	if len(m) == 0 {
		return ""
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		v := value(m[k])
		if s, ok := m[k].(string); ok {
			v = plain(s)
		}
		parts = append(parts, k+": "+v)
	}
	return key + "{" + strings.Join(parts, ", ") + "}"
}

// value returns a value as JSON, which YAML reads too.
func value(v any) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("hfconfig: a value does not marshal: " + err.Error())
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func flowList(l []string) string {
	var parts []string
	for _, s := range l {
		parts = append(parts, plain(s))
	}
	return "[" + strings.Join(parts, ", ") + "]"
}
