package rules

import (
	"io"
	"log/slog"
	"os"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/evidence"
)

// certified returns the certificate's verdict when it is one on what is about to be
// judged, and else nil: a certificate can spare a node its check, and never more than that.
func (o *Options) certified(here *registry.Verdict) *registry.Verdict {
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	data, err := readCertificate(o.Certificate)
	if err != nil {
		log.Warn("the certificate cannot be read; this node checks for itself", "certificate", o.Certificate, "error", err)
		return nil
	}
	c, err := evidence.OpenCertificate(data, o.Keys)
	if err != nil {
		log.Error("the certificate is not accepted; this node checks for itself", "certificate", o.Certificate, "reason", err)
		return nil
	}
	v, differences := c.Against(here)
	for _, d := range differences {
		log.Warn("the certificate is of something else; this node checks for itself", "certificate", o.Certificate, "key", c.KeyID,
			"differs", d.Name, "in_certificate", d.Certificate, "here", d.Here)
	}
	return v
}

// readCertificate reads no more than a certificate has, and opens no pipe, which would wait.
func readCertificate(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &os.PathError{Op: "read", Path: path, Err: os.ErrInvalid}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, evidence.CertificateBytesMax+1))
}
