package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/plugins/proc"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// startProgram starts a node whose group full is served by a program that does what the
// returned function says.
func startProgram(t *testing.T, id string, options ...nodeOption) (n *Node, mode func(string)) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "rogue")
	out, err := exec.Command("go", "build", "-o", path, "../plugins/proc/testdata/rogue").CombinedOutput()
	require.NoError(t, err, string(out))
	mode = func(m string) {
		require.NoError(t, os.WriteFile(path+".next", []byte(m), 0o600))
		require.NoError(t, os.Rename(path+".next", filepath.Join(dir, "mode")))
	}
	return startJudged(t, id, func(ctx context.Context, d *deploy.Deployment, _ func(done, total int)) (*registry.Entry, func() error, error) {
		p, err := proc.Load(ctx, path, proc.Options{CallTimeout: 300 * time.Millisecond, TempDir: "/tmp"})
		if err != nil {
			return nil, nil, err
		}
		e, err := registry.Open(ctx, d, func(_ context.Context, _, ref string) (registry.Opened, error) {
			o := registry.Opened{Digest: "sha256:native", Source: "native"}
			switch ref {
			case "full":
				o.Spec = p.Specs()[1]
			case "window":
				o.Spec = specs.Window()
			default:
				o.Spec = policy.RequestLevel()
			}
			return o, nil
		})
		if err != nil {
			return nil, nil, errors.Join(err, p.Close(ctx))
		}
		e.Verdict = &registry.Verdict{Verdict: registry.Accepted}
		return e, func() error { return p.Close(context.Background()) }, nil
	}, options...), mode
}

// TestAProgramFailsAtRunTime: a rule's process that dies, freezes or answers nonsense while
// requests are served costs those requests their plan; each gets an answer, and requests
// hit again once the process is replaced.
func TestAProgramFailsAtRunTime(t *testing.T) {
	producer := startNode(t, "producer")
	consumer, mode := startProgram(t, "consumer", withPeer("producer", producer.Addresses().Peer))
	ready(t, consumer, "producer")
	p, c := attach(t, producer), attach(t, consumer)
	x := text{"a", 300}
	p.produce("a", x, enginepb.Leg_PD)
	for round, m := range []string{"call is killed", "call is stopped", "call exits"} {
		mode(m)
		const requests = 4
		notes := make([]string, requests)
		var wg sync.WaitGroup
		for i := range requests {
			wg.Go(func() {
				id := fmt.Sprint("failing ", round, " ", i)
				reply, err := c.c.Begin(ctxFor(t), c.request(id, x, enginepb.Role_CONSUMER, enginepb.Leg_PROBE))
				if err != nil {
					notes[i] = err.Error()
					return
				}
				notes[i] = reply.Note
				_, err = c.c.Finish(ctxFor(t), &enginepb.FinishRequest{RequestId: id})
				if err != nil {
					notes[i] = err.Error()
				}
			})
		}
		wg.Wait()
		for _, note := range notes {
			require.Contains(t, note, "no plan: scan of full", m)
		}
		mode("")
		require.Eventually(t, func() bool {
			r := c.beginConsumer(fmt.Sprint("again ", round, time.Now().UnixNano()), x, enginepb.Leg_PROBE)
			defer r.finish()
			return r.reply.ResumeTokens > 0 && r.load().Ok
		}, time.Minute, 10*time.Millisecond)
	}
	clean(t, producer, consumer)
}
