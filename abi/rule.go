package abi

import "errors"

// A Rule is the pair of functions that every plugin gives for one group, opened with
// fixed parameters. Implementations keep the laws of the package comment. A Rule is
// used by one goroutine at a time unless its source says otherwise.
type Rule interface {
	// Reach is the supply: it sets bit k of out when chunk r.Lo+k will be stored,
	// for r.Lo <= r.Lo+k < r.Hi. out has BitmapWords(r.Chunks()) words, all zero.
	// For a policy it is the set of chunks that may enter the store path.
	Reach(r Round, out Bitmap) error

	// Scan is the demand: from the lookup states of the chunks [r.Lo, r.Hi) it
	// returns how many chunks from r.Lo on are usable, and sets in demand the
	// chunks to fetch when resuming there, that is, at token
	// min(r.BoundTokens, (r.Lo+usable)*r.ChunkTokens).
	//
	// A scan sees a finished table and has no side effect: looking is not
	// fetching. When the answer hangs on a chunk in state Retry, the span is
	// Deferred, and demand marks the chunks whose state must become known first.
	//
	// For a policy only Span.Usable counts: how far may be fetched.
	Scan(r Round, states States, demand Bitmap) (Span, error)
}

// A SpecRule is the rule of an attention type.
type SpecRule interface {
	Rule
	// Need is the truth: it sets bit i of out when chunk i of [0, r.Hi) holds a
	// token that attention reads to go on from token r.ResumeTokens. r.Lo is 0.
	// It returns ErrNoResume when nothing stored lets attention go on there.
	//
	// It must be written from the attention's definition, not from Reach or Scan.
	Need(r Round, out Bitmap) error
}

// ErrNoResume says that no KV can be resumed at a token, such as a recurrent state
// that is not saved there.
var ErrNoResume = errors.New("no KV can be resumed at this token")

// A Span is what a scan answers.
type Span struct {
	// Usable is the number of chunks from Round.Lo on that are covered when
	// resuming at their end. It has no meaning when Deferred is set.
	Usable uint32
	// Deferred says that some state must become known before the scan can answer.
	Deferred bool
}

// A Spec is a rule before its parameters are chosen: a manifest, and a way to open
// the rule. One module may hold several.
type Spec interface {
	Manifest() *Manifest
	// Open returns the rule with one value per parameter, in manifest order. The
	// result of a spec of KindSpec satisfies SpecRule. A value outside its range
	// is an error that names the parameter.
	Open(params []uint64) (Rule, error)
}
