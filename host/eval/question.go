package eval

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/registry/deploy/strictyaml"
)

// The operations.
const (
	opReach = "reach"
	opScan  = "scan"
	opNeed  = "need"
)

var (
	ops    = []string{opReach, opScan, opNeed}
	keys   = []string{"rule", "params", "op", "round", "states"}
	fields = []string{
		"block_tokens", "chunk_tokens", "prompt_tokens", "stored_tokens", "resume_tokens", "align_tokens",
		"junction_tokens", "resident_tokens", "offers", "local_tokens", "bound_tokens", "lo", "hi",
	}
)

// ruleBytesMax bounds a reference, because answers repeat it: a path of Linux, and a name.
const ruleBytesMax = 4096 + 65

// A question is a line, understood.
type question struct {
	rule   string
	params map[string]any
	op     string
	round  abi.Round
	states abi.States
}

func parse(line []byte) (*question, error) {
	top, err := object("the line", "", line, keys)
	if err != nil {
		return nil, err
	}
	q := &question{}
	for _, f := range []struct {
		key, example string
		to           *string
	}{{"rule", `"window"`, &q.rule}, {"op", `"reach"`, &q.op}} {
		raw, ok := top[f.key]
		if !ok {
			return nil, fmt.Errorf("%s is missing; give it as in \"%s\": %s", f.key, f.key, f.example)
		}
		if err := text(f.key, raw, f.to); err != nil {
			return nil, err
		}
	}
	if len(q.rule) > ruleBytesMax {
		return nil, fmt.Errorf("rule has %d bytes; a path and a name have at most %d", len(q.rule), ruleBytesMax)
	}
	if !slices.Contains(ops, q.op) {
		return nil, fmt.Errorf("op is %q%s known: %s", clip(q.op), strictyaml.DidYouMean(clip(q.op), ops), strings.Join(ops, ", "))
	}
	if raw, ok := top["params"]; ok {
		if q.params, err = params(raw); err != nil {
			return nil, err
		}
	}
	var letters *string
	if raw, ok := top["states"]; ok {
		letters = new(string)
		if err := text("states", raw, letters); err != nil {
			return nil, err
		}
	}
	switch {
	case q.op == opScan && letters == nil:
		return nil, errors.New("states is missing; a scan needs a letter for each chunk: M, H, P or R")
	case q.op != opScan && letters != nil:
		return nil, fmt.Errorf("states is given, but only a scan looks at states, and op is %q", q.op)
	}
	raw, ok := top["round"]
	if !ok {
		return nil, errors.New(`round is missing; it needs chunk_tokens at least, as in "round": {"chunk_tokens": 16}`)
	}
	return q, q.fill(raw, letters)
}

// object reads the keys and values of one JSON object. at stands before its keys in
// messages. Without known keys, any are.
func object(what, at string, raw []byte, known []string) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil {
		return nil, fmt.Errorf("%s is not JSON: %w", what, jsonError(err))
	} else if t != json.Delim('{') {
		return nil, fmt.Errorf("%s is %s; it must be a JSON object", what, clip(string(bytes.TrimSpace(raw))))
	}
	out := map[string]json.RawMessage{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, fmt.Errorf("%s is not JSON: %w", what, jsonError(err))
		}
		key := t.(string) // the decoder takes nothing else for a key
		if known != nil && !slices.Contains(known, key) {
			return nil, fmt.Errorf("unknown key %q%s known here: %s", at+clip(key), strictyaml.DidYouMean(clip(key), known), strings.Join(known, ", "))
		}
		if _, twice := out[key]; twice {
			return nil, fmt.Errorf("%s%s is given twice", at, clip(key))
		}
		var v json.RawMessage
		if err := d.Decode(&v); err != nil {
			return nil, fmt.Errorf("%s is not JSON: %w", what, jsonError(err))
		}
		out[key] = v
	}
	if _, err := d.Token(); err != nil { // the closing brace
		return nil, fmt.Errorf("%s is not JSON: %w", what, jsonError(err))
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("%s goes on after its JSON object, at byte %d", what, d.InputOffset()+1)
	}
	return out, nil
}

