package host

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/tierd/tierd/gpu/shm"
	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/devices"
	"github.com/tierd/tierd/host/engine"
	"github.com/tierd/tierd/host/limitlog"
	"github.com/tierd/tierd/host/lockfile"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/host/status"
	"github.com/tierd/tierd/host/tier"
	"github.com/tierd/tierd/host/transfer"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
	"github.com/tierd/tierd/registry/evidence"
	"github.com/tierd/tierd/registry/plan"
)

// Stages of a node, for /readyz.
const (
	stageStarting int32 = iota
	stageChecking
	stageDraining
	stageStopping
)

// tuningFile is in state_dir and keeps what was measured of the GPU.
const tuningFile = "gpu-tuning.json"

// addressesFile is in state_dir while the node is ready.
const addressesFile = "addresses.json"

// A Stopped is Start's error when its ctx ended before the node was ready.
type Stopped struct {
	// While is what the node was doing: "checking" its deployment, or "starting".
	While string
	Cause error
}

func (e *Stopped) Error() string { return fmt.Sprintf("stopped while %s: %v", e.While, e.Cause) }

// Unwrap returns the cause of ctx's end.
func (e *Stopped) Unwrap() error { return e.Cause }

// Start brings a node up. When it returns without error the node is ready: its rules
// are accepted and its ports are open. A refused deployment is a *registry.Refusal. ctx
// bounds the start only; when it ends first, the error is a *Stopped.
func Start(ctx context.Context, cfg *config.Config, log *slog.Logger) (*Node, error) {
	// A key that is not there is a mistake in the configuration. A certificate that is not
	// there, or that does not count, costs a check.
	keys, err := certificateKeys(cfg)
	if err != nil {
		return nil, err
	}
	return start(ctx, cfg, log, func(ctx context.Context, d *deploy.Deployment, progress func(done, total int)) (*registry.Entry, func() error, error) {
		// The seed is the zero value's, which is that of tierd check: its verdict is ours.
		r, err := rules.Register(ctx, d, rules.Options{
			StateDir: cfg.StateDir, Check: check.Options{Progress: progress}, Certificate: cfg.Certificate, Keys: keys, Log: log,
		})
		if err != nil {
			return nil, nil, err
		}
		return r.Entry, func() error { return r.Close(context.Background()) }, nil
	})
}

func certificateKeys(cfg *config.Config) (keys []ed25519.PublicKey, err error) {
	for i, path := range cfg.CertificateKeys {
		data, err := config.ReadAtMost(path, evidence.KeyBytesMax)
		if err != nil {
			return nil, cfg.Errorf("certificate_keys[%d] is %s: %w; correct the path", i, path, cause(err))
		}
		k, err := evidence.ParsePublicKey(data)
		if err != nil {
			return nil, cfg.Errorf("certificate_keys[%d] is %s: %w; tierd key writes one", i, path, err)
		}
		keys = append(keys, k)
	}
	return keys, nil
}

// A registrar opens and judges the rules of a deployment, and says how to close them.
type registrar func(ctx context.Context, d *deploy.Deployment, progress func(done, total int)) (*registry.Entry, func() error, error)

func start(ctx context.Context, cfg *config.Config, log *slog.Logger, judge registrar) (*Node, error) {
	return startOn(ctx, cfg, log, judge, devices.Driver{})
}

