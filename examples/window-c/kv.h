// kv.h: all that a tierd rule in C needs, for ABI version 1. No libc, no allocator. A
// module is one C file:
//
//	#include "kv.h"
//	KV_MANIFEST({"rules": [{"name": "my-rule", "version": "1.0.0", "kind": "spec", ...}]})
//	static kv_answer open(const uint64_t *params) { ... }
//	static kv_answer reach(const uint64_t *params, const kv_round *r, kv_bitmap out) { ... }
//	static kv_answer scan(const uint64_t *params, const kv_round *r, kv_states s, kv_bitmap demand, kv_span *span) { ... }
//	static kv_answer need(const uint64_t *params, const kv_round *r, kv_bitmap out) { ... }
//	KV_RULES({.params = 1, .open = open, .reach = reach, .scan = scan, .need = need})
//
// A module of several rules lists them in the order of the manifest. It is built by
//
//	clang --target=wasm32 -O2 -nostdlib -ffreestanding -mbulk-memory \
//		-Wl,--no-entry -Wl,--stack-first -Wl,--strip-all -o rule.wasm rule.c
//
// where --stack-first makes a stack that overflows trap instead of overwriting data.
//
// A rule is a pure function of its parameters and the round: keep no state. Chunk indexes
// count from the round's lo; in need they count from 0. Ranges are clipped to the chunks
// asked for, so no answer can be too long; a single index outside of them traps.
#pragma once
#include <stdbool.h>
#include <stdint.h>

#define KV_CHUNKS_MAX (1u << 20) // chunks of one round
#define KV_ROUND_BYTES 104u      // the Round record of version 1; those of later minors are longer
#define KV_RECORD_BYTES_MAX 4096u
#define KV_HANDLES_MAX 4096u     // rules opened in one instance; then the host takes a fresh one
#define KV_REASON_BYTES_MAX 512u // the host keeps no more
#ifndef KV_PARAMS_MAX
#define KV_PARAMS_MAX 8u // parameters of one rule; define it before the include for up to 32
#endif

// It answered; it failed (return kv_fail); or, in need, nothing stored lets attention go on there.
typedef enum { KV_OK = 0, KV_FAILED = -1, KV_NO_RESUME = -2 } kv_answer;

// One request seen by one rule, in tokens, and the chunks asked for: lo <= chunk < hi.
// What this side cannot know is 0. The record lies in memory as the struct does.
typedef struct __attribute__((may_alias)) {
	uint64_t block_tokens, chunk_tokens, prompt_tokens, stored_tokens, resume_tokens, align_tokens,
		junction_tokens, resident_tokens, offers, local_tokens, bound_tokens;
	uint32_t lo, hi;
} kv_round;
_Static_assert(sizeof(kv_round) == KV_ROUND_BYTES - 8, "the struct is the record without its head");

// A set of chunks, 64 a word, empty when a rule gets it; and what a lookup answered for
// each chunk, 32 a word.
typedef struct { uint64_t *words; uint32_t bits; } kv_bitmap;
typedef struct { uint64_t *words; uint32_t count; } kv_states;
typedef enum { KV_MISS, KV_HIT, KV_PENDING, KV_RETRY } kv_state;

// A set of states, for the searches.
typedef enum { KV_ABSENT = 1 << KV_MISS, KV_UNKNOWN = 1 << KV_RETRY, KV_HERE = 1 << KV_HIT | 1 << KV_PENDING } kv_class;

// What a scan answers: the usable chunks from lo on; or deferred, and demand marks the
// chunks whose state must become known first.
typedef struct { uint32_t usable; bool deferred; } kv_span;

// A rule: how many parameters it takes, and its functions. open may be 0 when every value
// will do, and need is 0 in a policy.
typedef struct {
	uint32_t params;
	kv_answer (*open)(const uint64_t *params);
	kv_answer (*reach)(const uint64_t *params, const kv_round *r, kv_bitmap out);
	kv_answer (*scan)(const uint64_t *params, const kv_round *r, kv_states s, kv_bitmap demand, kv_span *span);
	kv_answer (*need)(const uint64_t *params, const kv_round *r, kv_bitmap out);
} kv_rule;

#define KV_MANIFEST(...) const char kv_json[] = #__VA_ARGS__; const uint32_t kv_json_bytes = sizeof kv_json - 1;
#define KV_RULES(...) const kv_rule kv_rules[] = {__VA_ARGS__}; const uint32_t kv_rules_count = sizeof kv_rules / sizeof *kv_rules;
extern const char kv_json[];
extern const kv_rule kv_rules[];
extern const uint32_t kv_json_bytes, kv_rules_count;

