package status

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/host/build"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func digest(c string) string { return "sha256:" + strings.Repeat(c, 64) }

// full is a status with something in every field.
func full() *Status {
	return &Status{
		Form: Form, NodeID: "decode-1", PID: 4711, BootID: "0x7be5a1c2d3e4f501", State: Serving, Ready: true, CheckPercent: 100, UpSeconds: 7321.25,
		Attention: []string{"peer prefill-2 is suspect: nothing was heard for 750ms; requests that name it are computed here"},
		Build:     build.Info{Version: "v1.2.3", Revision: "c1fa94f", Modified: true, Go: "go1.26.0", Platform: "linux/amd64", RuleContract: 1, ShippedRules: digest("5")},
		Addresses: Addresses{EngineSocket: "/run/tierd/engine.sock", Peer: "10.0.0.1:7000", Data: "10.0.0.1:7001", HTTP: "127.0.0.1:9470"},
		Deployment: Deployment{Model: "gpt-oss-120b", File: "/etc/tierd/deployment.yaml", Digest: digest("d"),
			Legs: []string{"pd", "probe"}, Roles: []string{"producer", "consumer"}},
		Verdict: &Verdict{Verdict: "accepted", From: FromCertificate, DeploymentDigest: digest("d"), RulesDigest: digest("e"), Checker: digest("c"),
			CertificateKey: digest("a"), Cases: 1310720, Seconds: 14.25, Rules: []Rule{
				{For: "sliding", Name: "window", Version: "1.0.0", Source: "shipped", Digest: digest("5")},
				{For: "policy", Name: "mine", Version: "0.3.1", Source: "/etc/tierd/mine.wasm", Digest: digest("f")}}},
		Engines: 2, Requests: 31,
		Device: Device{Name: "cuda:1", Why: "device is cuda:1", PinnedBytes: 805306368, PinnedOf: 1073741824, PinError: "as if it had stopped",
			Copies: []Copies{{Device: "mem", Direction: "store"}, {Device: "cuda", Direction: "load", InWork: 3, Bytes: 1 << 40, Seconds: 31.5, Failed: 2}},
			GPU: &GPU{Name: "NVIDIA H200", UUID: "GPU-3f1c9a52-0b7e-4d58-9a61-7be5a1c2d3e4", PCIBusID: "0000:18:00.0", Lost: "as if", MemoryUsedBytes: 128 << 30, MemoryTotalBytes: 141 << 30,
				PCIeGeneration: 3, PCIeGenerationMax: 5, PCIeLanes: 8, PCIeLanesMax: 16, Idle: true, NUMANode: 1, ECC: true, UncorrectedErrors: 1, XIDErrors: 2, NoHealth: "as if",
				CheckedSeconds: 1.5}},
		Slots: Slots{Total: 4096, SlotBytes: 262144, Free: 1000, Writing: 20, Readable: 3070, Detached: 4, Fenced: 2, Evictable: 2900,
			ResidentBytes: 804782080, Evicted: 12, Refused: 3},
		Pins: []Pins{{Owner: "request", Kind: "read", Count: 96, Bytes: 25165824, OldestSeconds: 1.5, OldestOwner: "chat-17#40"},
			{Owner: "peer", Kind: "grab"}},
		Parked: Parked{Transfers: 3, Chunks: 40, Bytes: 10485760, BytesMax: 536870912},
		Waits: []Wait{{Wait: "transfer", InWork: 2, OldestSeconds: 0.042, Ended: map[string]uint64{"ok": 900, "peer": 7, "deadline": 0}},
			{Wait: "lookup", Ended: map[string]uint64{"ok": 0, "peer": 0}}},
		Groups: []Group{{Group: "sliding", Leg: "pd", Demanded: 1800, Supplied: 12, Transferred: 1790, Unmatched: map[string]uint64{"peer": 8, "unmatched": 2, "aborted": 0},
			PeerDemanded: 10, PeerEnded: map[string]uint64{"transferred": 9, "evicted": 1, "peer": 0}},
			{Group: "sliding", Leg: "demand", Unmatched: map[string]uint64{"peer": 0}, PeerEnded: map[string]uint64{"transferred": 0}}},
		Peers: []Peer{
			{ID: "prefill-1", Control: "10.0.0.2:7000", Configured: true, State: "ready", Reason: "session", Draining: true, BootID: "0x1f", RTTSeconds: 0.000212,
				SilenceSeconds: 0.1, Sessions: 1, Lookups: 1, Demands: 2, Serves: 3, PinnedBytes: 3 << 20, PinnedBytesMax: 1 << 30, DataLanes: 4,
				Legs: []Leg{{Leg: "pd", Why: "it runs other rules"}, {Leg: "demand", Why: "it runs other rules"}, {Leg: "probe", Allowed: true}},
				Pair: Pair{State: "refused", Reason: "refused: prompts of 20 tokens", CounterexampleFile: "/var/lib/tierd/pairs/1.txt", Gives: true, PeerReason: "the same",
					DeploymentDigest: digest("6"), RulesDigest: digest("7")}},
			{ID: "prefill-2", Control: "10.0.0.3:7000", Configured: true, State: "suspect", Reason: "nothing was heard for 750ms", BootID: "0x2f", RTTSeconds: 0.0004,
				SilenceSeconds: 3.25, Sessions: 6, Pair: Pair{State: "accepted", Reason: "accepted: 12 cases", CounterexampleNotKept: "as if", Kept: true, Takes: true, PeerGives: true},
				Legs: []Leg{{Leg: "pd", Why: "it is suspect:\x1b[2J\nnothing was heard for 750ms"}, {Leg: "probe", Why: "it is suspect:\x1b[2J\nnothing was heard for 750ms"}}}},
	}
}