// startOn is start on other GPUs than those of this machine.
func startOn(ctx context.Context, cfg *config.Config, log *slog.Logger, judge registrar, gpus devices.Driver) (*Node, error) {
	n := &Node{
		cfg: cfg, log: log, judge: judge, openGPU: gpus, configured: map[string]bool{}, links: map[string]*link{},
		servings: map[peerJob]*serving{}, fetches: map[peerJob]*fetch{}, tokens: map[string]transfer.Token{},
		began: time.Now(), boot: bootID(), faults: limitlog.New(log),
	}
	n.life, n.end = context.WithCancel(context.Background())
	// What can fail at once comes before the check, which may take a minute. Nothing is
	// served before it: peers and engines find a verdict, or nobody.
	steps := []func(context.Context) error{
		n.openState, n.readDeployment, n.openHTTP, n.openMemory, n.bind,
		n.register, n.openPeers, n.openEngines, n.announce,
	}
	for _, step := range steps {
		err := step(ctx)
		var refusal *registry.Refusal
		if ctx.Err() != nil && !errors.As(err, &refusal) {
			err = &Stopped{While: "starting", Cause: context.Cause(ctx)}
			if n.stage.Load() == stageChecking {
				err = &Stopped{While: "checking", Cause: context.Cause(ctx)}
			}
		}
		if err != nil {
			n.unwind()
			return nil, err
		}
	}
	log.Info("node started", "node_id", cfg.NodeID, "engine_socket", n.addresses.EngineSocket, "peer_listen", n.addresses.Peer,
		"data_listen", n.addresses.Data, "http_listen", n.addresses.HTTP, "deployment", n.entry.Deployment.Model, "slots", n.tier.Slots())
	return n, nil
}

// onClose adds what undoes a step.
func (n *Node) onClose(f func()) { n.closers = append(n.closers, f) }

// unwind undoes every step, last first.
func (n *Node) unwind() {
	n.ready.Store(false)
	n.stage.Store(stageStopping)
	n.mu.Lock()
	n.closing = true
	n.mu.Unlock()
	n.end()
	for i := len(n.closers) - 1; i >= 0; i-- {
		n.closers[i]()
	}
	n.closers = nil
	n.faults.Close()
}

// notReady says why the node is not ready.
func (n *Node) notReady() string {
	switch n.stage.Load() {
	case stageChecking:
		return fmt.Sprintf("checking deployment %s: %d %%", n.deployed.Model, n.percent.Load())
	case stageDraining:
		return "draining"
	case stageStopping:
		return "stopping"
	}
	return "starting"
}

// cause is what went wrong, without the path or address that the caller names anyway.
func cause(err error) error {
	var path *fs.PathError
	var op *net.OpError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &op):
		return op.Err
	}
	return err
}

// openState takes the state directory for this process, and sees that the other
// directories are there: one that had to be made would be a misspelt one.
func (n *Node) openState(context.Context) error {
	cfg := n.cfg
	if err := os.Mkdir(cfg.StateDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return cfg.Errorf("state_dir is %s, which cannot be made: %w; make the directory above it, or correct the path", cfg.StateDir, cause(err))
	}
	for _, d := range []struct{ key, value, dir string }{
		{"state_dir", cfg.StateDir, cfg.StateDir},
		{"engine_socket", cfg.EngineSocket, filepath.Dir(cfg.EngineSocket)},
		{"slab_dir", cfg.SlabDir, cfg.SlabDir},
	} {
		st, err := os.Stat(d.dir)
		if err != nil {
			return cfg.Errorf("%s is %s, but directory %s: %w; make it, or correct the path", d.key, d.value, d.dir, cause(err))
		}
		if !st.IsDir() {
			return cfg.Errorf("%s is %s, but %s is no directory; correct the path", d.key, d.value, d.dir)
		}
	}
	lock, err := lockfile.Take(filepath.Join(cfg.StateDir, "lock"), fmt.Sprintf("the daemon of node %s (process %d)", cfg.NodeID, os.Getpid()))
	var held *lockfile.HeldError
	switch {
	case errors.As(err, &held):
		holder := held.Holder
		if holder == "" {
			holder = "another daemon"
		}
		return cfg.Errorf("state_dir is %s, which %s uses; give each daemon a state_dir of its own, or stop that one", cfg.StateDir, holder)
	case err != nil:
		return cfg.Errorf("state_dir is %s: %w; let user %d write to it, or choose another directory", cfg.StateDir, err, os.Geteuid())
	}
	n.onClose(func() { n.closed("state_dir's lock", lock.Release()) })
	for _, stale := range []string{addressesFile, status.AddressFile} { // of a daemon that was killed
		os.Remove(filepath.Join(cfg.StateDir, stale))
	}
	n.waits = waitsOf(&cfg.Deadlines)
	return nil
}

