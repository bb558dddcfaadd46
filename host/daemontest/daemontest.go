// Package daemontest is what tests of the real program have in common: they build it, start
// daemons as processes of their own, wait for them and read their metrics.
package daemontest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Repo is the root of the repository, for a test of a package two levels below it.
func Repo() string {
	wd, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	return filepath.Dir(filepath.Dir(wd))
}

// Build builds the program as tierd, without the race detector, which would make the bytes
// fifteen times slower, and has it check a deployment: with the verdict that is in the state
// directory seed then, a daemon starts without checking again.
func Build(tierd, seed, deployment string) error {
	build := exec.Command("go", "build", "-trimpath", "-o", tierd, "./host/cmd/tierd")
	build.Dir = Repo()
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	if out, err := exec.Command(tierd, "check", "--state", seed, deployment).CombinedOutput(); err != nil {
		return fmt.Errorf("tierd check: %w\n%s", err, out)
	}
	return nil
}

// TempDir makes a directory in parent, "" for the usual one, that goes with the test. Its name
// is short: the path of a socket is limited.
func TempDir(t *testing.T, parent, prefix string) string {
	t.Helper()
	dir, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// SharedMemory is /dev/shm where it has room for so many bytes, else "".
func SharedMemory(room uint64) string {
	var st syscall.Statfs_t
	if syscall.Statfs("/dev/shm", &st) == nil && st.Bavail*uint64(st.Bsize) > room {
		return "/dev/shm"
	}
	return ""
}

// FreeAddress is below the ports that the kernel gives to connections: a daemon that is
// away must find its port free when it comes back.
func FreeAddress(t *testing.T) string {
	t.Helper()
	const lowest, ports, tries = 20000, 10000, 100
	for range tries {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", lowest+rand.IntN(ports)))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatalf("no free port in %d tries", tries)
	return ""
}

// Await polls until ok, and fails the test when that takes longer than patience.
func Await(t *testing.T, patience time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not %s after %v", what, patience)
		}
	}
}

// A Daemon is one process of the program.
type Daemon struct {
	Cmd     *exec.Cmd
	LogFile string
	// Exited is closed at its end, when Exit says how it ended.
	Exited chan struct{}
	Exit   error
}

// Start runs a command that is a daemon with this state directory, and returns when it is
// ready. Its log is a new file in dir, and in that of the test when it fails. A daemon that
// still runs at the end of the test is killed.
func Start(t *testing.T, patience time.Duration, id, dir, stateDir string, command ...string) *Daemon {
	t.Helper()
	ready := filepath.Join(stateDir, "addresses.json")
	os.Remove(ready) // of one that was killed
	log, err := os.CreateTemp(dir, "log")
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{Cmd: exec.Command(command[0], command[1:]...), LogFile: log.Name(), Exited: make(chan struct{})}
	d.Cmd.Stdout, d.Cmd.Stderr = log, log
	if err := d.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		d.Exit = d.Cmd.Wait()
		log.Close()
		close(d.Exited)
	}()
	t.Cleanup(func() {
		_ = d.Cmd.Process.Signal(syscall.SIGKILL)
		<-d.Exited
		if t.Failed() {
			t.Logf("the log of %s:\n%s", id, d.tail())
		}
	})
	Await(t, patience, id+" ready", func() bool {
		select {
		case <-d.Exited:
			t.Fatalf("%s ended before it was ready: %v\n%s", id, d.Exit, d.tail())
		default:
		}
		_, err := os.Stat(ready)
		return err == nil
	})
	return d
}

// tail is the end of its log.
func (d *Daemon) tail() []byte {
	const last = 8 << 10
	b, err := os.ReadFile(d.LogFile)
	if err != nil {
		return []byte(err.Error())
	}
	return b[max(0, len(b)-last):]
}

// Metric adds up the series of a metric whose labels contain all of parts, in what a daemon
// answers to GET /metrics; a metric of which there is no such series fails the test.
func Metric(t *testing.T, page []byte, name string, parts ...string) (sum float64) {
	t.Helper()
	found := false
line:
	for line := range strings.Lines(string(page)) {
		if !strings.HasPrefix(line, name+"{") && !strings.HasPrefix(line, name+" ") {
			continue
		}
		for _, p := range parts {
			if !strings.Contains(line, p) {
				continue line
			}
		}
		fields := strings.Fields(line)
		v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			t.Fatal(err)
		}
		sum, found = sum+v, true
	}
	if !found {
		t.Fatalf("no metric %s with %v", name, parts)
	}
	return sum
}