// shown is what README.md shows: a consumer one of whose two producers is frozen.
func shown() *Status {
	s := full()
	s.Verdict.From, s.Verdict.Rules = FromKept, []Rule{s.Verdict.Rules[0], {For: "full", Name: "full", Version: "1.0.0", Source: "shipped", Digest: digest("5")}}
	s.Device = Device{Name: "cuda:0", Why: "device is auto, and this is the first of 1 GPUs", PinnedBytes: 1 << 30, PinnedOf: 1 << 30, GPU: s.Device.GPU}
	g := s.Device.GPU
	g.Lost, g.NoHealth, g.Idle, g.PCIeGeneration, g.PCIeLanes = "", "", false, 5, 16
	s.Peers[0].Draining, s.Peers[0].BootID, s.Peers[1].BootID = false, "0x6f0c2b51a9d3e847", "0x3eb3ede9cc953981"
	s.Peers[0].Legs = []Leg{{Leg: "pd", Allowed: true}, {Leg: "probe", Allowed: true}}
	s.Peers[0].Pair, s.Peers[1].Pair = Pair{State: "equal"}, Pair{State: "equal"}
	for i := range s.Peers[1].Legs {
		s.Peers[1].Legs[i].Why = "it is suspect: nothing was heard for 750ms"
	}
	return s
}

// checking is a status of a daemon that cannot serve yet.
func checking() *Status {
	return &Status{Form: Form, NodeID: "decode-1", PID: 4711, BootID: "0x1", State: Checking, NotReady: "checking deployment gpt-oss-120b: 43 %", CheckPercent: 43,
		UpSeconds: 6, Build: build.Info{Version: "v1.2.3"}, Device: Device{Name: "mem", Why: "device is mem"}, Deployment: Deployment{Model: "gpt-oss-120b", File: "deployment.yaml", Digest: digest("d")}}
}

// TestForm: the JSON form is that of the golden file, every field of which has a value
// somewhere, so that a field cannot be added without being shown there.
func TestForm(t *testing.T) {
	s := full()
	b, err := json.MarshalIndent(s, "", "  ")
	require.NoError(t, err)
	golden(t, "status.json", string(b)+"\n")
	var back Status
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, *s, back)
	s.NotReady = "as if"
	requireFilled(t, "status", reflect.ValueOf(*s))
}

