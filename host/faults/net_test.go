package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// rowsEnv is set in the process that plays the network's faults, in a network namespace of
// its own: the file that it writes its rows to.
const rowsEnv = "TIERD_FAULTS_ROWS"

// Addresses of the two ends of the cable between the consumer's and a's namespaces, and
// a's control port.
const (
	consumerEnd, sourceEnd = "10.77.0.1", "10.77.0.2"
	cable                  = "tierd1"
	sourcePort             = "7000"
)

// netNeeds says what the network's faults lack here; "" when nothing.
func netNeeds() string {
	if os.Getuid() != 0 {
		return "network namespaces need root"
	}
	for _, tool := range []string{"ip", "nft"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "there is no " + tool + "; install iproute2 and nftables"
		}
	}
	// In a namespace of a process that ends at once: does the kernel have what is needed?
	try := exec.Command("sh", "-c", "ip link add tierd0 type veth peer name tierd1 && nft add table inet tierd && nft add chain inet tierd in '{ type filter hook input priority 0; }' && nft add rule inet tierd in numgen random mod 100 '<' 90 drop")
	try.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := try.CombinedOutput(); err != nil {
		return fmt.Sprintf("the kernel does not do it (%v: %s)", err, strings.TrimSpace(string(out)))
	}
	return ""
}

// TestNetwork plays a network that swallows everything, or nearly everything, between the
// consumer and source a: in namespaces that it makes, so that nothing else is touched.
func TestNetwork(t *testing.T) {
	if !*full {
		t.Skip("make test-faults plays it")
	}
	if file := os.Getenv(rowsEnv); file != "" {
		playNetwork(t, file)
		return
	}
	if why := netNeeds(); why != "" {
		results.skip("faults of the network: " + why)
		t.Skip(why)
	}
	require.NoError(t, program())
	file := filepath.Join(t.TempDir(), "rows")
	inner := exec.Command(os.Args[0], "-test.run=^TestNetwork$", "-test.v", "-full", "-only="+*only)
	inner.Env = append(os.Environ(), rowsEnv+"="+file, builtEnv+"="+filepath.Dir(tierd))
	inner.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := inner.CombinedOutput()
	t.Logf("%s", out)
	if rows, err := os.ReadFile(file); err == nil {
		var of []*row
		require.NoError(t, json.Unmarshal(rows, &of))
		for _, r := range of {
			results.add(r)
		}
	}
	require.NoError(t, err)
}

func run(t *testing.T, line string) {
	t.Helper()
	out, err := exec.Command("sh", "-c", line).CombinedOutput()
	require.NoError(t, err, "%s\n%s", line, out)
}

// playNetwork runs in a namespace that has only a loopback, which is down. Source a gets
// another one, and a cable leads to it.
func playNetwork(t *testing.T, file string) {
	space := fmt.Sprintf("tierd-faults-%d", os.Getpid())
	run(t, "ip link set lo up && ip netns add "+space)
	t.Cleanup(func() { run(t, "ip netns del "+space) })
	in := "ip netns exec " + space + " "
	run(t, "ip link add tierd0 type veth peer name "+cable+" netns "+space)
	run(t, "ip addr add "+consumerEnd+"/24 dev tierd0 && ip link set tierd0 up")
	run(t, in+"ip link set lo up && "+in+"ip addr add "+sourceEnd+"/24 dev "+cable+" && "+in+"ip link set "+cable+" up")
	start := func(t *testing.T) *cluster {
		return newCluster(t, func(c *cluster) {
			_, port, err := net.SplitHostPort(c.c.control)
			require.NoError(t, err)
			c.c.control, c.c.host, c.c.insecure = net.JoinHostPort(consumerEnd, port), consumerEnd, true
			c.a.control, c.a.host, c.a.insecure = net.JoinHostPort(sourceEnd, sourcePort), sourceEnd, true
			c.a.prefix = strings.Fields(in)
			c.a.client = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				return dialIn(ctx, space, network, addr)
			}}}
			c.a.peers[0].control, c.b.peers[0].control = c.c.control, c.c.control
			c.c.peers[0].control = c.a.control
		})
	}
	for _, leg := range legs {
		t.Run(leg, func(t *testing.T) {
			playAll(t, leg, netScenarios(in), func() *cluster { return start(t) })
		})
	}
	rows, err := json.Marshal(results.rows)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, rows, 0o600))
}

// dialIn dials from inside a namespace.
func dialIn(ctx context.Context, space, network, addr string) (net.Conn, error) {
	runtime.LockOSThread() // and never back: a thread that could not return home must end
	home, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		return nil, err
	}
	defer home.Close()
	there, err := os.Open("/run/netns/" + space)
	if err != nil {
		return nil, err
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, err
	}
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		return nil, back
	}
	runtime.UnlockOSThread()
	return c, err
}

// cut drops that share of the packets, in percent, in both directions of a's cable.
func cut(in string, percent int, long time.Duration) func(*cluster, *play, *fault) {
	return func(c *cluster, _ *play, f *fault) {
		which := ""
		if percent < 100 {
			which = fmt.Sprintf("numgen random mod 100 < %d ", percent)
		}
		rules := fmt.Sprintf("table inet tierd { chain in { type filter hook input priority 0; iifname %[1]s %[2]scounter drop; }; chain out { type filter hook output priority 0; oifname %[1]s %[2]scounter drop; }; }", cable, which)
		run(c.t, in+"nft '"+rules+"'")
		f.at = time.Now()
		c.detect(f)
		time.Sleep(time.Until(f.at.Add(long)))
		out, err := exec.Command("sh", "-c", in+"nft list table inet tierd | grep -o 'packets [0-9]*' | tr '\\n' ' '").CombinedOutput()
		require.NoError(c.t, err)
		f.note = "dropped on the way in and out: " + strings.TrimSpace(string(out))
		run(c.t, in+"nft delete table inet tierd")
		f.healed = time.Now()
	}
}

// thinned are the bounds where now and then a byte comes: until the silence is long enough,
// a wait is bounded by what it is for, and last by the request's own deadline.
var thinned = bounds{max: deadline / 2, p50: frozen.p50, recovered: frozen.recovered}

func netScenarios(in string) []scenario {
	return []scenario{
		{name: "black hole", bounds: frozen, play: cut(in, 100, 6*time.Second)},
		{name: "90 % loss", bounds: thinned, play: cut(in, 90, 10*time.Second)},
	}
}