// jsonError says of an end that comes too early what it is.
func jsonError(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

func text(key string, raw json.RawMessage, to *string) error {
	if len(raw) == 0 || raw[0] != '"' {
		return fmt.Errorf("%s is %s; it must be a string", key, clip(string(raw)))
	}
	return json.Unmarshal(raw, to)
}

// clip shortens what comes from a line for a message.
func clip(s string) string {
	const shown = 64
	if len(s) <= shown {
		return s
	}
	return strings.ToValidUTF8(s[:shown], "") + "..."
}

// other is JSON that is no value of a parameter; a message shows it.
type other string

// params returns parameters as a deployment file would give them.
func params(raw json.RawMessage) (map[string]any, error) {
	given, err := object("params", "params.", raw, nil)
	if err != nil {
		return nil, err
	}
	out := map[string]any{}
	for k, v := range given {
		var s string
		if i, err := strconv.Atoi(string(v)); err == nil {
			out[k] = i
		} else if text(k, v, &s) == nil {
			out[k] = clip(s)
		} else {
			out[k] = other(clip(string(v)))
		}
	}
	return out, nil
}

// fill sets the round, with the defaults of the package comment, and the states.
func (q *question) fill(raw json.RawMessage, letters *string) error {
	given, err := object("round", "round.", raw, fields)
	if err != nil {
		return err
	}
	v := map[string]uint64{}
	for k, raw := range given {
		n, err := strconv.ParseUint(string(raw), 10, 64)
		if err != nil || n > abi.MaxTokens {
			return fmt.Errorf("round.%s is %s; it must be an integer from 0 to %d", k, clip(string(raw)), uint64(abi.MaxTokens))
		}
		v[k] = n
	}
	chunk := v["chunk_tokens"]
	if chunk == 0 {
		return errors.New("round.chunk_tokens is missing or 0; give the tokens of a chunk")
	}
	otherwise := func(key string, n uint64) {
		if _, ok := v[key]; !ok {
			v[key] = n
		}
	}
	up := func(tokens uint64) uint64 { return (tokens + chunk - 1) / chunk }
	otherwise("block_tokens", chunk)
	otherwise("stored_tokens", v["prompt_tokens"])
	switch q.op {
	case opReach:
		otherwise("hi", max(v["lo"], v["stored_tokens"]/chunk))
	case opNeed:
		if v["lo"] != 0 {
			return fmt.Errorf("round.lo is %d; a need is asked from chunk 0 on: leave lo out", v["lo"])
		}
		otherwise("hi", up(v["resume_tokens"]))
	case opScan:
		otherwise("lo", v["local_tokens"]/chunk)
		if bound, ok := v["bound_tokens"]; ok {
			otherwise("hi", max(v["lo"], up(bound)))
		}
		otherwise("hi", v["lo"]+uint64(len(*letters)))
		otherwise("bound_tokens", v["hi"]*chunk)
	}
	if v["hi"] > abi.MaxChunks || v["lo"] > abi.MaxChunks {
		return fmt.Errorf("round: lo is %d and hi is %d; the contract allows %d chunks", v["lo"], v["hi"], abi.MaxChunks)
	}
	q.round = abi.Round{
		BlockTokens: v["block_tokens"], ChunkTokens: chunk, PromptTokens: v["prompt_tokens"], StoredTokens: v["stored_tokens"],
		ResumeTokens: v["resume_tokens"], AlignTokens: v["align_tokens"], JunctionTokens: v["junction_tokens"],
		ResidentTokens: v["resident_tokens"], Offers: v["offers"], LocalTokens: v["local_tokens"], BoundTokens: v["bound_tokens"],
		Lo: uint32(v["lo"]), Hi: uint32(v["hi"]),
	}
	if err := q.round.Validate(); err != nil {
		return err
	}
	if letters != nil {
		return q.table(*letters)
	}
	return nil
}

// table reads the states.
func (q *question) table(letters string) error {
	n := q.round.Chunks()
	if len(letters) != n {
		return fmt.Errorf("states has %d letters, but lo is %d and hi is %d: give one letter for each of the %d chunks", len(letters), q.round.Lo, q.round.Hi, n)
	}
	q.states = abi.NewStates(n)
	for i, letter := range []byte(letters) {
		s := strings.IndexByte("MHPR", letter) // in the order of their values
		if s < 0 {
			return fmt.Errorf("states: letter %d, of chunk %d, is %q; only M, H, P and R are states, in upper case", i+1, int(q.round.Lo)+i, letter)
		}
		q.states.Put(i, abi.State(s))
	}
	return nil
}
