package guest

import (
	"strconv"
	"unicode/utf8"

	"github.com/tierd/tierd/abi"
)

// appendManifest appends the JSON of kv_manifest, {"rules":[...]}. It is written by
// hand because encoding/json adds 1.4 MB to a guest and doubles the time to load it.
func appendManifest(b []byte, specs []abi.Spec) []byte {
	b = append(b, `{"rules":[`...)
	for i, s := range specs {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendRule(b, s.Manifest())
	}
	return append(b, "]}"...)
}

func appendRule(b []byte, m *abi.Manifest) []byte {
	b = appendString(append(b, `{"name":`...), m.Name)
	b = appendString(append(b, `,"version":`...), m.Version)
	b = appendString(append(b, `,"kind":`...), string(m.Kind))
	if m.Mask != "" {
		b = appendString(append(b, `,"mask":`...), string(m.Mask))
	}
	if len(m.MaskArgs) > 0 {
		b = appendStrings(append(b, `,"mask_args":`...), m.MaskArgs)
	}
	if len(m.Params) > 0 {
		b = append(b, `,"params":[`...)
		for i := range m.Params {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendParam(b, &m.Params[i])
		}
		b = append(b, ']')
	}
	return append(b, '}')
}

func appendParam(b []byte, p *abi.Param) []byte {
	b = appendString(append(b, `{"name":`...), p.Name)
	b = strconv.AppendUint(append(b, `,"min":`...), p.Min, 10)
	b = strconv.AppendUint(append(b, `,"max":`...), p.Max, 10)
	if p.Default != 0 {
		b = strconv.AppendUint(append(b, `,"default":`...), p.Default, 10)
	}
	if p.Required {
		b = append(b, `,"required":true`...)
	}
	if p.Unit != "" {
		b = appendString(append(b, `,"unit":`...), p.Unit)
	}
	if len(p.Enum) > 0 {
		b = appendStrings(append(b, `,"enum":`...), p.Enum)
	}
	return append(b, '}')
}

func appendStrings(b []byte, list []string) []byte {
	b = append(b, '[')
	for i, s := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, s)
	}
	return append(b, ']')
}

const hex = "0123456789abcdef"

// appendString appends s as a JSON string; bytes that are not UTF-8 become U+FFFD.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r < ' ':
			b = append(b, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}
