package inspect

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/tierd/tierd/abi"
)

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	if r.Refused != "" {
		fmt.Fprintf(&b, "REFUSED  %s\n\n  %s\n\n", r.Ref, r.Refused)
	} else {
		fmt.Fprintf(&b, "%s\n", r.Ref)
	}
	line := func(label, format string, args ...any) {
		fmt.Fprintf(&b, "  %-9s %s\n", label, fmt.Sprintf(format, args...))
	}
	if r.Source != r.Ref {
		line("source", "%s", r.Source)
	}
	if r.Digest != "" {
		line("digest", "%s", r.Digest)
	}
	line("size", "%d bytes", r.Bytes)
	if r.ABI != "" {
		line("ABI", "version %s", r.ABI)
	}
	if r.MemoryPagesMax > 0 {
		line("memory", "starts with %d of at most %d pages of 64 KiB", r.MemoryPages, r.MemoryPagesMax)
	}
	for i := range r.Rules {
		b.WriteByte('\n')
		r.Rules[i].write(&b)
	}
	list(&b, "exports", r.Exports)
	list(&b, "imports", r.Imports)
	_, err := b.WriteTo(w)
	return err
}

func list(b *bytes.Buffer, label string, lines []string) {
	for i, l := range lines {
		if i == 0 {
			b.WriteByte('\n')
		} else {
			label = ""
		}
		fmt.Fprintf(b, "  %-9s %s\n", label, l)
	}
}

func (r *Rule) write(b *bytes.Buffer) {
	m := r.Manifest
	fmt.Fprintf(b, "  %-9s %s %s, %s", "rule", m.Name, m.Version, m.Kind)
	if m.Mask != "" {
		fmt.Fprintf(b, " with mask %s", m.Mask)
	}
	if len(m.MaskArgs) > 0 {
		fmt.Fprintf(b, "(%s)", strings.Join(m.MaskArgs, ", "))
	}
	b.WriteByte('\n')
	if len(m.Params) > 0 {
		t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
		fmt.Fprintf(t, "            parameter\tmin\tmax\tdefault\tunit\n")
		for i := range m.Params {
			writeParam(t, &m.Params[i])
		}
		t.Flush() // to memory
	}
	if r.Sample != nil {
		r.Sample.write(b)
	}
}

func writeParam(t io.Writer, p *abi.Param) {
	value := func(v uint64) string {
		if v < uint64(len(p.Enum)) {
			return p.Enum[v]
		}
		return fmt.Sprint(v)
	}
	standard, unit := value(p.Default), p.Unit
	if p.Required {
		standard = "required"
	}
	if len(p.Enum) > 0 {
		unit = "one of " + strings.Join(p.Enum, ", ")
	}
	if unit == "" {
		unit = "-"
	}
	fmt.Fprintf(t, "            %s\t%s\t%s\t%s\t%s\n", p.Name, value(p.Min), value(p.Max), standard, unit)
}

func (s *Sample) write(b *bytes.Buffer) {
	at := ""
	for _, k := range slices.Sorted(maps.Keys(s.Params)) {
		at += fmt.Sprintf(", %s %d", k, s.Params[k])
	}
	fmt.Fprintf(b, "            fuel of a prompt of %d tokens in chunks of %d%s:\n", s.PromptTokens, s.ChunkTokens, at)
	for _, c := range s.Calls {
		if c.Error != "" {
			fmt.Fprintf(b, "              %-16s failed: %s\n", c.Func, c.Error)
			continue
		}
		fmt.Fprintf(b, "              %-16s %d\n", c.Func, c.Fuel)
	}
}
