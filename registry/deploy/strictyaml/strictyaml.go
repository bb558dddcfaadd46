// Package strictyaml decodes YAML configuration into Go structs and refuses what it
// does not know: an unknown key names the nearest known one, and every error names the
// file, the line and what was expected there.
//
// Struct fields are named by their yaml tags. It supports what configuration files
// need: structs, slices, maps with string keys, strings, booleans, integers, and any.
package strictyaml

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// FileBytesMax bounds a configuration file: 1 MiB, a thousand times a large
// deployment. A bigger file is a mistake, such as a model given instead.
const FileBytesMax = 1 << 20

// An Error is one thing wrong in a file.
type Error struct {
	File string
	Line int // from 1; 0 = the whole file
	Msg  string
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.File, e.Msg)
	}
	return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Msg)
}

// Decode fills the struct that into points to from one YAML document. name is the file's
// name for messages.
func Decode(name string, data []byte, into any) error {
	d := decoder{name}
	if len(data) > FileBytesMax {
		return d.errorf(0, "%d bytes; a configuration file has at most %d", len(data), FileBytesMax)
	}
	var doc yaml.Node
	documents := yaml.NewDecoder(bytes.NewReader(data))
	if err := documents.Decode(&doc); err != nil && err != io.EOF {
		return d.errorf(0, "not valid YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if doc.Kind == 0 || len(doc.Content) == 0 {
		return d.errorf(0, "the file is empty")
	}
	var more yaml.Node
	switch err := documents.Decode(&more); {
	case err == nil:
		return d.errorf(more.Line, "a second document begins; a configuration file has one")
	case err != io.EOF:
		return d.errorf(0, "not valid YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	return d.value(doc.Content[0], reflect.ValueOf(into).Elem(), "")
}

// Lines returns the line of each key of a document that Decode takes, by its path, such
// as "peers[0].id". It is for messages about values that only their reader can judge.
func Lines(data []byte) map[string]int {
	lines := map[string]int{}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil || len(doc.Content) == 0 {
		return lines
	}
	addLines(lines, doc.Content[0], "")
	return lines
}

func addLines(lines map[string]int, n *yaml.Node, path string) {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			key := join(path, n.Content[i].Value)
			lines[key] = n.Content[i].Line
			addLines(lines, n.Content[i+1], key)
		}
	case yaml.SequenceNode:
		for i, c := range n.Content {
			key := fmt.Sprintf("%s[%d]", path, i)
			lines[key] = c.Line
			addLines(lines, c, key)
		}
	}
}

type decoder struct{ name string }

func (d decoder) errorf(line int, format string, args ...any) error {
	return &Error{d.name, line, fmt.Sprintf(format, args...)}
}

// value decodes n into v; path names the key for messages.
func (d decoder) value(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind == yaml.AliasNode {
		return d.errorf(n.Line, "%s: anchors and aliases are not supported; write the value out", path)
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return d.value(n, v.Elem(), path)
	case reflect.Struct:
		return d.structure(n, v, path)
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			return d.expected(n, path, "a list")
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, c := range n.Content {
			if err := d.value(c, v.Index(i), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return err
			}
		}
		return nil
	case reflect.Map:
		return d.mapping(n, v, path)
	default:
		return d.scalar(n, v, path)
	}
}

func (d decoder) mapping(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind != yaml.MappingNode {
		return d.expected(n, path, "a map of names to values")
	}
	v.Set(reflect.MakeMap(v.Type()))
	for i := 0; i < len(n.Content); i += 2 {
		k, e := n.Content[i].Value, reflect.New(v.Type().Elem()).Elem()
		if err := d.value(n.Content[i+1], e, join(path, k)); err != nil {
			return err
		}
		if v.MapIndex(reflect.ValueOf(k)).IsValid() {
			return d.errorf(n.Content[i].Line, "%s is given twice", join(path, k))
		}
		v.SetMapIndex(reflect.ValueOf(k), e)
	}
	return nil
}

func (d decoder) structure(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind != yaml.MappingNode {
		return d.expected(n, path, "a map of keys to values")
	}
	fields := map[string]int{}
	var names []string
	for i := range v.NumField() {
		if name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ","); name != "" && name != "-" {
			fields[name] = i
			names = append(names, name)
		}
	}
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		key := n.Content[i].Value
		f, ok := fields[key]
		if !ok {
			return d.errorf(n.Content[i].Line, "unknown key %q%s known here: %s",
				join(path, key), DidYouMean(key, names), strings.Join(names, ", "))
		}
		if seen[key] {
			return d.errorf(n.Content[i].Line, "%s is given twice", join(path, key))
		}
		seen[key] = true
		if err := d.value(n.Content[i+1], v.Field(f), join(path, key)); err != nil {
			return err
		}
	}
	return nil
}

