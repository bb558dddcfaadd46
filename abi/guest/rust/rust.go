// Package rust holds the SDK for rules in Rust: one source file, which "tierd new rule"
// writes out beside the rule. Its first lines say how to use it.
package rust

import _ "embed"

// Source is kv.rs.
//
//go:embed kv.rs
var Source string
