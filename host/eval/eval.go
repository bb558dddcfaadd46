// Package eval asks rules single questions, a line of JSON each, so that another program
// can drive a rule in any language and on any transport: for a test beside the rule, or
// to compare it with a model.
//
// # A question
//
//	{"rule": REF, "params": {...}, "op": "reach", "round": {...}, "states": "HHPRM"}
//
// REF is what a deployment file calls a rule: a shipped name, ./file.wasm#name or
// exec:./path#name, relative to [Options].BaseDir. Params are those of a deployment
// file: integers, or the names of an enum; one that has a default may be left out, and
// so may params. Op is reach, scan or need. States belongs to a scan alone: a letter for
// each chunk from lo on, M, H, P or R, in upper case.
//
// Round holds the fields of [abi.Round] by their names on the wire, and
// [abi.Round.Validate] must pass. What is left out has this value:
//
//	chunk_tokens    none: it must be given
//	block_tokens    chunk_tokens
//	stored_tokens   prompt_tokens
//	lo              scan: local_tokens / chunk_tokens; else 0, which need asks for
//	hi              reach: stored_tokens / chunk_tokens, all whole chunks
//	                need: resume_tokens / chunk_tokens, rounded up
//	                scan: bound_tokens / chunk_tokens, rounded up, where that is given;
//	                else lo and the number of states
//	bound_tokens    scan: hi * chunk_tokens; else 0
//	the others      0
//
// Unknown and repeated keys are refused, with the nearest known key.
//
// # An answer
//
//	{"set": [[first,last], ...], "usable": n, "deferred": false, "fuel": n}
//
// Set holds inclusive ranges of chunk numbers of the sequence, so lo is added to what a
// rule counts from there: the supply of a reach, the demand of a scan (of a deferred one
// the chunks whose state must become known), the need of a need. Usable and deferred
// are there for a scan, and only then; usable is 0 when the scan is deferred. Fuel is
// there where the transport counts it. It is that of this call in the instance that serves
// the lines, so a first call, which opens the rule there and makes room, burns more.
//
// A question without an answer has {"error": "..."} in its place, also when the answer
// of need is that no KV can be resumed at the token. The next line goes on.
//
// Empty lines are passed over, and so is a byte order mark before the first. Every answer is written whole before the next line is
// read. A module is read once: a file that is built again meanwhile is not noticed.
package eval

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/plugins"
	"github.com/tierd/tierd/registry/deploy"
)

// LineBytesMax bounds one line: a table of abi.MaxChunks states and 64 KiB for the rest.
// A longer one gets an error, and is passed over.
const LineBytesMax = abi.MaxChunks + 64<<10

// Options of Run. The zero value resolves references against the working directory and
// keeps no compiled code.
type Options struct {
	// BaseDir is what relative references start at.
	BaseDir string
	// CacheDir keeps compiled modules, as plugins.Options.CacheDir.
	CacheDir string
}

// Run answers every line of in on out, in order. It reports how many lines it answered,
// and how many of those answers are errors. The error is one of reading or writing, or
// ctx's.
func Run(ctx context.Context, in io.Reader, out io.Writer, o Options) (lines, failed int, err error) {
	e := newEvaluator(o)
	defer func() { err = errors.Join(err, e.loader.Close(context.WithoutCancel(ctx))) }()
	r := bufio.NewReader(in)
	for first := true; ; first = false {
		line, long, err := readLine(r)
		if err != nil && err != io.EOF {
			return lines, failed, err
		}
		if first { // some programs begin a file with a byte order mark
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		if long || len(bytes.TrimSpace(line)) > 0 {
			lines++
			answer, failure := any(nil), error(nil)
			if answer, failure = e.line(ctx, line, long); failure != nil {
				answer = failedAnswer{failure.Error()}
				failed++
			}
			if err := writeLine(out, answer); err != nil {
				return lines, failed, err
			}
		}
		if err == nil {
			err = ctx.Err()
		}
		if err == io.EOF {
			return lines, failed, nil
		}
		if err != nil {
			return lines, failed, err
		}
	}
}

// readLine returns the next line without its end. Of one that is longer than
// LineBytesMax it keeps nothing. The last line may come with io.EOF.
func readLine(r *bufio.Reader) (line []byte, long bool, err error) {
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(bytes.TrimRight(part, "\r\n")) > LineBytesMax {
			long = true
		}
		if !long {
			line = append(line, part...)
		}
		if err != bufio.ErrBufferFull {
			if long {
				line = nil
			}
			return bytes.TrimRight(line, "\r\n"), long, err
		}
	}
}