func waitsOf(d *config.Deadlines) waits {
	return waits{
		request: config.Millis(d.RequestMS), lookup: config.Millis(d.LookupMS), connect: config.Millis(d.ConnectMS),
		pending: config.Millis(d.PendingMS), drain: config.Millis(d.DrainMS), bytesPerSecond: uint64(d.TransferMBPerS) * 1e6,
	}
}

// closed logs what could not be closed.
func (n *Node) closed(what string, err error) {
	if err != nil {
		n.log.Error(what+" could not be closed", "error", err)
	}
}

// readDeployment reads the file without judging it.
func (n *Node) readDeployment(context.Context) error {
	data, err := config.ReadAtMost(n.cfg.Deployment, strictyaml.FileBytesMax)
	if err != nil {
		return n.cfg.Errorf("deployment is %s: %w; correct the path", n.cfg.Deployment, cause(err))
	}
	d, err := deploy.Parse(n.cfg.Deployment, data)
	if err != nil {
		return err
	}
	n.deployment, n.deployed, n.groups = data, d, geometryOf(d)
	n.openMetrics()
	return nil
}

// openMemory makes the slab and the device. Files that a killed daemon of the same node
// left behind are removed once the slab's lock says that it is gone.
func (n *Node) openMemory(ctx context.Context) error {
	dir := filepath.Join(n.cfg.SlabDir, "tierd-"+n.cfg.NodeID)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return n.cfg.Errorf("slab_dir is %s: directory %s cannot be made: %w; let user %d write to slab_dir, or choose another",
			n.cfg.SlabDir, filepath.Base(dir), cause(err), os.Geteuid())
	}
	n.onClose(func() { os.Remove(dir) }) // stays when it is not empty
	slotBytes, slots, err := n.slots()
	if err != nil {
		return err
	}
	// The device first, because the slab is to be near it, and its end before the slab's.
	set, err := devices.Open(ctx, devices.Options{
		Choice: n.cfg.Device, Dir: dir, TuningFile: filepath.Join(n.cfg.StateDir, tuningFile), Log: n.log, Driver: n.openGPU,
	})
	if err != nil {
		return n.cfg.Errorf("%w", err)
	}
	t, err := n.openSlab(dir, slotBytes, slots, set.Node())
	if err != nil {
		return errors.Join(n.cfg.Errorf("slab_bytes is %d, slab_dir is %s: %w", n.cfg.SlabBytes, n.cfg.SlabDir, err), set.Close())
	}
	n.tier, n.devices = t, set
	n.hasTier.Store(true)
	n.onClose(func() { n.closed("the slab", t.Close()) })
	n.onClose(func() { n.closed("the device", set.Close()) })
	set.Pin(t.Memory())
	n.addresses.Slab = t.Export().Path
	stale, _ := filepath.Glob(filepath.Join(dir, "tierd-region-*"))
	for _, path := range stale {
		os.Remove(path)
	}
	if ok, err := shm.InMemory(n.cfg.SlabDir); err == nil && !ok {
		n.log.Warn("the slab is on disk, where every byte of KV is written back; set slab_dir to a tmpfs such as /dev/shm", "slab_dir", n.cfg.SlabDir)
	}
	return nil
}

// openSlab makes the slab near a NUMA node; -1 is anywhere.
func (n *Node) openSlab(dir string, slotBytes int64, slots, node int) (t *tier.Primary, err error) {
	err = devices.Near(node, func() (err error) {
		t, err = tier.New(tier.Options{Path: filepath.Join(dir, "slab"), SlotBytes: slotBytes, Slots: slots})
		return err
	})
	if errors.Is(err, devices.ErrPolicy) {
		n.log.Warn("the slab is anywhere in host memory", "error", err)
		err = nil
	}
	return t, err
}

