// Package c holds the SDK for rules in C: one header, which "tierd new rule" writes out
// beside the rule. Its first lines say how to use it.
package c

import _ "embed"

// Header is kv.h.
//
//go:embed kv.h
var Header string