// requireFilled asserts that a field of every struct is set in one of a list's elements.
func requireFilled(t *testing.T, path string, v ...reflect.Value) {
	if len(v) == 0 {
		require.Fail(t, path+" is empty")
	}
	switch v[0].Kind() {
	case reflect.Pointer:
		requireFilled(t, path, v[0].Elem())
	case reflect.Slice:
		var all []reflect.Value
		for _, s := range v {
			for i := range s.Len() {
				all = append(all, s.Index(i))
			}
		}
		requireFilled(t, path, all...)
	case reflect.Struct:
		for i := range v[0].NumField() {
			var all []reflect.Value
			for _, s := range v {
				all = append(all, s.Field(i))
			}
			requireFilled(t, path+"."+v[0].Type().Field(i).Name, all...)
		}
	default:
		set := false
		for _, x := range v {
			set = set || !x.IsZero()
		}
		require.True(t, set, "%s has no value in the golden file", path)
	}
}

// long is a status whose texts do not fit: a reason of the driver's, a path, long names.
func long() *Status {
	s := full()
	s.Device = Device{Name: "mem", Why: "device is auto, and there is no GPU to use: the driver, libcuda.so.1, is not there (libcuda.so.1: cannot open shared object file: No such file or directory)"}
	s.Addresses.EngineSocket = "/var/run/tierd/" + strings.Repeat("deep/", 24) + "engine.sock"
	p := &s.Peers[0]
	p.ID, p.BootID = "prefill-pool-eu-west-1b-0017", "0x6f0c2b51a9d3e847"
	p.Legs[0].Why = "the pair of the two versions is refused: prompts of 20 tokens, group sliding: chunk 0 is demanded and never supplied; the whole counterexample is in /var/lib/tierd/pairs/1.txt"
	p.Legs[1].Why = p.Legs[0].Why
	s.Attention = []string{"peer " + p.ID + " runs another version: " + p.Legs[0].Why}
	return s
}

// TestFold: lines are as long as they may be, no word is lost, and a long text takes no longer
// than its length says: the square of it would be minutes here.
func TestFold(t *testing.T) {
	fold := func(text string) string {
		d := &drawing{}
		d.fold(plain, "- ", "  ", text)
		return d.b.String()
	}
	x := strings.Repeat
	for _, c := range [][2]string{
		{"", "- \n"},
		{"a b", "- a b\n"},
		{x("y", 116) + " z", "- " + x("y", 116) + " z\n"},
		{x("y", 117) + " z", "- " + x("y", 117) + "\n  z\n"},
		{x("y", 118) + " z", "- " + x("y", 118) + "\n  z\n"},
		{"a " + x("y", 300) + " z", "- a\n  " + x("y", 300) + "\n  z\n"},
		{x("y", 300), "- " + x("y", 300) + "\n"},
		{x("\u00e4", 118), "- " + x("\u00e4", 118) + "\n"},
		{x("y", 115) + x(" ", 10), "- " + x("y", 115) + "\n"},
		{"a" + x(" ", 200) + "b", "- a" + x(" ", 117) + "\n  b\n"},
	} {
		require.Equal(t, c[1], fold(c[0]))
	}
	long := x("word ", 1<<20)
	require.Equal(t, strings.Fields(long), strings.Fields(fold(long))[1:])
}

// TestWidth: a line is longer than it should be only where a single word is.
func TestWidth(t *testing.T) {
	golden(t, "long.txt", Text(long(), false))
	for _, s := range []*Status{full(), shown(), checking(), long()} {
		for _, colour := range []bool{false, true} {
			for line := range strings.Lines(Text(s, colour)) {
				if line = strings.TrimRight(line, "\n"); width(line) > columnsMax {
					require.Len(t, strings.Fields(line), 1, "%q has %d columns, at most %d are wanted", line, width(line), columnsMax)
				}
			}
		}
	}
}

func TestText(t *testing.T) {
	golden(t, "status.txt", Text(full(), false))
	golden(t, "readme.txt", Text(shown(), false))
	golden(t, "checking.txt", Text(checking(), false))
	coloured := Text(full(), true)
	golden(t, "status.colour.txt", strings.ReplaceAll(coloured, "\x1b", "ESC"))
	for _, sgr := range []tint{bold, good, warned, bad} {
		coloured = strings.ReplaceAll(coloured, "\x1b["+string(sgr)+"m", "")
	}
	require.Equal(t, Text(full(), false), strings.ReplaceAll(coloured, "\x1b[0m", ""), "colours move nothing")
	require.NotContains(t, Text(full(), false), "\x1b")
}