// kv_fail keeps the reason that the host shows. The format knows %s, %u, %llu and %%.
static char kv_reason[KV_REASON_BYTES_MAX];
static uint32_t kv_reason_bytes;
__attribute__((format(printf, 1, 2), noinline)) static kv_answer kv_fail(const char *format, ...) {
	__builtin_va_list args;
	__builtin_va_start(args, format);
	kv_reason_bytes = 0;
	for (; *format; format++) {
		char word[21] = {*format}, *d = word + 20; // a letter, or the digits of a number
		const char *text = word;
		bool percent = *format == '%';
		if (percent && *++format == 's') {
			text = __builtin_va_arg(args, const char *);
		} else if (percent && *format != '%') {
			uint64_t v = *format == 'u' ? __builtin_va_arg(args, uint32_t) : __builtin_va_arg(args, uint64_t);
			if (*format == 'l') format += 2;
			do *--d = (char)('0' + v % 10); while (v /= 10);
			text = d;
		}
		while (*text && kv_reason_bytes < sizeof kv_reason) kv_reason[kv_reason_bytes++] = *text++;
	}
	__builtin_va_end(args);
	return KV_FAILED;
}

// kv_check fails, in the words of every rule, unless min <= value <= max, as in the manifest.
static inline kv_answer kv_check(const char *name, uint64_t value, uint64_t min, uint64_t max, const char *unit) {
	if (value >= min && value <= max) return KV_OK;
	return kv_fail("parameter %s is %llu; it must be %llu to %llu%s%s", name, value, min, max, *unit ? " " : "", unit);
}

// Sets of chunks.
static inline void kv_set(kv_bitmap b, int64_t i) {
	if (i < 0 || i >= b.bits) __builtin_trap();
	b.words[i >> 6] |= 1ull << (i & 63);
}

// kv_set_range sets the bits lo <= i < hi.
static inline void kv_set_range(kv_bitmap b, int64_t lo, int64_t hi) {
	if (lo < 0) lo = 0;
	if (hi > b.bits) hi = b.bits;
	for (int64_t end; lo < hi; lo = end) {
		uint64_t m = ~0ull << (lo & 63);
		if ((end = (lo | 63) + 1) > hi) m &= ~0ull >> (end - hi);
		b.words[lo >> 6] |= m;
	}
}

// kv_set_tails sets the size bits before each of first, first+step and so on, up to last.
// Only the points whose tails reach into the set are visited. step must be positive.
static inline void kv_set_tails(kv_bitmap b, int64_t first, int64_t last, int64_t step, int64_t size) {
	if (step <= 0) __builtin_trap();
	if (first <= 0) first += (step - first) / step * step;
	if (last >= b.bits + size) last = b.bits + size - 1;
	if (first > last) return;
	if (size >= step) kv_set_range(b, first - size, first + (last - first) / step * step); // they touch
	else for (int64_t at = first; at <= last; at += step) kv_set_range(b, at - size, at);
}

// Tables of states.
static inline kv_state kv_at(kv_states s, int64_t i) {
	if (i < 0 || i >= s.count) __builtin_trap();
	return s.words[i >> 5] >> (i & 31) * 2 & 3;
}

// kv_match returns w with the low bit set of each of its 32 entries that is in c.
static inline uint64_t kv_match(kv_class c, uint64_t w) {
	uint64_t lo = w, hi = w >> 1, m = 0;
	if (c & 1 << KV_MISS) m |= ~(lo | hi);
	if (c & 1 << KV_HIT) m |= lo & ~hi;
	if (c & 1 << KV_PENDING) m |= hi & ~lo;
	if (c & 1 << KV_RETRY) m |= lo & hi;
	return m & 0x5555555555555555;
}

// kv_first returns the lowest i in [lo, hi) whose state is in c, or hi.
static inline int64_t kv_first(kv_states s, kv_class c, int64_t lo, int64_t hi) {
	int64_t end = hi < s.count ? hi : s.count;
	for (int64_t i = lo < 0 ? 0 : lo; i < end; i = (i | 31) + 1) {
		uint64_t m = kv_match(c, s.words[i >> 5]) >> (i & 31) * 2;
		if (m) return (i += __builtin_ctzll(m) / 2) < end ? i : hi;
	}
	return hi;
}

// kv_last returns the highest i in [lo, hi) whose state is in c, or lo-1.
static inline int64_t kv_last(kv_states s, kv_class c, int64_t lo, int64_t hi) {
	int64_t begin = lo < 0 ? 0 : lo;
	for (int64_t i = (hi < s.count ? hi : s.count) - 1; i >= begin; i = (i & ~31ll) - 1) {
		uint64_t m = kv_match(c, s.words[i >> 5]) << (62 - (i & 31) * 2);
		if (m) return (i -= __builtin_clzll(m) / 2) >= begin ? i : lo - 1;
	}
	return lo - 1;
}

