// Package as holds the SDK for rules in AssemblyScript: one source file, which "tierd new
// rule" writes out beside the rule. Its first lines say how to use it.
package as

import _ "embed"

// Source is kv.ts.
//
//go:embed kv.ts
var Source string
