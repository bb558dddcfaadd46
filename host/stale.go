package host

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/plugins/proc"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
)

// ReviewDeployment says in the log, as SIGHUP does, what of the deployment's file and of its
// rules' files has changed since the start. What serves is what was judged then; the next start
// judges what is there by then, and may refuse it.
func (n *Node) ReviewDeployment() {
	file := n.cfg.Deployment
	data, err := readNoPipe(file, strictyaml.FileBytesMax)
	switch {
	case err != nil:
		n.log.Warn("the deployment's file cannot be read any more, and the next start needs it", "file", file, "error", cause(err))
	case !bytes.Equal(data, n.deployment):
		n.tellChanges(file, data)
	}
	var changed []string
	for _, r := range n.entry.Rules() {
		if !strings.HasPrefix(r.Digest, "sha256:") || r.Source == plugins.Shipped {
			continue
		}
		if why := fileIsNot(r.Source, r.Digest); why != "" {
			changed = append(changed, fmt.Sprintf("%s: %s (%s)", r.For, r.Source, why))
		}
	}
	if len(changed) > 0 {
		n.log.Warn("files of rules that changed are used only after a restart", "rules", strings.Join(changed, ", "))
	}
}

// readNoPipe reads a file. Opening a pipe would wait, and with it whoever stops the node.
func readNoPipe(path string, bytesMax int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
	}
	return config.ReadAtMost(path, bytesMax)
}

// tellChanges says which keys of the deployment have other values now.
func (n *Node) tellChanges(file string, data []byte) {
	again, err := deploy.Parse(file, data)
	if err != nil {
		n.log.Warn("the deployment's file has changed, and the next start will refuse it", "error", err)
		return
	}
	if keys := config.Differences(*n.deployed, *again); len(keys) > 0 {
		n.log.Warn("keys of the deployment that changed are used only after a restart", "file", file, "keys", strings.Join(keys, ","))
	}
}

// fileIsNot says why a file is not the one with a digest; "" when it is.
func fileIsNot(path, digest string) string {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "it is gone"
	}
	if err != nil || !info.Mode().IsRegular() { // opening a pipe would wait
		return "it cannot be read"
	}
	if info.Size() > proc.ProgramBytesMax { // no rule is that large: it need not be read
		return "it has changed"
	}
	f, err := os.Open(path)
	if err != nil {
		return "it cannot be read"
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "it cannot be read"
	}
	if "sha256:"+hex.EncodeToString(h.Sum(nil)) != digest {
		return "it has changed"
	}
	return ""
}
