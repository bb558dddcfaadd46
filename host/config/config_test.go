package config

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry/deploy"
)

var update = flag.Bool("update", false, "write the golden file anew")

const minimal = `node_id: a
state_dir: state
engine_socket: state/engine.sock
peer_listen: 127.0.0.1:7000
data_listen: 127.0.0.1:7001
slab_bytes: 1048576
deployment: deployment.yaml
`

func TestMinimalHasEveryDefault(t *testing.T) {
	c, err := Parse("/etc/tierd/node.yaml", []byte(minimal))
	require.NoError(t, err)
	d := Defaults()
	require.Equal(t, d.Deadlines, c.Deadlines)
	require.Equal(t, "127.0.0.1:9470", c.HTTPListen)
	require.Equal(t, "/dev/shm", c.SlabDir)
	require.Equal(t, int64(1048576/2), c.Bounds.ParkedBytes)
	require.Zero(t, c.Bounds.PeerPinnedBytes, "it follows the deployment, too")
	require.Equal(t, d.Bounds.MessageBytes, c.Bounds.MessageBytes)
	level, err := c.Level()
	require.NoError(t, err)
	require.Equal(t, slog.LevelInfo, level)
}

func TestPathsAreRelativeToTheFile(t *testing.T) {
	c, err := Parse("/etc/tierd/node.yaml", []byte(strings.Replace(minimal, "state_dir: state", "state_dir: /var/lib/tierd", 1)+
		"tls: {cert: c.pem, key: k.pem, ca: /ca.pem}\ncertificate: c.json\ncertificate_keys: [a.pub, /b.pub]\n"))
	require.NoError(t, err)
	require.Equal(t, "/etc/tierd/deployment.yaml", c.Deployment)
	require.Equal(t, "/etc/tierd/state/engine.sock", c.EngineSocket)
	require.Equal(t, "/var/lib/tierd", c.StateDir)
	require.Equal(t, "/etc/tierd/c.json", c.Certificate)
	require.Equal(t, []string{"/etc/tierd/a.pub", "/b.pub"}, c.CertificateKeys)
	require.Equal(t, TLS{Cert: "/etc/tierd/c.pem", Key: "/etc/tierd/k.pem", CA: "/ca.pem"}, *c.TLS)
}

func TestZeroMeansDefault(t *testing.T) {
	c, err := Parse("node.yaml", []byte(minimal+"deadlines: {request_ms: 0, drain_ms: 7}\nbounds: {requests: 0, engines: 2}\n"))
	require.NoError(t, err)
	require.Equal(t, int64(30_000), c.Deadlines.RequestMS)
	require.Equal(t, int64(7), c.Deadlines.DrainMS)
	require.Equal(t, int64(1024), c.Bounds.Requests)
	require.Equal(t, int64(2), c.Bounds.Engines)
}

