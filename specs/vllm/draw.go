package vllm

import (
	"fmt"
	"strings"

	"github.com/tierd/tierd/abi"
)

// drawMax is the longest row that is drawn chunk by chunk: what fits a terminal.
const drawMax = 64

// String draws a meeting: one row per group, a letter per chunk. Longer rows are given
// as ranges.
func (m *Meeting) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%s: loads %d tokens", m.Config.String(), m.Case.String(), m.Tokens)
	if m.Failed {
		b.WriteString(", a fetch failed")
	}
	b.WriteByte('\n')
	drawn := false
	for i := range m.Config.Groups {
		fmt.Fprintf(&b, "group %d: ", i)
		n := int(max(m.Case.PromptTokens+m.Case.GeneratedTokens, m.Case.TextTokens) / (m.Config.Groups[i].BlockTokens * m.Config.BlocksPerChunk))
		if n > drawMax {
			fmt.Fprintf(&b, "supply %s, demand %s, missing %s, unready %s\n",
				Ranges(m.Supply[i]), Ranges(m.Groups[i]), Ranges(m.Missing[i]), Ranges(m.Unready[i]))
			continue
		}
		drawn = true
		for c := range n {
			b.WriteByte(m.letter(i, c))
		}
		b.WriteByte('\n')
	}
	if drawn {
		b.WriteString("d supplied and demanded, s supplied only, ! demanded and never supplied, ? loaded and never looked up\n")
	}
	return b.String()
}

func (m *Meeting) letter(g, c int) byte {
	switch {
	case has(m.Unready[g], c):
		return '?'
	case has(m.Missing[g], c):
		return '!'
	case has(m.Groups[g], c):
		return 'd'
	case has(m.Supply[g], c):
		return 's'
	}
	return '.'
}

// String says what of a case is not as in the plainest one.
func (c *Case) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "prompt %d", c.PromptTokens)
	for _, f := range []struct {
		name string
		n    uint64
	}{
		{"steps of", c.StepTokens}, {"generated", c.GeneratedTokens}, {"aborted at", c.AbortTokens},
		{"consumer's text", c.TextTokens}, {"junction", c.JunctionTokens}, {"GPU prefix", c.Warm.GPUTokens},
		{"loaded prefix", c.Warm.LoadedTokens}, {"consumer's GPU prefix", c.LocalTokens},
	} {
		if f.n > 0 {
			fmt.Fprintf(&b, ", %s %d", f.name, f.n)
		}
	}
	for _, f := range []struct {
		name string
		o    Optional
	}{{"max_offload_tokens", c.MaxOffloadTokens}, {"max_load_tokens", c.MaxLoadTokens}} {
		if f.o.Set {
			fmt.Fprintf(&b, ", %s %d", f.name, f.o.Tokens)
		}
	}
	if c.Reused {
		b.WriteString(", blocks reused at once")
	}
	return b.String()
}

// Ranges writes a set as inclusive ranges, such as {0-3, 7}.
func Ranges(b abi.Bitmap) string {
	var parts []string
	for i := b.Next(0); i >= 0; {
		j := b.NextUnset(i, 64*len(b))
		if i == j-1 {
			parts = append(parts, fmt.Sprint(i))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", i, j-1))
		}
		i = b.Next(j)
	}
	return "{" + strings.Join(parts, ", ") + "}"
}