func (d decoder) scalar(n *yaml.Node, v reflect.Value, path string) error {
	if v.Kind() == reflect.Interface {
		var x any
		if err := n.Decode(&x); err != nil {
			return d.errorf(n.Line, "%s: %v", path, err)
		}
		if x != nil {
			v.Set(reflect.ValueOf(x))
		}
		return nil
	}
	want := map[reflect.Kind]string{
		reflect.String: "a string", reflect.Bool: "true or false",
		reflect.Int: "an integer", reflect.Int64: "an integer",
		reflect.Uint32: "an integer of at least 0", reflect.Uint64: "an integer of at least 0",
	}[v.Kind()]
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return d.expected(n, path, want)
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(n.Value)
		return nil
	case reflect.Bool:
		var b bool
		if n.Tag != "!!bool" || n.Decode(&b) != nil {
			return d.expected(n, path, want)
		}
		v.SetBool(b)
		return nil
	case reflect.Int, reflect.Int64:
		var i int64
		if n.Tag != "!!int" || n.Decode(&i) != nil {
			return d.expected(n, path, want)
		}
		v.SetInt(i)
		return nil
	case reflect.Uint32, reflect.Uint64:
		var u uint64
		if n.Tag != "!!int" || n.Decode(&u) != nil || v.Kind() == reflect.Uint32 && u > math.MaxUint32 {
			return d.expected(n, path, want)
		}
		v.SetUint(u)
		return nil
	}
	return d.errorf(n.Line, "%s: a field of type %s cannot be configured", path, v.Type())
}

// shownBytes is how much of a wrong value a message shows: a text file of another kind is
// one long value.
const shownBytes = 80

func (d decoder) expected(n *yaml.Node, path, want string) error {
	got := n.Value
	switch {
	case n.Kind == yaml.MappingNode:
		got = "a map"
	case n.Kind == yaml.SequenceNode:
		got = "a list"
	case n.Tag == "!!null":
		got = "nothing"
	default:
		if len(got) > shownBytes {
			got = strings.ToValidUTF8(got[:shownBytes], "") + "..."
		}
		got = fmt.Sprintf("%q", got)
	}
	if path == "" {
		path = "the file"
	}
	return d.errorf(n.Line, "%s is %s; it must be %s", path, got, want)
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// DidYouMean returns `; did you mean "name"?` with the nearest name when it is near
// enough to be meant, else ";". A list of what is known follows well after either.
func DidYouMean(s string, names []string) string {
	n := Nearest(s, names)
	if n == "" || distance(s, n) > max(2, len(s)/3) {
		return ";"
	}
	return fmt.Sprintf("; did you mean %q?", n)
}

// Nearest returns the name with the smallest edit distance to s; the first of equals.
// It returns "" when there are no names.
func Nearest(s string, names []string) string {
	best, least := "", math.MaxInt
	for _, n := range names {
		if d := distance(s, n); d < least {
			best, least = n, d
		}
	}
	return best
}

// distance is the number of bytes to insert, delete or replace to turn a into b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			diag = row[j+1]
			row[j+1] = slices.Min([]int{cost, row[j] + 1, diag + 1})
		}
	}
	return row[len(b)]
}