func TestLoadMissingFile(t *testing.T) {
	_, err := Load(filepath.Join(t.TempDir(), "none.yaml"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestRefusals holds the text of every refusal against a golden file: each names the
// key, the value and what to change.
func TestRefusals(t *testing.T) {
	set := func(key, value string) string {
		var out []string
		found := false
		for _, l := range strings.Split(strings.TrimSuffix(minimal, "\n"), "\n") {
			if strings.HasPrefix(l, key+":") {
				found = true
				if value == "" {
					continue
				}
				l = key + ": " + value
			}
			out = append(out, l)
		}
		if !found {
			out = append(out, key+": "+value)
		}
		return strings.Join(out, "\n") + "\n"
	}
	cases := []struct{ name, file string }{
		{"empty file", ""},
		{"no yaml", "a: [1"},
		{"unknown key", minimal + "slab_byte: 5\n"},
		{"unknown deadline", minimal + "deadlines: {request: 5}\n"},
		{"wrong type", set("slab_bytes", "much")},
		{"no node_id", set("node_id", "")},
		{"no deployment", set("deployment", "")},
		{"node_id with a space", set("node_id", "'a b'")},
		{"long socket path", set("engine_socket", "/"+strings.Repeat("s", 107))},
		{"no slab", set("slab_bytes", "")},
		{"slab of nothing", set("slab_bytes", "0")},
		{"negative slab", set("slab_bytes", "-1")},
		{"log level", set("log_level", "loud")},
		{"device without a number", set("device", "'cuda:'")},
		{"device that is no UUID", set("device", "cuda:GPU-12")},
		{"listen without port", set("peer_listen", "127.0.0.1")},
		{"control and bytes on one port", set("data_listen", "127.0.0.1:7000")},
		{"bytes and metrics on one port", set("data_listen", "127.0.0.1:9470")},
		{"advertise with a path", set("advertise", "host/data")},
		{"advertise with port 0", set("advertise", "'host:0'")},
		{"any address, nothing advertised", set("data_listen", "':7001'") + "insecure: true\n"},
		{"open without tls", set("peer_listen", "10.0.0.1:7000")},
		{"open data without tls", set("data_listen", "10.0.0.1:7000")},
		{"tls and insecure", minimal + "insecure: true\ntls: {cert: c, key: k, ca: a}\n"},
		{"tls without ca", minimal + "tls: {cert: c, key: k}\n"},
		{"certificate without keys", minimal + "certificate: c.json\n"},
		{"keys without a certificate", minimal + "certificate_keys: [ci.pub]\n"},
		{"a key without a path", minimal + "certificate: c.json\ncertificate_keys: [ci.pub, '']\n"},
		{"too many keys", minimal + "certificate: c.json\ncertificate_keys: [" + strings.Repeat("k, ", CertificateKeysMax+1) + "]\n"},
		{"peer without id", minimal + "peers: [{control: 'b:1'}]\n"},
		{"peer is self", minimal + "peers: [{id: a, control: 'b:1'}]\n"},
		{"peer twice", minimal + "peers: [{id: b, control: 'b:1'}, {id: b, control: 'b:2'}]\n"},
		{"peer without port", minimal + "peers: [{id: b, control: b}]\n"},
		{"peer with a wildcard", minimal + "peers: [{id: b, control: 'b:1', identity: '*.example'}]\n"},
		{"peer_cidrs without a length", minimal + "peer_cidrs: [10.0.0.1]\n"},
		{"peer_cidrs with a name", minimal + "peer_cidrs: [127.0.0.0/8, node-a/8]\n"},
		{"peer_cidrs with bits behind", minimal + "peer_cidrs: [10.0.0.7/24]\n"},
		{"peer_cidrs of IPv4 in IPv6", minimal + "peer_cidrs: ['::ffff:10.0.0.0/120']\n"},
		{"too many peer_cidrs", minimal + "peer_cidrs: [" + strings.Repeat("10.0.0.0/8,", 65) + "]\n"},
		{"more peers than sessions", minimal + "peers: [{id: b, control: 'b:1'}, {id: c, control: 'b:2'}]\nbounds: {sessions: 1}\n"},
		{"negative deadline", minimal + "deadlines: {lookup_ms: -1}\n"},
		{"a rate of nothing", minimal + "deadlines: {transfer_mb_per_s: -1}\n"},
		{"retries out of order", minimal + "deadlines: {retry_ms: 600}\n"},
		{"a lease shorter than its renewals", minimal + "deadlines: {lease_ms: 700}\n"},
		{"deadlines out of order", minimal + "deadlines: {suspect_ms: 200}\n"},
		{"bound too high", minimal + "bounds: {requests: 9999999}\n"},
		{"message too small", minimal + "bounds: {message_bytes: 10}\n"},
		{"peers and data at one address", strings.Replace(minimal, "data_listen: 127.0.0.1:7001", "data_listen: localhost:7000", 1)},
		{"a port of every address", strings.Replace(minimal, "data_listen: 127.0.0.1:7001", "data_listen: 0.0.0.0:7000\nadvertise: a\ninsecure: true", 1)},
		{"parked above slab", minimal + "bounds: {parked_bytes: 1048577}\n"},
		{"peer pins above slab", minimal + "bounds: {peer_pinned_bytes: -1}\n"},
	}
	var got strings.Builder
	for _, c := range cases {
		_, err := Parse("node.yaml", []byte(c.file))
		require.Error(t, err, c.name)
		fmt.Fprintf(&got, "%s\n    %v\n", c.name, err)
	}
	const golden = "testdata/refusals.txt"
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

func TestPortZeroIsNoClash(t *testing.T) {
	_, err := Parse("node.yaml", []byte(strings.NewReplacer("127.0.0.1:7000", "127.0.0.1:0", "127.0.0.1:7001", "127.0.0.1:0").Replace(minimal)))
	require.NoError(t, err)
}

// Every key that a reload does not take up is named when it changes, and no other.
func TestIgnored(t *testing.T) {
	const tls = "tls: {cert: c, key: k, ca: a}\n"
	parse := func(file string) *Config {
		c, err := Parse("node.yaml", []byte(file))
		require.NoError(t, err)
		return c
	}
	for _, c := range []struct {
		from, to string
		keys     []string
	}{
		{minimal, minimal, nil},
		{minimal, minimal + "log_level: debug\npeers: [{id: b, control: 'b:1', identity: x}]\npeer_cidrs: [10.0.0.0/8]\n", nil},
		{minimal, minimal + "deadlines: {request_ms: 30000}\n", nil}, // the default
		{minimal, strings.Replace(minimal, "slab_bytes: 1048576", "slab_bytes: 2097152", 1), []string{"slab_bytes"}},
		{minimal, minimal + "bounds: {parked_bytes: 5, engines: 3}\ndeadlines: {drain_ms: 7}\n", []string{"deadlines.drain_ms", "bounds.engines", "bounds.parked_bytes"}},
		{minimal, strings.Replace(minimal, "7001", "7002", 1) + "insecure: true\n", []string{"data_listen", "insecure"}},
		{minimal, minimal + tls, []string{"tls"}},
		{minimal + tls, minimal + strings.Replace(tls, "key: k", "key: other", 1), []string{"tls.key"}},
		{minimal, minimal + "peer_rules: other\n", []string{"peer_rules"}},
	} {
		require.Equal(t, c.keys, parse(c.from).Ignored(parse(c.to)), c.to)
	}
	// A new key of the format is compared without anybody's doing.
	a, b := parse(minimal), parse(minimal)
	for i := range reflect.TypeFor[Config]().NumField() {
		f := reflect.ValueOf(b).Elem().Field(i)
		if f.Kind() == reflect.String {
			f.SetString("changed")
		}
	}
	require.Equal(t, []string{"node_id", "state_dir", "engine_socket", "peer_listen", "data_listen", "advertise", "http_listen", "slab_dir", "device", "deployment", "certificate", "peer_rules"}, a.Ignored(b))
}

// TestDifferences: keys of objects in lists and of free objects are named as well.
func TestDifferences(t *testing.T) {
	const file = `
model: m
max_tokens: 64
groups:
  - {name: a, rule: window, params: {window: 20, extra: 1}, block_tokens: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: b, rule: full, block_tokens: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
policies: [{rule: request-level}]
`
	parse := func(change ...string) deploy.Deployment {
		text := strings.NewReplacer(change...).Replace(file)
		d, err := deploy.Parse("d.yaml", []byte(text))
		require.NoError(t, err)
		return *d
	}
	for _, c := range []struct{ change, keys []string }{
		{nil, nil},
		{[]string{"model: m", "# nothing\nmodel: m"}, nil},
		{[]string{"window: 20", "window: 40", "max_tokens: 64", "max_tokens: 32"}, []string{"max_tokens", "groups[0].params.window"}},
		{[]string{", extra: 1", ""}, []string{"groups[0].params.extra"}},
		{[]string{"params: {window: 20, extra: 1}, ", ""}, []string{"groups[0].params"}},
		{[]string{"name: b, rule: full", "name: c, rule: ./full.wasm"}, []string{"groups[1].name", "groups[1].rule"}},
		{[]string{"policies: [{rule: request-level}]", ""}, []string{"policies"}},
		{[]string{"model: m", "model: m\nlegs: [probe]"}, []string{"legs"}},
	} {
		require.Equal(t, c.keys, Differences(parse(), parse(c.change...)), "%v", c.change)
	}
}

// Only loopback needs neither tls nor insecure, whichever of the two ports it is, and
// however the address is written.
func TestWhoMayListenWhere(t *testing.T) {
	parse := func(peer, data, more string) error {
		_, err := Parse("node.yaml", []byte(strings.NewReplacer("127.0.0.1:7000", "'"+peer+"'", "127.0.0.1:7001", "'"+data+"'").Replace(minimal)+"advertise: node-a\n"+more))
		return err
	}
	for host, loopback := range map[string]bool{
		"127.0.0.1": true, "127.9.9.9": true, "[::1]": true, "localhost": true, "[::ffff:127.0.0.1]": true,
		"": false, "0.0.0.0": false, "[::]": false, "10.0.0.1": false, "[2001:db8::1]": false, "[fe80::1%eth0]": false, "[::ffff:10.0.0.1]": false,
		"node-a": false, "localhost.example": false, "127.0.0.1.example": false, "1": false,
	} {
		require.Equal(t, loopback, Loopback(host+":1"), host)
		for _, addresses := range [][2]string{{host + ":7000", "127.0.0.1:7001"}, {"127.0.0.1:7000", host + ":7001"}} {
			err := parse(addresses[0], addresses[1], "")
			if loopback {
				require.NoError(t, err, addresses)
			} else {
				require.ErrorContains(t, err, "which other machines can reach, and tls is not set", addresses)
			}
			require.NoError(t, parse(addresses[0], addresses[1], "insecure: true\n"), addresses)
			require.NoError(t, parse(addresses[0], addresses[1], "tls: {cert: c, key: k, ca: a}\n"), addresses)
		}
	}
}

func TestCIDRs(t *testing.T) {
	for file, want := range map[string][]string{
		"": {"127.0.0.0/8", "::1/128"}, "peer_cidrs: []\n": {}, "peer_cidrs: ['fd00::/8', 10.0.0.7/32]\n": {"fd00::/8", "10.0.0.7/32"},
	} {
		c, err := Parse("node.yaml", []byte(minimal+file))
		require.NoError(t, err)
		ps, err := c.CIDRs()
		require.NoError(t, err)
		got := []string{}
		for _, p := range ps {
			got = append(got, p.String())
		}
		require.Equal(t, want, got, file)
	}
}

// The example documents every key, and what it writes out is the default.
func TestExampleHasEveryKeyAndDefault(t *testing.T) {
	const path = "../../examples/node.yaml"
	c, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, path, c.File)
	want := Defaults()
	want.File = path
	// What has no default stands as it is.
	want.NodeID, want.StateDir, want.EngineSocket, want.Deployment = c.NodeID, c.StateDir, c.EngineSocket, c.Deployment
	want.PeerListen, want.DataListen, want.SlabBytes, want.Peers = c.PeerListen, c.DataListen, c.SlabBytes, c.Peers
	want.Bounds.ParkedBytes = c.SlabBytes / 2
	require.Equal(t, want, *c)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var keys func(v reflect.Type, into []string) []string
	keys = func(v reflect.Type, into []string) []string {
		for v.Kind() == reflect.Pointer || v.Kind() == reflect.Slice {
			v = v.Elem()
		}
		for i := 0; v.Kind() == reflect.Struct && i < v.NumField(); i++ {
			if name := v.Field(i).Tag.Get("yaml"); name != "-" {
				into = keys(v.Field(i).Type, append(into, name))
			}
		}
		return into
	}
	lines := strings.Split(string(text), "\n")
	for _, key := range keys(reflect.TypeFor[Config](), nil) {
		// TLS and peers are in comments; every other key is written out.
		require.True(t, slices.ContainsFunc(lines, func(l string) bool {
			return strings.HasPrefix(strings.TrimLeft(l, " #-{"), key+":")
		}), "%s is not in the example", key)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(minimal))
	f.Add([]byte(minimal + "peers: [{id: b, control: 'b:1'}]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("node.yaml", data)
		if err == nil {
			require.NoError(t, c.Validate())
		}
	})
}

// A device that is given by mistake has no end.
func TestFileWithoutEnd(t *testing.T) {
	_, err := Load("/dev/zero")
	require.EqualError(t, err, "node configuration: read /dev/zero: it has more than 1048576 bytes")
	_, err = ReadAtMost("/dev/zero", 7)
	require.EqualError(t, err, "read /dev/zero: it has more than 7 bytes")
	path := filepath.Join(t.TempDir(), "seven")
	require.NoError(t, os.WriteFile(path, []byte("7 bytes"), 0o600))
	data, err := ReadAtMost(path, 7)
	require.NoError(t, err)
	require.Equal(t, "7 bytes", string(data))
}
