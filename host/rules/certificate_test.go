package rules_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/evidence"
	"github.com/tierd/tierd/specs/module"
)

func testKey(b byte) (ed25519.PrivateKey, ed25519.PublicKey) {
	k := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{b}, ed25519.SeedSize))
	return k, k.Public().(ed25519.PublicKey)
}

// withSection appends a custom section to a module: other bytes, the same rules.
func withSection(code []byte) []byte {
	return append(bytes.Clone(code), 0, 2, 1, 'x')
}

// A certifiedNode registers deployments beside a rule of its own and a certificate. Compiled
// modules are kept from one to the next, verdicts are not.
type certifiedNode struct {
	t                      *testing.T
	dir, certificate, rule string
	code                   []byte // of the rule
}

func newCertifiedNode(t *testing.T) *certifiedNode {
	if testing.Short() {
		t.Skip("checks several deployments")
	}
	dir := t.TempDir()
	code, err := module.Wasm()
	require.NoError(t, err)
	n := &certifiedNode{t, dir, filepath.Join(dir, "certificate.json"), filepath.Join(dir, "mine.wasm"), code}
	n.put(n.rule, code)
	return n
}

func (n *certifiedNode) put(path string, b []byte) {
	require.NoError(n.t, os.WriteFile(path, b, 0o600))
}

func (n *certifiedNode) deployment(maxTokens int, policy string) *deploy.Deployment {
	return deployment(n.t, n.dir, maxTokens, "./mine.wasm#window", policy)
}

func (n *certifiedNode) verdicts() []string {
	kept, err := filepath.Glob(filepath.Join(n.dir, "state", "verdicts", "*"))
	require.NoError(n.t, err)
	return kept
}

// register also says whether the check ran, and what was logged.
func (n *certifiedNode) register(d *deploy.Deployment, seed uint64, keys ...ed25519.PublicKey) (v *registry.Verdict, checked bool, log string, err error) {
	for _, path := range n.verdicts() {
		require.NoError(n.t, os.Remove(path))
	}
	var b bytes.Buffer
	var progress atomic.Bool
	r, err := rules.Register(context.Background(), d, rules.Options{
		StateDir: filepath.Join(n.dir, "state"), Certificate: n.certificate, Keys: keys, Log: slog.New(slog.NewTextHandler(&b, nil)),
		Check: check.Options{Seed: seed, Progress: func(int, int) { progress.Store(true) }},
	})
	if err == nil {
		v = r.Verdict
		require.NoError(n.t, r.Close(context.Background()))
	}
	return v, progress.Load(), b.String(), err
}

// falls: the check runs, its verdict is the node's own, and the log says why.
func (n *certifiedNode) falls(name string, d *deploy.Deployment, seed uint64, key ed25519.PublicKey, why ...string) {
	n.t.Helper()
	v, checked, log, err := n.register(d, seed, key)
	require.NoError(n.t, err, name)
	require.True(n.t, checked, name)
	require.Empty(n.t, v.Certificate, name)
	for _, w := range append(why, "this node checks for itself") {
		require.Contains(n.t, log, w, name)
	}
}

// TestCertificate: a certificate of what a node is about to judge spares it the check. One
// of anything else, or that is not what it was when it was signed, or that is not there,
// does not, and the log says why, with both values.
func TestCertificate(t *testing.T) {
	n := newCertifiedNode(t)
	private, public := testKey(1)
	_, stranger := testKey(2)
	d := n.deployment(40, "request-level")
	first, checked, _, err := n.register(d, 0)
	require.NoError(t, err)
	require.True(t, checked)
	data, err := evidence.Certify(first, "v1", private)
	require.NoError(t, err)

	n.put(n.certificate, data)
	v, checked, log, err := n.register(d, 0, stranger, public)
	require.NoError(t, err)
	require.False(t, checked)
	require.Empty(t, log)
	require.Equal(t, evidence.KeyID(public), v.Certificate)
	require.Equal(t, first.Relations, v.Relations)
	require.Equal(t, first.Rules, v.Rules)
	require.Empty(t, n.verdicts(), "when the key is withdrawn, so is the verdict")

	n.falls("another key", d, 0, stranger, "level=ERROR", "its signature is by none of the 1 configured keys")
	n.falls("another deployment", n.deployment(41, "request-level"), 0, public,
		`differs="deployment digest" in_certificate=`+first.DeploymentDigest, `differs="longest prompt" in_certificate=40 here=41`)
	n.falls("another seed", d, 7, public, "differs=seed in_certificate=1 here=7")
	n.put(n.rule, withSection(n.code))
	n.falls("other bytes of a rule", d, 0, public, `differs="digest of the rule of sliding" in_certificate=`+first.Rules[0].Digest, `differs="rules digest"`)
	n.put(n.rule, n.code)
	other := *first
	other.Checker = "sha256:" + strings.Repeat("00", 32)
	b, err := evidence.Certify(&other, "v1", private)
	require.NoError(t, err)
	n.put(n.certificate, b)
	n.falls("another executable", d, 0, public, `differs="checker digest" in_certificate=`+other.Checker+" here="+first.Checker)

	// What would be refused is refused, whatever a certificate says of something else.
	n.put(n.certificate, data)
	_, checked, log, err = n.register(n.deployment(40, "chunk-level"), 0, public)
	require.ErrorContains(t, err, "refused by relation warm")
	require.True(t, checked)
	require.Contains(t, log, "this node checks for itself")
}

// TestNoCertificate: what stands in a certificate's place.
func TestNoCertificate(t *testing.T) {
	n := newCertifiedNode(t)
	private, public := testKey(1)
	d := n.deployment(40, "request-level")
	first, _, log, err := n.register(d, 0, public)
	require.NoError(t, err)
	require.Contains(t, log, "level=WARN")
	require.Contains(t, log, "no such file")
	data, err := evidence.Certify(first, "v1", private)
	require.NoError(t, err)
	n.put(n.certificate, bytes.Replace(data, []byte(`"payload":"`), []byte(`"payload":"AAAA`), 1))
	n.falls("changed", d, 0, public, "it was changed after it was signed")
	n.put(n.certificate, []byte("{"))
	n.falls("cut short", d, 0, public, "it is no DSSE envelope")
	n.put(n.certificate, bytes.Repeat([]byte("x"), evidence.CertificateBytesMax+9))
	n.falls("long", d, 0, public, "a certificate has at most")
	require.NoError(t, os.Remove(n.certificate))
	require.NoError(t, os.Mkdir(n.certificate, 0o700))
	n.falls("a directory", d, 0, public, "invalid argument")
}

// A verdict that a node has found itself counts more than a certificate.
func TestCertificateBesideKeptVerdict(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	private, public := testKey(1)
	o := rules.Options{StateDir: filepath.Join(dir, "state")}
	d := deployment(t, dir, 40, "window", "request-level")
	require.NoError(t, os.Mkdir(o.StateDir, 0o700))
	own, err := rules.Register(ctx, d, o)
	require.NoError(t, err)
	require.NoError(t, own.Close(ctx))
	data, err := evidence.Certify(own.Verdict, "v1", private)
	require.NoError(t, err)
	require.True(t, json.Valid(data))
	o.Certificate, o.Keys = filepath.Join(dir, "c.json"), []ed25519.PublicKey{public}
	require.NoError(t, os.WriteFile(o.Certificate, data, 0o600))
	again, err := rules.Register(ctx, d, o)
	require.NoError(t, err)
	require.NoError(t, again.Close(ctx))
	require.True(t, again.Verdict.Reused)
	require.Empty(t, again.Verdict.Certificate)
}
