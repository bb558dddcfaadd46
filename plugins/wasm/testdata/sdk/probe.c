// A module that tries the SDK: the rule probe does in its scan what its parameters say, and
// echo is a policy, so that the module has two rules.
#include "kv.h"

KV_MANIFEST({"rules": [
	{"name": "probe", "version": "1", "kind": "spec", "mask": "unverified", "params": [
		{"name": "op", "min": 0, "max": 9}, {"name": "class", "min": 0, "max": 15}, {"name": "lo", "min": 0, "max": 1024}, {"name": "hi", "min": 0, "max": 1024}]},
	{"name": "echo", "version": "1", "kind": "policy"}
]})

static kv_answer probe_reach(const uint64_t *p, const kv_round *r, kv_bitmap out) {
	(void)p, (void)r, (void)out;
	return kv_fail("100%%: no %s, %u or %llu", "reach", 4294967295u, 18446744073709551615ull);
}

static kv_answer probe_scan(const uint64_t *p, const kv_round *r, kv_states s, kv_bitmap demand, kv_span *span) {
	(void)r;
	kv_class c = (kv_class)p[1];
	int64_t lo = (int64_t)p[2] - 64, hi = (int64_t)p[3] - 64;
	switch (p[0]) {
	case 0: span->usable = (uint32_t)kv_first(s, c, lo, hi); break;
	case 1: span->usable = (uint32_t)kv_last(s, c, lo, hi); break;
	case 2: kv_mark(s, c, lo, hi, demand); break;
	case 3: kv_fill(s, lo, hi, (kv_state)(c & 3)); kv_mark(s, KV_HERE, 0, s.count, demand); break;
	case 4: kv_set_range(demand, lo, hi); break;
	case 5: kv_set(demand, (uint32_t)lo); break;
	case 6: span->usable = kv_at(s, (uint32_t)lo); break;
	case 7: return KV_NO_RESUME;
	case 8: kv_set_tails(demand, lo, hi, c + 1, (lo + 64) & 31); break;
	}
	return KV_OK;
}

static kv_answer probe_need(const uint64_t *p, const kv_round *r, kv_bitmap out) {
	(void)p, (void)r, (void)out;
	return KV_NO_RESUME;
}

static kv_answer echo_reach(const uint64_t *p, const kv_round *r, kv_bitmap out) {
	(void)p, (void)r;
	kv_set_range(out, 0, out.bits);
	return KV_OK;
}

static kv_answer echo_scan(const uint64_t *p, const kv_round *r, kv_states s, kv_bitmap demand, kv_span *span) {
	(void)p, (void)r, (void)demand;
	span->usable = s.count;
	return KV_OK;
}

KV_RULES({4, 0, probe_reach, probe_scan, probe_need}, {0, 0, echo_reach, echo_scan, 0})
