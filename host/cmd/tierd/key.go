package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"
	"github.com/tierd/tierd/registry/evidence"
)

func keyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "key FILE",
		Short: "Make a key that signs certificates",
		Long: `Key makes an ed25519 key: FILE holds the private half, for tierd check --key, and can be
read by its owner only; FILE.pub holds the public half, for certificate_keys of the nodes
that are to accept its certificates. It replaces no file.

Both are PEM files (PKCS #8 and PKIX), as openssl genpkey -algorithm ed25519 and
openssl pkey -pubout write them.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%d files given; give the one to write, as in: tierd key ci.pem", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := makeKey(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s      private: give it to the CI as a secret, for tierd check --key\n%s.pub  public: list it in certificate_keys of each node\nkey %s\n", args[0], args[0], id)
			return err
		},
	}
}

// makeKey writes a key's two files, both or none, and returns its id.
func makeKey(path string) (id string, err error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", err
	}
	p, q, err := evidence.EncodeKey(private)
	if err != nil {
		return "", err
	}
	if err := writeNew(path, p, 0o600); err != nil {
		return "", err
	}
	if err := writeNew(path+".pub", q, 0o644); err != nil {
		return "", errors.Join(err, os.Remove(path))
	}
	return evidence.KeyID(public), nil
}

// writeNew writes a file that is not there.
func writeNew(path string, data []byte, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is there already; a key is not replaced: choose another name, or remove it", path)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(path)
	}
	return err
}
