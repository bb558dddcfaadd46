package abi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
)

// MaxChunks bounds Round.Hi: 2^20 chunks of one group. At 16 tokens a chunk that
// is a context of 16 million tokens, more than any published model, and a state
// table of 256 KiB, which fits a guest's memory many times over.
const MaxChunks = 1 << 20

// MaxTokens bounds every token count of a Round, so that sums and products of two
// of them cannot overflow 64 bits: 2^31 tokens.
const MaxTokens = 1 << 31

// A Round is one request seen by one rule of one group. It is a value; a rule
// must depend on nothing else.
//
// Each side fills only the fields that it can know and leaves the others 0, so a
// rule cannot rely on the other side's private facts.
type Round struct {
	// BlockTokens is the number of tokens in one GPU block of the group.
	BlockTokens uint64
	// ChunkTokens is the number of tokens in one chunk: a multiple of BlockTokens.
	ChunkTokens uint64
	// PromptTokens is the length of the prompt.
	PromptTokens uint64
	// StoredTokens is how many tokens the producer stores in this pass: the
	// smaller of prompt and cap at the prompt's end, of text and cap at the
	// text's end. Reach sees it; a consumer computes the same number for leg pd.
	StoredTokens uint64
	// ResumeTokens is the token from which a consumer of exactly this prefix will
	// go on, found by the planner. 0 asks Reach only for the aligned and junction
	// tails. Need reads it as the resume point to judge.
	ResumeTokens uint64
	// AlignTokens asks Reach to keep also what resuming at each of its multiples
	// needs; 0 asks for none. A multiple of ChunkTokens.
	AlignTokens uint64
	// JunctionTokens asks Reach to keep also what resuming there needs: the end
	// of a prefix known to be shared; 0 asks for none.
	JunctionTokens uint64
	// ResidentTokens is the prefix that the producer's tier already holds.
	// Only policies see it.
	ResidentTokens uint64
	// Offers is how often this prefix was offered before. Only policies see it.
	Offers uint64
	// LocalTokens is the prefix that the consumer's GPU already holds.
	LocalTokens uint64
	// BoundTokens is the highest token from which the consumer may resume.
	BoundTokens uint64
	// Lo and Hi are the chunks asked for: Lo <= chunk < Hi. For a scan
	// Lo = LocalTokens/ChunkTokens and Hi = ceil(BoundTokens/ChunkTokens).
	Lo, Hi uint32
}

// RoundBytes is the size of a Round on the wire in ABI version 1.
const RoundBytes = 4 + 4 + 11*8 + 4 + 4

// roundBytesMax bounds the size field of a record from a newer minor version.
const roundBytesMax = 4096

// Chunks returns Hi - Lo, the number of chunks asked for.
func (r *Round) Chunks() int { return int(r.Hi) - int(r.Lo) }

// Validate reports the first field that breaks the contract's bounds. Hosts call
// it at trust boundaries; a rule may rely on it.
func (r *Round) Validate() error {
	switch {
	case r.BlockTokens == 0:
		return fmt.Errorf("round: block_tokens is 0; a block holds at least 1 token")
	case r.ChunkTokens == 0 || r.ChunkTokens%r.BlockTokens != 0:
		return fmt.Errorf("round: chunk_tokens is %d; it must be a positive multiple of block_tokens, %d", r.ChunkTokens, r.BlockTokens)
	case r.AlignTokens%r.ChunkTokens != 0:
		return fmt.Errorf("round: align_tokens is %d; it must be a multiple of chunk_tokens, %d", r.AlignTokens, r.ChunkTokens)
	case r.Hi < r.Lo:
		return fmt.Errorf("round: hi is %d, below lo, %d", r.Hi, r.Lo)
	case r.Hi > MaxChunks:
		return fmt.Errorf("round: hi is %d; the contract allows %d chunks", r.Hi, MaxChunks)
	}
	for i, v := range r.tokens() {
		if v > MaxTokens {
			return fmt.Errorf("round: %s is %d; the contract allows %d", roundFields[i], v, uint64(MaxTokens))
		}
	}
	return nil
}

// roundFields names the u64 fields in wire order.
var roundFields = [11]string{
	"block_tokens", "chunk_tokens", "prompt_tokens", "stored_tokens", "resume_tokens",
	"align_tokens", "junction_tokens", "resident_tokens", "offers", "local_tokens", "bound_tokens",
}

func (r *Round) tokens() [11]uint64 {
	return [11]uint64{
		r.BlockTokens, r.ChunkTokens, r.PromptTokens, r.StoredTokens, r.ResumeTokens,
		r.AlignTokens, r.JunctionTokens, r.ResidentTokens, r.Offers, r.LocalTokens, r.BoundTokens,
	}
}

// AppendWire appends the record of ABI version 1: size u32, reserved u32 (0), the
// u64 fields in the order of the struct, Lo u32, Hi u32, all little-endian.
func (r *Round) AppendWire(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(b, RoundBytes)
	b = le.AppendUint32(b, 0)
	for _, v := range r.tokens() {
		b = le.AppendUint64(b, v)
	}
	b = le.AppendUint32(b, r.Lo)
	return le.AppendUint32(b, r.Hi)
}

// DecodeWire reads a record from the front of b into r and returns the bytes after
// it. A record of a newer minor version is longer; what this version does not know
// is skipped. It checks the frame, not the values: see Validate.
func (r *Round) DecodeWire(b []byte) (rest []byte, err error) {
	le := binary.LittleEndian
	if len(b) < 8 {
		return nil, errors.New("round record: " + strconv.Itoa(len(b)) + " bytes, shorter than its 8-byte head")
	}
	size := le.Uint32(b)
	switch {
	case size < RoundBytes:
		return nil, sizeError(size, "; version "+strconv.Itoa(Major)+" needs at least "+strconv.Itoa(RoundBytes))
	case size > roundBytesMax:
		return nil, sizeError(size, "; at most "+strconv.Itoa(roundBytesMax)+" is read")
	case uint64(size) > uint64(len(b)):
		return nil, sizeError(size, ", but only "+strconv.Itoa(len(b))+" bytes follow")
	}
	u := b[8:]
	for _, p := range [...]*uint64{
		&r.BlockTokens, &r.ChunkTokens, &r.PromptTokens, &r.StoredTokens, &r.ResumeTokens,
		&r.AlignTokens, &r.JunctionTokens, &r.ResidentTokens, &r.Offers, &r.LocalTokens, &r.BoundTokens,
	} {
		*p = le.Uint64(u)
		u = u[8:]
	}
	r.Lo, r.Hi = le.Uint32(u), le.Uint32(u[4:])
	return b[size:], nil
}

func sizeError(size uint32, text string) error {
	return errors.New("round record: size field says " + decimal(uint64(size)) + text)
}
