// Rogue is a program of rules that does what it is told by the file "mode" beside it:
// before it serves, when it is called, or in what it answers. Without that file it is an
// honest program with the rules window, full and request-level.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/abi/kvpb"
	"github.com/tierd/tierd/abi/serve"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

func mode() string {
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	b, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "mode"))
	return strings.TrimSpace(string(b))
}

func main() {
	switch m := mode(); m {
	case "exit":
		fmt.Fprintln(os.Stderr, "no licence found")
		os.Exit(7)
	case "garbage":
		fmt.Println("hello, I am a program")
		time.Sleep(time.Hour)
	case "silent":
		time.Sleep(time.Hour)
	case "flood":
		for {
			os.Stdout.Write(bytes.Repeat([]byte("x"), 64<<10))
		}
	case "grandchild": // which holds both outputs
		c := exec.Command("/bin/sleep", "3600")
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		fmt.Fprintln(os.Stderr, c.Start())
		os.Exit(0)
	case "version 2":
		plugin.Serve(&plugin.ServeConfig{
			HandshakeConfig:  plugin.HandshakeConfig{ProtocolVersion: 2, MagicCookieKey: kvpb.Handshake.MagicCookieKey, MagicCookieValue: kvpb.Handshake.MagicCookieValue},
			VersionedPlugins: map[int]plugin.PluginSet{2: kvpb.Plugins(liar{})[1]},
			GRPCServer:       plugin.DefaultGRPCServer, Logger: hclog.NewNullLogger(),
		})
	case "tcp":
		fmt.Println("1|1|tcp|127.0.0.1:1|grpc|" + strings.Repeat("A", 100))
		time.Sleep(time.Hour)
	case "elsewhere":
		fmt.Println("1|1|unix|/tmp/somewhere/socket|grpc|" + strings.Repeat("A", 100))
		time.Sleep(time.Hour)
	case "net rpc":
		fmt.Println("1|1|unix|" + socket() + "|netrpc|" + strings.Repeat("A", 100))
		time.Sleep(time.Hour)
	case "no certificate":
		fmt.Println("1|1|unix|" + socket() + "|grpc|")
		time.Sleep(time.Hour)
	case "false certificate":
		fmt.Println("1|1|unix|" + socket() + "|grpc|" + strings.Repeat("A", 100))
		time.Sleep(time.Hour)
	case "deaf": // it was there, and then it was not
		_, _ = net.Listen("unix", socket())
		fmt.Println("1|1|unix|" + socket() + "|grpc|" + certificate())
		time.Sleep(time.Hour)
	case "honest": // and fast: nothing is read at a call
		serve.Main(specs.Window(), specs.Full(), policy.RequestLevel())
	case "adversaries":
		var all []abi.Spec
		for _, a := range abitest.Adversaries() {
			all = append(all, a.Wrap(specs.Window()))
		}
		serve.Main(append(all, abitest.Newcomer())...)
	default:
		if strings.HasPrefix(m, "lie: ") {
			plugin.Serve(&plugin.ServeConfig{
				HandshakeConfig: kvpb.Handshake, VersionedPlugins: kvpb.Plugins(liar{}), GRPCServer: plugin.DefaultGRPCServer, Logger: hclog.NewNullLogger(),
			})
			return
		}
		serve.Main(moody{specs.Window()}, moody{specs.Full()}, policy.RequestLevel())
	}
}

func socket() string { return filepath.Join(os.Getenv("PLUGIN_UNIX_SOCKET_DIR"), "socket") }

// certificate is one that parses: the host's own, as good as any.
func certificate() string {
	pem := os.Getenv("PLUGIN_CLIENT_CERT")
	lines := strings.Split(strings.TrimSpace(pem), "\n")
	return strings.TrimRight(strings.Join(lines[1:len(lines)-1], ""), "=")
}

// A moody spec opens rules that misbehave on command.
type moody struct{ abi.Spec }

func (s moody) Manifest() *abi.Manifest {
	m := *s.Spec.Manifest()
	if mode() == "renamed" {
		m.Version += "-other"
	}
	return &m
}

func (s moody) Open(params []uint64) (abi.Rule, error) {
	switch mode() {
	case "closed":
		return nil, errors.New("the table is locked")
	case "open hangs":
		time.Sleep(time.Hour)
	}
	r, err := s.Spec.Open(params)
	if err != nil {
		return nil, err
	}
	return moodyRule{r.(abi.SpecRule)}, nil
}

type moodyRule struct{ abi.SpecRule }