// slots divides slab_bytes into slots for the largest chunk.
func (n *Node) slots() (slotBytes int64, slots int, err error) {
	for i := range n.groups {
		slotBytes = max(slotBytes, n.groups[i].chunkBytes)
	}
	stride := tier.StrideBytes(slotBytes)
	count := n.cfg.SlabBytes / stride
	switch {
	case count < 1:
		return 0, 0, n.cfg.Errorf("slab_bytes is %d, but one chunk of deployment %s takes %d bytes; give the slab room for at least one, better for thousands",
			n.cfg.SlabBytes, n.deployed.Model, stride)
	case count > tier.SlotsMax:
		return 0, 0, n.cfg.Errorf("slab_bytes is %d, which is %d slots of %d bytes, but a tier has at most %d slots, %d bytes; lower slab_bytes, or give the deployment larger chunks (chunk_blocks)",
			n.cfg.SlabBytes, count, stride, tier.SlotsMax, tier.SlotsMax*stride)
	}
	return slotBytes, int(count), nil
}

// bind takes every address. The data port answers nobody before a session gives out
// tokens; the control port and the engine socket are not served before the verdict.
func (n *Node) bind(ctx context.Context) error {
	var err error
	if n.cfg.TLS != nil {
		if n.certs, err = openCerts(n.cfg.TLS, n.log); err != nil {
			return n.cfg.Errorf("%w; correct the path, or what the file holds", err)
		}
		n.metrics.Register(metrics.Certificates{Days: n.certs.days})
		n.wg.Go(n.reviewCerts)
		n.onClose(n.wg.Wait) // a start that fails later waits nowhere else
	}
	l := n.limits()
	n.dataOptions = transfer.Options{Log: n.log, FrameBytesMax: n.tier.SlotBytes(), HelloTimeout: n.waits.connect, PingInterval: l.Ping, IdleTimeout: l.Dead, WriteTimeout: l.Dead}
	listening := n.dataOptions
	// No peer can fill the port: each has lanes of its own, and strangers theirs.
	listening.ConnsMax = int(n.cfg.Bounds.Sessions)*transfer.LanesMax + transfer.DefaultHellosMax
	if n.certs != nil {
		n.dataOptions.Explain, listening.Explain = n.certs.explain, n.certs.explain
		listening.TLS, listening.Verify = n.certs.server(), n.verifyNode
	}
	// The port outlives ctx, which bounds the start.
	if n.data, err = transfer.Listen(context.WithoutCancel(ctx), n.cfg.DataListen, listening); err != nil {
		return n.cannotListen("data_listen", n.cfg.DataListen, err)
	}
	n.onClose(func() { _ = n.data.Close() })
	n.addresses.Data = n.data.Addr().String()
	if n.control, err = net.Listen("tcp", n.cfg.PeerListen); err != nil {
		return n.cannotListen("peer_listen", n.cfg.PeerListen, err)
	}
	n.onClose(func() { n.control.Close() }) // again, when it was served
	n.addresses.Peer = n.control.Addr().String()
	if err := n.secured(); err != nil {
		return err
	}
	if n.socket, err = engine.LockSocket(n.cfg.EngineSocket); err != nil {
		return n.cfg.Errorf("%w", err)
	}
	n.onClose(func() { n.closed("the engine socket's lock", n.socket.Release()) })
	return nil
}

// secured looks at what is really listened on: a name such as localhost means what the
// machine says that it means.
func (n *Node) secured() error {
	for _, a := range []struct{ key, value, real string }{
		{"peer_listen", n.cfg.PeerListen, n.addresses.Peer}, {"data_listen", n.cfg.DataListen, n.addresses.Data},
	} {
		switch {
		case n.certs != nil || config.Loopback(a.real):
		case !n.cfg.Insecure:
			return n.cfg.Errorf("%s is %s, which is %s here, where other machines can reach it, and tls is not set; set tls: {cert, key, ca}, or listen on 127.0.0.1", a.key, a.value, a.real)
		default:
			n.log.Warn("anybody who reaches this port can read and write KV: insecure is true and tls is not set", a.key, a.real)
		}
	}
	return nil
}

