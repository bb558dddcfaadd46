// A rule for sliding-window attention: the token at q reads the keys k with q-k < window.
#include "kv.h"

KV_MANIFEST({"rules": [{
	"name": "my-window", "version": "1.0.0", "kind": "spec", "mask": "window", "mask_args": ["window"],
	"params": [{"name": "window", "min": 2, "max": 1048576, "required": true, "unit": "tokens"}]
}]})

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

static kv_answer open(const uint64_t *params) {
	return kv_check("window", params[0], 2, 1 << 20, "tokens");
}

// reach stores the tail of every point at which somebody may go on: its complete chunks.
static kv_answer reach(const uint64_t *params, const kv_round *r, kv_bitmap out) {
	uint64_t behind = params[0] - 1; // how many tokens before it the query at n reads
	uint64_t chunk = r->chunk_tokens;
	int64_t lo = r->lo, complete = r->stored_tokens / chunk;

	uint64_t points[] = {r->resume_tokens, r->junction_tokens <= r->stored_tokens ? r->junction_tokens : 0};
	for (int i = 0; i < 2; i++) {
		uint64_t n = points[i];
		kv_set_range(out, (n - min(n, behind)) / chunk - lo, min((n + chunk - 1) / chunk, complete) - lo);
	}

	// Aligned points lie at the ends of chunks, so their tails have one size, in chunks.
	int64_t step = r->align_tokens / chunk;
	if (step > 0)
		kv_set_tails(out, step - lo, complete - lo, step, (behind + chunk - 1) / chunk);
	return KV_OK;
}

// scan tries one end after the other from the right: the first whose tail is here.
static kv_answer scan(const uint64_t *params, const kv_round *r, kv_states s, kv_bitmap demand, kv_span *span) {
	for (int64_t end = r->hi - r->lo; end > 0;) {
		uint64_t n = min(r->bound_tokens, (r->lo + (uint64_t)end) * r->chunk_tokens);
		int64_t lo = max((n - min(n, params[0] - 1)) / r->chunk_tokens, r->lo) - r->lo;
		int64_t hi = max((n + r->chunk_tokens - 1) / r->chunk_tokens, r->lo) - r->lo;
		int64_t miss = kv_last(s, KV_ABSENT, lo, hi);
		if (miss >= lo) { // no end whose last chunk is a miss will do: go on left of them
			end = kv_last(s, KV_HERE | KV_UNKNOWN, 0, miss) + 1;
		} else if (kv_first(s, KV_UNKNOWN, lo, hi) < hi) { // ask for these, then scan again
			kv_mark(s, KV_UNKNOWN, lo, hi, demand);
			span->deferred = true;
			return KV_OK;
		} else {
			kv_set_range(demand, lo, hi);
			span->usable = end;
			return KV_OK;
		}
	}
	return KV_OK;
}

// need is the truth that the other two are judged by, so it shares no code with them: the
// query at n reads the keys n-window+1 to n-1.
static kv_answer need(const uint64_t *params, const kv_round *r, kv_bitmap out) {
	uint64_t n = r->resume_tokens, oldest = n < params[0] ? 0 : n - params[0] + 1;
	if (n > 0)
		kv_set_range(out, oldest / r->chunk_tokens, (n - 1) / r->chunk_tokens + 1);
	return KV_OK;
}

KV_RULES({.params = 1, .open = open, .reach = reach, .scan = scan, .need = need})
