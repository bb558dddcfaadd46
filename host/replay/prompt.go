package replay

import (
	"crypto/sha256"
	"encoding/binary"
)

// A hash names a prefix: everything from token 0 up to some token.
type hash [sha256.Size]byte

// A prompt is a request with its chained prefix hashes.
type prompt struct {
	req        *Request
	hashTokens uint64
	// chain[i] covers the tokens [0, i*hashTokens); chain[0] is the salt's own.
	chain []hash
}

// newPrompt chains the hashes of every whole granule. Prompts of different salts
// share no hash.
func newPrompt(req *Request, salt string, hashTokens uint64) *prompt {
	n := req.PromptTokens / hashTokens
	p := &prompt{req: req, hashTokens: hashTokens, chain: make([]hash, n+1)}
	p.chain[0] = sha256.Sum256([]byte("tierd replay, salt " + salt))
	for i := range n {
		p.chain[i+1] = p.extend(p.chain[i], i*hashTokens, (i+1)*hashTokens)
	}
	return p
}

// extend hashes the tokens [from, to) behind h.
func (p *prompt) extend(h hash, from, to uint64) hash {
	buf := make([]byte, 0, 1024)
	buf = append(buf, h[:]...)
	for t := from; t < to; t++ {
		buf = binary.LittleEndian.AppendUint64(buf, p.req.IDs[t/tokensPerID])
		buf = binary.LittleEndian.AppendUint16(buf, uint16(t%tokensPerID))
	}
	return sha256.Sum256(buf)
}

func (p *prompt) tokens() uint64 { return p.req.PromptTokens }

// wire returns the hashes of all whole granules, concatenated.
func (p *prompt) wire() []byte {
	out := make([]byte, 0, len(p.chain)*sha256.Size)
	for _, h := range p.chain[1:] {
		out = append(out, h[:]...)
	}
	return out
}

// at returns the hash of the prefix [0, t). Between two granules it is the hash of
// the tokens behind the last granule, so that it names them too.
func (p *prompt) at(t uint64) hash {
	i := t / p.hashTokens
	if t%p.hashTokens == 0 {
		return p.chain[i]
	}
	return p.extend(p.chain[i], i*p.hashTokens, t)
}