func (n *Node) cannotListen(key, address string, err error) error {
	return n.cfg.Errorf("%s is %s: %w; free that address, or choose another", key, address, cause(err))
}

// register opens the rules and has them judged: nothing is served before that.
func (n *Node) register(ctx context.Context) error {
	n.stage.Store(stageChecking)
	n.log.Info("checking deployment", "deployment", n.deployed.Model, "file", n.cfg.Deployment, "http_listen", n.addresses.HTTP)
	entry, closeRules, err := n.judge(ctx, n.deployed, n.progress)
	if err != nil {
		return err
	}
	n.entry = entry
	n.judged.Store(true)
	n.stage.Store(stageStarting) // what is left of it
	n.onClose(func() { n.closed("the rules", closeRules()) })
	v := n.entry.Verdict
	n.log.Info("rules accepted", "deployment", n.deployed.Model, "verdict_reused", v.Reused, "certified_by", v.Certificate, "cases", v.Cases, "seconds", v.Seconds)
	n.model = n.entry.Model()
	p, err := plan.New(n.model)
	if err != nil {
		return fmt.Errorf("deployment %s: %w", n.deployed.Model, err)
	}
	n.planners.New = func() any {
		p, err := plan.New(n.model)
		if err != nil {
			panic("host: a model that was valid at start is not: " + err.Error())
		}
		return p
	}
	return n.measureLongest(p)
}

// progress is called from any goroutine, and out of order.
func (n *Node) progress(done, total int) {
	now := int64(done) * 100 / int64(max(total, 1))
	for old := n.percent.Load(); now > old && !n.percent.CompareAndSwap(old, now); {
		old = n.percent.Load()
	}
}

// measureLongest finds what one longest prompt demands, which a peer may always have, and says
// when it cannot be loaded: slots for it are taken all or none.
func (n *Node) measureLongest(p *plan.Planner) error {
	tokens := n.deployed.MaxTokens
	pl, err := p.Eager(plan.Ask{PromptTokens: tokens}, nil)
	if err != nil {
		return fmt.Errorf("deployment %s: plan of a prompt of max_tokens, %d: %w", n.deployed.Model, tokens, err)
	}
	need := 0
	for _, set := range pl.Demand {
		need += set.Count()
	}
	stride := n.tier.StrideBytes()
	n.peerPinnedMax.Store(cmp.Or(n.cfg.Bounds.PeerPinnedBytes, min(n.cfg.SlabBytes, max(n.cfg.SlabBytes/2, int64(need)*stride))))
	if have := n.tier.Slots(); need > have {
		n.log.Warn("the slab cannot hold the demand of one longest prompt; such prompts are computed without the tier: raise slab_bytes, or lower the deployment's max_tokens",
			"slots", have, "slots_needed", need, "slab_bytes", n.cfg.SlabBytes, "slab_bytes_needed", int64(need)*stride, "max_tokens", tokens)
	}
	return nil
}

// announce makes the node ready and says where it is, in a file that goes with it.
func (n *Node) announce(context.Context) error {
	data, err := json.MarshalIndent(n.Addresses(), "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(n.cfg.StateDir, addressesFile)
	n.onClose(func() { os.Remove(path) }) // while state_dir's lock is held: it is not another daemon's
	n.opened.Store(true)
	n.ready.Store(true)
	if err := WriteFile(path, append(data, '\n')); err != nil {
		return n.cfg.Errorf("state_dir is %s: %w; make room in it, or choose another directory", n.cfg.StateDir, err)
	}
	return nil
}
