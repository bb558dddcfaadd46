// Package replay plays the engines of a producer and a consumer against two running
// daemons, with the requests of a recorded trace, and judges every byte that comes
// out at the consumer.
//
// # The story
//
// A line of a trace gives a prompt without its words: token p of a request is the
// pair (hash_ids[p/512], p mod 512), so that two requests share a prefix exactly when
// the recorded service saw them share one. From the tokens follow the chained prefix
// hashes that an engine would give the daemon, and from a block's prefix hash, its
// layer, K or V, and its token follow the bytes of the KV cache. Nothing is random and
// nothing is remembered: what a block must hold can be computed anew at any time, on
// either side, without asking a daemon.
//
// The producer's engine prefills in steps of 2048 tokens into GPU blocks that it
// takes from a pool, names them to its daemon, and frees the blocks that have left a
// sliding window as soon as the daemon has copied them; their numbers are used again
// at once. Freed blocks stay findable by their hash until they are overwritten, as in
// a real engine, and the next prompt with the same prefix starts from them, up to the
// reuse_tokens that the daemon allows.
//
// The consumer's engine looks into its own blocks first, asks its daemon for a plan,
// takes blocks for what the plan demands, spoils them, waits for the load, and then
// compares every byte that attention would read when it goes on from the resume
// point: all of the prefix in a group that keeps everything, the window before the
// point in a sliding one. Then it computes the rest of the prompt itself.
//
// A request is a hit when it went on from the planned point with the right bytes, and
// the plan fetched something, or nothing was left to fetch because the engine's own
// blocks reach the prompt's last whole chunk. Everything else is a recompute, and each
// recompute has one named cause. Hits and recomputes add up to the requests.
//
// What the consumer demanded came from its own tier, or from its peer, or stayed
// unmatched; the report tells the three apart.
//
// Each engine follows the deployment of its own daemon. Of a rule that does not ship
// with tierd, replay does not know what attention reads: there it compares all that was
// loaded, and misses nothing.
//
// # Order of the two sides
//
// One goroutine prefills, request after request; a few others play the consumer, so
// that one request is pulled while the next is computed. In legs pd and demand every second
// request is begun at the consumer before the producer has begun it: the demand is
// early. For the others the supply is early and waits. In leg probe the consumer
// always comes second, for it can only find what is there.
//
// # The start
//
// Replay hears from both daemons who they are and what they serve, and refuses to start
// where it could only recompute: one node on both sides, other deployments or layouts, a
// prompt above max_tokens. A request of one token, opened and aborted at once, shows a
// daemon that would refuse every other one, or that does not know its peer.
//
// # When a daemon dies
//
// Every call and every wait has a deadline, and the end of the stream of events ends
// them all. A request that was in flight is computed locally and counted as a
// recompute; the ones after it do not wait. The replay always ends by itself.
package replay
