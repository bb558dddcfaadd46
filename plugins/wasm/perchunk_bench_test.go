package wasm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins/wasm/testdata/perchunk/perchunk"
)

// BenchmarkPerChunk is one rule without the functions for ranges, a division a chunk, in
// Go, in C and native: what the same arithmetic costs in a module with fuel, where the
// cost of the call itself is nothing beside it.
func BenchmarkPerChunk(b *testing.B) {
	native, err := perchunk.Spec{}.Open([]uint64{128})
	require.NoError(b, err)
	want, out := abi.NewBitmap(8192), abi.NewBitmap(8192)
	require.NoError(b, native.Reach(round8192, want))
	for language, build := range map[string]func(dir string) *exec.Cmd{
		"go": func(dir string) *exec.Cmd {
			cmd := exec.Command("go", "build", "-buildmode=c-shared", "-ldflags=-s -w", "-o", filepath.Join(dir, "rule.wasm"), "./testdata/perchunk")
			cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
			return cmd
		},
		"c": func(dir string) *exec.Cmd {
			require.NoError(b, os.CopyFS(dir, os.DirFS("../../examples/window-c")))
			source, err := os.ReadFile("testdata/perchunk/rule.c.txt")
			require.NoError(b, err)
			require.NoError(b, os.WriteFile(filepath.Join(dir, "rule.c"), source, 0o600))
			return exec.Command("make", "-C", dir, "-B")
		},
	} {
		b.Run(language, func(b *testing.B) {
			dir := b.TempDir()
			text, err := build(dir).CombinedOutput()
			require.NoError(b, err, string(text))
			bytes, err := os.ReadFile(filepath.Join(dir, "rule.wasm"))
			require.NoError(b, err)
			m, err := Load(context.Background(), "per-chunk", bytes, Options{})
			require.NoError(b, err)
			defer m.Close(context.Background())
			r, err := m.Specs()[0].Open([]uint64{128})
			require.NoError(b, err)
			pinned, release := r.(Pinner).Pin()
			defer release()
			require.NoError(b, pinned.Reach(round8192, out))
			require.Equal(b, want, out)
			t := inTurns(b, func() { _ = native.Reach(round8192, out) }, func() { _ = pinned.Reach(round8192, out) })
			b.ReportMetric(t[0], "native-ns")
			b.ReportMetric(t[1], "guest-ns")
			b.ReportMetric(t[1]/t[0], "guest/native")
		})
	}
}
