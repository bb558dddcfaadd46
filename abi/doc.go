// Package abi is the contract between tierd and a rule: the two functions that
// every attention type and every offload policy must give, the values they see,
// and the laws they keep. It imports only the standard library, so that a rule
// compiled to WebAssembly carries nothing else.
//
// # The story
//
// An engine keeps the KV cache of a request in GPU blocks. A chunk is a run of
// consecutive blocks of one group; it is the unit that is stored, looked up and
// moved. A group is a set of layers that share a block table and a rule.
//
// A producer computes the KV of a prompt and stores some of its chunks; which
// ones is its supply, and a rule's Reach says it. A consumer of the same prefix
// fetches some chunks and resumes after them; which ones is its demand, and the
// rule's Scan says it. The two run in different processes, at different times,
// from different facts. If demand is ever outside supply, the consumer waits for
// a key that never comes. tierd therefore runs both functions of every rule
// against each other over the whole domain of a deployment before the rule
// serves, and refuses a pair that disagrees.
//
// A spec rule belongs to an attention type and has a third function, Need: the
// chunks that attention really reads when it goes on from a token. It is the
// ground truth for Scan, and it is itself compared with the attention mask that
// the manifest names, so that it cannot be invented.
//
// A policy rule decides for all groups what may enter the store path (Reach) and
// how far may be fetched (Scan, of which only the range counts).
//
// # Laws
//
// Every rule keeps these; package abi/abitest checks them and registration does
// so again:
//
//   - Pure: the same input gives the same output, on a used or a fresh instance,
//     with other calls in between, and for any split of [Lo, Hi) in Reach.
//   - Total: every parameter value inside the manifest's ranges and every Round
//     that passes Round.Validate gets an answer.
//   - Complete: Reach names only chunks that end at or before StoredTokens.
//   - Kept: what going on at a token needs, and Reach keeps when ResumeTokens names
//     that token, it keeps also when AlignTokens or JunctionTokens does, up to
//     StoredTokens.
//   - Answered: a scan that is not deferred demands only chunks whose state is
//     Hit or Pending.
//   - Monotone: more Hits never make fewer chunks usable.
//   - Unknown is not here: a chunk in state Retry is never counted as usable and
//     never fetched. Where it matters, the scan is deferred and marks it.
//   - Pending is Hit later: turning Pending into Hit changes neither the usable
//     count nor the demand.
//
// # Words
//
// Token positions count from 0. Lengths are in tokens and of type uint64; chunk
// numbers count from the start of the sequence in one group and are uint32.
package abi

// Major is the version of the contract. A guest exports the marker kv_abi_1, and
// a subprocess speaks protocol version 1. A change of meaning of any field, state
// or function is a new major; new fields at the end of the Round record are not.
const Major = 1