func (r moodyRule) Scan(x abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	if err := misbehave(); err != nil {
		return abi.Span{}, err
	}
	return r.SpecRule.Scan(x, states, demand)
}

func misbehave() error {
	switch mode() {
	case "call hangs":
		time.Sleep(time.Hour)
	case "call is killed":
		signal(syscall.SIGKILL)
	case "call is stopped":
		signal(syscall.SIGSTOP)
	case "call exits":
		fmt.Fprintln(os.Stderr, "I have had enough")
		os.Exit(3)
	case "call panics":
		var none []int
		none[len(os.Args)-1]++
	case "call overflows":
		debug.SetMaxStack(1 << 20)
		overflow(0)
	case "call is slow":
		time.Sleep(20 * time.Millisecond)
	case "call fails":
		return errors.New("\x1b[31mno \xffway\n")
	case "call is noisy":
		for range 4000 {
			fmt.Fprintln(os.Stderr, "\x1b[31mnoise on standard error")
			fmt.Println("noise on standard output")
		}
	case "call reports":
		return errors.New(report())
	}
	return nil
}

func signal(s syscall.Signal) {
	_ = syscall.Kill(os.Getpid(), s)
	time.Sleep(time.Hour)
}

func overflow(n int) int { return overflow(n+1) + 1 }

// report says what the process got from its host.
func report() string {
	var names []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		names = append(names, name)
	}
	slices.Sort(names)
	wd, _ := os.Getwd()
	in, _ := os.Readlink("/proc/self/fd/0")
	info, err := os.Stat(wd)
	if err != nil {
		return err.Error()
	}
	group, _ := syscall.Getpgid(0)
	return fmt.Sprintf("environment %v, directory %s %v, stdin %s, group %t", names, filepath.Base(wd)[:len("tierd-rule-")], info.Mode(), in, group == os.Getpid())
}

// A liar answers what the ABI does not allow.
type liar struct{ kvpb.UnimplementedKVServer }

func (liar) Manifest(context.Context, *kvpb.ManifestRequest) (*kvpb.ManifestReply, error) {
	full := kvpb.FromManifest(specs.Full().Manifest())
	switch mode() {
	case "lie: no rules":
		return &kvpb.ManifestReply{}, nil
	case "lie: twins":
		return &kvpb.ManifestReply{Rules: []*kvpb.Manifest{full, full}}, nil
	case "lie: mask":
		full.Mask = "telepathy"
	case "lie: huge manifest":
		full.Version = strings.Repeat("1", 2*kvpb.MessageBytesMax)
	}
	return &kvpb.ManifestReply{Rules: []*kvpb.Manifest{full}}, nil
}

func (liar) Open(_ context.Context, r *kvpb.OpenRequest) (*kvpb.OpenReply, error) {
	if mode() == "lie: opened" {
		return &kvpb.OpenReply{}, nil
	}
	return &kvpb.OpenReply{Opened: make([]*kvpb.Opened, len(r.Openings))}, nil
}

func (l liar) Reach(ctx context.Context, b *kvpb.Batch) (*kvpb.Results, error) { return l.Scan(ctx, b) }

func (l liar) Need(ctx context.Context, b *kvpb.Batch) (*kvpb.Results, error) { return l.Scan(ctx, b) }

func (liar) Scan(_ context.Context, b *kvpb.Batch) (*kvpb.Results, error) {
	out := &kvpb.Results{}
	for _, it := range b.Items {
		n := int(it.Round.Hi - it.Round.Lo)
		r := &kvpb.Result{Set: make([]byte, (n+7)/8)}
		reason := strings.Repeat("because ", 200)
		switch mode() {
		case "lie: usable":
			r.Usable = uint32(n) + 1
		case "lie: bits":
			r.Set[len(r.Set)-1] = 0x80
		case "lie: short":
			r.Set = r.Set[1:]
		case "lie: long":
			r.Set = append(r.Set, 0)
		case "lie: no resume":
			r.NoResume = true
		case "lie: reason":
			r.Error = &reason
		case "lie: huge":
			r.Set = make([]byte, 2*kvpb.MessageBytesMax)
		}
		out.Results = append(out.Results, r)
	}
	switch mode() {
	case "lie: fewer":
		out.Results = out.Results[1:]
	case "lie: more":
		out.Results = append(out.Results, &kvpb.Result{})
	case "lie: status":
		return nil, status.Error(codes.DeadlineExceeded, "wait \x1b[31mlonger")
	}
	return out, nil
}