// kv_mark sets in out the bits of the entries lo <= i < hi whose state is in c.
static inline void kv_mark(kv_states s, kv_class c, int64_t lo, int64_t hi, kv_bitmap out) {
	if (hi > out.bits) hi = out.bits;
	for (int64_t i = kv_first(s, c, lo, hi); i < hi; i = kv_first(s, c, i + 1, hi)) kv_set(out, i);
}

// kv_fill sets the entries lo <= i < hi. The table is the rule's own during this call.
static inline void kv_fill(kv_states s, int64_t lo, int64_t hi, kv_state state) {
	if (lo < 0) lo = 0;
	if (hi > s.count) hi = s.count;
	for (int64_t end; lo < hi; lo = end) {
		uint64_t m = ~0ull << (lo & 31) * 2;
		if ((end = (lo | 31) + 1) > hi) m &= ~0ull >> (end - hi) * 2;
		s.words[lo >> 5] = (s.words[lo >> 5] & ~m) | (0x5555555555555555 * state & m);
	}
}

// From here on: the exports, and what is behind them. A call's input is copied into kv_in
// and its answer left in kv_out; both have room for the largest round.
#define KV_IMPORT(name) __attribute__((import_module("kv"), import_name(#name)))
#define KV_EXPORT(name) __attribute__((export_name(#name))) name
KV_IMPORT(input) uint32_t kv_import_input(void *to, uint32_t room);
KV_IMPORT(fail) void kv_import_fail(const char *reason, uint32_t bytes);

typedef struct { const kv_rule *rule; uint64_t params[KV_PARAMS_MAX]; } kv_opened;
typedef struct { const kv_opened *by; const kv_round *round; uint32_t size, rest; } kv_call; // rest bytes follow a record of size
static kv_opened kv_handles[KV_HANDLES_MAX];
static uint32_t kv_handles_count;
static uint64_t kv_in[(KV_RECORD_BYTES_MAX + KV_CHUNKS_MAX / 4) / 8], kv_out[1 + KV_CHUNKS_MAX / 64];

// The compiler may call these, which would be libc's. Without -mbulk-memory it may not take
// their own loops for calls of them.
#ifdef __wasm_bulk_memory__
__attribute__((weak)) void *memset(void *to, int byte, unsigned long n) { return __builtin_memset(to, byte, n); }
__attribute__((weak)) void *memcpy(void *to, const void *from, unsigned long n) { return __builtin_memcpy(to, from, n); }
__attribute__((weak)) void *memmove(void *to, const void *from, unsigned long n) { return __builtin_memmove(to, from, n); }
#else
#define KV_LIBC __attribute__((weak, no_builtin)) void *
KV_LIBC memset(void *to, int byte, unsigned long n) {
	for (char *t = to; n; n--) *t++ = (char)byte;
	return to;
}
KV_LIBC memmove(void *to, const void *from, unsigned long n) {
	char *t = to;
	const char *f = from;
	if (t < f) for (; n; n--) *t++ = *f++;
	else while (n--) t[n] = f[n];
	return to;
}
KV_LIBC memcpy(void *to, const void *from, unsigned long n) { return memmove(to, from, n); }
#endif

static int64_t kv_view(kv_answer a, const void *p, uint32_t bytes) {
	if (a == KV_OK) return (int64_t)((uint64_t)(uintptr_t)p << 32 | bytes);
	if (a == KV_FAILED) kv_import_fail(kv_reason, kv_reason_bytes);
	kv_reason_bytes = 0;
	return a;
}

static kv_bitmap kv_empty(uint64_t *words, uint32_t bits) {
	__builtin_memset(words, 0, (bits + 63) / 64 * 8);
	return (kv_bitmap){words, bits};
}

static kv_answer kv_pull(uint32_t *bytes) {
	if ((*bytes = kv_import_input(kv_in, sizeof kv_in)) <= sizeof kv_in) return KV_OK;
	return kv_fail("input of %u bytes; at most %u are read", *bytes, (uint32_t)sizeof kv_in);
}

