package eval

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/specs"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// cached keeps compiled code for one run of the tests.
var cached Options

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tierd-eval-test-")
	if err != nil {
		panic(err)
	}
	cached.CacheDir = dir
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// ask answers lines, and requires that there is one answer for each that is not empty.
func ask(t *testing.T, lines ...string) (answers []string, failed int) {
	var out bytes.Buffer
	n, failed, err := Run(context.Background(), strings.NewReader(strings.Join(lines, "\n")), &out, cached)
	require.NoError(t, err)
	answers = strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	require.Len(t, answers, n)
	return answers, failed
}

var fuel = regexp.MustCompile(`"fuel":\d+`)

// TestAnswers holds questions with their answers, good and bad, in golden files: a line
// of a file is a question, and the line below it the answer.
func TestAnswers(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "*.txt"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			var questions []string
			for line := range strings.Lines(string(b)) {
				if q, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "? "); ok {
					questions = append(questions, q)
				}
			}
			answers, failed := ask(t, questions...)
			require.Len(t, answers, len(questions))
			got, errs := "", 0
			for i, q := range questions {
				if strings.HasPrefix(answers[i], `{"error":`) {
					errs++
				}
				got += "? " + q + "\n  " + fuel.ReplaceAllString(answers[i], `"fuel":N`) + "\n\n"
			}
			require.Equal(t, errs, failed)
			if *rewrite {
				require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
			}
			require.Equal(t, string(b), got)
		})
	}
}

// TestEvalIsTheRule: what a line answers is what the rule answers, here its native twin.
func TestEvalIsTheRule(t *testing.T) {
	e := newEvaluator(cached)
	defer func() { require.NoError(t, e.loader.Close(context.Background())) }()
	rapid.Check(t, func(t *rapid.T) {
		u := func(name string, lo, hi uint64) uint64 { return rapid.Uint64Range(lo, hi).Draw(t, name) }
		window, chunk := u("window", 1, 40), u("chunk", 1, 4)
		local := u("local", 0, 20)
		r := abi.Round{BlockTokens: 1, ChunkTokens: chunk, PromptTokens: u("prompt", 0, 60), StoredTokens: u("stored", 0, 60),
			ResumeTokens: u("resume", 0, 60), AlignTokens: chunk * u("align", 0, 3), LocalTokens: local, BoundTokens: local + u("bound", 0, 40)}
		rule, err := specs.Window().Open([]uint64{window, 0})
		require.NoError(t, err)
		native := rule.(abi.SpecRule)

		reach, need, scan := r, r, r
		reach.Lo = uint32(u("lo", 0, r.StoredTokens/chunk))
		reach.Hi = uint32(r.StoredTokens / chunk)
		need.Hi = uint32((r.ResumeTokens + chunk - 1) / chunk)
		scan.Lo, scan.Hi = uint32(local/chunk), uint32((r.BoundTokens+chunk-1)/chunk)
		letters := rapid.StringOfN(rapid.RuneFrom([]rune("HMPR")), scan.Chunks(), scan.Chunks(), -1).Draw(t, "states")
		states, err := abi.ParseStates(letters)
		require.NoError(t, err)
		supply, truth, demand := abi.NewBitmap(reach.Chunks()), abi.NewBitmap(need.Chunks()), abi.NewBitmap(scan.Chunks())
		require.NoError(t, native.Reach(reach, supply))
		require.NoError(t, native.Need(need, truth))
		span, err := native.Scan(scan, states, demand)
		require.NoError(t, err)

		line := func(op string, lo uint32, more string) string {
			b, err := json.Marshal(map[string]uint64{"block_tokens": 1, "chunk_tokens": chunk, "prompt_tokens": r.PromptTokens,
				"stored_tokens": r.StoredTokens, "resume_tokens": r.ResumeTokens, "align_tokens": r.AlignTokens,
				"local_tokens": local, "bound_tokens": r.BoundTokens, "lo": uint64(lo)})
			require.NoError(t, err)
			return fmt.Sprintf(`{"rule":"window","params":{"window":%d},"op":%q,"round":%s%s}`, window, op, b, more)
		}
		lines := []string{line("reach", reach.Lo, ""), line("need", 0, ""), line("scan", scan.Lo, `,"states":"`+letters+`"`)}
		for i, want := range []struct {
			set abi.Bitmap
			lo  uint32
			n   int
		}{{supply, reach.Lo, reach.Chunks()}, {truth, 0, need.Chunks()}, {demand, scan.Lo, scan.Chunks()}} {
			got, err := e.line(context.Background(), []byte(lines[i]), false)
			require.NoError(t, err, lines[i])
			set := abi.NewBitmap(want.n)
			for _, run := range got.Set {
				require.LessOrEqual(t, run[0], run[1])
				set.SetRange(int(run[0]-want.lo), int(run[1]-want.lo)+1)
			}
			require.True(t, set.Equal(want.set), lines[i])
			if i < 2 {
				require.Nil(t, got.Usable)
				require.Nil(t, got.Deferred)
				continue
			}
			require.Equal(t, span.Deferred, *got.Deferred)
			if !span.Deferred {
				require.Equal(t, span.Usable, *got.Usable)
			}
		}
	})
}

const short = `{"rule":"full","op":"reach","round":{"chunk_tokens":4,"prompt_tokens":9}}`