func writeLine(w io.Writer, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // "->" in a message is for people
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(b.Bytes())
	return err
}

type failedAnswer struct {
	Error string `json:"error"`
}

type answer struct {
	Set      [][2]uint32 `json:"set"`
	Usable   *uint32     `json:"usable,omitempty"`
	Deferred *bool       `json:"deferred,omitempty"`
	Fuel     *uint64     `json:"fuel,omitempty"`
}

// An evaluator keeps what lines before have opened.
type evaluator struct {
	loader *plugins.Loader
	specs  map[string]abi.Spec // by reference
	rules  map[string]abi.Rule // by reference and parameter values
}

func newEvaluator(o Options) *evaluator {
	return &evaluator{
		loader: plugins.NewLoader(plugins.Options{BaseDir: o.BaseDir, CacheDir: o.CacheDir}),
		rules:  map[string]abi.Rule{}, specs: map[string]abi.Spec{},
	}
}

func (e *evaluator) line(ctx context.Context, line []byte, long bool) (*answer, error) {
	if long {
		return nil, fmt.Errorf("the line has more than %d bytes, and is passed over", LineBytesMax)
	}
	q, err := parse(line)
	if err != nil {
		return nil, err
	}
	rule, err := e.open(ctx, q)
	if err != nil {
		return nil, err
	}
	if p, ok := rule.(pinner); ok { // so that the meter is that of this call
		pinned, release := p.Pin()
		defer release()
		rule = pinned
	}
	a, err := q.ask(rule)
	if err != nil {
		return nil, err
	}
	if m, ok := rule.(metered); ok {
		n := m.Fuel()
		a.Fuel = &n
	}
	return a, nil
}

// A pinner is a rule that can be bound to one instance; what it returns may be metered.
type pinner interface {
	Pin() (r abi.Rule, release func())
}

// A metered rule tells the fuel that its last call has burnt.
type metered interface{ Fuel() uint64 }

func (e *evaluator) open(ctx context.Context, q *question) (abi.Rule, error) {
	spec := e.specs[q.rule]
	if spec == nil {
		p, err := e.loader.Open(ctx, q.rule)
		if err != nil {
			return nil, err
		}
		spec = p.Spec
		e.specs[q.rule] = spec
	}
	values, err := deploy.Values("params", spec.Manifest(), q.params)
	if err != nil {
		return nil, err
	}
	key := fmt.Sprint(q.rule, "\x00", values)
	if r := e.rules[key]; r != nil {
		return r, nil
	}
	r, err := spec.Open(values)
	if err != nil {
		return nil, err
	}
	e.rules[key] = r
	return r, nil
}

// ask puts the question to a rule.
func (q *question) ask(rule abi.Rule) (*answer, error) {
	set := abi.NewBitmap(q.round.Chunks())
	switch q.op {
	case opReach:
		if err := rule.Reach(q.round, set); err != nil {
			return nil, err
		}
		return &answer{Set: ranges(set, q.round.Lo, q.round.Chunks())}, nil
	case opNeed:
		spec, ok := rule.(abi.SpecRule)
		if !ok {
			return nil, fmt.Errorf("rule %s is a policy; only a spec has a need", q.rule)
		}
		if err := spec.Need(q.round, set); err != nil {
			return nil, err
		}
		return &answer{Set: ranges(set, 0, q.round.Chunks())}, nil
	}
	span, err := rule.Scan(q.round, q.states, set)
	if err != nil {
		return nil, err
	}
	if span.Deferred {
		span.Usable = 0 // it has no meaning
	}
	return &answer{Set: ranges(set, q.round.Lo, q.round.Chunks()), Usable: &span.Usable, Deferred: &span.Deferred}, nil
}

// ranges lists the first n bits of a set as inclusive ranges, from chunk lo on.
func ranges(set abi.Bitmap, lo uint32, n int) [][2]uint32 {
	out := [][2]uint32{}
	for i := set.Next(0); i >= 0 && i < n; {
		j := set.NextUnset(i, n)
		out = append(out, [2]uint32{lo + uint32(i), lo + uint32(j-1)})
		i = set.Next(j)
	}
	return out
}
