package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
)

// tokensPerID is how many tokens one entry of hash_ids stands for. It is part of the
// trace format.
const tokensPerID = 512

// lineBytesMax bounds one line of a trace: a prompt of 2^21 tokens has 4096 ids, and
// ids of twelve digits make that 56 KiB. A longer line is not a trace.
const lineBytesMax = 1 << 20

// promptTokensMax bounds one prompt, far above the longest context of any model that
// has been published, so that a damaged line cannot ask for terabytes of blocks.
const promptTokensMax = 1 << 24

// A Request is one line of a trace.
type Request struct {
	// TimestampMS is when the request arrived, in milliseconds from the trace's start.
	TimestampMS uint64 `json:"timestamp"`
	// PromptTokens and OutputTokens are lengths in tokens.
	PromptTokens uint64 `json:"input_length"`
	OutputTokens uint64 `json:"output_length"`
	// IDs name the prompt's runs of 512 tokens; the last run may be shorter. Equal
	// ids are equal tokens.
	IDs []uint64 `json:"hash_ids"`
	// At is where the request was read, as file:line, for messages; empty when it
	// comes from no file.
	At string `json:"-"`
}

// at names request i of a replay in messages.
func (r *Request) at(i int) string {
	if r.At != "" {
		return r.At
	}
	return fmt.Sprintf("request %d", i)
}

func (r *Request) check() error {
	if r.PromptTokens == 0 {
		return errors.New("input_length is 0; a request has at least 1 token")
	}
	if r.PromptTokens > promptTokensMax {
		return fmt.Errorf("input_length is %d; at most %d is allowed", r.PromptTokens, uint64(promptTokensMax))
	}
	if want := (r.PromptTokens + tokensPerID - 1) / tokensPerID; uint64(len(r.IDs)) != want {
		return fmt.Errorf("hash_ids has %d entries; an input_length of %d needs %d, one for every %d tokens",
			len(r.IDs), r.PromptTokens, want, tokensPerID)
	}
	return nil
}

// parseRequest reads one line.
func parseRequest(line []byte) (Request, error) {
	var raw struct {
		TimestampMS  uint64    `json:"timestamp"`
		PromptTokens *uint64   `json:"input_length"`
		OutputTokens uint64    `json:"output_length"`
		IDs          *[]uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return Request{}, plainJSON(err)
	}
	switch {
	case raw.PromptTokens == nil:
		return Request{}, errors.New("input_length is missing; it is the prompt's length in tokens")
	case raw.IDs == nil:
		return Request{}, fmt.Errorf("hash_ids is missing; it holds one number for every %d tokens of the prompt", tokensPerID)
	}
	r := Request{TimestampMS: raw.TimestampMS, PromptTokens: *raw.PromptTokens, OutputTokens: raw.OutputTokens, IDs: *raw.IDs}
	return r, r.check()
}

// plainJSON says what is wrong with a line in words of JSON, not of Go.
func plainJSON(err error) error {
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("this is no JSON from byte %d of the line on; a line is one JSON object with input_length and hash_ids", syntax.Offset)
	case errors.As(err, &wrong) && wrong.Field == "":
		return fmt.Errorf("the line is a JSON %s; it must be an object with input_length and hash_ids", wrong.Value)
	case errors.As(err, &wrong) && strings.HasPrefix(wrong.Field, "hash_ids") && wrong.Value != "object":
		return fmt.Errorf("hash_ids is or holds a %s; it must be an array of whole numbers from 0 on", wrong.Value)
	case errors.As(err, &wrong):
		return fmt.Errorf("%s is a %s; it must be a whole number from 0 on", wrong.Field, wrong.Value)
	}
	return err
}

// ReadTrace reads at most limit requests, all of them when limit is 0. name is for
// messages.
func ReadTrace(name string, r io.Reader, limit int) ([]Request, error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 0, 64<<10), lineBytesMax)
	var out []Request
	line := 1
	for ; in.Scan(); line++ {
		if limit > 0 && len(out) == limit {
			return out, nil
		}
		if len(bytes.TrimSpace(in.Bytes())) == 0 {
			continue
		}
		at := fmt.Sprintf("%s:%d", name, line)
		req, err := parseRequest(in.Bytes())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		req.At = at
		out = append(out, req)
	}
	switch err := in.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("%s:%d: the line is longer than %d bytes; this is no trace", name, line, lineBytesMax)
	case err != nil:
		return nil, unreadable(name, err)
	case len(out) == 0:
		return nil, fmt.Errorf("%s: no request in it; each line must be one JSON object with input_length and hash_ids", name)
	}
	return out, nil
}

// LoadTrace reads at most limit requests of a file, all of them when limit is 0.
func LoadTrace(path string, limit int) ([]Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, unreadable(path, err)
	}
	defer f.Close()
	return ReadTrace(path, f, limit)
}

// unreadable names the trace once.
func unreadable(name string, err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return fmt.Errorf("trace %s cannot be read: %w", name, err)
}