func TestNumbers(t *testing.T) {
	for seconds, want := range map[float64]string{0: "-", 0.000212: "0.212 ms", 0.042: "42 ms", 0.0994: "99.4 ms", 0.1: "0.1 s", 3.25: "3.2 s", 99.9: "99.9 s", 7321.25: "2h2m1s"} {
		require.Equal(t, want, span(seconds))
	}
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 804782080: "767.5 MiB", 1 << 50: "1024 TiB"} {
		require.Equal(t, want, size(n))
	}
}

// TestNoAnswer: each way to have no answer says what was tried, what it means and what to
// do.
func TestNoAnswer(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, in its backlog, and says nothing
	require.NoError(t, err)
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed.Close()
	serve := func(code int, body string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); fmt.Fprint(w, body) }))
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
	gone := exec.Command("true")
	require.NoError(t, gone.Run())
	var got strings.Builder
	for _, c := range []struct {
		name string
		at   Address
	}{
		{"nobody listens", Address{HTTPListen: closed.Addr().String()}},
		{"nobody listens, and the process is gone", Address{"a", gone.ProcessState.Pid(), closed.Addr().String()}},
		{"it is silent", Address{HTTPListen: silent.Addr().String()}},
		{"it is silent, and lives", Address{"a", os.Getpid(), silent.Addr().String()}},
		{"another daemon answers", Address{"a", 0, serve(200, `{"form": 1, "node_id": "b"}`)}},
		{"something else answers", Address{HTTPListen: serve(200, "<html>")}},
		{"it answers without a form", Address{HTTPListen: serve(200, "{}")}},
		{"it is not for us", Address{HTTPListen: serve(403, "this machine\x1b only\n")}},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		if c.at.HTTPListen != silent.Addr().String() {
			cancel()
			ctx, cancel = context.WithTimeout(context.Background(), time.Minute)
		}
		_, _, err := Get(ctx, c.at)
		cancel()
		require.Error(t, err, c.name)
		text := strings.NewReplacer(c.at.HTTPListen, "ADDRESS", fmt.Sprint(os.Getpid()), "PID", fmt.Sprint(gone.ProcessState.Pid()), "PID").Replace(err.Error())
		fmt.Fprintf(&got, "%s\n    %s\n", c.name, text)
	}
	golden(t, "no_answer.txt", got.String())
}

func TestLocate(t *testing.T) {
	dir := t.TempDir()
	_, err := Locate(dir)
	require.EqualError(t, err, "no daemon runs with state directory "+dir+" (there is no http.json in it); start one with tierd serve, or correct the directory")
	path := filepath.Join(dir, AddressFile)
	for _, bad := range []string{"", "{}", "[]"} {
		require.NoError(t, os.WriteFile(path, []byte(bad), 0o600))
		_, err = Locate(dir)
		require.ErrorContains(t, err, path+" does not say where a daemon answers: ", bad)
	}
	require.NoError(t, os.WriteFile(path, []byte(`{"node_id": "a", "pid": 3, "http_listen": "[::]:9470"}`), 0o600))
	a, err := Locate(dir)
	require.NoError(t, err)
	require.Equal(t, Address{"a", 3, "[::]:9470"}, a)
}

func TestDialable(t *testing.T) {
	for listen, want := range map[string]string{
		":9470": "127.0.0.1:9470", "0.0.0.0:1": "127.0.0.1:1", "[::]:1": "[::1]:1", "10.0.0.1:1": "10.0.0.1:1", "node-a:1": "node-a:1", "nonsense": "nonsense",
	} {
		require.Equal(t, want, dialable(listen))
	}
}

// TestLocal: from the address that was asked is from this machine, too; from elsewhere is
// not.
func TestLocal(t *testing.T) {
	for _, c := range []struct {
		remote, local string
		want          bool
	}{
		{"10.0.0.1:5000", "10.0.0.1", true},
		{"10.0.0.2:5000", "10.0.0.1", false},
		{"127.0.0.1:5000", "127.0.0.1", true},
		{"@", "127.0.0.1", false},
		{"name:1", "127.0.0.1", false},
	} {
		r := httptest.NewRequest(http.MethodGet, Path, nil)
		r.RemoteAddr = c.remote
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.ParseIP(c.local)}))
		require.Equal(t, c.want, Local(r), c.remote)
	}
}
