// Package vllm holds the rules by which stock vLLM offloads KV and finds it again, so that
// a configuration of it can be checked for holes: chunks that a consumer asks for and its
// producer never supplies. Two revisions are told apart, [RevA] (vLLM 0.27) and [RevB]
// (vLLM 0.30). Nothing here serves: tierd's own rules are in package specs, its own way to
// combine groups in registry/plan.
//
// # The story
//
// A [Config] says what the rules depend on: the revision, the groups (layers that share a
// block table) with their kinds and block sizes, how many blocks make a chunk, and four
// settings that decide what is stored and asked for. [New] turns it into [Rules].
//
// A [Producer] computes a prompt in steps. After each it looks at the chunks behind its
// cursor and keeps those that are complete and allocated ([Config.PromptOnly],
// max_offload_tokens, a drafter's last chunk), whose last GPU block is not null (a window
// group has no blocks for what the next token does not read), and which the revision
// takes for reachable by a lookup. They are offered to the primary, all or none; what is
// new there, or with [RequestLevel] all of it, goes on to the peers: the supply.
//
// A consumer looks its request up once per engine step ([Rules.Match]): prefix groups
// scan from the left until a Miss, window groups from the right until enough chunks in a
// row are there, and each may lower the end of the hit for all. A lookup that reaches a
// peer starts a copy. So the demand ([Rules.Demand]) is not what is loaded at the end: it
// is every chunk that any scan touched, that was not in the consumer's primary, and that
// the peer is said to have. In eager prefill/decode the peer is said to have every key of
// the prompt. What a lookup answers while the copy runs decides how far a scan walks:
// with [PromotionPending] a window scan stops after its window, with [PromotionRetry] it
// walks to the start and asks for everything.
//
// [Rules.Meet] lets both meet over a [Case] and returns a [Meeting], which draws itself.
// Its Missing is the hole. Stock vLLM fails a whole fetch for one missing chunk, after a
// wait of 30 seconds, and computes the prompt again. Its Unready is worse: chunks that a
// hit loads though no scan looked at them, which ends the engine with an assertion.
// [MeetAcross] does the same for two configurations, [Rules.FirstHole] for many prompts.
//
// # Where the revisions differ
//
//	                     RevA                               RevB
//	reachable            tail of each segment of full       mask per block: tails before aligned
//	                     chunks, and before each step's     ends, by retention interval before the
//	                     end, counted in chunks             prompt's last token (the default)
//	tail of window w     ceil(w/chunk) chunks               ceil((w+extra-1)/block) blocks
//	scan of window w     ceil(w/chunk)                      that, and what extra tokens need; one
//	                                                        more when the hit ends inside a chunk
//	Retry, Pending       both defer a window scan           Pending only in the run at hand
//	drafter's group      window groups ask for one more     all groups do; its last chunk is given
//	                     chunk; all groups count as such    out when the request ends
//	                     when none is marked
//	chunked local        pruned as a window                 never pruned
//	end of a request     counts the token that was          does not; looks again at the segment
//	                     sampled and not computed           that the prompt's end had cut
//	Mamba, mode align    read from the block table          handed over as steps end
//	key being written    dropped by RequestLevel            parked until it is readable
//	no prefix group      nothing is pruned                  the largest chunk aligns
//	group not cacheable  unknown                            left out, keeps its index
//
// # Known holes
//
// Each can be reproduced with a configuration and a case; the tests named TestRow do.
// "f16" is a Full group with blocks of 16, "w4/8" a SlidingWindow group with blocks of 4
// and a window of 8. The producer's policy is RequestLevel unless the row is about it.
//
//	row                 configuration                       case
//	1 null block        RevA w128/128 f128, retry           prompt 7200, GPUTokens 7168: 55 of 56 missing
//	                    pending: only w = 1 mod block,      prompt 65, GPUTokens 64
//	                    and ChunkedLocal: f64 w16/17
//	2 pruning           RevA f40 w16/16: the chunk does     any; none when it divides
//	                    not divide the full chunk
//	3 drafter's tail    Eagle, PromptOnly false: none;      Producer.NoRoom up to the prompt's end
//	                    RevA loses the prompt's last chunk
//	4 primary full      any                                 Producer.NoRoom; the notice to the consumer
//	                                                        is the session's, not modelled
//	5 pending cascade   RevA                                Warm.Primary answers Pending
//	6 truncation        f16 w4/8                            prompt 64, MaxOffloadTokens 48; or TextTokens
//	                                                        beyond the producer's prompt
//	7 over-demand       retry                               as row 1: 112 demanded, 57 supplied
//	8 eager hit         any                                 an empty supply: all of the demand is missing;
//	                                                        the time it costs is not modelled
//	9 prompt's end      RevB f16 w4/8                       prompts of a multiple of 16
//	10 one chunk more   RevB f64 w16/17, any retention      every prompt beyond 64
//	11 second round     RevA f16 w4/8, both Eagle           prompt 64
//	12 rounded state    RevA f64 and Mamba all 16; both     prompt 128; prompts of a multiple of
//	                    revisions f16 and Mamba align 16    the state's block
//	13 interval         RevB f16 w4/8, RetentionTokens 32   prompt 80
//	16 consumer's end   RevB f16 w4/8                       prompt 70, MaxLoadTokens 24
//	17 other chunks     MeetAcross                          an error
//	policy gate         ChunkLevel                          Warm.Primary Hit, or LoadedTokens
//	load not looked up  RevA f12 w8/8                       prompt 64: Unready
//
// Rows 14 (a fetch after the producer ended), 15 (back-pressure) and 18 (stale block ids of
// RSWA) happen in the session and in the host's tiers.
//
// # What is not modelled
//
// Partial tails (a boundary inside a chunk of recurrent models), stores on overwrite,
// store thresholds, eviction between a lookup and a load, requests that load the same
// chunk for each other, tier filters, and preemption. A group's blocks count tokens after
// decode-context parallelism. In mode align the tests assume, from the scheduler's code,
// that a step ends on the last block boundary of the prompt ([Rules.StepEnds]), and that
// rev B hands over every state at which a step ended, whatever the retention interval,
// but not one that its GPU already held.
//
// # Sources
//
// Written from reading the public source of vLLM, Apache License 2.0, main branch at
// 2f41c894e3 of 2026-08-20 (RevA) and a public fork near v0.30 with the branch of pull
// request 51886 (RevB): the scheduler side of the offloading connector (storable chunks,
// the two scans, the lookup over groups, store jobs), the KV managers' reachable block
// masks and skipped tokens, the tiering manager's lookup and cascade, and the scheduler's
// split of steps for recurrent models. No code or wording is taken over. The rows of
// testdata/vllm_rules.jsonl are answers measured on those functions.
package vllm
