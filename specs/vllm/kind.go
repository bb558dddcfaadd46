package vllm

import "fmt"

// A Kind is the KV cache spec of a group.
type Kind uint8

const (
	// Full is causal attention.
	Full Kind = iota + 1
	// MLA is causal attention on latents.
	MLA
	// HiddenState is a group that stores hidden states.
	HiddenState
	// Sink is causal attention with learned tokens in front, which are in no block table.
	Sink
	// RSWA attends the prompt and a window; offload takes it for Full.
	RSWA
	// SlidingWindow attends the last WindowTokens tokens.
	SlidingWindow
	// SlidingWindowMLA is a sliding window on latents.
	SlidingWindowMLA
	// ChunkedLocal attends inside an attention chunk of WindowTokens tokens.
	ChunkedLocal
	// Mamba is a recurrent state.
	Mamba
	// Cross attends an encoder's tokens; no revision offloads it.
	Cross
	// EncoderOnly keeps no cache; no revision offloads it.
	EncoderOnly
	// KpoolTail is a ring of one block; rev B leaves it out of offload.
	KpoolTail
)

var kindNames = [...]string{
	Full: "full", MLA: "mla", HiddenState: "hidden", Sink: "sink", RSWA: "rswa",
	SlidingWindow: "swa", SlidingWindowMLA: "swa_mla", ChunkedLocal: "chunked",
	Mamba: "mamba", Cross: "cross", EncoderOnly: "encoder", KpoolTail: "kpool_tail",
}

// String returns the short name of the kind, such as "swa".
func (k Kind) String() string { return name("Kind", kindNames[:], uint8(k)) }

// ParseKind returns the kind with a short name.
func ParseKind(s string) (Kind, error) {
	k, err := parse("kind", kindNames[:], s)
	return Kind(k), err
}

// sliding reports whether the kind is a sliding window, by a pure type test as upstream's.
func (k Kind) sliding() bool {
	return k == SlidingWindow || k == SlidingWindowMLA || k == KpoolTail
}

// windowed reports whether the group is scanned from the right.
func (k Kind) windowed() bool { return k.sliding() || k == ChunkedLocal || k == Mamba }

// A MambaMode says which recurrent states can be reused.
type MambaMode uint8

const (
	// MambaNone: one running state; nothing in the middle can be reused.
	MambaNone MambaMode = iota
	// MambaAlign: a state where a step ended on a block boundary.
	MambaAlign
	// MambaAll: a state per block.
	MambaAll
)

var modeNames = [...]string{"none", "align", "all"}

func (m MambaMode) String() string { return name("MambaMode", modeNames[:], uint8(m)) }

// ParseMambaMode returns the mode named none, align or all.
func ParseMambaMode(s string) (MambaMode, error) {
	m, err := parse("mamba mode", modeNames[:], s)
	return MambaMode(m), err
}

var revisionNames = [...]string{RevA: "vllm-0.27", RevB: "vllm-0.30"}

func (r Revision) String() string { return name("Revision", revisionNames[:], uint8(r)) }

// ParseRevision returns the revision named vllm-0.27 or vllm-0.30.
func ParseRevision(s string) (Revision, error) {
	r, err := parse("engine", revisionNames[:], s)
	return Revision(r), err
}

var promotionNames = [...]string{PromotionPending: "pending", PromotionRetry: "retry"}

func (p Promotion) String() string { return name("Promotion", promotionNames[:], uint8(p)) }

// ParsePromotion returns the answer named pending or retry.
func ParsePromotion(s string) (Promotion, error) {
	p, err := parse("promotion", promotionNames[:], s)
	return Promotion(p), err
}

var policyNames = [...]string{ChunkLevel: "chunk-level", RequestLevel: "request-level"}

func (p Policy) String() string { return name("Policy", policyNames[:], uint8(p)) }

// ParsePolicy returns the policy named chunk-level or request-level.
func ParsePolicy(s string) (Policy, error) {
	p, err := parse("policy", policyNames[:], s)
	return Policy(p), err
}

func (o Optional) String() string {
	if !o.Set {
		return "none"
	}
	return fmt.Sprint(o.Tokens)
}

func name(of string, names []string, v uint8) string {
	if int(v) < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", of, v)
}

func parse(what string, names []string, s string) (int, error) {
	known := ""
	for i, n := range names {
		if n == s && n != "" {
			return i, nil
		}
		if n != "" {
			known += ", " + n
		}
	}
	return 0, fmt.Errorf("vllm: %s %q is unknown; use one of: %s", what, s, known[2:])
}

// String says what the group is, such as "swa 128 + 3, block 16, eagle".
func (g Group) String() string {
	s := g.Kind.String()
	switch {
	case g.Kind == Mamba:
		s += " " + g.Mode.String()
	case g.WindowTokens != 0:
		s += fmt.Sprintf(" %d", g.WindowTokens)
	}
	if g.ExtraTokens != 0 {
		s += fmt.Sprintf(" + %d", g.ExtraTokens)
	}
	s += fmt.Sprintf(", block %d", g.BlockTokens)
	if g.Eagle {
		s += ", eagle"
	}
	if g.NotCacheable {
		s += ", not cacheable"
	}
	return s
}

// String says what differs from an engine that nobody configured, and the groups.
func (c *Config) String() string {
	d := Defaults(c.Revision)
	s := c.Revision.String()
	if c.BlocksPerChunk != d.BlocksPerChunk {
		s += fmt.Sprintf(", %d blocks per chunk", c.BlocksPerChunk)
	}
	if c.Revision == RevB && c.RetentionTokens != d.RetentionTokens {
		s += ", retention interval " + c.RetentionTokens.String()
	}
	if !c.PromptOnly {
		s += ", generated tokens too"
	}
	if c.Speculative {
		s += ", speculative"
	}
	s += fmt.Sprintf(", %s, promotion %s", c.Policy, c.Promotion)
	for i := range c.Groups {
		s += fmt.Sprintf("; group %d: %s", i, c.Groups[i])
	}
	return s
}