// A line that is too long is an error of its own; the next one is answered.
func TestLongLines(t *testing.T) {
	pad := func(n int) string { return short + strings.Repeat(" ", n-len(short)) }
	answers, failed := ask(t, pad(LineBytesMax), pad(LineBytesMax+1), short, pad(3*LineBytesMax), short)
	require.Equal(t, 2, failed)
	long := fmt.Sprintf(`{"error":"the line has more than %d bytes, and is passed over"}`, LineBytesMax)
	for i, want := range []string{"", long, "", long, ""} {
		if want == "" {
			require.Contains(t, answers[i], `{"set":[[0,1]]`)
		} else {
			require.Equal(t, want, answers[i])
		}
	}
	// The longest table of the contract fits.
	answers, failed = ask(t, fmt.Sprintf(`{"rule":"full","op":"scan","round":{"chunk_tokens":4},"states":%q}`, strings.Repeat("H", abi.MaxChunks)))
	require.Zero(t, failed)
	require.Contains(t, answers[0], fmt.Sprintf(`{"set":[[0,%d]],"usable":%d,"deferred":false`, abi.MaxChunks-1, abi.MaxChunks))
}

// Another program can wait for each answer before it asks the next question.
func TestInteractive(t *testing.T) {
	questions, ask := io.Pipe()
	reply, answers := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, _, err := Run(context.Background(), questions, answers, cached)
		done <- errors.Join(err, answers.Close())
	}()
	r := bufio.NewReader(reply)
	for range 3 {
		_, err := io.WriteString(ask, short+"\r\n\n")
		require.NoError(t, err)
		line, err := r.ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, line, `{"set":[[0,1]]`)
	}
	require.NoError(t, ask.Close())
	require.NoError(t, <-done)
}

// Who no longer listens ends it, and so does the context.
func TestRunEnds(t *testing.T) {
	reply, answers := io.Pipe()
	reply.Close()
	_, _, err := Run(context.Background(), strings.NewReader(short), answers, cached)
	require.ErrorIs(t, err, io.ErrClosedPipe)
	ctx, cancel := context.WithCancel(context.Background())
	n, _, err := Run(ctx, strings.NewReader(short+"\n"+short), writerFunc(func(b []byte) (int, error) {
		cancel()
		return len(b), nil
	}), cached)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, n)
}

type writerFunc func(b []byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// A rule is opened once for each parameter value, however often it is asked.
func TestRulesAreKept(t *testing.T) {
	e := &evaluator{loader: nil, rules: map[string]abi.Rule{}, specs: map[string]abi.Spec{"w": specs.Window()}}
	for _, window := range []string{"3", "4", "3", "3"} {
		_, err := e.line(context.Background(), []byte(`{"rule":"w","params":{"window":`+window+`},"op":"reach","round":{"chunk_tokens":4}}`), false)
		require.NoError(t, err)
	}
	require.Len(t, e.rules, 2)
}

// even is a rule that can be resumed at even tokens only.
type even struct{ abi.SpecRule }

func (even) Open([]uint64) (abi.Rule, error) { return even{}, nil }
func (even) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "even", Version: "1", Kind: abi.KindSpec, Mask: abi.MaskState}
}

func (even) Need(r abi.Round, out abi.Bitmap) error {
	if r.ResumeTokens%2 != 0 {
		return abi.ErrNoResume
	}
	out.Set(0)
	return nil
}

// A need that is none is an error line; a rule without a meter has no fuel.
func TestNoResume(t *testing.T) {
	e := &evaluator{rules: map[string]abi.Rule{}, specs: map[string]abi.Spec{"even": even{}}}
	a, err := e.line(context.Background(), []byte(`{"rule":"even","op":"need","round":{"chunk_tokens":4,"resume_tokens":6}}`), false)
	require.NoError(t, err)
	require.Equal(t, &answer{Set: [][2]uint32{{0, 0}}}, a)
	_, err = e.line(context.Background(), []byte(`{"rule":"even","op":"need","round":{"chunk_tokens":4,"resume_tokens":7}}`), false)
	require.EqualError(t, err, "no KV can be resumed at this token")
}

// FuzzLine: any line is answered or refused, and what is understood is in the contract.
func FuzzLine(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "*.txt"))
	require.NoError(f, err)
	for _, path := range files {
		b, err := os.ReadFile(path)
		require.NoError(f, err)
		for line := range strings.Lines(string(b)) {
			if q, ok := strings.CutPrefix(line, "? "); ok {
				f.Add([]byte(q))
			}
		}
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		q, err := parse(line)
		if err != nil {
			require.NotEmpty(t, err.Error())
			require.Less(t, len(err.Error()), 2048, "a message is for people")
			return
		}
		require.NoError(t, q.round.Validate())
		require.Contains(t, ops, q.op)
		if q.op == opScan {
			require.GreaterOrEqual(t, len(q.states), abi.StatesWords(q.round.Chunks()))
		}
		require.True(t, json.Valid(line), "%q", line)
	})
}

// A byte order mark before the first line is passed over, and nowhere else.
func TestByteOrderMark(t *testing.T) {
	q := "\ufeff" + `{"rule":"full","op":"reach","round":{"chunk_tokens":4}}` + "\n"
	var out strings.Builder
	lines, failed, err := Run(t.Context(), strings.NewReader(q+q), &out, cached)
	require.NoError(t, err)
	require.Equal(t, []int{2, 1}, []int{lines, failed}, out.String())
	require.True(t, strings.HasPrefix(out.String(), `{"set":[]`), out.String())
}

// A reference that no path can be is not repeated in its answer.
func TestLongReference(t *testing.T) {
	_, err := parse([]byte(`{"rule":"` + strings.Repeat("w", 5000) + `","op":"reach","round":{"chunk_tokens":4}}`))
	require.EqualError(t, err, "rule has 5000 bytes; a path and a name have at most 4161")
}
