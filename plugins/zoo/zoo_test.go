package zoo_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/plugins/wasm"
	"github.com/tierd/tierd/plugins/zoo"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
)

var rewrite = flag.Bool("rewrite", false, "rewrite testdata/messages.txt")

// deployment is small, so that the zoo's good rule is judged in a fraction of a second.
const deployment = `model: zoo
max_tokens: 48
align_tokens: 16
groups:
  - {name: cage, rule: ./%s.wasm, block_tokens: 4, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
`

// messageBytesMax bounds what is said of a module, however long the names in it: it goes
// to a log and a terminal.
const messageBytesMax = 4096

// judge says of a module what tierd check says: a verdict and a message.
func judge(t *testing.T, dir string, c zoo.Crime) (verdict, message string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(dir, c.Name+".wasm"), c.Wasm, 0o600))
	d, err := deploy.Parse(filepath.Join(dir, "d.yaml"), fmt.Appendf(nil, deployment, c.Name))
	require.NoError(t, err)
	// One worker: what a rule that keeps state has served depends on their number.
	r, err := rules.Register(context.Background(), d, rules.Options{Check: check.Options{Workers: 1}})
	var refusal *registry.Refusal
	switch {
	case errors.As(err, &refusal):
		return "refused", refusal.Verdict.Counterexample.String()
	case err != nil:
		return "undecided", err.Error()
	}
	require.NoError(t, r.Close(context.Background()))
	return "accepted", ""
}

// TestMessages compares what is said of every animal with testdata/messages.txt.
func TestMessages(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := t.TempDir()
	path := filepath.Join("testdata", "messages.txt")
	old, err := os.ReadFile(path)
	require.True(t, err == nil || *rewrite, err)
	var all strings.Builder
	for _, c := range zoo.Modules() {
		t.Run(c.Name, func(t *testing.T) {
			began := time.Now()
			verdict, message := judge(t, dir, c)
			t.Logf("%d bytes, %v", len(c.Wasm), time.Since(began).Round(time.Millisecond))
			require.Equal(t, c.Harmless, verdict == "accepted", "%s\n%s", verdict, message)
			require.LessOrEqual(t, len(message), messageBytesMax)
			if i := strings.IndexFunc(message, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
				t.Errorf("the message commands the terminal: %q", message)
			}
			section := fmt.Sprintf("## %s: %s\n%s\n", c.Name, c.What, verdict)
			if message != "" {
				section += strings.TrimSpace(strings.ReplaceAll(message, dir, "DIR")) + "\n"
			}
			all.WriteString(section + "\n")
			if !*rewrite && !strings.Contains(string(old), section+"\n") {
				t.Errorf("%s does not hold:\n%s", path, section)
			}
		})
	}
	if *rewrite {
		require.NoError(t, os.WriteFile(path, []byte(all.String()), 0o644))
	} else if !t.Failed() {
		require.Equal(t, string(old), all.String(), "%s holds more than the zoo", path)
	}
}

// bombLimit is how long TestCompileBombs waits for the compiler, and bombMemoryMax what the
// process may take meanwhile.
const (
	bombLimit     = 200 * time.Millisecond
	bombMemoryMax = 512 << 20
)

// TestCompileBombs: what a compiler cannot finish is refused before it begins, in bounded
// memory. Each is opened in a process of its own: should the compiler begin, it ends with
// the process.
func TestCompileBombs(t *testing.T) {
	if i, err := strconv.Atoi(os.Getenv("TIERD_ZOO_BOMB")); err == nil {
		_, err := wasm.Load(context.Background(), "bomb", zoo.CompileBombs()[i].Wasm, wasm.Options{CompileTimeout: bombLimit})
		fmt.Println("said:", err)
		status, _ := os.ReadFile("/proc/self/status")
		_, peak, _ := strings.Cut(string(status), "VmHWM:")
		fmt.Println("peak:", strings.Fields(peak + " -")[0])
		os.Exit(0)
	}
	for i, c := range zoo.CompileBombs() {
		t.Run(c.Name, func(t *testing.T) {
			child := exec.Command(os.Args[0], "-test.run", "^TestCompileBombs$")
			child.Env = append(os.Environ(), fmt.Sprintf("TIERD_ZOO_BOMB=%d", i))
			out, err := child.CombinedOutput()
			require.NoError(t, err, string(out))
			require.Contains(t, string(out), "said: wasm module bomb: ")
			require.NotContains(t, string(out), "being compiled", "it is refused, not given up")
			_, peak, _ := strings.Cut(string(out), "peak: ")
			kib, err := strconv.Atoi(strings.TrimSpace(peak))
			require.NoError(t, err, string(out))
			t.Logf("%d bytes: %s", len(c.Wasm), out)
			require.Less(t, kib<<10, bombMemoryMax)
		})
	}
}

// TestGood: what the animals are made of is in order.
func TestGood(t *testing.T) {
	verdict, message := judge(t, t.TempDir(), zoo.Crime{Name: "good", Wasm: zoo.Good()})
	require.Equal(t, "accepted", verdict, message)
}

// TestCatalogue: names are unique file names, every animal says what it does, and none is
// the good module.
func TestCatalogue(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range zoo.Modules() {
		require.Regexp(t, regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`), c.Name)
		require.False(t, seen[c.Name], c.Name)
		seen[c.Name] = true
		require.NotEmpty(t, c.What, c.Name)
		require.NotEqual(t, zoo.Good(), c.Wasm, c.Name)
	}
	require.Greater(t, len(seen), 100)
}
