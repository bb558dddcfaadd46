// Package module holds the WebAssembly module that the tierd program embeds: every
// rule of packages specs and specs/policy, compiled from the command in its guest
// directory. The daemon runs these bytes, not the packages, so that a shipped rule
// goes through the same door as a rule from a file, and the digest in a verdict is
// that of the bytes that serve.
//
// The module is committed, because building it must not be needed to build tierd. A
// test builds it again: with the toolchain named in the file toolchain the bytes must
// be equal; with another one the rebuilt module must answer the same. After a change to
// abi, abi/guest, specs or specs/policy run
//
//	go generate ./specs/module
package module

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"sync"
)

//go:generate go run ./build .

//go:embed specs.wasm.gz
var compressed []byte

//go:embed toolchain
var toolchain string

// bytesMax bounds what is decompressed: what a host accepts as a module.
const bytesMax = 8 << 20

var decompressed = sync.OnceValues(func() ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return nil, fmt.Errorf("embedded module: %w", err)
	}
	wasm, err := io.ReadAll(io.LimitReader(z, bytesMax+1))
	if err != nil {
		return nil, fmt.Errorf("embedded module: %w", err)
	}
	if len(wasm) > bytesMax {
		return nil, fmt.Errorf("embedded module: more than %d bytes", bytesMax)
	}
	return wasm, nil
})

// Wasm returns the module. The caller must not change the bytes. It decompresses them
// once.
func Wasm() ([]byte, error) { return decompressed() }

// Digest returns "sha256:" and the hexadecimal digest of the module's bytes, or ""
// when they cannot be decompressed, which Wasm reports.
func Digest() string {
	wasm, err := Wasm()
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(wasm)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Toolchain returns the version of Go that the module was built with, such as
// "go1.26.8".
func Toolchain() string { return strings.TrimSpace(toolchain) }
