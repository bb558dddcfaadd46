// Package stock judges a deployment of a stock vLLM: whether every chunk that a consumer
// asks its producer for is one that the producer supplies. Nothing here serves. The rules
// are those of package specs/vllm, and a verdict has the form of package registry's.
//
// # What is run
//
// A case is a prompt, what its producer did and held, and what its consumer held. Neither
// side sees the other, so for each prompt length every producer is run once, every
// consumer once, and all of them are held against each other. Leg pd alone is judged: the
// consumer takes every key of the prompt for one that its producer has. In leg probe it
// asks first, and waits for no key that is not there.
//
// # Relations
//
// They have the names of package registry/check, and each known hole of vLLM (the rows of
// the table in package specs/vllm) falls under one of them:
//
//	covers    a cold producer that computes the prompt in one step supplies what any
//	          consumer demands, whatever is on the consumer's GPU, in its primary, or late:
//	          rows 2, 9, 10, 11, 12, 13
//	needs     what a hit loads was looked up: row "load not looked up"
//	schedule  so does a producer that computes it in steps, and goes on to generate: rows 2, 3
//	warm      so does one whose GPU or primary holds a prefix: row 1 and the policy gate
//	cascade   so does one whose primary another request is filling: row 5. Only with
//	          shared_writes: every vllm-0.27 fails it
//	caps      and limits that one side alone knows do no harm: rows 6 and 16, with
//	          max_offload_tokens, max_load_tokens or turn_tokens
//	states    one fetch asks for no more of a window than a hit reads, whatever a started
//	          promotion answers: row 7
//
// States runs last, over the whole domain again: asking for too much is waste as long as
// all of it is supplied, so a hole is told first. Where promotions answer retry there
// nearly always is one.
//
// # The domain
//
// The answers of vLLM's rules go by a period: the least common multiple of all chunks,
// attention chunks, segments and the retention interval. Lengths run from 1 through three
// periods and the longest window, and those next to the longest prompt. That the rest of
// the lengths repeats those is established by this package's tests, which run drawn
// configurations over many periods; it is no proof. Cases run by prompt length first, so
// that the first failure is the smallest of those that are run.
package stock