// kv_begin pulls a call's input and checks its handle and its record.
static kv_answer kv_begin(int32_t handle, kv_call *c) {
	uint32_t n;
	if (kv_pull(&n)) return KV_FAILED;
	if ((uint32_t)handle >= kv_handles_count)
		return kv_fail("handle %u is not open; this instance opened %u", (uint32_t)handle, kv_handles_count);
	uint32_t size = n < 8 ? 0 : (uint32_t)kv_in[0];
	if (size < KV_ROUND_BYTES || size > KV_RECORD_BYTES_MAX || size > n)
		return kv_fail("round record: size %u in %u bytes; version 1 reads %u to %u", size, n, KV_ROUND_BYTES, KV_RECORD_BYTES_MAX);
	const kv_round *r = (const kv_round *)&kv_in[1];
	if (r->hi < r->lo || r->hi > KV_CHUNKS_MAX)
		return kv_fail("round: chunks %u to %u are no range below %u", r->lo, r->hi, KV_CHUNKS_MAX);
	*c = (kv_call){&kv_handles[handle], r, size, n - size};
	return KV_OK;
}

void KV_EXPORT(kv_abi_1)(void) {}

int64_t KV_EXPORT(kv_manifest)(void) { return kv_view(KV_OK, kv_json, kv_json_bytes); }

int64_t KV_EXPORT(kv_open)(void) {
	uint32_t n, size = 0, index = 0, count = 0;
	kv_answer a = kv_pull(&n);
	if (a == KV_OK && n >= 8) size = (uint32_t)kv_in[0], index = kv_in[0] >> 32, count = size / 8 - 1;
	if (a == KV_OK && (size < 8 || size > n || size % 8))
		a = kv_fail("kv_open: %u bytes are not a record of size, rule index and parameters", n);
	if (a == KV_OK && index >= kv_rules_count)
		a = kv_fail("kv_open: rule index is %u; this module has %u rules", index, kv_rules_count);
	if (a == KV_OK && count != kv_rules[index].params)
		a = kv_fail("kv_open: the rule takes %u parameters; %u were given", kv_rules[index].params, count);
	if (a == KV_OK && count > KV_PARAMS_MAX)
		a = kv_fail("kv_open: the rule takes %u parameters; define KV_PARAMS_MAX, which is %u", count, KV_PARAMS_MAX);
	if (a == KV_OK && (!kv_rules[index].reach || !kv_rules[index].scan))
		a = kv_fail("kv_open: KV_RULES gives rule %u no %s", index, kv_rules[index].reach ? "scan" : "reach");
	if (a == KV_OK && kv_handles_count == KV_HANDLES_MAX)
		a = kv_fail("kv_open: this instance has opened %u rules, as many as it keeps", KV_HANDLES_MAX);
	if (a == KV_OK && kv_rules[index].open) a = kv_rules[index].open(&kv_in[1]);
	if (a != KV_OK) return kv_view(a, 0, 0);
	kv_handles[kv_handles_count].rule = &kv_rules[index];
	for (uint32_t i = 0; i < count; i++) kv_handles[kv_handles_count].params[i] = kv_in[1 + i];
	return kv_handles_count++;
}

int64_t KV_EXPORT(kv_reach)(int32_t handle) {
	kv_call c;
	if (kv_begin(handle, &c)) return kv_view(KV_FAILED, 0, 0);
	kv_bitmap out = kv_empty(kv_out, c.round->hi - c.round->lo);
	return kv_view(c.by->rule->reach(c.by->params, c.round, out), kv_out, (out.bits + 7) / 8);
}

int64_t KV_EXPORT(kv_scan)(int32_t handle) {
	kv_call c;
	if (kv_begin(handle, &c)) return kv_view(KV_FAILED, 0, 0);
	uint32_t n = c.round->hi - c.round->lo, want = (n + 31) / 32 * 8;
	if (c.rest < want) {
		kv_fail("kv_scan: the states of %u chunks are %u bytes, but only %u follow the round", n, want, c.rest);
		return kv_view(KV_FAILED, 0, 0);
	}
	uint32_t skip = c.size % 8 ? KV_ROUND_BYTES : c.size; // after a record of odd size, align the states again
	if (c.size % 8) __builtin_memmove((char *)kv_in + skip, (char *)kv_in + c.size, want);
	kv_span span = {0};
	kv_answer a = c.by->rule->scan(c.by->params, c.round, (kv_states){kv_in + skip / 8, n}, kv_empty(kv_out + 1, n), &span);
	kv_out[0] = span.usable | (uint64_t)span.deferred << 32;
	return kv_view(a, kv_out, 8 + (n + 7) / 8);
}

int64_t KV_EXPORT(kv_need)(int32_t handle) {
	kv_call c;
	kv_answer a = kv_begin(handle, &c);
	if (a == KV_OK && !c.by->rule->need) a = kv_fail("kv_need: the rule gives no need, which only a policy may leave out");
	if (a != KV_OK) return kv_view(a, 0, 0);
	kv_bitmap out = kv_empty(kv_out, c.round->hi);
	return kv_view(c.by->rule->need(c.by->params, c.round, out), kv_out, (out.bits + 7) / 8);
}
