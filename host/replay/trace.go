package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
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

// ReadTrace reads at most limit requests, all of them when limit is 0. name is for
// messages.
func ReadTrace(name string, r io.Reader, limit int) ([]Request, error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 0, 64<<10), lineBytesMax)
	var out []Request
	for line := 1; in.Scan(); line++ {
		if limit > 0 && len(out) == limit {
			return out, nil
		}
		if len(in.Bytes()) == 0 {
			continue
		}
		var req Request
		if err := json.Unmarshal(in.Bytes(), &req); err != nil {
			return nil, fmt.Errorf("%s:%d: no JSON of a trace line: %w", name, line, err)
		}
		if err := req.check(); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, line, err)
		}
		out = append(out, req)
	}
	switch err := in.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("%s: a line is longer than %d bytes; this is no trace", name, lineBytesMax)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", name, err)
	case len(out) == 0:
		return nil, fmt.Errorf("%s: no request in it; each line must be one JSON object with input_length and hash_ids", name)
	}
	return out, nil
}

// LoadTrace reads at most limit requests of a file, all of them when limit is 0.
func LoadTrace(path string, limit int) ([]Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer f.Close()
	return ReadTrace(path, f, limit)
}
