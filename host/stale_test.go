package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/plugins/zoo"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// TestReviewDeployment: a review names what has changed in the deployment's file and which
// rules' files have, and nothing else; comments and what the file says by default are nothing.
func TestReviewDeployment(t *testing.T) {
	log := &logTo{}
	module := zoo.Good() // one rule, t, which is full attention
	withModule := strings.Replace(deployment, "rule: full", "rule: ./mine.wasm#t", 1)
	var rule string
	loader := plugins.NewLoader(plugins.Options{CacheDir: compiledDir})
	defer loader.Close(context.Background())
	judge := func(ctx context.Context, d *deploy.Deployment, _ func(done, total int)) (*registry.Entry, func() error, error) {
		e, err := onTrust(ctx, d, func(ctx context.Context, ref string) (*plugins.Plugin, error) {
			if strings.HasPrefix(ref, "./") {
				ref = rule + "#t"
			}
			return loader.Open(ctx, ref)
		})
		return e, func() error { return nil }, err
	}
	n := startLogged(t, "a", judge, log, withDeployment(withModule), func(c *config.Config) {
		rule = filepath.Join(filepath.Dir(c.Deployment), "mine.wasm")
		if err := os.WriteFile(rule, module, 0o600); err != nil {
			panic(err)
		}
	})
	file := n.cfg.Deployment
	review := func() string {
		before := len(log.String())
		n.ReviewDeployment()
		return strings.Join(warnings(log.String()[before:]), "")
	}
	write := func(path, text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	require.Empty(t, review())
	write(file, "# a comment\nroles: [producer, consumer]\n"+withModule)
	require.Empty(t, review())
	write(file, strings.NewReplacer("window: 20", "window: 40", "max_tokens: 512", "max_tokens: 256").Replace(withModule))
	require.Contains(t, review(), `msg="keys of the deployment that changed are used only after a restart" file=`+file+" keys=max_tokens,groups[0].params.window")
	write(file, "model: m\n")
	require.Contains(t, review(), `msg="the deployment's file has changed, and the next start will refuse it" error="`+file)
	require.NoError(t, os.Remove(file))
	require.Contains(t, review(), `msg="the deployment's file cannot be read any more, and the next start needs it" file=`+file+` error="no such file or directory"`)
	require.NoError(t, syscall.Mkfifo(file, 0o600)) // nobody writes to it
	require.Contains(t, review(), `file=`+file+` error="it is not a regular file"`)
	require.NoError(t, os.Remove(file))
	write(file, withModule)
	require.Empty(t, review())

	const said = `msg="files of rules that changed are used only after a restart" rules="full: `
	write(rule, string(module)+"\x00")
	require.Contains(t, review(), said+rule+` (it has changed)"`)
	require.NoError(t, os.Truncate(rule, 1<<40)) // which would be read for minutes
	require.Contains(t, review(), said+rule+` (it has changed)"`)
	require.NoError(t, os.Remove(rule))
	require.Contains(t, review(), said+rule+` (it is gone)"`)
	require.NoError(t, os.Mkdir(rule, 0o700))
	require.Contains(t, review(), said+rule+` (it cannot be read)"`)
	require.NoError(t, os.Remove(rule))
	write(rule, string(module))
	require.Empty(t, review())
	sum := sha256.Sum256(module)
	require.Equal(t, "sha256:"+hex.EncodeToString(sum[:]), n.entry.Rules()[1].Digest, "the digest is that of the file")
}
