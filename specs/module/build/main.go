// Command build compiles the module of package specs/module and writes specs.wasm.gz
// and toolchain into the directory given as its argument.
//
// It must be run inside the repository. With the same sources and the same version of
// Go the files are equal byte by byte on every machine: paths and version control are
// kept out of the module, and settings that could change its code are cleared.
package main

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build DIRECTORY")
		os.Exit(2)
	}
	if err := build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

func build(dir string) error {
	tmp, err := os.MkdirTemp("", "specs-module-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	path := filepath.Join(tmp, "specs.wasm")
	cmd := exec.Command("go", "build", "-buildmode=c-shared", "-trimpath",
		"-buildvcs=false", "-ldflags=-s -w", "-o", path, "github.com/tierd/tierd/specs/module/guest")
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0", "GOTOOLCHAIN=local",
		"GOFLAGS=", "GOWASM=", "GOEXPERIMENT=", "GODEBUG=")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compiling the guest: %w", err)
	}
	wasm, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression) // no name and no time in the header
	if err != nil {
		return err
	}
	if _, err := z.Write(wasm); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "specs.wasm.gz"), out.Bytes(), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "toolchain"), []byte(runtime.Version()+"\n"), 0o644)
}
