package strictyaml_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
	"pgregory.net/rapid"
)

type inner struct {
	ID   string `yaml:"id"`
	Size int64  `yaml:"size"`
}

type config struct {
	Name   string            `yaml:"name"`
	On     bool              `yaml:"on"`
	N      int               `yaml:"n"`
	U      uint32            `yaml:"u"`
	Peers  []inner           `yaml:"peers"`
	TLS    *inner            `yaml:"tls"`
	Labels map[string]string `yaml:"labels"`
	Any    map[string]any    `yaml:"any"`
}

func TestDecode(t *testing.T) {
	var c config
	require.NoError(t, strictyaml.Decode("f", []byte(`
name: x
on: true
n: -4
u: 7
peers: [{id: a, size: 1}, {id: b}]
tls: {id: k}
labels: {a: b}
any: {w: 3, s: t}
`), &c))
	require.Equal(t, config{Name: "x", On: true, N: -4, U: 7, Peers: []inner{{"a", 1}, {"b", 0}}, TLS: &inner{ID: "k"},
		Labels: map[string]string{"a": "b"}, Any: map[string]any{"w": 3, "s": "t"}}, c)
}

func TestMessages(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"name: [1]", "f:1: name is a list; it must be a string"},
		{"name: {a: 1}", "f:1: name is a map; it must be a string"},
		{"name:", "f:1: name is nothing; it must be a string"},
		{"on: yes please", `f:1: on is "yes please"; it must be true or false`},
		{"n: 1.5", `f:1: n is "1.5"; it must be an integer`},
		{"u: 4294967296", `f:1: u is "4294967296"; it must be an integer of at least 0`},
		{"name: a\nname: b", "f:2: name is given twice"},
		{"labels: {a: b, a: c}", "f:1: labels.a is given twice"},
		{"labels: 4", `f:1: labels is "4"; it must be a map of names to values`},
		{"peers: 4", `f:1: peers is "4"; it must be a list`},
		{"peers:\n- id: x\n- idd: y", `f:3: unknown key "peers[1].idd"; did you mean "id"? known here: id, size`},
		{"nam: 4", `f:1: unknown key "nam"; did you mean "name"? known here: name, on, n, u, peers, tls, labels, any`},
		{"name: &a x\nlabels: {k: *a}", "f:2: labels.k: anchors and aliases are not supported; write the value out"},
		{"\t", "f: not valid YAML: found character that cannot start any token"},
		{"# nothing", "f: the file is empty"},
		{strings.Repeat("a b ", 100), `f:1: the file is "` + strings.Repeat("a b ", 20) + `..."; it must be a map of keys to values`},
	} {
		var v config
		err := strictyaml.Decode("f", []byte(c.in), &v)
		require.EqualError(t, err, c.want, c.in)
	}
	err := strictyaml.Decode("f", []byte(strings.Repeat("#", strictyaml.FileBytesMax+1)), &config{})
	require.EqualError(t, err, "f: 1048577 bytes; a configuration file has at most 1048576")
}

// TestNearest: a name with one letter changed finds itself among names that are far apart.
func TestNearest(t *testing.T) {
	names := []string{"max_tokens", "align_tokens", "policies", "roles"}
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(names).Draw(t, "name")
		i := rapid.IntRange(0, len(name)-1).Draw(t, "at")
		require.Equal(t, name, strictyaml.Nearest(name[:i]+"x"+name[i+1:], names))
		require.Equal(t, name, strictyaml.Nearest(name[:i]+name[i+1:], names))
	})
	require.Equal(t, "", strictyaml.Nearest("x", nil))
}

// Lines knows the line of every key that Decode takes.
func TestLines(t *testing.T) {
	lines := strictyaml.Lines([]byte("name: x\npeers:\n  - id: a\n    size: 1\n  - {id: b}\ntls:\n  id: k\n"))
	require.Equal(t, map[string]int{
		"name": 1, "peers": 2, "peers[0]": 3, "peers[0].id": 3, "peers[0].size": 4, "peers[1]": 5, "peers[1].id": 5, "tls": 6, "tls.id": 7,
	}, lines)
	require.Empty(t, strictyaml.Lines([]byte("a: [")))
	require.Empty(t, strictyaml.Lines(nil))
}
